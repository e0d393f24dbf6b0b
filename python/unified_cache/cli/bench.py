"""Conversations on this machine, without and with the cache: first tokens, throughput, hit rates by tier.

Many users hold conversations with a small Llama of random weights. Each turn sends all that was said before,
so its beginning was computed already, if only it was kept. Two engines of one size serve the same requests,
round by round in turns, one of them with the cache. An answer that differs is an error (exit status 1),
unless the model was undecided there, by no more than rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import uuid
from typing import TYPE_CHECKING, Any

from unified_cache.cli.models import check_number, check_seed, choose_device, require_packages
from unified_cache.cli.progress import bar
from unified_cache.errors import ArgumentError

if TYPE_CHECKING:
    from unified_cache.demo.bench import Plan
    from unified_cache.demo.model import ModelSize

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "bench"
HELP = "conversations on this machine, without and with the cache: first tokens, throughput, hit rates"

_NEEDED = ("torch", "transformers", "rich")
# The options that are numbers, what they are by default, and the least that they can be.
_NUMBERS = {
    "users": (8, 1, "conversations"),
    "turns": (5, 1, "turns of each"),
    "system": (256, 0, "tokens of a prompt that all conversations begin with"),
    "answer": (16, 1, "tokens of each answer"),
    "concurrent": (4, 1, "requests at a time; the next user asks when one has its answer"),
    "chunk": (256, 1, "tokens that a forward computes at most"),
    "layers": (4, 1, "layers of the model"),
    "hidden": (512, 1, "its hidden size"),
}
# Of all conversations: so that each tier has something to do.
_DEVICE_SHARE, _HOST_SHARE, _STORAGE_SHARE = 0.3, 0.6, 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, (default, _, what) in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--question",
        type=_range,
        default=(120, 240),
        metavar="TOKENS",
        help="of each question: a number, or the least and the most (default: 120-240)",
    )
    parser.add_argument(
        "--order",
        default="shuffled",
        help="who asks next in a round: 'shuffled' is another order each time; 'same' has whoever was away "
        "longest ask next; 'turning', backwards every other time, whoever was here last (default: "
        "%(default)s)",
    )
    for tier, share, none in (
        ("device", _DEVICE_SHARE, ""),
        ("host", _HOST_SHARE, "; 0: there is no such tier"),
    ):
        parser.add_argument(
            f"--{tier}-tokens",
            type=int,
            metavar="N",
            help=f"size of the {tier} tier (default: {share:.0%} of all conversations{none})".replace(
                "%", "%%"
            ),
        )
    parser.add_argument(
        "--storage-tokens",
        type=int,
        metavar="N",
        help="size of the storage, in a folder that is removed afterwards (default: room for all "
        "conversations; 0: there is no storage)",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="another storage, such as shm://kv?size=1GB; it keeps the run's pages, under a model name of "
        "their own",
    )
    parser.add_argument("--seed", type=int, default=1, help="of weights and workload (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is one, else cpu)")


def run(arguments: argparse.Namespace) -> int:
    for name, (_, least, _) in _NUMBERS.items():
        check_number(f"--{name}", getattr(arguments, name), least)
    check_seed(arguments.seed)
    if arguments.chunk < arguments.concurrent:
        raise ArgumentError(
            f"--chunk must be at least --concurrent, {arguments.concurrent}, not {arguments.chunk}"
        )
    require_packages("the benchmark", _NEEDED)
    # Only now: these need what was just looked for.
    from unified_cache.demo import bench, text
    from unified_cache.demo.model import ModelSize, make_model

    device = choose_device(arguments.device)
    size = ModelSize(arguments.layers, arguments.hidden, -(-11 * arguments.hidden // 4))
    with tempfile.TemporaryDirectory(prefix="unified-cache-bench-") as folder:
        plan = _plan(arguments, size, folder)
        begun = time.perf_counter()
        model = make_model(size, arguments.seed, plan.traffic.longest, device)
        total = 2 * arguments.users * arguments.turns
        with bar(total, "requests", shown=not arguments.json) as progress:
            reports = bench.run(model, plan, lambda: progress(1))
        seconds = time.perf_counter() - begun
    runs = text.summaries(reports)
    wrong = [text.difference(report, "the engine") for report in reports if report.mismatches]
    if arguments.json:
        print(json.dumps(_result(plan, size, device, runs, seconds) | {"all_equal": not wrong}))
    else:
        _print_table(plan, size, device, runs, seconds)
    if wrong:
        print(f"unified-cache: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    return 0


def _plan(arguments: argparse.Namespace, size: ModelSize, folder: str) -> Plan:
    """What is asked for, if this machine can do it."""
    from unified_cache.demo.bench import Plan
    from unified_cache.demo.scale import check_room
    from unified_cache.demo.serving import PAGE_SIZE
    from unified_cache.demo.workload import ORDERS, Traffic

    if arguments.order not in ORDERS:
        raise ArgumentError(f"--order must be one of {', '.join(ORDERS)}, not {arguments.order!r}")
    traffic = Traffic(
        arguments.users, arguments.turns, arguments.system, arguments.question, arguments.answer
    )
    least = -(-traffic.longest // PAGE_SIZE) * PAGE_SIZE
    device = arguments.device_tokens
    if device is None:
        device = max(int(_DEVICE_SHARE * traffic.expected), least)
    if device < least:
        raise ArgumentError(
            f"--device-tokens must be at least {least}, so that one conversation fits, not {device}"
        )
    host = int(_HOST_SHARE * traffic.expected) if arguments.host_tokens is None else arguments.host_tokens
    if host != 0:
        check_number("--host-tokens", host, PAGE_SIZE)
    stored = arguments.storage_tokens
    if stored is None:
        stored = int(_STORAGE_SHARE * traffic.expected) if host else 0
    check_number("--storage-tokens", stored, 0)
    storage = arguments.storage
    if storage is None and stored:
        # A slot has a header beside the page.
        storage = f"file://{folder}/store?size={int(1.1 * stored * size.token_bytes) + 2**22}"
    if storage is not None and not host:
        raise ArgumentError("--storage and --storage-tokens need a host tier: --host-tokens must not be 0")
    check_room(
        "--users, --turns, --question, --layers and the sizes of the tiers",
        memory=size.bytes + (2 * device + host) * size.token_bytes,
        disk=0 if arguments.storage else 1.1 * stored * size.token_bytes,
    )
    return Plan(
        traffic=traffic,
        seed=arguments.seed,
        order=arguments.order,
        concurrent=arguments.concurrent,
        chunk=arguments.chunk,
        device_tokens=device,
        host_tokens=host,
        storage=storage,
        name=f"bench-{uuid.uuid4().hex}",
    )


def _result(
    plan: Plan, size: ModelSize, device: str, runs: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    traffic = plan.traffic
    return {
        "model": size.name,
        "device": device,
        "users": traffic.clients,
        "turns": traffic.turns,
        "system": traffic.system,
        "question": list(traffic.question),
        "answer": traffic.answer,
        "order": plan.order,
        "concurrent": plan.concurrent,
        "chunk": plan.chunk,
        "device_tokens": plan.device_tokens,
        "host_tokens": plan.host_tokens,
        "storage": plan.storage,
        "seed": plan.seed,
        "runs": runs,
        "seconds": seconds,
    }


def _print_table(
    plan: Plan, size: ModelSize, device: str, runs: list[dict[str, Any]], seconds: float
) -> None:
    from rich.console import Console
    from rich.table import Table

    from unified_cache.demo import text

    traffic = plan.traffic
    tiers = f"{plan.device_tokens:,} on device, {plan.host_tokens:,} on host"
    if plan.storage is not None:
        tiers += ", storage"
    (_, names), *rows = text.rows(runs)
    table = Table()
    table.add_column()
    for name in names:
        table.add_column(name, justify="right")
    for label, cells in rows:
        table.add_row(label, *cells)
    # Numbers and names are printed as they are: no markup, no colours for what looks like a number.
    console = Console(highlight=False, markup=False)
    console.print(
        f"{size.name} on {device}; {traffic.clients} users, {traffic.turns} turns each, {plan.order}, "
        f"{plan.concurrent} at a time; prompts up to {traffic.longest - traffic.answer:,} tokens, "
        f"{traffic.expected:,} in all conversations; room for {tiers}"
    )
    console.print(table)
    ties = sum(run["ties"] for run in runs)
    undecided = f", but for {ties} that hang on rounding" if ties else ""
    if not any(run["mismatches"] for run in runs):
        console.print(
            f"All answers are the same without and with the cache{undecided}; {seconds:.0f} s in all."
        )


def _range(text: str) -> tuple[int, int]:
    """``120`` or ``120-240``."""
    first, dash, second = text.partition("-")
    try:
        least = int(first)
        most = int(second) if dash else least
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor two, as in 120-240") from None
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are numbers >= 1, the smaller one first")
    return least, most
