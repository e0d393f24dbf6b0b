//! The tree: nodes, the tables that find them, the sums that say what each tier holds.
//!
//! The modules below are one idea each; this one has the fields and the small steps that all of them are
//! made of: a node gets or loses pages, a node joins or leaves. Every step keeps the sums, the digest and the
//! orders of eviction right, so that no call has to look at the whole tree.

mod backup;
mod cut;
mod digest;
mod edges;
mod evict;
mod host;
mod insert;
mod invariants;
mod load_back;
mod lock;
mod node;
mod pin;
#[cfg(test)]
pub(crate) mod testing;
mod trim;
mod walk;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

pub use backup::{BackupDone, BackupPlan};
pub use evict::{Evicted, Gone, HostEvicted};
pub use host::{HostInserted, InsertHostArgs};
pub use insert::{InsertArgs, Inserted};
pub use load_back::LoadBackPlan;
pub use lock::{HostLockReceipt, LockReceipt};
pub(crate) use node::Slot;
pub use pin::Pin;
pub use walk::{Match, PageRuns};

use crate::NodeId;
use crate::config::{HostOrder, TreeConfig, WritePolicy};
use crate::error::{Error, Result, bad_lock};
use crate::events::EventQueue;
use crate::eviction::{self, Key, Policy, order::Order};
use crate::hash::{self, Digest};
use crate::namespace::{Namespace, Namespaces, PLAIN};
use crate::tokens::Shape;
use edges::Edges;
use node::{DEAD, HostRank, NONE, Node, Pages, flag, host_group};

/// What kind of copy an ack stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AckKind {
    /// Device to host.
    Backup,
    /// Host to device.
    LoadBack,
}

/// Which tree, and which of its lives between resets, something belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Origin {
    tree: u64,
    epoch: u64,
}

/// Names a copy that was begun, until it is finished or cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ack {
    origin: Origin,
    serial: u64,
    kind: AckKind,
}

impl Ack {
    /// Grows with every ack of a tree.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// The copy's direction.
    pub fn kind(&self) -> AckKind {
        self.kind
    }
}

/// What is known of one node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeInfo {
    /// Its id.
    pub id: NodeId,
    /// Number of pages.
    pub pages: usize,
    /// Device pages, if it has them.
    pub device_pages: Option<Vec<u32>>,
    /// Host pages, if it has them; those of a pending backup included.
    pub host_pages: Option<Vec<u32>>,
    /// The parent; `None` for the root.
    pub parent: Option<NodeId>,
    /// Counted inserts.
    pub hit_count: u64,
    /// Highest priority that a request brought.
    pub priority: i64,
    /// Device locks.
    pub lock_ref: u32,
    /// Host locks.
    pub host_lock_ref: u32,
    /// The ack that a copy from or to this node waits for; for a host copy that is complete but not published, that
    /// of the backup above it.
    pub pending: Option<Ack>,
    /// Named for write-back, which has not begun.
    pub held: bool,
    /// Pins over this node.
    pub pins: u32,
}

/// Sums over the tree, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sizes {
    device: u64,
    protected: u64,
    host: u64,
    pending_host: u64,
    pinned: u64,
}

/// Ids are drawn in sequence: one multiplication spreads them.
#[derive(Debug, Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("ids are hashed as u64")
    }
    fn write_u64(&mut self, id: u64) {
        self.0 = id.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}

type ById<V> = HashMap<u64, V, BuildHasherDefault<IdHasher>>;

/// A prefix tree over device and host pages. It decides; the caller owns the pages and moves the bytes.
#[derive(Debug)]
pub struct Tree {
    origin: Origin,
    pub(crate) shape: Shape,
    write_policy: Option<WritePolicy>,
    write_through_threshold: u64,
    pin_capacity: Option<u64>,
    /// Group of the nodes that only the host holds.
    host_leaves: u8,
    policy: Box<dyn Policy>,

    pub(crate) nodes: Vec<Node>,
    free: Vec<Slot>,
    slots: ById<Slot>,
    root: Slot,
    next_id: NodeId,
    edges: Edges,
    pub(crate) namespaces: Namespaces,

