"""A model whose K and V can be checked, and parts of the cache whose timing a test decides."""

from __future__ import annotations

import functools
import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from unified_cache import CacheConfig, Request, UnifiedCache, page_hashes
from unified_cache.controller.layer_done import LayerDoneCounter
from unified_cache.controller.storage import StorageLink
from unified_cache.copies.engine import CopyHandle, LayerEvents, Mark
from unified_cache.errors import CopyError, StorageError
from unified_cache.pools.device import MhaDevicePool, MlaDevicePool
from unified_cache.pools.planes import PoolPlanes
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus
from unified_cache.worker import Ticket

PAGE = 4


def toks(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int64)


Pool = MhaDevicePool | MlaDevicePool


def make_pool(pages: int = 16, *, layers: int = 3, dtype: torch.dtype = torch.float32) -> MhaDevicePool:
    return MhaDevicePool(pages, PAGE, layers, heads=2, head_dim=4, dtype=dtype)


def make_cache(pages: int | Pool | Sequence[Pool] = 16, **settings: Any) -> UnifiedCache:
    """A cache on a small pool, or on what is given."""
    others = {name: settings.pop(name) for name in ("clock", "copies") if name in settings}
    # Nothing comes back by itself, unless a test is about that.
    config = CacheConfig(page_size=PAGE, **({"model": "test", "storage_warm": 0.0} | settings))
    return UnifiedCache(config, make_pool(pages) if isinstance(pages, int) else pages, **others)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# The model: what a page holds is a function of the tokens up to its end, and of the namespace.


