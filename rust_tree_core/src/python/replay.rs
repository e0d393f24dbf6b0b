//! The replay of traces, as the package's command uses it.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::buffers::page_ids;
use super::errors::{poisoned_error, tree_error};
use crate::replay::{ReplayConfig, Requests, Unit};
use crate::{GuardError, Guarded, WritePolicy};

#[pyclass(frozen, module = "unified_cache._native")]
pub(super) struct Replay(Guarded<crate::replay::Replay>);

impl Replay {
    /// Runs a call without the interpreter's lock: slices of a trace take milliseconds.
    fn detached<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut crate::replay::Replay) -> Result<R, crate::Error> + Send,
    ) -> PyResult<R> {
        let done = py.detach(|| self.0.run(call)).map_err(|error| {
            let text = match error {
                GuardError::Panicked(text) => format!("internal error in the replay: {text}"),
                GuardError::Poisoned => "an earlier call failed inside".to_owned(),
            };
            poisoned_error(py, text)
        })?;
        done.map_err(|error| tree_error(py, error))
    }
}

#[pymethods]
impl Replay {
    /// The package checks its settings before it calls this.
    #[new]
    #[pyo3(
        signature = (*, device_blocks, host_blocks, block_size, page_size, eviction_policy, policy_options, write_policy,
                     write_through_threshold, host_order)
    )]
    #[allow(clippy::too_many_arguments)] // one a setting
    fn new(
        py: Python<'_>,
        device_blocks: usize,
        host_blocks: usize,
        block_size: usize,
        page_size: Option<usize>,
        eviction_policy: String,
        policy_options: Vec<(String, i64)>,
        write_policy: &str,
        write_through_threshold: Option<u64>,
        host_order: &str,
    ) -> PyResult<Self> {
        let made = WritePolicy::from_name(write_policy).and_then(|write_policy| {
            crate::replay::Replay::new(&ReplayConfig {
                device_blocks,
                host_blocks,
                block_size,
                unit: page_size.map_or(Unit::Blocks, |page_size| Unit::Tokens { page_size }),
                eviction_policy,
                policy_options,
                write_policy,
                write_through_threshold,
                host_order: ReplayConfig::host_order_from_name(host_order)?,
            })
        });
        made.map(|replay| Self(Guarded::new(replay))).map_err(|error| tree_error(py, error))
    }

    fn run(
        &self,
        py: Python<'_>,
        input_lengths: &Bound<'_, PyAny>,
        block_counts: &Bound<'_, PyAny>,
        hash_ids: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let lengths = page_ids(input_lengths, "input_lengths")?;
        let counts = page_ids(block_counts, "block_counts")?;
        let ids = page_ids(hash_ids, "hash_ids")?;
        let requests = Requests {
            input_lengths: lengths.as_slice(),
            block_counts: counts.as_slice(),
            hash_ids: ids.as_slice(),
        };
        self.detached(py, |replay| replay.run(&requests))
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = self.detached(py, |replay| Ok(replay.report().clone()))?;
        let counters = PyDict::new(py);
        for (name, count) in [
            ("requests", report.requests),
            ("bypassed", report.bypassed),
            ("blocks", report.blocks),
            ("tokens", report.tokens),
            ("device_hit_blocks", report.device_hit_blocks),
            ("host_hit_blocks", report.host_hit_blocks),
            ("device_hit_tokens", report.device_hit_tokens),
            ("host_hit_tokens", report.host_hit_tokens),
            ("device_evicted", report.device_evicted),
            ("demoted", report.demoted),
            ("host_evicted", report.host_evicted),
            ("copied_to_host", report.copied_to_host),
            ("copied_to_device", report.copied_to_device),
            ("dropped", report.dropped),
            ("backups_given_up", report.backups_given_up),
        ] {
            counters.set_item(name, count)?;
        }
        Ok(counters)
    }

    #[getter]
    fn seconds(&self, py: Python<'_>) -> PyResult<f64> {
        self.detached(py, |replay| Ok(replay.report().seconds))
    }

    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        self.detached(py, |replay| replay.check_invariants())
    }
}
