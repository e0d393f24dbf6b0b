"""The driver behind CuPy, as far as that goes without a GPU: which calls it makes, with what."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from unified_cache.copies import cupy_driver
from unified_cache.copies.cupy_driver import CopyAttributes, CupyDriver, find_batch_copy
from unified_cache.copies.kernel_source import ARGUMENT, OPTIONS, kernel_source
from unified_cache.errors import ArgumentError, CopyError, MissingDependencyError


class Calls(list):
    """Records calls; `results` says what some of them give."""

    def __init__(self, **results: object) -> None:
        super().__init__()
        self.results = results

    def __getattr__(self, name: str):
        def call(*arguments: object) -> object:
            self.append((name, *(getattr(a, "value", a) for a in arguments)))
            result = self.results.get(name, 0)
            return result(*arguments) if callable(result) else result

        return call


CONTEXT = 4242


class DriverError(Exception):
    pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for CuPy and for the driver's library."""
    runtime = Calls(getDevice=1, streamCreateWithFlags=70, eventCreateWithFlags=71)

    def retain(pointer, device: ctypes.c_int) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = CONTEXT
        return 0

    library = Calls(cuDevicePrimaryCtxRetain=retain)
    runtime.memcpyDefault, runtime.streamNonBlocking, runtime.eventDisableTiming = 4, 1, 2
    launches: list[tuple] = []

    def launch(*arguments: int) -> None:
        (pointer,) = (ctypes.c_void_p * 1).from_address(arguments[9])
        launches.append((arguments, ctypes.string_at(pointer, ARGUMENT.itemsize)))

    modules = []

    class RawModule:
        def __init__(self, **options: object) -> None:
            modules.append(options)

        def get_function(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(kernel=SimpleNamespace(ptr=hash(name)))

    driver = SimpleNamespace(launchKernel=launch, CUDADriverError=DriverError)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, driver=driver), RawModule=RawModule)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy_driver, "_libcuda", lambda: library)
    return SimpleNamespace(runtime=runtime, library=library, launches=launches, modules=modules)


def test_streams_events_and_copies(cuda: SimpleNamespace) -> None:
    driver = CupyDriver(1, forward_stream=lambda: 99)
    assert cuda.modules == [{"code": kernel_source(), "options": OPTIONS, "backend": "nvrtc"}]
    assert kernel_source().isascii()  # CuPy writes it to a file in the locale's encoding
    assert driver.forward_stream() == 99
    with driver.active():
        assert driver.new_stream() == 70
        assert driver.new_event() == driver.new_event(timing=True) == 71
        driver.record(71, 70)
        driver.stream_wait(70, 71)
        driver.copy(1000, 2000, 30, 70)
        driver.copy_2d(1000, 40, 2000, 50, 30, 3, 70)
    assert [c for c in cuda.runtime if c[0] != "getDevice"] == [
        ("streamCreateWithFlags", 1),
        ("eventCreateWithFlags", 2),
        ("eventCreateWithFlags", 0),
        ("eventRecord", 71, 70),
        ("streamWaitEvent", 70, 71),
        ("memcpyAsync", 1000, 2000, 30, 4, 70),
        ("memcpy2DAsync", 1000, 40, 2000, 50, 30, 3, 4, 70),
    ]


def test_questions(cuda: SimpleNamespace) -> None:
    driver = CupyDriver("cuda:1")
    for status, answer in ((0, True), (600, False)):
        cuda.library.results |= {"cuEventQuery": status, "cuStreamQuery": status}
        assert driver.event_done(71) is answer
        assert driver.stream_done(70) is answer
    cuda.library.results["cuEventQuery"] = 700
    with pytest.raises(DriverError, match="700"):
        driver.event_done(71)


def test_the_kernel_gets_its_argument(cuda: SimpleNamespace) -> None:
    driver = CupyDriver(1)
    argument = np.zeros((), ARGUMENT)
    argument["pages"], argument["source_planes"] = 77, 2**63 + 5
    driver.launch("copy_pages_w16_p2", 2, 1024, argument, 70)
    ((arguments, passed),) = cuda.launches
    assert arguments[:9] == (hash("copy_pages_w16_p2"), 2, 1, 1, 1024, 1, 1, 0, 70)
    assert arguments[10] == 0
    assert passed == argument.tobytes()


