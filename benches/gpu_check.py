#!/usr/bin/env python3
"""Checks and times the copies between GPU and host memory, on a machine with a GPU.

Every kernel is checked against torch's own indexing, with fresh random bytes and poisoned targets, then timed
against a pinned cudaMemcpy of as many bytes, in turns in the same run. The whole cache serves requests while
copies run, and every page that it serves is looked at. One table at the end; --out keeps it all the while.

It needs nothing but Python, PyTorch, CuPy and NumPy, and fetches nothing: the wheel of this package is taken
from beside this script or from dist/ (--wheel says which one); without a wheel, from the source tree around
this script, if the native module was built into it. Keep what it finds: --out benches/results.

Exit status: 0 all is right, 1 no GPU or something missing or wrong, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import datetime
import faulthandler
import importlib
import importlib.util
import json
import mmap
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class UnusableError(Exception):
    """This machine can not run the check; the message is the one line that says why."""


# --- where the package comes from ----------------------------------------------------------------


def wheels() -> list[Path]:
    """Wheels of this package, the newest first."""
    found = [*HERE.glob("unified_cache-*.whl"), *(HERE.parent / "dist").glob("unified_cache-*.whl")]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def install(wheel: Path) -> str:
    """Unpack a wheel with pip into a folder of its own, so that nothing of the machine changes."""
    folder = tempfile.mkdtemp(prefix="gpu-check-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--no-compile", "--target", folder, str(wheel)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise UnusableError(f"{wheel} can not be installed: {done.stderr.strip().splitlines()[-1:]}")
    sys.path.insert(0, folder)
    return f"wheel {wheel.name}"


def find_package(wheel: Path | None) -> str:
    """Make ``import unified_cache`` work; says where it comes from."""
    choice = [wheel] if wheel is not None else wheels()
    if choice:
        source = install(choice[0])
    else:
        source = "as it was installed"
        if importlib.util.find_spec("unified_cache") is None:
            sys.path.insert(0, str(HERE.parent / "python"))
            source = f"source tree {HERE.parent}"
    try:
        importlib.import_module("unified_cache")
    except ImportError as error:
        raise UnusableError(
            f"unified_cache can not be imported ({error}): put its wheel beside this script or into dist/"
        ) from None
    return source


# --- what is measured, and on what ---------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How much is copied."""

    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    latent_layers: int = 61
    latent_dim: int = 576
    page_size: int = 64
    pages: int = 96  # of a pool
    copied: int = 48  # of them, at a time
    rounds: int = 5
    blocks: tuple[int, ...] = (1, 2, 4, 8, 16)
    register_bytes: int = 1 << 30
    hidden: int = 4096  # of the forward that loads are overlapped with
    requests: int = 300  # that the whole cache serves, in each of its settings


@dataclass
class Row:
    """A line of the table."""

    what: str
    layout: str = ""
    direction: str = ""
    blocks: int | None = None
    gb_s: float | None = None
    of_memcpy: float | None = None
    note: str = ""


@dataclass
class Report:
    """Everything that came out."""

    machine: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def table(self) -> str:
        """For people."""
        lines = [f"# {name}: {value}" for name, value in self.machine.items()]
        lines += [
            "",
            f"{'what':<34} {'layout':<20} {'direction':<9} {'blocks':>6} {'GB/s':>8} {'of memcpy':>9}  note",
        ]
        for row in self.rows:
            cells = [
                f"{row.what:<34} {row.layout:<20} {row.direction:<9}",
                f"{'' if row.blocks is None else row.blocks:>6}",
                f"{'' if row.gb_s is None else format(row.gb_s, '.1f'):>8}",
                f"{'' if row.of_memcpy is None else format(row.of_memcpy, '.2f'):>9}  {row.note}",
            ]
            lines.append(" ".join(cells).rstrip())
        lines += ["", f"copies checked: {self.checked}, wrong: {len(self.wrong)}"]
        lines += [f"WRONG {text}" for text in self.wrong]
        lines += [f"left out: {text}" for text in self.left_out]
        return "\n".join(lines) + "\n"


