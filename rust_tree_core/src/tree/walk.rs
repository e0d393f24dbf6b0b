//! From the root page by page: match, peek, batched match.

use super::node::{NONE, Pages, Slot, flag};
use super::{Ack, AckKind, Tree};
use crate::NodeId;
use crate::error::{Result, bad_argument};
use crate::namespace::{Namespace, NamespaceId, PLAIN};
use crate::tokens::{Tokens, Word, check_range, common_prefix, with_words};

/// Pages of a path as they were when it was walked, whatever the tree did since.
#[derive(Clone, Debug, Default)]
pub struct PageRuns {
    /// A run of pages each, and how many of them count.
    runs: Vec<(Pages, u32)>,
}

impl PageRuns {
    pub(super) fn with_capacity(runs: usize) -> Self {
        Self { runs: Vec::with_capacity(runs) }
    }

    pub(super) fn push(&mut self, pages: &Pages, count: u32) {
        self.runs.push((Pages::clone(pages), count));
    }

    /// Number of pages.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|(_, count)| *count as usize).sum()
    }

    /// True if there is no page.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pages in place, if they are one run (or none).
    pub fn as_single(&self) -> Option<&[u32]> {
        match self.runs.as_slice() {
            [] => Some(&[]),
            [(run, count)] => Some(&run[..*count as usize]),
            _ => None,
        }
    }

    /// The pages in order, in memory of their own.
    pub fn to_vec(&self) -> Vec<u32> {
        let mut pages = Vec::with_capacity(self.len());
        for (run, count) in &self.runs {
            pages.extend_from_slice(&run[..*count as usize]);
        }
        pages
    }
}

/// What a key meets in the tree. Lengths are in tokens (bigram: positions).
#[derive(Clone, Debug)]
pub struct Match {
    /// Length held on device, a pending load-back included.
    pub device_length: usize,
    /// Length held on host past the device part.
    pub host_hit_length: usize,
    /// Deepest node on device, or the root.
    pub last_device_node: NodeId,
    /// Deepest node of the match, or the root.
    pub last_host_node: NodeId,
    /// The youngest load-back that a part of the device pages waits for.
    pub pending_ack: Option<Ack>,
    /// The device pages.
    pub device: PageRuns,
}

impl Match {
    /// The device pages, in memory of their own.
    pub fn device_pages(&self) -> Vec<u32> {
        self.device.to_vec()
    }
}

/// Where a walk ended. The nodes it covered wholly are in the path that was given to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct WalkEnd {
    /// A node of which only the first pages agree.
    pub partial: Option<(Slot, u32)>,
    /// Pages walked, those of `partial` included.
    pub pages: usize,
    /// Raw tokens at the head of the key that equal stored ones.
    pub equal: usize,
}

fn check_tokens(tokens: Tokens<'_>) -> Result<()> {
    with_words!(tokens, words => check_range(words, 0))
}

impl Tree {
    /// The longest prefix of `tokens` that the tree holds, up to whole pages.
    ///
    /// Stamps the path, and cuts the node in which the match ends, so that the returned node covers just
    /// what matched. With `include_evicted` the match goes on through nodes that only the host holds.
    pub fn match_prefix(
        &mut self,
        tokens: Tokens<'_>,
        namespace: Namespace<'_>,
        include_evicted: bool,
    ) -> Result<Match> {
        let mut path = std::mem::take(&mut self.path);
        let result = self.match_on(tokens, namespace, include_evicted, &mut path);
        self.path = path;
        result
    }

    /// The same match for each key of a waiting queue, in order.
    pub fn match_prefixes(&mut self, keys: &[(Tokens<'_>, Namespace<'_>)]) -> Result<Vec<Match>> {
        // All keys are checked before the first changes anything.
        for (at, &(tokens, _)) in keys.iter().enumerate() {
            check_tokens(tokens).map_err(|error| bad_argument!("keys[{at}]: {error}"))?;
        }
        keys.iter().map(|&(tokens, namespace)| self.match_prefix(tokens, namespace, true)).collect()
    }

    /// The same lengths and pages as `match_prefix`, without any change: no cut, no stamp.
    ///
    /// Its nodes are the deepest that the match covers wholly.
    pub fn peek_prefix(
        &self,
        tokens: Tokens<'_>,
        namespace: Namespace<'_>,
        include_evicted: bool,
    ) -> Result<Match> {
        let mut path = Vec::new();
        let end = with_words!(tokens, words => {
            let end = self.walk(words, self.namespaces.find(namespace), include_evicted, &mut path);
            check_range(&words[end.equal..], end.equal)?;
            end
        });
        Ok(self.matched(&path, end.partial))
    }

    fn match_on(
        &mut self,
        tokens: Tokens<'_>,
        namespace: Namespace<'_>,
        include_evicted: bool,
        path: &mut Vec<Slot>,
    ) -> Result<Match> {
        let end = with_words!(tokens, words => {
            let end = self.walk(words, self.namespaces.find(namespace), include_evicted, path);
            check_range(&words[end.equal..], end.equal)?;
            end
        });
        if let Some((slot, pages)) = end.partial {
            path.push(self.cut(slot, pages));
        }
        self.stamp(path);
        Ok(self.matched(path, None))
    }

