"""One deadline for a whole call of a local store, whatever it waits for; and what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.storage.support import Watch
from unified_cache.errors import StorageError, StorageTimeoutError
from unified_cache.storage.backends import pages
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.conformance import HEADER_BYTES, Memory, key
from unified_cache.storage.contract import Backend, PageStatus

HIT, MISS, FULL, TIMEOUT = PageStatus.HIT, PageStatus.MISS, PageStatus.FULL, PageStatus.TIMEOUT
BODY = 4096
SLOTS = 12
SIZE = SLOTS * (BODY + 569) + 16_384
DEADLINE = 1.0


def put(store: Backend, numbers: range | list[int]) -> list[PageStatus]:
    keys = [key(number) for number in numbers]
    return store.set(Memory(len(keys), BODY).fill(keys))


def got(store: Backend, numbers: range | list[int]) -> list[PageStatus]:
    keys = [key(number) for number in numbers]
    memory = Memory(len(keys), BODY)
    statuses = store.get(memory.batch(keys))
    for at, status in enumerate(statuses):
        assert status is not HIT or memory.holds(at, keys[at])
    return statuses


# Slots


class Rival:
    """Another process that holds the lock of a store when it is told to, by the store's own clock."""

    def __init__(self, folder: Path, clock: Watch) -> None:
        self.store = FileBackend(folder)
        self.clock = clock
        self.until = 0.0
        self._held = ExitStack()

    def hold(self, until: float) -> None:
        self.until = until
        self._held.enter_context(self.store._locks.mutex(float(2**20)))

    def sleep(self, seconds: float) -> None:
        """In place of the store's."""
        self.clock.now += 0.01
        if self.clock.now >= self.until:
            self._held.close()

    def close(self) -> None:
        self._held.close()
        self.store.close()


@pytest.fixture
def clock() -> Watch:
    return Watch()


@pytest.fixture
def store(tmp_path: Path, clock: Watch) -> Iterator[FileBackend]:
    store = FileBackend(tmp_path, SIZE, slot_bytes=BODY, threads=1, deadline=DEADLINE)
    store._locks.clock = clock
    yield store
    store.close()


@pytest.fixture
def rival(store: FileBackend, tmp_path: Path, clock: Watch) -> Iterator[Rival]:
    rival = Rival(tmp_path, clock)
    store._locks._sleep = rival.sleep
    yield rival
    rival.close()


def locked_while_bodies_move(
    store: FileBackend, rival: Rival, monkeypatch: pytest.MonkeyPatch, until: float, seconds: float = 0.0
) -> None:
    """The rival takes the lock when the store is between its two times, after some seconds."""
    assert store._open is not None
    medium = store._open.medium
    real = medium.sync

    def sync() -> None:
        real()
        rival.clock.now += seconds
        rival.hold(until)

    monkeypatch.setattr(medium, "sync", sync)


def test_a_set_waits_for_the_lock_once(
    store: FileBackend, rival: Rival, clock: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, [0])
    rival.hold(until=0.7)
    locked_while_bodies_move(store, rival, monkeypatch, until=50)
    assert put(store, range(1, 5)) == [TIMEOUT] * 4
    assert 0.7 < clock.now <= 1.2 * DEADLINE
    monkeypatch.undo()
    rival.sleep(0)
    clock.now = 100.0
    rival.sleep(0)
    # What it had taken is given back by whoever has the lock next.
    assert put(store, range(1, 12)) == [HIT] * 11
    assert store.stats()["evicted"] == 0
    assert got(store, range(12)) == [HIT] * 12


def test_a_set_gets_the_lock_within_its_deadline(
    store: FileBackend, rival: Rival, clock: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, [0])
    rival.hold(until=0.4)
    locked_while_bodies_move(store, rival, monkeypatch, until=0.8)
    assert put(store, range(1, 5)) == [HIT] * 4
    assert 0.8 <= clock.now <= DEADLINE


def test_what_was_written_late_is_published_if_nobody_has_the_lock_for_long(
    store: FileBackend, rival: Rival, clock: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, [0])
    locked_while_bodies_move(store, rival, monkeypatch, until=1.1, seconds=1.05)
    assert put(store, range(1, 5)) == [HIT] * 4
    assert got(store, range(5)) == [HIT] * 5
    assert clock.now <= 1.2 * DEADLINE


def test_nobody_waits_for_long_for_somebody_who_opens_the_store(tmp_path: Path) -> None:
    store = FileBackend(tmp_path, SIZE, deadline=0.05)
    with store._opening, pytest.raises(StorageError, match=r"held .*slab\.lock for 0\.05 s"):
        store.exists([[key(0)]])
    with store._opening:
        assert put(store, [0]) == [TIMEOUT]
    assert put(store, [0]) == [HIT]
    store.close()


@pytest.mark.parametrize("there", [1, 4, 12])
def test_a_set_evicts_nothing_that_it_calls_stored(store: FileBackend, there: int) -> None:
    put(store, range(SLOTS))
    for new in range(100, 200, 20):
        old = list(range(there))
        statuses = put(store, [*old, *range(new, new + SLOTS)])
        assert statuses == [HIT] * SLOTS + [FULL] * there
        assert got(store, old) == [HIT] * there
        assert got(store, range(new, new + SLOTS)) == [HIT] * (SLOTS - there) + [MISS] * there


