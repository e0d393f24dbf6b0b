"""Host to storage: which nodes are written, what keeps them in place meanwhile, and what is tried again."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from unified_cache._native import HostEvicted, HostLockReceipt, PrefixTree
from unified_cache.controller.storage_operations import (
    ENDED,
    FINAL,
    RUNNING,
    StorageOperation,
    StorageOperations,
)
from unified_cache.controller.stored_prefixes import StoredPrefixes
from unified_cache.counters import Counters
from unified_cache.errors import UnknownNodeError
from unified_cache.pools.allocator import PageAllocator, Pages
from unified_cache.storage.backup import BATCH_PAGES, StorageBackup, WriteJob
from unified_cache.storage.keys import KeySpace
from unified_cache.storage.objects import PageObjects
from unified_cache.storage.prefixes import PrefixPages

__all__ = ["StorageWrites"]

# Pages remembered because they could not be stored; past that the first are forgotten.
_MOST_UNSTORED = 131072
# Pages that one tick gives up, about: their digests may have to be computed.
_MOST_GIVEN_UP = 4096


@dataclass(eq=False)
class WrittenPages(StorageOperation):
    """What a job writes, and what keeps it in place."""

    job: WriteJob | None = None
    ended: bool = False  # the job has ended on this rank, or will never run
    late: bool = False  # the storage has not answered one of its calls in time
    nodes: dict[int, int] = field(default_factory=dict)
    locks: list[HostLockReceipt] = field(default_factory=list)
    digests: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    pages: list[Pages] = field(default_factory=list)
    prefixes: list[PrefixPages] = field(default_factory=list)

    @property
    def outcome(self) -> tuple[int, int]:
        """See `StorageOperation`."""
        if self.job is None or not self.ended:
            return (FINAL if self.late else RUNNING), 0
        return ENDED, self.job.stored


class StorageWrites:
    """The writing half of a `StorageLink`.

    Args:
        tree: locks what is written.
        host: the size of the host pool.
        objects: where pages lie.
        backup: runs the jobs.
        counters: counts.
        most_jobs: jobs under way: what comes meanwhile waits, and goes out together.
        operations: those under way.
        stored: told what storage has.
    """

    def __init__(
        self,
        tree: PrefixTree,
        host: PageAllocator,
        objects: PageObjects,
        backup: StorageBackup,
        counters: Counters,
        most_jobs: int,
        operations: StorageOperations,
        stored: StoredPrefixes,
    ) -> None:
        self._tree = tree
        self._host = host
        self._objects = objects
        self._backup = backup
        self._counters = counters
        self._most_jobs = most_jobs
        self._operations = operations
        self._stored = stored
        self.jobs: dict[WriteJob, WrittenPages] = {}
        self._writing_pages = 0
        # Nodes to be written, with the pages they had when they were named.
        self.waiting: dict[int, int] = {}
        # Digests of pages where that failed. Not nodes: the upper part of one that is cut has another id,
        # and without it nothing below it would ever be a hit.
        self._unstored: dict[bytes, None] = {}

    def want(self, nodes: Sequence[int]) -> None:
        """These nodes' pages are to be written when there is room for it among those being written."""
        # One question for all: after an attach these are all the nodes on host.
        self.waiting.update(zip(nodes, self._tree.page_counts(nodes), strict=True))

    def host_evicted(self, evicted: HostEvicted) -> None:
        """Nodes have left the host: what is left of those that wait goes on waiting, under its heir."""
        for node, heir, pages in evicted.gone if self.waiting else ():
            left = self.waiting.pop(node, 0)
            self._counters.storage_skipped_pages += min(left, pages)
            if left > pages:
                self.waiting[heir] = max(left - pages, self.waiting.get(heir, 0))

    def retry(self, node: int) -> None:
        """So is what of the path to `node` could not be stored before."""
        if not self._unstored:
            return
        path: list[int] = []
        while node != self._tree.root:
            path.append(node)
            parent = self._tree.node_info(node).parent
            assert parent is not None
            node = parent
        for node in reversed(path):
            digests = [digest.tobytes() for digest in self._tree.page_hashes(node)]
            # What failed is the end of a job, so if a page of a node did, its last one did.
            if digests[-1] in self._unstored:
                for digest in digests:
                    self._unstored.pop(digest, None)
                self.waiting[node] = len(digests)

    def give_up_waiting(self) -> None:
        """The storage is down: what waits is tried again at its next access."""
        given_up: list[int] = []
        count = 0
        for node, pages in self.waiting.items():
            if count >= _MOST_GIVEN_UP:
                break
            given_up.append(node)
            count += pages
            for part, _ in self._parts(node, pages):
                self._remember(self._tree.page_hashes(part))
        for node in given_up:
            del self.waiting[node]
        if self._operations.decides:
            self._cancel_queued()

    def _cancel_queued(self) -> None:
        for job in list(self.jobs):
            if (
                not self.jobs[job].ended
                and job.ticket is not None
                and self._backup.threads.cancel(job.ticket)
            ):
                job.failed = True
                self.take(job)

    def _remember(self, digests: npt.NDArray[np.uint8]) -> None:
        self._unstored.update(dict.fromkeys(digest.tobytes() for digest in digests))
        if (over := len(self._unstored) - _MOST_UNSTORED) > 0:
            for digest in list(islice(self._unstored, over)):
                del self._unstored[digest]

    def begin(self, keys: KeySpace) -> None:
        """Submit what is waiting, as far as there is room for it."""
        while self.waiting and len(self.jobs) < self._most_jobs and self._operations.room:
            taken = self._collect()
            if not taken.nodes:
                return
            pages = np.concatenate(taken.pages)
            job = WriteJob(
                keys.written_keys(np.concatenate(taken.digests)),
                *self._objects.written(pages),
                groups=keys.written_groups,
                pages=len(pages),
            )
            taken.job, self.jobs[job] = job, taken
            self._operations.begin(taken)
            self._backup.submit(job)

    def _collect(self) -> WrittenPages:
        """Nodes for one job, locked: at least a batch if so much waits."""
        taken, collected = WrittenPages(), 0
        seen: list[int] = []
        # As far as it takes, and no further: after an attach everything on host waits here.
        for node, pages in self.waiting.items():
            # Pages being written can not be evicted: half of the pool is for everybody else.
            writing = self._writing_pages + pages
            if collected >= BATCH_PAGES or (self._writing_pages > 0 and writing > self._host.num_pages // 2):
                break
            seen.append(node)
            parts = self._parts(node, pages)
            there = sum(len(host_pages) for _, host_pages in parts)
            self._counters.storage_skipped_pages += pages - there
            if not parts:
                continue
            self._writing_pages += there
            collected += there
            taken.nodes[node] = there
            for part, host_pages in parts:
                # From now until the end of the job the pages stay where they are.
                taken.locks.append(self._tree.inc_host_lock_ref(part))
                taken.digests.append(self._tree.page_hashes(part))
                taken.pages.append(host_pages)
                taken.prefixes.append(self._prefix(part, taken.digests[-1]))
        for node in seen:
            del self.waiting[node]
        return taken

    def _prefix(self, node: int, digests: npt.NDArray[np.uint8]) -> PrefixPages:
        """A node as storage is to remember it."""
        tree, parent = self._tree, self._tree.node_info(node).parent
        before = None if parent in (None, tree.root) else tree.page_hashes(parent)[-1].tobytes()
        return PrefixPages(digests, tree.node_tokens(node), before, tree.node_namespace(node))

    def _parts(self, node: int, pages: int) -> list[tuple[int, Pages]]:
        """What is on host of what `node` held when it had so many pages: nodes, ancestors first."""
        parts: list[tuple[int, Pages]] = []
        while pages > 0:
            try:
                info = self._tree.node_info(node)
            except UnknownNodeError:
                break
            if info.parent is None:
                break
            pages -= info.pages
            pending = info.pending is not None and info.pending.kind == "backup"
            if info.host_pages is not None and not pending:
                parts.append((node, info.host_pages))
            # A cut leaves the id with the lower part: the upper one is its parent.
            node = info.parent
        return parts[::-1]

    def take(self, job: WriteJob) -> None:
        """A job has ended here, or will never run."""
        self.jobs[job].ended = True
        if self._operations.alone:
            self._settle(job, job.stored)

    def late(self, job: WriteJob) -> None:
        """The storage has not answered it in time."""
        if job in self.jobs:
            self.jobs[job].late = True

    def apply(self, written: WrittenPages, state: int, pages: int) -> None:
        """All ranks have come so far with it."""
        written.agreed = state
        if state == ENDED and written.job is not None:
            self._settle(written.job, pages)

    def _settle(self, job: WriteJob, stored: int) -> None:
        """No thread reads its pages any more: so many from the front are stored, of all ranks."""
        taken = self.jobs.pop(job)
        self._operations.end(taken)
        for lock in taken.locks:
            self._tree.dec_host_lock_ref(lock)
        self._writing_pages -= job.pages
        self._counters.storage_written_pages += job.written_pages
        self._tell(taken.prefixes, job, stored)
        if stored < job.pages:
            self._counters.storage_errors += 1
            self._counters.storage_failed_pages += job.pages - stored
            self._remember(np.concatenate(taken.digests)[stored:])

    def _tell(self, prefixes: Sequence[PrefixPages], job: WriteJob, stored: int) -> None:
        """Say which pages are in storage now, and from where on they were not before."""
        written = [at // job.groups for at in job.written]
        begin = 0
        for prefix in prefixes:
            end = begin + len(prefix.hashes)
            first = bisect.bisect_left(written, begin)
            if first < len(written) and written[first] < end:
                # If it was there once, and is known, it may have been struck out of the log since.
                self._stored.missing(prefix.hashes[written[first] - begin].tobytes())
            self._stored.stored(prefix, min(max(stored - begin, 0), end - begin))
            begin = end

    def stop(self) -> None:
        """Begin nothing more; what is queued ends now, what runs after its batch."""
        self.waiting.clear()
        for job in list(self.jobs):
            job.stop = True
            if (
                not self.jobs[job].ended
                and job.ticket is not None
                and self._backup.threads.cancel(job.ticket)
            ):
                self.take(job)

    def _cancel(self, job: WriteJob) -> bool:
        """True if it had not begun: it never will."""
        return not self.jobs[job].ended and job.ticket is not None and self._backup.threads.cancel(job.ticket)

    def forget(self) -> list[tuple[Pages, set[object]]]:
        """The tree is reset next. Returns what is still written, or was when ranks last agreed: the pages,
        and the job that reads them."""
        self.waiting.clear()
        self._unstored.clear()
        running: list[tuple[Pages, set[object]]] = []
        for job, taken in self.jobs.items():
            job.stop = True
            ended = taken.ended or self._cancel(job)
            if not ended or not self._operations.alone:
                running.append((np.concatenate(taken.pages), set() if ended else {job}))
            self._operations.end(taken)
        self.jobs.clear()
        self._writing_pages = 0
        return running
