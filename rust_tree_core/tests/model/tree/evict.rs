//! Who goes, and in what order: every key computed anew at every step.

use std::collections::BTreeSet;

use rust_tree_core::{Gone, HostEvicted, HostOrder, NodeId, Tier};

use super::{Faults, Kind, ModelTree, Node};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    pub device_pages: Vec<u32>,
    pub host_pages: Vec<u32>,
    pub demoted_nodes: Vec<NodeId>,
    pub write_back_nodes: Vec<NodeId>,
    pub dropped_tokens: u64,
}

impl ModelTree {
    fn option(&self, name: &str, default: i64) -> i64 {
        let mut options = self.config.policy_options.iter();
        let given = options.find(|(given, _)| given == name);
        given.map_or(default, |&(_, value)| value)
    }

    fn eviction_key(&self, node: &Node) -> (i64, i64) {
        let signed = |value: u64| i64::try_from(value).expect("a small number");
        let last = signed(node.last);
        let created = signed(node.created);
        let hits = signed(node.hits);
        match self.config.eviction_policy.as_str() {
            "lru" => (0, last),
            "lfu" => (hits, last),
            "fifo" => (0, created),
            "mru" => (0, -last),
            "filo" => (0, -created),
            "priority" => (node.priority, last),
            "slru" => {
                let protected = hits >= self.option("protected_threshold", 2);
                (i64::from(protected), last)
            }
            "tlru" => {
                let estimate = self.option("next_prompt_estimate", 0);
                let threshold = self.option("threshold", 0);
                let safe_from = (signed(node.history as u64) + estimate - threshold).max(0);
                let tail_safe = signed(node.start as u64) >= safe_from;
                (if tail_safe { -1 } else { 0 }, last)
            }
            other => panic!("the model does not know the policy {other}"),
        }
    }

    fn smallest(&self, candidates: impl Iterator<Item = NodeId>) -> Option<NodeId> {
        candidates.min_by_key(|id| (self.eviction_key(&self.nodes[id]), *id))
    }

    fn is_device_leaf(&self, id: NodeId) -> bool {
        let node = &self.nodes[&id];
        node.on_device() && node.locks == 0 && !self.has_device_child(id)
    }

    fn is_host_leaf(&self, id: NodeId) -> bool {
        let node = &self.nodes[&id];
        !node.on_device()
            && self.published(node)
            && node.locks == 0
            && node.host_locks == 0
            && self.children(id).is_empty()
    }

    /// Whether the node will be a device leaf once everything that is held has gone: under
    /// write-back only held nodes are below it on device, and nothing but their holds locks it.
    fn is_leaf_to_be(&self, id: NodeId) -> bool {
        let node = &self.nodes[&id];
        let device_child_free = |child: &NodeId| {
            let child = &self.nodes[child];
            child.on_device() && child.hold.is_none()
        };
        // A hold's one lock is on the path of the node that carries it, its old id.
        let below = self.descendants(id).into_iter();
        let holds = below.filter(|below| self.nodes[below].hold == Some(*below)).count();
        self.write_back()
            && node.on_device()
            && !node.backed()
            && node.hold.is_none()
            && self.has_device_child(id)
            && !self.children(id).iter().any(device_child_free)
            && node.locks as usize == holds
    }

    pub fn evict(&mut self, num_pages: usize, host_room: Option<usize>) -> Evicted {
        let mut out = Evicted::default();
        let mut room = host_room;
        let mut skipped = BTreeSet::new();
        let mut gone = 0;
        while gone < num_pages {
            let ids = self.nodes.keys().copied();
            let candidates = ids.filter(|&id| self.is_device_leaf(id) || self.is_leaf_to_be(id));
            let candidates = candidates.filter(|id| !skipped.contains(id));
            let Some(victim) = self.smallest(candidates) else {
                break;
            };
            let pages = self.pages(victim);
            let node = &self.nodes[&victim];

            if node.backed() {
                self.demote(victim, &mut out.device_pages);
                out.demoted_nodes.push(victim);
                gone += pages;
                continue;
            }
            if self.host_tier() && (self.write_back() || node.pins > 0) {
                let need = self.room_for(victim);
                if room.is_none_or(|room| room >= need) {
                    room = room.map(|room| room - need);
                    self.lock_path(victim);
                    self.node(victim).hold = Some(victim);
                    out.write_back_nodes.push(victim);
                    gone += pages;
                    continue;
                }
            }
            if self.has_device_child(victim) || !self.may_be_dropped(victim) {
                skipped.insert(victim);
                continue;
            }
            let needed = num_pages - gone;
            if pages > needed {
                let keep = (pages - needed) * self.config.page_size;
                self.cut(victim, self.nodes[&victim].start + keep);
            }
            gone += self.pages(victim);
            self.drop_with_descendants(victim, &mut out);
        }
        out
    }

    /// Host pages that a write-back of this node takes, when it is asked for alone.
    fn room_for(&self, victim: NodeId) -> usize {
        let mut need = self.pages(victim);
        if self.write_through() {
            // Host copies have no gaps there, so the path above has to be written first.
            for ancestor in self.ancestors(victim) {
                if !self.nodes[&ancestor].backed() {
                    need += self.pages(ancestor);
                }
            }
        }
        need
    }

