//! XXH3 in registers: those that a copy goes through, so that the checksum is made while the copy waits for memory, or of
//! memory that is only read.
//!
//! XXH3 of more than 240 bytes takes them in stripes of 64. Each is added to eight accumulators, with a multiplication by
//! what it is mixed with: 64 bytes of a secret, from 8 bytes later on for each stripe of a block. After a block of 16
//! stripes the accumulators are scrambled. At the end the last 64 bytes are taken (once more, as a rule), and the
//! accumulators become one number.
//!
//! Here a header comes before the body, and is 8 bytes short of whole stripes. So a stripe is the last 56 bytes of one
//! line of the body and the first 8 of the next one; the line before is still in registers when the next one comes.

use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_add_epi64, _mm256_blend_epi32, _mm256_load_si256,
    _mm256_loadu_si256, _mm256_mul_epu32, _mm256_permute4x64_epi64, _mm256_set1_epi64x, _mm256_shuffle_epi32,
    _mm256_slli_epi64, _mm256_srli_epi64, _mm256_store_si256, _mm256_stream_si256, _mm256_xor_si256,
};

use crate::stores::{LINE, tee_cached, tee_streaming};

const STRIPE: usize = 64;
pub(crate) const BLOCK: usize = 16 * STRIPE;
const WORD: usize = 8;
const _: () = assert!(STRIPE == LINE);

/// The copy asks for what is so far ahead. With the checksum's instructions between them, fewer loads are under way at a
/// time than memory could answer.
const AHEAD: usize = 3 << 10;

/// Of the library that defines XXH3, as the secrets below.
const PRIME_32: [u64; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
const PRIME_64: [u64; 5] = [
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
];

static SECRET: Secret = Secret([
    0xBE4B_A423_396C_FEB8,
    0x1CAD_21F7_2C81_017C,
    0xDB97_9083_E96D_D4DE,
    0x1F67_B3B7_A4A4_4072,
    0x78E5_C0CC_4EE6_79CB,
    0x2172_FFCC_7DD0_5A82,
    0x8E24_43F7_7446_08B8,
    0x4C26_3A81_E690_35E0,
    0xCB00_C391_BB52_283C,
    0xA32E_531B_8B65_D088,
    0x4EF9_0DA2_9748_6471,
    0xD8AC_DEA9_46EF_1938,
    0x3F34_9CE3_3F76_FAA8,
    0x1D4F_0BC7_C7BB_DCF9,
    0x3159_B4CD_4BE0_518A,
    0x6473_78D9_C97E_9FC8,
    0xC3EB_D334_83AC_C5EA,
    0xEB63_13FA_FFA0_81C5,
    0x49DA_F0B7_51DD_0D17,
    0x9E68_D429_2655_16D3,
    0xFCA1_477D_58BE_162B,
    0xCE31_D07A_D1B8_F88F,
    0x2804_1695_8F3A_CB45,
    0x7E40_4BBB_CAFB_D7AF,
]);

#[repr(align(64))]
struct Secret([u64; 24]);

impl Secret {
    /// Bytes from here on; there are 192.
    fn from(&self, at: usize) -> *const u8 {
        self.0.as_ptr().cast::<u8>().wrapping_add(at)
    }
}

/// 8 bytes that are nothing, then a block, then what of a line is left.
#[repr(align(64))]
struct Near([u8; BLOCK + LINE]);

/// One line, or the stripes' eight accumulators.
#[derive(Clone, Copy)]
struct Line(__m256i, __m256i);

impl Line {
    #[target_feature(enable = "avx2")]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: who calls says that there is a line.
        unsafe { Self(_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(LINE / 2).cast())) }
    }

    /// Without its first word, and with that of the next line in its place at the end.
    #[target_feature(enable = "avx2")]
    fn stripe(self, next: Self) -> Self {
        const ROTATED: i32 = 0b00_11_10_01;
        Self(
            _mm256_permute4x64_epi64::<ROTATED>(_mm256_blend_epi32::<0b11>(self.0, self.1)),
            _mm256_permute4x64_epi64::<ROTATED>(_mm256_blend_epi32::<0b11>(self.1, next.0)),
        )
    }

    /// Accumulators with a stripe, mixed with the secret from `at` on.
    #[target_feature(enable = "avx2")]
    fn with(self, stripe: Self, at: usize) -> Self {
        let half = |sum, data, at| {
            // SAFETY: no caller goes beyond the 192 bytes: stripes of a block end at 184, the others at 185 and 192.
            let mixed = _mm256_xor_si256(data, unsafe { _mm256_loadu_si256(SECRET.from(at).cast()) });
            let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
            let product = _mm256_mul_epu32(mixed, _mm256_srli_epi64::<32>(mixed));
            _mm256_add_epi64(_mm256_add_epi64(sum, swapped), product)
        };
        Self(half(self.0, stripe.0, at), half(self.1, stripe.1, at + STRIPE / 2))
    }

    /// Accumulators after a block.
    #[target_feature(enable = "avx2")]
    fn scrambled(self) -> Self {
        let half = |sum, at| {
            let shifted = _mm256_xor_si256(sum, _mm256_srli_epi64::<47>(sum));
            // SAFETY: the last 64 of the 192 bytes.
            let mixed = _mm256_xor_si256(shifted, unsafe { _mm256_load_si256(SECRET.from(at).cast()) });
            let prime = _mm256_set1_epi64x(PRIME_32[0].cast_signed());
            let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
            _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64::<32>(high))
        };
        Self(half(self.0, 128), half(self.1, 160))
    }

    /// Accumulators with some stripes of a block, from its first one on.
    #[target_feature(enable = "avx2")]
    fn with_all(mut self, stripes: &[u8]) -> Self {
        for (at, stripe) in stripes.chunks_exact(STRIPE).enumerate() {
            // SAFETY: a stripe has the bytes of a line.
            self = self.with(unsafe { Self::load(stripe.as_ptr()) }, at * WORD);
        }
        self
    }
}

