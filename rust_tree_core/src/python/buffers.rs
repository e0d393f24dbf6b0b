//! Arguments: token and page buffers without a copy where their layout allows it, whole numbers, node ids.

use bytemuck::Pod;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyMapping, PyString, PyTuple};

use super::errors::{argument_error, unknown_node_error};
use super::show;
use crate::{Digest, NodeId, Tokens};

/// Most entries of a sequence that are converted one by one; what is longer than this is a mistake, or should be
/// a buffer.
const MAX_CONVERTED: usize = 1 << 26;

/// Integers of a caller: borrowed from its memory, or converted.
pub(super) struct Words {
    data: Data,
    /// What keeps borrowed memory alive and in place.
    _owner: Owner,
}

enum Data {
    U32(*const u32, usize),
    I32(*const i32, usize),
    I64(*const i64, usize),
    Owned(Vec<i64>),
}

/// Held, never read: dropping it lets the memory go.
#[expect(dead_code)]
enum Owner {
    Array(Py<PyAny>),
    Buffer(PyUntypedBuffer),
    Nobody,
}

/// The elements at `start`, which was checked to hold `count` native, aligned, contiguous `T`.
///
/// # Safety
/// The memory must stay alive and in place for `'a`.
unsafe fn elements<'a, T: Pod>(start: *const T, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    debug_assert!(start.is_aligned());
    // SAFETY: checked by whoever took the pointer, see `of_array` and `borrow`; alive by this function's contract.
    // Python code that writes into the memory meanwhile breaks the call's contract, as it does for every reader of
    // the buffer protocol; `T` is plain old data, so any bits are values.
    unsafe { std::slice::from_raw_parts(start, count) }
}

