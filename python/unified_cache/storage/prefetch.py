"""Looking for and reading stored pages, on threads: they touch bytes and queues only."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from functools import partial

from unified_cache.storage.backup import ObjectJob, Threads, pages_at_once
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.guard import StorageGuard
from unified_cache.worker import Ticket

__all__ = ["LookUp", "ReadBatch", "StoragePrefetch", "batches"]


def batches(pages: int, page_bytes: int) -> list[tuple[int, int]]:
    """Where the batches of so many pages of this size begin and end."""
    step = pages_at_once(page_bytes)
    return [(start, min(start + step, pages)) for start in range(0, pages, step)]


class LookUp:
    """How much of each of these runs of objects is stored? One question for all of them."""

    def __init__(self, runs: Sequence[Sequence[str]]) -> None:
        self.runs = runs
        self.stop = False  # set by the owner: nobody wants to know any more
        self.ticket: Ticket | None = None
        self.found: list[int] | None = None  # once it is done; None: nobody can tell


class ReadBatch(ObjectJob):
    """Pages to read, all or some of what one prefetch reads."""

    # Of the objects; set once, when the bytes are there.
    statuses: Sequence[PageStatus] = ()

    @property
    def read(self) -> int:
        """Pages from the front that are there, as far as is known now."""
        statuses = self.statuses
        hits = next((at for at, status in enumerate(statuses) if status is not _HIT), len(statuses))
        return hits // self.groups


class StoragePrefetch:
    """Runs `LookUp`s and `ReadBatch`es, several at a time."""

    def __init__(self, guard: StorageGuard, threads: Threads, done: queue.SimpleQueue[object]) -> None:
        self._guard = guard
        self._done = done
        self.threads = threads

    def look_up(self, job: LookUp, priority: int = 0) -> None:
        """Ask; the job comes out of the done queue exactly once, unless it is cancelled."""
        job.ticket = self.threads.submit(partial(self._look_up, job), priority)

    def read(self, batch: ReadBatch, priority: int = 0) -> None:
        """Fill the batch's views; it comes out of the done queue exactly once, unless it is cancelled."""
        batch.ticket = self.threads.submit(partial(self._read, batch), priority)

    def _look_up(self, job: LookUp) -> None:
        try:
            if not job.stop:
                job.found = self._guard.exists(job.runs, job)
        finally:
            self._done.put(job)

    def _read(self, batch: ReadBatch) -> None:
        try:
            if not batch.stop:
                batch.statuses = self._guard.get(batch.keys, batch.views, batch.addresses, batch)
        finally:
            self._done.put(batch)


_HIT = PageStatus.HIT
