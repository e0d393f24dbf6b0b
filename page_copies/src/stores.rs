//! Moving contiguous bytes, past the processor's cache where that pays.
//!
//! An ordinary store reads the line that it is about to overwrite. Streaming stores do not, which saves a third of the
//! traffic, but what they wrote is in no cache; so they are for copies that would not stay there anyway.

/// Bytes of a cache line, the unit in which streaming stores reach memory.
pub(crate) const LINE: usize = 64;

/// Copies `bytes` bytes from the second pointer to the first.
///
/// # Safety
/// Both must be valid for that many bytes, and must not overlap.
pub(crate) type Put = unsafe fn(*mut u8, *const u8, usize);

/// Through the cache.
///
/// # Safety
/// See [`Put`].
pub(crate) unsafe fn put_cached(target: *mut u8, source: *const u8, bytes: usize) {
    // SAFETY: this function's contract.
    unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) }
}

/// The best streaming copy of this processor. Whoever has used it must call [`fence`] before other threads are told.
pub(crate) fn put_streaming() -> Put {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        if std::arch::is_x86_feature_detected!("avx") { x86::put_avx } else { x86::put_sse2 }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        put_cached
    }
}

/// Copies bytes from the third pointer to the second one, which stays in the cache, and exactly these to the first one.
///
/// # Safety
/// All three must be valid for that many bytes, none of which may overlap.
pub(crate) type Tee = unsafe fn(*mut u8, *mut u8, *const u8, usize);

/// Both through the cache.
///
/// # Safety
/// See [`Tee`].
pub(crate) unsafe fn tee_cached(target: *mut u8, near: *mut u8, source: *const u8, bytes: usize) {
    // SAFETY: this function's contract.
    unsafe {
        put_cached(near, source, bytes);
        put_cached(target, near, bytes);
    }
}

/// The best one of this processor that streams to the first pointer; [`fence`] as for [`put_streaming`]. It needs more
/// than a [`Tee`]: whole lines, and both targets beginning at one.
pub(crate) fn tee_streaming() -> Tee {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        if std::arch::is_x86_feature_detected!("avx") { x86::tee_avx } else { x86::tee_sse2 }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        tee_cached
    }
}

