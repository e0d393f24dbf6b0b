"""Says what this machine and this installation have: packages, GPU, memory and its limits, storage backends.

Whatever can not be used comes with what to do about it. The exit status is 1 if the cache itself can not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from unified_cache import __version__
from unified_cache._native import DEBUG_BUILD
from unified_cache.errors import StorageError
from unified_cache.storage.urls import backend_class, schemes

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "doctor"
HELP = "what this machine and this installation have, and what is missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        group: what it belongs to.
        name: what was looked at.
        state: "ok"; "missing": something optional is not there; "warning": it will be slow or small;
            "error": the cache can not run.
        value: what was found.
        advice: what to do about it; "" if nothing.
    """

    group: str
    name: str
    state: str
    value: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    findings = [finding for look in _LOOKS for finding in look()]
    if arguments.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        print("\n".join(_lines(findings)))
    return 1 if any(finding.state == "error" for finding in findings) else 0


def _lines(findings: list[Finding]) -> list[str]:
    lines: list[str] = []
    group = ""
    for finding in findings:
        if finding.group != group:
            group = finding.group
            lines += ([""] if lines else []) + [group]
        lines.append(f"  {finding.state:<8} {finding.name:<16} {finding.value}")
        if finding.advice:
            lines.append(f"  {'':<8} {'':<16} -> {finding.advice}")
    return lines


# Packages


_PACKAGES = (
    ("numpy", "numpy", "error", "pip install numpy"),
    ("torch", "torch", "warning", "pip install 'unified-cache[torch]': pools need it"),
    ("cupy", "cupy", "missing", "pip install 'unified-cache[cuda13]' (or cuda12), for copies on a GPU"),
    ("tqdm", "tqdm", "missing", "pip install 'unified-cache[cli]', for progress bars"),
    (
        "zstandard",
        "zstandard",
        "missing",
        "pip install 'unified-cache[zstd]', for storage_compression='zstd'",
    ),
    ("lz4", "lz4", "missing", "pip install 'unified-cache[lz4]', for storage_compression='lz4'"),
    ("mooncake", "mooncake", "missing", "docs/mooncake.md says which package, for mooncake://"),
)


def _packages() -> list[Finding]:
    group = "Packages"
    build = "warning" if DEBUG_BUILD else "ok"
    found = [
        Finding(group, "python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        Finding(
            group,
            "unified-cache",
            build,
            __version__ + (" without optimisation" if DEBUG_BUILD else ""),
            "build the native module with --release" if DEBUG_BUILD else "",
        ),
    ]
    names = metadata.packages_distributions()
    for name, module, state, advice in _PACKAGES:
        if importlib.util.find_spec(module) is None:
            found.append(Finding(group, name, state, "not installed", advice))
            continue
        versions = [metadata.version(package) for package in dict.fromkeys(names.get(module, ()))]
        found.append(Finding(group, name, "ok", ", ".join(versions) or "installed"))
    return found


# Machine


def _gpu() -> list[Finding]:
    group = "GPU"
    if importlib.util.find_spec("torch") is None:
        return [Finding(group, "gpu", "missing", "torch is not installed, so nobody can tell")]
    from unified_cache._torch import torch

    if not torch.cuda.is_available():
        return [Finding(group, "gpu", "missing", "none that torch can use: the cache runs on the CPU")]
    found = []
    for at in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(at)
        found.append(Finding(group, f"cuda:{at}", "ok", f"{about.name}, {_size(about.total_memory)}"))
    return found


def _limits() -> list[Finding]:
    from unified_cache.pools.memory import available_bytes
    from unified_cache.pools.numa import nodes

    group = "Memory and limits"
    available = available_bytes()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    low = not unlimited and available is not None and soft < available
    found = [
        Finding(group, "cpus", "ok", str(len(os.sched_getaffinity(0)))),
        Finding(group, "memory", "ok", "unknown" if available is None else f"{_size(available)} available"),
        Finding(
            group,
            "memlock",
            "warning" if low else "ok",
            "unlimited" if unlimited else _size(soft),
            "ulimit -l unlimited: RDMA, and registered memory on some drivers, count against it"
            if low
            else "",
        ),
        Finding(
            group,
            "open files",
            "warning" if files < 1024 else "ok",
            str(files),
            "ulimit -n 1024 or more: pages:// opens a file for each page" if files < 1024 else "",
        ),
        Finding(group, "NUMA nodes", "ok", str(len(nodes()) or 1)),
    ]
    shared = Path("/dev/shm")
    if shared.is_dir():
        stats = os.statvfs(shared)
        free = stats.f_bavail * stats.f_frsize
        small = free < 1 << 30
        advice = "mount it with more: shm:// and mooncake's shared client lie there" if small else ""
        found.append(Finding(group, "/dev/shm", "warning" if small else "ok", f"{_size(free)} free", advice))
    return found


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


# Storage


# What each backend of this package has been run against, by its tests.
_RUN_AGAINST = {
    "file": "run against real files",
    "memory": "is memory of the process itself",
    "mmap": "run against real files",
    "mooncake": "run against a real mooncake_master, tcp on one machine; never with RDMA",
    "pages": "run against real files",
    "shm": "run against real shared memory",
}
_NEEDS = {"mooncake": ("mooncake", "install a package of Mooncake: docs/mooncake.md")}


def _storage() -> list[Finding]:
    group, found = "Storage backends", []
    for scheme in schemes():
        name = f"{scheme}://"
        try:
            backend_class(scheme)
        except StorageError as error:
            found.append(Finding(group, name, "missing", "can not be used", str(error)))
            continue
        needs, advice = _NEEDS.get(scheme, ("", ""))
        run_against = _RUN_AGAINST.get(scheme, "comes from another package, or is named by the URL")
        if needs and importlib.util.find_spec(needs) is None:
            found.append(Finding(group, name, "missing", f"can not be used; {run_against}", advice))
        else:
            found.append(Finding(group, name, "ok", f"can be used; {run_against}"))
    return found


_LOOKS: tuple[Callable[[], list[Finding]], ...] = (_packages, _gpu, _limits, _storage)
