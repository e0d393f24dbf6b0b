//! Least recently used goes first.

use super::{Access, Entry, Key, OptionValues, Policy};

pub(super) static ENTRY: Entry = Entry {
    name: "lru",
    summary: "Least recently used goes first",
    options: &[],
    build: |_: OptionValues<'_>| Box::new(Lru),
};

#[derive(Debug)]
struct Lru;

impl Policy for Lru {
    fn key(&self, access: &Access) -> Key {
        Key(0, access.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order() {
        let key = |last, created, hits, priority| {
            Lru.key(&Access { last, created, hits, priority, ..Access::default() })
        };
        assert!(key(1, 9, 9, 9) < key(2, 0, 0, 0));
    }
}
