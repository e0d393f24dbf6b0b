"""What one rank alone sees or does, at the edges: a loop that stood still, an interrupt, a wrong argument, a
call that a storage holds up."""

from __future__ import annotations

import threading

import pytest

from tests.cache.support import (
    Clock,
    MemoryStore,
    assert_nothing_held,
    make_cache,
    toks,
    with_manual_threads,
)
from tests.ranks.baton import run_ranks
from tests.ranks.hanging import HangingThreads, with_hanging_threads
from tests.ranks.support import each_rank, late_copies, make_rank, serve_rank
from tests.ranks.test_cache_ranks import serve_and_tick, stored_by_all
from tests.ranks.test_stages import make_stage, run_stages
from unified_cache import UnifiedCache
from unified_cache.errors import ArgumentError, RankError, RankLostError, StorageError
from unified_cache.ranks.agreement import Agreement
from unified_cache.ranks.pipeline import PipelineRanks

# A loop that stood still


def test_a_prefetch_has_all_its_time_after_a_pause_of_the_loop() -> None:
    """Between two ticks nobody knows what time it is for all: that of a prefetch begins at the next one."""

    def program(agreement: Agreement) -> None:
        clock = Clock()
        cache, _ = stored_by_all(agreement, clock=clock)
        _, reads = with_manual_threads(cache)
        clock.now += 3600
        request = cache.begin(toks(21))
        for _ in range(2):
            cache.tick()
            assert not request.prefetch_done()
            reads.run()
        cache.tick()
        assert request.prefetch_done()
        assert request.load_back() == 20
        request.abort()
        assert_nothing_held(cache)

    run_ranks(2, program)


@pytest.mark.parametrize("first", [True, False])
def test_a_pin_has_all_its_time_after_a_pause_of_the_loop(first: bool) -> None:
    def program(agreement: Agreement) -> None:
        clock = Clock()
        clock.now = 1000.0 + agreement.rank
        cache = make_rank(agreement, clock=clock)
        serve_rank(cache, toks(9))
        if not first:
            cache.tick()
            clock.now += 3600
        cache.pin(toks(9), 5.0)
        gone = cache.pin(toks(5), 5.0)
        cache.unpin(gone)
        for _ in range(2):
            cache.tick()
            assert cache.tree.pinned_tokens == 8
            clock.now += 4
        cache.tick()
        assert cache.tree.pinned_tokens == 0
        cache.pin(toks(9), 5.0)
        cache.reset()
        clock.now += 100
        cache.tick()
        cache.tick()

    run_ranks(2, program)


# An exception in the middle of a tick


def test_an_error_before_a_rank_has_told_the_others_leaves_the_tick_to_be_made_again() -> None:
    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement)
        serve_rank(cache, toks(9))
        cache.tick()
        copies, ended = late_copies(cache), late_copies(cache).take_done
        copies.run_all()
        if agreement.rank == 1:

            def fail(**how: object) -> list[object]:
                copies.take_done = ended  # type: ignore[method-assign]
                raise OSError("the device says no")

            copies.take_done = fail  # type: ignore[assignment, method-assign]
            with pytest.raises(OSError, match="says no"):
                cache.tick()
        cache.tick()
        assert cache.tree.host_tokens == 8
        assert_nothing_held(cache)

    run_ranks(2, program)


def test_an_interrupt_after_that_ends_the_rank() -> None:
    """What the others have agreed on was not applied there, so it can not go on as if it had been."""

    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement)
        serve_rank(cache, toks(9))
        if agreement.rank == 1:

            def interrupt(*pages: object, **how: object) -> None:
                raise KeyboardInterrupt

            late_copies(cache).submit_backup = interrupt  # type: ignore[assignment, method-assign]
            with pytest.raises(KeyboardInterrupt):
                cache.tick()
            for _ in range(2):
                with pytest.raises(RankError, match="tick 1 was interrupted on this rank by KeyboardInterr"):
                    cache.tick()
            cache.close()
            return
        cache.tick()
        with pytest.raises(RankLostError):
            cache.tick()
        cache.close()

    run_ranks(2, program)


# Attach and detach


@pytest.mark.parametrize("wrong", [7, "nosuch://here", "file:///proc/nothing"])
def test_attach_with_a_wrong_argument_on_one_rank(wrong: object) -> None:
    """The others hear of it at the same tick, and all go on."""

    def program(agreement: Agreement) -> None:
        cache, store = make_rank(agreement), MemoryStore()
        serve_and_tick(cache, toks(9))
        bad = agreement.rank == 1
        with pytest.raises((ArgumentError, StorageError), match=None if bad else "another rank"):
            cache.attach_storage(wrong if bad else store)  # type: ignore[arg-type]
        assert store.closed == (not bad)
        serve_and_tick(cache, toks(9, 100))
        cache.attach_storage(MemoryStore())
        assert cache.flush(30)
        assert_nothing_held(cache)

    run_ranks(2, program)