@functools.lru_cache
def _mixing(size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of so many bytes: the word of the digest that it comes from, and what is added to that."""
    index = np.arange(size, dtype=np.uint64)
    return (index % 4).astype(np.intp), index * np.uint64(0x9E3779B97F4A7C15)


def page_content(planes: PoolPlanes, digest: bytes) -> torch.Tensor:
    """The bytes of a page, uint8 (layers, parts, tokens, heads, bytes of a run)."""
    shape = planes.shape
    places, added = _mixing(shape.page_bytes)
    mixed = (np.frombuffer(digest, np.uint64)[places] + added) >> np.uint64(32)
    content = torch.from_numpy(mixed.astype(np.uint8))
    return content.reshape(shape.layers, shape.parts, shape.tokens, shape.heads, shape.run_bytes)


def read_page(planes: PoolPlanes, page: int) -> torch.Tensor:
    """What a page holds, in the form of `page_content`."""
    shape = planes.shape
    parts = [tensor[page].contiguous().view(torch.uint8) for tensor in planes.tensors]
    return torch.stack(parts).reshape(shape.layers, shape.parts, shape.tokens, shape.heads, shape.run_bytes)


def write_page(planes: PoolPlanes, page: int, content: torch.Tensor) -> None:
    """Put bytes in the form of `page_content` into a page."""
    flat = content.reshape(len(planes.tensors), *content.shape[2:])
    for tensor, part in zip(planes.tensors, flat, strict=True):
        tensor[page].view(torch.uint8).copy_(part)


def contents(all_planes: Sequence[PoolPlanes], digest: bytes) -> list[torch.Tensor]:
    """What a page holds in each pool of a cache: in none of them what it holds in another."""
    seeds = [hashlib.sha256(digest + bytes([at])).digest() if at else digest for at in range(len(all_planes))]
    return [page_content(planes, seed) for planes, seed in zip(all_planes, seeds, strict=True)]


def read_pages(all_planes: Sequence[PoolPlanes], page: int) -> list[torch.Tensor]:
    """What a page holds in each pool of a cache."""
    return [read_page(planes, page) for planes in all_planes]


def write_pages(all_planes: Sequence[PoolPlanes], page: int, content: Sequence[torch.Tensor]) -> None:
    """Put bytes into a page of each pool of a cache."""
    for planes, of_pool in zip(all_planes, content, strict=True):
        write_page(planes, page, of_pool)


def planes_of(cache: UnifiedCache) -> list[PoolPlanes]:
    """Those of all device pools."""
    return [pool.planes for pool in cache.device_pools]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """The same bytes in each pool."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _digests(request: Request) -> list[bytes]:
    rows = page_hashes(request.tokens, PAGE, extra_key=request._extra_key, cache_salt=request._cache_salt)
    return [row.tobytes() for row in rows]


def compute(request: Request, start: int | None = None) -> None:
    """Write the whole pages of a request past `start` (default: what it got from the cache)."""
    planes = planes_of(request._cache)
    first = (request.device_length if start is None else start) // PAGE
    pages = request.pages
    for at, digest in enumerate(_digests(request)[first:], first):
        write_pages(planes, int(pages[at]), contents(planes, digest))


def assert_served(request: Request) -> None:
    """Everything that the cache says is on device is what the model would have written."""
    planes = planes_of(request._cache)
    pages = request.pages
    for at, digest in enumerate(_digests(request)[: request.device_length // PAGE]):
        served = read_pages(planes, int(pages[at]))
        assert same(served, contents(planes, digest)), f"page {at} of {request.tokens}"


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


def until(so: Callable[[], object], cache: UnifiedCache, seconds: float = 30) -> None:
    """Tick until something is so; an AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end
        cache.tick()
        if cache._storage is not None:
            cache._storage.wait(0.005)


def assert_nothing_held(cache: UnifiedCache) -> None:
    """No request and no copy: every page is free or in the tree."""
    assert cache.flush(30)
    cache.tree.check_invariants()
    cache._device_pages.check()
    usage = cache.usage()
    assert usage["requests"] == 0
    assert cache.tree.protected_tokens == 0
    assert usage["device_free_pages"] + usage["device_tree_pages"] == usage["device_pages"]
    assert usage["host_free_pages"] + usage["host_tree_pages"] == usage["host_pages"]
    for tier in ("device", "host"):
        assert usage[f"{tier}_request_pages"] == usage[f"{tier}_quarantined_pages"] == 0
    assert usage["host_reading_pages"] == 0
    if cache._host_pages is not None:
        cache._host_pages.check()


# Timing that a test decides


class LateHandle(CopyHandle):
    """A copy that runs when `LateCopies` is told to, or when somebody waits for it."""

    engine: LateCopies
    after: Mark | None = None
    layers: LayerEvents | None = None

    def wait(self) -> None:
        self.engine.frozen = False
        while not self.done:
            assert self.engine.run(self.direction) or self.engine.progress()
        super().wait()


class BlockedError(Exception):
    """A forward waits for a copy that can not run now."""


class LateLayers:
    """Layers arrive when the copy runs; a forward that waits lets it run."""

    def __init__(self, engine: LateCopies) -> None:
        self._engine = engine
        self._arrived: set[int] = set()
        self._error: Exception | None = None
        self.done = True

    def begin(self) -> None:
        self._arrived.clear()
        self._error, self.done = None, False

    def record(self, layer: int) -> None:
        self._arrived.add(layer)
        self.done = len(self._arrived) == self._engine.device.shape.layers

    def fail(self, error: Exception) -> None:
        self._error, self.done = error, True

    def wait(self, layer: int) -> None:
        while layer not in self._arrived and self._error is None:
            if not self._engine.run("load"):
                raise BlockedError
        if self._error is not None:
            raise CopyError(f"the load copy failed: {self._error}")


class LateCopies:
    """Copies end when the test says so: in order in each direction, in any order between the two.

    Until then their targets hold garbage, so that reading too early shows. It shares no code with the
    engines of the package: bytes go through torch's indexing.
    """

    def __init__(self, device: PoolPlanes, host: PoolPlanes) -> None:
        self.device, self.host = device, host
        self.queues: dict[str, deque[LateHandle]] = {"backup": deque(), "load": deque()}
        self.fail: Callable[[CopyHandle], bool] = lambda handle: False
        self.seconds: Callable[[CopyHandle], float] = lambda handle: 0.0
        self.forward: Callable[[], Mark | None] = lambda: None
        self.progress: Callable[[], bool] = lambda: False  # something else that a copy may wait for goes on
        self.frozen = False
        self.submitted: list[LateHandle] = []
        self._ended: deque[CopyHandle] = deque()

    @classmethod
    def between(cls, device: Any, host: Any) -> LateCopies:
        """For the argument `copies` of a cache."""
        return cls(device.planes, host.planes)

    @classmethod
    def into(cls, cache: UnifiedCache) -> LateCopies:
        """Put one in place of the engine of a cache that copies nothing now."""
        assert cache.host_pool is not None
        assert cache._copies is not None
        assert cache._copies.running == 0
        cache._copies.close()
        engine = cls(cache.device_pool.planes, cache.host_pool.planes)
        cache._copies = cache._controller._copies = engine
        cache._controller.layer_done = LayerDoneCounter(engine.new_layer_events)
        return engine

    @property
    def running(self) -> int:
        return len(self._ended) + sum(map(len, self.queues.values()))

    def record_forward(self) -> Mark | None:
        return self.forward()

    def new_layer_events(self) -> LateLayers:
        return LateLayers(self)

    def submit_backup(
        self, device_pages: np.ndarray, host_pages: np.ndarray, *, after: Mark | None = None
    ) -> CopyHandle:
        return self._submit(LateHandle("backup", device_pages, host_pages), after, None)

    def submit_load(
        self,
        device_pages: np.ndarray,
        host_pages: np.ndarray,
        *,
        after: Mark | None = None,
        layers: LayerEvents | None = None,
    ) -> CopyHandle:
        return self._submit(LateHandle("load", device_pages, host_pages), after, layers)

    def _submit(self, late: LateHandle, after: Mark | None, layers: LayerEvents | None) -> LateHandle:
        assert len(late.device_pages) == len(late.host_pages) > 0
        late.engine, late.after, late.layers = self, after, layers
        self.queues[late.direction].append(late)
        self.submitted.append(late)
        if late.direction == "backup":
            self._poison(self.host, late.host_pages)
        elif after is None or after.done:
            self._poison(self.device, late.device_pages)
        return late

    def _poison(self, planes: PoolPlanes, pages: np.ndarray) -> None:
        for tensor in planes.tensors:
            tensor.view(torch.uint8)[pages.astype(np.int64)] = 0xEE

    def run(self, direction: str) -> bool:
        """Let the oldest copy of a direction run; False if there is none, or it has to wait."""
        queue = self.queues[direction]
        if not queue or self.frozen or (queue[0].after is not None and not queue[0].after.done):
            return False
        handle = queue.popleft()
        handle.begun = True
        handle.seconds = self.seconds(handle)
        error = OSError("injected") if self.fail(handle) else None
        if error is None:
            self._copy(handle)
        elif handle.layers is not None:
            handle.layers.fail(error)
        handle._end(error)
        self._ended.append(handle)
        return True

    def _copy(self, handle: LateHandle) -> None:
        device_pages, host_pages = (
            torch.from_numpy(pages.astype(np.int64)) for pages in (handle.device_pages, handle.host_pages)
        )
        parts = self.device.shape.parts
        for at, (device, host) in enumerate(zip(self.device.tensors, self.host.tensors, strict=True)):
            on_device, on_host = device.view(torch.uint8), host.view(torch.uint8)
            if handle.direction == "backup":
                on_host[host_pages] = on_device[device_pages]
            else:
                on_device[device_pages] = on_host[host_pages]
            if handle.layers is not None and (at + 1) % parts == 0:
                handle.layers.record(at // parts)

    def run_all(self) -> None:
        while self.run("backup") or self.run("load"):
            pass

    def take_done(self, *, wait: bool = False, timeout: float | None = None) -> list[CopyHandle]:
        if wait and timeout is None:
            self.frozen = False  # who waits without a limit waits until it goes on
        while wait and not self._ended and not self.frozen:
            if not (self.run("backup") or self.run("load") or self.progress()):
                break
        taken = list(self._ended)
        self._ended.clear()
        return taken

    def close(self) -> None:
        for queue in self.queues.values():
            queue.clear()


class LateGroup:
    """The engines of a cache with several pools, which run in any order between them."""

    frozen = False

    def __init__(self, engines: Sequence[LateCopies], rng: random.Random) -> None:
        self.engines, self._rng = list(engines), rng

    @property
    def fail(self) -> Callable[[CopyHandle], bool]:
        return self.engines[0].fail

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("forward", "progress", "seconds", "fail"):
            for engine in self.engines:
                setattr(engine, name, value)
        elif name != "frozen":  # nobody would thaw one while another is waited for
            super().__setattr__(name, value)

    def run(self, direction: str) -> bool:
        """`LateCopies.run` of one of them."""
        return any(engine.run(direction) for engine in self._rng.sample(self.engines, len(self.engines)))

    def run_all(self) -> None:
        while self.run("backup") or self.run("load"):
            pass


class ManualThreads:
    """Stands in for `WorkerPool`: jobs run when the test says so, the higher priority first."""

    def __init__(self) -> None:
        self._queued: list[tuple[int, Ticket]] = []

    @property
    def jobs(self) -> list[Ticket]:
        """Those that have not begun."""
        return [ticket for _, ticket in self._queued if ticket._job is not None]

    def submit(self, job: Callable[[], None], priority: int = 0) -> Ticket:
        ticket = Ticket(job)
        self._queued.append((-priority, ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        job, ticket._job = ticket._job, None
        return job is not None

    def take(self) -> Callable[[], None] | None:
        """The job that is next, to be run by the caller; None if there is none."""
        self._queued = [entry for entry in self._queued if entry[1]._job is not None]
        if not self._queued:
            return None
        ticket = min(self._queued, key=lambda entry: entry[0])[1]
        job, ticket._job = ticket._job, None
        return job

    def run(self) -> bool:
        """Run one job on this thread; False if there is none."""
        job = self.take()
        if job is not None:
            job()
        return job is not None

    def drain(self) -> None:
        while self.run():
            pass

    def close(self) -> None:
        self._queued.clear()


class MemoryStore(Backend):
    """Objects in a dict, with faults: `fault()` names what happens to the next object or call, or None."""

    scheme = "test"
    durable = False

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.fault: Callable[[], str | None] = lambda: None
        self.before: Callable[[str], None] = lambda call: None  # runs first in every call
        self.calls: list[tuple[str, int]] = []
        self.closed = 0

    def _called(self, call: str, count: int) -> None:
        self.calls.append((call, count))
        self.before(call)
        if self.fault() == "down":
            raise StorageError("the store is down")

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        self._called("exists", sum(map(len, runs)))
        return [next((at for at, key in enumerate(run) if key not in self.pages), len(run)) for run in runs]

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        self._called("get", len(batch))
        statuses = []
        for at, key in enumerate(batch.keys):
            body, fault = batch.bodies[at], self.fault()
            body[:] = b"\xee" * len(body)
            if key not in self.pages or fault == "gone":
                statuses.append(PageStatus.MISS)
            elif fault in ("corrupt", "error", "timeout"):
                statuses.append(PageStatus(fault))
            else:
                whole = bytearray(self.pages[key])
                if fault == "flip":
                    whole[-1] ^= 1
                header = batch.headers.shape[1]
                batch.headers[at] = list(whole[:header])
                body[: len(whole) - header] = whole[header:]
                batch.stored_sizes[at] = len(whole) - header
                statuses.append(PageStatus.HIT)
        return statuses

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        self._called("set", len(batch))
        statuses = []
        for at, key in enumerate(batch.keys):
            if self.fault() == "full":
                statuses.append(PageStatus.FULL)
                continue
            whole = batch.headers[at].tobytes() + bytes(batch.bodies[at][: int(batch.body_sizes[at])])
            self.pages.setdefault(key, whole)
            statuses.append(PageStatus.HIT)
        return statuses

    def delete(self, keys: Sequence[str]) -> int:
        return sum(self.pages.pop(key, None) is not None for key in keys)

    def keys(self) -> Iterator[str]:
        return iter(list(self.pages))

    def clear(self) -> None:
        self.pages.clear()

    def stats(self) -> dict[str, int]:
        return {"objects": len(self.pages), "bytes": sum(map(len, self.pages.values()))}

    def close(self) -> None:
        self.closed += 1


def with_manual_threads(cache: UnifiedCache) -> tuple[ManualThreads, ManualThreads]:
    """Let the test run what the cache's storage threads would; returns those for writes and for reads."""
    link = cache._storage
    assert link is not None
    writes, reads = ManualThreads(), ManualThreads()
    for part, threads in ((link._backup, writes), (link._reader, reads)):
        part.threads.close()
        part.threads = threads
    return writes, reads


class AskingThreads(ManualThreads):
    """Those for reads, where a test need not tick first for the questions to go out."""

    def __init__(self, link: StorageLink) -> None:
        super().__init__()
        self._link = link

    def run(self) -> bool:
        if self._link.guard.available:
            self._link._reads.ask()
        return super().run()


def with_manual_storage(cache: UnifiedCache, store: MemoryStore) -> tuple[ManualThreads, ManualThreads]:
    """The same, with `store` in place of the cache's own storage, and questions that go out by themselves."""
    link = cache._storage
    assert link is not None
    link.guard.backend.close()
    link.guard.backend = store
    writes, _ = with_manual_threads(cache)
    link._reader.threads = AskingThreads(link)
    return writes, link._reader.threads


def chance(rng: random.Random, likely: float) -> bool:
    return rng.random() < likely
