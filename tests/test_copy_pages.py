"""The native copies: what they refuse, and that others run meanwhile; cache/test_copies.py has the rest."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from unified_cache import ArgumentError
from unified_cache._native import PageMemory, copy_pages

GEOMETRY = {
    "pages": 4,
    "tokens": 2,
    "heads": 2,
    "run_bytes": 8,
    "page_stride": 32,
    "token_stride": 16,
    "head_stride": 8,
}


def memory(planes: int = 2, fill: int = 0, **geometry: int) -> tuple[PageMemory, list[np.ndarray]]:
    buffers = [np.full(128, fill, np.uint8) for _ in range(planes)]
    return PageMemory(buffers, **(GEOMETRY | geometry)), buffers


def test_pages_are_copied_in_the_planes_that_are_named() -> None:
    target, to = memory(3)
    source, from_ = memory(3, fill=9)
    assert (target.planes, target.pages) == (3, 4)
    copy_pages(target, [3], source, (0,), first_plane=1, planes=1)
    assert [int(buffer.sum()) for buffer in to] == [0, 9 * 32, 0]
    assert (to[1][96:] == 9).all()
    copy_pages(target, np.array([0, 1], np.int64), source, np.array([2, 2], np.uint32), first_plane=1)
    assert [int(buffer.sum()) for buffer in to] == [0, 9 * 96, 9 * 64]
    copy_pages(target, [], source, [])
    copy_pages(target, [0], source, [0], planes=0)
    copy_pages(target, [0], source, [0], first_plane=3)
    assert int(to[0].sum()) == 0
    assert all((buffer == 9).all() for buffer in from_)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"target_pages": [4]}, r"target_pages\[0\] is 4, allowed is 0 to 3"),
        ({"source_pages": [2**32 - 1]}, r"source_pages\[0\] is 4294967295, allowed is 0 to 3"),
        ({"source_pages": [-1]}, r"source_pages\[0\] is -1, allowed is 0 to"),
        ({"target_pages": [1.5]}, r"target_pages\[0\] is 1.5, a whole number"),
        ({"target_pages": [0, 1]}, "target_pages has 2 entries and source_pages 1"),
        ({"target_pages": [1, 1], "source_pages": [2, 3]}, r"target_pages\[1\] is 1, which was named before"),
        ({"first_plane": 3}, "planes 3 to 3 are not in target, which has 2"),
        ({"first_plane": 1, "planes": 2}, "planes 1 to 3 are not in target, which has 2"),
        ({"first_plane": 2**70, "planes": 2**70}, "are not in target"),
        ({"first_plane": -1}, "first_plane is -1, allowed is 0 or more"),
        ({"planes": -1}, "planes is -1, allowed is 0 or more"),
        ({"threads": 0}, "threads is 0, allowed is 1 or more"),
        ({"threads": 1.5}, "threads is 1.5, a whole number is needed"),
        ({"step": 0}, "step is 0, allowed is 1 or more"),
    ],
)
def test_bad_arguments_move_nothing(arguments: dict[str, Any], text: str) -> None:
    target, to = memory()
    source, _ = memory(fill=9)
    call = {"target_pages": [0], "source_pages": [0]} | arguments
    with pytest.raises(ArgumentError, match=text):
        copy_pages(target, source=source, **call)
    assert not any(buffer.any() for buffer in to)


def test_pools_that_do_not_fit_each_other_are_refused() -> None:
    target, to = memory()
    with pytest.raises(ArgumentError, match="planes 0 to 2 are not in source, which has 1"):
        copy_pages(target, [0], memory(1)[0], [0])
    with pytest.raises(ArgumentError, match=r"target has pages of .* \(2, 2, 8\), source of \(2, 1, 8\)"):
        copy_pages(target, [0], memory(heads=1)[0], [0])
    with pytest.raises(ArgumentError, match="target and source share memory: plane 0"):
        copy_pages(target, [0], PageMemory(to, **GEOMETRY), [1])
    with pytest.raises(TypeError):
        copy_pages(target, [0], to, [0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "geometry, text",
    [
        ({"pages": 0}, "pages is 0, allowed is 1 or more"),
        ({"run_bytes": -1}, "run_bytes is -1, allowed is 1 or more"),
        ({"tokens": "x"}, "tokens is 'x', a whole number is needed"),
        ({"page_stride": -32}, "page_stride is -32, allowed is 0 or more"),
        ({"page_stride": 31}, "make runs overlap: there is a stride of 31 over what takes 32 bytes"),
        ({"token_stride": 0}, "make runs overlap"),
        ({"pages": 5}, r"planes\[0\] has 128 bytes, its runs need 160"),
        ({"run_bytes": 9, "head_stride": 9, "token_stride": 18, "page_stride": 36}, "its runs need 144"),
        ({"pages": 2**62, "page_stride": 2**40}, "is larger than the address space"),
        ({"pages": 2**80}, "is larger than the address space"),
    ],
)
def test_bad_geometries_are_refused(geometry: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        memory(**geometry)


def test_bad_planes_are_refused() -> None:
    good = np.zeros(128, np.uint8)
    frozen = good.copy()
    frozen.flags.writeable = False
    for planes, text in [
        ([], "planes has 0 entries, allowed is 1 or more"),
        (7, "planes is 7, a sequence is needed"),
        ([good, 7], r"planes\[1\] is 7, a buffer is needed"),
        ([good, bytes(128)], r"planes\[1\] can not be written"),
        ([frozen], r"planes\[0\] can not be written"),
        ([np.zeros(256, np.uint8)[::2]], r"planes\[0\] is not C-contiguous"),
        ([good, bytearray(127)], r"planes\[1\] has 127 bytes, its runs need 128"),
        ([good, good], r"planes\[0\] and planes\[1\] have runs that overlap"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            PageMemory(planes, **GEOMETRY)  # type: ignore[arg-type]
    # Any type of element does, and more bytes than are needed.
    assert PageMemory([np.zeros((4, 9), np.float64), bytearray(128)], **GEOMETRY).planes == 2


def test_the_memory_stays_as_long_as_it_is_used() -> None:
    buffer = bytearray(128)
    target = PageMemory([buffer], **GEOMETRY)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    source, _ = memory(1, fill=5)
    copy_pages(target, [0], source, [0])
    assert sum(buffer) == 5 * 32
    del target
    buffer.extend(b"more")


@pytest.mark.parametrize("threads", [1, 4])
def test_steps_are_reported_in_order_and_can_be_broken_off(threads: int) -> None:
    target, to = memory(5)
    source, _ = memory(5, fill=9)
    steps: list[int] = []
    copy_pages(target, [0, 1], source, [0, 1], step=2, arrived=steps.append, threads=threads)
    assert steps == [0, 1, 2]
    assert [int(buffer.sum()) for buffer in to] == [9 * 64] * 5

    def stop(step: int) -> None:
        raise KeyError(step)

    with pytest.raises(KeyError, match="0"):
        copy_pages(target, [2, 3], source, [2, 3], step=2, arrived=stop)
    assert [int(buffer.sum()) for buffer in to] == [9 * 128] * 2 + [9 * 64] * 3


@pytest.fixture
def _patient_threads() -> Iterator[None]:
    """A thread that waits for the interpreter's lock gets it only if the holder lets go by itself."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(100)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("_patient_threads")
def test_other_threads_run_while_it_copies() -> None:
    buffers = [np.ones(16 << 20, np.uint8) for _ in range(2)]
    one = {"pages": 1, "tokens": 1, "heads": 1, "page_stride": 0, "token_stride": 0, "head_stride": 0}
    target, source = (PageMemory([buffer], run_bytes=16 << 20, **one) for buffer in buffers)
    go, ran, stop = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            go.wait()
            go.clear()
            ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        # This thread lets go of the lock only inside, and that may be too short for the other one.
        for _ in range(100):
            ran.clear()
            go.set()
            copy_pages(target, [0], source, [0])
            if ran.is_set():
                break
        else:
            pytest.fail("no other thread ran during 100 copies of 16 MiB")
    finally:
        stop.set()
        go.set()
        thread.join()
