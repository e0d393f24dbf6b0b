//! Locks keep pages in their tier: device locks hold the whole path, host locks hold one node.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::node::{Slot, flag};
use super::{Origin, Tree, digest};
use crate::NodeId;
use crate::error::{Result, bad_lock};

/// A device lock on the path of a node. Not released when it is dropped: only the tree can do that.
#[derive(Debug)]
pub struct LockReceipt {
    origin: Origin,
    node: NodeId,
    released: bool,
}

impl LockReceipt {
    /// The node that was locked.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// True once it was given back.
    pub fn released(&self) -> bool {
        self.released
    }
}

/// A host lock on one node, and on the parts into which it is cut.
#[derive(Debug)]
pub struct HostLockReceipt {
    origin: Origin,
    node: NodeId,
    /// Page at which the node began: parts cut off above begin there or later.
    start: u32,
    released: bool,
}

impl HostLockReceipt {
    /// The node that was locked.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// True once it was given back.
    pub fn released(&self) -> bool {
        self.released
    }
}

impl Tree {
    /// Locks the path from the root to a node on device: none of it is evicted until the receipt is back.
    pub fn inc_lock_ref(&mut self, node: NodeId) -> Result<LockReceipt> {
        let slot = self.slot(node)?;
        self.lock_path(slot);
        Ok(LockReceipt { origin: self.origin, node, released: false })
    }

    /// Gives a device lock back. A second time, or to another tree, is an error that changes nothing.
    pub fn dec_lock_ref(&mut self, receipt: &mut LockReceipt) -> Result<()> {
        let what = "device lock";
        let slot = self.receipt_slot(receipt.origin, receipt.node, receipt.released, what)?;
        if slot != self.root && !self.nodes[slot as usize].locked() {
            return Err(bad_lock!("{what} on node {}: its count is 0", receipt.node));
        }
        receipt.released = true;
        self.unlock_path(slot);
        Ok(())
    }

    /// Locks the host pages of one node.
    pub fn inc_host_lock_ref(&mut self, node: NodeId) -> Result<HostLockReceipt> {
        let slot = self.slot(node)?;
        let start = self.nodes[slot as usize].start;
        if slot != self.root {
            self.host_lock(slot);
        }
        Ok(HostLockReceipt { origin: self.origin, node, start, released: false })
    }

    /// Gives a host lock back on every part of the node that was locked.
    pub fn dec_host_lock_ref(&mut self, receipt: &mut HostLockReceipt) -> Result<()> {
        let what = "host lock";
        let slot = self.receipt_slot(receipt.origin, receipt.node, receipt.released, what)?;
        let parts: Vec<Slot> = self
            .ancestors(slot)
            .take_while(|&part| self.nodes[part as usize].start >= receipt.start)
            .collect();
        if let Some(&part) = parts.iter().find(|&&part| !self.nodes[part as usize].host_locked()) {
            return Err(bad_lock!("{what} on node {}: its count is 0", self.nodes[part as usize].id));
        }
        receipt.released = true;
        for part in parts {
            self.host_unlock(part);
        }
        Ok(())
    }

    fn receipt_slot(&self, origin: Origin, node: NodeId, released: bool, what: &str) -> Result<Slot> {
        self.check_origin(origin, &format!("{what} on node {node}"))?;
        if released {
            return Err(bad_lock!("{what} on node {node} was given back before"));
        }
        // A locked node lives: a receipt of this tree that is still out names a living node.
        self.slot(node)
    }

    /// One device lock more on a node and everything above it.
    pub(super) fn lock_path(&mut self, from: Slot) {
        let mut slot = from;
        let mut weights = 0_u64;
        while slot != self.root {
            let node = &mut self.nodes[slot as usize];
            let state = node.full_mut();
            state.lock_ref += 1;
            let first = state.lock_ref == 1;
            weights = weights.wrapping_add(node.weight);
            let parent = node.parent;
            if first || node.has(flag::UNDER_HOLDS) {
                self.lock_changed(slot, first, true);
            }
            slot = parent;
        }
        self.digest = self.digest.wrapping_add(digest::lock_delta(weights));
    }

