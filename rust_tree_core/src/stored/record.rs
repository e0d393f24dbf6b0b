//! The records of a prefix log: which pages a storage was given, and what they are pages of.
//!
//! A log is records one after the other, parents before children. Whoever appends may die in the middle, and a
//! medium may lose or change bytes: a record that is not whole is passed over, and the next one is found again.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 4 | magic, `UCPX` |
//! | 4 | 2 | version, 1 |
//! | 6 | 2 | tokens a page |
//! | 8 | 4 | bytes of the record |
//! | 12 | 4 | pages |
//! | 16 | 16 | fingerprint of the pages' keys, ASCII |
//! | 32 | 2 | number of their first head group |
//! | 34 | 1 | 1: there is a page before; 2: there is an `extra_key`; 4: there is a `cache_salt` |
//! | 35 | 1 | zero |
//! | 36 | 4 | bytes of `extra_key` |
//! | 40 | 4 | bytes of `cache_salt` |
//! | 44 | 4 | zero |
//! | 48 | 32 | digest of the page before, or zeros |
//! | 80 | 32 | digest of the last page |
//! | 112 | | `extra_key`, `cache_salt`, zeros up to a multiple of 4 |
//! | | | tokens |
//!
//! Numbers are little-endian. The digest of the last page is the checksum: it follows from the page before (or
//! the namespace) and all tokens, and has to be computed anyway to know the pages. Only the first record of a
//! prefix has the namespace.

use crate::error::{Result, bad_argument};
use crate::hash::{Digest, chain, namespace_seed};
use crate::namespace::Namespace;
use crate::tokens::{Shape, Tokens, check_range, with_words};

const MAGIC: [u8; 4] = *b"UCPX";
const VERSION: u16 = 1;
const HEADER: usize = 112;
/// No longer record is written, and what claims to be longer is none.
pub const MOST_RECORD_BYTES: usize = 1 << 26;
const PARENT: u8 = 1;
const EXTRA_KEY: u8 = 2;
const CACHE_SALT: u8 = 4;

/// Whose pages: the fingerprint in their keys, and the number of the first head group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Space {
    /// 16 ASCII characters.
    pub fingerprint: [u8; 16],
    /// Of the rank that wrote.
    pub first_group: u16,
}

/// The pages of one record.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Whose they are.
    pub space: Space,
    /// Tokens a page.
    pub page_size: usize,
    /// Digest of the page before them; `None` at the beginning of a prefix.
    pub parent: Option<Digest>,
    /// Of the prefix; needed at its beginning, not kept elsewhere.
    pub namespace: Namespace<'a>,
    /// Whole pages.
    pub tokens: Tokens<'a>,
}

impl Record<'_> {
    /// The record as bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let shape = Shape::new(self.page_size, false)?;
        let pages = shape.pages(self.tokens.len());
        if pages == 0 || pages * self.page_size != self.tokens.len() {
            return Err(bad_argument!(
                "tokens has {} entries, whole pages of {} are needed",
                self.tokens.len(),
                self.page_size
            ));
        }
        let namespace = if self.parent.is_some() { Namespace::default() } else { self.namespace };
        let texts =
            [namespace.extra_key, namespace.cache_salt].map(|text| text.unwrap_or_default().as_bytes());
        let tokens_at = (HEADER + texts[0].len() + texts[1].len()).next_multiple_of(4);
        let length = tokens_at + 4 * self.tokens.len();
        if length > MOST_RECORD_BYTES {
            return Err(bad_argument!("a record has {length} bytes, allowed are {MOST_RECORD_BYTES}"));
        }
        let mut flags = 0;
        for (flag, there) in [
            (PARENT, self.parent.is_some()),
            (EXTRA_KEY, namespace.extra_key.is_some()),
            (CACHE_SALT, namespace.cache_salt.is_some()),
        ] {
            flags |= if there { flag } else { 0 };
        }
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.page_size as u16).to_le_bytes());
        bytes.extend((length as u32).to_le_bytes());
        bytes.extend((pages as u32).to_le_bytes());
        bytes.extend(self.space.fingerprint);
        bytes.extend(self.space.first_group.to_le_bytes());
        bytes.extend([flags, 0]);
        bytes.extend((texts[0].len() as u32).to_le_bytes());
        bytes.extend((texts[1].len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.parent.unwrap_or_default());
        let start = self.parent.or_else(|| namespace_seed(namespace));
        with_words!(self.tokens, words => {
            check_range(words, 0)?;
            let digests = chain(words, shape, start.as_ref());
            bytes.extend(digests.last().expect("at least a page"));
            bytes.extend(texts[0]);
            bytes.extend(texts[1]);
            bytes.resize(tokens_at, 0);
            for word in words {
                bytes.extend(crate::tokens::Word::low(*word).to_le_bytes());
            }
        });
        Ok(bytes)
    }
}

/// A header that makes sense.
struct Header {
    space: Space,
    page_size: usize,
    length: usize,
    pages: usize,
    parent: Option<Digest>,
    extra_key: Option<usize>,
    cache_salt: Option<usize>,
    last: Digest,
    tokens_at: usize,
}

