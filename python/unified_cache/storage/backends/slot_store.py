"""A store of slots of one size: what `file`, `mmap` and `shm` have in common.

The files of a store, after its prefix: ``.data`` the bodies, ``.table`` keys and headers, ``.index`` what
processes agree through, ``.lock``; and ``.prefixes``, which says of what prefixes the objects are pages.
First an object's body is made durable, then its record, and then the index says that it is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from unified_cache.errors import StorageError
from unified_cache.storage.backends.calls import RunningCalls
from unified_cache.storage.backends.io_threads import IoThreads
from unified_cache.storage.backends.mediums import Bodies, Medium
from unified_cache.storage.backends.process_locks import LockTimeoutError, ProcessLocks
from unified_cache.storage.backends.slot_index import (
    SWEEP,
    SlotGeometry,
    SlotIndex,
    read_geometry,
    runs_of,
    write_geometry,
)
from unified_cache.storage.backends.slot_records import HEADER_BYTES, U64, pack_keys
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus, PrefixLog
from unified_cache.storage.prefix_log import FileLog

__all__ = ["SlotStore"]

# Bodies that one preadv takes. Longer calls keep a disk busier: on a virtual one this is 0.96 of the best
# plain preadv, half of it 0.94, twice as much 0.98. Shorter ones leave less to hash when the last bytes have
# come, and something to take for threads that are done.
_JOINED_BYTES = 4 << 20
_MOST_JOINED = 256  # the system takes 1024
_LAST_PART = 0.1  # of the deadline
_MISFIT = -2  # of `Located`
_NO_STORE = "there is no store yet: add size=, bytes such as 100GB"

Slots = npt.NDArray[np.int64]


class _Open:
    """Index and medium of a store whose slots have a size."""

    def __init__(self, index: SlotIndex, medium: Medium) -> None:
        self.index = index
        self.medium = medium

    def close(self) -> None:
        self.index.close()
        self.medium.close()


class SlotStore(Backend):
    """Objects in slots of one preallocated file.

    The size of a slot, if it is not given, is that of the longest body that is expected, or in the first
    batch. A longer body than a slot is an ERROR of its object.

    Args:
        prefix: path of the store's files, up to their endings.
        size: bytes that all its files together may have; None takes that of the store that is there.
        slot_bytes: the longest body, rounded up to 4096; None: of the store that is there, or see above.
        evict: make room by forgetting objects that were not read for long; else what does not fit is FULL.
        threads: that read and write bodies; 1: the caller's alone.
        deadline: seconds that a call waits, in all, for a process that holds the store's lock.
        durable: whether writes have to be told to reach the medium.
        open_medium: the medium for the path of the ``.data`` file.

    Raises:
        StorageError: the files can not be made or used; what was tried, what came back, what to change.
    """

    makes_checksums: ClassVar[bool] = True

    def __init__(
        self,
        prefix: str,
        size: int | None,
        slot_bytes: int | None,
        evict: bool,
        threads: int,
        deadline: float,
        durable: bool,
        open_medium: Callable[[str], Medium],
    ) -> None:
        self._prefix = prefix
        self._evict = evict
        self._deadline = deadline
        self._durable = durable
        self._open_medium = open_medium
        self._calls = RunningCalls(f"the storage {self.scheme}:// at {prefix}")
        self._opening = threading.Lock()
        self._open: _Open | None = None
        self._size = 0
        self._expected = 0  # bytes of the longest body that was said to come
        self._orphans: list[Slots] = []  # taken, and then the lock could not be had to give them back
        self._counts = {"too_large": 0, "io_errors": 0}
        with self._clear_errors():
            if size is None and not os.path.exists(f"{prefix}.table"):
                raise StorageError(_NO_STORE)  # and leave no files where somebody only wanted to look
            os.makedirs(os.path.dirname(prefix), exist_ok=True)
            self._locks = locks = ProcessLocks(f"{prefix}.lock")
        try:
            with self._clear_errors(), locks.mutex(self._end()):
                self._attach(size, slot_bytes)
        except BaseException:
            self._close_store()
            locks.close()
            raise
        self._threads = IoThreads(threads, f"unified-cache {self.scheme}")

    def _end(self) -> float:
        """When a call that begins now has to have ended: it waits for the lock more than once."""
        return self._locks.clock() + self._deadline

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            raise StorageError(f"storage {self.scheme}:// at {self._prefix}: {error}") from None
        except LockTimeoutError:
            raise StorageError(
                f"storage {self.scheme}:// at {self._prefix}: another process has held {self._prefix}.lock "
                f"for {self._deadline:g} s: end it, or look why it is stuck"
            ) from None
        except OSError as error:
            change = {
                errno.ENOSPC: "give a smaller size=, or make room",
                errno.EFBIG: "give a smaller size=",
                errno.EACCES: "name a place that this process may write to",
                errno.EROFS: "name a place that this process may write to",
                errno.EMFILE: "raise the limit of open files (ulimit -n)",
            }.get(error.errno or 0, "name a place on a local file system that this process may write to")
            raise StorageError(
                f"storage {self.scheme}:// at {self._prefix} can not be used "
                f"({error.strerror or error}): {change}"
            ) from None

    # Opening. The caller holds the mutex.

    def _attach(self, size: int | None, slot_bytes: int | None) -> None:
        table = os.open(f"{self._prefix}.table", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            geometry = read_geometry(table)
            if geometry is None:
                self._allocate(size)
                assert size is not None
                self._size = size
                if slot_bytes is not None:
                    geometry = self._divide(table, SlotGeometry.of(size, slot_bytes))
            else:
                self._size = geometry.size
                self._compare(geometry, size, slot_bytes)
        finally:
            os.close(table)
        if geometry is not None:
            self._open = self._open_store()

    def _compare(self, geometry: SlotGeometry, size: int | None, slot_bytes: int | None) -> None:
        slot = slot_bytes and SlotGeometry.of(geometry.size, slot_bytes).slot_bytes
        for name, given, there in (("size", size, geometry.size), ("slot", slot, geometry.slot_bytes)):
            if given is not None and given != there:
                raise StorageError(
                    f"{name}={given} was given, but the store that is there was made with {name}={there}: "
                    f"give that, or remove {self._prefix}.*"
                )

    def _allocate(self, size: int | None) -> None:
        """Take room on the medium now: a write that fails later would be too late to say so."""
        if size is None:
            raise StorageError(_NO_STORE)
        file = os.open(f"{self._prefix}.data", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size != size:
                os.ftruncate(file, 0)
                space = os.fstatvfs(file)
                if size > space.f_bavail * space.f_frsize:  # trying would fill the disk first
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                try:
                    os.posix_fallocate(file, 0, size)
                except OSError:
                    os.ftruncate(file, 0)
                    raise
        finally:
            os.close(file)

    def _divide(self, table: int, geometry: SlotGeometry) -> SlotGeometry:
        """Make the store one of slots of this size."""
        if geometry.slots < 1:
            raise StorageError(
                f"size={geometry.size} has no room for an object of {geometry.slot_bytes} bytes: give more"
            )
        # The room of table and index is taken from what was allocated.
        os.truncate(f"{self._prefix}.data", geometry.slots * geometry.slot_bytes)
        write_geometry(table, geometry)
        return geometry

    def _open_store(self) -> _Open:
        table = os.open(f"{self._prefix}.table", os.O_RDWR | os.O_CLOEXEC)
        try:
            geometry = read_geometry(table)
            assert geometry is not None
            needed, there = geometry.slots * geometry.slot_bytes, os.stat(f"{self._prefix}.data").st_size
            if there < needed:
                raise StorageError(
                    f"{self._prefix}.data has {there} bytes instead of {needed}: remove {self._prefix}.*"
                )
            medium = self._open_medium(f"{self._prefix}.data")
            try:
                index = SlotIndex(self._prefix, table, geometry, self._locks, self._durable)
            except BaseException:
                medium.close()
                raise
        except BaseException:
            os.close(table)
            raise
        return _Open(index, medium)

    def _store(self, end: float, longest_body: int | None = None) -> _Open | None:
        """Index and medium; None while nobody has stored anything. With a body's size they are made."""
        if self._open is None:
            if not self._opening.acquire(timeout=max(0.0, end - self._locks.clock())):
                raise LockTimeoutError
            try:
                self._make_store(end, longest_body)
            finally:
                self._opening.release()
        return self._open

    def _make_store(self, end: float, longest_body: int | None) -> None:
        nothing = longest_body is None and not os.path.getsize(f"{self._prefix}.table")
        if self._open is not None or nothing:
            return
        with self._locks.mutex(end):
            table = os.open(f"{self._prefix}.table", os.O_RDWR | os.O_CLOEXEC)
            try:
                if read_geometry(table) is None:
                    if longest_body is None:
                        return
                    self._divide(table, SlotGeometry.of(self._size, max(longest_body, self._expected)))
            finally:
                os.close(table)
            self._open = self._open_store()

    # The contract.

    def expect(self, body_bytes: int) -> None:
        """Refuse bodies that are longer than a slot, or than the whole store."""
        with self._calls, self._clear_errors():
            self._expected = max(body_bytes, self._expected)
            store = self._store(self._end())
            if store is None:
                if SlotGeometry.of(self._size, body_bytes).slots < 1:
                    raise StorageError(
                        f"size={self._size} has no room for an object of {body_bytes} bytes: give more"
                    )
            elif body_bytes > store.index.geometry.slot_bytes:
                raise StorageError(
                    f"pages of {body_bytes} bytes do not fit in its slots of "
                    f"{store.index.geometry.slot_bytes}: take another place, or remove {self._prefix}.*"
                )

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """For each run how many keys from the first on are stored."""
        with self._calls, self._clear_errors():
            store = self._store(self._end())
            if store is None:
                return [0] * len(runs)
            there = store.index.find([key for run in runs for key in run]) >= 0
            counts, start = [], 0
            for run in runs:
                part = there[start : start + len(run)]
                counts.append(len(run) if part.all() else int(part.argmin()))
                start += len(run)
            return counts

    def holds(self, digests: npt.NDArray[np.uint8], ending: str) -> npt.NDArray[np.bool_]:
        """Which of many objects seem to be there: of two keys with one hash of 64 bits it sees one."""
        with self._calls, self._clear_errors():
            store = self._store(self._end())
            if store is None:
                return np.zeros(len(digests), np.bool_)
            return store.index.holds(digests, ending)

    def prefix_log(self) -> PrefixLog:
        """The file ``.prefixes``."""
        return FileLog(f"{self._prefix}.prefixes", self._deadline)

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        """Read objects into the batch's memory."""
        with self._calls, self._clear_errors():
            statuses = [PageStatus.MISS] * len(batch)
            store = self._store(self._end())
            if store is None or not len(batch):
                return statuses
            index = store.index
            found = index.locate(batch)
            at = np.argsort(found.slots, kind="stable")
            slots = found.slots[at]
            if slots[0] < 0:
                for i in at[slots == _MISFIT].tolist():
                    statuses[i] = PageStatus.CORRUPT
                at = at[slots >= 0]
                slots = found.slots[at]
            words, sizes = found.words[at], found.sizes[at]
            results = self._transfer(store, batch, at, slots, sizes, write=False)
            if len(batch.stored_sizes):
                batch.stored_sizes[at] = sizes
            for i, result in zip(at.tolist(), results, strict=True):
                statuses[i] = result
            same = index.unchanged(slots, words)
            if not same.all():
                for i in at[~same].tolist():
                    statuses[i] = PageStatus.MISS
                slots = slots[same]
            index.touch(slots)
            return statuses

    def _transfer(
        self,
        store: _Open,
        batch: ObjectBatch,
        at: npt.NDArray[np.int64],
        slots: Slots,
        sizes: npt.NDArray[np.int64],
        *,
        write: bool,
    ) -> list[PageStatus]:
        """Move the bodies `at` from or to ascending slots; a status for each."""
        medium, slot_bytes = store.medium, store.index.geometry.slot_bytes
        bodies = Bodies(
            at.tolist(),
            [batch.bodies[i][:size] for i, size in zip(at.tolist(), sizes.tolist(), strict=True)],
            batch.body_addresses[at].tolist(),
            batch.checksums,
        )
        offsets = (slots * slot_bytes).tolist()
        moved = (medium.write_queued if write else medium.read_queued)(offsets, bodies)
        left = [place for place, well in enumerate(moved) if not well]
        statuses = [PageStatus.HIT] * len(moved)
        if left:
            rest = self._transfer_threaded(
                medium.write if write else medium.read,
                [offsets[place] for place in left],
                bodies.pick(left),
                self._cut(slots[left], sizes[left], slot_bytes),
            )
            for place, status in zip(left, rest, strict=True):
                statuses[place] = status
        return statuses

    def _transfer_threaded(
        self,
        move: Callable[[int, Bodies], bool | None],
        offsets: Sequence[int],
        bodies: Bodies,
        parts: Sequence[tuple[int, int]],
    ) -> list[PageStatus]:
        """Move bodies, in these parts, on the threads; a status for each body."""

        def run(part: tuple[int, int]) -> list[PageStatus]:
            begin, end = part
            status = PageStatus.HIT
            try:
                if move(offsets[begin], bodies.part(begin, end)) is False:
                    status = PageStatus.CORRUPT
            except OSError:
                status = PageStatus.ERROR
            if status is PageStatus.HIT or end - begin == 1:
                self._counts["io_errors"] += status is PageStatus.ERROR
                return [status] * (end - begin)
            # One of them is the reason; the others may be well.
            return [status for one in range(begin, end) for status in run((one, one + 1))]

        return [status for result in self._threads.run(run, parts) for status in result]

    def _cut(self, slots: Slots, sizes: npt.NDArray[np.int64], slot_bytes: int) -> list[tuple[int, int]]:
        """Parts for the threads: runs of neighbouring slots that are full."""
        longest = min(
            _MOST_JOINED, -(-len(slots) // self._threads.count), max(1, _JOINED_BYTES // slot_bytes)
        )
        parts: list[tuple[int, int]] = []
        for begin, end in runs_of(slots, longest):
            if (sizes[begin:end] == slot_bytes).all():
                parts.append((begin, end))
            else:
                parts.extend((one, one + 1) for one in range(begin, end))
        return parts

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        """Store objects from the batch's memory."""
        with self._calls, self._clear_errors():
            if not len(batch):
                return []
            end = self._end()
            try:
                store = self._store(end, int(batch.body_sizes.max()))
            except LockTimeoutError:
                return [PageStatus.TIMEOUT] * len(batch)
            assert store is not None
            packed = pack_keys(batch.keys)
            statuses = [PageStatus.HIT] * len(batch)
            try:
                with self._locked(store.index, end) as index:
                    found = index.find(batch.keys)
                    there = found[found >= 0]
                    index.touch(there)  # what is stored again is not what should go
                    at = self._usable(batch, store, np.flatnonzero(found < 0), statuses)
                    slots = index.take(len(at), self._evict, keep=there)
            except LockTimeoutError:
                return [PageStatus.TIMEOUT] * len(batch)
            for i in at[len(slots) :].tolist():
                statuses[i] = PageStatus.FULL
            if len(slots):
                slots.sort()
                self._fill(store, batch, packed, at[: len(slots)], slots, statuses, end)
            return statuses

    def _usable(
        self, batch: ObjectBatch, store: _Open, at: npt.NDArray[np.int64], statuses: list[PageStatus]
    ) -> npt.NDArray[np.int64]:
        """Those that fit in a slot."""
        fits = batch.body_sizes[at] <= store.index.geometry.slot_bytes
        if batch.headers.shape[1] > HEADER_BYTES:
            fits[:] = False
        for i in at[~fits].tolist():
            statuses[i] = PageStatus.ERROR
            self._counts["too_large"] += 1
        return at[fits]

    def _fill(
        self,
        store: _Open,
        batch: ObjectBatch,
        packed: U64,
        at: npt.NDArray[np.int64],
        slots: Slots,
        statuses: list[PageStatus],
        end: float,
    ) -> None:
        """Write objects to slots that are ours now; whatever happens they are published or given back."""
        written = np.zeros(len(slots), np.bool_)
        results = [PageStatus.ERROR] * len(slots)
        try:
            store.index.forget(slots)
            sizes = batch.body_sizes[at].astype(np.int64)
            results = self._transfer(store, batch, at, slots, sizes, write=True)
            done = np.array([result is PageStatus.HIT for result in results])
            store.medium.sync()
            some = at[done]
            store.index.write(slots[done], packed[some], batch.headers[some], batch.body_sizes[some])
            store.index.sync()
            written = done
        except OSError:
            self._counts["io_errors"] += 1
            results = [PageStatus.ERROR] * len(slots)
        finally:
            # A medium that took all the time there was leaves some for a lock that is held for microseconds.
            end = max(end, self._locks.clock() + self._deadline * _LAST_PART)
            try:
                with self._locked(store.index, end) as index:
                    index.give_back(slots[~written])
                    some = at[written]
                    whole = batch.body_sizes[some] + np.uint64(batch.headers.shape[1])
                    index.publish(slots[written], packed[some], whole)
            except LockTimeoutError:
                self._orphans.append(slots)
                results = [PageStatus.TIMEOUT] * len(slots)
            except BaseException:
                self._orphans.append(slots)
                raise
        for i, result in zip(at.tolist(), results, strict=True):
            statuses[i] = result

    @contextlib.contextmanager
    def _locked(self, index: SlotIndex, end: float) -> Iterator[SlotIndex]:
        with index.locked(end):
            while self._orphans:
                index.give_back_written(self._orphans.pop())
            yield index

    def delete(self, keys: Sequence[str]) -> int:
        """Forget objects; returns how many were there."""
        with self._calls, self._clear_errors():
            end = self._end()
            store = self._store(end)
            if store is None or not len(keys):
                return 0
            with self._locked(store.index, end) as index:
                return index.delete(keys)

    def keys(self) -> Iterator[str]:
        """The keys of all objects."""
        with self._calls, self._clear_errors():
            store = self._store(self._end())
        return iter(()) if store is None else self._keys(store)

    def _keys(self, store: _Open) -> Iterator[str]:
        for start in range(0, store.index.geometry.slots, SWEEP):
            with self._calls:
                part = store.index.keys(start)
            yield from part

    def clear(self) -> None:
        """Forget every object, and give back what processes that died had taken."""
        with self._calls, self._clear_errors():
            end = self._end()
            store = self._store(end)
            if store is not None:
                with self._locked(store.index, end) as index:
                    index.clear()
            self.prefix_log().clear()

    def stats(self) -> dict[str, int]:
        """Objects, bytes (of headers and bodies), capacity, slots, what was evicted, how bytes go."""
        with self._calls, self._clear_errors():
            store = self._store(self._end())
            if store is None:
                return {"objects": 0, "bytes": 0, "capacity_bytes": self._size, **self._counts}
            return {**store.index.stats(), **store.medium.stats(), **self._counts}

    def close(self) -> None:
        """Give back files and threads; waits for calls that run."""
        if not self._calls.close():
            return
        self._threads.close()
        if self._open is not None and self._orphans:
            with contextlib.suppress(LockTimeoutError), self._locked(self._open.index, self._end()):
                pass
        self._close_store()
        self._locks.close()

    def _close_store(self) -> None:
        if self._open is not None:
            self._open.close()
