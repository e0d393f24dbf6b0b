//! Making room on device and on host: which nodes go, in one plan a call.

use super::node::{Slot, flag};
use super::Tree;
use crate::NodeId;
use crate::error::{Error, Result, bad_argument, bad_lock};
use crate::events::Tier;

/// What an eviction did, and what it asks the caller to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Device pages that are free now, in order of the victims.
    pub device_pages: Vec<u32>,
    /// Host pages of nodes that left the tree.
    pub host_pages: Vec<u32>,
    /// Nodes that only the host holds now.
    pub demoted_nodes: Vec<NodeId>,
    /// Nodes to be backed up (or dropped); locked until that has begun, their device pages come with the ack.
    pub write_back_nodes: Vec<NodeId>,
    /// Tokens whose last copy went.
    pub dropped_tokens: u64,
}

impl Tree {
    /// Plans room for `num_pages` device pages, by the policy's order over the device leaves.
    ///
    /// A leaf with a host copy is demoted. One without goes to host first where the write policy (or a pin) says
    /// so and `host_room` (host pages that write-backs may use; `None`: any number) allows it; otherwise it is
    /// deleted, with all that only the host holds below it, and of the last one only as much as is needed.
    pub fn evict(&mut self, num_pages: usize, host_room: Option<usize>) -> Evicted {
        let mut out = Evicted::default();
        let mut room = host_room.unwrap_or(usize::MAX);
        let mut skipped = Vec::new();
        let mut needed = num_pages;
        while needed > 0 {
            let Some((_, slot)) = self.device_order.pop_first() else { break };
            let node = &mut self.nodes[slot as usize];
            node.flags &= !flag::IN_DEVICE_ORDER;
            let pages = node.len as usize;
            if node.backed() {
                self.demote(slot, &mut out);
                needed = needed.saturating_sub(pages);
                continue;
            }
            let pinned = node.pins > 0;
            if pinned || self.is_write_back() {
                let cost = self.write_back_cost(slot);
                if cost <= room {
                    room -= cost;
                    self.hold(slot, &mut out);
                    needed = needed.saturating_sub(pages);
                    continue;
                }
            }
            if !self.may_drop(slot) {
                skipped.push(slot);
                continue;
            }
            if pages > needed {
                self.cut(slot, (pages - needed) as u32);
            }
            needed -= pages.min(needed);
            self.drop_subtree(slot, &mut out);
        }
        for slot in skipped {
            self.refresh(slot);
        }
        out
    }

    /// Gives up nodes that `evict` named for write-back: they are deleted, unless somebody uses them by now.
    pub fn drop_nodes(&mut self, nodes: &[NodeId]) -> Result<Evicted> {
        for (at, &id) in nodes.iter().enumerate() {
            let node = &self.nodes[self.slot(id)? as usize];
            if node.hold != id || id == 0 {
                return Err(bad_lock!("node {id} is not held for write-back"));
            }
            if nodes[..at].contains(&id) {
                return Err(bad_argument!("nodes names node {id} twice"));
            }
        }
        let mut out = Evicted::default();
        for &id in nodes {
            // An earlier one of the list can not have taken this one along: held nodes are locked.
            let slot = self.slot(id)?;
            let parts = self.release_hold(slot);
            for part in parts {
                if self.nodes[part as usize].is_device_leaf() && self.may_drop(part) {
                    self.drop_subtree(part, &mut out);
                }
            }
        }
        Ok(out)
    }

    /// Frees at least `num_pages` host pages where that can be done, and returns them.
    ///
    /// First copies of nodes that stay on device, then copies of device leaves, which may be evicted soon, then
    /// nodes that only the host holds; of the last of these only as much as is needed goes.
    pub fn evict_host(&mut self, num_pages: usize) -> Vec<u32> {
        let mut freed = Vec::new();
        while freed.len() < num_pages {
            self.settle_host_order();
            let Some(((group, _), slot)) = self.host_order.pop_first() else { break };
            self.nodes[slot as usize].flags &= !flag::IN_HOST_ORDER;
            let pages = self.nodes[slot as usize].len as usize;
            let needed = num_pages - freed.len();
            if group == 3 && pages > needed {
                self.cut(slot, (pages - needed) as u32);
            }
            self.emit_removed(slot, Tier::Host);
            freed.extend_from_slice(&self.take_host_value(slot));
            if group == 3 {
                self.remove(slot);
            }
        }
        freed
    }

