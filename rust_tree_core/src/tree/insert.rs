//! Insert: what a request has computed becomes part of the tree.

use super::node::{Pages, Slot};
use super::walk::{PageRuns, WalkEnd};
use super::{Ack, Tree};
use crate::NodeId;
use crate::error::{Result, bad_argument};
use crate::events::Tier;
use crate::namespace::Namespace;
use crate::tokens::{Tokens, Word, check_range, copy_checked, with_words};

/// What is inserted, and what the tree must know of the request.
#[derive(Clone, Copy, Debug)]
pub struct InsertArgs<'a> {
    /// The key from the first token on.
    pub tokens: Tokens<'a>,
    /// A device page for each whole page of the key.
    pub pages: &'a [u32],
    /// Tokens at the head whose pages the caller borrowed from the tree; a multiple of the page size.
    pub prev_prefix_len: usize,
    /// Tokens at the head that this request has inserted before: their nodes get no hit again.
    pub inserted_len: usize,
    /// Namespace of the key.
    pub namespace: Namespace<'a>,
    /// Raises every node of the path to at least this.
    pub priority: i64,
    /// A part of a prefill: counts no hit.
    pub chunked: bool,
}

impl<'a> InsertArgs<'a> {
    /// A request that borrowed nothing, in no namespace.
    pub fn new(tokens: Tokens<'a>, pages: &'a [u32]) -> Self {
        Self {
            tokens,
            pages,
            prev_prefix_len: 0,
            inserted_len: 0,
            namespace: Namespace::default(),
            priority: 0,
            chunked: false,
        }
    }
}

/// What an insert did. Lengths are in tokens (bigram: positions).
#[derive(Clone, Debug)]
pub struct Inserted {
    /// Length that the tree had before, on either tier.
    pub prefix_len: usize,
    /// Pages of the caller that it must free: the tree has others there.
    pub duplicate_pages: Vec<u32>,
    /// Where the inserted key ends; the root if it is shorter than a page.
    pub node: NodeId,
    /// What the write policy wants on host now, ancestors first.
    pub backup_nodes: Vec<NodeId>,
    /// The youngest load-back that a part of these pages waits for.
    pub pending_ack: Option<Ack>,
    /// The tree's own pages for the whole key.
    pub device: PageRuns,
}

impl Inserted {
    /// The tree's own pages for the whole key, in memory of their own.
    pub fn device_pages(&self) -> Vec<u32> {
        self.device.to_vec()
    }
}

impl Tree {
    /// Inserts the whole pages of a key; the tail that fills no page stays the caller's.
    pub fn insert(&mut self, args: InsertArgs<'_>) -> Result<Inserted> {
        let mut path = std::mem::take(&mut self.path);
        let result = with_words!(args.tokens, words => self.insert_words(words, &args, &mut path));
        self.path = path;
        result
    }

