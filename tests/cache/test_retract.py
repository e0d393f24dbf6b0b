"""A request that leaves the device and comes back: as it was, and nothing is held twice or for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.late import late, make_cache, settle
from tests.cache.support import (
    PAGE,
    assert_nothing_held,
    assert_served,
    compute,
    page_content,
    read_page,
    serve,
    toks,
    write_page,
)
from unified_cache import ArgumentError, BusyError, CapacityError, CopyError, LockError, Request, UnifiedCache


def own_content(request: Request) -> list[torch.Tensor]:
    """Bytes for every page of a request, the partly filled last one too, that no other request has."""
    planes = request._cache.device_pool.planes
    name = f"{request._extra_key} {request.tokens.tolist()}"
    count = -(-len(request.tokens) // PAGE)
    return [page_content(planes, hashlib.sha256(f"{name} {at}".encode()).digest()) for at in range(count)]


class Held:
    """A request with pages of its own behind what it has from the tree, and the bytes of all of them."""

    def __init__(self, cache: UnifiedCache, prompt: np.ndarray, borrowed: int = 0, **names: str) -> None:
        self.cache = cache
        self.request = cache.begin(prompt, **names)
        self.request.load_back()
        self.request.extend()
        self.request.wait()
        compute(self.request)
        if borrowed:
            self.request.insert(chunked=True, computed=borrowed)
        content = own_content(self.request)
        for page, bytes_ in zip(self.request.pages[self.borrowed :], content[self.borrowed :], strict=True):
            write_page(cache.device_pool.planes, int(page), bytes_)
        self.before = [read_page(cache.device_pool.planes, page) for page in self.request.pages.tolist()]

    @property
    def borrowed(self) -> int:
        return self.request.device_length // PAGE

    def check(self) -> None:
        """All its pages hold what they held."""
        pages = self.request.pages.tolist()
        assert len(pages) == len(self.before)
        for at, (page, before) in enumerate(zip(pages, self.before, strict=True)):
            assert torch.equal(read_page(self.cache.device_pool.planes, page), before), f"page {at}"


def use(cache: UnifiedCache) -> tuple[int, int, int, int, int, int]:
    """Pages on device (free, of the tree, of requests), and on host, after a look at the sums."""
    usage = cache.usage()
    for tier in ("device", "host"):
        parts = ("free", "tree", "request", "quarantined")
        assert sum(usage[f"{tier}_{part}_pages"] for part in parts) == usage[f"{tier}_pages"], usage
    cache.tree.check_invariants()
    return tuple(
        usage[f"{tier}_{part}_pages"] for tier in ("device", "host") for part in ("free", "tree", "request")
    )  # type: ignore[return-value]


def scribble(cache: UnifiedCache) -> None:
    """Somebody else has every free page, and writes to it."""
    pages = cache.alloc(cache.usage()["device_free_pages"])
    for page in pages.tolist():
        write_page(cache.device_pool.planes, page, page_content(cache.device_pool.planes, b"\x77" * 32))
    cache.free(pages)


# Step by step


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("borrowed", [0, 4, 8])
def test_what_is_held_at_each_step(policy: str, borrowed: int) -> None:
    with make_cache(16, write_policy=policy) as cache:
        held = Held(cache, toks(18), borrowed)
        request, tree, own = held.request, borrowed // PAGE, 5 - borrowed // PAGE
        settle(cache)
        # A chunk of a prompt has no hit, so no policy wants the tree's part on host yet.
        assert use(cache) == (11, tree, own, 32, 0, 0)
        assert not request.retracted

        request.retract()
        assert request.retracted
        assert use(cache) == (11, tree, own, 32 - own, 0, own)
        assert (len(request.pages), request.device_length, len(request.tokens)) == (0, 0, 18)
        assert cache.stats()["requests_retracted"] == 1
        cache.tick()
        # The tree's part goes to host with it, so that it can leave the device and is not lost.
        assert len(late(cache).queues["backup"]) == 1
        assert use(cache) == (11, tree, own, 32 - tree - own, tree, own)
        late(cache).run_all()
        assert use(cache) == (11, tree, own, 32 - tree - own, tree, own)
        cache.tick()
        assert use(cache) == (16 - tree, tree, 0, 32 - tree - own, tree, own)
        assert cache.tree.protected_tokens == 0
        scribble(cache)

        request.resume()
        assert not request.retracted
        assert not request.loaded
        assert use(cache) == (11, tree, own, 32 - tree - own, tree, own)
        assert (len(request.pages), request.device_length) == (5, borrowed)
        assert cache.tree.protected_tokens == borrowed
        cache.tick()
        assert len(late(cache).queues["load"]) == 1
        late(cache).run_all()
        assert request.loaded
        assert use(cache) == (11, tree, own, 32 - tree - own, tree, own)
        cache.tick()
        assert use(cache) == (11, tree, own, 32 - tree, tree, 0)
        request.wait()
        held.check()
        request.abort()
        assert use(cache) == (16 - tree, tree, 0, 32 - tree, tree, 0)
        assert_nothing_held(cache)


def test_wait_does_it_all_without_a_tick() -> None:
    with make_cache(16) as cache:
        held = Held(cache, toks(18), 8)
        held.request.retract()
        settle(cache)
        scribble(cache)
        held.request.resume()
        held.request.wait()
        held.check()
        assert use(cache)[5] == 0
        assert held.request._retracted is None
        held.request.abort()
        assert_nothing_held(cache)


def test_all_that_leave_in_a_tick_are_one_submission() -> None:
    with make_cache(16) as cache:
        several = [Held(cache, toks(10, start)) for start in (0, 100, 200)]
        settle(cache)
        before = cache.stats()
        for held in several:
            held.request.retract()
        settle(cache)
        assert cache.stats()["backup_copies"] == before["backup_copies"] + 1
        assert cache.stats()["backup_pages"] == before["backup_pages"] + 9
        scribble(cache)
        for held in several:
            held.request.resume()
        settle(cache)
        assert cache.stats()["load_copies"] == before["load_copies"] + 1
        assert cache.stats()["load_pages"] == before["load_pages"] + 9
        for held in several:
            held.request.wait()
            held.check()
            held.request.abort()
        assert_nothing_held(cache)


@pytest.mark.parametrize("length", range(13, 22))
@pytest.mark.parametrize("borrowed", [0, 4, 12])
def test_a_partly_filled_last_page_keeps_its_bytes(length: int, borrowed: int) -> None:
    with make_cache(16) as cache:
        held = Held(cache, toks(length), borrowed)
        request = held.request
        for _ in range(3):
            request.retract()
            settle(cache)
            scribble(cache)
            request.resume()
            request.wait()
            held.check()
        # It goes on where it was: what is computed next lies behind what was.
        pages = request.extend([1])
        assert len(pages) == -(-(length + 1) // PAGE)
        assert pages[: len(held.before)].tolist() == request.pages[: len(held.before)].tolist()
        assert request.tokens.tolist() == [*range(length), 1]
        request.abort()
        assert_nothing_held(cache)


def test_a_request_that_goes_on_is_served_to_others() -> None:
    with make_cache(16) as cache:
        request = cache.begin(toks(18))
        request.extend()
        compute(request)
        request.retract()
        settle(cache)
        scribble(cache)
        request.resume()
        request.wait()
        for token in (1, 2, 3):
            before = len(request.tokens)
            request.extend([token])
            compute(request, before // PAGE * PAGE)
        request.finish()
        assert serve(cache, np.concatenate((toks(18), [1, 2, 3]))) == (20, 0, 0)
        assert_nothing_held(cache)


@pytest.mark.parametrize("length", [4, 16])
@pytest.mark.parametrize("room", [True, False])
def test_a_request_without_pages_of_its_own(length: int, room: bool) -> None:
    """It has all of its pages from the tree: nothing is copied for it, so nothing has to fit."""
    with make_cache(8, hicache_ratio=2 if room else 0.125) as cache:
        request = cache.begin(toks(length))
        request.extend()
        compute(request)
        request.insert()
        assert request.device_length == length
        request.retract()
        settle(cache)
        usage = cache.usage()
        assert usage["host_request_pages"] == usage["device_request_pages"] == 0
        if room:
            cache.evict(8)
            assert cache.usage()["device_free_pages"] == 8
        request.resume()
        request.wait()
        assert request.device_length == length
        assert_served(request)
        request.finish()
        assert_nothing_held(cache)


# What the tree has meanwhile


@pytest.mark.parametrize("policy", ["write_through", "write_back", "write_through_selective"])
@pytest.mark.parametrize("borrowed", [4, 8, 16])
@pytest.mark.parametrize("threshold", [0, 1000])
def test_the_prefix_goes_to_host_meanwhile(policy: str, borrowed: int, threshold: int) -> None:
    """It comes back whatever the threshold says: it was computed, and has to be there."""
    with make_cache(8, write_policy=policy, load_back_threshold=threshold) as cache:
        held = Held(cache, toks(18), borrowed)
        held.request.retract()
        settle(cache)
        other = cache.begin(toks(32, 500))
        other.extend()  # needs every page of the device
        assert cache.usage()["device_tree_pages"] == 0
        found = cache.tree.peek_prefix(toks(borrowed))
        assert (found.device_length, found.host_hit_length) == (0, borrowed)
        with pytest.raises(CapacityError):
            held.request.resume()
        assert held.request.retracted
        other.abort()
        held.request.resume()
        assert held.request.device_length == borrowed
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


def test_the_prefix_is_cut_and_partly_on_host() -> None:
    with make_cache(12) as cache:
        held = Held(cache, toks(26), 24)
        held.request.retract()
        settle(cache)
        for length in (8, 16):
            cache.match_prefix(toks(length))
        cache.evict(2)  # the last part
        found = cache.tree.peek_prefix(toks(24))
        assert (found.device_length, found.host_hit_length) == (16, 8)
        other = cache.begin(toks(17))  # holds what is on device
        held.request.resume()
        held.request.wait()
        held.check()
        for each in (other, held.request):
            each.abort()
        assert_nothing_held(cache)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_the_prefix_can_not_be_lost(policy: str) -> None:
    """Others fill device and host: what a retracted request needs stays on one of them."""
    with make_cache(8, write_policy=policy, hicache_ratio=1.0) as cache:
        held = Held(cache, toks(18), 8)
        held.request.retract()
        settle(cache)
        for start in range(1000, 4000, 100):
            serve(cache, toks(20, start))
            settle(cache)
            assert use(cache)[5] == 3
            assert (
                cache.tree.peek_prefix(toks(8)).device_length
                + cache.tree.peek_prefix(toks(8)).host_hit_length
                == 8
            )
        held.request.resume()
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


def test_a_prefix_that_finds_no_room_on_host_stays_on_device() -> None:
    with make_cache(8, hicache_ratio=0.375) as cache:
        held = Held(cache, toks(18), 8)
        cache.tick()
        settle(cache)
        given_up = cache.stats()["backups_given_up"]
        held.request.retract()  # takes all 3 host pages, those of the prefix's own copy among them
        settle(cache)
        assert cache.stats()["backups_given_up"] > given_up
        assert use(cache) == (6, 2, 0, 0, 0, 3)
        other = cache.begin(toks(28, 500))
        before = use(cache)
        with pytest.raises(CapacityError):
            other.extend()
        assert use(cache) == before
        assert cache.evict(8) == 0
        other.abort()
        held.request.resume()
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


def test_somebody_inserts_the_same_tokens_meanwhile() -> None:
    """What it gets back is its own pages, until it inserts them: then it goes on with the tree's."""
    with make_cache(24) as cache:
        request = cache.begin(toks(18))
        request.extend()
        compute(request)
        request.retract()
        settle(cache)
        assert serve(cache, toks(18)) == (0, 0, 0)
        request.resume()
        assert request.device_length == 0
        request.wait()
        own = request.pages
        request.insert()
        assert request.device_length == 16
        assert not set(own[:4].tolist()) & set(request.pages[:4].tolist())
        assert_served(request)
        request.finish()
        assert_nothing_held(cache)


