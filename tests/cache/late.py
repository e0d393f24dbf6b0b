"""Caches whose copies end when the test says so."""

from __future__ import annotations

from typing import Any

from tests.cache import support
from tests.cache.support import LateCopies, Pool
from unified_cache import UnifiedCache

__all__ = ["late", "make_cache", "settle"]


def make_cache(pages: int | Pool = 16, **settings: Any) -> UnifiedCache:
    """`support.make_cache` with `LateCopies`."""
    return support.make_cache(pages, **({"copies": LateCopies.between} | settings))


def late(cache: UnifiedCache) -> LateCopies:
    """What copies for a cache of `make_cache`."""
    assert isinstance(cache._copies, LateCopies)
    return cache._copies


def settle(cache: UnifiedCache) -> None:
    """Let all copies end that are under way, and those that follow from them."""
    for _ in range(4):
        cache.tick()
        late(cache).run_all()
    cache.tick()
