"""A model whose K and V can be checked, and parts of the cache whose timing a test decides."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from unified_cache import CacheConfig, Request, UnifiedCache, page_hashes
from unified_cache.copies.cpu import CopyHandle, CpuCopyEngine
from unified_cache.errors import StorageError
from unified_cache.pools.device import MhaDevicePool
from unified_cache.storage.contract import PageStatus, Store

PAGE = 4


def toks(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int64)


def make_pool(pages: int = 16, *, layers: int = 3, dtype: torch.dtype = torch.float32) -> MhaDevicePool:
    return MhaDevicePool(pages, PAGE, layers, heads=2, head_dim=4, dtype=dtype)


def make_cache(pages: int = 16, **settings: Any) -> UnifiedCache:
    clock = settings.pop("clock", None)
    config = CacheConfig(page_size=PAGE, **({"model": "test"} | settings))
    return UnifiedCache(config, make_pool(pages), **({} if clock is None else {"clock": clock}))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# The model: what a page holds is a function of the tokens up to its end, and of the namespace.


def page_content(pool: MhaDevicePool, digest: bytes) -> torch.Tensor:
    shape = (2, pool.layers, pool.page_size, pool.words.shape[-1])
    index = np.arange(int(np.prod(shape)), dtype=np.uint64)
    seed = np.frombuffer(digest, np.uint64)
    words = seed[index % 4] + index * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy(words.view(np.int64).reshape(shape)).to(pool.words.dtype)


def _digests(request: Request) -> list[bytes]:
    rows = page_hashes(request.tokens, PAGE, extra_key=request._extra_key, cache_salt=request._cache_salt)
    return [row.tobytes() for row in rows]


def compute(request: Request, start: int | None = None) -> None:
    """Write the whole pages of a request past `start` (default: what it got from the cache)."""
    pool = request._cache.device_pool
    first = (request.device_length if start is None else start) // PAGE
    pages = request.pages
    for at, digest in enumerate(_digests(request)[first:], first):
        pool.words[:, :, int(pages[at])] = page_content(pool, digest)


def assert_served(request: Request) -> None:
    """Everything that the cache says is on device is what the model would have written."""
    pool = request._cache.device_pool
    pages = request.pages
    for at, digest in enumerate(_digests(request)[: request.device_length // PAGE]):
        served = pool.words[:, :, int(pages[at])]
        assert torch.equal(served, page_content(pool, digest)), f"page {at} of {request.tokens}"


def serve(
    cache: UnifiedCache, prompt: Any, answer: Sequence[int] = (), **namespace: Any
) -> tuple[int, int, int]:
    """One request from begin to finish, checked; returns its hits by tier (device, host, storage)."""
    request = cache.begin(prompt, **namespace)
    on_device = request.device_length
    request.wait_prefetch()
    loaded = request.load_back()
    request.extend()
    request.wait()
    assert_served(request)
    compute(request)
    request.insert()
    for token in answer:
        before = len(request.tokens)
        request.extend([token])
        compute(request, before // PAGE * PAGE)
    request.finish()
    cache.tick()
    from_storage = min(request.storage_hit_length, loaded)
    return on_device, loaded - from_storage, from_storage


def assert_nothing_held(cache: UnifiedCache) -> None:
    """No request and no copy: every page is free or in the tree."""
    assert cache.flush(30)
    cache.tree.check_invariants()
    cache._device_pages.check()
    usage = cache.usage()
    assert usage["requests"] == 0
    assert usage["device_free_pages"] + usage["device_tree_pages"] == usage["device_pages"]
    assert cache.tree.protected_tokens == 0
    if cache._host_pages is not None:
        cache._host_pages.check()
        assert usage["host_free_pages"] + usage["host_tree_pages"] == usage["host_pages"]


# Timing that a test decides


class LateHandle(CopyHandle):
    """A copy that runs when `LateCopies` is told to, or when somebody waits for it."""

    engine: LateCopies

    def wait(self) -> None:
        while not self.done:
            self.engine.run(self.direction)
        super().wait()


class LateCopies(CpuCopyEngine):
    """Copies end when the test says so: in order in each direction, in any order between the two.

    Until then their targets hold garbage, so that reading too early shows.
    """

    def __init__(self, cache: UnifiedCache) -> None:
        assert cache.host_pool is not None
        super().__init__(cache.device_pool, cache.host_pool)
        self.queues: dict[str, deque[CopyHandle]] = {"backup": deque(), "load": deque()}
        self.fail: Callable[[CopyHandle], bool] = lambda handle: False
        assert cache._copies is not None
        cache._copies.close()
        cache._copies = cache._transfers._copies = self

    def _submit(self, handle: CopyHandle) -> CopyHandle:
        late = LateHandle(handle.direction, handle.device_pages, handle.host_pages)
        late.engine = self
        self._running += 1
        self.queues[late.direction].append(late)
        if late.direction == "load":
            self._device.words[:, :, late.device_pages.astype(np.int64)] = -1
        else:
            self._host.words[late.host_pages.astype(np.int64)] = -2
        return late

    def run(self, direction: str) -> bool:
        """Let the oldest copy of a direction run."""
        if not self.queues[direction]:
            return False
        handle = self.queues[direction].popleft()
        if self.fail(handle):
            handle._end(OSError("injected"))
            self._ended.put(handle)
        else:
            self._run(handle)
        return True

    def run_all(self) -> None:
        while self.run("backup") or self.run("load"):
            pass

    def take_done(self, *, wait: bool = False, timeout: float | None = None) -> list[CopyHandle]:
        if wait and self._ended.empty() and not self.run("backup"):
            self.run("load")
        return super().take_done()


class ManualWorker:
    """Stands in for `Worker`: jobs run when the test says so."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run(self) -> bool:
        if not self.jobs:
            return False
        self.jobs.popleft()()
        return True

    def drain(self, timeout: float | None = None) -> bool:
        while self.run():
            pass
        return True

    def close(self) -> None:
        self.jobs.clear()


