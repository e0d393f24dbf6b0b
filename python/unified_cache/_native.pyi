"""The native module: private, import its names from `unified_cache` and `unified_cache.events`.

Terms. A *page* is ``page_size`` consecutive tokens of one prefix. Lengths are counted in positions: a
position is a token, or in bigram mode a pair of neighbouring tokens. Page ids are indices into a pool,
``uint32``; node ids are ints that are never used again, not even after a reset.

Arrays that are handed out own their memory: nothing the tree does later changes them, and nothing done
to them changes the tree.

Errors are those of `unified_cache.errors`. A call that raises one has changed nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from unified_cache.tree import Locks

__all__ = [
    "DEBUG_BUILD",
    "Ack",
    "BackupDone",
    "BackupPlan",
    "Cleared",
    "Evicted",
    "HostEvicted",
    "HostInserted",
    "HostLockReceipt",
    "Inserted",
    "IoQueue",
    "LoadBackPlan",
    "LockReceipt",
    "LogPart",
    "Match",
    "NodeInfo",
    "PageMemory",
    "Pin",
    "PrefixTree",
    "Removed",
    "Replay",
    "Stored",
    "StoredTree",
    "__version__",
    "check_object_headers",
    "copy_objects",
    "copy_pages",
    "find_slots",
    "locate_objects",
    "object_checksums",
    "page_hashes",
    "prefix_record",
    "read_object",
    "read_slot_table",
    "write_object_headers",
]

DEBUG_BUILD: Final[bool]
"""True if the module was built without optimisation; importing the package warns then."""

__version__: Final[str]

class _HasNumpy(Protocol):
    def numpy(self) -> npt.NDArray[Any]: ...

class _HasDLPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> Any: ...

_Integers: TypeAlias = Buffer | Sequence[int] | _HasNumpy | _HasDLPack
"""One-dimensional integers in ``0 .. 2**32-1``.

A contiguous buffer of native int32, int64 or uint32 (numpy, ``array``) is read without a copy; so is a CPU
tensor, through its ``numpy()`` or DLPack. Anything else that is a sequence of ints is converted, at
about 20 ns an element.
"""

_Pages: TypeAlias = npt.NDArray[np.uint32]
_Policy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
_HostOrder: TypeAlias = Literal["copies_first", "leaves_first"]

@final
class Ack:
    """Names a copy that has begun, until it is finished or cancelled. Equal acks name the same copy."""

    @property
    def kind(self) -> Literal["backup", "load_back"]:
        """Which way the copy goes."""
    @property
    def serial(self) -> int:
        """Its number among the copies of its tree, in the order in which they began."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Match:
    """What `PrefixTree.match_prefix` found: a snapshot, it does not follow the tree."""

    @property
    def device_length(self) -> int:
        """Positions on device, a multiple of the page size."""
    @property
    def device_pages(self) -> _Pages:
        """The device pages of those positions in order, as at the match; device_length / page_size ids."""
    @property
    def host_hit_length(self) -> int:
        """Positions held on host only, right after the device part."""
    @property
    def last_device_node(self) -> int:
        """Deepest matched node that is on device, else the root: the node to lock."""
    @property
    def last_host_node(self) -> int:
        """Deepest matched node, else the root: the node to load back."""
    @property
    def pending_ack(self) -> Ack | None:
        """The youngest load-back that still fills some of the device pages; None if all are valid now."""

@final
class Inserted:
    """What `PrefixTree.insert` did."""

    @property
    def prefix_len(self) -> int:
        """Positions that the tree had before, on either tier."""
    @property
    def duplicate_pages(self) -> _Pages:
        """The caller's pages that the tree did not take: the caller must free them."""
    @property
    def device_pages(self) -> _Pages:
        """The tree's own pages for the whole key, to go on with."""
    @property
    def node(self) -> int:
        """The node where the inserted key ends; the root if the key has less than a page."""
    @property
    def backup_nodes(self) -> list[int]:
        """What the write policy wants on host now, ancestors first."""
    @property
    def pending_ack(self) -> Ack | None:
        """The youngest load-back that a part of `device_pages` still waits for."""

@final
class Evicted:
    """What `PrefixTree.evict` or `drop` did."""

    @property
    def device_pages(self) -> _Pages:
        """Device pages that are free now, in the order of the victims."""
    @property
    def host_pages(self) -> _Pages:
        """Host pages that are free now, of nodes that left the tree."""
    @property
    def demoted_nodes(self) -> list[int]:
        """Nodes that are on host only now."""
    @property
    def write_back_nodes(self) -> list[int]:
        """Victims to back up (`begin_backup`) or to give up (`drop`); locked until then.

        Their device pages count towards the pages asked for, and come with the ack of the backup.
        """
    @property
    def dropped_tokens(self) -> int:
        """Positions whose last copy went."""

@final
class HostEvicted:
    """What `PrefixTree.evict_host` freed."""

    @property
    def host_pages(self) -> _Pages:
        """Host pages that are free now, in the order of the victims."""
    @property
    def gone(self) -> list[tuple[int, int, int]]:
        """(node, heir, pages) of each node that lost its host copy or the tail of it, in order.

        The heir is the node at whose end the lost pages began: its parent, or its own head under a new id.
        """

