"""Field cases of more than one rank: those of their own, and those of a single cache where ranks matter."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    MemoryStore,
    assert_nothing_held,
    read_page,
    toks,
    with_manual_threads,
)
from tests.ranks.support import (
    each_rank,
    empty,
    late_copies,
    make_rank,
    rank_content,
    serve_rank,
    write_computed,
)
from unified_cache import Request, UnifiedCache
from unified_cache.errors import CapacityError, RankLostError
from unified_cache.ranks.agreement import Agreement
from unified_cache.ranks.threads import ThreadRanks
from unified_cache.storage.contract import ObjectBatch, PageStatus


def test_case_13_as_many_reductions_on_every_rank() -> None:
    """Rank 0 has room for two requests, the others for one: all admit the same, and nobody waits for ever."""
    agreements = ThreadRanks.group(4, time_limit=1.0)
    admitted: dict[int, list[list[int]]] = {}
    errors: list[BaseException] = []

    def run(agreement: Agreement) -> None:
        rank = agreement.rank
        try:
            store = MemoryStore()
            pages = 10 if rank == 0 else 6
            cache = make_rank(agreement, pages, storage=store, prefetch_threshold=0, hicache_ratio=8.0)
            prompts = [toks(17, 1000 * at) for at in range(3)]
            for prompt in prompts:
                serve_rank(cache, prompt)
            assert cache.flush(10)
            empty(cache)
            waiting = [cache.begin(prompt) for prompt in prompts]
            while not all(request.prefetch_done() for request in waiting):
                for link in cache._links():
                    link.wait(0.01)
                cache.tick()
            running: list[Request] = []
            for _ in range(12):
                begun = agreement.reductions
                cache.tick()
                # A look at the whole queue, whatever is admitted of it, asks nobody.
                for request in list(waiting):
                    try:
                        request.load_back()
                        request.extend()
                    except CapacityError:
                        break
                    waiting.remove(request)
                    running.append(request)
                admitted.setdefault(rank, []).append([int(r.tokens[0]) for r in running])
                assert agreement.reductions == begun + 1
                if len(admitted[rank]) % 4 == 0 and running:
                    running.pop(0).finish()
            assert not waiting
            for request in running:
                request.abort()
            assert_nothing_held(cache)
        except BaseException as error:
            errors.append(error)
            agreement.close()

    threads = [threading.Thread(target=run, args=(agreement,)) for agreement in agreements]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, RankLostError)), errors[0])
    assert admitted[0] == admitted[1] == admitted[2] == admitted[3]
    assert admitted[0][0] == [0]  # one was admitted, as the smallest has room for
    assert max(map(len, admitted[0])) == 1


@pytest.mark.parametrize("pages", [(2, 1), (2, 2)])
def test_case_14_room_for_all_or_for_none(pages: tuple[int, int]) -> None:
    """The smaller host pool counts on both ranks."""

    def program(agreement: Agreement) -> tuple[int, int, int]:
        cache = make_rank(agreement, 8, hicache_ratio=pages[agreement.rank] / 8)
        begun = agreement.reductions
        request = cache.begin(toks(8))
        request.extend()
        write_computed(request)
        request.finish()
        cache.tick()
        late_copies(cache).run_all()
        cache.tick()
        assert cache.usage()["host_free_pages"] + cache.tree.host_tokens // PAGE == min(pages)
        assert_nothing_held(cache)
        return cache.tree.host_tokens, cache.usage()["host_free_pages"], agreement.reductions - begun

    first, second = each_rank(2, program)
    assert first == second
    assert first[:2] == ((8, 0) if min(pages) == 2 else (0, 1))


@pytest.mark.parametrize("pages", [(4, 3), (4, 4)])
def test_case_14_the_same_of_loads(pages: tuple[int, int]) -> None:
    def program(agreement: Agreement) -> int:
        cache = make_rank(agreement, pages[agreement.rank], hicache_ratio=2.0)
        serve_rank(cache, toks(12))
        cache.tick()
        late_copies(cache).run_all()
        cache.tick()
        assert cache.evict(3) == 3
        held = cache.begin(toks(4, 500))
        held.extend()
        request = cache.begin(toks(13))
        loaded = request.load_back()
        assert loaded in (0, 12)
        for each in (request, held):
            each.abort()
        assert_nothing_held(cache)
        return loaded

    first, second = each_rank(2, program)
    assert first == second == (12 if min(pages) == 4 else 0)


class Chunks:
    """One store that all ranks share, each rank's objects under keys of its own."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.owned: dict[int, list[str]] = {}
        self.reads: dict[int, int] = {}


