"""Storage that loses, mixes up, holds up or hangs: field cases 8, 18, 21, 24, 26, 32, 34, 35, 41, 49 and 51.

On the whole cache, with storage in memory whose timing and faults a test decides, or with files.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    Clock,
    LateCopies,
    MemoryStore,
    assert_nothing_held,
    assert_served,
    compute,
    make_cache,
    serve,
    toks,
    with_manual_threads,
)
from tests.storage.support import Pages, keys, make_guard
from unified_cache import Request, UnifiedCache, page_hashes
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.contract import ObjectBatch, PageStatus

P = PAGE


class Scene:
    """A cache and its storage, with threads that the test runs."""

    def __init__(self, store: MemoryStore, pages: int = 64, **settings: Any) -> None:
        self.store, self.clock = store, Clock()
        self.cache = make_cache(
            pages,
            storage=store,
            clock=self.clock,
            **(
                {"prefetch_threshold": P, "prefetch_policy": "wait_complete", "load_back_threshold": 0}
                | settings
            ),
        )
        self.writes, self.reads = with_manual_threads(self.cache)

    def compute(self, tokens: Any, **namespace: Any) -> None:
        """A request that computes all of this."""
        request = self.cache.begin(tokens, **namespace)
        request.extend()
        compute(request)
        request.finish()
        self.cache.tick()

    def settle(self) -> None:
        for _ in range(6):
            self.cache.flush(0.005)
            self.writes.drain()
            self.reads.drain()
        self.cache.tick()

    def stored_tokens(self, tokens: Any, **namespace: Any) -> int:
        """What a fresh cache would find in storage."""
        assert self.cache._storage is not None
        names = self.cache._storage._keys.keys(page_hashes(tokens, P, **namespace))
        return next((at for at, name in enumerate(names) if name not in self.store.pages), len(names)) * P

    def ask(self, tokens: Any, **namespace: Any) -> int:
        """Storage hit of a request that waits for all of it, checked."""
        request = self.cache.begin(np.append(tokens, 7), **namespace)
        self.settle()
        assert request.prefetch_done()
        hit = request.wait_prefetch()
        request.load_back()
        request.extend()
        request.wait()
        assert_served(request)
        request.abort()
        self.settle()
        return hit

    def end(self) -> None:
        self.settle()
        assert_nothing_held(self.cache)
        self.cache.close()


def stored(*prompts: Any, **namespace: Any) -> MemoryStore:
    store = MemoryStore()
    scene = Scene(store, prefetch_threshold=10**6)
    for tokens in prompts:
        scene.compute(tokens, **namespace)
    scene.end()
    store.calls.clear()
    return store


# Case 8


@pytest.mark.parametrize("cuts", [[8], [8, 4], [4, 12]])
def test_case_08_a_cut_before_the_host_ack(cuts: list[int]) -> None:
    """Fault: the pending record points at the node that is only the suffix after a cut: the first pages never
    reach storage, and since a hit counts from the start it is 0 for ever.

    Right: all 4 pages are stored, both (all three) parts count as backed up.
    """
    scene = Scene(MemoryStore())
    copies = LateCopies.into(scene.cache)
    tokens = toks(16)
    scene.compute(tokens)
    for cut in cuts:
        scene.compute(np.concatenate((tokens[:cut], toks(8, 1000 + cut))))
    copies.run_all()
    scene.settle()
    copies.run_all()
    scene.settle()
    assert scene.stored_tokens(tokens) == 16
    match = scene.cache.tree.peek_prefix(tokens)
    node, parts = match.last_host_node, 0
    while node != scene.cache.tree.root:
        info = scene.cache.tree.node_info(node)
        assert info.host_pages is not None
        assert info.pending is None
        parts, node = parts + 1, info.parent  # type: ignore[assignment]
    assert parts == len(set(cuts)) + 1
    scene.end()
    fresh = Scene(scene.store)
    assert fresh.ask(tokens) == 16
    fresh.end()


def test_case_08_a_cut_while_it_is_written() -> None:
    """The same between host ack and storage ack: both parts are written, and stay until then."""
    scene = Scene(MemoryStore())
    tokens = toks(16)
    scene.compute(tokens)
    while not scene.writes.jobs:
        scene.cache.flush(0.005)
    assert len(scene.writes.jobs) == 1
    upper = scene.cache.match_prefix(tokens[:8]).last_host_node
    lower = scene.cache.match_prefix(tokens).last_host_node
    assert upper != lower
    locks = [scene.cache.tree.node_info(node).host_lock_ref for node in (upper, lower)]
    assert locks == [1, 1]
    assert scene.cache._controller.make_host_room(10**6) == 0
    scene.settle()
    assert scene.stored_tokens(tokens) == 16
    assert [scene.cache.tree.node_info(node).host_lock_ref for node in (upper, lower)] == [0, 0]
    scene.end()


# Case 18


def test_case_18_pages_of_an_aborted_read_are_nobody_s_yet() -> None:
    """Fault: a read that was aborted goes on writing by a list of pages that it shares with the free list.

    Right: its pages are free only when the thread is off them; what others get meanwhile shares none.
    """
    scene = Scene(stored(toks(32)), pages=32, hicache_ratio=0.5)
    request = scene.cache.begin(np.append(toks(32), 7))
    scene.cache.tick()
    assert scene.reads.run()
    scene.cache.tick()
    host = scene.cache._host_pages
    assert host is not None
    taken: list[int] = []
    destinations = request._prefetch.pages.tolist()  # type: ignore[union-attr]

    def before(call: str) -> None:
        request.abort()
        scene.cache.tick()
        other = host.alloc(8)
        taken.extend(other.tolist())
        for page in taken:
            scene.cache.host_pool.page_view(page)[:] = b"\x11" * scene.cache.host_pool.page_bytes  # type: ignore[union-attr]

    scene.store.before = before
    assert scene.reads.run()
    assert len(destinations) == len(taken) == 8
    assert not set(destinations) & set(taken)
    for page in taken:
        assert bytes(scene.cache.host_pool.page_view(page)) == b"\x11" * scene.cache.host_pool.page_bytes  # type: ignore[union-attr]
    scene.store.before = lambda call: None
    host.free(np.array(taken, np.uint32))
    scene.cache.tick()
    assert host.free_pages == 16
    scene.end()


# Case 21


@pytest.mark.parametrize("late", [True, False])
def test_case_21_a_read_that_outlives_its_protection(late: bool) -> None:
    """Fault: the store gives a buffer to another page while it is being read, and the read ends "OK".

    Right: page 2 is a miss: by its checksum and key, or since the call ended too late. What was read before
    is a hit of 2 pages (or of nothing where all of it was one late call), the other host pages are free.
    """
    tokens = toks(16)
    store = stored(tokens, toks(16, 500))
    scene = Scene(store, storage_timeout=0.05)
    request = scene.cache.begin(np.append(tokens, 7))
    scene.cache.tick()
    assert scene.reads.run()
    scene.cache.tick()
    names = request._prefetch.keys  # type: ignore[union-attr]
    foreign = next(name for name in store.pages if name not in names)

    def before(call: str) -> None:
        if call == "get":
            store.pages[names[2]] = store.pages[foreign]
            scene.clock.now += 0.2 if late else 0.01

    store.before = before
    assert scene.reads.run()
    store.before = lambda call: None
    scene.cache.tick()
    assert request.wait_prefetch() == (0 if late else 2 * P)
    assert request.load_back() == (0 if late else 2 * P)
    request.extend()
    request.wait()
    assert_served(request)
    assert scene.cache.usage()["host_free_pages"] == 128 - (0 if late else 2)
    request.abort()
    scene.end()


# Case 24


def test_case_24_a_batch_that_fails_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: after a batch that failed all 8 pages count as present, and are never written again.

    Right: 4 pages are, 4 are counted as failed; the next access writes the other 4, and these only.
    """
    monkeypatch.setattr("unified_cache.storage.backup.BATCH_PAGES", 2)
    store = MemoryStore()
    scene = Scene(store, pages=16)
    tokens = toks(32)

    def fault() -> str | None:
        return "full" if len(store.pages) >= 4 else None

    store.fault = fault
    scene.compute(tokens)
    scene.settle()
    assert len(store.pages) == scene.stored_tokens(tokens) // P == 4
    stats = scene.cache.stats()
    assert (stats["storage_failed_pages"], stats["storage_written_pages"]) == (4, 4)
    assert scene.cache.tree.host_tokens == 32
    nodes = scene.cache.tree.host_nodes()
    assert [scene.cache.tree.node_info(node).host_lock_ref for node in nodes] == [0]

    store.fault = lambda: None
    store.calls.clear()
    scene.compute(np.append(tokens, 7))
    scene.settle()
    puts = sum(count for call, count in store.calls if call == "set")
    assert puts == 4
    assert scene.stored_tokens(tokens) == 32
    scene.cache.reset()
    assert scene.ask(tokens) == 32
    scene.end()