@pytest.mark.parametrize("fails", ["_insert", "_mark", "_find", "_wipe"])
@pytest.mark.parametrize("after", [0, 2])
def test_an_error_while_objects_are_published_leaks_no_slots(
    store: FileBackend, monkeypatch: pytest.MonkeyPatch, fails: str, after: int
) -> None:
    put(store, range(4))
    assert store._open is not None
    index, real_publish = store._open.index, store._open.index.publish
    real, calls = getattr(index, fails), 0

    def fail(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise MemoryError
        return real(*arguments, **settings)

    def publish(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(index, fails, fail)
            real_publish(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(index, "publish", publish)
        try:
            put(store, [10, 11, 12, 13])
        except MemoryError:
            assert calls > after
        else:
            assert calls <= after  # not called as often
    got(store, range(10, 14))
    # Every slot is there for others, and holds what it should.
    assert put(store, range(20, 20 + SLOTS)) == [HIT] * SLOTS
    assert got(store, range(20, 20 + SLOTS)) == [HIT] * SLOTS
    stats = store.stats()
    assert (stats["objects"], stats["slots_in_writing"]) == (SLOTS, 0)
    assert index._head[8] == np.count_nonzero((index._words & np.uint64(3)) == 0) == 0


# Files


class Slow:
    """A disk on which everything takes a while, by the store's clock."""

    def __init__(self, clock: Watch, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.seconds, self.calls = clock, seconds, 0
        for name, module in (("_is_there", pages), ("open", pages.os), ("fsync", pages.os)):
            monkeypatch.setattr(module, name, self._wrap(getattr(module, name)))

    def _wrap(self, real: Any) -> Any:
        def slow(*arguments: Any, **settings: Any) -> Any:
            self.calls += 1
            self.clock.now += self.seconds
            return real(*arguments, **settings)

        return slow


@pytest.fixture
def files(tmp_path: Path, clock: Watch) -> Iterator[PagesBackend]:
    files = PagesBackend(tmp_path / "files", threads=1, deadline=DEADLINE, clock=clock)
    yield files
    files.close()


def test_pages_stop_at_their_deadline(
    files: PagesBackend, clock: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(files, range(40)) == [HIT] * 40
    with monkeypatch.context() as patch:
        slow = Slow(clock, 0.1, patch)
        with pytest.raises(StorageTimeoutError, match=r"more than it could look at in 1 s"):
            files.exists([[key(number)] for number in range(40)])
        assert slow.calls <= 12
        clock.now = 0.0
        statuses = got(files, range(40))
        assert statuses == [HIT] * statuses.count(HIT) + [TIMEOUT] * statuses.count(TIMEOUT)
        assert 8 <= statuses.count(HIT) <= 12
        assert clock.now <= 1.2 * DEADLINE
        clock.now = 0.0
        statuses = put(files, range(40, 80))
        assert set(statuses) == {TIMEOUT}
        assert clock.now <= 1.2 * DEADLINE
    # Nothing half done is left.
    assert list((tmp := Path(files._root) / ".unified-cache-tmp").iterdir()) == [], tmp
    assert files.exists([[key(number) for number in range(80)]]) == [40]
    assert put(files, range(40, 80)) == [HIT] * 40
    assert got(files, range(80)) == [HIT] * 80


def test_a_clean_up_goes_on_without_the_call_that_began_it(tmp_path: Path, clock: Watch) -> None:
    room = 10 * (BODY + HEADER_BYTES)
    store = PagesBackend(tmp_path, room, threads=1, deadline=0.02, clock=clock)
    assert put(store, range(10)) == [HIT] * 10
    began, go_on = threading.Event(), threading.Event()
    real = store._files

    def slow() -> Any:
        began.set()
        assert go_on.wait(60)
        return real()

    store._files = slow  # type: ignore[method-assign]
    # Neither the one that has begun it nor those that come meanwhile wait for its end.
    assert put(store, [10]) == [FULL]
    assert put(store, [11]) == [FULL]
    assert put(store, [3]) == [HIT]
    assert began.wait(60)
    go_on.set()
    cleaner = store._cleaner
    assert cleaner is not None
    assert cleaner.drain(60)
    store._files = real  # type: ignore[method-assign]
    assert put(store, [10]) == [HIT]
    assert store.stats()["evicted"] > 0
    assert store.stats()["bytes"] <= room
    store.close()


def test_a_clean_up_that_hangs_keeps_no_store_open(tmp_path: Path, clock: Watch) -> None:
    store = PagesBackend(tmp_path, 10 * (BODY + HEADER_BYTES), threads=1, deadline=0.02, clock=clock)
    put(store, range(10))
    go_on = threading.Event()
    store._files = lambda: iter([(0.0, 0, "gone")] if go_on.wait(60) else [])  # type: ignore[method-assign]
    assert put(store, [10]) == [FULL]
    store.close()
    assert not go_on.is_set()
    go_on.set()
