"""The copy engine of a GPU.

Two streams, one for each direction. A backup is one submission: a launch of the kernel, and copies of the
runs that the copy engines take. A load goes layer by layer, with an event for each. The CPU only queues and
asks; whatever has to wait for something waits on the device. Nothing ever waits for the device as a whole.

Host memory that is not registered with the driver goes through a staging buffer, on a thread
(`cuda_staged.py`).
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from unified_cache.copies.cuda_driver import Driver
from unified_cache.copies.cuda_events import CudaLayerEvents, CudaMark, EventPool, poll
from unified_cache.copies.cuda_lane import CLOSE_SECONDS, DirectLane
from unified_cache.copies.cuda_plan import CopyRule, check_pages
from unified_cache.copies.cuda_staged import HostCopy, NativeHostCopy, StagedLane
from unified_cache.copies.engine import CopyHandle, LayerEvents, Mark
from unified_cache.copies.geometry import Geometry, Side, geometry_of
from unified_cache.errors import ArgumentError, ClosedError
from unified_cache.pools.allocator import Pages
from unified_cache.pools.planes import PoolPlanes

__all__ = ["CudaCopyEngine", "CudaCopyHandle"]

_MAX_BLOCKS = 65535


class CudaCopyHandle(CopyHandle):
    """A `CopyHandle` that asks the device itself, so nobody has to call `take_done` for it to end."""

    def __init__(
        self,
        direction: Literal["backup", "load"],
        device_pages: Pages,
        host_pages: Pages,
        settle: Callable[[], None],
    ) -> None:
        super().__init__(direction, device_pages, host_pages)
        self._settle = settle

    @property
    def done(self) -> bool:
        """The copy has ended, well or not."""
        if not self._ended.is_set():
            self._settle()
        return self._ended.is_set()

    def wait(self) -> None:
        """See `CopyHandle.wait`; the CPU asks from time to time."""
        poll(lambda: self.done)
        super().wait()


class CudaCopyEngine:
    """`CopyEngine` between a pool on a GPU and one in host memory.

    Args:
        device: the pool on the GPU.
        host: the pool in host memory.
        host_registered: all of the host pool is registered with the driver (pinned and mapped). If not, or if
            the device does not reach it at its own addresses, copies are staged.
        blocks: thread blocks of the kernel, of 1024 threads each: how much of the GPU copies may take from
            the forward.
        driver: the device; None: CuPy, on the device pool's device.
        rule: which runs of pages go to the copy engines.
        host_edges: addresses at which one registration of host memory ends and another begins.
        host_copy: moves pages between staging and the host pool; None: the native copies. Used only if
            copies are staged.
        staging_bytes: of each of the staging buffers.

    Raises:
        ArgumentError: pools that hold different pages, or that lie elsewhere; `blocks` out of range.
        MissingDependencyError: no `driver`, and CuPy is not installed.
    """

    def __init__(
        self,
        device: PoolPlanes,
        host: PoolPlanes,
        *,
        host_registered: bool,
        blocks: int = 2,
        driver: Driver | None = None,
        rule: CopyRule | None = None,
        host_edges: Sequence[int] = (),
        host_copy: HostCopy | None = None,
        staging_bytes: int = 8 << 20,
    ) -> None:
        if device.shape != host.shape:
            raise ArgumentError(
                f"device pages are {device.shape}, host pages {host.shape}: they must be alike"
            )
        if host.device.type != "cpu":
            raise ArgumentError(f"the host pool must lie in CPU memory, not on {host.device}")
        if not 1 <= blocks <= _MAX_BLOCKS:
            raise ArgumentError(f"blocks must be an integer in 1..{_MAX_BLOCKS}, not {blocks!r}")
        if driver is None:
            if device.device.type != "cuda":
                raise ArgumentError(f"the device pool must lie on a CUDA device, not on {device.device}")
            from unified_cache.copies.cupy_driver import CupyDriver

            driver = CupyDriver(device.device)
        self._driver = driver
        self._pools = (device, host)  # their memory must outlive the copies
        self._lock = threading.RLock()
        self._ended: deque[CopyHandle] = deque()
        geometry = geometry_of(device.shape, Side.of(device), Side.of(host))
        with driver.active():
            self.staged = not (host_registered and self._reaches(host))
            self._events = EventPool(driver, timing=False)
            self._lanes: dict[str, DirectLane | StagedLane] = {}
            try:
                for direction in ("backup", "load"):
                    self._lanes[direction] = (
                        StagedLane(
                            driver,
                            direction,
                            device,
                            host,
                            blocks=blocks,
                            host_copy=host_copy or NativeHostCopy(host),
                            staging_bytes=staging_bytes,
                        )
                        if self.staged
                        else self._direct(geometry, direction, blocks, rule, host_edges)
                    )
            except BaseException:
                for lane in self._lanes.values():
                    poll(lane.forget, CLOSE_SECONDS)
                    lane.close()
                raise
        self._closed = False

    def _direct(
        self,
        geometry: Geometry,
        direction: Literal["backup", "load"],
        blocks: int,
        rule: CopyRule | None,
        host_edges: Sequence[int],
    ) -> DirectLane:
        return DirectLane(
            self._driver,
            geometry,
            direction,
            blocks=blocks,
            rule=rule or CopyRule(),
            edges=tuple(sorted(host_edges)),
        )

    def _reaches(self, host: PoolPlanes) -> bool:
        """Whether the device sees the pool's first and last byte where the CPU sees them."""
        first = int(host.addresses.min())
        last = int(host.addresses.max()) + host.span_bytes - 1
        if all(self._driver.reaches_host(address) for address in (first, last)):
            return True
        warnings.warn(
            "the host pool is said to be registered, but the device does not reach it at its addresses: "
            "its copies are staged, which is slower",
            RuntimeWarning,
            stacklevel=3,
        )
        return False

    @property
    def running(self) -> int:
        """Submissions whose end was not taken yet."""
        with self._lock:
            return sum(lane.running for lane in self._lanes.values()) + len(self._ended)

    def record_forward(self) -> Mark | None:
        """See `CopyEngine`; an event on the current stream of the calling thread."""
        with self._lock, self._driver.active():
            self._check_open()
            return CudaMark(self._driver, self._events)

    def new_layer_events(self) -> LayerEvents:
        """See `CopyEngine`."""
        with self._lock, self._driver.active():
            self._check_open()
            layers, stream = self._pools[0].shape.layers, self._lanes["load"].stream
            return CudaLayerEvents(self._driver, self._events, layers, stream, staged=self.staged)

    def submit_backup(
        self, device_pages: Pages, host_pages: Pages, *, after: Mark | None = None
    ) -> CopyHandle:
        """See `CopyEngine`; host pages may not repeat, and pairs are copied in no particular order."""
        return self._submit("backup", device_pages, host_pages, after, None)

    def submit_load(
        self,
        device_pages: Pages,
        host_pages: Pages,
        *,
        after: Mark | None = None,
        layers: LayerEvents | None = None,
    ) -> CopyHandle:
        """See `CopyEngine`; device pages may not repeat, and pairs are copied in no particular order."""
        return self._submit("load", device_pages, host_pages, after, layers)

    def take_done(self, *, wait: bool = False, timeout: float | None = None) -> list[CopyHandle]:
        """See `CopyEngine`; waiting is asking from time to time, at most a millisecond apart."""
        self._settle()
        if wait and not self._ended and self.running:
            poll(self._any_ended, timeout)
        with self._lock:
            taken = list(self._ended)
            self._ended.clear()
            return taken

    def close(self) -> None:
        """See `CopyEngine`. Waits up to two seconds for copies that are queued; those that take longer end
        with an error, and what they use on the device is given back when they are through.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        error = ClosedError("the cache was closed before this copy began")
        for lane in self._lanes.values():
            lane.stop(error)

        def idle() -> bool:
            self._settle()
            with self._lock, self._driver.active():
                return all(lane.idle() for lane in self._lanes.values())

        if poll(idle, CLOSE_SECONDS):
            self._release()
            return
        late = ClosedError(f"the cache was closed, and this copy did not end within {CLOSE_SECONDS:g} s")
        with self._lock:
            for lane in self._lanes.values():
                lane.end_all(late)
        threading.Thread(target=self._release_later, name="unified-cache late copies", daemon=True).start()

    def __del__(self) -> None:
        # A cache that is forgotten must not free what the device still reads.
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self.close()

    def _release_later(self) -> None:
        def gone() -> bool:
            with self._lock, self._driver.active():
                return all(lane.forget() for lane in self._lanes.values())

        poll(gone)
        self._release()

    def _release(self) -> None:
        with self._lock, self._driver.active():
            for lane in self._lanes.values():
                lane.close()
            self._events.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the copy engine is closed")

    def _any_ended(self) -> bool:
        self._settle()
        return bool(self._ended)

    def _settle(self) -> None:
        with self._lock, self._driver.active():
            for lane in self._lanes.values():
                self._ended.extend(lane.settle())

    def _submit(
        self,
        direction: Literal["backup", "load"],
        device_pages: Pages,
        host_pages: Pages,
        after: Mark | None,
        layers: LayerEvents | None,
    ) -> CopyHandle:
        if len(device_pages) != len(host_pages):
            raise ArgumentError(
                f"{len(device_pages)} device pages and {len(host_pages)} host pages: "
                "a copy needs as many of the one as of the other"
            )
        device, host = self._pools
        handle = CudaCopyHandle(
            direction,
            check_pages("device", device_pages, device.pages),
            check_pages("host", host_pages, host.pages),
            self._settle,
        )
        targets = handle.host_pages if direction == "backup" else handle.device_pages
        ordered = np.sort(targets)
        again = np.flatnonzero(ordered[1:] == ordered[:-1])
        if len(again):
            raise ArgumentError(
                f"page {int(ordered[again[0]])} is the target of two copies of one {direction}"
            )
        if after is not None and not isinstance(after, CudaMark):
            raise ArgumentError(f"after must be a mark of this engine, not {after!r}")
        with self._lock, self._driver.active():
            self._check_open()
            self._lanes[direction].submit(handle, after, layers)
        return handle
