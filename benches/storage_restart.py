#!/usr/bin/env python3
"""A `file` storage of many pages, opened again by a new process: how long until it is of use.

- *usable*: the cache is made, and a request that begins then has had its first pages from storage.
- *known*: the stored tree has a node for each prefix that was stored.

After a kill, and as after a boot (no index), with log and table in the kernel's cache and without. The store
is filled through the guard, so that what is read is real; prefixes are conversations of `--turns` turns of
`--turn` pages, of 64 tokens. Memory is what the process has of its own (RssAnon), the free lists and buffers
of a small cache included. `cpu_s` is what the processor did until then, on all threads: on a machine that
others use it says more than the clock does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from machine import machine
from storage import add_folder, drop, new_folder

from unified_cache import page_hashes
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.keys import KeySpace
from unified_cache.storage.prefixes import encode

PAGE = 64
PAGE_BYTES = 2048  # 64 tokens, 1 layer, 1 head of 8 elements of 2 bytes, K and V
VOCABULARY = 32_000

_OPEN = f"""
import json, sys, time
import numpy as np
import torch
from unified_cache import CacheConfig, UnifiedCache
from unified_cache.pools.device import MhaDevicePool
def rss():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))
pool = MhaDevicePool(4096, {PAGE}, 1, heads=1, head_dim=8, dtype=torch.float16)
prompt = np.random.default_rng(0).integers(0, {VOCABULARY}, int(sys.argv[2]) * {PAGE} + 1)
config = CacheConfig(page_size={PAGE}, model="bench", storage=sys.argv[1], storage_warm=float(sys.argv[3]))
before, start, spent = rss(), time.perf_counter(), time.process_time()
cache = UnifiedCache(config, pool)
opened = time.perf_counter()
cache.tick()
request = cache.begin(prompt)
request.wait_prefetch()
usable = time.perf_counter()
hit, first = request.storage_hit_length, request.stored_length
request.abort()
while cache._storage.stored.reading:
    cache._storage.wait(0.01)
    cache.tick()
known, spent = time.perf_counter(), time.process_time() - spent
cache.warm(60)
warm = time.perf_counter()
usage = cache.usage()
print(json.dumps({{"opened_s": opened - start, "usable_s": usable - start, "storage_hit": hit,
    "known_s": known - start, "cpu_s": spent, "warm_s": warm - start,
    "warmed_pages": cache.stats()["storage_warmed_pages"],
    "pages": usage["stored_pages"], "prefixes": usage["stored_prefixes"], "own_bytes": rss() - before,
    "match_us": 1e6 * min(_time(cache, prompt) for _ in range(20))}}))
""".replace(
    "import json, sys, time",
    """import json, sys, time
def _time(cache, prompt):
    begun = time.perf_counter()
    assert cache.match_stored(prompt) == len(prompt) - 1
    return time.perf_counter() - begun
""",
)


def key_space() -> KeySpace:
    """That of the cache which is opened."""
    import torch

    from unified_cache import CacheConfig, UnifiedCache
    from unified_cache.pools.device import MhaDevicePool

    pool = MhaDevicePool(4, PAGE, 1, heads=1, head_dim=8, dtype=torch.float16)
    with UnifiedCache(CacheConfig(page_size=PAGE, model="bench"), pool) as cache:
        return cache._keys()


def fill(place: Path, pages: int, turn: int, turns: int) -> float:
    """Make the store; returns the seconds that it took."""
    start = time.perf_counter()
    keys = key_space()
    store = FileBackend(place, pages * (4096 + 580) + (1 << 20), slot_bytes=4096, threads=1)
    guard = StorageGuard(
        store, object_bytes=PAGE_BYTES, deadline=600.0, clock=time.monotonic, counts=StorageCounts()
    )
    log, random = store.prefix_log(), np.random.default_rng(0)
    body = np.random.default_rng(1).integers(0, 256, (4096, PAGE_BYTES), np.uint8)
    views = [memoryview(one.data) for one in body]
    addresses = np.array([one.ctypes.data for one in body], np.uint64)
    names: list[str] = []
    records: list[bytes] = []

    def write() -> None:
        count = len(names)
        statuses = guard.set(names, views[:count], addresses[:count])
        assert all(status.value == "hit" for status in statuses)
        log.append(b"".join(records))
        names.clear()
        records.clear()

    for _ in range(-(-pages // (turn * turns))):
        tokens = random.integers(0, VOCABULARY, turns * turn * PAGE).astype(np.uint32)
        hashes = page_hashes(tokens, PAGE)
        names += keys.keys(hashes)
        for first in range(0, turns * turn, turn):
            parent = hashes[first - 1].tobytes() if first else None
            part = tokens[first * PAGE : (first + turn) * PAGE]
            records.append(encode(part, parent, (None, None), PAGE, keys.pools[0]))
        if len(names) + turn * turns > len(views):
            write()
    write()
    guard.close()
    return time.perf_counter() - start


def main() -> None:
    """Print a line a row, and write them as JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_folder(parser)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--turn", type=int, default=32, help="pages stored at a time")
    parser.add_argument("--turns", type=int, default=8, help="of a conversation")
    parser.add_argument("--warm", type=float, default=0.0, help="storage_warm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"# {' '.join(sys.argv)}\n# {machine()}")
    rows = []
    prompt_pages = arguments.turn * arguments.turns
    with new_folder(arguments.folder) as place:
        seconds = fill(place, arguments.pages, arguments.turn, arguments.turns)
        size = (place / "slab.prefixes").stat().st_size
        print(f"# filled in {seconds:.0f} s; the log has {size / 1e6:.0f} MB", flush=True)
        for what in ("after a kill", "after a kill, cold", "after a boot", "after a boot, cold"):
            for _ in range(arguments.rounds):
                if "boot" in what:
                    (place / "slab.index").unlink()
                if "cold" in what:
                    drop(str(place / "slab.table"))
                    drop(str(place / "slab.prefixes"))
                answer = subprocess.run(
                    [sys.executable, "-c", _OPEN, f"file://{place}", str(prompt_pages), str(arguments.warm)],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
                rows.append({"what": what, **json.loads(answer)})
                print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
