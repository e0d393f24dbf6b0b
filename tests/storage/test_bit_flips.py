"""One flipped bit in each of many stored pages: never served, always counted, and no other page suffers.

``UNIFIED_CACHE_FLIP_PAGES=1000000`` says how many pages each store has to give out (a tenth for `pages`,
whose pages are files), half of them flipped; without it there are fewer, and the same code.
"""

from __future__ import annotations

import mmap
import os
import secrets
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.storage.support import key
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.memory import MemoryBackend
from unified_cache.storage.backends.mmap import MmapBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.backends.shm import ShmBackend
from unified_cache.storage.backends.slot_index import BLOCK
from unified_cache.storage.backends.slot_records import RECORD, RECORD_BYTES
from unified_cache.storage.backends.slot_store import SlotStore
from unified_cache.storage.contract import Backend, PageStatus
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.page_format import HEADER_BYTES

pytestmark = pytest.mark.parallel

PAGES = int(os.environ.get("UNIFIED_CACHE_FLIP_PAGES", "100000"))
_Index = npt.NDArray[np.int64]


class Flips(ABC):
    """The stored bytes of some objects, whose bits can be flipped; the same flip again takes it back."""

    def __init__(self, backend: Backend, keys: list[str], body_bytes: int) -> None:
        self.backend = backend
        self.keys = keys
        self.bits = 8 * (HEADER_BYTES + body_bytes)  # of an object

    @abstractmethod
    def flip(self, rows: _Index, bits: _Index) -> None:
        """Flip one bit of each of these objects."""


class SlotFlips(Flips):
    """Header, key and lengths are in one file, bodies in another."""

    def __init__(self, store: SlotStore, keys: list[str], body_bytes: int) -> None:
        super().__init__(store, keys, body_bytes)
        assert store._open is not None
        self._slots = store._open.index.find(keys)
        assert (self._slots >= 0).all()
        self._slot_bytes = store._open.index.geometry.slot_bytes
        self._data = np.memmap(f"{store._prefix}.data", np.uint8, "r+")
        self._table = np.memmap(f"{store._prefix}.table", np.uint8, "r+")
        # What is read of a record: not its checksum and its own number, which are for a crash of the machine.
        fields = RECORD.fields
        assert fields is not None
        used = [np.arange(fields["head"][1], fields["head"][1] + HEADER_BYTES)]
        used += [fields[name][1] + np.arange(fields[name][0].itemsize) for name in ("key", "body", "header")]
        self._used = np.concatenate(used)
        self.bits = 8 * (len(self._used) + body_bytes)

    def flip(self, rows: _Index, bits: _Index) -> None:
        places, masks = bits >> 3, (1 << (bits & 7)).astype(np.uint8)
        in_record = places < len(self._used)
        slots = self._slots[rows]
        record = BLOCK + slots[in_record] * RECORD_BYTES + self._used[places[in_record]]
        self._table[record] ^= masks[in_record]
        body = slots[~in_record] * self._slot_bytes + places[~in_record] - len(self._used)
        self._data[body] ^= masks[~in_record]


class MemoryFlips(Flips):
    def flip(self, rows: _Index, bits: _Index) -> None:
        assert isinstance(self.backend, MemoryBackend)
        objects = self.backend._objects
        for row, bit in zip(rows.tolist(), bits.tolist(), strict=True):
            objects[self.keys[row]][bit >> 3] ^= 1 << (bit & 7)


class FileFlips(Flips):
    def flip(self, rows: _Index, bits: _Index) -> None:
        assert isinstance(self.backend, PagesBackend)
        for row, bit in zip(rows.tolist(), bits.tolist(), strict=True):
            file = os.open(self.backend._path(self.keys[row]), os.O_RDWR)
            byte = os.pread(file, 1, bit >> 3)[0] ^ 1 << (bit & 7)
            os.pwrite(file, bytes([byte]), bit >> 3)
            os.close(file)


@pytest.mark.parametrize("scheme", ["file", "file queued", "mmap", "shm", "memory", "pages"])
def test_flipped_bits_are_never_data(scheme: str, tmp_path: Path) -> None:
    # Full slots: those of neighbours are read in one call.
    body, count = {"memory": (512, 4096), "pages": (256, 500)}.get(scheme, (4096, 4096))
    total = PAGES // 10 if scheme == "pages" else PAGES
    slots = count * (4096 + 600) + (1 << 16)
    backend: Backend
    if scheme.startswith("file"):
        direct = scheme == "file queued"
        backend = FileBackend(tmp_path, slots, slot_bytes=4096, threads=1, direct=direct)
    elif scheme == "mmap":
        backend = MmapBackend(tmp_path / "store", slots, slot_bytes=4096, threads=1)
    elif scheme == "shm":
        name = f"test-flips-{secrets.token_hex(8)}"
        backend = ShmBackend(name, slots, slot_bytes=4096, threads=1, root=str(tmp_path))
    else:
        backend = MemoryBackend() if scheme == "memory" else PagesBackend(tmp_path, threads=1)
    counts = StorageCounts()
    guard = StorageGuard(backend, object_bytes=body, deadline=60, clock=lambda: 0.0, counts=counts)
    rng = np.random.default_rng(5)
    # At a multiple of the system's page size, or nothing could go past its cache.
    memory = mmap.mmap(-1, 2 * count * body)
    pages, read = np.frombuffer(memory, np.uint8).reshape(2, count, body)
    pages[:] = rng.integers(0, 256, (count, body), np.uint8)
    keys = [key(at) for at in range(count)]

    def call(what: str, rows: npt.NDArray[np.uint8]) -> list[PageStatus]:
        places = (rows.ctypes.data + np.arange(count) * body).astype(np.uint64)
        return getattr(guard, what)(keys, [row.data for row in rows], places)  # type: ignore[no-any-return]

    assert set(call("set", pages)) == {PageStatus.HIT}
    queued = scheme == "file queued" and bool(backend.stats()["queued"])  # where the machine has a queue
    assert backend.stats().get("queued_transfers", 0) == queued * count
    discarded: list[str] = []
    # The flips are taken back instead.
    backend.discard = lambda keys: discarded.extend(keys) or 0  # type: ignore[method-assign, func-returns-value]
    kind = {"memory": MemoryFlips, "pages": FileFlips}.get(scheme, SlotFlips)
    flips = kind(backend, keys, body)  # type: ignore[arg-type]
    gone = 0
    for start in range(0, total, count):
        rows = np.flatnonzero(rng.random(count) < 0.5)
        bits = rng.integers(0, flips.bits, len(rows))
        flips.flip(rows, bits)
        read[:] = 0xEE
        discarded.clear()
        statuses = np.array([status.value for status in call("get", read)])
        flips.flip(rows, bits)
        whole = np.ones(count, bool)
        whole[rows] = False
        assert (statuses[whole] == "hit").all(), start
        assert np.isin(statuses[rows], ("corrupt", "miss")).all(), start
        assert np.array_equal(read[whole], pages[whole]), start
        assert [keys[at] for at in np.flatnonzero(statuses == "corrupt")] == discarded
        gone += len(rows)
    seen = counts.as_dict()
    assert seen["storage_get_corrupt"] + seen["storage_get_miss"] == gone
    assert seen["storage_get_corrupt"] > 0.9 * gone
    assert seen["storage_get_hit"] + gone == -(-total // count) * count
    # Nothing but the flips was wrong.
    assert set(call("get", read)) == {PageStatus.HIT}
    assert np.array_equal(read, pages)
    if queued:
        # All but those whose record was damaged.
        assert backend.stats()["queued_transfers"] > count + 0.9 * total
    guard.close()
