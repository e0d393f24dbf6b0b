"""Shapes and memory of the pools, and how much memory the machine has left."""

from pathlib import Path

import pytest
import torch

from unified_cache import ArgumentError
from unified_cache.pools.device import MhaDevicePool, word_type
from unified_cache.pools.host import MhaHostPool, host_pages_for
from unified_cache.pools.memory import available_bytes


def test_the_device_pool_s_views() -> None:
    pool = MhaDevicePool(5, 4, 3, heads=2, head_dim=8, dtype=torch.bfloat16)
    assert pool.data.shape == (2, 3, 5, 4, 2, 8)
    assert pool.k(1).shape == pool.v(1).shape == (5, 4, 2, 8)
    pool.k(1)[2, 3] = 1.5
    pool.v(2)[0, 0] = -1
    assert (pool.data[0, 1, 2, 3] == 1.5).all()
    assert (pool.data[1, 2, 0, 0] == -1).all()
    assert pool.page_bytes == 2 * 3 * 4 * 2 * 8 * 2
    assert pool.page_bytes * 5 == pool.data.numel() * 2


@pytest.mark.parametrize(
    "row, dtype", [(16, torch.int64), (12, torch.int32), (6, torch.int16), (3, torch.uint8)]
)
def test_words(row: int, dtype: torch.dtype) -> None:
    assert word_type(row) is dtype


def test_a_host_page_is_contiguous_and_shared() -> None:
    device = MhaDevicePool(3, 4, 2, heads=1, head_dim=3, dtype=torch.float32)
    host = MhaHostPool(device, 6)
    assert host.data.shape == (6, 2, 4, 2, 1, 3)
    view = host.page_view(5)
    assert view.nbytes == device.page_bytes
    host.data[5] = torch.arange(48, dtype=torch.float32).view(2, 4, 2, 1, 3)
    assert view.cast("f").tolist() == list(range(48))
    view.cast("f")[47] = -7.0
    assert host.data[5, 1, 3, 1, 0, 2] == -7
    for page in (-1, 6):
        with pytest.raises(ArgumentError, match=rf"host page {page} is not in 0\.\.5"):
            host.page_view(page)


def test_host_pages() -> None:
    device = MhaDevicePool(10, 4, 2, heads=1, head_dim=3)
    assert host_pages_for(device, 2.5, None) == 25
    assert host_pages_for(device, 2.5, 3 * device.page_bytes / 1e9) == 3


class Machine:
    """The files of a machine, as far as they are read."""

    def __init__(self, root: Path, available_kib: int = 1000) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 5 kB\nMemAvailable:    {available_kib} kB\n")

    def write(self, name: str, text: str | int) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


def test_memory_of_the_machine(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    Machine(tmp_path)
    assert available_bytes(tmp_path) == 1000 * 1024
    here = available_bytes()
    assert here is None or here > 0


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.write("sys/fs/cgroup/a/b/memory.max", "max")
    machine.write("sys/fs/cgroup/a/b/memory.current", 5)
    assert available_bytes(tmp_path) == 1000 * 1024
    machine.write("sys/fs/cgroup/a/memory.max", 5000)
    machine.write("sys/fs/cgroup/a/memory.current", 4000)
    assert available_bytes(tmp_path) == 1000
    machine.write("sys/fs/cgroup/a/memory.stat", "anon 7\ninactive_file 300\n")
    assert available_bytes(tmp_path) == 1300


def test_memory_of_an_old_control_group_in_a_container(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/self/cgroup", "3:cpu:/x\n4:memory:/docker/abc\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 2000)
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 2500)
    assert available_bytes(tmp_path) == 0
