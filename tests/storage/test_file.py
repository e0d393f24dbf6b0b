"""What `file` promises beside the contract, and what slot stores do when things go wrong."""

from __future__ import annotations

import errno
import os
import resource
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unified_cache.errors import ArgumentError, ClosedError, StorageError
from unified_cache.storage.backends import mediums, slot_index, slot_store
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.process_locks import ProcessLocks
from unified_cache.storage.backends.slot_index import BLOCK
from unified_cache.storage.backends.slot_records import RECORD_BYTES, checksums, hashes_of, keys_of, pack_keys
from unified_cache.storage.conformance import HEADER_BYTES, Memory, in_threads, key
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.urls import StorageUrl, open_storage

HIT, MISS, FULL, ERROR = PageStatus.HIT, PageStatus.MISS, PageStatus.FULL, PageStatus.ERROR
BODY = 8192
SLOTS = 12
SIZE = SLOTS * (BODY + 569) + 16_384
# Of two keys.
_HASHES = [11920909610643389116, 6935374430595921431]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[FileBackend]:
    # With calls that a test can make fail; test_queued.py is about the others.
    store = FileBackend(folder, SIZE, slot_bytes=BODY, threads=2, queued=False, deadline=1.0)
    yield store
    store.close()


def put(store: FileBackend, numbers: range | list[int]) -> list[PageStatus]:
    keys = [key(number) for number in numbers]
    return store.set(Memory(len(keys), BODY).fill(keys))


def got(store: FileBackend, numbers: range | list[int]) -> list[PageStatus]:
    keys = [key(number) for number in numbers]
    memory = Memory(len(keys), BODY)
    statuses = store.get(memory.batch(keys))
    for at, status in enumerate(statuses):
        assert status is not HIT or memory.holds(at, keys[at])
    return statuses


# The size.


def test_files_keep_to_the_size(store: FileBackend, folder: Path) -> None:
    assert store.stats()["slots"] == SLOTS
    for number in range(4):
        put(store, range(8 * number, 8 * number + 8))
    lengths = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(lengths) == {"slab.data", "slab.table", "slab.index", "slab.lock"}
    assert sum(lengths.values()) <= SIZE
    # And they are there: no write can find the disk full.
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) >= lengths["slab.data"]


@pytest.mark.parametrize("size", [1, 20_000])
def test_a_size_without_room_for_one_object(folder: Path, size: int) -> None:
    with pytest.raises(StorageError, match=f"size={size} has no room for an object of 8192"):
        FileBackend(folder, size, slot_bytes=BODY)
    late = FileBackend(folder, size)
    with pytest.raises(StorageError, match=f"size={size} has no room"):
        put(late, [1])
    late.close()


def test_a_size_that_the_disk_has_not(folder: Path) -> None:
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="give a smaller size="):
        FileBackend(folder, 1 << 50)
    assert (folder / "slab.data").stat().st_size == 0
    assert len(os.listdir("/proc/self/fd")) == files
    FileBackend(folder, SIZE).close()


def test_other_settings_than_those_it_was_made_with(store: FileBackend, folder: Path) -> None:
    put(store, [1])
    with pytest.raises(StorageError, match=rf"size={SIZE + 1} was .* with size={SIZE}: give that, or rem"):
        FileBackend(folder, SIZE + 1)
    with pytest.raises(StorageError, match=r"slot=12288 was given, .* slot=8192"):
        FileBackend(folder, slot_bytes=BODY + 1)
    again = FileBackend(folder)
    assert got(again, [1]) == [HIT]
    again.close()


def test_the_first_batch_says_how_long_slots_are(folder: Path) -> None:
    first, second = FileBackend(folder, SIZE), FileBackend(folder, SIZE)
    assert got(first, [1]) == [MISS]
    assert first.exists([[key(1)]]) == [0]
    assert first.stats()["objects"] == 0
    assert put(second, [1]) == [HIT]
    assert got(first, [1, 2]) == [HIT, MISS]
    keys = [key(5), key(6)]
    assert first.set(Memory(2, BODY + 1).fill(keys, [BODY + 1, BODY])) == [ERROR, HIT]
    assert first.stats()["too_large"] == 1
    for backend in (first, second):
        backend.close()


