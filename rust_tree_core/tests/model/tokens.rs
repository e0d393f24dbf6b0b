//! Keys written with small numbers, and the token buffers that they stand for.

use rust_tree_core::{Namespace, Tokens};

use super::tree::Position;

pub const NAMESPACES: [Namespace<'static>; 6] = [
    names(None, None),
    names(Some("a"), None),
    names(None, Some("a")),
    names(Some(""), None),
    names(Some("a"), Some("b")),
    names(Some("é"), Some("")),
];

const fn names(extra_key: Option<&'static str>, cache_salt: Option<&'static str>) -> Namespace<'static> {
    Namespace { extra_key, cache_salt }
}

/// A token sequence: whole pages of a few distinct contents, then a ragged tail.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Key {
    pub ns: u8,
    pub pages: Vec<u8>,
    pub tail: u8,
    /// Which variant of `Tokens` carries it.
    pub form: u8,
    /// Put a token that is none at this place.
    pub bad: Option<u8>,
}

pub enum Buffer {
    U32(Vec<u32>),
    I32(Vec<i32>),
    I64(Vec<i64>),
}

impl Buffer {
    pub fn tokens(&self) -> Tokens<'_> {
        match self {
            Buffer::U32(tokens) => Tokens::U32(tokens),
            Buffer::I32(tokens) => Tokens::I32(tokens),
            Buffer::I64(tokens) => Tokens::I64(tokens),
        }
    }
}

impl Key {
    pub fn namespace(&self) -> Namespace<'static> {
        NAMESPACES[usize::from(self.ns) % NAMESPACES.len()]
    }

    pub fn raw(&self, page_size: usize) -> Vec<u32> {
        let mut raw = Vec::new();
        for &content in &self.pages {
            raw.extend((0..page_size).map(|index| page_token(content, index, page_size)));
        }
        let tail = usize::from(self.tail) % (page_size + 1);
        raw.extend((0..tail).map(|_| u32::from(self.tail % 2)));
        raw
    }

    pub fn buffer(&self, page_size: usize) -> Buffer {
        self.wrap(&self.raw(page_size))
    }

    /// Puts raw tokens into this key's form, with its bad token.
    pub fn wrap(&self, raw: &[u32]) -> Buffer {
        let narrow: Option<Vec<i32>> = raw.iter().map(|&token| i32::try_from(token).ok()).collect();
        let bad = self.bad.filter(|_| !raw.is_empty());
        let bad = bad.map(|at| usize::from(at) % raw.len());
        match (self.form % 3, narrow) {
            (1, Some(mut tokens)) => {
                if let Some(at) = bad {
                    tokens[at] = -1;
                }
                Buffer::I32(tokens)
            }
            (0, _) if bad.is_none() => Buffer::U32(raw.to_vec()),
            _ => {
                let mut tokens: Vec<i64> = raw.iter().map(|&token| i64::from(token)).collect();
                if let Some(at) = bad {
                    tokens[at] = [-1, 1 << 32, i64::MAX, i64::MIN][at % 4];
                }
                Buffer::I64(tokens)
            }
        }
    }
}

/// Contents that differ at one place only, so that a comparison that looks at less than the whole
/// page is found out.
fn page_token(content: u8, index: usize, page_size: usize) -> u32 {
    if page_size == 1 {
        return if content == 4 { u32::MAX } else { u32::from(content) };
    }
    match content {
        0 => 0,
        1 => u32::from(index == page_size - 1),
        2 => u32::from(index == 0),
        3 => u32::from(index == page_size / 2) * 2,
        _ => u32::MAX * u32::from(index == 0),
    }
}

/// The positions of a token sequence, for keys that are known to be good.
pub fn positions(raw: &[u32], bigram: bool) -> Vec<Position> {
    if bigram {
        let pairs = raw.windows(2);
        pairs.map(|pair| (pair[0], Some(pair[1]))).collect()
    } else {
        raw.iter().map(|&token| (token, None)).collect()
    }
}

/// The tokens that make up these positions.
pub fn raw_tokens(positions: &[Position]) -> Vec<u32> {
    let mut raw: Vec<u32> = positions.iter().map(|position| position.0).collect();
    raw.extend(positions.last().and_then(|position| position.1));
    raw
}
