"""The obvious prefix tree: what `unified_cache.PrefixTree` must do, written to be read.

Every sum is a walk over the whole tree, every eviction step a full sort, every hash is computed
anew from the first token. Nothing is kept that can be looked up. All lengths are positions: tokens,
or in bigram mode pairs of tokens. "Backed" means: has a host value, published or not; which of the two
is found out anew each time (`_published`).
"""

import hashlib
import itertools
import struct
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

Position = tuple[int, ...]
Namespace = tuple[str | None, str | None]

POLICIES: dict[str, dict[str, int]] = {
    "lru": {},
    "lfu": {},
    "fifo": {},
    "mru": {},
    "filo": {},
    "priority": {},
    "slru": {"protected_threshold": 2},
    "tlru": {"next_prompt_estimate": 0, "threshold": 0},
}
HOST_ORDERS = ("copies_first", "leaves_first")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back", None)

_tree_numbers = itertools.count()


class LockError(Exception):
    """A receipt, plan, pin or ack that does not belong here, or a state that forbids the call."""


class InvariantError(Exception):
    """The first rule found broken."""


# --- hashes ---------------------------------------------------------------------------------------


def namespace_seed(namespace: Namespace) -> bytes:
    if namespace == (None, None):
        return b""
    text = b"sglang-cache-namespace-v1"
    for part in namespace:
        if part is None:
            text += b"\x00"
        else:
            raw = part.encode("utf-8")
            text += b"\x01" + struct.pack("<Q", len(raw)) + raw
    return hashlib.sha256(text).digest()


def hash_positions(positions: Sequence[Position], page_size: int, before: bytes) -> list[bytes]:
    """Digests of the whole pages; `before` is the previous page's digest, the seed, or nothing."""
    digests = []
    for start in range(0, len(positions) - page_size + 1, page_size):
        tokens = [t for p in positions[start : start + page_size] for t in p]
        text = struct.pack(f"<{len(tokens)}I", *tokens)
        before = hashlib.sha256(before + text).digest()
        digests.append(before)
    return digests


def page_hashes(
    tokens: Iterable[int],
    page_size: int,
    *,
    parent: bytes | None = None,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    bigram: bool = False,
) -> list[bytes]:
    before = namespace_seed((extra_key, cache_salt)) if parent is None else bytes(parent)
    return hash_positions(make_positions(check_words(tokens, "token"), bigram), page_size, before)


def event_hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def check_words(values: Iterable[int], what: str) -> list[int]:
    """A list of our own, so that nothing is shared with the caller."""
    out = [int(v) for v in values]
    for at, value in enumerate(out):
        if not 0 <= value < 2**32:
            raise ValueError(f"{what} {value} at position {at} is not in 0..2^32-1")
    return out


def make_positions(tokens: list[int], bigram: bool) -> list[Position]:
    if bigram:
        return list(itertools.pairwise(tokens))
    return [(t,) for t in tokens]


def raw_tokens(positions: Sequence[Position]) -> list[int]:
    """n bigram positions come from n + 1 tokens."""
    if positions and len(positions[0]) == 2:
        return [p[0] for p in positions] + [positions[-1][1]]
    return [p[0] for p in positions]


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    tier: str
    hashes: list[int]
    parent: int | None
    tokens: list[int]
    page_size: int
    extra_key: str | None
    cache_salt: str | None


@dataclass(frozen=True)
class Removed:
    tier: str
    hashes: list[int]


@dataclass(frozen=True)
class Cleared:
    pass


Event = Stored | Removed | Cleared


# --- nodes and handles ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ack:
    tree: int
    epoch: int
    serial: int
    kind: str


@dataclass(eq=False)
class Node:
    id: int
    parent: "Node | None"
    namespace: Namespace
    key: list[Position]
    children: "list[Node]" = field(default_factory=list)
    value: list[int] | None = None
    host_value: list[int] | None = None
    hits: int = 0
    priority: int = 0
    created: int = 0
    last: int = 0
    history: int = 0
    lock_ref: int = 0
    host_lock_ref: int = 0
    pins: int = 0
    backup: Ack | None = None
    victim: bool = False
    load: Ack | None = None
    hold: "Hold | None" = None

    def path(self) -> "list[Node]":
        """Root first, without the root."""
        if self.parent is None:
            return []
        return [*self.parent.path(), self]

    def depth(self) -> int:
        """Where the node begins, in positions: a cut further up does not change it."""
        return self.begin()

    def begin(self) -> int:
        return self.end() - len(self.key)

    def end(self) -> int:
        return sum(len(n.key) for n in self.path())

    def descendants(self) -> "list[Node]":
        """Each before its own. Asked for all the time, so without a list a node."""
        out: list[Node] = []
        waiting = self.children[::-1]
        while waiting:
            node = waiting.pop()
            out.append(node)
            waiting += node.children[::-1]
        return out


@dataclass(eq=False)
class Span:
    """A node and where it began when it was noted: a cut leaves the id to the lower part, so the
    parts of the old node are those from this position down to the node."""

    node: Node
    begin: int

    def parts(self) -> list[Node]:
        return [n for n in self.node.path() if n.begin() >= self.begin]


def span(node: Node) -> Span:
    return Span(node, node.begin())


@dataclass(eq=False)
class Hold:
    """A write-back victim that waits for begin_backup or drop; one device lock, on the old id's path."""

    span: Span

    def parts(self) -> list[Node]:
        return [n for n in self.span.parts() if n.hold is self]


@dataclass(eq=False)
class LockReceipt:
    node: Node


@dataclass(eq=False)
class HostLockReceipt:
    span: Span


@dataclass(eq=False)
class Pin:
    node: Node
    expires_at: float | None


@dataclass(eq=False)
class BackupRecord:
    spans: list[Span]
    locked: list[Node]  # one device lock on the path of each


