"""Storage operations under way, oldest first: what they have come to here, and everywhere.

What a thread has read or written on one rank counts when it has been on all of them. So the scheduler looks
at an operation in two steps: the threads' results make its `outcome`; what all ranks agree on is *applied*,
and only that changes tree, pools and queues. A rank that is alone applies its outcome at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from unified_cache.pools.allocator import Pages

__all__ = ["ANSWERED", "ENDED", "FINAL", "RUNNING", "Quarantine", "StorageOperation", "StorageOperations"]

# States, of which the least counts. A look-up goes from RUNNING to ANSWERED; what reads or writes goes from
# RUNNING to FINAL, when no more will come of it, and to ENDED, when no thread touches its pages any more.
RUNNING, ANSWERED, FINAL, ENDED = range(4)


class StorageOperation:
    """Something that a thread does for us.

    Attributes:
        agreed: the state that all ranks have reached, of the phase under way.
    """

    agreed = RUNNING

    @property
    def outcome(self) -> tuple[int, int]:
        """Its state on this rank, and its pages: found, read from the front, or stored from the front."""
        raise NotImplementedError


class Quarantine(StorageOperation):
    """Pages that jobs from before a reset still touch."""

    def __init__(self, pages: Pages, jobs: set[object], late: set[object]) -> None:
        self.pages = pages
        self.jobs = jobs
        self._late = late

    @property
    def outcome(self) -> tuple[int, int]:
        """See `StorageOperation`."""
        if not self.jobs:
            return ENDED, 0
        return (FINAL if self.jobs <= self._late else RUNNING), 0


class StorageOperations:
    """Those of a cache, in order.

    Args:
        most: so many have a place in what ranks tell one another; None: this rank is alone.
        decides: what this rank says counts.

    Attributes:
        decides: else no operation may be given up here: the rank has to come as far as those that decide,
            where one may have begun just before it would have been given up.
    """

    def __init__(self, most: int | None = None, *, decides: bool = True) -> None:
        self._most = most
        self.decides = decides
        self._running: dict[StorageOperation, None] = {}

    @property
    def alone(self) -> bool:
        """There are no other ranks: what is true here is true everywhere."""
        return self._most is None

    @property
    def room(self) -> int:
        """So many more may begin."""
        return 2**62 if self._most is None else max(self._most - len(self._running), 0)

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, operation: object) -> bool:
        return operation in self._running

    def begin(self, operation: StorageOperation) -> None:
        """It has its place from now on. A quarantine may take the place of what was there before a reset."""
        self._running[operation] = None

    def end(self, operation: StorageOperation) -> None:
        """Its place is free."""
        self._running.pop(operation, None)

    def list(self) -> Sequence[StorageOperation]:
        """In the order in which they began."""
        return list(self._running)