class OwnView(MemoryStore):
    """A rank's client of the shared store; it notes what the rank writes and reads."""

    def __init__(self, chunks: Chunks, rank: int) -> None:
        super().__init__()
        self.pages = chunks.store.pages
        self._chunks, self._rank = chunks, rank

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        self._chunks.owned.setdefault(self._rank, []).extend(batch.keys)
        return super().set(batch)

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        self._chunks.reads[self._rank] = self._chunks.reads.get(self._rank, 0) + len(batch)
        return super().get(batch)


def test_case_16_the_hit_is_what_all_ranks_have() -> None:
    chunks = Chunks()
    prompt = toks(8 * PAGE + 1)

    def program(agreement: Agreement) -> None:
        rank = agreement.rank
        cache = make_rank(
            agreement,
            32,
            storage=OwnView(chunks, rank),
            prefetch_threshold=0,
            prefetch_policy="wait_complete",
        )
        serve_rank(cache, prompt)
        assert cache.flush(30)
        empty(cache)
        assert len(chunks.owned[rank]) == 8
        if rank == 2:
            del chunks.store.pages[chunks.owned[2][5]]
        cache.tick()  # so that all look after that
        chunks.reads.clear()
        cache.tick()
        assert serve_rank(cache, prompt).storage_hit_length == 5 * PAGE
        assert chunks.reads[rank] == 5
        # What was computed again is stored again, where it was missing.
        assert cache.flush(30)
        assert_nothing_held(cache)
        empty(cache)
        assert serve_rank(cache, prompt).storage_hit_length == 8 * PAGE
        assert_nothing_held(cache)

    each_rank(4, program)
    # Ranks that share the heads have objects of their own.
    assert len(chunks.store.pages) == 4 * 8


def test_case_18_an_aborted_read_ends_on_all_ranks_before_its_pages_are_free() -> None:
    def program(agreement: Agreement) -> None:
        store = MemoryStore()
        cache = make_rank(agreement, 16, storage=store, prefetch_threshold=0, hicache_ratio=1.0)
        serve_rank(cache, toks(8 * PAGE + 1))
        assert cache.flush(30)
        empty(cache)
        _, reads = with_manual_threads(cache)
        free = cache.usage()["host_free_pages"]
        request = cache.begin(toks(8 * PAGE + 1))
        cache.tick()
        reads.run()
        cache.tick()
        assert cache.usage()["host_free_pages"] == free - 8
        aborted: list[np.ndarray] = []

        def abort(call: str) -> None:
            """In the middle of the read: as on a thread that is inside the call."""
            if call == "get" and not aborted:
                request.abort()
                other = cache._controller.alloc_host(8)
                aborted.append(other)

        if agreement.rank == 0:
            store.before = abort
            reads.run()
            other = aborted[0]
        else:
            request.abort()  # before its thread had begun, so here the read never runs
            other = cache._controller.alloc_host(8)
        taken = {page for prefetch in cache._operations.list() for page in prefetch.pages.tolist()}  # type: ignore[attr-defined]
        assert len(taken) == 8
        assert not taken & set(other.tolist())
        assert cache.usage()["host_free_pages"] == free - 16
        cache.tick()
        assert cache.usage()["host_free_pages"] == free - 8
        cache._controller.free_host(other)
        assert_nothing_held(cache)

    each_rank(2, program)


def test_case_24_believed_present_is_what_all_ranks_have_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage.backup.BATCH_PAGES", 2)
    prompt = toks(8 * PAGE)

    def program(agreement: Agreement) -> None:
        store = MemoryStore()
        cache = make_rank(agreement, 16, storage=store, prefetch_threshold=0)
        if agreement.rank == 1:
            store.fault = lambda: "full" if sum(call == "set" for call, _ in store.calls) == 3 else None
        serve_rank(cache, prompt)
        assert cache.flush(30)
        assert len(store.pages) == (4 if agreement.rank == 1 else 8)
        assert cache.stats()["storage_failed_pages"] == 4
        empty(cache)
        store.fault = lambda: None
        calls = len(store.calls)
        request = serve_rank(cache, np.append(prompt, 7))
        assert request.storage_hit_length == 4 * PAGE
        assert cache.flush(30)
        puts = sum(count for call, count in store.calls[calls:] if call == "set")
        assert puts == (4 if agreement.rank == 1 else 0)
        empty(cache)
        assert serve_rank(cache, np.append(prompt, 7)).storage_hit_length == 8 * PAGE
        assert_nothing_held(cache)

    each_rank(2, program)


