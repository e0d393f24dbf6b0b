//! Arguments: token and page buffers without a copy where their layout allows it, whole numbers, node ids.

use std::mem::{align_of, size_of};

use bytemuck::Pod;
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString, PyTuple};

use super::errors::{argument_error, unknown_node_error};
use super::show;
use crate::{Digest, NodeId, Tokens};

/// Integers of a caller: borrowed from its buffer, or converted.
pub(super) enum Words {
    U32(PyUntypedBuffer),
    I32(PyUntypedBuffer),
    I64(PyUntypedBuffer),
    Owned(Vec<i64>),
}

/// The elements of a buffer that was checked to hold contiguous, aligned, native `T`.
fn elements<T: Pod>(buffer: &PyUntypedBuffer) -> &[T] {
    if buffer.item_count() == 0 {
        return &[];
    }
    let start = buffer.buf_ptr().cast::<T>();
    debug_assert!(start.is_aligned() && buffer.item_size() == size_of::<T>());
    // SAFETY: `borrow` has checked that the buffer is one-dimensional, C-contiguous, of native items of
    // T's size and kind, and aligned. Its exporter keeps it alive and in place until the view is released,
    // and `buffer` outlives the slice. Python code that writes into the buffer meanwhile breaks the call's
    // contract, as it does for every reader of the buffer protocol; `T` is plain old data, so any bits are values.
    unsafe { std::slice::from_raw_parts(start, buffer.item_count()) }
}

impl Words {
    /// The integers of a buffer, a CPU tensor or a sequence; `name` is for messages.
    pub fn of(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
            return Self::convert(object, name);
        }
        if object.is_instance_of::<PyString>()
            || object.is_instance_of::<PyBytes>()
            || object.is_instance_of::<PyByteArray>()
        {
            return Err(unfit(object, name));
        }
        if let Ok(buffer) = PyUntypedBuffer::get(object) {
            if buffer.dimensions() != 1 {
                let text = format!("{name} has {} dimensions, one is needed", buffer.dimensions());
                return Err(argument_error(object.py(), text));
            }
            return match Self::borrow(buffer) {
                Some(words) => Ok(words),
                None => Self::convert(object, name),
            };
        }
        // A tensor gives its memory by `numpy()` (torch on a CPU) or by DLPack.
        for (method, through) in [("numpy", None), ("__dlpack__", Some("from_dlpack"))] {
            if !object.hasattr(method)? {
                continue;
            }
            let array = match through {
                None => object.call_method0(method),
                Some(function) => object.py().import("numpy")?.call_method1(function, (object,)),
            };
            let array = array.map_err(|error| {
                let text = format!("{name} can not be read on the CPU: {error}");
                argument_error(object.py(), text)
            })?;
            let Ok(buffer) = PyUntypedBuffer::get(&array) else { return Err(unfit(object, name)) };
            if buffer.dimensions() != 1 {
                let text = format!("{name} has {} dimensions, one is needed", buffer.dimensions());
                return Err(argument_error(object.py(), text));
            }
            return match Self::borrow(buffer) {
                Some(words) => Ok(words),
                None => Self::convert(&array, name),
            };
        }
        Self::convert(object, name)
    }

    /// The buffer as it is, if its items can be read in place.
    fn borrow(buffer: PyUntypedBuffer) -> Option<Self> {
        let format = buffer.format().to_bytes();
        let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
        if foreign.contains(format.first()?) || !buffer.is_c_contiguous() {
            return None;
        }
        let aligned = |size: usize| {
            buffer.item_size() == size && (buffer.buf_ptr() as usize).is_multiple_of(size)
        };
        const { assert!(align_of::<i64>() <= 8 && align_of::<u32>() <= 4) };
        match ElementType::from_format(buffer.format()) {
            ElementType::UnsignedInteger { bytes: 4 } if aligned(4) => Some(Self::U32(buffer)),
            ElementType::SignedInteger { bytes: 4 } if aligned(4) => Some(Self::I32(buffer)),
            ElementType::SignedInteger { bytes: 8 } if aligned(8) => Some(Self::I64(buffer)),
            _ => None,
        }
    }

    /// Number by number: for sequences and for buffers of other layouts.
    fn convert(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let Ok(items) = object.try_iter() else { return Err(unfit(object, name)) };
        let mut words = Vec::with_capacity(object.len().unwrap_or(0));
        for (at, item) in items.enumerate() {
            let item = item?;
            match item.extract::<i64>() {
                Ok(word) => words.push(word),
                Err(error) => {
                    let wanted = if error.is_instance_of::<PyOverflowError>(object.py()) {
                        format!("allowed is 0 to {}", u32::MAX)
                    } else {
                        "a whole number is needed".to_owned()
                    };
                    let text = format!("{name}[{at}] is {}, {wanted}", show(&item));
                    return Err(argument_error(object.py(), text));
                }
            }
        }
        Ok(Self::Owned(words))
    }

    pub fn len(&self) -> usize {
        match self {
            Self::U32(buffer) | Self::I32(buffer) | Self::I64(buffer) => buffer.item_count(),
            Self::Owned(words) => words.len(),
        }
    }

    /// The integers as tokens.
    pub fn tokens(&self) -> Tokens<'_> {
        match self {
            Self::U32(buffer) => Tokens::U32(elements(buffer)),
            Self::I32(buffer) => Tokens::I32(elements(buffer)),
            Self::I64(buffer) => Tokens::I64(elements(buffer)),
            Self::Owned(words) => Tokens::I64(words),
        }
    }
}

