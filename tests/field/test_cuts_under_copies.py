"""Cuts that lose state, and data that is lost or in use: field cases 8, 9, 22 and 35 (the tree's part).

Storage is a dict here, and host memory a list of page contents.
"""

from itertools import combinations

import numpy as np
import pytest

from tests.field.support import Pool, back_up, event_hashes, ids, key, load_back
from unified_cache import PrefixTree, page_hashes

P = 4
CUTS = [cuts for n in range(4) for cuts in combinations((1, 2, 3), n)]


def leading_run(storage: dict[bytes, object], tokens: np.ndarray) -> int:
    """Tokens that a storage query for `tokens` answers."""
    run = 0
    for digest in page_hashes(tokens, P):
        if digest.tobytes() not in storage:
            break
        run += P
    return run


def cut(tree: PrefixTree, tokens: np.ndarray, pages: int, how: str, fresh: int) -> None:
    """Cut the node of `tokens` after that many pages, by a match or by an insert that branches off."""
    front = tokens[: pages * P]
    if how == "match":
        tree.match_prefix(front)
    else:
        tree.insert(np.concatenate([front, key([1000 + fresh] * P)]), ids(pages + 1, fresh))


@pytest.mark.parametrize("how", ["match", "insert"])
@pytest.mark.parametrize("cuts", CUTS)
def test_case_8_a_cut_under_a_pending_backup_loses_no_page(cuts: tuple[int, ...], how: str) -> None:
    """Fault: the pending record points at what is only the suffix now; the first pages never reach storage.

    Right: one ack publishes every part: storage holds all 4 page keys of the uncut list, a query answers
    16 tokens, all parts count as backed up, and the host's Stored events cover 4 pages.
    """
    tree = PrefixTree(P, events=True)
    tokens = key(range(16))
    plan = tree.plan_backup(tree.insert(tokens, ids(4)).backup_nodes)
    host = {page: f"page {i}" for i, page in enumerate(range(50, 54))}
    ack = tree.begin_backup(plan.nodes, ids(4, 50))
    for i, pages in enumerate(cuts):
        cut(tree, tokens, pages, how, 100 * (i + 1))
    tree.take_events()

    done = tree.finish_backup(ack)
    assert len(done.nodes) == len(cuts) + 1
    stored = [event for event in tree.take_events() if event.tier == "host"]
    assert [h for event in stored for h in event.hashes] == event_hashes(page_hashes(tokens, P))
    storage: dict[bytes, object] = {}
    for node in done.nodes:
        info = tree.node_info(node)
        assert info.pending is None
        assert info.host_pages is not None
        for digest, page in zip(tree.page_hashes(node), info.host_pages.tolist(), strict=True):
            storage[digest.tobytes()] = host[page]
    want = [digest.tobytes() for digest in page_hashes(tokens, P)]
    assert storage == {digest: f"page {i}" for i, digest in enumerate(want)}
    assert leading_run(storage, tokens) == 16
    assert tree.host_tokens == 16
    assert tree.protected_tokens == 0
    tree.check_invariants()


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("cuts", CUTS)
def test_case_9_a_cut_hands_the_host_lock_to_both_parts(cuts: tuple[int, ...], on_device: bool) -> None:
    """Fault: the upper part does not inherit the host lock; its pages are reclaimed while storage reads them.

    Right: both parts carry the lock, reclaim yields none of their pages until it is given back, the bytes
    read are the original ones, and all counts are 0 after.
    """
    tree = PrefixTree(P)
    tokens = key(range(16))
    node = tree.insert(tokens, ids(4)).node
    back_up(tree, [node], ids(4, 50))
    if not on_device:
        assert tree.evict(4).demoted_nodes == [node]
    memory = {page: f"bytes {page}" for page in range(50, 54)}
    lock = tree.inc_host_lock_ref(node)  # a storage write reads these pages in place
    for pages in cuts:
        tree.match_prefix(tokens[: pages * P])
    for page in tree.evict_host(2).host_pages.tolist():
        memory[page] = "0xEE"
    assert memory == {page: f"bytes {page}" for page in range(50, 54)}

    parts = {tree.match_prefix(tokens[:end]).last_host_node for end in range(P, 17, P)}
    assert all(tree.node_info(part).host_lock_ref == 1 for part in parts)
    tree.dec_host_lock_ref(lock)
    assert all(tree.node_info(part).locks == (0, 0) for part in parts)
    assert len(tree.evict_host(4).host_pages) == 4
    tree.check_invariants()


