"""A prefix cache for `generate_batch` (continuous batching) of `transformers`, over host and storage."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from unified_cache.engines.transformers_cache import cache_settings
from unified_cache.engines.transformers_model import (
    CACHED_MANAGER,
    inner_model,
    kv_shape,
    needs_adapter_key,
)
from unified_cache.engines.transformers_tier import BlockTier, check_version
from unified_cache.engines.vllm_settings import VllmSettings, block_config
from unified_cache.errors import ArgumentError, BusyError, ClosedError
from unified_cache.storage.contract import Backend
from unified_cache.storage.urls import open_storage

__all__ = ["BatchPrefixCache"]


class BatchPrefixCache:
    """Keeps the blocks that continuous batching has computed on host and in storage.

    What lies on the device, and is shared there, is the business of `transformers`; what it forgets comes
    back from here, in the next call, after a preemption, or in another process::

        with BatchPrefixCache(model, "/mnt/kv", continuous_batching_config=config) as cached:
            answers = cached.generate_batch(prompts, max_new_tokens=100)
            more = cached.generate_batch(next_prompts, max_new_tokens=100)

    Args:
        model: a causal language model of `transformers` with full attention in all layers, on one device.
        storage: where blocks outlive the process: a folder, a URL or a `Backend`; None: no storage.
        generation_config: of all calls; None: the model's.
        continuous_batching_config: of all calls, with `page_size` of at most 256 tokens; None: its defaults.
        settings: of `CacheConfig`, those that mean something where another owns the device.

    Attributes:
        manager: the `ContinuousBatchingManager`; `running` starts it.

    Raises:
        ArgumentError: a model, a setting or a version of `transformers` that can not be used, with the
            reason.
        CapacityError: host memory can not be had.
        StorageError: the storage can not be used.
    """

    def __init__(
        self,
        model: Any,
        /,
        storage: Any = None,
        *,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        **settings: Any,
    ) -> None:
        check_version()
        self.model = model
        self._inner = inner_model(model)
        self._shape = kv_shape(self._inner)
        from transformers import ContinuousBatchingConfig

        config = continuous_batching_config or ContinuousBatchingConfig()
        if not config.allow_block_sharing:
            raise ArgumentError(
                "allow_block_sharing of continuous_batching_config must be True, not "
                f"{config.allow_block_sharing!r}: whole blocks are what is cached"
            )
        self._settings = _settings(self._inner, storage, config.page_size, settings)
        self._generation_config = generation_config
        self._lock = threading.Lock()
        self._space: tuple[str | None, str | None] = (None, None)
        self._tier: BlockTier | None = None
        self._closed = False
        with self._no_other_manager():
            self.manager: Any = self._inner.init_continuous_batching(
                generation_config=generation_config, continuous_batching_config=config
            )
        self._create = self.manager._create_batch_processor
        self.manager._create_batch_processor = self._create_batch_processor
        try:
            # Now, not on the thread that generates, where nobody would hear what is wrong.
            self.manager.batch_processor = self._create_batch_processor()
        except BaseException:
            self.close()
            raise
        finally:
            # A run switches the model to an attention for blocks, and back at its end. None has begun yet.
            attention, self.manager._original_attn_impl = self.manager._original_attn_impl, None
            if attention is not None:
                self._inner.set_attn_implementation(attention)

    # Generating

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """`model.generate_batch`, which computes only what is not cached.

        Args:
            inputs: prompts, lists of tokens.
            extra_key: first half of the namespace of all of them: the adapter, if one is active.
            cache_salt: second half.
            kwargs: `max_new_tokens`, `record_timestamps`, `progress_bar`.

        Returns:
            What `model.generate_batch` returns.

        Raises:
            ArgumentError: configurations, which belong to the whole cache, or an adapter without a name.
            BusyError: requests are being served.
            ClosedError: the cache was closed.
        """
        for name in ("generation_config", "continuous_batching_config", "persistent_manager"):
            if name in kwargs:
                raise ArgumentError(f"{name} can not be given for one call: it is that of the cache")
        with self._manager(extra_key, cache_salt), _without_advice():
            # Persistent, since a manager that is not would end here, and its blocks with it.
            answers: dict[str, Any] = self._inner.generate_batch(
                inputs=inputs,
                generation_config=self._generation_config,
                persistent_manager=True,
                warmup=False,
                **kwargs,
            )
            return answers

    @contextlib.contextmanager
    def running(self, *, extra_key: str | None = None, cache_salt: str | None = None) -> Iterator[Any]:
        """The manager, started: for requests that come one by one, streams and aborts; stopped at the end.

        Args:
            extra_key: first half of the namespace of all requests.
            cache_salt: second half.

        Raises:
            ArgumentError: an adapter without a name.
            BusyError: requests are being served.
            ClosedError: the cache was closed.
        """
        with self._manager(extra_key, cache_salt):
            manager = self._inner.init_continuous_batching()
            manager.start()
            try:
                yield manager
            finally:
                manager.stop(block=True, keep_for_next_session=True)

    @contextlib.contextmanager
    def _manager(self, extra_key: str | None, cache_salt: str | None) -> Iterator[None]:
        """Our manager is the model's."""
        if extra_key is None and (needs_adapter_key(self.model) or needs_adapter_key(self._inner)):
            raise ArgumentError(
                "extra_key must name the adapter that is active, or say that none is: the model has "
                "adapters, and what one of them computes is wrong under another"
            )
        with self._alone():
            self._space = (extra_key, cache_salt)
            with self._no_other_manager():
                setattr(self._inner, CACHED_MANAGER, self.manager)
                self._drop_answers()
                try:
                    yield
                finally:
                    # `transformers` waits only so long for its thread, and ours are its calls until it ends.
                    if self._tier is not None and not self.manager.is_running():
                        self._tier.end_run()

    def _drop_answers(self) -> None:
        """Those of a run that was stopped: the next one would take them for its own."""
        answers = self.manager.output_router.output_queue
        while not answers.empty():
            answers.get_nowait()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise BusyError("requests are being served: one call at a time")
        try:
            if self._closed:
                raise ClosedError("the cache was closed")
            if self.manager.is_running():
                raise BusyError("requests are being served: the thread of the last call has not ended")
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _no_other_manager(self) -> Iterator[None]:
        """What the model has for itself is back at the end."""
        before = self._inner.__dict__.pop(CACHED_MANAGER, None)
        try:
            yield
        finally:
            self._inner.__dict__.pop(CACHED_MANAGER, None)
            if before is not None:
                setattr(self._inner, CACHED_MANAGER, before)

    def _create_batch_processor(self) -> Any:
        """A run begins; the processor is that of the last run, or a new one with blocks of its own."""
        processor = self._create()
        if self._tier is None or self._tier.processor is not processor:
            if self._tier is not None:
                self._tier.close()
            storage = self._settings.cache.storage
            backend = None
            if storage is not None:
                timeout = self._settings.cache.storage_timeout
                backend = storage if isinstance(storage, Backend) else open_storage(storage, timeout)
            try:
                self._tier = BlockTier(processor, self._settings, self._fingerprint(), backend)
            except BaseException:
                if backend is not None:
                    backend.close()
                raise
        self._tier.begin_run(*self._space)
        return processor

    def _fingerprint(self) -> str:
        shape, cache = self._shape, self._settings.cache
        parts = (
            "transformers continuous batching: of each layer keys, then values, (tokens, heads, size)",
            cache.model,
            cache.weight_version,
            shape.layers,
            shape.heads,
            shape.key_dim,
            shape.value_dim,
            shape.dtype,
            cache.page_size,
        )
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]

    # The cache as a whole

    def stats(self) -> dict[str, int]:
        """Counters by name; they only go up."""
        return {} if self._tier is None else self._tier.stats()

    def usage(self) -> dict[str, int]:
        """Requests, copies and reads under way, and what is held on host, in blocks."""
        return {} if self._tier is None else self._tier.usage()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was computed is on host and in storage, or given up.

        Args:
            timeout: seconds; None: no limit.

        Returns:
            False if there was not enough time.

        Raises:
            BusyError: requests are being served.
            ClosedError: the cache was closed.
        """
        with self._alone():
            return self._tier is None or self._tier.settle(timeout)

    def reset(self, *, host: bool = True) -> None:
        """Forget what is on the device, and on host too; storage stays.

        Raises:
            BusyError: requests are being served.
            ClosedError: the cache was closed.
        """
        with self._alone():
            if self._tier is not None:
                self._tier.reset(host=host)

    def close(self) -> None:
        """Stop generating, and end all threads. More than once is fine."""
        if self._closed:
            return
        self._closed = True
        if self.manager.is_running():
            self.manager.stop(block=True, hard_stop=True)
        self.manager.destroy()
        if self._tier is not None:
            self._tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Each call would be told that its manager was made for the first one's prompts, which it was not."""
    logger = logging.getLogger("ContinuousBatchingLogger")

    def other(record: logging.LogRecord) -> bool:
        return "persistent_manager=True" not in record.getMessage()

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _settings(model: Any, storage: Any, page_size: int, settings: dict[str, Any]) -> VllmSettings:
    given = cache_settings(model, storage, settings)
    given.setdefault("model", type(model).__name__)
    config = block_config(
        given,
        page_size,
        source="settings",
        size="page_size of continuous_batching_config",
        engine="batches",
    )
    return VllmSettings(config, transfer="sync")