    /// Walks down as far as key and tree agree. Changes nothing; `path` is emptied first.
    #[inline]
    pub(super) fn walk<W: Word>(
        &self,
        key: &[W],
        namespace: Option<NamespaceId>,
        include_evicted: bool,
        path: &mut Vec<Slot>,
    ) -> WalkEnd {
        path.clear();
        match namespace {
            Some(id) => self.walk_from(self.root, id, key, include_evicted, path),
            None => WalkEnd { partial: None, pages: 0, equal: 0 },
        }
    }

    /// Walks down from a node: `key` begins where the node ends.
    pub(super) fn walk_from<W: Word>(
        &self,
        from: Slot,
        namespace: NamespaceId,
        key: &[W],
        include_evicted: bool,
        path: &mut Vec<Slot>,
    ) -> WalkEnd {
        let shape = self.shape;
        let total = shape.pages(key.len());
        let mut above = from;
        let mut page = 0;
        let mut equal = 0;
        while page < total {
            let rest = &key[page * shape.page..total * shape.page + shape.extra];
            let Some((child, agreed)) = self.step(above, namespace, rest) else { break };
            let node = &self.nodes[child as usize];
            if !include_evicted && !node.on_device() {
                break;
            }
            let pages = shape.agreed(agreed);
            equal = page * shape.page + agreed;
            page += pages;
            if pages < node.len as usize {
                return WalkEnd { partial: Some((child, pages as u32)), pages: page, equal };
            }
            path.push(child);
            above = child;
        }
        WalkEnd { partial: None, pages: page, equal }
    }

    /// The child of `above` whose first page `rest` begins with, and how many raw tokens they share.
    #[inline]
    fn step<W: Word>(&self, above: Slot, namespace: NamespaceId, rest: &[W]) -> Option<(Slot, usize)> {
        let width = self.shape.width();
        let below_root = above == self.root;
        if let Some(child) = self.nodes[above as usize].only_child() {
            // Long conversations are chains: with one child there is nothing to look up.
            let node = &self.nodes[child as usize];
            if below_root && node.namespace != namespace {
                return None;
            }
            let agreed = common_prefix(rest, &node.tokens);
            return (agreed >= width).then_some((child, agreed));
        }
        let first = &rest[..width];
        // Below the root the namespace is that of the path: only there does it tell edges apart.
        let hash = self.edges.hash(above, if below_root { namespace } else { PLAIN }, first);
        let child = self.edges.find(hash, |slot| {
            let node = &self.nodes[slot as usize];
            node.parent == above
                && (!below_root || node.namespace == namespace)
                && common_prefix(first, &node.tokens) == width
        })?;
        let tokens = &self.nodes[child as usize].tokens;
        Some((child, width + common_prefix(&rest[width..], &tokens[width..])))
    }

    /// Stamps the nodes of a path, root-first: deeper is newer.
    pub(super) fn stamp(&mut self, path: &[Slot]) {
        for &slot in path {
            self.clock += 1;
            let node = &mut self.nodes[slot as usize];
            self.digest = self.digest.wrapping_add(node.stamp_delta(self.clock));
            node.last = self.clock;
            self.refresh_key(slot);
        }
    }

