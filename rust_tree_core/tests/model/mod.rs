//! An obvious model of the prefix tree, and what drives the production tree against it.

pub mod driver;
pub mod failure;
pub mod random;
pub mod regressions;
pub mod script;
pub mod shrink;
pub mod tokens;
pub mod tree;
