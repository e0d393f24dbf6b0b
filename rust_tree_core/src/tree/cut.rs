//! Cutting a node in two at a page boundary.

use super::node::{COMPONENTS, ComponentState, NONE, Pages, Slot, flag};
use super::{Tree, digest};
use crate::namespace::PLAIN;

/// The two halves of shared pages, each in memory of its own: what stays must not keep alive what goes.
fn split(pages: Option<Pages>, at: usize) -> (Option<Pages>, Option<Pages>) {
    match pages {
        None => (None, None),
        Some(pages) => (Some(Pages::from(&pages[..at])), Some(Pages::from(&pages[at..]))),
    }
}

impl Tree {
    /// Cuts a node after `at` pages. The lower part keeps the id; the upper part, which is returned, gets a new one.
    ///
    /// Everything that is so of the node is so of both parts: pages, digests, locks, marks, stamps, pins. So one
    /// ack publishes both and one unlock releases both.
    pub(super) fn cut(&mut self, slot: Slot, at: u32) -> Slot {
        let node = &self.nodes[slot as usize];
        assert!(0 < at && at < node.len, "node {} has {} pages, cut at {at}", node.id, node.len);
        self.leave_orders(slot);
        self.digest = self.digest.wrapping_sub(self.nodes[slot as usize].contribution());
        let upper = self.allocate();
        let shape = self.shape;
        let at_page = at as usize;

        let lower = &mut self.nodes[slot as usize];
        let parent = lower.parent;
        let old_hash = lower.edge_hash;
        let namespace = lower.namespace;
        let tokens = std::mem::take(&mut lower.tokens);
        let upper_tokens: Box<[u32]> = shape.run(&tokens, 0, at_page).into();
        lower.tokens = tokens[at_page * shape.page..].into();
        let (upper_digests, lower_digests) = match lower.digests.take() {
            None => (None, None),
            Some(digests) => (Some(digests[..at_page].into()), Some(digests[at_page..].into())),
        };
        lower.digests = lower_digests;
        let mut upper_components = [const { ComponentState::EMPTY }; COMPONENTS];
        for (above, below) in upper_components.iter_mut().zip(&mut lower.components) {
            above.lock_ref = below.lock_ref;
            above.host_lock_ref = below.host_lock_ref;
            (above.value, below.value) = split(below.value.take(), at_page);
            (above.host_value, below.host_value) = split(below.host_value.take(), at_page);
        }
        lower.start += at;
        lower.len -= at;

        let (lower_content, lower_start) = (lower.content, lower.start);
        let (on_device, backed) = (lower.on_device(), lower.backed());
        let (last, created, hits, priority) = (lower.last, lower.created, lower.hits, lower.priority);
        let (history, pins, hold, ack) = (lower.history, lower.pins, lower.hold, lower.ack);
        let hold_locks = lower.hold_locks;
        // The backup's lock is counted on the path of the old id, which both parts stand on.
        let flags = lower.flags
            & (flag::PENDING | flag::VICTIM | flag::DIGESTS_GIVEN | flag::WAITS | flag::UNDER_HOLDS);

        let seed = self.namespaces.seed(namespace);
        let start = lower_start - at;
        let content =
            self.nodes[parent as usize].content.wrapping_add(digest::content(&upper_tokens, shape, start));
        let lower = &mut self.nodes[slot as usize];
        lower.weight = digest::weight(lower_content, lower_start, seed.as_ref());
        let lower_hash = self.edges.hash(upper, PLAIN, &lower.tokens[..shape.width()]);
        lower.edge_hash = lower_hash;

        self.unlink(slot);
        let node = &mut self.nodes[upper as usize];
        node.weight = digest::weight(content, start, seed.as_ref());
        node.content = content;
        node.start = start;
        node.len = at;
        node.namespace = namespace;
        node.tokens = upper_tokens;
        node.digests = upper_digests;
        node.components = upper_components;
        node.edge_hash = old_hash;
        node.last = last;
        node.created = created;
        node.hits = hits;
        node.priority = priority;
        node.history = history;
        node.pins = pins;
        node.hold = hold;
        node.hold_locks = hold_locks;
        node.held_children = u32::from(hold != 0);
        node.ack = ack;
        node.flags = flags;
        node.device_children = u32::from(on_device);
        node.host_children = u32::from(backed);
        debug_assert!(node.first_child == NONE);
        self.link(upper, parent);
        self.link(slot, upper);
        self.edges.remove(old_hash, slot);
        self.edges.insert(old_hash, upper);
        self.edges.insert(lower_hash, slot);
        self.namespaces.acquire_id(namespace);
        for part in [upper, slot] {
            self.digest = self.digest.wrapping_add(self.nodes[part as usize].contribution());
        }
        self.follow_cut(upper, slot);
        self.refresh(upper);
        self.refresh(slot);
        upper
    }

