"""A prefix cache for `generate` of `transformers`, over device, host and storage."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.cache import UnifiedCache
from unified_cache.config import CacheConfig
from unified_cache.engines.transformers_kv import PrefixKV, note_forward
from unified_cache.engines.transformers_model import (
    CACHED_MANAGER,
    fingerprint,
    inner_model,
    kv_argument,
    kv_shape,
    needs_adapter_key,
)
from unified_cache.engines.transformers_pages import ModelPages
from unified_cache.errors import ArgumentError, BusyError, CapacityError, ClosedError, CopyError
from unified_cache.request import Request, as_tokens

__all__ = ["PrefixCache", "cache_settings"]

_log = logging.getLogger(__name__)

# How often a request looks whether its storage has answered, while others may use the cache.
_POLL_SECONDS = 0.001

# A load that fails is tried once more; after that its tokens are computed.
_ATTEMPTS = 2


@dataclass(slots=True)
class _Held:
    """What a `PrefixKV` holds in the cache.

    Attributes:
        requests: for each prompt; None: it could not be had.
        space: its namespace.
    """

    requests: list[Request | None]
    space: dict[str, Any]


def cache_settings(model: Any, storage: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of `CacheConfig`; with storage also the names of the model and of its weights.

    Raises:
        ArgumentError: weights that can not be read, so that somebody has to name them.
    """
    given = dict(settings)
    if storage is not None:
        given["storage"] = storage
        name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        given.setdefault("model", name)
        if "weight_version" not in given:
            # The same name may be other weights tomorrow; what they are is read from them.
            given["weight_version"] = fingerprint(model)
    return given


