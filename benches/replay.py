#!/usr/bin/env python3
"""Replays the conversation trace of the tests, block by block and token by token, against floors of one run.

Times are those that the replay reports: match, lock, evict, insert and unlock, without reading the trace and
without making tokens. The best of some runs counts. The floor of a token replay is to copy as many tokens
once, request by request, between two buffers that stay in the processor's cache; that of a block replay is
one look-up in a Python dict a block.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import machine

import unified_cache
from unified_cache.replay import Settings, Trace, read_trace, replay

TRACE = Path(__file__).parents[1] / "tests" / "data" / "conversation_trace.jsonl.xz"
ROWS = {
    "block by block, 20000 blocks": (Settings(), 0.1),
    "token by token, page 64, 20000 blocks": (Settings(page_size=64), 0.25),
    "block by block, 600 + 19200 blocks": (Settings(device_blocks=600, host_blocks=19_200), None),
    "token by token, page 64, 600 + 19200 blocks": (
        Settings(device_blocks=600, host_blocks=19_200, page_size=64),
        None,
    ),
}


def copied(trace: Trace) -> float:
    """Seconds to copy each request's tokens once."""
    lengths = trace.input_lengths.tolist()
    source, target = (np.zeros(max(lengths), np.uint32) for _ in range(2))
    begin = time.perf_counter()
    for length in lengths:
        target[:length] = source[:length]
    return time.perf_counter() - begin


def looked_up(trace: Trace) -> float:
    """Seconds to look each block up once."""
    ids = trace.hash_ids.tolist()
    known = dict.fromkeys(ids, 0)
    begin = time.perf_counter()
    for block in ids:
        known[block]
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="of each row; the best counts (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs: {arguments.runs} is less than 1")
    trace = read_trace(TRACE)
    floors: dict[bool, Callable[[Trace], float]] = {True: copied, False: looked_up}
    rows = []
    for name, (settings, goal) in ROWS.items():
        seconds, floor, load = float("inf"), float("inf"), os.getloadavg()[0]
        for _ in range(arguments.runs):  # in turns, so that both see the same neighbours
            report = replay([trace], settings)
            seconds = min(seconds, report.seconds)
            floor = min(floor, floors[settings.page_size is not None](trace))
        rows.append(
            {
                "name": name,
                "seconds": round(seconds, 4),
                "goal": goal,
                "floor": round(floor, 4),
                "ratio": round(seconds / floor, 2),
                "hit_rate": round(report.hit_rate, 4),
                "load": round(load, 1),
            }
        )
    if arguments.json:
        print(json.dumps({"version": unified_cache.__version__, "machine": machine(), "rows": rows}))
        return 0
    print(f"unified_cache {unified_cache.__version__}, {machine()}\n")
    print(f"{'replay':44} {'seconds':>8} {'goal':>6} {'floor':>7} {'ratio':>6} {'hit rate':>9} {'load':>5}")
    for row in rows:
        goal = "" if row["goal"] is None else row["goal"]
        print(
            f"{row['name']:44} {row['seconds']:8.4f} {goal:>6} {row['floor']:7.4f} {row['ratio']:6.2f}"
            f" {row['hit_rate']:9.4f} {row['load']:5.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
