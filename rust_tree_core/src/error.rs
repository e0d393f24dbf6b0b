//! What can go wrong, in four kinds. A call that returns an error has changed nothing.

use std::fmt;

use crate::NodeId;

/// The kinds of error that the tree reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A bad argument or setting; the text names it, its value and what is allowed.
    Argument(String),
    /// No node with this id lives in this tree.
    UnknownNode(NodeId),
    /// A receipt, plan or ack that does not belong, was used before, or can not be taken back now.
    Lock(String),
    /// An invariant does not hold (only from `check_invariants`).
    Invariant(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument(text) | Self::Lock(text) => f.write_str(text),
            Self::UnknownNode(id) => write!(f, "node {id} is not in this tree (dead, or never was)"),
            Self::Invariant(text) => write!(f, "invariant violated: {text}"),
        }
    }
}

impl std::error::Error for Error {}

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Shorthand for an [`Error::Argument`] made with `format!`.
macro_rules! bad_argument {
    ($($arg:tt)*) => { $crate::error::Error::Argument(format!($($arg)*)) };
}
/// Shorthand for an [`Error::Lock`] made with `format!`.
macro_rules! bad_lock {
    ($($arg:tt)*) => { $crate::error::Error::Lock(format!($($arg)*)) };
}
pub(crate) use {bad_argument, bad_lock};
