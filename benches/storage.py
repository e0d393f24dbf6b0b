#!/usr/bin/env python3
"""Local storage backends against what the machine can do, in one process and in turns.

- `file`: batches of 32 pages of 1 MiB and of 256 KiB, read cold (the kernel's cache of the file dropped
  before each) into memory like that of a host pool, against the best plain `preadv` of as many pages that
  lie one after the other in the same file: with as many threads, with O_DIRECT or without, one call a page
  or one a thread. Writes against the best plain `pwritev` and `fdatasync` of as many bytes in a file beside
  it.
- `mmap` and `shm`: warm pages, against `numpy.copyto` of as many bytes with as many threads. A write to
  `mmap` is on disk when it ends, which no copy is.
- restart (``--restart``): a store of many objects opened by a new process, as after a kill and as after a
  boot; and what look-ups cost in it.

Times vary between minutes and machines: compare the ratios of one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from machine import machine

from unified_cache.pools.host_memory import HostMemory, MappedMemory
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.mmap import MmapBackend
from unified_cache.storage.backends.shm import ShmBackend
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus

PAGES = 32
HEADER_BYTES = 192
BATCHES = 12  # of each size, so that a round reads what was not read just before
GOALS = {"file read": 0.9}


class HostPages:
    """Memory of one batch, as pages of a host pool lie in it."""

    def __init__(self, page_bytes: int) -> None:
        self.memory = MappedMemory(PAGES * page_bytes, HostMemory())
        self.whole = np.frombuffer(self.memory.buffer, np.uint8).reshape(PAGES, page_bytes)
        self.whole[:] = np.random.default_rng(1).integers(0, 256, page_bytes, np.uint8)
        self.headers = np.zeros((PAGES, HEADER_BYTES), np.uint8)
        self.views = [memoryview(page.data) for page in self.whole]

    def batch(self, keys: Sequence[str]) -> ObjectBatch:
        return ObjectBatch(
            keys,
            self.headers,
            self.views,
            np.array([page.ctypes.data for page in self.whole], np.uint64),
            np.full(PAGES, self.whole.shape[1], np.uint64),
            np.zeros(PAGES, np.uint64),
        )


def keys_of(number: int) -> list[str]:
    return [f"{number:032x}{page:032x}-0123456789abcdef" for page in range(PAGES)]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drop(path: str) -> None:
    """Make the kernel forget what it has of a file."""
    file = os.open(path, os.O_RDONLY)
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def fully(move: Callable[..., int], file: int, parts: list[memoryview], offset: int) -> None:
    moved = move(file, parts, offset)
    if moved != sum(map(len, parts)):
        raise OSError(f"{moved} bytes moved")


class Plain:
    """preadv and pwritev of pages that lie one after the other, with threads."""

    def __init__(self, path: str, threads: int, flags: int, joined: bool) -> None:
        self.file = os.open(path, os.O_RDWR | flags)
        self.pool = ThreadPoolExecutor(threads)
        self.threads = threads
        self.joined = joined

    def run(self, move: Callable[..., int], pages: HostPages, batch: int) -> None:
        size = pages.whole.shape[1]
        step = PAGES // self.threads if self.joined else 1
        jobs = [
            self.pool.submit(fully, move, self.file, pages.views[at : at + step], (batch * PAGES + at) * size)
            for at in range(0, PAGES, step)
        ]
        for job in jobs:
            job.result()

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self.file)


def file_rows(folder: Path, page_bytes: int, threads: int, rounds: int) -> list[dict[str, object]]:
    """Reads and writes of `file` against plain ones."""
    place = folder / f"file-{page_bytes}"
    size = BATCHES * PAGES * (page_bytes + 600) + (1 << 20)
    store = FileBackend(place, size, slot_bytes=page_bytes, threads=threads)
    pages = HostPages(page_bytes)
    plain_path = str(place / "plain")
    with open(plain_path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, BATCHES * PAGES * page_bytes)
    ways = {
        f"{cache} a call a {unit}": (flags, unit == "thread")
        for cache, flags in (("cached", 0), ("direct", os.O_DIRECT))
        for unit in ("page", "thread")
    }
    plains = {name: Plain(plain_path, threads, *way) for name, way in ways.items()}
    writes: dict[str, list[float]] = {name: [] for name in ("ours", *plains)}
    reads: dict[str, list[float]] = {name: [] for name in ("ours", *plains)}
    # The first round makes blocks of what was only allocated, for us and for the others.
    for number in range(rounds + BATCHES):
        batch = number % BATCHES
        if number == BATCHES:
            writes = {name: [] for name in writes}
        store.delete(keys_of(batch))
        statuses: list[PageStatus] = []
        writes["ours"].append(timed(lambda b=batch, s=statuses: s.extend(store.set(pages.batch(keys_of(b))))))  # type: ignore[misc]
        assert set(statuses) == {PageStatus.HIT}, statuses
        for name, plain in plains.items():

            def write(plain: Plain = plain, batch: int = batch) -> None:
                plain.run(os.pwritev, pages, batch)
                os.fdatasync(plain.file)

            writes[name].append(timed(write))
    for plain in plains.values():
        plain.close()
    plains = {name: Plain(str(place / "slab.data"), threads, *way) for name, way in ways.items()}
    order = np.random.default_rng(2)
    for number in range(rounds):
        batch = number % BATCHES
        for name in order.permutation(["ours", *plains]).tolist():
            drop(str(place / "slab.data"))
            if name == "ours":
                taken = pages.batch(keys_of(batch))
                seconds = timed(lambda t=taken: statuses.extend(store.get(t)))  # type: ignore[misc]
            else:
                seconds = timed(lambda n=name, b=batch: plains[n].run(os.preadv, pages, b))  # type: ignore[misc]
            reads[name].append(seconds)
    assert set(statuses) == {PageStatus.HIT}
    how = {name: store.stats()[name] for name in ("direct", "queued")}
    store.close()
    for plain in plains.values():
        plain.close()
    shutil.rmtree(place)
    return [
        row("file read", page_bytes, threads, reads, how),
        row("file write", page_bytes, threads, writes, how),
    ]


def row(
    what: str, page_bytes: int, threads: int, times: dict[str, list[float]], more: dict[str, object]
) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = medians.pop("ours")
    best = min(medians, key=lambda name: medians[name])
    amount = PAGES * page_bytes / 1e9
    return {
        "what": what,
        "page": page_bytes,
        "threads": threads,
        "gbps": amount / ours,
        "best": best,
        "best_gbps": amount / medians[best],
        "others": {name: amount / seconds for name, seconds in medians.items()},
        "ratio": medians[best] / ours,
        "goal": GOALS.get(what),
        **more,
    }


def mapped_rows(
    name: str, store: Backend, page_bytes: int, threads: int, rounds: int
) -> list[dict[str, object]]:
    """Reads and writes of warm pages against copies in memory."""
    pages, source = HostPages(page_bytes), HostPages(page_bytes)
    pool = ThreadPoolExecutor(threads)

    def copy() -> None:
        step = PAGES // threads
        jobs = [
            pool.submit(np.copyto, pages.whole[at : at + step], source.whole[at : at + step])
            for at in range(0, PAGES, step)
        ]
        for job in jobs:
            job.result()

    times: dict[str, dict[str, list[float]]] = {
        what: {"ours": [], "copyto": []} for what in (f"{name} read", f"{name} write")
    }
    for number in range(rounds + BATCHES):
        batch = pages.batch(keys_of(number % BATCHES))
        if number == BATCHES:
            times = {what: {"ours": [], "copyto": []} for what in times}
        store.delete(batch.keys)
        times[f"{name} write"]["ours"].append(timed(lambda b=batch: store.set(b)))  # type: ignore[misc]
        times[f"{name} write"]["copyto"].append(timed(copy))
        times[f"{name} read"]["ours"].append(timed(lambda b=batch: store.get(b)))  # type: ignore[misc]
        times[f"{name} read"]["copyto"].append(timed(copy))
    pool.shutdown()
    store.close()
    return [row(what, page_bytes, threads, values, {}) for what, values in times.items()]


_OPEN = """
import json, sys, time
import numpy as np
from unified_cache.storage.backends.file import FileBackend
def rss():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))
keys = [f"{at:064x}-0123456789abcdef" for at in range(0, 1_000_000, 7_919)] * 4
before, start = rss(), time.perf_counter()
store = FileBackend(sys.argv[1])
opened = time.perf_counter()
found = store.exists([keys[:127]])[0]
first = time.perf_counter()
for _ in range(20):
    store.exists([keys])
