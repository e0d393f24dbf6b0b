//! An ordered set of nodes that lives across calls: the next victim is found without a rebuild.

use std::collections::BTreeSet;

use crate::NodeId;
use crate::tree::Slot;

/// Nodes by rank, then by id. A B-tree: the first element and the newest stay in cache, so that taking a
/// victim costs the same at a thousand and at a million leaves, and the order is exact at any time.
#[derive(Debug)]
pub(crate) struct Order<R> {
    set: BTreeSet<(R, NodeId, Slot)>,
}

impl<R: Ord + Copy> Order<R> {
    pub fn new() -> Self {
        Self { set: BTreeSet::new() }
    }

    pub fn insert(&mut self, rank: R, id: NodeId, slot: Slot) {
        self.set.insert((rank, id, slot));
    }

    /// True if the node stood there with this rank.
    pub fn remove(&mut self, rank: R, id: NodeId, slot: Slot) -> bool {
        self.set.remove(&(rank, id, slot))
    }

    /// Takes the node that goes first.
    pub fn pop_first(&mut self) -> Option<(R, Slot)> {
        self.set.pop_first().map(|(rank, _, slot)| (rank, slot))
    }

    pub fn iter(&self) -> impl Iterator<Item = &(R, NodeId, Slot)> {
        self.set.iter()
    }
}
