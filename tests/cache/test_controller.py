"""What is submitted when: one copy a direction and tick, back-pressure, marks of the forward, quarantine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    Clock,
    LateCopies,
    assert_nothing_held,
    assert_served,
    compute,
    make_cache,
    serve,
    toks,
)
from unified_cache import CapacityError, CopyError, Request, UnifiedCache


def late(pages: int = 16, **settings: Any) -> tuple[UnifiedCache, LateCopies]:
    cache = make_cache(pages, **({"copies": LateCopies.between, "load_back_threshold": 0} | settings))
    assert isinstance(cache._copies, LateCopies)
    return cache, cache._copies


def put(cache: UnifiedCache, start: int, pages: int = 2) -> None:
    """Compute a prefix, without a tick."""
    request = cache.begin(toks(pages * PAGE, start))
    request.extend()
    compute(request)
    request.finish()


def on_host(cache: UnifiedCache, starts: range, pages: int = 2) -> None:
    """Prefixes on host only, and an empty device."""
    for start in starts:
        put(cache, start, pages)
        assert cache.flush(30)
        cache.evict(16)
        assert cache.flush(30)


def loading(cache: UnifiedCache, start: int, pages: int = 2) -> Request:
    request = cache.begin(toks(pages * PAGE + 1, start))
    assert request.load_back() == pages * PAGE
    return request


# One submission


def test_write_back_evicts_a_thousand_leaves_with_one_submission() -> None:
    cache, copies = late(1100, write_policy="write_back")
    for leaf in range(1000):
        put(cache, 1000 * leaf, 1)
    assert cache.flush(30)
    assert copies.submitted == []
    assert cache.evict(1000) == 0  # their pages come with the ack
    cache.tick()
    assert [(handle.direction, len(handle.device_pages)) for handle in copies.submitted] == [("backup", 1000)]
    assert cache.stats()["backup_copies"] == 1
    copies.run_all()
    cache.tick()
    assert cache.usage()["device_free_pages"] == 1100
    assert cache.usage()["host_tree_pages"] == 1000
    assert cache.stats()["dropped_tokens"] == 0
    assert_nothing_held(cache)


def test_an_alloc_that_needs_victims_is_one_submission_too() -> None:
    cache, copies = late(32, write_policy="write_back")
    for leaf in range(32):
        put(cache, 1000 * leaf, 1)
    assert len(cache.alloc(20)) == 20
    assert len(copies.submitted) == 1


def test_loads_of_a_tick_are_one_submission() -> None:
    cache, copies = late()
    on_host(cache, range(0, 300, 100))
    before = len(copies.submitted)
    requests = [loading(cache, start) for start in range(0, 300, 100)]
    assert len(copies.submitted) == before
    cache.tick()
    assert [len(handle.device_pages) for handle in copies.submitted[before:]] == [6]
    for request in requests:
        request.extend()
        request.wait()
        assert_served(request)
        request.abort()
    assert_nothing_held(cache)


def test_loads_go_by_priority() -> None:
    cache, copies = late(copy_pages=2)
    on_host(cache, range(0, 300, 100))
    requests = []
    for start, priority in ((0, 0), (100, 2), (200, 1)):
        request = cache.begin(toks(2 * PAGE + 1, start), priority=priority)
        request.load_back()
        requests.append(request)
    cache.tick()
    cache.tick()
    cache.tick()
    loads = [handle for handle in copies.submitted if handle.direction == "load"]
    order = [
        request for handle in loads for request in requests if request.pages[0] == handle.device_pages[0]
    ]
    assert order == [requests[1], requests[2], requests[0]]


def test_a_tick_with_both_directions_submits_both() -> None:
    cache, copies = late()
    on_host(cache, range(0, 100, 100))
    request = loading(cache, 0)
    put(cache, 500)
    before = len(copies.submitted)
    cache.tick()
    assert sorted(handle.direction for handle in copies.submitted[before:]) == ["backup", "load"]
    request.abort()
    assert_nothing_held(cache)


# Back-pressure


def test_the_fourth_load_waits_for_a_layer_set() -> None:
    cache, copies = late()
    on_host(cache, range(0, 500, 100))
    requests = []
    for start in range(0, 500, 100):
        requests.append(loading(cache, start))
        cache.tick()
    assert len(copies.queues["load"]) == 3
    assert copies.run("load")
    cache.tick()
    # What waited meanwhile goes as one.
    assert [len(handle.device_pages) for handle in copies.queues["load"]] == [2, 2, 4]
    for request in requests:
        request.extend()
        request.wait()
        assert_served(request)
        request.abort()
    assert_nothing_held(cache)


def test_waiting_for_a_load_that_has_no_set_yet() -> None:
    cache, _ = late()
    on_host(cache, range(0, 400, 100))
    requests = [loading(cache, 0)]
    for start in range(100, 400, 100):
        cache.tick()
        requests.append(loading(cache, start))
    cache.tick()
    assert not requests[3].loaded
    requests[3].extend()
    requests[3].wait()
    assert_served(requests[3])
    assert all(request.loaded for request in requests)


def test_backups_wait_while_two_are_under_way() -> None:
    cache, copies = late(64)
    for start in range(0, 500, 100):
        put(cache, start)
        cache.tick()
    assert [len(handle.device_pages) for handle in copies.queues["backup"]] == [2, 2]
    assert copies.run("backup")
    cache.tick()
    assert [len(handle.device_pages) for handle in copies.queues["backup"]] == [2, 6]
    assert_nothing_held(cache)


def test_backups_lock_half_of_the_device_at_most() -> None:
    cache, copies = late(16)
    copies.frozen = True
    for start in range(0, 800, 100):
        put(cache, start)
        cache.tick()
    # Eight pages are on their way to host; the others can go, so an engine can go on.
    assert cache.tree.protected_tokens == 8 * PAGE
    assert len(cache.alloc(8)) == 8
    with pytest.raises(CapacityError):
        cache.alloc(1)


def test_a_limit_of_pages_splits_a_submission() -> None:
    cache, copies = late(copy_pages=3)
    put(cache, 0, 8)
    cache.tick()
    cache.tick()
    copies.run_all()
    cache.tick()
    cache.tick()
    assert [len(handle.device_pages) for handle in copies.submitted] == [3, 3, 2]
    # Nothing is valid before the last part is there.
    assert cache.usage()["host_tree_pages"] == 8
    assert cache.tree.host_tokens == 0
    copies.run_all()
    cache.tick()
    assert cache.tree.host_tokens == 8 * PAGE
    cache.evict(8)
    assert serve(cache, toks(8 * PAGE + 1)) == (0, 8 * PAGE, 0)


# The forward


class Forward:
    """A stream of which a test says how far it is."""

    def __init__(self) -> None:
        self.launched = self.ended = 0

    def __call__(self) -> Moment:
        return Moment(self, self.launched)


class Moment:
    def __init__(self, forward: Forward, at: int) -> None:
        self.forward, self.at = forward, at

    @property
    def done(self) -> bool:
        return self.forward.ended >= self.at

    def wait(self) -> None:
        raise AssertionError


def test_a_backup_waits_for_the_forward_that_wrote() -> None:
    cache, copies = late()
    copies.forward = forward = Forward()
    put(cache, 0)
    forward.launched = 1
    cache.tick()
    assert not copies.run("backup")
    forward.ended = 1
    assert copies.run("backup")


def test_a_load_waits_for_the_forward_that_may_read_its_pages_and_for_no_later_one() -> None:
    cache, copies = late(8)
    copies.forward = forward = Forward()
    on_host(cache, range(0, 100, 100), 4)
    forward.launched = 1  # it reads the pages of this one
    reader = cache.begin(toks(16, 300))
    reader.extend()
    compute(reader)
    reader.abort()
    cache.tick()
    forward.launched = 2  # and this one was launched after they were freed
    request = loading(cache, 0, 4)
    cache.tick()
    (load,) = copies.queues["load"]
    assert not copies.run("load")
    forward.ended = 1
    assert copies.run("load")
    assert load.done
    request.abort()


def test_a_load_into_pages_freed_in_the_same_tick() -> None:
    cache, copies = late(8)
    copies.forward = forward = Forward()
    on_host(cache, range(0, 100, 100), 4)
    reader = cache.begin(toks(16, 300))
    reader.extend()
    forward.launched = 5
    reader.abort()
    request = loading(cache, 0, 4)
    cache.tick()
    assert not copies.run("load")
    forward.ended = 5
    assert copies.run("load")
    request.abort()


def test_a_load_after_a_reset_waits_for_a_forward_of_before() -> None:
    cache, copies = late(8)
    copies.forward = forward = Forward()
    cache.begin(toks(32)).extend()
    forward.launched = 1  # it works on all pages of the device
    cache.reset(force=True)
    assert cache._host_pages is not None
    # From storage, say.
    cache.tree.insert_host(cache.tree.root, toks(16), cache._host_pages.alloc(4))
    request = loading(cache, 0, 4)
    cache.tick()
    assert not copies.run("load")
    forward.ended = 1
    assert copies.run("load")
    request.abort()


def test_marks_do_not_pile_up() -> None:
    cache, copies = late()
    copies.forward = forward = Forward()
    for at in range(50):
        forward.launched = forward.ended = at
        put(cache, 0)
        cache.tick()
        copies.run_all()
    assert len(cache._controller._marks) <= 2


# Layers


def test_a_forward_waits_layer_by_layer() -> None:
    cache, copies = late()
    on_host(cache, range(0, 200, 100))
    first, second = (cache.begin(toks(2 * PAGE + 1, start)) for start in (0, 100))
    first.load_back()
    cache.tick()
    second.load_back()
    second.extend()
    forward = cache.begin_forward([second])  # submits what still waits
    assert len(copies.queues["load"]) == 2
    for layer in range(3):
        forward.wait_until(layer)
    assert_served(second)
    first.extend()
    cache.begin_forward([first, second]).wait_until(2)
    assert_served(first)
    assert_served(second)


def test_layers_of_a_load_that_fails() -> None:
    cache, copies = late()
    on_host(cache, range(0, 100, 100))
    request = loading(cache, 0)
    request.extend()
    copies.fail = lambda handle: True
    forward = cache.begin_forward([request])
    with pytest.raises(CopyError, match="injected"):
        forward.wait_until(0)
    with pytest.raises(CopyError, match="injected"):
        cache.begin_forward([request])
    # What the forward computed is worth nothing, whatever a second attempt brings.
    cache.tick()
    copies.fail = lambda handle: False
    cache.begin_forward([request]).wait_until(2)
    for step in (request.insert, request.finish):
        with pytest.raises(CopyError, match="failed under a forward"):
            step()
    assert cache.match_prefix(toks(9)).device_length == 8  # not what was computed, but what was loaded
    request.abort()
    copies.fail = lambda handle: False
    assert_nothing_held(cache)


def test_a_load_that_fails_while_others_are_submitted() -> None:
    cache, copies = late(copy_pages=1)
    on_host(cache, range(0, 200, 100), 3)
    requests = [loading(cache, start, 3) for start in (0, 100)]
    for request in requests:
        request.extend()
    failing = int(requests[0].pages[2])
    copies.fail = lambda handle: failing in handle.device_pages
    # There are three sets for six submissions, so the first three have to end before the last ones go out.
    with pytest.raises(CopyError, match="injected"):
        cache.begin_forward(requests)


def test_pages_that_an_insert_brings_may_still_be_loading() -> None:
    cache, _ = late()
    on_host(cache, range(0, 100, 100))
    # One computes what another one is loading, and goes on with the pages of the tree.
    computing = cache.begin(toks(2 * PAGE + 1))
    computing.extend()
    compute(computing)
    other = loading(cache, 0)
    computing.insert()
    assert computing.pages[:2].tolist() == other.pages.tolist()
    assert not computing.loaded
    computing.wait()
    assert_served(computing)
    for request in (computing, other):
        request.abort()
    assert_nothing_held(cache)


def test_no_host_tier_no_layers() -> None:
    with make_cache(write_policy=None) as cache:
        request = cache.begin(toks(9))
        request.extend()
        cache.begin_forward([request]).wait_until(0)


# Failures


def failing(error: str) -> Callable[..., Any]:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise OSError(error)

    return fail


@pytest.mark.parametrize("direction", ["backup", "load"])
def test_a_submission_that_is_refused_is_a_copy_that_failed(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, copies = late()
    on_host(cache, range(0, 100, 100))
    with monkeypatch.context() as patch:
        patch.setattr(copies, f"submit_{direction}", failing("refused"))
        if direction == "backup":
            put(cache, 300)
        else:
            request = loading(cache, 0)
            with pytest.raises(CopyError, match="refused"):
                request.wait()
            request.abort()
        cache.tick()
        assert cache.stats()["failed_copies"] == 1
        cache.tick()
    assert_nothing_held(cache)
    assert serve(cache, toks(2 * PAGE + 1)) == (0, 2 * PAGE, 0)


def test_a_backup_that_fails_takes_those_below_with_it_but_not_their_pages() -> None:
    """Host pages of a copy that is still being written are not handed out, whoever gave them up."""
    cache, copies = late(16, hicache_ratio=0.5)
    put(cache, 0, 2)
    cache.tick()
    put(cache, 0, 4)  # hangs below the first one
    cache.tick()
    above, below = copies.queues["backup"]
    copies.fail = lambda handle: handle is above
    assert copies.run("backup")
    cache.tick()  # the copy above failed, so the one below is of no use either
    usage = cache.usage()
    assert (usage["host_tree_pages"], usage["host_request_pages"], usage["host_free_pages"]) == (0, 2, 6)
    put(cache, 500, 6)
    cache.tick()
    taken = {
        int(page) for handle in copies.queues["backup"] if handle is not below for page in handle.host_pages
    }
    assert taken
    assert not taken & set(below.host_pages.tolist())
    copies.fail = lambda handle: False
    assert_nothing_held(cache)


# Reset


@pytest.mark.parametrize("runs", [True, False])
def test_completions_of_before_a_reset_only_free_their_pages(runs: bool) -> None:
    cache, copies = late()
    on_host(cache, range(0, 100, 100))
    put(cache, 300, 3)
    request = loading(cache, 0)
    cache.tick()
    copies.fail = lambda handle: not runs
    cache.reset(force=True)
    request.abort()
    usage = cache.usage()
    assert (usage["device_quarantined_pages"], usage["host_quarantined_pages"]) == (5, 5)
    assert (usage["device_free_pages"], usage["host_free_pages"]) == (11, 27)
    free = cache.alloc(11)
    touched = [page for handle in copies.submitted[-2:] for page in handle.device_pages]
    assert not np.isin(touched, free).any()
    cache.free(free)
    copies.run_all()
    cache.tick()
    usage = cache.usage()
    assert (usage["device_free_pages"], usage["host_free_pages"]) == (16, 32)
    assert serve(cache, toks(9)) == (0, 0, 0)
    copies.fail = lambda handle: False
    assert_nothing_held(cache)


def test_room_that_is_in_quarantine_is_waited_for() -> None:
    cache, _ = late()
    put(cache, 0, 4)
    cache.tick()
    cache.reset()
    assert len(cache.alloc(16)) == 16


def test_two_resets_in_a_row() -> None:
    cache, _ = late()
    put(cache, 0, 4)
    cache.tick()
    cache.reset()
    put(cache, 100, 4)
    cache.tick()
    cache.reset()
    assert cache.usage()["device_quarantined_pages"] == 8
    assert_nothing_held(cache)


def test_copies_that_never_end_hold_up_nothing_but_their_pages() -> None:
    clock = Clock()
    cache, copies = late(clock=clock, alloc_wait=0.0)
    put(cache, 0, 4)
    cache.tick()
    copies.frozen = True
    for _ in range(3):
        cache.reset()
        cache.tick()
        assert not cache.flush(0.0)
        pages = cache.alloc(12)
        with pytest.raises(CapacityError):
            cache.alloc(1)
        cache.free(pages)
    copies.frozen = False
    assert_nothing_held(cache)
