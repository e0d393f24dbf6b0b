//! Bodies of stored objects that lie in one file, moved many at a time.

use std::io;
use std::os::fd::RawFd;

use numpy::PyArray1;
use page_copies::{Body, Queue, Way, checksum};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use super::buffers::Whole;
use super::checksum::{Headers, bytes_of, slice_of, writable_bytes_of};
use super::errors::argument_error;
use super::items;

/// The kernel's queue of requests, for threads that share it.
#[pyclass(frozen, module = "unified_cache._native")]
pub(super) struct IoQueue(Queue);

#[pymethods]
impl IoQueue {
    #[new]
    fn new() -> PyResult<Self> {
        Queue::new().map(Self).map_err(|error| os_error(&error))
    }

    #[pyo3(
        signature = (file, offsets, bodies, headers=None, covered=Whole::Number(0)),
        text_signature = "(self, file, offsets, bodies, headers=None, covered=0)"
    )]
    #[allow(clippy::needless_pass_by_value)] // as they come from Python
    fn read<'py>(
        &self,
        py: Python<'py>,
        file: RawFd,
        offsets: Vec<u64>,
        bodies: &Bound<'py, PyAny>,
        headers: Option<&Bound<'py, PyAny>>,
        covered: Whole,
    ) -> PyResult<(Vec<bool>, Bound<'py, PyArray1<u64>>)> {
        self.transfer(py, Way::Read, file, &offsets, bodies, headers, &covered)
    }

    #[pyo3(
        signature = (file, offsets, bodies, headers=None, covered=Whole::Number(0)),
        text_signature = "(self, file, offsets, bodies, headers=None, covered=0)"
    )]
    #[allow(clippy::needless_pass_by_value)] // as they come from Python
    fn write<'py>(
        &self,
        py: Python<'py>,
        file: RawFd,
        offsets: Vec<u64>,
        bodies: &Bound<'py, PyAny>,
        headers: Option<&Bound<'py, PyAny>>,
        covered: Whole,
    ) -> PyResult<(Vec<bool>, Bound<'py, PyArray1<u64>>)> {
        self.transfer(py, Way::Write, file, &offsets, bodies, headers, &covered)
    }
}

impl IoQueue {
    #[allow(clippy::too_many_arguments)] // those of the call from Python
    fn transfer<'py>(
        &self,
        py: Python<'py>,
        way: Way,
        file: RawFd,
        offsets: &[u64],
        bodies: &Bound<'py, PyAny>,
        headers: Option<&Bound<'py, PyAny>>,
        covered: &Whole,
    ) -> PyResult<(Vec<bool>, Bound<'py, PyArray1<u64>>)> {
        let bodies = items(bodies, "bodies")?;
        let count = bodies.len();
        if offsets.len() != count {
            return Err(argument_error(
                py,
                format!("offsets must have {count} entries, not {}", offsets.len()),
            ));
        }
        let headers = headers.map(|headers| Headers::new(headers, covered, count)).transpose()?;
        let buffers: Vec<PyUntypedBuffer> = bodies
            .iter()
            .enumerate()
            .map(|(at, body)| {
                let name = format!("bodies[{at}]");
                if way == Way::Read { writable_bytes_of(body, &name) } else { bytes_of(body, &name) }
            })
            .collect::<PyResult<_>>()?;
        let places: Vec<Body> = buffers
            .iter()
            .zip(offsets)
            .map(|(buffer, &offset)| Body {
                start: buffer.buf_ptr().cast(),
                bytes: buffer.len_bytes(),
                offset,
            })
            .collect();
        if way == Way::Read && overlap(&places) {
            return Err(argument_error(py, "bodies share memory".to_owned()));
        }
        let (moved, sums) = py.detach(|| {
            let mut sums = vec![0; if headers.is_some() { count } else { 0 }];
            let mut sum = headers
                .as_ref()
                .map(|headers| |at: usize| sums[at] = checksum(headers.front(at), slice_of(&buffers[at])));
            let seen = sum.as_mut().map(|sum| sum as &mut dyn FnMut(usize));
            // SAFETY: the buffers are contiguous, and may be written where bytes are read from the file; they stay alive and
            // in place while they are exported, which is until this returns. Those that are written do not overlap, as was
            // just seen. Who calls promises that nobody else uses them meanwhile, nor closes the file.
            let moved = unsafe { self.0.transfer(file, way, &places, seen) };
            (moved, sums)
        });
        Ok((moved, PyArray1::from_vec(py, sums)))
    }
}

fn overlap(bodies: &[Body]) -> bool {
    let mut ranges: Vec<(usize, usize)> = bodies
        .iter()
        .filter(|body| body.bytes > 0)
        .map(|body| (body.start.addr(), body.start.addr() + body.bytes))
        .collect();
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[1].0 < pair[0].1)
}

pub(super) fn os_error(error: &io::Error) -> PyErr {
    match error.raw_os_error() {
        // With its number the exception is of the class that fits.
        Some(number) => PyOSError::new_err((number, error.to_string())),
        None => PyOSError::new_err(error.to_string()),
    }
}