class Bench:
    """A device, its driver, and memory on both sides. Tests put a stand-in's driver and CPU memory here."""

    def __init__(self, driver: Any, device: str, sizes: Sizes, budget: float) -> None:
        import torch

        from unified_cache.copies import cuda, cuda_events, cuda_plan
        from unified_cache.pools import planes

        self.torch, self.cuda, self.events, self.plan, self.planes = (
            torch,
            cuda,
            cuda_events,
            cuda_plan,
            planes,
        )
        self.driver = driver
        self.device = device
        self.sizes = sizes
        self.end = time.monotonic() + budget
        self.report = Report()
        self.batched = driver.batched
        with driver.active():
            self.stream = driver.new_stream()
            self.start, self.stop = (driver.new_event(timing=True) for _ in range(2))

    def late(self, what: str, seconds: float = 10) -> bool:
        """Whether there is too little time left for `what`; it is noted then."""
        if time.monotonic() + seconds < self.end:
            return False
        self.report.left_out.append(f"{what}: no time left")
        return True

    # Memory.

    def mapped(self, size: int, *, huge: bool = False) -> Any:
        """Fresh memory of its own pages, as uint8 (size): a page can be registered only once."""
        private = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            with suppress(OSError):  # a system without them
                private.madvise(mmap.MADV_HUGEPAGE)
        return self.torch.frombuffer(private, dtype=self.torch.uint8)

    @contextmanager
    def host_memory(self, size: int, *, registered: bool = True, huge: bool = False) -> Iterator[Any]:
        """Host memory as uint8 (size); `huge` asks the system for huge pages."""
        torch, memory = self.torch, self.mapped(size, huge=huge)
        register = registered and self.device != "cpu"
        if register:
            status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 3))
            if status != 0:
                raise RuntimeError(f"cudaHostRegister of {size} bytes failed with status {status}")
        try:
            yield memory
        finally:
            if register:
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def wait(self, *, forward: bool = False) -> None:
        """Until everything is through that is queued on our stream, or on the forward's."""
        with self.driver.active():
            event = self.driver.new_event()
            self.driver.record(event, self.driver.forward_stream() if forward else self.stream)
            self.events.poll(lambda: self.driver.event_done(event))
            self.driver.destroy_event(event)

    def memcpy_seconds(self, target: int, source: int, size: int) -> float:
        """One plain copy of pinned memory."""
        with self.driver.active():
            self.driver.record(self.start, self.stream)
            self.driver.copy(target, source, size, self.stream)
            self.driver.record(self.stop, self.stream)
            self.events.poll(lambda: self.driver.event_done(self.stop))
            return max(self.driver.seconds_between(self.start, self.stop), 1e-9)


# --- pools ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A page."""

    layers: int
    parts: int
    tokens: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def numel(self, pages: int) -> int:
        return self.layers * self.parts * self.tokens * self.heads * self.head_dim * pages


# Dimensions in memory, outermost first: Layers, parTs, pages (N), Page's tokens, Heads, Dim.
LAYOUTS = {
    "layer_first": "TLNPHD",
    "page_first": "NTPLHD",
    "page_first_direct": "NTLPHD",
    "page_head": "NHTPLD",
    "engine: block-major": "LNTPHD",
    "engine: heads first": "LTNHPD",
}
HOST_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
DEVICE_LAYOUTS = ["layer_first", "engine: block-major", "engine: heads first"]


class Pool:
    """A pool in some layout over memory that is given."""

    def __init__(self, bench: Bench, layout: str, shape: Shape, pages: int, memory: Any) -> None:
        torch = bench.torch
        dtype = getattr(torch, shape.dtype)
        sizes = {
            "L": shape.layers,
            "T": shape.parts,
            "N": pages,
            "P": shape.tokens,
            "H": shape.heads,
            "D": shape.head_dim,
        }
        order = LAYOUTS[layout]
        size = shape.numel(pages) * dtype.itemsize
        whole = memory[:size].view(dtype).view([sizes[d] for d in order])
        # (layers, parts, pages, tokens, heads, dim), whatever the order in memory.
        self.named = whole.permute([order.index(d) for d in "LTNPHD"])
        self.bytes = self.named.view(torch.uint8)
        self.memory = memory[:size]
        planes = [self.named[layer, part] for layer in range(shape.layers) for part in range(shape.parts)]
        self.planes = bench.planes.PoolPlanes(planes, shape.parts)
        self.pages = pages


def fill(bench: Bench, memory: Any, seed: int) -> None:
    """Fresh random bytes."""
    generator = bench.torch.Generator(device=memory.device).manual_seed(seed)
    memory.random_(0, 256, generator=generator)


# --- correctness ---------------------------------------------------------------------------------


