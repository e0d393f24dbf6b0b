//! The prefix tree in its most obvious form.
//!
//! Nodes lie in one map, each with its whole key from the root. Nothing is kept that can be found
//! by looking: children, leaves, sums and digests are searched for or computed each time they are
//! asked for. It is slow, and meant to be read beside the specification.

mod content;
mod evict;
mod locks;
mod tiers;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use rust_tree_core::{Event, InsertArgs, Namespace, NodeId, Tier, Tokens, TreeConfig, WritePolicy};

pub use content::page_digests;
pub use evict::Evicted;
pub use tiers::{BackupDone, BackupPlan, HostInserted, LoadPlan};

/// One place of a key: a token, with bigram keys also the token after it.
pub type Position = (u32, Option<u32>);

/// What the model knows a lock, pin, plan or ack by. Never used twice, also not after a reset.
pub type Handle = u64;

/// The owned form of a namespace: extra key, cache salt.
pub type Names = (Option<String>, Option<String>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Argument,
    UnknownNode,
    Lock,
}

/// Everything that is wrong with a refused call. A call with several faults may be refused for
/// any of them.
pub type Faults = Vec<Kind>;

#[derive(Clone, Debug)]
pub struct Node {
    pub parent: NodeId,
    pub names: Names,
    /// The whole key, from the root.
    pub key: Vec<Position>,
    /// Where the node's own part of the key begins.
    pub start: usize,
    pub device: Option<Vec<u32>>,
    /// Copies that are pending or wait for their parent's included.
    pub host: Option<Vec<u32>>,
    pub hits: u64,
    pub priority: i64,
    pub created: u64,
    pub last: u64,
    pub history: usize,
    pub locks: u32,
    pub host_locks: u32,
    pub pins: u32,
    /// The backup or load-back that has not been confirmed yet.
    pub pending: Option<Handle>,
    /// To be demoted when its pending backup is confirmed.
    pub victim: bool,
    /// The node that was named for write-back: this one, or the one that this was cut from.
    pub hold: Option<NodeId>,
}

impl Node {
    pub fn end(&self) -> usize {
        self.key.len()
    }

    pub fn tokens(&self) -> usize {
        self.key.len() - self.start
    }

    pub fn on_device(&self) -> bool {
        self.device.is_some()
    }

    pub fn backed(&self) -> bool {
        self.host.is_some()
    }
}

/// A copy that is under way, and the locks that it holds.
#[derive(Clone, Debug)]
pub enum Copying {
    /// The nodes in the order given, each with the position where it began. One device lock on the
    /// path of each.
    Backup { listed: Vec<(NodeId, usize)> },
    /// One device lock on the node's path, one host lock on each part of it from `start` on.
    LoadBack { node: NodeId, start: usize },
}

/// A load-back that may begin; holds the same locks as the copy will.
#[derive(Clone, Debug)]
struct Planned {
    node: NodeId,
    start: usize,
}

#[derive(Clone)]
pub struct ModelTree {
    config: TreeConfig,
    /// All nodes but the root.
    nodes: BTreeMap<NodeId, Node>,
    root: NodeId,
    next_id: NodeId,
    next_handle: Handle,
    /// The stamp that was given last.
    stamp: u64,
    locks: BTreeMap<Handle, NodeId>,
    host_locks: BTreeMap<Handle, (NodeId, usize)>,
    pins: BTreeMap<Handle, (NodeId, Option<f64>)>,
    plans: BTreeMap<Handle, Planned>,
    copies: BTreeMap<Handle, Copying>,
    events: Vec<Event>,
    events_lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub device_length: usize,
    pub device_pages: Vec<u32>,
    pub host_hit_length: usize,
    pub last_device_node: NodeId,
    pub last_host_node: NodeId,
    pub pending_ack: Option<Handle>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inserted {
    pub prefix_len: usize,
    pub duplicate_pages: Vec<u32>,
    pub device_pages: Vec<u32>,
    pub node: NodeId,
    pub backup_nodes: Vec<NodeId>,
    pub pending_ack: Option<Handle>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    pub pages: usize,
    pub device_pages: Option<Vec<u32>>,
    pub host_pages: Option<Vec<u32>>,
    pub parent: Option<NodeId>,
    pub hit_count: u64,
    pub priority: i64,
    pub lock_ref: u32,
    pub host_lock_ref: u32,
    pub pending: Option<Handle>,
    pub held: bool,
    pub pins: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub nodes: usize,
    pub evictable: u64,
    pub protected: u64,
    pub device: u64,
    pub host: u64,
    pub pending_host: u64,
    pub pinned: u64,
}

/// Where a key led: the nodes that it covers, root-first, and a last node that it only enters.
struct Walk {
    covered: Vec<NodeId>,
    /// The node that the key leaves inside, and the position where it does.
    inside: Option<(NodeId, usize)>,
}

pub fn owned(namespace: Namespace<'_>) -> Names {
    (namespace.extra_key.map(str::to_string), namespace.cache_salt.map(str::to_string))
}

impl ModelTree {
    pub fn new(config: TreeConfig) -> Self {
        Self {
            config,
            nodes: BTreeMap::new(),
            root: 0,
            next_id: 1,
            next_handle: 0,
            stamp: 0,
            locks: BTreeMap::new(),
            host_locks: BTreeMap::new(),
            pins: BTreeMap::new(),
            plans: BTreeMap::new(),
            copies: BTreeMap::new(),
            events: Vec::new(),
            events_lost: false,
        }
    }