def test_headers_that_are_too_long(store: FileBackend) -> None:
    batch = Memory(1, BODY).fill([key(1)])
    object.__setattr__(batch, "headers", np.zeros((1, 321), np.uint8))
    assert store.set(batch) == [ERROR]
    assert store.stats()["slots_in_writing"] == 0


def test_an_object_of_another_header_is_corrupt(store: FileBackend) -> None:
    put(store, [1])
    batch = Memory(1, BODY).batch([key(1)])
    object.__setattr__(batch, "headers", np.zeros((1, HEADER_BYTES + 8), np.uint8))
    assert store.get(batch) == [PageStatus.CORRUPT]


# Eviction.


def test_clock_keeps_what_is_read(store: FileBackend) -> None:
    put(store, range(SLOTS))
    kept = [2, 5, 7]
    assert got(store, kept) == [HIT] * 3
    for number in range(100, 112, 3):  # nine, in two batches and more
        assert put(store, range(number, number + 3)) == [HIT] * 3
        assert got(store, kept) == [HIT] * 3
    assert store.stats()["objects"] == SLOTS
    assert store.stats()["evicted"] == 12
    # What is not read any more goes in the end.
    for number in range(200, 260, 6):
        put(store, range(number, number + 6))
    assert got(store, kept) == [MISS] * 3


def test_free_slots_go_before_objects(store: FileBackend) -> None:
    put(store, range(SLOTS))
    store.delete([key(number) for number in (3, 4, 9)])
    assert put(store, [20, 21, 22]) == [HIT] * 3
    assert store.stats()["evicted"] == 0
    assert got(store, [0, 1, 2, 5, 6, 7, 8, 10, 11]) == [HIT] * 9


def test_a_batch_of_more_than_there_is_room_for(store: FileBackend) -> None:
    assert put(store, range(SLOTS + 3)) == [HIT] * SLOTS + [FULL] * 3
    assert got(store, range(SLOTS + 3)) == [HIT] * SLOTS + [MISS] * 3


def test_without_eviction(folder: Path) -> None:
    store = FileBackend(folder, SIZE, slot_bytes=BODY, evict=False)
    put(store, range(10))
    assert put(store, range(8, 15)) == [HIT] * 4 + [FULL] * 3
    assert store.stats()["evicted"] == 0
    store.delete([key(3)])
    assert put(store, [30, 31]) == [HIT, FULL]
    store.close()


def test_readers_of_slots_that_change_hands(folder: Path) -> None:
    """Slots are given to others all the time: whoever reads meanwhile has the right bytes, or none."""
    stores = [FileBackend(folder, SIZE, slot_bytes=BODY, threads=2) for _ in range(2)]
    done = threading.Event()
    hits = [0] * 6

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        if number < 3:
            for _ in range(60):
                put(stores[number % 2], rng.choice(40, 5, replace=False).tolist())
            done.set()
            return
        while not done.is_set():
            hits[number] += got(stores[number % 2], rng.choice(40, 10, replace=False).tolist()).count(HIT)

    in_threads(work, range(6))
    assert sum(hits) > 0
    assert stores[0].stats()["evicted"] > 100
    for store in stores:
        store.close()


def test_a_slot_that_changes_hands_during_a_read(
    store: FileBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, range(SLOTS))
    other = FileBackend(folder)
    real, once = os.preadv, [True]

    def meanwhile(*arguments: Any) -> int:
        if once.pop() if once else False:
            put(other, range(100, 100 + SLOTS))  # everything else goes
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", meanwhile)
    assert got(store, [1, 2, 3]) == [MISS] * 3
    monkeypatch.undo()
    assert got(store, range(100, 112)) == [HIT] * SLOTS
    other.close()


# Processes that died.