def test_case_24_lost_before_it_was_stored_it_is_computed_and_written_again() -> None:
    """The same where device and host lose the pages first."""
    store = MemoryStore()
    store.fault = lambda: "full"
    scene = Scene(store)
    tokens = toks(32)
    scene.compute(tokens)
    scene.settle()
    scene.cache.reset()
    store.fault = lambda: None
    assert scene.ask(tokens) == 0
    scene.compute(tokens)
    scene.settle()
    assert scene.stored_tokens(tokens) == 32
    scene.end()


# Case 26


@pytest.fixture
def few_files() -> Iterator[int]:
    """At most 64 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, open_now + 20), hard))
    yield max(64, open_now + 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_case_26_no_transfer_leaves_a_file_open(tmp_path: Path, few_files: int) -> None:
    """Fault: files that were opened for a transfer are never closed, and nothing can be opened in the end.

    Right: as many are open after as before, with and without errors; "too many open files" is an error, and
    no miss.
    """
    guard, _ = make_guard(PagesBackend(tmp_path / "store"))
    before = len(os.listdir("/proc/self/fd"))
    pages = Pages(200)
    for at, name in enumerate(keys(200)):
        one = slice(at, at + 1)
        assert guard.set([name], pages.views[one], pages.addresses[one]) == [PageStatus.HIT]
    read = Pages(200, fill=0)
    for at, name in enumerate(keys(200)):
        one = slice(at, at + 1)
        assert guard.get([name], read.views[one], read.addresses[one]) == [PageStatus.HIT]
    assert np.array_equal(read.data, pages.data)
    assert len(os.listdir("/proc/self/fd")) == before
    # Every second file is damaged.
    for at, path in enumerate(sorted((tmp_path / "store").glob("??/??/*"))):
        if at % 2:
            path.write_bytes(path.read_bytes()[:-1])
    statuses = [guard.get([name], read.views[:1], read.addresses[:1])[0] for name in keys(200)]
    assert (statuses.count(PageStatus.HIT), statuses.count(PageStatus.CORRUPT)) == (100, 100)
    assert len(os.listdir("/proc/self/fd")) == before
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        there = keys(200)[statuses.index(PageStatus.HIT)]
        assert guard.get([there], read.views[:1], read.addresses[:1]) == [PageStatus.ERROR]
    finally:
        for file in held:
            os.close(file)
    assert guard.get([there], read.views[:1], read.addresses[:1]) == [PageStatus.HIT]
    guard.close()


# Case 32


def test_case_32_a_page_is_there_when_all_of_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a page can be seen, and read, while it is being written.

    Right: it is neither there nor read before it has its name, and never if its writer died; what a dead
    writer left goes, and never counts.
    """
    root = tmp_path / "store"
    guard, _ = make_guard(PagesBackend(root))
    pages, read = Pages(1), Pages(1, fill=0)
    looks: list[Any] = []
    real = os.fsync

    def look(file: int) -> None:
        looks.append(guard.exists([keys(1)]))
        looks.append(guard.get(keys(1), read.views, read.addresses))
        real(file)

    monkeypatch.setattr("os.fsync", look)
    monkeypatch.setattr("os.fdatasync", look)
    assert guard.set(keys(1), pages.views, pages.addresses) == [PageStatus.HIT]
    assert looks[:2] == [[0], [PageStatus.MISS]]
    monkeypatch.undo()
    assert guard.get(keys(1), read.views, read.addresses) == [PageStatus.HIT]
    assert np.array_equal(read.data, pages.data)
    guard.close()
    # What is left of one that was killed: a temporary file with half of a page.
    (temporary,) = [path for path in root.iterdir() if path.name.startswith(".")]
    left = temporary / ("0" * 32)
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 7200,) * 2)
    again = PagesBackend(root)
    assert again.stats()["objects"] == 1
    assert not left.exists()
    again.close()


