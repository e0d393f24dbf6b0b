"""Names of stored pages: what a page holds, and everything that changes its bytes."""

import hashlib
import json
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["fingerprint", "page_keys"]

_VERSION = 1  # of the bytes inside a page; a new one makes all pages stored before misses


def fingerprint(
    *,
    model: str,
    weight_version: str,
    kind: str,
    dtype: str,
    layers: int,
    heads: int,
    head_dim: int,
    page_size: int,
    layout: str,
) -> str:
    """16 hex digits that differ as soon as any of these does."""
    parts = {
        "version": _VERSION,
        "model": model,
        "weight_version": weight_version,
        "dtype": dtype,
        "layers": layers,
        "heads": heads,
        "head_dim": head_dim,
        "page_size": page_size,
        "layout": layout,
    }
    if kind != "mha":  # pages of MHA pools have had their keys since before there were others
        parts["kind"] = kind
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def page_keys(digests: npt.NDArray[np.uint8], short_fingerprint: str) -> list[str]:
    """The keys of pages with these digests, uint8 (pages, 32): digest in hex, a dash, the fingerprint."""
    rows: Iterable[npt.NDArray[np.uint8]] = digests
    return [f"{row.tobytes().hex()}-{short_fingerprint}" for row in rows]
