"""Bodies that are moved many at a time: by the kernel's queue, and by threads what that leaves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from unified_cache._native import (
    IoQueue,
    find_slots,
    locate_objects,
    object_checksums,
    read_slot_table,
)
from unified_cache.errors import ArgumentError
from unified_cache.storage.backends import mediums
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.slot_records import (
    NATIVE_SUMS,
    RECORD,
    checksums,
    hashes_of,
    key_words,
    pack_keys,
    read_table,
)
from unified_cache.storage.checksums import Checksums
from unified_cache.storage.conformance import Memory, in_threads, key
from unified_cache.storage.contract import ObjectBatch, PageStatus

HIT, MISS, ERROR = PageStatus.HIT, PageStatus.MISS, PageStatus.ERROR
BODY = 8192
SIZE = 64 * (BODY + 569) + 16_384
COVERED = 184

Move = Callable[..., tuple[list[bool], npt.NDArray[np.uint64]]]


def queue_or_skip() -> IoQueue:
    try:
        return IoQueue()
    except OSError as error:
        pytest.skip(f"this machine has no queue: {error}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileBackend]:
    store = FileBackend(tmp_path / "store", SIZE, slot_bytes=BODY, threads=2)
    if not store.stats()["queued"]:
        store.close()
        pytest.skip("this machine has no queue, or its file system no O_DIRECT")
    yield store
    store.close()


def summed(batch: ObjectBatch) -> ObjectBatch:
    """The batch, with checksums wanted."""
    values = np.zeros(len(batch), np.uint64)
    return ObjectBatch(
        batch.keys,
        batch.headers,
        batch.bodies,
        batch.body_addresses,
        batch.body_sizes,
        batch.stored_sizes,
        Checksums(batch.headers, COVERED, values),
    )


def expected(batch: ObjectBatch) -> list[int]:
    sizes = batch.body_sizes.tolist()
    return object_checksums(np.ascontiguousarray(batch.headers).data, COVERED, batch.bodies, sizes).tolist()


class Leaves:
    """A queue that leaves some bodies, after it has written anything to those it should have read."""

    def __init__(self, leaves: Callable[[int], bool], first: Callable[[], object] = lambda: None) -> None:
        self._real = IoQueue()
        self._leaves = leaves
        self._first = first

    def _moved(
        self, move: Move, file: int, offsets: Sequence[int], bodies: Sequence[memoryview], *more: Any
    ) -> tuple[list[bool], npt.NDArray[np.uint64]]:
        moved, sums = move(file, offsets, bodies, *more)
        self._first()
        for at, body in enumerate(bodies):
            if self._leaves(at):
                moved[at] = False
                sums[at : at + 1] = 0
                if move == self._real.read:
                    body[:] = bytes(len(body))
        return moved, sums

    def read(self, *arguments: Any) -> tuple[list[bool], npt.NDArray[np.uint64]]:
        return self._moved(self._real.read, *arguments)

    def write(self, *arguments: Any) -> tuple[list[bool], npt.NDArray[np.uint64]]:
        return self._moved(self._real.write, *arguments)


def test_a_batch_goes_by_the_queue(store: FileBackend) -> None:
    keys = [key(number) for number in range(20)]
    batch = summed(Memory(20, BODY).fill(keys))
    assert store.set(batch) == [HIT] * 20
    assert batch.checksums is not None
    assert batch.checksums.values.tolist() == expected(batch)
    memory = Memory(20, BODY)
    order = [*range(13, 20), *range(13)]
    read = summed(memory.batch([keys[at] for at in order]))
    assert store.get(read) == [HIT] * 20
    assert all(memory.holds(place, keys[at]) for place, at in enumerate(order))
    assert read.checksums is not None
    assert read.checksums.values.tolist() == expected(read)
    stats = store.stats()
    assert (stats["queued"], stats["queued_transfers"]) == (1, 40)
    assert stats["direct_transfers"] == stats["cached_transfers"] == 0


def test_what_is_not_aligned_goes_by_threads(store: FileBackend) -> None:
    keys = [key(number) for number in range(6)]
    sizes = [BODY, 100, 4096, 5000, 0, BODY]
    batch = summed(Memory(6, BODY).fill(keys, sizes))
    assert store.set(batch) == [HIT] * 6
    assert batch.checksums is not None
    assert batch.checksums.values.tolist() == expected(batch)
    assert store.stats()["queued_transfers"] == 4  # an empty body is aligned too
    for shift in (0, 512):
        memory = Memory(6, BODY, shift)
        read = memory.batch(keys)
        assert store.get(read) == [HIT] * 6
        assert read.stored_sizes.tolist() == sizes
        assert all(memory.holds(at, keys[at], size) for at, size in enumerate(sizes))
    assert store.stats()["queued_transfers"] == 8


@pytest.mark.parametrize("leaves", [lambda at: at % 3 == 1, lambda at: True])
def test_threads_do_what_the_queue_leaves(
    store: FileBackend, leaves: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key(number) for number in range(12)]
    batch = summed(Memory(12, BODY).fill(keys))
    monkeypatch.setattr(medium_of(store), "_queue", Leaves(leaves))
    assert store.set(batch) == [HIT] * 12
    memory = Memory(12, BODY)
    read = summed(memory.batch(keys))
    assert store.get(read) == [HIT] * 12
    assert all(memory.holds(at, name) for at, name in enumerate(keys))
    for each in (batch, read):
        assert each.checksums is not None
        assert each.checksums.values.tolist() == expected(each)


def test_what_threads_can_not_do_either_is_an_error(
    store: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key(number) for number in range(6)]
    assert store.set(Memory(6, BODY).fill(keys)) == [HIT] * 6
    monkeypatch.setattr(medium_of(store), "_queue", Leaves(lambda at: at in (2, 3)))

    def broken(*arguments: Any) -> int:
        raise OSError("Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    memory = Memory(6, BODY)
    assert store.get(memory.batch(keys)) == [HIT, HIT, ERROR, ERROR, HIT, HIT]
    monkeypatch.setattr(os, "pwritev", broken)
    more = [key(number) for number in range(10, 16)]
    assert store.set(Memory(6, BODY).fill(more)) == [HIT, HIT, ERROR, ERROR, HIT, HIT]
    assert store.stats()["io_errors"] == 4
    monkeypatch.undo()
    assert store.get(memory.batch(more)) == [HIT, HIT, MISS, MISS, HIT, HIT]
    assert store.stats()["slots_in_writing"] == 0


def test_a_slot_that_changes_hands_meanwhile(store: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = store.stats()["slots"]
    keys = [key(number) for number in range(slots)]
    assert store.set(Memory(slots, BODY).fill(keys)) == [HIT] * slots
    other = FileBackend(Path(store._prefix).parent)
    others = [key(1000 + number) for number in range(slots)]

    def meanwhile() -> None:
        assert other.set(Memory(slots, BODY).fill(others)) == [HIT] * slots

    monkeypatch.setattr(medium_of(store), "_queue", Leaves(lambda at: False, meanwhile))
    assert store.get(Memory(3, BODY).batch(keys[:3])) == [MISS] * 3
    other.close()


def test_a_file_that_became_shorter(store: FileBackend) -> None:
    keys = [key(number) for number in range(4)]
    assert store.set(Memory(4, BODY).fill(keys)) == [HIT] * 4
    os.truncate(f"{store._prefix}.data", 2 * BODY + 4096)
    memory = Memory(4, BODY)
    assert store.get(memory.batch(keys)) == [HIT, HIT, PageStatus.CORRUPT, PageStatus.CORRUPT]
    assert all(memory.holds(at, keys[at]) for at in (0, 1))


def test_many_calls_at_once(store: FileBackend) -> None:
    keys = [key(number) for number in range(48)]
    assert store.set(Memory(48, BODY).fill(keys)) == [HIT] * 48

    def work(thread: int) -> None:
        memory = Memory(12, BODY)
        for turn in range(20):
            some = [keys[(7 * thread + 5 * at + turn) % 48] for at in range(12)]
            assert store.get(memory.batch(some)) == [HIT] * 12
            assert all(memory.holds(at, name) for at, name in enumerate(some))

    in_threads(work, range(4))


def test_a_system_without_a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> IoQueue:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mediums, "IoQueue", forbidden)
    store = FileBackend(tmp_path / "store", SIZE, slot_bytes=BODY)
    keys = [key(number) for number in range(4)]
    assert store.set(Memory(4, BODY).fill(keys)) == [HIT] * 4
    assert store.get(Memory(4, BODY).batch(keys)) == [HIT] * 4
    assert (store.stats()["queued"], store.stats()["queued_transfers"]) == (0, 0)
    store.close()


def medium_of(store: FileBackend) -> mediums.Medium:
    assert store._open is not None
    return store._open.medium


# The queue itself.


def test_bodies_of_a_file(tmp_path: Path) -> None:
    queue = queue_or_skip()
    content = np.random.default_rng(3).integers(0, 256, 1 << 20, np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    offsets, sizes = [0, 4096, 300_000, (1 << 20) - 10], [4096, 5000, 700_000, 11]
    headers = np.random.default_rng(4).integers(0, 256, (4, 192), np.uint8)
    with (tmp_path / "file").open("r+b") as file:
        bodies = [np.zeros(size, np.uint8) for size in sizes]
        moved, sums = queue.read(file.fileno(), offsets, bodies, headers, COVERED)
        assert moved == [True, True, True, False]
        for at in range(3):
            assert np.array_equal(bodies[at], content[offsets[at] :][: sizes[at]])
        assert sums[:3].tolist() == object_checksums(headers[:3], COVERED, bodies[:3], sizes[:3]).tolist()
        assert sums[3] == 0
        moved, sums = queue.read(file.fileno(), offsets, bodies)
        assert moved == [True, True, True, False]
        assert len(sums) == 0
        moved, sums = queue.write(file.fileno(), [9], [bytes(range(100))], headers[:1], COVERED)
        assert moved == [True]
        assert sums.tolist() == object_checksums(headers[:1], COVERED, [bytes(range(100))], [100]).tolist()
    assert (tmp_path / "file").read_bytes()[9:109] == bytes(range(100))


def test_bodies_that_can_not_be_moved() -> None:
    queue = queue_or_skip()
    body = np.zeros(100, np.uint8)
    for arguments, text in (
        (([0], [body, body]), "offsets must have 2 entries, not 1"),
        (([0], [bytes(100)]), "bodies[0] can not be written"),
        (([0], [body[::2]]), "bodies[0] is not C-contiguous"),
        (([0, 100], [body, body[99:]]), "bodies share memory"),
        (([0], [body], np.zeros(10, np.uint8), 11), "headers must have 1 times at least 11 bytes"),
        (([0], [body], 5, 0), "headers is 5, a buffer is needed"),
    ):
        with pytest.raises(ArgumentError) as error:
            queue.read(-1, *arguments)  # type: ignore[arg-type]
        assert text in str(error.value)
    assert queue.read(-1, [0], [body])[0] == [False]
    assert queue.write(-1, [0], [bytes(1)])[0] == [False]
    assert queue.read(-1, [], [])[0] == []


# Looking up.


def test_slots_are_found_as_an_obvious_search_finds_them() -> None:
    rng = np.random.default_rng(5)
    slots, buckets = 64, np.zeros(128, np.uint64)
    records, words = np.zeros(slots, RECORD), np.zeros(slots, np.uint64)
    keys = [f"{at:064x}-{'x' * (at % 80)}" for at in range(2 * slots)]
    packed = pack_keys(keys)
    hashes = hashes_of(packed)
    there: dict[str, int] = {}
    for slot, at in enumerate(rng.permutation(2 * slots)[:slots].tolist()):
        bucket = int(hashes[at]) & 127
        while buckets[bucket]:
            bucket = (bucket + 1) & 127
        buckets[bucket] = (int(hashes[at]) >> 32 << 32) | (slot + 1)
        records["key"][slot] = packed[at]
        words[slot] = int(rng.integers(0, 1 << 40)) << 14 | int(rng.integers(0, 3))
        if int(words[slot]) & 3 == 2:
            there[keys[at]] = slot
    found = find_slots(packed, hashes, buckets, words, records)
    assert found.tolist() == [there.get(name, -1) for name in keys]
    assert 10 < len(there) < slots


def test_a_table_is_read_as_numpy_reads_it() -> None:
    rng = np.random.default_rng(6)
    records = rng.integers(0, 256, 300 * RECORD.itemsize, np.uint8).view(RECORD)
    records["slot"], records["header"] = np.arange(300), 192
    records["body"] = rng.integers(0, 5000, 300)
    records["check"] = checksums(records)
    records["check"][rng.permutation(300)[:40]] = 0
    records["check"][rng.permutation(300)[:20]] ^= np.uint64(1 << 50)
    records["slot"][7] = 8
    slots, hashes, sizes = read_table(records, 4096)
    whole = (records["check"] != 0) & (records["check"] == checksums(records)) & (records["body"] <= 4096)
    whole &= records["slot"] == np.arange(300)
    assert 100 < whole.sum() < 250
    assert slots.tolist() == np.flatnonzero(whole).tolist()
    assert hashes.tolist() == hashes_of(key_words(records[whole])).tolist()
    assert sizes.tolist() == (records["body"] + records["header"])[whole].tolist()


def test_objects_are_located_as_their_records_say() -> None:
    rng = np.random.default_rng(9)
    keys = [f"{at:064x}-{'x' * (at % 80)}" for at in range(40)]
    packed = pack_keys(keys)
    hashes, buckets = hashes_of(packed), np.zeros(128, np.uint64)
    records, words = np.zeros(32, RECORD), np.full(32, 5 << 14 | 2, np.uint64)
    for slot in range(32):
        bucket = int(hashes[slot]) & 127
        while buckets[bucket]:
            bucket = (bucket + 1) & 127
        buckets[bucket] = (int(hashes[slot]) >> 32 << 32) | (slot + 1)
    records["key"] = packed[:32]
    records["body"], records["header"] = rng.integers(0, 100, 32), rng.choice([184, 192], 32)
    records["head"] = rng.integers(0, 256, records["head"].shape)
    room = rng.integers(0, 100, 40).tolist()
    headers = np.full((40, 192), 0xEE, np.uint8)
    index = buckets, words, records.data
    slots, seen, sizes = locate_objects(keys, headers, room, NATIVE_SUMS, *index)
    fits = (records["header"] == 192) & (records["body"] <= room[:32])
    assert 5 < fits.sum() < 27
    assert slots.tolist() == [at if fits[at] else -2 for at in range(32)] + [-1] * 8
    assert seen[:32][fits].tolist() == [5 << 14 | 2] * int(fits.sum())
    assert sizes[:32][fits].tolist() == records["body"][fits].tolist()
    assert np.array_equal(headers[:32][fits], records["head"][fits][:, :192])
    for arguments, text in (
        ((keys, headers, room[1:], NATIVE_SUMS), "room must have 40 entries, not 39"),
        ((keys, headers[:, :10], room, NATIVE_SUMS), "headers is not C-contiguous"),
        ((keys, bytes(40), room, NATIVE_SUMS), "headers can not be written"),
        (([*keys[1:], ""], headers, room, NATIVE_SUMS), "keys must have 1 to 150 characters"),
        ((keys, headers, room, ([1], 1, 1)), "weights must have 63 entries, not 1"),
    ):
        with pytest.raises(ArgumentError) as error:
            locate_objects(*arguments, *index)  # type: ignore[arg-type]
        assert text in str(error.value)


def test_what_is_no_index() -> None:
    keys, one = np.zeros((2, 19), np.uint64), np.zeros(1, np.uint64)
    for arguments, text in (
        ((keys[:1], np.zeros(2, np.uint64), one, one, one), "keys must have 304 bytes, not 152"),
        (
            (keys, np.zeros(2, np.uint64), np.zeros(3, np.uint64), one, one),
            "buckets has 24 bytes, not 8",
        ),
        ((keys, np.zeros(2, np.uint64), one, one, np.zeros(9, np.uint8)[1:]), "records does not begin at"),
        ((keys, 5, one, one, one), "hashes is 5, a buffer is needed"),
    ):
        with pytest.raises(ArgumentError) as error:
            find_slots(*arguments)  # type: ignore[arg-type]
        assert text in str(error.value)
    with pytest.raises(ArgumentError, match="weights must have 63 entries, not 62"):
        read_slot_table(bytes(512), [1] * 62, 1, 1, 4096)
    found = find_slots(keys, np.zeros(2, np.uint64), one, one, np.zeros(64, np.uint64))
    assert found.tolist() == [-1, -1]
