"""What the commands share that run a model."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from unified_cache.errors import ArgumentError, MissingDependencyError

__all__ = ["check_number", "check_seed", "choose_device", "require_packages"]


def check_number(option: str, value: int, least: int) -> None:
    """Refuse a number that is too small."""
    if value < least:
        raise ArgumentError(f"{option} must be an integer >= {least}, not {value}")


def check_seed(seed: int) -> None:
    """Refuse what torch takes for no seed."""
    if not 0 <= seed < 2**63:
        raise ArgumentError(f"--seed must be an integer in 0..{2**63 - 1}, not {seed}")


def require_packages(command: str, packages: Sequence[str]) -> None:
    """Load packages of the extra `demo`; one that is missing is an error that says so.

    Args:
        command: who needs them, for the message.
        packages: that it needs.
    """
    # Read when torch is loaded. Threads that spin while they wait hold up the cache's own, and on a machine
    # that has other work to do they make every forward many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependencyError(
                f"{command} needs {package}, which can not be imported ({error}): "
                "pip install 'unified-cache[demo]'"
            ) from None


def choose_device(asked: str | None) -> str:
    """The device that was asked for with `--device`, if it is there; else the best one."""
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
