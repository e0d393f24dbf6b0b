"""Threads that a backend deals the parts of a call out to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from unified_cache.worker import WorkerPool

__all__ = ["IoThreads"]

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


class IoThreads:
    """So many threads for a call: its own, and others that are started when they are first needed.

    None of them keeps the process alive: one may be inside a call to a disk that never answers.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._name = name
        self._starting = threading.Lock()
        self._others: WorkerPool | None = None

    def _pool(self) -> WorkerPool:
        with self._starting:
            if self._others is None:
                self._others = WorkerPool(self._name, self.count - 1)
            return self._others

    def run(self, work: Callable[[_Part], _Result], parts: Sequence[_Part]) -> list[_Result]:
        """Do the work for each part. All have ended when this returns or raises."""
        if self.count < 2 or len(parts) < 2:
            return [work(part) for part in parts]
        results: list[_Result | None] = [None] * len(parts)
        left = deque(range(len(parts)))
        errors: list[BaseException] = []
        ended = threading.Semaphore(0)

        def take() -> None:
            while left:
                try:
                    at = left.popleft()
                except IndexError:  # another was faster
                    return
                results[at] = work(parts[at])

        def help_out() -> None:
            try:
                take()
            except BaseException as error:
                left.clear()
                errors.append(error)
            finally:
                ended.release()

        others = self._pool()
        helpers = [others.submit(help_out) for _ in range(min(self.count, len(parts)) - 1)]
        try:
            take()
        finally:
            left.clear()
            for helper in helpers:
                # Those that have not begun yet are not waited for: other calls may keep the threads busy.
                if not others.cancel(helper):
                    ended.acquire()
        if errors:
            raise errors[0]
        return cast(list[_Result], results)

    def close(self) -> None:
        """End the threads; no call runs."""
        with self._starting:
            if self._others is not None:
                self._others.close()
