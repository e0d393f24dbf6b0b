"""The memory of a host pool: where it comes from, and that it is registered all or not at all."""

import ctypes
import errno
import gc
import mmap
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.registrar import MIB, FakeRegistrar
from unified_cache import ArgumentError, CapacityError
from unified_cache.pools import host, host_memory, numa, pinning
from unified_cache.pools.device import MlaDevicePool
from unified_cache.pools.host import HostPool
from unified_cache.pools.host_memory import HostMemory, MappedMemory
from unified_cache.pools.pinning import CudaRegistrar, Registration, pieces_of


def smaps(address: int) -> dict[str, str]:
    """What the system says of the mapping that this address lies in."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            if inside:
                break
            first, _, last = name.partition("-")
            inside = int(first, 16) <= address < int(last, 16)
        elif inside:
            found[name.rstrip(":")] = rest.strip()
    return found


def all_there(memory: MappedMemory) -> bool:
    """Every page of the system in this range has memory of its own already."""
    pages = -(-memory.size // mmap.PAGESIZE)
    state = np.zeros(pages, np.uint8)
    libc = ctypes.CDLL(None)
    at, size = ctypes.c_void_p(memory.address), ctypes.c_size_t(memory.size)
    assert libc.mincore(at, size, ctypes.c_void_p(state.ctypes.data)) == 0
    return bool((state & 1).all())


# Options


@pytest.mark.parametrize(
    "options, said",
    [
        ({"pinned": True}, "pinned must be one of 'auto', 'require', 'off', not True"),
        (
            {"host_register_chunk": 4095},
            r"host_register_chunk must be an integer >= 4096 \(bytes\), not 4095",
        ),
        ({"host_register_chunk": 1e9}, "host_register_chunk must be"),
        ({"huge_pages": 1}, "huge_pages must be True, False or 'auto', not 1"),
        ({"numa_node": -1}, "numa_node must be an integer >= 0, 'auto' or None, not -1"),
        ({"numa_node": "all"}, "numa_node must be .* not 'all'"),
        ({"numa_node": 5}, r"numa_node must be one of this machine's \(0, 2\), not 5"),
        ({"touch_threads": 0}, "touch_threads must be an integer >= 1, not 0"),
        ({"touch_threads": True}, "touch_threads must be an integer >= 1, not True"),
    ],
)
def test_options_that_are_refused(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "nodes", lambda: [0, 2])
    HostMemory(numa_node=2)
    with pytest.raises(ArgumentError, match=said):
        HostMemory(**options)


def test_a_machine_that_does_not_list_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "nodes", list)
    assert HostMemory(numa_node=5).numa_node == 5


def test_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"make hicache_ratio or hicache_size smaller"):
        MappedMemory(2**60, HostMemory())
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 10_000_000)
    with pytest.raises(ArgumentError, match=r"0\.020 GB of host memory asked for, 0\.010 GB are available"):
        MappedMemory(20_000_000, HostMemory())
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    for size in (2**62, 2**64):
        with pytest.raises(
            ArgumentError, match=rf"{size} bytes of host memory can not be mapped \(.*\): make hi"
        ):
            MappedMemory(size, HostMemory())


# Touching


@pytest.fixture(params=["populate", "older system"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "older system":
        monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 12345)  # it says EINVAL
    return str(request.param)


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_every_byte_has_its_memory_before_it_is_used(
    system: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH_BYTES", MIB)
    size = 5 * MIB + 12_345
    memory = MappedMemory(size, HostMemory(touch_threads=threads))
    assert memory.size == size == len(memory.buffer)
    assert all_there(memory)
    assert memory.address % 4096 == 0
    assert not np.frombuffer(memory.buffer, np.uint8).any()


def test_touching_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH_BYTES", MIB)

    class Libc:
        def __init__(self, name: None, use_errno: bool) -> None:
            pass

        def madvise(self, address: Any, length: Any, advice: int) -> int:
            host_memory.ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(host_memory.ctypes, "CDLL", Libc)
    for threads in (1, 2):
        with pytest.raises(
            CapacityError, match=r"can not be had .*Cannot allocate memory.*: make hicache_ratio"
        ):
            MappedMemory(4 * MIB, HostMemory(touch_threads=threads))


# Huge pages


@pytest.fixture
def transparent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "enabled"
    monkeypatch.setattr(host_memory, "_HUGE_PAGES", path)
    return path


@pytest.mark.skipif(not host_memory._HUGE_PAGES.exists(), reason="a system without huge pages")
def test_huge_pages_are_asked_for(transparent: Path) -> None:
    transparent.write_text("always [madvise] never\n")
    for options in (HostMemory(), HostMemory(huge_pages=True)):
        asked = MappedMemory(4 * MIB, options)
        assert "hg" in smaps(asked.address)["VmFlags"].split()
    ordinary = MappedMemory(4 * MIB, HostMemory(huge_pages=False))
    assert "hg" not in smaps(ordinary.address)["VmFlags"].split()


def test_no_huge_pages(transparent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transparent.write_text("always madvise [never]\n")
    with pytest.warns(RuntimeWarning, match="huge_pages=True: no huge pages .*'never'.*ordinary") as caught:
        memory = MappedMemory(MIB, HostMemory(huge_pages=True))
    assert len(caught) == 1
    assert all_there(memory)
    transparent.unlink()
    monkeypatch.setattr(host_memory.mmap, "MADV_HUGEPAGE", 12345)
    with pytest.warns(RuntimeWarning, match="huge_pages=True: no huge pages .*Invalid argument") as caught:
        MappedMemory(MIB, HostMemory(huge_pages=True))
    assert len(caught) == 1
    with warnings.catch_warnings(record=True) as nothing:
        assert all_there(MappedMemory(MIB, HostMemory()))
    assert not nothing


# NUMA


def test_nodes_of_the_machine(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path) == []
    for name in ("node0", "node10", "node2", "possible", "nodes"):
        (tmp_path / "sys/devices/system/node" / name).mkdir(parents=True)
    assert numa.nodes(tmp_path) == [0, 2, 10]


@pytest.mark.skipif(0 not in numa.nodes(), reason="the machine does not list its NUMA nodes")
def test_memory_of_a_node() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memory = MappedMemory(MIB, HostMemory(numa_node=0))
    ranges = [line.split()[:2] for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    policy = [policy for start, policy in ranges if int(start, 16) <= memory.address][-1]
    # A container may forbid the call: then there was one warning.
    assert (policy, len(caught)) in [("prefer:0", 0), ("prefer=static:0", 0), ("default", 1)]


def test_a_node_that_can_not_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "nodes", list)
    with pytest.warns(
        RuntimeWarning, match=r"numa_node=700: memory of node 700 can not be asked for"
    ) as caught:
        memory = MappedMemory(MIB, HostMemory(numa_node=700))
    assert len(caught) == 1
    assert all_there(memory)
    monkeypatch.setattr(numa.platform, "machine", lambda: "abacus")
    with pytest.raises(OSError, match="on abacus"):
        numa.prefer_node(memory.address, MIB, 0)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, **properties: int) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    return torch.device("cuda", 1)


def test_the_node_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretend_gpu(monkeypatch, pci_domain_id=1, pci_bus_id=0xAB, pci_device_id=2)
    path = tmp_path / "sys/bus/pci/devices/0001:ab:02.0/numa_node"
    with pytest.raises(OSError, match="0001:ab:02"):
        numa.node_of_device(gpu, tmp_path)
    path.parent.mkdir(parents=True)
    for said, node in {"1\n": 1, "-1\n": None}.items():
        path.write_text(said)
        assert numa.node_of_device(gpu, tmp_path) == node
    path.write_text("?")
    with pytest.raises(OSError, match="can not be read"):
        numa.node_of_device(gpu, tmp_path)
    with pytest.raises(OSError, match="this torch does not know"):
        numa.node_of_device(pretend_gpu(monkeypatch, pci_bus_id=1), tmp_path)


def test_auto_asks_for_the_device_s_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(numa, "prefer_node", lambda address, size, node: asked.append(node))
    monkeypatch.setattr(numa, "node_of_device", lambda device: {0: 3, 1: None}[device.index])
    auto = HostMemory(numa_node="auto")
    for device in (None, torch.device("cpu"), torch.device("cuda", 1)):
        MappedMemory(MIB, auto, device=device)
    assert asked == []
    MappedMemory(MIB, auto, device=torch.device("cuda", 0))
    assert asked == [3]

    def unknown(device: torch.device) -> int:
        raise OSError("hidden")

    monkeypatch.setattr(numa, "node_of_device", unknown)
    with pytest.warns(RuntimeWarning, match="numa_node='auto': the node of cuda:0 is not known") as caught:
        MappedMemory(MIB, auto, device=torch.device("cuda", 0))
    assert len(caught) == 1
    assert asked == [3]


# Registration


def test_pieces() -> None:
    assert pieces_of(100, 10, 4, 1) == [(100, 4), (104, 4), (108, 2)]
    assert pieces_of(100, 10, 5, 2) == [(100, 4), (104, 4), (108, 2)]
    assert pieces_of(100, 8, 4, 4) == [(100, 4), (104, 4)]
    assert pieces_of(100, 3, 4, 1) == [(100, 3)]


def test_a_page_of_the_pool_is_not_cut_where_that_can_be() -> None:
    registrar = FakeRegistrar()
    options = HostMemory(host_register_chunk=10 * 4096)
    memory = MappedMemory(100 * 4096, options, unit=3 * 4096, registrar=registrar)
    assert {size for _, size in memory.pieces} == {9 * 4096, 4096}
    # 4,000 bytes: 125 pages of the system are the least that both divide, and that is too much.
    memory = MappedMemory(100 * 4096, options, unit=4000, registrar=registrar)
    assert {size for _, size in memory.pieces} == {10 * 4096}


def test_nothing_is_registered_when_that_is_off_or_there_is_no_gpu() -> None:
    registrar = FakeRegistrar()
    device = MlaDevicePool(4, 16, 2, 64)
    pool = HostPool(device, 8, memory=HostMemory(pinned="off"), registrar=registrar)
    assert not pool.registered
    assert registrar.calls == []
    for pinned in ("auto", "require"):
        assert not HostPool(device, 8, memory=HostMemory(pinned=pinned)).registered  # type: ignore[arg-type]


def test_a_pool_of_a_cuda_device_is_registered_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    registrar = FakeRegistrar()

    def cuda(device: torch.device) -> FakeRegistrar:
        made.append(device)
        return registrar

    monkeypatch.setattr(host, "CudaRegistrar", cuda)
    device = MlaDevicePool(4, 16, 2, 64)
    device.device = torch.device("cuda", 3)
    assert not HostPool(device, 8, memory=HostMemory(pinned="off")).registered
    assert made == []
    pool = HostPool(device, 8)
    assert made == [torch.device("cuda", 3)]
    assert pool.pieces == [(pool.data.data_ptr(), 8 * pool.page_bytes)]
    assert pool.registered


def test_registered_memory_is_unregistered_before_it_goes() -> None:
    registrar = FakeRegistrar()
    pool = HostPool(MlaDevicePool(4, 16, 2, 64), 8, registrar=registrar)
    planes = pool.planes
    del pool
    gc.collect()
    assert registrar.registered, "somebody still holds it"
    # When it is unregistered it must still be there: the fake reads it.
    del planes
    gc.collect()
    assert registrar.registered == {}
    assert [name for name, *_ in registrar.calls] == ["register", "unregister"]


def test_a_forked_child_leaves_its_parent_s_pieces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = FakeRegistrar()
    memory = MappedMemory(4 * MIB, HostMemory(), registrar=registrar)
    assert "dc" in smaps(memory.address)["VmFlags"].split(), "not copied to a child"
    ordinary = MappedMemory(4 * MIB, HostMemory())
    assert "dc" not in smaps(ordinary.address)["VmFlags"].split()
    process = os.getpid()
    monkeypatch.setattr(pinning.os, "getpid", lambda: process + 1)
    memory.close()
    assert [name for name, *_ in registrar.calls] == ["register"]
    assert memory.pieces == []


def test_a_process_that_ends_without_close_says_nothing() -> None:
    code = """
