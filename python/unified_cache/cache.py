"""The cache: what an engine holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from unified_cache.config import CacheConfig
from unified_cache.controller.storage import Prefetch, StorageLink
from unified_cache.controller.transfers import MOST_FAILURES, Transfers
from unified_cache.counters import Counters
from unified_cache.errors import ArgumentError, BusyError, ClosedError, PoisonedError
from unified_cache.pools.allocator import PageAllocator, Pages, as_count
from unified_cache.request import Request, as_tokens
from unified_cache.storage.folder import FolderStore, folder_of
from unified_cache.storage.keys import fingerprint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from unified_cache._native import Inserted, Match, _Integers
    from unified_cache.copies.cpu import CpuCopyEngine
    from unified_cache.pools.device import MhaDevicePool
    from unified_cache.pools.host import MhaHostPool

__all__ = ["UnifiedCache"]

# How long one look at the I/O threads' results may take while something else could end the wait.
_POLL_SECONDS = 0.02


class UnifiedCache:
    """KV pages on device, on host and in storage, as one cache.

    All calls belong on one thread, the engine's scheduler. Its loop calls `tick` once a pass: that is where
    copies and storage that have ended become visible.

    Args:
        config: the settings.
        device_pool: the device's pages; from now on they are the cache's to hand out.
        clock: seconds, for time limits.

    Raises:
        ArgumentError: settings that do not go together or do not fit the machine.
        StorageError: the storage can not be used.
    """

    def __init__(
        self,
        config: CacheConfig,
        device_pool: MhaDevicePool,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.page_size != device_pool.page_size:
            raise ArgumentError(
                f"page_size must be that of the device pool, {device_pool.page_size}, not {config.page_size}"
            )
        self.config = config
        self.page_size = config.page_size
        self.device_pool = device_pool
        self.host_pool: MhaHostPool | None = None
        self.tree = config.make_tree()
        self._closed = False
        self._epoch = 0
        self._active: set[Request] = set()
        self._counters = Counters()
        self._device_pages = PageAllocator(device_pool.num_pages, "device")
        self._host_pages: PageAllocator | None = None
        self._copies: CpuCopyEngine | None = None
        self._storage: StorageLink | None = None
        if config.write_policy is not None:
            self._add_host(clock)
        self._transfers = Transfers(
            self.tree, self._device_pages, self._host_pages, self._copies, self._counters, self._backed_up
        )

    def _add_host(self, clock: Callable[[], float]) -> None:
        # Here, not at the top: a cache without a host tier needs neither them nor what they need.
        from unified_cache.copies.cpu import CpuCopyEngine
        from unified_cache.pools.host import MhaHostPool, host_pages_for

        config, device = self.config, self.device_pool
        pages = host_pages_for(device, config.hicache_ratio, config.hicache_size)
        # Opened before anything is allocated or started, since this is what can go wrong.
        store = None if config.storage is None else FolderStore(folder_of(config.storage))
        self.host_pool = MhaHostPool(device, pages)
        self._host_pages = PageAllocator(pages, "host")
        self._copies = CpuCopyEngine(device, self.host_pool)
        if store is not None:
            short = fingerprint(
                model=config.model,
                weight_version=config.weight_version,
                dtype=str(device.dtype),
                layers=device.layers,
                heads=device.heads,
                head_dim=device.head_dim,
                page_size=device.page_size,
                layout=self.host_pool.layout,
            )
            self._storage = StorageLink(
                self.tree, self.host_pool, self._host_pages, store, short, config, clock, self._counters
            )

    # Requests

    def begin(
        self,
        tokens: _Integers,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Begin a request: look its prompt up, hold what is there, ask storage for the rest.

        Args:
            tokens: the prompt.
            extra_key: first half of the namespace.
            cache_salt: second half of the namespace.
            priority: for the eviction policy "priority".

        Raises:
            ArgumentError: a token out of range.
            ClosedError: the cache was closed.
        """
        self._check_open()
        request = Request(self, as_tokens(tokens), extra_key, cache_salt, priority)
        self._active.add(request)
        self._counters.requests += 1
        return request

    # Single steps, for engines that keep their own requests

    def match_prefix(
        self, tokens: _Integers, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> Match:
        """`PrefixTree.match_prefix`. Lock what you go on to use: ``cache.tree.inc_lock_ref``."""
        self._check_open()
        return self.tree.match_prefix(tokens, extra_key=extra_key, cache_salt=cache_salt)

    def alloc(self, num_pages: int) -> Pages:
        """Take device pages, evicting for what is short.

        Waits only where the pages come out of copies under way, such as write-backs.

        Raises:
            ArgumentError: not an integer, or a negative one.
            CapacityError: there is no room; nothing is lost.
        """
        self._check_open()
        return self._transfers.alloc(num_pages)

    def free(self, pages: npt.NDArray[np.uint32]) -> None:
        """Give back device pages that `alloc` gave and the tree did not take.

        Raises:
            ArgumentError: a page that is not in use, or is listed twice; nothing has changed then.
        """
        self._check_open()
        self._device_pages.free(pages)

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
        return self._transfers.evict(num_pages)

    # The loop

    def tick(self) -> None:
        """Take what has ended, and start what is waiting. Never waits itself."""
        self._step()

    def _step(self, most_failures: int | None = None) -> None:
        self._check_open()
        transfers, storage = self._transfers, self._storage
        if not transfers.idle:
            transfers.retry(most_failures)
            transfers.take_done()
            transfers.start_backups()
        if storage is not None and not storage.idle:
            storage.tick()

    def flush(self, timeout: float | None = None) -> bool:
        """Tick until nothing is under way: what was wanted on host and in storage is there or given up.

        Args:
            timeout: seconds of real time; None: no limit.

        Returns:
            False if there was not enough time, or a copy of pages in use failed again and again.

        Raises:
            CopyError: without a timeout, a copy of pages in use failed again and again; ticks go on trying.
        """
        end = None if timeout is None else time.monotonic() + timeout
        self.tick()
        while True:
            stuck = self._transfers.stuck(MOST_FAILURES)
            copies_idle = stuck is not None or self._transfers.idle
            if copies_idle and (self._storage is None or self._storage.idle):
                if stuck is not None and end is None:
                    raise stuck
                return stuck is None
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            if not copies_idle:
                self._transfers.take_done(wait=True, timeout=left)
            elif self._storage is not None:
                self._storage.wait(_POLL_SECONDS if left is None else min(left, _POLL_SECONDS))
            self._step(MOST_FAILURES)

    # Looking at it

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._closed

    def stats(self) -> dict[str, int]:
        """Counters by name; they only go up, also across `reset`. See `unified_cache.counters.Counters`."""
        return self._counters.as_dict()

    def usage(self) -> dict[str, int]:
        """What is held now: pages in all, free and in the tree, by tier, and active requests."""
        page_size, host = self.page_size, self._host_pages
        return {
            "requests": len(self._active),
            "device_pages": self._device_pages.num_pages,
            "device_free_pages": self._device_pages.free_pages,
            "device_tree_pages": self.tree.device_tokens // page_size,
            "host_pages": 0 if host is None else host.num_pages,
            "host_free_pages": 0 if host is None else host.free_pages,
            "host_tree_pages": (self.tree.host_tokens + self.tree.pending_host_tokens) // page_size,
        }

    # The end

    def reset(self, *, force: bool = False) -> None:
        """Empty device and host; storage and the counters stay. Waits for copies that are running.

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
        if self._storage is not None:
            self._storage.cancel()
        self._transfers.cancel()
        self._epoch += 1
        self._active.clear()
        self.tree.reset()
        self._device_pages.reset()
        if self._host_pages is not None:
            self._host_pages.reset()

    def close(self, *, timeout: float = 10.0) -> None:
        """End all threads. More than once is fine; any other call is a `ClosedError` from then on.

        Args:
            timeout: seconds that pages on their way to storage may take; what is left then is not stored.
        """
        if self._closed:
            return
        try:
            if self._storage is not None:
                self.flush(timeout)
        finally:
            self._closed = True
            self._active.clear()
            try:
                if self._copies is not None:
                    self._copies.close()
            finally:
                if self._storage is not None:
                    self._storage.close()

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
        own = sum(len(request._pages) - request._borrowed for request in self._active)
        try:
            in_tree = self.tree.device_tokens // self.page_size
        except PoisonedError:
            return 0  # nobody can tell, and a reset is what helps
        return self._device_pages.used_pages - in_tree - own

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
        self._device_pages.free(inserted.duplicate_pages)
        self._transfers.want_backup(inserted.backup_nodes)
        return inserted

    def _backed_up(self, nodes: list[int]) -> None:
        if self._storage is not None:
            self._storage.write(nodes)

    def _retry_storage(self, node: int) -> None:
        if self._storage is not None:
            self._storage.retry(node)

    def _start_prefetch(
        self,
        tokens: npt.NDArray[np.uint32],
        anchor: int,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> Prefetch | None:
        if self._storage is None:
            return None
        prefetch = self._storage.start(tokens, anchor, extra_key, cache_salt)
        if prefetch is not None and self.config.write_policy != "write_back":
            # Under write_through nothing on host hangs below a node that is not there.
            self._transfers.want_backup([anchor])
        return prefetch

    def _prefetch_over(self, prefetch: Prefetch) -> bool:
        return self._storage is None or self._storage.over(prefetch)

    def _wait_prefetch(self, prefetch: Prefetch) -> None:
        assert self._storage is not None
        self.tick()
        while not self._storage.over(prefetch):
            self._storage.wait(_POLL_SECONDS)
            self.tick()
        self._stop_prefetch(prefetch)

    def _stop_prefetch(self, prefetch: Prefetch) -> None:
        assert self._storage is not None
        self._transfers.start_backups()
        self._storage.stop(prefetch)

    def _release_prefetch(self, prefetch: Prefetch) -> None:
        assert self._storage is not None
        self._storage.release(prefetch)
