"""Objects in memory, for tests of what stands between pages and backends."""

from __future__ import annotations

import numpy as np

from unified_cache.storage.guard import StorageCounts, StorageGuard

BYTES = 512


def key(at: int) -> str:
    return f"{at:064x}-{0:016x}-{0:04x}"


def keys(count: int, start: int = 0) -> list[str]:
    return [key(start + at) for at in range(count)]


class Pages:
    """Memory of some pages, with what a transfer needs to know of it."""

    def __init__(self, count: int, fill: int | None = None) -> None:
        self.data = np.empty((count, BYTES), np.uint8)
        if fill is None:
            self.data[:] = np.random.default_rng(count).integers(0, 256, self.data.shape)
        else:
            self.data[:] = fill
        self.views = [memoryview(row) for row in self.data]
        self.addresses = (self.data.ctypes.data + np.arange(count) * BYTES).astype(np.uint64)


class Watch:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_guard(backend, clock=None, **settings) -> tuple[StorageGuard, StorageCounts]:  # type: ignore[no-untyped-def]
    counts = StorageCounts()
    settings = {"deadline": 1.0} | settings
    guard = StorageGuard(
        backend, object_bytes=BYTES, clock=Watch() if clock is None else clock, counts=counts, **settings
    )
    return guard, counts
