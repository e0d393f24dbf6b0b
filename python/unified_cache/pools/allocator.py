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


def _as_mark(mark: Any) -> int:
    try:
        number = operator.index(mark)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise ArgumentError(f"mark must be an integer in 0..{2**64 - 1}, not {mark!r}")
    return number


class PageAllocator:
    """Hands out page ids and takes them back; ``free_pages + used_pages == num_pages`` at any time.

    A page carries the *mark* that it was freed under: a number that the caller gives to a moment in the
    engine's computing. Whoever takes pages can ask what the newest mark of them is, and wait for that
    moment before it writes to them.

    Args:
        num_pages: size of the pool.
        tier: the pool's name in messages, "device" or "host".
    """

    def __init__(self, num_pages: int, tier: str) -> None:
        self.num_pages = num_pages
        self._tier = tier
        self._stack = np.empty(num_pages, np.uint32)
        self._used = np.zeros(num_pages, np.bool_)
        self._marks = np.zeros(num_pages, np.uint64)
        self._any_mark = False  # until the first one, frees need not write them
        self._seen_at = np.zeros(num_pages, np.uint32)  # scratch of `_in_use`
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
        self._used[pages.astype(np.intp)] = True
        return pages

    def free(self, pages: npt.NDArray[Any] | Sequence[int], mark: int = 0) -> None:
        """Give pages back.

        Args:
            pages: the ids.
            mark: the moment after which nobody reads or writes them any more; 0: nobody does now.

        Raises:
            ArgumentError: a page that is not in the pool, is free already, or is listed twice, or a mark
                outside 0..2**64 - 1; nothing has changed then.
        """
        mark = _as_mark(mark)
        given = self._in_use(_as_array(pages), "is free already", "is given back twice in one call")
        self._used[given] = False
        # The page given back last is handed out first: it is the likeliest to be in a processor's cache.
        self._stack[self._free : self._free + given.size] = given
        self._free += given.size
        self._stamp(given, mark)

    def newest_mark(self, pages: npt.NDArray[Any] | Sequence[int]) -> int:
        """The largest mark that any of these pages was last freed under; 0 if none has one.

        Raises:
            ArgumentError: a page that is not in the pool.
        """
        given = self._in_pool(_as_array(pages))
        return int(self._marks[given].max(initial=0)) if self._any_mark else 0

    def used(self, pages: npt.NDArray[Any] | Sequence[int]) -> npt.NDArray[np.bool_]:
        """For each page whether it is handed out.

        Raises:
            ArgumentError: a page that is not in the pool.
        """
        return self._used[self._in_pool(_as_array(pages))]

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

    def reset(self, keep: npt.NDArray[Any] | Sequence[int] | None = None, mark: int = 0) -> None:
        """Take every page back, whoever owns it, but those in `keep`.

        Args:
            keep: pages that stay used until they are freed, such as those of a copy that is still under way.
            mark: as in `free`, for the pages that become free; those that were free keep theirs.

        Raises:
            ArgumentError: a page in `keep` that is not in the pool, is free, or is listed twice, or a mark
                outside 0..2**64 - 1; nothing has changed then.
        """
        mark = _as_mark(mark)
        kept = self._in_use(
            _as_array([] if keep is None else keep), "can not be kept: it is free", "is to be kept twice"
        )
        self._used[kept] = False
        self._stamp(np.flatnonzero(self._used), mark)
        self._used[:] = False
        self._used[kept] = True
        self._free = self.num_pages - kept.size
        # The lowest page is handed out first.
        self._stack[: self._free] = np.flatnonzero(~self._used)[::-1]

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

    def _stamp(self, pages: npt.NDArray[np.intp], mark: int) -> None:
        if mark or self._any_mark:
            self._marks[pages] = mark
            self._any_mark = True

    def _in_pool(self, given: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
        # numpy indexes with intp: turned into it once, not at each use.
        index = given.astype(np.intp)
        # As unsigned numbers the negative ones are too large as well.
        if index.size and index.view(np.uintp).max() >= self.num_pages:
            page = given[index.view(np.uintp) >= self.num_pages][0]
            raise ArgumentError(f"{self._tier} page {page} is not in 0..{self.num_pages - 1}")
        return index

    def _in_use(self, given: npt.NDArray[Any], if_free: str, if_twice: str) -> npt.NDArray[np.intp]:
        index = self._in_pool(given)
        used = self._used[index]
        if np.count_nonzero(used) != index.size:
            raise ArgumentError(f"{self._tier} page {index[~used][0]} {if_free}")
        if index.size > 1:
            # Each page gets its place in the list: of one that is listed twice, only one place is left.
            places = np.arange(index.size, dtype=np.uint32)
            self._seen_at[index] = places
            single = self._seen_at[index] == places
            if np.count_nonzero(single) != index.size:
                raise ArgumentError(f"{self._tier} page {index[~single][0]} {if_twice}")
        return index