    // ---- what there is ----

    pub fn root(&self) -> NodeId {
        self.root
    }

    pub fn nodes(&self) -> &BTreeMap<NodeId, Node> {
        &self.nodes
    }

    /// The id that the next node will get.
    pub fn next_id(&self) -> NodeId {
        self.next_id
    }

    pub fn sizes(&self) -> Sizes {
        let sum = |wanted: &dyn Fn(&Node) -> bool| -> u64 {
            let tokens = self.nodes.values().filter(|node| wanted(node));
            tokens.map(|node| node.tokens() as u64).sum()
        };
        Sizes {
            nodes: self.nodes.len(),
            evictable: sum(&|node| node.on_device() && node.locks == 0),
            protected: sum(&|node| node.on_device() && node.locks > 0),
            device: sum(&|node| node.on_device()),
            host: sum(&|node| self.published(node)),
            pending_host: sum(&|node| node.backed() && !self.published(node)),
            pinned: sum(&|node| node.pins > 0),
        }
    }

    pub fn info(&self, id: NodeId) -> Result<Info, Faults> {
        let Some(node) = self.nodes.get(&id) else {
            return Err(vec![Kind::UnknownNode]);
        };
        Ok(Info {
            pages: node.tokens() / self.config.page_size,
            device_pages: node.device.clone(),
            host_pages: node.host.clone(),
            parent: Some(node.parent),
            hit_count: node.hits,
            priority: node.priority,
            lock_ref: node.locks,
            host_lock_ref: node.host_locks,
            pending: node.pending.or_else(|| self.awaited(node)),
            held: node.hold.is_some(),
            pins: node.pins,
        })
    }

    /// A host copy whose bytes are there: no ack of a backup is awaited. What a load-back reads is
    /// complete.
    fn complete(&self, node: &Node) -> bool {
        let awaited = node.pending.is_some_and(|ack| matches!(self.copies[&ack], Copying::Backup { .. }));
        node.backed() && !awaited
    }

    /// The nearest pending backup above a complete host copy that is not published.
    fn awaited(&self, node: &Node) -> Option<Handle> {
        if !node.backed() || self.published(node) {
            return None;
        }
        let mut above = node.parent;
        while above != self.root {
            let node = &self.nodes[&above];
            if node.pending.is_some() && !self.complete(node) {
                return node.pending;
            }
            above = node.parent;
        }
        None
    }

    /// A complete host copy, where host copies have no gaps with published ones all the way up. A
    /// complete one that is not published waits for its parent.
    pub fn published(&self, node: &Node) -> bool {
        let above =
            !self.write_through() || node.parent == self.root || self.published(&self.nodes[&node.parent]);
        self.complete(node) && above
    }

    /// All nodes with a published host copy.
    fn all_published(&self) -> BTreeSet<NodeId> {
        let published = self.nodes.iter().filter(|(_, node)| self.published(node));
        published.map(|(&id, _)| id).collect()
    }

