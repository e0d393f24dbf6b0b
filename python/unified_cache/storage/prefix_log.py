"""Prefix logs of local stores: a file, or memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from unified_cache.errors import StorageError
from unified_cache.storage.contract import PrefixLog

__all__ = ["FileLog", "MemoryLog"]

_PIECE_BYTES = 8 << 20
# Others hold the lock for one write, or for the end of a rewrite.
_POLL_SECONDS = 0.0005


class FileLog(PrefixLog):
    """A file that is appended to under a lock of processes, and replaced by another when it is rewritten.

    Only its owner may read it: tokens say what users wrote. It is not flushed: what a machine's crash takes
    from its end is seen again when the pages are.

    Args:
        path: of the file, made by the first `append`. Beside it is ``PATH.new`` while it is rewritten.
        deadline: seconds to wait for somebody who holds the lock.
    """

    def __init__(self, path: str, deadline: float = 5.0) -> None:
        self._path = path
        self._deadline = deadline

    def append(self, records: bytes) -> int:
        """Add whole records at the end."""
        with self._errors("can not be written"), self._locked() as file:
            end = os.fstat(file).st_size
            try:
                _write(file, records)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, end)
                raise
            return end + len(records)

    def read(self) -> Iterator[bytes]:
        """The log, in pieces of 8 MiB."""
        with self._errors("can not be read"):
            try:
                file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            try:
                yield from self._read(file, os.fstat(file).st_size)
            finally:
                os.close(file)

    def _read(self, file: int, end: int) -> Iterator[bytes]:
        at = 0
        while at < end and (piece := os.pread(file, min(_PIECE_BYTES, end - at), at)):
            yield piece
            at += len(piece)

    def rewrite(self, keep: Callable[[Iterator[bytes]], Iterable[bytes] | None]) -> int | None:
        """Write another file, and give it the name."""
        with self._errors("can not be rewritten"), self._new() as new:
            if new is None:
                return None
            try:
                old = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                end = os.fstat(old).st_size
                kept = keep(self._read(old, end))
                if kept is None:
                    return None
                for records in kept:
                    _write(new, records)
                with self._locked() as now:
                    # Nobody else replaces it, since we have the other file; but it may have been cleared.
                    if not os.path.samestat(os.fstat(now), os.fstat(old)):
                        return None
                    while piece := os.pread(old, _PIECE_BYTES, end):
                        _write(new, piece)
                        end += len(piece)
                    os.fsync(new)
                    os.rename(f"{self._path}.new", self._path)
            finally:
                os.close(old)
            return os.fstat(new).st_size

    def clear(self) -> None:
        """Remove the file."""
        with self._errors("can not be removed"):
            if os.path.exists(self._path):
                with self._locked():
                    os.unlink(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, open to append to it, and nobody else's until the end."""
        end = time.monotonic() + self._deadline
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while not _lock(file):
                    if time.monotonic() > end:
                        raise OSError(errno.ETIMEDOUT, f"somebody has held it for {self._deadline:g} s")
                    time.sleep(_POLL_SECONDS)
                if _is_at(file, self._path):
                    yield file
                    return
                # It was replaced before we had it.
            finally:
                os.close(file)

    @contextlib.contextmanager
    def _new(self) -> Iterator[int | None]:
        """The file to write to in its place, empty; None if somebody else writes it."""
        path = f"{self._path}.new"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Whoever had it may have given it the log's name meanwhile.
            if not _lock(file) or not _is_at(file, path):
                yield None
                return
            os.ftruncate(file, 0)
            os.fchmod(file, 0o600)  # it may be somebody else's, who died
            try:
                yield file
            finally:
                if _is_at(file, path):
                    os.unlink(path)
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"the log of prefixes {self._path} {what} ({error.strerror}): "
                "see to its permissions and its disk"
            ) from None


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


class MemoryLog(PrefixLog):
    """A log of this process alone."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._lock = threading.Lock()
        self._rewriting = threading.Lock()

    def append(self, records: bytes) -> int:
        """Add whole records at the end."""
        with self._lock:
            self._pieces.append(bytes(records))
            return sum(map(len, self._pieces))

    def read(self) -> Iterator[bytes]:
        """What was appended, as it was."""
        with self._lock:
            pieces = list(self._pieces)
        yield from pieces

    def rewrite(self, keep: Callable[[Iterator[bytes]], Iterable[bytes] | None]) -> int | None:
        """Put others in the place of what is there."""
        if not self._rewriting.acquire(blocking=False):
            return None
        try:
            with self._lock:
                before = list(self._pieces)
            kept = keep(iter(before))
            if kept is None:
                return None
            kept = list(kept)
            with self._lock:
                if self._pieces[: len(before)] != before:  # it was cleared
                    return None
                self._pieces[: len(before)] = kept
                return sum(map(len, self._pieces))
        finally:
            self._rewriting.release()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._pieces.clear()
