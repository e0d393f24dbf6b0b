//! Device to host: plan, begin, finish, cancel.

use super::node::{Pages, Slot, flag};
use super::{Ack, AckKind, Evicted, Tree};
use crate::NodeId;
use crate::error::{Result, bad_argument, bad_lock};
use crate::events::Tier;

/// What a backup would copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackupPlan {
    /// The nodes, ancestors first.
    pub nodes: Vec<NodeId>,
    /// Host pages it takes.
    pub pages: usize,
    /// The pages to copy, in the order of `nodes`.
    pub device_pages: Vec<u32>,
}

/// What the end of a backup changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackupDone {
    /// Nodes whose host copy is valid now, by depth, then id.
    pub nodes: Vec<NodeId>,
    /// Device pages of write-back victims, free now.
    pub device_pages: Vec<u32>,
}

/// A backup that waits for its ack.
#[derive(Debug)]
pub(super) struct PendingBackup {
    /// In the order in which host pages were dealt; parts made by cuts stand before what they were cut from.
    pub nodes: Vec<NodeId>,
}

impl Tree {
    /// What must be copied so that `nodes` are on host: without those that are dead, evicted, backed or pending,
    /// with the unbacked nodes above them first.
    ///
    /// A node held for write-back stands alone under `write_back`: its room was counted alone.
    pub fn plan_backup(&self, nodes: &[NodeId]) -> BackupPlan {
        let mut plan = BackupPlan::default();
        let mut listed = std::collections::HashSet::new();
        for &id in nodes {
            let Ok(slot) = self.slot(id) else { continue };
            let hold = self.nodes[slot as usize].hold;
            let alone = hold != 0 && self.is_write_back();
            let wanted = |slot: Slot| {
                let node = &self.nodes[slot as usize];
                node.on_device() && !node.backed()
            };
            if !wanted(slot) {
                continue; // waits for a copy, or has one already
            }
            let chain: Vec<Slot> = self
                .ancestors(slot)
                // Without gaps, nothing above a backed node is missing.
                .take_while(|&above| !self.is_gap_free() || wanted(above))
                .filter(|&above| !alone || self.nodes[above as usize].hold == hold)
                .filter(|&above| wanted(above) && !listed.contains(&above))
                .collect();
            for slot in chain.into_iter().rev() {
                let node = &self.nodes[slot as usize];
                listed.insert(slot);
                plan.nodes.push(node.id);
                plan.pages += node.len as usize;
                plan.device_pages.extend_from_slice(node.device_pages());
            }
        }
        plan
    }

    /// Gives nodes their host pages, dealt in the order of `nodes`; valid at the ack, locked on device until then.
    pub fn begin_backup(&mut self, nodes: &[NodeId], host_pages: &[u32]) -> Result<Ack> {
        self.need_host("begin_backup")?;
        let slots = self.check_backup(nodes, host_pages)?;

        let serial = self.serial();
        let was_held: Vec<bool> = slots.iter().map(|&slot| self.nodes[slot as usize].held()).collect();
        let mut rest = host_pages;
        for (&slot, &victim) in slots.iter().zip(&was_held) {
            let node = &self.nodes[slot as usize];
            let owns_hold = node.hold == node.id;
            let (pages, after) = rest.split_at(node.len as usize);
            rest = after;
            if !owns_hold {
                self.lock_path(slot); // else the hold's lock becomes the copy's
            }
            let node = &mut self.nodes[slot as usize];
            node.flags |= flag::BACKUP_LOCK | if victim { flag::VICTIM } else { 0 };
            self.set_host_value(slot, Pages::from(pages), Some(serial));
        }
        for &slot in &slots {
            let node = &self.nodes[slot as usize];
            if node.hold == node.id {
                self.clear_hold(slot);
            } else {
                self.edit(slot, |node| node.hold = 0); // the rest waits for the node that was held first
            }
        }
        self.backups.insert(serial, PendingBackup { nodes: nodes.to_vec() });
        Ok(Ack { origin: self.origin, serial, kind: AckKind::Backup })
    }

