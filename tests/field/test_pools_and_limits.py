"""Limits of systems and drivers, sizes that can not be: field cases 53, 54, 55, and 1 for the pools."""

import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.registrar import MIB, FakeRegistrar
from unified_cache import ArgumentError, CacheConfig, CapacityError
from unified_cache.pools import device as device_module
from unified_cache.pools import host as host_module
from unified_cache.pools import host_memory
from unified_cache.pools.allocator import PageAllocator
from unified_cache.pools.device import MhaDevicePool, MlaDevicePool
from unified_cache.pools.host import HostPool, host_pages_for
from unified_cache.pools.host_memory import HostMemory
from unified_cache.pools.layouts import HOST_LAYOUTS


def mib_pages() -> MlaDevicePool:
    """A device pool whose pages have half a MiB."""
    return MlaDevicePool(2, 256, 2, 256)


def names(registrar: FakeRegistrar) -> list[tuple[str, int]]:
    """The calls with the number of the piece that each one was for."""
    order = list(dict.fromkeys(address for _, address, _ in registrar.calls))
    return [(name, order.index(address) + 1) for name, address, _ in registrar.calls]


def assert_one_range(pool: HostPool) -> None:
    """Its bytes can be used from the first to the last, and its pieces cover them without a gap."""
    for page in range(pool.num_pages):
        pool.page_view(page)[:] = bytes([page % 251]) * pool.page_bytes
    raw = pool.data.view(torch.uint8).flatten()
    assert raw[:: pool.page_bytes].tolist() == [page % 251 for page in range(pool.num_pages)]
    at = pool.data.data_ptr()
    for address, size in pool.pieces:
        assert address == at
        at += size
    assert at == pool.data.data_ptr() + pool.num_pages * pool.page_bytes


# Case 53: limits of the driver and of the system


