"""What caches of several ranks do together, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    Clock,
    MemoryStore,
    assert_nothing_held,
    make_pool,
    toks,
    with_manual_threads,
)
from tests.ranks.baton import run_ranks
from tests.ranks.support import (
    each_rank,
    empty,
    late_copies,
    make_rank,
    read_served,
    serve_rank,
    write_computed,
)
from unified_cache import CacheConfig, Request, UnifiedCache
from unified_cache.controller.operations import CacheOperation
from unified_cache.controller.storage_operations import Quarantine
from unified_cache.errors import (
    ArgumentError,
    CopyError,
    RankError,
    RankLostError,
    RanksDifferError,
    StorageError,
)
from unified_cache.ranks.agreement import Agreement, OneRank
from unified_cache.ranks.group import Ranks
from unified_cache.ranks.layout import RankLayout

# The begin


def test_the_smallest_pools_count() -> None:
    def program(agreement: Agreement) -> dict[str, int]:
        cache = make_rank(agreement, pages=(16, 12)[agreement.rank], hicache_ratio=(0.5, 2.0)[agreement.rank])
        return cache.usage()

    for usage in each_rank(2, program):
        assert (usage["device_pages"], usage["host_pages"]) == (12, 8)


def test_settings_that_differ() -> None:
    def program(agreement: Agreement) -> None:
        with pytest.raises(RanksDifferError, match="eviction_policy"):
            make_rank(agreement, eviction_policy=("lru", "lfu")[agreement.rank])

    run_ranks(2, program)


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_can_not_begin(late: bool) -> None:
    """The others hear of it, and leave nothing behind."""

    def program(agreement: Agreement) -> None:
        bad = agreement.rank == 1
        store = MemoryStore()
        if bad and late:

            def no_room(size: int) -> None:
                raise StorageError("there is no room")

            store.expect = no_room  # type: ignore[method-assign]
        storage = "file:///proc/nothing" if bad and not late else store
        with pytest.raises(StorageError if bad else RankError) as caught:
            make_rank(agreement, storage=storage)
        assert bad or "another rank" in str(caught.value)
        assert store.closed == (late or not bad)

    run_ranks(3, program)


def test_an_agreement_of_other_ranks() -> None:
    with pytest.raises(ArgumentError, match="rank 1 of the 2 that tp_size=2 and dp_size=1"):
        Ranks(RankLayout(tp_size=2, tp_rank=1), OneRank())


def test_groups_of_data_parallel_ranks_are_alone_if_they_have_one_rank() -> None:
    ranks = Ranks(RankLayout(tp_size=2, tp_rank=1, dp_size=2))
    cache = UnifiedCache(CacheConfig(page_size=PAGE), make_pool(8), ranks=ranks)
    with cache:
        request = cache.begin(toks(9))
        request.extend()
        request.finish()
        assert cache.begin(toks(9)).device_length == 8


# Acks


def test_a_copy_counts_when_it_has_ended_on_all_ranks() -> None:
    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement)
        request = cache.begin(toks(9))
        request.extend()
        write_computed(request)
        request.finish()
        cache.tick()
        if agreement.rank != 1:
            late_copies(cache).run_all()
        for _ in range(3):
            cache.tick()
        assert cache.tree.host_tokens == 0
        late_copies(cache).run_all()
        cache.tick()
        assert cache.tree.host_tokens == 8
        assert_nothing_held(cache)

    run_ranks(3, program)


def test_acks_are_taken_in_order() -> None:
    """The leading ones that all ranks have, and no later one before an earlier."""

    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement, copy_pages=1)
        copies = late_copies(cache)
        for at in range(2):
            serve_and_tick(cache, toks(5, 100 * at))
        assert len(copies.queues["backup"]) == 2
        if agreement.rank == 0:
            copies.queues["backup"].rotate(1)  # the second ends first here
        copies.run("backup")
        cache.tick()
        assert cache.tree.host_tokens == 0
        copies.run("backup")
        cache.tick()
        assert cache.tree.host_tokens == 8

    run_ranks(2, program)


def serve_and_tick(cache: UnifiedCache, prompt: np.ndarray) -> None:
    serve_rank(cache, prompt)
    cache.tick()


def test_a_copy_that_fails_on_one_rank_is_made_again_there() -> None:
    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement)
        failures = iter([True] * 5 if agreement.rank == 1 else [])
        late_copies(cache).fail = lambda handle: next(failures, False)
        serve_and_tick(cache, toks(9))
        ticks = 0
        while cache.tree.host_tokens == 0:
            late_copies(cache).run_all()
            cache.tick()
            ticks += 1
        assert ticks >= 5
        empty_device(cache)
        failures = iter([True] * 3 if agreement.rank == 0 else [])
        serve_rank(cache, toks(9))
        assert_nothing_held(cache)

    run_ranks(2, program)


def empty_device(cache: UnifiedCache) -> None:
    assert cache.evict(100) > 0
    assert cache.tree.device_tokens == 0


def test_a_load_that_always_fails_ends_its_rank_and_the_others_hear_of_it() -> None:
    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement)
        serve_and_tick(cache, toks(9))
        late_copies(cache).run_all()
        cache.tick()
        empty_device(cache)
        late_copies(cache).fail = lambda handle: agreement.rank == 1
        request = cache.begin(toks(9))
        request.load_back()
        request.extend()
        if agreement.rank == 1:
            with pytest.raises(CopyError, match="injected"):
                request.wait()
            raise CopyError("this rank is of no use any more")
        request.wait()
        with pytest.raises(RankLostError, match=r"ranks \[1\]"):
            cache.tick()
        # And so it stays: nothing waits for it a second time.
        with pytest.raises(RankLostError):
            cache.tick()
        cache.close()

    with pytest.raises(CopyError, match="of no use"):
        run_ranks(2, program)


def test_room_that_write_backs_give_comes_to_all_at_the_same_call() -> None:
    """`alloc` waits for the oldest copy on each rank, and asks nobody."""

    def program(agreement: Agreement) -> int:
        cache = make_rank(agreement, pages=4, write_policy="write_back")
        for at in range(2):
            serve_and_tick(cache, toks(9, 100 * at))
        before = agreement.reductions
        request = cache.begin(toks(9, 500))
        request.extend()  # both are written back, one after the other
        assert agreement.reductions == before
        usage = cache.usage()
        request.abort()
        assert_nothing_held(cache)
        return usage["device_free_pages"]

    assert len(set(each_rank(3, program))) == 1


def test_a_copy_that_hangs_on_one_rank() -> None:
    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement, pages=4, write_policy="write_back", alloc_wait=0.0)
        serve_and_tick(cache, toks(13))
        copies = late_copies(cache)
        copies.frozen = agreement.rank == 1
        request = cache.begin(toks(13, 500))
        if agreement.rank == 1:
            with pytest.raises(RankError, match="does not end on this rank"):
                request.extend()
            return
        request.extend()
        with pytest.raises(RankLostError):
            cache.tick()

    run_ranks(2, program)


# Differences


def nothing() -> CacheOperation:
    none = np.empty(0, np.uint32)
    return CacheOperation("backup", none, none, lambda: None, lambda: True)


@pytest.mark.parametrize(
    ("differ", "field"),
    [
        (lambda cache: cache.alloc(1), "device_free_pages"),
        (lambda cache: cache.match_prefix(toks(4)), "digest"),
        (lambda cache: cache.reset(), "resets"),
        (lambda cache: cache._controller.alloc_host(1), "host_free_pages"),
        (lambda cache: cache._controller._order["backup"].append(nothing()), "backups"),
        (lambda cache: cache._controller._order["load"].append(nothing()), "loads"),
        (
            lambda cache: cache._operations.begin(Quarantine(np.empty(0, np.uint32), set(), set())),
            "storage_operations",
        ),
        (lambda cache: cache._storage._writes.waiting.update({7: 1}), "storage_waiting"),
    ],
)
def test_ranks_that_differ_are_told_apart(differ: Callable[[UnifiedCache], object], field: str) -> None:
    """At the next tick, with the tick, the rank and the field; not by a hang."""

    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement, storage=MemoryStore())
        serve_and_tick(cache, toks(9))
        late_copies(cache).run_all()
        cache.tick()
        if agreement.rank == 2:
            differ(cache)
        with pytest.raises(RanksDifferError, match=rf"at tick 3 ranks differ in {field}: rank 2 has"):
            cache.tick()
        with pytest.raises(RanksDifferError, match="at tick 3"):
            cache.tick()

    run_ranks(4, program)


# Storage


def stored_by_all(
    agreement: Agreement, *, pages: int = 16, **settings: object
) -> tuple[UnifiedCache, MemoryStore]:
    """A cache whose prompt ``toks(21)`` is in storage only."""
    store = MemoryStore()
    cache = make_rank(agreement, pages, storage=store, prefetch_threshold=0, **settings)
    serve_and_tick(cache, toks(21))
    assert cache.flush(30)
    empty(cache)
    assert len(store.pages) == 5
    return cache, store


def test_a_prefetch_is_what_all_ranks_have_found() -> None:
    def program(agreement: Agreement) -> int:
        cache, store = stored_by_all(agreement)
        if agreement.rank == 1:
            del store.pages[list(store.pages)[3]]
        request = serve_rank(cache, toks(21))
        assert_nothing_held(cache)
        return request.storage_hit_length

    assert each_rank(3, program) == [12, 12, 12]


def test_ranks_do_not_warm_up_and_each_knows_what_is_stored(tmp_path: Path) -> None:
    def program(agreement: Agreement) -> tuple[int, int]:
        url = f"file://{tmp_path}/{agreement.rank}?size=4MB"
        cache = make_rank(agreement, 16, storage=url, prefetch_threshold=0)
        serve_and_tick(cache, toks(21))
        assert cache.flush(30)
        cache.close()
        cache = make_rank(agreement, 16, storage=url, prefetch_threshold=0, storage_warm=1.0)
        assert cache._storage is not None
        for _ in range(20):  # all of them tick as often, whoever has read its log
            cache.tick()
            assert cache._storage._reader.threads.drain(60)  # type: ignore[attr-defined]
        known = cache.match_stored(toks(21))
        hit = serve_rank(cache, toks(21)).storage_hit_length
        assert_nothing_held(cache)
        cache.close()
        return known, hit

    assert each_rank(2, program) == [(20, 20)] * 2


def test_a_prefetch_is_what_all_ranks_have_read() -> None:
    def program(agreement: Agreement) -> int:
        cache, store = stored_by_all(agreement)
        calls = iter(range(100))
        store.fault = lambda: "corrupt" if agreement.rank == 2 and next(calls) == 4 else None
        request = serve_rank(cache, toks(21))
        assert_nothing_held(cache)
        return request.storage_hit_length

    # Faults are asked for once a call and once an object: the look-up, the read, then pages 0, 1, 2.
    assert each_rank(3, program) == [8, 8, 8]


def test_one_rank_that_reads_slowly_holds_nobody_up() -> None:
    """The request goes on at its time limit, with what all have read, and ticks go on."""

    def program(agreement: Agreement) -> None:
        clock = Clock()
        cache, _ = stored_by_all(agreement, clock=clock)
        _, reads = with_manual_threads(cache)
        request = cache.begin(toks(21))
        cache.tick()
        reads.run()
        cache.tick()
        assert not request.prefetch_done()
        assert cache.usage()["host_reading_pages"] == 5
        if agreement.rank == 0:
            reads.run()
        for _ in range(3):
            cache.tick()
            assert not request.prefetch_done()
        clock.now += 10 + agreement.rank  # the slowest clock counts
        cache.tick()
        assert request.prefetch_done()
        assert request.load_back() == 0
        # The pages are free when no rank's thread touches them any more.
        assert cache.usage()["host_reading_pages"] == 5
        reads.drain()
        cache.tick()
        cache.tick()
        assert cache.usage()["host_reading_pages"] == 0
        request.abort()
        assert_nothing_held(cache)

    run_ranks(2, program)


def test_clocks_that_are_apart() -> None:
    def program(agreement: Agreement) -> None:
        clock = Clock()
        clock.now = 1000.0 * agreement.rank
        cache = make_rank(agreement, clock=clock)
        serve_and_tick(cache, toks(9))
        cache.pin(toks(9), 5.0)
        cache.tick()  # its time begins
        clock.now += 4
        cache.tick()
        assert cache.tree.pinned_tokens == 8
        clock.now += 2
        cache.tick()
        assert cache.tree.pinned_tokens == 0

    run_ranks(2, program)


def test_what_begins_before_the_first_tick_has_its_time() -> None:
    """A clock counts from when the machine started, and is far from 0."""

    def program(agreement: Agreement) -> None:
        clock = Clock()
        clock.now = 1e6 + agreement.rank
        cache = make_rank(agreement, clock=clock, storage=MemoryStore(), prefetch_threshold=0)
        serve_rank(cache, toks(9))
        cache.pin(toks(9), 5.0)
        request = cache.begin(toks(21, 500))
        cache.tick()
        assert cache.tree.pinned_tokens == 8
        assert not request.prefetch_done()
        request.abort()

    run_ranks(2, program)


def test_what_one_rank_could_not_store_is_stored_again_by_all() -> None:
    def program(agreement: Agreement) -> None:
        store = MemoryStore()
        cache = make_rank(agreement, storage=store, prefetch_threshold=0)
        store.fault = lambda: "full" if agreement.rank == 1 else None
        serve_and_tick(cache, toks(9))
        assert cache.flush(30)
        assert len(store.pages) == (0 if agreement.rank == 1 else 2)
        assert cache.stats()["storage_failed_pages"] == 2
        store.fault = lambda: None
        cache.begin(toks(9)).abort()
        assert cache.flush(30)
        assert len(store.pages) == 2
        assert_nothing_held(cache)

    run_ranks(2, program)


def test_a_storage_that_is_down_for_one_rank_is_down_for_all() -> None:
    def program(agreement: Agreement) -> None:
        clock = Clock()
        cache, store = stored_by_all(agreement, clock=clock)
        store.fault = lambda: "down" if agreement.rank == 1 else None
        for at in range(3):
            assert serve_rank(cache, toks(21, 1000 * at)).storage_hit_length == 0
            cache.tick()
        calls = len(store.calls)
        serve_rank(cache, toks(21, 5000))
        cache.flush(0.1)
        assert len(store.calls) == calls
        clock.now += 100
        store.fault = lambda: None
        cache.tick()
        empty(cache)
        assert serve_rank(cache, toks(21)).storage_hit_length == 20
        assert_nothing_held(cache)

    run_ranks(2, program)


def test_attach_is_for_all_ranks_or_for_none() -> None:
    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement)
        serve_and_tick(cache, toks(9))
        late_copies(cache).run_all()
        cache.tick()
        bad, store = agreement.rank == 1, MemoryStore()
        with pytest.raises(StorageError, match="/proc" if bad else "another rank"):
            cache.attach_storage("file:///proc/nothing" if bad else store)
        assert cache._storage is None
        assert cache.config.storage is None
        assert store.closed == (not bad)
        store = MemoryStore()
        cache.attach_storage(store)
        assert cache.flush(30)
        assert len(store.pages) == 2
        cache.detach_storage()
        assert store.closed == 1
        assert_nothing_held(cache)

    run_ranks(2, program)


def test_more_prefetches_than_places() -> None:
    """They wait for a place, in order."""

    def program(agreement: Agreement) -> None:
        store = MemoryStore()
        cache = make_rank(agreement, 256, storage=store, prefetch_threshold=0, hicache_ratio=2.0)
        prompts = [toks(5, 100 * at) for at in range(100)]
        for prompt in prompts:
            serve_rank(cache, prompt)
        assert cache.flush(30)
        assert len(store.pages) == 100
        empty(cache)
        _, reads = with_manual_threads(cache)
        requests: list[Request] = [cache.begin(prompt) for prompt in prompts]
        cache.tick()
        assert len(cache._operations) == 64
        for _ in range(20):
            for _ in range(agreement.rank * 50 + 1):
                reads.run()
            cache.tick()
        reads.drain()
        for _ in range(4):
            cache.tick()
            reads.drain()
        cache.tick()
        assert all(request.prefetch_done() for request in requests)
        for request in requests:
            assert request.load_back() == 4
            request.abort()
        assert_nothing_held(cache)

    run_ranks(2, program)


# A reset


def test_a_reset_frees_at_the_same_tick_on_all_ranks() -> None:
    def program(agreement: Agreement) -> None:
        cache, _ = stored_by_all(agreement)
        request = cache.begin(toks(9, 500))
        request.wait_prefetch()
        request.extend()
        request.finish()
        writes, reads = with_manual_threads(cache)
        cache.tick()  # its backup is under way
        request = cache.begin(toks(21))
        cache.tick()
        reads.run()
        cache.tick()
        if agreement.rank == 0:
            late_copies(cache).run_all()
            reads.drain()
        cache.reset(force=True)
        request.abort()
        usage = cache.usage()
        assert (usage["device_quarantined_pages"], usage["host_quarantined_pages"]) == (2, 7)
        for _ in range(3):
            cache.tick()
            usage = cache.usage()
            # No rank had begun to read; one still copies.
            assert (usage["device_quarantined_pages"], usage["host_quarantined_pages"]) == (2, 2)
        late_copies(cache).run_all()
        reads.drain()
        writes.drain()
        cache.tick()
        assert cache.usage()["host_quarantined_pages"] == 0
        assert cache.usage()["device_free_pages"] == 16
        assert_nothing_held(cache)

    run_ranks(2, program)


def test_thresholds_that_are_learnt_are_agreed() -> None:
    def program(agreement: Agreement) -> int:
        cache = make_rank(agreement, load_back_threshold="auto")
        for _ in range(10):
            cache.record_prefill(100, 1.0)
            cache._rates.loaded(10, 0.1 * (1 + 8 * agreement.rank))
        cache.tick()
        return cache._rates.load_back_threshold

    first, second = each_rank(2, program)
    assert first == second


def test_read_back_through_a_retract() -> None:
    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement)
        request = cache.begin(toks(9))
        request.extend()
        write_computed(request)
        request.retract()
        copies = late_copies(cache)
        if agreement.rank == 0:
            copies.run_all()
        cache.tick()
        assert cache.usage()["device_free_pages"] == 13
        copies.run_all()
        cache.tick()
        assert cache.usage()["device_free_pages"] == 16
        request.resume()
        if agreement.rank == 1:
            copies.run_all()
        request.wait()
        request.insert()
        read_served(request)
        request.finish()
        assert_nothing_held(cache)

    run_ranks(2, program)


def test_room_comes_from_the_oldest_copy_though_a_younger_one_has_ended() -> None:
    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement, pages=4, write_policy="write_back")
        copies = late_copies(cache)
        serve_and_tick(cache, toks(4))
        cache.evict(1)
        cache.tick()
        copies.run_all()
        cache.tick()
        assert cache.match_prefix(toks(4)).host_hit_length == 4
        serve_and_tick(cache, toks(8, 100))
        cache.evict(2)  # the victim is written back, and after that a load begins
        request = cache.begin(toks(5))
        assert request.load_back() == 4
        cache.tick()
        if agreement.rank == 0:
            assert copies.run("load")
            cache._controller.look()
        pages = cache.alloc(2)
        # One was free, so the victim's were needed; and that was enough.
        assert cache._controller.under_way == (0, 1)
        cache.tick()
        cache.free(pages)
        request.abort()
        assert_nothing_held(cache)

    run_ranks(3, program)
