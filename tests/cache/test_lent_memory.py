"""Host pools in memory that a storage lends: whose it is, how long it is there, and what if there is none."""

import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.registrar import MIB, FakeRegistrar
from tests.cache.support import PAGE, assert_nothing_held, make_cache, make_pool, serve, toks
from tests.cache.test_host_memory import smaps
from unified_cache import ArgumentError, StorageError
from unified_cache.pools import host_memory, numa
from unified_cache.pools.device import MlaDevicePool
from unified_cache.pools.host import HostPool
from unified_cache.pools.host_memory import HostMemory, MappedMemory
from unified_cache.storage.backends.memory import MemoryBackend


class Region(mmap.mmap):
    """Memory whose end can be seen."""


def region(size: int) -> memoryview:
    return memoryview(Region(-1, size))


class Lender(MemoryBackend):
    """Lends what a test says, and keeps what it was asked for."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.asked: list[int] = []
        self.lent: list[memoryview] = []
        self.registered: list[memoryview] = []

    def host_memory(self, size: int) -> memoryview | None:
        self.asked.append(size)
        if self.fails:
            raise StorageError("no room at all")
        self.lent.append(region(size))
        return self.lent[-1]

    def register(self, memory: memoryview) -> None:
        self.registered.append(memory)


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


# A pool


def test_a_pool_lies_in_it_and_holds_it() -> None:
    lent: list[Any] = []

    def lend(size: int) -> memoryview:
        whole = Region(-1, size)
        lent.append(weakref.ref(whole))
        return memoryview(whole)

    pool = HostPool(MlaDevicePool(4, 16, 2, 64), 8, lend=lend)
    assert pool.lent
    assert pool.data.data_ptr() == address(memoryview(lent[0]()))
    assert pool.memory.nbytes == 8 * pool.page_bytes
    planes = pool.planes
    pool.close()
    del pool
    gc.collect()
    assert lent[0]() is not None, "somebody still holds it"
    planes.tensors[0].fill_(7)
    del planes
    gc.collect()
    assert lent[0]() is None


def test_without_a_lender_or_what_it_gives_it_is_the_pool_s_own() -> None:
    for lend in (None, lambda size: None):
        pool = HostPool(MlaDevicePool(4, 16, 2, 64), 8, lend=lend)
        assert not pool.lent
        pool.data.fill_(1)
        pool.close()


def test_it_is_registered_in_pieces_and_unregistered_before_it_goes() -> None:
    registrar = FakeRegistrar()
    pool = HostPool(
        MlaDevicePool(2, 256, 2, 256),  # half a MiB a page
        6,
        memory=HostMemory(host_register_chunk=MIB),
        registrar=registrar,
        lend=region,
    )
    assert [size for _, size in pool.pieces] == [MIB] * 3
    assert pool.pieces[0][0] == pool.data.data_ptr()
    data = pool.data
    del pool
    gc.collect()
    assert registrar.registered
    # The fake reads what it unregisters: it must still be there.
    del data
    gc.collect()
    assert registrar.registered == {}


def test_a_child_process_does_not_get_it() -> None:
    # It is shared with others: what a child wrote there would be in our pages.
    memory = MappedMemory(MIB, HostMemory(), lend=region)
    assert "dc" in smaps(memory.address)["VmFlags"].split()


def test_sizes_that_are_no_multiple_of_anything() -> None:
    memory = MappedMemory(12_345, HostMemory(), lend=region)
    assert memory.size == memory.buffer.nbytes == 12_345
    memory.buffer[-1] = 1


@pytest.mark.parametrize(
    "given, message",
    [
        (lambda size: region(size + 1), "4097 bytes"),
        (lambda size: region(4 * size)[::4], "contiguous=False"),
        (lambda size: memoryview(bytes(size)), "readonly=True"),
        (lambda size: region(size + 8)[8:], "multiple of 4096"),
    ],
)
def test_memory_that_can_not_be_used(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MappedMemory(4096, HostMemory(), lend=given)


def test_nobody_is_asked_for_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.pools.host_memory.available_bytes", lambda: 4096)

    def lend(size: int) -> memoryview:
        raise AssertionError("memory was asked for")

    with pytest.raises(ArgumentError, match="are available"):
        MappedMemory(8192, HostMemory(), lend=lend)


def test_memory_that_children_can_not_be_kept_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_MADV_DONTFORK", 12345)
    with pytest.warns(RuntimeWarning, match="can not be kept from forked processes .*Invalid argument"):
        MappedMemory(4096, HostMemory(), lend=region)


def test_huge_pages_can_not_be_asked_for_it() -> None:
    with pytest.warns(RuntimeWarning, match="huge_pages=True has no effect on memory that a storage lends"):
        MappedMemory(4096, HostMemory(huge_pages=True), lend=region)


def policy() -> tuple[int, int]:
    """Where this thread's memory comes from: a mode, and the first of its nodes."""
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    numa._call(
        "get_mempolicy",
        ctypes.byref(mode),
        nodes,
        ctypes.c_ulong(1024),
        ctypes.c_void_p(None),
        ctypes.c_ulong(0),
    )
    return mode.value, nodes[0]


