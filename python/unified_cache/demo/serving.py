"""The same requests, served by the engine with each set-up of the cache and checked against a reference."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unified_cache.cache import UnifiedCache
from unified_cache.config import CacheConfig
from unified_cache.demo.engine import Engine
from unified_cache.demo.model import HEAD_DIM, KV_HEADS
from unified_cache.demo.workload import NEAR_TIE, Traffic, Turn
from unified_cache.engines.transformers import Generation
from unified_cache.pools.device import MhaDevicePool

__all__ = [
    "DEVICE_SHARE",
    "HOST_RATIO",
    "PAGE_SIZE",
    "SETUPS",
    "Mismatch",
    "Report",
    "Server",
    "Setup",
    "Sizes",
    "demo_sizes",
    "warm_up",
]

PAGE_SIZE = 16
# The device pool holds this share of all conversations together, the host pool all of them.
DEVICE_SHARE = 0.3
HOST_RATIO = 4.0
# What is on its way to storage at the end may take this long; it is far less unless the disk is very slow.
_CLOSE_SECONDS = 60.0


@dataclass(frozen=True)
class Setup:
    """What is kept for later requests.

    Attributes:
        shared: requests may hit what others have computed. If not, each has a namespace of its own: the same
            engine, without a cache.
        write_policy: None: there is no host tier.
        storage: there is one.
    """

    name: str
    shared: bool = True
    write_policy: Literal["write_through"] | None = None
    storage: bool = False


SETUPS = (
    Setup("no cache", shared=False),
    Setup("device"),
    Setup("+ host", write_policy="write_through"),
    Setup("+ storage", write_policy="write_through", storage=True),
)


@dataclass(frozen=True)
class Sizes:
    """How much there is of everything.

    Attributes:
        device_pages: of the device pool.
        host_ratio: pages of the host pool for each of those.
        running: requests on device at a time.
        chunk: tokens of a forward, at most.
    """

    device_pages: int
    host_ratio: float = HOST_RATIO
    running: int = 16
    chunk: int = 256


def demo_sizes(traffic: Traffic) -> Sizes:
    """A device pool that is too small for all conversations, but not for one."""
    one = -(-traffic.longest // PAGE_SIZE)
    return Sizes(max(round(traffic.expected * DEVICE_SHARE / PAGE_SIZE), one + 1))


@dataclass(frozen=True)
class Mismatch:
    """The first token at which an answer is not what it has to be."""

    request: int
    client: int
    position: int
    token: int
    expected: int


@dataclass
class Report:
    """What one set-up did.

    Attributes:
        ties: answers that differ from the reference where that was undecided, see `NEAR_TIE`.
        closest_lead: by how much the least sure token of all references has won.
        drift: the most by which rounding moved the lead of a token.
        computed_tokens: that went through the model.
        seconds: of serving alone.
        settling_seconds: until all copies had ended, after each round, and at a restart.
        after_restart: the requests of the first round after a restart; empty: there was none.
    """

    name: str
    generations: list[Generation] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    ties: int = 0
    closest_lead: float = math.inf
    drift: float = 0.0
    computed_tokens: int = 0
    seconds: float = 0.0
    settling_seconds: float = 0.0
    after_restart: range = range(0)

    def add(self, turn: Turn, generation: Generation) -> None:
        """Take an answer, and compare it with the reference."""
        reference = turn.reference
        self.closest_lead = min(self.closest_lead, *reference.margins)
        pairs = zip(generation.tokens, reference.tokens, strict=True)
        for position, (token, expected) in enumerate(pairs):
            if token != expected:
                # From here on it is another text.
                if reference.margins[position] < NEAR_TIE:
                    self.ties += 1
                else:
                    request = len(self.generations)
                    self.mismatches.append(Mismatch(request, turn.client, position, token, expected))
                break
            self.drift = max(self.drift, abs(generation.margins[position] - reference.margins[position]))
        self.generations.append(generation)

    def hit_rate(self, tier: Literal["device", "host", "storage"]) -> float:
        """The share of all prompt tokens that this tier had."""
        hits: int = sum(getattr(generation, f"{tier}_hit_tokens") for generation in self.generations)
        return hits / self.prompt_tokens

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(generation.prompt_tokens for generation in self.generations)

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers."""
        ttft = [1e3 * generation.ttft_seconds for generation in self.generations]
        answered = sum(len(generation.tokens) for generation in self.generations)
        rates = {tier: self.hit_rate(tier) for tier in ("device", "host", "storage")}
        times = {
            "median": statistics.median(ttft),
            "p90": statistics.quantiles(ttft, n=10, method="inclusive")[-1] if len(ttft) > 1 else ttft[0],
        }
        if self.after_restart:
            times["median_after_restart"] = statistics.median(ttft[i] for i in self.after_restart)
        return {
            "name": self.name,
            "requests": len(self.generations),
            "hit_rate": rates | {"total": sum(rates.values())},
            "ttft_ms": times,
            "tokens_per_second": answered / self.seconds,
            "prompt_tokens_per_second": self.prompt_tokens / self.seconds,
            "computed_tokens": self.computed_tokens,
            "seconds": self.seconds,
            "settling_seconds": self.settling_seconds,
            "mismatches": len(self.mismatches),
            "ties": self.ties,
        }


