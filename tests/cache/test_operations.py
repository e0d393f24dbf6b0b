"""Operations wait in order, merge, are split, and end once, when no copy carries a part of them any more."""

import random

import numpy as np
import pytest

from unified_cache.controller.operations import CacheOperation, OperationQueue, Part, merge


def operation(pages: int, start: int = 0, *, priority: int = 0, failures: int = 0) -> CacheOperation:
    ids = np.arange(start, start + pages, dtype=np.uint32)
    made = CacheOperation("load", ids, ids + 1000, lambda: None, lambda: True, priority=priority)
    made.failures = failures
    return made


def taken(parts: list[Part]) -> list[tuple[CacheOperation, int, int]]:
    return [(part.operation, part.start, part.stop) for part in parts]


def test_everything_that_waits_is_one_submission() -> None:
    queue = OperationQueue()
    first, second = operation(3), operation(2, 10)
    queue.push(first)
    queue.push(second)
    parts = queue.take()
    assert taken(parts) == [(first, 0, 3), (second, 0, 2)]
    assert len(queue) == 0
    device, host = merge(parts)
    assert device.tolist() == [0, 1, 2, 10, 11]
    assert host.tolist() == [1000, 1001, 1002, 1010, 1011]


def test_one_whole_operation_is_not_copied() -> None:
    only = operation(3)
    queue = OperationQueue()
    queue.push(only)
    device, host = merge(queue.take())
    assert device is only.device_pages
    assert host is only.host_pages


def test_higher_priority_first_then_as_they_came() -> None:
    queue = OperationQueue()
    made = [operation(1, at, priority=priority) for at, priority in enumerate((0, 2, 1, 2, 0))]
    for each in made:
        queue.push(each)
    assert [part.operation for part in queue.take()] == [made[at] for at in (1, 3, 2, 0, 4)]


def test_a_limit_splits() -> None:
    queue = OperationQueue()
    first, second = operation(5), operation(4, 10)
    queue.push(first)
    queue.push(second)
    submissions = []
    while parts := queue.take(3):
        submissions.append(taken(parts))
    assert submissions == [
        [(first, 0, 3)],
        [(first, 3, 5), (second, 0, 1)],
        [(second, 1, 4)],
    ]


def test_one_that_failed_twice_goes_alone() -> None:
    queue = OperationQueue()
    for each in (operation(1), operation(1, 1, failures=2), operation(1, 2, failures=1), operation(1, 3)):
        queue.push(each)
    sizes = []
    while parts := queue.take():
        sizes.append(len(parts))
    assert sizes == [1, 1, 2]


def test_a_part_that_fails_ends_what_was_not_submitted() -> None:
    queue = OperationQueue()
    split = operation(6)
    queue.push(split)
    first, second = queue.take(2) + queue.take(2)
    assert not split.arrive(first, OSError("injected"))  # the second part is still being copied
    assert split.waiting == 0
    assert queue.remove(split)
    assert not queue.remove(split)
    assert split.arrive(second, None)
    assert str(split.error) == "injected"
    split.restart()
    assert (split.error, split.waiting) == (None, 6)


@pytest.mark.parametrize("seed", range(5))
def test_every_page_is_carried_once(seed: int) -> None:
    rng = random.Random(seed)
    queue = OperationQueue()
    made = [operation(rng.randrange(1, 9), 100 * at, priority=rng.randrange(3)) for at in range(30)]
    waiting, carried, ended = list(made), [], []
    while waiting or len(queue):
        if waiting and rng.random() < 0.5:
            queue.push(waiting.pop())
        limit = rng.choice((None, 1, 4, 10))
        parts = queue.take(limit)
        assert limit is None or sum(part.stop - part.start for part in parts) <= limit
        if parts:
            device, host = merge(parts)
            assert (host == device + 1000).all()
            carried += device.tolist()
        ended += [part.operation for part in parts if part.operation.arrive(part, None)]
    assert sorted(carried) == sorted(np.concatenate([each.device_pages for each in made]).tolist())
    assert len(ended) == len(made) == len(set(ended))
