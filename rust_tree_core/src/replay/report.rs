//! What a replay counts.

use super::Unit;

/// Counters of a replay; they only go up. Pages are those of the tree: one block, or `page_size` tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplayReport {
    /// Requests, those that bypassed included.
    pub requests: u64,
    /// Requests that were larger than the device tier, or found no room in it.
    pub bypassed: u64,
    /// Blocks that the requests asked for.
    pub blocks: u64,
    /// Tokens that the requests asked for.
    pub tokens: u64,
    /// Blocks found on device. Token by token: all whole pages of the block.
    pub device_hit_blocks: u64,
    /// Blocks found on host, and loaded back.
    pub host_hit_blocks: u64,
    /// Tokens found on device.
    pub device_hit_tokens: u64,
    /// Tokens found on host, and loaded back.
    pub host_hit_tokens: u64,
    /// Device pages freed by eviction.
    pub device_evicted: u64,
    /// Those of them whose content stayed on host.
    pub demoted: u64,
    /// Host pages freed by eviction.
    pub host_evicted: u64,
    /// Pages copied from device to host.
    pub copied_to_host: u64,
    /// Pages copied from host to device.
    pub copied_to_device: u64,
    /// Pages whose last copy went when the device was evicted.
    pub dropped: u64,
    /// Backups that were given up because the host had no room.
    pub backups_given_up: u64,
    /// Time spent in match, load-back, lock, evict, insert, back up and unlock.
    pub seconds: f64,
}

/// Pages of one request that were found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hits {
    pub device: usize,
    pub host: usize,
    /// Whole pages of the request.
    pub wanted: usize,
}

impl ReplayReport {
    /// Counts one request of `tokens` tokens in `blocks` blocks.
    pub(super) fn count(
        &mut self,
        hits: Option<&Hits>,
        unit: Unit,
        block_size: usize,
        tokens: usize,
        blocks: usize,
    ) {
        self.requests += 1;
        self.blocks += blocks as u64;
        self.tokens += tokens as u64;
        let Some(hits) = hits else {
            self.bypassed += 1;
            return;
        };
        let covered = |pages: usize| match unit {
            Unit::Blocks => (pages, tokens.min(pages * block_size)),
            Unit::Tokens { page_size } => {
                let found = pages * page_size;
                // The partial last block is found if all that can be cached of it is.
                let last = pages == hits.wanted && !found.is_multiple_of(block_size);
                (found / block_size + usize::from(last), found)
            }
        };
        let on_device = covered(hits.device);
        let in_all = covered(hits.device + hits.host);
        self.device_hit_blocks += on_device.0 as u64;
        self.device_hit_tokens += on_device.1 as u64;
        self.host_hit_blocks += (in_all.0 - on_device.0) as u64;
        self.host_hit_tokens += (in_all.1 - on_device.1) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(unit: Unit, device: usize, host: usize, wanted: usize) -> [u64; 4] {
        let mut report = ReplayReport::default();
        // 5 blocks of 512 tokens, the last one of 252: three pages of 64 and a tail.
        report.count(Some(&Hits { device, host, wanted }), unit, 512, 2300, 5);
        assert_eq!((report.requests, report.blocks, report.tokens, report.bypassed), (1, 5, 2300, 0));
        [report.device_hit_blocks, report.host_hit_blocks, report.device_hit_tokens, report.host_hit_tokens]
    }

    #[test]
    fn a_block_is_found_when_all_of_it_that_can_be_cached_is() {
        let pages = Unit::Tokens { page_size: 64 };
        assert_eq!(counted(pages, 0, 0, 35), [0, 0, 0, 0]);
        assert_eq!(counted(pages, 7, 1, 35), [0, 1, 448, 64]);
        assert_eq!(counted(pages, 16, 18, 35), [2, 2, 1024, 1152]);
        assert_eq!(counted(pages, 16, 19, 35), [2, 3, 1024, 1216]);
        assert_eq!(counted(Unit::Blocks, 2, 2, 5), [2, 2, 1024, 1024]);
        assert_eq!(counted(Unit::Blocks, 2, 3, 5), [2, 3, 1024, 1276]);
        assert_eq!(counted(Unit::Blocks, 5, 0, 5), [5, 0, 2300, 0]);
    }

    #[test]
    fn a_request_that_bypasses_is_asked_for_and_not_found() {
        let mut report = ReplayReport::default();
        report.count(None, Unit::Blocks, 512, 600, 2);
        let want =
            ReplayReport { requests: 1, bypassed: 1, blocks: 2, tokens: 600, ..ReplayReport::default() };
        assert_eq!(report, want);
    }
}
