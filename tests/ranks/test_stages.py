"""Stages of a pipeline: the first one decides, the others follow, some ticks later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from tests.cache.support import PAGE, Clock, LateCopies, MemoryStore, assert_nothing_held, make_pool, toks
from tests.ranks.hanging import HangingThreads, with_hanging_threads
from tests.ranks.support import empty, late_copies, serve_rank
from tests.ranks.test_random_ranks import Rank
from unified_cache import CacheConfig, UnifiedCache
from unified_cache.errors import RankError, RankLostError, RanksDifferError
from unified_cache.ranks.group import Ranks
from unified_cache.ranks.layout import RankLayout
from unified_cache.ranks.pipeline import PipelineRanks

LIMIT = 60.0


def run_stages(size: int, stages: int, program: Callable[[int, PipelineRanks], None]) -> None:
    """Run `program(stage, agreement)` on all ranks of all stages; raises what the first to fail did."""
    agreements = PipelineRanks.of_threads(size, stages, time_limit=LIMIT)
    failed: list[BaseException] = []

    def run(stage: int, agreement: PipelineRanks) -> None:
        try:
            program(stage, agreement)
        except BaseException as error:
            error.add_note(f"stage {stage}, rank {agreement.rank}")
            failed.append(error)
            agreement.close()

    threads = [
        threading.Thread(target=run, args=(stage, agreement), daemon=True)
        for stage, ranks in enumerate(agreements)
        for agreement in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise next((error for error in failed if not isinstance(error, RankLostError)), failed[0])


@pytest.mark.parametrize(("size", "stages"), [(1, 2), (2, 2), (1, 3)])
def test_random_calls(size: int, stages: int) -> None:
    def program(stage: int, agreement: PipelineRanks) -> None:
        for seed in range(3):
            rank = Rank(seed, agreement, {}, stage=stage, stages=stages)
            while rank.ticks < 150:
                rank.step()
            rank.end()

    run_stages(size, stages, program)


def make_stage(stage: int, agreement: PipelineRanks, store: MemoryStore, **settings: object) -> UnifiedCache:
    others = {name: settings.pop(name) for name in ("clock", "copies") if name in settings}
    config = CacheConfig(
        page_size=PAGE,
        model="test",
        load_back_threshold=0,
        prefetch_threshold=0,
        storage=store,
        **settings,  # type: ignore[arg-type]
    )
    layout = RankLayout(tp_size=agreement.size, tp_rank=agreement.rank, pp_size=2, pp_rank=stage)
    return UnifiedCache(config, make_pool((16, 12)[stage]), ranks=Ranks(layout, agreement), **others)  # type: ignore[arg-type]


def test_the_smallest_stage_counts() -> None:
    def program(stage: int, agreement: PipelineRanks) -> None:
        cache = make_stage(stage, agreement, MemoryStore())
        assert cache.usage()["device_pages"] == 12
        cache.close(timeout=0)

    run_stages(1, 2, program)


def test_a_later_stage_waits_for_its_own_copies() -> None:
    """The first stage has its ack; the second, which has not copied yet, does so before it ticks on."""

    def program(stage: int, agreement: PipelineRanks) -> None:
        cache = make_stage(stage, agreement, MemoryStore())
        serve_rank(cache, toks(9))
        ticks = 0
        while cache.tree.host_tokens == 0:
            cache.tick()
            ticks += 1
        assert cache.flush(30)
        cache.close()

    run_stages(2, 2, program)


def test_a_later_stage_takes_no_load_for_ended_before_the_first_has() -> None:
    ran = threading.Barrier(2)

    def program(stage: int, agreement: PipelineRanks) -> None:
        cache = make_stage(stage, agreement, MemoryStore(), copies=LateCopies.between)
        serve_rank(cache, toks(9))
        assert cache.flush(30)
        assert cache.evict(100) == 2
        request = cache.begin(toks(9))
        assert request.load_back() == 8
        cache.tick()
        if stage == 1:
            late_copies(cache).run_all()
        ran.wait(LIMIT)
        for _ in range(3):
            cache.tick()
            assert not request.loaded
            assert cache._controller.under_way == (0, 1)
        late_copies(cache).run_all()
        cache.tick()
        assert request.loaded
        request.abort()
        assert cache.flush(30)
        cache.close()

    run_stages(1, 2, program)


def test_a_page_that_a_later_stage_does_not_have() -> None:
    begun = time.monotonic()

    def program(stage: int, agreement: PipelineRanks) -> None:
        store = MemoryStore()
        cache = make_stage(stage, agreement, store)
        serve_rank(cache, toks(21))
        assert cache.flush(30)
        cache.evict(100)
        host = cache._host_pages
        assert host is not None
        cache._controller.make_host_room(host.free_pages + cache.tree.host_tokens // PAGE)
        if stage == 1:
            del store.pages[list(store.pages)[2]]
            with pytest.raises(
                RankError, match="can not follow the first one: 2 pages of a prefetch are there, 5"
            ):
                serve_rank(cache, toks(21))
        else:
            serve_rank(cache, toks(21))
        cache.close(timeout=0) if stage == 0 else None

    run_stages(1, 2, program)
    assert time.monotonic() - begun < LIMIT  # it does not take the time limit to say so


def test_a_difference_between_stages() -> None:
    def program(stage: int, agreement: PipelineRanks) -> None:
        cache = make_stage(stage, agreement, MemoryStore())
        if stage == 1:
            cache.alloc(1)
            with pytest.raises(RanksDifferError, match="of a later stage has device_free_pages=11"):
                cache.tick()
        else:
            cache.tick()

    run_stages(1, 2, program)


def hold_at(kind: str) -> Callable[[str], None]:
    """A job that is to hang does so in its first call of this kind."""

    def before(call: str) -> None:
        if call == kind:
            HangingThreads.hold()

    return before


def test_a_read_that_only_the_first_stage_had_begun_when_it_was_dropped() -> None:
    """What is read after that gets into no tree, so a later stage need not have it."""

    def program(stage: int, agreement: PipelineRanks) -> None:
        clock, store = Clock(), MemoryStore()
        cache = make_stage(stage, agreement, store, clock=clock)
        serve_rank(cache, toks(21))
        assert cache.flush(30)
        empty(cache)
        _, reads = with_hanging_threads(cache, lambda job: job == "_read")
        store.before = hold_at("get")
        request = cache.begin(toks(21))
        cache.tick()
        reads.run()
        cache.tick()
        if stage == 0:
            reads.run()
            assert reads.held
        assert request.load_back() == 0
        request.abort()
        reads.drain()
        cache.tick()
        assert_nothing_held(cache)
        cache.close()

    run_stages(1, 2, program)


def test_a_write_that_only_the_first_stage_had_begun_when_the_storage_went_down() -> None:
    """It may be stored there, so a later stage, where it waits for a thread, does not give it up."""

    def program(stage: int, agreement: PipelineRanks) -> None:
        clock, store = Clock(), MemoryStore()
        cache = make_stage(stage, agreement, store, clock=clock)
        writes, reads = with_hanging_threads(cache, lambda job: stage == 0 and job == "_run")
        store.before = hold_at("set")
        for at in range(2):
            request = cache.begin(toks(9, 100 * at))
            request.extend()
            request.finish()
            while cache.tree.host_tokens < 8 * (at + 1):
                cache.tick()
            if stage == 0:
                assert writes.run()
            clock.now += 4  # of 5 that a call may take: the first is late now
        cache.tick()
        cache.tick()
        writes.drain()
        reads.drain()
        cache.tick()
        assert len(store.pages) == 4
        clock.now += 100
        assert_nothing_held(cache)
        cache.close()

    run_stages(1, 2, program)
