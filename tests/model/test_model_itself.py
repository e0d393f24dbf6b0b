"""The model against numbers worked out by hand, so that both trees are not wrong in the same way."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.driver import Config, generate, make_config, model_factory, run, shrink
from tests.model.tree_model import (
    POLICIES,
    Cleared,
    LockError,
    ModelTree,
    Removed,
    Stored,
    event_hash,
    namespace_seed,
    page_hashes,
)

VECTORS = json.loads((Path(__file__).parent.parent / "data" / "vectors.json").read_text())


@pytest.mark.parametrize("vector", VECTORS)
def test_hash_vectors(vector: dict[str, Any]) -> None:
    names = {"extra_key": vector["extra_key"], "cache_salt": vector["cache_salt"]}
    digests = page_hashes(vector["tokens"], vector["page_size"], bigram=vector["bigram"], **names)
    assert [d.hex() for d in digests] == vector["digests"]
    assert [event_hash(d) for d in digests] == vector["event_hashes"]

    tree = ModelTree(vector["page_size"], bigram=vector["bigram"])
    node = tree.insert(vector["tokens"], list(range(len(digests))), **names).node
    assert tree.prefix_hashes(node) == digests


def test_a_chain_goes_on_from_its_parent() -> None:
    whole = page_hashes(range(12), 4, extra_key="a")
    assert page_hashes(range(4, 12), 4, parent=whole[0]) == whole[1:]
    assert page_hashes(range(4), 4, parent=namespace_seed(("a", None))) == whole[:1]


def test_case_6_a_full_hit_and_its_last_page_again() -> None:
    tree = ModelTree(16)
    tree.insert(range(48), [0, 1, 2])
    assert tree.match_prefix(range(48)).device_length == 48
    again = tree.insert(range(48), [0, 1, 9], prev_prefix_len=32)
    assert again.duplicate_pages == [9]
    assert again.device_pages == [0, 1, 2]
    assert tree.device_tokens == 48


def test_case_10_a_lock_covers_what_was_matched() -> None:
    tree = ModelTree(1, write_policy=None)
    tree.insert(range(1, 11), range(10))
    m = tree.match_prefix([1, 2, 3, 4, 5, 6, 99])
    assert m.device_length == 6
    lock = tree.inc_lock_ref(m.last_device_node)
    tree.insert([1, 2, 3, 4, 5, 6, 50, 51], [*range(6), 20, 21])
    assert tree.protected_tokens == 6
    tree.dec_lock_ref(lock)
    assert tree.protected_tokens == 0
    with pytest.raises(LockError):
        tree.dec_lock_ref(lock)
    assert sorted(tree.evict(100).device_pages) == [*range(10), 20, 21]
    assert len(tree) == 0


def test_case_12_less_than_a_page_leaves_no_trace() -> None:
    tree = ModelTree(64)
    tree.insert(range(64), [0])
    m = tree.match_prefix(range(63))
    assert (m.device_length, m.last_device_node, len(tree)) == (0, tree.root, 1)


def test_case_22_no_room_on_host_means_dropped() -> None:
    tree = ModelTree(4, write_policy="write_back")
    tree.insert(range(8), [0, 1])
    tree.insert(range(100, 108), [2, 3])
    e = tree.evict(2, host_room=0)
    assert (e.device_pages, e.write_back_nodes, e.dropped_tokens) == ([0, 1], [], 8)
    assert tree.match_prefix(range(8)).device_length == 0


def test_case_44_bigram_walks_stop_in_time() -> None:
    tree = ModelTree(64, bigram=True)
    anchor = tree.root
    tree.insert(range(65), [0])
    assert [tree.match_prefix(range(n)).device_length for n in (64, 65, 1, 0)] == [0, 64, 0, 0]
    for n in (64, 1, 0):
        assert tree.insert_host(anchor, range(n), []).inserted_pages == 0
    assert tree.insert_host(anchor, range(65), [7]).inserted_pages == 1


@pytest.mark.parametrize(
    "policy, victim",
    [
        ("lru", "b"),
        ("lfu", "b"),
        ("fifo", "a"),
        ("mru", "a"),
        ("filo", "c"),
        ("priority", "b"),
        ("slru", "b"),
    ],
)
def test_case_60_the_victim_after_a_touch(policy: str, victim: str) -> None:
    tree = ModelTree(1, eviction_policy=policy, write_policy=None)
    nodes = {name: tree.insert([token], [token]).node for token, name in enumerate("abc")}
    tree.match_prefix([0])
    assert tree.evict(1).device_pages == [list(nodes).index(victim)]


def test_priority_and_slru_keys() -> None:
    tree = ModelTree(1, eviction_policy="priority", write_policy=None)
    tree.insert([0], [0], priority=5)
    tree.insert([1], [1], priority=1)
    tree.insert([1], [1], priority=7)
    assert tree.evict(1).device_pages == [0]

    tree = ModelTree(1, eviction_policy="slru", write_policy=None)
    tree.insert([0], [0])
    tree.insert([0], [0])
    tree.insert([1], [1])
    assert tree.evict(1).device_pages == [1]  # the older one has two hits


def test_tlru_lets_the_safe_tail_go_first() -> None:
    # history is 10: with a threshold of 4 what begins at 6 or later can be computed again in time
    tree = ModelTree(1, eviction_policy="tlru", policy_options={"threshold": 4}, write_policy=None)
    tree.insert(range(50, 56), range(50, 56))  # history 6, begins at 0: not safe
    tree.insert(range(6), range(6))
    tree.insert(range(10), range(10), prev_prefix_len=6)
    assert tree.evict(4).device_pages == [6, 7, 8, 9]
    assert tree.evict(2).device_pages == [54, 55]


def test_the_last_victim_is_trimmed() -> None:
    tree = ModelTree(1, write_policy=None)
    old = tree.insert(range(10), range(10)).node
    assert tree.evict(3).device_pages == [7, 8, 9]
    assert tree.match_prefix(range(10)).device_pages == list(range(7))
    with pytest.raises(KeyError):
        tree.node_info(old)


def test_duplicates_adoption_and_hits() -> None:
    tree = ModelTree(2)
    first = tree.insert([0, 1, 2, 3], [10, 11])
    assert (first.prefix_len, first.backup_nodes) == (0, [first.node])
    tree.finish_backup(tree.begin_backup([first.node], [0, 1]))
    assert tree.evict(2).demoted_nodes == [first.node]
    # the evicted node takes the new pages, nothing is a duplicate there
    second = tree.insert([0, 1, 2, 3, 4, 5], [20, 21, 22])
    assert (second.prefix_len, second.duplicate_pages, second.device_pages) == (4, [], [20, 21, 22])
    third = tree.insert([0, 1, 2, 3, 4, 5], [20, 31, 32], prev_prefix_len=2, inserted_len=4)
    assert third.duplicate_pages == [31, 32]
    assert tree.node_info(first.node).hit_count == 2
    assert tree.node_info(third.node).hit_count == 2
    for wrong in (1, 8):
        with pytest.raises(ValueError):
            tree.insert([0, 1, 2, 3, 4, 5], [20, 21, 22], prev_prefix_len=wrong)


def test_one_ack_publishes_both_parts_of_a_cut_node() -> None:
    tree = ModelTree(4, events=True)
    a = tree.insert(range(16), [0, 1, 2, 3]).node
    ack = tree.begin_backup([a], [5, 6, 7, 8])
    tree.take_events()
    b = tree.insert([*range(8), *range(50, 58)], [0, 1, 4, 5], prev_prefix_len=8)
    upper = tree.node_info(a).parent
    assert upper is not None
    assert tree.node_info(a).host_pages == [7, 8]
    done = tree.finish_backup(ack)
    assert done.nodes == [upper, a]
    digests = [event_hash(d) for d in page_hashes(range(16), 4)]
    assert tree.take_events()[1:] == [
        Stored("host", digests[:2], None, list(range(8)), 4, None, None),
        Stored("host", digests[2:], digests[1], list(range(8, 16)), 4, None, None),
    ]
    assert tree.host_tokens == 16
    assert tree.evictable_tokens == 24
    assert tree.node_info(b.node).host_pages is None


def test_write_back_hold_backup_and_drop() -> None:
    tree = ModelTree(1, write_policy="write_back")
    a = tree.insert([1, 2, 3], [1, 2, 3]).node
    b = tree.insert([7, 8], [7, 8]).node
    assert tree.evict(4).write_back_nodes == [a, b]
    assert tree.protected_tokens == 5
    assert tree.drop([b]).device_pages == [7, 8]
    done = tree.finish_backup(tree.begin_backup([a], [0, 1, 2]))
    assert done.device_pages == [1, 2, 3]
    m = tree.match_prefix([1, 2, 3])
    assert (m.device_length, m.host_hit_length, m.last_host_node) == (0, 3, a)

    plan = tree.plan_load_back(a)
    ack = tree.begin_load_back(plan, [4, 5, 6])
    assert tree.match_prefix([1, 2]).pending_ack == ack
    assert tree.cancel_load_back(ack) == [4, 5, 6]
    assert tree.node_info(a).locks == (0, 0)


def chain(tree: ModelTree, *ends: int) -> list[int]:
    """Nodes below each other, made of the tokens 1, 2, ... up to each end; a token's page has its number."""
    nodes: list[int] = []
    done = 0
    for end in ends:
        key = range(1, end + 1)
        nodes.append(tree.insert(key, key, prev_prefix_len=done).node)
        done = end
    return nodes


