//! Stored objects: their headers, a batch in a call, reading one from a file, and the slots that they are in.

use std::os::fd::RawFd;

use numpy::PyArray1;
use page_copies::{
    COVERED, HEADER_BYTES, Header, KEY_WORDS, Located, MOST_KEY_BYTES, Misfit, Place, Shared, Slots, Stored,
    Sums, read_object as read, read_table,
};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::buffers::Whole;
use super::checksum::{bytes_of, slice_of, writable_bytes_of};
use super::errors::argument_error;
use super::io_queue::os_error;
use super::{items, show};

/// Fills in headers. The interpreter's lock is held: that is a few microseconds for a batch.
#[pyfunction]
pub(super) fn write_object_headers(
    headers: &Bound<'_, PyAny>,
    keys: &Bound<'_, PyAny>,
    stored_sizes: Vec<u64>,
    page_bytes: u64,
    codecs: Vec<u8>,
) -> PyResult<()> {
    let py = headers.py();
    let keys = items(keys, "keys")?;
    let buffer = writable_bytes_of(headers, "headers")?;
    check_count(py, "headers", buffer.len_bytes(), HEADER_BYTES, keys.len())?;
    check_count(py, "stored_sizes", stored_sizes.len(), 1, keys.len())?;
    check_count(py, "codecs", codecs.len(), 1, keys.len())?;
    let written: Vec<[u8; HEADER_BYTES]> = keys
        .iter()
        .zip(stored_sizes.iter().zip(&codecs))
        .map(|(key, (&stored, &codec))| {
            Ok(Header { key: key_of(key)?, stored, page: page_bytes, codec }.bytes())
        })
        .collect::<PyResult<_>>()?;
    // SAFETY: the buffer is contiguous, may be written, and has as many bytes as what is copied to it, which is memory of
    // our own. It stays in place while it is exported; with the interpreter's lock held, and by this call's contract, nobody
    // else uses it.
    unsafe {
        written.as_ptr().cast::<u8>().copy_to_nonoverlapping(buffer.buf_ptr().cast(), size_of_val(&*written));
    }
    Ok(())
}

/// The codec of each object whose header is the one that it should have, -1 for others.
#[pyfunction]
pub(super) fn check_object_headers(
    headers: &Bound<'_, PyAny>,
    keys: &Bound<'_, PyAny>,
    stored_sizes: Vec<u64>,
    page_bytes: u64,
    checksums: &Bound<'_, PyAny>,
) -> PyResult<Vec<i16>> {
    let py = headers.py();
    let keys = items(keys, "keys")?;
    let (headers, checksums) = (bytes_of(headers, "headers")?, bytes_of(checksums, "checksums")?);
    check_count(py, "headers", headers.len_bytes(), HEADER_BYTES, keys.len())?;
    check_count(py, "checksums", checksums.len_bytes(), size_of::<u64>(), keys.len())?;
    check_count(py, "stored_sizes", stored_sizes.len(), 1, keys.len())?;
    let (rows, _) = slice_of(&headers).as_chunks();
    let (sums, _) = slice_of(&checksums).as_chunks();
    keys.iter()
        .zip(stored_sizes)
        .zip(rows.iter().zip(sums))
        .map(|((key, stored), (row, &sum))| {
            let header = Header { key: key_of(key)?, stored, page: page_bytes, codec: 0 };
            Ok(header.codec_of(row, u64::from_ne_bytes(sum)).map_or(-1, i16::from))
        })
        .collect()
}

/// Reads a header and a body from the beginning of a file; the interpreter's lock is not held.
#[pyfunction]
#[pyo3(signature = (file, header, body, covered=None), text_signature = "(file, header, body, covered=None)")]
pub(super) fn read_object(
    file: RawFd,
    header: &Bound<'_, PyAny>,
    body: &Bound<'_, PyAny>,
    covered: Option<Whole>,
) -> PyResult<(usize, u64)> {
    let py = header.py();
    let (header, body) = (writable_bytes_of(header, "header")?, writable_bytes_of(body, "body")?);
    let covered = covered.map(|covered| covered.at_least(py, "covered", 0)).transpose()?;
    if let Some(covered) = covered.filter(|&covered| covered > header.len_bytes()) {
        let text = format!("covered is {covered}, header has {} bytes", header.len_bytes());
        return Err(argument_error(py, text));
    }
    let start = |buffer: &PyUntypedBuffer| buffer.buf_ptr().cast::<u8>();
    let place = Place {
        header: start(&header),
        header_bytes: header.len_bytes(),
        body: start(&body),
        body_bytes: body.len_bytes(),
    };
    if overlap(&header, &body) {
        return Err(argument_error(py, "header and body share memory".to_owned()));
    }
    // SAFETY: both buffers are contiguous and may be written; they stay alive and in place while they are exported, which is
    // until this returns. Who calls promises that nobody else uses them meanwhile, nor closes the file.
    let done = py.detach(move || unsafe { read(file, place, covered) });
    done.map_err(|error| os_error(&error))
}

