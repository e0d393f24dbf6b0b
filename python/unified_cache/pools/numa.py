"""Which memory a machine's processors and devices have beside them, and how to ask for it."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

from unified_cache._torch import torch

__all__ = ["node_of_device", "nodes", "prefer_node"]

_MBIND = {"x86_64": 237, "aarch64": 235}  # libc has no function for it
_MPOL_PREFERRED = 1


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
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"not known how to ask for it on {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        # The kernel takes one bit less than it is told.
        ctypes.c_ulong(len(mask) * bits + 1),
        ctypes.c_uint(0),
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
