//! What calls return: thin wrappers; arrays are made when they are asked for, in memory of their own.

use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use super::{LONG_LOAD_NODES, PrefixTree};
use crate::{AckKind, Digest, Event, NodeId, PageRuns};

/// Page ids as a numpy array of uint32, in memory of its own.
pub(super) fn page_array<'py>(py: Python<'py>, pages: &[u32]) -> Bound<'py, PyAny> {
    PyArray1::from_slice(py, pages).into_any()
}

/// The pages of a path as a numpy array of uint32, in memory of its own.
fn run_array<'py>(py: Python<'py>, runs: &PageRuns) -> Bound<'py, PyAny> {
    match runs.as_single() {
        Some(pages) => page_array(py, pages),
        None => PyArray1::from_vec(py, runs.to_vec()).into_any(),
    }
}

/// Digests as a numpy array of uint8, shape (pages, 32).
pub(super) fn digest_array<'py>(py: Python<'py>, digests: &[Digest]) -> PyResult<Bound<'py, PyAny>> {
    let bytes = PyArray1::from_slice(py, digests.as_flattened());
    Ok(bytes.reshape([digests.len(), 32])?.into_any())
}

macro_rules! result_class {
    ($name:ident($inner:ty) { $($field:ident: $type:ty),* $(,)? } pages { $($pages:ident),* $(,)? }) => {
        #[pyclass(frozen, module = "unified_cache")]
        pub(super) struct $name(pub $inner);

        #[pymethods]
        impl $name {
            $(#[getter]
            fn $field(&self) -> $type {
                self.0.$field.clone()
            })*
            $(#[getter]
            fn $pages<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
                page_array(py, &self.0.$pages)
            })*
            fn __repr__(&self) -> String {
                format!("{:?}", self.0)
            }
        }
    };
}

#[pyclass(frozen, module = "unified_cache")]
pub(super) struct Match(crate::Match, PyOnceLock<Py<PyAny>>);

impl Match {
    pub fn new(result: crate::Match) -> Self {
        Self(result, PyOnceLock::new())
    }
}

#[pymethods]
impl Match {
    #[getter]
    fn device_length(&self) -> usize {
        self.0.device_length
    }
    #[getter]
    fn host_hit_length(&self) -> usize {
        self.0.host_hit_length
    }
    #[getter]
    fn last_device_node(&self) -> NodeId {
        self.0.last_device_node
    }
    #[getter]
    fn last_host_node(&self) -> NodeId {
        self.0.last_host_node
    }
    #[getter]
    fn pending_ack(&self) -> Option<Ack> {
        self.0.pending_ack.map(Ack)
    }
    #[getter]
    fn device_pages<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.1.get_or_init(py, || run_array(py, &self.0.device).unbind()).bind(py).clone()
    }
    fn __repr__(&self) -> String {
        format!(
            "Match(device_length={}, host_hit_length={}, last_device_node={}, last_host_node={})",
            self.0.device_length, self.0.host_hit_length, self.0.last_device_node, self.0.last_host_node
        )
    }
}

#[pyclass(frozen, module = "unified_cache")]
pub(super) struct Inserted(crate::Inserted, PyOnceLock<Py<PyAny>>);

impl Inserted {
    pub fn new(result: crate::Inserted) -> Self {
        Self(result, PyOnceLock::new())
    }
}

#[pymethods]
impl Inserted {
    #[getter]
    fn prefix_len(&self) -> usize {
        self.0.prefix_len
    }
    #[getter]
    fn duplicate_pages<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        page_array(py, &self.0.duplicate_pages)
    }
    #[getter]
    fn device_pages<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.1.get_or_init(py, || run_array(py, &self.0.device).unbind()).bind(py).clone()
    }
    #[getter]
    fn node(&self) -> NodeId {
        self.0.node
    }
    #[getter]
    fn pending_ack(&self) -> Option<Ack> {
        self.0.pending_ack.map(Ack)
    }
    #[getter]
    fn backup_nodes(&self) -> Vec<NodeId> {
        self.0.backup_nodes.clone()
    }
    fn __repr__(&self) -> String {
        format!(
            "Inserted(prefix_len={}, node={}, duplicate_pages={:?}, backup_nodes={:?})",
            self.0.prefix_len, self.0.node, self.0.duplicate_pages, self.0.backup_nodes
        )
    }
}

result_class!(Evicted(crate::Evicted) {
    demoted_nodes: Vec<NodeId>, write_back_nodes: Vec<NodeId>, dropped_tokens: u64,
} pages { device_pages, host_pages });
result_class!(BackupPlan(crate::BackupPlan) { nodes: Vec<NodeId>, pages: usize } pages { device_pages });
result_class!(BackupDone(crate::BackupDone) { nodes: Vec<NodeId> } pages { device_pages });
result_class!(HostInserted(crate::HostInserted) { node: NodeId, inserted_pages: usize } pages { duplicate_host_pages });

