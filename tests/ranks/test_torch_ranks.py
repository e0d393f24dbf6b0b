"""Ranks that are processes: what they agree on, and what they hear when one of them dies or stalls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from tests.ranks.processes import (  # noqa: E402
    no_more_than,
    processes,
    stop_here,
    threads_and_descriptors,
)
from unified_cache.copies.cuda_events import poll  # noqa: E402
from unified_cache.errors import ArgumentError, ClosedError, RankError, RankLostError  # noqa: E402
from unified_cache.ranks import torch_group  # noqa: E402
from unified_cache.ranks.layout import RankLayout  # noqa: E402
from unified_cache.ranks.torch_group import TorchRanks  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo here"
)

LONG = 3600.0  # nothing here waits for so long, unless it is broken


def vector(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def said(size: int, rounds: int) -> list[np.ndarray]:
    """What each rank says in each round, (ranks, length) int64; the same in every process."""
    rng = np.random.default_rng(size)
    return [rng.integers(-(2**62), 2**62, (size, (200, 200, 1, 3)[number % 4])) for number in range(rounds)]


def lost(call: Any) -> tuple[str, float]:
    """The message of the RankLostError that the call raises, and the seconds until then."""
    begin = time.monotonic()
    with pytest.raises(RankLostError) as error:
        call()
    return str(error.value), time.monotonic() - begin


def agree(rank: int, size: int, rounds: int) -> dict[str, Any]:
    ranks = TorchRanks(time_limit=LONG)
    decides, results, done = ranks.decides, [], []
    numbers = said(size, rounds)
    for at in range(0, rounds, 4):
        under_way = []
        for number in range(at, at + 4):
            mine = numbers[number][rank].copy()
            under_way.append(ranks.begin_reduce_min(mine))
            mine[:] = -(2**63)  # not kept: nobody sees this
        order = (2, 0, 3, 1)
        taken: dict[int, np.ndarray] = {}
        for which in order:
            taken[which] = under_way[which].wait()
            done.append(under_way[which].done)
            assert under_way[which].wait() is taken[which]
        results += [taken[which] for which in range(4)]  # the caller's own: later reductions leave them alone
    ranks.close()
    ranks.close()
    with pytest.raises(ClosedError, match=f"rank {rank} of {size} was closed before this call"):
        ranks.begin_reduce_min(vector(1))
    return {
        "results": results,
        "done": all(done),
        "who": (ranks.rank, ranks.size, ranks.reductions, decides),
    }


def test_processes_agree_with_several_reductions_under_way() -> None:
    size, rounds = 3, 40
    with processes(agree, size, size, rounds) as running:
        for rank in range(size):
            outcome = running.result(rank)
            assert outcome["who"] == (rank, size, rounds, True)
            assert outcome["done"]
            for result, numbers in zip(outcome["results"], said(size, rounds), strict=True):
                assert np.array_equal(result, numbers.min(axis=0))
        assert all(running.ended(rank) for rank in range(size))


def meet_a_loss(rank: int, how: str, time_limit: float) -> dict[str, Any] | None:
    ranks = TorchRanks(time_limit=time_limit)
    ranks.reduce_min(vector(rank))
    if rank == 1:
        if how == "stopped":
            stop_here()
        os.kill(os.getpid(), signal.SIGKILL)
    first = second = None

    def overlap() -> None:
        nonlocal first, second
        first = ranks.begin_reduce_min(vector(rank))
        second = ranks.begin_reduce_min(vector(rank))
        first.wait()

    message, seconds = lost(overlap)
    again = [lost(lambda: ranks.reduce_min(vector(rank)))]
    for reduction in (first, second):
        if reduction is not None:
            again.append(lost(reduction.wait))
    return {"message": message, "seconds": seconds, "again": again, "reductions": ranks.reductions}


@pytest.mark.parametrize("how, time_limit", [("killed", LONG), ("stopped", 1.0)])
def test_a_rank_that_dies_or_stalls_is_an_error_on_the_others_and_they_can_end(
    how: str, time_limit: float
) -> None:
    with processes(meet_a_loss, 4, how, time_limit) as running:
        for rank in (0, 2, 3):
            outcome = running.result(rank)
            assert outcome["message"].startswith(
                f"rank {rank} of 4 (processes [0, 1, 2, 3]), reduction 1: another rank "
            )
            if how == "stopped":
                assert f"did not come within {time_limit:g} s" in outcome["message"] or (
                    "has ended" in outcome["message"]  # a rank that gave up before this one did
                )
            else:
                assert "has ended" in outcome["message"]
            assert outcome["seconds"] < 60
            for message, seconds in outcome["again"]:
                assert message == outcome["message"]
                assert seconds < 60
            assert running.ended(rank, 30)


def close_beside_a_stalled_rank(rank: int) -> str:
    ranks = TorchRanks(time_limit=LONG)
    ranks.reduce_min(vector(rank))
    if rank == 1:
        stop_here()
    reduction = ranks.begin_reduce_min(vector(rank))
    ranks.close()
    message, _ = lost(reduction.wait)
    return message


def test_close_ends_what_is_under_way_with_a_stalled_rank() -> None:
    with processes(close_beside_a_stalled_rank, 3) as running:
        for rank in (0, 2):
            assert f"rank {rank} of 3 (processes [0, 1, 2]), reduction 1: another rank" in running.result(
                rank
            )


LEAVING = """
import contextlib, datetime, os, signal, sys
import numpy as np, torch.distributed as dist
from unified_cache.errors import RankLostError
from unified_cache.ranks.torch_group import TorchRanks
store, how, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
ranks = TorchRanks(time_limit=3600 if how == "under way" else 0.5)
numbers = np.zeros(3, np.int64)
ranks.reduce_min(numbers)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
reduction = ranks.begin_reduce_min(numbers)
if how == "lost":
    with contextlib.suppress(RankLostError):
        reduction.wait()
        sys.exit("agreed with a rank that is stopped")