    fn insert_words<W: Word>(
        &mut self,
        key: &[W],
        args: &InsertArgs<'_>,
        path: &mut Vec<Slot>,
    ) -> Result<Inserted> {
        let shape = self.shape;
        let total = shape.pages(key.len());
        if args.pages.len() != total {
            return Err(bad_argument!(
                "pages has {} entries, {} tokens fill {total} whole pages of {}",
                args.pages.len(),
                key.len(),
                shape.page
            ));
        }
        let end = self.walk(key, self.namespaces.find(args.namespace), true, path);
        self.check_prev_prefix(args.prev_prefix_len, path, end)?;
        let new_tokens = if end.pages < total {
            let from = end.pages * shape.page;
            let tokens = copy_checked(shape.run(key, end.pages, total), from)?;
            check_range(&key[total * shape.page..], total * shape.page)?;
            Some(tokens)
        } else {
            check_range(&key[end.equal..], end.equal)?;
            None
        };

        // Everything is checked: from here on nothing fails.
        if let Some((slot, pages)) = end.partial {
            path.push(self.cut(slot, pages));
        }
        let mut duplicate_pages = Vec::new();
        let borrowed = args.prev_prefix_len / shape.page;
        let mut page = 0;
        for &slot in &*path {
            let node = &self.nodes[slot as usize];
            let (from, to) = (page, page + node.len as usize);
            page = to;
            let theirs = &args.pages[from..to];
            if node.on_device() {
                let ours = node.device_pages();
                let skip = borrowed.clamp(from, to) - from;
                let pairs = theirs.iter().zip(ours).skip(skip);
                duplicate_pages.extend(pairs.filter(|(page, own)| page != own).map(|(page, _)| page));
            } else {
                self.set_value(slot, Pages::from(theirs));
                self.emit_stored(slot, Tier::Device);
            }
        }
        self.stamp(path);
        if let Some(tokens) = new_tokens {
            let parent = path.last().copied().unwrap_or(self.root);
            let namespace = self.namespaces.acquire(args.namespace);
            self.clock += 1;
            let slot = self.add_child(parent, namespace, tokens, self.clock);
            if args.priority != 0 {
                self.edit(slot, |node| node.priority = args.priority);
            }
            self.set_value(slot, Pages::from(&args.pages[page..]));
            self.emit_stored(slot, Tier::Device);
            path.push(slot);
        }
        let mut device = PageRuns::with_capacity(path.len());
        let mut backup_nodes = Vec::new();
        for &slot in &*path {
            self.count_hit(slot, args, &mut backup_nodes);
            let node = &self.nodes[slot as usize];
            if let Some(value) = &node.full().value {
                device.push(value, node.len);
            }
        }
        Ok(Inserted {
            prefix_len: end.pages * shape.page,
            duplicate_pages,
            node: self.nodes[path.last().copied().unwrap_or(self.root) as usize].id,
            backup_nodes,
            pending_ack: self.youngest_load(path),
            device,
        })
    }

    /// The borrowed prefix must be whole pages, all of them on device.
    fn check_prev_prefix(&self, prev_prefix_len: usize, path: &[Slot], end: WalkEnd) -> Result<()> {
        if prev_prefix_len == 0 {
            return Ok(());
        }
        let page = self.shape.page;
        if !prev_prefix_len.is_multiple_of(page) {
            return Err(bad_argument!(
                "prev_prefix_len is {prev_prefix_len}, allowed are multiples of page_size {page}"
            ));
        }
        let whole = path.iter().map(|&slot| (slot, self.nodes[slot as usize].len));
        let on_device: usize = whole
            .chain(end.partial)
            .take_while(|&(slot, _)| self.nodes[slot as usize].on_device())
            .map(|(_, pages)| pages as usize)
            .sum();
        if prev_prefix_len > on_device * page {
            return Err(bad_argument!(
                "prev_prefix_len is {prev_prefix_len}, of these tokens the device holds {}",
                on_device * page
            ));
        }
        Ok(())
    }

