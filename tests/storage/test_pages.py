"""What `pages` promises beside the contract: files, whose they are, and what a disk that says no means."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unified_cache.errors import ArgumentError, StorageError
from unified_cache.storage.backends import pages
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.conformance import HEADER_BYTES, Memory, key
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.urls import open_storage

HIT, MISS, FULL, ERROR = PageStatus.HIT, PageStatus.MISS, PageStatus.FULL, PageStatus.ERROR
BODY = 5000
FILE = HEADER_BYTES + BODY


def hex_key(number: int) -> str:
    return f"{number:02x}" * 32 + "-0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[PagesBackend]:
    store = PagesBackend(folder, threads=1)
    assert put(store, range(4)) == [HIT] * 4
    yield store
    store.close()


def put(store: PagesBackend, numbers: range | list[int]) -> list[PageStatus]:
    keys = [hex_key(number) for number in numbers]
    return store.set(Memory(len(keys), BODY).fill(keys))


def got(store: PagesBackend, numbers: range | list[int]) -> list[PageStatus]:
    keys = [hex_key(number) for number in numbers]
    memory = Memory(len(keys), BODY)
    statuses = store.get(memory.batch(keys))
    for at, status in enumerate(statuses):
        assert status is not HIT or memory.holds(at, keys[at])
    return statuses


def path_of(folder: Path, number: int) -> Path:
    name = hex_key(number)
    return folder / name[:2] / name[2:4] / name


def temporary_files(folder: Path) -> list[str]:
    return os.listdir(folder / ".unified-cache-tmp")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_is_a_header_and_a_body(store: PagesBackend, folder: Path) -> None:
    memory = Memory(1, BODY)
    memory.fill([hex_key(2)])
    assert path_of(folder, 2).read_bytes() == memory.headers[0].tobytes() + memory.bodies[0].tobytes()
    assert store.stats()["bytes"] == 4 * FILE
    assert temporary_files(folder) == []


def test_keys_that_are_no_names_of_files(store: PagesBackend, folder: Path) -> None:
    keys = [".", "..", "a", "-", hex_key(1) + "-g2", hex_key(1)[:-1]]
    assert store.set(Memory(6, BODY).fill(keys)) == [HIT] * 6
    assert set(keys) <= set(store.keys())
    assert store.exists([keys]) == [6]
    for wrong in ("", "a/b", "../../x", "A", "a\0", "ü", "a" * 151, "a~object"):
        for call in (store.exists, lambda runs: store.delete(runs[0])):
            with pytest.raises(ArgumentError, match="keys must be 1 to 150 characters"):
                call([[wrong]])
        with pytest.raises(ArgumentError):
            store.get(Memory(2, BODY).batch([hex_key(1), wrong]))


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, FILE + 1])
def test_files_of_a_wrong_size(store: PagesBackend, folder: Path, size: int) -> None:
    os.truncate(path_of(folder, 1), size)
    assert got(store, range(4)) == [HIT, PageStatus.CORRUPT, HIT, HIT]
    # Whoever has checked it forgets it, and it is written again.
    assert store.delete([hex_key(1)]) == 1
    assert put(store, [1]) == [HIT]
    assert got(store, [1]) == [HIT]


def test_a_shorter_file_is_a_shorter_body(store: PagesBackend, folder: Path) -> None:
    os.truncate(path_of(folder, 1), FILE - 10)
    batch = Memory(1, BODY).batch([hex_key(1)])
    assert store.get(batch) == [HIT]
    assert batch.stored_sizes.tolist() == [BODY - 10]


def test_folders_in_the_place_of_files(store: PagesBackend, folder: Path) -> None:
    path_of(folder, 1).unlink()
    path_of(folder, 1).mkdir()
    assert got(store, [0, 1]) == [HIT, ERROR]


def test_a_page_is_there_when_its_last_step_is_done(
    store: PagesBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in slow steps, with somebody who looks after each."""
    seen: list[tuple[int, list[PageStatus]]] = []
    other = PagesBackend(folder, threads=1)
    write, sync = os.pwritev, os.fsync

    def look() -> None:
        seen.append((other.exists([[hex_key(9)]])[0], got(other, [9])))

    def step(file: int, parts: list[memoryview], offset: int) -> int:
        look()
        return write(file, [parts[0][:1300]], offset)

    def last(file: int) -> None:
        look()
        sync(file)
        look()

    monkeypatch.setattr(os, "pwritev", step)
    monkeypatch.setattr(os, "fsync", last)
    assert put(store, [9]) == [HIT]
    assert len(seen) >= 6
    assert set(map(str, seen)) == {str((0, [MISS]))}
    look()
    assert seen[-1] == (1, [HIT])
    other.close()


