"""Storage to host: look-ups, reads, and how what was read gets into the tree.

A request's prefetch goes through these phases: it *waits* for the tick, which asks storage once for all that
wait; it is *looked up*; its pages are *read*, in batches; it has *ended*. Pages that another prefetch is
reading already are not read again: the later one waits for the earlier one's outcome, and reads what follows
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from unified_cache._native import HostEvicted, HostLockReceipt, PrefixTree, page_hashes
from unified_cache.config import CacheConfig
from unified_cache.controller.recompute import LoadOrRecompute
from unified_cache.controller.storage_operations import (
    ANSWERED,
    ENDED,
    FINAL,
    RUNNING,
    StorageOperation,
    StorageOperations,
)
from unified_cache.controller.stored_prefixes import StoredPrefixes
from unified_cache.counters import Counters
from unified_cache.pools.allocator import PageAllocator, Pages
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.keys import KeySpace
from unified_cache.storage.objects import PageObjects
from unified_cache.storage.prefetch import LookUp, ReadBatch, StoragePrefetch, batches
from unified_cache.storage.prefixes import PrefixPages

__all__ = ["Prefetch", "StorageReads"]

# Runs that storage was asked for and has not answered: storage that is slow must not pile them up.
_MOST_RUNS = 256
# Among reads: those in the background come after all others.
_LAST = -(2**63)


class Prefetch(StorageOperation):
    """One request's reading from storage.

    Positions of pages count from the end of the anchor: what the request had on device and host.

    Args:
        reads: whose it is.
        tokens: of the request, as far as they may be hits.
        first: pages of these that it had.
        parent: digest of the last of these; None if there is none.
        hashes: digests of the pages after them, uint8 (pages, 32).
        keys: of their objects.
        namespace: of the request.
        anchor: keeps the last node that it had.
        started: when; None: at the next tick, where it is not known before what time it is for all ranks.
        threshold: tokens: a shorter hit is computed again.
        priority: of the request.
        background: nobody waits for it: it takes no room from others, and no request follows it.
    """

    def __init__(
        self,
        reads: StorageReads,
        tokens: npt.NDArray[np.uint32],
        first: int,
        parent: bytes | None,
        hashes: npt.NDArray[np.uint8],
        keys: list[str],
        namespace: tuple[str | None, str | None],
        anchor: HostLockReceipt,
        started: float | None,
        threshold: int,
        priority: int,
        background: bool = False,
    ) -> None:
        self.reads = reads
        self.tokens = tokens
        self.first = first
        self.parent = parent
        self.hashes = hashes
        self.keys = keys
        self.namespace = namespace
        self.started = started
        self.threshold = threshold
        self.priority = priority
        self.background = background
        self.phase: Literal["wait", "look up", "read", "ended"] = "wait"
        self.stopped = False  # the request does not wait any longer
        self.dropped = False  # nor does anybody else: no more of it is read
        self.released = False  # the request has no use for the lock
        self.lock: HostLockReceipt | None = anchor  # the anchor, then the end of what was inserted
        # Pages before `head` are read by `leader`.
        self.head = 0
        self.leader: Prefetch | None = None
        self.followers: list[Prefetch] = []
        self.pages: Pages = np.empty(0, np.uint32)  # from `head` on
        self.batches: list[ReadBatch] = []
        self.pending = 0  # batches that have not ended
        self.late = False  # the storage has not answered one of them in time
        self.found: int | None = None  # pages from the front, once this rank knows
        self.answered = False  # the storage has said so
        self.agreed_read: int | None = None  # pages that all ranks have read; None: this rank is alone
        self.kept = 0  # pages from the front that were given to the tree: the rest is ours
        self.refused = False  # the tree takes nothing there
        self.inserted_pages = 0  # positions that are in the tree because of storage

    @property
    def wanted(self) -> int:
        """Pages that are looked for."""
        return len(self.hashes)

    def pages_of(self, page_size: int) -> PrefixPages:
        """The pages that are looked for, as storage has them."""
        begin = self.first * page_size
        tokens = self.tokens[begin : begin + self.wanted * page_size]
        return PrefixPages(self.hashes, tokens, self.parent, self.namespace)

    @property
    def read(self) -> int:
        """Pages of our own from the front that are there, on all ranks."""
        return self._read_here if self.agreed_read is None else self.agreed_read

    @property
    def untouched(self) -> bool:
        """No thread touches its pages any more, on any rank."""
        return self.pending == 0 if self.agreed_read is None else self.agreed == ENDED

    @property
    def outcome(self) -> tuple[int, int]:
        """See `StorageOperation`."""
        if self.phase == "look up":
            return (RUNNING, 0) if self.found is None else (ANSWERED, self.found)
        if self.pending == 0:
            return ENDED, self._read_here
        return (FINAL if self.late else RUNNING), self._read_here

    @property
    def _read_here(self) -> int:
        count = 0
        for batch in self.batches:
            read = batch.read
            count += read
            if read < batch.pages:
                break
        return count


class StorageReads:
    """The reading half of a `StorageLink`.

    Args:
        tree: hears of pages that were read.
        host: free pages of the host pool.
        objects: where pages lie.
        reader: runs look-ups and batches.
        config: thresholds and policies.
        clock: seconds.
        counters: counts.
        rates: which hits are worth reading; told how long reading takes.
        operations: those under way.
        stored: told what storage has, and what it has not.
    """

    def __init__(
        self,
        tree: PrefixTree,
        host: PageAllocator,
        objects: PageObjects,
        reader: StoragePrefetch,
        config: CacheConfig,
        clock: Callable[[], float],
        counters: Counters,
        rates: LoadOrRecompute,
        operations: StorageOperations,
        stored: StoredPrefixes,
    ) -> None:
        self._tree = tree
        self._host = host
        self._objects = objects
        self._reader = reader
        self._config = config
        self._clock = clock
        self._counters = counters
        self._rates = rates
        self._operations = operations
        self._stored = stored
        self._asked: list[Prefetch] = []
        self._looking: dict[Prefetch, None] = {}
        self.look_ups: dict[LookUp, list[Prefetch]] = {}
        self.batches: dict[ReadBatch, Prefetch] = {}
        self._reading: dict[Prefetch, None] = {}
        self._readers: dict[str, Prefetch] = {}  # by the key of a page's first object
        self._groups = 1
        self.host_evicted: Callable[[HostEvicted], None] = lambda evicted: None  # told what made room

    @property
    def waiting(self) -> bool:
        """A prefetch waits for the tick."""
        return bool(self._asked)

    @property
    def asked(self) -> int:
        """Prefetches that wait for the tick."""
        return len(self._asked)

    @property
    def quiet(self) -> bool:
        """No request waits for storage."""
        if not all(prefetch.background for prefetch in self._asked):
            return False
        return all(self.in_background(job) for jobs in (self.look_ups, self.batches) for job in jobs)

    def in_background(self, job: object) -> bool:
        """Nobody waits for this look-up or batch."""
        if isinstance(job, LookUp):
            return all(prefetch.background for prefetch in self.look_ups.get(job, ()))
        return isinstance(job, ReadBatch) and job in self.batches and self.batches[job].background

    @property
    def held_pages(self) -> int:
        """Host pages that are being read, and are not in the tree."""
        return sum(len(prefetch.pages) - prefetch.kept for prefetch in self._reading)

    # Asking

    def start(
        self,
        tokens: npt.NDArray[np.uint32],
        first: int,
        anchor: int,
        namespace: tuple[str | None, str | None],
        priority: int,
        keys: KeySpace,
        *,
        background: bool = False,
    ) -> Prefetch | None:
        """Look in storage for the whole pages of `tokens` after the first ones, which end with `anchor`.

        In the background: whatever the thresholds say, into pages that are free, and after what requests
        wait for. Only where a rank is alone.
        """
        page_size = self._config.page_size
        rest = tokens[first * page_size :]
        # A hit is at most as long as the key: what is not worth reading then is not looked for.
        if len(rest) < page_size or not (background or self._rates.worth_reading(len(rest))):
            return None
        if len(self._asked) + len(self._looking) >= _MOST_RUNS:
            self._counters.prefetches_refused += 1
            return None
        parent = None if anchor == self._tree.root else self._tree.page_hashes(anchor)[-1]
        extra_key, cache_salt = namespace
        hashes = page_hashes(rest, page_size, parent=parent, extra_key=extra_key, cache_salt=cache_salt)
        lock = self._tree.inc_host_lock_ref(anchor)
        # Not more than was asked for, since that may be an attempt to see whether reading pays by now.
        threshold = 0 if background else min(self._rates.prefetch_threshold, len(rest))
        prefetch = Prefetch(
            self,
            tokens,
            first,
            None if parent is None else parent.tobytes(),
            hashes,
            keys.keys(hashes),
            namespace,
            lock,
            self._clock() if self._operations.alone else None,
            threshold,
            _LAST if background else priority,
            background,
        )
        self._groups = keys.groups
        self._asked.append(prefetch)
        self._counters.prefetches += not background
        return prefetch

    def start_clocks(self) -> None:
        """The time of what was asked for since the last tick begins now: nobody knows how long that was."""
        for prefetch in self._asked:
            if prefetch.started is None:
                prefetch.started = self._clock()

    def ask(self) -> None:
        """Ask storage for everything that waits and has a place, in one look-up."""
        waiting = [prefetch for prefetch in self._asked if prefetch.phase == "wait"]
        room = self._operations.room
        asked, self._asked = waiting[:room], waiting[room:]
        if not asked:
            return
        for prefetch in asked:
            prefetch.phase = "look up"
            self._looking[prefetch] = None
            self._operations.begin(prefetch)
        job = LookUp([prefetch.keys for prefetch in asked])
        self.look_ups[job] = asked
        self._counters.storage_look_ups += 1
        self._reader.look_up(job, max(prefetch.priority for prefetch in asked))

    def looked_up(self, job: LookUp) -> None:
        """A look-up has been answered."""
        asked = self.look_ups.pop(job)
        if job.found is None:
            self._counters.storage_errors += not job.stop
        if asked:  # else they were told that it is late
            self._answered(asked, job.found)

    def _answered(self, asked: list[Prefetch], found: list[int] | None) -> None:
        for prefetch, objects in zip(asked, found or [0] * len(asked), strict=True):
            if prefetch.phase == "look up":
                prefetch.found = objects // self._groups
                prefetch.answered = found is not None
                if self._operations.alone:
                    self._found(prefetch, prefetch.found)

    def apply(self, prefetch: Prefetch, state: int, pages: int) -> None:
        """All ranks have come so far with it."""
        if prefetch.phase == "look up":
            if state == ANSWERED:
                self._found(prefetch, pages)
            return
        prefetch.agreed, prefetch.agreed_read = state, pages
        if state == FINAL:
            self._drop_all(prefetch)
        elif state == ENDED:
            self._settle(prefetch)

    def _found(self, prefetch: Prefetch, found: int) -> None:
        page_size = self._config.page_size
        self._looking.pop(prefetch, None)
        self._counters.storage_found_pages += found
        if prefetch.answered:
            self._stored.looked_up(prefetch.pages_of(page_size), found)
        # What is being read for somebody else, from the front. One that was dropped reads no more, and its
        # last call may be one that never ends.
        leader, head = None, 0
        while head < found:
            reader = self._readers.get(prefetch.keys[head * self._groups])
            if reader is None or reader.dropped:
                break
            leader, head = reader, head + 1
        room = max(self._host.num_pages // 2 - sum(len(other.pages) for other in self._reading), 0)
        pages = min(found - head, room)
        if (short := pages - self._host.free_pages) > 0:
            pages -= short - (0 if prefetch.background else self._tree.evictable_host_pages(short))
        if (head + pages) * page_size < prefetch.threshold or head + pages == 0:
            self._end(prefetch)
            return
        if (short := pages - self._host.free_pages) > 0:
            evicted = self._tree.evict_host(short)
            self._host.free(evicted.host_pages)
            self._counters.evicted_host_pages += len(evicted.host_pages)
            self.host_evicted(evicted)
        prefetch.phase, prefetch.head, prefetch.leader = "read", head, leader
        if not self._operations.alone:
            prefetch.agreed_read = 0
        if leader is not None:
            leader.followers.append(prefetch)
            self._counters.storage_shared_pages += head
        self._reading[prefetch] = None
        self._read(prefetch, pages)

    def _read(self, prefetch: Prefetch, pages: int) -> None:
        groups, head = self._groups, prefetch.head
        prefetch.pages = self._host.alloc(pages)
        for start, end in batches(pages, self._objects.page_bytes):
            keys = prefetch.keys[(head + start) * groups : (head + end) * groups]
            batch = ReadBatch(keys, *self._objects.of(prefetch.pages[start:end]), groups)
            prefetch.batches.append(batch)
            self.batches[batch] = prefetch
            if not prefetch.background:  # else a request would wait for what comes last
                for key in keys[::groups]:
                    self._readers[key] = prefetch
        prefetch.pending = len(prefetch.batches)
        for batch in prefetch.batches:
            self._reader.read(batch, prefetch.priority)

    # Ends

    def take(self, batch: ReadBatch) -> None:
        """A batch has been read."""
        prefetch = self.batches.pop(batch)
        prefetch.pending -= 1
        self._counters.storage_corrupt_pages += batch.statuses.count(PageStatus.CORRUPT)
        unanswered = PageStatus.ERROR in batch.statuses or PageStatus.TIMEOUT in batch.statuses
        self._counters.storage_errors += unanswered
        for at, status in enumerate(batch.statuses):
            if status in (PageStatus.MISS, PageStatus.CORRUPT):
                self._stored.missing(bytes.fromhex(batch.keys[at][:64]))
        if self._operations.alone:
            self._settle(prefetch)

    def late(self, job: LookUp | ReadBatch) -> None:
        """The storage has not answered in time: whoever waits for this waits no longer."""
        if isinstance(job, LookUp):
            self._counters.storage_errors += 1
            job.stop = True
            if job in self.look_ups:
                # Nobody waits for it any more: it counts no longer as asked, be it that it never returns.
                asked, self.look_ups[job] = self.look_ups[job], []
                self._answered(asked, None)
            return
        if job not in self.batches:
            return
        self._counters.storage_errors += 1
        prefetch = self.batches[job]
        prefetch.late = True
        if self._operations.alone:
            self._drop_all(prefetch)

    def _drop_all(self, prefetch: Prefetch) -> None:
        """Read no more of it, nor of what waits for it."""
        waiting = [prefetch]
        while waiting:
            prefetch = waiting.pop()
            waiting += prefetch.followers
            self._drop(prefetch)

    def give_up_queued(self) -> None:
        """The storage is down: what has not begun ends as a miss."""
        for prefetch in self._asked:
            if prefetch.phase == "wait":
                self._end(prefetch)
        self._asked = []
        if self._operations.decides:
            self._cancel_queued()

    def _cancel_queued(self) -> None:
        for job in list(self.look_ups):
            if job.ticket is not None and self._reader.threads.cancel(job.ticket):
                self.looked_up(job)
        for batch in list(self.batches):
            if batch.ticket is not None and self._reader.threads.cancel(batch.ticket):
                self.take(batch)

    def over(self, prefetch: Prefetch) -> bool:
        """The request need not wait any longer."""
        if prefetch.phase == "ended" or prefetch.stopped or self._config.prefetch_policy == "best_effort":
            return True
        if self._config.prefetch_policy == "wait_complete":
            return False
        limit = self._config.prefetch_timeout
        asked_for = prefetch.wanted * self._config.page_size
        limit += self._config.prefetch_timeout_per_1024 * asked_for / 1024
        return prefetch.started is not None and self._clock() - prefetch.started >= limit

    def stop(self, prefetch: Prefetch) -> None:
        """End it: what was read so far is in the tree then, the rest is freed once the threads are off it."""
        if prefetch.phase == "ended" or prefetch.stopped:
            return
        prefetch.stopped = True
        if prefetch.phase != "read":
            self._end(prefetch)
            return
        chain, leader = [prefetch], prefetch.leader
        while leader is not None:
            chain.append(leader)
            leader = leader.leader
        for leading in reversed(chain[1:]):
            self._insert(leading)
        if all(follower.dropped or follower.phase == "ended" for follower in prefetch.followers):
            self._drop(prefetch)
        else:
            self._insert(prefetch)  # and it goes on, for those that wait for it

    def _drop(self, prefetch: Prefetch) -> None:
        if prefetch.dropped or prefetch.phase != "read":
            return
        prefetch.stopped = prefetch.dropped = True
        for batch in prefetch.batches:
            if batch in self.batches:
                batch.stop = True
                if batch.ticket is not None and self._reader.threads.cancel(batch.ticket):
                    del self.batches[batch]
                    prefetch.pending -= 1
        self._insert(prefetch)
        self._settle(prefetch)
        if prefetch.released:
            self._unlock(prefetch)

    def release(self, prefetch: Prefetch) -> None:
        """The request has no more use for it."""
        self.stop(prefetch)
        prefetch.released = True
        if prefetch.phase == "ended" or prefetch.dropped:
            self._unlock(prefetch)

    def _unlock(self, prefetch: Prefetch) -> None:
        if prefetch.lock is not None:
            self._tree.dec_host_lock_ref(prefetch.lock)
            prefetch.lock = None

    def _settle(self, prefetch: Prefetch) -> None:
        """End it, and those that have waited for it, if all of it has been read."""
        work = [prefetch]
        while work:
            prefetch = work.pop()
            leader = prefetch.leader
            waits = leader is not None and leader.phase != "ended" and not prefetch.dropped
            if prefetch.phase != "read" or not prefetch.untouched or waits:
                continue
            if not prefetch.dropped:
                self._insert(prefetch)
                if leader is None and prefetch.started is not None and not prefetch.background:
                    self._rates.read(prefetch.read, self._clock() - prefetch.started)
            self._end(prefetch)
            work += prefetch.followers

    def _insert(self, prefetch: Prefetch) -> None:
        """Give the pages that were read, and are not there yet, to the tree."""
        # One look: the I/O threads may be going on.
        page_size, read = self._config.page_size, prefetch.read
        if prefetch.phase != "read" or prefetch.lock is None or prefetch.refused:
            return
        if not self._after_head(prefetch):
            return
        begin, end = prefetch.kept, read
        if begin >= end:
            return
        self._counters.storage_read_pages += end - begin
        prefetch.kept = end
        anchor = prefetch.lock.node
        at = prefetch.head + begin, prefetch.head + end
        extra_key, cache_salt = prefetch.namespace
        inserted = self._tree.insert_host(
            anchor,
            prefetch.tokens[(prefetch.first + at[0]) * page_size : (prefetch.first + at[1]) * page_size],
            prefetch.pages[begin:end],
            hashes=prefetch.hashes[at[0] : at[1]],
            extra_key=extra_key,
            cache_salt=cache_salt,
        )
        self._host.free(inserted.duplicate_host_pages)
        if inserted.node == anchor:
            prefetch.refused = True
            return
        prefetch.inserted_pages = at[1]
        # From here on it is the end of what was inserted that must not go.
        self._move_lock(prefetch, inserted.node)

    def _after_head(self, prefetch: Prefetch) -> bool:
        """What others read before our own pages is in the tree, and the lock is on its end."""
        if prefetch.leader is None or prefetch.inserted_pages >= prefetch.head:
            return True
        extra_key, cache_salt = prefetch.namespace
        end = (prefetch.first + prefetch.head) * self._config.page_size
        match = self._tree.match_prefix(prefetch.tokens[:end], extra_key=extra_key, cache_salt=cache_salt)
        there = (match.device_length + match.host_hit_length) // self._config.page_size - prefetch.first
        if there <= 0:
            return False
        prefetch.inserted_pages = max(there, prefetch.inserted_pages)
        self._move_lock(prefetch, match.last_host_node)
        return there == prefetch.head

    def _move_lock(self, prefetch: Prefetch, node: int) -> None:
        assert prefetch.lock is not None
        lock = self._tree.inc_host_lock_ref(node)
        self._tree.dec_host_lock_ref(prefetch.lock)
        prefetch.lock = lock

    def _end(self, prefetch: Prefetch) -> None:
        prefetch.phase = "ended"
        self._operations.end(prefetch)
        self._looking.pop(prefetch, None)
        self._reading.pop(prefetch, None)
        for batch in prefetch.batches:
            for key in batch.keys[:: batch.groups]:
                if self._readers.get(key) is prefetch:
                    del self._readers[key]
        self._host.free(prefetch.pages[prefetch.kept :])
        if prefetch.released:
            self._unlock(prefetch)

    def stop_all(self) -> None:
        """Read nothing more. What has been read so far is in the tree then."""
        for job in self.look_ups:
            job.stop = True
        self.give_up_queued()
        for prefetch in list(self._looking):
            self._end(prefetch)
        for prefetch in list(self._reading):
            self._drop(prefetch)

    def forget(self) -> list[tuple[Pages, set[object]]]:
        """The tree is reset next. Returns what is still read, or was when ranks last agreed: the pages, and
        the jobs that touch them."""
        running: list[tuple[Pages, set[object]]] = []
        for prefetch in [*self._asked, *self._looking, *self._reading]:
            jobs: set[object] = set()
            touched = np.zeros(len(prefetch.pages), bool)
            start = 0
            for batch in prefetch.batches:
                end = start + batch.pages
                if batch in self.batches:
                    batch.stop = True
                    if batch.ticket is None or not self._reader.threads.cancel(batch.ticket):
                        jobs.add(batch)
                        touched[start:end] = True
                start = end
            # Which of its pages a thread still touches is not the same on all ranks.
            pages = prefetch.pages[touched] if self._operations.alone else prefetch.pages
            if len(pages):
                running.append((pages, jobs))
            self._operations.end(prefetch)
            prefetch.phase, prefetch.lock = "ended", None
        for job in self.look_ups:
            job.stop = True
            if job.ticket is not None:
                self._reader.threads.cancel(job.ticket)
        for held in (self.look_ups, self._looking, self.batches, self._reading, self._readers):
            held.clear()
        self._asked = []
        return running