def test_slots_of_a_dead_process(store: FileBackend, folder: Path) -> None:
    put(store, range(4))
    dead = FileBackend(folder)
    assert dead._open is not None
    with dead._open.index.locked(time.monotonic() + 60):
        taken = dead._open.index.take(8, True)
    assert len(taken) == 8
    assert put(store, range(20, 24)) == [HIT] * 4
    assert store.stats()["evicted"] == 4  # those eight are somebody's who lives
    dead._locks.close()  # as the end of its process does
    assert put(store, range(30, 38)) == [HIT] * 8
    assert store.stats()["evicted"] == 4
    assert store.stats()["slots_recovered"] == 8
    dead._close_store()
    dead._threads.close()


def test_a_death_within_the_lock(store: FileBackend, folder: Path) -> None:
    put(store, range(6))
    assert store._open is not None
    index = store._open.index

    def die() -> None:
        with index.locked(time.monotonic() + 60):
            index._bucket_array[:] = 0  # halfway through something
            index._head[8] = 77
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        die()
    assert store.exists([[key(1)]]) == [0]
    assert put(store, [6]) == [HIT]  # the next one sees it
    assert got(store, range(7)) == [HIT] * 7
    assert store.stats()["index_rebuilds"] == 2


def test_the_index_is_made_anew_after_a_boot(
    store: FileBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, range(8))
    store.delete([key(3)])
    store.close()
    monkeypatch.setattr(slot_index, "_boot", lambda: (1, 2))
    again = FileBackend(folder)
    assert got(again, range(8)) == [HIT] * 3 + [MISS] + [HIT] * 4
    assert again.stats()["index_rebuilds"] == 1
    assert put(again, range(20, 25)) == [HIT] * 5
    assert again.stats()["evicted"] == 0
    again.close()


@pytest.mark.parametrize("at", [0, 8, 16, 24, 40, 60, 190, 192 + 191, RECORD_BYTES - 1])
def test_damaged_records_are_none(store: FileBackend, folder: Path, at: int) -> None:
    put(store, range(4))
    store.close()
    (folder / "slab.index").unlink()
    table = bytearray((folder / "slab.table").read_bytes())
    table[BLOCK + RECORD_BYTES + at] ^= 0x40
    (folder / "slab.table").write_bytes(table)
    again = FileBackend(folder)
    assert got(again, range(4)).count(HIT) == 3
    assert again.stats()["objects"] == 3
    assert put(again, range(4)) == [HIT] * 4
    again.close()


def test_records_in_other_places_are_none(store: FileBackend, folder: Path) -> None:
    put(store, range(4))
    store.close()
    (folder / "slab.index").unlink()
    table = (folder / "slab.table").read_bytes()
    first, second = BLOCK + RECORD_BYTES, BLOCK + 2 * RECORD_BYTES
    table = table[:first] + table[second : second + RECORD_BYTES] + table[second:]
    (folder / "slab.table").write_bytes(table)
    again = FileBackend(folder)
    assert again.stats()["objects"] == 3
    assert got(again, range(4)).count(HIT) == 3
    again.close()


# Files that are not what they should be.


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda block: b"photograph" + block[10:], "is no table of a store"),
        (lambda block: block[:8] + struct.pack("<I", 9) + block[12:], "of version 9, this is version 1"),
        (lambda block: block[:17] + b"x" + block[18:], "first block is damaged"),
        (lambda block: block[:20], "no table of a store"),
        (lambda block: block[:6000], "has 6000 bytes instead of"),
    ],
)
def test_a_table_that_is_none(store: FileBackend, folder: Path, change: Any, message: str) -> None:
    put(store, [1])
    store.close()
    table = folder / "slab.table"
    table.write_bytes(change(table.read_bytes()))
    before, files = table.read_bytes(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match=message) as caught:
        FileBackend(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert table.read_bytes() == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_slab_that_is_short(store: FileBackend, folder: Path) -> None:
    put(store, range(SLOTS))
    with (folder / "slab.data").open("r+b") as file:
        file.truncate(3 * BODY + 100)
    statuses = got(store, range(SLOTS))
    assert statuses.count(HIT) == 3
    assert statuses.count(PageStatus.CORRUPT) == SLOTS - 3
    store.close()
    with pytest.raises(StorageError, match="has 24676 bytes instead of"):
        FileBackend(folder)


def test_places_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="can not be used") as caught:
            FileBackend(place, SIZE)
        assert "\n" not in str(caught.value)
    with pytest.raises(StorageError, match="there is no store yet: add size="):
        FileBackend(tmp_path / "new")