impl Header {
    fn read(bytes: &[u8]) -> Option<Self> {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes")) as usize;
        let digest = |at: usize| -> Digest { bytes[at..at + 32].try_into().expect("32 bytes") };
        if bytes.len() < HEADER || bytes[..4] != MAGIC || half(4) != VERSION {
            return None;
        }
        let (page_size, length, pages, flags) = (usize::from(half(6)), word(8), word(12), bytes[34]);
        let text = |flag: u8, at: usize| (flags & flag != 0).then(|| word(at));
        let (extra_key, cache_salt) = (text(EXTRA_KEY, 36), text(CACHE_SALT, 40));
        let texts = extra_key.unwrap_or(0).checked_add(cache_salt.unwrap_or(0))?;
        let tokens_at = texts.checked_add(HEADER)?.checked_next_multiple_of(4)?;
        let tokens = page_size.checked_mul(pages)?.checked_mul(4)?;
        let fits = length == tokens_at.checked_add(tokens)? && length <= MOST_RECORD_BYTES;
        let parent = (flags & PARENT != 0).then(|| digest(48));
        let ascii = bytes[16..32].is_ascii();
        (fits && ascii && pages > 0 && (1..=Shape::MAX_PAGE).contains(&page_size)).then_some(Self {
            space: Space {
                fingerprint: digest(16)[..16].try_into().expect("16 bytes"),
                first_group: half(32),
            },
            page_size,
            length,
            pages,
            parent,
            extra_key,
            cache_salt,
            last: digest(80),
            tokens_at,
        })
    }
}

/// One record of a [`LogPart`].
#[derive(Clone, Debug)]
pub(crate) struct PartRecord {
    pub parent: Option<Digest>,
    pub extra_key: Option<Box<str>>,
    pub cache_salt: Option<Box<str>>,
    /// Where its tokens begin, in bytes of the part.
    pub tokens_at: usize,
    /// Its pages, among the digests of the part.
    pub first: usize,
    pub pages: usize,
}

/// What a piece of a log says of the pages of one key space.
#[derive(Clone, Debug, Default)]
pub struct LogPart {
    pub(crate) records: Vec<PartRecord>,
    /// Digests of the pages of all its records.
    pub digests: Vec<Digest>,
    /// Bytes from the front that were taken: the rest belongs before the next piece.
    pub consumed: usize,
    /// Times that bytes were passed over since they are no record.
    pub damaged: usize,
    /// Records of other key spaces, or pages of another size: passed over.
    pub foreign: usize,
    /// Key spaces of all records, and their tokens a page.
    pub spaces: Vec<(Space, u16)>,
}

impl LogPart {
    /// Reads records from the front of `bytes`.
    ///
    /// Only those with this fingerprint are kept (without one, none), and of this first group (without one, any).
    /// `last` says that nothing follows: a record that is cut off is damaged then, not waited for.
    pub fn read(
        bytes: &[u8],
        fingerprint: Option<[u8; 16]>,
        first_group: Option<u16>,
        page_size: usize,
        last: bool,
    ) -> Self {
        let wanted = |header: &Header| {
            fingerprint == Some(header.space.fingerprint)
                && first_group.is_none_or(|group| group == header.space.first_group)
                && page_size == header.page_size
        };
        let mut part = Self::default();
        let mut tokens: Vec<u32> = Vec::new();
        let mut at = 0;
        let mut sound = true;
        while at < bytes.len() {
            let rest = &bytes[at..];
            if !last && rest.len() < HEADER && MAGIC.starts_with(&rest[..rest.len().min(4)]) {
                break;
            }
            let header = Header::read(rest);
            if !last && header.as_ref().is_some_and(|header| header.length > rest.len()) {
                break;
            }
            let taken = header
                .filter(|header| header.length <= rest.len())
                .and_then(|header| part.take(rest, &header, at, wanted(&header), &mut tokens));
            if let Some(length) = taken {
                sound = true;
                at += length;
            } else {
                part.damaged += usize::from(sound);
                sound = false;
                at += 1 + next_magic(&rest[1..]);
            }
        }
        part.consumed = at.min(bytes.len());
        part.spaces.sort_unstable();
        part.spaces.dedup();
        part
    }

