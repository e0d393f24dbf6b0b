//! Making room on device and on host: which nodes go, in one plan a call.

use std::collections::{HashMap, HashSet};

use super::node::{Slot, flag};
use super::{ById, Tree};
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

/// What an eviction from the host did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostEvicted {
    /// Host pages that are free now, in order of the victims.
    pub host_pages: Vec<u32>,
    /// The victims.
    pub gone: Vec<Gone>,
}

/// A node that lost its host copy, or the tail of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// Its id, which names nothing any more if that was the last copy.
    pub node: NodeId,
    /// The node at whose end the lost pages began: its parent, or its own head, which has a new id.
    pub heir: NodeId,
    /// How many pages it lost.
    pub pages: usize,
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
            self.drop_subtree(slot, pages.saturating_sub(needed) as u32, &mut out);
            needed = needed.saturating_sub(pages);
        }
        for slot in skipped {
            self.refresh(slot);
        }
        out
    }

    /// Gives up nodes that `evict` named for write-back: they are deleted, unless somebody uses them by now.
    pub fn drop_nodes(&mut self, nodes: &[NodeId]) -> Result<Evicted> {
        let mut listed = HashSet::new();
        for &id in nodes {
            let node = &self.nodes[self.slot(id)? as usize];
            if node.hold != id || id == 0 {
                return Err(bad_lock!("node {id} is not held for write-back"));
            }
            if !listed.insert(id) {
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
                    self.drop_subtree(part, 0, &mut out);
                }
            }
        }
        Ok(out)
    }

    /// Frees at least `num_pages` host pages where that can be done.
    ///
    /// First copies of nodes that stay on device, then copies of device leaves, which may be evicted soon, then
    /// nodes that only the host holds (or these before all copies: `TreeConfig::host_order`); of the last of these
    /// only as much as is needed goes.
    pub fn evict_host(&mut self, num_pages: usize) -> HostEvicted {
        let (mut freed, mut gone) = (Vec::new(), Vec::new());
        while freed.len() < num_pages {
            self.settle_host_order();
            let Some(((group, _), slot)) = self.host_order.pop_first() else { break };
            self.nodes[slot as usize].flags &= !flag::IN_HOST_ORDER;
            let (node, pages) = (self.nodes[slot as usize].id, self.nodes[slot as usize].len as usize);
            let needed = num_pages - freed.len();
            if group == self.host_leaves && pages > needed {
                let keep = (pages - needed) as u32;
                self.emit_removed(slot, keep, Tier::Host);
                self.trim(slot, keep, Tier::Host, &mut freed);
                gone.push(Gone { node, heir: self.nodes[slot as usize].id, pages: needed });
                break;
            }
            self.emit_removed(slot, 0, Tier::Host);
            freed.extend_from_slice(&self.take_host_value(slot));
            let parent = self.nodes[slot as usize].parent;
            gone.push(Gone { node, heir: self.nodes[parent as usize].id, pages });
            if group == self.host_leaves {
                self.remove(slot);
            }
        }
        HostEvicted { host_pages: freed, gone }
    }

    /// How many host pages `evict_host(limit)` would free, at most `limit`; nothing changes.
    ///
    /// Exactly as many as it would return, but that a copy of a node on device goes whole: what it would free past
    /// `limit` is not counted. Costs as much as there are nodes in the pages counted.
    pub fn evictable_host_pages(&mut self, limit: usize) -> usize {
        self.count_host_victims(limit).0
    }

    /// The same, and how many nodes were counted.
    ///
    /// No victim keeps another one from going, so their order is of no matter: those that could go now, and each
    /// node above them as soon as the last child that keeps it has been counted.
    fn count_host_victims(&mut self, limit: usize) -> (usize, usize) {
        let (mut pages, mut nodes) = (0, 0);
        if limit == 0 {
            return (pages, nodes);
        }
        self.settle_host_order();
        // Of nodes with several children in the way: how many of those have been counted.
        let mut gone: ById<u32> = HashMap::default();
        for &(_, _, candidate) in self.host_order.iter() {
            let mut slot = candidate;
            loop {
                let node = &self.nodes[slot as usize];
                nodes += 1;
                pages += node.len as usize;
                if pages >= limit {
                    return (limit, nodes);
                }
                slot = node.parent;
                let parent = &self.nodes[slot as usize];
                if !parent.may_leave_host() {
                    break; // such as the root
                }
                match self.children_that_keep_on_host(parent) {
                    0 => break, // a candidate already
                    1 => {}
                    all => {
                        let gone = gone.entry(parent.id).or_default();
                        *gone += 1;
                        if *gone < all {
                            break;
                        }
                    }
                }
            }
        }
        (pages, nodes)
    }

    /// A backed node leaves the device.
    pub(super) fn demote(&mut self, slot: Slot, out: &mut Evicted) {
        self.emit_removed(slot, 0, Tier::Device);
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
        own + above.filter(|node| !node.backed()).map(|node| node.len as usize).sum::<usize>()
    }

    /// Names a victim for write-back and locks it until that begins.
    fn hold(&mut self, slot: Slot, out: &mut Evicted) {
        let id = self.nodes[slot as usize].id;
        self.shift_hold_locks(slot, true);
        self.lock_path(slot);
        self.set_hold(slot, id);
        out.write_back_nodes.push(id);
    }

    /// Puts a node under a hold, or (0) takes it out of one.
    pub(super) fn set_hold(&mut self, slot: Slot, hold: NodeId) {
        let before = self.edit(slot, |node| std::mem::replace(&mut node.hold, hold));
        let parent = self.nodes[slot as usize].parent;
        if (before != 0) != (hold != 0) {
            let held = &mut self.nodes[parent as usize].held_children;
            *held = if hold == 0 { *held - 1 } else { *held + 1 };
        }
        self.refresh(slot);
        self.refresh(parent);
    }

    /// Counts one hold's lock more or less on a node and everything above it.
    pub(super) fn shift_hold_locks(&mut self, from: Slot, more: bool) {
        let mut slot = from;
        while slot != self.root {
            let node = &mut self.nodes[slot as usize];
            node.hold_locks = if more { node.hold_locks + 1 } else { node.hold_locks - 1 };
            let parent = node.parent;
            if node.hold_locks == 0 {
                node.flags &= !flag::UNDER_HOLDS;
            } else {
                node.flags |= flag::UNDER_HOLDS;
            }
            self.refresh(slot);
            slot = parent;
        }
    }

    /// Ends a hold: gives its lock back and returns the parts it covered, deepest first.
    pub(super) fn release_hold(&mut self, slot: Slot) -> Vec<Slot> {
        let parts = self.clear_hold(slot);
        self.unlock_path(slot);
        self.shift_hold_locks(slot, false);
        parts
    }

    /// Takes the marks of a hold away, not its lock, from a node upwards; returns the parts, deepest first.
    pub(super) fn clear_hold(&mut self, slot: Slot) -> Vec<Slot> {
        let hold = self.nodes[slot as usize].hold;
        // A part between may have got a host copy by another way and left the hold.
        let parts: Vec<Slot> =
            self.ancestors(slot).filter(|&part| self.nodes[part as usize].hold == hold).collect();
        for &part in &parts {
            self.set_hold(part, 0);
        }
        parts
    }

    /// True if a device leaf without host copy may leave the tree with all that hangs below it.
    fn may_drop(&self, slot: Slot) -> bool {
        let node = &self.nodes[slot as usize];
        if node.backed() || node.pins > 0 || node.host_locked() || node.device_children > 0 {
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

    /// Deletes a device leaf without host copy but for its first `keep` pages, and what only the host holds below it.
    fn drop_subtree(&mut self, slot: Slot, keep: u32, out: &mut Evicted) {
        let lost = u64::from(self.nodes[slot as usize].len - keep);
        out.dropped_tokens += self.in_tokens(lost);
        self.emit_removed(slot, keep, Tier::Device);
        for below in self.descendants_deepest_first(slot) {
            out.dropped_tokens += self.in_tokens(u64::from(self.nodes[below as usize].len));
            self.drop_host_only(below, &mut out.host_pages);
        }
        if keep > 0 {
            self.trim(slot, keep, Tier::Device, &mut out.device_pages);
        } else {
            out.device_pages.extend_from_slice(&self.take_value(slot));
            self.remove(slot);
        }
    }

    /// Deletes a childless node that only the host holds.
    pub(super) fn drop_host_only(&mut self, slot: Slot, host_pages: &mut Vec<u32>) {
        if self.nodes[slot as usize].published() {
            self.emit_removed(slot, 0, Tier::Host);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WritePolicy;
    use crate::tree::testing::{keys, tree};

    /// A leaf of `pages` pages of one token each, under its own first token.
    fn leaf(first: u32, pages: u32) -> Vec<u32> {
        keys(first..first + pages)
    }

    #[test]
    fn the_last_victim_is_trimmed_from_its_tail() {
        let mut tree = tree(1, None);
        let node = tree.put(&leaf(0, 10), 0).node;
        let out = tree.evict(3, None);
        assert_eq!((out.device_pages, out.dropped_tokens), (vec![7, 8, 9], 3));
        assert!(tree.node_info(node).is_err()); // the old id went with the tail
        assert_eq!(tree.get(&leaf(0, 10)).device_length, 7);
        tree.sound();
    }

    #[test]
    fn a_demoted_victim_goes_whole() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let node = tree.put(&leaf(0, 10), 0).node;
        tree.backed_up(&[node], 0);
        let out = tree.evict(3, None);
        assert_eq!((out.device_pages.len(), out.demoted_nodes, out.dropped_tokens), (10, vec![node], 0));
        assert_eq!(tree.get(&leaf(0, 10)).host_hit_length, 10);
        tree.sound();
    }

    #[test]
    fn write_back_uses_the_room_there_is_and_drops_the_rest() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let nodes: Vec<_> = (0..3).map(|i| tree.put(&leaf(100 * i, 4), 10 * i).node).collect();
        let out = tree.evict(12, Some(9));
        assert_eq!(out.write_back_nodes, nodes[..2]);
        assert_eq!((out.device_pages, out.dropped_tokens), (vec![20, 21, 22, 23], 4));
        assert_eq!((tree.protected_tokens(), tree.evict(1, None)), (8, Evicted::default()));
        tree.sound();
        // One is written back, the other given up.
        let ack = tree.begin_backup(&nodes[..1], &[0, 1, 2, 3]).unwrap();
        assert_eq!(tree.drop_nodes(&nodes[1..2]).unwrap().device_pages, [10, 11, 12, 13]);
        assert!(matches!(tree.drop_nodes(&nodes[..1]), Err(Error::Lock(_))));
        let done = tree.finish_backup(ack).unwrap();
        assert_eq!((done.nodes, done.device_pages), (nodes[..1].to_vec(), vec![0, 1, 2, 3]));
        assert_eq!((tree.device_tokens(), tree.host_tokens(), tree.protected_tokens()), (0, 4, 0));
        tree.sound();
    }

    #[test]
    fn a_victim_without_room_on_host_is_dropped_whole() {
        let mut tree = tree(4, Some(WritePolicy::WriteBack));
        tree.put(&keys(0..8), 0);
        let out = tree.evict(2, Some(0));
        assert_eq!((out.device_pages, out.demoted_nodes.len(), out.dropped_tokens), (vec![0, 1], 0, 8));
        assert_eq!((tree.get(&keys(0..8)).device_length, tree.len()), (0, 0));
        tree.sound();
    }

    #[test]
    fn one_call_plans_a_whole_chain_for_write_back() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let chain: Vec<_> = [2, 4, 6].map(|end| tree.put(&leaf(0, end), 0).node).into();
        let other = tree.put(&leaf(50, 2), 20).node;
        let mut lock = tree.inc_lock_ref(other).unwrap();
        let mut planned = tree.evict(6, None).write_back_nodes;
        assert_eq!(planned, [chain[2], chain[1], chain[0]]);
        tree.sound();
        let plan = tree.plan_backup(&planned);
        planned.reverse();
        assert_eq!((plan.nodes.clone(), plan.pages), (planned, 6));
        let ack = tree.begin_backup(&plan.nodes, &leaf(0, 6)).unwrap();
        assert_eq!(tree.finish_backup(ack).unwrap().device_pages, [4, 5, 2, 3, 0, 1]);
        tree.dec_lock_ref(&mut lock).unwrap();
        assert_eq!((tree.device_tokens(), tree.host_tokens(), tree.protected_tokens()), (2, 6, 0));
        tree.sound();
    }

    #[test]
    fn what_others_lock_or_use_ends_the_plan_of_a_chain() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let upper = tree.put(&leaf(0, 2), 0).node;
        let lower = tree.put(&leaf(0, 4), 0).node;
        let mut lock = tree.inc_lock_ref(upper).unwrap();
        assert_eq!(tree.evict(4, None).write_back_nodes, [lower]);
        tree.sound();
        tree.dec_lock_ref(&mut lock).unwrap();
        tree.sound();
        let mut key = leaf(0, 2);
        key.push(9);
        let sibling = tree.put(&key, 30).node;
        assert_eq!(tree.evict(1, None).write_back_nodes, [sibling]);
        assert_eq!(tree.evict(1, None).write_back_nodes, [upper]);
        tree.sound();
        // Given up from below, each is a leaf when its turn comes.
        assert_eq!(tree.drop_nodes(&[sibling, lower, upper]).unwrap().dropped_tokens, 5);
        assert!(tree.is_empty());
        tree.sound();
    }

    #[test]
    fn what_is_pinned_keeps_its_host_copy() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let node = tree.put(&leaf(0, 2), 0).node;
        tree.backed_up(&[node], 0);
        let pin = tree.pin(node, None).unwrap();
        assert!(tree.evict_host(2).host_pages.is_empty());
        tree.unpin(pin).unwrap();
        assert_eq!(tree.evict_host(2).host_pages.len(), 2);
    }

    #[test]
    fn a_dropped_victim_takes_its_host_only_descendants_unless_they_are_in_use() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let upper = tree.put(&leaf(0, 2), 0).node;
        let below = tree.put(&leaf(0, 4), 0).node;
        let ack = tree.begin_backup(&[below], &[7, 8]).unwrap();
        tree.finish_backup(ack).unwrap();
        tree.evict(2, Some(0));
        let mut lock = tree.inc_host_lock_ref(below).unwrap();
        assert_eq!(tree.evict(2, Some(0)), Evicted::default()); // skipped: somebody reads the host copy
        tree.dec_host_lock_ref(&mut lock).unwrap();
        let out = tree.evict(2, Some(0));
        assert_eq!((out.device_pages, out.host_pages, out.dropped_tokens), (vec![0, 1], vec![7, 8], 4));
        assert!(tree.node_info(upper).is_err() && tree.node_info(below).is_err());
        tree.sound();
    }

    #[test]
    fn host_room_comes_from_copies_that_are_doubled_first() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let inner = tree.put(&leaf(0, 2), 0).node;
        let outer = tree.put(&leaf(0, 4), 0).node;
        let gone = tree.put(&leaf(50, 2), 10).node;
        tree.backed_up(&[inner, outer, gone], 0);
        let mut lock = tree.inc_lock_ref(outer).unwrap();
        tree.evict(2, None); // `gone` leaves the device
        tree.dec_lock_ref(&mut lock).unwrap();
        assert_eq!(tree.evict_host(1).host_pages, [0, 1]); // stays on device, and is no leaf there
        assert_eq!(tree.evict_host(1).host_pages, [2, 3]); // a device leaf
        assert_eq!(tree.evict_host(1).host_pages, [5]); // only on host: no more than is needed
        assert_eq!((tree.host_tokens(), tree.get(&leaf(50, 2)).host_hit_length), (1, 1));
        assert_eq!(tree.evict_host(9).host_pages.len(), 1);
        tree.sound();
    }

    #[test]
    fn host_room_can_come_from_what_only_the_host_holds_first() {
        let config =
            crate::TreeConfig { host_order: crate::HostOrder::LeavesFirst, ..crate::TreeConfig::default() };
        let mut tree = crate::tree::testing::tree_with(config);
        let gone = tree.put(&leaf(50, 2), 10).node;
        let lower = tree.put(&leaf(50, 4), 12).node;
        let kept = tree.put(&leaf(0, 2), 0).node;
        let inner = tree.put(&leaf(70, 2), 20).node;
        let outer = tree.put(&leaf(70, 4), 20).node;
        tree.backed_up(&[gone, lower, kept, inner, outer], 0);
        tree.evict(4, None); // `lower` and `gone`, the oldest, leave the device
        assert_eq!(tree.evict_host(1).host_pages, [3]); // only on host: no more than is needed
        assert_eq!(tree.evict_host(3).host_pages, [2, 0, 1]); // once a leaf has gone, the node above is one
        assert_eq!(tree.node_info(gone), Err(Error::UnknownNode(gone)));
        assert_eq!(tree.evict_host(1).host_pages, [4, 5]); // then copies, the least wanted of the device leaves first
        assert_eq!(tree.evict_host(1).host_pages, [8, 9]);
        tree.sound();
        let mut lock = tree.inc_lock_ref(inner).unwrap();
        assert_eq!((tree.evict_host(9).host_pages, tree.host_tokens()), (vec![6, 7], 0));
        tree.dec_lock_ref(&mut lock).unwrap();
        assert_eq!(tree.device_tokens(), 6);
        tree.sound();
    }

    #[test]
    fn leaves_that_can_not_go_are_not_looked_at_until_they_can() {
        for policy in [None, Some(WritePolicy::WriteThrough)] {
            let mut tree = tree(1, policy);
            let nodes: Vec<_> = (0..3).map(|i| tree.put(&leaf(100 * i, 2), 10 * i).node).collect();
            let mut locks =
                nodes.iter().map(|&node| tree.inc_host_lock_ref(node).unwrap()).collect::<Vec<_>>();
            assert_eq!((tree.device_order.iter().count(), tree.evict(9, None)), (0, Evicted::default()));
            tree.sound();
            for (lock, &node) in locks.iter_mut().zip(&nodes).take(2) {
                tree.dec_host_lock_ref(lock).unwrap();
                assert!(tree.device_order.iter().any(|&(_, id, _)| id == node));
            }
            assert_eq!((tree.evict(9, None).dropped_tokens, tree.len()), (4, 1));
            tree.sound();
            if policy.is_some() {
                // What is pinned may be written back, what is backed may be demoted, whoever locks it on host.
                let pin = tree.pin(nodes[2], None).unwrap();
                assert_eq!(tree.evict(1, None).write_back_nodes, nodes[2..]);
                tree.sound();
                tree.backed_up(&nodes[2..], 0);
                tree.unpin(pin).unwrap();
            }
            tree.dec_host_lock_ref(&mut locks[2]).unwrap();
            tree.sound();
        }
    }

    #[test]
    fn write_through_gives_host_copies_up_from_below() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let inner = tree.put(&leaf(0, 2), 0).node;
        let outer = tree.put(&leaf(0, 4), 0).node;
        tree.backed_up(&[outer], 0);
        assert_eq!(tree.evict_host(1).host_pages, [2, 3]);
        tree.sound();
        assert_eq!(tree.evict_host(1).host_pages, [0, 1]);
        assert_eq!(tree.node_info(inner).unwrap().host_pages, None);
        assert_eq!(tree.get(&leaf(0, 4)).device_length, 4);
        tree.sound();
    }

    /// What the tree says could go, and what then goes.
    fn foretold_and_freed(tree: &mut Tree, limit: usize) -> (usize, usize) {
        let digest = tree.digest();
        let foretold = tree.evictable_host_pages(limit);
        assert_eq!(tree.digest(), digest);
        tree.sound();
        let freed = tree.evict_host(limit).host_pages.len();
        tree.sound();
        (foretold, freed)
    }

    #[test]
    fn host_room_is_foretold_through_what_leaves_before() {
        // Two leaves below one node, and one node above that; only on host, on device, or the lower ones only on host.
        for (evicted, policy) in [0, 3, 9].into_iter().flat_map(|evicted| {
            [WritePolicy::WriteThrough, WritePolicy::WriteBack].map(|policy| (evicted, policy))
        }) {
            for limit in [0, 1, 2, 3, 5, 8, 9, 10, usize::MAX] {
                let mut tree = tree(1, Some(policy));
                let nodes = [&[0, 1][..], &[0, 1, 2, 3, 4], &[0, 1, 2, 3, 4, 5], &[0, 1, 2, 3, 4, 7, 8, 9]];
                let nodes: Vec<_> =
                    nodes.iter().zip(0..).map(|(key, i)| tree.put(key, 10 * i).node).collect();
                tree.backed_up(&nodes, 0);
                tree.evict(evicted, None);
                let (foretold, freed) = foretold_and_freed(&mut tree, limit);
                assert_eq!(foretold, limit.min(9));
                assert!((foretold..foretold + 3).contains(&freed), "{limit}: {foretold}, {freed}");
            }
        }
    }

    #[test]
    fn host_room_is_not_foretold_where_something_keeps_it() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let upper = tree.put(&leaf(0, 2), 0).node;
        let left = tree.put(&leaf(0, 5), 0).node;
        let right = tree.put(&[0, 1, 9], 10).node;
        tree.backed_up(&[upper, left, right], 0);
        let mut host = tree.inc_host_lock_ref(left).unwrap();
        assert_eq!(tree.evictable_host_pages(9), 1); // `right` alone: `left` keeps what is above it too
        tree.dec_host_lock_ref(&mut host).unwrap();
        assert_eq!(tree.evictable_host_pages(9), 6);
        let pin = tree.pin(upper, None).unwrap();
        assert_eq!(tree.evictable_host_pages(9), 4);
        tree.unpin(pin).unwrap();
        tree.evict(4, None); // `left` and `right`
        let mut device = tree.inc_lock_ref(right).unwrap();
        assert_eq!(tree.evictable_host_pages(9), 3);
        tree.dec_lock_ref(&mut device).unwrap();
        let mut plan = tree.plan_load_back(right).unwrap();
        let ack = tree.begin_load_back(&mut plan, &[20]).unwrap();
        assert_eq!(tree.evictable_host_pages(9), 3);
        tree.finish_load_back(ack).unwrap();
        // On device again, and what comes below it waits for its copy.
        let below = tree.put(&[0, 1, 9, 8], 30).node;
        let ack = tree.begin_backup(&[below], &[40]).unwrap();
        assert_eq!(tree.evictable_host_pages(9), 3);
        tree.finish_backup(ack).unwrap();
        assert_eq!(foretold_and_freed(&mut tree, 9), (7, 7));
        assert_eq!(foretold_and_freed(&mut tree, 9), (0, 0));
    }

    #[test]
    fn host_room_is_foretold_at_the_cost_of_what_is_counted() {
        for policy in [WritePolicy::WriteThrough, WritePolicy::WriteBack] {
            let mut tree = tree(1, Some(policy));
            // A node with 1,000 leaves of two pages below it, and a chain of 1,000 nodes.
            let mut nodes: Vec<_> = (0..1000).map(|i| tree.put(&[1, i, i], 2 * i + 1).node).collect();
            nodes.extend((1..=1000).map(|end| tree.put(&leaf(5000, end), 5000).node));
            tree.backed_up(&nodes, 0);
            for evicted in [0, 10_000] {
                tree.evict(evicted, None);
                for (limit, most) in [(0, 0), (1, 1), (10, 10), (500, 500)] {
                    let (pages, visited) = tree.count_host_victims(limit);
                    assert_eq!(pages, limit);
                    assert!(visited <= most, "{visited} nodes for {limit} pages");
                }
                assert_eq!(tree.count_host_victims(usize::MAX), (3001, 2001));
            }
        }
    }

    #[test]
    fn a_hold_ends_on_all_parts_though_one_between_has_left_it() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let lower = tree.put(&leaf(0, 3), 0).node;
        assert_eq!(tree.evict(1, None).write_back_nodes, [lower]);
        let upper = tree.get(&leaf(0, 1)).last_device_node;
        let middle = tree.get(&leaf(0, 2)).last_device_node;
        let args = crate::InsertHostArgs {
            anchor: upper,
            tokens: crate::Tokens::U32(&[1]),
            host_pages: &[9],
            hashes: None,
            namespace: crate::Namespace::default(),
        };
        tree.insert_host(args).unwrap();
        tree.sound();
        assert_eq!(tree.drop_nodes(&[lower]).unwrap().device_pages, [2]);
        assert_eq!([upper, middle].map(|id| tree.node_info(id).unwrap().held), [false, false]);
        tree.sound();
    }

    #[test]
    fn bad_drops_are_refused_whole() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let a = tree.put(&leaf(0, 2), 0).node;
        let b = tree.put(&leaf(10, 2), 10).node;
        assert_eq!(tree.evict(1, None).write_back_nodes, [a]);
        let before = tree.digest();
        assert!(
            matches!(tree.drop_nodes(&[a, b]), Err(Error::Lock(text)) if text.contains(&format!("node {b}")))
        );
        assert_eq!(tree.drop_nodes(&[a, 99]), Err(Error::UnknownNode(99)));
        assert!(matches!(tree.drop_nodes(&[a, a]), Err(Error::Argument(_))));
        assert_eq!(tree.digest(), before);
        assert_eq!(tree.drop_nodes(&[a]).unwrap().dropped_tokens, 2);
        tree.sound();
    }
}
