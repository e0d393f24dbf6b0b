"""Which object lies in which slot: a table of records on the medium, and an index that processes share.

Two files. ``.table`` has a record for each slot and is what survives a crash of the machine. ``.index`` is
mapped by every process that uses the store and is what they agree through: a word for each slot (state,
owner, generation) and a hash table from keys to slots. It survives processes, and is built anew from the
table when the machine was booted since, or when somebody has died in the middle of changing it.

Readers take no lock. They look at a slot's word, read what they want, and look again: a word that is another
one now says that the slot was given to somebody else meanwhile, and that nothing that was read counts. So
every change of the index is a store of 8 bytes, and a word is changed before anything else of its slot is.
Writers take the lock twice, before and after they write bodies, never while they do. (Processors that
reorder loads are kept from it by the system calls in between; where `mmap` and `shm` read without any, the
checksum that is around every object is what makes sure.)

When there is no free slot, CLOCK says which object goes: a hand goes round over all slots, takes the first
one that was not read since it came by last, and lets an object that is read often pass up to three times. It
needs one byte a slot, which readers of all processes set without a lock and a crash can not break; the lists
of LRU or S3-FIFO would have to be kept in shared memory, under the lock, at every read. What it keeps is
close to what LRU keeps, which on traces of conversations is the best of the simple policies where the cache
is large.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unified_cache._native import find_slots, locate_objects
from unified_cache.errors import StorageError
from unified_cache.storage.backends.process_locks import ProcessLocks
from unified_cache.storage.backends.slot_records import (
    NATIVE_SUMS,
    RECORD,
    RECORD_BYTES,
    U64,
    checksums,
    hashes_of,
    key_words,
    keys_of,
    pack_digests,
    pack_keys,
    read_table,
)
from unified_cache.storage.contract import ObjectBatch

__all__ = [
    "SWEEP",
    "Located",
    "SlotGeometry",
    "SlotIndex",
    "read_geometry",
    "runs_of",
    "write_geometry",
]

BLOCK = 4096

_SUPERBLOCK = struct.Struct("<8sIIQQQI")
_MAGIC, _VERSION = b"UCSLOTS\0", 1

# A slot's word: 2 bits of state, 12 of the owner while it writes, 50 of a generation that each use raises.
_FREE, _WRITING, _PUBLISHED = 0, 1, 2
_STATE = np.uint64(3)
_OWNER_SHIFT, _GENERATION_SHIFT = 2, 14
_OWNER = np.uint64(0xFFF << _OWNER_SHIFT)
_GENERATION_STEP = 1 << _GENERATION_SHIFT
_GENERATION = np.uint64((1 << 64) - _GENERATION_STEP)

# A bucket: 32 bits of the key's hash, then the slot + 1; 0 if it was never used since the table was made.
_GONE = 0xFFFFFFFF
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)

# The words that the index begins with.
_INDEX_MAGIC = 0x31584449_53544C53
_AT_MAGIC, _AT_SLOTS, _AT_BUCKETS, _AT_BOOT, _AT_BUSY = 0, 1, 2, 3, 5
_AT_HAND, _AT_FREE_HAND, _AT_FREE, _AT_GONE, _AT_EVICTED, _AT_RECOVERED, _AT_REBUILT = 6, 7, 8, 9, 10, 11, 12
_HEAD_WORDS = BLOCK // 8

SWEEP = 4096  # slots looked at in one step of the hand
_MOST_REFERENCES = 3
_NO_SLOTS = np.empty(0, np.int64)
_LOAD_RECORDS = 8192  # at once when the index is built: they stay in the cache of the processor
_ASKED = 8192  # keys that are looked for in one go, likewise


@dataclass(frozen=True)
class SlotGeometry:
    """How a store is divided.

    Attributes:
        slots: how many.
        slot_bytes: of each, a multiple of 4096; the longest body.
        size: of all files together, as it was asked for.
    """

    slots: int
    slot_bytes: int
    size: int

    @classmethod
    def of(cls, size: int, body_bytes: int) -> SlotGeometry:
        """For bodies of up to so many bytes; `slots` is 0 if not even one fits."""
        slot_bytes = max(1, -(-body_bytes // BLOCK)) * BLOCK
        # Word, hash, size, reference; and two to four buckets of 8 bytes.
        index_bytes = 25 + 32
        return cls(max(0, (size - 4 * BLOCK) // (slot_bytes + RECORD_BYTES + index_bytes)), slot_bytes, size)

    @property
    def table_bytes(self) -> int:
        """Of the table's file."""
        return BLOCK + self.slots * RECORD_BYTES

    @property
    def buckets(self) -> int:
        """A power of two, at most half of which are in use."""
        return 1 << (2 * self.slots - 1).bit_length()

    @property
    def index_bytes(self) -> int:
        """Of the index's file."""
        return _HEAD_WORDS * 8 + self.slots * 24 + self.buckets * 8 + -(-self.slots // 8) * 8


def read_geometry(table: int) -> SlotGeometry | None:
    """What the open file says, None if it was not finished.

    Raises:
        StorageError: it is something else, or of another version.
    """
    block = os.pread(table, _SUPERBLOCK.size, 0)
    if not block.rstrip(b"\0"):
        return None
    if len(block) < _SUPERBLOCK.size or not block.startswith(_MAGIC):
        raise StorageError("it is no table of a store")
    _, version, record_bytes, slots, slot_bytes, size, check = _SUPERBLOCK.unpack(block)
    if version != _VERSION or record_bytes != RECORD_BYTES:
        raise StorageError(f"it is of version {version}, this is version {_VERSION}")
    if check != zlib.crc32(block[:-4]):
        raise StorageError("its first block is damaged")
    return SlotGeometry(slots, slot_bytes, size)


def write_geometry(table: int, geometry: SlotGeometry) -> None:
    """Make the open file an empty table, durably; it counts from its last write on."""
    os.ftruncate(table, 0)
    os.posix_fallocate(table, 0, geometry.table_bytes)
    os.fsync(table)
    block = _SUPERBLOCK.pack(
        _MAGIC, _VERSION, RECORD_BYTES, geometry.slots, geometry.slot_bytes, geometry.size, 0
    )
    os.pwrite(table, block[:-4] + struct.pack("<I", zlib.crc32(block[:-4])), 0)
    os.fsync(table)


def _boot() -> tuple[int, int]:
    text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return int(text[:16], 16), int(text[16:], 16)


@dataclass(frozen=True, slots=True)
class Located:
    """Where the objects of a batch are.

    Attributes:
        slots: int64 (keys,), -1: nothing; -2: an object that does not fit into the batch's memory.
        words: uint64 (keys,), the slots' words when their keys were compared.
        sizes: int64 (keys,), bytes of the bodies.
    """

    slots: npt.NDArray[np.int64]
    words: U64
    sizes: npt.NDArray[np.int64]


def runs_of(slots: npt.NDArray[np.int64], longest: int) -> Iterator[tuple[int, int]]:
    """Begin and end, in `slots`, of runs of neighbours."""
    start = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1 or at - start == longest:
            yield start, at
            start = at


class SlotIndex:
    """Methods that are said to need the lock are called within ``with index.locked(end):``.

    Args:
        prefix: path of the files, up to their ``.table`` and ``.index``.
        table: the open table, of this geometry; it is closed with the index.
        locks: of the store; the caller holds the mutex.
        durable: whether the medium needs to be told to keep what was written.
    """

    def __init__(
        self,
        prefix: str,
        table: int,
        geometry: SlotGeometry,
        locks: ProcessLocks,
        durable: bool,
    ) -> None:
        self.geometry = geometry
        self._table = table
        self._locks = locks
        self._durable = durable
        slots, buckets = geometry.slots, geometry.buckets
        length = os.fstat(table).st_size
        if length < geometry.table_bytes:
            raise StorageError(f"the table has {length} bytes instead of {geometry.table_bytes}")
        self._records = np.frombuffer(
            mmap.mmap(table, geometry.table_bytes, mmap.MAP_SHARED, mmap.PROT_READ), RECORD, slots, BLOCK
        )
        file = os.open(f"{prefix}.index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size != geometry.index_bytes:
                os.ftruncate(file, geometry.index_bytes)
                os.posix_fallocate(file, 0, geometry.index_bytes)  # a hole could not be filled on a full disk
            whole = mmap.mmap(file, geometry.index_bytes, mmap.MAP_SHARED)
        finally:
            os.close(file)
        at = 0

        def part(count: int, kind: type[np.uint64] | type[np.uint8]) -> npt.NDArray[np.uint64]:
            nonlocal at
            array = np.frombuffer(whole, kind, count, at)
            at += array.nbytes
            return array  # type: ignore[return-value]  # references are uint8

        self._head_array = part(_HEAD_WORDS, np.uint64)
        self._words = part(slots, np.uint64)
        self._hashes = part(slots, np.uint64)
        self._sizes = part(slots, np.uint64)
        self._bucket_array = part(buckets, np.uint64)
        self._references = part(slots, np.uint8)
        # One at a time these are faster, and Python's numbers.
        self._head = memoryview(self._head_array.data)
        self._buckets = memoryview(self._bucket_array.data)
        self._mask = buckets - 1
        self._looked_at = self._bucket_array.data, self._words.data, self._records.data
        expected = (_INDEX_MAGIC, slots, buckets, *_boot())
        if tuple(self._head[: len(expected)]) != expected:
            self._build(from_table=True)
            for word, value in enumerate(expected):
                self._head[word] = value
        elif self._head[_AT_BUSY]:
            self._build(from_table=False)
        # Those of somebody with the same number, who is dead.
        self._free_writing(np.array([locks.owner]))

    @property
    def index_bytes(self) -> int:
        """Of mapped memory that look-ups use; the records are read from their file as needed."""
        return self.geometry.index_bytes

    def close(self) -> None:
        """Let go of the files."""
        os.close(self._table)
        del self._looked_at
        del self._head, self._buckets, self._head_array, self._bucket_array
        del self._words, self._hashes, self._sizes, self._references, self._records

    @contextlib.contextmanager
    def locked(self, end: float) -> Iterator[None]:
        """Be the only one who changes the index.

        Raises:
            LockTimeoutError: another process holds it until `end`, by the clock of the locks.
        """
        with self._locks.mutex(end):
            if self._head[_AT_BUSY]:  # a process has died here
                self._build(from_table=False)
            self._head[_AT_BUSY] = 1
            yield
            # Not after an error: who comes next builds anew what may be half changed.
            self._head[_AT_BUSY] = 0

    # Reading, without the lock.

    def find(self, keys: Sequence[str]) -> npt.NDArray[np.int64]:
        """The slots that these are in, int64 (keys,), -1: nowhere."""
        packed = pack_keys(keys)
        return self._find(packed, hashes_of(packed))

    def _find(self, packed: U64, hashes: U64) -> npt.NDArray[np.int64]:
        return find_slots(packed.data, hashes.data, *self._looked_at)

    def locate(self, batch: ObjectBatch) -> Located:
        """Where the objects of a get are, whose headers are filled in: in one call, as a disk waits for it.

        Raises:
            ArgumentError: a key that no object can have.
        """
        room = batch.body_sizes.tolist()
        return Located(*locate_objects(batch.keys, batch.headers.data, room, NATIVE_SUMS, *self._looked_at))

    def holds(self, digests: npt.NDArray[np.uint8], ending: str) -> npt.NDArray[np.bool_]:
        """Which of many keys, digests in hex with one ending, seem to be here: the hash of a key is believed.

        A key itself is in its record, and a million of these are half a gigabyte to read.
        """
        there = np.zeros(len(digests), np.bool_)
        for start in range(0, len(digests), _ASKED):
            part = slice(start, start + _ASKED)
            there[part] = self._holds(hashes_of(pack_digests(digests[part], ending)))
        return there

    def _holds(self, hashes: U64) -> npt.NDArray[np.bool_]:
        there = np.zeros(len(hashes), np.bool_)
        at = hashes & np.uint64(self._mask)
        left = np.arange(len(hashes))
        for _ in range(self._mask + 1):
            if not len(left):
                break
            entries = self._bucket_array[at[left]]
            low = entries & _LOW
            hit = ((entries >> _HIGH) == hashes[left] >> _HIGH) & (low != 0) & (low != _GONE)
            slots = low[hit].astype(np.int64) - 1
            same = (self._words[slots] & _STATE) == _PUBLISHED
            same &= self._hashes[slots] == hashes[left[hit]]
            there[left[hit][same]] = True
            left = left[(entries != 0) & ~there[left]]
            at[left] = (at[left] + np.uint64(1)) & np.uint64(self._mask)
        return there

    def unchanged(self, slots: npt.NDArray[np.int64], words: U64) -> npt.NDArray[np.bool_]:
        """Which of the slots hold what they held when `locate` looked."""
        same: npt.NDArray[np.bool_] = self._words[slots] == words
        return same

    def touch(self, slots: npt.NDArray[np.int64]) -> None:
        """They were read; a mark that is lost among processes does no harm."""
        self._references[slots] = np.minimum(self._references[slots] + np.uint8(1), _MOST_REFERENCES)

    def keys(self, start: int) -> list[str]:
        """Of the objects in the `SWEEP` slots from this one on."""
        words = self._words[start : start + SWEEP].copy()
        slots = np.flatnonzero((words & _STATE) == _PUBLISHED) + start
        packed = key_words(self._records[slots])
        return keys_of(packed[self.unchanged(slots, words[slots - start])])

    def stats(self) -> dict[str, int]:
        """Numbers of what is there now."""
        states = self._words & _STATE
        published = states == _PUBLISHED
        return {
            "objects": int(np.count_nonzero(published)),
            "bytes": int(self._sizes[published].sum()),
            "capacity_bytes": self.geometry.size,
            "slots": self.geometry.slots,
            "slot_bytes": self.geometry.slot_bytes,
            "slots_in_writing": int(np.count_nonzero(states == _WRITING)),
            "evicted": self._head[_AT_EVICTED],
            "slots_recovered": self._head[_AT_RECOVERED],
            "index_rebuilds": self._head[_AT_REBUILT],
            "index_bytes": self.index_bytes,
        }

    # Writing.

    def take(self, count: int, evict: bool, keep: npt.NDArray[np.int64] = _NO_SLOTS) -> npt.NDArray[np.int64]:
        """Up to `count` slots to write to, free ones, then such whose objects go for them. Needs the lock.

        Before anything is written to them, `forget` must have been called.

        Args:
            count: how many.
            evict: objects may go.
            keep: but not those of these slots.
        """
        taken = [self._sweep(count, only_free=True)] if self._head[_AT_FREE] else []
        missing = count - sum(map(len, taken))
        if missing and self._free_dead():
            taken.append(self._sweep(missing, only_free=True))
            missing -= len(taken[-1])
        if missing and evict:
            taken.append(self._sweep(missing, only_free=False, keep=keep))
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def _sweep(
        self, count: int, only_free: bool, keep: npt.NDArray[np.int64] = _NO_SLOTS
    ) -> npt.NDArray[np.int64]:
        """Slots that were free, or were not read for longest; they are this process's to write to now."""
        at_hand = _AT_FREE_HAND if only_free else _AT_HAND
        hand = self._head[at_hand] % self.geometry.slots
        left = self.geometry.slots * (1 if only_free else _MOST_REFERENCES + 1)
        taken: list[npt.NDArray[np.int64]] = []
        while count and left:
            end = min(hand + SWEEP, self.geometry.slots, hand + left)
            states = self._words[hand:end] & _STATE
            usable = states == _FREE
            if not only_free:
                usable |= (states == _PUBLISHED) & (self._references[hand:end] == 0)
                usable[keep[(keep >= hand) & (keep < end)] - hand] = False
            chosen = np.flatnonzero(usable)[:count]
            if len(chosen) == count:
                end = hand + int(chosen[-1]) + 1
            if not only_free:
                passed = self._references[hand:end]
                passed[passed > 0] -= np.uint8(1)
            slots = chosen + hand
            evicted = slots[states[chosen] == _PUBLISHED]
            for slot in evicted.tolist():
                self._remove(slot)
            self._head[_AT_EVICTED] += len(evicted)
            self._head[_AT_FREE] -= len(slots) - len(evicted)
            self._mark(slots, _WRITING | self._locks.owner << _OWNER_SHIFT)
            taken.append(slots)
            count -= len(slots)
            left -= end - hand
            hand = end % self.geometry.slots
        self._head[at_hand] = hand
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def _mark(self, slots: npt.NDArray[np.int64], low_bits: int, step: bool = True) -> None:
        """Give words new low bits, and a new generation."""
        words = self._words[slots] & _GENERATION
        if step:
            words += np.uint64(_GENERATION_STEP)
        self._words[slots] = words | np.uint64(low_bits)

    def forget(self, slots: npt.NDArray[np.int64]) -> None:
        """See to it, durably, that no records of earlier objects of the slots are left.

        A record that outlived the bytes it speaks of would, after a crash of the machine, give out others.

        Raises:
            OSError: it can not be written.
        """
        if self._wipe(slots):
            self.sync()

    def _wipe(self, slots: npt.NDArray[np.int64]) -> bool:
        old = np.sort(slots[self._records["check"][slots] != 0])
        for begin, end in runs_of(old, SWEEP):
            self._write(int(old[begin]), bytes((end - begin) * RECORD_BYTES))
        return bool(len(old))

    def write(
        self,
        slots: npt.NDArray[np.int64],
        packed: U64,
        headers: npt.NDArray[np.uint8],
        body_sizes: U64,
    ) -> None:
        """Write the records of objects whose bodies are durable; `sync` makes them so too.

        Raises:
            OSError: they can not be written.
        """
        order = np.argsort(slots)
        records = np.zeros(len(slots), RECORD)
        records["slot"] = slots[order]
        records["body"] = body_sizes[order]
        records["header"] = headers.shape[1]
        records["key"] = packed[order]
        records["head"][:, : headers.shape[1]] = headers[order]
        records["check"] = checksums(records)
        for begin, end in runs_of(slots[order], SWEEP):
            self._write(int(slots[order[begin]]), records[begin:end].tobytes())

    def _write(self, slot: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._table, data[done:], BLOCK + slot * RECORD_BYTES + done)

    def sync(self) -> None:
        """Make the records durable.

        Raises:
            OSError: the medium says no.
        """
        if self._durable:
            os.fdatasync(self._table)

    def publish(self, slots: npt.NDArray[np.int64], packed: U64, sizes: U64) -> None:
        """Make objects visible whose records were written; where a key is there already, its slot is free
        again.

        Needs the lock.
        """
        hashes = hashes_of(packed)
        there = self._find(packed, hashes) >= 0
        self.give_back(slots[there])
        slots, hashes = slots[~there], hashes[~there]
        self._hashes[slots] = hashes
        self._sizes[slots] = sizes[~there]
        self._references[slots] = 0
        self._mark(slots, _PUBLISHED, step=False)
        for slot, of_key in zip(slots.tolist(), hashes.tolist(), strict=True):
            self._insert(slot, of_key)
        if self._head[_AT_GONE] > len(self._buckets) // 4:
            self._fill_buckets()

    def give_back(self, slots: npt.NDArray[np.int64]) -> None:
        """Slots that were taken and not published are free. Needs the lock."""
        with contextlib.suppress(OSError):  # then it is `forget` that is told
            self._wipe(slots)
        self._mark(slots, _FREE)
        self._head[_AT_FREE] += len(slots)

    def give_back_written(self, slots: npt.NDArray[np.int64]) -> None:
        """Those that this instance has taken and not published are free. Needs the lock."""
        ours = np.uint64(_WRITING | self._locks.owner << _OWNER_SHIFT)
        self.give_back(slots[(self._words[slots] & (_STATE | _OWNER)) == ours])

    def delete(self, keys: Sequence[str]) -> int:
        """Forget objects, all of them before it says how many there were. Needs the lock.

        Raises:
            OSError: it can not be made durable.
        """
        found = self.find(keys)
        slots = np.unique(found[found >= 0])
        self._delete(slots)
        return len(slots)

    def clear(self) -> None:
        """Forget all objects, and free what dead processes hold. Needs the lock.

        Raises:
            OSError: it can not be made durable.
        """
        self._free_dead()
        self._delete(np.flatnonzero((self._words & _STATE) == _PUBLISHED))

    def _delete(self, slots: npt.NDArray[np.int64]) -> None:
        if len(slots) > self.geometry.slots // 8:
            self._mark(slots, _FREE)
            self._fill_buckets()
        else:
            for slot in slots.tolist():
                self._remove(slot)
            self._mark(slots, _FREE)
        self._head[_AT_FREE] += len(slots)
        self.forget(slots)

    # Slots of processes that died.

    def _free_dead(self) -> int:
        words = self._words[(self._words & _STATE) == _WRITING]
        owners = np.unique((words & _OWNER) >> np.uint64(_OWNER_SHIFT)).astype(np.int64)
        dead = [owner for owner in owners.tolist() if not self._locks.alive(owner)]
        return self._free_writing(np.array(dead, np.int64))

    def _free_writing(self, owners: npt.NDArray[np.int64]) -> int:
        writing = np.flatnonzero((self._words & _STATE) == _WRITING)
        of = ((self._words[writing] & _OWNER) >> np.uint64(_OWNER_SHIFT)).astype(np.int64)
        slots = writing[np.isin(of, owners)]
        self.give_back(slots)
        self._head[_AT_RECOVERED] += len(slots)
        return len(slots)

    # The hash table.

    def _insert(self, slot: int, of_key: int) -> None:
        at = of_key & self._mask
        while (entry := self._buckets[at]) not in (0, _GONE):
            at = (at + 1) & self._mask
        self._buckets[at] = of_key >> 32 << 32 | slot + 1
        if entry:
            self._head[_AT_GONE] -= 1

    def _remove(self, slot: int) -> None:
        of_key = int(self._hashes[slot])
        mine, at = of_key >> 32 << 32 | slot + 1, of_key & self._mask
        while (entry := self._buckets[at]) != mine:
            if not entry:
                return  # its process died before it was put in
            at = (at + 1) & self._mask
        if self._buckets[(at + 1) & self._mask]:
            self._buckets[at] = _GONE
            self._head[_AT_GONE] += 1
            return
        # The end of a chain: nothing lies behind it, so the marks before it are not needed either.
        self._buckets[at] = 0
        while self._buckets[at := (at - 1) & self._mask] == _GONE:
            self._buckets[at] = 0
            self._head[_AT_GONE] -= 1

    def _build(self, from_table: bool) -> None:
        """The whole index anew, from the table alone or for the words that are there."""
        self._head[_AT_BUSY] = 1
        if from_table:
            self._words[:] = 0
            self._references[:] = 0
            for at in (_AT_HAND, _AT_FREE_HAND, _AT_EVICTED, _AT_RECOVERED, _AT_REBUILT):
                self._head[at] = 0
            slots, hashes, sizes = read_table(self._records, self.geometry.slot_bytes)
            self._words[slots] = _PUBLISHED
            self._hashes[slots] = hashes
            self._sizes[slots] = sizes
        else:
            for start in range(0, self.geometry.slots, _LOAD_RECORDS):
                words = self._words[start : start + _LOAD_RECORDS]
                there = np.flatnonzero((words & _STATE) == _PUBLISHED) + start
                records = self._records[there]
                self._hashes[there] = hashes_of(key_words(records))
                self._sizes[there] = records["body"] + records["header"]
        self._fill_buckets()
        self._head[_AT_FREE] = int(np.count_nonzero((self._words & _STATE) == _FREE))
        self._head[_AT_REBUILT] += 1
        self._head[_AT_BUSY] = 0

    def _fill_buckets(self) -> None:
        """Put all objects in. Those who look meanwhile may miss some."""
        self._bucket_array[:] = 0
        self._head[_AT_GONE] = 0
        slots = np.flatnonzero((self._words & _STATE) == _PUBLISHED).astype(np.uint64)
        hashes = self._hashes[slots]
        entries = (hashes >> _HIGH << _HIGH) | (slots + np.uint64(1))
        at = hashes & np.uint64(self._mask)
        while len(entries):
            free = self._bucket_array[at] == 0
            self._bucket_array[at[free]] = entries[free]  # of those for one bucket the last stays
            left = self._bucket_array[at] != entries
            entries = entries[left]
            at = (at[left] + np.uint64(1)) & np.uint64(self._mask)
