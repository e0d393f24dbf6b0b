"""Which layer of a load has arrived: what lets a forward begin before the last one has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from unified_cache.errors import BusyError

if TYPE_CHECKING:
    from unified_cache.copies.engine import LayerEvents

__all__ = ["SETS", "LayerDoneCounter", "LayerWait"]

# One set that a forward reads, one that the next forward will read, and one that is being filled.
SETS = 3


class LayerWait:
    """What one forward waits for, layer by layer; made by `UnifiedCache.begin_forward`, for any thread."""

    def __init__(self, consumed: Sequence[LayerEvents] = ()) -> None:
        self._consumed = consumed

    def wait_until(self, layer: int) -> None:
        """Let the forward go on only when this layer of all that it reads is there.

        On a GPU the stream of the forward waits, not the caller.

        Raises:
            CopyError: a load has failed.
        """
        for events in self._consumed:
            events.wait(layer)


class LayerDoneCounter:
    """Sets of per-layer events, used in turn: a load produces one, a forward consumes those it depends on.

    Belongs to the scheduler's thread; the `LayerWait` of a forward may be used on another one.

    Args:
        new_events: makes the events of one load.
    """

    def __init__(self, new_events: Callable[[], LayerEvents]) -> None:
        self._new_events = new_events
        self._sets: list[LayerEvents | None] = [None] * SETS
        self._producer = SETS - 1

    @property
    def producer(self) -> int:
        """The set that the latest load fills."""
        return self._producer

    @property
    def ready(self) -> bool:
        """The next set is done, so that a load may use it."""
        events = self._sets[(self._producer + 1) % SETS]
        return events is None or events.done

    def update_producer(self) -> int:
        """Take the next set for a load that begins now; returns its index.

        Raises:
            BusyError: the load that used it last is not done; nothing has changed.
        """
        producer = (self._producer + 1) % SETS
        if not self.ready:
            raise BusyError(
                f"layer set {producer} of {SETS} is still being loaded: loads have to wait for it"
            )
        # New events, so that a forward that still holds those of an older load never waits for this one.
        events = self._new_events()
        events.begin()
        self._sets[producer] = events
        self._producer = producer
        return producer

    def events(self, index: int) -> LayerEvents:
        """The events of a set that was taken."""
        events = self._sets[index]
        if events is None:
            raise BusyError(f"layer set {index} was not taken by a load")
        return events

    def consumer(self, indices: Iterable[int]) -> LayerWait:
        """What a forward that reads these sets waits for."""
        return LayerWait([self.events(index) for index in indices])

    def reset(self) -> None:
        """Forget all loads."""
        self._sets = [None] * SETS
