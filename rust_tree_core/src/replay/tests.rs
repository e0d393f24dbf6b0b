//! The replay against a plain simulation of single blocks, and what must hold whatever the trace.

use std::collections::HashMap;

use super::*;
use crate::{HostOrder, TreeConfig, WritePolicy, policy_names};

/// A seeded generator of random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((mixed ^ (mixed >> 31)) % end as u64).unwrap()
    }
}

struct Trace {
    lengths: Vec<u32>,
    counts: Vec<u32>,
    ids: Vec<u32>,
}

impl Trace {
    /// Prompts that grow from earlier ones: a block's id is that of its whole prefix. `partial`: the last block
    /// of a request may be cut short.
    fn random(seed: u64, requests: usize, block_size: usize, partial: bool) -> Self {
        let mut random = Random(seed);
        let mut known: HashMap<(u32, usize), u32> = HashMap::new();
        let mut trace = Self { lengths: Vec::new(), counts: Vec::new(), ids: Vec::new() };
        for _ in 0..requests {
            let blocks = 1 + random.below(9);
            let mut above = u32::MAX;
            for depth in 0..blocks {
                let choice = random.below(if depth < 3 { 2 } else { 4 });
                let next = known.len() as u32;
                above = *known.entry((above, choice)).or_insert(next);
                trace.ids.push(above);
            }
            let cut = if partial { random.below(block_size) } else { 0 };
            trace.lengths.push((blocks * block_size - cut) as u32);
            trace.counts.push(blocks as u32);
        }
        trace
    }

    fn requests(&self) -> Requests<'_> {
        Requests { input_lengths: &self.lengths, block_counts: &self.counts, hash_ids: &self.ids }
    }
}

/// One block on device, as the plain simulation knows it.
struct Block {
    parent: Option<u32>,
    last: usize,
    created: usize,
    hits: usize,
}

/// Hit blocks under a policy, block by block: only a block without children in the cache can go.
fn plain(trace: &Trace, capacity: usize, policy: &str) -> u64 {
    let key = |block: &Block| {
        let (last, created, hits) = (block.last, block.created, block.hits);
        let (last, created, hits) = (last.cast_signed(), created.cast_signed(), hits.cast_signed());
        match policy {
            "lfu" => (hits, last),
            "fifo" => (created, 0),
            "mru" => (-last, 0),
            "filo" => (-created, 0),
            "slru" => (isize::from(hits >= 2), last),
            _ => (0, last), // lru; priority and tlru without settings
        }
    };
    let mut held: HashMap<u32, Block> = HashMap::new();
    let mut found = 0;
    let mut rest = trace.ids.as_slice();
    for (now, &count) in trace.counts.iter().enumerate() {
        let (ids, after) = rest.split_at(count as usize);
        rest = after;
        if ids.len() > capacity {
            continue;
        }
        let hits = ids.iter().take_while(|id| held.contains_key(id)).count();
        found += hits as u64;
        while held.len() + ids.len() - hits > capacity {
            let parents: Vec<u32> = held.values().filter_map(|block| block.parent).collect();
            let free = held.iter().filter(|(id, _)| !ids.contains(id) && !parents.contains(id));
            let victim = *free.min_by_key(|(_, block)| key(block)).unwrap().0;
            held.remove(&victim);
        }
        let mut parent = None;
        for &id in ids {
            let block = held.entry(id).or_insert(Block { parent, last: 0, created: now, hits: 0 });
            block.last = now;
            block.hits += 1;
            parent = Some(id);
        }
    }
    found
}

fn replayed(trace: &Trace, config: &ReplayConfig) -> ReplayReport {
    let mut replay = Replay::new(config).unwrap();
    replay.run(&trace.requests()).unwrap();
    replay.check_invariants().unwrap();
    replay.report().clone()
}