    /// A backed node leaves the device.
    pub(super) fn demote(&mut self, slot: Slot, out: &mut Evicted) {
        self.emit_removed(slot, Tier::Device);
        out.device_pages.extend_from_slice(&self.take_value(slot));
        out.demoted_nodes.push(self.nodes[slot as usize].id);
    }

    /// Host pages that writing this node back takes: its own and, where host copies may have no gaps, those of
    /// the nodes above it that have none yet.
    fn write_back_cost(&self, slot: Slot) -> usize {
        let own = self.nodes[slot as usize].len as usize;
        if !self.is_gap_free() {
            return own;
        }
        let above = self.ancestors(slot).skip(1).map(|above| &self.nodes[above as usize]);
        own + above.filter(|node| !node.backed() && !node.held()).map(|node| node.len as usize).sum::<usize>()
    }

    /// Names a victim for write-back and locks it until that begins.
    fn hold(&mut self, slot: Slot, out: &mut Evicted) {
        let id = self.nodes[slot as usize].id;
        self.edit(slot, |node| node.hold = id);
        self.lock_path(slot);
        out.write_back_nodes.push(id);
    }

    /// Ends a hold: gives its lock back and returns the parts it covered, deepest first.
    pub(super) fn release_hold(&mut self, slot: Slot) -> Vec<Slot> {
        let parts = self.clear_hold(slot);
        self.unlock_path(slot);
        parts
    }

    /// Takes the marks of a hold away, not its lock. `slot` is the node that was held first.
    pub(super) fn clear_hold(&mut self, slot: Slot) -> Vec<Slot> {
        let hold = self.nodes[slot as usize].hold;
        let parts: Vec<Slot> =
            self.ancestors(slot).take_while(|&part| self.nodes[part as usize].hold == hold).collect();
        for &part in &parts {
            self.edit(part, |node| node.hold = 0);
        }
        parts
    }

    /// True if a device leaf without host copy may leave the tree with all that hangs below it.
    fn may_drop(&self, slot: Slot) -> bool {
        let node = &self.nodes[slot as usize];
        if node.backed() || node.pins > 0 || node.host_locked() {
            return false;
        }
        let mut below: Vec<Slot> = self.children(slot).collect();
        while let Some(slot) = below.pop() {
            let node = &self.nodes[slot as usize];
            if node.locked() || node.host_locked() || node.has(flag::PENDING) || node.pins > 0 {
                return false;
            }
            below.extend(self.children(slot));
        }
        true
    }

    /// Deletes a device leaf without host copy, and what only the host holds below it.
    fn drop_subtree(&mut self, slot: Slot, out: &mut Evicted) {
        self.emit_removed(slot, Tier::Device);
        let pages = self.take_value(slot);
        out.device_pages.extend_from_slice(&pages);
        out.dropped_tokens += self.in_tokens(pages.len() as u64);
        if self.nodes[slot as usize].first_child != super::NONE {
            let mut below = self.descendants(slot);
            below.sort_by_key(|&slot| {
                let node = &self.nodes[slot as usize];
                (std::cmp::Reverse(node.start), node.id)
            });
            for slot in below {
                out.dropped_tokens += self.in_tokens(u64::from(self.nodes[slot as usize].len));
                self.drop_host_only(slot, &mut out.host_pages);
            }
        }
        self.remove(slot);
    }

    /// Deletes a childless node that only the host holds.
    pub(super) fn drop_host_only(&mut self, slot: Slot, host_pages: &mut Vec<u32>) {
        if self.nodes[slot as usize].published() {
            self.emit_removed(slot, Tier::Host);
        }
        host_pages.extend_from_slice(&self.take_host_value(slot));
        self.remove(slot);
    }

    /// The error for a call that needs a host tier.
    pub(super) fn need_host(&self, what: &str) -> Result<()> {
        if self.has_host() {
            return Ok(());
        }
        let text = format!("{what} needs a host tier, but write_policy is None");
        Err(Error::Argument(text))
    }
}
