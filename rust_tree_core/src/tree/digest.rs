//! The tree's digest: one number that says whether two ranks hold the same tree.
//!
//! It is a sum over nodes, so that each change costs one multiplication. A node counts with a weight made of
//! its prefix, times a linear form of its state: on which tiers it is, locks, marks, stamps, hits, priority.
//! Page ids and node ids are left out: ranks may number theirs differently. The weights are fixed, the same in every
//! process. This is against divergence, not against malice.

use super::Tree;
use super::edges::mix;
use super::node::{Node, flag};
use crate::hash::Digest;
use crate::tokens::{Shape, page_sum};

/// Odd multipliers of the linear form.
const EXISTS: u64 = 0xA076_1D64_78BD_642F;
const LOCK: u64 = 0xE703_7ED1_A0B4_28DB;
const HOST_LOCK: u64 = 0x8EBC_6AF0_9C88_C6E3;
const LAST: u64 = 0x5899_65CC_7537_4CC3;
const CREATED: u64 = 0x1D8E_4E27_C47D_124F;
const HITS: u64 = 0xEB44_ACCA_B455_D165;
const PRIORITY: u64 = 0x9E37_79B9_7F4A_7C15;
const DEVICE: u64 = 0xC2B2_AE3D_27D4_EB4F;
const HOST: u64 = 0x1656_67B1_9E37_79F9;
const PENDING_BACKUP: u64 = 0x85EB_CA77_C2B2_AE63;
const PENDING_LOAD: u64 = 0x27D4_EB2F_1656_67C5;
const HELD: u64 = 0x94D0_49BB_1331_11EB;
const PINS: u64 = 0xBF58_476D_1CE4_E5B9;

/// Keys of the page hash: fixed, since ranks must agree.
static KEYS: [u64; Shape::MAX_PAGE + 3] = keys();

const fn keys() -> [u64; Shape::MAX_PAGE + 3] {
    let mut keys = [0; Shape::MAX_PAGE + 3];
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut at = 0;
    while at < keys.len() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        keys[at] = state >> 32;
        at += 1;
    }
    keys
}

/// Sum over the pages of `tokens`, the first of which is page `start` of its path.
///
/// Each page counts by itself, with its place: so a path's sum does not depend on where it is cut.
pub(super) fn content(tokens: &[u32], shape: Shape, start: u32) -> u64 {
    let pages = shape.pages(tokens.len());
    let mut sum = 0_u64;
    for page in 0..pages {
        let place = u64::from(start) + page as u64 + 1;
        let words = shape.run(tokens, page, page + 1);
        sum = sum.wrapping_add(mix(page_sum(words, &KEYS), place.wrapping_mul(EXISTS)));
    }
    sum
}

/// What a node counts whose path has this content and which begins at page `start`.
pub(super) fn weight(content: u64, start: u32, seed: Option<&Digest>) -> u64 {
    let namespace = seed.map_or(0, |seed| u64::from_le_bytes(seed[..8].try_into().expect("8 of 32 bytes")));
    mix(content ^ namespace, u64::from(start)) | 1
}

impl Node {
    /// This node's part of the digest.
    pub(super) fn contribution(&self) -> u64 {
        let count = |flags: u32, factor: u64| if self.has(flags) { factor } else { 0 };
        let form = EXISTS
            .wrapping_add(u64::from(self.full().lock_ref).wrapping_mul(LOCK))
            .wrapping_add(u64::from(self.full().host_lock_ref).wrapping_mul(HOST_LOCK))
            .wrapping_add(self.last.wrapping_mul(LAST))
            .wrapping_add(self.created.wrapping_mul(CREATED))
            .wrapping_add(self.hits.wrapping_mul(HITS))
            .wrapping_add(self.priority.cast_unsigned().wrapping_mul(PRIORITY))
            .wrapping_add(u64::from(self.pins).wrapping_mul(PINS))
            .wrapping_add(if self.on_device() { DEVICE } else { 0 })
            .wrapping_add(if self.backed() { HOST } else { 0 })
            .wrapping_add(count(flag::PENDING_BACKUP, PENDING_BACKUP))
            .wrapping_add(count(flag::PENDING_LOAD, PENDING_LOAD))
            .wrapping_add(if self.held() { HELD } else { 0 });
        self.weight.wrapping_mul(form)
    }

    /// How the digest changes when the node's stamp becomes `last`.
    #[inline]
    pub(super) fn stamp_delta(&self, last: u64) -> u64 {
        self.weight.wrapping_mul(last.wrapping_sub(self.last).wrapping_mul(LAST))
    }
}

/// How the digest changes when nodes of this summed weight get one device lock more.
#[inline]
pub(super) fn lock_delta(weights: u64) -> u64 {
    weights.wrapping_mul(LOCK)
}

impl Tree {
    /// A number in `0 .. 2^62`, equal on ranks that hold the same tree. Costs nothing to ask for.
    pub fn digest(&self) -> u64 {
        mix(self.digest, EXISTS) >> 2
    }

    /// The sum behind the digest, made anew from every node.
    pub(super) fn recomputed_digest(&self) -> u64 {
        self.live_slots().fold(0, |sum, slot| sum.wrapping_add(self.nodes[slot as usize].contribution()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WritePolicy;
    use crate::tree::testing::{keys, tree};

    #[test]
    fn content_does_not_depend_on_cuts() {
        let shape = Shape::new(2, true).unwrap();
        let tokens = keys(5..16);
        let whole = content(&tokens, shape, 3);
        let parts = content(&tokens[..5], shape, 3).wrapping_add(content(&tokens[4..], shape, 5));
        assert_eq!(whole, parts);
        assert_ne!(whole, content(&tokens, shape, 4));
    }

    #[test]
    fn ranks_that_see_the_same_calls_agree_and_others_do_not() {
        let mut ranks = [0, 1].map(|_| tree(2, Some(WritePolicy::WriteThrough)));
        let fresh = ranks[0].digest();
        for (rank, first_page) in ranks.iter_mut().zip([0, 70]) {
            // Page ids may differ between ranks.
            let node = rank.put(&keys(0..8), first_page).node;
            rank.backed_up(&[node], 3 * first_page);
        }
        assert_eq!(ranks[0].digest(), ranks[1].digest());
        let [one, two] = &mut ranks;
        one.get(&keys(0..8));
        assert_ne!(one.digest(), two.digest());
        two.get(&keys(0..8));
        assert_eq!(one.digest(), two.digest());
        let mut lock = one.inc_lock_ref(1).unwrap();
        assert_ne!(one.digest(), two.digest());
        one.dec_lock_ref(&mut lock).unwrap();
        assert_eq!(one.digest(), two.digest());
        one.reset();
        assert_eq!(one.digest(), fresh);
        assert!(two.digest() < 1 << 62);
    }
}
