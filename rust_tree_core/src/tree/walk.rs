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
            let first = &rest[..shape.width()];
            let edge_namespace = if above == self.root { namespace } else { PLAIN };
            let hash = self.edges.hash(above, edge_namespace, first);
            let Some(child) = self.edges.find(hash, |slot| {
                let node = &self.nodes[slot as usize];
                node.parent == above
                    && (above != self.root || node.namespace == namespace)
                    && common_prefix(first, &node.tokens) == first.len()
            }) else {
                break;
            };
            let node = &self.nodes[child as usize];
            if !include_evicted && !node.on_device() {
                break;
            }
            let agreed = first.len() + common_prefix(&rest[first.len()..], &node.tokens[first.len()..]);
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
