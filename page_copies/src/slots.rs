//! Looking up keys in an index of slots that several processes map (`storage/backends/slot_index.py` says how it is made).

use std::sync::atomic::{Ordering, fence};
use std::thread;

/// Words of a key.
pub const KEY_WORDS: usize = 19;
/// Words of a slot's record, and the one that its key begins with.
const RECORD_WORDS: usize = 64;
const KEY_AT: usize = 5;
/// And its checksum, the slot, and the bytes of the body; the header's are the lower half of the last.
const CHECK_AT: usize = 0;
const SLOT_AT: usize = 1;
const BODY_AT: usize = 2;
const HEADER_AT: usize = 3;
/// The header itself, up to the end of the record.
const HEAD_AT: usize = KEY_AT + KEY_WORDS;
const HEAD_BYTES: usize = (RECORD_WORDS - HEAD_AT) * size_of::<u64>();
/// Records that are worth a thread.
const RECORDS_A_THREAD: usize = 50_000;
const MOST_THREADS: usize = 8;

/// A slot's word: the bits of its state, and the state of one whose object can be read.
const STATE: u64 = 3;
const PUBLISHED: u64 = 2;
/// A bucket's lower half if its object has gone; the slot and one otherwise.
const GONE: u64 = 0xFFFF_FFFF;

/// Words of memory that other processes write meanwhile.
#[derive(Clone, Copy)]
pub struct Shared {
    start: *const u64,
    words: usize,
}

// SAFETY: an address and a number; whoever makes one promises that it can be read from any thread.
unsafe impl Send for Shared {}
// SAFETY: likewise.
unsafe impl Sync for Shared {}

impl Shared {
    /// # Safety
    /// So many words from `start`, which is aligned to them, must be memory that can be read for as long as this is used.
    pub unsafe fn new(start: *const u64, words: usize) -> Self {
        Self { start, words }
    }

    fn get(self, at: usize) -> Option<u64> {
        // SAFETY: within the memory, by the contract of `new`. Others may write it: it is read once, as it is.
        (at < self.words).then(|| unsafe { self.start.add(at).read_volatile() })
    }
}

/// Where an object lies that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// The slot.
    pub slot: usize,
    /// The slot's word.
    pub word: u64,
    /// Of the body.
    pub bytes: u64,
}

/// There is an object, but it has another header than one of so many bytes, or a longer body than there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misfit;

/// Index and table of a store.
#[derive(Clone, Copy)]
pub struct Slots {
    /// Hash table: half of a key's hash, and the slot and one; a power of two of them.
    pub buckets: Shared,
    /// One for each slot: state, and what tells its uses apart.
    pub words: Shared,
    /// Of 64 words each.
    pub records: Shared,
}

impl Slots {
    /// The slot that a key is in, and the slot's word when the keys were compared.
    ///
    /// No lock is held: a word that is another one later says that the slot was given to somebody else meanwhile.
    #[must_use]
    pub fn find(&self, key: &[u64; KEY_WORDS], hash: u64) -> Option<(usize, u64)> {
        let mask = self.buckets.words.checked_sub(1)?;
        let first = hash as usize & mask;
        for at in (first..=mask).chain(0..first) {
            let entry = self.buckets.get(at)?;
            if entry == 0 {
                return None;
            }
            let low = entry & GONE;
            if entry >> 32 == hash >> 32
                && low != 0
                && low != GONE
                && let Some(found) = self.holds(low as usize - 1, key)
            {
                return Some(found);
            }
        }
        None
    }

