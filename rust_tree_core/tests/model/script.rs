//! Calls written with small numbers, and random scripts of them.
//!
//! A call names live things (nodes, locks, acks, plans, pins) by an index into the list of what is
//! live when it is made, modulo its length. High numbers for nodes mean evicted ones, and those with
//! a copy under way, if there are any. So every part of a script is a script too, which is
//! what lets a failing one be made short.

use rust_tree_core::{HostOrder, TreeConfig, WritePolicy};

use super::random::Random;
use super::tokens::Key;

#[derive(Clone, Debug)]
pub struct Config {
    pub page_size: usize,
    pub bigram: bool,
    pub policy: &'static str,
    pub options: Vec<(&'static str, i64)>,
    pub write: Option<WritePolicy>,
    pub threshold: Option<u64>,
    pub events: bool,
    pub event_capacity: usize,
    pub pin_capacity: Option<u64>,
    pub host_order: HostOrder,
    /// Take and compare the events after every call, not only where the script says so.
    pub drain: bool,
    /// Look at every node, and check the invariants, once in so many calls.
    pub every: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// What inserts named for backup.
    Wanted,
    /// What evictions named for write-back.
    Held,
    Any,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    Match {
        key: Key,
        evicted: bool,
    },
    Peek {
        key: Key,
        evicted: bool,
    },
    MatchMany {
        keys: Vec<Key>,
    },
    /// The whole key of a live node, but for so many pages.
    MatchNode {
        node: u8,
        less: u8,
    },
    /// `prev`: pages that the caller borrowed; `lent`: and passes on as they are. `own`: bits, the pages past them that are the
    /// tree's own. `flaw`: 1 unaligned, 2 past the device part. `off`: pages too many or few.
    Insert {
        key: Key,
        prev: u8,
        lent: bool,
        own: u8,
        inserted: u8,
        priority: i8,
        chunked: bool,
        flaw: u8,
        off: i8,
    },
    Lock {
        node: u8,
    },
    Unlock {
        lock: u8,
    },
    HostLock {
        node: u8,
    },
    HostUnlock {
        lock: u8,
    },
    /// Something that was given back already, or from before a reset.
    Again {
        what: u8,
        pick: u8,
    },
    /// Something of another tree.
    Foreign {
        what: u8,
    },
    /// A node that is dead or never was.
    Unknown {
        what: u8,
        pick: u8,
    },
    Evict {
        pages: u8,
        room: Option<u8>,
    },
    /// `flaw`: 1 one twice, 2 a node that is not held, 3 a dead one, 4 a part cut from a held one.
    Drop {
        picks: Vec<u8>,
        flaw: u8,
    },
    EvictHost {
        pages: u8,
    },
    EvictableHost {
        limit: u8,
    },
    Backup {
        source: Source,
        picks: Vec<u8>,
        plan: bool,
        off: i8,
    },
    FinishBackup {
        ack: u8,
    },
    CancelBackup {
        ack: u8,
    },
    PlanLoad {
        node: u8,
        evicted: bool,
    },
    BeginLoad {
        plan: u8,
        off: i8,
    },
    CancelPlan {
        plan: u8,
    },
    FinishLoad {
        ack: u8,
    },
    CancelLoad {
        ack: u8,
    },
    /// `toward`: begin with `keep` pages of the key of a node below. `names`: 1 says the namespace.
    /// `flaw`: 1 too few hashes, 2 namespace, 3 first token, 4 wrong hashes for what the tree has already.
    InsertHost {
        anchor: u8,
        toward: Option<u8>,
        keep: u8,
        key: Key,
        names: u8,
        hashes: bool,
        flaw: u8,
        off: i8,
    },
    Pin {
        node: u8,
        until: Option<u8>,
    },
    Unpin {
        pin: u8,
    },
    Expire {
        now: u8,
    },
    Hashes {
        node: u8,
    },
    TakeEvents,
    Reset,
}

/// How often each kind of call comes. The order is that of `random_call`.
const WEIGHTS: [usize; 31] = [
    100, // match
    30,  // peek
    15,  // match many
    220, // insert
    30,  // lock
    35,  // unlock
    15,  // host lock
    18,  // host unlock
    12,  // again
    4,   // foreign
    8,   // unknown
    90,  // evict
    25,  // drop
    35,  // evict host
    90,  // backup
    70,  // finish backup
    20,  // cancel backup
    45,  // plan load
    45,  // begin load
    6,   // cancel plan
    40,  // finish load
    12,  // cancel load
    70,  // insert host
    20,  // pin
    12,  // unpin
    5,   // expire
    8,   // hashes
    12,  // take events
    2,   // reset
    25,  // match node
    30,  // evictable host pages
];

impl Config {
    pub fn random(random: &mut Random, policy: &'static str) -> Self {
        let mut options = Vec::new();
        let mut option = |random: &mut Random, name: &'static str, values: &[i64]| {
            if !random.once_in(3) {
                options.push((name, random.pick(values)));
            }
        };
        match policy {
            "slru" => option(random, "protected_threshold", &[1, 2, 3, 4]),
            "tlru" => {
                option(random, "next_prompt_estimate", &[0, 1, 2, 8, 64]);
                option(random, "threshold", &[0, 1, 2, 3, 5, 16, 100]);
            }
            _ => {}
        }
        let write = random.pick(&[
            None,
            Some(WritePolicy::WriteThrough),
            Some(WritePolicy::WriteThrough),
            Some(WritePolicy::WriteThroughSelective),
            Some(WritePolicy::WriteThroughSelective),
            Some(WritePolicy::WriteBack),
            Some(WritePolicy::WriteBack),
        ]);
        let page_size = random.pick(&[1, 1, 1, 2, 2, 16, 64]);
        Self {
            page_size,
            bigram: random.once_in(3),
            policy,
            options,
            write,
            threshold: random.pick(&[None, None, Some(1), Some(2), Some(4)]),
            events: !random.once_in(3),
            event_capacity: random.pick(&[65_536, 65_536, 65_536, 1, 4, 12]),
            pin_capacity: random.pick(&[None, None, Some(6 * page_size as u64)]),
            drain: random.once_in(2),
            every: random.pick(&[1, 4, 4, 8]),
            host_order: random.pick(&[HostOrder::CopiesFirst, HostOrder::LeavesFirst]),
        }
    }

