"""How a pool lies in memory, in the one form that every copy understands.

A page holds ``layers x parts x tokens x heads`` runs of bytes; a run is the elements of one head, contiguous
in every layout. For each (layer, part) there is a *plane*: the address of its run 0 of page 0, and strides
from there to other pages, tokens and heads that are the same for all planes of the pool. All layouts that
the cache knows, and all that engines use for their own pools, are such planes; so one copy routine serves
every pair of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError

__all__ = ["PageShape", "PoolPlanes"]


@dataclass(frozen=True, slots=True)
class PageShape:
    """What a page holds, whatever the layout.

    Attributes:
        layers: layers of the model.
        parts: 2 for keys and values, 1 for one latent buffer (MLA).
        tokens: tokens a page.
        heads: heads of keys and values; 1 for a latent buffer.
        run_bytes: bytes of one head of one token.
    """

    layers: int
    parts: int
    tokens: int
    heads: int
    run_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers."""
        return self.layers * self.parts * self.tokens * self.heads * self.run_bytes


class PoolPlanes:
    """Where the runs of a pool's pages are: what copies see of it.

    Args:
        tensors: one for each (layer, part), layers outermost, each a view (pages, tokens, heads, elements)
            with contiguous elements; all on one device, of one dtype, shape and strides.
        parts: 2 or 1, see `PageShape`.

    Attributes:
        shape: what a page holds.
        pages: pages in the pool.
        page_stride: bytes from a page to the next one, within a plane; token_stride, head_stride likewise.
        addresses: uint64 (layers, parts), where each plane begins; of the device's address space.
        device: where the memory lies.
        tensors: as given; they keep the memory alive.

    Raises:
        ArgumentError: tensors that are not of one kind, or whose elements are not contiguous.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], parts: int) -> None:
        if not tensors or len(tensors) % parts:
            raise ArgumentError(f"tensors must be layers x {parts}, not {len(tensors)}")
        tensors = [_with_contiguous_elements(tensor) for tensor in tensors]
        first = tensors[0]
        if first.dim() != 4:
            raise ArgumentError(
                f"each tensor must be (pages, tokens, heads, elements), not {tuple(first.shape)}"
            )
        if first.numel() == 0 or first.stride(3) != 1:
            raise ArgumentError("each tensor must have elements, and the last dimension contiguous")
        for at, tensor in enumerate(tensors):
            kind = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if kind != (first.shape, first.stride(), first.dtype, first.device):
                raise ArgumentError(f"tensors must all be alike: number {at} is {kind}, the first one is not")
        size = first.element_size()
        pages, tokens, heads, elements = first.shape
        self.shape = PageShape(len(tensors) // parts, parts, tokens, heads, elements * size)
        self.pages = pages
        self.page_stride, self.token_stride, self.head_stride = (size * first.stride(i) for i in range(3))
        self.device = first.device
        self.tensors = tuple(tensors)
        addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        self.addresses: npt.NDArray[np.uint64] = addresses.reshape(-1, parts)

    @property
    def span_bytes(self) -> int:
        """Bytes from the beginning of a plane to the end of its last run."""
        shape = self.shape
        return (
            (self.pages - 1) * self.page_stride
            + (shape.tokens - 1) * self.token_stride
            + (shape.heads - 1) * self.head_stride
            + shape.run_bytes
        )

    def byte_views(self) -> list[npt.NDArray[np.uint8]]:
        """Each plane as a flat view of `span_bytes` bytes, writable, without a copy; in CPU memory only."""
        if self.device.type != "cpu":
            raise ArgumentError(f"planes on {self.device} can not be seen from the CPU")
        return [
            tensor.detach().view(torch.uint8).as_strided((self.span_bytes,), (1,)).numpy()
            for tensor in self.tensors
        ]


def _with_contiguous_elements(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; its last stride is 1, also where a dimension of one element says something else."""
    if tensor.dim() != 4 or tensor.shape[3] != 1:
        return tensor
    return tensor.as_strided(tensor.shape, (*tensor.stride()[:3], 1))
