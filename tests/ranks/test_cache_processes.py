"""Whole caches in real processes that agree over gloo: device, host and storage, with every fault.

An episode of a seed does the same in processes as in threads, step for step: the first ones are run both ways
and compared. They are of other seeds than those of `test_random_ranks`.

UNIFIED_CACHE_PROCESS_TICKS sets how many ticks there are (20,000), UNIFIED_CACHE_PROCESS_SEED the first seed.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from tests.cache.support import toks  # noqa: E402
from tests.ranks.baton import run_ranks  # noqa: E402
from tests.ranks.processes import no_more_than, processes, threads_and_descriptors  # noqa: E402
from tests.ranks.support import late_copies, make_rank, serve_rank  # noqa: E402
from tests.ranks.test_random_ranks import TICKS_EACH, Rank  # noqa: E402
from unified_cache.errors import RankLostError, RanksDifferError  # noqa: E402
from unified_cache.ranks.agreement import Agreement  # noqa: E402
from unified_cache.ranks.layout import RankLayout  # noqa: E402
from unified_cache.ranks.torch_group import TorchRanks  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo here"
)

TICKS = int(os.environ.get("UNIFIED_CACHE_PROCESS_TICKS", "20000"))
COMPARED = 4  # episodes
FIRST_SEED = int(os.environ.get("UNIFIED_CACHE_PROCESS_SEED", "500"))
RANKS = 4
PATIENCE = 1200.0  # seconds: four processes on two cores take a minute, unless these have much else to do


class Recorded(Rank):
    """What it was at each tick is in `history`."""

    history = b""

    def tick(self) -> None:
        super().tick()
        assert self.cache._together is not None
        now = self.cache._together._count, self.cache.tree.digest(), sorted(self.cache.stats().items())
        self.history = hashlib.sha256(self.history + repr(now).encode()).digest()

    def run(self) -> None:
        while self.ticks < TICKS_EACH:
            self.step()
        self.end()


def in_threads(seed: int) -> list[bytes]:
    """The histories of the ranks, where the same seed is run in threads."""
    digests: dict[int, int] = {}
    histories = [b""] * RANKS

    def program(agreement: Agreement) -> None:
        rank = Recorded(seed, agreement, digests)
        rank.run()
        histories[rank.rank] = rank.history

    run_ranks(RANKS, program)
    return histories


def random_calls(rank: int, layout: RankLayout, seeds: range, idle: int | None) -> dict[str, Any]:
    """Episodes of `test_random_ranks`, but on the ranks of a group that has no requests."""
    layout = layout.at(rank)
    agreement = TorchRanks.of_layout(layout, time_limit=60.0)
    ticks = counted = 0
    histories = []
    before: tuple[int, int] | None = None
    if layout.dp_rank != idle:
        for seed in seeds:
            begun = agreement.reductions
            episode = Recorded(1000 * layout.dp_rank + seed, agreement, {})
            episode.run()
            histories.append(episode.history)
            assert episode.cache._together is not None
            ticks += episode.cache._together._count
            counted += agreement.reductions - begun - 2  # two when a cache is made
            if before is None:
                before = threads_and_descriptors()
    dist.barrier()  # whoever is idle has waited here all the time
    after = threads_and_descriptors() if before is None else no_more_than(before)
    return {
        "ticks": ticks,
        "reductions": counted,
        "histories": histories,
        "before": before,
        "after": after,
    }


def test_four_processes_stay_equal() -> None:
    """`Rank.tick` fails as soon as two trees differ, `Rank.end` if anything is held."""
    seeds = range(FIRST_SEED, FIRST_SEED + TICKS // TICKS_EACH)
    with processes(random_calls, RANKS, RankLayout(tp_size=RANKS), seeds, None) as running:
        results = [running.result(rank, PATIENCE) for rank in range(RANKS)]
    for result in results:
        assert result["ticks"] >= TICKS
        assert result["reductions"] == result["ticks"]
        assert result["ticks"] == results[0]["ticks"]
        # Nothing was left behind by all the caches after the first.
        assert result["after"][0] <= result["before"][0]
        assert result["after"][1] <= result["before"][1]
    # Nothing is another thing in processes than in threads.
    histories = [list(each) for each in zip(*(result["histories"] for result in results), strict=True)]
    assert histories[:COMPARED] == [in_threads(seed) for seed in seeds[:COMPARED]]


def test_a_group_that_is_idle_blocks_nobody() -> None:
    layout = RankLayout(tp_size=4, dp_size=2)
    with processes(random_calls, 4, layout, range(2), 1) as running:
        results = [running.result(rank) for rank in range(4)]
    assert [result["ticks"] >= 2 * TICKS_EACH for result in results] == [True, True, False, False]


def test_groups_go_their_own_ways() -> None:
    layout = RankLayout(tp_size=4, dp_size=2)
    with processes(random_calls, 4, layout, range(2), None) as running:
        ticks = [running.result(rank)["ticks"] for rank in range(4)]
    assert ticks[0] == ticks[1]
    assert ticks[2] == ticks[3]


def one_differs(rank: int) -> str:
    cache = make_rank(TorchRanks(time_limit=60.0))
    serve_rank(cache, toks(9))
    cache.tick()
    if rank == 3:
        cache.match_prefix(toks(4))
    try:
        cache.tick()
    except RanksDifferError as error:
        return str(error)
    return "no difference"


def test_a_difference_is_named_in_every_process() -> None:
    with processes(one_differs, RANKS) as running:
        messages = [running.result(rank) for rank in range(RANKS)]
    assert len(set(messages)) == 1
    assert "at tick 2 ranks differ in digest: rank 3 has" in messages[0]


def one_dies(rank: int) -> str:
    cache = make_rank(TorchRanks(time_limit=60.0))
    serve_rank(cache, toks(9))
    late_copies(cache).run_all()
    cache.tick()
    if rank == 2:
        os.kill(os.getpid(), 9)
    try:
        for _ in range(3):
            cache.tick()
    except RankLostError as error:
        cache.close()
        return str(error)
    return "nobody is missed"


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    with processes(one_dies, RANKS) as running:
        for rank in (0, 1, 3):
            assert "another rank" in running.result(rank)
