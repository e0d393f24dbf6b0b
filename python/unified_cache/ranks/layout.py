"""Which ranks there are, and which of them this one is."""

from __future__ import annotations

from dataclasses import dataclass

from unified_cache.errors import ArgumentError

__all__ = ["RankLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Where one rank stands among those that serve a model together.

    A stage of the pipeline has ``tp_size`` ranks. With DP attention they are ``dp_size`` groups that serve
    different requests; the ranks of such a group hold shards of one tree, and agree: `group_size` of them.
    Within a group, `attention_tp_size` ranks share the heads, ``cp_size`` times so many share the context.

    Ranks are numbered as SGLang numbers them: ``tp_rank = (dp * cp_size + cp) * attention_tp_size + tp``.

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
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{name} must be an integer >= 1, not {value!r}")
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