#[pyclass(frozen, module = "unified_cache")]
pub(super) struct HostEvicted(pub crate::HostEvicted);

#[pymethods]
impl HostEvicted {
    #[getter]
    fn host_pages<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        page_array(py, &self.0.host_pages)
    }
    #[getter]
    fn gone(&self) -> Vec<(NodeId, NodeId, usize)> {
        self.0.gone.iter().map(|gone| (gone.node, gone.heir, gone.pages)).collect()
    }
    fn __repr__(&self) -> String {
        format!("HostEvicted(host_pages={:?}, gone={:?})", self.0.host_pages, self.gone())
    }
}

#[pyclass(module = "unified_cache")]
pub(super) struct LockReceipt(pub crate::LockReceipt);

#[pymethods]
impl LockReceipt {
    #[getter]
    fn node(&self) -> NodeId {
        self.0.node()
    }
    #[getter]
    fn released(&self) -> bool {
        self.0.released()
    }
    fn __repr__(&self) -> String {
        format!("LockReceipt(node={}, released={})", self.0.node(), self.0.released())
    }
}

#[pyclass(module = "unified_cache")]
pub(super) struct HostLockReceipt(pub crate::HostLockReceipt);

#[pymethods]
impl HostLockReceipt {
    #[getter]
    fn node(&self) -> NodeId {
        self.0.node()
    }
    #[getter]
    fn released(&self) -> bool {
        self.0.released()
    }
    fn __repr__(&self) -> String {
        format!("HostLockReceipt(node={}, released={})", self.0.node(), self.0.released())
    }
}

#[pyclass(frozen, eq, hash, module = "unified_cache")]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct Ack(pub crate::Ack);

#[pymethods]
impl Ack {
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0.kind() {
            AckKind::Backup => "backup",
            AckKind::LoadBack => "load_back",
        }
    }
    #[getter]
    fn serial(&self) -> u64 {
        self.0.serial()
    }
    fn __repr__(&self) -> String {
        format!("Ack({}, {})", self.kind(), self.serial())
    }
}

#[pyclass(frozen, eq, hash, module = "unified_cache")]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct Pin(pub crate::Pin);

#[pymethods]
impl Pin {
    #[getter]
    fn node(&self) -> NodeId {
        self.0.node()
    }
    fn __repr__(&self) -> String {
        format!("Pin(node={})", self.0.node())
    }
}

#[pyclass(module = "unified_cache")]
pub(super) struct LoadBackPlan {
    pub plan: crate::LoadBackPlan,
    pub tree: Py<PrefixTree>,
}

#[pymethods]
impl LoadBackPlan {
    #[getter]
    fn nodes(&self) -> Vec<NodeId> {
        self.plan.nodes().to_vec()
    }
    #[getter]
    fn pages(&self) -> usize {
        self.plan.pages()
    }
    #[getter]
    fn host_pages<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        page_array(py, self.plan.host_pages())
    }
    #[getter]
    fn pending_ack(&self) -> Option<Ack> {
        self.plan.pending_ack().map(Ack)
    }
    fn cancel(&mut self, py: Python<'_>) -> PyResult<()> {
        let plan = &mut self.plan;
        let long = plan.nodes().len() >= LONG_LOAD_NODES;
        self.tree.get().try_run(py, long, |tree| tree.cancel_load_back_plan(plan))
    }
    fn __repr__(&self) -> String {
        format!("LoadBackPlan(nodes={:?}, pages={})", self.plan.nodes(), self.plan.pages())
    }
}

#[pyclass(frozen, module = "unified_cache")]
pub(super) struct NodeInfo(pub crate::NodeInfo);

#[pymethods]
impl NodeInfo {
    #[getter]
    fn id(&self) -> NodeId {
        self.0.id
    }
    #[getter]
    fn pages(&self) -> usize {
        self.0.pages
    }
    #[getter]
    fn device_pages<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.0.device_pages.as_deref().map(|pages| page_array(py, pages))
    }
    #[getter]
    fn host_pages<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.0.host_pages.as_deref().map(|pages| page_array(py, pages))
    }
    #[getter]
    fn parent(&self) -> Option<NodeId> {
        self.0.parent
    }
    #[getter]
    fn hit_count(&self) -> u64 {
        self.0.hit_count
    }
    #[getter]
    fn priority(&self) -> i64 {
        self.0.priority
    }
    #[getter]
    fn lock_ref(&self) -> u32 {
        self.0.lock_ref
    }
    #[getter]
    fn host_lock_ref(&self) -> u32 {
        self.0.host_lock_ref
    }
    /// A named tuple of the Python package, which is what a reader of `locks` expects.
    #[getter]
    fn locks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static LOCKS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        LOCKS.import(py, "unified_cache.tree", "Locks")?.call1((self.0.lock_ref, self.0.host_lock_ref))
    }
    #[getter]
    fn pending(&self) -> Option<Ack> {
        self.0.pending.map(Ack)
    }
    #[getter]
    fn held(&self) -> bool {
        self.0.held
    }
    #[getter]
    fn pins(&self) -> u32 {
        self.0.pins
    }
    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

