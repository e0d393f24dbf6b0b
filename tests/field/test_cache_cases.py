"""Field cases of the cache as a whole: 3, 8, 9, 19, 22, 31, 35, 36, 37, 55 and 58, each with its kind.

Copies end when the test says so, and so do reads and writes of storage. A page holds what a function of its
tokens says, so wrong bytes show wherever they come from.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.support import (
    LateCopies,
    ManualThreads,
    MemoryStore,
    assert_nothing_held,
    page_content,
    read_page,
    toks,
    with_manual_storage,
    write_page,
)
from tests.field.support import event_hashes, path
from unified_cache import (
    ArgumentError,
    BusyError,
    CacheConfig,
    CapacityError,
    LockError,
    Request,
    StorageError,
    UnifiedCache,
    page_hashes,
)
from unified_cache.cli import main
from unified_cache.events import Cleared, Mirror, Stored
from unified_cache.pools import host as host_module
from unified_cache.pools import host_memory
from unified_cache.pools.device import MhaDevicePool
from unified_cache.storage.contract import ObjectBatch, PageStatus
from unified_cache.storage.page_format import HEADER_BYTES

P = 4


def make(device: int, host: int | None = None, *, page_size: int = P, **settings: Any) -> UnifiedCache:
    """A cache on pools of so many pages; without `host` there is no host tier."""
    pool = MhaDevicePool(device, page_size, 2, 1, 4)
    others = {name: settings.pop(name) for name in ("clock", "copies") if name in settings}
    if host is None:
        settings["write_policy"] = None
    else:
        others.setdefault("copies", LateCopies.between)
        settings["hicache_size"] = (host + 0.5) * pool.page_bytes / 1e9
    given = {"page_size": page_size, "model": "m", "load_back_threshold": 0, "prefetch_threshold": 1}
    cache = UnifiedCache(CacheConfig(**(given | settings)), pool, **others)
    # A test that fails leaves work behind, which nobody will end any more.
    cache.close = partial(cache.close, timeout=0.01)  # type: ignore[method-assign]
    return cache


def late(cache: UnifiedCache) -> LateCopies:
    assert isinstance(cache._copies, LateCopies)
    return cache._copies


def digests(request: Request) -> list[bytes]:
    rows = page_hashes(
        request.tokens,
        request._page_size,
        extra_key=request._extra_key,
        cache_salt=request._cache_salt,
    )
    return [row.tobytes() for row in rows]


def fill(request: Request) -> None:
    """Compute the whole pages that the request did not get from the cache."""
    planes, pages = request._cache.device_pool.planes, request.pages.tolist()
    first = request.device_length // request._page_size
    for at, digest in enumerate(digests(request)[first:], first):
        write_page(planes, pages[at], page_content(planes, digest))


def check_bytes(request: Request, pages: int | None = None) -> None:
    """The first pages (default: what is on device) hold what was computed for them."""
    planes, held = request._cache.device_pool.planes, request.pages.tolist()
    count = request.device_length // request._page_size if pages is None else pages
    for at, digest in enumerate(digests(request)[:count]):
        expected = page_content(planes, digest)
        assert (read_page(planes, held[at]) == expected).all(), f"page {at}"


def put(cache: UnifiedCache, tokens: np.ndarray, **names: str) -> None:
    """A request that computes these tokens, and leaves them in the tree."""
    request = cache.begin(tokens, **names)
    request.load_back()
    request.extend()
    request.wait()
    check_bytes(request)
    fill(request)
    request.finish()


def settle(cache: UnifiedCache, *workers: ManualThreads) -> None:
    """Let everything end that is under way."""
    for _ in range(4):
        cache.tick()
        if cache.host_pool is not None:
            late(cache).run_all()
        for worker in workers:
            worker.drain()
    cache.tick()


def hit(cache: UnifiedCache, tokens: np.ndarray) -> tuple[int, int]:
    """Tokens on device, and on host after them; changes nothing."""
    found = cache.tree.peek_prefix(tokens)
    return found.device_length, found.host_hit_length


def locks(cache: UnifiedCache, tokens: np.ndarray) -> set[tuple[int, int]]:
    """The different (device, host) lock counts on the path of these tokens."""
    node = cache.match_prefix(tokens).last_host_node
    return {tuple(cache.tree.node_info(each).locks) for each in path(cache.tree, node)}


def used_host(cache: UnifiedCache) -> int:
    usage = cache.usage()
    return usage["host_pages"] - usage["host_free_pages"]


def keys_of(cache: UnifiedCache, tokens: np.ndarray) -> list[str]:
    return cache._keys().keys(page_hashes(tokens, P))


def with_storage(folder: Path, device: int, host: int, **settings: Any) -> tuple[Any, ...]:
    """A cache with storage in the hands of the test: (cache, store, writes, reads)."""
    cache = make(device, host, storage=str(folder / "store"), **settings)
    store = MemoryStore()
    return cache, store, *with_manual_storage(cache, store)


# Case 3: pins of a look-up


def end_finish(request: Request) -> None:
    request.extend()
    request.wait()
    fill(request)
    request.finish()


def end_abort(request: Request) -> None:
    request.abort()


def end_nothing_to_load(request: Request) -> None:
    request.load_back(quota=0)
    request.abort()


def end_without_computing(request: Request) -> None:
    request.load_back(quota=0)
    request.finish()


def end_chunk(request: Request) -> None:
    request.extend()
    fill(request)
    request.insert(chunked=True)
    request.abort()


ENDS = [end_finish, end_abort, end_nothing_to_load, end_without_computing, end_chunk]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_case_3_a_look_up_lets_go_of_what_it_held(
    end: Callable[[Request], None], where: str, policy: str
) -> None:
    """Fault: a request that loads nothing never gives its pins back: in the end nothing can be evicted.

    Right: finish, abort and 'nothing to load' drop them: none is left after each of 8 requests, and the 9th
    prefix evicts the first one from the 8 pages on host.
    """
    with make(16, 8, page_size=256, write_policy=policy) as cache:
        for start in range(1000, 9000, 1000):
            put(cache, toks(256, start))
            settle(cache)
            if where == "host" or policy == "write_back":
                cache.evict(16)
                settle(cache)
            if where == "device" and policy == "write_back":
                put(cache, toks(257, start))
            request = cache.begin(toks(257, start))
            assert (request.device_length, request.host_hit_length) == (
                (256, 0) if where == "device" else (0, 256)
            )
            end(request)
            settle(cache)
            assert locks(cache, toks(257, start)) == {(0, 0)}
            assert cache.tree.protected_tokens == 0
        if where == "host":
            cache.evict(16)
            settle(cache)
        assert used_host(cache) == 8
        put(cache, toks(256, 9000))
        settle(cache)
        cache.evict(16)
        settle(cache)
        assert cache.usage()["host_tree_pages"] == 8
        assert [hit(cache, toks(256, start)) for start in range(1000, 10000, 1000)] == [(0, 0)] + [
            (0, 256)
        ] * 8
        assert_nothing_held(cache)


@pytest.mark.parametrize("first", [end_finish, end_abort])
@pytest.mark.parametrize("where", ["device", "host"])
def test_case_3_a_second_unpin_is_refused(first: Callable[[Request], None], where: str) -> None:
    """A second way out gives nothing back: the count is another request's, and never falls below 0."""
    with make(16, 8, page_size=256) as cache:
        put(cache, toks(256))
        settle(cache)
        if where == "host":
            cache.evict(1)
        holder, request = cache.begin(toks(257)), cache.begin(toks(257))
        before = {"device": {(1, 0)}, "host": {(0, 1)}}[where]
        assert locks(cache, toks(256)) == {(2, 0) if where == "device" else (0, 2)}
        if where == "host":
            end_abort(request)
        else:
            first(request)
        settle(cache)
        for call in (request.finish, request.extend, request.load_back, request.retract):
            with pytest.raises(LockError, match="ended before"):
                call()
        request.abort()
        assert locks(cache, toks(256)) == before
        if where == "device":
            assert cache.evict(16) == 0
        holder.abort()
        assert locks(cache, toks(256)) == {(0, 0)}
        lock = cache.lock(cache.match_prefix(toks(256)).last_device_node)
        cache.unlock(lock)
        with pytest.raises(LockError):
            cache.unlock(lock)
        assert locks(cache, toks(256)) == {(0, 0)}
        assert_nothing_held(cache)


