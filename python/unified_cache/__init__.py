"""A hierarchical KV cache for LLM serving. So far: the prefix tree that decides what is held where.

>>> from unified_cache import PrefixTree
>>> tree = PrefixTree(page_size=2)
>>> tree.insert([1, 2, 3, 4], [10, 11]).prefix_len
0
>>> tree.match_prefix([1, 2, 3, 4, 5]).device_length
4
"""

import warnings

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
    InvariantError,
    LockError,
    PoisonedError,
    UnifiedCacheError,
    UnknownNodeError,
)

__all__ = [
    "Ack",
    "ArgumentError",
    "BackupDone",
    "BackupPlan",
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
    "NodeInfo",
    "Pin",
    "PoisonedError",
    "PrefixTree",
    "UnifiedCacheError",
    "UnknownNodeError",
    "__version__",
    "page_hashes",
]

__version__: str = _native.__version__

if _native.DEBUG_BUILD:
    warnings.warn(
        "unified_cache: the native module is a debug build, many times slower than a release build; "
        "build it with `make install` or `maturin develop --release`",
        RuntimeWarning,
        stacklevel=2,
    )
