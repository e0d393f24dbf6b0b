"""Stages: the first decides, the others are told, in order and behind."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from unified_cache.errors import ArgumentError, RankLostError, RanksDifferError
from unified_cache.ranks.pipeline import PipelineRanks, ThreadLink
from unified_cache.ranks.threads import ThreadRanks

LONG = 60.0


def vector(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("seed", range(10))
def test_later_stages_hear_what_the_first_decided_in_any_order_of_steps(seed: int) -> None:
    order, rng = random.Random(seed), np.random.default_rng(seed)
    size, stages, rounds, behind = order.randint(1, 3), order.randint(1, 4), 50, order.randint(1, 6)
    said = rng.integers(-(2**62), 2**62, (rounds, stages, size, 5))
    decided = said[:, 0].min(axis=1)
    grid = PipelineRanks.of_threads(size, stages, behind=behind, time_limit=0)
    assert [[ranks.decides for ranks in stage] for stage in grid] == [
        [stage == 0] * size for stage in range(stages)
    ]
    at = [0] * stages
    while at[-1] < rounds:
        stage = order.randrange(stages)
        # As far as a stage can go without waiting or running away.
        ahead = at[stage - 1] - at[stage] if stage else rounds - at[0]
        room = behind - (at[stage] - at[stage + 1]) if stage < stages - 1 else rounds
        steps = order.randint(0, min(ahead, room))
        if order.random() < 0.5:  # tick by tick
            for number in range(at[stage], at[stage] + steps):
                reductions = [
                    ranks.begin_reduce_min(said[number, stage, ranks.rank]) for ranks in grid[stage]
                ]
                for reduction in reductions:
                    assert np.array_equal(reduction.wait(), decided[number])
        else:  # all under way at once, waited for in any order
            under_way = [
                (number, ranks.begin_reduce_min(said[number, stage, ranks.rank]))
                for number in range(at[stage], at[stage] + steps)
                for ranks in grid[stage]
            ]
            order.shuffle(under_way)
            for number, reduction in under_way:
                assert np.array_equal(reduction.wait(), decided[number])
                assert reduction.done
        at[stage] += steps


def test_stages_on_threads() -> None:
    grid = PipelineRanks.of_threads(2, 3, time_limit=LONG)
    said = np.random.default_rng(1).integers(0, 2**62, (300, 2, 9))
    results: dict[tuple[int, int], list[np.ndarray]] = {}

    # A stage may be 64 reductions behind, no more: there the others wait for it.
    def run(stage: int, ranks: PipelineRanks) -> None:
        for at in range(0, 300, 50):
            results.setdefault((stage, ranks.rank), []).extend(
                ranks.reduce_min(numbers if ranks.decides else np.zeros(9, np.int64))
                for numbers in said[at : at + 50, ranks.rank]
            )
            assert ranks.reduce_min_of_stages(vector(stage + 3, ranks.rank)).tolist() == [3, 0]

    threads = [
        threading.Thread(target=run, args=(stage, ranks), daemon=True)
        for stage, row in enumerate(grid)
        for ranks in row
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert len(results) == 6
    for result in results.values():
        assert np.array_equal(result, said.min(axis=1))


def test_a_stage_that_does_not_follow_is_an_error_at_the_time_limit() -> None:
    (first,), (second,) = PipelineRanks.of_threads(1, 2, behind=3, time_limit=0)
    for number in range(3):
        first.reduce_min(vector(number))
    message = (
        "stage 1 does not follow: it has been 3 reductions behind stage 0, as many as it may be, for 0 s"
    )
    for _ in range(2):
        with pytest.raises(RankLostError, match=message):
            first.reduce_min(vector(3))
    # What was sent before still arrives; then it hears that there is no more.
    assert [second.reduce_min(vector(9)).tolist() for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(RankLostError, match="stage 0 has closed before reduction 3"):
        second.reduce_min(vector(9))


def test_a_stage_that_sends_nothing_is_named() -> None:
    _, (second,), (third,) = PipelineRanks.of_threads(1, 3, time_limit=0)
    with pytest.raises(RankLostError, match="stage 0 did not send reduction 0 within 0 s"):
        second.reduce_min(vector(1))
    with pytest.raises(RankLostError, match="stage 1 has closed before reduction 0"):
        third.reduce_min(vector(1))


def test_a_lost_rank_of_the_first_stage_ends_all_stages_at_once() -> None:
    grid = PipelineRanks.of_threads(2, 2, time_limit=3600)
    caught: list[str] = []
    begun = threading.Event()

    def wait() -> None:
        reduction = grid[1][0].begin_reduce_min(vector(1))
        begun.set()
        with pytest.raises(RankLostError) as error:
            reduction.wait()
        caught.append(str(error.value))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert begun.wait(LONG)
    grid[0][1].close()
    with pytest.raises(RankLostError, match="rank 1 of 2 closed before reduction 0"):
        grid[0][0].reduce_min(vector(1))
    thread.join(LONG)
    assert caught == ["stage 0 has closed before reduction 0"]


def test_a_stage_behind_that_has_closed() -> None:
    (first,), (second,) = PipelineRanks.of_threads(1, 2, time_limit=0)
    second.close()
    second.close()
    with pytest.raises(RankLostError, match="stage 1 has closed"):
        first.reduce_min(vector(1))


def test_stages_that_expect_vectors_of_different_lengths() -> None:
    (first,), (second,) = PipelineRanks.of_threads(1, 2, time_limit=0)
    first.reduce_min(vector(1, 2))
    for _ in range(2):
        with pytest.raises(RanksDifferError, match="reduction 0: stage 0 sent 2 numbers, and 3 are expected"):
            second.reduce_min(vector(1, 2, 3))


def test_a_reduction_that_nobody_waits_for_is_handed_on_with_the_next_one() -> None:
    (first,), (second,) = PipelineRanks.of_threads(1, 2, time_limit=0)
    first.begin_reduce_min(vector(1))
    first.reduce_min(vector(2))
    assert [second.reduce_min(vector(0)).tolist() for _ in range(2)] == [[1], [2]]


def test_what_the_caller_does_with_a_result_is_not_sent() -> None:
    (first,), (second,) = PipelineRanks.of_threads(1, 2, time_limit=0)
    first.reduce_min(vector(7))[:] = 0
    assert second.reduce_min(vector(0)).tolist() == [7]


def test_pipelines_that_can_not_be() -> None:
    with pytest.raises(ArgumentError, match="stages must be an integer >= 1, not 0"):
        PipelineRanks.of_threads(1, 0)
    with pytest.raises(ArgumentError, match="behind must be an integer >= 1, not 0"):
        PipelineRanks.of_threads(1, 2, behind=0)
    with pytest.raises(ArgumentError, match="time_limit must be a number of seconds >= 0, not nan"):
        PipelineRanks.of_threads(1, 2, time_limit=float("nan"))


def test_a_link_keeps_what_is_on_its_way_and_nothing_else() -> None:
    link = ThreadLink(0, behind=2, time_limit=0)
    receives = []
    for number in range(100):
        link.send(vector(number))
        receives.append(link.begin_receive(1))
        assert receives[-1].done
        assert receives[-1].wait() is receives[-1].wait()
    assert [receive.wait().tolist() for receive in receives] == [[number] for number in range(100)]


def test_alone_is_a_pipeline_of_one_stage() -> None:
    ((only,),) = PipelineRanks.of_threads(1, 1)
    assert only.reduce_min(vector(4)).tolist() == [4]
    assert only.reduce_min_of_stages(vector(4)).tolist() == [4]
    assert isinstance(only._group, ThreadRanks)
    only.close()
