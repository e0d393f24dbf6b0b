//! Tail-optimised LRU (arXiv 2510.15152): what can not improve tail latency goes first.
//!
//! A branch whose high-water depth is L, and whose next prompt is expected to add Q tokens, needs
//! L + Q - threshold tokens cached to keep its next prefill within the threshold. A node that lies past
//! that budget is tail-safe: it goes before all others.

use super::{Access, Entry, Key, OptionSpec, OptionValues, Policy};

pub(super) static ENTRY: Entry = Entry {
    name: "tlru",
    summary: "Nodes past their branch's tail budget go first, then least recently used",
    options: &[
        OptionSpec {
            name: "next_prompt_estimate",
            default: 0,
            min: 0,
            help: "tokens that the next prompt of a conversation is expected to add",
        },
        OptionSpec {
            name: "threshold",
            default: 0,
            min: 0,
            help: "tokens that a prefill may compute within the latency budget",
        },
    ],
    build: |values: OptionValues<'_>| Box::new(Tlru { slack: i128::from(values[0]) - i128::from(values[1]) }),
};

#[derive(Debug)]
struct Tlru {
    /// `next_prompt_estimate - threshold`
    slack: i128,
}

impl Policy for Tlru {
    fn key(&self, access: &Access) -> Key {
        let budget = (i128::from(access.history) + self.slack).max(0);
        let tail_safe = i128::from(access.start) >= budget;
        Key(-i64::from(tail_safe), access.last)
    }

    fn needs_history(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order() {
        let policy = Tlru { slack: 5 - 10 };
        let key = |start, history, last| policy.key(&Access { last, start, history, ..Access::default() });
        assert!(key(15, 20, 9) < key(14, 20, 1)); // budget 15: only what begins at 15 or later is safe
        assert!(key(0, 5, 9) < key(0, 6, 1)); // budget 0: the whole branch is safe
        assert!(key(14, 20, 1) < key(14, 20, 2));
    }
}