#[test]
fn one_tier_hits_what_a_plain_simulation_hits() {
    for seed in 0..12 {
        let trace = Trace::random(seed, 300, 4, true);
        for policy in policy_names() {
            for capacity in [3, 9, 25, 60] {
                let config = ReplayConfig {
                    device_blocks: capacity,
                    block_size: 4,
                    eviction_policy: policy.to_owned(),
                    ..ReplayConfig::default()
                };
                let report = replayed(&trace, &config);
                let want = plain(&trace, capacity, policy);
                assert_eq!(report.device_hit_blocks, want, "{policy}, {capacity} blocks, seed {seed}");
                assert_eq!((report.requests, report.host_hit_blocks, report.copied_to_host), (300, 0, 0));
                let held = report.blocks - report.device_hit_blocks - report.device_evicted;
                assert!(report.bypassed > 0 || held <= capacity as u64);
                assert_eq!(report.device_evicted, report.dropped);
            }
        }
    }
}

#[test]
fn token_by_token_with_whole_blocks_as_pages_is_block_by_block() {
    for seed in 0..6 {
        let trace = Trace::random(seed, 300, 8, false);
        let blocks = ReplayConfig { device_blocks: 30, block_size: 8, ..ReplayConfig::default() };
        let pages = ReplayConfig { unit: Unit::Tokens { page_size: 8 }, ..blocks.clone() };
        let (blocks, pages) = (replayed(&trace, &blocks), replayed(&trace, &pages));
        assert!(blocks.device_hit_blocks > 0);
        assert_eq!(ReplayReport { seconds: 0.0, ..blocks }, ReplayReport { seconds: 0.0, ..pages });
    }
}

#[test]
fn an_infinite_cache_finds_every_block_and_page_but_the_first_of_its_kind() {
    let trace = Trace::random(5, 200, 8, true);
    let different = trace.ids.iter().collect::<std::collections::HashSet<_>>().len() as u64;
    let config = ReplayConfig { block_size: 8, device_blocks: 100_000, ..ReplayConfig::default() };
    let report = replayed(&trace, &config);
    assert_eq!(report.device_hit_blocks, report.blocks - different);
    assert_eq!((report.device_evicted, report.bypassed), (0, 0));
}

#[test]
fn tiers_and_policies_keep_what_must_hold_at_every_step() {
    for seed in 0..4 {
        let trace = Trace::random(seed, 250, 8, true);
        for (_, write_policy) in WritePolicy::NAMES {
            for (_, host_order) in HostOrder::NAMES {
                for unit in [Unit::Blocks, Unit::Tokens { page_size: 2 }] {
                    for (device_blocks, host_blocks) in [(10, 4), (12, 12), (9, 40), (20, 1)] {
                        let config = ReplayConfig {
                            device_blocks,
                            host_blocks,
                            block_size: 8,
                            unit,
                            write_policy,
                            host_order: Some(host_order),
                            write_through_threshold: Some(1 + seed % 2),
                            eviction_policy: policy_names()[seed as usize].to_owned(),
                            ..ReplayConfig::default()
                        };
                        sound_at_every_step(&trace, &config);
                    }
                }
            }
        }
    }
}

fn sound_at_every_step(trace: &Trace, config: &ReplayConfig) {
    let mut replay = Replay::new(config).unwrap();
    let mut from = 0;
    for (&length, &count) in trace.lengths.iter().zip(&trace.counts) {
        let to = from + count as usize;
        let one =
            Requests { input_lengths: &[length], block_counts: &[count], hash_ids: &trace.ids[from..to] };
        replay.run(&one).unwrap();
        replay.check_invariants().unwrap();
        assert!(replay.device.used() <= replay.device.size() && replay.host.used() <= replay.host.size());
        from = to;
    }
    let report = replay.report();
    assert_eq!(report.bypassed, 0, "{config:?}"); // each request fits, so room was found for it
    assert!(report.demoted <= report.device_evicted);
    assert!(report.device_hit_tokens + report.host_hit_tokens <= report.tokens);
    assert!(report.host_hit_tokens == 0 || report.copied_to_device > 0);
}

#[test]
fn write_through_copies_each_block_that_was_not_found() {
    for seed in 0..8 {
        let trace = Trace::random(seed, 400, 4, true);
        for host_blocks in [40, 60, 90] {
            let config =
                ReplayConfig { device_blocks: 12, host_blocks, block_size: 4, ..ReplayConfig::default() };
            let report = replayed(&trace, &config);
            let found = report.device_hit_blocks + report.host_hit_blocks;
            assert!(report.host_hit_blocks > 0 && report.host_evicted > 0);
            assert_eq!(report.copied_to_host, report.blocks - found, "seed {seed}, {host_blocks} blocks");
            assert_eq!((report.copied_to_device, report.dropped), (report.host_hit_blocks, 0));
        }
    }
}

