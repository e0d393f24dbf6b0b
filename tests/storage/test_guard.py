"""Whatever a backend does: pages come back as they were stored, or not at all."""

import random
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.cache.support import MemoryStore
from tests.storage.support import BYTES, Pages, Watch, key, keys, make_guard
from unified_cache.errors import MissingDependencyError, StorageError
from unified_cache.storage import compression
from unified_cache.storage.backup import pages_at_once
from unified_cache.storage.contract import ObjectBatch, PageStatus
from unified_cache.storage.page_format import HEADER_BYTES
from unified_cache.storage.prefetch import batches

HIT, MISS, CORRUPT = PageStatus.HIT, PageStatus.MISS, PageStatus.CORRUPT
ERROR, TIMEOUT, FULL = PageStatus.ERROR, PageStatus.TIMEOUT, PageStatus.FULL


def put(guard: Any, count: int = 4, start: int = 0) -> Pages:
    pages = Pages(count)
    assert guard.set(keys(count, start), pages.views, pages.addresses) == [HIT] * count
    return pages


def get(guard: Any, count: int = 4, start: int = 0) -> tuple[list[PageStatus], Pages]:
    pages = Pages(count, fill=0xEE)
    return guard.get(keys(count, start), pages.views, pages.addresses), pages


def test_pages_come_back() -> None:
    guard, counts = make_guard(MemoryStore())
    stored = put(guard)
    statuses, read = get(guard, 5)
    assert statuses == [HIT] * 4 + [MISS]
    assert np.array_equal(read.data[:4], stored.data)
    assert guard.exists([keys(5), keys(2), keys(2, 3), []]) == [4, 2, 1, 0]
    seen = counts.as_dict()
    assert (seen["storage_set_hit"], seen["storage_get_hit"], seen["storage_get_miss"]) == (4, 4, 1)
    assert seen["storage_stored_bytes"] == seen["storage_read_bytes"] == 4 * (BYTES + HEADER_BYTES)
    assert seen["storage_page_bytes"] == 4 * BYTES


def test_the_first_writer_wins() -> None:
    guard, _ = make_guard(MemoryStore())
    first = put(guard, 2)
    second = Pages(2, fill=1)
    assert guard.set(keys(2), second.views, second.addresses) == [HIT] * 2
    assert np.array_equal(get(guard, 2)[1].data, first.data)


def test_statuses_pass() -> None:
    store = MemoryStore()
    guard, counts = make_guard(store)
    put(guard)
    faults = iter([None, "gone", "error", "timeout", None])
    store.fault = lambda: next(faults)
    assert get(guard)[0] == [MISS, ERROR, TIMEOUT, HIT]
    faults = iter([None, "full", None, "full", "full"])
    pages = Pages(4)
    assert guard.set(keys(4, 9), pages.views, pages.addresses) == [FULL, HIT, FULL, FULL]
    seen = counts.as_dict()
    assert [seen[f"storage_get_{s}"] for s in ("hit", "miss", "error", "timeout")] == [1, 1, 1, 1]
    assert seen["storage_set_full"] == 3


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bits_are_never_data(seed: int) -> None:
    store, rng = MemoryStore(), random.Random(seed)
    guard, counts = make_guard(store)
    stored = put(guard, 30)
    flipped = rng.sample(range(30), 10)
    for at in flipped:
        whole = bytearray(store.pages[key(at)])
        whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        store.pages[key(at)] = bytes(whole)
    statuses, read = get(guard, 30)
    for at, status in enumerate(statuses):
        assert (status is HIT) == (at not in flipped)
        assert status is not HIT or np.array_equal(read.data[at], stored.data[at])
    # What is damaged is out of the way.
    damaged = counts.as_dict()["storage_get_corrupt"]
    assert len(store.pages) == 30 - damaged
    put(guard, 30 - damaged)


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[: HEADER_BYTES + 1],
        lambda whole: whole[:HEADER_BYTES],
        lambda whole: whole[:HEADER_BYTES] + bytes(BYTES),
        lambda whole: bytes(len(whole)),
    ],
)
def test_short_torn_and_empty_objects(change: Callable[[bytes], bytes]) -> None:
    store = MemoryStore()
    guard, _ = make_guard(store)
    put(guard)
    store.pages[key(1)] = change(store.pages[key(1)])
    assert get(guard)[0] == [HIT, CORRUPT, HIT, HIT]
    assert key(1) not in store.pages