    /// The same, and what the slot's record says of the object, whose header is copied.
    ///
    /// The header is anything if there is no such object.
    pub fn locate(
        &self,
        key: &[u64; KEY_WORDS],
        hash: u64,
        header: &mut [u8],
        room: u64,
    ) -> Option<Result<Located, Misfit>> {
        let (slot, word) = self.find(key, hash)?;
        let first = slot * RECORD_WORDS;
        let (bytes, header_bytes) =
            (self.records.get(first + BODY_AT)?, self.records.get(first + HEADER_AT)? & 0xFFFF_FFFF);
        for (bytes, at) in header.chunks_mut(size_of::<u64>()).zip(first + HEAD_AT..first + RECORD_WORDS) {
            bytes.copy_from_slice(&self.records.get(at)?.to_ne_bytes()[..bytes.len()]);
        }
        fence(Ordering::Acquire);
        // Not torn by somebody who writes now: what it says may be believed.
        if self.words.get(slot) != Some(word) {
            return None;
        }
        let fits = header.len() <= HEAD_BYTES && header_bytes == header.len() as u64 && bytes <= room;
        Some(if fits { Ok(Located { slot, word, bytes }) } else { Err(Misfit) })
    }

    fn holds(&self, slot: usize, key: &[u64; KEY_WORDS]) -> Option<(usize, u64)> {
        let word = self.words.get(slot).filter(|word| word & STATE == PUBLISHED)?;
        fence(Ordering::Acquire);
        let record = slot * RECORD_WORDS + KEY_AT;
        let same = key.iter().zip(record..).all(|(&word, at)| self.records.get(at) == Some(word));
        fence(Ordering::Acquire);
        (same && self.words.get(slot) == Some(word)).then_some((slot, word))
    }
}

/// How checksums and hashes are made: a weight for each word of a record but the first, what the sum begins with, and what
/// the hash of a key, which has the first of these weights, is mixed with.
#[derive(Clone, Copy)]
pub struct Sums {
    /// Odd numbers that look random.
    pub weights: [u64; RECORD_WORDS - 1],
    /// Added to checksums.
    pub start: u64,
    /// The hash is multiplied by it.
    pub mix: u64,
}

impl Sums {
    /// For each set of words a sum that any single changed word changes.
    fn sum(&self, words: &[u64]) -> u64 {
        words
            .iter()
            .zip(&self.weights)
            .fold(0u64, |sum, (&word, &weight)| sum.wrapping_add((word ^ (word >> 32)).wrapping_mul(weight)))
    }

    /// What a record's first word has to be.
    fn check(&self, record: &[u64; RECORD_WORDS]) -> u64 {
        self.sum(&record[1..]).wrapping_add(self.start).max(1)
    }

    /// Of the words of a key.
    #[must_use]
    pub fn hash(&self, key: &[u64; KEY_WORDS]) -> u64 {
        let hash = self.sum(key);
        let hash = (hash ^ (hash >> 32)).wrapping_mul(self.mix);
        hash ^ (hash >> 32)
    }
}

/// An object that a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Where.
    pub slot: usize,
    /// Of its key.
    pub hash: u64,
    /// Of header and body.
    pub bytes: u64,
}

/// The objects whose records in a table are whole, in order; of bodies of at most so many bytes.
#[must_use]
pub fn read_table(records: Shared, sums: &Sums, slot_bytes: u64) -> Vec<Stored> {
    let slots = records.words / RECORD_WORDS;
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let threads = (slots / RECORDS_A_THREAD).clamp(1, threads.min(MOST_THREADS));
    let share = slots.div_ceil(threads);
    let read = |first: usize| -> Vec<Stored> {
        (first..slots.min(first + share))
            .filter_map(|slot| read_record(records, slot, sums, slot_bytes))
            .collect()
    };
    thread::scope(|scope| {
        let begin = |at: usize| thread::Builder::new().spawn_scoped(scope, move || read(at * share));
        let others: Vec<_> = (1..threads).map(|at| (at, begin(at))).collect();
        let mut found = read(0);
        for (at, other) in others {
            // Where no more threads can be had it is done here.
            found.extend(match other {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => read(at * share),
            });
        }
        found
    })
}

