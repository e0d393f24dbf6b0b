"""Pools in CPU memory as the native copies see them."""

from __future__ import annotations

from unified_cache._native import PageMemory
from unified_cache.errors import ArgumentError
from unified_cache.pools.planes import PoolPlanes

__all__ = ["page_memory"]


def page_memory(pool: PoolPlanes, name: str, layer: int | None = None) -> PageMemory:
    """The memory of a pool, or of one layer of it.

    Raises:
        ArgumentError: it is not in CPU memory, or its runs overlap; the message begins with `name`.
    """
    shape = pool.shape
    try:
        views = pool.byte_views()
        if layer is not None:
            views = views[layer * shape.parts : (layer + 1) * shape.parts]
        return PageMemory(
            views,
            pages=pool.pages,
            tokens=shape.tokens,
            heads=shape.heads,
            run_bytes=shape.run_bytes,
            page_stride=pool.page_stride,
            token_stride=pool.token_stride,
            head_stride=pool.head_stride,
        )
    except ArgumentError as error:
        raise ArgumentError(f"the {name} pool can not be copied: {error}") from None
