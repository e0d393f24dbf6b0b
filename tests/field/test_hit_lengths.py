"""Wrong hit lengths and pages that are not aligned: field cases 6, 12 and 44."""

import random

import numpy as np
import pytest

from tests.field.support import Caller, ids, key, path
from unified_cache import PrefixTree, page_hashes


@pytest.mark.parametrize("page_size, prompt, usable", [(16, 48, 32), (16, 49, 48), (1, 48, 47), (1, 49, 48)])
def test_case_6_a_full_hit_leaves_something_to_compute(page_size: int, prompt: int, usable: int) -> None:
    """Fault: a full hit leaves no token to compute, or the repair recomputes one token and breaks the chain.

    Right: the usable hit is floor((n-1)/P)*P; the recomputed last page has the same hash, the caller's copy
    of it is a duplicate, and the tree still holds what it held.
    """
    tree = PrefixTree(page_size, write_policy=None)
    tokens = key(range(prompt))
    held = prompt // page_size
    first = tree.insert(tokens, ids(held))
    before = tree.prefix_hashes(first.node)
    match = tree.match_prefix(tokens[:-1])
    assert match.device_length == usable
    pages = np.concatenate([match.device_pages, ids(held - len(match.device_pages), 1000)])
    again = tree.insert(tokens, pages, prev_prefix_len=match.device_length)
    assert again.prefix_len == held * page_size
    np.testing.assert_array_equal(again.duplicate_pages, pages[len(match.device_pages) :])
    np.testing.assert_array_equal(again.device_pages, ids(held))
    np.testing.assert_array_equal(tree.prefix_hashes(again.node), before)
    assert tree.device_tokens == held * page_size
    tree.check_invariants()


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_case_6_usable_is_whole_pages_short_of_the_last_token(page_size: int) -> None:
    """Fault: off by one page where the prompt ends at a page boundary.

    Right: floor((n-1)/P)*P for every n, for match and peek alike.
    """
    tree = PrefixTree(page_size, write_policy=None)
    tokens = key(range(4 * page_size))
    tree.insert(tokens, ids(4))
    for n in range(1, len(tokens) + 1):
        want = (n - 1) // page_size * page_size
        assert tree.peek_prefix(tokens[: n - 1]).device_length == want
        assert tree.match_prefix(tokens[: n - 1]).device_length == want


def test_case_12_less_than_a_page_is_no_hit_and_no_cut() -> None:
    """Fault: the child is looked up before the key is rounded down; a cut at 0 makes an empty node.

    Right: hit 0, the root, no node more, no node with an empty key.
    """
    tree = PrefixTree(64, write_policy=None)
    tokens = key(range(64))
    node = tree.insert(tokens, ids(1)).node
    for capped in (tokens[:63], key(range(63), 999), tokens[:1], tokens[:0]):
        match = tree.match_prefix(capped)
        assert (match.device_length, len(match.device_pages), match.host_hit_length) == (0, 0, 0)
        assert (match.last_device_node, match.last_host_node) == (tree.root, tree.root)
        assert len(tree) == 1
    assert tree.match_prefix(key(tokens.tolist(), range(63))).last_device_node == node
    assert len(tree) == 1  # a match that ends where a node ends cuts nothing either
    assert tree.evict(1).device_pages.tolist() == [0]
    tree.check_invariants()


@pytest.mark.parametrize("page_size", [2, 16, 64])
def test_case_12_every_child_stays_under_its_own_first_page(page_size: int) -> None:
    """Fault: after some capped query a child is registered under a page that is not its own.

    Right: after 1,000 random capped queries every node has pages and every key leads to its own pages.
    """
    rng = random.Random(page_size)
    tree = PrefixTree(page_size, write_policy=None)
    keys, next_page = [], 0
    for _ in range(40):
        tokens = key(rng.choices(range(2), k=rng.randint(1, 6 * page_size)))
        count = len(tokens) // page_size
        tree.insert(tokens, ids(count, next_page))
        next_page += count
        keys.append(tokens)
    right = {tokens.tobytes(): tree.peek_prefix(tokens).device_pages for tokens in keys}
    for _ in range(1000):
        tokens = rng.choice(keys)
        capped = tokens[: rng.randint(0, len(tokens))]
        match = tree.match_prefix(capped)
        assert match.device_length == len(capped) // page_size * page_size
        np.testing.assert_array_equal(match.device_pages, right[tokens.tobytes()][: len(match.device_pages)])
    nodes = {n for tokens in keys for n in path(tree, tree.match_prefix(tokens).last_device_node)}
    assert len(nodes) == len(tree)
    assert all(tree.node_info(node).pages > 0 for node in nodes)
    tree.check_invariants()
    held = set().union(*(pages.tolist() for pages in right.values()))
    assert set(tree.evict(next_page).device_pages.tolist()) == held
    assert len(tree) == 0


@pytest.mark.parametrize("raw, hit", [(64, 0), (65, 64), (1, 0), (0, 0), (128, 64), (129, 128), (130, 128)])
def test_case_44_bigram_walks_stop_before_a_broken_page(raw: int, hit: int) -> None:
    """Fault: a rest shorter than a page still asks for a page key, and reads past the end of the tokens.

    Right: n raw tokens are n-1 positions; match, insert and host insert alike use whole pages of them.
    """
    tokens = key(range(raw))
    for insert in ("device", "host"):
        tree = PrefixTree(64, bigram=True)
        if insert == "device":
            done = tree.insert(tokens, ids(hit // 64))
            assert (done.prefix_len, len(done.device_pages)) == (0, hit // 64)
        else:
            assert tree.insert_host(tree.root, tokens, ids(hit // 64)).inserted_pages == hit // 64
        for n in range(raw + 1):
            match = tree.match_prefix(tokens[:n])
            assert match.device_length + match.host_hit_length == max(n - 1, 0) // 64 * 64
            assert match.host_hit_length == 0 or insert == "host"
        tree.check_invariants()
        longer = key(range(raw), 7, 7)
        assert tree.peek_prefix(longer).device_length + tree.peek_prefix(longer).host_hit_length == hit


def test_case_44_bigram_digests_and_random_calls() -> None:
    """Fault: the last token of a page, which belongs to the next page too, is dropped or read twice.

    Right: digests are those of `page_hashes`, not the plain ones, and random calls keep the invariants.
    """
    tokens = key(range(200, 200 + 4 * 64 + 1))
    tree = PrefixTree(64, bigram=True)
    node = tree.insert(tokens, ids(4)).node
    tree.match_prefix(tokens[:129])
    np.testing.assert_array_equal(tree.prefix_hashes(node), page_hashes(tokens, 64, bigram=True))
    assert not np.array_equal(page_hashes(tokens, 64, bigram=True), page_hashes(tokens, 64))
    for page_size in (1, 2, 16):
        caller = Caller(seed=page_size, page_size=page_size, bigram=True)
        for i in range(400):
            caller.step()
            if i % 20 == 0:
                caller.check()
        caller.settle()
        caller.check()