    /// Enters the upper part wherever the node's copies are listed, just before the lower part.
    fn follow_cut(&mut self, upper: Slot, lower: Slot) {
        let (upper_id, node) = (self.nodes[upper as usize].id, &self.nodes[lower as usize]);
        let lower_id = node.id;
        let insert_before = |ids: &mut Vec<u64>| {
            if let Some(at) = ids.iter().position(|&id| id == lower_id) {
                ids.insert(at, upper_id);
            }
        };
        if node.has(flag::PENDING_BACKUP)
            && let Some(pending) = self.backups.get_mut(&node.ack)
        {
            insert_before(&mut pending.nodes);
        }
        if node.has(flag::PENDING_LOAD)
            && let Some(pending) = self.load_backs.get_mut(&node.ack)
        {
            insert_before(&mut pending.nodes);
        }
        if node.host_locked() {
            for plan in self.plans.values_mut() {
                insert_before(&mut plan.nodes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::tree::testing::{keys, tree};
    use crate::{Tokens, WritePolicy};

    #[test]
    fn both_parts_keep_all_that_was_so_of_the_node() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let node = tree.put(&keys(0..10), 0).node;
        let hashes = tree.page_hashes(node).unwrap();
        let mut host = tree.inc_host_lock_ref(node).unwrap();
        let mut device = tree.inc_lock_ref(node).unwrap();
        let pages: Vec<u32> = (50..60).collect();
        let ack = tree.begin_backup(&[node], &pages).unwrap();
        let before = tree.node_info(node).unwrap();
        let upper = tree.get(&keys(0..6)).last_device_node;
        let (above, below) = (tree.node_info(upper).unwrap(), tree.node_info(node).unwrap());
        for part in [&above, &below] {
            assert_eq!((part.lock_ref, part.host_lock_ref), (before.lock_ref, before.host_lock_ref));
            assert_eq!((part.pending, part.hit_count), (Some(ack), before.hit_count));
        }
        assert_eq!((above.host_pages, below.host_pages), (Some(pages[..6].into()), Some(pages[6..].into())));
        assert_eq!([tree.page_hashes(upper).unwrap(), tree.page_hashes(node).unwrap()].concat(), hashes);
        assert_eq!(tree.page_hash_count(), 10);
        tree.sound();
        // One ack publishes both, one unlock releases both.
        assert_eq!(tree.finish_backup(ack).unwrap().nodes, [upper, node]);
        tree.dec_host_lock_ref(&mut host).unwrap();
        tree.dec_lock_ref(&mut device).unwrap();
        assert_eq!((tree.protected_tokens(), tree.host_tokens()), (0, 10));
        tree.sound();
    }

    #[test]
    #[should_panic(expected = "cut at 0")]
    fn a_cut_at_the_start_is_refused() {
        let mut tree = tree(1, None);
        let node = tree.put(&keys(0..4), 0).node;
        let slot = tree.slot(node).unwrap();
        tree.cut(slot, 0);
    }

    #[test]
    #[should_panic(expected = "cut at 4")]
    fn a_cut_at_the_end_is_refused() {
        let mut tree = tree(1, None);
        let node = tree.put(&keys(0..4), 0).node;
        let slot = tree.slot(node).unwrap();
        tree.cut(slot, 4);
    }

    #[test]
    fn every_child_stays_under_its_own_first_page() {
        let mut tree = tree(2, None);
        tree.put(&keys(0..64), 0);
        for length in [30, 10, 50, 12, 2, 62] {
            tree.get(&keys(0..length));
            tree.sound();
        }
        assert_eq!(tree.get(&keys(0..64)).device_pages(), keys(0..32));
        let peek = tree.peek_prefix(Tokens::U32(&keys(0..31)), crate::Namespace::default(), true).unwrap();
        assert_eq!(peek.device_length, 30);
    }
}
