"""What ranks tell one another at a tick: one vector, the same places for everybody, at every tick.

Page accounting is the same on every rank, because all make the same calls. What is not the same is when a
copy ends and what storage answers: that is told here, and counts when it is true on all ranks. What must be
the same is told too, with its negative beside it, so that the smallest of both shows a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.errors import RanksDifferError
from unified_cache.ranks.agreement import Agreement, Reduction

__all__ = ["EQUAL", "LEAST", "LENGTH", "SLOTS", "Outcomes", "TickAgreement"]

# Storage operations that may be under way, each with its place in the vector. Those past it wait.
SLOTS = 64

# What must be the same on all ranks; the first of them that differs is reported.
EQUAL = (
    "tick",
    "resets",
    "backups",
    "loads",
    "storage_operations",
    "storage_waiting",
    "device_free_pages",
    "host_free_pages",
    "digest",
)

# What counts is the smallest of these.
LEAST = (
    "ended_backups",  # the leading ones: acks are taken in the order of their copies
    "ended_loads",
    "microseconds",  # of the clock
    "can_read",  # see `StorageLink.can_read`
    "can_write",
    "load_back_threshold",
    "prefetch_threshold",
    "attached",  # 1: the storage to be attached can be used; 0: it can not, or there is none
)

_EQUAL_END = 2 * len(EQUAL)
_LEAST_END = _EQUAL_END + len(LEAST)
LENGTH = _LEAST_END + 2 * SLOTS
_HIGHEST = np.iinfo(np.int64).max


@dataclass(slots=True)
class Outcomes:
    """What one rank tells, or what all agree on.

    Attributes:
        least: by the names of `LEAST`.
        states: of the storage operations under way, in the order in which they began; see
            `unified_cache.controller.storage_operations`.
        values: pages, likewise.
    """

    least: dict[str, int]
    states: Sequence[int] = ()
    values: Sequence[int] = ()


class TickAgreement:
    """One reduction a tick.

    Args:
        agreement: of the ranks that hold shards of one tree.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._vector = np.zeros(LENGTH, np.int64)
        self._equal: Sequence[int] = ()
        self._reduction: Reduction | None = None

    def begin(self, equal: Sequence[int], outcomes: Outcomes) -> None:
        """Tell the others.

        Args:
            equal: in the order of `EQUAL`.
            outcomes: of this rank.

        Raises:
            RankLostError: a rank has ended.
        """
        vector, count = self._vector, len(outcomes.states)
        self._equal = equal
        vector[: len(EQUAL)] = equal
        np.negative(vector[: len(EQUAL)], out=vector[len(EQUAL) : _EQUAL_END])
        vector[_EQUAL_END:_LEAST_END] = [outcomes.least[name] for name in LEAST]
        vector[_LEAST_END : _LEAST_END + count] = outcomes.states
        vector[_LEAST_END + SLOTS : _LEAST_END + SLOTS + count] = outcomes.values
        self._reduction = self.agreement.begin_reduce_min(vector)

    def end(self) -> Outcomes:
        """What all ranks agree on.

        Raises:
            RankLostError: a rank has ended, or did not come within the time limit.
            RanksDifferError: ranks hold what is not the same.
        """
        assert self._reduction is not None
        agreed, self._reduction = self._reduction.wait(), None
        lowest, highest = agreed[: len(EQUAL)], -agreed[len(EQUAL) : _EQUAL_END]
        if not self.agreement.decides:
            # What was decided is not about this rank: it has to be the same here, too.
            lowest, highest = np.minimum(lowest, self._equal), np.maximum(highest, self._equal)
        if (lowest != highest).any():
            self._differ(int((lowest != highest).argmax()), lowest)
        numbers = agreed.tolist()
        count = self._equal[EQUAL.index("storage_operations")]
        return Outcomes(
            dict(zip(LEAST, numbers[_EQUAL_END:_LEAST_END], strict=True)),
            numbers[_LEAST_END : _LEAST_END + count],
            numbers[_LEAST_END + SLOTS : _LEAST_END + SLOTS + count],
        )

    def _differ(self, at: int, lowest: npt.NDArray[np.int64]) -> None:
        agreement, tick = self.agreement, self._equal[0]
        if not agreement.decides:
            raise RanksDifferError(
                f"at tick {tick} rank {agreement.rank} of a later stage has {EQUAL[at]}={self._equal[at]}, "
                f"the first stage decided with {int(lowest[at])}"
            )
        # Everybody has seen the same vector, so everybody is here: who is it?
        places = np.full(agreement.size, _HIGHEST, np.int64)
        places[agreement.rank] = self._equal[at]
        everywhere = agreement.reduce_min(places).tolist()
        most = max(everywhere, key=lambda value: (everywhere.count(value), -everywhere.index(value)))
        others = [f"rank {rank} has {value}" for rank, value in enumerate(everywhere) if value != most]
        raise RanksDifferError(
            f"at tick {tick} ranks differ in {EQUAL[at]}: {', '.join(others)}, the others {most}"
        )
