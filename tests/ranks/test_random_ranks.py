"""Caches of four ranks, whose copies, storage threads, clocks and faults are each rank's own.

All ranks make the same calls. Whatever happens on one of them alone: the trees are equal at every tick, every
tick is one reduction, what is served are the rank's own bytes, and in the end nothing is held.

UNIFIED_CACHE_RANK_TICKS sets how many ticks there are (50,000), UNIFIED_CACHE_RANK_SEED the first seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading

import numpy as np
import pytest
import torch

from tests.cache.support import (
    PAGE,
    Clock,
    LateCopies,
    assert_nothing_held,
    chance,
    make_pool,
    page_content,
    read_page,
    write_page,
)
from tests.ranks.baton import run_ranks
from tests.ranks.hanging import CheckedStore, HangingThreads, with_hanging_threads
from unified_cache import CacheConfig, Request, UnifiedCache, page_hashes
from unified_cache.cache import PinnedPrefix
from unified_cache.copies.engine import CopyHandle
from unified_cache.errors import ArgumentError, CapacityError, LockError, StorageError
from unified_cache.pools.device import MhaDevicePool
from unified_cache.ranks.agreement import Agreement
from unified_cache.ranks.group import Ranks
from unified_cache.ranks.layout import RankLayout

pytestmark = pytest.mark.parallel

RANKS = 4
TICKS = int(os.environ.get("UNIFIED_CACHE_RANK_TICKS", "50000"))
FIRST_SEED = int(os.environ.get("UNIFIED_CACHE_RANK_SEED", "0"))
TICKS_EACH = 500
GROUPS = 10
NAMESPACES = (*[{}] * 7, {"extra_key": "lora"})


class Rank:
    """One rank. `script` says what all of them do, `chances` what happens to this one."""

    def __init__(
        self,
        seed: int,
        agreement: Agreement,
        digests: dict[int, int],
        *,
        stage: int = 0,
        stages: int = 1,
    ) -> None:
        self.agreement, self.rank, self.stage = agreement, agreement.rank, stage
        self.script, self.chances = random.Random(seed), random.Random(f"{seed} of {self.rank} in {stage}")
        self.digests = digests
        script, own = self.script, self.chances
        self.clock, self.store = Clock(), CheckedStore()
        self.clock.now = own.random()
        self.faults = chance(script, 0.6)
        # Much is read and written, and what goes wrong is that it takes long.
        self.slow = chance(script, 0.4)
        # What the first stage finds in its storage the others must have in theirs.
        self.store.fault = self.fault if stage == 0 else lambda: None
        self.store.before = self.hang
        self.weights = 0
        pages = script.choice((12, 16, 24)) + own.randrange(3)  # the least of all ranks counts
        self.pool: MhaDevicePool = make_pool(pages, layers=2)
        self.stored = chance(script, 0.9)
        config = CacheConfig(
            page_size=PAGE,
            write_policy="write_through"
            if self.slow
            else script.choice(("write_through", "write_through_selective", "write_back")),
            hicache_ratio=script.choice((0.5, 1.0, 2.0)),
            load_back_threshold=script.choice((0, 0, 2 * PAGE, "auto")),
            prefetch_threshold=0 if self.slow else script.choice((0, 0, 0, 2 * PAGE, "auto")),
            prefetch_policy=script.choice(("best_effort", "timeout", "wait_complete", "wait_complete")),
            eviction_policy=script.choice(("lru", "slru", "priority")),
            copy_pages=script.choice((None, 3)),
            storage=self.store if self.stored else None,
            storage_write_threads=script.choice((1, 2)),
            model="test",
        )
        self.cache = UnifiedCache(
            config,
            self.pool,
            clock=self.clock,
            copies=LateCopies.between,
            ranks=Ranks(
                RankLayout(tp_size=agreement.size, tp_rank=self.rank, pp_size=stages, pp_rank=stage),
                agreement,
            ),
        )
        assert isinstance(self.cache._copies, LateCopies)
        self.copies = self.cache._copies
        self.copies.fail = self.copy_fails
        self.io: list[HangingThreads] = []  # of all storages that there were
        self.take_threads()
        self.requests: list[Request] = []
        self.pins: list[PinnedPrefix] = []
        self.prompts: list[np.ndarray] = []
        self.ticks = 0
        self.begun = agreement.reductions

    def take_threads(self) -> None:
        self.io = [worker for worker in self.io if worker.busy]
        link = self.cache._storage
        if link is not None:
            self.io += with_hanging_threads(self.cache, self.hangs)
            link.wait = self.wait_for_storage  # type: ignore[method-assign]

    def wait_for_storage(self, timeout: float) -> None:
        self.happen()
        self.clock.now += timeout

    # What happens to this rank alone

    def fault(self) -> str | None:
        if not self.faults or self.slow or not chance(self.chances, 0.004):
            return None
        return self.chances.choice(("down", "gone", "corrupt", "error", "timeout", "flip", "full"))

    def hangs(self, job: str) -> bool:
        """A job of a thread stays in its first call, for some ticks."""
        likely = {"_look_up": 0.05, "_read": 0.4, "_run": 0.1}[job]
        return (self.faults or self.slow) and self.stage == 0 and chance(self.chances, likely)

    def hang(self, call: str) -> None:
        """A call of the store takes too long, and the scheduler looks meanwhile."""
        writing = threading.current_thread().name == "_run"
        # A write is held where its pages are read, after its look-up.
        if (call == "set" or not writing) and HangingThreads.hold():
            return
        link = self.cache._storage
        if self.faults and self.stage == 0 and link is not None and chance(self.chances, 0.01):
            self.clock.now += 10
            link.look()

    def copy_fails(self, handle: CopyHandle) -> bool:
        return self.faults and chance(self.chances, 0.05)

    def happen(self) -> None:
        own = self.chances
        self.clock.now += own.choice((0.0, 0.01, 0.1, 1.0))
        for worker in self.io:
            for _ in range(own.randrange(4)):
                worker.run()
            if worker.held and chance(own, 0.1):
                worker.let_go()
            elif worker.held and chance(own, 0.1):
                self.clock.now += 10
        for direction in ("backup", "load"):
            if chance(own, 0.5):
                self.copies.run(direction)

    # What all of them do

    def tick(self) -> None:
        self.cache.tick()
        self.ticks += 1
        digest = self.cache.tree.digest()
        assert self.digests.setdefault(self.cache._together._count, digest) == digest
        self.digests.pop(self.cache._together._count - 2, None)
        assert self.store.changed == 0

    def content(self, digest: bytes) -> torch.Tensor:
        """Other weights, and other ranks, have other bytes."""
        return page_content(self.pool.planes, digest) + self.weights + 50 * self.rank + 25 * self.stage

    def page_digests(self, request: Request) -> list[bytes]:
        rows = page_hashes(request.tokens, PAGE, extra_key=request._extra_key)
        return [row.tobytes() for row in rows]

    def forward(self, request: Request, start: int) -> None:
        if not self.faults and chance(self.script, 0.3):
            # What fails under a forward ends a rank, so only where nothing does.
            self.cache.begin_forward([request]).wait_until(1)
        else:
            request.wait()
        pages, digests = request.pages.tolist(), self.page_digests(request)
        for at in range(request.device_length // PAGE):
            served = read_page(self.pool.planes, pages[at])
            assert torch.equal(served, self.content(digests[at])), f"page {at} of {request.tokens}"
        for at in range(start // PAGE, len(digests)):
            write_page(self.pool.planes, pages[at], self.content(digests[at]))

    def prompt(self) -> np.ndarray:
        script = self.script
        # Few, so that what is asked for was stored before, and several ask for it at once.
        if self.prompts and chance(script, 0.94 if len(self.prompts) > 3 else 0.5):
            return script.choice(self.prompts)
        length = script.randrange(1, 10 * PAGE) if chance(script, 0.3) else script.randrange(5, 10) * PAGE
        tokens = np.arange(length) + 1000 * script.choice((0, 0, 1, 2))
        if length > 1 and chance(script, 0.5):
            at = script.randrange(length)
            tokens[at:] += 100 * script.randrange(1, 3)
        self.prompts = [*self.prompts[-7:], tokens]
        return tokens

    def begin(self) -> None:
        if len(self.requests) < 5:
            self.requests.append(
                self.cache.begin(
                    self.prompt(), priority=self.script.randrange(3), **self.script.choice(NAMESPACES)
                )
            )

    def advance(self) -> None:
        if not self.requests:
            return
        script = self.script
        request = script.choice(self.requests)
        if chance(script, 0.08):
            self.drop(request)
            return
        if not request.loaded and chance(script, 0.5):
            return  # the same on all ranks, or they go different ways from here on
        try:
            if request.retracted:
                request.resume()
                self.forward(request, len(request.pages) * PAGE)
            elif not request._computing:
                if chance(script, 0.05):
                    request.wait_prefetch()
                done = request.prefetch_done()
                if chance(script, 0.8 if done else 0.1):
                    request.load_back(script.choice((None, None, 2 * PAGE)))
                # Else what was loaded is still on its way at the next look.
                if chance(script, 0.6 if done else 0.1):
                    request.extend()
                    self.forward(request, request.device_length)
                    self.clock.now += 0.001 * len(request.tokens)
            elif chance(script, 0.3):
                start = len(request.tokens) // PAGE * PAGE
                request.extend([script.randrange(3) for _ in range(script.randrange(1, 6))])
                self.forward(request, max(start, request.device_length))
            elif chance(script, 0.2):
                request.retract()
            elif chance(script, 0.5):
                request.insert(chunked=chance(script, 0.4))
                self.forward(request, len(request.pages) * PAGE)
            else:
                request.finish()
                self.requests.remove(request)
        except CapacityError:
            if chance(script, 0.5):
                self.drop(request)

    def drop(self, request: Request) -> None:
        request.abort()
        self.requests.remove(request)

    def pin(self) -> None:
        if self.pins and chance(self.script, 0.4):
            with contextlib.suppress(LockError):  # its time was over
                self.cache.unpin(self.pins.pop())
            return
        with contextlib.suppress(ArgumentError):  # too much is pinned
            self.pins.append(self.cache.pin(self.prompt(), self.script.choice((None, 0.5, 3.0))))

    def reset(self) -> None:
        if chance(self.script, 0.5):
            self.cache.reset(force=True)
        else:
            self.weights = (self.weights + 1) % 25
            self.cache.update_weights(f"v{self.weights}", force=True)
        for request in self.requests:
            request.abort()
        self.requests.clear()
        self.pins.clear()

    def attach(self) -> None:
        """Take the storage away, or give it back; sometimes a rank can not use it."""
        if self.cache._storage is not None:
            if not self.cache.detach_storage(timeout=self.script.choice((0, 0, 1))):
                self.script.random()  # whatever a caller does then: it has to be the same on all ranks
            return
        fails = self.script.random()
        mine = fails < 0.2 and self.rank == self.agreement.size - 1
        store = f"file:///proc/nothing-{self.rank}" if mine else self.store
        try:
            self.cache.attach_storage(store)
        except StorageError:
            assert fails < 0.2
        else:
            assert fails >= 0.2
        self.take_threads()

    def lose(self) -> None:
        """Device and host lose what nobody holds, all or some of it: that is in storage only."""
        host = self.cache._host_pages
        assert host is not None
        self.cache.evict(100)
        on_host = self.cache.tree.host_tokens // PAGE
        some = on_host if chance(self.script, 0.5) else self.script.randrange(on_host + 1)
        room = min(host.free_pages + some, host.free_pages + self.cache.tree.evictable_host_pages(some))
        self.cache._controller.make_host_room(room)

    def step(self) -> None:
        self.happen()
        kind = self.script.random()
        if kind < 0.15:
            self.begin()
        elif kind < 0.5:
            self.advance()
        elif kind < 0.88:
            self.tick()
        elif kind < 0.9:
            self.cache.evict(self.script.randrange(6))
        elif kind < 0.92:
            self.pin()
        elif kind < 0.985:
            self.lose()
            if chance(self.script, 0.7):
                self.begin()
        elif kind < 0.99:
            with contextlib.suppress(CapacityError):
                self.cache.free(self.cache.alloc(self.script.randrange(6)))
        elif chance(self.script, 0.3):
            if not self.cache.flush(self.script.choice((0, 1, 20))):
                self.script.random()
        elif chance(self.script, 0.4):
            self.reset()
        elif self.stored:
            self.attach()

    def end(self) -> None:
        for request in self.requests:
            request.abort()
        self.requests.clear()
        self.faults = self.slow = False
        self.store.fault = lambda: None
        for _ in range(50):
            self.copies.run_all()
            for worker in self.io:
                worker.drain()
            self.clock.now += 1
            self.tick()
        assert_nothing_held(self.cache)
        self.cache.tick()
        # One reduction a tick: nothing else is asked of the others.
        assert self.agreement.reductions - self.begun == self.cache._together._count
        self.cache.close()


def episode(seed: int, ticks: int) -> None:
    digests: dict[int, int] = {}

    def program(agreement: Agreement) -> None:
        rank = Rank(seed, agreement, digests)
        while rank.ticks < ticks:
            rank.step()
        rank.end()

    run_ranks(RANKS, program)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_ranks(group: int) -> None:
    for at in range(group, TICKS // TICKS_EACH, GROUPS):
        seed = FIRST_SEED + at
        try:
            episode(seed, TICKS_EACH)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
