"""A `UnifiedCache` as the prefix cache of SGLang's scheduler.

Who owns a device page. SGLang's allocator hands slots to requests, ours pages to the tree, and both must not
have the same one free. So our allocator has none: all pages are taken out of it at the start and belong to
SGLang's. `insert` gives pages to the tree. What our allocator gets back (duplicates, evicted pages) goes to
SGLang's at once (`_give_pages`), and what it needs for a load comes from there first (`_lend_pages`).

When copies run. Forwards are launched on SGLang's forward stream, so every call that may begin a copy is made
with that stream as the current one (`_on_forward_stream`): a copy waits for what was launched there before.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_memory, get_parallel, get_serving

from unified_cache._native import Cleared, Removed, Stored
from unified_cache.cache import UnifiedCache
from unified_cache.engines import sglang_hooks
from unified_cache.engines.sglang import EngineError
from unified_cache.engines.sglang_settings import extra_config, make_config, storage_name
from unified_cache.engines.sglang_weights import WeightNames
from unified_cache.errors import CapacityError, CopyError, UnifiedCacheError, UnknownNodeError
from unified_cache.pools.device import DevicePool, MhaDevicePool, MlaDevicePool
from unified_cache.ranks.agreement import Agreement, OneRank
from unified_cache.ranks.group import Ranks
from unified_cache.ranks.layout import RankLayout
from unified_cache.ranks.torch_group import TorchRanks

if TYPE_CHECKING:
    import numpy.typing as npt

    from unified_cache._native import LockReceipt
    from unified_cache.request import Request

__all__ = ["SglangCache", "build"]

_log = logging.getLogger(__name__)

# How long a reset waits for copies that were under way, and a shutdown for what is on its way to storage.
_DRAIN_SECONDS = 10.0


def build(context: Any) -> SglangCache:
    """The cache for one scheduler; `unified_cache.engines.sglang.make_cache` says what it may raise."""
    _refuse_what_we_can_not(context)
    sglang_hooks.register()
    params = context.params
    pool = device_pool(params.token_to_kv_pool_allocator, params.page_size)
    config = make_config(
        get_memory(),
        page_size=params.page_size,
        model=str(context.model_config.model_path),
        weight_version=get_serving().weight_version,
        tiers=context.enable_hierarchical_cache,
        heads=_heads(context, pool),
        events=params.enable_kv_cache_events,
    )
    runner = context.tp_worker.model_runner
    ranks = _ranks(context)
    cache = UnifiedCache(config, pool, ranks=ranks)
    tiers = "" if config.write_policy is None else f", host tier of {cache.usage()['host_pages']} pages"
    storage = "" if config.storage is None else f", storage {config.storage}"
    _log.info(
        "unified-cache: %d device pages of %d tokens%s%s", pool.num_pages - 1, pool.page_size, tiers, storage
    )
    return SglangCache(params, cache, getattr(runner, "forward_stream", None), ranks.agreement)


def _heads(context: Any, pool: DevicePool) -> int | None:
    """Heads of keys and values of the whole model: where there are more ranks, some hold the same ones."""
    if context.tp_size == 1 or pool.kind == "mla":
        return None
    return int(context.model_config.get_total_num_kv_heads())


def _ranks(context: Any) -> Ranks:
    """This scheduler among those that serve together: one for each rank of tensor parallelism.

    SGLang's schedulers get the same requests in the same pass of their loops, and so make the same calls.
    """
    if context.tp_size == 1:
        return Ranks()
    if get_parallel().attn_dp_size > 1:
        raise EngineError("unified-cache does not support this in SGLang: --enable-dp-attention")
    layout = RankLayout(tp_size=context.tp_size, tp_rank=context.tp_rank)
    return Ranks(layout, TorchRanks.of_layout(layout))


def _refuse_what_we_can_not(context: Any) -> None:
    """Say in one line why this model or these flags can not be served."""
    params = context.params
    sizes = {"--pp-size": params.pp_size, "--attn-cp-size": params.attn_cp_size}
    reasons = [
        (context.disable_radix_cache, "--disable-radix-cache: there is nothing to cache"),
        (context.is_hybrid_swa, "models with sliding windows: their layers keep different tokens"),
        (context.is_hybrid_ssm, "models with Mamba or linear attention: their state is not made of pages"),
        (context.is_dsa, "models with sparse attention (DSA): their index is a pool of its own"),
        (params.is_eagle, "EAGLE's speculative decoding: its keys are pairs of tokens"),
        (params.mtp_draft_device_pools, "draft models that share the KV pool"),
        (params.sidecar_draft_device_pools, "draft models with a KV pool of their own"),
        (params.enable_kv_cache_events and params.dynamo_kv_event_format, "events in Dynamo's format"),
        *((size > 1, f"{flag} {size}") for flag, size in sizes.items()),
    ]
    for applies, reason in reasons:
        if applies:
            raise EngineError(f"unified-cache does not support this in SGLang: {reason}")


def device_pool(allocator: Any, page_size: int) -> DevicePool:
    """Our view of SGLang's KV pool: no byte is copied. Page 0 is the one that SGLang pads with.

    Raises:
        EngineError: a pool or an allocator of another kind, or keys and values that differ in shape.
    """
    if type(allocator) not in (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator):
        raise EngineError(
            f"unified-cache does not support this in SGLang: slots of a {type(allocator).__name__}"
        )
    pool = allocator.get_kvcache()
    pages = allocator.size // page_size + 1

    def in_pages(buffer: torch.Tensor) -> torch.Tensor:
        if pool.store_dtype.itemsize == pool.dtype.itemsize:
            # What the bytes mean, and not only how many they are: it is part of what stored pages are called.
            buffer = buffer.view(pool.dtype)
        return buffer[: pages * page_size].view(pages, page_size, *buffer.shape[1:])

    if type(pool) is MHATokenToKVPool and pool.head_dim != pool.v_head_dim:
        raise EngineError(
            f"unified-cache does not support this in SGLang: keys of {pool.head_dim} elements a head and "
            f"values of {pool.v_head_dim}"
        )
    if type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and not pool.is_quantized_kv_cache:
        keys = [in_pages(buffer) for buffer in pool.k_buffer]
        return MhaDevicePool.from_tensors(keys, [in_pages(buffer) for buffer in pool.v_buffer])
    if type(pool) is MLATokenToKVPool:
        return MlaDevicePool.from_tensors([in_pages(buffer) for buffer in pool.kv_buffer])
    layout = getattr(pool, "kv_cache_layout", None)
    raise EngineError(
        f"unified-cache does not support this in SGLang: a {type(pool).__name__}"
        f"{f' in layout {layout}' if layout else ''}"
    )


class _HostPool:
    """What SGLang's metrics ask a host pool."""

    def __init__(self, cache: UnifiedCache) -> None:
        self._cache = cache
        self.logical_size = cache.usage()["host_pages"] * cache.page_size

    def available_size(self) -> int:
        return self._cache.usage()["host_free_pages"] * self._cache.page_size


