"""SGLang's flags as settings of the cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from unified_cache.config import CacheConfig
from unified_cache.engines.sglang import EngineError
from unified_cache.errors import ArgumentError

__all__ = ["EXTRA", "FLAG", "IGNORED", "extra_config", "make_config", "storage_name"]

# What the JSON of --hicache-storage-backend-extra-config may have: settings for which SGLang has no flag.
EXTRA = (
    "storage",
    "storage_timeout",
    "storage_read_threads",
    "storage_write_threads",
    "storage_compression",
    "storage_warm",
    "storage_tree_pages",
    "storage_head_groups",
    "kv_heads",
    "prefetch_threshold",
    "load_back_threshold",
    "write_through_threshold",
    "host_order",
    "host_pinned",
    "host_huge_pages",
    "host_numa_node",
    "copy_blocks",
    "copy_threads",
    "copy_pages",
    "alloc_wait",
    "model",
)
# Names that SGLang has for some of them.
_THEIRS = {
    "prefetch_timeout_base": "prefetch_timeout",
    "prefetch_timeout_per_ki_token": "prefetch_timeout_per_1024",
}
# SGLang itself asks for these where it makes the backend; here nobody needs them.
IGNORED = frozenset({"allocator", "backend_name", "class_name", "interface_v1", "module_path"})
FLAG = "--hicache-storage-backend-extra-config"


def extra_config(given: str | None) -> dict[str, Any]:
    """What the flag says: a JSON object, or ``@`` and the path of a file with one.

    Raises:
        ArgumentError: it can not be read, or is something else.
    """
    if not given:
        return {}
    try:
        text = Path(given[1:]).read_text(encoding="utf-8") if given.startswith("@") else given
        settings = json.loads(text)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{FLAG} must be a JSON object or @file with one: {error}") from None
    if not isinstance(settings, dict):
        raise ArgumentError(f"{FLAG} must be a JSON object, not {settings!r}")
    return settings


def storage_name(backend: str | None, extra: dict[str, Any]) -> str | None:
    """The storage's URL or folder; None if there is none.

    Raises:
        ArgumentError: a backend of SGLang's own, or none that says where.
    """
    if backend is None:
        if "storage" in extra:
            raise ArgumentError(f"{FLAG} has a storage: that needs --hicache-storage-backend dynamic")
        return None
    example = f"""--hicache-storage-backend dynamic {FLAG} '{{"storage": "/mnt/pages"}}'"""
    if backend != "dynamic":
        raise ArgumentError(
            f"--hicache-storage-backend {backend} is SGLang's own; write {example} (any URL of unified-cache)"
        )
    storage = extra.get("storage")
    if not isinstance(storage, str) or not storage:
        raise ArgumentError(
            f"--hicache-storage-backend dynamic needs a storage, a URL or a folder: write {example}"
        )
    return storage


def make_config(
    memory: Any,
    *,
    page_size: int,
    model: str,
    weight_version: str | None,
    tiers: bool,
    heads: int | None = None,
    events: bool = False,
) -> CacheConfig:
    """The settings of the cache.

    Args:
        memory: SGLang's memory settings, resolved (``runtime_context.get_memory()``).
        page_size: tokens a page.
        model: names the model, for what is stored.
        weight_version: of its weights.
        tiers: ``--enable-hierarchical-cache`` was given; else there is the device alone.
        heads: of keys and values of the whole model, if ranks share them.
        events: somebody wants to know what comes and goes.

    Raises:
        ArgumentError: a setting that is out of range or unknown; the message has SGLang's flag where it has
            one.
        EngineError: a mode of HiCache that we do not have.
    """
    extra = extra_config(memory.hicache_storage_backend_extra_config)
    unknown = sorted(set(extra) - set(EXTRA) - set(_THEIRS) - IGNORED)
    if unknown:
        allowed = ", ".join((*EXTRA, *_THEIRS))
        raise ArgumentError(f"{FLAG} has no setting {unknown[0]!r}, allowed: {allowed}")
    if memory.hicache_host_memory_mode != "cache":
        raise EngineError(
            f"--hicache-host-memory-mode {memory.hicache_host_memory_mode}: unified-cache has cache only"
        )
    storage = storage_name(memory.hicache_storage_backend, extra)
    if storage is not None and not tiers:
        raise ArgumentError("--hicache-storage-backend needs --enable-hierarchical-cache")
    own = {name: value for name, value in extra.items() if name in EXTRA} | {"storage": storage}
    own |= {ours: extra[theirs] for theirs, ours in _THEIRS.items() if theirs in extra}
    if tiers:
        own |= {
            "write_policy": memory.hicache_write_policy,
            "hicache_ratio": 2.0 if memory.hicache_ratio is None else float(memory.hicache_ratio),
            "hicache_size": float(memory.hicache_size) or None,
            "host_layout": memory.hicache_mem_layout,
            "prefetch_policy": memory.hicache_storage_prefetch_policy,
        }
    else:
        own["write_policy"] = None
    fields = {field.name for field in dataclasses.fields(CacheConfig)}
    assert set(own) <= fields, "a setting that CacheConfig does not have"
    return CacheConfig(
        **{
            "model": model,
            "weight_version": weight_version or "",
            "page_size": page_size,
            "events": events,
            "kv_heads": heads,
            "eviction_policy": memory.radix_eviction_policy.lower(),
            "policy_options": memory.radix_eviction_policy_config,
        }
        | own
    )
