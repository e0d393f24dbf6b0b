"""What a review of the storage tier has found: threads that hang, what is tried again, what is refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from tests.cache.support import PAGE, Clock, MemoryStore, assert_nothing_held, make_cache, serve, toks
from tests.cache.test_storage_threads import LONG, Hanging, hang_in, on, until
from tests.storage.support import Pages, key, keys, make_guard
from unified_cache import Request, StorageError, UnifiedCache
from unified_cache.storage import compression
from unified_cache.storage.backends.memory import MemoryBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.urls import StorageUrl, backend_class, open_storage, schemes


@pytest.fixture
def store() -> Iterator[Hanging]:
    hanging = Hanging()
    yield hanging
    hanging.open.set()


def done_soon(request: Request, cache: UnifiedCache, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether a request that waits for everything stops waiting while the storage does nothing more."""
    end = clock() + 3
    while not request.prefetch_done() and clock() < end:
        cache.tick()
        if cache._storage is not None:
            cache._storage.wait(0.005)
    return request.prefetch_done()


# Threads that hang


def test_nobody_follows_a_prefetch_that_reads_no_more(store: Hanging) -> None:
    cache, _ = on(store)
    first = hang_in(cache, store, "get")
    first.abort()  # its call goes on, and what it brings is nobody's
    store.held = ()
    second = cache.begin(toks(LONG))
    assert done_soon(second, cache)
    assert second.wait_prefetch() == 12 * PAGE
    second.abort()
    store.open.set()
    until(lambda: cache._storage is not None and not cache._storage.busy, cache)
    assert_nothing_held(cache)
    cache.close()


@pytest.mark.parametrize("call", ["exists", "get"])
def test_nobody_waits_for_threads_that_all_hang(store: Hanging, call: str) -> None:
    cache, clock = on(store, storage_read_threads=1)
    first = hang_in(cache, store, call)
    clock.now += 1.3
    cache.tick()
    # The breaker's pause is over, and there is no thread that could try.
    clock.now += 100
    second = cache.begin(toks(LONG, 5000))
    assert done_soon(second, cache)
    for request in (first, second):
        request.abort()
    store.open.set()
    until(lambda: cache._storage is not None and not cache._storage.busy, cache)
    assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
    assert_nothing_held(cache)
    cache.close()


def test_reads_that_are_queued_end_when_all_threads_hang(store: Hanging) -> None:
    cache, clock = on(store, storage_read_threads=1)
    first = hang_in(cache, store, "exists")
    # Asked before anybody knows that the thread hangs: it waits in the queue.
    second = cache.begin(toks(LONG, 5000))
    cache.tick()
    clock.now += 100
    assert done_soon(second, cache)
    for request in (first, second):
        request.abort()
    store.open.set()
    until(lambda: cache._storage is not None and not cache._storage.busy, cache)
    assert_nothing_held(cache)
    cache.close()


def test_writes_that_are_queued_lock_nothing_when_all_threads_hang(store: Hanging) -> None:
    cache, clock = on(store, storage_write_threads=1)
    store.clear()
    store.hang("set")
    serve(cache, toks(LONG, 300))
    until(lambda: store.inside.acquire(blocking=False), cache)
    clock.now += 1.3
    cache.tick()
    clock.now += 100
    serve(cache, toks(LONG, 600))
    assert cache.flush(3)
    waiting = cache.tree.peek_prefix(toks(LONG, 600)).last_host_node
    assert cache.tree.node_info(waiting).host_lock_ref == 0
    store.open.set()
    until(lambda: cache._storage is not None and not cache._storage.busy, cache)
    # It was remembered, and is written at its next access.
    serve(cache, toks(LONG, 600))
    assert cache.flush(30)
    assert len(store.pages) == 24
    assert_nothing_held(cache)
    cache.close()


