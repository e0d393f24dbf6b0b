//! Copies of pages between two pools in CPU memory: what crate `page_copies` does, for buffers of Python.

use std::ops::ControlFlow;

use page_copies::{Geometry, PageCopy, Planes};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use super::buffers::{Whole, page_ids};
use super::errors::argument_error;
use super::{items, show};

/// More threads than any machine has use for.
const MAX_THREADS: usize = 1024;

#[pyclass(frozen, module = "unified_cache._native")]
pub(super) struct PageMemory {
    planes: Planes,
    /// Held, never read: while it is exported, the memory of `planes` stays where it is.
    _buffers: Vec<PyUntypedBuffer>,
}

#[pymethods]
impl PageMemory {
    #[new]
    #[pyo3(
        signature = (planes, *, pages, tokens, heads, run_bytes, page_stride, token_stride, head_stride)
    )]
    #[allow(clippy::too_many_arguments)] // a geometry
    fn new(
        py: Python<'_>,
        planes: &Bound<'_, PyAny>,
        pages: Whole,
        tokens: Whole,
        heads: Whole,
        run_bytes: Whole,
        page_stride: Whole,
        token_stride: Whole,
        head_stride: Whole,
    ) -> PyResult<Self> {
        let geometry = Geometry {
            pages: pages.at_least(py, "pages", 1)?,
            tokens: tokens.at_least(py, "tokens", 1)?,
            heads: heads.at_least(py, "heads", 1)?,
            run_bytes: run_bytes.at_least(py, "run_bytes", 1)?,
            page_stride: page_stride.at_least(py, "page_stride", 0)?,
            token_stride: token_stride.at_least(py, "token_stride", 0)?,
            head_stride: head_stride.at_least(py, "head_stride", 0)?,
        };
        let span = geometry.span_bytes().map_err(|error| copy_error(py, &error))?;
        let mut buffers = Vec::new();
        for (at, plane) in items(planes, "planes")?.iter().enumerate() {
            buffers.push(plane_buffer(plane, at, span)?);
        }
        let starts = buffers.iter().map(|buffer| buffer.buf_ptr().cast()).collect();
        // SAFETY: each buffer is contiguous, writable and has `span` bytes, see `plane_buffer`; it is held for as long
        // as the planes are, and an exported buffer does not move.
        let planes = unsafe { Planes::new(geometry, starts) }.map_err(|error| copy_error(py, &error))?;
        Ok(Self { planes, _buffers: buffers })
    }

    #[getter]
    fn planes(&self) -> usize {
        self.planes.count()
    }

    #[getter]
    fn pages(&self) -> usize {
        self.planes.geometry().pages
    }
}

/// The memory of a plane, if it is memory that can be written and has `span` bytes.
fn plane_buffer(object: &Bound<'_, PyAny>, at: usize, span: usize) -> PyResult<PyUntypedBuffer> {
    let refused = |text: String| Err(argument_error(object.py(), format!("planes[{at}] {text}")));
    let Ok(buffer) = PyUntypedBuffer::get(object) else {
        return refused(format!("is {}, a buffer is needed", show(object)));
    };
    if !buffer.is_c_contiguous() {
        return refused("is not C-contiguous".to_owned());
    }
    if buffer.readonly() {
        return refused("can not be written".to_owned());
    }
    if buffer.len_bytes() < span {
        return refused(format!("has {} bytes, its runs need {span}", buffer.len_bytes()));
    }
    Ok(buffer)
}

fn copy_error(py: Python<'_>, error: &page_copies::Error) -> PyErr {
    argument_error(py, error.to_string())
}

/// Copies pages; the interpreter's lock is not held meanwhile.
#[pyfunction]
#[pyo3(
    signature = (target, target_pages, source, source_pages, *, first_plane=Whole::Number(0), planes=None,
                 threads=Whole::Number(1), step=None, arrived=None),
    text_signature = "(target, target_pages, source, source_pages, *, first_plane=0, planes=None, threads=1, step=None, \
                      arrived=None)"
)]
#[allow(clippy::too_many_arguments)] // two sides, and which part
pub(super) fn copy_pages(
    py: Python<'_>,
    target: &Bound<'_, PageMemory>,
    target_pages: &Bound<'_, PyAny>,
    source: &Bound<'_, PageMemory>,
    source_pages: &Bound<'_, PyAny>,
    first_plane: Whole,
    planes: Option<Whole>,
    threads: Whole,
    step: Option<Whole>,
    arrived: Option<Py<PyAny>>,
) -> PyResult<()> {
    let (target, source) = (&target.get().planes, &source.get().planes);
    let first = first_plane.at_least(py, "first_plane", 0)?;
    let range = match planes {
        // Beyond 64 bits counts as half the largest number, so this does not overflow.
        Some(planes) => first..first + planes.at_least(py, "planes", 0)?,
        None => first..target.count().max(first),
    };
    let threads = threads.at_least(py, "threads", 1)?.min(MAX_THREADS);
    let step = step.map_or(Ok(0), |step| step.at_least(py, "step", 1))?;
    let target_pages = page_ids(target_pages, "target_pages")?;
    let source_pages = page_ids(source_pages, "source_pages")?;
    let copy = PageCopy::new(target, target_pages.as_slice(), source, source_pages.as_slice(), range)
        .map_err(|error| copy_error(py, &error))?;
    let report = |step: usize| {
        let Some(arrived) = &arrived else { return ControlFlow::Continue(()) };
        match Python::attach(|py| arrived.call1(py, (step,))) {
            Ok(_) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(error),
        }
    };
    // SAFETY: who calls this promises that nobody uses the pages meanwhile, as for every writer of a buffer; what the
    // bytes are matters to nobody here. The buffers stay, since the arguments hold their owners.
    match py.detach(|| unsafe { copy.run(threads, step, report) }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(error) => Err(error),
    }
}