def test_one_eviction_holds_a_whole_chain() -> None:
    tree = ModelTree(1, write_policy="write_back")
    a, b, c = chain(tree, 2, 3, 5)
    assert tree.evict(5).write_back_nodes == [c, b, a]
    assert [tree.node_info(n).lock_ref for n in (a, b, c)] == [3, 2, 1]
    # ancestors first, but only those that are in the list
    assert tree.plan_backup([c, b, a]).nodes == [a, b, c]
    assert tree.plan_backup([c, a]).nodes == [a, c]
    assert tree.plan_backup([c]).nodes == [c]
    done = tree.finish_backup(tree.begin_backup([a, b, c], range(11, 16)))
    assert (done.nodes, done.device_pages) == ([a, b, c], [4, 5, 3, 1, 2])
    assert tree.device_tokens == 0


def test_what_room_and_other_locks_say_to_a_chain() -> None:
    tree = ModelTree(1, write_policy="write_back")
    a, b, c = chain(tree, 2, 3, 5)
    assert tree.evict(5, host_room=3).write_back_nodes == [c, b]
    assert len(tree) == 3  # no room for a, which is not dropped with held nodes below it
    lock = tree.inc_lock_ref(a)
    assert tree.evict(5).write_back_nodes == []
    tree.dec_lock_ref(lock)
    d = tree.insert([1, 2, 7], [1, 2, 7], prev_prefix_len=2).node
    lock = tree.inc_lock_ref(d)
    assert tree.evict(5).write_back_nodes == []
    tree.dec_lock_ref(lock)
    assert tree.evict(5).write_back_nodes == [d, a]
    assert tree.node_info(a).lock_ref == 4
    # dropped from below, each is free of the holds under it
    assert tree.drop([c, b, d, a]).device_pages == [4, 5, 3, 7, 1, 2]
    assert len(tree) == 0


