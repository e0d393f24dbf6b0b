//! Host insert: what was read from storage joins the tree as host copies.

use super::Tree;
use super::node::{Pages, Slot, flag};
use crate::NodeId;
use crate::error::{Result, bad_argument};
use crate::events::Tier;
use crate::hash::Digest;
use crate::namespace::Namespace;
use crate::tokens::{Tokens, Word, check_range, copy_checked, with_words};

/// What is inserted, and where.
#[derive(Clone, Copy, Debug)]
pub struct InsertHostArgs<'a> {
    /// The node at whose end the tokens begin.
    pub anchor: NodeId,
    /// The key from the anchor's end on. Bigram: it begins with the last raw token of the anchor's key.
    pub tokens: Tokens<'a>,
    /// A host page for each whole page of the key, filled already.
    pub host_pages: &'a [u32],
    /// Digests of these pages, if known: those of the node made are not computed again.
    pub hashes: Option<&'a [Digest]>,
    /// Needed at the root; elsewhere it is the anchor's, and must equal that if it is given.
    pub namespace: Namespace<'a>,
}

/// What a host insert did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostInserted {
    /// Deepest node of the path that was given.
    pub node: NodeId,
    /// Pages of the caller that it must free: the tree has others there, or does not want them.
    pub duplicate_host_pages: Vec<u32>,
    /// Pages that the tree took.
    pub inserted_pages: usize,
}

impl Tree {
    /// Adds host copies below a node: nodes that are only on device get theirs, nodes that have one leave the
    /// caller's, the rest becomes one node.
    ///
    /// Under the write-through policies nothing goes below a node without host copy.
    pub fn insert_host(&mut self, args: InsertHostArgs<'_>) -> Result<HostInserted> {
        self.need_host("insert_host")?;
        let anchor = self.slot(args.anchor)?;
        let mut path = std::mem::take(&mut self.path);
        let result =
            with_words!(args.tokens, words => self.insert_host_words(anchor, words, &args, &mut path));
        self.path = path;
        result
    }

    fn insert_host_words<W: Word>(
        &mut self,
        anchor: Slot,
        key: &[W],
        args: &InsertHostArgs<'_>,
        path: &mut Vec<Slot>,
    ) -> Result<HostInserted> {
        let shape = self.shape;
        let total = shape.pages(key.len());
        check_range(key, 0)?;
        self.check_host_args(anchor, key, args, total)?;

        let node = &self.nodes[anchor as usize];
        let unwanted =
            HostInserted { node: node.id, duplicate_host_pages: args.host_pages.to_vec(), inserted_pages: 0 };
        if total == 0 || (self.is_gap_free() && anchor != self.root && !node.backed()) {
            return Ok(unwanted);
        }
        let namespace =
            if anchor == self.root { self.namespaces.find(args.namespace) } else { Some(node.namespace) };
        path.clear();
        let mut walked = 0;
        let mut partial = None;
        if let Some(namespace) = namespace {
            let end = self.walk_from(anchor, namespace, key, true, path);
            (walked, partial) = (end.pages, end.partial);
        }
        self.check_host_hashes(path, partial, args.hashes)?;
        let new_tokens = if walked < total {
            Some(copy_checked(shape.run(key, walked, total), walked * shape.page)?)
        } else {
            None
        };

        // Everything is checked: from here on nothing fails.
        if let Some((slot, pages)) = partial {
            path.push(self.cut(slot, pages));
        }
        let mut out = HostInserted { duplicate_host_pages: Vec::new(), ..unwanted };
        let mut page = 0;
        for &slot in &*path {
            let pages = page..page + self.nodes[slot as usize].len as usize;
            page = pages.end;
            let theirs = &args.host_pages[pages];
            if self.nodes[slot as usize].backed() {
                out.duplicate_host_pages.extend_from_slice(theirs);
                continue;
            }
            out.inserted_pages += theirs.len();
            let published = self.set_host_value(slot, Pages::from(theirs), None);
            self.end_hold(slot);
            if published {
                self.emit_stored(slot, Tier::Host);
            }
        }
        if anchor != self.root {
            self.stamp(&[anchor]);
        }
        self.stamp(path);
        if let Some(tokens) = new_tokens {
            let parent = path.last().copied().unwrap_or(anchor);
            let priority = self.nodes[parent as usize].priority;
            let namespace = if anchor == self.root {
                self.namespaces.acquire(args.namespace)
            } else {
                let id = self.nodes[anchor as usize].namespace;
                self.namespaces.acquire_id(id);
                id
            };
            self.clock += 1;
            let slot = self.add_child(parent, namespace, tokens, self.clock);
            self.edit(slot, |node| node.priority = priority);
            if let Some(hashes) = args.hashes {
                let node = &mut self.nodes[slot as usize];
                node.digests = Some(hashes[page..].into());
                node.flags |= flag::DIGESTS_GIVEN;
            }
            out.inserted_pages += total - page;
            if self.set_host_value(slot, Pages::from(&args.host_pages[page..]), None) {
                self.emit_stored(slot, Tier::Host);
            }
            path.push(slot);
        }
        out.node = self.nodes[path.last().copied().unwrap_or(anchor) as usize].id;
        Ok(out)
    }

