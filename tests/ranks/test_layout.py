"""Which ranks there are, and who agrees with whom."""

from itertools import chain, product

import pytest

from unified_cache.errors import ArgumentError
from unified_cache.ranks.layout import RankLayout


def sglang(tp_rank: int, tp_size: int, dp_size: int, cp_size: int) -> tuple[int, int, int]:
    """DP rank, CP rank and TP rank of attention, as SGLang computes them from a rank of the stage."""
    attention_tp_size = tp_size // dp_size // cp_size
    return (
        tp_rank // (attention_tp_size * cp_size),
        tp_rank // attention_tp_size % cp_size,
        tp_rank % attention_tp_size,
    )


def layouts() -> list[RankLayout]:
    return [
        RankLayout(tp_size=dp * cp * tp, dp_size=dp, cp_size=cp, pp_size=pp)
        for dp, cp, tp, pp in product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 3))
    ]


def test_ranks_are_numbered_as_in_sglang() -> None:
    for layout in layouts():
        for world_rank in range(layout.world_size):
            one = layout.at(world_rank)
            assert one.world_rank == world_rank == one.pp_rank * one.tp_size + one.tp_rank
            numbers = sglang(one.tp_rank, one.tp_size, one.dp_size, one.cp_size)
            assert (one.dp_rank, one.cp_rank, one.attention_tp_rank) == numbers
            assert one.group_rank == one.cp_rank * one.attention_tp_size + one.attention_tp_rank
            assert one.at(layout.world_rank) == layout


def test_each_rank_is_in_one_group_with_those_of_its_stage_and_dp_rank() -> None:
    for layout in layouts():
        groups = layout.attention_groups()
        assert sorted(chain(*groups)) == list(range(layout.world_size))
        for group in groups:
            members = [layout.at(rank) for rank in group]
            assert [one.group_rank for one in members] == list(range(layout.group_size))
            assert len({(one.pp_rank, one.dp_rank) for one in members}) == 1


def test_a_pipeline_has_one_rank_of_each_stage() -> None:
    for layout in layouts():
        pipelines = layout.pipelines()
        assert sorted(chain(*pipelines)) == list(range(layout.world_size))
        for tp_rank, ranks in enumerate(pipelines):
            assert [(layout.at(rank).pp_rank, layout.at(rank).tp_rank) for rank in ranks] == [
                (stage, tp_rank) for stage in range(layout.pp_size)
            ]


def test_stage_groups_are_the_groups_of_one_dp_rank_in_all_stages() -> None:
    for layout in layouts():
        groups = layout.stage_groups()
        assert sorted(chain(*groups)) == list(range(layout.world_size))
        for dp_rank, ranks in enumerate(groups):
            assert {layout.at(rank).dp_rank for rank in ranks} == {dp_rank}
            assert sorted(ranks) == ranks


def test_dp_attention_of_two_over_eight_ranks() -> None:
    layout = RankLayout(tp_size=8, tp_rank=6, dp_size=2, cp_size=2)
    assert layout.attention_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (layout.dp_rank, layout.group_rank, layout.cp_rank, layout.attention_tp_rank) == (1, 2, 1, 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tp_size": 0}, "tp_size must be an integer >= 1, not 0"),
        ({"pp_size": True}, "pp_size must be an integer >= 1, not True"),
        ({"tp_size": 4, "tp_rank": 4}, r"tp_rank must be an integer in 0\.\.3, not 4"),
        ({"pp_size": 2, "pp_rank": -1}, r"pp_rank must be an integer in 0\.\.1, not -1"),
        (
            {"tp_size": 6, "dp_size": 2, "cp_size": 2},
            "tp_size=6 must be a multiple of dp_size=2 times cp_size=2",
        ),
    ],
)
def test_numbers_that_do_not_go_together(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RankLayout(**arguments)


def test_no_such_rank() -> None:
    with pytest.raises(ArgumentError, match=r"world_rank must be in 0\.\.7, not 8"):
        RankLayout(tp_size=4, pp_size=2).at(8)
