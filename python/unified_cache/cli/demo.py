"""A real transformer serves many conversations: without a cache, and with one tier more each time.

A small Llama of random weights is made on the spot, on the GPU if there is one. Clients hold conversations
that begin with the same system prompt, and ask in rounds; an engine with continuous batching serves all
questions of a round at once. The device pool is too small for all conversations. Half way the server
restarts: what was on device and on host is gone, what was stored is not. Every answer must be, token for
token, what transformers gives without a cache; else the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unified_cache.cli.models import check_number, check_seed, choose_device, require_packages
from unified_cache.errors import ArgumentError

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
    require_packages("the demo", _NEEDED)
    # Only now: these need what was just looked for.
    from unified_cache.demo import text
    from unified_cache.demo.figure import draw
    from unified_cache.demo.model import make_model
    from unified_cache.demo.scale import scale_for
    from unified_cache.demo.serving import HOST_RATIO, PAGE_SIZE, demo_sizes

    device = choose_device(arguments.device)
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
            "prompt_tokens": reports[0].prompt_tokens,
            "page_size": PAGE_SIZE,
            "device_pages": demo_sizes(scale.traffic).device_pages,
            "host_pages": int(demo_sizes(scale.traffic).device_pages * HOST_RATIO),
            "all_equal": not wrong,
            "closest_lead": text.closest_lead(reports),
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
    """Let all set-ups serve the workload; returns their reports, and how many questions were redrawn.

    They take turns, round by round, so that whatever else the machine does, it does to all of them.
    """
    from tqdm import tqdm

    from unified_cache.demo.serving import SETUPS, Server, demo_sizes, warm_up
    from unified_cache.demo.workload import Clients, Reference

    total = (1 + len(SETUPS)) * traffic.clients * traffic.turns
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unified-cache-demo-"))
        bar = stack.enter_context(
            tqdm(total=total, unit="request", leave=False, disable=None)  # None: only on a terminal
        )
        warm_up(model, traffic.longest - 2)
        servers = []
        for setup in SETUPS:
            servers.append(Server(model, setup, demo_sizes(traffic), folder))
            stack.callback(servers[-1].close)
        reference = Reference(model, Clients(traffic, seed), traffic)
        for number in range(traffic.turns):
            bar.set_description("transformers")
            turns = reference.round(bar.update)
            for server in servers:
                if number == traffic.turns // 2:
                    server.restart()
                    first = number * traffic.clients
                    server.report.after_restart = range(first, first + traffic.clients)
                bar.set_description(server.report.name)
                prompts = [turn.prompt for turn in turns]
                answers = server.serve(prompts, traffic.answer, bar.update)
                for turn, answer in zip(turns, answers, strict=True):
                    server.report.add(turn, answer)
    return [server.report for server in servers], reference.redrawn


def _check_numbers(arguments: argparse.Namespace) -> None:
    for option, value, least in (("--clients", arguments.clients, 1), ("--turns", arguments.turns, 2)):
        check_number(option, least if value is None else value, least)
    check_seed(arguments.seed)


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
