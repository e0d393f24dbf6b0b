"""Conversations with servers of vLLM and SGLang on this CPU, without and with the cache, in one run.

More conversations than the device can hold take turns; each turn sends all that was said before, and half
way the servers are started anew, as after an update. All servers are up at the same time and are asked the
same, one after the other, in each turn in another order; those that are not asked are stopped (SIGSTOP), so
that they take no time from the one that is. Without the cache means: with the engine's own prefix cache on
the device.

All conversations go on with the answers of the first server, so that all get the same prompts. How many
answers are the same is told: requests that are computed together round differently, and a model of random
weights is undecided now and then; with --at-once 1 nothing is computed together.

    .venv/bin/python benches/engines.py

The first run installs the engines into an environment of their own (2 GB; tests/engines/environment.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import machine

from tests.engines.environment import engine_python, install_package, vllm_variables
from tests.engines.sglang_server import engine_environment, free_port

BLOCK = 32
_START_SECONDS = 600
_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
folder, layers, hidden = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = LlamaConfig(
    vocab_size=512, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
    num_attention_heads=hidden // 64, num_key_value_heads=max(hidden // 256, 1), head_dim=64,
    max_position_embeddings=8192, initializer_range=0.1, bos_token_id=0, eos_token_id=1,
)
LlamaForCausalLM(config).save_pretrained(folder)
"""


@dataclass
class Measured:
    """What one kind of server did.

    Attributes:
        first: seconds to the first token, of each request.
        after_restart: the same, of the turn after the restart.
        seconds: that requests were under way.
        prompt: tokens asked.
        cached: of these, those that were not computed, as the engine says.
        answers: in the order of turns and users.
    """

    first: list[float] = field(default_factory=list)
    after_restart: list[float] = field(default_factory=list)
    seconds: float = 0.0
    prompt: int = 0
    cached: int = 0
    answers: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """One answer, seconds to its first token, and tokens of its prompt that were not computed."""

    tokens: list[int]
    first: float
    cached: int


class Server:
    """A server in a group of processes of its own, which can be stopped and go on."""

    def __init__(self, name: str, command: list[Any], variables: dict[str, str], folder: Path) -> None:
        self.name, self.measured = name, Measured()
        self._command, self._variables = [str(part) for part in command], variables
        self._log = folder / f"{name}.log".replace(" ", "-")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._port = free_port()
        with open(self._log, "a") as log:
            self._process = subprocess.Popen(
                [*self._command, "--host", "127.0.0.1", "--port", str(self._port)],
                stdout=log,
                stderr=log,
                env=self._variables,
                start_new_session=True,
            )
        end = time.monotonic() + _START_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{self.name} does not come up:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.3)

    def _ready(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
        except OSError:
            return False
        return True

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def end(self) -> None:
        """As an operator does: what is on its way to storage gets there."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ask(self, prompt: list[int], answer: int) -> Answer:
        """One request, streamed."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{self._path}",
            json.dumps(self._body(prompt, answer)).encode(),
            {"Content-Type": "application/json"},
        )
        begun, first, pieces = time.perf_counter(), 0.0, []
        with urllib.request.urlopen(request, timeout=600) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - begun
                    pieces.append(json.loads(line[6:]))
        tokens, cached = self._read(pieces)
        assert len(tokens) == answer, (self.name, tokens)
        return Answer(tokens, first, cached)

    _path: str

    def _body(self, prompt: list[int], answer: int) -> dict[str, Any]:
        raise NotImplementedError

    def _read(self, pieces: list[dict[str, Any]]) -> tuple[list[int], int]:
        raise NotImplementedError


