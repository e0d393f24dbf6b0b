"""Host and storage behind the paged cache of `transformers`' continuous batching.

`transformers` has no place to plug a tier in, so methods of one scheduler and of its cache are replaced on
these objects, and only if they are those that we know (see `check_version`). Its own blocks stay its own: it
decides what lies on the device, and shares prefixes there by itself. What is beside it are the two sides of
the vLLM connector, here in one process: the scheduler's with the prefix tree of the host, and one worker that
copies whole blocks.

All calls belong on the thread that generates; between two runs on any one.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from unified_cache.engines.vllm_scheduler import Scheduled, SchedulerSide
from unified_cache.engines.vllm_settings import VllmSettings
from unified_cache.engines.vllm_worker import WorkerSide
from unified_cache.errors import ArgumentError
from unified_cache.storage.contract import Backend

__all__ = ["KNOWN", "BlockTier", "check_version"]

_log = logging.getLogger(__name__)

KNOWN = "5.24"

_PACKAGE = "transformers.generation.continuous_batching"
# What is called or replaced, with the arguments that it must take.
_USED = {
    "continuous_api.ContinuousBatchingManager._create_batch_processor": (),
    "continuous_api.ContinuousBatchingManager.is_running": (),
    "continuous_api.ContinuousBatchingManager.start": (),
    "continuous_api.ContinuousBatchingManager.stop": ("block", "keep_for_next_session"),
    "continuous_api.ContinuousMixin.init_continuous_batching": (
        "generation_config",
        "continuous_batching_config",
    ),
    "continuous_api.ContinuousMixin.generate_batch": ("inputs", "persistent_manager"),
    "cache.PagedAttentionCache.search_prefix_match": ("request_id", "prompt_ids"),
    "cache.PagedAttentionCache.mark_complete_blocks": ("state", "complete_blocks"),
    "cache.PagedAttentionCache.free_blocks": ("request_id", "no_cache"),
    "cache.PagedAttentionCache.evict_cached_blocks": (),
    "cache_allocators.CacheAllocator.needs_new_sectors": ("request_id", "past_length", "query_length"),
    "cache_allocators.CacheAllocator.allocate_cache_to_request": (
        "request_id",
        "past_length",
        "query_length",
    ),
    "cache_allocators.CacheAllocator.mark_complete_blocks": ("request_id", "token_ids", "new_new_blocks"),
    "cache_allocators.CachePool.allocate_sector": ("index",),
    "cache_allocators.CachePool.count_free_blocks": ("index",),
    "cache_allocators.CachePool.free_blocks": ("index", "block_ids"),
    "cache_allocators.CachePool.get_free_blocks": ("index", "num_blocks"),
    "scheduler.Scheduler.add_waiting_request": ("state",),
    "scheduler.Scheduler._get_waiting_candidates": (),
    "utils.stream_context": (),
}

# While nothing else is to be done: how long requests that wait for storage are looked after at a time, and
# how often. The loop of `transformers` itself looks ten times a second.
_IDLE_SECONDS = 0.05
_POLL_SECONDS = 0.001


def check_version() -> None:
    """Refuse a `transformers` whose continuous batching is not the one that we know.

    Raises:
        ArgumentError: it differs; the message has the version and the differences.
    """
    differences = []
    for path, arguments in _USED.items():
        module, *names = path.split(".")
        found: Any = None
        try:
            found = import_module(f"{_PACKAGE}.{module}")
            for name in names:
                found = getattr(found, name)
        except (ImportError, AttributeError):
            differences.append(f"there is no {path}")
            continue
        # Some are wrapped by decorators that keep their signature.
        lacking = set(arguments) - set(inspect.signature(found).parameters)
        differences += [f"{path} takes no {name}" for name in sorted(lacking)]
    if differences:
        version = import_module("transformers").__version__
        raise ArgumentError(
            f"transformers {version} has another continuous batching than the one that "
            f"unified-cache knows, that of {KNOWN}: {'; '.join(differences)}"
        )


class BlockTier:
    """Host and storage behind one batch processor.

    Args:
        processor: a `ContinuousBatchProcessor` that has not begun.
        settings: of the tier.
        fingerprint: names what a block holds.
        backend: the storage; closed with this.

    Raises:
        ArgumentError: a processor whose blocks can not be cached, and why.
        CapacityError: host memory can not be had.
        StorageError: the storage has no room for a block.
    """

    def __init__(
        self, processor: Any, settings: VllmSettings, fingerprint: str, backend: Backend | None
    ) -> None:
        paged = processor.cache
        kinds = list(paged.cache_allocators)
        if kinds != ["full_attention"] or not paged.use_prefix_sharing:
            what = f"it has blocks of {', '.join(kinds)}"
            if not paged.use_prefix_sharing:
                what += ", which requests do not share"
            raise ArgumentError(f"model can not be cached in batches: {what}; full attention alone can be")
        if processor.distributed_helper.tp_size != 1:
            raise ArgumentError("model must be on one rank, not on several that share its heads")
        self.processor = processor
        self._paged = paged
        self._scheduler = processor.scheduler
        self._allocator = paged.cache_allocators["full_attention"]
        self._page = int(self._allocator.tokens_per_page)
        self._index = int(self._allocator.index)
        self._space: tuple[str | None, str | None] = (None, None)
        self._waiting: set[str] = set()  # requests of which storage may still say something
        self._tracked: set[str] = set()
        self._counts: dict[str, int] = {}
        self._closed = False
        self._stream = import_module(f"{_PACKAGE}.utils").stream_context
        self._worker = WorkerSide(settings, lambda layers, size: fingerprint, backend=backend)
        # A block of all layers is one row.
        about = self._worker.register({"blocks": self._allocator._copy_view})
        self._side = SchedulerSide(settings, backend=backend)
        self._side.start([about])
        self._searches = backend is not None
        self._match_on_device: Callable[[str, list[int]], int] = paged.search_prefix_match
        self._mark: Callable[[Any, dict[str, int]], None] = paged.mark_complete_blocks
        self._free: Callable[..., None] = paged.free_blocks
        self._give: Callable[[int, int], list[int]] = paged.pool.get_free_blocks
        self._arrive: Callable[[Any], None] = self._scheduler.add_waiting_request
        self._candidates: Callable[[], list[Any]] = self._scheduler._get_waiting_candidates
        paged.search_prefix_match = self._search_prefix_match
        paged.mark_complete_blocks = self._mark_complete_blocks
        paged.free_blocks = self._free_blocks
        paged.pool.get_free_blocks = self._get_free_blocks
        self._scheduler.add_waiting_request = self._add_waiting_request
        self._scheduler._get_waiting_candidates = self._waiting_candidates

    # Between two runs

    def begin_run(self, extra_key: str | None, cache_salt: str | None) -> None:
        """The requests that come now are of this namespace."""
        space = (extra_key, cache_salt)
        if space != self._space:
            # Blocks on the device are shared by their tokens alone.
            self._paged.evict_cached_blocks()
        self._space = space

    def end_run(self) -> None:
        """Nobody generates any more, so there are no requests: a run may have been stopped."""
        for name in list(self._tracked):
            self._forget(name)
        self._turn()

    def settle(self, timeout: float | None) -> bool:
        """Wait until nothing is under way; False if there was not enough time."""
        end = None if timeout is None else time.monotonic() + timeout
        self._turn()
        while self._side.usage()["operations"]:
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(_POLL_SECONDS)
            self._turn()
        return True

    def reset(self, *, host: bool) -> None:
        """Forget what is on the device, and on host too."""
        self._paged.evict_cached_blocks()
        if host:
            self._side.reset()

    def stats(self) -> dict[str, int]:
        """Counters by name; they only go up."""
        for counts in (self._side.take_counts(), self._worker.take_counts()):
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count
        return dict(self._counts)

    def usage(self) -> dict[str, int]:
        """What is held on host, in blocks: ``free + tree + operations = pages``."""
        return self._side.usage()

    def close(self) -> None:
        """Let what is on its way to storage get there, then end all threads."""
        if not self._closed:
            self._closed = True
            self._worker.close()
            self._side.close()

    # In place of methods of the scheduler and of its cache

    def _add_waiting_request(self, state: Any) -> None:
        self._arrive(state)
        name, (extra_key, cache_salt) = state.request_id, self._space
        self._side.begin(
            name,
            lambda: state.initial_tokens + state.generated_tokens,
            extra_key=extra_key,
            cache_salt=cache_salt,
        )
        self._tracked.add(name)
        if self._searches:
            self._waiting.add(name)

    def _waiting_candidates(self) -> list[Any]:
        """Those that may begin: the others wait for storage, as long as the prefetch policy says."""
        self._turn()
        end = time.monotonic() + _IDLE_SECONDS
        while True:
            candidates = self._candidates()
            ready = [state for state in candidates if not self._held(state)]
            if ready or not candidates or self._scheduler.active_requests or time.monotonic() >= end:
                return ready
            time.sleep(_POLL_SECONDS)
            self._turn()

    def _held(self, state: Any) -> bool:
        name = state.request_id
        if name not in self._waiting or state.is_cpu_offloaded:
            return False
        if self._side.match(name, 0)[0] is None:
            return True
        self._waiting.discard(name)
        return False

    def _search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        on_device = self._match_on_device(request_id, prompt_ids)
        more = self._side.match(request_id, on_device)[0] or 0
        if more:
            more = self._load(request_id, prompt_ids, on_device, more)
        return on_device + more

    def _mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        self._mark(state, complete_blocks)
        table = self._allocator.block_table.get(state.request_id)
        if not complete_blocks or not table:
            return
        named = self._allocator.ledger.block_to_hash
        whole = next((at for at, block in enumerate(table) if block not in named), len(table))
        self._turn([Scheduled(state.request_id, table[:whole], True, whole * self._page, 0)])

    def _free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self._free(request_id, no_cache)
        self._forget(request_id)

    def _get_free_blocks(self, index: int, num_blocks: int) -> list[int]:
        blocks = self._give(index, num_blocks)
        # They will be written anew, and what they held may still be on its way to host.
        self._side.rewritten(blocks)
        self._turn()
        return blocks

    # Inside

    def _forget(self, name: str) -> None:
        self._waiting.discard(name)
        self._tracked.discard(name)
        self._side.finished(name)

    def _load(self, name: str, prompt: Sequence[int], first: int, more: int) -> int:
        """Bring tokens from host to new blocks of a request; returns how many are there."""
        if not self._take_blocks(name, first, more):
            self._side.allocated(name, (), 0)
            return 0
        table, before = self._allocator.block_table[name], first // self._page
        self._side.allocated(name, table, more)
        self._turn()  # it waits for the copy
        failed = self._worker.failed_blocks()
        loaded = next((at for at, block in enumerate(table[before:]) if block in failed), more // self._page)
        if surplus := table[before + loaded :]:
            del table[before + loaded :]
            self._paged.pool.free_blocks(self._index, surplus)
        if not table:
            del self._allocator.block_table[name]
        if loaded:
            # So that others find them on the device.
            self._allocator.mark_complete_blocks(name, list(prompt), loaded)
        return loaded * self._page

    def _take_blocks(self, name: str, first: int, more: int) -> bool:
        """Blocks for tokens to load, and one to compute in."""
        if not self._fits(more):
            # The scheduler does so too: what it keeps for nobody is no reason to compute something again.
            self._paged.evict_cached_blocks()
            self._paged.pool.try_to_free_sectors()
            if not self._fits(more):
                return False
        for _ in range(self._allocator.needs_new_sectors(name, first, more)):
            self._paged.pool.allocate_sector(self._index)
        self._allocator.allocate_cache_to_request(name, first, more)
        return True

    def _fits(self, tokens: int) -> bool:
        pool = self._paged.pool
        free = pool.count_free_blocks(self._index)
        free += pool.num_free_sectors * self._allocator.blocks_per_sector
        return bool(tokens // self._page + 1 <= free)

    def _turn(self, items: Iterable[Scheduled] = ()) -> None:
        """One step of both sides."""
        # Copies wait for the forwards that were launched on the stream where they are.
        with self._stream(self.processor.inputs_and_outputs.compute_stream):
            step = self._side.step(items)
            if step:
                self._worker.before_step(step)
                self._worker.start_loads(step)
                self._worker.start_saves(step)
            self._side.reported(self._worker.take_reports())
