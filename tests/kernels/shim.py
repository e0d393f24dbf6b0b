"""The kernel's source compiled as C++ and run on this machine's CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from unified_cache.copies import kernel_source

SHIM = Path(__file__).parents[2] / "kernels" / "shim"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")


def build(folder: Path, *options: str) -> Path:
    """Compile the shim; skips the test, with its reason, where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++) on this machine")
    target = folder / "copy_pages_on_cpu.so"
    command = [compiler, "-std=c++17", *WARNINGS, "-shared", "-fPIC", *options]
    subprocess.run([*command, str(SHIM / "run_copy_pages.cpp"), "-o", str(target)], check=True)
    return target


class Shim:
    """Launches of the kernel, whole or in slices."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._launch = loaded.shim_launch
        self._launch.restype = ctypes.c_longlong
        self._launch.argtypes = [
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_ulonglong,
            ctypes.c_ulonglong,
            ctypes.c_ulonglong,
        ]
        loaded.shim_argument_bytes.restype = ctypes.c_size_t
        assert loaded.shim_argument_bytes() == kernel_source.ARGUMENT.itemsize

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        argument: np.ndarray,
        *,
        order: int = 0,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        """Run threads `begin` to `end`, in an order (see the shim); any misaligned access fails."""
        assert argument.dtype == kernel_source.ARGUMENT
        assert argument.shape == ()
        end = blocks * threads if end is None else end
        data = argument.ctypes.data
        misaligned = self._launch(kernel.encode(), data, blocks, threads, order, begin, end)
        assert misaligned >= 0, f"no kernel {kernel}"
        assert misaligned == 0, f"{kernel}: {misaligned} misaligned accesses"


@cache
def shim() -> Shim:
    """One build for all tests of a process."""
    with tempfile.TemporaryDirectory() as folder:
        return Shim(build(Path(folder), "-O1"))