# Faults of the disk.


def test_a_read_that_fails(store: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, range(6))
    real = os.preadv

    def broken(file: int, parts: list[memoryview], offset: int) -> int:
        if offset <= 2 * BODY < offset + sum(map(len, parts)):
            raise OSError(errno.EIO, "Input/output error")
        return real(file, parts, offset)

    monkeypatch.setattr(os, "preadv", broken)
    assert got(store, range(6)) == [HIT, HIT, ERROR, HIT, HIT, HIT]
    assert store.stats()["io_errors"] == 1
    monkeypatch.undo()
    assert got(store, range(6)) == [HIT] * 6


@pytest.mark.parametrize("call", ["pwritev", "pwrite", "fdatasync"])
def test_a_write_that_fails(store: FileBackend, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, range(4))

    def broken(*arguments: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, broken)
    assert put(store, range(3, 8)) == [HIT] + [ERROR] * 4
    monkeypatch.undo()
    assert got(store, range(8)) == [HIT] * 4 + [MISS] * 4
    assert store.stats()["slots_in_writing"] == 0
    assert put(store, range(8)) == [HIT] * 8
    assert got(store, range(8)) == [HIT] * 8


def test_transfers_in_pieces(store: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.preadv, os.pwritev

    def some(parts: list[memoryview]) -> list[memoryview]:
        return [parts[0][:4096]]

    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: write(file, some(parts), at))
    assert put(store, range(6)) == [HIT] * 6
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: read(file, some(parts), at))
    assert got(store, range(6)) == [HIT] * 6


def test_direct_transfers(store: FileBackend, folder: Path) -> None:
    put(store, range(6))
    stats = store.stats()
    if not stats["direct"]:
        pytest.skip("this file system has no O_DIRECT")
    assert stats["direct_transfers"] > 0
    assert stats["cached_transfers"] == 0
    sizes = [100, 4096, 5000]
    keys = [key(20 + at) for at in range(3)]
    assert store.set(Memory(3, BODY).fill(keys, sizes)) == [HIT] * 3
    memory = Memory(3, BODY)
    assert store.get(memory.batch(keys)) == [HIT] * 3
    assert all(memory.holds(at, keys[at], size) for at, size in enumerate(sizes))
    assert store.stats()["cached_transfers"] == 4
    cached = FileBackend(folder, direct=False)
    assert got(cached, range(6)) == [HIT] * 6
    assert cached.stats()["direct"] == 0
    cached.close()


def test_a_file_system_that_takes_the_flag_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def refused(file: int, parts: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".data"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, parts, offset)

    monkeypatch.setattr(os, "preadv", refused)
    store = FileBackend(folder, SIZE, slot_bytes=BODY)
    monkeypatch.undo()
    assert store.stats()["direct"] == 0
    assert put(store, [1]) == [HIT]
    assert got(store, [1]) == [HIT]
    store.close()


