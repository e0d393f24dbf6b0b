"""Pages are handed out once, and come back once."""

import random
from typing import Any

import numpy as np
import pytest

from unified_cache import ArgumentError, CapacityError, InvariantError
from unified_cache.pools.allocator import PageAllocator


def test_free_and_used_are_all() -> None:
    pages = PageAllocator(8, "device")
    first, second = pages.alloc(3), pages.alloc(5)
    assert sorted([*first, *second]) == list(range(8))
    assert first.dtype == np.uint32
    assert (pages.free_pages, pages.used_pages) == (0, 8)
    with pytest.raises(CapacityError, match="1 device pages asked for, 0 of 8 are free"):
        pages.alloc(1)
    pages.free(second)
    assert (pages.free_pages, pages.used_pages) == (5, 3)
    assert len(pages.alloc(0)) == 0
    pages.check()


def test_arrays_own_their_memory() -> None:
    pages = PageAllocator(8, "device")
    first = pages.alloc(4)
    kept = first.copy()
    first[:] = 7
    pages.free(kept)
    kept[:] = 0
    assert sorted(pages.alloc(8)) == list(range(8))
    pages.check()


@pytest.mark.parametrize(
    "bad, said",
    [
        ([0, 0], "twice"),
        ([0, 7], "7 is free already"),
        ([0, 8], r"8 is not in 0\.\.7"),
        ([-1, 0], r"-1 is not in"),
        ([0.0], "integers"),
        ([[0, 1]], "one-dimensional"),
        ([True], "integers"),
    ],
)
def test_what_does_not_belong_changes_nothing(bad: list[object], said: str) -> None:
    pages = PageAllocator(8, "host")
    assert sorted(pages.alloc(4)) == [0, 1, 2, 3]
    with pytest.raises(ArgumentError, match=said):
        pages.free(np.array(bad))
    assert (pages.free_pages, pages.used_pages) == (4, 4)
    pages.check()
    pages.free([0, 1, 2, 3])
    with pytest.raises(ArgumentError, match="0 is free already"):
        pages.free(np.array([0], np.uint32))
    with pytest.raises(ArgumentError, match=r">= 0, not -1"):
        pages.alloc(-1)


@pytest.mark.parametrize("count", [2.0, "2", None])
def test_counts_are_integers(count: Any) -> None:
    pages = PageAllocator(8, "device")
    with pytest.raises(ArgumentError, match="count must be an integer >= 0"):
        pages.alloc(count)
    assert len(pages.alloc(np.uint32(2))) == 2
    assert type(pages.free_pages) is int
    pages.check()


@pytest.mark.parametrize(
    "bad, said",
    [
        ([3], "page 3 was not handed out"),
        ([0, 8], r"page 8 is not in 0\.\.7"),
        ([-1], "page -1"),
        ([0, 1, 0], "page 0 is listed twice"),
        ([0.0], "integers"),
        ([[0], [0, 1]], "integers"),
    ],
)
def test_pages_that_were_not_handed_out(bad: Any, said: str) -> None:
    pages = PageAllocator(8, "device")
    pages.require_used(pages.alloc(3))
    pages.require_used([7, 0, 1], 1)
    pages.require_used([])
    with pytest.raises(ArgumentError, match=said):
        pages.require_used(bad)


def test_random_use() -> None:
    rng = random.Random(1)
    pages = PageAllocator(50, "device")
    held: list[int] = []
    for _ in range(2000):
        if rng.random() < 0.5:
            count = rng.randrange(8)
            if count <= pages.free_pages:
                held += pages.alloc(count).tolist()
        else:
            rng.shuffle(held)
            cut = rng.randrange(len(held) + 1)
            pages.free(held[cut:])
            del held[cut:]
        assert len(set(held)) == len(held) == pages.used_pages
        pages.check()
    pages.reset()
    assert pages.free_pages == 50
    pages.check()


@pytest.mark.parametrize("far", [np.uint64(2**63 + 1), np.uint64(2**64 - 1), np.int64(-(2**63))])
def test_pages_that_no_index_can_hold(far: Any) -> None:
    pages = PageAllocator(8, "device")
    pages.alloc(8)
    with pytest.raises(ArgumentError, match=rf"page {far} is not in 0\.\.7"):
        pages.free(np.array([far]))
    assert pages.free_pages == 0


