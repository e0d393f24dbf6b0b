//! Token buffers as they come from callers, and the few loops over tokens that decide the tree's speed.
//!
//! A token is an id in `0 ..= u32::MAX`. Callers hold them as `u32`, `i32` or `i64`; the tree keeps `u32`.
//! No loop converts a whole key first: comparison and hashing read the caller's words as they are, and each
//! word is read once (a word that equals a stored token is in range, the rest is range-checked).

use crate::error::{Result, bad_argument};

/// A borrowed key: raw token ids in one of the widths that callers use.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// Every value is allowed.
    U32(&'a [u32]),
    /// Negative values are refused.
    I32(&'a [i32]),
    /// Values outside `0 ..= u32::MAX` are refused.
    I64(&'a [i64]),
}

impl Tokens<'_> {
    /// Number of raw tokens.
    pub fn len(&self) -> usize {
        match self {
            Self::U32(words) => words.len(),
            Self::I32(words) => words.len(),
            Self::I64(words) => words.len(),
        }
    }

    /// True if there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Runs a generic expression on the key as `&[u32]` or `&[i64]`; `i32` keys are checked and then read as `u32`.
macro_rules! with_words {
    ($tokens:expr, $words:ident => $body:expr) => {
        match $tokens {
            $crate::tokens::Tokens::U32($words) => $body,
            $crate::tokens::Tokens::I64($words) => $body,
            $crate::tokens::Tokens::I32(signed) => {
                let $words: &[u32] = $crate::tokens::non_negative(signed)?;
                $body
            }
        }
    };
}
pub(crate) use with_words;

/// The same bits as `u32`, or the error for the first negative token.
pub(crate) fn non_negative(signed: &[i32]) -> Result<&[u32]> {
    match signed.iter().position(|&token| token < 0) {
        None => Ok(bytemuck::cast_slice(signed)),
        Some(at) => Err(out_of_range(at, i64::from(signed[at]))),
    }
}

fn out_of_range(position: usize, value: i64) -> crate::Error {
    bad_argument!("tokens[{position}] is {value}, allowed is 0 to {}", u32::MAX)
}

/// Words that are compared in one go; a multiple of any vector width.
const BLOCK: usize = 64;

/// How far a long comparison asks ahead of itself, and from what length on: hardware looks ahead within a page of
/// memory only, which costs a tenth of the speed where key and tokens lie outside the second-level cache.
const PREFETCH_BYTES: usize = 4096;
const PREFETCH_FROM: usize = 4096;

/// Asks for the memory of a block that lies `ahead` bytes further on; past an end it asks for nothing of use.
#[inline(always)]
fn prefetch<T>(block: &[T; BLOCK], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(block)).step_by(64) {
        let address = block.as_ptr().cast::<i8>().wrapping_add(ahead + line);
        // SAFETY: a prefetch reads nothing that a program can see and never faults, whatever the address; SSE is
        // part of x86-64.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (block, ahead);
}

/// One token in a caller's buffer.
pub(crate) trait Word: Copy + Send + Sync + 'static {
    /// The token, meaningful only if the word is in range.
    fn low(self) -> u32;
    /// The word as it is, for messages.
    fn value(self) -> i64;
    /// True if the word equals the stored token (and so is in range).
    fn is(self, token: u32) -> bool;
    /// True if any word of a block differs from the stored tokens.
    fn block_differs(words: &[Self; BLOCK], tokens: &[u32; BLOCK]) -> bool;
    /// The token plus a key, modulo 2^32; written so that one vector multiplication takes the product of two.
    fn plus(self, key: u64) -> u64;
    /// Not zero if a word is out of range; `|` over many words keeps that.
    fn excess(self) -> u32;
}

impl Word for u32 {
    #[inline(always)]
    fn low(self) -> u32 {
        self
    }
    #[inline(always)]
    fn value(self) -> i64 {
        i64::from(self)
    }
    #[inline(always)]
    fn is(self, token: u32) -> bool {
        self == token
    }
    #[inline(always)]
    fn block_differs(words: &[Self; BLOCK], tokens: &[u32; BLOCK]) -> bool {
        let mut any = 0;
        for i in 0..BLOCK {
            any |= words[i] ^ tokens[i];
        }
        any != 0
    }
    #[inline(always)]
    fn plus(self, key: u64) -> u64 {
        u64::from(self).wrapping_add(key) & u64::from(u32::MAX)
    }
    #[inline(always)]
    fn excess(self) -> u32 {
        0
    }
}

impl Word for i64 {
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the low half is what is asked for
    fn low(self) -> u32 {
        self as u32
    }
    #[inline(always)]
    fn value(self) -> i64 {
        self
    }
    #[inline(always)]
    fn is(self, token: u32) -> bool {
        self == i64::from(token)
    }
    #[inline(always)]
    fn block_differs(words: &[Self; BLOCK], tokens: &[u32; BLOCK]) -> bool {
        let mut any = 0;
        for i in 0..BLOCK {
            any |= words[i] ^ i64::from(tokens[i]);
        }
        any != 0
    }
    #[inline(always)]
    fn plus(self, key: u64) -> u64 {
        self.cast_unsigned().wrapping_add(key) & u64::from(u32::MAX)
    }
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the high half is what is asked for
    fn excess(self) -> u32 {
        ((self as u64) >> 32) as u32
    }
}

/// Compiles a loop twice, for the baseline and for AVX2, and picks at run time.
///
/// The bodies are plain safe Rust; only the instruction set differs.
macro_rules! for_cpu {
    ($(#[$doc:meta])* fn $name:ident<W: Word>($($arg:ident: $ty:ty),*) -> $ret:ty $body:block) => {
        $(#[$doc])*
        #[inline]
        pub(crate) fn $name<W: Word>($($arg: $ty),*) -> $ret {
            #[inline(always)]
            fn body<W: Word>($($arg: $ty),*) -> $ret $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2<W: Word>($($arg: $ty),*) -> $ret {
                    body($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: `avx2` is a safe function that only asks for AVX2, which was just detected.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}

for_cpu! {
    /// Length of the longest common prefix of a key and stored tokens (the shorter of the two bounds it).
    fn common_prefix<W: Word>(words: &[W], tokens: &[u32]) -> usize {
        let length = words.len().min(tokens.len());
        let (words, tokens) = (&words[..length], &tokens[..length]);
        let (word_blocks, _) = words.as_chunks::<BLOCK>();
        let (token_blocks, _) = tokens.as_chunks::<BLOCK>();
        let mut at = 0;
        let far = length >= PREFETCH_FROM;
        if far {
            // What the loop below will not ask for in time.
            for (a, b) in word_blocks.iter().zip(token_blocks).take(PREFETCH_BYTES / size_of::<[W; BLOCK]>()) {
                prefetch(a, 0);
                prefetch(b, 0);
            }
        }
        for (a, b) in word_blocks.iter().zip(token_blocks) {
            if far {
                prefetch(a, PREFETCH_BYTES);
                prefetch(b, PREFETCH_BYTES * size_of::<u32>() / size_of::<W>());
            }
            if W::block_differs(a, b) {
                break;
            }
            at += BLOCK;
        }
        while at < length && words[at].is(tokens[at]) {
            at += 1;
        }
        at
    }
}

for_cpu! {
    /// True if every word is in range.
    fn all_in_range<W: Word>(words: &[W]) -> bool {
        let mut excess = 0;
        for word in words {
            excess |= word.excess();
        }
        excess == 0
    }
}

for_cpu! {
    /// The words as tokens in memory of their own, or `None` if one is out of range.
    fn copy_in_range<W: Word>(words: &[W]) -> Option<Box<[u32]>> {
        let mut excess = 0;
        let tokens = words
            .iter()
            .map(|word| {
                excess |= word.excess();
                word.low()
            })
            .collect();
        (excess == 0).then_some(tokens)
    }
}

for_cpu! {
    /// NH, the universal hash of UMAC (RFC 4418, section 5.2), over the words of one page.
    ///
    /// Two different pages of one width collide with probability 2^-32 over random keys (each below 2^32); needs one
    /// key a word and one more. The second half of the page is paired with the first, so that lanes need no shuffle.
    fn page_sum<W: Word>(words: &[W], keys: &[u64]) -> u64 {
        const LANES: usize = 8;
        let half = words.len().div_ceil(2);
        let (low_words, high_words) = words.split_at(half);
        let (low_keys, high_keys) = keys.split_at(half);
        let pairs = high_words.len();
        let mut sums = [0_u64; LANES];
        let blocks = low_words.as_chunks::<LANES>().0.iter().zip(low_keys.as_chunks::<LANES>().0);
        let others = high_words.as_chunks::<LANES>().0.iter().zip(high_keys.as_chunks::<LANES>().0);
        for ((a, a_keys), (b, b_keys)) in blocks.zip(others) {
            for i in 0..LANES {
                sums[i] = sums[i].wrapping_add(a[i].plus(a_keys[i]) * b[i].plus(b_keys[i]));
            }
        }
        let mut sum = sums.iter().fold(0_u64, |sum, lane| sum.wrapping_add(*lane));
        for i in pairs / LANES * LANES..pairs {
            sum = sum.wrapping_add(low_words[i].plus(low_keys[i]) * high_words[i].plus(high_keys[i]));
        }
        if pairs < half {
            sum = sum.wrapping_add(low_words[pairs].plus(low_keys[pairs]) * high_keys[pairs]);
        }
        sum
    }
}

/// Checks `words`, which begin at `offset` of the caller's key.
pub(crate) fn check_range<W: Word>(words: &[W], offset: usize) -> Result<()> {
    if all_in_range(words) {
        return Ok(());
    }
    let at = words.iter().position(|word| word.excess() != 0).unwrap_or(0);
    Err(out_of_range(offset + at, words[at].value()))
}

/// Copies `words`, which begin at `offset` of the caller's key.
pub(crate) fn copy_checked<W: Word>(words: &[W], offset: usize) -> Result<Box<[u32]>> {
    if let Some(tokens) = copy_in_range(words) {
        return Ok(tokens);
    }
    check_range(words, offset)?;
    Err(bad_argument!("tokens changed while they were read"))
}

/// How tokens make positions and pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Positions in a page.
    pub page: usize,
    /// Raw tokens of a run beyond its positions: 1 for bigram keys, whose position i is (t[i], t[i+1]).
    pub extra: usize,
}

impl Shape {
    /// Largest page size.
    pub const MAX_PAGE: usize = 256;

    pub fn new(page_size: usize, bigram: bool) -> Result<Self> {
        if (1..=Self::MAX_PAGE).contains(&page_size) {
            Ok(Self { page: page_size, extra: usize::from(bigram) })
        } else {
            Err(bad_argument!("page_size is {page_size}, allowed is 1 to {}", Self::MAX_PAGE))
        }
    }

    /// Whole pages in a key of `tokens` raw tokens.
    pub fn pages(self, tokens: usize) -> usize {
        tokens.saturating_sub(self.extra) / self.page
    }

    /// Raw tokens that make one page.
    pub fn width(self) -> usize {
        self.page + self.extra
    }

    /// The raw tokens of pages `from .. to` of a key.
    pub fn run<T>(self, key: &[T], from: usize, to: usize) -> &[T] {
        &key[from * self.page..to * self.page + self.extra]
    }

    /// Whole pages in which a key agrees with stored tokens, given the raw tokens in which it agrees.
    pub fn agreed(self, raw: usize) -> usize {
        raw.saturating_sub(self.extra) / self.page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_prefix_finds_every_position_in_every_width() {
        for length in [0, 1, 63, 64, 65, 200] {
            let tokens: Vec<u32> = (0..length).map(|i| i * 7 + 1).collect();
            let wide: Vec<i64> = tokens.iter().map(|&t| i64::from(t)).collect();
            assert_eq!(common_prefix(&tokens, &tokens), tokens.len());
            assert_eq!(common_prefix(&wide, &tokens), tokens.len());
            for at in 0..tokens.len() {
                let mut other = tokens.clone();
                other[at] ^= 0x8000_0000;
                assert_eq!(common_prefix(&other, &tokens), at);
                let mut other = wide.clone();
                other[at] |= 1 << 40; // the same low half: must still differ
                assert_eq!(common_prefix(&other, &tokens), at);
            }
        }
    }

    #[test]
    fn out_of_range_words_are_named_by_position() {
        for bad in [-1_i64, 1 << 32, i64::MIN] {
            let mut key = vec![5_i64; 300];
            key[217] = bad;
            let text = check_range(&key[100..], 100).unwrap_err().to_string();
            assert_eq!(text, format!("tokens[217] is {bad}, allowed is 0 to 4294967295"));
            assert_eq!(copy_checked(&key, 0).unwrap_err().to_string(), text);
        }
        assert_eq!(*copy_checked(&[0_i64, 4_294_967_295], 0).unwrap(), [0, u32::MAX]);
        assert!(non_negative(&[1, -2]).unwrap_err().to_string().starts_with("tokens[1] is -2,"));
    }

    #[test]
    fn page_sum_is_the_definition_and_sees_every_word() {
        let keys: Vec<u64> = (0..300_u32).map(|i| u64::from(i.wrapping_mul(0x9E37_79B9) | 1)).collect();
        for width in [1_usize, 2, 3, 16, 17, 64, 65, 256, 257] {
            let page: Vec<u32> = (0..width).map(|i| (i as u32).wrapping_mul(77_777)).collect();
            let wide: Vec<i64> = page.iter().map(|&t| i64::from(t)).collect();
            let half = width.div_ceil(2);
            let mut want = 0_u64;
            for i in 0..half {
                let a = page[i].wrapping_add(keys[i] as u32);
                let b = page.get(half + i).copied().unwrap_or(0).wrapping_add(keys[half + i] as u32);
                want = want.wrapping_add(u64::from(a) * u64::from(b));
            }
            assert_eq!(page_sum(&page, &keys), want);
            assert_eq!(page_sum(&wide, &keys), want);
            for at in 0..width {
                let mut other = page.clone();
                other[at] = other[at].wrapping_add(1);
                assert_ne!(page_sum(&other, &keys), want);
            }
        }
    }

    #[test]
    fn pages_round_down_and_count_positions() {
        let plain = Shape::new(4, false).unwrap();
        let bigram = Shape::new(4, true).unwrap();
        assert_eq!([0, 3, 4, 9].map(|n| plain.pages(n)), [0, 0, 1, 2]);
        assert_eq!([0, 1, 4, 5, 9].map(|n| bigram.pages(n)), [0, 0, 0, 1, 2]);
        let key: Vec<u32> = (0..9).collect();
        assert_eq!(bigram.run(&key, 1, 2), [4, 5, 6, 7, 8]);
        assert!(Shape::new(0, false).is_err() && Shape::new(257, false).is_err());
    }
}
