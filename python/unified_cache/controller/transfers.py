"""Device and host: what is copied between them, and what the tree hears of it.

Everything here runs on the scheduler's thread. A copy is submitted with the tree's ack; its end is taken
by `take_done`, and only then does the tree change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unified_cache._native import Ack, BackupPlan, LoadBackPlan, PrefixTree
from unified_cache.counters import Counters
from unified_cache.errors import ArgumentError, CapacityError, CopyError, LockError
from unified_cache.pools.allocator import PageAllocator, Pages, as_count

if TYPE_CHECKING:
    from unified_cache.copies.cpu import CopyHandle, CpuCopyEngine

__all__ = ["MOST_FAILURES", "Transfers"]

# As often may copies fail before whoever waits for them gives up.
MOST_FAILURES = 100


class Transfers:
    """Backups, load-backs and evictions of one tree.

    Args:
        tree: decides.
        device: free pages of the device pool.
        host: free pages of the host pool; None: there is no host tier.
        copies: moves the bytes; None without a host tier.
        counters: counts.
        backed_up: called with nodes whose host copy has become valid, ancestors first.
    """

    def __init__(
        self,
        tree: PrefixTree,
        device: PageAllocator,
        host: PageAllocator | None,
        copies: CpuCopyEngine | None,
        counters: Counters,
        backed_up: Callable[[list[int]], None],
    ) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self._copies = copies
        self._counters = counters
        self._backed_up = backed_up
        # Nodes that the write policy wants on host, in the order in which it said so.
        self._wanted: dict[int, None] = {}
        self._acks: dict[CopyHandle, Ack] = {}
        self._loads: dict[Ack, CopyHandle] = {}
        # Copies that failed while their nodes were in use: to be tried again, and how often each has failed.
        # The order of these loads is not that of their acks any more.
        self._failed: list[CopyHandle] = []
        self._failures: dict[Ack, int] = {}
        # Device pages that come free with the acks of write-backs.
        self._coming: dict[CopyHandle, int] = {}

    @property
    def idle(self) -> bool:
        """Nothing is wanted, nothing is under way."""
        return not self._wanted and not self._acks

    def load_of(self, ack: Ack | None) -> CopyHandle | None:
        """The copy that a match waits for, if its end was not taken yet."""
        return None if ack is None else self._loads.get(ack)

    def loads_under(self, node: int) -> list[CopyHandle]:
        """All copies whose end was not taken yet and that fill pages between the root and `node`."""
        found: dict[CopyHandle, None] = {}
        at: int | None = node
        while at is not None:
            info = self._tree.node_info(at)
            handle = self.load_of(info.pending)
            if handle is not None:
                found[handle] = None
            at = info.parent
        return list(found)

    @property
    def troubled(self) -> bool:
        """A load has failed and was not taken back: waiting for the youngest one is not enough."""
        return bool(self._failures) or any(handle.error is not None for handle in self._loads.values())

    # Device to host

    def want_backup(self, nodes: Sequence[int]) -> None:
        """Back these nodes up with the next submission."""
        if self._host is not None:
            self._wanted.update(dict.fromkeys(nodes))

    def start_backups(self) -> None:
        """Submit everything that is wanted as one copy; what finds no room on host is given up."""
        if not self._wanted or self._host is None:
            return
        nodes = list(self._wanted)
        self._wanted.clear()
        while nodes:
            plan = self._plan_backup(self._host, nodes)
            if plan is not None:
                self._submit_backup(plan)
                return
            # The last ones go without: their ancestors come before them.
            nodes.pop()
            self._counters.backups_given_up += 1

    def _plan_backup(self, host: PageAllocator, nodes: Sequence[int]) -> BackupPlan | None:
        """A plan that fits into the free host pages, after evicting for what is short; None if none does."""
        while True:
            plan = self._tree.plan_backup(nodes)
            short = plan.pages - host.free_pages
            if short <= 0:
                return plan
            if short > self._tree.host_tokens // self._tree.page_size:
                return None  # not even an empty host tier would do: throw nothing away for it
            freed = self._tree.evict_host(short).host_pages
            if len(freed) == 0:
                return None
            host.free(freed)
            self._counters.evicted_host_pages += len(freed)
            # Planned anew: what has just gone may be the host copy of an ancestor.

    def _submit_backup(self, plan: BackupPlan, *, victims: bool = False) -> None:
        if plan.pages == 0 or self._host is None or self._copies is None:
            return
        host_pages = self._host.alloc(plan.pages)
        ack = self._tree.begin_backup(plan.nodes, host_pages)
        handle = self._copies.submit_backup(plan.device_pages, host_pages)
        self._acks[handle] = ack
        if victims:
            self._coming[handle] = plan.pages
        self._counters.backup_copies += 1
        self._counters.backup_pages += plan.pages

    # Room on device

    def evict(self, num_pages: int) -> int:
        """Free device pages; returns how many are free at once. Those of write-backs come with their acks."""
        host_room = None
        if self._host is not None:
            # Room is made below, when it is known how much is needed: victims go whole, so that can be more.
            host_room = self._host.free_pages + self._tree.host_tokens // self._tree.page_size
        num_pages = min(as_count(num_pages, "num_pages"), self._device.num_pages)
        evicted = self._tree.evict(num_pages, host_room=host_room)
        self._device.free(evicted.device_pages)
        if self._host is not None:
            self._host.free(evicted.host_pages)
        self._counters.evicted_device_pages += len(evicted.device_pages)
        self._counters.demoted_nodes += len(evicted.demoted_nodes)
        self._counters.dropped_tokens += evicted.dropped_tokens
        freed = len(evicted.device_pages)
        if evicted.write_back_nodes:
            freed += self._write_back(evicted.write_back_nodes)
        return freed

    def _write_back(self, nodes: list[int]) -> int:
        """Back up victims as one copy, and give up those without room, coldest first."""
        assert self._host is not None
        freed = 0
        while nodes:
            plan = self._plan_backup(self._host, nodes)
            if plan is not None:
                self._submit_backup(plan, victims=True)
                break
            dropped = self._tree.drop(nodes[:1])
            nodes = nodes[1:]
            self._device.free(dropped.device_pages)
            self._host.free(dropped.host_pages)
            freed += len(dropped.device_pages)
            self._counters.backups_given_up += 1
            self._counters.evicted_device_pages += len(dropped.device_pages)
            self._counters.dropped_tokens += dropped.dropped_tokens
        return freed

    def alloc(self, num_pages: int) -> Pages:
        """Take device pages, evicting for what is short.

        Waits only for copies under way, and only if their pages are needed: those of write-back victims,
        and those of nodes that can not be evicted before their backup has ended.

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
        self.start_backups()
        self.take_done()
        limit = self._counters.failed_copies + MOST_FAILURES
        while self._short(num_pages) > self._tree.evictable_tokens // self._tree.page_size:
            if not self.take_done(wait=True):
                raise self._no_room(num_pages)
        while self._short(num_pages) > 0:
            lacking = self._short(num_pages) - sum(self._coming.values())
            if lacking > 0 and self.evict(lacking) > 0:
                continue
            # A write-back that fails is taken back, and may be the victim again.
            if self._counters.failed_copies >= limit or not self.take_done(wait=True):
                raise self._no_room(num_pages)

    def _short(self, num_pages: int) -> int:
        return num_pages - self._device.free_pages

    def _no_room(self, num_pages: int) -> CapacityError:
        free, evictable = self._device.free_pages, self._tree.evictable_tokens // self._tree.page_size
        return CapacityError(
            f"{num_pages} device pages asked for: of {self._device.num_pages} {free} are free and "
            f"{evictable} can be evicted, requests use the others"
        )

    # Host to device

    def start_load(self, plan: LoadBackPlan, device_pages: Pages) -> CopyHandle:
        """Begin the load-back of a plan into these pages."""
        if self._copies is None:
            raise ArgumentError("there is no host tier to load from")
        host_pages = plan.host_pages
        ack = self._tree.begin_load_back(plan, device_pages)
        handle = self._copies.submit_load(device_pages, host_pages)
        self._acks[handle] = ack
        self._loads[ack] = handle
        self._counters.load_copies += 1
        self._counters.load_pages += len(device_pages)
        return handle

    # Acks

    def take_done(self, *, wait: bool = False, timeout: float | None = None) -> bool:
        """Tell the tree of the copies that have ended; False if none has.

        Args:
            wait: if none has, but some are running, wait for one.
            timeout: seconds that the wait may take; None: no limit.
        """
        if self._copies is None or not self._acks:
            return False
        ended = self._copies.take_done(wait=wait, timeout=timeout)
        for handle in ended:
            self._coming.pop(handle, None)
            if handle.error is None:
                self._finish(handle)
                continue
            self._counters.failed_copies += 1
            if not self._take_back(handle):
                ack = self._acks[handle]
                self._failures[ack] = self._failures.get(ack, 0) + 1
                self._failed.append(handle)
        return bool(ended)

    def retry(self, most_failures: int | None = None) -> None:
        """Take back what has failed if nobody uses it any more, or else copy it once more.

        Args:
            most_failures: leave alone what has failed so often; None: no limit.
        """
        if not self._failed or self._copies is None:
            return
        failed, self._failed = self._failed, []
        for handle in failed:
            if self._take_back(handle):
                continue
            if most_failures is not None and self._failures[self._acks[handle]] >= most_failures:
                self._failed.append(handle)
                continue
            submit = self._copies.submit_load if handle.direction == "load" else self._copies.submit_backup
            again = submit(handle.device_pages, handle.host_pages)
            self._acks[again] = ack = self._acks.pop(handle)
            if handle.direction == "load":
                self._loads[ack] = again

    def stuck(self, most_failures: int) -> CopyError | None:
        """The error of a copy that failed so often, if nothing but such copies is left."""
        if self._wanted or not self._failed or len(self._failed) < len(self._acks):
            return None
        if any(self._failures[self._acks[handle]] < most_failures for handle in self._failed):
            return None
        handle = self._failed[0]
        return CopyError(
            f"the {handle.direction} copy of {len(handle.device_pages)} pages failed "
            f"{self._failures[self._acks[handle]]} times: {handle.error}"
        )

    def _finish(self, handle: CopyHandle) -> None:
        ack = self._acks.pop(handle)
        self._failures.pop(ack, None)
        if handle.direction == "load":
            self._tree.finish_load_back(ack)
            del self._loads[ack]
            return
        done = self._tree.finish_backup(ack)
        self._device.free(done.device_pages)
        self._counters.evicted_device_pages += len(done.device_pages)
        self._backed_up(done.nodes)

    def _take_back(self, handle: CopyHandle) -> bool:
        """Tell the tree that a copy failed; False if its nodes are in use, so that it has to be repeated."""
        assert self._host is not None
        ack = self._acks[handle]
        try:
            # If it refuses, the tree still has the pages of both tiers locked for this ack.
            if handle.direction == "load":
                self._device.free(self._tree.cancel_load_back(ack))
                del self._loads[ack]
            else:
                self._host.free(self._tree.cancel_backup(ack))
        except LockError:
            return False
        del self._acks[handle]
        self._failures.pop(ack, None)
        return True

    def cancel(self) -> None:
        """Wait for the copies that are running, and forget everything: the tree is reset next."""
        while self._copies is not None and self._copies.running:
            self._copies.take_done(wait=True)
        self._wanted.clear()
        self._acks.clear()
        self._loads.clear()
        self._failed.clear()
        self._failures.clear()
        self._coming.clear()
