//! Device to host: plan, begin, finish, cancel.

use std::collections::{HashMap, HashSet};

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
        let wanted = |slot: Slot| {
            let node = &self.nodes[slot as usize];
            node.on_device() && !node.backed()
        };
        let slots: Vec<Slot> =
            nodes.iter().filter_map(|&id| self.slot(id).ok()).filter(|&s| wanted(s)).collect();
        let held: HashSet<Slot> = slots.iter().copied().filter(|&s| self.nodes[s as usize].held()).collect();
        let mut listed = HashSet::new();
        // Nodes above which everything wanted is listed: the walk up stops there.
        let mut done = HashSet::new();
        for slot in slots {
            let hold = self.nodes[slot as usize].hold;
            let alone = hold != 0 && self.is_write_back();
            let mut chain = Vec::new();
            for above in self.ancestors(slot) {
                if done.contains(&above) || (self.is_gap_free() && !wanted(above)) {
                    break; // without gaps, nothing above a backed node is missing
                }
                if !alone {
                    done.insert(above);
                }
                let belongs = !alone || self.nodes[above as usize].hold == hold || held.contains(&above);
                if belongs && wanted(above) && listed.insert(above) {
                    chain.push(above);
                }
            }
            for slot in chain.into_iter().rev() {
                let node = &self.nodes[slot as usize];
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
        let owns_hold = |tree: &Self, slot: Slot| {
            let node = &tree.nodes[slot as usize];
            node.hold == node.id && node.held()
        };
        // A hold's lock becomes the copy's; the others get one of their own.
        let unlocked: Vec<Slot> = slots.iter().copied().filter(|&slot| !owns_hold(self, slot)).collect();
        self.shift_path_locks(&unlocked, true);
        let mut rest = host_pages;
        for &slot in &slots {
            let node = &mut self.nodes[slot as usize];
            let (pages, after) = rest.split_at(node.len as usize);
            rest = after;
            node.flags |= flag::BACKUP_LOCK | if node.held() { flag::VICTIM } else { 0 };
            self.set_host_value(slot, Pages::from(pages), Some(serial));
        }
        for &slot in &slots {
            if owns_hold(self, slot) {
                self.clear_hold(slot);
                self.shift_hold_locks(slot, false);
            } else if self.nodes[slot as usize].held() {
                self.set_hold(slot, 0); // the rest waits for the node that was held first
            }
        }
        self.backups.insert(serial, PendingBackup { nodes: nodes.to_vec() });
        Ok(Ack { origin: self.origin, serial, kind: AckKind::Backup })
    }

    fn check_backup(&self, nodes: &[NodeId], host_pages: &[u32]) -> Result<Vec<Slot>> {
        let mut slots = Vec::with_capacity(nodes.len());
        let mut listed = HashSet::new();
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
                return Err(bad_lock!(
                    "the plan is stale: node {} above node {id} has no host copy and is not listed before it",
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
        let mut published = Vec::new();
        for &slot in &slots {
            self.edit(slot, |node| {
                node.flags &= !flag::PENDING_BACKUP;
                node.flags |= flag::WAITS;
            });
            self.publish_from(slot, &mut published);
        }
        self.sort_by_depth(&mut published);
        for &slot in &published {
            self.emit_stored(slot, Tier::Host);
        }
        let victims = self.end_backup(&slots);
        let mut evicted = Evicted::default();
        for &slot in victims.iter().rev() {
            if self.nodes[slot as usize].is_device_leaf() {
                self.demote(slot, &mut evicted);
            }
        }
        let nodes = published.iter().map(|&slot| self.nodes[slot as usize].id).collect();
        Ok(BackupDone { nodes, device_pages: evicted.device_pages })
    }

    /// Publishes a waiting copy if nothing above is missing, and then those that waited for it.
    fn publish_from(&mut self, slot: Slot, published: &mut Vec<Slot>) {
        if !self.may_publish(slot) {
            self.refresh(slot);
            return;
        }
        let mut ready = vec![slot];
        while let Some(slot) = ready.pop() {
            let pages = u64::from(self.nodes[slot as usize].len);
            self.nodes[slot as usize].flags &= !flag::WAITS;
            self.sizes.pending_host -= pages;
            self.sizes.host += pages;
            self.refresh(slot);
            published.push(slot);
            ready.extend(self.children(slot).filter(|&child| self.nodes[child as usize].has(flag::WAITS)));
        }
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
        }
        // Nothing below was published, so no event. Copies that other acks wait for leave these acks.
        let mut others: HashMap<u64, HashSet<NodeId>> = HashMap::new();
        let mut ended = slots;
        for &slot in &below {
            let node = &self.nodes[slot as usize];
            if node.has(flag::PENDING_BACKUP) {
                others.entry(node.ack).or_default().insert(node.id);
                ended.push(slot);
            }
            host_pages.extend_from_slice(&self.take_host_value(slot));
        }
        for (serial, left) in others {
            if let Some(pending) = self.backups.get_mut(&serial) {
                pending.nodes.retain(|id| !left.contains(id));
            }
        }
        self.end_backup(&ended);
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
        let mut seen: HashSet<Slot> = slots.iter().copied().collect();
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

    /// Takes the marks of a backup off nodes and gives its locks back; returns those that were to be written back.
    fn end_backup(&mut self, slots: &[Slot]) -> Vec<Slot> {
        let is = |tree: &Self, slot: Slot, mark: u32| tree.nodes[slot as usize].has(mark);
        let victims = slots.iter().copied().filter(|&slot| is(self, slot, flag::VICTIM)).collect();
        let locked: Vec<Slot> =
            slots.iter().copied().filter(|&slot| is(self, slot, flag::BACKUP_LOCK)).collect();
        for &slot in slots {
            self.nodes[slot as usize].flags &= !(flag::VICTIM | flag::BACKUP_LOCK);
        }
        self.shift_path_locks(&locked, false);
        victims
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
        assert!(tree.evict(4, None).device_pages.is_empty() && tree.evict_host(4).host_pages.is_empty());
        tree.sound();
        assert_eq!(tree.finish_backup(ack).unwrap().nodes, [node]);
        assert_eq!((tree.protected_tokens(), tree.host_tokens(), tree.pending_host_tokens()), (0, 4, 0));
        for error in [tree.finish_backup(ack).unwrap_err(), tree.cancel_backup(ack).unwrap_err()] {
            assert!(matches!(error, Error::Lock(_)), "{error}");
        }
        tree.sound();
    }

    #[test]
    fn a_copy_is_published_after_the_one_above_whatever_the_order_of_acks() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let a = tree.put(&keys(0..2), 0).node;
        let b = tree.put(&keys(0..4), 0).node;
        let first = tree.begin_backup(&[a], &[0, 1]).unwrap();
        let second = tree.begin_backup(&[b], &[2, 3]).unwrap();
        let args = crate::InsertHostArgs {
            anchor: b,
            tokens: crate::Tokens::U32(&[4, 5]),
            host_pages: &[4, 5],
            hashes: None,
            namespace: crate::Namespace::default(),
        };
        let c = tree.insert_host(args).unwrap().node;
        assert_eq!(tree.finish_backup(second).unwrap(), BackupDone::default());
        assert_eq!(tree.node_info(c).unwrap().pending, Some(first));
        assert_eq!((tree.host_tokens(), tree.pending_host_tokens()), (0, 6));
        assert!(tree.evict_host(6).host_pages.is_empty());
        assert_eq!(tree.get(&keys(0..6)).host_hit_length, 2); // its bytes are there
        tree.sound();
        assert_eq!(tree.finish_backup(first).unwrap().nodes, [a, b, c]);
        assert_eq!((tree.host_tokens(), tree.pending_host_tokens(), tree.protected_tokens()), (6, 0, 0));
        tree.sound();
    }

    #[test]
    fn locks_of_many_nodes_on_one_path_add_up() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let chain: Vec<_> = (1..=20).map(|end| tree.put(&keys(0..end), 0).node).collect();
        let before = tree.digest();
        let ack = tree.begin_backup(&chain, &keys(0..20)).unwrap();
        let counts: Vec<u32> = chain.iter().map(|&id| tree.node_info(id).unwrap().lock_ref).collect();
        assert_eq!(counts, (1..=20).rev().collect::<Vec<u32>>());
        tree.sound();
        tree.cancel_backup(ack).unwrap();
        assert_eq!((tree.digest(), tree.protected_tokens()), (before, 0));
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
        assert!(matches!(tree.begin_backup(&[b], &[0, 1]), Err(Error::Lock(_)))); // a gap above
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