def test_namespaces() -> None:
    names: list[dict[str, str]] = [
        {},
        {"extra_key": "a"},
        {"cache_salt": "a"},
        {"extra_key": "a", "cache_salt": "a"},
    ]
    with make_cache(24) as cache:
        several = [Held(cache, toks(18), 8, **name) for name in names]
        for held in several:
            held.request.retract()
        settle(cache)
        cache.evict(24)
        scribble(cache)
        for held in reversed(several):
            held.request.resume()
        settle(cache)
        for held, name in zip(several, names, strict=True):
            held.request.wait()
            held.check()
            assert held.request.device_length == cache.match_prefix(toks(8), **name).device_length == 8
            held.request.abort()
        assert_nothing_held(cache)


# No room


def test_no_host_tier() -> None:
    with make_cache(8, write_policy=None) as cache:
        held = Held(cache, toks(18), 8)
        before = use(cache)
        with pytest.raises(ArgumentError, match="no host tier"):
            held.request.retract()
        assert use(cache) == before
        assert not held.request.retracted
        assert cache.stats()["requests_retracted"] == 0
        held.check()
        held.request.finish()
        assert_nothing_held(cache)


@pytest.mark.parametrize("why", ["too small", "in use", "partly in use"])
def test_no_room_on_host_changes_nothing(why: str) -> None:
    with make_cache(16, hicache_ratio=0.25) as cache:
        if why != "too small":
            serve(cache, toks(16 if why == "in use" else 8, 500))
            settle(cache)
            cache.evict(16)
            reader = cache.begin(toks(17 if why == "in use" else 9, 500))
            assert reader.host_hit_length > 0
        if why == "partly in use":
            serve(cache, toks(8, 700))
            settle(cache)
            cache.evict(16)
            assert cache.tree.peek_prefix(toks(8, 700)).host_hit_length == 8
        held = Held(cache, toks(18 if why == "too small" else 10), 0)
        request, before, stats = held.request, use(cache), cache.stats()
        pages, digest = request.pages.tolist(), cache.tree.digest()
        with pytest.raises(CapacityError, match="host pages asked for"):
            request.retract()
        assert not request.retracted
        assert request.pages.tolist() == pages
        assert use(cache) == before
        assert cache.stats() == stats
        assert cache.tree.digest() == digest
        cache.tick()
        assert late(cache).running == 0
        held.check()
        request.extend([1])
        if why != "too small":
            reader.abort()
            request.retract()
            settle(cache)
            assert cache.usage()["host_request_pages"] == 3
        request.abort()
        assert_nothing_held(cache)