def check_copies(bench: Bench) -> None:
    """Every pair of layouts, both directions, both ways of moving bytes, all layers and layer by layer."""
    torch, plan = bench.torch, bench.plan
    kernels_only = plan.CopyRule(min_bytes=1 << 62, min_batched_bytes=1 << 62)
    engines_first = plan.CopyRule(1, 1, 1)
    shapes = {
        "mha": Shape(2, 2, 4, 4, 64),
        "mla": Shape(3, 1, 4, 1, 576),
        "fp8": Shape(2, 2, 8, 2, 40, "float8_e4m3fn"),
        "odd": Shape(2, 2, 5, 3, 7, "float32"),
        "bytes": Shape(2, 2, 3, 3, 5, "uint8"),
        "one": Shape(2, 2, 1, 1, 128),
    }
    seed = case = 0
    for name, shape in shapes.items():
        dtype = getattr(torch, shape.dtype)
        sizes = [shape.numel(pages) * dtype.itemsize for pages in (24, 32)]
        for device_layout in DEVICE_LAYOUTS:
            for host_layout in HOST_LAYOUTS:
                if bench.late(f"checks of {name}, {device_layout}, {host_layout}", 5):
                    return
                # Counts without a common factor, also with that of the layouts: all meet all.
                registered, blocks = case % 3 != 2, (1, 2, 3, 5, 8)[case % 5]
                case += 1
                with bench.host_memory(sizes[1], registered=registered) as memory:
                    device_memory = torch.zeros(sizes[0], dtype=torch.uint8, device=bench.device)
                    device = Pool(bench, device_layout, shape, 24, device_memory)
                    host = Pool(bench, host_layout, shape, 32, memory)
                    for moved_by, rule in (("kernel", kernels_only), ("copy engines", engines_first)):
                        engine = bench.cuda.CudaCopyEngine(
                            device.planes,
                            host.planes,
                            host_registered=registered,
                            driver=bench.driver,
                            rule=rule,
                            blocks=blocks,
                            staging_bytes=10_000,
                        )
                        try:
                            if registered and engine.staged:
                                bench.report.wrong.append("registered memory is not reached by the device")
                            moved_by = "staging" if engine.staged else moved_by
                            for direction in ("backup", "load", "load by layer"):
                                seed += 1
                                what = f"{name}, {device_layout} - {host_layout}, {direction}, {moved_by}"
                                try:
                                    check_one(bench, engine, device, host, direction, seed, what)
                                except Exception as error:
                                    error.add_note(f"in the check of {what}, {blocks} blocks")
                                    raise
                        finally:
                            engine.close()


def check_one(
    bench: Bench, engine: Any, device: Pool, host: Pool, direction: str, seed: int, what: str
) -> None:
    """One copy of random pages, a "backup", a "load" or a "load by layer": the targets equal the sources, and
    nothing else has changed.
    """
    import numpy as np

    torch = bench.torch
    rng = random.Random(seed)
    fill(bench, device.memory, seed)
    fill(bench, host.memory, seed + 1)
    ids = [rng.sample(range(pool.pages), 13) for pool in (device, host)]
    first = rng.randrange(8)
    ids[0][:6] = list(range(first, first + 6))  # a run, for the copy engines
    ids[1][:6] = list(range(2 * first, 2 * first + 6))
    for side in ids:
        fresh = [page for page in range(24) if page not in side[:6]]
        side[6:] = rng.sample(fresh, 7)
    source, target = (device, host) if direction == "backup" else (host, device)
    from_ids, to_ids = (
        torch.tensor(x, device=p.memory.device)
        for x, p in zip(ids if direction == "backup" else ids[::-1], (source, target), strict=True)
    )
    # Poison: no byte of the target can be right by chance.
    wanted = source.bytes.index_select(2, from_ids).to(target.memory.device)
    target.bytes.index_copy_(2, to_ids, ~wanted)
    want = target.bytes.clone().index_copy_(2, to_ids, wanted)
    before = source.memory.clone()
    bench.wait(forward=True)
    device_ids, host_ids = (np.array(x, np.uint32) for x in ids)
    mark = engine.record_forward()
    if direction == "backup":
        engine.submit_backup(device_ids, host_ids, after=mark).wait()
    elif direction == "load":
        engine.submit_load(device_ids, host_ids, after=mark).wait()
    else:
        layers = engine.new_layer_events()
        layers.begin()
        handle = engine.submit_load(device_ids, host_ids, after=mark, layers=layers)
        for layer in range(device.planes.shape.layers):
            layers.wait(layer)
        handle.wait()
    engine.take_done()
    bench.report.checked += 1
    if not torch.equal(target.bytes, want):
        bench.report.wrong.append(f"{what}: the target's bytes")
    if not torch.equal(source.memory, before):
        bench.report.wrong.append(f"{what}: the source was changed")


def check_cache(bench: Bench) -> None:
    """The whole cache on pools of its own, registered by itself: requests are served while copies run, and
    every page that is served is looked at.
    """
    for settings in (
        {"host_layout": "page_first"},
        {"host_layout": "layer_first", "host_register_chunk": 1_000_000},  # pages over the edges
        {"host_layout": "page_first_direct", "write_policy": "write_back"},
        {"host_layout": "page_head", "host_huge_pages": True},
        {"host_layout": "page_first", "host_pinned": "off"},
    ):
        what = ", ".join(str(value) for value in settings.values())
        if bench.late(f"the whole cache, {what}", 15):
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            begun = time.perf_counter()
            note = serve(bench, settings, what)
            spent = time.perf_counter() - begun
        bench.report.checked += 1
        note = "; ".join([f"{note}; {spent:.1f} s", *(f"warned: {warning.message}" for warning in caught)])
        bench.report.rows.append(Row("the whole cache", settings["host_layout"], note=note))


