"""Names of stored objects: what a page holds, and everything that changes its bytes.

A key is ``<digest of the page, 64 hex digits>-<fingerprint, 16>-<head group, 4>``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["KEY", "KeySpace", "PoolKeys", "fingerprint"]

# Of the bytes inside a page and of the form of keys; a new one makes all pages stored before misses.
_VERSION = 3

# What every key looks like.
KEY = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}-[0-9a-f]{4}")


def fingerprint(
    *,
    model: str,
    weight_version: str,
    pool: int,
    kind: str,
    dtype: str,
    layers: int,
    stage: int,
    stages: int,
    heads: int,
    head_groups: int,
    head_dim: int,
    page_size: int,
    context_part: int,
    context_parts: int,
    layout: str,
) -> str:
    """16 hex digits that differ as soon as any of these does.

    Nothing in it says how many ranks share the heads: what some wrote, others read.

    Args:
        model: its name.
        weight_version: of its weights.
        pool: which of the cache's pools, from 0.
        kind: of attention, such as "mha" or "mla".
        dtype: of the elements.
        layers: of the pool.
        stage: of the pipeline, whose layers these are.
        stages: how many there are.
        heads: of the whole model, not of one rank.
        head_groups: objects that a page with all heads is cut into.
        head_dim: elements of a head.
        page_size: tokens a page.
        context_part: which part of a page this is, where ranks share the context.
        context_parts: how many there are.
        layout: of pages on host.
    """
    parts = {
        "version": _VERSION,
        "model": model,
        "weight_version": weight_version,
        "pool": pool,
        "kind": kind,
        "dtype": dtype,
        "layers": layers,
        "stage": stage,
        "stages": stages,
        "heads": heads,
        "head_groups": head_groups,
        "head_dim": head_dim,
        "page_size": page_size,
        "context_part": context_part,
        "context_parts": context_parts,
        "layout": layout,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """The names of the objects of one pool's pages.

    Attributes:
        fingerprint: see `fingerprint`.
        groups: head groups of this rank: objects a page.
        first_group: the number of the first one, among those of all ranks.
        writes: this rank writes them; if not, another one that holds the same does.
    """

    fingerprint: str
    groups: int = 1
    first_group: int = 0
    writes: bool = True


class KeySpace:
    """The names of the objects that one rank reads and writes: for each page those of its first pool, then of
    the next one, each with its head groups.

    Args:
        pools: of the pools of the cache.

    Attributes:
        pools: as given.
        groups: objects a page.
        written_groups: objects a page that this rank writes.
    """

    def __init__(self, pools: Iterable[PoolKeys]) -> None:
        self.pools = tuple(pools)
        self._ends = _ends(self.pools)
        self._written_ends = _ends([pool for pool in self.pools if pool.writes])
        self.groups = len(self._ends)
        self.written_groups = len(self._written_ends)

    @property
    def endings(self) -> list[str]:
        """What stands behind a page's digest in the keys of its objects."""
        return list(self._ends)

    @property
    def fingerprint(self) -> str:
        """16 hex digits for all pools together; with one pool, those in its keys."""
        each = [pool.fingerprint for pool in self.pools]
        return each[0] if len(each) == 1 else hashlib.sha256("-".join(each).encode()).hexdigest()[:16]

    def keys(self, digests: npt.NDArray[np.uint8]) -> list[str]:
        """The keys of pages with these digests, uint8 (pages, 32): page by page, each with its objects."""
        return _keys(digests, self._ends)

    def written_keys(self, digests: npt.NDArray[np.uint8]) -> list[str]:
        """Those of them that this rank writes."""
        return _keys(digests, self._written_ends)


def _ends(pools: Iterable[PoolKeys]) -> list[str]:
    return [
        f"-{pool.fingerprint}-{group:04x}"
        for pool in pools
        for group in range(pool.first_group, pool.first_group + pool.groups)
    ]


def _keys(digests: npt.NDArray[np.uint8], ends: list[str]) -> list[str]:
    whole = digests.tobytes().hex()
    pages = [whole[at : at + 64] for at in range(0, len(whole), 64)]
    if len(ends) == 1:
        end = ends[0]
        return [page + end for page in pages]
    return [page + end for page in pages for end in ends]