def test_room_on_host_is_made() -> None:
    with make_cache(16, hicache_ratio=0.25) as cache:
        serve(cache, toks(16, 500))
        settle(cache)
        assert cache.usage()["host_tree_pages"] == 4
        held = Held(cache, toks(14))
        held.request.retract()
        settle(cache)
        assert cache.usage()["host_request_pages"] == 4
        scribble(cache)
        assert serve(cache, toks(17, 500)) == (16, 0, 0)
        held.request.resume()
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


@pytest.mark.parametrize("borrowed", [0, 8])
@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_no_room_on_device_leaves_it_retracted(borrowed: int, free: int) -> None:
    with make_cache(8) as cache:
        held = Held(cache, toks(18), borrowed)
        held.request.retract()
        settle(cache)
        other = cache.begin(toks(4 * (8 - free), 500))
        other.extend()
        for _ in range(3):
            if free == 3 and borrowed:
                break
            with pytest.raises(CapacityError):
                held.request.resume()
            assert held.request.retracted
            settle(cache)
            assert use(cache)[5] == 5 - borrowed // PAGE
            for step in (held.request.extend, held.request.insert, held.request.finish, held.request.retract):
                with pytest.raises(LockError, match="resume it first"):
                    step()
        other.abort()
        held.request.resume()
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