impl Words {
    /// The integers of an array, a buffer, a CPU tensor or a sequence; `name` is for messages.
    pub fn of(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        if let Some(words) = Self::of_array(object) {
            return Ok(words);
        }
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
            return Self::of_buffer(object, buffer, name);
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
            return Self::of_buffer(&array, buffer, name);
        }
        // Mappings and sets can be iterated too, but have no positions.
        if object.cast::<PyMapping>().is_ok() || !object.hasattr("__getitem__")? {
            return Err(unfit(object, name));
        }
        Self::convert(object, name)
    }

    /// The usual case, without the cost of the buffer protocol: a plain numpy array of a width that is read in
    /// place.
    fn of_array(object: &Bound<'_, PyAny>) -> Option<Self> {
        let (data, array) = if let Ok(array) = object.cast::<PyArray1<i64>>() {
            (Data::I64(array.data(), array.len()), array.as_untyped())
        } else if let Ok(array) = object.cast::<PyArray1<u32>>() {
            (Data::U32(array.data(), array.len()), array.as_untyped())
        } else if let Ok(array) = object.cast::<PyArray1<i32>>() {
            (Data::I32(array.data(), array.len()), array.as_untyped())
        } else {
            return None;
        };
        let aligned = match data {
            Data::I64(start, _) => start.is_aligned(),
            Data::U32(start, _) => start.is_aligned(),
            Data::I32(start, _) => start.is_aligned(),
            Data::Owned(_) => true,
        };
        (aligned && array.is_c_contiguous())
            .then(|| Self { data, _owner: Owner::Array(object.clone().unbind()) })
    }

    fn of_buffer(object: &Bound<'_, PyAny>, buffer: PyUntypedBuffer, name: &str) -> PyResult<Self> {
        if buffer.dimensions() != 1 {
            let text = format!("{name} has {} dimensions, one is needed", buffer.dimensions());
            return Err(argument_error(object.py(), text));
        }
        match Self::borrow(buffer) {
            Some(words) => Ok(words),
            None => Self::convert(object, name),
        }
    }

    /// The buffer as it is, if its items can be read in place.
    fn borrow(buffer: PyUntypedBuffer) -> Option<Self> {
        let format = buffer.format().to_bytes();
        let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
        if foreign.contains(format.first()?) || !buffer.is_c_contiguous() {
            return None;
        }
        let (start, count) = (buffer.buf_ptr(), buffer.item_count());
        let aligned = |size: usize| buffer.item_size() == size && start.addr().is_multiple_of(size);
        const { assert!(align_of::<i64>() <= 8 && align_of::<u32>() <= 4) };
        let data = match ElementType::from_format(buffer.format()) {
            ElementType::UnsignedInteger { bytes: 4 } if aligned(4) => Data::U32(start.cast(), count),
            ElementType::SignedInteger { bytes: 4 } if aligned(4) => Data::I32(start.cast(), count),
            ElementType::SignedInteger { bytes: 8 } if aligned(8) => Data::I64(start.cast(), count),
            _ => return None,
        };
        Some(Self { data, _owner: Owner::Buffer(buffer) })
    }

    /// Number by number: for sequences and for buffers of other layouts.
    fn convert(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let Ok(items) = object.try_iter() else { return Err(unfit(object, name)) };
        let mut words = Vec::new();
        for (at, item) in items.enumerate() {
            let item = item?;
            if at == MAX_CONVERTED {
                let text = format!(
                    "{name} has more than {MAX_CONVERTED} entries: give a buffer instead of a sequence"
                );
                return Err(argument_error(object.py(), text));
            }
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
        Ok(Self { data: Data::Owned(words), _owner: Owner::Nobody })
    }

    /// The integers as tokens.
    pub fn tokens(&self) -> Tokens<'_> {
        // SAFETY: `_owner` keeps the memory as long as `self` lives.
        unsafe {
            match &self.data {
                Data::U32(start, count) => Tokens::U32(elements(*start, *count)),
                Data::I32(start, count) => Tokens::I32(elements(*start, *count)),
                Data::I64(start, count) => Tokens::I64(elements(*start, *count)),
                Data::Owned(words) => Tokens::I64(words),
            }
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

/// Page ids of a caller: borrowed if they are uint32, else converted.
pub(super) enum PageIds {
    Borrowed(Words),
    Owned(Vec<u32>),
}

impl PageIds {
    pub fn as_slice(&self) -> &[u32] {
        match self {
            Self::Owned(pages) => pages,
            Self::Borrowed(words) => match words.tokens() {
                Tokens::U32(pages) => pages,
                _ => unreachable!("only uint32 is borrowed"),
            },
        }
    }
}

/// Page ids from the same kinds of object as tokens.
pub(super) fn page_ids(object: &Bound<'_, PyAny>, name: &str) -> PyResult<PageIds> {
    let words = Words::of(object, name)?;
    let checked = |at: usize, value: i64| {
        u32::try_from(value).map_err(|_| {
            argument_error(object.py(), format!("{name}[{at}] is {value}, allowed is 0 to {}", u32::MAX))
        })
    };
    let pages: PyResult<Vec<u32>> = match words.tokens() {
        Tokens::U32(_) => return Ok(PageIds::Borrowed(words)),
        Tokens::I64(words) => words.iter().enumerate().map(|(at, &word)| checked(at, word)).collect(),
        Tokens::I32(words) => words.iter().enumerate().map(|(at, &word)| checked(at, word.into())).collect(),
    };
    pages.map(PageIds::Owned)
}

/// Digests from bytes (an array of shape (n, 32), or a buffer of n times 32), one hex string, or a sequence of
/// digests in either form.
pub(super) fn digests(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<Digest>> {
    if let Some(rows) = digest_rows(object, name)? {
        return Ok(rows);
    }
    if object.cast::<PyMapping>().is_ok() || !object.hasattr("__getitem__")? {
        return Err(not_a_digest(object, name));
    }
    let Ok(items) = object.try_iter() else { return Err(not_a_digest(object, name)) };
    let mut rows = Vec::new();
    for (at, item) in items.enumerate() {
        let item = item?;
        let name = format!("{name}[{at}]");
        match digest_rows(&item, &name)?.as_deref() {
            Some([digest]) => rows.push(*digest),
            _ => return Err(not_a_digest(&item, &name)),
        }
    }
    Ok(rows)
}

/// The digests of one hex string or one buffer; `None` if the object is neither.
fn digest_rows(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<Vec<Digest>>> {
    if let Ok(text) = object.cast::<PyString>() {
        let digest = text.to_str().ok().and_then(from_hex).ok_or_else(|| not_a_digest(object, name))?;
        return Ok(Some(vec![digest]));
    }
    let Ok(buffer) = PyUntypedBuffer::get(object) else { return Ok(None) };
    let bytes = buffer.is_c_contiguous()
        && matches!(ElementType::from_format(buffer.format()), ElementType::UnsignedInteger { bytes: 1 });
    let rows = match buffer.shape() {
        [count] => count.is_multiple_of(32),
        [_, width] => *width == 32,
        _ => false,
    };
    if !bytes || !rows {
        let text = format!("{name} is not a C-contiguous array of uint8 of shape (pages, 32)");
        return Err(argument_error(object.py(), text));
    }
    // SAFETY: contiguous bytes, and `buffer` outlives the slice.
    let bytes: &[u8] = unsafe { elements(buffer.buf_ptr().cast(), buffer.item_count()) };
    Ok(Some(bytes.as_chunks::<32>().0.to_vec()))
}

fn from_hex(text: &str) -> Option<Digest> {
    let mut digest = [0; 32];
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
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

/// A whole number as it was given; whether it is allowed is said by the call that knows its name.
#[derive(Clone)]
pub(super) enum Whole {
    Number(i64),
    /// Beyond 64 bits, and what it is.
    TooLarge(String),
    TooSmall(String),
    /// Not a whole number.
    Other(String),
}

impl FromPyObject<'_, '_> for Whole {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        Ok(match object.extract::<i64>() {
            Ok(number) => Self::Number(number),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                let text = show(&object);
                if object.lt(0)? { Self::TooSmall(text) } else { Self::TooLarge(text) }
            }
            Err(_) => Self::Other(show(&object)),
        })
    }
}

impl Whole {
    /// The number, if it is not below what is allowed; what is beyond 64 bits counts as the largest.
    pub fn at_least(&self, py: Python<'_>, name: &str, min: i64) -> PyResult<usize> {
        let given = match self {
            Self::Number(number) if *number >= min => return Ok(usize::try_from(*number).unwrap_or(0)),
            Self::TooLarge(_) => return Ok(usize::MAX >> 1),
            Self::Number(number) => number.to_string(),
            Self::TooSmall(text) => text.clone(),
            Self::Other(text) => {
                return Err(argument_error(py, format!("{name} is {text}, a whole number is needed")));
            }
        };
        Err(argument_error(py, format!("{name} is {given}, allowed is {min} or more")))
    }

    /// The number, if it is one of 64 bits.
    pub fn exact(&self, py: Python<'_>, name: &str) -> PyResult<i64> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::TooLarge(text) | Self::TooSmall(text) => {
                let text = format!("{name} is {text}, allowed is {} to {}", i64::MIN, i64::MAX);
                Err(argument_error(py, text))
            }
            Self::Other(text) => {
                Err(argument_error(py, format!("{name} is {text}, a whole number is needed")))
            }
        }
    }

    /// A page size; which ones are good is said by the tree, for those that a number of 64 bits can be.
    pub fn page_size(&self, py: Python<'_>) -> PyResult<usize> {
        let given = match self {
            Self::Number(number) => match usize::try_from(*number) {
                Ok(size) => return Ok(size),
                Err(_) => number.to_string(),
            },
            Self::TooLarge(text) | Self::TooSmall(text) | Self::Other(text) => text.clone(),
        };
        Err(argument_error(py, format!("page_size is {given}, allowed is 1 to 256")))
    }
}

/// A time on the caller's clock.
pub(super) fn time(object: &Bound<'_, PyAny>, name: &str) -> PyResult<f64> {
    match object.extract::<f64>() {
        Ok(time) if !time.is_nan() => Ok(time),
        _ => Err(argument_error(object.py(), format!("{name} is {}, a number is needed", show(object)))),
    }
}

/// A part of a namespace.
pub(super) fn text(object: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<Option<PyBackedStr>> {
    let Some(object) = object else { return Ok(None) };
    let Ok(text) = object.extract::<PyBackedStr>() else {
        let text =
            format!("{name} is {}, a str that can be encoded in UTF-8 (or None) is needed", show(object));
        return Err(argument_error(object.py(), text));
    };
    Ok(Some(text))
}

/// A node id; a number that can be no id is an unknown node.
pub(super) struct NodeArg(pub NodeId);

impl FromPyObject<'_, '_> for NodeArg {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let Some(id) = node_id(&object, "node")? else {
            let text = format!("node {} is not in this tree (dead, or never was)", show(&object));
            return Err(unknown_node_error(object.py(), text));
        };
        Ok(Self(id))
    }
}

/// The id that a whole number is; `None` if it is too large or negative.
fn node_id(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<NodeId>> {
    match object.extract::<u64>() {
        Ok(id) => Ok(Some(id)),
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Ok(None),
        Err(_) => {
            let text = format!("{name} is {}, a node id (int) is needed", show(object));
            Err(argument_error(object.py(), text))
        }
    }
}

/// Node ids from any sequence or array of them. What can be no id stands for a node that never was.
pub(super) struct NodeList(pub Vec<NodeId>);

impl FromPyObject<'_, '_> for NodeList {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let Ok(items) = object.try_iter() else {
            let text = format!("nodes is {}, a sequence of node ids is needed", show(&object));
            return Err(argument_error(object.py(), text));
        };
        let ids = items
            .enumerate()
            .map(|(at, item)| node_id(&item?, &format!("nodes[{at}]")).map(|id| id.unwrap_or(NodeId::MAX)));
        ids.collect::<PyResult<Vec<_>>>().map(Self)
    }
}
