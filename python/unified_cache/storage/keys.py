"""Names of stored objects: what a page holds, and everything that changes its bytes.

A key is ``<digest of the page, 64 hex digits>-<fingerprint, 16>-<head group, 4>``.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["KEY", "KeySpace", "fingerprint"]

# Of the bytes inside a page and of the form of keys; a new one makes all pages stored before misses.
_VERSION = 2

# What every key looks like.
KEY = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}-[0-9a-f]{4}")


def fingerprint(
    *,
    model: str,
    weight_version: str,
    kind: str,
    dtype: str,
    layers: int,
    heads: int,
    head_groups: int,
    head_dim: int,
    page_size: int,
    layout: str,
) -> str:
    """16 hex digits that differ as soon as any of these does.

    Args:
        model: its name.
        weight_version: of its weights.
        kind: of attention, such as "mha" or "mla".
        dtype: of the elements.
        layers: of the model.
        heads: of the whole model, not of one rank.
        head_groups: objects that a page with all heads is cut into.
        head_dim: elements of a head.
        page_size: tokens a page.
        layout: of pages on host.
    """
    parts = {
        "version": _VERSION,
        "model": model,
        "weight_version": weight_version,
        "kind": kind,
        "dtype": dtype,
        "layers": layers,
        "heads": heads,
        "head_groups": head_groups,
        "head_dim": head_dim,
        "page_size": page_size,
        "layout": layout,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The names of the objects that one rank reads and writes.

    Attributes:
        fingerprint: see `fingerprint`.
        groups: head groups of this rank: objects a page.
        first_group: the number of the first one, among those of all ranks.
    """

    fingerprint: str
    groups: int = 1
    first_group: int = 0

    def keys(self, digests: npt.NDArray[np.uint8]) -> list[str]:
        """The keys of pages with these digests, uint8 (pages, 32): page by page, each with its groups."""
        ends = [f"-{self.fingerprint}-{self.first_group + group:04x}" for group in range(self.groups)]
        whole = digests.tobytes().hex()
        pages = [whole[at : at + 64] for at in range(0, len(whole), 64)]
        if self.groups == 1:
            return [page + ends[0] for page in pages]
        return [page + end for page in pages for end in ends]
