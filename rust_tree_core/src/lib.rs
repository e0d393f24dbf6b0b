//! The prefix tree of unified-cache.
//!
//! **The tree decides, the cache executes.** This crate knows pages, nodes and policies: which pages of which
//! tier hold a prefix, what may be evicted, what must be copied. It never touches an allocator, a device, a
//! clock or a file: ids go in, plans come out, and the caller moves the bytes.
//!
//! Copies take time, so they come in steps: *plan* (what would be copied), *begin* (pages given, marks and
//! locks set), *finish* (the copy has ended) or *cancel* (it never will).
//!
//! Module [`replay`] is such a caller, made of counters: it replays a trace and says what would have been hit.
//!
//! Module [`stored`] has a second, smaller tree: what a storage holds, and the log that brings it back.
//!
//! One thread changes a tree; nothing in here waits. With the feature `python` the crate is also the native
//! module of the Python package: module `python` converts and decides nothing.

#![cfg_attr(not(test), warn(missing_docs))]

mod config;
mod error;
mod events;
mod eviction;
mod guard;
mod hash;
mod namespace;
#[cfg(feature = "python")]
mod python;
pub mod replay;
pub mod stored;
mod tokens;
mod tree;

/// Names a node. Drawn in sequence, never used again, not even after a reset.
pub type NodeId = u64;

pub use config::{HostOrder, TreeConfig, WritePolicy};
pub use error::Error;
pub use events::{Event, Tier};
pub use eviction::{Access, Entry, Key, OptionSpec, OptionValues, Policy, REGISTRY, policy_names};
pub use guard::{GuardError, Guarded};
pub use hash::{Digest, event_hash, namespace_seed, page_hashes};
pub use namespace::Namespace;
pub use tokens::Tokens;
pub use tree::{
    Ack, AckKind, BackupDone, BackupPlan, Evicted, Gone, HostEvicted, HostInserted, HostLockReceipt,
    InsertArgs, InsertHostArgs, Inserted, LoadBackPlan, LockReceipt, Match, NodeInfo, PageRuns, Pin, Tree,
};
