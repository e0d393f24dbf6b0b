//! Making room in the tiers, and the copies to host.

use super::Replay;
use crate::error::Result;
use crate::{BackupPlan, Evicted, NodeId};

impl Replay {
    /// Evicts what is missing to `count` free device pages; false if they can not be freed.
    pub(super) fn make_room(&mut self, count: usize) -> Result<bool> {
        let mut before = None;
        // What stands above a victim that is written back may have to wait for its ack: so one call may free less
        // than was asked for, and the next one more.
        while count > self.device.room() && before != Some(self.device.room()) {
            before = Some(self.device.room());
            let evicted = self.tree.evict(count - self.device.room(), None);
            self.take_back(&evicted);
            self.write_back(&evicted.write_back_nodes)?;
        }
        Ok(count <= self.device.room())
    }

    fn take_back(&mut self, evicted: &Evicted) {
        self.device.give(&evicted.device_pages);
        self.host.give(&evicted.host_pages);
        let dropped = evicted.dropped_tokens / self.tree.page_size() as u64;
        let freed = evicted.device_pages.len() as u64;
        self.report.device_evicted += freed;
        self.report.dropped += dropped;
        // What was dropped was on device, or its host pages were freed with it.
        self.report.demoted += freed + evicted.host_pages.len() as u64 - dropped;
    }

    /// Copies the victims of a write-back to host as one; where there is no room for all, the coldest are dropped.
    fn write_back(&mut self, mut victims: &[NodeId]) -> Result<()> {
        while let [coldest, others @ ..] = victims {
            if self.copy_to_host(&self.tree.plan_backup(victims))? {
                break;
            }
            self.report.backups_given_up += 1;
            let dropped = self.tree.drop_nodes(&[*coldest])?;
            self.take_back(&dropped);
            victims = others;
        }
        Ok(())
    }

    /// Copies what a write-through policy wants on host; what finds no room, from the last node on, is given up: the
    /// tree asks again at the next hit.
    pub(super) fn back_up(&mut self, mut nodes: &[NodeId]) -> Result<()> {
        while let [others @ .., _] = nodes {
            let plan = self.tree.plan_backup(nodes);
            let Some(&first) = plan.nodes.first() else { break };
            // The path above has its copies, and they must not be what makes room for those below.
            let above = self.tree.node_info(first)?.parent.unwrap_or_else(|| self.tree.root());
            let mut lock = self.tree.inc_host_lock_ref(above)?;
            let copied = self.copy_to_host(&plan)?;
            self.tree.dec_host_lock_ref(&mut lock)?;
            if copied {
                break;
            }
            self.report.backups_given_up += 1;
            nodes = others;
        }
        Ok(())
    }

    /// One copy for the whole plan; false if the host has no room for it.
    fn copy_to_host(&mut self, plan: &BackupPlan) -> Result<bool> {
        if !self.make_host_room(plan.pages) {
            return Ok(false);
        }
        let mut pages = Vec::with_capacity(plan.pages);
        self.host.take(plan.pages, &mut pages);
        let ack = self.tree.begin_backup(&plan.nodes, &pages)?;
        let done = self.tree.finish_backup(ack)?;
        self.device.give(&done.device_pages);
        self.report.copied_to_host += plan.pages as u64;
        self.report.device_evicted += done.device_pages.len() as u64;
        self.report.demoted += done.device_pages.len() as u64;
        Ok(true)
    }

    /// Evicts what is missing to `count` free host pages; false if they can not be freed.
    fn make_host_room(&mut self, count: usize) -> bool {
        if count > self.host.size() {
            return false; // nobody is evicted for what will not fit anyway
        }
        if count > self.host.room() {
            let freed = self.tree.evict_host(count - self.host.room()).host_pages;
            self.host.give(&freed);
            self.report.host_evicted += freed.len() as u64;
        }
        count <= self.host.room()
    }
}
