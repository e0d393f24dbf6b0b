"""Host and storage: which pages go there and come from there, and what the tree hears of it.

Everything here runs on the scheduler's thread; jobs run on the I/O threads and come back at the tick.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from unified_cache._native import HostLockReceipt, PrefixTree, page_hashes
from unified_cache.config import CacheConfig
from unified_cache.counters import Counters
from unified_cache.errors import UnknownNodeError
from unified_cache.pools.allocator import PageAllocator, Pages
from unified_cache.storage.backup import StorageBackup, WriteJob
from unified_cache.storage.contract import Store
from unified_cache.storage.keys import page_keys
from unified_cache.storage.prefetch import ReadJob, StoragePrefetch

if TYPE_CHECKING:
    from unified_cache.controller.recompute import LoadOrRecompute
    from unified_cache.pools.host import HostPool

__all__ = ["Prefetch", "StorageLink"]

# Nodes remembered because they could not be stored; past that all are forgotten.
_MOST_UNSTORED = 65536
# Prefetches under way, those of requests that have ended included: storage that hangs must not pile them up.
_MOST_PREFETCHES = 256


class Prefetch:
    """One request's reading from storage."""

    def __init__(
        self,
        job: ReadJob,
        tokens: npt.NDArray[np.uint32],
        hashes: npt.NDArray[np.uint8],
        namespace: tuple[str | None, str | None],
        anchor: HostLockReceipt,
        started: float,
        threshold: int,
    ) -> None:
        self.job = job
        self.tokens = tokens
        self.hashes = hashes
        self.namespace = namespace
        self.phase: Literal["look up", "read", "ended"] = "look up"
        self.pages: Pages = np.empty(0, np.uint32)
        self.kept = 0  # pages from the front that were given to the tree: the rest is ours
        self.inserted_pages = 0  # pages past the anchor that are in the tree because of this
        self.lock: HostLockReceipt | None = anchor  # the anchor, then the end of what was inserted
        self.started = started
        self.threshold = threshold  # tokens: a shorter hit is computed again


@dataclass
class _Write:
    """What a job writes, and what keeps it in place."""

    nodes: dict[int, int] = field(default_factory=dict)
    locks: list[HostLockReceipt] = field(default_factory=list)
    digests: list[npt.NDArray[np.uint8]] = field(default_factory=list)