    fn loading(&self, node: &Node) -> Option<Handle> {
        node.pending.filter(|ack| matches!(self.copies[ack], Copying::LoadBack { .. }))
    }

    /// The youngest load-back that one of these nodes waits for. Handles grow, so it is the
    /// greatest.
    fn youngest_load(&self, ids: &[NodeId]) -> Option<Handle> {
        ids.iter().filter_map(|id| self.loading(&self.nodes[id])).max()
    }

    fn pages(&self, id: NodeId) -> usize {
        self.nodes[&id].tokens() / self.config.page_size
    }

    fn end(&self, id: NodeId) -> usize {
        self.nodes.get(&id).map_or(0, Node::end)
    }

    fn node(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(&id).expect("a live node")
    }

    fn alive(&self, id: NodeId) -> bool {
        id == self.root || self.nodes.contains_key(&id)
    }

    fn children(&self, id: NodeId) -> Vec<NodeId> {
        let below = self.nodes.iter().filter(|(_, node)| node.parent == id);
        below.map(|(&child, _)| child).collect()
    }

    fn has_device_child(&self, id: NodeId) -> bool {
        self.children(id).iter().any(|child| self.nodes[child].on_device())
    }

    /// The path from below the root to the node. Of the root: nothing.
    fn path(&self, id: NodeId) -> Vec<NodeId> {
        let mut path = Vec::new();
        let mut at = id;
        while at != self.root {
            path.push(at);
            at = self.nodes[&at].parent;
        }
        path.reverse();
        path
    }

    fn ancestors(&self, id: NodeId) -> Vec<NodeId> {
        let mut path = self.path(id);
        path.pop();
        path
    }

    /// All nodes below, by depth, then id.
    fn descendants(&self, id: NodeId) -> Vec<NodeId> {
        let below = self.nodes.keys().copied();
        self.by_depth(below.filter(|&other| other != id && self.path(other).contains(&id)))
    }

    /// Sorted by depth (the position where the node begins), then id.
    fn by_depth(&self, ids: impl Iterator<Item = NodeId>) -> Vec<NodeId> {
        let mut ids: Vec<NodeId> = ids.collect();
        ids.sort_by_key(|id| (self.nodes[id].start, *id));
        ids
    }

    /// Sorted by depth, deepest first, then id.
    fn deepest_first(&self, ids: impl Iterator<Item = NodeId>) -> Vec<NodeId> {
        let mut ids: Vec<NodeId> = ids.collect();
        ids.sort_by_key(|id| (Reverse(self.nodes[id].start), *id));
        ids
    }

    fn host_tier(&self) -> bool {
        self.config.write_policy.is_some()
    }

    fn write_back(&self) -> bool {
        self.config.write_policy == Some(WritePolicy::WriteBack)
    }

    fn write_through(&self) -> bool {
        self.host_tier() && !self.write_back()
    }

    fn threshold(&self) -> u64 {
        let selective = self.config.write_policy == Some(WritePolicy::WriteThroughSelective);
        let default = if selective { 3 } else { 1 };
        self.config.write_through_threshold.unwrap_or(default)
    }

    // ---- keys ----

    fn positions(&self, tokens: Tokens<'_>) -> Result<Vec<Position>, Faults> {
        let wide: Vec<i64> = match tokens {
            Tokens::U32(tokens) => tokens.iter().map(|&token| i64::from(token)).collect(),
            Tokens::I32(tokens) => tokens.iter().map(|&token| i64::from(token)).collect(),
            Tokens::I64(tokens) => tokens.to_vec(),
        };
        let mut raw = Vec::new();
        for token in wide {
            raw.push(u32::try_from(token).map_err(|_| vec![Kind::Argument])?);
        }
        if self.config.bigram {
            let pairs = raw.windows(2);
            Ok(pairs.map(|pair| (pair[0], Some(pair[1]))).collect())
        } else {
            Ok(raw.into_iter().map(|token| (token, None)).collect())
        }
    }

    fn whole_pages(&self, mut key: Vec<Position>) -> Vec<Position> {
        key.truncate(key.len() - key.len() % self.config.page_size);
        key
    }

