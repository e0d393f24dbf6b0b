"""Many requests that read the same few prefixes from storage, in any order of threads, with every fault.

Whatever happens: what is served is what was stored, no page is lost or owned twice, and in the end all is
free.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    Clock,
    MemoryStore,
    Pool,
    assert_nothing_held,
    assert_served,
    chance,
    compute,
    make_cache,
    make_pool,
    serve,
    with_manual_threads,
)
from unified_cache import Request
from unified_cache.errors import CapacityError, CopyError
from unified_cache.pools.device import MlaDevicePool

pytestmark = pytest.mark.parallel

STEPS = 400


def conversation(rng: random.Random) -> np.ndarray:
    """One of a few prompts that part at a few places, of any length."""
    tokens = np.arange(13 * PAGE) + 10_000 * rng.randrange(2)
    for fork in (3, 7):
        tokens[fork * PAGE :] += 100 * fork * rng.randrange(2)
    return tokens[: rng.randrange(2, 13) * PAGE + 1]


def pools(pages: int, several: bool) -> list[Pool]:
    return [make_pool(pages), MlaDevicePool(pages, PAGE, 1, 6)] if several else [make_pool(pages)]


class Episode:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.store, self.clock = MemoryStore(), Clock()
        groups, several = rng.choice((1, 1, 2)), seed % 3 == 0
        settings = {"host_layout": "page_head", "storage_head_groups": groups}
        with make_cache(
            pools(128, several), storage=self.store, prefetch_threshold=10**6, **settings
        ) as cache:
            for _ in range(12):
                serve(cache, conversation(rng))
        self.cache = make_cache(
            pools(rng.choice((48, 128)), several),
            storage=self.store,
            clock=self.clock,
            prefetch_threshold=rng.choice((0, 3 * PAGE)),
            load_back_threshold=0,
            prefetch_policy=rng.choice(("best_effort", "timeout", "wait_complete")),
            hicache_ratio=rng.choice((0.25, 1.0, 2.0)),
            **settings,
        )
        self.writes, self.reads = with_manual_threads(self.cache)
        self.faults = chance(rng, 0.5)
        self.store.fault = self.fault
        self.store.before = self.meanwhile
        self.inside = False
        self.requests: list[Request] = []

    def fault(self) -> str | None:
        if not self.faults or not chance(self.rng, 0.03):
            return None
        return self.rng.choice(("down", "gone", "corrupt", "error", "timeout", "flip", "full"))

    def meanwhile(self, call: str) -> None:
        if self.inside or not chance(self.rng, 0.5):
            return
        self.inside = True
        for _ in range(self.rng.randrange(4)):
            self.step()
        if self.faults and chance(self.rng, 0.03):
            self.clock.now += 10
            self.cache.tick()
        self.inside = False

    def step(self) -> None:
        rng, cache = self.rng, self.cache
        kind = rng.random()
        if kind < 0.2 and len(self.requests) < 5:
            self.requests.append(cache.begin(conversation(rng), priority=rng.randrange(2)))
        elif kind < 0.45:
            cache.tick()
        elif kind < 0.7:
            threads = rng.choice((self.reads, self.reads, self.writes))
            rng.shuffle(threads._queued)
            threads.run()
        elif kind < 0.9 and self.requests:
            request = rng.choice(self.requests)
            if request.prefetch_done() or chance(rng, 0.1):
                self.requests.remove(request)
                self.serve(request)
        elif kind < 0.94 and self.requests:
            self.requests.pop(rng.randrange(len(self.requests))).abort()
        elif kind < 0.97:
            cache.evict(1000)
            host = cache._host_pages
            assert host is not None
            cache._controller.make_host_room(host.free_pages + cache.tree.host_tokens // PAGE)
        elif kind < 0.98:
            cache.reset(force=True)
            for request in self.requests:
                request.abort()
            self.requests.clear()
        else:
            self.clock.now += rng.choice((0.3, 2.0))
        self.check()

    def serve(self, request: Request) -> None:
        try:
            request.load_back()
            request.extend()
            request.wait()
        except (CapacityError, CopyError):
            request.abort()
            return
        assert_served(request)
        if chance(self.rng, 0.5):
            compute(request)
            request.finish()
        else:
            request.abort()

    def check(self) -> None:
        self.cache.tree.check_invariants()
        usage = self.cache.usage()
        parts = ("free", "tree", "request", "quarantined", "reading")
        assert sum(usage[f"host_{part}_pages"] for part in parts) == usage["host_pages"]

    def end(self) -> dict[str, int]:
        self.faults = False
        for request in self.requests:
            request.abort()
        self.store.before = lambda call: None
        for _ in range(100):
            self.reads.drain()
            self.writes.drain()
            if self.cache.flush(0.01):
                break
        assert_nothing_held(self.cache)
        assert self.cache._storage is not None
        assert not self.cache._storage.busy
        assert not self.cache._storage._reads._readers
        counts = self.cache.stats()
        self.cache.close()
        return counts


@pytest.mark.parametrize("group", range(8))
def test_random_reads(group: int) -> None:
    read = shared = 0
    for seed in range(group * 4, group * 4 + 4):
        try:
            episode = Episode(seed)
            for _ in range(STEPS):
                episode.step()
            counts = episode.end()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        read += counts["storage_read_pages"]
        shared += counts["storage_shared_pages"]
    # The test is about these.
    assert read > 50
    assert shared > 5
