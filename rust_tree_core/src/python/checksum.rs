//! Checksums of what is stored: XXH3 of 64 bits over pieces of memory, as they lie there or while they are copied.

use numpy::PyArray1;
use page_copies::{checksum, copy_summed};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use super::buffers::Whole;
use super::errors::argument_error;
use super::{items, show};

/// Work from which another thread pays: some 100 µs of it. With a few of them checksums keep up with memory.
const BYTES_A_THREAD: usize = 4 << 20;
const MOST_THREADS: usize = 4;

/// One object: the part of its header that counts, and its body.
struct Pieces<'a> {
    header: &'a [u8],
    body: &'a [u8],
}

impl Pieces<'_> {
    fn checksum(&self) -> u64 {
        checksum(self.header, self.body)
    }
}

#[pyfunction]
pub(super) fn object_checksums<'py>(
    py: Python<'py>,
    headers: &Bound<'py, PyAny>,
    covered: Whole,
    bodies: &Bound<'py, PyAny>,
    sizes: Vec<usize>,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    let bodies = items(bodies, "bodies")?;
    let count = bodies.len();
    let headers = Headers::new(headers, &covered, count)?;
    if sizes.len() != count {
        return Err(argument_error(py, format!("sizes must have {count} entries, not {}", sizes.len())));
    }
    let mut buffers = Vec::with_capacity(count);
    for (at, (body, &size)) in bodies.iter().zip(&sizes).enumerate() {
        let buffer = bytes_of(body, &format!("bodies[{at}]"))?;
        if size > buffer.len_bytes() {
            let text = format!("sizes[{at}] is {size}, bodies[{at}] has {} bytes", buffer.len_bytes());
            return Err(argument_error(py, text));
        }
        buffers.push(buffer);
    }
    let pieces: Vec<Pieces> = buffers
        .iter()
        .zip(&sizes)
        .enumerate()
        .map(|(at, (buffer, &size))| Pieces { header: headers.front(at), body: &slice_of(buffer)[..size] })
        .collect();
    let total: usize = sizes.iter().sum();
    let threads = (total / BYTES_A_THREAD).clamp(1, MOST_THREADS).min(count.max(1));
    let sums = py.detach(|| checksums(&pieces, threads));
    Ok(PyArray1::from_vec(py, sums))
}

/// Copies bodies, and makes the checksums of their objects in the same pass; the interpreter's lock is not held.
#[pyfunction]
#[pyo3(
    signature = (targets, sources, headers=None, covered=Whole::Number(0)),
    text_signature = "(targets, sources, headers=None, covered=0)"
)]
pub(super) fn copy_objects<'py>(
    py: Python<'py>,
    targets: &Bound<'py, PyAny>,
    sources: &Bound<'py, PyAny>,
    headers: Option<&Bound<'py, PyAny>>,
    covered: Whole,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    let (targets, sources) = (items(targets, "targets")?, items(sources, "sources")?);
    let count = targets.len();
    if sources.len() != count {
        return Err(argument_error(py, format!("sources must have {count} entries, not {}", sources.len())));
    }
    let headers = headers.map(|headers| Headers::new(headers, &covered, count)).transpose()?;
    let mut bodies = Vec::with_capacity(count);
    for (at, (target, source)) in targets.iter().zip(&sources).enumerate() {
        bodies.push(Body::new(at, target, source)?);
    }
    let sums = py.detach(|| {
        if let Some(headers) = &headers {
            return bodies.iter().enumerate().map(|(at, body)| body.copy_summed(headers.front(at))).collect();
        }
        bodies.iter().for_each(Body::copy);
        Vec::new()
    });
    Ok(PyArray1::from_vec(py, sums))
}

/// The headers of some objects, and how many bytes at the front of each of them count.
pub(super) struct Headers {
    buffer: PyUntypedBuffer,
    bytes: usize,
    covered: usize,
}

impl Headers {
    pub(super) fn new(object: &Bound<'_, PyAny>, covered: &Whole, count: usize) -> PyResult<Self> {
        let py = object.py();
        let covered = covered.at_least(py, "covered", 0)?;
        let buffer = bytes_of(object, "headers")?;
        let bytes = buffer.len_bytes() / count.max(1);
        if count > 0 && (bytes * count != buffer.len_bytes() || covered > bytes) {
            let text = format!(
                "headers must have {count} times at least {covered} bytes, not {} in all",
                buffer.len_bytes()
            );
            return Err(argument_error(py, text));
        }
        Ok(Self { buffer, bytes, covered })
    }