@dataclass(eq=False)
class LoadBackPlan:
    tree: "ModelTree"
    target: Node
    spans: list[Span]
    nodes: list[int]
    pages: int
    host_pages: list[int]

    def cancel(self) -> None:
        self.tree._cancel_plan(self)

    def parts(self) -> list[Node]:
        return [n for s in self.spans for n in s.parts()]


# --- results --------------------------------------------------------------------------------------


@dataclass
class Match:
    device_length: int
    device_pages: list[int]
    host_hit_length: int
    last_device_node: int
    last_host_node: int
    pending_ack: Ack | None


@dataclass
class Inserted:
    prefix_len: int
    duplicate_pages: list[int]
    device_pages: list[int]
    node: int
    backup_nodes: list[int]


@dataclass
class Evicted:
    device_pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    demoted_nodes: list[int] = field(default_factory=list)
    write_back_nodes: list[int] = field(default_factory=list)
    dropped_tokens: int = 0


@dataclass
class HostEvicted:
    host_pages: list[int] = field(default_factory=list)
    gone: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class BackupPlan:
    nodes: list[int]
    pages: int
    device_pages: list[int]


@dataclass
class BackupDone:
    nodes: list[int]
    device_pages: list[int]


@dataclass
class HostInserted:
    node: int
    duplicate_host_pages: list[int]
    inserted_pages: int


@dataclass
class NodeInfo:
    id: int
    pages: int
    device_pages: list[int] | None
    host_pages: list[int] | None
    parent: int | None
    hit_count: int
    priority: int
    lock_ref: int
    host_lock_ref: int
    pending: Ack | None
    held: bool
    pins: int

    @property
    def locks(self) -> tuple[int, int]:
        return (self.lock_ref, self.host_lock_ref)


def raise_first(faults: list[Exception]) -> None:
    """Raise the first fault; the rest go along, since nobody said which of two faults is named."""
    if faults:
        first = faults[0]
        first.faults = faults  # type: ignore[attr-defined]
        raise first


# --- the tree -------------------------------------------------------------------------------------