def test_an_object_under_another_s_key() -> None:
    store = MemoryStore()
    guard, _ = make_guard(store)
    put(guard)
    store.pages[key(1)], store.pages[key(2)] = store.pages[key(2)], store.pages[key(1)]
    assert get(guard)[0] == [HIT, CORRUPT, CORRUPT, HIT]


class Broken(MemoryStore):
    """A backend that does what none may do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def exists(self, runs: Any) -> Any:
        wrong = {"few": [], "many": [99] * len(runs)}
        return wrong[self.how] if self.how in wrong else super().exists(runs)

    def get(self, batch: ObjectBatch) -> Any:
        if self.how == "raises":
            raise KeyError("?")
        if self.how == "late":
            raise TimeoutError
        statuses = super().get(batch)
        if self.how == "size":
            batch.stored_sizes[:] = BYTES + 1
        return {"few": [], "many": statuses * 2, "none": None}.get(self.how, statuses)


@pytest.mark.parametrize(
    "how, expected",
    [
        ("few", ERROR),
        ("many", ERROR),
        ("none", ERROR),
        ("raises", ERROR),
        ("late", TIMEOUT),
        ("size", CORRUPT),
    ],
)
def test_backends_that_break_the_contract(how: str, expected: PageStatus) -> None:
    guard, counts = make_guard(Broken(how))
    put(guard)
    assert get(guard)[0] == [expected] * 4
    if how in ("few", "many"):
        assert guard.exists([keys(2)]) is None
    assert counts.as_dict()["storage_failed_calls"] == (
        0 if how == "size" else 2 if how in ("few", "many") else 1
    )


def test_a_store_that_is_down_is_left_alone() -> None:
    store, clock = MemoryStore(), Watch()
    guard, counts = make_guard(store, clock)
    put(guard)
    store.fault = lambda: "down"
    for _ in range(3):
        assert guard.available
        assert get(guard)[0] == [ERROR] * 4
    assert not guard.available
    store.calls.clear()
    assert get(guard)[0] == [ERROR] * 4
    assert guard.exists([keys(4)]) is None
    assert store.calls == []
    assert counts.as_dict()["storage_refused_calls"] == 2
    store.fault = lambda: None
    clock.now += 1.1
    assert guard.available
    assert get(guard)[0] == [HIT] * 4
    assert guard.breaker.state == "closed"


def test_what_comes_after_its_deadline_is_no_data() -> None:
    store, clock = MemoryStore(), Watch()
    guard, counts = make_guard(store, clock, deadline=1.0)
    put(guard)

    def slow(call: str) -> None:
        clock.now += 1.3

    store.before = slow
    assert get(guard)[0] == [TIMEOUT] * 4
    assert guard.breaker.state == "open"
    assert counts.as_dict()["storage_late_calls"] == 1
    clock.now += 100
    assert guard.exists([keys(4)]) is None
    clock.now += 100
    # What is stored is stored, however long it took.
    pages = Pages(2)
    assert guard.set(keys(2, 8), pages.views, pages.addresses) == [HIT] * 2


def test_a_call_that_hangs_is_seen_from_outside() -> None:
    store, clock = MemoryStore(), Watch()
    guard, counts = make_guard(store, clock, deadline=1.0)
    put(guard)
    inside, go_on = threading.Event(), threading.Event()

    def hang(call: str) -> None:
        inside.set()
        assert go_on.wait(30)

    store.before = hang
    answers: list[Any] = []
    pages = Pages(4, fill=0xEE)
    owner = object()

    def read() -> None:
        answers.append(guard.get(keys(4), pages.views, pages.addresses, owner))

    thread = threading.Thread(target=read, name="the reader")
    thread.start()
    assert inside.wait(30)
    assert guard.busy
    assert guard.watch() == []
    assert guard.available
    clock.now = 1.14  # it may still end in time
    assert guard.watch() == []
    clock.now = 1.19
    assert guard.watch() == [owner]
    assert guard.watch() == []
    assert guard.stuck == ["the reader"]
    assert not guard.available
    # Nobody waits for it: not even who closes.
    guard.close()
    assert store.closed == 0
    assert get(guard)[0] == [ERROR] * 4
    go_on.set()
    thread.join(30)
    assert answers == [[TIMEOUT] * 4]
    assert store.closed == 1
    assert not guard.busy
    assert counts.as_dict()["storage_late_calls"] == 1


def test_close() -> None:
    store = MemoryStore()
    guard, _ = make_guard(store)
    guard.close()
    guard.close()
    assert store.closed == 1
    assert not guard.available
    assert guard.exists([keys(1)]) is None
    assert get(guard, 1)[0] == [ERROR]


def test_memory_is_held_until_the_backend_is_closed() -> None:
    class Registers(MemoryStore):
        def register(self, memory: memoryview) -> None:
            if len(memory) != 8:
                raise StorageError("can not be registered")

    guard, _ = make_guard(Registers())
    with pytest.raises(StorageError):
        guard.register(memoryview(bytearray(7)))
    memory = bytearray(8)
    guard.register(memoryview(memory))
    with pytest.raises(BufferError):
        memory.append(1)
    guard.close()
    memory.append(1)


class Squeeze(compression.Codec):
    number, name = 9, "squeeze"

    def compress(self, page: memoryview) -> bytes:
        return zlib.compress(page)

    def decompress(self, stored: Any, page: memoryview) -> bool:
        try:
            whole = zlib.decompress(stored)
        except zlib.error:
            return False
        if len(whole) == len(page):
            page[:] = whole
        return len(whole) == len(page)


def test_compressed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    plain, _ = make_guard(store)
    monkeypatch.setitem(compression.CODECS, "squeeze", Squeeze)
    monkeypatch.setattr("unified_cache.storage.guard._SCRATCH_BYTES", 2 * BYTES)
    guard, counts = make_guard(store, compression="squeeze")
    assert guard.set([], [], np.empty(0, np.uint64)) == []
    assert counts.as_dict()["storage_failed_calls"] == 0
    pages = Pages(5)
    pages.data[1:4] = np.arange(3)[:, np.newaxis]
    assert guard.set(keys(5), pages.views, pages.addresses) == [HIT] * 5
    # What gets no smaller is stored as it is.
    assert [len(store.pages[key(at)]) == HEADER_BYTES + BYTES for at in range(5)] == [True] + [False] * 3 + [
        True
    ]
    seen = counts.as_dict()
    assert seen["storage_page_bytes"] == 5 * BYTES
    assert seen["storage_stored_bytes"] == sum(map(len, store.pages.values())) < 4 * BYTES
    statuses, read = get(guard, 5)
    assert statuses == [HIT] * 5
    assert np.array_equal(read.data, pages.data)
    # A process without the codec can not read them, and leaves them alone.
    assert get(plain, 5)[0] == [HIT, MISS, MISS, MISS, HIT]
    assert len(store.pages) == 5


def test_codecs_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in (("zstd", "zstandard"), ("lz4", "lz4")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        monkeypatch.setitem(__import__("sys").modules, f"{package}.block", None)
        with pytest.raises(MissingDependencyError, match=f"unified-cache\\[{name}\\]"):
            make_guard(MemoryStore(), compression=name)
    make_guard(MemoryStore())


@pytest.mark.parametrize("name, module", [("zstd", "zstandard"), ("lz4", "lz4.block")])
def test_codecs(name: str, module: str) -> None:
    pytest.importorskip(module)
    store = MemoryStore()
    guard, _ = make_guard(store, compression=name)
    pages = Pages(3)
    pages.data[1] = 7
    assert guard.set(keys(3), pages.views, pages.addresses) == [HIT] * 3
    assert len(store.pages[key(1)]) < HEADER_BYTES + BYTES // 2
    statuses, read = get(guard, 3)
    assert statuses == [HIT] * 3
    assert np.array_equal(read.data, pages.data)
    codec = compression.codec_named(name)
    assert codec is not None
    for stored in (b"", b"not compressed", codec.compress(memoryview(bytes(BYTES - 1)))):
        assert not codec.decompress(bytes(stored), pages.views[0])


@pytest.mark.parametrize(
    "page_bytes, pages", [(1, 128), (2 << 20, 128), (2 << 21, 64), (8_388_608, 32), (300 << 20, 1)]
)
def test_a_call_takes_pages_and_bytes_up_to_a_limit(page_bytes: int, pages: int) -> None:
    assert pages_at_once(page_bytes) == pages
    assert batches(2 * pages + 1, page_bytes) == [(0, pages), (pages, 2 * pages), (2 * pages, 2 * pages + 1)]
