"""What every storage backend can do: objects by key, in batches, straight from and into host pool memory.

A backend moves bytes. What an object holds, its checksum, compression, deadlines, the circuit breaker and
which thread calls are the business of `unified_cache.storage.guard`, once, for all backends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from unified_cache.storage.checksums import Checksums

__all__ = ["Backend", "ObjectBatch", "PageStatus", "PrefixLog"]


class PageStatus(Enum):
    """What became of one object of a batch."""

    HIT = "hit"  # get: its bytes are there; set: it is stored now, by this call or before
    MISS = "miss"  # get: nothing is stored under the key
    FULL = "full"  # set: there is no room; nothing was stored
    CORRUPT = "corrupt"  # get: it is short, too long, torn, foreign, or its checksum does not fit
    ERROR = "error"  # the backend failed
    TIMEOUT = "timeout"  # not answered within the deadline


@dataclass(frozen=True, slots=True)
class ObjectBatch:
    """Objects of one call, and the memory that they are read from or into.

    An object is a header and a body, stored one right after the other under its key. Both lie in memory of
    the caller, which the backend neither keeps nor touches after the call. After a get that was no HIT their
    content is undefined.

    Attributes:
        keys: at most 150 characters each, of ``0-9 a-z - _ .``; none twice.
        headers: uint8 (objects, header bytes), contiguous.
        bodies: one writable view of bytes for each object, all of one size; memory of the host pool, or
            scratch memory if what is stored is compressed.
        body_addresses: uint64 (objects,), where the bodies lie: for clients that take addresses.
        body_sizes: uint64 (objects,): set: bytes to store of each body. get: bytes that its memory has; an
            object with a shorter body is read as far as it goes.
        stored_sizes: uint64 (objects,): get: filled in by the backend, bytes of the body that were read.
        checksums: of the objects; None but for backends that say `makes_checksums`. get: the backend may make
            those of objects that are a HIT, of header and body as they then lie in the batch's memory; what
            it does not make is made by the caller, from memory. set: it has to make that of each object that
            it stores before it takes the object's header, where it goes.
    """

    keys: Sequence[str]
    headers: npt.NDArray[np.uint8]
    bodies: Sequence[memoryview]
    body_addresses: npt.NDArray[np.uint64]
    body_sizes: npt.NDArray[np.uint64]
    stored_sizes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    checksums: Checksums | None = None

    def __len__(self) -> int:
        return len(self.keys)


class PrefixLog(ABC):
    """What a store remembers of the prefixes whose pages it was given: records, one after the other.

    What a record says is no business of the store, which keeps bytes (`unified_cache.storage.prefixes` has
    the rest). Calls come from several threads, and several processes where the store is shared.
    """

    @abstractmethod
    def append(self, records: bytes) -> int:
        """Add whole records at the end; returns how many bytes the log has then.

        Raises:
            StorageError: nothing was added, or a part that is no record.
        """

    @abstractmethod
    def read(self) -> Iterator[bytes]:
        """The log from its beginning to what is its end now, in pieces that end anywhere.

        Raises:
            StorageError: it can not be read.
        """

    @abstractmethod
    def rewrite(self, keep: Callable[[Iterator[bytes]], Iterable[bytes] | None]) -> int | None:
        """Put other records in the place of what is there; what is added meanwhile follows them.

        Whoever is killed in it leaves the log as it was. Nobody waits while `keep` runs.

        Args:
            keep: given what `read` gives, returns the records to keep; None: leave it as it is.

        Returns:
            How many bytes the log has then; None if it was left as it is, or somebody else is at it.

        Raises:
            StorageError: it can not be done; the log is as it was.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""


class Backend(ABC):
    """One storage engine. Calls come from several threads at once.

    No call takes longer than the deadline that the backend was made with, as far as its client allows that; a
    call that its client holds up for longer is waited for by its thread alone. A call never raises for what
    is wrong with one object (its status says so), and raises `StorageError` if the engine as a whole can not
    be reached. After `close` every call but `close` is a `ClosedError`.

    Attributes:
        scheme: of its URLs.
        durable: what was stored outlives the process.
        shared: other processes see it.
        makes_checksums: `get` and `set` make the checksums of objects (`ObjectBatch.checksums`), for backends
            that can do so while they copy the bytes, or while other threads wait for a device: that costs
            less than before or after. It speaks for the class that says it: one that derives from it and has
            a `get` or `set` of its own has to say it anew.
    """

    scheme: ClassVar[str]
    durable: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    makes_checksums: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Bytes that were changed behind a checksum would count as sound.
        own = vars(cls)
        if ("get" in own or "set" in own) and "makes_checksums" not in own:
            cls.makes_checksums = False

    def host_memory(self, size: int) -> memoryview | None:
        """Memory for a host pool to lie in, if bodies that lie there save a copy; None: any memory will do.

        Asked once for each host pool that is made when the backend is there already, which is then given to
        `register` like any other. Of a backend that is attached later nobody asks, and what it lent is used
        on when it was detached: so it has to do with other memory too, and what it lends belongs to whoever
        holds a view of it, before and after `close`. It goes with the last view.

        Args:
            size: bytes.

        Returns:
            uint8 (size,): writable, all zero, beginning at a multiple of the system's page size.

        Raises:
            StorageError: it can not be had; the pool takes memory of its own then.
        """
        return None

    def register(self, memory: memoryview) -> None:  # noqa: B027
        """Bodies will lie in this memory: a host pool, each of them once, before the first get or set.

        For clients that have to know it. It stays where it is until `close` has returned.
        """

    def expect(self, body_bytes: int) -> None:  # noqa: B027
        """Bodies will have up to so many bytes: said once, when the backend is attached, before `register`.

        Raises:
            StorageError: not one of them would fit, or none ever: better said now than for each page.
        """

    @abstractmethod
    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """For each run of keys how many, from the first on and without a gap, are stored; one round trip."""

    @abstractmethod
    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        """Read objects into the batch's memory.

        HIT, MISS, CORRUPT (longer than its memory), ERROR, TIMEOUT.
        """

    @abstractmethod
    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        """Store objects from the batch's memory. HIT, FULL, ERROR, TIMEOUT.

        The first writer of a key wins: an object that is there already stays as it is, and is a HIT. An
        object is visible under its key only when it is complete and, where the backend is durable, on its
        medium.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> int:
        """Forget objects; returns how many were there. Those that others read just now may be left."""

    def discard(self, keys: Sequence[str]) -> int:
        """`delete` of objects that are damaged: also while somebody reads them, who finds the same damage."""
        return self.delete(keys)

    def holds(self, digests: npt.NDArray[np.uint8], ending: str) -> npt.NDArray[np.bool_]:
        """Which of many objects seem to be there: their keys are digests, in hex, and one ending.

        For looking through a whole store. It may be wrong about a few.

        Args:
            digests: uint8 (objects, 32).
            ending: of each key.

        Returns:
            bool (objects,).
        """
        whole = digests.tobytes().hex()
        found = self.exists([[whole[at : at + 64] + ending] for at in range(0, len(whole), 64)])
        return np.array(found, np.bool_)

    def prefix_log(self) -> PrefixLog | None:
        """Where the store keeps what is known of its prefixes; None: it has no place for that.

        Every call gives the same, or one that does the same. It goes on working after `close`.
        """
        return None

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """The keys of all objects, in any order; of what comes or goes meanwhile, some."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every object, and what processes that died have left behind."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Plain numbers: at least `objects` and `bytes`, and `capacity_bytes` where there is a limit."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; waits for calls that run. More than once is fine."""
