#![no_main]

#[path = "../../rust_tree_core/tests/bytes/mod.rs"]
#[allow(dead_code)] // the other target's entry
mod bytes;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bytes::play(data));
