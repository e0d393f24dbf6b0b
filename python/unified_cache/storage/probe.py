"""How fast a storage is, with real pages: put, look up, get, delete."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from unified_cache.errors import StorageError
from unified_cache.storage.contract import Backend, PageStatus
from unified_cache.storage.guard import StorageCounts, StorageGuard
from unified_cache.storage.keys import KeySpace, PoolKeys

__all__ = ["Measured", "probe"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of call.

    Attributes:
        call: its name.
        calls: how many.
        pages: of all calls.
        seconds: from the first call's begin to the last one's end.
        median, worst: seconds of a call.
        page_bytes: bytes that each page moves; 0: none do.
    """

    call: str
    calls: int
    pages: int
    seconds: float
    median: float
    worst: float
    page_bytes: int

    @property
    def bytes_per_second(self) -> float:
        """0 if nothing was moved."""
        return self.pages * self.page_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_per_page(self) -> float:
        return self.seconds / self.pages


def probe(
    backend: Backend,
    *,
    page_bytes: int,
    pages: int,
    batch: int,
    threads: int,
    deadline: float,
    progress: Callable[[int], object] = lambda pages: None,
) -> list[Measured]:
    """Store pages that nobody else has, look for them, read and compare them, delete them again.

    Args:
        backend: an open one, which stays open; nothing else may have registered memory with it.
        page_bytes: of a page.
        pages: how many.
        batch: pages a call.
        threads: calls at once.
        deadline: seconds that a call may take.
        progress: called with the pages of each call that has ended, from several threads.

    Raises:
        StorageError: it can not be used, or a page did not come back as it was stored.
    """
    rng = np.random.default_rng(secrets.randbits(64))
    both = np.zeros((2 * pages, page_bytes), np.uint8)
    written, read = both[:pages], both[pages:]
    for page in written:
        page[:] = rng.integers(0, 256, page_bytes, np.uint8)
    guard = StorageGuard(
        backend, object_bytes=page_bytes, deadline=deadline, clock=time.monotonic, counts=StorageCounts()
    )
    guard.register(both.data.cast("B"))
    digests = np.frombuffer(secrets.token_bytes(32 * pages), np.uint8).reshape(pages, 32)
    keys = KeySpace([PoolKeys("0" * 16, first_group=0xFFFF)]).keys(digests)
    parts = [slice(start, min(start + batch, pages)) for start in range(0, pages, batch)]

    def transfer(call: Callable[..., list[PageStatus]], rows: np.ndarray) -> Callable[[slice], None]:
        def run(part: slice) -> None:
            views = [row.data for row in rows[part]]
            places = (rows.ctypes.data + np.arange(part.start, part.stop) * page_bytes).astype(np.uint64)
            statuses = call(keys[part], views, places)
            wrong = [status for status in statuses if status is not PageStatus.HIT]
            if wrong:
                raise StorageError(
                    f"{call.__name__} of {len(statuses)} pages of {page_bytes} bytes: {len(wrong)} came back "
                    f"as {wrong[0].value!r}: {_ADVICE[wrong[0]]}"
                )

        return run

    def look_up(part: slice) -> None:
        found = guard.exists([keys[part]])
        if found is None:
            raise StorageError(
                f"exists of {part.stop - part.start} pages was not answered: is its server running? "
                "A larger --timeout gives it more time"
            )
        if found != [part.stop - part.start]:
            raise StorageError(f"of {part.stop - part.start} pages just stored {found[0]} were found")

    measured = []
    try:
        measured.append(_measure("put", transfer(guard.set, written), parts, threads, page_bytes, progress))
        measured.append(_measure("exists", look_up, parts, threads, 0, progress))
        measured.append(_measure("get", transfer(guard.get, read), parts, threads, page_bytes, progress))
        if not np.array_equal(written, read):
            raise StorageError("a page did not come back as it was stored, although its checksum fits")
    except BaseException:
        with contextlib.suppress(StorageError):  # what went wrong first is what is of interest
            backend.delete(keys)
        raise
    return [*measured, _measure("delete", lambda part: _delete(backend, keys[part]), parts, 1, 0, progress)]


def _delete(backend: Backend, keys: Sequence[str]) -> None:
    backend.delete(keys)


_ADVICE = {
    PageStatus.MISS: "the storage forgets, or several servers do not see the same",
    PageStatus.FULL: "there is no room for them: make it larger, or --pages smaller",
    PageStatus.CORRUPT: "they are damaged on the way",
    PageStatus.ERROR: "the storage does not answer: is its server running?",
    PageStatus.TIMEOUT: "raise --timeout, or take a faster network",
}


def _measure(
    name: str,
    call: Callable[[slice], None],
    parts: Sequence[slice],
    threads: int,
    page_bytes: int,
    progress: Callable[[int], object],
) -> Measured:
    def timed(part: slice) -> float:
        begun = time.perf_counter()
        call(part)
        seconds = time.perf_counter() - begun
        progress(part.stop - part.start)
        return seconds

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads, "unified-cache storage check") as pool:
        each = list(pool.map(timed, parts))
    seconds = time.perf_counter() - begun
    pages = parts[-1].stop
    return Measured(name, len(parts), pages, seconds, statistics.median(each), max(each), page_bytes)
