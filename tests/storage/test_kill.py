"""Writers that are killed at any moment, and machines that crash: nothing torn is ever visible, no room is
lost.

`UNIFIED_CACHE_KILLS` is how often each store's writer is killed (60).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.storage import writers
from tests.storage.writers import BODY_BYTES, KEYS, SIZE, SLOTS, batch_of, contents, open_store
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.slot_store import SlotStore
from unified_cache.storage.conformance import HEADER_BYTES, Memory
from unified_cache.storage.contract import Backend, PageStatus

# Finer than what disks tear.
_TORN_BYTES = 128

KILLS = int(os.environ.get("UNIFIED_CACHE_KILLS", "60"))


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return contents()


@pytest.fixture(params=["file", "mmap", "shm", "pages"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(scheme: str, tmp_path: Path) -> Iterator[str]:
    if scheme != "shm":
        yield str(tmp_path / "store")
        return
    name = f"test-kill-{os.getpid()}"
    yield name
    for file in Path("/dev/shm").glob(f"unified-cache-{name}.*"):
        file.unlink()


class Killer:
    """The process whose children are killed."""

    def __init__(self, scheme: str, place: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, writers.__file__, scheme, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill_one(self, seed: int, lines: int, seconds: float) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seed, lines, seconds, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "killed\n"

    def end(self) -> None:
        self._process.communicate()


def visible(store: Backend, data: dict[str, Any]) -> int:
    """How many objects are hits; all must be whole."""
    count = 0
    for start in range(0, len(KEYS), 20):
        names = KEYS[start : start + 20]
        memory = Memory(len(names), BODY_BYTES)
        for at, status in enumerate(store.get(memory.batch(names))):
            assert status in (PageStatus.HIT, PageStatus.MISS)
            if status is PageStatus.HIT:
                count += 1
                assert np.array_equal(memory.headers[at], data[names[at]][:HEADER_BYTES])
                assert np.array_equal(memory.bodies[at], data[names[at]][HEADER_BYTES:])
    return count


def test_killed_writers(scheme: str, place: str, data: dict[str, Any]) -> None:
    rng = random.Random(20_26)
    killer, reader = Killer(scheme, place), open_store(scheme, place, threads=2)
    seen = 0
    try:
        for number in range(KILLS):
            # Half of them at a line of our code, half wherever the system is just now.
            lines = rng.randrange(1, 1500) if number % 2 else 0
            killer.kill_one(number, lines, rng.uniform(0.002, 0.05))
            seen += visible(reader, data)
            fresh = open_store(scheme, place, threads=1)
            assert visible(fresh, data) == visible(reader, data) == fresh.stats()["objects"]
            fresh.close()
        assert seen > KILLS  # otherwise nothing was tried
        # The room of those that died is there again.
        reader.clear()
        names = KEYS[:SLOTS] if scheme != "pages" else KEYS[: SLOTS // 2]
        memory = Memory(len(names), BODY_BYTES)
        assert reader.set(batch_of(names, data, memory)) == [PageStatus.HIT] * len(names)
        assert visible(reader, data) == len(names)
        if isinstance(reader, SlotStore):
            stats = reader.stats()
            assert stats["slots"] == SLOTS
            assert stats["slots_in_writing"] == 0
            assert stats["slots_recovered"] > 0
    finally:
        killer.end()
        reader.close()


def test_temporary_files_of_killed_writers_go(tmp_path: Path, data: dict[str, Any]) -> None:
    place = str(tmp_path / "store")
    killer = Killer("pages", place)
    try:
        for number in range(10):
            killer.kill_one(number, 300, 0)
    finally:
        killer.end()
    temporary = tmp_path / "store" / ".unified-cache-tmp"
    for path in temporary.iterdir():
        os.utime(path, (1, 1))
    store = open_store("pages", place, threads=1)
    assert list(temporary.iterdir()) == []
    store.close()


class Disk:
    """Remembers what was written to files, and which of it is sure to have arrived."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[tuple[str, int, bytes]] = []
        self.sure: list[int] = []  # for each write: how many writes there were when it became durable
        pwrite, pwritev, fdatasync, fsync = os.pwrite, os.pwritev, os.fdatasync, os.fsync

        def one(file: int, written: bytes, offset: int) -> int:
            self._add(file, written, offset)
            return pwrite(file, written, offset)

        def many(file: int, parts: Sequence[Any], offset: int) -> int:
            self._add(file, b"".join(parts), offset)
            return pwritev(file, parts, offset)

        def sync(real: Callable[[int], None]) -> Callable[[int], None]:
            def call(file: int) -> None:
                real(file)
                name = os.readlink(f"/proc/self/fd/{file}")
                for at, (path, _, _) in enumerate(self.writes):
                    if path == name:
                        self.sure[at] = min(self.sure[at], len(self.writes))

            return call

        for name, fake in (
            ("pwrite", one),
            ("pwritev", many),
            ("fdatasync", sync(fdatasync)),
            ("fsync", sync(fsync)),
        ):
            monkeypatch.setattr(os, name, fake)

    def _add(self, file: int, written: bytes, offset: int) -> None:
        self.writes.append((os.readlink(f"/proc/self/fd/{file}"), offset, bytes(written)))
        self.sure.append(sys.maxsize)

    def crash(self, at: int, rng: random.Random, folder: Path, sizes: dict[str, int]) -> None:
        """Files as they may be after a crash when there were so many writes: parts that were not sure may
        have arrived or not, each by itself."""
        folder.mkdir()
        for name, size in sizes.items():
            with (folder / name).open("wb") as file:
                file.truncate(size)
                for (path, offset, written), sure in zip(self.writes[:at], self.sure, strict=False):
                    if not path.endswith(name):
                        continue
                    step = len(written) if sure <= at else _TORN_BYTES
                    for start in range(0, len(written), step):
                        if sure <= at or rng.random() < 0.5:
                            file.seek(offset + start)
                            file.write(written[start : start + step])


