"""Shapes and memory of the pools, and how much memory the machine has left."""

import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unified_cache import ArgumentError, CacheConfig, CapacityError, ClosedError
from unified_cache.pools.device import DevicePool, MhaDevicePool, MlaDevicePool
from unified_cache.pools.host import HostPool, host_pages_for
from unified_cache.pools.layouts import HOST_LAYOUTS, host_layout
from unified_cache.pools.memory import available_bytes
from unified_cache.pools.planes import PageShape, PoolPlanes

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]
if hasattr(torch, "float4_e2m1fn_x2"):  # two elements a byte: nothing but bytes works with it
    DTYPES.append(torch.float4_e2m1fn_x2)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    size = torch.empty(0, dtype=torch.uint8).view(dtype).element_size()
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * size, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in the order of their indices."""
    size = tensor.element_size()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.view(words).contiguous().numpy().tobytes()


# Device pools


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_views_of_keys_and_values(dtype: torch.dtype) -> None:
    pool = MhaDevicePool(5, 4, 3, heads=2, head_dim=8, dtype=dtype)
    size = pool.k(0).element_size()
    assert pool.kind == "mha"
    assert (pool.num_pages, pool.page_size, pool.layers, pool.heads, pool.head_dim) == (5, 4, 3, 2, 8)
    assert (pool.dtype, pool.device) == (dtype, torch.device("cpu"))
    assert pool.shape == PageShape(layers=3, parts=2, tokens=4, heads=2, run_bytes=8 * size)
    assert pool.page_bytes == 2 * 3 * 4 * 2 * 8 * size
    assert pool.data is not None
    assert pool.data.shape == (2, 3, 5, 4, 2, 8)
    assert not any(bytes_of(pool.data)), "zero at first"
    pool.data.view(torch.uint8).copy_(random_bytes(pool.data.shape, dtype).view(torch.uint8))
    for layer in range(3):
        assert pool.k(layer).shape == pool.v(layer).shape == (5, 4, 2, 8)
        assert bytes_of(pool.k(layer)) == bytes_of(pool.data[0, layer])
        assert bytes_of(pool.v(layer)) == bytes_of(pool.data[1, layer])
        assert pool.planes.addresses[layer].tolist() == [pool.k(layer).data_ptr(), pool.v(layer).data_ptr()]
    assert pool.planes.pages == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_views_of_latents(dtype: torch.dtype) -> None:
    pool = MlaDevicePool(5, 4, 3, latent_dim=9, dtype=dtype)
    size = pool.latent(0).element_size()
    assert pool.kind == "mla"
    assert (pool.num_pages, pool.page_size, pool.layers, pool.latent_dim) == (5, 4, 3, 9)
    assert pool.shape == PageShape(layers=3, parts=1, tokens=4, heads=1, run_bytes=9 * size)
    assert pool.page_bytes == 3 * 4 * 9 * size
    assert pool.data is not None
    assert pool.data.shape == (3, 5, 4, 9)
    pool.data.view(torch.uint8).copy_(random_bytes(pool.data.shape, dtype).view(torch.uint8))
    for layer in range(3):
        assert pool.latent(layer).shape == (5, 4, 9)
        assert bytes_of(pool.latent(layer)) == bytes_of(pool.data[layer])
        assert pool.planes.addresses[layer].tolist() == [pool.latent(layer).data_ptr()]


def test_layers_out_of_range() -> None:
    mha, mla = MhaDevicePool(2, 1, 3, 1, 1), MlaDevicePool(2, 1, 3, 1)
    for layer in (-1, 3):
        for view in (mha.k, mha.v, mla.latent):
            with pytest.raises(ArgumentError, match=rf"layer must be in 0\.\.2, not {layer}"):
                view(layer)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"dtype": "float32"}, "dtype must be a torch.dtype whose elements are bytes, not 'float32'"),
        ({"device": "nowhere"}, "device must be a CPU or CUDA device, not 'nowhere'"),
        ({"device": "meta"}, "device must be a CPU or CUDA device, not 'meta'"),
        ({"device": 1.5}, r"device must be a CPU or CUDA device, not 1\.5"),
    ],
)
def test_dtypes_and_devices_that_can_not_be_used(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        MhaDevicePool(4, 4, 2, 1, 8, **changed)
    with pytest.raises(ArgumentError, match=said):
        MlaDevicePool(4, 4, 2, 8, **changed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ArgumentError, match="device 'cuda' can not be used: "):
        MhaDevicePool(4, 4, 2, 1, 8, device="cuda")


@pytest.mark.parametrize("error", [MemoryError("no"), RuntimeError("allocator: no")])
def test_memory_that_the_system_refuses(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(CapacityError, match=r"of 512 bytes .* does not fit cpu, make num_pages smaller.*no"):
        MhaDevicePool(4, 4, 2, 1, 2)


# An engine's own tensors


def rows(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return tensors[0::2], tensors[1::2]


def test_engines_buffers_in_their_own_order() -> None:
    """Whatever the order of an engine's buffer, the pool is its views, without a copy."""
    L, N, P, H, D = 3, 5, 4, 2, 8  # noqa: N806
    shapes = {
        "2 L N P H D": ((2, L, N, P, H, D), (1, 0, 2, 3, 4, 5)),
        "N 2 L P H D": ((N, 2, L, P, H, D), (2, 1, 0, 3, 4, 5)),
        "L N 2 P H D": ((L, N, 2, P, H, D), (0, 2, 1, 3, 4, 5)),
        "L 2 N H P D": ((L, 2, N, H, P, D), (0, 1, 2, 4, 3, 5)),
        "N H L 2 P D": ((N, H, L, 2, P, D), (2, 3, 0, 4, 1, 5)),
    }
    for name, (shape, order) in shapes.items():
        buffer = random_bytes(shape, torch.bfloat16)
        by_layer = buffer.permute(order)
        pool = MhaDevicePool.from_tensors([k for k, _ in by_layer], [v for _, v in by_layer])
        assert (pool.num_pages, pool.page_size, pool.layers, pool.heads, pool.head_dim) == (N, P, L, H, D), (
            name
        )
        assert pool.data is None
        assert pool.shape == MhaDevicePool(N, P, L, H, D, torch.bfloat16).shape
        for layer in range(L):
            assert bytes_of(pool.k(layer)) == bytes_of(by_layer[layer, 0])
            assert bytes_of(pool.v(layer)) == bytes_of(by_layer[layer, 1])
        pool.k(2)[4, 3, 1, 7] = 1.25
        assert by_layer[2, 0, 4, 3, 1, 7] == 1.25, "it is the engine's memory"