    fn check_host_args<W: Word>(
        &self,
        anchor: Slot,
        key: &[W],
        args: &InsertHostArgs<'_>,
        total: usize,
    ) -> Result<()> {
        if args.host_pages.len() != total {
            return Err(bad_argument!(
                "host_pages has {} entries, {} tokens fill {total} whole pages of {}",
                args.host_pages.len(),
                key.len(),
                self.shape.page
            ));
        }
        if let Some(hashes) = args.hashes
            && hashes.len() != total
        {
            return Err(bad_argument!("hashes has {} rows, the tokens fill {total} pages", hashes.len()));
        }
        if anchor == self.root {
            return Ok(());
        }
        let node = &self.nodes[anchor as usize];
        let own = self.namespaces.get(node.namespace);
        if args.namespace != Namespace::default() && args.namespace != own {
            return Err(bad_argument!(
                "extra_key and cache_salt are {:?} and {:?}, those of the anchor (node {}) are {:?} and {:?}",
                args.namespace.extra_key,
                args.namespace.cache_salt,
                node.id,
                own.extra_key,
                own.cache_salt
            ));
        }
        if self.shape.extra == 1
            && let (Some(first), Some(last)) = (key.first(), node.tokens.last())
            && !first.is(*last)
        {
            return Err(bad_argument!(
                "tokens[0] is {}, with bigram keys it must be the last token of the anchor's key, {last}",
                first.value()
            ));
        }
        Ok(())
    }

    /// Hashes that were computed must be those that are given: a difference would name pages wrongly.
    fn check_host_hashes(
        &self,
        path: &[Slot],
        partial: Option<(Slot, u32)>,
        hashes: Option<&[Digest]>,
    ) -> Result<()> {
        let Some(hashes) = hashes else { return Ok(()) };
        let whole = path.iter().map(|&slot| (slot, self.nodes[slot as usize].len));
        let mut page = 0;
        for (slot, pages) in whole.chain(partial) {
            let pages = pages as usize;
            let given = &hashes[page..page + pages];
            let own = self.nodes[slot as usize].digests();
            if let Some(at) = own.iter().zip(given).position(|(own, given)| own != given) {
                return Err(bad_argument!(
                    "hashes[{}] differs from the digest of these tokens that the tree has",
                    page + at
                ));
            }
            page += pages;
        }
        Ok(())
    }

