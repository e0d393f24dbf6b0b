//! The fuzz targets' entries on random bytes: so they stay right between two runs of the fuzzer.
//!
//! `UNIFIED_CACHE_BYTES_ROUNDS` sets how many byte strings are played (default 3,000).

mod bytes;

fn random_bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

fn rounds() -> u64 {
    std::env::var("UNIFIED_CACHE_BYTES_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3_000)
}

#[test]
fn calls_spelled_by_any_bytes_keep_the_tree_whole() {
    for seed in 1..=rounds() {
        let bytes = random_bytes(seed, 400 + (seed % 7 * 300) as usize);
        let played = std::panic::catch_unwind(|| bytes::play(&bytes));
        assert!(played.is_ok(), "seed {seed}");
    }
}

#[test]
fn any_bytes_are_hashed_or_refused() {
    for seed in 1..=rounds() {
        let mut bytes = random_bytes(seed, 1 + (seed % 200) as usize * 8);
        if seed % 2 == 0 {
            // Clear the high halves: only then are the words tokens.
            for word in bytes[1..].chunks_exact_mut(8) {
                word[4..].fill(0);
            }
        }
        bytes::hash(&bytes);
    }
}
