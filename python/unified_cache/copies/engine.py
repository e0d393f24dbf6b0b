"""What moves bytes between a device pool and a host pool: the interface that the controller drives.

There are two of them, for a GPU and for a CPU, with the same asynchrony: a submission returns at once, and
its end is seen when somebody asks. Submissions of one direction end in order.
"""

from __future__ import annotations

import threading
from typing import Literal, Protocol

from unified_cache.errors import ClosedError, CopyError
from unified_cache.pools.allocator import Pages

__all__ = ["CopyEngine", "CopyHandle", "LayerEvents", "Mark"]


class Mark(Protocol):
    """A moment in the engine's computing, such as an event on the stream of its forward."""

    @property
    def done(self) -> bool:
        """Everything that was begun before that moment has ended."""

    def wait(self) -> None:
        """Wait for that."""


class LayerEvents(Protocol):
    """One load, layer by layer: what the forward of layer k waits for."""

    @property
    def done(self) -> bool:
        """Every layer of the last load has arrived, or it has failed; True before the first one."""

    def begin(self) -> None:
        """A load that uses these events begins: from now on they are not done."""

    def record(self, layer: int) -> None:
        """The copy of this layer is complete (on a GPU: everything it needs is queued before this event)."""

    def fail(self, error: Exception) -> None:
        """The load has failed: everybody who waits hears of it."""

    def wait(self, layer: int) -> None:
        """Let the forward go on only when this layer is there; on a GPU only its stream waits.

        Raises:
            CopyError: the load has failed.
        """


class CopyHandle:
    """One submission: which pages go where, and whether that has ended.

    Attributes:
        direction: "backup" is device to host, "load" host to device.
        device_pages: ids, in the order of `host_pages`.
        host_pages: ids.
        error: why it failed; None if it has not (yet).
        begun: the copy has begun.
        seconds: how long the copy itself took, without its waiting; valid once it is done.
    """

    def __init__(self, direction: Literal["backup", "load"], device_pages: Pages, host_pages: Pages) -> None:
        self.direction = direction
        self.device_pages = device_pages
        self.host_pages = host_pages
        self.error: Exception | None = None
        self.begun = False
        self.seconds = 0.0
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """The copy has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the bytes are there.

        Raises:
            CopyError: the copy failed.
            ClosedError: the engine was closed before the copy began.
        """
        self._ended.wait()
        if isinstance(self.error, ClosedError):
            raise self.error
        if self.error is not None:
            raise CopyError(
                f"the {self.direction} copy of {len(self.device_pages)} pages failed: {self.error}"
            )

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self._ended.set()


class CopyEngine(Protocol):
    """Copies pages between one device pool and one host pool."""

    @property
    def running(self) -> int:
        """Submissions whose end was not taken yet."""

    def record_forward(self) -> Mark | None:
        """A mark after everything that the engine's forward has begun so far; None: it has all ended."""

    def new_layer_events(self) -> LayerEvents:
        """Events for one load at a time."""

    def submit_backup(
        self, device_pages: Pages, host_pages: Pages, *, after: Mark | None = None
    ) -> CopyHandle:
        """Copy device pages to host pages, one by one in the order given, all layers.

        Args:
            device_pages: ids; kept, so they must not change any more.
            host_pages: as many ids.
            after: the copy begins no earlier.

        Raises:
            ArgumentError: lists of different lengths, or a page that is not in its pool.
        """

    def submit_load(
        self,
        device_pages: Pages,
        host_pages: Pages,
        *,
        after: Mark | None = None,
        layers: LayerEvents | None = None,
    ) -> CopyHandle:
        """Copy host pages to device pages, layer by layer.

        Args:
            device_pages: ids; kept, so they must not change any more.
            host_pages: as many ids.
            after: the copy begins no earlier.
            layers: told of each layer as soon as it is there; `LayerEvents.begin` was called for it.

        Raises:
            ArgumentError: lists of different lengths, or a page that is not in its pool.
        """

    def take_done(self, *, wait: bool = False, timeout: float | None = None) -> list[CopyHandle]:
        """The submissions that have ended since the last call.

        Args:
            wait: if none has, but some are running, wait for one.
            timeout: seconds that the wait may take; None: no limit.
        """

    def close(self) -> None:
        """Give back what the engine has; submissions that have not begun end with an error. Twice is fine."""