class MemoryStore(Store):
    """Pages in a dict, with faults: `fault()` names what happens to the next page or batch, or None."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.fault: Callable[[], str | None] = lambda: None
        self.calls: list[tuple[str, int]] = []

    def exists(self, keys: Sequence[str]) -> int:
        self.calls.append(("exists", len(keys)))
        if self.fault() == "down":
            raise StorageError("the store is down")
        return next((at for at, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, keys: Sequence[str], views: Sequence[memoryview]) -> list[PageStatus]:
        self.calls.append(("get", len(keys)))
        if self.fault() == "down":
            raise StorageError("the store is down")
        statuses = []
        for key, view in zip(keys, views, strict=True):
            view[:] = b"\xee" * len(view)
            fault = self.fault()
            if key not in self.pages or fault == "gone":
                statuses.append(PageStatus.MISS)
            elif fault in ("corrupt", "error"):
                statuses.append(PageStatus(fault))
            else:
                view[:] = self.pages[key]
                statuses.append(PageStatus.HIT)
        return statuses

    def set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        self.calls.append(("set", len(keys)))
        for at, (key, view) in enumerate(zip(keys, views, strict=True)):
            if self.fault() == "full":
                return at
            self.pages.setdefault(key, bytes(view))
        return len(keys)

    def clear(self) -> None:
        self.pages.clear()

    def stats(self) -> dict[str, int]:
        return {"pages": len(self.pages), "bytes": sum(map(len, self.pages.values()))}

    def close(self) -> None:
        pass


def with_manual_storage(cache: UnifiedCache, store: Store) -> tuple[ManualWorker, ManualWorker]:
    """Put `store` in place of the cache's own; returns the workers for writes and for reads."""
    link = cache._storage
    assert link is not None
    link.store.close()
    writes, reads = ManualWorker(), ManualWorker()
    for part, worker in ((link._backup, writes), (link._reader, reads)):
        part._worker.close()
        part._worker = worker  # type: ignore[assignment]
        part._store = store
    link.store = store
    return writes, reads


def chance(rng: random.Random, likely: float) -> bool:
    return rng.random() < likely
