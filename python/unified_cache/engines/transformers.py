"""Serve a causal model of `transformers` through a `UnifiedCache`.

`PagedRunner` is the smallest engine there can be: one request at a time, greedy. What it shows is the whole
contract: keys and values of a prefix that was computed before come from the pool's pages, only the rest of
the prompt is computed, and what is computed goes into the request's pages. `PagedModel` is the half of it
that knows no cache, for engines that schedule in another way.
"""

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.cache import UnifiedCache
from unified_cache.errors import ArgumentError, MissingDependencyError
from unified_cache.pools.allocator import Pages
from unified_cache.pools.device import MhaDevicePool
from unified_cache.request import Request

try:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer
except ImportError as error:
    raise MissingDependencyError(
        f"this needs transformers, which can not be imported ({error}): pip install 'unified-cache[demo]'"
    ) from None

__all__ = ["Generation", "PagedModel", "PagedRunner", "generate_uncached"]

_Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass
class Generation:
    """One answer, how long it took, and what of its prompt was not computed.

    Attributes:
        tokens: the answer.
        prompt_tokens: tokens of the prompt.
        device_hit_tokens: tokens of the prompt that lay in the device pool.
        host_hit_tokens: those that came from the host pool.
        storage_hit_tokens: those that came from storage.
        ttft_seconds: from the call to the first token of the answer.
        seconds: from the call to the last one.
        logprobs: natural logarithm of each token's probability.
        margins: for each token of the answer, by how much its logit won, in standard deviations of all
            logits of that step. Where it is near to nothing, rounding decides.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    ttft_seconds: float = 0.0
    seconds: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def _kv_argument(model: Any) -> str:
    """How the model's forward calls its cache: `past_key_values` has become `cache` in transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _logits(model: Any, tokens: _Tokens, kv: Any, kv_argument: str) -> torch.Tensor:
    """Compute `tokens`, which follow those that `kv` holds and are added to it; returns the logits of the
    token that comes next."""
    ids = torch.tensor(np.asarray(tokens, np.int64)[None], device=model.device)
    with torch.no_grad():
        out = model(ids, use_cache=True, logits_to_keep=1, **{kv_argument: kv})
    logits: torch.Tensor = out.logits[0, -1].float()
    return logits


class _Forward:
    """The model's forward over new tokens, with a cache of keys and values; adds to a `Generation`."""

    def __init__(self, model: Any, generation: Generation) -> None:
        self._model = model
        self.generation = generation
        self._argument = _kv_argument(model)
        self._begun = time.perf_counter()
        self.kv = DynamicCache(config=model.config)

    def __call__(self, tokens: Sequence[int]) -> int:
        """Compute `tokens`, which follow those that `kv` holds; returns the token that comes next."""
        logits = _logits(self._model, tokens, self.kv, self._argument)
        best = logits.topk(2)
        logprob = best.values[0] - logits.logsumexp(0)
        margin = (best.values[0] - best.values[1]) / logits.std()
        generation = self.generation
        token = int(best.indices[0])  # on a GPU this waits for the forward, so the clock is read after it
        generation.seconds = time.perf_counter() - self._begun
        if not generation.tokens:
            generation.ttft_seconds = generation.seconds
        generation.tokens.append(token)
        generation.logprobs.append(float(logprob))
        generation.margins.append(float(margin))
        return token


def generate_uncached(model: Any, tokens: Sequence[int], max_new_tokens: int) -> Generation:
    """What the model answers with nothing kept from earlier requests: the reference for `PagedRunner`.

    Greedy, and always `max_new_tokens` long. Within the request the model keeps keys and values, as usual.
    """
    _check(tokens, max_new_tokens)
    generation = Generation(prompt_tokens=len(tokens))
    forward = _Forward(model, generation)
    token = forward(tokens)
    for _ in range(max_new_tokens - 1):
        token = forward([token])
    return generation