from unified_cache.pools.host_memory import HostMemory, MappedMemory

class Gone:
    def register(self, address, size): pass
    def unregister(self, address): raise OSError("driver shutting down")

memory = MappedMemory(8192, HostMemory(), registrar=Gone())
assert memory.pieces
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


def test_an_interrupt_leaves_nothing_registered() -> None:
    class Interrupted(FakeRegistrar):
        def register(self, address: int, size: int) -> None:
            if len(self.registered) == 2:
                raise KeyboardInterrupt
            super().register(address, size)

    registrar = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        MappedMemory(4 * MIB, HostMemory(host_register_chunk=MIB), registrar=registrar)
    assert registrar.registered == {}
    assert len(registrar.calls) == 4


class Cudart:
    """CUDA's functions, as torch offers them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", address, size, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", address))
        return self.code

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"


def test_cuda_s_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, current = Cudart(), []
    forgotten: list[object] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *error: object) -> None:
            pass

    class Small:
        def fill_(self, value: int) -> None:
            forgotten.append(value)
            raise RuntimeError("CUDA error: the one from before")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", Device)
    gpu = torch.device("cuda", 1)
    registrar = CudaRegistrar(gpu)
    registrar.register(4096, 100)
    registrar.unregister(4096)
    assert cudart.calls == [("register", 4096, 100, 3), ("unregister", 4096)]
    assert current == [gpu, gpu]
    monkeypatch.setattr(torch, "empty", lambda *shape, device: Small())
    cudart.code = 712
    with pytest.raises(OSError, match="cudaHostRegister: error 712"):
        registrar.register(4096, 100)
    with pytest.raises(OSError, match="cudaHostUnregister: error 712"):
        registrar.unregister(4096)
    assert len(forgotten) == 2, "an error that CUDA remembers would be the next kernel's"


def test_a_registration_is_given_back_once() -> None:
    registrar = FakeRegistrar()
    memory = MappedMemory(8192, HostMemory())
    registration = Registration(registrar, pieces_of(memory.address, memory.size, 4096, 1))
    registration.release()
    registration.release()
    assert [name for name, *_ in registrar.calls] == ["register"] * 2 + ["unregister"] * 2