def test_the_prefix_fits_but_its_own_pages_do_not() -> None:
    """What was loaded of the prefix stays in the tree; the request is retracted as before."""
    with make_cache(8) as cache:
        held = Held(cache, toks(18), 8)
        held.request.retract()
        settle(cache)
        other = cache.begin(toks(16, 500))
        other.extend()
        cache.evict(8)
        assert cache.usage()["device_tree_pages"] == 0
        more = cache.alloc(2)
        with pytest.raises(CapacityError):
            held.request.resume()
        assert held.request.retracted
        settle(cache)
        assert cache.tree.protected_tokens == 0
        assert cache.usage()["host_request_pages"] == 3
        cache.free(more)
        other.abort()
        held.request.resume()
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


# Order of calls


def test_calls_that_are_refused() -> None:
    with make_cache(16) as cache:
        serve(cache, toks(18))
        request = cache.begin(toks(18))
        for step, said in ((request.retract, "after the first extend"), (request.resume, "after retract")):
            with pytest.raises(LockError, match=said):
                step()
        request.extend()
        with pytest.raises(LockError, match="after retract"):
            request.resume()
        before = use(cache)
        request.retract()
        for moved in (lambda: None, lambda: settle(cache)):
            moved()
            for step in (request.extend, request.insert, request.finish, request.retract):
                with pytest.raises(LockError, match="resume it first"):
                    step()
            with pytest.raises(LockError, match="first extend"):
                request.load_back()
            assert request.retracted
            assert request.prefetch_done()
            request.wait()
            assert request.retracted
        request.resume()
        request.wait()
        with pytest.raises(LockError, match="after retract"):
            request.resume()
        assert use(cache)[:3] == before[:3]
        request.finish()
        for step in (request.retract, request.resume):
            with pytest.raises(LockError, match="ended before"):
                step()
        assert cache.stats()["requests_retracted"] == 1
        assert_nothing_held(cache)


