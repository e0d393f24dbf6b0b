"""Bad arguments are refused by name and change nothing; every kind of token buffer gives the same result."""

import pickle
import types
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unified_cache import (
    ArgumentError,
    LockError,
    PrefixTree,
    UnifiedCacheError,
    UnknownNodeError,
    page_hashes,
)
from unified_cache.events import Cleared, Removed, Stored

TOP = 2**32 - 1
DEAD = 99_999


def ids(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.uint32)


def toks(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int64)


class Scene:
    """A tree of page size 4 with something of everything, and what a refused call must leave alone."""

    def __init__(self) -> None:
        self.tree = PrefixTree(4, pin_capacity=40)
        self.other = PrefixTree(4)
        self.node = self.tree.insert(toks(16), ids(4)).node
        self.deep = self.tree.insert(toks(24), ids(6), prev_prefix_len=16).node
        self.host_only = self.tree.insert_host(self.tree.root, toks(8, 500), ids(2, 50)).node
        self.pending = self.tree.insert(toks(8, 900), ids(2, 20)).node
        self.ack = self.tree.begin_backup([self.pending], ids(2, 60))

    def state(self) -> tuple[Any, ...]:
        tree = self.tree
        infos = [tree.node_info(n) for n in (self.node, self.deep, self.host_only, self.pending)]
        return (
            tree.digest(),
            len(tree),
            tree.evictable_tokens,
            tree.protected_tokens,
            tree.device_tokens,
            tree.host_tokens,
            tree.pending_host_tokens,
            tree.pinned_tokens,
            [(i.hit_count, i.priority, tuple(i.locks), i.pending, i.held, i.pins) for i in infos],
        )


def spent_lock(s: Scene) -> None:
    lock = s.tree.inc_lock_ref(s.node)
    s.tree.dec_lock_ref(lock)
    s.tree.dec_lock_ref(lock)


def spent_host_lock(s: Scene) -> None:
    lock = s.tree.inc_host_lock_ref(s.node)
    s.tree.dec_host_lock_ref(lock)
    s.tree.dec_host_lock_ref(lock)


def spent_pin(s: Scene) -> None:
    pin = s.tree.pin(s.node)
    s.tree.unpin(pin)
    s.tree.unpin(pin)


def expired_pin(s: Scene) -> None:
    pin = s.tree.pin(s.node, expires_at=5.0)
    assert s.tree.expire_pins(5.0) == 1
    s.tree.unpin(pin)


def spent_plan(s: Scene) -> None:
    plan = s.tree.plan_load_back(s.host_only)
    plan.cancel()
    s.tree.begin_load_back(plan, ids(2, 70))


def plan_cancelled_twice(s: Scene) -> None:
    plan = s.tree.plan_load_back(s.host_only)
    plan.cancel()
    plan.cancel()


def foreign_plan(s: Scene) -> None:
    other = s.other.insert_host(s.other.root, toks(8), ids(2)).node
    s.tree.begin_load_back(s.other.plan_load_back(other), ids(2, 70))


def spent_ack(s: Scene) -> None:
    other = PrefixTree(4)
    node = other.insert(toks(8), ids(2)).node
    ack = other.begin_backup([node], ids(2))
    other.finish_backup(ack)
    other.finish_backup(ack)


def foreign_ack(finish: str) -> Callable[[Scene], object]:
    def call(s: Scene) -> object:
        node = s.other.insert(toks(8), ids(2)).node
        return getattr(s.tree, finish)(s.other.begin_backup([node], ids(2)))

    return call


def wrong_page_count(s: Scene) -> None:
    plan = s.tree.plan_load_back(s.host_only)
    try:
        s.tree.begin_load_back(plan, ids(3, 70))
    finally:
        plan.cancel()