def test_latents_of_an_engine() -> None:
    for shape in [(5, 4, 9), (5, 4, 1, 9)]:
        own = [random_bytes(shape, torch.float16, layer) for layer in range(3)]
        pool = MlaDevicePool.from_tensors(own)
        assert (pool.num_pages, pool.page_size, pool.layers, pool.latent_dim) == (5, 4, 3, 9)
        assert pool.shape == MlaDevicePool(5, 4, 3, 9, torch.float16).shape
        for layer in range(3):
            assert pool.latent(layer).shape == (5, 4, 9)
            assert pool.latent(layer).data_ptr() == own[layer].data_ptr()


def test_an_engine_s_tensors_live_as_long_as_the_pool() -> None:
    def make() -> MhaDevicePool:
        buffer = random_bytes((2, 3, 5, 4, 2, 8), torch.float16)
        return MhaDevicePool.from_tensors(list(buffer[0]), list(buffer[1]))

    pool = make()
    assert bytes_of(pool.v(2)) == bytes_of(random_bytes((2, 3, 5, 4, 2, 8), torch.float16)[1, 2])


class OnlyDlpack:
    """An array that offers DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **settings: Any) -> object:
        return self.tensor.__dlpack__(**settings)

    def __dlpack_device__(self) -> object:
        return self.tensor.__dlpack_device__()


def test_arrays_with_dlpack() -> None:
    own = [np.random.default_rng(at).standard_normal((5, 4, 2, 8)).astype(np.float32) for at in range(4)]
    pool = MhaDevicePool.from_tensors(*rows(own))  # type: ignore[arg-type]
    assert pool.dtype is torch.float32
    pool.v(1)[3, 2, 1, 5] = -7
    assert own[3][3, 2, 1, 5] == -7
    wrapped = [OnlyDlpack(random_bytes((5, 4, 2, 8), torch.bfloat16, at)) for at in range(4)]
    pool = MhaDevicePool.from_tensors(wrapped[0::2], wrapped[1::2])
    assert pool.k(1).data_ptr() == wrapped[2].tensor.data_ptr()
    assert MlaDevicePool.from_tensors([own[0][:, :, 0]]).latent_dim == 8


class FakeCuda:
    """Arrays on pretended CUDA devices: as torch does it, an array of another device is copied, unasked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
        self.where: dict[int, tuple[int, torch.Tensor]] = {}  # address -> device, memory
        self.copied = 0
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch, "as_tensor", self.as_tensor)

    def as_tensor(self, value: Any, *, device: torch.device) -> torch.Tensor:
        interface = value.__cuda_array_interface__
        lies_on, memory = self.where[interface["data"][0]]
        found = memory.flatten()[: int(np.prod(interface["shape"]))].view(interface["shape"])
        if device.index != lies_on:
            self.copied = max(self.copied, found.numel())
            found = found.clone()
        return found

    def array(self, device: int, shape: tuple[int, ...], *, dlpack: bool = False) -> Any:
        memory = random_bytes(shape, torch.float16, len(self.where))
        self.where[memory.data_ptr()] = (device, memory)
        interface = {"shape": shape, "typestr": "<f2", "data": (memory.data_ptr(), False), "version": 3}
        found: Any = type("Array", (), {"__cuda_array_interface__": interface})()
        if dlpack:
            type(found).__dlpack__ = lambda self, **settings: (_ for _ in ()).throw(BufferError("no float16"))
        return found


