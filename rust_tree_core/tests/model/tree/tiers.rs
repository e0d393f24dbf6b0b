//! Copies between the tiers: backup, load-back, host insert.

use rust_tree_core::{InsertHostArgs, NodeId, Tier, Tokens};

use super::{Copying, Faults, Handle, Kind, ModelTree, Planned, owned};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupPlan {
    pub nodes: Vec<NodeId>,
    pub pages: usize,
    pub device_pages: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupDone {
    pub nodes: Vec<NodeId>,
    pub device_pages: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadPlan {
    pub handle: Handle,
    pub nodes: Vec<NodeId>,
    pub pages: usize,
    pub host_pages: Vec<u32>,
    pub pending_ack: Option<Handle>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostInserted {
    pub node: NodeId,
    pub duplicate_host_pages: Vec<u32>,
    pub inserted_pages: usize,
}

impl ModelTree {
    // ---- backup ----

    pub fn plan_backup(&self, ids: &[NodeId]) -> BackupPlan {
        let wanted = |id: &NodeId| {
            let node = self.nodes.get(id);
            node.is_some_and(|node| node.on_device() && !node.backed())
        };
        let mut nodes: Vec<NodeId> = Vec::new();
        for id in ids.iter().filter(|id| wanted(id)) {
            let hold = self.nodes[id].hold;
            let alone = self.write_back() && hold.is_some();
            for on_path in self.path(*id) {
                // The room of a held node was counted for its own parts only, that of other held
                // ones for them.
                let other = self.nodes[&on_path].hold;
                let asked_for = ids.contains(&on_path) && other.is_some();
                let with_it = !alone || other == hold || asked_for;
                if with_it && wanted(&on_path) && !nodes.contains(&on_path) {
                    nodes.push(on_path);
                }
            }
        }
        let device = nodes.iter().filter_map(|id| self.nodes[id].device.as_ref());
        BackupPlan {
            pages: nodes.iter().map(|&id| self.pages(id)).sum(),
            device_pages: device.flatten().copied().collect(),
            nodes,
        }
    }

    pub fn begin_backup(&mut self, ids: &[NodeId], host_pages: &[u32]) -> Result<Handle, Faults> {
        let faults = self.backup_faults(ids, host_pages.len());
        if !faults.is_empty() {
            return Err(faults);
        }
        let ack = self.new_handle();
        for &id in ids {
            self.node(id).victim = self.nodes[&id].hold.is_some();
        }
        let mut dealt = 0;
        for &id in ids {
            if self.nodes[&id].hold == Some(id) {
                // The hold's lock is the copy's from now on, and the hold has ended for all its parts.
                self.end_hold(id);
            } else {
                // A part that was cut off leaves the hold alone; the lock there is the old id's.
                self.lock_path(id);
                self.node(id).hold = None;
            }
            let pages = self.pages(id);
            self.node(id).host = Some(host_pages[dealt..dealt + pages].to_vec());
            self.node(id).pending = Some(ack);
            dealt += pages;
        }
        let listed = ids.iter().map(|&id| (id, self.nodes[&id].start)).collect();
        self.copies.insert(ack, Copying::Backup { listed });
        Ok(ack)
    }

    fn backup_faults(&self, ids: &[NodeId], host_pages: usize) -> Faults {
        let mut faults = Vec::new();
        let mut pages = 0;
        if !self.host_tier() {
            faults.push(Kind::Argument);
        }
        for (index, id) in ids.iter().enumerate() {
            let before = &ids[..index];
            if before.contains(id) {
                faults.push(Kind::Argument);
            }
            if *id == self.root {
                // No page of its own to copy; nothing says which of the two this is.
                faults.extend([Kind::Lock, Kind::Argument]);
                continue;
            }
            let Some(node) = self.nodes.get(id) else {
                faults.push(Kind::UnknownNode);
                continue;
            };
            pages += self.pages(*id);
            if !node.on_device() || node.backed() {
                faults.push(Kind::Lock);
            }
            let parent_ready = node.parent == self.root
                || self.nodes[&node.parent].backed()
                || before.contains(&node.parent);
            if self.write_through() && !parent_ready {
                faults.push(Kind::Lock);
            }
        }
        // With other faults the count may be counted in more than one way.
        if pages != host_pages {
            faults.push(Kind::Argument);
        }
        faults
    }

    /// The nodes that are pending on an ack, by depth, then id.
    fn pending_on(&self, ack: Handle) -> Vec<NodeId> {
        let nodes = self.nodes.iter();
        let pending = nodes.filter(|(_, node)| node.pending == Some(ack));
        self.by_depth(pending.map(|(&id, _)| id))
    }

    pub fn finish_backup(&mut self, ack: Handle) -> Result<BackupDone, Faults> {
        let Some(Copying::Backup { listed }) = self.copies.get(&ack).cloned() else {
            return Err(vec![Kind::Lock]);
        };
        let before = self.all_published();
        let own = self.pending_on(ack);
        for &id in &own {
            self.node(id).pending = None;
        }
        self.copies.remove(&ack);
        let nodes = self.emit_published(&before);
        for (id, _) in listed {
            self.unlock_path(id);
        }
        let mut device_pages = Vec::new();
        // Deepest first. Those that wait for their parent's copy go too.
        for &id in own.iter().rev() {
            let victim = std::mem::take(&mut self.node(id).victim);
            if victim && self.nodes[&id].locks == 0 && !self.has_device_child(id) {
                self.demote(id, &mut device_pages);
            }
        }
        Ok(BackupDone { nodes, device_pages })
    }

    pub fn cancel_backup(&mut self, ack: Handle) -> Result<Vec<u32>, Faults> {
        let Some(Copying::Backup { listed }) = self.copies.get(&ack) else {
            return Err(vec![Kind::Lock]);
        };
        // In the order of the list; what was cut from a node stands before it.
        let own = listed.iter().flat_map(|&(id, start)| self.fragments(id, start));
        let own: Vec<NodeId> = own.collect();
        let mut below: Vec<NodeId> = Vec::new();
        if self.write_through() {
            for &id in &own {
                below.extend(self.descendants(id));
            }
            below.sort_unstable();
            below.dedup();
            // What has no host copy has nothing to lose.
            below.retain(|id| self.nodes[id].backed() && !own.contains(id));
        }
        let below = self.by_depth(below.into_iter());

        let own_kept = own.iter().any(|id| self.nodes[id].host_locks > 0);
        let below_kept = below.iter().any(|id| {
            let node = &self.nodes[id];
            node.host_locks > 0
                || self.loading(node).is_some()
                || (!node.on_device() && (node.locks > 0 || node.pins > 0))
        });
        if own_kept || below_kept {
            return Err(vec![Kind::Lock]);
        }

        let mut host_pages = Vec::new();
        for id in own.iter().chain(&below) {
            host_pages.extend(self.nodes[id].host.iter().flatten().copied());
        }
        // Deepest first, as the victims of a backup: their order from its end.
        for &id in below.iter().rev() {
            if self.published(&self.nodes[&id]) {
                self.emit_removed(Tier::Host, id);
            }
        }
        for &id in own.iter().chain(&below) {
            if let Some(ack) = self.nodes[&id].pending {
                self.leave_backup(id, ack);
            }
            self.node(id).host = None;
            if !self.nodes[&id].on_device() {
                self.nodes.remove(&id);
            }
        }
        self.copies.remove(&ack);
        Ok(host_pages)
    }

    /// Takes one node out of a backup, with the lock that the copy holds for it.
    fn leave_backup(&mut self, id: NodeId, ack: Handle) {
        let Some(Copying::Backup { listed }) = self.copies.get_mut(&ack) else {
            panic!("node {id} is not in a backup");
        };
        // A part that was cut off has no lock of its own.
        if let Some(index) = listed.iter().position(|&(listed, _)| listed == id) {
            listed.remove(index);
            self.unlock_path(id);
        }
        let node = self.node(id);
        node.pending = None;
        node.victim = false;
    }

    // ---- load-back ----

    pub fn plan_load_back(&mut self, id: NodeId) -> Result<LoadPlan, Faults> {
        if !self.alive(id) {
            return Err(vec![Kind::UnknownNode]);
        }
        let path = self.path(id).into_iter();
        let nodes: Vec<NodeId> = path.filter(|id| !self.nodes[id].on_device()).collect();
        // The evicted nodes are the last ones of the path, so one position tells them all.
        let start = nodes.first().map_or(self.end(id), |first| self.nodes[first].start);
        for &evicted in &nodes {
            self.node(evicted).host_locks += 1;
        }
        self.lock_path(id);
        let handle = self.new_handle();
        self.plans.insert(handle, Planned { node: id, start });
        let host = nodes.iter().filter_map(|id| self.nodes[id].host.as_ref());
        Ok(LoadPlan {
            handle,
            pages: nodes.iter().map(|&id| self.pages(id)).sum(),
            host_pages: host.flatten().copied().collect(),
            pending_ack: self.youngest_load(&self.path(id)),
            nodes,
        })
    }

    /// The load-backs that the path to a node waits for, root-first, each once.
    pub fn pending_acks(&self, id: NodeId) -> Result<Vec<Handle>, Faults> {
        if !self.alive(id) {
            return Err(vec![Kind::UnknownNode]);
        }
        let mut acks = Vec::new();
        for id in self.path(id) {
            let ack = self.loading(&self.nodes[&id]);
            acks.extend(ack.filter(|ack| !acks.contains(ack)));
        }
        Ok(acks)
    }

    pub fn begin_load_back(&mut self, plan: Handle, pages: &[u32]) -> Result<Handle, Faults> {
        let Some(Planned { node, start }) = self.plans.get(&plan).cloned() else {
            return Err(vec![Kind::Lock]);
        };
        let nodes = self.fragments(node, start);
        let mut faults = Vec::new();
        if nodes.iter().any(|id| self.nodes[id].on_device()) {
            faults.push(Kind::Lock);
        }
        if pages.len() != nodes.iter().map(|&id| self.pages(id)).sum::<usize>() {
            faults.push(Kind::Argument);
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        self.plans.remove(&plan);
        let ack = self.new_handle();
        self.copies.insert(ack, Copying::LoadBack { node, start });
        let mut dealt = 0;
        for id in nodes {
            let count = self.pages(id);
            self.node(id).device = Some(pages[dealt..dealt + count].to_vec());
            self.node(id).pending = Some(ack);
            dealt += count;
            self.emit_stored(Tier::Device, id);
        }
        Ok(ack)
    }

    pub fn cancel_load_back_plan(&mut self, plan: Handle) -> Result<(), Faults> {
        let planned = self.plans.remove(&plan).ok_or([Kind::Lock])?;
        self.give_back_load(planned.node, planned.start);
        Ok(())
    }

    fn give_back_load(&mut self, node: NodeId, start: usize) {
        for id in self.fragments(node, start) {
            self.node(id).host_locks -= 1;
        }
        self.unlock_path(node);
    }

    pub fn finish_load_back(&mut self, ack: Handle) -> Result<(), Faults> {
        let Some(Copying::LoadBack { node, start }) = self.copies.get(&ack).cloned() else {
            return Err(vec![Kind::Lock]);
        };
        for id in self.pending_on(ack) {
            self.node(id).pending = None;
        }
        self.copies.remove(&ack);
        self.give_back_load(node, start);
        Ok(())
    }

    pub fn cancel_load_back(&mut self, ack: Handle) -> Result<Vec<u32>, Faults> {
        let Some(Copying::LoadBack { node, start }) = self.copies.get(&ack).cloned() else {
            return Err(vec![Kind::Lock]);
        };
        let loaded = self.pending_on(ack);
        let needed = loaded.iter().any(|&id| {
            let children = self.children(id).into_iter();
            let mut others = children.filter(|child| !loaded.contains(child));
            self.nodes[&id].locks > 1 || others.any(|child| self.nodes[&child].on_device())
        });
        if needed {
            return Err(vec![Kind::Lock]);
        }
        let mut device_pages = Vec::new();
        for &id in &loaded {
            device_pages.extend(self.nodes[&id].device.iter().flatten().copied());
        }
        for id in self.deepest_first(loaded.into_iter()) {
            self.emit_removed(Tier::Device, id);
            let node = self.node(id);
            node.device = None;
            node.pending = None;
        }
        self.copies.remove(&ack);
        self.give_back_load(node, start);
        Ok(device_pages)
    }

    // ---- host insert ----

    /// The first raw token, which is there also where no position is.
    fn first_token(tokens: Tokens<'_>) -> Option<u32> {
        let first = match tokens {
            Tokens::U32(tokens) => tokens.first().map(|&token| i64::from(token)),
            Tokens::I32(tokens) => tokens.first().map(|&token| i64::from(token)),
            Tokens::I64(tokens) => tokens.first().copied(),
        };
        first.map(|token| u32::try_from(token).expect("checked"))
    }

    pub fn insert_host(&mut self, args: &InsertHostArgs<'_>) -> Result<HostInserted, Faults> {
        let size = self.config.page_size;
        let anchor = args.anchor;
        let mut faults = Vec::new();
        let tail = match self.positions(args.tokens) {
            Ok(positions) => self.whole_pages(positions),
            Err(fault) => return Err(fault),
        };
        let rows = args.hashes.map(<[_]>::len);
        if !self.host_tier()
            || args.host_pages.len() != tail.len() / size
            || rows.is_some_and(|rows| rows != args.host_pages.len())
        {
            faults.push(Kind::Argument);
        }
        let mut names = owned(args.namespace);
        let mut key = Vec::new();
        if let Some(node) = self.nodes.get(&anchor) {
            if names == (None, None) {
                names = node.names.clone();
            }
            let last_token = node.key.last().and_then(|position| position.1);
            let first_token = Self::first_token(args.tokens);
            let joins = !self.config.bigram || first_token.is_none() || first_token == last_token;
            if names != node.names || !joins {
                faults.push(Kind::Argument);
            }
            key.clone_from(&node.key);
        } else if anchor != self.root {
            faults.push(Kind::UnknownNode);
        }
        if !faults.is_empty() {
            return Err(faults);
        }

        let nothing =
            HostInserted { node: anchor, duplicate_host_pages: args.host_pages.to_vec(), inserted_pages: 0 };
        let anchor_unbacked = anchor != self.root && !self.nodes[&anchor].backed();
        if tail.is_empty() || (self.write_through() && anchor_unbacked) {
            return Ok(nothing);
        }

        let begin = key.len();
        key.extend(tail);
        let caller_pages = |from: usize, to: usize| -> Vec<u32> {
            args.host_pages[(from - begin) / size..(to - begin) / size].to_vec()
        };
        let walk = self.walk(anchor, &key, &names, |_| true);
        let mut path = self.cut_at_end(walk);
        let before = self.all_published();
        let mut duplicates = Vec::new();
        let mut taken = Vec::new();
        for &id in &path {
            let node = &self.nodes[&id];
            let pages = caller_pages(node.start, node.end());
            if node.backed() {
                duplicates.extend(pages);
                continue;
            }
            if node.hold == Some(id) {
                self.release_hold(id);
            }
            let node = self.node(id);
            // A part that was cut off loses its mark; the lock stays with the old id.
            node.hold = None;
            node.host = Some(pages);
            taken.push(id);
        }
        let deepest = path.last().copied().unwrap_or(anchor);
        let covered = self.end(deepest);
        let mut made = None;
        if covered < key.len() {
            let priority = self.nodes.get(&deepest).map_or(0, |node| node.priority);
            let id = self.make_node(deepest, &key, &names, priority);
            self.node(id).host = Some(caller_pages(covered, key.len()));
            taken.push(id);
            path.push(id);
            made = Some(id);
        }
        if anchor != self.root {
            self.stamp(&[anchor]);
        }
        self.stamp(&path);
        if let Some(id) = made {
            self.node(id).created = self.nodes[&id].last;
        }
        let inserted_pages = taken.iter().map(|&id| self.pages(id)).sum();
        self.emit_published(&before);
        Ok(HostInserted {
            node: path.last().copied().unwrap_or(anchor),
            duplicate_host_pages: duplicates,
            inserted_pages,
        })
    }
}
