"""The engine of the demo on small pools, and questions to it whose answers hang on no near tie."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.cache.support import assert_nothing_held
from unified_cache import CacheConfig, UnifiedCache
from unified_cache.demo.engine import Engine
from unified_cache.demo.model import HEAD_DIM, KV_HEADS, VOCABULARY, ModelSize, make_model
from unified_cache.demo.workload import NEAR_TIE
from unified_cache.engines.transformers import Generation, generate_uncached
from unified_cache.errors import UnifiedCacheError
from unified_cache.pools.device import MhaDevicePool

PAGE = 16
SIZE = ModelSize(layers=2, hidden=64, intermediate=128)
SEED = 5
LONGEST = 512
LOGPROB = 1e-3  # by so much may a token's differ from what it is without a cache


def tiny_model() -> Any:
    """The model of these tests: the same weights in every process."""
    return make_model(SIZE, SEED, LONGEST, "cpu")


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@dataclass(frozen=True)
class Question:
    """A prompt, what transformers answers without a cache, and how the engine is asked."""

    prompt: list[int]
    expected: Generation
    arguments: Mapping[str, Any] = field(default_factory=dict)


def question(
    model: Any, rng: random.Random, prefix: Sequence[int], length: int, answer: int, **arguments: Any
) -> Question:
    """One that begins with `prefix`; its other tokens are drawn until no token of its answer is a tie."""
    while True:
        prompt = [*prefix, *text(rng, length)]
        expected = generate_uncached(model, prompt, answer)
        if min(expected.margins) > NEAR_TIE:
            return Question(prompt, expected, arguments)


def check(generation: Generation, asked: Question) -> None:
    """The same tokens as without a cache, as likely."""
    expected = asked.expected
    assert generation.tokens == expected.tokens
    pairs = zip(generation.logprobs, expected.logprobs, strict=True)
    assert max(abs(a - b) for a, b in pairs) < LOGPROB


def hits(generation: Generation) -> tuple[int, int, int]:
    return generation.device_hit_tokens, generation.host_hit_tokens, generation.storage_hit_tokens


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """The tokens of each forward, as the model's first module sees them."""
    forwards: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda module, inputs: forwards.append(inputs[0].numel())
    )
    try:
        yield forwards
    finally:
        hook.remove()


class Served:
    """An engine on a cache of its own.

    Args:
        parts: of the cache, such as its clock and its copies.
        settings: of its configuration.
    """

    def __init__(
        self,
        model: Any,
        pages: int,
        *,
        max_running: int = 8,
        chunk: int = 64,
        parts: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.model = model
        self.pool = MhaDevicePool(pages, PAGE, SIZE.layers, KV_HEADS, HEAD_DIM)
        defaults: dict[str, Any] = {
            "model": "test",
            "prefetch_policy": "wait_complete",
            "prefetch_threshold": PAGE,
            "storage_warm": 0.0,
        }
        config = CacheConfig(page_size=PAGE, **(defaults | settings))
        self.cache = UnifiedCache(config, self.pool, **(parts or {}))
        self.engine = Engine(model, self.cache, self.pool, max_running=max_running, chunk=chunk)

    def add(self, asked: Question) -> int:
        return self.engine.add(asked.prompt, len(asked.expected.tokens), **asked.arguments)

    def run(self, steps: int | None = None) -> dict[int, Generation | UnifiedCacheError]:
        """Step until the engine is idle, or so often; returns what has ended, by id."""
        ended: dict[int, Generation | UnifiedCacheError] = {}
        said: dict[int, list[int]] = {}
        while not self.engine.idle and steps != 0:
            steps = None if steps is None else steps - 1
            for event in self.engine.step():
                assert event.id not in ended
                if event.token is not None:
                    said.setdefault(event.id, []).append(event.token)
                if event.generation is not None:
                    # What it said as it went is what it says at the end.
                    assert event.generation.tokens[-len(said[event.id]) :] == said[event.id]
                    ended[event.id] = event.generation
                elif event.error is not None:
                    ended[event.id] = event.error
        return ended

    def ask(self, *asked: Question) -> list[Generation]:
        """Answer all of them at the same time, check the answers and that nothing is held on to."""
        ids = [self.add(each) for each in asked]
        ended = self.run()
        assert sorted(ended) == ids
        answers = []
        for id, each in zip(ids, asked, strict=True):
            answer = ended[id]
            assert isinstance(answer, Generation), answer
            check(answer, each)
            answers.append(answer)
        self.check_idle()
        return answers

    def check_idle(self) -> None:
        assert self.engine.idle
        assert_nothing_held(self.cache)