# Cases 8 and 9: cuts while bytes are on their way

CUTS = [(2,), (1, 3), (3, 1), (1, 2, 3)]


def cut(cache: UnifiedCache, tokens: np.ndarray, pages: int, how: str) -> None:
    """Cut the node of `tokens` after so many pages."""
    front = tokens[: pages * P]
    if how == "match":
        cache.match_prefix(front)
    elif how == "request":
        cache.begin(tokens[: pages * P + 1]).abort()
    else:
        put(cache, np.concatenate((front, toks(P, 7000 + 100 * pages))))


@pytest.mark.parametrize("when", ["wanted", "copied", "waiting to be stored", "stored"])
@pytest.mark.parametrize("how", ["insert", "match", "request"])
@pytest.mark.parametrize("cuts", CUTS)
def test_case_8_a_cut_while_the_copy_to_host_is_under_way(
    tmp_path: Path, cuts: tuple[int, ...], how: str, when: str
) -> None:
    """Fault: what is remembered of the copy names the lower part only: A's first pages are never stored.

    Right: storage holds all 4 page keys of A, a new query answers 16 tokens, both parts count as backed up,
    and the host's Stored events cover 4 pages, however often and whenever it was cut.
    """
    cache, store, writes, reads = with_storage(tmp_path, 32, 16, events=True)
    with cache:
        a = toks(16)
        if when == "waiting to be stored":
            put(cache, toks(32, 500))  # while these 8 pages are being written, half of the pool is
            cache.tick()
            late(cache).run_all()
            cache.tick()
            assert len(writes.jobs) == 1
        put(cache, a)
        if when != "wanted":
            cache.tick()
            assert late(cache).queues["backup"]
        if when in ("waiting to be stored", "stored"):
            late(cache).run_all()
            cache.tick()
            assert len(writes.jobs) == 1
            assert bool(cache._storage._writes.waiting) == (when == "waiting to be stored")
        for pages in cuts:
            cut(cache, a, pages, how)
        settle(cache, writes, reads)

        nodes = path(cache.tree, cache.tree.peek_prefix(a).last_host_node)
        assert len(nodes) == len(cuts) + 1
        for node in nodes:
            info = cache.tree.node_info(node)
            assert info.host_pages is not None
            assert info.pending is None
            assert tuple(info.locks) == (0, 0)
        assert set(keys_of(cache, a)) <= set(store.pages)
        stored = [
            digest
            for event in cache.take_events()
            if isinstance(event, Stored) and event.tier == "host"
            for digest in event.hashes
        ]
        assert [each for each in stored if each in event_hashes(page_hashes(a, P))] == event_hashes(
            page_hashes(a, P)
        )
        cache.reset()
        request = cache.begin(toks(17))
        settle(cache, reads)
        assert request.storage_hit_length == 16
        assert request.load_back() == 16
        request.wait()
        check_bytes(request)
        request.abort()
        settle(cache, writes, reads)
        assert_nothing_held(cache)


def grab_evict_host(cache: UnifiedCache) -> list[int]:
    return cache.tree.evict_host(2).host_pages.tolist()


def grab_backup(cache: UnifiedCache) -> list[int]:
    before = cache.stats()["backups_given_up"]
    put(cache, toks(8, 3000))
    cache.tick()
    late(cache).run_all()
    cache.tick()
    assert cache.stats()["backups_given_up"] == before + 1
    return []


def grab_retract(cache: UnifiedCache) -> list[int]:
    request = cache.begin(toks(8, 3000))
    request.extend()
    with pytest.raises(CapacityError):
        request.retract()
    request.abort()
    return []