    /// One device lock less on a node and everything above it.
    pub(super) fn unlock_path(&mut self, from: Slot) {
        let mut slot = from;
        let mut weights = 0_u64;
        while slot != self.root {
            let node = &mut self.nodes[slot as usize];
            let state = node.full_mut();
            state.lock_ref -= 1;
            let last = state.lock_ref == 0;
            weights = weights.wrapping_add(node.weight);
            let parent = node.parent;
            if last || node.has(flag::UNDER_HOLDS) {
                self.lock_changed(slot, last, false);
            }
            slot = parent;
        }
        self.digest = self.digest.wrapping_sub(digest::lock_delta(weights));
    }

    /// Locks or unlocks the paths of many nodes. Each node above them is visited once, however many stand on one
    /// path.
    pub(super) fn shift_path_locks(&mut self, slots: &[Slot], lock: bool) {
        if let [slot] = slots {
            return if lock { self.lock_path(*slot) } else { self.unlock_path(*slot) };
        }
        // Deepest first: when a node's turn comes, all that is counted below it has been handed up.
        let mut counts: BTreeMap<(Reverse<u32>, Slot), u32> = BTreeMap::new();
        for &slot in slots {
            *counts.entry((Reverse(self.nodes[slot as usize].start), slot)).or_default() += 1;
        }
        let mut weights = 0_u64;
        while let Some(((_, slot), count)) = counts.pop_first() {
            if slot == self.root {
                continue;
            }
            let node = &mut self.nodes[slot as usize];
            let state = node.full_mut();
            let before = state.lock_ref;
            state.lock_ref = if lock { before + count } else { before - count };
            let edge = before == 0 || state.lock_ref == 0;
            weights = weights.wrapping_add(node.weight.wrapping_mul(u64::from(count)));
            let parent = node.parent;
            if edge || node.has(flag::UNDER_HOLDS) {
                self.lock_changed(slot, edge, lock);
            }
            *counts.entry((Reverse(self.nodes[parent as usize].start), parent)).or_default() += count;
        }
        let delta = digest::lock_delta(weights);
        self.digest = if lock { self.digest.wrapping_add(delta) } else { self.digest.wrapping_sub(delta) };
    }

    /// A node's locks have changed; at an `edge` its first one came or its last one went.
    #[inline]
    fn lock_changed(&mut self, slot: Slot, edge: bool, locked: bool) {
        let node = &self.nodes[slot as usize];
        if edge && node.on_device() {
            let pages = u64::from(node.len);
            self.sizes.protected =
                if locked { self.sizes.protected + pages } else { self.sizes.protected - pages };
        }
        // A node with children on device is neither kind of leaf, whatever its locks: its places stay. But where
        // these children are held, it matters who else locks it.
        if node.device_children == 0 || node.has(flag::UNDER_HOLDS) {
            self.refresh(slot);
        }
    }

    /// One host lock more on one node.
    pub(super) fn host_lock(&mut self, slot: Slot) {
        self.edit(slot, |node| node.full_mut().host_lock_ref += 1);
        self.refresh(slot);
    }

    /// One host lock less on one node.
    pub(super) fn host_unlock(&mut self, slot: Slot) {
        self.edit(slot, |node| node.full_mut().host_lock_ref -= 1);
        self.refresh(slot);
    }
}

#[cfg(test)]
mod tests {
    use crate::Error;
    use crate::tree::testing::{keys, tree};

