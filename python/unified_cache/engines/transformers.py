"""Causal models of `transformers`: on the pages of a device pool, and without a cache.

`PrefixCache` is for `generate`, `BatchPrefixCache` for `generate_batch`, with all that they do. `PagedModel`
is what an engine needs that computes one request at a time: keys and values of what was computed before come
from the pool's pages, and those of what is computed go there; it knows no cache. An engine that computes many
requests at once is `unified_cache.demo.engine`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.engines.transformers_batch import BatchPrefixCache
from unified_cache.engines.transformers_cache import PrefixCache
from unified_cache.engines.transformers_kv import PrefixKV
from unified_cache.engines.transformers_model import DynamicCache, DynamicLayer, kv_argument
from unified_cache.errors import ArgumentError
from unified_cache.pools.allocator import Pages
from unified_cache.pools.device import MhaDevicePool

__all__ = ["BatchPrefixCache", "Generation", "PagedModel", "PrefixCache", "PrefixKV", "generate_uncached"]

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
        ttft_seconds: from the request's arrival to the first token of the answer.
        seconds: from its arrival to the last one.
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

    def add(self, token: int, logprob: float, margin: float, *, seconds: float) -> None:
        """The next token was found, so long after the request has arrived."""
        self.seconds = seconds
        if not self.tokens:
            self.ttft_seconds = seconds
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.margins.append(margin)


def _logits(model: Any, tokens: _Tokens, kv: Any, kv_argument: str) -> torch.Tensor:
    """Compute `tokens`, which follow those that `kv` holds and are added to it; returns the logits of the
    token that comes next."""
    ids = torch.tensor(np.asarray(tokens, np.int64)[None], device=model.device)
    with torch.no_grad():
        out = model(ids, use_cache=True, logits_to_keep=1, **{kv_argument: kv})
    logits: torch.Tensor = out.logits[0, -1].float()
    return logits


def generate_uncached(model: Any, tokens: Sequence[int], max_new_tokens: int) -> Generation:
    """What the model answers with nothing kept from earlier requests: the reference for engines with a cache.

    Greedy, and always `max_new_tokens` long. Within the request the model keeps keys and values, as usual.

    Raises:
        ArgumentError: an empty prompt, or no token asked for.
    """
    if len(tokens) == 0:
        raise ArgumentError("tokens must not be empty: there is nothing to answer")
    if max_new_tokens < 1:
        raise ArgumentError(f"max_new_tokens must be an integer >= 1, not {max_new_tokens}")
    generation = Generation(prompt_tokens=len(tokens))
    begun = time.perf_counter()
    kv, argument = DynamicCache(config=model.config), kv_argument(model)
    while len(generation.tokens) < max_new_tokens:
        logits = _logits(model, generation.tokens[-1:] or tokens, kv, argument)
        best = logits.topk(2)
        logprob = best.values[0] - logits.logsumexp(0)
        margin = (best.values[0] - best.values[1]) / logits.std()
        # On a GPU this waits for the forward, so the clock is read after it.
        found = int(best.indices[0]), float(logprob), float(margin)
        generation.add(*found, seconds=time.perf_counter() - begun)
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
                "model has layers that do not keep all keys and values: it can not be served from pages"
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
        self._argument = kv_argument(model)

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
