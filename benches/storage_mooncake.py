#!/usr/bin/env python3
"""The Mooncake backend beside its own client called directly: batches of 32 pages, in turns, in one process.

A master and the owner of a segment run as processes of this machine. `real`: this process waits on TCP
connections to the owner. `lent`: the owner does the work (`client=` in the URL) over shared memory, where
the host pool lies. `copied`: the same with a host pool in ordinary memory, so that bodies are copied once
more between it and what is shared. The client called directly has its pages where it wants them.

GB/s are of the medians. The ratio is the median, over all turns, of the direct client's seconds by those of
the backend right before or after it. A put says "done" also where another write of the key is only under way:
so for 40 s after it was opened, and after anything has failed, the backend asks whether what it wrote is
there. Those seconds are waited for, but with `--young`; `asked` then has a direct client that asks, too.
Client and servers share the cores, so compare ratios of one run.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import unified_cache
from tests.storage.mooncake_server import Master, Owner, wait_until
from unified_cache.storage.backends.mooncake import _DOUBT_SECONDS, MooncakeBackend
from unified_cache.storage.contract import ObjectBatch, PageStatus
from unified_cache.storage.urls import StorageUrl

PAGES, HEADER = 32, 192
GOAL = 0.9
CLIENTS = ("real", "lent", "copied")


class Pages:
    """Headers and bodies of a batch, in memory of the caller's."""

    def __init__(self, memory: npt.NDArray[np.uint8], size: int) -> None:
        self.headers = memory[: PAGES * HEADER].reshape(PAGES, HEADER)
        self.bodies = memory[PAGES * HEADER :][: PAGES * size].reshape(PAGES, size)
        self.addresses = [
            [header.ctypes.data, body.ctypes.data]
            for header, body in zip(self.headers, self.bodies, strict=True)
        ]
        self.sizes = [[HEADER, size]] * PAGES

    def batch(self, keys: list[str]) -> ObjectBatch:
        """As the guard makes it."""
        return ObjectBatch(
            keys,
            self.headers,
            [memoryview(body) for body in self.bodies],
            np.array([body for _, body in self.addresses], np.uint64),
            np.array([size for _, size in self.sizes], np.uint64),
            np.zeros(PAGES, np.uint64),
        )


def direct_client(master: Master, owner: Owner, shared: bool, size: int) -> tuple[Any, Any]:
    """A client of its own, and how it gets memory."""
    import mooncake.store

    store = mooncake.store.MooncakeDistributedStore()
    if shared:
        code = store.setup_dummy(16 << 20, 16 << 20, owner.address)
    else:
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.address)
    assert code == 0
    count = PAGES * (HEADER + size)

    def memory() -> npt.NDArray[np.uint8]:
        if shared:
            address = mooncake.store.MooncakeHostMemAllocator().alloc(count)
            found = np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)
        else:
            found = np.zeros(count, np.uint8)
        assert store.register_buffer(found.ctypes.data, count) == 0
        return found

    return store, memory


def host_pool(backend: MooncakeBackend, lent: bool, size: int) -> npt.NDArray[np.uint8]:
    """Memory as a cache has it for its pages."""
    if not lent:
        return np.zeros(size, np.uint8)
    memory = backend.host_memory(size)
    assert memory is not None
    return np.frombuffer(memory, np.uint8)


