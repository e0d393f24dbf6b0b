"""``memory://name``: objects in a dictionary, with delays and faults to order; for tests and simulation."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from unified_cache.errors import ArgumentError, StorageError
from unified_cache.storage.backends.calls import RunningCalls
from unified_cache.storage.checksums import copy_bodies
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus, PrefixLog
from unified_cache.storage.prefix_log import MemoryLog
from unified_cache.storage.urls import StorageUrl

__all__ = ["Fault", "Faults", "MemoryBackend"]


class Fault(Enum):
    """What goes wrong. The first three of a whole call, the others of one object of a get or set."""

    DOWN = "down"  # the call raises StorageError
    HANG = "hang"  # the call does not end before `MemoryBackend.release`
    SLOW = "slow"  # the call takes `slow_seconds` longer
    MISS = "miss"  # get
    FULL = "full"  # set
    ERROR = "error"
    TIMEOUT = "timeout"
    CORRUPT = "corrupt"  # get: a hit with a flipped bit, somewhere
    SHORT = "short"  # get: a hit whose body lacks its last byte


_LINE = 64
_OF_CALLS = (Fault.DOWN, Fault.HANG, Fault.SLOW)
_OF_GETS = (Fault.MISS, Fault.CORRUPT, Fault.SHORT, Fault.ERROR, Fault.TIMEOUT)
_OF_SETS = (Fault.FULL, Fault.ERROR, Fault.TIMEOUT)


def _possible(what: str) -> tuple[Fault, ...]:
    return {"get object": _OF_GETS, "set object": _OF_SETS}.get(what, _OF_CALLS)


class Faults:
    """When what goes wrong: drawn with given rates from a seed, or written down beforehand.

    Args:
        rates: probability of each fault, of each call or object that can have it.
        seed: the same calls in the same order have the same faults.
    """

    def __init__(self, rates: Mapping[Fault, float] | None = None, seed: int = 0) -> None:
        self.rates = dict(rates or {})
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._planned: dict[str, list[Fault | None]] = {}

    def plan(self, what: str, faults: Iterable[Fault | None]) -> None:
        """The next faults of one kind of place, None: none; what is planned comes before what is drawn.

        Args:
            what: ``exists``, ``get``, ``set``, ``delete``, ``clear``: calls; ``get object``, ``set object``.
            faults: in order.

        Raises:
            ArgumentError: one that can not be there.
        """
        faults = list(faults)
        if wrong := [fault for fault in faults if fault is not None and fault not in _possible(what)]:
            raise ArgumentError(f"faults of {what!r} must be of {_possible(what)}, not {wrong[0]}")
        with self._lock:
            self._planned.setdefault(what, []).extend(faults)

    def next(self, what: str) -> Fault | None:
        """The fault of this call or object."""
        possible = _possible(what)
        with self._lock:
            if planned := self._planned.get(what):
                return planned.pop(0)
            if not self.rates:
                return None
            drawn = self._random.random()
            for fault in possible:
                drawn -= self.rates.get(fault, 0.0)
                if drawn < 0:
                    return fault
            return None

    def flip(self, *parts: memoryview) -> None:
        """Flip one bit of the parts."""
        with self._lock:
            bit = self._random.randrange(8 * sum(len(part) for part in parts))
        at, bit = divmod(bit, 8)
        for part in parts:
            if at < len(part):
                part[at] ^= 1 << bit
                return
            at -= len(part)


class MemoryBackend(Backend):
    """Objects of this process alone.

    Args:
        capacity: bytes of all objects; beyond it a set is FULL. None: no limit.
        latency: seconds that each call takes at least.
        bytes_per_second: of a get or set, all threads together; None: as fast as memory.
        faults: what goes wrong.
        slow_seconds: how much longer a call with the fault SLOW takes.
        sleep: how time passes, for simulations.
    """

    scheme: ClassVar[str] = "memory"
    durable: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    makes_checksums: ClassVar[bool] = True

    def __init__(
        self,
        *,
        capacity: int | None = None,
        latency: float = 0.0,
        bytes_per_second: float | None = None,
        faults: Faults | None = None,
        slow_seconds: float = 0.1,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.faults = faults or Faults()
        self.calls: dict[str, int] = {"exists": 0, "get": 0, "set": 0, "delete": 0, "clear": 0}
        self._capacity = capacity
        self._latency = latency
        self._bytes_per_second = bytes_per_second
        self._slow_seconds = slow_seconds
        self._sleep = sleep
        self._objects: dict[str, npt.NDArray[np.uint8]] = {}
        self._log = MemoryLog()
        self._bytes = 0
        self._lock = threading.Lock()
        self._wire = threading.Lock()
        self._running = RunningCalls("the storage memory://")
        self._released = threading.Event()
        self._hanging = threading.Semaphore(0)

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        """``memory://name?latency_ms=2&gbps=1&capacity=1GB&seed=7&miss=0.01&error=0.001&hang=0``.

        The name is for people: each backend that is opened is empty. `gbps` is 10^9 bytes a second. Each
        fault is an option, its probability the value.
        """
        names = [fault.value for fault in Fault]
        url.only("latency_ms", "gbps", "capacity", "seed", "slow_ms", *names)
        rates = {fault: url.number(fault.value, 0.0, 0.0, 1.0) for fault in Fault}
        gbps = url.number("gbps", 0.0)
        return cls(
            capacity=url.size("capacity"),
            latency=url.number("latency_ms", 0.0) / 1e3,
            bytes_per_second=gbps * 1e9 if gbps else None,
            faults=Faults({fault: rate for fault, rate in rates.items() if rate}, url.integer("seed", 0)),
            slow_seconds=url.number("slow_ms", 100.0) / 1e3,
        )

    def _begin(self, call: str) -> None:
        with self._lock:
            self.calls[call] += 1
        if self._latency:
            self._sleep(self._latency)
        fault = self.faults.next(call)
        if fault is Fault.DOWN:
            raise StorageError(f"storage memory:// is down ({call}), as it was told to be")
        if fault is Fault.SLOW:
            self._sleep(self._slow_seconds)
        if fault is Fault.HANG:
            self._hanging.release()
            self._released.wait()

    def wait_until_hanging(self, timeout: float) -> bool:
        """Wait until one more call hangs; False if none does in `timeout` seconds."""
        return self._hanging.acquire(timeout=timeout)

    def release(self) -> None:
        """Let the calls go on that hang, and those that would."""
        self._released.set()

    def _transmit(self, count: int) -> None:
        if self._bytes_per_second is not None:
            with self._wire:  # one after the other, as on one wire
                self._sleep(count / self._bytes_per_second)

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """For each run how many keys from the first on are stored."""
        with self._running:
            self._begin("exists")
            with self._lock:
                return [
                    next((at for at, key in enumerate(run) if key not in self._objects), len(run))
                    for run in runs
                ]

    def prefix_log(self) -> PrefixLog:
        """In memory, like the objects."""
        return self._log

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        """Read objects into the batch's memory."""
        with self._running:
            self._begin("get")
            sound: list[tuple[int, memoryview, memoryview]] = []
            statuses = [self._get(batch, at, sound) for at in range(len(batch))]
            if sound:
                # All in one call: from object to object Python would take as long as a small page does.
                places, targets, sources = map(list, zip(*sound, strict=True))
                copy_bodies(batch.checksums, places, targets, sources)
            return statuses

    def _get(
        self, batch: ObjectBatch, at: int, sound: list[tuple[int, memoryview, memoryview]]
    ) -> PageStatus:
        """Read an object; what is only to be copied, target and source, is added to the sound ones."""
        fault = self.faults.next("get object")
        if fault in (Fault.MISS, Fault.ERROR, Fault.TIMEOUT):
            return PageStatus(fault.value)
        found = self._objects.get(batch.keys[at])
        if found is None:
            return PageStatus.MISS
        header_bytes = batch.headers.shape[1]
        size = len(found) - header_bytes - (fault is Fault.SHORT)
        if not 0 <= size <= int(batch.body_sizes[at]):
            return PageStatus.CORRUPT
        self._transmit(len(found))
        body = batch.bodies[at][:size]
        batch.headers[at] = found[:header_bytes]
        source = found[header_bytes : header_bytes + size].data
        if fault is Fault.CORRUPT:
            copy_bodies(None, [at], [body], [source])
            self.faults.flip(memoryview(batch.headers[at]), body)
        else:
            sound.append((at, body, source))
        if len(batch.stored_sizes):
            batch.stored_sizes[at] = size
        return PageStatus.HIT

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        """Store objects from the batch's memory."""
        with self._running:
            self._begin("set")
            return [self._set(batch, at) for at in range(len(batch))]

    def _set(self, batch: ObjectBatch, at: int) -> PageStatus:
        fault = self.faults.next("set object")
        if fault is not None:
            return PageStatus(fault.value)
        key = batch.keys[at]
        if key in self._objects:
            return PageStatus.HIT
        header_bytes, size = batch.headers.shape[1], int(batch.body_sizes[at])
        data = _object(header_bytes, size)
        copy_bodies(batch.checksums, [at], [data[header_bytes:].data], [batch.bodies[at][:size]])
        data[:header_bytes] = batch.headers[at]  # the checksum is in it now
        self._transmit(len(data))
        with self._lock:
            if key in self._objects:
                return PageStatus.HIT
            if self._capacity is not None and self._bytes + len(data) > self._capacity:
                return PageStatus.FULL
            self._objects[key] = data
            self._bytes += len(data)
        return PageStatus.HIT

    def delete(self, keys: Sequence[str]) -> int:
        """Forget objects; returns how many were there."""
        with self._running:
            self._begin("delete")
            with self._lock:
                gone = [self._objects.pop(key) for key in set(keys) if key in self._objects]
                self._bytes -= sum(map(len, gone))
                return len(gone)

    def keys(self) -> Iterator[str]:
        """The keys of all objects."""
        with self._running, self._lock:
            return iter(list(self._objects))

    def clear(self) -> None:
        """Forget every object."""
        with self._running:
            self._begin("clear")
            with self._lock:
                self._objects.clear()
                self._bytes = 0
            self._log.clear()

    def stats(self) -> dict[str, int]:
        """Objects and bytes, headers included."""
        with self._running, self._lock:
            limit = {} if self._capacity is None else {"capacity_bytes": self._capacity}
            return {"objects": len(self._objects), "bytes": self._bytes, **limit}

    def close(self) -> None:
        """Lets calls that hang go on, waits for those that run, forgets everything."""
        self._running.refuse()
        self.release()
        self._running.wait()
        self._objects.clear()


def _object(header_bytes: int, size: int) -> npt.NDArray[np.uint8]:
    """Memory of an object. Its body begins at a line of the cache: copies to there are the fastest."""
    memory = np.empty(header_bytes + size + _LINE, np.uint8)
    start = -(memory.ctypes.data + header_bytes) % _LINE
    return memory[start : start + header_bytes + size]
