//! One table for all child edges of the tree: (parent, namespace, first page) to child.
//!
//! A look-up hashes the page once, with keys drawn anew in every process, and finds the child with one probe
//! whatever the number of siblings; the page itself is compared before a child is believed.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

use super::node::Slot;
use crate::namespace::NamespaceId;
use crate::tokens::{Shape, Word, page_sum};

#[derive(Debug)]
struct Edge {
    hash: u64,
    child: Slot,
}

#[derive(Debug)]
pub(crate) struct Edges {
    table: HashTable<Edge>,
    /// Each below 2^32.
    keys: Box<[u64]>,
    seed: u64,
}

impl Edges {
    pub fn new(shape: Shape) -> Self {
        let random = RandomState::new();
        let keys = (0..=shape.width() + 1).map(|i| random.hash_one(i) >> 32).collect();
        Self { table: HashTable::new(), keys, seed: random.hash_one(u64::MAX) }
    }

    /// Hash of the edge from `parent` under `page` (one page of raw tokens).
    #[inline]
    pub fn hash<W: Word>(&self, parent: Slot, namespace: NamespaceId, page: &[W]) -> u64 {
        let from = u64::from(parent) << 32 | u64::from(namespace);
        mix(page_sum(page, &self.keys) ^ self.seed, from ^ self.seed.rotate_left(32))
    }

    /// The child with this hash that `is` confirms.
    #[inline]
    pub fn find(&self, hash: u64, mut is: impl FnMut(Slot) -> bool) -> Option<Slot> {
        self.table.find(hash, |edge| edge.hash == hash && is(edge.child)).map(|edge| edge.child)
    }

    pub fn insert(&mut self, hash: u64, child: Slot) {
        self.table.insert_unique(hash, Edge { hash, child }, |edge| edge.hash);
    }

    /// Takes the edge to `child` out; false if there was none.
    pub fn remove(&mut self, hash: u64, child: Slot) -> bool {
        match self.table.find_entry(hash, |edge| edge.child == child) {
            Ok(entry) => {
                entry.remove();
                true
            }
            Err(_) => false,
        }
    }

    pub fn len(&self) -> usize {
        self.table.len()
    }
}

/// Folds the full product of two words: every bit of both reaches every bit of the result.
#[inline]
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x9E37_79B9_7F4A_7C15) * u128::from(b ^ 0xD1B5_4A32_D192_ED03);
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_namespaces_and_parents_are_told_apart() {
        let shape = Shape::new(4, false).unwrap();
        let mut edges = Edges::new(shape);
        let page = |i: u32| [i, i + 1, i + 2, i + 3];
        for child in 0..1000 {
            edges.insert(edges.hash(child % 3, child % 2, &page(child)), child);
        }
        for child in 0..1000 {
            let hash = edges.hash(child % 3, child % 2, &page(child).map(i64::from));
            assert_eq!(edges.find(hash, |slot| slot == child), Some(child));
            assert_eq!(edges.find(edges.hash(child % 3, 1 - child % 2, &page(child)), |_| true), None);
            assert_eq!(edges.find(edges.hash(child % 3 + 1, child % 2, &page(child)), |_| true), None);
        }
        let hash = edges.hash(0, 0, &page(0));
        assert!(edges.remove(hash, 0));
        assert!(!edges.remove(hash, 0));
        assert_eq!((edges.find(hash, |_| true), edges.len()), (None, 999));
    }

    #[test]
    fn equal_hashes_are_not_believed() {
        let mut edges = Edges::new(Shape::new(1, false).unwrap());
        edges.insert(7, 1);
        edges.insert(7, 2);
        assert_eq!(edges.find(7, |slot| slot == 2), Some(2));
        assert_eq!(edges.find(7, |_| false), None);
    }
}