    /// Raises the priority, counts the hit, and names the node if the write policy wants it on host now.
    fn count_hit(&mut self, slot: Slot, args: &InsertArgs<'_>, backup_nodes: &mut Vec<NodeId>) {
        let node = &self.nodes[slot as usize];
        let counted = !args.chunked && node.end() as usize * self.shape.page > args.inserted_len;
        let priority = node.priority.max(args.priority);
        if !counted && priority == node.priority {
            return;
        }
        let hits = node.hits + u64::from(counted);
        self.edit(slot, |node| {
            node.hits = hits;
            node.priority = priority;
        });
        let node = &self.nodes[slot as usize];
        if counted && self.is_gap_free() && hits >= self.write_through_threshold && !node.backed() {
            backup_nodes.push(node.id);
        }
        self.refresh_key(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TreeConfig;
    use crate::WritePolicy;
    use crate::tree::testing::{keys, tree, tree_with};

    #[test]
    fn duplicates_are_the_callers_own_pages_past_what_it_borrowed() {
        let mut tree = tree(1, None);
        tree.put(&keys(0..4), 0);
        // Page 2 is the tree's own, 0 and 1 were borrowed, 13 is the caller's.
        let key = keys(0..6);
        let mut args = InsertArgs::new(Tokens::U32(&key), &[90, 91, 2, 13, 14, 15]);
        args.prev_prefix_len = 2;
        let done = tree.insert(args).unwrap();
        assert_eq!((done.prefix_len, done.duplicate_pages.clone()), (4, vec![13]));
        assert_eq!(done.device_pages(), [0, 1, 2, 3, 14, 15]);
        tree.sound();
    }

    #[test]
    fn an_evicted_node_adopts_the_callers_pages() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let node = tree.put(&keys(0..4), 0).node;
        tree.backed_up(&[node], 0);
        tree.evict(4, None);
        assert_eq!((tree.device_tokens(), tree.host_tokens()), (0, 4));
        let mut lock = tree.inc_lock_ref(node).unwrap();
        let done = tree.put(&keys(0..3), 10);
        assert_eq!(
            (done.prefix_len, done.duplicate_pages.len(), done.device_pages()),
            (3, 0, vec![10, 11, 12])
        );
        assert_eq!((tree.device_tokens(), tree.protected_tokens()), (3, 3));
        tree.dec_lock_ref(&mut lock).unwrap();
        assert_eq!((tree.protected_tokens(), tree.host_tokens()), (0, 4));
        tree.sound();
    }

    #[test]
    fn a_request_counts_once_a_node() {
        let mut tree = tree(2, None);
        let key = keys(0..8);
        let mut args = InsertArgs::new(Tokens::U32(&key[..4]), &[0, 1]);
        args.chunked = true;
        let upper = tree.insert(args).unwrap().node;
        assert_eq!(tree.node_info(upper).unwrap().hit_count, 0);
        args = InsertArgs::new(Tokens::U32(&key), &[0, 1, 2, 3]);
        args.inserted_len = 4;
        let lower = tree.insert(args).unwrap().node;
        let hits = |tree: &Tree, node| tree.node_info(node).unwrap().hit_count;
        assert_eq!((hits(&tree, upper), hits(&tree, lower)), (0, 1));
        tree.get(&key);
        tree.put(&key, 0);
        assert_eq!((hits(&tree, upper), hits(&tree, lower)), (1, 2));
    }

    #[test]
    fn the_write_policy_names_what_it_wants_on_host() {
        let key = keys(0..2);
        let named = |policy, threshold| {
            let config = TreeConfig {
                write_policy: policy,
                write_through_threshold: threshold,
                ..TreeConfig::default()
            };
            let mut tree = tree_with(config);
            (0..4).map(|_| tree.put(&key, 0).backup_nodes.len()).collect::<Vec<_>>()
        };
        assert_eq!(named(Some(WritePolicy::WriteThrough), None), [1, 1, 1, 1]); // nobody backs it up
        assert_eq!(named(Some(WritePolicy::WriteThroughSelective), None), [0, 0, 1, 1]);
        assert_eq!(named(Some(WritePolicy::WriteThroughSelective), Some(2)), [0, 1, 1, 1]);
        assert_eq!(named(Some(WritePolicy::WriteBack), None), [0, 0, 0, 0]);
        assert_eq!(named(None, None), [0, 0, 0, 0]);
    }

    #[test]
    fn bad_arguments_are_named_and_change_nothing() {
        let mut tree = tree(4, None);
        tree.put(&keys(0..8), 0);
        let before = (tree.digest(), tree.len());
        let key = keys(0..16);
        let try_insert = |tree: &mut Tree, pages: &[u32], prev_prefix_len| {
            let args = InsertArgs { prev_prefix_len, ..InsertArgs::new(Tokens::U32(&key), pages) };
            tree.insert(args).unwrap_err().to_string()
        };
        let text = try_insert(&mut tree, &[0, 1, 2], 0);
        assert_eq!(text, "pages has 3 entries, 16 tokens fill 4 whole pages of 4");
        let text = try_insert(&mut tree, &[0, 1, 2, 3], 6);
        assert_eq!(text, "prev_prefix_len is 6, allowed are multiples of page_size 4");
        let text = try_insert(&mut tree, &[0, 1, 2, 3], 12);
        assert_eq!(text, "prev_prefix_len is 12, of these tokens the device holds 8");
        assert_eq!((tree.digest(), tree.len()), before);
    }

    #[test]
    fn priority_only_rises() {
        let mut tree = tree(1, None);
        let key = keys(0..2);
        for (given, want) in [(-3, 0), (5, 5), (2, 5)] {
            let args = InsertArgs { priority: given, ..InsertArgs::new(Tokens::U32(&key), &[0, 1]) };
            let node = tree.insert(args).unwrap().node;
            assert_eq!(tree.node_info(node).unwrap().priority, if given == -3 { -3 } else { want });
        }
    }
}
