"""One request's life in the cache: begin, load back, extend, insert, finish or abort.

A request keeps the order of calls right, and gives back exactly what it took, once, however it ends.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from unified_cache.controller.retracted import RetractedPages
from unified_cache.errors import ArgumentError, CapacityError, CopyError, LockError
from unified_cache.pools.allocator import as_count

if TYPE_CHECKING:
    from unified_cache._native import HostLockReceipt, LockReceipt, Match
    from unified_cache.cache import UnifiedCache
    from unified_cache.controller.operations import CacheOperation
    from unified_cache.controller.storage import Prefetch

__all__ = ["Request", "as_priority", "as_tokens"]

_TOP = 2**32 - 1
_PRIORITIES = range(-(2**63), 2**63)


def as_tokens(tokens: Any) -> npt.NDArray[np.uint32]:
    """A copy of token ids as uint32.

    Raises:
        ArgumentError: not one-dimensional integers, or one that is out of range.
    """
    given = np.asarray(tokens)
    if given.size == 0 and given.ndim == 1:
        return np.empty(0, np.uint32)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ArgumentError(
            f"tokens must be one-dimensional integers in 0..{_TOP}, not {given.dtype} of shape {given.shape}"
        )
    outside = (given < 0) | (given > _TOP)
    if outside.any():
        at = int(outside.argmax())
        raise ArgumentError(f"token {at} is {given[at]}, allowed is 0..{_TOP}")
    return given.astype(np.uint32)


def as_priority(priority: Any) -> int:
    """A priority as the tree and the queues of copies take it.

    Raises:
        ArgumentError: not an integer, or one that is out of range.
    """
    try:
        number = operator.index(priority)
    except TypeError:
        number = None
    if number is None or number not in _PRIORITIES:
        raise ArgumentError(f"priority must be an integer in -2**63..2**63-1, not {priority!r}")
    return number


class Request:
    """What one request holds; made by `UnifiedCache.begin`, used on the scheduler's thread.

    The usual way through::

        request = cache.begin(prompt)
        request.wait_prefetch()              # or come back when prefetch_done()
        request.load_back()
        pages = request.extend()             # slots for the whole prompt
        request.wait()                       # the bytes of what was loaded are there
        ...compute from request.device_length on, write K and V into pages...
        request.insert()                     # others can hit the prompt now
        request.extend([token]); ...compute it...
        request.finish()                     # or abort(), at any point

    An engine that runs out of room can take a request off the device, and put it back later with the same
    bytes::

        request.retract()                    # its device pages come free when their copy has ended
        request.resume()                     # then extend, wait and go on
    """

    def __init__(
        self,
        cache: UnifiedCache,
        tokens: npt.NDArray[np.uint32],
        extra_key: str | None,
        cache_salt: str | None,
        priority: int,
        *,
        counted: bool = True,
    ) -> None:
        self._cache = cache
        self._epoch = cache._epoch
        self._page_size = cache.page_size
        self._extra_key = extra_key
        self._cache_salt = cache_salt
        self._priority = as_priority(priority)
        self._tokens = tokens
        self._length = len(tokens)
        # At least one token of the prompt is left to compute.
        self._usable = max(self._length - 1, 0) // self._page_size * self._page_size
        self._ended = False
        self._computing = False
        self._hits_counted = not counted
        # Pages of the positions from 0 on; the first `_borrowed` are the tree's, the others our own.
        self._pages = np.empty(0, np.uint32)
        self._borrowed = 0
        self._counted = 0  # tokens whose nodes have got this request's hit
        self._device_lock: LockReceipt | None = None
        self._host_lock: HostLockReceipt | None = None
        self._loads: list[CacheOperation] = []  # that fill our pages, and whose end was not seen yet
        # Loads that a forward was launched on, and how often each had failed by then.
        self._relied_on: list[tuple[CacheOperation, int]] = []
        self._loaded_tokens = 0
        self._retracted: RetractedPages | None = None
        self._retracted_tokens = 0  # of the tree, at the front
        # When computing the prompt began, and with which token; None: not measured (any more).
        self._computing_since: float | None = None
        self._computing_from = 0
        self._prefetch: Prefetch | None = None
        self._storage_hit = 0
        self._stored = 0
        match = self._match()
        self._host_hit = match.host_hit_length
        try:
            self._ask_storage(match)
        except BaseException:
            self._unlock()  # nobody gets to see this request, so nobody else can
            raise

    def _ask_storage(self, match: Match) -> None:
        """Try again to write what is there, and begin to read what is not."""
        self._cache._retry_storage(match.last_host_node)
        known = match.device_length + match.host_hit_length
        if self._usable > known:
            self._prefetch = self._cache._start_prefetch(
                self._tokens[: self._usable],
                known // self._page_size,
                match.last_host_node,
                (self._extra_key, self._cache_salt),
                self._priority,
            )
        if self._prefetch is not None:
            self._stored = self._cache._known_stored(self._prefetch)

    # What is there

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """The tokens of the request so far."""
        return self._tokens[: self._length].copy()

    @property
    def pages(self) -> npt.NDArray[np.uint32]:
        """The device pages of the request so far, those of the tree first."""
        return self._pages.copy()

    @property
    def device_length(self) -> int:
        """Tokens at the front that are on device: all that need not be computed or written."""
        return self._borrowed * self._page_size

    @property
    def host_hit_length(self) -> int:
        """Tokens right after those on device that were on host at the begin."""
        return self._host_hit

    @property
    def stored_length(self) -> int:
        """Tokens after those on host that storage was known to hold at the begin, before it was asked.

        A hint for whoever admits requests; 0 if storage is not asked, since it would not pay or can not be.
        """
        return self._stored

    @property
    def storage_hit_length(self) -> int:
        """Tokens after those on host that came from storage; 0 until the prefetch has ended."""
        if self._prefetch is not None:
            return self._prefetch.inserted_pages * self._page_size
        return self._storage_hit

    @property
    def loaded(self) -> bool:
        """The bytes of all pages that were loaded are there (or their copy has failed: `wait` says so)."""
        self._check()
        return self._cache._controller.loaded(self._loads)

    def wait(self) -> None:
        """Wait until the bytes of all pages that were loaded are there.

        Call it before a forward reads them; it costs nothing if no copy is under way.

        Raises:
            CopyError: a copy failed. It is made again while somebody uses its pages, so this may be called
                again.
        """
        self._check()
        controller = self._cache._controller
        if self._loads:
            controller.wait_loads(self._loads)
            self._loads = []
        if self._retracted is not None and not self.retracted:
            # Its bytes are there, and one more look at what has ended says so.
            self._retracted.settle()
            self._retracted = None
        if self._computing_since is not None:
            self._computing_since = self._cache._clock()

    wait_loaded = wait

    # Storage

    def prefetch_done(self) -> bool:
        """The request need not wait for storage (any longer): everything was read, or the policy says so."""
        self._check()
        return self._prefetch is None or self._cache._prefetch_over(self._prefetch)

    def wait_prefetch(self) -> int:
        """Tick until `prefetch_done`, and end the prefetch; returns `storage_hit_length`."""
        self._check()
        if self._prefetch is not None:
            self._cache._wait_prefetch(self._prefetch)
        return self.storage_hit_length

    # Host to device

    def load_back(self, quota: int | None = None) -> int:
        """Bring what is on host to device; returns the tokens by which `device_length` has grown.

        All or nothing. Ends a prefetch that is under way: what it has read so far is loaded too. The copy
        is only begun here: `wait` before a forward reads its pages.

        Args:
            quota: the most tokens that may be loaded; None: no limit.

        Raises:
            ArgumentError: a quota that is not an integer, or a negative one.
            LockError: the request computes its tokens already.
        """
        self._check()
        if quota is not None:
            quota = as_count(quota, "quota")
        if self._computing:
            raise LockError(
                "load_back comes before the first extend: the request computes its tokens already"
            )
        before = self.device_length
        if self._prefetch is not None:
            self._cache._stop_prefetch(self._prefetch)
        match = self._match()
        self._release_prefetch()
        if match.host_hit_length:
            self._loaded_tokens += self._cache._load_back(match.last_host_node, quota, self._priority)
            self._match()
        return self.device_length - before

    # Computing

    def extend(self, tokens: Any = ()) -> npt.NDArray[np.uint32]:
        """Add tokens to the request, and pages so that all its tokens have a slot; returns `pages`.

        Token i lies in slot ``i % page_size`` of page ``pages[i // page_size]``. The engine then computes
        what is past `device_length` and was not computed before.

        Args:
            tokens: the tokens to add; none the first time, for the prompt alone.

        Raises:
            ArgumentError: a token out of range.
            CapacityError: no room on device, even after evicting what may go; nothing was added.
        """
        self._check()
        self._check_on_device("extend")
        more = as_tokens(tokens)
        length = self._length + len(more)
        missing = -(-length // self._page_size) - len(self._pages)
        if missing > 0:
            self._pages = np.concatenate((self._pages, self._cache._controller.alloc(missing)))
        if self._computing and len(more):
            self._computing_since = None  # from here on it is answers that are computed
        self._begin_computing()
        if length > len(self._tokens):
            grown = np.empty(max(length, 2 * len(self._tokens)), np.uint32)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : length] = more
        self._length = length
        return self.pages

    def insert(self, *, chunked: bool = False, computed: int | None = None) -> None:
        """Give what was computed so far to the tree, so that others can hit it.

        `pages` then are the tree's where it had the same tokens already, and those may still be on their
        way: call `wait` before the next forward.

        Args:
            chunked: a part of a prompt still being computed; it gets no hit yet.
            computed: tokens whose K and V are in their slots; None: all.

        Raises:
            ArgumentError: `computed` is not an integer, or more than have a slot.
            CopyError: what was loaded for the forward, or computed before a `retract`, did not arrive; only
                `abort` is left.
        """
        self._check()
        self._check_on_device("insert")
        self._check_relied_on()
        if self._retracted is not None:
            # Our own pages are on their way back, and nobody may hit them before they are there.
            self.wait()
        ready = self._length if self._computing else self.device_length
        if computed is None:
            computed = ready
        try:
            count = operator.index(computed)
        except TypeError:
            count = -1
        if not 0 <= count <= ready:
            raise ArgumentError(f"computed must be an integer in 0..{ready}, not {computed!r}")
        computed = max(count, self.device_length)
        cache, whole = self._cache, computed // self._page_size
        inserted = cache._insert(
            self._tokens[:computed],
            self._pages[:whole],
            prev_prefix_len=self.device_length,
            inserted_len=self._counted,
            extra_key=self._extra_key,
            cache_salt=self._cache_salt,
            priority=self._priority,
            chunked=chunked,
        )
        self._pages[:whole] = inserted.device_pages
        self._borrowed = whole
        if not chunked:
            self._counted = computed
        lock = cache.tree.inc_lock_ref(inserted.node)
        self._unlock()
        self._device_lock = lock
        # Somebody else may just be loading what we have computed, and we hold their pages now.
        if inserted.pending_ack is not None:
            self._loads = cache._controller.loads_under(inserted.node)
        self._prefill_ended(computed)

    # Off the device and back

    @property
    def retracted(self) -> bool:
        """The request was taken off the device, and `resume` has not put it back."""
        return self._retracted is not None and self._retracted.state in ("leaving", "away")

    def retract(self) -> None:
        """Take the request off the device: what it computed goes to host, in pages of its own, and comes
        back as it was.

        Its device pages are free once that copy has ended, which `UnifiedCache.alloc` waits for if it needs
        them. What it borrowed from the tree stays there, on device or on host.

        Raises:
            ArgumentError: there is no host tier.
            CapacityError: no room on host; nothing has changed.
            CopyError: pages that an earlier `resume` was to bring back did not arrive; only `abort` is left.
            LockError: it computes nothing yet, or was retracted before.
        """
        self._check()
        self._check_on_device("retract")
        if not self._computing or self._device_lock is None:
            raise LockError("retract comes after the first extend: the request has no pages of its own yet")
        if self._retracted is not None:
            self.wait()
        cache, node, own = self._cache, self._device_lock.node, self._pages[self._borrowed :]
        self._retracted = RetractedPages(cache._controller, own)
        # The tree's part may leave the device too, and must not be lost: one lock on its end is enough for
        # that.
        cache._controller.want_backup([node])
        self._host_lock = cache.tree.inc_host_lock_ref(node)
        self._retracted_tokens = self.device_length
        self._release_device_lock()
        self._pages, self._borrowed, self._loads = np.empty(0, np.uint32), 0, []
        self._computing_since = None
        cache._counters.requests_retracted += 1

    def resume(self) -> None:
        """Put a retracted request back on device; `wait` before a forward reads its pages.

        Raises:
            CapacityError: no room on device; it is retracted as before.
            LockError: it is not retracted.
        """
        self._check()
        if self._retracted is None or not self.retracted:
            raise LockError("resume comes after retract: the request is on device")
        cache, tree = self._cache, self._cache.tree
        match = self._look_up(self._retracted_tokens)
        lock = tree.inc_lock_ref(match.last_device_node)
        try:
            if match.host_hit_length:
                if not cache._load_back(match.last_host_node, None, self._priority, always=True):
                    raise CapacityError(
                        f"no room on device for {match.host_hit_length} tokens of the request"
                    )
                match = self._look_up(self._retracted_tokens)
                longer = tree.inc_lock_ref(match.last_device_node)
                tree.dec_lock_ref(lock)
                lock = longer
            own, load = self._retracted.come_back(priority=self._priority)
        except BaseException:
            tree.dec_lock_ref(lock)
            raise
        self._device_lock = lock
        self._release_host_lock()
        self._pages = np.concatenate((match.device_pages, own))
        self._borrowed = len(match.device_pages)
        if match.pending_ack is not None:
            self._loads = cache._controller.loads_under(match.last_device_node)
        if load is not None:
            self._loads = [*self._loads, load]

    # The end

    def finish(self, *, computed: int | None = None) -> None:
        """Insert what was computed, and give everything back.

        Args:
            computed: tokens whose K and V are in their slots; None: all.

        Raises:
            LockError: the request has ended before.
        """
        self._check()
        self.insert(computed=computed)
        self._give_back()
        self._cache._counters.requests_finished += 1

    def abort(self) -> None:
        """Give everything back without inserting, at any point; nothing to do once the request has ended."""
        if self._ended:
            return
        if self._epoch != self._cache._epoch or self._cache.closed:
            self._ended = True
            return
        self._give_back()
        self._cache._counters.requests_aborted += 1

    def _give_back(self) -> None:
        self._ended = True
        self._unlock()
        own = self._pages[self._borrowed :]
        self._loads = []
        self._pages = np.empty(0, np.uint32)
        self._borrowed = 0
        self._cache._active.discard(self)
        self._release_prefetch()
        if self._retracted is not None:
            # While they return, the first of our own pages are held there.
            own = own[self._retracted.device_pages :]
            self._retracted.give_up()
            self._retracted = None
        # Last, since it is refused if the caller has freed one of them already.
        self._cache._controller.free_device(own)

    # Inside

    def _check(self) -> None:
        self._cache._check_open()
        if self._epoch != self._cache._epoch:
            raise LockError("the request is from before a reset of the cache")
        if self._ended:
            raise LockError("the request has ended before: it was finished or aborted")

    def _look_up(self, length: int) -> Match:
        return self._cache.tree.match_prefix(
            self._tokens[:length], extra_key=self._extra_key, cache_salt=self._cache_salt
        )

    def _match(self) -> Match:
        """Look the prompt up, hold what is there, and let go of what was held before."""
        tree = self._cache.tree
        match = self._look_up(self._usable)
        device_lock = tree.inc_lock_ref(match.last_device_node)
        # One lock at the end holds all host pages of the path: a node with children is no host leaf.
        host_lock = tree.inc_host_lock_ref(match.last_host_node) if match.host_hit_length else None
        self._unlock()
        self._device_lock, self._host_lock = device_lock, host_lock
        self._pages = match.device_pages
        self._borrowed = len(self._pages)
        self._loads = []
        if match.pending_ack is not None:
            self._loads = self._cache._controller.loads_under(match.last_device_node)
        return match

    def _unlock(self) -> None:
        self._release_device_lock()
        self._release_host_lock()

    def _release_device_lock(self) -> None:
        if self._device_lock is not None:
            self._cache.tree.dec_lock_ref(self._device_lock)
            self._device_lock = None

    def _release_host_lock(self) -> None:
        if self._host_lock is not None:
            self._cache.tree.dec_host_lock_ref(self._host_lock)
            self._host_lock = None

    def _check_on_device(self, step: str) -> None:
        if self.retracted:
            raise LockError(
                f"{step}: the request was retracted, so its pages are not on device: resume it first"
            )

    def _release_prefetch(self) -> None:
        if self._prefetch is not None:
            self._cache._release_prefetch(self._prefetch)
            self._storage_hit = self._prefetch.inserted_pages * self._page_size
            self._prefetch = None

    def _begin_computing(self) -> None:
        """From now on the request computes what it has not got: count where the rest came from."""
        if self._computing:
            return
        self._computing = True
        self._release_prefetch()
        self._release_host_lock()
        self._computing_since, self._computing_from = self._cache._clock(), self.device_length
        if self._hits_counted:
            return
        self._hits_counted = True
        counters = self._cache._counters
        # What was loaded came from the tail of the prefetch as far as that goes, the rest was on host.
        from_storage = min(self._storage_hit, self._loaded_tokens)
        counters.asked_tokens += self._length
        counters.hit_tokens_storage += from_storage
        counters.hit_tokens_host += self._loaded_tokens - from_storage
        counters.hit_tokens_device += self.device_length - self._loaded_tokens

    def _rely_on_loads(self) -> None:
        """A forward that reads what is being loaded is launched, without waiting for it here."""
        self._relied_on += [(load, load.failures) for load in self._loads]

    def _check_relied_on(self) -> None:
        """What forwards were launched on has arrived at the first attempt, or they read other bytes."""
        for load, failures in self._relied_on:
            if not load.done:
                self._cache._controller.wait_loads([load])
            if load.failed is not None or load.failures != failures:
                raise CopyError(f"the load copy of {load.pages} pages failed under a forward: {load.failed}")
        self._relied_on = []

    def _prefill_ended(self, computed: int) -> None:
        """The prompt, or its first chunk, was computed: that took so long."""
        if self._computing_since is None:
            return
        rates, seconds = self._cache._rates, self._cache._clock() - self._computing_since
        self._computing_since = None
        if not rates.reported:
            rates.prefilled(computed - self._computing_from, seconds)
