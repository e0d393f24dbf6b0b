"""The kernel's source, the options it is compiled with, and its one argument."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from unified_cache.copies.geometry import Geometry
from unified_cache.errors import MissingDependencyError

__all__ = [
    "ARGUMENT",
    "MAX_PAGES",
    "MAX_THREADS",
    "OPTIONS",
    "kernel_argument",
    "kernel_name",
    "kernel_names",
    "kernel_source",
]

# For NVRTC, besides the architecture.
OPTIONS: Final = ("--std=c++17",)
# Of a block: the kernel's launch bound.
MAX_THREADS: Final = 1024
# Of one launch: its counters have 32 bits.
MAX_PAGES: Final = 2**30

# `struct CopyPages` of the source.
ARGUMENT: Final[np.dtype[np.void]] = np.dtype(
    [
        ("source_planes", np.uint64),
        ("target_planes", np.uint64),
        ("source_pages", np.uint64),
        ("target_pages", np.uint64),
        ("source_page_stride", np.uint64),
        ("source_token_stride", np.uint64),
        ("source_head_stride", np.uint64),
        ("target_page_stride", np.uint64),
        ("target_token_stride", np.uint64),
        ("target_head_stride", np.uint64),
        ("pages", np.uint32),
        ("first_layer", np.uint32),
        ("layers", np.uint32),
        ("tokens", np.uint32),
        ("heads", np.uint32),
        ("vectors", np.uint32),
    ]
)


def kernel_source() -> str:
    """The CUDA C++ source.

    Raises:
        MissingDependencyError: it is not beside this module, so the package is not whole.
    """
    source = files("unified_cache.copies").joinpath("copy_pages.cu")
    try:
        return source.read_text(encoding="utf-8")
    except OSError as error:
        raise MissingDependencyError(
            f"{source} can not be read ({error}): install unified-cache again; from a source tree, "
            "kernels/ must be there"
        ) from None


def kernel_name(width: int, parts: int) -> str:
    """The entry that copies vectors of `width` bytes, of all `parts` of a layer at once."""
    return f"copy_pages_w{width}_p{parts}"


def kernel_names() -> list[str]:
    """All entries."""
    return [kernel_name(width, parts) for width in (16, 8, 4, 2, 1) for parts in (1, 2)]


def kernel_argument(
    geometry: Geometry,
    direction: Literal["backup", "load"],
    device_planes: int,
    host_planes: int,
) -> npt.NDArray[np.void]:
    """The argument of launches in one direction, all layers; page lists and their length are still 0.

    Args:
        geometry: both sides.
        direction: "backup" from device to host, "load" back.
        device_planes: where the kernel finds the addresses of the device's planes, uint64 (layers, parts).
        host_planes: and those of the host's planes.
    """
    argument: npt.NDArray[Any] = np.zeros((), ARGUMENT)
    sides = ((geometry.device, device_planes), (geometry.host, host_planes))
    for name, (side, planes) in zip(
        ("source", "target"), sides if direction == "backup" else sides[::-1], strict=True
    ):
        argument[f"{name}_planes"] = planes
        argument[f"{name}_page_stride"] = side.page_stride
        argument[f"{name}_token_stride"] = side.token_stride
        argument[f"{name}_head_stride"] = side.head_stride
    argument["layers"] = geometry.layers
    argument["tokens"] = geometry.tokens
    argument["heads"] = geometry.heads
    argument["vectors"] = geometry.run_bytes // geometry.width
    return argument
