"""Caches of several ranks, one call after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from tests.cache.support import PAGE, LateCopies, make_pool, page_content, read_page, write_page
from tests.ranks.baton import run_ranks
from unified_cache import CacheConfig, Request, UnifiedCache, page_hashes
from unified_cache.ranks.agreement import Agreement
from unified_cache.ranks.group import Ranks
from unified_cache.ranks.layout import RankLayout

__all__ = ["each_rank", "make_rank", "rank_content", "read_served", "write_computed"]

_T = TypeVar("_T")


def each_rank(size: int, program: Callable[[Agreement], _T]) -> list[_T]:
    """Run `program` on so many ranks; returns what it comes to on each."""
    results: dict[int, _T] = {}

    def run(agreement: Agreement) -> None:
        results[agreement.rank] = program(agreement)

    run_ranks(size, run)
    return [results[rank] for rank in range(size)]


def make_rank(agreement: Agreement, pages: int = 16, **settings: Any) -> UnifiedCache:
    """The cache of one rank, with copies that end when the test says so."""
    others = {name: settings.pop(name) for name in ("clock", "pool") if name in settings}
    pool = others.pop("pool", None) or make_pool(pages)
    config = CacheConfig(page_size=PAGE, **({"model": "test", "load_back_threshold": 0} | settings))
    layout = RankLayout(tp_size=agreement.size, tp_rank=agreement.rank)
    return UnifiedCache(config, pool, copies=LateCopies.between, ranks=Ranks(layout, agreement), **others)


def late_copies(cache: UnifiedCache) -> LateCopies:
    assert isinstance(cache._copies, LateCopies)
    return cache._copies


def rank_content(cache: UnifiedCache, digest: bytes) -> torch.Tensor:
    """What a rank computes: other bytes than any other rank."""
    return page_content(cache.device_pool.planes, digest) + 50 * cache._ranks.agreement.rank


def _digests(request: Request) -> list[bytes]:
    rows = page_hashes(request.tokens, PAGE, extra_key=request._extra_key, cache_salt=request._cache_salt)
    return [row.tobytes() for row in rows]


def write_computed(request: Request) -> None:
    """Write the whole pages past what the request was served."""
    cache, pages = request._cache, request.pages.tolist()
    for at, digest in enumerate(_digests(request)):
        if at >= request.device_length // PAGE:
            write_page(cache.device_pool.planes, pages[at], rank_content(cache, digest))


def read_served(request: Request) -> None:
    """What the request was served are the bytes that this rank has computed."""
    cache, pages = request._cache, request.pages.tolist()
    for at, digest in enumerate(_digests(request)[: request.device_length // PAGE]):
        assert torch.equal(read_page(cache.device_pool.planes, pages[at]), rank_content(cache, digest)), at


def serve_rank(cache: UnifiedCache, prompt: Sequence[int] | np.ndarray) -> Request:
    """One request from begin to finish, checked."""
    request = cache.begin(np.asarray(prompt))
    request.wait_prefetch()
    request.load_back()
    request.extend()
    request.wait()
    read_served(request)
    write_computed(request)
    request.finish()
    return request


def empty(cache: UnifiedCache) -> None:
    """Device and host lose what nobody holds."""
    host = cache._host_pages
    assert host is not None
    cache.evict(cache.device_pool.num_pages)
    cache._controller.make_host_room(host.free_pages + cache.tree.host_tokens // PAGE)