class PagedModel:
    """A model whose keys and values lie in the pages of a device pool.

    Args:
        model: a causal language model of `transformers` with full attention in every layer.
        pool: a device pool with the model's layers, heads of keys and values, elements a head and element
            type.

    Raises:
        ArgumentError: a pool that does not fit the model, or a model whose layers keep something other than
            all keys and values.
    """

    def __init__(self, model: Any, pool: MhaDevicePool) -> None:
        layers = DynamicCache(config=model.config).layers
        if any(type(layer) is not DynamicLayer for layer in layers):
            raise ArgumentError(
                "model has layers that do not keep all keys and values: this runner can not serve it"
            )
        heads = model.config.num_key_value_heads
        # `head_dim` is not in every configuration, and None in some.
        head_dim = (
            getattr(model.config, "head_dim", None)
            or model.config.hidden_size // model.config.num_attention_heads
        )
        wanted, given = (len(layers), heads, head_dim), (pool.layers, pool.heads, pool.head_dim)
        if wanted != given:
            raise ArgumentError(
                f"pool has (layers, heads, head_dim) {given}, the model needs {wanted}: make one like that"
            )
        if pool.dtype != model.dtype:
            raise ArgumentError(
                f"pool holds {pool.dtype}, the model computes in {model.dtype}: make them equal"
            )
        self._model = model
        self._pool = pool
        self._argument = _kv_argument(model)

    def compute(self, tokens: _Tokens, pages: Pages, start: int) -> int:
        """Compute tokens at the positions from `start` on; returns the token that comes next, greedily.

        Reads the keys and values of all tokens before them from `pages`, and writes theirs there.

        Args:
            tokens: at least one.
            pages: of all positions up to the last of `tokens`, as `Request.extend` returns them.
            start: the position of the first one.
        """
        kv = DynamicCache(config=self._model.config)
        self.read(kv, pages, start)
        logits = _logits(self._model, tokens, kv, self._argument)
        self.write(kv, pages, start, start + len(tokens))
        return int(logits.argmax())

    def read(self, kv: DynamicCache, pages: Pages, length: int) -> None:
        """Fill an empty cache of the model with the first `length` tokens from the pool."""
        if length == 0:
            return
        index = self._index(pages[: -(-length // self._pool.page_size)])
        for layer in range(self._pool.layers):
            # (pages, page_size, heads, head_dim) -> (1, heads, tokens, head_dim)
            keys, values = (
                half[index].flatten(0, 1)[:length].transpose(0, 1)[None].to(self._model.device)
                for half in (self._pool.k(layer), self._pool.v(layer))
            )
            kv.update(keys, values, layer)

    def write(self, kv: DynamicCache, pages: Pages, start: int, stop: int) -> None:
        """Put keys and values of the tokens from `start` to `stop` into their slots."""
        positions = np.arange(start, stop)
        page = self._index(pages[positions // self._pool.page_size])
        slot = self._index(positions % self._pool.page_size)
        for layer, held in enumerate(kv.layers):
            for half, new in ((self._pool.k(layer), held.keys), (self._pool.v(layer), held.values)):
                half[page, slot] = new[0, :, start:stop].transpose(0, 1).to(half)

    def _index(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._pool.device)


class PagedRunner:
    """Serves one request after the other through a cache.

    Args:
        model: a causal language model of `transformers` with full attention in every layer.
        cache: the cache; its pool is `pool`.
        pool: the device pool that the cache manages, with the model's layers, heads of keys and values,
            elements a head and element type.

    Raises:
        ArgumentError: a pool that does not fit the model, or a model whose layers keep something other than
            all keys and values.
    """

    def __init__(self, model: Any, cache: UnifiedCache, pool: MhaDevicePool) -> None:
        self._paged = PagedModel(model, pool)
        self._model = model
        self._cache = cache

    def generate(self, tokens: Sequence[int], max_new_tokens: int) -> Generation:
        """Answer a prompt, greedily and always with `max_new_tokens` tokens.

        Whatever is raised inside, the request is aborted first: its pages and locks are given back.

        Raises:
            ArgumentError: an empty prompt, or no token asked for.
            CapacityError: the device pool can not hold the request.
            CopyError: what was hit did not arrive.
        """
        _check(tokens, max_new_tokens)
        generation = Generation(prompt_tokens=len(tokens))
        forward = _Forward(self._model, generation)
        request = self._cache.begin(tokens)
        try:
            self._answer(request, forward, tokens, max_new_tokens)
            request.finish()
        except BaseException:
            request.abort()
            raise
        self._cache.tick()
        return generation

    def _answer(
        self, request: Request, forward: _Forward, tokens: Sequence[int], max_new_tokens: int
    ) -> None:
        pages = self._admit(request, forward.generation)
        hit = request.device_length
        self._paged.read(forward.kv, pages, hit)
        token = forward(tokens[hit:])
        self._paged.write(forward.kv, pages, hit, len(tokens))
        # Others can hit the prompt from here on, and its way to the host begins behind the decoding.
        request.insert()
        self._cache.tick()
        for length in range(len(tokens), len(tokens) + max_new_tokens - 1):
            pages = request.extend([token])
            token = forward([token])
            self._paged.write(forward.kv, pages, length, length + 1)

    def _admit(self, request: Request, generation: Generation) -> Pages:
        """Bring everything that is hit to device; returns the pages for the whole prompt."""
        on_device = request.device_length
        request.wait_prefetch()
        request.load_back()
        pages = request.extend()
        request.wait()
        loaded = request.device_length - on_device
        generation.device_hit_tokens = on_device
        generation.storage_hit_tokens = min(request.storage_hit_length, loaded)
        generation.host_hit_tokens = loaded - generation.storage_hit_tokens
        return pages


def _check(tokens: Sequence[int], max_new_tokens: int) -> None:
    if len(tokens) == 0:
        raise ArgumentError("tokens must not be empty: there is nothing to answer")
    if max_new_tokens < 1:
        raise ArgumentError(f"max_new_tokens must be an integer >= 1, not {max_new_tokens}")
