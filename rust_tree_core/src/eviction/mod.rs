//! Which node goes first: the policies' trait, their registry, and the order that lives across calls.
//!
//! A policy turns what is known of a node into a [`Key`]; the smallest key goes first, ties go to the lower
//! node id. To add one: a file beside the others with its `ENTRY`, and one line in [`REGISTRY`].

mod fifo;
mod filo;
mod lfu;
mod lru;
mod mru;
mod priority;
mod slru;
mod tlru;

pub(crate) mod order;

use std::fmt::Debug;

use crate::error::{Result, bad_argument};

/// What a policy may look at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Access {
    /// Stamp of the last match or insert; larger is later, deeper nodes of one call are later.
    pub last: u64,
    /// Stamp at which the node was made.
    pub created: u64,
    /// Counted inserts.
    pub hits: u64,
    /// Highest priority that a request brought.
    pub priority: i64,
    /// Positions before the node on its path.
    pub start: u64,
    /// The branch's high-water depth in positions.
    pub history: u64,
}

/// Place in the order of eviction: compared field by field, smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(pub i64, pub u64);

/// A policy. The key MUST depend on nothing but the access data given: the tree asks for it again whenever
/// one of them changes, and only then.
pub trait Policy: Debug + Send + Sync {
    /// Where a node with this access data stands.
    fn key(&self, access: &Access) -> Key;

    /// True if the key depends on `history`: keeping it up walks the whole path at each new node, so the tree
    /// does it only for those who ask.
    fn needs_history(&self) -> bool {
        false
    }
}

/// A whole-number option of a policy.
#[derive(Debug)]
pub struct OptionSpec {
    /// Its name in `policy_options`.
    pub name: &'static str,
    /// Used when it is not given.
    pub default: i64,
    /// Smallest value allowed.
    pub min: i64,
    /// One line for help texts.
    pub help: &'static str,
}

/// Values for the options of one entry, in the order of its specs.
pub type OptionValues<'a> = &'a [i64];

/// A policy's line in the registry: lists, help and errors are made from it.
#[derive(Debug)]
pub struct Entry {
    /// The name that settings use.
    pub name: &'static str,
    /// One line: what goes first.
    pub summary: &'static str,
    /// Its options.
    pub options: &'static [OptionSpec],
    /// Makes the policy from values that were checked against `options`.
    pub build: fn(OptionValues<'_>) -> Box<dyn Policy>,
}

/// Every policy, the default first.
pub static REGISTRY: [&Entry; 8] = [
    &lru::ENTRY,
    &lfu::ENTRY,
    &fifo::ENTRY,
    &mru::ENTRY,
    &filo::ENTRY,
    &priority::ENTRY,
    &slru::ENTRY,
    &tlru::ENTRY,
];

/// Names of all policies, in the order of the registry.
pub fn policy_names() -> Vec<&'static str> {
    REGISTRY.iter().map(|entry| entry.name).collect()
}

/// Makes a policy from its name and options.
pub(crate) fn build(name: &str, options: &[(String, i64)]) -> Result<Box<dyn Policy>> {
    let entry = REGISTRY.iter().find(|entry| entry.name == name).ok_or_else(|| {
        bad_argument!("eviction_policy is {name:?}, allowed are {}", policy_names().join(", "))
    })?;
    let mut values: Vec<i64> = entry.options.iter().map(|option| option.default).collect();
    for (key, value) in options {
        let Some(at) = entry.options.iter().position(|option| option.name == key) else {
            let known: Vec<_> = entry.options.iter().map(|option| option.name).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(bad_argument!("policy_options has {key:?}, options of {name} are: {known}"));
        };
        let min = entry.options[at].min;
        if *value < min {
            return Err(bad_argument!("policy_options[{key:?}] is {value}, allowed is {min} or more"));
        }
        values[at] = *value;
    }
    Ok((entry.build)(&values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_options_are_checked_against_the_registry() {
        assert_eq!(policy_names(), ["lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru"]);
        let text = build("lrux", &[]).unwrap_err().to_string();
        assert!(text.contains("\"lrux\"") && text.contains("lru, lfu, fifo"), "{text}");
        let text = build("slru", &[("treshold".to_owned(), 3)]).unwrap_err().to_string();
        assert!(text.contains("protected_threshold"), "{text}");
        let text = build("lru", &[("x".to_owned(), 3)]).unwrap_err().to_string();
        assert!(text.ends_with("none"), "{text}");
        let text = build("slru", &[("protected_threshold".to_owned(), 0)]).unwrap_err().to_string();
        assert!(text.contains("is 0, allowed is 1 or more"), "{text}");
    }
}
