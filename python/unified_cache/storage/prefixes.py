"""What a store holds as prefixes: records for its log, and the tree that they make after a restart.

Keys of objects are digests: from them alone nobody can tell which prefixes a store has. So whoever stores
pages appends to the store's `PrefixLog` what they are pages of, and whoever comes later reads it into a
`StoredTree`. Of what the log says only that counts which the store still has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache._native import LogPart, StoredTree, prefix_record
from unified_cache.storage.contract import Backend, PrefixLog
from unified_cache.storage.keys import KeySpace, PoolKeys

__all__ = [
    "KnownPrefixes",
    "PrefixLoad",
    "PrefixPages",
    "StoredPrefix",
    "compact",
    "encode",
    "holder",
    "known_prefixes",
]

Digests = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.uint32]
Namespace = tuple[str | None, str | None]

_PLAIN: Namespace = (None, None)
# Tokens of one record, at most: it has to be read in one piece.
_RECORD_TOKENS = 1 << 20
# Where in a record the digest of its last page is.
_LAST_DIGEST = slice(80, 112)
# What a compaction writes at a time.
_WRITE_BYTES = 8 << 20
_MOST_PAGES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PrefixPages:
    """Pages that follow each other in a prefix, and what they hold.

    Attributes:
        hashes: their digests, uint8 (pages, 32).
        tokens: theirs, whole pages.
        parent: digest of the page before; None at the beginning of a prefix.
        namespace: of the prefix (extra_key, cache_salt).
    """

    hashes: Digests
    tokens: Tokens
    parent: bytes | None
    namespace: Namespace = _PLAIN

    def part(self, begin: int, end: int) -> PrefixPages:
        """Some of the pages."""
        size = len(self.tokens) // len(self.hashes)
        return PrefixPages(
            self.hashes[begin:end],
            self.tokens[begin * size : end * size],
            self.hashes[begin - 1].tobytes() if begin else self.parent,
            self.namespace,
        )


def encode(
    tokens: Tokens, parent: bytes | None, namespace: Namespace, page_size: int, keys: PoolKeys
) -> bytes:
    """Pages that follow `parent` as records of a log: one, if they are not very many.

    Args:
        tokens: whole pages.
        parent: digest of the page before; None at the beginning of a prefix.
        namespace: (extra_key, cache_salt).
        page_size: tokens a page.
        keys: names of the pages' objects, or of the first ones of them.
    """
    step = max(1, _RECORD_TOKENS // page_size) * page_size
    extra_key, cache_salt = namespace
    records = []
    for start in range(0, len(tokens), step):
        record = prefix_record(
            tokens[start : start + step],
            page_size=page_size,
            fingerprint=keys.fingerprint,
            first_group=keys.first_group,
            parent=parent,
            extra_key=extra_key,
            cache_salt=cache_salt,
        )
        parent = record[_LAST_DIGEST]
        records.append(record)
    return b"".join(records)


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A prefix that a store holds, from its beginning.

    Attributes:
        namespace: (extra_key, cache_salt).
        parts: its tokens, one after the other; prefixes that begin alike share the arrays.
    """

    namespace: Namespace
    parts: tuple[Tokens, ...]

    @property
    def tokens(self) -> Tokens:
        """All of them, uint32."""
        return np.concatenate(self.parts)


