"""Checksums that are made while bodies are copied: the same ones, of what is there in the end."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.storage.support import key, keys
from tests.storage.test_guard import Squeeze
from unified_cache._native import copy_objects, object_checksums, read_object
from unified_cache.errors import ArgumentError
from unified_cache.storage import compression
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.memory import MemoryBackend
from unified_cache.storage.backends.mmap import MmapBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.backends.shm import ShmBackend
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.page_format import HEADER_BYTES, write_headers

HIT, MISS, CORRUPT = PageStatus.HIT, PageStatus.MISS, PageStatus.CORRUPT

BODY = 72 << 10  # long enough to be streamed
SIZE = 2 << 20


@pytest.mark.parametrize("seed", range(30))
def test_a_copy_and_its_checksums(seed: int) -> None:
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    count = rng.randrange(1, 6)
    sizes = [rng.choice([0, 1, 63, 64, 2048, 5000, 32_767, 32_768, 100_003]) for _ in range(count)]
    source = draw.integers(0, 256, sum(sizes) + 100, np.uint8)
    target = np.full(sum(sizes) + 64 * count + 200, 0xEE, np.uint8)
    expected = target.copy()
    headers = draw.integers(0, 256, (count, 50), np.uint8)
    sources, targets, start, place = [], [], rng.randrange(100), rng.randrange(100)
    for size in sizes:
        sources.append(source[start : start + size].data)
        targets.append(target[place : place + size].data)
        expected[place : place + size] = source[start : start + size]
        start, place = start + size, place + size + rng.randrange(64)
    covered = rng.choice([0, 7, 50])
    sums = copy_objects(targets, sources, headers.data, covered)
    assert np.array_equal(sums, object_checksums(headers.data, covered, sources, sizes))
    assert np.array_equal(target, expected)
    target[:] = 0xEE
    assert copy_objects(targets, sources).shape == (0,)
    assert np.array_equal(target, expected)


def test_copies_that_can_not_be() -> None:
    memory = bytearray(300)
    whole, other, headers = memoryview(memory), bytearray(100), np.zeros((1, 8), np.uint8)
    for arguments, text in (
        (([other], [b"a" * 99]), "targets[0] has 100 bytes, sources[0] has 99"),
        (([b"a" * 100], [other]), "targets[0] can not be written"),
        (([whole[:100]], [whole[99:199]]), "targets[0] and sources[0] share memory"),
        (([whole[99:199]], [whole[:100]]), "targets[0] and sources[0] share memory"),
        (([other], []), "sources must have 1 entries, not 0"),
        (([whole[:100:2]], [b"a" * 50]), "targets[0] is not C-contiguous"),
        (([other, 5], [other, other]), "share memory"),
        (([5], [other]), "targets[0] is 5, a buffer is needed"),
        (([other], [whole[:100]], headers, 9), "headers must have 1 times at least 9 bytes"),
        (([other], [whole[:100]], headers, -1), "covered"),
        (([other], [whole[:100]], 7, 0), "headers is 7, a buffer is needed"),
    ):
        with pytest.raises(ArgumentError) as error:
            copy_objects(*arguments)  # type: ignore[arg-type]
        assert text in str(error.value)
    assert not any(memory)
    assert not any(other)
    assert copy_objects([], []).shape == copy_objects([], [], headers, 8).shape == (0,)
    assert copy_objects([whole[:100]], [whole[100:200]]).shape == (0,)  # neighbours


def test_a_source_that_is_written_meanwhile() -> None:
    """Whatever mixture the target gets, the checksum is of exactly that."""
    header, covered = np.arange(192, dtype=np.uint8), 184
    source, memory = np.zeros(3 << 20, np.uint8), np.zeros((3 << 20) + 64, np.uint8)
    at_a_line = -memory.ctypes.data % 64
    ended, began = threading.Event(), threading.Event()

    def write() -> None:
        value = 0
        while not ended.is_set():
            value = (value + 1) % 256
            source[:] = value
            began.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert began.wait(60)
        for start in (at_a_line, at_a_line + 1) * 10:
            target = memory[start : start + (3 << 20) - 64]
            sums = copy_objects([target], [source[: len(target)]], header, covered)
            assert np.array_equal(sums, object_checksums(header, covered, [target], [len(target)]))
    finally:
        ended.set()
        writer.join()


@pytest.mark.parametrize("size", [0, 1, 4096, (128 << 10) - 1, 128 << 10, (300 << 10) + 5])
def test_an_object_that_is_read_and_its_checksum(size: int, tmp_path: Path) -> None:
    content = np.random.default_rng(size).integers(0, 256, 192 + size, np.uint8)
    (tmp_path / "object").write_bytes(content.tobytes())
    expected = object_checksums(content[:192], 184, [content[192:]], [size])[0]
    file = os.open(tmp_path / "object", os.O_RDONLY)
    try:
        for covered, missing in ((184, 0), (None, 0), (184, 1), (None, 1), (184, 4096)):
            header, body = np.full(192, 0xEE, np.uint8), np.full(size + missing + 1, 0xEE, np.uint8)
            done = read_object(file, header, body[:-1], covered)
            assert done == (192 + size, expected if covered and not missing else 0)
            assert np.array_equal(np.concatenate([header, body[:size]]), content)
            assert (body[size:] == 0xEE).all()
    finally:
        os.close(file)


def test_objects_that_can_not_be_read(tmp_path: Path) -> None:
    header, body = np.zeros(192, np.uint8), np.zeros(100, np.uint8)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        for arguments, text in (
            ((folder, 5, body), "header is 5, a buffer is needed"),
            ((folder, header, bytes(100)), "body can not be written"),
            ((folder, header, body[::2]), "body is not C-contiguous"),
            ((folder, header, header[100:]), "header and body share memory"),
            ((folder, header, body, 193), "covered is 193, header has 192 bytes"),
            ((folder, header, body, -1), "covered is -1"),
        ):
            with pytest.raises(ArgumentError) as error:
                read_object(*arguments)  # type: ignore[arg-type]
            assert text in str(error.value)
        with pytest.raises(IsADirectoryError):
            read_object(folder, header, body, 184)
    finally:
        os.close(folder)
    with pytest.raises(OSError, match="descriptor") as failed:
        read_object(-1, header, body)
    assert failed.value.errno == errno.EBADF


class Pages:
    """As many pages, at multiples of 4096 but for `shift`."""

    def __init__(self, count: int, shift: int = 0) -> None:
        memory = np.full((count + 1) * (BODY + 4096), 0xEE, np.uint8)
        first = -memory.ctypes.data % 4096 + shift
        self.rows = memory[first : first + count * BODY].reshape(count, BODY)
        self.views = [row.data for row in self.rows]
        self.addresses = (self.rows.ctypes.data + np.arange(count) * BODY).astype(np.uint64)


Open = Callable[[], Backend]


@pytest.fixture(params=["memory", "file", "cached", "mmap", "shm", "pages"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Backend, Path]]:
    """A backend that makes checksums, and the file that has its bodies."""
    openers: dict[str, Callable[[], tuple[Backend, Path]]] = {
        "memory": lambda: (MemoryBackend(), tmp_path),
        "file": lambda: (FileBackend(tmp_path, SIZE, slot_bytes=BODY), tmp_path / "slab.data"),
        "cached": lambda: (FileBackend(tmp_path, SIZE, direct=False), tmp_path / "slab.data"),
        "mmap": lambda: (MmapBackend(tmp_path / "m", SIZE), tmp_path / "m.data"),
        "shm": lambda: (ShmBackend("x", SIZE, root=str(tmp_path)), tmp_path / "unified-cache-x.data"),
        "pages": lambda: (PagesBackend(tmp_path), tmp_path),
    }
    backend, path = openers[request.param]()
    yield backend, path
    backend.close()


def guard_of(backend: Backend, compression: str | None = None) -> StorageGuard:
    return StorageGuard(
        backend,
        object_bytes=BODY,
        deadline=5.0,
        clock=lambda: 0.0,
        counts=StorageCounts(),
        compression=compression,
    )


def filled(count: int, shift: int = 0) -> Pages:
    pages = Pages(count, shift)
    pages.rows[:] = np.random.default_rng(3).integers(0, 256, pages.rows.shape)
    return pages


def test_objects_are_those_of_other_backends(opened: tuple[Backend, Path]) -> None:
    """Who makes the checksums can not be seen in what is stored."""
    backend, _ = opened
    assert backend.makes_checksums
    pages, names = filled(9, shift=8), keys(9)
    guard = guard_of(backend)
    assert guard.set(names[::2], pages.views[::2], pages.addresses[::2]) == [HIT] * 5
    assert guard.set(names, pages.views, pages.addresses) == [HIT] * 9  # some are there already
    expected = np.empty((9, HEADER_BYTES), np.uint8)
    write_headers(expected, names, [BODY] * 9, BODY, [0] * 9).make(range(9), pages.views)
    read = Pages(9)
    sizes = np.full(9, BODY, np.uint64)
    batch = ObjectBatch(
        names, np.zeros_like(expected), read.views, read.addresses, sizes, np.zeros(9, np.uint64)
    )
    assert backend.get(batch) == [HIT] * 9
    assert np.array_equal(batch.headers, expected)
    assert np.array_equal(read.rows, pages.rows)
    # And they are read wherever memory lies, with misses in between.
    for shift in (0, 1, 64):
        read = Pages(12, shift)
        asked = [key(99), *names[:4], key(98), *names[:3:-1], key(97)]
        assert guard.get(asked, read.views, read.addresses) == [MISS, *[HIT] * 4, MISS, *[HIT] * 5, MISS]
        assert np.array_equal(read.rows[[1, 2, 3, 4, 10, 9, 8, 7, 6]], pages.rows)


def test_damage_on_the_medium_is_never_data(opened: tuple[Backend, Path]) -> None:
    backend, path = opened
    rng = random.Random(5)
    for _ in range(12):
        guard, pages, names = guard_of(backend), filled(6), keys(6)
        assert guard.set(names, pages.views, pages.addresses) == [HIT] * 6
        at, bit = rng.randrange(6), rng.randrange(8 * BODY)
        damage(backend, path, pages, names[at], at, bit)
        read = Pages(6)
        statuses = guard.get(names, read.views, read.addresses)
        assert statuses == [CORRUPT if place == at else HIT for place in range(6)]
        assert guard.exists([[name] for name in names]) == [int(place != at) for place in range(6)]
        backend.delete(names)


def damage(backend: Backend, path: Path, pages: Pages, name: str, at: int, bit: int) -> None:
    """Flip a bit of a stored body, behind the backend's back."""
    if isinstance(backend, MemoryBackend):
        backend._objects[name][HEADER_BYTES + bit // 8] ^= 1 << bit % 8
        return
    if isinstance(backend, PagesBackend):
        path = path / name[:2] / name[2:4] / name
    data, body = path.read_bytes(), pages.rows[at].tobytes()
    with open(path, "r+b") as file:
        start = -1
        while (start := data.find(body, start + 1)) >= 0:  # slots that are free may have it too
            file.seek(start + bit // 8)
            file.write(bytes([data[start + bit // 8] ^ 1 << bit % 8]))


def test_compressed_pages(opened: tuple[Backend, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compression.CODECS, "squeeze", Squeeze)
    backend, _ = opened
    pages, names, read = filled(4), keys(4), Pages(4)
    pages.rows[1:] = np.arange(3)[:, np.newaxis]  # of different lengths then, one as long as before
    guard = guard_of(backend, "squeeze")
    assert guard.set(names, pages.views, pages.addresses) == [HIT] * 4
    assert guard.get(names, read.views, read.addresses) == [HIT] * 4
    assert np.array_equal(read.rows, pages.rows)


class Flips(MemoryBackend):
    """Derives from a backend that makes checksums, and changes bytes when they have been made."""

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        statuses = super().get(batch)
        batch.bodies[0][5] ^= 1
        return statuses


class Shortens(MemoryBackend):
    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        batch.body_sizes[0] -= 1
        return super().set(batch)


@pytest.mark.parametrize("backend", [Flips, Shortens])
def test_who_derives_is_not_believed(backend: type[MemoryBackend]) -> None:
    guard, pages, read = guard_of(backend()), filled(2), Pages(2)
    assert guard.set(keys(2), pages.views, pages.addresses) == [HIT] * 2
    assert guard.get(keys(2), read.views, read.addresses) == [CORRUPT, HIT]
    assert MemoryBackend.makes_checksums
    assert not backend.makes_checksums
