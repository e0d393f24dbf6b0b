"""What a review of the controller, the cache and the request has found: each of these was once wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cache.support import (
    PAGE,
    LateCopies,
    MemoryStore,
    assert_nothing_held,
    assert_served,
    compute,
    make_cache,
    toks,
    with_manual_storage,
)
from tests.cache.test_controller import Forward, late, loading, on_host, put
from unified_cache import ArgumentError, CopyError, LockError, UnifiedCache
from unified_cache.controller.recompute import LoadOrRecompute
from unified_cache.pools.device import MhaDevicePool

# Marks


def test_a_load_does_not_wait_for_a_forward_launched_after_the_one_that_read_its_pages() -> None:
    cache, copies = late(8)
    on_host(cache, range(0, 100, 100), 4)
    copies.forward = forward = Forward()
    forward.launched = 1
    pages, others = cache.alloc(4), cache.alloc(4)
    cache.free(pages)
    cache.tick()
    forward.ended = 1
    forward.launched = 2  # runs for long, and reads none of these pages
    cache.free(others)
    cache.tick()
    assert sorted(cache.alloc(4)) == sorted(others)
    request = loading(cache, 0, 4)
    cache.tick()
    (load,) = copies.queues["load"]
    assert sorted(load.device_pages.tolist()) == sorted(pages.tolist())
    assert copies.run("load")
    request.abort()


def test_a_load_into_pages_that_nobody_had_waits_for_no_forward() -> None:
    cache, copies = late(32)
    on_host(cache, range(0, 100, 100), 2)
    copies.forward = forward = Forward()
    put(cache, 500, 4)  # takes the pages that were used before
    forward.launched = 1
    put(cache, 900, 2)
    cache.tick()  # a backup, and so a mark
    request = loading(cache, 0)
    cache.tick()
    assert copies.run("load")
    request.abort()


# Back-pressure


def test_backups_lock_half_of_the_device_at_most_also_if_all_are_wanted_at_once() -> None:
    cache, copies = late(16)
    copies.frozen = True
    for start in range(0, 800, 100):
        put(cache, start)
    cache.tick()
    assert cache.tree.protected_tokens == 8 * PAGE
    copies.frozen = False
    assert_nothing_held(cache)
    cache.evict(16)
    put(cache, 1000, 14)  # a path that is larger is backed up all the same
    put(cache, 2000, 2)
    assert_nothing_held(cache)
    assert cache.usage()["host_tree_pages"] == 32


def small_pages(pages: int, **settings: Any) -> UnifiedCache:
    pool = MhaDevicePool(pages, PAGE, 1, heads=1, head_dim=1, dtype=torch.uint8)
    return make_cache(pool, copies=LateCopies.between, load_back_threshold=0, **settings)


def leaves(cache: UnifiedCache, count: int, start: int = 0) -> None:
    for leaf in range(count):
        cache.insert(toks(PAGE, start + 10 * leaf), cache.alloc(1))


class Plans:
    """Counts the nodes that plans of backups look at."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.nodes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)

    def plan_backup(self, nodes: list[int]) -> Any:
        self.nodes += len(nodes)
        return self._tree.plan_backup(nodes)


def counting(cache: UnifiedCache) -> Plans:
    plans = Plans(cache.tree)
    cache._controller._tree = plans  # type: ignore[assignment]
    return plans


def test_a_tick_costs_nothing_for_backups_that_have_to_wait() -> None:
    cache = small_pages(2000)
    cache._copies.frozen = True  # type: ignore[union-attr]
    leaves(cache, 1000)
    cache.tick()
    leaves(cache, 900, 100_000)
    for _ in range(12):
        cache.tick()
    plans = counting(cache)
    cache.tick()
    assert len(cache._controller._wanted) > 500
    assert plans.nodes < 20


def test_wanted_backups_without_room_cost_no_square_of_their_number() -> None:
    cache = small_pages(1000, hicache_ratio=1.0)
    taken = cache._controller.alloc_host(990)
    leaves(cache, 500)
    plans = counting(cache)
    for _ in range(20):
        cache.tick()
    assert not cache._controller._wanted
    assert cache.stats()["backups_given_up"] == 490
    assert cache.stats()["backup_pages"] == 10
    assert plans.nodes < 500 * 20
    cache._controller.free_host(taken)
    assert_nothing_held(cache)


def test_victims_without_room_cost_no_square_of_their_number() -> None:
    cache = small_pages(512, write_policy="write_back", hicache_ratio=1.0)
    put(cache, 10**6, 512)
    cache.evict(512)
    assert cache.flush(30)
    holder = cache.begin(toks(512 * PAGE + 1, 10**6))
    assert holder.host_hit_length == 512 * PAGE
    leaves(cache, 512)
    plans = counting(cache)
    assert cache.evict(512) == 512
    assert plans.nodes < 512 * 20
    holder.abort()
    assert_nothing_held(cache)


# Room


def retracted_whose_copy_failed(cache: UnifiedCache, copies: LateCopies) -> Any:
    put(cache, 0, 8)
    assert cache.flush(30)
    request = cache.begin(toks(8 * PAGE, 500))
    request.extend()
    compute(request)
    copies.fail = lambda handle: True
    request.retract()
    cache.tick()
    copies.run_all()
    return request


