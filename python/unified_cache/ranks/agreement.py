"""How ranks agree: the smallest of what they say, number by number.

The ranks that hold shards of one tree make the same calls on their own trees. What only one of them can see
(a copy has ended, a page was read) counts when all have seen it: each says how far it is, and the smallest
number is true for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unified_cache.errors import ArgumentError

__all__ = [
    "TIME_LIMIT",
    "Agreement",
    "OneRank",
    "Reduction",
    "Vector",
    "check_count",
    "check_time_limit",
    "check_vector",
]

Vector = npt.NDArray[np.int64]

_INT64 = np.dtype(np.int64)

TIME_LIMIT = 60.0
"""Seconds after which a rank that has not come is taken for lost, unless somebody says otherwise."""


def check_vector(vector: object) -> None:
    """Raises ArgumentError for what can not be reduced."""
    if not isinstance(vector, np.ndarray) or vector.dtype != _INT64 or vector.ndim != 1:
        what = (
            f"{vector.dtype} of shape {vector.shape}"
            if isinstance(vector, np.ndarray)
            else type(vector).__name__
        )
        raise ArgumentError(f"vector must be a one-dimensional array of int64, not {what}")


def check_count(name: str, value: object) -> None:
    """Raises ArgumentError for what is no number of things."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{name} must be an integer >= 1, not {value!r}")


def check_time_limit(time_limit: object) -> None:
    """Raises ArgumentError for what is no time limit."""
    if not isinstance(time_limit, (int, float)) or isinstance(time_limit, bool) or not time_limit >= 0:
        raise ArgumentError(f"time_limit must be a number of seconds >= 0, not {time_limit!r}")


class Reduction(Protocol):
    """A reduction under way."""

    @property
    def done(self) -> bool:
        """`wait` would not wait."""

    def wait(self) -> Vector:
        """The smallest number of all ranks at each place, int64 of the vector's shape; owned by the caller.

        More than once is fine, and gives the same array.

        Raises:
            RankLostError: a rank has ended, or did not come within the time limit.
        """


class Agreement(ABC):
    """A group of ranks, as one of them sees it. All its calls belong on one thread.

    Every rank of the group makes the same calls, in the same order, with vectors of the same length. Several
    reductions may be under way at once; each is waited for, sooner or later. After one has failed all later
    calls fail too.

    Attributes:
        rank: of this one in the group, from 0.
        size: how many ranks there are.
        reductions: how many were begun.
        decides: what this rank says counts. False on the later stages of a pipeline: they are told.
    """

    rank: int
    size: int
    reductions: int
    decides: bool = True

    @property
    def alone(self) -> bool:
        """There is nobody to agree with."""
        return self.size == 1

    @abstractmethod
    def begin_reduce_min(self, vector: Vector) -> Reduction:
        """Begin a reduction, and go on meanwhile.

        Args:
            vector: int64, one-dimensional; not kept: the caller may change it at once.

        Raises:
            ArgumentError: it is something else.
            RankLostError: a rank has ended.
        """

    def reduce_min(self, vector: Vector) -> Vector:
        """The smallest number of all ranks at each place.

        Raises:
            RankLostError: a rank has ended, or did not come within the time limit.
        """
        return self.begin_reduce_min(vector).wait()

    def reduce_min_of_stages(self, vector: Vector) -> Vector:
        """The smallest number of all ranks of all stages: for what is agreed once, before the first tick.

        Later stages wait for earlier ones here, and earlier for later ones, which no tick does.

        Raises:
            RankLostError: a rank has ended, or did not come within the time limit.
        """
        return self.reduce_min(vector)

    def all_stages(self, well: bool) -> bool:
        """All is well on all ranks of all stages. Where there is one stage nobody is asked: `well`.

        Raises:
            RankLostError: a rank has ended, or did not come within the time limit.
        """
        return well

    def close(self) -> None:  # noqa: B027 - there may be nothing to let go of
        """Let go of what it holds; more than once is fine."""


class _Known:
    """A reduction that needed nobody else."""

    done = True

    def __init__(self, vector: Vector) -> None:
        self._vector = vector

    def wait(self) -> Vector:
        return self._vector


class OneRank(Agreement):
    """A rank that is alone."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.reductions = 0

    def begin_reduce_min(self, vector: Vector) -> Reduction:
        """See `Agreement`."""
        check_vector(vector)
        self.reductions += 1
        return _Known(vector.copy())