def test_a_node_above_held_ones_takes_its_turn_by_its_key() -> None:
    tree = ModelTree(1, write_policy="write_back")
    a, b = chain(tree, 1, 2)
    tree.insert([9], [9])
    assert tree.evict(2).write_back_nodes == [b, a]  # stamps: a 2, b 3, the other one 4

    tree = ModelTree(1, write_policy="write_back")
    (a,) = chain(tree, 1)
    tree.finish_backup(tree.begin_backup([a], [11]))
    b = tree.insert([1, 2], [1, 2], prev_prefix_len=1).node
    e = tree.evict(2)
    assert (e.write_back_nodes, e.demoted_nodes) == ([b], [])  # a has a copy: after the ack, by a later call
    assert tree.finish_backup(tree.begin_backup([b], [12])).device_pages == [2]
    assert tree.evict(1).demoted_nodes == [a]


def test_copies_wait_for_the_one_above() -> None:
    tree = ModelTree(1, events=True)
    a, b, c = chain(tree, 1, 2, 3)
    with pytest.raises(LockError):
        tree.begin_backup([b], [12])  # a gap above
    acks = [tree.begin_backup([n], [10 + i]) for i, n in enumerate((a, b, c), 1)]
    tree.take_events()
    for ack in (acks[2], acks[1]):
        assert tree.finish_backup(ack).nodes == []
    assert (tree.host_tokens, tree.pending_host_tokens) == (0, 3)
    assert [tree.node_info(n).pending for n in (a, b, c)] == [acks[0]] * 3
    assert tree.evict(1).demoted_nodes == [c]
    assert tree.insert_host(c, [4], [14]).inserted_pages == 1
    assert tree.evict_host(9).host_pages == []
    digests = [event_hash(d) for d in page_hashes([1, 2, 3, 4], 1)]
    assert tree.take_events() == [Removed("device", digests[2:3])]

    assert tree.finish_backup(acks[0]).nodes == [a, b, c, c + 1]
    assert (tree.host_tokens, tree.pending_host_tokens) == (4, 0)
    assert tree.take_events() == [
        Stored("host", digests[i : i + 1], digests[i - 1] if i else None, [i + 1], 1, None, None)
        for i in range(4)
    ]
    # a and b are mirrors with a backed child: the host leaves go, from below
    assert tree.evict_host(2).host_pages == [14, 13]
    assert tree.take_events() == [Removed("host", digests[3:4]), Removed("host", digests[2:3])]