    fn check_backup(&self, nodes: &[NodeId], host_pages: &[u32]) -> Result<Vec<Slot>> {
        let mut slots = Vec::with_capacity(nodes.len());
        let mut listed = std::collections::HashSet::new();
        let mut pages = 0;
        for &id in nodes {
            let slot = self.slot(id)?;
            let node = &self.nodes[slot as usize];
            if slot == self.root {
                return Err(bad_argument!("nodes has node {id}, the root has no pages"));
            }
            if node.backed() {
                return Err(bad_lock!("the plan is stale: node {id} has a host copy or waits for one"));
            }
            if !node.on_device() {
                return Err(bad_lock!("the plan is stale: node {id} is not on device"));
            }
            let parent = node.parent;
            if self.is_gap_free()
                && parent != self.root
                && !self.nodes[parent as usize].backed()
                && !listed.contains(&parent)
            {
                return Err(bad_argument!(
                    "nodes has node {id}, but not before it node {} above it, which is not backed up",
                    self.nodes[parent as usize].id
                ));
            }
            if !listed.insert(slot) {
                return Err(bad_argument!("nodes names node {id} twice"));
            }
            pages += node.len as usize;
            slots.push(slot);
        }
        if host_pages.len() != pages {
            return Err(bad_argument!(
                "host_pages has {} entries, the nodes have {pages} pages",
                host_pages.len()
            ));
        }
        Ok(slots)
    }

    /// The copy has ended: publishes its nodes, gives its locks back, and demotes write-back victims that nobody
    /// uses.
    pub fn finish_backup(&mut self, ack: Ack) -> Result<BackupDone> {
        let pending = self.take_backup(ack)?;
        let mut slots = self.living(&pending.nodes);
        self.sort_by_depth(&mut slots);
        let mut out = BackupDone::default();
        for &slot in &slots {
            let node = &self.nodes[slot as usize];
            let pages = u64::from(node.len);
            out.nodes.push(node.id);
            self.edit(slot, |node| node.flags &= !flag::PENDING_BACKUP);
            self.sizes.pending_host -= pages;
            self.sizes.host += pages;
            self.refresh(slot);
            self.emit_stored(slot, Tier::Host);
        }
        let mut evicted = Evicted::default();
        let victims: Vec<bool> = slots.iter().map(|&slot| self.end_backup(slot)).collect();
        for (&slot, _) in slots.iter().zip(&victims).rev().filter(|&(_, &victim)| victim) {
            if self.nodes[slot as usize].is_device_leaf() {
                self.demote(slot, &mut evicted);
            }
        }
        out.device_pages = evicted.device_pages;
        Ok(out)
    }

    /// The copy will not end: takes its host pages back, and under the write-through policies those of every node
    /// below, since host copies have no gaps there. Returns all of them.
    pub fn cancel_backup(&mut self, ack: Ack) -> Result<Vec<u32>> {
        let pending = self.backup(ack)?;
        let slots = self.living(&pending.nodes);
        let below = self.backed_below(&slots);
        self.check_cancel(&slots, &below)?;
        self.take_backup(ack)?;

        let mut host_pages = Vec::new();
        for &slot in &slots {
            host_pages.extend_from_slice(&self.take_host_value(slot));
            self.end_backup(slot);
        }
        for &slot in below.iter().rev() {
            if self.nodes[slot as usize].published() {
                self.emit_removed(slot, Tier::Host);
            }
        }
        for &slot in &below {
            let node = &self.nodes[slot as usize];
            let (id, other) = (node.id, node.has(flag::PENDING_BACKUP).then_some(node.ack));
            host_pages.extend_from_slice(&self.take_host_value(slot));
            if let Some(serial) = other {
                self.end_backup(slot);
                if let Some(pending) = self.backups.get_mut(&serial) {
                    pending.nodes.retain(|&listed| listed != id);
                }
            }
        }
        for &slot in below.iter().rev() {
            if !self.nodes[slot as usize].on_device() {
                self.remove(slot);
            }
        }
        Ok(host_pages)
    }

    /// Nodes below these that would hang under a gap, by depth, then id.
    fn backed_below(&self, slots: &[Slot]) -> Vec<Slot> {
        if !self.is_gap_free() {
            return Vec::new();
        }
        let mut seen: std::collections::HashSet<Slot> = slots.iter().copied().collect();
        let mut below = Vec::new();
        let mut stack = slots.to_vec();
        while let Some(slot) = stack.pop() {
            for child in self.children(slot) {
                // What is not backed has nothing backed below it.
                if self.nodes[child as usize].backed() && seen.insert(child) {
                    below.push(child);
                    stack.push(child);
                }
            }
        }
        self.sort_by_depth(&mut below);
        below
    }