def test_a_look_up_that_hangs_takes_nobody_s_place(store: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.controller.storage_reads._MOST_RUNS", 2)
    cache, clock = on(store)
    hung = [hang_in(cache, store, "exists")]
    hung.append(cache.begin(toks(LONG, 7000)))
    cache.tick()
    until(lambda: store.inside.acquire(blocking=False), cache)
    clock.now += 1.3
    cache.tick()
    clock.now += 100
    store.held = ()
    assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
    assert cache.stats()["prefetches_refused"] == 0
    for request in hung:
        request.abort()
    store.open.set()
    until(lambda: cache._storage is not None and not cache._storage.busy, cache)
    assert_nothing_held(cache)
    cache.close()


def test_a_process_ends_while_a_disk_hangs(tmp_path: Path) -> None:
    # Opening a pipe that nobody writes to hangs, like a file of a server that is gone.
    script = """
        import os, sys, threading, time
        import numpy as np
        from tests.storage.support import Pages, keys, make_guard
        from unified_cache.storage.backends.pages import PagesBackend, _path_of

        class Told(PagesBackend):
            def _get(self, *arguments):
                begun.release()
                return super()._get(*arguments)

        begun = threading.Semaphore(0)
        store = Told(sys.argv[1], threads=4)
        guard, _ = make_guard(store)
        pages = Pages(4)
        for key in keys(4):
            path = os.path.join(sys.argv[1], _path_of(key))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.mkfifo(path)
        call = lambda: guard.get(keys(4), pages.views, pages.addresses)
        threading.Thread(target=call, daemon=True).start()
        for _ in range(4):
            assert begun.acquire(timeout=30)
        print("leaving", flush=True)
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        assert process.wait(timeout=8) == 0
    finally:
        process.kill()
        process.communicate()


def test_an_error_of_a_part_of_a_call_is_raised_when_all_parts_have_ended(tmp_path: Path) -> None:
    store = PagesBackend(tmp_path, threads=3)
    ended = []

    def work(part: int) -> int:
        if part == 1:
            raise StorageError("no")
        time.sleep(0)
        ended.append(part)
        return part

    for _ in range(50):
        ended.clear()
        with pytest.raises(StorageError, match="no"):
            store._threads.run(work, range(8))
        before = list(ended)
        assert store._threads.run(lambda part: 2 * part, range(8)) == [2 * part for part in range(8)]
        assert ended == before
    store.close()


# What is tried again


class Leased(MemoryStore):
    """What was read or asked for stays, as in mooncake without `force`."""

    def delete(self, keys: Sequence[str]) -> int:
        return 0

    def discard(self, keys: Sequence[str]) -> int:
        return super().delete(keys)


def test_what_is_damaged_goes_even_from_under_a_lease() -> None:
    store = Leased()
    guard, _ = make_guard(store)
    pages, read = Pages(1), Pages(1, fill=0)
    assert guard.set(keys(1), pages.views, pages.addresses) == [PageStatus.HIT]
    store.pages[keys(1)[0]] = b"\7" * 500
    assert guard.get(keys(1), read.views, read.addresses) == [PageStatus.CORRUPT]
    assert guard.exists([keys(1)]) == [0]
    assert guard.set(keys(1), pages.views, pages.addresses) == [PageStatus.HIT]
    assert guard.get(keys(1), read.views, read.addresses) == [PageStatus.HIT]
    assert (read.data == pages.data).all()


@pytest.mark.parametrize("why", ["full", "down"])
def test_what_was_not_stored_is_tried_again_after_it_was_cut(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.controller.storage_writes._MOST_GIVEN_UP", 5)
    store, clock = MemoryStore(), Clock()
    cache = make_cache(128, storage=store, prefetch_threshold=PAGE, clock=clock)
    store.fault = lambda: why
    for start in (0, 10000, 20000, 30000, 40000):
        serve(cache, toks(LONG, start))
        assert cache.flush(30)
    assert not store.pages
    store.fault = lambda: None
    clock.now += 1000
    for start in (0, 40000):
        # It shares the first pages with what could not be stored.
        other = toks(LONG, start)
        other[4 * PAGE :] += 5000
        serve(cache, other)
        assert cache.flush(30)
        serve(cache, other)
        assert cache.flush(30)
        cache.tree.check_invariants()
        assert len(store.pages) == (24 if start else 12)
    cache.reset()
    assert serve(cache, other) == (0, 0, 12 * PAGE)
    assert_nothing_held(cache)
    cache.close()


# What a tick costs


class Looked(dict[int, int]):
    """Counts what is looked at."""

    looked = 0

    def items(self) -> Any:
        for item in super().items():
            self.looked += 1
            yield item


def test_a_tick_looks_at_what_it_writes_however_much_waits() -> None:
    store = MemoryStore()
    with make_cache(512, prefetch_threshold=10**6) as cache:
        for start in range(300):
            serve(cache, toks(PAGE, 100 * start))
        assert cache.flush(30)
        cache.attach_storage(store)
        assert cache._storage is not None
        writes = cache._storage._writes
        writes.waiting = Looked(writes.waiting)
        assert len(writes.waiting) == 300
        writes.begin(cache._storage._keys)
        assert writes.waiting.looked <= 304  # type: ignore[attr-defined]
        assert cache.flush(30)
        assert len(store.pages) == 300


# The end


class Broken(MemoryStore):
    def close(self) -> None:
        raise OSError("no")


@pytest.mark.parametrize("how", ["close", "detach"])
def test_a_backend_that_can_not_be_closed_keeps_nothing_else_open(how: str) -> None:
    cache = make_cache(16, storage=Broken())
    serve(cache, toks(LONG))
    if how == "detach":
        assert cache.detach_storage()
        assert_nothing_held(cache)
    cache.close()
    assert cache.host_pool is not None
    assert cache.host_pool._memory is None
    if how == "close":
        assert cache.stats()["storage_failed_calls"] == 1


class Leaving(MemoryStore):
    """A client that gives up on the whole process, in one of its threads."""

    leaves = True

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        if self.leaves:
            raise SystemExit(1)
        return super().exists(runs)


def test_a_client_that_leaves_is_a_failure_like_others() -> None:
    store, clock = Leaving(), Clock()
    with make_cache(64, storage=store, clock=clock, prefetch_threshold=PAGE) as cache:
        for start in range(0, 5000, 1000):
            serve(cache, toks(LONG, start))
            assert cache.flush(30)
            clock.now += 1000  # whoever comes next tries whether it is back
        store.leaves = False
        serve(cache, toks(LONG))
        assert cache.flush(30)
        assert len(store.pages) == 12
        cache.reset()
        assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
        assert_nothing_held(cache)


# What is refused when


def test_slots_that_no_page_fits_in_are_refused_when_the_storage_is_attached(tmp_path: Path) -> None:
    url = f"mmap://{tmp_path}/store?size=1MiB"
    open_storage(url + "&slot=4096").close()
    pages = MmapPages(16384)
    for given in (f"mmap://{tmp_path}/store", url):
        backend = open_storage(given)
        guard, _ = make_guard(backend)
        guard.object_bytes = 16384
        with pytest.raises(StorageError, match=r"16384 bytes .*slots of 4096: .*remove .*store\.\*"):
            guard.register(pages.memory)
        backend.close()
    # A store whose slots have no size yet, and that has no room for one page.
    small = open_storage(f"mmap://{tmp_path}/small?size=20000")
    guard, _ = make_guard(small)
    guard.object_bytes = 1 << 20
    with pytest.raises(StorageError, match=r"size=20000 has no room for an object of 1048576 bytes"):
        guard.register(pages.memory)
    small.close()


@pytest.mark.parametrize("scheme", ["file", "mmap"])
def test_slots_hold_whole_pages_though_the_first_ones_were_compressed(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Squeeze(compression.Codec):
        number, name = 9, "squeeze"

        def compress(self, page: memoryview) -> bytes:
            return zlib.compress(page)

        def decompress(self, stored: Any, page: memoryview) -> bool:
            page[:] = zlib.decompress(stored)
            return True

    monkeypatch.setitem(compression.CODECS, "squeeze", Squeeze)
    guard = StorageGuard(
        open_storage(f"{scheme}://{tmp_path}/store?size=1MiB"),
        object_bytes=16384,
        deadline=5,
        clock=time.monotonic,
        counts=StorageCounts(),
        compression="squeeze",
    )
    pages = np.zeros((2, 16384), np.uint8)
    pages[1] = np.random.default_rng(1).integers(0, 256, 16384)
    guard.register(memoryview(pages).cast("B"))
    for at in (0, 1):
        place = np.array([pages[at].ctypes.data], np.uint64)
        assert guard.set([key(at)], [memoryview(pages[at])], place) == [PageStatus.HIT]
    guard.close()


@pytest.mark.parametrize("scheme", ["file", "mmap"])
def test_looking_at_no_store_makes_none(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"there is no store yet: add size="):
        open_storage(f"{scheme}://{tmp_path}/typo/store")
    assert list(tmp_path.iterdir()) == []


class MmapPages:
    def __init__(self, count: int) -> None:
        self.memory = memoryview(bytearray(count))


HERE = "tests.storage.test_storage_review"


# dynamic://


class Mine(MemoryBackend):
    """A backend that no package has made known."""

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        url.only("room")
        mine = cls(capacity=url.size("room"))
        mine.deadline = deadline  # type: ignore[attr-defined]
        return mine


class NoUrl:
    pass


def test_a_backend_by_module_and_class() -> None:
    assert "dynamic" in schemes()
    assert backend_class("dynamic") is not None
    backend = open_storage("dynamic://tests.storage.test_storage_review:Mine?room=1MiB", 2.5)
    assert isinstance(backend, Mine)
    assert backend.deadline == 2.5  # type: ignore[attr-defined]
    guard, _ = make_guard(backend)
    pages = Pages(2)
    assert guard.set(keys(2), pages.views, pages.addresses) == [PageStatus.HIT] * 2
    guard.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("dynamic://", "write dynamic://package.module:Class"),
        ("dynamic://tests.storage", "write dynamic://package.module:Class"),
        ("dynamic://tests.storage:", "write dynamic://package.module:Class"),
        (f"dynamic://{HERE}:Mine/path?x=1", "there is no option 'x'"),
        ("dynamic://tests.no_such:Mine", "module tests.no_such can not.*No module named 'tests.no_such'"),
        (f"dynamic://{HERE}:Other", f"{HERE} has no class Other"),
        (f"dynamic://{HERE}:NoUrl", "NoUrl of .*no class of a Backend with from_url"),
        (f"dynamic://{HERE}:toks", "toks of .*no class of a Backend with from_url"),
    ],
)
def test_a_class_that_is_no_backend(url: str, said: str) -> None:
    with pytest.raises(StorageError, match=said):
        open_storage(url)
