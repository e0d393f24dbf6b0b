"""The copy engine that fits where device pools lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unified_cache.copies.engine import CopyEngine
from unified_cache.errors import ArgumentError

if TYPE_CHECKING:
    from unified_cache.pools.device import DevicePool
    from unified_cache.pools.host import HostPool

__all__ = ["copy_engine_between", "make_copy_engine"]


def make_copy_engine(device: DevicePool, host: HostPool, *, blocks: int, threads: int | None) -> CopyEngine:
    """An engine between these pools.

    Args:
        device: on a CPU or on a CUDA GPU.
        host: beside it.
        blocks: blocks of 1,024 threads that a copy kernel takes on a GPU.
        threads: threads of a copy on a CPU; None: chosen by the cores.

    Raises:
        ArgumentError: a device of another kind.
        MissingDependencyError: a GPU without CuPy.
    """
    kind = device.device.type
    # Here, not at the top: neither needs what the other one needs.
    if kind == "cpu":
        from unified_cache.copies.cpu import CpuCopyEngine

        return CpuCopyEngine(device.planes, host.planes, threads=threads)
    if kind == "cuda":
        from unified_cache.copies.cuda import CudaCopyEngine

        return CudaCopyEngine(
            device.planes,
            host.planes,
            host_registered=host.registered,
            blocks=blocks,
            host_edges=[address for address, _ in host.pieces],
        )
    raise ArgumentError(f"device_pool lies on {kind!r}: allowed are 'cpu' and 'cuda'")


def copy_engine_between(
    devices: Sequence[DevicePool],
    hosts: Sequence[HostPool],
    make: Callable[[DevicePool, HostPool], CopyEngine],
) -> CopyEngine:
    """One engine for all pairs of pools, of those that `make` makes.

    Raises:
        Exception: what `make` raises; the engines that there are already are closed then.
    """
    if len(devices) == 1:
        return make(devices[0], hosts[0])
    from unified_cache.copies.joint import JointCopyEngine

    engines: list[CopyEngine] = []
    try:
        for device, host in zip(devices, hosts, strict=True):
            engines.append(make(device, host))
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return JointCopyEngine(engines, [device.layers for device in devices])
