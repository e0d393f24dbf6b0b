//! Namespaces: (`extra_key`, `cache_salt`), part of a prefix's identity in every tier.
//!
//! A node names its namespace by a small number; the strings are kept once, for as long as a node uses them.

use std::collections::HashMap;

use crate::hash::{Digest, namespace_seed};

/// `LoRA` id, weight version, tenant: keys of different namespaces never share a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Namespace<'a> {
    /// `LoRA` id, weight version or the like.
    pub extra_key: Option<&'a str>,
    /// Salt of a tenant.
    pub cache_salt: Option<&'a str>,
}

/// Index of a namespace in [`Namespaces`].
pub(crate) type NamespaceId = u32;

/// The namespace without key and salt; always there.
pub(crate) const PLAIN: NamespaceId = 0;

type Parts = (Option<Box<str>>, Option<Box<str>>);

#[derive(Debug, Default)]
struct Entry {
    parts: Parts,
    seed: Option<Digest>,
    nodes: u64,
}

/// The namespaces that nodes of one tree use, counted.
#[derive(Debug)]
pub(crate) struct Namespaces {
    entries: Vec<Entry>,
    free: Vec<NamespaceId>,
    by_parts: HashMap<Parts, NamespaceId>,
}

impl Namespaces {
    pub fn new() -> Self {
        Self { entries: vec![Entry::default()], free: Vec::new(), by_parts: HashMap::new() }
    }

    /// The namespace's id, if any node uses it.
    pub fn find(&self, namespace: Namespace<'_>) -> Option<NamespaceId> {
        if namespace == Namespace::default() {
            return Some(PLAIN);
        }
        self.by_parts.get(&owned(namespace)).copied()
    }

    /// The namespace's id for a new node; to be given back by `release`.
    pub fn acquire(&mut self, namespace: Namespace<'_>) -> NamespaceId {
        let id = self.find(namespace).unwrap_or_else(|| self.add(namespace));
        self.acquire_id(id);
        id
    }

    /// One more node uses a namespace that some node uses.
    pub fn acquire_id(&mut self, id: NamespaceId) {
        self.entries[id as usize].nodes += 1;
    }

    /// A node has left; with the last one the strings go too.
    pub fn release(&mut self, id: NamespaceId) {
        let entry = &mut self.entries[id as usize];
        entry.nodes -= 1;
        if entry.nodes == 0 && id != PLAIN {
            let entry = std::mem::take(entry);
            self.by_parts.remove(&entry.parts);
            self.free.push(id);
        }
    }

    /// The namespace's parts.
    pub fn get(&self, id: NamespaceId) -> Namespace<'_> {
        let (extra_key, cache_salt) = &self.entries[id as usize].parts;
        Namespace { extra_key: extra_key.as_deref(), cache_salt: cache_salt.as_deref() }
    }

    /// What stands before the digest of the namespace's first page.
    pub fn seed(&self, id: NamespaceId) -> Option<Digest> {
        self.entries[id as usize].seed
    }

    /// Number of nodes that use the namespace.
    pub fn nodes(&self, id: NamespaceId) -> u64 {
        self.entries[id as usize].nodes
    }

    /// Ids in use, the plain one included.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    fn add(&mut self, namespace: Namespace<'_>) -> NamespaceId {
        let entry = Entry { parts: owned(namespace), seed: namespace_seed(namespace), nodes: 0 };
        let id = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry::default());
            (self.entries.len() - 1) as NamespaceId
        });
        self.by_parts.insert(entry.parts.clone(), id);
        self.entries[id as usize] = entry;
        id
    }
}

fn owned(namespace: Namespace<'_>) -> Parts {
    (namespace.extra_key.map(Box::from), namespace.cache_salt.map(Box::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_live_as_long_as_their_nodes() {
        let mut table = Namespaces::new();
        let a = Namespace { extra_key: Some("a"), cache_salt: None };
        let b = Namespace { extra_key: None, cache_salt: Some("a") };
        assert_eq!(table.find(a), None);
        let id = table.acquire(a);
        assert_ne!(table.acquire(b), id);
        assert_eq!(table.acquire(a), id);
        assert_eq!((table.get(id), table.find(a), table.nodes(id)), (a, Some(id), 2));
        table.release(id);
        table.release(id);
        assert_eq!((table.find(a), table.len()), (None, 2));
        assert_eq!(table.acquire(Namespace { extra_key: Some("c"), ..a }), id);
        assert_eq!(table.find(Namespace::default()), Some(PLAIN));
    }
}
