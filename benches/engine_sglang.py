"""Conversations with SGLang on this machine's CPU: without a cache, with SGLang's own, with this one.

Each server in turn gets the same requests: every client asks its questions one after the other, all clients
at the same time. Half way the server is started anew, as after an update. Conversations go on with the
answers of the first server, so that all get the same prompts. How many answers are the same is told: requests
that are computed together round differently, and a model of random weights is undecided now and then.

    .venv/bin/python benches/engine_sglang.py
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import machine

from tests.engines.sglang_server import PAGE, SglangServer

CLIENTS, ROUNDS, SYSTEM, QUESTION, ANSWER = 6, 6, 192, 96, 16
# A third of what the conversations have in the end.
DEVICE_TOKENS = 1536


@dataclass
class Measured:
    """One kind of server.

    Attributes:
        first: seconds to the first token, of each request.
        after_restart: the same, in the round after the restart.
        seconds: that requests were under way.
        prompt: tokens asked.
        cached: of these, those that were not computed.
        answers: in the order of rounds and clients.
    """

    first: list[float] = field(default_factory=list)
    after_restart: list[float] = field(default_factory=list)
    seconds: float = 0.0
    prompt: int = 0
    cached: int = 0
    answers: list[list[int]] = field(default_factory=list)


def ask(server: SglangServer, prompt: list[int]) -> tuple[list[int], float, int]:
    """The answer, seconds to its first token, and tokens of the prompt that were not computed."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
    body = {"input_ids": prompt, "stream": True, "sampling_params": sampling, "return_logprob": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    start, first, tokens, cached = time.perf_counter(), 0.0, list[int](), 0
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - start
            meta = json.loads(line[6:])["meta_info"]
            tokens = [pair[1] for pair in meta["output_token_logprobs"]]
            cached = meta["cached_tokens"]
    assert len(tokens) == ANSWER
    return tokens, first, cached


def serve(folder: Path, flags: list[str], answers: list[list[int]] | None) -> Measured:
    """All rounds, of conversations that go on with these answers; None: with its own."""
    draw = random.Random(1)
    system = [draw.randrange(2, 512) for _ in range(SYSTEM)]
    histories = [list(system) for _ in range(CLIENTS)]
    measured = Measured()
    for half in range(2):
        with SglangServer.start(folder, "--max-total-tokens", str(DEVICE_TOKENS), *flags) as server:
            server.generate([draw.randrange(2, 512) for _ in range(300)], 2)  # the first forward is slow
            server.flush()
            for round_ in range(ROUNDS // 2):
                prompts = [
                    history + [draw.randrange(2, 512) for _ in range(QUESTION)] for history in histories
                ]
                start = time.perf_counter()
                with ThreadPoolExecutor(CLIENTS) as pool:
                    got = list(pool.map(lambda prompt, at=server: ask(at, prompt), prompts))
                measured.seconds += time.perf_counter() - start
                for client, (tokens, first, cached) in enumerate(got):
                    went_on = tokens if answers is None else answers[len(measured.answers)]
                    histories[client] = prompts[client] + went_on
                    measured.answers.append(tokens)
                    measured.first.append(first)
                    if half and not round_:
                        measured.after_restart.append(first)
                    measured.prompt += len(prompts[client])
                    measured.cached += cached
            server.flush()
            server.stop()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        extra = {"storage": str(folder / "store"), "prefetch_threshold": PAGE, "load_back_threshold": PAGE}
        tiers = [
            "--radix-cache-backend",
            "unified-cache",
            "--enable-hierarchical-cache",
            "--hicache-ratio",
            "4",
        ]
        stored = ["--hicache-storage-backend", "dynamic"]
        stored += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
        servers = {"no cache": ["--disable-radix-cache"], "SGLang's own": [], "unified-cache": tiers + stored}
        results: dict[str, Measured] = {}
        for kind, flags in servers.items():
            first = next(iter(results.values()), None)
            results[kind] = serve(folder, flags, None if first is None else first.answers)
            print(f"{kind}: done", file=sys.stderr)
    expected = results["no cache"].answers
    rows = {
        kind: {
            "hit rate": measured.cached / measured.prompt,
            "ttft median s": statistics.median(measured.first),
            "ttft after restart s": statistics.median(measured.after_restart),
            "answered tokens/s": CLIENTS * ROUNDS * ANSWER / measured.seconds,
            "same answers": sum(map(list.__eq__, measured.answers, expected)) / len(expected),
        }
        for kind, measured in results.items()
    }
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(machine())
    for kind, row in rows.items():
        print(f"{kind:32}" + "".join(f"  {what} {value:.3f}" for what, value in row.items()))


if __name__ == "__main__":
    main()