# Case 34


def test_case_34_no_room_for_all_of_a_hit() -> None:
    """Fault: there is room for 4 of 6 pages; buffers that were never filled are taken for hits.

    Right: 4 pages with the right bytes are a hit (or none is), and everything is free in the end.
    """
    tokens = toks(24)
    scene = Scene(stored(tokens), pages=16, hicache_ratio=0.5)  # 8 host pages, half of them for reading
    scene.cache.host_pool.memory[:] = b"\xee" * len(scene.cache.host_pool.memory)  # type: ignore[union-attr]
    assert scene.ask(tokens) == 16
    scene.end()


# Case 35


def test_case_35_mirrors_on_host_do_not_starve_storage() -> None:
    """Fault: the host is full of copies of what is on device: most never reach storage, and there is no room
    to read anything into.

    Right: storage ends with 64 tokens, an 8-token prefetch gets its room, the device keeps all it had.
    """
    elsewhere = toks(8, 9000)
    scene = Scene(stored(elsewhere), pages=16, hicache_ratio=0.25)
    prefixes = [toks(8, 100 * at) for at in range(8)]
    for tokens in prefixes:
        pages = scene.cache.alloc(2)
        scene.cache.insert(tokens, pages)
        scene.settle()
    assert [scene.stored_tokens(tokens) for tokens in prefixes] == [8] * 8
    assert len(scene.store.pages) == 16 + 2
    request = scene.cache.begin(np.append(elsewhere, 7))
    scene.settle()
    assert request.wait_prefetch() == 8
    assert [scene.cache.tree.peek_prefix(tokens).device_length for tokens in prefixes] == [8] * 8
    request.abort()
    scene.end()