fn read_record(records: Shared, slot: usize, sums: &Sums, slot_bytes: u64) -> Option<Stored> {
    let first = slot * RECORD_WORDS;
    if records.get(first)? == 0 {
        return None;
    }
    let mut record = [0; RECORD_WORDS];
    for (word, at) in record.iter_mut().zip(first..) {
        *word = records.get(at)?;
    }
    let (body, header) = (record[BODY_AT], record[HEADER_AT] & 0xFFFF_FFFF);
    let whole =
        record[CHECK_AT] == sums.check(&record) && record[SLOT_AT] == slot as u64 && body <= slot_bytes;
    let (key, _) = record[KEY_AT..].as_chunks();
    whole.then(|| Stored { slot, hash: sums.hash(&key[0]), bytes: body + header })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums() -> Sums {
        Sums {
            weights: std::array::from_fn(|at| (at as u64 * 0x1234_5678_9ABC) | 1),
            start: 77,
            mix: 0x1_0000_0001,
        }
    }

    #[test]
    fn a_table_is_read_but_for_what_is_torn() {
        let slots = if cfg!(miri) { 20 } else { 2 * RECORDS_A_THREAD + 9 };
        let sums = sums();
        let mut table = vec![0; slots * RECORD_WORDS];
        let mut expected = Vec::new();
        for slot in (0..slots).filter(|slot| slot % 4 != 1) {
            let mut record: [u64; RECORD_WORDS] = std::array::from_fn(|at| (slot * 71 + at) as u64);
            record[SLOT_AT] = slot as u64;
            record[BODY_AT] = slot as u64 % 5;
            record[HEADER_AT] = (9 << 32) + 192;
            record[CHECK_AT] = sums.check(&record);
            match slot % 20 {
                2 => record[RECORD_WORDS - 1] ^= 1,
                3 => record[CHECK_AT] ^= 1 << 63,
                4 => record[KEY_AT] ^= 1 << 40,
                // Well, but of another slot, or longer than one.
                6 => {
                    record[SLOT_AT] += 1;
                    record[CHECK_AT] = sums.check(&record);
                }
                7 => {
                    record[BODY_AT] = 5;
                    record[CHECK_AT] = sums.check(&record);
                }
                _ => expected.push(Stored {
                    slot,
                    hash: sums.hash(record[KEY_AT..][..KEY_WORDS].first_chunk().unwrap()),
                    bytes: 192 + slot as u64 % 5,
                }),
            }
            table[slot * RECORD_WORDS..][..RECORD_WORDS].copy_from_slice(&record);
        }
        // SAFETY: the vector stays where it is.
        let records = unsafe { Shared::new(table.as_ptr(), table.len()) };
        assert!(read_table(records, &sums, 4) == expected);
        // SAFETY: nothing is read.
        assert_eq!(read_table(unsafe { Shared::new(table.as_ptr(), 0) }, &sums, 4), []);
    }

    /// An index in memory of our own, made by the rules of the one in Python.
    struct Made {
        buckets: Vec<u64>,
        words: Vec<u64>,
        records: Vec<u64>,
    }

    impl Made {
        fn new(slots: usize) -> Self {
            Self {
                buckets: vec![0; (2 * slots).next_power_of_two()],
                words: vec![0; slots],
                records: vec![0; slots * RECORD_WORDS],
            }
        }

        fn slots(&self) -> Slots {
            let shared = |words: &[u64]| {
                // SAFETY: the vectors live longer than what is made here, which no test keeps.
                unsafe { Shared::new(words.as_ptr(), words.len()) }
            };
            Slots {
                buckets: shared(&self.buckets),
                words: shared(&self.words),
                records: shared(&self.records),
            }
        }

        fn put(&mut self, slot: usize, key: &[u64; KEY_WORDS], hash: u64) {
            let mask = self.buckets.len() - 1;
            let mut at = hash as usize & mask;
            while self.buckets[at] != 0 {
                at = (at + 1) & mask;
            }
            self.buckets[at] = (hash >> 32 << 32) | (slot as u64 + 1);
            self.words[slot] = (7 << 14) | PUBLISHED;
            self.records[slot * RECORD_WORDS + KEY_AT..][..KEY_WORDS].copy_from_slice(key);
        }
    }

    fn key(number: u64) -> [u64; KEY_WORDS] {
        std::array::from_fn(|at| number * 31 + at as u64)
    }

    #[test]
    fn keys_are_found_where_they_are() {
        let mut made = Made::new(8);
        // All in one bucket, at the end of the table, and with one upper half.
        let hash = (5 << 32) | 15;
        for number in 0..8 {
            made.put(7 - number as usize, &key(number), hash);
        }
        for number in 0..8 {
            let found = made.slots().find(&key(number), hash);
            assert_eq!(found, Some((7 - number as usize, (7 << 14) | PUBLISHED)));
        }
        assert_eq!(made.slots().find(&key(8), hash), None);
        assert_eq!(made.slots().find(&key(1), hash + (1 << 32)), None);
        assert_eq!(made.slots().find(&key(1), 8), None);
    }

    #[test]
    fn what_a_record_says_is_believed_if_it_fits() {
        let mut made = Made::new(4);
        for number in 0..3 {
            made.put(number as usize, &key(number), number << 32);
            let record = &mut made.records[number as usize * RECORD_WORDS..][..RECORD_WORDS];
            record[BODY_AT] = 100 + number;
            record[HEADER_AT] = (77 << 32) + 13;
            record[HEAD_AT..].fill(u64::from_ne_bytes(*b"01234567"));
        }
        let locate = |made: &Made, number: u64, header: &mut [u8], room: u64| {
            made.slots().locate(&key(number), number << 32, header, room)
        };
        let mut header = [0; 13];
        let word = (7 << 14) | PUBLISHED;
        let found = locate(&made, 2, &mut header, 102);
        assert_eq!(found, Some(Ok(Located { slot: 2, word, bytes: 102 })));
        assert_eq!(&header, b"0123456701234");
        assert_eq!(locate(&made, 3, &mut header, 102), None);
        assert_eq!(locate(&made, 2, &mut header, 101), Some(Err(Misfit)));
        assert_eq!(locate(&made, 2, &mut header[1..], 102), Some(Err(Misfit)));
        // Longer than any, and said to be so.
        made.records[RECORD_WORDS + HEADER_AT] = HEAD_BYTES as u64 + 1;
        assert_eq!(locate(&made, 1, &mut [0; HEAD_BYTES + 1], 102), Some(Err(Misfit)));
        made.records[RECORD_WORDS + HEADER_AT] = HEAD_BYTES as u64;
        let mut whole = [0; HEAD_BYTES];
        assert_eq!(locate(&made, 1, &mut whole, 101), Some(Ok(Located { slot: 1, word, bytes: 101 })));
        assert_eq!(&whole[HEAD_BYTES - 8..], b"01234567");
    }

    #[test]
    fn what_can_not_be_read_is_passed_over() {
        let mut made = Made::new(4);
        let hash = 9 << 32;
        for number in 0..4 {
            made.put(number as usize, &key(number), hash);
        }
        made.words[0] = (7 << 14) | 1; // is being written
        made.buckets[1] |= GONE;
        made.buckets[2] = (9 << 32) + 100; // of no such slot
        for number in 0..3 {
            assert_eq!(made.slots().find(&key(number), hash), None);
        }
        assert_eq!(made.slots().find(&key(3), hash), Some((3, (7 << 14) | PUBLISHED)));
        made.records[3 * RECORD_WORDS + KEY_AT + KEY_WORDS - 1] ^= 1;
        assert_eq!(made.slots().find(&key(3), hash), None);
    }

    #[test]
    fn an_index_that_is_full_or_empty_ends() {
        let mut made = Made::new(2);
        assert_eq!(made.slots().find(&key(1), 0), None);
        made.buckets.fill((3 << 32) | GONE);
        assert_eq!(made.slots().find(&key(1), 3 << 32), None);
        made.buckets.clear();
        assert_eq!(made.slots().find(&key(1), 0), None);
    }
}