@pytest.mark.parametrize("moment", ["queued", "running", "ended"])
def test_resume_before_the_copy_has_left(moment: str) -> None:
    """The pages never went; the copy is of no use, and its host pages come back when it has ended."""
    with make_cache(16) as cache:
        held = Held(cache, toks(18), 8)
        settle(cache)
        pages = held.request.pages.tolist()
        held.request.retract()
        if moment != "queued":
            cache.tick()
            assert late(cache).running == 1
        if moment == "ended":
            late(cache).run_all()
        held.request.resume()
        assert not held.request.retracted
        assert held.request.loaded
        assert held.request.pages.tolist() == pages
        held.check()
        going = (32, 0, 0) if moment == "queued" else (27, 2, 3)
        assert use(cache) == (11, 2, 3, *going)
        settle(cache)
        assert use(cache) == (11, 2, 3, 30, 2, 0)
        assert late(cache).running == 0
        held.check()
        assert cache.stats()["load_copies"] == 0
        held.request.abort()
        assert_nothing_held(cache)


@pytest.mark.parametrize("moment", ["queued", "running"])
def test_pages_that_did_not_leave_are_not_waited_for(moment: str) -> None:
    """Room is made by an eviction at once: the copy that still runs frees none of the device's pages."""
    with make_cache(12) as cache:
        serve(cache, toks(16, 500))
        settle(cache)
        held = Held(cache, toks(14))
        held.request.retract()
        if moment == "running":
            cache.tick()
        held.request.resume()
        late(cache).frozen = True
        pages = cache.alloc(8)
        assert late(cache).frozen
        assert cache.stats()["demoted_nodes"] == 1
        cache.free(pages)
        held.check()
        held.request.abort()
        late(cache).frozen = False
        assert_nothing_held(cache)


def test_alloc_waits_for_pages_that_leave() -> None:
    with make_cache(8) as cache:
        held = Held(cache, toks(18))
        held.request.retract()
        late(cache).frozen = True
        with pytest.raises(CapacityError):
            cache.alloc(8)
        assert held.request.retracted
        assert use(cache) == (3, 0, 5, 11, 0, 5)
        late(cache).frozen = False
        pages = cache.alloc(8)
        cache.free(pages)
        scribble(cache)
        held.request.resume()
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


def test_retract_again_while_it_comes_back() -> None:
    """Its bytes have to be there before they can go again: retract waits for them."""
    with make_cache(16) as cache:
        held = Held(cache, toks(18), 8)
        for _ in range(3):
            held.request.retract()
            settle(cache)
            scribble(cache)
            held.request.resume()
            cache.tick()
        held.request.retract()
        settle(cache)
        assert use(cache)[5] == 3
        held.request.resume()
        held.request.wait()
        held.check()
        assert cache.stats()["requests_retracted"] == 4
        held.request.abort()
        assert_nothing_held(cache)


@pytest.mark.parametrize("end", ["insert", "finish"])
def test_insert_waits_for_what_comes_back(end: str) -> None:
    """Nobody may hit pages that are not there yet."""
    with make_cache(16) as cache:
        request = cache.begin(toks(18))
        request.extend()
        compute(request)
        request.retract()
        settle(cache)
        scribble(cache)
        request.resume()
        cache.tick()
        getattr(request, end)()
        other = cache.begin(toks(18))
        assert other.device_length == 16
        assert_served(other)
        other.abort()
        request.abort()
        assert_nothing_held(cache)


