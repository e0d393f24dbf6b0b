"""What headers, checksums and the guard cost, against the same transfer by the backend alone.

    python benches/storage_guard.py [URL ...]

Transfers are warm: of a disk they come out of the system's cache, so the cost is that at memory speed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np

from unified_cache.storage.contract import ObjectBatch, PageStatus
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.page_format import HEADER_BYTES, write_headers
from unified_cache.storage.urls import open_storage

REPEATS = 15


def measure(url: str, size: int, pages: int) -> str:
    backend = open_storage(url)
    guard = StorageGuard(
        backend, object_bytes=size, deadline=60, clock=time.monotonic, counts=StorageCounts()
    )
    rows = np.random.default_rng(0).integers(0, 256, (pages, size), np.uint8)
    guard.register(rows.data.cast("B"))
    views = [row.data for row in rows]
    places = (rows.ctypes.data + np.arange(pages) * size).astype(np.uint64)
    keys = [f"{at:064x}-{size:016x}-0000" for at in range(pages)]
    headers = np.zeros((pages, HEADER_BYTES), np.uint8)
    sizes = np.full(pages, size, np.uint64)

    def batch() -> ObjectBatch:
        return ObjectBatch(keys, headers, views, places, sizes, np.zeros(pages, np.uint64))

    assert guard.set(keys, views, places) == [PageStatus.HIT] * pages
    with_guard, alone, made, written = [], [], [], []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        assert guard.get(keys, views, places) == [PageStatus.HIT] * pages
        middle = time.perf_counter()
        backend.get(batch())
        with_guard.append(middle - begun)
        alone.append(time.perf_counter() - middle)
    for _ in range(5):
        begun = time.perf_counter()
        write_headers(headers, keys, views, sizes.tolist(), size, [0] * pages)
        made.append(time.perf_counter() - begun)
        backend.delete(keys)
        begun = time.perf_counter()
        backend.set(batch())
        written.append(time.perf_counter() - begun)
    backend.clear()
    backend.close()
    read, raw = statistics.median(with_guard), statistics.median(alone)
    header, write = statistics.median(made), statistics.median(written)
    name, moved = url.partition(":")[0], pages * size / 1e9
    return (
        f"{name:>8} {pages:4} x {size >> 10:5} KiB  "
        f"get {moved / raw:6.2f} GB/s +{100 * (read / raw - 1):5.1f} %  "
        f"set {moved / write:6.2f} GB/s +{100 * header / write:5.1f} %"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        urls = sys.argv[1:] or [
            f"memory://{uuid.uuid4().hex}",
            f"shm://bench-{uuid.uuid4().hex}?size=400MB",
            f"mmap://{folder}/m?size=400MB",
            f"file://{folder}/f?size=400MB",
        ]
        for url in urls:
            for size, pages in ((1 << 20, 32), (1 << 20, 128), (256 << 10, 32), (256 << 10, 128)):
                print(measure(url, size, pages), flush=True)
        for left in Path("/dev/shm").glob("unified-cache-bench-*"):
            left.unlink()  # what lies there outlives the process


if __name__ == "__main__":
    main()
