"""What SGLang's scheduler does beside its cache, and a cache of several tiers must hear of.

SGLang empties its cache after new weights, and what the old ones computed is gone with it. Not in a storage:
there it still is, under the name that the new weights have too, unless somebody has given them another. And
while generation is paused SGLang calls no cache, so nothing that was under way ever ends for it: a flush is
refused then, and a release of memory is the end of the scheduler.

The hooks are on methods of SGLang's that all ranks call in the same pass, and look for our cache when called.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from unified_cache.engines.sglang_version import refuse

__all__ = ["TARGETS", "register"]

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def _new_weights(updater: Any, request: Any, *_: Any, **__: Any) -> None:
    cache = getattr(updater.scheduler, "tree_cache", None)
    version = getattr(request, "weight_version", None)
    for part in (cache, _storage(cache)):
        if part is not None and hasattr(part, "new_weights"):
            part.new_weights(version)


def _storage(cache: Any) -> Any:
    """The storage under SGLang's own HiCache, which may be ours."""
    return getattr(getattr(cache, "cache_controller", None), "storage_backend", None)


def _before_release(updater: Any, *_: Any, **__: Any) -> None:
    _settle(updater.scheduler)


def _before_flush(scheduler: Any, *_: Any, **__: Any) -> None:
    _settle(scheduler)


def _after_flush(done: bool, scheduler: Any, *_: Any, **__: Any) -> None:
    storage = _storage(getattr(scheduler, "tree_cache", None))
    if done and storage is not None and hasattr(storage, "flushed"):
        storage.flushed()


def _settle(scheduler: Any) -> None:
    """Where no request runs: end what is under way."""
    cache = getattr(scheduler, "tree_cache", None)
    if cache is None or not hasattr(cache, "settle"):
        return
    waiting = bool(scheduler.waiting_queue) and not scheduler._engine_paused
    if scheduler.running_batch.is_empty() and scheduler.chunked_req is None and not waiting:
        cache.settle()


TARGETS: tuple[tuple[str, str, Any], ...] = (
    *(
        (f"{_UPDATER}.{name}", "before", _new_weights)
        for name in (
            "begin_weight_update",
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        )
    ),
    (f"{_UPDATER}.release_memory_occupation", "before", _before_release),
    (f"{_SCHEDULER}.flush_cache", "before", _before_flush),
    (f"{_SCHEDULER}.flush_cache", "after", _after_flush),
)
"""What is hooked, when, and by what."""


def register() -> None:
    """Hook in, in a scheduler that uses a cache or a storage of ours; more than once is fine.

    Raises:
        EngineError: the installed SGLang does not have what is hooked.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in {target for target, _, _ in TARGETS}:
        try:
            pkgutil.resolve_name(target)
        except (AttributeError, ImportError) as error:
            refuse("way to change weights and to flush", [str(error)])
    for target, when, hook in TARGETS:
        if all(hook is not known for _, known, _ in HookRegistry._hooks[target]):
            HookRegistry.register(target, hook, HookType(when))
    HookRegistry.apply_hooks()
