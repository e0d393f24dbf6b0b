"""The settings of the vLLM connector: ``kv_connector_extra_config``, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from unified_cache.config import CacheConfig
from unified_cache.errors import ArgumentError

__all__ = ["CACHE_SETTINGS", "TRANSFERS", "VllmSettings", "block_config"]

TRANSFERS = ("async", "sync", "layers")

# Of `CacheConfig`, those that mean something where an engine owns the device.
CACHE_SETTINGS = (
    "copy_blocks",
    "copy_threads",
    "eviction_policy",
    "hicache_ratio",
    "hicache_size",
    "host_huge_pages",
    "host_numa_node",
    "host_pinned",
    "host_register_chunk",
    "load_back_threshold",
    "model",
    "policy_options",
    "prefetch_policy",
    "prefetch_threshold",
    "prefetch_timeout",
    "prefetch_timeout_per_1024",
    "storage",
    "storage_compression",
    "storage_read_threads",
    "storage_timeout",
    "storage_write_threads",
    "weight_version",
)


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How the connector is set up.

    Attributes:
        cache: the settings of host and storage; its page is a block of vLLM.
        transfer: how a prefix comes from host to device. "async": its request waits, the others go on;
            "sync": the forward waits for all of it; "layers": the forward waits layer by layer, and saves
            begin layer by layer too.
        save: what is computed goes to host (and storage).
        load: what is on host (or in storage) is used.
    """

    cache: CacheConfig
    transfer: Literal["async", "sync", "layers"] = "async"
    save: bool = True
    load: bool = True

    @property
    def load_threshold(self) -> int:
        """Tokens: what is shorter on host is computed again."""
        return max(cast(int, self.cache.load_back_threshold), 1)

    @property
    def fetch_threshold(self) -> int:
        """Tokens: what is shorter in storage is computed again."""
        return max(cast(int, self.cache.prefetch_threshold), 1)

    @classmethod
    def parse(
        cls,
        extra: Mapping[str, Any],
        *,
        block_size: int,
        model: str,
        role: str = "kv_both",
        events: bool = False,
    ) -> VllmSettings:
        """From ``kv_connector_extra_config``.

        Args:
            extra: settings by name: those of `CacheConfig` that are in `CACHE_SETTINGS`, and "transfer".
            block_size: tokens in a block of vLLM.
            model: its name, if `extra` has none.
            role: ``kv_role``: "kv_producer" only saves, "kv_consumer" only loads.
            events: keep events for whoever asked vLLM for them.

        Raises:
            ArgumentError: a setting that is unknown, out of range, or means nothing here.
        """
        given = dict(extra)
        transfer = given.pop("transfer", "async")
        if transfer not in TRANSFERS:
            allowed = ", ".join(repr(name) for name in TRANSFERS)
            raise ArgumentError(f"transfer must be one of {allowed}, not {transfer!r}")
        given.setdefault("model", model)
        cache = block_config(
            given,
            block_size,
            source="kv_connector_extra_config",
            size="block_size",
            engine="vLLM",
            others=("transfer",),
            events=events,
        )
        return cls(
            cache,
            cast(Literal["async", "sync", "layers"], transfer),
            save=role != "kv_consumer",
            load=role != "kv_producer",
        )


def block_config(
    given: Mapping[str, Any],
    block_size: int,
    *,
    source: str,
    size: str,
    engine: str,
    others: Sequence[str] = (),
    events: bool = False,
) -> CacheConfig:
    """Settings of a cache behind an engine whose blocks on the device are its own.

    Args:
        given: settings by name, of those in `CACHE_SETTINGS`.
        block_size: tokens in a block.
        source: where they come from, for messages.
        size: what `block_size` is called there, for messages.
        engine: who computes, for messages.
        others: names that `source` has besides, for messages.
        events: keep events for whoever asks for them.

    Raises:
        ArgumentError: a setting that is unknown, out of range, or means nothing here.
    """
    unknown = sorted(set(given) - set(CACHE_SETTINGS))
    if unknown:
        allowed = ", ".join(sorted((*others, *CACHE_SETTINGS)))
        raise ArgumentError(f"{source} has no setting {unknown[0]!r}, allowed are: {allowed}")
    for name in ("load_back_threshold", "prefetch_threshold"):
        if given.get(name) == "auto":
            raise ArgumentError(
                f"{name} must be an integer >= 0, not 'auto': nobody measures computing in {engine}"
            )
    if not 1 <= block_size <= 256:
        raise ArgumentError(f"{size} must be in 1..256 for the cache, not {block_size!r}")
    try:
        return CacheConfig(page_size=block_size, events=events, **given)
    except TypeError as error:  # a list where a number was expected
        raise ArgumentError(f"{source}: {error}") from None
