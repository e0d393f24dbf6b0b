"""Checksums of the objects of a batch, which whoever moves their bodies may make on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from unified_cache._native import IoQueue, copy_objects, object_checksums, read_object

__all__ = ["Checksums", "copy_bodies", "move_queued", "read_file"]


class Checksums:
    """One for each object: XXH3 of the front of its header, and of its body as it is stored.

    A thread may make those of some objects while others make those of others.

    Args:
        headers: uint8 (objects, header bytes).
        covered: bytes at the front of each header that count.
        values: uint64 (objects,), where they go; may be a part of the headers behind what counts. 0 stands
            for one that was not made.
    """

    def __init__(self, headers: npt.NDArray[np.uint8], covered: int, values: npt.NDArray[np.uint64]) -> None:
        self._headers = headers
        self._covered = covered
        self.values = values

    def make(self, at: Sequence[int], bodies: Sequence[memoryview]) -> None:
        """Make those of the objects `at`, whose headers lie in the batch and whose bodies are these."""
        sizes = [body.nbytes for body in bodies]
        rows = _rows(at)
        self.values[rows] = object_checksums(self._headers[rows].data, self._covered, bodies, sizes)

    def copy(self, at: Sequence[int], targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
        """Copy the bodies of the objects `at`, and make their checksums: of the targets as they are then."""
        rows = _rows(at)
        self.values[rows] = copy_objects(targets, sources, self._headers[rows].data, self._covered)

    def read(self, at: int, file: int, body: memoryview) -> int:
        """Read the object `at` from a file that has nothing else, and make its checksum.

        Returns:
            How many bytes of header and body there were; if it was not all, no checksum was made.
        """
        done, checksum = read_object(file, self._headers[at], body, self._covered)
        self.values[at] = checksum
        return done

    def move(
        self,
        move: Callable[..., tuple[list[bool], npt.NDArray[np.uint64]]],
        file: int,
        offsets: Sequence[int],
        at: Sequence[int],
        bodies: Sequence[memoryview],
    ) -> list[bool]:
        """Read or write the bodies of the objects `at`, and make checksums. Returns which were moved."""
        rows = _rows(at)
        moved, self.values[rows] = move(file, offsets, bodies, self._headers[rows].data, self._covered)
        return moved

    def only(self, at: Sequence[int]) -> Checksums:
        """A copy of those of some objects."""
        return Checksums(self._headers[at], self._covered, self.values[at])


def _rows(at: Sequence[int]) -> slice | Sequence[int]:
    """The same objects as numpy takes them fastest."""
    count = len(at)
    if count == 1 or (count and list(at) == list(range(at[0], at[0] + count))):
        return slice(at[0], at[0] + count)
    return at


def copy_bodies(
    checksums: Checksums | None,
    at: Sequence[int],
    targets: Sequence[memoryview],
    sources: Sequence[memoryview],
) -> None:
    """Copy the bodies of the objects `at` of a batch, and make their checksums if the batch wants them."""
    if checksums is None:
        copy_objects(targets, sources)
    else:
        checksums.copy(at, targets, sources)


def read_file(
    checksums: Checksums | None, headers: npt.NDArray[np.uint8], at: int, file: int, body: memoryview
) -> int:
    """Read the object `at` of a batch from a file, and make its checksum if the batch wants them.

    Returns:
        How many bytes of header and body there were.

    Raises:
        OSError: the file can not be read.
    """
    if checksums is None:
        return read_object(file, headers[at], body)[0]
    return checksums.read(at, file, body)


def move_queued(
    checksums: Checksums | None,
    queue: IoQueue,
    file: int,
    offsets: Sequence[int],
    at: Sequence[int],
    bodies: Sequence[memoryview],
    *,
    write: bool,
) -> list[bool]:
    """Move the bodies of the objects `at` of a batch, and make their checksums if the batch wants them.

    Returns:
        Which were moved, each as a whole.
    """
    move = queue.write if write else queue.read
    if checksums is None:
        return move(file, offsets, bodies)[0]
    return checksums.move(move, file, offsets, at, bodies)
