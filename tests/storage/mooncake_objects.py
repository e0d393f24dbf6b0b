"""Objects whose bytes follow from their key and their writer, and a caller that checks every byte it gets."""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unified_cache.errors import StorageError
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus
from unified_cache.storage.urls import open_storage

__all__ = ["HEADER", "Call", "Caller", "Memory", "content"]

HEADER = 192


def content(key: str, size: int, writer: int = 0) -> npt.NDArray[np.uint8]:
    """Header and body of an object, uint8 (HEADER + size,)."""
    seed = zlib.crc32(f"{key}/{writer}".encode())
    return np.random.default_rng(seed).integers(0, 256, HEADER + size, dtype=np.uint8)


class Memory:
    """Headers and bodies of at most `count` objects, with bodies of at most `size` bytes."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.headers = np.zeros((count, HEADER), np.uint8)
        self.bodies = np.zeros((count, size), np.uint8)

    def batch(self, keys: Sequence[str], sizes: Sequence[int] | None = None) -> ObjectBatch:
        """Of the first rows."""
        count = len(keys)
        rows = self.bodies[:count]
        return ObjectBatch(
            list(keys),
            self.headers[:count],
            [memoryview(row) for row in rows],
            np.array([row.ctypes.data for row in rows], np.uint64),
            np.array([self.size] * count if sizes is None else sizes, np.uint64),
            np.zeros(count, np.uint64),
        )

    def fill(self, keys: Sequence[str], sizes: Sequence[int] | None = None, writer: int = 0) -> ObjectBatch:
        """A batch to be set."""
        batch = self.batch(keys, sizes)
        for row, key in enumerate(keys):
            size = int(batch.body_sizes[row])
            whole = content(key, size, writer)
            self.headers[row] = whole[:HEADER]
            self.bodies[row, :size] = whole[HEADER:]
        return batch

    def wipe(self) -> None:
        """So that what was there before is no hit."""
        self.headers[:] = 0xEE
        self.bodies[:] = 0xEE

    def holds(self, row: int, key: str, size: int, writer: int = 0) -> bool:
        """The row is this object, every byte of it."""
        whole = content(key, size, writer)
        return bool(
            (self.headers[row] == whole[:HEADER]).all() and (self.bodies[row, :size] == whole[HEADER:]).all()
        )


@dataclass
class Call:
    """One call that a `Caller` made."""

    what: str
    started: float
    seconds: float
    statuses: list[PageStatus] = field(default_factory=list)
    error: StorageError | None = None

    @property
    def failed(self) -> bool:
        """Something else than hits, misses and no room came back."""
        harmless = {PageStatus.HIT, PageStatus.MISS, PageStatus.FULL}
        return self.error is not None or not harmless.issuperset(self.statuses)


class Caller(threading.Thread):
    """Sets, gets and asks for objects without a pause until it is stopped; keeps what came of it."""

    def __init__(self, backend: Backend, name: str, count: int = 16, size: int = 256 << 10) -> None:
        super().__init__(name=name)
        self._backend, self._count, self._size = backend, count, size
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self.calls: list[Call] = []
        self.wrong = 0  # hits that are not the object
        self.broken: BaseException | None = None

    def run(self) -> None:
        memory = Memory(self._count, self._size)
        try:
            turn = 0
            while not self._ending.is_set():
                keys = [f"{self.name}-{turn % 4}-{row}" for row in range(self._count)]
                self._call("set", memory, keys)
                memory.wipe()
                call = self._call("get", memory, keys)
                for row, status in enumerate(call.statuses):
                    if status is PageStatus.HIT and not memory.holds(row, keys[row], self._size):
                        self.wrong += 1
                self._call("exists", memory, keys)
                if turn % 4 == 3:  # so that there is something to write
                    rows = range(self._count)
                    self._call(
                        "delete", memory, [f"{self.name}-{old}-{row}" for old in range(4) for row in rows]
                    )
                turn += 1
        except BaseException as error:
            self.broken = error

    def _call(self, what: str, memory: Memory, keys: Sequence[str]) -> Call:
        batch = memory.fill(keys) if what == "set" else None
        started = time.monotonic()
        call = Call(what, started, 0.0)
        try:
            if batch is not None:
                call.statuses = self._backend.set(batch)
            elif what == "get":
                call.statuses = self._backend.get(memory.batch(keys))
            elif what == "exists":
                self._backend.exists([keys])
            else:
                self._backend.delete(keys)
        except StorageError as error:
            call.error = error
        call.seconds = time.monotonic() - started
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()
        return call

    def wait_for(self, what: str, true: Callable[[list[Call]], bool], seconds: float) -> list[Call]:
        """The calls that end from now on, once `true` of them."""
        with self._changed:
            start = len(self.calls)
            found = self._changed.wait_for(lambda: true(self.calls[start:]), seconds)
            since = self.calls[start:]
        assert found, f"{what}: not within {seconds:g} s, but {since[-5:]}"
        return since

    def works(self, seconds: float = 30.0) -> None:
        """Wait until objects are stored and read again."""
        self.wait_for(
            "sets and gets work",
            lambda calls: {"set", "get"} <= {c.what for c in calls if set(c.statuses) == {PageStatus.HIT}},
            seconds,
        )

    def stop(self) -> None:
        """End it; every hit was right."""
        self._ending.set()
        self.join(60)
        assert not self.is_alive()
        if self.broken is not None:
            raise self.broken
        assert self.wrong == 0


def main() -> None:
    """``python mooncake_objects.py URL set|get SIZE WRITER KEY...``: prints the status of each object.

    After a get `wrong` stands for a hit with other bytes than those of this writer.
    """
    url, what, size, writer, *keys = sys.argv[1:]
    backend = open_storage(url, 5.0)
    memory = Memory(len(keys), int(size))
    if what == "set":
        statuses = [status.value for status in backend.set(memory.fill(keys, writer=int(writer)))]
    else:
        memory.wipe()
        found = backend.get(memory.batch(keys))
        statuses = [
            status.value
            if status is not PageStatus.HIT or memory.holds(row, keys[row], int(size), int(writer))
            else "wrong"
            for row, status in enumerate(found)
        ]
    backend.close()
    print(*statuses)


if __name__ == "__main__":
    main()
