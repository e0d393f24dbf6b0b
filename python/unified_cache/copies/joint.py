"""Copies of several pools as one: a page is moved in all of them, and has arrived when it has in each.

Each pair of a device pool and a host pool has an engine of its own. A submission goes to all of them, and
ends when it has ended in each; it has failed if it has failed in one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Literal

from unified_cache.copies.engine import CopyEngine, CopyHandle, LayerEvents, Mark
from unified_cache.errors import ArgumentError
from unified_cache.pools.allocator import Pages

__all__ = ["JointCopyEngine", "JointHandle"]

# As long is one engine waited for while another one may end first.
_PAUSE_SECONDS = 1e-3


class _JointMark:
    """A moment for every engine."""

    def __init__(self, marks: Sequence[Mark | None]) -> None:
        self.marks = marks

    @property
    def done(self) -> bool:
        return all(mark is None or mark.done for mark in self.marks)

    def wait(self) -> None:
        for mark in self.marks:
            if mark is not None:
                mark.wait()


class _JointLayers:
    """One load of all pools: a layer is there when it is in each pool that has so many."""

    def __init__(self, each: Sequence[LayerEvents], layers: Sequence[int]) -> None:
        self.each = each
        self._last = [count - 1 for count in layers]

    @property
    def done(self) -> bool:
        return all(events.done for events in self.each)

    def begin(self) -> None:
        for events in self.each:
            events.begin()

    def record(self, layer: int) -> None:
        for events, last in zip(self.each, self._last, strict=True):
            if layer <= last:
                events.record(layer)

    def fail(self, error: Exception) -> None:
        for events in self.each:
            events.fail(error)

    def wait(self, layer: int) -> None:
        if not 0 <= layer <= max(self._last):
            raise ArgumentError(f"layer is {layer}, allowed is 0 to {max(self._last)}")
        # Of a pool with fewer layers all have to be there: so whoever waits hears of its failures too.
        for events, last in zip(self.each, self._last, strict=True):
            events.wait(min(layer, last))


class JointHandle(CopyHandle):
    """A submission to all engines.

    Attributes:
        parts: what each of them made of it.
    """

    def __init__(self, direction: Literal["backup", "load"], device_pages: Pages, host_pages: Pages) -> None:
        super().__init__(direction, device_pages, host_pages)
        self.parts: list[CopyHandle] = []
        self.refused: Exception | None = None  # by an engine, when others had taken it

    @property
    def done(self) -> bool:
        """All of them have ended, well or not."""
        if not self._ended.is_set() and all(part.done for part in self.parts):
            errors = (part.error for part in self.parts)
            self.begun = any(part.begun for part in self.parts)
            self.seconds = max(part.seconds for part in self.parts)
            self._end(next((error for error in errors if error is not None), self.refused))
        return self._ended.is_set()

    def wait(self) -> None:
        """See `CopyHandle.wait`."""
        self.wait_parts()
        if self.done:
            super().wait()

    def wait_parts(self) -> None:
        """Wait until no engine touches the pages; what has failed is seen in the parts."""
        for part in self.parts:
            with contextlib.suppress(Exception):
                part.wait()


class JointCopyEngine:
    """`CopyEngine` for several pools with the same numbers of pages.

    Args:
        engines: one for each pair of pools; they are closed with this one.
        layers: of each pair.
    """

    def __init__(self, engines: Sequence[CopyEngine], layers: Sequence[int]) -> None:
        self.engines = tuple(engines)
        self._layers = tuple(layers)
        self._running: dict[JointHandle, None] = {}  # in the order of their submission

    @property
    def running(self) -> int:
        """Submissions whose end was not taken yet."""
        return len(self._running)

    def record_forward(self) -> Mark | None:
        """See `CopyEngine`."""
        marks = [engine.record_forward() for engine in self.engines]
        return None if all(mark is None for mark in marks) else _JointMark(marks)

    def new_layer_events(self) -> LayerEvents:
        """See `CopyEngine`."""
        return _JointLayers([engine.new_layer_events() for engine in self.engines], self._layers)

    def submit_backup(
        self, device_pages: Pages, host_pages: Pages, *, after: Mark | None = None
    ) -> CopyHandle:
        """See `CopyEngine`."""
        marks = self._marks(after)
        return self._submit(
            JointHandle("backup", device_pages, host_pages),
            lambda at: self.engines[at].submit_backup(device_pages, host_pages, after=marks[at]),
            None,
        )

    def submit_load(
        self,
        device_pages: Pages,
        host_pages: Pages,
        *,
        after: Mark | None = None,
        layers: LayerEvents | None = None,
    ) -> CopyHandle:
        """See `CopyEngine`."""
        if layers is not None and not isinstance(layers, _JointLayers):
            raise ArgumentError(f"layers must be events of this engine, not {layers!r}")
        marks = self._marks(after)
        each = [None] * len(self.engines) if layers is None else layers.each
        return self._submit(
            JointHandle("load", device_pages, host_pages),
            lambda at: self.engines[at].submit_load(
                device_pages, host_pages, after=marks[at], layers=each[at]
            ),
            layers,
        )

    def take_done(self, *, wait: bool = False, timeout: float | None = None) -> list[CopyHandle]:
        """See `CopyEngine`; waiting is asking from time to time."""
        end = None if timeout is None else time.monotonic() + timeout
        taken = self._take()
        while wait and not taken and self._running:
            pause = _PAUSE_SECONDS if end is None else min(_PAUSE_SECONDS, end - time.monotonic())
            if pause <= 0:
                break
            for engine in self.engines:
                if engine.running:
                    engine.take_done(wait=True, timeout=pause)
            taken = self._take()
        return taken

    def close(self) -> None:
        """See `CopyEngine`."""
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.close)

    def _marks(self, after: Mark | None) -> Sequence[Mark | None]:
        if after is None:
            return [None] * len(self.engines)
        if not isinstance(after, _JointMark):
            raise ArgumentError(f"after must be a mark of this engine, not {after!r}")
        return after.marks

    def _submit(
        self, handle: JointHandle, submit: Callable[[int], CopyHandle], layers: _JointLayers | None
    ) -> CopyHandle:
        for at in range(len(self.engines)):
            try:
                handle.parts.append(submit(at))
            except BaseException as error:
                if not isinstance(error, Exception):
                    # Whoever hears of this takes the pages for free: no copy may touch them any more.
                    handle.wait_parts()
                    raise
                if not handle.parts:
                    raise
                # Some copy already: it fails when they have ended.
                handle.refused = error
                if layers is not None:
                    for events in layers.each[at:]:
                        events.fail(error)
                break
        self._running[handle] = None
        return handle

    def _take(self) -> list[CopyHandle]:
        for engine in self.engines:
            engine.take_done()  # what they say is seen in the parts
        ended = [handle for handle in self._running if handle.done]
        for handle in ended:
            del self._running[handle]
        return list(ended)
