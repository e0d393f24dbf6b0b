//! The settings of a replay.

use crate::error::{Result, bad_argument};
use crate::{HostOrder, TreeConfig, WritePolicy};

/// What a position of the tree is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A block of the trace: a tree of page size 1 whose tokens are the ids of the blocks.
    Blocks,
    /// A token. Each block becomes `block_size` tokens that are a fixed function of its id, the last one of a
    /// request fewer; a page that is not full is not cached.
    Tokens {
        /// Tokens in a page.
        page_size: usize,
    },
}

/// The settings of a replay.
#[derive(Clone, Debug)]
pub struct ReplayConfig {
    /// Size of the device tier.
    pub device_blocks: usize,
    /// Size of the host tier; 0: there is none.
    pub host_blocks: usize,
    /// Tokens in a block of the trace.
    pub block_size: usize,
    /// What a position of the tree is.
    pub unit: Unit,
    /// Name in the registry of policies.
    pub eviction_policy: String,
    /// Options of that policy.
    pub policy_options: Vec<(String, i64)>,
    /// When nodes go to host.
    pub write_policy: WritePolicy,
    /// Hits from which a write-through policy wants a node on host; `None`: the policy's own.
    pub write_through_threshold: Option<u64>,
    /// Which host copies go first; `None`: the larger tier decides, leaves first if the host has more blocks than
    /// the device, else copies first.
    pub host_order: Option<HostOrder>,
}

impl Default for ReplayConfig {
    fn default() -> Self {
        Self {
            device_blocks: 20_000,
            host_blocks: 0,
            block_size: 512,
            unit: Unit::Blocks,
            eviction_policy: "lru".to_owned(),
            policy_options: Vec::new(),
            write_policy: WritePolicy::WriteThrough,
            write_through_threshold: None,
            host_order: None,
        }
    }
}

impl ReplayConfig {
    /// The host order of this name; `auto` leaves it to the sizes.
    pub fn host_order_from_name(name: &str) -> Result<Option<HostOrder>> {
        if name == "auto" {
            return Ok(None);
        }
        HostOrder::from_name(name).map(Some).map_err(|_| {
            let names = HostOrder::NAMES.map(|(name, _)| name).join(", ");
            bad_argument!("host_order is {name:?}, allowed are auto, {names}")
        })
    }

    pub(super) fn tree(&self) -> TreeConfig {
        TreeConfig {
            page_size: match self.unit {
                Unit::Blocks => 1,
                Unit::Tokens { page_size } => page_size,
            },
            eviction_policy: self.eviction_policy.clone(),
            policy_options: self.policy_options.clone(),
            write_policy: (self.host_blocks > 0).then_some(self.write_policy),
            write_through_threshold: self.write_through_threshold,
            host_order: self.host_order.unwrap_or(if self.host_blocks > self.device_blocks {
                HostOrder::LeavesFirst
            } else {
                HostOrder::CopiesFirst
            }),
            ..TreeConfig::default()
        }
    }

    /// Pages of the device pool and of the host pool.
    pub(super) fn pools(&self) -> Result<(usize, usize)> {
        if self.block_size == 0 {
            return Err(bad_argument!("block_size is 0, allowed is 1 or more"));
        }
        Ok((
            self.in_pages("device_blocks", self.device_blocks, 1)?,
            self.in_pages("host_blocks", self.host_blocks, 0)?,
        ))
    }

    fn in_pages(&self, name: &str, blocks: usize, min: usize) -> Result<usize> {
        let pages = match self.unit {
            Unit::Blocks => Some(blocks),
            // A page size of 0 is the tree's to refuse.
            Unit::Tokens { page_size } => {
                blocks.checked_mul(self.block_size).map(|tokens| tokens / page_size.max(1))
            }
        };
        match pages {
            Some(pages) if blocks >= min && u32::try_from(pages).is_ok() => Ok(pages),
            _ => Err(bad_argument!(
                "{name} is {blocks}, allowed is {min} or more, and at most {} pages",
                u32::MAX
            )),
        }
    }
}
