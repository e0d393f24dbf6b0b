"""Which SGLang is installed, and whether its interface is the one that we know."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import metadata
from typing import Any

from unified_cache.engines.sglang import EngineError

__all__ = ["KNOWN", "check_storage_version", "check_version", "refuse", "version"]

KNOWN = "0.5.23"

# What a prefix cache must have, and may be asked for more than this only if the interface has changed.
_ABSTRACT = frozenset({"checkpoint", "dec_lock_ref", "evict", "inc_lock_ref", "match_prefix", "reset"})
_CALLED = frozenset(
    {
        "check_hicache_events",
        "check_prefetch_progress",
        "finish",
        "free_kv_row",
        "init_load_back",
        "path_device_indices",
        "pop_prefetch_loaded_span",
        "ready_to_load_host_cache",
        "release_aborted_request",
        "release_host_resources",
    }
)
# check_prefetch_progress is called, but declared by those who have it.
_DECLARED = _CALLED - {"check_prefetch_progress"}
_FIELDS = {
    "MatchResult": {"device_prefix_len", "last_device_node", "last_host_node", "best_match_node"},
    "MatchPrefixParams": {"key", "req"},
    "EvictParams": {"num_tokens"},
    "EvictResult": {"num_tokens_evicted"},
    "IncLockRefResult": {"node_id"},
    "InitLoadBackParams": {"best_match_node", "host_hit_length", "req"},
}
_STORAGE_ABSTRACT = frozenset({"batch_get", "batch_set", "exists", "get", "set"})
_STORAGE_CALLED = frozenset({"batch_exists", "batch_get_v1", "batch_set_v1", "register_mem_pool_host"})


def version() -> str:
    """The number of the installed SGLang; "unknown" where it was not installed as a package."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "unknown"


def refuse(what: str, differences: list[str]) -> None:
    """Refuse the installed SGLang if there are differences.

    Raises:
        EngineError: there are; the message has its version and all of them.
    """
    if differences:
        raise EngineError(
            f"SGLang {version()} has another {what} than the one that unified-cache knows, that of {KNOWN}: "
            f"{'; '.join(sorted(differences))}"
        )


def _fields(of: type) -> set[str]:
    if dataclasses.is_dataclass(of):
        return {field.name for field in dataclasses.fields(of)}
    return set(getattr(of, "_fields", ()))


def check_version() -> None:
    """Refuse an SGLang whose interface for prefix caches is not the one that we know.

    Raises:
        EngineError: it differs; the message has the version and the first differences.
    """
    try:
        from sglang.srt.mem_cache import base_prefix_cache as interface
    except ImportError as error:
        refuse("interface for prefix caches", [f"it can not be imported ({error})"])
        raise
    base: Any = getattr(interface, "BasePrefixCache", None)
    if base is None:
        refuse("interface for prefix caches", ["there is no BasePrefixCache"])
    differences = []
    if more := set(base.__abstractmethods__) - _ABSTRACT:
        differences.append(f"it asks for {', '.join(sorted(more))}")
    if missing := {name for name in _ABSTRACT | _DECLARED if not hasattr(base, name)}:
        differences.append(f"it has no {', '.join(sorted(missing))}")
    elif "up_to" not in inspect.signature(base.checkpoint).parameters:
        differences.append("checkpoint takes no up_to")
    for name, needed in _FIELDS.items():
        if lacking := needed - _fields(getattr(interface, name, type(None))):
            differences.append(f"{name} has no {', '.join(sorted(lacking))}")
    refuse("interface for prefix caches", differences)


def check_storage_version() -> None:
    """Refuse an SGLang whose interface for storages of HiCache is not the one that we know.

    Raises:
        EngineError: it differs; the message has the version and the first differences.
    """
    try:
        from sglang.srt.mem_cache import hicache_storage as interface
    except ImportError as error:
        refuse("interface for storages of HiCache", [f"it can not be imported ({error})"])
        raise
    base: Any = getattr(interface, "HiCacheStorage", None)
    if base is None:
        refuse("interface for storages of HiCache", ["there is no HiCacheStorage"])
    differences = []
    if more := set(base.__abstractmethods__) - _STORAGE_ABSTRACT:
        differences.append(f"it asks for {', '.join(sorted(more))}")
    if missing := {name for name in _STORAGE_ABSTRACT | _STORAGE_CALLED if not hasattr(base, name)}:
        differences.append(f"it has no {', '.join(sorted(missing))}")
    refuse("interface for storages of HiCache", differences)
