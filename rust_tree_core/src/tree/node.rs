//! A node, and the pages it holds in each tier.

use std::sync::Arc;

use crate::NodeId;
use crate::eviction::{Access, Key};
use crate::hash::Digest;
use crate::namespace::NamespaceId;

/// Place of a node in the arena. Places are used again, ids never.
pub(crate) type Slot = u32;

/// No node.
pub(crate) const NONE: Slot = Slot::MAX;

/// The id of an empty place.
pub(crate) const DEAD: NodeId = NodeId::MAX;

/// Page ids that are shared with results that were handed out; never changed in place.
pub(crate) type Pages = Arc<[u32]>;

/// The kinds of state that a model keeps for a prefix, each with its own pages.
///
/// Full attention is the only one now. Sliding-window and recurrent-state components join here: the walk asks
/// a node only [`Node::on_device`] and [`Node::backed`], which combine the components.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Component {
    Full = 0,
}

pub(crate) const COMPONENTS: usize = 1;

/// One component's state in the tiers. Lock counts stand first: they share a cache line with the links.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ComponentState {
    /// Locks that keep the device pages (or, while evicted, the node).
    pub lock_ref: u32,
    /// Locks that keep the host pages.
    pub host_lock_ref: u32,
    /// Device pages.
    pub value: Option<Pages>,
    /// Host pages, published or pending.
    pub host_value: Option<Pages>,
}

impl ComponentState {
    pub const EMPTY: Self = Self { lock_ref: 0, host_lock_ref: 0, value: None, host_value: None };
}

/// Bits of `Node::flags`.
pub(crate) mod flag {
    /// Stands in the order of device leaves under `device_key`.
    pub const IN_DEVICE_ORDER: u32 = 1;
    /// Stands in the order of host candidates under `host_rank`.
    pub const IN_HOST_ORDER: u32 = 1 << 1;
    /// Waits in `host_dirty` for its place in the host order to be looked at.
    pub const HOST_DIRTY: u32 = 1 << 2;
    /// A device-to-host copy has not been acknowledged.
    pub const PENDING_BACKUP: u32 = 1 << 3;
    /// A host-to-device copy has not been acknowledged.
    pub const PENDING_LOAD: u32 = 1 << 4;
    /// The pending backup is a write-back: the device pages go at its ack.
    pub const VICTIM: u32 = 1 << 5;
    /// The backup's lock is counted for this node (not for one below, of which it was cut).
    pub const BACKUP_LOCK: u32 = 1 << 6;
    /// The digests came from a caller, who vouches for them.
    pub const DIGESTS_GIVEN: u32 = 1 << 7;
    /// The host copy is complete, but that of the parent is not published yet.
    pub const WAITS: u32 = 1 << 8;
    /// `hold_locks` is not zero.
    pub const UNDER_HOLDS: u32 = 1 << 9;

    pub const ORDERED: u32 = IN_DEVICE_ORDER | IN_HOST_ORDER;
    pub const PENDING: u32 = PENDING_BACKUP | PENDING_LOAD;
    pub const UNPUBLISHED: u32 = PENDING_BACKUP | WAITS;
}

/// Rank among the candidates for host eviction: group, then policy key.
pub(crate) type HostRank = (u8, Key);

/// The groups of candidates for host eviction, in the order in which they are asked.
pub(crate) mod host_group {
    /// Nodes that only the host holds, where these go first.
    pub const LEAVES_FIRST: u8 = 0;
    /// Copies of nodes that are on device and will stay there for now.
    pub const COPIES: u8 = 1;
    /// Copies of device leaves, which may be evicted soon.
    pub const COPIES_OF_LEAVES: u8 = 2;
    /// Nodes that only the host holds, where these go last.
    pub const LEAVES_LAST: u8 = 3;
}

/// A run of whole pages of one prefix. The first cache line is what walks and locks touch.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Node {
    pub id: NodeId,
    /// What this node's identity counts in the tree's digest; 0 for the root.
    pub weight: u64,
    /// Stamp of the last access.
    pub last: u64,
    pub parent: Slot,
    /// Pages before this node on its path.
    pub start: u32,
    /// Pages of this node.
    pub len: u32,
    /// Children with a device value.
    pub device_children: u32,
    pub flags: u32,
    pub namespace: NamespaceId,
    pub first_child: Slot,
    pub child_count: u32,
    pub components: [ComponentState; COMPONENTS],
    /// `len` pages of raw tokens (bigram: and the token that the next page begins with).
    pub tokens: Box<[u32]>,

    pub edge_hash: u64,
    /// Sum over the pages from the root to this node's end; cuts do not change it.
    pub content: u64,
    pub created: u64,
    pub hits: u64,
    pub priority: i64,
    /// High-water depth of the branch, in pages.
    pub history: u32,
    /// Pins whose path goes through here.
    pub pins: u32,
    /// Id of the node whose hold (a planned write-back) covers this one; 0 (the first root) for none.
    pub hold: NodeId,
    /// Holds whose lock is counted on this node: its own, and those of nodes below.
    pub hold_locks: u32,
    /// Children that are held.
    pub held_children: u32,
    /// Serial of the pending ack, if a pending flag is set.
    pub ack: u64,
    /// A digest a page, once computed or given.
    pub digests: Option<Box<[Digest]>>,
    pub device_key: Key,
    pub host_rank: HostRank,
    pub next_sibling: Slot,
    pub previous_sibling: Slot,
    /// Children with a host value.
    pub host_children: u32,
}

