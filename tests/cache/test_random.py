"""The whole cache under random calls, with copies and storage that come late, in any order, or fail.

Every page that is served is compared with what the model writes for its tokens; after every step the tree
is checked, at the end of an episode every page is free or in the tree.
"""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    Clock,
    LateCopies,
    MemoryStore,
    assert_nothing_held,
    assert_served,
    chance,
    compute,
    make_cache,
    with_manual_storage,
)
from unified_cache import CapacityError, CopyError, LockError, PrefixTree, Request

STEPS = 600
SEEDS = int(os.environ.get("UNIFIED_CACHE_RANDOM_SEEDS", "14"))

NAMESPACES: list[dict[str, str]] = [{}] * 8 + [{"extra_key": "lora"}, {"cache_salt": "tenant"}]


class Episode:
    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        policies = ("write_through", "write_through_selective", "write_back")
        # The first episodes go through the write policies, whatever the dice say.
        policy = policies[seed % 3] if seed % 7 else None
        settings: dict[str, Any] = {"write_policy": policy, "clock": self.clock}
        if policy is not None:
            settings["hicache_ratio"] = rng.choice((0.25, 0.5, 1.0, 2.0, 3.0))
            settings["load_back_threshold"] = rng.choice((0, 10))
        if policy == "write_through_selective":
            settings["write_through_threshold"] = 2
        self.stored = policy is not None and chance(rng, 0.7)
        if self.stored:
            settings["storage"] = str(folder)
            settings["prefetch_threshold"] = rng.choice((0, 2 * PAGE))
            settings["prefetch_policy"] = rng.choice(("best_effort", "timeout", "wait_complete"))
        settings["eviction_policy"] = rng.choice(PrefixTree.eviction_policies())
        self.cache = make_cache(rng.choice((16, 24, 32)), **settings)
        self.copies = LateCopies(self.cache) if policy is not None else None
        self.failing = chance(rng, 0.3)
        if self.copies is not None and self.failing:
            self.copies.fail = lambda handle: chance(rng, 0.1)
        self.store = MemoryStore()
        if chance(rng, 0.5):
            self.store.fault = self.fault
        self.io = with_manual_storage(self.cache, self.store) if self.stored else ()
        self.requests: list[Request] = []
        self.before = self.cache.stats()

    def fault(self) -> str | None:
        return (
            self.rng.choice(("down", "gone", "corrupt", "error", "full")) if chance(self.rng, 0.2) else None
        )

    def prompt(self) -> np.ndarray:
        """Conversations that share beginnings and part somewhere."""
        rng = self.rng
        length = rng.randrange(1, 9 * PAGE)
        tokens = np.arange(length) + 1000 * rng.choice((0, 0, 0, 1, 1, 2, 3, 4))
        if length > 1 and chance(rng, 0.5):
            at = rng.randrange(length)
            tokens[at:] += 100 * rng.randrange(1, 3)
        return tokens

    # Steps

    def begin(self) -> None:
        if len(self.requests) < 4:
            namespace = self.rng.choice(NAMESPACES)
            self.requests.append(self.cache.begin(self.prompt(), priority=self.rng.randrange(3), **namespace))

    def advance(self) -> None:
        """One more step of a request's life, of those that are allowed now."""
        if not self.requests:
            return
        rng = self.rng
        request = rng.choice(self.requests)
        if chance(rng, 0.08):
            request.abort()
            self.requests.remove(request)
            return
        try:
            if not request._computing:
                done = request.prefetch_done()
                if chance(rng, 0.8 if done else 0.1):
                    request.load_back(rng.choice((None, None, None, 2 * PAGE)))
                if done or chance(rng, 0.1):
                    request.extend()
                    request.wait()
                    assert_served(request)
                    compute(request)
            elif chance(rng, 0.4):
                start = len(request.tokens) // PAGE * PAGE
                request.extend([rng.randrange(3) for _ in range(rng.randrange(1, 6))])
                compute(request, max(start, request.device_length))
            elif chance(rng, 0.5):
                length = len(request.tokens)
                computed = rng.choice((None, rng.randrange(length + 1)))
                request.insert(chunked=chance(rng, 0.4), computed=computed)
                request.wait()
                assert_served(request)
            else:
                request.finish()
                self.requests.remove(request)
        except CapacityError:
            # An engine would hold it back; ours gives it up, or else lets another one end first.
            if chance(rng, 0.5):
                request.abort()
                self.requests.remove(request)
        except CopyError:
            assert self.failing
            request.abort()
            self.requests.remove(request)

    def io_step(self) -> None:
        rng = self.rng
        self.clock.now += rng.choice((0.0, 0.01, 0.3))
        for worker in self.io:
            if chance(rng, 0.7):
                worker.run()
        if self.copies is not None:
            for direction in ("backup", "load"):
                if chance(rng, 0.5):
                    self.copies.run(direction)

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.15:
            self.begin()
        elif kind < 0.55:
            self.advance()
        elif kind < 0.75:
            self.io_step()
        elif kind < 0.95:
            self.cache.tick()
        elif kind < 0.98:
            self.cache.evict(self.rng.randrange(4))
        elif kind < 0.995:
            pages = self.rng.randrange(4)
            try:
                self.cache.free(self.cache.alloc(pages))
            except CapacityError:
                assert pages > 0
        elif chance(self.rng, 0.5):
            self.reset()
        self.check()

    def reset(self) -> None:
        self.cache.reset(force=True)
        for request in self.requests:
            with pytest.raises(LockError):
                request.extend()
            request.abort()
            request.abort()
        self.requests.clear()
        assert self.cache.usage()["device_free_pages"] == self.cache.usage()["device_pages"]
        assert self.cache.usage()["host_free_pages"] == self.cache.usage()["host_pages"]

    def check(self) -> None:
        cache = self.cache
        cache.tree.check_invariants()
        own = sum(len(request._pages) - request._borrowed for request in self.requests)
        usage = cache.usage()
        assert usage["device_free_pages"] + usage["device_tree_pages"] + own == usage["device_pages"]
        if cache._host_pages is not None:
            link = cache._storage
            reading = 0 if link is None else sum(len(p.pages) - p.kept for p in link._prefetches.values())
            assert usage["host_free_pages"] + usage["host_tree_pages"] + reading == usage["host_pages"]
        now = cache.stats()
        assert all(now[name] >= count for name, count in self.before.items())
        self.before = now

    def end(self) -> None:
        for request in self.requests:
            if chance(self.rng, 0.5):
                request.abort()
            elif request.loaded:
                request.finish()
            else:
                request.abort()
        self.requests.clear()
        if self.copies is not None:
            self.copies.fail = lambda handle: False
        for _ in range(1000):
            if self.copies is not None:
                self.copies.run_all()
            for worker in self.io:
                worker.drain()
            self.cache.tick()
            link = self.cache._storage
            if self.cache._transfers.idle and (link is None or link.idle):
                break
        assert_nothing_held(self.cache)
        stats = self.cache.stats()
        hits = stats["hit_tokens_device"] + stats["hit_tokens_host"] + stats["hit_tokens_storage"]
        assert hits <= stats["asked_tokens"]
        self.cache.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_calls(seed: int, tmp_path: Path) -> None:
    episode = Episode(seed, tmp_path)
    for _ in range(STEPS):
        episode.step()
    episode.end()