    /// Takes the device pages of a node that stays on host.
    pub(super) fn demote(&mut self, id: NodeId, device_pages: &mut Vec<u32>) {
        self.emit_removed(Tier::Device, id);
        let pages = self.node(id).device.take();
        device_pages.extend(pages.expect("a node on device"));
    }

    /// Whether nothing keeps the node or what hangs below it.
    fn may_be_dropped(&self, id: NodeId) -> bool {
        let mut all = self.descendants(id);
        all.push(id);
        all.iter().all(|id| {
            let node = &self.nodes[id];
            node.locks == 0 && node.host_locks == 0 && node.pending.is_none() && node.pins == 0
        })
    }

    fn drop_with_descendants(&mut self, id: NodeId, out: &mut Evicted) {
        let below = self.descendants(id);
        self.emit_removed(Tier::Device, id);
        let node = &self.nodes[&id];
        out.device_pages.extend(node.device.iter().flatten().copied());
        out.dropped_tokens += node.tokens() as u64;
        for below in self.deepest_first(below.into_iter()) {
            if self.published(&self.nodes[&below]) {
                self.emit_removed(Tier::Host, below);
            }
            let node = self.nodes.remove(&below).expect("a live node");
            assert!(node.device.is_none(), "device pages below a device leaf");
            out.host_pages.extend(node.host.iter().flatten().copied());
            out.dropped_tokens += node.tokens() as u64;
        }
        self.nodes.remove(&id);
    }

    /// Gives a hold's lock back; every part of the hold is an ordinary node then.
    pub(super) fn release_hold(&mut self, owner: NodeId) {
        self.unlock_path(owner);
        self.end_hold(owner);
    }

    pub(super) fn end_hold(&mut self, owner: NodeId) {
        for node in self.nodes.values_mut() {
            if node.hold == Some(owner) {
                node.hold = None;
            }
        }
    }

    pub fn drop_nodes(&mut self, ids: &[NodeId]) -> Result<Evicted, Faults> {
        let mut faults = Vec::new();
        for (index, id) in ids.iter().enumerate() {
            if !self.alive(*id) {
                faults.push(Kind::UnknownNode);
            } else if self.nodes.get(id).and_then(|node| node.hold) != Some(*id) {
                // A part that was cut from a held node goes through its old id only.
                faults.push(Kind::Lock);
            }
            if ids[..index].contains(id) {
                faults.push(Kind::Argument);
            }
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        let mut out = Evicted::default();
        for &id in ids {
            let parts = self.nodes.iter();
            let parts = parts.filter(|(_, node)| node.hold == Some(id));
            let parts: Vec<NodeId> = parts.map(|(&part, _)| part).collect();
            self.release_hold(id);
            // The old id is the deepest of its parts.
            for part in self.deepest_first(parts.into_iter()) {
                let unbacked = !self.nodes[&part].backed();
                if unbacked && !self.has_device_child(part) && self.may_be_dropped(part) {
                    self.drop_with_descendants(part, &mut out);
                }
            }
        }
        Ok(out)
    }

    pub fn evict_host(&mut self, num_pages: usize) -> HostEvicted {
        let (mut out, mut gone) = (Vec::new(), Vec::new());
        while out.len() < num_pages {
            let groups = self.host_groups();
            let Some(id) = groups.into_iter().find_map(|group| self.smallest(group.into_iter())) else {
                break;
            };
            if self.nodes[&id].on_device() {
                self.emit_removed(Tier::Host, id);
                gone.push(Gone { node: id, heir: self.nodes[&id].parent, pages: self.pages(id) });
                out.extend(self.node(id).host.take().expect("a host copy"));
                continue;
            }
            let pages = self.pages(id);
            let needed = num_pages - out.len();
            if pages > needed {
                let keep = (pages - needed) * self.config.page_size;
                self.cut(id, self.nodes[&id].start + keep);
            }
            self.emit_removed(Tier::Host, id);
            gone.push(Gone { node: id, heir: self.nodes[&id].parent, pages: self.pages(id) });
            let node = self.nodes.remove(&id).expect("a live node");
            out.extend(node.host.expect("a host copy"));
        }
        HostEvicted { host_pages: out, gone }
    }

    pub fn evictable_host_pages(&self, limit: usize) -> usize {
        self.clone().evict_host(limit).host_pages.len().min(limit)
    }

    /// What may leave the host, in groups, the first of which goes first.
    fn host_groups(&self) -> Vec<Vec<NodeId>> {
        let ids = self.nodes.keys().copied();
        let leaves = ids.filter(|&id| self.is_host_leaf(id) && self.nodes[&id].pins == 0).collect();
        let copies = self.nodes.keys().copied().filter(|&id| self.copy_may_go(id));
        // Copies of what will stay on device for now go before those of what may be evicted next.
        let (next, staying) = copies.partition(|&id| self.is_device_leaf(id));
        match self.config.host_order {
            HostOrder::CopiesFirst => vec![staying, next, leaves],
            HostOrder::LeavesFirst => vec![leaves, staying, next],
        }
    }

    /// Whether the node could do with its device pages alone.
    fn copy_may_go(&self, id: NodeId) -> bool {
        let node = &self.nodes[&id];
        let child_backed = self.children(id).iter().any(|child| self.nodes[child].backed());
        node.on_device()
            && self.published(node)
            && node.host_locks == 0
            && node.pending.is_none()
            && node.pins == 0
            && !(self.write_through() && child_backed)
    }
}
