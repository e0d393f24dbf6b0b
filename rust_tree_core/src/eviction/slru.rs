//! Segmented LRU: what was hit often enough is protected and goes last.

use super::{Access, Entry, Key, OptionSpec, OptionValues, Policy};

pub(super) static ENTRY: Entry = Entry {
    name: "slru",
    summary: "Nodes with fewer than protected_threshold hits go first, then least recently used",
    options: &[OptionSpec {
        name: "protected_threshold",
        default: 2,
        min: 1,
        help: "hits from which a node is protected",
    }],
    build: |values: OptionValues<'_>| Box::new(Slru { threshold: values[0].unsigned_abs() }),
};

#[derive(Debug)]
struct Slru {
    threshold: u64,
}

impl Policy for Slru {
    fn key(&self, access: &Access) -> Key {
        Key(i64::from(access.hits >= self.threshold), access.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order() {
        let key = |hits, last| Slru { threshold: 2 }.key(&Access { last, hits, ..Access::default() });
        assert!(key(1, 9) < key(2, 1));
        assert!(key(7, 1) < key(2, 2));
        assert!(key(0, 2) > key(1, 1));
    }
}
