//! Chained page digests, equal to those of `SGLang`, so that the two can name the same pages.
//!
//! `digest(page) = SHA-256(previous page's digest, or the namespace's seed, or nothing || the page's tokens as
//! little-endian u32)`. A bigram page holds two u32 a position: (t[i], t[i+1]).

use sha2::block_api::compress256;

use crate::error::Result;
use crate::namespace::Namespace;
use crate::tokens::{Shape, Tokens, Word, check_range, with_words};

/// A page digest, raw. Hex is for the boundary.
pub type Digest = [u8; 32];

/// The hash that names a page in events: the first 8 bytes of its digest as signed big-endian integer.
pub fn event_hash(digest: &Digest) -> i64 {
    i64::from_be_bytes(digest[..8].try_into().expect("8 of 32 bytes"))
}

/// The initial hash value of SHA-256 (FIPS 180-4, section 5.3.3).
const INITIAL: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// SHA-256 over a message laid out in one buffer of whole blocks.
///
/// A page's message has the same length every time, so that the padding is written once and only digest and
/// tokens change: no copy through a streaming buffer, one call of the compression function a page.
struct Message {
    blocks: Vec<[u8; 64]>,
    /// Bytes before the tokens: 32, or 0 for the first page without namespace.
    prefix: usize,
}

impl Message {
    fn new(prefix: usize, tokens: usize) -> Self {
        let length = prefix + 4 * tokens;
        // One byte 0x80, zeros, and the length in bits as big-endian u64 close the last block.
        let mut blocks = vec![[0_u8; 64]; (length + 9).div_ceil(64)];
        let bytes = blocks.as_flattened_mut();
        bytes[length] = 0x80;
        let end = bytes.len();
        bytes[end - 8..].copy_from_slice(&(8 * length as u64).to_be_bytes());
        Self { blocks, prefix }
    }

    fn set_parent(&mut self, parent: &Digest) {
        self.blocks[0][..32].copy_from_slice(parent);
    }

    fn set_tokens<W: Word>(&mut self, run: &[W], bigram: bool) {
        let bytes = &mut self.blocks.as_flattened_mut()[self.prefix..];
        let (words, _) = bytes.as_chunks_mut::<4>();
        if bigram {
            for (pair, tokens) in words.chunks_exact_mut(2).zip(run.windows(2)) {
                pair[0] = tokens[0].low().to_le_bytes();
                pair[1] = tokens[1].low().to_le_bytes();
            }
        } else {
            for (word, token) in words.iter_mut().zip(run) {
                *word = token.low().to_le_bytes();
            }
        }
    }

    fn digest(&self) -> Digest {
        let mut state = INITIAL;
        compress256(&mut state, &self.blocks);
        let mut digest = [0; 32];
        for (bytes, word) in digest.as_chunks_mut::<4>().0.iter_mut().zip(state) {
            *bytes = word.to_be_bytes();
        }
        digest
    }
}

/// Digests of the whole pages of `run`, which continues a chain after `parent`.
pub(crate) fn chain<W: Word>(run: &[W], shape: Shape, parent: Option<&Digest>) -> Vec<Digest> {
    let pages = shape.pages(run.len());
    let mut digests = Vec::with_capacity(pages);
    if pages == 0 {
        return digests;
    }
    let bigram = shape.extra == 1;
    let tokens = shape.page * (1 + shape.extra);
    let mut message = Message::new(32, tokens);
    for page in 0..pages {
        let words = shape.run(run, page, page + 1);
        let digest = if let Some(previous) = digests.last().or(parent) {
            message.set_parent(previous);
            message.set_tokens(words, bigram);
            message.digest()
        } else {
            let mut first = Message::new(0, tokens);
            first.set_tokens(words, bigram);
            first.digest()
        };
        digests.push(digest);
    }
    digests
}