# Each: what it is, the class, words that the message must have, the call.
Bad = tuple[str, type[UnifiedCacheError], str, Callable[[Scene], object]]
BAD_CALLS: list[Bad] = [
    (
        "negative token",
        ArgumentError,
        r"tokens.*\b2\b",
        lambda s: s.tree.match_prefix(np.array([1, 2, -1, 4])),
    ),
    ("token too big", ArgumentError, r"tokens.*\b3\b", lambda s: s.tree.match_prefix([1, 2, 3, TOP + 1])),
    ("token far too big", ArgumentError, r"tokens.*\b1\b", lambda s: s.tree.match_prefix([1, 2**70, 3, 4])),
    (
        "bad token in the tail",
        ArgumentError,
        r"tokens.*\b5\b",
        lambda s: s.tree.match_prefix(np.array([0, 1, 2, 3, 4, -7])),
    ),
    ("bad token for peek", ArgumentError, r"tokens.*\b0\b", lambda s: s.tree.peek_prefix(np.array([-1] * 4))),
    (
        "negative int32 token",
        ArgumentError,
        r"tokens.*\b1\b",
        lambda s: s.tree.match_prefix(np.array([0, -1, 2, 3], np.int32)),
    ),
    (
        "bad token of an insert",
        ArgumentError,
        r"tokens.*\b19\b",
        lambda s: s.tree.insert(np.append(toks(19), -1), ids(5)),
    ),
    (
        "bad token of a host insert",
        ArgumentError,
        r"tokens.*\b3\b",
        lambda s: s.tree.insert_host(s.host_only, [1, 2, 3, -4], ids(1, 70)),
    ),
    (
        "bad token in a batch",
        ArgumentError,
        r"\b1\b",
        lambda s: s.tree.match_prefixes([toks(24), np.array([5, -1])]),
    ),
    (
        "too few extra keys",
        ArgumentError,
        "extra_keys",
        lambda s: s.tree.match_prefixes([toks(8)] * 2, extra_keys=["a"]),
    ),
    (
        "too many salts",
        ArgumentError,
        "cache_salts",
        lambda s: s.tree.match_prefixes([toks(8)], cache_salts=[None, "a"]),
    ),
    ("too few pages", ArgumentError, "pages", lambda s: s.tree.insert(toks(24), ids(5))),
    ("too many pages", ArgumentError, "pages", lambda s: s.tree.insert(toks(24), ids(7))),
    ("pages for no page", ArgumentError, "pages", lambda s: s.tree.insert(toks(3), ids(1))),
    ("negative page", ArgumentError, "pages", lambda s: s.tree.insert(toks(24), [0, 1, 2, 3, 4, -5])),
    ("page too big", ArgumentError, "pages", lambda s: s.tree.insert(toks(24), [0, 1, 2, 3, 4, TOP + 1])),
    (
        "unaligned prev_prefix_len",
        ArgumentError,
        "prev_prefix_len",
        lambda s: s.tree.insert(toks(24), ids(6), prev_prefix_len=6),
    ),
    (
        "prev_prefix_len past the device part",
        ArgumentError,
        "prev_prefix_len",
        lambda s: s.tree.insert(toks(28), ids(7), prev_prefix_len=28),
    ),
    (
        "prev_prefix_len on host",
        ArgumentError,
        "prev_prefix_len",
        lambda s: s.tree.insert(toks(8, 500), ids(2), prev_prefix_len=4),
    ),
    (
        "negative prev_prefix_len",
        ArgumentError,
        "prev_prefix_len",
        lambda s: s.tree.insert(toks(24), ids(6), prev_prefix_len=-4),
    ),
    (
        "negative inserted_len",
        ArgumentError,
        "inserted_len",
        lambda s: s.tree.insert(toks(24), ids(6), inserted_len=-1),
    ),
    (
        "too few host pages",
        ArgumentError,
        "host_pages",
        lambda s: s.tree.insert_host(s.host_only, toks(8), ids(1, 70)),
    ),
    (
        "too few hashes",
        ArgumentError,
        "hashes",
        lambda s: s.tree.insert_host(s.host_only, toks(8), ids(2, 70), hashes=np.zeros((1, 32), np.uint8)),
    ),
    (
        "hashes of the wrong width",
        ArgumentError,
        "hashes",
        lambda s: s.tree.insert_host(s.host_only, toks(8), ids(2, 70), hashes=np.zeros((2, 31), np.uint8)),
    ),
    (
        "another namespace",
        ArgumentError,
        "extra_key|namespace",
        lambda s: s.tree.insert_host(s.host_only, toks(8), ids(2, 70), extra_key="a"),
    ),
    ("negative pages to evict", ArgumentError, "num_pages", lambda s: s.tree.evict(-1)),
    ("negative host room", ArgumentError, "host_room", lambda s: s.tree.evict(0, host_room=-1)),
    ("negative host pages to evict", ArgumentError, "num_pages", lambda s: s.tree.evict_host(-1)),
    ("negative limit of host pages", ArgumentError, "limit", lambda s: s.tree.evictable_host_pages(-1)),
    ("node listed twice", ArgumentError, "nodes", lambda s: s.tree.begin_backup([s.node] * 2, ids(8, 70))),
    (
        "child before its parent",
        LockError,
        "stale",
        lambda s: s.tree.begin_backup([s.deep, s.node], ids(6, 70)),
    ),
    (
        "backup with too few pages",
        ArgumentError,
        "host_pages",
        lambda s: s.tree.begin_backup([s.node], ids(3, 70)),
    ),
    ("backup of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.begin_backup([DEAD], ids(1, 70))),
    (
        "backup of a pending node",
        LockError,
        "{pending}",
        lambda s: s.tree.begin_backup([s.pending], ids(2, 70)),
    ),
    (
        "backup of a host node",
        LockError,
        "{host_only}",
        lambda s: s.tree.begin_backup([s.host_only], ids(2, 70)),
    ),
    ("wrong count for a load-back", ArgumentError, "device_pages", wrong_page_count),
    ("lock of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.inc_lock_ref(DEAD)),
    ("host lock of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.inc_host_lock_ref(DEAD)),
    ("pin of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.pin(DEAD)),
    ("load-back of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.plan_load_back(DEAD)),
    ("info of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.node_info(DEAD)),
    ("acks of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.pending_acks(DEAD)),
    ("hashes of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.page_hashes(DEAD)),
    ("chain of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.prefix_hashes(DEAD)),
    (
        "anchor that is dead",
        UnknownNodeError,
        f"{DEAD}",
        lambda s: s.tree.insert_host(DEAD, toks(4), ids(1, 70)),
    ),
    ("drop of a dead node", UnknownNodeError, f"{DEAD}", lambda s: s.tree.drop([DEAD])),
    ("drop of a node not held", LockError, "{node}", lambda s: s.tree.drop([s.node])),
    ("lock given back twice", LockError, "{node}", spent_lock),
    ("host lock given back twice", LockError, "{node}", spent_host_lock),
    (
        "foreign lock",
        LockError,
        "",
        lambda s: s.tree.dec_lock_ref(s.other.inc_lock_ref(s.other.insert(toks(4), ids(1)).node)),
    ),
    (
        "foreign host lock",
        LockError,
        "",
        lambda s: s.tree.dec_host_lock_ref(s.other.inc_host_lock_ref(s.other.insert(toks(4), ids(1)).node)),
    ),
    ("pin ended twice", LockError, "{node}", spent_pin),
    ("pin that expired", LockError, "{node}", expired_pin),
    ("foreign pin", LockError, "", lambda s: s.tree.unpin(s.other.pin(s.other.insert(toks(4), ids(1)).node))),
    ("plan used after its cancel", LockError, "plan", spent_plan),
    ("plan cancelled twice", LockError, "plan", plan_cancelled_twice),
    ("foreign plan", LockError, "plan", foreign_plan),
    ("ack finished twice", LockError, "ack", spent_ack),
    ("foreign ack to finish_backup", LockError, "ack", foreign_ack("finish_backup")),
    ("foreign ack to cancel_backup", LockError, "ack", foreign_ack("cancel_backup")),
    ("foreign ack to finish_load_back", LockError, "ack", foreign_ack("finish_load_back")),
    ("foreign ack to cancel_load_back", LockError, "ack", foreign_ack("cancel_load_back")),
    ("ack of the other kind to finish", LockError, "ack", lambda s: s.tree.finish_load_back(s.ack)),
    ("ack of the other kind to cancel", LockError, "ack", lambda s: s.tree.cancel_load_back(s.ack)),
]


@pytest.mark.parametrize("what, error, words, call", BAD_CALLS, ids=[bad[0] for bad in BAD_CALLS])
def test_a_bad_call_is_refused_by_name_and_changes_nothing(
    what: str,
    error: type[UnifiedCacheError],
    words: str,
    call: Callable[[Scene], object],
) -> None:
    scene = Scene()
    before = scene.state()
    for name in ("node", "deep", "pending", "host_only"):
        words = words.replace(f"{{{name}}}", rf"\b{getattr(scene, name)}\b")
    with pytest.raises(error, match=words or None):
        call(scene)
    assert scene.state() == before
    scene.tree.check_invariants()


def test_a_pin_past_the_cap_is_refused() -> None:
    scene = Scene()
    tree = scene.tree
    pins = [tree.pin(scene.deep), tree.pin(scene.pending), tree.pin(scene.host_only)]
    assert tree.pinned_tokens == 40
    more = tree.insert(toks(4, 2000), ids(1, 90)).node
    before = scene.state()
    with pytest.raises(ArgumentError, match="pin_capacity"):
        tree.pin(more)
    assert scene.state() == before
    again = tree.pin(scene.node)  # covered already: costs nothing
    for pin in [*pins, again]:
        tree.unpin(pin)
    tree.unpin(tree.pin(more))
    assert tree.pinned_tokens == 0


def test_what_is_from_before_a_reset_is_refused() -> None:
    scene = Scene()
    tree = scene.tree
    old = {
        "dec_lock_ref": tree.inc_lock_ref(scene.node),
        "dec_host_lock_ref": tree.inc_host_lock_ref(scene.node),
        "unpin": tree.pin(scene.node),
        "finish_backup": scene.ack,
        "cancel_backup": scene.ack,
    }
    plan, root = tree.plan_load_back(scene.host_only), tree.root
    tree.reset()
    node = tree.insert(toks(16), ids(4)).node
    assert node not in (scene.node, scene.deep, scene.host_only, scene.pending, root)
    before = (tree.digest(), tree.protected_tokens, tree.evictable_tokens, tree.pinned_tokens)
    for name, receipt in old.items():
        with pytest.raises(LockError):
            getattr(tree, name)(receipt)
    with pytest.raises(LockError, match="plan"):
        tree.begin_load_back(plan, ids(2, 70))
    with pytest.raises(LockError, match="plan"):
        plan.cancel()
    for dead in (scene.node, root):
        with pytest.raises(UnknownNodeError, match=rf"\b{dead}\b"):
            tree.node_info(dead)
    assert before == (tree.digest(), tree.protected_tokens, tree.evictable_tokens, tree.pinned_tokens)
    tree.check_invariants()


def test_a_plan_that_went_stale_can_only_be_cancelled() -> None:
    scene = Scene()
    tree = scene.tree
    plan = tree.plan_load_back(scene.host_only)
    tree.insert(toks(8, 500), ids(2, 80))  # somebody computed it anew
    with pytest.raises(LockError, match="plan"):
        tree.begin_load_back(plan, ids(2, 70))
    assert tree.protected_tokens > 0
    plan.cancel()
    assert tuple(tree.node_info(scene.host_only).locks) == (0, 0)
    tree.check_invariants()


@pytest.mark.parametrize("what", ["backup", "pin", "insert_host"])
def test_without_a_host_tier_its_calls_are_refused(what: str) -> None:
    tree = PrefixTree(4, write_policy=None)
    node = tree.insert(toks(8), ids(2)).node
    before = tree.digest()
    calls: dict[str, Callable[[], object]] = {
        "backup": lambda: tree.begin_backup([node], ids(2)),
        "pin": lambda: tree.pin(node),
        "insert_host": lambda: tree.insert_host(node, toks(8), ids(2)),
    }
    with pytest.raises(ArgumentError, match="host"):
        calls[what]()
    assert tree.digest() == before
    tree.check_invariants()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"page_size": 0}, "page_size.*0.*256"),
        ({"page_size": 257}, "page_size.*257"),
        ({"page_size": -1}, "page_size.*-1"),
        ({"page_size": 2**80}, "page_size"),
        ({"eviction_policy": "lur"}, "eviction_policy.*lur.*" + ".*".join(PrefixTree.eviction_policies())),
        ({"eviction_policy": ""}, "eviction_policy"),
        ({"policy_options": {"threshold": 1}}, "policy_options.*threshold.*lru"),
        (
            {"eviction_policy": "slru", "policy_options": {"protected": 1}},
            "policy_options.*protected.*protected_threshold",
        ),
        (
            {"eviction_policy": "tlru", "policy_options": {"thresh": 1}},
            "policy_options.*thresh.*next_prompt_estimate",
        ),
        ({"eviction_policy": "slru", "policy_options": {"protected_threshold": -1}}, "protected_threshold"),
        (
            {"write_policy": "write_around"},
            "write_policy.*write_around.*write_through.*write_through_selective.*write_back",
        ),
        ({"write_through_threshold": -1}, "write_through_threshold"),
        ({"event_capacity": 0, "events": True}, "event_capacity"),
        ({"event_capacity": -1}, "event_capacity"),
        ({"pin_capacity": -1}, "pin_capacity"),
        ({"host_order": "first"}, "host_order.*first.*copies_first.*leaves_first"),
    ],
)
def test_a_bad_setting_is_refused_with_what_is_allowed(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        PrefixTree(**settings)


@pytest.mark.parametrize("page_size", [1, 3, 48, 256])
def test_every_page_size_from_1_to_256_is_allowed(page_size: int) -> None:
    tree = PrefixTree(page_size)
    assert len(tree.insert(toks(2 * page_size), ids(2)).device_pages) == 2


@pytest.mark.parametrize(
    "arguments, settings, words",
    [
        ((toks(8), 0), {}, "page_size"),
        ((toks(8), 257), {}, "page_size"),
        ((np.array([1, -1]), 1), {}, r"tokens.*\b1\b"),
        ((toks(8), 4), {"parent": b"short"}, "parent"),
        ((toks(8), 4), {"parent": bytes(33)}, "parent"),
    ],
)
def test_page_hashes_refuses_bad_arguments(
    arguments: tuple[Any, ...], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        page_hashes(*arguments, **settings)


class OnlyNumpy:
    """Like a CPU tensor without a buffer: all there is is `numpy()`."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def numpy(self) -> np.ndarray:
        return self._values


class OnlyDLPack:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._values.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


def read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


def strided(values: np.ndarray) -> np.ndarray:
    wide = np.full(3 * len(values), 77, values.dtype)
    wide[::3] = values
    return wide[::3]


GOOD: dict[str, Callable[[list[int]], Any]] = {
    "int64": lambda v: np.array(v, np.int64),
    "int32": lambda v: np.array(v, np.int32),
    "uint32": lambda v: np.array(v, np.uint32),
    "uint64": lambda v: np.array(v, np.uint64),
    "int16": lambda v: np.array(v, np.int16),
    "big-endian int64": lambda v: np.array(v, ">i8"),
    "big-endian int32": lambda v: np.array(v, ">i4"),
    "strided": lambda v: strided(np.array(v, np.int64)),
    "strided uint32": lambda v: strided(np.array(v, np.uint32)),
    "reversed view": lambda v: np.array(v[::-1], np.int64)[::-1],
    "read-only": lambda v: read_only(np.array(v, np.int64)),
    "array q": lambda v: array("q", v),
    "array i": lambda v: array("i", v),
    "array I": lambda v: array("I", v),
    "memoryview": lambda v: memoryview(array("q", v)),
    "list": list,
    "tuple": tuple,
    "range": lambda v: range(v[0], v[-1] + 1) if v else range(0),
    "list of numpy ints": lambda v: [np.int64(x) for x in v],
    "numpy()": lambda v: OnlyNumpy(np.array(v, np.int64)),
    "numpy() of int32": lambda v: OnlyNumpy(np.array(v, np.int32)),
    "DLPack": lambda v: OnlyDLPack(np.array(v, np.int64)),
    "DLPack of int32": lambda v: OnlyDLPack(np.array(v, np.int32)),
}


@pytest.mark.parametrize("kind", GOOD)
def test_every_kind_of_buffer_gives_the_same(kind: str) -> None:
    make = GOOD[kind]
    want = PrefixTree(4)
    want.insert(toks(22), ids(5, 30))
    tree = PrefixTree(4)
    values = list(range(22))
    first = tree.insert(make(values), make(list(range(30, 35))))
    assert first.device_pages.tolist() == [30, 31, 32, 33, 34]
    for length in (0, 3, 4, 15, 16, 22):
        for method in ("match_prefix", "peek_prefix"):
            got = getattr(tree, method)(make(values[:length]))
            assert got.device_length == length // 4 * 4
            assert got.device_pages.tolist() == list(range(30, 30 + length // 4))
        want.match_prefix(toks(length))
    assert [m.device_length for m in tree.match_prefixes([make(values), make(values[:5])])] == [20, 4]
    want.match_prefixes([toks(22), toks(5)])
    assert tree.digest() == want.digest()
    np.testing.assert_array_equal(page_hashes(make(values), 4), page_hashes(toks(22), 4))
    anchor = tree.insert_host(tree.root, make(values[1:9]), make([60, 61])).node
    host_pages = tree.node_info(anchor).host_pages
    assert host_pages is not None
    assert host_pages.tolist() == [60, 61]
    tree.check_invariants()


@pytest.mark.parametrize(
    "kind", ["uint32", "int64", "array I", "array q", "list", "strided uint32", "uint64"]
)
def test_the_largest_token_and_page_pass(kind: str) -> None:
    tree = PrefixTree(2)
    tree.insert(GOOD[kind]([TOP, 0, TOP, TOP]), GOOD[kind]([TOP, 0]))
    assert tree.match_prefix(GOOD[kind]([TOP, 0, TOP, TOP])).device_pages.tolist() == [TOP, 0]
    assert tree.match_prefix(GOOD[kind]([TOP, 0, TOP, 1])).device_length == 2


def test_torch_tensors_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    tree = PrefixTree(4)
    tree.insert(torch.arange(16), torch.arange(4))
    assert tree.match_prefix(torch.arange(16, dtype=torch.int32)).device_length == 16


ODD: dict[str, Callable[[], Any]] = {
    "float array": lambda: np.arange(8.0),
    "bool array": lambda: np.ones(8, bool),
    "complex array": lambda: np.ones(8, complex),
    "two dimensions": lambda: np.arange(8).reshape(2, 4),
    "no dimension": lambda: np.array(7),
    "object array": lambda: np.array(["a", None, 3, 4], object),
    "str": lambda: "12345678",
    "bytes": lambda: b"12345678",
    "nested list": lambda: [[1, 2, 3, 4], [5, 6, 7, 8]],
    "list of floats": lambda: [1.0, 2.0, 3.0, 4.0],
    "list of str": lambda: ["1", "2", "3", "4"],
    "list with None": lambda: [1, 2, None, 4],
    "None": lambda: None,
    "int": lambda: 7,
    "dict": lambda: {1: 2, 3: 4},
    "set": lambda: {1, 2, 3, 4},
    "array of floats": lambda: array("d", [1.0, 2.0, 3.0, 4.0]),
    "numpy() that gives floats": lambda: OnlyNumpy(np.arange(8.0)),
    "numpy() that gives none": lambda: OnlyNumpy(None),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_row_of_integers_is_refused(kind: str) -> None:
    scene = Scene()
    before = scene.state()
    value = ODD[kind]()
    for name, call in {
        "tokens": lambda: scene.tree.match_prefix(value),
        "tokens ": lambda: scene.tree.insert(value, ids(2, 90)),
        "pages": lambda: scene.tree.insert(toks(8), value),
        "host_pages": lambda: scene.tree.insert_host(scene.tree.root, toks(8), value),
    }.items():
        # TypeError is Python's own word for a value of the wrong type.
        with pytest.raises((ArgumentError, TypeError), match=name.strip()):
            call()
    assert scene.state() == before
    scene.tree.check_invariants()


def test_errors_of_the_caller_s_own_objects_come_through() -> None:
    class Broken:
        def numpy(self) -> np.ndarray:
            raise RuntimeError("the device is gone")

    tree = PrefixTree(4)
    with pytest.raises((RuntimeError, ArgumentError), match=r"the device is gone|tokens"):
        tree.match_prefix(Broken())
    tree.check_invariants()


def _endless() -> list[Any]:
    nested: list[Any] = []
    nested.append(nested)
    return nested


class _Boaster:
    """A sequence whose length is a lie."""

    def __len__(self) -> int:
        return 2**61

    def __getitem__(self, at: int) -> int:
        if at > 3:
            raise IndexError
        return at


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("parent", lambda t: page_hashes([1], 1, parent=_endless())),
        ("hashes", lambda t: t.insert_host(t.root, [1], [1], hashes=_endless())),
        ("hashes", lambda t: t.insert_host(t.root, [1], [1], hashes=["+f" * 32])),
        ("hashes", lambda t: t.insert_host(t.root, [1], [1], hashes=np.zeros((2, 16), np.uint8))),
        ("hashes", lambda t: t.insert_host(t.root, [1], [1], hashes={"a": 1})),
        ("keys", lambda t: t.match_prefixes(range(2**45))),
        ("keys", lambda t: t.match_prefixes(7)),
        ("extra_keys", lambda t: t.match_prefixes([[1]], extra_keys=[])),
        (r"extra_keys\[0\]", lambda t: t.match_prefixes([[1]], extra_keys=["\ud800"])),
        ("extra_key", lambda t: t.match_prefix([1], extra_key="\ud800")),
        ("cache_salt", lambda t: t.match_prefix([1], cache_salt=3)),
        ("priority", lambda t: t.insert([1], [1], priority=2**70)),
        ("priority", lambda t: t.insert([1], [1], priority=1.5)),
        ("num_pages", lambda t: t.evict(None)),
        ("nodes", lambda t: t.drop(5)),
        ("node", lambda t: t.inc_lock_ref("1")),
        ("expires_at", lambda t: t.pin(t.root, float("nan"))),
        ("expires_at", lambda t: t.pin(t.root, 10**400)),
        ("now", lambda t: t.expire_pins(float("nan"))),
        ("tokens", lambda t: t.match_prefix(types.MappingProxyType({1: 2}))),
        (r"page_size is 1180591620717411303424", lambda t: PrefixTree(2**70)),
        ("policy_options", lambda t: PrefixTree(eviction_policy="slru", policy_options=[1])),
        (
            "protected_threshold",
            lambda t: PrefixTree(eviction_policy="slru", policy_options={"protected_threshold": 2**70}),
        ),
        ("tier", lambda t: Removed("disk", [1])),
    ],
)
def test_odd_objects_are_refused_by_name(name: str, call: Callable[[PrefixTree], object]) -> None:
    tree = PrefixTree(1)
    before = tree.digest()
    with pytest.raises(ArgumentError, match=name):
        call(tree)
    assert (tree.digest(), len(tree)) == (before, 0)


def test_a_length_that_lies_is_not_believed() -> None:
    tree = PrefixTree(1)
    tree.insert([0, 1, 2, 3], [4, 5, 6, 7])
    assert tree.match_prefix(_Boaster()).device_pages.tolist() == [4, 5, 6, 7]


def test_options_may_come_from_any_mapping() -> None:
    PrefixTree(eviction_policy="slru", policy_options=types.MappingProxyType({"protected_threshold": 3}))


def test_ids_that_can_not_be_are_nodes_that_never_were() -> None:
    tree = PrefixTree(1)
    assert tree.plan_backup([-1, 2**70, 99]).nodes == []
    for node in (-1, 2**64, 99):
        with pytest.raises(UnknownNodeError, match=str(node)):
            tree.node_info(node)


def test_events_can_be_made_compared_and_pickled() -> None:
    tree = PrefixTree(2, events=True)
    tree.insert([1, 2, 3, 4], [0, 1], extra_key="a")
    tree.evict(1)
    stored, removed = tree.take_events()
    again = Stored(
        stored.tier, stored.hashes, stored.parent, stored.tokens, stored.page_size, stored.extra_key
    )
    assert (again, Removed("device", removed.hashes)) == (stored, removed)
    assert pickle.loads(pickle.dumps([stored, removed, Cleared()])) == [stored, removed, Cleared()]


def test_pages_of_a_result_are_one_array() -> None:
    tree = PrefixTree(1)
    done = tree.insert([1, 2], [3, 4])
    found = tree.match_prefix([1, 2])
    assert found.device_pages is found.device_pages
    assert done.device_pages is done.device_pages
    found.device_pages[:] = 9
    assert tree.match_prefix([1, 2]).device_pages.tolist() == [3, 4]


def test_what_waits_for_a_load_back_says_so() -> None:
    tree = PrefixTree(1)
    node = tree.insert([1, 2], [0, 1]).node
    tree.finish_backup(tree.begin_backup([node], [5, 6]))
    tree.evict(2)
    ack = tree.begin_load_back(tree.plan_load_back(node), [7, 8])
    plan = tree.plan_load_back(node)
    assert (plan.pages, plan.pending_ack) == (0, ack)
    assert tree.insert([1, 2], [7, 8]).pending_ack == ack
    below = tree.insert_host(node, [3], [9]).node
    above = tree.match_prefix([1]).last_device_node
    second = tree.begin_load_back(tree.plan_load_back(below), [10])
    waiting = [tree.pending_acks(n) for n in (tree.root, above, node, below)]
    assert waiting == [[], [ack], [ack], [ack, second]]
    tree.finish_load_back(ack)
    plan.cancel()
    assert tree.insert([1, 2], [7, 8]).pending_ack is None
    assert tree.pending_acks(below) == [second]


def test_what_a_full_host_gives_up_first_can_be_told() -> None:
    def tree(**settings: Any) -> PrefixTree:
        made = PrefixTree(1, **settings)
        both = made.insert([1], [1]).node
        made.finish_backup(made.begin_backup([both], [11]))
        made.insert_host(made.root, [2], [12])
        return made

    orders = ({}, {"host_order": "copies_first"}, {"host_order": "leaves_first"})
    assert [tree(**order).evict_host(1).host_pages.tolist() for order in orders] == [[11], [11], [12]]
    assert tree(host_order="leaves_first").evict_host(9).host_pages.tolist() == [12, 11]
