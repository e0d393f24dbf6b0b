"""Where the objects of host pages lie: of each pool a page is one of them, or one for each head group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from unified_cache.pools.allocator import Pages
    from unified_cache.pools.host import HostPool
    from unified_cache.storage.keys import KeySpace

__all__ = ["PageObjects"]

_Objects = tuple[list[memoryview], npt.NDArray[np.uint64]]


class PageObjects:
    """The objects of the pages of all pools, in the order of `KeySpace.keys`.

    Args:
        pools: whose pages are contiguous.
        keys: their names; of a pool with more than one group, heads are outermost in a page.

    Attributes:
        page_bytes: of all objects of a page.
        largest: bytes of the largest object.
    """

    def __init__(self, pools: Sequence[HostPool], keys: KeySpace) -> None:
        parts = [_PoolObjects(pool, of.groups) for pool, of in zip(pools, keys.pools, strict=True)]
        self._parts = parts
        self._written = [part for part, of in zip(parts, keys.pools, strict=True) if of.writes]
        self.page_bytes = sum(pool.page_bytes for pool in pools)
        self.largest = max(part.bytes for part in parts)

    def of(self, pages: Pages) -> _Objects:
        """A writable view of each object, page by page, and uint64 (objects,), where they lie."""
        return _objects(self._parts, pages)

    def written(self, pages: Pages) -> _Objects:
        """The same of those that this rank writes."""
        return _objects(self._written, pages)


class _PoolObjects:
    """Those of one pool."""

    def __init__(self, pool: HostPool, groups: int) -> None:
        self._pool = pool
        self.groups = groups
        self.bytes = pool.page_bytes // groups

    def of(self, pages: Pages) -> _Objects:
        views = [self._pool.page_view(page) for page in pages.tolist()]
        addresses = self._pool.get_page_buffers(pages).addresses[:, 0]
        if self.groups == 1:
            return views, addresses
        starts = np.arange(self.groups, dtype=np.uint64) * np.uint64(self.bytes)
        cut = [
            view[start : start + self.bytes] for view in views for start in range(0, len(view), self.bytes)
        ]
        return cut, (addresses[:, np.newaxis] + starts).ravel()


def _objects(parts: Sequence[_PoolObjects], pages: Pages) -> _Objects:
    if len(parts) == 1:
        return parts[0].of(pages)
    views: list[memoryview] = []
    addresses = np.empty((len(pages), sum(part.groups for part in parts)), np.uint64)
    each, start = [], 0
    for part in parts:
        found, places = part.of(pages)
        each.append((found, part.groups))
        addresses[:, start : start + part.groups] = places.reshape(len(pages), part.groups)
        start += part.groups
    for page in range(len(pages)):
        for found, groups in each:
            views += found[page * groups : (page + 1) * groups]
    return views, addresses.ravel()
