#!/usr/bin/env python3
"""Copies between pools in CPU memory, against one contiguous `copy_` of as many bytes.

Each row is a submission to the copy engine of the pages of a long prompt, from a device pool (layer_first) to
a host pool of the row's layout or back, for pages that are drawn at random and for runs of neighbouring ones.
It is timed in turns with torch's `copy_` of the same bytes in one piece with the same threads; the ratio is
of the two medians. Below that, a load layer by layer under a forward.

Times vary between minutes and machines, and more if others use the memory: compare ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from machine import machine

import unified_cache
from unified_cache.copies.cpu import CpuCopyEngine
from unified_cache.pools.planes import PoolPlanes

PAGE_SIZE, HEADS, HEAD_DIM = 64, 8, 128
DTYPE = torch.bfloat16
ROUNDS = 11

# Dimensions from the outermost to the innermost one: N pages, K keys and values, P tokens, L layers, H heads.
LAYOUTS = {
    "layer_first": "KLNPHD",
    "page_first_direct": "NKLPHD",
    "page_first": "NKPLHD",
    "page_head": "NHKPLD",
}
GOALS = {"layer_first": 0.8, "page_first_direct": 0.8, "page_first": 0.7, "page_head": 0.5}

rng = np.random.default_rng(20_251)


@dataclass(frozen=True)
class Sizes:
    """Pages of both pools, pages of a copy, layers."""

    pool: int
    copied: int
    layers: int


def make_pool(layout: str, sizes: Sizes) -> PoolPlanes:
    order = LAYOUTS[layout]
    counts = {"N": sizes.pool, "K": 2, "P": PAGE_SIZE, "L": sizes.layers, "H": HEADS, "D": HEAD_DIM}
    tensor = torch.ones(
        [counts[name] for name in order], dtype=DTYPE
    )  # touched, so that no page is mapped late
    planes = tensor.permute([order.index(name) for name in "LKNPHD"])
    return PoolPlanes([planes[layer, part] for layer in range(sizes.layers) for part in range(2)], 2)


def random_pages(sizes: Sizes) -> np.ndarray:
    return rng.permutation(sizes.pool)[: sizes.copied].astype(np.uint32)


def page_run(sizes: Sizes) -> np.ndarray:
    start = int(rng.integers(sizes.pool - sizes.copied + 1))
    return np.arange(start, start + sizes.copied, dtype=np.uint32)


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Contiguous:
    """What a copy is measured against."""

    def __init__(self, sizes: Sizes, page_bytes: int) -> None:
        self.bytes = sizes.copied * page_bytes
        self._source = torch.ones(self.bytes // DTYPE.itemsize, dtype=DTYPE)
        self._target = torch.zeros_like(self._source)

    def seconds(self) -> float:
        return seconds_of(lambda: self._target.copy_(self._source))


def copies(sizes: Sizes, threads: int, only: str) -> Iterator[dict[str, Any]]:
    device = make_pool("layer_first", sizes)
    contiguous = Contiguous(sizes, device.shape.page_bytes)
    for layout, goal in GOALS.items():
        cases = [
            (f"{layout} {direction}, {kind}", direction, pages)
            for direction, (kind, pages) in product(
                ("backup", "load"), (("random pages", random_pages), ("runs", page_run))
            )
        ]
        cases = [case for case in cases if only in case[0]]
        if not cases:
            continue
        engine = CpuCopyEngine(device, make_pool(layout, sizes), threads=threads)
        for name, direction, pages in cases:
            submit = engine.submit_backup if direction == "backup" else engine.submit_load
            floors, times, inside = [], [], []
            for _ in range(ROUNDS):
                floors.append(contiguous.seconds())
                ids = pages(sizes), pages(sizes)
                handles = []
                times.append(
                    seconds_of(
                        lambda submit=submit, ids=ids, to=handles: to.append(submit(*ids)) or to[0].wait()
                    )
                )
                inside.append(handles[0].seconds)
                engine.take_done()
            floor, ours = statistics.median(floors), statistics.median(times)
            yield {
                "name": name,
                "threads": threads,
                "GB/s": round(contiguous.bytes / ours / 1e9, 2),
                "contiguous GB/s": round(contiguous.bytes / floor / 1e9, 2),
                "ratio": round(floor / ours, 3),
                "goal": goal,
                "submission us": round((ours - statistics.median(inside)) * 1e6, 1),
            }
        engine.close()


def overlap(sizes: Sizes, compute_share: float, layout: str = "page_first_direct") -> dict[str, Any]:
    """A forward that waits for each layer and then computes, under a load of those layers; one core for each.

    Computing is a busy loop in native code that takes `compute_share` of what a layer's load takes by itself.
    """
    engine = CpuCopyEngine(make_pool("layer_first", sizes), make_pool(layout, sizes), threads=1)
    events = engine.new_layer_events()
    matrix = torch.ones(192, 192)  # stays in the cache, so that the two share no memory bandwidth

    def load_alone() -> float:
        handle = engine.submit_load(random_pages(sizes), random_pages(sizes))
        handle.wait()
        return handle.seconds

    load = statistics.median(load_alone() for _ in range(ROUNDS))
    product_seconds = statistics.median(seconds_of(lambda: matrix @ matrix) for _ in range(500))
    products = max(round(compute_share * load / sizes.layers / product_seconds), 1)

    def compute() -> None:
        for _ in range(products):
            matrix @ matrix

    def forward() -> None:
        for layer in range(sizes.layers):
            events.wait(layer)
            compute()

    computes, totals = [], []
    for _ in range(3 * ROUNDS):
        computes.append(seconds_of(lambda: [compute() for _ in range(sizes.layers)]))
        events.begin()
        begin = time.perf_counter()
        engine.submit_load(random_pages(sizes), random_pages(sizes), layers=events)
        forward()
        totals.append(time.perf_counter() - begin)
    engine.close()
    alone, total = statistics.median(computes), statistics.median(totals)
    bound = max(alone, load) + max(alone, load) / sizes.layers
    return {
        "name": f"{layout} load under a forward of {compute_share:g} times its time",
        "load ms": round(load * 1e3, 2),
        "forward ms": round(alone * 1e3, 2),
        "both ms": round(total * 1e3, 2),
        "bound ms": round(bound * 1e3, 2),
        "ratio": round(bound / total, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose name has this text")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="threads of both (default: 1)")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default: 32)")
    parser.add_argument("--pages", type=int, default=32, help="pages of a copy (default: 32)")
    parser.add_argument("--pool", type=int, default=64, help="pages of each pool (default: 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    if not 0 < arguments.pages <= arguments.pool:
        parser.error(f"--pages is {arguments.pages}, allowed is 1 to --pool ({arguments.pool})")
    sizes = Sizes(arguments.pool, arguments.pages, arguments.layers)
    page_bytes = 2 * sizes.layers * PAGE_SIZE * HEADS * HEAD_DIM * DTYPE.itemsize
    what = (
        f"pages of {PAGE_SIZE} tokens, {sizes.layers} layers, {HEADS} heads of {HEAD_DIM} bfloat16 "
        f"({page_bytes / 1e6:.1f} MB), {sizes.copied} of {sizes.pool} pages a copy"
    )
    load_average = os.getloadavg()[0]
    if not arguments.json:
        print(f"unified_cache {unified_cache.__version__}, torch {torch.__version__}, {machine()}")
        print(f"{what}; load average before: {load_average:.2f}\n")
        print(f"{'copy':42} {'threads':>7} {'GB/s':>6} {'copy_':>6} {'ratio':>6} {'goal':>5}  submission")
    results: list[dict[str, Any]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for row in copies(sizes, threads, arguments.only):
            results.append(row)
            if not arguments.json:
                past = "   past its goal" if row["ratio"] < row["goal"] else ""
                print(
                    f"{row['name']:42} {threads:7} {row['GB/s']:6.1f} {row['contiguous GB/s']:6.1f} "
                    f"{row['ratio']:6.2f} {row['goal']:5.1f}  {row['submission us']:6.0f} us{past}"
                )
    torch.set_num_threads(1)
    shares = [share for share in (0.5, 1.0, 2.0) if arguments.only in "load under a forward"]
    if shares and not arguments.json:
        print(f"\n{'layer by layer':56} {'load':>7} {'forward':>8} {'both':>7} {'bound':>7} {'ratio':>6}")
    for share in shares:
        row = overlap(sizes, share)
        results.append(row)
        if not arguments.json:
            print(
                f"{row['name']:56} {row['load ms']:7.1f} {row['forward ms']:8.1f} {row['both ms']:7.1f} "
                f"{row['bound ms']:7.1f} {row['ratio']:6.2f}"
            )
    if arguments.json:
        about = {"version": unified_cache.__version__, "machine": machine(), "torch": torch.__version__}
        print(json.dumps(about | {"what": what, "load_average": load_average, "rows": results}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
