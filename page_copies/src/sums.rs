//! Checksums of a header and the body that follows it, XXH3 of 64 bits: of memory, or of what a copy writes.

use std::hash::Hasher;

use twox_hash::XxHash3_64;

use crate::seen::copy_seen;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use crate::seen::{STREAMING_FROM, end};
#[cfg(all(target_arch = "x86_64", not(miri)))]
use crate::xxh3;

/// A hasher that lies within one page of memory. Its state is written for every 64 bytes, and where that goes across a
/// boundary of pages it takes up to three times as long: on a stack that is one place in a hundred.
#[repr(align(512))]
struct WithinPage(XxHash3_64);

const _: () = assert!(size_of::<WithinPage>() == 512);

impl WithinPage {
    fn new(header: &[u8]) -> Self {
        let mut hasher = Self(XxHash3_64::new());
        hasher.0.write(header);
        hasher
    }
}

/// The checksum of the bytes of a header that count, and of a body.
///
/// Where the processor has AVX2 it is our own code, which asks for memory ahead: of bytes in no cache that takes four fifths
/// of the library's time, of bytes in the cache as long (45 GB/s).
pub fn checksum(header: &[u8], body: &[u8]) -> u64 {
    Sum::new(header, body.len()).value(body)
}

/// The [`checksum`] of a header, and of a body of so many bytes, of which more and more is there.
pub(crate) struct Sum<'a> {
    header: &'a [u8],
    bytes: usize,
    state: State,
}

#[allow(clippy::large_enum_variant)] // there is one on the stack, for as long as a body takes
enum State {
    Begun,
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    Ours(xxh3::Running),
    /// And how many bytes of the body it has.
    Library(WithinPage, usize),
}

impl<'a> Sum<'a> {
    pub(crate) fn new(header: &'a [u8], bytes: usize) -> Self {
        Self { header, bytes, state: State::Begun }
    }

    /// Adds what it can of the body as it is there now, from its beginning on.
    pub(crate) fn add(&mut self, body: &[u8]) {
        if matches!(self.state, State::Begun) {
            self.begin(body);
        }
        match &mut self.state {
            State::Begun => {}
            // SAFETY: AVX2 is there: the body is one of which `can` has said so.
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            State::Ours(sums) => unsafe { sums.add(body) },
            State::Library(hasher, done) => {
                hasher.0.write(&body[*done..]);
                *done = body.len();
            }
        }
    }

    /// Chooses who makes the checksum; our own code can not begin before more than a block is there.
    fn begin(&mut self, body: &[u8]) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if xxh3::Running::can(self.bytes, self.header) {
            if body.len() > xxh3::BLOCK {
                // SAFETY: AVX2 is there, as `can` has said.
                self.state = State::Ours(unsafe { xxh3::Running::new(self.header, body) });
            }
            return;
        }
        self.state = State::Library(WithinPage::new(self.header), 0);
    }

    /// The checksum; all of the body is there.
    pub(crate) fn value(mut self, body: &[u8]) -> u64 {
        debug_assert_eq!(body.len(), self.bytes);
        self.add(body);
        match self.state {
            State::Begun => unreachable!("a body that our own code can sum is longer than a block"),
            // SAFETY: as in `add`.
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            State::Ours(sums) => unsafe { sums.value(self.header.len(), body) },
            State::Library(hasher, _) => hasher.0.finish(),
        }
    }
}

