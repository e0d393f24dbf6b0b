"""Events on a GPU: marks on the forward's stream, and one event a layer for loads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from unified_cache.copies.cuda_driver import Driver, Event, Stream
from unified_cache.errors import CopyError

__all__ = ["CudaLayerEvents", "CudaMark", "EventPool", "Patience", "drain", "poll"]

_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3
_PATIENCE_SECONDS = 2.0


def poll(done: Callable[[], bool], timeout: float | None = None) -> bool:
    """Ask until `done` or until that many seconds have passed: nothing on a device is waited for with its own
    calls, which take no time limit and some of which wait for more than was asked.
    """
    end = None if timeout is None else time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while not done():
        if end is not None:
            left = end - time.monotonic()
            if left <= 0:
                return False
            pause = min(pause, left)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


class Patience:
    """Asks a driver, and takes a question that fails for "not yet" for a while.

    Not every failure is the device's: while some thread captures a graph, for one, drivers refuse questions.
    And to take a copy for ended that is still running would hand its pages to somebody else.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._failing_since: float | None = None

    def event_done(self, event: Event) -> bool:
        """See `Driver`; raises if questions have failed for longer than any harmless reason lasts."""
        return self._ask(self._driver.event_done, event)

    def stream_done(self, stream: Stream) -> bool:
        """See `event_done`."""
        return self._ask(self._driver.stream_done, stream)

    def _ask(self, question: Callable[[int], bool], about: int) -> bool:
        try:
            answer = question(about)
        except Exception:
            now = time.monotonic()
            if self._failing_since is None:
                self._failing_since = now
            if now - self._failing_since < _PATIENCE_SECONDS:
                return False
            raise
        self._failing_since = None
        return answer


def drain(patience: Patience, stream: Stream, timeout: float) -> None:
    """Wait until a stream is through, or its device has failed: what it uses can be given back then."""
    with contextlib.suppress(Exception):
        poll(lambda: patience.stream_done(stream), timeout)


class EventPool:
    """Events to use again, since making one costs more than recording it.

    An event may come back while somebody's stream still waits for it: a wait keeps to what was recorded when
    it was queued.
    """

    def __init__(self, driver: Driver, *, timing: bool) -> None:
        self._driver = driver
        self._timing = timing
        self._free: list[Event] = []
        self._all: list[Event] = []
        self._closed = False

    def take(self) -> Event:
        """An event; it belongs to the caller until it is given back."""
        try:
            return self._free.pop()
        except IndexError:
            event = self._driver.new_event(timing=self._timing)
            self._all.append(event)
            return event

    def give_back(self, event: Event) -> None:
        """Nobody will look at this event any more."""
        if not self._closed:
            self._free.append(event)

    def close(self) -> None:
        """Destroy all events, those that were not given back too."""
        self._closed = True
        while self._all:
            self._driver.destroy_event(self._all.pop())


class CudaMark:
    """An event on the forward's stream."""

    def __init__(self, driver: Driver, events: EventPool) -> None:
        stream = driver.forward_stream()
        self._driver = driver
        self._patience = Patience(driver)
        self._events = events
        self.event = events.take()
        driver.record(self.event, stream)

    def __del__(self) -> None:
        if hasattr(self, "event"):
            self._events.give_back(self.event)

    @property
    def done(self) -> bool:
        """See `Mark`."""
        with self._driver.active():
            try:
                return self._patience.event_done(self.event)
            except Exception as error:
                raise CopyError(f"the forward that copies wait for has failed: {error}") from error

    def wait(self) -> None:
        """See `Mark`; the CPU waits.

        Raises:
            CopyError: the device has failed.
        """
        poll(lambda: self.done)


class CudaLayerEvents:
    """`LayerEvents` whose waits are queued on the forward's stream; the CPU does not wait.

    One exception: where host memory is not registered, a thread queues the layers one after the other, and
    `wait` lets the CPU wait until the layer it asks for is queued.

    Args:
        driver: the device, active now.
        pool: where the events come from, and go when nobody holds this object any more.
        layers: of the model.
        stream: of loads.
        staged: layers are queued by a thread.
    """

    def __init__(self, driver: Driver, pool: EventPool, layers: int, stream: Stream, *, staged: bool) -> None:
        self._driver = driver
        self._pool = pool
        self._stream = stream
        self._staged = staged
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._recorded: set[int] = set()
        self._begun = False
        self._error: Exception | None = None
        self._patience = Patience(driver)
        for _ in range(layers):
            self._events.append(pool.take())

    def __del__(self) -> None:
        for event in self._events:
            self._pool.give_back(event)

    @property
    def done(self) -> bool:
        """See `LayerEvents`."""
        with self._changed:
            if not self._begun or self._error is not None:
                return True
            if len(self._recorded) < len(self._events):
                return False
            with self._driver.active():  # the layers were queued in order on one stream: the last one tells
                try:
                    return self._patience.event_done(self._events[-1])
                except Exception as error:
                    self._error = error
                    return True

    def begin(self) -> None:
        """See `LayerEvents`."""
        with self._changed:
            self._begun, self._error = True, None
            self._recorded.clear()

    def record(self, layer: int) -> None:
        """See `LayerEvents`; called where the driver is active."""
        with self._changed:
            self._driver.record(self._events[layer], self._stream)
            self._recorded.add(layer)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """See `LayerEvents`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """See `LayerEvents`."""
        with self._changed:
            if not self._begun:
                return
            if self._staged:
                self._changed.wait_for(lambda: layer in self._recorded or self._error is not None)
            if self._error is not None:
                raise CopyError(f"layer {layer} did not arrive: {self._error}")
            if layer not in self._recorded:
                raise CopyError(f"layer {layer} is waited for, but the load of its pages was not submitted")
            with self._driver.active():
                self._driver.stream_wait(self._driver.forward_stream(), self._events[layer])