# Case 41


def test_case_41_namespaces_are_apart_in_storage() -> None:
    """Fault: keys in storage are made of tokens alone, so that other namespaces hit.

    Right: "b" and none get nothing, "a" gets 2 pages; without namespaces keys are as they always were.
    """
    tokens = toks(8)
    store = stored(tokens, extra_key="a")
    for namespace, hit in (
        ({"extra_key": "b"}, 0),
        ({}, 0),
        ({"extra_key": ""}, 0),
        ({"cache_salt": "a"}, 0),
        ({"extra_key": "a", "cache_salt": ""}, 0),
        ({"extra_key": "a"}, 8),
    ):
        scene = Scene(store)
        assert scene.ask(tokens, **namespace) == hit, namespace
        scene.end()
    plain = stored(tokens)
    hashes = [row.tobytes().hex() for row in page_hashes(tokens, P)]
    assert sorted(name[:64] for name in plain.pages) == sorted(hashes)
    assert not set(plain.pages) & set(store.pages)


# Case 49


def test_case_49_an_end_is_taken_at_the_next_tick() -> None:
    """Fault: that a read has ended is only seen when the queue gets to its request, 20 ticks later.

    Right: at the end of the next tick its pages are in the tree, and nothing is held for it; a request that
    shares its prefix hits them.
    """
    shared = toks(16, 3000)
    scene = Scene(stored(toks(16), shared))
    queue = [scene.cache.begin(np.append(tokens, 7)) for tokens in (toks(16), toks(16, 7000), shared)]
    scene.cache.tick()
    assert scene.reads.run()
    scene.cache.tick()
    scene.reads._queued.reverse()  # the last one's read ends first
    assert scene.reads.run()
    scene.cache.tick()
    usage = scene.cache.usage()
    assert usage["host_tree_pages"] == 4
    assert usage["host_reading_pages"] == 4  # of the first one alone
    assert scene.cache._storage is not None
    assert len(scene.cache._storage._reads._reading) == 1
    second = scene.cache.begin(np.append(shared, 8))
    assert second.host_hit_length == 16
    for request in [*queue, second]:
        request.abort()
    scene.end()


# Case 51


class Stuck(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        self.inside.set()
        assert self.go_on.wait(60)
        return super().get(batch)


def storage_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("unified-cache"))


def reading(cache: UnifiedCache, store: Stuck, tokens: Any) -> Request:
    request = cache.begin(tokens)
    end = time.monotonic() + 30
    while not store.inside.is_set():
        cache.tick()
        assert time.monotonic() < end
        assert cache._storage is not None
        cache._storage.wait(0.005)
    return request


def test_case_51_as_many_threads_after_a_reset_as_before() -> None:
    """Fault: a reset starts threads anew while the old ones live on: two consumers of one queue.

    Right: the same threads after 5 resets, and also where the backend is stuck inside a call: the reset then
    waits for nothing, the pages that the call touches stay out of use, and the stuck thread can be named.
    """
    store, clock = Stuck(), Clock()
    with make_cache(64, storage=store, clock=clock, prefetch_threshold=P, storage_timeout=1.0) as cache:
        serve(cache, toks(17))
        assert cache.flush(30)
        before = storage_threads()
        for _ in range(5):
            cache.reset()
        assert storage_threads() == before
        reading(cache, store, toks(17))
        begun = time.monotonic()
        cache.reset(force=True)
        assert time.monotonic() - begun < 5  # what hangs never comes back
        clock.now += 2
        cache.tick()
        assert storage_threads() == before
        assert cache._storage is not None
        (stuck,) = cache._storage.stuck
        assert stuck in before
        assert cache.usage()["host_quarantined_pages"] == 4
        # It goes on working, without what is stuck.
        assert serve(cache, toks(17)) == (0, 0, 0)
        store.go_on.set()
        end = time.monotonic() + 30
        while cache.usage()["host_quarantined_pages"]:
            assert time.monotonic() < end
            cache._storage.wait(0.005)
            cache.tick()
        assert storage_threads() == before
        assert_nothing_held(cache)
