//! The stored tree and the log that it comes from.

use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers::{Whole, Words, digests};
use super::checksum::{bytes_of, slice_of};
use super::errors::{argument_error, poisoned_error, tree_error};
use super::results::digest_array;
use super::{LONG_HASHES, Space, show};
use crate::stored::{LogPart, Record, Source, StoredTree};
use crate::{Digest, GuardError, Guarded};

/// Pages from which a call lets other Python threads run.
const LONG_PAGES: usize = 1_000;

type Parts = (Option<String>, Option<String>);

fn space(py: Python<'_>, fingerprint: &str, first_group: u16) -> PyResult<crate::stored::Space> {
    match <[u8; 16]>::try_from(fingerprint.as_bytes()) {
        Ok(bytes) if bytes.is_ascii() => Ok(crate::stored::Space { fingerprint: bytes, first_group }),
        _ => {
            let text = format!("fingerprint must have 16 ASCII characters, not {fingerprint:?}");
            Err(argument_error(py, text))
        }
    }
}

fn one_digest(object: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<Option<Digest>> {
    let Some(object) = object else { return Ok(None) };
    match digests(object, name)?.as_slice() {
        [digest] => Ok(Some(*digest)),
        other => {
            let text = format!("{name} has {} digests, one is needed (32 bytes)", other.len());
            Err(argument_error(object.py(), text))
        }
    }
}

#[pyclass(frozen, name = "LogPart", module = "unified_cache._native")]
pub(super) struct PyLogPart(LogPart);

#[pymethods]
impl PyLogPart {
    #[new]
    #[pyo3(signature = (data, *, page_size, fingerprint=None, first_group=None, last=false))]
    fn new(
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        page_size: Whole,
        fingerprint: Option<&str>,
        first_group: Option<u16>,
        last: bool,
    ) -> PyResult<Self> {
        let buffer: PyUntypedBuffer = bytes_of(data, "data")?;
        let space = fingerprint.map(|fingerprint| space(py, fingerprint, 0)).transpose()?;
        let page_size = page_size.page_size(py)?;
        let bytes = slice_of(&buffer);
        Ok(Self(py.detach(|| {
            LogPart::read(bytes, space.map(|space| space.fingerprint), first_group, page_size, last)
        })))
    }

    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        digest_array(py, &self.0.digests)
    }

    #[getter]
    fn consumed(&self) -> usize {
        self.0.consumed
    }

    #[getter]
    fn records(&self) -> usize {
        self.0.records()
    }

    #[getter]
    fn damaged(&self) -> usize {
        self.0.damaged
    }

    #[getter]
    fn foreign(&self) -> usize {
        self.0.foreign
    }

    #[getter]
    fn spaces(&self) -> Vec<(String, u16, u16)> {
        let name = |space: &crate::stored::Space| String::from_utf8_lossy(&space.fingerprint).into_owned();
        self.0.spaces.iter().map(|(space, page)| (name(space), space.first_group, *page)).collect()
    }
}

#[pyclass(frozen, name = "StoredTree", module = "unified_cache._native")]
pub(super) struct PyStoredTree {
    tree: Guarded<StoredTree>,
}

impl PyStoredTree {
    fn run<R: Send>(
        &self,
        py: Python<'_>,
        long: bool,
        call: impl FnOnce(&mut StoredTree) -> R + Send,
    ) -> PyResult<R> {
        let done = if long { py.detach(|| self.tree.run(call)) } else { self.tree.run(call) };
        done.map_err(|error| {
            let text = match error {
                GuardError::Panicked(text) => format!("internal error in the stored tree: {text}"),
                GuardError::Poisoned => "an earlier call failed inside".to_owned(),
            };
            poisoned_error(py, text)
        })
    }
}

#[pymethods]
impl PyStoredTree {
    #[new]
    #[pyo3(signature = (page_size, *, capacity))]
    fn new(py: Python<'_>, page_size: Whole, capacity: Whole) -> PyResult<Self> {
        let capacity = capacity.at_least(py, "capacity", 1)?;
        let tree = StoredTree::new(page_size.page_size(py)?, capacity);
        Ok(Self { tree: Guarded::new(tree.map_err(|error| tree_error(py, error))?) })
    }

