"""After a restart: what was stored last comes back to host, before somebody asks for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from unified_cache._native import PrefixTree
from unified_cache.controller.storage_reads import Prefetch, StorageReads
from unified_cache.counters import Counters
from unified_cache.pools.allocator import PageAllocator
from unified_cache.storage.backup import BATCH_PAGES
from unified_cache.storage.prefixes import StoredPrefix

__all__ = ["WarmUp"]


class WarmUp:
    """Reads prefixes from storage, one batch at a time, while nobody else reads and there is room.

    It takes free host pages only, and leaves a part of the pool free: nothing is evicted for it.

    Args:
        tree: what is on host.
        host: free pages of the host pool.
        reads: a link's reading half.
        start: begins a prefetch in the background: tokens, pages of these that are there, their end,
            namespace.
        most_pages: of the host pool that may be in use for it to go on.
        counters: counts.
    """

    def __init__(
        self,
        tree: PrefixTree,
        host: PageAllocator,
        reads: StorageReads,
        start: Callable[..., Prefetch | None],
        most_pages: int,
        counters: Counters,
    ) -> None:
        self._tree = tree
        self._host = host
        self._reads = reads
        self._start = start
        self._most_pages = most_pages
        self._counters = counters
        self._prefixes: deque[StoredPrefix] = deque()
        self._reading: Prefetch | None = None

    @property
    def room(self) -> int:
        """Pages that may still come."""
        used = self._host.num_pages - self._host.free_pages
        return min(self._most_pages - used, self._host.free_pages)

    @property
    def active(self) -> bool:
        """There is something to read, or it is being read."""
        return self._reading is not None or bool(self._prefixes)

    def begin(self, prefixes: Iterable[StoredPrefix]) -> None:
        """Read these, the first ones first."""
        self._prefixes.extend(prefixes)

    def tick(self, *, can_read: bool) -> None:
        """Take what was read, and begin the next batch if nobody else reads."""
        if self._reading is not None:
            if self._reading.phase != "ended":
                return
            self._take(self._reading)
        while can_read and self._prefixes and self._reading is None and self._reads.quiet:
            self._next(self._prefixes[0])

    def _next(self, prefix: StoredPrefix) -> None:
        room = self.room
        if room <= 0:
            self._prefixes.clear()
            return
        extra_key, cache_salt = prefix.namespace
        tokens, page_size = prefix.tokens, self._tree.page_size
        match = self._tree.match_prefix(tokens, extra_key=extra_key, cache_salt=cache_salt)
        first = (match.device_length + match.host_hit_length) // page_size
        end = min(first + min(room, BATCH_PAGES), len(tokens) // page_size)
        if first < end:
            self._reading = self._start(
                tokens[: end * page_size], first, match.last_host_node, prefix.namespace
            )
        if self._reading is None:
            self._prefixes.popleft()

    def _take(self, reading: Prefetch) -> None:
        self._counters.storage_warmed_pages += reading.inserted_pages
        if reading.inserted_pages < reading.wanted and self._prefixes:
            self._prefixes.popleft()  # it is not there any more, or there is no place for it
        self._reads.release(reading)
        self._reading = None

    def stop(self) -> None:
        """Read nothing more."""
        self._prefixes.clear()
        if self._reading is not None:
            self._reads.release(self._reading)
            self._reading = None

    def forget(self) -> None:
        """The tree is reset next."""
        self._prefixes.clear()
        self._reading = None