/// The digest that stands before the first page of a namespace; `None` if both parts are absent.
pub fn namespace_seed(namespace: Namespace<'_>) -> Option<Digest> {
    use sha2::Digest as _;
    if namespace == Namespace::default() {
        return None;
    }
    let mut hasher = sha2::Sha256::new();
    hasher.update(b"sglang-cache-namespace-v1");
    for part in [namespace.extra_key, namespace.cache_salt] {
        match part {
            None => hasher.update([0]),
            Some(text) => {
                hasher.update([1]);
                hasher.update((text.len() as u64).to_le_bytes());
                hasher.update(text.as_bytes());
            }
        }
    }
    Some(hasher.finalize().into())
}

/// Digests of the whole pages of a key, without a tree.
///
/// `parent` is the digest of the page before the key; without it the chain begins at the namespace.
pub fn page_hashes(
    tokens: Tokens<'_>,
    page_size: usize,
    parent: Option<&Digest>,
    namespace: Namespace<'_>,
    bigram: bool,
) -> Result<Vec<Digest>> {
    let shape = Shape::new(page_size, bigram)?;
    let seed = namespace_seed(namespace);
    with_words!(tokens, words => {
        check_range(words, 0)?;
        Ok(chain(words, shape, parent.or(seed.as_ref())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(digests: &[Digest]) -> Vec<String> {
        let text =
            |digest: &Digest| digest.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat();
        digests.iter().map(text).collect()
    }

    fn hashes(tokens: &[u32], page: usize, namespace: Namespace<'_>, bigram: bool) -> Vec<Digest> {
        page_hashes(Tokens::U32(tokens), page, None, namespace, bigram).unwrap()
    }

    /// Golden values: they must be the same in every process, on every rank and machine.
    #[test]
    fn golden_digests() {
        let twelve: Vec<u32> = (0..12).collect();
        let none = Namespace::default();
        let plain = hashes(&twelve, 4, none, false);
        assert_eq!(
            hex(&plain),
            [
                "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
                "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
                "fd5bd05ab69776768cb177e87c5ef6f8f8dec410a03a3c238a58a89c01ba803c",
            ]
        );
        assert_eq!(event_hash(&plain[0]), -4_977_211_910_723_114_241);
        let tenant = Namespace { extra_key: Some("ab"), cache_salt: Some("c") };
        assert_eq!(
            hex(&hashes(&twelve[..4], 4, tenant, false)),
            ["211378efb70ac3186293e0d33c020fed24418db74ca034d4749816274c02da34"]
        );
        assert_eq!(
            hex(&hashes(&twelve[..9], 4, none, true)),
            [
                "920cac7cd1509ca7892cd8c228d89d76948b24a6f5d74b3f1ee5104630ac803f",
                "54ec4f852ead617d9c01055b7978c427d2ff6aa1b44a1613047281d344eb0628",
            ]
        );
    }

    #[test]
    fn absent_and_empty_namespaces_differ() {
        let empty = Namespace { extra_key: Some(""), cache_salt: None };
        assert_eq!(namespace_seed(Namespace::default()), None);
        assert_ne!(namespace_seed(empty), None);
        assert_ne!(
            namespace_seed(empty),
            namespace_seed(Namespace { extra_key: None, cache_salt: Some("") })
        );
    }

    #[test]
    fn the_message_is_plain_sha256_at_every_page_size() {
        use sha2::Digest as _;
        for page in 1..=Shape::MAX_PAGE {
            let tokens: Vec<u32> = (0..3 * page as u32).map(|i| i.wrapping_mul(0x0102_0305)).collect();
            let got = hashes(&tokens, page, Namespace::default(), false);
            let mut previous: Vec<u8> = Vec::new();
            for (page_tokens, digest) in tokens.chunks(page).zip(got) {
                let bytes: Vec<u8> = page_tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
                previous = sha2::Sha256::digest([previous, bytes].concat()).to_vec();
                assert_eq!(digest[..], previous[..]);
            }
        }
    }

    #[test]
    fn a_chain_continues_from_its_parent() {
        let tokens: Vec<u32> = (0..64).collect();
        let whole = hashes(&tokens, 8, Namespace::default(), false);
        let rest = page_hashes(Tokens::U32(&tokens[24..]), 8, Some(&whole[2]), Namespace::default(), false);
        assert_eq!(rest.unwrap(), whole[3..]);
    }
}
