"""A vLLM with nothing in it but its order of calls: blocks of bytes that say which tokens they are of.

One scheduler, any number of workers, each with layers of its own. Every forward reads all blocks of all
requests that it computes, so a byte that is not what it should be is seen at once. With `shares`, blocks are
found again on the device and shared by requests, as by vLLM's own prefix cache.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.cache.support import LateCopies
from unified_cache.engines.vllm_messages import Reports
from unified_cache.engines.vllm_scheduler import Scheduled, SchedulerSide
from unified_cache.engines.vllm_settings import VllmSettings
from unified_cache.engines.vllm_worker import WorkerSide
from unified_cache.worker import Ticket, WorkerPool


class LateThreads:
    """Jobs run when the engine says so, in any order."""

    def __init__(self, name: str, threads: int) -> None:
        self.jobs: list[tuple[Ticket, Callable[[], None]]] = []

    def submit(self, job: Callable[[], None], priority: int = 0) -> Ticket:
        ticket = Ticket(job)
        self.jobs.append((ticket, job))
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        before = len(self.jobs)
        self.jobs = [(other, job) for other, job in self.jobs if other is not ticket]
        return len(self.jobs) < before

    def run(self, chance: random.Random) -> None:
        while self.jobs and chance.random() < 0.5:
            self.jobs.pop(chance.randrange(len(self.jobs)))[1]()

    def close(self) -> None:
        self.jobs.clear()


BLOCK, BYTES, LAYERS = 4, 64, 4


def content(worker: int, layer: int, space: str, tokens: Sequence[int]) -> bytes:
    """What the last block of these tokens holds."""
    return hashlib.blake2b(repr((worker, layer, space, list(tokens))).encode(), digest_size=BYTES).digest()


@dataclass
class FakeRequest:
    name: str
    tokens: list[int]
    more: int
    space: str = ""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    status: str = "waiting"
    aborted: bool = False
    found: int = 0
    loaded: int = 0
    computed_itself: int = 0


class FakeVllm:
    """See the module. Blocks come from the end of a queue of free ones, as vLLM's do."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        blocks: int = 24,
        workers: int = 2,
        chunk: int = 8,
        late: bool = True,
        shares: bool = False,
        seed: int = 0,
        backends: Callable[[], Any] = lambda: None,
    ) -> None:
        self.random = random.Random(seed)
        parsed = VllmSettings.parse(settings, block_size=BLOCK, model="m")
        self.transfer = parsed.transfer
        self.chunk = chunk
        self.free = deque(range(blocks))
        self.shares = shares
        self.users = [0] * blocks
        self.cached: dict[tuple[str, tuple[int, ...]], int] = {}  # blocks by all tokens up to their end
        self.memory = [
            [torch.zeros(blocks, BYTES, dtype=torch.uint8) for _ in range(LAYERS)] for _ in range(workers)
        ]
        self.engines: list[LateCopies] = []
        self.threads: list[LateThreads] = []
        make_threads = self._late_threads if late else WorkerPool
        self.scheduler = SchedulerSide(parsed, backend=backends(), threads=make_threads)
        self.workers = []
        about = []
        for number in range(workers):
            make = (lambda device, host: self._late(device, host)) if late else None
            worker = WorkerSide(
                parsed,
                lambda *_, number=number: f"{number:016x}",
                backend=backends(),
                copies=make,
                threads=make_threads,
            )
            about.append(
                worker.register({f"layer{at}": tensor for at, tensor in enumerate(self.memory[number])})
            )
            self.workers.append(worker)
        self.scheduler.start(about)
        self.requests: dict[str, FakeRequest] = {}
        self.waiting: deque[FakeRequest] = deque()
        self.running: list[FakeRequest] = []
        self.done: list[FakeRequest] = []
        self.received: Counter[str] = Counter()
        self.scheduled: list[dict[str, int]] = []

    def _late(self, device: Any, host: Any) -> LateCopies:
        engine = LateCopies(device, host)
        self.engines.append(engine)
        return engine

    def _late_threads(self, name: str, count: int) -> LateThreads:
        threads = LateThreads(name, count)
        self.threads.append(threads)
        return threads

    def add(self, name: str, tokens: Sequence[int], more: int = 1, space: str = "") -> FakeRequest:
        request = FakeRequest(name, list(tokens), more, space)
        self.requests[name] = request
        self.scheduler.begin(name, lambda: request.tokens, extra_key=space or None)
        self.waiting.append(request)
        return request

    def abort(self, request: FakeRequest) -> None:
        if request.status == "loading":
            request.aborted = True  # its blocks are freed when the load has ended
            self.scheduler.finished(request.name)
            return
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self._end(request)

    def preempt(self, request: FakeRequest) -> None:
        self.running.remove(request)
        self._release(request)
        request.computed, request.status = 0, "waiting"
        self.waiting.appendleft(request)

    def reset(self) -> None:
        self.cached.clear()
        self.scheduler.reset()

    def run(self, most: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.requests:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps: {list(self.requests)}")

    def settle(self, most: int = 2000) -> None:
        """Empty steps until no operation is under way."""
        for _ in range(most):
            if not self.scheduler.usage()["operations"]:
                return
            self.step()
        raise AssertionError("an operation does not end")

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    # One step

    def step(self) -> None:
        scheduled = self._schedule()
        step = self.scheduler.step(scheduled)
        self.scheduled.append({item.request: item.tokens for item in scheduled})
        before = any(load.now for load in step.loads)
        reports, failed = Reports(), set()
        bad: set[str] = set()
        for number, worker in enumerate(self.workers):
            worker.before_step(step)
            worker.open_saves(step)
            if before:
                worker.start_loads(step)
            if scheduled:
                self._forward(number, worker, scheduled, bad)
            if not before:
                worker.start_loads(step)
            worker.start_saves(step)
            for engine in self.engines:
                if self.random.random() < 0.5:
                    engine.run(self.random.choice(("backup", "load")))
            self.received.update(worker.finished())
            failed |= worker.failed_blocks()
            reports.add(worker.take_reports())
        for threads in self.threads:
            threads.run(self.random)
        self._update(scheduled, failed, bad)
        self.scheduler.reported(reports.all())
        for name in [name for name, count in self.received.items() if count == len(self.workers)]:
            del self.received[name]
            self._received(self.requests[name])

    def _schedule(self) -> list[Scheduled]:
        items: list[Scheduled] = []
        for request in self.running:
            count = min(self.chunk, len(request.tokens) - request.computed)
            fresh = self._grow(request, request.computed + count)
            assert fresh is not None
            items.append(Scheduled(request.name, fresh, False, request.computed, count))
        skipped: list[FakeRequest] = []
        while self.waiting:
            request = self.waiting.popleft()
            more: int | None = 0
            later = False
            hit: list[int] = []
            if request.status == "waiting" and request.computed == 0:
                hit = self._hit(request)
                more, later = self.scheduler.match(request.name, len(hit) * BLOCK)
                if more is None:
                    skipped.append(request)
                    continue
            elif request.status == "loading":
                skipped.append(request)
                continue
            start = request.computed + len(hit) * BLOCK + more
            count = 0 if later else min(self.chunk, len(request.tokens) - start)
            if not request.blocks and not self._fits(request, hit):
                skipped.append(request)
                continue
            for block in hit:
                self.users[block] += 1
                if self.users[block] == 1:
                    self.free.remove(block)
            request.blocks += hit
            fresh = self._grow(request, start + count)
            assert fresh is not None
            self.scheduler.allocated(request.name, request.blocks, more)
            request.loaded += more
            request.found += len(hit) * BLOCK
            request.computed = start
            if later:
                request.status = "loading"
                skipped.append(request)
                continue
            request.status = "running"
            self.running.append(request)
            items.append(Scheduled(request.name, list(request.blocks), True, start, count))
            # Also what is being loaded for this step: the next request of it may share that.
            self._cache(request, start + count)
        self.waiting.extendleft(reversed(skipped))
        return items

    def _fits(self, request: FakeRequest, hit: list[int]) -> bool:
        """All of it, beside all of those that hold blocks: nobody ever has to go for lack of them."""
        holding = [request, *(other for other in self.requests.values() if other.blocks)]
        shared = sum(self.users[block] > 0 for block in hit)
        return sum(map(self._missing, holding)) - shared <= len(self.free)

    def _hit(self, request: FakeRequest) -> list[int]:
        """Blocks on the device that hold the front of its tokens; one token is left to compute."""
        hit: list[int] = []
        for end in range(BLOCK, len(request.tokens), BLOCK):
            block = self.cached.get((request.space, tuple(request.tokens[:end])))
            if block is None:
                break
            hit.append(block)
        return hit

    def _cache(self, request: FakeRequest, computed: int) -> None:
        """The first blocks of a request can be found from now on."""
        if self.shares:
            for at in range(min(computed, len(request.tokens)) // BLOCK):
                key = (request.space, tuple(request.tokens[: (at + 1) * BLOCK]))
                self.cached.setdefault(key, request.blocks[at])

    def _forget(self, blocks: Sequence[int]) -> None:
        """They can not be found any more."""
        gone = set(blocks)
        self.cached = {key: block for key, block in self.cached.items() if block not in gone}

    def _missing(self, request: FakeRequest) -> int:
        return -(-(len(request.tokens) + request.more) // BLOCK) - len(request.blocks)

    def _grow(self, request: FakeRequest, tokens: int) -> list[int] | None:
        missing = -(-tokens // BLOCK) - len(request.blocks)
        if missing > len(self.free):
            return None
        fresh = [self.free.popleft() for _ in range(max(missing, 0))]
        self._forget(fresh)
        for block in fresh:
            self.users[block] = 1
        request.blocks += fresh
        return fresh

    def _forward(self, number: int, worker: WorkerSide, items: list[Scheduled], wrong: set[str]) -> None:
        """Adds the requests that read something wrong to `wrong`; what they compute is wrong then, also on
        the workers after this one."""
        for layer in range(LAYERS):
            worker.wait_layer(f"layer{layer}")
            memory = self.memory[number][layer]
            for item in items:
                request = self.requests[item.request]
                for at in range(item.computed // BLOCK):
                    held = bytes(memory[request.blocks[at]].tolist())
                    if held != content(number, layer, request.space, request.tokens[: (at + 1) * BLOCK]):
                        wrong.add(item.request)
                end = item.computed + item.tokens
                for at in range(item.computed // BLOCK, -(-end // BLOCK)):
                    whole = (at + 1) * BLOCK <= end
                    data = bytes(BYTES)
                    if whole and item.request in wrong:
                        data = bytes([255] * BYTES)
                    elif whole:
                        data = content(number, layer, request.space, request.tokens[: (at + 1) * BLOCK])
                    memory[request.blocks[at]] = torch.tensor(list(data), dtype=torch.uint8)
            worker.save_layer(f"layer{layer}")

    def _update(self, items: list[Scheduled], failed: set[int], bad: set[str]) -> None:
        for item in items:
            request = self.requests[item.request]
            known = item.computed // BLOCK
            broken = [at for at in range(known) if request.blocks[at] in failed]
            # Whoever has read something wrong was told so in the same step.
            assert bool(broken) == (item.request in bad), (item, broken, bad)
            if broken:
                request.computed = broken[0] * BLOCK
                self._forget(request.blocks[broken[0] :])
                continue
            request.computed_itself += item.tokens
            request.computed = item.computed + item.tokens
            self._cache(request, request.computed)
            if request.computed == len(request.tokens):
                if request.more == 0:
                    self.running.remove(request)
                    self._end(request)
                else:
                    request.more -= 1
                    request.tokens.append(sum(request.tokens) % 97)
        for request in self.waiting:
            if request.status == "loading":
                broken = [at for at in range(request.computed // BLOCK) if request.blocks[at] in failed]
                if broken:
                    request.computed = min(request.computed, broken[0] * BLOCK)

    def _received(self, request: FakeRequest) -> None:
        assert request.status == "loading"
        if request.aborted:
            self.waiting.remove(request)
            self._release(request)
            del self.requests[request.name]
            return
        request.status = "loaded"
        self._cache(request, request.computed)
        if request.computed == 0:
            self._release(request)
            request.status = "waiting"

    def _end(self, request: FakeRequest) -> None:
        self.scheduler.finished(request.name)
        self._release(request)
        del self.requests[request.name]
        self.done.append(request)

    def _release(self, request: FakeRequest) -> None:
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)
        request.blocks = []
