//! What happened to pages, for those who keep a mirror: stored, removed, cleared.
//!
//! At every moment stored minus removed is what a tier holds. The queue is bounded: when it overflows it is
//! thrown away, and the next reader gets `Cleared` and the whole content anew.

use crate::hash::event_hash;
use crate::tree::{Slot, Tree};

/// Where pages lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// L1, GPU memory.
    Device,
    /// L2, CPU memory.
    Host,
}

impl Tier {
    /// The name that events carry.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

/// One event; hashes are those of [`event_hash`], in the order of the path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The pages of one node are on a tier from now on.
    Stored {
        /// The tier.
        tier: Tier,
        /// A hash a page.
        hashes: Vec<i64>,
        /// Hash of the page before the first; `None` if that begins a prefix.
        parent: Option<i64>,
        /// Raw tokens of the pages (bigram: one more than positions).
        tokens: Vec<u32>,
        /// Positions in a page.
        page_size: usize,
        /// Namespace.
        extra_key: Option<String>,
        /// Namespace.
        cache_salt: Option<String>,
    },
    /// These pages have left a tier.
    Removed {
        /// The tier.
        tier: Tier,
        /// A hash a page.
        hashes: Vec<i64>,
    },
    /// Everything has left every tier.
    Cleared,
}

/// The bounded queue.
#[derive(Debug)]
pub(crate) struct EventQueue {
    events: Vec<Event>,
    capacity: usize,
    overflowed: bool,
}

impl EventQueue {
    pub fn new(capacity: usize) -> Self {
        Self { events: Vec::new(), capacity, overflowed: false }
    }

    fn push(&mut self, event: Event) {
        if self.overflowed {
            return;
        }
        if self.events.len() == self.capacity {
            self.events = Vec::new();
            self.overflowed = true;
        } else {
            self.events.push(event);
        }
    }

    /// Forgets what was queued: the tree has been emptied.
    pub fn cleared(&mut self) {
        self.overflowed = false;
        self.events.clear();
        self.events.push(Event::Cleared);
    }
}

impl Tree {
    /// The events since the last call, oldest first; empty if events are off.
    pub fn take_events(&mut self) -> Vec<Event> {
        let Some(queue) = &mut self.events else { return Vec::new() };
        let events = std::mem::take(&mut queue.events);
        if !std::mem::take(&mut queue.overflowed) {
            return events;
        }
        let mut nodes: Vec<Slot> = self.live_slots().collect();
        nodes.sort_by_key(|&slot| (self.nodes[slot as usize].start, self.nodes[slot as usize].id));
        let mut events = vec![Event::Cleared];
        for tier in [Tier::Device, Tier::Host] {
            for &slot in &nodes {
                let node = &self.nodes[slot as usize];
                let holds = match tier {
                    Tier::Device => node.on_device(),
                    Tier::Host => node.published(),
                };
                if holds {
                    events.push(self.stored_event(slot, tier));
                }
            }
        }
        events
    }

    /// Queues that a node's pages are on a tier now.
    pub(crate) fn emit_stored(&mut self, slot: Slot, tier: Tier) {
        if self.events.as_ref().is_none_or(|queue| queue.overflowed) {
            return;
        }
        let event = self.stored_event(slot, tier);
        if let Some(queue) = &mut self.events {
            queue.push(event);
        }
    }

    /// Queues that a node's pages from `keep` on have left a tier.
    pub(crate) fn emit_removed(&mut self, slot: Slot, keep: u32, tier: Tier) {
        if self.events.as_ref().is_none_or(|queue| queue.overflowed) {
            return;
        }
        let hashes = self.event_hashes(slot).split_off(keep as usize);
        if let Some(queue) = &mut self.events {
            queue.push(Event::Removed { tier, hashes });
        }
    }

    fn event_hashes(&mut self, slot: Slot) -> Vec<i64> {
        self.hash_path(slot);
        self.nodes[slot as usize].digests().iter().map(event_hash).collect()
    }

    fn stored_event(&mut self, slot: Slot, tier: Tier) -> Event {
        let hashes = self.event_hashes(slot);
        let node = &self.nodes[slot as usize];
        let namespace = self.namespaces.get(node.namespace);
        Event::Stored {
            tier,
            hashes,
            parent: self.nodes[node.parent as usize].digests().last().map(event_hash),
            tokens: node.tokens.to_vec(),
            page_size: self.shape.page,
            extra_key: namespace.extra_key.map(str::to_owned),
            cache_salt: namespace.cache_salt.map(str::to_owned),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TreeConfig;
    use crate::WritePolicy;
    use crate::tree::testing::{keys, tree_with};

    fn watched(event_capacity: usize) -> Tree {
        let write_policy = Some(WritePolicy::WriteThrough);
        tree_with(TreeConfig { events: true, event_capacity, write_policy, ..TreeConfig::default() })
    }

    #[test]
    fn parents_come_before_children_and_each_page_goes_once() {
        let mut tree = watched(100);
        let node = tree.put(&keys(0..4), 0).node;
        tree.put(&keys(0..6), 0);
        tree.get(&keys(0..2)); // a cut is no event
        let events = tree.take_events();
        let [Event::Stored { hashes: first, parent: None, tokens, .. }, Event::Stored { hashes, parent, .. }] =
            &events[..]
        else {
            panic!("{events:?}")
        };
        assert_eq!((first.len(), tokens.len(), hashes.len(), *parent), (4, 4, 2, first.last().copied()));
        tree.backed_up(&[node], 0);
        let events = tree.take_events();
        assert!(matches!(
            &events[..],
            [Event::Stored { tier: Tier::Host, .. }, Event::Stored { tier: Tier::Host, .. }]
        ));
        tree.evict(100, None);
        let removed: usize = tree
            .take_events()
            .iter()
            .map(|event| match event {
                Event::Removed { tier: Tier::Device, hashes } => hashes.len(),
                other => panic!("{other:?}"),
            })
            .sum();
        assert_eq!((removed, tree.page_hash_count()), (6, 6));
        tree.reset();
        assert_eq!(tree.take_events(), [Event::Cleared]);
        assert!(tree.take_events().is_empty());
    }

    #[test]
    fn an_overflow_gives_the_whole_content_anew() {
        let mut tree = watched(2);
        for i in 0..4 {
            tree.put(&[i, 100 + i], 2 * i);
        }
        tree.evict(2, None);
        let events = tree.take_events();
        assert_eq!(events[0], Event::Cleared);
        let stored =
            events[1..].iter().filter(|event| matches!(event, Event::Stored { tier: Tier::Device, .. }));
        assert_eq!((stored.count(), events.len()), (3, 4));
        tree.evict(2, None);
        assert!(matches!(tree.take_events()[..], [Event::Removed { .. }]));
    }
}
