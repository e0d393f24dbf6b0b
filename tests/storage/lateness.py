"""How late a thread is woken on this machine just now: what a limit on a call has to leave out."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["Lateness"]

_STEP = 0.01
# A call that waits for a server is woken so often, about: for its turn, by its client, by the interpreter.
_WAKES = 4


class Lateness(threading.Thread):
    """Sleeps, and keeps by how much it was woken too late: hardly at all where nothing else is done."""

    def __init__(self) -> None:
        super().__init__(name="lateness", daemon=True)
        self._ending = threading.Event()
        self._late: list[tuple[float, float]] = []  # when it was woken, and by how much too late

    def run(self) -> None:
        while not self._ending.is_set():
            begun = time.monotonic()
            time.sleep(_STEP)
            now = time.monotonic()
            self._late.append((now, now - begun - _STEP))

    def allowance(self, start: float) -> float:
        """Seconds that a call since then may have lost to other threads and processes."""
        now = time.monotonic()
        worst = max((late for when, late in reversed(self._late) if when >= start), default=0.0)
        # It may be late just now.
        last = self._late[-1][0] if self._late else start
        return _WAKES * max(worst, now - last - _STEP, 0.0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self.join()