def test_it_grows_while_it_comes_back() -> None:
    with make_cache(16) as cache:
        held = Held(cache, toks(18))
        held.request.retract()
        settle(cache)
        scribble(cache)
        held.request.resume()
        cache.tick()
        held.request.extend(toks(9))
        assert use(cache) == (9, 0, 7, 27, 0, 5)
        held.request.wait()
        held.before += [read_page(cache.device_pool.planes, page) for page in held.request.pages.tolist()[5:]]
        held.check()
        held.request.retract()
        settle(cache)
        assert use(cache) == (16, 0, 0, 25, 0, 7)
        held.request.resume()
        cache.tick()
        held.request.extend(toks(9))
        held.request.abort()  # some of its pages are on their way, and some are not
        late(cache).run_all()
        cache.tick()
        assert use(cache) == (16, 0, 0, 32, 0, 0)
        assert_nothing_held(cache)


def test_it_leaves_while_its_prefix_is_still_loaded() -> None:
    with make_cache(12) as cache:
        serve(cache, toks(17))
        settle(cache)
        cache.evict(12)
        request = cache.begin(toks(22))
        assert request.load_back() == 16
        request.extend()
        request.retract()
        cache.tick()
        assert late(cache).queues["load"]
        request.resume()
        assert not request.loaded
        request.wait()
        assert_served(request)
        request.retract()
        settle(cache)
        cache.evict(12)
        request.resume()
        request.wait()
        assert_served(request)
        request.abort()
        assert_nothing_held(cache)


class Moment:
    """A mark that the test ends."""

    done = False

    def wait(self) -> None:
        raise AssertionError("the scheduler never waits for a forward")


def test_the_copy_comes_after_the_forward_that_writes_the_pages() -> None:
    with make_cache(16) as cache:
        held = Held(cache, toks(18))
        forward = Moment()
        late(cache).forward = lambda: forward
        held.request.retract()
        cache.tick()
        assert not late(cache).run("backup")
        for page, content in zip(
            held.request._retracted._device_pages, own_content(held.request), strict=True
        ):  # type: ignore[union-attr]
            held.before[list(held.request._retracted._device_pages).index(page)] = content + 1  # type: ignore[union-attr]
            write_page(cache.device_pool.planes, int(page), content + 1)
        forward.done = True
        late(cache).forward = lambda: None
        settle(cache)
        scribble(cache)
        held.request.resume()
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


def test_the_way_back_does_not_overwrite_what_a_forward_still_reads() -> None:
    with make_cache(5) as cache:
        held = Held(cache, toks(18))
        held.request.retract()
        settle(cache)
        other = cache.begin(toks(18, 500))
        other.extend()
        compute(other)
        reading = [(page, read_page(cache.device_pool.planes, page)) for page in other.pages.tolist()]
        forward = Moment()
        late(cache).forward = lambda: forward
        other.abort()
        held.request.resume()
        cache.tick()
        assert not late(cache).run("load")
        assert all(torch.equal(read_page(cache.device_pool.planes, page), was) for page, was in reading)
        forward.done = True
        late(cache).forward = lambda: None
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


def test_a_forward_waits_layer_by_layer() -> None:
    with make_cache(16) as cache:
        held = Held(cache, toks(18), 8)
        held.request.retract()
        settle(cache)
        cache.evict(16)
        scribble(cache)
        held.request.resume()
        forward = cache.begin_forward([held.request])
        for layer in range(3):
            forward.wait_until(layer)
            for page, was in zip(held.request.pages.tolist(), held.before, strict=True):
                assert torch.equal(read_page(cache.device_pool.planes, page)[layer], was[layer])
        held.request.abort()
        assert_nothing_held(cache)


# Copies that fail


def failing(cache: UnifiedCache, direction: str, times: int = 10**9) -> None:
    left = [times]

    def fail(handle: Any) -> bool:
        if handle.direction != direction or left[0] <= 0:
            return False
        left[0] -= 1
        return True

    late(cache).fail = fail


