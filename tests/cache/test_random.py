"""The whole cache under random calls, with forwards, copies and storage that come late, in any order, or
fail.

The forwards of the engine are a stream, as on a GPU: what a request computes is written, and what it is
served is read, when the stream gets there, which may be long after the request has ended. So a copy that
does not wait for the forward that wrote its pages, or that overwrites what one still reads, brings wrong
bytes.

Every page that is served is compared with what the model writes for its tokens; after every step the tree and
the page accounts are checked, and at the end of an episode nothing is held.

``UNIFIED_CACHE_RANDOM_STEPS`` sets the number of steps, ``UNIFIED_CACHE_RANDOM_SEED`` where the seeds begin.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.support import (
    PAGE,
    BlockedError,
    Clock,
    LateCopies,
    LateGroup,
    MemoryStore,
    Pool,
    _digests,
    assert_nothing_held,
    chance,
    compute,
    contents,
    make_cache,
    planes_of,
    read_pages,
    same,
    with_manual_threads,
    write_pages,
)
from unified_cache import (
    ArgumentError,
    CapacityError,
    CopyError,
    LockError,
    PrefixTree,
    Request,
    UnifiedCache,
)
from unified_cache.controller.layer_done import LayerWait
from unified_cache.copies.joint import JointCopyEngine
from unified_cache.pools.device import MhaDevicePool, MlaDevicePool

pytestmark = pytest.mark.parallel

STEPS = 1000  # of an episode
EPISODES = -(-int(os.environ.get("UNIFIED_CACHE_RANDOM_STEPS", "100000")) // STEPS)
GROUPS = 10
FIRST_SEED = int(os.environ.get("UNIFIED_CACHE_RANDOM_SEED", "0"))

NAMESPACES: list[dict[str, str]] = [{}] * 8 + [{"extra_key": "lora"}, {"cache_salt": "tenant"}]


class Stream:
    """What forwards do, in order, some time after they were launched."""

    def __init__(self) -> None:
        self.queued: deque[Callable[[], None]] = deque()
        self.launched = self.done = 0

    def launch(self, work: Callable[[], None]) -> None:
        self.queued.append(work)
        self.launched += 1

    def step(self) -> bool:
        if not self.queued:
            return False
        try:
            self.queued[0]()
        except BlockedError:
            return False
        self.queued.popleft()
        self.done += 1
        return True

    def mark(self) -> StreamMark:
        return StreamMark(self, self.launched)


class StreamMark:
    def __init__(self, stream: Stream, position: int) -> None:
        self.stream, self.position = stream, position

    @property
    def done(self) -> bool:
        return self.stream.done >= self.position

    def wait(self) -> None:
        raise AssertionError("a copy engine of the tests never waits")


def make_random_pool(rng: random.Random, pages: int | None = None) -> Pool:
    pages, layers = pages or rng.choice((16, 24, 32)), rng.randrange(1, 4)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float8_e4m3fn))
    if chance(rng, 0.3):
        return MlaDevicePool(pages, PAGE, layers, 6, dtype)
    return MhaDevicePool(pages, PAGE, layers, 2, 4, dtype)


class Episode:
    def __init__(self, seed: int, pools: int = 1) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        pool = make_random_pool(rng)
        others = [make_random_pool(rng, pool.num_pages) for _ in range(pools - 1)]
        policies = ("write_through", "write_through_selective", "write_back")
        # The first episodes go through the write policies, whatever the dice say.
        policy = policies[seed % 3] if seed % 7 else None
        settings: dict[str, Any] = {"write_policy": policy, "clock": self.clock}
        if policy is not None:
            settings["hicache_ratio"] = rng.choice((0.25, 0.5, 1.0, 2.0, 3.0))
            settings["load_back_threshold"] = rng.choice((0, 10, "auto"))
            settings["host_layout"] = rng.choice(("page_first", "page_first_direct", "page_head"))
            settings["host_order"] = rng.choice(("auto", "copies_first", "leaves_first"))
            settings["copy_pages"] = rng.choice((None, None, 1, 3))
            settings["copies"] = LateCopies.between
        if policy == "write_through_selective":
            settings["write_through_threshold"] = 2
        self.stored = policy is not None and chance(rng, 0.5)
        if self.stored:
            self.store = MemoryStore()
            settings["storage"] = self.store
            if settings["host_layout"] == "page_head" and pool.shape.heads == 2:
                settings["storage_head_groups"] = rng.choice((1, 2))
            settings["prefetch_threshold"] = rng.choice((0, 0, 2 * PAGE, "auto"))
            settings["prefetch_policy"] = rng.choice(("best_effort", "timeout", "wait_complete"))
        elif policy is not None and chance(rng, 0.25):
            settings["host_layout"] = "layer_first"
        settings["eviction_policy"] = rng.choice(PrefixTree.eviction_policies())
        self.cache: UnifiedCache = make_cache([pool, *others], **settings)
        self.planes = planes_of(self.cache)
        self.stream = Stream()
        self.failing = False
        self.copies: LateCopies | LateGroup | None = None
        if policy is not None:
            engine: Any = self.cache._copies
            self.copies = LateGroup(engine.engines, rng) if isinstance(engine, JointCopyEngine) else engine
            assert isinstance(self.copies, LateCopies | LateGroup)
            self.copies.forward = self.stream.mark
            self.copies.progress = self.stream.step
            self.copies.seconds = lambda handle: len(handle.device_pages) * rng.choice((1e-4, 1e-2))
            self.failing = chance(rng, 0.3)
            if self.failing:
                self.copies.fail = lambda handle: chance(rng, 0.1)
        self.io = with_manual_threads(self.cache) if self.stored else ()
        self.inside = 0  # calls of the store that have not returned
        self.requests: list[Request] = []
        self.pins: list[Any] = []
        self.prompts: list[np.ndarray] = []
        self.own_locks: list[Any] = []
        self.weights = 0
        self.before = self.cache.stats()
        if self.stored:
            if chance(rng, 0.8):
                self.fill_storage()
            if chance(rng, 0.5):
                self.store.fault = self.fault
            self.store.before = self.meanwhile

    def fault(self) -> str | None:
        return (
            self.rng.choice(("down", "gone", "corrupt", "error", "timeout", "flip", "full"))
            if chance(self.rng, 0.2)
            else None
        )

    def fill_storage(self) -> None:
        """What an earlier process has stored."""
        assert self.copies is not None
        fail, self.copies.fail = self.copies.fail, lambda handle: False
        # In small parts, for small host pools.
        for conversation, pages in itertools.product(range(5), range(2, 10, 2)):
            tokens = np.arange(pages * PAGE) + 1000 * conversation
            request = self.cache.begin(tokens)
            try:
                request.extend()
            except CapacityError:
                request.abort()
                continue
            compute(request)
            request.finish()
            self.cache.evict(100)
            for _ in range(3):
                self.cache.tick()
                self.copies.run_all()
                self.cache.tick()
                for threads in self.io:
                    threads.drain()
        self.cache.reset()
        self.copies.fail = fail

    def meanwhile(self, call: str) -> None:
        """What else happens while a call of the store runs: anything."""
        if self.inside or not chance(self.rng, 0.3):
            return
        self.inside += 1
        for _ in range(self.rng.randrange(1, 6)):
            self.step()
        if chance(self.rng, 0.1):
            self.clock.now += 10  # it hangs
            self.cache.tick()
        self.inside -= 1

    def prompt(self) -> np.ndarray:
        """Conversations that share beginnings and part somewhere; some come again."""
        rng = self.rng
        if self.prompts and chance(rng, 0.5):
            return rng.choice(self.prompts)
        length = rng.randrange(1, 9 * PAGE)
        tokens = np.arange(length) + 1000 * rng.choice((0, 0, 0, 1, 1, 2, 3, 4))
        if length > 1 and chance(rng, 0.5):
            at = rng.randrange(length)
            tokens[at:] += 100 * rng.randrange(1, 3)
        self.prompts = [*self.prompts[-7:], tokens]
        return tokens

    # Forwards

    def content(self, digest: bytes) -> list[torch.Tensor]:
        """What the model writes: other weights compute other bytes."""
        return [content + self.weights for content in contents(self.planes, digest)]

    def expect(self, page: int, content: list[torch.Tensor], what: str) -> Callable[[], None]:
        def check() -> None:
            assert same(read_pages(self.planes, page), content), what

        return check

    def forward(self, request: Request, start: int) -> None:
        """Read what the request was served, and write its whole pages from `start` on."""
        pages, digests = request.pages.tolist(), _digests(request)
        if chance(self.rng, 0.5):
            request.wait()
            for at in range(request.device_length // PAGE):
                self.stream.launch(
                    self.expect(
                        pages[at],
                        self.content(digests[at]),
                        f"page {pages[at]}, number {at} of {request.tokens}",
                    )
                )
        else:
            consumed = self.cache.begin_forward([request])
            served = [(pages[at], self.content(digests[at])) for at in range(request.device_length // PAGE)]
            for layer in range(max(planes.shape.layers for planes in self.planes)):
                self.stream.launch(lambda layer=layer: self.read_layer(consumed, layer, served))  # type: ignore[misc]
        for at in range(start // PAGE, len(digests)):
            content = self.content(digests[at])
            self.stream.launch(lambda page=pages[at], to=content: write_pages(self.planes, page, to))  # type: ignore[misc]

    def read_layer(
        self, consumed: LayerWait, layer: int, served: list[tuple[int, list[torch.Tensor]]]
    ) -> None:
        """A layer of a forward: it waits for its own pages, and reads them."""
        try:
            consumed.wait_until(layer)
        except CopyError:
            assert self.failing
            return
        for page, content in served:
            there = read_pages(self.planes, page)
            assert same(_layer(there, layer), _layer(content, layer)), (page, layer)

    # Steps

    def begin(self) -> None:
        if len(self.requests) < 4:
            namespace = self.rng.choice(NAMESPACES)
            self.requests.append(
                self.cache.begin(
                    self.prompt(),
                    priority=self.rng.randrange(3),
                    resumed=chance(self.rng, 0.1),
                    **namespace,
                )
            )

    def advance(self) -> None:
        """One more step of a request's life, of those that are allowed now."""
        if not self.requests:
            return
        rng = self.rng
        request = rng.choice(self.requests)
        if chance(rng, 0.08):
            self.drop(request)
            return
        if request._prefetch is not None and self.io and chance(rng, 0.7):
            # It waits for storage a little longer.
            self.cache.tick()
            self.io[1].run()
            return
        try:
            if request.retracted:
                with pytest.raises(LockError, match="resume it first"):
                    rng.choice((request.extend, request.insert, request.finish, request.retract))()
                request.resume()
                self.forward(request, len(request.pages) * PAGE)
            elif not request._computing:
                done = request.prefetch_done()
                if chance(rng, 0.8 if done else 0.1):
                    request.load_back(rng.choice((None, None, None, 2 * PAGE)))
                if done or chance(rng, 0.1):
                    request.extend()
                    self.forward(request, request.device_length)
                    self.clock.now += 0.001 * len(request.tokens)
            elif chance(rng, 0.3):
                start = len(request.tokens) // PAGE * PAGE
                request.extend([rng.randrange(3) for _ in range(rng.randrange(1, 6))])
                self.forward(request, max(start, request.device_length))
            elif self.copies is not None and chance(rng, 0.25):
                request.retract()
            elif chance(rng, 0.5):
                length = len(request.tokens)
                computed = rng.choice((None, rng.randrange(length + 1)))
                request.insert(chunked=chance(rng, 0.4), computed=computed)
                self.forward(request, len(request.pages) * PAGE)
            else:
                request.finish()
                self.requests.remove(request)
        except CapacityError:
            # An engine would hold it back; ours gives it up, or else lets another one end first.
            if chance(rng, 0.5):
                self.drop(request)
        except CopyError:
            assert self.failing
            self.drop(request)

    def drop(self, request: Request) -> None:
        request.abort()
        self.requests.remove(request)

    def single_steps(self) -> None:
        """What an engine does that keeps its own requests."""
        rng, cache = self.rng, self.cache
        if self.own_locks and chance(rng, 0.5):
            cache.unlock(self.own_locks.pop())
            return
        namespace = rng.choice(NAMESPACES)
        tokens = self.prompt()
        match = cache.match_prefix(tokens, **namespace)
        lock = cache.lock(match.last_device_node)
        try:
            cache.load_back(match.last_host_node, rng.choice((None, 2 * PAGE)), priority=rng.randrange(2))
            match = cache.match_prefix(tokens, **namespace)
            longer = cache.lock(match.last_device_node)
            cache.unlock(lock)
            lock = longer
            if chance(rng, 0.5):
                cache.wait_loaded(match.last_device_node)
                assert cache.loaded(match.last_device_node)
            whole = len(tokens) // PAGE
            own = cache.alloc(whole - len(match.device_pages))
        except CapacityError:
            cache.unlock(lock)
            return
        except CopyError:
            assert self.failing
            cache.unlock(lock)
            return
        pages = np.concatenate((match.device_pages, own))
        request = self.cache.begin(tokens, resumed=True, **namespace)
        for at, digest in enumerate(_digests(request)[:whole]):
            if at >= len(match.device_pages):
                content = self.content(digest)
                self.stream.launch(lambda page=int(pages[at]), to=content: write_pages(self.planes, page, to))  # type: ignore[misc]
        request.abort()
        cache.insert(tokens, pages, prev_prefix_len=len(match.device_pages) * PAGE, **namespace)
        self.own_locks.append(lock)

    def pin(self) -> None:
        rng, cache = self.rng, self.cache
        if self.pins and chance(rng, 0.4):
            pinned = self.pins.pop(rng.randrange(len(self.pins)))
            try:
                cache.unpin(pinned)
            except LockError:
                assert pinned.expires_at is not None
                assert self.clock.now >= pinned.expires_at
            return
        with contextlib.suppress(ArgumentError):  # too much is pinned, or there is no host tier
            self.pins.append(cache.pin(self.prompt(), rng.choice((None, 0.5, 3.0)), **rng.choice(NAMESPACES)))

    def io_step(self) -> None:
        rng = self.rng
        self.clock.now += rng.choice((0.0, 0.01, 0.3))
        for worker in self.io:
            if chance(rng, 0.7):
                worker.run()
        for _ in range(rng.randrange(20)):
            self.stream.step()
        if self.copies is not None:
            if chance(rng, 0.05):
                self.copies.frozen = not self.copies.frozen
            elif chance(rng, 0.2):
                self.copies.frozen = False
            for direction in ("backup", "load"):
                if chance(rng, 0.5):
                    self.copies.run(direction)

    def only_in_storage(self) -> None:
        """Device and host lose what nobody holds."""
        self.cache.evict(100)
        host = self.cache._host_pages
        assert host is not None
        self.cache._controller.make_host_room(host.free_pages + self.cache.tree.host_tokens // PAGE)

    def step(self) -> None:
        kind = self.rng.random()
        if self.stored and chance(self.rng, 0.04):
            self.only_in_storage()
        elif kind < 0.15:
            self.begin()
        elif kind < 0.50:
            self.advance()
        elif kind < 0.70:
            self.io_step()
        elif kind < 0.90:
            self.cache.tick()
        elif kind < 0.94:
            self.single_steps()
        elif kind < 0.97:
            self.cache.evict(self.rng.randrange(4))
        elif kind < 0.985:
            self.pin()
        elif kind < 0.995:
            pages = self.rng.randrange(4)
            try:
                self.cache.free(self.cache.alloc(pages))
            except CapacityError:
                assert pages > 0
        elif chance(self.rng, 0.5):
            self.reset()
        elif self.stored:
            self.attach()
        self.check()

    def attach(self) -> None:
        """Take the storage away, or give it back."""
        if self.cache._storage is not None:
            self.cache.detach_storage(timeout=0)
        else:
            self.cache.attach_storage(self.store)
            self.io = with_manual_threads(self.cache)

    def reset(self) -> None:
        if chance(self.rng, 0.5):
            self.cache.reset(force=True)
        else:
            self.weights = (self.weights + 1) % 250
            self.cache.update_weights(f"v{self.weights}", force=True)
        for request in self.requests:
            with pytest.raises(LockError):
                request.extend()
            request.abort()
            request.abort()
        for lock in self.own_locks:
            with pytest.raises(LockError):
                self.cache.unlock(lock)
        for pinned in self.pins:
            with pytest.raises(LockError):
                self.cache.unpin(pinned)
        for held in (self.requests, self.own_locks, self.pins):
            held.clear()
        usage = self.cache.usage()
        for tier in ("device", "host"):
            free, quarantined = usage[f"{tier}_free_pages"], usage[f"{tier}_quarantined_pages"]
            assert free + quarantined == usage[f"{tier}_pages"]
            assert usage[f"{tier}_tree_pages"] == usage[f"{tier}_request_pages"] == 0

    def check(self) -> None:
        cache = self.cache
        cache.tree.check_invariants()
        usage = cache.usage()
        for tier, others in (("device", 0), ("host", usage["host_reading_pages"])):
            parts = ("free", "tree", "request", "quarantined")
            held = sum(usage[f"{tier}_{part}_pages"] for part in parts) + others
            assert held == usage[f"{tier}_pages"], (tier, usage)
        now = cache.stats()
        assert all(now[name] >= count for name, count in self.before.items())
        self.before = now

    def end(self) -> None:
        if self.copies is not None:
            self.copies.frozen = False
        for request in self.requests:
            if chance(self.rng, 0.5) or request.retracted:
                request.abort()
            else:
                try:
                    request.finish()
                except CopyError:
                    assert self.failing
                    request.abort()
        self.requests.clear()
        if self.stored:
            self.store.before = lambda call: None
        for lock in self.own_locks:
            self.cache.unlock(lock)
        self.own_locks.clear()
        if self.copies is not None:
            self.copies.fail = lambda handle: False
        for _ in range(1000):
            while self.stream.step():
                pass
            if self.copies is not None:
                self.copies.run_all()
            for worker in self.io:
                worker.drain()
            self.cache.tick()
            link = self.cache._storage
            if self.cache._controller.idle and (link is None or link.idle):
                break
        assert_nothing_held(self.cache)
        stats = self.cache.stats()
        hits = stats["hit_tokens_device"] + stats["hit_tokens_host"] + stats["hit_tokens_storage"]
        assert hits <= stats["asked_tokens"]
        self.cache.close()


def _layer(content: list[torch.Tensor], layer: int) -> list[torch.Tensor]:
    """That layer of each pool that has so many."""
    return [of_pool[layer] for of_pool in content if layer < len(of_pool)]


def run(seed: int, pools: int) -> None:
    try:
        episode = Episode(seed, pools)
        for _ in range(STEPS):
            episode.step()
        episode.end()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_calls(group: int) -> None:
    for at in range(group, EPISODES, GROUPS):
        run(FIRST_SEED + at, 1)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_calls_with_several_pools(group: int) -> None:
    for at in range(group, -(-EPISODES // 5), GROUPS):
        run(FIRST_SEED + at, 2 + at % 2)