class Vllm(Server):
    _path = "/v1/completions"

    def _body(self, prompt: list[int], answer: int) -> dict[str, Any]:
        return {
            "model": "llama",
            "prompt": prompt,
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _read(self, pieces: list[dict[str, Any]]) -> tuple[list[int], int]:
        tokens = [token for piece in pieces for each in piece["choices"] for token in each["token_ids"]]
        details = pieces[-1]["usage"]["prompt_tokens_details"] or {}
        return tokens, details.get("cached_tokens") or 0


class Sglang(Server):
    _path = "/generate"

    def _body(self, prompt: list[int], answer: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
        return {"input_ids": prompt, "stream": True, "sampling_params": sampling, "return_logprob": True}

    def _read(self, pieces: list[dict[str, Any]]) -> tuple[list[int], int]:
        about = pieces[-1]["meta_info"]
        return [pair[1] for pair in about["output_token_logprobs"]], about["cached_tokens"]


def servers(given: argparse.Namespace, folder: Path) -> list[Server]:
    """Of each engine one without and one with the cache."""
    python, model = engine_python(), folder / "llama"
    length = (given.words + given.answer) * given.turns
    blocks = -(-given.device * length // BLOCK)  # whole conversations on the device
    ratio = -(-given.users // given.device)  # all of them on host
    package = folder / "package"
    package.mkdir()
    install_package(package)
    subprocess.run(
        [python, "-c", _MODEL, str(model), str(given.layers), str(given.hidden)],
        check=True,
        env=vllm_variables(),
    )
    vllm = [python, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    vllm += ["--model", model, "--served-model-name", "llama", "--dtype", "float32", "--skip-tokenizer-init"]
    vllm += ["--max-model-len", length + 2 * BLOCK, "--max-num-seqs", 4, "--block-size", BLOCK]
    vllm += ["--num-gpu-blocks-override", blocks, "--enable-prompt-tokens-details"]
    transfer = {
        "kv_connector": "UnifiedCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"hicache_ratio": ratio, "storage": str(folder / "of-vllm")},
    }
    sglang = [python, "-m", "sglang.launch_server", "--model-path", model, "--device", "cpu"]
    sglang += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    sglang += ["--grammar-backend", "none", "--dtype", "float32", "--disable-overlap-schedule"]
    sglang += ["--skip-server-warmup", "--page-size", BLOCK, "--enable-cache-report", "--skip-tokenizer-init"]
    sglang += ["--max-running-requests", 4, "--max-total-tokens", blocks * BLOCK]
    tiers = ["--radix-cache-backend", "unified-cache", "--enable-hierarchical-cache"]
    tiers += ["--hicache-ratio", ratio, "--hicache-storage-backend", "dynamic"]
    tiers += ["--hicache-storage-backend-extra-config", json.dumps({"storage": str(folder / "of-sglang")})]
    own = engine_environment()
    return [
        Vllm("vLLM", vllm, vllm_variables(), folder),
        Vllm(
            "vLLM + unified-cache",
            [*vllm, "--kv-transfer-config", json.dumps(transfer)],
            vllm_variables(package),
            folder,
        ),
        Sglang("SGLang", sglang, own, folder),
        Sglang("SGLang + unified-cache", [*sglang, *tiers], own, folder),
    ]


def start(all_servers: list[Server], warm: list[int], answer: int) -> None:
    """Start them one by one, and stop each where nothing is under way."""
    for server in all_servers:
        server.start()
        server.ask(warm, answer)  # the first forwards are slow, whatever they compute
        server.pause()


def serve(given: argparse.Namespace, all_servers: list[Server]) -> None:
    """All turns of all users, by every server."""
    draw = random.Random(1)

    def words(count: int) -> list[int]:
        return [draw.randrange(5, 500) for _ in range(count)]

    said: list[list[int]] = [[] for _ in range(given.users)]
    restart = given.turns // 2
    start(all_servers, words(3 * BLOCK), given.answer)
    for turn in range(given.turns):
        if turn == restart:
            for server in all_servers:
                server.go_on()
                server.end()
            start(all_servers, words(3 * BLOCK), given.answer)
        prompts = [so_far + words(given.words) for so_far in said]
        shift = turn % len(all_servers)
        for server in all_servers[shift:] + all_servers[:shift]:
            server.go_on()
            begun = time.perf_counter()
            with ThreadPoolExecutor(given.at_once) as pool:
                got = list(pool.map(lambda prompt, at=server: at.ask(prompt, given.answer), prompts))
            measured = server.measured
            measured.seconds += time.perf_counter() - begun
            server.pause()
            measured.answers += [answer.tokens for answer in got]
            measured.first += [answer.first for answer in got]
            if turn == restart:
                measured.after_restart = [answer.first for answer in got]
            measured.prompt += sum(map(len, prompts))
            measured.cached += sum(answer.cached for answer in got)
            print(f"turn {turn + 1} of {given.turns}: {server.name}", file=sys.stderr)
        answers = all_servers[0].measured.answers[-given.users :]
        said = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]


def row(server: Server, expected: list[list[int]]) -> dict[str, float]:
    measured = server.measured
    return {
        "hit rate": measured.cached / measured.prompt,
        "ttft median ms": 1e3 * statistics.median(measured.first),
        "ttft mean ms": 1e3 * statistics.mean(measured.first),
        "ttft after restart, mean ms": 1e3 * statistics.mean(measured.after_restart),
        "answered tokens/s": sum(map(len, measured.answers)) / measured.seconds,
        "same answers": sum(map(list.__eq__, measured.answers, expected)) / len(expected),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--words", type=int, default=256, help="tokens that a user adds in a turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--device", type=int, default=3, help="conversations that fit the device")
    parser.add_argument("--at-once", type=int, default=2, help="requests under way at the same time")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--json", action="store_true", help="one object")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        all_servers = servers(given, Path(name))
        try:
            serve(given, all_servers)
        finally:
            for server in all_servers:
                server.kill()
    expected = all_servers[0].measured.answers
    rows = {server.name: row(server, expected) for server in all_servers}
    if given.json:
        settings = {key: value for key, value in vars(given).items() if key != "json"}
        print(json.dumps({"machine": machine(), "settings": settings, "rows": rows}))
        return
    print(machine())
    for kind, figures in rows.items():
        print(f"{kind:24}" + "".join(f"  {what} {value:.3f}" for what, value in figures.items()))


if __name__ == "__main__":
    main()
