"""What a stored object looks like: a header that makes damage and mix-ups visible, then the page's bytes.

The header has `HEADER_BYTES` bytes, little-endian:

======  =====  ==================================================================
offset  bytes  what
======  =====  ==================================================================
0       4      magic, ``UCPG``
4       2      version of this format, 2
6       2      bytes of the header
8       1      kind of the checksum: 1, XXH3 with 64 bits and seed 0
9       1      codec of the body, see `unified_cache.storage.compression`
10      6      zeros
16      8      bytes of the body as it is stored
24      8      bytes of the page: of the body once it is decompressed
32      152    key, padded with zeros
184     8      checksum of everything before it, and of the body as it is stored
======  =====  ==================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache._native import check_object_headers, write_object_headers
from unified_cache.storage.checksums import Checksums
from unified_cache.storage.contract import PageStatus

__all__ = [
    "HEADER_BYTES",
    "MOST_KEY_BYTES",
    "VERSION",
    "CheckedObject",
    "check_objects",
    "checksums_of",
    "page_bytes_of",
    "write_headers",
]

VERSION = 2
HEADER_BYTES = 192
MOST_KEY_BYTES = 150
_MAGIC = b"UCPG"
_XXH3 = 1
_HEADER = np.dtype(
    {
        "names": ["magic", "version", "header", "sum_kind", "codec", "stored", "page", "key", "sum"],
        "formats": ["S4", "<u2", "<u2", "u1", "u1", "<u8", "<u8", "S152", "<u8"],
        "offsets": [0, 4, 6, 8, 9, 16, 24, 32, 184],
        "itemsize": HEADER_BYTES,
    }
)
_COVERED = 184  # bytes at the front of the header that the checksum covers

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CheckedObject:
    """What an object that was read turned out to be.

    Attributes:
        status: HIT; MISS if it is of a version, checksum or codec that this code does not know; CORRUPT if
            it is not the object that was asked for.
        codec: of its body, if it is a HIT.
        reason: what is wrong, in words; "" for a HIT.
    """

    status: PageStatus
    codec: int = 0
    reason: str = ""


_HITS = tuple(CheckedObject(PageStatus.HIT, codec) for codec in range(256))


def write_headers(
    headers: _Bytes,
    keys: Sequence[str],
    stored_sizes: Sequence[int],
    page_bytes: int,
    codecs: Sequence[int],
) -> Checksums:
    """Fill in the headers of objects, but for their checksums, whose place is that of what is returned.

    Args:
        headers: uint8 (objects, `HEADER_BYTES`), written.
        keys: 1 to `MOST_KEY_BYTES` ASCII characters each.
        stored_sizes: bytes of each body as it is to be stored.
        page_bytes: bytes of each page.
        codecs: of each body.

    Raises:
        ArgumentError: a key that can not be. Nothing was written.
    """
    # Native code makes and checks the headers of a batch: in Python that took as long as a small page does.
    write_object_headers(headers.data, keys, stored_sizes, page_bytes, codecs)
    return Checksums(headers, _COVERED, headers.view(_HEADER).reshape(-1)["sum"])


def checksums_of(headers: _Bytes) -> Checksums:
    """Checksums of objects that are about to be read; not one is made yet."""
    return Checksums(headers, _COVERED, np.zeros(len(headers), np.uint64))


def check_objects(
    headers: _Bytes,
    keys: Sequence[str],
    bodies: Sequence[memoryview],
    stored_sizes: Sequence[int],
    page_bytes: int,
    codecs: Sequence[int],
    checksums: Checksums | None = None,
) -> list[CheckedObject]:
    """What was read under these keys: nothing of an object that is no HIT may be used.

    Args:
        headers: uint8 (objects, `HEADER_BYTES`).
        keys: that were asked for.
        bodies: as they were read.
        stored_sizes: bytes of each that were read.
        page_bytes: bytes that each page must have.
        codecs: that this process can read.
        checksums: of these headers, some of them made while they were read; what was not is made here.
    """
    if checksums is None:
        checksums = checksums_of(headers)
    if not checksums.values.all():
        missing = np.flatnonzero(checksums.values == 0).tolist()
        checksums.make(missing, [bodies[at][: stored_sizes[at]] for at in missing])
    found = check_object_headers(headers.data, keys, stored_sizes, page_bytes, checksums.values.data)
    if found and found[0] in codecs and found.count(found[0]) == len(found):
        return [_HITS[found[0]]] * len(found)
    rows = headers.view(_HEADER).reshape(-1)
    return [
        _HITS[codec]
        if codec in codecs
        else _look_at(rows[at], checksum, keys[at], stored_sizes[at], page_bytes, codecs)
        for at, (codec, checksum) in enumerate(zip(found, checksums.values.tolist(), strict=True))
    ]


def _look_at(
    row: np.void, checksum: int, key: str, stored_size: int, page_bytes: int, codecs: Sequence[int]
) -> CheckedObject:
    """What one object turned out to be; its checksum as it has to be."""
    magic, version, header, kind, codec, stored, page, name, found = row.item()
    if magic != _MAGIC:
        return CheckedObject(PageStatus.CORRUPT, reason=f"magic {magic!r}")
    if version != VERSION:
        return CheckedObject(PageStatus.MISS, reason=f"version {version}")
    if kind != _XXH3:
        return CheckedObject(PageStatus.MISS, reason=f"checksum of kind {kind}")
    if found != checksum:
        return CheckedObject(PageStatus.CORRUPT, reason="checksum")
    if header != HEADER_BYTES or stored != stored_size or page != page_bytes:
        sizes = f"{header} + {stored} bytes for a page of {page}"
        return CheckedObject(PageStatus.CORRUPT, reason=sizes)
    if name != key.encode():
        return CheckedObject(PageStatus.CORRUPT, reason=f"an object of another key, {name!r}")
    if codec not in codecs:
        return CheckedObject(PageStatus.MISS, reason=f"codec {codec}")
    return CheckedObject(PageStatus.HIT, codec)


def page_bytes_of(headers: _Bytes) -> list[int]:
    """Bytes of the pages that these headers speak of; of what is no header, any number."""
    sizes: list[int] = headers.view(_HEADER).reshape(-1)["page"].tolist()
    return sizes
