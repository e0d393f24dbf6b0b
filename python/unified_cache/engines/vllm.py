"""The cache inside vLLM: its KV connector ``UnifiedCacheConnector``.

vLLM keeps the device; host and storage are the cache's. This module only fits vLLM's calls to the two sides,
`unified_cache.engines.vllm_scheduler` (decides) and `unified_cache.engines.vllm_worker` (moves bytes).
docs/vllm.md says how to use it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from unified_cache._torch import torch
from unified_cache.engines.vllm_messages import Report, Reports, Step, WorkerAbout
from unified_cache.engines.vllm_scheduler import Event, Scheduled, SchedulerSide
from unified_cache.engines.vllm_settings import VllmSettings
from unified_cache.engines.vllm_worker import WorkerSide
from unified_cache.errors import ArgumentError, MissingDependencyError
from unified_cache.storage.keys import fingerprint

try:
    import vllm
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        get_kv_cache_spec_kind,
        group_kernel_blocks,
        iter_layer_specs,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise MissingDependencyError(
        f"this needs vLLM 0.32, which can not be imported as it was then ({error}): "
        "install it, or take a unified-cache that knows the vLLM you have"
    ) from None

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["UnifiedCacheConnector", "UnifiedCacheStats"]

_log = logging.getLogger(__name__)

# Whose interface this was written for; others are taken if they have all that is used here.
_TESTED = "0.32"
_USED = (
    "build_connector_meta",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_external_cache_hit_sources",
    "get_finished",
    "get_handshake_metadata",
    "get_num_new_matched_tokens",
    "get_required_kvcache_layout",
    "handle_preemptions",
    "on_new_request",
    "register_kv_caches",
    "reset_cache",
    "save_kv_layer",
    "set_xfer_handshake_metadata_pp_aware",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
)
# Each block of each layer is contiguous, whatever is inside it.
_LAYOUT = "LBHNC"


@dataclass
class _Handshake(base.KVConnectorHandshakeMetadata):
    about: WorkerAbout


@dataclass
class _StepMetadata(base.KVConnectorMetadata):
    step: Step


@dataclass
class _WorkerReports(base.KVConnectorWorkerMetadata):
    reports: list[Report]

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> base.KVConnectorWorkerMetadata:
        assert isinstance(other, _WorkerReports)
        both = Reports(self.reports)
        both.add(other.reports)
        return _WorkerReports(both.all())


@dataclass
class UnifiedCacheStats(KVConnectorStats):
    """Counts of an interval, by name."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class _PromMetrics(KVConnectorPromMetrics):
    """``vllm:unified_cache_events_total{name=...}``: the counts, as they come."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metric = self._counter_cls(
            name="vllm:unified_cache",
            documentation="What the unified cache counts; the label says what.",
            labelnames=[*labelnames, "count"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            self._metric.labels(*labels, name).inc(count)


class UnifiedCacheConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """See the module.

    Raises:
        ArgumentError: a vLLM, a platform or a model that this can not serve, or a setting that is wrong;
            in one line.
    """

    def __init__(self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        _check_version()
        super().__init__(vllm_config, role, kv_cache_config)
        spec = _check_model(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        events = vllm_config.kv_events_config
        self._settings = VllmSettings.parse(
            transfer.kv_connector_extra_config,
            block_size=spec.block_size,
            model=vllm_config.model_config.model,
            role=transfer.kv_role or "kv_both",
            # Its hashes are of other blocks than these otherwise.
            events=events is not None
            and bool(events.enable_kv_cache_events)
            and kv_cache_config.hash_block_size in (None, spec.block_size),
        )
        _check_settings(vllm_config, self._settings)
        self._block_size = spec.block_size
        self._about: WorkerAbout | None = None
        self._kind = get_kv_cache_spec_kind(spec).value
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == base.KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                _log.warning(
                    "unified-cache: kv_load_failure_policy is %r, so a load that fails ends its request; "
                    "with 'recompute' it is computed",
                    transfer.kv_load_failure_policy,
                )
            self._scheduler = SchedulerSide(self._settings)
        else:
            self._worker = WorkerSide(self._settings, partial(_fingerprint, vllm_config, self._settings))

    # What vLLM asks of the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return _LAYOUT

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("transfer") == "layers"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return UnifiedCacheStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return _PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is computed again."""
        return False

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        group = self._kv_cache_config.kv_cache_groups[0]
        blocks = self._kv_cache_config.num_blocks
        names = [name for name in group.layer_names if name in kv_caches]
        views = {name: _as_blocks(name, kv_caches[name], blocks) for name in names}
        self._about = self._of_worker.register(views)

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        return None if self._about is None else _Handshake(self._about)

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        step = _step_of(kv_connector_metadata)
        self._of_worker.before_step(step)
        self._of_worker.open_saves(step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._of_worker.start_loads(_step_of(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._of_worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._of_worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._of_worker.start_saves(_step_of(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._of_worker.finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._of_worker.failed_blocks()

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        reports = self._of_worker.take_reports()
        return _WorkerReports(reports) if reports else None

    # The scheduler's side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._of_scheduler.start([metadata[rank].about for rank in sorted(metadata)])

    def on_new_request(self, request: Any) -> None:
        extra_key, lora = _namespace(request)
        self._of_scheduler.begin(
            request.request_id,
            lambda: request.all_token_ids,
            extra_key=extra_key,
            cache_salt=request.cache_salt,
            lora=lora,
            names=lambda: request.block_hashes,
            # Their tokens do not say what is computed, or change after the fact.
            cacheable=request.prompt_embeds is None
            and not request.resumable
            and not getattr(request.lora_request, "load_inplace", False),
            reads=not request.skip_reading_prefix_cache,
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            return 0, False
        return self._of_scheduler.match(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids()[0] if num_external_tokens else []
        self._of_scheduler.allocated(request.request_id, ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        host, storage = self._of_scheduler.hit_sources(request.request_id, num_external_tokens)
        both = {CacheHitSource.HOST: host, CacheHitSource.DISK: storage}
        return {source: tokens for source, tokens in both.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        return _StepMetadata(self._of_scheduler.step(_scheduled(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, _WorkerReports):
            self._of_scheduler.reported(reports.reports)

    def has_pending_push_work(self) -> bool:
        """Steps go on, if empty ones, until saves have ended."""
        return self._of_scheduler.copying

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._of_scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def take_events(self) -> Iterable[Any]:
        return [self._event(event) for event in self._of_scheduler.take_events()]

    def reset_cache(self) -> bool | None:
        self._of_scheduler.reset()
        return True

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        side = self._scheduler or self._worker
        assert side is not None
        counts = side.take_counts()
        return UnifiedCacheStats(counts) if counts else None

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.close()

    @property
    def scheduler_side(self) -> SchedulerSide | None:
        """To look at; None in a worker."""
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide | None:
        """To look at; None in the scheduler."""
        return self._worker

    @property
    def _of_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _of_worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def _event(self, event: Event) -> Any:
        names = [maybe_convert_block_hash(name) for name in event.names]
        if event.kind == "removed":
            return BlockRemoved(block_hashes=names, medium="CPU", group_idx=0)
        return BlockStored(
            block_hashes=names,
            parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
            token_ids=list(event.tokens),
            block_size=self._block_size,
            lora_id=None,
            medium="CPU",
            lora_name=event.lora,
            group_idx=0,
            kv_cache_spec_kind=self._kind,
        )


def _step_of(metadata: base.KVConnectorMetadata) -> Step:
    assert isinstance(metadata, _StepMetadata)
    return metadata.step


def _scheduled(output: Any) -> Iterable[Scheduled]:
    """What a step of vLLM computes, request by request."""
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield Scheduled(new.req_id, new.block_ids[0], True, new.num_computed_tokens, tokens[new.req_id])
    cached = output.scheduled_cached_reqs
    for at, name in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[at]
        yield Scheduled(
            name,
            [] if blocks is None else blocks[0],
            name in cached.resumed_req_ids,
            cached.num_computed_tokens[at],
            tokens.get(name, 0),
        )


def _namespace(request: Any) -> tuple[str | None, str | None]:
    """What beside its tokens and its salt decides on a request's KV, and the name of its adapter."""
    parts: dict[str, Any] = {}
    lora = request.lora_request
    if lora is not None:
        # The path too: the same name may stand for another adapter after a restart.
        parts["lora"] = [lora.lora_name, lora.lora_path]
    if request.mm_features:
        parts["mm"] = [
            [feature.identifier, feature.mm_position.offset, feature.mm_position.length]
            for feature in request.mm_features
        ]
    key = json.dumps(parts, sort_keys=True) if parts else None
    return key, None if lora is None else lora.lora_name


def _as_blocks(name: str, cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """A layer's blocks as uint8 (blocks, bytes), rows contiguous, without a copy."""
    grouped = group_kernel_blocks(cache, blocks)
    size = grouped.element_size()
    inside = grouped[0]
    dense = (
        inside.numel() == 0
        or sum((count - 1) * stride for count, stride in zip(inside.shape, inside.stride(), strict=True))
        == inside.numel() - 1
    )
    if grouped.shape[0] != blocks or not dense:
        raise ArgumentError(
            f"unified-cache: the blocks of layer {name} are not contiguous in this layout of vLLM "
            f"({tuple(cache.shape)}, strides {cache.stride()}): it can not be cached"
        )
    row = inside.numel() * size
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        grouped.untyped_storage(),
        grouped.storage_offset() * size,
        (blocks, row),
        (grouped.stride(0) * size, 1),
    )


def _check_version() -> None:
    lacking = [name for name in _USED if not hasattr(base.KVConnectorBase_V1, name)]
    if lacking:
        raise ArgumentError(
            f"unified-cache knows the connectors of vLLM {_TESTED}, this is {vllm.__version__}, "
            f"which has no {', '.join(lacking)}"
        )


def _check_model(vllm_config: Any, kv_cache_config: Any) -> Any:
    """Refuse what can not be served; returns what vLLM says of the model's only group of layers."""
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise ArgumentError(
            f"unified-cache serves vLLM on CPUs and CUDA GPUs, not on {current_platform.device_name}"
        )
    groups = kv_cache_config.kv_cache_groups
    kinds = [get_kv_cache_spec_kind(group.kv_cache_spec).value for group in groups]
    model = vllm_config.model_config.model
    if len(groups) != 1 or any(
        type(spec) not in (FullAttentionSpec, MLAAttentionSpec)
        for spec in iter_layer_specs(groups[0].kv_cache_spec)
    ):
        raise ArgumentError(
            f"unified-cache: {model} keeps its KV in groups of these kinds: {', '.join(kinds) or 'none'}; "
            "only models whose layers all have full attention can be cached for now"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        # Also where vLLM itself turns it off: attention that reads nothing but what the step computes,
        # pooling over all tokens. A prompt of which the front is not computed would be answered wrongly.
        raise ArgumentError(
            f"unified-cache: prefix caching is off, by --no-enable-prefix-caching or because vLLM has none "
            f"for {model} here (MLA on most CPUs, some pooling models), so nothing that is cached can be used"
        )
    parallel = vllm_config.parallel_config
    for name in (
        "decode_context_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise ArgumentError(f"unified-cache: {name} must be 1 for now, not {getattr(parallel, name)}")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.use_eagle():
        raise ArgumentError(
            f"unified-cache: speculative decoding by {speculative.method} has KV of its own, "
            "which can not be cached for now"
        )
    return groups[0].kv_cache_spec


def _check_settings(vllm_config: Any, settings: VllmSettings) -> None:
    """Refuse settings that do not go with those of vLLM."""
    recompute = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    if settings.transfer != "async" and recompute and vllm_config.max_concurrent_batches > 1:
        # vLLM throws away what the step of the load computed, and keeps what the next one computed from it.
        raise ArgumentError(
            f"unified-cache: transfer={settings.transfer!r} with kv_load_failure_policy 'recompute' needs "
            "--no-async-scheduling: vLLM begins the next step before it knows that a load has failed; or "
            "take transfer='async', or the policy 'fail'"
        )
    if settings.cache.storage is not None and vllm_config.weight_transfer_config is not None:
        raise ArgumentError(
            "unified-cache: weights that change at run time (--weight-transfer-config) go with no storage: "
            "what is stored would be found for all of them; leave out the setting storage"
        )


def _fingerprint(vllm_config: Any, settings: VllmSettings, layers: int, block_bytes: int) -> str:
    """16 hex digits that differ as soon as equal tokens may have other bytes in their blocks."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    hf_config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        hf_config.pop(name, None)
    shape = json.dumps(hf_config, sort_keys=True, default=str)
    tp, pp = get_tp_group(), get_pp_group()
    inside = {
        "vllm": vllm.__version__,
        "platform": current_platform.device_name,
        "blocks": _attention(vllm_config, settings.cache.page_size),
        "layout": _LAYOUT,
        "revision": str(model.revision),
        "config": hashlib.sha256(shape.encode()).hexdigest(),
        "quantization": str(model.quantization),
        "cache dtype": str(cache.cache_dtype),
        "tp": f"{tp.rank_in_group}/{tp.world_size}",
    }
    return fingerprint(
        model=settings.cache.model,
        weight_version=settings.cache.weight_version,
        pool=0,
        kind="vllm",
        dtype=str(model.dtype),
        layers=layers,
        stage=pp.rank_in_group,
        stages=parallel.pipeline_parallel_size,
        heads=1,
        head_groups=1,
        head_dim=block_bytes,
        page_size=settings.cache.page_size,
        context_part=0,
        context_parts=1,
        layout=json.dumps(inside, sort_keys=True),
    )


def _attention(vllm_config: Any, block_size: int) -> str:
    """What decides how a block is laid out inside: the attention's kernels, on a CPU its instructions too."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    names = sorted(backend.get_name() for backend in get_current_attn_backends(vllm_config))
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        model, cache_dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
        isa = _get_attn_isa(model.dtype, block_size, model.get_head_size(), cache_dtype)
        names += [isa, platform.machine(), torch.backends.cpu.get_cpu_capability()]
    return " ".join(names)
