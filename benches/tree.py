#!/usr/bin/env python3
"""Micro-benchmarks of the prefix tree through its Python API, one row a kind of work.

Times are medians (evictions: means over a steady state) of single calls. They vary by up to 1.5 times
between machines and minutes, so compare ratios of one run: with --peer each row of ours is followed at once
by the same work on the tree core that SGLang ships, in the same process.

To get the peer (Python 3.11, torch):
    pip install torch
    pip download --no-deps --dest /tmp/peer sglang==0.5.23
    python -m zipfile -e /tmp/peer/sglang-*.whl /tmp/peer/unpacked
    python benches/tree.py --peer /tmp/peer/unpacked
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

import unified_cache
from unified_cache import PrefixTree, page_hashes

VOCABULARY = 32_000
rng = np.random.default_rng(20_251)


@dataclass(frozen=True)
class Row:
    """One kind of work: on our tree, and on the peer's if it can do that."""

    name: str
    unit: str
    goal: float
    ours: Callable[[], float]
    peer: Callable[[Peer], float] | None = None


# --- what is measured, whoever does it ---------------------------------------------------------------


def tokens(count: int, dtype: type = np.int64) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count).astype(dtype)


def pages(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.uint32)


def variants(key: np.ndarray, count: int = 8) -> list[np.ndarray]:
    """Copies of a key in buffers of their own, each with another last token: nothing can be remembered."""
    out = [key.copy() for _ in range(count)]
    for i, copy in enumerate(out):
        copy[-1] = VOCABULARY + i
    return out


def median_us(call: Callable[[Any], object], arguments: Iterable[Any]) -> float:
    times = []
    for argument in arguments:
        begin = time.perf_counter()
        call(argument)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def leaf(i: int) -> np.ndarray:
    """The i-th of many keys of one page each that share no page."""
    key = np.full(64, 7, np.int64)
    key[:2] = divmod(i, 60_000)
    return key


# --- our tree ----------------------------------------------------------------------------------------


def new_tree(page_size: int = 64, policy: str = "lru") -> PrefixTree:
    return PrefixTree(page_size, eviction_policy=policy, write_policy=None)


