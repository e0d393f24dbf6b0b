"""Run by the engines' Python: `SglangCache` on SGLang's own pools, as its scheduler calls it, at random.

Every slot that the cache serves is looked at: it must hold what was computed for this very prefix, whatever
it went through since. SGLang's count of slots must hold after each step. Prints "fine" in the end.
"""

import json
import random
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from unified_cache import ArgumentError, CacheConfig, UnifiedCache
from unified_cache.engines import sglang_radix
from unified_cache.engines.sglang import EngineError
from unified_cache.engines.sglang_radix import SglangCache, device_pool
from unified_cache.ranks.group import Ranks
from unified_cache.ranks.layout import RankLayout
from unified_cache.ranks.threads import ThreadRanks

LAYERS, HEADS, WIDTH = 2, 2, 4
SLOTS, LONGEST = 192, 96


class Scheduler:
    """The order of calls of SGLang's scheduler, and a model that writes down what it has computed."""

    def __init__(self, seed: int, page_size: int, *, ranks: Ranks | None = None, **settings: Any) -> None:
        self.draw = random.Random(seed)
        self.page_size = page_size
        self.pool = MHATokenToKVPool(
            SLOTS, page_size, torch.float32, HEADS, WIDTH, LAYERS, "cpu", enable_memory_saver=False
        )
        kind: Any = PagedTokenToKVPoolAllocator
        sizes: tuple[Any, ...] = (SLOTS, page_size, torch.float32, "cpu", self.pool)
        if page_size == 1:
            kind, sizes = TokenToKVPoolAllocator, (SLOTS, torch.float32, "cpu", self.pool)
        self.allocator = kind(*sizes, need_sort=False)
        self.rows = ReqToTokenPool(16, 2 * LONGEST, "cpu", enable_memory_saver=False)
        params = CacheInitParams(False, self.rows, self.allocator, page_size)
        config = CacheConfig(page_size=page_size, model="m", load_back_threshold=0, events=True, **settings)
        cache = UnifiedCache(config, device_pool(self.allocator, page_size), ranks=ranks)
        self.cache = SglangCache(params, cache, None, None if ranks is None else ranks.agreement)
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.texts = [[self.draw.randrange(9) for _ in range(LONGEST)] for _ in range(3)]
        self.seen = {"device": 0, "host": 0, "storage": 0, "aborted": 0, "evicted": 0}
        self.held: dict[str, set[int]] = {}
        self.number = 0

    # What is computed

    def expected(self, req: Any, position: int) -> float:
        """Of a token's slot: something of the whole prefix and its namespace."""
        return float(hash((req.extra_key, req.cache_salt, tuple(req.tokens[: position + 1]))) % 1_000_003)

    def compute(self, req: Any, first: int, last: int) -> None:
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        for position in range(first, last):
            for layer in range(LAYERS):
                value = self.expected(req, position) + layer
                self.pool.k_buffer[layer][row[position]] = value
                self.pool.v_buffer[layer][row[position]] = -value

    def look(self, req: Any, length: int) -> None:
        """What the first slots of a request hold is right."""
        row = self.rows.req_to_token[req.kv.req_pool_idx, :length].long()
        assert (row >= self.page_size).all(), "nobody gets the page that SGLang pads with"
        told = torch.tensor([self.expected(req, position) for position in range(length)])
        for layer in range(LAYERS):
            wanted = (told + layer)[:, None, None].expand(length, HEADS, WIDTH)
            assert torch.equal(self.pool.k_buffer[layer][row], wanted), f"keys of layer {layer}"
            assert torch.equal(self.pool.v_buffer[layer][row], -wanted), f"values of layer {layer}"

    # Steps

    def arrive(self) -> None:
        self.number += 1
        tokens = self.texts[self.draw.randrange(3)][: self.draw.randrange(1, LONGEST)]
        tokens = tokens + [self.draw.randrange(9) for _ in range(self.draw.randrange(6))]
        tokens = tokens[:LONGEST]
        req = SimpleNamespace(
            tokens=tokens,
            extra_key=self.draw.choice([None, None, "lora"]),
            cache_salt=self.draw.choice([None, None, "salt"]),
            priority=0,
            kv=SimpleNamespace(req_pool_idx=None, cache_protected_len=0, cache_inserted_len=0),
            lock=None,
            last_node=None,
            handle=CacheRequestHandle(str(self.number), 0),
        )
        self.waiting.append(req)
        match = self.match(req)
        matched = match.device_prefix_len + match.host_hit_length
        self.cache.prefetch_from_storage(
            req.handle,
            match.last_host_node,
            array("q", tokens[matched : len(tokens) - 1]),
            self.cache.get_last_hash_value(match.last_host_node),
            matched_prefix_tokens=array("q", tokens[:matched]),
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
        )

    def match(self, req: Any) -> Any:
        key = RadixKey(
            array("q", req.tokens),
            extra_key=req.extra_key,
            limit=len(req.tokens) - 1,
            cache_salt=req.cache_salt,
        )
        return self.cache.match_prefix(MatchPrefixParams(key=key, req=req))

    def room(self, slots: int) -> bool:
        """Whether so many more can be had, as SGLang reckons."""
        return self.allocator.available_size() + self.cache.evictable_size() >= slots

    def allocate(self, pages: int) -> torch.Tensor:
        slots = pages * self.page_size
        short = slots - self.allocator.available_size()
        if short > 0:
            result = self.cache.evict_for_alloc(EvictParams(num_tokens=short))
            assert result.num_tokens_evicted >= short
            self.seen["evicted"] += result.num_tokens_evicted
        got = self.allocator.alloc(slots)
        assert got is not None
        return got

    def admit(self) -> None:
        if not self.waiting or len(self.running) >= 6:
            return
        req = self.waiting[0]
        if not self.cache.check_prefetch_progress(req.handle):
            return
        stored, _ = self.cache.pop_prefetch_loaded_span(req.handle)
        match, page_size = self.match(req), self.page_size
        lock = self.cache.lock(match.last_device_node)
        try:
            more = len(req.tokens) - match.device_prefix_len
            if not self.room(-(-more // page_size) * page_size + page_size):
                return
            req.last_node, prefix = match.last_device_node, match.device_prefix_len
            self.seen["device"] += prefix
            if match.host_hit_length:
                loaded, req.last_node = self.cache.init_load_back(
                    InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
                )
                assert loaded in (0, match.host_hit_length)
                prefix += loaded
                self.seen["host"] += loaded - min(stored, loaded)
                self.seen["storage"] += min(stored, loaded)
            req.kv.cache_protected_len = prefix
            req.lock = self.cache.lock(req.last_node)
        finally:
            self.cache.unlock(lock)
        self.waiting.pop(0)
        (req.kv.req_pool_idx,) = self.rows.alloc_rows(1)
        path = self.cache.path_device_indices(req.last_node)
        assert len(path) == prefix
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[:prefix] = path.int()
        self.look(req, prefix)
        pages = -(-len(req.tokens) // page_size) - prefix // page_size
        row[prefix : prefix + pages * page_size] = self.allocate(pages).int()
        self.running.append(req)
        self.compute(req, prefix, len(req.tokens))
        self.checkpoint(req)

    def checkpoint(self, req: Any) -> None:
        req.full_untruncated_fill_ids = array("q", req.tokens)
        self.cache.checkpoint(req, up_to=len(req.tokens))
        assert req.kv.cache_protected_len == len(req.tokens) // self.page_size * self.page_size
        self.look(req, len(req.tokens))

    def decode(self) -> None:
        for req in list(self.running):
            length = len(req.tokens)
            if length % self.page_size == 0:
                if not self.room(self.page_size):
                    self.release(req, checkpoint=False)  # retracted
                    self.waiting.append(req)
                    req.kv = SimpleNamespace(req_pool_idx=None, cache_protected_len=0, cache_inserted_len=0)
                    continue
                row = self.rows.req_to_token[req.kv.req_pool_idx]
                row[length : length + self.page_size] = self.allocate(1).int()
            req.tokens.append(self.draw.randrange(9))
            self.compute(req, length, length + 1)
            if len(req.tokens) > LONGEST + 20 or self.draw.random() < 0.1:
                self.release(req, checkpoint=self.draw.random() < 0.8)

    def release(self, req: Any, *, checkpoint: bool) -> None:
        self.running.remove(req)
        if checkpoint:
            self.checkpoint(req)
        row, first = self.rows.req_to_token[req.kv.req_pool_idx], req.kv.cache_protected_len
        self.allocator.free_segment(row[first : len(req.tokens)].long(), start_pos=first)
        self.cache.unlock(req.lock)
        req.lock = None
        self.cache.on_release(req, checkpointed=checkpoint)
        self.rows.free_rows([req.kv.req_pool_idx])

    def abort(self) -> None:
        if self.waiting and self.draw.random() < 0.5:
            req = self.waiting.pop(self.draw.randrange(len(self.waiting)))
            self.cache.release_aborted_request(req.handle)
            self.seen["aborted"] += 1
        elif self.running:
            self.release(self.draw.choice(self.running), checkpoint=False)
            self.seen["aborted"] += 1

    def flush(self) -> None:
        """As /flush_cache: it waits until nothing is under way."""
        while self.running:
            self.release(self.running[0], checkpoint=True)
        while self.waiting:
            self.cache.release_aborted_request(self.waiting.pop().handle)
        while self.cache.ongoing_write_through or self.cache.ongoing_prefetch:
            self.cache.check_hicache_events()
        self.check()
        assert self.cache.protected_size() == 0, "a lock was not given back"
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()

    def check(self) -> None:
        """What SGLang checks when it is idle, and that routers are told the truth."""
        held = sum(
            (-(-len(req.tokens) // self.page_size)) * self.page_size - req.kv.cache_protected_len
            for req in self.running
        )
        sizes = (self.allocator.available_size(), self.cache.evictable_size(), self.cache.protected_size())
        assert sum(sizes) + held == SLOTS, (sizes, held)
        free = self.allocator.get_all_free_pages()
        assert len(set(free.tolist())) == len(free)
        for event in self.cache.take_events():
            if isinstance(event, AllBlocksCleared):
                self.held = {}
            elif isinstance(event, BlockRemoved):
                self.held[event.medium] -= set(event.block_hashes)
            elif isinstance(event, BlockStored):
                self.held.setdefault(event.medium, set()).update(event.block_hashes)
        told = len(self.held.get("GPU", ())) * self.page_size
        assert told == self.cache.evictable_size() + self.cache.protected_size()

    def run(self, steps: int) -> dict[str, int]:
        weights = {self.arrive: 4, self.admit: 6, self.decode: 6, self.abort: 1, self.check: 2}
        for step in range(steps):
            self.draw.choices(list(weights), list(weights.values()))[0]()
            self.cache.check_hicache_events()
            if step % 150 == 149:
                self.flush()
            order = self.cache.dfs_weight_order([req.last_node for req in self.running])
            assert sorted(order) == list(range(len(self.running)))
        self.flush()
        self.cache.release_host_resources()
        return self.seen


def serve(scheduler: Scheduler, tokens: list[int]) -> tuple[int, int, int]:
    """One request from its begin to its end; what came from device, host and storage."""
    before = dict(scheduler.seen)
    scheduler.texts, scheduler.draw = [tokens + [0] * LONGEST] * 3, _Always(len(tokens))
    scheduler.arrive()
    while scheduler.waiting:
        scheduler.cache.check_hicache_events()
        scheduler.admit()
    scheduler.release(scheduler.running[0], checkpoint=True)
    while scheduler.cache.ongoing_write_through:
        scheduler.cache.check_hicache_events()
    device, host, storage = (scheduler.seen[tier] - before[tier] for tier in ("device", "host", "storage"))
    return device, host, storage


class _Always:
    """Draws a prompt of this length, without namespaces or anything else."""

    def __init__(self, length: int) -> None:
        self.length = length

    def randrange(self, first: int, last: int | None = None) -> int:
        return 0 if last is None else self.length

    def choice(self, values: Any) -> Any:
        return values[0]


def check_storage_comes_and_goes(folder: Path) -> None:
    """Attached, detached, attached again; and other weights have pages of their own."""
    prompt = list(range(2, 50))
    settings: dict[str, Any] = {
        "prefetch_threshold": 1,
        "prefetch_policy": "wait_complete",
        "storage_warm": 0,
    }
    scheduler = Scheduler(1, 4, **settings)
    cache = scheduler.cache
    assert serve(scheduler, prompt) == (0, 0, 0)
    extra = json.dumps({"storage": str(folder)})
    for wrong, said in [
        (("file", extra), "SGLang's own"),
        (("dynamic", "{}"), "needs a storage"),
        (("dynamic", '{"storage": "nowhere://x"}'), "nowhere"),
        (("dynamic", extra, "m", "best_effort"), "--hicache-storage-prefetch-policy"),
        (("dynamic", extra, "m", None, "write_back"), "--hicache-write-policy"),
    ]:
        attached, message = cache.attach_storage_backend(*wrong)
        assert not attached
        assert said in message, message
    assert cache.attach_storage_backend("dynamic", extra, "m", "wait_complete", "write_through")[0]
    assert not cache.attach_storage_backend("dynamic", extra)[0]
    cache.check_hicache_events()
    scheduler.flush()
    assert serve(scheduler, prompt) == (0, 0, 44)
    assert cache.detach_storage_backend()[0]
    scheduler.flush()
    assert serve(scheduler, prompt) == (0, 0, 0)
    assert cache.attach_storage_backend("dynamic", extra)[0]
    cache.check_hicache_events()
    scheduler.flush()
    sglang_radix.get_serving = lambda: SimpleNamespace(weight_version="2")
    scheduler.flush()
    assert serve(scheduler, prompt) == (0, 0, 0)
    scheduler.flush()
    assert serve(scheduler, prompt) == (0, 0, 44)
    # Others still, and nobody says what they are called: none of these pages are theirs.
    cache.new_weights(None)
    assert not cache.enable_storage
    scheduler.flush()
    assert serve(scheduler, prompt) == (0, 0, 0)
    scheduler.flush()
    assert serve(scheduler, prompt) == (0, 0, 44)
    cache.new_weights("2")
    scheduler.flush()
    assert serve(scheduler, prompt) == (0, 0, 44)
    scheduler.flush()
    # What was read and waits for its request, which is not looked at while SGLang pauses, is not under way.
    scheduler.arrive()
    assert cache.ongoing_prefetch
    cache.settle()
    assert not cache.ongoing_prefetch
    assert scheduler.waiting
    scheduler.flush()
    sglang_radix.get_serving = lambda: SimpleNamespace(weight_version=None)
    cache.release_host_resources()


def check_two_ranks(folder: Path) -> None:
    """Two schedulers that get the same requests, as with tensor parallelism: they do the same."""
    loaded = 0
    for number, policy in enumerate(("write_through", "write_through_selective", "write_back")):
        settings: dict[str, Any] = {"write_policy": policy, "hicache_ratio": 1.5, "prefetch_threshold": 1}
        settings |= {"storage": str(folder / policy), "prefetch_policy": "wait_complete", "kv_heads": 4}

        def run(rank: ThreadRanks, settings: Any = settings, seed: int = number) -> dict[str, int]:
            ranks = Ranks(RankLayout(tp_size=2, tp_rank=rank.rank), rank)
            return Scheduler(seed, 4, ranks=ranks, **settings).run(200)

        first, second = ThreadRanks.run(ThreadRanks.group(2), run)
        assert first == second, (policy, first, second)
        print(policy, first, file=sys.stderr)
        loaded += first["host"] + first["storage"]
    assert loaded


def check_refusals() -> None:
    """Models, flags and pools that can not be served: said in one line."""
    fine: dict[str, Any] = dict.fromkeys(
        ("disable_radix_cache", "is_hybrid_swa", "is_hybrid_ssm", "is_dsa"), False
    )
    params = CacheInitParams(False, None, None, 4)
    cases: list[tuple[Any, str]] = [
        *(
            (fine | {name: True}, said)
            for name, said in [
                ("disable_radix_cache", "--disable-radix-cache"),
                ("is_hybrid_swa", "sliding windows"),
                ("is_hybrid_ssm", "Mamba"),
                ("is_dsa", "DSA"),
            ]
        ),
        (fine | {"params": CacheInitParams(False, None, None, 4, pp_size=2)}, "--pp-size 2"),
        (fine | {"params": CacheInitParams(False, None, None, 4, is_eagle=True)}, "EAGLE"),
    ]
    for changed, said in cases:
        context = SimpleNamespace(**({"tp_size": 1, "params": params} | changed))
        _refused(lambda context=context: sglang_radix._refuse_what_we_can_not(context), said)
    sglang_radix._refuse_what_we_can_not(SimpleNamespace(**fine, tp_size=1, params=params))

    class Other(MHATokenToKVPool):
        pass

    pool = Other(16, 4, torch.float32, HEADS, WIDTH, LAYERS, "cpu", enable_memory_saver=False)
    allocator = PagedTokenToKVPoolAllocator(16, 4, torch.float32, "cpu", pool, need_sort=False)
    _refused(lambda: device_pool(allocator, 4), "a Other")
    _refused(lambda: device_pool(SimpleNamespace(), 4), "SimpleNamespace")
    pool = MHATokenToKVPool(16, 4, torch.float32, HEADS, WIDTH, LAYERS, "cpu", False, v_head_dim=2 * WIDTH)
    allocator = PagedTokenToKVPoolAllocator(16, 4, torch.float32, "cpu", pool, need_sort=False)
    _refused(lambda: device_pool(allocator, 4), "values of 8")


def _refused(call: Any, said: str) -> None:
    message = ""
    try:
        call()
    except (EngineError, ArgumentError) as error:
        message = str(error)
    assert said in message, (said, message)
    assert "\n" not in message


def main() -> None:
    folder = Path(sys.argv[1])
    sglang_radix.get_serving = lambda: SimpleNamespace(weight_version=None)
    check_refusals()
    check_storage_comes_and_goes(folder / "comes-and-goes")
    check_two_ranks(folder / "two-ranks")
    tiers: list[dict[str, Any]] = [
        {"write_policy": None},
        *({"write_policy": policy} for policy in ("write_through", "write_through_selective", "write_back")),
    ]
    totals: dict[str, int] = {}
    for number, settings in enumerate(tiers):
        for page_size in (1, 4):
            for store in ("", "stored"):
                more = {"hicache_ratio": 1.5}
                if store and settings["write_policy"] is None:
                    continue
                if store:
                    more |= {"storage": str(folder / f"{number}-{page_size}"), "prefetch_threshold": 1}
                    more |= {"prefetch_policy": "wait_complete"}
                seen = Scheduler(7 * number + page_size, page_size, **settings, **more).run(400)
                print(settings, page_size, store, seen, file=sys.stderr)
                for what, count in seen.items():
                    totals[what] = totals.get(what, 0) + count
    assert all(totals.values()), totals
    print("fine")


main()
