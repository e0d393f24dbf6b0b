"""What a copy between two pools looks like once everything that is contiguous on both sides is merged."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.errors import ArgumentError
from unified_cache.pools.planes import PageShape, PoolPlanes

__all__ = ["Geometry", "Side", "geometry_of"]

_WIDEST = 16  # bytes that a thread of a GPU loads at once


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a copy: `PoolPlanes` without its tensors.

    Attributes:
        addresses: uint64 (layers, parts), where each plane begins.
        pages: pages of the pool.
        page_stride: bytes from a page to the next one within a plane; token_stride, head_stride likewise.
    """

    addresses: npt.NDArray[np.uint64]
    pages: int
    page_stride: int
    token_stride: int
    head_stride: int

    @classmethod
    def of(cls, planes: PoolPlanes) -> Side:
        """A pool's side."""
        return cls(
            planes.addresses, planes.pages, planes.page_stride, planes.token_stride, planes.head_stride
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """A page's part of one plane: ``tokens x heads`` runs of `run_bytes` each, heads innermost.

    Attributes:
        layers: planes' layers.
        parts: 2 or 1.
        tokens: 1 if the tokens are merged into the run; heads likewise. (Or the tokens into the heads.)
        heads: see tokens.
        run_bytes: bytes that are contiguous on both sides.
        width: the widest vector, in bytes, that divides the run and everything that an address is made of: a
            power of two up to 16.
        device: the device's side; its strides of merged dimensions mean nothing any more.
        host: the host's side.
    """

    layers: int
    parts: int
    tokens: int
    heads: int
    run_bytes: int
    width: int
    device: Side
    host: Side

    @property
    def part_bytes(self) -> int:
        """Bytes of a page in one plane."""
        return self.tokens * self.heads * self.run_bytes

    @property
    def one_run(self) -> bool:
        """A page's part of a plane is contiguous on both sides."""
        return self.tokens == 1 and self.heads == 1

    @property
    def seamless(self) -> bool:
        """And consecutive pages follow each other without a gap, on both sides."""
        return self.one_run and self.device.page_stride == self.host.page_stride == self.run_bytes


def geometry_of(shape: PageShape, device: Side, host: Side) -> Geometry:
    """How pages of `shape` lie on both sides.

    Raises:
        ArgumentError: a page whose part of a plane is too large for the kernel's 32-bit counters.
    """
    tokens, heads, run = shape.tokens, shape.heads, shape.run_bytes
    sides = (device, host)
    head_strides = [side.head_stride for side in sides]
    token_strides = [side.token_stride for side in sides]
    if heads == 1 or head_strides == [run, run]:
        run, heads = run * heads, 1
        if tokens == 1 or token_strides == [run, run]:
            run, tokens = run * tokens, 1
    elif tokens > 1 and token_strides == [heads * stride for stride in head_strides]:
        heads, tokens = heads * tokens, 1
    if max(run, heads, tokens) >= 2**30:
        raise ArgumentError(
            f"a page's part of a layer has {shape.tokens} tokens x {shape.heads} heads x "
            f"{shape.run_bytes} bytes: allowed are less than 2^30 bytes"
        )
    steps = [run]
    for side in sides:
        steps += [int(address) for address in side.addresses.flat]
        counts = (side.pages, tokens, heads)
        strides = (side.page_stride, side.token_stride, side.head_stride)
        steps += [stride for stride, count in zip(strides, counts, strict=True) if count > 1]
    width = math.gcd(_WIDEST, *steps)
    return Geometry(shape.layers, shape.parts, tokens, heads, run, width, device, host)
