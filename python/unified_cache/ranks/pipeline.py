"""Stages of a pipeline: the first one decides, and what it decided goes on from stage to stage.

A later stage makes the same calls some ticks later, and must do what the first one did then, whatever its own
state: so it is told, in order, and does not vote. The first stage waits for it only when it is far behind.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

import numpy as np

from unified_cache.errors import RankError, RankLostError, RanksDifferError
from unified_cache.ranks.agreement import (
    TIME_LIMIT,
    Agreement,
    Reduction,
    Vector,
    check_count,
    check_time_limit,
    check_vector,
)
from unified_cache.ranks.threads import ThreadRanks

__all__ = ["MOST_BEHIND", "Link", "PipelineRanks", "ThreadLink"]

MOST_BEHIND = 64
"""Reductions that a stage may be behind the one before it."""


class Link(Protocol):
    """From a rank of one stage to the same rank of the next. Either side may close it."""

    def send(self, vector: Vector) -> None:
        """Hand a vector on; it is not kept. Waits only if as many as may be are on their way already.

        Raises:
            RankLostError: the next stage has ended, or took none of them within the time limit.
        """

    def begin_receive(self, length: int) -> Reduction:
        """The next vector, which has so many numbers; `wait` raises RankLostError if it does not come."""

    def close(self, *, lost: bool = False) -> None:
        """Nothing more will be sent or taken; more than once is fine.

        Args:
            lost: what was sent before need not arrive. Else the next stage, which may be behind, can still
                take it.
        """


class ThreadLink:
    """A `Link` within a process.

    Args:
        stage: the stage that sends.
        behind: vectors that may be on their way.
        time_limit: seconds from the begin of a receive until the sender is lost; 0: never wait.
    """

    def __init__(self, stage: int, *, behind: int = MOST_BEHIND, time_limit: float = TIME_LIMIT) -> None:
        self.stage = stage
        self.time_limit = time_limit
        self._behind = behind
        self._changed = threading.Condition()
        self._sent = 0
        self._asked = 0
        self._taken = 0
        self._on_the_way: dict[int, Vector] = {}
        self._closed = False

    def send(self, vector: Vector) -> None:
        """See `Link`."""
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._closed or len(self._on_the_way) < self._behind, self.time_limit
            )
            if self._closed:
                raise RankLostError(f"stage {self.stage + 1} has closed")
            if not room:
                raise RankLostError(
                    f"stage {self.stage + 1} does not follow: it has been {self._behind} reductions behind "
                    f"stage {self.stage}, as many as it may be, for {self.time_limit:g} s"
                )
            self._on_the_way[self._sent] = vector.copy()
            self._sent += 1
            self._changed.notify_all()

    def begin_receive(self, length: int) -> Reduction:
        """See `Link`."""
        with self._changed:
            self._asked += 1
            return _ThreadReceive(self, self._asked - 1, length)

    def close(self, *, lost: bool = False) -> None:
        """See `Link`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def arrived(self, number: int) -> bool:
        """This vector can be taken."""
        return number in self._on_the_way

    def take(self, number: int, end: float) -> Vector:
        """The vector that was sent as this one, waiting until `end`.

        Raises:
            RankLostError: it did not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: number in self._on_the_way or self._closed, end - time.monotonic())
            vector = self._on_the_way.pop(number, None)
            if vector is not None:
                self._changed.notify_all()
                return vector
            if self._closed:
                raise RankLostError(f"stage {self.stage} has closed before reduction {number}")
            raise RankLostError(
                f"stage {self.stage} did not send reduction {number} within {self.time_limit:g} s"
            )


class _ThreadReceive:
    """A vector on its way through a `ThreadLink`."""

    def __init__(self, link: ThreadLink, number: int, length: int) -> None:
        self._link = link
        self._number = number
        self._length = length
        self._end = time.monotonic() + link.time_limit
        self._result: Vector | None = None

    @property
    def done(self) -> bool:
        """See `Reduction`."""
        return self._result is not None or self._link.arrived(self._number)

    def wait(self) -> Vector:
        """See `Reduction`."""
        if self._result is None:
            vector = self._link.take(self._number, self._end)
            if len(vector) != self._length:
                raise RanksDifferError(
                    f"reduction {self._number}: stage {self._link.stage} sent {len(vector)} numbers, and "
                    f"{self._length} are expected"
                )
            self._result = vector
        return self._result


class _Passing:
    """A `Reduction` of `PipelineRanks`."""

    def __init__(self, ranks: PipelineRanks, under: Reduction) -> None:
        self._ranks = ranks
        self.under = under
        self.result: Vector | None = None

    @property
    def done(self) -> bool:
        """See `Reduction`."""
        return self.result is not None or self.under.done

    def wait(self) -> Vector:
        """See `Reduction`."""
        while self.result is None:
            self._ranks._pass_on()
        return self.result


class PipelineRanks(Agreement):
    """A rank of a stage: agrees with the others of its stage in the first one, and is told in the others.

    What was decided goes to the next stage when it is waited for, in the order of the begins.

    Args:
        group: the ranks of this stage that hold shards of one tree; only the first stage reduces over it.
        everyone: the same ranks of all stages.
        before: from the stage before; None for the first one.
        after: to the next stage; None for the last one.
    """

    def __init__(
        self, group: Agreement, everyone: Agreement, *, before: Link | None = None, after: Link | None = None
    ) -> None:
        self.rank = group.rank
        self.size = group.size
        self.reductions = 0
        self.decides = before is None
        self._group = group
        self._everyone = everyone
        self._before = before
        self._after = after
        self._under_way: deque[_Passing] = deque()
        self._lost: tuple[type[RankError], str] | None = None

    @staticmethod
    def of_threads(
        size: int, stages: int, *, behind: int = MOST_BEHIND, time_limit: float = TIME_LIMIT
    ) -> list[list[PipelineRanks]]:
        """Stages of so many ranks each, within one process, by stage and rank; see `ThreadRanks`.

        Args:
            size: ranks of a stage.
            stages: how many.
            behind: reductions that a stage may be behind the one before it.
            time_limit: seconds, as that of `ThreadRanks.group`; 0 where one thread is all ranks.

        Raises:
            ArgumentError: sizes or a time limit that can not be.
        """
        check_count("stages", stages)
        check_count("behind", behind)
        check_time_limit(time_limit)
        groups = [ThreadRanks.group(size, time_limit=time_limit) for _ in range(stages)]
        everyone = ThreadRanks.group(size * stages, time_limit=time_limit)
        links = [
            [ThreadLink(stage, behind=behind, time_limit=time_limit) for _ in range(size)]
            for stage in range(stages - 1)
        ]
        return [
            [
                PipelineRanks(
                    groups[stage][rank],
                    everyone[stage * size + rank],
                    before=links[stage - 1][rank] if stage else None,
                    after=links[stage][rank] if stage < stages - 1 else None,
                )
                for rank in range(size)
            ]
            for stage in range(stages)
        ]

    @property
    def alone(self) -> bool:
        """See `Agreement`: another stage is told, or tells."""
        return False

    def begin_reduce_min(self, vector: Vector) -> Reduction:
        """See `Agreement`; on later stages nothing but the vector's length counts."""
        check_vector(vector)
        self._raise_if_lost()
        try:
            if self._before is None:
                under = self._group.begin_reduce_min(vector)
            else:
                under = self._before.begin_receive(len(vector))
        except RankError as error:
            self._give_up(error)
            raise
        passing = _Passing(self, under)
        self._under_way.append(passing)
        self.reductions += 1
        return passing

    def reduce_min_of_stages(self, vector: Vector) -> Vector:
        """See `Agreement`."""
        return self._everyone.reduce_min(vector)

    def all_stages(self, well: bool) -> bool:
        """See `Agreement`."""
        return bool(self.reduce_min_of_stages(np.array([well], np.int64))[0])

    def close(self) -> None:
        """See `Agreement`; the stages before and after hear of it.

        What was decided is still taken by a stage that is behind: it may be about to close, too.
        """
        self._close(lost=self._lost is not None)

    def _close(self, *, lost: bool) -> None:
        for link in (self._before, self._after):
            if link is not None:
                link.close(lost=lost)
        self._group.close()
        self._everyone.close()

    def _pass_on(self) -> None:
        """Wait for the oldest reduction under way, and hand on what was decided."""
        self._raise_if_lost()
        oldest = self._under_way[0]
        try:
            vector = oldest.under.wait()
            if self._after is not None:
                self._after.send(vector)
        except RankError as error:
            self._give_up(error)
            raise
        self._under_way.popleft()
        oldest.result = vector

    def _give_up(self, error: RankError) -> None:
        self._lost = type(error), str(error)
        # The other stages would find out by themselves, but only after the time limit.
        self._close(lost=True)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            kind, message = self._lost
            raise kind(message)
