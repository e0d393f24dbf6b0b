//! What a trace asks for.

use crate::error::{Result, bad_argument};

/// Requests in the order in which they came, decoded.
#[derive(Clone, Copy, Debug)]
pub struct Requests<'a> {
    /// Prompt tokens of each request.
    pub input_lengths: &'a [u32],
    /// Blocks of each request: its input length over the block size, rounded up.
    pub block_counts: &'a [u32],
    /// The blocks of all requests, one request after the other. Equal ids after an equal prefix are equal blocks.
    pub hash_ids: &'a [u32],
}

impl<'a> Requests<'a> {
    pub(super) fn check(&self, block_size: usize) -> Result<()> {
        if self.input_lengths.len() != self.block_counts.len() {
            return Err(bad_argument!(
                "input_lengths has {} entries, block_counts has {}",
                self.input_lengths.len(),
                self.block_counts.len()
            ));
        }
        let mut total = 0_usize;
        for (at, (&length, &blocks)) in self.input_lengths.iter().zip(self.block_counts).enumerate() {
            let wanted = (length as usize).div_ceil(block_size);
            if blocks as usize != wanted {
                return Err(bad_argument!(
                    "block_counts[{at}] is {blocks}, {length} tokens make {wanted} blocks of {block_size}"
                ));
            }
            total += blocks as usize;
        }
        if total != self.hash_ids.len() {
            return Err(bad_argument!(
                "hash_ids has {} entries, the requests have {total} blocks",
                self.hash_ids.len()
            ));
        }
        Ok(())
    }

    /// Input length and blocks of each request.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &'a [u32])> + use<'a> {
        let mut rest = self.hash_ids;
        let requests = self.input_lengths.iter().zip(self.block_counts);
        requests.map(move |(&length, &count)| {
            let (blocks, after) = rest.split_at(count as usize);
            rest = after;
            (length as usize, blocks)
        })
    }
}

/// The tokens of a request: a fixed function of the block's id and the place in the block.
///
/// Blocks with different ids differ in every token.
pub(super) fn make_tokens(out: &mut Vec<u32>, blocks: &[u32], length: usize, block_size: usize) {
    out.clear();
    out.reserve(length);
    for &id in blocks {
        let count = block_size.min(length - out.len()) as u32;
        let first = spread(id);
        out.extend((0..count).map(|at| first.wrapping_add(at.wrapping_mul(0x9E37_79B9))));
    }
}

/// One to one over all ids (the finaliser of `MurmurHash3`), so that neighbouring ids have no likeness.
fn spread(id: u32) -> u32 {
    let mut mixed = id ^ (id >> 16);
    mixed = mixed.wrapping_mul(0x85EB_CA6B);
    mixed = (mixed ^ (mixed >> 13)).wrapping_mul(0xC2B2_AE35);
    mixed ^ (mixed >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_a_function_of_the_block_and_end_with_the_request() {
        let (mut long, mut short) = (vec![9], Vec::new());
        make_tokens(&mut long, &[7, 8, 7], 12, 4);
        make_tokens(&mut short, &[7, 9], 6, 4);
        assert_eq!((long.len(), short.len()), (12, 6));
        assert_eq!(long[..4], long[8..]);
        assert_eq!(long[..4], short[..4]);
        assert!(long[4..6].iter().zip(&short[4..]).all(|(a, b)| a != b));
    }

    #[test]
    fn counts_that_do_not_fit_are_named() {
        let text = |lengths: &[u32], counts: &[u32], ids: &[u32]| {
            let requests = Requests { input_lengths: lengths, block_counts: counts, hash_ids: ids };
            requests.check(4).unwrap_err().to_string()
        };
        assert!(text(&[4, 5], &[1], &[0]).starts_with("input_lengths has 2 entries, block_counts has 1"));
        assert!(text(&[4, 5], &[1, 1], &[0, 1]).starts_with("block_counts[1] is 1, 5 tokens make 2 blocks"));
        assert!(text(&[4, 5], &[1, 2], &[0, 1]).starts_with("hash_ids has 2 entries, the requests have 3"));
    }
}
