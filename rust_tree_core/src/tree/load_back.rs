//! Host to device: plan, begin, finish, cancel.

use super::backup::ended;
use super::node::{Pages, Slot, flag};
use super::{Ack, AckKind, Origin, Tree};
use crate::NodeId;
use crate::error::{Result, bad_argument, bad_lock};
use crate::events::Tier;

/// What a load-back would copy, and the locks that keep it there. It must be begun or cancelled.
#[derive(Debug)]
pub struct LoadBackPlan {
    origin: Origin,
    serial: u64,
    nodes: Vec<NodeId>,
    host_pages: Vec<u32>,
    pending_ack: Option<Ack>,
    used: bool,
}

impl LoadBackPlan {
    /// The evicted nodes of the path, ancestors first, as at the plan.
    pub fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// Device pages it takes.
    pub fn pages(&self) -> usize {
        self.host_pages.len()
    }

    /// The youngest load-back, begun by others, that the part of the path on device waits for.
    pub fn pending_ack(&self) -> Option<Ack> {
        self.pending_ack
    }

    /// The pages to copy, in the order of the path.
    pub fn host_pages(&self) -> &[u32] {
        &self.host_pages
    }
}

/// A plan that was neither begun nor cancelled.
#[derive(Debug)]
pub(super) struct PendingPlan {
    /// The device lock is on the path of this node.
    pub target: NodeId,
    /// Host-locked, ancestors first; cuts are followed.
    pub nodes: Vec<NodeId>,
}

/// A load-back that waits for its ack.
#[derive(Debug)]
pub(super) struct PendingLoad {
    pub target: NodeId,
    pub nodes: Vec<NodeId>,
}

impl Tree {
    /// What must be copied so that the whole path of a node is on device. Locks the path on device and
    /// the evicted part on host until the plan is cancelled or its ack has come.
    pub fn plan_load_back(&mut self, node: NodeId) -> Result<LoadBackPlan> {
        let slot = self.slot(node)?;
        let mut evicted: Vec<Slot> =
            self.ancestors(slot).take_while(|&slot| !self.nodes[slot as usize].on_device()).collect();
        evicted.reverse();
        let mut nodes = Vec::with_capacity(evicted.len());
        let mut host_pages = Vec::new();
        for &slot in &evicted {
            nodes.push(self.nodes[slot as usize].id);
            host_pages.extend_from_slice(self.nodes[slot as usize].host_pages());
            self.host_lock(slot);
        }
        let path: Vec<Slot> = self.ancestors(slot).collect();
        let pending_ack = self.youngest_load(&path);
        self.lock_path(slot);
        let serial = self.serial();
        self.plans.insert(serial, PendingPlan { target: node, nodes: nodes.clone() });
        Ok(LoadBackPlan { origin: self.origin, serial, nodes, host_pages, pending_ack, used: false })
    }

    /// Gives the locks of a plan back.
    pub fn cancel_load_back_plan(&mut self, plan: &mut LoadBackPlan) -> Result<()> {
        self.check_plan(plan)?;
        plan.used = true;
        let pending = self.plans.remove(&plan.serial).expect("an unused plan of this epoch is listed");
        self.unlock_load(pending.target, &pending.nodes);
        Ok(())
    }

    /// Gives the planned nodes their device pages, in the order of the path; valid at the ack.
    pub fn begin_load_back(&mut self, plan: &mut LoadBackPlan, device_pages: &[u32]) -> Result<Ack> {
        self.check_plan(plan)?;
        let slots = self.living(&self.plans[&plan.serial].nodes);
        if let Some(&slot) = slots.iter().find(|&&slot| self.nodes[slot as usize].on_device()) {
            return Err(bad_lock!("the plan is stale: node {} is on device", self.nodes[slot as usize].id));
        }
        if device_pages.len() != plan.pages() {
            return Err(bad_argument!(
                "device_pages has {} entries, the plan has {} pages",
                device_pages.len(),
                plan.pages()
            ));
        }
        plan.used = true;
        let PendingPlan { target, nodes } = self.plans.remove(&plan.serial).expect("looked at above");
        let serial = self.serial();
        let mut rest = device_pages;
        for &slot in &slots {
            let (pages, after) = rest.split_at(self.nodes[slot as usize].len as usize);
            rest = after;
            self.edit(slot, |node| {
                node.flags |= flag::PENDING_LOAD;
                node.ack = serial;
            });
            self.set_value(slot, Pages::from(pages));
            self.emit_stored(slot, Tier::Device);
        }
        self.load_backs.insert(serial, PendingLoad { target, nodes });
        Ok(Ack { origin: self.origin, serial, kind: AckKind::LoadBack })
    }

