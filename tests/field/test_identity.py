"""Keys that collide or do not match across processes and namespaces: field cases 28, 29 and 41."""

import hashlib
import itertools
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from tests.field.support import event_hashes, hexes, ids, key
from unified_cache import PrefixTree, page_hashes

# Three pages of the tokens 0..11, P=4: without a namespace, and with an empty extra key.
GOLDEN = {
    "absent": [
        "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
        "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
        "fd5bd05ab69776768cb177e87c5ef6f8f8dec410a03a3c238a58a89c01ba803c",
    ],
    "empty": [
        "de38368c57c6aa2d736aa85ed2f4c3ef896ce8249569d6e337f2dfc85cf5af50",
        "ac03d860e865b706352ff00e944cd18c06024f42fd580b91c98bce7dfd7668b4",
        "d8315ff7160915fceea1bf716b1718ba467f6a9a8bcc5fb199c1d1f07c37f5eb",
    ],
}

CHILD = """
import numpy as np
from unified_cache import PrefixTree, page_hashes
for namespace in ({}, {"extra_key": ""}):
    tree = PrefixTree(4)
    node = tree.insert(np.arange(12), np.arange(3, dtype=np.uint32), **namespace).node
    print(*[d.tobytes().hex() for d in tree.prefix_hashes(node)])
    print(*[d.tobytes().hex() for d in page_hashes(np.arange(12), 4, **namespace)])
print(tree.digest())
"""


def reference(
    tokens: list[int], page_size: int, extra_key: str | None, cache_salt: str | None, bigram: bool
) -> list[bytes]:
    """The digests as the documentation has them, in a few lines of hashlib."""
    previous = b""
    if extra_key is not None or cache_salt is not None:
        seed = hashlib.sha256(b"sglang-cache-namespace-v1")
        for part in (extra_key, cache_salt):
            raw = None if part is None else part.encode()
            seed.update(b"\0" if raw is None else b"\1" + len(raw).to_bytes(8, "little") + raw)
        previous = seed.digest()
    pairs = list(itertools.pairwise(tokens))
    positions: list[tuple[int, ...]] = pairs if bigram else [(t,) for t in tokens]
    out = []
    for start in range(0, len(positions) // page_size * page_size, page_size):
        words = [t for position in positions[start : start + page_size] for t in position]
        previous = hashlib.sha256(previous + b"".join(t.to_bytes(4, "little") for t in words)).digest()
        out.append(previous)
    return out


def test_case_28_digests_are_the_same_in_every_process() -> None:
    """Fault: the root seed is random per process, or the hash of an absent value depends on an address.

    Right: the same golden strings in every process, whatever its hash seed; also the state digest of the tree
    is the same, since ranks compare it.
    """
    outputs = []
    for seed in ("0", "1", "random", None):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", CHILD], env=environment, check=True, capture_output=True, text=True
        )
        outputs.append(done.stdout)
    assert len(set(outputs)) == 1
    lines = outputs[0].splitlines()
    assert [line.split() for line in lines[:4]] == [GOLDEN["absent"]] * 2 + [GOLDEN["empty"]] * 2


def test_case_28_absent_and_empty_namespaces_differ() -> None:
    """Fault: an absent and an empty namespace have no defined relation.

    Right: they are different namespaces, in digests and in the tree; every combination stands alone.
    """
    tokens = key(range(12))
    kinds = [(e, s) for e in (None, "", "a") for s in (None, "", "a")]
    all_hexes = [hexes(tokens, 4, extra_key=e, cache_salt=s) for e, s in kinds]
    assert all_hexes[0] == GOLDEN["absent"]
    assert all_hexes[3] == GOLDEN["empty"]
    assert len({h for row in all_hexes for h in row}) == 3 * len(kinds)
    tree = PrefixTree(4)
    for i, (e, s) in enumerate(kinds):
        assert tree.insert(tokens, ids(3, 10 * i), extra_key=e, cache_salt=s).prefix_len == 0
    for i, (e, s) in enumerate(kinds):
        assert tree.match_prefix(tokens, extra_key=e, cache_salt=s).device_pages[0] == 10 * i


