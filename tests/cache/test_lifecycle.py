"""Closing, using after closing, and leaving without closing."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cache.support import make_cache, serve, toks
from unified_cache import ClosedError, UnifiedCache
from unified_cache.worker import Worker

CALLS: list[Callable[[UnifiedCache], object]] = [
    lambda cache: cache.begin([1]),
    lambda cache: cache.match_prefix([1]),
    lambda cache: cache.alloc(1),
    lambda cache: cache.free(toks(0)),
    lambda cache: cache.insert([1], []),
    lambda cache: cache.evict(1),
    lambda cache: cache.tick(),
    lambda cache: cache.flush(),
    lambda cache: cache.reset(),
]


@pytest.mark.parametrize("policy", ["write_through", None])
def test_use_after_close(policy: str | None) -> None:
    cache = make_cache(write_policy=policy)
    request = cache.begin(toks(9))
    with cache:
        pass
    cache.close()
    assert cache.closed
    for call in CALLS:
        with pytest.raises(ClosedError, match="the cache was closed"):
            call(cache)
    for step in (request.load_back, request.extend, request.insert, request.finish, request.wait_prefetch):
        with pytest.raises(ClosedError):
            step()
    request.abort()
    assert cache.stats()["requests"] == 1


def test_forgotten_caches_end_their_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    cache = make_cache(storage=str(tmp_path))
    serve(cache, toks(9))
    assert threading.active_count() == before + 4
    assert cache.flush(30)
    assert cache._copies is not None
    assert cache._storage is not None
    # A job that has just ended may still be referred to, and it refers to its owner.
    for part in (*cache._copies._workers.values(), cache._storage._backup, cache._storage._reader):
        assert part.drain(30)
    del cache, part
    gc.collect()
    assert threading.active_count() == before


def test_single_steps() -> None:
    with make_cache(write_policy="write_through") as cache:
        pages = cache.alloc(2)
        assert cache.insert(toks(8), pages).prefix_len == 0
        again = cache.alloc(2)
        assert cache.insert(toks(8), again).duplicate_pages.tolist() == again.tolist()
        assert cache.usage()["device_free_pages"] == 14
        assert cache.match_prefix(toks(9)).device_length == 8
        assert cache.flush(30)
        assert cache.evict(1) == 2
        assert cache.match_prefix(toks(9)).host_hit_length == 8
        assert cache.stats()["demoted_nodes"] == 1


LEAVING = """
import sys, threading
import numpy as np
from unified_cache import CacheConfig, UnifiedCache
from unified_cache.pools.device import MhaDevicePool

cache = UnifiedCache(CacheConfig(page_size=4, storage=sys.argv[1]), MhaDevicePool(64, 4, 2, 2, 8))
request = cache.begin(np.arange(200))
request.extend()
request.insert()
cache.tick()
if sys.argv[2] == "stuck":
    cache._copies._workers["load"].submit(threading.Event().wait)
print("leaving", flush=True)
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how, status", [("return", 0), ("raise", 3), ("stuck", 0)])
def test_leaving_without_close(tmp_path: Path, how: str, status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVING, str(tmp_path), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"leaving\n"
        left = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert process.returncode == status
        assert errors == b""
        assert time.monotonic() - left < 5
    finally:
        process.kill()
        process.wait()


def test_workers() -> None:
    worker = Worker("test")
    gate, ran = threading.Event(), []
    worker.submit(lambda: ran.append(gate.wait(30)))
    assert not worker.drain(0.01)
    gate.set()
    assert worker.drain(30)
    assert ran == [True]
    worker.close()
    worker.close()
    assert worker.drain()
