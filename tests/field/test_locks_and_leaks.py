"""Pages that leak or are freed twice, and counts that go below zero: field cases 1, 4 and 10."""

import random
import resource
from pathlib import Path

import numpy as np
import pytest

from tests.field.support import Caller, Pool, ids, key
from unified_cache import LockError, PrefixTree

POLICIES = [None, "write_through", "write_through_selective", "write_back"]


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def backing(array: np.ndarray) -> int:
    """Bytes of numpy memory that an array keeps alive."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.nbytes


def test_case_1_arrays_do_not_keep_big_buffers_alive() -> None:
    """Fault: a small array handed out is a window on a pool-sized buffer, and keeps all of it alive.

    Right: what is kept is the small array alone, so memory grows by the index data and a constant.
    """
    big, pages = np.arange(1 << 20), ids(1 << 20)
    tree = PrefixTree(1, write_policy=None)
    kept = []

    def once() -> None:
        tree.insert(big, pages)
        kept.append(tree.peek_prefix(big[:128]).device_pages)
        assert len(tree.evict(1 << 20).device_pages) == 1 << 20

    for _ in range(5):
        once()
    before = rss()
    for _ in range(100):
        once()
    assert rss() - before < 48 << 20  # one window a round would be 400 MiB
    assert all(backing(array) == 128 * 4 for array in kept)
    for array in kept:
        np.testing.assert_array_equal(array, ids(128))


def test_case_1_arrays_never_change_and_change_nothing() -> None:
    """Fault: an array handed out shares memory with the tree, or with another array, and changes later.

    Right: every array owns its memory: later calls leave it alone, and writing into it changes no tree.
    """
    tree = PrefixTree(2)
    tokens, pages = key(range(16)), ids(8, 100)
    done = tree.insert(tokens, pages)
    pages[:] = 0  # the caller's own array is the caller's again
    handed = [
        done.device_pages,
        tree.match_prefix(tokens).device_pages,
        tree.peek_prefix(tokens).device_pages,
    ]
    handed.append(tree.match_prefixes([tokens])[0].device_pages)
    plan = tree.plan_backup([done.node])
    handed.append(plan.device_pages)
    tree.finish_backup(tree.begin_backup(plan.nodes, ids(8, 500)))
    info = tree.node_info(done.node)
    assert info.device_pages is not None
    assert info.host_pages is not None
    handed += [info.device_pages, info.host_pages]
    handed.append(tree.insert(tokens, ids(8, 900)).duplicate_pages)
    handed.append(tree.evict(8).device_pages)
    load = tree.plan_load_back(done.node)
    handed.append(load.host_pages)
    copies = [array.copy() for array in handed]
    for i, array in enumerate(handed):
        assert array.dtype == np.uint32
        assert not any(np.shares_memory(array, other) for other in handed[i + 1 :])

    tree.finish_load_back(tree.begin_load_back(load, ids(8, 200)))
    tree.match_prefix(tokens[:6])
    tree.reset()
    tree.insert(key(range(50, 90)), ids(20))
    for array, copy in zip(handed, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    digest = tree.digest()
    for array in handed:
        if array.flags.writeable:
            array[:] = 7
    assert tree.digest() == digest
    tree.check_invariants()


@pytest.mark.parametrize("write_policy", POLICIES)
def test_case_1_no_page_is_lost_or_owned_twice(write_policy: str | None) -> None:
    """Fault: pages leave the accounting, or are in it twice, after some mix of calls.

    Right: free + owned = total on both tiers after every call.
    """
    caller = Caller(seed=1, write_policy=write_policy)
    for _ in range(600):
        caller.step()
        caller.check()
    caller.settle()
    caller.check()


def test_case_4_a_release_without_a_lock_is_refused() -> None:
    """Fault: a path that took no lock releases one; protected becomes -12 and the worker dies.

    Right: the release is refused with the node's id and changes no counter; protected is 0 at the end.
    """
    tree, pool = PrefixTree(1, write_policy=None), Pool(64)
    node = tree.insert(key(range(12)), pool.alloc(12)).node
    lock = tree.inc_lock_ref(node)
    assert (tree.protected_tokens, tree.evictable_tokens) == (12, 0)
    tree.dec_lock_ref(lock)
    before = tree.digest()
    with pytest.raises(LockError, match=rf"\b{node}\b"):
        tree.dec_lock_ref(lock)
    assert tree.digest() == before
    assert (tree.protected_tokens, tree.evictable_tokens) == (0, 12)
    assert pool.room + tree.evictable_tokens + tree.protected_tokens == pool.size
    tree.check_invariants()


def test_case_4_a_release_with_a_foreign_receipt_is_refused() -> None:
    """Fault: a receipt of another tree, or from before a reset, lowers a count that it never raised.

    Right: refused with the node's id; both trees stay as they are, and the rightful release still works.
    """
    one, two = PrefixTree(1), PrefixTree(1)
    nodes = [tree.insert(key(range(12)), ids(12)).node for tree in (one, two)]
    mine, host = one.inc_lock_ref(nodes[0]), one.inc_host_lock_ref(nodes[0])
    for give_back, receipt in ((two.dec_lock_ref, mine), (two.dec_host_lock_ref, host)):
        with pytest.raises(LockError, match=rf"\b{nodes[0]}\b"):
            give_back(receipt)
    assert (one.protected_tokens, two.protected_tokens) == (12, 0)
    one.dec_lock_ref(mine)
    one.dec_host_lock_ref(host)
    assert one.protected_tokens == 0

    stale, stale_host = one.inc_lock_ref(nodes[0]), one.inc_host_lock_ref(nodes[0])
    one.reset()
    one.insert(key(range(12)), ids(12))
    with pytest.raises(LockError):
        one.dec_lock_ref(stale)
    with pytest.raises(LockError):
        one.dec_host_lock_ref(stale_host)
    assert one.protected_tokens == 0
    one.check_invariants()
    two.check_invariants()


@pytest.mark.parametrize("seed", range(4))
def test_case_4_counts_stay_exact_when_releases_come_twice(seed: int) -> None:
    """Fault: an owner releases a lock that somebody else gave back already.

    Right: each lock is given back once; every other try is refused, and the sums stay exact.
    """
    rng, caller = random.Random(seed), Caller(seed)
    spent = []
    for _ in range(400):
        before = list(caller.locks)
        caller.step()
        spent += [lock for lock in before if lock not in caller.locks]
        if spent and rng.random() < 0.3:
            state = (caller.tree.digest(), caller.tree.protected_tokens, caller.tree.evictable_tokens)
            with pytest.raises(LockError):
                caller.tree.dec_lock_ref(rng.choice(spent))
            assert state == (caller.tree.digest(), caller.tree.protected_tokens, caller.tree.evictable_tokens)
    caller.settle()
    caller.check()
    assert caller.tree.protected_tokens == 0


def test_case_10_a_match_locks_what_it_matched_and_no_more() -> None:
    """Fault: the match does not cut, the lock covers 10 tokens, and a fragment stays locked for ever.

    Right: 6 tokens are protected while locked, 0 after; evict(all) frees 12 and leaves only the root.
    """
    tree = PrefixTree(1, write_policy=None)
    tree.insert(key(range(1, 11)), ids(10))
    match = tree.match_prefix(key(range(1, 7), 99))
    assert match.device_length == 6
    lock = tree.inc_lock_ref(match.last_device_node)
    assert tree.protected_tokens == 6
    tree.insert(key(range(1, 7), 50, 51), np.concatenate([match.device_pages, ids(2, 10)]), prev_prefix_len=6)
    assert tree.protected_tokens == 6
    tree.dec_lock_ref(lock)
    assert tree.protected_tokens == 0
    assert sorted(tree.evict(100).device_pages.tolist()) == list(range(12))
    assert len(tree) == 0
    tree.check_invariants()


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_case_10_locks_are_given_back_through_any_cuts(page_size: int) -> None:
    """Fault: a lock taken on one node is given back on a part of it, after cuts by other requests.

    Right: each receipt gives back every part: protected is what is locked now, and 0 at the end.
    """
    rng = random.Random(page_size)
    for _ in range(30):
        tree, next_page = PrefixTree(page_size, write_policy=None), 0
        base = rng.choices(range(3), k=12 * page_size)
        locks: list[tuple[int, object]] = []
        for _ in range(40):
            cut = rng.randint(0, 12) * page_size
            tokens = key(base[:cut], rng.choices(range(3), k=rng.randint(0, 3) * page_size))
            count = len(tokens) // page_size
            if rng.random() < 0.5:
                tree.insert(tokens, ids(count, next_page))
                next_page += count
            match = tree.match_prefix(tokens)
            if rng.random() < 0.6:
                held = tree.protected_tokens
                lock = tree.inc_lock_ref(match.last_device_node)
                assert held <= tree.protected_tokens <= held + match.device_length
                locks.append((match.device_length, lock))
            elif locks:
                tree.dec_lock_ref(locks.pop(rng.randrange(len(locks)))[1])
            longest = max((length for length, _ in locks), default=0)
            assert longest <= tree.protected_tokens <= sum(length for length, _ in locks)
            tree.check_invariants()
        for _, lock in locks:
            tree.dec_lock_ref(lock)
        assert tree.protected_tokens == 0
        total = tree.device_tokens
        assert len(tree.evict(total // page_size).device_pages) * page_size == total
        assert (len(tree), tree.device_tokens) == (0, 0)


@pytest.mark.parametrize("write_policy", POLICIES)
def test_case_10_nothing_stays_locked_after_random_calls(write_policy: str | None) -> None:
    """Fault: some mix of insert, match, lock, unlock and evict leaves a fragment that can never go.

    Right: when all is given back, all of it can be evicted from both tiers.
    """
    caller = Caller(seed=10, write_policy=write_policy)
    for _ in range(1500):
        caller.step()
    caller.settle()
    tree = caller.tree
    assert tree.protected_tokens == 0
    infos = [tree.node_info(node) for node in caller.live_nodes()]
    assert all(tuple(info.locks) == (0, 0) and info.pending is None for info in infos)
    gone = tree.evict(caller.device.size, host_room=0)
    caller.device.free(gone.device_pages)
    caller.host.free(gone.host_pages)
    caller.host.free(tree.evict_host(caller.host.size).host_pages)
    assert (len(tree), caller.device.room, caller.host.room) == (0, caller.device.size, caller.host.size)
