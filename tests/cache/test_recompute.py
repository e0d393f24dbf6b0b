"""Thresholds follow what was measured, and stay what they were set to."""

import random

import pytest

from tests.cache.support import Clock, LateCopies, compute, make_cache, toks
from unified_cache import UnifiedCache
from unified_cache.controller.recompute import LoadOrRecompute, StraightLine

PAGE = 16


def learnt(load: tuple[float, float], prefill: float) -> LoadOrRecompute:
    """Rates of a machine whose loads cost (seconds, seconds a token), its prefills so much a token."""
    rates = LoadOrRecompute(PAGE, "auto", "auto")
    rng = random.Random(1)
    for _ in range(50):
        pages = rng.randrange(1, 200)
        noise = rng.uniform(0.98, 1.02)
        rates.loaded(pages, noise * (load[0] + pages * PAGE * load[1]))
        rates.prefilled(pages * PAGE, noise * (0.02 + pages * PAGE * prefill))
    return rates


def test_fixed_thresholds_do_not_move() -> None:
    rates = LoadOrRecompute(PAGE, 10, 256)
    for _ in range(50):
        rates.loaded(1, 100.0)
        rates.read(1, 100.0)
        rates.prefilled(1000, 0.001)
    assert (rates.load_back_threshold, rates.prefetch_threshold) == (10, 256)
    assert [rates.worth_loading(n) for n in (9, 10)] == [False, True]
    assert not any(rates.worth_reading(255) for _ in range(1000))


def test_defaults_until_enough_was_measured() -> None:
    rates = LoadOrRecompute(PAGE, "auto", "auto")
    for _ in range(3):
        assert (rates.load_back_threshold, rates.prefetch_threshold) == (10, 256)
        rates.loaded(10, 1.0)
        rates.prefilled(160, 2.0)
    rates.loaded(20, 2.0)
    assert rates.load_back_threshold == 10
    rates.prefilled(320, 4.0)
    assert rates.load_back_threshold != 10
    assert rates.prefetch_threshold == 256  # nothing was read yet


@pytest.mark.parametrize(
    "overhead, load, prefill", [(0.01, 1e-5, 1e-4), (0.001, 1e-6, 3e-4), (0.1, 5e-5, 1e-4)]
)
def test_the_break_even_point_is_found(overhead: float, load: float, prefill: float) -> None:
    threshold = learnt((overhead, load), prefill).load_back_threshold
    assert threshold == pytest.approx(overhead / (prefill - load), rel=0.35)


def test_loading_that_never_pays_is_tried_now_and_then() -> None:
    rates = learnt((0.001, 2e-4), 1e-4)
    tried = [rates.worth_loading(100_000) for _ in range(640)]
    assert sum(tried) == 10
    # The machine is less busy now: what was measured long ago fades.
    for _ in range(600):
        rates.loaded(100, 100 * PAGE * 1e-6)
        rates.loaded(10, 10 * PAGE * 1e-6)
    assert rates.worth_loading(100_000)


def test_storage_pays_for_both_ways() -> None:
    rates = learnt((0.01, 1e-5), 1e-4)
    for pages in range(1, 50):
        rates.read(pages, 0.05 + pages * PAGE * 4e-5)
    assert rates.prefetch_threshold == pytest.approx((0.01 + 0.05) / (1e-4 - 1e-5 - 4e-5), rel=0.35)
    assert rates.prefetch_threshold > rates.load_back_threshold


@pytest.mark.parametrize(
    "points, terms",
    [
        ([], (0.0, 0.0)),
        ([(10, 5.0)] * 20, (0.0, 0.5)),  # all alike: no overhead can be told
        ([(10, 5.0), (20, 4.0)] * 20, (4.5, 0.0)),  # never less than nothing for more
        ([(10, 1.0), (100, 30.0)] * 20, (0.0, 31.0 / 110)),  # nor an overhead below 0
        ([(10, 3.0), (20, 5.0)] * 20, (1.0, 0.2)),
    ],
)
def test_lines(points: list[tuple[float, float]], terms: tuple[float, float]) -> None:
    line = StraightLine()
    for amount, seconds in points:
        line.add(amount, seconds)
    assert line.terms() == pytest.approx(terms, rel=0.02, abs=1e-9)


def test_nothing_is_learnt_from_nothing() -> None:
    rates = LoadOrRecompute(PAGE, "auto", "auto")
    for _ in range(50):
        rates.loaded(0, 1.0)
        rates.loaded(5, 0.0)
        rates.prefilled(0, 1.0)
        rates.read(0, 1.0)
    assert rates.load_back_threshold == 10


# In the cache


def served(cache: UnifiedCache, clock: Clock, start: int, seconds_a_token: float) -> int:
    """Serve a prompt of 33 tokens whose prefill takes so long; returns what was loaded back for it."""
    request = cache.begin(toks(33, start))
    loaded = request.load_back()
    request.extend()
    request.wait()
    clock.now += (33 - request.device_length) * seconds_a_token
    compute(request)
    request.finish()
    assert cache.flush(30)
    return loaded


@pytest.mark.parametrize("a_page, loads", [(0.4, 64), (40.0, 1)])
@pytest.mark.parametrize("reported", [False, True])
def test_the_cache_learns_what_is_worth_loading(a_page: float, loads: int, reported: bool) -> None:
    clock = Clock()
    cache = make_cache(
        12, clock=clock, copies=LateCopies.between, load_back_threshold="auto", hicache_ratio=20.0
    )
    copies = cache._copies
    assert isinstance(copies, LateCopies)
    copies.seconds = lambda handle: len(handle.device_pages) * a_page
    prompts = [1000 * at for at in range(6)]
    if reported:
        for tokens in range(4, 10):
            cache.record_prefill(tokens, 1.0 * tokens)
    for start in prompts * 3:
        # By itself it takes a prefill for as long as it seems to take: a second a token, or nonsense.
        served(cache, clock, start, 123.0 if reported else 1.0)
    before = cache.stats()
    for at in range(64):
        served(cache, clock, prompts[at % 6], 1.0)
    after = cache.stats()
    # Four tokens a page: copying takes .1 or 10 seconds a token, computing takes 1.
    assert after["load_copies"] - before["load_copies"] == loads
    assert after["load_backs_skipped"] - before["load_backs_skipped"] == 64 - loads