/// XXH3 of a front and a body that lies in memory, of which more and more is there.
pub(crate) struct Running {
    sums: Line,
    /// Bytes of the body that they have.
    done: usize,
}

impl Running {
    /// Whether this can be done of so many bytes.
    pub(crate) fn can(bytes: usize, front: &[u8]) -> bool {
        front.len() < BLOCK && bytes > BLOCK && std::arch::is_x86_feature_detected!("avx2")
    }

    /// With the front and what of the body makes a block with it; more than a block of the body is there.
    #[target_feature(enable = "avx2")]
    pub(crate) fn new(front: &[u8], body: &[u8]) -> Self {
        let mut near = Near([0; BLOCK + LINE]);
        let done = BLOCK - front.len();
        near.0[..front.len()].copy_from_slice(front);
        near.0[front.len()..BLOCK].copy_from_slice(&body[..done]);
        Self { sums: first_sums().with_all(&near.0[..BLOCK]).scrambled(), done }
    }

    /// Adds whole blocks, as long as something comes after them.
    #[target_feature(enable = "avx2")]
    pub(crate) fn add(&mut self, body: &[u8]) {
        let mut sums = self.sums;
        while body.len() - self.done > BLOCK {
            let block = &body[self.done..][..BLOCK];
            for (at, stripe) in block.chunks_exact(STRIPE).enumerate() {
                // SAFETY: a stripe has the bytes of a line. A prefetch of any address has no effect but time.
                sums = sums.with(
                    unsafe {
                        _mm_prefetch::<_MM_HINT_T0>(stripe.as_ptr().wrapping_add(AHEAD).cast());
                        Line::load(stripe.as_ptr())
                    },
                    at * WORD,
                );
            }
            sums = sums.scrambled();
            self.done += BLOCK;
        }
        self.sums = sums;
    }

    /// The checksum; all of the body is there.
    #[target_feature(enable = "avx2")]
    pub(crate) fn value(mut self, front_bytes: usize, body: &[u8]) -> u64 {
        self.add(body);
        let left = &body[self.done..];
        let sums = self.sums.with_all(&left[..(left.len() - 1) / STRIPE * STRIPE]);
        // SAFETY: a stripe from there on: the body is longer than a block.
        let last = unsafe { Line::load(body.as_ptr().add(body.len() - STRIPE)) };
        merged(sums.with(last, 121), front_bytes + body.len())
    }
}

/// Whether [`copy_summed`] can do this.
pub(crate) fn can_sum(target: *const u8, bytes: usize, front: &[u8]) -> bool {
    target.addr().is_multiple_of(LINE)
        && front.len() % STRIPE == STRIPE - WORD
        && front.len() < BLOCK
        && bytes >= BLOCK
        && std::arch::is_x86_feature_detected!("avx2")
}

