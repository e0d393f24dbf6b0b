"""The kernel's index arithmetic, executed on the CPU, against numpy's own indexing."""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.layouts import DEVICE_LAYOUTS, HOST_LAYOUTS, Pool, Shape, expected
from tests.kernels.shim import SHIM, Shim, build, shim
from unified_cache.copies.geometry import Side, geometry_of
from unified_cache.copies.kernel_source import kernel_argument, kernel_name
from unified_cache.errors import ArgumentError
from unified_cache.pools.planes import PageShape, PoolPlanes


def copy(
    run: Shim,
    device: PoolPlanes,
    host: PoolPlanes,
    device_pages: np.ndarray,
    host_pages: np.ndarray,
    direction: str,
    *,
    layers: slice = slice(None),
    blocks: int = 2,
    threads: int = 64,
    order: int = 0,
) -> None:
    geometry = geometry_of(device.shape, Side.of(device), Side.of(host))
    tables = [np.ascontiguousarray(side.addresses) for side in (device, host)]
    argument = kernel_argument(geometry, direction, tables[0].ctypes.data, tables[1].ctypes.data)
    source, target = (device_pages, host_pages) if direction == "backup" else (host_pages, device_pages)
    first, stop, _ = layers.indices(geometry.layers)
    argument["source_pages"], argument["target_pages"] = source.ctypes.data, target.ctypes.data
    argument["pages"], argument["first_layer"], argument["layers"] = len(source), first, stop - first
    run.launch(kernel_name(geometry.width, geometry.parts), blocks, threads, argument, order=order)


def pages(rng: np.random.Generator, of: int, count: int) -> np.ndarray:
    return rng.permutation(of)[:count].astype(np.uint32)


def check(
    run: Shim,
    rng: np.random.Generator,
    device_layout: str,
    host_layout: str,
    shape: Shape,
    *,
    offsets: tuple[int, int] = (0, 0),
    layers: slice = slice(None),
    **launch: int,
) -> None:
    device = Pool(device_layout, shape, 7, rng, offsets[0])
    host = Pool(host_layout, shape, 9, rng, offsets[1])
    device_pages, host_pages = pages(rng, 7, 5), pages(rng, 9, 5)
    for direction in ("backup", "load"):
        source, source_pages, target, target_pages = (
            (device, device_pages, host, host_pages)
            if direction == "backup"
            else (host, host_pages, device, device_pages)
        )
        # Poison: a target byte that is not written can not be right by chance.
        target.named[:, :, target_pages] = ~source.named[:, :, source_pages]
        want = expected(source, source_pages, target, target_pages, layers)
        untouched = source.memory.copy()
        copy(run, device.planes, host.planes, device_pages, host_pages, direction, layers=layers, **launch)
        np.testing.assert_array_equal(target.memory, want)
        np.testing.assert_array_equal(source.memory, untouched)


