"""What a real vLLM does with the cache; run by test_vllm.py in an environment of its own.

Prints one line of JSON after ``RESULT``. One process: vLLM's scheduler and worker are at hand.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig, WeightTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest

BLOCK = 32
PROMPT = [(at * 7919) % 500 + 5 for at in range(300)]
# Goes its own way after 5 blocks.
BRANCH = PROMPT[:160] + [(at * 31) % 490 + 5 for at in range(140)]


class Engine:
    """A vLLM whose scheduler says what it really ran."""

    def __init__(self, model: Path, extra: dict[str, Any] | None, **settings: Any) -> None:
        transfer = None
        if extra is not None:
            transfer = KVTransferConfig(
                kv_connector="UnifiedCacheConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        settings = {"num_gpu_blocks_override": 64} | settings
        self.llm = LLM(
            model=str(model),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=8,
            enforce_eager=True,
            block_size=BLOCK,
            kv_transfer_config=transfer,
            **settings,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        scheduler = self.core.scheduler
        self.side = scheduler.connector.scheduler_side if extra is not None else None
        self.steps: list[int] = []
        self.preempted = 0
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.steps.append(output.total_num_scheduled_tokens)
            return output

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **kwargs)

        scheduler.schedule, scheduler._preempt_request = counted, noted

    def ask(
        self, tokens: int = 8, lora: Any = None, salt: str | None = None, prompt: list[int] = PROMPT
    ) -> dict[str, Any]:
        """Tokens, log-probabilities, and how many tokens the scheduler ran."""
        self.steps.clear()
        given: Any = {"prompt_token_ids": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        answer = self.llm.generate(given, _greedy(tokens), use_tqdm=False, lora_request=lora)[0].outputs[0]
        chosen = [at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        # The last tokens are decoded one by one: the rest is what was computed of the prompt.
        return {"tokens": list(answer.token_ids), "logprobs": chosen, "ran": sum(self.steps) - (tokens - 1)}

    def ask_all(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self.llm.generate(given, _greedy(tokens), use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def flush(self, *, host: bool) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=host))

    def settle(self) -> dict[str, int]:
        """Empty steps until nothing is under way."""
        assert self.side is not None
        end = time.monotonic() + 60
        while self.side.usage()["operations"] and time.monotonic() < end:
            output = self.core.scheduler.schedule()
            done = self.core.model_executor.execute_model(output)
            self.core.scheduler.update_from_output(output, done)
            time.sleep(0.01)
        return self.side.usage()

    @contextlib.contextmanager
    def broken_loads(self) -> Iterator[list[int]]:
        """Copies to the device end half-way, with an error."""
        parts = get_kv_transfer_group().worker_side._parts
        hit: list[int] = []

        def copy(handle: Any, arrived: Any, engine: Any) -> None:
            if handle.direction == "load":
                hit.append(len(handle.device_pages))
                for view in engine._garbage:
                    view[handle.device_pages.astype("int64")] = 7
                raise OSError("injected: the copy ends half-way")
            type(engine)._copy(engine, handle, arrived)

        for part in parts:
            part.engine._garbage = self._device_views()
            part.engine._copy = lambda handle, arrived, engine=part.engine: copy(handle, arrived, engine)
        try:
            yield hit
        finally:
            for part in parts:
                del part.engine._copy

    def _device_views(self) -> list[Any]:
        return list(self.core.model_executor.driver_worker.worker.model_runner.kv_caches)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core
        gc.collect()


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)


def first(folder: Path) -> dict[str, Any]:
    """The first process: without the cache, then with it."""
    result: dict[str, Any] = {}
    model = folder / "llama"
    crowd = [PROMPT[:96] + [5 + (at * 31 + step) % 490 for step in range(170)] for at in range(6)]
    plain = Engine(model, None)
    result["plain"] = plain.ask()
    result["plain, branch"] = plain.ask(prompt=BRANCH)
    result["crowd, one by one"] = []
    for prompt in crowd:
        plain.flush(host=False)
        result["crowd, one by one"] += plain.ask_all([prompt], 40)
    plain.close()

    engine = Engine(
        model,
        {"hicache_ratio": 2.0, "storage": str(folder / "store"), "prefetch_policy": "wait_complete"},
        num_gpu_blocks_override=36,
    )
    result["cold"] = engine.ask()
    result["device"] = engine.ask()
    result["flushed"] = engine.flush(host=False)
    result["host"] = engine.ask()
    result["salted"] = engine.ask(salt="somebody else")
    result["salted again"] = engine.ask(salt="somebody else")
    engine.settle()
    result["flushed both"] = engine.flush(host=True)
    result["storage"] = engine.ask()
    engine.flush(host=False)
    with engine.broken_loads() as hit:
        result["broken load"] = engine.ask()
    result["broken blocks"] = sum(hit)
    engine.flush(host=True)
    engine.preempted = 0
    result["crowd"] = engine.ask_all(crowd, 40)
    result["preempted"] = engine.preempted
    engine.flush(host=False)
    result["crowd, from host"] = engine.ask_all(crowd, 40)
    result["usage"] = engine.settle()
    engine.close()
    return result


def second(folder: Path) -> dict[str, Any]:
    """The second process: only storage has anything, and some of it is wrong."""
    result: dict[str, Any] = {}
    model = folder / "llama"
    for name, store, transfer in (
        ("layers", "store", "layers"),
        ("sync", "store", "sync"),
        ("wrong bytes", "wrong", "async"),
        ("damaged", "damaged", "async"),
    ):
        extra = {"storage": str(folder / store), "transfer": transfer, "prefetch_policy": "wait_complete"}
        engine = Engine(model, extra)
        result[name] = engine.ask()
        if store == "store":
            engine.flush(host=False)
            result[f"{name}, host"] = engine.ask()
            engine.flush(host=False)
            with engine.broken_loads() as hit:
                result[f"{name}, broken load"] = engine.ask()
            result[f"{name}, broken blocks"] = sum(hit)
            # The same where the step that reads the garbage fills blocks from it.
            engine.flush(host=False)
            with engine.broken_loads() as hit:
                result[f"{name}, branch, broken load"] = engine.ask(prompt=BRANCH)
            engine.flush(host=False)
            result[f"{name}, branch, host"] = engine.ask(prompt=BRANCH)
        engine.close()
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = Engine(model, {}, enable_lora=True, max_lora_rank=8, kv_events_config=events)
    connector = engine.core.scheduler.connector
    take, taken = connector.take_events, []

    def noted() -> list[Any]:
        taken.extend(more := take())
        return more

    connector.take_events = noted
    loras = [LoRARequest(name, at + 1, str(folder / name)) for at, name in enumerate(("one", "two"))]
    for name, lora in (("bare", None), ("one", loras[0]), ("two", loras[1])):
        result[f"lora {name}"] = engine.ask(lora=lora)
    engine.flush(host=False)
    for name, lora in (("bare", None), ("one", loras[0]), ("two", loras[1])):
        result[f"lora {name} again"] = engine.ask(lora=lora)
    engine.settle()
    # The same name and path, and perhaps other weights.
    anew = LoRARequest("two", 2, str(folder / "two"), load_inplace=True)
    for name in ("lora in place", "lora in place again"):
        engine.flush(host=False)
        result[name] = engine.ask(lora=anew)
    result["stored"] = [
        [event.medium, event.lora_name, len(event.block_hashes), len(event.token_ids)] for event in taken
    ]
    engine.close()
    from unified_cache.engines import vllm as face

    def refused(name: str, of: str = "llama", extra: dict[str, Any] | None = None, **settings: Any) -> None:
        try:
            Engine(folder / of, extra or {}, **settings)
        except Exception as error:
            result[f"refused {name}"] = f"{type(error).__name__}: {error}"
        gc.collect()

    elsewhere = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="tpu")
    refused("setting", extra={"hicache_sise": 1})
    refused("model", of="gemma")
    refused("prefix caching", of="mla")
    refused(
        "new weights",
        extra={"storage": str(folder / "store")},
        weight_transfer_config=WeightTransferConfig(backend="ipc"),
    )
    batches = VllmConfig.max_concurrent_batches
    VllmConfig.max_concurrent_batches = property(lambda self: 2)
    refused("overlap", extra={"transfer": "sync"})
    VllmConfig.max_concurrent_batches = batches
    for name, attribute, value in (
        ("version", "_USED", ("start_load_kv", "a_call_of_another_version")),
        ("platform", "current_platform", elsewhere),
    ):
        before = getattr(face, attribute)
        setattr(face, attribute, value)
        refused(name)
        setattr(face, attribute, before)
    # Last: its connector was made before it was refused, and vLLM would give it to the next engine here.
    refused("storage", extra={"storage": "nowhere://x"})
    return result


if __name__ == "__main__":
    outcome = {"first": first, "second": second}[sys.argv[1]](Path(sys.argv[2]))
    print("RESULT", json.dumps(outcome), flush=True)