def test_crashes_of_the_machine(
    tmp_path: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    # By calls that the disk can look into; otherwise bodies go the same way between the same two others.
    store = FileBackend(tmp_path / "store", SIZE, slot_bytes=BODY_BYTES, threads=1, queued=False)
    first = len(disk.writes)  # the store itself is made in one go, which is tried elsewhere
    rng, memory = random.Random(9), Memory(6, BODY_BYTES)
    acknowledged: list[tuple[int, set[str]]] = []  # writes so far, and what was there
    for _ in range(16):
        names = rng.sample(KEYS, 6)
        store.set(batch_of(names, data, memory))
        if rng.random() < 0.4:
            store.delete(rng.sample(KEYS, 10))
        acknowledged.append((len(disk.writes), set(store.keys())))
    store.close()
    monkeypatch.undo()
    sizes = {name: (tmp_path / "store" / name).stat().st_size for name in ("slab.data", "slab.table")}
    hits = 0
    for number in range(40):
        at = rng.randrange(first, len(disk.writes) + 1)
        copy = tmp_path / f"crash{number}"
        disk.crash(at, rng, copy, sizes)
        after = FileBackend(copy, threads=1)
        hits += visible(after, data)
        # What was acknowledged last before the crash is there, if nothing was going on.
        for writes, there in acknowledged:
            if writes == at:
                assert set(after.keys()) == there
        after.close()
        shutil.rmtree(copy)
    assert hits > 200
    for writes, there in acknowledged[-3:]:
        copy = tmp_path / "quiet"
        disk.crash(writes, rng, copy, sizes)
        after = FileBackend(copy, threads=1)
        assert set(after.keys()) == there
        visible(after, data)
        after.close()
        shutil.rmtree(copy)


def test_a_writer_that_is_frozen_holds_nobody_up(tmp_path: Path, data: dict[str, Any]) -> None:
    store = FileBackend(tmp_path / "store", writers.SIZE, slot_bytes=BODY_BYTES, deadline=0.2)
    frozen = FileBackend(tmp_path / "store", deadline=0.2)
    memory = Memory(4, BODY_BYTES)
    assert store.set(batch_of(KEYS[:4], data, memory)) == [PageStatus.HIT] * 4
    with frozen._locks.mutex(time.monotonic() + 60):
        begin = time.monotonic()
        assert store.set(batch_of(KEYS[4:8], data, memory)) == [PageStatus.TIMEOUT] * 4
        assert time.monotonic() - begin < 2.0
        assert visible(store, data) == 4  # readers need no lock
        assert store.exists([KEYS]) == [4]
        with pytest.raises(OSError, match=r"slab\.lock"):
            store.delete(KEYS[:1])
    assert store.set(batch_of(KEYS[4:8], data, memory)) == [PageStatus.HIT] * 4
    assert visible(store, data) == 8
    frozen.close()
    store.close()
