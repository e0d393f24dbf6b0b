//! Makes the same calls on the production tree and on the model, and compares after each.

mod calls;

use std::collections::BTreeSet;
use std::fmt::Debug;

use rust_tree_core::{
    Ack, Error, Event, HostLockReceipt, Inserted, LoadBackPlan, LockReceipt, Match, NodeId, Pin, Tier, Tree,
    WritePolicy,
};

use super::failure::{Failure, catch};
use super::script::{Call, Config};
use super::tree::{Evicted, Faults, Found, Handle, Info, Kind, ModelTree, Sizes};

/// Plays a script on both trees.
pub fn run(calls: &[Call], config: &Config) -> Result<(), Failure> {
    play(calls, config).map(|_| ())
}

/// Plays a script on two pairs of trees, whose digests must be the same after every call.
pub fn run_twice(calls: &[Call], config: &Config) -> Result<(), Failure> {
    let first = play(calls, config)?;
    let second = play(calls, config)?;
    match (0..first.len()).find(|&at| first[at] != second[at]) {
        None => Ok(()),
        Some(at) => {
            let call = calls.get(at);
            let message = format!("{call:?}: two trees with the same calls differ in their digest");
            Err(Failure { at, message })
        }
    }
}

/// Gives the production tree's digest after every call.
fn play(calls: &[Call], config: &Config) -> Result<Vec<u64>, Failure> {
    let mut digests = Vec::new();
    let mut driver = match catch(|| Driver::new(config)) {
        Ok(Ok(driver)) => driver,
        Ok(Err(message)) | Err(message) => return Err(Failure { at: 0, message }),
    };
    for (at, call) in calls.iter().enumerate() {
        let last = at + 1 == calls.len();
        let result = catch(|| driver.step(at, call, last));
        if let Ok(Err(message)) | Err(message) = result {
            let message = format!("{call:?}: {message}");
            return Err(Failure { at, message });
        }
        digests.push(driver.tree.digest());
    }
    Ok(digests)
}

/// A pool that hands out the page that was free longest or, if none is, a new one.
struct Pool {
    free: Vec<u32>,
    next: u32,
    used: BTreeSet<u32>,
}

impl Pool {
    fn new(first: u32) -> Self {
        Self { free: Vec::new(), next: first, used: BTreeSet::new() }
    }

    fn take(&mut self, pages: usize) -> Vec<u32> {
        let mut out = Vec::new();
        for _ in 0..pages {
            // A few pages rest before they are used again, so that a page freed too early and one
            // in use are not taken for each other.
            let page = if self.free.len() > 3 {
                self.free.remove(0)
            } else {
                self.next += 1;
                self.next - 1
            };
            self.used.insert(page);
            out.push(page);
        }
        out
    }

    fn give(&mut self, pages: &[u32]) -> Result<(), String> {
        for page in pages {
            if !self.used.remove(page) {
                return Err(format!("page {page} was freed, but is not in use"));
            }
            self.free.push(*page);
        }
        Ok(())
    }
}

/// Receipts and the like, each with the model's handle for it: those in use and those used up.
struct Given<T> {
    live: Vec<(T, Handle)>,
    used: Vec<(T, Handle)>,
}

impl<T> Given<T> {
    fn new() -> Self {
        Self { live: Vec::new(), used: Vec::new() }
    }

    fn take(&mut self, pick: u8) -> Option<(T, Handle)> {
        let index = index(pick, self.live.len())?;
        Some(self.live.remove(index))
    }

    fn take_used(&mut self, pick: u8) -> Option<(T, Handle)> {
        let index = index(pick, self.used.len())?;
        Some(self.used.remove(index))
    }
}

fn index(pick: u8, length: usize) -> Option<usize> {
    (length > 0).then(|| usize::from(pick) % length)
}

/// Whether a call may have changed the tree.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    Changed,
    Same,
}

struct Driver<'a> {
    config: &'a Config,
    tree: Tree,
    model: ModelTree,
    device: Pool,
    host: Pool,
    locks: Given<LockReceipt>,
    host_locks: Given<HostLockReceipt>,
    pins: Given<Pin>,
    plans: Given<LoadBackPlan>,
    backups: Given<Ack>,
    loads: Given<Ack>,
    /// Every ack so far, to tell which one a result means.
    acks: Vec<(Ack, Handle)>,
    /// What inserts named for backup and was not asked for yet.
    wanted: Vec<NodeId>,
    /// Some earlier results: the pages in them stay what they were.
    old_matches: Vec<(Match, Vec<u32>)>,
    old_inserts: Vec<(Inserted, Vec<u32>)>,
    mirror_device: BTreeSet<i64>,
    mirror_host: BTreeSet<i64>,
}

