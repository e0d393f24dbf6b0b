"""One direction of copies on a GPU: its stream, what is queued on it, and what that still needs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from unified_cache.copies.cuda_driver import Driver, Event, Memory, Stream
from unified_cache.copies.cuda_events import CudaMark, EventPool, Patience, drain
from unified_cache.copies.cuda_plan import CopyRule, Plan, make_plan
from unified_cache.copies.engine import CopyHandle, LayerEvents
from unified_cache.copies.geometry import Geometry
from unified_cache.copies.kernel_source import MAX_PAGES, MAX_THREADS, kernel_argument, kernel_name
from unified_cache.errors import ArgumentError
from unified_cache.pools.allocator import Pages

__all__ = ["CLOSE_SECONDS", "DirectLane", "Launcher", "Slots"]

CLOSE_SECONDS = 2.0
_SMALLEST_SLOT = 64 << 10  # bytes: page lists of 8,192 pages


@dataclass(eq=False, slots=True)
class _Slot:
    """Room for one submission's page lists, on both sides."""

    pinned: Memory
    device: Memory


class Slots:
    """Pinned and device memory for lists of pages; a slot is used again when its submission has ended."""

    def __init__(self, driver: Driver, stream: Stream) -> None:
        self._driver = driver
        self._stream = stream
        self._free: list[_Slot] = []

    def upload(self, device_pages: Pages, host_pages: Pages) -> tuple[_Slot, int, int]:
        """Queue the copy of both lists; gives the slot and where the device finds each list."""
        count = len(device_pages)
        slot = self._take(8 * count)
        try:
            assert slot.pinned.bytes is not None
            words = slot.pinned.bytes[: 8 * count].view(np.uint32)
            words[:count], words[count:] = device_pages, host_pages
            self._driver.copy(slot.device.address, slot.pinned.address, 8 * count, self._stream)
        except BaseException:
            self._free.append(slot)  # nothing was queued that reads it
            raise
        return slot, slot.device.address, slot.device.address + 4 * count

    def give_back(self, slot: _Slot) -> None:
        """Everything that used the slot has ended."""
        self._free.append(slot)

    def close(self) -> None:
        """Free the slots."""
        self._free.clear()

    def _take(self, size: int) -> _Slot:
        fitting = [slot for slot in self._free if slot.device.size >= size]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.device.size)
            self._free.remove(slot)
            return slot
        size = max(_SMALLEST_SLOT, 1 << (size - 1).bit_length())
        return _Slot(self._driver.pinned_memory(size), self._driver.device_memory(size, self._stream))


