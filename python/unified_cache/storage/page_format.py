"""How a page lies in a file: a header that makes damage and mix-ups visible, then the page's bytes."""

import struct
import zlib

__all__ = [
    "HEADER_BYTES",
    "VERSION",
    "PageDamagedError",
    "UnknownVersionError",
    "check_page",
    "check_version",
    "make_header",
]

# magic, version, header bytes, checksum, payload bytes, key; little-endian, zeros up to HEADER_BYTES.
_HEADER = struct.Struct("<4sHHIQ160s")
_START = struct.Struct("<4sH")  # the same in every version
_MAGIC = b"UCPG"
VERSION = 1
HEADER_BYTES = 192
_KEY_BYTES = 160
# Where the checksum lies in the header: it covers everything else there, and the payload.
_SUM = slice(8, 12)


class PageDamagedError(Exception):
    """The bytes are not the page that was asked for; the message says how that was seen."""


class UnknownVersionError(Exception):
    """A page of another version of this format."""


def _checksum(header: bytes, payload: memoryview) -> int:
    start = zlib.crc32(header[: _SUM.start])
    return zlib.crc32(payload, zlib.crc32(header[_SUM.stop :], start))


def make_header(key: str, payload: memoryview) -> bytes:
    """The header of a page with this key and these bytes."""
    name = key.encode("ascii")
    if len(name) > _KEY_BYTES:
        raise ValueError(f"key must have at most {_KEY_BYTES} bytes, not {len(name)}: {key}")
    header = _HEADER.pack(_MAGIC, VERSION, HEADER_BYTES, 0, payload.nbytes, name).ljust(HEADER_BYTES, b"\0")
    checksum = struct.pack("<I", _checksum(header, payload))
    return header[: _SUM.start] + checksum + header[_SUM.stop :]


def check_version(start: bytes) -> None:
    """Return if a file that begins like this is a page of this version.

    Raises:
        UnknownVersionError: a page of another version: nothing else can be said of it.
        PageDamagedError: no page.
    """
    if len(start) < _START.size:
        raise PageDamagedError(f"{len(start)} bytes")
    magic, version = _START.unpack_from(start)
    if magic != _MAGIC:
        raise PageDamagedError(f"magic {magic!r}")
    if version != VERSION:
        raise UnknownVersionError(f"version {version}")


def check_page(key: str, header: bytes, payload: memoryview) -> None:
    """Return if header and payload are the page `key`.

    Raises:
        UnknownVersionError: a page of a version that this code does not know.
        PageDamagedError: anything else.
    """
    if len(header) != HEADER_BYTES:
        raise PageDamagedError(f"header of {len(header)} bytes")
    check_version(header)
    _, _, header_bytes, checksum, length, name = _HEADER.unpack_from(header)
    if checksum != _checksum(header, payload):
        raise PageDamagedError("checksum")
    if header_bytes != HEADER_BYTES or length != payload.nbytes:
        raise PageDamagedError(f"{length} bytes after a header of {header_bytes}")
    if name.rstrip(b"\0") != key.encode("ascii"):
        raise PageDamagedError(f"a page of another key, {name!r}")