/// A handle that the model never gave out.
const NO_HANDLE: Handle = Handle::MAX;

/// Both results, where the call succeeded; nothing where both trees refused it for the same reason.
fn both<T, U: Debug>(got: Result<T, Error>, want: Result<U, Faults>) -> Result<Option<(T, U)>, String> {
    match (got, want) {
        (Ok(got), Ok(want)) => Ok(Some((got, want))),
        (Err(error), Err(faults)) => {
            let kind = match error {
                Error::Argument(_) => Some(Kind::Argument),
                Error::UnknownNode(_) => Some(Kind::UnknownNode),
                Error::Lock(_) => Some(Kind::Lock),
                Error::Invariant(_) => None,
            };
            if kind.is_some_and(|kind| faults.contains(&kind)) {
                Ok(None)
            } else {
                Err(format!("was refused with {error:?}, by the model for {faults:?}"))
            }
        }
        (Ok(_), Err(faults)) => Err(format!("succeeded, the model refuses it for {faults:?}")),
        (Err(error), Ok(want)) => Err(format!("was refused with {error:?}, the model gave {want:?}")),
    }
}

/// As `both`; the production tree's result, seen through `view`, must be the model's.
fn agree<T, U: PartialEq + Debug>(
    got: Result<T, Error>,
    want: Result<U, Faults>,
    view: impl FnOnce(&T) -> U,
) -> Result<Option<(T, U)>, String> {
    let done = both(got, want)?;
    if let Some((got, want)) = &done {
        let seen = view(got);
        if seen != *want {
            return Err(format!("gave {seen:?}, the model {want:?}"));
        }
    }
    Ok(done)
}

fn equal<T: PartialEq + Debug>(what: &str, got: &T, want: &T) -> Result<(), String> {
    if got == want { Ok(()) } else { Err(format!("{what}: {got:?}, in the model {want:?}")) }
}

impl<'a> Driver<'a> {
    fn new(config: &'a Config) -> Result<Self, String> {
        let tree = Tree::new(config.tree()).map_err(|error| format!("no tree: {error:?}"))?;
        Ok(Self {
            config,
            tree,
            model: ModelTree::new(config.tree()),
            device: Pool::new(0),
            host: Pool::new(10_000),
            locks: Given::new(),
            host_locks: Given::new(),
            pins: Given::new(),
            plans: Given::new(),
            backups: Given::new(),
            loads: Given::new(),
            acks: Vec::new(),
            wanted: Vec::new(),
            old_matches: Vec::new(),
            old_inserts: Vec::new(),
            mirror_device: BTreeSet::new(),
            mirror_host: BTreeSet::new(),
        })
    }

    fn step(&mut self, at: usize, call: &Call, last: bool) -> Result<(), String> {
        let digest = self.tree.digest();
        let sizes = self.tree_sizes();
        let effect = self.make(call)?;
        if effect == Effect::Same {
            equal("digest after nothing changed", &self.tree.digest(), &digest)?;
            equal("sizes after nothing changed", &self.tree_sizes(), &sizes)?;
        }
        equal("sizes", &self.tree_sizes(), &self.model.sizes())?;
        equal("root", &self.tree.root(), &self.model.root())?;
        if self.tree.digest() >= 1 << 62 {
            return Err("the digest is too large".to_string());
        }
        for (old, pages) in &self.old_matches {
            equal("pages of an earlier match", &old.device_pages(), pages)?;
        }
        for (old, pages) in &self.old_inserts {
            equal("pages of an earlier insert", &old.device_pages(), pages)?;
        }
        if self.config.drain {
            self.compare_events()?;
        }
        if last {
            self.compare_events()?;
        }
        if last || at.is_multiple_of(self.config.every) {
            self.tree.check_invariants().map_err(|error| format!("check_invariants: {error:?}"))?;
            self.compare_nodes()?;
            self.compare_pools()?;
        }
        Ok(())
    }

    fn tree_sizes(&self) -> Sizes {
        Sizes {
            nodes: self.tree.len(),
            evictable: self.tree.evictable_tokens(),
            protected: self.tree.protected_tokens(),
            device: self.tree.device_tokens(),
            host: self.tree.host_tokens(),
            pending_host: self.tree.pending_host_tokens(),
            pinned: self.tree.pinned_tokens(),
        }
    }

    /// What the model calls an ack of the production tree.
    fn handle_of(&self, ack: Ack) -> Handle {
        let known = self.acks.iter().find(|(known, _)| *known == ack);
        known.map_or(NO_HANDLE, |&(_, handle)| handle)
    }