def test_reset_keeps_what_a_copy_still_uses() -> None:
    pages = PageAllocator(8, "device")
    held = pages.alloc(6)
    pages.reset(keep=held[[1, 4]])
    assert (pages.free_pages, pages.used_pages) == (6, 2)
    pages.check()
    assert pages.alloc(6).tolist() == [page for page in range(8) if page not in held[[1, 4]]]
    pages.free(held[[1, 4]])
    assert sorted(pages.alloc(2)) == sorted(held[[1, 4]])
    pages.check()


@pytest.mark.parametrize(
    "keep, said",
    [
        ([0, 5], "page 5 can not be kept: it is free"),
        ([8], r"page 8 is not in 0\.\.7"),
        ([1, 0, 1], "page 1 is to be kept twice"),
        ([0.5], "integers"),
    ],
)
def test_a_reset_that_is_refused_changes_nothing(keep: Any, said: str) -> None:
    pages = PageAllocator(8, "device")
    pages.free(pages.alloc(5)[3:], mark=3)
    with pytest.raises(ArgumentError, match=said):
        pages.reset(keep, mark=9)
    with pytest.raises(ArgumentError, match="mark must be"):
        pages.reset([0], mark=-1)
    assert (pages.free_pages, pages.used_pages) == (5, 3)
    assert pages.newest_mark(range(8)) == 3
    pages.check()


def test_marks() -> None:
    pages = PageAllocator(8, "device")
    first, second = pages.alloc(4), pages.alloc(4)
    assert pages.newest_mark(first) == 0
    pages.free(first, mark=5)
    pages.free(second[:2], mark=2**64 - 1)
    pages.free(second[2:])
    assert pages.newest_mark(first) == 5
    assert pages.newest_mark([*second[2:], first[0]]) == 5
    assert pages.newest_mark(second[2:]) == pages.newest_mark([]) == 0
    assert pages.newest_mark(pages.alloc(8)) == 2**64 - 1
    pages.free(second, mark=0)
    assert pages.newest_mark(second) == 0, "a mark is that of the last time"
    with pytest.raises(ArgumentError, match=r"page 8 is not in 0\.\.7"):
        pages.newest_mark([8])


def test_a_reset_marks_what_it_takes_back() -> None:
    pages = PageAllocator(6, "device")
    held = pages.alloc(4)
    pages.free(held[:1], mark=3)
    pages.reset(keep=held[1:2], mark=7)
    assert [pages.newest_mark([page]) for page in [*held, 4, 5]] == [3, 0, 7, 7, 0, 0]
    pages.reset()
    assert pages.newest_mark(held[1:2]) == 0, "nobody reads it now"
    assert pages.newest_mark(held) == 7, "a page that was free keeps its own"


@pytest.mark.parametrize("mark", [-1, 2**64, 1.0, None, "1"])
def test_marks_are_numbers(mark: Any) -> None:
    pages = PageAllocator(4, "device")
    held = pages.alloc(2)
    with pytest.raises(ArgumentError, match=r"mark must be an integer in 0\.\."):
        pages.free(held, mark=mark)
    assert pages.used_pages == 2


def test_random_use_against_a_model() -> None:
    rng = random.Random(2)
    pages = PageAllocator(40, "device")
    held: list[int] = []
    marks = dict.fromkeys(range(40), 0)
    for moment in range(1, 3000):
        choice = rng.random()
        if choice < 0.5:
            held += pages.alloc(min(rng.randrange(8), pages.free_pages)).tolist()
        else:
            rng.shuffle(held)
            cut = rng.randrange(len(held) + 1)
            mark = rng.choice((0, moment))
            if choice < 0.95:
                pages.free(held[cut:], mark)
            else:
                pages.reset(held[:cut], mark)
            marks.update(dict.fromkeys(held[cut:], mark))
            del held[cut:]
        assert pages.used_pages == len(held)
        pages.require_used(held)
        asked = rng.sample(range(40), rng.randrange(5))
        assert pages.newest_mark(asked) == max((marks[page] for page in asked), default=0)
        pages.check()


def test_the_check_sees_damage() -> None:
    pages = PageAllocator(4, "device")
    pages.alloc(2)
    pages._stack[0] = pages._stack[1]
    with pytest.raises(InvariantError, match="twice"):
        pages.check()