@pytest.mark.parametrize("grab", [grab_evict_host, grab_backup, grab_retract])
@pytest.mark.parametrize("where", ["both", "host"])
@pytest.mark.parametrize("cuts", CUTS)
def test_case_9_a_cut_while_storage_reads_in_place(
    tmp_path: Path, cuts: tuple[int, ...], where: str, grab: Callable[[UnifiedCache], list[int]]
) -> None:
    """Fault: the upper part has no host lock: its pages are given to others while storage reads them.

    Right: all parts are locked alike, the host gives none of them away until the write has ended, what is
    stored is what was there, and after that no lock is left.
    """
    cache, store, writes, reads = with_storage(tmp_path, 16, 4)
    with cache:
        put(cache, toks(16))
        cache.tick()
        late(cache).run_all()
        cache.tick()
        if where == "host":
            assert cache.evict(4) == 4
        before: list[bytes] = []
        checked: list[bool] = []
        real = store.set

        def blocked(batch: ObjectBatch) -> list[PageStatus]:
            before.extend(map(bytes, batch.bodies))
            for pages in cuts:
                cut(cache, toks(16), pages, "match")
            assert locks(cache, toks(16)) == {(0, 1)}
            for page in grab(cache):
                cache.host_pool.page_view(page)[:] = b"\xee" * cache.host_pool.page_bytes
            assert hit(cache, toks(16)) == ((16, 0) if where == "both" else (0, 16))
            assert used_host(cache) == 4
            checked.append(True)
            return real(batch)

        store.set = blocked
        assert writes.run()
        store.set = real
        cache.tick()
        assert locks(cache, toks(16)) == {(0, 0)}
        assert checked == [True]
        assert len(before) == 4
        assert [store.pages[key][HEADER_BYTES:] for key in keys_of(cache, toks(16))] == before
        settle(cache, writes, reads)
        cache.reset()
        request = cache.begin(toks(17))
        settle(cache, reads)
        assert request.load_back() == 8  # as much as a prefetch may take of a host pool of 4 pages
        request.wait()
        check_bytes(request)
        request.abort()
        # And now there is room for what was refused.
        put(cache, toks(8, 4000))
        settle(cache, writes, reads)
        cache.evict(16)
        assert hit(cache, toks(8, 4000)) == (0, 8)
        assert_nothing_held(cache)


# Case 19: what a request has found stays until it is loaded


def store_backup(cache: UnifiedCache, reads: ManualThreads) -> bool:
    given_up = cache.stats()["backups_given_up"]
    put(cache, toks(8, 500))
    cache.tick()
    late(cache).run_all()
    cache.tick()
    node = cache.match_prefix(toks(8, 500)).last_device_node
    stored = cache.tree.node_info(node).host_pages is not None
    assert (cache.stats()["backups_given_up"] > given_up) == (not stored)
    return stored


def store_retract(cache: UnifiedCache, reads: ManualThreads) -> bool:
    request = cache.begin(toks(8, 500))
    request.extend()
    try:
        request.retract()
    except CapacityError:
        assert not request.retracted
        return False
    finally:
        request.abort()
    return True


def store_prefetch(cache: UnifiedCache, reads: ManualThreads) -> bool:
    request = cache.begin(toks(9, 9000))
    for _ in range(2):
        reads.drain()
        cache.tick()
    pages = (request.host_hit_length + request.storage_hit_length) // P
    request.abort()
    assert pages in (0, 2)
    return pages > 0


def store_by_hand(cache: UnifiedCache, reads: ManualThreads) -> bool:
    try:
        cache._controller.free_host(cache._controller.alloc_host(2))
    except CapacityError:
        return False
    return True


STORES = [store_backup, store_retract, store_prefetch, store_by_hand]


@pytest.mark.parametrize("store_b", STORES)
@pytest.mark.parametrize("how", ["commit", "cancel", "over quota"])
@pytest.mark.parametrize("cuts", [(), (2,)])
def test_case_19_a_hit_on_host_is_kept_while_others_store(
    tmp_path: Path, store_b: Callable[..., bool], how: str, cuts: tuple[int, ...]
) -> None:
    """Fault: between look-up and load somebody stores, and evicts what was found: the load finds less.

    Right: B's store is refused without an error, and the load brings all 4 pages with A's bytes; after a
    cancel instead, no pin is left and B's store succeeds.
    """
    cache, _, writes, reads = with_storage(tmp_path, 16, 4)
    with cache:
        put(cache, toks(8, 9000))
        settle(cache, writes, reads)
        cache.reset()
        put(cache, toks(16))
        settle(cache, writes, reads)
        assert cache.evict(4) == 4
        request = cache.begin(toks(17))
        assert request.host_hit_length == 16
        for pages in cuts:
            cut(cache, toks(16), pages, "match")
        assert not store_b(cache, reads)
        if how == "commit":
            assert request.load_back() == 16
            # Until the copy has ended, too.
            assert not store_b(cache, reads)
            request.extend()
            request.wait()
            check_bytes(request)
            assert request.device_length == 16
        elif how == "over quota":
            assert request.load_back(15) == 0
            assert not store_b(cache, reads)
            request.extend()  # it computes them itself, and has no more use for what it found
            assert store_b(cache, reads) or store_b is store_backup
        request.abort()
        settle(cache)
        assert locks(cache, toks(16)) <= {(0, 0)}
        assert store_b(cache, reads) or store_b is store_backup
        if store_b is store_backup:
            # Its second hit asks again, if it was refused the first time.
            assert (
                cache.tree.node_info(cache.match_prefix(toks(8, 500)).last_device_node).host_pages is not None
            )
        settle(cache, writes, reads)
        assert_nothing_held(cache)


# Case 22: write_back without room


def hold_loads(cache: UnifiedCache) -> Callable[[], None]:
    """Both host pages are being loaded."""
    request = cache.begin(toks(9, 100))
    assert request.load_back() == 8
    cache.tick()
    return request.abort


def hold_readers(cache: UnifiedCache) -> Callable[[], None]:
    """A request has found both host pages."""
    request = cache.begin(toks(9, 100))
    assert request.host_hit_length == 8
    return request.abort


def hold_pins(cache: UnifiedCache) -> Callable[[], None]:
    pinned = cache.pin(toks(8, 100))
    assert pinned.tokens == 8
    return lambda: cache.unpin(pinned)


def hold_retracted(cache: UnifiedCache) -> Callable[[], None]:
    """Both host pages hold a request that was taken off the device."""
    request = cache.begin(toks(8, 700))
    request.extend()
    request.retract()
    cache.tick()
    late(cache).run_all()
    cache.tick()
    return request.abort


