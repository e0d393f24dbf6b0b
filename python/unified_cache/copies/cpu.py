"""Copies on threads, one for each direction.

They take the place of a GPU's copy streams, with the same asynchrony: a submission returns at once, and
its end is seen when somebody asks. A device pool that lies on a GPU works too, through torch's own copies.
"""

import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Literal

import numpy as np

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError, ClosedError, CopyError
from unified_cache.pools.allocator import Pages
from unified_cache.pools.device import MhaDevicePool
from unified_cache.pools.host import MhaHostPool
from unified_cache.worker import Worker

__all__ = ["CopyHandle", "CpuCopyEngine"]

# Bytes gathered at once. To host small, so that the intermediate copy stays in the processor's cache while
# its layers change places; from host a layer of as many pages is taken at a time. Measured, both.
_TO_HOST_BYTES = 1 << 20
_TO_DEVICE_BYTES = 8 << 20
_GPU_BYTES = 32 << 20  # each chunk is a transfer there


class CopyHandle:
    """One submission: which pages go where, and whether that has ended."""

    def __init__(self, direction: Literal["backup", "load"], device_pages: Pages, host_pages: Pages) -> None:
        self.direction = direction
        self.device_pages = device_pages
        self.host_pages = host_pages
        self.error: Exception | None = None
        self.begun = False
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


class CpuCopyEngine:
    """Copies pages between a device pool and a host pool. Submissions of one direction end in order."""

    def __init__(self, device: MhaDevicePool, host: MhaHostPool) -> None:
        self._device = device
        self._host = host
        self._ended: queue.SimpleQueue[CopyHandle] = queue.SimpleQueue()
        self._running = 0
        self._open: set[CopyHandle] = set()  # submitted, and their end was not taken yet
        self._workers = {
            "backup": Worker("unified-cache backup copies"),
            "load": Worker("unified-cache load copies"),
        }

    @property
    def running(self) -> int:
        """Submissions whose end was not taken yet."""
        return self._running

    def submit_backup(self, device_pages: Pages, host_pages: Pages) -> CopyHandle:
        """Copy device pages to host pages, one by one in the order given."""
        return self._submit(CopyHandle("backup", device_pages, host_pages))

    def submit_load(self, device_pages: Pages, host_pages: Pages) -> CopyHandle:
        """Copy host pages to device pages, one by one in the order given."""
        return self._submit(CopyHandle("load", device_pages, host_pages))

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
        self._open.difference_update(taken)
        return taken

    def close(self) -> None:
        """End the threads; submissions that have not begun end with an error. More than once is fine."""
        for worker in self._workers.values():
            worker.close()
        for handle in self._open:
            if not handle.begun:
                handle._end(ClosedError("the cache was closed before this copy began"))
        self._open.clear()

    def _submit(self, handle: CopyHandle) -> CopyHandle:
        if len(handle.device_pages) != len(handle.host_pages):
            raise ArgumentError(
                f"{len(handle.device_pages)} device pages and {len(handle.host_pages)} host pages: "
                "a copy needs as many of the one as of the other"
            )
        self._running += 1
        self._open.add(handle)
        self._workers[handle.direction].submit(partial(self._run, handle))
        return handle

    def _run(self, handle: CopyHandle) -> None:
        handle.begun = True
        error = None
        try:
            if handle.direction == "backup":
                self._to_host(handle)
            else:
                self._to_device(handle)
        except Exception as caught:  # it belongs to whoever takes the handle, not to this thread
            error = caught
        handle._end(error)
        self._ended.put(handle)

    def _chunks(self, handle: CopyHandle, chunk_bytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._device.device.type != "cpu":
            chunk_bytes = _GPU_BYTES
        step = max(chunk_bytes // self._device.page_bytes, 1)
        for start in range(0, len(handle.device_pages), step):
            part = slice(start, start + step)
            device = torch.from_numpy(handle.device_pages[part].astype(np.int64))
            yield device.to(self._device.device), torch.from_numpy(handle.host_pages[part].astype(np.int64))

    def _to_host(self, handle: CopyHandle) -> None:
        device, host = self._device.words, self._host.words
        for device_pages, host_pages in self._chunks(handle, _TO_HOST_BYTES):
            if len(device_pages) == 1:
                # (2, layers, page_size, words) -> (2, page_size, layers, words), nothing in between
                host[int(host_pages[0])].copy_(device[:, :, int(device_pages[0])].transpose(1, 2))
                continue
            # (2, layers, pages, page_size, words) -> (pages, 2, page_size, layers, words)
            pages = device.index_select(2, device_pages).to("cpu").permute(2, 0, 3, 1, 4)
            host.index_copy_(0, host_pages, pages.contiguous())

    def _to_device(self, handle: CopyHandle) -> None:
        chunks = list(self._chunks(handle, _TO_DEVICE_BYTES))
        # Layer by layer: a forward will be able to start as soon as its first layer is there.
        for layer in range(self._device.layers):
            source, target = self._host.words[:, :, :, layer], self._device.words[:, layer]
            for device_pages, host_pages in chunks:
                # (pages, 2, page_size, words) -> (2, pages, page_size, words)
                pages = source.index_select(0, host_pages).transpose(0, 1)
                target.index_copy_(1, device_pages, pages.to(target.device))
        if self._device.device.type == "cuda":
            torch.cuda.current_stream(self._device.device).synchronize()
