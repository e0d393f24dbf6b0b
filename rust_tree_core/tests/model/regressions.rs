//! Scripts that once failed.
//!
//! To add one: paste the `Regression { .. }` that a failing test prints into the list, name it
//! after what went wrong, and import what it uses (`script::Source`, `tokens::Key`,
//! `rust_tree_core::WritePolicy`).

use super::script::{Call, Config};

pub struct Regression {
    pub name: &'static str,
    pub config: Config,
    pub calls: Vec<Call>,
}

pub fn regressions() -> Vec<Regression> {
    vec![]
}
