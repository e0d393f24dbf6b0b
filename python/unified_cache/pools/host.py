"""The host pool: pages in CPU memory, one page contiguous."""

import mmap
from typing import Final

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError
from unified_cache.pools.device import MhaDevicePool
from unified_cache.pools.memory import available_bytes

__all__ = ["MhaHostPool", "host_pages_for"]


def host_pages_for(device: MhaDevicePool, ratio: float, size_gb: float | None) -> int:
    """Pages of a host pool beside `device`, from `hicache_size` in GB if given, else from `hicache_ratio`.

    Raises:
        ArgumentError: less than a page, or more than this process may still take.
    """
    if size_gb is not None:
        setting, pages = f"hicache_size={size_gb:g} (GB)", int(size_gb * 1e9) // device.page_bytes
    else:
        setting, pages = f"hicache_ratio={ratio:g}", int(device.num_pages * ratio)
    if pages < 1:
        raise ArgumentError(
            f"{setting} is less than one page of {device.page_bytes} bytes: make it larger, "
            "or set write_policy=None for no host tier"
        )
    needed = pages * device.page_bytes
    available = available_bytes()
    if available is not None and needed > available:
        raise ArgumentError(
            f"{setting} asks for {needed / 1e9:.3f} GB of memory, {available / 1e9:.3f} GB are available: "
            "make it smaller"
        )
    if pages >= 2**32:
        raise ArgumentError(f"{setting} makes {pages} host pages, allowed are at most {2**32 - 1}")
    return pages


class MhaHostPool:
    """Pages of `device`'s shape in layout page_first: (num_pages, 2, page_size, layers, heads, head_dim).

    The memory is mapped once and never moves.
    """

    layout: Final = "page_first"

    def __init__(self, device: MhaDevicePool, num_pages: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = device.page_bytes
        try:
            # Private: a child process that writes to it must not change ours.
            memory = mmap.mmap(-1, num_pages * self.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ArgumentError(
                f"{num_pages} host pages of {self.page_bytes} bytes can not be mapped ({error.strerror}): "
                "make hicache_ratio or hicache_size smaller"
            ) from None
        self._bytes = memoryview(memory)
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        shape = (num_pages, 2, device.page_size, device.layers)
        self.data = raw.view(device.dtype).view(*shape, device.heads, device.head_dim)
        # The same memory as (num_pages, 2, page_size, layers, words): what copies see.
        self.words = raw.view(device.words.dtype).view(*shape, device.words.shape[-1])

    def page_view(self, page: int) -> memoryview:
        """The bytes of one page, contiguous and writable, without a copy."""
        if not 0 <= page < self.num_pages:
            raise ArgumentError(f"host page {page} is not in 0..{self.num_pages - 1}")
        return self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes]
