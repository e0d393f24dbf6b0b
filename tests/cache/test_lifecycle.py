"""Closing, using after closing, and leaving without closing."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cache.support import assert_nothing_held, make_cache, serve, toks
from unified_cache import (
    ArgumentError,
    BusyError,
    ClosedError,
    LockError,
    PoisonedError,
    Request,
    UnifiedCache,
)
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

LOOKS: list[Callable[[Request], object]] = [
    lambda request: request.wait(),
    lambda request: request.loaded,
    lambda request: request.prefetch_done(),
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
    for look in LOOKS:
        with pytest.raises(ClosedError):
            look(request)
    request.abort()
    assert cache.stats()["requests"] == 1


def test_forgotten_caches_end_their_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    cache = make_cache(storage=str(tmp_path))
    serve(cache, toks(9))
    assert threading.active_count() == before + 2 + 4 + 2
    assert cache.flush(30)
    assert cache._copies is not None
    assert cache._storage is not None
    # A job that has just ended may still be referred to, and it refers to its owner.
    link = cache._storage
    for part in (*cache._copies._workers.values(), link._backup.threads, link._reader.threads):
        assert part.drain(30)
    del cache, part, link
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


def test_looks_after_a_forced_reset() -> None:
    with make_cache() as cache:
        serve(cache, toks(17))
        request = cache.begin(toks(17))
        request.extend()
        cache.reset(force=True)
        for look in LOOKS:
            with pytest.raises(LockError, match="before a reset"):
                look(request)


@pytest.mark.parametrize("pages", [[0, 1], [99, 100], [15, 15], [15, 0]])
def test_pages_that_alloc_did_not_give(pages: list[int]) -> None:
    with make_cache() as cache:
        (given,) = cache.alloc(1).tolist()
        own = [given if page == 15 else page if page > 15 else (given + 1 + page) % 16 for page in pages]
        with pytest.raises(ArgumentError, match="device page"):
            cache.insert(toks(8), own)
        assert cache.match_prefix(toks(9)).device_length == 0
        # What lies before prev_prefix_len is the tree's.
        cache.insert(toks(4), [given])
        cache.insert(toks(8), [given, cache.alloc(1)[0]], prev_prefix_len=4)
        with pytest.raises(ArgumentError, match="prev_prefix_len"):
            cache.insert(toks(8), [given, given], prev_prefix_len=-1)
        assert_nothing_held(cache)


def test_reset_with_pages_out() -> None:
    with make_cache() as cache:
        serve(cache, toks(17))
        pages = cache.alloc(3)
        with pytest.raises(BusyError, match="3 device pages are out through alloc"):
            cache.reset()
        assert cache.match_prefix(toks(17)).device_length == 16
        cache.free(pages)
        cache.reset()
        cache.alloc(3)
        cache.begin(toks(17)).extend()
        cache.reset(force=True)
        assert cache.flush(30)
        assert cache.usage()["device_free_pages"] == 16


def test_reset_of_a_poisoned_tree() -> None:
    class Poisoned:
        was_reset = False

        @property
        def device_tokens(self) -> int:
            raise PoisonedError("injected")

        def reset(self) -> None:
            self.was_reset = True

    with make_cache(write_policy=None) as cache:
        serve(cache, toks(17))
        poisoned = Poisoned()
        cache.tree = poisoned  # type: ignore[assignment]
        cache.reset()
        assert poisoned.was_reset
        assert cache._device_pages.free_pages == 16


def cache_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("unified-cache")]


def test_close_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(storage=str(tmp_path))

    def fail() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(cache, "tick", fail)
    with pytest.raises(RuntimeError, match="injected"):
        cache.close()
    assert cache.closed
    assert cache_threads() == []


def test_flush_and_close_do_not_wait_behind_a_held_up_copy(tmp_path: Path) -> None:
    cache = make_cache(storage=str(tmp_path))
    assert cache._copies is not None
    gate = threading.Event()
    cache._copies._workers["backup"].submit(lambda: bool(gate.wait(30)) and None)
    serve(cache, toks(17))
    begun = time.monotonic()
    assert not cache.flush(0.05)
    cache.close(timeout=0.05)
    assert time.monotonic() - begun < 10
    gate.set()


LEAVING = """
import sys, threading
import numpy as np
from unified_cache import CacheConfig, UnifiedCache
from unified_cache.pools.device import MhaDevicePool
from unified_cache.worker import Worker

cache = UnifiedCache(CacheConfig(page_size=4, storage=sys.argv[1], model="m"), MhaDevicePool(64, 4, 2, 2, 8))
request = cache.begin(np.arange(200))
request.extend()
request.insert()
cache.tick()
if sys.argv[2] == "stuck":
    cache._copies._workers["load"].submit(threading.Event().wait)
    others = [Worker("hung") for _ in range(6)]
    for worker in others:
        worker.submit(threading.Event().wait)
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
        # Workers that hang share two seconds; one after the other these would take fourteen.
        assert time.monotonic() - left < 10
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


def test_a_cache_that_can_not_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    pools = []

    def refuse(device: Any, host: Any) -> Any:
        pools.append(host)
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        make_cache(copies=refuse, storage=str(tmp_path))
    with pytest.raises(ClosedError):
        _ = pools[0].planes
    assert cache_threads() == []
