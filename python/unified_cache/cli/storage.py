"""Looks at storages, without a cache: URL is a storage's URL or a folder's path.

check   can it be reached, how fast is it, and does loading pages beat computing them?
ls      the keys of its objects
stat    how many objects, how many bytes, and of what prefixes
verify  reads every object and its checksum
gc      deletes what no reader can use: damaged objects, and with --keep those of other models; and what is
        told of prefixes that are gone
clear   deletes everything
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from unified_cache.cli.limited import LimitedBackend
from unified_cache.cli.progress import bar
from unified_cache.errors import ArgumentError, StorageError
from unified_cache.storage.contract import Backend, PageStatus
from unified_cache.storage.urls import DEADLINE_SECONDS, open_storage, schemes

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "storage"
HELP = "look at a storage: check, ls, stat, verify, gc, clear"

_BATCH = 256  # keys that are deleted in one call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, work, options, text in (
        ("check", _check, _check_options, "can it be reached, how fast is it, does loading beat computing?"),
        ("ls", _ls, _ls_options, "the keys of its objects"),
        ("stat", _stat, _no_options, "how many objects, how many bytes, and of what prefixes"),
        ("verify", _verify, _no_options, "read every object and its checksum"),
        ("gc", _gc, _gc_options, "delete what no reader can use"),
        ("clear", _clear, _clear_options, "delete everything"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "url", metavar="URL", help=f"a folder's path, or one of {', '.join(schemes())}://"
        )
        action.add_argument(
            "--timeout",
            type=float,
            default=DEADLINE_SECONDS,
            metavar="SECONDS",
            help="that a call may take (default %(default)s)",
        )
        # The flag may stand on either side of the action.
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        action.add_argument("--quiet", action="store_true", help="no progress bar")
        options(action)
        action.set_defaults(work=work)


def _check_options(action: argparse.ArgumentParser) -> None:
    for option, default, what in (
        ("--page-bytes", 1 << 20, "bytes of a page"),
        ("--pages", 128, "pages to write"),
        ("--batch", 32, "pages a call"),
        ("--threads", 4, "calls at once"),
        ("--page-tokens", 64, "tokens a page"),
    ):
        action.add_argument(
            option, type=int, default=default, metavar="N", help=f"{what} (default %(default)s)"
        )
    action.add_argument(
        "--prefill-rate",
        type=float,
        metavar="TOKENS",
        help="that the model computes in a second: says whether loading beats that",
    )


def _ls_options(action: argparse.ArgumentParser) -> None:
    action.add_argument("--limit", type=int, metavar="N", help="no more than so many")


def _gc_options(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--keep",
        action="append",
        metavar="FINGERPRINT",
        help="delete also the objects of other models: those without -FINGERPRINT- in their keys; can be "
        "given again",
    )
    action.add_argument("--dry-run", action="store_true", help="say what would go, and delete nothing")


def _clear_options(action: argparse.ArgumentParser) -> None:
    action.add_argument("--yes", action="store_true", help="yes, everything")


def _no_options(action: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    if not arguments.timeout > 0:
        raise ArgumentError(f"--timeout must be a number > 0, not {arguments.timeout:g}")
    work: Callable[[argparse.Namespace], tuple[dict[str, Any], str, int]] = arguments.work
    report, text, status = work(arguments)
    print(json.dumps(report) if arguments.json else text)
    return status


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace) -> Iterator[LimitedBackend]:
    url, timeout = arguments.url, arguments.timeout
    backend = LimitedBackend(lambda: open_storage(url, timeout), str(url), timeout)
    try:
        yield backend
    finally:
        backend.close()


def _bar(arguments: argparse.Namespace, total: int | None, unit: str) -> Any:
    return bar(total, unit, not (arguments.quiet or arguments.json))


# check


def _check(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    for option, low in (("page_bytes", 1), ("pages", 1), ("batch", 1), ("threads", 1), ("page_tokens", 1)):
        if getattr(arguments, option) < low:
            name = "--" + option.replace("_", "-")
            raise ArgumentError(f"{name} must be an integer >= {low}, not {getattr(arguments, option)}")
    rate = arguments.prefill_rate
    if rate is not None and not rate > 0:
        raise ArgumentError(f"--prefill-rate must be a number > 0, not {rate:g}")
    memory, most = 2 * arguments.pages * arguments.page_bytes, _available()
    if most is not None and memory > most:
        raise ArgumentError(
            f"--pages={arguments.pages} of {arguments.page_bytes} bytes need {memory / 1e9:.1f} GB of memory "
            f"here, {most / 1e9:.1f} GB are available: make it less"
        )
    from unified_cache.storage.probe import probe

    with _opened(arguments) as backend, _bar(arguments, 4 * arguments.pages, "pages") as progress:
        measured = probe(
            backend,
            page_bytes=arguments.page_bytes,
            pages=arguments.pages,
            batch=arguments.batch,
            threads=arguments.threads,
            deadline=arguments.timeout,
            progress=progress,
        )
        durable, shared = backend.backend.durable, backend.backend.shared
    loading = next(one for one in measured if one.call == "get")
    tokens_per_second = arguments.page_tokens / loading.seconds_per_page
    report: dict[str, Any] = {
        "url": str(arguments.url),
        "durable": durable,
        "shared": shared,
        "page_bytes": arguments.page_bytes,
        "batch": arguments.batch,
        "threads": arguments.threads,
        "calls": {
            one.call: {
                "pages": one.pages,
                "seconds": one.seconds,
                "bytes_per_second": one.bytes_per_second,
                "median_seconds": one.median,
                "worst_seconds": one.worst,
            }
            for one in measured
        },
        "load_tokens_per_second": tokens_per_second,
    }
    lines = [
        f"{arguments.url}: {arguments.pages} pages of {arguments.page_bytes} bytes, "
        f"{arguments.batch} a call, {arguments.threads} calls at once",
        f"{'call':<8}{'MB/s':>10}{'us a page':>12}{'median ms':>12}{'worst ms':>12}",
    ]
    for one in measured:
        moved = f"{one.bytes_per_second / 1e6:.0f}" if one.page_bytes else "-"
        lines.append(
            f"{one.call:<8}{moved:>10}{one.seconds_per_page * 1e6:>12.1f}"
            f"{one.median * 1e3:>12.2f}{one.worst * 1e3:>12.2f}"
        )
    lines.append(
        "What was just written may be read from a cache of the system: from a cold disk it can be slower."
    )
    if rate is not None:
        report["prefill_tokens_per_second"] = rate
        report["loading_beats_computing"] = tokens_per_second > rate
        lines.append(
            f"Loading brings {tokens_per_second:.0f} tokens a second ({arguments.page_tokens} a page), "
            f"computing {rate:.0f}: "
            + ("loading is faster." if tokens_per_second > rate else "computing is faster.")
        )
    return report, "\n".join(lines), 0


def _available() -> int | None:
    from unified_cache.pools.memory import available_bytes

    return available_bytes()


# What is there


def _ls(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    if arguments.limit is not None and arguments.limit < 0:
        raise ArgumentError(f"--limit must be an integer >= 0, not {arguments.limit}")
    listed: list[str] = []
    with _opened(arguments) as backend:
        for key in backend.keys():  # noqa: SIM118 - a backend is no dictionary
            if arguments.limit is not None and len(listed) >= arguments.limit:
                break
            listed.append(key)
    return {"keys": listed}, "\n".join(listed), 0


def _stat(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    from unified_cache.storage.prefixes import known_prefixes

    with _opened(arguments) as backend:
        stats = dict(backend.stats())
        log = backend.prefix_log()
        known = [] if log is None else known_prefixes(backend, log)
    lines = [f"{name:<20}{count:>20}" for name, count in stats.items()]
    prefixes = []
    for one in known:
        tokens = one.pages * one.page_size
        prefixes.append(
            {
                "fingerprint": one.fingerprint,
                "first_group": one.first_group,
                "prefixes": one.prefixes,
                "pages": one.pages,
                "tokens": tokens,
                "gone_pages": one.gone,
            }
        )
        lines.append(
            f"{one.fingerprint}-{one.first_group:04x}: {one.prefixes} prefixes, {one.pages} pages, "
            f"{tokens} tokens; {one.gone} pages are gone"
        )
    return {"url": str(arguments.url)} | stats | {"prefixes": prefixes}, "\n".join(lines), 0


def _verify(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    counts, damaged = _read_all(arguments, lambda backend, keys: None)
    lines = [f"{name:<12}{count:>12}" for name, count in counts.items()]
    lines += [f"{key}: {reason}" for key, reason in damaged.items()]
    bad = counts["corrupt"] + counts["error"] + counts["timeout"]
    return counts | {"damaged": damaged}, "\n".join(lines), 1 if bad else 0


def _gc(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    deleted = 0

    def delete(backend: Backend, keys: list[str]) -> None:
        nonlocal deleted
        deleted += len(keys) if arguments.dry_run else backend.delete(keys)

    counts, _ = _read_all(arguments, delete, arguments.keep)
    what = "would be deleted" if arguments.dry_run else "deleted"
    report = {"objects": counts["objects"], "deleted": deleted, "dry_run": arguments.dry_run}
    text = f"{deleted} of {counts['objects']} objects {what}"
    if not arguments.dry_run and (size := _compact(arguments)) is not None:
        report["prefix_log_bytes"] = size
        text += f"; the log of prefixes has {size} bytes now"
    return report, text, 0


def _compact(arguments: argparse.Namespace) -> int | None:
    """Leave in the log of prefixes what is there; its bytes then, None if there is none."""
    from unified_cache.storage.prefixes import compact

    with _opened(arguments) as backend:
        log = backend.prefix_log()
        return None if log is None else compact(backend, log)


def _read_all(
    arguments: argparse.Namespace,
    drop: Callable[[Backend, list[str]], None],
    keep: list[str] | None = None,
) -> tuple[dict[str, int], dict[str, str]]:
    """Read every object; `drop` gets the keys of those that are damaged, or not to be kept."""
    from unified_cache.storage.inspect import ObjectReader

    counts = dict.fromkeys(("objects", "bytes", "hit", "unknown", "gone", "corrupt", "error", "timeout"), 0)
    damaged: dict[str, str] = {}
    useless: list[str] = []
    with _opened(arguments) as backend:
        # What comes meanwhile is not looked at.
        keys = list(backend.keys())
        counts["objects"] = len(keys)
        if keep is not None:
            useless = [key for key in keys if not any(f"-{name}-" in key for name in keep)]
            others = set(useless)
            keys = [key for key in keys if key not in others]
        with _bar(arguments, len(keys), "objects") as progress:
            for one in ObjectReader(backend).read(keys):
                progress(1)
                counts["bytes"] += one.bytes
                if one.status is PageStatus.MISS:
                    counts["unknown" if one.bytes else "gone"] += 1
                else:
                    counts[one.status.value] += 1
                if one.status not in (PageStatus.HIT, PageStatus.MISS):
                    damaged[one.key] = one.reason
                if one.status is PageStatus.CORRUPT:
                    useless.append(one.key)
        for start in range(0, len(useless), _BATCH):
            drop(backend, useless[start : start + _BATCH])
    return counts, damaged


def _clear(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    if not arguments.yes:
        raise ArgumentError(f"clear deletes every object of {os.fspath(arguments.url)}: say --yes")
    with _opened(arguments) as backend:
        backend.clear()
        left = backend.stats().get("objects", 0)
    if left:
        raise StorageError(f"{left} objects are still there: somebody writes, or reads them just now")
    return {"cleared": True}, f"{arguments.url} is empty", 0
