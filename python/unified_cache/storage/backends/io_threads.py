"""Threads that a backend deals the parts of a call out to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["IoThreads"]

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


class IoThreads:
    """So many threads, started when they are first needed; 1: the caller's own does everything."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, name) if count > 1 else None

    def run(self, work: Callable[[_Part], _Result], parts: Sequence[_Part]) -> list[_Result]:
        """Do the work for each part. All have ended when this returns or raises."""
        if self._pool is None or len(parts) < 2:
            return [work(part) for part in parts]
        futures: list[Future[_Result]] = []
        try:
            futures.extend(self._pool.submit(work, part) for part in parts)
        finally:
            for future in futures:
                future.exception()
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
