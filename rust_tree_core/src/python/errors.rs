//! The classes of `unified_cache.errors`, found when they are first needed.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::Error;

const MODULE: &str = "unified_cache.errors";

macro_rules! error_class {
    ($function:ident, $name:literal) => {
        pub(super) fn $function(py: Python<'_>, text: String) -> PyErr {
            static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
            match CLASS.import(py, MODULE, $name) {
                Ok(class) => PyErr::from_type(class.clone(), (text,)),
                Err(error) => error,
            }
        }
    };
}

error_class!(argument_error, "ArgumentError");
error_class!(unknown_node_error, "UnknownNodeError");
error_class!(lock_error, "LockError");
error_class!(invariant_error, "InvariantError");
error_class!(poisoned_error, "PoisonedError");

/// The Python error for an error of the tree.
pub(super) fn tree_error(py: Python<'_>, error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Argument(_) => argument_error(py, text),
        Error::UnknownNode(_) => unknown_node_error(py, text),
        Error::Lock(_) => lock_error(py, text),
        Error::Invariant(_) => invariant_error(py, text),
    }
}