def test_a_cancelled_copy_takes_those_that_wait_along() -> None:
    tree = ModelTree(1, events=True)
    a, b, c = chain(tree, 1, 2, 3)
    first, second = tree.begin_backup([a], [11]), tree.begin_backup([b, c], [12, 13])
    assert tree.finish_backup(second).nodes == []
    assert tree.evict(1).demoted_nodes == [c]
    tree.take_events()
    assert tree.cancel_backup(first) == [11, 12, 13]
    assert tree.take_events() == []  # nobody was told of them
    assert [n.id for n in tree.nodes()] == [a, b]
    assert (tree.host_tokens, tree.pending_host_tokens, tree.device_tokens) == (0, 0, 2)


def test_a_full_event_queue_does_not_tell_of_waiting_copies() -> None:
    tree = ModelTree(1, events=True, event_capacity=1)
    a, b = chain(tree, 1, 2)
    first, second = tree.begin_backup([a], [11]), tree.begin_backup([b], [12])
    tree.finish_backup(second)
    assert [e.tier for e in tree.take_events()[1:] if isinstance(e, Stored)] == ["device", "device"]
    tree.finish_backup(first)
    assert [e.tier for e in tree.take_events()[1:] if isinstance(e, Stored)] == ["device"] * 2 + ["host"] * 2


def test_under_write_back_no_copy_waits() -> None:
    tree = ModelTree(1, write_policy="write_back")
    a, b = chain(tree, 1, 2)
    first, second = tree.begin_backup([a], [11]), tree.begin_backup([b], [12])
    assert tree.finish_backup(second).nodes == [b]
    assert (tree.host_tokens, tree.pending_host_tokens) == (1, 1)
    assert tree.finish_backup(first).nodes == [a]


@pytest.mark.parametrize("state", ["locked", "device leaf", "host leaf"])
def test_a_pin_keeps_the_host_copy(state: str) -> None:
    tree = ModelTree(1)
    (a,) = chain(tree, 1)
    tree.finish_backup(tree.begin_backup([a], [11]))
    if state == "locked":
        tree.inc_lock_ref(a)
    if state == "host leaf":
        assert tree.evict(1).demoted_nodes == [a]
    pin = tree.pin(a)
    assert tree.evict_host(1).host_pages == []
    tree.unpin(pin)
    assert tree.evict_host(1).host_pages == [11]


def test_mirrors_go_before_host_leaves() -> None:
    tree = ModelTree(1)
    a = tree.insert([1], [1]).node
    b = tree.insert([1, 2], [1, 2], prev_prefix_len=1).node
    tree.finish_backup(tree.begin_backup([a, b], [11, 12]))
    tree.insert_host(tree.root, [9], [19])
    lock = tree.inc_lock_ref(b)
    # both are mirrors; the parent keeps its copy until the child's has gone
    assert tree.evict_host(1).host_pages == [12]
    assert tree.evict_host(2).host_pages == [11, 19]
    tree.dec_lock_ref(lock)
    assert tree.device_tokens == 2


