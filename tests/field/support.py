"""What the field cases share: pools that know double frees, and a caller that makes random valid calls."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unified_cache import PrefixTree, page_hashes
from unified_cache.events import Mirror


class Pool:
    """Ids of the pages of one tier; a double or foreign free is an error at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def room(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> np.ndarray:
        assert count <= self.room
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return np.array(pages, np.uint32)

    def free(self, pages: Sequence[int] | np.ndarray) -> None:
        for page in map(int, pages):
            self._used.remove(page)
            self._free.append(page)


def key(*tokens: int | Sequence[int]) -> np.ndarray:
    """One int64 key from tokens and runs of tokens."""
    flat = [t for part in tokens for t in ([part] if isinstance(part, int) else part)]
    return np.array(flat, np.int64)


def ids(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.uint32)


def path(tree: PrefixTree, node: int) -> list[int]:
    """The nodes from below the root to `node`."""
    out = []
    while node != tree.root:
        out.append(node)
        parent = tree.node_info(node).parent
        assert parent is not None
        node = parent
    return out[::-1]


def event_hashes(digests: np.ndarray) -> list[int]:
    return [int.from_bytes(digest[:8].tobytes(), "big", signed=True) for digest in digests]


def back_up(tree: PrefixTree, nodes: Sequence[int], host_pages: Sequence[int] | np.ndarray) -> Any:
    """A backup whose ack comes at once."""
    plan = tree.plan_backup(list(nodes))
    return tree.finish_backup(tree.begin_backup(plan.nodes, host_pages))


def load_back(tree: PrefixTree, node: int, device_pages: Sequence[int] | np.ndarray) -> None:
    """A load-back whose ack comes at once."""
    tree.finish_load_back(tree.begin_load_back(tree.plan_load_back(node), device_pages))


@dataclass
class Caller:
    """Random valid calls on one tree, as an engine would make them, with page accounting on both tiers.

    `step` makes one call; `settle` ends everything that is under way, so that all locks must be 0 after it.
    """

    seed: int
    page_size: int = 2
    policy: str = "lru"
    write_policy: str | None = "write_through"
    bigram: bool = False
    device_pages: int = 60
    host_pages: int = 90
    namespaces: tuple[dict[str, str], ...] = ({}, {"extra_key": "a"}, {"extra_key": "a", "cache_salt": "s"})
    locks: list[Any] = field(default_factory=list)
    host_locks: list[Any] = field(default_factory=list)
    backups: list[Any] = field(default_factory=list)
    loads: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.tree = PrefixTree(
            self.page_size,
            eviction_policy=self.policy,
            write_policy=self.write_policy,
            bigram=self.bigram,
            events=True,
        )
        self.device = Pool(self.device_pages)
        self.host = Pool(self.host_pages if self.write_policy else 0)
        self.mirror = Mirror()
        self.keys = [self._new_key() for _ in range(40)]

    def _new_key(self) -> tuple[np.ndarray, dict[str, str]]:
        # Few distinct tokens: keys share prefixes of all lengths.
        pages = self.rng.randint(1, 8)
        tokens = [
            self.rng.choice((1, 1, 1, 2)) for _ in range(pages * self.page_size + self.rng.randint(0, 2))
        ]
        return key(tokens), self.rng.choice(self.namespaces)

    def any_key(self) -> tuple[np.ndarray, dict[str, str]]:
        tokens, namespace = self.rng.choice(self.keys)
        return tokens[: self.rng.randint(0, len(tokens))] if self.rng.random() < 0.4 else tokens, namespace

    def any_node(self) -> int:
        tokens, namespace = self.any_key()
        return self.tree.peek_prefix(tokens, **namespace).last_host_node

    def live_nodes(self) -> set[int]:
        """Every node: each is part of some key of this caller."""
        found = set()
        for tokens, namespace in self.keys:
            found.update(path(self.tree, self.tree.peek_prefix(tokens, **namespace).last_host_node))
        assert len(found) == len(self.tree)
        return found

    def positions(self, tokens: np.ndarray) -> int:
        return max(len(tokens) - 1, 0) if self.bigram else len(tokens)

    def step(self) -> str:
        """One random call; returns its name."""
        names = (
            ["insert"] * 4 + ["match"] * 4 + ["peek", "lock", "lock", "unlock", "unlock", "evict", "evict"]
        )
        if self.write_policy:
            names += ["backup", "backup", "finish_backup", "finish_backup", "cancel_backup", "evict_host"]
            names += ["load", "load", "finish_load", "cancel_load", "host_lock", "host_unlock", "insert_host"]
        name = self.rng.choice(names)
        getattr(self, name)()
        self.mirror.apply(self.tree.take_events())
        return name

    def match(self) -> None:
        tokens, namespace = self.any_key()
        self.tree.match_prefix(tokens, include_evicted=self.rng.random() < 0.7, **namespace)

    def peek(self) -> None:
        tokens, namespace = self.any_key()
        self.tree.peek_prefix(tokens, **namespace)

    def insert(self) -> None:
        tokens, namespace = self.any_key()
        borrowed = self.tree.match_prefix(tokens, **namespace)
        lock = self.tree.inc_lock_ref(borrowed.last_device_node)
        # Mostly the caller goes on from the pages it borrowed; sometimes it computed all of them itself.
        borrow = len(borrowed.device_pages) if self.rng.random() < 0.8 else 0
        missing = self.positions(tokens) // self.page_size - borrow
        if missing > self.device.room:
            self.make_room(missing - self.device.room)
        if missing <= self.device.room:
            pages = np.concatenate([borrowed.device_pages[:borrow], self.device.alloc(missing)])
            done = self.tree.insert(
                tokens,
                pages,
                prev_prefix_len=borrow * self.page_size,
                priority=self.rng.randint(0, 2),
                chunked=self.rng.random() < 0.2,
                **namespace,
            )
            self.device.free(done.duplicate_pages)
        self.tree.dec_lock_ref(lock)

    def evict(self) -> None:
        self.make_room(self.rng.randint(1, 6))

    def make_room(self, count: int) -> None:
        done = self.tree.evict(count, host_room=self.host.room)
        self.device.free(done.device_pages)
        self.host.free(done.host_pages)
        if done.write_back_nodes:
            if self.rng.random() < 0.2:
                gone = self.tree.drop(done.write_back_nodes)
                self.device.free(gone.device_pages)
                self.host.free(gone.host_pages)
            else:
                plan = self.tree.plan_backup(done.write_back_nodes)
                self.backups.append(self.tree.begin_backup(plan.nodes, self.host.alloc(plan.pages)))

    def evict_host(self) -> None:
        self.host.free(self.tree.evict_host(self.rng.randint(1, 6)).host_pages)

    def lock(self) -> None:
        self.locks.append(self.tree.inc_lock_ref(self.any_node()))

    def unlock(self) -> None:
        if self.locks:
            self.tree.dec_lock_ref(self.locks.pop(self.rng.randrange(len(self.locks))))

    def host_lock(self) -> None:
        self.host_locks.append(self.tree.inc_host_lock_ref(self.any_node()))

    def host_unlock(self) -> None:
        if self.host_locks:
            self.tree.dec_host_lock_ref(self.host_locks.pop(self.rng.randrange(len(self.host_locks))))

    def backup(self) -> None:
        plan = self.tree.plan_backup([self.any_node()])
        if plan.nodes and plan.pages <= self.host.room:
            self.backups.append(self.tree.begin_backup(plan.nodes, self.host.alloc(plan.pages)))

    def finish_backup(self) -> None:
        if self.backups:
            self.device.free(self.tree.finish_backup(self.backups.pop(0)).device_pages)

    def cancel_backup(self) -> None:
        if self.backups and not self.host_locks and not self.loads and not self.locks:
            # With nothing locked a cancel is never refused; it may end later backups of descendants too.
            self.host.free(self.tree.cancel_backup(self.backups.pop(0)))
            self.backups = [ack for ack in self.backups if self.pending(ack)]

    def pending(self, ack: Any) -> bool:
        return any(self.tree.node_info(node).pending == ack for node in self.live_nodes())

    def load(self) -> None:
        plan = self.tree.plan_load_back(self.any_node())
        if plan.pages > self.device.room:
            self.make_room(plan.pages - self.device.room)
        if plan.pages > self.device.room or self.rng.random() < 0.1:
            plan.cancel()
        else:
            self.loads.append((self.tree.begin_load_back(plan, self.device.alloc(plan.pages)), plan.pages))

    def finish_load(self) -> None:
        if self.loads:
            self.tree.finish_load_back(self.loads.pop(0)[0])

    def cancel_load(self) -> None:
        if len(self.loads) == 1 and not self.locks and not self.backups:
            ack, pages = self.loads[0]
            loaded = [n for n in self.live_nodes() if self.tree.node_info(n).pending == ack]
            below = [
                n for n in self.live_nodes() if self.tree.node_info(n).parent in loaded and n not in loaded
            ]
            if all(self.tree.node_info(n).device_pages is None for n in below):
                self.loads.clear()
                freed = self.tree.cancel_load_back(ack)
                assert len(freed) == pages
                self.device.free(freed)

    def insert_host(self) -> None:
        tokens, namespace = self.any_key()
        count = self.positions(tokens) // self.page_size
        if count <= self.host.room:
            done = self.tree.insert_host(self.tree.root, tokens, self.host.alloc(count), **namespace)
            self.host.free(done.duplicate_host_pages)

    def settle(self) -> None:
        """End what is under way, the oldest first."""
        while self.loads:
            self.finish_load()
        while self.backups:
            self.finish_backup()
        while self.locks:
            self.unlock()
        while self.host_locks:
            self.host_unlock()
        self.mirror.apply(self.tree.take_events())

    def owned(self) -> tuple[int, int]:
        """Pages that nodes hold: on device, and on host, pending ones included."""
        infos = [self.tree.node_info(node) for node in self.live_nodes()]
        return (
            sum(info.pages for info in infos if info.device_pages is not None),
            sum(info.pages for info in infos if info.host_pages is not None),
        )

    def check(self) -> None:
        """Invariants of the tree, and of the pools against it."""
        self.tree.check_invariants()
        device, host = self.owned()
        assert self.device.room + device == self.device.size
        assert self.host.room + host == self.host.size
        assert self.tree.device_tokens == device * self.page_size
        assert self.tree.evictable_tokens + self.tree.protected_tokens == self.tree.device_tokens
        assert self.tree.host_tokens + self.tree.pending_host_tokens == host * self.page_size

    def waits(self, node: int) -> bool:
        """True if the node's host copy, or one above it where host copies have no gaps, is not complete."""
        path = [node]
        while self.write_policy != "write_back" and (above := self.tree.node_info(path[-1]).parent):
            path.append(above)
        return any(getattr(self.tree.node_info(n).pending, "kind", None) == "backup" for n in path)

    def held_on(self, tier: str) -> Iterator[int]:
        """The event hashes of what the tree holds on a tier, asked of its nodes."""
        for node in self.live_nodes():
            info = self.tree.node_info(node)
            if tier == "device":
                there = info.device_pages is not None
            else:
                there = info.host_pages is not None and not self.waits(node)
            if there:
                yield from event_hashes(self.tree.page_hashes(node))


def hexes(tokens: np.ndarray, page_size: int, **namespace: str) -> list[str]:
    return [digest.tobytes().hex() for digest in page_hashes(tokens, page_size, **namespace)]
