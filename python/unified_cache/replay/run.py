"""Running traces through the tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from unified_cache._native import Replay
from unified_cache.errors import ArgumentError
from unified_cache.replay.report import ReplayReport
from unified_cache.replay.traces import Trace

__all__ = ["Settings", "replay"]

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
HostOrder = Literal["auto", "leaves_first", "copies_first"]

SLICE = 256  # requests in one call: some milliseconds, so that a bar moves and Ctrl-C is heard
MAX_TOKEN = 2**32 - 1
MAX_PAGES = 2**32 - 1


_RANGES = {
    "device_blocks": (1, MAX_PAGES),
    "host_blocks": (0, MAX_PAGES),
    "page_size": (1, 256),
    "write_through_threshold": (1, 2**63 - 1),
}


@dataclass(frozen=True)
class Settings:
    """The cache that traces are replayed against; sizes are in blocks of the trace.

    Raises:
        ArgumentError: a number out of range.
    """

    device_blocks: int = 20_000
    host_blocks: int = 0
    """0: there is no host tier."""
    page_size: int | None = None
    """Token by token, with pages of this many tokens; None: block by block."""
    eviction_policy: str = "lru"
    policy_options: Mapping[str, int] = field(default_factory=dict)
    """Whole-number options of the policy."""
    write_policy: WritePolicy = "write_through"
    """When blocks go to host."""
    write_through_threshold: int | None = None
    """Hits from which a write-through policy copies a node; None: 1, selective 3."""
    host_order: HostOrder = "auto"
    """What a full host gives up first: "copies_first", copies of what the device has too; "leaves_first",
    what only the host has; "auto": the latter if the host is the larger tier."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ArgumentError(f"{name} is {value}, allowed is {low} to {high}")
        for name, value in self.policy_options.items():
            if not -(2**63) <= value < 2**63:
                raise ArgumentError(f"policy_options[{name!r}] is {value}, which is out of range")


def replay(
    traces: Sequence[Trace],
    settings: Settings | None = None,
    *,
    progress: Callable[[int], object] | None = None,
    check: bool = False,
) -> ReplayReport:
    """Serve the requests of all traces, one trace after the other, with one cache.

    Args:
        traces: what to replay. Their ids are taken as names in one space: equal ids are equal blocks.
        settings: the cache; the default is one tier of 20,000 blocks under LRU.
        progress: called with the number of requests served since its last call.
        check: check all invariants of the tree at the end.

    Raises:
        ArgumentError: a setting that can not be, no trace, or traces with different block sizes.
    """
    settings = settings or Settings()
    sizes = sorted({trace.block_size for trace in traces})
    if len(sizes) != 1:
        raise ArgumentError(f"traces have block sizes {sizes}, one is needed" if sizes else "traces is empty")
    options = list(settings.policy_options.items())
    cache = Replay(**asdict(settings) | {"policy_options": options}, block_size=sizes[0])
    for trace, ids in zip(traces, token_ids(traces), strict=True):
        ends = np.cumsum(trace.block_counts, dtype=np.int64)
        for first in range(0, len(trace), SLICE):
            last = min(first + SLICE, len(trace))
            begin = ends[first - 1] if first else 0
            cache.run(
                trace.input_lengths[first:last], trace.block_counts[first:last], ids[begin : ends[last - 1]]
            )
            if progress is not None:
                progress(last - first)
    if check:
        cache.check_invariants()
    return ReplayReport(
        **cache.counters(),
        seconds=cache.seconds,
        block_size=sizes[0],
        settings=settings,
        bad_lines=sum(trace.bad_lines for trace in traces),
        backward=sum(trace.backward for trace in traces),
    )


def token_ids(traces: Sequence[Trace]) -> list[npt.NDArray[np.uint32]]:
    """The ids of each trace as tokens: as they are if they fit, else numbered from 0."""
    if all(int(trace.hash_ids.max(initial=0)) <= MAX_TOKEN for trace in traces):
        return [trace.hash_ids.astype(np.uint32) for trace in traces]
    every = np.concatenate([trace.hash_ids for trace in traces])
    dense = np.unique(every, return_inverse=True)[1].astype(np.uint32)
    ends = np.cumsum([len(trace.hash_ids) for trace in traces])
    return np.split(dense, ends[:-1])
