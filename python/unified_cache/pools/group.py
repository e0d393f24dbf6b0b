"""Several pools as one: page p of the cache is page p of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unified_cache.errors import ArgumentError

if TYPE_CHECKING:
    from unified_cache.pools.device import DevicePool

__all__ = ["device_pools"]


def device_pools(given: DevicePool | Sequence[DevicePool]) -> tuple[DevicePool, ...]:
    """The pools of one cache.

    Raises:
        ArgumentError: there is none, or they can not have pages together: of different sizes or numbers, on
            different devices, or one given twice.
    """
    from unified_cache.pools.device import DevicePool  # needs torch, as whoever has a pool does

    pools = tuple(given) if isinstance(given, Sequence) else (given,)
    if not pools:
        raise ArgumentError("device_pool must be a device pool, or several, not none")
    for at, pool in enumerate(pools):
        if not isinstance(pool, DevicePool):
            raise ArgumentError(f"device_pool must be a device pool, or several, not {pool!r}")
        if any(pool is other for other in pools[:at]):
            raise ArgumentError(f"device pool {at} is given twice")
        for name in ("page_size", "num_pages", "device"):
            value, first = getattr(pool, name), getattr(pools[0], name)
            if value != first:
                raise ArgumentError(
                    f"device pool {at} has {name}={value}, the first one {first}: they must be alike"
                )
    return pools
