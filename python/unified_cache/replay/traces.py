"""Reading traces: one JSON object a line, one line a request.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` is in milliseconds, lengths are in tokens. `hash_ids` name the blocks of the prompt, the last one
of which may be partial; an id stands for a block and all that is before it. Files may be compressed with
gzip, xz or (from Python 3.14 on) Zstandard: what a file is shows in its first bytes, not in its name.
"""

from __future__ import annotations

import gzip
import importlib
import json
import lzma
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from os import PathLike, fspath
from typing import Any

import numpy as np
import numpy.typing as npt

from unified_cache.errors import TraceError

__all__ = ["Trace", "read_trace"]

BLOCK_SIZE = 512
MAX_LENGTH = 2**32 - 1
MAX_ID = 2**64 - 1
MAX_TIMESTAMP = 1e18

_MAGIC_GZIP = b"\x1f\x8b"
_MAGIC_XZ = b"\xfd7zXZ\x00"
_MAGIC_ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their file."""

    source: str
    """Where they come from."""
    block_size: int
    """Tokens in a block."""
    timestamps: npt.NDArray[np.float64]
    """When each request came, in milliseconds."""
    input_lengths: npt.NDArray[np.uint32]
    """Prompt tokens of each request."""
    output_lengths: npt.NDArray[np.uint32]
    """Tokens of each answer."""
    block_counts: npt.NDArray[np.uint32]
    """Blocks of each prompt."""
    hash_ids: npt.NDArray[np.uint64]
    """The blocks of all prompts, one prompt after the other."""
    bad_lines: int = 0
    """Lines that were left out."""
    backward: int = 0
    """Requests that came earlier than the one before them."""

    def __len__(self) -> int:
        return len(self.input_lengths)

    @classmethod
    def of(cls, requests: Iterable[tuple[Sequence[int], int]], block_size: int = BLOCK_SIZE) -> Trace:
        """A trace from (hash_ids, input_length) pairs, for experiments."""
        lines = (
            json.dumps({"timestamp": 0, "input_length": length, "output_length": 0, "hash_ids": list(ids)})
            for ids, length in requests
        )
        return _collect("<requests>", (line.encode() for line in lines), block_size, skip_bad=False)


def read_trace(path: str | PathLike[str], *, block_size: int = BLOCK_SIZE, skip_bad: bool = False) -> Trace:
    """The requests of a file.

    Args:
        path: the file; plain, or compressed with gzip, xz or Zstandard.
        block_size: tokens in a block of this trace.
        skip_bad: leave broken lines out and count them, instead of stopping at the first.

    Raises:
        TraceError: a broken line (named by number), a damaged file, a file without any request.
        OSError: the file can not be opened.
    """
    source = fspath(path)
    with open(source, "rb") as file:
        return _collect(source, _lines(source, file), block_size, skip_bad=skip_bad)


def _lines(source: str, file: BufferedReader) -> Iterator[bytes]:
    try:
        yield from _unpacked(source, file)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(source, None, f"the compressed file is damaged: {error}") from error


def _unpacked(source: str, file: BufferedReader) -> Iterable[bytes]:
    magic = file.peek(6)
    if magic.startswith(_MAGIC_GZIP):
        return gzip.GzipFile(fileobj=file)
    if magic.startswith(_MAGIC_XZ):
        return lzma.LZMAFile(file)
    if magic.startswith(_MAGIC_ZSTD):
        try:
            zstd: Any = importlib.import_module("compression.zstd")
        except ImportError:
            reason = "Zstandard needs Python 3.14 or newer: unpack it first (zstd -d)"
            raise TraceError(source, None, reason) from None
        unpacked: Iterable[bytes] = zstd.ZstdFile(file)
        return unpacked
    return file


def _collect(source: str, lines: Iterable[bytes], block_size: int, *, skip_bad: bool) -> Trace:
    timestamps, lengths, outputs = array("d"), array("Q"), array("Q")
    counts, ids = array("Q"), array("Q")
    bad = backward = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            timestamp, length, output, blocks = _request(line, block_size)
        except ValueError as error:
            if not skip_bad:
                raise TraceError(source, number, str(error)) from None
            bad += 1
            continue
        backward += bool(timestamps) and timestamp < timestamps[-1]
        timestamps.append(timestamp)
        lengths.append(length)
        outputs.append(output)
        counts.append(len(blocks))
        ids.extend(blocks)
    if not timestamps:
        raise TraceError(source, None, "holds no request" + (f", {bad} broken lines" if bad else ""))
    return Trace(
        source,
        block_size,
        np.array(timestamps, np.float64),
        np.array(lengths, np.uint32),
        np.array(outputs, np.uint32),
        np.array(counts, np.uint32),
        np.array(ids, np.uint64),
        bad,
        backward,
    )


def _request(line: bytes, block_size: int) -> tuple[float, int, int, list[int]]:
    """The fields of one line; a ValueError says what is wrong with it."""
    try:
        request = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("is not a request: JSON nested too deeply") from None
    if not isinstance(request, dict):
        raise ValueError(f"is not a JSON object but {_show(request)}")
    missing = [
        name for name in ("timestamp", "input_length", "output_length", "hash_ids") if name not in request
    ]
    if missing:
        raise ValueError(f"has no {missing[0]}")
    timestamp = request["timestamp"]
    if type(timestamp) not in (int, float) or not 0 <= timestamp <= MAX_TIMESTAMP:
        raise ValueError(f"timestamp is {_show(timestamp)}, needed are milliseconds, 0 to {MAX_TIMESTAMP:g}")
    length = _whole("input_length", request["input_length"], 1, MAX_LENGTH)
    output = _whole("output_length", request["output_length"], 0, MAX_LENGTH)
    blocks = request["hash_ids"]
    if type(blocks) is not list:
        raise ValueError(f"hash_ids is {_show(blocks)}, a list is needed")
    wanted = -(-length // block_size)
    if len(blocks) != wanted:
        raise ValueError(
            f"hash_ids has {len(blocks)} entries, {length} tokens make {wanted} blocks of {block_size}"
        )
    if not all(type(block) is int and 0 <= block <= MAX_ID for block in blocks):
        for at, block in enumerate(blocks):
            _whole(f"hash_ids[{at}]", block, 0, MAX_ID)
    return float(timestamp), length, output, blocks


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} is {_show(value)}, a whole number is needed")
    if not low <= value <= high:
        raise ValueError(f"{name} is {_show(value)}, allowed is {low} to {high}")
    return value


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