def test_pages_of_a_copy_that_has_failed_are_not_waited_for() -> None:
    cache, copies = late(16)
    request = retracted_whose_copy_failed(cache, copies)
    assert len(cache.alloc(8)) == 8  # there is room: what is on host as well goes
    copies.fail = lambda handle: False
    request.abort()


def test_pages_of_a_copy_that_hangs_are_not_all_there_is() -> None:
    cache, copies = late(16, alloc_wait=0.0)
    put(cache, 0, 8)
    assert cache.flush(30)
    request = cache.begin(toks(8 * PAGE, 500))
    request.extend()
    request.retract()
    copies.frozen = True
    assert len(cache.alloc(8)) == 8
    copies.frozen = False


def test_pages_that_stay_after_all_are_not_waited_for() -> None:
    cache, copies = late(16)
    put(cache, 0, 8)
    assert cache.flush(30)
    request = cache.begin(toks(8 * PAGE, 500))
    request.extend()
    compute(request)
    request.retract()
    cache.tick()
    request.resume()  # before they went
    before = len(copies.queues["backup"])
    pages = cache.alloc(4)
    assert len(copies.queues["backup"]) == before == 1
    cache.free(pages)
    request.abort()
    assert_nothing_held(cache)


def test_a_victim_that_can_neither_go_to_host_nor_be_dropped_does_not_stand_before_others() -> None:
    cache, _ = late(8, write_policy="write_back", hicache_ratio=0.5)
    put(cache, 0, 4)
    cache.evict(4)
    assert cache.flush(30)
    holder = cache.begin(toks(4 * PAGE + 1))  # holds all that the host has
    assert holder.host_hit_length == 4 * PAGE
    put(cache, 500, 4)
    put(cache, 700, 4)
    oldest = cache.match_prefix(toks(4 * PAGE, 500)).last_device_node
    in_use = cache.tree.inc_host_lock_ref(oldest)
    cache.match_prefix(toks(4 * PAGE, 700))
    assert len(cache.alloc(2)) == 2
    assert cache.match_prefix(toks(4 * PAGE, 500)).device_length == 4 * PAGE
    cache.tree.dec_host_lock_ref(in_use)
    holder.abort()


# Forwards


def test_a_load_that_is_done_needs_no_set_although_another_load_has_its_own() -> None:
    cache, copies = late(32)
    on_host(cache, range(0, 400, 100))
    first = loading(cache, 0)
    cache.tick()
    assert copies.run("load")  # seen by nobody yet
    others = []
    for start in (100, 200, 300):
        others.append(loading(cache, start))
        assert cache._controller._submit("load")
    copies.fail = lambda handle: True
    first.extend()
    cache.begin_forward([first]).wait_until(0)
    assert len(copies.queues["load"]) == 3  # none of theirs was waited for
    assert_served(first)


def ended(cache: UnifiedCache, request: Any) -> None:
    request.finish()


def before_a_reset(cache: UnifiedCache, request: Any) -> None:
    cache.reset(force=True)


def retracted(cache: UnifiedCache, request: Any) -> None:
    request.retract()


@pytest.mark.parametrize("how", [ended, before_a_reset, retracted])
def test_a_forward_of_a_request_that_is_not_on_device_is_refused(how: Any) -> None:
    cache, _ = late()
    on_host(cache, range(0, 100, 100))
    request = loading(cache, 0)
    request.extend()
    how(cache, request)
    with pytest.raises(LockError):
        cache.begin_forward([request])
    request.abort()
    assert_nothing_held(cache)


def test_what_comes_back_comes_by_the_priority_of_its_request() -> None:
    cache, copies = late(64, copy_pages=2)
    on_host(cache, range(0, 100, 100))
    urgent = cache.begin(toks(2 * PAGE, 900), priority=5)
    urgent.extend()
    compute(urgent)
    urgent.retract()
    assert cache.flush(30)
    other = loading(cache, 0)
    urgent.resume()
    cache.tick()
    (first,) = copies.queues["load"]
    assert first.device_pages.tolist() == urgent.pages.tolist()
    urgent.abort()
    other.abort()
    assert_nothing_held(cache)


# Loops


def test_a_flush_ends_although_a_failed_backup_leaves_no_room_for_others() -> None:
    cache, copies = late(16)
    request = cache.begin(toks(10 * PAGE, 0))
    request.extend()
    request.insert()
    cache.tick()
    (large,) = copies.queues["backup"]
    request.retract()  # holds the copy on host, so it can not be taken back
    put(cache, 900)
    copies.fail = lambda handle: len(handle.device_pages) == len(large.device_pages)
    with pytest.raises(CopyError, match="10 pages failed 100 times"):
        cache.flush()
    copies.fail = lambda handle: False
    request.abort()
    assert_nothing_held(cache)


# Storage


