"""Which ranks there are, and which of them this one is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unified_cache.errors import ArgumentError
from unified_cache.ranks.agreement import check_count

__all__ = ["RankLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Where one rank stands among those that serve a model together.

    A stage of the pipeline has ``tp_size`` ranks. With DP attention they are ``dp_size`` groups that serve
    different requests; the ranks of such a group hold shards of one tree, and agree: `group_size` of them.
    Within a group, `attention_tp_size` ranks share the heads, and ``cp_size`` times as many the context.

    Ranks are numbered as SGLang numbers them: ``tp_rank = (dp * cp_size + cp) * attention_tp_size + tp``, and
    among the processes of all stages ``world_rank = pp_rank * tp_size + tp_rank``.

    Args:
        tp_size: ranks of a stage.
        tp_rank: of this one in its stage.
        dp_size: groups of DP attention in a stage.
        cp_size: ranks that share a context, each with its own part of every page.
        pp_size: stages of the pipeline.
        pp_rank: the stage of this one.

    Raises:
        ArgumentError: numbers that do not go together; the message has them.
    """

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    pp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size", "cp_size", "pp_size"):
            check_count(name, getattr(self, name))
        for name, size in (("tp_rank", self.tp_size), ("pp_rank", self.pp_size)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
                raise ArgumentError(f"{name} must be an integer in 0..{size - 1}, not {value!r}")
        if self.tp_size % (self.dp_size * self.cp_size):
            raise ArgumentError(
                f"tp_size={self.tp_size} must be a multiple of dp_size={self.dp_size} times "
                f"cp_size={self.cp_size}"
            )

    @property
    def group_size(self) -> int:
        """Ranks that hold shards of one tree, and agree."""
        return self.tp_size // self.dp_size

    @property
    def group_rank(self) -> int:
        """The number of this one among them."""
        return self.tp_rank % self.group_size

    @property
    def dp_rank(self) -> int:
        """Which of the groups of DP attention this rank belongs to."""
        return self.tp_rank // self.group_size

    @property
    def attention_tp_size(self) -> int:
        """Ranks that share the heads."""
        return self.group_size // self.cp_size

    @property
    def attention_tp_rank(self) -> int:
        """The number of this one among them."""
        return self.tp_rank % self.attention_tp_size

    @property
    def cp_rank(self) -> int:
        """Which part of the context is this rank's."""
        return self.group_rank // self.attention_tp_size

    @property
    def world_size(self) -> int:
        """Ranks of all stages."""
        return self.pp_size * self.tp_size

    @property
    def world_rank(self) -> int:
        """The number of this one among them."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def at(self, world_rank: int) -> RankLayout:
        """The same, as another of the ranks sees it.

        Raises:
            ArgumentError: there is no such rank.
        """
        if not 0 <= world_rank < self.world_size:
            raise ArgumentError(f"world_rank must be in 0..{self.world_size - 1}, not {world_rank!r}")
        return replace(self, pp_rank=world_rank // self.tp_size, tp_rank=world_rank % self.tp_size)

    def attention_groups(self) -> list[list[int]]:
        """The world ranks of every group that agrees, group by group, the groups of the first stage first.

        No two groups share a rank, so a group whose requests have run out keeps nobody waiting.
        """
        return [
            list(range(first, first + self.group_size))
            for first in range(0, self.world_size, self.group_size)
        ]

    def pipelines(self) -> list[list[int]]:
        """The world ranks that have the same number in their stages, from the first stage to the last."""
        return [list(range(first, self.world_size, self.tp_size)) for first in range(self.tp_size)]

    def stage_groups(self) -> list[list[int]]:
        """The world ranks that serve the same requests, over all stages: one list a group of a stage."""
        return [
            [
                stage * self.tp_size + dp * self.group_size + rank
                for stage in range(self.pp_size)
                for rank in range(self.group_size)
            ]
            for dp in range(self.dp_size)
        ]
