"""Where the keys and values of a model of `transformers` lie in a device pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.engines.transformers_model import KvShape
from unified_cache.errors import ArgumentError
from unified_cache.pools.allocator import Pages
from unified_cache.pools.device import DevicePool, MhaDevicePool, MlaDevicePool
from unified_cache.pools.memory import available_bytes

__all__ = ["ModelPages"]

# Of the memory that is free, what a device pool takes if nobody says: the model needs the most of it for the
# texts that it computes, and on a CPU the host pool comes beside it.
_SHARE = {"cuda": 0.25, "cpu": 1 / 16}


class ModelPages:
    """The device pool for a model, and the way between its pages and what the model computes with.

    Args:
        shape: what the model keeps of a token.
        page_size: tokens a page.
        num_pages: pages; None: as many as `device_size` has room for.
        device_size: GB (10**9 bytes); neither: a quarter of what is free on a GPU, a sixteenth on a CPU.

    Attributes:
        shape: what the model keeps of a token.
        pool: the device pool.

    Raises:
        ArgumentError: both sizes, or one that is out of range.
        CapacityError: there is no memory for the pool.
    """

    def __init__(
        self, shape: KvShape, page_size: int, num_pages: int | None, device_size: float | None
    ) -> None:
        self.shape = shape
        self._page_size = page_size
        if num_pages is None:
            num_pages = _num_pages(shape, page_size, device_size)
        elif device_size is not None:
            raise ArgumentError("num_pages and device_size must not be given both")
        self.pool: DevicePool
        if shape.key_dim == shape.value_dim:
            self.pool = MhaDevicePool(
                num_pages, page_size, shape.layers, shape.heads, shape.key_dim, shape.dtype, shape.device
            )
        else:
            # Keys and values side by side: nobody but us looks into it.
            size = shape.heads * (shape.key_dim + shape.value_dim)
            self.pool = MlaDevicePool(num_pages, page_size, shape.layers, size, shape.dtype, shape.device)

    def _halves(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, (num_pages, page_size, heads, size) each; views."""
        if isinstance(self.pool, MhaDevicePool):
            return self.pool.k(layer), self.pool.v(layer)
        assert isinstance(self.pool, MlaDevicePool)
        shape, latent = self.shape, self.pool.latent(layer)
        edge = shape.heads * shape.key_dim
        keys, values = latent[..., :edge], latent[..., edge:]
        front = latent.shape[:2]
        return (
            keys.view(*front, shape.heads, shape.key_dim),
            values.view(*front, shape.heads, shape.value_dim),
        )

    def read(self, layers: Sequence[Any], pages: Sequence[Pages], length: int) -> int:
        """Begin the layers of a `PrefixKV` with the first `length` tokens; returns it.

        Args:
            layers: without tokens.
            pages: for each row.
            length: whole pages of tokens.
        """
        if length == 0:
            return 0
        index = self._index(np.stack([row[: length // self._page_size] for row in pages]))
        # Room for the rest of a prompt and an answer of usual length, so that it need not grow at once.
        room = length + max(length // 4, 256)
        with torch.no_grad():
            for layer, held in enumerate(layers):
                filled = []
                for half in self._halves(layer):
                    rows, _ = index.shape
                    whole = half.new_empty((rows, self.shape.heads, room, half.shape[-1]))
                    # (rows, pages, page_size, heads, size) -> (rows, heads, tokens, size)
                    whole[:, :, :length] = half[index].flatten(1, 2).transpose(1, 2)
                    filled.append(whole)
                held.fill(*filled, length)
        return length

    def write(self, layers: Sequence[Any], row: int, pages: Pages, start: int, stop: int) -> None:
        """Put the tokens from `start` to `stop` of a row, whole pages, into `pages`."""
        index = self._index(pages[: (stop - start) // self._page_size])
        with torch.no_grad():
            for layer, held in enumerate(layers):
                for half, new in zip(self._halves(layer), (held.keys, held.values), strict=True):
                    tokens = new[row, :, start:stop].transpose(0, 1)
                    half[index] = tokens.reshape(-1, self._page_size, *tokens.shape[1:])

    def _index(self, pages: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self.shape.device)


def _num_pages(shape: KvShape, page_size: int, device_size: object) -> int:
    page_bytes = shape.token_bytes * page_size
    if device_size is not None:
        if not isinstance(device_size, int | float) or not device_size > 0:
            raise ArgumentError(f"device_size must be a number > 0 of GB, not {device_size!r}")
        size = device_size * 10**9
    else:
        free = torch.cuda.mem_get_info(shape.device)[0] if shape.device.type == "cuda" else available_bytes()
        size = _SHARE[shape.device.type] * (free or 4 * 10**9)
    pages = int(size // page_bytes)
    if pages < 1:
        raise ArgumentError(
            f"device_size must be room for a page of {page_bytes} bytes, not {size / 1e9:g} GB"
        )
    return pages
