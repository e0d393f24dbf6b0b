"""Writing pages to storage, on threads: they touch bytes and queues only."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unified_cache.storage.contract import PageStatus
from unified_cache.storage.guard import StorageGuard
from unified_cache.worker import Ticket

__all__ = ["BATCH_BYTES", "BATCH_PAGES", "ObjectJob", "StorageBackup", "Threads", "WriteJob", "pages_at_once"]

# Pages that go to or come from a backend in one call, at most, and their bytes: a storage that is slow, but
# not down, must come through one call within its deadline (5 seconds unless set: 50 MB/s).
BATCH_PAGES = 128
BATCH_BYTES = 256 << 20


def pages_at_once(page_bytes: int) -> int:
    """How many pages of this size one call takes."""
    return max(1, min(BATCH_PAGES, BATCH_BYTES // page_bytes))


class Threads(Protocol):
    """What runs jobs: a `WorkerPool`."""

    def submit(self, job: Callable[[], None], priority: int = 0) -> Ticket: ...

    def cancel(self, ticket: Ticket) -> bool: ...

    def close(self) -> None: ...


class ObjectJob:
    """Objects of some pages, and where they lie: what a thread writes or reads.

    Args:
        keys: of the objects, page by page.
        views: of the objects.
        addresses: uint64 (objects,), where they lie.
        groups: objects a page.
        pages: how many; None: as many as there are objects for.
    """

    def __init__(
        self,
        keys: Sequence[str],
        views: Sequence[memoryview],
        addresses: npt.NDArray[np.uint64],
        groups: int = 1,
        *,
        pages: int | None = None,
    ) -> None:
        self.keys = keys
        self.views = views
        self.addresses = addresses
        self.groups = groups
        self.pages = len(keys) // groups if pages is None else pages
        self.stop = False  # set by the owner: what has not begun need not
        self.ticket: Ticket | None = None


class WriteJob(ObjectJob):
    """Pages to write, in the order of their prefix. The memory behind the views must stay as it is.

    Its objects are those that this rank writes; there may be none: others write those pages, and as far as
    this rank is concerned they are stored.

    Attributes:
        written: the objects that this job has written, by their places, ascending; the others were there.
    """

    def __init__(
        self,
        keys: Sequence[str],
        views: Sequence[memoryview],
        addresses: npt.NDArray[np.uint64],
        groups: int = 1,
        *,
        pages: int | None = None,
    ) -> None:
        super().__init__(keys, views, addresses, groups, pages=pages)
        self.written: list[int] = []

    # Valid once the job was taken as done:
    stored = 0  # pages from the front that are in storage now, as far as this rank writes them
    failed = False  # the storage did not answer, or has no room

    @property
    def written_pages(self) -> int:
        """Pages whose objects this job has written."""
        return len(self.written) // self.groups if self.groups else 0


class StorageBackup:
    """Runs `WriteJob`s, several at a time; the batches of one job come one after the other."""

    def __init__(self, guard: StorageGuard, threads: Threads, done: queue.SimpleQueue[object]) -> None:
        self._guard = guard
        self._done = done
        self.threads = threads

    def submit(self, job: WriteJob) -> None:
        """Write the job's pages; it comes out of the done queue exactly once, unless it is cancelled."""
        job.ticket = self.threads.submit(partial(self._run, job))

    def _run(self, job: WriteJob) -> None:
        try:
            if job.groups == 0:
                job.stored = job.pages
            elif job.keys:
                step = job.groups * pages_at_once(sum(view.nbytes for view in job.views[: job.groups]))
                for start in range(0, len(job.keys), step):
                    if job.stop or not self._write(job, start, min(start + step, len(job.keys))):
                        break
        except Exception:  # a fault of this code: the pages are not stored
            job.failed = True
        self._done.put(job)

    def _write(self, job: WriteJob, start: int, end: int) -> bool:
        """Store what is missing of a batch; False if not all of it is stored then."""
        # Each its own run: it is known of every object whether it is there.
        there = self._guard.exists([[key] for key in job.keys[start:end]], job)
        if there is None:
            job.failed = True
            return False
        missing = [start + at for at, found in enumerate(there) if not found]
        stored = np.array(there, bool)
        if missing and not job.stop:
            statuses = self._guard.set(
                [job.keys[at] for at in missing],
                [job.views[at] for at in missing],
                job.addresses[missing],
                job,
            )
            hits = [at for at, status in zip(missing, statuses, strict=True) if status is _HIT]
            stored[[at - start for at in hits]] = True
            job.written += hits
        lacking = np.flatnonzero(~stored)
        if not lacking.size:
            job.stored += len(stored) // job.groups
            return True
        job.stored += int(lacking[0]) // job.groups
        job.failed = not job.stop
        return False


_HIT = PageStatus.HIT