@pytest.mark.parametrize("dlpack", [False, True])
def test_arrays_with_cuda_array_interface(dlpack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch, devices=2)
    own = [fake.array(1, (5, 4, 2, 8), dlpack=dlpack) for _ in range(4)]
    pool = MhaDevicePool.from_tensors(own[0::2], own[1::2])
    addresses = [array.__cuda_array_interface__["data"][0] for array in own]
    assert pool.planes.addresses.ravel().tolist() == addresses
    assert fake.copied <= 1, "no array was copied to look where it lies"
    with pytest.raises(ArgumentError, match=r"latents\[0\] .* Array can not be used: it lies on no device"):
        MlaDevicePool.from_tensors([fake.array(3, (5, 4, 8))])
    own[0].__cuda_array_interface__["data"] = (addresses[0], True)
    with pytest.raises(ArgumentError, match=r"keys\[0\] .* can not be used: it is read-only"):
        MhaDevicePool.from_tensors(own[0::2], own[1::2])


def test_tensors_with_a_history() -> None:
    own = [torch.ones(5, 4, 2, 8, requires_grad=True) for _ in range(4)]
    pool = MhaDevicePool.from_tensors(*rows(own))
    pool.k(0)[0] = 3
    assert not pool.k(0).requires_grad
    assert own[0][0, 0, 0, 0] == 3