    /// The last stamp given.
    clock: u64,
    sizes: Sizes,
    digest: u64,
    device_order: Order<Key>,
    host_order: Order<HostRank>,
    /// Nodes whose place in `host_order` may be wrong; looked at when host room is asked for. Whole paths change
    /// theirs at each match or lock under write-back, and few of them are ever asked about.
    host_dirty: Vec<Slot>,

    /// The last serial given to an ack, plan or pin.
    last_serial: u64,
    backups: ById<backup::PendingBackup>,
    load_backs: ById<load_back::PendingLoad>,
    plans: ById<load_back::PendingPlan>,
    pins: ById<pin::PinState>,
    pub(crate) events: Option<EventQueue>,
    page_hash_count: u64,
    /// Memory for the path of the call at hand.
    path: Vec<Slot>,
}

static NEXT_TREE: AtomicU64 = AtomicU64::new(1);

impl Tree {
    /// An empty tree.
    #[allow(clippy::needless_pass_by_value)] // settings are made for one tree
    pub fn new(config: TreeConfig) -> Result<Self> {
        config.check()?;
        let policy = eviction::build(&config.eviction_policy, &config.policy_options)?;
        Self::with_policy(&config, policy)
    }

    /// An empty tree with a policy from outside the registry; `config.eviction_policy` is not looked at.
    pub fn with_policy(config: &TreeConfig, policy: Box<dyn Policy>) -> Result<Self> {
        config.check()?;
        let shape = Shape::new(config.page_size, config.bigram)?;
        let mut tree = Self {
            origin: Origin { tree: NEXT_TREE.fetch_add(1, Ordering::Relaxed), epoch: 0 },
            shape,
            write_policy: config.write_policy,
            write_through_threshold: config.threshold(),
            pin_capacity: config.pin_capacity,
            host_leaves: match config.host_order {
                HostOrder::CopiesFirst => host_group::LEAVES_LAST,
                HostOrder::LeavesFirst => host_group::LEAVES_FIRST,
            },
            policy,
            nodes: Vec::new(),
            free: Vec::new(),
            slots: HashMap::default(),
            root: 0,
            next_id: 0,
            edges: Edges::new(shape),
            namespaces: Namespaces::new(),
            clock: 0,
            sizes: Sizes::default(),
            digest: 0,
            device_order: Order::new(),
            host_order: Order::new(),
            host_dirty: Vec::new(),
            last_serial: 0,
            backups: HashMap::default(),
            load_backs: HashMap::default(),
            plans: HashMap::default(),
            pins: HashMap::default(),
            events: config.events.then(|| EventQueue::new(config.event_capacity)),
            page_hash_count: 0,
            path: Vec::new(),
        };
        tree.root = tree.add_root();
        Ok(tree)
    }

    /// Empties the tree. What was handed out before (nodes, receipts, plans, acks, pins) is refused from now on.
    pub fn reset(&mut self) {
        self.origin.epoch += 1;
        self.nodes = Vec::new();
        self.free = Vec::new();
        self.slots = HashMap::default();
        self.edges = Edges::new(self.shape);
        self.namespaces = Namespaces::new();
        self.sizes = Sizes::default();
        self.digest = 0;
        self.device_order = Order::new();
        self.host_order = Order::new();
        self.host_dirty = Vec::new();
        self.backups = HashMap::default();
        self.load_backs = HashMap::default();
        self.plans = HashMap::default();
        self.pins = HashMap::default();
        self.path = Vec::new();
        if let Some(queue) = &mut self.events {
            queue.cleared();
        }
        self.root = self.add_root();
    }

    /// The root's id; it changes with `reset`.
    pub fn root(&self) -> NodeId {
        self.nodes[self.root as usize].id
    }

    /// Number of nodes, the root not counted.
    pub fn len(&self) -> usize {
        self.slots.len() - 1
    }

