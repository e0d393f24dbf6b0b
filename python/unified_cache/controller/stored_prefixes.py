"""What this process knows of the prefixes that storage holds, and how others come to know it.

The stored tree is changed on the scheduler's thread. It is read from the storage's log when the storage is
attached, in steps on an I/O thread, and kept up to date with what is written, found and missed. What it hears
of for the first time is appended to the log, in one job at a time, so that parents come before children.
Whatever it says, the storage itself is asked before anything is read.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from unified_cache._native import StoredTree
from unified_cache.counters import Counters
from unified_cache.errors import StorageError
from unified_cache.storage.backup import Threads
from unified_cache.storage.contract import PrefixLog
from unified_cache.storage.guard import StorageGuard
from unified_cache.storage.keys import KeySpace
from unified_cache.storage.prefixes import PrefixLoad, PrefixPages, StoredPrefix, compact, encode, holder
from unified_cache.worker import Ticket

__all__ = ["AppendJob", "CompactJob", "LoadJob", "StoredPrefixes"]

_T = TypeVar("_T")
_Digests = npt.NDArray[np.uint8]

# Steps of a load come after all that somebody waits for.
_LAST = -(2**63)
# Pages of one append, about; and additions that wait for the tree, for their parents, or to be appended.
_APPEND_PAGES = 16384
_MOST_WAITING = 65536
# Pages that the storage is asked for in one call, while the log is read; and attempts to read it.
_ASK_PAGES = 2048
_MOST_FAILURES = 3
# The end waits for an append, as long as it waits for those that write.
_STOP_SECONDS = 0.5
# A log is rewritten when it has twice what was alive in it the last time, and so much more.
_SLACK_BYTES = 64 << 20


class LoadJob:
    """The log is being read."""

    load: PrefixLoad

    def __init__(self) -> None:
        self.stop = False  # set by the owner
        self.ticket: Ticket | None = None
        # Once it is done:
        self.failed = False
        self.recent: list[StoredPrefix] = []


class AppendJob:
    """Pages that are being appended to the log."""

    def __init__(self, pages: list[PrefixPages], keys: KeySpace) -> None:
        self.pages = pages
        self.keys = keys
        self.late = False
        self.ended = threading.Event()
        self.ticket: Ticket | None = None
        self.log_bytes: int | None = None  # once it is done; None: it has failed


class CompactJob:
    """The log is being rewritten."""

    def __init__(self) -> None:
        self.stop = False  # set by the owner
        self.ticket: Ticket | None = None
        self.log_bytes: int | None = None  # once it is done; None: it is as it was


Job = LoadJob | AppendJob | CompactJob


class StoredPrefixes:
    """The stored tree of one storage.

    Args:
        guard: calls the storage.
        keys: of its pages.
        page_size: tokens a page.
        capacity: pages that the tree may know.
        reads: threads that read.
        writes: threads that write.
        done: where jobs come out, to be given to `take`.
        counters: counts.

    Attributes:
        jobs: those under way.
        slack: bytes by which a log may grow beyond twice what was alive in it.
    """

    def __init__(
        self,
        guard: StorageGuard,
        keys: KeySpace,
        page_size: int,
        capacity: int,
        reads: Callable[[], Threads],
        writes: Callable[[], Threads],
        done: queue.SimpleQueue[object],
        counters: Counters,
    ) -> None:
        self._guard = guard
        self._log = guard.backend.prefix_log()
        self._keys = keys
        self._page_size = page_size
        self._capacity = capacity
        self._reads = reads
        self._writes = writes
        self._done = done
        self._counters = counters
        self._tree = StoredTree(page_size, capacity=capacity)
        self._state: Literal["unread", "reading", "read"] = "unread" if self._log is not None else "read"
        self._wanted = 0
        self._load: LoadJob | None = None
        self._failures = 0
        self.jobs: set[Job] = set()
        self.slack = _SLACK_BYTES
        # What was heard while the log is being read: pages that are there, or the digest of one that is not.
        self._heard: deque[PrefixPages | bytes] = deque()
        # Pages whose parents are still being written.
        self._orphans: deque[PrefixPages] = deque(maxlen=_MOST_WAITING)
        self._unlogged: deque[PrefixPages] = deque()
        self._log_bytes = self._alive_bytes = 0

    # What is known

    @property
    def tree(self) -> StoredTree:
        """As far as it is known; empty until the log was read."""
        return self._tree

    @property
    def reading(self) -> bool:
        """The log was not read to its end."""
        return self._state != "read"

    @property
    def waiting(self) -> bool:
        """Something is to be appended to the log."""
        if self._log is None:
            return False
        return bool(self._unlogged) or any(isinstance(one, PrefixPages) for one in self._heard)

    @property
    def due(self) -> bool:
        """`tick` has something to do."""
        return self._state == "unread" or bool(self._unlogged)

    def known(self, hashes: npt.NDArray[np.uint8]) -> int:
        """How many of these pages, from the first of a prefix (or one that is known) on, storage holds."""
        return self._tree.known(hashes)

    # What is heard

    def stored(self, pages: PrefixPages, count: int) -> None:
        """The first `count` of these pages are in storage."""
        if count:
            self._hear(pages.part(0, count))

    def looked_up(self, pages: PrefixPages, found: int) -> None:
        """So many of these pages were found, and the one after them was not."""
        self.stored(pages, found)
        if found < len(pages.hashes):
            self.missing(pages.hashes[found].tobytes())

    def missing(self, digest: bytes) -> None:
        """A page is not in storage."""
        if self._state == "read":
            self._tree.forget(digest)
        else:
            self._hear(digest)

    def _hear(self, heard: PrefixPages | bytes) -> None:
        if self._state == "read":
            assert isinstance(heard, PrefixPages)
            if self._add(heard) and self._orphans:
                self._adopt()
            return
        self._heard.append(heard)
        if len(self._heard) > _MOST_WAITING:
            self._heard.popleft()

    def _add(self, pages: PrefixPages) -> bool:
        """Put pages into the tree; True if some are new."""
        known = self._tree.touch(pages.hashes)
        extra_key, cache_salt = pages.namespace
        new, orphans = self._tree.add(
            pages.hashes, parent=pages.parent, extra_key=extra_key, cache_salt=cache_salt
        )
        if orphans:
            self._orphans.append(pages)
        elif new and self._log is not None and self._keys.written_groups:
            self._unlogged.append(pages.part(known, known + new))
        return new > 0

    def _adopt(self) -> None:
        """Try again to find a place for those that had none."""
        added = True
        while added and self._orphans:
            orphans = list(self._orphans)
            self._orphans.clear()
            added = sum(self._add(pages) for pages in orphans) > 0

    # Jobs

    def tick(self, *, can_read: bool, can_write: bool, writing: bool) -> None:
        """Begin what is to be done.

        Args:
            can_read: the storage may be asked now.
            can_write: it may be written to.
            writing: pages are on their way there: so an orphan's parents may be.
        """
        if self._log is None:
            return
        if self._state == "unread":
            if can_read:
                self._begin_load()
            else:
                self._heard.clear()  # it is heard of again when somebody looks for it
        if not writing:
            self._orphans.clear()  # they are found when somebody looks for them
        under_way = [job for job in self.jobs if isinstance(job, AppendJob | CompactJob)]
        if any(isinstance(job, AppendJob) and job.late for job in under_way):
            self.give_up()
        if not can_write or any(isinstance(job, AppendJob) for job in under_way):
            return
        if self._unlogged:
            self._append(_APPEND_PAGES)
        elif self._state == "read" and not under_way and self._log_bytes > 2 * self._alive_bytes + self.slack:
            job = CompactJob()
            self.jobs.add(job)
            job.ticket = self._writes().submit(partial(self._compact, job), _LAST)

    def give_up(self) -> None:
        """The storage can not be written to: what was not appended is appended when it is seen again."""
        for job in list(self.jobs):
            if isinstance(job, AppendJob) and job.ticket is not None and self._writes().cancel(job.ticket):
                self.take(job)
        while self._unlogged:
            self._unheard(self._unlogged.popleft())

    def _unheard(self, pages: PrefixPages) -> None:
        self._counters.storage_unlogged_pages += len(pages.hashes)
        self._tree.forget(pages.hashes[0].tobytes())

    def late(self, job: LoadJob | AppendJob) -> None:
        """The storage has not answered in time: nobody waits for it any longer."""
        if isinstance(job, AppendJob):
            job.late = True
            self.give_up()
        elif job is self._load:
            job.stop = True
            self._load_failed()

    def take(self, job: Job) -> list[StoredPrefix]:
        """A job has ended; returns the prefixes that a load has found, those stored last first."""
        self.jobs.discard(job)
        if isinstance(job, LoadJob):
            return self._loaded(job)
        if job.log_bytes is not None:
            self._log_bytes = job.log_bytes
            if isinstance(job, CompactJob):
                self._alive_bytes = job.log_bytes
        elif isinstance(job, CompactJob):
            self._alive_bytes = self._log_bytes  # not again at once
        else:
            for pages in job.pages:
                self._unheard(pages)
        return []

    def stop(self) -> None:
        """Begin nothing more, but for what has to be appended still; what runs ends soon."""
        if self._log is not None and self._guard.available:
            # Those that wait in the queue too: ranks that agree do not wait for them before.
            appends = [job for job in self.jobs if isinstance(job, AppendJob)]
            if all(job.ended.wait(_STOP_SECONDS) for job in appends) and self._unlogged:
                self._append(2**62).ended.wait(_STOP_SECONDS)
        for held in (self._heard, self._orphans, self._unlogged):
            held.clear()
        for job in list(self.jobs):
            if not isinstance(job, AppendJob):
                job.stop = True
            threads = self._reads() if isinstance(job, LoadJob) else self._writes()
            if job.ticket is not None and threads.cancel(job.ticket):
                self.jobs.discard(job)
        self._state, self._log, self._load = "read", None, None

    # Loading

    def want(self, pages: int) -> None:
        """Of the next load so many pages are wanted with their tokens, those stored last."""
        self._wanted = pages

    def use_keys(self, keys: KeySpace) -> None:
        """The pages have other keys from now on: what was known is of no use."""
        if self._load is not None:
            self._load.stop = True
        self._load, self._failures = None, 0
        self._keys = keys
        self._tree = StoredTree(self._page_size, capacity=self._capacity)
        for held in (self._heard, self._orphans, self._unlogged):
            held.clear()
        self._state = "unread" if self._log is not None else "read"

    def _begin_load(self) -> None:
        assert self._log is not None
        job = self._load = LoadJob()
        job.load = PrefixLoad(
            self._pieces(job, self._log),
            self._keys.pools[0].fingerprint,
            None,
            self._page_size,
            self._capacity,
            partial(self._holds, job, holder(self._guard.backend, self._keys)),
            keep=self._wanted > 0,
        )
        self._state = "reading"
        self.jobs.add(job)
        job.ticket = self._reads().submit(partial(self._read, job, self._wanted), _LAST)

    def _pieces(self, job: LoadJob, log: PrefixLog) -> Iterator[bytes]:
        """The log, each piece within the time of a call."""
        pieces = log.read()

        def read() -> bytes | None:
            try:
                return next(pieces, b"")
            except StorageError:
                return None  # that says nothing of the pages

        while piece := self._ask(job, read):
            yield piece

    def _holds(
        self, job: LoadJob, holds: Callable[[_Digests], npt.NDArray[np.bool_]], digests: _Digests
    ) -> npt.NDArray[np.bool_]:
        """Which pages the storage has, in questions that are small enough for any storage."""
        there = np.zeros(len(digests), np.bool_)
        for start in range(0, len(digests), _ASK_PAGES):
            part = digests[start : start + _ASK_PAGES]
            there[start : start + _ASK_PAGES] = self._ask(job, partial(holds, part))
        return there

    def _ask(self, job: LoadJob, work: Callable[[], _T | None]) -> _T:
        answer = None if job.stop else self._guard.ask(work, job)
        if answer is None:
            raise StorageError("the storage did not answer")
        return answer

    def _read(self, job: LoadJob, wanted: int) -> None:
        """One step, on a thread: so that what is waited for gets its turn."""
        threads = self._reads()
        try:
            if job.load.step():
                job.ticket = threads.submit(partial(self._read, job, wanted), _LAST)
                if not job.stop or not threads.cancel(job.ticket):
                    return
            if wanted and not job.stop:
                job.recent = job.load.recent(wanted)
        except Exception:  # the storage, or a fault of this code: then nothing is known
            job.failed = True
        job.load.forget_log()
        self._done.put(job)

    def _load_failed(self) -> None:
        self._counters.storage_errors += 1
        self._load = None
        self._failures += 1
        self._heard.clear()  # it is heard of again when somebody looks for it
        # A storage that can not bring it after so many attempts is used without it.
        self._state = "unread" if self._failures < _MOST_FAILURES else "read"

    def _loaded(self, job: LoadJob) -> list[StoredPrefix]:
        if job is not self._load:
            return []
        if job.failed:
            self._load_failed()
            return []
        self._load = None
        load = job.load
        self._tree, self._state = load.tree, "read"
        self._counters.storage_damaged_records += load.damaged
        self._log_bytes = load.bytes
        self._alive_bytes = load.bytes * load.tree.pages // max(load.tree.pages + load.gone, 1)
        heard, self._heard = self._heard, deque()
        for one in heard:
            if isinstance(one, bytes):
                self._tree.forget(one)
            else:
                self._hear(one)
        return job.recent

    # On the threads that write

    def _append(self, most: int) -> AppendJob:
        taken: list[PrefixPages] = []
        count = 0
        while self._unlogged and count < most:
            taken.append(self._unlogged.popleft())
            count += len(taken[-1].hashes)
        job = AppendJob(taken, self._keys)
        self.jobs.add(job)
        job.ticket = self._writes().submit(partial(self._run_append, job))
        return job

    def _run_append(self, job: AppendJob) -> None:
        log = self._log
        try:
            if log is not None:
                records = b"".join(
                    encode(one.tokens, one.parent, one.namespace, self._page_size, job.keys.pools[0])
                    for one in job.pages
                )

                def append() -> int | None:
                    try:
                        return log.append(records)
                    except StorageError:
                        return None  # no room for the log: that says nothing of the pages

                job.log_bytes = self._guard.ask(append, job)
        except Exception:  # a fault of this code: nobody hears of them
            job.log_bytes = None
        self._done.put(job)
        job.ended.set()

    def _compact(self, job: CompactJob) -> None:
        try:
            if self._log is not None and not job.stop:
                job.log_bytes = compact(self._guard.backend, self._log, lambda: job.stop)
        except Exception:  # the log is as it was, and is read as it is
            job.log_bytes = None
        self._done.put(job)