def serve(bench: Bench, settings: dict[str, Any], what: str) -> str:
    """Serve requests that fit neither the device nor the host all together; says what happened."""
    import numpy as np

    from unified_cache import CacheConfig, CapacityError, UnifiedCache
    from unified_cache.copies.choose import make_copy_engine
    from unified_cache.pools.device import MhaDevicePool

    torch, rng = bench.torch, random.Random(5)
    on_gpu = bench.device != "cpu"
    layers, tokens, families, longest = 4, 16, 8, 20
    pool = MhaDevicePool(64, tokens, layers, heads=2, head_dim=64, dtype=torch.bfloat16, device=bench.device)
    planes = [[plane.view(torch.uint8) for plane in (pool.k(i), pool.v(i))] for i in range(layers)]
    # What page i of a prompt of some family holds.
    want = torch.zeros((families, longest, layers, 2, *planes[0][0].shape[1:]), dtype=torch.uint8)
    fill(bench, want, 5)
    want = want.to(bench.device)
    differ = torch.zeros((), dtype=torch.int64, device=bench.device)
    looked_at = 0
    made: list[Any] = []

    def copies(device: Any, host: Any) -> Any:
        if on_gpu:
            made.append(make_copy_engine(device, host, blocks=2, threads=None))
        else:
            registered = settings.get("host_pinned") != "off"
            made.append(
                bench.cuda.CudaCopyEngine(
                    device.planes, host.planes, host_registered=registered, driver=bench.driver
                )
            )
        return made[-1]

    def forward(request: Any, family: int) -> None:
        """Looks at what was served, layer by layer, and writes what is new; the CPU runs ahead."""
        nonlocal looked_at
        served = request.device_length // tokens
        ids = torch.from_numpy(request.pages.astype(np.int64))
        ids = ids.pin_memory().to(bench.device, non_blocking=True) if on_gpu else ids
        if on_gpu:
            torch.cuda._sleep(rng.randrange(1, 1_000_000))  # cycles: so that forwards are late at times
        arrival = cache.begin_forward([request])
        for layer in range(layers):
            arrival.wait_until(layer)
            if not on_gpu:  # the stand-in's streams and torch know nothing of each other
                bench.wait(forward=True)
            for part, plane in enumerate(planes[layer]):
                differ.add_((plane[ids[:served]] != want[family, :served, layer, part]).sum())
                plane[ids[served:]] = want[family, served : len(ids), layer, part]
        looked_at += served

    # "require": a driver that refuses to register is an error here.
    chosen = {"host_pinned": "require", "load_back_threshold": 0, **settings}
    cache = UnifiedCache(CacheConfig(page_size=tokens, model="gpu_check", **chosen), pool, copies=copies)
    try:
        for _ in range(bench.sizes.requests):
            family = rng.randrange(families)
            prompt = np.arange(tokens * rng.randrange(1, longest + 1)) + 10_000 * family
            request = cache.begin(prompt)
            try:
                request.load_back()
                request.extend()
                forward(request, family)
            except CapacityError:
                request.abort()
                continue
            if rng.random() < 0.1:
                request.abort()
            else:
                request.finish()
            cache.tick()
        flushed, stats = cache.flush(30), cache.stats()
        bench.wait(forward=True)
        wrong = int(differ)
    finally:
        cache.close()
    if wrong:
        bench.report.wrong.append(f"the whole cache, {what}: {wrong} bytes that were served are not right")
    if not flushed:
        bench.report.wrong.append(f"the whole cache, {what}: its copies do not end")
    if not stats["load_pages"]:
        bench.report.wrong.append(f"the whole cache, {what}: nothing was loaded: {stats}")
    if made[0].staged != (chosen["host_pinned"] == "off"):
        bench.report.wrong.append(f"the whole cache, {what}: staged is {made[0].staged}")
    return (
        f"{bench.sizes.requests} requests, {looked_at} pages served and looked at, "
        f"{stats['load_pages']} loaded, {stats['backup_pages']} backed up, "
        f"{'staged' if made[0].staged else 'registered'}"
    )


# --- times ---------------------------------------------------------------------------------------


def model_shape(bench: Bench, *, latent: bool) -> Shape:
    """A page of a model of common size."""
    s = bench.sizes
    if latent:
        return Shape(s.latent_layers, 1, s.page_size, 1, s.latent_dim)
    return Shape(s.layers, 2, s.page_size, s.heads, s.head_dim)


