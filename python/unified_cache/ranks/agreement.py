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

__all__ = ["Agreement", "OneRank", "Reduction"]

Vector = npt.NDArray[np.int64]


class Reduction(Protocol):
    """A reduction under way."""

    @property
    def done(self) -> bool:
        """`wait` would not wait."""

    def wait(self) -> Vector:
        """The smallest number of all ranks at each place, int64 of the vector's shape; owned by the caller.

        Raises:
            RankLostError: a rank has ended, or did not come within the time limit.
        """


class Agreement(ABC):
    """A group of ranks, as one of them sees it. All its calls belong on one thread.

    Every rank of the group makes the same calls, in the same order, with vectors of the same length.

    Attributes:
        rank: of this one in the group, from 0.
        size: how many ranks there are.
        reductions: how many were begun.
        decides: False in the later stages of a pipeline: what comes out is what the first stage decided, and
            this rank has to follow.
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
            RankLostError: a rank has ended.
        """

    def reduce_min(self, vector: Vector) -> Vector:
        """The smallest number of all ranks at each place.

        Raises:
            RankLostError: a rank has ended, or did not come within the time limit.
        """
        return self.begin_reduce_min(vector).wait()

    def close(self) -> None:  # noqa: B027  # most hold nothing
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
        self.reductions += 1
        return _Known(vector.copy())
