"""What bodies lie on: a file that is read and written, or one that is mapped."""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from unified_cache._native import IoQueue
from unified_cache.storage.checksums import Checksums, copy_bodies, move_queued

__all__ = ["Bodies", "FileMedium", "MappedMedium", "Medium"]

BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Bodies:
    """Bodies of a batch that lie one after the other on the medium.

    Attributes:
        at: which objects of the batch.
        views: their bytes, as many as are moved.
        addresses: where these lie.
        checksums: of the whole batch; the medium makes those of these objects if it is not None.
    """

    at: Sequence[int]
    views: Sequence[memoryview]
    addresses: Sequence[int]
    checksums: Checksums | None

    def part(self, begin: int, end: int) -> Bodies:
        """Some of them."""
        return Bodies(self.at[begin:end], self.views[begin:end], self.addresses[begin:end], self.checksums)

    def pick(self, places: Sequence[int]) -> Bodies:
        """Some of them."""
        return Bodies(
            [self.at[place] for place in places],
            [self.views[place] for place in places],
            [self.addresses[place] for place in places],
            self.checksums,
        )

    def make_checksums(self) -> None:
        """Make those that are wanted, from memory."""
        if self.checksums is not None:
            self.checksums.make(self.at, self.views)


class Medium(ABC):
    """Bytes from 0 to a fixed size."""

    @abstractmethod
    def read(self, offset: int, bodies: Bodies) -> bool:
        """Fill the bodies; False if there are not as many bytes.

        Raises:
            OSError: the medium failed.
        """

    @abstractmethod
    def write(self, offset: int, bodies: Bodies) -> None:
        """Write the bodies.

        Raises:
            OSError: the medium failed.
        """

    def read_queued(self, offsets: Sequence[int], bodies: Bodies) -> Sequence[bool]:
        """Fill those of the bodies, each at its offset, that need no thread to wait for them.

        Returns:
            Which those were. The others have anything in them: they are for `read`.
        """
        return [False] * len(offsets)

    def write_queued(self, offsets: Sequence[int], bodies: Bodies) -> Sequence[bool]:
        """Write bodies, likewise."""
        return [False] * len(offsets)

    @abstractmethod
    def sync(self) -> None:
        """Make durable what was written.

        Raises:
            OSError: the medium failed.
        """

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Plain numbers."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""


