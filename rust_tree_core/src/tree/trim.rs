//! Taking the tail off a node: of a last victim no more goes than is needed.

use super::node::{NONE, Pages, Slot};
use super::{Tree, digest};
use crate::events::Tier;

impl Tree {
    /// Leaves a childless, unlocked node that only one tier holds its first `keep` pages; the others go to `freed`.
    ///
    /// As if the node had been cut and its lower part removed, the old id goes with the tail and what stays has a new
    /// one. But it shrinks in place: a node that is emptied page by page is not copied each time.
    pub(super) fn trim(&mut self, slot: Slot, keep: u32, tier: Tier, freed: &mut Vec<u32>) {
        self.leave_orders(slot);
        let shape = self.shape;
        let id = self.next_id;
        self.next_id += 1;
        let node = &mut self.nodes[slot as usize];
        debug_assert!(0 < keep && keep < node.len && node.first_child == NONE);
        debug_assert!(!node.locked() && !node.host_locked() && node.pins == 0);
        self.digest = self.digest.wrapping_sub(node.contribution());
        self.slots.remove(&std::mem::replace(&mut node.id, id));
        self.slots.insert(id, slot);

        let (at, lost) = (keep as usize, u64::from(node.len - keep));
        let (parent, start, content) = (node.parent, node.start, node.content);
        let mut tokens = std::mem::take(&mut node.tokens).into_vec();
        // The sum over the pages that stay, from whichever side has fewer of them to read.
        let content = if u64::from(keep) <= lost {
            let head = digest::content(&tokens[..at * shape.page + shape.extra], shape, start);
            self.nodes[parent as usize].content.wrapping_add(head)
        } else {
            content.wrapping_sub(digest::content(&tokens[at * shape.page..], shape, start + keep))
        };
        tokens.truncate(at * shape.page + shape.extra);

        let node = &mut self.nodes[slot as usize];
        let seed = self.namespaces.seed(node.namespace);
        node.tokens = tokens.into_boxed_slice();
        node.content = content;
        node.weight = digest::weight(content, start, seed.as_ref());
        node.len = keep;
        node.digests = node.digests.take().map(|digests| {
            let mut digests = digests.into_vec();
            digests.truncate(at);
            digests.into_boxed_slice()
        });
        let state = node.full_mut();
        let value = if tier == Tier::Device { &mut state.value } else { &mut state.host_value };
        if let Some(pages) = value.take() {
            freed.extend_from_slice(&pages[at..]);
            *value = Some(Pages::from(&pages[..at]));
        }
        self.digest = self.digest.wrapping_add(node.contribution());
        match tier {
            Tier::Device => self.sizes.device -= lost,
            Tier::Host => self.sizes.host -= lost,
        }
        self.refresh(slot);
    }
}

#[cfg(test)]
mod tests {
    use crate::tree::testing::{keys, tree};
    use crate::{Gone, WritePolicy};

    #[test]
    fn a_node_emptied_from_its_tail_is_as_if_it_had_been_shorter() {
        let (mut trimmed, mut fresh) = (tree(2, None), tree(2, None));
        let node = trimmed.put(&keys(0..40), 0).node;
        trimmed.page_hashes(node).unwrap();
        for _ in 0..15 {
            assert_eq!(trimmed.evict(1, None).device_pages.len(), 1);
            trimmed.sound();
        }
        fresh.put(&keys(0..10), 0);
        assert_eq!((trimmed.digest(), trimmed.len()), (fresh.digest(), 1));
        assert_eq!(trimmed.get(&keys(0..40)).device_pages(), [0, 1, 2, 3, 4]);
        assert_eq!(trimmed.page_hash_count(), 20);
    }

    #[test]
    fn a_host_leaf_keeps_its_head() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let node = tree.put(&keys(0..8), 0).node;
        tree.backed_up(&[node], 10);
        tree.evict(8, None);
        let evicted = tree.evict_host(6);
        assert_eq!(evicted.host_pages, [12, 13, 14, 15, 16, 17]);
        assert!(tree.node_info(node).is_err());
        let heir = tree.get(&keys(0..8)).last_host_node;
        assert_eq!(evicted.gone, [Gone { node, heir, pages: 6 }]);
        assert_eq!((tree.get(&keys(0..8)).host_hit_length, tree.host_tokens()), (2, 2));
        tree.sound();
    }
}