fn unfit(object: &Bound<'_, PyAny>, name: &str) -> PyErr {
    let kind = object.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    argument_error(
        object.py(),
        format!("{name} is a {kind}, needed is a buffer of int32, int64 or uint32, or a sequence of ints"),
    )
}

/// Page ids of a caller.
pub(super) enum PageIds {
    Borrowed(PyUntypedBuffer),
    Owned(Vec<u32>),
}

impl PageIds {
    pub fn as_slice(&self) -> &[u32] {
        match self {
            Self::Borrowed(buffer) => elements(buffer),
            Self::Owned(pages) => pages,
        }
    }
}

/// Page ids from the same kinds of object as tokens.
pub(super) fn page_ids(object: &Bound<'_, PyAny>, name: &str) -> PyResult<PageIds> {
    let words = match Words::of(object, name)? {
        Words::U32(buffer) => return Ok(PageIds::Borrowed(buffer)),
        words => words,
    };
    let checked = |at: usize, value: i64| {
        u32::try_from(value).map_err(|_| {
            argument_error(object.py(), format!("{name}[{at}] is {value}, allowed is 0 to {}", u32::MAX))
        })
    };
    let pages: PyResult<Vec<u32>> = match words.tokens() {
        Tokens::I64(words) => words.iter().enumerate().map(|(at, &word)| checked(at, word)).collect(),
        Tokens::I32(words) => words.iter().enumerate().map(|(at, &word)| checked(at, word.into())).collect(),
        Tokens::U32(words) => Ok(words.to_vec()),
    };
    pages.map(PageIds::Owned)
}

/// Digests from a buffer of bytes (n times 32), or a sequence of 32-byte objects or hex strings; one hex string
/// is one digest.
pub(super) fn digests(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<Digest>> {
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(vec![from_hex(&text.to_string()).ok_or_else(|| not_a_digest(object, name))?]);
    }
    if let Ok(buffer) = PyUntypedBuffer::get(object) {
        let bytes = buffer.is_c_contiguous()
            && matches!(ElementType::from_format(buffer.format()), ElementType::UnsignedInteger { bytes: 1 });
        if !bytes || !buffer.item_count().is_multiple_of(32) {
            let text = format!("{name} is not a C-contiguous buffer of bytes, 32 a digest");
            return Err(argument_error(object.py(), text));
        }
        return Ok(elements::<u8>(&buffer).as_chunks::<32>().0.to_vec());
    }
    let Ok(items) = object.try_iter() else { return Err(not_a_digest(object, name)) };
    let mut rows = Vec::new();
    for (at, item) in items.enumerate() {
        let item = item?;
        match digests(&item, &format!("{name}[{at}]"))?.as_slice() {
            [digest] => rows.push(*digest),
            _ => return Err(not_a_digest(&item, &format!("{name}[{at}]"))),
        }
    }
    Ok(rows)
}

fn from_hex(text: &str) -> Option<Digest> {
    let mut digest = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(digest)
}

fn not_a_digest(object: &Bound<'_, PyAny>, name: &str) -> PyErr {
    argument_error(object.py(), format!("{name} is {}, needed are 32 bytes or 64 hex digits", show(object)))
}

/// A whole number that fits in 64 bits; what is beyond counts as the largest or smallest.
#[derive(Clone, Copy)]
pub(super) struct Whole(pub i64);

impl FromPyObject<'_, '_> for Whole {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match object.extract::<i64>() {
            Ok(number) => Ok(Self(number)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(if object.lt(0)? { i64::MIN } else { i64::MAX }))
            }
            Err(error) => Err(error),
        }
    }
}

impl Whole {
    /// The number, if it is not below what is allowed.
    pub fn at_least(self, py: Python<'_>, name: &str, min: i64) -> PyResult<usize> {
        match usize::try_from(self.0) {
            Ok(number) if self.0 >= min => Ok(number),
            _ => Err(argument_error(py, format!("{name} is {}, allowed is {min} or more", self.0))),
        }
    }
}

/// A node id; a number that can be no id is an unknown node.
pub(super) struct NodeArg(pub NodeId);

impl FromPyObject<'_, '_> for NodeArg {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match object.extract::<u64>() {
            Ok(id) => Ok(Self(id)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                let text = format!("node {} is not in this tree (dead, or never was)", show(&object));
                Err(unknown_node_error(object.py(), text))
            }
            Err(_) => {
                let text = format!("node is {}, a node id (int) is needed", show(&object));
                Err(PyTypeError::new_err(text))
            }
        }
    }
}

/// Node ids from any sequence or array of them.
pub(super) struct NodeList(pub Vec<NodeId>);

impl FromPyObject<'_, '_> for NodeList {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let ids = object.try_iter()?.map(|item| item?.extract::<NodeArg>().map(|arg| arg.0));
        ids.collect::<PyResult<Vec<_>>>().map(Self)
    }
}
