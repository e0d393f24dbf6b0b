"""Whether a storage is worth asking: after failures it is left alone for a while, then tried once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

__all__ = ["Breaker"]


class Breaker:
    """Closed: every call goes through. Open: none does. Half-open, after a pause: one does, and decides.

    Calls come from several threads.

    Args:
        clock: seconds.
        failures: so many calls in a row fail before it opens; a timeout opens it at once.
        pause: seconds that it stays open; doubled whenever the call after it fails too.
        longest_pause: seconds, at most.

    Attributes:
        opened: how often it went open.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        failures: int = 3,
        pause: float = 1.0,
        longest_pause: float = 60.0,
    ) -> None:
        self._clock = clock
        self._failures = failures
        self._first_pause = pause
        self._longest_pause = longest_pause
        self._lock = threading.Lock()
        self._state: Literal["closed", "open", "half-open"] = "closed"
        self._failed = 0
        self._pause = pause
        self._until = 0.0
        self.opened = 0

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        """As it is now; "open" also after the pause, as long as nobody has called."""
        return self._state

    @property
    def refuses(self) -> bool:
        """`allow` would say no."""
        with self._lock:
            return self._refuses()

    def _refuses(self) -> bool:
        return self._state == "half-open" or (self._state == "open" and self._clock() < self._until)

    def allow(self) -> bool:
        """May this call go through? Whoever is told yes says `succeeded` or `failed` after it."""
        with self._lock:
            if self._refuses():
                return False
            if self._state == "open":
                self._state = "half-open"
            return True

    def succeeded(self) -> None:
        """A call was answered, whatever the answer."""
        with self._lock:
            # One that began before the others failed says nothing of now.
            if self._state != "open":
                self._state, self._failed, self._pause = "closed", 0, self._first_pause

    def failed(self, *, timeout: bool = False) -> None:
        """A call was not answered."""
        with self._lock:
            self._failed += 1
            if self._state == "half-open":
                self._pause = min(2 * self._pause, self._longest_pause)
                self._open()
            elif self._state == "closed" and (timeout or self._failed >= self._failures):
                self._open()

    def _open(self) -> None:
        self._state = "open"
        self._until = self._clock() + self._pause
        self.opened += 1
