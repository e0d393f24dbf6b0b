"""Which pages of a pool are free."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unified_cache.errors import ArgumentError, CapacityError, InvariantError

__all__ = ["PageAllocator", "Pages", "as_count"]

Pages = npt.NDArray[np.uint32]


def as_count(value: Any, name: str) -> int:
    """A number of pages or tokens as a plain integer: a numpy integer would wrap in a subtraction.

    Raises:
        ArgumentError: not an integer, or a negative one.
    """
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise ArgumentError(f"{name} must be an integer >= 0, not {value!r}")
    return count


def _as_array(pages: Any) -> npt.NDArray[Any]:
    try:
        given = np.asarray(pages)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"pages must be one-dimensional integers: {error}") from None
    if given.size == 0:
        return np.empty(0, np.uint32)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ArgumentError(f"pages must be one-dimensional integers, not {given.dtype} {given.shape}")
    return given


class PageAllocator:
    """Hands out page ids and takes them back; ``free_pages + used_pages == num_pages`` at any time.

    Args:
        num_pages: size of the pool.
        tier: the pool's name in messages, "device" or "host".
    """

    def __init__(self, num_pages: int, tier: str) -> None:
        self.num_pages = num_pages
        self._tier = tier
        self._stack = np.empty(num_pages, np.uint32)
        self._used = np.empty(num_pages, np.bool_)
        self._free = 0
        self.reset()

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._free

    @property
    def used_pages(self) -> int:
        """Pages that were handed out."""
        return self.num_pages - self._free

    def alloc(self, count: int) -> Pages:
        """Take `count` pages, in an array of their own.

        Raises:
            ArgumentError: not an integer, or a negative one.
            CapacityError: fewer are free.
        """
        count = as_count(count, "count")
        if count > self._free:
            raise CapacityError(
                f"{count} {self._tier} pages asked for, {self._free} of {self.num_pages} are free"
            )
        self._free -= count
        pages = self._stack[self._free : self._free + count][::-1].copy()
        self._used[pages] = True
        return pages

    def free(self, pages: npt.NDArray[Any] | Sequence[int]) -> None:
        """Give pages back.

        Raises:
            ArgumentError: a page that is not in the pool, is free already, or is listed twice; nothing
                has changed then.
        """
        given = self._in_use(_as_array(pages), "is free already", "is given back twice in one call")
        self._used[given] = False
        # The page given back last is handed out first: it is the likeliest to be in a processor's cache.
        self._stack[self._free : self._free + given.size] = given
        self._free += given.size

    def require_used(self, pages: Any, first: int = 0) -> None:
        """Check that these pages were handed out.

        Args:
            pages: the ids.
            first: how many at the front are not looked at.

        Raises:
            ArgumentError: a page that is not in the pool, is free, or is listed twice.
        """
        self._in_use(
            _as_array(pages)[first:], "was not handed out: it is free", "is listed twice in one call"
        )

    def _in_use(self, given: npt.NDArray[Any], if_free: str, if_twice: str) -> npt.NDArray[Any]:
        outside = (given < 0) | (given >= self.num_pages)
        if outside.any():
            page = given[outside][0]
            raise ArgumentError(f"{self._tier} page {page} is not in 0..{self.num_pages - 1}")
        unused = ~self._used[given]
        if unused.any():
            raise ArgumentError(f"{self._tier} page {given[unused][0]} {if_free}")
        ordered = np.sort(given)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise ArgumentError(f"{self._tier} page {ordered[1:][twice][0]} {if_twice}")
        return given

    def reset(self) -> None:
        """Take every page back, whoever owns it."""
        self._stack[:] = np.arange(self.num_pages, dtype=np.uint32)[::-1]
        self._used[:] = False
        self._free = self.num_pages

    def check(self) -> None:
        """Compare the free list with the marks of the used pages.

        Raises:
            InvariantError: they disagree.
        """
        free = self._stack[: self._free]
        if np.unique(free).size != free.size:
            raise InvariantError(f"a {self._tier} page is in the free list twice")
        if self._used[free].any() or int(self._used.sum()) != self.used_pages:
            raise InvariantError(f"free + used {self._tier} pages are not {self.num_pages}")
