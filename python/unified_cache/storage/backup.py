"""Writing pages to storage, on a thread: it touches bytes and queues only."""

import queue
from collections.abc import Sequence
from functools import partial

from unified_cache.storage.contract import Store
from unified_cache.worker import Worker

__all__ = ["BATCH_PAGES", "StorageBackup", "WriteJob"]

BATCH_PAGES = 128


class WriteJob:
    """Pages to write, in the order of their prefix. The memory behind the views must stay as it is."""

    def __init__(self, keys: Sequence[str], views: Sequence[memoryview]) -> None:
        self.keys = keys
        self.views = views
        self.stop = False  # set by the owner: the next batch is not begun
        # Valid once the job was taken as done:
        self.stored = 0  # pages from the front that are in storage now
        self.written = 0  # of these, in batches that this job has written
        self.error: Exception | None = None


class StorageBackup:
    """Runs `WriteJob`s one after the other."""

    def __init__(self, store: Store, done: "queue.SimpleQueue[WriteJob]") -> None:
        self._store = store
        self._done = done
        self._worker = Worker("unified-cache storage writes")

    def submit(self, job: WriteJob) -> None:
        """Write the job's pages; the job comes out of the done queue exactly once."""
        self._worker.submit(partial(self._run, job))

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all jobs have ended; False if that took longer than `timeout`."""
        return self._worker.drain(timeout)

    def close(self) -> None:
        """End the thread. More than once is fine."""
        self._worker.close()

    def _run(self, job: WriteJob) -> None:
        try:
            for start in range(0, len(job.keys), BATCH_PAGES):
                if job.stop:
                    break
                keys, views = job.keys[start : start + BATCH_PAGES], job.views[start : start + BATCH_PAGES]
                there = self._store.exists(keys)
                job.stored += there
                if there < len(keys):
                    written = self._store.set(keys[there:], views[there:])
                    job.stored += written
                    job.written += written
                    if there + written < len(keys):
                        break
        except Exception as error:  # reported to the owner, who counts it
            job.error = error
        self._done.put(job)