    fn see_match(&self, found: &Match) -> Found {
        Found {
            device_length: found.device_length,
            device_pages: found.device_pages(),
            host_hit_length: found.host_hit_length,
            last_device_node: found.last_device_node,
            last_host_node: found.last_host_node,
            pending_ack: found.pending_ack.map(|ack| self.handle_of(ack)),
        }
    }

    fn compare_nodes(&self) -> Result<(), String> {
        let root = self.tree.node_info(self.tree.root());
        let root = root.map_err(|error| format!("node_info of the root: {error:?}"))?;
        equal("pages and parent of the root", &(root.pages, root.parent), &(0, None))?;
        equal("acks of the root", &self.tree.pending_acks(self.tree.root()), &Ok(Vec::new()))?;
        for &id in self.model.nodes().keys() {
            let want = self.model.info(id);
            let result = agree(self.tree.node_info(id), want, |info| Info {
                pages: info.pages,
                device_pages: info.device_pages.clone(),
                host_pages: info.host_pages.clone(),
                parent: info.parent,
                hit_count: info.hit_count,
                priority: info.priority,
                lock_ref: info.lock_ref,
                host_lock_ref: info.host_lock_ref,
                pending: info.pending.map(|ack| self.handle_of(ack)),
                held: info.held,
                pins: info.pins,
            });
            result.map_err(|message| format!("node {id} {message}"))?;
            let handles = |acks: &Vec<Ack>| acks.iter().map(|&ack| self.handle_of(ack)).collect();
            agree(self.tree.pending_acks(id), self.model.pending_acks(id), handles)
                .map_err(|message| format!("pending_acks of node {id} {message}"))?;
        }
        Ok(())
    }

    /// Every page that is in use lies in the tree, and at one place only.
    fn compare_pools(&self) -> Result<(), String> {
        let nodes = self.model.nodes().values();
        let mut device: Vec<u32> =
            nodes.clone().flat_map(|node| node.device.iter().flatten().copied()).collect();
        let mut host: Vec<u32> = nodes.flat_map(|node| node.host.iter().flatten().copied()).collect();
        device.sort_unstable();
        host.sort_unstable();
        let used = |pool: &Pool| -> Vec<u32> { pool.used.iter().copied().collect() };
        equal("device pages in use", &used(&self.device), &device)?;
        equal("host pages in use", &used(&self.host), &host)
    }

    fn compare_events(&mut self) -> Result<(), String> {
        let got = self.tree.take_events();
        let want = self.model.take_events();
        if got != want {
            let at = got.iter().zip(&want).take_while(|(got, want)| got == want);
            let at = at.count();
            let (got, want) = (got.get(at), want.get(at));
            return Err(format!("event {at}: {got:?}, in the model {want:?}"));
        }
        for event in got {
            self.mirror(event)?;
        }
        if self.config.events {
            let (device, host) = self.model.content();
            equal("device mirror", &self.mirror_device, &device)?;
            equal("host mirror", &self.mirror_host, &host)?;
        }
        Ok(())
    }

    fn mirror(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Stored { tier, hashes, parent, .. } => {
                // Only under write-back does what is on host have gaps.
                let gapless = tier == Tier::Device || self.config.write != Some(WritePolicy::WriteBack);
                if let Some(parent) = parent
                    && gapless
                    && !self.mirror_of(tier).contains(&parent)
                {
                    return Err(format!("{tier:?}: a page was stored before the page before it"));
                }
                for hash in hashes {
                    if !self.mirror_of(tier).insert(hash) {
                        return Err(format!("page {hash} was stored twice"));
                    }
                }
            }
            Event::Removed { tier, hashes } => {
                for hash in hashes {
                    if !self.mirror_of(tier).remove(&hash) {
                        return Err(format!("page {hash} was removed, but is not stored"));
                    }
                }
            }
            Event::Cleared => {
                self.mirror_device.clear();
                self.mirror_host.clear();
            }
        }
        Ok(())
    }

    fn mirror_of(&mut self, tier: Tier) -> &mut BTreeSet<i64> {
        match tier {
            Tier::Device => &mut self.mirror_device,
            Tier::Host => &mut self.mirror_host,
        }
    }
}

fn see_evicted(evicted: &rust_tree_core::Evicted) -> Evicted {
    Evicted {
        device_pages: evicted.device_pages.clone(),
        host_pages: evicted.host_pages.clone(),
        demoted_nodes: evicted.demoted_nodes.clone(),
        write_back_nodes: evicted.write_back_nodes.clone(),
        dropped_tokens: evicted.dropped_tokens,
    }
}
