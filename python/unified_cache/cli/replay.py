"""Replays request traces against the prefix tree: what would a cache of these sizes have hit?

A trace has one request a line, as JSON: `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`, one for each block of the input. Files may be compressed (gzip, xz). Several traces are replayed
one after the other with one cache. Sizes are in blocks of the trace.
"""

from __future__ import annotations

import argparse
import json

from unified_cache._native import PrefixTree
from unified_cache.cli.progress import bar
from unified_cache.errors import ArgumentError
from unified_cache.replay import Settings, read_trace, replay
from unified_cache.replay.traces import MAX_LENGTH

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "replay"
HELP = "replay request traces against the prefix tree: hit rates by tier, copies, time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="a .jsonl file, plain or compressed")
    parser.add_argument(
        "--device-blocks",
        type=int,
        default=default.device_blocks,
        metavar="N",
        help="size of the device tier (default %(default)s)",
    )
    parser.add_argument(
        "--host-blocks",
        type=int,
        default=default.host_blocks,
        metavar="N",
        help="size of the host tier; 0: there is none (default %(default)s)",
    )
    parser.add_argument(
        "--policy",
        choices=PrefixTree.eviction_policies(),
        default=default.eviction_policy,
        help="eviction policy of both tiers (default %(default)s)",
    )
    parser.add_argument(
        "--policy-option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the policy, such as protected_threshold=2 for slru; can be given again",
    )
    parser.add_argument(
        "--write-policy",
        choices=("write_through", "write_through_selective", "write_back"),
        default=default.write_policy,
        help="when blocks go to host (default %(default)s)",
    )
    parser.add_argument(
        "--write-through-threshold",
        type=int,
        metavar="HITS",
        help="hits from which a write-through policy copies a node (default 1, selective 3)",
    )
    parser.add_argument(
        "--host-order",
        choices=("auto", "leaves_first", "copies_first"),
        default=default.host_order,
        help="what a full host gives up first: what only it has, or copies of what the device has too "
        "(default auto: the former if the host is the larger tier)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=512,
        metavar="TOKENS",
        help="tokens in a block (default %(default)s)",
    )
    parser.add_argument("--tokens", action="store_true", help="token by token instead of block by block")
    parser.add_argument(
        "--page-size", type=int, metavar="TOKENS", help="tokens in a page, with --tokens (default 64)"
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave broken lines out, and count them")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.traces:
        raise ArgumentError("replay needs a trace: unified-cache replay TRACE.jsonl (see --help)")
    if not 1 <= arguments.block_size <= MAX_LENGTH:
        raise ArgumentError(f"--block-size is {arguments.block_size}, allowed is 1 to {MAX_LENGTH}")
    settings = Settings(
        device_blocks=arguments.device_blocks,
        host_blocks=arguments.host_blocks,
        page_size=_page_size(arguments),
        eviction_policy=arguments.policy,
        policy_options=dict(arguments.policy_option),
        write_policy=arguments.write_policy,
        write_through_threshold=arguments.write_through_threshold,
        host_order=arguments.host_order,
    )
    traces = [
        read_trace(path, block_size=arguments.block_size, skip_bad=arguments.skip_bad)
        for path in arguments.traces
    ]
    shown = not (arguments.quiet or arguments.json)
    with bar(sum(len(trace) for trace in traces), "requests", shown) as progress:
        report = replay(traces, settings, progress=progress)
    print(json.dumps(report.to_json()) if arguments.json else report.to_text())
    return 0


def _page_size(arguments: argparse.Namespace) -> int | None:
    given: int | None = arguments.page_size
    if arguments.tokens:
        return 64 if given is None else given
    if given is not None:
        raise ArgumentError("--page-size: only a replay with --tokens has pages")
    return None


def _option(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name}: {value!r} is not a whole number") from None
