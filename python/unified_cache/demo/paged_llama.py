"""The forward of a Llama over paged keys and values, for a batch that mixes parts of prompts and decodes.

The tokens of all sequences lie one after the other in one tensor, as engines have them: projections, norms
and MLPs see a single long row, and attention alone knows where a sequence begins and ends. Weights are those
of a `LlamaForCausalLM` of transformers, whose own modules compute all that is not attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError
from unified_cache.pools.allocator import Pages
from unified_cache.pools.device import MhaDevicePool

__all__ = ["PagedLlama", "Part"]


@dataclass(frozen=True)
class Part:
    """What one sequence computes in a forward: a part of its prompt, or one token.

    Attributes:
        tokens: int64 (count,), at least one.
        start: position of the first of them. Keys and values of all positions before are in `pages`.
        pages: uint32, of all positions up to the last of `tokens`, as `Request.extend` returns them.
    """

    tokens: npt.NDArray[np.int64]
    start: int
    pages: Pages

    @property
    def stop(self) -> int:
        """One past the position of the last token."""
        return self.start + len(self.tokens)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Of its tokens."""
        return np.arange(self.start, self.stop)


@dataclass(frozen=True)
class _Batch:
    """What is the same for all layers of a forward.

    Attributes:
        counts: tokens of each part.
        stops: of each part.
        page, slot: where each token's keys and values go.
        reads: pages that each part reads.
        masks: what each of its tokens sees of them, bool (tokens, positions); None: the usual triangle if the
            part has several tokens, else all.
        rotation: cosines and sines of each token's position, (tokens, 1, head_dim).
    """

    counts: list[int]
    stops: list[int]
    page: torch.Tensor
    slot: torch.Tensor
    reads: list[torch.Tensor]
    masks: list[torch.Tensor | None]
    rotation: tuple[torch.Tensor, torch.Tensor]


class PagedLlama:
    """A Llama that reads and writes keys and values in the pages of a device pool.

    Args:
        model: a `LlamaForCausalLM`; its weights are used as they are, also when they change later.
        pool: the device pool, with the model's layers, heads of keys and values, elements a head and element
            type, on the model's device.

    Attributes:
        computed_tokens: tokens that went through the model so far.
        longest: the most tokens that a sequence may have.
        vocabulary: tokens are below it.

    Raises:
        ArgumentError: a model of another kind, or a pool that does not fit it.
    """

    def __init__(self, model: Any, pool: MhaDevicePool) -> None:
        config = model.config
        if getattr(config, "model_type", None) != "llama":
            raise ArgumentError(f"model must be a LlamaForCausalLM, not a {type(model).__name__}")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        wanted = (config.num_hidden_layers, config.num_key_value_heads, head_dim, model.dtype, model.device)
        given = (pool.layers, pool.heads, pool.head_dim, pool.dtype, pool.device)
        if wanted != given:
            raise ArgumentError(
                f"pool has (layers, heads, head_dim, dtype, device) {given}, the model needs {wanted}: "
                "make one like that"
            )
        self.computed_tokens = 0
        self.longest: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        self._model = model
        self._pool = pool

    def forward(self, parts: Sequence[Part], wait_until: Callable[[int], object]) -> torch.Tensor:
        """Compute the parts, and write their keys and values into their pages.

        Args:
            parts: at least one. No two of them write to the same slot.
            wait_until: called with each layer before that layer's pages are read, see
                `UnifiedCache.begin_forward`.

        Returns:
            float32 (parts, vocabulary): the logits of what follows each part.
        """
        llama = self._model.model
        with torch.no_grad():
            hidden = llama.embed_tokens(self._tensor(np.concatenate([part.tokens for part in parts])))
            self.computed_tokens += len(hidden)
            batch = self._batch(parts, hidden)
            for number, layer in enumerate(llama.layers):
                attention = layer.self_attn
                normed = layer.input_layernorm(hidden)
                wait_until(number)
                hidden = hidden + attention.o_proj(self._attend(number, attention, normed, batch))
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            last = self._tensor(np.cumsum(batch.counts) - 1)
            logits: torch.Tensor = self._model.lm_head(llama.norm(hidden[last])).float()
        return logits

    def _batch(self, parts: Sequence[Part], hidden: torch.Tensor) -> _Batch:
        size = self._pool.page_size
        positions = np.concatenate([part.positions for part in parts])
        pages = np.concatenate([part.pages[part.positions // size] for part in parts])
        cosines, sines = self._model.model.rotary_emb(hidden, position_ids=self._tensor(positions)[None])
        return _Batch(
            counts=[len(part.tokens) for part in parts],
            stops=[part.stop for part in parts],
            page=self._tensor(pages),
            slot=self._tensor(positions % size),
            reads=[self._tensor(part.pages[: -(-part.stop // size)]) for part in parts],
            masks=[self._mask(part) for part in parts],
            rotation=(cosines[0, :, None], sines[0, :, None]),
        )

    def _mask(self, part: Part) -> torch.Tensor | None:
        if part.start == 0 or len(part.tokens) == 1:
            return None
        seen = torch.ones(len(part.tokens), part.stop, dtype=torch.bool, device=self._pool.device)
        return seen.tril(part.start)

    def _attend(self, number: int, weights: Any, hidden: torch.Tensor, batch: _Batch) -> torch.Tensor:
        """Attention of one layer, (tokens, heads * head_dim), without its last projection.

        Args:
            number: of the layer.
            weights: its projections.
            hidden: (tokens, hidden size).
            batch: whose tokens they are.
        """
        heads = (len(hidden), -1, self._pool.head_dim)
        queries = _rotate(weights.q_proj(hidden).view(heads), batch.rotation)
        keys, values = self._pool.k(number), self._pool.v(number)
        # First into the pages, then out of them: a token sees its own part as it sees what came before.
        keys[batch.page, batch.slot] = _rotate(weights.k_proj(hidden).view(heads), batch.rotation)
        values[batch.page, batch.slot] = weights.v_proj(hidden).view(heads)
        attended = torch.empty_like(queries)
        begin = 0
        for count, stop, pages, mask in zip(batch.counts, batch.stops, batch.reads, batch.masks, strict=True):
            rows = slice(begin, begin + count)
            begin += count
            attended[rows] = torch.nn.functional.scaled_dot_product_attention(
                queries[rows].transpose(0, 1)[None],
                # (pages, page_size, heads, head_dim) -> (1, heads, tokens, head_dim)
                keys[pages].flatten(0, 1)[:stop].transpose(0, 1)[None],
                values[pages].flatten(0, 1)[:stop].transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None and count > 1,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return attended.flatten(1)

    def _tensor(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._pool.device)


def _rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of (tokens, heads, head_dim): the halves of a head are the coordinates of planes."""
    cosines, sines = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
