"""Conversations in vLLM on a CPU, without and with the cache: time to first token, tokens a second, hits.

More conversations than the device can hold take turns; each turn sends all that was said before. Two engines,
one with the cache, are processes that are asked the same in turns, so that whatever else the machine does
hits both. Run it with a Python that has vLLM, see docs/vllm.md:

    PYTHONPATH=python .../bin/python benches/vllm_multiturn.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

BLOCK = 32


def make_model(folder: str, layers: int, hidden: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1),
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


class Engine:
    """One vLLM, and what it was asked so far."""

    def __init__(self, model: str, blocks: int, length: int, extra: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if extra is not None:
            transfer = KVTransferConfig(
                kv_connector="UnifiedCacheConnector",
                kv_connector_module_path="unified_cache.engines.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        self.llm = LLM(
            model=model,
            dtype="float32",
            max_model_len=length,
            max_num_seqs=4,
            enforce_eager=True,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            skip_tokenizer_init=True,
            kv_transfer_config=transfer,
        )
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        schedule, self.ran = scheduler.schedule, 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.ran += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counted
        self.forget()

    def forget(self) -> None:
        """What follows counts."""
        self.first: list[float] = []
        self.seconds = 0.0
        self.prompt_tokens = self.ran_of_prompts = self.answered = 0

    def ask(self, prompt: list[int], tokens: int) -> list[int]:
        from vllm import SamplingParams

        self.ran = 0
        begun = time.perf_counter()
        for at, count in enumerate((1, tokens)):
            # Twice, since one call does not say when its first token was there: the second begins with a hit.
            parameters = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            answer = self.llm.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)
            if at == 0:
                self.first.append(time.perf_counter() - begun)
                self.ran_of_prompts += self.ran
        self.seconds += time.perf_counter() - begun
        self.prompt_tokens += len(prompt)
        self.answered += tokens
        return list(answer[0].outputs[0].token_ids)

    def report(self) -> dict[str, float]:
        return {
            "ttft_ms_median": round(1e3 * median(self.first), 1),
            "ttft_ms_mean": round(1e3 * sum(self.first) / len(self.first), 1),
            "answer_tokens_per_s": round(self.answered / self.seconds, 2),
            "hit_rate": round(1 - self.ran_of_prompts / self.prompt_tokens, 3),
        }


def serve(folder: str, blocks: int, length: int, extra: dict[str, Any] | None) -> None:
    """One engine: a line with a question in, a line with the answer out."""
    engine = Engine(folder, blocks, length, extra)
    print("READY", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["kind"] == "report":
            print("ANSWER", json.dumps(engine.report()), flush=True)
            return
        answer = engine.ask(asked["prompt"], asked["tokens"])
        if asked["kind"] == "warm":
            engine.forget()
        print("ANSWER", json.dumps(answer), flush=True)


class Process:
    """An engine in a process of its own."""

    def __init__(self, *arguments: Any) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--serve", json.dumps(arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read("READY")

    def ask(self, kind: str, **rest: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, **rest}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read("ANSWER"))

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"an engine has ended with {self._process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--words", type=int, default=320, help="tokens that a user adds in a turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve)
        return
    length = -(-(given.words + given.answer) * given.turns // BLOCK) * BLOCK + BLOCK
    blocks = 3 * length // BLOCK  # on device three conversations of full length
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, given.layers, given.hidden)
        engines = {
            "without": Process(folder, blocks, length, None),
            "with": Process(folder, blocks, length, {"hicache_ratio": given.users / 2}),
        }
        warm = [chance.randrange(5, 500) for _ in range(3 * BLOCK)]
        for engine in engines.values():
            engine.ask("warm", prompt=warm, tokens=given.answer)
        said: list[list[int]] = [[] for _ in range(given.users)]
        for turn in range(given.turns):
            for user in range(given.users):
                said[user] += [chance.randrange(5, 500) for _ in range(given.words)]
                names = list(engines) if (turn + user) % 2 else list(engines)[::-1]
                answers = [
                    engines[name].ask("turn", prompt=said[user], tokens=given.answer) for name in names
                ]
                assert answers[0] == answers[1], "the cache must not change an answer"
                said[user] += answers[0]
        result: dict[str, Any] = {name: engine.ask("report") for name, engine in engines.items()}
        result["settings"] = {name: value for name, value in vars(given).items() if name != "serve"}
        result["ttft_ratio"] = round(result["without"]["ttft_ms_mean"] / result["with"]["ttft_ms_mean"], 2)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
