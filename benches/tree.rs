//! Criterion benches of the tree through its Rust API: what the core costs without Python around it.
//!
//! `cargo bench` runs all of them, `cargo bench -- match` those whose name has "match".

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rust_tree_core::{InsertArgs, Namespace, Tokens, Tree, TreeConfig, page_hashes};

const NO_NAMESPACE: Namespace<'static> = Namespace { extra_key: None, cache_salt: None };

/// xorshift64: tokens of a fixed seed, so that runs compare.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn tokens(&mut self, count: usize) -> Vec<i64> {
        (0..count).map(|_| (self.next() % 32_000).cast_signed()).collect()
    }
}

fn pages(count: usize, start: u32) -> Vec<u32> {
    (start..).take(count).collect()
}

fn tree(page_size: usize) -> Tree {
    tree_by("lru", page_size)
}

fn tree_by(policy: &str, page_size: usize) -> Tree {
    let eviction_policy = policy.to_owned();
    let config = TreeConfig { page_size, eviction_policy, write_policy: None, ..TreeConfig::default() };
    Tree::new(config).expect("a good config")
}

/// A tree that holds `key` as a chain of nodes of `step` tokens.
fn grown(key: &[i64], step: usize, page_size: usize) -> Tree {
    let mut tree = tree(page_size);
    for end in (step..=key.len()).step_by(step) {
        let held = pages(end / page_size, 0);
        let args =
            InsertArgs { prev_prefix_len: end - step, ..InsertArgs::new(Tokens::I64(&key[..end]), &held) };
        tree.insert(args).expect("a good key");
    }
    tree
}

/// The same key in several buffers, each with another last token: nothing can be remembered between calls.
fn variants(key: &[i64]) -> Vec<Vec<i64>> {
    (0..8)
        .map(|i| {
            let mut copy = key.to_vec();
            *copy.last_mut().expect("a key") = 40_000 + i;
            copy
        })
        .collect()
}

fn matches(c: &mut Criterion) {
    let mut group = c.benchmark_group("match");
    let shapes = [
        ("131072, 1 node, page 64", 131_072, 131_072, 64),
        ("131072, 256 nodes, page 1", 131_072, 512, 1),
        ("131072, 256 nodes, page 64", 131_072, 512, 64),
        ("8192 shared, page 64", 8192, 8192, 64),
        ("chain 500 x 128, page 64", 64_000, 128, 64),
    ];
    for (name, length, step, page_size) in shapes {
        let key = Random(1).tokens(length);
        let mut tree = grown(&key, step, page_size);
        let keys = variants(&key);
        let mut turn = 0;
        group.throughput(Throughput::Elements(length as u64));
        group.bench_function(name, |b| {
            b.iter(|| {
                turn = (turn + 1) % keys.len();
                let found =
                    tree.match_prefix(Tokens::I64(&keys[turn]), NO_NAMESPACE, true).expect("a good key");
                assert_eq!(found.device_length, length - page_size);
                found
            });
        });
    }
    let key = Random(1).tokens(131_072);
    let mut tree = grown(&key, 512, 64);
    let keys = variants(&key);
    let mut turn = 0;
    group.bench_function("131072, 256 nodes, page 64, with its device pages", |b| {
        b.iter(|| {
            turn = (turn + 1) % keys.len();
            let found = tree.match_prefix(Tokens::I64(&keys[turn]), NO_NAMESPACE, true).expect("a good key");
            found.device_pages()
        });
    });
    let wide = Random(1).tokens(131_072);
    let key: Vec<u32> = wide.iter().map(|&token| u32::try_from(token).expect("a token")).collect();
    let mut tree = grown(&wide, wide.len(), 64);
    group.throughput(Throughput::Elements(key.len() as u64));
    group.bench_function("131072 uint32, 1 node, page 64", |b| {
        b.iter(|| tree.match_prefix(Tokens::U32(&key), NO_NAMESPACE, true).expect("a good key"));
    });
    group.finish();
}

