//! Locks keep pages in their tier: device locks hold the whole path, host locks hold one node.

use super::node::Slot;
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
            if first {
                self.lock_changed(slot, true);
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
            if last {
                self.lock_changed(slot, false);
            }
            slot = parent;
        }
        self.digest = self.digest.wrapping_sub(digest::lock_delta(weights));
    }

    /// A node's first lock came or its last one went.
    #[inline]
    fn lock_changed(&mut self, slot: Slot, locked: bool) {
        let node = &self.nodes[slot as usize];
        if node.on_device() {
            let pages = u64::from(node.len);
            self.sizes.protected =
                if locked { self.sizes.protected + pages } else { self.sizes.protected - pages };
        }
        // A node with children on device is neither kind of leaf, whatever its locks: its places stay.
        if node.device_children == 0 {
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
