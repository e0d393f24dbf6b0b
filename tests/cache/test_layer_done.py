"""Three sets of layer events, used in turn, and never before the load that used one last has ended."""

import pytest

from unified_cache.controller.layer_done import SETS, LayerDoneCounter, LayerWait
from unified_cache.errors import BusyError, CopyError


class Events:
    """Layers that a test lets arrive; waiting for one that has not is recorded, not done."""

    def __init__(self, waits: list[tuple[int, int]], number: int) -> None:
        self.waits, self.number = waits, number
        self.begun = False
        self.done = True
        self.error: Exception | None = None

    def begin(self) -> None:
        self.begun, self.done = True, False

    def record(self, layer: int) -> None:
        self.done = layer == 1

    def fail(self, error: Exception) -> None:
        self.error, self.done = error, True

    def wait(self, layer: int) -> None:
        if self.error is not None:
            raise CopyError(str(self.error))
        self.waits.append((self.number, layer))


class Sets:
    def __init__(self) -> None:
        self.made: list[Events] = []
        self.waits: list[tuple[int, int]] = []
        self.counter = LayerDoneCounter(self.make)

    def make(self) -> Events:
        self.made.append(Events(self.waits, len(self.made)))
        return self.made[-1]


def test_sets_are_used_in_turn_and_only_when_done() -> None:
    sets = Sets()
    counter = sets.counter
    assert [counter.update_producer() for _ in range(SETS)] == [0, 1, 2]
    assert all(events.begun for events in sets.made)
    assert counter.producer == 2
    for _ in range(2):
        assert not counter.ready
        with pytest.raises(BusyError, match="layer set 0 of 3 is still being loaded"):
            counter.update_producer()
    # Another set's end does not help: they are used in turn.
    sets.made[1].record(1)
    assert not counter.ready
    sets.made[0].record(0)
    assert not counter.ready
    sets.made[0].record(1)
    assert counter.update_producer() == 0
    assert counter.update_producer() == 1
    assert not counter.ready


def test_a_failed_load_gives_its_set_back() -> None:
    sets = Sets()
    for _ in range(SETS):
        sets.counter.update_producer()
    sets.made[0].fail(OSError("injected"))
    assert sets.counter.update_producer() == 0


def test_a_forward_waits_for_what_it_reads_and_no_more() -> None:
    sets = Sets()
    counter = sets.counter
    for _ in range(SETS):
        counter.update_producer()
    forward = counter.consumer([0, 2])
    forward.wait_until(1)
    assert sets.waits == [(0, 1), (2, 1)]
    for nothing in (counter.consumer([]), LayerWait()):
        nothing.wait_until(1)
    assert len(sets.waits) == 2
    with pytest.raises(BusyError, match="set 1 was not taken"):
        LayerDoneCounter(sets.make).consumer([1])


def test_a_forward_never_waits_for_a_later_load_of_its_set() -> None:
    sets = Sets()
    counter = sets.counter
    counter.update_producer()
    forward = counter.consumer([0])
    for events in range(SETS):
        sets.made[-1].record(1)
        counter.update_producer()
        assert len(sets.made) == events + 2
    forward.wait_until(0)
    assert sets.waits == [(0, 0)]


def test_failures_reach_the_forward() -> None:
    sets = Sets()
    sets.counter.update_producer()
    forward = sets.counter.consumer([0])
    sets.made[0].fail(OSError("injected"))
    with pytest.raises(CopyError, match="injected"):
        forward.wait_until(0)
    sets.counter.reset()
    assert sets.counter.ready