@final
class BackupPlan:
    """What a backup would copy. A plan holds nothing and changes nothing."""

    @property
    def nodes(self) -> list[int]:
        """Nodes to hand to `begin_backup`, ancestors first; those that need no copy are left out."""
    @property
    def pages(self) -> int:
        """Host pages to allocate for them."""
    @property
    def device_pages(self) -> _Pages:
        """The device pages to copy from, in the order of `nodes`; shape (pages,)."""

@final
class BackupDone:
    """What `PrefixTree.finish_backup` did."""

    @property
    def nodes(self) -> list[int]:
        """Nodes whose host copy is valid now, ancestors first; both parts of one that was cut meanwhile."""
    @property
    def device_pages(self) -> _Pages:
        """Device pages of write-back victims, free now."""

@final
class LoadBackPlan:
    """The evicted part of a path, locked on both tiers until begun or cancelled. Used once."""

    @property
    def nodes(self) -> list[int]:
        """The evicted nodes, ancestors first, as at the plan."""
    @property
    def pages(self) -> int:
        """Device pages to allocate for them."""
    @property
    def host_pages(self) -> _Pages:
        """The host pages to copy from, in the order of `nodes`; shape (pages,)."""
    @property
    def pending_ack(self) -> Ack | None:
        """The youngest load-back, begun by others, that the part of the path on device still waits for."""
    def cancel(self) -> None:
        """Give the locks back.

        Raises:
            LockError: the plan was begun or cancelled before.
        """

@final
class HostInserted:
    """What `PrefixTree.insert_host` did."""

    @property
    def node(self) -> int:
        """The deepest node of the path."""
    @property
    def duplicate_host_pages(self) -> _Pages:
        """The caller's host pages that the tree did not take: the caller must free them."""
    @property
    def inserted_pages(self) -> int:
        """Host pages that the tree took."""

@final
class NodeInfo:
    """One node as it was when asked."""

    @property
    def id(self) -> int:
        """The node's id."""
    @property
    def pages(self) -> int:
        """Length of the node in pages."""
    @property
    def device_pages(self) -> _Pages | None:
        """Its pages on device; None if it is not there."""
    @property
    def host_pages(self) -> _Pages | None:
        """Its pages on host, those of a pending copy included; None if it has none."""
    @property
    def parent(self) -> int | None:
        """None for the root."""
    @property
    def hit_count(self) -> int:
        """Requests that inserted a key through this node."""
    @property
    def priority(self) -> int:
        """The highest priority that an insert gave it."""
    @property
    def lock_ref(self) -> int:
        """Device locks on the node."""
    @property
    def host_lock_ref(self) -> int:
        """Host locks on the node."""
    @property
    def locks(self) -> Locks:
        """Both lock counts as a named tuple (device, host)."""
    @property
    def pending(self) -> Ack | None:
        """The copy that the node is part of and that has not ended.

        For a host copy that is complete but waits to be published, the backup above that it waits for: a host
        copy is published if `host_pages` is not None and the node waits for no backup.
        """
    @property
    def held(self) -> bool:
        """True for a write-back victim that was neither backed up nor dropped yet."""
    @property
    def pins(self) -> int:
        """Pins that cover the node."""

@final
class LockReceipt:
    """A device lock on the path from a node to the root."""

    @property
    def node(self) -> int:
        """The node that was locked."""
    @property
    def released(self) -> bool:
        """True once the lock was given back."""

@final
class HostLockReceipt:
    """A host lock on one node, and on every part that it is cut into."""

    @property
    def node(self) -> int:
        """The node that was locked."""
    @property
    def released(self) -> bool:
        """True once the lock was given back."""