class Launcher:
    """Launches of the kernel on one stream, between two sides."""

    def __init__(
        self,
        driver: Driver,
        stream: Stream,
        geometry: Geometry,
        direction: Literal["backup", "load"],
        blocks: int,
    ) -> None:
        self._driver = driver
        self._stream = stream
        self._blocks = blocks
        self._kernel = kernel_name(geometry.width, geometry.parts)
        self._vectors = geometry.part_bytes // geometry.width
        tables = [side.addresses.astype(np.uint64).ravel() for side in (geometry.device, geometry.host)]
        size = tables[0].nbytes
        pinned = driver.pinned_memory(2 * size)
        planes = driver.device_memory(2 * size, stream)
        assert pinned.bytes is not None
        pinned.bytes[: 2 * size].view(np.uint64)[:] = np.concatenate(tables)
        self._memory = [pinned, planes]  # the pinned one too: it is read when the stream comes to it
        self._argument = kernel_argument(geometry, direction, planes.address, planes.address + size)
        self._device_is_source = direction == "backup"
        driver.prepare(self._kernel)
        driver.copy(planes.address, pinned.address, 2 * size, stream)

    def launch(self, device_pages: int, host_pages: int, count: int, layers: range) -> None:
        """Queue the copy of `count` pages, whose lists the device finds at these addresses."""
        argument: npt.NDArray[np.void] = self._argument.copy()
        lists = (device_pages, host_pages)
        source, target = lists if self._device_is_source else lists[::-1]
        argument["source_pages"], argument["target_pages"] = source, target
        argument["pages"], argument["first_layer"], argument["layers"] = count, layers.start, len(layers)
        items = count * len(layers) * self._vectors
        blocks = min(self._blocks, -(-items // MAX_THREADS))
        self._driver.launch(self._kernel, blocks, MAX_THREADS, argument, self._stream)

    def close(self) -> None:
        """Free the tables of planes."""
        self._memory.clear()


@dataclass(eq=False, slots=True)
class _Submission:
    handle: CopyHandle
    layers: LayerEvents | None
    after: CudaMark | None  # its event must not be used for another moment before the wait is queued
    start: Event | None = None
    end: Event | None = None
    slot: _Slot | None = None
    error: Exception | None = None


class DirectLane:
    """Copies between the device and registered host memory, queued at once; nothing here waits for any of
    them.

    Args:
        driver: the device; active while any method is called.
        geometry: both sides.
        direction: which way.
        blocks: of the kernel.
        rule: what goes to the copy engines.
        edges: of registrations of host memory, see `make_plan`.
    """

    def __init__(
        self,
        driver: Driver,
        geometry: Geometry,
        direction: Literal["backup", "load"],
        *,
        blocks: int,
        rule: CopyRule,
        edges: tuple[int, ...],
    ) -> None:
        self._driver = driver
        self._geometry = geometry
        self._device_is_source = direction == "backup"
        self._rule = rule
        self._edges = edges
        self._queued: deque[_Submission] = deque()
        self._events = EventPool(driver, timing=True)
        self._patience = Patience(driver)
        self.stream = driver.new_stream()
        try:
            self._slots = Slots(driver, self.stream)
            self._launcher = Launcher(driver, self.stream, geometry, direction, blocks)
        except BaseException:
            drain(self._patience, self.stream, CLOSE_SECONDS)
            driver.destroy_stream(self.stream)
            raise

    @property
    def running(self) -> int:
        """Submissions that have not ended, as far as was looked."""
        return len(self._queued)

    def submit(self, handle: CopyHandle, after: CudaMark | None, layers: LayerEvents | None) -> None:
        """Queue a submission; whatever fails belongs to the handle, which then ends behind what was queued.

        Raises:
            ArgumentError: more pages than a launch can count.
        """
        if len(handle.device_pages) > MAX_PAGES:
            raise ArgumentError(f"{len(handle.device_pages)} pages in one copy: allowed are {MAX_PAGES}")
        submission = _Submission(handle, layers, after)
        self._queued.append(submission)
        handle.begun = True  # nothing takes back what is queued
        try:
            if after is not None:
                self._driver.stream_wait(self.stream, after.event)
            submission.start = self._events.take()
            self._driver.record(submission.start, self.stream)
            self._queue(submission)
            submission.end = self._record_end()
        except Exception as error:
            submission.error = error
            # Part of the copies may be queued. Their pages and lists must not be used for anything else
            # before they have ended; if not even an event can be recorded, the whole stream tells.
            try:
                submission.end = self._record_end()
            except Exception:
                submission.end = None
            if layers is not None:
                layers.fail(error)

    def settle(self) -> list[CopyHandle]:
        """Submissions that have ended since, in order; never blocks."""
        ended = []
        while self._queued and self._is_done(self._queued[0]):
            submission = self._queued.popleft()
            self._end(submission)
            ended.append(submission.handle)
        return ended

    def stop(self, error: Exception) -> None:
        """Every submission has begun: nothing to stop."""

    def end_all(self, error: Exception) -> None:
        """Give up: every handle ends with `error`, though the device may still be at it."""
        for submission in self._queued:
            if submission.layers is not None:
                submission.layers.fail(error)
            submission.handle._end(error)

    def forget(self) -> bool:
        """After `end_all`: drop what has ended since; True if nothing is left."""
        while self._queued and self._is_done(self._queued[0]):
            self._queued.popleft()
        return not self._queued and self.idle()

    def idle(self) -> bool:
        """Nothing is queued, and the device is through with all that was."""
        if self._queued:
            return False
        try:
            return self._patience.stream_done(self.stream)
        except Exception:  # the device has failed: nothing runs on it any more
            return True

    def close(self) -> None:
        """Give back what the lane has; nothing may be queued any more."""
        self._events.close()
        self._slots.close()
        self._launcher.close()
        self._driver.destroy_stream(self.stream)

    def _record_end(self) -> Event:
        event = self._events.take()
        try:
            self._driver.record(event, self.stream)
        except BaseException:
            self._events.give_back(event)
            raise
        return event

    def _queue(self, submission: _Submission) -> None:
        handle, geometry = submission.handle, self._geometry
        plan = make_plan(
            handle.device_pages,
            handle.host_pages,
            geometry,
            self._rule,
            batched=self._driver.batched,
            edges=self._edges,
        )
        lists = (0, 0)
        if len(plan.device_pages):
            submission.slot, *found = self._slots.upload(plan.device_pages, plan.host_pages)
            lists = (found[0], found[1])
        if submission.layers is None:
            self._queue_layers(plan, lists, range(geometry.layers))
            return
        for layer in range(geometry.layers):
            self._queue_layers(plan, lists, range(layer, layer + 1))
            submission.layers.record(layer)

    def _queue_layers(self, plan: Plan, lists: tuple[int, int], layers: range) -> None:
        if len(plan.device_pages):
            self._launcher.launch(*lists, len(plan.device_pages), layers)
        if not len(plan.runs):
            return
        geometry = self._geometry
        copies = plan.engine_copies(geometry, layers)
        sides = ((copies.device, geometry.device.page_stride), (copies.host, geometry.host.page_stride))
        (sources, source_pitch), (targets, target_pitch) = sides if self._device_is_source else sides[::-1]
        if geometry.seamless:
            sizes = copies.pages.astype(np.uint64) * np.uint64(geometry.part_bytes)
            self._driver.copy_batch(targets, sources, sizes, self.stream)
            return
        for target, source, pages in zip(
            targets.tolist(), sources.tolist(), copies.pages.tolist(), strict=True
        ):
            if pages == 1:
                self._driver.copy(target, source, geometry.part_bytes, self.stream)
            else:
                self._driver.copy_2d(
                    target, target_pitch, source, source_pitch, geometry.part_bytes, pages, self.stream
                )

    def _is_done(self, submission: _Submission) -> bool:
        try:
            if submission.end is None:
                return self._patience.stream_done(self.stream)
            return self._patience.event_done(submission.end)
        except Exception as error:  # the device has failed: nothing on it will end any better
            submission.error = submission.error or error
            return True

    def _end(self, submission: _Submission) -> None:
        handle = submission.handle
        if submission.error is None and submission.start is not None and submission.end is not None:
            try:
                handle.seconds = self._driver.seconds_between(submission.start, submission.end)
            except Exception as error:
                submission.error = error
        for event in (submission.start, submission.end):
            if event is not None:
                self._events.give_back(event)
        if submission.slot is not None:
            self._slots.give_back(submission.slot)
        if submission.error is not None and submission.layers is not None:
            submission.layers.fail(submission.error)
        handle._end(submission.error)