@pytest.mark.parametrize("bigram", [False, True])
def test_case_28_digests_equal_the_definition(bigram: bool) -> None:
    """Fault: two implementations of the digest agree on one example and differ elsewhere.

    Right: byte for byte the definition, for random keys, page sizes and namespaces, whole and in parts.
    """
    rng = random.Random(28)
    for _ in range(120):
        page_size = rng.choice((1, 2, 3, 16, 64, 256))
        top = rng.choice((3, 32000, 2**32))
        tokens = [rng.randrange(top) for _ in range(rng.randint(0, 5 * page_size))]
        extra, salt = (rng.choice((None, "", "a", "ключ", "x" * 70)) for _ in range(2))
        want = reference(tokens, page_size, extra, salt, bigram)
        got = page_hashes(
            np.array(tokens, np.int64), page_size, extra_key=extra, cache_salt=salt, bigram=bigram
        )
        assert got.shape == (len(want), 32)
        assert [row.tobytes() for row in got] == want
        tree = PrefixTree(page_size, bigram=bigram)
        node = tree.insert(tokens, ids(len(want)), extra_key=extra, cache_salt=salt).node
        tree.match_prefix(tokens[: len(tokens) // 2], extra_key=extra, cache_salt=salt)
        assert [row.tobytes() for row in tree.prefix_hashes(node)] == want
        if len(want) > 1:
            rest = tokens[page_size:]
            parts = page_hashes(np.array(rest, np.int64), page_size, parent=want[0], bigram=bigram)
            assert [row.tobytes() for row in parts] == want[1:]


@pytest.mark.parametrize("page_size", [1, 4])
def test_case_29_equal_ends_are_no_hit(page_size: int) -> None:
    """Fault: keys are compared by their last part and their length, so another prompt's pages are returned.

    Right: the whole identity decides: a key with the same end, count or middle is a miss where it differs.
    """
    tree = PrefixTree(page_size)
    one, two, three, four, nine = ([n] * page_size for n in (1, 2, 3, 4, 9))
    tree.insert(key(one, two, nine), ids(3))
    for other in (key(three, four, nine), key(nine), key(two, nine), key(three, two, nine)):
        assert tree.match_prefix(other).device_length == 0
    assert tree.match_prefix(key(one, four, nine)).device_length == page_size
    assert tree.match_prefix(key(one, two, nine), extra_key="a").device_length == 0
    assert tree.match_prefix(key(one, two, nine), cache_salt="a").device_length == 0
    assert tree.match_prefix(key(one, two, nine)).device_length == 3 * page_size


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_case_29_one_token_of_difference_anywhere_ends_the_match(page_size: int) -> None:
    """Fault: a comparison that looks at a part of the tokens only.

    Right: a difference at any position, in any bit, ends the match at the page before it.
    """
    rng = random.Random(29)
    tokens = np.array([rng.randrange(2**32) for _ in range(6 * page_size)], np.int64)
    tree = PrefixTree(page_size)
    tree.insert(tokens, ids(6))
    for dtype in (np.int64, np.uint32):
        for at in range(len(tokens)):
            other = tokens.copy()
            other[at] ^= 1 << rng.randrange(32)
            match = tree.peek_prefix(other.astype(dtype))
            assert match.device_length == at // page_size * page_size


def test_case_29_forced_equal_digests_are_told_apart() -> None:
    """Fault: two pages with one digest are taken for one page, and another prompt's data is returned.

    Right: the tree compares tokens; pages whose given digests are equal still have their own places.
    """
    tree = PrefixTree(4)
    same = np.zeros((1, 32), np.uint8)
    for i in range(50):
        done = tree.insert_host(tree.root, key([i] * 4), ids(1, i), hashes=same)
        assert done.inserted_pages == 1
    for i in range(50):
        match = tree.match_prefix(key([i] * 4))
        assert match.host_hit_length == 4
        assert tree.node_info(match.last_host_node).host_pages == i
    assert tree.match_prefix(key([50] * 4)).host_hit_length == 0
    tree.check_invariants()


def test_case_29_many_children_keep_their_own_pages() -> None:
    """Fault: the table of child edges trusts a short hash of the first page.

    Right: among 60,000 children of one node every key finds its own page, and absent keys find none.
    """
    tree = PrefixTree(2, write_policy=None)
    count = 60_000
    tokens = np.stack([np.arange(count) % 251, np.arange(count)], axis=1).astype(np.uint32)
    for i in range(count):
        tree.insert(tokens[i], ids(1, i))
    matches = tree.match_prefixes(list(tokens))
    assert [int(m.device_pages[0]) for m in matches] == list(range(count))
    absent = tree.match_prefixes([row[::-1].copy() for row in tokens if row[0] != row[1]][-20_000:])
    assert not any(m.device_length for m in absent)


def test_case_41_namespaces_reach_into_storage_keys() -> None:
    """Fault: the tree keeps namespaces apart, the storage keys do not: another namespace hits in storage.

    Right: pages stored under 'a' are found under 'a' alone; keys without a namespace stay as they were before
    namespaces existed; tree, host, storage and events have one identity.
    """
    tokens = key(range(8))
    tree = PrefixTree(4, events=True)
    done = tree.insert(tokens, ids(2), extra_key="a")
    storage = {digest.tobytes() for digest in tree.prefix_hashes(done.node)}
    (stored,) = tree.take_events()
    assert (stored.extra_key, stored.cache_salt) == ("a", None)
    assert stored.hashes == event_hashes(page_hashes(tokens, 4, extra_key="a"))
    tree.reset()

    def query(**namespace: str) -> int:
        return sum(digest.tobytes() in storage for digest in page_hashes(tokens, 4, **namespace))

    assert [query(extra_key="b"), query(), query(extra_key="a")] == [0, 0, 2]
    assert [query(extra_key="a", cache_salt=""), query(cache_salt="a")] == [0, 0]
    assert hexes(tokens, 4) == GOLDEN["absent"][:2]

    tree.insert_host(tree.root, tokens, ids(2), extra_key="a")
    assert tree.match_prefix(tokens, extra_key="a").host_hit_length == 8
    for namespace in ({}, {"extra_key": "b"}, {"cache_salt": "a"}, {"extra_key": "a", "cache_salt": "s"}):
        assert tree.match_prefix(tokens, **namespace).host_hit_length == 0
    events = [event for event in tree.take_events() if hasattr(event, "tier")]
    assert [(e.tier, e.extra_key, e.hashes) for e in events] == [("host", "a", stored.hashes)]


def test_case_41_a_host_insert_can_not_change_the_namespace() -> None:
    """Fault: pages read for one namespace are hung below another.

    Right: below the root the namespace is taken from the anchor, and another one is refused.
    """
    tree = PrefixTree(4)
    tokens = key(range(16))
    anchor = tree.insert_host(tree.root, tokens[:8], ids(2), extra_key="a").node
    for namespace in ({"extra_key": "b"}, {"extra_key": "a", "cache_salt": "s"}, {"cache_salt": "a"}):
        with pytest.raises(ValueError, match=r"extra_key|cache_salt|namespace"):
            tree.insert_host(anchor, tokens[8:], ids(2, 2), **namespace)
    assert tree.insert_host(anchor, tokens[8:], ids(2, 2)).inserted_pages == 2
    assert tree.insert_host(anchor, tokens[8:], ids(2, 4), extra_key="a").duplicate_host_pages.tolist() == [
        4,
        5,
    ]
    assert tree.match_prefix(tokens, extra_key="a").host_hit_length == 16
    tree.check_invariants()
