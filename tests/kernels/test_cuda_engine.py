"""The GPU's copy engine on a driver whose streams run in the oddest order that their events allow."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import unified_cache.copies
from tests.kernels.fake_driver import FORWARD, FakeDriver, FakeError
from tests.kernels.layouts import DEVICE_LAYOUTS, HOST_LAYOUTS, Pool, Shape
from unified_cache.copies import cuda, cuda_events
from unified_cache.copies.cuda import CudaCopyEngine
from unified_cache.copies.cuda_plan import CopyRule, make_plan
from unified_cache.copies.engine import CopyHandle
from unified_cache.copies.geometry import Side, geometry_of
from unified_cache.errors import ArgumentError, ClosedError, CopyError
from unified_cache.pools.planes import PageShape, PoolPlanes

EVERYTHING = CopyRule(min_bytes=1, min_batched_bytes=1, min_row_bytes=1)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


class World:
    """Two pools, an engine between them, and what every byte must be in the order that the engine
    promises.
    """

    def __init__(self, seed: int, *, staged: bool = False, driver: FakeDriver | None = None) -> None:
        self.rng = rng = np.random.default_rng(seed)
        batched, lazy = bool(rng.integers(2)), 0.7 * float(rng.random())
        self.driver = driver or FakeDriver(seed, batched=batched, lazy=lazy)
        parts = int(rng.integers(1, 3))
        heads = int(rng.integers(1, 4)) if parts == 2 else 1
        shape = Shape(
            int(rng.integers(1, 5)), parts, int(rng.integers(1, 5)), heads, int(rng.integers(1, 20))
        )
        self.shape = shape
        # Those that the copy engines can do something with, half of the time.
        device, host = rng.choice(DEVICE_LAYOUTS), rng.choice(HOST_LAYOUTS)
        if rng.integers(2):
            device, host = "layer_first", rng.choice(["layer_first", "page_first_direct"])
        self.device, self.host = Pool(device, shape, 12, rng), Pool(host, shape, 16, rng)
        edges = ()
        if rng.integers(2):
            begin = self.host.memory.ctypes.data + self.host.begin
            edges = tuple(int(begin + x) for x in rng.integers(0, self.host.size, 2))
        self.engine = CudaCopyEngine(
            self.device.planes,
            self.host.planes,
            host_registered=not staged,
            blocks=int(rng.integers(1, 4)),
            driver=self.driver,
            rule=CopyRule(
                *(int(x) for x in rng.choice([1, 40, 200, 10_000], 3)), max_copies=int(rng.choice([8, 100]))
            ),
            host_edges=edges,
            staging_bytes=int(rng.integers(1, 2000)),
        )
        assert self.engine.staged == staged
        # (pages, layers, parts, tokens, heads, bytes), as they will be when all that was begun so far has
        # ended.
        self.device_bytes = self.snapshot(self.device)
        self.host_bytes = self.snapshot(self.host)
        self.running: list[CopyHandle] = []
        self.layer_sets = [self.engine.new_layer_events() for _ in range(3)]
        self.waited: dict[int, object] = {}  # device pages under a load -> its layer events
        self.wrong = 0

    @staticmethod
    def snapshot(pool: Pool) -> np.ndarray:
        return pool.named.transpose(2, 0, 1, 3, 4, 5).copy()

    def busy(self, side: str) -> set[int]:
        return {int(p) for handle in self.running for p in getattr(handle, f"{side}_pages")}

    def some(self, of: int, without: set[int], most: int = 6) -> np.ndarray:
        free = [p for p in range(of) if p not in without]
        count = int(self.rng.integers(0, min(most, len(free)) + 1))
        if self.rng.integers(2) and count:  # a run of neighbours, so that the copy engines have something
            start = int(self.rng.integers(0, len(free) - count + 1))
            return np.array(free[start : start + count], np.uint32)
        return self.rng.permutation(np.array(free, np.uint32))[:count]

    # The forward.

    def write(self) -> None:
        chosen = self.some(12, self.busy("device"))
        new = self.rng.integers(0, 256, self.device_bytes[chosen].shape, np.uint8)
        self.device_bytes[chosen] = new

        def work() -> None:
            self.device.named[:, :, chosen] = new.transpose(1, 2, 0, 3, 4, 5)

        self.driver.queue(work)

    def read(self, chosen: np.ndarray, layers: slice = slice(None)) -> None:
        want = self.device_bytes[chosen][:, layers].copy()

        def work() -> None:
            found = self.device.named[layers][:, :, chosen].transpose(2, 0, 1, 3, 4, 5)
            self.wrong += int(not np.array_equal(found, want))

        self.driver.queue(work)

    def read_loaded(self) -> None:
        """What a forward over freshly loaded pages does."""
        for events in {id(e): e for e in self.waited.values()}.values():
            chosen = pages(*(p for p, e in self.waited.items() if e is events))
            for layer in range(self.shape.layers):
                events.wait(layer)
                self.read(chosen, slice(layer, layer + 1))

    # Copies.

    def backup(self) -> None:
        loading = {int(p) for h in self.running if h.direction == "load" for p in h.device_pages}
        source = self.some(12, loading)
        target = self.some(16, self.busy("host"), len(source))
        source = source[: len(target)]
        handle = self.engine.submit_backup(source, target, after=self.engine.record_forward())
        self.host_bytes[target] = self.device_bytes[source]
        self.running.append(handle)

    def load(self) -> None:
        coming = {int(p) for h in self.running if h.direction == "backup" for p in h.host_pages}
        source = self.some(16, coming)
        target = self.some(12, self.busy("device"), len(source))
        source = source[: len(target)]
        events = next((e for e in self.layer_sets if e.done), None) if self.rng.integers(4) else None
        if events in self.waited.values():  # its pages were not looked at yet
            events = None
        if events is not None:
            events.begin()
        mark = self.engine.record_forward()
        handle = self.engine.submit_load(target, source, after=mark, layers=events)
        self.device_bytes[target] = self.host_bytes[source]
        self.running.append(handle)
        if events is not None:
            self.waited.update((int(p), events) for p in target)

    def take(self, *, wait: bool = False) -> None:
        taken = self.engine.take_done(wait=wait)
        for direction in ("backup", "load"):
            began = [h for h in self.running if h.direction == direction]
            ended = [h for h in taken if h.direction == direction]
            assert ended == began[: len(ended)], "submissions of one direction end in order"
        for handle in taken:
            assert handle.done
            assert handle.begun
            handle.wait()
            assert handle.seconds >= 0
            self.running.remove(handle)
            for page in handle.device_pages:
                if handle.direction == "load":
                    self.waited.pop(int(page), None)

    def run(self, actions: int) -> None:
        for _ in range(actions):
            match int(self.rng.integers(8)):
                case 0 | 1:
                    self.write()
                case 2:
                    loading = {int(p) for h in self.running if h.direction == "load" for p in h.device_pages}
                    self.read(self.some(12, loading))
                case 3:
                    self.backup()
                case 4:
                    self.load()
                case 5:
                    self.read_loaded()
                case 6:
                    self.take(wait=bool(self.rng.integers(2)) and bool(self.running))
                case 7:
                    self.driver.step(int(self.rng.integers(20)))

    def end(self) -> None:
        while self.engine.running:
            self.take(wait=True)
        self.driver.finish()
        self.wrong += int(not np.array_equal(self.snapshot(self.device), self.device_bytes))
        self.wrong += int(not np.array_equal(self.snapshot(self.host), self.host_bytes))
        self.engine.close()
        self.engine.close()

    def leaks(self) -> dict[str, int]:
        self.layer_sets, self.waited = [], {}
        gc.collect()
        driver = self.driver
        return {
            "streams": len(driver.streams) - 1,
            "events": len(driver.events),
            "memory": driver.allocations,
        }


NOTHING = {"streams": 0, "events": 0, "memory": 0}


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("seed", range(24))
def test_bytes_are_right_whatever_the_order(seed: int, staged: bool) -> None:
    world = World(seed, staged=staged)
    world.run(40 if staged else 150)
    world.end()
    assert world.wrong == 0
    del world.engine
    assert world.leaks() == NOTHING


def test_a_missing_wait_would_be_seen() -> None:
    # So the test above can fail.
    caught = 0
    for seed in range(12):
        world = World(seed)
        world.driver.ignore_waits = True
        world.run(150)
        world.end()
        caught += world.wrong > 0
    assert caught >= 6


def test_what_each_way_copies_is_really_used() -> None:
    calls: dict[str, int] = {}
    for seed in range(20):
        world = World(seed)
        world.run(100)
        world.end()
        for name, count in world.driver.calls.items():
            calls[name] = calls.get(name, 0) + count
    for name in ("launch", "copy", "copy_2d", "copy_batch", "stream_wait", "seconds_between"):
        assert calls[name] > 20, name
    # One launch at most for a backup, however many layers: few enough calls in all.
    assert calls["launch"] < calls["record"]


# --- one submission --------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    world = World(3)
    yield world
    world.driver.frozen, world.driver.failing = False, False
    world.end()


def small(driver: FakeDriver, **options: object) -> CudaCopyEngine:
    data = [torch.zeros(2, 3, 8, 4, 2, 8, dtype=torch.uint8) for _ in range(2)]
    device, host = (PoolPlanes([t[p, layer] for layer in range(3) for p in range(2)], 2) for t in data)
    return CudaCopyEngine(device, host, **{"host_registered": True, "driver": driver, **options})


def test_a_backup_is_one_launch_and_a_load_one_a_layer() -> None:
    driver = FakeDriver(1)
    engine = small(driver)
    engine.submit_backup(pages(1, 3, 5), pages(2, 7, 4))
    assert driver.calls["launch"] == 1
    events = engine.new_layer_events()
    events.begin()
    engine.submit_load(pages(1, 3, 5), pages(2, 7, 4), layers=events)
    assert driver.calls["launch"] == 1 + 3
    assert driver.calls.get("copy_batch", 0) == 0  # small pages: not worth a copy engine's time
    engine.close()


def test_runs_go_to_the_copy_engines() -> None:
    driver = FakeDriver(1)
    engine = small(driver, rule=EVERYTHING)
    engine.submit_backup(pages(4, 2, 3, 1), pages(5, 3, 4, 2))
    assert driver.calls.get("launch", 0) == 0
    assert driver.calls["copy_batch"] == 1
    engine.close()


def test_nothing_blocks_while_the_device_is_busy(world: World) -> None:
    world.driver.frozen = True
    events = world.layer_sets[0]
    assert events.done
    events.begin()
    mark = world.engine.record_forward()
    backup = world.engine.submit_backup(pages(1, 2), pages(3, 4), after=mark)
    load = world.engine.submit_load(pages(7, 8), pages(5, 6), after=mark, layers=events)
    for layer in range(world.shape.layers):
        events.wait(layer)
    world.read(pages(0))
    assert (backup.done, load.done, events.done, mark.done) == (False, False, False, False)
    assert world.engine.take_done() == []
    assert world.engine.take_done(wait=True, timeout=0.002) == []
    assert world.engine.running == 2
    world.driver.frozen = False
    backup.wait()
    load.wait()
    mark.wait()
    assert (backup.done, load.done, events.done, mark.done) == (True, True, True, True)
    assert sorted(h.direction for h in world.engine.take_done()) == ["backup", "load"]
    assert world.engine.running == 0
    world.host_bytes[[3, 4]] = world.device_bytes[[1, 2]]
    world.device_bytes[[7, 8]] = world.host_bytes[[5, 6]]


def test_no_pages_at_all(world: World) -> None:
    events = world.layer_sets[0]
    events.begin()
    world.engine.submit_load(pages(), pages(), layers=events).wait()
    assert events.done
    world.engine.submit_backup(pages(), pages()).wait()
    assert len(world.engine.take_done()) == 2


def test_page_lists_larger_than_the_first_slot() -> None:
    driver = FakeDriver(2)
    data = [
        torch.from_numpy(np.random.default_rng(i).integers(0, 256, (30_000, 1, 1, 1), np.uint8))
        for i in (0, 1)
    ]
    want = data[0].clone()
    engine = CudaCopyEngine(
        PoolPlanes([data[0]], 1), PoolPlanes([data[1]], 1), host_registered=True, driver=driver
    )
    order = np.random.default_rng(2).permutation(30_000).astype(np.uint32)
    engine.submit_backup(np.arange(30_000, dtype=np.uint32), order).wait()
    assert torch.equal(data[1][order.astype(np.int64)], want)
    engine.close()


def test_layers_without_a_load(world: World) -> None:
    events = world.engine.new_layer_events()
    events.wait(0)  # nothing was ever loaded, so nothing is waited for
    events.begin()
    with pytest.raises(CopyError, match="layer 0 is waited for, but the load of its pages was not submitted"):
        events.wait(0)


def test_a_forward_waits_for_its_layer_alone() -> None:
    driver = FakeDriver(0)
    engine = small(driver)
    events = engine.new_layer_events()
    driver.step(1000)
    events.begin()
    handle = engine.submit_load(pages(1, 3, 5), pages(2, 7, 4), layers=events)
    reached = []
    for layer in range(3):
        events.wait(layer)
        driver.queue(lambda layer=layer: reached.append((layer, len(driver.streams[load]))))
    (load,) = (s for s, ops in driver.streams.items() if s != FORWARD and len(ops) > 3)
    driver.finish()
    assert [layer for layer, _ in reached] == [0, 1, 2]
    assert any(left > 0 for _, left in reached), "the first layers did not wait for the last one"
    handle.wait()
    engine.close()


# --- what fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("direction", ["backup", "load"])
def test_any_call_may_fail(direction: str, staged: bool) -> None:
    failed = 0
    for call in range(30):
        world = World(call % 5, staged=staged)
        events = world.engine.new_layer_events()
        mark = world.engine.record_forward()
        device_pages, host_pages = pages(1, 2, 3, 9), pages(4, 5, 6, 2)
        before = world.snapshot(world.device), world.snapshot(world.host)
        world.driver.fail_in = call
        if direction == "backup":
            handle = world.engine.submit_backup(device_pages, host_pages, after=mark)
        else:
            events.begin()
            handle = world.engine.submit_load(device_pages, host_pages, after=mark, layers=events)
        try:
            handle.wait()
        except CopyError as error:
            failed += 1
            assert "injected" in str(error)  # noqa: PT017 # whether it fails depends on the number of calls
            assert isinstance(handle.error, FakeError)
            if direction == "load":
                with pytest.raises(CopyError, match="injected"):
                    events.wait(0)
                assert events.done
        world.driver.fail_in = None
        assert world.engine.take_done() == [handle]
        assert world.engine.running == 0
        # Nothing of the submission runs any more, and nothing but its targets was touched.
        after = world.snapshot(world.device), world.snapshot(world.host)
        world.driver.finish()
        np.testing.assert_array_equal(world.snapshot(world.device), after[0])
        np.testing.assert_array_equal(world.snapshot(world.host), after[1])
        target, ids = (1, host_pages) if direction == "backup" else (0, device_pages)
        np.testing.assert_array_equal(after[1 - target], before[1 - target])
        others = np.setdiff1d(np.arange(len(before[target])), ids)
        np.testing.assert_array_equal(after[target][others], before[target][others])
        # The next one is all right again.
        world.device_bytes, world.host_bytes = after
        world.run(20)
        world.end()
        assert world.wrong == 0
        del world.engine, events, mark, handle
        assert world.leaks() == NOTHING
    assert failed >= 5


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_a_device_that_is_gone(staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_events, "_PATIENCE_SECONDS", 0.02)
    world = World(11, staged=staged)
    events = world.engine.new_layer_events()
    events.begin()
    world.driver.frozen = True
    first = world.engine.submit_backup(pages(1), pages(2))
    second = world.engine.submit_load(pages(4), pages(5), layers=events)
    world.driver.failing, world.driver.frozen = True, False
    third = world.engine.submit_backup(pages(7), pages(8))
    for handle in (first, second, third):
        with pytest.raises(CopyError, match="gone"):
            handle.wait()
    assert events.done
    assert len(world.engine.take_done()) == 3
    world.driver.failing = False
    world.driver.finish()
    world.engine.close()


def test_building_an_engine_may_fail_anywhere() -> None:
    for staged in (False, True):
        for call in range(40):
            driver = FakeDriver(call)
            driver.fail_in = call
            try:
                engine = small(driver, host_registered=not staged)
            except FakeError:
                pass
            else:
                assert driver.fail_in is not None
                driver.fail_in = None
                engine.close()
                break
            gc.collect()
            driver.finish()
            assert len(driver.streams) == 1
            assert (driver.events, driver.allocations) == ({}, 0)
        else:
            pytest.fail("building takes more than 40 calls")


def test_close_waits_for_what_is_queued(world: World) -> None:
    handle = world.engine.submit_backup(pages(1), pages(2))
    world.engine.close()
    assert handle.done
    assert handle.error is None
    assert world.engine.take_done() == [handle]
    world.host_bytes[2] = world.device_bytes[1]
    for call in (
        lambda: world.engine.submit_backup(pages(1), pages(2)),
        world.engine.record_forward,
        world.engine.new_layer_events,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_close_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CLOSE_SECONDS", 0.01)
    driver = FakeDriver(0)
    engine = small(driver)
    events = engine.new_layer_events()
    events.begin()
    driver.frozen = True
    handle = engine.submit_load(pages(1), pages(2), layers=events)
    engine.close()
    assert handle.done
    with pytest.raises(ClosedError, match="did not end within"):
        handle.wait()
    with pytest.raises(CopyError):
        events.wait(1)
    # Its memory is given back when the device is through with it, not before.
    assert driver.allocations > 0
    driver.frozen = False
    assert cuda.poll(lambda: len(driver.streams) == 1 and not driver.events, 10)
    assert driver.allocations == 0


# --- what is refused ---------------------------------------------------------------------------


def test_what_is_refused(world: World) -> None:
    engine = world.engine
    with pytest.raises(ArgumentError, match="2 device pages and 1 host pages"):
        engine.submit_backup(pages(1, 2), pages(1))
    with pytest.raises(ArgumentError, match=r"device page 12 is not in 0\.\.11"):
        engine.submit_load(pages(12), pages(1))
    with pytest.raises(ArgumentError, match=r"host page 16 is not in 0\.\.15"):
        engine.submit_load(pages(1), pages(16))
    with pytest.raises(ArgumentError, match="page 3 is the target of two copies of one backup"):
        engine.submit_backup(pages(1, 2, 4), pages(3, 5, 3))
    with pytest.raises(ArgumentError, match="after must be a mark of this engine"):
        engine.submit_backup(pages(1), pages(3), after=object())  # type: ignore[arg-type]
    assert engine.running == 0


def test_pools_that_do_not_fit() -> None:
    driver = FakeDriver(0)
    rng = np.random.default_rng(0)
    one = Pool("layer_first", Shape(2, 2, 4, 2, 16), 4, rng).planes
    two = Pool("layer_first", Shape(2, 2, 4, 2, 32), 4, rng).planes
    with pytest.raises(ArgumentError, match="they must be alike"):
        CudaCopyEngine(one, two, host_registered=True, driver=driver)
    for blocks in (0, 65536):
        with pytest.raises(ArgumentError, match=r"blocks must be an integer in 1\.\.65535"):
            CudaCopyEngine(one, one, host_registered=True, driver=driver, blocks=blocks)
    with pytest.raises(ArgumentError, match="must lie on a CUDA device, not on cpu"):
        CudaCopyEngine(one, one, host_registered=True)
    assert driver.calls == {}


def test_memory_that_the_device_does_not_reach_is_staged() -> None:
    driver = FakeDriver(0)
    driver.registered = False
    with pytest.warns(RuntimeWarning, match="its copies are staged"):
        engine = small(driver)
    assert engine.staged
    engine.submit_backup(pages(1), pages(2)).wait()
    engine.close()


# --- runs --------------------------------------------------------------------------------------


def plan_of(device: str, host: str, pairs: list[tuple[int, int]], rule: CopyRule = EVERYTHING, **options):
    shape = Shape(2, 2, 4, 2, 16)
    rng = np.random.default_rng(0)
    sides = [Side.of(Pool(layout, shape, 10, rng).planes) for layout in (device, host)]
    geometry = geometry_of(PageShape(2, 2, 4, 2, 16), *sides)
    ids = np.array(pairs, np.uint32).reshape(-1, 2)
    plan = make_plan(ids[:, 0], ids[:, 1], geometry, rule, **{"batched": True, **options})
    rest = sorted(zip(plan.device_pages.tolist(), plan.host_pages.tolist(), strict=True))
    return plan.runs.tolist(), rest, geometry


def test_runs_are_found_in_any_order() -> None:
    pairs = [(3, 5), (9, 1), (2, 4), (7, 0), (4, 6)]
    runs, rest, _ = plan_of("layer_first", "layer_first", pairs)
    assert (runs, rest) == ([[2, 4, 3], [7, 0, 1], [9, 1, 1]], [])
    two = CopyRule(min_bytes=2 * 128, min_batched_bytes=2 * 128, min_row_bytes=1)
    for layout in ("layer_first", "page_first_direct"):
        runs, rest, _ = plan_of("layer_first", layout, pairs, two)
        assert (runs, rest) == ([[2, 4, 3]], [(7, 0), (9, 1)])
    few = CopyRule(1, 1, 1, max_copies=4)
    runs, rest, _ = plan_of("layer_first", "layer_first", pairs, few)
    assert (runs, rest) == ([[2, 4, 3]], [(7, 0), (9, 1)])


@pytest.mark.parametrize(
    "device, host, rule",
    [
        ("layer_first", "page_first", EVERYTHING),  # not one run
        ("layer_first", "page_head", EVERYTHING),
        ("heads_first", "layer_first", EVERYTHING),
        ("layer_first", "page_first_direct", CopyRule(1, 1, min_row_bytes=129)),
        ("layer_first", "layer_first", CopyRule(1, min_batched_bytes=1 + 5 * 128)),
        ("layer_first", "layer_first", CopyRule(1, 1, 1, max_copies=3)),
    ],
)
def test_what_is_left_to_the_kernel(device: str, host: str, rule: CopyRule) -> None:
    pairs = [(i, i + 1) for i in range(5)]
    runs, rest, _ = plan_of(device, host, pairs, rule)
    assert (runs, rest) == ([], pairs)


def test_no_copy_reaches_over_an_edge() -> None:
    pairs = [(i, i) for i in range(10)]
    _, _, geometry = plan_of("layer_first", "layer_first", pairs)
    plane = int(geometry.host.addresses[1, 0])
    ids = np.arange(10, dtype=np.uint32)
    for offset, want in (
        (5 * 128, [[0, 0, 5], [5, 5, 5]]),  # between two pages
        (5 * 128 + 1, [[0, 0, 5], [6, 6, 4]]),  # inside one: the kernel copies it
        (6 * 128 - 1, [[0, 0, 5], [6, 6, 4]]),
    ):
        plan = make_plan(ids, ids, geometry, EVERYTHING, batched=True, edges=(plane + offset,))
        assert plan.runs.tolist() == want
        assert len(plan.device_pages) == 10 - sum(run[2] for run in want)


def test_nothing_waits_for_the_device() -> None:
    folder = Path(unified_cache.copies.__file__).parent
    sources = [*folder.glob("cuda*.py"), folder / "cupy_driver.py"]
    assert len(sources) >= 6
    for source in sources:
        assert not re.search(
            r"ynchroni[sz]e\b|cudaFree|\.free\(", source.read_text().replace("cost no cudaFree", "")
        )