print("leaving", flush=True)
"""


@pytest.mark.parametrize("how", ["under way", "lost"])
def test_a_process_ends_although_a_rank_is_stalled_and_nobody_closed(how: str, tmp_path: Path) -> None:
    # Interpreters of their own: those that multiprocessing starts end without what happens at an exit.
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVING, str(tmp_path / "store"), how, str(rank)], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        output, _ = started[0].communicate(timeout=120)
        assert output == b"leaving\n"
        assert started[0].returncode == 0
    finally:
        for process in started:
            process.kill()
            process.communicate()


def make_and_close(rank: int) -> list[tuple[int, int]]:
    layout = RankLayout(tp_size=2, pp_size=2).at(rank)
    counts = []
    for _ in range(3):
        ranks = TorchRanks.of_layout(layout, time_limit=60)
        ranks.reduce_min(vector(1))
        ranks.reduce_min_of_stages(vector(1))
        ranks.close()
        dist.barrier()
        counts.append(no_more_than(counts[0]) if counts else threads_and_descriptors())
    return counts


def test_threads_and_descriptors_go_with_the_ranks() -> None:
    with processes(make_and_close, 4) as running:
        for rank in range(4):
            first, *later = running.result(rank)
            for threads, descriptors in later:
                assert threads <= first[0]
                assert descriptors <= first[1]


def tick_where_there_is_work(rank: int) -> list[int]:
    layout = RankLayout(tp_size=4, dp_size=2).at(rank)
    ranks = TorchRanks.of_layout(layout, time_limit=60)
    assert (ranks.rank, ranks.size) == (layout.group_rank, layout.group_size)
    # The groups have different numbers of ticks; the second has none at first.
    results = [int(ranks.reduce_min(vector(rank * 10 + tick))[0]) for tick in range(5 if rank < 2 else 0)]
    dist.barrier()
    results += [int(ranks.reduce_min(vector(rank * 10 + tick))[0]) for tick in range(0 if rank < 2 else 3)]
    ranks.close()
    return results


def test_groups_of_dp_attention_keep_nobody_waiting() -> None:
    with processes(tick_where_there_is_work, 4) as running:
        assert [running.result(rank) for rank in range(4)] == [[0, 1, 2, 3, 4]] * 2 + [[20, 21, 22]] * 2


def refuse(rank: int) -> list[str]:
    messages = []
    lone = dist.new_group([1])
    for layout in (RankLayout(tp_size=2, pp_size=3), RankLayout(tp_size=2, tp_rank=1 - rank)):
        with pytest.raises(ArgumentError) as error:
            TorchRanks.of_layout(layout)
        messages.append(str(error.value))
    for arguments in ({"time_limit": 0}, {"behind": 0}):
        with pytest.raises(ArgumentError) as error:
            TorchRanks.of_layout(RankLayout(tp_size=2, tp_rank=rank), **arguments)  # type: ignore[arg-type]
        messages.append(str(error.value))
    if rank == 0:
        with pytest.raises(ArgumentError) as error:
            TorchRanks(lone)
        messages.append(str(error.value))
    else:
        assert TorchRanks(lone).reduce_min(vector(3)).tolist() == [3]
    alone = TorchRanks.of_layout(RankLayout(tp_size=2, tp_rank=rank, dp_size=2))
    assert alone.reduce_min(vector(rank)).tolist() == [rank]
    return messages


def test_layouts_and_groups_that_do_not_fit() -> None:
    with processes(refuse, 2) as running:
        for rank in range(2):
            messages = running.result(rank)
            assert messages[:4] == [
                "tp_size=2 times pp_size=3 are 6 ranks, but torch.distributed has 2 processes",
                f"tp_rank={1 - rank} of stage pp_rank=0 is process {1 - rank}, but this is process {rank}",
                "time_limit must be a number of seconds from 0.001 to 1e6, not 0",
                "behind must be an integer >= 1, not 0",
            ]
            for message in messages[4:]:
                assert message.startswith("group must be a process group that this process is in, not ")


def test_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    for make in (TorchRanks, lambda: TorchRanks.of_layout(RankLayout())):
        with pytest.raises(RankError, match=r"call torch\.distributed\.init_process_group first"):
            make()


def go_through_stages(rank: int, size: int, stages: int, rounds: int) -> list[list[int]]:
    layout = RankLayout(tp_size=size, pp_size=stages).at(rank)
    ranks = TorchRanks.of_layout(layout, time_limit=60)
    assert ranks.decides == (layout.pp_rank == 0)
    assert ranks.reduce_min_of_stages(vector(rank + 5, -rank)).tolist() == [5, 1 - size * stages]
    results = []
    if layout.pp_rank == stages - 1:
        # Nobody waits for the last stage: it begins when the others have ended.
        dist.barrier()
    before = None
    for tick in range(rounds):
        now = ranks.begin_reduce_min(vector(1000 * tick + layout.tp_rank + 3, -layout.tp_rank, tick))
        if before is not None:  # two under way at any time
            results.append(before.wait().tolist())
        before = now
    assert before is not None
    results.append(before.wait().tolist())
    if layout.pp_rank < stages - 1:
        dist.barrier()
    dist.barrier()
    ranks.close()
    return results


def test_stages_hear_what_the_first_one_decided() -> None:
    size, stages, rounds = 2, 2, 50
    with processes(go_through_stages, size * stages, size, stages, rounds) as running:
        for rank in range(size * stages):
            assert running.result(rank) == [[1000 * tick + 3, 1 - size, tick] for tick in range(rounds)]
        assert all(running.ended(rank) for rank in range(size * stages))


def go_alone_through_stages(rank: int) -> list[int]:
    layout = RankLayout(tp_size=2, dp_size=2, pp_size=2).at(rank)
    ranks = TorchRanks.of_layout(layout, time_limit=60)
    assert ranks.reduce_min_of_stages(vector(rank)).tolist() == [layout.dp_rank]
    # One of the two groups has more to do than the other.
    results = [
        ranks.reduce_min(vector(10 * rank + tick)).tolist()[0] for tick in range(3 + 4 * layout.dp_rank)
    ]
    dist.barrier()
    ranks.close()
    return results


def test_groups_of_dp_attention_in_stages() -> None:
    with processes(go_alone_through_stages, 4) as running:
        for rank, told in enumerate(([0, 1, 2], [10, 11, 12, 13, 14, 15, 16]) * 2):
            assert running.result(rank) == told


def run_away(rank: int) -> Any:
    ranks = TorchRanks.of_layout(RankLayout(pp_size=2, pp_rank=rank), time_limit=1.0, behind=5)
    if rank == 1:
        ranks.reduce_min(vector(0))
        dist.barrier()
        dist.barrier()  # the first stage has waited in vain
        # What is on its way may be lost with the connection; that there is no more is heard at once.
        message, _ = lost(lambda: [ranks.reduce_min(vector(0)) for _ in range(9)])
        return message
    ranks.reduce_min(vector(1))
    dist.barrier()
    message, waited = lost(lambda: [ranks.reduce_min(vector(2)) for _ in range(1000)])
    dist.barrier()
    assert waited >= 1.0
    return ranks.reductions, message


def test_a_stage_that_does_not_follow_is_an_error_on_the_one_before() -> None:
    with processes(run_away, 2) as running:
        reductions, message = running.result(0)
        assert reductions >= 7
        assert message == (
            "stage 1 does not follow: it has been 5 reductions behind stage 0, as many as it may be, for 1 s"
        )
        assert "stage 0 has ended" in running.result(1)
        assert all(running.ended(rank) for rank in range(2))


def close_before_the_next_stage_has_come(rank: int, folder: str) -> list[int]:
    ranks = TorchRanks.of_layout(RankLayout(pp_size=2, pp_rank=rank), time_limit=LONG)
    gone = Path(folder, "gone")
    if rank == 0:
        torch_group._LEAVE_SECONDS = 0.0
        leave = torch_group._Group.leave

        def leave_and_say_so(group: torch_group._Group) -> None:
            leave(group)
            gone.touch()

        torch_group._Group.leave = leave_and_say_so  # type: ignore[method-assign]
        told = [int(ranks.reduce_min(vector(number))[0]) for number in range(3)]
        dist.barrier()
    else:
        dist.barrier()
        poll(gone.exists, 0.5)  # in vain: it is still there
        told = [int(ranks.reduce_min(vector(9))[0]) for number in range(3)]
    ranks.close()
    return told


def test_a_stage_that_closes_waits_for_the_next_one(tmp_path: Path) -> None:
    with processes(close_before_the_next_stage_has_come, 2, str(tmp_path)) as running:
        assert [running.result(rank) for rank in range(2)] == [[0, 1, 2]] * 2
        assert all(running.ended(rank, 60) for rank in range(2))


def lose_a_stage(rank: int, which: int) -> str | None:
    ranks = TorchRanks.of_layout(RankLayout(pp_size=3, pp_rank=rank), time_limit=LONG)
    ranks.reduce_min(vector(rank))
    dist.barrier()
    if rank == which:
        os.kill(os.getpid(), signal.SIGKILL)
    message, _ = lost(lambda: [ranks.reduce_min(vector(0)) for _ in range(1000)])
    return message


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_stage_that_dies_ends_those_around_it(which: int) -> None:
    with processes(lose_a_stage, 3, which) as running:
        for rank in {0, 1, 2} - {which}:
            message = running.result(rank)
            neighbour = "stage 0" if rank == 1 and which == 0 else None
            if neighbour is not None:
                assert neighbour in message
            assert "stage " in message
            assert running.ended(rank, 60)


def be_late(rank: int) -> str | None:
    ranks = TorchRanks.of_layout(RankLayout(pp_size=2, pp_rank=rank), time_limit=0.5)
    if rank == 0:
        stop_here()
    message, _ = lost(lambda: ranks.reduce_min(vector(0)))
    return message


def test_a_stage_that_sends_nothing_is_named() -> None:
    with processes(be_late, 2) as running:
        assert running.result(1).startswith("reduction 0: stage 0 did not come within 0.5 s")
        assert running.ended(1, 30)