#[test]
fn a_host_that_holds_everything_makes_the_cache_infinite() {
    for (name, write_policy) in WritePolicy::NAMES {
        let trace = Trace::random(9, 400, 4, true);
        let different = trace.ids.iter().collect::<std::collections::HashSet<_>>().len() as u64;
        let config = ReplayConfig {
            device_blocks: 10,
            host_blocks: 10_000,
            block_size: 4,
            write_policy,
            write_through_threshold: Some(1),
            ..ReplayConfig::default()
        };
        let report = replayed(&trace, &config);
        assert_eq!(report.device_hit_blocks + report.host_hit_blocks, report.blocks - different, "{name}");
        assert_eq!((report.dropped, report.host_evicted), (0, 0));
    }
}

#[test]
fn a_request_that_is_too_large_goes_past_the_cache() {
    let mut replay = Replay::new(&ReplayConfig {
        device_blocks: 3,
        block_size: 4,
        unit: Unit::Tokens { page_size: 2 },
        ..ReplayConfig::default()
    })
    .unwrap();
    // 6 pages fit, a tail that fills no page does not count; 7 pages do not.
    for (length, ids) in [(12, vec![1, 2, 3]), (13, vec![1, 2, 3, 4]), (14, vec![1, 2, 3, 4])] {
        let counts = [ids.len() as u32];
        let requests = Requests { input_lengths: &[length], block_counts: &counts, hash_ids: &ids };
        replay.run(&requests).unwrap();
    }
    let report = replay.report();
    assert_eq!((report.requests, report.bypassed, report.blocks), (3, 1, 11));
    assert_eq!((report.device_hit_blocks, report.device_hit_tokens), (3, 12));
}

#[test]
fn settings_that_can_not_be_are_named() {
    let text = |config: ReplayConfig| Replay::new(&config).unwrap_err().to_string();
    let default = ReplayConfig::default;
    assert!(text(ReplayConfig { device_blocks: 0, ..default() }).starts_with("device_blocks is 0, allowed"));
    assert!(text(ReplayConfig { block_size: 0, ..default() }).starts_with("block_size is 0"));
    assert!(text(ReplayConfig { host_blocks: usize::MAX, ..default() }).starts_with("host_blocks is 1844"));
    let unit = Unit::Tokens { page_size: 0 };
    assert!(text(ReplayConfig { unit, ..default() }).starts_with("page_size is 0, allowed is 1 to 256"));
    let (device_blocks, unit) = (1 << 24, Unit::Tokens { page_size: 1 });
    assert!(text(ReplayConfig { device_blocks, unit, ..default() }).starts_with("device_blocks is 16777216"));
    let eviction_policy = "lrux".to_owned();
    assert!(text(ReplayConfig { eviction_policy, ..default() }).contains("\"lrux\""));
    let text = ReplayConfig::host_order_from_name("first").unwrap_err().to_string();
    assert!(text.contains("allowed are auto, copies_first, leaves_first"), "{text}");
}

#[test]
fn the_tree_that_is_replayed_is_the_tree_of_the_settings() {
    let config = ReplayConfig { unit: Unit::Tokens { page_size: 64 }, ..ReplayConfig::default() };
    let TreeConfig { page_size, write_policy, .. } = config.tree();
    assert_eq!((page_size, write_policy), (64, None));
    let config = ReplayConfig { host_blocks: 1, ..config };
    assert_eq!(config.tree().write_policy, Some(WritePolicy::WriteThrough));
    // Which host copies go first is the larger tier's to say, unless it is set.
    assert_eq!(config.tree().host_order, HostOrder::CopiesFirst);
    let config = ReplayConfig { host_blocks: config.device_blocks + 1, ..config };
    assert_eq!(config.tree().host_order, HostOrder::LeavesFirst);
    let config = ReplayConfig { host_order: Some(HostOrder::CopiesFirst), ..config };
    assert_eq!(config.tree().host_order, HostOrder::CopiesFirst);
}