    /// The bytes of a header that count.
    pub(super) fn front(&self, at: usize) -> &[u8] {
        &slice_of(&self.buffer)[at * self.bytes..][..self.covered]
    }
}

/// Bytes that are copied from one buffer to another.
struct Body {
    target: PyUntypedBuffer,
    source: PyUntypedBuffer,
}

impl Body {
    /// Both are contiguous, of one length, and apart from each other; the target may be written. They stay alive and in
    /// place as long as this does. Who calls promises that nobody else uses the target meanwhile. A source may lie in
    /// memory that another process writes just then: its bytes may be any mixture, of which nothing is believed.
    fn new(at: usize, target: &Bound<'_, PyAny>, source: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = target.py();
        let (to, from) = (format!("targets[{at}]"), format!("sources[{at}]"));
        let body = Self { target: writable_bytes_of(target, &to)?, source: bytes_of(source, &from)? };
        let bytes = body.bytes();
        if body.target.len_bytes() != bytes {
            let text = format!("{to} has {} bytes, {from} has {bytes}", body.target.len_bytes());
            return Err(argument_error(py, text));
        }
        if body.to().addr().abs_diff(body.from().addr()) < bytes {
            return Err(argument_error(py, format!("{to} and {from} share memory")));
        }
        Ok(body)
    }

    fn copy(&self) {
        // SAFETY: see `new`.
        unsafe { page_copies::copy(self.to(), self.from(), self.bytes()) };
    }

    /// Also makes the checksum of a header and of what the target then has.
    fn copy_summed(&self, header: &[u8]) -> u64 {
        // SAFETY: see `new`.
        unsafe { copy_summed(self.to(), self.from(), self.bytes(), header) }
    }

    fn to(&self) -> *mut u8 {
        self.target.buf_ptr().cast()
    }

    fn from(&self) -> *const u8 {
        self.source.buf_ptr().cast_const().cast()
    }

    fn bytes(&self) -> usize {
        self.source.len_bytes()
    }
}

/// Checksums of all objects, in order, by so many threads: the caller's, and others.
fn checksums(pieces: &[Pieces<'_>], threads: usize) -> Vec<u64> {
    if threads <= 1 {
        return pieces.iter().map(Pieces::checksum).collect();
    }
    let mut sums = vec![0; pieces.len()];
    let share = pieces.len().div_ceil(threads);
    let fill = |sums: &mut [u64], pieces: &[Pieces<'_>]| {
        for (sum, piece) in sums.iter_mut().zip(pieces) {
            *sum = piece.checksum();
        }
    };
    let (own, others) = sums.split_at_mut(share);
    std::thread::scope(|scope| {
        for (sums, pieces) in others.chunks_mut(share).zip(pieces[share..].chunks(share)) {
            scope.spawn(move || fill(sums, pieces));
        }
        fill(own, pieces);
    });
    sums
}

pub(super) fn bytes_of(object: &Bound<'_, PyAny>, name: &str) -> PyResult<PyUntypedBuffer> {
    let refused = |text: String| Err(argument_error(object.py(), format!("{name} {text}")));
    let Ok(buffer) = PyUntypedBuffer::get(object) else {
        return refused(format!("is {}, a buffer is needed", show(object)));
    };
    if !buffer.is_c_contiguous() {
        return refused("is not C-contiguous".to_owned());
    }
    Ok(buffer)
}

pub(super) fn writable_bytes_of(object: &Bound<'_, PyAny>, name: &str) -> PyResult<PyUntypedBuffer> {
    let buffer = bytes_of(object, name)?;
    if buffer.readonly() {
        return Err(argument_error(object.py(), format!("{name} can not be written")));
    }
    Ok(buffer)
}

pub(super) fn slice_of(buffer: &PyUntypedBuffer) -> &[u8] {
    if buffer.len_bytes() == 0 {
        return &[];
    }
    // SAFETY: the buffer is contiguous, so it has `len_bytes` bytes from its pointer on, which stay alive and in place
    // while it is exported, which is for as long as it is borrowed here. Who calls promises that nobody writes them
    // meanwhile, as for every reader of the buffer protocol; any bits are bytes.
    unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.len_bytes()) }
}
