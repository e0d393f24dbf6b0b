"""Looking at what a storage holds, whatever pages these are: every object, with its checksum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from unified_cache.errors import StorageError
from unified_cache.storage.compression import CODECS, NO_CODEC
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus
from unified_cache.storage.page_format import HEADER_BYTES, check_objects, page_bytes_of

__all__ = ["FoundObject", "ObjectReader"]

# Memory to read into. An object that has more is not read.
_MOST_BYTES = 256 << 20
_FIRST_BYTES = 1 << 20
_BATCH = 32


@dataclass(frozen=True, slots=True)
class FoundObject:
    """One object of a storage.

    Attributes:
        key: its name.
        status: HIT if it is sound; MISS if it is gone, or of a version or codec that is not known here (then
            `bytes` is not 0); CORRUPT, ERROR, TIMEOUT.
        bytes: of the object, its header included; 0 if it was not read.
        page_bytes: of its page, if it is sound.
        reason: what is wrong with it, in words.
    """

    key: str
    status: PageStatus
    bytes: int = 0
    page_bytes: int = 0
    reason: str = ""


class ObjectReader:
    """Reads objects of any size, and checks them.

    Args:
        backend: where they are; nothing else may have registered memory with it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._memory = np.empty(_MOST_BYTES, np.uint8)
        self._size = _FIRST_BYTES  # of the largest object so far, as a power of two
        backend.register(self._memory.data)

    def read(self, keys: Iterable[str]) -> Iterator[FoundObject]:
        """The objects with these keys, in this order.

        Raises:
            StorageError: the storage can not be reached.
        """
        rest = iter(keys)
        while True:
            batch = list(islice(rest, min(_BATCH, _MOST_BYTES // self._size)))
            if not batch:
                return
            yield from self._batch(batch)

    def _batch(self, keys: Sequence[str]) -> list[FoundObject]:
        found = self._read(keys, self._size)
        for at, one in enumerate(found):
            # What is too long looks damaged: it may just be of a larger page.
            size = self._size
            while one.status is PageStatus.CORRUPT and one.bytes == 0 and size < _MOST_BYTES:
                size *= 2
                (one,) = self._read([one.key], size)
                if one.status is PageStatus.HIT:
                    self._size = size
            found[at] = one
        return found

    def _read(self, keys: Sequence[str], size: int) -> list[FoundObject]:
        count = len(keys)
        room = self._memory[: count * size].reshape(count, size)
        views = [row.data for row in room]
        addresses = (room.ctypes.data + np.arange(count) * size).astype(np.uint64)
        headers = np.zeros((count, HEADER_BYTES), np.uint8)
        batch = ObjectBatch(
            keys, headers, views, addresses, np.full(count, size, np.uint64), np.zeros(count, np.uint64)
        )
        statuses = self._backend.get(batch)
        if len(statuses) != count:
            raise StorageError(f"the backend answered {len(statuses)} statuses for {count} objects")
        codecs = (NO_CODEC, *(codec.number for codec in CODECS.values()))
        found = []
        for at, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            if status is not PageStatus.HIT:
                found.append(FoundObject(key, status, reason=_REASONS.get(status, "")))
                continue
            header, stored = headers[at : at + 1], int(batch.stored_sizes[at])
            (page,) = page_bytes_of(header)
            (checked,) = check_objects(header, [key], [views[at]], [stored], page, codecs)
            if checked.status is PageStatus.HIT and checked.codec == NO_CODEC and stored != page:
                found.append(
                    FoundObject(
                        key, PageStatus.CORRUPT, HEADER_BYTES + stored, reason=f"{stored} bytes of {page}"
                    )
                )
                continue
            found.append(FoundObject(key, checked.status, HEADER_BYTES + stored, page, checked.reason))
        return found


_REASONS = {
    PageStatus.CORRUPT: "damaged, or too long to be a page",
    PageStatus.MISS: "gone",
    PageStatus.ERROR: "can not be read",
    PageStatus.TIMEOUT: "not answered in time",
}