#[pyclass(frozen, eq, get_all, module = "unified_cache.events")]
#[derive(PartialEq, Debug)]
pub(super) struct Stored {
    tier: &'static str,
    hashes: Vec<i64>,
    parent: Option<i64>,
    tokens: Vec<u32>,
    page_size: usize,
    extra_key: Option<String>,
    cache_salt: Option<String>,
}

type StoredArgs = (&'static str, Vec<i64>, Option<i64>, Vec<u32>, usize, Option<String>, Option<String>);

/// The tier of this name, as events carry it.
fn tier_name(py: Python<'_>, tier: &str) -> PyResult<&'static str> {
    let known = [crate::Tier::Device, crate::Tier::Host].map(crate::Tier::name);
    known.into_iter().find(|name| *name == tier).ok_or_else(|| {
        super::errors::argument_error(py, format!("tier is {tier:?}, allowed are {}", known.join(", ")))
    })
}

#[pymethods]
impl Stored {
    #[new]
    #[pyo3(
        signature = (tier, hashes, parent, tokens, page_size, extra_key=None, cache_salt=None),
        text_signature = "(tier, hashes, parent, tokens, page_size, extra_key=None, cache_salt=None)"
    )]
    #[allow(clippy::too_many_arguments)] // the fields
    fn new(
        py: Python<'_>,
        tier: &str,
        hashes: Vec<i64>,
        parent: Option<i64>,
        tokens: Vec<u32>,
        page_size: usize,
        extra_key: Option<String>,
        cache_salt: Option<String>,
    ) -> PyResult<Self> {
        Ok(Self { tier: tier_name(py, tier)?, hashes, parent, tokens, page_size, extra_key, cache_salt })
    }
    fn __getnewargs__(&self) -> StoredArgs {
        let (hashes, tokens) = (self.hashes.clone(), self.tokens.clone());
        let (extra_key, cache_salt) = (self.extra_key.clone(), self.cache_salt.clone());
        (self.tier, hashes, self.parent, tokens, self.page_size, extra_key, cache_salt)
    }
    fn __repr__(&self) -> String {
        format!("{self:?}")
    }
}

#[pyclass(frozen, eq, get_all, module = "unified_cache.events")]
#[derive(PartialEq, Debug)]
pub(super) struct Removed {
    tier: &'static str,
    hashes: Vec<i64>,
}

#[pymethods]
impl Removed {
    #[new]
    #[pyo3(signature = (tier, hashes), text_signature = "(tier, hashes)")]
    fn new(py: Python<'_>, tier: &str, hashes: Vec<i64>) -> PyResult<Self> {
        Ok(Self { tier: tier_name(py, tier)?, hashes })
    }
    fn __getnewargs__(&self) -> (&'static str, Vec<i64>) {
        (self.tier, self.hashes.clone())
    }
    fn __repr__(&self) -> String {
        format!("{self:?}")
    }
}

#[pyclass(frozen, eq, module = "unified_cache.events")]
#[derive(PartialEq, Debug)]
pub(super) struct Cleared {}

#[pymethods]
impl Cleared {
    #[new]
    fn new() -> Self {
        Self {}
    }
    #[allow(clippy::unused_self)]
    fn __repr__(&self) -> &'static str {
        "Cleared()"
    }
}

/// The Python object of an event.
pub(super) fn event_object(py: Python<'_>, event: Event) -> PyResult<Bound<'_, PyAny>> {
    Ok(match event {
        Event::Stored { tier, hashes, parent, tokens, page_size, extra_key, cache_salt } => {
            let stored =
                Stored { tier: tier.name(), hashes, parent, tokens, page_size, extra_key, cache_salt };
            Bound::new(py, stored)?.into_any()
        }
        Event::Removed { tier, hashes } => Bound::new(py, Removed { tier: tier.name(), hashes })?.into_any(),
        Event::Cleared => Bound::new(py, Cleared {})?.into_any(),
    })
}

/// Adds the classes to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Match>()?;
    module.add_class::<Inserted>()?;
    module.add_class::<Evicted>()?;
    module.add_class::<HostEvicted>()?;
    module.add_class::<BackupPlan>()?;
    module.add_class::<BackupDone>()?;
    module.add_class::<LoadBackPlan>()?;
    module.add_class::<HostInserted>()?;
    module.add_class::<NodeInfo>()?;
    module.add_class::<LockReceipt>()?;
    module.add_class::<HostLockReceipt>()?;
    module.add_class::<Ack>()?;
    module.add_class::<Pin>()?;
    module.add_class::<Stored>()?;
    module.add_class::<Removed>()?;
    module.add_class::<Cleared>()
}
