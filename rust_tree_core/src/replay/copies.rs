//! Host copies that stay while the device has the pages too.
//!
//! A full host tier gives up such copies first (`Tree::evict_host`, groups 1 and 2): right where the host is the
//! smaller tier and should hold what the device does not. Where it is the larger one, and a write policy copies
//! what is new, that order lets the newest go for the sake of the oldest: the copies of what the device is about
//! to evict are gone when it does, and what came into the host first stays for ever. Host locks turn the order
//! round: a copy is locked for as long as its node is on device, so that leaves which only the host holds go
//! first. When there are none, all locks are given back.

use std::collections::HashMap;

use crate::error::Result;
use crate::{HostLockReceipt, NodeId, Tree};

#[derive(Debug)]
pub(super) struct KeptCopies {
    enabled: bool,
    /// By the node that was locked. A receipt covers the parts that were cut from its node, too.
    locks: HashMap<NodeId, HostLockReceipt>,
}

impl KeptCopies {
    pub fn new(enabled: bool) -> Self {
        Self { enabled, locks: HashMap::new() }
    }

    /// These nodes are on device and on host from now on.
    pub fn keep(&mut self, tree: &mut Tree, nodes: &[NodeId]) -> Result<()> {
        if self.enabled {
            for &node in nodes {
                self.lock(tree, node)?;
            }
        }
        Ok(())
    }

    /// These nodes left the device.
    pub fn demoted(&mut self, tree: &mut Tree, nodes: &[NodeId]) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        for &node in nodes {
            if let Some(mut lock) = self.locks.remove(&node) {
                tree.dec_host_lock_ref(&mut lock)?;
            }
            // The nodes above are still on device, and may have been cut from this one or kept by it.
            let mut below = node;
            while let Some(above) = tree.node_info(below)?.parent {
                if !self.lock(tree, above)? {
                    break;
                }
                below = above;
            }
        }
        Ok(())
    }

    /// Gives all locks back; false if there were none.
    pub fn let_go(&mut self, tree: &mut Tree) -> Result<bool> {
        let any = !self.locks.is_empty();
        for (_, mut lock) in self.locks.drain() {
            tree.dec_host_lock_ref(&mut lock)?;
        }
        Ok(any)
    }

    /// Locks the host copy of a node that is on device, too; false if there is no such copy, or it was locked.
    fn lock(&mut self, tree: &mut Tree, node: NodeId) -> Result<bool> {
        if self.locks.contains_key(&node) {
            return Ok(false);
        }
        let info = tree.node_info(node)?;
        let copied = info.device_pages.is_some() && info.host_pages.is_some();
        if copied {
            self.locks.insert(node, tree.inc_host_lock_ref(node)?);
        }
        Ok(copied)
    }
}