class PrefixLoad:
    """Reads a log into a tree, a piece in each step.

    Args:
        pieces: of the log, in order.
        fingerprint: of the pages' keys; None: nobody's, to see who there is.
        first_group: of the rank that has written the records; None: any.
        page_size: tokens a page.
        capacity: pages that the tree may know: those stored longest ago go first.
        holds: says which pages, by their digests, the store has.
        keep: keep what was read, for `recent` and `live`.

    Attributes:
        tree: what was read so far.
        bytes: of the log, read so far.
        records: of these pages.
        damaged: places where bytes had to be passed over.
        gone: pages that the store has no longer, or that have nothing before them.
        spaces: (fingerprint, first group, tokens a page) of all records of the log.
    """

    def __init__(
        self,
        pieces: Iterable[bytes],
        fingerprint: str | None,
        first_group: int | None,
        page_size: int,
        capacity: int,
        holds: Callable[[Digests], npt.NDArray[np.bool_]],
        *,
        keep: bool = True,
    ) -> None:
        self.tree = StoredTree(page_size, capacity=capacity)
        self.bytes = self.records = self.damaged = self.gone = 0
        self.spaces: set[tuple[str, int, int]] = set()
        self._rest = iter(pieces)
        self._fingerprint = fingerprint
        self._first_group = first_group
        self._page_size = page_size
        self._holds = holds
        self._keep = keep
        self._pieces: list[bytes] = []
        self._tail = b""
        self._ended = False

    def step(self) -> bool:
        """Read one more piece; False if that was the last."""
        if self._ended:
            return False
        piece = next(self._rest, None)
        self._ended = piece is None
        data = self._tail + piece if piece is not None else self._tail
        self.bytes += len(piece or b"")
        part = LogPart(
            data,
            page_size=self._page_size,
            fingerprint=self._fingerprint,
            first_group=self._first_group,
            last=self._ended,
        )
        hashes = part.hashes
        held = self._holds(hashes) if len(hashes) else np.zeros(0, np.bool_)
        _, orphans = self.tree.load(part, held, piece=len(self._pieces))
        if self._keep:
            self._pieces.append(data)
        self._tail = data[part.consumed :]
        self.records += part.records
        self.damaged += part.damaged
        self.gone += int(len(held) - np.count_nonzero(held)) + orphans
        self.spaces.update(part.spaces)
        return not self._ended

    def recent(self, pages: int) -> list[StoredPrefix]:
        """The prefixes that were stored last, the latest first, of at most so many pages together."""
        arrays: dict[tuple[int, int], Tokens] = {}
        prefixes = []
        for namespace, runs in self.tree.recent(pages):
            parts = []
            for node, count, piece, at in runs:
                # A copy: the pieces are to go.
                tokens = arrays.get((node, count))
                if tokens is None:
                    tokens = arrays[node, count] = self._tokens(piece, at, count).copy()
                parts.append(tokens)
            prefixes.append(StoredPrefix(namespace, tuple(parts)))
        return prefixes

    def live(self) -> Iterator[bytes]:
        """What the tree knows as records, parents before children."""
        assert self._fingerprint is not None
        keys = PoolKeys(self._fingerprint, first_group=self._first_group or 0)
        for parent, namespace, pages, source in self.tree.all():
            assert source is not None
            tokens = self._tokens(*source, pages)
            yield encode(tokens, parent, namespace, self._page_size, keys)

    def _tokens(self, piece: int, at: int, pages: int) -> Tokens:
        return np.frombuffer(self._pieces[piece], "<u4", pages * self._page_size, at)

    def forget_log(self) -> None:
        """Keep the tree, and let what was read of the log go."""
        self._pieces, self._tail = [], b""


@dataclass(frozen=True, slots=True)
class KnownPrefixes:
    """What a store's log says of the pages of one key space.

    Attributes:
        fingerprint: in their keys.
        first_group: of the rank that has written them.
        page_size: tokens a page.
        prefixes: nodes of the tree that they make.
        pages: that the store has.
        gone: that it has no longer.
    """

    fingerprint: str
    first_group: int
    page_size: int
    prefixes: int
    pages: int
    gone: int


def known_prefixes(backend: Backend, log: PrefixLog) -> list[KnownPrefixes]:
    """What the log says that the store holds, for each key space.

    Raises:
        StorageError: the store can not be reached.
    """
    return [
        KnownPrefixes(fingerprint, group, page_size, len(load.tree), load.tree.pages, load.gone)
        for (fingerprint, group, page_size), load in _loads(backend, log.read, keep=False)
    ]


def compact(backend: Backend, log: PrefixLog, stopped: Callable[[], bool] = lambda: False) -> int | None:
    """Leave in the log what the store still has, whosever it is.

    Args:
        backend: the store.
        log: its log.
        stopped: asked now and then; True: leave the log as it is.

    Returns:
        The bytes that the log has then; None if it was left as it is.

    Raises:
        StorageError: the store can not be reached, or the log not be written.
    """

    def keep(pieces: Iterator[bytes]) -> Iterable[bytes] | None:
        everything = list(pieces)
        loads = list(_loads(backend, lambda: iter(everything), stopped, keep=True))
        return None if stopped() else _joined(loads)

    return log.rewrite(keep)


def _loads(
    backend: Backend,
    read: Callable[[], Iterator[bytes]],
    stopped: Callable[[], bool] = lambda: False,
    *,
    keep: bool,
) -> Iterator[tuple[tuple[str, int, int], PrefixLoad]]:
    """The log, read once for each key space in it."""
    look = PrefixLoad(read(), None, None, 1, 1, lambda digests: np.zeros(len(digests), np.bool_), keep=False)
    while look.step() and not stopped():
        pass
    for fingerprint, first_group, page_size in sorted(look.spaces):
        # The first object of a page: its rank has stored all of them, or the page is not in the log.
        holds = holder(backend, KeySpace([PoolKeys(fingerprint, first_group=first_group)]))
        load = PrefixLoad(read(), fingerprint, first_group, page_size, _MOST_PAGES, holds, keep=keep)
        while load.step() and not stopped():
            pass
        yield (fingerprint, first_group, page_size), load


def holder(backend: Backend, keys: KeySpace) -> Callable[[Digests], npt.NDArray[np.bool_]]:
    """Asks a store which pages it has, with all their objects."""

    def holds(digests: Digests) -> npt.NDArray[np.bool_]:
        there = backend.holds(digests, keys.endings[0])
        for ending in keys.endings[1:]:
            there &= backend.holds(digests, ending)
        return there

    return holds


def _joined(loads: Sequence[tuple[object, PrefixLoad]]) -> Iterator[bytes]:
    records: list[bytes] = []
    size = 0
    for _, load in loads:
        for record in load.live():
            records.append(record)
            size += len(record)
            if size >= _WRITE_BYTES:
                yield b"".join(records)
                records, size = [], 0
    yield b"".join(records)