    /// Follows `key` (from the root, whole pages) below `from`, page by page, through nodes that
    /// are `open`.
    fn walk(&self, from: NodeId, key: &[Position], names: &Names, open: fn(&Node) -> bool) -> Walk {
        let size = self.config.page_size;
        let mut walk = Walk { covered: Vec::new(), inside: None };
        let mut at = from;
        let mut end = self.end(from);
        while end + size <= key.len() {
            let page = &key[end..end + size];
            let next = self.children(at).into_iter().find(|child| {
                let child = &self.nodes[child];
                child.names == *names && child.key[end..end + size] == *page
            });
            let Some(next) = next.filter(|next| open(&self.nodes[next])) else {
                break;
            };
            let node = &self.nodes[&next];
            while end + size <= key.len().min(node.end()) && node.key[end..end + size] == key[end..end + size]
            {
                end += size;
            }
            if end < node.end() {
                walk.inside = Some((next, end));
                break;
            }
            walk.covered.push(next);
            at = next;
        }
        walk
    }

    /// Cuts the node that the walk ended inside; then the walk covers the upper part.
    fn cut_at_end(&mut self, walk: Walk) -> Vec<NodeId> {
        let mut covered = walk.covered;
        if let Some((id, at)) = walk.inside {
            covered.push(self.cut(id, at));
        }
        covered
    }

    /// Gives a node's first part, up to position `at`, to a new node above it.
    fn cut(&mut self, id: NodeId, at: usize) -> NodeId {
        let size = self.config.page_size;
        let upper_id = self.new_id();
        let lower = self.node(id);
        assert!(lower.start < at && at < lower.end() && at.is_multiple_of(size));
        let pages = (at - lower.start) / size;
        let mut upper = lower.clone();
        upper.key.truncate(at);
        for tier in [&mut upper.device, &mut upper.host].into_iter().flatten() {
            tier.truncate(pages);
        }
        for tier in [&mut lower.device, &mut lower.host].into_iter().flatten() {
            tier.drain(..pages);
        }
        lower.start = at;
        lower.parent = upper_id;
        self.nodes.insert(upper_id, upper);
        upper_id
    }

    fn new_id(&mut self) -> NodeId {
        self.next_id += 1;
        self.next_id - 1
    }

    fn new_handle(&mut self) -> Handle {
        self.next_handle += 1;
        self.next_handle - 1
    }

    /// Makes a node for what the key has past `parent`.
    fn make_node(&mut self, parent: NodeId, key: &[Position], names: &Names, priority: i64) -> NodeId {
        let id = self.new_id();
        let node = Node {
            parent,
            names: names.clone(),
            key: key.to_vec(),
            start: self.end(parent),
            device: None,
            host: None,
            hits: 0,
            priority,
            created: 0,
            last: 0,
            history: 0,
            locks: 0,
            host_locks: 0,
            pins: 0,
            pending: None,
            victim: false,
            hold: None,
        };
        self.nodes.insert(id, node);
        for on_path in self.path(id) {
            let node = self.node(on_path);
            node.history = node.history.max(key.len());
        }
        id
    }

    fn stamp(&mut self, ids: &[NodeId]) {
        for &id in ids {
            self.stamp += 1;
            self.node(id).last = self.stamp;
        }
    }

    // ---- match ----

    pub fn match_prefix(
        &mut self,
        tokens: Tokens<'_>,
        namespace: Namespace<'_>,
        include_evicted: bool,
    ) -> Result<Found, Faults> {
        let walk = self.walk_match(tokens, namespace, include_evicted)?;
        let covered = self.cut_at_end(walk);
        self.stamp(&covered);
        let whole = Walk { covered, inside: None };
        Ok(self.found(&whole))
    }

    pub fn peek_prefix(
        &self,
        tokens: Tokens<'_>,
        namespace: Namespace<'_>,
        include_evicted: bool,
    ) -> Result<Found, Faults> {
        let walk = self.walk_match(tokens, namespace, include_evicted)?;
        Ok(self.found(&walk))
    }

    pub fn match_prefixes(&mut self, keys: &[(Tokens<'_>, Namespace<'_>)]) -> Result<Vec<Found>, Faults> {
        for (tokens, _) in keys {
            self.positions(*tokens)?;
        }
        keys.iter().map(|(tokens, namespace)| self.match_prefix(*tokens, *namespace, true)).collect()
    }