HOLDS = [hold_loads, hold_readers, hold_pins, hold_retracted]


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("pages", [1, 2])
def test_case_22_a_victim_without_room_is_dropped(
    hold: Callable[[UnifiedCache], Callable[[], None]], pages: int
) -> None:
    """Fault: no room for the copy, and the node is turned into one on host all the same: with neither copy.

    Right, and always the same: it is dropped, its 2 device pages are free at once, 8 dropped tokens count,
    and a match of it is 0. Where one page is enough, only the last one goes.
    """
    with make(4, 2, write_policy="write_back", pin_share=1.0) as cache:
        put(cache, toks(8, 100))
        cache.evict(2)
        settle(cache)
        assert hit(cache, toks(8, 100)) == (0, 8)
        let_go = hold(cache)
        put(cache, toks(8))  # A
        late(cache).frozen = True
        before = cache.stats()
        assert cache.evict(pages) == pages
        late(cache).frozen = False
        settle(cache)
        now = cache.stats()
        assert now["dropped_tokens"] - before["dropped_tokens"] == P * pages
        assert now["backup_pages"] == before["backup_pages"]
        assert hit(cache, toks(8)) == (8 - P * pages, 0)
        cache.tree.check_invariants()
        let_go()
        settle(cache)
        # With room the same eviction keeps it.
        cache.evict(4)
        settle(cache)
        put(cache, toks(8))
        settle(cache)
        dropped = cache.stats()["dropped_tokens"]
        for _ in range(2):  # if it was cut, the upper part goes once the lower one has gone
            cache.evict(2)
            settle(cache)
        assert hit(cache, toks(8)) == (0, 8)
        assert cache.stats()["dropped_tokens"] == dropped
        assert_nothing_held(cache)


# Case 31: completions from before a reset


@pytest.mark.parametrize("held", ["wanted", "queued", "load", "write", "look up", "read", "retract"])
@pytest.mark.parametrize("release", ["before the new put", "after the new put"])
def test_case_31_completions_from_before_a_reset(tmp_path: Path, held: str, release: str) -> None:
    """Fault: a completion from before the reset publishes old blocks, or their memory while others use it.

    Right: it only frees its pages. After reset a match is 0 and everything is free; a new put and a match
    give 4 blocks with its own bytes, whenever the old one ends.
    """
    cache, store, writes, reads = with_storage(tmp_path, 8, 8, events=True)
    mirror = Mirror()
    with cache:
        old: list[Request] = []
        if held in ("load", "write", "look up", "read"):
            put(cache, toks(16))
            settle(cache, *((reads,) if held == "write" else (writes, reads)))
            cache.evict(8)
        if held in ("look up", "read"):
            cache.reset()
            old.append(cache.begin(toks(17)))
            if held == "read":
                assert reads.run()
                cache.tick()
                assert used_host(cache) == 4
        elif held == "load":
            old.append(cache.begin(toks(17)))
            assert old[0].load_back() == 16
            cache.tick()
        elif held == "write":
            assert len(writes.jobs) == 1
        elif held == "retract":
            old.append(cache.begin(toks(16)))
            old[0].extend()
            fill(old[0])
            old[0].retract()
            cache.tick()
        else:
            put(cache, toks(16))
            if held == "queued":
                cache.tick()
        running = late(cache).running
        assert running == (1 if held in ("queued", "load", "retract") else 0)
        mirror.apply(cache.take_events())
        if old:
            with pytest.raises(BusyError):
                cache.reset()
        cache.reset(force=True)

        events = cache.take_events()
        assert Cleared() in events
        mirror.apply(events)
        assert len(mirror) == 0
        assert hit(cache, toks(16)) == (0, 0)
        usage = cache.usage()
        kept = 4 * running
        assert usage["device_free_pages"] == 8 - usage["device_quarantined_pages"]
        assert usage["host_free_pages"] == 8 - kept
        assert usage["host_quarantined_pages"] == kept
        if release == "before the new put":
            late(cache).run_all()
            cache.tick()
            assert cache.usage()["device_free_pages"] == cache.usage()["host_free_pages"] == 8
            assert hit(cache, toks(16)) == (0, 0)
        store.clear()
        put(cache, toks(16))
        assert hit(cache, toks(16)) == (16, 0)
        settle(cache, writes, reads)
        mirror.apply(cache.take_events())
        hashes = set(event_hashes(page_hashes(toks(16), P)))
        assert mirror.hashes("device") == mirror.hashes("host") == hashes
        assert cache.evict(4) == 4
        request = cache.begin(toks(17))
        assert request.host_hit_length == 16
        assert request.load_back() == 16
        request.wait()
        check_bytes(request)
        request.abort()
        for each in old:
            with pytest.raises(LockError, match="before a reset"):
                each.finish()
            each.abort()
        settle(cache, writes, reads)
        assert_nothing_held(cache)


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("direction", ["backup", "load"])
def test_case_31_copies_from_before_several_resets(direction: str, failing: bool) -> None:
    """Each reset leaves its own copies behind, and they end in any order, well or not."""
    with make(12, 12) as cache:
        for _ in range(3):
            put(cache, toks(16))
            if direction == "backup":
                cache.tick()
            else:
                settle(cache)
                cache.evict(12)
                request = cache.begin(toks(17))
                assert request.load_back() == 16
                cache.tick()
                late(cache).frozen = True
            cache.reset(force=True)
            if direction == "load":
                break  # the next put would have to let the load run
        late(cache).frozen = False
        late(cache).fail = lambda handle: failing
        used = cache.usage()["host_quarantined_pages"]
        assert used == (12 if direction == "backup" else 4)
        before = cache.tree.digest()
        late(cache).run_all()
        cache.tick()
        assert cache.tree.digest() == before
        usage = cache.usage()
        assert usage["host_free_pages"] == usage["device_free_pages"] == 12
        assert usage["host_quarantined_pages"] == usage["device_quarantined_pages"] == 0
        late(cache).fail = lambda handle: False
        put(cache, toks(16))
        settle(cache)
        assert_nothing_held(cache)


