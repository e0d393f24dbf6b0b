//! Last made goes first.

use super::{Access, Entry, Key, OptionValues, Policy};

pub(super) static ENTRY: Entry = Entry {
    name: "filo",
    summary: "Last made goes first",
    options: &[],
    build: |_: OptionValues<'_>| Box::new(Filo),
};

#[derive(Debug)]
struct Filo;

impl Policy for Filo {
    fn key(&self, access: &Access) -> Key {
        Key(0, u64::MAX - access.created)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order() {
        let key = |last, created, hits, priority| {
            Filo.key(&Access { last, created, hits, priority, ..Access::default() })
        };
        assert!(key(0, 2, 0, 0) < key(9, 1, 9, 9));
    }
}