def test_host_leaves_go_first_where_the_tree_is_told_so() -> None:
    tree = ModelTree(1, host_order="leaves_first")
    a = tree.insert([1], [1]).node
    b = tree.insert([1, 2], [1, 2], prev_prefix_len=1).node
    tree.finish_backup(tree.begin_backup([a, b], [11, 12]))
    tree.insert_host(tree.root, [9, 8], [19, 18])
    assert tree.evict_host(1).host_pages == [18]
    # when the leaf has gone, mirrors of nodes that stay on device, then one of a device leaf
    c = tree.insert([5], [5]).node
    tree.finish_backup(tree.begin_backup([c], [15]))
    lock = tree.inc_lock_ref(c)
    assert tree.evict_host(2).host_pages == [19, 15]
    assert tree.evict_host(9).host_pages == [12, 11]
    tree.dec_lock_ref(lock)
    assert (tree.device_tokens, tree.host_tokens) == (3, 0)


def test_a_path_names_the_loads_it_waits_for() -> None:
    tree = ModelTree(1)
    a = tree.insert([1, 2], [1, 2]).node
    b = tree.insert([1, 2, 3, 4], [1, 2, 3, 4], prev_prefix_len=2).node
    tree.finish_backup(tree.begin_backup([a, b], [11, 12, 13, 14]))
    tree.evict(4)
    first = tree.begin_load_back(tree.plan_load_back(a), [5, 6])
    second = tree.begin_load_back(tree.plan_load_back(b), [7, 8])
    middle = tree.match_prefix([1, 2, 3]).last_device_node
    waiting = [tree.pending_acks(n) for n in (tree.root, a, middle, b)]
    assert waiting == [[], [first], [first, second], [first, second]]
    tree.finish_load_back(first)
    assert tree.pending_acks(b) == [second]


def test_a_full_event_queue_tells_everything_anew() -> None:
    tree = ModelTree(1, events=True, event_capacity=2, write_policy=None)
    for token in range(3):
        tree.insert([token], [token])
    events = tree.take_events()
    assert events[0] == Cleared()
    assert [e.tokens for e in events if isinstance(e, Stored)] == [[0], [1], [2]]
    tree.evict(1)
    assert tree.take_events() == [Removed("device", [event_hash(page_hashes([0], 1)[0])])]


def test_reset_refuses_what_came_before() -> None:
    tree = ModelTree(1)
    root = tree.root
    node = tree.insert([1], [1]).node
    lock, plan, pin = tree.inc_lock_ref(node), tree.plan_load_back(node), tree.pin(node)
    ack = tree.begin_backup([node], [1])
    tree.reset()
    assert tree.root not in (root, node)
    for call in (
        lambda: tree.dec_lock_ref(lock),
        lambda: tree.begin_load_back(plan, []),
        plan.cancel,
        lambda: tree.unpin(pin),
        lambda: tree.finish_backup(ack),
    ):
        with pytest.raises(LockError):
            call()
    with pytest.raises(KeyError):
        tree.inc_lock_ref(node)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_driver_keeps_the_rules(policy: str) -> None:
    """The model against itself: accounts, invariants and mirror of the model alone."""
    for seed in range(4):
        config = make_config(seed, policy)
        assert run(generate(seed, 100, config), config, model_factory, every=3) is None


def test_the_driver_finds_and_shrinks_a_fault() -> None:
    class Forgetful(ModelTree):
        def evict(self, num_pages: int, *, host_room: int | None = None) -> Any:
            out = super().evict(num_pages, host_room=host_room)
            out.device_pages.reverse()
            return out

    def factory(config: Config) -> ModelTree:
        return Forgetful(**config.tree_arguments())

    failures = []
    for seed in range(20):
        config = make_config(seed, "lru")
        failures.append(run(generate(seed, 200, config), config, factory))
    found = [f for f in failures if f is not None]
    assert found
    # One that fails late, in a call that means something else by the time others are left out; and the next.
    assert found[0].step > 100
    for failure in found[:3]:
        shrunk = shrink(failure.script, failure.config, factory)
        assert shrunk is not None
        assert len(shrunk.script) <= 4
        assert run(shrunk.script, shrunk.config, factory, every=1) is not None
        assert "for tests/model/regressions.py" in shrunk.report()


def test_what_does_not_fail_is_not_shrunk() -> None:
    config = make_config(1, "lru")
    assert shrink(generate(1, 30, config), config, model_factory) is None
