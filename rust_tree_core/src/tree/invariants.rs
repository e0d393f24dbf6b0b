//! What must hold at any time, looked at from scratch.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;

use super::node::{DEAD, NONE, Node, Slot, flag};
use super::{Sizes, Tree};
use crate::error::{Error, Result};
use crate::hash;

fn violated(text: String) -> Error {
    Error::Invariant(text)
}

fn equal<T: PartialEq + Display>(what: &str, kept: &T, recomputed: &T) -> Result<()> {
    if kept == recomputed {
        Ok(())
    } else {
        Err(violated(format!("{what} is {kept}, recomputed {recomputed}")))
    }
}

impl Tree {
    /// Recomputes everything that is kept, and returns the first difference. Costs a walk over the whole tree.
    pub fn check_invariants(&self) -> Result<()> {
        self.check_arena()?;
        for slot in self.live_slots() {
            let node = &self.nodes[slot as usize];
            self.check_node(slot, node).map_err(|text| violated(format!("node {}: {text}", node.id)))?;
            self.check_digests(node)?;
        }
        self.check_pages()?;
        self.check_sums()?;
        self.check_orders()?;
        self.check_copies()?;
        equal("digest", &self.digest, &self.recomputed_digest())
    }

    /// Nodes, ids, edges and namespaces name each other.
    fn check_arena(&self) -> Result<()> {
        let mut reached = vec![self.root];
        let mut at = 0;
        while at < reached.len() {
            let slot = reached[at];
            let node = &self.nodes[slot as usize];
            if self.slots.get(&node.id) != Some(&slot) {
                return Err(violated(format!("node {} is not found by its id", node.id)));
            }
            if reached.len() > self.nodes.len() {
                return Err(violated("the links of the tree run in a circle".to_owned()));
            }
            reached.extend(self.children(slot));
            at += 1;
        }
        equal("number of ids", &self.slots.len(), &reached.len())?;
        let dead = self.nodes.iter().filter(|node| node.id == DEAD).count();
        equal("number of free places", &self.free.len(), &dead)?;
        equal("number of nodes", &(self.nodes.len() - dead), &reached.len())?;
        equal("number of edges", &self.edges.len(), &(reached.len() - 1))?;
        let mut users: HashMap<u32, u64> = HashMap::new();
        for &slot in &reached {
            *users.entry(self.nodes[slot as usize].namespace).or_default() += 1;
        }
        equal("number of namespaces", &self.namespaces.len(), &users.len())?;
        for (id, count) in users {
            equal("nodes of a namespace", &self.namespaces.nodes(id), &count)?;
        }
        Ok(())
    }

