//! Any bytes as calls on a tree: the entry of the fuzz targets (`fuzz/`) and of the test beside this folder.
//!
//! Nothing is compared with a model here. What must hold: no panic, invariants after each call, and a call that
//! returns an error has changed nothing.

use rust_tree_core::{
    Ack, HostLockReceipt, HostOrder, InsertArgs, InsertHostArgs, LoadBackPlan, LockReceipt, Namespace,
    NodeId, Pin, Tokens, Tree, TreeConfig, WritePolicy, page_hashes, policy_names,
};

/// Reads numbers off the front of a byte string; zeros once it is empty.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound.max(1)
    }

    fn long(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A node id: mostly small, sometimes anything.
    fn node(&mut self) -> NodeId {
        match self.byte() {
            255 => self.long(),
            small => NodeId::from(small % 48),
        }
    }

    fn nodes(&mut self) -> Vec<NodeId> {
        (0..self.below(4)).map(|_| self.node()).collect()
    }

    /// A key of few values, so that prefixes meet; now and then a word that is no token.
    fn key(&mut self) -> Vec<i64> {
        let length = self.below(40);
        let mut key: Vec<i64> = (0..length).map(|_| i64::from(self.byte() % 3)).collect();
        if self.byte() == 255 && !key.is_empty() {
            let at = self.below(key.len());
            key[at] = self.long().cast_signed();
        }
        key
    }

    fn namespace(&mut self) -> Namespace<'static> {
        let part = |choice| [None, Some("a"), Some(""), Some("\u{1F980}")][choice];
        Namespace { extra_key: part(self.below(4)), cache_salt: part(self.below(2)) }
    }
}

/// What was handed out and may be given back, in any order, more than once.
#[derive(Default)]
struct Held {
    locks: Vec<LockReceipt>,
    host_locks: Vec<HostLockReceipt>,
    acks: Vec<Ack>,
    plans: Vec<LoadBackPlan>,
    pins: Vec<Pin>,
    next_page: u32,
}

impl Held {
    /// Pages that no tree has.
    fn pages(&mut self, count: usize) -> Vec<u32> {
        let first = self.next_page;
        self.next_page += count as u32;
        (first..self.next_page).collect()
    }
}

fn config(bytes: &mut Bytes<'_>) -> TreeConfig {
    let names = policy_names();
    let policies = [
        None,
        Some(WritePolicy::WriteThrough),
        Some(WritePolicy::WriteThroughSelective),
        Some(WritePolicy::WriteBack),
    ];
    TreeConfig {
        page_size: [1, 2, 3, 16][bytes.below(4)],
        eviction_policy: names[bytes.below(names.len())].to_owned(),
        write_policy: policies[bytes.below(4)],
        bigram: bytes.below(2) == 1,
        events: bytes.below(2) == 1,
        event_capacity: 1 + bytes.below(9),
        pin_capacity: [None, Some(8)][bytes.below(2)],
        host_order: HostOrder::NAMES[bytes.below(2)].1,
        ..TreeConfig::default()
    }
}

/// Plays the calls that the bytes spell.
pub fn play(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let config = config(&mut bytes);
    let (page_size, bigram) = (config.page_size, config.bigram);
    let mut tree = Tree::new(config).expect("the settings are good");
    let mut held = Held::default();
    while !bytes.0.is_empty() {
        let before = (tree.digest(), tree.len(), tree.device_tokens(), tree.host_tokens());
        let good = call(&mut tree, &mut held, &mut bytes, page_size, bigram);
        if !good {
            let after = (tree.digest(), tree.len(), tree.device_tokens(), tree.host_tokens());
            assert_eq!(before, after, "a failing call changed something");
        }
        tree.check_invariants().expect("invariants");
    }
}