asked = (time.perf_counter() - first) / 20 / len(keys)
stats = store.stats()
print(json.dumps({"usable_s": first - start, "found": found, "exists_us_per_key": asked * 1e6,
    "private_bytes": rss() - before, "index_bytes": stats["index_bytes"], "objects": stats["objects"],
    "rebuilds": stats["index_rebuilds"]}))
"""


def restart_rows(folder: Path, objects: int) -> list[dict[str, object]]:
    """A big store opened again: with its index, and without, from a table that is cold."""
    place = folder / "restart"
    store = FileBackend(place, objects * (4096 + 580) + (1 << 20), slot_bytes=4096, threads=1)
    step = 4096
    body = np.zeros((step, 64), np.uint8)
    headers = np.zeros((step, HEADER_BYTES), np.uint8)
    views = [memoryview(one.data) for one in body]
    addresses = np.array([one.ctypes.data for one in body], np.uint64)
    filled = time.perf_counter()
    for start in range(0, objects, step):
        count = min(step, objects - start)
        batch = ObjectBatch(
            [f"{at:064x}-0123456789abcdef" for at in range(start, start + count)],
            headers[:count],
            views[:count],
            addresses[:count],
            np.full(count, 64, np.uint64),
        )
        assert set(store.set(batch)) == {PageStatus.HIT}
    filled = time.perf_counter() - filled
    store.close()
    rows = []
    for what in ("after a kill", "after a boot, table in memory", "after a boot, table on disk"):
        if "boot" in what:
            (place / "slab.index").unlink()
        if "disk" in what:
            drop(str(place / "slab.table"))
        answer = subprocess.run(
            [sys.executable, "-c", _OPEN, str(place)], check=True, capture_output=True, text=True
        ).stdout
        rows.append({"what": f"restart {what}", "objects": objects, "fill_s": filled, **json.loads(answer)})
    shutil.rmtree(place)
    return rows


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Let users say where the disk is that counts."""
    parser.add_argument(
        "--folder", type=Path, help="on the disk that counts (default: where temporary files go)"
    )