def test_case_9_a_host_lock_taken_after_a_cut_covers_one_part() -> None:
    """Fault: giving back a lock walks over parts that it never covered.

    Right: the receipt remembers where its node began; other parts keep their own counts.
    """
    tree = PrefixTree(P)
    tokens = key(range(16))
    node = tree.insert(tokens, ids(4)).node
    back_up(tree, [node], ids(4, 50))
    whole = tree.inc_host_lock_ref(node)
    upper = tree.match_prefix(tokens[:8]).last_host_node
    lower = tree.inc_host_lock_ref(node)
    tree.match_prefix(tokens[:12])
    middle = tree.node_info(node).parent
    assert middle is not None
    counts = [tree.node_info(n).host_lock_ref for n in (upper, middle, node)]
    assert counts == [1, 2, 2]
    tree.dec_host_lock_ref(lower)
    assert [tree.node_info(n).host_lock_ref for n in (upper, middle, node)] == [1, 1, 1]
    tree.dec_host_lock_ref(whole)
    assert [tree.node_info(n).host_lock_ref for n in (upper, middle, node)] == [0, 0, 0]


def test_case_22_a_victim_without_room_is_dropped_whole() -> None:
    """Fault: the write-back gets no host page, and the victim still becomes a host-only node without a copy.

    Right: without room it is dropped whole: its device pages are free, it is counted, and it is no hit.
    """
    tree = PrefixTree(P, write_policy="write_back")
    a, b = key(range(100, 108)), key(range(8))
    node_b = tree.insert(b, ids(2)).node
    back_up(tree, tree.evict(2).write_back_nodes, ids(2, 50))
    node_a = tree.insert(a, ids(2, 10)).node
    load = tree.plan_load_back(node_b)
    ack = tree.begin_load_back(load, ids(2, 20))  # device 16 tokens; the host's 8 are being read
    assert len(tree.evict_host(2).host_pages) == 0

    done = tree.evict(2, host_room=0)
    assert done.device_pages.tolist() == [10, 11]
    assert (done.dropped_tokens, done.demoted_nodes, done.write_back_nodes) == (8, [], [])
    assert tree.peek_prefix(a).device_length + tree.peek_prefix(a).host_hit_length == 0
    with pytest.raises(KeyError, match=str(node_a)):
        tree.node_info(node_a)
    tree.finish_load_back(ack)
    assert tree.peek_prefix(b).device_length == 8
    tree.check_invariants()


@pytest.mark.parametrize("keep", ["host lock", "load-back", "pin"])
def test_case_22_a_victim_whose_descendants_are_in_use_stays(keep: str) -> None:
    """Fault: a victim is dropped though something below it is in use on the host.

    Right: it is skipped, evict reports 0, and it goes once its descendants are free.
    """
    tree = PrefixTree(P, write_policy="write_back")
    tokens = key(range(16))
    upper = tree.insert(tokens[:8], ids(2)).node
    lower = tree.insert(tokens, ids(4), prev_prefix_len=8).node
    back_up(tree, tree.evict(2).write_back_nodes, ids(2, 50))
    assert tree.node_info(lower).device_pages is None
    assert tree.node_info(upper).host_pages is None
    if keep == "host lock":
        lock = tree.inc_host_lock_ref(lower)
    elif keep == "load-back":
        plan = tree.plan_load_back(lower)
    else:
        pin = tree.pin(lower)
    done = tree.evict(2, host_room=0)
    assert (len(done.device_pages), len(done.host_pages), done.dropped_tokens) == (0, 0, 0)
    assert tree.peek_prefix(tokens).device_length == 8
    assert tree.peek_prefix(tokens).host_hit_length == 8
    tree.check_invariants()
    if keep == "host lock":
        tree.dec_host_lock_ref(lock)
    elif keep == "load-back":
        plan.cancel()
    else:
        tree.unpin(pin)
    done = tree.evict(2, host_room=0)
    assert (done.device_pages.tolist(), done.host_pages.tolist()) == ([0, 1], [50, 51])
    assert done.dropped_tokens == 16
    assert len(tree) == 0


