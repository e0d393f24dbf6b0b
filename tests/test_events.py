"""`Mirror`: replays events, and refuses a stream that can not be true."""

import pytest

from unified_cache import ArgumentError, InvariantError, PrefixTree
from unified_cache.events import Event, Mirror


def events_of_a_chain() -> list[Event]:
    tree = PrefixTree(2, events=True)
    tree.insert([1, 2], [0])
    tree.insert([1, 2, 3, 4], [0, 1], prev_prefix_len=2)
    return tree.take_events()


def test_a_mirror_follows_a_tree() -> None:
    tree, mirror = PrefixTree(2, write_policy=None, events=True), Mirror()
    tree.insert([1, 2, 3, 4], [0, 1])
    mirror.apply(tree.take_events())
    assert len(mirror.hashes("device")) == len(mirror) == 2
    tree.evict(1)
    mirror.apply(tree.take_events())
    assert len(mirror.hashes("device")) == 1
    tree.reset()
    mirror.apply(tree.take_events())
    assert len(mirror) == 0


def test_what_is_handed_out_does_not_follow() -> None:
    mirror = Mirror()
    before = mirror.hashes("device")
    mirror.apply(events_of_a_chain())
    assert before == frozenset()
    assert "device: 2 pages" in repr(mirror)


def test_a_page_stored_twice_is_refused() -> None:
    first, _ = events_of_a_chain()
    mirror = Mirror()
    mirror.apply([first])
    with pytest.raises(InvariantError, match="twice"):
        mirror.apply([first])
    assert len(mirror) == 1


def test_a_page_before_its_parent_is_refused() -> None:
    _, second = events_of_a_chain()
    with pytest.raises(InvariantError, match="parent"):
        Mirror().apply([second])


def test_a_page_removed_that_is_not_there_is_refused() -> None:
    tree = PrefixTree(2, write_policy=None, events=True)
    tree.insert([1, 2], [0])
    tree.evict(1)
    _, removed = tree.take_events()
    with pytest.raises(InvariantError, match="not there"):
        Mirror().apply([removed])


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(ArgumentError, match="device, host"):
        Mirror().hashes("disk")
