"""The host pool: pages in CPU memory, in one of the host layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError, ClosedError
from unified_cache.pools.checks import MOST_PAGES, require_integer
from unified_cache.pools.device import DevicePool
from unified_cache.pools.host_memory import HostMemory, MappedMemory
from unified_cache.pools.layouts import host_layout
from unified_cache.pools.memory import available_bytes
from unified_cache.pools.pinning import CudaRegistrar, Registrar
from unified_cache.pools.planes import PoolPlanes

__all__ = ["HostPool", "PageBuffers", "host_pages_for"]


def host_pages_for(devices: Sequence[DevicePool], ratio: float, size_gb: float | None) -> int:
    """Pages of the host pools beside these, from `hicache_size` in GB if given, else from `hicache_ratio`.

    A page is one of each pool, and the size is that of all host pools together.

    Raises:
        ArgumentError: less than a page, or more than this process may still take.
    """
    page_bytes = sum(device.page_bytes for device in devices)
    if size_gb is not None:
        setting, pages = f"hicache_size={size_gb:g} (GB)", int(size_gb * 1e9) // page_bytes
    else:
        setting, pages = f"hicache_ratio={ratio:g}", int(devices[0].num_pages * ratio)
    if pages < 1:
        raise ArgumentError(
            f"{setting} is less than one page of {page_bytes} bytes: make it larger, "
            "or set write_policy=None for no host tier"
        )
    needed = pages * page_bytes
    available = available_bytes()
    if available is not None and needed > available:
        raise ArgumentError(
            f"{setting} asks for {needed / 1e9:.3f} GB of memory, {available / 1e9:.3f} GB are available: "
            "make it smaller"
        )
    if pages > MOST_PAGES:
        raise ArgumentError(f"{setting} makes {pages} host pages, allowed are at most {MOST_PAGES}")
    return pages


@dataclass(frozen=True, slots=True)
class PageBuffers:
    """Where the bytes of some pages lie, for transfers without a copy. Valid until the pool is closed.

    Attributes:
        addresses: uint64 (pages, pieces).
        sizes: uint64 (pieces,), in bytes, the same for each page.
    """

    addresses: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]


class HostPool:
    """Pages of a device pool's shape in CPU memory, which is mapped once and never moves.

    Args:
        device_pool: whose pages it takes; nothing of it is kept.
        num_pages: pages in the pool, at most 2**32 - 1.
        layout: one of `HOST_LAYOUTS`.
        memory: how its memory is made; None: `HostMemory()`.
        registrar: what registers the memory; None: CUDA for a device pool on a CUDA device, else nothing.
        lend: memory that the pool lies in instead of its own, see `MappedMemory`.

    Attributes:
        num_pages: pages in the pool.
        page_bytes: bytes of a page, all layers.
        layout: the layout's name.
        contiguous_pages: a page is one run of bytes, so there is a `page_view` of it.
        shape: what a page holds.
        dtype: element type.

    Raises:
        ArgumentError: a size or a layout that is not allowed, or more memory than can be mapped.
        CapacityError: the memory can not be had, or not be registered and must be.
    """

    def __init__(
        self,
        device_pool: DevicePool,
        num_pages: int,
        *,
        layout: str = "page_first",
        memory: HostMemory | None = None,
        registrar: Registrar | None = None,
        lend: Callable[[int], memoryview | None] | None = None,
    ) -> None:
        require_integer("num_pages", num_pages, 1, MOST_PAGES)
        order = host_layout(layout)
        memory = HostMemory() if memory is None else memory
        if registrar is None and device_pool.device.type == "cuda" and memory.pinned != "off":
            registrar = CudaRegistrar(device_pool.device)
        self.num_pages = num_pages
        self.layout = layout
        self.contiguous_pages = order.contiguous_pages
        self.shape = device_pool.shape
        self.dtype = device_pool.dtype
        self.page_bytes = self.shape.page_bytes
        mapped = MappedMemory(
            num_pages * self.page_bytes,
            memory,
            unit=self.page_bytes if order.contiguous_pages else 1,
            registrar=registrar,
            device=device_pool.device,
            lend=lend,
        )
        flat = torch.frombuffer(mapped.buffer, dtype=torch.uint8).view(self.dtype)
        elements = self.shape.run_bytes // flat.element_size()
        self._memory: MappedMemory | None = mapped
        self._bytes = mapped.buffer
        self._planes = order.planes(flat, num_pages, self.shape)
        self._data = flat.view(order.shape(num_pages, self.shape, elements))

    @property
    def planes(self) -> PoolPlanes:
        """Where the pages are. Whoever holds them holds the memory, also after `close`."""
        self._open()
        return self._planes

    @property
    def data(self) -> torch.Tensor:
        """The whole pool, in the shape that its layout is documented with."""
        self._open()
        return self._data

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(address, bytes) of each registration with the GPU, in order; empty if there is none."""
        return [] if self._memory is None else self._memory.pieces

    @property
    def registered(self) -> bool:
        """The GPU may reach the memory by itself."""
        return bool(self.pieces)

    @property
    def lent(self) -> bool:
        """The memory was lent to the pool."""
        return self._open().lent

    @property
    def memory(self) -> memoryview:
        """The bytes of the whole pool, writable, without a copy: for storage that must know them."""
        self._open()
        return self._bytes

    def page_view(self, page: int) -> memoryview:
        """The bytes of one page, contiguous and writable, without a copy.

        Raises:
            ArgumentError: no such page, or a layout without contiguous pages.
            ClosedError: the pool was closed.
        """
        self._open()
        if not self.contiguous_pages:
            raise ArgumentError(
                f"host_layout={self.layout!r} has no contiguous pages to view: take another layout, "
                "or get_page_buffers"
            )
        if not 0 <= page < self.num_pages:
            raise ArgumentError(f"host page {page} is not in 0..{self.num_pages - 1}")
        return self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes]

    def get_page_buffers(self, pages: npt.ArrayLike) -> PageBuffers:
        """Addresses and sizes of pages, for storage that reads and writes host memory by itself.

        Args:
            pages: ids.

        Returns:
            One piece a page; with layer_first one for each layer and part, layers outermost (K of layer 0,
            V of layer 0, K of layer 1, ...).

        Raises:
            ArgumentError: not one-dimensional integers, or a page that is not in the pool.
            ClosedError: the pool was closed.
        """
        memory = self._open()
        given = _page_ids(pages, self.num_pages)
        if self.contiguous_pages:
            starts, step, size = np.array([memory.address], np.uint64), self.page_bytes, self.page_bytes
        else:
            starts = self._planes.addresses.ravel()
            step = self._planes.page_stride
            size = self.shape.tokens * self.shape.heads * self.shape.run_bytes
        addresses = starts[np.newaxis, :] + given[:, np.newaxis] * np.uint64(step)
        return PageBuffers(addresses, np.full(len(starts), size, np.uint64))

    def close(self) -> None:
        """Unregister the memory and let go of it; copies must have ended. Twice is fine.

        Every piece is tried; there is one RuntimeWarning if some can not be unregistered. Views and planes
        that are still held stay valid, as ordinary memory: it goes with the last of them.
        """
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        del self._bytes, self._planes, self._data
        memory.close()

    def _open(self) -> MappedMemory:
        if self._memory is None:
            raise ClosedError("the host pool was closed")
        return self._memory


def _page_ids(pages: Any, num_pages: int) -> npt.NDArray[np.uint64]:
    given = np.asarray(pages)
    if given.size == 0:
        return np.empty(0, np.uint64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ArgumentError(f"pages must be one-dimensional integers, not {given.dtype} {given.shape}")
    outside = (given < 0) | (given >= num_pages)
    if outside.any():
        raise ArgumentError(f"host page {given[outside][0]} is not in 0..{num_pages - 1}")
    return given.astype(np.uint64)