class SglangCache(BasePrefixCache):  # type: ignore[misc]
    """The scheduler's prefix cache. Node handles are the tree's node ids.

    All calls come from the scheduler's thread.
    """

    disable = False
    sliding_window_size = None
    hicache_storage_pass_prefix_keys = False

    def __init__(
        self, params: Any, cache: UnifiedCache, forward_stream: Any, agreement: Agreement | None = None
    ) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.cache = cache
        self.device = torch.device(self.token_to_kv_pool_allocator.device)
        self._stream = forward_stream if self.device.type == "cuda" else None
        self._agreement = OneRank() if agreement is None else agreement
        self._tiers = cache.config.write_policy is not None
        # Nothing was under way at the last tick, and nothing was begun since.
        self._idle = True
        self._receipts: dict[int, list[LockReceipt]] = {}
        # What is being read from storage for requests that wait, and how much of that had come when it ended.
        self._prefetches: dict[Any, Request] = {}
        self._prefetched: dict[Any, int] = {}
        self._weights = WeightNames()
        self._left: Any = None  # the storage that is not used since the weights were changed
        self._lora_names = params.kv_event_lora_names
        self._empty = torch.empty(0, dtype=torch.int64, device=self.device)
        self._in_page = torch.arange(self.page_size, device=self.device)
        if self._tiers:
            self.token_to_kv_pool_host = _HostPool(cache)
        if params.enable_metrics:
            self.init_metrics_collector()
        self._take_all_pages()

    # Pages

    @contextlib.contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def _take_all_pages(self) -> None:
        self.cache.alloc(self.cache.device_pool.num_pages)

    def _give_pages(self, count: int | None = None) -> int:
        """Hand pages that our allocator has got back to SGLang's; returns how many."""
        if count is None:
            count = self.cache.usage()["device_free_pages"]
        if count:
            pages = self.cache.alloc(count)
            self.token_to_kv_pool_allocator.free_page_ids(
                torch.from_numpy(pages.astype(np.int64)).to(self.device, non_blocking=True)
            )
        return count

    def _lend_pages(self, count: int) -> None:
        """Give our allocator up to so many of the pages that SGLang's has."""
        count = min(count, self.token_to_kv_pool_allocator.available_size() // self.page_size)
        if count:
            slots = self.token_to_kv_pool_allocator.alloc(count * self.page_size)
            if slots is not None:
                self.cache.free(self._pages_of(slots))

    def _pages_of(self, slots: torch.Tensor) -> npt.NDArray[np.uint32]:
        """The pages of whole pages of slots."""
        pages: npt.NDArray[np.uint32] = (
            (slots[:: self.page_size] // self.page_size).cpu().numpy().astype(np.uint32)
        )
        return pages

    def _slots_of(self, pages: npt.NDArray[np.uint32]) -> torch.Tensor:
        if not len(pages):
            return self._empty
        on_device = torch.from_numpy(pages.astype(np.int64)).to(self.device, non_blocking=True)
        slots: torch.Tensor = (on_device[:, None] * self.page_size + self._in_page).reshape(-1)
        return slots

    # Looking up

    def match_prefix(self, params: Any) -> MatchResult:
        """What of a key is on device, and past that on host."""
        key = params.key
        match = self.cache.match_prefix(
            key.raw_token_ids(), extra_key=key.extra_key, cache_salt=key.cache_salt
        )
        return MatchResult(
            device_prefix_len=match.device_length,
            last_device_node=match.last_device_node,
            last_host_node=match.last_host_node,
            best_match_node=match.last_host_node,
            host_hit_length=match.host_hit_length,
        )

    def touch_prefix(self, key: Any) -> None:
        """Mark a prefix as just used."""
        self.cache.match_prefix(key.raw_token_ids(), extra_key=key.extra_key, cache_salt=key.cache_salt)

    def path_device_indices(self, node: int) -> torch.Tensor:
        """The slots of the path to a node."""
        tree, parts = self.cache.tree, []
        while node != tree.root:
            info = tree.node_info(node)
            assert info.device_pages is not None, "the path is locked on device"
            assert info.parent is not None
            parts.append(info.device_pages)
            node = info.parent
        return self._slots_of(np.concatenate(parts[::-1])) if parts else self._empty

    @property
    def root_node(self) -> int:
        """The tree's root."""
        return self.cache.tree.root

    def is_root(self, node: int) -> bool:
        return node == self.cache.tree.root

    def is_backuped(self, node: int) -> bool:
        """Whether storage may be asked for what follows a node: always, the cache sees to the order."""
        return True

    def get_last_hash_value(self, node: int) -> str | None:
        if node == self.cache.tree.root:
            return None
        digest: bytes = self.cache.tree.page_hashes(node)[-1].tobytes()
        return digest.hex()

    def get_prefix_hash_values(self, node: int) -> list[str]:
        return [digest.tobytes().hex() for digest in self.cache.tree.prefix_hashes(node)]

    def dfs_weight_order(self, node_handles: Sequence[int]) -> list[int]:
        """Requests in the order of a walk through the tree, those of larger subtrees first."""
        tree, weights, parents = self.cache.tree, dict[int, int](), dict[int, int]()
        at: dict[int, list[int]] = {}
        for index, node in enumerate(node_handles):
            path, here = [], node
            try:
                while here != tree.root and here not in parents:
                    path.append((here, tree.node_info(here).parent))
                    here = path[-1][1]  # type: ignore[assignment]
            except UnknownNodeError:
                node, path = tree.root, []  # evicted since it was matched
            parents.update(path)  # type: ignore[arg-type]
            at.setdefault(node, []).append(index)
            while node != tree.root:
                weights[node] = weights.get(node, 0) + 1
                node = parents[node]
        children: dict[int, list[int]] = {}
        for node, parent in parents.items():
            children.setdefault(parent, []).append(node)
        order: list[int] = []
        stack = [(tree.root, False)]
        while stack:
            node, visited = stack.pop()
            if visited:
                order += at.get(node, ())
                continue
            stack.append((node, True))
            ranked = sorted(children.get(node, ()), key=lambda child: -weights.get(child, 0))
            stack += [(child, False) for child in reversed(ranked)]
        return order

    # Locks

    def inc_lock_ref(self, node: int) -> IncLockRefResult:
        """Keep the path to a node on device until `dec_lock_ref`."""
        self._receipts.setdefault(node, []).append(self.cache.lock(node))
        return IncLockRefResult(node_id=node)

    def dec_lock_ref(self, node: int, params: Any = None) -> DecLockRefResult:
        """Give one lock on a node back."""
        receipts = self._receipts.get(node)
        if receipts:  # none: it was taken before a reset
            self.cache.unlock(receipts.pop())
            if not receipts:
                del self._receipts[node]
        return DecLockRefResult()

    # Computing

    def insert(self, params: Any) -> InsertResult:
        """Give the tree what was computed for a key; its own pages are `path_device_indices` from then on."""
        key = params.key
        inserted = self._insert(
            key.raw_token_ids(),
            params.value,
            extra_key=key.extra_key,
            cache_salt=key.cache_salt,
            prev_prefix_len=params.prev_prefix_len,
            inserted_len=params.inserted_len,
            priority=params.priority or 0,
            chunked=False,
        )
        return InsertResult(prefix_len=inserted.prefix_len, last_device_node=inserted.node)

    def _insert(self, tokens: Any, slots: torch.Tensor, **settings: Any) -> Any:
        whole = len(tokens) // self.page_size * self.page_size
        with self._on_forward_stream():
            inserted = self.cache.insert(tokens, self._pages_of(slots[:whole]), **settings)
        self._give_pages(len(inserted.duplicate_pages))
        self._idle = False
        return inserted

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        """Give the tree what a request has computed, and let it go on with the tree's pages."""
        kv, page_size = req.kv, self.page_size
        tokens = req.full_untruncated_fill_ids[:up_to]
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        inserted = self._insert(
            tokens,
            row[: len(tokens)],
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            prev_prefix_len=kv.cache_protected_len,
            inserted_len=kv.cache_inserted_len,
            priority=req.priority or 0,
            chunked=False,
        )
        whole = len(inserted.device_pages) * page_size
        kv.cache_inserted_len = max(kv.cache_inserted_len, whole)
        if whole > kv.cache_protected_len:
            slots = self._slots_of(inserted.device_pages[kv.cache_protected_len // page_size :])
            self.req_to_token_pool.write(
                (kv.req_pool_idx, slice(kv.cache_protected_len, whole)), slots.to(torch.int32)
            )
        kv.cache_protected_len = whole
        lock = self.lock(inserted.node)
        self.unlock(req.lock)
        req.lock = lock
        req.last_node = inserted.node

    def evict(self, params: Any) -> EvictResult:
        """Make so many slots free, as far as that is possible."""
        start, wanted = time.perf_counter(), -(-params.num_tokens // self.page_size)
        if wanted <= 0:
            return EvictResult()
        with self._on_forward_stream():
            try:
                evicted = self._give_pages(wanted)  # waits for write-backs if need be
            except CapacityError:
                evicted = self._evict_at_any_price(wanted)
        self._idle = False
        self.update_eviction_metrics(evicted * self.page_size, start)
        return EvictResult(num_tokens_evicted=evicted * self.page_size)

    def _evict_at_any_price(self, wanted: int) -> int:
        """Free slots also where what waits for storage has to give up waiting.

        It holds the end of its prefix. Under write_back that can be a page that is to go to host and finds no
        room there. SGLang counts it as evictable, and ends if it is not.
        """
        for request, reading in list(self._prefetches.items()):
            self._prefetched[request] = reading.storage_hit_length
            reading.abort()
            del self._prefetches[request]
        try:
            return self._give_pages(wanted)
        except CapacityError:
            self.cache.evict(wanted)
            return self._give_pages()

    # Host to device

    def init_load_back(self, params: Any) -> tuple[int, int]:
        """Bring a host hit to device, all of it or nothing; returns its tokens and the node where it ends.

        Nothing if it is shorter than `load_back_threshold`, finds no room, or its copy fails: the request
        computes it then.
        """
        node, req = params.best_match_node, params.req
        here = req.last_node if req is not None else self.cache.tree.root
        if params.host_hit_length <= 0:
            return 0, here
        self._idle = False
        with self._on_forward_stream():
            self._lend_pages(params.host_hit_length // self.page_size)
            try:
                loaded = self.cache.load_back(node, params.mem_quota, priority=(req and req.priority) or 0)
                if loaded:
                    self.cache.wait_loaded(node)
            except UnknownNodeError:
                loaded = 0  # evicted since it was matched
            except CopyError as error:
                _log.warning("unified-cache: %s; the request computes these tokens", error)
                loaded = 0
                self.cache.tick()  # takes the pages back, so that no other request finds them on device
            self._give_pages()
        return (loaded, node) if loaded else (0, here)

    def ready_to_load_host_cache(self) -> int:
        """Loads of the batch that is launched next: none is under way, `init_load_back` has waited for it."""
        return -1

    # Storage

    @property
    def enable_storage(self) -> bool:
        return self.cache.config.storage is not None

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node: int,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Any = (),
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """Begin to read what follows a match from storage; `check_prefetch_progress` says when to go on."""
        if not self.enable_storage or not len(new_input_tokens):
            return
        self.release_aborted_request(request)
        # One token more, since a request leaves its last one to compute, and SGLang has left out its own.
        tokens = np.concatenate((matched_prefix_tokens, new_input_tokens, (0,))).astype(np.int64)
        self._idle = False
        with self._on_forward_stream():
            self._prefetches[request] = self.cache.begin(
                tokens, extra_key=extra_key, cache_salt=cache_salt or None, resumed=True
            )

    def check_prefetch_progress(self, request: Any) -> bool:
        """Whether a request need not wait for storage any longer; what has come is on host then."""
        reading = self._prefetches.get(request)
        if reading is None:
            return True
        if not reading.prefetch_done():
            return False
        with self._on_forward_stream():
            self._prefetched[request] = reading.wait_prefetch()
            self._prefetches.pop(request).abort()
            self._give_pages()
        return True

    def pop_prefetch_loaded_tokens(self, request: Any) -> int:
        """How many tokens came from storage for a request; 0 when asked again."""
        return self._prefetched.pop(request, 0)

    def release_aborted_request(self, request: Any) -> None:
        """A request that waited was aborted."""
        self._prefetched.pop(request, None)
        if (reading := self._prefetches.pop(request, None)) is not None:
            reading.abort()

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Use a storage from now on; returns whether, and a message."""
        policies = (
            (
                "--hicache-storage-prefetch-policy",
                hicache_storage_prefetch_policy,
                self.cache.config.prefetch_policy,
            ),
            ("--hicache-write-policy", hicache_write_policy, self.cache.config.write_policy),
        )
        for flag, wanted, has in policies:
            if wanted is not None and wanted != has:
                return False, f"{flag} is {has} since the start and can not become {wanted}"
        try:
            extra = extra_config(storage_backend_extra_config_json)
            if other := sorted(set(extra) - {"storage"}):
                return False, f"only the storage can be set at run time, not {other[0]!r}"
            storage = storage_name(storage_backend, extra)
            assert storage is not None
            self.cache.attach_storage(storage)
        except UnifiedCacheError as error:
            return False, str(error)
        return True, f"attached storage {storage}"

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Use no storage from now on; returns whether, and a message."""
        for request in list(self._prefetches):
            self.release_aborted_request(request)
        with self._on_forward_stream():
            written = self.cache.detach_storage(timeout=_DRAIN_SECONDS)
            self._give_pages()
        return True, "detached the storage" + ("" if written else "; some pages were not written in time")

    def clear_storage_backend(self) -> bool:
        """Forget what is stored: not done here, since others may share it."""
        _log.warning("unified-cache: a storage is shared; clear it with the command `unified-cache storage`")
        return False

    # The loop

    def check_hicache_events(self) -> None:
        """Once a pass of the scheduler's loop."""
        with self._on_forward_stream():
            self._idle = self.cache.flush(timeout=0)  # one tick
            self._give_pages()

    def take_events(self) -> list[Any]:
        """What has come to device and host and left them since the last call, for routers."""
        if not self.cache.config.events:
            return []
        return [self._event(event) for event in self.cache.take_events()]

    def _event(self, event: Stored | Removed | Cleared) -> Any:
        if isinstance(event, Cleared):
            return AllBlocksCleared()
        medium = StorageMedium.GPU if event.tier == "device" else StorageMedium.CPU
        if isinstance(event, Removed):
            return BlockRemoved(block_hashes=event.hashes, medium=medium)
        return BlockStored(
            block_hashes=event.hashes,
            parent_block_hash=event.parent,
            token_ids=event.tokens,
            block_size=event.page_size,
            lora_id=None,
            medium=medium,
            cache_salt=event.cache_salt,
            lora_name=self._lora_names.get(event.extra_key),
        )

    @property
    def ongoing_write_through(self) -> list[str]:
        """What is under way and a flush should wait for; SGLang asks only whether there is something."""
        return [] if self._idle or not self._tiers else ["copies or storage"]

    @property
    def ongoing_prefetch(self) -> list[Request]:
        """What is being read. What has been read and waits for its request is nothing to wait for."""
        return [reading for reading in self._prefetches.values() if not reading.prefetch_done()]

    def settle(self) -> None:
        """Nothing runs: wait, as long as it may take, until nothing is under way."""
        with self._on_forward_stream():
            self._idle = self.cache.flush(timeout=_DRAIN_SECONDS)
            self._give_pages()

    # What `ongoing_write_through` covers.
    ongoing_load_back = ongoing_backup = ()

    def new_weights(self, version: str | None) -> None:
        """The model gets other weights now.

        Until the next `reset` the tree may have pages of both: SGLang leaves it to whoever changes weights
        whether it is emptied. What others read must not be mixed, so the storage is left until then.

        Args:
            version: their ``weight_version``; None: nobody has said.
        """
        self._weights.change(get_serving().weight_version, version)
        if (storage := self.cache.config.storage) is None:
            return
        _log.warning(
            "unified-cache: the weights change, so the storage is not used until the cache is flushed"
        )
        self.detach_storage_backend()
        self._left = storage

    def reset(self) -> None:
        """Empty device and host; storage stays. Nothing may run on the pages."""
        for request in list(self._prefetches):
            self.release_aborted_request(request)
        self._receipts.clear()
        version = self._weights.name(get_serving().weight_version)
        if version != self.cache.config.weight_version:
            self.cache.update_weights(version, force=True)
        else:
            self.cache.reset(force=True)
        # SGLang makes all slots free next, also those that a copy still touches.
        end = time.monotonic() + _DRAIN_SECONDS
        while held := self.cache.usage()["device_quarantined_pages"]:
            if time.monotonic() > end:
                raise CopyError(f"copies still touch {held} device pages after {_DRAIN_SECONDS:g} seconds")
            self.cache.flush(timeout=0.1)
        self._take_all_pages()
        if self._left is not None:
            storage, self._left = self._left, None
            try:
                self.cache.attach_storage(storage)
            except UnifiedCacheError as error:
                _log.warning("unified-cache: goes on without the storage %s: %s", storage, error)

    def release_host_resources(self) -> None:
        """The scheduler ends."""
        try:
            self.cache.close(timeout=_DRAIN_SECONDS)
        except UnifiedCacheError:
            _log.exception("unified-cache: closed with errors")
        finally:
            self._agreement.close()

    # Sizes

    def evictable_size(self) -> int:
        """Slots that `evict` can make free."""
        return self.cache.tree.evictable_tokens

    def protected_size(self) -> int:
        """Slots under a lock."""
        return self.cache.tree.protected_tokens

    full_evictable_size, full_protected_size = evictable_size, protected_size

    def total_size(self) -> int:
        return self.cache.tree.device_tokens

    def all_values_flatten(self) -> torch.Tensor:
        raise NotImplementedError("for pools of state models only")

    def pretty_print(self) -> None:
        print(self.cache.usage())