    /// True if there is nothing but the root.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Positions in a page.
    pub fn page_size(&self) -> usize {
        self.shape.page
    }

    /// Tokens on device that no lock keeps there.
    pub fn evictable_tokens(&self) -> u64 {
        self.in_tokens(self.sizes.device - self.sizes.protected)
    }

    /// Tokens on device that locks keep there.
    pub fn protected_tokens(&self) -> u64 {
        self.in_tokens(self.sizes.protected)
    }

    /// Tokens on device.
    pub fn device_tokens(&self) -> u64 {
        self.in_tokens(self.sizes.device)
    }

    /// Tokens with a published host copy.
    pub fn host_tokens(&self) -> u64 {
        self.in_tokens(self.sizes.host)
    }

    /// Tokens whose host copy waits for its ack.
    pub fn pending_host_tokens(&self) -> u64 {
        self.in_tokens(self.sizes.pending_host)
    }

    /// Tokens under at least one pin.
    pub fn pinned_tokens(&self) -> u64 {
        self.in_tokens(self.sizes.pinned)
    }

    /// Page digests computed so far: each page is hashed once in its life.
    pub fn page_hash_count(&self) -> u64 {
        self.page_hash_count
    }

    /// What is known of a node.
    pub fn node_info(&self, id: NodeId) -> Result<NodeInfo> {
        let slot = self.slot(id)?;
        let node = &self.nodes[slot as usize];
        let ack = |node: &Node| {
            let kind = if node.has(flag::PENDING_BACKUP) { AckKind::Backup } else { AckKind::LoadBack };
            Ack { origin: self.origin, serial: node.ack, kind }
        };
        let pending = if node.has(flag::PENDING) {
            Some(ack(node))
        } else if node.has(flag::WAITS) {
            let above = self.ancestors(slot).map(|above| &self.nodes[above as usize]);
            above.filter(|node| node.has(flag::PENDING_BACKUP)).map(ack).next()
        } else {
            None
        };
        Ok(NodeInfo {
            id,
            pages: node.len as usize,
            device_pages: node.full().value.as_deref().map(<[u32]>::to_vec),
            host_pages: node.full().host_value.as_deref().map(<[u32]>::to_vec),
            parent: (node.parent != NONE).then(|| self.nodes[node.parent as usize].id),
            hit_count: node.hits,
            priority: node.priority,
            lock_ref: node.full().lock_ref,
            host_lock_ref: node.full().host_lock_ref,
            pending,
            held: node.held(),
            pins: node.pins,
        })
    }

    /// How many nodes a copy under way covers; 0 for one that has ended, or is none of this tree's.
    pub fn nodes_of(&self, ack: Ack) -> usize {
        if ack.origin != self.origin {
            return 0;
        }
        match ack.kind {
            AckKind::Backup => self.backups.get(&ack.serial).map_or(0, |pending| pending.nodes.len()),
            AckKind::LoadBack => self.load_backs.get(&ack.serial).map_or(0, |pending| pending.nodes.len()),
        }
    }

    /// The nodes whose host copy is published, ancestors first.
    pub fn host_nodes(&self) -> Vec<NodeId> {
        let mut slots: Vec<Slot> =
            self.live_slots().filter(|&slot| self.nodes[slot as usize].published()).collect();
        self.sort_by_depth(&mut slots);
        slots.into_iter().map(|slot| self.nodes[slot as usize].id).collect()
    }

    /// How many pages of its own each of the nodes has.
    pub fn page_counts(&self, nodes: &[NodeId]) -> Result<Vec<usize>> {
        nodes.iter().map(|&id| Ok(self.nodes[self.slot(id)? as usize].len as usize)).collect()
    }

    /// Digests of a node's own pages.
    pub fn page_hashes(&mut self, id: NodeId) -> Result<Vec<Digest>> {
        let slot = self.slot(id)?;
        self.hash_path(slot);
        Ok(self.nodes[slot as usize].digests().to_vec())
    }

