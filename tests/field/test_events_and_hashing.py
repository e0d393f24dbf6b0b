"""Events that are wrong or missing, and hashes computed again and again: field cases 39 and 48."""

import pytest

from tests.field.support import Caller, back_up, event_hashes, ids, key
from unified_cache import PrefixTree, page_hashes
from unified_cache.events import Cleared, Event, Mirror, Removed, Stored


def removals(events: list[Event]) -> list[tuple[str, list[int]]]:
    assert all(isinstance(event, Removed) for event in events)
    return [(event.tier, event.hashes) for event in events if isinstance(event, Removed)]


def test_case_39_a_chain_reclaimed_from_its_front_is_reported_in_full() -> None:
    """Fault: whether a page is in the tree is asked of its parent; once a is gone, b and c leave silently.

    Right: removed = {a, b, c}, each once, whatever the order.
    """
    tree = PrefixTree(4, write_policy="write_back", events=True)
    tokens = key(range(12))
    nodes = [tree.insert(tokens[:n], ids(n // 4), prev_prefix_len=n - 4).node for n in (4, 8, 12)]
    for i, node in enumerate(nodes):
        back_up(tree, [node], ids(1, 50 + i))
    tree.take_events()
    a, b, c = event_hashes(page_hashes(tokens, 4))
    freed = [tree.evict_host(1).host_pages.tolist() for _ in range(3)]
    assert freed == [[50], [51], [52]]
    assert removals(tree.take_events()) == [("host", [a]), ("host", [b]), ("host", [c])]


def test_case_39_a_subtree_dropped_at_once_is_reported_in_full() -> None:
    """Fault: dropping a node reports the node, and forgets what hung below it.

    Right: its device page and each host page below it, once; a mirror is empty after.
    """
    tree = PrefixTree(4, write_policy="write_back", events=True)
    tokens, mirror = key(range(12)), Mirror()
    nodes = [tree.insert(tokens[:n], ids(n // 4), prev_prefix_len=n - 4).node for n in (4, 8, 12)]
    for node in (nodes[2], nodes[1]):
        assert back_up(tree, tree.evict(1).write_back_nodes, ids(1, node)).nodes == [node]
    mirror.apply(tree.take_events())
    a, b, c = event_hashes(page_hashes(tokens, 4))
    assert (mirror.hashes("device"), mirror.hashes("host")) == ({a}, {b, c})

    done = tree.evict(1, host_room=0)
    assert (done.device_pages.tolist(), done.host_pages.tolist()) == ([0], [nodes[2], nodes[1]])
    assert done.dropped_tokens == 12
    events = tree.take_events()
    assert removals(events) == [("device", [a]), ("host", [c]), ("host", [b])]
    mirror.apply(events)
    assert len(mirror) == len(tree) == 0


@pytest.mark.parametrize("write_policy", [None, "write_through", "write_through_selective", "write_back"])
def test_case_39_a_mirror_stays_equal_to_the_tree(write_policy: str | None) -> None:
    """Fault: some mix of calls stores or removes pages without saying so, or says it twice.

    Right: at every moment stored minus removed = what each tier holds; parents come before children (the
    mirror refuses anything else). 10,000 random operations in all.
    """
    caller = Caller(seed=39, write_policy=write_policy)
    for i in range(2500):
        caller.step()
        if i % 10 == 0:
            for tier in ("device", "host"):
                held = sorted(caller.held_on(tier))
                assert held == sorted(caller.mirror.hashes(tier))
    caller.tree.reset()
    assert [type(event) for event in caller.tree.take_events()] == [Cleared]


def test_case_39_an_overflow_starts_anew_with_the_whole_content() -> None:
    """Fault: a full queue loses events, and the mirror is wrong for ever.

    Right: `Cleared`, then the whole content, parents first; from there on the mirror is right again.
    """
    tree = PrefixTree(4, events=True, event_capacity=8)
    tokens = key(range(40))
    for n in range(4, 41, 4):
        node = tree.insert(tokens[:n], ids(n // 4), prev_prefix_len=n - 4).node
    back_up(tree, [node], ids(10, 50))
    events = tree.take_events()
    assert isinstance(events[0], Cleared)
    mirror = Mirror()
    mirror.apply(events)
    want = set(event_hashes(page_hashes(tokens, 4)))
    assert mirror.hashes("device") == mirror.hashes("host") == want
    tree.evict(1)
    mirror.apply(tree.take_events())
    assert len(mirror.hashes("device")) == 9


def chain(tree: PrefixTree, pages: int, one_by_one: bool) -> int:
    tokens = key(range(pages * 4))
    node = tree.root
    for n in range(1, pages + 1) if one_by_one else [pages]:
        node = tree.insert(tokens[: 4 * n], ids(n), prev_prefix_len=4 * (n - 1) if one_by_one else 0).node
    return node


@pytest.mark.parametrize("one_by_one", [True, False])
def test_case_48_each_page_is_hashed_once_in_its_life(one_by_one: bool) -> None:
    """Fault: every event recomputes the chain from the root; load-back sends no parents.

    Right: exactly 512 page hashes for 512 pages, none for a cut, an eviction or a load-back; after the cut
    the suffix's parent is hash number 100; a load-back emits its pages parents first.
    """
    tree = PrefixTree(4, events=True)
    tokens = key(range(2048))
    hashes = event_hashes(page_hashes(tokens, 4))
    last = chain(tree, 512, one_by_one)
    mirror = Mirror()
    mirror.apply(tree.take_events())
    assert tree.page_hash_count == 512

    tree.match_prefix(tokens[:400])  # the cut at page 100
    back_up(tree, [last], ids(512, 1000))
    assert [h for event in tree.take_events() for h in event.hashes] == hashes
    assert len(tree.evict(412).demoted_nodes) == (412 if one_by_one else 1)
    removed = tree.take_events()
    assert sorted(h for event in removed for h in event.hashes) == sorted(hashes[100:])
    assert all(isinstance(event, Removed) and event.tier == "device" for event in removed)

    node = tree.match_prefix(tokens[:600]).last_host_node  # 50 pages past the device part
    plan = tree.plan_load_back(node)
    assert plan.pages == 50
    ack = tree.begin_load_back(plan, ids(50, 2000))
    tree.finish_load_back(ack)
    stored = tree.take_events()
    assert all(isinstance(event, Stored) and event.tier == "device" for event in stored)
    assert stored[0].parent == hashes[99]
    assert [h for event in stored for h in event.hashes] == hashes[100:150]
    parents = [event.parent for event in stored]
    assert parents == [hashes[99 + sum(len(e.hashes) for e in stored[:i])] for i in range(len(stored))]
    assert len(tree.prefix_hashes(last)) == 512
    assert tree.page_hash_count == 512


def test_case_48_lazy_hashing_never_starts_a_chain_in_the_middle() -> None:
    """Fault: a node whose parent is not hashed yet gets hashes that begin anew.

    Right: asking a deep node hashes its ancestors once, and every part then has the hashes of the whole key.
    """
    tree = PrefixTree(4)
    tokens = key(range(64))
    node = chain(tree, 16, one_by_one=True)
    assert tree.page_hash_count == 0
    tree.match_prefix(tokens[:20])
    own = tree.page_hashes(node)
    assert event_hashes(own) == event_hashes(page_hashes(tokens, 4))[15:]
    assert tree.page_hash_count == 16
    assert event_hashes(tree.prefix_hashes(node)) == event_hashes(page_hashes(tokens, 4))
    assert tree.page_hash_count == 16
