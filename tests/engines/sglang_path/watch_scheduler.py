"""Writes down what the scheduler of SGLang really runs, and what its cache holds when it is idle.

Loaded by SGLang as a plugin, as `unified_cache` is. Each line of the file that WATCH_FILE names is a JSON
object: ``{"ran": tokens}`` for a forward of prompts, ``{"decoded": requests}`` for one of answers,
``{"retracted": requests}``, ``{"idle": usage, "stats": counters}``.

Once there is a file that FAIL_LOAD names, the next copy to the device fails, and the file is removed. With
HICACHE_ON_CPU, what SGLang's own HiCache does by GPU kernels is done by torch.
"""

import json
import os
from typing import Any


def _write(**line: Any) -> None:
    with open(os.environ["WATCH_FILE"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def register() -> None:
    if "WATCH_FILE" not in os.environ:
        return
    from sglang.srt.managers import scheduler as module
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    run_batch, retract_decode = module.Scheduler.run_batch, ScheduleBatch.retract_decode
    on_idle = module.Scheduler.on_idle

    def watched_run(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        if batch.forward_mode.is_extend():
            _write(ran=int(batch.extend_num_tokens), requests=len(batch.reqs))
        else:
            _write(decoded=len(batch.reqs))
        return run_batch(self, batch, *args, **options)

    def watched_retract(self: Any, *args: Any, **options: Any) -> Any:
        result = retract_decode(self, *args, **options)
        _write(retracted=len(result[0]))
        return result

    def watched_idle(self: Any) -> Any:
        result = on_idle(self)
        cache = getattr(self.tree_cache, "cache", None)
        if cache is not None:
            line = {"idle": cache.usage(), "stats": cache.stats()}
            if line != getattr(self, "_watched", None):
                self._watched = line
                _write(**line)
        return result

    _order_failures()
    if os.environ.get("HICACHE_ON_CPU"):
        _hicache_on_cpu()
    module.Scheduler.run_batch = watched_run
    module.Scheduler.on_idle = watched_idle
    ScheduleBatch.retract_decode = watched_retract


def _order_failures() -> None:
    from unified_cache.copies.cpu import CpuCopyEngine

    copy = CpuCopyEngine._copy

    def failing(self: Any, handle: Any, arrived: Any) -> None:
        order = os.environ.get("FAIL_LOAD", "")
        if handle.direction == "load" and order and os.path.exists(order):
            os.remove(order)
            _write(failed_load=len(handle.device_pages))
            raise OSError("a copy that a test has made fail")
        copy(self, handle, arrived)

    CpuCopyEngine._copy = failing  # type: ignore[method-assign]


def _hicache_on_cpu() -> None:
    from sglang.srt.mem_cache.pool_host import common, mha

    def transfer(
        src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
    ) -> None:
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    common._cuda_host_register = lambda buffer, granularity=None: None
    mha.transfer_kv_direct = transfer
