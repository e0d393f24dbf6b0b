"""The ranks that a cache serves with, as one of them sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from unified_cache.errors import ArgumentError
from unified_cache.ranks.agreement import Agreement, OneRank
from unified_cache.ranks.layout import RankLayout

__all__ = ["Ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who they are, and how they agree.

    Args:
        layout: where this rank stands.
        agreement: of the ranks that hold shards of its tree: those of its group of DP attention.

    Raises:
        ArgumentError: the agreement is one of another number of ranks, or of another rank.
    """

    layout: RankLayout = field(default_factory=RankLayout)
    agreement: Agreement = field(default_factory=OneRank)

    def __post_init__(self) -> None:
        layout, agreement = self.layout, self.agreement
        if (agreement.size, agreement.rank) != (layout.group_size, layout.group_rank):
            raise ArgumentError(
                f"agreement must be of rank {layout.group_rank} of the {layout.group_size} that tp_size="
                f"{layout.tp_size} and dp_size={layout.dp_size} put into a group, not of rank "
                f"{agreement.rank} of {agreement.size}"
            )
