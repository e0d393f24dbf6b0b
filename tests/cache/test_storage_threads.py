"""Several requests and threads at once: what is asked and read once, what is in whose way, what hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    Clock,
    MemoryStore,
    assert_nothing_held,
    assert_served,
    make_cache,
    serve,
    toks,
    until,
    with_manual_threads,
)
from unified_cache import ArgumentError, BusyError, Request, UnifiedCache
from unified_cache.storage.contract import ObjectBatch, PageStatus

LONG = 12 * PAGE + 1


def filled(*prompts: Any, **settings: Any) -> MemoryStore:
    """A store that holds these prompts."""
    store = MemoryStore()
    with make_cache(64, storage=store, prefetch_threshold=10**6, **settings) as cache:
        for prompt in prompts:
            serve(cache, prompt)
        assert cache.flush(30)
    store.calls.clear()
    store.closed = 0
    return store


class Hands:
    """A cache on a store, with threads that the test runs by hand."""

    def __init__(self, store: MemoryStore, pages: int = 64, **settings: Any) -> None:
        self.clock, self.store = Clock(), store
        self.cache = make_cache(
            pages,
            storage=store,
            clock=self.clock,
            **(
                {"prefetch_threshold": PAGE, "prefetch_policy": "wait_complete", "load_back_threshold": 0}
                | settings
            ),
        )
        self.writes, self.reads = with_manual_threads(self.cache)

    def begin(self, prompt: Any, **others: Any) -> Request:
        return self.cache.begin(prompt, **others)

    def go(self) -> None:
        """Everything that is under way ends."""
        for _ in range(6):
            self.cache.tick()
            self.reads.drain()
            self.writes.drain()
            self.cache._controller.take_done(wait=True, timeout=1)
        self.cache.tick()

    def gets(self) -> list[int]:
        return [count for call, count in self.store.calls if call == "get"]

    def end(self, *requests: Request) -> None:
        for request in requests:
            request.abort()
        self.go()
        assert_nothing_held(self.cache)
        self.cache.close()


def served(request: Request) -> int:
    """What a request gets, checked; it ends with it."""
    request.load_back()
    request.extend()
    request.wait()
    assert_served(request)
    length = request.device_length
    request.abort()
    return length


def forked(length: int, at: int) -> np.ndarray:
    """A prompt that parts from `toks(LONG)` at page `at`."""
    tokens = toks(length)
    tokens[at * PAGE :] += 5000
    return tokens


# One question, one read


def test_a_queue_of_requests_is_one_question() -> None:
    hands = Hands(filled(toks(LONG), toks(LONG, 1000)))
    requests = [hands.begin(prompt) for prompt in (toks(LONG), toks(LONG, 1000), toks(LONG, 2000))]
    hands.cache.tick()
    hands.reads.run()
    assert hands.store.calls == [("exists", 36)]
    hands.go()
    assert [request.storage_hit_length // PAGE for request in requests] == [12, 12, 0]
    assert hands.cache.stats()["storage_look_ups"] == 1
    hands.end(*requests)


def test_two_requests_for_one_page_read_it_once() -> None:
    hands = Hands(filled(toks(LONG)))
    first, second = hands.begin(toks(LONG)), hands.begin(toks(LONG))
    hands.go()
    assert hands.gets() == [12]
    assert first.prefetch_done()
    assert second.prefetch_done()
    assert hands.cache.stats()["storage_shared_pages"] == 12
    assert [served(first), served(second)] == [12 * PAGE] * 2
    hands.end()


def test_what_follows_is_read_meanwhile() -> None:
    other = forked(LONG, 5)
    hands = Hands(filled(toks(LONG), other))
    first, second, third = hands.begin(toks(LONG)), hands.begin(other), hands.begin(other[: 9 * PAGE + 1])
    hands.cache.tick()
    assert hands.reads.run()
    hands.cache.tick()
    assert len(hands.reads.jobs) == 2
    # The later part comes first: it waits for the earlier one.
    hands.reads._queued.reverse()
    assert hands.reads.run()
    hands.cache.tick()
    assert not second.prefetch_done()
    assert not third.prefetch_done()
    hands.go()
    assert sorted(hands.gets()) == [7, 12]
    assert [served(r) for r in (third, second, first)] == [9 * PAGE, 12 * PAGE, 12 * PAGE]
    hands.end()


@pytest.mark.parametrize("when", ["before", "between"])
def test_the_first_one_s_end_is_not_that_of_the_read(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage.backup.BATCH_PAGES", 4)
    hands = Hands(filled(toks(LONG)))
    first, second = hands.begin(toks(LONG)), hands.begin(toks(LONG))
    hands.cache.tick()
    assert hands.reads.run()
    hands.cache.tick()
    if when == "between":
        assert hands.reads.run()
    first.abort()
    hands.go()
    assert hands.gets() == [4, 4, 4]
    assert served(second) == 12 * PAGE
    hands.end()


def test_nobody_reads_on_for_nobody() -> None:
    hands = Hands(filled(toks(LONG)))
    first, second = hands.begin(toks(LONG)), hands.begin(toks(LONG))
    hands.cache.tick()
    assert hands.reads.run()
    hands.cache.tick()
    second.abort()
    first.abort()
    assert hands.reads.jobs == []
    assert hands.cache.usage()["host_free_pages"] == 128
    hands.end()


@pytest.mark.parametrize("fault", ["gone", "error", "flip"])
def test_a_page_that_fails_ends_both_hits(fault: str) -> None:
    hands = Hands(filled(toks(LONG), forked(LONG, 9)))
    first, second = hands.begin(toks(LONG)), hands.begin(forked(LONG, 9))
    hands.cache.tick()
    assert hands.reads.run()
    hands.cache.tick()
    faults = iter([None] * 4 + [fault])
    hands.store.fault = lambda: next(faults, None)
    hands.go()
    # What was read past it hangs below nothing else.
    assert hands.cache.usage()["host_tree_pages"] == 3
    assert [served(first), served(second)] == [3 * PAGE] * 2
    hands.end()


def test_stopped_early_the_second_gets_what_the_first_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage.backup.BATCH_PAGES", 4)
    hands = Hands(filled(toks(LONG)), prefetch_policy="timeout")
    first, second = hands.begin(toks(LONG)), hands.begin(toks(LONG))
    hands.cache.tick()
    assert hands.reads.run()
    hands.cache.tick()
    assert hands.reads.run()
    hands.clock.now = 100
    assert second.wait_prefetch() == 4 * PAGE
    assert served(second) == 4 * PAGE
    hands.go()
    assert served(first) == 12 * PAGE
    hands.end()


def test_the_more_urgent_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage.backup.BATCH_PAGES", 6)
    hands = Hands(filled(toks(LONG), toks(LONG, 1000)))
    slow, urgent = hands.begin(toks(LONG)), hands.begin(toks(LONG, 1000), priority=3)
    hands.cache.tick()
    assert hands.reads.run()
    hands.cache.tick()
    assert [hands.reads.run(), hands.reads.run()] == [True, True]
    hands.cache.tick()
    assert urgent.prefetch_done()
    assert not slow.prefetch_done()
    hands.end(slow, urgent)


def test_half_of_the_host_pool_is_read_into_at_most() -> None:
    prompts = [toks(LONG, start) for start in (0, 1000, 2000)]
    hands = Hands(filled(*prompts), pages=16, hicache_ratio=2.0)
    requests = [hands.begin(prompt) for prompt in prompts]
    hands.cache.tick()
    assert hands.reads.run()
    hands.cache.tick()
    usage = hands.cache.usage()
    assert usage["host_reading_pages"] == 16
    assert requests[2].prefetch_done()
    hands.end(*requests)


def test_ends_are_taken_whatever_the_order() -> None:
    prompts = [toks(LONG, start) for start in (0, 1000, 2000)]
    hands = Hands(filled(*prompts))
    requests = [hands.begin(prompt) for prompt in prompts]
    hands.cache.tick()
    assert hands.reads.run()
    hands.cache.tick()
    hands.reads._queued.reverse()
    assert hands.reads.run()
    hands.cache.tick()
    assert [request.prefetch_done() for request in requests] == [False, False, True]
    assert hands.cache.usage()["host_tree_pages"] == 12
    hands.end(*requests)


# Head groups


def test_an_object_is_a_head_group_of_a_page() -> None:
    settings: dict[str, Any] = {"host_layout": "page_head", "storage_head_groups": 2}
    store = filled(toks(LONG), **settings)
    assert len(store.pages) == 24
    hands = Hands(store, **settings)
    request = hands.begin(toks(LONG))
    hands.go()
    assert served(request) == 12 * PAGE
    hands.end()
    # A page with a group missing is no page.
    digest = sorted(store.pages)[0][:64]
    del store.pages[next(key for key in store.pages if key.startswith(digest) and key.endswith("1"))]
    hands = Hands(store, **settings)
    request = hands.begin(toks(LONG))
    prefetch = request._prefetch
    assert prefetch is not None
    at = prefetch.hashes.tobytes().hex().index(digest) // 64
    hands.go()
    assert served(request) == at * PAGE
    hands.end()
    # Another number of groups is another way to lie.
    for groups in (1, 2):
        other = Hands(store, host_layout="page_head", storage_head_groups=groups)
        request = other.begin(toks(5))
        other.go()
        assert (served(request) > 0) == (groups == 2 and at > 0)
        other.end()


# Storage that hangs


class Hanging(MemoryStore):
    """A store whose calls wait while `shut` is closed, in the places that `held` names."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.inside = threading.Semaphore(0)
        self.held: tuple[str, ...] = ("exists", "get", "set")
        self.before = self.wait

    def wait(self, call: str) -> None:
        if call in self.held and not self.open.is_set():
            self.inside.release()
            assert self.open.wait(60)

    def hang(self, *held: str) -> None:
        self.held = held
        self.open.clear()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    store = Hanging()
    yield store
    store.open.set()


def threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("unified-cache storage"))


def hang_in(cache: UnifiedCache, store: Hanging, call: str) -> Request:
    """A request whose read is held up in a call."""
    store.hang(call)
    request = cache.begin(toks(LONG))
    until(lambda: store.inside.acquire(blocking=False), cache)
    return request


def on(store: Hanging, **settings: Any) -> tuple[UnifiedCache, Clock]:
    clock = Clock()
    cache = make_cache(
        64,
        storage=store,
        clock=clock,
        **(
            {"prefetch_threshold": PAGE, "prefetch_policy": "wait_complete", "storage_timeout": 1.0}
            | settings
        ),
    )
    serve(cache, toks(LONG))
    assert cache.flush(30)
    cache.reset()
    return cache, clock


@pytest.mark.parametrize("call", ["exists", "get"])
def test_a_store_that_hangs_is_a_miss_in_time(hanging: Hanging, call: str) -> None:
    cache, clock = on(hanging)
    request = hang_in(cache, hanging, call)
    cache.tick()
    assert not request.prefetch_done()
    clock.now += 1.3
    cache.tick()
    assert request.prefetch_done()
    assert request.wait_prefetch() == 0
    # Pages that the call may still write stay out of use.
    usage = cache.usage()
    assert usage["host_reading_pages"] == (12 if call == "get" else 0)
    assert cache._storage is not None
    assert len(cache._storage.stuck) == 1
    # Nobody else waits either, and nothing is asked.
    asked = len(hanging.calls)
    others = [cache.begin(toks(LONG, at)) for at in (0, 100, 200)]
    assert all(other.prefetch_done() for other in others)
    cache.tick()
    assert len(hanging.calls) == asked
    assert cache.flush(0.5)
    for one in (request, *others):
        one.abort()
    # It comes back: what it brings now is no data any more.
    hanging.open.set()
    until(lambda: not cache._storage.busy, cache)
    assert cache.usage()["host_free_pages"] == 128
    clock.now += 2
    assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
    assert cache.stats()["storage_late_calls"] == 1
    assert_nothing_held(cache)
    cache.close()


