"""The kernel compiles for every architecture that is meant, and into what its author had in mind."""

from __future__ import annotations

import re
import struct
from functools import cache
from pathlib import Path

import pytest

from unified_cache.copies.kernel_source import MAX_THREADS, OPTIONS, kernel_names, kernel_source

nvrtc = pytest.importorskip(
    "cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install cuda-bindings nvidia-cuda-nvrtc"
)

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
CUPY_ADDS = ("--device-as-default-execution-space",)
REGISTERS = 65536 // MAX_THREADS  # a thread, for a block of that size to fit on a multiprocessor


def test_the_source_that_ships_is_the_one_in_kernels() -> None:
    root = Path(__file__).parents[2]
    assert kernel_source() == (root / "kernels" / "copy_pages.cu").read_text(encoding="utf-8")


def checked(result: tuple) -> object:
    status, *values = result
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    return values[0] if values else None


@cache
def compiled(architecture: str) -> tuple[str, bytes]:
    """PTX and machine code, with the options of the run time."""
    program = checked(nvrtc.nvrtcCreateProgram(kernel_source().encode(), b"copy_pages.cu", 0, None, None))
    options = [option.encode() for option in (*OPTIONS, *CUPY_ADDS, f"-arch={architecture}")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    # It is written into. One byte alone would be the one object that Python has for all such bytes.
    log = b" " * (checked(nvrtc.nvrtcGetProgramLogSize(program)) + 1)
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert not log.strip(b" \n\0"), f"warnings: {log.decode()}"
    ptx = b" " * checked(nvrtc.nvrtcGetPTXSize(program))
    checked(nvrtc.nvrtcGetPTX(program, ptx))
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return ptx.rstrip(b"\0").decode(), cubin


def entries(ptx: str) -> dict[str, str]:
    found = re.findall(r"\.entry (\w+)\((.*?)^}", ptx, re.DOTALL | re.MULTILINE)
    return dict(found)


def resources(cubin: bytes) -> dict[str, dict[str, int]]:
    """Registers a thread and bytes of stack of each kernel, from the ELF file's notes to the driver."""
    sections_at, _, _, _, _, size, count, names_index = struct.unpack_from("<QIHHHHHH", cubin, 40)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections_at + i * size) for i in range(count)]

    def text(table: tuple, at: int) -> str:
        begin = table[4] + at
        return cubin[begin : cubin.index(b"\0", begin)].decode()

    named = {text(sections[names_index], section[0]): section for section in sections}
    symbols = named[".symtab"]
    strings = sections[symbols[6]]

    def symbol(index: int) -> str:
        return text(strings, struct.unpack_from("<I", cubin, symbols[4] + index * symbols[9])[0])

    found: dict[str, dict[str, int]] = {}
    at, end = named[".nv.info"][4], named[".nv.info"][4] + named[".nv.info"][5]
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != 4:  # the value is in the length's place
            continue
        if attribute in (0x2F, 0x11):
            index, value = struct.unpack_from("<II", cubin, at)
            found.setdefault(symbol(index), {})["registers" if attribute == 0x2F else "stack"] = value
        at += length
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_entries_and_forbidden_instructions(architecture: str) -> None:
    ptx, _ = compiled(architecture)
    assert f".target {architecture}" in ptx
    assert sorted(entries(ptx)) == sorted(kernel_names())
    for word in ("bar.", "barrier", "shfl", ".shared", ".local", "atom.", "red.", "vote", "call"):
        assert word not in ptx, word
    assert not re.search(r"(div|rem)\.[us]64", ptx)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width, kind", [(16, "v4.u32"), (8, "v2.u32"), (4, "u32"), (2, "u16"), (1, "u8")])
def test_loads_pass_by_l1_and_stores_stream(architecture: str, width: int, kind: str) -> None:
    ptx, _ = compiled(architecture)
    for parts in (1, 2):
        body = entries(ptx)[f"copy_pages_w{width}_p{parts}"]
        kinds = re.findall(r"(ld\.global\.nc\.L1::no_allocate|st\.global\.cs)\.([\w.]+)", body)
        # Four vectors in flight: all loads of a round come before its first store.
        assert kinds == [("ld.global.nc.L1::no_allocate", kind)] * 4 + [("st.global.cs", kind)] * 4
        assert not re.search(r"\bst\.(?!global\.cs)", body)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_suffice(architecture: str) -> None:
    found = resources(compiled(architecture)[1])
    assert sorted(found) == sorted(kernel_names())
    for name, use in found.items():
        assert 0 < use["registers"] <= REGISTERS, name
        assert use["stack"] == 0, name