def test_case_22_no_node_without_a_copy_when_room_runs_out() -> None:
    """Fault: a plan of several victims with room for some leaves one of them without a copy.

    Right: those that fit are written back, the others are dropped; each is one or the other.
    """
    for room in range(0, 14, 2):
        tree = PrefixTree(P, write_policy="write_back")
        for i in range(6):
            tree.insert(key(range(100 * i, 100 * i + 8)), ids(2, 2 * i))
        done = tree.evict(12, host_room=room)
        assert len(done.write_back_nodes) == room // 2
        assert len(done.device_pages) == 12 - room
        assert done.dropped_tokens == 4 * (12 - room)
        tree.check_invariants()
        if done.write_back_nodes:
            freed = back_up(tree, done.write_back_nodes, ids(room, 50)).device_pages
            assert sorted(freed.tolist() + done.device_pages.tolist()) == list(range(12))
        assert (tree.device_tokens, tree.host_tokens) == (0, 4 * room)
        tree.check_invariants()


def test_case_35_mirrors_on_host_do_not_starve_storage() -> None:
    """Fault: the host is full of copies of what is on device, and only device-evicted nodes are reclaimed.

    Right: unlocked mirrors can go: storage ends with 64 tokens, a prefetch of 8 gets its room, and the device
    keeps all it had. A host smaller than the device is legal.
    """
    tree, host = PrefixTree(P), Pool(4)
    storage: dict[bytes, int] = {}
    prefixes = [key(range(100 * i, 100 * i + 8)) for i in range(8)]
    for i, tokens in enumerate(prefixes):
        plan = tree.plan_backup(tree.insert(tokens, ids(2, 2 * i)).backup_nodes)
        if plan.pages > host.room:
            host.free(tree.evict_host(plan.pages - host.room).host_pages)
        done = tree.finish_backup(tree.begin_backup(plan.nodes, host.alloc(plan.pages)))
        for node in done.nodes:
            storage.update((digest.tobytes(), i) for digest in tree.page_hashes(node))
    assert [leading_run(storage, tokens) for tokens in prefixes] == [8] * 8
    assert len(storage) * P == 64

    host.free(tree.evict_host(2).host_pages)
    fetched = key(range(900, 908))
    assert tree.insert_host(tree.root, fetched, host.alloc(2)).inserted_pages == 2
    assert tree.peek_prefix(fetched).host_hit_length == 8
    assert tree.device_tokens == 64
    assert [tree.peek_prefix(tokens).device_length for tokens in prefixes] == [8] * 8
    tree.check_invariants()


def test_case_35_what_is_being_read_is_not_reclaimed() -> None:
    """Fault: making room takes a mirror that a storage write still reads, or one whose copy has not ended.

    Right: host-locked and pending copies stay; the others go.
    """
    tree = PrefixTree(P)
    nodes = [tree.insert(key(range(100 * i, 100 * i + 8)), ids(2, 2 * i)).node for i in range(3)]
    back_up(tree, nodes[:2], ids(4, 50))
    lock = tree.inc_host_lock_ref(nodes[0])
    ack = tree.begin_backup([nodes[2]], ids(2, 60))
    assert tree.evict_host(100).host_pages.tolist() == [52, 53]
    tree.dec_host_lock_ref(lock)
    tree.finish_backup(ack)
    assert sorted(tree.evict_host(100).host_pages.tolist()) == [50, 51, 60, 61]
    assert tree.device_tokens == 24
    back_up(tree, [nodes[0]], ids(2, 70))
    tree.evict(100)
    load_back(tree, nodes[0], ids(2, 80))
    assert tree.match_prefix(key(range(8))).device_pages.tolist() == [80, 81]
    tree.check_invariants()


def test_case_22_a_backup_of_nothing_publishes_nothing() -> None:
    """Fault: a plan in which nothing is left to copy has no valid end.

    Right: it can be begun, and its ack publishes nothing and frees nothing.
    """
    tree = PrefixTree(P)
    node = tree.insert(key(range(8)), ids(2)).node
    back_up(tree, [node], ids(2, 50))
    plan = tree.plan_backup([node])
    assert (plan.nodes, plan.pages) == ([], 0)
    before = tree.digest()
    done = tree.finish_backup(tree.begin_backup(plan.nodes, []))
    assert (done.nodes, len(done.device_pages)) == ([], 0)
    assert tree.digest() == before
    tree.check_invariants()
