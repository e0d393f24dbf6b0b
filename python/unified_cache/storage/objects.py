"""Where the objects of host pages lie: each page one of them, or one for each of its head groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from unified_cache.pools.allocator import Pages
    from unified_cache.pools.host import HostPool

__all__ = ["PageObjects"]


class PageObjects:
    """The objects of a pool's pages.

    Args:
        pool: whose pages are contiguous.
        groups: objects a page; with more than one, heads are outermost in a page.

    Attributes:
        bytes: of each object.
    """

    def __init__(self, pool: HostPool, groups: int) -> None:
        self._pool = pool
        self._groups = groups
        self.bytes = pool.page_bytes // groups

    def of(self, pages: Pages) -> tuple[list[memoryview], npt.NDArray[np.uint64]]:
        """A writable view of each object, page by page, and uint64 (objects,), where they lie."""
        views = [self._pool.page_view(page) for page in pages.tolist()]
        addresses = self._pool.get_page_buffers(pages).addresses[:, 0]
        if self._groups == 1:
            return views, addresses
        starts = np.arange(self._groups, dtype=np.uint64) * np.uint64(self.bytes)
        cut = [
            view[start : start + self.bytes] for view in views for start in range(0, len(view), self.bytes)
        ]
        return cut, (addresses[:, np.newaxis] + starts).ravel()
