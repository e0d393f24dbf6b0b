"""Long calls of the native module let other Python threads run."""

import functools
import itertools
import operator
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from unified_cache import PrefixTree, page_hashes


def _counted_meanwhile(call: Callable[[], object]) -> int:
    """How far another thread counts between begin and end of a call, which must not run Python code itself.

    The other thread asks for the interpreter's lock during the sum. From then on whoever lets go of the lock
    waits until the other has got it; and `map` runs no Python code, which would let go by itself.
    """
    counted, stop = itertools.count(), threading.Event()

    def count() -> None:
        while not stop.is_set():
            next(counted)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        busy = functools.partial(sum, range(1_500_000))
        steps: list[Callable[[], Any]] = [busy, counted.__next__, call, counted.__next__]
        _, before, _, after = map(operator.call, steps)
    finally:
        stop.set()
        thread.join()
    return int(after - before - 1)


def _lets_others_run(prepare: Callable[[], Callable[[], object]]) -> bool:
    """Whether another thread counts during a call; on a busy machine it may have no processor."""
    return any(_counted_meanwhile(prepare()) > 0 for _ in range(20))


def test_long_calls_let_other_threads_run() -> None:
    tokens = np.arange(1_500_000, dtype=np.uint32)
    pages = np.arange(len(tokens) // 64, dtype=np.uint32)

    def insert() -> Callable[[], object]:
        return functools.partial(PrefixTree(64, events=True).insert, tokens, pages)

    def check() -> Callable[[], object]:
        tree = PrefixTree(64)
        tree.insert(tokens, pages)
        return tree.check_invariants

    assert _lets_others_run(lambda: functools.partial(page_hashes, tokens, 64))
    assert _lets_others_run(insert)
    assert _lets_others_run(check)


def test_short_calls_do_not() -> None:
    tree = PrefixTree(1)
    node = tree.insert([1], [1]).node
    ack = tree.begin_backup([node], [1])
    assert _counted_meanwhile(functools.partial(sum, range(1_000_000))) == 0
    assert _counted_meanwhile(functools.partial(tree.finish_backup, ack)) == 0
    assert _counted_meanwhile(functools.partial(tree.match_prefix, [1, 2, 3])) == 0


def _chain(tree: PrefixTree, length: int) -> int:
    """The last node of a path of `length` nodes of one token each."""
    tokens = np.arange(length, dtype=np.uint32)
    node = tree.insert(tokens, tokens).node
    for end in range(length - 1, 0, -1):
        tree.match_prefix(tokens[:end])
    return node


def test_what_begins_and_ends_large_copies_lets_other_threads_run() -> None:
    tree, length = PrefixTree(1), 5_000
    node, pages = _chain(tree, length), np.arange(length, dtype=np.uint32)
    nodes = tree.plan_backup([node]).nodes

    def cancel_backup() -> Callable[[], object]:
        return functools.partial(tree.cancel_backup, tree.begin_backup(nodes, pages))

    def finish_backup() -> Callable[[], object]:
        tree.evict_host(length)
        return functools.partial(tree.finish_backup, tree.begin_backup(nodes, pages))

    def cancel_plan() -> Callable[[], object]:
        return tree.plan_load_back(node).cancel

    def begin_load_back() -> Callable[[], object]:
        for ack in tree.pending_acks(node):
            tree.cancel_load_back(ack)
        return functools.partial(tree.begin_load_back, tree.plan_load_back(node), pages)

    def cancel_load_back() -> Callable[[], object]:
        begin_load_back()()
        return functools.partial(tree.cancel_load_back, *tree.pending_acks(node))

    def finish_load_back() -> Callable[[], object]:
        tree.evict(length)
        begin_load_back()()
        return functools.partial(tree.finish_load_back, *tree.pending_acks(node))

    assert _lets_others_run(cancel_backup)
    assert _lets_others_run(finish_backup)
    tree.evict(length)
    for prepare in (cancel_plan, begin_load_back, cancel_load_back, finish_load_back):
        assert _lets_others_run(prepare), prepare.__name__
    tree.check_invariants()
