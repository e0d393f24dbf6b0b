"""What ranks share through a storage: each has its part of every page, and the same one finds it again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.support import (
    PAGE,
    MemoryStore,
    Pool,
    assert_nothing_held,
    read_pages,
    same,
    toks,
    write_pages,
)
from tests.ranks.baton import run_ranks
from unified_cache import ArgumentError, CacheConfig, UnifiedCache, page_hashes
from unified_cache.errors import RankError
from unified_cache.pools.device import MhaDevicePool, MlaDevicePool
from unified_cache.ranks.agreement import Agreement, OneRank
from unified_cache.ranks.group import Ranks
from unified_cache.ranks.layout import RankLayout
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus

RUN = 4  # elements of a head, and of a latent


class Unasked(OneRank):
    """A rank of several that asks nobody: what it alone comes to can be seen."""

    alone = True  # type: ignore[assignment]

    def __init__(self, layout: RankLayout) -> None:
        super().__init__()
        self.size, self.rank = layout.group_size, layout.group_rank


class Rank:
    """One rank's cache, in front of a model whose heads are dealt out.

    Args:
        layout: of this rank.
        pools: for each pool the heads of the whole model; 0 for a latent buffer, which every rank has.
        storage: of all ranks.
        agreement: with the others; None: it asks nobody.
    """

    def __init__(
        self,
        layout: dict[str, int],
        pools: Sequence[int],
        storage: str | Backend,
        agreement: Agreement | None = None,
        **settings: Any,
    ) -> None:
        self.layout, self.pools = RankLayout(**layout), pools
        own: list[Pool] = []
        for heads in pools:
            if heads == 0:
                own.append(MlaDevicePool(16, PAGE, 2, RUN, torch.uint8))
            else:
                own.append(MhaDevicePool(16, PAGE, 3, len(self.heads(heads)), RUN, torch.uint8))
        config = CacheConfig(
            page_size=PAGE,
            model="m",
            storage=storage,
            kv_heads=[heads or None for heads in pools],
            **(
                {
                    "host_layout": "page_head",
                    "prefetch_threshold": PAGE,
                    "prefetch_policy": "wait_complete",
                    "load_back_threshold": 0,
                    "storage_warm": 0.0,
                }
                | settings
            ),
        )
        self.cache = UnifiedCache(
            config,
            own if len(own) > 1 else own[0],
            ranks=Ranks(self.layout, agreement or Unasked(self.layout)),
        )
        self.planes = [pool.planes for pool in own]
        self.cache.tick()  # the ranks tell one another that they can use the storage

    def heads(self, heads: int) -> range:
        """Which of the heads of the whole model this rank has."""
        tp, rank = self.layout.attention_tp_size, self.layout.attention_tp_rank
        each = max(heads // tp, 1)
        first = rank * heads // tp
        return range(first, first + each)

    def content(self, digest: bytes) -> list[torch.Tensor]:
        """What the model writes into a page: this rank's heads of it, and its part of the context."""
        parts = []
        for at, (heads, planes) in enumerate(zip(self.pools, self.planes, strict=True)):
            shape = planes.shape
            seed = digest + bytes([at, self.layout.cp_rank, self.layout.pp_rank])
            stream = torch.from_numpy(
                np.frombuffer(
                    hashlib.shake_256(seed).digest(
                        shape.layers * shape.parts * PAGE * max(heads, 1) * shape.run_bytes
                    ),
                    np.uint8,
                ).copy()
            )
            whole = stream.reshape(shape.layers, shape.parts, PAGE, max(heads, 1), shape.run_bytes)
            own = self.heads(heads) if heads else range(1)
            parts.append(whole[:, :, :, own.start : own.stop].contiguous())
        return parts

    def compute(self, tokens: np.ndarray) -> None:
        """Serve a prompt that nothing is known of, and back it up."""
        request = self.cache.begin(tokens)
        request.extend()
        for page, digest in zip(request.pages.tolist(), page_hashes(tokens, PAGE), strict=False):
            write_pages(self.planes, page, self.content(digest.tobytes()))
        request.finish()
        assert self.cache.flush(30)

    def found(self, tokens: np.ndarray) -> int:
        """Pages that come from storage, whose bytes are what this rank would have computed."""
        request = self.cache.begin(tokens)
        request.wait_prefetch()
        hit = request.storage_hit_length // PAGE
        request.load_back()
        request.extend()
        request.wait()
        assert request.device_length == hit * PAGE
        for page, digest in zip(request.pages.tolist()[:hit], page_hashes(tokens, PAGE), strict=False):
            assert same(read_pages(self.planes, page), self.content(digest.tobytes()))
        request.abort()
        return hit

    def close(self) -> None:
        assert_nothing_held(self.cache)
        self.cache.close()