def test_case_53_pieces_that_the_driver_allows() -> None:
    """Fault: the pool is registered in one call, which is above a driver's limit: it can not start.

    Right: 10 MiB with at most 4 MiB a call are 3 pieces, 4 + 4 + 2, and the pool is one range.
    """
    registrar = FakeRegistrar(most=4 * MIB)
    pool = HostPool(mib_pages(), 20, memory=HostMemory(host_register_chunk=4 * MIB), registrar=registrar)
    assert [size for _, size in pool.pieces] == [4 * MIB, 4 * MIB, 2 * MIB]
    assert pool.registered
    assert_one_range(pool)
    pool.close()
    assert registrar.registered == {}


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_case_53_any_limit(layout: str) -> None:
    """Any limit, pool and layout: pieces within it, in order, without a gap, all given back."""
    rng = random.Random(layout)
    for _ in range(25):
        most = rng.randrange(4096, 40_000)
        registrar = FakeRegistrar(most)
        device = MhaDevicePool(1, rng.randint(1, 9), rng.randint(1, 3), 2, rng.randint(1, 70), torch.float16)
        pool = HostPool(
            device,
            rng.randint(1, 60),
            layout=layout,
            memory=HostMemory(host_register_chunk=most, pinned="require"),
            registrar=registrar,
        )
        size = pool.num_pages * pool.page_bytes
        assert sum(length for _, length in pool.pieces) == size
        assert all(length <= most for _, length in pool.pieces)
        assert len(pool.pieces) <= -(-size // 4096)
        assert registrar.registered == dict(pool.pieces)
        if pool.contiguous_pages:
            assert_one_range(pool)
        pool.close()
        assert registrar.registered == {}


def test_case_53_nothing_can_be_registered() -> None:
    """Fault: start dies with a bare 'invalid argument'.

    Right: "auto" goes on with ordinary memory and one warning, "require" is refused; both say the size asked,
    the memory free, the memlock limit and the settings to change.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    said = [
        "0.010 GB of host memory can not be registered",
        "piece 1 of 3 (4194304 bytes) was refused: invalid argument",
        "Memory free: ",
        " GB; memlock limit (ulimit -l): " + memlock,
        "Make hicache_ratio or hicache_size smaller, make host_register_chunk=4194304 smaller",
        "pinned='off'",
    ]
    registrar = FakeRegistrar(most=0)
    options: dict[str, Any] = {"host_register_chunk": 4 * MIB}
    with pytest.warns(RuntimeWarning) as caught:
        pool = HostPool(mib_pages(), 20, memory=HostMemory(**options), registrar=registrar)
    assert len(caught) == 1
    for part in [*said, "Going on with ordinary memory"]:
        assert part in str(caught[0].message)
    assert not pool.registered
    for page in range(20):
        pool.page_view(page)[:] = bytes([page]) * pool.page_bytes
    assert [pool.page_view(page)[-1] for page in range(20)] == list(range(20))
    pool.close()
    with pytest.raises(CapacityError) as refused:
        HostPool(mib_pages(), 20, memory=HostMemory(pinned="require", **options), registrar=registrar)
    for part in said:
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [name for name, _ in names(registrar)] == ["register"] * 2, "nothing else was tried"


def test_case_53_memory_and_limits_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    for found, said in {unlimited: "unlimited", (65536, 65536): "65536 bytes"}.items():
        monkeypatch.setattr(host_memory.resource, "getrlimit", lambda which, found=found: found)
        with pytest.raises(
            CapacityError, match=rf"Memory free: unknown; memlock limit \(ulimit -l\): {said}"
        ):
            HostPool(mib_pages(), 2, memory=HostMemory(pinned="require"), registrar=FakeRegistrar(most=0))


# Case 54: a piece fails


def test_case_54_a_piece_in_the_middle() -> None:
    """Fault: a failure in the middle leaves pieces registered, and the next attempt fails for that.

    Right: piece 3 of 4 fails: 2 and 1 are unregistered in that order, the error is raised once, and an
    attempt at half the size succeeds. When that is given back and one piece fails, the other one still is.
    """
    registrar = FakeRegistrar(refuse=lambda call: call == 3)
    options = HostMemory(host_register_chunk=4 * MIB, pinned="require")
    with pytest.raises(CapacityError, match=r"piece 3 of 4 .* was refused: invalid argument\. Memory"):
        HostPool(mib_pages(), 32, memory=options, registrar=registrar)
    assert names(registrar) == [
        ("register", 1),
        ("register", 2),
        ("register", 3),
        ("unregister", 2),
        ("unregister", 1),
    ]
    assert registrar.registered == {}

    registrar.stuck = lambda call: call == 3  # the first one of the second attempt
    pool = HostPool(mib_pages(), 16, memory=options, registrar=registrar)
    assert_one_range(pool)
    first, second = pool.pieces
    with pytest.warns(
        RuntimeWarning, match=r"^1 of 2 pieces .* stay pinned .* the driver is gone$"
    ) as caught:
        pool.close()
    assert len(caught) == 1
    assert registrar.calls[-2:] == [("unregister", *second), ("unregister", *first)]
    assert registrar.registered == dict([second])
    pool.close()


@pytest.mark.parametrize("pinned", ["auto", "require"])
@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_case_54_any_piece(count: int, pinned: Any) -> None:
    """Any failing piece of any number: those before it are undone backwards, those behind it not tried."""
    options = HostMemory(host_register_chunk=MIB, pinned=pinned)
    for failing in range(1, count + 1):
        registrar = FakeRegistrar(refuse=lambda call, failing=failing: call == failing)
        said = f"piece {failing} of {count}"
        if pinned == "require":
            with pytest.raises(CapacityError, match=said):
                HostPool(mib_pages(), 2 * count, memory=options, registrar=registrar)
        else:
            with pytest.warns(RuntimeWarning, match=said) as caught:
                pool = HostPool(mib_pages(), 2 * count, memory=options, registrar=registrar)
            assert len(caught) == 1
            assert pool.pieces == []
            pool.page_view(2 * count - 1)[-1] = 7
            pool.close()
        undone = [("unregister", piece) for piece in range(failing - 1, 0, -1)]
        assert names(registrar) == [("register", piece) for piece in range(1, failing + 1)] + undone
        assert registrar.registered == {}
        again = HostPool(
            mib_pages(), count, memory=HostMemory(host_register_chunk=MIB), registrar=FakeRegistrar()
        )
        assert again.registered


@pytest.mark.parametrize("pinned", ["auto", "require"])
def test_case_54_undoing_fails_too(pinned: Any) -> None:
    """The other pieces are undone all the same, and there is an error also with "auto": memory that is half
    registered is no ordinary memory."""
    registrar = FakeRegistrar(refuse=lambda call: call == 4, stuck=lambda call: call == 2)
    options = HostMemory(host_register_chunk=MIB, pinned=pinned)
    with pytest.raises(
        CapacityError, match=r"piece 4 of 5 .* Still registered, .*: 1048576 bytes at 0x.*is gone"
    ):
        HostPool(mib_pages(), 10, memory=options, registrar=registrar)
    assert names(registrar)[4:] == [("unregister", 3), ("unregister", 2), ("unregister", 1)]
    assert len(registrar.registered) == 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_case_54_any_unregistering(count: int) -> None:
    """Any set of pieces whose unregistering fails: every piece is tried once, and there is one warning."""
    for failing in range(1, 2**count):
        registrar = FakeRegistrar(stuck=lambda call, failing=failing: bool(failing >> (call - 1) & 1))
        pool = HostPool(
            mib_pages(), 2 * count, memory=HostMemory(host_register_chunk=MIB), registrar=registrar
        )
        stay = failing.bit_count()
        with pytest.warns(RuntimeWarning, match=rf"^{stay} of {count} pieces") as caught:
            pool.close()
        assert len(caught) == 1
        assert [piece for name, piece in names(registrar) if name == "unregister"] == list(
            range(count, 0, -1)
        )
        assert len(registrar.registered) == stay
        assert not pool.registered
        pool.close()
        assert [name for name, _ in names(registrar)].count("unregister") == count


# Case 55: sizes that can not be


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("memory was asked for")

    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(host_memory, "_map", refuse)


SIZES = {"num_pages": 4, "page_size": 4, "layers": 2, "heads": 2, "head_dim": 8}


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize("name", [*SIZES, "latent_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True])
def test_case_55_sizes_of_a_device_pool(name: str, value: Any) -> None:
    """Fault: a size that can not be is found out at the first request.

    Right: refused before anything is allocated, with its name and what is allowed.
    """
    allowed = {"num_pages": rf"in 1\.\.{2**32 - 1}", "page_size": r"in 1\.\.256"}.get(name, ">= 1")
    said = rf"^{name} must be an integer {allowed}, not {value!r}$"
    if name != "latent_dim":
        with pytest.raises(ArgumentError, match=said):
            MhaDevicePool(**(SIZES | {name: value}))
    if name not in ("heads", "head_dim"):
        latent: dict[str, Any] = {"num_pages": 4, "page_size": 4, "layers": 2, "latent_dim": 8}
        with pytest.raises(ArgumentError, match=said):
            MlaDevicePool(**(latent | {name: value}))


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize(
    "settings, said",
    [
        ({"page_size": 257}, r"page_size must be an integer in 1\.\.256, not 257"),
        ({"num_pages": 2**32}, r"num_pages must be an integer in 1\.\.4294967295, not 4294967296"),
        ({"layers": 2**40}, "does not fit this machine: .* GB are available; make num_pages smaller"),
        ({"head_dim": 10**30}, "does not fit this machine: .* GB are available; make num_pages smaller"),
        ({"head_dim": 10**30, "device": "cuda"}, "does not fit this machine; make num_pages smaller"),
    ],
)
def test_case_55_too_large_for_a_device(settings: dict[str, Any], said: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(device_module, "available_bytes", lambda: 10**9)
    with pytest.raises(ArgumentError, match=said):
        MhaDevicePool(**(SIZES | settings))


@pytest.mark.parametrize("page_size", [1, 3, 48, 255, 256])
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_case_55_sizes_that_can_be(page_size: int, layout: str) -> None:
    """Page sizes are any whole number from 1 to 256."""
    pool = HostPool(MhaDevicePool(2, page_size, 2, 1, 8, torch.bfloat16), 3, layout=layout)
    assert pool.planes.span_bytes <= 3 * pool.page_bytes == 3 * 2 * 2 * page_size * 16
    assert CacheConfig(page_size=page_size, host_layout=layout).page_size == page_size


@pytest.mark.parametrize(
    "ratio, size, said",
    [
        (2.0, -1.0, r"hicache_size=-1 \(GB\) is less than one page of 1024 bytes: make it larger"),
        (2.0, 0.0, r"hicache_size=0 \(GB\) is less than one page"),
        (2.0, 1023e-9, "is less than one page of 1024 bytes: make it larger, or set write_policy=None"),
        (-1.0, None, "hicache_ratio=-1 is less than one page"),
        (0.1, None, r"hicache_ratio=0\.1 is less than one page"),
        (
            10.0,
            None,
            r"hicache_ratio=10 asks for 0\.000 GB of memory, 0\.000 GB are available: make it smaller",
        ),
        (2.0, 50.0, r"hicache_size=50 \(GB\) asks for 50\.000 GB of memory, 0\.000 GB are available"),
    ],
)
@pytest.mark.usefixtures("no_room")
def test_case_55_sizes_of_the_host_tier(ratio: float, size: float | None, said: str) -> None:
    """Fault: a host tier of a size that can not be starts, and fails at the first request.

    Right: refused before anything is allocated; the message names the setting.
    """
    device = MhaDevicePool(8, 4, 2, 2, 8)
    assert device.page_bytes == 1024
    with pytest.raises(ArgumentError, match=said):
        host_pages_for([device], ratio, size)
    assert host_pages_for([device], 2.0, None) == 16
    assert host_pages_for([device], 2.0, 1024e-9) == 1


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "available_bytes", lambda: 40 * 1024)


def test_case_55_more_pages_than_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "available_bytes", lambda: None)
    with pytest.raises(
        ArgumentError, match=r"hicache_size=10000 .* host pages, allowed are at most 4294967295"
    ):
        host_pages_for([MlaDevicePool(1, 1, 1, 1)], 2.0, 10_000)


# Case 1, for what hands pages out


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_case_1_pages_handed_out_own_their_memory() -> None:
    """Fault: the array handed out is a window on the free list, and each one keeps a whole old list alive.

    Right: it owns its memory, and no later call changes it.
    """
    pages = PageAllocator(1 << 20, "host")
    kept, values = [], []

    def once() -> None:
        kept.append(pages.alloc(128))
        values.append(kept[-1].tolist())
        pages.free(pages.alloc(128))

    once()
    before = rss()
    for _ in range(200):
        once()
    # The index data is 200 * 512 bytes; a window a round would be 800 MiB.
    assert rss() - before < 8 << 20
    assert all(array.base is None and array.nbytes == 128 * 4 for array in kept)
    assert [array.tolist() for array in kept] == values
    assert len({page for row in values for page in row}) == 201 * 128
    for array in kept[::2]:
        pages.free(array)
    pages.reset(np.concatenate(kept[1::2]))
    assert [array.tolist() for array in kept] == values
    pages.check()