    /// The copy has ended: its pages are valid, its locks go back.
    pub fn finish_load_back(&mut self, ack: Ack) -> Result<()> {
        self.check_ack(ack, AckKind::LoadBack)?;
        let pending = self.load_backs.remove(&ack.serial).ok_or_else(|| ended(ack))?;
        self.unmark_load(&pending);
        Ok(())
    }

    /// The copy will not end: takes its device pages back and returns them, ancestors first.
    ///
    /// Refused, and nothing changed, if somebody else locks a loaded node or has put a device node below one.
    pub fn cancel_load_back(&mut self, ack: Ack) -> Result<Vec<u32>> {
        self.check_ack(ack, AckKind::LoadBack)?;
        let pending = self.load_backs.get(&ack.serial).ok_or_else(|| ended(ack))?;
        let slots = self.living(&pending.nodes);
        for &slot in &slots {
            let node = &self.nodes[slot as usize];
            if node.full().lock_ref > 1 {
                return Err(bad_lock!(
                    "load-back can not be cancelled: node {} is locked by others",
                    node.id
                ));
            }
            let foreign = self.children(slot).find(|&child| {
                let child = &self.nodes[child as usize];
                child.on_device() && !(child.has(flag::PENDING_LOAD) && child.ack == ack.serial)
            });
            if let Some(child) = foreign {
                return Err(bad_lock!(
                    "load-back can not be cancelled: node {} is on device below node {}",
                    self.nodes[child as usize].id,
                    node.id
                ));
            }
        }
        let pending = self.load_backs.remove(&ack.serial).expect("looked at above");
        let mut taken: Vec<Pages> = Vec::with_capacity(slots.len());
        for &slot in slots.iter().rev() {
            self.emit_removed(slot, 0, Tier::Device);
            taken.push(self.take_value(slot));
        }
        self.unmark_load(&pending);
        Ok(taken.iter().rev().flat_map(|pages| pages.iter().copied()).collect())
    }

    /// The load-backs that fill pages between the root and a node and wait for their acks, root-first, each once.
    pub fn pending_acks(&self, node: NodeId) -> Result<Vec<Ack>> {
        let slot = self.slot(node)?;
        let path = self.ancestors(slot).map(|slot| &self.nodes[slot as usize]);
        let mut serials: Vec<u64> =
            path.filter(|node| node.has(flag::PENDING_LOAD)).map(|node| node.ack).collect();
        // A load-back brings all that was evicted of a path, so its nodes stand next to each other.
        serials.dedup();
        let acks = serials.into_iter().rev();
        Ok(acks.map(|serial| Ack { origin: self.origin, serial, kind: AckKind::LoadBack }).collect())
    }

    /// The youngest pending load-back among these nodes.
    pub(super) fn youngest_load(&self, slots: &[Slot]) -> Option<Ack> {
        let waiting = slots.iter().map(|&slot| &self.nodes[slot as usize]);
        let serial = waiting.filter(|node| node.has(flag::PENDING_LOAD)).map(|node| node.ack).max()?;
        Some(Ack { origin: self.origin, serial, kind: AckKind::LoadBack })
    }

    fn check_plan(&self, plan: &LoadBackPlan) -> Result<()> {
        self.check_origin(plan.origin, "load-back plan")?;
        if plan.used {
            return Err(bad_lock!("load-back plan was begun or cancelled before"));
        }
        Ok(())
    }

    fn unmark_load(&mut self, pending: &PendingLoad) {
        for slot in self.living(&pending.nodes) {
            self.edit(slot, |node| node.flags &= !flag::PENDING_LOAD);
        }
        self.unlock_load(pending.target, &pending.nodes);
    }