@pytest.mark.parametrize("policy", ["write_through", "write_back", None])
@pytest.mark.parametrize("asked", [False, True])
def test_case_31_aborted_requests_store_nothing_unless_asked(policy: str | None, asked: bool) -> None:
    with make(
        8, None if policy is None else 8, **({} if policy is None else {"write_policy": policy})
    ) as cache:
        request = cache.begin(toks(16))
        request.extend()
        fill(request)
        if asked:
            request.insert(chunked=True, computed=8)
        request.abort()
        settle(cache)
        assert hit(cache, toks(16)) == (8 if asked else 0, 0)
        assert cache.usage()["device_free_pages"] == (6 if asked else 8)
        assert_nothing_held(cache)


# Case 35: a host tier that is smaller than the device


@pytest.mark.parametrize("order", ["auto", "copies_first", "leaves_first"])
@pytest.mark.parametrize("pages", [1, 2, 4])
def test_case_35_copies_of_what_the_device_has_make_room(tmp_path: Path, order: str, pages: int) -> None:
    """Fault: the first two prefixes fill the host as mirrors of the device; the others are never stored.

    Right: such copies can go: storage ends with 64 tokens, a prefetch of 8 tokens gets its room, and what is
    on device does not change.
    """
    cache, store, writes, reads = with_storage(tmp_path, 16, 4, host_order=order)
    with cache:
        put(cache, toks(8, 9000))
        settle(cache, writes, reads)
        cache.reset()
        prefixes = [toks(P * pages, start) for start in range(0, 100 * 16 // pages, 100)]
        for tokens in prefixes:
            put(cache, tokens)
            settle(cache, writes, reads)
        assert sum(P for tokens in prefixes for key in keys_of(cache, tokens) if key in store.pages) == 64
        assert cache.stats()["backups_given_up"] == 0
        assert cache.usage()["device_tree_pages"] == 16

        request = cache.begin(toks(9, 9000))
        for _ in range(2):
            reads.drain()
            cache.tick()
        assert request.storage_hit_length == 8
        assert [hit(cache, tokens) for tokens in prefixes] == [(P * pages, 0)] * len(prefixes)
        request.abort()
        settle(cache, writes, reads)
        assert_nothing_held(cache)


# Case 36: the host pool is full of what is in use


def hold_writes(cache: UnifiedCache) -> Callable[[], None]:
    """Storage reads all host pages in place."""
    assert cache._storage is not None
    writes = cache._storage._backup.threads
    assert isinstance(writes, ManualThreads)
    assert writes.jobs

    def end() -> None:
        writes.drain()
        cache.tick()

    return end


def hold_all_readers(cache: UnifiedCache) -> Callable[[], None]:
    request = cache.begin(toks(17, 100))
    assert request.host_hit_length == 16
    return request.abort


def hold_all_loads(cache: UnifiedCache) -> Callable[[], None]:
    request = cache.begin(toks(17, 100))
    assert request.load_back() == 16
    cache.tick()

    def end() -> None:
        request.abort()
        late(cache).run_all()
        cache.tick()

    return end


def hold_all_pins(cache: UnifiedCache) -> Callable[[], None]:
    pinned = cache.pin(toks(16, 100))
    return lambda: cache.unpin(pinned)


def hold_all_retracted(cache: UnifiedCache) -> Callable[[], None]:
    request = cache.begin(toks(16, 700))
    request.extend()
    request.retract()
    cache.tick()
    late(cache).run("backup")
    cache.tick()
    return request.abort


@pytest.mark.parametrize("store_b", STORES)
@pytest.mark.parametrize(
    "hold", [hold_writes, hold_all_readers, hold_all_loads, hold_all_pins, hold_all_retracted]
)
def test_case_36_a_host_pool_that_is_all_in_use(
    tmp_path: Path, hold: Callable[[UnifiedCache], Callable[[], None]], store_b: Callable[..., bool]
) -> None:
    """Fault: waits for room on the thread that alone could make some: for ever.

    Right: 'no room' at once, which the caller turns into a miss; once the readers let go the call succeeds.
    """
    cache, _, writes, reads = with_storage(tmp_path, 16, 4, pin_share=1.0)
    with cache:
        put(cache, toks(8, 9000))
        settle(cache, writes, reads)
        cache.reset()
        put(cache, toks(16, 100))
        if hold is hold_writes:
            for _ in range(3):
                cache.tick()
                late(cache).run_all()
        else:
            settle(cache, writes, reads)
        assert cache.evict(4) == 4
        let_go = hold(cache)
        late(cache).frozen = True  # whoever waits here without a limit would let the copies go on
        before = cache.usage()
        for _ in range(2):
            assert not store_b(cache, reads)
            assert cache.usage()["host_free_pages"] == before["host_free_pages"] == 0
        assert late(cache).frozen
        late(cache).frozen = False
        let_go()
        assert store_b(cache, reads)
        settle(cache, writes, reads)
        assert_nothing_held(cache)


class Watched(LateCopies):
    """Notes how long each wait may take."""

    def __init__(self, *planes: Any) -> None:
        super().__init__(*planes)
        self.waits: list[float | None] = []

    def take_done(self, *, wait: bool = False, timeout: float | None = None) -> list[Any]:
        if wait:
            self.waits.append(timeout)
        return super().take_done(wait=wait, timeout=timeout)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("call", ["alloc", "extend", "load_back"])
def test_case_36_room_that_a_copy_would_make_is_waited_for_so_long(policy: str, call: str) -> None:
    """Room on device that only the end of a copy makes, and the copy does not end."""
    with make(8, 16, write_policy=policy, alloc_wait=0.25, copies=Watched.between) as cache:
        put(cache, toks(16, 100))
        settle(cache)
        cache.evict(4)
        settle(cache)
        assert hit(cache, toks(16, 100)) == (0, 16)
        put(cache, toks(32))
        cache.tick()
        late(cache).frozen = True
        request = cache.begin(toks(17, 100))
        usage, stats = cache.usage(), cache.stats()
        waits = cache._copies.waits  # type: ignore[union-attr]
        waits.clear()
        if call == "load_back":
            assert request.load_back() == 0
            assert cache.stats()["load_backs_skipped"] == stats["load_backs_skipped"] + 1
        else:
            with pytest.raises(CapacityError, match="device pages asked for"):
                request.extend() if call == "extend" else cache.alloc(4)
        assert waits == [0.25]
        now = cache.usage()
        for tier in ("device_free_pages", "device_tree_pages", "device_request_pages"):
            assert now[tier] == usage[tier]
        assert cache.stats()["dropped_tokens"] == 0
        assert late(cache).frozen
        late(cache).frozen = False
        request.load_back()
        request.extend()
        request.abort()
        settle(cache)
        assert_nothing_held(cache)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_case_36_a_copy_engine_that_hangs(policy: str) -> None:
    """The same with the threads of the real engine: bounded by the clock on the wall."""
    gate = threading.Event()
    pool = MhaDevicePool(8, P, 2, 1, 4)
    config = CacheConfig(page_size=P, write_policy=policy, alloc_wait=0.05)
    with UnifiedCache(config, pool) as cache:
        assert cache._copies is not None
        cache._copies._workers["backup"].submit(lambda: bool(gate.wait(60)) and None)  # type: ignore[attr-defined]
        try:
            put(cache, toks(32))
            begun = time.monotonic()
            with pytest.raises(CapacityError):
                cache.alloc(8)
            assert time.monotonic() - begun < 30
        finally:
            gate.set()
        pages = cache.alloc(8)
        cache.free(pages)
        assert cache.stats()["dropped_tokens"] == 0
        assert_nothing_held(cache)


# Case 37: counters


@pytest.mark.parametrize("tiers", [(900, 0, 0), (0, 900, 0), (0, 0, 900), (300, 300, 300), (400, 500, 0)])
@pytest.mark.parametrize("probe", ["finish", "abort"])
def test_case_37_counters_only_go_up_and_add_up(
    tmp_path: Path, tiers: tuple[int, int, int], probe: str
) -> None:
    """Fault: the gauge shows the last batch only: 0 after a health probe.

    Right: 900 hit tokens of 1,050 asked, split by tier; batches of no tokens change nothing, and a reset
    takes nothing back.
    """
    device, host, storage = tiers
    cache, _, writes, reads = with_storage(tmp_path, 300, 600)
    with cache:
        # Put there by single steps, which are no requests.
        total = sum(tiers)
        pages = cache.alloc(total // P)
        rows = page_hashes(toks(1000), P)
        for page, row in zip(pages.tolist(), rows, strict=False):
            write_page(pool := cache.device_pool.planes, page, page_content(pool, row.tobytes()))
        cache.insert(toks(total), pages)
        settle(cache, writes, reads)
        cache.match_prefix(toks(device + host))
        cache.match_prefix(toks(device))
        if storage:
            cache.evict(total // P)
            freed = cache.tree.evict_host(storage // P).host_pages
            cache._host_pages.free(freed)
            assert len(freed) == storage // P
            assert hit(cache, toks(1000)) == (0, device + host)
            if device:
                assert cache.load_back(cache.match_prefix(toks(device)).last_host_node) == device
                settle(cache)
        elif host:
            assert cache.evict(host // P) == host // P
        assert hit(cache, toks(1000)) == (device, host)
        clean = cache.stats()
        names = ["hit_tokens_device", "hit_tokens_host", "hit_tokens_storage", "asked_tokens"]
        assert [clean[name] for name in names] == [0, 0, 0, 0]

        request = cache.begin(toks(1000))  # batch 1: 900 cached, 100 new
        for _ in range(2):
            reads.drain()
            cache.tick()
        request.load_back()
        request.extend()
        request.wait()
        check_bytes(request)
        fill(request)
        request.finish()
        other = cache.begin(toks(50, 5000))  # batch 2, a health probe
        other.extend()
        fill(other)
        other.finish() if probe == "finish" else other.abort()
        settle(cache, writes, reads)

        stats = cache.stats()
        assert [stats[name] for name in names] == [device, host, storage, 1050]
        assert sum(stats[name] for name in names[:3]) / stats["asked_tokens"] == pytest.approx(
            0.857, abs=5e-4
        )
        # Batches of nothing.
        empty = cache.begin(toks(0))
        empty.extend()
        empty.finish()
        cache.begin(toks(1000)).abort()  # it never computed
        cache.begin_forward([])
        cache.record_prefill(0, 0.0)
        cache.tick()
        assert cache.evict(0) == 0
        cache.free(cache.alloc(0))
        assert [cache.stats()[name] for name in names] == [device, host, storage, 1050]
        settle(cache, writes, reads)
        before = cache.stats()
        cache.reset()
        after = cache.stats()
        assert all(after[name] >= count for name, count in before.items())
        assert [after[name] for name in names] == [device, host, storage, 1050]
        assert_nothing_held(cache)


def test_case_37_a_preempted_request_is_no_hit() -> None:
    """What a request computed itself is no hit of it when it comes back."""
    with make(16, 16) as cache:
        request = cache.begin(toks(17))
        request.extend()
        fill(request)
        request.finish()
        again = cache.begin(toks(17), resumed=True)
        assert again.device_length == 16
        again.extend()
        again.finish()
        stats = cache.stats()
        assert (stats["requests"], stats["asked_tokens"], stats["hit_tokens_device"]) == (1, 17, 0)
        retracted = cache.begin(toks(17))
        retracted.extend()
        retracted.retract()
        settle(cache)
        retracted.resume()
        retracted.wait()
        retracted.extend([1])
        retracted.finish()
        stats = cache.stats()
        assert (stats["requests"], stats["asked_tokens"], stats["hit_tokens_device"]) == (2, 34, 16)
        assert stats["hit_tokens_host"] == 0
        assert_nothing_held(cache)


# Case 55: settings


@pytest.fixture
def nothing_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test in which a pool, memory, a thread or a copy engine is made fails."""
    from unified_cache import worker
    from unified_cache.copies import choose

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was made before the settings were checked")

    monkeypatch.setattr(host_module, "HostPool", refuse)
    monkeypatch.setattr(host_memory, "_map", refuse)
    monkeypatch.setattr(choose, "make_copy_engine", refuse)
    monkeypatch.setattr(worker.Worker, "__init__", refuse)
    yield
    monkeypatch.undo()


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"page_size": 0}, ["page_size", "1..256", "not 0"]),
    ({"page_size": 257}, ["page_size", "1..256", "not 257"]),
    ({"page_size": -1}, ["page_size", "1..256", "not -1"]),
    ({"page_size": 3}, ["page_size", "device pool, 4", "not 3"]),
    ({"page_size": 48}, ["page_size", "device pool, 4", "not 48"]),
    ({"storage": "there", "write_policy": None}, ["storage", "write_policy", "'write_back'", "not None"]),
    (
        {"storage": "there", "host_layout": "layer_first"},
        ["storage", "host_layout", "'page_first'", "'layer_first'"],
    ),
    ({"storage": "there", "model": ""}, ["storage", "model"]),
    ({"storage": ""}, ["storage", "folder's path", "not ''"]),
    ({"hicache_size": -1}, ["hicache_size", "> 0", "not -1"]),
    ({"hicache_size": 0}, ["hicache_size", "> 0", "not 0"]),
    ({"hicache_ratio": -2.0}, ["hicache_ratio", "> 0", "not -2.0"]),
    ({"hicache_ratio": 0.01}, ["hicache_ratio=0.01", "less than one page", "write_policy=None"]),
    ({"hicache_size": 1e-9}, ["hicache_size=1e-09", "less than one page", "write_policy=None"]),
    ({"hicache_size": 1e6}, ["hicache_size=1e+06", "GB are available"]),
    ({"hicache_ratio": 1e12}, ["hicache_ratio=1e+12", "GB are available"]),
    ({"write_policy": "write_around"}, ["write_policy", "'write_through_selective'", "'write_around'"]),
    ({"write_policy": False}, ["write_policy", "'write_through'", "False"]),
    ({"write_through_threshold": 0}, ["write_through_threshold", "0"]),
    ({"eviction_policy": "clock"}, ["eviction_policy", "'lru'", "'tlru'", "'clock'"]),
    ({"policy_options": {"protected_threshold": 2}}, ["protected_threshold"]),
    ({"host_layout": "rows"}, ["host_layout", "'page_head'", "'rows'"]),
    ({"host_order": "random"}, ["host_order", "'copies_first'", "'random'"]),
    ({"host_register_chunk": 100}, ["host_register_chunk", "4096", "100"]),
    ({"host_pinned": True}, ["host_pinned", "'require'", "True"]),
    ({"host_huge_pages": "yes"}, ["host_huge_pages", "True, False or 'auto'", "'yes'"]),
    ({"host_numa_node": -1}, ["host_numa_node", ">= 0", "-1"]),
    ({"load_back_threshold": "learn"}, ["load_back_threshold", "'auto'", "'learn'"]),
    ({"load_back_threshold": -1}, ["load_back_threshold", ">= 0", "-1"]),
    ({"pin_share": 1.5}, ["pin_share", "0..1", "1.5"]),
    ({"pin_share": -0.5}, ["pin_share", "-0.5"]),
    ({"pin_share": float("nan")}, ["pin_share", "nan"]),
    ({"copy_blocks": 0}, ["copy_blocks", "1..65535", "0"]),
    ({"copy_threads": 0}, ["copy_threads", ">= 1", "0"]),
    ({"copy_pages": 0}, ["copy_pages", ">= 1", "0"]),
    ({"copy_pages": 1.5}, ["copy_pages", ">= 1", "1.5"]),
    ({"alloc_wait": -1}, ["alloc_wait", ">= 0", "-1"]),
    ({"alloc_wait": float("inf")}, ["alloc_wait", "inf"]),
    ({"events": 1}, ["events", "True or False", "1"]),
    ({"prefetch_policy": "never"}, ["prefetch_policy", "'timeout'", "'never'"]),
    ({"prefetch_threshold": "x"}, ["prefetch_threshold", "'auto'", "'x'"]),
    ({"prefetch_timeout": -1}, ["prefetch_timeout", ">= 0", "-1"]),
    ({"prefetch_timeout_per_1024": None}, ["prefetch_timeout_per_1024", ">= 0", "None"]),
    ({"model": None}, ["model", "string", "None"]),
    ({"weight_version": 3}, ["weight_version", "string", "3"]),
]


@pytest.mark.parametrize("settings, said", REFUSED)
def test_case_55_refused_before_anything_is_made(
    tmp_path: Path, settings: dict[str, Any], said: list[str], nothing_made: None
) -> None:
    """Fault: starts, and fails at the first request, deep inside the scheduler.

    Right: refused before any pool is allocated; the message names the settings and what is allowed.
    """
    if settings.get("storage"):
        settings = settings | {"storage": str(tmp_path / "there")}
    pool = MhaDevicePool(8, P, 2, 1, 4)
    with pytest.raises(ArgumentError) as caught:
        UnifiedCache(CacheConfig(**({"page_size": P, "model": "m"} | settings)), pool)
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_case_55_unknown_settings(nothing_made: None) -> None:
    """There is no way to turn the tree off, so asking for it is an error, not ignored."""
    with pytest.raises(TypeError, match="prefix_tree"):
        CacheConfig(prefix_tree=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("storage", ["a file", "s3://bucket/x", "below a file"])
def test_case_55_storage_that_can_not_be_opened(tmp_path: Path, storage: str, nothing_made: None) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    place = {"a file": str(file), "below a file": str(file / "x")}.get(storage, storage)
    with pytest.raises(StorageError):
        make(8, 8, storage=place)
    assert file.read_text() == "in the way"


@pytest.mark.parametrize("page_size", [1, 3, 48, 256])
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back", None])
def test_case_55_what_is_allowed_works(tmp_path: Path, page_size: int, policy: str | None) -> None:
    settings: dict[str, Any] = {}
    if policy is not None:
        settings = {"write_policy": policy, "storage": str(tmp_path), "write_through_threshold": 1}
    with make(8, None if policy is None else 16, page_size=page_size, **settings) as cache:
        for start in (0, 10_000, 20_000, 0):
            put(cache, toks(3 * page_size + 1, start))
            if policy is not None:
                assert cache.flush(30)
        expected = 0 if policy is None else 3 * page_size
        assert cache.stats()["hit_tokens_host"] == expected
        assert_nothing_held(cache)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--page-size", "0", "--tokens"],
        ["--page-size", "257", "--tokens"],
        ["--page-size", "-1", "--tokens"],
        ["--page-size", "4"],
        ["--host-blocks", "-1"],
        ["--device-blocks", "0"],
        ["--write-policy", "none"],
        ["--policy", "clock"],
        ["--policy-option", "speed=1"],
        ["--write-through-threshold", "0"],
        ["--block-size", "0"],
        ["--host-order", "random"],
    ],
)
def test_case_55_the_command_line_fails(
    tmp_path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is not 0, and one line names the option; right options still work."""
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n"
    )

    def status(arguments: list[str]) -> object:
        try:
            return main(["replay", str(trace), *arguments])
        except SystemExit as left:
            return left.code

    assert status(wrong) == 2
    said = capsys.readouterr()
    assert said.out == ""
    option = wrong[0].removeprefix("--").replace("-", ".")
    last = said.err.strip().splitlines()[-1]
    name = "speed" if "speed" in wrong[1] else option
    assert any(name.replace(".", dash) in last for dash in "-_"), last
    assert status([]) == 0


# Case 58: retraction


def decode_side() -> tuple[UnifiedCache, Request, Request]:
    """Two requests of 16 tokens fill a device of 32."""
    cache = make(8, 16, write_policy="write_back")
    requests = []
    for start in (0, 100):
        request = cache.begin(toks(16, start))
        request.extend()
        fill(request)
        requests.append(request)
    assert cache.usage()["device_free_pages"] == 0
    return cache, requests[0], requests[1]


def test_case_58_a_hundred_rounds_leave_nothing_on_host() -> None:
    """Fault: the copy on host belongs to the request object and is never freed.

    Right: 4 host pages (16 tokens) while it is away, 0 after each abort and after 100 rounds.
    """
    cache, first, second = decode_side()
    with cache:
        for number in range(100):
            third = cache.begin(toks(16, 1000 + 100 * number))
            with pytest.raises(CapacityError):
                third.extend()
            first.retract()
            third.extend()  # waits for the copy, whose pages it takes
            assert used_host(cache) == 4
            assert cache.usage()["host_request_pages"] == 4
            first.abort()
            assert used_host(cache) == 0
            fill(third)
            check_bytes(second, 4)
            first, second = second, third
        assert cache.stats()["requests_retracted"] == 100
        first.abort()
        second.abort()
        assert cache.usage()["device_free_pages"] == 8
        assert_nothing_held(cache)


def to_extended(cache: UnifiedCache, request: Request) -> None:
    pass


def to_leaving_queued(cache: UnifiedCache, request: Request) -> None:
    request.retract()
    assert not late(cache).queues["backup"]


def to_leaving_running(cache: UnifiedCache, request: Request) -> None:
    request.retract()
    cache.tick()
    assert len(late(cache).queues["backup"]) == 1


def to_leaving_ended(cache: UnifiedCache, request: Request) -> None:
    to_leaving_running(cache, request)
    late(cache).run_all()


def to_away(cache: UnifiedCache, request: Request) -> None:
    to_leaving_ended(cache, request)
    cache.tick()


def to_returning_queued(cache: UnifiedCache, request: Request) -> None:
    to_away(cache, request)
    request.resume()
    assert not late(cache).queues["load"]


def to_returning_running(cache: UnifiedCache, request: Request) -> None:
    to_returning_queued(cache, request)
    cache.tick()
    assert len(late(cache).queues["load"]) == 1


def to_returning_ended(cache: UnifiedCache, request: Request) -> None:
    to_returning_running(cache, request)
    late(cache).run_all()


def to_back(cache: UnifiedCache, request: Request) -> None:
    to_returning_ended(cache, request)
    request.wait()


def to_back_again(cache: UnifiedCache, request: Request) -> None:
    to_back(cache, request)
    to_back(cache, request)


def to_kept(cache: UnifiedCache, request: Request) -> None:
    """It comes back before it has left."""
    to_leaving_running(cache, request)
    request.resume()


STATES = [
    to_extended,
    to_leaving_queued,
    to_leaving_running,
    to_leaving_ended,
    to_away,
    to_returning_queued,
    to_returning_running,
    to_returning_ended,
    to_back,
    to_back_again,
    to_kept,
]


@pytest.mark.parametrize("state", STATES)
def test_case_58_abort_in_each_state_frees_everything_once(
    state: Callable[[UnifiedCache, Request], None],
) -> None:
    """Device, host and what is under way come back whatever the state, and once."""
    cache, first, second = decode_side()
    with cache:
        for number in range(3):
            state(cache, first)
            first.abort()
            first.abort()
            late(cache).run_all()
            cache.tick()
            usage = cache.usage()
            assert used_host(cache) == 0
            assert usage["device_free_pages"] == 4
            assert (usage["device_request_pages"], usage["host_request_pages"], usage["requests"]) == (
                4,
                0,
                1,
            )
            check_bytes(second, 4)
            first = cache.begin(toks(16, 1000 + 100 * number))
            first.extend()
            fill(first)
        first.abort()
        second.abort()
        assert_nothing_held(cache)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("overwritten", [False, True])
def test_case_58_what_resumes_has_its_bytes(
    state: Callable[[UnifiedCache, Request], None], overwritten: bool
) -> None:
    """A request that comes back gets its 16 tokens unchanged, whoever used its pages meanwhile."""
    cache, first, second = decode_side()
    with cache:
        state(cache, first)
        if first.retracted and overwritten:
            third = cache.begin(toks(16, 900))
            third.extend()
            fill(third)
            third.abort()
        if first.retracted:
            first.resume()
        first.wait()
        assert first.tokens.tolist() == list(range(16))
        assert len(first.pages) == 4
        check_bytes(first, 4)
        check_bytes(second, 4)
        first.finish()
        second.finish()
        settle(cache)
        assert used_host(cache) == 0
        assert hit(cache, toks(16)) == hit(cache, toks(16, 100)) == (16, 0)
        assert_nothing_held(cache)
