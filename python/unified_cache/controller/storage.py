"""Host and storage: which pages go there and come from there, and what the tree hears of it.

Everything here runs on the scheduler's thread; jobs run on the I/O threads and come back at the tick. A tick
never waits for storage. Pages that a thread still reads or writes stay out of use until it is off them, also
after a reset: they are in quarantine then, as those of copies are.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unified_cache._native import PrefixTree
from unified_cache.config import CacheConfig
from unified_cache.controller.storage_reads import Prefetch, StorageReads
from unified_cache.controller.storage_writes import StorageWrites
from unified_cache.counters import Counters
from unified_cache.pools.allocator import PageAllocator, Pages
from unified_cache.storage.backup import StorageBackup, WriteJob
from unified_cache.storage.contract import Backend
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.keys import KeySpace
from unified_cache.storage.objects import PageObjects
from unified_cache.storage.prefetch import LookUp, ReadBatch, StoragePrefetch
from unified_cache.worker import WorkerPool

if TYPE_CHECKING:
    from unified_cache.controller.recompute import LoadOrRecompute
    from unified_cache.pools.host import HostPool

__all__ = ["Prefetch", "StorageLink"]

# Ends that one tick takes: the rest is taken at the next one.
_MOST_TAKEN = 256
# Write jobs under way for each thread: one that runs, and one that keeps the thread busy after it.
_JOBS_A_THREAD = 2

_NO_PAGES: Pages = np.empty(0, np.uint32)


class StorageLink:
    """Backups to and prefetches from one backend, which is the link's to close.

    Args:
        tree: hears of pages that were read.
        pool: memory of the host pages.
        host: free pages of the host pool.
        backend: where pages go.
        keys: names of objects.
        config: thresholds and policies.
        clock: seconds; called from several threads.
        counters: counts, on this thread.
        counts: counts, on the I/O threads.
        rates: which hits are worth reading; told how long reading takes.

    Attributes:
        guard: what calls the backend.

    Raises:
        StorageError: the backend can not use the host pool's memory.
        MissingDependencyError: the codec of `storage_compression` is not installed.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pool: HostPool,
        host: PageAllocator,
        backend: Backend,
        keys: KeySpace,
        config: CacheConfig,
        clock: Callable[[], float],
        counters: Counters,
        counts: StorageCounts,
        rates: LoadOrRecompute,
    ) -> None:
        objects = PageObjects(pool, keys.groups)
        self.guard = StorageGuard(
            backend,
            object_bytes=objects.bytes,
            deadline=config.storage_timeout,
            clock=clock,
            counts=counts,
            compression=config.storage_compression,
        )
        self.guard.register(pool.memory)
        self._host = host
        self._keys = keys
        self._done: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._backup = StorageBackup(
            self.guard, WorkerPool("unified-cache storage writes", config.storage_write_threads), self._done
        )
        self._reader = StoragePrefetch(
            self.guard, WorkerPool("unified-cache storage reads", config.storage_read_threads), self._done
        )
        most_jobs = _JOBS_A_THREAD * config.storage_write_threads
        self._writes = StorageWrites(tree, host, objects, self._backup, counters, most_jobs)
        self._reads = StorageReads(tree, host, objects, self._reader, config, clock, counters, rates)
        self._late: set[object] = set()
        self._read_threads = config.storage_read_threads
        self._write_threads = config.storage_write_threads
        # What jobs from before a reset still touch.
        self._quarantine: dict[object, Pages] = {}
        self.held_elsewhere: Callable[[], Pages] = lambda: _NO_PAGES  # by copies from before a reset

    @property
    def idle(self) -> bool:
        """Nothing is under way, but for calls that are past their deadline."""
        if self._writes.waiting or self._reads.waiting:
            return False
        return all(job in self._late for jobs in self._jobs() for job in jobs)

    @property
    def busy(self) -> bool:
        """A job is under way, or a thread still touches pages."""
        return any(self._jobs())

    def _jobs(self) -> tuple[Collection[object], ...]:
        return self._writes.jobs, self._reads.look_ups, self._reads.batches, self._quarantine

    @property
    def reading_pages(self) -> int:
        """Host pages that are being read into, and are not in the tree."""
        return self._reads.held_pages

    @property
    def stuck(self) -> list[str]:
        """The threads whose calls are past their deadline."""
        return self.guard.stuck

    @property
    def _can_read(self) -> bool:
        """The storage may be asked, and a thread is left that can."""
        held = sum(isinstance(job, LookUp | ReadBatch) for job in self._late)
        return self.guard.available and held < self._read_threads

    @property
    def _can_write(self) -> bool:
        held = sum(isinstance(job, WriteJob) for job in self._late)
        return self.guard.available and held < self._write_threads

    def use_keys(self, keys: KeySpace) -> None:
        """What is written and looked for from now on holds other bytes; nothing may be under way."""
        self._keys = keys

    # Host to storage

    def write(self, nodes: Sequence[int]) -> None:
        """Write these nodes' pages to storage, now or when enough of what was begun before has ended."""
        self._writes.want(nodes)
        self._begin_writes()

    def write_later(self, nodes: Sequence[int]) -> None:
        """The same, from the next tick on."""
        self._writes.want(nodes)

    def retry(self, node: int) -> None:
        """Write what of the path to `node` could not be stored before."""
        if self._can_write:
            self._writes.retry(node)
            self._begin_writes()

    def _begin_writes(self) -> None:
        if self._can_write:
            self._writes.begin(self._keys)

    # Storage to host

    def start(
        self,
        tokens: npt.NDArray[np.uint32],
        first: int,
        anchor: int,
        namespace: tuple[str | None, str | None],
        priority: int,
    ) -> Prefetch | None:
        """Look in storage for whole pages of `tokens`, of which the first ones end with `anchor`.

        The question goes out at the next tick, with all others that were asked until then.
        """
        if not self._can_read:
            return None
        return self._reads.start(tokens, first, anchor, namespace, priority, self._keys)

    def over(self, prefetch: Prefetch) -> bool:
        """The request need not wait any longer."""
        return self._reads.over(prefetch)

    def stop(self, prefetch: Prefetch) -> None:
        """End it: what was read so far is in the tree then, the rest is freed once the threads are off it."""
        self._reads.stop(prefetch)

    def release(self, prefetch: Prefetch) -> None:
        """The request has no more use for it."""
        self._reads.release(prefetch)

    # Both

    def tick(self) -> None:
        """Take what has ended, see to what is late, and begin what waits."""
        if not (self.busy or self._reads.waiting or self._writes.waiting):
            return
        for _ in range(_MOST_TAKEN):
            try:
                self._take(self._done.get_nowait())
            except queue.Empty:
                break
        for job in self.guard.watch():
            self._late.add(job)
            if isinstance(job, LookUp | ReadBatch):
                self._reads.late(job)
        # Of a storage that is down, and of threads that are all held up, nobody waits in the queue: no call
        # begins there, so none would ever be late.
        available = self.guard.available
        down = not available and self.guard.breaker.state == "open"
        if self._can_read:
            self._reads.ask()
        elif available or down:
            self._reads.give_up_queued()
        if self._can_write:
            self._begin_writes()
        elif available or down:
            self._writes.give_up_waiting()

    def wait(self, timeout: float) -> None:
        """Wait until something has ended, and take it."""
        if self.busy:
            try:
                self._take(self._done.get(timeout=timeout))
            except queue.Empty:
                return

    def _take(self, job: object) -> None:
        self._late.discard(job)
        if job in self._quarantine:
            pages = self._quarantine.pop(job)
            still = np.concatenate((self.quarantined(), self.held_elsewhere()))
            self._host.free(np.setdiff1d(pages, still))
        elif isinstance(job, WriteJob) and job in self._writes.jobs:
            self._writes.take(job)
        elif isinstance(job, LookUp) and job in self._reads.look_ups:
            self._reads.looked_up(job)
        elif isinstance(job, ReadBatch) and job in self._reads.batches:
            self._reads.take(job)

    def quarantined(self) -> Pages:
        """Host pages that jobs from before a reset still touch, each once."""
        return np.unique(np.concatenate([_NO_PAGES, *self._quarantine.values()]))

    # The end

    def cancel(self) -> None:
        """Forget everything: the tree and the pools are reset next. What threads touch is in quarantine."""
        self._forget_ended()
        self._quarantine |= self._reads.forget() | self._writes.forget()

    def _forget_ended(self) -> None:
        # What has ended needs no quarantine, and what it says no longer matters.
        try:
            while True:
                job = self._done.get_nowait()
                self._late.discard(job)
                self._quarantine.pop(job, None)
                if isinstance(job, ReadBatch):
                    self._reads.batches.pop(job, None)
                elif isinstance(job, WriteJob):
                    self._writes.jobs.pop(job, None)
        except queue.Empty:
            return

    def stop_all(self) -> None:
        """Begin nothing more; what runs ends when its call has returned, and is taken at a tick."""
        self._writes.stop()
        self._reads.stop_all()

    def close(self) -> None:
        """End the threads and close the backend; jobs that have not begun are dropped.

        Waits for a second at most for calls that run; the last of them closes the backend.
        """
        self.stop_all()
        self._backup.threads.close()
        self._reader.threads.close()
        self.guard.close()
