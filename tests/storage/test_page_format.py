"""A stored object is either what was written under its key, or nothing."""

import random
import struct

import numpy as np
import pytest

from unified_cache import page_hashes
from unified_cache._native import check_object_headers, object_checksums, write_object_headers
from unified_cache.errors import ArgumentError
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.keys import KEY, KeySpace, PoolKeys, fingerprint
from unified_cache.storage.page_format import HEADER_BYTES, check_objects, write_headers

KEYS = ["ab" * 32 + "-0123456789abcdef-0000", "cd" * 32 + "-0123456789abcdef-0001"]
PAGE = bytes(range(256)) * 2
SIZE = len(PAGE)
GOLDEN_SUM = "c10f31a6c0a00cca"
GOLDEN_FINGERPRINT = "52664301011c382e"


def make(keys=KEYS, sizes=None, codecs=(0, 0)):  # type: ignore[no-untyped-def]
    headers = np.empty((len(keys), HEADER_BYTES), np.uint8)
    bodies = [memoryview(bytearray(PAGE)) for _ in keys]
    sizes = [SIZE] * len(keys) if sizes is None else sizes
    checksums = write_headers(headers, keys, sizes, SIZE, codecs)
    checksums.make(range(len(keys)), [body[:size] for body, size in zip(bodies, sizes, strict=True)])
    return headers, bodies, sizes


def check(headers, bodies, sizes, keys=KEYS, page=SIZE, codecs=(0,)):  # type: ignore[no-untyped-def]
    return check_objects(headers, keys, bodies, sizes, page, codecs)


def test_sound_objects() -> None:
    checked = check(*make())
    assert [c.status for c in checked] == [PageStatus.HIT] * 2
    assert [c.codec for c in checked] == [0, 0]


def test_the_bytes_of_a_header_do_not_change() -> None:
    headers, _, _ = make()
    header = headers[0].tobytes()
    assert header[:16] == b"UCPG" + struct.pack("<HHBB", 2, 192, 1, 0) + bytes(6)
    assert struct.unpack("<QQ", header[16:32]) == (SIZE, SIZE)
    assert header[32:184].rstrip(b"\0") == KEYS[0].encode()
    # XXH3 of everything before it and of the body.
    assert header[184:].hex() == GOLDEN_SUM


def test_checksums_are_those_of_xxh3() -> None:
    # The test vectors that XXH3 is published with: seed 0, of nothing and of one zero byte.
    nothing = np.zeros((1, 0), np.uint8)
    assert object_checksums(nothing, 0, [b""], [0]).tolist() == [0x2D06800538D394C2]
    assert object_checksums(nothing, 0, [b"\0"], [1]).tolist() == [0xC44BDFF4074EECDB]
    # Pieces count as one run of bytes.
    whole = bytes(range(200))
    header = np.frombuffer(whole[:50] + b"not this", np.uint8)
    assert object_checksums(header, 50, [whole[50:]], [150]) == object_checksums(nothing, 0, [whole], [200])


def test_checksums_of_what_is_no_memory() -> None:
    headers = np.zeros((2, 8), np.uint8)
    for arguments, text in (
        ((headers, 8, [b"a"], [1, 1]), "sizes must have 1 entries, not 2"),
        ((headers, 8, [b"a", b"b"], [1, 2]), "sizes[1] is 2, bodies[1] has 1 bytes"),
        ((headers, 9, [b"a", b"b"], [1, 1]), "headers must have 2 times at least 9 bytes"),
        ((headers, 8, [b"a", 5], [1, 1]), "bodies[1] is 5, a buffer is needed"),
        ((headers[:, ::2], 4, [b"a", b"b"], [1, 1]), "headers is not C-contiguous"),
        ((headers, -1, [b"a", b"b"], [1, 1]), "covered"),
    ):
        with pytest.raises(ArgumentError) as error:
            object_checksums(*arguments)  # type: ignore[arg-type]
        assert text in str(error.value)
    assert object_checksums(headers, 8, [], []).shape == (0,)


