"""Copies bring the same bytes there and back, end in order, tell of each layer, and report what fails."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.cache.planes_support import LAYOUTS, Shape, TensorPool, index, page_ids, random_ids
from unified_cache import ArgumentError, ClosedError, CopyError, worker
from unified_cache.copies.cpu import CpuCopyEngine, CpuLayerEvents, default_threads
from unified_cache.copies.engine import CopyEngine, CopyHandle, LayerEvents
from unified_cache.errors import BusyError

# Whoever waits longer has failed.
PATIENCE = 30.0

SMALL = Shape(tokens=4, layers=3, heads=2, elements=8)
LATENT = Shape(tokens=5, layers=3, heads=1, elements=9, parts=1, dtype=torch.bfloat16)
# A copy of 20 pages is 1.9 MB, so it goes past the cache, and through the gathering of runs.
LARGE = Shape(tokens=64, layers=3, heads=2, elements=64, dtype=torch.bfloat16)
LARGE_LATENT = Shape(tokens=64, layers=3, heads=1, elements=288, parts=1, dtype=torch.bfloat16)
SHAPES = {
    "float32": SMALL,
    "bfloat16": Shape(tokens=4, layers=3, heads=2, elements=8, dtype=torch.bfloat16),
    "float16, odd sizes": Shape(tokens=5, layers=2, heads=3, elements=7, dtype=torch.float16),
    "float8": Shape(tokens=3, layers=2, heads=3, elements=5, dtype=torch.float8_e4m3fn),
    "one byte": Shape(tokens=1, layers=1, heads=1, elements=1, dtype=torch.float8_e5m2),
    "one token": Shape(tokens=1, layers=2, heads=4, elements=16),
    "latent": LATENT,
    "latent, float8": Shape(tokens=4, layers=2, heads=1, elements=11, parts=1, dtype=torch.float8_e4m3fn),
    "large": LARGE,
    "large latent": LARGE_LATENT,
}


class Mark:
    """A moment that the test lets pass."""

    def __init__(self, error: Exception | None = None) -> None:
        self.passed, self.entered = threading.Event(), threading.Event()
        self.error = error

    @property
    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        self.entered.set()
        assert self.passed.wait(PATIENCE)
        if self.error is not None:
            raise self.error


class GatedEvents(CpuLayerEvents):
    """A layer is told of only when the test says so; until then the copy stands still behind it."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.reached: queue.Queue[int] = queue.Queue()
        self.gate = threading.Semaphore(0)

    def record(self, layer: int) -> None:
        self.reached.put(layer)
        assert self.gate.acquire(timeout=PATIENCE)
        super().record(layer)


class GatedEngine(CpuCopyEngine):
    """Backups wait for the gate; a failing one raises, whichever its direction."""

    gate: threading.Event
    entered: threading.Event
    failing: set[int]

    def _copy(self, handle: CopyHandle, arrived: Callable[[int], None] | None) -> None:
        if handle.direction == "backup":
            self.entered.set()
            assert self.gate.wait(PATIENCE)
        if int(handle.device_pages[0]) in self.failing:
            raise OSError("injected")
        super()._copy(handle, arrived)