    #[test]
    fn a_lock_made_by_a_match_is_released_whole_after_cuts() {
        let mut tree = tree(1, None);
        tree.put(&keys(1..11), 0);
        let mut key = keys(1..7);
        key.push(99);
        let node = tree.get(&key).last_device_node;
        let mut lock = tree.inc_lock_ref(node).unwrap();
        assert_eq!((tree.protected_tokens(), tree.evictable_tokens()), (6, 4));
        tree.put(&[1, 2, 3, 4, 5, 6, 50, 51], 20);
        assert_eq!(tree.evict(100, None).device_pages.len(), 6);
        tree.dec_lock_ref(&mut lock).unwrap();
        assert_eq!(tree.protected_tokens(), 0);
        assert_eq!((tree.evict(100, None).device_pages.len(), tree.len()), (6, 0));
        tree.sound();
    }

    #[test]
    fn a_second_or_foreign_release_changes_nothing() {
        let mut one = tree(1, None);
        let mut other = tree(1, None);
        let node = one.put(&keys(0..3), 0).node;
        other.put(&keys(0..3), 0);
        let mut lock = one.inc_lock_ref(node).unwrap();
        let mut host = one.inc_host_lock_ref(node).unwrap();
        assert!(
            matches!(other.dec_lock_ref(&mut lock), Err(Error::Lock(text)) if text.contains("another tree"))
        );
        assert!(matches!(other.dec_host_lock_ref(&mut host), Err(Error::Lock(_))));
        one.dec_lock_ref(&mut lock).unwrap();
        one.dec_host_lock_ref(&mut host).unwrap();
        let digest = one.digest();
        assert!(matches!(one.dec_lock_ref(&mut lock), Err(Error::Lock(text)) if text.contains("node 1")));
        assert!(
            matches!(one.dec_host_lock_ref(&mut host), Err(Error::Lock(text)) if text.contains("node 1"))
        );
        assert_eq!(one.inc_lock_ref(77).unwrap_err(), Error::UnknownNode(77));
        assert_eq!((one.digest(), one.protected_tokens()), (digest, 0));
        one.sound();
    }

    #[test]
    fn a_reset_makes_receipts_stale() {
        let mut tree = tree(1, None);
        let node = tree.put(&keys(0..3), 0).node;
        let mut lock = tree.inc_lock_ref(node).unwrap();
        let root = tree.root();
        tree.reset();
        assert!(matches!(tree.dec_lock_ref(&mut lock), Err(Error::Lock(text)) if text.contains("reset")));
        assert_eq!(tree.inc_lock_ref(node).unwrap_err(), Error::UnknownNode(node));
        assert_eq!(tree.inc_lock_ref(root).unwrap_err(), Error::UnknownNode(root));
        let again = tree.put(&keys(0..3), 0).node;
        assert!(again > node);
        tree.sound();
    }

    #[test]
    fn the_root_is_locked_by_a_receipt_that_does_nothing() {
        let mut tree = tree(1, None);
        let mut lock = tree.inc_lock_ref(tree.root()).unwrap();
        let mut host = tree.inc_host_lock_ref(tree.root()).unwrap();
        tree.dec_lock_ref(&mut lock).unwrap();
        tree.dec_host_lock_ref(&mut host).unwrap();
        assert!(tree.dec_lock_ref(&mut lock).is_err());
    }

    #[test]
    fn a_host_lock_covers_the_parts_of_its_node_and_no_more() {
        let mut tree = tree(1, None);
        let above = tree.put(&keys(0..2), 0).node;
        let node = tree.put(&keys(0..8), 0).node;
        let mut lock = tree.inc_host_lock_ref(node).unwrap();
        let middle = tree.get(&keys(0..6)).last_device_node;
        let upper = tree.get(&keys(0..4)).last_device_node;
        let mut late = tree.inc_host_lock_ref(node).unwrap();
        let count = |tree: &crate::Tree, node| tree.node_info(node).unwrap().host_lock_ref;
        assert_eq!([above, upper, middle, node].map(|id| count(&tree, id)), [0, 1, 1, 2]);
        tree.dec_host_lock_ref(&mut lock).unwrap();
        assert_eq!([above, upper, middle, node].map(|id| count(&tree, id)), [0, 0, 0, 1]);
        tree.dec_host_lock_ref(&mut late).unwrap();
        tree.sound();
    }
}
