"""Host and storage: which pages go there and come from there, and what the tree hears of it.

Everything here runs on the scheduler's thread; jobs run on the I/O threads and come back at the tick. A tick
never waits for storage. Pages that a thread still reads or writes stay out of use until it is off them, also
after a reset: they are in quarantine then, as those of copies are.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unified_cache._native import HostEvicted, PrefixTree
from unified_cache.config import CacheConfig
from unified_cache.controller.storage_operations import (
    ENDED,
    FINAL,
    Quarantine,
    StorageOperation,
    StorageOperations,
)
from unified_cache.controller.storage_reads import Prefetch, StorageReads
from unified_cache.controller.storage_writes import StorageWrites, WrittenPages
from unified_cache.controller.stored_prefixes import AppendJob, CompactJob, LoadJob, StoredPrefixes
from unified_cache.controller.warm_up import WarmUp
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

# Whether the storage may be asked, see `StorageLink.can_read`; of all ranks the least counts.
_NOBODY, _WAIT, _CAN = range(3)

_NO_PAGES: Pages = np.empty(0, np.uint32)


class StorageLink:
    """Backups to and prefetches from one backend, which is the link's to close.

    Args:
        tree: hears of pages that were read.
        pools: memory of the host pages.
        host: free pages of the host pool.
        backend: where pages go.
        keys: names of objects.
        config: thresholds and policies.
        clock: seconds; called from several threads.
        now: seconds, that all ranks agree on; called on this one.
        counters: counts, on this thread.
        counts: counts, on the I/O threads.
        rates: which hits are worth reading; told how long reading takes.
        operations: those under way, of all links of a cache.

    Attributes:
        guard: what calls the backend.
        stored: what is known of the prefixes in storage.
        agreed_read: `can_read` of all ranks.
        agreed_write: `can_write` of all ranks.

    Raises:
        StorageError: the backend can not use the host pools' memory.
        MissingDependencyError: the codec of `storage_compression` is not installed.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pools: Sequence[HostPool],
        host: PageAllocator,
        backend: Backend,
        keys: KeySpace,
        config: CacheConfig,
        clock: Callable[[], float],
        now: Callable[[], float],
        counters: Counters,
        counts: StorageCounts,
        rates: LoadOrRecompute,
        operations: StorageOperations,
    ) -> None:
        objects = PageObjects(pools, keys)
        self.guard = StorageGuard(
            backend,
            object_bytes=objects.largest,
            deadline=config.storage_timeout,
            clock=clock,
            counts=counts,
            compression=config.storage_compression,
        )
        self.guard.register(*(pool.memory for pool in pools))
        self._host = host
        self._keys = keys
        self._done: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._backup = StorageBackup(
            self.guard, WorkerPool("unified-cache storage writes", config.storage_write_threads), self._done
        )
        self._reader = StoragePrefetch(
            self.guard, WorkerPool("unified-cache storage reads", config.storage_read_threads), self._done
        )
        self.stored = StoredPrefixes(
            self.guard,
            keys,
            config.page_size,
            config.storage_tree_pages,
            lambda: self._reader.threads,
            lambda: self._backup.threads,
            self._done,
            counters,
        )
        most_jobs = _JOBS_A_THREAD * config.storage_write_threads
        self._writes = StorageWrites(
            tree, host, objects, self._backup, counters, most_jobs, operations, self.stored
        )
        self._reads = StorageReads(
            tree, host, objects, self._reader, config, now, counters, rates, operations, self.stored
        )
        # When a log was read is no matter that ranks agree on.
        most_warm = int(config.storage_warm * host.num_pages) if operations.alone else 0
        self._warm_up = WarmUp(tree, host, self._reads, self._start_warm, most_warm, counters)
        self._warms = most_warm > 0
        self.stored.want(most_warm)
        self._reads.host_evicted = self._writes.host_evicted
        self._operations = operations
        self._late: set[object] = set()
        self._read_threads = config.storage_read_threads
        self._write_threads = config.storage_write_threads
        # What jobs from before a reset still touch.
        self._quarantine: dict[Quarantine, None] = {}
        # It is used when all ranks have opened it, so until the first tick says otherwise all can.
        self.agreed_read = self.agreed_write = _CAN
        self.held_elsewhere: Callable[[], Pages] = lambda: _NO_PAGES  # by copies from before a reset

    @property
    def idle(self) -> bool:
        """Nothing is under way that somebody waits for, but for calls that are past their deadline."""
        if self._writes.waiting or self._reads.waiting:
            return False
        if not self._operations.alone:
            return all(operation.agreed >= FINAL for operation in self._running())
        if self.stored.waiting:
            return False
        return all(job in self._late or self._in_background(job) for jobs in self._jobs() for job in jobs)

    def _in_background(self, job: object) -> bool:
        return isinstance(job, LoadJob | CompactJob) or self._reads.in_background(job)

    @property
    def warming(self) -> bool:
        """What storage holds is being found out, or brought back to host."""
        return self.stored.reading or self._warm_up.active

    @property
    def busy(self) -> bool:
        """A job is under way, or a thread still touches pages."""
        return any(self._jobs()) or any(True for _ in self._running())

    @property
    def settled(self) -> bool:
        """All that was begun, but for the background, has come to its end, on all ranks."""
        if not self._operations.alone:
            return not any(True for _ in self._running())
        return all(self._in_background(job) for jobs in self._jobs() for job in jobs)

    def _jobs(self) -> tuple[Collection[object], ...]:
        held = {job for quarantine in self._quarantine for job in quarantine.jobs}
        return self._writes.jobs, self._reads.look_ups, self._reads.batches, self.stored.jobs, held

    def _running(self) -> Iterator[StorageOperation]:
        """Those of this link that have a place in what ranks tell one another."""
        return (operation for operation in self._operations.list() if self.owns(operation))

    def owns(self, operation: StorageOperation) -> bool:
        """It is an operation of this link."""
        if isinstance(operation, Prefetch):
            return operation.reads is self._reads
        if isinstance(operation, WrittenPages):
            return operation.job in self._writes.jobs
        return operation in self._quarantine

    @property
    def waiting(self) -> int:
        """What waits for the tick or for a place: the same on all ranks."""
        return self._reads.asked + len(self._writes.waiting)

    @property
    def reading_pages(self) -> int:
        """Host pages that are being read into, and are not in the tree."""
        return self._reads.held_pages

    @property
    def stuck(self) -> list[str]:
        """The threads whose calls are past their deadline."""
        return self.guard.stuck

    @property
    def can_read(self) -> int:
        """2: the storage may be asked, and a thread is left that can; 1: it may be soon; 0: it is down, or no
        thread is left, so nobody should wait."""
        held = sum(isinstance(job, LookUp | ReadBatch | LoadJob) for job in self._late)
        return self._can(held < self._read_threads)

    @property
    def can_write(self) -> int:
        """The same of writing."""
        held = sum(isinstance(job, WriteJob | AppendJob) for job in self._late)
        return self._can(held < self._write_threads)

    def _can(self, thread_left: bool) -> int:
        available = self.guard.available
        if available and thread_left:
            return _CAN
        # Of a storage that is down, and of threads that are all held up, nobody waits in the queue: no call
        # begins there, so none would ever be late.
        down = not available and self.guard.breaker.state == "open"
        return _NOBODY if available or down else _WAIT

    @property
    def _may_read(self) -> bool:
        return (self.can_read if self._operations.alone else self.agreed_read) == _CAN

    @property
    def _may_write(self) -> bool:
        return (self.can_write if self._operations.alone else self.agreed_write) == _CAN

    def use_keys(self, keys: KeySpace) -> None:
        """What is written and looked for from now on holds other bytes; nothing may be under way."""
        self._keys = keys
        self.stored.use_keys(keys)

    # Host to storage

    def write(self, nodes: Sequence[int]) -> None:
        """Write these nodes' pages to storage, now or when enough of what was begun before has ended."""
        self._writes.want(nodes)
        self._begin_writes()

    def write_later(self, nodes: Sequence[int]) -> None:
        """The same, from the next tick on."""
        self._writes.want(nodes)

    def host_evicted(self, evicted: HostEvicted) -> None:
        """Nodes have left the host; some of them may wait to be written."""
        self._writes.host_evicted(evicted)

    def retry(self, node: int) -> None:
        """Write what of the path to `node` could not be stored before."""
        if self._may_write:
            self._writes.retry(node)
            self._begin_writes()

    def _begin_writes(self) -> None:
        if self._may_write:
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
        if not self._may_read:
            return None
        return self._reads.start(tokens, first, anchor, namespace, priority, self._keys)

    def _start_warm(
        self,
        tokens: npt.NDArray[np.uint32],
        first: int,
        anchor: int,
        namespace: tuple[str | None, str | None],
    ) -> Prefetch | None:
        return self._reads.start(tokens, first, anchor, namespace, 0, self._keys, background=True)

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
        self.look()
        self.go_on()

    def look(self) -> None:
        """What have the threads done, and what is late?"""
        # Calls from before a reset may be late, and nothing else under way: they come back some time.
        if not (self.busy or self._late):
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
            elif isinstance(job, WriteJob):
                self._writes.late(job)
            elif isinstance(job, LoadJob | AppendJob):
                self.stored.late(job)

    def apply(self, operation: StorageOperation, state: int, pages: int) -> None:
        """All ranks have come so far with it."""
        if isinstance(operation, Prefetch):
            self._reads.apply(operation, state, pages)
        elif isinstance(operation, WrittenPages):
            self._writes.apply(operation, state, pages)
        elif isinstance(operation, Quarantine):
            operation.agreed = state
            if state == ENDED:
                self._release(operation)

    def go_on(self) -> None:
        """Begin what waits."""
        waiting = self._reads.waiting or self._writes.waiting or self.stored.due or self._warm_up.active
        if not (self.busy or waiting):
            return
        self._reads.start_clocks()
        if self._warm_up.active:
            self._warm_up.tick(can_read=self.can_read == _CAN)
        alone = self._operations.alone
        reading = self.can_read if alone else self.agreed_read
        if reading == _CAN:
            self._reads.ask()
        elif reading == _NOBODY:
            self._reads.give_up_queued()
        writing = self.can_write if alone else self.agreed_write
        if writing == _CAN:
            self._begin_writes()
        elif writing == _NOBODY:
            self._writes.give_up_waiting()
        # What this process knows is its own affair, whatever others can.
        can_write = self.can_write
        if can_write == _NOBODY:
            self.stored.give_up()
        self.stored.tick(
            can_read=self.can_read == _CAN,
            can_write=can_write == _CAN,
            writing=bool(self._writes.jobs or self._writes.waiting),
        )

    def wait(self, timeout: float) -> None:
        """Wait until something has ended, and take it."""
        if self.busy:
            try:
                self._take(self._done.get(timeout=timeout))
            except queue.Empty:
                return

    def _take(self, job: object) -> None:
        self._late.discard(job)
        held = next((held for held in self._quarantine if job in held.jobs), None)
        if held is not None:
            held.jobs.remove(job)
            if self._operations.alone and not held.jobs:
                self._release(held)
        elif isinstance(job, WriteJob) and job in self._writes.jobs:
            self._writes.take(job)
        elif isinstance(job, LookUp) and job in self._reads.look_ups:
            self._reads.looked_up(job)
        elif isinstance(job, ReadBatch) and job in self._reads.batches:
            self._reads.take(job)
        elif isinstance(job, LoadJob | AppendJob | CompactJob) and job in self.stored.jobs:
            recent = self.stored.take(job)
            if self._warms:
                self._warm_up.begin(recent)

    def _release(self, held: Quarantine) -> None:
        del self._quarantine[held]
        self._operations.end(held)
        still = np.concatenate((self.quarantined(), self.held_elsewhere()))
        self._host.free(np.setdiff1d(held.pages, still))

    def quarantined(self) -> Pages:
        """Host pages that jobs from before a reset still touch, each once."""
        return np.unique(np.concatenate([_NO_PAGES, *(held.pages for held in self._quarantine)]))

    # The end

    def cancel(self) -> None:
        """Forget everything: the tree and the pools are reset next. What threads touch is in quarantine."""
        self._forget_ended()
        self._warm_up.forget()
        self._warms = False
        self.stored.want(0)
        for pages, jobs in [*self._reads.forget(), *self._writes.forget()]:
            held = Quarantine(pages, jobs, self._late)
            self._quarantine[held] = None
            if not self._operations.alone:
                self._operations.begin(held)

    def _forget_ended(self) -> None:
        # What has ended needs no quarantine, and what it says no longer matters.
        try:
            while True:
                job = self._done.get_nowait()
                self._late.discard(job)
                for held in list(self._quarantine):
                    held.jobs.discard(job)
                    if self._operations.alone and not held.jobs:
                        del self._quarantine[held]
                if isinstance(job, ReadBatch):
                    self._reads.batches.pop(job, None)
                elif isinstance(job, WriteJob) and job in self._writes.jobs:
                    self._writes.jobs[job].ended = True
                elif isinstance(job, LoadJob | AppendJob | CompactJob) and job in self.stored.jobs:
                    self.stored.take(job)
        except queue.Empty:
            return

    def stop_all(self) -> None:
        """Begin nothing more; what runs ends when its call has returned, and is taken at a tick."""
        self._warm_up.stop()
        self._writes.stop()
        self._reads.stop_all()
        self.stored.stop()

    def close(self) -> None:
        """End the threads and close the backend; jobs that have not begun are dropped.

        Waits for a second at most for calls that run; the last of them closes the backend.
        """
        self.stop_all()
        self._backup.threads.close()
        self._reader.threads.close()
        self.guard.close()