    /// A held node has got a host copy by another way: the hold has nothing left to wait for.
    fn end_hold(&mut self, slot: Slot) {
        let node = &self.nodes[slot as usize];
        if !node.held() {
            return;
        }
        if node.hold == node.id {
            self.release_hold(slot);
        } else {
            self.set_hold(slot, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::testing::{keys, tree, tree_with};
    use crate::{Error, TreeConfig, WritePolicy};

    fn args<'a>(anchor: NodeId, tokens: &'a [u32], host_pages: &'a [u32]) -> InsertHostArgs<'a> {
        let tokens = Tokens::U32(tokens);
        InsertHostArgs { anchor, tokens, host_pages, hashes: None, namespace: Namespace::default() }
    }

    #[test]
    fn what_was_read_fills_gaps_and_adds_one_node() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let a = tree.put(&keys(0..2), 0).node;
        let b = tree.put(&keys(0..4), 0).node;
        tree.backed_up(&[a], 10);
        let key = keys(0..7);
        let done = tree.insert_host(args(tree.root(), &key, &keys(20..27))).unwrap();
        assert_eq!((done.duplicate_host_pages, done.inserted_pages), (vec![20, 21], 5));
        assert_eq!(tree.node_info(b).unwrap().host_pages, Some(vec![22, 23]));
        let found = tree.get(&key);
        assert_eq!((found.device_length, found.host_hit_length, found.last_host_node), (4, 3, done.node));
        tree.sound();
    }

    #[test]
    fn nothing_goes_below_an_unbacked_node_under_write_through() {
        for (policy, inserted) in [(WritePolicy::WriteThrough, 0), (WritePolicy::WriteBack, 2)] {
            let mut tree = tree(1, Some(policy));
            let node = tree.put(&keys(0..2), 0).node;
            let done = tree.insert_host(args(node, &[2, 3], &[5, 6])).unwrap();
            assert_eq!((done.inserted_pages, done.duplicate_host_pages.len()), (inserted, 2 - inserted));
            tree.sound();
        }
    }

    #[test]
    fn given_digests_are_not_computed_again_and_must_fit() {
        let mut tree = tree(2, Some(WritePolicy::WriteThrough));
        let key = keys(0..8);
        let hashes = crate::page_hashes(Tokens::U32(&key), 2, None, Namespace::default(), false).unwrap();
        let mut insert = InsertHostArgs { hashes: Some(&hashes), ..args(tree.root(), &key, &[0, 1, 2, 3]) };
        let node = tree.insert_host(insert).unwrap().node;
        assert_eq!((tree.prefix_hashes(node).unwrap(), tree.page_hash_count()), (hashes.clone(), 0));
        let wrong = [[7; 32], hashes[1], hashes[2], hashes[3]];
        insert.hashes = Some(&wrong);
        let text = tree.insert_host(insert).unwrap_err().to_string();
        assert!(text.starts_with("hashes[0] differs"), "{text}");
        insert.hashes = Some(&hashes[..3]);
        assert!(matches!(tree.insert_host(insert), Err(Error::Argument(_))));
        tree.sound();
    }

    #[test]
    fn the_namespace_is_that_of_the_anchor() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let (key, more) = (keys(0..2), keys(2..4));
        let a = Namespace { extra_key: Some("a"), cache_salt: None };
        let first = InsertHostArgs { namespace: a, ..args(tree.root(), &key, &[0, 1]) };
        let node = tree.insert_host(first).unwrap().node;
        let b = Namespace { extra_key: Some("b"), cache_salt: None };
        let second = InsertHostArgs { namespace: b, ..args(node, &more, &[2, 3]) };
        assert!(matches!(tree.insert_host(second), Err(Error::Argument(text)) if text.contains("extra_key")));
        tree.insert_host(args(node, &more, &[2, 3])).unwrap();
        let key = keys(0..4);
        assert_eq!(tree.match_prefix(Tokens::U32(&key), a, true).unwrap().host_hit_length, 4);
        tree.sound();
    }

    #[test]
    fn host_nodes_are_those_with_a_complete_copy_ancestors_first() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let a = tree.put(&keys(0..2), 0).node;
        let b = tree.put(&keys(0..4), 0).node;
        assert!(tree.host_nodes().is_empty());
        let ack = tree.begin_backup(&[a, b], &keys(10..14)).unwrap();
        assert!(tree.host_nodes().is_empty());
        tree.finish_backup(ack).unwrap();
        assert_eq!(tree.host_nodes(), [a, b]);
        // The upper part of a cut has the newer id.
        let upper = tree.get(&keys(0..1)).last_device_node;
        assert!(upper > a);
        assert_eq!(tree.host_nodes(), [upper, a, b]);
        tree.reset();
        assert!(tree.host_nodes().is_empty());
    }

    #[test]
    fn bigram_keys_go_on_where_the_anchor_ends() {
        let config = TreeConfig { page_size: 2, bigram: true, ..TreeConfig::default() };
        let mut tree = tree_with(config);
        let node = tree.insert_host(args(tree.root(), &[1, 2, 3], &[0])).unwrap().node;
        let text = tree.insert_host(args(node, &[4, 5, 6], &[1])).unwrap_err().to_string();
        assert!(text.starts_with("tokens[0] is 4,"), "{text}");
        tree.insert_host(args(node, &[3, 4, 5], &[1])).unwrap();
        assert_eq!(tree.get(&[1, 2, 3, 4, 5]).host_hit_length, 4);
        tree.sound();
    }
}
