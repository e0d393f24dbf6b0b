//! What a storage holds, as a tree: a node for each run of pages that was stored together.
//!
//! A page is known by its digest, which says all that is before it, so the tree needs no tokens: about 50
//! bytes a page. That a page is known says that the pages before it are. The tree is what one process
//! believes; the storage itself has the last word.

mod record;

use std::collections::{BTreeSet, HashMap};

use hashbrown::HashTable;

pub use record::{LogPart, MOST_RECORD_BYTES, Record, Space};

use crate::error::{Error, Result, bad_argument};
use crate::hash::Digest;
use crate::namespace::{Namespace, NamespaceId, Namespaces};
use crate::tokens::Shape;

const NONE: u32 = u32::MAX;

/// Where a page is: its node, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    node: u32,
    page: u32,
}

/// Where the tokens of a node are: a piece of a log, by the number that the caller gave it, and bytes from its
/// beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Number of the piece.
    pub piece: u32,
    /// Byte at which the tokens begin.
    pub at: u64,
}

#[derive(Debug)]
struct Node {
    /// The node at whose end this one begins; `NONE` at the beginning of a prefix.
    parent: u32,
    children: Vec<u32>,
    digests: Vec<Digest>,
    namespace: NamespaceId,
    /// When it was last added to or used, in calls.
    used: u64,
    /// When it came, in additions, and pages before it: in this order parents are before children.
    made: (u64, u32),
    source: Option<Source>,
}

/// Pages of one node, on the way to a stored prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The node, until it goes.
    pub node: u32,
    /// Pages from its front.
    pub pages: usize,
    /// Where their tokens are.
    pub source: Source,
}

/// A stored prefix, from its beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPrefix<'a> {
    /// Its namespace.
    pub namespace: Namespace<'a>,
    /// Its pages, run by run.
    pub runs: Vec<Run>,
}

/// One node, with what a record of it needs.
#[derive(Clone, Debug)]
pub struct StoredNode<'a> {
    /// The page before.
    pub parent: Option<Digest>,
    /// Of the prefix.
    pub namespace: Namespace<'a>,
    /// How many pages it has.
    pub pages: usize,
    /// Where their tokens are; `None` if it did not come from a log.
    pub source: Option<Source>,
}

/// What an addition did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Added {
    /// Pages that were not known before.
    pub pages: usize,
    /// Pages that have no place, since what is before them is not known.
    pub orphans: usize,
}

/// The tree; see the module.
#[derive(Debug)]
pub struct StoredTree {
    nodes: Vec<Option<Node>>,
    free: Vec<u32>,
    table: HashTable<Place>,
    /// Nodes without children, by when they were used.
    leaves: BTreeSet<(u64, u32)>,
    namespaces: Namespaces,
    clock: u64,
    made: u64,
    capacity: usize,
    page_size: usize,
}

/// A digest is as good as random.
fn hash_of(digest: &Digest) -> u64 {
    u64::from_le_bytes(digest[..8].try_into().expect("8 of 32 bytes"))
}

impl Source {
    /// So many pages further on.
    fn further(self, pages: usize, page_size: usize) -> Self {
        Self { at: self.at + (pages * page_size * 4) as u64, ..self }
    }
}

impl Node {
    /// Pages from the beginning of the prefix to its end.
    fn end(&self) -> u32 {
        self.made.1 + self.digests.len() as u32
    }
}

impl StoredTree {
    /// An empty tree that knows at most `capacity` pages: those that were used longest ago go first.
    pub fn new(page_size: usize, capacity: usize) -> Result<Self> {
        Shape::new(page_size, false)?;
        if !(1..=u32::MAX as usize / 2).contains(&capacity) {
            return Err(bad_argument!("capacity is {capacity}, allowed is 1 to {}", u32::MAX / 2));
        }
        Ok(Self {
            nodes: Vec::new(),
            free: Vec::new(),
            table: HashTable::new(),
            leaves: BTreeSet::new(),
            namespaces: Namespaces::new(),
            clock: 0,
            made: 0,
            capacity,
            page_size,
        })
    }