class PrefixCache:
    """Keeps the keys and values of what a model has computed, so that no prefix is computed twice.

    Ten lines are enough::

        with PrefixCache(model, "/mnt/kv") as cached:
            for question in questions:
                ids = tokenizer(document + question, return_tensors="pt").input_ids.to(model.device)
                out = cached.generate(ids, max_new_tokens=100)

    Several threads may call it, each for requests of its own.

    Args:
        model: a causal language model of `transformers`, on one device, whose layers keep all keys and
            values.
        storage: where pages outlive the process: a folder, a URL or a `Backend`; None: no storage.
        num_pages: pages of the device pool.
        device_size: GB (10**9 bytes) of the device pool, in place of `num_pages`; neither: a quarter of what
            is free on a GPU, a sixteenth on a CPU.
        settings: of `CacheConfig`. With a storage `model` and `weight_version` are made from the model's
            name and its weights, if they are not given.

    Attributes:
        model: the model.
        cache: the cache below: its `stats`, `usage`, `pin` and so on, while nothing is generated.

    Raises:
        ArgumentError: a model that can not be cached this way, with the reason; a setting out of range.
        BusyError: the model serves batches meanwhile.
        CapacityError: there is no memory for the pools.
        StorageError: the storage can not be used.
    """

    def __init__(
        self,
        model: Any,
        /,
        storage: Any = None,
        *,
        num_pages: int | None = None,
        device_size: float | None = None,
        **settings: Any,
    ) -> None:
        self.model = model
        self._inner = inner_model(model)
        _serves_no_batches(self._inner)
        shape = kv_shape(self._inner)
        try:
            config = CacheConfig(**cache_settings(self._inner, storage, settings))
        except TypeError as error:
            raise ArgumentError(f"settings must be those of CacheConfig: {error}") from None
        self._pages = ModelPages(shape, config.page_size, num_pages, device_size)
        self.cache = UnifiedCache(config, self._pages.pool)
        self._argument = kv_argument(self._inner)
        self._lock = threading.RLock()
        self._closed = False
        # It looks at the forward's arguments only, so it keeps nothing alive.
        self._hook = self._inner.register_forward_pre_hook(note_forward, with_kwargs=True)

    # Generating

    def generate(
        self,
        inputs: Any = None,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        **kwargs: Any,
    ) -> Any:
        """`model.generate`, which computes only what is not cached; what it computes is kept.

        Args:
            inputs: tokens, integers (rows, tokens), all rows without padding; or `input_ids`.
            extra_key: first half of the namespace: the adapter, if one is active. Nothing is a hit across
                namespaces.
            cache_salt: second half of the namespace, such as a tenant's secret.
            priority: for the eviction policy "priority", and for the order of loads.
            kwargs: anything else that `generate` takes.

        Returns:
            What `model.generate` returns.

        Raises:
            ArgumentError: no tokens, padding, or something that goes with no cached prefix; nothing was
                generated.
            ClosedError: the cache was closed.
        """
        ids = kwargs.get("input_ids") if inputs is None else inputs
        for name in ("cache", "past_key_values"):
            if kwargs.get(name) is not None:
                raise ArgumentError(f"{name} must not be given: the cached prefix is the model's cache")
        if self._argument == "past_key_values" and _setting(self._inner, kwargs, "prefill_chunk_size"):
            # It begins with the first token there, whatever the cache holds.
            raise ArgumentError(
                "prefill_chunk_size must be None with a cached prefix before transformers 5: it computes all"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise ArgumentError(
                "attention_mask must be all ones, so that no token is padding: ask prompts of unequal length "
                "one by one, or with generate_batch"
            )
        with self.begin(ids, extra_key=extra_key, cache_salt=cache_salt, priority=priority) as kv:
            return self.model.generate(inputs, **kwargs, **kv.argument)

    def begin(
        self, ids: Any, *, extra_key: str | None = None, cache_salt: str | None = None, priority: int = 0
    ) -> PrefixKV:
        """Look a prompt up, and wait until what is cached of it is on the device.

        Never fails for want of room or because of a storage: what can not be had is computed.

        Args:
            ids: (rows, tokens), integers; or the tokens of one row.
            extra_key: first half of the namespace.
            cache_salt: second half of the namespace.
            priority: as for `generate`.

        Returns:
            A `Cache` for `generate` or for the model's forward; use it in a ``with``, or `finish` it.

        Raises:
            ArgumentError: no tokens, an adapter without a name for it, or a model in training mode.
            BusyError: the model serves batches meanwhile.
            ClosedError: the cache was closed.
        """
        prompts = _prompts(ids)
        if self._inner.training:
            raise ArgumentError(
                "model must not be in training mode, where what it computes is chance: eval()"
            )
        _serves_no_batches(self._inner)
        if extra_key is None and (needs_adapter_key(self.model) or needs_adapter_key(self._inner)):
            raise ArgumentError(
                "extra_key must name the adapter that is active, or say that none is: the model has "
                "adapters, and what one of them computes is wrong under another"
            )
        space = {"extra_key": extra_key, "cache_salt": cache_salt}
        requests: list[Request | None] = []
        try:
            for prompt in prompts:
                requests.append(self._admit(prompt, priority=priority, **space))
            with self._lock:
                self._check_open()
                # The rows go through the model together, so they all begin where the shortest hit ends.
                hit = min(0 if request is None else request.device_length for request in requests)
                pages = [request.pages for request in requests if request is not None]
                kv = PrefixKV(
                    self,
                    self._pages.shape,
                    prompts,
                    self._argument,
                    lambda layers: self._pages.read(layers, pages, hit),
                )
        except BaseException:
            with self._lock:
                self._give_up(requests)
            raise
        kv.held = _Held(requests, space)
        return kv

    def _admit(self, prompt: npt.NDArray[np.uint32], *, priority: int, **space: Any) -> Request | None:
        """Bring everything that is hit to the device; None: it can not be had, nor what follows be kept."""
        for _ in range(_ATTEMPTS):
            with self._lock:
                self._check_open()
                request = self.cache.begin(prompt, priority=priority, **space)
            try:
                while not self._prefetched(request):
                    time.sleep(_POLL_SECONDS)
                with self._lock:
                    request.load_back()
                    request.wait()
                return request
            except CopyError as error:
                with self._lock:
                    request.abort()
                _log.warning("a cached prefix did not arrive on the device: %s", error)
            except BaseException:
                with self._lock:
                    request.abort()
                raise
        return None

    def _prefetched(self, request: Request) -> bool:
        with self._lock:
            self.cache.tick()
            return request.prefetch_done()

    # What a PrefixKV tells

    def _advance(self, kv: PrefixKV) -> None:
        """The prompt was computed: keep it now, so that its way to host goes on behind the answer."""
        with self._lock:
            if self._closed:
                return
            if not kv.prompt_kept:
                kv.prompt_kept = True
                self._keep(kv, finish=False)
            self.cache.tick()

    def _finish(self, kv: PrefixKV) -> None:
        with self._lock:
            if not self._closed:
                if kv.prefill_seconds is not None and len(kv.held.requests) == 1:
                    self.cache.record_prefill(kv.prefill_tokens, kv.prefill_seconds)
                self._keep(kv, finish=True)
                self.cache.tick()
            self._give_up(kv.held.requests)

    def _abort(self, kv: PrefixKV) -> None:
        with self._lock:
            self._give_up(kv.held.requests)

    def _give_up(self, requests: list[Request | None]) -> None:
        for request in requests:
            if request is not None:
                request.abort()

    def _keep(self, kv: PrefixKV, *, finish: bool) -> None:
        """Give whole pages of what was computed to the tree, row by row."""
        rows, requests = kv.tokens(), kv.held.requests
        if rows is None or len(rows) < len(requests):
            return  # what they hold is given back all the same
        each = len(rows) // len(requests)
        for number, tokens in enumerate(rows):
            # Of several rows of a prompt the first one goes on with its request.
            mine = number % each == 0 and number // each < len(requests)
            request = requests[number // each] if mine else None
            if request is not None and _continues(request, tokens):
                try:
                    self._keep_row(kv, number, request, tokens)
                    if finish:
                        request.finish(computed=request.device_length)
                except (CapacityError, CopyError) as error:
                    _log.warning("%d tokens are not kept in the cache: %s", len(tokens), error)
                    request.abort()
                    requests[number // each] = None
            elif finish:
                self._keep_more(kv, number, tokens)

    def _keep_row(self, kv: PrefixKV, row: int, request: Request, tokens: npt.NDArray[np.uint32]) -> None:
        page_size = self.cache.page_size
        start, stop = request.device_length, len(tokens) // page_size * page_size
        # Also if nothing is to be written: this is where hits are counted.
        pages = request.extend(tokens[len(request.tokens) : stop])
        if stop > start:
            self._pages.write(kv.layers, row, pages[start // page_size :], start, stop)
            request.insert(computed=stop)

    def _keep_more(self, kv: PrefixKV, row: int, tokens: npt.NDArray[np.uint32]) -> None:
        """Another row of a prompt: what follows after what is on the device."""
        page_size, space = self.cache.page_size, kv.held.space
        stop = len(tokens) // page_size * page_size
        match = self.cache.match_prefix(tokens[:stop], **space)
        start = match.device_length
        if stop <= start:
            return
        lock = self.cache.lock(match.last_device_node)
        try:
            pages = self.cache.alloc((stop - start) // page_size)
            self._pages.write(kv.layers, row, pages, start, stop)
            self.cache.insert(
                tokens[:stop], np.concatenate((match.device_pages, pages)), prev_prefix_len=start, **space
            )
        except CapacityError as error:
            _log.warning("%d tokens are not kept in the cache: %s", len(tokens), error)
        finally:
            self.cache.unlock(lock)

    # The cache as a whole

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was computed is on host and in storage, or given up.

        Args:
            timeout: seconds; None: no limit.

        Returns:
            False if there was not enough time.
        """
        with self._lock:
            self._check_open()
            return self.cache.flush(timeout)

    def update_weights(self, version: str | None = None) -> None:
        """The model has other weights from now on: nothing that was computed before is hit again.

        Args:
            version: their name; None: what they are is read from them.

        Raises:
            ArgumentError: the weights are those that they were.
            BusyError: something is being generated.
        """
        with self._lock:
            self._check_open()
            self.cache.update_weights(fingerprint(self._inner) if version is None else version)

    def close(self, *, timeout: float = 10.0) -> None:
        """End all threads. More than once is fine.

        Args:
            timeout: seconds that pages on their way to storage may take.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._hook.remove()
            self.cache.close(timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the cache was closed")


def _serves_no_batches(model: Any) -> None:
    is_running = getattr(getattr(model, CACHED_MANAGER, None), "is_running", None)
    if is_running is not None and is_running():
        # What it then computes elsewhere is wrong, and would be kept.
        raise BusyError("the model serves batches: transformers can not use it in two ways at a time")


def _setting(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """A setting of `generate`, as it finds it."""
    given = (kwargs, vars(kwargs.get("generation_config") or model.generation_config))
    return next((settings[name] for settings in given if settings.get(name) is not None), None)


def _prompts(ids: Any) -> npt.NDArray[np.uint32]:
    """(rows, tokens), at least one of each."""
    if ids is None:
        raise ArgumentError("inputs must be tokens, integers (rows, tokens), not None")
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.size == 0:
        raise ArgumentError(f"inputs must be tokens, integers (rows, tokens), not of shape {array.shape}")
    return np.stack([as_tokens(row) for row in array])


def _continues(request: Request, tokens: npt.NDArray[np.uint32]) -> bool:
    """The tokens are those of the request, and perhaps more."""
    own = request.tokens
    return len(tokens) >= len(own) and np.array_equal(tokens[: len(own)], own)
