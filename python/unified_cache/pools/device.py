"""The device pools: where the engine's attention reads and writes.

A pool either has memory of its own, or it is made from the tensors of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError, CapacityError
from unified_cache.pools.checks import MOST_PAGES, MOST_TOKENS, require_integer
from unified_cache.pools.memory import available_bytes
from unified_cache.pools.planes import PageShape, PoolPlanes
from unified_cache.pools.tensors import tensor_of

__all__ = ["DevicePool", "MhaDevicePool", "MlaDevicePool"]

_DEVICES = ("cpu", "cuda")


class DevicePool:
    """What the cache knows of a device pool of either family.

    Attributes:
        kind: "mha" (keys and values) or "mla" (one latent buffer).
        num_pages: pages in the pool.
        page_size: tokens a page.
        layers: layers of the model.
        dtype: element type.
        device: where the pool lies.
        shape: what a page holds.
        planes: where the pages are.
        page_bytes: bytes of a page, all layers.
        data: the pool's own memory as one tensor; None if the engine brought its tensors.
    """

    kind: ClassVar[Literal["mha", "mla"]]

    num_pages: int
    page_size: int
    layers: int
    dtype: torch.dtype
    device: torch.device
    shape: PageShape
    planes: PoolPlanes
    page_bytes: int
    data: torch.Tensor | None

    def _set(self, tensors: Sequence[torch.Tensor], parts: int, data: torch.Tensor | None) -> None:
        """Take the tensors of the planes, layers outermost, as the pool's memory."""
        self.planes = PoolPlanes(tensors, parts)
        self.shape = self.planes.shape
        self.num_pages = self.planes.pages
        self.page_size = self.shape.tokens
        self.layers = self.shape.layers
        self.page_bytes = self.shape.page_bytes
        self.dtype = tensors[0].dtype
        self.device = self.planes.device
        self.data = data

    def _plane(self, layer: int, part: int) -> torch.Tensor:
        if not 0 <= layer < self.layers:
            raise ArgumentError(f"layer must be in 0..{self.layers - 1}, not {layer}")
        return self.planes.tensors[layer * self.shape.parts + part]


class MhaDevicePool(DevicePool):
    """Keys and values of a model with multi-head (or grouped) attention, in pages.

    Args:
        num_pages: pages in the pool.
        page_size: tokens a page, 1 to 256.
        layers: layers of the model.
        heads: heads of keys and values.
        head_dim: elements a head.
        dtype: element type, any that torch has: copies see bytes.
        device: where the pool lies, on a CPU or a CUDA device.

    Attributes:
        data: (2, layers, num_pages, page_size, heads, head_dim), see `DevicePool`.

    Raises:
        ArgumentError: a size out of range or too large for this machine's memory, a dtype or device that can
            not be used.
        CapacityError: the device has no room for it.
    """

    kind = "mha"

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
        _check_sizes(num_pages, page_size, layers=layers, heads=heads, head_dim=head_dim)
        data = _zeros((2, layers, num_pages, page_size, heads, head_dim), dtype, device)
        self._set([data[part, layer] for layer in range(layers) for part in range(2)], 2, data)
        self.heads = heads
        self.head_dim = head_dim

    @classmethod
    def from_tensors(cls, keys: Sequence[Any], values: Sequence[Any]) -> Self:
        """A pool on an engine's own tensors: no byte is copied, and the pool keeps them alive.

        Args:
            keys: for each layer a view (num_pages, page_size, heads, head_dim), as a torch tensor, a CuPy
                array, or anything with DLPack or ``__cuda_array_interface__``. Any strides, so also views of
                buffers in another order, but the elements of a head contiguous. A tensor that requires grad
                is taken without its history.
            values: likewise; all of one device, dtype, shape and strides.

        Raises:
            ArgumentError: tensors that are not so, that overlap, or whose pages are too many or too large.
        """
        if len(keys) != len(values):
            raise ArgumentError(
                f"keys and values must be one for each layer, not {len(keys)} and {len(values)}"
            )
        tensors = []
        for layer, both in enumerate(zip(keys, values, strict=True)):
            for name, value in zip(("keys", "values"), both, strict=True):
                tensor = tensor_of(value, f"{name}[{layer}]")
                if tensor.dim() != 4:
                    raise ArgumentError(
                        f"{name}[{layer}] must be (num_pages, page_size, heads, head_dim), "
                        f"not {tuple(tensor.shape)}"
                    )
                tensors.append(tensor)
        pool = cls.__new__(cls)
        pool._set(_of_one_engine(tensors, "keys and values"), 2, None)
        _check_own(pool, "keys and values")
        pool.heads, pool.head_dim = tensors[0].shape[2:]
        return pool

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer, a view (num_pages, page_size, heads, head_dim)."""
        return self._plane(layer, 0)

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer, a view (num_pages, page_size, heads, head_dim)."""
        return self._plane(layer, 1)


