"""Pools of all layouts as plain torch tensors: what copies are checked against, independent of `pools/`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from unified_cache.pools.planes import PoolPlanes

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

# For each layout its dimensions from the outermost to the innermost one.
# N pages, K keys and values (or the one latent buffer), P tokens, L layers, H heads, D elements.
_ORDER = {
    "layer_first": "KLNPHD",
    "page_first": "NKPLHD",
    "page_first_direct": "NKLPHD",
    "page_head": "NHKPLD",
}


@dataclass(frozen=True)
class Shape:
    """What a pool holds; `parts` is 1 for a latent buffer (MLA), which has 1 head."""

    tokens: int
    layers: int
    heads: int
    elements: int
    parts: int = 2
    dtype: torch.dtype = torch.float32

    @property
    def page_bytes(self) -> int:
        elements = self.tokens * self.layers * self.heads * self.elements * self.parts
        return elements * self.dtype.itemsize


class TensorPool:
    """A pool of one layout with random bytes in it.

    Attributes:
        tensor: the memory, in the layout's own order of dimensions.
        bytes: the same as uint8 (pages, layers, parts, tokens, heads, bytes of a run), a view: what it means.
        planes: what a copy engine takes.
    """

    def __init__(self, layout: str, pages: int, shape: Shape, seed: int = 0) -> None:
        order = _ORDER[layout]
        sizes = {
            "N": pages,
            "K": shape.parts,
            "P": shape.tokens,
            "L": shape.layers,
            "H": shape.heads,
            "D": shape.elements,
        }
        self.tensor = torch.zeros([sizes[name] for name in order], dtype=shape.dtype)
        raw = self.tensor.view(torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
        meaning = [order.index(name) for name in "NLKPHD"]
        self.bytes = raw.permute(meaning)
        elements = self.tensor.permute(meaning)
        planes = [elements[:, layer, part] for layer in range(shape.layers) for part in range(shape.parts)]
        self.planes = PoolPlanes(planes, shape.parts)


def page_ids(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


def random_ids(rng: np.random.Generator, count: int, pages: int) -> np.ndarray:
    """`count` different pages out of `pages`, in any order."""
    return rng.permutation(pages)[:count].astype(np.uint32)


def index(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))