def test_case_49_an_end_is_taken_at_the_next_tick_of_all_ranks() -> None:
    """r3 is read at tick 1; r1 alone is admitted. At the end of tick 2 it is in the tree, on all ranks."""

    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement, 32, storage=MemoryStore(), prefetch_threshold=0)
        prompts = [toks(9), toks(9, 500), np.append(toks(9, 500), 5)]
        serve_rank(cache, prompts[1])
        assert cache.flush(30)
        empty(cache)
        _, reads = with_manual_threads(cache)
        first, third = cache.begin(prompts[0]), cache.begin(prompts[2])
        cache.tick()
        reads.drain()
        cache.tick()
        assert cache.usage()["host_reading_pages"] == 2
        reads.drain()
        cache.tick()
        assert cache.usage()["host_reading_pages"] == 0
        assert len(cache._operations) == 0
        assert cache.tree.host_tokens == 8
        second = cache.begin(prompts[1])
        assert second.host_hit_length == 8
        for request in (first, second, third):
            request.abort()
        assert_nothing_held(cache)

    each_rank(3, program)


def test_case_51_resets_leave_as_many_threads(tmp_path: Path) -> None:
    def program(agreement: Agreement) -> tuple[int, int]:
        folder = tmp_path / str(agreement.rank)
        cache = make_rank(agreement, storage=f"file://{folder}?size=10MB", prefetch_threshold=0)
        names = _threads(cache)
        for _ in range(5):
            serve_rank(cache, toks(9))
            cache.reset()
        assert cache.flush(30)
        assert _threads(cache) == names
        assert all(thread.is_alive() for thread in names)
        cache.close()
        return len(names), sum(thread.is_alive() for thread in names)

    for begun, left in each_rank(2, program):
        assert begun == 6
        assert left == 0


def _threads(cache: UnifiedCache) -> list[threading.Thread]:
    link = cache._storage
    assert link is not None
    return [*link._backup.threads._threads, *link._reader.threads._threads]  # type: ignore[attr-defined]


def test_case_51_a_reset_while_one_rank_is_stuck_in_a_call() -> None:
    """It waits for nobody; the pages that the one rank's thread touches stay out of use on all."""
    release = threading.Event()

    def program(agreement: Agreement) -> None:
        store = MemoryStore()
        cache = make_rank(agreement, 16, storage=store, prefetch_threshold=0)
        serve_rank(cache, toks(21))
        assert cache.flush(30)
        empty(cache)
        inside = threading.Event()

        def stuck(call: str) -> None:
            if call == "get":
                inside.set()
                assert release.wait(60)

        if agreement.rank == 1:
            store.before = stuck
        request = cache.begin(toks(21))
        while cache.usage()["host_reading_pages"] == 0:
            for link in cache._links():
                link.wait(0.01)
            cache.tick()
        if agreement.rank == 1:
            assert inside.wait(60)
        threads = _threads(cache)
        cache.reset(force=True)
        request.abort()
        for _ in range(5):
            assert cache.usage()["host_quarantined_pages"] == 5
            cache.tick()
        assert _threads(cache) == threads
        release.set()
        while cache.usage()["host_quarantined_pages"]:
            for link in cache._links():
                link.wait(0.01)
            cache.tick()
        assert_nothing_held(cache)

    each_rank(2, program)


def test_ranks_of_one_group_hold_other_bytes_under_one_digest() -> None:
    """What one rank stored is never another rank's, though both name the page alike."""
    store = MemoryStore()

    def program(agreement: Agreement) -> None:
        cache = make_rank(agreement, storage=store, prefetch_threshold=0)
        serve_rank(cache, toks(9))
        assert cache.flush(30)
        empty(cache)
        request = cache.begin(toks(9))
        request.wait_prefetch()
        assert request.load_back() == 8
        request.extend()
        request.wait()
        hashes = cache.tree.prefix_hashes(cache.match_prefix(toks(8)).last_device_node)
        for at, page in enumerate(request.pages[:2].tolist()):
            served = read_page(cache.device_pool.planes, page)
            assert (served == rank_content(cache, hashes[at].tobytes())).all()
        request.abort()
        assert_nothing_held(cache)

    each_rank(2, program)
    assert len(store.pages) == 4
