"""Copies between two pools in CPU memory, on threads: one for each direction.

They take the place of a GPU's copy streams, with the same asynchrony: a submission returns at once, and its
end is seen when somebody asks. The bytes are moved by the native module, without the interpreter's lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from unified_cache._native import copy_pages
from unified_cache._torch import torch
from unified_cache.copies.engine import CopyHandle, LayerEvents, Mark
from unified_cache.copies.page_memory import page_memory
from unified_cache.errors import ArgumentError, BusyError, ClosedError, CopyError
from unified_cache.pools.allocator import Pages
from unified_cache.pools.planes import PoolPlanes
from unified_cache.worker import Worker

__all__ = ["CpuCopyEngine", "CpuLayerEvents", "default_threads"]

# As many threads draw all the bandwidth that copies may have.
_MOST_THREADS = 8


def default_threads() -> int:
    """Threads of a copy if nobody says otherwise: a quarter of torch's, at least 1 and at most 8.

    Copies are bound by memory, not by computing: few cores saturate it, and the forward needs the others.
    Both directions may run at once, each with as many.
    """
    return min(max(torch.get_num_threads() // 4, 1), _MOST_THREADS)


class CpuLayerEvents:
    """`LayerEvents` in CPU memory: whoever waits for a layer sleeps until it is there.

    Args:
        layers: layers of the model.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._missing: set[int] = set()
        self._error: Exception | None = None
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Every layer of the last load has arrived, or it has failed; True before the first one."""
        with self._changed:
            return not self._missing

    def begin(self) -> None:
        """A load that uses these events begins: from now on they are not done.

        Raises:
            BusyError: the load before it is not done.
        """
        with self._changed:
            if self._missing:
                raise BusyError(f"these events are in use: {len(self._missing)} layers have not arrived")
            self._missing = set(range(self._layers))
            self._error = None

    def record(self, layer: int) -> None:
        """The copy of this layer is complete; after `fail` it does not matter any more."""
        self._check(layer)
        with self._changed:
            self._missing.discard(layer)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The load has failed: everybody who waits, for whichever layer, hears of it."""
        with self._changed:
            self._missing.clear()
            self._error = error
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Wait until this layer is there.

        Raises:
            CopyError: the load has failed, be it after this layer.
        """
        self._check(layer)
        with self._changed:
            self._changed.wait_for(lambda: layer not in self._missing)
            if self._error is not None:
                raise CopyError(f"layer {layer} was not loaded: {self._error}") from self._error

    def _check(self, layer: int) -> None:
        if not 0 <= layer < self._layers:
            raise ArgumentError(f"layer is {layer}, allowed is 0 to {self._layers - 1}")


class CpuCopyEngine:
    """Copies pages between a device pool and a host pool, both in CPU memory.

    Submissions of one direction run and end in order; the two directions do not wait for each other.

    Args:
        device: the planes of the device pool.
        host: those of the host pool, of pages of the same shape.
        threads: threads of one copy, 1 or more; None: `default_threads`. Both directions may use as many at
            once.
        record_forward: gives the mark after what the forward has begun so far; None: a forward has ended
            whenever something is submitted, as if both are called by one thread.

    Raises:
        ArgumentError: pools whose pages differ, that are not in CPU memory, that share memory or whose runs
            overlap; a number of threads that can not be.
    """

    def __init__(
        self,
        device: PoolPlanes,
        host: PoolPlanes,
        *,
        threads: int | None = None,
        record_forward: Callable[[], Mark | None] | None = None,
    ) -> None:
        if device.shape != host.shape:
            raise ArgumentError(f"device has pages of {device.shape}, host of {host.shape}")
        self._shape = device.shape
        self._threads = default_threads() if threads is None else threads
        self._record_forward = record_forward
        self._device, self._device_pages = page_memory(device, "device"), device.pages
        self._host, self._host_pages = page_memory(host, "host"), host.pages
        # Copies nothing; says now, not on a thread, what is wrong with the two or with `threads`.
        copy_pages(self._host, [], self._device, [], threads=self._threads)
        self._running = 0
        self._ended: queue.SimpleQueue[CopyHandle] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over what follows, and over each handle's `begun`
        self._closed = False
        self._waiting: dict[CopyHandle, LayerEvents | None] = {}  # submitted, not begun
        self._workers = {
            "backup": Worker("unified-cache backup copies"),
            "load": Worker("unified-cache load copies"),
        }

    @property
    def running(self) -> int:
        """Submissions whose end was not taken yet."""
        return self._running

    def record_forward(self) -> Mark | None:
        """A mark after everything that the engine's forward has begun so far; None: it has all ended."""
        return None if self._record_forward is None else self._record_forward()

    def new_layer_events(self) -> CpuLayerEvents:
        """Events for one load at a time."""
        return CpuLayerEvents(self._shape.layers)

    def submit_backup(
        self, device_pages: Pages, host_pages: Pages, *, after: Mark | None = None
    ) -> CopyHandle:
        """Copy device pages to host pages, one by one in the order given, all layers.

        A target page that is named twice is an error of the copy, not of this call.

        Args:
            device_pages: ids; kept, so they must not change any more.
            host_pages: as many ids.
            after: the copy begins no earlier.

        Raises:
            ArgumentError: lists of different lengths, or a page that is not in its pool.
            ClosedError: the engine was closed.
        """
        return self._submit(CopyHandle("backup", device_pages, host_pages), after, None)

    def submit_load(
        self,
        device_pages: Pages,
        host_pages: Pages,
        *,
        after: Mark | None = None,
        layers: LayerEvents | None = None,
    ) -> CopyHandle:
        """Copy host pages to device pages, layer by layer.

        A target page that is named twice is an error of the copy, not of this call.

        Args:
            device_pages: ids; kept, so they must not change any more.
            host_pages: as many ids.
            after: the copy begins no earlier.
            layers: told of each layer as soon as it is there; `LayerEvents.begin` was called for it. They
                hear of it too if this call raises.

        Raises:
            ArgumentError: lists of different lengths, or a page that is not in its pool.
            ClosedError: the engine was closed.
        """
        return self._submit(CopyHandle("load", device_pages, host_pages), after, layers)

    def take_done(self, *, wait: bool = False, timeout: float | None = None) -> list[CopyHandle]:
        """The submissions that have ended since the last call.

        Args:
            wait: if none has, but some are running, wait for one.
            timeout: seconds that the wait may take; None: no limit.
        """
        taken: list[CopyHandle] = []
        while self._running:
            try:
                taken.append(self._ended.get(wait and not taken, timeout))
            except queue.Empty:
                break
            self._running -= 1
        return taken

    def close(self) -> None:
        """End the threads; submissions that have not begun end with an error. More than once is fine."""
        with self._lock:
            self._closed = True
            waiting = dict(self._waiting)
            self._waiting.clear()
        for handle, layers in waiting.items():
            self._end(handle, layers, ClosedError("the cache was closed before this copy began"))
        for worker in self._workers.values():
            worker.close()

    def _submit(self, handle: CopyHandle, after: Mark | None, layers: LayerEvents | None) -> CopyHandle:
        try:
            self._check(handle)
            with self._lock:
                if self._closed:
                    raise ClosedError(f"the copy engine was closed, it takes no {handle.direction} any more")
                self._waiting[handle] = layers
                self._running += 1
                self._workers[handle.direction].submit(partial(self._run, handle, after, layers))
        except (ArgumentError, ClosedError) as error:
            if layers is not None:
                layers.fail(error)
            raise
        return handle

    def _check(self, handle: CopyHandle) -> None:
        device, host = handle.device_pages, handle.host_pages
        if len(device) != len(host):
            raise ArgumentError(
                f"{len(device)} device pages and {len(host)} host pages: "
                "a copy needs as many of the one as of the other"
            )
        for name, ids, pages in (("device", device, self._device_pages), ("host", host, self._host_pages)):
            if len(ids) and int(ids.max()) >= pages:
                raise ArgumentError(f"{name} page {int(ids.max())} is not in 0..{pages - 1}")

    def _run(self, handle: CopyHandle, after: Mark | None, layers: LayerEvents | None) -> None:
        error: Exception | None = None
        try:
            if after is not None:
                after.wait()
            if not self._begin(handle):
                return
            started = time.perf_counter()
            self._copy(handle, None if layers is None else layers.record)
            handle.seconds = time.perf_counter() - started
        except Exception as caught:  # it belongs to whoever takes the handle, not to this thread
            error = caught
            if not (handle.begun or self._begin(handle)):
                return
        self._end(handle, layers, error)

    def _begin(self, handle: CopyHandle) -> bool:
        """From now on the copy is this thread's to end; False if `close` has ended it."""
        with self._lock:
            handle.begun = handle in self._waiting
            self._waiting.pop(handle, None)
            return handle.begun

    def _end(self, handle: CopyHandle, layers: LayerEvents | None, error: Exception | None) -> None:
        if layers is not None and error is not None:
            layers.fail(error)
        handle._end(error)
        self._ended.put(handle)

    def _copy(self, handle: CopyHandle, arrived: Callable[[int], None] | None) -> None:
        """Move the bytes of a submission; `arrived` is called for each layer of a load."""
        device, host = (self._device, handle.device_pages), (self._host, handle.host_pages)
        if handle.direction == "backup":
            copy_pages(*host, *device, threads=self._threads)
        else:
            copy_pages(*device, *host, threads=self._threads, step=self._shape.parts, arrived=arrived)