def test_a_write_that_hangs_keeps_its_pages_and_nobody_waits(hanging: Hanging) -> None:
    cache, clock = on(hanging)
    hanging.clear()
    hanging.hang("set")
    serve(cache, toks(LONG, 300))
    until(lambda: hanging.inside.acquire(blocking=False), cache)
    clock.now += 1.3
    cache.tick()
    serve(cache, toks(LONG, 600))
    assert cache.flush(10)
    written = cache.tree.peek_prefix(toks(LONG, 300)).last_host_node
    assert cache.tree.node_info(written).host_lock_ref == 1
    hanging.open.set()
    until(lambda: cache._storage is None or not cache._storage.busy, cache)
    assert len(hanging.pages) == 12
    # What was not written meanwhile is tried again at its next access.
    clock.now += 2
    serve(cache, toks(LONG, 600))
    assert cache.flush(30)
    assert_nothing_held(cache)
    cache.close()


def test_all_threads_hang_and_come_back(hanging: Hanging) -> None:
    cache, clock = on(hanging, storage_read_threads=2)
    for start in (1000, 2000, 3000):
        serve(cache, toks(LONG, start))
    assert cache.flush(30)
    cache.reset()
    before = threads()
    hanging.hang("get")
    requests = [cache.begin(toks(LONG, start)) for start in (0, 1000, 2000, 3000)]
    held = []
    until(lambda: hanging.inside.acquire(blocking=False) and (held.append(1) or len(held) == 2), cache)
    clock.now += 1.3
    cache.tick()
    cache.tick()
    assert all(request.prefetch_done() for request in requests)
    assert threads() == before
    for request in requests:
        request.abort()
    hanging.open.set()
    until(lambda: cache._storage is None or not cache._storage.busy, cache)
    clock.now += 2
    assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
    assert_nothing_held(cache)
    cache.close()