    fn check_node(&self, slot: Slot, node: &Node) -> std::result::Result<(), String> {
        let parent = &self.nodes[node.parent as usize];
        let pages = node.len as usize;
        let require = |holds: bool, text: &str| if holds { Ok(()) } else { Err(text.to_owned()) };
        require(pages > 0, "has no pages")?;
        require(node.tokens.len() == pages * self.shape.page + self.shape.extra, "tokens and pages differ")?;
        require(node.start == parent.end(), "does not begin where its parent ends")?;
        let below_root = node.parent == self.root;
        require(below_root || node.namespace == parent.namespace, "its parent is of another namespace")?;
        if self.shape.extra == 1 && !below_root {
            require(node.tokens.first() == parent.tokens.last(), "does not continue its parent's last pair")?;
        }

        // Every child stands under the first page of its own key.
        let first = &node.tokens[..self.shape.width()];
        let namespace = if below_root { node.namespace } else { crate::namespace::PLAIN };
        require(
            node.edge_hash == self.edges.hash(node.parent, namespace, first),
            "its edge hash is another",
        )?;
        let found = self.edges.find(node.edge_hash, |found| found == slot);
        require(found == Some(slot), "is not found by its edge")?;

        // A copy somewhere; device pages of a path first; host copies without gaps where that is promised.
        require(node.on_device() || node.backed(), "has no copy")?;
        let covers = |held: usize, has: bool| held == if has { pages } else { 0 };
        require(covers(node.device_pages().len(), node.on_device()), "device pages do not cover it")?;
        require(covers(node.host_pages().len(), node.backed()), "host pages do not cover it")?;
        require(below_root || !node.on_device() || parent.on_device(), "is on device below an evicted node")?;
        if self.is_gap_free() {
            require(below_root || !node.backed() || parent.backed(), "has a host copy below a gap")?;
            let above_published = below_root || parent.published();
            require(!node.published() || above_published, "is published below a copy that is not")?;
            require(!node.has(flag::WAITS) || !above_published, "waits for nothing")?;
        }
        require(!node.has(flag::WAITS) || node.backed(), "waits without a host copy")?;
        require(self.has_host() || !node.backed(), "has a host copy, but there is no host tier")?;
        let count = |is: fn(&Node) -> bool| {
            self.children(slot).filter(|&child| is(&self.nodes[child as usize])).count()
        };
        require(node.child_count as usize == self.children(slot).count(), "child_count is wrong")?;
        require(node.device_children as usize == count(Node::on_device), "device_children is wrong")?;
        require(node.host_children as usize == count(Node::backed), "host_children is wrong")?;

        // Locks and marks.
        require(
            below_root || parent.full().lock_ref >= node.full().lock_ref,
            "is locked more often than its parent",
        )?;
        require(below_root || parent.pins >= node.pins, "is pinned more often than its parent")?;
        let backup = node.has(flag::PENDING_BACKUP);
        let load = node.has(flag::PENDING_LOAD);
        require(!(backup && load), "waits for copies in both directions")?;
        require(
            !backup || (node.on_device() && node.backed() && node.locked()),
            "pending backup, not locked",
        )?;
        require(!load || (node.on_device() && node.backed()), "pending load-back without both copies")?;
        require(!load || (node.locked() && node.host_locked()), "pending load-back, not locked")?;
        let held = self.children(slot).filter(|&child| self.nodes[child as usize].held()).count();
        require(node.held_children as usize == held, "held_children is wrong")?;
        require(node.has(flag::UNDER_HOLDS) == (node.hold_locks > 0), "its mark of holds is wrong")?;
        require(node.hold_locks <= node.full().lock_ref, "has more holds than locks")?;
        require(
            !node.held() || (node.on_device() && !node.backed() && node.locked()),
            "held, but not to be",
        )?;
        require(!node.has(flag::VICTIM | flag::BACKUP_LOCK) || backup, "has marks of a backup that ended")?;
        let listed = |nodes: &[u64]| nodes.iter().filter(|&&id| id == node.id).count() == 1;
        if backup {
            let pending = self.backups.get(&node.ack);
            require(pending.is_some_and(|p| listed(&p.nodes)), "its backup does not list it once")?;
        }
        if load {
            let pending = self.load_backs.get(&node.ack);
            require(pending.is_some_and(|p| listed(&p.nodes)), "its load-back does not list it once")?;
        }
        Ok(())
    }

    /// Digests that were computed here are those of the tokens.
    fn check_digests(&self, node: &Node) -> Result<()> {
        if node.digests.is_none() || node.has(flag::DIGESTS_GIVEN) {
            return Ok(());
        }
        let seed;
        let before = if node.parent == self.root {
            seed = self.namespaces.seed(node.namespace);
            seed.as_ref()
        } else {
            let Some(digest) = self.nodes[node.parent as usize].digests().last() else { return Ok(()) };
            Some(digest)
        };
        if hash::chain(&node.tokens, self.shape, before) != node.digests() {
            return Err(violated(format!("node {}: its page digests are not those of its tokens", node.id)));
        }
        Ok(())
    }

    /// No page is owned twice.
    fn check_pages(&self) -> Result<()> {
        let (mut device, mut host) = (HashSet::new(), HashSet::new());
        for slot in self.live_slots() {
            let node = &self.nodes[slot as usize];
            for (tier, seen, pages) in
                [("device", &mut device, node.device_pages()), ("host", &mut host, node.host_pages())]
            {
                if let Some(page) = pages.iter().find(|&&page| !seen.insert(page)) {
                    return Err(violated(format!("node {}: {tier} page {page} is owned twice", node.id)));
                }
            }
        }
        Ok(())
    }