def grown(key: np.ndarray, step: int, page_size: int = 64) -> PrefixTree:
    """A tree that holds `key` as a chain of nodes of `step` tokens."""
    tree = new_tree(page_size)
    for end in range(step, len(key) + 1, step):
        tree.insert(key[:end], pages(end // page_size), prev_prefix_len=end - step)
    return tree


def match(length: int, step: int, page_size: int = 64, dtype: type = np.int64, calls: int = 48) -> float:
    key = tokens(length, dtype)
    tree = grown(key, step, page_size)
    keys = variants(key)
    for k in keys:  # the cut before the last page, and a check of what is timed
        assert tree.match_prefix(k).device_length == length - page_size
    return median_us(tree.match_prefix, (keys[i % len(keys)] for i in range(calls)))


def match_with_pages() -> float:
    key = tokens(131_072)
    tree, keys = grown(key, 512), variants(key)
    assert len(tree.match_prefix(keys[0]).device_pages) == 2047
    return median_us(lambda k: tree.match_prefix(k).device_pages, (keys[i % 8] for i in range(48)))


def insert_new() -> float:
    tree = new_tree()
    work = [(tokens(32_768), pages(512, 512 * i)) for i in range(30)]
    return median_us(lambda w: tree.insert(*w), work)


def insert_suffix() -> float:
    tree, key = new_tree(), tokens(8192)
    tree.insert(key, pages(128))
    work = [
        (np.concatenate([key, tokens(256)]), np.concatenate([pages(128), pages(4, 128 + 4 * i)]))
        for i in range(200)
    ]
    return median_us(lambda w: tree.insert(*w, prev_prefix_len=8192), work)


def lock_path() -> float:
    key = tokens(64_000)
    tree = grown(key, 128)
    node = tree.match_prefix(key).last_device_node
    return median_us(lambda _: tree.dec_lock_ref(tree.inc_lock_ref(node)), range(200))


def with_leaves(count: int, policy: str = "lru") -> PrefixTree:
    tree = new_tree(64, policy)
    for i in range(count):
        tree.insert(leaf(i), pages(1, i))
    return tree


def evict_one(leaves: int, policy: str = "lru", rounds: int = 2000) -> float:
    """A full cache: insert one leaf, touch another, evict one page. Only the eviction is timed."""
    tree, random_leaf, page, total = with_leaves(leaves, policy), random.Random(1), leaves, 0.0
    for i in range(rounds):
        tree.insert(leaf(leaves + i), pages(1, page))
        tree.match_prefix(leaf(random_leaf.randrange(leaves)))
        begin = time.perf_counter()
        done = tree.evict(1)
        total += time.perf_counter() - begin
        (page,) = done.device_pages.tolist()
    return total / rounds * 1e6


def evict_all(leaves: int = 200_000) -> float:
    tree = with_leaves(leaves)
    begin = time.perf_counter()
    done = tree.evict(leaves)
    took = time.perf_counter() - begin
    assert len(done.device_pages) == leaves
    return took / leaves * 1e6


def digests() -> float:
    return median_us(lambda k: page_hashes(k, 64), [tokens(131_072) for _ in range(20)]) * 1e3 / 131_072


MEMORY = """
import resource, numpy as np
from unified_cache import PrefixTree
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
rng = np.random.default_rng(3)
tree = PrefixTree(64, write_policy="write_through_selective")
pages = np.arange(8, dtype=np.uint32)
tree.insert(rng.integers(0, 32000, 512), pages)
before = resident()
for i in range(1, 20000):
    tree.insert(rng.integers(0, 32000, 512), pages + 8 * i)
print((resident() - before) / (19999 * 512))
"""


def memory() -> float:
    """Resident bytes a token, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True)
    return float(done.stdout)


# --- the peer's tree core ----------------------------------------------------------------------------


class Peer:
    """The tree core of an unpacked SGLang wheel: full attention only, token slots as int64 tensors."""

    def __init__(self, unpacked: Path) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch = torch
        found = sorted(unpacked.glob("**/rust_tree_core/mem_cache*.so"))
        if not found:
            raise FileNotFoundError(f"--peer: no rust_tree_core/mem_cache*.so below {unpacked}")
        spec = importlib.util.spec_from_file_location("mem_cache", found[0])
        assert spec is not None
        assert spec.loader is not None
        self.core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.core)
        sys.modules["mem_cache"] = self.core

    def tree(self, page_size: int = 64) -> Any:
        settings = self.core.TreeCoreInitParamsBinding(
            eviction_policy="lru", page_size=page_size, device="cpu"
        )
        return self.core.RustUnifiedTreeCoreBinding(settings, [0])

    def match(self, tree: Any, key: array[int]) -> Any:
        return tree.match_prefix(self.core.MatchParamsBinding(key))

    def insert(self, tree: Any, key: array[int], slots: Any, before: int = 0) -> None:
        tree.insert(self.core.InsertParamsBinding(key, slots, prev_prefix_len=before))

    def slots(self, count: int, start: int = 0) -> Any:
        return self.torch.arange(start, start + count)

    def grown(self, key: array[int], step: int, page_size: int = 64) -> Any:
        tree = self.tree(page_size)
        for end in range(step, len(key) + 1, step):
            self.insert(tree, key[:end], self.slots(end), end - step)
        return tree

    def evict(self, tree: Any, count: int) -> int:
        """Free that many token slots, in the steps that the binding asks for."""
        freed = 0
        tree.evict_device_start(0, count)
        while freed < count:
            step = tree.evict_device_next_node(0, {0: freed})
            if step.node_id is None:
                break
            gone = tree.evict_device_leaf(step.node_id)
            freed += sum(slots.numel() for frees in gone.new_device_frees.values() for slots in frees)
        tree.evict_device_end(0)
        return freed


def plain(key: np.ndarray) -> array[int]:
    return array("q", key.tobytes())


def peer_match(length: int, step: int, page_size: int = 64, calls: int = 48) -> Callable[[Peer], float]:
    def measure(peer: Peer) -> float:
        key = tokens(length)
        tree, keys = peer.grown(plain(key), step, page_size), [plain(k) for k in variants(key)]
        for k in keys:
            peer.match(tree, k)
        return median_us(lambda k: peer.match(tree, k), (keys[i % 8] for i in range(calls)))

    return measure


def peer_insert_new(peer: Peer) -> float:
    tree = peer.tree()
    work = [(plain(tokens(32_768)), peer.slots(32_768, 32_768 * i)) for i in range(30)]
    return median_us(lambda w: peer.insert(tree, *w), work)


def peer_insert_suffix(peer: Peer) -> float:
    tree, key, slots = peer.tree(), plain(tokens(8192)), peer.slots(8192)
    peer.insert(tree, key, slots)
    work = [
        (key + plain(tokens(256)), peer.torch.cat([slots, peer.slots(256, 8192 + 256 * i)]))
        for i in range(200)
    ]
    return median_us(lambda w: peer.insert(tree, *w, 8192), work)


def peer_lock_path(peer: Peer) -> float:
    key = plain(tokens(64_000))
    tree = peer.grown(key, 128)
    node = peer.match(tree, key).last_device_node_id

    def lock_and_unlock(_: object) -> None:
        held = tree.inc_lock_ref(node)
        release = peer.core.DecLockRefParamsBinding(
            node_id=held.node_id,
            skipped_lock_components=held.skipped_lock_components,
            component_lock_uuids=held.component_lock_uuids,
            component_host_lock_uuids=held.component_host_lock_uuids,
        )
        tree.dec_lock_ref(node, release)

    return median_us(lock_and_unlock, range(100))


def peer_with_leaves(peer: Peer, count: int) -> Any:
    tree = peer.tree()
    for i in range(count):
        peer.insert(tree, plain(leaf(i)), peer.slots(64, 64 * i))
    return tree


def peer_evict_one(leaves: int, rounds: int = 20) -> Callable[[Peer], float]:
    def measure(peer: Peer) -> float:
        tree, random_leaf, total = peer_with_leaves(peer, leaves), random.Random(1), 0.0
        for i in range(rounds):
            peer.insert(tree, plain(leaf(leaves + i)), peer.slots(64, 64 * (leaves + i)))
            peer.match(tree, plain(leaf(random_leaf.randrange(leaves))))
            begin = time.perf_counter()
            freed = peer.evict(tree, 64)
            total += time.perf_counter() - begin
            assert freed >= 64
        return total / rounds * 1e6

    return measure


def peer_evict_all(peer: Peer, leaves: int = 100_000) -> float:
    tree = peer_with_leaves(peer, leaves)
    begin = time.perf_counter()
    freed = peer.evict(tree, 64 * leaves)
    return (time.perf_counter() - begin) / (freed / 64) * 1e6


def peer_digests(peer: Peer) -> float:
    keys = [plain(tokens(131_072)) for _ in range(12)]
    return median_us(lambda k: peer.core.get_hash_str(k, None, 64), keys) * 1e3 / 131_072


# --- the table ---------------------------------------------------------------------------------------

LONG = 131_072
ROWS = [
    Row("match 131072, 1 node", "us", 30, lambda: match(LONG, LONG), peer_match(LONG, LONG)),
    Row("match 131072, 1 node, uint32", "us", 16, lambda: match(LONG, LONG, dtype=np.uint32)),
    Row("match 131072, 256 nodes, page 1", "us", 45, lambda: match(LONG, 512, 1), peer_match(LONG, 512, 1)),
    Row("match 131072, 256 nodes, page 64", "us", 45, lambda: match(LONG, 512), peer_match(LONG, 512)),
    Row("same, with its device pages", "us", 50, match_with_pages),
    Row(
        "match 8192 shared", "us", 3, lambda: match(8192, 8192, calls=400), peer_match(8192, 8192, calls=400)
    ),
    Row("match chain 500 x 128", "us", 40, lambda: match(64_000, 128), peer_match(64_000, 128)),
    Row("insert 32768 new", "us", 80, insert_new, peer_insert_new),
    Row("insert 256 after 8192", "us", 4, insert_suffix, peer_insert_suffix),
    Row("lock+unlock 500-node path", "us", 6, lock_path, peer_lock_path),
    Row("evict 1 page at 1000 leaves", "us", 1.5, lambda: evict_one(1000), peer_evict_one(1000)),
    Row("evict 1 page at 50000 leaves", "us", 1.5, lambda: evict_one(50_000), peer_evict_one(50_000)),
    Row("evict 1 page at 200000 leaves", "us", 1.5, lambda: evict_one(200_000), peer_evict_one(200_000)),
    Row("evict 1 page at 1000000 leaves", "us", 1.5, lambda: evict_one(1_000_000)),
    Row("evict 1 page at 50000 leaves, lfu", "us", 2, lambda: evict_one(50_000, "lfu")),
    Row("evict 1 page at 50000 leaves, priority", "us", 2, lambda: evict_one(50_000, "priority")),
    Row("evict all, per node", "us", 0.5, evict_all, peer_evict_all),
    Row("page digests, page 64", "ns/token", 3.1, digests, peer_digests),
    Row("memory, page 64, 512-token nodes", "B/token", 6, memory),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose name has this text")
    parser.add_argument(
        "--peer", type=Path, metavar="DIR", help="an unpacked sglang==0.5.23 wheel to run against"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.only in row.name]
    if not rows:
        parser.error(f"--only: no row's name has {arguments.only!r}")
    peer = None
    if arguments.peer is not None:
        try:
            peer = Peer(arguments.peer)
        except (ImportError, OSError) as error:
            print(f"benches/tree.py: {error}", file=sys.stderr)
            return 1

    results: list[dict[str, Any]] = []
    if not arguments.json:
        print(f"unified_cache {unified_cache.__version__}, {machine()}\n")
        print(f"{'work':40} {'ours':>9} {'goal':>7} {'peer':>9} {'ratio':>7}  unit")
    for row in rows:
        result = {"name": row.name, "unit": row.unit, "goal": row.goal, "ours": round(row.ours(), 3)}
        if peer is not None and row.peer is not None:
            result["peer"] = round(row.peer(peer), 3)
            result["ratio"] = round(result["peer"] / result["ours"], 1)
        results.append(result)
        if not arguments.json:
            other = f"{result['peer']:9.2f} {result['ratio']:6.1f}x" if "peer" in result else " " * 17
            short = "" if result["ours"] <= row.goal else "   past its goal"
            print(f"{row.name:40} {result['ours']:9.2f} {row.goal:7g} {other}  {row.unit}{short}", flush=True)
    if arguments.json:
        print(json.dumps({"version": unified_cache.__version__, "machine": machine(), "rows": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