class StorageLink:
    """Backups to and prefetches from one store.

    Args:
        tree: hears of pages that were read.
        pool: memory of the host pages.
        host: free pages of the host pool.
        store: the backend.
        fingerprint: goes into every key.
        config: thresholds and policies.
        clock: seconds.
        counters: counts.
        rates: which hits are worth reading; told how long reading takes.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pool: HostPool,
        host: PageAllocator,
        store: Store,
        fingerprint: str,
        config: CacheConfig,
        clock: Callable[[], float],
        counters: Counters,
        rates: LoadOrRecompute,
    ) -> None:
        self.store = store
        self._tree = tree
        self._pool = pool
        self._host = host
        self._fingerprint = fingerprint
        self._config = config
        self._clock = clock
        self._counters = counters
        self._rates = rates
        self._done: queue.SimpleQueue[WriteJob | ReadJob] = queue.SimpleQueue()
        self._backup = StorageBackup(store, self._done)  # type: ignore[arg-type]
        self._reader = StoragePrefetch(store, self._done)  # type: ignore[arg-type]
        self._writes: dict[WriteJob, _Write] = {}
        self._writing_pages = 0
        # Nodes with the pages they had when they were named: to be written, and those where that failed.
        # The first is only ever filled while something is being written.
        self._waiting: dict[int, int] = {}
        self._unstored: dict[int, int] = {}
        self._prefetches: dict[ReadJob, Prefetch] = {}
        self._reading_pages = 0

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._writes and not self._prefetches

    def use_fingerprint(self, fingerprint: str) -> None:
        """What is written and looked for from now on holds other bytes; nothing may be under way."""
        self._fingerprint = fingerprint

    # Host to storage

    def write(self, nodes: Sequence[int]) -> None:
        """Write these nodes' pages to storage, now or when enough of what was begun before has ended."""
        for node in nodes:
            self._waiting[node] = self._tree.node_info(node).pages
        self._begin_writes()

    def retry(self, node: int) -> None:
        """Write what of the path to `node` could not be stored before."""
        if not self._unstored:
            return
        path: list[int] = []
        while node != self._tree.root:
            path.append(node)
            parent = self._tree.node_info(node).parent
            assert parent is not None
            node = parent
        for node in reversed(path):
            pages = self._unstored.pop(node, None)
            if pages is not None:
                self._waiting[node] = pages
        self._begin_writes()

    def _begin_writes(self) -> None:
        """Submit what is waiting, as far as there is room for it among the pages being written."""
        taken, views = _Write(), []
        for node, pages in list(self._waiting.items()):
            # Pages being written can not be evicted: half of the pool is for everybody else.
            writing = self._writing_pages + pages
            if self._writing_pages > 0 and writing > self._host.num_pages // 2:
                break
            del self._waiting[node]
            parts = self._parts(node, pages)
            if parts is None:
                self._counters.storage_skipped_pages += pages
                continue
            self._writing_pages = writing
            taken.nodes[node] = pages
            for part, host_pages in parts:
                # From now until the end of the job the pages stay where they are.
                taken.locks.append(self._tree.inc_host_lock_ref(part))
                taken.digests.append(self._tree.page_hashes(part))
                views += [self._pool.page_view(page) for page in host_pages.tolist()]
        if taken.nodes:
            job = WriteJob(page_keys(np.concatenate(taken.digests), self._fingerprint), views)
            self._writes[job] = taken
            self._backup.submit(job)

    def _parts(self, node: int, pages: int) -> list[tuple[int, Pages]] | None:
        """The nodes, ancestors first, that hold what `node` held when it had so many pages.

        None if one of them has lost its host copy meanwhile, or is gone.
        """
        parts: list[tuple[int, Pages]] = []
        while pages > 0:
            try:
                info = self._tree.node_info(node)
            except UnknownNodeError:
                return None
            pending = info.pending is not None and info.pending.kind == "backup"
            if info.host_pages is None or pending or info.parent is None:
                return None
            parts.append((node, info.host_pages))
            pages -= info.pages
            # A cut leaves the id with the lower part: the upper one is its parent.
            node = info.parent
        return parts[::-1]

    def _written(self, job: WriteJob) -> None:
        taken = self._writes.pop(job)
        for lock in taken.locks:
            self._tree.dec_host_lock_ref(lock)
        self._writing_pages -= len(job.keys)
        self._counters.storage_written_pages += job.written
        if job.stored < len(job.keys):
            self._counters.storage_errors += 1
            if len(self._unstored) > _MOST_UNSTORED:
                self._unstored.clear()
            self._unstored.update(taken.nodes)
        self._begin_writes()

    # Storage to host

    def start(
        self,
        tokens: npt.NDArray[np.uint32],
        anchor: int,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> Prefetch | None:
        """Look in storage for whole pages of `tokens`, which begin where `anchor` ends."""
        # A hit is at most as long as the key: what is not worth reading then is not looked for.
        if len(tokens) < self._config.page_size or not self._rates.worth_reading(len(tokens)):
            return None
        if len(self._prefetches) >= _MOST_PREFETCHES:
            self._counters.prefetches_refused += 1
            return None
        parent = None if anchor == self._tree.root else self._tree.page_hashes(anchor)[-1]
        hashes = page_hashes(
            tokens, self._config.page_size, parent=parent, extra_key=extra_key, cache_salt=cache_salt
        )
        job = ReadJob(page_keys(hashes, self._fingerprint))
        lock = self._tree.inc_host_lock_ref(anchor)
        # Not more than was asked for, since that may be an attempt to see whether reading pays by now.
        threshold = min(self._rates.prefetch_threshold, len(tokens))
        prefetch = Prefetch(job, tokens, hashes, (extra_key, cache_salt), lock, self._clock(), threshold)
        self._prefetches[job] = prefetch
        self._reader.look_up(job)
        self._counters.prefetches += 1
        return prefetch

    def over(self, prefetch: Prefetch) -> bool:
        """The request need not wait any longer."""
        if prefetch.phase == "ended" or self._config.prefetch_policy == "best_effort":
            return True
        if self._config.prefetch_policy == "wait_complete":
            return False
        limit = self._config.prefetch_timeout
        limit += self._config.prefetch_timeout_per_1024 * len(prefetch.tokens) / 1024
        return self._clock() - prefetch.started >= limit

    def stop(self, prefetch: Prefetch) -> None:
        """End it: what was read so far is in the tree then, the rest is freed once the thread is off it."""
        if prefetch.phase == "ended" or prefetch.job.stop:
            return
        prefetch.job.stop = True
        if prefetch.phase == "read":
            self._insert(prefetch)

    def release(self, prefetch: Prefetch) -> None:
        """The request has no more use for it."""
        self.stop(prefetch)
        if prefetch.lock is not None:
            self._tree.dec_host_lock_ref(prefetch.lock)
            prefetch.lock = None

    def _looked_up(self, prefetch: Prefetch) -> None:
        job, page_size = prefetch.job, self._config.page_size
        self._counters.storage_found_pages += job.found
        budget = self._host.num_pages // 2 - self._reading_pages
        pages = min(job.found, max(budget, 0))
        if job.stop or pages == 0 or pages * page_size < prefetch.threshold:
            self._end(prefetch)
            return
        short = pages - self._host.free_pages
        if short > 0:
            freed = self._tree.evict_host(short).host_pages
            self._host.free(freed)
            self._counters.evicted_host_pages += len(freed)
        pages = min(pages, self._host.free_pages)
        if pages == 0:
            self._end(prefetch)
            return
        prefetch.pages = self._host.alloc(pages)
        self._reading_pages += pages
        job.views = [self._pool.page_view(page) for page in prefetch.pages.tolist()]
        prefetch.phase = "read"
        self._reader.read(job)

    def _insert(self, prefetch: Prefetch) -> None:
        """Give the pages that were read to the tree."""
        # One look: the I/O thread may be counting on.
        count = prefetch.job.read
        self._counters.storage_read_pages += count
        if count == 0 or prefetch.lock is None:
            return
        prefetch.kept = count
        anchor = prefetch.lock.node
        extra_key, cache_salt = prefetch.namespace
        inserted = self._tree.insert_host(
            anchor,
            prefetch.tokens[: count * self._config.page_size],
            prefetch.pages[:count],
            hashes=prefetch.hashes[:count],
            extra_key=extra_key,
            cache_salt=cache_salt,
        )
        self._host.free(inserted.duplicate_host_pages)
        if inserted.node == anchor:
            return
        prefetch.inserted_pages = count
        # From here on it is the end of what was inserted that must not go.
        lock = self._tree.inc_host_lock_ref(inserted.node)
        self._tree.dec_host_lock_ref(prefetch.lock)
        prefetch.lock = lock

    def _end(self, prefetch: Prefetch) -> None:
        del self._prefetches[prefetch.job]
        prefetch.phase = "ended"
        self._host.free(prefetch.pages[prefetch.kept :])
        self._reading_pages -= len(prefetch.pages)
        self._counters.storage_corrupt_pages += prefetch.job.corrupt
        self._counters.storage_errors += 1 if prefetch.job.error is not None else 0

    # Both

    def tick(self) -> None:
        """Take what has ended."""
        while not self.idle:
            try:
                job = self._done.get_nowait()
            except queue.Empty:
                return
            self._take(job)

    def wait(self, timeout: float) -> None:
        """Wait until something has ended, and take it."""
        if not self.idle:
            try:
                self._take(self._done.get(timeout=timeout))
            except queue.Empty:
                return

    def _take(self, job: WriteJob | ReadJob) -> None:
        if isinstance(job, WriteJob):
            self._written(job)
            return
        prefetch = self._prefetches[job]
        if prefetch.phase == "look up":
            self._looked_up(prefetch)
            return
        if not job.stop:
            self._insert(prefetch)
            self._rates.read(job.read, self._clock() - prefetch.started)
        self._end(prefetch)

    def _stop_all(self) -> None:
        self._waiting.clear()
        for write in self._writes:
            write.stop = True
        for read in self._prefetches:
            read.stop = True

    def cancel(self) -> None:
        """Begin nothing more, wait for what runs, and forget everything: the tree is reset next."""
        self._stop_all()
        self._backup.drain()
        self._reader.drain()
        while True:
            try:
                self._done.get_nowait()
            except queue.Empty:
                break
        self._writes.clear()
        for prefetch in self._prefetches.values():
            prefetch.phase, prefetch.lock = "ended", None
        self._prefetches.clear()
        self._writing_pages = self._reading_pages = 0
        self._waiting.clear()
        self._unstored.clear()

    def close(self) -> None:
        """End the threads and close the store; jobs that have not begun are dropped."""
        self._stop_all()
        self._backup.close()
        self._reader.close()
        self.store.close()
