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


def test_the_check_sees_damage() -> None:
    pages = PageAllocator(4, "device")
    pages.alloc(2)
    pages._stack[0] = pages._stack[1]
    with pytest.raises(InvariantError, match="twice"):
        pages.check()
