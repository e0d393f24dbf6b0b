"""Small Python types that belong to the tree's results."""

from __future__ import annotations

from typing import NamedTuple


class Locks(NamedTuple):
    """Lock counts of a node: how many hold its device pages, how many its host pages."""

    device: int
    host: int