def group(
    tp: int, pools: Sequence[int], storage: str | Backend, *, cp: int = 1, pp: int = 1, **settings: Any
) -> list[Rank]:
    """The ranks that hold one tree, of every stage."""
    return [
        Rank(
            {"tp_size": tp * cp, "tp_rank": rank, "cp_size": cp, "pp_size": pp, "pp_rank": stage},
            pools,
            storage,
            **settings,
        )
        for stage in range(pp)
        for rank in range(tp * cp)
    ]


def store_and_end(ranks: Sequence[Rank], tokens: np.ndarray) -> None:
    for rank in ranks:
        rank.compute(tokens)
        rank.close()


def find_and_end(ranks: Sequence[Rank], tokens: np.ndarray) -> list[int]:
    found = [rank.found(tokens) for rank in ranks]
    for rank in ranks:
        rank.close()
    return found


def puts(store: MemoryStore) -> int:
    return sum(count for call, count in store.calls if call == "set")


PROMPT = toks(4 * PAGE + 1)
STORAGES: dict[str, Callable[[Path], str | Backend]] = {
    "memory": lambda folder: MemoryStore(),
    "file": lambda folder: f"file://{folder}/store?size=16MiB",
    "pages": lambda folder: f"pages://{folder}/pages",
}


# Heads


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_what_some_ranks_wrote_any_number_reads(storage: str, writers: int, tmp_path: Path) -> None:
    store = STORAGES[storage](tmp_path)
    store_and_end(group(writers, [8], store, storage_head_groups=4), PROMPT)
    for readers in (1, 2, 4):
        assert find_and_end(group(readers, [8], store, storage_head_groups=4), PROMPT) == [4] * readers
    # Another cut is another object.
    assert find_and_end(group(1, [8], store, storage_head_groups=8), PROMPT) == [0]
    assert find_and_end(group(4, [8], store, storage_head_groups=8), PROMPT) == [0] * 4


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_what_is_stored_is_known_to_any_number_of_ranks(writers: int, tmp_path: Path) -> None:
    """As far as the objects that they need are there."""
    store = STORAGES["file"](tmp_path)
    store_and_end(group(writers, [8], store, storage_head_groups=4), PROMPT)
    for readers in (1, 2, 4):
        ranks = group(readers, [8], store, storage_head_groups=4)
        for rank in ranks:
            assert rank.cache.warm(10)
            assert rank.cache.match_stored(PROMPT) == 4 * PAGE
            rank.close()
    (other,) = group(1, [8], store, storage_head_groups=8)
    assert other.cache.warm(10)
    assert other.cache.match_stored(PROMPT) == 0
    other.close()
    # Without the objects of one rank the others know as much as before.
    with_all = FileBackend(tmp_path / "store")
    third = page_hashes(PROMPT, PAGE)[2].tobytes().hex()
    with_all.delete([key for key in with_all.keys() if key.startswith(third) and key.endswith("-0003")])  # noqa: SIM118
    with_all.close()
    known = []
    for rank in group(2, [8], store, storage_head_groups=4):
        assert rank.cache.warm(10)
        known.append(rank.cache.match_stored(PROMPT) // PAGE)
        rank.close()
    assert known == [4, 2]


@pytest.mark.parametrize(("writers", "readers"), [(8, 2), (2, 8), (4, 1), (1, 8)])
def test_heads_that_several_ranks_have_are_written_once(writers: int, readers: int) -> None:
    store = MemoryStore()
    store_and_end(group(writers, [2], store, storage_head_groups=2), PROMPT)
    assert puts(store) == 4 * 2
    assert len(store.pages) == 4 * 2
    assert find_and_end(group(readers, [2], store, storage_head_groups=2), PROMPT) == [4] * readers


def test_without_a_setting_ranks_of_one_size_share_in_every_layout() -> None:
    for layout in ("page_first", "page_first_direct", "page_head"):
        store = MemoryStore()
        store_and_end(group(2, [4], store, host_layout=layout), PROMPT)
        assert puts(store) == len(store.pages) == 8
        assert find_and_end(group(2, [4], store, host_layout=layout), PROMPT) == [4, 4]
        assert find_and_end(group(1, [4], store, host_layout=layout), PROMPT) == [0]


def test_a_head_group_that_is_gone_is_missed_by_the_rank_that_has_it() -> None:
    store = MemoryStore()
    store_and_end(group(1, [4], store, storage_head_groups=4), PROMPT)
    third = page_hashes(PROMPT, PAGE)[2].tobytes().hex()
    del store.pages[next(key for key in store.pages if key.startswith(third) and key.endswith("-0003"))]
    assert find_and_end(group(4, [4], store, storage_head_groups=4), PROMPT) == [4, 4, 4, 2]
    assert find_and_end(group(2, [4], store, storage_head_groups=4), PROMPT) == [4, 2]
    # Who computes it again stores just that.
    store.calls.clear()
    store_and_end(group(2, [4], store, storage_head_groups=4), PROMPT)
    assert puts(store) == 1
    assert find_and_end(group(4, [4], store, storage_head_groups=4), PROMPT) == [4] * 4


def test_stages_of_a_pipeline_have_their_own_pages() -> None:
    store = MemoryStore()
    store_and_end(group(2, [4], store, pp=2), PROMPT)
    assert len(store.pages) == 16
    assert find_and_end(group(2, [4], store, pp=2), PROMPT) == [4] * 4
    assert find_and_end(group(2, [4], store), PROMPT) == [0, 0]


# Case 45: who writes a latent buffer


def test_case_45_ranks_that_share_heads_write_a_latent_buffer_once() -> None:
    store = MemoryStore()
    ranks = group(8, [0], store)
    outcomes = []
    for rank in ranks:
        before = len(store.calls)
        rank.compute(PROMPT)
        stats = rank.cache.stats()
        outcomes.append(4 - stats["storage_failed_pages"])
        assert (len(store.calls) > before) == (rank is ranks[0])
        assert stats["storage_exists_calls"] + stats["storage_set_calls"] == (2 if rank is ranks[0] else 0)
        rank.close()
    assert puts(store) == len(store.pages) == 4
    assert min(outcomes) == 4
    # Whatever their number.
    for readers in (8, 2, 1):
        assert min(find_and_end(group(readers, [0], store), PROMPT)) == 4


def test_case_45_ranks_that_share_the_context_write_each_their_own() -> None:
    store = MemoryStore()
    store_and_end(group(1, [0], store, cp=8), PROMPT)
    assert puts(store) == len(store.pages) == 32
    assert len({key[65:81] for key in store.pages}) == 8
    assert min(find_and_end(group(1, [0], store, cp=8), PROMPT)) == 4
    # Two ranks to each part of the context: the first of each writes, all read.
    both = group(2, [0], store, cp=8)
    assert min(rank.found(PROMPT) for rank in both) == 4
    store.clear()
    store.calls.clear()
    for rank in both:
        rank.close()
    store_and_end(group(2, [0], store, cp=8), PROMPT)
    assert puts(store) == 32
    # One part of one page is gone: that page, and those behind it, are nobody's hit.
    third = page_hashes(PROMPT, PAGE)[2].tobytes().hex()
    del store.pages[next(key for key in store.pages if key.startswith(third))]
    found = find_and_end(group(2, [0], store, cp=8), PROMPT)
    assert sorted(found) == [2, 2, *[4] * 14]
    assert min(found) == 2


def test_the_writer_that_fails_is_what_counts() -> None:
    store = MemoryStore()
    store.fault = lambda: "full"
    stored = []
    for rank in group(2, [0], store):
        rank.compute(PROMPT)
        stored.append(4 - rank.cache.stats()["storage_failed_pages"])
        rank.close()
    assert stored == [0, 4]
    assert min(stored) == 0


# Case 46: two pools, one that every rank has and one that each has its own of


def test_case_46_two_pools() -> None:
    prompt = toks(PAGE + 1)
    store = MemoryStore()
    ranks = group(2, [0, 2], store)
    latent, own = (rank_keys(ranks[0], prompt)[at] for at in (0, 1))
    other = rank_keys(ranks[1], prompt)[1]
    store_and_end(ranks, prompt)
    assert sorted(store.pages) == sorted((latent, own, other))
    assert puts(store) == 3
    assert find_and_end(group(2, [0, 2], store), prompt) == [1, 1]
    for gone, found in ((other, [1, 0]), (own, [0, 1]), (latent, [0, 0])):
        body = store.pages.pop(gone)
        assert find_and_end(group(2, [0, 2], store), prompt) == found
        assert min(found) == 0
        store.pages[gone] = body
    # Damaged is as good as gone.
    store.pages[own] = store.pages[own][:-1] + bytes([store.pages[own][-1] ^ 1])
    assert find_and_end(group(2, [0, 2], store), prompt) == [0, 1]
    # The latent buffer alone is what a cache without the other pool stores, and finds.
    assert find_and_end(group(2, [0], store), prompt) == [1, 1]


def rank_keys(rank: Rank, prompt: np.ndarray) -> list[str]:
    return rank.cache._keys().keys(page_hashes(prompt, PAGE)[:1])


@pytest.mark.parametrize("storage", ["file", "pages"])
def test_pools_of_different_sizes_in_one_store(storage: str, tmp_path: Path) -> None:
    store = STORAGES[storage](tmp_path)
    # The small one comes first: slots are made for the larger one all the same.
    store_and_end(group(2, [0, 4, 2], store, storage_head_groups=(None, 4, 2)), PROMPT)
    for readers in (1, 2):
        ranks = group(readers, [0, 4, 2], store, storage_head_groups=(None, 4, 2))
        assert find_and_end(ranks, PROMPT) == [4] * readers


def test_a_call_has_objects_of_one_size() -> None:
    sizes: set[int] = set()

    class Strict(MemoryStore):
        def set(self, batch: ObjectBatch) -> list[PageStatus]:
            assert len({body.nbytes for body in batch.bodies}) == 1
            sizes.add(batch.bodies[0].nbytes)
            return super().set(batch)

        def get(self, batch: ObjectBatch) -> list[PageStatus]:
            assert len({body.nbytes for body in batch.bodies}) == 1
            return super().get(batch)

    store = Strict()
    store_and_end(group(1, [0, 4], store), PROMPT)
    assert sizes == {2 * PAGE * RUN, 3 * 2 * PAGE * 4 * RUN}
    assert find_and_end(group(1, [0, 4], store), PROMPT) == [4]


def test_a_page_is_stored_when_all_its_objects_are() -> None:
    sizes = []

    class Full(MemoryStore):
        def set(self, batch: ObjectBatch) -> list[PageStatus]:
            sizes.append(batch.bodies[0].nbytes)
            if len(sizes) == 1:
                return super().set(batch)
            return [PageStatus.FULL] * len(batch)

    store = Full()
    rank = group(1, [0, 4], store)[0]
    rank.compute(PROMPT)
    assert len(sizes) == 2
    stats = rank.cache.stats()
    assert (stats["storage_written_pages"], stats["storage_failed_pages"]) == (2, 4)
    rank.close()
    assert find_and_end(group(1, [0, 4], store), PROMPT) == [0]


# The same, agreed


def together(
    tp: int, pools: Sequence[int], storage: str | Backend, do: Callable[[Rank], object], *, cp: int = 1
) -> list[Any]:
    """What each of the ranks of a group comes to, that agree at every tick."""
    results: dict[int, Any] = {}

    def program(agreement: Agreement) -> None:
        layout = {"tp_size": tp * cp, "tp_rank": agreement.rank, "cp_size": cp}
        groups = None if 0 in pools else 4
        rank = Rank(layout, pools, storage, agreement, storage_head_groups=groups)
        results[agreement.rank] = do(rank)
        rank.close()

    run_ranks(tp * cp, program)
    return [results[rank] for rank in range(tp * cp)]


def store(prompt: np.ndarray) -> Callable[[Rank], int]:
    """Compute a prompt; what was not stored."""

    def do(rank: Rank) -> int:
        rank.compute(prompt)
        return rank.cache.stats()["storage_failed_pages"]

    return do


def find(prompt: np.ndarray) -> Callable[[Rank], int]:
    return lambda rank: rank.found(prompt)


@pytest.mark.parametrize(("tp", "cp", "count"), [(8, 1, 4), (1, 8, 32), (2, 4, 16)])
def test_case_45_agreed(tp: int, cp: int, count: int) -> None:
    shared = MemoryStore()
    assert together(tp, [0], shared, store(PROMPT), cp=cp) == [0] * 8
    assert puts(shared) == len(shared.pages) == count
    assert together(tp, [0], shared, find(PROMPT), cp=cp) == [4] * 8
    # The part of one rank is gone: all of them read what is there on all.
    third = page_hashes(PROMPT, PAGE)[2].tobytes().hex()
    del shared.pages[next(key for key in shared.pages if key.startswith(third))]
    assert together(tp, [0], shared, find(PROMPT), cp=cp) == [2] * 8


def test_case_46_agreed() -> None:
    prompt = toks(PAGE + 1)
    shared = MemoryStore()
    keys: set[str] = set()
    for rank in group(2, [0, 2], shared):
        keys.update(rank_keys(rank, prompt))
        rank.close()
    assert together(2, [0, 2], shared, store(prompt)) == [0, 0]
    assert shared.pages.keys() == keys
    assert puts(shared) == 3
    assert together(2, [0, 2], shared, find(prompt)) == [1, 1]
    for gone in keys:
        body = shared.pages.copy()
        del shared.pages[gone]
        assert together(2, [0, 2], shared, find(prompt)) == [0, 0]
        shared.pages = body


def test_what_the_writer_could_not_store_is_stored_on_no_rank() -> None:
    shared = MemoryStore()
    shared.fault = lambda: "full"
    assert together(4, [0], shared, store(PROMPT)) == [4] * 4


def test_ranks_that_agree_read_what_others_wrote() -> None:
    shared = MemoryStore()
    together(2, [4], shared, store(PROMPT))
    assert puts(shared) == 16
    assert together(4, [4], shared, find(PROMPT)) == [4] * 4
    last = page_hashes(PROMPT, PAGE)[3].tobytes().hex()
    del shared.pages[next(key for key in shared.pages if key.startswith(last) and key.endswith("-0003"))]
    assert together(4, [4], shared, find(PROMPT)) == [3] * 4


def test_numbers_that_do_not_go_together_are_an_error_on_all_ranks() -> None:
    def program(agreement: Agreement) -> None:
        bad = agreement.rank == 1
        layout = {"tp_size": 2, "tp_rank": agreement.rank}
        with pytest.raises(ArgumentError if bad else RankError):
            Rank(layout, [8], MemoryStore(), agreement, storage_head_groups=3 if bad else 4)

    run_ranks(2, program)
