"""Ranks in one process: on threads, and as steps of one thread."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from unified_cache.errors import ArgumentError, ClosedError, RankLostError, RanksDifferError
from unified_cache.ranks.agreement import Agreement, OneRank, Reduction
from unified_cache.ranks.threads import ThreadRanks

LONG = 60.0  # far more than anything here takes


def vector(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def random_vectors(rng: np.random.Generator, ranks: int, length: int) -> np.ndarray:
    return rng.integers(-(2**62), 2**62, (ranks, length))


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_steps_gives_the_smallest_numbers(seed: int) -> None:
    order, rng = random.Random(seed), np.random.default_rng(seed)
    size, rounds = order.randint(1, 5), 60
    lengths = [order.randint(0, 6) for _ in range(rounds)]
    said = [random_vectors(rng, size, length) for length in lengths]
    group = ThreadRanks.group(size, time_limit=0)
    under_way: list[list[tuple[int, Reduction]]] = [[] for _ in range(size)]
    begun = [0] * size
    taken = 0
    while taken < size * rounds:
        rank = order.randrange(size)
        ready = [
            entry for entry in under_way[rank] if all(number > entry[0] for number in begun)
        ]  # all ranks have begun it
        assert [reduction.done for number, reduction in under_way[rank]] == [
            entry in ready for entry in under_way[rank]
        ]
        if ready and order.random() < 0.5:
            entry = order.choice(ready)
            under_way[rank].remove(entry)
            number, reduction = entry
            result = reduction.wait()
            assert np.array_equal(result, said[number].min(axis=0))
            result[:] = 0  # the caller's own: nobody else's result changes
            assert reduction.wait() is result
            taken += 1
        elif begun[rank] < rounds:
            mine = said[begun[rank]][rank].copy()
            under_way[rank].append((begun[rank], group[rank].begin_reduce_min(mine)))
            mine[:] = -(2**63)  # not kept: nobody sees this
            begun[rank] += 1
    assert [ranks.reductions for ranks in group] == [rounds] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads_agree(size: int) -> None:
    said = random_vectors(np.random.default_rng(size), 500 * size, 7).reshape(500, size, 7)

    def work(ranks: ThreadRanks) -> list[np.ndarray]:
        results = []
        for number in range(0, 500, 2):
            first = ranks.begin_reduce_min(said[number][ranks.rank])
            results.append(ranks.reduce_min(said[number + 1][ranks.rank]))
            results.insert(-1, first.wait())
        return results

    for results in ThreadRanks.run(ThreadRanks.group(size, time_limit=LONG), work):
        assert np.array_equal(results, said.min(axis=1))


def test_a_wait_before_all_have_begun_is_an_error_where_nothing_waits() -> None:
    group = ThreadRanks.group(4, time_limit=0)
    reductions = [group[rank].begin_reduce_min(vector(rank)) for rank in (0, 2)]
    with pytest.raises(RankLostError, match="ranks 1, 3 of 4 did not come to reduction 0 within 0 s"):
        reductions[0].wait()
    for call in (reductions[1].wait, lambda: group[1].begin_reduce_min(vector(1))):
        with pytest.raises(RankLostError, match="ranks 1, 3 of 4 did not come to reduction 0"):
            call()


def test_what_was_agreed_before_a_rank_was_lost_can_still_be_taken() -> None:
    group = ThreadRanks.group(2, time_limit=0)
    agreed = [ranks.begin_reduce_min(vector(ranks.rank + 5)) for ranks in group]
    with pytest.raises(RankLostError, match="rank 1 of 2 did not come to reduction 1"):
        group[0].reduce_min(vector(1))
    assert [reduction.wait().tolist() for reduction in agreed] == [[5], [5]]


def test_a_rank_that_does_not_come_is_named_on_all_that_wait() -> None:
    group = ThreadRanks.group(3, time_limit=0.05)
    errors: list[str] = []

    def wait(ranks: ThreadRanks) -> None:
        with pytest.raises(RankLostError) as caught:
            ranks.reduce_min(vector(1))
        errors.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(ranks,)) for ranks in (group[0], group[2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert errors == ["rank 1 of 3 did not come to reduction 0 within 0.05 s"] * 2


@pytest.mark.parametrize("way", ["close", "fail"])
def test_a_rank_that_ends_is_an_error_on_those_that_wait_at_once(way: str) -> None:
    group = ThreadRanks.group(2, time_limit=3600)
    caught: list[str] = []
    begun = threading.Event()

    def wait() -> None:
        reduction = group[0].begin_reduce_min(vector(1))
        begun.set()
        with pytest.raises(RankLostError) as error:
            reduction.wait()
        caught.append(str(error.value))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert begun.wait(LONG)
    if way == "close":
        group[1].close()
    else:
        group[1].fail("no more memory")
    thread.join(LONG)
    said = {"close": "rank 1 of 2 closed before reduction 0", "fail": "rank 1 of 2 failed: no more memory"}
    assert caught == [said[way]]


def test_a_rank_that_has_ended_is_an_error_at_the_next_begin() -> None:
    group = ThreadRanks.group(3, time_limit=LONG)
    reductions = [ranks.begin_reduce_min(vector(ranks.rank)) for ranks in group]
    group[1].close()
    group[1].close()
    assert [reduction.wait().tolist() for reduction in reductions] == [[0]] * 3
    with pytest.raises(RankLostError, match="rank 1 of 3 closed before reduction 1"):
        group[0].begin_reduce_min(vector(1))
    with pytest.raises(ClosedError, match="rank 1 of 3 was closed before this call"):
        group[1].begin_reduce_min(vector(1))
    assert [ranks.reductions for ranks in group] == [1, 1, 1]


def test_a_rank_whose_work_raises_ends_the_others() -> None:
    def work(ranks: ThreadRanks) -> None:
        for number in range(10):
            if ranks.rank == 2 and number == 3:
                raise LookupError("no such page")
            ranks.reduce_min(vector(number))

    with pytest.raises(LookupError, match="no such page"):
        ThreadRanks.run(ThreadRanks.group(4, time_limit=3600), work)


def test_a_rank_that_makes_one_reduction_fewer_is_found() -> None:
    def work(ranks: ThreadRanks) -> None:
        for _ in range(9 if ranks.rank == 0 else 10):
            ranks.reduce_min(vector(1))

    with pytest.raises(RankLostError, match="rank 0 of 3 closed before reduction 9"):
        ThreadRanks.run(ThreadRanks.group(3, time_limit=3600), work)


def test_vectors_of_different_lengths() -> None:
    group = ThreadRanks.group(2, time_limit=0)
    group[0].begin_reduce_min(vector(1, 2))
    with pytest.raises(RanksDifferError, match="reduction 0: rank 1 has 3 numbers, others 2"):
        group[1].begin_reduce_min(vector(1, 2, 3))
    with pytest.raises(RanksDifferError, match="reduction 0: rank 1 has 3 numbers, others 2"):
        group[0].begin_reduce_min(vector(1, 2))


@pytest.mark.parametrize("agreement", [OneRank(), ThreadRanks.group(1)[0]])
@pytest.mark.parametrize(
    "wrong, message",
    [
        ([1, 2], "not list"),
        (np.zeros(2), r"not float64 of shape \(2,\)"),
        (np.zeros((2, 2), np.int64), r"not int64 of shape \(2, 2\)"),
    ],
)
def test_what_can_not_be_reduced(agreement: Agreement, wrong: object, message: str) -> None:
    before = agreement.reductions
    with pytest.raises(ArgumentError, match=f"vector must be a one-dimensional array of int64, {message}"):
        agreement.begin_reduce_min(wrong)  # type: ignore[arg-type]
    assert agreement.reductions == before


def test_groups_that_can_not_be() -> None:
    with pytest.raises(ArgumentError, match="size must be an integer >= 1, not 0"):
        ThreadRanks.group(0)
    with pytest.raises(ArgumentError, match="time_limit must be a number of seconds >= 0, not -1"):
        ThreadRanks.group(2, time_limit=-1)


def test_one_rank_agrees_with_itself() -> None:
    alone, mine = OneRank(), vector(3, 4)
    reduction = alone.begin_reduce_min(mine)
    mine[:] = 0
    assert reduction.done
    assert reduction.wait().tolist() == [3, 4]
    assert alone.reduce_min_of_stages(vector(1)).tolist() == [1]
    assert (alone.decides, alone.rank, alone.size, alone.reductions) == (True, 0, 1, 2)
    alone.close()