/// The slots that keys are in, -1 for none; the interpreter's lock is held, for a microsecond or two a key.
#[pyfunction]
pub(super) fn find_slots<'py>(
    py: Python<'py>,
    keys: &Bound<'py, PyAny>,
    hashes: &Bound<'py, PyAny>,
    buckets: &Bound<'py, PyAny>,
    words: &Bound<'py, PyAny>,
    records: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let (keys, hashes) = (bytes_of(keys, "keys")?, bytes_of(hashes, "hashes")?);
    let (hashes, _) = slice_of(&hashes).as_chunks();
    check_count(py, "keys", keys.len_bytes(), KEY_WORDS * size_of::<u64>(), hashes.len())?;
    let (buckets, words) = (bytes_of(buckets, "buckets")?, bytes_of(words, "words")?);
    let records = bytes_of(records, "records")?;
    let slots = slots_of(py, &buckets, &words, &records)?;
    let (key_words, _) = slice_of(&keys).as_chunks::<{ size_of::<u64>() }>();
    let found = key_words
        .chunks_exact(KEY_WORDS)
        .zip(hashes)
        .map(|(key, &hash)| {
            let key = std::array::from_fn(|at| u64::from_ne_bytes(key[at]));
            slots.find(&key, u64::from_ne_bytes(hash)).map_or(-1, |(slot, _)| slot.cast_signed() as i64)
        })
        .collect();
    Ok(PyArray1::from_vec(py, found))
}

/// Slots, their words, and the bytes of bodies.
type Places<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<i64>>);

/// What a get has to know before bodies are read: where objects lie, and their headers. The interpreter's lock is held, for a
/// microsecond or two an object.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // a store, and a batch
pub(super) fn locate_objects<'py>(
    py: Python<'py>,
    keys: &Bound<'py, PyAny>,
    headers: &Bound<'py, PyAny>,
    room: Vec<u64>,
    sums: (Vec<u64>, u64, u64),
    buckets: &Bound<'py, PyAny>,
    words: &Bound<'py, PyAny>,
    records: &Bound<'py, PyAny>,
) -> PyResult<Places<'py>> {
    let keys = items(keys, "keys")?;
    check_count(py, "room", room.len(), 1, keys.len())?;
    let headers = writable_bytes_of(headers, "headers")?;
    let bytes = headers.len_bytes() / keys.len().max(1);
    check_count(py, "headers", headers.len_bytes(), bytes, keys.len())?;
    let (buckets, words) = (bytes_of(buckets, "buckets")?, bytes_of(words, "words")?);
    let records = bytes_of(records, "records")?;
    let slots = slots_of(py, &buckets, &words, &records)?;
    let (weights, start, mix) = sums;
    let sums = Sums { weights: weights_of(py, weights)?, start, mix };
    let keys: Vec<&[u8]> = keys.iter().map(key_of).collect::<PyResult<_>>()?;
    let mut header = vec![0; bytes];
    let (mut found, mut seen, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
    for (at, (key, room)) in keys.into_iter().zip(room).enumerate() {
        let key = words_of(key);
        let (slot, word, size) = match slots.locate(&key, sums.hash(&key), &mut header, room) {
            None => (-1, 0, 0),
            Some(Err(Misfit)) => (-2, 0, 0),
            Some(Ok(Located { slot, word, bytes: size })) => {
                // SAFETY: the buffer is contiguous, may be written, and has as many headers as there are keys; the header that is
                // copied is memory of our own. It stays in place while it is exported; with the interpreter's lock held, and by
                // this call's contract, nobody else uses it.
                unsafe {
                    let target = headers.buf_ptr().cast::<u8>().add(at * bytes);
                    header.as_ptr().copy_to_nonoverlapping(target, bytes);
                }
                (slot.cast_signed() as i64, word, size.cast_signed())
            }
        };
        found.push(slot);
        seen.push(word);
        sizes.push(size);
    }
    Ok((PyArray1::from_vec(py, found), PyArray1::from_vec(py, seen), PyArray1::from_vec(py, sizes)))
}

