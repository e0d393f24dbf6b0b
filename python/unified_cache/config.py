"""The settings of a cache, checked before anything is allocated."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from unified_cache._native import PrefixTree
from unified_cache.errors import ArgumentError
from unified_cache.pools.layouts import HOST_LAYOUTS

__all__ = ["HOST_LAYOUTS", "PREFETCH_POLICIES", "CacheConfig"]

PREFETCH_POLICIES = ("best_effort", "timeout", "wait_complete")
_WRITE_POLICIES = ("write_through", "write_through_selective", "write_back", None)


def _one_of(setting: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(repr(name) for name in allowed)
        raise ArgumentError(f"{setting} must be one of {listed}, not {value!r}")


def _integer(setting: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(f"{setting} must be {allowed}, not {value!r}")
    if value < low or (high is not None and value > high):
        raise ArgumentError(f"{setting} must be {allowed}, not {value}")


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _number(setting: str, value: object, *, above: float | None = None, times: int = 1) -> None:
    """A number that is still one when it was multiplied with `times`."""
    allowed = "a number >= 0" if above is None else f"a number > {above:g}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ArgumentError(f"{setting} must be {allowed}, not {value!r}")
    if not _finite(value * times):
        raise ArgumentError(f"{setting} must be {allowed} that a machine can have, not {value!r}")
    if value < 0 or (above is not None and value <= above):
        raise ArgumentError(f"{setting} must be {allowed}, not {value!r}")


def _folder(setting: str, value: object) -> None:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ArgumentError(f"{setting} must be a folder's path or file:///path, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How a cache is set up.

    Args:
        page_size: tokens a page, 1 to 256; that of the device pool.
        write_policy: when a prefix goes to host: "write_through" at its first insert,
            "write_through_selective" at its third hit, "write_back" when the device evicts it;
            None: there is no host tier, eviction deletes.
        write_through_threshold: hits at which a prefix goes to host; None: 1, selective 3.
        hicache_ratio: host pages for each device page.
        hicache_size: size of the host pool in GB (10**9 bytes); wins over the ratio.
        host_layout: how a page lies in host memory.
        eviction_policy: one of `PrefixTree.eviction_policies()`.
        policy_options: settings of the eviction policy by name.
        load_back_threshold: shorter host hits (in tokens) are computed again, not copied.
        storage: a folder that holds pages for longer than the process, as a path or ``file:///path``;
            None: no storage.
        prefetch_policy: how long a request waits for storage: "best_effort" not at all, "wait_complete"
            until everything found was read, "timeout" at most `prefetch_timeout` and
            `prefetch_timeout_per_1024` for every 1,024 tokens asked for.
        prefetch_threshold: shorter storage hits (in tokens) are computed again, not read.
        prefetch_timeout: seconds.
        prefetch_timeout_per_1024: seconds for 1,024 tokens.
        model: name of the model, needed with storage: stored pages of another one are never hits.
        weight_version: version of its weights: likewise.

    Raises:
        ArgumentError: a setting that is out of range or unknown; the message lists what is allowed.
    """

    page_size: int = 64
    write_policy: Literal["write_through", "write_through_selective", "write_back"] | None = "write_through"
    write_through_threshold: int | None = None
    hicache_ratio: float = 2.0
    hicache_size: float | None = None
    host_layout: str = "page_first"
    eviction_policy: str = "lru"
    policy_options: Mapping[str, int] | None = None
    load_back_threshold: int = 10
    storage: str | os.PathLike[str] | None = None
    prefetch_policy: str = "timeout"
    prefetch_threshold: int = 256
    prefetch_timeout: float = 1.0
    prefetch_timeout_per_1024: float = 0.25
    model: str = ""
    weight_version: str = ""

    def __post_init__(self) -> None:
        _integer("page_size", self.page_size, 1, 256)
        _one_of("write_policy", self.write_policy, _WRITE_POLICIES)
        _number("hicache_ratio", self.hicache_ratio, above=0, times=2**63)  # no pool has that many bytes
        if self.hicache_size is not None:
            _number("hicache_size", self.hicache_size, above=0, times=10**9)
        _one_of("host_layout", self.host_layout, HOST_LAYOUTS)
        _one_of("eviction_policy", self.eviction_policy, tuple(PrefixTree.eviction_policies()))
        _integer("load_back_threshold", self.load_back_threshold, 0)
        _one_of("prefetch_policy", self.prefetch_policy, PREFETCH_POLICIES)
        _integer("prefetch_threshold", self.prefetch_threshold, 0)
        _number("prefetch_timeout", self.prefetch_timeout)
        _number("prefetch_timeout_per_1024", self.prefetch_timeout_per_1024)
        for setting in ("model", "weight_version"):
            if not isinstance(getattr(self, setting), str):
                raise ArgumentError(f"{setting} must be a string, not {getattr(self, setting)!r}")
        if self.storage is not None:
            self._check_storage()
        self.make_tree()

    def _check_storage(self) -> None:
        _folder("storage", self.storage)
        if self.write_policy is None:
            raise ArgumentError(
                "storage needs a host tier: write_policy must be 'write_through', "
                "'write_through_selective' or 'write_back', not None"
            )
        if not self.model:
            raise ArgumentError("storage needs model=...: it names whose pages these are")

    def make_tree(self) -> PrefixTree:
        """An empty tree with these settings; it checks those that are its own."""
        return PrefixTree(
            self.page_size,
            eviction_policy=self.eviction_policy,
            policy_options=self.policy_options,
            write_policy=self.write_policy,
            write_through_threshold=self.write_through_threshold,
        )
