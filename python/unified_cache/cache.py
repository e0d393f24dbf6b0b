"""The cache: what an engine holds."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from unified_cache._native import page_hashes
from unified_cache.config import CacheConfig
from unified_cache.controller.cache_controller import MOST_FAILURES, CacheController
from unified_cache.controller.layer_done import LayerWait
from unified_cache.controller.recompute import LoadOrRecompute
from unified_cache.controller.storage import Prefetch, StorageLink
from unified_cache.controller.storage_operations import StorageOperations
from unified_cache.counters import Counters
from unified_cache.errors import (
    ArgumentError,
    BusyError,
    CapacityError,
    ClosedError,
    LockError,
    PoisonedError,
    RankError,
    StorageError,
)
from unified_cache.pools.allocator import PageAllocator, Pages, as_count
from unified_cache.pools.group import device_pools
from unified_cache.rank_ticks import Parts, RankTicks
from unified_cache.ranks.group import Ranks
from unified_cache.ranks.outcomes import SLOTS
from unified_cache.request import Request, as_priority, as_tokens
from unified_cache.storage.contract import Backend
from unified_cache.storage.guard import StorageCounts
from unified_cache.storage.keys import KeySpace
from unified_cache.storage.lending import lender
from unified_cache.storage.shares import key_space, pool_shares
from unified_cache.storage.urls import open_storage

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    from unified_cache._native import (
        Cleared,
        HostEvicted,
        Inserted,
        LockReceipt,
        Match,
        Pin,
        Removed,
        Stored,
        _Integers,
    )
    from unified_cache.copies.engine import CopyEngine
    from unified_cache.pools.device import DevicePool
    from unified_cache.pools.host import HostPool

__all__ = ["PinnedPrefix", "UnifiedCache"]

# How long one look at the I/O threads' results may take while something else could end the wait.
_POLL_SECONDS = 0.02

# What each rank may set for itself. Of the sizes of the host pools the smallest counts.
_OWN_SETTINGS = frozenset(
    ("storage", "hicache_ratio", "hicache_size", "host_numa_node", "copy_threads", "copy_blocks")
)


def _as_seconds(seconds: Any, name: str) -> float:
    """A time that every wait takes, however long.

    Raises:
        ArgumentError: not a number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise ArgumentError(f"{name} must be a number of seconds, not {seconds!r}")
    return threading.TIMEOUT_MAX if seconds > threading.TIMEOUT_MAX else float(seconds)


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that keeps one copy, on device or on host, until `UnifiedCache.unpin` or its time is over.

    Attributes:
        tokens: how many tokens are kept: those of the prefix that the cache had.
        expires_at: by the cache's clock; None: never. With other ranks as if the last tick were now: the
            seconds begin at the next one, so it is no earlier.
    """

    pin: Pin
    tokens: int
    expires_at: float | None


class UnifiedCache:
    """KV pages on device, on host and in storage, as one cache.

    All calls belong on one thread, the engine's scheduler, but `wait_layer`, which the forward calls. The
    scheduler's loop calls `tick` once a pass: that is where copies and storage that have ended become
    visible.

    Args:
        config: the settings.
        device_pool: the device's pages; from now on they are the cache's to hand out. Several pools, such as
            those of a model and of its draft model, hold a page together: page p is page p of each.
        clock: seconds, for time limits and for what computing takes; with storage, threads call it too.
        copies: makes the copy engine for a device pool and a host pool; None: the one that fits the device.
        ranks: that serve together. All ranks of a group make the same calls in the same order; a tick is a
            reduction among them, and the only one. None: this process alone.

    Attributes:
        config: the settings.
        tree: what is cached where. Look at it, and leave changing it to the cache.
        device_pools: all of them.
        host_pools: one for each device pool; none without a host tier.

    Raises:
        ArgumentError: settings that do not go together or do not fit the machine.
        CapacityError: host memory can not be registered, and `host_pinned` requires it.
        StorageError: the storage can not be used.
        RankError: another rank could not make its cache, or has other settings.
    """

    def __init__(
        self,
        config: CacheConfig,
        device_pool: DevicePool | Sequence[DevicePool],
        *,
        clock: Callable[[], float] = time.monotonic,
        copies: Callable[[DevicePool, HostPool], CopyEngine] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.device_pools = device_pools(device_pool)
        if config.page_size != self.device_pool.page_size:
            raise ArgumentError(
                f"page_size must be that of the device pool, {self.device_pool.page_size}, "
                f"not {config.page_size}"
            )
        self.config = config
        self.page_size = config.page_size
        self.host_pools: tuple[HostPool, ...] = ()
        self._clock = clock
        self._closed = False
        self._epoch = 0
        self._active: set[Request] = set()
        self._counters = Counters()
        self._rates = LoadOrRecompute(config.page_size, config.load_back_threshold, config.prefetch_threshold)
        self._expiries: list[tuple[float, int, Pin]] = []
        self._timed_pins = 0
        # With other ranks: pins since the last tick, whose seconds begin at the next one.
        self._new_pins: list[tuple[Pin, float]] = []
        self._ranks = Ranks() if ranks is None else ranks
        alone = self._ranks.agreement.alone
        self._together = None if alone else RankTicks(self._ranks.agreement, clock)
        self._operations = StorageOperations(None if alone else SLOTS, decides=self._ranks.agreement.decides)
        if not alone:
            self._rates.agreed = self._rates.measured  # nothing was measured yet: the same on all
        self._host_pages: PageAllocator | None = None
        self._copies: CopyEngine | None = None
        self._storage: StorageLink | None = None
        self._storage_counts = StorageCounts()
        # Links that were detached, and whose threads are still inside a call.
        self._detached: list[StorageLink] = []
        self._build(copies)
        self._controller = CacheController(
            self.tree,
            self._device_pages,
            self._host_pages,
            self._copies,
            self._counters,
            self._backed_up,
            self._rates,
            wait_seconds=config.alloc_wait,
            most_copy_pages=config.copy_pages,
            alone=alone,
        )
        self._controller.held_elsewhere = self._held_by_storage
        self._controller.host_evicted = self._host_evicted
        self._parts = Parts(
            self.tree,
            self._device_pages,
            self._host_pages,
            self._controller,
            self._operations,
            self._rates,
        )

    def _build(self, copies: Callable[[DevicePool, HostPool], CopyEngine] | None) -> None:
        """Make the tree, the pools and the storage, as large on all ranks."""
        config, together, backend = self.config, self._together, None
        pages = [self.device_pool.num_pages, 0]
        try:
            # What this rank has of each page, as storage has it.
            self._shares = pool_shares(config, self._ranks.layout, self.device_pools)
            if config.write_policy is not None:
                # Here, not at the top: a cache without a host tier needs neither it nor what it needs.
                from unified_cache.pools.host import host_pages_for

                pages[1] = host_pages_for(self.device_pools, config.hicache_ratio, config.hicache_size)
                # Opened before anything is allocated or started, since this is what can go wrong.
                backend = None if config.storage is None else self._open(config.storage)
            if together is not None:
                pages = together.agree_on_sizes(pages, self._settings())
            self._device_pages = PageAllocator(pages[0], "device")
            self.tree = config.make_tree(*pages)
            if config.write_policy is not None:
                self._add_host(pages[1], backend, copies)
            if together is not None:
                together.all_built()
        except BaseException as error:
            # In the order of `close`: nothing that was begun is left behind.
            for part in (self._copies, self._storage or backend, *self.host_pools):
                if part is not None:
                    part.close()
            if together is not None and not isinstance(error, RankError):
                together.refuse()
            raise

    def _settings(self) -> str:
        """What has to be the same on all ranks."""
        config, layout = self.config, self._ranks.layout
        same = {
            field.name: getattr(config, field.name)
            for field in fields(config)
            if field.name not in _OWN_SETTINGS
        }
        same["storage"] = config.storage is not None
        same["pools"] = [(pool.kind, str(pool.dtype), pool.page_size) for pool in self.device_pools]
        same["ranks"] = (layout.tp_size, layout.dp_size, layout.cp_size, layout.pp_size)
        return str(same)

    def _add_host(
        self,
        pages: int,
        backend: Backend | None,
        copies: Callable[[DevicePool, HostPool], CopyEngine] | None,
    ) -> None:
        from unified_cache.copies.choose import copy_engine_between, make_copy_engine
        from unified_cache.pools.host import HostPool
        from unified_cache.pools.host_memory import HostMemory

        config = self.config
        memory = HostMemory(
            pinned=config.host_pinned,
            host_register_chunk=config.host_register_chunk,
            huge_pages=config.host_huge_pages,
            numa_node=config.host_numa_node,
        )
        lend = lender(backend)
        for device in self.device_pools:
            self.host_pools += (HostPool(device, pages, layout=config.host_layout, memory=memory, lend=lend),)
        self._host_pages = PageAllocator(pages, "host")
        self._copies = copy_engine_between(
            self.device_pools,
            self.host_pools,
            copies or partial(make_copy_engine, blocks=config.copy_blocks, threads=config.copy_threads),
        )
        if backend is not None:
            self._storage = self._link(backend)

    def _open(self, storage: str | os.PathLike[str] | Backend) -> Backend:
        return storage if isinstance(storage, Backend) else open_storage(storage, self.config.storage_timeout)

    def _link(self, backend: Backend) -> StorageLink:
        assert self._host_pages is not None
        link = StorageLink(
            self.tree,
            self.host_pools,
            self._host_pages,
            backend,
            self._keys(),
            self.config,
            self._clock,
            self._now,
            self._counters,
            self._storage_counts,
            self._rates,
            self._operations,
        )
        link.held_elsewhere = lambda: self._held_besides(link)
        return link

    def _keys(self) -> KeySpace:
        return key_space(self.config, self._ranks.layout, self.device_pools, self._shares)

    def _now(self) -> float:
        """Seconds, the same on all ranks: between two ticks it stands still where there are others."""
        return self._clock() if self._together is None else self._together.now

    def _links(self) -> list[StorageLink]:
        return self._detached if self._storage is None else [self._storage, *self._detached]

    def _held_by_storage(self) -> Pages:
        """Host pages that storage threads still touch, from before a reset."""
        none = np.empty(0, np.uint32)
        return np.concatenate([none, *(link.quarantined() for link in self._links())])

    def _held_besides(self, one: StorageLink) -> Pages:
        """The same of copies, and of other links than one."""
        others = [link.quarantined() for link in self._links() if link is not one]
        return np.concatenate([self._controller.quarantined()[1], *others])

    # Requests

    def begin(
        self,
        tokens: _Integers,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        resumed: bool = False,
    ) -> Request:
        """Begin a request: look its prompt up, hold what is there, ask storage for the rest.

        Args:
            tokens: the prompt.
            extra_key: first half of the namespace.
            cache_salt: second half of the namespace.
            priority: for the eviction policy "priority", and for the order of loads.
            resumed: the request was preempted and comes back: what it computed itself before is no hit, so
                its tokens are not counted again.

        Raises:
            ArgumentError: a token or a priority out of range, a namespace that is no string.
            ClosedError: the cache was closed.
        """
        self._check_open()
        request = Request(self, as_tokens(tokens), extra_key, cache_salt, priority, counted=not resumed)
        self._active.add(request)
        if not resumed:
            self._counters.requests += 1
        return request

    def begin_forward(self, requests: Iterable[Request]) -> LayerWait:
        """A forward of these requests is launched next; returns what it waits for, layer by layer.

        In place of `Request.wait`: each layer of the forward calls `LayerWait.wait_until` first, and waits
        for what it reads and no more.

        Raises:
            CopyError: what one of them needs has failed to arrive. It is copied again, so this may be called
                again.
            LockError: one of them has ended, is from before a reset, or was retracted.
        """
        self._check_open()
        requests = list(requests)
        for request in requests:
            request._check()
            request._check_on_device("begin_forward")
        sets = self._controller.submit_loads([load for request in requests for load in request._loads])
        for request in requests:
            request._rely_on_loads()
        layer_done = self._controller.layer_done
        return LayerWait() if layer_done is None else layer_done.consumer(sets)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long computing so many tokens of prompts took, for thresholds that are "auto".

        Without it the cache takes the time from a request's `extend` to its `insert`, which is too much where
        an engine computes several requests in turns.

        Raises:
            ArgumentError: not an integer >= 0, or not a number of seconds that can be.
        """
        tokens = as_count(tokens, "tokens")
        if not 0 <= _as_seconds(seconds, "seconds") < threading.TIMEOUT_MAX:
            # One of these would be remembered for good: the fit fades, but not from infinity.
            raise ArgumentError(f"seconds must be in 0..{threading.TIMEOUT_MAX:.0f}, not {seconds!r}")
        self._rates.reported = True
        self._rates.prefilled(tokens, seconds)

    # Single steps, for engines that keep their own requests

    def match_prefix(
        self, tokens: _Integers, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> Match:
        """`PrefixTree.match_prefix`. Lock what you go on to use."""
        self._check_open()
        return self.tree.match_prefix(tokens, extra_key=extra_key, cache_salt=cache_salt)

    def match_stored(
        self, tokens: _Integers, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> int:
        """How many tokens of a prompt, from the first on, storage holds, as far as is known here.

        Whole pages. No storage is asked, so it is a hint: of what other processes have stored since this one
        has read the storage's log it knows nothing, and of what was evicted it hears when it asks.

        Raises:
            ArgumentError: a token out of range, a namespace that is no string.
        """
        self._check_open()
        if self._storage is None:
            return 0
        hashes = page_hashes(as_tokens(tokens), self.page_size, extra_key=extra_key, cache_salt=cache_salt)
        return self._storage.stored.known(hashes) * self.page_size

    def warm(self, timeout: float | None = None) -> bool:
        """Tick until it is known what storage holds, and what `CacheConfig.storage_warm` allows is on host.

        Nobody has to wait for it: requests are served meanwhile, and come first.

        Args:
            timeout: seconds of real time; None: no limit.

        Returns:
            False if there was not enough time. With other ranks it is one tick, and what is known by then.

        Raises:
            ArgumentError: a timeout that is not a number.
        """
        self._check_open()
        end = None if timeout is None else time.monotonic() + _as_seconds(timeout, "timeout")
        self.tick()
        while self._storage is not None and self._storage.warming:
            left = None if end is None else end - time.monotonic()
            # Others tick as often as this one, so what only this one knows must not make it tick.
            if self._together is not None or (left is not None and left <= 0):
                return False
            pause = _POLL_SECONDS if left is None else min(left, _POLL_SECONDS)
            if self._storage.busy:
                self._storage.wait(pause)
            else:
                time.sleep(pause)  # it is down, and is tried again
            self.tick()
        return True

    def lock(self, node: int) -> LockReceipt:
        """Keep the path to `node` on device until `unlock`.

        Raises:
            UnknownNodeError: `node` is no node.
        """
        self._check_open()
        return self.tree.inc_lock_ref(node)

    def unlock(self, lock: LockReceipt) -> None:
        """Give a lock back.

        Raises:
            LockError: it was given back before, or is not of this cache, or from before a reset.
        """
        self._check_open()
        self.tree.dec_lock_ref(lock)

    def load_back(self, node: int, quota: int | None = None, *, priority: int = 0) -> int:
        """Bring the part of the path to `node` that is on host only to device; returns its tokens.

        All or nothing: 0 if there is nothing to bring, if it is shorter than the threshold or over the
        quota, or if there is no room. The pages count at once and are valid when `loaded(node)`; match again
        to get them.

        Args:
            node: `Match.last_host_node`.
            quota: the most tokens that may be loaded; None: no limit.
            priority: the higher is copied first.

        Raises:
            ArgumentError: a quota that is not an integer or is negative, or a priority out of range.
            UnknownNodeError: `node` is no node.
        """
        self._check_open()
        if quota is not None:
            quota = as_count(quota, "quota")
        return self._load_back(node, quota, as_priority(priority))

    def loaded(self, node: int) -> bool:
        """Nothing is under way into the device pages of the path to `node`."""
        self._check_open()
        return self._controller.loaded(self._controller.loads_under(node))

    def wait_loaded(self, node: int) -> None:
        """Wait until that is so.

        Raises:
            CopyError: a load has failed.
        """
        self._check_open()
        self._controller.wait_loads(self._controller.loads_under(node))

    def alloc(self, num_pages: int) -> Pages:
        """Take device pages, evicting for what is short.

        Waits only if there is not enough without the copies under way, whose end may let pages go, as that of
        write-backs does, and for each of them no longer than `CacheConfig.alloc_wait`.

        Raises:
            ArgumentError: not an integer, or a negative one.
            CapacityError: there is no room; nothing is lost.
        """
        self._check_open()
        return self._controller.alloc(num_pages)

    def free(self, pages: npt.NDArray[np.uint32]) -> None:
        """Give back device pages that `alloc` gave and the tree did not take.

        Raises:
            ArgumentError: a page that is not in use, or is listed twice; nothing has changed then.
        """
        self._check_open()
        self._controller.free_device(pages)

    def insert(
        self,
        tokens: _Integers,
        pages: _Integers,
        *,
        prev_prefix_len: int = 0,
        inserted_len: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        chunked: bool = False,
    ) -> Inserted:
        """`PrefixTree.insert`; frees the duplicate pages, and backs up what the write policy wants.

        Raises:
            ArgumentError: as there, or a page past `prev_prefix_len` that is not out through `alloc`, or is
                listed twice; nothing has changed then.
        """
        self._check_open()
        return self._insert(
            tokens,
            pages,
            prev_prefix_len=prev_prefix_len,
            inserted_len=inserted_len,
            extra_key=extra_key,
            cache_salt=cache_salt,
            priority=priority,
            chunked=chunked,
        )

    def evict(self, num_pages: int) -> int:
        """Free device pages; returns how many are free at once. Those of write-backs follow at a tick."""
        self._check_open()
        return self._controller.evict(num_pages)

    # The loop

    def tick(self) -> None:
        """Take what has ended, and start what is waiting.

        Never waits for a copy or a storage. With other ranks it waits for their ticks.

        Raises:
            RankLostError: another rank has ended, or did not come within the time limit.
            RanksDifferError: what must be the same on all ranks is not; the message has the tick, the rank
                and the first difference. Every later tick is the same error, as it is after a lost rank.
        """
        self._step()

    def _step(self, most_failures: int | None = None) -> None:
        self._check_open()
        if self._together is None:
            self._controller.tick(most_failures)
            for link in self._links():
                link.tick()
        else:
            self._together.tick(
                self._parts, self._links(), self._storage, resets=self._epoch, most_failures=most_failures
            )
        if self._detached:
            self._detached = [link for link in self._detached if link.busy]
        if self._expiries or self._new_pins:
            self._expire_pins()

    def flush(self, timeout: float | None = None) -> bool:
        """Tick until nothing is under way: what was wanted on host and in storage is there or given up.

        Args:
            timeout: seconds of real time; None: no limit.

        Returns:
            False if there was not enough time, or a copy of pages in use failed again and again.

        Raises:
            ArgumentError: a timeout that is not a number.
            CopyError: without a timeout, a copy of pages in use failed again and again; ticks go on trying.
        """
        self._check_open()
        timeout = None if timeout is None else _as_seconds(timeout, "timeout")
        # Where there are others, all have to give up at the same tick.
        clock = time.monotonic if self._together is None else self._now
        self.tick()
        end = None if timeout is None else clock() + timeout
        while True:
            stuck = self._controller.stuck(MOST_FAILURES)
            copies_idle = stuck is not None or self._controller.idle
            if stuck is not None and self._together is not None:
                raise stuck  # the others wait for this copy
            if copies_idle and (self._storage is None or self._storage.idle):
                if stuck is not None and end is None:
                    raise stuck
                return stuck is None
            left = None if end is None else min(end - clock(), threading.TIMEOUT_MAX)
            if left is not None and left <= 0:
                return False
            if self._together is not None:
                left = _POLL_SECONDS  # what ends elsewhere is heard of at a tick
            if not copies_idle:
                self._controller.take_done(wait=True, timeout=left)
            elif self._storage is not None:
                self._storage.wait(_POLL_SECONDS if left is None else min(left, _POLL_SECONDS))
            self._step(MOST_FAILURES)

    # Retention

    def pin(
        self,
        tokens: _Integers,
        seconds: float | None = None,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> PinnedPrefix:
        """Keep what is cached of a prefix: it may move between device and host, but is not dropped.

        Args:
            tokens: the prefix.
            seconds: for how long, by the cache's clock; the pin ends at the first tick after that. With
                other ranks they begin at the next tick: before it, nobody knows what time it is for all.
                None: until `unpin`.
            extra_key: first half of the namespace.
            cache_salt: second half of the namespace.

        Raises:
            ArgumentError: pins would keep more than `CacheConfig.pin_share` of the host pool, or there is no
                host tier; nothing is pinned then.
        """
        self._check_open()
        expires_at = None
        if seconds is not None:
            if (checked := _as_seconds(seconds, "seconds")) <= 0:
                raise ArgumentError(f"seconds must be a number > 0, not {seconds!r}")
            seconds = checked
            expires_at = self._now() + seconds
        match = self.match_prefix(tokens, extra_key=extra_key, cache_salt=cache_salt)
        pin = self.tree.pin(match.last_host_node)
        if seconds is not None:
            if self._together is None:
                self._expire_later(pin, seconds)
            else:
                self._new_pins.append((pin, seconds))
        return PinnedPrefix(pin, match.device_length + match.host_hit_length, expires_at)

    def unpin(self, pinned: PinnedPrefix) -> None:
        """End a pin.

        Raises:
            LockError: it has ended before, or is not of this cache, or from before a reset.
        """
        self._check_open()
        self.tree.unpin(pinned.pin)

    def _expire_later(self, pin: Pin, seconds: float) -> None:
        self._timed_pins += 1
        heapq.heappush(self._expiries, (self._now() + seconds, self._timed_pins, pin))

    def _expire_pins(self) -> None:
        for pin, seconds in self._new_pins:
            self._expire_later(pin, seconds)
        self._new_pins.clear()
        while self._expiries and self._expiries[0][0] <= self._now():
            _, _, pin = heapq.heappop(self._expiries)
            with contextlib.suppress(LockError):  # it was ended before
                self.tree.unpin(pin)

    # Looking at it

    @property
    def device_pool(self) -> DevicePool:
        """The device pool, or the first of several."""
        return self.device_pools[0]

    @property
    def host_pool(self) -> HostPool | None:
        """The host pool beside it; None without a host tier."""
        return self.host_pools[0] if self.host_pools else None

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._closed

    def stats(self) -> dict[str, int]:
        """Counters by name; they only go up, also across `reset`. See `unified_cache.counters.Counters`, and
        `unified_cache.storage.guard.StorageCounts`."""
        return self._counters.as_dict() | self._storage_counts.as_dict()

    def usage(self) -> dict[str, int]:
        """What is held now, in pages by tier: in all, free, in the tree, of requests, of copies that ended
        late; on host also what is being read from storage. And what storage is known to hold: its pages, and
        the nodes that these make.

        ``free + tree + request + quarantined (+ reading) = pages``; on device what `alloc` gave to somebody
        else comes to that.
        """
        page_size, host = self.page_size, self._host_pages
        device_abandoned, host_abandoned = self._controller.abandoned_pages
        device_quarantined, host_quarantined = self._controller.quarantined()
        if links := self._links():
            host_quarantined = np.union1d(host_quarantined, self._held_by_storage())
        away = [request._retracted for request in self._active if request._retracted is not None]
        leaving = sum(pages.device_pages for pages in away if pages.state == "leaving")
        own = sum(len(request._pages) - request._borrowed for request in self._active)
        return {
            "requests": len(self._active),
            "device_pages": self._device_pages.num_pages,
            "device_free_pages": self._device_pages.free_pages,
            "device_tree_pages": self.tree.device_tokens // page_size,
            "device_request_pages": own + leaving + device_abandoned,
            "device_quarantined_pages": len(device_quarantined),
            "host_pages": 0 if host is None else host.num_pages,
            "host_free_pages": 0 if host is None else host.free_pages,
            "host_tree_pages": (self.tree.host_tokens + self.tree.pending_host_tokens) // page_size,
            "host_request_pages": sum(pages.host_pages for pages in away) + host_abandoned,
            "host_quarantined_pages": len(host_quarantined),
            "host_reading_pages": sum(link.reading_pages for link in links),
            "stored_pages": 0 if self._storage is None else self._storage.stored.tree.pages,
            "stored_prefixes": 0 if self._storage is None else len(self._storage.stored.tree),
        }

    def take_events(self) -> list[Stored | Removed | Cleared]:
        """The events since the last call, oldest first; none without ``CacheConfig(events=True)``.

        `unified_cache.events.Mirror` keeps from them what each tier holds.
        """
        self._check_open()
        return self.tree.take_events()

    # The end

    def reset(self, *, force: bool = False) -> None:
        """Empty device and host; storage and the counters stay. It waits for nothing.

        Pages that a copy or a storage thread still touches stay out of use until it has ended, however long
        a storage takes: no thread is started in the place of one that is held up.

        Args:
            force: also with requests active, or with pages out that `alloc` gave. Any call on such a request
                but `abort` is a `LockError` from then on. Such pages must be forgotten: they are handed out
                again, and a `free` or `insert` of them would hit whoever has them then.

        Raises:
            BusyError: requests are active, or pages that `alloc` gave were neither freed nor inserted.
        """
        self._check_open()
        if self._active and not force:
            raise BusyError(
                f"{len(self._active)} requests are active: finish or abort them, or call reset(force=True)"
            )
        if not force and (out := self._pages_out()):
            raise BusyError(
                f"{out} device pages are out through alloc: free or insert them, or call reset(force=True) "
                "and forget them"
            )
        for link in self._links():
            link.cancel()
        self._controller.cancel()
        self._epoch += 1
        self._active.clear()
        self._expiries.clear()
        self._new_pins.clear()
        self.tree.reset()
        device, host = self._controller.quarantined()
        self._controller.reset_device(keep=device)
        if self._host_pages is not None:
            self._host_pages.reset(keep=np.union1d(host, self._held_by_storage()))

    def update_weights(self, version: str, *, force: bool = False) -> None:
        """The model has other weights from now on: what was computed with the old ones is never hit again.

        Device and host are emptied (see `reset`), and pages in storage are looked for under the new version.

        Args:
            version: the new `CacheConfig.weight_version`.
            force: as for `reset`.

        Raises:
            ArgumentError: the version that the weights have already, or not a string; nothing has changed.
            BusyError: as for `reset`; nothing has changed.
        """
        self._check_open()
        config = replace(self.config, weight_version=version)
        if version == self.config.weight_version:
            raise ArgumentError(
                f"version must be another one than {version!r}, which the weights have already"
            )
        self.reset(force=force)
        self.config = config
        if self._storage is not None:
            self._storage.use_keys(self._keys())

    # Storage at run time

    def attach_storage(self, storage: str | os.PathLike[str] | Backend) -> None:
        """Use a storage from now on. What is on host already goes there too, a part at each tick.

        Args:
            storage: as `CacheConfig.storage`.

        Raises:
            ArgumentError: no URL, path or backend, or settings that go with no storage (no host tier, no
                model).
            BusyError: there is one: `detach_storage` first.
            StorageError: it can not be used; nothing has changed.
        """
        self._check_open()
        if self._storage is not None:
            raise BusyError("there is a storage already: detach_storage first")
        if self._together is None:
            link = self._link_to(storage)
        else:
            link = self._link_together(self._together, storage)
        self.config = replace(self.config, storage=storage)
        self._storage = link
        link.write_later(self.tree.host_nodes())

    def _link_to(self, storage: str | os.PathLike[str] | Backend) -> StorageLink:
        self.config.check_storage(storage)
        backend = self._open(storage)
        try:
            return self._link(backend)
        except BaseException:
            backend.close()
            raise

    def _link_together(self, together: RankTicks, storage: str | os.PathLike[str] | Backend) -> StorageLink:
        """A link where all ranks can make one. Whatever is wrong here, the others hear of it at a tick."""
        link, failed = None, None
        try:
            link = self._link_to(storage)
        except BaseException as error:
            failed = error
        attached = False
        try:
            together.attaching = together.all_stages(link is not None)
            self.tick()
            attached = together.attached
        finally:
            together.attaching = False
            if link is not None and not attached:
                link.close()
        if failed is not None:
            raise failed
        if link is None or not attached:
            raise StorageError("storage: another rank can not use it, and says why there")
        return link

    def detach_storage(self, *, timeout: float = 10.0) -> bool:
        """Use no storage from now on, and close it. Requests go on without what they still wait for.

        Calls that the storage holds up are left to their threads; what these touch stays out of use until
        they return.

        Args:
            timeout: seconds that pages on their way to storage may take; what is left then is not stored.

        Returns:
            False if something was left.
        """
        self._check_open()
        if self._storage is None:
            return True
        written = self.flush(timeout) and self._storage.settled
        link, self._storage = self._storage, None
        self.config = replace(self.config, storage=None)
        self._detached.append(link)
        link.close()
        return written

    def close(self, *, timeout: float = 10.0) -> None:
        """End all threads. More than once is fine; any other call is a `ClosedError` from then on.

        Args:
            timeout: seconds that pages on their way to storage may take; what is left then is not stored.

        Raises:
            ArgumentError: a timeout that is not a number; nothing was closed then.
        """
        if self._closed:
            return
        timeout = _as_seconds(timeout, "timeout")
        try:
            if self._storage is not None and not (self._together is not None and self._together.broken):
                self.flush(timeout)
        finally:
            self._closed = True
            self._active.clear()
            try:
                if self._copies is not None:
                    self._copies.close()
            finally:
                for link in self._links():
                    link.close()
                for pool in self.host_pools:
                    pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What requests use

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the cache was closed")

    def _pages_out(self) -> int:
        """Device pages that `alloc` gave, owned neither by the tree nor by a request."""
        try:
            usage = self.usage()
        except PoisonedError:
            return 0  # nobody can tell, and a reset is what helps
        held = ("free", "tree", "request", "quarantined")
        return usage["device_pages"] - sum(usage[f"device_{what}_pages"] for what in held)

    def _insert(
        self,
        tokens: _Integers,
        pages: _Integers,
        *,
        prev_prefix_len: int,
        inserted_len: int,
        extra_key: str | None,
        cache_salt: str | None,
        priority: int,
        chunked: bool,
    ) -> Inserted:
        # Those before are the tree's, and it does not look at them.
        first = as_count(prev_prefix_len, "prev_prefix_len") // self.page_size
        self._device_pages.require_used(pages, first)
        inserted = self.tree.insert(
            tokens,
            pages,
            prev_prefix_len=prev_prefix_len,
            inserted_len=inserted_len,
            extra_key=extra_key,
            cache_salt=cache_salt,
            priority=priority,
            chunked=chunked,
        )
        self._controller.free_device(inserted.duplicate_pages)
        self._controller.want_backup(inserted.backup_nodes)
        return inserted

    def _load_back(self, node: int, quota: int | None, priority: int, *, always: bool = False) -> int:
        """`load_back`; `always`: whatever the threshold says."""
        plan = self.tree.plan_load_back(node)
        tokens = plan.pages * self.page_size
        wanted = always or self._rates.worth_loading(tokens)
        if tokens == 0 or not wanted or (quota is not None and tokens > quota):
            plan.cancel()
            self._counters.load_backs_skipped += tokens > 0
            return 0
        try:
            pages = self._controller.alloc(plan.pages)
        except CapacityError:
            plan.cancel()
            self._counters.load_backs_skipped += 1
            return 0
        except BaseException:
            plan.cancel()
            raise
        self._controller.start_load(plan, pages, priority=priority)
        return tokens

    def _host_evicted(self, evicted: HostEvicted) -> None:
        if self._storage is not None:
            self._storage.host_evicted(evicted)

    def _backed_up(self, nodes: list[int]) -> None:
        if self._storage is not None:
            self._storage.write(nodes)

    def _retry_storage(self, node: int) -> None:
        if self._storage is not None:
            self._storage.retry(node)

    def _start_prefetch(
        self,
        tokens: npt.NDArray[np.uint32],
        first: int,
        anchor: int,
        namespace: tuple[str | None, str | None],
        priority: int,
    ) -> Prefetch | None:
        """Look in storage for the pages of `tokens` after the first ones, which end with `anchor`."""
        if self._storage is None:
            return None
        prefetch = self._storage.start(tokens, first, anchor, namespace, priority)
        if prefetch is not None and self.config.write_policy != "write_back":
            # Under write_through nothing on host hangs below a node that is not there.
            # So it must be on its way there when the first pages have been read.
            try:
                self._controller.want_backup([anchor], now=True)
            except BaseException:
                self._release_prefetch(prefetch)
                raise
        return prefetch

    def _known_stored(self, prefetch: Prefetch) -> int:
        """Tokens that a prefetch looks for and storage is known to hold."""
        if self._storage is None:
            return 0
        return self._storage.stored.known(prefetch.hashes) * self.page_size

    def _prefetch_over(self, prefetch: Prefetch) -> bool:
        return prefetch.reads.over(prefetch)

    def _wait_prefetch(self, prefetch: Prefetch) -> None:
        self.tick()
        while not prefetch.reads.over(prefetch):
            for link in self._links():
                link.wait(_POLL_SECONDS)
            self.tick()
        self._stop_prefetch(prefetch)

    def _stop_prefetch(self, prefetch: Prefetch) -> None:
        self._controller.begin_backups()
        prefetch.reads.stop(prefetch)

    def _release_prefetch(self, prefetch: Prefetch) -> None:
        prefetch.reads.release(prefetch)