    /// Takes the record that `rest` begins with; its length, or `None` if it is not whole.
    fn take(
        &mut self,
        rest: &[u8],
        header: &Header,
        at: usize,
        wanted: bool,
        tokens: &mut Vec<u32>,
    ) -> Option<usize> {
        let mut end = HEADER;
        let mut text = |length: Option<usize>| -> Option<Option<Box<str>>> {
            let Some(length) = length else { return Some(None) };
            let start = end;
            end += length;
            std::str::from_utf8(&rest[start..end]).ok().map(|text| Some(text.into()))
        };
        let (extra_key, cache_salt) = (text(header.extra_key)?, text(header.cache_salt)?);
        tokens.clear();
        let words = rest[header.tokens_at..header.length].as_chunks::<4>().0;
        tokens.extend(words.iter().map(|word| u32::from_le_bytes(*word)));
        let namespace = Namespace { extra_key: extra_key.as_deref(), cache_salt: cache_salt.as_deref() };
        let start = header.parent.or_else(|| namespace_seed(namespace));
        let shape = Shape { page: header.page_size, extra: 0 };
        let digests = chain(tokens, shape, start.as_ref());
        if digests.last() != Some(&header.last) {
            return None;
        }
        // Only now: what a torn record says of itself may be wrong, and lead past the next one.
        let kind = (header.space, header.page_size as u16);
        if self.spaces.last() != Some(&kind) {
            self.spaces.push(kind);
        }
        if !wanted {
            self.foreign += 1;
            return Some(header.length);
        }
        self.records.push(PartRecord {
            parent: header.parent,
            extra_key,
            cache_salt,
            tokens_at: at + header.tokens_at,
            first: self.digests.len(),
            pages: header.pages,
        });
        self.digests.extend(digests);
        Some(header.length)
    }

    /// How many records it has of its key space.
    pub fn records(&self) -> usize {
        self.records.len()
    }
}

/// Bytes before the next place where a record may begin; all if there is none.
fn next_magic(bytes: &[u8]) -> usize {
    let whole = bytes.windows(4).position(|window| window == MAGIC);
    // The first bytes of a magic at the end may be one: more may follow.
    let cut =
        || (1..4).rev().find(|&count| bytes.ends_with(&MAGIC[..count])).map(|count| bytes.len() - count);
    whole.or_else(cut).unwrap_or(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn space(digit: u8) -> Space {
        Space { fingerprint: [digit; 16], first_group: 0 }
    }

    fn record(tokens: &[u32], parent: Option<Digest>) -> Vec<u8> {
        let namespace = Namespace { extra_key: Some("é"), cache_salt: None };
        let record =
            Record { space: space(b'a'), page_size: 2, parent, namespace, tokens: Tokens::U32(tokens) };
        record.to_bytes().unwrap()
    }

    #[test]
    fn what_is_written_is_read() {
        let first = record(&[1, 2, 3, 4], None);
        let namespace = Namespace { extra_key: Some("é"), cache_salt: None };
        let digests =
            crate::page_hashes(Tokens::U32(&[1, 2, 3, 4, 5, 6]), 2, None, namespace, false).unwrap();
        let bytes = [first.clone(), record(&[5, 6], Some(digests[1]))].concat();
        let part = LogPart::read(&bytes, Some([b'a'; 16]), None, 2, false);
        assert_eq!((part.records(), part.consumed, part.damaged), (2, bytes.len(), 0));
        assert_eq!(part.digests, digests);
        assert_eq!(part.records[0].extra_key.as_deref(), Some("é"));
        let tokens_at = part.records[1].tokens_at;
        assert_eq!(bytes[tokens_at..], [5, 0, 0, 0, 6, 0, 0, 0]);
        // Of others nothing is taken, but that they are there.
        let part = LogPart::read(&bytes, Some([b'b'; 16]), None, 2, false);
        assert_eq!((part.records(), part.foreign, part.spaces), (0, 2, vec![(space(b'a'), 2)]));
    }

    #[test]
    fn every_cut_and_every_flipped_byte_is_survived() {
        let records: Vec<Vec<u8>> = (0..4).map(|i| record(&[i, i + 1, 7, 8], None)).collect();
        let bytes = records.concat();
        let read = |bytes: &[u8], last| LogPart::read(bytes, Some([b'a'; 16]), None, 2, last);
        for cut in 0..bytes.len() {
            let whole = cut / records[0].len();
            let part = read(&bytes[..cut], false);
            assert_eq!((part.records(), part.damaged), (whole, 0));
            assert_eq!(part.consumed, whole * records[0].len());
            let part = read(&bytes[..cut], true);
            assert_eq!((part.records(), part.consumed), (whole, cut));
            // Whoever comes next appends to the torn record.
            let part = read(&[&bytes[..cut], &records[3]].concat(), true);
            assert_eq!((part.records(), part.foreign), (whole + 1, 0), "cut at {cut}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x41;
            let part = read(&changed, true);
            assert!(part.records() >= 3, "byte {at}: {part:?}");
        }
    }

    #[test]
    fn pieces_of_any_size_give_the_same() {
        let bytes =
            [record(&[1, 2], None), b"UCP".to_vec(), record(&[3, 4], None), record(&[5, 6], None)].concat();
        let whole = LogPart::read(&bytes, Some([b'a'; 16]), None, 2, true);
        assert_eq!((whole.records(), whole.damaged), (3, 1));
        for size in 1..bytes.len() {
            let (mut kept, mut digests) = (Vec::new(), Vec::new());
            for piece in bytes.chunks(size) {
                kept.extend(piece);
                let part = LogPart::read(&kept, Some([b'a'; 16]), None, 2, false);
                kept.drain(..part.consumed);
                digests.extend(part.digests);
            }
            assert!(kept.is_empty());
            assert_eq!(digests, whole.digests, "pieces of {size}");
        }
    }
}
