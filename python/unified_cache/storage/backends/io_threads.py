"""Threads that a backend deals the parts of a call out to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

__all__ = ["IoThreads"]

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


class IoThreads:
    """So many threads for a call: its own, and others that are started when they are first needed."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._others = ThreadPoolExecutor(count - 1, name) if count > 1 else None

    def run(self, work: Callable[[_Part], _Result], parts: Sequence[_Part]) -> list[_Result]:
        """Do the work for each part. All have ended when this returns or raises."""
        if self._others is None or len(parts) < 2:
            return [work(part) for part in parts]
        results: list[_Result | None] = [None] * len(parts)
        left = deque(range(len(parts)))

        def take() -> None:
            while left:
                try:
                    at = left.popleft()
                except IndexError:  # another was faster
                    return
                results[at] = work(parts[at])

        helpers = [self._others.submit(take) for _ in range(min(self.count, len(parts)) - 1)]
        try:
            take()
        finally:
            left.clear()
            # Those that have not begun yet are not waited for: other calls may keep the threads busy.
            begun = [helper for helper in helpers if not helper.cancel()]
            errors = [helper.exception() for helper in begun]
        for error in errors:
            if error is not None:
                raise error
        return cast(list[_Result], results)

    def close(self) -> None:
        """End the threads."""
        if self._others is not None:
            self._others.shutdown()