    /// Pages that are known.
    pub fn pages(&self) -> usize {
        self.table.len()
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// True if nothing is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn node(&self, at: u32) -> &Node {
        self.nodes[at as usize].as_ref().expect("a node")
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        self.nodes[at as usize].as_mut().expect("a node")
    }

    fn find(&self, digest: &Digest) -> Option<Place> {
        let same = |place: &Place| self.node(place.node).digests[place.page as usize] == *digest;
        self.table.find(hash_of(digest), same).copied()
    }

    /// How many of these pages, which follow each other, are known, from the first on.
    pub fn known(&self, digests: &[Digest]) -> usize {
        // Of a known page all pages before are known, so this is a search in a sorted list.
        digests.partition_point(|digest| self.find(digest).is_some())
    }

    /// The same; they count as used now.
    pub fn touch(&mut self, digests: &[Digest]) -> usize {
        let known = self.known(digests);
        if let Some(place) = known.checked_sub(1).and_then(|last| self.find(&digests[last])) {
            self.clock += 1;
            self.use_node(place.node);
        }
        known
    }

    /// Adds pages that follow each other, and the page `parent`; what is known already counts as used now.
    pub fn add(
        &mut self,
        parent: Option<&Digest>,
        namespace: Namespace<'_>,
        digests: &[Digest],
        source: Option<Source>,
    ) -> Added {
        let known = self.known(digests);
        let before = match known.checked_sub(1).map(|last| &digests[last]).or(parent) {
            None => None,
            Some(digest) => match self.find(digest) {
                None => return Added { pages: 0, orphans: digests.len() },
                place => place,
            },
        };
        self.clock += 1;
        if let Some(place) = before {
            self.use_node(place.node);
        }
        let new = &digests[known..];
        let new = &new[..new.len().min(self.capacity)];
        if new.is_empty() {
            return Added::default();
        }
        if let Some(place) = before {
            self.cut(place.node, place.page + 1);
        }
        let source = source.map(|source| source.further(known, self.page_size));
        self.add_node(before.map_or(NONE, |place| place.node), namespace, new.to_vec(), source);
        self.shrink();
        Added { pages: new.len(), orphans: 0 }
    }

    /// Adds the records of a part of a log: of each the pages that `held` says are there, up to the first gap.
    ///
    /// `held` has an entry for each page of the part.
    pub fn load(&mut self, part: &LogPart, piece: u32, held: &[bool]) -> Result<Added> {
        if held.len() != part.digests.len() {
            return Err(bad_argument!(
                "held has {} entries, the part has {} pages",
                held.len(),
                part.digests.len()
            ));
        }
        let mut sum = Added::default();
        for record in &part.records {
            let pages = record.first..record.first + record.pages;
            let there = held[pages.clone()].iter().take_while(|there| **there).count();
            if there == 0 {
                continue;
            }
            let namespace = Namespace {
                extra_key: record.extra_key.as_deref(),
                cache_salt: record.cache_salt.as_deref(),
            };
            let digests = &part.digests[pages][..there];
            let source = Some(Source { piece, at: record.tokens_at as u64 });
            let added = self.add(record.parent.as_ref(), namespace, digests, source);
            sum.pages += added.pages;
            sum.orphans += added.orphans;
        }
        Ok(sum)
    }

    /// Forgets a page and all that is below it; returns how many pages these were.
    pub fn forget(&mut self, digest: &Digest) -> usize {
        let Some(place) = self.find(digest) else { return 0 };
        let before = self.pages();
        let first = if place.page == 0 { place.node } else { self.cut(place.node, place.page) };
        let mut below = vec![first];
        let mut at = 0;
        while at < below.len() {
            below.extend_from_slice(&self.nodes[below[at] as usize].as_ref().expect("a node").children);
            at += 1;
        }
        // From the end each is a leaf when its turn comes.
        for &node in below.iter().rev() {
            self.remove_leaf(node);
        }
        before - self.pages()
    }