    fn check_cancel(&self, slots: &[Slot], below: &[Slot]) -> Result<()> {
        for &slot in slots {
            let node = &self.nodes[slot as usize];
            if node.host_locked() {
                return Err(bad_lock!("backup can not be cancelled: node {} is host-locked", node.id));
            }
        }
        for &slot in below {
            let node = &self.nodes[slot as usize];
            let only_copy_in_use = !node.on_device() && (node.locked() || node.pins > 0);
            if node.host_locked() || node.has(flag::PENDING_LOAD) || only_copy_in_use {
                return Err(bad_lock!(
                    "backup can not be cancelled: the host copy of node {} below is in use",
                    node.id
                ));
            }
        }
        Ok(())
    }

    /// Takes the marks of a backup off a node and gives its lock back; true if the node was to be written back.
    fn end_backup(&mut self, slot: Slot) -> bool {
        let node = &mut self.nodes[slot as usize];
        let (victim, locked) = (node.has(flag::VICTIM), node.has(flag::BACKUP_LOCK));
        node.flags &= !(flag::VICTIM | flag::BACKUP_LOCK);
        if locked {
            self.unlock_path(slot);
        }
        victim
    }

    fn backup(&self, ack: Ack) -> Result<&PendingBackup> {
        self.check_ack(ack, AckKind::Backup)?;
        self.backups.get(&ack.serial).ok_or_else(|| ended(ack))
    }

    fn take_backup(&mut self, ack: Ack) -> Result<PendingBackup> {
        self.check_ack(ack, AckKind::Backup)?;
        self.backups.remove(&ack.serial).ok_or_else(|| ended(ack))
    }

    /// An ack of this tree, of this kind.
    pub(super) fn check_ack(&self, ack: Ack, kind: AckKind) -> Result<()> {
        self.check_origin(ack.origin, &format!("ack {}", ack.serial))?;
        if ack.kind == kind {
            return Ok(());
        }
        Err(bad_lock!("ack {} is of a {:?}, not of a {kind:?}", ack.serial, ack.kind))
    }

    /// The places of nodes that are known to live: their copies lock them.
    pub(super) fn living(&self, ids: &[NodeId]) -> Vec<Slot> {
        ids.iter().map(|id| self.slots[id]).collect()
    }
}

