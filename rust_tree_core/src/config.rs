//! The settings of a tree.

use crate::error::{Result, bad_argument};

/// When a node goes to host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePolicy {
    /// At its first insert.
    WriteThrough,
    /// When it has been inserted often enough.
    WriteThroughSelective,
    /// When the device evicts it.
    WriteBack,
}

impl WritePolicy {
    /// All policies with their names.
    pub const NAMES: [(&'static str, Self); 3] = [
        ("write_through", Self::WriteThrough),
        ("write_through_selective", Self::WriteThroughSelective),
        ("write_back", Self::WriteBack),
    ];

    /// The policy of this name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, policy)| *policy).ok_or_else(|| {
            let names = Self::NAMES.map(|(name, _)| name).join(", ");
            bad_argument!("write_policy is {name:?}, allowed are {names} and None")
        })
    }
}

/// Which host copies a full host tier gives up first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostOrder {
    /// Copies of what is on device too, before what only the host holds: the tiers hold different things. For a
    /// host that is smaller than the device.
    CopiesFirst,
    /// What only the host holds, least wanted first, before copies of what is on device too: the host remembers
    /// what the device will forget next. For a host that is larger than the device.
    LeavesFirst,
}

impl HostOrder {
    /// All orders with their names.
    pub const NAMES: [(&'static str, Self); 2] =
        [("copies_first", Self::CopiesFirst), ("leaves_first", Self::LeavesFirst)];

    /// The order of this name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, order)| *order).ok_or_else(|| {
            let names = Self::NAMES.map(|(name, _)| name).join(", ");
            bad_argument!("host_order is {name:?}, allowed are {names}")
        })
    }
}

/// The settings of a tree.
#[derive(Clone, Debug)]
pub struct TreeConfig {
    /// Positions in a page, 1 to 256.
    pub page_size: usize,
    /// Name in the registry of policies.
    pub eviction_policy: String,
    /// Options of that policy.
    pub policy_options: Vec<(String, i64)>,
    /// When nodes go to host; `None`: there is no host tier, eviction deletes.
    pub write_policy: Option<WritePolicy>,
    /// Hits from which a write-through policy wants a node on host; `None`: 1, selective 3.
    pub write_through_threshold: Option<u64>,
    /// Positions are pairs of tokens.
    pub bigram: bool,
    /// Keep events.
    pub events: bool,
    /// Events kept before the queue overflows.
    pub event_capacity: usize,
    /// Tokens that pins may keep; `None`: no limit.
    pub pin_capacity: Option<u64>,
    /// Which host copies go first when host room is asked for.
    pub host_order: HostOrder,
}

impl Default for TreeConfig {
    fn default() -> Self {
        Self {
            page_size: 1,
            eviction_policy: "lru".to_owned(),
            policy_options: Vec::new(),
            write_policy: Some(WritePolicy::WriteThrough),
            write_through_threshold: None,
            bigram: false,
            events: false,
            event_capacity: 65_536,
            pin_capacity: None,
            host_order: HostOrder::CopiesFirst,
        }
    }
}

impl TreeConfig {
    pub(crate) fn check(&self) -> Result<()> {
        if self.write_through_threshold == Some(0) {
            return Err(bad_argument!("write_through_threshold is 0, allowed is 1 or more"));
        }
        if self.event_capacity == 0 {
            return Err(bad_argument!("event_capacity is 0, allowed is 1 or more"));
        }
        Ok(())
    }

    pub(crate) fn threshold(&self) -> u64 {
        self.write_through_threshold.unwrap_or(match self.write_policy {
            Some(WritePolicy::WriteThroughSelective) => 3,
            _ => 1,
        })
    }
}