@dataclass
class Pair:
    """Two pools and the pages that are copied between them."""

    bench: Bench
    device: Pool
    host: Pool

    def measure(self, engine: Any, device_ids: Any, host_ids: Any, direction: str) -> tuple[float, float]:
        """GB/s, and the share of a plain copy of as many bytes: medians over rounds of one and the other."""
        bench = self.bench
        size = len(device_ids) * self.device.planes.shape.page_bytes
        ends = (self.host.memory.data_ptr(), self.device.memory.data_ptr())
        target, source = ends if direction == "backup" else ends[::-1]
        submit = engine.submit_backup if direction == "backup" else engine.submit_load
        times, ratios = [], []
        for turn in range(bench.sizes.rounds + 1):
            handle = submit(device_ids, host_ids)
            handle.wait()
            engine.take_done()
            plain = bench.memcpy_seconds(target, source, size)
            if turn:  # the first round warms up
                times.append(max(handle.seconds, 1e-9))
                ratios.append(plain / times[-1])
        return size / statistics.median(times) / 1e9, statistics.median(ratios)


@contextmanager
def pair(
    bench: Bench,
    device_layout: str,
    host_layout: str,
    shape: Shape,
    *,
    registered: bool = True,
    huge: bool = False,
) -> Iterator[Pair]:
    """Pools of the size that is timed."""
    torch = bench.torch
    size = shape.numel(bench.sizes.pages) * getattr(torch, shape.dtype).itemsize
    with bench.host_memory(size, registered=registered, huge=huge) as memory:
        device_memory = torch.zeros(size, dtype=torch.uint8, device=bench.device)
        bench.wait(forward=True)
        yield Pair(
            bench,
            Pool(bench, device_layout, shape, bench.sizes.pages, device_memory),
            Pool(bench, host_layout, shape, bench.sizes.pages, memory),
        )


