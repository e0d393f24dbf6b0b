"""Copies as the scheduler sees them: operations, which submissions merge, and may split."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from unified_cache.pools.allocator import Pages

if TYPE_CHECKING:
    from unified_cache.copies.engine import CopyHandle

__all__ = ["CacheOperation", "OperationQueue", "Part", "merge"]


class CacheOperation:
    """Pages that go from one tier to the other, and what is to happen when they have arrived.

    Args:
        direction: "backup" is device to host, "load" host to device.
        device_pages: ids.
        host_pages: as many ids.
        finish: called on the scheduler's thread once all its bytes have arrived.
        give_up: called on the scheduler's thread once a part of it has failed (`error` says why) and no
            thread touches its pages any more; False if its pages are in use, so that it has to be copied
            again.
        priority: the higher goes first.

    Attributes:
        error: why the last attempt failed.
        failures: attempts that failed.
        parts: submissions that carry a part of it, of the attempt under way.
        orphans: host pages of it that nobody wants any more, to be freed when it has ended: until then a copy
            may write to them.
        serial: counts operations from the first on, where there are other ranks.
        ended: it has come to its end on this rank, and counts as ended when it has on all.
        unneeded: nobody waits for it, so a failure is an end.
    """

    def __init__(
        self,
        direction: Literal["backup", "load"],
        device_pages: Pages,
        host_pages: Pages,
        finish: Callable[[], object],
        give_up: Callable[[], bool],
        *,
        priority: int = 0,
    ) -> None:
        self.direction = direction
        self.device_pages = device_pages
        self.host_pages = host_pages
        self.finish: Callable[[], object] = finish
        self.give_up: Callable[[], bool] = give_up
        self.priority = priority
        self.error: Exception | None = None
        self.failures = 0
        self.parts: list[CopyHandle] = []
        self.orphans: list[Pages] = []
        self.serial = 0
        self.ended = False
        self.unneeded = False
        self._submitted = 0  # pages, of the attempt under way
        self._arrived = 0  # pages whose part has ended, well or not

    @property
    def pages(self) -> int:
        """How many pages it moves."""
        return len(self.device_pages)

    @property
    def waiting(self) -> int:
        """Pages that were not submitted yet."""
        return self.pages - self._submitted

    @property
    def done(self) -> bool:
        """Its bytes are where they belong, or the copy of some of them has failed; seen before the ack."""
        return self.waiting == 0 and all(part.done for part in self.parts)

    @property
    def failed(self) -> Exception | None:
        """Why a part of the attempt under way, or the last one, failed."""
        return next((part.error for part in self.parts if part.error is not None), self.error)

    def take(self, most: int) -> Part:
        """The next part to submit, of at most so many pages."""
        start = self._submitted
        self._submitted = min(start + most, self.pages)
        return Part(self, start, self._submitted)

    def arrive(self, part: Part, error: Exception | None) -> bool:
        """A part has ended; True if it was the last one."""
        self._arrived += part.stop - part.start
        if error is None:
            return self._arrived == self.pages
        self.error = error
        return self.stop_here()

    def stop_here(self) -> bool:
        """Give up what was not submitted; True if no submission carries a part of it now."""
        self._arrived += self.waiting
        self._submitted = self.pages
        return self._arrived == self.pages

    def restart(self) -> None:
        """Begin anew after a failure."""
        self.error = None
        self.parts = []
        self._submitted = self._arrived = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Some pages of an operation, that go with one submission."""

    operation: CacheOperation
    start: int
    stop: int


def merge(parts: Sequence[Part]) -> tuple[Pages, Pages]:
    """Device pages and host pages of a submission that carries these parts."""
    if len(parts) == 1 and parts[0].stop - parts[0].start == parts[0].operation.pages:
        return parts[0].operation.device_pages, parts[0].operation.host_pages
    device = [part.operation.device_pages[part.start : part.stop] for part in parts]
    host = [part.operation.host_pages[part.start : part.stop] for part in parts]
    return np.concatenate(device), np.concatenate(host)


class OperationQueue:
    """Operations of one direction that wait: higher priority first, then as they came."""

    def __init__(self) -> None:
        self._operations: list[CacheOperation] = []

    def __len__(self) -> int:
        return len(self._operations)

    def push(self, operation: CacheOperation) -> None:
        """Add an operation behind those of its priority."""
        bisect.insort_right(self._operations, operation, key=lambda waiting: -waiting.priority)

    def remove(self, operation: CacheOperation) -> bool:
        """Take an operation out; False if nothing of it was left in the queue."""
        try:
            self._operations.remove(operation)
        except ValueError:
            return False
        return True

    def take(self, most_pages: int | None = None) -> list[Part]:
        """The parts that the next submission carries, of at most `most_pages` pages together.

        One that has failed twice goes alone: if it fails again it takes nobody else with it.
        """
        taken: list[Part] = []
        left = most_pages
        while self._operations and (left is None or left > 0):
            operation = self._operations[0]
            alone = operation.failures > 1
            if alone and taken:
                break
            part = operation.take(operation.waiting if left is None else left)
            taken.append(part)
            if left is not None:
                left -= part.stop - part.start
            if operation.waiting == 0:
                # From the front, so this costs as much as the queue is long: acceptable while it is short.
                self._operations.pop(0)
            if alone:
                break
        return taken

    def clear(self) -> list[CacheOperation]:
        """Empty the queue; returns what was in it."""
        operations, self._operations = self._operations, []
        return operations
