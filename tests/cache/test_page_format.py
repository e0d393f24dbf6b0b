"""A stored page is either what was written under its key, or nothing."""

import random
import struct

import numpy as np
import pytest

from unified_cache import page_hashes
from unified_cache.storage.keys import fingerprint, page_keys
from unified_cache.storage.page_format import (
    HEADER_BYTES,
    PageDamagedError,
    UnknownVersionError,
    check_page,
    check_version,
    make_header,
)

KEY = "ab" * 32 + "-0123456789abcdef"
PAYLOAD = memoryview(bytes(range(256)) * 2)

SHAPE = {
    "model": "m",
    "weight_version": "1",
    "dtype": "torch.bfloat16",
    "layers": 2,
    "heads": 4,
    "head_dim": 8,
    "kind": "mha",
    "page_size": 16,
    "layout": "page_first",
}


def test_a_sound_page() -> None:
    header = make_header(KEY, PAYLOAD)
    assert len(header) == HEADER_BYTES
    check_page(KEY, header, PAYLOAD)


def test_every_flipped_bit_is_seen() -> None:
    whole = bytearray(make_header(KEY, PAYLOAD) + PAYLOAD)
    rng = random.Random(0)
    bits = [*range(8 * HEADER_BYTES), *(rng.randrange(8 * HEADER_BYTES, 8 * len(whole)) for _ in range(500))]
    for bit in bits:
        whole[bit // 8] ^= 1 << bit % 8
        # A flipped version is another version: nothing of it is read either.
        seen = UnknownVersionError if bit // 8 in (4, 5) else PageDamagedError
        with pytest.raises(seen):
            check_page(KEY, bytes(whole[:HEADER_BYTES]), memoryview(whole)[HEADER_BYTES:])
        whole[bit // 8] ^= 1 << bit % 8
    check_page(KEY, bytes(whole[:HEADER_BYTES]), memoryview(whole)[HEADER_BYTES:])


def test_other_pages() -> None:
    header = make_header(KEY, PAYLOAD)
    with pytest.raises(PageDamagedError, match="another key"):
        check_page(KEY.replace("-0", "-1"), header, PAYLOAD)
    with pytest.raises(PageDamagedError):
        check_page(KEY, header, PAYLOAD[:-1])
    with pytest.raises(PageDamagedError, match="header of 10 bytes"):
        check_page(KEY, header[:10], PAYLOAD)
    with pytest.raises(PageDamagedError, match="magic"):
        check_page(KEY, b"\x89PNG" + header[4:], PAYLOAD)
    with pytest.raises(ValueError, match="at most 160 bytes"):
        make_header("k" * 161, PAYLOAD)


def test_a_page_of_a_later_version() -> None:
    # Its version says so, whatever its checksum covers.
    later = b"UCPG" + struct.pack("<H", 2) + bytes(HEADER_BYTES - 6)
    with pytest.raises(UnknownVersionError, match="version 2"):
        check_page(KEY, later, PAYLOAD)
    with pytest.raises(UnknownVersionError, match="version 2"):
        check_version(later[:6])
    with pytest.raises(PageDamagedError, match="5 bytes"):
        check_version(later[:5])


def test_the_fingerprint_changes_with_every_part() -> None:
    # Golden: another value here makes every page that users have stored unreachable.
    assert fingerprint(**SHAPE) == GOLDEN
    changed = {
        fingerprint(**(SHAPE | {name: value + "x" if isinstance(value, str) else value + 1}))
        for name, value in SHAPE.items()
    }
    assert len(changed | {GOLDEN}) == len(SHAPE) + 1


def test_keys() -> None:
    hashes = page_hashes(np.arange(8), 4)
    keys = page_keys(hashes, GOLDEN)
    assert keys == [f"{row.tobytes().hex()}-{GOLDEN}" for row in hashes]
    assert len(set(keys)) == 2
    assert all(len(key) <= 150 and key.isascii() for key in keys)


GOLDEN = "96b89bd8119e4d91"