/// Copies a body as [`copy`](crate::copy) does, and returns the [`checksum`] of the header and of exactly the bytes that
/// the target then has, also if the source is written meanwhile.
///
/// # Safety
/// See [`copy`](crate::copy).
pub unsafe fn copy_summed(target: *mut u8, source: *const u8, bytes: usize, header: &[u8]) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if bytes >= STREAMING_FROM && xxh3::can_sum(target, bytes, header) {
        // SAFETY: this function's contract, and that it can.
        let sum = unsafe { xxh3::copy_summed(target, source, bytes, header) };
        end();
        return sum;
    }
    let mut hasher = WithinPage::new(header);
    // SAFETY: this function's contract.
    unsafe { copy_seen(target, source, bytes, |block| hasher.0.write(block)) };
    hasher.0.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seen::STREAMING_FROM;

    fn check(bytes: usize, header_bytes: usize, target_at: usize, source_at: usize) {
        let source: Vec<u8> = (0..bytes + source_at).map(|i| (i * 7 + i / 251) as u8).collect();
        let header: Vec<u8> = (0..header_bytes).map(|i| (i * 11) as u8).collect();
        let mut target = vec![0xEE; bytes + 256];
        // Where lines begin is up to the allocator otherwise.
        let first = target.as_ptr().addr().wrapping_neg() % 64 + target_at;
        let from = &source[source_at..];
        let to = target.as_mut_ptr().wrapping_add(first);
        // SAFETY: the source has `bytes` bytes from `source_at` on, the target 256 more, and `first` is below 128.
        let sum = unsafe { copy_summed(to, from.as_ptr(), bytes, &header) };
        let case = format!("{bytes} bytes after {header_bytes}, from {source_at} to {target_at}");
        assert_eq!(sum, XxHash3_64::oneshot(&[&header[..], from].concat()), "{case}");
        assert_eq!(sum, checksum(&header, from), "{case}");
        assert!(&target[first..first + bytes] == from, "{case}");
        assert!(target[..first].iter().chain(&target[first + bytes..]).all(|&byte| byte == 0xEE), "{case}");
    }

    #[test]
    fn the_checksum_of_a_copy_is_that_of_the_header_and_the_body() {
        let streamed: &[usize] = if cfg!(miri) { &[33_000] } else { &[STREAMING_FROM, 65_536, 100_001] };
        for &bytes in [0, 1, 100, 1000, 2500].iter().chain(streamed) {
            for header_bytes in [0, 8, 56, 120, 184, 192, 1016, 1080] {
                check(bytes, header_bytes, 0, 0);
                check(bytes, header_bytes, 0, 3);
                check(bytes, header_bytes, 1, 0);
            }
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn bodies_may_end_anywhere_in_a_block() {
        for bytes in STREAMING_FROM..STREAMING_FROM + 2200 {
            check(bytes, 184, 0, 5);
        }
        for bytes in (STREAMING_FROM..STREAMING_FROM + 2200).step_by(7) {
            check(bytes, 56, 0, 0);
            check(bytes, 1016, 0, 0);
        }
    }

    #[test]
    fn of_a_body_that_comes_in_pieces() {
        let most = if cfg!(miri) { 1100 } else { 9000 };
        let body: Vec<u8> = (0..most).map(|i| (i * 7 + i / 251) as u8).collect();
        for header_bytes in [0, 1, 56, 184, 1023, 1024] {
            let header = vec![5; header_bytes];
            for step in [1, 1000, 1024, 1025, 4096] {
                for bytes in [0, 1, 1023, 1024, 1025, 1096, 2048, 2049, 9000] {
                    let body = &body[..bytes.min(most)];
                    let mut sum = Sum::new(&header, body.len());
                    for end in (0..body.len()).step_by(if cfg!(miri) { 1000 } else { step }) {
                        sum.add(&body[..end]);
                    }
                    let expected = XxHash3_64::oneshot(&[&header[..], body].concat());
                    assert_eq!(sum.value(body), expected, "{bytes} bytes after {header_bytes} by {step}");
                }
            }
        }
    }

    #[test]
    fn every_byte_counts() {
        let bytes = if cfg!(miri) { 600 } else { STREAMING_FROM + 1500 };
        let mut source = vec![7u8; bytes];
        let mut target = vec![0u8; bytes + 64];
        let to = target.as_mut_ptr().wrapping_add(target.as_ptr().addr().wrapping_neg() % 64);
        let header = [9u8; 184];
        let sum_of = |source: &[u8]| {
            // SAFETY: both have that many bytes.
            unsafe { copy_summed(to, source.as_ptr(), bytes, &header) }
        };
        let sum = sum_of(&source);
        for at in (0..bytes).step_by(if cfg!(miri) { 97 } else { 61 }) {
            source[at] ^= 0x10;
            assert_ne!(sum_of(&source), sum, "byte {at}");
            source[at] ^= 0x10;
        }
        assert_eq!(sum_of(&source), sum);
    }
}
