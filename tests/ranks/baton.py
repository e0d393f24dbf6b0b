"""Ranks as threads of which one runs at a time, so that the same seed gives the same run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from unified_cache.errors import RankLostError
from unified_cache.ranks.agreement import Agreement, Reduction, Vector

__all__ = ["Baton", "run_ranks"]


class Baton:
    """Who runs: between two reductions each rank does, in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.vectors: list[dict[int, Vector]] = [{} for _ in range(size)]
        self.least: tuple[int, Vector] | None = None  # of the reduction that was last waited for
        # Plain locks, which one rank releases for another: they take a third of the time of semaphores.
        self._go = [threading.Lock() for _ in range(size)]
        for lock in self._go:
            lock.acquire()
        self._over = [False] * size

    def pass_on(self, rank: int) -> None:
        """Let the next rank run that has not ended."""
        for step in range(1, self.size + 1):
            other = (rank + step) % self.size
            if not self._over[other]:
                self.go(other)
                return

    def go(self, rank: int) -> None:
        self._go[rank].release()

    def wait_turn(self, rank: int) -> None:
        assert self._go[rank].acquire(timeout=300), f"rank {rank} never had its turn"

    def end(self, rank: int) -> None:
        self._over[rank] = True
        self.pass_on(rank)


class _Reduction:
    def __init__(self, agreement: BatonRank, number: int) -> None:
        self._agreement, self._number = agreement, number
        self.done = False

    def wait(self) -> Vector:
        baton, rank = self._agreement.baton, self._agreement.rank
        baton.pass_on(rank)
        baton.wait_turn(rank)
        if baton.least is None or baton.least[0] != self._number:
            baton.least = self._number, self._reduce()
        baton.vectors[rank].pop(self._number - 2, None)
        self.done = True
        return baton.least[1].copy()

    def _reduce(self) -> Vector:
        vectors = [vectors.get(self._number) for vectors in self._agreement.baton.vectors]
        lost = [rank for rank, vector in enumerate(vectors) if vector is None]
        if lost:
            raise RankLostError(f"ranks {lost} did not come to reduction {self._number}")
        return np.min([vector for vector in vectors if vector is not None], axis=0)


class BatonRank(Agreement):
    def __init__(self, baton: Baton, rank: int) -> None:
        self.baton, self.rank, self.size = baton, rank, baton.size
        self.reductions = 0

    def begin_reduce_min(self, vector: Vector) -> Reduction:
        self.reductions += 1
        self.baton.vectors[self.rank][self.reductions] = vector.copy()
        return _Reduction(self, self.reductions)


def run_ranks(size: int, program: Callable[[Agreement], None]) -> None:
    """Run `program` on each rank; raises what the first rank to fail has raised."""
    baton = Baton(size)
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        baton.wait_turn(rank)
        try:
            program(BatonRank(baton, rank))
        except BaseException as error:
            error.add_note(f"rank {rank}")
            failed.append(error)
        finally:
            baton.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    baton.go(0)
    for thread in threads:
        thread.join()
    if failed:
        # The others only say that it is gone.
        raise next((error for error in failed if not isinstance(error, RankLostError)), failed[0])
