"""An environment of its own for vLLM and SGLang, made once and kept.

It holds the packages of ``requirements-engines.txt`` and takes torch, and what torch brings, from the
environment that runs the tests: gigabytes that need not be there twice. So both need the same torch.

``UNIFIED_CACHE_ENGINES`` names the folder where it is kept (default: ``~/.cache/unified-cache/engines``);
``UNIFIED_CACHE_ENGINE_PYTHON`` the Python of an environment that is there already.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import unified_cache

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
REQUIREMENTS = HERE / "requirements-engines.txt"

# What pip and the resolver say where there is no network.
_NO_NETWORK = (
    "ConnectionError",
    "NewConnectionError",
    "ConnectTimeoutError",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "No route to host",
    "Could not fetch URL",
    "Read timed out",
    "No matching distribution found",
)


@cache
def engine_python() -> Path:
    """The Python of the environment; made if it is not there. Skips the test without a network."""
    given = os.environ.get("UNIFIED_CACHE_ENGINE_PYTHON")
    if given:
        return Path(given)
    torch_folder = Path(str(metadata.distribution("torch").locate_file("")))
    told = f"{REQUIREMENTS.read_text()}{sys.version}{torch_folder}{metadata.version('torch')}"
    base = Path(os.environ.get("UNIFIED_CACHE_ENGINES", Path.home() / ".cache/unified-cache/engines"))
    folder = base / hashlib.sha256(told.encode()).hexdigest()[:16]
    base.mkdir(parents=True, exist_ok=True)
    with open(base / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _make(folder, torch_folder)
    return folder / "bin" / "python"


def _make(folder: Path, torch_folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    # Every version is pinned and every package listed, so there is nothing to resolve.
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet"]
    done = subprocess.run([*command, "-r", REQUIREMENTS], capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        if any(sign in done.stderr for sign in _NO_NETWORK):
            pytest.skip(f"the engines can not be installed without a network: {done.stderr.strip()[-300:]}")
        raise RuntimeError(f"the engines can not be installed: {done.stderr}")
    packages = next(folder.glob("lib/python*/site-packages"))
    # Behind the environment's own packages: these win.
    (packages / "torch_of_the_tests.pth").write_text(f"{torch_folder}\n")
    (folder / "complete").touch()


def install_package(folder: Path, sglang_hooks: dict[str, str] | None = None) -> None:
    """Put into a folder, for PYTHONPATH, what pip would install: this package and its entry points.

    Args:
        folder: an empty one.
        sglang_hooks: ``sglang.srt.plugins`` that only tests have, ``{name: "module:function"}``.
    """
    groups = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    _write_distribution(folder, "unified_cache", groups)
    if sglang_hooks:
        _write_distribution(folder, "unified_cache_tests", {"sglang.srt.plugins": sglang_hooks})
    # The package that the tests run, wherever it lies, and nothing else from there.
    (folder / "unified_cache").symlink_to(Path(unified_cache.__file__).parent)


def vllm_variables(package: Path | None = None) -> dict[str, str]:
    """Of a process that runs vLLM.

    Args:
        package: of `install_package`; None: the process does not use unified_cache.
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


def _write_distribution(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    about = folder / f"{name}-{unified_cache.__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {unified_cache.__version__}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{point} = {where}\n" for point, where in points.items())
        for group, points in groups.items()
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))