    /// The result of a match that covers `path`, and the first pages of one node more.
    fn matched(&self, path: &[Slot], partial: Option<(Slot, u32)>) -> Match {
        let mut device = PageRuns::with_capacity(path.len() + 1);
        let (mut device_pages, mut host_pages) = (0_usize, 0_usize);
        let (mut last_device, mut last_host) = (self.root, self.root);
        let mut youngest = 0;
        let whole = path.iter().map(|&slot| (slot, NONE));
        for (slot, pages) in whole.chain(partial) {
            let node = &self.nodes[slot as usize];
            let count = pages.min(node.len);
            match &node.full().value {
                Some(value) => {
                    device.push(value, count);
                    device_pages += count as usize;
                    if node.has(flag::PENDING_LOAD) {
                        youngest = youngest.max(node.ack);
                    }
                    if count == node.len {
                        last_device = slot;
                    }
                }
                None => host_pages += count as usize,
            }
            if count == node.len {
                last_host = slot;
            }
        }
        Match {
            device_length: device_pages * self.shape.page,
            host_hit_length: host_pages * self.shape.page,
            last_device_node: self.nodes[last_device as usize].id,
            last_host_node: self.nodes[last_host as usize].id,
            pending_ack: (youngest > 0).then_some(Ack {
                origin: self.origin,
                serial: youngest,
                kind: AckKind::LoadBack,
            }),
            device,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::testing::{keys, tree};
    use crate::{TreeConfig, WritePolicy};

    #[test]
    fn a_match_cuts_where_it_ends_and_a_peek_does_not() {
        let mut tree = tree(4, None);
        let whole = tree.put(&keys(0..16), 0).node;
        let mut key = keys(0..10);
        key.push(99);
        let digest = tree.digest();
        let peek = tree.peek_prefix(Tokens::U32(&key), Namespace::default(), true).unwrap();
        assert_eq!((peek.device_length, peek.device_pages()), (8, vec![0, 1]));
        assert_eq!((peek.last_device_node, tree.len(), tree.digest()), (tree.root(), 1, digest));
        let found = tree.get(&key);
        assert_eq!((found.device_length, found.device_pages(), tree.len()), (8, vec![0, 1], 2));
        assert_eq!(tree.node_info(whole).unwrap().parent, Some(found.last_device_node));
        tree.sound();
    }

    #[test]
    fn short_keys_change_nothing() {
        let mut tree = tree(64, None);
        tree.put(&keys(0..64), 0);
        let before = (tree.digest(), tree.len());
        for length in [0, 1, 63] {
            let found = tree.get(&keys(0..length));
            assert_eq!((found.device_length, found.last_host_node), (0, tree.root()));
        }
        assert_eq!((tree.digest(), tree.len()), before);
    }

    #[test]
    fn results_keep_the_pages_of_their_moment() {
        let mut tree = tree(1, None);
        tree.put(&keys(0..4), 10);
        let found = tree.get(&keys(0..4));
        tree.evict(4, None);
        assert_eq!((found.device_pages(), found.device.len()), (vec![10, 11, 12, 13], 4));
        assert_eq!(tree.get(&keys(0..4)).device_length, 0);
    }

    #[test]
    fn evicted_nodes_are_walked_only_if_asked_for() {
        let mut tree = tree(2, Some(WritePolicy::WriteThrough));
        let upper = tree.put(&keys(0..4), 0).node;
        let lower = tree.put(&keys(0..8), 0).node;
        tree.backed_up(&[lower], 0);
        tree.evict(2, None);
        let found = tree.get(&keys(0..8));
        assert_eq!((found.device_length, found.host_hit_length), (4, 4));
        assert_eq!((found.last_device_node, found.last_host_node), (upper, lower));
        let found = tree.match_prefix(Tokens::U32(&keys(0..8)), Namespace::default(), false).unwrap();
        assert_eq!((found.device_length, found.host_hit_length, found.last_host_node), (4, 0, upper));
    }

    #[test]
    fn namespaces_never_meet_and_a_miss_leaves_nothing() {
        let mut tree = tree(2, None);
        let key = keys(0..4);
        let a = Namespace { extra_key: Some("a"), cache_salt: None };
        let args = crate::InsertArgs { namespace: a, ..crate::InsertArgs::new(Tokens::U32(&key), &[0, 1]) };
        tree.insert(args).unwrap();
        let mut length = |space| tree.match_prefix(Tokens::U32(&key), space, true).unwrap().device_length;
        assert_eq!(length(a), 4);
        assert_eq!(length(Namespace::default()), 0);
        assert_eq!(length(Namespace { extra_key: None, cache_salt: Some("a") }), 0);
        assert_eq!(tree.namespaces.len(), 2);
        tree.evict(2, None);
        assert_eq!(tree.namespaces.len(), 1);
        tree.sound();
    }

    #[test]
    fn bigram_walks_stop_when_less_than_a_page_is_left() {
        let config = TreeConfig { page_size: 64, bigram: true, ..TreeConfig::default() };
        let mut tree = crate::tree::testing::tree_with(config);
        assert_eq!(tree.put(&keys(0..64), 0).node, tree.root());
        tree.put(&keys(0..65), 0);
        let lengths = [65, 64, 1, 0].map(|length| tree.get(&keys(0..length)).device_length);
        assert_eq!(lengths, [64, 0, 0, 0]);
        // The last pair counts: another token after the page makes another page.
        let mut other = keys(0..64);
        other.push(1);
        assert_eq!(tree.get(&other).device_length, 0);
    }

    #[test]
    fn a_queue_is_checked_before_its_first_key_is_matched() {
        let mut tree = tree(1, None);
        tree.put(&keys(0..4), 0);
        let before = tree.digest();
        let (good, bad) = ([0_i64, 1], [0_i64, -1]);
        let queue = [&good, &bad].map(|key| (Tokens::I64(key), Namespace::default()));
        let text = tree.match_prefixes(&queue).unwrap_err().to_string();
        assert!(text.starts_with("keys[1]: tokens[1] is -1"), "{text}");
        assert_eq!(tree.digest(), before);
        let found = tree.match_prefixes(&queue[..1]).unwrap();
        assert_eq!(found[0].device_length, 2);
    }

    #[test]
    fn bad_tokens_past_the_match_are_found() {
        let mut tree = tree(4, None);
        tree.put(&keys(0..8), 0);
        let before = tree.digest();
        for at in [3, 6, 8, 9] {
            let mut key: Vec<i64> = (0..10).collect();
            key[at] = 1 << 33;
            let text = tree.match_prefix(Tokens::I64(&key), Namespace::default(), true).unwrap_err();
            assert!(text.to_string().starts_with(&format!("tokens[{at}] ")), "{text}");
        }
        assert_eq!(tree.digest(), before);
    }
}
