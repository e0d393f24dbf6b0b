"""The cache inside SGLang: ``--radix-cache-backend unified-cache``.

SGLang calls `register` in each of its processes (entry point ``sglang.srt.plugins``). What it registers is
looked at, and everything else imported, only by a scheduler that was told to use it.
"""

from __future__ import annotations

from typing import Any

from unified_cache.errors import UnifiedCacheError

__all__ = ["NAME", "EngineError", "make_cache", "register"]

NAME = "unified-cache"


class EngineError(UnifiedCacheError, RuntimeError):
    """An engine, a version of it, a model or a platform that can not be served; says why, in one line."""


def register() -> None:
    """Make ``--radix-cache-backend unified-cache`` known to the SGLang of this process; once is enough."""
    from sglang.srt.mem_cache import registry

    if NAME not in registry.registered_radix_cache_backends():
        registry.register_radix_cache_backend(NAME, make_cache)


def make_cache(context: Any) -> Any:
    """The prefix cache of one scheduler of SGLang.

    Args:
        context: a ``TreeCacheBuildContext``.

    Raises:
        EngineError: the installed SGLang, the model or the settings can not be served.
        ArgumentError: a setting that is out of range or unknown.
        StorageError: the storage can not be used.
    """
    from unified_cache.engines.sglang_version import check_version

    check_version()
    from unified_cache.engines.sglang_radix import build

    return build(context)
