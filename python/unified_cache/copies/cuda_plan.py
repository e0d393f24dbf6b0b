"""Which pages of a submission go through the copy engines, and which through the kernel.

The rule. Where a page's part of a plane is contiguous on both sides (`Geometry.one_run`), pages that are
consecutive on both sides make a run, and a run is one copy for each plane: a plain one where pages follow
each other without a gap, else one of as many rows as there are pages. A run goes to the copy engines if a
copy moves at least `CopyRule.min_bytes`, and a row at least `min_row_bytes`; below that the engines' fixed
cost a copy (some microseconds, mostly the caller's own if copies are queued one by one) is more than the
kernel's. Everything else goes through the kernel in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.copies.geometry import Geometry, Side
from unified_cache.errors import ArgumentError
from unified_cache.pools.allocator import Pages

__all__ = ["CopyRule", "EngineCopies", "Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class CopyRule:
    """When a run of pages goes to the copy engines.

    Attributes:
        min_bytes: of a run in one plane, if copies are queued one by one.
        min_batched_bytes: the same, where the driver takes many copies in one call.
        min_row_bytes: of a page in one plane, if there are gaps between pages.
        max_copies: of a submission; the longest runs go first, what is left goes through the kernel. Bounds
            the time that submitting takes.
    """

    min_bytes: int = 256 << 10
    min_batched_bytes: int = 64 << 10
    min_row_bytes: int = 16 << 10
    max_copies: int = 4096


@dataclass(frozen=True, slots=True)
class EngineCopies:
    """Copies of one layer or more for the copy engines; rows of a copy follow each other at the sides' page
    strides.

    Attributes:
        device: uint64, where each copy begins on the device.
        host: uint64, and on the host.
        pages: int64, its pages: rows, if they do not follow each other without a gap.
    """

    device: npt.NDArray[np.uint64]
    host: npt.NDArray[np.uint64]
    pages: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Plan:
    """A submission.

    Attributes:
        device_pages: what the kernel copies; host_pages likewise.
        runs: int64 (runs, 3): first device page, first host page, pages.
    """

    device_pages: Pages
    host_pages: Pages
    runs: npt.NDArray[np.int64]

    def engine_copies(self, geometry: Geometry, layers: range) -> EngineCopies:
        """The copies of all runs in some layers, all parts."""

        def begins(side: Side, first: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
            planes = side.addresses[layers.start : layers.stop].reshape(-1, 1)
            offsets: npt.NDArray[np.uint64] = first.astype(np.uint64) * np.uint64(side.page_stride)
            return (planes + offsets).ravel()

        planes = len(layers) * geometry.parts
        return EngineCopies(
            begins(geometry.device, self.runs[:, 0]),
            begins(geometry.host, self.runs[:, 1]),
            np.tile(self.runs[:, 2], planes),
        )


def _crossing(host_pages: Pages, side: Side, part_bytes: int, edges: Sequence[int]) -> npt.NDArray[np.int64]:
    """For each page, how many edges lie before it, in all planes together; -1 if one lies inside it."""
    before = np.zeros(len(host_pages), np.int64)
    crossed = np.zeros(len(host_pages), np.bool_)
    places = np.asarray(edges, np.uint64)
    offsets: npt.NDArray[np.uint64] = host_pages.astype(np.uint64) * np.uint64(side.page_stride)
    for plane in side.addresses.flat:
        begin = offsets + plane
        first = np.searchsorted(places, begin, side="right")
        last = np.searchsorted(places, begin + np.uint64(part_bytes), side="left")
        crossed |= first != last
        before += first
    before[crossed] = -1
    return before


def make_plan(
    device_pages: Pages,
    host_pages: Pages,
    geometry: Geometry,
    rule: CopyRule,
    *,
    batched: bool,
    edges: Sequence[int] = (),
) -> Plan:
    """Part pages into runs for the copy engines and the rest.

    Args:
        device_pages: ids; the order of the pairs does not matter.
        host_pages: as many ids.
        geometry: both sides.
        rule: when the copy engines are worth it.
        batched: plain copies are queued many at a time.
        edges: addresses where a registration of host memory ends and the next one begins, ascending. No copy
            reaches over one.
    """
    nothing = np.empty((0, 3), np.int64)
    smallest = rule.min_batched_bytes if batched and geometry.seamless else rule.min_bytes
    copies_a_run = geometry.layers * geometry.parts
    worth = geometry.one_run and (geometry.seamless or geometry.part_bytes >= rule.min_row_bytes)
    if not worth or len(device_pages) * geometry.part_bytes < smallest or copies_a_run > rule.max_copies:
        return Plan(device_pages, host_pages, nothing)
    order = np.argsort(device_pages, kind="stable")
    device, host = device_pages[order].astype(np.int64), host_pages[order].astype(np.int64)
    breaks = (np.diff(device) != 1) | (np.diff(host) != 1)
    crossing = None
    if edges:
        crossing = _crossing(host.astype(np.uint32), geometry.host, geometry.part_bytes, edges)
        breaks |= (np.diff(crossing) != 0) | (crossing[1:] < 0)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    counts = np.diff(np.concatenate([starts, [len(device)]]))
    chosen = np.flatnonzero(counts * geometry.part_bytes >= smallest)
    if crossing is not None:
        chosen = chosen[crossing[starts[chosen]] >= 0]
    most = rule.max_copies // copies_a_run
    if len(chosen) > most:
        chosen = np.sort(chosen[np.argsort(-counts[chosen], kind="stable")[:most]])
    if not len(chosen):
        return Plan(device_pages, host_pages, nothing)
    taken = np.zeros(len(starts), np.bool_)
    taken[chosen] = True
    rest = ~np.repeat(taken, counts)
    runs = np.stack([device[starts[chosen]], host[starts[chosen]], counts[chosen]], axis=1)
    return Plan(device[rest].astype(np.uint32), host[rest].astype(np.uint32), runs)


def check_pages(name: str, pages: Pages, of: int) -> Pages:
    """The list as the engine keeps it.

    Raises:
        ArgumentError: a page that is not in the pool.
    """
    kept = np.ascontiguousarray(pages, np.uint32)
    if len(kept) and int(kept.max()) >= of:
        raise ArgumentError(f"{name} page {int(kept.max())} is not in 0..{of - 1}")
    return kept


def chunks(count: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover `count`."""
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
