"""Which memory a machine's processors and devices have beside them, and how to ask for it."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unified_cache._torch import torch

__all__ = ["node_of_device", "nodes", "prefer_node", "preferring"]

_CALLS = {  # libc has no functions for them
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237},
}
_MPOL_PREFERRED = 1
_MOST_NODES = 1024  # of any kernel


def nodes(root: Path = Path("/")) -> list[int]:
    """The machine's NUMA nodes; empty if it does not say."""
    folder = root / "sys/devices/system/node"
    return sorted(int(path.name[4:]) for path in folder.glob("node*") if path.name[4:].isdigit())


def node_of_device(device: torch.device, root: Path = Path("/")) -> int | None:
    """The NUMA node beside a CUDA device; None if it has none of its own.

    Raises:
        OSError: the machine does not say.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        at = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        raise OSError("this torch does not know the device's place on the PCI bus") from None
    try:
        node = int((root / "sys/bus/pci/devices" / at / "numa_node").read_text())
    except ValueError as error:
        raise OSError(f"the numa_node of {at} can not be read: {error}") from None
    return None if node < 0 else node


def prefer_node(address: int, size: int, node: int) -> None:
    """Memory of this range comes from this node while that has any, when it is touched for the first time.

    Args:
        address: a multiple of the system's page size.
        size: bytes.
        node: the node's number.

    Raises:
        OSError: the system refuses.
    """
    mask, bits = _mask(node)
    _call(
        "mbind",
        ctypes.c_void_p(address),
        ctypes.c_ulong(size),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        bits,
        ctypes.c_uint(0),
    )


@contextmanager
def preferring(node: int) -> Iterator[None]:
    """Memory that this thread touches first comes from this node while that has any.

    Raises:
        OSError: the system refuses.
    """
    before, (mask, bits) = ctypes.c_int(), _mask(_MOST_NODES - 1)
    _call("get_mempolicy", ctypes.byref(before), mask, bits, ctypes.c_void_p(None), ctypes.c_ulong(0))
    _call("set_mempolicy", ctypes.c_int(_MPOL_PREFERRED), *_mask(node))
    try:
        yield
    finally:
        _call("set_mempolicy", before, mask, bits)


def _mask(node: int) -> tuple[ctypes.Array[ctypes.c_ulong], ctypes.c_ulong]:
    """One bit, and how many there are."""
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # The kernel takes one bit less than it is told.
    return mask, ctypes.c_ulong(len(mask) * bits + 1)


def _call(name: str, *arguments: Any) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(f"not known how to ask for it on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(numbers[name]), *arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
