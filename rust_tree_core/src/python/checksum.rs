//! Checksums of what is stored: XXH3 of 64 bits over pieces of memory, as they lie there.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use std::hash::Hasher;
use twox_hash::XxHash3_64;

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

#[pyfunction]
pub(super) fn object_checksums(
    py: Python<'_>,
    headers: &Bound<'_, PyAny>,
    covered: Whole,
    bodies: &Bound<'_, PyAny>,
    sizes: Vec<usize>,
) -> PyResult<Vec<u64>> {
    let covered = covered.at_least(py, "covered", 0)?;
    let header_buffer = bytes_of(headers, "headers")?;
    let bodies = items(bodies, "bodies")?;
    let count = bodies.len();
    if sizes.len() != count {
        return Err(argument_error(py, format!("sizes must have {count} entries, not {}", sizes.len())));
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    let header_bytes = header_buffer.len_bytes() / count;
    if header_bytes * count != header_buffer.len_bytes() || covered > header_bytes {
        let text = format!(
            "headers must have {count} times at least {covered} bytes, not {} in all",
            header_buffer.len_bytes()
        );
        return Err(argument_error(py, text));
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
    let all = slice_of(&header_buffer);
    let pieces: Vec<Pieces> = buffers
        .iter()
        .zip(&sizes)
        .enumerate()
        .map(|(at, (buffer, &size))| Pieces {
            header: &all[at * header_bytes..at * header_bytes + covered],
            body: &slice_of(buffer)[..size],
        })
        .collect();
    let total: usize = sizes.iter().sum();
    let threads = (total / BYTES_A_THREAD).clamp(1, MOST_THREADS).min(count);
    Ok(py.detach(|| checksums(&pieces, threads)))
}

/// Checksums of all objects, in order, by so many threads: the caller's, and others.
fn checksums(pieces: &[Pieces<'_>], threads: usize) -> Vec<u64> {
    if threads <= 1 {
        return pieces.iter().map(checksum).collect();
    }
    let mut sums = vec![0; pieces.len()];
    let share = pieces.len().div_ceil(threads);
    let fill = |sums: &mut [u64], pieces: &[Pieces<'_>]| {
        for (sum, piece) in sums.iter_mut().zip(pieces) {
            *sum = checksum(piece);
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

fn checksum(pieces: &Pieces<'_>) -> u64 {
    let mut hasher = XxHash3_64::new();
    hasher.write(pieces.header);
    hasher.write(pieces.body);
    hasher.finish()
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

pub(super) fn slice_of(buffer: &PyUntypedBuffer) -> &[u8] {
    if buffer.len_bytes() == 0 {
        return &[];
    }
    // SAFETY: the buffer is contiguous, so it has `len_bytes` bytes from its pointer on, which stay alive and in place
    // while it is exported, which is for as long as it is borrowed here. Who calls promises that nobody writes them
    // meanwhile, as for every reader of the buffer protocol; any bits are bytes.
    unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.len_bytes()) }
}
