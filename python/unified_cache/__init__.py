"""A hierarchical KV cache for LLM serving: a prefix tree that decides what is held where, and a cache on it.

>>> from unified_cache import PrefixTree
>>> tree = PrefixTree(page_size=2)
>>> tree.insert([1, 2, 3, 4], [10, 11]).prefix_len
0
>>> tree.match_prefix([1, 2, 3, 4, 5]).device_length
4
"""

import importlib
import warnings
from typing import TYPE_CHECKING

from unified_cache import _native
from unified_cache._native import (
    Ack,
    BackupDone,
    BackupPlan,
    Evicted,
    HostEvicted,
    HostInserted,
    HostLockReceipt,
    Inserted,
    LoadBackPlan,
    LockReceipt,
    Match,
    NodeInfo,
    Pin,
    PrefixTree,
    page_hashes,
)
from unified_cache.errors import (
    ArgumentError,
    BusyError,
    CapacityError,
    ClosedError,
    CopyError,
    InvariantError,
    LockError,
    MissingDependencyError,
    PoisonedError,
    RankError,
    RankLostError,
    RanksDifferError,
    StorageError,
    StorageTimeoutError,
    TraceError,
    UnifiedCacheError,
    UnknownNodeError,
)

if TYPE_CHECKING:
    from unified_cache.cache import UnifiedCache
    from unified_cache.config import CacheConfig
    from unified_cache.ranks.group import Ranks
    from unified_cache.ranks.layout import RankLayout
    from unified_cache.request import Request

__all__ = [
    "Ack",
    "ArgumentError",
    "BackupDone",
    "BackupPlan",
    "BusyError",
    "CacheConfig",
    "CapacityError",
    "ClosedError",
    "CopyError",
    "Evicted",
    "HostEvicted",
    "HostInserted",
    "HostLockReceipt",
    "Inserted",
    "InvariantError",
    "LoadBackPlan",
    "LockError",
    "LockReceipt",
    "Match",
    "MissingDependencyError",
    "NodeInfo",
    "Pin",
    "PoisonedError",
    "PrefixTree",
    "RankError",
    "RankLayout",
    "RankLostError",
    "Ranks",
    "RanksDifferError",
    "Request",
    "StorageError",
    "StorageTimeoutError",
    "TraceError",
    "UnifiedCache",
    "UnifiedCacheError",
    "UnknownNodeError",
    "__version__",
    "page_hashes",
]

__version__: str = _native.__version__

# Loaded when they are first asked for, so that whoever only wants the tree pays for nothing else.
_LAZY = {
    "CacheConfig": "unified_cache.config",
    "RankLayout": "unified_cache.ranks.layout",
    "Ranks": "unified_cache.ranks.group",
    "Request": "unified_cache.request",
    "UnifiedCache": "unified_cache.cache",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


if _native.DEBUG_BUILD:
    warnings.warn(
        "unified_cache: the native module is a debug build, many times slower than a release build; "
        "build it with `make install` or `maturin develop --release`",
        RuntimeWarning,
        stacklevel=2,
    )