@pytest.mark.parametrize("copy_pages", [None, 1, 2])
@pytest.mark.parametrize("direction", ["backup", "load"])
@pytest.mark.parametrize("times", [1, 5])
def test_a_copy_that_fails_is_made_again(direction: str, times: int, copy_pages: int | None) -> None:
    with make_cache(16, copy_pages=copy_pages) as cache:
        held = Held(cache, toks(18))
        failing(cache, direction, times)
        held.request.retract()
        for _ in range(30):
            settle(cache)
        assert use(cache) == (16, 0, 0, 27, 0, 5)
        scribble(cache)
        held.request.resume()
        for _ in range(30):
            settle(cache)
        assert use(cache) == (11, 0, 5, 32, 0, 0)
        assert cache.stats()["failed_copies"] == times
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


@pytest.mark.parametrize("copy_pages", [None, 2])
@pytest.mark.parametrize("end", ["resume", "abort", "late abort"])
def test_a_copy_to_host_that_always_fails(end: str, copy_pages: int | None) -> None:
    with make_cache(8, copy_pages=copy_pages) as cache:
        held = Held(cache, toks(18))
        failing(cache, "backup")
        held.request.retract()
        settle(cache)
        assert held.request.retracted
        assert use(cache) == (3, 0, 5, 11, 0, 5)
        with pytest.raises(CapacityError):
            cache.alloc(4)
        assert not cache.flush(30)
        if end == "resume":
            held.request.resume()
            held.request.wait()
            held.check()
            assert use(cache) == (3, 0, 5, 16, 0, 0)
        elif end == "late abort":
            cache.tick()  # it is being tried once more
        held.request.abort()
        late(cache).run_all()
        cache.tick()
        assert use(cache) == (8, 0, 0, 16, 0, 0)
        assert_nothing_held(cache)


@pytest.mark.parametrize("copy_pages", [None, 2])
@pytest.mark.parametrize("step", ["wait", "insert", "finish", "retract", "begin_forward"])
def test_a_copy_back_that_always_fails(step: str, copy_pages: int | None) -> None:
    with make_cache(8, copy_pages=copy_pages) as cache:
        held = Held(cache, toks(18))
        held.request.retract()
        settle(cache)
        failing(cache, "load")
        held.request.resume()
        settle(cache)
        assert use(cache) == (3, 0, 5, 11, 0, 5)
        request = held.request
        calls: dict[str, Callable[[], Any]] = {
            "begin_forward": lambda: cache.begin_forward([request]).wait_until(2)
        }
        call = calls.get(step) or getattr(request, step)
        with pytest.raises(CopyError, match="injected"):
            call()
        # Nothing was given to the tree, and nothing was given back.
        assert cache.tree.device_tokens == 0
        assert use(cache) == (3, 0, 5, 11, 0, 5)
        request.abort()
        late(cache).run_all()
        cache.tick()
        assert use(cache) == (8, 0, 0, 16, 0, 0)
        assert_nothing_held(cache)


@pytest.mark.parametrize("direction", ["backup", "load"])
def test_an_engine_that_refuses_a_copy(direction: str) -> None:
    with make_cache(8) as cache:
        held = Held(cache, toks(18))
        copies, name = late(cache), f"submit_{direction}"
        real, refused = getattr(copies, name), []

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if len(refused) < 3:
                refused.append(1)
                raise OSError("injected")
            return real(*args, **kwargs)

        setattr(copies, name, refuse)
        held.request.retract()
        for _ in range(3):
            settle(cache)
        scribble(cache)
        held.request.resume()
        for _ in range(3):
            settle(cache)
        assert len(refused) == cache.stats()["failed_copies"] == 3
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


def test_the_copy_of_the_prefix_fails_too() -> None:
    with make_cache(8, write_policy="write_back") as cache:
        held = Held(cache, toks(18), 8)
        failing(cache, "backup", 1)
        held.request.retract()
        settle(cache)
        settle(cache)
        # The prefix stays on device, where nobody can lose it while the request is away.
        assert cache.usage()["host_request_pages"] == 3
        late(cache).fail = lambda handle: False
        other = cache.begin(toks(32, 500))
        other.extend()
        other.abort()
        held.request.resume()
        held.request.wait()
        held.check()
        held.request.abort()
        assert_nothing_held(cache)


