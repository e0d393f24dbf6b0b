"""What waits for storage while the host lets go of it, and a hit that the host has no room for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.cache.support import PAGE, MemoryStore, assert_nothing_held, make_cache, serve, toks
from tests.cache.test_storage_threads import LONG, Hands, filled, forked, served
from unified_cache import UnifiedCache


def attached(**settings: Any) -> tuple[UnifiedCache, MemoryStore]:
    """A cache with 12 pages in one node, on device and on host, that wait to be written."""
    store = MemoryStore()
    cache = make_cache(64, prefetch_threshold=PAGE, load_back_threshold=0, **settings)
    serve(cache, toks(LONG))
    assert cache.flush(30)
    cache.attach_storage(store)
    return cache, store


def make_room(cache: UnifiedCache, pages: int) -> int:
    """Evict so many pages from host."""
    assert cache._host_pages is not None
    return cache._controller.make_host_room(cache._host_pages.free_pages + pages)


def finish(cache: UnifiedCache, store: MemoryStore, pages: int) -> None:
    """So many of the first pages are stored, and the others are counted."""
    assert cache.flush(30)
    assert len(store.pages) == pages
    assert cache.stats()["storage_skipped_pages"] == 12 - pages
    cache.tree.check_invariants()
    cache.reset()
    assert serve(cache, toks(LONG)) == (0, 0, pages * PAGE)
    assert_nothing_held(cache)
    cache.close()


def test_a_node_that_lost_its_tail() -> None:
    cache, store = attached()
    cache.evict(64)
    # Twice: the node has a new id each time.
    assert (make_room(cache, 2), make_room(cache, 3)) == (2, 3)
    finish(cache, store, 7)


def test_a_node_whose_lower_part_is_gone() -> None:
    cache, store = attached()
    cache.match_prefix(forked(LONG, 4))
    cache.evict(64)
    assert make_room(cache, 8) == 8
    finish(cache, store, 4)


def test_a_node_of_whose_upper_part_a_piece_is_gone_too() -> None:
    cache, store = attached()
    cache.match_prefix(forked(LONG, 4))
    cache.evict(64)
    assert make_room(cache, 10) == 10
    finish(cache, store, 2)


def test_a_node_whose_lower_part_is_on_device_alone() -> None:
    cache, store = attached()
    cache.match_prefix(forked(LONG, 4))
    assert make_room(cache, 1) == 8  # the copy of a node goes whole
    finish(cache, store, 4)


def test_a_node_that_is_gone() -> None:
    cache, store = attached()
    cache.evict(64)
    assert make_room(cache, 12) == 12
    finish(cache, store, 0)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_on_host_is_stored_in_the_end(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    store = MemoryStore()
    with make_cache(96, prefetch_threshold=10**6, write_policy=policy, storage_write_threads=1) as cache:
        prompts = [toks(LONG, 1000 * at) for at in range(4)]
        for prompt in prompts:
            serve(cache, prompt)
            if policy == "write_back":
                cache.evict(96)
        assert cache.flush(30)
        cache.attach_storage(store)
        for _ in range(30):
            what = rng.randrange(4)
            if what == 0:
                other = rng.choice(prompts).copy()
                other[rng.randrange(1, 12) * PAGE :] += 5000
                cache.match_prefix(other)  # a cut
            elif what == 1:
                cache.evict(rng.randrange(20))
            elif what == 2:
                make_room(cache, rng.randrange(1, 6))
            elif rng.random() < 0.1:
                cache.tick()
        assert cache.flush(30)
        cache.tree.check_invariants()
        kept = [digest for node in cache.tree.host_nodes() for digest in cache.tree.page_hashes(node)]
        assert {digest.tobytes().hex() for digest in kept} <= {key.split("-")[0] for key in store.pages}
        assert_nothing_held(cache)


def test_to_attach_a_storage_is_one_question_for_all_nodes() -> None:
    class Tree:
        def page_counts(self, nodes: list[int]) -> list[int]:
            asked.append(len(nodes))
            return cache.tree.page_counts(nodes)

    asked: list[int] = []
    cache, store = attached()
    assert cache._storage is not None
    writes = cache._storage._writes
    writes.waiting.clear()
    writes._tree = Tree()  # type: ignore[assignment]
    cache._storage.write_later(cache.tree.host_nodes())
    writes._tree = cache.tree
    assert asked == [1]
    finish(cache, store, 12)


@pytest.mark.parametrize(("free", "read"), [(3, 0), (7, 0), (8, 8), (12, 12)])
def test_fewer_pages_than_the_threshold_are_not_read(free: int, read: int) -> None:
    hands = Hands(filled(toks(LONG)), prefetch_threshold=8 * PAGE)
    controller, host = hands.cache._controller, hands.cache._host_pages
    assert host is not None
    serve(hands.cache, toks(2 * PAGE + 1, 9000))  # what could go, and does not go for nothing
    hands.go()
    assert host.free_pages == host.num_pages - 2
    taken = controller.alloc_host(host.free_pages - free + 2)
    request = hands.begin(toks(LONG))
    hands.go()
    assert sum(hands.gets()) == read
    assert served(request) == read * PAGE
    if not read:
        assert hands.cache.stats()["evicted_host_pages"] == 0
    controller.free_host(taken)
    hands.end()
