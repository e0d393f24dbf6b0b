#!/usr/bin/env python3
"""What the cache costs the scheduler's thread: ticks, requests, allocation.

Copies are in copies.py, the tree in tree.py.

Times are medians of single calls, in one process; the goal of a tick with nothing to do is 20 µs.

    python benches/cache.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from machine import machine

from unified_cache import CacheConfig, UnifiedCache
from unified_cache.pools.device import MhaDevicePool

PAGE = 64
PAGES = 4096


def make_cache(write_policy: str = "write_through") -> UnifiedCache:
    pool = MhaDevicePool(PAGES, PAGE, layers=2, heads=1, head_dim=4)
    return UnifiedCache(CacheConfig(page_size=PAGE, write_policy=write_policy), pool)  # type: ignore[arg-type]


def serve(cache: UnifiedCache, tokens: np.ndarray) -> None:
    request = cache.begin(tokens)
    request.load_back()
    request.extend()
    request.wait()
    request.finish()


def median_us(call: Callable[[], object], calls: int, before: Callable[[], object] | None = None) -> float:
    times = []
    for _ in range(calls):
        if before is not None:
            before()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def idle_tick() -> float:
    with make_cache() as cache:
        serve(cache, np.arange(PAGE * 20))
        cache.flush()
        return median_us(cache.tick, 20_000)


def tick_with_active_requests() -> float:
    with make_cache() as cache:
        for start in range(0, 256_000, 1000):
            request = cache.begin(np.arange(PAGE * 4) + start)
            request.extend()
        return median_us(cache.tick, 20_000)


def hit() -> float:
    with make_cache() as cache:
        tokens = np.arange(PAGE * 128 + 1)
        serve(cache, tokens)
        cache.flush()
        return median_us(lambda: serve(cache, tokens), 2_000)


def miss() -> float:
    with make_cache() as cache:
        prompts = [np.arange(PAGE * 20) + start for start in range(0, 2_000_000, 2000)]
        for prompt in prompts[:400]:
            serve(cache, prompt)
            cache.flush()
        rest = iter(prompts[400:])
        return median_us(lambda: serve(cache, next(rest)), 500, cache.flush)


def alloc_and_free() -> float:
    with make_cache() as cache:
        return median_us(lambda: cache.free(cache.alloc(10)), 5_000)


def write_back_of_a_thousand_leaves() -> float:
    with make_cache("write_back") as cache:
        times = []
        for turn in range(5):
            for leaf in range(1000):
                serve(cache, np.arange(PAGE) + 1000 * (leaf + 2000 * turn))
            cache.flush()
            begin = time.perf_counter()
            cache.evict(1000)
            cache.tick()
            times.append(time.perf_counter() - begin)
            cache.flush()
        return statistics.median(times) * 1e6


ROWS: dict[str, Callable[[], float]] = {
    "tick with nothing to do": idle_tick,
    "tick, 256 requests active": tick_with_active_requests,
    "request, 8,192 tokens hit on device": hit,
    "request, 1,280 tokens computed, device full": miss,
    "alloc and free 10 pages": alloc_and_free,
    "write_back of 1,000 leaves: evict and tick": write_back_of_a_thousand_leaves,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    arguments = parser.parse_args()
    rows = {name: round(call(), 2) for name, call in ROWS.items()}
    if arguments.json:
        print(json.dumps({"machine": machine(), "us": rows}))
        return
    print(f"{machine()}\n")
    for name, value in rows.items():
        print(f"{name:<48} {value:>10.2f} us")


if __name__ == "__main__":
    main()