def test_what_a_prefetch_hangs_below_goes_to_host_before_everything_that_waits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache, _ = late(64, storage=folder, prefetch_threshold=0, prefetch_policy="wait_complete")
        writes, reads = with_manual_storage(cache, MemoryStore())
        put(cache, 0, 4)
        while not cache._controller.idle:
            cache._controller.take_done(wait=True)
            cache.tick()
        writes.drain()
        cache.tick()
        cache.reset()
        for start in range(500, 2500, 100):
            put(cache, start)
        cache.tick()
        put(cache, 0, 2)  # waits behind these, of which there are too many already
        request = cache.begin(toks(4 * PAGE + 1))
        for _ in range(3):
            cache.tick()
            reads.drain()
        cache.tick()
        assert request.load_back() == 2 * PAGE
        assert request.storage_hit_length == 2 * PAGE
        request.abort()
        while not (cache._controller.idle and cache._storage.idle):  # type: ignore[union-attr]
            writes.drain()
            reads.drain()
            cache._controller.take_done(wait=True)
            cache.tick()
        assert_nothing_held(cache)
        cache.close()


# Errors leave nothing behind


@pytest.mark.parametrize("direction", ["backup", "load"])
def test_a_submission_that_is_interrupted_is_a_copy_that_failed(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, copies = late()
    on_host(cache, range(0, 100, 100))

    def interrupt(*arguments: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    request = loading(cache, 0)
    put(cache, 300)
    with monkeypatch.context() as patch:
        patch.setattr(copies, f"submit_{direction}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.tick()
    request.abort()
    assert_nothing_held(cache)


def test_a_begin_that_fails_holds_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache, _ = late(storage=folder, prefetch_threshold=0)
        put(cache, 0)
        assert cache.flush(30)

        def fail(*arguments: Any) -> None:
            raise RuntimeError("no thread")

        cache._storage.start = fail  # type: ignore[method-assign, union-attr, assignment]
        with pytest.raises(RuntimeError, match="no thread"):
            cache.begin(toks(5 * PAGE))
        assert_nothing_held(cache)
        cache.close()


@pytest.fixture
def cache() -> Iterator[UnifiedCache]:
    cache, _ = late()
    on_host(cache, range(0, 100, 100))
    yield cache
    assert_nothing_held(cache)


@pytest.mark.parametrize("priority", ["high", 1.5, 2**63, -(2**63) - 1])
def test_priorities_are_integers(cache: UnifiedCache, priority: Any) -> None:
    node = cache.match_prefix(toks(2 * PAGE)).last_host_node
    with pytest.raises(ArgumentError, match=r"priority must be an integer in -2\*\*63"):
        cache.begin(toks(9), priority=priority)
    with pytest.raises(ArgumentError, match=r"priority must be an integer in -2\*\*63"):
        cache.load_back(node, priority=priority)


@pytest.mark.parametrize("quota", ["all", 1.5, -1])
def test_quotas_are_integers(cache: UnifiedCache, quota: Any) -> None:
    node = cache.match_prefix(toks(2 * PAGE)).last_host_node
    with pytest.raises(ArgumentError, match="quota must be an integer >= 0"):
        cache.load_back(node, quota)
    request = cache.begin(toks(2 * PAGE + 1))
    with pytest.raises(ArgumentError, match="quota must be an integer >= 0"):
        request.load_back(quota)
    request.abort()


@pytest.mark.parametrize("computed", ["all", 1.5])
def test_computed_is_an_integer(cache: UnifiedCache, computed: Any) -> None:
    request = cache.begin(toks(9))
    request.extend()
    with pytest.raises(ArgumentError, match=r"computed must be an integer in 0..9"):
        request.insert(computed=computed)
    request.abort()


@pytest.mark.parametrize("seconds", ["long", float("nan"), None])
def test_times_are_numbers(seconds: Any) -> None:
    cache, _ = late()
    if seconds is not None:  # for ever
        with pytest.raises(ArgumentError, match="timeout must be a number of seconds"):
            cache.flush(seconds)
        with pytest.raises(ArgumentError, match="seconds must be a number"):
            cache.pin(toks(4), seconds)
    with pytest.raises(ArgumentError, match="timeout must be a number of seconds"):
        cache.close(timeout=seconds)
    with pytest.raises(ArgumentError, match="seconds must be"):
        cache.record_prefill(100, seconds)
    assert not cache.closed
    assert_nothing_held(cache)


def test_what_takes_for_ever_is_no_measurement() -> None:
    cache, _ = late()
    with pytest.raises(ArgumentError, match="seconds must be in 0"):
        cache.record_prefill(100, float("inf"))
    rates = cache._rates
    assert isinstance(rates, LoadOrRecompute)
    assert rates._prefills.count == 0


@pytest.mark.parametrize("timeout", [1e300, float("inf"), 10**400])
def test_waits_may_be_as_long_as_one_likes(timeout: Any) -> None:
    with make_cache(alloc_wait=1e300) as cache:  # with threads, and so with real waits
        put(cache, 0, 8)
        put(cache, 100, 8)
        assert cache.flush(timeout)
        put(cache, 200, 8)
        cache.tick()
        assert len(cache.alloc(16)) == 16