    #[pyo3(signature = (hashes, *, parent=None, extra_key=None, cache_salt=None))]
    fn add(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        extra_key: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(usize, usize)> {
        let hashes = digests(hashes, "hashes")?;
        let parent = one_digest(parent, "parent")?;
        let namespace = Space::of(extra_key, cache_salt)?;
        let namespace = namespace.get();
        let added = self.run(py, false, |tree| tree.add(parent.as_ref(), namespace, &hashes, None))?;
        Ok((added.pages, added.orphans))
    }

    #[pyo3(signature = (part, held=None, *, piece=0))]
    fn load(
        &self,
        py: Python<'_>,
        part: &Bound<'_, PyLogPart>,
        held: Option<&Bound<'_, PyAny>>,
        piece: u32,
    ) -> PyResult<(usize, usize)> {
        let part = &part.get().0;
        let held: Vec<bool> = match held {
            None => vec![true; part.digests.len()],
            Some(held) => {
                let Ok(array) = held.cast::<PyArray1<bool>>() else {
                    let text = format!("held is {}, an array of bool is needed", show(held));
                    return Err(argument_error(py, text));
                };
                if !array.is_c_contiguous() {
                    return Err(argument_error(py, "held is not C-contiguous".to_owned()));
                }
                array.to_vec()?
            }
        };
        let added = self.run(py, part.digests.len() >= LONG_PAGES, |tree| tree.load(part, piece, &held))?;
        let added = added.map_err(|error| tree_error(py, error))?;
        Ok((added.pages, added.orphans))
    }

    fn known(&self, py: Python<'_>, hashes: &Bound<'_, PyAny>) -> PyResult<usize> {
        let hashes = digests(hashes, "hashes")?;
        self.run(py, false, |tree| tree.known(&hashes))
    }

    fn touch(&self, py: Python<'_>, hashes: &Bound<'_, PyAny>) -> PyResult<usize> {
        let hashes = digests(hashes, "hashes")?;
        self.run(py, false, |tree| tree.touch(&hashes))
    }

    fn forget(&self, py: Python<'_>, digest: &Bound<'_, PyAny>) -> PyResult<usize> {
        let digest = one_digest(Some(digest), "digest")?.unwrap_or_default();
        self.run(py, false, |tree| tree.forget(&digest))
    }

    /// Of each prefix its namespace, and (node, pages, piece, byte) of each run.
    #[allow(clippy::type_complexity)]
    fn recent(&self, py: Python<'_>, pages: Whole) -> PyResult<Vec<(Parts, Vec<(u32, usize, u32, u64)>)>> {
        let pages = pages.at_least(py, "pages", 0)?;
        self.run(py, true, |tree| {
            let prefixes = tree.recent(pages).into_iter().map(|prefix| {
                let runs = prefix.runs.iter().map(|run| {
                    let Source { piece, at } = run.source;
                    (run.node, run.pages, piece, at)
                });
                let owned = |text: Option<&str>| text.map(str::to_owned);
                let namespace = (owned(prefix.namespace.extra_key), owned(prefix.namespace.cache_salt));
                (namespace, runs.collect())
            });
            prefixes.collect()
        })
    }

    /// Of each node the digest before it, its namespace, its pages, and where its tokens are.
    #[allow(clippy::type_complexity)]
    fn all<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(Option<Bound<'py, PyBytes>>, Parts, usize, Option<(u32, u64)>)>> {
        let nodes = self.run(py, true, |tree| {
            let owned = |text: Option<&str>| text.map(str::to_owned);
            let nodes = tree.all().into_iter().map(|node| {
                let namespace = (owned(node.namespace.extra_key), owned(node.namespace.cache_salt));
                let source = node.source.map(|source| (source.piece, source.at));
                (node.parent, namespace, node.pages, source)
            });
            nodes.collect::<Vec<_>>()
        })?;
        let bytes = |digest: Digest| PyBytes::new(py, &digest);
        Ok(nodes
            .into_iter()
            .map(|(parent, space, pages, source)| (parent.map(bytes), space, pages, source))
            .collect())
    }

    #[getter]
    fn pages(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, false, |tree| tree.pages())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, false, |tree| tree.len())
    }

    /// An empty tree is a tree.
    #[allow(clippy::unused_self)]
    fn __bool__(&self) -> bool {
        true
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.run(py, false, |tree| format!("<StoredTree: {} nodes, {} pages>", tree.len(), tree.pages()))
    }

    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, true, |tree| tree.check_invariants())?.map_err(|error| tree_error(py, error))
    }
}

/// One record of a prefix log.
#[pyfunction]
#[pyo3(
    signature = (tokens, *, page_size, fingerprint, first_group=0, parent=None, extra_key=None, cache_salt=None),
    text_signature = "(tokens, *, page_size, fingerprint, first_group=0, parent=None, extra_key=None, cache_salt=None)"
)]
#[allow(clippy::too_many_arguments)] // what a record has
pub(super) fn prefix_record<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    page_size: Whole,
    fingerprint: &str,
    first_group: u16,
    parent: Option<&Bound<'py, PyAny>>,
    extra_key: Option<&Bound<'_, PyAny>>,
    cache_salt: Option<&Bound<'_, PyAny>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let words = Words::of(tokens, "tokens")?;
    let namespace = Space::of(extra_key, cache_salt)?;
    let record = Record {
        space: space(py, fingerprint, first_group)?,
        page_size: page_size.page_size(py)?,
        parent: one_digest(parent, "parent")?,
        namespace: namespace.get(),
        tokens: words.tokens(),
    };
    let write = || record.to_bytes();
    let bytes = if record.tokens.len() >= LONG_HASHES { py.detach(write) } else { write() };
    Ok(PyBytes::new(py, &bytes.map_err(|error| tree_error(py, error))?))
}