    pub fn tree(&self) -> TreeConfig {
        let options = self.options.iter();
        TreeConfig {
            page_size: self.page_size,
            eviction_policy: self.policy.to_string(),
            policy_options: options.map(|&(name, value)| (name.to_string(), value)).collect(),
            write_policy: self.write,
            write_through_threshold: self.threshold,
            bigram: self.bigram,
            events: self.events,
            event_capacity: self.event_capacity,
            pin_capacity: self.pin_capacity,
            host_order: self.host_order,
        }
    }
}

/// What a script draws its calls from.
struct Drawing {
    random: Random,
    /// Keys are prefixes of these, changed at one place at most, so that they collide a lot.
    bases: Vec<Vec<u8>>,
    namespaces: Vec<u8>,
    weights: Vec<usize>,
}

pub fn generate(seed: u64, calls: usize, config: &Config) -> Vec<Call> {
    let mut random = Random::new(seed ^ 0x5EED);
    let bases = 2 + random.below(4);
    let bases = (0..bases)
        .map(|_| {
            let pages = 1 + random.below(8);
            (0..pages).map(|_| content(&mut random)).collect()
        })
        .collect();
    let namespaces = 1 + random.below(3);
    let namespaces = (0..namespaces).map(|_| random.small(6)).collect();
    // Every script leaves out some kinds of calls and makes others more often, so that rare states
    // get a chance to build up.
    let mut weights: Vec<usize> = WEIGHTS.to_vec();
    for weight in &mut weights {
        *weight *= random.pick(&[0, 1, 2, 2, 2, 2, 5]);
    }
    weights[3] = weights[3].max(WEIGHTS[3]);
    if config.write.is_none() {
        weights[14] /= 8;
        weights[22] /= 8;
        weights[23] /= 8;
    }
    let mut source = Drawing { random, bases, namespaces, weights };
    (0..calls).map(|_| source.call()).collect()
}

fn content(random: &mut Random) -> u8 {
    random.pick(&[0, 0, 0, 1, 1, 2, 3, 4])
}

impl Drawing {
    fn key(&mut self) -> Key {
        let random = &mut self.random;
        let mut pages = random.pick(&self.bases);
        if random.once_in(2) {
            pages.truncate(random.below(pages.len() + 1));
        }
        if random.once_in(3) && !pages.is_empty() {
            let at = random.below(pages.len());
            pages[at] = content(random);
        }
        if random.once_in(6) {
            pages.push(content(random));
        }
        Key {
            ns: random.pick(&self.namespaces),
            pages,
            tail: if random.once_in(2) { random.byte() } else { 0 },
            form: random.small(3),
            bad: random.once_in(60).then(|| random.byte()),
        }
    }