/// The error for an ack that was finished or cancelled before.
pub(super) fn ended(ack: Ack) -> crate::Error {
    bad_lock!("ack {} was finished or cancelled before", ack.serial)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::testing::{keys, tree};
    use crate::{Error, WritePolicy};

    #[test]
    fn a_plan_puts_unbacked_ancestors_first_and_leaves_out_what_needs_none() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let a = tree.put(&keys(0..2), 0).node;
        let b = tree.put(&keys(0..4), 0).node;
        let c = tree.put(&keys(0..6), 0).node;
        let plan = tree.plan_backup(&[c, b, tree.root(), 999]);
        assert_eq!((plan.nodes, plan.pages, plan.device_pages), (vec![a, b, c], 6, keys(0..6)));
        tree.backed_up(&[b], 0);
        assert_eq!(tree.plan_backup(&[b, c]).nodes, [c]);
    }

    #[test]
    fn a_plan_looks_past_a_backed_node_where_gaps_are_allowed() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let c = tree.put(&keys(0..3), 0).node;
        let a = tree.get(&keys(0..1)).last_device_node;
        let b = tree.get(&keys(0..2)).last_device_node;
        let ack = tree.begin_backup(&[b], &[11]).unwrap();
        tree.finish_backup(ack).unwrap();
        assert_eq!(tree.plan_backup(&[c]).nodes, [a, c]);
    }

    #[test]
    fn a_copy_locks_its_nodes_until_the_ack() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let node = tree.put(&keys(0..4), 0).node;
        let ack = tree.begin_backup(&[node], &[9, 8, 7, 6]).unwrap();
        assert_eq!((tree.protected_tokens(), tree.host_tokens(), tree.pending_host_tokens()), (4, 0, 4));
        assert!(tree.evict(4, None).device_pages.is_empty() && tree.evict_host(4).is_empty());
        tree.sound();
        assert_eq!(tree.finish_backup(ack).unwrap().nodes, [node]);
        assert_eq!((tree.protected_tokens(), tree.host_tokens(), tree.pending_host_tokens()), (0, 4, 0));
        for error in [tree.finish_backup(ack).unwrap_err(), tree.cancel_backup(ack).unwrap_err()] {
            assert!(matches!(error, Error::Lock(_)), "{error}");
        }
        tree.sound();
    }

    #[test]
    fn a_cancelled_copy_takes_the_copies_below_along() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let a = tree.put(&keys(0..2), 0).node;
        let b = tree.put(&keys(0..4), 0).node;
        let c = tree.put(&keys(0..6), 0).node;
        let first = tree.begin_backup(&[a], &[0, 1]).unwrap();
        let second = tree.begin_backup(&[b], &[2, 3]).unwrap();
        let third = tree.begin_backup(&[c], &[4, 5]).unwrap();
        tree.finish_backup(third).unwrap();
        tree.evict(2, None);
        assert_eq!(tree.cancel_backup(first).unwrap(), [0, 1, 2, 3, 4, 5]);
        assert!(tree.node_info(c).is_err()); // it had no other copy
        assert_eq!((tree.host_tokens(), tree.pending_host_tokens(), tree.protected_tokens()), (0, 0, 0));
        assert_eq!(tree.finish_backup(second).unwrap(), BackupDone::default());
        tree.sound();
    }

    #[test]
    fn a_copy_that_is_in_use_below_can_not_be_cancelled_away() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let a = tree.put(&keys(0..2), 0).node;
        let b = tree.put(&keys(0..4), 0).node;
        let first = tree.begin_backup(&[a], &[0, 1]).unwrap();
        let second = tree.begin_backup(&[b], &[2, 3]).unwrap();
        tree.finish_backup(second).unwrap();
        let mut lock = tree.inc_host_lock_ref(b).unwrap();
        let before = tree.digest();
        assert!(matches!(tree.cancel_backup(first), Err(Error::Lock(_))));
        assert_eq!(tree.digest(), before);
        tree.dec_host_lock_ref(&mut lock).unwrap();
        assert_eq!(tree.cancel_backup(first).unwrap(), [0, 1, 2, 3]);
        tree.sound();
    }

    #[test]
    fn a_victim_that_was_locked_meanwhile_stays() {
        let mut tree = tree(1, Some(WritePolicy::WriteBack));
        let node = tree.put(&keys(0..8), 0).node;
        assert_eq!(tree.evict(1, None).write_back_nodes, [node]);
        let upper = tree.get(&keys(0..4)).last_device_node;
        let plan = tree.plan_backup(&[node]);
        assert_eq!(plan.nodes, [upper, node]);
        let ack = tree.begin_backup(&plan.nodes, &keys(0..8)).unwrap();
        let mut lock = tree.inc_lock_ref(upper).unwrap();
        let done = tree.finish_backup(ack).unwrap();
        assert_eq!((done.nodes, done.device_pages), (vec![upper, node], vec![4, 5, 6, 7]));
        tree.dec_lock_ref(&mut lock).unwrap();
        assert_eq!(tree.evict(4, None).demoted_nodes, [upper]);
        tree.sound();
    }

    #[test]
    fn stale_and_wrong_plans_change_nothing() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let a = tree.put(&keys(0..2), 0).node;
        let b = tree.put(&keys(0..4), 0).node;
        let before = tree.digest();
        let argument = |result: Result<Ack>| matches!(result, Err(Error::Argument(_)));
        assert!(argument(tree.begin_backup(&[b], &[0, 1]))); // a gap above
        assert!(argument(tree.begin_backup(&[a, a], &[0, 1, 2, 3])));
        assert!(argument(tree.begin_backup(&[a], &[0])));
        assert!(argument(tree.begin_backup(&[tree.root()], &[])));
        assert_eq!(tree.begin_backup(&[99], &[]), Err(Error::UnknownNode(99)));
        assert_eq!(tree.digest(), before);
        let nothing = tree.begin_backup(&[], &[]).unwrap();
        assert_eq!(tree.finish_backup(nothing).unwrap(), BackupDone::default());
        tree.backed_up(&[a], 0);
        assert!(matches!(tree.begin_backup(&[a], &[5, 6]), Err(Error::Lock(_))));
        let mut none = crate::tree::testing::tree(1, None);
        let node = none.put(&keys(0..2), 0).node;
        assert!(argument(none.begin_backup(&[node], &[0, 1])));
    }
}
