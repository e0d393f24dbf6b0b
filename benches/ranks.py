"""What agreement between ranks costs: reductions of the cache's vector, and its ticks, over gloo.

Each call is timed in turns with a bare `torch.distributed.all_reduce` of as many numbers between the same
processes; the ratios are of the medians. "tick" is `UnifiedCache.tick` with nothing under way, "busy tick"
with as many storage operations under way as have a place. The last columns are what the scheduler's thread
spends if it does something else between begin and wait, until the reduction is done.

Times vary between minutes and machines, and more if there are fewer cores than processes: compare ratios of
one run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from machine import machine

from unified_cache import CacheConfig, UnifiedCache
from unified_cache.pools.device import MhaDevicePool
from unified_cache.ranks.agreement import Agreement
from unified_cache.ranks.group import Ranks
from unified_cache.ranks.layout import RankLayout
from unified_cache.ranks.outcomes import LENGTH, SLOTS
from unified_cache.ranks.torch_group import TorchRanks
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus

NUMBERS = LENGTH


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def medians(rounds: int, *calls: Callable[[], float]) -> list[float]:
    """Median seconds of each, called in turns; each says itself how long it took."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds // 10 + 1):
        for call in calls:
            call()
    for at in range(rounds):
        # Not always the same one first.
        for which in range(len(calls)) if at % 2 else reversed(range(len(calls))):
            times[which].append(calls[which]())
    return [statistics.median(each) for each in times]


def measure(rank: int, size: int, rounds: int) -> dict[str, float]:
    ranks = TorchRanks.of_layout(RankLayout(tp_size=size, tp_rank=rank))
    group = dist.new_group(list(range(size)), backend="gloo")
    tensor = torch.zeros(NUMBERS, dtype=torch.int64)
    vector = np.arange(NUMBERS, dtype=np.int64) + rank
    halves: dict[str, list[float]] = {"begin": [], "wait": []}

    def bare() -> float:
        return seconds_of(lambda: dist.all_reduce(tensor, dist.ReduceOp.MIN, group=group))

    def ours() -> float:
        return seconds_of(lambda: ranks.reduce_min(vector))

    def overlapped() -> float:
        begin = time.perf_counter()
        reduction = ranks.begin_reduce_min(vector)
        halves["begin"].append(time.perf_counter() - begin)
        while not reduction.done:
            time.sleep(1e-4)
        halves["wait"].append(seconds_of(reduction.wait))
        return 0.0

    idle, busy = make_cache(ranks, busy=False), make_cache(ranks, busy=True)
    of_bare, of_ours, of_idle, of_busy = medians(
        rounds, bare, ours, lambda: seconds_of(idle.tick), lambda: seconds_of(busy.tick)
    )
    medians(rounds, overlapped)
    ranks.close()
    return {
        "bare": of_bare,
        "ours": of_ours,
        "tick": of_idle,
        "busy tick": of_busy,
        **{name: statistics.median(times) for name, times in halves.items()},
    }


class Stalled(Backend):
    """A storage whose calls do not return: what is asked of it stays under way."""

    scheme = "stalled"

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        threading.Event().wait()
        return []

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        return []

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        return []

    def delete(self, keys: Sequence[str]) -> int:
        return 0

    def keys(self) -> Iterator[str]:
        return iter(())

    def clear(self) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def make_cache(agreement: Agreement, *, busy: bool) -> UnifiedCache:
    config = CacheConfig(
        page_size=16,
        storage=Stalled() if busy else None,
        storage_timeout=1e6,
        prefetch_threshold=0,
        model="bench",
    )
    layout = RankLayout(tp_size=agreement.size, tp_rank=agreement.rank)
    pool = MhaDevicePool(256, 16, 2, heads=2, head_dim=16, dtype=torch.float32)
    cache = UnifiedCache(config, pool, ranks=Ranks(layout, agreement))
    cache.tick()
    if busy:
        for at in range(2 * SLOTS):
            cache.begin(np.arange(33) + 1000 * at)
        cache.tick()
    return cache


def process(rank: int, size: int, rounds: int, store: str, to: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    to.put((rank, measure(rank, size, rounds)))
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, rounds: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=process, args=(rank, size, rounds, f"{folder}/store", results))
            for rank in range(size)
        ]
        for each in processes:
            each.start()
        of_ranks = dict(results.get() for _ in range(size))
        for each in processes:
            each.join()
    # All ranks see about the same times: that of rank 0 stands for them.
    mine = of_ranks[0]
    ratios = {f"{name} ratio": mine[name] / mine["bare"] for name in ("ours", "tick", "busy tick")}
    return {"processes": size, **mine, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=400, help="timed calls of each row (default: 400)")
    parser.add_argument("--json", action="store_true", help="print one object")
    arguments = parser.parse_args()
    rows = [run(size, arguments.rounds) for size in arguments.processes]
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))
        return
    print(f"{machine()}, torch {torch.__version__}, {NUMBERS} int64, median of {arguments.rounds}")
    print(
        f"\n{'processes':>9} {'all_reduce':>13} {'reduce_min':>13} {'ratio':>6} {'tick':>13} {'ratio':>6} "
        f"{'busy tick':>13} {'ratio':>6} {'begin':>10} {'wait, done':>11}"
    )
    for row in rows:
        print(
            f"{row['processes']:>9} {row['bare'] * 1e6:>10.1f} us {row['ours'] * 1e6:>10.1f} us "
            f"{row['ours ratio']:>6.2f} {row['tick'] * 1e6:>10.1f} us {row['tick ratio']:>6.2f} "
            f"{row['busy tick'] * 1e6:>10.1f} us {row['busy tick ratio']:>6.2f} "
            f"{row['begin'] * 1e6:>7.1f} us {row['wait'] * 1e6:>8.1f} us"
        )


if __name__ == "__main__":
    main()