impl Node {
    /// A node without pages, links or content.
    pub fn blank(id: NodeId) -> Self {
        Self {
            id,
            weight: 0,
            last: 0,
            parent: NONE,
            start: 0,
            len: 0,
            device_children: 0,
            flags: 0,
            namespace: 0,
            first_child: NONE,
            child_count: 0,
            components: [const { ComponentState::EMPTY }; COMPONENTS],
            tokens: Box::default(),
            edge_hash: 0,
            content: 0,
            created: 0,
            hits: 0,
            priority: 0,
            history: 0,
            pins: 0,
            hold: 0,
            hold_locks: 0,
            held_children: 0,
            ack: 0,
            digests: None,
            device_key: Key(0, 0),
            host_rank: (0, Key(0, 0)),
            next_sibling: NONE,
            previous_sibling: NONE,
            host_children: 0,
        }
    }

    /// Leaves an empty place: gives the memory back; whoever takes the place makes a blank node of it.
    pub fn bury(&mut self) {
        self.id = DEAD;
        self.flags &= flag::HOST_DIRTY; // a place is listed at most once, whoever lives there
        self.tokens = Box::default();
        self.digests = None;
        for component in &mut self.components {
            component.value = None;
            component.host_value = None;
        }
    }

    #[inline]
    pub fn full(&self) -> &ComponentState {
        &self.components[Component::Full as usize]
    }

    #[inline]
    pub fn full_mut(&mut self) -> &mut ComponentState {
        &mut self.components[Component::Full as usize]
    }

    /// All that the engine needs of this prefix is on device.
    #[inline]
    pub fn on_device(&self) -> bool {
        self.components.iter().all(|component| component.value.is_some())
    }

    /// All that the engine needs of this prefix has a host copy, published or pending.
    #[inline]
    pub fn backed(&self) -> bool {
        self.components.iter().all(|component| component.host_value.is_some())
    }

    /// Backed, the copy complete, and under the write-through policies so are those above.
    pub fn published(&self) -> bool {
        self.backed() && !self.has(flag::UNPUBLISHED)
    }

    #[inline]
    pub fn locked(&self) -> bool {
        self.components.iter().any(|component| component.lock_ref > 0)
    }

    pub fn host_locked(&self) -> bool {
        self.components.iter().any(|component| component.host_lock_ref > 0)
    }

    #[inline]
    pub fn has(&self, flags: u32) -> bool {
        self.flags & flags != 0
    }

    pub fn held(&self) -> bool {
        self.hold != 0
    }

    /// Has a host copy that nothing keeps, but for its children: an eviction from host may take it once none of those
    /// is in the way.
    pub fn may_leave_host(&self) -> bool {
        self.published()
            && !self.has(flag::PENDING_LOAD)
            && !self.host_locked()
            && self.pins == 0
            && (self.on_device() || !self.locked())
    }

    /// On device, unlocked, and nothing below it on device (the root never is).
    pub fn is_device_leaf(&self) -> bool {
        self.on_device() && !self.locked() && self.device_children == 0
    }

    /// Stands in the order of device victims.
    pub fn may_be_victim(&self, write_back: bool) -> bool {
        if self.is_device_leaf() {
            write_back || !self.must_stay_as_it_is()
        } else {
            write_back && !self.backed() && self.is_leaf_but_for_holds()
        }
    }

    /// A device leaf that can neither be demoted nor dropped, nor (it is not pinned) be written back but under
    /// `write_back`: no eviction need look at it before that changes.
    fn must_stay_as_it_is(&self) -> bool {
        self.host_locked() && self.pins == 0 && !self.backed()
    }

    /// Will be a leaf once what is held below it has gone: all its device children are held, and only holds lock it.
    pub fn is_leaf_but_for_holds(&self) -> bool {
        self.has(flag::UNDER_HOLDS)
            && self.on_device()
            && !self.held()
            && self.held_children == self.device_children
            && self.full().lock_ref == self.hold_locks
    }

    /// Pages from the root to this node's end.
    pub fn end(&self) -> u32 {
        self.start + self.len
    }

    /// The child, if there is just one.
    #[inline]
    pub fn only_child(&self) -> Option<Slot> {
        (self.child_count == 1).then_some(self.first_child)
    }

    pub fn device_pages(&self) -> &[u32] {
        self.full().value.as_deref().unwrap_or_default()
    }

    pub fn host_pages(&self) -> &[u32] {
        self.full().host_value.as_deref().unwrap_or_default()
    }

    pub fn digests(&self) -> &[Digest] {
        self.digests.as_deref().unwrap_or_default()
    }

    /// What a policy may look at; lengths in positions.
    pub fn access(&self, page_size: usize) -> Access {
        Access {
            last: self.last,
            created: self.created,
            hits: self.hits,
            priority: self.priority,
            start: u64::from(self.start) * page_size as u64,
            history: u64::from(self.history) * page_size as u64,
        }
    }
}
