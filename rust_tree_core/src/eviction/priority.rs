//! Lowest priority goes first, then least recently used.

use super::{Access, Entry, Key, OptionValues, Policy};

pub(super) static ENTRY: Entry = Entry {
    name: "priority",
    summary: "Lowest priority goes first, then least recently used",
    options: &[],
    build: |_: OptionValues<'_>| Box::new(Priority),
};

#[derive(Debug)]
struct Priority;

impl Policy for Priority {
    fn key(&self, access: &Access) -> Key {
        Key(access.priority, access.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order() {
        let key = |last, created, hits, priority| {
            Priority.key(&Access { last, created, hits, priority, ..Access::default() })
        };
        assert!(key(9, 0, 0, -1) < key(1, 0, 0, 0));
        assert!(key(1, 9, 9, 3) < key(2, 0, 0, 3));
    }
}
