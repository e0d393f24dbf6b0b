"""Pools in every layout, in plain CPU memory, and what a copy between two of them must do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from unified_cache.pools.planes import PoolPlanes

GUARD = 64  # bytes before and behind a pool that nobody may touch


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's pages; `head_bytes` are those of one head of one token."""

    layers: int
    parts: int
    tokens: int
    heads: int
    head_bytes: int


class Pool:
    """A pool over random bytes with guards around, `offset` bytes off a 64-byte boundary."""

    def __init__(self, layout: str, shape: Shape, pages: int, rng: np.random.Generator, offset: int = 0):
        dims, order = LAYOUTS[layout](shape, pages)
        size = int(np.prod(dims))
        self.memory = np.zeros(size + 3 * GUARD, np.uint8)
        self.memory[:] = rng.integers(0, 256, self.memory.size, np.uint8)
        begin = -self.memory.ctypes.data % 64 + GUARD // 2 + offset
        assert begin + size <= self.memory.size
        self.begin, self.size = begin, size
        # Named dimensions: always (layers, parts, pages, tokens, heads, bytes) whatever lies where.
        self.named = self.memory[begin : begin + size].reshape(dims).transpose(order)
        L, p, n = shape.layers, shape.parts, pages  # noqa: N806
        if layout in GAPS:  # of which the pool uses a part
            self.named = GAPS[layout](self.named, shape)
        assert self.named.shape == (L, p, n, shape.tokens, shape.heads, shape.head_bytes)
        self.planes = PoolPlanes(
            [torch.from_numpy(self.named[layer, part]) for layer in range(L) for part in range(p)], p
        )


def _layer_first(s: Shape, n: int):
    return (s.parts, s.layers, n, s.tokens, s.heads, s.head_bytes), (1, 0, 2, 3, 4, 5)


def _page_first(s: Shape, n: int):
    return (n, s.parts, s.tokens, s.layers, s.heads, s.head_bytes), (3, 1, 0, 2, 4, 5)


def _page_first_direct(s: Shape, n: int):
    return (n, s.parts, s.layers, s.tokens, s.heads, s.head_bytes), (2, 1, 0, 3, 4, 5)


def _page_head(s: Shape, n: int):
    return (n, s.heads, s.parts, s.tokens, s.layers, s.head_bytes), (4, 2, 0, 3, 1, 5)


def _block_major(s: Shape, n: int):
    """Engines: per layer (pages, 2, tokens, heads, dim)."""
    return (s.layers, n, s.parts, s.tokens, s.heads, s.head_bytes), (0, 2, 1, 3, 4, 5)


def _heads_first(s: Shape, n: int):
    """Engines: per layer (2, pages, heads, tokens, dim), each head with padding behind."""
    return (s.layers, s.parts, n, s.heads, s.tokens, s.head_bytes + 16), (0, 1, 2, 4, 3, 5)


LAYOUTS: dict[str, Callable[[Shape, int], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "layer_first": _layer_first,
    "page_first": _page_first,
    "page_first_direct": _page_first_direct,
    "page_head": _page_head,
    "block_major": _block_major,
    "heads_first": _heads_first,
}
GAPS = {"heads_first": lambda named, shape: named[..., : shape.head_bytes]}
DEVICE_LAYOUTS = ["layer_first", "block_major", "heads_first"]
HOST_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


def expected(source: Pool, source_pages, target: Pool, target_pages, layers: slice) -> np.ndarray:
    """The target's whole memory, guards included, after a copy of some layers: numpy's own indexing."""
    memory = target.memory.copy()
    offset = target.named.__array_interface__["data"][0] - target.memory.ctypes.data
    named = np.lib.stride_tricks.as_strided(memory[offset:], target.named.shape, target.named.strides)
    for one, other in zip(source_pages, target_pages, strict=True):
        named[layers, :, int(other)] = source.named[layers, :, int(one)]
    return memory