    fn off(&mut self) -> i8 {
        if self.random.once_in(40) { self.random.pick(&[-1, 1]) } else { 0 }
    }

    fn flaw(&mut self, kinds: usize) -> u8 {
        if self.random.once_in(25) { 1 + self.random.small(kinds) } else { 0 }
    }

    fn picks(&mut self) -> Vec<u8> {
        let count = self.random.pick(&[0, 1, 1, 1, 2, 2, 3, 6]);
        (0..count).map(|_| self.random.byte()).collect()
    }

    fn maybe(&mut self, end: usize) -> Option<u8> {
        (!self.random.once_in(3)).then(|| self.random.small(end))
    }

    fn call(&mut self) -> Call {
        let total: usize = self.weights.iter().sum();
        let mut drawn = self.random.below(total);
        let mut kind = 0;
        while drawn >= self.weights[kind] {
            drawn -= self.weights[kind];
            kind += 1;
        }
        let evicted = !self.random.once_in(4);
        let pick = self.random.byte();
        match kind {
            0 => Call::Match { key: self.key(), evicted },
            1 => Call::Peek { key: self.key(), evicted },
            2 => {
                let count = self.random.below(4);
                let keys = (0..count).map(|_| self.key()).collect();
                Call::MatchMany { keys }
            }
            3 => self.insert(),
            4 => Call::Lock { node: pick },
            5 => Call::Unlock { lock: pick },
            6 => Call::HostLock { node: pick },
            7 => Call::HostUnlock { lock: pick },
            8 => Call::Again { what: self.random.small(9), pick },
            9 => Call::Foreign { what: self.random.small(8) },
            10 => Call::Unknown { what: self.random.small(11), pick },
            11 => Call::Evict { pages: self.random.small(9), room: self.maybe(7) },
            12 => Call::Drop { picks: self.picks(), flaw: self.flaw(4) },
            13 => Call::EvictHost { pages: self.random.small(6) },
            14 => Call::Backup {
                source: self.random.pick(&[Source::Wanted, Source::Wanted, Source::Held, Source::Any]),
                picks: self.picks(),
                plan: !self.random.once_in(8),
                off: self.off(),
            },
            15 => Call::FinishBackup { ack: pick },
            16 => Call::CancelBackup { ack: pick },
            17 => Call::PlanLoad { node: pick, evicted: !self.random.once_in(8) },
            18 => Call::BeginLoad { plan: pick, off: self.off() },
            19 => Call::CancelPlan { plan: pick },
            20 => Call::FinishLoad { ack: pick },
            21 => Call::CancelLoad { ack: pick },
            22 => self.insert_host(),
            23 => Call::Pin { node: pick, until: self.maybe(4) },
            24 => Call::Unpin { pin: pick },
            25 => Call::Expire { now: self.random.small(4) },
            26 => Call::Hashes { node: pick },
            27 => Call::TakeEvents,
            28 => Call::Reset,
            29 => Call::MatchNode { node: pick, less: self.random.small(3) },
            // Half of the time as many as there can be.
            _ => Call::EvictableHost { limit: if pick < 128 { u8::MAX } else { self.random.small(12) } },
        }
    }

    fn insert(&mut self) -> Call {
        let key = self.key();
        let flaw = self.flaw(2);
        let off = self.off();
        let random = &mut self.random;
        Call::Insert {
            key,
            prev: if random.once_in(3) { 0 } else { random.byte() },
            lent: !random.once_in(8),
            own: random.pick(&[0, 0, 1, 2, 5, 255]),
            inserted: if random.once_in(2) { 0 } else { random.small(24) },
            priority: random.pick(&[0, 0, 0, 1, 2, -1]),
            chunked: random.once_in(5),
            flaw,
            off,
        }
    }

    fn insert_host(&mut self) -> Call {
        let mut key = self.key();
        let toward = self.maybe(256);
        let flaw = self.flaw(4);
        let off = self.off();
        let random = &mut self.random;
        if toward.is_some() {
            key.pages.truncate(random.below(4));
        }
        Call::InsertHost {
            anchor: if random.once_in(3) { 0 } else { random.byte() },
            toward,
            keep: random.small(9),
            key,
            names: random.small(2),
            hashes: random.once_in(2),
            flaw,
            off,
        }
    }
}