@pytest.mark.skipif(not numa.nodes(), reason="a machine that does not list its nodes")
def test_a_node_is_asked_for_while_it_is_made() -> None:
    seen = []

    def lend(size: int) -> memoryview:
        seen.append(policy())
        return region(size)

    try:
        before = policy()
        with numa.preferring(0):
            pass
    except OSError as error:
        pytest.skip(f"a container that forbids the call: {error}")
    MappedMemory(4096, HostMemory(numa_node=0), lend=lend)
    assert seen == [(numa._MPOL_PREFERRED, 1)]
    assert policy() == before
    with numa.preferring(0):  # what a thread has asked for itself comes back, also after an error
        with pytest.raises(ZeroDivisionError), numa.preferring(0):
            _ = 1 / 0
        assert policy() == (numa._MPOL_PREFERRED, 1)
    assert policy() == before


# A cache


def test_a_cache_asks_for_each_of_its_pools() -> None:
    lender = Lender()
    with make_cache([make_pool(16), make_pool(16, layers=2)], storage=lender) as cache:
        assert lender.asked == [pool.memory.nbytes for pool in cache.host_pools]
        assert [address(memory) for memory in lender.registered] == [
            address(memory) for memory in lender.lent
        ]
        serve(cache, toks(12 * PAGE + 1))
        assert cache.flush(30)
        cache.reset()
        serve(cache, toks(12 * PAGE + 1))
        assert_nothing_held(cache)


def test_a_cache_goes_on_with_it_after_its_storage() -> None:
    lender = Lender()
    ends = []
    with make_cache(8, storage=lender) as cache:
        ends = [weakref.ref(memory.obj) for memory in lender.lent]
        serve(cache, toks(6 * PAGE + 1))
        assert cache.detach_storage()
        lender.lent.clear()
        lender.registered.clear()
        gc.collect()
        serve(cache, toks(6 * PAGE + 1, 500))
        assert serve(cache, toks(6 * PAGE + 1))[:2] != (0, 0)
        assert_nothing_held(cache)
    del cache
    gc.collect()
    assert [end() for end in ends] == [None]


def test_a_cache_whose_storage_has_none_serves_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    lender = Lender(fails=True)
    with make_cache([make_pool(16), make_pool(16)], storage=lender) as cache:
        assert not any(pool.lent for pool in cache.host_pools)
        serve(cache, toks(12 * PAGE + 1))
        assert_nothing_held(cache)
    assert len(lender.asked) == 1
    assert caplog.text.count("storage memory lends no memory") == 1
    assert "no room at all" in caplog.text


def test_a_storage_that_comes_later_is_not_asked() -> None:
    lender = Lender()
    with make_cache(16) as cache:
        cache.attach_storage(lender)
        assert lender.asked == []
        assert len(lender.registered) == 1


def test_a_cache_that_can_not_be_made_lets_it_go() -> None:
    lender = Lender()

    def copies(*pools: object) -> Any:
        raise RuntimeError("no copies")

    with pytest.raises(RuntimeError, match="no copies"):
        make_cache(16, storage=lender, copies=copies)
    (end,) = [weakref.ref(memory.obj) for memory in lender.lent]
    lender.lent.clear()
    gc.collect()
    assert end() is None


def test_bytes_in_it_are_the_pool_s() -> None:
    lender = Lender()
    with make_cache(16, storage=lender) as cache:
        serve(cache, toks(12 * PAGE + 1))
        assert cache.flush(30)
        (pool,) = cache.host_pools
        assert torch.frombuffer(lender.lent[0], dtype=torch.uint8).any()
        assert bytes(pool.memory) == bytes(lender.lent[0])