/// Copies past the cache, and returns XXH3 of the front and of what the target then has.
///
/// # Safety
/// Both must be valid for that many bytes and must not overlap, and nobody else may use the target's; [`can_sum`] has
/// said yes. [`fence`](crate::stores::fence) as for [`tee_streaming`].
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn copy_summed(target: *mut u8, source: *const u8, bytes: usize, front: &[u8]) -> u64 {
    let mut near = Near([0; BLOCK + LINE]);
    let start = WORD + front.len(); // the body's, at a line
    near.0[WORD..start].copy_from_slice(front);
    // The first block, and what is left of the line that it ends in.
    let mut done = near.0.len() - start;
    // SAFETY: whole lines, at most BLOCK bytes; target and near begin at a line.
    unsafe { tee_streaming()(target, near.0.as_mut_ptr().add(start), source, done) };
    let mut sums = first_sums().with_all(&near.0[WORD..][..BLOCK]).scrambled();
    // SAFETY: the last line of near.
    let mut line = unsafe { Line::load(near.0.as_ptr().add(BLOCK)) };
    while bytes - done >= BLOCK {
        for at in 0..BLOCK / STRIPE {
            // SAFETY: less than BLOCK from `done` on, which both pointers are valid for. The target is at a line. A prefetch
            // of any address has no effect but time.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(done + at * LINE + AHEAD).cast());
                let next = Line::load(source.add(done + at * LINE));
                _mm256_stream_si256(target.add(done + at * LINE).cast(), next.0);
                _mm256_stream_si256(target.add(done + at * LINE + LINE / 2).cast(), next.1);
                sums = sums.with(line.stripe(next), at * WORD);
                line = next;
            }
        }
        sums = sums.scrambled();
        done += BLOCK;
    }
    // What is left of that line, and less than a block.
    let end = LINE + bytes - done;
    // SAFETY: near has a line and a block; the pointers are valid for what is left.
    unsafe {
        _mm256_store_si256(near.0.as_mut_ptr().cast(), line.0);
        _mm256_store_si256(near.0.as_mut_ptr().add(LINE / 2).cast(), line.1);
        tee_cached(target.add(done), near.0.as_mut_ptr().add(LINE), source.add(done), bytes - done);
    }
    let mut left = &near.0[WORD..end];
    if left.len() > BLOCK {
        sums = sums.with_all(&left[..BLOCK]).scrambled();
        left = &left[BLOCK..];
    }
    // Of the last bytes those in whole stripes, but not the last stripe, which is the last 64 bytes wherever they begin.
    sums = sums.with_all(&left[..(left.len() - 1) / STRIPE * STRIPE]);
    // SAFETY: `end` is at least a line.
    sums = sums.with(unsafe { Line::load(near.0.as_ptr().add(end - STRIPE)) }, 121);
    merged(sums, front.len() + bytes)
}

#[target_feature(enable = "avx2")]
fn first_sums() -> Line {
    let first: [u64; 8] = [
        PRIME_32[2],
        PRIME_64[0],
        PRIME_64[1],
        PRIME_64[2],
        PRIME_64[3],
        PRIME_32[1],
        PRIME_64[4],
        PRIME_32[0],
    ];
    // SAFETY: 64 bytes.
    unsafe { Line::load(first.as_ptr().cast()) }
}

/// The checksum, of accumulators and of how many bytes there were.
#[target_feature(enable = "avx2")]
fn merged(sums: Line, bytes: usize) -> u64 {
    #[repr(align(64))]
    struct Sums([u64; 8]);
    let mut words = Sums([0; 8]);
    // SAFETY: 64 bytes, at a line.
    unsafe {
        _mm256_store_si256(words.0.as_mut_ptr().cast(), sums.0);
        _mm256_store_si256(words.0.as_mut_ptr().add(4).cast(), sums.1);
    }
    let mut sum = (bytes as u64).wrapping_mul(PRIME_64[0]);
    for (at, pair) in words.0.chunks_exact(2).enumerate() {
        let mixed = |word: u64, at: usize| {
            // SAFETY: of the secret's bytes those from 11 to 75.
            u128::from(word ^ unsafe { SECRET.from(11 + at).cast::<u64>().read_unaligned() })
        };
        let product = mixed(pair[0], at * 16) * mixed(pair[1], at * 16 + 8);
        sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }
    sum ^= sum >> 37;
    sum = sum.wrapping_mul(0x1656_6791_9E37_79F9);
    sum ^ sum >> 32
}
