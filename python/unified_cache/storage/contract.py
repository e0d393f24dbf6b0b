"""What every storage backend can do."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

__all__ = ["PageStatus", "Store"]


class PageStatus(Enum):
    """What became of one page of a batched `Store.get`."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # short, torn, foreign, or its checksum does not fit: counts as a miss
    ERROR = "error"


class Store(ABC):
    """Pages by key. Calls come from one I/O thread for reads and one for writes, in batches.

    Memory is the caller's: views are read or filled in place and not kept after the call. After anything
    but `PageStatus.HIT` the content of a view is undefined.
    """

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> int:
        """How many of `keys`, from the first on and without a gap, are stored."""

    @abstractmethod
    def get(self, keys: Sequence[str], views: Sequence[memoryview]) -> list[PageStatus]:
        """Read each page into its view."""

    @abstractmethod
    def set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Write pages that are not there yet; returns how many, from the first on, are stored durably now.

        A page is visible under its key only when it is complete and durable.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget every page."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Plain numbers: at least `pages` and `bytes`."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; more than once is fine. Any other call is a `ClosedError` from then on."""
