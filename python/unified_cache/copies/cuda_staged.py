"""Copies between a GPU and host memory that is not registered with the driver: through staging buffers, on a
thread.

The device can not reach such memory on its own. So the kernel gathers pages of one layer into a buffer on the
device, a plain copy brings that to a pinned buffer, and the CPU deals it out to the host pool; to load, the
other way round. Two buffers take turns, so that the CPU and the device work at the same time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from unified_cache._native import PageMemory, copy_pages
from unified_cache.copies.cuda_driver import Driver, Event, Memory
from unified_cache.copies.cuda_events import CudaMark, EventPool, Patience, drain, poll
from unified_cache.copies.cuda_lane import CLOSE_SECONDS, Launcher, Slots
from unified_cache.copies.cuda_plan import chunks
from unified_cache.copies.engine import CopyHandle, LayerEvents
from unified_cache.copies.geometry import Side, geometry_of
from unified_cache.copies.page_memory import page_memory
from unified_cache.pools.allocator import Pages
from unified_cache.pools.planes import PageShape, PoolPlanes
from unified_cache.worker import Worker

__all__ = ["HostCopy", "NativeHostCopy", "StagedLane"]

_BUFFERS = 2


class HostCopy(Protocol):
    """Moves one layer of some pages between a staging buffer and a host pool, on the CPU.

    `staged` is uint8 (parts, pages, tokens, heads, bytes of a run), contiguous within a part.
    """

    def to_pool(self, staged: npt.NDArray[np.uint8], layer: int, pages: Pages) -> None:
        """Deal out: staged page i becomes page ``pages[i]`` of the pool."""

    def from_pool(self, staged: npt.NDArray[np.uint8], layer: int, pages: Pages) -> None:
        """Collect: page ``pages[i]`` of the pool becomes staged page i."""


class NativeHostCopy:
    """`HostCopy` by the native copies.

    Args:
        host: the pool in CPU memory.
        threads: threads of one copy.
    """

    def __init__(self, host: PoolPlanes, *, threads: int = 1) -> None:
        self._threads = threads
        self._layers = [page_memory(host, "host", layer) for layer in range(host.shape.layers)]

    def to_pool(self, staged: npt.NDArray[np.uint8], layer: int, pages: Pages) -> None:
        """See `HostCopy`."""
        all_staged = np.arange(len(pages), dtype=np.uint32)
        copy_pages(self._layers[layer], pages, _staged(staged), all_staged, threads=self._threads)

    def from_pool(self, staged: npt.NDArray[np.uint8], layer: int, pages: Pages) -> None:
        """See `HostCopy`."""
        all_staged = np.arange(len(pages), dtype=np.uint32)
        copy_pages(_staged(staged), all_staged, self._layers[layer], pages, threads=self._threads)


def _staged(staged: npt.NDArray[np.uint8]) -> PageMemory:
    _, pages, tokens, heads, run_bytes = staged.shape
    return PageMemory(
        [part.reshape(-1) for part in staged],
        pages=pages,
        tokens=tokens,
        heads=heads,
        run_bytes=run_bytes,
        page_stride=tokens * heads * run_bytes,
        token_stride=heads * run_bytes,
        head_stride=run_bytes,
    )


@dataclass(eq=False, slots=True)
class _Buffer:
    """One staging buffer, on both sides, and what is in it."""

    device: Memory
    pinned: Memory
    bytes: npt.NDArray[np.uint8]  # the pinned side as (parts, pages, tokens, heads, run bytes)
    launcher: Launcher
    event: Event
    busy: bool = False  # something is queued that uses it, up to the event
    holds: tuple[int, slice] | None = None  # the layer and pages that are to be dealt out


class StagedLane:
    """One direction of staged copies.

    Args:
        driver: the device; active while a lane is made or closed.
        direction: which way.
        device: the pool on the GPU.
        host: the pool in host memory.
        blocks: of the kernel.
        host_copy: the CPU's part.
        staging_bytes: of a buffer.
    """

    def __init__(
        self,
        driver: Driver,
        direction: Literal["backup", "load"],
        device: PoolPlanes,
        host: PoolPlanes,
        *,
        blocks: int,
        host_copy: HostCopy,
        staging_bytes: int,
    ) -> None:
        self._driver = driver
        self._layers = device.shape.layers
        self._host_copy = host_copy
        self._part_bytes = device.shape.tokens * device.shape.heads * device.shape.run_bytes
        parts = device.shape.parts
        self._pages = max(1, min(staging_bytes // (parts * self._part_bytes), device.pages, host.pages))
        self._mutex = threading.Lock()
        self._waiting: dict[CopyHandle, LayerEvents | None] = {}
        self._begun: dict[CopyHandle, LayerEvents | None] = {}
        self._finished: queue.SimpleQueue[CopyHandle] = queue.SimpleQueue()
        self._running = 0
        self._timers = EventPool(driver, timing=True)
        self._events = EventPool(driver, timing=False)
        self._patience = Patience(driver)
        self._buffers: list[_Buffer] = []
        self.stream = driver.new_stream()
        try:
            self._slots = Slots(driver, self.stream)
            for _ in range(_BUFFERS):
                self._buffers.append(self._new_buffer(direction, device, blocks))
        except BaseException:
            drain(self._patience, self.stream, CLOSE_SECONDS)
            self._events.close()
            driver.destroy_stream(self.stream)
            raise
        self._worker = Worker(f"unified-cache staged {direction} copies")

    @property
    def running(self) -> int:
        """Submissions whose end was not seen by `settle` yet."""
        return self._running

    def submit(self, handle: CopyHandle, after: CudaMark | None, layers: LayerEvents | None) -> None:
        """Hand a submission to the thread."""
        self._running += 1
        with self._mutex:
            self._waiting[handle] = layers
        self._worker.submit(partial(self._run, handle, after, layers))

    def settle(self) -> list[CopyHandle]:
        """Submissions that have ended since, in order; never blocks."""
        ended: list[CopyHandle] = []
        while True:
            try:
                ended.append(self._finished.get_nowait())
            except queue.Empty:
                self._running -= len(ended)
                return ended

    def stop(self, error: Exception) -> None:
        """Submissions that have not begun end with `error`."""
        with self._mutex:
            dropped = dict(self._waiting)
            self._waiting.clear()
        for handle, layers in dropped.items():
            if layers is not None:
                layers.fail(error)
            handle._end(error)
            self._finished.put(handle)
        self._worker.close()

    def end_all(self, error: Exception) -> None:
        """Give up: every handle ends with `error`, though the thread may still be at it."""
        with self._mutex:
            given_up = dict(self._begun)
        for handle, layers in given_up.items():
            if layers is not None:
                layers.fail(error)
            handle._end(error)

    def forget(self) -> bool:
        """After `end_all`: True if nothing is left."""
        self.settle()
        return self.idle()

    def idle(self) -> bool:
        """Nothing is under way, and the device is through with all that was queued."""
        if self._running:
            return False
        try:
            return self._patience.stream_done(self.stream)
        except Exception:  # the device has failed: nothing runs on it any more
            return True

    def close(self) -> None:
        """Give back what the lane has; nothing may be under way any more."""
        self._worker.close()
        self._timers.close()
        self._events.close()
        self._slots.close()
        self._buffers.clear()
        self._driver.destroy_stream(self.stream)

    def _new_buffer(self, direction: Literal["backup", "load"], device: PoolPlanes, blocks: int) -> _Buffer:
        driver, shape = self._driver, device.shape
        size = shape.parts * self._pages * self._part_bytes
        memory, pinned = driver.device_memory(size, self.stream), driver.pinned_memory(size)
        assert pinned.bytes is not None
        # The buffer holds one layer at a time, so every layer's planes are the same.
        addresses = memory.address + np.arange(shape.parts, dtype=np.uint64) * np.uint64(
            self._pages * self._part_bytes
        )
        row = shape.heads * shape.run_bytes
        side = Side(
            np.tile(addresses, (shape.layers, 1)), self._pages, self._part_bytes, row, shape.run_bytes
        )
        geometry = geometry_of(
            PageShape(shape.layers, shape.parts, shape.tokens, shape.heads, shape.run_bytes),
            Side.of(device),
            side,
        )
        staged = pinned.bytes.reshape(shape.parts, self._pages, shape.tokens, shape.heads, shape.run_bytes)
        launcher = Launcher(driver, self.stream, geometry, direction, blocks)
        return _Buffer(memory, pinned, staged, launcher, self._events.take())

    # On the thread.

    def _run(self, handle: CopyHandle, after: CudaMark | None, layers: LayerEvents | None) -> None:
        with self._mutex:
            if handle not in self._waiting:
                return
            self._begun[handle] = self._waiting.pop(handle)
            handle.begun = True
        error: Exception | None = None
        try:
            with self._driver.active():
                error = self._copy(handle, after, layers)
        except Exception as caught:
            error = caught
        if error is not None and layers is not None:
            layers.fail(error)
        with self._mutex:
            del self._begun[handle]
        if not handle._ended.is_set():
            handle._end(error)
        self._finished.put(handle)

    def _copy(
        self, handle: CopyHandle, after: CudaMark | None, layers: LayerEvents | None
    ) -> Exception | None:
        driver, error = self._driver, None
        slot, timers = None, []
        try:
            if after is not None:
                driver.stream_wait(self.stream, after.event)
            timers.append(self._timers.take())
            driver.record(timers[0], self.stream)
            places = np.arange(len(handle.device_pages), dtype=np.uint32) % np.uint32(self._pages)
            lists = (0, 0)
            if len(places):
                slot, *found = self._slots.upload(handle.device_pages, places)
                lists = (found[0], found[1])
            if handle.direction == "backup":
                self._to_host(handle, lists)
            else:
                self._to_device(handle, lists, layers)
            timers.append(self._timers.take())
            driver.record(timers[1], self.stream)
            poll(partial(self._patience.event_done, timers[1]))
            handle.seconds = driver.seconds_between(*timers)
        except Exception as caught:
            error = caught
            # Nothing may be used again while something that was queued still uses it.
            with contextlib.suppress(Exception):  # or the device has failed, and nothing runs on it any more
                poll(partial(self._patience.stream_done, self.stream))
        for buffer in self._buffers:
            buffer.busy, buffer.holds = False, None
        for timer in timers:
            self._timers.give_back(timer)
        if slot is not None:
            self._slots.give_back(slot)
        return error

    def _units(self, handle: CopyHandle) -> Iterator[tuple[_Buffer, int, slice]]:
        turn = 0
        for layer in range(self._layers):
            for part in chunks(len(handle.device_pages), self._pages):
                yield self._buffers[turn % _BUFFERS], layer, part
                turn += 1

    def _to_host(self, handle: CopyHandle, lists: tuple[int, int]) -> None:
        turn = 0
        for buffer, layer, part in self._units(handle):
            self._deal_out(buffer, handle.host_pages)
            count = part.stop - part.start
            buffer.launcher.launch(
                lists[0] + 4 * part.start, lists[1] + 4 * part.start, count, range(layer, layer + 1)
            )
            self._transfer(buffer, count, to_host=True)
            buffer.holds = (layer, part)
            turn += 1
        for i in range(_BUFFERS):  # the older one first
            self._deal_out(self._buffers[(turn + i) % _BUFFERS], handle.host_pages)

    def _to_device(self, handle: CopyHandle, lists: tuple[int, int], layers: LayerEvents | None) -> None:
        if not len(handle.device_pages) and layers is not None:
            for layer in range(self._layers):
                layers.record(layer)
        for buffer, layer, part in self._units(handle):
            self._wait_for(buffer)
            count = part.stop - part.start
            self._host_copy.from_pool(buffer.bytes[:, :count], layer, handle.host_pages[part])
            self._transfer(buffer, count, to_host=False)
            buffer.launcher.launch(
                lists[0] + 4 * part.start, lists[1] + 4 * part.start, count, range(layer, layer + 1)
            )
            self._driver.record(buffer.event, self.stream)
            if layers is not None and part.stop == len(handle.device_pages):
                layers.record(layer)

    def _transfer(self, buffer: _Buffer, count: int, *, to_host: bool) -> None:
        buffer.busy = True
        part = self._pages * self._part_bytes
        for offset in range(0, buffer.device.size, part):
            ends = (buffer.pinned.address + offset, buffer.device.address + offset)
            target, source = ends if to_host else ends[::-1]
            self._driver.copy(target, source, count * self._part_bytes, self.stream)
        if to_host:
            self._driver.record(buffer.event, self.stream)

    def _wait_for(self, buffer: _Buffer) -> None:
        if buffer.busy:
            poll(partial(self._patience.event_done, buffer.event))
            buffer.busy = False

    def _deal_out(self, buffer: _Buffer, host_pages: Pages) -> None:
        self._wait_for(buffer)
        if buffer.holds is not None:
            layer, part = buffer.holds
            count = part.stop - part.start
            self._host_copy.to_pool(buffer.bytes[:, :count], layer, host_pages[part])
            buffer.holds = None