def test_no_descriptors(folder: Path) -> None:
    """With every number of descriptors left, from none to enough: refused in words, nothing kept open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = set(os.listdir("/proc/self/fd"))
    refused = 0
    for limit in range(3, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            FileBackend(folder, SIZE, slot_bytes=BODY).close()
        except StorageError as error:
            assert "ulimit -n" in str(error)  # noqa: PT017  # some of these limits are enough
            refused += 1
        else:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(os.listdir("/proc/self/fd")) == len(files)
    assert refused
    store = FileBackend(folder)
    store.close()


# Parts.


def test_files_are_their_owners(store: FileBackend, folder: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_keys_while_objects_come_and_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (slot_index, slot_store):
        monkeypatch.setattr(module, "SWEEP", 4)
    store = FileBackend(folder, SIZE, slot_bytes=BODY)
    put(store, range(SLOTS))
    keys = store.keys()
    seen = [next(keys), next(keys)]
    store.delete([key(number) for number in range(4, 9)])
    seen += keys
    assert len(set(seen)) == len(seen) == SLOTS - 5
    keys = store.keys()
    next(keys)
    store.close()
    with pytest.raises(ClosedError):
        list(keys)


def test_locks_of_instances(tmp_path: Path) -> None:
    first, second = (ProcessLocks(str(tmp_path / "lock")) for _ in range(2))
    assert first.owner != second.owner
    assert first.alive(second.owner)
    assert second.alive(second.owner)
    second.close()
    assert not first.alive(second.owner)
    first.close()


def test_checksums_see_every_word() -> None:
    record = np.zeros(1, slot_index.RECORD)
    words = record.view(np.uint64).reshape(1, -1)
    seen = {int(checksums(record)[0])}
    for at in range(1, 64):
        for bit in (0, 31, 32, 63):
            words[:] = 0
            words[0, at] = 1 << bit
            seen.add(int(checksums(record)[0]))
    assert len(seen) == 1 + 63 * 4
    assert 0 not in seen


def test_hashes_are_the_same_for_ever() -> None:
    # They lie in files.
    assert hashes_of(pack_keys(["a", "0" * 150])).tolist() == _HASHES
    assert int(checksums(np.zeros(1, slot_index.RECORD))[0]) == 0x7563736C6F7473


def test_keys_that_do_not_fit() -> None:
    assert keys_of(pack_keys(["a", "b" * 150])) == ["a", "b" * 150]
    with pytest.raises(ArgumentError, match="at most 150 characters, not 153"):
        pack_keys(["a", "b" * 153])
    with pytest.raises(ArgumentError, match="ASCII"):
        pack_keys(["ü"])


def test_the_hash_table_against_a_dictionary(folder: Path) -> None:
    rng = np.random.default_rng(4)
    store = FileBackend(folder, 70 * 4700, slot_bytes=4096, threads=1, evict=False)
    there: set[int] = set()
    for _ in range(300):
        numbers = rng.choice(200, 4, replace=False).tolist()
        if rng.random() < 0.5:
            store.delete([key(number) for number in numbers])
            there -= set(numbers)
        else:
            keys = [key(number) for number in numbers]
            statuses = store.set(Memory(4, 64).fill(keys))
            there |= {number for number, status in zip(numbers, statuses, strict=True) if status is HIT}
        assert store.exists([[key(number)] for number in range(200)]) == [int(n in there) for n in range(200)]
    assert store.stats()["objects"] == len(there)
    store.close()


# URLs.


def test_urls(folder: Path) -> None:
    store = open_storage(f"file://{folder}?size=1MiB&slot=8KiB&threads=2&direct=off&evict=no")
    assert isinstance(store, FileBackend)
    assert store.stats()["slot_bytes"] == BODY
    assert store.stats()["direct"] == 0
    store.close()
    for options in ("size=x", "threads=0", "direct=perhaps", "slots=3"):
        with pytest.raises(StorageError, match=options.partition("=")[0]):
            FileBackend.from_url(StorageUrl.parse(f"file://{folder}?{options}"), 1.0)


def test_mapped_files_and_shared_memory_by_url(tmp_path: Path) -> None:
    store = open_storage(f"mmap://{tmp_path}/file?size=1MiB&slot=8KiB")
    assert {path.name for path in tmp_path.iterdir()} == {
        "file.data",
        "file.table",
        "file.index",
        "file.lock",
    }
    store.close()
    name = f"test-url-{os.getpid()}"
    store = open_storage(f"shm://{name}?size=1MiB")
    store.close()
    for path in Path("/dev/shm").glob(f"unified-cache-{name}.*"):
        path.unlink()
    for url in ("shm://../x?size=1MiB", "shm://a/b?size=1MiB", "shm://?size=1MiB"):
        with pytest.raises(StorageError):
            open_storage(url)
    with pytest.raises(StorageError, match="there is no store yet"):
        open_storage(f"shm://{name}")
    for path in Path("/dev/shm").glob(f"unified-cache-{name}.*"):
        path.unlink()


def test_pieces_that_are_left() -> None:
    parts = [memoryview(b"abc"), memoryview(b""), memoryview(b"defg")]
    for done in range(8):
        assert b"".join(mediums._rest(parts, done)) == b"abcdefg"[done:]
