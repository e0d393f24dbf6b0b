"""Checks that every storage backend passes: what `Backend` promises, sentence by sentence.

For people who write a backend. In a test file of theirs::

    from unified_cache.storage.conformance import BackendConformance


    class TestMyBackend(BackendConformance):
        def open(self, folder):
            return MyBackend(folder / "objects")

and pytest runs the checks. Without pytest, ``TestMyBackend().run_all(folder)`` does. Nothing here imports
pytest.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unified_cache.errors import ClosedError
from unified_cache.storage.checksums import Checksums
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus

__all__ = ["BackendConformance", "Memory", "content", "key"]

HIT, MISS, FULL, CORRUPT = PageStatus.HIT, PageStatus.MISS, PageStatus.FULL, PageStatus.CORRUPT

HEADER_BYTES = 192
_GUARD = 0xEE  # what lies where no backend may write
_GUARD_BYTES = 4096


def check(holds: object, message: str) -> None:
    """An AssertionError with this message, also under ``python -O``."""
    if not holds:
        raise AssertionError(message)


def equal(got: object, expected: object, what: str) -> None:
    """An AssertionError that shows both, if they differ."""
    check(got == expected, f"{what}: got {got!r}, expected {expected!r}")


def key(number: int, group: int = 0) -> str:
    """A key as pages have them: a digest, and a fingerprint."""
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}{number:048x}-{group:016x}"


def content(name: str, size: int, writer: int = 0) -> npt.NDArray[np.uint8]:
    """Bytes that no other key, and no other writer, has."""
    seed = np.frombuffer(f"{name}/{writer}".encode(), np.uint8)
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class Memory:
    """Memory for the objects of a batch, with bytes around each that nobody may touch.

    Args:
        objects: how many.
        body_bytes: of each.
        shift: how far the bodies lie behind a multiple of 4096.
    """

    def __init__(self, objects: int, body_bytes: int, shift: int = 0) -> None:
        step = _GUARD_BYTES + -(-(body_bytes + shift) // 4096) * 4096 + _GUARD_BYTES
        self.whole = np.frombuffer(mmap.mmap(-1, max(1, objects) * step), np.uint8)
        self.whole[:] = _GUARD
        self._starts = [at * step + _GUARD_BYTES + shift for at in range(objects)]
        self._body_bytes = body_bytes
        self.bodies = [self.whole[start : start + body_bytes] for start in self._starts]
        self.headers = np.full((objects, HEADER_BYTES), _GUARD, np.uint8)

    def batch(self, keys: Sequence[str], sizes: Sequence[int] | None = None) -> ObjectBatch:
        """The first objects, under these keys; of each so many bytes."""
        bodies = self.bodies[: len(keys)]
        sizes = [self._body_bytes] * len(keys) if sizes is None else sizes
        return ObjectBatch(
            keys=list(keys),
            headers=self.headers[: len(keys)],
            bodies=[memoryview(body.data) for body in bodies],
            body_addresses=np.array([body.ctypes.data for body in bodies], np.uint64),
            body_sizes=np.array(sizes, np.uint64),
            stored_sizes=np.zeros(len(keys), np.uint64),
        )

    def fill(self, keys: Sequence[str], sizes: Sequence[int] | None = None, writer: int = 0) -> ObjectBatch:
        """The same, with the `content` of the keys in it."""
        batch = self.batch(keys, sizes)
        for at, name in enumerate(keys):
            size = int(batch.body_sizes[at])
            data = content(name, HEADER_BYTES + size, writer)
            self.headers[at] = data[:HEADER_BYTES]
            self.bodies[at][:size] = data[HEADER_BYTES:]
        return batch

    def holds(self, at: int, name: str, size: int | None = None, writer: int = 0) -> bool:
        """Whether an object of the batch is the `content` of a key."""
        size = self._body_bytes if size is None else size
        data = content(name, HEADER_BYTES + size, writer)
        return bool(
            np.array_equal(self.headers[at], data[:HEADER_BYTES])
            and np.array_equal(self.bodies[at][:size], data[HEADER_BYTES:])
        )

    def check_surroundings(self, sizes: Sequence[int] | None = None) -> None:
        """Nothing was written beside the bodies, or behind so many bytes of them."""
        copy = self.whole.copy()
        for at, start in enumerate(self._starts):
            copy[start : start + (self._body_bytes if sizes is None else sizes[at])] = _GUARD
        check((copy == _GUARD).all(), "memory was written to that does not belong to the batch")


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class BackendConformance:
    """Subclass it, and say how to open your backend; see the module.

    Attributes:
        body_bytes: of most objects that the checks store; a multiple of 4096.
        leaves_nothing: whether files and threads are as before after `close`. False for clients that keep
            some
            as long as the process lives.
        settle_seconds: what was stored is there for others, and what was deleted gone, after this time.
    """

    body_bytes = 16_384
    leaves_nothing = True
    settle_seconds = 0.0

    # What to say of a backend.

    def open(self, folder: Path) -> Backend:
        """The backend; empty for a new folder, with the same objects for a known one if it is durable."""
        raise NotImplementedError

    def open_small(self, folder: Path, objects: int) -> Backend | None:
        """One with room for about so many objects of `body_bytes`; None if it has no limit."""
        return None

    # Helpers.

    def run_all(self, folder: Path) -> None:
        """Every check, each in a folder of its own below this one."""
        for name in sorted(dir(type(self))):
            if name.startswith("test_"):
                below = folder / name
                below.mkdir(parents=True)
                getattr(self, name)(below)

    def _settle(self) -> None:
        if self.settle_seconds:
            time.sleep(self.settle_seconds)

    def _store(self, backend: Backend, keys: Sequence[str], writer: int = 0) -> None:
        statuses = backend.set(Memory(len(keys), self.body_bytes).fill(keys, writer=writer))
        equal(statuses, [HIT] * len(keys), "set of new objects")
        self._settle()

    def _read(self, backend: Backend, keys: Sequence[str], writer: int = 0) -> list[PageStatus]:
        """Statuses; that hits have the right bytes, and nothing else was touched, is checked."""
        memory = Memory(len(keys), self.body_bytes)
        batch = memory.batch(keys)
        statuses = backend.get(batch)
        equal(len(statuses), len(keys), "statuses of a get")
        for at, status in enumerate(statuses):
            if status is HIT:
                check(memory.holds(at, keys[at], writer=writer), f"wrong bytes for {keys[at]}")
                equal(int(batch.stored_sizes[at]), self.body_bytes, f"stored_sizes of {keys[at]}")
        memory.check_surroundings()
        return statuses

    # What is there and what is not.

    def test_an_empty_store(self, tmp_path: Path) -> None:
        """Everything is a miss."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(3)]
        equal(backend.exists([keys]), [0], "exists")
        equal(self._read(backend, keys), [MISS] * 3, "get")
        equal(list(backend.keys()), [], "keys")
        equal(backend.delete(keys), 0, "delete")
        backend.clear()
        stats = backend.stats()
        equal((stats["objects"], stats["bytes"]), (0, 0), "stats")
        backend.close()

    def test_what_was_set_is_got(self, tmp_path: Path) -> None:
        """Headers and bodies, bit for bit."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(20)]
        self._store(backend, keys)
        equal(self._read(backend, keys), [HIT] * 20, "get")
        backend.close()

    def test_order_is_the_callers(self, tmp_path: Path) -> None:
        """Objects are told apart by their keys, whatever the order of a batch."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(16)]
        self._store(backend, keys)
        shuffled = random.Random(1).sample(keys, len(keys))
        equal(self._read(backend, shuffled), [HIT] * 16, "get")
        backend.close()

    def test_misses_within_a_batch(self, tmp_path: Path) -> None:
        """Each object has its own status, and a miss does not move its neighbours."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(9)]
        self._store(backend, keys[::2])
        equal(self._read(backend, keys), [HIT, MISS] * 4 + [HIT], "get")
        equal(backend.set(Memory(9, self.body_bytes).fill(keys)), [HIT] * 9, "set of some new objects")
        self._settle()
        equal(self._read(backend, keys), [HIT] * 9, "get")
        backend.close()

    def test_exists_counts_leading_runs(self, tmp_path: Path) -> None:
        """For each run, from its first key to the first that is not there."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(8)]
        self._store(backend, [k for at, k in enumerate(keys) if at != 3])
        runs = [keys, keys[4:], keys[3:], [], keys[:3], [keys[0], keys[3], keys[1]], keys[4:]]
        equal(backend.exists(runs), [3, 4, 0, 0, 3, 1, 4], "exists")
        backend.close()

    def test_holds_says_what_exists(self, tmp_path: Path) -> None:
        """Of many objects, by digest and ending, the same as one look-up each would say."""
        backend = self.open(tmp_path)
        digests = np.random.default_rng(7).integers(0, 256, (12, 32), np.uint8)
        ending = "-0123456789abcdef-0000"
        keys = [digest.tobytes().hex() + ending for digest in digests]
        self._store(backend, keys[1::2])
        equal(backend.holds(digests, ending).tolist(), [at % 2 == 1 for at in range(12)], "holds")
        equal(backend.holds(digests, ending[:-1] + "1").tolist(), [False] * 12, "holds of another ending")
        equal(backend.holds(digests[:0], ending).tolist(), [], "holds of nothing")
        backend.close()

    def test_the_log_of_prefixes(self, tmp_path: Path) -> None:
        """Where there is one: what is appended is read, rewritten and cleared, and cleared with the store."""
        backend = self.open(tmp_path)
        log = backend.prefix_log()
        if log is not None:
            equal(b"".join(log.read()), b"", "a new log")
            equal([log.append(b"one"), log.append(b"two!")], [3, 7], "bytes after an append")
            equal(b"".join(log.read()), b"onetwo!", "what was appended")
            equal(log.rewrite(lambda pieces: [b"".join(pieces)[3:]]), 4, "bytes after a rewrite")
            log.append(b"three")
            equal(b"".join(log.read()), b"two!three", "what was left and added")
            equal(log.rewrite(lambda pieces: None), None, "a rewrite that is not to be")
            if backend.shared or backend.durable:
                other = self.open(tmp_path)
                again = other.prefix_log()
                equal(again and b"".join(again.read()), b"two!three", "what others see")
                other.close()
            log.clear()
            equal(b"".join(log.read()), b"", "after clear")
            log.append(b"four")
            backend.clear()
            equal(b"".join(log.read()), b"", "after clear of the store")
        backend.close()

    def test_empty_calls(self, tmp_path: Path) -> None:
        """Nothing asked, nothing answered."""
        backend = self.open(tmp_path)
        nothing = Memory(0, self.body_bytes)
        for _ in range(2):
            equal(backend.exists([]), [], "exists of no runs")
            equal(backend.exists([[]]), [0], "exists of an empty run")
            equal(backend.get(nothing.batch([])), [], "get of nothing")
            equal(backend.set(nothing.batch([])), [], "set of nothing")
            equal(backend.delete([]), 0, "delete of nothing")
            self._store(backend, [key(1)])
        backend.close()

    def test_keys_of_all_kinds(self, tmp_path: Path) -> None:
        """Any key of up to 150 characters of the alphabet, and no two are one."""
        backend = self.open(tmp_path)
        alphabet = "0123456789abcdefghijklmnopqrstuvwxyz-_."
        keys = [*alphabet, "..", "...", "-_", "aa", "aaaa", "abcd.tmp", alphabet, "a" * 149, "a" * 150]
        keys += [
            "a" * 149 + "b",
            "b" + "a" * 149,
            ".unified-cache-tmp",
            "con",
            key(1),
            key(1) + "-g1",
            key(1)[:-1],
        ]
        for start in range(0, len(keys), 16):
            self._store(backend, keys[start : start + 16])
        equal(backend.exists([keys]), [len(keys)], "exists")
        for start in range(0, len(keys), 16):
            part = keys[start : start + 16]
            equal(self._read(backend, part), [HIT] * len(part), "get")
        equal(sorted(backend.keys()), sorted(keys), "keys")
        equal(backend.delete(keys[:20]), 20, "delete")
        backend.close()

    def test_many_objects(self, tmp_path: Path) -> None:
        """Batches as the cache makes them, of 128."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(512)]
        for start in range(0, 512, 128):
            self._store(backend, keys[start : start + 128])
        equal(backend.exists([keys]), [512], "exists")
        for start in range(0, 512, 128):
            equal(self._read(backend, keys[start : start + 128]), [HIT] * 128, "get")
        backend.close()

    # Sizes and memory.

    def test_bodies_of_other_sizes(self, tmp_path: Path) -> None:
        """A shorter body is read as far as it goes, and `stored_sizes` says how far that is."""
        backend = self.open(tmp_path)
        sizes = [self.body_bytes, 1, 511, 512, 4095, 4096, 4097, self.body_bytes - 1, self.body_bytes]
        keys = [key(at) for at in range(len(sizes))]
        equal(backend.set(Memory(len(keys), self.body_bytes).fill(keys, sizes)), [HIT] * len(keys), "set")
        self._settle()
        memory = Memory(len(keys), self.body_bytes)
        batch = memory.batch(keys)
        equal(backend.get(batch), [HIT] * len(keys), "get")
        equal(batch.stored_sizes.tolist(), sizes, "stored_sizes")
        for at, size in enumerate(sizes):
            check(memory.holds(at, keys[at], size), f"wrong bytes for a body of {size}")
        memory.check_surroundings()
        backend.close()

    def test_checksums(self, tmp_path: Path) -> None:
        """Those of the objects, in their headers when they are stored; for backends that make them."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(12)]
        sizes = [self.body_bytes - 4096 * (at % 3) - at for at in range(12)]
        written = Memory(12, self.body_bytes)
        batch = written.fill(keys, sizes)
        covered = HEADER_BYTES - 8
        places = written.headers[:, covered:].view(np.uint64)[:, 0]
        places[:] = 0
        if backend.makes_checksums:
            equal(
                backend.set(replace(batch, checksums=Checksums(batch.headers, covered, places))),
                [HIT] * 12,
                "set",
            )
            bodies = [body[:size] for body, size in zip(batch.bodies, sizes, strict=True)]
            made = Checksums(batch.headers, covered, np.zeros(12, np.uint64))
            made.make(range(12), bodies)
            equal(places.tolist(), made.values.tolist(), "checksums in the headers")
            self._settle()
            asked = [key(99), *keys[::-1]]
            read = Memory(13, self.body_bytes)
            batch = read.batch(asked)
            checksums = Checksums(batch.headers, covered, np.zeros(13, np.uint64))
            equal(backend.get(replace(batch, checksums=checksums)), [MISS] + [HIT] * 12, "get")
            check(np.array_equal(batch.headers[1:], written.headers[::-1]), "a header was stored without")
            for at, value in enumerate(checksums.values.tolist()[1:]):
                check(value in (0, int(places[11 - at])), f"the checksum of object {at} read is {value:x}")
        backend.close()

    def test_too_little_memory(self, tmp_path: Path) -> None:
        """An object that is longer than its memory is CORRUPT, others of the batch are not."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(4)]
        self._store(backend, keys)
        sizes = [self.body_bytes, 4096, self.body_bytes - 1, self.body_bytes]
        memory = Memory(4, self.body_bytes)
        equal(backend.get(memory.batch(keys, sizes)), [HIT, CORRUPT, CORRUPT, HIT], "get")
        check(memory.holds(0, keys[0]) and memory.holds(3, keys[3]), "wrong bytes beside a CORRUPT object")
        memory.check_surroundings(sizes)
        backend.close()

    def test_memory_that_is_not_aligned(self, tmp_path: Path) -> None:
        """Bodies may lie anywhere."""
        backend = self.open(tmp_path)
        for number, shift in enumerate((1, 64, 512, 4095)):
            keys = [key(8 * number + at) for at in range(4)]
            equal(backend.set(Memory(4, self.body_bytes, shift).fill(keys)), [HIT] * 4, f"set at +{shift}")
            self._settle()
            memory = Memory(4, self.body_bytes, 4096 - shift)
            equal(backend.get(memory.batch(keys)), [HIT] * 4, "get")
            check(all(memory.holds(at, keys[at]) for at in range(4)), "wrong bytes")
            memory.check_surroundings()
        backend.close()

    def test_memory_is_the_callers_again(self, tmp_path: Path) -> None:
        """Neither kept nor touched after the call, and not changed by a set."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(8)]
        memory = Memory(8, self.body_bytes)
        batch = memory.fill(keys)
        backend.register(memoryview(memory.whole.data))
        before, headers = memory.whole.copy(), memory.headers.copy()
        equal(backend.set(batch), [HIT] * 8, "set")
        check(np.array_equal(memory.whole, before), "set has changed bodies")
        check(np.array_equal(memory.headers, headers), "set has changed headers")
        memory.whole[:] = _GUARD
        memory.headers[:] = _GUARD
        self._settle()
        equal(self._read(backend, keys), [HIT] * 8, "get after the memory has changed")
        backend.get(batch)
        memory.whole[:] = _GUARD
        backend.exists([keys])
        backend.close()
        check((memory.whole == _GUARD).all(), "memory was written to after the call")

    def test_memory_that_it_lends(self, tmp_path: Path) -> None:
        """Host memory of its own: of any size, for the caller alone, and there as long as he has it."""
        backend = self.open(tmp_path)
        sizes = [3 * self.body_bytes, 12_345, 1]
        lent = [backend.host_memory(size) for size in sizes]
        if lent == [None] * 3:
            backend.close()
            return
        regions = []
        for memory, size in zip(lent, sizes, strict=True):
            check(memory is not None, f"memory is lent, but not {size} bytes")
            assert memory is not None
            equal(memory.nbytes, size, "bytes of lent memory")
            check(memory.c_contiguous and not memory.readonly, "lent memory is not contiguous and writable")
            region = np.frombuffer(memory, np.uint8)
            equal(
                region.ctypes.data % mmap.PAGESIZE, 0, "how far lent memory lies behind a page of the system"
            )
            check(not region.any(), "lent memory is not zero")
            region[:] = _GUARD
            regions.append(region)
            backend.register(memory)
        pool = Memory(3, self.body_bytes)
        pool.bodies = list(regions[0].reshape(3, self.body_bytes))
        keys = [key(at) for at in range(3)]
        equal(backend.set(pool.fill(keys)), [HIT] * 3, "set from lent memory")
        self._settle()
        equal(self._read(backend, keys), [HIT] * 3, "get into other memory")
        regions[0][:] = _GUARD
        equal(backend.get(pool.batch([key(9), keys[1]])), [MISS, HIT], "get into lent memory")
        check(pool.holds(1, keys[1]), f"wrong bytes for {keys[1]}")
        check((pool.bodies[2] == _GUARD).all(), "lent memory was written to that is not the batch's")
        backend.close()
        check(pool.holds(1, keys[1]), "lent memory has changed with close")
        for region in regions:
            region[:] = 0
        check(all((region == 0).all() for region in regions), "lent memory is not there after close")

    # Writers.

    def test_the_first_writer_wins(self, tmp_path: Path) -> None:
        """What is there stays as it is, and is a HIT."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(6)]
        self._store(backend, keys[:3])
        equal(backend.set(Memory(6, self.body_bytes).fill(keys, writer=1)), [HIT] * 6, "set")
        self._settle()
        equal(self._read(backend, keys[:3], writer=0), [HIT] * 3, "get of what was there")
        equal(self._read(backend, keys[3:], writer=1), [HIT] * 3, "get of what was not")
        backend.close()

    def test_writers_at_once(self, tmp_path: Path) -> None:
        """Eight threads write the same keys: one of them has each, whole, and it stays that one's."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(16)]

        def write(writer: int) -> None:
            order = random.Random(writer).sample(keys, len(keys))
            equal(backend.set(Memory(16, self.body_bytes).fill(order, writer=writer)), [HIT] * 16, "set")
            first = self._writers(backend, order)
            self._settle()
            equal(self._writers(backend, order), first, "the writers of objects, later")

        in_threads(write, range(8))
        backend.close()

    def _writers(self, backend: Backend, keys: Sequence[str]) -> list[int | None]:
        memory = Memory(len(keys), self.body_bytes)
        statuses = backend.get(memory.batch(keys))
        found: list[int | None] = []
        for at, status in enumerate(statuses):
            writers = [writer for writer in range(8) if memory.holds(at, keys[at], writer=writer)]
            check(writers or status is not HIT, f"a hit of bytes that nobody wrote: {keys[at]}")
            found.append(writers[0] if status is HIT else None)
        check(None not in found or self.settle_seconds, "an object is missing after it was set")
        return found

    def test_threads(self, tmp_path: Path) -> None:
        """Eight threads set, get, look up and delete at once: a hit is always the right bytes."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(24)]

        def work(number: int) -> None:
            rng = random.Random(number)
            for step in range(12):
                some = rng.sample(keys, 8)
                if step % 4 == 3:
                    backend.delete(some[:3])
                equal(backend.set(Memory(8, self.body_bytes).fill(some)), [HIT] * 8, "set")
                statuses = self._read(backend, some)
                check(set(statuses) <= {HIT, MISS}, f"statuses of a get: {statuses}")
                (count,) = backend.exists([some])
                check(0 <= count <= 8, f"exists: {count}")
                check(set(backend.keys()) <= set(keys), "keys that nobody has stored")

        in_threads(work, range(8))
        backend.close()

    # Forgetting.

    def test_delete(self, tmp_path: Path) -> None:
        """Counts what was there, and leaves the others; the key is free for new bytes."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(6)]
        self._store(backend, keys)
        equal(backend.delete([*keys[2:4], key(100)]), 2, "delete")
        self._settle()
        equal(self._read(backend, keys), [HIT, HIT, MISS, MISS, HIT, HIT], "get")
        equal(backend.exists([keys]), [2], "exists")
        equal(backend.delete(keys[2:4]), 0, "delete of what is gone")
        self._store(backend, keys[2:4], writer=1)
        equal(self._read(backend, keys[2:4], writer=1), [HIT] * 2, "get of what was stored again")
        backend.close()

    def test_clear(self, tmp_path: Path) -> None:
        """Nothing is left, and everything can be stored again."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(40)]
        self._store(backend, keys)
        backend.clear()
        self._settle()
        equal(backend.exists([keys[:1], keys[20:]]), [0, 0], "exists")
        equal(list(backend.keys()), [], "keys")
        equal(self._read(backend, keys[:2]), [MISS] * 2, "get")
        equal(backend.stats()["objects"], 0, "objects")
        self._store(backend, keys, writer=1)
        equal(self._read(backend, keys, writer=1), [HIT] * 40, "get")
        backend.close()

    def test_keys_and_stats(self, tmp_path: Path) -> None:
        """Every key once; as many objects, and at least their bodies' bytes."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(10)]
        self._store(backend, keys)
        equal(sorted(backend.keys()), sorted(keys), "keys")
        stats = backend.stats()
        equal(stats["objects"], 10, "objects")
        check(stats["bytes"] >= 10 * self.body_bytes, f"bytes: {stats['bytes']}")
        check(stats["bytes"] <= stats.get("capacity_bytes", 2**63), f"more bytes than room: {stats}")
        check(all(type(value) is int for value in stats.values()), f"stats must be integers: {stats}")
        backend.close()

    def test_a_full_store(self, tmp_path: Path) -> None:
        """What does not fit is FULL, or others go for it; nothing that is hit is wrong; room comes back."""
        backend = self.open_small(tmp_path, 8)
        if backend is None:
            return
        keys = [key(at) for at in range(40)]
        for start in range(0, 40, 5):
            part = keys[start : start + 5]
            statuses = backend.set(Memory(5, self.body_bytes).fill(part))
            check(set(statuses) <= {HIT, FULL}, f"statuses of a set: {statuses}")
            self._settle()
            if FULL in statuses:
                full = [k for k, status in zip(part, statuses, strict=True) if status is FULL]
                equal(self._read(backend, full), [MISS] * len(full), "get of what was FULL")
        there = [status is HIT for status in self._read(backend, keys)]
        check(0 < sum(there) < 40, f"{sum(there)} of 40 objects in a store for about 8")
        equal(backend.stats()["objects"], sum(there), "objects")
        stats = backend.stats()
        check(stats["bytes"] <= stats["capacity_bytes"], f"more bytes than room: {stats}")
        left = [k for k, hit in zip(keys, there, strict=True) if hit]
        equal(backend.delete(left), len(left), "delete")
        self._settle()
        self._store(backend, [key(100)])
        equal(self._read(backend, [key(100)]), [HIT], "get after room was made")
        backend.close()

    # Others, and the end.

    def test_others_see_it(self, tmp_path: Path) -> None:
        """A second client hits what the first has stored, if the backend is shared."""
        first = self.open(tmp_path)
        if first.shared:
            second = self.open(tmp_path)
            keys = [key(at) for at in range(6)]
            self._store(first, keys[:3])
            equal(self._read(second, keys), [HIT] * 3 + [MISS] * 3, "get by another")
            self._store(second, keys[3:])
            equal(self._read(first, keys), [HIT] * 6, "get of what another has stored")
            equal(second.delete(keys[:1]), 1, "delete by another")
            self._settle()
            equal(self._read(first, keys[:2]), [MISS, HIT], "get of what another has deleted")
            first.close()
            equal(self._read(second, keys[1:]), [HIT] * 5, "get when the other is closed")
            second.close()
        first.close()

    def test_it_outlives_its_client(self, tmp_path: Path) -> None:
        """What was stored is there for the next one, if the backend is durable."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(4)]
        self._store(backend, keys)
        backend.close()
        if backend.durable:
            again = self.open(tmp_path)
            equal(self._read(again, keys), [HIT] * 4, "get")
            again.close()

    def test_calls_after_close(self, tmp_path: Path) -> None:
        """A ClosedError, never more than that; close again is fine."""
        backend = self.open(tmp_path)
        self._store(backend, [key(0)])
        backend.close()
        backend.close()
        batch = Memory(1, self.body_bytes).fill([key(0)])
        calls: dict[str, Callable[[], object]] = {
            "exists": lambda: backend.exists([[key(0)]]),
            "get": lambda: backend.get(batch),
            "set": lambda: backend.set(batch),
            "delete": lambda: backend.delete([key(0)]),
            "keys": lambda: list(backend.keys()),
            "clear": backend.clear,
            "stats": backend.stats,
        }
        for name, call in calls.items():
            try:
                call()
            except ClosedError:
                continue
            raise AssertionError(f"{name} after close raised no ClosedError")

    def test_close_while_others_call(self, tmp_path: Path) -> None:
        """Calls end, or are a ClosedError; none touches memory when close has returned."""
        backend = self.open(tmp_path)
        keys = [key(at) for at in range(8)]
        self._store(backend, keys)
        memories = [Memory(8, self.body_bytes) for _ in range(4)]
        started = threading.Barrier(5)

        def read(number: int) -> None:
            if number == 4:
                started.wait()
                backend.close()
                copies = [memory.whole.copy() for memory in memories]
                backend.close()
                for memory, copy in zip(memories, copies, strict=True):
                    check(np.array_equal(memory.whole, copy), "memory was written to after close")
                return
            started.wait()
            try:
                for _ in itertools.count():
                    memory = memories[number]
                    check(set(backend.get(memory.batch(keys))) == {HIT}, "get")
            except ClosedError:
                return

        in_threads(read, range(5))

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        """Files and threads are as before after close."""
        if not self.leaves_nothing:
            return
        keys = [key(at) for at in range(4)]
        # The first time may load what stays: modules, a client's own machinery.
        self._use(tmp_path, keys)
        files, threads = _open_files(), threading.active_count()
        for _ in range(3):
            self._use(tmp_path, keys)
        equal(_open_files(), files, "open files")
        equal(threading.active_count(), threads, "threads")

    def _use(self, folder: Path, keys: Sequence[str]) -> None:
        backend = self.open(folder)
        backend.set(Memory(len(keys), self.body_bytes).fill(keys))
        backend.get(Memory(len(keys), self.body_bytes).batch(keys))
        backend.delete(keys)
        backend.close()


def in_threads(work: Callable[[int], None], numbers: Iterable[int]) -> None:
    """Do the work in a thread for each number; raises what the first of them that fails has raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # shown by the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
