"""What ranks share: which of the objects of a page one rank holds, and which of these it writes.

Objects are numbered through the whole model, so that ranks find what others wrote whatever their number. Of
those that several ranks hold alike (a latent buffer, and heads of which there are fewer than ranks) the first
of these writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from unified_cache.errors import ArgumentError
from unified_cache.storage.keys import KeySpace, PoolKeys, fingerprint

if TYPE_CHECKING:
    from unified_cache.config import CacheConfig
    from unified_cache.pools.device import DevicePool
    from unified_cache.ranks.layout import RankLayout

__all__ = ["PoolShare", "key_space", "pool_shares"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PoolShare:
    """What one rank has of one pool's pages.

    Attributes:
        heads: of the whole model.
        head_groups: objects that a page with all of them is cut into.
        groups: of these, how many this rank has.
        first_group: the first one.
        writes: this rank writes them.
    """

    heads: int
    head_groups: int
    groups: int
    first_group: int
    writes: bool


def pool_shares(
    config: CacheConfig, layout: RankLayout, pools: Sequence[DevicePool]
) -> tuple[PoolShare, ...]:
    """What this rank has of the pages of each pool.

    Raises:
        ArgumentError: numbers that do not go together; the message has them.
    """
    kv_heads = _each("kv_heads", config.kv_heads, len(pools))
    head_groups = _each("storage_head_groups", config.storage_head_groups, len(pools))
    shares = []
    for at, pool in enumerate(pools):
        name = "the device pool" if len(pools) == 1 else f"device pool {at}"
        shares.append(_share(pool, name, layout, kv_heads[at], head_groups[at], config.host_layout))
    return tuple(shares)


def key_space(
    config: CacheConfig, layout: RankLayout, pools: Sequence[DevicePool], shares: Sequence[PoolShare]
) -> KeySpace:
    """The names of the objects of this rank."""
    keys = []
    for at, (pool, share) in enumerate(zip(pools, shares, strict=True)):
        name = fingerprint(
            model=config.model,
            weight_version=config.weight_version,
            pool=at,
            kind=pool.kind,
            dtype=str(pool.dtype),
            layers=pool.shape.layers,
            stage=layout.pp_rank,
            stages=layout.pp_size,
            heads=share.heads,
            head_groups=share.head_groups,
            head_dim=pool.shape.run_bytes // pool.dtype.itemsize,
            page_size=pool.shape.tokens,
            context_part=layout.cp_rank,
            context_parts=layout.cp_size,
            layout=config.host_layout,
        )
        keys.append(PoolKeys(name, share.groups, share.first_group, share.writes))
    return KeySpace(keys)


def _each(setting: str, value: _T | Sequence[_T], pools: int) -> list[_T]:
    """A setting of each pool, from one for all of them or one for each."""
    if not isinstance(value, list | tuple):
        return [cast(_T, value)] * pools
    if len(value) != pools:
        raise ArgumentError(f"{setting} must be one number, or one for each of {pools} pools, not {value!r}")
    return list(value)


def _share(
    pool: DevicePool,
    name: str,
    layout: RankLayout,
    kv_heads: int | None,
    head_groups: int | None,
    host_layout: str,
) -> PoolShare:
    ranks = layout.attention_tp_size
    if pool.kind == "mla":
        return PoolShare(1, 1, 1, 0, writes=layout.attention_tp_rank == 0)
    own = pool.shape.heads
    heads = ranks * own if kv_heads is None else kv_heads
    # Ranks that follow each other hold the same heads where there are more ranks than shards.
    shards, rest = divmod(heads, own)
    if rest or ranks % shards:
        raise ArgumentError(
            f"kv_heads={heads} in shards of the {own} heads of {name} do not go evenly to the {ranks} ranks "
            "that share them"
        )
    replicas = ranks // shards
    groups = shards if head_groups is None else head_groups
    if groups % shards or heads % groups:
        raise ArgumentError(
            f"storage_head_groups={groups} must be a multiple of the {shards} shards of {name}, and divide "
            f"its {heads} KV heads (kv_heads)"
        )
    here = groups // shards
    if here > 1 and host_layout != "page_head":
        raise ArgumentError(
            f"storage_head_groups={groups} cuts the pages of {name} in {here}: that needs "
            f"host_layout='page_head', where the heads of a group lie together, not {host_layout!r}"
        )
    shard, replica = divmod(layout.attention_tp_rank, replicas)
    return PoolShare(heads, groups, here, shard * here, writes=replica == 0)
