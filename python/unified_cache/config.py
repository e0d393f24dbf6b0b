"""The settings of a cache, checked before anything is allocated."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unified_cache._native import PrefixTree
from unified_cache.errors import ArgumentError, StorageError
from unified_cache.pools.layouts import HOST_LAYOUTS, host_layout
from unified_cache.storage.compression import CODECS
from unified_cache.storage.contract import Backend
from unified_cache.storage.urls import DEADLINE_SECONDS, StorageUrl

__all__ = ["HOST_LAYOUTS", "PREFETCH_POLICIES", "CacheConfig"]

PREFETCH_POLICIES = ("best_effort", "timeout", "wait_complete")
HOST_ORDERS = ("auto", "copies_first", "leaves_first")
PINNED = ("auto", "require", "off")
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


def _threshold(setting: str, value: object) -> None:
    if isinstance(value, str):
        if value != "auto":
            raise ArgumentError(f"{setting} must be an integer >= 0 or 'auto', not {value!r}")
        return
    _integer(setting, value, 0)


def _of_pools(setting: str, value: object) -> None:
    """A number that goes with heads, for all pools or for each; None: it follows from the others."""
    for each in value if isinstance(value, list | tuple) else (value,):
        if each is not None:
            _integer(setting, each, 1, 65535)


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
        host_layout: how pages lie in host memory, one of `HOST_LAYOUTS`: "page_first" has each page
            contiguous, "page_first_direct" also each of its layers, "page_head" has the heads outermost
            within a page, so that ranks of different TP sizes share pages; "layer_first" is like the device,
            and goes with no storage.
        host_order: what leaves the host first: "copies_first" copies of what is also on device,
            "leaves_first" what only the host holds; "auto": the second if the host pool has more pages than
            the device.
        host_register_chunk: bytes of host memory that are registered with the GPU in one piece, at most.
        host_pinned: "auto": host memory that can not be registered with the GPU is used as it is, with a
            warning; "require": it is refused; "off": it is not registered.
        host_huge_pages: ask for huge pages; "auto": without a warning where there are none.
        host_numa_node: where the host memory lies; "auto": near the GPU; None: wherever the system puts it.
        eviction_policy: one of `PrefixTree.eviction_policies()`.
        policy_options: settings of the eviction policy by name.
        load_back_threshold: shorter host hits (in tokens) are computed again, not copied; "auto": those that
            copying takes longer for than computing, as measured.
        pin_share: part of the host pool's tokens that pins may keep.
        copy_blocks: blocks of 1,024 threads that a copy kernel takes on a GPU.
        copy_threads: threads of a copy between CPU memories; None: chosen by the cores.
        copy_pages: the most pages in one submission; None: everything that waits.
        alloc_wait: seconds that `alloc` may wait for the next copy under way to end and free pages.
        events: queue an event for each change of a tier, for `UnifiedCache.take_events`.
        storage: what holds pages for longer than the process: a URL (see `unified_cache.storage.urls`), a
            folder's path, or a `Backend`, which the cache closes; None: no storage.
        storage_timeout: seconds that a call to the storage may take; after that it is a miss.
        storage_read_threads: threads that look for and read stored pages.
        storage_write_threads: threads that write them.
        storage_warm: part of the host pool that may be in use for what was stored last to come back to host
            after a start, in the background, before somebody asks for it; 0: only what is asked for.
        storage_tree_pages: pages that the stored tree may know, at about 70 bytes each.
        storage_compression: "zstd" or "lz4": stored pages are compressed, where that makes them smaller.
        kv_heads: heads of keys and values of the whole model, or one number for each pool: where there are
            fewer than ranks, several of these hold the same ones. None: those of the device pool, times the
            ranks that share the heads.
        storage_head_groups: objects that a page with all these heads is cut into, or one number for each
            pool; None: one for each rank that has heads of its own. Ranks of several TP sizes share pages if
            all have the least common multiple of these sizes, and host_layout="page_head". Without effect on
            a latent buffer (MLA).
        prefetch_policy: how long a request waits for storage: "best_effort" not at all, "wait_complete"
            until everything found was read, "timeout" at most `prefetch_timeout` and
            `prefetch_timeout_per_1024` for every 1,024 tokens asked for.
        prefetch_threshold: shorter storage hits (in tokens) are computed again, not read; "auto" as above.
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
    host_order: Literal["auto", "copies_first", "leaves_first"] = "auto"
    host_register_chunk: int = 256 * 10**9
    host_pinned: Literal["auto", "require", "off"] = "auto"
    host_huge_pages: bool | Literal["auto"] = "auto"
    host_numa_node: int | Literal["auto"] | None = "auto"
    eviction_policy: str = "lru"
    policy_options: Mapping[str, int] | None = None
    load_back_threshold: int | Literal["auto"] = 10
    pin_share: float = 0.25
    copy_blocks: int = 2
    copy_threads: int | None = None
    copy_pages: int | None = None
    alloc_wait: float = 10.0
    events: bool = False
    storage: str | os.PathLike[str] | Backend | None = None
    storage_timeout: float = DEADLINE_SECONDS
    storage_read_threads: int = 4
    storage_write_threads: int = 2
    storage_warm: float = 0.5
    storage_tree_pages: int = 4_000_000
    storage_compression: Literal["zstd", "lz4"] | None = None
    kv_heads: int | Sequence[int | None] | None = None
    storage_head_groups: int | Sequence[int | None] | None = None
    prefetch_policy: str = "timeout"
    prefetch_threshold: int | Literal["auto"] = 256
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
        _one_of("host_order", self.host_order, HOST_ORDERS)
        _integer("host_register_chunk", self.host_register_chunk, 4096)
        _one_of("host_pinned", self.host_pinned, PINNED)
        if self.host_numa_node not in ("auto", None):
            _integer("host_numa_node", self.host_numa_node, 0)
        _one_of("eviction_policy", self.eviction_policy, tuple(PrefixTree.eviction_policies()))
        _threshold("load_back_threshold", self.load_back_threshold)
        _number("pin_share", self.pin_share)
        if self.pin_share > 1:
            raise ArgumentError(f"pin_share must be a number in 0..1, not {self.pin_share!r}")
        _integer("copy_blocks", self.copy_blocks, 1, 65535)
        for setting in ("copy_threads", "copy_pages"):
            if getattr(self, setting) is not None:
                _integer(setting, getattr(self, setting), 1)
        _number("alloc_wait", self.alloc_wait)
        _one_of("prefetch_policy", self.prefetch_policy, PREFETCH_POLICIES)
        _threshold("prefetch_threshold", self.prefetch_threshold)
        _number("prefetch_timeout", self.prefetch_timeout)
        _number("prefetch_timeout_per_1024", self.prefetch_timeout_per_1024)
        if not isinstance(self.events, bool):
            raise ArgumentError(f"events must be True or False, not {self.events!r}")
        if not isinstance(self.host_huge_pages, bool) and self.host_huge_pages != "auto":
            raise ArgumentError(
                f"host_huge_pages must be True, False or 'auto', not {self.host_huge_pages!r}"
            )
        for setting in ("model", "weight_version"):
            if not isinstance(getattr(self, setting), str):
                raise ArgumentError(f"{setting} must be a string, not {getattr(self, setting)!r}")
        _number("storage_timeout", self.storage_timeout, above=0)
        _integer("storage_read_threads", self.storage_read_threads, 1, 256)
        _integer("storage_write_threads", self.storage_write_threads, 1, 256)
        _number("storage_warm", self.storage_warm)
        if self.storage_warm > 1:
            raise ArgumentError(f"storage_warm must be a number in 0..1, not {self.storage_warm!r}")
        _integer("storage_tree_pages", self.storage_tree_pages, 1, 2**31 - 1)
        _one_of("storage_compression", self.storage_compression, (None, *CODECS))
        _of_pools("kv_heads", self.kv_heads)
        _of_pools("storage_head_groups", self.storage_head_groups)
        if self.storage is not None:
            self.check_storage(self.storage)
        self.make_tree()

    def check_storage(self, storage: object) -> None:
        """Refuse a storage that can not be used with these settings, before it is opened.

        Raises:
            ArgumentError: no URL, path or backend, or a setting that goes with no storage.
        """
        if not isinstance(storage, str | os.PathLike | Backend):
            raise ArgumentError(f"storage must be a URL, a folder's path or a Backend, not {storage!r}")
        if not isinstance(storage, Backend):
            try:
                StorageUrl.parse(storage)
            except StorageError as error:
                raise ArgumentError(str(error)) from None
        if self.write_policy is None:
            raise ArgumentError(
                "storage needs a host tier: write_policy must be 'write_through', "
                "'write_through_selective' or 'write_back', not None"
            )
        if not host_layout(self.host_layout).contiguous_pages:
            whole = ", ".join(repr(name) for name in HOST_LAYOUTS if host_layout(name).contiguous_pages)
            raise ArgumentError(
                "storage keeps pages as they lie on host, each in one piece: "
                f"host_layout must be one of {whole}, "
                f"not {self.host_layout!r}"
            )
        if not self.model:
            raise ArgumentError("storage needs model=...: it names whose pages these are")

    def make_tree(self, device_pages: int = 1, host_pages: int = 1) -> PrefixTree:
        """An empty tree with these settings, for pools of these sizes; it checks those that are its own."""
        order = self.host_order
        if order == "auto":
            # A host pool that holds more than the device keeps what the device has anyway: its copies there
            # are of what was used last. In a smaller one they would leave no room for anything else.
            order = "leaves_first" if host_pages > device_pages else "copies_first"
        has_host = self.write_policy is not None
        return PrefixTree(
            self.page_size,
            eviction_policy=self.eviction_policy,
            policy_options=self.policy_options,
            write_policy=self.write_policy,
            write_through_threshold=self.write_through_threshold,
            host_order=order,
            events=self.events,
            pin_capacity=int(self.pin_share * host_pages) * self.page_size if has_host else None,
        )
