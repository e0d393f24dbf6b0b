//! Page digests straight from their definition, events, and what the tiers hold.

use std::collections::BTreeSet;

use rust_tree_core::{Event, NodeId, Tier};
use sha2::{Digest, Sha256};

use super::{Faults, Kind, ModelTree, Names, Position};

/// The digests of all pages of a key that begins at the root.
pub fn page_digests(key: &[Position], page_size: usize, names: &Names) -> Vec<[u8; 32]> {
    let mut before = namespace_seed(names);
    let mut digests = Vec::new();
    for page in key.chunks_exact(page_size) {
        let mut hash = Sha256::new();
        hash.update(&before);
        for (token, next) in page {
            hash.update(token.to_le_bytes());
            if let Some(next) = next {
                hash.update(next.to_le_bytes());
            }
        }
        let digest: [u8; 32] = hash.finalize().into();
        before = digest.to_vec();
        digests.push(digest);
    }
    digests
}

fn namespace_seed(names: &Names) -> Vec<u8> {
    if *names == (None, None) {
        return Vec::new();
    }
    let mut hash = Sha256::new();
    hash.update(b"sglang-cache-namespace-v1");
    for name in [&names.0, &names.1] {
        match name {
            None => hash.update([0]),
            Some(name) => {
                hash.update([1]);
                hash.update((name.len() as u64).to_le_bytes());
                hash.update(name.as_bytes());
            }
        }
    }
    hash.finalize().to_vec()
}

fn event_hash(digest: &[u8; 32]) -> i64 {
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    i64::from_be_bytes(first)
}

impl ModelTree {
    pub fn prefix_hashes(&self, id: NodeId) -> Result<Vec<[u8; 32]>, Faults> {
        if id == self.root {
            return Ok(Vec::new());
        }
        let node = self.nodes.get(&id).ok_or([Kind::UnknownNode])?;
        let size = self.config.page_size;
        Ok(page_digests(&node.key, size, &node.names))
    }

    pub fn page_hashes(&self, id: NodeId) -> Result<Vec<[u8; 32]>, Faults> {
        let mut hashes = self.prefix_hashes(id)?;
        let above = self.nodes.get(&id).map_or(0, |node| node.start) / self.config.page_size;
        Ok(hashes.split_off(above))
    }

    fn event_hashes(&self, id: NodeId) -> Vec<i64> {
        let hashes = self.page_hashes(id).expect("a live node");
        hashes.iter().map(event_hash).collect()
    }

    fn stored_event(&self, tier: Tier, id: NodeId) -> Event {
        let node = &self.nodes[&id];
        let own = &node.key[node.start..];
        let mut tokens: Vec<u32> = own.iter().map(|position| position.0).collect();
        tokens.extend(own.last().and_then(|position| position.1));
        let parent = self.prefix_hashes(node.parent).expect("a live node");
        Event::Stored {
            tier,
            hashes: self.event_hashes(id),
            parent: parent.last().map(event_hash),
            tokens,
            page_size: self.config.page_size,
            extra_key: node.names.0.clone(),
            cache_salt: node.names.1.clone(),
        }
    }

    pub(super) fn emit_stored(&mut self, tier: Tier, id: NodeId) {
        if self.config.events {
            self.emit(self.stored_event(tier, id));
        }
    }

    pub(super) fn emit_removed(&mut self, tier: Tier, id: NodeId) {
        if self.config.events {
            let hashes = self.event_hashes(id);
            self.emit(Event::Removed { tier, hashes });
        }
    }

    /// Host events for what was not published `before`, by depth, then id. Gives these nodes.
    pub(super) fn emit_published(&mut self, before: &BTreeSet<NodeId>) -> Vec<NodeId> {
        let now = self.all_published();
        let published = self.by_depth(now.difference(before).copied());
        for &id in &published {
            self.emit_stored(Tier::Host, id);
        }
        published
    }

    pub(super) fn emit(&mut self, event: Event) {
        if !self.config.events || self.events_lost {
            return;
        }
        self.events.push(event);
        if self.events.len() > self.config.event_capacity {
            self.events.clear();
            self.events_lost = true;
        }
    }

    pub fn take_events(&mut self) -> Vec<Event> {
        if !self.events_lost {
            return std::mem::take(&mut self.events);
        }
        self.events_lost = false;
        let mut events = vec![Event::Cleared];
        let all = self.by_depth(self.nodes.keys().copied());
        for &id in all.iter().filter(|id| self.nodes[id].on_device()) {
            events.push(self.stored_event(Tier::Device, id));
        }
        for &id in all.iter().filter(|id| self.published(&self.nodes[id])) {
            events.push(self.stored_event(Tier::Host, id));
        }
        events
    }

    /// The event hashes of the pages that are on device, and of those that are on host.
    pub fn content(&self) -> (BTreeSet<i64>, BTreeSet<i64>) {
        let mut device = BTreeSet::new();
        let mut host = BTreeSet::new();
        for (&id, node) in &self.nodes {
            if node.on_device() {
                device.extend(self.event_hashes(id));
            }
            if self.published(node) {
                host.extend(self.event_hashes(id));
            }
        }
        (device, host)
    }
}