    fn check_sums(&self) -> Result<()> {
        let mut sizes = Sizes::default();
        for slot in self.live_slots() {
            let node = &self.nodes[slot as usize];
            let pages = u64::from(node.len);
            let count = |is: bool| if is { pages } else { 0 };
            sizes.device += count(node.on_device());
            sizes.protected += count(node.on_device() && node.locked());
            sizes.host += count(node.published());
            sizes.pending_host += count(node.backed() && !node.published());
            sizes.pinned += count(node.pins > 0);
        }
        equal("device pages", &self.sizes.device, &sizes.device)?;
        equal("protected pages", &self.sizes.protected, &sizes.protected)?;
        equal("host pages", &self.sizes.host, &sizes.host)?;
        equal("pending host pages", &self.sizes.pending_host, &sizes.pending_host)?;
        equal("pinned pages", &self.sizes.pinned, &sizes.pinned)
    }

    /// The orders hold just the candidates, under their current keys.
    fn check_orders(&self) -> Result<()> {
        let mut device = 0;
        let mut host = 0;
        for slot in self.live_slots() {
            let node = &self.nodes[slot as usize];
            let stale =
                |order: &str| violated(format!("node {}: its place in the {order} order is stale", node.id));
            let key = node
                .may_be_victim(self.is_write_back())
                .then(|| self.policy.key(&node.access(self.shape.page)));
            let stands = node.has(flag::IN_DEVICE_ORDER).then_some(node.device_key);
            if key != stands {
                return Err(stale("device"));
            }
            device += usize::from(key.is_some());
            let stands = node.has(flag::IN_HOST_ORDER).then_some(node.host_rank);
            host += usize::from(stands.is_some());
            if !node.has(flag::HOST_DIRTY) && self.host_rank(node) != stands {
                return Err(stale("host"));
            }
        }
        equal("device leaves", &self.device_order.iter().count(), &device)?;
        equal("host candidates", &self.host_order.iter().count(), &host)?;
        let places = self.device_order.iter().map(|&(_, id, slot)| (id, slot));
        for (id, slot) in places.chain(self.host_order.iter().map(|&(_, id, slot)| (id, slot))) {
            if self.nodes[slot as usize].id != id {
                return Err(violated(format!("node {id} stands in an order and is dead")));
            }
        }
        Ok(())
    }

    /// What copies, plans and pins list lives and is marked; holds are counted where they lock.
    fn check_copies(&self) -> Result<()> {
        let mut holds: HashMap<Slot, u32> = HashMap::new();
        for slot in self.live_slots() {
            let node = &self.nodes[slot as usize];
            if node.held() && node.hold == node.id {
                for above in self.ancestors(slot) {
                    *holds.entry(above).or_default() += 1;
                }
            }
        }
        for slot in self.live_slots() {
            let counted = holds.get(&slot).copied().unwrap_or(0);
            equal("holds of a path", &self.nodes[slot as usize].hold_locks, &counted)?;
        }
        let marked = |ids: &[u64], flags: u32, serial: u64| {
            ids.iter().all(|id| {
                self.slots.get(id).is_some_and(|&slot| {
                    let node = &self.nodes[slot as usize];
                    node.has(flags) && node.ack == serial
                })
            })
        };
        for (&serial, pending) in &self.backups {
            if !marked(&pending.nodes, flag::PENDING_BACKUP, serial) {
                return Err(violated(format!("backup {serial} lists a node that does not wait for it")));
            }
        }
        for (&serial, pending) in &self.load_backs {
            if !marked(&pending.nodes, flag::PENDING_LOAD, serial) {
                return Err(violated(format!("load-back {serial} lists a node that does not wait for it")));
            }
        }
        for (&serial, plan) in &self.plans {
            let locked =
                |id: &u64| self.slots.get(id).is_some_and(|&slot| self.nodes[slot as usize].host_locked());
            if !plan.nodes.iter().all(locked) || !self.slots.contains_key(&plan.target) {
                return Err(violated(format!("load-back plan {serial} lists a node that it does not lock")));
            }
        }
        debug_assert!(self.nodes[self.root as usize].parent == NONE);
        Ok(())
    }
}
