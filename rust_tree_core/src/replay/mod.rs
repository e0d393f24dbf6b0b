//! Replays the requests of a trace against the tree: the smallest caller that does all the tree asks of one.
//!
//! A trace names the blocks of each prompt. A replay asks, request by request, what a cache of these sizes and
//! policies would have held: there is no model and no byte moves, so every copy is acknowledged at once. What is
//! done for a request, in which order, and what counts as a hit is in [`Replay::serve`] and nowhere else.

mod config;
mod pool;
mod report;
mod requests;
#[cfg(test)]
mod tests;
mod write;

use std::time::Instant;

pub use config::{ReplayConfig, Unit};
pub use report::ReplayReport;
pub use requests::Requests;

use crate::error::{Error, Result};
use crate::{InsertArgs, Namespace, NodeId, Tokens, Tree};
use pool::Pool;
use report::Hits;

/// A tree with the pools of its tiers, and the counters of what requests did to it.
#[derive(Debug)]
pub struct Replay {
    tree: Tree,
    unit: Unit,
    block_size: usize,
    device: Pool,
    host: Pool,
    report: ReplayReport,
    /// Memory for the tokens of the request at hand.
    made: Vec<u32>,
}

impl Replay {
    /// An empty cache.
    pub fn new(config: &ReplayConfig) -> Result<Self> {
        let (device, host) = config.pools()?;
        Ok(Self {
            tree: Tree::new(config.tree())?,
            unit: config.unit,
            block_size: config.block_size,
            device: Pool::new(device),
            host: Pool::new(host),
            report: ReplayReport::default(),
            made: Vec::new(),
        })
    }

    /// Serves requests in order. Can be called again with more of them: the cache goes on as it is.
    ///
    /// All of them are checked before the first is served.
    pub fn run(&mut self, requests: &Requests<'_>) -> Result<()> {
        requests.check(self.block_size)?;
        let mut made = std::mem::take(&mut self.made);
        let result = requests.iter().try_for_each(|(length, blocks)| {
            let key = match self.unit {
                Unit::Blocks => blocks,
                Unit::Tokens { .. } => {
                    requests::make_tokens(&mut made, blocks, length, self.block_size);
                    &made
                }
            };
            // Parsing and making tokens is the work of whoever sends requests: it is not timed.
            let begin = Instant::now();
            let hits = self.serve(key);
            self.report.seconds += begin.elapsed().as_secs_f64();
            self.report.count(hits?.as_ref(), self.unit, self.block_size, length, blocks.len());
            Ok(())
        });
        self.made = made;
        result
    }

    /// What happened so far.
    pub fn report(&self) -> &ReplayReport {
        &self.report
    }

    /// One request: match, load back, lock, make room, insert, back up, unlock. `None`: it went past the cache.
    ///
    /// 1. A request of more pages than the device tier has bypasses: nothing is looked up or inserted, none of
    ///    its blocks hits.
    /// 2. The key is matched. Pages on device are device hits. What the host holds past them is loaded back and
    ///    is a host hit; where the device has no room for it, it is no hit.
    /// 3. The path is locked, and for exactly the pages that are missing then, past those that are free, the
    ///    device evicts.
    /// 4. The whole key is inserted, the partial last block of a block-by-block replay included. What the write
    ///    policy wants on host now is copied.
    /// 5. The path is unlocked: a request has ended before the next one comes.
    ///
    /// Output tokens are not inserted: a trace does not say what they are.
    fn serve(&mut self, key: &[u32]) -> Result<Option<Hits>> {
        let wanted = key.len() / self.tree.page_size();
        if wanted > self.device.size() {
            return Ok(None);
        }
        let found = self.tree.match_prefix(Tokens::U32(key), Namespace::default(), true)?;
        let mut pages = found.device_pages();
        let device = pages.len();
        let mut node = found.last_device_node;
        if found.host_hit_length > 0 && self.load_back(found.last_host_node, &mut pages)? {
            node = found.last_host_node;
        }
        let hits = Hits { device, host: pages.len() - device, wanted };

        let mut lock = self.tree.inc_lock_ref(node)?;
        let missing = wanted - pages.len();
        let room = self.make_room(missing)?;
        if room {
            let borrowed = pages.len() * self.tree.page_size();
            self.device.take(missing, &mut pages);
            let args = InsertArgs::new(Tokens::U32(key), &pages);
            let inserted = self.tree.insert(InsertArgs { prev_prefix_len: borrowed, ..args })?;
            self.device.give(&inserted.duplicate_pages);
            self.back_up(&inserted.backup_nodes)?;
        }
        self.tree.dec_lock_ref(&mut lock)?;
        Ok(room.then_some(hits))
    }

    /// Brings the host part of a path to device and appends its pages; false if the device has no room for it.
    fn load_back(&mut self, node: NodeId, pages: &mut Vec<u32>) -> Result<bool> {
        let mut plan = self.tree.plan_load_back(node)?;
        if !self.make_room(plan.pages())? {
            self.tree.cancel_load_back_plan(&mut plan)?;
            return Ok(false);
        }
        let before = pages.len();
        self.device.take(plan.pages(), pages);
        let ack = self.tree.begin_load_back(&mut plan, &pages[before..])?;
        self.tree.finish_load_back(ack)?;
        self.report.copied_to_device += plan.pages() as u64;
        Ok(true)
    }

    /// The invariants of the tree, and that tree and pools agree.
    pub fn check_invariants(&self) -> Result<()> {
        self.tree.check_invariants()?;
        let page = self.tree.page_size() as u64;
        let tiers = [
            ("device", self.device.used(), self.tree.device_tokens() / page),
            ("host", self.host.used(), self.tree.host_tokens() / page),
        ];
        for (tier, used, held) in tiers {
            if used as u64 != held {
                let text = format!("the {tier} pool has {used} pages in use, the tree holds {held}");
                return Err(Error::Invariant(text));
            }
        }
        for (what, tokens) in
            [("protected", self.tree.protected_tokens()), ("pending", self.tree.pending_host_tokens())]
        {
            if tokens > 0 {
                return Err(Error::Invariant(format!("{tokens} tokens are {what} between requests")));
            }
        }
        Ok(())
    }
}
