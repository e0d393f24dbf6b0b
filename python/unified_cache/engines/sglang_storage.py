"""Our storages under SGLang's own HiCache: ``--hicache-storage-backend dynamic``.

Pages go straight from and into SGLang's host pools. Each of the memory ranges that a page has there (keys,
values) is an object of ours, with its header, checksum and key; all of them, or the page is a miss. SGLang's
threads call, and nothing that a storage does is an exception there.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_serving

from unified_cache.engines import sglang_hooks
from unified_cache.engines.sglang_settings import FLAG, IGNORED, storage_name
from unified_cache.engines.sglang_version import check_storage_version
from unified_cache.engines.sglang_weights import WeightNames
from unified_cache.errors import ArgumentError
from unified_cache.storage.compression import CODECS
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.urls import DEADLINE_SECONDS, open_storage

__all__ = ["SglangStorage"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_EXTRA = ("storage", "storage_timeout", "storage_compression")
# Of the form of keys and of what is stored under them.
_VERSION = 1
_HEX = frozenset("0123456789abcdef")


class SglangStorage(HiCacheStorage):  # type: ignore[misc]
    """One of our storages as a HiCache storage.

    Args:
        storage_config: a ``HiCacheStorageConfig``; its `extra_config` has "storage", a URL or a folder, and
            may have "storage_timeout" (seconds) and "storage_compression" ("zstd" or "lz4").
        kwargs: not used.

    Raises:
        EngineError: the installed SGLang has another interface.
        ArgumentError: settings that are missing or can not be.
        StorageError: the storage can not be used.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        check_storage_version()
        sglang_hooks.register()
        extra = dict(storage_config.extra_config or {})
        if unknown := sorted(set(extra) - set(_EXTRA) - IGNORED):
            raise ArgumentError(f"{FLAG} has no setting {unknown[0]!r}, allowed: {', '.join(_EXTRA)}")
        storage = storage_name("dynamic", extra)
        assert storage is not None
        self._deadline = extra.get("storage_timeout", DEADLINE_SECONDS)
        if not isinstance(self._deadline, int | float) or not 0 < self._deadline <= threading.TIMEOUT_MAX:
            raise ArgumentError(f"storage_timeout must be a number of seconds > 0, not {self._deadline!r}")
        self._compression = extra.get("storage_compression")
        if self._compression not in (None, *CODECS):
            allowed = ", ".join(map(repr, CODECS))
            raise ArgumentError(f"storage_compression must be one of {allowed}, not {self._compression!r}")
        if not storage_config.model_name:
            raise ArgumentError("a storage needs a model's name: it says whose pages these are")
        self._config = storage_config
        self._pools: dict[str, _Pool] = {}
        self._weights = WeightNames()
        self._version = self._weights.name(get_serving().weight_version)
        self._off = False  # the weights were changed, and what SGLang holds may be of both
        self._lock = threading.Lock()
        self._failed = 0.0
        self.counts = StorageCounts()
        self._backend = open_storage(storage, self._deadline)
        self._guard: StorageGuard | None = None

    # Set up

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host pool of keys and values."""
        self.mem_pool_host = mem_pool_host
        self._add_pool(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another host pool, of a model that has several."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add_pool(host_pool_name, host_pool)

    def on_host_pools_registered(self) -> None:
        """All pools are there that there will be at the start.

        Raises:
            StorageError: the storage has no room for a page, or can not use this memory.
        """
        self._ready()

    def _add_pool(self, name: Any, pool: Any) -> None:
        known = self._pools.get(str(name))
        if known is not None and known.pool is pool:
            return
        added = _Pool(str(name), pool, self._config)
        self._pools[str(name)] = added
        if self._guard is not None:
            for region in added.memory.views:
                self._backend.register(region)

    def _ready(self) -> StorageGuard:
        """The guard; made when it is known what the pages are like."""
        with self._lock:
            if self._guard is None:
                largest = max((pool.largest for pool in self._pools.values()), default=0)
                guard = StorageGuard(
                    self._backend,
                    object_bytes=max(largest, 1),
                    deadline=self._deadline,
                    clock=time.monotonic,
                    counts=self.counts,
                    compression=self._compression,
                )
                guard.register(*(view for pool in self._pools.values() for view in pool.memory.views))
                self._guard = guard
            self._guard.watch()
            return self._guard

    def new_weights(self, version: str | None) -> None:
        """The model gets other weights now: nothing is stored or found until `flushed`.

        Args:
            version: their ``weight_version``; None: nobody has said.
        """
        self._weights.change(get_serving().weight_version, version)
        self._off = True

    def flushed(self) -> None:
        """SGLang has emptied its cache: what it holds from now on is of the weights that are there now."""
        self._version = self._weights.name(get_serving().weight_version)
        self._off = False

    # Pages by their place in a host pool

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of these pages, from the first one on, are stored."""
        return self._safely(0, lambda: self._stored(PoolName.KV, keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages; for each whether it is there now."""
        return self._safely([False] * len(keys), lambda: self._move("get", PoolName.KV, keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Write pages; for each whether it is stored now."""
        return self._safely([False] * len(keys), lambda: self._move("set", PoolName.KV, keys, host_indices))

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """The same for several pools."""
        return {transfer.name: self._transfer("get", transfer) for transfer in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """The same for several pools."""
        return {transfer.name: self._transfer("set", transfer) for transfer in transfers}

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How long a prefix can be given back: keys and values, and of each other pool what it needs."""
        return self._safely(
            PoolTransferResult.empty(), lambda: self._restorable(keys, list(pool_transfers or ()))
        )

    def _transfer(self, way: str, transfer: Any) -> list[bool]:
        keys = list(transfer.keys or ())
        return self._safely(
            [False] * len(keys), lambda: self._move(way, transfer.name, keys, transfer.host_indices)
        )

    def _stored(self, pool: Any, keys: Sequence[str]) -> int:
        if self._off:
            return 0
        of = self._pools[str(pool)]
        found = self._ready().exists([of.names(keys, self._version)])
        return 0 if found is None else found[0] // of.parts

    def _move(
        self, way: str, pool: Any, keys: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[bool]:
        if not keys or self._off:
            return [False] * len(keys)
        of = self._pools[str(pool)]
        if host_indices is None or len(host_indices) != len(keys) * of.page_size:
            raise ValueError(f"{len(keys)} pages of pool {of.name} need {of.page_size} indices each")
        bodies, addresses = of.bodies(host_indices)
        guard = self._ready()
        statuses = (guard.get if way == "get" else guard.set)(
            of.names(keys, self._version), bodies, addresses
        )
        hits = [status is PageStatus.HIT for status in statuses]
        return [all(hits[at : at + of.parts]) for at in range(0, len(hits), of.parts)]

    def _restorable(self, keys: Sequence[str], transfers: Sequence[Any]) -> PoolTransferResult:
        pages = self._stored(PoolName.KV, keys)
        found = {PoolName.KV: pages} if pages else {}
        lengths = list(range(1, pages + 1))
        for transfer in transfers:
            if not lengths:
                break
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                most = self._stored(transfer.name, keys[:pages])
                possible = set(range(1, most + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                tail = max(1, len(transfer.keys or ()))
                of = self._pools[str(transfer.name)]
                there = self._ready().exists([of.names([key], self._version) for key in keys[:pages]]) or []
                whole = [count == of.parts for count in there]
                possible = {
                    length
                    for length in range(1, len(whole) + 1)
                    if all(whole[max(0, length - tail) : length])
                }
                most = max(possible, default=0)
            else:
                raise ValueError(f"a hit policy {transfer.hit_policy} that is not known")
            if most:
                found[transfer.name] = most
            lengths = [length for length in lengths if length in possible]
        return PoolTransferResult(lengths[-1] if lengths else 0, found, lengths)

    # Pages as tensors, where SGLang makes a copy of each

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """One page, into a tensor; None if it is not stored."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Pages, into tensors; None for those that are not stored."""
        return self._safely([None] * len(keys), lambda: self._get_tensors(keys, target_locations))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write a tensor; returns whether it is stored now."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write tensors; returns whether all are stored now."""
        return self._safely(False, lambda: self._set_tensors(keys, values))

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    def _get_tensors(self, keys: Sequence[str], targets: Any) -> list[torch.Tensor | None]:
        if targets is None or len(targets) != len(keys):
            raise ValueError("there must be a tensor for each page that is read")
        if self._off:
            return [None] * len(keys)
        bodies, addresses = _of_tensors(targets)
        names = self._pools[str(PoolName.KV)].copies(keys, self._version)
        statuses = self._ready().get(names, bodies, addresses)
        return [
            target if status is PageStatus.HIT else None
            for target, status in zip(targets, statuses, strict=True)
        ]

    def _set_tensors(self, keys: Sequence[str], values: Any) -> bool:
        if self._off:
            return False
        tensors = [value.contiguous() for value in values]
        bodies, addresses = _of_tensors(tensors)
        names = self._pools[str(PoolName.KV)].copies(keys, self._version)
        statuses = self._ready().set(names, bodies, addresses)
        return all(status is PageStatus.HIT for status in statuses)

    # The rest

    def clear(self) -> None:
        """Forget everything that is stored, also what others have stored."""
        self._safely(None, self._backend.clear)

    def close(self) -> None:
        """Give back what is held."""
        if self._guard is None:
            self._backend.close()
        else:
            self._guard.close()

    def _safely(self, otherwise: _T, work: Callable[[], _T]) -> _T:
        """What `work` gives; `otherwise`, and a line in the log now and then, if it raises."""
        try:
            return work()
        except Exception:
            now = time.monotonic()
            if now - self._failed > 60:
                self._failed = now
                _log.exception("unified-cache: a call to the storage failed; it counts as a miss")
            return otherwise


class _Pool:
    """The pages of one host pool, and what their parts are called."""

    def __init__(self, name: str, pool: Any, config: Any) -> None:
        self.name = name
        self.pool = pool
        self.page_size = getattr(pool, "page_size", 1) or 1
        self.memory = _Memory(pool)
        self._prints: dict[str, str] = {}
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (ValueError, NotImplementedError, AttributeError):
            sizes = None  # only copies of whole pages can be had
        self._sizes = list(sizes or ())
        self.parts = max(len(self._sizes), 1)
        self.largest = max(self._sizes, default=0)
        about = {
            "version": _VERSION,
            "model": config.model_name,
            "pool": name,
            "kind": type(pool).__name__,
            "dtype": str(getattr(pool, "dtype", "")),
            "layout": str(getattr(pool, "layout", "")),
            "page_size": self.page_size,
            "parts": self._sizes,
            "stage": (config.pp_rank, config.pp_size),
            "context": (config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size),
            # Ranks that hold the same bytes write and read the same objects.
            "heads": None if config.is_mla_model else (config.tp_rank, config.tp_size),
        }
        self._about = json.dumps(about, sort_keys=True)

    def _print(self, form: str, version: str) -> str:
        """16 hex digits that differ as soon as anything does that changes the bytes."""
        told = f"{form} {version} {self._about}"
        found = self._prints.get(told)
        if found is None:
            found = self._prints[told] = hashlib.sha256(told.encode()).hexdigest()[:16]
        return found

    def names(self, keys: Sequence[str], version: str) -> list[str]:
        """The names of the objects of pages, page by page; `version` is what the weights are called."""
        print_ = self._print("parts", version)
        return [f"{_digest(key)}-{print_}-{part:04x}" for key in keys for part in range(self.parts)]

    def copies(self, keys: Sequence[str], version: str) -> list[str]:
        """The names of pages that are stored as one tensor each; `version` is what the weights are called."""
        print_ = self._print("whole", version)
        return [f"{_digest(key)}-{print_}-0000" for key in keys]

    def bodies(self, indices: torch.Tensor) -> tuple[list[memoryview], np.ndarray[Any, np.dtype[np.uint64]]]:
        """The memory of pages, part by part."""
        places, sizes = self.pool.get_page_buffer_meta(indices)
        views = [self.memory.at(place, size) for place, size in zip(places, sizes, strict=True)]
        return views, np.array(places, np.uint64)


class _Memory:
    """The memory that a host pool has, in one view for each of its tensors."""

    def __init__(self, pool: Any) -> None:
        regions = {}
        for tensor in _tensors(vars(pool).values()):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                regions[storage.data_ptr()] = storage.nbytes()
        self._starts = sorted(regions)
        self.views = [
            memoryview((ctypes.c_ubyte * regions[start]).from_address(start)).cast("B")
            for start in self._starts
        ]
        self._pool = pool  # so that the memory stays

    def at(self, place: int, size: int) -> memoryview:
        """The view of `size` bytes at an address."""
        at = bisect.bisect_right(self._starts, place) - 1
        offset = place - self._starts[at] if at >= 0 else -1
        if offset < 0 or offset + size > len(self.views[at]):
            raise ValueError(f"{size} bytes at {place:#x} are not in a tensor of this host pool")
        return self.views[at][offset : offset + size]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in CPU memory among these, and in lists among these."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu":
            yield value


def _of_tensors(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[memoryview], np.ndarray[Any, np.dtype[np.uint64]]]:
    views = [memoryview(tensor.view(-1).view(torch.uint8).numpy().data) for tensor in tensors]
    return views, np.array([tensor.data_ptr() for tensor in tensors], np.uint64)


def _digest(key: str) -> str:
    """64 hex digits: those of SGLang, if its key is that."""
    return key if len(key) == 64 and _HEX.issuperset(key) else hashlib.sha256(key.encode()).hexdigest()
