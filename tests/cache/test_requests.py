"""A request's life: what it is served is what was written, and it gives back what it took."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    LateCopies,
    assert_nothing_held,
    assert_served,
    compute,
    make_cache,
    serve,
    toks,
)
from unified_cache import (
    ArgumentError,
    BusyError,
    CapacityError,
    CopyError,
    LockError,
    Request,
    UnifiedCache,
)


def test_device_only() -> None:
    with make_cache(write_policy=None) as cache:
        assert serve(cache, toks(18), [7, 8, 9]) == (0, 0, 0)
        assert serve(cache, toks(18)) == (16, 0, 0)
        assert serve(cache, toks(17)) == (16, 0, 0)
        # One token has to be computed, so the last whole page is not a hit.
        assert serve(cache, toks(16)) == (12, 0, 0)
        stats = cache.stats()
        assert stats["asked_tokens"] == 18 + 18 + 17 + 16
        assert stats["hit_tokens_device"] == 16 + 16 + 12
        assert_nothing_held(cache)


def test_short_prompts() -> None:
    with make_cache() as cache:
        for length in range(PAGE + 2):
            assert serve(cache, toks(length), [1])[0] == (PAGE if length > PAGE else 0)
        assert_nothing_held(cache)


def test_demoted_prefixes_come_back() -> None:
    with make_cache(8) as cache:
        for start in (0, 100, 200, 300):
            assert serve(cache, toks(18, start)) == (0, 0, 0)
        for start in (0, 100, 200, 300):
            assert serve(cache, toks(18, start)) == (0, 16, 0)
        stats = cache.stats()
        assert stats["hit_tokens_host"] == 4 * 16
        assert stats["load_pages"] == stats["backup_pages"] == 16
        assert stats["dropped_tokens"] == 0
        assert_nothing_held(cache)


def test_namespaces_share_nothing() -> None:
    with make_cache(32) as cache:
        assert serve(cache, toks(18), extra_key="a") == (0, 0, 0)
        assert serve(cache, toks(18), extra_key="b") == (0, 0, 0)
        assert serve(cache, toks(18), cache_salt="a") == (0, 0, 0)
        assert serve(cache, toks(18)) == (0, 0, 0)
        assert serve(cache, toks(18), extra_key="b") == (16, 0, 0)


def test_all_backups_of_a_tick_are_one_submission() -> None:
    with make_cache(32) as cache:
        requests = [cache.begin(toks(9, start)) for start in (0, 100, 200)]
        for request in requests:
            request.extend()
            compute(request)
            request.finish()
        cache.tick()
        cache.tick()
        assert cache.stats()["backup_copies"] == 1
        assert cache.stats()["backup_pages"] == 6
        assert_nothing_held(cache)


def test_selective_waits_for_the_third_hit() -> None:
    with make_cache(16, write_policy="write_through_selective") as cache:
        for hits in range(1, 4):
            serve(cache, toks(14))
            assert cache.flush(30)
            assert cache.stats()["backup_pages"] == (3 if hits == 3 else 0)
        serve(cache, toks(64, 100))
        # What was used once is gone for good, what was used three times comes back.
        assert serve(cache, toks(14)) == (0, 12, 0)
        assert_nothing_held(cache)


def test_chunks_are_not_hits() -> None:
    with make_cache(write_policy="write_through_selective", write_through_threshold=2) as cache:
        request = cache.begin(toks(20))
        request.extend()
        compute(request)
        for computed in (8, 16):
            request.insert(chunked=True, computed=computed)
            assert request.device_length == computed
        request.insert()
        request.finish()
        node = cache.match_prefix(toks(20)).last_device_node
        assert cache.tree.node_info(node).hit_count == 1
        assert cache.flush(30)
        assert cache.stats()["backup_pages"] == 0


def test_write_back_copies_at_eviction_only() -> None:
    with make_cache(8, write_policy="write_back") as cache:
        serve(cache, toks(18))
        assert cache.flush(30)
        assert cache.stats()["backup_pages"] == 0
        # The pages of the victims come with the ack, which alloc waits for.
        serve(cache, toks(26, 100))
        assert cache.stats()["backup_pages"] == 4
        assert serve(cache, toks(18)) == (0, 16, 0)
        assert_nothing_held(cache)


def test_write_back_without_room_drops() -> None:
    with make_cache(8, write_policy="write_back", hicache_ratio=0.5) as cache:
        for start in range(0, 600, 100):
            serve(cache, toks(22, start))
        assert cache.stats()["dropped_tokens"] > 0
        assert_nothing_held(cache)


def test_a_small_host_pool_evicts_for_what_is_short() -> None:
    with make_cache(16, hicache_ratio=0.5) as cache:
        for start in range(0, 800, 100):
            serve(cache, toks(14, start))
            assert cache.flush(30)
        stats = cache.stats()
        assert stats["backups_given_up"] == 0
        assert stats["evicted_host_pages"] == 8 * 3 - 6
        # A prefix that the host can never hold takes nothing away from the others.
        serve(cache, toks(50, 1000))
        assert cache.flush(30)
        assert cache.stats()["backups_given_up"] == 1
        assert cache.stats()["evicted_host_pages"] == stats["evicted_host_pages"]
        assert_nothing_held(cache)


def test_duplicates_are_freed() -> None:
    with make_cache() as cache:
        first, second = cache.begin(toks(18)), cache.begin(toks(18))
        for request in (first, second):
            request.extend()
            compute(request)
        own = second.pages
        first.insert()
        second.insert()
        assert second.pages[:4].tolist() == first.pages[:4].tolist()
        assert second.pages[4] == own[4]
        assert second.device_length == 16
        assert_served(second)
        assert cache.usage()["device_free_pages"] == 16 - 4 - 2
        first.finish()
        second.finish()
        assert_nothing_held(cache)


def test_pages_are_copies() -> None:
    with make_cache() as cache:
        request = cache.begin(toks(9))
        pages = request.extend()
        assert pages.dtype == np.uint32
        pages[:] = 0
        request.pages[:] = 0
        request.tokens[:] = 0
        compute(request)
        request.finish()
        assert serve(cache, toks(9)) == (8, 0, 0)


def test_a_prompt_that_the_caller_changes() -> None:
    with make_cache() as cache:
        prompt = np.arange(9, dtype=np.uint32)
        request = cache.begin(prompt)
        prompt[:] = 5
        assert request.tokens.tolist() == list(range(9))
        request.abort()


# Loading back


def demoted(**settings: object) -> UnifiedCache:
    """A cache with 16 tokens on host only, and an empty device."""
    cache = make_cache(8, **settings)
    serve(cache, toks(17))
    assert cache.flush(30)
    assert cache.evict(8) == 4
    return cache


@pytest.mark.parametrize("settings, quota", [({"load_back_threshold": 17}, None), ({}, 15)])
def test_too_short_or_over_quota(settings: dict[str, object], quota: int | None) -> None:
    with demoted(**settings) as cache:
        request = cache.begin(toks(17))
        assert (request.device_length, request.host_hit_length) == (0, 16)
        assert request.load_back(quota) == 0
        assert cache.stats()["load_backs_skipped"] == 1
        request.extend()
        compute(request)
        request.finish()
        assert serve(cache, toks(17)) == (16, 0, 0)
        assert cache.stats()["hit_tokens_host"] == 0
        assert_nothing_held(cache)


def test_all_or_nothing_without_room() -> None:
    with demoted() as cache:
        other = cache.begin(toks(20, 500))
        other.extend()
        request = cache.begin(toks(17))
        assert request.load_back() == 0
        assert request.device_length == 0
        with pytest.raises(CapacityError):
            request.extend()
        other.abort()
        assert request.load_back() == 16
        request.extend()
        request.wait()
        assert_served(request)
        request.finish()
        assert_nothing_held(cache)


def test_the_copy_is_asynchronous() -> None:
    with demoted() as cache:
        copies = LateCopies.into(cache)
        request = cache.begin(toks(17))
        assert request.load_back() == 16
        assert not request.loaded
        # Somebody else who meets these pages waits for the same copy.
        other = cache.begin(toks(17))
        assert (other.device_length, other.loaded) == (16, False)
        cache.tick()
        assert copies.run("load")
        assert request.loaded
        assert other.loaded
        for each in (request, other):
            each.wait_loaded()
            assert_served(each)
            each.abort()
        assert_nothing_held(cache)


def test_a_load_that_fails() -> None:
    with demoted() as cache:
        copies = LateCopies.into(cache)
        copies.fail = lambda handle: True
        request = cache.begin(toks(17))
        request.load_back()
        with pytest.raises(CopyError, match="injected"):
            request.wait()
        request.abort()
        cache.tick()
        assert cache.stats()["failed_copies"] == 1
        assert cache.usage()["device_free_pages"] == 8
        copies.fail = lambda handle: False
        assert serve(cache, toks(17)) == (0, 16, 0)
        assert_nothing_held(cache)


def test_a_load_that_fails_and_can_not_be_taken_back_is_copied_again() -> None:
    with demoted() as cache:
        copies = LateCopies.into(cache)
        copies.fail = lambda handle: True
        request = cache.begin(toks(17))
        request.load_back()
        cache.tick()
        copies.run("load")
        cache.tick()
        assert not copies.queues["load"]  # not before the next tick
        cache.tick()
        copies.fail = lambda handle: False
        # A newcomer waits for the second try.
        other = cache.begin(toks(17))
        assert not other.loaded
        other.wait()
        # And so does whoever did not hear of the first one.
        request.wait()
        for each in (other, request):
            assert_served(each)
            each.abort()
        assert_nothing_held(cache)


def test_a_load_that_always_fails() -> None:
    with demoted() as cache:
        copies = LateCopies.into(cache)
        copies.fail = lambda handle: True
        request = cache.begin(toks(17))
        request.load_back()
        assert not cache.flush(30)
        assert cache.stats()["failed_copies"] == 100
        with pytest.raises(CopyError, match="load copy of 4 pages failed 101 times: injected"):
            cache.flush()
        # Nobody uses it any more: it is taken back.
        request.abort()
        assert cache.flush(30)
        assert cache.stats()["failed_copies"] == 101
        assert_nothing_held(cache)


def test_room_that_comes_after_a_copy_that_fails() -> None:
    with make_cache(8, write_policy="write_back") as cache:
        serve(cache, toks(17))
        cache.evict(4)
        assert cache.flush(30)
        serve(cache, toks(17, 100))
        request = cache.begin(toks(17))
        copies = LateCopies.into(cache)
        copies.fail = lambda handle: handle.direction == "load"
        assert request.load_back() == 16
        assert cache.evict(4) == 0
        # The failed load ends first and stays; the pages of the write-back are still on their way.
        cache.tick()
        assert copies.run("load")
        pages = cache.alloc(4)
        assert cache.usage()["device_free_pages"] == 0
        cache.free(pages)
        request.abort()
        assert_nothing_held(cache)


def test_write_backs_that_always_fail_end_an_alloc() -> None:
    with make_cache(8, write_policy="write_back") as cache:
        copies = LateCopies.into(cache)
        copies.fail = lambda handle: True
        serve(cache, toks(17))
        with pytest.raises(CapacityError):
            cache.alloc(8)
        assert cache.stats()["failed_copies"] == 100
        copies.fail = lambda handle: False
        assert len(cache.alloc(8)) == 8


def test_a_backup_that_fails() -> None:
    with make_cache() as cache:
        copies = LateCopies.into(cache)
        copies.fail = lambda handle: True
        serve(cache, toks(17))
        assert cache.flush(30)
        assert cache.stats()["failed_copies"] == 1
        assert cache.usage()["host_free_pages"] == 32
        copies.fail = lambda handle: False
        serve(cache, toks(17))
        assert cache.flush(30)
        assert cache.usage()["host_tree_pages"] == 4
        assert_nothing_held(cache)


# Room


@pytest.mark.parametrize("count", [2.0, "2", None, -1, np.int64(-1)])
def test_counts_that_are_none(count: Any) -> None:
    with make_cache(8) as cache:
        serve(cache, toks(17))
        assert cache.flush(30)
        before = cache.usage()
        for call in (cache.alloc, cache.evict):
            with pytest.raises(ArgumentError, match="num_pages must be an integer >= 0"):
                call(count)
        assert cache.usage() == before
        assert_nothing_held(cache)


def test_counts_of_numpy() -> None:
    with make_cache(8, write_policy=None) as cache:
        for start in (0, 100, 200):
            serve(cache, toks(9, start))
        assert len(cache.alloc(np.uint32(3))) == 3
        assert cache.stats()["evicted_device_pages"] == 1
        assert cache.evict(10**30) == 5


def test_no_room_changes_nothing() -> None:
    with make_cache(8) as cache:
        request = cache.begin(toks(17))
        request.extend()
        other = cache.begin(toks(9, 100))
        other.extend()
        with pytest.raises(CapacityError, match="1 device pages asked for: of 8 0 are free and 0 can be"):
            request.extend([1, 2, 3, 4])
        assert len(request.tokens) == 17
        assert len(request.pages) == 5
        request.extend([1, 2, 3])
        with pytest.raises(CapacityError):
            cache.alloc(1)
        for each in (request, other):
            each.abort()
        with pytest.raises(CapacityError):
            cache.alloc(9)
        pages = cache.alloc(8)
        cache.free(pages)
        with pytest.raises(ArgumentError, match="free already"):
            cache.free(pages)
        assert_nothing_held(cache)


def test_pages_under_a_running_backup_are_waited_for() -> None:
    with make_cache(8) as cache:
        copies = LateCopies.into(cache)
        serve(cache, toks(29))
        cache.tick()
        assert len(copies.queues["backup"]) == 1
        assert cache.tree.evictable_tokens == 0
        assert len(cache.alloc(8)) == 8
        assert cache.stats()["dropped_tokens"] == 0
        assert cache.usage()["host_tree_pages"] == 7


# Giving back

Stage = Callable[[Request], None]


def stage_load(request: Request) -> None:
    request.load_back()


def stage_extend(request: Request) -> None:
    request.load_back()
    request.extend()


def stage_chunk(request: Request) -> None:
    stage_extend(request)
    request.wait()
    compute(request)
    request.insert(chunked=True, computed=20)


def stage_insert(request: Request) -> None:
    stage_chunk(request)
    request.insert()


def stage_decode(request: Request) -> None:
    stage_insert(request)
    for token in range(6):
        request.extend([token])


STAGES = [lambda request: None, stage_load, stage_extend, stage_chunk, stage_insert, stage_decode]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("policy", ["write_through", "write_back", None])
@pytest.mark.parametrize("late", [False, True])
def test_abort_gives_everything_back(stage: Stage, policy: str | None, late: bool) -> None:
    with make_cache(12, write_policy=policy) as cache:
        serve(cache, toks(17))
        serve(cache, toks(45, 900))
        assert cache.flush(30)
        copies = LateCopies.into(cache) if late and policy else None
        request = cache.begin(toks(26))
        stage(request)
        request.abort()
        request.abort()
        if copies is not None:
            copies.run_all()
        assert_nothing_held(cache)
        assert cache.stats()["requests_aborted"] == 1
        with pytest.raises(LockError, match="ended before"):
            request.extend()
        with pytest.raises(LockError):
            request.finish()
        assert serve(cache, toks(26)) != (0, 0, 0) or policy is None
        assert_nothing_held(cache)


def test_an_abort_that_is_refused_unlocks() -> None:
    with make_cache() as cache:
        serve(cache, toks(17))
        request = cache.begin(toks(26))
        pages = request.extend()
        cache.free(pages[4:])  # not the caller's to free
        with pytest.raises(ArgumentError, match="free already"):
            request.abort()
        request.abort()
        assert_nothing_held(cache)


def test_finish_once() -> None:
    with make_cache() as cache:
        request = cache.begin(toks(9))
        request.extend()
        compute(request)
        request.finish()
        with pytest.raises(LockError):
            request.finish()
        request.abort()
        assert cache.stats()["requests_finished"] == 1
        assert cache.stats()["requests_aborted"] == 0
        # Nothing was computed, so nothing goes in.
        cache.begin(toks(9, 100)).finish()
        assert serve(cache, toks(9, 100)) == (0, 0, 0)
        assert_nothing_held(cache)


def test_computed_is_checked() -> None:
    with make_cache() as cache:
        request = cache.begin(toks(9))
        with pytest.raises(ArgumentError, match=r"computed must be an integer in 0\.\.0, not 1"):
            request.insert(computed=1)
        request.extend()
        for computed in (-1, 10):
            with pytest.raises(ArgumentError, match=r"in 0\.\.9"):
                request.insert(computed=computed)
        with pytest.raises(LockError, match="before the first extend"):
            request.load_back()
        compute(request)
        request.finish(computed=5)
        assert serve(cache, toks(9)) == (4, 0, 0)


@pytest.mark.parametrize(
    "tokens, said",
    [
        ([1, -1], "token 1 is -1"),
        ([2**32], r"token 0 is 4294967296, allowed is 0\.\.4294967295"),
        ([2**70], "integers"),
        ([0.5], "float64"),
        ([[1]], "one-dimensional"),
        (["a"], "integers"),
        ([True], "bool"),
    ],
)
def test_bad_tokens(tokens: object, said: str) -> None:
    with make_cache() as cache:
        with pytest.raises(ArgumentError, match=said):
            cache.begin(tokens)  # type: ignore[arg-type]
        request = cache.begin(toks(5))
        with pytest.raises(ArgumentError, match=said):
            request.extend(tokens)
        assert len(request.tokens) == 5
        assert len(request.pages) == 0
        request.abort()
        assert_nothing_held(cache)


# Resetting


def test_reset() -> None:
    with make_cache() as cache:
        serve(cache, toks(17))
        before = cache.stats()
        request = cache.begin(toks(17))
        with pytest.raises(BusyError, match="1 requests are active"):
            cache.reset()
        request.extend()
        cache.reset(force=True)
        with pytest.raises(LockError, match="before a reset"):
            request.finish()
        request.abort()
        # The backup of what was served may still be under way.
        assert cache.flush(30)
        assert cache.usage()["device_free_pages"] == 16
        assert cache.usage()["host_free_pages"] == 32
        assert cache.stats()["hit_tokens_device"] >= before["hit_tokens_device"]
        assert serve(cache, toks(17)) == (0, 0, 0)
        assert_nothing_held(cache)


def test_reset_with_copies_under_way() -> None:
    with demoted() as cache:
        request = cache.begin(toks(17))
        request.load_back()
        serve(cache, toks(9, 100))
        cache.reset(force=True)
        request.abort()
        assert_nothing_held(cache)
        assert serve(cache, toks(17)) == (0, 0, 0)


def test_ticks_with_nothing_to_do_do_nothing() -> None:
    with make_cache() as cache:
        serve(cache, toks(17))
        assert cache.flush(30)
        digest, stats = cache.tree.digest(), cache.stats()
        for _ in range(100):
            cache.tick()
        assert (cache.tree.digest(), cache.stats()) == (digest, stats)


def test_a_request_does_not_outlive_its_cache_badly() -> None:
    cache = make_cache()
    request = cache.begin(toks(17))
    request.extend()
    cache.close()
    request.abort()
    del cache, request
    gc.collect()