def test_a_thread_is_left_as_it_was(cuda: SimpleNamespace) -> None:
    mode, contexts = {"now": 0}, [1000]

    def exchange(pointer) -> int:
        held = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))
        mode["now"], held[0] = held[0], mode["now"]
        return 0

    cuda.library.results |= {
        "cuThreadExchangeStreamCaptureMode": exchange,
        "cuCtxPushCurrent_v2": lambda context: contexts.append(context.value) or 0,
        "cuCtxPopCurrent_v2": lambda pointer: contexts.pop() and 0,
    }
    driver = CupyDriver(1)

    def fail() -> None:
        with driver.active():
            assert (contexts, mode["now"]) == ([1000, CONTEXT], 2)
            with driver.active():
                assert (contexts, mode["now"]) == ([1000, CONTEXT, CONTEXT], 2)
            assert (contexts, mode["now"]) == ([1000, CONTEXT], 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (contexts, mode["now"]) == ([1000], 0)


def test_a_driver_that_refuses_the_mode_or_the_device(cuda: SimpleNamespace) -> None:
    driver = CupyDriver(1)
    cuda.library.results["cuThreadExchangeStreamCaptureMode"] = 1
    with driver.active():
        pass
    assert [c[0] for c in cuda.library].count("cuThreadExchangeStreamCaptureMode") == 1
    assert [c[0] for c in cuda.library].count("cuCtxPopCurrent_v2") == 1
    cuda.library.results["cuCtxPushCurrent_v2"] = 201
    with pytest.raises(CopyError, match="cuCtxPushCurrent failed with status 201"):
        driver.active().__enter__()
    cuda.library.results["cuDeviceGet"] = 101
    with pytest.raises(CopyError, match=r"cuDeviceGet\(7\) failed with status 101"):
        CupyDriver(7)


def test_host_memory_that_lies_elsewhere_for_the_device(cuda: SimpleNamespace) -> None:
    driver = CupyDriver(1)
    for kind, at, answer in ((1, 4096, True), (1, 8192, False), (0, 0, False), (2, 4096, False)):
        cuda.runtime.results["pointerGetAttributes"] = SimpleNamespace(type=kind, devicePointer=at)
        assert driver.reaches_host(4096) is answer


# --- copies in batches -----------------------------------------------------------------------------------

_V2 = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_size_t, *[ctypes.c_void_p] * 2,
                       ctypes.c_size_t, ctypes.c_void_p)  # fmt: skip
_V1 = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_size_t, *[ctypes.c_void_p] * 2,
                       ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
def test_both_forms_of_the_batch(version: int) -> None:
    seen = []

    def batch(targets, sources, sizes, count, attributes, indices, attribute_count, *rest) -> int:
        lists = [list((ctypes.c_uint64 * count).from_address(a)) for a in (targets, sources, sizes)]
        attribute = CopyAttributes.from_address(attributes)
        first = ctypes.c_size_t.from_address(indices).value
        seen.append((*lists, attribute.source_access_order, first, attribute_count, rest))
        return 0

    function = _V1(batch) if version == 1 else _V2(batch)
    name = "cuMemcpyBatchAsync" if version == 1 else "cuMemcpyBatchAsync_v2"
    copy = find_batch_copy(SimpleNamespace(**{name: function}))
    assert copy is not None
    arrays = [np.array(x, np.uint64) for x in ([2**63, 2], [3, 4], [5, 6])]
    assert copy(*arrays, 70) == 0
    ((*lists, order, first, count, rest),) = seen
    assert lists == [[2**63, 2], [3, 4], [5, 6]]
    assert (order, first, count) == (1, 0, 1)
    assert rest[-1] == 70
    assert len(rest) == 3 - version
    assert ctypes.sizeof(CopyAttributes) == 24


def test_the_newer_form_is_taken_and_none_is_fine() -> None:
    both = SimpleNamespace(cuMemcpyBatchAsync_v2=lambda *a: len(a), cuMemcpyBatchAsync=lambda *a: -1)
    empty = np.zeros(0, np.uint64)
    copy = find_batch_copy(both)
    assert copy is not None
    assert copy(empty, empty, empty, 0) == 8
    assert find_batch_copy(SimpleNamespace()) is None


def test_a_refused_batch_goes_one_by_one(cuda: SimpleNamespace) -> None:
    cuda.library.results["cuMemcpyBatchAsync_v2"] = 801
    driver = CupyDriver(1)
    assert driver.batched
    arrays = [np.array(x, np.uint64) for x in ([1, 2], [3, 4], [5, 6])]
    with pytest.warns(RuntimeWarning, match="refused a batch of 2 copies with status 801") as caught:
        driver.copy_batch(*arrays, 70)
    assert len(caught) == 1
    assert not driver.batched
    driver.copy_batch(*arrays, 70)  # no second warning
    copies = [c for c in cuda.runtime if c[0] == "memcpyAsync"]
    assert copies == [("memcpyAsync", 1, 3, 5, 4, 70), ("memcpyAsync", 2, 4, 6, 4, 70)] * 2
    assert sum(c[0].startswith("cuMemcpyBatch") for c in cuda.library) == 1


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="device must be a CUDA device, not cpu"):
        CupyDriver("cpu")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match=r"unified-cache\[cuda13\]"):
        CupyDriver(0)