/// Makes what this thread has streamed visible before everything that it does from now on.
pub(crate) fn fence() {
    // SAFETY: SSE is part of every x86-64 processor.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Asks for bytes that will be read soon: into the second-level cache, since the first one is for what is under way.
pub(crate) fn prefetch(source: *const u8, bytes: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for at in (0..bytes).step_by(LINE) {
        // SAFETY: SSE is part of every x86-64 processor; a prefetch of any address whatsoever has no effect but time.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(
                source.wrapping_add(at).cast(),
            );
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (source, bytes);
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_store_si128, _mm_stream_si128,
        _mm256_loadu_si256, _mm256_store_si256, _mm256_stream_si256,
    };
    use std::ptr::copy_nonoverlapping;

    use super::LINE;

    macro_rules! put {
        ($(#[$attribute:meta])* $name:ident, $vector:ty, $load:ident, $store:ident) => {
            /// # Safety
            /// See [`super::Put`].
            $(#[$attribute])*
            pub(super) unsafe fn $name(target: *mut u8, source: *const u8, bytes: usize) {
                const STEP: usize = size_of::<$vector>();
                // Whole lines of the target are streamed; what is before and after them is not.
                let head = (target.addr().wrapping_neg() % LINE).min(bytes);
                let lines = head..bytes - (bytes - head) % LINE;
                // SAFETY: the three parts are `0..bytes` together, for which both pointers are valid and do not
                // overlap by this function's contract. A store's address is a multiple of STEP: `target + head` is
                // one of LINE wherever there are lines, and what is added is one of STEP, which divides LINE. Loads
                // need no alignment.
                unsafe {
                    if head > 0 {
                        copy_nonoverlapping(source, target, head);
                    }
                    for line in lines.clone().step_by(LINE) {
                        // All loads of a line before its stores: a line that is written piece by piece, with
                        // waiting in between, may reach memory in pieces.
                        let mut parts: [$vector; LINE / STEP] = [$load(source.add(line).cast()); LINE / STEP];
                        for part in 1..parts.len() {
                            parts[part] = $load(source.add(line + part * STEP).cast());
                        }
                        for (part, value) in parts.into_iter().enumerate() {
                            $store(target.add(line + part * STEP).cast(), value);
                        }
                    }
                    if lines.end < bytes {
                        copy_nonoverlapping(source.add(lines.end), target.add(lines.end), bytes - lines.end);
                    }
                }
            }
        };
    }

    /// A tee asks for what is so far ahead, so that it is there once the block that was copied has been looked at.
    const AHEAD: usize = 2 << 10;

    macro_rules! tee {
        ($(#[$attribute:meta])* $name:ident, $vector:ty, $load:ident, $store:ident, $stream:ident) => {
            /// # Safety
            /// See [`super::Tee`] and [`super::tee_streaming`].
            $(#[$attribute])*
            pub(super) unsafe fn $name(target: *mut u8, near: *mut u8, source: *const u8, bytes: usize) {
                const STEP: usize = size_of::<$vector>();
                for line in (0..bytes).step_by(LINE) {
                    // SAFETY: `line + LINE` is at most `bytes`, a multiple of LINE, for which all pointers are valid
                    // without overlap by this function's contract. Stores are aligned: target and near begin at a
                    // line, and STEP divides LINE. A prefetch of any address has no effect but time.
                    unsafe {
                        _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(line + AHEAD).cast());
                        let mut parts: [$vector; LINE / STEP] = [$load(source.add(line).cast()); LINE / STEP];
                        for part in 1..parts.len() {
                            parts[part] = $load(source.add(line + part * STEP).cast());
                        }
                        for (part, &value) in parts.iter().enumerate() {
                            $store(near.add(line + part * STEP).cast(), value);
                        }
                        for (part, value) in parts.into_iter().enumerate() {
                            $stream(target.add(line + part * STEP).cast(), value);
                        }
                    }
                }
            }
        };
    }

    tee!(
        #[target_feature(enable = "avx")]
        tee_avx,
        __m256i,
        _mm256_loadu_si256,
        _mm256_store_si256,
        _mm256_stream_si256
    );
    tee!(tee_sse2, __m128i, _mm_loadu_si128, _mm_store_si128, _mm_stream_si128);

    put!(
        #[target_feature(enable = "avx")]
        put_avx,
        __m256i,
        _mm256_loadu_si256,
        _mm256_stream_si256
    );
    put!(put_sse2, __m128i, _mm_loadu_si128, _mm_stream_si128);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(put: Put) {
        let source: Vec<u8> = (0..1024u32).map(|i| (i * 7 + i / 256) as u8).collect();
        for target_at in [0, 1, 15, 31, 32, 63, 64] {
            for source_at in [0, 1, 33] {
                for bytes in (0..200).chain([255, 256, 257, 640]) {
                    let mut target = vec![0xEE; 1024];
                    // SAFETY: both are longer than the largest offset and count together.
                    unsafe { put(target.as_mut_ptr().add(target_at), source.as_ptr().add(source_at), bytes) };
                    fence();
                    let mut expected = vec![0xEE; 1024];
                    expected[target_at..target_at + bytes]
                        .copy_from_slice(&source[source_at..source_at + bytes]);
                    assert!(target == expected, "{bytes} bytes from {source_at} to {target_at}");
                }
            }
        }
    }

    #[test]
    fn every_put_copies_what_it_was_given_and_nothing_else() {
        check(put_cached);
        check(put_streaming());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        check(x86::put_sse2);
    }

    fn check_tee(tee: Tee) {
        #[repr(align(64))]
        struct Lines([u8; 1024]);
        let source: Vec<u8> = (0..1024u32).map(|i| (i * 7 + i / 256) as u8).collect();
        for source_at in [0, 1, 33] {
            for bytes in [0, 64, 128, 640] {
                let (mut far, mut near) = (Lines([0xEE; 1024]), Lines([0xEE; 1024]));
                // SAFETY: all are longer than the largest offset and count together; both targets begin at a line.
                unsafe {
                    let to = far.0.as_mut_ptr().add(64);
                    tee(to, near.0.as_mut_ptr(), source.as_ptr().add(source_at), bytes);
                }
                fence();
                let mut expected = [0xEE; 1024];
                expected[64..64 + bytes].copy_from_slice(&source[source_at..source_at + bytes]);
                assert!(far.0 == expected, "{bytes} bytes from {source_at}");
                assert!(near.0[..bytes] == expected[64..64 + bytes], "{bytes} bytes from {source_at}");
                assert!(near.0[bytes..].iter().all(|&byte| byte == 0xEE));
            }
        }
    }

    #[test]
    fn every_tee_copies_twice_what_it_was_given_and_nothing_else() {
        check_tee(tee_cached);
        check_tee(tee_streaming());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        check_tee(x86::tee_sse2);
    }

    #[test]
    fn a_prefetch_may_be_of_anything() {
        prefetch(std::ptr::null(), 300);
        prefetch(std::ptr::without_provenance(usize::MAX - 63), 64);
    }
}
