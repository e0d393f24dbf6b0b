//! Fewest hits go first, then least recently used.

use super::{Access, Entry, Key, OptionValues, Policy};

pub(super) static ENTRY: Entry = Entry {
    name: "lfu",
    summary: "Fewest hits go first, then least recently used",
    options: &[],
    build: |_: OptionValues<'_>| Box::new(Lfu),
};

#[derive(Debug)]
struct Lfu;

impl Policy for Lfu {
    fn key(&self, access: &Access) -> Key {
        Key(i64::try_from(access.hits).unwrap_or(i64::MAX), access.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order() {
        let key = |last, created, hits, priority| {
            Lfu.key(&Access { last, created, hits, priority, ..Access::default() })
        };
        assert!(key(9, 0, 1, 0) < key(1, 0, 2, 0));
        assert!(key(1, 9, 2, 9) < key(2, 0, 2, 0));
    }
}