    fn walk_match(
        &self,
        tokens: Tokens<'_>,
        namespace: Namespace<'_>,
        include_evicted: bool,
    ) -> Result<Walk, Faults> {
        let key = self.whole_pages(self.positions(tokens)?);
        let open = if include_evicted { |_: &Node| true } else { Node::on_device };
        Ok(self.walk(self.root, &key, &owned(namespace), open))
    }

    fn found(&self, walk: &Walk) -> Found {
        let mut found = Found {
            device_length: 0,
            device_pages: Vec::new(),
            host_hit_length: 0,
            last_device_node: self.root,
            last_host_node: self.root,
            pending_ack: None,
        };
        for &id in &walk.covered {
            found.last_host_node = id;
            if self.nodes[&id].on_device() {
                found.last_device_node = id;
            }
        }
        let mut parts: Vec<(NodeId, usize)> = Vec::new();
        parts.extend(walk.covered.iter().map(|&id| (id, self.end(id))));
        parts.extend(walk.inside);
        for (id, end) in parts {
            let node = &self.nodes[&id];
            let length = end - node.start;
            if let Some(pages) = &node.device {
                found.device_length += length;
                let pages = &pages[..length / self.config.page_size];
                found.device_pages.extend(pages);
                found.pending_ack = found.pending_ack.max(self.youngest_load(&[id]));
            } else {
                found.host_hit_length += length;
            }
        }
        found
    }

    // ---- insert ----

    pub fn insert(&mut self, args: &InsertArgs<'_>) -> Result<Inserted, Faults> {
        let size = self.config.page_size;
        let key = self.whole_pages(self.positions(args.tokens)?);
        let names = owned(args.namespace);
        let before = self.walk(self.root, &key, &names, |_| true);
        let found = self.found(&before);
        if args.pages.len() != key.len() / size
            || !args.prev_prefix_len.is_multiple_of(size)
            || args.prev_prefix_len > found.device_length
        {
            return Err(vec![Kind::Argument]);
        }
        let borrowed = args.prev_prefix_len / size;
        let in_tree = found.device_pages.len();
        let mut duplicates = Vec::new();
        for page in borrowed..in_tree {
            if args.pages[page] != found.device_pages[page] {
                duplicates.push(args.pages[page]);
            }
        }

        let mut path = self.cut_at_end(before);
        let mut stored = Vec::new();
        for &id in &path {
            let node = self.node(id);
            node.priority = node.priority.max(args.priority);
            if node.device.is_none() {
                node.device = Some(args.pages[node.start / size..node.end() / size].to_vec());
                stored.push(id);
            }
        }
        let deepest = path.last().copied().unwrap_or(self.root);
        let prefix_len = self.end(deepest);
        let mut made = None;
        if prefix_len < key.len() {
            let id = self.make_node(deepest, &key, &names, args.priority);
            self.node(id).device = Some(args.pages[prefix_len / size..].to_vec());
            stored.push(id);
            path.push(id);
            made = Some(id);
        }
        self.stamp(&path);
        if let Some(id) = made {
            self.node(id).created = self.nodes[&id].last;
        }

        let mut backup_nodes = Vec::new();
        let threshold = self.threshold();
        for &id in &path {
            let names_backups = self.write_through();
            let node = self.node(id);
            if args.chunked || node.end() <= args.inserted_len {
                continue;
            }
            node.hits += 1;
            if names_backups && node.hits >= threshold && !node.backed() {
                backup_nodes.push(id);
            }
        }
        for id in stored {
            self.emit_stored(Tier::Device, id);
        }
        let own = path.iter().filter_map(|id| self.nodes[id].device.as_ref());
        Ok(Inserted {
            prefix_len,
            duplicate_pages: duplicates,
            device_pages: own.flatten().copied().collect(),
            node: path.last().copied().unwrap_or(self.root),
            backup_nodes,
            pending_ack: self.youngest_load(&path),
        })
    }

    // ---- reset ----

    pub fn reset(&mut self) {
        self.nodes.clear();
        self.locks.clear();
        self.host_locks.clear();
        self.pins.clear();
        self.plans.clear();
        self.copies.clear();
        self.root = self.new_id();
        self.emit(Event::Cleared);
    }
}
