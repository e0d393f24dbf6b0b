"""Copies bring the same bytes there and back, end in order, and report what fails."""

import threading

import numpy as np
import pytest
import torch

from unified_cache import ArgumentError, ClosedError, CopyError
from unified_cache.copies import cpu
from unified_cache.copies.cpu import CopyHandle, CpuCopyEngine
from unified_cache.pools.device import MhaDevicePool
from unified_cache.pools.host import MhaHostPool

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


def fill_randomly(tensor: torch.Tensor) -> None:
    raw = tensor.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_TO_HOST_BYTES", 1500)
    monkeypatch.setattr(cpu, "_TO_DEVICE_BYTES", 1500)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size, layers, heads, head_dim", [(4, 3, 2, 8), (1, 1, 1, 1), (5, 2, 3, 7)])
def test_there_and_back(dtype: torch.dtype, page_size: int, layers: int, heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    device = MhaDevicePool(20, page_size, layers, heads, head_dim, dtype)
    host = MhaHostPool(device, 30)
    engine = CpuCopyEngine(device, host)
    fill_randomly(device.data)
    fill_randomly(host.data)
    written = device.data.view(torch.uint8).clone()
    untouched = host.data.view(torch.uint8).clone()
    source, there, target = (
        pages(3, 4, 0, 19, 7, 8, 9),
        pages(29, 0, 1, 2, 17, 5, 11),
        pages(10, 2, 3, 1, 4, 12, 11),
    )
    engine.submit_backup(source, there).wait()
    # page_first: (pages, 2, page_size, layers, heads, head_dim)
    expected = written[:, :, source.astype(np.int64)].permute(2, 0, 3, 1, 4, 5)
    at = torch.from_numpy(there.astype(np.int64))
    assert torch.equal(host.data.view(torch.uint8)[at], expected)
    others = [page for page in range(30) if page not in there]
    assert torch.equal(host.data.view(torch.uint8)[others], untouched[others])

    engine.submit_load(target, there).wait()
    written[:, :, target.astype(np.int64)] = written[:, :, source.astype(np.int64)]
    assert torch.equal(device.data.view(torch.uint8), written)
    assert [handle.direction for handle in engine.take_done()] == ["backup", "load"]
    assert engine.running == 0
    engine.close()


class GatedEngine(CpuCopyEngine):
    """Copies to host wait for the gate; a failing one raises."""

    def __init__(self, device: MhaDevicePool, host: MhaHostPool) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.failing: set[int] = set()
        super().__init__(device, host)

    def _to_host(self, handle: CopyHandle) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        if int(handle.device_pages[0]) in self.failing:
            raise OSError("injected")
        super()._to_host(handle)


def test_submissions_return_at_once_and_end_in_order() -> None:
    device = MhaDevicePool(8, 4, 2, 1, 4)
    engine = GatedEngine(device, MhaHostPool(device, 8))
    engine.failing = {1}
    handles = [engine.submit_backup(pages(page), pages(page)) for page in range(3)]
    assert not any(handle.done for handle in handles)
    assert engine.take_done() == []
    # The other direction does not wait for this one.
    load = engine.submit_load(pages(7), pages(7))
    load.wait()
    assert engine.take_done() == [load]
    assert engine.running == 3
    engine.gate.set()
    handles[2].wait()
    with pytest.raises(CopyError, match="backup copy of 1 pages failed: injected"):
        handles[1].wait()
    taken = []
    while engine.running:
        taken += engine.take_done(wait=True)
    assert taken == handles
    assert [handle.error is None for handle in handles] == [True, False, True]
    assert engine.take_done(wait=True) == []
    engine.close()
    engine.close()


def test_lists_of_different_lengths() -> None:
    device = MhaDevicePool(8, 4, 2, 1, 4)
    engine = CpuCopyEngine(device, MhaHostPool(device, 8))
    with pytest.raises(ArgumentError, match="2 device pages and 1 host pages"):
        engine.submit_load(pages(1, 2), pages(1))
    assert engine.running == 0
    engine.submit_backup(pages(), pages()).wait()
    engine.close()


def test_close_ends_what_has_not_begun() -> None:
    device = MhaDevicePool(8, 4, 2, 1, 4)
    engine = GatedEngine(device, MhaHostPool(device, 8))
    running, queued = (engine.submit_backup(pages(page), pages(page)) for page in range(2))
    assert engine.entered.wait(30)
    assert engine.take_done(wait=True, timeout=0.01) == []
    engine.close()
    assert queued.done
    with pytest.raises(ClosedError, match="before this copy began"):
        queued.wait()
    engine.gate.set()
    running.wait()