    /// The prefixes that were used last, the latest first, of at most so many pages together.
    ///
    /// Only those whose tokens are somewhere; the last one may be cut to what is left.
    pub fn recent(&self, most_pages: usize) -> Vec<StoredPrefix<'_>> {
        let mut left = most_pages;
        let mut taken: HashMap<u32, usize> = HashMap::new();
        let mut prefixes = Vec::new();
        for &(_, leaf) in self.leaves.iter().rev() {
            if left == 0 {
                break;
            }
            let Some(mut runs) = self.runs_to(leaf) else { continue };
            let mut kept = 0;
            for run in &mut runs {
                let there = taken.entry(run.node).or_default();
                let new = run.pages.saturating_sub(*there).min(left);
                left -= new;
                *there += new;
                kept += 1;
                if *there < run.pages {
                    run.pages = *there;
                    break;
                }
            }
            runs.truncate(kept);
            runs.retain(|run| run.pages > 0);
            prefixes.push(StoredPrefix { namespace: self.namespaces.get(self.node(leaf).namespace), runs });
        }
        prefixes
    }

    /// The runs from the beginning of a prefix to the end of `node`; `None` if the tokens of one are nowhere.
    fn runs_to(&self, node: u32) -> Option<Vec<Run>> {
        let mut runs = Vec::new();
        let mut node = node;
        while node != NONE {
            let this = self.node(node);
            runs.push(Run { node, pages: this.digests.len(), source: this.source? });
            node = this.parent;
        }
        runs.reverse();
        Some(runs)
    }

    /// All nodes, parents before children.
    pub fn all(&self) -> Vec<StoredNode<'_>> {
        let mut nodes: Vec<&Node> = self.nodes.iter().flatten().collect();
        nodes.sort_unstable_by_key(|node| node.made);
        let parent = |at: u32| (at != NONE).then(|| *self.node(at).digests.last().expect("at least a page"));
        let all = nodes.into_iter().map(|node| StoredNode {
            parent: parent(node.parent),
            namespace: self.namespaces.get(node.namespace),
            pages: node.digests.len(),
            source: node.source,
        });
        all.collect()
    }

    // Small steps

    fn use_node(&mut self, at: u32) {
        let used = self.clock;
        let node = self.node_mut(at);
        let before = std::mem::replace(&mut node.used, used);
        if node.children.is_empty() {
            self.leaves.remove(&(before, at));
            self.leaves.insert((used, at));
        }
    }

    fn add_node(
        &mut self,
        parent: u32,
        namespace: Namespace<'_>,
        digests: Vec<Digest>,
        source: Option<Source>,
    ) {
        self.made += 1;
        let mut made = (self.made, 0);
        let namespace = if parent == NONE {
            self.namespaces.acquire(namespace)
        } else {
            let above = self.node(parent);
            (made.1, made.0) = (above.end(), self.made);
            let id = above.namespace;
            self.namespaces.acquire_id(id);
            id
        };
        let used = self.clock;
        let children = Vec::new();
        let at = self.free_slot();
        let node = Node { parent, children, digests, namespace, used, made, source };
        self.nodes[at as usize] = Some(node);
        self.name_pages(at);
        if parent != NONE {
            let above = self.node_mut(parent);
            let used = above.used;
            above.children.push(at);
            self.leaves.remove(&(used, parent));
        }
        self.leaves.insert((used, at));
    }

    fn free_slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            (self.nodes.len() - 1) as u32
        })
    }

    /// Cuts a node after its first pages, if it has more; returns the lower part, which has the children then.
    fn cut(&mut self, upper: u32, pages: u32) -> u32 {
        if self.node(upper).digests.len() == pages as usize {
            return upper;
        }
        let lower = self.free_slot();
        let page_size = self.page_size;
        let node = self.node_mut(upper);
        let digests = node.digests.split_off(pages as usize);
        let (namespace, used) = (node.namespace, node.used);
        let children = std::mem::replace(&mut node.children, vec![lower]);
        let made = (node.made.0, node.end());
        let source = node.source.map(|source| source.further(pages as usize, page_size));
        for &child in &children {
            self.node_mut(child).parent = lower;
        }
        if children.is_empty() {
            self.leaves.remove(&(used, upper));
            self.leaves.insert((used, lower));
        }
        for (page, digest) in (pages..).zip(&digests) {
            self.unname(digest, Place { node: upper, page });
        }
        self.namespaces.acquire_id(namespace);
        self.nodes[lower as usize] =
            Some(Node { parent: upper, children, digests, namespace, used, made, source });
        self.name_pages(lower);
        lower
    }

    /// Puts the pages of a node into the table.
    fn name_pages(&mut self, at: u32) {
        let nodes = &self.nodes;
        let digest = |place: &Place| {
            &nodes[place.node as usize].as_ref().expect("a node").digests[place.page as usize]
        };
        let pages = nodes[at as usize].as_ref().expect("a node").digests.len() as u32;
        for page in 0..pages {
            let place = Place { node: at, page };
            self.table.insert_unique(hash_of(digest(&place)), place, |place| hash_of(digest(place)));
        }
    }

    fn shrink(&mut self) {
        while self.pages() > self.capacity
            && let Some(&(_, oldest)) = self.leaves.first()
        {
            self.remove_leaf(oldest);
        }
    }

    /// Takes a page out of the table; its node may have forgotten it.
    fn unname(&mut self, digest: &Digest, place: Place) {
        if let Ok(entry) = self.table.find_entry(hash_of(digest), |found| *found == place) {
            entry.remove();
        }
    }

    fn remove_leaf(&mut self, at: u32) {
        let Some(node) = self.nodes[at as usize].take() else { return };
        for (page, digest) in (0..).zip(&node.digests) {
            self.unname(digest, Place { node: at, page });
        }
        self.leaves.remove(&(node.used, at));
        self.namespaces.release(node.namespace);
        self.free.push(at);
        if node.parent == NONE {
            return;
        }
        let parent = self.node_mut(node.parent);
        parent.children.retain(|&child| child != at);
        // Whoever used the child has used what is before it.
        parent.used = parent.used.max(node.used);
        if parent.children.is_empty() {
            let used = parent.used;
            self.leaves.insert((used, node.parent));
        }
    }

    /// Recomputes what the tree keeps up as it goes, and compares.
    pub fn check_invariants(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::Invariant(text));
        let (mut pages, mut leaves, mut live) = (0, 0, 0);
        for (at, node) in (0..).zip(&self.nodes) {
            let Some(node) = node else { continue };
            live += 1;
            pages += node.digests.len();
            if node.digests.is_empty() {
                return wrong(format!("node {at} has no page"));
            }
            for (page, digest) in (0..).zip(&node.digests) {
                if self.find(digest) != Some(Place { node: at, page }) {
                    return wrong(format!("page {page} of node {at} is not found"));
                }
            }
            if node.children.is_empty() != self.leaves.contains(&(node.used, at)) {
                return wrong(format!("node {at} has {} children as a leaf", node.children.len()));
            }
            leaves += usize::from(node.children.is_empty());
            for &child in &node.children {
                let child_node = self.nodes[child as usize].as_ref();
                if !child_node.is_some_and(|child| child.parent == at && child.made > node.made) {
                    return wrong(format!("node {child} is no child of node {at}: {child_node:?}"));
                }
            }
            if node.parent != NONE && !self.node(node.parent).children.contains(&at) {
                return wrong(format!("node {at} is no child of node {}", node.parent));
            }
        }
        if (pages, leaves, live) != (self.pages(), self.leaves.len(), self.len()) {
            return wrong(format!("{pages} pages, {leaves} leaves, {live} nodes, others are kept"));
        }
        if pages > self.capacity {
            return wrong(format!("{pages} pages, the capacity is {}", self.capacity));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
