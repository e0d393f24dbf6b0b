"""Calls of a storage that stay where they are for some ticks, and a storage that checks what it is given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from tests.cache.support import ManualThreads, MemoryStore
from unified_cache import UnifiedCache
from unified_cache.storage.contract import ObjectBatch, PageStatus
from unified_cache.storage.page_format import check_objects

__all__ = ["CheckedStore", "HangingThreads", "with_hanging_threads"]


class _Held(threading.Thread):
    """One job that will stay in its first call. It runs only while somebody waits for it."""

    def __init__(self, job: partial[None]) -> None:
        super().__init__(daemon=True, name=job.func.__name__)
        self._job = job
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.holds = True  # at the next call
        self.ended = False
        self.start()

    def run(self) -> None:
        self._go.acquire()
        try:
            self._job()
        finally:
            self.ended = True
            self._stopped.release()

    def go_on(self) -> None:
        """Until it ends, or stays in a call."""
        self._go.release()
        assert self._stopped.acquire(timeout=60)

    def stay(self) -> None:
        """On its own thread: nothing more of it happens until `go_on`."""
        self.holds = False
        self._stopped.release()
        self._go.acquire()


class HangingThreads(ManualThreads):
    """As many threads as there are, some of which hang.

    Args:
        threads: how many.
        hangs: a job, by the name of what it does, will stay in its first call.
    """

    def __init__(self, threads: int, hangs: Callable[[str], bool]) -> None:
        super().__init__()
        self._threads, self._hangs = threads, hangs
        self.held: list[_Held] = []

    @staticmethod
    def hold() -> bool:
        """For the `before` of a store: stay here if this job is to; True if it did."""
        thread = threading.current_thread()
        if not isinstance(thread, _Held) or not thread.holds:
            return False
        thread.stay()
        return True

    @property
    def busy(self) -> bool:
        return bool(self.held or self.jobs)

    def run(self) -> bool:
        """One more job, if a thread is free for it."""
        if len(self.held) >= self._threads:
            return False
        job = self.take()
        if job is None:
            return False
        assert isinstance(job, partial)
        if not self._hangs(job.func.__name__):
            job()
            return True
        held = _Held(job)
        held.go_on()
        if not held.ended:
            self.held.append(held)
        return True

    def let_go(self) -> None:
        """The call that was held first goes on, and its job ends."""
        held = self.held.pop(0)
        held.go_on()
        assert held.ended

    def drain(self) -> None:
        while self.held or self.jobs:
            while self.held:
                self.let_go()
            self.run()


def with_hanging_threads(
    cache: UnifiedCache, hangs: Callable[[str], bool]
) -> tuple[HangingThreads, HangingThreads]:
    """In place of the storage threads of a cache; returns those for writes and for reads."""
    link, config = cache._storage, cache.config
    assert link is not None
    writes = HangingThreads(config.storage_write_threads, hangs)
    reads = HangingThreads(config.storage_read_threads, hangs)
    for part, threads in ((link._backup, writes), (link._reader, reads)):
        part.threads.close()
        part.threads = threads
    return writes, reads


class CheckedStore(MemoryStore):
    """Counts what has not its checksum when it is stored: pages that changed while they were written."""

    changed = 0

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        statuses = super().set(batch)
        size = batch.bodies[0].nbytes
        checked = check_objects(
            batch.headers, batch.keys, batch.bodies, batch.body_sizes.tolist(), size, (0,)
        )
        self.changed += sum(found.status is not PageStatus.HIT for found in checked)
        return statuses
