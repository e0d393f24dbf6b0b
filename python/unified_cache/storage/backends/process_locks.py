"""Locks between processes: bytes of a file, held by an open file and gone with it, however it goes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["LockTimeoutError", "ProcessLocks"]

# struct flock of 64-bit Linux: type, whence, start, length, pid (0 for locks of open files).
_FLOCK = struct.Struct("@hhqqi0q")
_MUTEX = 0
_FIRST_OWNER = 1
_MOST_OWNERS = 4096
# Critical sections take microseconds to a few milliseconds; a holder that is frozen is waited for until the
# deadline, so the wait is a poll and no blocking call.
_POLL_SECONDS = 0.0002


class LockTimeoutError(Exception):
    """Another process has held the lock until the deadline."""


class ProcessLocks:
    """A mutex, and numbers of the ones that are alive.

    Locks of open files (``F_OFD_SETLK``): two instances in one process exclude each other as processes do.

    Args:
        path: of the file, made if it is missing; its content does not matter.
        clock: seconds.
        sleep: waits so many seconds.

    Raises:
        OSError: it can not be opened, or the file system has no such locks.
    """

    def __init__(
        self,
        path: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clock = clock
        self._sleep = sleep
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # The lock of a file is not one between threads that use the same open file.
        self._threads = threading.Lock()
        try:
            self.owner = next(
                number for number in range(1, _MOST_OWNERS) if self._lock(_FIRST_OWNER + number)
            )  # of this instance, 1..4095, while it is open
        except StopIteration:
            os.close(self._file)
            raise OSError(errno.EUSERS, f"{_MOST_OWNERS - 1} others use it") from None
        except BaseException:
            os.close(self._file)
            raise

    def _set(self, kind: int, at: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))

    def _lock(self, at: int) -> bool:
        try:
            self._set(fcntl.F_WRLCK, at)
        except (BlockingIOError, PermissionError):
            return False
        return True

    @contextlib.contextmanager
    def mutex(self, end: float) -> Iterator[None]:
        """Be the only one, among threads and processes.

        Raises:
            LockTimeoutError: not until `end`, by the clock.
        """
        if not self._threads.acquire(timeout=max(0.0, end - self.clock())):
            raise LockTimeoutError
        try:
            while not self._lock(_MUTEX):
                if self.clock() > end:
                    raise LockTimeoutError
                self._sleep(_POLL_SECONDS)
            try:
                yield
            finally:
                self._set(fcntl.F_UNLCK, _MUTEX)
        finally:
            self._threads.release()

    def alive(self, owner: int) -> bool:
        """Whether somebody has this number now."""
        if owner == self.owner:
            return True
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _FIRST_OWNER + owner, 1, 0)
        answer: tuple[int, ...] = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked))
        return answer[0] != fcntl.F_UNLCK

    def close(self) -> None:
        """Let go of everything."""
        os.close(self._file)