# Parts: a copy of more pages than a submission may have


@pytest.mark.parametrize("submitted", [0, 1, 2, 3])
@pytest.mark.parametrize("ran", [0, 1, 2])
@pytest.mark.parametrize("direction", ["backup", "load"])
@pytest.mark.parametrize("end", ["abort", "resume", "reset", "fail"])
def test_a_copy_in_parts_ends_at_any_part(direction: str, submitted: int, ran: int, end: str) -> None:
    with make_cache(8, copy_pages=2) as cache:
        held = Held(cache, toks(18))
        held.request.retract()
        if direction == "load":
            for _ in range(3):
                settle(cache)
            scribble(cache)
            held.request.resume()
        for number in range(submitted):
            cache.tick()
            if number < ran:
                late(cache).run(direction)
        if end == "fail":
            failing(cache, direction, 1)
            for _ in range(6):
                settle(cache)
            if held.request.retracted:
                held.request.resume()
            held.request.wait()
            held.check()
        elif end == "resume":
            if held.request.retracted:
                held.request.resume()
            held.request.wait()
            held.check()
        elif end == "reset":
            cache.reset(force=True)
        held.request.abort()
        settle(cache)
        settle(cache)
        assert use(cache) == (8, 0, 0, 16, 0, 0)
        assert late(cache).running == 0
        assert_nothing_held(cache)


# Reset


def reach(cache: UnifiedCache, request: Request, state: str) -> None:
    """Bring a request into a state."""
    if state == "computing":
        return
    request.retract()
    if state == "queued":
        return
    cache.tick()
    if state == "leaving":
        return
    if state == "kept":
        request.resume()
        return
    if state == "given up":
        request.abort()
        return
    if state == "failed":
        late(cache).fail = lambda handle: True
    late(cache).run_all()
    cache.tick()
    late(cache).fail = lambda handle: False
    if state in ("away", "failed"):
        return
    request.resume()
    if state == "resumed":
        return
    cache.tick()
    if state == "returning":
        return
    if state == "load failed":
        late(cache).fail = lambda handle: True
    late(cache).run_all()
    cache.tick()
    late(cache).fail = lambda handle: False


STATES = [
    "computing",
    "queued",
    "leaving",
    "kept",
    "given up",
    "failed",
    "away",
    "resumed",
    "returning",
    "load failed",
    "back",
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("borrowed", [0, 8])
@pytest.mark.parametrize("fail", [False, True])
def test_reset_in_each_state(state: str, borrowed: int, fail: bool) -> None:
    with make_cache(16) as cache:
        held = Held(cache, toks(18), borrowed)
        request = held.request
        settle(cache)
        reach(cache, request, state)
        if state != "given up":
            with pytest.raises(BusyError, match="1 requests are active"):
                cache.reset()
        running = late(cache).running
        cache.reset(force=True)
        for step in (request.retract, request.resume, request.extend, request.finish, request.wait):
            with pytest.raises(LockError):
                step()
        request.abort()
        request.abort()
        usage = cache.usage()
        assert usage["requests"] == 0
        assert usage["device_request_pages"] == usage["host_request_pages"] == 0
        assert usage["device_free_pages"] + usage["device_quarantined_pages"] == 16
        assert usage["host_free_pages"] + usage["host_quarantined_pages"] == 32
        assert (usage["host_quarantined_pages"] > 0) == (running > 0)
        # Somebody takes what is free, while copies from before may still run.
        other = Held(cache, toks(18, 500))
        late(cache).fail = lambda handle: fail
        late(cache).run_all()
        cache.tick()
        late(cache).fail = lambda handle: False
        other.check()
        other.request.retract()
        settle(cache)
        other.request.resume()
        other.request.wait()
        other.check()
        other.request.abort()
        settle(cache)
        assert use(cache) == (16, 0, 0, 32, 0, 0)
        assert_nothing_held(cache)


@pytest.mark.parametrize("state", STATES)
def test_close_in_each_state(state: str) -> None:
    with make_cache(16) as cache:
        held = Held(cache, toks(18), 8)
        settle(cache)
        reach(cache, held.request, state)
    held.request.abort()
    held.request.abort()
