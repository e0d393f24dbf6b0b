"""A worker's side of the vLLM connector: it moves the bytes of its own blocks, and says what has ended.

A block is opaque: what lies where inside it is the business of vLLM's attention, so whole blocks are copied,
stored, and named by everything that changes their bytes.

Calls belong on the worker's thread, which runs the forward; `WorkerSide.wait_layer` and
`WorkerSide.save_layer` come from inside it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from unified_cache._torch import torch
from unified_cache.copies.choose import make_copy_engine
from unified_cache.copies.engine import CopyEngine, CopyHandle, LayerEvents
from unified_cache.engines.vllm_messages import Fetch, Load, Report, Save, Step, WorkerAbout
from unified_cache.engines.vllm_scheduler import open_shared_storage
from unified_cache.engines.vllm_settings import VllmSettings
from unified_cache.errors import UnifiedCacheError
from unified_cache.pools.device import MlaDevicePool
from unified_cache.pools.host import HostPool, host_pages_for
from unified_cache.pools.host_memory import HostMemory
from unified_cache.pools.planes import PoolPlanes
from unified_cache.storage.backup import StorageBackup, Threads, WriteJob
from unified_cache.storage.contract import Backend
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.keys import KeySpace, PoolKeys
from unified_cache.storage.lending import lender
from unified_cache.storage.objects import PageObjects
from unified_cache.storage.prefetch import ReadBatch, StoragePrefetch
from unified_cache.worker import WorkerPool

__all__ = ["LAYER_PARTS", "WorkerSide"]

_log = logging.getLogger(__name__)

# With transfer="layers": saves begin in so many parts, since each needs copy streams of its own.
LAYER_PARTS = 4

# Seconds that pages on their way to storage get at the end.
_CLOSE_SECONDS = 10.0


@dataclass(eq=False, slots=True)
class _Part:
    """Some layers that follow each other, and what copies them."""

    first: int
    layers: int
    engine: CopyEngine


@dataclass(eq=False, slots=True)
class _Copy:
    """One operation under way: a copy for each part of the layers."""

    op: int
    pages: int
    handles: list[CopyHandle] = field(default_factory=list)
    events: list[tuple[_Part, LayerEvents]] = field(default_factory=list)
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return all(handle.done for handle in self.handles)

    @property
    def failed(self) -> bool:
        return self.error is not None or any(handle.error is not None for handle in self.handles)

    def wait(self) -> None:
        """Wait until it has ended, well or not."""
        for handle in self.handles:
            with contextlib.suppress(UnifiedCacheError):
                handle.wait()


class WorkerSide:
    """Executes; see the module.

    Args:
        settings: of the connector.
        fingerprint: makes the name of what the blocks hold, from the layers and the bytes of a block.
        clock: seconds; several threads call it.
        backend: in place of what ``storage`` names.
        copies: makes the engine between device and host; None: the one that fits the device.
        threads: makes the threads that call the storage, from their name and number.
    """

    def __init__(
        self,
        settings: VllmSettings,
        fingerprint: Callable[[int, int], str],
        *,
        clock: Callable[[], float] = time.monotonic,
        backend: Backend | None = None,
        copies: Callable[[PoolPlanes, PoolPlanes], CopyEngine] | None = None,
        threads: Callable[[str, int], Threads] = WorkerPool,
    ) -> None:
        self._settings = settings
        self._config = settings.cache
        self._fingerprint = fingerprint
        self._clock = clock
        self._backend = backend
        self._make_engine = copies
        self._threads = threads
        self._parts: list[_Part] = []
        self._layers: dict[str, int] = {}
        self._host: HostPool | None = None
        self._objects: PageObjects | None = None
        self._keys = KeySpace(())
        self._guard: StorageGuard | None = None
        self._storage_counts = StorageCounts()
        self._seen_counts: dict[str, int] = {}
        self._reader: StoragePrefetch | None = None
        self._writer: StorageBackup | None = None
        self._done: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._saves: dict[int, _Copy] = {}
        self._loads: dict[int, tuple[Load, _Copy]] = {}
        self._reads: dict[ReadBatch, int] = {}
        self._writes: dict[WriteJob, int] = {}
        self._to_store: dict[int, WriteJob] = {}  # by save: as soon as its bytes are on host
        self._held: set[int] = set()  # of these: only when a step says so
        self._failed_blocks: set[int] = set()
        self._reports: list[Report] = []
        self._unsaved: Step | None = None  # a step whose saves have not begun
        self._open_saves: list[tuple[Save, _Copy]] = []  # of this step, in transfer="layers"
        self._saved_parts = 0
        self._ended_loads: list[str] = []
        self._counts: dict[str, int] = {}
        self._closed = False

    def register(self, blocks: Mapping[str, torch.Tensor]) -> WorkerAbout:
        """vLLM has its blocks: make what is beside them.

        Args:
            blocks: for each layer uint8 (blocks, bytes), rows contiguous; a layer that shares the blocks of
                another one may be there too.

        Raises:
            ArgumentError: settings that do not fit the machine.
            CapacityError: host memory can not be had.
            StorageError: the storage can not be used.
        """
        planes: list[torch.Tensor] = []
        known: dict[int, int] = {}
        for name, tensor in blocks.items():
            at = known.setdefault(tensor.data_ptr(), len(planes))
            if at == len(planes):
                planes.append(tensor)
            self._layers[name] = at
        pool = MlaDevicePool.from_tensors([tensor.unsqueeze(1) for tensor in planes])
        config = self._config
        pages = host_pages_for([pool], config.hicache_ratio, config.hicache_size)
        try:
            if config.storage is not None and self._backend is None:
                self._backend = open_shared_storage(config)
            memory = HostMemory(
                pinned=config.host_pinned,
                host_register_chunk=config.host_register_chunk,
                huge_pages=config.host_huge_pages,
                numa_node=config.host_numa_node,
            )
            lend = lender(self._backend)
            self._host = HostPool(pool, pages, layout="page_first", memory=memory, lend=lend)
            self._make_parts(pool, self._host)
            fingerprint = self._fingerprint(len(planes), planes[0].shape[1])
            if self._backend is not None:
                self._attach(self._host, self._backend, fingerprint)
        except BaseException:
            self.close()
            raise
        return WorkerAbout(pages, self._host.page_bytes, fingerprint)

    def _make_parts(self, pool: MlaDevicePool, host: HostPool) -> None:
        count = min(LAYER_PARTS, pool.layers) if self._settings.transfer == "layers" else 1
        edges = [pool.layers * at // count for at in range(count + 1)]
        for first, end in pairwise(edges):
            if count == 1 and self._make_engine is None:
                engine = make_copy_engine(
                    pool, host, blocks=self._config.copy_blocks, threads=self._config.copy_threads
                )
            else:
                engine = self._part_engine(pool, host, first, end)
            self._parts.append(_Part(first, end - first, engine))

    def _part_engine(self, pool: MlaDevicePool, host: HostPool, first: int, end: int) -> CopyEngine:
        device = PoolPlanes(pool.planes.tensors[first:end], 1)
        beside = PoolPlanes(host.planes.tensors[first:end], 1)
        if self._make_engine is not None:
            return self._make_engine(device, beside)
        if pool.device.type == "cpu":
            from unified_cache.copies.cpu import CpuCopyEngine

            return CpuCopyEngine(device, beside, threads=self._config.copy_threads)
        from unified_cache.copies.cuda import CudaCopyEngine

        return CudaCopyEngine(
            device,
            beside,
            host_registered=host.registered,
            blocks=self._config.copy_blocks,
            host_edges=[address for address, _ in host.pieces],
        )

    def _attach(self, host: HostPool, backend: Backend, fingerprint: str) -> None:
        config = self._config
        self._keys = KeySpace([PoolKeys(fingerprint)])
        self._objects = PageObjects([host], self._keys)
        self._guard = StorageGuard(
            backend,
            object_bytes=self._objects.largest,
            deadline=config.storage_timeout,
            clock=self._clock,
            counts=self._storage_counts,
            compression=config.storage_compression,
        )
        self._guard.register(host.memory)
        self._reader = StoragePrefetch(
            self._guard, self._threads("unified-cache storage reads", config.storage_read_threads), self._done
        )
        self._writer = StorageBackup(
            self._guard,
            self._threads("unified-cache storage writes", config.storage_write_threads),
            self._done,
        )

    # One step, in the order of vLLM's calls

    def before_step(self, step: Step) -> None:
        """Nothing of this step has touched a block yet: wait for saves of blocks that are written anew."""
        if self._unsaved is not None:
            # vLLM leaves out the end of a step in places, such as with drafts on all but the last stage.
            self.start_saves(self._unsaved)
        for op in step.store:
            self._held.discard(op)
            self._saved(op, failed=False)
        for op in step.drop:
            self._held.discard(op)
            self._to_store.pop(op, None)
        for op in step.wait:
            if op in self._saves:
                self._saves[op].wait()
        self._unsaved = step

    def start_loads(self, step: Step) -> None:
        """Begin loads and fetches; the forward of this step may be over already, or not."""
        for fetch in step.fetches:
            self._fetch(fetch)
        for load in step.loads:
            self._loads[load.op] = (load, self._load(load))
        if self._settings.transfer == "sync":
            for load in step.loads:
                self._loads[load.op][1].wait()

    def wait_layer(self, name: str) -> None:
        """The forward reads this layer next."""
        if self._settings.transfer != "layers" or not self._loads:
            return
        layer = self._layers.get(name)
        if layer is None:
            return
        for load, copy in self._loads.values():
            if not load.now or copy.error is not None:
                continue
            for part, events in copy.events:
                if part.first <= layer < part.first + part.layers:
                    try:
                        events.wait(layer - part.first)
                    except UnifiedCacheError as error:
                        copy.error = error

    def open_saves(self, step: Step) -> None:
        """The forward of this step begins: with transfer="layers" its saves follow it layer by layer."""
        self._saved_parts = 0
        self._open_saves = []
        if self._settings.transfer == "layers":
            self._open_saves = [(save, _Copy(save.op, len(save.pages))) for save in step.saves]

    def save_layer(self, name: str) -> None:
        """The forward has written this layer."""
        layer = self._layers.get(name)
        if not self._open_saves or layer is None:
            return
        while self._saved_parts < len(self._parts):
            part = self._parts[self._saved_parts]
            if layer < part.first + part.layers - 1:
                return
            self._saved_parts += 1
            for save, copy in self._open_saves:
                self._submit_save(save, copy, part)

    def start_saves(self, step: Step) -> None:
        """The forward of this step has been begun in whole."""
        opened = {save.op: copy for save, copy in self._open_saves}
        for save in step.saves:
            copy = opened.get(save.op)
            begun = self._saved_parts if copy is not None else 0
            copy = copy or _Copy(save.op, len(save.pages))
            for part in self._parts[begun:]:
                self._submit_save(save, copy, part)
            self._saves[save.op] = copy
            if save.digests is not None:
                self._store(save)
        self._open_saves = []
        self._unsaved = None

    def finished(self) -> set[str]:
        """The requests whose loads have ended since the last call, well or not, and that wait for it."""
        # What the forward of this step has read must be known to be sound by now.
        for load, copy in self._loads.values():
            if load.now:
                copy.wait()
        self._look()
        ended = set(self._ended_loads)
        self._ended_loads = []
        return ended

    def failed_blocks(self) -> set[int]:
        """Blocks that loads should have filled since the last call and did not."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_reports(self) -> list[Report]:
        """What has ended since the last call."""
        self._look()
        reports, self._reports = self._reports, []
        return reports

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by name; without what is 0."""
        now = self._storage_counts.as_dict()
        grown = {name: count - self._seen_counts.get(name, 0) for name, count in now.items()}
        self._seen_counts = now
        counts, self._counts = self._counts | grown, {}
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        """Give what is on its way to storage a while, then end all threads. More than once is fine."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + _CLOSE_SECONDS
        if self._writer is not None:
            for copy in self._saves.values():
                copy.wait()
            self._look()
            threads = self._writer.threads
            if isinstance(threads, WorkerPool):
                threads.drain(max(end - time.monotonic(), 0))
        for job in self._writes:
            job.stop = True
        for part in self._parts:
            part.engine.close()
        if self._reader is not None:
            self._reader.threads.close()
        if self._writer is not None:
            self._writer.threads.close()
        if self._guard is not None:
            self._guard.close()
        elif self._backend is not None:
            self._backend.close()
        if self._host is not None:
            self._host.close()

    # Inside

    def _load(self, load: Load) -> _Copy:
        copy = _Copy(load.op, len(load.pages))
        for part in self._parts:
            try:
                events = None
                if load.now and self._settings.transfer == "layers":
                    events = part.engine.new_layer_events()
                    events.begin()
                    copy.events.append((part, events))
                copy.handles.append(
                    part.engine.submit_load(
                        load.blocks, load.pages, after=part.engine.record_forward(), layers=events
                    )
                )
            except UnifiedCacheError as error:
                copy.error = error
        return copy

    def _submit_save(self, save: Save, copy: _Copy, part: _Part) -> None:
        try:
            after = part.engine.record_forward()
            copy.handles.append(part.engine.submit_backup(save.blocks, save.pages, after=after))
        except UnifiedCacheError as error:
            copy.error = error

    def _store(self, save: Save) -> None:
        if self._writer is None or self._objects is None:
            self._reports.append(Report(save.op, "stored", 0))
            return
        assert save.digests is not None
        views, addresses = self._objects.of(save.pages)
        job = WriteJob(self._keys.keys(save.digests), views, addresses, self._keys.groups)
        self._to_store[save.op] = job
        if save.held:
            self._held.add(save.op)

    def _saved(self, op: int, *, failed: bool) -> None:
        if op in self._held:
            return
        job = self._to_store.pop(op, None)
        if job is None:
            return
        if failed or self._writer is None:
            self._reports.append(Report(op, "stored", 0))
        else:
            self._writes[job] = op
            self._writer.submit(job)

    def _fetch(self, fetch: Fetch) -> None:
        if self._reader is None or self._objects is None:
            self._reports.append(Report(fetch.op, "moved", 0))
            return
        views, addresses = self._objects.of(fetch.pages)
        batch = ReadBatch(self._keys.keys(fetch.digests), views, addresses, self._keys.groups)
        self._reads[batch] = fetch.op
        self._reader.read(batch)

    def _look(self) -> None:
        """What has ended?"""
        for part in self._parts:
            part.engine.take_done()
        for op, copy in list(self._saves.items()):
            if copy.done:
                del self._saves[op]
                self._reports.append(Report(op, "moved", 0 if copy.failed else copy.pages))
                self._saved(op, failed=copy.failed)
        for op, (load, copy) in list(self._loads.items()):
            if copy.done:
                del self._loads[op]
                if copy.failed:
                    _log.warning("a load of %d blocks has failed: they are computed", copy.pages)
                    self._failed_blocks.update(load.blocks.tolist())
                self._reports.append(Report(op, "moved", 0 if copy.failed else copy.pages))
                if not load.now:
                    self._ended_loads.append(load.request)
        if self._guard is not None:
            self._guard.watch()
        while True:
            try:
                job = self._done.get_nowait()
            except queue.Empty:
                return
            if isinstance(job, ReadBatch):
                self._reports.append(Report(self._reads.pop(job), "moved", job.read))
            elif isinstance(job, WriteJob):
                self._reports.append(Report(self._writes.pop(job), "stored", job.written_pages))
