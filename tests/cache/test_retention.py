"""Pins: a prefix keeps one copy through whatever the device and the host evict, for as long as was said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.cache.late import late, make_cache, settle
from tests.cache.support import (
    PAGE,
    Clock,
    assert_nothing_held,
    assert_served,
    serve,
    toks,
)
from unified_cache import ArgumentError, CapacityError, ClosedError, LockError, UnifiedCache

pytestmark = pytest.mark.parallel

POLICIES = ["write_through", "write_through_selective", "write_back"]
POLICY = pytest.mark.parametrize("policy", POLICIES)


@contextmanager
def cached(pages: int = 16, **settings: Any) -> Iterator[UnifiedCache]:
    """A cache, and at the end a look whether anything is held that should not be."""
    with make_cache(pages, **settings) as cache:
        yield cache
        assert_nothing_held(cache)


def kept(cache: UnifiedCache, tokens: np.ndarray, **names: str) -> int:
    """How many of these tokens are cached, on whichever tier."""
    found = cache.tree.peek_prefix(tokens, **names)
    return found.device_length + found.host_hit_length


def crowd(cache: UnifiedCache, rounds: int = 12, first: int = 5000) -> None:
    """Much else is served, which takes pages on device and on host; then all goes that may go."""
    for at in range(rounds):
        for _ in range(3 if cache.config.write_policy == "write_through_selective" else 1):
            serve(cache, toks(5 * PAGE, first + 100 * at))
            settle(cache)
    evict_all(cache)


def evict_all(cache: UnifiedCache) -> None:
    """Both tiers give up all that they may give up."""
    for _ in range(2):
        cache.evict(cache.usage()["device_pages"])
        settle(cache)
    cache._controller.make_host_room(cache.usage()["host_free_pages"] + cache.tree.evictable_host_pages(1000))
    cache.tree.check_invariants()


def place(cache: UnifiedCache, where: str) -> None:
    """16 tokens that are cached on device, on host, or half on each."""
    serve(cache, toks(16))
    settle(cache)
    if where == "device":
        return
    if where == "mixed":
        cache.match_prefix(toks(8))
    if where == "host":
        cache.evict(16)
    else:
        cache.evict(2)
    settle(cache)


# One copy is kept


@POLICY
@pytest.mark.parametrize("order", ["copies_first", "leaves_first"])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_pinned_prefix_is_kept(policy: str, order: str, ratio: float, where: str) -> None:
    # Two hits before, so that this is what the selective policy does with what it does not copy by itself.
    with cached(write_policy=policy, host_order=order, hicache_ratio=ratio, pin_share=0.5) as cache:
        if where == "host" and policy == "write_through_selective":
            for _ in range(2):
                serve(cache, toks(16))
        place(cache, where)
        serve(cache, toks(16, 900))  # like it, but not pinned
        settle(cache)
        pinned = cache.pin(toks(16))
        assert (pinned.tokens, pinned.expires_at) == (16, None)
        assert cache.tree.pinned_tokens == 16
        # More than both tiers hold.
        for at in range(4):
            crowd(cache, first=5000 + 5000 * at)
            assert kept(cache, toks(16)) == 16
        assert kept(cache, toks(16, 900)) == 0
        # And a whole device at once.
        pages = cache.alloc(16)
        assert kept(cache, toks(16)) == 16
        assert cache.tree.peek_prefix(toks(16)).device_length == 0
        cache.free(pages)
        crowd(cache, first=50_000)
        assert sum(serve(cache, toks(17))[:2]) == 16  # its bytes are compared there
        cache.unpin(pinned)
        assert cache.tree.pinned_tokens == 0
        crowd(cache, 40)
        assert kept(cache, toks(16)) == 0


@POLICY
def test_what_the_device_evicts_goes_to_host_first(policy: str) -> None:
    """Also where the policy copies nothing that has one hit only, as the selective one."""
    with cached(write_policy=policy) as cache:
        serve(cache, toks(16))
        serve(cache, toks(16, 900))
        if policy == "write_through":
            settle(cache)
        pinned = cache.pin(toks(16))
        pages = cache.alloc(16)
        assert (kept(cache, toks(16)), kept(cache, toks(16, 900))) == (
            16,
            0 if policy == "write_through_selective" else 16,
        )
        assert cache.stats()["dropped_tokens"] == (16 if policy == "write_through_selective" else 0)
        cache.free(pages)
        assert serve(cache, toks(17)) == (0, 16, 0)
        cache.unpin(pinned)


@POLICY
@pytest.mark.parametrize("cuts", [(1,), (3, 1), (1, 2, 3)])
def test_cuts_after_the_pin(policy: str, cuts: tuple[int, ...]) -> None:
    with cached(write_policy=policy) as cache:
        place(cache, "device")
        pinned = cache.pin(toks(16))
        for pages in cuts:
            cache.match_prefix(toks(pages * PAGE))
        assert cache.tree.pinned_tokens == 16
        crowd(cache, 20)
        assert kept(cache, toks(16)) == 16
        assert sum(serve(cache, toks(17))[:2]) == 16
        cache.unpin(pinned)
        assert cache.tree.pinned_tokens == 0
        crowd(cache, 40)
        assert kept(cache, toks(16)) == 0


@POLICY
def test_a_prefix_in_the_middle_of_others(policy: str) -> None:
    """Its continuation is not pinned, its beginning is."""
    with cached(write_policy=policy) as cache:
        serve(cache, toks(32))
        settle(cache)
        pinned = cache.pin(toks(18))
        assert pinned.tokens == 16
        crowd(cache, 30)
        assert kept(cache, toks(32)) == 16
        cache.unpin(pinned)


@pytest.mark.parametrize("where", ["device", "host", "mixed"])
@pytest.mark.parametrize("asked", [16, 17, 19, 20, 64])
def test_prefixes_that_are_cached_in_part(where: str, asked: int) -> None:
    with cached() as cache:
        place(cache, where)
        pinned = cache.pin(toks(asked))
        assert pinned.tokens == cache.tree.pinned_tokens == 16
        # What comes behind it later is not pinned by it.
        serve(cache, toks(32))
        settle(cache)
        assert cache.tree.pinned_tokens == 16
        crowd(cache, 30)
        assert kept(cache, toks(32)) == 16
        cache.unpin(pinned)


@pytest.mark.parametrize("tokens", [toks(0), toks(3), toks(16, 700), np.array([0, 1, 2, 9, 9])])
def test_nothing_of_it_is_cached(tokens: np.ndarray) -> None:
    with cached() as cache:
        place(cache, "device")
        pinned = cache.pin(tokens, 5.0)
        assert pinned.tokens == cache.tree.pinned_tokens == 0
        crowd(cache)
        assert kept(cache, tokens) == 0
        cache.unpin(pinned)
        with pytest.raises(LockError):
            cache.unpin(pinned)


def test_namespaces() -> None:
    with cached() as cache:
        for name in ({}, {"extra_key": "a"}, {"cache_salt": "a"}):
            serve(cache, toks(16), **name)
        settle(cache)
        pinned = cache.pin(toks(16), extra_key="a")
        assert cache.pin(toks(16), extra_key="b").tokens == 0
        crowd(cache, 30)
        assert kept(cache, toks(16), extra_key="a") == 16
        assert kept(cache, toks(16)) == kept(cache, toks(16), cache_salt="a") == 0
        cache.unpin(pinned)


@POLICY
@pytest.mark.parametrize("running", ["backup", "load"])
def test_a_pin_while_its_pages_are_on_their_way(policy: str, running: str) -> None:
    with cached(write_policy=policy) as cache:
        place(cache, "device")
        if running == "load" or policy == "write_back":
            lock = cache.pin(toks(16))
            cache.evict(16)
        if running == "load":
            settle(cache)
            cache.unpin(lock)
            request = cache.begin(toks(17))
            assert request.load_back() == 16
        cache.tick()
        pinned = cache.pin(toks(16))
        if running == "load":
            request.abort()
        crowd(cache, 20)
        assert kept(cache, toks(16)) == 16
        cache.unpin(pinned)
        if running == "backup" and policy == "write_back":
            cache.unpin(lock)


@POLICY
def test_several_pins_of_one_prefix(policy: str) -> None:
    with cached(write_policy=policy) as cache:
        place(cache, "device")
        pins = [cache.pin(toks(length)) for length in (16, 8, 16)]
        assert cache.tree.pinned_tokens == 16
        cache.unpin(pins[0])
        crowd(cache, 20)
        assert kept(cache, toks(16)) == 16
        cache.unpin(pins[2])
        crowd(cache, 40)
        assert kept(cache, toks(16)) == cache.tree.pinned_tokens == 8
        cache.unpin(pins[1])
        crowd(cache, 40)
        assert kept(cache, toks(16)) == 0


# There is no other place for it


@POLICY
def test_a_host_that_is_in_use_keeps_it_on_device(policy: str) -> None:
    with cached(8, write_policy=policy, hicache_ratio=0.5, pin_share=1.0) as cache:
        holder = cache.begin(toks(16, 900))
        holder.extend()
        holder.retract()  # takes the whole host
        settle(cache)
        serve(cache, toks(16))
        settle(cache)
        pinned = cache.pin(toks(16))
        assert cache.evict(8) == 0
        with pytest.raises(CapacityError):
            cache.alloc(8)
        assert cache.tree.peek_prefix(toks(16)).device_length == 16
        assert cache.stats()["dropped_tokens"] == 0
        holder.abort()
        pages = cache.alloc(8)
        assert kept(cache, toks(16)) == 16
        cache.free(pages)
        assert serve(cache, toks(17)) == (0, 16, 0)
        cache.unpin(pinned)


@POLICY
def test_a_host_full_of_pins_takes_nothing_else(policy: str) -> None:
    with cached(8, write_policy=policy, hicache_ratio=0.5, pin_share=1.0) as cache:
        serve(cache, toks(16))
        pinned = cache.pin(toks(16))
        settle(cache)
        cache.evict(8)
        settle(cache)
        assert cache.tree.peek_prefix(toks(16)).host_hit_length == 16
        crowd(cache, 10)
        assert kept(cache, toks(16)) == 16
        assert len(cache.tree.evict_host(4).host_pages) == 0
        request = cache.begin(toks(8, 900))
        request.extend()
        with pytest.raises(CapacityError, match="host pages asked for"):
            request.retract()
        request.abort()
        cache.unpin(pinned)
        crowd(cache, 10)
        assert kept(cache, toks(16)) == 0


@POLICY
def test_a_copy_to_host_that_fails_keeps_it_on_device(policy: str) -> None:
    with cached(8, write_policy=policy) as cache:
        late(cache).fail = lambda handle: True
        serve(cache, toks(16))
        pinned = cache.pin(toks(16))
        settle(cache)
        for _ in range(3):
            cache.evict(8)
            settle(cache)
            assert kept(cache, toks(16)) == 16
        with pytest.raises(CapacityError):
            cache.alloc(8)
        assert cache.tree.peek_prefix(toks(16)).device_length == 16
        request = cache.begin(toks(17))
        assert_served(request)
        request.abort()
        late(cache).fail = lambda handle: False
        assert len(cache.alloc(8)) == 8
        cache.reset(force=True)
        with pytest.raises(LockError):
            cache.unpin(pinned)
        settle(cache)


# Time


@POLICY
def test_it_ends_at_a_tick(policy: str) -> None:
    clock = Clock()
    with cached(write_policy=policy, clock=clock) as cache:
        clock.now = 100.0
        place(cache, "device")
        pinned = cache.pin(toks(16), 10)
        assert pinned.expires_at == 110.0
        crowd(cache, 20)
        for clock.now in (100.0, 105.0, 109.999):
            cache.tick()
            assert cache.tree.pinned_tokens == 16
        clock.now = 110.0
        # Its time is over, but only a tick says so.
        assert cache.tree.pinned_tokens == 16
        cache.evict(16)
        assert kept(cache, toks(16)) == 16
        cache.tick()
        assert cache.tree.pinned_tokens == 0
        with pytest.raises(LockError):
            cache.unpin(pinned)
        settle(cache)
        crowd(cache, 40)
        assert kept(cache, toks(16)) == 0
        # It can be pinned again.
        serve(cache, toks(16))
        again = cache.pin(toks(16), 10)
        cache.tick()
        assert cache.tree.pinned_tokens == 16
        cache.unpin(again)


def test_each_pin_has_its_own_time() -> None:
    clock = Clock()
    with cached(32, clock=clock) as cache:
        for start in (0, 100, 200, 300):
            serve(cache, toks(8, start))
        settle(cache)
        times = {0: 5.0, 100: 2.0, 200: None, 300: 2.0}
        pins = {start: cache.pin(toks(8, start), seconds) for start, seconds in times.items()}
        cache.unpin(pins[300])
        for clock.now, left in ((1.9, 24), (2.0, 16), (4.9, 16), (5.0, 8), (1e9, 8)):
            cache.tick()
            assert cache.tree.pinned_tokens == left
        for start in (0, 100, 300):
            with pytest.raises(LockError):
                cache.unpin(pins[start])
        cache.unpin(pins[200])


def test_pins_of_one_prefix_with_different_times() -> None:
    clock = Clock()
    with cached(clock=clock) as cache:
        place(cache, "device")
        cache.pin(toks(16), 1.0)
        longer = cache.pin(toks(16), 3.0)
        clock.now = 2.0
        cache.tick()
        assert cache.tree.pinned_tokens == 16
        crowd(cache, 20)
        assert kept(cache, toks(16)) == 16
        clock.now = 3.0
        cache.tick()
        assert cache.tree.pinned_tokens == 0
        with pytest.raises(LockError):
            cache.unpin(longer)


@pytest.mark.parametrize("seconds", [0, 0.0, -1, float("nan"), "5", [1]])
def test_times_that_are_none(seconds: Any) -> None:
    with cached() as cache:
        place(cache, "device")
        with pytest.raises(ArgumentError, match="seconds must be a number"):
            cache.pin(toks(16), seconds)
        assert cache.tree.pinned_tokens == 0


def test_a_time_that_never_comes() -> None:
    clock = Clock()
    with cached(clock=clock) as cache:
        place(cache, "device")
        pinned = cache.pin(toks(16), float("inf"))
        clock.now = 1e9
        cache.tick()
        assert cache.tree.pinned_tokens == 16
        cache.unpin(pinned)


# How much


@pytest.mark.parametrize(
    "ratio, share, pages", [(2.0, 0.25, 8), (1.0, 0.5, 8), (1.0, 0.51, 8), (0.5, 1.0, 8), (2.0, 0.1, 3)]
)
def test_more_than_the_share_is_refused(ratio: float, share: float, pages: int) -> None:
    settings = {} if share == 0.25 else {"pin_share": share}
    with cached(16, hicache_ratio=ratio, **settings) as cache:
        serve(cache, toks((pages + 1) * PAGE))
        serve(cache, toks(8, 900))
        settle(cache)
        before = cache.usage()
        with pytest.raises(ArgumentError, match="pin"):
            cache.pin(toks((pages + 1) * PAGE), 5.0)
        assert cache.tree.pinned_tokens == 0
        assert cache.usage() == before
        whole = cache.pin(toks(pages * PAGE))
        assert cache.tree.pinned_tokens == pages * PAGE
        # The same once more covers no more; anything else does.
        again = cache.pin(toks(pages * PAGE))
        for tokens in (toks(4, 900), toks((pages + 1) * PAGE)):
            with pytest.raises(ArgumentError):
                cache.pin(tokens)
            assert cache.tree.pinned_tokens == pages * PAGE
        cache.unpin(again)
        with pytest.raises(ArgumentError):
            cache.pin(toks(4, 900))
        cache.unpin(whole)
        other = cache.pin(toks(8, 900))
        assert cache.tree.pinned_tokens == 8
        cache.unpin(other)


def test_what_is_refused_is_not_kept() -> None:
    clock = Clock()
    with cached(16, clock=clock, pin_share=0.0) as cache:
        place(cache, "device")
        with pytest.raises(ArgumentError):
            cache.pin(toks(16), 5.0)
        assert cache.pin(toks(16, 700)).tokens == 0  # of nothing there is no part
        clock.now = 10.0
        cache.tick()
        crowd(cache, 30)
        assert kept(cache, toks(16)) == 0


def test_room_of_pins_that_have_ended_is_free_again() -> None:
    clock = Clock()
    with cached(16, clock=clock, pin_share=0.125) as cache:  # 4 of 32 pages
        for at in range(5):
            serve(cache, toks(8, 7000))
            serve(cache, toks(16, 100 * at))
            settle(cache)
            pinned = cache.pin(toks(16, 100 * at), 1.0 if at % 2 else None)
            with pytest.raises(ArgumentError):
                cache.pin(toks(8, 7000))
            if at % 2:
                clock.now += 1.0
                cache.tick()
            else:
                cache.unpin(pinned)
            assert cache.tree.pinned_tokens == 0


# Ends


def test_unpin_once() -> None:
    with cached() as cache, cached() as other:
        for each in (cache, other):
            place(each, "device")
        first, second = cache.pin(toks(16)), cache.pin(toks(16))
        cache.unpin(first)
        for call in (partial(cache.unpin, first), partial(other.unpin, second)):
            with pytest.raises(LockError):
                call()
        assert cache.tree.pinned_tokens == 16
        crowd(cache, 20)
        assert kept(cache, toks(16)) == 16
        cache.unpin(second)


@pytest.mark.parametrize("how", ["reset", "force", "update_weights"])
def test_a_reset_ends_all_pins(how: str) -> None:
    clock = Clock()
    with cached(clock=clock) as cache:
        place(cache, "device")
        pins = [cache.pin(toks(16)), cache.pin(toks(8), 5.0)]
        # A pin is nothing that a reset has to wait for.
        {
            "reset": cache.reset,
            "force": partial(cache.reset, force=True),
            "update_weights": partial(cache.update_weights, "2"),
        }[how]()
        assert cache.tree.pinned_tokens == kept(cache, toks(16)) == 0
        for pinned in pins:
            with pytest.raises(LockError):
                cache.unpin(pinned)
        place(cache, "device")
        fresh = cache.pin(toks(16), 20.0)
        clock.now = 6.0  # the old one's time
        cache.tick()
        assert cache.tree.pinned_tokens == 16
        cache.unpin(fresh)


@pytest.mark.parametrize("tokens", [toks(0), toks(16)])
def test_no_host_tier(tokens: np.ndarray) -> None:
    with cached(write_policy=None) as cache:
        serve(cache, toks(16))
        with pytest.raises(ArgumentError, match="host tier"):
            cache.pin(tokens)
        assert cache.tree.pinned_tokens == 0
        assert cache.evict(16) == 4


def test_closed() -> None:
    with make_cache() as cache:
        place(cache, "device")
        pinned = cache.pin(toks(16))
    for call in (partial(cache.pin, toks(16)), partial(cache.unpin, pinned)):
        with pytest.raises(ClosedError):
            call()