@pytest.mark.parametrize("call", ["pwritev", "fsync", "link"])
def test_a_write_that_fails(
    store: PagesBackend, folder: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3, 8):
        path_of(folder, number).parent.mkdir(parents=True, exist_ok=True)
    real, calls, files = getattr(os, call), [], open_files()

    def broken(*arguments: Any) -> Any:
        calls.append(0)
        if len(calls) % 2:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, call, broken)
    assert put(store, range(3, 8)) == [HIT, ERROR, HIT, ERROR, HIT]
    monkeypatch.undo()
    assert got(store, range(3, 8)) == [HIT, MISS, HIT, MISS, HIT]
    assert temporary_files(folder) == []
    assert open_files() == files
    assert store.stats()["io_errors"] == 2


def test_a_full_disk_is_full(store: PagesBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    assert put(store, [3, 4]) == [HIT, FULL]


def test_a_read_that_fails(store: PagesBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    files, real, calls = open_files(), pages.read_file, []

    def broken(*arguments: Any) -> int:
        calls.append(0)
        if len(calls) % 2:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(pages, "read_file", broken)
    assert got(store, range(4)) == [ERROR, HIT, ERROR, HIT]
    monkeypatch.setattr(pages, "read_file", lambda *arguments: FILE - 1)
    assert got(store, [0]) == [PageStatus.CORRUPT]  # it became shorter just now
    assert open_files() == files


def test_writes_in_pieces(store: PagesBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: write(file, [parts[0][:77]], at))
    assert put(store, [5]) == [HIT]
    assert got(store, [5]) == [HIT]


def test_few_descriptors(tmp_path: Path) -> None:
    """64 of them: as many as there are suffice, none stays open, and too few is an error and no miss."""
    store, files = PagesBackend(tmp_path / "store", threads=2), open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, highest + 40), hard))
    try:
        for number in range(200):
            assert put(store, [number]) == [HIT]
        for number in range(200):
            assert got(store, [number]) == [HIT]
        assert put(store, range(200, 256)) == [HIT] * 56
        assert got(store, range(128, 256)) == [HIT] * 128
        assert open_files() == files
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE  # noqa: PT017  # it must come
        try:
            assert store.exists([[hex_key(1), hex_key(2)]]) == [2]
            assert got_without_looking(store, [1, 2]) == [ERROR] * 2
            assert store.set(Memory(1, BODY).fill([key(1)])) == [ERROR]
        finally:
            for file in taken:
                os.close(file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.stats()["io_errors"] == 3
    assert open_files() == files
    store.close()


def got_without_looking(store: PagesBackend, numbers: list[int]) -> list[PageStatus]:
    return store.get(Memory(len(numbers), BODY).batch([hex_key(number) for number in numbers]))


def test_looking_that_fails_is_no_miss(store: PagesBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", broken)
    with pytest.raises(StorageError, match="Permission denied"):
        store.exists([[hex_key(1)]])


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_file_systems_without_links(
    store: PagesBackend, folder: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(error, "no links here")

    monkeypatch.setattr(os, "link", refused)
    assert put(store, range(3, 6)) == [HIT] * 3
    assert got(store, range(3, 6)) == [HIT] * 3
    assert temporary_files(folder) == []


# The limit.


def age(folder: Path, number: int, seconds: int) -> None:
    os.utime(path_of(folder, number), (seconds, seconds))


def test_the_oldest_go(folder: Path) -> None:
    store = PagesBackend(folder, 10 * FILE)
    assert put(store, range(10)) == [HIT] * 10
    for number in range(10):
        age(folder, number, 1000 + number)
    assert got(store, [0]) == [HIT]  # now it is the youngest
    assert put(store, [10, 11]) == [HIT] * 2
    assert got(store, range(12)) == [HIT] + [MISS] * 3 + [HIT] * 8
    assert store.stats()["evicted"] == 3
    assert store.stats()["bytes"] <= store.stats()["capacity_bytes"]
    # What is there already needs no room.
    assert put(store, [10, 11]) == [HIT] * 2
    assert store.stats()["evicted"] == 3
    store.close()


def test_what_others_have_stored_counts(folder: Path) -> None:
    first = PagesBackend(folder)
    put(first, range(10))
    for number in range(10):
        age(folder, number, 1000 + number)
    first.close()
    second = PagesBackend(folder, 5 * FILE)
    assert put(second, [20]) == [HIT]
    assert second.stats()["objects"] <= 5
    assert got(second, [9, 20]) == [HIT] * 2
    second.close()


def test_more_than_the_limit_at_once(folder: Path) -> None:
    store = PagesBackend(folder, 3 * FILE, threads=1)
    assert put(store, range(5)) == [HIT] * 3 + [FULL] * 2
    assert store.stats()["bytes"] == 3 * FILE
    assert store.delete([hex_key(0)]) == 1
    store.clear()
    assert put(store, [7]) == [HIT]
    store.close()


# Whose files.


def test_left_overs_of_dead_writers_go(store: PagesBackend, folder: Path) -> None:
    young, old = folder / ".unified-cache-tmp" / ("a" * 32), folder / ".unified-cache-tmp" / ("b" * 32)
    for path in (young, old):
        path.write_bytes(b"half a page")
    os.utime(old, (1, 1))
    PagesBackend(folder).close()
    assert temporary_files(folder) == [young.name]
    os.utime(young, (1, 1))
    store.clear()
    assert temporary_files(folder) == []


def test_files_of_others_stay(store: PagesBackend, folder: Path) -> None:
    temporary = folder / ".unified-cache-tmp"
    beside = path_of(folder, 1).parent
    others = [
        folder / "tmp" / "thesis.odt",
        folder / "tmp" / ("b" * 32),
        temporary / "notes",
        temporary / ("b" * 31),
        temporary / ("c" * 32) / "in a folder",
        folder / "ab" / "photo.jpg",
        folder / "ab" / "cd" / "photo.jpg",
        folder / "ab" / "cd" / hex_key(1),  # not its place
        folder / "ab" / "cd" / "abcdef~object",  # nor this
        folder / "my" / "01" / hex_key(1),
        beside / "photo.jpg",
        beside / "0101",
        beside / (hex_key(1) + ".bak~"),
        beside.parent / "holidays" / hex_key(1),
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (1, 1))
    (temporary / ("d" * 32)).symlink_to(others[0])
    os.utime(temporary / ("c" * 32), (1, 1))
    PagesBackend(folder, 1).close()
    assert store.stats()["objects"] == 4
    store.clear()
    assert store.stats()["objects"] == 0
    assert all(path.read_bytes() == b"mine" for path in others)


@pytest.mark.parametrize("gone", ["all", "temporary"])
def test_folders_that_were_removed_are_made_again(store: PagesBackend, folder: Path, gone: str) -> None:
    shutil.rmtree(folder if gone == "all" else folder / ".unified-cache-tmp")
    assert store.stats()["objects"] == (0 if gone == "all" else 4)
    assert list(store.keys()) == [] or gone != "all"
    store.clear()
    assert put(store, range(6)) == [HIT] * 6
    assert got(store, range(6)) == [HIT] * 6
    assert temporary_files(folder) == []


def test_a_writer_that_comes_second(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look before either has written: the one that is there first stays."""
    store = PagesBackend(folder, threads=1)
    both_look = threading.Barrier(2, timeout=10)
    real = os.fsync

    def together(file: int) -> None:
        real(file)
        both_look.wait()

    def write(writer: int) -> None:
        batch = Memory(1, BODY).fill([hex_key(1)], writer=writer)
        statuses.extend(store.set(batch))

    statuses: list[PageStatus] = []
    monkeypatch.setattr(os, "fsync", together)
    threads = [threading.Thread(target=write, args=(writer,)) for writer in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [HIT] * 2
    memory = Memory(1, BODY)
    assert store.get(memory.batch([hex_key(1)])) == [HIT]
    assert memory.holds(0, hex_key(1), writer=1) or memory.holds(0, hex_key(1), writer=2)
    assert temporary_files(folder) == []
    store.close()


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="name a folder that") as caught:
        PagesBackend(tmp_path / "file" / "below")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_urls(tmp_path: Path) -> None:
    for url in (f"pages://{tmp_path}/a%20b?size=1MB&threads=1", str(tmp_path / "a b")):
        store = open_storage(url)
        assert isinstance(store, PagesBackend)
        store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a b"]
    with pytest.raises(StorageError, match="threads"):
        open_storage(f"pages://{tmp_path}?threads=x")
    with pytest.raises(StorageError, match="absolute path"):
        open_storage("pages://host/x")