/// A key as a record has it, with zeros behind.
fn words_of(key: &[u8]) -> [u64; KEY_WORDS] {
    let mut words = [0; KEY_WORDS];
    for (word, bytes) in words.iter_mut().zip(key.chunks(size_of::<u64>())) {
        let mut whole = [0; size_of::<u64>()];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(whole);
    }
    words
}

fn weights_of<const N: usize>(py: Python<'_>, weights: Vec<u64>) -> PyResult<[u64; N]> {
    let given = weights.len();
    weights.try_into().map_err(|_| argument_error(py, format!("weights must have {N} entries, not {given}")))
}

/// The buffers have to stay exported while this is used.
fn slots_of(
    py: Python<'_>,
    buckets: &PyUntypedBuffer,
    words: &PyUntypedBuffer,
    records: &PyUntypedBuffer,
) -> PyResult<Slots> {
    if !(buckets.len_bytes() / size_of::<u64>()).is_power_of_two() {
        let text = format!("buckets has {} bytes, not 8 times a power of two", buckets.len_bytes());
        return Err(argument_error(py, text));
    }
    Ok(Slots {
        buckets: shared(py, buckets, "buckets")?,
        words: shared(py, words, "words")?,
        records: shared(py, records, "records")?,
    })
}

/// Slots, and of the objects in them the hashes of their keys and their bytes.
type Table<'py> = (Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u64>>);

/// What a table of records has; the interpreter's lock is not held.
#[pyfunction]
pub(super) fn read_slot_table<'py>(
    py: Python<'py>,
    records: &Bound<'py, PyAny>,
    weights: Vec<u64>,
    start: u64,
    mix: u64,
    slot_bytes: u64,
) -> PyResult<Table<'py>> {
    let buffer = bytes_of(records, "records")?;
    let records = shared(py, &buffer, "records")?;
    let sums = Sums { weights: weights_of(py, weights)?, start, mix };
    let found = py.detach(|| read_table(records, &sums, slot_bytes));
    let column = |value: fn(&Stored) -> u64| PyArray1::from_iter(py, found.iter().map(value));
    Ok((column(|stored| stored.slot as u64), column(|stored| stored.hash), column(|stored| stored.bytes)))
}

fn shared(py: Python<'_>, buffer: &PyUntypedBuffer, name: &str) -> PyResult<Shared> {
    let start = buffer.buf_ptr().cast_const().cast::<u64>();
    if !start.is_aligned() {
        return Err(argument_error(py, format!("{name} does not begin at a multiple of 8")));
    }
    // SAFETY: the buffer is contiguous, and stays alive and in place while it is exported, which is for as long as the caller
    // uses what is made of it. Whatever other processes write there, it can be read.
    Ok(unsafe { Shared::new(start, buffer.len_bytes() / size_of::<u64>()) })
}

fn overlap(one: &PyUntypedBuffer, other: &PyUntypedBuffer) -> bool {
    let (first, second) = (one.buf_ptr().addr(), other.buf_ptr().addr());
    first < second + other.len_bytes() && second < first + one.len_bytes()
}

fn check_count(py: Python<'_>, name: &str, given: usize, each: usize, count: usize) -> PyResult<()> {
    if given == each * count {
        return Ok(());
    }
    let what = if each == 1 { "entries" } else { "bytes" };
    Err(argument_error(py, format!("{name} must have {} {what}, not {given}", each * count)))
}

/// The bytes of a key.
fn key_of<'a>(key: &'a Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    let py = key.py();
    let Ok(text) = key.cast::<PyString>() else {
        return Err(argument_error(py, format!("keys has {}, a str is needed", show(key))));
    };
    let bytes = text.to_str().map(str::as_bytes).unwrap_or_default();
    if !(1..=MOST_KEY_BYTES).contains(&bytes.len()) || !bytes.is_ascii() {
        let text = format!(
            "keys must have 1 to {MOST_KEY_BYTES} characters, all of ASCII, not {}: {}",
            text.len()?,
            show(key)
        );
        return Err(argument_error(py, text));
    }
    Ok(bytes)
}

const _: () = assert!(COVERED + size_of::<u64>() == HEADER_BYTES);
