//! What can be wrong with a copy; nothing has moved when it is said.

use std::fmt;

/// A bad argument; the text names it, its value and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(pub(crate) String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Shorthand for an [`Error`] made with `format!`.
macro_rules! bad_argument {
    ($($arg:tt)*) => { $crate::error::Error(format!($($arg)*)) };
}
pub(crate) use bad_argument;
