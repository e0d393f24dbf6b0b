#!/usr/bin/env python3
"""What checksums and the guard add to a transfer of a backend alone.

    python benches/storage_guard.py [URL ...]

The backend alone, the backend with checksums, and the guard move the same objects, in turns; a cost is the
median, over the turns, of the one's seconds by those of the backend alone in the same turn. First that of
checksums, by the clock; then that of all that a guard does (checksums, headers, statuses, counts), by the
clock and by the processor, of all threads together.
Where others use the machine the clock says little of transfers at memory speed (a call that is interrupted
takes twice as long), but the processor does; of transfers that wait for a device it is the other way round.
Transfers are warm: of a disk they come out of the host's cache where there is one. `pages` is warm and cold:
warm its reads come out of the kernel's cache, at the speed of memory; before cold ones the kernel is made to
forget the files. `file` goes past that cache. Writes are of keys that were deleted just before.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import machine

from unified_cache.pools.host_memory import HostMemory, MappedMemory
from unified_cache.storage.contract import ObjectBatch, PageStatus
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.page_format import HEADER_BYTES, checksums_of
from unified_cache.storage.urls import open_storage

REPEATS = 42
ORDERS = tuple(itertools.permutations(("alone", "summed", "guard")))
GOALS = {"file": "5 % of the clock", "pages cold": "5 % of the clock"}
MEMORY_GOAL = "25 %"  # of the others, at memory speed


def forget(folder: Path) -> None:
    """Make the kernel forget what it has of the files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(url: str, size: int, pages: int, repeats: int, cold: Path | None = None) -> str:
    """A row: GB/s of the backend alone, and what checksums and the guard add, in per cent.

    The files in the folder `cold` are forgotten by the kernel before each read.
    """
    backend = open_storage(url)
    guard = StorageGuard(
        backend, object_bytes=size, deadline=60, clock=time.monotonic, counts=StorageCounts()
    )
    memory = MappedMemory(pages * size, HostMemory())  # as in a host pool
    rows = np.frombuffer(memory.buffer, np.uint8).reshape(pages, size)
    rows[:] = np.random.default_rng(0).integers(0, 256, (pages, size), np.uint8)
    guard.register(rows.data.cast("B"))
    views = [row.data for row in rows]
    places = (rows.ctypes.data + np.arange(pages) * size).astype(np.uint64)
    keys = [f"{at:064x}-{size:016x}-0000" for at in range(pages)]
    sizes = np.full(pages, size, np.uint64)
    stored = [PageStatus.HIT] * pages

    def batch(summed: bool) -> ObjectBatch:
        headers = np.zeros((pages, HEADER_BYTES), np.uint8)
        checksums = checksums_of(headers) if summed else None
        return ObjectBatch(keys, headers, views, places, sizes, np.zeros(pages, np.uint64), checksums)

    def summed_get() -> list[PageStatus]:
        asked = batch(backend.makes_checksums)
        statuses = backend.get(asked)
        checksums = asked.checksums or checksums_of(asked.headers)
        left = np.flatnonzero(checksums.values == 0).tolist()
        if left:  # those that the backend leaves to its caller
            checksums.make(left, [views[at] for at in left])
        return statuses

    def summed_set() -> list[PageStatus]:
        given = batch(backend.makes_checksums)
        if given.checksums is None:
            checksums_of(given.headers).make(range(pages), views)
        return backend.set(given)

    calls: dict[str, dict[str, Callable[[], list[PageStatus]]]] = {
        "set": {
            "alone": lambda: backend.set(batch(False)),
            "summed": summed_set,
            "guard": lambda: guard.set(keys, views, places),
        },
        "get": {
            "alone": lambda: backend.get(batch(False)),
            "summed": summed_get,
            "guard": lambda: guard.get(keys, views, places),
        },
    }
    seconds: dict[str, dict[str, list[np.ndarray]]] = {
        what: {who: [] for who in calls[what]} for what in calls
    }
    for repeat in range(repeats + 2):
        order = ORDERS[repeat % len(ORDERS)]
        for what in calls:
            for who in order:
                if what == "set":
                    backend.delete(keys)
                elif cold is not None:
                    forget(cold)
                begun = np.array([time.perf_counter(), time.process_time()])
                assert calls[what][who]() == stored
                seconds[what][who].append(np.array([time.perf_counter(), time.process_time()]) - begun)
            if what == "set" and order[-1] != "guard":  # the others have no headers
                backend.delete(keys)
                assert guard.set(keys, views, places) == stored
    backend.clear()
    backend.close()
    name = url.partition(":")[0] + " cold" * (cold is not None)
    text = f"{name:>10} {pages:4} x {size >> 10:5} KiB"
    for what in ("get", "set"):
        alone, summed, guarded = (np.array(seconds[what][who][2:]) for who in ("alone", "summed", "guard"))
        sums = 100 * (np.median(summed / alone, axis=0) - 1)
        costs = 100 * (np.median(guarded / alone, axis=0) - 1)
        speed = pages * size / 1e9 / np.median(alone, axis=0)[0]
        text += (
            f"  {what} {speed:6.2f} GB/s {sums[0]:+6.1f} % guard {costs[0]:+6.1f} % cpu {costs[1]:+6.1f} %"
        )
    return f"{text}   goal {GOALS.get(name, MEMORY_GOAL)}  load {os.getloadavg()[0]:.1f}"


def main() -> None:
    """Print a row for each storage and size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("urls", nargs="*", metavar="URL", help="(default: memory, shm, mmap, file, pages)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"(default: {REPEATS})")
    arguments = parser.parse_args()
    print(f"# {' '.join(sys.argv)}\n# {machine()}")
    with tempfile.TemporaryDirectory() as folder:
        name = f"bench-{uuid.uuid4().hex}"
        urls = arguments.urls or [
            f"memory://{uuid.uuid4().hex}",
            f"shm://{name}?size=400MB",
            f"mmap://{folder}/m?size=400MB",
            f"file://{folder}/f?size=400MB",
            f"pages://{folder}/p",
        ]
        for url in urls:
            folders: list[Path | None] = [None]
            if url.startswith("pages://"):
                folders.append(Path(url.removeprefix("pages://").partition("?")[0]))
            for cold in folders:
                for size, pages in ((1 << 20, 32), (1 << 20, 128), (256 << 10, 32), (256 << 10, 128)):
                    print(measure(url, size, pages, arguments.repeats, cold), flush=True)
        for left in Path("/dev/shm").glob(f"unified-cache-{name}.*"):
            left.unlink()  # what lies there outlives the process


if __name__ == "__main__":
    main()