def scattered(bench: Bench, seed: int) -> tuple[Any, Any]:
    """Random pages on both sides."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return tuple(rng.permutation(bench.sizes.pages)[: bench.sizes.copied].astype(np.uint32) for _ in range(2))


def time_memcpy(bench: Bench) -> None:
    """What the bus gives."""
    size = bench.sizes.register_bytes // 4
    with bench.host_memory(size) as memory:
        device = bench.torch.zeros(size, dtype=bench.torch.uint8, device=bench.device)
        bench.wait(forward=True)
        for direction, target, source in (("backup", memory, device), ("load", device, memory)):
            times = [
                bench.memcpy_seconds(target.data_ptr(), source.data_ptr(), size)
                for _ in range(bench.sizes.rounds + 1)
            ]
            speed = size / statistics.median(times[1:]) / 1e9
            bench.report.rows.append(Row("pinned cudaMemcpy", "", direction, None, speed, 1.0))


def time_kernels(bench: Bench) -> None:
    """Scattered pages through the kernel: blocks x layouts x directions."""
    rule = bench.plan.CopyRule(min_bytes=1 << 62, min_batched_bytes=1 << 62)
    pairs = [("layer_first", host, False, False) for host in HOST_LAYOUTS]
    # The device translates every address of host memory that the kernel uses: larger pages may be faster.
    pairs += [("layer_first", host, False, True) for host in ("layer_first", "page_first")]
    pairs += [("layer_first", host, True, False) for host in HOST_LAYOUTS]
    pairs += [(device, "page_first", False, False) for device in DEVICE_LAYOUTS[1:]]
    for device_layout, host_layout, latent, huge in pairs:
        kind = "mla" if latent else "mha"
        layout = host_layout if device_layout == "layer_first" else f"{device_layout[8:]}-{host_layout}"
        if bench.late(f"times of the kernel, {kind}, {layout}", 20):
            return
        with pair(bench, device_layout, host_layout, model_shape(bench, latent=latent), huge=huge) as pools:
            ids = scattered(bench, 1)
            for blocks in bench.sizes.blocks:
                engine = bench.cuda.CudaCopyEngine(
                    pools.device.planes,
                    pools.host.planes,
                    host_registered=True,
                    blocks=blocks,
                    driver=bench.driver,
                    rule=rule,
                )
                try:
                    for direction in ("backup", "load"):
                        speed, share = pools.measure(engine, *ids, direction)
                        what = f"kernel, {kind}, scattered pages"
                        note = "huge pages" if huge else ""
                        bench.report.rows.append(Row(what, layout, direction, blocks, speed, share, note))
                finally:
                    engine.close()


def time_copy_engines(bench: Bench) -> None:
    """Runs of contiguous pages, of several lengths, through the copy engines and through the kernel."""
    import numpy as np

    plan = bench.plan
    rules = {
        "copy engines": plan.CopyRule(1, 1, 1, max_copies=1 << 30),
        "kernel, 2 blocks": plan.CopyRule(min_bytes=1 << 62, min_batched_bytes=1 << 62),
    }
    shape = model_shape(bench, latent=False)
    total = bench.sizes.copied
    for host_layout in ("layer_first", "page_first_direct"):
        if bench.late(f"times of the copy engines, {host_layout}", 15):
            return
        with pair(bench, "layer_first", host_layout, shape) as pools:
            for name, rule in rules.items():
                engine = bench.cuda.CudaCopyEngine(
                    pools.device.planes,
                    pools.host.planes,
                    host_registered=True,
                    driver=bench.driver,
                    rule=rule,
                )
                try:
                    for length in [n for n in (1, 2, 4, 8, 16, total) if n <= total]:
                        # Runs with one page between them, so that they do not grow together.
                        starts = range(0, bench.sizes.pages - length + 1, length + (length < total))
                        ids = np.concatenate([np.arange(s, s + length) for s in starts])[:total]
                        ids = ids.astype(np.uint32)
                        for direction in ("backup", "load"):
                            speed, share = pools.measure(engine, ids, ids, direction)
                            goal = name == "copy engines" and length == total
                            note = "" if not goal else "goal 0.9" if share >= 0.9 else "PAST ITS GOAL of 0.9"
                            what = f"{name}, runs of {length} pages"
                            bench.report.rows.append(
                                Row(what, host_layout, direction, None, speed, share, note)
                            )
                finally:
                    engine.close()


def time_staged(bench: Bench) -> None:
    """Host memory that is not registered."""
    if bench.late("times of staged copies", 20):
        return
    shape = model_shape(bench, latent=False)
    with (
        bench.host_memory(bench.sizes.copied << 20) as pinned,  # for the plain copy that it is held against
        pair(bench, "layer_first", "page_first", shape, registered=False) as pools,
    ):
        engine = bench.cuda.CudaCopyEngine(
            pools.device.planes, pools.host.planes, host_registered=False, driver=bench.driver
        )
        ids = scattered(bench, 2)
        size = bench.sizes.copied * shape.numel(1) * 2
        try:
            for direction in ("backup", "load"):
                submit = engine.submit_backup if direction == "backup" else engine.submit_load
                times = []
                for _ in range(3):
                    handle = submit(*ids)
                    handle.wait()
                    engine.take_done()
                    times.append(max(handle.seconds, 1e-9))
                ends = (pinned.data_ptr(), pools.device.memory.data_ptr())
                target, source = ends if direction == "backup" else ends[::-1]
                part = min(pinned.numel(), pools.device.memory.numel())
                plain = part / bench.memcpy_seconds(target, source, part)
                speed = size / statistics.median(times)
                bench.report.rows.append(
                    Row(
                        "staged, memory not registered",
                        "page_first",
                        direction,
                        2,
                        speed / 1e9,
                        speed / plain,
                    )
                )
        finally:
            engine.close()


@contextmanager
def urgent_streams(bench: Bench) -> Iterator[None]:
    """Streams that are made in it have the highest priority."""
    runtime = importlib.import_module("cupy").cuda.runtime

    def new_stream() -> int:
        return int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, -100))  # as high as there is

    bench.driver.new_stream = new_stream
    try:
        yield
    finally:
        del bench.driver.new_stream


def time_overlap(bench: Bench) -> None:
    """Loads and backups beside a forward, on streams of the usual priority and of the highest: a block of the
    kernel takes all registers of a multiprocessor, so it begins only where nothing else runs.
    """
    if bench.late("overlap", 20):
        return
    time_beside_a_forward(bench, "")
    if bench.device != "cpu" and not bench.late("overlap on urgent streams", 20):
        with urgent_streams(bench):
            time_beside_a_forward(bench, ", urgent")


def time_beside_a_forward(bench: Bench, how: str) -> None:
    """A load under a forward: time to its output, against max(load, compute) + one layer. A forward beside a
    backup.
    """
    torch, driver = bench.torch, bench.driver
    shape = model_shape(bench, latent=False)
    with pair(bench, "layer_first", "page_first", shape) as pools:
        engine = bench.cuda.CudaCopyEngine(
            pools.device.planes, pools.host.planes, host_registered=True, driver=driver
        )
        try:
            ids = scattered(bench, 3)
            load_seconds = []
            for _ in range(4):
                handle = engine.submit_load(*ids)
                handle.wait()
                engine.take_done()
                load_seconds.append(handle.seconds)
            load = statistics.median(load_seconds[1:])
            size = (bench.sizes.hidden, bench.sizes.hidden)
            hidden = torch.randn(size, device=bench.device).to(torch.bfloat16)
            # So that what the layers compute stays as large as it is: products of infinities go faster.
            weight = (torch.randn(size, device=bench.device) / bench.sizes.hidden**0.5).to(torch.bfloat16)

            def forward(repeats: int, layers: Any = None) -> float:
                """Seconds on the device's clock from before the load is submitted to the output."""
                with driver.active():
                    stream = driver.forward_stream()
                    driver.record(bench.start, stream)
                if layers is not None:
                    layers.begin()
                    engine.submit_load(*ids, after=engine.record_forward(), layers=layers)
                x = hidden
                for layer in range(shape.layers):
                    if layers is not None:
                        layers.wait(layer)
                    for _ in range(repeats):
                        x = torch.mm(x, weight)
                with driver.active():
                    driver.record(bench.stop, stream)
                    bench.events.poll(lambda: driver.event_done(bench.stop))
                    return max(driver.seconds_between(bench.start, bench.stop), 1e-9)

            forward(1)
            one = statistics.median(forward(1) for _ in range(3))
            # Two forwards: one that is shorter than the load and one that is longer.
            for repeats in sorted({max(1, round(load / one / 2)), max(1, round(2 * load / one))}):
                compute = statistics.median(forward(repeats) for _ in range(3))
                ends = []
                for _ in range(3):
                    ends.append(forward(repeats, engine.new_layer_events()))
                    engine.take_done(wait=True)
                together = statistics.median(ends)
                bound = max(load, compute) + max(load, compute) / shape.layers
                bench.report.rows.append(
                    Row(
                        f"load under a forward{how}",
                        "page_first",
                        "load",
                        2,
                        note=f"load {load * 1e3:.2f} ms, compute {compute * 1e3:.2f} ms, output after "
                        f"{together * 1e3:.2f} ms; goal {bound * 1e3:.2f} ms: {together / bound:.2f} of it",
                    )
                )
                if bench.late("what a backup costs a forward", 5):
                    break
                for _ in range(3):
                    handle = engine.submit_backup(*ids)
                    ends.append(forward(repeats))
                    handle.wait()
                    engine.take_done()
                slower = statistics.median(ends[-3:]) / compute
                bench.report.rows.append(
                    Row(
                        f"forward beside a backup{how}",
                        "page_first",
                        "backup",
                        2,
                        note=f"takes {slower:.3f} of its time",
                    )
                )
            begun = time.perf_counter()
            layers = engine.new_layer_events()
            layers.begin()
            handle = engine.submit_load(*ids, layers=layers)
            spent = time.perf_counter() - begun
            handle.wait()
            engine.take_done()
            note = f"{spent * 1e6:.0f} us of the CPU for {shape.layers} layers"
            bench.report.rows.append(Row(f"submitting a load{how}", "page_first", "load", 2, note=note))
        finally:
            engine.close()


