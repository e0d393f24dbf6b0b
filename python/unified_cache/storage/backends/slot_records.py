"""What is stored of an object beside its body: one record of 512 bytes for each slot, checksummed as a whole.

A record is written over in one piece when its slot is. One that was torn does not fit its checksum and counts
as no record, so the table needs neither a log nor a snapshot: it is the log, with the past left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unified_cache._native import read_slot_table
from unified_cache.errors import ArgumentError

__all__ = [
    "HEADER_BYTES",
    "KEY_BYTES",
    "NATIVE_SUMS",
    "RECORD",
    "RECORD_BYTES",
    "checksums",
    "hashes_of",
    "key_words",
    "keys_of",
    "pack_digests",
    "pack_keys",
    "read_table",
]

KEY_BYTES = 152  # 150 and zeros
HEADER_BYTES = 320  # an object's header may have at most as many
RECORD_BYTES = 512
RECORD = np.dtype(
    [
        ("check", "<u8"),  # of everything below; 0: there is no record
        ("slot", "<u8"),  # so that one that got into another place does not count
        ("body", "<u8"),  # bytes
        ("header", "<u4"),  # bytes
        ("reserved", "<u4", (3,)),
        ("key", "<u8", (KEY_BYTES // 8,)),
        ("head", "u1", (HEADER_BYTES,)),
    ]
)
assert RECORD.itemsize == RECORD_BYTES

U64 = npt.NDArray[np.uint64]


def _weights(count: int) -> U64:
    """Odd numbers that look random, the same ones for ever (splitmix64): they are part of the format."""
    state, weights = 0x75636163686531, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = state
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        weights.append(mixed ^ mixed >> 31 | 1)
    return np.array(weights, np.uint64)


_CHECK_WEIGHTS = _weights(RECORD_BYTES // 8 - 1)
_HASH_WEIGHTS = _CHECK_WEIGHTS[: KEY_BYTES // 8]
_CHECK_START = np.uint64(0x7563736C6F7473)
_SHIFT = np.uint64(32)
_MIX = np.uint64(0x94D049BB133111EB)
# How checksums and hashes are made, as the native module takes it.
NATIVE_SUMS = _CHECK_WEIGHTS.tolist(), int(_CHECK_START), int(_MIX)


def read_table(
    records: npt.NDArray[np.void], slot_bytes: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Of the records that are whole, in order: their slots, the hashes of their keys, their bytes in all.

    What `checksums` and `hashes_of` come to, at the speed of memory: there may be millions.
    """
    return read_slot_table(records.data, *NATIVE_SUMS, slot_bytes)


def _sums(words: U64, weights: U64) -> U64:
    """For each row a sum that any single changed word changes, and others but for 1 in 2^32 or fewer."""
    mixed = words >> _SHIFT
    mixed ^= words
    mixed *= weights
    sums: U64 = mixed.sum(axis=1, dtype=np.uint64)
    return sums


def checksums(records: npt.NDArray[np.void]) -> U64:
    """What the field `check` of contiguous records has to be; never 0."""
    words = records.view(np.uint64).reshape(len(records), RECORD_BYTES // 8)
    sums = _sums(words[:, 1:], _CHECK_WEIGHTS) + _CHECK_START
    sums[sums == 0] = 1
    return sums


def pack_keys(keys: Sequence[str]) -> U64:
    """uint64 (keys, 19): ASCII, with zeros behind.

    Raises:
        ArgumentError: a key has more than 152 bytes, or others than ASCII.
    """
    try:
        parts = [key.encode("ascii").ljust(KEY_BYTES, b"\0") for key in keys]
    except UnicodeEncodeError as error:
        raise ArgumentError(f"keys must be ASCII, not {error.object!r}") from None
    packed = b"".join(parts)
    if len(packed) != KEY_BYTES * len(keys):
        longest = max(keys, key=len)
        raise ArgumentError(f"keys must have at most 150 characters, not {len(longest)}: {longest}")
    return np.frombuffer(packed, np.uint64).reshape(len(keys), KEY_BYTES // 8)


def pack_digests(digests: npt.NDArray[np.uint8], ending: str) -> U64:
    """`pack_keys` of digests, uint8 (keys, 32), in hex, and one ending."""
    packed = np.zeros((len(digests), KEY_BYTES), np.uint8)
    packed[:, :64] = np.frombuffer(digests.tobytes().hex().encode(), np.uint8).reshape(-1, 64)
    packed[:, 64 : 64 + len(ending)] = np.frombuffer(ending.encode("ascii"), np.uint8)
    return packed.view(np.uint64)


def hashes_of(packed: U64) -> U64:
    """uint64 (keys,) of `pack_keys`."""
    hashes = _sums(packed, _HASH_WEIGHTS)
    hashes ^= hashes >> _SHIFT
    hashes *= _MIX
    hashes ^= hashes >> _SHIFT
    return hashes


def key_words(records: npt.NDArray[np.void]) -> U64:
    """uint64 (records, 19), their keys."""
    words: U64 = np.ascontiguousarray(records["key"])
    return words


def keys_of(packed: U64) -> list[str]:
    """`pack_keys`, back."""
    return [row.tobytes().rstrip(b"\0").decode("ascii", "replace") for row in packed]
