"""Reading traces: every kind of file, and every kind of broken line named by file, number and reason."""

import gzip
import json
import lzma
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unified_cache import TraceError, UnifiedCacheError
from unified_cache.replay import Trace, read_trace

CONVERSATION = Path(__file__).parent / "data" / "conversation_trace.jsonl.xz"


def line(**changes: Any) -> str:
    request = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]} | changes
    return json.dumps({name: value for name, value in request.items() if value is not ...})


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(part if isinstance(part, bytes) else part.encode() for part in lines))
    return path


def test_a_trace_is_arrays(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        line(),
        "",
        line(timestamp=4.5, input_length=512, hash_ids=[2**64 - 1], other="kept out"),
    )
    trace = read_trace(path)
    assert (len(trace), trace.source, trace.block_size) == (2, str(path), 512)
    assert trace.timestamps.tolist() == [5, 4.5]
    assert trace.input_lengths.tolist() == [600, 512]
    assert trace.output_lengths.tolist() == [7, 7]
    assert trace.block_counts.tolist() == [2, 1]
    assert trace.hash_ids.tolist() == [3, 4, 2**64 - 1]
    assert (trace.bad_lines, trace.backward) == (0, 1)


def test_the_conversation_trace_is_what_its_page_says() -> None:
    trace = read_trace(CONVERSATION)
    assert (len(trace), len(trace.hash_ids), len(np.unique(trace.hash_ids))) == (12_031, 288_500, 182_790)
    assert int(trace.input_lengths.sum(dtype=np.int64)) == 144_793_823
    assert (trace.bad_lines, trace.backward) == (0, 0)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_compressed_files_are_known_by_their_content(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "trace.data"
    path.write_bytes(pack(f"{line()}\n{line(hash_ids=[3, 9])}\n".encode()))
    assert read_trace(path).hash_ids.tolist() == [3, 4, 3, 9]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_damaged_file_is_an_error_that_skipping_does_not_hide(tmp_path: Path, pack: Any) -> None:
    packed = pack("\n".join(line(timestamp=i, hash_ids=[i, 7 * i]) for i in range(999)).encode())
    path = tmp_path / "trace"
    for damaged in (packed[: len(packed) // 2], packed[:200] + b"\x55" * 60 + packed[260:]):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match="the compressed file is damaged") as caught:
            read_trace(path, skip_bad=True)
        assert (caught.value.source, caught.value.line) == (str(path), None)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python reads Zstandard from 3.14 on")
def test_zstandard_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.zst", b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(TraceError, match="unpack it first"):
        read_trace(path)


BROKEN = [
    (b"{", "is not JSON: Expecting property name"),
    (b'{"timestamp": 5', "is not JSON: Expecting ',' delimiter"),
    (b'{"timestamp": "\xff"}', "is not UTF-8: byte 16 is 0xff"),
    (b"\x00\x01", "is not JSON"),
    (b"[" * 100_000, "is not a request: JSON nested too deeply"),
    (b"[1, 2]", "is not a JSON object but [1, 2]"),
    (b"null", "is not a JSON object but null"),
    (line(timestamp=...), "has no timestamp"),
    (line(input_length=...), "has no input_length"),
    (line(output_length=...), "has no output_length"),
    (line(hash_ids=...), "has no hash_ids"),
    (line(timestamp="5"), 'timestamp is "5", needed are milliseconds'),
    (line(timestamp=-1), "timestamp is -1"),
    (line(timestamp=True), "timestamp is true"),
    (
        line(timestamp=10**400),
        "timestamp is 1000000000000000000000000000000000000..., needed are milliseconds",
    ),
    (line(timestamp=1.1e18), "timestamp is 1.1e+18, needed are milliseconds, 0 to 1e+18"),
    (line(timestamp=float("nan")), "timestamp is NaN"),
    (line(timestamp=float("inf")), "timestamp is Infinity"),
    (line(input_length=0, hash_ids=[]), "input_length is 0, allowed is 1 to 4294967295"),
    (line(input_length=2**32), "input_length is 4294967296, allowed"),
    (line(input_length=600.0), "input_length is 600.0, a whole number is needed"),
    (line(output_length=-1), "output_length is -1, allowed is 0"),
    (line(output_length=None), "output_length is null, a whole number"),
    (line(hash_ids="34"), 'hash_ids is "34", a list is needed'),
    (line(hash_ids=[3]), "hash_ids has 1 entries, 600 tokens make 2 blocks of 512"),
    (line(hash_ids=[3, 4, 5]), "hash_ids has 3 entries, 600 tokens make 2 blocks of 512"),
    (line(hash_ids=[3, "4"]), 'hash_ids[1] is "4", a whole number is needed'),
    (line(hash_ids=[3, True]), "hash_ids[1] is true, a whole number is needed"),
    (line(hash_ids=[-3, 4]), "hash_ids[0] is -3, allowed is 0"),
    (line(hash_ids=[3, 2**64]), "hash_ids[1] is 18446744073709551616, allowed"),
]


@pytest.mark.parametrize("broken, reason", BROKEN, ids=[reason for _, reason in BROKEN])
def test_a_broken_line_is_named_by_file_number_and_reason(
    tmp_path: Path, broken: str | bytes, reason: str
) -> None:
    path = write(tmp_path / "t.jsonl", line(), "", broken, line())
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    error = caught.value
    assert isinstance(error, UnifiedCacheError)
    assert isinstance(error, ValueError)
    assert (error.source, error.line) == (str(path), 3)
    assert error.reason.startswith(reason)
    assert str(error) == f"{path}, line 3: {error.reason}"
    assert "\n" not in str(error)
    assert len(error.reason) < 200
    assert str(pickle.loads(pickle.dumps(error))) == str(error)

    trace = read_trace(path, skip_bad=True)
    assert (len(trace), trace.bad_lines) == (2, 1)


def test_numbers_that_python_refuses_to_read_are_a_broken_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", '{"timestamp": ' + "9" * 5000 + "}")
    with pytest.raises(TraceError, match="line 1: "):
        read_trace(path)


@pytest.mark.parametrize(
    "lines, told", [([], "holds no request"), (["{"], "holds no request, 1 broken lines")]
)
def test_a_file_without_requests_is_an_error(tmp_path: Path, lines: list[str], told: str) -> None:
    path = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(TraceError) as caught:
        read_trace(path, skip_bad=True)
    assert str(caught.value) == f"{path}: {told}"


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(IsADirectoryError):
        read_trace(tmp_path)


def test_other_block_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(input_length=33, hash_ids=[1, 2, 3]))
    assert read_trace(path, block_size=16).block_counts.tolist() == [3]
    with pytest.raises(TraceError, match="33 tokens make 1 blocks of 512"):
        read_trace(path)


def test_traces_can_be_made_of_lists() -> None:
    trace = Trace.of([([1, 2], 7), ([1], 4)], block_size=4)
    assert (trace.block_counts.tolist(), trace.hash_ids.tolist()) == ([2, 1], [1, 2, 1])
    with pytest.raises(TraceError, match="line 2: hash_ids has 1 entries"):
        Trace.of([([1, 2], 7), ([1], 5)], block_size=4)
