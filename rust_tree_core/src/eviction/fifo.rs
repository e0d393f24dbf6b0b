//! First made goes first.

use super::{Access, Entry, Key, OptionValues, Policy};

pub(super) static ENTRY: Entry = Entry {
    name: "fifo",
    summary: "First made goes first",
    options: &[],
    build: |_: OptionValues<'_>| Box::new(Fifo),
};

#[derive(Debug)]
struct Fifo;

impl Policy for Fifo {
    fn key(&self, access: &Access) -> Key {
        Key(0, access.created)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order() {
        let key = |last, created, hits, priority| {
            Fifo.key(&Access { last, created, hits, priority, ..Access::default() })
        };
        assert!(key(9, 1, 9, 9) < key(0, 2, 0, 0));
    }
}
