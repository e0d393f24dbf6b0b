"""What the GPU's copy engine needs of a driver: streams, events, copies, launches. Nothing here waits for a
device.

Behind this interface stands CuPy (`cupy_driver.py`), or in tests a stand-in that runs the same kernel on a
CPU and executes streams as late and in as odd an order as their events allow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Driver", "Event", "Memory", "Stream"]

Stream = int  # handles, as the driver's own API has them
Event = int


@dataclass(eq=False, slots=True)
class Memory:
    """A piece of memory that lives as long as this object.

    Attributes:
        address: where it begins, for the device.
        size: bytes.
        owner: what keeps it alive.
        bytes: uint8 (size), the same memory seen from the CPU; None for device memory.
    """

    address: int
    size: int
    owner: object
    bytes: npt.NDArray[np.uint8] | None = None


class Driver(Protocol):
    """One device. Every call may raise the driver's own exceptions; the engine turns them into copy errors.

    All but `active` are called inside ``with driver.active():``.
    """

    batched: bool
    """`copy_batch` hands all its copies to the driver in one call."""

    def active(self) -> AbstractContextManager[Any]:
        """In it, the calling thread works on this device; the thread's own choice is restored behind it."""

    def new_stream(self) -> Stream:
        """A stream that does not wait for the legacy default stream, nor that one for it."""

    def destroy_stream(self, stream: Stream) -> None:
        """Give a stream back; what is queued on it still runs."""

    def forward_stream(self) -> Stream:
        """The stream of the engine's forward, of the calling thread."""

    def new_event(self, *, timing: bool = False) -> Event:
        """An event; with `timing`, one that `seconds_between` takes."""

    def destroy_event(self, event: Event) -> None:
        """Give an event back."""

    def record(self, event: Event, stream: Stream) -> None:
        """The event is done when everything queued on the stream so far is."""

    def stream_wait(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on waits for the event as it was recorded last."""

    def event_done(self, event: Event) -> bool:
        """Never blocks. Raises if work on the device has failed."""

    def stream_done(self, stream: Stream) -> bool:
        """Everything that is queued on the stream is done. Never blocks."""

    def seconds_between(self, start: Event, end: Event) -> float:
        """Time between two events with timing that are both done."""

    def device_memory(self, size: int, stream: Stream) -> Memory:
        """Device memory for use on one stream."""

    def pinned_memory(self, size: int) -> Memory:
        """Host memory that copies reach asynchronously."""

    def reaches_host(self, address: int) -> bool:
        """Host memory at this address is registered, and kernels reach it at this very address."""

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Queue a copy of `size` bytes, either direction; host memory must be pinned or registered."""

    def copy_2d(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: Stream,
    ) -> None:
        """Queue a copy of `height` rows of `width` bytes, that begin every `pitch` bytes."""

    def copy_batch(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: Stream,
    ) -> None:
        """Queue many copies; among each other they have no order."""

    def prepare(self, kernel: str) -> None:
        """Compile a kernel, so that `launch` need not."""

    def launch(
        self, kernel: str, blocks: int, threads: int, argument: npt.NDArray[np.void], stream: Stream
    ) -> None:
        """Queue a kernel with one argument, a structure that is passed by value."""
