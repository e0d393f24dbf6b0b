"""What one rank has of the objects of a page: against an obvious model, for many ways to share."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unified_cache import ArgumentError, CacheConfig, page_hashes
from unified_cache.pools.device import DevicePool, MhaDevicePool, MlaDevicePool
from unified_cache.ranks.layout import RankLayout
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.keys import KeySpace
from unified_cache.storage.shares import key_space, pool_shares
from unified_cache.storage.urls import open_storage

HASHES = page_hashes(np.arange(8), 4)


def mha(heads: int, layers: int = 2) -> MhaDevicePool:
    return MhaDevicePool(2, 4, layers, heads, 3)


def mla() -> MlaDevicePool:
    return MlaDevicePool(2, 4, 2, 5)


def space(pools: DevicePool | list[DevicePool], layout: dict[str, int], **settings: Any) -> KeySpace:
    pools = pools if isinstance(pools, list) else [pools]
    config = CacheConfig(page_size=4, model="m", **({"host_layout": "page_head"} | settings))
    ranks = RankLayout(**layout)
    return key_space(config, ranks, pools, pool_shares(config, ranks, pools))


def layouts_of(tp: int, dp: int = 1, cp: int = 1) -> list[dict[str, int]]:
    """All ranks of a stage in which `tp` share the heads."""
    ranks = tp * dp * cp
    return [{"tp_size": ranks, "tp_rank": rank, "dp_size": dp, "cp_size": cp} for rank in range(ranks)]


def heads_of(heads: int, tp: int, rank: int) -> range:
    """The heads that a rank has, as engines deal them out."""
    if tp <= heads:
        return range(rank * heads // tp, (rank + 1) * heads // tp)
    first = rank // (tp // heads)
    return range(first, first + 1)


def test_objects_are_numbered_through_the_whole_model() -> None:
    rng = random.Random(1)
    for heads, groups in itertools.product((1, 2, 4, 8, 12), (1, 2, 3, 4, 6, 8, 12)):
        if heads % groups:
            continue
        seen = set()
        for tp in (1, 2, 3, 4, 6, 8, 16):
            own = len(heads_of(heads, tp, 0))
            shards = heads // own
            if heads % own or tp % shards or groups % shards:
                continue
            dp, cp = rng.choice((1, 2)), rng.choice((1, 2))
            writers: dict[tuple[int, int, str], list[int]] = defaultdict(list)
            names = defaultdict(set)
            for rank, layout in enumerate(layouts_of(tp, dp, cp)):
                keys = space(mha(own), layout, kv_heads=heads, storage_head_groups=groups)
                mine = heads_of(heads, tp, rank % tp)
                expected = [g for g in range(groups) if g * heads // groups in mine]
                assert [int(key[-4:], 16) for key in keys.keys(HASHES)] == expected * 2
                part = rank // tp % cp
                names[part].add(keys.fingerprint)
                for key in keys.written_keys(HASHES[:1]):
                    writers[rank // (tp * cp), part, key].append(rank % tp)
            # Each object of a group of ranks has one writer, the first that has it; each part its own name.
            assert len(writers) == dp * cp * groups
            for (_, _, key), ranks in writers.items():
                head = int(key[-4:], 16) * heads // groups
                assert ranks == [next(r for r in range(tp) if head in heads_of(heads, tp, r))]
            assert all(len(each) == 1 for each in names.values())
            assert len(set.union(*names.values())) == cp
            if cp == 1:
                seen |= names[0]
        # However many ranks share the heads: the same objects.
        assert len(seen) <= 1


def test_a_latent_buffer_is_one_object_that_the_first_rank_writes() -> None:
    for tp, cp in itertools.product((1, 2, 8), (1, 2)):
        spaces = [space(mla(), layout, storage_head_groups=4) for layout in layouts_of(tp, cp=cp)]
        assert [keys.written_groups for keys in spaces] == [int(rank % tp == 0) for rank in range(tp * cp)]
        assert len({keys.fingerprint for keys in spaces}) == cp
        assert {key[-4:] for keys in spaces for key in keys.keys(HASHES)} == {"0000"}
    # It is the same for any number of ranks.
    assert len({space(mla(), layouts_of(tp)[-1]).fingerprint for tp in (1, 2, 4)}) == 1


def test_by_default_each_rank_has_one_object_of_its_own() -> None:
    for host_layout in ("page_first", "page_first_direct", "page_head"):
        spaces = [space(mha(2), layout, host_layout=host_layout) for layout in layouts_of(4)]
        keys = [each.keys(HASHES[:1])[0] for each in spaces]
        assert [key[-4:] for key in keys] == ["0000", "0001", "0002", "0003"]
        assert len({key[:-4] for key in keys}) == 1
        assert all(each.written_groups == 1 for each in spaces)
    # 8 ranks and 4 heads: two ranks have the same.
    spaces = [space(mha(1), layout, kv_heads=4) for layout in layouts_of(8)]
    assert [each.keys(HASHES)[0][-4:] for each in spaces] == [f"{n // 2:04}" for n in range(8)]
    assert [each.written_groups for each in spaces] == [1, 0] * 4


def test_what_changes_the_bytes_changes_the_name() -> None:
    plain = {"tp_size": 2, "tp_rank": 1}
    names = [
        space(mha(2), plain).fingerprint,
        space(mha(2), plain | {"pp_size": 2}).fingerprint,
        space(mha(2), plain | {"pp_size": 2, "pp_rank": 1}).fingerprint,
        space(mha(2, layers=3), plain).fingerprint,
        space(mha(2), plain | {"cp_size": 2}).fingerprint,
        space(mha(2), plain | {"cp_size": 2, "tp_rank": 0}).fingerprint,
        space(mha(2), plain, host_layout="page_first").fingerprint,
        space(mha(2), plain, storage_head_groups=4).fingerprint,
        space(mha(2), plain, weight_version="2").fingerprint,
        space(mha(1), plain).fingerprint,
        space(mla(), plain).fingerprint,
        space([mha(2), mha(2)], plain).fingerprint,
    ]
    assert len(set(names)) == len(names)


def test_each_pool_has_its_own_names() -> None:
    layout = {"tp_size": 2, "tp_rank": 1}
    pools = [mla(), mha(2), mha(1)]
    keys = space(pools, layout, kv_heads=(None, 4, 1), storage_head_groups=(None, 4, None))
    assert [pool.groups for pool in keys.pools] == [1, 2, 1]
    assert [pool.first_group for pool in keys.pools] == [0, 2, 0]
    assert [pool.writes for pool in keys.pools] == [False, True, False]
    assert keys.groups == 4
    assert keys.written_groups == 2
    every = keys.keys(HASHES)
    assert len(set(every)) == 8
    assert [key[:64] for key in every] == [row.tobytes().hex() for row in HASHES for _ in range(4)]
    assert [key[-4:] for key in every] == ["0000", "0002", "0003", "0000"] * 2
    assert keys.written_keys(HASHES) == [key for at, key in enumerate(every) if at % 4 in (1, 2)]
    # The first pool has the names that it has alone: who has no draft model reads what others stored.
    assert space(mla(), layout).keys(HASHES[:1]) == every[:1]


@pytest.mark.parametrize(
    ("pools", "layout", "settings", "said"),
    [
        ([mha(2)], {}, {"storage_head_groups": 3}, ["storage_head_groups=3", "1 shards", "2 KV heads"]),
        ([mha(2)], {"tp_size": 2}, {"storage_head_groups": 1}, ["storage_head_groups=1", "2 shards"]),
        ([mha(2)], {"tp_size": 4}, {"storage_head_groups": 6}, ["storage_head_groups=6", "4 shards", "8 KV"]),
        ([mha(4)], {}, {"storage_head_groups": 8}, ["storage_head_groups=8", "4 KV heads"]),
        ([mha(2)], {"tp_size": 4}, {"kv_heads": 3}, ["kv_heads=3", "2 heads", "4 ranks"]),
        ([mha(2)], {"tp_size": 4}, {"kv_heads": 6}, ["kv_heads=6", "2 heads", "4 ranks"]),
        ([mha(2)], {}, {"kv_heads": 4}, ["kv_heads=4", "2 heads", "1 ranks"]),
        ([mha(2)], {}, {"kv_heads": 1}, ["kv_heads=1", "2 heads", "1 ranks"]),
        (
            [mha(2)],
            {},
            {"storage_head_groups": 2, "host_layout": "page_first"},
            ["storage_head_groups=2", "host_layout='page_head'", "'page_first'"],
        ),
        ([mla(), mha(3)], {}, {"storage_head_groups": 2}, ["storage_head_groups=2", "device pool 1", "3 KV"]),
        ([mha(2)], {}, {"kv_heads": (2, 2)}, ["kv_heads", "1 pools", "(2, 2)"]),
        ([mla(), mha(2)], {}, {"storage_head_groups": [1]}, ["storage_head_groups", "2 pools", "[1]"]),
    ],
)
def test_numbers_that_do_not_go_together(
    pools: list[DevicePool], layout: dict[str, int], settings: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(ArgumentError) as caught:
        space(pools, layout, **settings)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert "\n" not in str(caught.value)


GOLDEN = [
    "-8afdcf8d63e36b1f-0000",
    "-f3a5103ff10f0194-0000",
    "-f3a5103ff10f0194-0001",
]


def test_the_names_of_a_rank_do_not_change() -> None:
    # Whoever changes these makes everybody's stored pages misses.
    layout = {"tp_size": 8, "tp_rank": 5, "cp_size": 2, "pp_size": 3, "pp_rank": 1}
    keys = space([mla(), mha(2)], layout, kv_heads=4, storage_head_groups=4, weight_version="7")
    assert [key[64:] for key in keys.keys(HASHES[:1])] == GOLDEN
    assert keys.written_groups == 0


@pytest.mark.parametrize("scheme", ["file", "mmap"])
def test_slots_are_made_for_the_largest_object_whatever_comes_first(scheme: str, tmp_path: Path) -> None:
    store = open_storage(f"{scheme}://{tmp_path}/store?size=1MiB")
    guard = StorageGuard(store, object_bytes=20_000, deadline=5, clock=time.monotonic, counts=StorageCounts())
    memory = np.arange(40_512, dtype=np.uint32).astype(np.uint8)
    guard.register(memoryview(memory)[:512], memoryview(memory)[512:])
    places = [(0, 512), (512, 20_512), (20_512, 40_512)]
    views = [memoryview(memory)[start:end] for start, end in places]
    addresses = memory.ctypes.data + np.array([start for start, _ in places], np.uint64)
    names = space([mha(1), mla(), mla()], {}).keys(HASHES[:1])
    assert guard.set(names[:1], views[:1], addresses[:1]) == [PageStatus.HIT]
    assert guard.set(names, views, addresses) == [PageStatus.HIT] * 3
    before = memory.copy()
    memory[:] = 0
    # In any order, of any sizes.
    at = [1, 0, 2]
    found = guard.get([names[n] for n in at], [views[n] for n in at], addresses[at])
    assert found == [PageStatus.HIT] * 3
    assert np.array_equal(memory, before)
    guard.close()
