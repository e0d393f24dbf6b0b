//! What the unit tests of the tree's modules share.

use super::{Inserted, Match, Tree};
use crate::{InsertArgs, NodeId, Tokens, TreeConfig, WritePolicy};

/// A tree with this page size and write policy.
pub(crate) fn tree(page_size: usize, write_policy: Option<WritePolicy>) -> Tree {
    tree_with(TreeConfig { page_size, write_policy, ..TreeConfig::default() })
}

pub(crate) fn tree_with(config: TreeConfig) -> Tree {
    Tree::new(config).expect("the settings are good")
}

impl Tree {
    /// Inserts a key on the pages `first_page ..`.
    pub(crate) fn put(&mut self, tokens: &[u32], first_page: u32) -> Inserted {
        let count = self.shape.pages(tokens.len()) as u32;
        let pages: Vec<u32> = (first_page..first_page + count).collect();
        self.insert(InsertArgs::new(Tokens::U32(tokens), &pages)).expect("the key is good")
    }

    pub(crate) fn get(&mut self, tokens: &[u32]) -> Match {
        let found = self.match_prefix(Tokens::U32(tokens), crate::Namespace::default(), true);
        found.expect("the key is good")
    }

    /// Backs nodes up on host pages `first_page ..`, and takes the ack.
    pub(crate) fn backed_up(&mut self, nodes: &[NodeId], first_page: u32) {
        let plan = self.plan_backup(nodes);
        let pages: Vec<u32> = (first_page..).take(plan.pages).collect();
        let ack = self.begin_backup(&plan.nodes, &pages).expect("the plan is fresh");
        self.finish_backup(ack).expect("the ack is fresh");
    }

    /// Panics if an invariant does not hold.
    pub(crate) fn sound(&self) {
        if let Err(error) = self.check_invariants() {
            panic!("{error}");
        }
    }
}

pub(crate) fn keys(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}
