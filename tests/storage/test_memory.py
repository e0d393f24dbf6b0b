"""`memory`: delays and faults come as they were ordered."""

from __future__ import annotations

import threading

import pytest

from unified_cache.errors import ArgumentError, ClosedError, StorageError
from unified_cache.storage.backends.memory import Fault, Faults, MemoryBackend
from unified_cache.storage.conformance import Memory, key
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.urls import open_storage

HIT, MISS, FULL = PageStatus.HIT, PageStatus.MISS, PageStatus.FULL
BODY = 1000
KEYS = [key(at) for at in range(6)]


def put(store: MemoryBackend, keys: list[str] = KEYS) -> list[PageStatus]:
    return store.set(Memory(len(keys), BODY).fill(keys))


def test_faults_of_objects() -> None:
    store = MemoryBackend()
    store.faults.plan("set object", [None, Fault.FULL, Fault.ERROR, Fault.TIMEOUT])
    expected = [HIT, FULL, PageStatus.ERROR, PageStatus.TIMEOUT, HIT, HIT]
    assert put(store) == expected
    assert store.stats()["objects"] == 3
    assert put(store) == [HIT] * 6
    store.faults.plan(
        "get object", [Fault.MISS, Fault.ERROR, Fault.TIMEOUT, Fault.CORRUPT, Fault.SHORT, None]
    )
    memory = Memory(6, BODY)
    batch = memory.batch(KEYS)
    assert store.get(batch) == [MISS, PageStatus.ERROR, PageStatus.TIMEOUT, HIT, HIT, HIT]
    assert not memory.holds(3, KEYS[3])
    assert batch.stored_sizes[4:].tolist() == [BODY - 1, BODY]
    assert memory.holds(5, KEYS[5])
    # Only the copy was damaged.
    assert store.get(batch) == [HIT] * 6
    assert all(memory.holds(at, KEYS[at]) for at in range(6))
    store.close()


def test_faults_of_calls() -> None:
    slept: list[float] = []
    store = MemoryBackend(slow_seconds=0.5, sleep=slept.append)
    put(store)
    store.faults.plan("exists", [Fault.DOWN, Fault.SLOW])
    with pytest.raises(StorageError, match="is down"):
        store.exists([KEYS])
    assert store.exists([KEYS]) == [6]
    assert slept == [0.5]
    assert store.calls["exists"] == 2
    store.close()


@pytest.mark.parametrize(
    "what, fault", [("get object", Fault.FULL), ("set object", Fault.MISS), ("get", Fault.MISS)]
)
def test_faults_that_can_not_be_there(what: str, fault: Fault) -> None:
    with pytest.raises(ArgumentError, match="must be of"):
        Faults().plan(what, [None, fault])


@pytest.mark.parametrize("end", ["release", "close"])
def test_a_call_that_hangs(end: str) -> None:
    store = MemoryBackend()
    put(store)
    store.faults.plan("get", [Fault.HANG])
    statuses: list[PageStatus] = []
    memory = Memory(6, BODY)
    thread = threading.Thread(target=lambda: statuses.extend(store.get(memory.batch(KEYS))))
    thread.start()
    assert store.wait_until_hanging(10)
    assert not store.wait_until_hanging(0)
    assert store.exists([KEYS]) == [6]  # others go on
    assert statuses == []
    getattr(store, end)()
    thread.join(10)
    assert statuses == [HIT] * 6
    store.close()
    with pytest.raises(ClosedError, match="memory://"):
        store.exists([])


def test_time_is_what_was_ordered() -> None:
    slept: list[float] = []
    store = MemoryBackend(latency=0.002, bytes_per_second=1e6, sleep=slept.append)
    put(store)
    store.exists([KEYS])
    store.get(Memory(6, BODY).batch(KEYS))
    each = (BODY + 192) / 1e6
    assert slept == pytest.approx([0.002, *[each] * 6, 0.002, 0.002, *[each] * 6])
    store.close()


def test_capacity() -> None:
    store = MemoryBackend(capacity=3 * (BODY + 192) + 5)
    assert put(store) == [HIT] * 3 + [FULL] * 3
    store.delete(KEYS[:1])
    assert put(store) == [HIT] * 3 + [FULL] * 3
    assert store.exists([KEYS]) == [3]
    store.close()


def test_the_same_seed_the_same_faults() -> None:
    def run(seed: int) -> list[PageStatus]:
        store = MemoryBackend(faults=Faults({Fault.ERROR: 0.2, Fault.MISS: 0.2, Fault.FULL: 0.1}, seed))
        statuses = [status for _ in range(10) for status in put(store)]
        for _ in range(10):
            statuses += store.get(Memory(6, BODY).batch(KEYS))
        store.close()
        return statuses

    assert run(1) == run(1) != run(2)
    assert set(run(1)) == {HIT, MISS, PageStatus.ERROR, FULL}


def test_urls() -> None:
    store = open_storage("memory://far?latency_ms=0&gbps=0.5&capacity=1MB&seed=3&down=1&slow_ms=1")
    assert isinstance(store, MemoryBackend)
    assert store.stats()["capacity_bytes"] == 10**6
    with pytest.raises(StorageError, match="is down"):
        store.exists([KEYS])
    store.close()
    for wrong in ("miss=2", "latency_ms=-1", "lost=1", "capacity=0"):
        with pytest.raises(StorageError, match=wrong.partition("=")[0]):
            open_storage(f"memory://x?{wrong}")
