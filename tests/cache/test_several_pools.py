"""Several pools in one cache: a page is moved in all of them, or it has not been moved."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.support import (
    PAGE,
    LateCopies,
    LateGroup,
    Pool,
    assert_nothing_held,
    assert_served,
    compute,
    contents,
    make_cache,
    make_pool,
    planes_of,
    read_pages,
    same,
    serve,
    toks,
    write_pages,
)
from unified_cache import ArgumentError, CacheConfig, ClosedError, CopyError, UnifiedCache
from unified_cache.copies.choose import copy_engine_between, make_copy_engine
from unified_cache.copies.cpu import CpuCopyEngine
from unified_cache.copies.engine import CopyEngine, CopyHandle, Mark
from unified_cache.copies.joint import JointCopyEngine
from unified_cache.pools.device import DevicePool, MhaDevicePool, MlaDevicePool
from unified_cache.pools.host import HostPool


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.uint32)


def make_pools(pages: int = 16) -> list[Pool]:
    """Of a model with latents, of the heads of another, and of one that has fewer layers."""
    return [
        MlaDevicePool(pages, PAGE, 3, 6, torch.bfloat16),
        make_pool(pages, layers=2),
        MhaDevicePool(pages, PAGE, 1, 1, 4),
    ]


def late_engine(pages: int = 8) -> tuple[Any, list[LateCopies], list[Pool]]:
    """A joint engine of three that run when the test says so."""
    pools = make_pools(pages)
    hosts = [HostPool(pool, pages) for pool in pools]
    joint = copy_engine_between(pools, hosts, LateCopies.between)
    assert isinstance(joint, JointCopyEngine)
    return joint, list(joint.engines), pools  # type: ignore[arg-type]


# Engines


@pytest.mark.parametrize("seed", range(6))
def test_a_page_is_moved_in_every_pool(seed: int) -> None:
    rng = random.Random(seed)
    pools = rng.sample(make_pools(), rng.choice((2, 3)))
    layouts = [rng.choice(("layer_first", "page_first", "page_first_direct", "page_head")) for _ in pools]
    hosts = [HostPool(pool, 24, layout=layout) for pool, layout in zip(pools, layouts, strict=True)]
    engine = copy_engine_between(pools, hosts, lambda a, b: make_copy_engine(a, b, blocks=2, threads=1))
    planes = [pool.planes for pool in pools]
    try:
        on_host: dict[int, bytes] = {}
        for step in range(12):
            device, host = rng.sample(range(16), 5), rng.sample(range(24), 5)
            for page in device:
                write_pages(planes, page, contents(planes, bytes([step, page]) * 16))
            engine.submit_backup(ids(*device), ids(*host)).wait()
            on_host |= {to: bytes([step, page]) * 16 for page, to in zip(device, host, strict=True)}
            back = rng.sample(sorted(on_host), 5)
            target = rng.sample(range(16), 5)
            events = engine.new_layer_events()
            events.begin()
            handle = engine.submit_load(ids(*target), ids(*back), layers=events)
            for layer in range(3):
                events.wait(layer)
            handle.wait()
            assert handle.done
            assert events.done
            for page, source in zip(target, back, strict=True):
                assert same(read_pages(planes, page), contents(planes, on_host[source]))
        taken: list[CopyHandle] = []
        while engine.running:
            taken += engine.take_done(wait=True)
        assert len(taken) == 24
        assert all(handle.begun and handle.error is None for handle in taken)
    finally:
        engine.close()


def test_it_has_ended_when_it_has_in_every_pool() -> None:
    joint, engines, _ = late_engine()
    first, second = (joint.submit_backup(ids(at), ids(at)) for at in (0, 1))
    load = joint.submit_load(ids(5), ids(6))
    assert joint.running == 3
    for engine in engines[1:]:
        engine.run_all()
    assert [handle.done for handle in (first, second, load)] == [False] * 3
    assert joint.take_done() == []
    engines[0].run("backup")
    assert first.done
    assert not second.done
    engines[0].run_all()
    assert joint.take_done() == [first, second, load]
    assert joint.running == 0
    assert joint.take_done(wait=True) == []


@pytest.mark.parametrize("failing", range(3))
def test_it_has_failed_when_it_has_in_one_pool_and_not_before_it_has_ended_in_all(failing: int) -> None:
    joint, engines, _ = late_engine()
    engines[failing].fail = lambda handle: True
    events = joint.new_layer_events()
    events.begin()
    handle = joint.submit_load(ids(1, 2), ids(3, 4), layers=events)
    engines[failing].run("load")
    # The pages are still being written elsewhere.
    assert not handle.done
    assert not events.done
    assert joint.take_done() == []
    with pytest.raises(CopyError, match="injected"):
        events.wait(2)
    for engine in engines:
        engine.run_all()
    assert joint.take_done() == [handle]
    assert isinstance(handle.error, OSError)
    assert events.done
    with pytest.raises(CopyError, match="the load copy of 2 pages failed: injected"):
        handle.wait()


def test_a_layer_is_there_when_it_is_in_every_pool_that_has_it() -> None:
    joint, _, _ = late_engine()
    events = joint.new_layer_events()
    assert events.done
    events.begin()
    assert not events.done
    each = events.each
    waited: list[tuple[int, int]] = []
    for at, part in enumerate(each):
        part.wait = lambda layer, at=at: waited.append((at, layer))
    for layer in range(3):
        events.wait(layer)
    # Of the pools of 3, 2 and 1 layers; past its last one a pool has to be there as a whole.
    assert waited == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 0), (0, 2), (1, 1), (2, 0)]
    for layer in (-1, 3):
        with pytest.raises(ArgumentError, match=f"layer is {layer}, allowed is 0 to 2"):
            events.wait(layer)
    for at, part in enumerate(each):
        assert not events.done
        for layer in range(3 - at):
            part.record(layer)
    assert events.done


class Refuses(LateCopies):
    """Takes no submission, for the reason given."""

    reason: BaseException | None = None

    def _submit(self, late: Any, after: Any, layers: Any) -> Any:
        if self.reason is not None:
            raise self.reason
        return super()._submit(late, after, layers)


def refusing(reason: BaseException, at: int) -> tuple[Any, list[Any]]:
    pools = make_pools(8)
    joint: Any = copy_engine_between(pools, [HostPool(pool, 8) for pool in pools], Refuses.between)
    joint.engines[at].reason = reason
    return joint, list(joint.engines)


def test_a_submission_that_the_first_engine_refuses_has_not_begun() -> None:
    joint, engines = refusing(ArgumentError("no"), 0)
    with pytest.raises(ArgumentError, match="no"):
        joint.submit_backup(ids(1), ids(2))
    assert joint.running == 0
    assert all(engine.running == 0 for engine in engines)


def test_a_submission_that_a_later_engine_refuses_fails_when_the_others_have_ended() -> None:
    joint, engines = refusing(ClosedError("no more"), 1)
    events = joint.new_layer_events()
    events.begin()
    handle = joint.submit_load(ids(1), ids(2), layers=events)
    assert not handle.done
    assert joint.take_done() == []
    assert engines[2].running == 0
    with pytest.raises(CopyError, match="no more"):
        events.wait(0)  # lets the first one run
    assert engines[0].running == 1
    assert joint.take_done() == [handle]
    assert events.done
    with pytest.raises(ClosedError, match="no more"):
        handle.wait()


def test_an_interrupted_submission_leaves_no_copy_behind() -> None:
    joint, engines = refusing(KeyboardInterrupt(), 2)
    with pytest.raises(KeyboardInterrupt):
        joint.submit_backup(ids(1), ids(2))
    assert joint.running == 0
    # Those that took it have ended: the pages are free.
    assert [len(engine.queues["backup"]) for engine in engines] == [0, 0, 0]
    assert joint.take_done() == []


def test_marks_are_those_of_every_engine() -> None:
    class At:
        def __init__(self) -> None:
            self.done, self.waited = False, 0

        def wait(self) -> None:
            self.waited += 1

    joint, engines, _ = late_engine()
    assert joint.record_forward() is None
    mark = At()
    engines[1].forward = lambda: mark
    joined = joint.record_forward()
    assert joined is not None
    assert not joined.done
    handle = joint.submit_backup(ids(1), ids(2), after=joined)
    for engine in engines:
        engine.run_all()
    assert not handle.done
    mark.done = True
    assert joined.done
    joined.wait()
    assert mark.waited == 1
    engines[1].run_all()
    assert handle.done
    with pytest.raises(ArgumentError, match="a mark of this engine"):
        joint.submit_backup(ids(1), ids(2), after=mark)
    with pytest.raises(ArgumentError, match="events of this engine"):
        joint.submit_load(ids(1), ids(2), layers=engines[0].new_layer_events())


class Gate:
    """A forward that ends when the test says so."""

    def __init__(self) -> None:
        self.open = threading.Event()

    @property
    def done(self) -> bool:
        return self.open.is_set()

    def wait(self) -> None:
        assert self.open.wait(60)


def gated(gate: Gate) -> tuple[CopyEngine, list[Pool]]:
    """Real engines, the second of which waits for a forward."""
    pools, marks = make_pools(8), iter((lambda: None, lambda: gate, lambda: None))

    def make(device: DevicePool, host: HostPool) -> CopyEngine:
        forward: Any = next(marks)
        return CpuCopyEngine(device.planes, host.planes, threads=1, record_forward=forward)

    return copy_engine_between(pools, [HostPool(pool, 8) for pool in pools], make), pools


def test_waiting_for_an_end_has_a_limit() -> None:
    gate = Gate()
    engine, _ = gated(gate)
    try:
        mark: Mark | None = engine.record_forward()
        handle = engine.submit_backup(ids(1), ids(2), after=mark)
        assert engine.take_done(wait=True, timeout=0.02) == []
        assert engine.take_done(wait=True, timeout=0) == []
        gate.open.set()
        assert engine.take_done(wait=True) == [handle]
        assert engine.take_done(wait=True) == []
    finally:
        gate.open.set()
        engine.close()


def test_close_ends_what_has_not_begun() -> None:
    gate = Gate()
    engine, _ = gated(gate)
    held = engine.submit_backup(ids(1), ids(2), after=engine.record_forward())
    queued = engine.submit_backup(ids(2), ids(3))
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine.engines[1]._closed:  # type: ignore[attr-defined]
        pass
    gate.open.set()
    closer.join()
    engine.close()
    for handle in (held, queued):
        assert handle.done
        with pytest.raises(ClosedError):
            handle.wait()
    with pytest.raises(ClosedError):
        engine.submit_backup(ids(1), ids(2))


def test_engines_are_closed_whatever_one_of_them_says() -> None:
    closed: list[int] = []

    class Closes(LateCopies):
        def close(self) -> None:
            closed.append(self.device.shape.layers)
            if self.device.shape.layers == 2:
                raise OSError("will not")

    pools = make_pools(8)
    hosts = [HostPool(pool, 8) for pool in pools]
    joint = copy_engine_between(pools, hosts, Closes.between)
    with pytest.raises(OSError, match="will not"):
        joint.close()
    assert sorted(closed) == [1, 2, 3]
    # And those that there are, if the last one can not be made.
    closed.clear()

    def make(device: DevicePool, host: HostPool) -> CopyEngine:
        if device is pools[1]:
            raise ArgumentError("this one not")
        return Closes.between(device, host)

    with pytest.raises(ArgumentError, match="this one not"):
        copy_engine_between(pools, hosts, make)
    assert closed == [3]


# Caches


def test_pages_of_all_pools_are_served() -> None:
    with make_cache(make_pools(), load_back_threshold=0) as cache:
        for start in range(0, 5000, 1000):
            assert serve(cache, toks(21, start)) == (0, 0, 0)
        assert cache.flush(30)
        cache.evict(16)
        assert serve(cache, toks(21)) == (0, 20, 0)
        assert serve(cache, toks(21)) == (20, 0, 0)
        assert len(cache.host_pools) == len(cache.device_pools) == 3
        assert cache.device_pool is cache.device_pools[0]
        assert cache.host_pool is cache.host_pools[0]
        assert_nothing_held(cache)


def test_host_sizes_count_all_pools_together() -> None:
    pools = make_pools()
    page_bytes = sum(pool.page_bytes for pool in pools)
    with make_cache(pools, hicache_size=5.5 * page_bytes / 1e9) as cache:
        assert cache.usage()["host_pages"] == 5
        assert [pool.num_pages for pool in cache.host_pools] == [5, 5, 5]
    with make_cache(pools, hicache_ratio=0.5) as cache:
        assert [pool.num_pages for pool in cache.host_pools] == [8, 8, 8]
    with pytest.raises(ArgumentError, match=f"less than one page of {page_bytes} bytes"):
        make_cache(pools, hicache_size=1e-9)


@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("direction", ["backup", "load"])
def test_a_request_comes_back_though_a_copy_of_one_pool_fails(failing: int, direction: str) -> None:
    with make_cache(make_pools(), copies=LateCopies.between, load_back_threshold=0) as cache:
        engines: Any = cache._copies.engines  # type: ignore[union-attr]
        group = LateGroup(engines, random.Random(failing))
        request = cache.begin(toks(18))
        request.extend()
        planes, own = planes_of(cache), request.pages.tolist()
        for page in own:
            write_pages(planes, page, contents(planes, bytes([page]) * 32))
        before = [read_pages(planes, page) for page in own]
        left = [2]

        def fail(handle: CopyHandle) -> bool:
            left[0] -= handle.direction == direction
            return handle.direction == direction and left[0] >= 0

        engines[failing].fail = fail

        def go() -> None:
            for _ in range(6):
                cache.tick()
                group.run_all()
            cache.tick()

        request.retract()
        go()
        assert cache.usage()["device_request_pages"] == 0
        pages = cache.alloc(cache.usage()["device_free_pages"])
        for page in pages.tolist():
            write_pages(planes, page, contents(planes, b"\x77" * 32))
        cache.free(pages)
        request.resume()
        go()
        request.wait()
        assert left[0] < 0
        assert cache.stats()["failed_copies"] == 2
        for page, was in zip(request.pages.tolist(), before, strict=True):
            assert same(read_pages(planes, page), was)
        request.abort()
        go()
        assert_nothing_held(cache)


def test_a_forward_waits_layer_by_layer_for_all_pools() -> None:
    with make_cache(make_pools(), load_back_threshold=0) as cache:
        serve(cache, toks(21))
        assert cache.flush(30)
        cache.evict(16)
        request = cache.begin(toks(21))
        assert request.load_back() == 20
        request.extend()
        waits = cache.begin_forward([request])
        for layer in range(3):
            waits.wait_until(layer)
        assert_served(request)
        request.abort()
        assert_nothing_held(cache)


def test_a_cache_without_a_host_tier() -> None:
    with make_cache(make_pools(), write_policy=None) as cache:
        serve(cache, toks(21))
        assert serve(cache, toks(21)) == (20, 0, 0)
        assert cache.host_pools == ()
        assert cache.host_pool is None


def test_a_host_pool_that_can_not_be_had_leaves_none() -> None:
    made: list[HostPool] = []

    def make(device: DevicePool, host: HostPool) -> CopyEngine:
        made.append(host)
        if len(made) == 2:
            raise CopyError("no engine")
        return LateCopies.between(device, host)

    with pytest.raises(CopyError, match="no engine"):
        make_cache(make_pools(), copies=make)
    assert all(host._memory is None for host in made)


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ([], "or several, not none"),
        ([make_pool(), None], "or several, not None"),
        ([make_pool(8), make_pool(9)], "device pool 1 has num_pages=9, the first one 8"),
        ([make_pool(8), MlaDevicePool(8, 2, 1, 1)], "device pool 1 has page_size=2, the first one 4"),
        (5, "or several, not 5"),
    ],
)
def test_pools_that_do_not_go_together(pools: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        UnifiedCache(CacheConfig(page_size=PAGE), pools)


def test_a_pool_twice_or_on_another_device() -> None:
    pool, other = make_pool(), make_pool()
    with pytest.raises(ArgumentError, match="device pool 1 is given twice"):
        make_cache([pool, pool])
    other.device = torch.device("cuda:0")
    with pytest.raises(ArgumentError, match="device pool 1 has device=cuda:0, the first one cpu"):
        make_cache([pool, other])


def test_computing_writes_all_pools() -> None:
    """The tests above would see pools that are mixed up."""
    with make_cache([make_pool(), make_pool()], copies=LateCopies.between) as cache:
        request = cache.begin(toks(9))
        request.extend()
        compute(request)
        one, other = read_pages(planes_of(cache), int(request.pages[0]))
        assert not torch.equal(one, other)
        request.finish()
        LateGroup(cache._copies.engines, random.Random(0)).run_all()  # type: ignore[union-attr]
        cache.tick()
        LateGroup(cache._copies.engines, random.Random(0)).run_all()  # type: ignore[union-attr]
        cache.tick()
