//! Host insert: what was read from storage joins the tree as host copies.

use super::Tree;
use super::node::{Pages, Slot};
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
    /// Digests of these pages, if known: they are not computed again.
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
        let result = with_words!(args.tokens, words => self.insert_host_words(anchor, words, &args, &mut path));
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
        let unwanted = HostInserted {
            node: node.id,
            duplicate_host_pages: args.host_pages.to_vec(),
            inserted_pages: 0,
        };
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
            let theirs = &args.host_pages[pages.clone()];
            if let Some(hashes) = args.hashes {
                let node = &mut self.nodes[slot as usize];
                node.digests.get_or_insert_with(|| hashes[pages].into());
            }
            if self.nodes[slot as usize].backed() {
                out.duplicate_host_pages.extend_from_slice(theirs);
                continue;
            }
            out.inserted_pages += theirs.len();
            self.set_host_value(slot, Pages::from(theirs), None);
            self.end_hold(slot);
            self.emit_stored(slot, Tier::Host);
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
                self.nodes[slot as usize].digests = Some(hashes[page..].into());
            }
            out.inserted_pages += total - page;
            self.set_host_value(slot, Pages::from(&args.host_pages[page..]), None);
            self.emit_stored(slot, Tier::Host);
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
            self.edit(slot, |node| node.hold = 0);
        }
    }
}