def test_every_flipped_bit_is_seen() -> None:
    headers, bodies, sizes = make()
    rng = random.Random(0)
    header_bits = range(8 * HEADER_BYTES)
    body_bits = [rng.randrange(8 * SIZE) for _ in range(500)]
    for target, bits in ((memoryview(headers).cast("B"), header_bits), (bodies[0], body_bits)):
        for bit in bits:
            target[bit // 8] ^= 1 << bit % 8
            first, second = check(headers, bodies, sizes)
            assert first.status is not PageStatus.HIT
            # Of another version, or with another kind of checksum, nothing can be said of it.
            unknown = target is not bodies[0] and bit // 8 in (4, 5, 8)
            assert first.status is (PageStatus.MISS if unknown else PageStatus.CORRUPT), bit
            assert second.status is PageStatus.HIT
            target[bit // 8] ^= 1 << bit % 8
    assert [c.status for c in check(headers, bodies, sizes)] == [PageStatus.HIT] * 2


def sealed(change) -> list[PageStatus]:  # type: ignore[no-untyped-def]
    """The statuses of objects whose headers were changed, with checksums that fit."""
    headers, bodies, sizes = make()
    change(headers)
    sums = object_checksums(headers.data, 184, bodies, sizes)
    headers[:, 184:] = sums[:, np.newaxis].view(np.uint8)
    return [c.status for c in check(headers, bodies, sizes)]


def test_other_versions_codecs_and_checksums_are_misses() -> None:
    for at, value in ((4, 3), (4, 1), (8, 2), (9, 7)):

        def change(headers, at=at, value=value) -> None:  # type: ignore[no-untyped-def]
            headers[0, at] = value

        assert sealed(change) == [PageStatus.MISS, PageStatus.HIT]


def test_sound_objects_of_something_else_are_damaged() -> None:
    for at in (6, 16, 24, 32, 100):

        def change(headers, at=at) -> None:  # type: ignore[no-untyped-def]
            headers[0, at] ^= 1

        assert sealed(change) == [PageStatus.CORRUPT, PageStatus.HIT]
    headers, bodies, sizes = make()
    assert "another key" in check(headers[::-1].copy(), bodies, sizes)[0].reason
    assert "page of 512" in check(headers, bodies, sizes, page=1024)[0].reason


def test_short_and_torn_objects() -> None:
    headers, bodies, sizes = make()
    assert check(headers, bodies, [SIZE - 1, SIZE])[0].status is PageStatus.CORRUPT
    assert check(headers, bodies, [0, SIZE])[0].status is PageStatus.CORRUPT
    assert check(np.zeros_like(headers), bodies, sizes)[0].status is PageStatus.CORRUPT
    bodies[1][SIZE // 2 :] = bytes(SIZE // 2)
    assert [c.status for c in check(headers, bodies, sizes)] == [PageStatus.HIT, PageStatus.CORRUPT]


def test_compressed_bodies_count_as_far_as_they_go() -> None:
    headers, bodies, sizes = make(sizes=[100, SIZE], codecs=(1, 0))
    bodies[0][100:] = b"x" * (SIZE - 100)
    checked = check(headers, bodies, sizes, codecs=(0, 1))
    assert [(c.status, c.codec) for c in checked] == [(PageStatus.HIT, 1), (PageStatus.HIT, 0)]
    assert check(headers, bodies, sizes)[0].reason == "codec 1"


def test_keys_that_are_too_long() -> None:
    for name in ("k" * 151, ""):
        with pytest.raises(ValueError, match="1 to 150 characters"):
            make(keys=[name, "b"])
    headers, bodies, sizes = make(keys=["k" * 150, "b"])
    assert check(headers, bodies, sizes, keys=["k" * 150, "b"])[0].status is PageStatus.HIT


def test_headers_that_can_not_be() -> None:
    headers, sums = np.full((2, HEADER_BYTES), 7, np.uint8), np.zeros(2, np.uint64)
    fixed = np.zeros((2, HEADER_BYTES), np.uint8)
    fixed.flags.writeable = False
    for write, check, text in (
        (
            (headers, ["a"], [1], 1, [0]),
            (headers, ["a"], [1], 1, sums[:1]),
            "headers must have 192 bytes, not 384",
        ),
        (
            (headers, ["a", "b"], [1], 1, [0, 0]),
            (headers, ["a", "b"], [1], 1, sums),
            "stored_sizes must have 2",
        ),
        ((headers, ["a", "b"], [1, 1], 1, [0]), None, "codecs must have 2 entries, not 1"),
        (None, (headers, ["a", "b"], [1, 1], 1, sums[:1]), "checksums must have 16 bytes, not 8"),
        ((headers, ["a", ""], [1, 1], 1, [0, 0]), (headers, ["a", ""], [1, 1], 1, sums), "not 0: ''"),
        (
            (headers, ["a", "ä"], [1, 1], 1, [0, 0]),
            (headers, ["a", "ä"], [1, 1], 1, sums),
            "all of ASCII, not 1",
        ),
        (
            (headers, ["a", 5], [1, 1], 1, [0, 0]),
            (headers, ["a", 5], [1, 1], 1, sums),
            "keys has 5, a str is needed",
        ),
        ((headers, 5, [1, 1], 1, [0, 0]), (headers, 5, [1, 1], 1, sums), "keys is 5, a sequence is needed"),
        (
            (5, ["a", "b"], [1, 1], 1, [0, 0]),
            (5, ["a", "b"], [1, 1], 1, sums),
            "headers is 5, a buffer is needed",
        ),
        ((fixed, ["a", "b"], [1, 1], 1, [0, 0]), None, "headers can not be written"),
    ):
        for call, arguments in ((write_object_headers, write), (check_object_headers, check)):
            if arguments is not None:
                with pytest.raises(ArgumentError) as error:
                    call(*arguments)  # type: ignore[operator]
                assert text in str(error.value)
    assert (headers == 7).all()
    assert check_object_headers(headers[:0], [], [], 1, sums[:0]) == []


SHAPE = {
    "model": "m",
    "weight_version": "1",
    "pool": 0,
    "dtype": "torch.bfloat16",
    "layers": 2,
    "stage": 0,
    "stages": 1,
    "heads": 4,
    "head_groups": 1,
    "head_dim": 8,
    "kind": "mha",
    "page_size": 16,
    "context_part": 0,
    "context_parts": 1,
    "layout": "page_first",
}


def test_a_fingerprint_covers_all_that_changes_the_bytes() -> None:
    whole = fingerprint(**SHAPE)  # type: ignore[arg-type]
    others = {fingerprint(**(SHAPE | {name: f"{value}x"})) for name, value in SHAPE.items()}  # type: ignore[arg-type]
    assert len(others | {whole}) == len(SHAPE) + 1


def test_the_keys_of_stored_objects_do_not_change() -> None:
    # Whoever changes these makes everybody's stored pages misses.
    name = fingerprint(**SHAPE)  # type: ignore[arg-type]
    assert name == GOLDEN_FINGERPRINT
    hashes = page_hashes(np.arange(8), 4)
    one = KeySpace([PoolKeys(name)]).keys(hashes)
    assert [k[64:] for k in one] == [f"-{name}-0000"] * 2
    assert [k[:64] for k in one] == [row.tobytes().hex() for row in hashes]
    two = KeySpace([PoolKeys(name, groups=2, first_group=6)]).keys(hashes)
    assert two == [k[:82] + end for k in one for end in ("0006", "0007")]
    assert all(KEY.fullmatch(k) for k in one + two)
    assert KeySpace([PoolKeys(name)]).keys(hashes[:0]) == []