    /// Digests of all pages from the root to a node's end.
    pub fn prefix_hashes(&mut self, id: NodeId) -> Result<Vec<Digest>> {
        let slot = self.slot(id)?;
        let mut path: Vec<Slot> = self.ancestors(slot).collect();
        path.reverse();
        let mut digests = Vec::with_capacity(self.nodes[slot as usize].end() as usize);
        for slot in path {
            // A node whose hashes were given may stand below one that was never hashed.
            self.hash_path(slot);
            digests.extend_from_slice(self.nodes[slot as usize].digests());
        }
        Ok(digests)
    }

    /// A node's own tokens.
    pub fn node_tokens(&self, id: NodeId) -> Result<Vec<u32>> {
        Ok(self.nodes[self.slot(id)? as usize].tokens.to_vec())
    }

    /// The namespace that a node belongs to; the plain one for the root.
    pub fn node_namespace(&self, id: NodeId) -> Result<Namespace<'_>> {
        Ok(self.namespaces.get(self.nodes[self.slot(id)? as usize].namespace))
    }

    // ---- small steps, used by the modules below ----

    fn in_tokens(&self, pages: u64) -> u64 {
        pages * self.shape.page as u64
    }

    fn has_host(&self) -> bool {
        self.write_policy.is_some()
    }

    fn is_write_back(&self) -> bool {
        self.write_policy == Some(WritePolicy::WriteBack)
    }

    /// Host copies of a path have no gaps: so it is under both write-through policies.
    fn is_gap_free(&self) -> bool {
        self.has_host() && !self.is_write_back()
    }

    fn slot(&self, id: NodeId) -> Result<Slot> {
        self.slots.get(&id).copied().ok_or(Error::UnknownNode(id))
    }

    /// A serial for an ack, plan or pin.
    fn serial(&mut self) -> u64 {
        self.last_serial += 1;
        self.last_serial
    }

    fn check_origin(&self, origin: Origin, what: &str) -> Result<()> {
        if origin == self.origin {
            Ok(())
        } else if origin.tree == self.origin.tree {
            Err(bad_lock!("{what} is from before a reset of this tree"))
        } else {
            Err(bad_lock!("{what} belongs to another tree"))
        }
    }

    /// A node and the nodes above it, without the root.
    fn ancestors(&self, from: Slot) -> impl Iterator<Item = Slot> + '_ {
        let mut slot = from;
        std::iter::from_fn(move || {
            if slot == self.root {
                return None;
            }
            let here = slot;
            slot = self.nodes[here as usize].parent;
            Some(here)
        })
    }

    fn children(&self, of: Slot) -> impl Iterator<Item = Slot> + '_ {
        let mut slot = self.nodes[of as usize].first_child;
        std::iter::from_fn(move || {
            if slot == NONE {
                return None;
            }
            let here = slot;
            slot = self.nodes[here as usize].next_sibling;
            Some(here)
        })
    }

    /// All nodes below one, sorted by depth, then id.
    fn descendants(&self, of: Slot) -> Vec<Slot> {
        let mut below: Vec<Slot> = self.children(of).collect();
        let mut at = 0;
        while at < below.len() {
            below.extend(self.children(below[at]));
            at += 1;
        }
        self.sort_by_depth(&mut below);
        below
    }

    /// The same the other way round, among equals still by id.
    fn descendants_deepest_first(&self, of: Slot) -> Vec<Slot> {
        let mut below = self.descendants(of);
        below.sort_by_key(|&slot| std::cmp::Reverse(self.nodes[slot as usize].start));
        below
    }

    fn sort_by_depth(&self, slots: &mut [Slot]) {
        slots.sort_by_key(|&slot| (self.nodes[slot as usize].start, self.nodes[slot as usize].id));
    }

    /// Every node but the root, in no order.
    pub(crate) fn live_slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let slots = 0..self.nodes.len() as Slot;
        slots.filter(|&slot| slot != self.root && self.nodes[slot as usize].id != DEAD)
    }

    fn add_root(&mut self) -> Slot {
        let slot = self.allocate();
        self.namespaces.acquire_id(PLAIN);
        slot
    }

    /// A place with a new id, blank.
    fn allocate(&mut self) -> Slot {
        let id = self.next_id;
        self.next_id += 1;
        let mut node = Node::blank(id);
        let slot = if let Some(slot) = self.free.pop() {
            let place = &mut self.nodes[slot as usize];
            node.flags = place.flags & flag::HOST_DIRTY;
            *place = node;
            slot
        } else {
            assert!(self.nodes.len() < NONE as usize, "more nodes than the arena can name");
            self.nodes.push(node);
            (self.nodes.len() - 1) as Slot
        };
        self.slots.insert(id, slot);
        slot
    }

    /// A new node below `parent` with `tokens` and no pages yet; its namespace must have been acquired for it.
    fn add_child(&mut self, parent: Slot, namespace: u32, tokens: Box<[u32]>, stamp: u64) -> Slot {
        let slot = self.allocate();
        let shape = self.shape;
        let start = self.nodes[parent as usize].end();
        let len = shape.pages(tokens.len()) as u32;
        let content =
            self.nodes[parent as usize].content.wrapping_add(digest::content(&tokens, shape, start));
        // Below the root the namespace is that of the path: only there does it tell edges apart.
        let edge_namespace = if parent == self.root { namespace } else { PLAIN };
        let edge_hash = self.edges.hash(parent, edge_namespace, &tokens[..shape.width()]);
        let seed = self.namespaces.seed(namespace);
        let node = &mut self.nodes[slot as usize];
        node.start = start;
        node.len = len;
        node.namespace = namespace;
        node.tokens = tokens;
        node.content = content;
        node.weight = digest::weight(content, start, seed.as_ref());
        node.edge_hash = edge_hash;
        node.created = stamp;
        node.last = stamp;
        self.digest = self.digest.wrapping_add(self.nodes[slot as usize].contribution());
        self.edges.insert(edge_hash, slot);
        self.link(slot, parent);
        if self.policy.needs_history() {
            self.raise_history(slot);
        }
        slot
    }

    /// The branch is at least as deep as the new node's end.
    fn raise_history(&mut self, slot: Slot) {
        let depth = self.nodes[slot as usize].end();
        let mut above = slot;
        while above != self.root && self.nodes[above as usize].history < depth {
            self.nodes[above as usize].history = depth;
            self.refresh_key(above);
            above = self.nodes[above as usize].parent;
        }
    }

    fn link(&mut self, slot: Slot, parent: Slot) {
        let above = &mut self.nodes[parent as usize];
        above.child_count += 1;
        let next = std::mem::replace(&mut above.first_child, slot);
        if next != NONE {
            self.nodes[next as usize].previous_sibling = slot;
        }
        let node = &mut self.nodes[slot as usize];
        node.parent = parent;
        node.next_sibling = next;
        node.previous_sibling = NONE;
    }

    fn unlink(&mut self, slot: Slot) {
        let node = &self.nodes[slot as usize];
        let (parent, next, previous) = (node.parent, node.next_sibling, node.previous_sibling);
        self.nodes[parent as usize].child_count -= 1;
        if previous == NONE {
            self.nodes[parent as usize].first_child = next;
        } else {
            self.nodes[previous as usize].next_sibling = next;
        }
        if next != NONE {
            self.nodes[next as usize].previous_sibling = previous;
        }
    }

    /// Takes a node without pages and children out of the tree.
    fn remove(&mut self, slot: Slot) {
        let node = &self.nodes[slot as usize];
        debug_assert!(node.first_child == NONE && !node.on_device() && !node.backed());
        let (id, parent, edge_hash, namespace) = (node.id, node.parent, node.edge_hash, node.namespace);
        let in_pages = u64::from(node.len);
        if node.pins > 0 {
            self.sizes.pinned -= in_pages;
        }
        self.digest = self.digest.wrapping_sub(node.contribution());
        self.leave_orders(slot);
        let found = self.edges.remove(edge_hash, slot);
        debug_assert!(found, "node {id} has no edge");
        self.namespaces.release(namespace);
        self.unlink(slot);
        self.slots.remove(&id);
        self.nodes[slot as usize].bury();
        self.free.push(slot);
        self.refresh(parent);
    }

    /// Changes a node and keeps the digest right.
    fn edit<R>(&mut self, slot: Slot, change: impl FnOnce(&mut Node) -> R) -> R {
        let node = &mut self.nodes[slot as usize];
        let before = node.contribution();
        let result = change(node);
        self.digest = self.digest.wrapping_add(node.contribution().wrapping_sub(before));
        result
    }

    /// Gives an evicted node device pages.
    fn set_value(&mut self, slot: Slot, pages: Pages) {
        let count = pages.len() as u64;
        debug_assert_eq!(count, u64::from(self.nodes[slot as usize].len));
        self.edit(slot, |node| node.full_mut().value = Some(pages));
        self.sizes.device += count;
        if self.nodes[slot as usize].locked() {
            self.sizes.protected += count;
        }
        let parent = self.nodes[slot as usize].parent;
        self.nodes[parent as usize].device_children += 1;
        self.refresh(slot);
        self.refresh(parent);
    }

    /// Takes a node's device pages away.
    fn take_value(&mut self, slot: Slot) -> Pages {
        let pages = self.edit(slot, |node| node.full_mut().value.take()).expect("node is on device");
        let count = pages.len() as u64;
        self.sizes.device -= count;
        if self.nodes[slot as usize].locked() {
            self.sizes.protected -= count;
        }
        let parent = self.nodes[slot as usize].parent;
        self.nodes[parent as usize].device_children -= 1;
        self.refresh(slot);
        self.refresh(parent);
        pages
    }

    /// True if a complete host copy of this node may be published: under the write-through policies only below
    /// one that is, so that published host content has no gaps and events name parents first.
    fn may_publish(&self, slot: Slot) -> bool {
        let parent = self.nodes[slot as usize].parent;
        !self.is_gap_free() || parent == self.root || self.nodes[parent as usize].published()
    }

    /// Gives a node host pages: complete, or pending under the ack with this serial. True if they are published.
    fn set_host_value(&mut self, slot: Slot, pages: Pages, ack: Option<u64>) -> bool {
        let count = pages.len() as u64;
        debug_assert_eq!(count, u64::from(self.nodes[slot as usize].len));
        let publish = ack.is_none() && self.may_publish(slot);
        self.edit(slot, |node| {
            node.full_mut().host_value = Some(pages);
            if let Some(serial) = ack {
                node.flags |= flag::PENDING_BACKUP;
                node.ack = serial;
            } else if !publish {
                node.flags |= flag::WAITS;
            }
        });
        if publish {
            self.sizes.host += count;
        } else {
            self.sizes.pending_host += count;
        }
        let parent = self.nodes[slot as usize].parent;
        self.nodes[parent as usize].host_children += 1;
        self.refresh(slot);
        self.refresh(parent);
        publish
    }

    /// Takes a node's host pages away, published or pending.
    fn take_host_value(&mut self, slot: Slot) -> Pages {
        let pending = self.nodes[slot as usize].has(flag::UNPUBLISHED);
        let pages = self.edit(slot, |node| {
            node.flags &= !flag::UNPUBLISHED;
            node.full_mut().host_value.take()
        });
        let pages = pages.expect("node is backed");
        let count = pages.len() as u64;
        if pending {
            self.sizes.pending_host -= count;
        } else {
            self.sizes.host -= count;
        }
        let parent = self.nodes[slot as usize].parent;
        self.nodes[parent as usize].host_children -= 1;
        self.refresh(slot);
        self.refresh(parent);
        pages
    }

    /// Puts a node where it belongs in the orders of eviction, after anything about it has changed.
    ///
    /// The order of device leaves is kept at once (a call changes one or two leaves), that of host candidates
    /// when it is asked for.
    fn refresh(&mut self, slot: Slot) {
        if slot == self.root {
            return;
        }
        let write_back = self.is_write_back();
        let node = &mut self.nodes[slot as usize];
        let wanted = node.may_be_victim(write_back).then(|| self.policy.key(&node.access(self.shape.page)));
        let stands = node.has(flag::IN_DEVICE_ORDER).then_some(node.device_key);
        if wanted != stands {
            if let Some(key) = stands {
                self.device_order.remove(key, node.id, slot);
                node.flags &= !flag::IN_DEVICE_ORDER;
            }
            if let Some(key) = wanted {
                self.device_order.insert(key, node.id, slot);
                node.device_key = key;
                node.flags |= flag::IN_DEVICE_ORDER;
            }
        }
        let concerns_host = node.backed() || node.has(flag::IN_HOST_ORDER);
        if concerns_host && !node.has(flag::HOST_DIRTY) {
            node.flags |= flag::HOST_DIRTY;
            self.host_dirty.push(slot);
        }
    }

    /// The same after a change of access data alone, which matters only to a node that stands in an order.
    fn refresh_key(&mut self, slot: Slot) {
        if self.nodes[slot as usize].has(flag::ORDERED) {
            self.refresh(slot);
        }
    }

    /// Where a node stands among the candidates for host eviction, if it is one.
    fn host_rank(&self, node: &Node) -> Option<HostRank> {
        if !node.may_leave_host() || self.children_that_keep_on_host(node) > 0 {
            return None;
        }
        let group = if !node.on_device() {
            self.host_leaves
        } else if node.is_device_leaf() {
            host_group::COPIES_OF_LEAVES
        } else {
            host_group::COPIES
        };
        Some((group, self.policy.key(&node.access(self.shape.page))))
    }

    /// How many children have to leave the host before this node can: all of what only the host holds, and those
    /// with a host copy where host copies may have no gaps.
    fn children_that_keep_on_host(&self, node: &Node) -> u32 {
        if !node.on_device() {
            node.child_count
        } else if self.is_gap_free() {
            node.host_children
        } else {
            0
        }
    }

    /// Brings `host_order` up to date.
    fn settle_host_order(&mut self) {
        while let Some(slot) = self.host_dirty.pop() {
            let node = &self.nodes[slot as usize];
            let wanted = self.host_rank(node);
            let node = &mut self.nodes[slot as usize];
            node.flags &= !flag::HOST_DIRTY;
            let stands = node.has(flag::IN_HOST_ORDER).then_some(node.host_rank);
            if wanted == stands {
                continue;
            }
            if let Some(rank) = stands {
                self.host_order.remove(rank, node.id, slot);
                node.flags &= !flag::IN_HOST_ORDER;
            }
            if let Some(rank) = wanted {
                self.host_order.insert(rank, node.id, slot);
                node.host_rank = rank;
                node.flags |= flag::IN_HOST_ORDER;
            }
        }
    }

    fn leave_orders(&mut self, slot: Slot) {
        let node = &mut self.nodes[slot as usize];
        if node.has(flag::IN_DEVICE_ORDER) {
            self.device_order.remove(node.device_key, node.id, slot);
        }
        if node.has(flag::IN_HOST_ORDER) {
            self.host_order.remove(node.host_rank, node.id, slot);
        }
        node.flags &= !flag::ORDERED;
    }

    /// Computes the digests of a node's pages, and of those above it on which they depend, where missing.
    pub(crate) fn hash_path(&mut self, slot: Slot) {
        let missing: Vec<Slot> =
            self.ancestors(slot).take_while(|&slot| self.nodes[slot as usize].digests.is_none()).collect();
        for slot in missing.into_iter().rev() {
            let node = &self.nodes[slot as usize];
            let seed;
            let parent = if node.parent == self.root {
                seed = self.namespaces.seed(node.namespace);
                seed.as_ref()
            } else {
                self.nodes[node.parent as usize].digests().last()
            };
            let digests = hash::chain(&node.tokens, self.shape, parent);
            self.page_hash_count += digests.len() as u64;
            self.nodes[slot as usize].digests = Some(digests.into());
        }
    }
}