def measure(master: Master, owner: Owner, kind: str, size: int, rounds: int, young: bool) -> None:
    """Rows of one client and one page size."""
    shared = kind != "real"
    url = f"mooncake://{master.address}?force=1&metrics={master.metrics_port}"
    backend = MooncakeBackend.from_url(
        StorageUrl.parse(url + (f"&client={owner.address}" if shared else "")), 5.0
    )
    wait_until(lambda: backend.stats()["capacity_bytes"] > 0, "the master has a segment")
    store, memory = direct_client(master, owner, shared, size)
    random = np.random.default_rng(1).integers(0, 256, PAGES * (HEADER + size), dtype=np.uint8)
    own_memory = [host_pool(backend, kind == "lent", PAGES * (HEADER + size)) for _ in range(2)]
    for part in own_memory:
        backend.register(part.data)
    ours, ours_read = (Pages(part, size) for part in own_memory)
    theirs, theirs_read = (Pages(memory(), size) for _ in range(2))
    for pages in (ours, theirs):
        pages.headers[:] = random[: PAGES * HEADER].reshape(PAGES, HEADER)
        pages.bodies[:] = random[PAGES * HEADER :].reshape(PAGES, size)

    seconds: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[[], list[Any]], good: object) -> None:
        started = time.perf_counter()
        answer = call()
        seconds.setdefault(what, []).append(time.perf_counter() - started)
        assert answer == [good] * PAGES, answer

    def backend_turn(turn: int) -> None:
        keys = [f"ours-{turn}-{page}" for page in range(PAGES)]
        written, read = ours.batch(keys), ours_read.batch(keys)
        timed("set", lambda: backend.set(written), PageStatus.HIT)
        timed("get", lambda: backend.get(read), PageStatus.HIT)
        assert (ours_read.bodies == ours.bodies).all()
        backend.delete(keys)

    def direct_turn(turn: int) -> None:
        keys = [f"theirs-{turn}-{page}" for page in range(PAGES)]
        timed(
            "direct set",
            lambda: store.batch_put_from_multi_buffers(keys, theirs.addresses, theirs.sizes),
            0,
        )
        if young:
            timed("asked", lambda: store.batch_is_exist(keys), 1)
        timed(
            "direct get",
            lambda: store.batch_get_into_multi_buffers(keys, theirs_read.addresses, theirs.sizes),
            HEADER + size,
        )
        # As the backend's turn does: pages lie in the caches of whoever looked at them last.
        assert (theirs_read.bodies == theirs.bodies).all()
        store.batch_remove(keys, True)

    if not young:
        time.sleep(_DOUBT_SECONDS)
    turns = [backend_turn, direct_turn]
    for turn in range(rounds + 2):
        for run in turns if turn % 2 else reversed(turns):
            run(turn)
        if turn == 1:  # warm now
            seconds.clear()
    stats = backend.stats()
    assert (stats["bounced_transfers"] > 0) is (kind == "copied")
    for what in ("set", "get"):
        pairs = list(zip(seconds[what], seconds[f"direct {what}"], strict=True))
        mine, direct = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(two / one for one, two in pairs)
        known = ""
        if what == "set" and young:
            asked = zip(pairs, seconds["asked"], strict=True)
            known = f"{statistics.median((two + ask) / one for (one, two), ask in asked):.2f}"
        gigabytes = PAGES * (HEADER + size) / 1e9
        print(
            f"{kind:14} {what:4} {size >> 10:5} KiB {gigabytes / mine:8.2f} {gigabytes / direct:8.2f} "
            f"{ratio:7.2f} {known:>6} {'' if kind == 'copied' else GOAL:>5} {os.getloadavg()[0]:6.1f}",
            flush=True,
        )
    store.close()
    backend.close()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=41, help="of each client, in turns (default: 41)")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS)
    parser.add_argument("--young", action="store_true", help="measure at once after it was opened")
    arguments = parser.parse_args()
    print(f"unified_cache {unified_cache.__version__}, {machine()}")
    print(f"\nbatches of {PAGES} pages with headers of {HEADER} bytes, GB/s\n")
    print(
        f"{'client':14} {'':4} {'page':>9} {'backend':>8} {'direct':>8} {'ratio':>7} {'asked':>6} "
        f"{'goal':>5} {'load':>6}"
    )
    with Master() as master, Owner(master, megabytes=512) as owner:
        for kind in arguments.clients:
            for size in (1 << 20, 256 << 10):
                measure(master, owner, kind, size, arguments.rounds, arguments.young)


if __name__ == "__main__":
    main()
