"""Every local backend keeps the contract; and the suite sees a backend that does not."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.memory import MemoryBackend
from unified_cache.storage.backends.mmap import MmapBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.backends.shm import ShmBackend
from unified_cache.storage.conformance import BackendConformance
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus

SIZE = 24 << 20
SMALL = 8 * (16_384 + 600) + 20_000  # eight slots, and what lies beside them


class TestMemory(BackendConformance):
    def open(self, folder: Path) -> Backend:
        return MemoryBackend()

    def open_small(self, folder: Path, objects: int) -> Backend:
        return MemoryBackend(capacity=objects * (self.body_bytes + 192))


class TestPages(BackendConformance):
    def open(self, folder: Path) -> Backend:
        return PagesBackend(folder / "store")

    def open_small(self, folder: Path, objects: int) -> Backend:
        return PagesBackend(folder / "store", objects * (self.body_bytes + 192))


class TestPagesWithoutThreads(TestPages):
    def open(self, folder: Path) -> Backend:
        return PagesBackend(folder / "store", threads=1)


class TestFile(BackendConformance):
    def open(self, folder: Path) -> Backend:
        return FileBackend(folder / "store", SIZE, slot_bytes=self.body_bytes)

    def open_small(self, folder: Path, objects: int) -> Backend:
        return FileBackend(folder / "store", SMALL)


class TestFileByThreads(TestFile):
    def open(self, folder: Path) -> Backend:
        return FileBackend(folder / "store", SIZE, slot_bytes=self.body_bytes, queued=False)


class TestFileThatEvictsNothing(TestFile):
    def open(self, folder: Path) -> Backend:
        return FileBackend(folder / "store", SIZE, threads=1, direct=False)

    def open_small(self, folder: Path, objects: int) -> Backend:
        return FileBackend(folder / "store", SMALL, evict=False)


class TestMmap(BackendConformance):
    def open(self, folder: Path) -> Backend:
        return MmapBackend(folder / "store", SIZE)

    def open_small(self, folder: Path, objects: int) -> Backend:
        return MmapBackend(folder / "store", SMALL)


class TestShm(BackendConformance):
    @pytest.fixture(autouse=True)
    def _clean(self) -> Iterator[None]:
        self._prefix = f"test-{os.getpid()}-{next(_numbers)}-"
        yield
        for name in os.listdir("/dev/shm"):
            if name.startswith(f"unified-cache-{self._prefix}"):
                os.unlink(f"/dev/shm/{name}")

    def open(self, folder: Path) -> Backend:
        return ShmBackend(f"{self._prefix}{folder.name[:40]}", SIZE)

    def open_small(self, folder: Path, objects: int) -> Backend:
        return ShmBackend(f"{self._prefix}small", SMALL)


_numbers = itertools.count()


# A suite that finds nothing in wrong backends proves nothing.


class LastWriterWins(MemoryBackend):
    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        self.delete(batch.keys)
        return super().set(batch)


class CountsAll(MemoryBackend):
    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        return [sum(super(CountsAll, self).exists([[key]])[0] for key in run) for run in runs]


class CutsLongObjects(MemoryBackend):
    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        statuses = super().get(batch)
        return [PageStatus.HIT if status is PageStatus.CORRUPT else status for status in statuses]


class KeepsMemory(MemoryBackend):
    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        self.kept = batch
        return [PageStatus.HIT] * len(batch)

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        super().set(self.kept)
        return super().exists(runs)

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        super().set(self.kept)
        return super().get(batch)


class WritesPastTheEnd(MemoryBackend):
    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        statuses = super().get(batch)
        for body in batch.bodies:
            body[-1] = 0
        return statuses


class WrongChecksums(MemoryBackend):
    makes_checksums: ClassVar[bool] = True

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        statuses = super().get(batch)
        if batch.checksums is not None:
            batch.checksums.values[-1] ^= np.uint64(1)
        return statuses


class NoChecksums(MemoryBackend):
    makes_checksums: ClassVar[bool] = True

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        return super().set(replace(batch, checksums=None))


class LendsOneMemoryTwice(MemoryBackend):
    def __init__(self) -> None:
        super().__init__()
        self._whole = memoryview(mmap.mmap(-1, 1 << 20))

    def host_memory(self, size: int) -> memoryview | None:
        return self._whole[:size]


class LendsAnyAddress(MemoryBackend):
    def host_memory(self, size: int) -> memoryview | None:
        return memoryview(mmap.mmap(-1, size + 8))[8:]


class ForgetsItIsClosed(MemoryBackend):
    def stats(self) -> dict[str, int]:
        return {"objects": 0, "bytes": 0}


class LeavesFiles(MemoryBackend):
    left: ClassVar[list[int]] = []

    def close(self) -> None:
        self.left.append(os.open("/dev/null", os.O_RDONLY))


@pytest.mark.parametrize(
    "backend, check",
    [
        (LastWriterWins, "test_the_first_writer_wins"),
        (CountsAll, "test_exists_counts_leading_runs"),
        (CutsLongObjects, "test_too_little_memory"),
        (KeepsMemory, "test_memory_is_the_callers_again"),
        (WritesPastTheEnd, "test_too_little_memory"),
        (WrongChecksums, "test_checksums"),
        (NoChecksums, "test_checksums"),
        (LendsOneMemoryTwice, "test_memory_that_it_lends"),
        (LendsAnyAddress, "test_memory_that_it_lends"),
        (ForgetsItIsClosed, "test_calls_after_close"),
        (LeavesFiles, "test_nothing_is_left"),
    ],
)
def test_wrong_backends_fail(backend: type[MemoryBackend], check: str, tmp_path: Path) -> None:
    class Wrong(BackendConformance):
        def open(self, folder: Path) -> Backend:
            return backend()

    with pytest.raises(AssertionError):
        getattr(Wrong(), check)(tmp_path)
    while LeavesFiles.left:
        os.close(LeavesFiles.left.pop())


def test_without_pytest(tmp_path: Path) -> None:
    TestMemory().run_all(tmp_path)
