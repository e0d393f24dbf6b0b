"""Device and host: what is copied between them, and what the tree hears of it.

Everything here runs on the scheduler's thread. What is to be copied waits in two queues, one a direction; a
tick submits what waits as one copy a direction. The end of a copy is taken by `take_done`, and only then
does the tree change.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from unified_cache._native import Ack, BackupPlan, HostEvicted, LoadBackPlan, PrefixTree
from unified_cache.controller.layer_done import LayerDoneCounter
from unified_cache.controller.operations import CacheOperation, OperationQueue, Part, merge
from unified_cache.counters import Counters
from unified_cache.errors import ArgumentError, CapacityError, CopyError, LockError, RankError
from unified_cache.pools.allocator import PageAllocator, Pages, as_count

if TYPE_CHECKING:
    from unified_cache.controller.recompute import LoadOrRecompute
    from unified_cache.copies.engine import CopyEngine, CopyHandle, Mark

__all__ = ["MOST_FAILURES", "CacheController"]

# As often may copies fail before whoever waits for them gives up.
MOST_FAILURES = 100
# Write submissions under way: one that runs, and one that keeps the copy stream busy after it. What comes
# meanwhile waits in the queue, and goes out together.
_MOST_WRITES = 2
# Pages on their way to host are locked on device: at most this part of the pool is, the rest is wanted later.
_BACKUP_SHARE = 0.5
# Among writes: victims of write_back first, since somebody needs their pages.
_VICTIM_PRIORITY = 1

# Host room is counted exactly up to so many times of what is to be evicted.
_COUNTED_ROOM = 4

_NO_PAGES: Pages = np.empty(0, np.uint32)
_serial = attrgetter("serial")


class CacheController:
    """Backups, load-backs and evictions of one tree.

    Args:
        tree: decides.
        device: free pages of the device pool.
        host: free pages of the host pool; None: there is no host tier.
        copies: moves the bytes; None without a host tier.
        counters: counts.
        backed_up: called with nodes whose host copy has become valid, ancestors first.
        rates: told how long loads take.
        wait_seconds: as long may `alloc` wait for the next copy under way to end.
        most_copy_pages: pages a submission; None: no limit.
        alone: there are no other ranks, so the end of a copy counts at once. Else `acknowledge` says which
            count.
    """

    def __init__(
        self,
        tree: PrefixTree,
        device: PageAllocator,
        host: PageAllocator | None,
        copies: CopyEngine | None,
        counters: Counters,
        backed_up: Callable[[list[int]], None],
        rates: LoadOrRecompute,
        *,
        wait_seconds: float,
        most_copy_pages: int | None = None,
        alone: bool = True,
    ) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self._copies = copies
        self._counters = counters
        self._backed_up = backed_up
        self._rates = rates
        self._wait_seconds = min(wait_seconds, threading.TIMEOUT_MAX)
        self._most_copy_pages = most_copy_pages
        self.layer_done = None if copies is None else LayerDoneCounter(copies.new_layer_events)
        # Nodes that the write policy wants on host, in the order in which it said so.
        self._wanted: dict[int, None] = {}
        # Those of them that something else needs there, and that wait for nothing.
        self._wanted_now: dict[int, None] = {}
        self._backup_pages = 0  # of backups under way, which keep their nodes locked on device
        self._queues = {"backup": OperationQueue(), "load": OperationQueue()}
        self._open: set[CacheOperation] = set()
        # With other ranks: in the order in which they began, which is the same on all; None: alone.
        self._order: dict[str, deque[CacheOperation]] | None = (
            None if alone else {"backup": deque(), "load": deque()}
        )
        self._begun = 0
        self._loads: dict[Ack, CacheOperation] = {}
        self._running: dict[CopyHandle, list[Part]] = {}
        self._writes_running = 0
        self._sets: dict[CopyHandle, int] = {}  # of the layer counter, by load
        # Operations that failed while their pages were in use: to be tried again.
        self._failed: list[CacheOperation] = []
        # Device pages that come free with the acks of operations.
        self._coming: dict[CacheOperation, int] = {}
        # Operations that nobody needs, and how many pages they still hold on device and host.
        self._abandoned: dict[CacheOperation, tuple[int, int]] = {}
        # What copies from before a reset still touch.
        self._quarantine: dict[CopyHandle | CacheOperation, tuple[Pages, Pages]] = {}
        self.host_evicted: Callable[[HostEvicted], None] = lambda evicted: None  # told what made room on host
        self.held_elsewhere: Callable[[], Pages] = lambda: _NO_PAGES  # host pages that storage still touches
        # Moments on the forward's stream, oldest first; those of before are over.
        self._marks: deque[tuple[int, Mark]] = deque()
        self._mark = 1  # stamped on pages that are freed now; its moment comes at the next tick
        self._mark_due = False

    @property
    def idle(self) -> bool:
        """Nothing is wanted, nothing is under way."""
        return not (self._wanted or self._wanted_now or self._open or self._quarantine)

    def tick(self, most_failures: int | None = None) -> None:
        """Take what has ended, try again what has failed, and submit what waits. Never waits itself.

        Args:
            most_failures: leave alone what has failed so often; None: no limit.
        """
        self.look(most_failures)
        if not self.idle:
            self.begin_backups()
            self.submit()

    def look(self, most_failures: int | None = None) -> None:
        """Take what has ended, and try again what has failed."""
        if self._mark_due:
            self._record_mark()
        if self.idle:
            return
        if self._failed:
            self._retry(most_failures)
        self.take_done()

    def submit(self) -> None:
        """Submit what waits, as far as so much may be under way."""
        self._submit("backup")
        self._submit("load")

    # With other ranks: whose end counts

    @property
    def under_way(self) -> tuple[int, int]:
        """Backups and loads whose end does not count yet: the same on all ranks."""
        return (0, 0) if self._order is None else (len(self._order["backup"]), len(self._order["load"]))

    @property
    def ended(self) -> tuple[int, int]:
        """How many of these, from the oldest on, have ended on this rank."""
        backups, loads = (
            sum(1 for _ in takewhile(lambda operation: operation.ended, order))
            for order in ([] if self._order is None else self._order.values())
        )
        return backups, loads

    def acknowledge(self, backups: int, loads: int) -> None:
        """So many, from the oldest on, have ended on all ranks: tell the tree."""
        if self._order is None:
            return
        for order, count in zip(self._order.values(), (backups, loads), strict=True):
            for _ in range(count):
                self._finish(order.popleft())

    def acknowledge_through(self, operation: CacheOperation, timeout: float | None = None) -> None:
        """Wait for an operation and the older ones of its direction, and tell the tree.

        Every rank does so at the same call, so nobody has to be asked.

        Raises:
            RankError: it does not end on this rank, so the others will go on without it.
        """
        assert self._order is not None
        order = self._order[operation.direction]
        while operation in self._open or operation in self._quarantine:
            self._wait_for_end(order[0], timeout)
            self._finish(order.popleft())

    def _wait_for_end(self, operation: CacheOperation, timeout: float | None) -> None:
        while not operation.ended:
            if self._failed:
                self._retry(MOST_FAILURES)
            self.submit()
            if not self.take_done(wait=True, timeout=timeout):
                raise RankError(
                    f"the {operation.direction} copy of {operation.pages} pages does not end on this rank "
                    f"({operation.failures} attempts have failed, the last: {operation.error}): "
                    "it can not go on with the others"
                )

    def await_end(self, operation: CacheOperation) -> None:
        """Wait until an operation has ended, and tell the tree."""
        if self._order is not None:
            self.acknowledge_through(operation)
        while operation in self._open and self.take_done(wait=True):
            pass

    def _finish(self, operation: CacheOperation) -> None:
        self._close(operation)
        operation.finish()

    # What loads a path waits for

    def loads_under(self, node: int) -> list[CacheOperation]:
        """The loads whose end was not taken yet and that fill pages between the root and `node`."""
        acks = self._tree.pending_acks(node)
        return [self._loads[ack] for ack in acks if ack in self._loads]

    def loaded(self, loads: Sequence[CacheOperation]) -> bool:
        """Their bytes are there (or their copy has failed); with other ranks: on all of them."""
        if self._order is None:
            return all(load.done for load in loads)
        return not any(load in self._open for load in loads)

    def wait_loads(self, loads: Sequence[CacheOperation]) -> None:
        """Wait until the bytes of these loads are there.

        Raises:
            CopyError: one has failed.
            ClosedError: the engine was closed before one began.
        """
        self.submit_loads(loads)
        while True:
            try:
                for load in loads:
                    for handle in tuple(load.parts):
                        handle.wait()
            except CopyError:
                if self._order is None or any(load.failures >= MOST_FAILURES for load in loads):
                    raise
                self.submit_loads(loads)
            else:
                return

    def submit_loads(self, loads: Sequence[CacheOperation]) -> list[int]:
        """Submit what of these loads still waits; returns the layer sets that they fill.

        Waits for earlier loads if all sets are in use.

        Raises:
            CopyError: one has failed. With other ranks, which would go on without this one: not before it was
                tried again and again.
        """
        for _ in range(MOST_FAILURES if self._order is not None else 0):
            try:
                return self._submit_loads(loads)
            except CopyError:
                self.take_done(wait=bool(self._running))
        return self._submit_loads(loads)

    def _submit_loads(self, loads: Sequence[CacheOperation]) -> list[int]:
        for load in loads:
            if load in self._failed:
                # Whoever comes later need not hear of it: it is copied again anyway.
                self._failed.remove(load)
                self._restart(load)
            while load.waiting and (self._submit("load") or self.take_done(wait=True)):
                pass
        sets: set[int] = set()
        for load in loads:
            # What has ended needs no set any more, and another load may fill the one it had. Looked at
            # first: of what has ended by then, the failure is known.
            under_way = [part for part in load.parts if not part.done]
            if load.failed is not None or load.waiting:
                raise CopyError(
                    f"the load copy of {load.pages} pages failed: {load.failed or 'it can not begin'}"
                )
            sets.update(self._sets[part] for part in under_way if part in self._sets)
        return sorted(sets)

    # Device to host

    def want_backup(self, nodes: Sequence[int], *, now: bool = False) -> None:
        """Back these nodes up with the next submission that has room for them.

        Args:
            nodes: ancestors first.
            now: with the next one, however many pages are on their way already.
        """
        if self._host is not None:
            (self._wanted_now if now else self._wanted).update(dict.fromkeys(nodes))

    def begin_backups(self) -> None:
        """Begin what is wanted; what finds no room on host is given up."""
        if self._host is None or not (self._wanted or self._wanted_now):
            return
        first = self._first_wanted()
        for node in first:
            del self._wanted[node]
        nodes = [*self._wanted_now, *first]
        self._wanted_now.clear()
        while nodes:
            plan = self._plan_backup(self._host, nodes)
            if plan is not None:
                self._begin_backup(plan)
                return
            # The last ones go without: their ancestors come before them.
            room = self._host_room(self._tree.plan_backup(nodes).pages)
            fitting = bisect.bisect_right(
                range(len(nodes)), room, key=lambda count: self._tree.plan_backup(nodes[:count]).pages
            )
            self._counters.backups_given_up += len(nodes) - (fitting - 1)
            nodes = nodes[: fitting - 1]

    def _first_wanted(self) -> list[int]:
        """The first wanted nodes, as many as may be under way now.

        Their number is found by doubling, so that a tick costs what it begins, however much waits.
        """
        budget = max(int(self._device.num_pages * _BACKUP_SHARE), 1) - self._backup_pages
        if budget <= 0:
            return []
        taken: list[int] = []
        count = 1
        while len(taken) < len(self._wanted):
            more = list(islice(self._wanted, count))
            if self._tree.plan_backup(more).pages > budget:
                # A path that is larger than all that may be under way goes alone.
                return taken or (more if self._backup_pages == 0 else [])
            taken, count = more, 2 * count
        return taken

    def _host_room(self, most: int) -> int:
        """Host pages that are free or could be, counted up to `most`."""
        assert self._host is not None
        free = self._host.free_pages
        return free + self._tree.evictable_host_pages(max(most - free, 0))

    def _plan_backup(self, host: PageAllocator, nodes: Sequence[int]) -> BackupPlan | None:
        """A plan that fits into the free host pages, after evicting for what is short; None if none does."""
        while True:
            plan = self._tree.plan_backup(nodes)
            if plan.pages <= host.free_pages:
                return plan
            if self.make_host_room(plan.pages) == 0:
                return None
            # Planned anew: what has just gone may be the host copy of an ancestor.

    def make_host_room(self, pages: int) -> int:
        """Evict host pages for what of `pages` is not free; returns how many were freed.

        If there can not be enough, nothing is thrown away.
        """
        assert self._host is not None
        short = pages - self._host.free_pages
        if short <= 0 or self._tree.evictable_host_pages(short) < short:
            return 0
        evicted = self._tree.evict_host(short)
        self._host.free(evicted.host_pages)
        self._counters.evicted_host_pages += len(evicted.host_pages)
        self.host_evicted(evicted)
        return len(evicted.host_pages)

    def alloc_host(self, pages: int) -> Pages:
        """Take host pages, evicting for what is short.

        Raises:
            ArgumentError: there is no host tier.
            CapacityError: there is no room.
        """
        if self._host is None:
            raise ArgumentError("there is no host tier: write_policy is None")
        self.make_host_room(pages)
        return self._host.alloc(pages)

    def free_host(self, pages: Pages) -> None:
        """Free host pages that `alloc_host` gave."""
        if self._host is not None:
            self._host.free(pages)

    def _begin_backup(self, plan: BackupPlan, *, victims: bool = False) -> None:
        if plan.pages == 0 or self._host is None:
            return
        host_pages = self._host.alloc(plan.pages)
        ack = self._tree.begin_backup(plan.nodes, host_pages)
        operation = CacheOperation(
            "backup",
            plan.device_pages,
            host_pages,
            partial(self._finish_backup, ack, plan.pages),
            partial(self._cancel_backup, ack, plan.pages),
            priority=_VICTIM_PRIORITY if victims else 0,
        )
        self._backup_pages += plan.pages
        self.start(operation, coming=plan.pages if victims else 0)

    def _finish_backup(self, ack: Ack, pages: int) -> None:
        done = self._tree.finish_backup(ack)
        self._backup_pages -= pages
        self.free_device(done.device_pages)
        self._counters.evicted_device_pages += len(done.device_pages)
        self._backed_up(done.nodes)

    def _cancel_backup(self, ack: Ack, pages: int) -> bool:
        assert self._host is not None
        try:
            # If it refuses, the tree still has the pages of both tiers locked for this ack.
            freed = self._tree.cancel_backup(ack)
        except LockError:
            return False
        self._backup_pages -= pages
        # Copies of nodes below went too: those that are still to be written are free when that has ended.
        for operation in self._open:
            if operation.direction == "backup":
                orphans = np.intersect1d(operation.host_pages, freed)
                if orphans.size:
                    operation.orphans.append(orphans)
                    freed = np.setdiff1d(freed, orphans)
        self._host.free(freed)
        return True

    # Room on device

    def free_device(self, pages: Pages) -> None:
        """Free device pages. A load into them waits for what the forward has begun until now.

        Raises:
            ArgumentError: a page that is not in use, or is listed twice; nothing has changed then.
        """
        self._device.free(pages, self._mark)
        self._mark_due = True

    def evict(self, num_pages: int) -> int:
        """Free device pages; returns how many are free at once. Those of write-backs come with their acks."""
        num_pages = min(as_count(num_pages, "num_pages"), self._device.num_pages)
        if self._host is None:
            return self._evict(num_pages, None)[0]
        # Room is made below, when it is known how much is needed: victims go whole, so that can be more.
        # Counting further than this would cost more than the eviction; the tree takes what is past it on
        # trust.
        counted = _COUNTED_ROOM * (num_pages + 64)
        room = self._host_room(counted)
        if room >= counted:
            room = self._host.free_pages + self._tree.host_tokens // self._tree.page_size
        freed, writing, given_up = self._evict(num_pages, room)
        if given_up and freed + writing < num_pages:
            # There was less room, and a victim that may not be dropped has taken the place of one that may.
            freed += self._evict(num_pages - freed - writing, self._host.free_pages)[0]
        return freed

    def _evict(self, num_pages: int, host_room: int | None) -> tuple[int, int, int]:
        """Pages that are free now, pages being written back, and victims that found no room on host."""
        evicted = self._tree.evict(num_pages, host_room=host_room)
        self.free_device(evicted.device_pages)
        if self._host is not None:
            self._host.free(evicted.host_pages)
        self._counters.evicted_device_pages += len(evicted.device_pages)
        self._counters.demoted_nodes += len(evicted.demoted_nodes)
        self._counters.dropped_tokens += evicted.dropped_tokens
        freed = len(evicted.device_pages)
        if not evicted.write_back_nodes:
            return freed, 0, 0
        dropped, writing, given_up = self._write_back(evicted.write_back_nodes)
        return freed + dropped, writing, given_up

    def _write_back(self, nodes: list[int]) -> tuple[int, int, int]:
        """Back up victims as one copy, and give up those without room, coldest first.

        Returns pages freed, pages being written, and how many were given up.
        """
        assert self._host is not None
        freed = first = 0
        while first < len(nodes):
            plan = self._plan_backup(self._host, nodes[first:])
            if plan is not None:
                self._begin_backup(plan, victims=True)
                return freed, plan.pages, first
            # Planned anew only when enough may have gone: with each it would cost their number squared.
            pages = self._tree.plan_backup(nodes[first:]).pages
            excess = pages - self._host_room(pages)
            while excess > 0 and first < len(nodes):
                excess -= self._tree.plan_backup(nodes[first : first + 1]).pages
                dropped = self._tree.drop(nodes[first : first + 1])
                first += 1
                self.free_device(dropped.device_pages)
                self._host.free(dropped.host_pages)
                excess -= len(dropped.host_pages)
                freed += len(dropped.device_pages)
                self._counters.backups_given_up += 1
                self._counters.evicted_device_pages += len(dropped.device_pages)
                self._counters.dropped_tokens += dropped.dropped_tokens
        return freed, 0, first

    def alloc(self, num_pages: int) -> Pages:
        """Take device pages, evicting for what is short.

        Waits only for copies under way, only if there is not enough without them, since the end of each may
        let pages go (those of write-back victims, those of nodes that it keeps on device), and no longer than
        `wait_seconds` for each.

        Raises:
            ArgumentError: not an integer, or a negative one.
            CapacityError: there is no room; nothing is lost.
        """
        num_pages = as_count(num_pages, "num_pages")
        if num_pages > self._device.free_pages:
            self._make_room(num_pages)
        return self._device.alloc(num_pages)

    def _make_room(self, num_pages: int) -> None:
        # Wanted backups first: an eviction now would delete what is about to be safe on host.
        self.begin_backups()
        if self._order is None:
            self.take_done()
        limit = self._counters.failed_copies + MOST_FAILURES
        while self._short(num_pages) > self._evictable_pages:
            if not self._wait_for_room(limit):
                raise self._no_room(num_pages)
        while self._short(num_pages) > 0:
            lacking = self._short(num_pages) - self._coming_pages
            if lacking > 0 and self.evict(lacking) > 0:
                continue
            if self._wait_for_room(limit):
                continue
            # What was to come does not, be it that its copy hangs or that it has failed: others go for it.
            if lacking > 0 or (self.evict(self._short(num_pages)) == 0 and not self._wait_for_room(limit)):
                raise self._no_room(num_pages)

    def _wait_for_room(self, most_failed: int) -> bool:
        """Wait until a copy has ended; False if none did in time, or if so many have failed by now."""
        if self._order is not None:
            oldest = min((order[0] for order in self._order.values() if order), key=_serial, default=None)
            if oldest is not None:
                self.acknowledge_through(oldest, self._wait_seconds)
            return oldest is not None
        # A write-back that fails is taken back, and may be the victim again.
        if self._counters.failed_copies >= most_failed:
            return False
        self.submit()
        return self.take_done(wait=True, timeout=self._wait_seconds)

    def _short(self, num_pages: int) -> int:
        return num_pages - self._device.free_pages

    @property
    def _evictable_pages(self) -> int:
        return self._tree.evictable_tokens // self._tree.page_size

    @property
    def _coming_pages(self) -> int:
        return sum(self._coming.values()) + sum(len(device) for device, _ in self._quarantine.values())

    def _no_room(self, num_pages: int) -> CapacityError:
        free, evictable = self._device.free_pages, self._evictable_pages
        return CapacityError(
            f"{num_pages} device pages asked for: of {self._device.num_pages} {free} are free and "
            f"{evictable} can be evicted, requests use the others"
        )

    # Host to device

    def start_load(self, plan: LoadBackPlan, device_pages: Pages, *, priority: int = 0) -> CacheOperation:
        """Begin the load-back of a plan into these pages."""
        if self._copies is None:
            raise ArgumentError("there is no host tier to load from")
        host_pages = plan.host_pages
        ack = self._tree.begin_load_back(plan, device_pages)
        operation = CacheOperation(
            "load",
            device_pages,
            host_pages,
            partial(self._finish_load, ack),
            partial(self._cancel_load, ack),
            priority=priority,
        )
        self._loads[ack] = operation
        self.start(operation)
        return operation

    def _finish_load(self, ack: Ack) -> None:
        self._tree.finish_load_back(ack)
        del self._loads[ack]

    def _cancel_load(self, ack: Ack) -> bool:
        try:
            freed = self._tree.cancel_load_back(ack)
        except LockError:
            return False
        self.free_device(freed)
        del self._loads[ack]
        return True

    # Operations

    def start(self, operation: CacheOperation, *, coming: int = 0) -> None:
        """Queue an operation for the next submission of its direction.

        Args:
            operation: what to copy.
            coming: device pages that are free once it has ended.
        """
        self._open.add(operation)
        if self._order is not None:
            self._begun += 1
            operation.serial = self._begun
            self._order[operation.direction].append(operation)
        if coming:
            self._coming[operation] = coming
        self._queues[operation.direction].push(operation)

    def abandon(
        self, operation: CacheOperation, *, device_pages: Pages = _NO_PAGES, host_pages: Pages = _NO_PAGES
    ) -> None:
        """Nobody needs an operation any more: these pages of it are freed once no copy touches them."""
        self._abandoned[operation] = (len(device_pages), len(host_pages))

        def release() -> bool:
            del self._abandoned[operation]
            self.free_device(device_pages)
            self.free_host(host_pages)
            return True

        operation.finish = operation.give_up = release
        if operation not in self._open:
            release()
            return
        self._coming.pop(operation, None)
        if len(device_pages):
            self._coming[operation] = len(device_pages)
        if not self._stop(operation):
            return
        if self._order is None:
            self._close(operation)
            release()

    def _stop(self, operation: CacheOperation) -> bool:
        """Copy no more of it, nobody needs it; True if no copy carries a part of it now."""
        operation.unneeded = True
        queued = self._queues[operation.direction].remove(operation)
        if operation in self._failed:
            self._failed.remove(operation)
            operation.ended = True
        elif queued and operation.stop_here():
            operation.ended = True
        return operation.ended

    @property
    def abandoned_pages(self) -> tuple[int, int]:
        """Device and host pages that are free as soon as the copies that touch them have ended."""
        sizes = self._abandoned.values()
        orphans = sum(len(pages) for operation in self._open for pages in operation.orphans)
        return sum(device for device, _ in sizes), sum(host for _, host in sizes) + orphans

    def _close(self, operation: CacheOperation) -> None:
        self._open.discard(operation)
        self._coming.pop(operation, None)
        for pages in operation.orphans:
            self.free_host(pages)

    def _submit(self, direction: str) -> bool:
        """Submit what waits, as one copy; False if there is nothing, or no more may be under way."""
        queue = self._queues[direction]
        if not queue or self._copies is None or self.layer_done is None:
            return False
        if direction == "load":
            if not self.layer_done.ready:
                return False
        elif self._writes_running >= _MOST_WRITES:
            return False
        parts = queue.take(self._most_copy_pages)
        try:
            submit = self._submit_load if direction == "load" else self._submit_backup
            handle = submit(self._copies, self.layer_done, *merge(parts))
        except BaseException as error:  # what was not submitted must not be lost: it has failed like any copy
            self._counters.failed_copies += 1
            known = error if isinstance(error, Exception) else CopyError(f"interrupted by {error!r}")
            for part in parts:
                self._arrived(part, known)
            if known is not error:
                raise
            return True
        self._running[handle] = parts
        for part in parts:
            part.operation.parts.append(handle)
        return True

    def _submit_load(
        self, copies: CopyEngine, layer_done: LayerDoneCounter, device_pages: Pages, host_pages: Pages
    ) -> CopyHandle:
        after = self._mark_of(device_pages)
        producer = layer_done.update_producer()
        layers = layer_done.events(producer)
        try:
            handle = copies.submit_load(device_pages, host_pages, after=after, layers=layers)
        except BaseException as error:
            layers.fail(error if isinstance(error, Exception) else CopyError(f"interrupted by {error!r}"))
            raise
        self._sets[handle] = producer
        self._counters.load_copies += 1
        self._counters.load_pages += len(device_pages)
        return handle

    def _submit_backup(
        self, copies: CopyEngine, layer_done: LayerDoneCounter, device_pages: Pages, host_pages: Pages
    ) -> CopyHandle:
        # What was computed last may still be on its way: the copy comes after everything begun so far.
        self._record_mark()
        after = self._marks[-1][1] if self._marks else None
        handle = copies.submit_backup(device_pages, host_pages, after=after)
        self._writes_running += 1
        self._counters.backup_copies += 1
        self._counters.backup_pages += len(device_pages)
        return handle

    def take_done(self, *, wait: bool = False, timeout: float | None = None) -> bool:
        """Tell the tree of the copies that have ended; False if none has.

        Args:
            wait: if none has, but some are running, wait for one.
            timeout: seconds that the wait may take; None: no limit.
        """
        waited_for = self._running if self._order is not None else (self._running or self._quarantine)
        if self._copies is None or not waited_for:
            return False
        ended = self._copies.take_done(wait=wait, timeout=timeout)
        for handle in ended:
            if handle in self._quarantine:
                self._release(handle)
                continue
            parts = self._running.pop(handle)
            self._sets.pop(handle, None)
            if handle.direction == "backup":
                self._writes_running -= 1
            elif handle.error is None:
                self._rates.loaded(len(handle.device_pages), handle.seconds)
            if handle.error is not None:
                self._counters.failed_copies += 1
            for part in parts:
                self._arrived(part, handle.error)
        return bool(ended)

    def _arrived(self, part: Part, error: Exception | None) -> None:
        operation = part.operation
        if error is not None:
            self._queues[operation.direction].remove(operation)
        if not operation.arrive(part, error):
            return
        if self._order is not None:
            # It counts when it has ended on all ranks. So what fails is copied again until it has arrived:
            # nothing is given up on one rank alone.
            operation.ended = operation.error is None or operation.unneeded
            if not operation.ended:
                operation.failures += 1
                self._failed.append(operation)
            return
        if operation.error is None:
            self._finish(operation)
            return
        operation.failures += 1
        if operation.give_up():
            self._close(operation)
        else:
            self._failed.append(operation)

    def _retry(self, most_failures: int | None) -> None:
        """Take back what has failed if nobody uses it any more, or else copy it once more."""
        failed, self._failed = self._failed, []
        for operation in failed:
            if self._order is None and operation.give_up():
                self._close(operation)
            elif most_failures is not None and operation.failures >= most_failures:
                self._failed.append(operation)
            else:
                self._restart(operation)

    def _restart(self, operation: CacheOperation) -> None:
        operation.restart()
        self._queues[operation.direction].push(operation)

    def stuck(self, most_failures: int) -> CopyError | None:
        """The error of a copy that failed so often, if nothing but such copies is left."""
        # What is still wanted after a tick waits for the share of the device that these hold.
        if self._quarantine or not self._failed or len(self._failed) < len(self._open):
            return None
        if any(operation.failures < most_failures for operation in self._failed):
            return None
        first = self._failed[0]
        return CopyError(
            f"the {first.direction} copy of {first.pages} pages failed {first.failures} times: {first.error}"
        )

    # Marks

    def _record_mark(self) -> None:
        """Record the moment until which the forward may still read what was freed before."""
        self._mark_due = False
        while self._marks and self._marks[0][1].done:
            self._marks.popleft()
        mark = None if self._copies is None else self._copies.record_forward()
        if mark is not None:
            self._marks.append((self._mark, mark))
        self._mark += 1

    def _mark_of(self, device_pages: Pages) -> Mark | None:
        """The moment after which nothing reads what was in these pages before."""
        newest = self._device.newest_mark(device_pages)
        if newest == self._mark:
            self._record_mark()
        # Not a younger one, if that one is over: a forward that was launched since may run for long.
        return next((mark for serial, mark in self._marks if serial == newest), None)

    # The end

    def cancel(self) -> None:
        """Forget everything: the tree and the pools are reset next. What copies touch is in quarantine."""
        if self._order is None:
            for handle in self._running:
                self._quarantine[handle] = self._touched(handle)
            self._running.clear()
            self._sets.clear()
            self._writes_running = 0
        else:
            # What still runs is not the same on all ranks: whatever does not count as ended.
            for operation in self._open:
                self._quarantine[operation] = self._touched(operation)
                operation.finish = partial(self._release, operation)
                self._stop(operation)
        self._wanted.clear()
        self._wanted_now.clear()
        self._backup_pages = 0
        for queue in self._queues.values():
            queue.clear()
        self._open.clear()
        self._loads.clear()
        self._failed.clear()
        self._coming.clear()
        self._abandoned.clear()
        if self.layer_done is not None:
            self.layer_done.reset()

    def _touched(self, copy: CopyHandle | CacheOperation) -> tuple[Pages, Pages]:
        # A copy that nobody waits for may read device pages that are free already.
        return copy.device_pages[self._device.used(copy.device_pages)], copy.host_pages

    def reset_device(self, keep: Pages) -> None:
        """All device pages but `keep` are free: whoever had them, a forward may still read them."""
        self._device.reset(keep, self._mark)
        self._mark_due = True

    def quarantined(self) -> tuple[Pages, Pages]:
        """Device and host pages that copies from before a reset still touch, each once."""
        device = [_NO_PAGES, *(pages for pages, _ in self._quarantine.values())]
        host = [_NO_PAGES, *(pages for _, pages in self._quarantine.values())]
        return np.unique(np.concatenate(device)), np.unique(np.concatenate(host))

    def _release(self, copy: CopyHandle | CacheOperation) -> None:
        assert self._host is not None
        device, host = self._quarantine.pop(copy)
        still_device, still_host = self.quarantined()
        self.free_device(np.setdiff1d(device, still_device))
        self._host.free(np.setdiff1d(host, np.concatenate((still_host, self.held_elsewhere()))))