@pytest.mark.parametrize("bad", [0, 1])
def test_attach_is_for_all_stages_or_for_none(bad: int) -> None:
    def program(stage: int, agreement: PipelineRanks) -> None:
        cache = make_stage(stage, agreement, MemoryStore())
        serve_rank(cache, toks(9))
        cache.detach_storage()
        store = MemoryStore()
        with pytest.raises(StorageError, match="/proc" if stage == bad else "another rank"):
            cache.attach_storage("file:///proc/nothing" if stage == bad else store)
        assert store.closed == (stage != bad)
        serve_rank(cache, toks(9))
        store = MemoryStore()
        cache.attach_storage(store)
        assert cache.flush(30)
        assert len(store.pages) == 2
        cache.close()

    run_stages(1, 2, program)


class HeldUp(MemoryStore):
    """Its first call of this kind stays in it until `go` is set."""

    def __init__(self, call: str, *, held: bool) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()
        self._call = call if held else None
        self.before = self._hold

    def _hold(self, call: str) -> None:
        if call == self._call:
            self._call = None
            self.entered.set()
            assert self.go.wait(60)


def ask_and_be_late(cache: UnifiedCache, store: HeldUp, clock: Clock, *, held: bool = True) -> None:
    """A look-up that this rank's storage holds up until it is late."""
    cache.tick()  # all can read
    request = cache.begin(toks(21))
    cache.tick()
    if held:
        assert store.entered.wait(60)
    clock.now += 100
    cache.tick()
    cache.tick()
    assert request.prefetch_done()
    request.abort()


def test_detach_says_the_same_on_all_ranks() -> None:
    def program(agreement: Agreement) -> bool:
        held, clock = agreement.rank == 0, Clock()
        store = HeldUp("exists", held=held)
        cache = make_rank(agreement, storage=store, prefetch_threshold=0, clock=clock)
        ask_and_be_late(cache, store, clock, held=held)
        left = cache.detach_storage()
        store.go.set()
        assert_nothing_held(cache)
        return left

    assert len(set(each_rank(2, program))) == 1


def test_a_thread_that_comes_back_after_a_reset_reads_again() -> None:
    """Although nothing else is under way at whose end somebody would look."""
    clock, store = Clock(), HeldUp("exists", held=True)
    with make_cache(storage=store, storage_read_threads=1, prefetch_threshold=0, clock=clock) as cache:
        ask_and_be_late(cache, store, clock)
        cache.reset()
        link = cache._storage
        assert link is not None
        clock.now += 1000  # the pause after a call that was late is over
        assert link.can_read == 0  # there is no thread
        ended = threading.Event()
        store.go.set()
        link._reader.threads.submit(ended.set)  # type: ignore[arg-type]
        assert ended.wait(60)
        cache.tick()
        assert link.can_read == 2


def test_detach_while_a_read_is_held_up_on_one_rank() -> None:
    """Its pages are free on no rank before that thread is off them."""

    def program(agreement: Agreement) -> None:
        cache, store = stored_by_all(agreement)
        _, reads = with_hanging_threads(cache, lambda job: job == "_read" and agreement.rank == 1)
        store.before = lambda call: HangingThreads.hold() and None
        request = cache.begin(toks(21))
        cache.tick()
        reads.run()
        cache.tick()
        reads.run()
        free = cache.usage()["host_free_pages"]
        assert not cache.detach_storage(timeout=0)
        request.abort()
        for _ in range(3):
            cache.tick()
            assert cache.usage()["host_free_pages"] == free
        reads.drain()
        cache.tick()
        assert cache.usage()["host_free_pages"] == free + 5
        assert_nothing_held(cache)

    run_ranks(2, program)


def test_flush_ends_by_the_slowest_clock() -> None:
    """After as many ticks on every rank."""

    def program(agreement: Agreement) -> int:
        clock = Clock()
        cache, _ = stored_by_all(agreement, clock=clock)
        with_manual_threads(cache)
        cache.begin(toks(21))
        link = cache._storage
        assert link is not None

        def wait(timeout: float) -> None:
            clock.now += 0.1 * (1 + agreement.rank)

        link.wait = wait  # type: ignore[method-assign]
        before = agreement.reductions
        assert not cache.flush(2.0)
        return agreement.reductions - before

    assert each_rank(2, program) == [21, 21]
