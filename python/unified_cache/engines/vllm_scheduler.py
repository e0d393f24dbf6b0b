"""The scheduler's side of the vLLM connector: what is on host, what is saved, loaded and fetched.

vLLM owns the device: which blocks hold what, and what is evicted there. The prefix tree here is that of the
host tier. Nothing here touches bytes: a `Step` says to the workers what to do, and an operation has ended
when all of them have said so. Storage is asked on threads, whose answers are taken at the next call.

All calls belong on vLLM's scheduler thread.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from unified_cache._native import HostLockReceipt, LoadBackPlan, page_hashes
from unified_cache.config import CacheConfig
from unified_cache.engines.vllm_messages import Fetch, Load, Report, Reports, Save, Step, WorkerAbout
from unified_cache.engines.vllm_settings import VllmSettings
from unified_cache.errors import StorageError
from unified_cache.pools.allocator import PageAllocator, Pages
from unified_cache.storage.backup import Threads
from unified_cache.storage.contract import Backend
from unified_cache.storage.guard import GRACE, StorageCounts, StorageGuard
from unified_cache.storage.keys import KeySpace, PoolKeys
from unified_cache.storage.prefetch import LookUp, StoragePrefetch, batches
from unified_cache.storage.urls import open_storage
from unified_cache.worker import WorkerPool

__all__ = ["Event", "Scheduled", "SchedulerSide", "open_shared_storage"]

_log = logging.getLogger(__name__)

_NO_PAGES: Pages = np.empty(0, np.uint32)
_NO_DIGESTS: npt.NDArray[np.uint8] = np.empty((0, 32), np.uint8)


_Namespace: TypeAlias = tuple[str | None, str | None]


class _Space(TypedDict):
    extra_key: str | None
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the host tier, in the terms of vLLM.

    Attributes:
        kind: "stored" or "removed".
        names: vLLM's hashes of the blocks.
        parent: of a "stored": the hash of the block before the first one; None at the beginning.
        tokens: of a "stored": those of the blocks.
        lora: of a "stored": the adapter's name.
    """

    kind: Literal["stored", "removed"]
    names: Sequence[Any] = ()
    parent: Any = None
    tokens: Sequence[int] = ()
    lora: str | None = None


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one step computes of one request.

    Attributes:
        request: its id.
        blocks: device blocks that it has got.
        anew: they are all that it has: it is new, or comes back after a preemption.
        computed: tokens that were computed before.
        tokens: that this step computes.
    """

    request: str
    blocks: Sequence[int]
    anew: bool
    computed: int
    tokens: int


class _Tracked:
    """A request of vLLM, and what is under way for it."""

    def __init__(
        self,
        name: str,
        tokens: Callable[[], Sequence[int]],
        names: Callable[[], Sequence[Any]],
        namespace: _Namespace,
        lora: str | None,
        *,
        cacheable: bool,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.lora = lora
        self.cacheable = cacheable
        self.names = names
        self._read = tokens
        self._tokens = np.empty(0, np.uint32)
        self._digests = _NO_DIGESTS
        self.blocks: list[int] = []
        self.saved = 0  # pages from the front that are on host or on their way there
        self.saving = 0  # saves that have not ended
        self.plan: LoadBackPlan | None = None  # keeps what was offered to vLLM
        self.first = 0  # pages at its front that are on device
        self.load_failed = False
        self.search: _Search | None = None
        self.fetched = 0  # tokens from the front up to which its pages came from storage
        self.fetched_from = 0

    def tokens(self) -> npt.NDArray[np.uint32]:
        """All of them as they are now."""
        known, now = len(self._tokens), self._read()
        if len(now) > known:
            more = np.asarray(now[known:], np.uint32)
            self._tokens = np.concatenate((self._tokens, more)) if known else more
        return self._tokens

    def digests(self, pages: int, page_size: int) -> npt.NDArray[np.uint8]:
        """Those of its first pages."""
        known = len(self._digests)
        if pages > known:
            extra_key, cache_salt = self.namespace
            more = page_hashes(
                self.tokens()[known * page_size : pages * page_size],
                page_size,
                parent=self._digests[-1] if known else None,
                extra_key=extra_key,
                cache_salt=cache_salt,
            )
            self._digests = np.concatenate((self._digests, more))
        return self._digests[:pages]


@dataclass(eq=False, slots=True)
class _Search:
    """What storage has of one request, behind what was on host: looked for, then fetched part by part."""

    request: _Tracked
    tokens: npt.NDArray[np.uint32]
    first: int  # pages before, on host
    started: float
    lock: HostLockReceipt | None  # keeps the end of what is on host
    look_up: LookUp | None = None
    parts: deque[_Operation] = field(default_factory=deque)
    moved: float = 0.0  # when the last part ended
    waits: bool = True  # the request is held for it
    over: bool = False


@dataclass(eq=False, slots=True)
class _Operation:
    """Something that the workers were told to do."""

    kind: Literal["save", "load", "fetch"]
    number: int
    pages: Pages  # on host
    epoch: int
    request: _Tracked
    first: int  # of the request's pages: the first one of these
    tokens: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    digests: npt.NDArray[np.uint8] = field(default_factory=lambda: _NO_DIGESTS)
    blocks: list[int] = field(default_factory=list)
    names: Sequence[Any] = ()
    parent: Any = None
    plan: LoadBackPlan | None = None
    search: _Search | None = None
    moved: bool = False
    read: int | None = None
    to_store: bool = False
    held: bool = False  # it is stored only once it is known what it was computed from
    doubtful: bool = False  # it was computed from what a load should have brought and did not
    lock: HostLockReceipt | None = None
    spare: Pages = field(default_factory=lambda: _NO_PAGES)  # free once it is stored


class SchedulerSide:
    """Decides; see the module.

    Args:
        settings: of the connector.
        clock: seconds; several threads call it.
        backend: in place of what ``storage`` names.
        threads: makes the threads that ask it, from their name and number.

    Raises:
        StorageError: the storage can not be used.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        backend: Backend | None = None,
        threads: Callable[[str, int], Threads] = WorkerPool,
    ) -> None:
        self.settings = settings
        self._config = settings.cache
        self._page = self._config.page_size
        self._clock = clock
        self._requests: dict[str, _Tracked] = {}
        self._operations: dict[int, _Operation] = {}
        self._numbers = 0
        self._epoch = 0
        self._step = Step()
        self._reports = Reports()
        self._workers = 0
        # Device blocks that a save still reads, and which.
        self._saving: dict[int, _Operation] = {}
        # Loads that a forward reads, of which it is not known yet whether they have arrived, and the saves of
        # what was computed meanwhile.
        self._reading: dict[int, list[_Operation]] = {}
        self._storing_pages = 0
        self._fetching_pages = 0
        self._tree = self._config.make_tree()
        self._host = PageAllocator(0, "host")
        self._keys = KeySpace(())
        self._events: list[Event] = []
        self._named: dict[int, Any] = {}  # by host page: vLLM's hash of the block
        self._counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._done: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._searches: set[_Search] = set()  # that are not over
        self._looking: dict[LookUp, _Search] = {}
        self._guard: StorageGuard | None = None
        self._reader: StoragePrefetch | None = None
        if backend is None and self._config.storage is not None:
            backend = open_shared_storage(self._config)
        if backend is not None:
            self._guard = StorageGuard(
                backend,
                object_bytes=0,
                deadline=self._config.storage_timeout,
                clock=clock,
                counts=StorageCounts(),
            )
            self._reader = StoragePrefetch(
                self._guard, threads("unified-cache storage look-ups", 2), self._done
            )

    def start(self, about: Sequence[WorkerAbout]) -> None:
        """The workers are there, in the order of their ranks.

        Raises:
            StorageError: the storage has no room for a page.
        """
        pages = min(worker.host_pages for worker in about)
        self._workers = len(about)
        self._host = PageAllocator(pages, "host")
        self._tree = self._config.make_tree(1, pages)
        self._keys = KeySpace([PoolKeys(worker.fingerprint) for worker in about])
        if self._guard is not None:
            self._guard.object_bytes = max(worker.page_bytes for worker in about)
            self._guard.register()

    # A request, from vLLM's calls

    def begin(
        self,
        name: str,
        tokens: Callable[[], Sequence[int]],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        names: Callable[[], Sequence[Any]] = tuple,
        cacheable: bool = True,
        reads: bool = True,
    ) -> None:
        """A request has arrived: look in storage for what is not on host.

        Args:
            name: its id.
            tokens: all its tokens, as they are at each call.
            extra_key: first half of its namespace.
            cache_salt: second half.
            lora: its adapter's name, for events.
            names: vLLM's hashes of its blocks, for events.
            cacheable: it may be saved and loaded.
            reads: it may be loaded.
        """
        request = _Tracked(name, tokens, names, (extra_key, cache_salt), lora, cacheable=cacheable)
        self._requests[name] = request
        if cacheable and reads and self.settings.load:
            self._search(request)

    def match(self, name: str, computed: int) -> tuple[int | None, bool]:
        """How many tokens after those that are on device can be loaded, and whether the request waits for it.

        None: storage has not answered, ask again.

        Args:
            name: its id.
            computed: tokens on device, whole blocks.
        """
        request = self._requests.get(name)
        if request is None or not request.cacheable or not self.settings.load or request.load_failed:
            return 0, False
        self._drop_offer(request)
        self._take_answers()
        # What it computed before it was preempted is on its way to host: soon a hit.
        if request.saving or self._held(request):
            return None, False
        tokens = self._loadable(request)
        found = self._tree.match_prefix(tokens, **self._space(request))
        more = found.host_hit_length - computed
        if more < max(self.settings.load_threshold, 1):
            return 0, False
        request.plan = self._tree.plan_load_back(found.last_host_node)
        request.first = computed // self._page
        return more, self.settings.transfer == "async"

    def allocated(self, name: str, blocks: Sequence[int], tokens: int) -> None:
        """vLLM has taken what it was offered, or not.

        Args:
            name: the request's id.
            blocks: its device blocks.
            tokens: to load, after those on device; 0: nothing.
        """
        request = self._requests.get(name)
        if request is None:
            return
        if tokens == 0 or request.plan is None:
            self._drop_offer(request)
            return
        first, count = request.first, tokens // self._page
        plan, request.plan = request.plan, None
        pages = plan.host_pages[first : first + count]
        targets = np.asarray(blocks[first : first + count], np.uint32)
        operation = self._begin("load", pages, request, first)
        operation.plan = plan
        request.blocks = list(blocks)
        request.saved = max(request.saved, first + count)
        self._wait_for_saves(targets.tolist())
        now = self.settings.transfer != "async"
        if now:
            self._reading[operation.number] = []
        self._step.loads.append(Load(operation.number, name, pages, targets, now))
        stored = max(
            0,
            min(request.fetched, (first + count) * self._page)
            - max(request.fetched_from, first * self._page),
        )
        self._counts["host_hit_tokens"] += count * self._page - stored
        self._counts["storage_hit_tokens"] += stored

    def hit_sources(self, name: str, tokens: int) -> tuple[int, int]:
        """Of these loaded tokens, how many were on host, and how many came from storage for this request."""
        request = self._requests.get(name)
        if request is None:
            return tokens, 0
        first = request.first * self._page
        stored = max(0, min(request.fetched, first + tokens) - max(request.fetched_from, first))
        return tokens - stored, stored

    def step(self, scheduled: Iterable[Scheduled]) -> Step:
        """What the workers do with this step."""
        self._take_answers()
        for item in scheduled:
            self._advance(item)
        step, self._step = self._step, Step()
        return step

    def rewritten(self, blocks: Sequence[int]) -> None:
        """These device blocks are given to somebody else: the next step waits for saves that read them.

        `step` does that for blocks of requests that it knows; this is for an engine that tells of each block.
        """
        self._wait_for_saves(blocks)

    @property
    def copying(self) -> bool:
        """A save has not ended, or the workers do not know it: what is on host goes on to storage only when a
        step of the engine sees it."""
        saves = (operation for operation in self._operations.values() if operation.kind == "save")
        return bool(self._step) or any(not save.moved for save in saves)

    def finished(self, name: str) -> None:
        """A request has ended, however. Its blocks may be used anew at once: saves are waited for then."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._drop_offer(request)
            if request.search is not None:
                request.search.waits = False
                if request.search.look_up is not None:
                    request.search.look_up.stop = True

    def reported(self, reports: Iterable[Report]) -> None:
        """Workers have said how far they are."""
        self._reports.add(reports)
        for report in self._reports.take(self._workers):
            operation = self._operations.get(report.op)
            if operation is not None:
                self._reported(operation, report)

    # The cache as a whole

    def reset(self) -> None:
        """Empty the host tier; storage stays. Pages that workers still touch stay out of use until then."""
        self._epoch += 1
        for request in self._requests.values():
            request.plan = None
            request.saved = 0
        for search in self._searches:
            search.over, search.lock = True, None
        self._searches.clear()
        held = [operation.pages for operation in self._operations.values()]
        self._tree.reset()
        self._host.reset(np.unique(np.concatenate([_NO_PAGES, *held])))
        if self._named:
            self._event(Event("removed", list(self._named.values())))
        self._named.clear()

    def take_events(self) -> list[Event]:
        """The events since the last call, if they are kept."""
        events, self._events = self._events, []
        return events

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by name; without what is 0."""
        counts = {name: count for name, count in self._counts.items() if count}
        self._counts = dict.fromkeys(_COUNTS, 0)
        return counts

    def usage(self) -> dict[str, int]:
        """What is held now: ``free + tree + operations = pages``, of the host."""
        return {
            "requests": len(self._requests),
            "operations": len(self._operations),
            "host_pages": self._host.num_pages,
            "host_free_pages": self._host.free_pages,
            "host_tree_pages": self._tree.host_tokens // self._page,
        }

    def close(self) -> None:
        """End the threads. More than once is fine."""
        if self._reader is not None and self._guard is not None:
            self._reader.threads.close()
            self._guard.close()

    # Saving

    def _advance(self, item: Scheduled) -> None:
        request = self._requests.get(item.request)
        if request is None:
            return
        if item.anew:
            fresh = item.blocks[item.computed // self._page :]
            request.blocks = list(item.blocks)
        else:
            fresh = item.blocks
            request.blocks += item.blocks
        self._wait_for_saves(fresh)
        if not (request.cacheable and self.settings.save):
            return
        # Of drafts and of tokens that are still being sampled nobody knows whether they stay.
        tokens = min(item.computed + item.tokens, len(request.tokens()))
        pages = min(tokens // self._page, len(request.blocks))
        if pages > request.saved:
            self._save(request, pages)

    def _save(self, request: _Tracked, pages: int) -> None:
        first = request.saved
        if request.saving == 0:
            known = self._tree.match_prefix(request.tokens()[: pages * self._page], **self._space(request))
            first = known.host_hit_length // self._page
        # Shared with another request, which is saving them.
        while first < pages and request.blocks[first] in self._saving:
            first += 1
        request.saved = max(request.saved, first)
        # Behind a page that was evicted meanwhile there may be more: one save at a time reads a block.
        pages = next((at for at in range(first, pages) if request.blocks[at] in self._saving), pages)
        if first >= pages:
            return
        count = min(pages - first, self._make_room(pages - first))
        if count == 0:
            self._counts["saves_given_up"] += pages - first
            return
        operation = self._begin("save", self._host.alloc(count), request, first)
        operation.tokens = request.tokens()[: (first + count) * self._page].copy()
        operation.blocks = request.blocks[first : first + count]
        for block in operation.blocks:
            self._saving[block] = operation
        self._name(operation)
        request.saved = first + count
        request.saving += 1
        if self._guard is not None and self._storing_pages + count <= self._host.num_pages // 2:
            operation.to_store = True
            operation.digests = request.digests(first + count, self._page)[first:]
            self._storing_pages += count
        elif self._guard is not None:
            self._counts["stores_given_up"] += count
        # If one of these loads fails, what was computed beside it may be wrong, on all workers, and only one
        # knows. Whoever shares a block with the request of the load has read it too: so all saves count.
        operation.held = operation.to_store and bool(self._reading)
        for saves in self._reading.values():
            saves.append(operation)
        digests = operation.digests if operation.to_store else None
        blocks = np.asarray(operation.blocks, np.uint32)
        self._step.saves.append(Save(operation.number, blocks, operation.pages, digests, operation.held))

    def _saved(self, operation: _Operation, pages: int) -> None:
        """The bytes are on host, on all workers, or they never will be."""
        operation.moved = True
        operation.request.saving -= 1
        for block in operation.blocks:
            if self._saving.get(block) is operation:
                del self._saving[block]
        if pages < len(operation.pages):
            self._counts["failed_copies"] += 1
        if operation.doubtful:
            self._counts["saves_dropped"] += len(operation.pages)
            pages = 0
        if operation.held:
            operation.to_store = pages > 0
            (self._step.store if pages else self._step.drop).append(operation.number)
            if not pages:
                self._storing_pages -= len(operation.pages)
        if operation.epoch != self._epoch:
            if not operation.to_store:
                self._end(operation)
            return
        if pages < len(operation.pages):
            operation.request.saved = min(operation.request.saved, operation.first + pages)
        taken = self._give(operation, pages)
        if operation.to_store:
            # What the tree has not taken is still read by the threads that store it.
            operation.spare = taken[0]
            if taken[1] is not None:
                operation.lock = self._tree.inc_host_lock_ref(taken[1])
        else:
            self._host.free(taken[0])
            self._end(operation)

    def _give(self, operation: _Operation, pages: int) -> tuple[Pages, int | None]:
        """Give the first pages of an operation to the tree; returns those that it has not taken, and the node
        where they end."""
        first, space = operation.first, self._space(operation.request)
        before = self._tree.match_prefix(operation.tokens[: first * self._page], **space)
        if pages == 0 or before.host_hit_length < first * self._page:
            return operation.pages, None
        inserted = self._tree.insert_host(
            before.last_host_node,
            operation.tokens[first * self._page : (first + pages) * self._page],
            operation.pages[:pages],
            hashes=operation.digests[:pages] if len(operation.digests) else None,
            **space,
        )
        refused = inserted.duplicate_host_pages
        self._stored_event(operation, pages, refused)
        return np.concatenate((refused, operation.pages[pages:])), inserted.node

    # Storage

    def _search(self, request: _Tracked) -> None:
        if self._guard is None or self._reader is None or not self._guard.available:
            return
        tokens = self._loadable(request).copy()
        space = self._space(request)
        found = self._tree.match_prefix(tokens, **space)
        first = found.host_hit_length // self._page
        pages = len(tokens) // self._page
        threshold = max(self.settings.fetch_threshold, self._page)
        if (pages - first) * self._page < threshold:
            return
        lock = self._tree.inc_host_lock_ref(found.last_host_node)
        search = _Search(request, tokens, first, self._clock(), lock)
        search.moved = search.started
        search.look_up = LookUp([self._keys.keys(request.digests(pages, self._page)[first:])])
        request.search = search
        self._searches.add(search)
        self._looking[search.look_up] = search
        self._counts["look_ups"] += 1
        self._reader.look_up(search.look_up)

    def _held(self, request: _Tracked) -> bool:
        """The request waits for storage."""
        search, policy = request.search, self._config.prefetch_policy
        if search is None or search.over or not search.waits or policy == "best_effort":
            return False
        now = self._clock()
        if policy == "timeout":
            per_token = self._config.prefetch_timeout_per_1024 / 1024
            asked = len(search.tokens) - search.first * self._page
            limit = search.started + self._config.prefetch_timeout + asked * per_token
        else:
            # Whatever the storage does: a call that is late has failed.
            limit = search.moved + 2 * GRACE * self._config.storage_timeout
        search.waits = now < limit
        return search.waits

    def _take_answers(self) -> None:
        """Of the storage, to what was looked up."""
        if self._guard is None or not self._looking:
            return
        for late in self._guard.watch():
            if isinstance(late, LookUp) and late in self._looking:
                self._end_search(self._looking.pop(late))
        while True:
            try:
                job = self._done.get_nowait()
            except queue.Empty:
                return
            if isinstance(job, LookUp) and job in self._looking:
                self._looked_up(self._looking.pop(job), job.found)

    def _looked_up(self, search: _Search, found: list[int] | None) -> None:
        search.look_up = None
        gone = search.over or search.request.name not in self._requests
        if gone or found is None:
            self._counts["storage_errors"] += not gone
            self._end_search(search)
            return
        pages = found[0] // self._keys.groups
        self._counts["storage_found_pages"] += pages
        pages = min(pages, self._host.num_pages // 2 - self._fetching_pages)
        if pages > 0 and pages * self._page >= self.settings.fetch_threshold:
            pages = min(pages, self._make_room(pages))
        else:
            pages = 0
        if pages <= 0:
            self._end_search(search)
            return
        request, first = search.request, search.first
        digests = request.digests(first + pages, self._page)[first:]
        self._fetching_pages += pages
        for start, end in batches(pages, max(self._guard.object_bytes if self._guard is not None else 1, 1)):
            operation = self._begin("fetch", self._host.alloc(end - start), request, first + start)
            operation.tokens = search.tokens[: (first + end) * self._page]
            operation.digests = digests[start:end]
            operation.search = search
            self._name(operation)
            search.parts.append(operation)
            self._step.fetches.append(Fetch(operation.number, operation.digests, operation.pages))

    def _fetched(self, search: _Search) -> None:
        """Parts have ended: what was read from the front on is on host now."""
        while search.parts and search.parts[0].read is not None:
            operation = search.parts.popleft()
            pages = operation.read or 0
            self._fetching_pages -= len(operation.pages)
            search.moved = self._clock()
            if operation.epoch == self._epoch:
                refused, node = self._give(operation, pages)
                self._host.free(refused)
                self._counts["storage_read_pages"] += pages
                if node is not None:
                    request = search.request
                    if request.fetched == 0:
                        request.fetched_from = operation.first * self._page
                    request.fetched = (operation.first + pages) * self._page
                    lock = self._tree.inc_host_lock_ref(node)
                    self._unlock(search.lock)
                    search.lock = lock
            self._end(operation)
        if not search.parts:
            self._end_search(search)

    def _end_search(self, search: _Search) -> None:
        if not search.over:
            self._unlock(search.lock)
            self._searches.discard(search)
        search.over, search.lock, search.look_up = True, None, None

    # Operations

    def _begin(
        self, kind: Literal["save", "load", "fetch"], pages: Pages, request: _Tracked, first: int
    ) -> _Operation:
        self._numbers += 1
        operation = _Operation(kind, self._numbers, pages, self._epoch, request, first)
        self._operations[operation.number] = operation
        self._counts[f"{kind}s" if kind != "fetch" else "fetches"] += 1
        return operation

    def _reported(self, operation: _Operation, report: Report) -> None:
        if report.stage == "stored":
            self._storing_pages -= len(operation.pages)
            self._counts["storage_written_pages"] += report.pages
            if operation.epoch == self._epoch:
                self._unlock(operation.lock)
                self._host.free(operation.spare)
            self._end(operation)
        elif operation.kind == "save":
            self._saved(operation, report.pages)
        elif operation.kind == "load":
            if operation.epoch == self._epoch and operation.plan is not None:
                operation.plan.cancel()
            saves = self._reading.pop(operation.number, [])
            if report.pages < len(operation.pages):
                self._counts["failed_copies"] += 1
                operation.request.load_failed = True
                for save in saves:
                    save.doubtful = True
            self._end(operation)
        elif operation.search is not None:
            operation.read = report.pages
            self._fetched(operation.search)

    def _end(self, operation: _Operation) -> None:
        """Nobody touches its pages any more."""
        del self._operations[operation.number]
        if operation.epoch == self._epoch:
            return
        # They were kept through a reset, for it and perhaps for others.
        others = [other.pages for other in self._operations.values() if other.epoch != self._epoch]
        self._host.free(np.setdiff1d(operation.pages, np.concatenate([_NO_PAGES, *others])))

    def _unlock(self, lock: HostLockReceipt | None) -> None:
        if lock is not None:
            self._tree.dec_host_lock_ref(lock)

    def _drop_offer(self, request: _Tracked) -> None:
        if request.plan is not None:
            request.plan.cancel()
            request.plan = None

    def _wait_for_saves(self, blocks: Sequence[int]) -> None:
        """These blocks are about to be written: what still reads them has to end first."""
        for block in blocks:
            operation = self._saving.pop(block, None)
            if operation is not None and operation.number not in self._step.wait:
                self._step.wait.append(operation.number)

    def _make_room(self, pages: int) -> int:
        """Evict for what of `pages` is not free; returns how many of them are free now."""
        short = pages - self._host.free_pages
        if short > 0:
            freed = self._tree.evict_host(short).host_pages
            self._host.free(freed)
            self._counts["evicted_pages"] += len(freed)
            names = [self._named.pop(page) for page in freed.tolist() if page in self._named]
            if names:
                self._event(Event("removed", names))
        return min(pages, self._host.free_pages)

    def _loadable(self, request: _Tracked) -> npt.NDArray[np.uint32]:
        """Its tokens as far as they may be loaded: whole pages, and one token is left to compute."""
        tokens = request.tokens()
        return tokens[: max(len(tokens) - 1, 0) // self._page * self._page]

    def _space(self, request: _Tracked) -> _Space:
        extra_key, cache_salt = request.namespace
        return _Space(extra_key=extra_key, cache_salt=cache_salt)

    # Events

    def _name(self, operation: _Operation) -> None:
        if self._config.events:
            names = operation.request.names()
            first = operation.first
            operation.names = names[first : first + len(operation.pages)]
            operation.parent = names[first - 1] if first and len(names) >= first else None

    def _stored_event(self, operation: _Operation, pages: int, refused: Pages) -> None:
        if not operation.names:
            return
        gone = set(refused.tolist())
        for page, name in zip(operation.pages[:pages].tolist(), operation.names, strict=False):
            if page not in gone:
                self._named[page] = name
        start = operation.first * self._page
        tokens = operation.tokens[start : start + pages * self._page].tolist()
        self._event(
            Event("stored", operation.names[:pages], operation.parent, tokens, operation.request.lora)
        )

    def _event(self, event: Event) -> None:
        if self._config.events:
            self._events.append(event)


_COUNTS = (
    "saves",
    "saves_given_up",  # pages that found no room on host
    "saves_dropped",  # pages that were computed from a load that has failed
    "loads",
    "fetches",
    "failed_copies",
    "evicted_pages",
    "host_hit_tokens",
    "storage_hit_tokens",
    "look_ups",
    "storage_found_pages",
    "storage_read_pages",
    "storage_written_pages",
    "stores_given_up",  # pages that are not stored, since half of the host pool is on its way already
    "storage_errors",
)


def open_shared_storage(config: CacheConfig) -> Backend:
    """The storage, which all sides of vLLM see.

    Raises:
        StorageError: it can not be used, or one process alone sees it.
    """
    storage = config.storage
    assert storage is not None
    backend = storage if isinstance(storage, Backend) else open_storage(storage, config.storage_timeout)
    if not backend.shared:
        backend.close()
        raise StorageError(
            f"storage {storage} is seen by one process only, and the sides of vLLM are several: "
            "take one that they share, such as a folder's path"
        )
    return backend