@final
class Pin:
    """A pin on the path from a node to the root."""

    @property
    def node(self) -> int:
        """The node that was pinned."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Stored:
    """Pages came to a tier. They follow each other, and their parent was stored before.

    Can be made from its fields, for tests and mirrors; pickles.
    """

    def __new__(
        cls,
        tier: Literal["device", "host"],
        hashes: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
        page_size: int,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> Self:
        """An event with these fields. `ArgumentError`: another tier."""
    def __getnewargs__(self) -> tuple[Any, ...]: ...
    @property
    def tier(self) -> Literal["device", "host"]:
        """The tier that changed."""
    @property
    def hashes(self) -> list[int]:
        """One hash a page: the first 8 bytes of its digest as a signed big-endian integer."""
    @property
    def parent(self) -> int | None:
        """The hash of the page before the first one; None at the beginning of a prefix."""
    @property
    def tokens(self) -> list[int]:
        """The tokens of the pages (bigram: positions + 1 raw tokens)."""
    @property
    def page_size(self) -> int:
        """Tokens a page."""
    @property
    def extra_key(self) -> str | None:
        """First half of the namespace."""
    @property
    def cache_salt(self) -> str | None:
        """Second half of the namespace."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Removed:
    """Pages left a tier. Can be made from its fields; pickles."""

    def __new__(cls, tier: Literal["device", "host"], hashes: Sequence[int]) -> Self:
        """An event with these fields. `ArgumentError`: another tier."""
    def __getnewargs__(self) -> tuple[Any, ...]: ...
    @property
    def tier(self) -> Literal["device", "host"]:
        """The tier that changed."""
    @property
    def hashes(self) -> list[int]:
        """The pages' hashes, as in `Stored`."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Cleared:
    """Everything left both tiers; after an overflow of the queue the whole content follows anew."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class PrefixTree:
    """Which prefixes are cached, in which pages, on which tier. It decides; the caller copies and allocates.

    Args:
        page_size: tokens a page, 1 to 256.
        eviction_policy: one of `eviction_policies()`.
        policy_options: settings of the policy by name, such as ``{"protected_threshold": 2}`` (slru) or
            ``{"threshold": 0, "next_prompt_estimate": 0}`` (tlru).
        write_policy: when a node goes to host: "write_through" at its first insert,
            "write_through_selective" at its third hit, "write_back" when the device evicts it;
            None: there is no host tier, eviction deletes.
        write_through_threshold: hits at which a node goes to host; None: 1, selective 3.
        bigram: positions are pairs of neighbouring tokens (speculative decoding).
        events: queue an event for every change of a tier.
        event_capacity: events that the queue holds; past that it is replaced by a `Cleared` and the content.
        pin_capacity: positions that pins may cover together; None: no limit.
        host_order: what `evict_host` takes first: "copies_first", copies of nodes that are on device too, so
            that the tiers hold different things (for a host tier smaller than the device's);
            "leaves_first", what only the host holds, so that it remembers what the device will forget next
            (for a larger one).

    A namespace, the pair ``extra_key`` and ``cache_salt``, is part of a prefix's identity: equal tokens in
    different namespaces share nothing. None and ``""`` differ.

    Calls from several threads take turns; long ones let other Python threads run. After an internal error
    every call is a `PoisonedError` until `reset`.
    """

    def __new__(
        cls,
        page_size: int = 1,
        *,
        eviction_policy: str = "lru",
        policy_options: Mapping[str, int] | None = None,
        write_policy: _Policy | None = "write_through",
        write_through_threshold: int | None = None,
        bigram: bool = False,
        events: bool = False,
        event_capacity: int = 65536,
        pin_capacity: int | None = None,
        host_order: _HostOrder = "copies_first",
    ) -> Self:
        """Make an empty tree.

        Raises:
            ArgumentError: a setting that is out of range or unknown; the message lists what is allowed.
        """

    @staticmethod
    def eviction_policies() -> list[str]:
        """The names of the eviction policies."""

    # Looking up

    def match_prefix(
        self,
        tokens: _Integers,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        include_evicted: bool = True,
    ) -> Match:
        """Find the longest cached prefix of `tokens`, in whole pages, and mark it as just used.

        A match that ends inside a node cuts that node, so that the returned node covers what was matched.
        An engine that must compute one token passes ``tokens[:-1]``.

        Args:
            tokens: the key; a tail that fills no page is checked but not looked up.
            extra_key: first half of the namespace.
            cache_salt: second half of the namespace.
            include_evicted: go on past the device part through nodes that are on host.

        Raises:
            ArgumentError: a token out of range (the message names its position).
        """
    def peek_prefix(
        self,
        tokens: _Integers,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        include_evicted: bool = True,
    ) -> Match:
        """`match_prefix` without any effect: equal lengths and pages, no cut, no stamp.

        Its nodes are the deepest ones that the match covers wholly.
        """
    def match_prefixes(
        self,
        keys: Sequence[_Integers],
        *,
        extra_keys: Sequence[str | None] | None = None,
        cache_salts: Sequence[str | None] | None = None,
    ) -> list[Match]:
        """`match_prefix` for a whole waiting queue, as if called one after the other.

        Args:
            keys: the keys.
            extra_keys: one for each key; None: none of them has one.
            cache_salts: likewise.

        Raises:
            ArgumentError: lists of different lengths, or a bad token in any key.
        """

    # Inserting

    def insert(
        self,
        tokens: _Integers,
        pages: _Integers,
        *,
        prev_prefix_len: int = 0,
        inserted_len: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        chunked: bool = False,
    ) -> Inserted:
        """Give the tree the device pages of a computed prefix. Only whole pages go in.

        Args:
            tokens: the key from its first token.
            pages: one device page id for each whole page of the key.
            prev_prefix_len: positions at the front whose pages the caller borrowed from the tree; a
                multiple of the page size, not past what is on device. They are never duplicates.
            inserted_len: positions that this request has inserted before; nodes that end there or before
                get no hit.
            extra_key: first half of the namespace.
            cache_salt: second half of the namespace.
            priority: raises the priority of every node on the path to at least this.
            chunked: a part of a prompt still being computed: no node gets a hit.

        Raises:
            ArgumentError: a token out of range, a wrong number of pages, a bad `prev_prefix_len`.
        """
    def insert_host(
        self,
        anchor: int,
        tokens: _Integers,
        host_pages: _Integers,
        *,
        hashes: npt.NDArray[np.uint8] | Sequence[bytes] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> HostInserted:
        """Give the tree host pages that were read from storage.

        Args:
            anchor: the node after which `tokens` begin.
            tokens: the key from where the anchor ends.
            host_pages: one host page id for each whole page of `tokens`.
            hashes: the pages' digests if known, uint8 (pages, 32); else they are computed when needed.
            extra_key: first half of the namespace: needed below the root, else it must fit the anchor's
                (both None: taken from there).
            cache_salt: second half of the namespace.

        Raises:
            UnknownNodeError: `anchor` is no node.
            ArgumentError: a token out of range, a wrong number of pages or hashes, a namespace that does
                not fit, or a tree without a host tier.
        """

    # Locks

    def inc_lock_ref(self, node: int) -> LockReceipt:
        """Keep the path from `node` to the root on device until the receipt is given back.

        Raises:
            UnknownNodeError: `node` is no node.
        """
    def dec_lock_ref(self, lock: LockReceipt) -> None:
        """Give a device lock back.

        Raises:
            LockError: the receipt is another tree's, from before a reset, or was given back before.
        """
    def inc_host_lock_ref(self, node: int) -> HostLockReceipt:
        """Keep the host pages of one node until the receipt is given back; cuts are followed.

        Raises:
            UnknownNodeError: `node` is no node.
        """
    def dec_host_lock_ref(self, lock: HostLockReceipt) -> None:
        """Give a host lock back.

        Raises:
            LockError: the receipt is another tree's, from before a reset, or was given back before.
        """

    # Evicting

    def evict(self, num_pages: int, *, host_room: int | None = None) -> Evicted:
        """Free at least `num_pages` device pages if that can be done, and say how.

        Args:
            num_pages: how many device pages are needed.
            host_room: host pages that write-backs may use; None: no limit. Victims past it are dropped.

        Raises:
            ArgumentError: a negative number.
        """
    def drop(self, nodes: Sequence[int]) -> Evicted:
        """Give up write-back victims that could not be backed up.

        One that somebody else locked meanwhile, or that has a child on device, stays on device.

        Raises:
            UnknownNodeError: one of the nodes is no node.
            LockError: one of the nodes is not held.
            ArgumentError: a node is listed twice.
        """
    def evict_host(self, num_pages: int) -> HostEvicted:
        """Free at least `num_pages` host pages if that can be done, in the order that `host_order` says.

        Raises:
            ArgumentError: a negative number.
        """
    def evictable_host_pages(self, limit: int) -> int:
        """How many host pages `evict_host(limit)` would free now, at most `limit`; changes nothing.

        It costs as much as there are nodes in the pages counted, whatever else the tree holds.

        Raises:
            ArgumentError: a negative number.
        """

    # Device to host

    def plan_backup(self, nodes: Sequence[int]) -> BackupPlan:
        """What has to be copied so that `nodes` are on host; unbacked ancestors are put first.

        Nodes that are gone, backed up or pending are left out.
        """
    def begin_backup(self, nodes: Sequence[int], host_pages: _Integers) -> Ack:
        """Say that one copy of `nodes` to `host_pages` is under way; they stay on device until its end.

        Args:
            nodes: a plan's nodes; without any, the ack publishes nothing.
            host_pages: dealt to them in order.

        Raises:
            UnknownNodeError: one of the nodes is no node.
            LockError: one of the nodes is not on device, or is backed up or pending.
            ArgumentError: a node is listed twice or before its unbacked parent, a wrong number of pages, or
                a tree without a host tier.
        """
    def finish_backup(self, ack: Ack) -> BackupDone:
        """Say that the copy has ended: the host copies are valid now.

        Raises:
            LockError: the ack is another tree's, stale, or of another kind.
        """
    def cancel_backup(self, ack: Ack) -> _Pages:
        """Say that the copy failed. Returns the host pages to free.

        Under the write_through policies the host copies of descendants go too.

        Raises:
            LockError: the ack is another tree's, stale, or of another kind; or a host copy that
                would have to go is locked.
        """

    # Host to device

    def plan_load_back(self, node: int) -> LoadBackPlan:
        """Lock the path from `node` to the root on both tiers and say what of it has to be copied.

        Raises:
            UnknownNodeError: `node` is no node.
        """
    def begin_load_back(self, plan: LoadBackPlan, device_pages: _Integers) -> Ack:
        """Say that the copy of a plan is under way: its nodes are on device, valid at the ack.

        Args:
            plan: used up by this call.
            device_pages: dealt to the plan's nodes in order.

        Raises:
            LockError: the plan is another tree's, was used before, or one of its nodes is on device again
                (cancel it then).
            ArgumentError: a wrong number of pages.
        """
    def finish_load_back(self, ack: Ack) -> None:
        """Say that the copy has ended, and give the locks back.

        Raises:
            LockError: the ack is another tree's, stale, or of another kind.
        """
    def cancel_load_back(self, ack: Ack) -> _Pages:
        """Say that the copy failed: its nodes are on host only again. Returns the device pages to free.

        Raises:
            LockError: the ack is another tree's, stale, or of another kind; or somebody else uses one of
                the nodes.
        """

    # Pins

    def pin(self, node: int, expires_at: float | None = None) -> Pin:
        """Keep one copy, on either tier, of every node from `node` to the root.

        Args:
            node: the end of the prefix to keep.
            expires_at: the time from which `expire_pins` ends the pin; None: never.

        Raises:
            UnknownNodeError: `node` is no node.
            ArgumentError: more than `pin_capacity` would be pinned, or a tree without a host tier.
        """
    def unpin(self, pin: Pin) -> None:
        """End a pin.

        Raises:
            LockError: the pin is another tree's, from before a reset, expired, or was ended before.
        """
    def expire_pins(self, now: float) -> int:
        """End all pins whose time has come; returns how many."""

    # Looking at the tree

    def node_info(self, node: int) -> NodeInfo:
        """One node, as it is now.

        Raises:
            UnknownNodeError: `node` is no node.
        """
    def pending_acks(self, node: int) -> list[Ack]:
        """The load-backs that fill device pages between the root and the node's end and have not ended, each
        once, in the order of the path from the root.

        Raises:
            UnknownNodeError: `node` is no node.
        """
    def host_nodes(self) -> list[int]:
        """The nodes whose host copy is complete, ancestors first."""
    def page_counts(self, nodes: Sequence[int]) -> list[int]:
        """How many pages of its own each of the nodes has.

        Raises:
            UnknownNodeError: one of them is no node.
        """
    def page_hashes(self, node: int) -> npt.NDArray[np.uint8]:
        """The digests of the node's own pages, uint8 (pages, 32).

        Raises:
            UnknownNodeError: `node` is no node.
        """
    def prefix_hashes(self, node: int) -> npt.NDArray[np.uint8]:
        """The digests of all pages from the root to the node's end, uint8 (pages, 32).

        Raises:
            UnknownNodeError: `node` is no node.
        """
    def node_tokens(self, node: int) -> _Pages:
        """The node's own tokens, uint32 (pages * page_size,); bigram: one more.

        Raises:
            UnknownNodeError: `node` is no node.
        """
    def node_namespace(self, node: int) -> tuple[str | None, str | None]:
        """(extra_key, cache_salt) of the node; of the root, none.

        Raises:
            UnknownNodeError: `node` is no node.
        """
    @property
    def root(self) -> int:
        """The root's id. It holds no page, is never locked and never evicted."""
    @property
    def page_size(self) -> int:
        """Tokens a page, as given."""
    @property
    def evictable_tokens(self) -> int:
        """Positions on device that no lock keeps there."""
    @property
    def protected_tokens(self) -> int:
        """Positions on device under a lock."""
    @property
    def device_tokens(self) -> int:
        """Positions on device."""
    @property
    def host_tokens(self) -> int:
        """Positions with a valid host copy."""
    @property
    def pending_host_tokens(self) -> int:
        """Positions whose host copy is under way."""
    @property
    def pinned_tokens(self) -> int:
        """Positions under at least one pin."""
    @property
    def page_hash_count(self) -> int:
        """Page digests computed so far."""
    def __len__(self) -> int:
        """Nodes in the tree, without the root."""
    def __bool__(self) -> bool:
        """True: an empty tree is a tree."""
    def check_invariants(self) -> None:
        """Recompute what the tree keeps up as it goes, and compare.

        Raises:
            InvariantError: names the first violation.
        """
    def digest(self) -> int:
        """A number in ``[0, 2**62)`` that is equal for trees that hold the same."""
    def take_events(self) -> list[Stored | Removed | Cleared]:
        """The events since the last call, oldest first; empty without ``events=True``."""
    def reset(self) -> None:
        """Forget everything. Ids, receipts, plans, acks and pins from before are refused from now on."""

@final
class Replay:
    """Replays requests of a trace against a tree of its own: what `unified-cache replay` runs.

    `docs/replay.md` says what is done for a request and what counts as a hit. Sizes are in blocks of the
    trace. No copy takes time here, and no byte moves.
    """

    def __new__(
        cls,
        *,
        device_blocks: int,
        host_blocks: int,
        block_size: int,
        page_size: int | None,
        eviction_policy: str,
        policy_options: Sequence[tuple[str, int]],
        write_policy: _Policy,
        write_through_threshold: int | None,
        host_order: Literal["auto", "leaves_first", "copies_first"],
    ) -> Self:
        """An empty cache; `unified_cache.replay.Settings` explains the settings and checks their ranges.

        Raises:
            ArgumentError: a setting that can not be; the message names it.
        """
    def run(self, input_lengths: _Integers, block_counts: _Integers, hash_ids: _Integers) -> None:
        """Serve requests in order, after those of earlier calls. The interpreter's lock is not held.

        Args:
            input_lengths: prompt tokens of each request.
            block_counts: blocks of each request: its input length over the block size, rounded up.
            hash_ids: the blocks of all these requests, one request after the other.

        Raises:
            ArgumentError: lengths that do not fit each other; nothing was served.
        """
    def counters(self) -> dict[str, int]:
        """What happened so far, by the names that `unified_cache.replay.ReplayReport` explains."""
    @property
    def seconds(self) -> float:
        """Time that was spent in the tree and the pools so far; making tokens is not in it."""
    def check_invariants(self) -> None:
        """Check the tree, and that the pools agree with it.

        Raises:
            InvariantError: names the first violation.
        """

@final
class PageMemory:
    """A pool in CPU memory, as copies see it: `unified_cache.pools.planes` explains planes and runs.

    It holds its buffers, so their memory stays where it is; no two of its runs overlap.
    """

    def __new__(
        cls,
        planes: Sequence[Buffer | npt.NDArray[Any]],
        *,
        pages: int,
        tokens: int,
        heads: int,
        run_bytes: int,
        page_stride: int,
        token_stride: int,
        head_stride: int,
    ) -> Self:
        """The pool whose planes begin where these buffers do.

        Args:
            planes: one buffer for each (layer, part), layers outermost: writable, C-contiguous, of any type,
                and at least as long as to the end of the plane's last run. Buffers may overlap where runs do
                not.
            pages: pages in the pool.
            tokens: tokens a page.
            heads: heads a token.
            run_bytes: bytes of one head of one token.
            page_stride: bytes from a page to the next one, within a plane.
            token_stride: bytes from a token to the next one.
            head_stride: bytes from a head to the next one.

        Raises:
            ArgumentError: an object that is no such buffer, a buffer that is too short, runs that overlap, a
                number that can not be.
        """
    @property
    def planes(self) -> int:
        """How many planes there are: layers times parts."""
    @property
    def pages(self) -> int:
        """Pages in the pool."""

def copy_pages(
    target: PageMemory,
    target_pages: _Integers,
    source: PageMemory,
    source_pages: _Integers,
    *,
    first_plane: int = 0,
    planes: int | None = None,
    threads: int = 1,
    step: int | None = None,
    arrived: Callable[[int], object] | None = None,
) -> None:
    """Copy pages of one pool to pages of another one; the interpreter's lock is not held meanwhile.

    Nobody may write the source pages or use the target pages until it returns. A copy of a megabyte or more
    goes past the processor's cache.

    Args:
        target: the pool that is written.
        target_pages: page ids, each of them once.
        source: the pool that is read; its pages have as many tokens, heads and bytes a run, its layout may
            differ.
        source_pages: as many page ids.
        first_plane: the first plane that is copied.
        planes: how many planes are; None: all from the first one on.
        threads: threads that share the work, the caller's included; small copies use fewer.
        step: planes are copied so many at a time, all pages of them; None: all together, page by page.
        arrived: called on this thread with the number of each step, in order, as soon as its bytes are there.
            An exception that it raises ends the copy, and comes out of this call.

    Raises:
        ArgumentError: pages that differ in shape, lists of different lengths, a page or plane that is not in
            its pool, a target page that is named twice, planes of target and source in the same memory. No
            byte was moved.
    """

def object_checksums(
    headers: Buffer, covered: int, bodies: Sequence[Buffer], sizes: Sequence[int]
) -> npt.NDArray[np.uint64]:
    """XXH3 (64 bits, seed 0) of stored objects, each a part of its header and then its body.

    The interpreter's lock is not held meanwhile; nobody may write this memory until it returns.

    Args:
        headers: C-contiguous bytes, as many for each object.
        covered: bytes at the front of each header that count.
        bodies: C-contiguous bytes, one buffer for each object.
        sizes: bytes at the front of each body that count.

    Returns:
        uint64 (objects,).

    Raises:
        ArgumentError: not buffers of this kind, lists of different lengths, or more bytes than a buffer has.
    """

def copy_objects(
    targets: Sequence[Buffer],
    sources: Sequence[Buffer],
    headers: Buffer | None = None,
    covered: int = 0,
) -> npt.NDArray[np.uint64]:
    """Copy bodies of stored objects, and make the checksums of these objects in the same pass.

    The checksums are of the bytes that the targets then have, whatever becomes of the sources meanwhile. The
    interpreter's lock is not held; nobody may use the targets until it returns.

    Args:
        targets: writable C-contiguous bytes, one buffer for each object.
        sources: C-contiguous bytes, as many in each as its target has, in memory of their own.
        headers: C-contiguous bytes, as many for each object; None: no checksums.
        covered: bytes at the front of each header that count.

    Returns:
        What `object_checksums` gives for these headers and the bodies as they were copied; without headers
        nothing.

    Raises:
        ArgumentError: not buffers of this kind, or lists of different lengths. No byte was moved.
    """

def write_object_headers(
    headers: Buffer, keys: Sequence[str], stored_sizes: Sequence[int], page_bytes: int, codecs: Sequence[int]
) -> None:
    """Fill in the headers of stored objects (`unified_cache.storage.page_format`), with zeros for checksums.

    Args:
        headers: writable C-contiguous bytes, 192 for each object.
        keys: 1 to 150 ASCII characters each.
        stored_sizes: bytes of each body as it is to be stored.
        page_bytes: bytes of each page.
        codecs: of each body, 0 to 255.

    Raises:
        ArgumentError: no buffer of this kind, keys that can not be, or lists of different lengths. Nothing
            was written.
    """

def check_object_headers(
    headers: Buffer, keys: Sequence[str], stored_sizes: Sequence[int], page_bytes: int, checksums: Buffer
) -> list[int]:
    """The codec of each object whose header is what would be written for it now; -1 for any other.

    Args:
        headers: C-contiguous bytes, 192 for each object.
        keys: 1 to 150 ASCII characters each.
        stored_sizes: bytes of each body as it was read.
        page_bytes: bytes of each page.
        checksums: of the objects as they were read, uint64, C-contiguous.

    Raises:
        ArgumentError: no buffers of this kind, keys that can not be, or lists of different lengths.
    """

def read_object(file: int, header: Buffer, body: Buffer, covered: int | None = None) -> tuple[int, int]:
    """Read a stored object, which is a file from its beginning on, and make its checksum on the way.

    The interpreter's lock is not held; nobody may use this memory, or close the file, until it returns.

    Args:
        file: descriptor.
        header: writable C-contiguous bytes.
        body: likewise.
        covered: bytes at the front of the header that count; None: no checksum.

    Returns:
        How many bytes there were, header included, and what `object_checksums` gives for this header and
        body: 0 if the file ended before them, and without `covered`.

    Raises:
        ArgumentError: not buffers of this kind, or more bytes than the header has. No byte was read.
        OSError: the file can not be read; the memory has anything in it.
    """

def find_slots(
    keys: Buffer, hashes: Buffer, buckets: Buffer, words: Buffer, records: Buffer
) -> npt.NDArray[np.int64]:
    """Look up keys in an index of slots that processes share (`unified_cache.storage.backends.slot_index`).

    Args:
        keys: C-contiguous bytes, 152 for each key.
        hashes: likewise, uint64, one for each key.
        buckets: likewise, uint64, a power of two of them; other processes may write them meanwhile.
        words: uint64, one for each slot; likewise.
        records: 512 bytes for each slot; likewise.

    Returns:
        The slots, int64 (keys,), -1: not there.

    Raises:
        ArgumentError: not buffers of this kind, or of this length.
    """

def locate_objects(
    keys: Sequence[str],
    headers: Buffer,
    room: Sequence[int],
    sums: tuple[Sequence[int], int, int],
    buckets: Buffer,
    words: Buffer,
    records: Buffer,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """`find_slots`, and what the slots' records say, without a lock.

    Args:
        keys: 1 to 150 ASCII characters each.
        headers: writable C-contiguous bytes, as many for each object, 320 at most; filled in.
        room: the longest body that each object may have.
        sums: 63 weights, what checksums begin with, and what hashes are multiplied by.
        buckets, words, records: see `find_slots`.

    Returns:
        The slots, int64 (keys,), -1: not there, -2: there, with another header or a longer body; their words,
        uint64 (keys,); the bytes of their bodies, int64 (keys,). The last two, and headers, count where there
        is a slot.

    Raises:
        ArgumentError: not buffers of this kind, or of this length, or keys that can not be.
    """

def read_slot_table(
    records: Buffer, weights: Sequence[int], start: int, mix: int, slot_bytes: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """What a table of records has (`unified_cache.storage.backends.slot_records` has the format).

    The interpreter's lock is not held, and several threads read.

    Args:
        records: C-contiguous bytes, 512 for each slot.
        weights: 63 of them, for checksums and hashes.
        start: what checksums begin with.
        mix: what hashes are multiplied by.
        slot_bytes: longer bodies do not count.

    Returns:
        The slots whose records are whole, ascending; the hashes of their keys; the bytes of header and body.
        uint64 (objects,) each.

    Raises:
        ArgumentError: no buffer of this kind, or other than 63 weights.
    """

@final
class IoQueue:
    """Bodies of a file that is open with ``O_DIRECT``, moved many at a time (`io_submit`).

    The disk has all of them to do at once, and checksums are made while it works. Threads may share one.
    """

    def __new__(cls) -> IoQueue:
        """Ask the system for a queue.

        Raises:
            OSError: the system has no such thing, forbids it, or has no more of it (``fs.aio-max-nr``).
        """

    def read(
        self,
        file: int,
        offsets: Sequence[int],
        bodies: Sequence[Buffer],
        headers: Buffer | None = None,
        covered: int = 0,
    ) -> tuple[list[bool], npt.NDArray[np.uint64]]:
        """Read bodies.

        The interpreter's lock is not held; nobody may use this memory, or close the file, until it returns.

        Args:
            file: descriptor.
            offsets: in the file, of each body.
            bodies: writable C-contiguous bytes, in memory of their own.
            headers: C-contiguous bytes, as many for each object; None: no checksums.
            covered: bytes at the front of each header that count.

        Returns:
            Which bodies were read, each as a whole; others have anything in them. And what `object_checksums`
            gives for those that were read, 0 for others; nothing without headers.

        Raises:
            ArgumentError: not buffers of this kind, or lists of different lengths. No byte was read.
        """

    def write(
        self,
        file: int,
        offsets: Sequence[int],
        bodies: Sequence[Buffer],
        headers: Buffer | None = None,
        covered: int = 0,
    ) -> tuple[list[bool], npt.NDArray[np.uint64]]:
        """Write bodies, likewise; they are only read, and nobody may write them until it returns."""

def page_hashes(
    tokens: _Integers,
    page_size: int,
    *,
    parent: bytes | npt.NDArray[np.uint8] | None = None,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    bigram: bool = False,
) -> npt.NDArray[np.uint8]:
    """The chained SHA-256 digests of the whole pages of `tokens`, uint8 (pages, 32).

    Args:
        tokens: the key, or its part after `parent`.
        page_size: tokens a page.
        parent: digest of the page before, 32 bytes; None at the beginning of a prefix.
        extra_key: first half of the namespace, which seeds the chain (a `parent` has it in it already).
        cache_salt: second half of the namespace.
        bigram: positions are pairs of neighbouring tokens.

    Raises:
        ArgumentError: a token out of range, a bad page size, a parent that is not 32 bytes.
    """

@final
class LogPart:
    """A piece of a prefix log, read: records of one key space, whole and with the right digests."""

    def __new__(
        cls,
        data: Buffer,
        *,
        page_size: int,
        fingerprint: str | None = None,
        first_group: int | None = None,
        last: bool = False,
    ) -> Self:
        """Read records from the front of `data`; the interpreter's lock is not held meanwhile.

        Args:
            data: bytes of a log, from where the piece before was `consumed`.
            page_size: tokens a page: records with other pages are foreign.
            fingerprint: of the key space, 16 ASCII characters; None: all records are foreign.
            first_group: of the key space; None: any.
            last: nothing follows: a record that is cut off is damaged, and is not waited for.

        Raises:
            ArgumentError: not bytes, or a number or fingerprint that can not be.
        """
    @property
    def hashes(self) -> npt.NDArray[np.uint8]:
        """Digests of the pages of its records, uint8 (pages, 32)."""
    @property
    def consumed(self) -> int:
        """Bytes from the front that were taken; the others belong before the next piece."""
    @property
    def records(self) -> int:
        """Records of the key space."""
    @property
    def damaged(self) -> int:
        """Places where bytes were passed over, since they are no record."""
    @property
    def foreign(self) -> int:
        """Records of other key spaces."""
    @property
    def spaces(self) -> list[tuple[str, int, int]]:
        """(fingerprint, first group, tokens a page) of all records, each once."""

@final
class StoredTree:
    """Which prefixes a storage holds, as far as one process knows: a node for each run of pages.

    Pages are known by their digests; a page is known only if all before it are.
    """

    def __new__(cls, page_size: int, *, capacity: int) -> Self:
        """An empty tree.

        Args:
            page_size: tokens a page.
            capacity: pages that it may know; those used longest ago go first.

        Raises:
            ArgumentError: a number that can not be.
        """
    def add(
        self,
        hashes: npt.NDArray[np.uint8],
        *,
        parent: bytes | npt.NDArray[np.uint8] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[int, int]:
        """Add pages that follow each other, and the page `parent`.

        Args:
            hashes: their digests, uint8 (pages, 32).
            parent: digest of the page before; None at the beginning of a prefix.
            extra_key: first half of the namespace, needed at the beginning of a prefix.
            cache_salt: second half.

        Returns:
            How many were not known before, and how many have no place, since `parent` is not known.

        Raises:
            ArgumentError: not digests.
        """
    def load(
        self, part: LogPart, held: npt.NDArray[np.bool_] | None = None, *, piece: int = 0
    ) -> tuple[int, int]:
        """Add the records of a part of a log, of each the pages that are held up to the first gap.

        Args:
            part: a part of a log.
            held: bool (pages,): which pages of the part are there; None: all.
            piece: a number for the part, that `recent` and `all` give back.

        Returns:
            As `add`.

        Raises:
            ArgumentError: not as many entries as pages.
        """
    def known(self, hashes: npt.NDArray[np.uint8]) -> int:
        """How many of these pages, from the first on, are known.

        Raises:
            ArgumentError: not digests.
        """
    def touch(self, hashes: npt.NDArray[np.uint8]) -> int:
        """`known`, and they count as used now.

        Raises:
            ArgumentError: not digests.
        """
    def forget(self, digest: bytes | npt.NDArray[np.uint8]) -> int:
        """Forget a page and all below it; returns how many pages these were.

        Raises:
            ArgumentError: not a digest.
        """
    def recent(
        self, pages: int
    ) -> list[tuple[tuple[str | None, str | None], list[tuple[int, int, int, int]]]]:
        """The prefixes used last, the latest first, of at most so many pages together.

        Of each its namespace, and of each of its nodes from the beginning on (node, pages from its front,
        piece, byte at which its tokens begin there). Only those that came from a log.

        Raises:
            ArgumentError: a negative number.
        """
    def all(
        self,
    ) -> list[tuple[bytes | None, tuple[str | None, str | None], int, tuple[int, int] | None]]:
        """Of each node (digest before it, namespace, pages, (piece, byte)), parents before children."""
    @property
    def pages(self) -> int:
        """How many are known."""
    def __len__(self) -> int:
        """Nodes."""
    def __bool__(self) -> bool:
        """True: an empty tree is a tree."""
    def check_invariants(self) -> None:
        """Recompute what the tree keeps up as it goes, and compare.

        Raises:
            InvariantError: names the first violation.
        """

def prefix_record(
    tokens: _Integers,
    *,
    page_size: int,
    fingerprint: str,
    first_group: int = 0,
    parent: bytes | npt.NDArray[np.uint8] | None = None,
    extra_key: str | None = None,
    cache_salt: str | None = None,
) -> bytes:
    """One record of a prefix log.

    Args:
        tokens: whole pages.
        page_size: tokens a page.
        fingerprint: of the key space, 16 ASCII characters.
        first_group: of the key space.
        parent: digest of the page before; None at the beginning of a prefix.
        extra_key: first half of the namespace; kept at the beginning of a prefix.
        cache_salt: second half.

    Raises:
        ArgumentError: not whole pages, a token out of range, a record of more than 64 MiB.
    """
