"""The same requests, served with each set-up of the cache and checked against the reference."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unified_cache.cache import UnifiedCache
from unified_cache.config import CacheConfig
from unified_cache.demo.model import HEAD_DIM, KV_HEADS
from unified_cache.demo.workload import Traffic, Turn
from unified_cache.engines.transformers import Generation, PagedRunner
from unified_cache.pools.device import MhaDevicePool

__all__ = [
    "DEVICE_SHARE",
    "HOST_RATIO",
    "NO_CACHE",
    "PAGE_SIZE",
    "SETUPS",
    "Mismatch",
    "Report",
    "Server",
    "Setup",
    "device_pages",
]

PAGE_SIZE = 16
# The device pool holds this share of all conversations together, the host pool all of them.
DEVICE_SHARE = 0.3
HOST_RATIO = 4.0
# What is on its way to storage at the end may take this long; it is far less unless the disk is very slow.
_CLOSE_SECONDS = 60.0


@dataclass(frozen=True)
class Setup:
    """Which tiers there are."""

    name: str
    write_policy: Literal["write_through"] | None
    storage: bool


NO_CACHE = "no cache"
SETUPS = (
    Setup("device", None, False),
    Setup("+ host", "write_through", False),
    Setup("+ storage", "write_through", True),
)


def device_pages(traffic: Traffic) -> int:
    """The size of a device pool that is too small for all conversations, but not for one."""
    one = -(-traffic.longest // PAGE_SIZE)
    return max(round(traffic.expected * DEVICE_SHARE / PAGE_SIZE), one + 1)


@dataclass(frozen=True)
class Mismatch:
    """The first token at which an answer is not what it is without a cache."""

    request: int
    client: int
    position: int
    token: int
    expected: int


@dataclass
class Report:
    """What one set-up did.

    Attributes:
        seconds: of serving alone.
        settling_seconds: until all copies had ended, after each round, and at the restart.
        after_restart: the requests of the first round after the restart.
    """

    name: str
    generations: list[Generation] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    seconds: float = 0.0
    settling_seconds: float = 0.0
    after_restart: range = range(0)

    def add(self, turn: Turn, generation: Generation) -> None:
        """Take an answer, and compare it with the reference."""
        pairs = zip(generation.tokens, turn.reference.tokens, strict=True)
        for position, (token, expected) in enumerate(pairs):
            if token != expected:
                request = len(self.generations)
                self.mismatches.append(Mismatch(request, turn.client, position, token, expected))
                break
        self.generations.append(generation)

    def hit_rate(self, tier: Literal["device", "host", "storage"]) -> float:
        """The share of all prompt tokens that this tier had."""
        hits: int = sum(getattr(generation, f"{tier}_hit_tokens") for generation in self.generations)
        return hits / sum(generation.prompt_tokens for generation in self.generations)

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers."""
        ttft = [1e3 * generation.ttft_seconds for generation in self.generations]
        answered = sum(len(generation.tokens) for generation in self.generations)
        rates = {tier: self.hit_rate(tier) for tier in ("device", "host", "storage")}
        return {
            "name": self.name,
            "requests": len(self.generations),
            "hit_rate": rates | {"total": sum(rates.values())},
            "ttft_ms": {
                "median": statistics.median(ttft),
                "p90": statistics.quantiles(ttft, n=10, method="inclusive")[-1],
                "median_after_restart": statistics.median(ttft[i] for i in self.after_restart),
            },
            "tokens_per_second": answered / self.seconds,
            "seconds": self.seconds,
            "settling_seconds": self.settling_seconds,
            "mismatches": len(self.mismatches),
        }


class Server:
    """A model behind a cache of one set-up.

    Args:
        model: serves all set-ups.
        setup: the tiers.
        pages: of the device pool.
        folder: for stored pages, if the set-up has storage.
    """

    def __init__(self, model: Any, setup: Setup, pages: int, folder: str) -> None:
        self.report = Report(setup.name)
        self._model = model
        self._pages = pages
        self._config = CacheConfig(
            page_size=PAGE_SIZE,
            write_policy=setup.write_policy,
            hicache_ratio=HOST_RATIO,
            storage=folder if setup.storage else None,
            model="demo",
            prefetch_policy="wait_complete",
            prefetch_threshold=PAGE_SIZE,
            storage_warm=0.0,  # what is read is what was asked for, so that two runs show the same
        )
        self._start()

    def _start(self) -> None:
        model = self._model
        pool = MhaDevicePool(
            self._pages,
            PAGE_SIZE,
            model.config.num_hidden_layers,
            KV_HEADS,
            HEAD_DIM,
            dtype=model.dtype,
            device=model.device,
        )
        self._cache = UnifiedCache(self._config, pool)
        self._runner = PagedRunner(model, self._cache, pool)

    def serve(self, turns: Sequence[Turn], served: Callable[[], object]) -> None:
        """Answer one request after the other. Calls `served` after each."""
        begun = time.perf_counter()
        for turn in turns:
            generation = self._runner.generate(turn.prompt, len(turn.reference.tokens))
            self.report.add(turn, generation)
            served()
        ended = time.perf_counter()
        # What this set-up still copies must not weigh on the next one's times.
        self._cache.flush()
        self.report.seconds += ended - begun
        self.report.settling_seconds += time.perf_counter() - ended

    def restart(self) -> None:
        """Come back with nothing but what is stored."""
        begun = time.perf_counter()
        self.close()
        self._start()
        self.report.settling_seconds += time.perf_counter() - begun

    def close(self) -> None:
        """End the cache. More than once is fine."""
        self._cache.close(timeout=_CLOSE_SECONDS)