def made(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


ENGINES: dict[str, tuple[list[Any], list[Any], str]] = {
    "none": ([], [], "keys and values must be one for each layer, not none"),
    "lengths": ([made(2, 4, 1, 8)], [], "not 1 and 0"),
    "dimensions": ([made(2, 4, 8)], [made(2, 4, 8)], r"keys\[0\] must be \(num_pages, .* not \(2, 4, 8\)"),
    "type": ([made(2, 4, 1, 8)], [[1.0]], r"values\[0\] must be a torch tensor, .* list can not be used"),
    "shapes": ([made(2, 4, 1, 8)], [made(3, 4, 1, 8)], "must all be alike"),
    "dtypes": ([made(2, 4, 1, 8)], [made(2, 4, 1, 8, dtype=torch.float16)], "must all be alike"),
    "strides": ([made(2, 4, 2, 8)], [made(2, 2, 4, 8).transpose(1, 2)], "must all be alike"),
    "elements": ([made(2, 4, 8, 8).transpose(2, 3)] * 1, [made(2, 4, 8, 8)], "last dimension contiguous"),
    "empty": ([made(0, 4, 1, 8)], [made(0, 4, 1, 8)], "must have elements"),
    "page size": (
        [made(1, 257, 1, 1)],
        [made(1, 257, 1, 1)],
        r"page_size of keys and values .* 1\.\.256, not 257",
    ),
    "device": (
        [made(2, 4, 1, 8, device="meta")],
        [made(2, 4, 1, 8, device="meta")],
        "CPU or CUDA device, not 'meta'",
    ),
    "same": ([made(2, 4, 1, 8)] * 2, [made(2, 4, 1, 8), made(2, 4, 1, 8)], "one is given twice"),
    "expanded": (
        [made(1, 4, 1, 8).expand(2, 4, 1, 8)],
        [made(1, 4, 1, 8).expand(2, 4, 1, 8)],
        "must not overlap",
    ),
    "windows": (
        [made(64).as_strided((4, 4, 1, 8), (8, 8, 8, 1))],
        [made(64).as_strided((4, 4, 1, 8), (8, 8, 8, 1))],
        "must not overlap in themselves: a stride is 32 bytes",
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_tensors_that_make_no_pool(name: str) -> None:
    keys, values, said = ENGINES[name]
    with pytest.raises(ArgumentError, match=said):
        MhaDevicePool.from_tensors(keys, values)


def test_latents_that_make_no_pool() -> None:
    with pytest.raises(ArgumentError, match="latents must be one for each layer, not none"):
        MlaDevicePool.from_tensors([])
    with pytest.raises(ArgumentError, match=r"latents\[1\] must be .* not \(2, 4, 2, 8\)"):
        MlaDevicePool.from_tensors([made(2, 4, 8), made(2, 4, 2, 8)])
    read_only = np.zeros((2, 4, 8), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"latents\[0\] .* ndarray can not be used: it is read-only"):
        MlaDevicePool.from_tensors([read_only])


# Host layouts


def test_settings_know_every_layout() -> None:
    assert sorted(HOST_LAYOUTS) == ["layer_first", "page_first", "page_first_direct", "page_head"]
    for name in HOST_LAYOUTS:
        assert CacheConfig(page_size=4, host_layout=name).host_layout == name
        assert host_layout(name).name == name
    for refused in (lambda: CacheConfig(page_size=4, host_layout="rows"), lambda: host_layout("rows")):
        with pytest.raises(ArgumentError, match=r"host_layout must be one of 'page_first', .* not 'rows'"):
            refused()


def test_the_names_of_layouts_cost_no_torch() -> None:
    code = "import sys; from unified_cache import CacheConfig; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def documented(layout: str, page: PageShape, pages: int, elements: int) -> tuple[tuple[int, ...], np.ndarray]:
    """The shape that the documents give a layout, and where each element is in it: said a second time.

    Returns:
        The shape, and the number of each element by (layer, part, page, token, head, element).
    """
    L, P, H, N, D = page.layers, page.tokens, page.heads, pages, elements  # noqa: N806
    count = np.arange(L * page.parts * P * H * N * D)
    if page.parts == 1:
        shape = {
            "layer_first": (L, N, P, D),
            "page_first": (N, P, L, D),
            "page_first_direct": (N, L, P, D),
            "page_head": (N, P, L, D),
        }[layout]
        order = {
            "layer_first": "lntd->lntd",
            "page_first": "ntld->lntd",
            "page_first_direct": "nltd->lntd",
            "page_head": "ntld->lntd",
        }[layout]
        return shape, np.einsum(order, count.reshape(shape))[:, np.newaxis, :, :, np.newaxis]
    shape = {
        "layer_first": (2, L, N, P, H, D),
        "page_first": (N, 2, P, L, H, D),
        "page_first_direct": (N, 2, L, P, H, D),
        "page_head": (N, H, 2, P, L, D),
    }[layout]
    order = {
        "layer_first": "clnthd->lcnthd",
        "page_first": "nctlhd->lcnthd",
        "page_first_direct": "nclthd->lcnthd",
        "page_head": "nhctld->lcnthd",
    }[layout]
    return shape, np.einsum(order, count.reshape(shape))


def run_addresses(planes: PoolPlanes) -> np.ndarray:
    """Where each run begins, by (layer, part, page, token, head)."""
    shape = planes.shape
    steps = (planes.page_stride, planes.token_stride, planes.head_stride)
    counts = (planes.pages, shape.tokens, shape.heads)
    inner = sum(
        np.arange(count).reshape([-1 if at == axis else 1 for at in range(3)]) * step
        for axis, (count, step) in enumerate(zip(counts, steps, strict=True))
    )
    return planes.addresses.astype(np.int64)[:, :, None, None, None] + inner


def any_pool(rng: random.Random) -> DevicePool:
    page, layers, dim = rng.choice((1, 2, 3, 16)), rng.randint(1, 4), rng.choice((1, 3, 8, 17))
    dtype = rng.choice(DTYPES)
    if rng.random() < 0.5:
        return MlaDevicePool(2, page, layers, dim, dtype)
    return MhaDevicePool(2, page, layers, rng.randint(1, 4), dim, dtype)


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_planes_address_what_the_layout_says(layout: str) -> None:
    rng = random.Random(layout)
    for _ in range(40):
        device, pages = any_pool(rng), rng.randint(1, 6)
        host = HostPool(device, pages, layout=layout)
        page, size = host.shape, device.planes.tensors[0].element_size()
        assert page == device.shape
        assert host.page_bytes == device.page_bytes
        assert host.dtype is device.dtype
        shape, numbers = documented(layout, page, pages, page.run_bytes // size)
        assert host.data.shape == shape
        assert host.data.data_ptr() == host.planes.addresses.min()
        starts = run_addresses(host.planes) - host.data.data_ptr()
        np.testing.assert_array_equal(starts, numbers[..., 0] * size)
        # No two runs overlap, and there is no byte outside them.
        every = np.sort(starts.ravel())
        np.testing.assert_array_equal(every, np.arange(every.size) * page.run_bytes)
        assert every.size * page.run_bytes == pages * page.page_bytes
        # And that is where bytes are found.
        host.data.view(torch.uint8).copy_(
            random_bytes(shape, host.dtype, rng.randrange(99)).view(torch.uint8)
        )
        raw = np.frombuffer(bytes_of(host.data), np.uint8)
        for (layer, part), plane in zip(
            itertools.product(range(page.layers), range(page.parts)), host.planes.tensors, strict=True
        ):
            expected = raw.reshape(-1, size)[numbers[layer, part]]
            assert bytes_of(plane) == expected.tobytes()


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_pages_and_buffers_of_a_host_pool(layout: str) -> None:
    rng = random.Random(layout)
    for _ in range(20):
        device, pages = any_pool(rng), rng.randint(2, 6)
        host = HostPool(device, pages, layout=layout)
        page = host.shape
        host.data.view(torch.uint8).copy_(random_bytes(host.data.shape, host.dtype).view(torch.uint8))
        ids = [rng.randrange(pages) for _ in range(5)]
        buffers = host.get_page_buffers(np.array(ids, rng.choice((np.uint32, np.int64))))
        assert buffers.addresses.dtype == buffers.sizes.dtype == np.uint64
        assert buffers.sizes.sum() == host.page_bytes
        base, raw = host.data.data_ptr(), bytes_of(host.data)
        found = [
            [
                raw[start - base : start - base + size]
                for start, size in zip(row, buffers.sizes.tolist(), strict=True)
            ]
            for row in buffers.addresses.tolist()
        ]
        if layout == "layer_first":
            assert buffers.addresses.shape == (5, page.layers * page.parts)
            expected = [[bytes_of(plane[at]) for plane in host.planes.tensors] for at in ids]
            assert found == expected
            assert not host.contiguous_pages
            with pytest.raises(
                ArgumentError, match="host_layout='layer_first' has no contiguous pages to view"
            ):
                host.page_view(0)
        else:
            assert buffers.addresses.shape == (5, 1)
            assert found == [[bytes_of(host.data[at])] for at in ids]
            assert found == [[bytes(host.page_view(at))] for at in ids]
            assert host.contiguous_pages


def test_a_page_view_is_the_pool_s_memory() -> None:
    host = HostPool(MhaDevicePool(3, 4, 2, heads=1, head_dim=3, dtype=torch.float32), 6)
    view = host.page_view(5)
    view.cast("f")[47] = -7.0
    assert host.data[5, 1, 3, 1, 0, 2] == -7
    for page in (-1, 6):
        with pytest.raises(ArgumentError, match=rf"host page {page} is not in 0\.\.5"):
            host.page_view(page)


@pytest.mark.parametrize(
    "pages, said",
    [
        ([6], r"host page 6 is not in 0\.\.5"),
        ([0, -1], r"host page -1 is not in 0\.\.5"),
        ([0.5], "one-dimensional integers, not float64"),
        ([[0]], "one-dimensional integers, not int64"),
        ([True], "one-dimensional integers, not bool"),
    ],
)
def test_buffers_of_pages_that_are_not_there(pages: Any, said: str) -> None:
    host = HostPool(MlaDevicePool(3, 4, 2, 8), 6)
    assert host.get_page_buffers([]).addresses.shape == (0, 1)
    with pytest.raises(ArgumentError, match=said):
        host.get_page_buffers(pages)


@pytest.mark.parametrize("pages", [0, -1, 2**32, 1.0, True, "4"])
def test_sizes_of_a_host_pool(pages: Any) -> None:
    with pytest.raises(ArgumentError, match=r"num_pages must be an integer in 1\.\.4294967295, not "):
        HostPool(MlaDevicePool(3, 4, 2, 8), pages)


def test_after_close_views_that_are_held_stay_valid() -> None:
    host = HostPool(MlaDevicePool(3, 4, 2, 8), 6)
    planes, data, view = host.planes, host.data, host.page_view(2)
    data[2] = 5
    host.close()
    host.close()
    used: list[Any] = [
        lambda pool: pool.planes,
        lambda pool: pool.data,
        lambda pool: pool.page_view(0),
        lambda pool: pool.get_page_buffers([0]),
    ]
    for use in used:
        with pytest.raises(ClosedError, match="the host pool was closed"):
            use(host)
    assert not host.registered
    del host
    data[3] = 6
    assert view.cast("f").tolist() == [5.0] * 64
    assert planes.tensors[1][3, 2, 0, 1] == 6


def test_host_pages() -> None:
    device = MhaDevicePool(10, 4, 2, heads=1, head_dim=3)
    assert host_pages_for([device], 2.5, None) == 25
    assert host_pages_for([device], 2.5, 3 * device.page_bytes / 1e9) == 3
    latents = MlaDevicePool(10, 4, 2, latent_dim=3)
    assert host_pages_for([latents], 2.5, 3 * device.page_bytes / 1e9) == 6


# Memory of the machine


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


def test_planes_of_one_element_a_head() -> None:
    wide = torch.zeros(3, 2, 1, 5, dtype=torch.bfloat16)
    planes = PoolPlanes([wide[..., 0:5:5], wide[..., 3:5:5]], 2)
    assert (wide[..., 0:5:5].stride(3), planes.tensors[0].stride(3)) == (5, 1)
    for view, column in zip(planes.byte_views(), (0, 3), strict=True):
        view[:2] = (1, 2)
        assert wide.view(torch.uint8)[0, 0, 0, 2 * column : 2 * column + 2].tolist() == [1, 2]