    fn unlock_load(&mut self, target: NodeId, nodes: &[NodeId]) {
        for slot in self.living(nodes) {
            self.host_unlock(slot);
        }
        self.unlock_path(self.slots[&target]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::testing::{keys, tree};
    use crate::{Error, WritePolicy};

    /// Two nodes of one path, on host only.
    fn demoted() -> (Tree, NodeId, NodeId) {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let upper = tree.put(&keys(0..4), 0).node;
        let lower = tree.put(&keys(0..8), 0).node;
        tree.backed_up(&[lower], 20);
        assert_eq!(tree.evict(8, None).demoted_nodes, [lower, upper]);
        (tree, upper, lower)
    }

    #[test]
    fn a_plan_locks_and_its_cancel_unlocks() {
        let (mut tree, upper, lower) = demoted();
        let before = tree.digest();
        let mut plan = tree.plan_load_back(lower).unwrap();
        assert_eq!((plan.nodes(), plan.host_pages()), (&[upper, lower][..], &keys(20..28)[..]));
        assert!(tree.evict_host(8).host_pages.is_empty());
        tree.sound();
        tree.cancel_load_back_plan(&mut plan).unwrap();
        assert_eq!(tree.digest(), before);
        assert!(matches!(tree.cancel_load_back_plan(&mut plan), Err(Error::Lock(_))));
        assert!(matches!(tree.begin_load_back(&mut plan, &keys(0..8)), Err(Error::Lock(_))));
    }

    #[test]
    fn pages_count_at_once_and_wait_for_the_ack() {
        let (mut tree, _, lower) = demoted();
        let mut plan = tree.plan_load_back(lower).unwrap();
        // Cuts between plan and begin are followed.
        tree.get(&keys(0..6));
        assert!(matches!(tree.begin_load_back(&mut plan, &[1]), Err(Error::Argument(_))));
        let ack = tree.begin_load_back(&mut plan, &keys(40..48)).unwrap();
        let found = tree.get(&keys(0..8));
        assert_eq!((found.device_pages(), found.pending_ack), (keys(40..48), Some(ack)));
        assert_eq!(tree.protected_tokens(), 8);
        tree.sound();
        assert!(matches!(tree.finish_backup(ack), Err(Error::Lock(_)))); // the other direction
        tree.finish_load_back(ack).unwrap();
        assert_eq!((tree.get(&keys(0..8)).pending_ack, tree.protected_tokens()), (None, 0));
        assert!(matches!(tree.finish_load_back(ack), Err(Error::Lock(_))));
        tree.sound();
    }

    #[test]
    fn a_path_names_what_it_waits_for_from_the_root_on() {
        let (mut tree, upper, lower) = demoted();
        let mut first = tree.plan_load_back(upper).unwrap();
        let first = tree.begin_load_back(&mut first, &keys(40..44)).unwrap();
        let mut second = tree.plan_load_back(lower).unwrap();
        let second = tree.begin_load_back(&mut second, &keys(44..48)).unwrap();
        let middle = tree.get(&keys(0..6)).last_device_node; // cuts what waits for the second
        assert_eq!([first, second].map(|ack| tree.nodes_of(ack)), [1, 2]);
        for (node, acks) in [
            (tree.root(), vec![]),
            (upper, vec![first]),
            (middle, vec![first, second]),
            (lower, vec![first, second]),
        ] {
            assert_eq!(tree.pending_acks(node).unwrap(), acks);
        }
        assert_eq!(tree.pending_acks(99), Err(Error::UnknownNode(99)));
        tree.finish_load_back(first).unwrap();
        assert_eq!((tree.pending_acks(lower).unwrap(), tree.nodes_of(first)), (vec![second], 0));
        tree.finish_load_back(second).unwrap();
        assert!(tree.pending_acks(lower).unwrap().is_empty());
    }

    #[test]
    fn a_cancel_is_refused_while_others_build_on_it() {
        let (mut tree, upper, lower) = demoted();
        let mut plan = tree.plan_load_back(lower).unwrap();
        let ack = tree.begin_load_back(&mut plan, &keys(40..48)).unwrap();
        let before = tree.digest();
        let mut lock = tree.inc_lock_ref(upper).unwrap();
        assert!(matches!(tree.cancel_load_back(ack), Err(Error::Lock(_))));
        tree.dec_lock_ref(&mut lock).unwrap();
        assert_eq!(tree.digest(), before);
        let mut key = keys(0..4);
        key.extend([77, 78]);
        tree.put(&key, 60);
        assert!(matches!(tree.cancel_load_back(ack), Err(Error::Lock(text)) if text.contains("below")));
        tree.evict(2, None);
        assert_eq!(tree.cancel_load_back(ack).unwrap(), keys(40..48));
        assert_eq!((tree.device_tokens(), tree.host_tokens(), tree.protected_tokens()), (0, 8, 0));
        tree.sound();
    }

    #[test]
    fn a_plan_is_stale_once_an_insert_has_brought_pages() {
        let (mut tree, _, lower) = demoted();
        let mut plan = tree.plan_load_back(lower).unwrap();
        tree.put(&keys(0..4), 60);
        assert!(matches!(tree.begin_load_back(&mut plan, &keys(40..48)), Err(Error::Lock(_))));
        tree.cancel_load_back_plan(&mut plan).unwrap();
        assert_eq!(tree.protected_tokens(), 0);
        tree.sound();
    }

    #[test]
    fn nothing_to_load_is_a_plan_of_no_pages() {
        let (mut tree, _, _) = demoted();
        let node = tree.put(&keys(0..8), 60).node;
        let mut plan = tree.plan_load_back(node).unwrap();
        assert_eq!((plan.pages(), tree.protected_tokens()), (0, 8));
        let ack = tree.begin_load_back(&mut plan, &[]).unwrap();
        tree.finish_load_back(ack).unwrap();
        assert_eq!(tree.protected_tokens(), 0);
    }
}