def check_registration(bench: Bench) -> None:
    """Memory registered in pieces works as one range, for the kernel and for copies over the edges."""
    torch = bench.torch
    if bench.device == "cpu" or bench.late("registration in pieces", 15):
        return
    cudart = torch.cuda.cudart()
    size, pieces = bench.sizes.register_bytes, 4
    memory = bench.mapped(size)
    piece = size // pieces
    registered = []
    try:
        begun = time.perf_counter()
        for at in range(0, size, piece):
            status = int(cudart.cudaHostRegister(memory.data_ptr() + at, piece, 3))
            if status != 0:
                bench.report.wrong.append(
                    f"piece at {at} of {size} bytes can not be registered: status {status}"
                )
                return
            registered.append(at)
        spent = time.perf_counter() - begun
        note = f"{pieces} pieces, {spent * 1e3 / (size / 2**30):.0f} ms a GiB"
        device = torch.randint(0, 256, (2 << 20,), dtype=torch.uint8, device=bench.device)
        bench.wait(forward=True)
        over = memory.data_ptr() + piece - (1 << 20)
        try:
            bench.memcpy_seconds(over, device.data_ptr(), 2 << 20)
            found = memory[piece - (1 << 20) :][: 2 << 20]
            right = torch.equal(found, device.cpu())
            note += f"; a copy over an edge {'works' if right else 'GIVES WRONG BYTES'}"
        except Exception as error:
            note += f"; a copy over an edge is refused ({type(error).__name__}: {error})"
        shape = Shape(1, 1, 1, 1, 1 << 20, "uint8")
        pages = size >> 20
        host = Pool(bench, "layer_first", shape, pages, memory)
        pool = Pool(bench, "layer_first", shape, 2, device)
        import numpy as np

        engine = bench.cuda.CudaCopyEngine(
            pool.planes,
            host.planes,
            host_registered=True,
            driver=bench.driver,
            rule=bench.plan.CopyRule(1, 1, 1),
            host_edges=[memory.data_ptr() + at for at in range(piece, size, piece)],
        )
        last = piece >> 20
        engine.submit_backup(np.array([0, 1], np.uint32), np.array([last - 1, last], np.uint32)).wait()
        engine.close()
        bench.report.checked += 1
        if not torch.equal(memory[(last - 1) << 20 :][: 2 << 20], device.cpu()):
            bench.report.wrong.append("pages on both sides of an edge of registration")
    finally:
        for at in registered:
            status = int(cudart.cudaHostUnregister(memory.data_ptr() + at))
            if status != 0:
                bench.report.wrong.append(f"piece at {at} can not be unregistered: status {status}")
    bench.report.rows.append(Row("registration in pieces", note=note))


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "checks": check_copies,
    "cache": check_cache,
    "registration": check_registration,
    "memcpy": time_memcpy,
    "engines": time_copy_engines,
    "kernels": time_kernels,
    "overlap": time_overlap,
    "staged": time_staged,
}