def test_several_batches_are_in_flight(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage.backup.BATCH_PAGES", 3)
    cache, _ = on(hanging)
    hanging.hang("get")
    request = cache.begin(toks(LONG))
    held = []
    until(lambda: hanging.inside.acquire(blocking=False) and (held.append(1) or len(held) == 4), cache)
    hanging.open.set()
    assert request.wait_prefetch() == 12 * PAGE
    request.abort()
    assert_nothing_held(cache)
    cache.close()


def test_reset_waits_for_nothing_and_starts_no_threads(hanging: Hanging) -> None:
    cache, clock = on(hanging)
    before = threads()
    assert len(before) == 6
    for _ in range(5):
        cache.reset()
    assert threads() == before
    hang_in(cache, hanging, "get")
    for _ in range(2):
        begun = time.monotonic()
        cache.reset(force=True)
        assert time.monotonic() - begun < 5  # what hangs never comes back
        usage = cache.usage()
        assert usage["host_quarantined_pages"] == 12
        assert usage["host_free_pages"] == 128 - 12
    assert threads() == before
    clock.now += 1.3
    cache.tick()
    # The pages that the thread is in are nobody else's.
    late = cache._storage
    assert late is not None
    held = set(late.quarantined().tolist())
    fresh = cache._host_pages.alloc(128 - 12)  # type: ignore[union-attr]
    assert not held & set(fresh.tolist())
    cache._host_pages.free(fresh)  # type: ignore[union-attr]
    hanging.open.set()
    until(lambda: not late.busy, cache)
    assert cache.usage()["host_free_pages"] == 128
    assert_nothing_held(cache)
    cache.close()


def test_close_waits_for_no_call_that_hangs(hanging: Hanging) -> None:
    cache, _ = on(hanging)
    request = hang_in(cache, hanging, "get")
    begun = time.monotonic()
    cache.close(timeout=0.05)
    assert time.monotonic() - begun < 5
    assert hanging.closed == 0
    assert len(threads()) == 1
    (thread,) = [t for t in threading.enumerate() if t.name == threads()[0]]
    hanging.open.set()
    thread.join(30)
    assert hanging.closed == 1
    assert threads() == []
    request.abort()


def test_a_store_that_is_down_is_asked_again_after_a_pause() -> None:
    hands = Hands(filled(toks(LONG)))
    hands.store.fault = lambda: "down"
    for _ in range(3):
        request = hands.begin(toks(LONG))
        hands.go()
        assert request.prefetch_done()
        request.abort()
    hands.store.calls.clear()
    request = hands.begin(toks(LONG))
    assert request.prefetch_done()
    assert hands.store.calls == []
    request.abort()
    hands.store.fault = lambda: None
    hands.clock.now += 1.1
    request = hands.begin(toks(LONG))
    hands.go()
    assert served(request) == 12 * PAGE
    hands.end()


# At run time


def test_attach_hands_over_what_is_on_host() -> None:
    store = MemoryStore()
    with make_cache(64, prefetch_threshold=PAGE) as cache:
        serve(cache, toks(LONG))
        serve(cache, forked(LONG, 5), extra_key="a")
        assert cache.flush(30)
        hashes = cache.tree.page_hash_count
        assert hashes == 0
        cache.attach_storage(store)
        with pytest.raises(BusyError, match="detach_storage first"):
            cache.attach_storage(store)
        assert cache.flush(30)
        assert len(store.pages) == cache.tree.page_hash_count == 24
        assert cache.config.storage is store
        cache.reset()
        assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
        assert cache.detach_storage()
        assert cache.detach_storage()
        assert store.closed == 1
        assert threads() == []
        cache.reset()
        assert serve(cache, toks(LONG)) == (0, 0, 0)
        cache.attach_storage(store)
        cache.reset()
        assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
        assert_nothing_held(cache)


def test_attach_in_many_ticks() -> None:
    hands = Hands(MemoryStore(), pages=64)
    hands.cache.detach_storage(timeout=0)
    for start in range(0, 5000, 1000):
        serve(hands.cache, toks(LONG, start))
    assert hands.cache.flush(30)
    store = MemoryStore()
    hands.cache.attach_storage(store)
    hands.writes, hands.reads = with_manual_threads(hands.cache)
    hands.cache.tick()
    # Half of the pool at most is locked for it.
    assert sum(hands.cache.tree.node_info(n).host_lock_ref for n in hands.cache.tree.host_nodes()) <= 5
    hands.go()
    assert len(store.pages) == 60
    hands.end()


@pytest.mark.parametrize("stage", ["wait", "look up", "read", "half", "ended"])
def test_detach_with_requests(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage.backup.BATCH_PAGES", 6)
    hands = Hands(filled(toks(LONG)))
    request, other = hands.begin(toks(LONG)), hands.begin(toks(LONG))
    if stage != "wait":
        hands.cache.tick()
    if stage in ("read", "half", "ended"):
        assert hands.reads.run()
        hands.cache.tick()
    if stage == "half":
        assert hands.reads.run()
    if stage == "ended":
        hands.reads.drain()
    done = hands.cache.detach_storage(timeout=0)
    assert done is (stage == "ended")
    assert request.prefetch_done()
    assert hands.store.closed == 1
    expected = {"half": 6, "ended": 12}.get(stage, 0) * PAGE
    assert [request.wait_prefetch(), other.wait_prefetch()] == [expected] * 2
    assert [served(request), served(other)] == [expected] * 2
    assert hands.cache.begin(toks(5, 9000)).prefetch_done()
    hands.cache.reset(force=True)
    assert_nothing_held(hands.cache)
    hands.cache.close()


def test_detach_while_the_storage_hangs(hanging: Hanging) -> None:
    cache, _ = on(hanging)
    request = hang_in(cache, hanging, "get")
    assert not cache.detach_storage(timeout=0.01)
    assert request.wait_prefetch() == 0
    assert cache.usage()["host_reading_pages"] == 12
    request.abort()
    assert hanging.closed == 0
    other = MemoryStore()
    cache.attach_storage(other)
    serve(cache, toks(LONG))
    assert cache.flush(30)
    assert len(other.pages) == 12
    hanging.open.set()
    until(lambda: not cache._detached, cache)
    assert hanging.closed == 1
    assert_nothing_held(cache)
    cache.close()


def test_attach_refused() -> None:
    with make_cache(write_policy=None) as cache, pytest.raises(ArgumentError, match="host tier"):
        cache.attach_storage(MemoryStore())
    with make_cache(model="") as cache, pytest.raises(ArgumentError, match="model"):
        cache.attach_storage("/tmp/x")
    with make_cache() as cache, pytest.raises(ArgumentError, match="URL, a folder's path or a Backend"):
        cache.attach_storage(5)  # type: ignore[arg-type]
    with make_cache(host_layout="layer_first") as cache, pytest.raises(ArgumentError, match="host_layout"):
        cache.attach_storage(MemoryStore())


def test_what_is_written_is_seen_in_what_a_backend_gets() -> None:
    seen: list[int] = []

    class Looks(MemoryStore):
        def register(self, memory: memoryview) -> None:
            self.span = np.frombuffer(memory, np.uint8)

        def set(self, batch: ObjectBatch) -> list[PageStatus]:
            start = self.span.ctypes.data
            for body, address in zip(batch.bodies, batch.body_addresses.tolist(), strict=True):
                assert bytes(body) == self.span[address - start : address - start + len(body)].tobytes()
                seen.append(address)
            return super().set(batch)

    with make_cache(64, storage=Looks()) as cache:
        serve(cache, toks(LONG))
    assert len(set(seen)) == 12
