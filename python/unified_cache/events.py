"""What a tree says about its content: one event per change of a tier, and a mirror of them.

A tree made with ``events=True`` queues an event whenever pages come to a tier or leave it;
``tree.take_events()`` hands them out in order. A page is named by its event hash: the first eight
bytes of its digest as a signed big-endian integer.

    mirror = Mirror()
    mirror.apply(tree.take_events())
    mirror.hashes("device")          # what a router may count on
"""

from collections.abc import Iterable
from typing import Literal, TypeAlias

from unified_cache._native import Cleared, Removed, Stored
from unified_cache.errors import ArgumentError, InvariantError

__all__ = ["Cleared", "Event", "Mirror", "Removed", "Stored", "Tier"]

Event: TypeAlias = Stored | Removed | Cleared
Tier: TypeAlias = Literal["device", "host"]


class Mirror:
    """The set of page hashes that each tier holds, kept up by replaying a tree's events.

    Strict about the order of events: a page stored twice, a page removed that is not there, or a
    page stored before its parent is an `InvariantError`, and the event is not applied.
    """

    def __init__(self) -> None:
        self._tiers: dict[str, set[int]] = {"device": set(), "host": set()}

    def apply(self, events: Iterable[Event]) -> None:
        """Replay `events`, oldest first."""
        for event in events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                self.clear()

    def clear(self) -> None:
        """Forget everything, as `Cleared` does."""
        for held in self._tiers.values():
            held.clear()

    def hashes(self, tier: Tier) -> frozenset[int]:
        """The event hashes of the pages that `tier` ("device" or "host") holds now."""
        if tier not in self._tiers:
            raise ArgumentError(f"tier: {tier!r} is none of {', '.join(self._tiers)}")
        return frozenset(self._tiers[tier])

    def __len__(self) -> int:
        """Pages held in both tiers together; a page in each counts twice."""
        return sum(map(len, self._tiers.values()))

    def __repr__(self) -> str:
        held = ", ".join(f"{tier}: {len(pages)} pages" for tier, pages in self._tiers.items())
        return f"Mirror({held})"

    def _store(self, event: Stored) -> None:
        held = self._tiers[event.tier]
        twice = held.intersection(event.hashes)
        if twice or len(set(event.hashes)) != len(event.hashes):
            raise InvariantError(f"stored twice on {event.tier}: {sorted(twice or event.hashes)}")
        if event.parent is not None and not any(event.parent in pages for pages in self._tiers.values()):
            raise InvariantError(f"stored on {event.tier} before its parent {event.parent}: {event.hashes}")
        held.update(event.hashes)

    def _remove(self, event: Removed) -> None:
        held = self._tiers[event.tier]
        missing = set(event.hashes) - held
        if missing or len(set(event.hashes)) != len(event.hashes):
            raise InvariantError(
                f"removed from {event.tier} but not there: {sorted(missing or event.hashes)}"
            )
        held.difference_update(event.hashes)
