"""Reading pages from storage, on a thread: it touches bytes and queues only."""

import queue
from collections.abc import Sequence
from functools import partial

from unified_cache.storage.backup import BATCH_PAGES
from unified_cache.storage.contract import PageStatus, Store
from unified_cache.worker import Worker

__all__ = ["ReadJob", "StoragePrefetch"]


class ReadJob:
    """Pages of one prefix to look for, then to read. Two phases, each comes out of the done queue once."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys
        self.views: Sequence[memoryview] = ()  # set by the owner before the second phase
        self.stop = False  # set by the owner: the next batch is not begun
        self.found = 0  # pages from the front that are stored; valid after the first phase
        self.read = 0  # pages from the front whose bytes are there; grows while the second phase runs
        self.corrupt = 0
        self.error: Exception | None = None


class StoragePrefetch:
    """Runs the phases of `ReadJob`s one after the other."""

    def __init__(self, store: Store, done: "queue.SimpleQueue[ReadJob]") -> None:
        self._store = store
        self._done = done
        self._worker = Worker("unified-cache storage reads")

    def look_up(self, job: ReadJob) -> None:
        """First phase: how many pages are there?"""
        self._worker.submit(partial(self._look_up, job))

    def read(self, job: ReadJob) -> None:
        """Second phase: fill the job's views with its first pages."""
        self._worker.submit(partial(self._read, job))

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all phases have ended; False if that took longer than `timeout`."""
        return self._worker.drain(timeout)

    def close(self) -> None:
        """End the thread. More than once is fine."""
        self._worker.close()

    def _look_up(self, job: ReadJob) -> None:
        try:
            if not job.stop:
                for start in range(0, len(job.keys), BATCH_PAGES):
                    keys = job.keys[start : start + BATCH_PAGES]
                    there = self._store.exists(keys)
                    job.found += there
                    if there < len(keys) or job.stop:
                        break
        except Exception as error:  # reported to the owner, who counts it
            job.error = error
        self._done.put(job)

    def _read(self, job: ReadJob) -> None:
        try:
            for start in range(0, len(job.views), BATCH_PAGES):
                if job.stop:
                    break
                views = job.views[start : start + BATCH_PAGES]
                statuses = self._store.get(job.keys[start : start + len(views)], views)
                job.corrupt += statuses.count(PageStatus.CORRUPT)
                if PageStatus.ERROR in statuses:
                    job.error = OSError("a page could not be read")
                run = next((i for i, s in enumerate(statuses) if s is not PageStatus.HIT), len(statuses))
                job.read += run
                if run < len(views):
                    break
        except Exception as error:  # reported to the owner, who counts it
            job.error = error
        self._done.put(job)