class MlaDevicePool(DevicePool):
    """The latent buffer of a model with multi-head latent attention, in pages.

    Args:
        num_pages: pages in the pool.
        page_size: tokens a page, 1 to 256.
        layers: layers of the model.
        latent_dim: elements a token, the part without position and the part with it together.
        dtype: element type, any that torch has: copies see bytes.
        device: where the pool lies, on a CPU or a CUDA device.

    Attributes:
        data: (layers, num_pages, page_size, latent_dim), see `DevicePool`.

    Raises:
        ArgumentError: a size out of range or too large for this machine's memory, a dtype or device that can
            not be used.
        CapacityError: the device has no room for it.
    """

    kind = "mla"

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layers: int,
        latent_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        _check_sizes(num_pages, page_size, layers=layers, latent_dim=latent_dim)
        data = _zeros((layers, num_pages, page_size, latent_dim), dtype, device)
        self._set([data[layer].unsqueeze(2) for layer in range(layers)], 1, data)
        self.latent_dim = latent_dim

    @classmethod
    def from_tensors(cls, latents: Sequence[Any]) -> Self:
        """A pool on an engine's own tensors: no byte is copied, and the pool keeps them alive.

        Args:
            latents: for each layer a view (num_pages, page_size, latent_dim), or with a dimension of 1 before
                the last one, as engines do that treat it as one head. Otherwise as the keys of
                `MhaDevicePool.from_tensors`.

        Raises:
            ArgumentError: tensors that are not so, that overlap, or whose pages are too many or too large.
        """
        tensors = []
        for layer, value in enumerate(latents):
            tensor = tensor_of(value, f"latents[{layer}]")
            if tensor.dim() == 3:
                tensor = tensor.unsqueeze(2)
            if tensor.dim() != 4 or tensor.shape[2] != 1:
                raise ArgumentError(
                    f"latents[{layer}] must be (num_pages, page_size, latent_dim), not {tuple(tensor.shape)}"
                )
            tensors.append(tensor)
        pool = cls.__new__(cls)
        pool._set(_of_one_engine(tensors, "latents"), 1, None)
        _check_own(pool, "latents")
        pool.latent_dim = tensors[0].shape[3]
        return pool

    def latent(self, layer: int) -> torch.Tensor:
        """Latents of a layer, a view (num_pages, page_size, latent_dim)."""
        return self._plane(layer, 0).squeeze(2)


def _check_sizes(num_pages: int, page_size: int, **others: int) -> None:
    require_integer("num_pages", num_pages, 1, MOST_PAGES)
    require_integer("page_size", page_size, 1, MOST_TOKENS)
    for name, value in others.items():
        require_integer(name, value, 1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    try:
        size = torch.empty(0, dtype=torch.uint8).view(dtype).element_size()
    except (RuntimeError, TypeError):
        raise ArgumentError(f"dtype must be a torch.dtype whose elements are bytes, not {dtype!r}") from None
    try:
        at = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device must be a CPU or CUDA device, not {device!r}: {error}") from None
    if at.type not in _DEVICES:
        raise ArgumentError(f"device must be a CPU or CUDA device, not {str(at)!r}")
    needed = size
    for dimension in shape:
        needed *= dimension
    asked = f"a device pool of {needed} bytes ({needed / 1e9:.3f} GB)"
    limit = available_bytes() if at.type == "cpu" else None
    if needed > (2**63 - 1 if limit is None else limit):
        known = "" if limit is None else f": {limit / 1e9:.3f} GB are available"
        raise ArgumentError(f"{asked} does not fit this machine{known}; make num_pages smaller")
    try:
        # As bytes: not every dtype can be filled.
        return torch.zeros(needed, dtype=torch.uint8, device=at).view(dtype).view(shape)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise CapacityError(f"{asked} does not fit {at}, make num_pages smaller: {error}") from None
    except (RuntimeError, AssertionError) as error:
        if at.type == "cpu":
            raise CapacityError(f"{asked} does not fit {at}, make num_pages smaller: {error}") from None
        raise ArgumentError(f"device {str(at)!r} can not be used: {error}") from None


def _of_one_engine(tensors: list[torch.Tensor], names: str) -> list[torch.Tensor]:
    if not tensors:
        raise ArgumentError(f"{names} must be one for each layer, not none")
    device = tensors[0].device
    if device.type not in _DEVICES:
        raise ArgumentError(f"{names} must be on a CPU or CUDA device, not {str(device)!r}")
    return tensors


def _check_own(pool: DevicePool, names: str) -> None:
    require_integer(f"page_size of {names}", pool.page_size, 1, MOST_TOKENS)
    require_integer(f"num_pages of {names}", pool.num_pages, 1, MOST_PAGES)
    planes, shape = pool.planes, pool.shape
    # Nested strides: from the smallest on, each one steps over all that lies inside it.
    steps = [
        (planes.page_stride, planes.pages),
        (planes.token_stride, shape.tokens),
        (planes.head_stride, shape.heads),
    ]
    extent = shape.run_bytes
    for stride, count in sorted(step for step in steps if step[1] > 1):
        if stride < extent:
            raise ArgumentError(f"{names} must not overlap in themselves: a stride is {stride} bytes")
        extent += stride * (count - 1)
    if np.unique(planes.addresses).size != planes.addresses.size:
        raise ArgumentError(f"{names} must all be different: one is given twice")