fn inserts(c: &mut Criterion) {
    let mut group = c.benchmark_group("insert");
    let mut random = Random(2);
    group.bench_function("32768 new, page 64", |b| {
        let held = pages(512, 0);
        let mut tree = tree(64);
        b.iter_batched(
            || random.tokens(32_768),
            |key| tree.insert(InsertArgs::new(Tokens::I64(&key), &held)).expect("a good key").node,
            BatchSize::LargeInput,
        );
    });
    let mut random = Random(3);
    group.bench_function("256 after 8192, page 64", |b| {
        let context = random.tokens(8192);
        let held = pages(132, 0);
        let mut tree = grown(&context, 8192, 64);
        b.iter_batched(
            || [context.as_slice(), &random.tokens(256)].concat(),
            |key| {
                let args = InsertArgs { prev_prefix_len: 8192, ..InsertArgs::new(Tokens::I64(&key), &held) };
                tree.insert(args).expect("a good key").node
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

fn locks(c: &mut Criterion) {
    let key = Random(4).tokens(64_000);
    let mut tree = grown(&key, 128, 64);
    let node = tree.match_prefix(Tokens::I64(&key), NO_NAMESPACE, true).expect("a good key").last_device_node;
    c.bench_function("lock and unlock, path of 500 nodes", |b| {
        b.iter(|| {
            let mut receipt = tree.inc_lock_ref(node).expect("a live node");
            tree.dec_lock_ref(&mut receipt).expect("a fresh receipt");
        });
    });
}

/// The `i`-th of many keys of one page each that share no page.
fn leaf(i: u64) -> [u32; 64] {
    let mut key = [7; 64];
    key[0] = u32::try_from(i / 60_000).expect("a token");
    key[1] = u32::try_from(i % 60_000).expect("a token");
    key
}

fn with_leaves(count: u32, policy: &str) -> Tree {
    let mut tree = tree_by(policy, 64);
    for page in 0..count {
        tree.insert(InsertArgs::new(Tokens::U32(&leaf(u64::from(page))), &[page])).expect("a good key");
    }
    tree
}

fn evictions(c: &mut Criterion) {
    let mut group = c.benchmark_group("evict");
    let rows = [("lru", 1000), ("lru", 50_000), ("lru", 200_000), ("lru", 1_000_000)];
    for (policy, leaves) in rows.into_iter().chain([("lfu", 50_000), ("priority", 50_000)]) {
        // A full cache: insert one leaf, touch another, evict one page. Only the eviction is timed.
        group.bench_function(BenchmarkId::new(format!("one page, {policy}"), leaves), |b| {
            let mut tree = with_leaves(leaves, policy);
            let mut random = Random(5);
            let (mut next, mut page) = (u64::from(leaves), leaves);
            b.iter_custom(|rounds| {
                let mut total = Duration::ZERO;
                for _ in 0..rounds {
                    tree.insert(InsertArgs::new(Tokens::U32(&leaf(next)), &[page])).expect("a good key");
                    next += 1;
                    let touched = leaf(random.below(u64::from(leaves)));
                    tree.match_prefix(Tokens::U32(&touched), NO_NAMESPACE, true).expect("a good key");
                    let begin = Instant::now();
                    let done = black_box(tree.evict(1, None));
                    total += begin.elapsed();
                    page = done.device_pages[0];
                }
                total
            });
        });
    }
    let leaves = 200_000;
    group.sample_size(10).throughput(Throughput::Elements(u64::from(leaves)));
    group.bench_function("all of 200000 leaves", |b| {
        b.iter_batched(
            || with_leaves(leaves, "lru"),
            |mut tree| {
                let done = tree.evict(leaves as usize, None);
                assert_eq!(done.device_pages.len(), leaves as usize);
                (tree, done)
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

/// What could leave the host, told without taking it; with and without nodes above that follow their children.
fn host_room(c: &mut Criterion) {
    let mut group = c.benchmark_group("evictable_host_pages");
    for (nodes, chained) in [(1000, false), (200_000, false), (1_000_000, false), (1000, true)] {
        let mut tree =
            Tree::new(TreeConfig { page_size: 64, ..TreeConfig::default() }).expect("a good config");
        let chain: Vec<u32> = (0..nodes * 64).map(|i| if chained { i } else { 0 }).collect();
        for i in 0..nodes {
            let leaf = leaf(u64::from(i));
            let key = if chained { &chain[..64 * (i as usize + 1)] } else { &leaf[..] };
            let held = pages(key.len() / 64, 0);
            let node = tree.insert(InsertArgs::new(Tokens::U32(key), &held)).expect("a good key").node;
            let ack = tree.begin_backup(&[node], &[i]).expect("a node on device");
            tree.finish_backup(ack).expect("a fresh ack");
        }
        let shape = if chained { "a chain of" } else { "leaves" };
        for limit in [1, 512] {
            group.bench_function(format!("limit {limit}, {shape} {nodes}"), |b| {
                b.iter(|| tree.evictable_host_pages(black_box(limit)));
            });
        }
    }
    group.finish();
}

fn digests(c: &mut Criterion) {
    let key = Random(6).tokens(131_072);
    let mut group = c.benchmark_group("digests");
    group.throughput(Throughput::Elements(key.len() as u64));
    group.bench_function("131072, page 64", |b| {
        b.iter(|| page_hashes(Tokens::I64(&key), 64, None, NO_NAMESPACE, false).expect("a good key"));
    });
    group.finish();
}

/// What no tree can do without: reading the key and the stored tokens, memory that is touched for the first time,
/// the serial blocks of SHA-256. A row of the tree is as good as its ratio to its floor.
fn floors(c: &mut Criterion) {
    let mut group = c.benchmark_group("floor");
    let any = |words: &[u64]| words.iter().fold(0, |sum, word| sum | word);
    let wide: Vec<Vec<u64>> = (0..8).map(|i| vec![i; 131_072]).collect();
    let stored = vec![1_u64; 131_072 / 2];
    let mut turn = 0;
    group.bench_function("read 131072 int64 and as many stored tokens", |b| {
        b.iter(|| {
            turn = (turn + 1) % wide.len();
            black_box(any(&wide[turn])) | black_box(any(&stored))
        });
    });
    group.bench_function("read 131072 uint32 and as many stored tokens", |b| {
        b.iter(|| {
            turn = (turn + 1) % wide.len();
            black_box(any(&wide[turn][..131_072 / 2])) | black_box(any(&stored))
        });
    });
    let cold: Vec<Vec<u64>> = (0..800).map(|i| vec![i; 8448]).collect();
    group.bench_function("read 8448 int64 that are in no cache", |b| {
        b.iter(|| {
            turn = (turn + 1) % cold.len();
            black_box(any(&cold[turn]))
        });
    });
    group.bench_function("write 32768 tokens into new memory", |b| {
        b.iter_with_large_drop(|| black_box(vec![1_u32; 32_768 + turn % 2]));
    });
    group.throughput(Throughput::Elements(131_072));
    let blocks = [[7_u8; 64]; 5];
    group.bench_function("5 serial SHA-256 blocks for each of 2048 pages", |b| {
        b.iter(|| {
            let mut state = [1_u32; 8];
            for _ in 0..2048 {
                sha2::block_api::compress256(&mut state, &blocks);
            }
            state
        });
    });
    group.finish();
}

criterion_group!(benches, floors, matches, inserts, locks, evictions, host_room, digests);
criterion_main!(benches);
