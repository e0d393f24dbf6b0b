"""Calls that run while somebody wants to close: no new ones begin, those that run are waited for."""

from __future__ import annotations

import threading
from types import TracebackType

from unified_cache.errors import ClosedError

__all__ = ["RunningCalls"]


class RunningCalls:
    """``with calls:`` around each call of a backend; `close` waits until none runs any more.

    Args:
        what: names the backend in the `ClosedError` of later calls.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise ClosedError(f"{self._what} was closed before this call")
            self._running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._running -= 1
            if not self._running:
                self._changed.notify_all()

    def refuse(self) -> bool:
        """Refuse calls from now on; True the first time."""
        with self._changed:
            first, self._closed = not self._closed, True
            return first

    def wait(self) -> None:
        """Wait until none runs."""
        with self._changed:
            while self._running:
                self._changed.wait()

    def close(self) -> bool:
        """Both; True for the first caller, who is to give things back."""
        first = self.refuse()
        self.wait()
        return first
