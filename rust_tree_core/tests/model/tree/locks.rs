//! Device locks, host locks and pins.

use rust_tree_core::NodeId;

use super::{Faults, Handle, Kind, ModelTree};

impl ModelTree {
    pub(super) fn lock_path(&mut self, id: NodeId) {
        for on_path in self.path(id) {
            self.node(on_path).locks += 1;
        }
    }

    pub(super) fn unlock_path(&mut self, id: NodeId) {
        for on_path in self.path(id) {
            self.node(on_path).locks -= 1;
        }
    }

    /// The node and what was cut from it: the part of its path from position `start` on.
    pub(super) fn fragments(&self, id: NodeId, start: usize) -> Vec<NodeId> {
        let path = self.path(id).into_iter();
        path.filter(|on_path| self.nodes[on_path].start >= start).collect()
    }

    pub fn inc_lock_ref(&mut self, id: NodeId) -> Result<Handle, Faults> {
        if !self.alive(id) {
            return Err(vec![Kind::UnknownNode]);
        }
        self.lock_path(id);
        let handle = self.new_handle();
        self.locks.insert(handle, id);
        Ok(handle)
    }

    pub fn dec_lock_ref(&mut self, handle: Handle) -> Result<(), Faults> {
        let id = self.locks.remove(&handle).ok_or([Kind::Lock])?;
        self.unlock_path(id);
        Ok(())
    }

    pub fn inc_host_lock_ref(&mut self, id: NodeId) -> Result<Handle, Faults> {
        if !self.alive(id) {
            return Err(vec![Kind::UnknownNode]);
        }
        // The root gets a receipt for nothing: no part of its path begins anywhere.
        let start = self.nodes.get(&id).map_or(0, |node| node.start);
        if id != self.root {
            self.node(id).host_locks += 1;
        }
        let handle = self.new_handle();
        self.host_locks.insert(handle, (id, start));
        Ok(handle)
    }

    pub fn dec_host_lock_ref(&mut self, handle: Handle) -> Result<(), Faults> {
        let (id, start) = self.host_locks.remove(&handle).ok_or([Kind::Lock])?;
        for fragment in self.fragments(id, start) {
            self.node(fragment).host_locks -= 1;
        }
        Ok(())
    }

    pub fn pin(&mut self, id: NodeId, expires_at: Option<f64>) -> Result<Handle, Faults> {
        let mut faults = Vec::new();
        if !self.host_tier() {
            faults.push(Kind::Argument);
        }
        if !self.alive(id) {
            faults.push(Kind::UnknownNode);
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        let path = self.path(id);
        let covered = self.nodes.iter().filter(|(other, node)| node.pins > 0 || path.contains(other));
        let tokens: u64 = covered.map(|(_, node)| node.tokens() as u64).sum();
        if self.config.pin_capacity.is_some_and(|capacity| tokens > capacity) {
            return Err(vec![Kind::Argument]);
        }
        for on_path in path {
            self.node(on_path).pins += 1;
        }
        let handle = self.new_handle();
        self.pins.insert(handle, (id, expires_at));
        Ok(handle)
    }

    pub fn unpin(&mut self, handle: Handle) -> Result<(), Faults> {
        let (id, _) = self.pins.remove(&handle).ok_or([Kind::Lock])?;
        for on_path in self.path(id) {
            self.node(on_path).pins -= 1;
        }
        Ok(())
    }

    pub fn expire_pins(&mut self, now: f64) -> usize {
        let pins = self.pins.iter();
        let over: Vec<Handle> = pins
            .filter(|(_, (_, expires_at))| expires_at.is_some_and(|at| at <= now))
            .map(|(&handle, _)| handle)
            .collect();
        for &handle in &over {
            self.unpin(handle).expect("a live pin");
        }
        over.len()
    }
}