def _rest(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    for at, piece in enumerate(pieces):
        if done < piece.nbytes:
            return [piece[done:], *pieces[at + 1 :]]
        done -= piece.nbytes
    return []


class FileMedium(Medium):
    """Past the page cache and all at once where file system and memory allow it; else preadv and pwritev.

    The host tier is the cache of what lies here: a second one in the kernel only costs a copy and memory.

    Args:
        path: of a file that exists.
        direct: try O_DIRECT.
        queued: of a batch ask the disk for all at once where O_DIRECT can be had.
    """

    def __init__(self, path: str, direct: bool, queued: bool) -> None:
        self._cached = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._direct = -1
        self._queue: IoQueue | None = None
        self._direct_transfers = self._cached_transfers = self._queued_transfers = 0
        if direct:
            with contextlib.suppress(OSError):
                self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            try:
                if self._direct >= 0:
                    # Some file systems take the flag and refuse the first transfer.
                    os.preadv(self._direct, [mmap.mmap(-1, BLOCK)], 0)
            except OSError:
                os.close(self._direct)
                self._direct = -1
        if queued and self._direct >= 0:
            with contextlib.suppress(OSError):
                self._queue = IoQueue()

    def read_queued(self, offsets: Sequence[int], bodies: Bodies) -> Sequence[bool]:
        """Fill those that may go past the page cache. Their checksums are made while the disk works."""
        return self._move_queued(offsets, bodies, write=False)

    def write_queued(self, offsets: Sequence[int], bodies: Bodies) -> Sequence[bool]:
        """Write those that may go past the page cache, likewise."""
        return self._move_queued(offsets, bodies, write=True)

    def _move_queued(self, offsets: Sequence[int], bodies: Bodies, *, write: bool) -> Sequence[bool]:
        if self._queue is None:
            return [False] * len(offsets)
        may = [
            not (address % BLOCK or view.nbytes % BLOCK)
            for address, view in zip(bodies.addresses, bodies.views, strict=True)
        ]
        if all(may):
            moved: Sequence[bool] = move_queued(
                bodies.checksums, self._queue, self._direct, offsets, bodies.at, bodies.views, write=write
            )
        else:
            some = [place for place, can in enumerate(may) if can]
            done = self._move_queued([offsets[place] for place in some], bodies.pick(some), write=write)
            for place, well in zip(some, done, strict=True):
                may[place] = well
            return may
        self._queued_transfers += sum(moved)
        return moved

    def _split(self, bodies: Bodies) -> int:
        """Bytes from the front that can go past the page cache."""
        pieces = bodies.views
        if self._direct < 0 or any(address % BLOCK for address in bodies.addresses):
            return 0
        if len(pieces) == 1:
            return pieces[0].nbytes // BLOCK * BLOCK
        return 0 if any(piece.nbytes % BLOCK for piece in pieces) else sum(p.nbytes for p in pieces)

    def read(self, offset: int, bodies: Bodies) -> bool:
        """Fill the bodies. Their checksums are made while other threads wait for the disk."""
        pieces, front = bodies.views, self._split(bodies)
        total, done = sum(piece.nbytes for piece in pieces), 0
        while done < total:
            direct = done < front
            rest = _rest(pieces, done)
            if direct and front < total:
                rest = [rest[0][: front - done]]
            got = os.preadv(self._direct if direct else self._cached, rest, offset + done)
            self._count(direct)
            if got == 0:
                return False
            # After a direct transfer that ended within a block the block is done again.
            done += got // BLOCK * BLOCK if direct else got
            if direct and got < BLOCK:
                return False
        bodies.make_checksums()
        return True

    def write(self, offset: int, bodies: Bodies) -> None:
        """Write the bodies. Their checksums are made while other threads wait for the disk, as in `read`."""
        pieces, front = bodies.views, self._split(bodies)
        total, done = sum(piece.nbytes for piece in pieces), 0
        while done < total:
            direct = done < front
            rest = _rest(pieces, done)
            if direct and front < total:
                rest = [rest[0][: front - done]]
            put = os.pwritev(self._direct if direct else self._cached, rest, offset + done)
            self._count(direct)
            if direct and put < BLOCK:
                raise OSError(f"{put} bytes written of a block")
            done += put // BLOCK * BLOCK if direct else put
        bodies.make_checksums()

    def _count(self, direct: bool) -> None:
        # Threads may lose counts to each other: these numbers say which way bytes go, not how many.
        if direct:
            self._direct_transfers += 1
        else:
            self._cached_transfers += 1

    def sync(self) -> None:
        """Make durable what was written, either way."""
        os.fdatasync(self._cached)

    def stats(self) -> dict[str, int]:
        """How bytes go."""
        return {
            "direct": int(self._direct >= 0),
            "direct_transfers": self._direct_transfers,
            "cached_transfers": self._cached_transfers,
            "queued": int(self._queue is not None),
            "queued_transfers": self._queued_transfers,
        }

    def close(self) -> None:
        """Let go of the file."""
        self._queue = None
        os.close(self._cached)
        if self._direct >= 0:
            os.close(self._direct)


class MappedMedium(Medium):
    """Copies from and to a file that is mapped, shared.

    Args:
        path: of a file that exists.
        durable: whether it has to be told to keep what was written; False for a file in memory.
    """

    def __init__(self, path: str, durable: bool) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._bytes = memoryview(mmap.mmap(self._file, 0, mmap.MAP_SHARED))
        except BaseException:
            os.close(self._file)
            raise
        self._durable = durable

    def _slices(self, offset: int, bodies: Bodies) -> list[memoryview]:
        """What the bodies have on the medium; fewer if it ends before."""
        slices = []
        for view in bodies.views:
            end = offset + view.nbytes
            if end > self._bytes.nbytes:
                break
            slices.append(self._bytes[offset:end])
            offset = end
        return slices

    def read(self, offset: int, bodies: Bodies) -> bool:
        """Fill the bodies, and make their checksums in the same pass."""
        slices = self._slices(offset, bodies)
        if len(slices) < len(bodies.views):
            return False
        copy_bodies(bodies.checksums, bodies.at, bodies.views, slices)
        return True

    def write(self, offset: int, bodies: Bodies) -> None:
        """Write the bodies, and make their checksums in the same pass."""
        slices = self._slices(offset, bodies)
        if len(slices) < len(bodies.views):
            raise OSError(f"the file has {self._bytes.nbytes} bytes, no room for bodies at {offset}")
        copy_bodies(bodies.checksums, bodies.at, slices, bodies.views)

    def sync(self) -> None:
        """Make durable what was written."""
        if self._durable:
            os.fdatasync(self._file)

    def stats(self) -> dict[str, int]:
        """Nothing of interest."""
        return {}

    def close(self) -> None:
        """Let go of the file, and of the mapping."""
        os.close(self._file)
        del self._bytes
