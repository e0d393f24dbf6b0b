"""The device pool: where the engine's attention reads and writes."""

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError

__all__ = ["MhaDevicePool", "word_type"]


def word_type(row_bytes: int) -> torch.dtype:
    """The widest integer that fills a row of that many bytes, so that copies need not know the dtype."""
    for size, dtype in ((8, torch.int64), (4, torch.int32), (2, torch.int16)):
        if row_bytes % size == 0:
            return dtype
    return torch.uint8


class MhaDevicePool:
    """Keys and values of a model with multi-head (or grouped) attention, in pages.

    Args:
        num_pages: pages in the pool.
        page_size: tokens a page.
        layers: layers of the model.
        heads: heads of keys and values.
        head_dim: elements a head.
        dtype: element type.
        device: where the pool lies.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        sizes: dict[str, object] = {
            "num_pages": num_pages,
            "page_size": page_size,
            "layers": layers,
            "heads": heads,
            "head_dim": head_dim,
        }
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{name} must be an integer >= 1, not {value!r}")
        if page_size > 256:
            raise ArgumentError(f"page_size must be an integer in 1..256, not {page_size}")
        if num_pages >= 2**32:
            raise ArgumentError(f"num_pages must be an integer in 1..{2**32 - 1}, not {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.layers = layers
        self.heads = heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.data = torch.zeros(
            (2, layers, num_pages, page_size, heads, head_dim), dtype=dtype, device=device
        )
        self.device = self.data.device
        row_bytes = heads * head_dim * self.data.element_size()
        self.page_bytes = 2 * layers * page_size * row_bytes
        # The same memory as (2, layers, num_pages, page_size, words): what copies see.
        rows = self.data.view(torch.uint8).view(2, layers, num_pages, page_size, row_bytes)
        self.words = rows.view(word_type(row_bytes))

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer, a view (num_pages, page_size, heads, head_dim)."""
        return self.data[0, layer]

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer, a view (num_pages, page_size, heads, head_dim)."""
        return self.data[1, layer]
