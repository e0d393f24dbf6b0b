"""A real transformer serves many conversations: without a cache, and with one tier more each time.

A small Llama of random weights is made on the spot, on the GPU if there is one. Clients hold conversations
that begin with the same system prompt; their turns are interleaved, so that the device pool is too small for
all of them. Half way the server restarts: what was on device and on host is gone, what was stored is not.
Every answer must be, token for token, what the model gives without a cache; else the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unified_cache.errors import ArgumentError, MissingDependencyError

if TYPE_CHECKING:
    from unified_cache.demo.serving import Report
    from unified_cache.demo.workload import Traffic

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "demo"
HELP = "a real transformer serves conversations through the cache, every answer checked"

_NEEDED = ("torch", "transformers", "matplotlib", "tqdm")
_FORMATS = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, help="conversations (default: 10; quick: 4)")
    parser.add_argument("--turns", type=int, help="turns of each, at least 2 (default: 6; quick: 4)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and workload (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is one, else cpu)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model and short prompts: seconds, but its times say nothing",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("unified-cache-demo.png"),
        metavar="FIGURE",
        help=f"where the figure goes: {', '.join(_FORMATS)} (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    _check_numbers(arguments)
    _check_out(arguments.out)
    _check_installed()
    # Only now: these need what was just looked for.
    from unified_cache.demo import text
    from unified_cache.demo.figure import draw
    from unified_cache.demo.model import make_model
    from unified_cache.demo.scale import scale_for
    from unified_cache.demo.serving import HOST_RATIO, PAGE_SIZE, device_pages

    device = _device(arguments.device)
    scale = scale_for(device, quick=arguments.quick, clients=arguments.clients, turns=arguments.turns)
    headline = text.headline(scale, device)
    if not arguments.json:
        print(f"{headline}\n{text.pools(scale)}", flush=True)
    begun = time.perf_counter()
    model = make_model(scale.model, arguments.seed, scale.traffic.longest, device)
    reports, redrawn = _serve_all(model, scale.traffic, arguments.seed)
    runs = text.summaries(reports)
    draw(runs, headline, arguments.out)
    seconds = time.perf_counter() - begun

    wrong = [text.difference(report) for report in reports if report.mismatches]
    if arguments.json:
        result = {
            "model": scale.model.name,
            "device": device,
            "clients": scale.traffic.clients,
            "turns": scale.traffic.turns,
            "seed": arguments.seed,
            "requests": len(reports[0].generations),
            "prompt_tokens": sum(generation.prompt_tokens for generation in reports[0].generations),
            "page_size": PAGE_SIZE,
            "device_pages": device_pages(scale.traffic),
            "host_pages": int(device_pages(scale.traffic) * HOST_RATIO),
            "all_equal": not wrong,
            "closest_lead": text.closest_lead(reports[0]),
            "rounding": text.drift(reports),
            "redrawn": redrawn,
            "runs": runs,
            "figure": str(arguments.out),
            "seconds": seconds,
        }
        print(json.dumps(result))
    else:
        print(f"\n{text.table(runs)}\n")
        if not wrong:
            print(text.verdict(reports, redrawn))
        print(f"Figure: {arguments.out}; {seconds:.0f} s in all.")
    if wrong:
        print(f"unified-cache: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    return 0


def _serve_all(model: Any, traffic: Traffic, seed: int) -> tuple[list[Report], int]:
    """Let all set-ups serve the workload; returns their reports, the reference first, and redrawn questions.

    They take turns, round by round, so that whatever else the machine does, it does to all of them.
    """
    from tqdm import tqdm

    from unified_cache.demo import serving
    from unified_cache.demo.workload import Clients

    reference = serving.Report(serving.NO_CACHE)
    total = (1 + len(serving.SETUPS)) * traffic.clients * traffic.turns
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unified-cache-demo-"))
        bar = stack.enter_context(
            tqdm(total=total, unit="request", leave=False, disable=None)  # None: only on a terminal
        )
        servers = []
        for setup in serving.SETUPS:
            servers.append(serving.Server(model, setup, serving.device_pages(traffic), folder))
            stack.callback(servers[-1].close)
        reports = [reference, *(server.report for server in servers)]
        clients = Clients(model, traffic, seed)
        for number in range(traffic.turns):
            if number == traffic.turns // 2:
                first = len(reference.generations)
                for report in reports:
                    report.after_restart = range(first, first + traffic.clients)
                for server in servers:
                    server.restart()
            bar.set_description(serving.NO_CACHE)
            turns = clients.round(bar.update)
            for turn in turns:
                reference.add(turn, turn.reference)
                reference.seconds += turn.reference.seconds
            for server in servers:
                bar.set_description(server.report.name)
                server.serve(turns, bar.update)
    return reports, clients.redrawn


def _check_numbers(arguments: argparse.Namespace) -> None:
    for option, value, least in (("--clients", arguments.clients, 1), ("--turns", arguments.turns, 2)):
        if value is not None and value < least:
            raise ArgumentError(f"{option} must be an integer >= {least}, not {value}")
    if not 0 <= arguments.seed < 2**63:
        raise ArgumentError(f"--seed must be an integer in 0..{2**63 - 1}, not {arguments.seed}")


def _check_out(path: Path) -> None:
    """Say now, not after minutes, that the figure can not be written."""
    if path.suffix not in _FORMATS:
        raise ArgumentError(f"--out: {path} must end in one of {', '.join(_FORMATS)}")
    if path.is_dir():
        raise OSError(f"--out: {path} is a folder: name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            path.open("ab").close()
    except OSError as error:
        raise OSError(f"--out: {path} can not be written ({error.strerror}): name another file") from None


def _check_installed() -> None:
    # Read when torch is loaded. Threads that spin while they wait hold up the cache's own, and on a machine
    # that has other work to do they make every forward many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for package in _NEEDED:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependencyError(
                f"the demo needs {package}, which can not be imported ({error}): "
                "pip install 'unified-cache[demo]'"
            ) from None


def _device(asked: str | None) -> str:
    """The device that was asked for, if it is there; else the best one."""
    import torch

    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = asked.partition(":")
    if asked != "cpu" and (kind != "cuda" or (number and not number.isdecimal())):
        raise ArgumentError(f"--device: {asked!r} must be cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(number or 0) >= count:
        raise ArgumentError(f"--device: there is no {asked} here, torch sees {count} CUDA devices: take cpu")
    return asked