class ModelTree:
    def __init__(
        self,
        page_size: int = 1,
        *,
        eviction_policy: str = "lru",
        policy_options: dict[str, int] | None = None,
        write_policy: str | None = "write_through",
        write_through_threshold: int | None = None,
        bigram: bool = False,
        events: bool = False,
        event_capacity: int = 65536,
        pin_capacity: int | None = None,
        host_order: str = "copies_first",
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, must be at least 1")
        if eviction_policy not in POLICIES:
            raise ValueError(f"eviction_policy is {eviction_policy!r}, must be one of {list(POLICIES)}")
        if write_policy not in WRITE_POLICIES:
            raise ValueError(f"write_policy is {write_policy!r}, must be one of {WRITE_POLICIES}")
        if host_order not in HOST_ORDERS:
            raise ValueError(f"host_order is {host_order!r}, must be one of {HOST_ORDERS}")
        for name in policy_options or {}:
            if name not in POLICIES[eviction_policy]:
                raise ValueError(f"policy {eviction_policy} has no option {name!r}")
        self.page_size = page_size
        self.eviction_policy = eviction_policy
        self.options = {**POLICIES[eviction_policy], **(policy_options or {})}
        self.write_policy = write_policy
        if write_through_threshold is None:
            write_through_threshold = 3 if write_policy == "write_through_selective" else 1
        self.threshold = write_through_threshold
        self.bigram = bigram
        self.events_on = events
        self.event_capacity = event_capacity
        self.pin_capacity = pin_capacity
        self.host_order = host_order
        self.number = next(_tree_numbers)
        self.epoch = 0
        self.next_id = 0
        self.counter = 0
        self.next_serial = 0
        self.queue: list[Event] = []
        self.overflow = False
        self._start_empty()

    def _start_empty(self) -> None:
        self.root_node = self._new_node(None, (None, None), [])
        self.lock_receipts: list[LockReceipt] = []
        self.host_lock_receipts: list[HostLockReceipt] = []
        self.pin_list: list[Pin] = []
        self.holds: list[Hold] = []
        self.plans: list[LoadBackPlan] = []
        self.backups: dict[Ack, BackupRecord] = {}
        self.loads: dict[Ack, LoadBackPlan] = {}

    # --- small helpers

    @staticmethod
    def eviction_policies() -> list[str]:
        return list(POLICIES)

    @property
    def root(self) -> int:
        return self.root_node.id

    def nodes(self) -> list[Node]:
        """All nodes without the root."""
        return self.root_node.descendants()

    def __len__(self) -> int:
        return len(self.nodes())

    def _new_node(self, parent: Node | None, namespace: Namespace, key: list[Position]) -> Node:
        node = Node(self.next_id, parent, namespace, key)
        self.next_id += 1
        if parent is not None:
            parent.children.append(node)
        return node

    def _new_ack(self, kind: str) -> Ack:
        self.next_serial += 1
        return Ack(self.number, self.epoch, self.next_serial, kind)

    def _find(self, node_id: int) -> Node:
        for node in [self.root_node, *self.nodes()]:
            if node.id == node_id:
                return node
        raise KeyError(f"node {node_id} is unknown or dead")

    def _is_live(self, node_id: int) -> bool:
        return any(n.id == node_id for n in [self.root_node, *self.nodes()])

    def _pages(self, node: Node) -> int:
        return len(node.key) // self.page_size

    def _writes_through(self) -> bool:
        return self.write_policy in ("write_through", "write_through_selective")

    def _published(self, node: Node) -> bool:
        """The host copy is complete and, under the write_through policies, hangs on published ones
        up to the root."""
        if node.host_value is None or node.backup is not None:
            return False
        if not self._writes_through() or node.parent is self.root_node:
            return True
        return node.parent is not None and self._published(node.parent)

    def _whole_pages(self, tokens: Iterable[int]) -> list[Position]:
        positions = make_positions(check_words(tokens, "token"), self.bigram)
        return positions[: len(positions) // self.page_size * self.page_size]

    def _stamp(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.counter += 1
            node.last = self.counter

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children.remove(node)
        node.parent = None

    # --- sums, each a walk

    @property
    def device_tokens(self) -> int:
        return sum(len(n.key) for n in self.nodes() if n.value is not None)

    @property
    def evictable_tokens(self) -> int:
        return sum(len(n.key) for n in self.nodes() if n.value is not None and n.lock_ref == 0)

    @property
    def protected_tokens(self) -> int:
        return sum(len(n.key) for n in self.nodes() if n.value is not None and n.lock_ref > 0)

    @property
    def host_tokens(self) -> int:
        return sum(len(n.key) for n in self.nodes() if self._published(n))

    @property
    def pending_host_tokens(self) -> int:
        """Copies that are under way, and complete ones that wait for their parent."""
        return sum(len(n.key) for n in self.nodes() if n.host_value is not None and not self._published(n))

    @property
    def pinned_tokens(self) -> int:
        return sum(len(n.key) for n in self.nodes() if n.pins > 0)

    # --- walking and cutting

    def _child(self, node: Node, namespace: Namespace, page: list[Position]) -> Node | None:
        for child in node.children:
            # below the root all namespaces agree already
            if child.namespace == namespace and child.key[: self.page_size] == page:
                return child
        return None

    def _walk(
        self, start: Node, namespace: Namespace, key: list[Position], include_evicted: bool = True
    ) -> list[tuple[Node, int]]:
        """The nodes that the key meets, each with how much of it is covered; only the last can be partial."""
        size = self.page_size
        found = []
        node = start
        while len(key) >= size:
            child = self._child(node, namespace, key[:size])
            if child is None or (child.value is None and not include_evicted):
                break
            same = 0
            while same < len(child.key) and child.key[same : same + size] == key[same : same + size]:
                same += size
            found.append((child, same))
            if same < len(child.key):
                break
            node = child
            key = key[same:]
        return found

    def _cut(self, node: Node, at: int) -> Node:
        """Split `node` at position `at` of its own key; the new upper part is returned."""
        assert 0 < at < len(node.key)
        assert at % self.page_size == 0
        assert node.parent is not None
        parent = node.parent
        pages = at // self.page_size
        parent.children.remove(node)
        upper = self._new_node(parent, node.namespace, node.key[:at])
        node.key = node.key[at:]
        if node.value is not None:
            upper.value, node.value = node.value[:pages], node.value[pages:]
        if node.host_value is not None:
            upper.host_value, node.host_value = node.host_value[:pages], node.host_value[pages:]
        upper.hits = node.hits
        upper.priority = node.priority
        upper.created = node.created
        upper.last = node.last
        upper.history = node.history
        upper.lock_ref = node.lock_ref
        upper.host_lock_ref = node.host_lock_ref
        upper.pins = node.pins
        upper.backup = node.backup
        upper.victim = node.victim
        upper.load = node.load
        upper.hold = node.hold
        upper.children = [node]
        node.parent = upper
        return upper

    def _cut_where_it_ends(self, found: list[tuple[Node, int]]) -> list[Node]:
        return [node if same == len(node.key) else self._cut(node, same) for node, same in found]

    # --- match

    def match_prefix(
        self,
        tokens: Iterable[int],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        include_evicted: bool = True,
    ) -> Match:
        key = self._whole_pages(tokens)
        found = self._walk(self.root_node, (extra_key, cache_salt), key, include_evicted)
        path = self._cut_where_it_ends(found)
        self._stamp(path)
        return self._match_result([(n, len(n.key)) for n in path])

    def peek_prefix(
        self,
        tokens: Iterable[int],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        include_evicted: bool = True,
    ) -> Match:
        key = self._whole_pages(tokens)
        return self._match_result(self._walk(self.root_node, (extra_key, cache_salt), key, include_evicted))

    def match_prefixes(
        self,
        keys: Sequence[Iterable[int]],
        *,
        extra_keys: Sequence[str | None] | None = None,
        cache_salts: Sequence[str | None] | None = None,
    ) -> list[Match]:
        if extra_keys is not None and len(extra_keys) != len(keys):
            raise ValueError("extra_keys must have one entry a key")
        if cache_salts is not None and len(cache_salts) != len(keys):
            raise ValueError("cache_salts must have one entry a key")
        checked = [check_words(key, "token") for key in keys]  # all before the first one changes anything
        return [
            self.match_prefix(
                key,
                extra_key=extra_keys[i] if extra_keys is not None else None,
                cache_salt=cache_salts[i] if cache_salts is not None else None,
            )
            for i, key in enumerate(checked)
        ]

    def _match_result(self, found: list[tuple[Node, int]]) -> Match:
        size = self.page_size
        device = [(n, same) for n, same in found if n.value is not None]
        host = [(n, same) for n, same in found if n.value is None]
        whole = [n for n, same in found if same == len(n.key)]
        whole_device = [n for n in whole if n.value is not None]
        pages = []
        for node, same in device:
            assert node.value is not None
            pages += node.value[: same // size]
        loads = [n.load for n, _ in device if n.load is not None]
        return Match(
            device_length=sum(same for _, same in device),
            device_pages=pages,
            host_hit_length=sum(same for _, same in host),
            last_device_node=whole_device[-1].id if whole_device else self.root,
            last_host_node=whole[-1].id if whole else self.root,
            pending_ack=max(loads, key=lambda ack: ack.serial) if loads else None,
        )

    # --- insert

    def insert(
        self,
        tokens: Iterable[int],
        pages: Iterable[int],
        *,
        prev_prefix_len: int = 0,
        inserted_len: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        chunked: bool = False,
    ) -> Inserted:
        size = self.page_size
        namespace = (extra_key, cache_salt)
        key = self._whole_pages(tokens)
        given = check_words(pages, "page")
        if len(given) != len(key) // size:
            raise ValueError(f"{len(given)} pages given for {len(key) // size}")
        if prev_prefix_len < 0 or prev_prefix_len % size:
            raise ValueError(f"prev_prefix_len {prev_prefix_len} is not a multiple of the page size")
        if inserted_len < 0:
            raise ValueError(f"inserted_len {inserted_len} is negative")
        found = self._walk(self.root_node, namespace, key)
        if prev_prefix_len > sum(same for n, same in found if n.value is not None):
            raise ValueError(f"prev_prefix_len {prev_prefix_len} is past the part on device")

        path = self._cut_where_it_ends(found)
        prefix_len = sum(len(n.key) for n in path)
        duplicates = []
        at = 0
        for node in path:
            mine = given[at // size : (at + len(node.key)) // size]
            if node.value is None:
                node.value = mine
                self._emit_stored(node, "device")
            else:
                for i, (page, own) in enumerate(zip(mine, node.value, strict=True)):
                    if at + i * size >= prev_prefix_len and page != own:
                        duplicates.append(page)
            at += len(node.key)
        if prefix_len < len(key):
            new = self._new_node(path[-1] if path else self.root_node, namespace, key[prefix_len:])
            new.value = given[prefix_len // size :]
            new.priority = priority
            path.append(new)
            self._emit_stored(new, "device")
            self._raise_history(new)
        self._stamp(path)
        if prefix_len < len(key):
            path[-1].created = path[-1].last
        backup_nodes = []
        for node in path:
            node.priority = max(node.priority, priority)
            if not chunked and node.end() > inserted_len:
                node.hits += 1
                if self._writes_through() and node.hits >= self.threshold and node.host_value is None:
                    backup_nodes.append(node.id)
        return Inserted(
            prefix_len=prefix_len,
            duplicate_pages=duplicates,
            device_pages=[p for n in path for p in n.value or []],
            node=path[-1].id if path else self.root,
            backup_nodes=backup_nodes,
        )

    def _raise_history(self, made: Node) -> None:
        for node in made.path():
            node.history = max(node.history, made.end())

    # --- locks

    def _lock_path(self, node: Node) -> None:
        for n in node.path():
            n.lock_ref += 1

    def _unlock_path(self, node: Node) -> None:
        for n in node.path():
            n.lock_ref -= 1

    def inc_lock_ref(self, node: int) -> LockReceipt:
        receipt = LockReceipt(self._find(node))
        self._lock_path(receipt.node)
        self.lock_receipts.append(receipt)
        return receipt

    def dec_lock_ref(self, receipt: LockReceipt) -> None:
        if receipt not in self.lock_receipts:
            raise LockError(f"no such lock on node {receipt.node.id}")
        self.lock_receipts.remove(receipt)
        self._unlock_path(receipt.node)

    def inc_host_lock_ref(self, node: int) -> HostLockReceipt:
        found = self._find(node)
        receipt = HostLockReceipt(span(found))
        if found is not self.root_node:
            found.host_lock_ref += 1
        self.host_lock_receipts.append(receipt)
        return receipt

    def dec_host_lock_ref(self, receipt: HostLockReceipt) -> None:
        if receipt not in self.host_lock_receipts:
            raise LockError(f"no such host lock on node {receipt.span.node.id}")
        self.host_lock_receipts.remove(receipt)
        for node in receipt.span.parts():
            node.host_lock_ref -= 1

    # --- eviction

    def _policy_key(self, node: Node) -> tuple[int, ...]:
        if self.eviction_policy == "lru":
            return (node.last,)
        if self.eviction_policy == "lfu":
            return (node.hits, node.last)
        if self.eviction_policy == "fifo":
            return (node.created,)
        if self.eviction_policy == "mru":
            return (-node.last,)
        if self.eviction_policy == "filo":
            return (-node.created,)
        if self.eviction_policy == "priority":
            return (node.priority, node.last)
        if self.eviction_policy == "slru":
            return (int(node.hits >= self.options["protected_threshold"]), node.last)
        assert self.eviction_policy == "tlru"
        needed = node.history + self.options["next_prompt_estimate"] - self.options["threshold"]
        return (-1 if node.begin() >= max(needed, 0) else 0, node.last)

    def _first(self, candidates: list[Node]) -> Node:
        return sorted(candidates, key=lambda n: (self._policy_key(n), n.id))[0]

    def _has_device_child(self, node: Node) -> bool:
        return any(child.value is not None for child in node.children)

    def _is_device_leaf(self, node: Node) -> bool:
        return node.value is not None and node.lock_ref == 0 and not self._has_device_child(node)

    def _will_be_leaf(self, node: Node) -> bool:
        """Only what is held keeps it from being a device leaf, so that one call plans a whole chain."""
        if self.write_policy != "write_back":
            return False
        if node.value is None or node.host_value is not None or node.hold is not None:
            return False
        device_children = [c for c in node.children if c.value is not None]
        if not device_children or any(c.hold is None for c in device_children):
            return False
        below = node.descendants()
        return node.lock_ref == len([h for h in self.holds if h.span.node in below])

    def _must_stay(self, node: Node) -> bool:
        pending = node.backup is not None or node.load is not None
        return node.host_lock_ref > 0 or node.lock_ref > 0 or pending or node.pins > 0

    def _demote(self, node: Node) -> list[int]:
        pages = node.value or []
        self._emit_removed(node, "device")
        node.value = None
        return pages

    def _delete(self, victim: Node, out: Evicted) -> None:
        """Take an unbacked node out, with its descendants, which are all on host only."""
        assert victim.host_value is None
        out.device_pages += victim.value or []
        out.dropped_tokens += len(victim.key)
        self._emit_removed(victim, "device")
        for node in sorted(victim.descendants(), key=lambda n: (-n.depth(), n.id)):
            assert node.value is None
            out.host_pages += node.host_value or []
            out.dropped_tokens += len(node.key)
            if self._published(node):
                self._emit_removed(node, "host")
            self._unlink(node)
        self._unlink(victim)

    def evict(self, num_pages: int, *, host_room: int | None = None) -> Evicted:
        out = Evicted()
        freed = 0
        skipped: list[Node] = []
        while freed < num_pages:
            candidates = [n for n in self.nodes() if self._is_device_leaf(n) or self._will_be_leaf(n)]
            candidates = [n for n in candidates if n not in skipped]
            if not candidates:
                break
            victim = self._first(candidates)
            if victim.host_value is not None:
                freed += self._pages(victim)
                out.device_pages += self._demote(victim)
                out.demoted_nodes.append(victim.id)
                continue
            if self.write_policy == "write_back" or victim.pins > 0:
                wanted = [victim]
                if self._writes_through():
                    wanted += [n for n in victim.path()[:-1] if n.host_value is None]
                need = sum(self._pages(n) for n in wanted)
                if host_room is None or need <= host_room:
                    if host_room is not None:
                        host_room -= need
                    victim.hold = Hold(span(victim))
                    self.holds.append(victim.hold)
                    self._lock_path(victim)
                    out.write_back_nodes.append(victim.id)
                    freed += self._pages(victim)
                    continue
            stays = any(self._must_stay(n) for n in [victim, *victim.descendants()])
            if stays or self._has_device_child(victim):
                skipped.append(victim)
                continue
            keep = self._pages(victim) - (num_pages - freed)
            if keep > 0:
                self._cut(victim, keep * self.page_size)
            freed += self._pages(victim)
            self._delete(victim, out)
        return out

    def drop(self, nodes: Sequence[int]) -> Evicted:
        faults: list[Exception] = []
        for at, node_id in enumerate(nodes):
            if not self._is_live(node_id):
                faults.append(KeyError(f"node {node_id} is unknown or dead"))
            elif not any(h.span.node.id == node_id for h in self.holds):
                faults.append(LockError(f"node {node_id} is not held"))
            if node_id in nodes[:at]:
                faults.append(ValueError(f"node {node_id} is listed twice"))
        raise_first(faults)
        out = Evicted()
        for hold in [h for node_id in nodes for h in self.holds if h.span.node.id == node_id]:
            parts = hold.parts()
            self._end_hold(hold)
            if self._drop_one(hold.span.node, out):
                for part in reversed(parts[:-1]):
                    self._drop_one(part, out)
        return out

    def _drop_one(self, node: Node, out: Evicted) -> bool:
        if node.host_value is not None or self._has_device_child(node):
            return False
        if any(self._must_stay(n) for n in [node, *node.descendants()]):
            return False
        self._delete(node, out)
        return True

    def _end_hold(self, hold: Hold) -> None:
        for part in hold.parts():
            part.hold = None
        self.holds.remove(hold)
        self._unlock_path(hold.span.node)

    def evict_host(self, num_pages: int) -> HostEvicted:
        out = HostEvicted()
        while len(out.host_pages) < num_pages:
            copies = [n for n in self.nodes() if self._host_copy_may_go(n)]
            group1 = [n for n in copies if not self._is_device_leaf(n)]
            group2 = [n for n in copies if self._is_device_leaf(n)]
            group3 = [n for n in self.nodes() if self._is_host_leaf(n)]
            leaves_first = self.host_order == "leaves_first"
            order = [group3, group1, group2] if leaves_first else [group1, group2, group3]
            first = next((group for group in order if group), None)
            if first is None:
                break
            node = self._first(first)
            if first is group3:
                keep = self._pages(node) - (num_pages - len(out.host_pages))
                if keep > 0:
                    self._cut(node, keep * self.page_size)
            assert node.parent is not None
            out.gone.append((node.id, node.parent.id, self._pages(node)))
            out.host_pages += self._drop_host_copy(node)
            if first is group3:
                self._unlink(node)
        return out

    def evictable_host_pages(self, limit: int) -> int:
        return min(limit, len(deepcopy(self).evict_host(limit).host_pages))

    def _host_copy_may_go(self, node: Node) -> bool:
        if node.value is None or not self._published(node):
            return False
        if node.host_lock_ref > 0 or node.load is not None or node.pins > 0:
            return False
        return not (self._writes_through() and any(c.host_value is not None for c in node.children))

    def _is_host_leaf(self, node: Node) -> bool:
        if node.value is not None or not self._published(node):
            return False
        return not (node.lock_ref > 0 or node.host_lock_ref > 0 or node.pins > 0 or node.children)

    def _drop_host_copy(self, node: Node) -> list[int]:
        pages = node.host_value or []
        if self._published(node):
            self._emit_removed(node, "host")
        node.host_value = None
        return pages

    # --- backup

    def plan_backup(self, nodes: Sequence[int]) -> BackupPlan:
        listed: list[Node] = []
        for node_id in nodes:
            if not self._is_live(node_id):
                continue
            node = self._find(node_id)
            if node.value is None or node.host_value is not None:
                continue
            path = node.path()
            if self.write_policy == "write_back" and node.hold is not None:
                held_too = [n for n in path if n.hold is not None and n.id in nodes]
                path = [n for n in path if n.hold is node.hold or n in held_too]
            listed += [n for n in path if n.value is not None and n.host_value is None and n not in listed]
        return BackupPlan(
            nodes=[n.id for n in listed],
            pages=sum(self._pages(n) for n in listed),
            device_pages=[p for n in listed for p in n.value or []],
        )

    def begin_backup(self, nodes: Sequence[int], host_pages: Iterable[int]) -> Ack:
        faults: list[Exception] = []
        if self.write_policy is None:
            faults.append(ValueError("there is no host tier"))
        given = check_words(host_pages, "page")
        for at, node_id in enumerate(nodes):
            if node_id in nodes[:at]:
                faults.append(ValueError(f"node {node_id} is listed twice"))
            if not self._is_live(node_id):
                faults.append(KeyError(f"node {node_id} is unknown or dead"))
                continue
            node = self._find(node_id)
            if node.value is None or node.host_value is not None:
                faults.append(LockError(f"node {node_id} is evicted or backed"))
            if self._writes_through() and node.parent not in (None, self.root_node):
                assert node.parent is not None
                if node.parent.host_value is None and node.parent.id not in nodes[:at]:
                    faults.append(LockError(f"the parent of node {node_id} has no host copy"))
        live = [self._find(i) for i in nodes if self._is_live(i)]
        if len(given) != sum(self._pages(n) for n in live):
            faults.append(ValueError(f"{len(given)} host pages given"))
        raise_first(faults)

        ack = self._new_ack("backup")
        record = BackupRecord([span(n) for n in live], [])
        holds = [n.hold for n in live if n.hold is not None and n.hold.span.node is n]
        for node in live:
            count = self._pages(node)
            node.host_value, given = given[:count], given[count:]
            node.backup = ack
            node.victim = node.hold is not None
            record.locked.append(node)
            if node.hold is None or node.hold.span.node is not node:
                self._lock_path(node)  # a hold's one lock is the old id's, and goes on as the copy's
            if node.hold not in holds:
                node.hold = None
        for hold in holds:
            for part in hold.parts():
                part.hold = None
            self.holds.remove(hold)
        self.backups[ack] = record
        return ack

    def _backup_record(self, ack: Ack) -> BackupRecord:
        if ack not in self.backups:
            raise LockError(f"no such backup: {ack}")
        return self.backups[ack]

    def finish_backup(self, ack: Ack) -> BackupDone:
        record = self._backup_record(ack)
        del self.backups[ack]
        nodes = sorted((n for s in record.spans for n in s.parts()), key=lambda n: (n.depth(), n.id))
        victims = [n for n in nodes if n.victim]
        known = [n for n in self.nodes() if self._published(n)]
        for node in nodes:
            node.backup = None
            node.victim = False
        # nodes of the ack, and copies of earlier acks that waited for them
        fresh = [n for n in self.nodes() if self._published(n) and n not in known]
        fresh.sort(key=lambda n: (n.depth(), n.id))
        for node in fresh:
            self._emit_stored(node, "host")
        for node in record.locked:
            self._unlock_path(node)
        device_pages = []
        for node in reversed(victims):
            if node.lock_ref == 0 and not self._has_device_child(node):
                device_pages += self._demote(node)
        return BackupDone([n.id for n in fresh], device_pages)

    def cancel_backup(self, ack: Ack) -> list[int]:
        record = self._backup_record(ack)
        nodes = [n for s in record.spans for n in s.parts()]
        below: list[Node] = []
        if self._writes_through():
            # what has no host copy has nothing to lose, and so nothing to say
            backed = [n for n in self.nodes() if n.host_value is not None]
            below = [n for n in backed if n not in nodes and any(a in nodes for a in n.path())]
            below.sort(key=lambda n: (n.depth(), n.id))
        for node in nodes:
            if node.host_lock_ref > 0:
                raise LockError(f"node {node.id} is host-locked")
        for node in below:
            if node.host_lock_ref > 0 or node.load is not None:
                raise LockError(f"node {node.id} below is host-locked or being loaded")
            if node.value is None and (node.lock_ref > 0 or node.pins > 0):
                raise LockError(f"node {node.id} below is evicted and locked or pinned")

        returned = [p for n in [*nodes, *below] for p in n.host_value or []]
        for node in reversed(below):  # deepest first, so that children leave before their parents
            self._drop_host_copy(node)
            if node.backup is not None:
                self._leave_backup(node)
            if node.value is None:
                self._unlink(node)
        for node in nodes:
            self._drop_host_copy(node)
            node.backup = None
            node.victim = False
        for node in record.locked:
            self._unlock_path(node)
        del self.backups[ack]
        return returned

    def _leave_backup(self, node: Node) -> None:
        """Its ack goes on without it. The parts of a cut node leave one by one; the old id has the lock."""
        assert node.backup is not None
        record = self.backups[node.backup]
        node.backup = None
        node.victim = False
        record.spans = [s for s in record.spans if s.node is not node]
        if node in record.locked:
            record.locked.remove(node)
            self._unlock_path(node)

    # --- load-back

    def plan_load_back(self, node: int) -> LoadBackPlan:
        target = self._find(node)
        evicted = [n for n in target.path() if n.value is None]
        plan = LoadBackPlan(
            tree=self,
            target=target,
            spans=[span(n) for n in evicted],
            nodes=[n.id for n in evicted],
            pages=sum(self._pages(n) for n in evicted),
            host_pages=[p for n in evicted for p in n.host_value or []],
        )
        for n in evicted:
            n.host_lock_ref += 1
        self._lock_path(target)
        self.plans.append(plan)
        return plan

    def _give_back_load_locks(self, plan: LoadBackPlan) -> None:
        for node in plan.parts():
            node.host_lock_ref -= 1
        self._unlock_path(plan.target)

    def _cancel_plan(self, plan: LoadBackPlan) -> None:
        if plan not in self.plans:
            raise LockError("this plan was used, cancelled, or is from elsewhere")
        self.plans.remove(plan)
        self._give_back_load_locks(plan)

    def begin_load_back(self, plan: LoadBackPlan, device_pages: Iterable[int]) -> Ack:
        if plan not in self.plans:
            raise LockError("this plan was used, cancelled, or is from elsewhere")
        given = check_words(device_pages, "page")
        faults: list[Exception] = []
        if any(n.value is not None for n in plan.parts()):
            faults.append(LockError("a node of this plan is on device by now"))
        if len(given) != plan.pages:
            faults.append(ValueError(f"{len(given)} device pages given for {plan.pages}"))
        raise_first(faults)
        self.plans.remove(plan)
        ack = self._new_ack("load_back")
        self.loads[ack] = plan
        for node in plan.parts():
            count = self._pages(node)
            node.value, given = given[:count], given[count:]
            node.load = ack
            self._emit_stored(node, "device")
        return ack

    def _loading(self, ack: Ack) -> LoadBackPlan:
        if ack not in self.loads:
            raise LockError(f"no such load-back: {ack}")
        return self.loads[ack]

    def finish_load_back(self, ack: Ack) -> None:
        plan = self._loading(ack)
        del self.loads[ack]
        for node in plan.parts():
            node.load = None
        self._give_back_load_locks(plan)

    def cancel_load_back(self, ack: Ack) -> list[int]:
        plan = self._loading(ack)
        nodes = plan.parts()
        for node in nodes:
            if any(c.value is not None and c.load != ack for c in node.children):
                raise LockError(f"node {node.id} has a device child")
            if node.lock_ref > 1:  # one of them is this load-back's own
                raise LockError(f"node {node.id} is locked by somebody else")
        del self.loads[ack]
        pages = [p for n in nodes for p in n.value or []]
        for node in reversed(nodes):
            self._demote(node)
            node.load = None
        self._give_back_load_locks(plan)
        return pages

    # --- host insert

    def insert_host(
        self,
        anchor: int,
        tokens: Iterable[int],
        host_pages: Iterable[int],
        *,
        hashes: Sequence[Any] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> HostInserted:
        size = self.page_size
        start = self._find(anchor)
        if self.write_policy is None:
            raise ValueError("there is no host tier")
        raw = check_words(tokens, "token")
        key = self._whole_pages(raw)
        given = check_words(host_pages, "page")
        namespace = (extra_key, cache_salt)
        if start is not self.root_node:
            if namespace == (None, None):
                namespace = start.namespace
            if namespace != start.namespace:
                raise ValueError(f"the namespace is not that of node {anchor}")
            if self.bigram and raw and raw[0] != start.key[-1][1]:
                raise ValueError(f"the first token is not the last one of node {anchor}")
        if len(given) != len(key) // size:
            raise ValueError(f"{len(given)} host pages given for {len(key) // size}")
        if hashes is not None and len(hashes) != len(given):
            raise ValueError(f"{len(hashes)} hashes given for {len(given)} pages")
        if self._writes_through() and start is not self.root_node and start.host_value is None:
            return HostInserted(anchor, given, 0)
        if not key:
            return HostInserted(anchor, [], 0)

        path = self._cut_where_it_ends(self._walk(start, namespace, key))
        duplicates: list[int] = []
        inserted = 0
        for node in path:
            count = self._pages(node)
            mine, given = given[:count], given[count:]
            if node.host_value is not None:
                duplicates += mine
                continue
            node.host_value = mine
            inserted += count
            if node.hold is not None and node.hold.span.node is node:
                self._end_hold(node.hold)
            node.hold = None
            if self._published(node):
                self._emit_stored(node, "host")
        stamped = ([] if start is self.root_node else [start]) + path
        rest = key[sum(len(n.key) for n in path) :]
        if rest:
            parent = path[-1] if path else start
            new = self._new_node(parent, namespace, rest)
            new.host_value = given
            new.priority = parent.priority
            inserted += self._pages(new)
            path.append(new)
            stamped.append(new)
            if self._published(new):
                self._emit_stored(new, "host")
            self._raise_history(new)
        self._stamp(stamped)
        if rest:
            path[-1].created = path[-1].last
        return HostInserted(path[-1].id, duplicates, inserted)

    # --- pins

    def pin(self, node: int, expires_at: float | None = None) -> Pin:
        found = self._find(node)
        if self.write_policy is None:
            raise ValueError("there is no host tier")
        fresh = sum(len(n.key) for n in found.path() if n.pins == 0)
        if self.pin_capacity is not None and self.pinned_tokens + fresh > self.pin_capacity:
            raise ValueError("the pin is past the capacity")
        pin = Pin(found, expires_at)
        for n in found.path():
            n.pins += 1
        self.pin_list.append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        if pin not in self.pin_list:
            raise LockError(f"no such pin on node {pin.node.id}")
        self.pin_list.remove(pin)
        for n in pin.node.path():
            n.pins -= 1

    def expire_pins(self, now: float) -> int:
        old = [p for p in self.pin_list if p.expires_at is not None and p.expires_at <= now]
        for pin in old:
            self.unpin(pin)
        return len(old)

    # --- looking

    def node_info(self, node: int) -> NodeInfo:
        found = self._find(node)
        return NodeInfo(
            id=found.id,
            pages=self._pages(found),
            device_pages=None if found.value is None else list(found.value),
            host_pages=None if found.host_value is None else list(found.host_value),
            parent=None if found.parent is None else found.parent.id,
            hit_count=found.hits,
            priority=found.priority,
            lock_ref=found.lock_ref,
            host_lock_ref=found.host_lock_ref,
            pending=found.backup or found.load or self._awaited(found),
            held=found.hold is not None,
            pins=found.pins,
        )

    def pending_acks(self, node: int) -> list[Ack]:
        """The load-backs that the path waits for, root-first, each once."""
        acks = [n.load for n in self._find(node).path() if n.load is not None]
        return list(dict.fromkeys(acks))

    def _awaited(self, node: Node) -> Ack | None:
        """The nearest pending backup above a complete host copy that is not published."""
        if node.host_value is None or self._published(node):
            return None
        above = node.parent
        while above is not None and above.backup is None:
            above = above.parent
        return None if above is None else above.backup

    def prefix_hashes(self, node: int) -> list[bytes]:
        return self._prefix_digests(self._find(node))

    def page_hashes(self, node: int) -> list[bytes]:
        found = self._find(node)
        return self._prefix_digests(found)[found.begin() // self.page_size :]

    def _prefix_digests(self, node: Node) -> list[bytes]:
        key = [p for n in node.path() for p in n.key]
        return hash_positions(key, self.page_size, namespace_seed(node.namespace))

    # --- events

    def _emit(self, event: Event) -> None:
        if not self.events_on or self.overflow:
            return
        self.queue.append(event)
        if len(self.queue) > self.event_capacity:
            self.queue = []
            self.overflow = True

    def _event_hashes(self, node: Node) -> tuple[list[int], int | None]:
        hashes = [event_hash(d) for d in self._prefix_digests(node)]
        first = node.begin() // self.page_size
        return hashes[first:], hashes[first - 1] if first else None

    def _stored(self, node: Node, tier: str) -> Stored:
        hashes, parent = self._event_hashes(node)
        return Stored(tier, hashes, parent, raw_tokens(node.key), self.page_size, *node.namespace)

    def _emit_stored(self, node: Node, tier: str) -> None:
        if self.events_on:
            self._emit(self._stored(node, tier))

    def _emit_removed(self, node: Node, tier: str) -> None:
        if self.events_on:
            self._emit(Removed(tier, self._event_hashes(node)[0]))

    def take_events(self) -> list[Event]:
        events = self.queue
        self.queue = []
        if self.overflow:
            self.overflow = False
            nodes = sorted(self.nodes(), key=lambda n: (n.depth(), n.id))
            events = [Cleared()]
            events += [self._stored(n, "device") for n in nodes if n.value is not None]
            events += [self._stored(n, "host") for n in nodes if self._published(n)]
        return events

    def tier_hashes(self, tier: str) -> list[int]:
        """Event hashes of the pages that a tier holds now."""
        out: list[int] = []
        for n in self.nodes():
            if (n.value is not None) if tier == "device" else self._published(n):
                out += self._event_hashes(n)[0]
        return out

    # --- reset

    def reset(self) -> None:
        self.epoch += 1
        self._start_empty()
        self.queue = []  # what was told before is void
        self.overflow = False
        self._emit(Cleared())

    # --- invariants

    def check_invariants(self) -> None:
        self._check_shape()
        self._check_copies()
        self._check_counts()
        self._check_marks()
        if self.evictable_tokens + self.protected_tokens != self.device_tokens:
            raise InvariantError("evictable + protected is not device")

    def _check_shape(self) -> None:
        for parent in [self.root_node, *self.nodes()]:
            edges = [(c.namespace, c.key[: self.page_size]) for c in parent.children]
            for at, edge in enumerate(edges):
                if edge in edges[:at]:
                    raise InvariantError(f"two children of node {parent.id} under one page")
            for child in parent.children:
                if child.parent is not parent:
                    raise InvariantError(f"node {child.id} has another parent")
                if not child.key or len(child.key) % self.page_size:
                    raise InvariantError(f"node {child.id} does not hold whole pages")
                if parent is not self.root_node and child.namespace != parent.namespace:
                    raise InvariantError(f"node {child.id} has another namespace than its parent")
        ids = [n.id for n in [self.root_node, *self.nodes()]]
        if len(set(ids)) != len(ids):
            raise InvariantError("an id is used twice")

    def _check_copies(self) -> None:
        device = [p for n in self.nodes() for p in n.value or []]
        host = [p for n in self.nodes() for p in n.host_value or []]
        if len(set(device)) != len(device) or len(set(host)) != len(host):
            raise InvariantError("a page is owned twice")
        for n in self.nodes():
            for copy in (n.value, n.host_value):
                if copy is not None and len(copy) != self._pages(n):
                    raise InvariantError(f"node {n.id} has a wrong number of pages")
            if n.value is None and n.host_value is None:
                raise InvariantError(f"node {n.id} has no copy")
            if self.write_policy is None and n.host_value is not None:
                raise InvariantError(f"node {n.id} has a host copy without a host tier")
            parent = n.parent
            if parent is None or parent is self.root_node:
                continue
            if n.value is not None and parent.value is None:
                raise InvariantError(f"node {n.id} is on device below an evicted node")
            if self._writes_through() and n.host_value is not None and parent.host_value is None:
                raise InvariantError(f"node {n.id} has a host copy below an unbacked node")

    def _check_counts(self) -> None:
        """Every count is what the handles that are out add up to."""
        locked = [r.node for r in self.lock_receipts]
        locked += [h.span.node for h in self.holds]
        locked += [n for record in self.backups.values() for n in record.locked]
        locked += [plan.target for plan in [*self.plans, *self.loads.values()]]
        host_locked = [n for r in self.host_lock_receipts for n in r.span.parts()]
        host_locked += [n for plan in [*self.plans, *self.loads.values()] for n in plan.parts()]
        locks = [n for node in locked for n in node.path()]
        pins = [n for pin in self.pin_list for n in pin.node.path()]
        for n in self.nodes():
            if n.lock_ref != locks.count(n):
                raise InvariantError(f"node {n.id}: lock_ref {n.lock_ref}, is {locks.count(n)}")
            if n.host_lock_ref != host_locked.count(n):
                raise InvariantError(f"node {n.id}: host_lock_ref {n.host_lock_ref}")
            if n.pins != pins.count(n):
                raise InvariantError(f"node {n.id}: pins {n.pins}, is {pins.count(n)}")
        pinned = self.pinned_tokens
        if self.pin_capacity is not None and pinned > self.pin_capacity:
            raise InvariantError("more pinned than the capacity")

    def _check_marks(self) -> None:
        for ack, record in self.backups.items():
            for n in [n for s in record.spans for n in s.parts()]:
                if n.backup != ack:
                    raise InvariantError(f"node {n.id} lost the mark of its backup")
        for ack, plan in self.loads.items():
            for n in plan.parts():
                if n.load != ack:
                    raise InvariantError(f"node {n.id} lost the mark of its load-back")
        for n in self.nodes():
            if n.backup is not None and (n.backup not in self.backups or n.load is not None):
                raise InvariantError(f"node {n.id} is marked by a backup that is over")
            if n.load is not None and n.load not in self.loads:
                raise InvariantError(f"node {n.id} is marked by a load-back that is over")
            if (n.backup is not None or n.load is not None) and (n.value is None or n.lock_ref == 0):
                raise InvariantError(f"node {n.id} is pending and not locked on device")
            if n.hold is not None and (n.hold not in self.holds or n.host_value is not None):
                raise InvariantError(f"node {n.id} is marked by a hold that is over")
            if n.victim and n.backup is None:
                raise InvariantError(f"node {n.id} is a victim of no backup")