def _device_pool(model: Any, pages: int) -> MhaDevicePool:
    layers = model.config.num_hidden_layers
    return MhaDevicePool(pages, PAGE_SIZE, layers, KV_HEADS, HEAD_DIM, dtype=model.dtype, device=model.device)


def warm_up(model: Any, length: int) -> None:
    """Serve a prompt of this length and forget it: the first forwards are slow, whatever they compute."""
    pool = _device_pool(model, -(-length // PAGE_SIZE) + 1)
    with UnifiedCache(CacheConfig(page_size=PAGE_SIZE, write_policy=None), pool) as cache:
        engine = Engine(model, cache, pool)
        engine.add([0] * length, 2)
        while not engine.idle:
            engine.step()


class Server:
    """The engine on a cache of one set-up.

    Args:
        model: serves all set-ups.
        setup: the tiers.
        sizes: of them.
        storage: URL or folder for stored pages, if the set-up has storage.
        name: of the model, in storage.
    """

    def __init__(self, model: Any, setup: Setup, sizes: Sizes, storage: str, name: str = "demo") -> None:
        self.report = Report(setup.name)
        self._model = model
        self._setup = setup
        self._sizes = sizes
        self._asked = 0
        self._config = CacheConfig(
            page_size=PAGE_SIZE,
            write_policy=setup.write_policy,
            hicache_ratio=sizes.host_ratio,
            storage=storage if setup.storage else None,
            model=name,
            prefetch_policy="wait_complete",
            prefetch_threshold=PAGE_SIZE,
            storage_warm=0.0,  # what is read is what was asked for, so that two runs show the same
        )
        self._start()

    def _start(self) -> None:
        pool = _device_pool(self._model, self._sizes.device_pages)
        self._cache = UnifiedCache(self._config, pool)
        self._engine = Engine(
            self._model, self._cache, pool, max_running=self._sizes.running, chunk=self._sizes.chunk
        )

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        answer: int,
        served: Callable[[], object],
        concurrent: int | None = None,
    ) -> list[Generation]:
        """Answer prompts; returns the answers in the order of the prompts.

        Args:
            prompts: all of one round.
            answer: tokens of each answer.
            served: called after each answer.
            concurrent: so many are asked at a time, the next when one is answered; None: all at once.

        Raises:
            CapacityError: the pools can not hold one of them.
        """
        engine, computed = self._engine, self._engine.computed_tokens
        waiting = deque(enumerate(prompts))
        places: dict[int, int] = {}
        answers: dict[int, Generation] = {}
        begun = time.perf_counter()
        while waiting or not engine.idle:
            while waiting and (concurrent is None or len(places) - len(answers) < concurrent):
                place, prompt = waiting.popleft()
                self._asked += 1
                salt = None if self._setup.shared else str(self._asked)
                places[engine.add(prompt, answer, cache_salt=salt)] = place
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                if event.generation is not None:
                    answers[places[event.id]] = event.generation
                    served()
        ended = time.perf_counter()
        # What this set-up still copies must not weigh on the next one's times.
        self._cache.flush()
        self.report.seconds += ended - begun
        self.report.settling_seconds += time.perf_counter() - ended
        self.report.computed_tokens += engine.computed_tokens - computed
        return [answers[place] for place in range(len(prompts))]

    def restart(self) -> None:
        """Come back with nothing but what is stored."""
        begun = time.perf_counter()
        self.close()
        self._start()
        self.report.settling_seconds += time.perf_counter() - begun

    def close(self) -> None:
        """End the cache. More than once is fine."""
        self._cache.close(timeout=_CLOSE_SECONDS)
