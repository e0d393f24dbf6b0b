"""Scenarios on real processes of torch.distributed, forked from one that has imported torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["Processes", "no_more_than", "processes", "stop_here", "threads_and_descriptors"]

PATIENCE = 300.0  # seconds, on a machine that has much else to do

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch", "torch.distributed"])


def threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def no_more_than(before: tuple[int, int]) -> tuple[int, int]:
    """Threads and descriptors, once they are no more than these, or after ten seconds.

    A thread that was joined, and what it had open, go a moment later.
    """
    end = time.monotonic() + 10
    while True:
        now = threads_and_descriptors()
        if (now[0] <= before[0] and now[1] <= before[1]) or time.monotonic() >= end:
            return now
        time.sleep(0.01)


def stop_here() -> None:
    """Stall, as a process does whose machine swaps; whoever started it kills it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _main(
    scenario: Callable[..., Any],
    rank: int,
    size: int,
    store: str,
    arguments: tuple[Any, ...],
    report: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=PATIENCE),
        )
        report.send(("returned", scenario(rank, *arguments)))
    except BaseException:
        report.send(("raised", traceback.format_exc()))


class Processes:
    """A scenario under way, one process a rank."""

    def __init__(
        self, scenario: Callable[..., Any], size: int, arguments: tuple[Any, ...], folder: str
    ) -> None:
        self.processes = []
        self._reports: list[Connection] = []
        for rank in range(size):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_main, args=(scenario, rank, size, f"{folder}/store", arguments, there), daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self._reports.append(here)

    def result(self, rank: int, patience: float = PATIENCE) -> Any:
        """What the scenario returned there, within so many seconds."""
        if not wait([self._reports[rank]], patience):
            raise TimeoutError(f"rank {rank} says nothing")
        how, what = self._reports[rank].recv()
        assert how == "returned", what
        return what

    def ended(self, rank: int, patience: float = PATIENCE) -> bool:
        """The process is gone, within so many seconds."""
        self.processes[rank].join(patience)
        return self.processes[rank].exitcode is not None

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for report in self._reports:
            report.close()


@contextlib.contextmanager
def processes(scenario: Callable[..., Any], size: int, *arguments: Any) -> Iterator[Processes]:
    """Run `scenario(rank, *arguments)` in so many processes; whatever is left of them is killed."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        running = Processes(scenario, size, arguments, str(Path(folder)))
        try:
            yield running
        finally:
            running.kill()
