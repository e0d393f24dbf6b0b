"""What stands between the cache and any backend: pages in, pages out, and nothing wrong in between.

The guard makes objects of pages (header, checksum, compression), takes them apart again, and makes statuses
of whatever a backend does. It runs on the thread of its caller; a call that its backend holds up is seen
from outside, by `StorageGuard.watch`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from unified_cache.errors import StorageError
from unified_cache.storage.breaker import Breaker
from unified_cache.storage.compression import NO_CODEC, Codec, codec_named, installed_codecs
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus
from unified_cache.storage.page_format import (
    HEADER_BYTES,
    CheckedObject,
    check_objects,
    checksums_of,
    write_headers,
)

__all__ = ["GRACE", "StorageCounts", "StorageGuard"]

_T = TypeVar("_T")
_Addresses = npt.NDArray[np.uint64]

_STATUSES = tuple(PageStatus)
# A call that takes longer than its deadline by this much has ended too late, whatever it says.
GRACE = 1.2
# By this much it is given up from outside: whoever waits is told by a tick, which takes its time too.
_GIVEN_UP = 1.15
# Memory that one thread takes for compressed pages, at most (or a page).
_SCRATCH_BYTES = 32 << 20


class StorageCounts:
    """What calls to storages came to, by name; numbers only go up. Used by several threads."""

    _NAMES = (
        *(f"storage_get_{status.value}" for status in PageStatus if status is not PageStatus.FULL),
        *(f"storage_set_{status.value}" for status in PageStatus if status is not PageStatus.MISS),
        "storage_exists_calls",
        "storage_get_calls",
        "storage_set_calls",
        "storage_failed_calls",
        "storage_late_calls",  # past their deadline
        "storage_refused_calls",  # not made, since those before had failed
        "storage_read_bytes",  # of objects, as they are stored
        "storage_stored_bytes",  # likewise
        "storage_page_bytes",  # of the pages in these, before compression
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(self._NAMES, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        with self._lock:
            self._counts[name] += count

    def statuses(self, call: str, statuses: Sequence[PageStatus]) -> None:
        """Count what became of the objects of a call."""
        left = len(statuses)
        with self._lock:
            for status in _STATUSES:
                if not left:
                    break
                if found := statuses.count(status):
                    self._counts[f"storage_{call}_{status.value}"] += found
                    left -= found

    def as_dict(self) -> dict[str, int]:
        """A copy."""
        with self._lock:
            return dict(self._counts)


@dataclass(eq=False, slots=True)
class _Call:
    """One call to the backend that has not returned."""

    owner: object
    thread: str
    started: float
    late: bool = field(default=False)


class StorageGuard:
    """Pages, kept in one backend, which is the guard's to close.

    No call raises for what a backend does. After `close`, and while the breaker is open, every call is a
    miss or an error at once.

    Args:
        backend: where they are.
        object_bytes: bytes of the largest page (or of a head group of it).
        deadline: seconds that a call to the backend may take.
        clock: seconds; called from several threads.
        counts: counts.
        compression: None, or the name of a codec for what is stored from now on.
        breaker: None: one with this clock.

    Raises:
        MissingDependencyError: the codec is not installed.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        object_bytes: int,
        deadline: float,
        clock: Callable[[], float],
        counts: StorageCounts,
        compression: str | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        self.backend = backend
        self.object_bytes = object_bytes
        self.breaker = Breaker(clock) if breaker is None else breaker
        self._deadline = deadline
        self._clock = clock
        self._counts = counts
        self._codec = codec_named(compression)
        # Whatever is written now: what was stored with another setting can be read.
        self._codecs: dict[int, Codec | None] = {NO_CODEC: None, **installed_codecs()}
        self._lock = threading.Lock()
        self._running: set[_Call] = set()
        self._closing = False
        self._memories: Sequence[memoryview] = ()

    def register(self, *memories: memoryview) -> None:
        """Pages lie in these memories; they are held until the backend is closed.

        Raises:
            StorageError: the backend can not use one, or has no room for a single page.
        """
        self.backend.expect(self.object_bytes)
        for memory in memories:
            self.backend.register(memory)
        self._memories = memories

    # Calls

    def exists(self, runs: Sequence[Sequence[str]], owner: object = None) -> list[int] | None:
        """For each run how many of its first objects are stored; None if nobody can tell."""
        self._counts.add("storage_exists_calls")
        with contextlib.suppress(_NoAnswerError):
            found, late = self._call(owner, lambda: self._exists(runs))
            return None if late else found
        return None

    def get(
        self,
        keys: Sequence[str],
        bodies: Sequence[memoryview],
        addresses: _Addresses,
        owner: object = None,
    ) -> list[PageStatus]:
        """Read objects into `bodies`, which hold anything after it where the status is no HIT.

        One call to the backend for each size that there is among them.
        """
        return _by_size(self._get_alike, keys, bodies, addresses, owner)

    def _get_alike(
        self, keys: Sequence[str], bodies: Sequence[memoryview], addresses: _Addresses, owner: object
    ) -> list[PageStatus]:
        self._counts.add("storage_get_calls")
        try:
            statuses, late = self._call(owner, lambda: self._get(keys, bodies, addresses))
        except _NoAnswerError as error:
            statuses = [error.status] * len(keys)
        else:
            if late:
                # What protected these bytes may be over: a lease, or the patience of whoever waited.
                statuses = [PageStatus.TIMEOUT if s is PageStatus.HIT else s for s in statuses]
        self._counts.statuses("get", statuses)
        return statuses

    def ask(self, work: Callable[[], _T], owner: object = None) -> _T | None:
        """Another call to the backend; None if it was not made, has failed, or came too late."""
        with contextlib.suppress(_NoAnswerError):
            # In a tuple: it is no status, whatever it is.
            ((answer,),), late = self._call(owner, lambda: [(work(),)])
            return None if late else answer
        return None

    def set(
        self,
        keys: Sequence[str],
        bodies: Sequence[memoryview],
        addresses: _Addresses,
        owner: object = None,
    ) -> list[PageStatus]:
        """Store objects; those that are there already stay as they are, and are HITs.

        One call to the backend for each size that there is among them.
        """
        return _by_size(self._set_alike, keys, bodies, addresses, owner)

    def _set_alike(
        self, keys: Sequence[str], bodies: Sequence[memoryview], addresses: _Addresses, owner: object
    ) -> list[PageStatus]:
        self._counts.add("storage_set_calls")
        try:
            statuses, _ = self._call(owner, lambda: self._set(keys, bodies, addresses))
        except _NoAnswerError as error:
            statuses = [error.status] * len(keys)
        self._counts.statuses("set", statuses)
        return statuses

    def _call(self, owner: object, work: Callable[[], list[_T]]) -> tuple[list[_T], bool]:
        """What a call comes to, and whether it came too late.

        Raises:
            _NoAnswerError: it was not made, or has failed.
        """
        call = self._enter(owner)
        try:
            answer = work()
        except BaseException as error:  # whatever a client of some engine raises, a panic and sys.exit too
            timeout = isinstance(error, TimeoutError)
            self._counts.add("storage_failed_calls")
            self._ended(call, failed=True, timeout=timeout)
            if isinstance(error, KeyboardInterrupt):
                raise
            raise _NoAnswerError(PageStatus.TIMEOUT if timeout else PageStatus.ERROR) from error
        else:
            unanswered = (PageStatus.ERROR, PageStatus.TIMEOUT)
            failed = bool(answer) and all(status in unanswered for status in answer)
            timeout = failed and PageStatus.TIMEOUT in answer
            return answer, self._ended(call, failed=failed, timeout=timeout)
        finally:
            self._leave(call)

    def _enter(self, owner: object) -> _Call:
        call = _Call(owner, threading.current_thread().name, self._clock())
        with self._lock:
            if self._closing or not self.breaker.allow():
                self._counts.add("storage_refused_calls")
                raise _NoAnswerError(PageStatus.ERROR)
            self._running.add(call)
        return call

    def _leave(self, call: _Call) -> None:
        with self._lock:
            self._running.discard(call)
            last = self._closing and not self._running
        if last:
            self._close_backend()  # `close` has not waited for this call

    def _ended(self, call: _Call, *, failed: bool, timeout: bool) -> bool:
        late = call.late or self._clock() - call.started > self._deadline * GRACE
        if call.late:
            pass  # `watch` has said so
        elif failed or late:
            if late:
                self._counts.add("storage_late_calls")
            self.breaker.failed(timeout=timeout or late)
        else:
            self.breaker.succeeded()
        return late

    def _exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        found = self.backend.exists(runs)
        if len(found) != len(runs) or any(not 0 <= n <= len(run) for n, run in zip(found, runs, strict=True)):
            raise StorageError(f"the backend found {found} of {[len(run) for run in runs]} objects")
        return found

    def _get(
        self, keys: Sequence[str], bodies: Sequence[memoryview], addresses: _Addresses
    ) -> list[PageStatus]:
        count, page_bytes = len(keys), _bytes_of(bodies)
        headers = np.zeros((count, HEADER_BYTES), np.uint8)
        sizes = np.full(count, page_bytes, np.uint64)
        checksums = checksums_of(headers) if self.backend.makes_checksums else None
        batch = ObjectBatch(keys, headers, bodies, addresses, sizes, np.zeros(count, np.uint64), checksums)
        statuses = self._checked(self.backend.get(batch), count)
        stored = batch.stored_sizes.tolist()
        if max(stored, default=0) > page_bytes:
            for at, size in enumerate(stored):
                if size > page_bytes and statuses[at] is PageStatus.HIT:
                    statuses[at] = PageStatus.CORRUPT
        whole = statuses.count(PageStatus.HIT) == count
        read = range(count) if whole else [at for at, s in enumerate(statuses) if s is PageStatus.HIT]
        if read:
            checked = check_objects(
                headers if whole else headers[read],
                keys if whole else [keys[at] for at in read],
                bodies if whole else [bodies[at] for at in read],
                stored if whole else [stored[at] for at in read],
                page_bytes,
                tuple(self._codecs),
                checksums if whole or checksums is None else checksums.only(read),
            )
            self._counts.add("storage_read_bytes", self._unpack(statuses, read, checked, bodies, stored))
        if PageStatus.CORRUPT in statuses:
            damaged = [keys[at] for at, status in enumerate(statuses) if status is PageStatus.CORRUPT]
            # Out of the way, so that they are written again when they were computed again.
            with contextlib.suppress(Exception):
                self.backend.discard(damaged)
        return statuses

    def _unpack(
        self,
        statuses: list[PageStatus],
        read: Sequence[int],
        checked: Sequence[CheckedObject],
        bodies: Sequence[memoryview],
        stored: Sequence[int],
    ) -> int:
        """Make pages of the objects that were read; statuses say what came of it. Returns their bytes."""
        first, page_bytes = checked[0], _bytes_of(bodies)
        if (
            len(read) == len(stored) == checked.count(first) == stored.count(page_bytes)
            and first.status is PageStatus.HIT
            and first.codec == NO_CODEC
        ):
            # As a rule: all of them lie there as they should.
            return len(stored) * (page_bytes + HEADER_BYTES)
        total = 0
        for at, found in zip(read, checked, strict=True):
            statuses[at] = found.status
            if found.status is PageStatus.HIT:
                total += stored[at] + HEADER_BYTES
                as_it_is = found.codec == NO_CODEC and stored[at] == page_bytes
                if not as_it_is and not self._decompress(found.codec, bodies[at], stored[at]):
                    statuses[at] = PageStatus.CORRUPT
        return total

    def _decompress(self, number: int, body: memoryview, stored: int) -> bool:
        codec = self._codecs[number]
        if codec is None:
            return stored == body.nbytes
        return codec.decompress(bytes(body[:stored]), body)

    def _set(
        self, keys: Sequence[str], bodies: Sequence[memoryview], addresses: _Addresses
    ) -> list[PageStatus]:
        page_bytes = _bytes_of(bodies)
        if self._codec is None:
            sizes = np.full(len(keys), page_bytes, np.uint64)
            return self._put(keys, bodies, addresses, sizes, [NO_CODEC] * len(keys))
        step = max(_SCRATCH_BYTES // max(page_bytes, 1), 1)
        scratch = np.empty((min(step, len(keys)), page_bytes), np.uint8)
        statuses: list[PageStatus] = []
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            statuses += self._put_compressed(self._codec, scratch, keys[part], bodies[part], addresses[part])
        return statuses

    def _put_compressed(
        self,
        codec: Codec,
        scratch: npt.NDArray[np.uint8],
        keys: Sequence[str],
        bodies: Sequence[memoryview],
        addresses: _Addresses,
    ) -> list[PageStatus]:
        page_bytes = _bytes_of(bodies)
        views, places, codecs = list(bodies), addresses.copy(), [NO_CODEC] * len(keys)
        sizes = np.full(len(keys), page_bytes, np.uint64)
        for at, body in enumerate(bodies):
            packed = codec.compress(body)
            if len(packed) < page_bytes:
                view = memoryview(scratch[at])
                view[: len(packed)] = packed
                views[at], sizes[at], codecs[at] = view, len(packed), codec.number
                places[at] = scratch.ctypes.data + at * page_bytes
        return self._put(keys, views, places, sizes, codecs)

    def _put(
        self,
        keys: Sequence[str],
        bodies: Sequence[memoryview],
        addresses: _Addresses,
        sizes: npt.NDArray[np.uint64],
        codecs: Sequence[int],
    ) -> list[PageStatus]:
        headers, page_bytes = np.empty((len(keys), HEADER_BYTES), np.uint8), _bytes_of(bodies)
        stored = sizes.tolist()
        checksums = write_headers(headers, keys, stored, page_bytes, codecs)
        makes = self.backend.makes_checksums
        if not makes:
            checksums.make(range(len(keys)), [body[:size] for body, size in zip(bodies, stored, strict=True)])
        batch = ObjectBatch(keys, headers, bodies, addresses, sizes, checksums=checksums if makes else None)
        statuses = self._checked(self.backend.set(batch), len(keys))
        hits = [at for at, status in enumerate(statuses) if status is PageStatus.HIT]
        self._counts.add("storage_stored_bytes", sum(stored[at] + HEADER_BYTES for at in hits))
        self._counts.add("storage_page_bytes", len(hits) * page_bytes)
        return statuses

    def _checked(self, statuses: list[PageStatus], count: int) -> list[PageStatus]:
        if len(statuses) != count:
            raise StorageError(f"the backend answered {len(statuses)} statuses for {count} objects")
        return list(statuses)

    # From outside

    @property
    def available(self) -> bool:
        """A call would be made now."""
        return not self._closing and not self.breaker.refuses

    @property
    def busy(self) -> bool:
        """A call has not returned."""
        with self._lock:
            return bool(self._running)

    @property
    def stuck(self) -> list[str]:
        """The threads whose calls are past their deadline."""
        with self._lock:
            return sorted(call.thread for call in self._running if call.late)

    def watch(self) -> list[object]:
        """The owners of calls that have gone past their deadline since the last look."""
        limit = self._clock() - self._deadline * _GIVEN_UP
        with self._lock:
            late = [call for call in self._running if not call.late and call.started < limit]
            for call in late:
                call.late = True
        for _ in late:
            self._counts.add("storage_late_calls")
            self.breaker.failed(timeout=True)
        return [call.owner for call in late]

    def close(self) -> None:
        """Close the backend, or leave that to the call that returns last. More than once is fine."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            running = bool(self._running)
        if not running:
            self._close_backend()

    def _close_backend(self) -> None:
        try:
            self.backend.close()
        except Exception:
            # It is as closed as it can be. Who closes has others to close, or is a thread that nobody hears.
            self._counts.add("storage_failed_calls")
        finally:
            self._memories = ()


def _bytes_of(bodies: Sequence[memoryview]) -> int:
    """Bytes of each of these, which are alike."""
    return bodies[0].nbytes if bodies else 0


def _by_size(
    call: Callable[[Sequence[str], Sequence[memoryview], _Addresses, object], list[PageStatus]],
    keys: Sequence[str],
    bodies: Sequence[memoryview],
    addresses: _Addresses,
    owner: object,
) -> list[PageStatus]:
    """What a call says of these objects, which is made once for those of each size."""
    sizes = list(map(len, bodies))  # of bytes
    if sizes.count(sizes[0] if sizes else 0) == len(sizes):
        return call(keys, bodies, addresses, owner)
    found: dict[int, PageStatus] = {}
    for size in dict.fromkeys(sizes):
        alike = [at for at, each in enumerate(sizes) if each == size]
        statuses = call([keys[at] for at in alike], [bodies[at] for at in alike], addresses[alike], owner)
        found.update(zip(alike, statuses, strict=True))
    return [found[at] for at in range(len(sizes))]


class _NoAnswerError(Exception):
    """The backend did not answer a call, or was not asked."""

    def __init__(self, status: PageStatus) -> None:
        super().__init__(status)
        self.status = status