@contextlib.contextmanager
def new_folder(parent: Path | None) -> Iterator[Path]:
    """A folder of our own in one that may have other things in it; it is gone afterwards."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unified-cache-bench-", dir=parent) as folder:
        yield Path(folder)


def main() -> None:
    """Print a line a row, and write them as JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_folder(parser)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--restart", type=int, default=0, metavar="OBJECTS")
    parser.add_argument("--only", default="", help="rows that begin so: file, mmap, shm, restart")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"# {' '.join(sys.argv)}\n# {machine()}")
    threads, rounds = arguments.threads, arguments.rounds
    rows: list[dict[str, object]] = []

    def show(new: list[dict[str, object]]) -> None:
        rows.extend(new)
        for one in new:
            if "gbps" in one:
                goal = f" goal {one['goal']}" if one["goal"] else ""
                print(
                    f"{one['what']:<12} {one['page'] // 1024:>5} KiB {one['threads']} threads: "  # type: ignore[operator]
                    f"{one['gbps']:6.2f} GB/s, best plain {one['best_gbps']:6.2f} ({one['best']}), "
                    f"ratio {one['ratio']:.2f}{goal}",
                    flush=True,
                )
            else:
                print(json.dumps(one), flush=True)

    with new_folder(arguments.folder) as folder:
        for page_bytes in (1 << 20, 256 << 10):
            size = BATCHES * PAGES * (page_bytes + 600) + (1 << 20)
            if "file".startswith(arguments.only):
                show(file_rows(folder, page_bytes, threads, rounds))
            if "mmap".startswith(arguments.only):
                mapped = MmapBackend(folder / "mapped", size, slot_bytes=page_bytes, threads=threads)
                show(mapped_rows("mmap", mapped, page_bytes, threads, rounds))
                for path in folder.glob("mapped.*"):
                    path.unlink()
            if "shm".startswith(arguments.only):
                name = f"bench-{os.getpid()}"
                try:
                    shared = ShmBackend(name, size, slot_bytes=page_bytes, threads=threads)
                    show(mapped_rows("shm", shared, page_bytes, threads, rounds))
                finally:
                    for path in Path("/dev/shm").glob(f"unified-cache-{name}.*"):
                        path.unlink()
        if arguments.restart:
            show(restart_rows(folder, arguments.restart))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