def run(bench: Bench, only: list[str], keep: Callable[[Report], None] = lambda report: None) -> Report:
    """All sections, or some; one that breaks does not keep the others from running.

    `keep` is called after each of them, so that what was found is there even if a later one never ends.
    """
    for name, section in SECTIONS.items():
        if only and name not in only:
            continue
        begun = time.monotonic()
        try:
            section(bench)
        except Exception as error:
            traceback.print_exc()
            bench.report.wrong.append(f"section {name} broke: {type(error).__name__}: {error}")
        if bench.batched and not bench.driver.batched:
            bench.batched = False
            bench.report.rows.append(Row("copies in batches", note=f"REFUSED by the driver in {name}"))
        print(f"gpu_check: {name} took {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
        keep(bench.report)
    with bench.driver.active():
        bench.driver.destroy_event(bench.start)
        bench.driver.destroy_event(bench.stop)
        bench.driver.destroy_stream(bench.stream)
    return bench.report


# --- the program ---------------------------------------------------------------------------------


def machine_of(torch: Any, driver: Any, source: str) -> dict[str, str]:
    """What the results were measured on."""
    import cupy

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    version = cupy.cuda.runtime.driverGetVersion()
    return {
        "date": datetime.date.today().isoformat(),
        "card": properties.name,
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "multiprocessors": str(properties.multi_processor_count),
        "software": f"driver of CUDA {version // 1000}.{version % 1000 // 10}, torch {torch.__version__}, "
        f"CuPy {cupy.__version__}, Python {platform.python_version()}",
        "package": source,
        "batched copies": "yes" if driver.batched else "no",
        "host": platform.processor() or platform.machine(),
    }


def open_bench(arguments: argparse.Namespace) -> Bench:
    """The GPU of this machine.

    Raises:
        UnusableError: there is none, or something is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UnusableError(f"PyTorch can not be imported: {error}") from None
    if not torch.cuda.is_available():
        raise UnusableError("there is no CUDA device on this machine (torch.cuda.is_available() is False)")
    source = find_package(arguments.wheel)
    from unified_cache.copies.cupy_driver import CupyDriver
    from unified_cache.errors import MissingDependencyError

    torch.cuda.set_device(arguments.device)
    try:
        driver = CupyDriver(arguments.device)
        with driver.active():
            driver.prepare("copy_pages_w16_p2")
    except MissingDependencyError as error:
        raise UnusableError(str(error)) from None
    sizes = Sizes()
    if arguments.quick:
        sizes = dataclasses.replace(sizes, layers=4, latent_layers=4, rounds=2, register_bytes=64 << 20)
    bench = Bench(driver, f"cuda:{arguments.device}", sizes, arguments.budget)
    bench.report.machine = machine_of(torch, driver, source)
    return bench


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help="the wheel to check")
    parser.add_argument("--device", type=int, default=0, help="which GPU (default: 0)")
    parser.add_argument("--budget", type=float, default=420, help="seconds that it may take (default: 420)")
    parser.add_argument(
        "--only", action="append", default=[], choices=list(SECTIONS), help="only this section"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work at all")
    parser.add_argument("--json", action="store_true", help="print one object in place of the table")
    parser.add_argument(
        "--out", type=Path, help="a folder to keep the table in, under a name with date and card"
    )
    arguments = parser.parse_args(argv)
    try:
        bench = open_bench(arguments)
    except UnusableError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    command = "$ python benches/gpu_check.py " + " ".join(sys.argv[1:] if argv is None else argv)
    path = None
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        card = re.sub(r"[^a-z0-9]+", "-", bench.report.machine["card"].lower()).strip("-")
        path = arguments.out / f"{bench.report.machine['date']}-gpu-check-{card}.txt"

    def keep(report: Report) -> None:
        if path is not None:
            path.write_text(f"{command.rstrip()}\n{report.table()}", encoding="utf-8")

    # A kernel that never ends would be waited for without end: say where, and stop.
    faulthandler.dump_traceback_later(arguments.budget + 120, exit=True, file=sys.__stderr__)
    try:
        report = run(bench, arguments.only, keep)
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps(dataclasses.asdict(report), indent=2) if arguments.json else report.table())
    if path is not None:
        print(f"kept in {path}", file=sys.stderr)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
