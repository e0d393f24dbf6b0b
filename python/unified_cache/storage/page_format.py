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

from unified_cache._native import object_checksums
from unified_cache.storage.contract import PageStatus

__all__ = [
    "HEADER_BYTES",
    "MOST_KEY_BYTES",
    "VERSION",
    "CheckedObject",
    "check_objects",
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


def write_headers(
    headers: _Bytes,
    keys: Sequence[str],
    bodies: Sequence[memoryview],
    stored_sizes: Sequence[int],
    page_bytes: int,
    codecs: Sequence[int],
) -> None:
    """Fill in the headers of objects.

    Args:
        headers: uint8 (objects, `HEADER_BYTES`), written.
        keys: at most `MOST_KEY_BYTES` ASCII characters each.
        bodies: as they are to be stored.
        stored_sizes: bytes of each that are.
        page_bytes: bytes of each page.
        codecs: of each body.
    """
    rows = headers.view(_HEADER).reshape(-1)
    headers[:] = 0
    rows["magic"] = _MAGIC
    rows["version"] = VERSION
    rows["header"] = HEADER_BYTES
    rows["sum_kind"] = _XXH3
    rows["codec"] = codecs
    rows["stored"] = stored_sizes
    rows["page"] = page_bytes
    names = [_name(key) for key in keys]
    rows["key"] = names
    rows["sum"] = np.array(object_checksums(headers.data, _COVERED, bodies, stored_sizes), np.uint64)


def check_objects(
    headers: _Bytes,
    keys: Sequence[str],
    bodies: Sequence[memoryview],
    stored_sizes: Sequence[int],
    page_bytes: int,
    codecs: Sequence[int],
) -> list[CheckedObject]:
    """What was read under these keys: nothing of an object that is no HIT may be used.

    Args:
        headers: uint8 (objects, `HEADER_BYTES`).
        keys: that were asked for.
        bodies: as they were read.
        stored_sizes: bytes of each that were read.
        page_bytes: bytes that each page must have.
        codecs: that this process can read.
    """
    sums = object_checksums(headers.data, _COVERED, bodies, stored_sizes)
    rows = headers.view(_HEADER).reshape(-1)
    versions, kinds, found = rows["version"].tolist(), rows["sum_kind"].tolist(), rows["codec"].tolist()
    # Of sound objects all these agree: then nothing has to be looked at one by one.
    fields = zip(
        rows["magic"].tolist(),
        rows["header"].tolist(),
        rows["stored"].tolist(),
        rows["page"].tolist(),
        rows["key"].tolist(),
        rows["sum"].tolist(),
        strict=True,
    )
    checked = []
    for at, (magic, header, stored, page, name, checksum) in enumerate(fields):
        version, kind, codec = versions[at], kinds[at], found[at]
        if magic != _MAGIC:
            checked.append(CheckedObject(PageStatus.CORRUPT, reason=f"magic {magic!r}"))
        elif version != VERSION:
            checked.append(CheckedObject(PageStatus.MISS, reason=f"version {version}"))
        elif kind != _XXH3:
            checked.append(CheckedObject(PageStatus.MISS, reason=f"checksum of kind {kind}"))
        elif checksum != sums[at]:
            checked.append(CheckedObject(PageStatus.CORRUPT, reason="checksum"))
        elif header != HEADER_BYTES or stored != stored_sizes[at] or page != page_bytes:
            sizes = f"{header} + {stored} bytes for a page of {page}"
            checked.append(CheckedObject(PageStatus.CORRUPT, reason=sizes))
        elif name != _name(keys[at]):
            checked.append(CheckedObject(PageStatus.CORRUPT, reason=f"an object of another key, {name!r}"))
        elif codec not in codecs:
            checked.append(CheckedObject(PageStatus.MISS, reason=f"codec {codec}"))
        else:
            checked.append(CheckedObject(PageStatus.HIT, codec))
    return checked


def page_bytes_of(headers: _Bytes) -> list[int]:
    """Bytes of the pages that these headers speak of; of what is no header, any number."""
    sizes: list[int] = headers.view(_HEADER).reshape(-1)["page"].tolist()
    return sizes


def _name(key: str) -> bytes:
    name = key.encode("ascii")
    if not 0 < len(name) <= MOST_KEY_BYTES:
        raise ValueError(f"key must have 1 to {MOST_KEY_BYTES} characters, not {len(name)}: {key}")
    return name