SHAPES = {
    "mha": Shape(3, 2, 4, 2, 32),
    "mla": Shape(3, 1, 4, 1, 48),
    "odd": Shape(2, 2, 5, 3, 7),
    "one": Shape(1, 1, 1, 1, 1),
    "wide": Shape(2, 2, 1, 1, 256),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("host_layout", HOST_LAYOUTS)
@pytest.mark.parametrize("device_layout", DEVICE_LAYOUTS)
def test_every_pair_of_layouts(device_layout: str, host_layout: str, shape: str) -> None:
    rng = np.random.default_rng(1)
    sizes = SHAPES[shape]
    check(shim(), rng, device_layout, host_layout, sizes)
    for layer in range(sizes.layers):
        check(shim(), rng, device_layout, host_layout, sizes, layers=slice(layer, layer + 1), order=1)


def test_random_sizes_alignments_and_grids() -> None:
    rng = np.random.default_rng(2)
    widths = set()
    for _ in range(300):
        parts = int(rng.integers(1, 3))
        heads = int(rng.integers(1, 5)) if parts == 2 else 1
        head_bytes = int(rng.integers(1, 9)) * int(rng.integers(1, 13))  # element bytes x elements
        shape = Shape(int(rng.integers(1, 5)), parts, int(rng.integers(1, 9)), heads, head_bytes)
        first = int(rng.integers(0, shape.layers))
        layers = slice(first, int(rng.integers(first, shape.layers)) + 1)
        offsets = tuple(int(x) for x in rng.choice([0, 0, 8, 4, 2, 1, 3], 2))
        check(
            shim(),
            rng,
            str(rng.choice(DEVICE_LAYOUTS)),
            str(rng.choice(HOST_LAYOUTS)),
            shape,
            offsets=offsets,
            layers=layers,
            blocks=int(rng.integers(1, 17)),
            threads=int(rng.choice([1, 3, 32, 256, 1024])),
            order=int(rng.integers(0, 1000)),
        )
        device = Side.of(Pool("layer_first", shape, 2, rng, offsets[0]).planes)
        page = PageShape(shape.layers, parts, shape.tokens, heads, head_bytes)
        widths.add(geometry_of(page, device, device).width)
    assert widths == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_element_types_are_bytes(dtype: torch.dtype) -> None:
    data = torch.randn(2, 3, 4, 2, 6).to(torch.uint8 if dtype == torch.uint8 else dtype)
    target = torch.zeros_like(data)
    device, host = (PoolPlanes([tensor[0], tensor[1]], 2) for tensor in (data, target))
    ids = np.array([2, 0], np.uint32)
    copy(shim(), device, host, ids, ids, "backup")
    assert torch.equal(target[:, [0, 2]].view(torch.uint8), data[:, [0, 2]].view(torch.uint8))
    assert not target[:, 1].view(torch.uint8).any()


def sparse(size: int) -> np.ndarray:
    """Memory of which only what is touched is taken."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


def test_offsets_past_4_gib() -> None:
    # 3 planes of 6 GiB each on device, one page of them every 4 MiB on host.
    page, count = 1 << 12, (6 << 30) >> 12
    memory, other = sparse(3 * count * page), sparse((1 << 22) * 2048)
    device = PoolPlanes(
        [
            torch.from_numpy(memory[i * count * page :][: count * page]).view(count, 4, 2, 512)
            for i in range(3)
        ],
        1,
    )
    rows = torch.from_numpy(other).view(2048, 1 << 22)[:, 5 * 16 :]
    host = PoolPlanes([rows[:, i * page : (i + 1) * page].unflatten(1, (4, 2, 512)) for i in range(3)], 1)
    device_pages = np.array([count - 1, 0, (4 << 30) // page, (4 << 30) // page - 1], np.uint32)
    host_pages = np.array([2047, 1024, 1023, 0], np.uint32)
    rng = np.random.default_rng(3)
    for tensor in device.tensors:
        for one in device_pages:
            tensor[int(one)] = torch.from_numpy(rng.integers(0, 256, (4, 2, 512), np.uint8))
    copy(shim(), device, host, device_pages, host_pages, "backup", order=7)
    for layer in range(3):
        for one, two in zip(device_pages, host_pages, strict=True):
            assert torch.equal(device.tensors[layer][int(one)], host.tensors[layer][int(two)])
    moved = np.array([5, count - 2, 9, (5 << 30) // page], np.uint32)
    copy(shim(), device, host, moved, host_pages, "load")
    for layer, (one, two) in itertools.product(range(3), zip(device_pages, moved, strict=True)):
        assert torch.equal(device.tensors[layer][int(one)], device.tensors[layer][int(two)])
        assert not device.tensors[layer][int(two) - 1].any() or int(two) - 1 in device_pages


def test_what_is_merged() -> None:
    rng = np.random.default_rng(4)
    shape = Shape(2, 2, 4, 3, 32)
    pool = {
        layout: Side.of(Pool(layout, shape, 5, rng).planes) for layout in {*DEVICE_LAYOUTS, *HOST_LAYOUTS}
    }
    page = PageShape(2, 2, 4, 3, 32)

    def merged(device: str, host: str) -> tuple[int, int, int, int, bool]:
        g = geometry_of(page, pool[device], pool[host])
        return g.tokens, g.heads, g.run_bytes, g.width, g.seamless

    assert merged("layer_first", "layer_first") == (1, 1, 384, 16, True)
    assert merged("layer_first", "page_first_direct") == (1, 1, 384, 16, False)
    assert merged("layer_first", "page_first") == (4, 1, 96, 16, False)
    assert merged("layer_first", "page_head") == (4, 3, 32, 16, False)
    assert merged("block_major", "layer_first") == (1, 1, 384, 16, False)
    assert merged("heads_first", "layer_first") == (4, 3, 32, 16, False)
    assert merged("heads_first", "heads_first") == (4, 3, 32, 16, False)


def test_a_page_too_large_for_the_counters_is_refused() -> None:
    side = Side(np.zeros((1, 1), np.uint64), 1, 2**31, 2**23, 2**23)
    with pytest.raises(ArgumentError, match=r"256 tokens x 1 heads x 8388608 bytes.*2\^30"):
        geometry_of(PageShape(1, 1, 256, 1, 2**23), side, side)


_SANITIZED = """
import sys
from pathlib import Path
import numpy as np
from tests.kernels import test_index_arithmetic as t
from tests.kernels.shim import Shim
run, rng = Shim(Path(sys.argv[1])), np.random.default_rng(5)
for shape in t.SHAPES.values():
    for device in t.DEVICE_LAYOUTS:
        for host in t.HOST_LAYOUTS:
            t.check(run, rng, device, host, shape, order=3)
print("clean")
"""


def test_no_undefined_behaviour(tmp_path: Path) -> None:
    library = build(tmp_path, "-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=all")
    root = str(SHIM.parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", _SANITIZED, str(library)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), done.stderr