Engines = Callable[..., CpuCopyEngine]


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Makes engines, and closes them."""
    made: list[CpuCopyEngine] = []

    def make(device: TensorPool, host: TensorPool, **settings: int | None) -> CpuCopyEngine:
        made.append(CpuCopyEngine(device.planes, host.planes, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def small() -> tuple[TensorPool, TensorPool]:
    """A device pool and a host pool of 8 pages each."""
    return TensorPool("layer_first", 8, SMALL), TensorPool("page_first", 8, SMALL, seed=1)


@pytest.fixture
def gated(small: tuple[TensorPool, TensorPool]) -> Iterator[GatedEngine]:
    engine = GatedEngine(small[0].planes, small[1].planes)
    engine.gate, engine.entered, engine.failing = threading.Event(), threading.Event(), set()
    yield engine
    engine.gate.set()
    engine.close()


def there_and_back(engine: CpuCopyEngine, device: TensorPool, host: TensorPool) -> None:
    """Random pages to host and from there to others: all bytes of both pools are as they must be."""
    rng = np.random.default_rng(3)
    devices, hosts = device.planes.pages, host.planes.pages
    count = min(devices, hosts) * 2 // 3
    source, there, target = (random_ids(rng, count, pages) for pages in (devices, hosts, devices))
    on_device, on_host = device.bytes.clone(), host.bytes.clone()
    on_host[index(there)] = on_device[index(source)]
    handle = engine.submit_backup(source, there)
    handle.wait()
    assert handle.begun
    assert handle.seconds > 0
    assert torch.equal(host.bytes, on_host)
    assert torch.equal(device.bytes, on_device)

    on_device[index(target)] = on_device[index(source)]
    engine.submit_load(target, there).wait()
    assert torch.equal(device.bytes, on_device)
    assert torch.equal(host.bytes, on_host)
    assert {handle.direction for handle in engine.take_done()} <= {"backup", "load"}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_there_and_back(shape: Shape, layout: str, threads: int, engines: Engines) -> None:
    device, host = TensorPool("layer_first", 31, shape), TensorPool(layout, 30, shape, seed=1)
    there_and_back(engines(device, host, threads=threads), device, host)


@pytest.mark.parametrize("host_layout", LAYOUTS)
@pytest.mark.parametrize("device_layout", LAYOUTS)
@pytest.mark.parametrize("shape", [LATENT, LARGE], ids=["small", "large"])
def test_every_pair_of_layouts(shape: Shape, device_layout: str, host_layout: str, engines: Engines) -> None:
    device, host = TensorPool(device_layout, 30, shape), TensorPool(host_layout, 30, shape, seed=1)
    there_and_back(engines(device, host), device, host)


def test_the_shapes_of_these_tests_take_both_ways() -> None:
    assert SMALL.page_bytes * 20 < 1 << 20 < LARGE.page_bytes * 20


def test_it_is_a_copy_engine(small: tuple[TensorPool, TensorPool], engines: Engines) -> None:
    engine: CopyEngine = engines(*small)
    events: LayerEvents = engine.new_layer_events()
    assert events.done
    assert engine.record_forward() is None
    mark = Mark()
    marked = CpuCopyEngine(small[0].planes, small[1].planes, record_forward=lambda: mark)
    assert marked.record_forward() is mark
    marked.close()


def test_submissions_return_at_once_and_end_in_order(gated: GatedEngine) -> None:
    gated.failing = {1}
    handles = [gated.submit_backup(page_ids(page), page_ids(page)) for page in range(3)]
    assert not any(handle.done for handle in handles)
    assert gated.take_done() == []
    # The other direction does not wait for this one.
    load = gated.submit_load(page_ids(7), page_ids(7))
    load.wait()
    assert gated.take_done(wait=True) == [load]
    assert gated.take_done(wait=True, timeout=0.01) == []
    assert gated.running == 3
    gated.gate.set()
    handles[2].wait()
    with pytest.raises(CopyError, match="backup copy of 1 pages failed: injected"):
        handles[1].wait()
    taken = []
    while gated.running:
        taken += gated.take_done(wait=True)
    assert taken == handles
    assert [handle.error is None for handle in handles] == [True, False, True]
    assert gated.take_done(wait=True) == []


@pytest.mark.parametrize("direction", ["backup", "load"])
def test_bad_pages_are_refused_at_once(
    direction: str, small: tuple[TensorPool, TensorPool], engines: Engines
) -> None:
    engine = engines(*small)
    submit = engine.submit_backup if direction == "backup" else engine.submit_load
    before = [pool.bytes.clone() for pool in small]
    for device, host, text in [
        (page_ids(1, 2), page_ids(1), "2 device pages and 1 host pages"),
        (page_ids(1, 8), page_ids(1, 2), r"device page 8 is not in 0\.\.7"),
        (page_ids(1, 2), page_ids(2**32 - 1, 2), r"host page 4294967295 is not in 0\.\.7"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            submit(device, host)
    assert engine.running == 0
    submit(page_ids(), page_ids()).wait()
    assert all(torch.equal(pool.bytes, old) for pool, old in zip(small, before, strict=True))


def test_a_target_that_is_named_twice_fails_and_moves_nothing(
    small: tuple[TensorPool, TensorPool], engines: Engines
) -> None:
    engine, before = engines(*small), small[1].bytes.clone()
    with pytest.raises(CopyError, match=r"target_pages\[2\] is 5, which was named before"):
        engine.submit_backup(page_ids(1, 2, 3), page_ids(5, 6, 5)).wait()
    assert torch.equal(small[1].bytes, before)


def test_pools_that_can_not_be_copied_are_refused(small: tuple[TensorPool, TensorPool]) -> None:
    device, host = small
    threads = threading.active_count()
    other = TensorPool("page_first", 8, LATENT)
    with pytest.raises(ArgumentError, match=r"device has pages of PageShape.*host of PageShape"):
        CpuCopyEngine(device.planes, other.planes)
    with pytest.raises(ArgumentError, match="target and source share memory"):
        CpuCopyEngine(device.planes, device.planes)
    for number in (0, -1):
        with pytest.raises(ArgumentError, match=f"threads is {number}, allowed is 1 or more"):
            CpuCopyEngine(device.planes, host.planes, threads=number)
    host.planes.tensors = (host.planes.tensors[0],) * len(host.planes.tensors)
    with pytest.raises(ArgumentError, match=r"the host pool can not be copied: planes\[0\] and planes\[1\]"):
        CpuCopyEngine(device.planes, host.planes)
    meta = TensorPool("page_first", 8, SMALL)
    meta.planes.device = torch.device("meta")
    with pytest.raises(ArgumentError, match="the host pool can not be copied: planes on meta"):
        CpuCopyEngine(device.planes, meta.planes)
    assert threading.active_count() == threads


def test_default_threads_leave_most_to_the_forward() -> None:
    usual = torch.get_num_threads()
    try:
        for of_torch, ours in [(1, 1), (3, 1), (8, 2), (64, 8)]:
            torch.set_num_threads(of_torch)
            assert default_threads() == ours
    finally:
        torch.set_num_threads(usual)


# Marks


@pytest.mark.parametrize("direction", ["backup", "load"])
def test_a_copy_waits_for_its_mark(
    direction: str, small: tuple[TensorPool, TensorPool], engines: Engines
) -> None:
    device, host = small
    engine, mark = engines(*small), Mark()
    source, target = (device, host) if direction == "backup" else (host, device)
    submit = engine.submit_backup if direction == "backup" else engine.submit_load
    before = target.bytes.clone()
    handle = submit(page_ids(1), page_ids(1), after=mark)
    assert mark.entered.wait(PATIENCE)
    assert not handle.begun
    assert torch.equal(target.bytes, before)
    source.bytes[1] = 77  # what is written before the mark is copied
    mark.passed.set()
    handle.wait()
    assert (target.bytes[1] == 77).all()


def test_a_mark_that_fails_is_a_copy_that_failed(
    small: tuple[TensorPool, TensorPool], engines: Engines
) -> None:
    engine, mark, before = engines(*small), Mark(OSError("no such event")), small[0].bytes.clone()
    events = engine.new_layer_events()
    events.begin()
    mark.passed.set()
    handle = engine.submit_load(page_ids(1), page_ids(1), after=mark, layers=events)
    with pytest.raises(CopyError, match="load copy of 1 pages failed: no such event"):
        handle.wait()
    with pytest.raises(CopyError, match="layer 0 was not loaded: no such event"):
        events.wait(0)
    assert torch.equal(small[0].bytes, before)
    # The ones behind it are not concerned.
    engine.submit_load(page_ids(2), page_ids(1)).wait()


# Closing


def test_close_ends_what_has_not_begun(gated: GatedEngine) -> None:
    running, queued = (gated.submit_backup(page_ids(page), page_ids(page)) for page in range(2))
    assert gated.entered.wait(PATIENCE)
    assert gated.take_done(wait=True, timeout=0.01) == []
    closing = threading.Thread(target=gated.close)
    closing.start()
    with pytest.raises(ClosedError, match="before this copy began"):
        queued.wait()
    assert not running.done
    gated.gate.set()
    closing.join(PATIENCE)
    running.wait()
    gated.close()
    assert {*gated.take_done(wait=True), *gated.take_done(wait=True)} == {running, queued}
    assert gated.running == 0
    events = gated.new_layer_events()
    events.begin()
    with pytest.raises(ClosedError, match="takes no load any more"):
        gated.submit_load(page_ids(1), page_ids(1), layers=events)
    assert events.done
    assert gated.running == 0


def test_a_copy_that_waits_for_its_mark_when_the_engine_is_closed_never_begins(
    small: tuple[TensorPool, TensorPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_CLOSE_SECONDS", 0.0)
    engine, mark = CpuCopyEngine(small[0].planes, small[1].planes), Mark()
    events, before = engine.new_layer_events(), small[0].bytes.clone()
    events.begin()
    handle = engine.submit_load(page_ids(1), page_ids(1), after=mark, layers=events)
    assert mark.entered.wait(PATIENCE)
    engine.close()
    with pytest.raises(ClosedError, match="before this copy began"):
        handle.wait()
    with pytest.raises(CopyError, match="closed before"):
        events.wait(2)
    mark.passed.set()
    for thread in threading.enumerate():
        if thread.name == "unified-cache load copies":
            thread.join(PATIENCE)
    assert torch.equal(small[0].bytes, before)
    assert engine.take_done() == [handle]


# Layer by layer


def test_layers_arrive_one_after_the_other(small: tuple[TensorPool, TensorPool], engines: Engines) -> None:
    device, host = small
    engine, events = engines(*small), GatedEvents(SMALL.layers)
    device.bytes[:] = 0xEE
    host.bytes[:] = 0x11
    events.begin()
    handle = engine.submit_load(page_ids(6, 1), page_ids(0, 5), layers=events)
    for layer in range(SMALL.layers):
        assert events.reached.get(timeout=PATIENCE) == layer
        # This layer is complete, and the next one was not begun: all layers at once would fail here.
        assert (device.bytes[[6, 1], : layer + 1] == 0x11).all()
        assert (device.bytes[[6, 1], layer + 1 :] == 0xEE).all()
        assert not events.done
        assert not handle.done
        events.gate.release()
        events.wait(layer)
    handle.wait()
    assert events.done


@pytest.mark.parametrize("compute, load", [(1, 1), (7, 2), (2, 7), (100, 1), (1, 100)])
def test_a_forward_waits_for_one_layer_at_a_time(
    compute: int, load: int, small: tuple[TensorPool, TensorPool], engines: Engines
) -> None:
    """On a logical clock: a layer takes `load` to arrive, and `compute` in the forward.

    The forward reads each layer as soon as it may go on. It never sees a layer that is not there, and is done
    one layer's work after the slower of the two. Should it wait for more, it would wait forever.
    """
    device, host = small
    layers, pages = SMALL.layers, page_ids(3, 0, 7)
    engine, events = engines(*small), GatedEvents(layers)
    device.bytes[:] = 0xEE
    passed: queue.Queue[torch.Tensor] = queue.Queue()

    def forward() -> None:
        for layer in range(layers):
            events.wait(layer)
            passed.put(device.bytes[index(pages), layer].clone())

    events.begin()
    thread = threading.Thread(target=forward)
    thread.start()
    engine.submit_load(pages, page_ids(1, 2, 3), layers=events)
    arrived_at = ended_at = 0
    for layer in range(layers):
        assert events.reached.get(timeout=PATIENCE) == layer
        assert passed.empty()
        arrived_at += load
        events.gate.release()
        assert torch.equal(passed.get(timeout=PATIENCE), host.bytes[[1, 2, 3], layer])
        ended_at = max(ended_at, arrived_at) + compute
    thread.join(PATIENCE)
    assert ended_at <= max(compute, load) * layers + compute + load


def test_a_failed_load_tells_who_waits_for_its_layers(gated: GatedEngine) -> None:
    gated.failing = {3}
    events, heard = gated.new_layer_events(), queue.Queue[Exception]()

    def forward() -> None:
        try:
            events.wait(1)
        except CopyError as error:
            heard.put(error)

    events.begin()
    thread = threading.Thread(target=forward)
    thread.start()
    handle = gated.submit_load(page_ids(3), page_ids(3), layers=events)
    assert str(heard.get(timeout=PATIENCE)) == "layer 1 was not loaded: injected"
    thread.join(PATIENCE)
    with pytest.raises(CopyError, match="injected"):
        handle.wait()
    assert events.done
    # They can be used again, and nothing of that is left.
    events.begin()
    gated.submit_load(page_ids(4), page_ids(4), layers=events).wait()
    for layer in range(SMALL.layers):
        events.wait(layer)


def test_events_that_fail_end_the_load(small: tuple[TensorPool, TensorPool], engines: Engines) -> None:
    class Broken(CpuLayerEvents):
        def record(self, layer: int) -> None:
            if layer == 1:
                raise RuntimeError("no more events")
            super().record(layer)

    device, _ = small
    device.bytes[:] = 0xEE
    engine, events = engines(*small), Broken(SMALL.layers)
    events.begin()
    handle = engine.submit_load(page_ids(3), page_ids(3), layers=events)
    with pytest.raises(CopyError, match="no more events"):
        handle.wait()
    assert (device.bytes[:, 2] == 0xEE).all()
    assert events.done


def test_refused_loads_tell_their_events(small: tuple[TensorPool, TensorPool], engines: Engines) -> None:
    engine = engines(*small)
    events = engine.new_layer_events()
    events.begin()
    with pytest.raises(ArgumentError):
        engine.submit_load(page_ids(8), page_ids(0), layers=events)
    assert events.done
    with pytest.raises(CopyError, match="device page 8"):
        events.wait(0)


def test_layer_events_by_themselves() -> None:
    events = CpuLayerEvents(2)
    assert events.done
    events.wait(1)  # nothing was begun, so nothing is missing
    events.begin()
    assert not events.done
    with pytest.raises(BusyError, match="2 layers have not arrived"):
        events.begin()
    events.record(0)
    events.wait(0)
    assert not events.done
    events.record(1)
    assert events.done
    for layer in (-1, 2):
        for call in (events.record, events.wait):
            with pytest.raises(ArgumentError, match=f"layer is {layer}, allowed is 0 to 1"):
                call(layer)
