//! Most recently used goes first.

use super::{Access, Entry, Key, OptionValues, Policy};

pub(super) static ENTRY: Entry = Entry {
    name: "mru",
    summary: "Most recently used goes first",
    options: &[],
    build: |_: OptionValues<'_>| Box::new(Mru),
};

#[derive(Debug)]
struct Mru;

impl Policy for Mru {
    fn key(&self, access: &Access) -> Key {
        Key(0, u64::MAX - access.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order() {
        let key = |last, created, hits, priority| {
            Mru.key(&Access { last, created, hits, priority, ..Access::default() })
        };
        assert!(key(2, 0, 0, 0) < key(1, 9, 9, 9));
    }
}