/// One call; false if it returned an error.
fn call(tree: &mut Tree, held: &mut Held, bytes: &mut Bytes<'_>, page_size: usize, bigram: bool) -> bool {
    let choice = bytes.byte() % 26;
    let any = |bytes: &mut Bytes<'_>, length: usize| (length > 0).then(|| bytes.below(length));
    match choice {
        0..6 => {
            let key = bytes.key();
            let count = key.len().saturating_sub(usize::from(bigram)) / page_size;
            let pages = held.pages(if bytes.byte() == 255 { bytes.below(9) } else { count });
            let mut args = InsertArgs::new(Tokens::I64(&key), &pages);
            args.namespace = bytes.namespace();
            args.prev_prefix_len = if bytes.byte() > 240 { bytes.below(64) } else { 0 };
            args.inserted_len = bytes.below(32);
            args.priority = [0, 1, i64::MAX, i64::MIN][bytes.below(4)];
            args.chunked = bytes.below(4) == 0;
            tree.insert(args).is_ok()
        }
        6..9 => {
            let key = bytes.key();
            let narrow: Vec<i32> = key.iter().map(|&word| word as i32).collect();
            let tokens = if bytes.below(2) == 0 { Tokens::I64(&key) } else { Tokens::I32(&narrow) };
            let (space, evicted) = (bytes.namespace(), bytes.below(2) == 0);
            let peek = tree.peek_prefix(tokens, space, evicted);
            let found = tree.match_prefix(tokens, space, evicted);
            if let (Ok(peek), Ok(found)) = (&peek, &found) {
                assert_eq!(peek.device_pages(), found.device_pages());
                assert_eq!(peek.host_hit_length, found.host_hit_length);
            }
            found.is_ok()
        }
        9 => tree.inc_lock_ref(bytes.node()).map(|lock| held.locks.push(lock)).is_ok(),
        10 => any(bytes, held.locks.len()).is_some_and(|at| tree.dec_lock_ref(&mut held.locks[at]).is_ok()),
        11 => tree.inc_host_lock_ref(bytes.node()).map(|lock| held.host_locks.push(lock)).is_ok(),
        12 => any(bytes, held.host_locks.len())
            .is_some_and(|at| tree.dec_host_lock_ref(&mut held.host_locks[at]).is_ok()),
        13 | 14 => {
            let room = [None, Some(0), Some(3)][bytes.below(3)];
            tree.evict(bytes.below(12), room);
            true
        }
        15 => {
            let pages = bytes.below(12);
            assert_eq!(tree.evictable_host_pages(pages), tree.evict_host(pages).host_pages.len().min(pages));
            true
        }
        16 => tree.drop_nodes(&bytes.nodes()).is_ok(),
        17 | 18 => {
            let plan = tree.plan_backup(&bytes.nodes());
            let nodes = if bytes.byte() == 255 { bytes.nodes() } else { plan.nodes };
            let pages = held.pages(plan.pages);
            tree.begin_backup(&nodes, &pages).map(|ack| held.acks.push(ack)).is_ok()
        }
        19 | 20 => {
            let Some(at) = any(bytes, held.acks.len()) else { return true };
            let ack = held.acks[at];
            match bytes.below(4) {
                0 => tree.cancel_backup(ack).is_ok(),
                1 => tree.cancel_load_back(ack).is_ok(),
                2 => tree.finish_load_back(ack).is_ok(),
                _ => tree.finish_backup(ack).is_ok(),
            }
        }
        21 => tree.plan_load_back(bytes.node()).map(|plan| held.plans.push(plan)).is_ok(),
        22 => {
            let Some(at) = any(bytes, held.plans.len()) else { return true };
            if bytes.below(4) == 0 {
                return tree.cancel_load_back_plan(&mut held.plans[at]).is_ok();
            }
            let pages = held.pages(held.plans[at].pages());
            tree.begin_load_back(&mut held.plans[at], &pages).map(|ack| held.acks.push(ack)).is_ok()
        }
        23 => {
            let key = bytes.key();
            let count = key.len().saturating_sub(usize::from(bigram)) / page_size;
            let pages = held.pages(count);
            let digests: Vec<[u8; 32]> = (0..count).map(|_| [bytes.byte(); 32]).collect();
            let hashes = (bytes.byte() > 200).then_some(&digests[..]);
            let (anchor, namespace) = (bytes.node(), bytes.namespace());
            let tokens = Tokens::I64(&key);
            tree.insert_host(InsertHostArgs { anchor, tokens, host_pages: &pages, hashes, namespace }).is_ok()
        }
        24 => match bytes.below(4) {
            0 => tree
                .pin(bytes.node(), [None, Some(1.0), Some(f64::NAN)][bytes.below(3)])
                .map(|pin| held.pins.push(pin))
                .is_ok(),
            1 => any(bytes, held.pins.len()).is_some_and(|at| tree.unpin(held.pins[at]).is_ok()),
            2 => {
                tree.expire_pins(2.0);
                true
            }
            _ => tree.prefix_hashes(bytes.node()).is_ok(),
        },
        _ => {
            if bytes.byte() == 255 {
                tree.reset();
            } else {
                tree.take_events();
            }
            true
        }
    }
}

/// Any bytes as a key, hashed in both widths.
pub fn hash(bytes: &[u8]) {
    let Some((&first, rest)) = bytes.split_first() else { return };
    let words: Vec<i64> = rest
        .chunks_exact(8)
        .map(|chunk| i64::from_le_bytes(chunk.try_into().expect("chunks of 8")))
        .collect();
    let (page_size, bigram) = (1 + usize::from(first >> 1), first & 1 == 1);
    let hashed = page_hashes(Tokens::I64(&words), page_size, None, Namespace::default(), bigram);
    let narrow: Option<Vec<u32>> = words.iter().map(|&word| u32::try_from(word).ok()).collect();
    match (hashed, narrow) {
        (Ok(wide), Some(narrow)) => {
            let again = page_hashes(Tokens::U32(&narrow), page_size, None, Namespace::default(), bigram);
            assert_eq!(again, Ok(wide));
        }
        (Err(_), None) => {}
        (hashed, narrow) => panic!("{hashed:?} for {narrow:?}"),
    }
}
