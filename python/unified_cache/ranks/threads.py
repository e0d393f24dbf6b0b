"""Ranks that are threads of one process, or steps of one thread: for tests and simulations."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from unified_cache.errors import ClosedError, RankError, RankLostError, RanksDifferError
from unified_cache.ranks.agreement import (
    TIME_LIMIT,
    Agreement,
    Reduction,
    Vector,
    check_count,
    check_time_limit,
    check_vector,
)

__all__ = ["ThreadRanks"]

Result = TypeVar("Result")


class _Round:
    """A reduction, and who has come to it: ranks come to rounds in order, so a number is enough."""

    __slots__ = ("came", "number", "smallest")

    def __init__(self, number: int, vector: Vector) -> None:
        self.number = number
        self.smallest = vector
        self.came = 1


class _Meeting:
    """What the ranks of a group share."""

    def __init__(self, size: int, time_limit: float) -> None:
        self.size = size
        self.time_limit = time_limit
        self.begun = [0] * size  # rounds, by rank
        self.closed: set[int] = set()
        self._changed = threading.Condition()
        self._open: deque[_Round] = deque()  # rounds that some rank has come to, but not all
        self._lost: tuple[type[RankError], str] | None = None

    def begin(self, rank: int, vector: Vector) -> _Round:
        with self._changed:
            if rank in self.closed:
                raise ClosedError(f"rank {rank} of {self.size} was closed before this call")
            self._raise_if_lost()
            number = self.begun[rank]
            gone = (
                sorted(other for other in self.closed if self.begun[other] <= number) if self.closed else None
            )
            if gone:
                self._lose(RankLostError, f"{self._names(gone)} closed before reduction {number}")
            first = self._open[0].number if self._open else number
            if number - first == len(self._open):
                round_ = _Round(number, vector.copy())
                self._open.append(round_)
            else:
                round_ = self._open[number - first]
                if len(round_.smallest) != len(vector):
                    self._lose(
                        RanksDifferError,
                        f"reduction {number}: rank {rank} has {len(vector)} numbers, others "
                        f"{len(round_.smallest)}",
                    )
                np.minimum(round_.smallest, vector, out=round_.smallest)
                round_.came += 1
            self.begun[rank] += 1
            if round_.came == self.size:
                self._open.popleft()
                self._changed.notify_all()
            return round_

    def wait(self, round_: _Round, end: float) -> None:
        if round_.came == self.size:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: round_.came == self.size or self._lost is not None, end - time.monotonic()
            )
            if round_.came == self.size:
                return
            self._raise_if_lost()
            missing = [rank for rank in range(self.size) if self.begun[rank] <= round_.number]
            self._lose(
                RankLostError,
                f"{self._names(missing)} did not come to reduction {round_.number} within "
                f"{self.time_limit:g} s",
            )

    def close(self, rank: int) -> None:
        with self._changed:
            self.closed.add(rank)
            if self._open and self._open[-1].number >= self.begun[rank] and self._lost is None:
                self._lost = (
                    RankLostError,
                    f"{self._names([rank])} closed before reduction {self.begun[rank]}",
                )
            self._changed.notify_all()

    def fail(self, rank: int, reason: str) -> None:
        with self._changed:
            self.closed.add(rank)
            if self._lost is None:
                self._lost = (RankLostError, f"{self._names([rank])} failed: {reason}")
            self._changed.notify_all()

    def _names(self, ranks: Sequence[int]) -> str:
        numbers = ", ".join(map(str, ranks))
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers} of {self.size}"

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            kind, message = self._lost
            raise kind(message)

    def _lose(self, kind: type[RankError], message: str) -> None:
        self._lost = kind, message
        self._changed.notify_all()
        raise kind(message)


class _Waiting:
    """A `Reduction` of `ThreadRanks`."""

    __slots__ = ("_end", "_meeting", "_result", "_round")

    def __init__(self, meeting: _Meeting, round_: _Round) -> None:
        self._meeting = meeting
        self._round = round_
        self._end = time.monotonic() + meeting.time_limit
        self._result: Vector | None = None

    @property
    def done(self) -> bool:
        """See `Reduction`."""
        return self._round.came == self._meeting.size

    def wait(self) -> Vector:
        """See `Reduction`."""
        if self._result is None:
            self._meeting.wait(self._round, self._end)
            self._result = self._round.smallest.copy()
        return self._result


class ThreadRanks(Agreement):
    """One of several ranks in one process; `group` makes them.

    With a time limit of 0 nothing ever waits, so one thread can be all ranks, in an order that a seed gives:
    it begins on every rank, then waits on each. A wait before all have begun is a RankLostError that names
    who has not.
    """

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.reductions = 0

    @staticmethod
    def group(size: int, *, time_limit: float = TIME_LIMIT) -> list[ThreadRanks]:
        """So many ranks that agree among each other, by number.

        Args:
            size: how many.
            time_limit: seconds from the begin of a reduction until a rank that has not come is lost; 0: a
                wait that would wait is an error.

        Raises:
            ArgumentError: no such size or time limit.
        """
        check_count("size", size)
        check_time_limit(time_limit)
        meeting = _Meeting(size, time_limit)
        return [ThreadRanks(meeting, rank) for rank in range(size)]

    @staticmethod
    def run(group: Sequence[ThreadRanks], work: Callable[[ThreadRanks], Result]) -> list[Result]:
        """Do `work` as each of the ranks, on a thread each, and close them; what it returned, by rank.

        Raises:
            Exception: the first that `work` raised on a rank; the other ranks have ended too.
        """
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def run(ranks: ThreadRanks) -> None:
            try:
                results[ranks.rank] = work(ranks)
            except BaseException as error:  # the ranks that wait for this one must hear of it, whatever it is
                errors.append(error)
                ranks.fail(f"{type(error).__name__}: {error}")
            else:
                ranks.close()

        threads = [
            threading.Thread(target=run, args=(ranks,), name=f"rank {ranks.rank}", daemon=True)
            for ranks in group
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[ranks.rank] for ranks in group]

    def begin_reduce_min(self, vector: Vector) -> Reduction:
        """See `Agreement`.

        Raises:
            ArgumentError: it is something else.
            ClosedError: after `close`.
            RankLostError: a rank has ended.
            RanksDifferError: another rank came with a vector of another length.
        """
        check_vector(vector)
        waiting = _Waiting(self._meeting, self._meeting.begin(self.rank, vector))
        self.reductions += 1
        return waiting

    def fail(self, reason: str) -> None:
        """End as a process does that dies: all other ranks get RankLostError, at once."""
        self._meeting.fail(self.rank, reason)

    def close(self) -> None:
        """See `Agreement`; a rank that waits for this one gets RankLostError at once."""
        self._meeting.close(self.rank)
