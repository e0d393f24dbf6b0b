"""``pages:///folder``: a file for each object, ``<folder>/<2 digits>/<2 digits>/<name>``. The simple store.

Several processes, also of several machines that mount the folder, may use it. A file gets its name only when
it is complete and on disk. Files whose names are not of the kind that is given here are somebody else's:
they are neither counted nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self

from unified_cache.errors import ArgumentError, StorageError, StorageTimeoutError
from unified_cache.storage.backends.calls import RunningCalls
from unified_cache.storage.backends.io_threads import IoThreads
from unified_cache.storage.checksums import read_file
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus, PrefixLog
from unified_cache.storage.prefix_log import FileLog
from unified_cache.storage.urls import StorageUrl
from unified_cache.worker import Worker

__all__ = ["PagesBackend"]

_TEMPORARY = ".unified-cache-tmp"
_PREFIXES = ".unified-cache-prefixes"
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{32}")
_DIGITS = re.compile(r"[0-9a-f]{2}")
_KEY = re.compile(r"[-_.0-9a-z]{1,150}")
# A key that begins like the digest of a page is its file's name; others get an ending that no key has.
_DIGEST_KEY = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}(?:[-_.][-_.0-9a-z]*)?")
_ENDING = "~object"
_NAME = re.compile(rf"{_DIGEST_KEY.pattern}|{_KEY.pattern}{_ENDING}")
# A temporary file that old was left behind by a process that died; a younger one may still be written.
_STALE_SECONDS = 3600.0
# Files open at once in a set, for each thread.
_OPEN_FILES = 16
# Over the limit, objects go until this part of it is left: looking for the oldest means to look at all.
_KEPT = 0.9
# Of the deadline: that calls wait for a clean-up from its begin on. What has no room then is FULL.
_CLEANING = 0.5
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


def _path_of(key: str) -> str:
    """Of a key's file, below the folder."""
    if _DIGEST_KEY.fullmatch(key) and len(key) <= 150:
        return f"{key[:2]}/{key[2:4]}/{key}"
    if not _KEY.fullmatch(key):
        raise ArgumentError(f"keys must be 1 to 150 characters of 0-9 a-z - _ ., not {key!r}")
    digits = hashlib.blake2b(key.encode(), digest_size=2).hexdigest()
    return f"{digits[:2]}/{digits[2:]}/{key}{_ENDING}"


def _entries(folder: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """What is in a folder under such a name; nothing if the folder is gone."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if name.fullmatch(entry.name):
                yield entry


class PagesBackend(Backend):
    """Objects as files below a folder.

    Args:
        folder: made if it is missing.
        size: bytes that the files may have together; over it those go that were not read for longest. Counted
            by each process from what it finds when it opens the folder and at each clean-up, and what it
            writes itself meanwhile: several processes may be over it for a while.
        threads: that read and write files; 1: the caller's alone.
        deadline: seconds that a call may take. Between two files a call that is past it goes no further.
        clock: seconds; called from several threads.

    Raises:
        StorageError: the folder can not be made or written to.
    """

    scheme: ClassVar[str] = "pages"
    makes_checksums: ClassVar[bool] = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int | None = None,
        *,
        threads: int = 4,
        deadline: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = os.path.abspath(folder)
        self._temporary = os.path.join(self._root, _TEMPORARY)
        self._limit = size
        self._deadline = deadline
        self._clock = clock
        self._used = 0
        self._lock = threading.Lock()
        self._cleaner: Worker | None = None
        self._cleaning: threading.Event | None = None  # set when the clean-up that runs has ended
        self._cleaning_since = 0.0
        self._added = 0  # since the clean-up that runs has begun to look
        self._closing = False
        self._counts = {"evicted": 0, "io_errors": 0}
        self._calls = RunningCalls(f"the storage pages:// at {self._root}")
        try:
            os.makedirs(self._temporary, exist_ok=True)
            probe = os.path.join(self._temporary, uuid.uuid4().hex)
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            os.unlink(probe)
            self._sweep(time.time() - _STALE_SECONDS)
            if size is not None:
                self._used = sum(bytes_ for _, bytes_, _ in self._files())
        except OSError as error:
            raise StorageError(
                f"storage pages:// at {self._root} can not be used ({error.strerror}): name a folder that "
                "this process may write to"
            ) from None
        self._threads = IoThreads(threads, "unified-cache pages")

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        """``pages:///folder?size=100GB&threads=4``, or a folder's path alone."""
        url.only("size", "threads")
        path = url.need_path() if url.given.startswith("pages:") else url.path
        return cls(path, url.size("size"), threads=url.integer("threads", 4, 1, 256), deadline=deadline)

    def _sweep(self, limit: float) -> None:
        for entry in _entries(self._temporary, _TEMPORARY_NAME):
            # Another process may sweep at the same time.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < limit:
                    os.unlink(entry)

    def _path(self, key: str) -> str:
        return os.path.join(self._root, _path_of(key))

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """For each run how many keys from the first on are stored."""
        with self._calls:
            end = self._clock() + self._deadline
            try:
                return [
                    next((at for at, key in enumerate(run) if not self._look(key, end)), len(run))
                    for run in runs
                ]
            except StorageTimeoutError:
                raise
            except OSError as error:
                raise StorageError(
                    f"storage pages:// at {self._root} can not be looked at ({error.strerror}): "
                    "see to its permissions and its disk"
                ) from None

    def _look(self, key: str, end: float) -> bool:
        if self._clock() > end:
            raise StorageTimeoutError(
                f"storage pages:// at {self._root} was asked for more than it could look at in "
                f"{self._deadline:g} s: take a faster disk, or allow more time"
            )
        return _is_there(self._path(key))

    def prefix_log(self) -> PrefixLog:
        """A file in the folder."""
        return FileLog(os.path.join(self._root, _PREFIXES), self._deadline)

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        """Read objects into the batch's memory."""
        with self._calls:
            end = self._clock() + self._deadline
            paths = [self._path(key) for key in batch.keys]
            return self._threads.run(lambda at: self._get(batch, at, paths[at], end), range(len(batch)))

    def _get(self, batch: ObjectBatch, at: int, path: str, end: float) -> PageStatus:
        if self._clock() > end:
            return PageStatus.TIMEOUT
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return PageStatus.MISS
        except OSError:  # no descriptors, no permission: that is not a miss
            self._count("io_errors")
            return PageStatus.ERROR
        try:
            size = os.fstat(file).st_size - batch.headers.shape[1]
            if not 0 <= size <= int(batch.body_sizes[at]):
                return PageStatus.CORRUPT
            # With its checksum in the same call: from one to the other the threads would wait for each other.
            done = read_file(batch.checksums, batch.headers, at, file, batch.bodies[at][:size])
            if done < batch.headers.shape[1] + size:  # it became shorter
                return PageStatus.CORRUPT
            if self._limit is not None:
                os.utime(file)  # the oldest go first
        except OSError:
            self._count("io_errors")
            return PageStatus.ERROR
        finally:
            os.close(file)
        if len(batch.stored_sizes):
            batch.stored_sizes[at] = size
        return PageStatus.HIT

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        """Store objects from the batch's memory."""
        with self._calls:
            end = self._clock() + self._deadline
            paths = [self._path(key) for key in batch.keys]
            room = self._make_room(batch, paths, end)
            parts = [range(at, min(at + _OPEN_FILES, len(batch))) for at in range(0, len(batch), _OPEN_FILES)]
            results = self._threads.run(lambda part: self._set(batch, part, paths, room, end), parts)
            return [status for result in results for status in result]

    def _set(
        self, batch: ObjectBatch, part: range, paths: list[str], room: _Room, end: float
    ) -> list[PageStatus]:
        statuses = [PageStatus.HIT] * len(part)
        written: dict[int, tuple[int, str]] = {}  # file and temporary path
        try:
            # First all writes, then all waits for the disk: it can take them together.
            for place, at in enumerate(part):
                try:
                    if self._clock() > end:
                        statuses[place] = PageStatus.TIMEOUT
                        continue
                    if _is_there(paths[at]):
                        continue
                    if not room.take(_bytes_of(batch, at)):
                        statuses[place] = PageStatus.FULL
                        continue
                    written[place] = self._write(batch, at)
                except OSError as error:
                    statuses[place] = self._failed(error)
            for place, (file, temporary) in written.items():
                if self._clock() > end:
                    statuses[place] = PageStatus.TIMEOUT
                    continue
                try:
                    os.fsync(file)
                    self._publish(temporary, paths[part[place]])
                except OSError as error:
                    statuses[place] = self._failed(error)
                else:
                    self._add(_bytes_of(batch, part[place]))
        finally:
            for file, temporary in written.values():
                os.close(file)
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        return statuses

    def _failed(self, error: OSError) -> PageStatus:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return PageStatus.FULL
        self._count("io_errors")
        return PageStatus.ERROR

    def _write(self, batch: ObjectBatch, at: int) -> tuple[int, str]:
        body = batch.bodies[at][: int(batch.body_sizes[at])]
        if batch.checksums is not None:
            batch.checksums.make([at], [body])
        path = os.path.join(self._temporary, uuid.uuid4().hex)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o644)
        except FileNotFoundError:  # somebody has removed the folder
            os.makedirs(self._temporary, exist_ok=True)
            file = os.open(path, flags, 0o644)
        try:
            parts = [memoryview(batch.headers[at]), body]
            done, total = 0, _bytes_of(batch, at)
            while done < total:
                done += os.pwritev(file, _rest(parts, done), done)
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return file, path

    def _publish(self, temporary: str, path: str) -> None:
        """Give a complete file its name; if another has it already, that one stays."""
        for _ in range(2):
            try:
                os.link(temporary, path)
                return
            except FileExistsError:
                return
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # Without links two writers at once may both get there: the later one stays, complete as well.
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(temporary, path)
                return
        os.link(temporary, path)

    # The limit.

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by

    def _add(self, count: int) -> None:
        with self._lock:
            self._used += count
            self._added += count

    def _make_room(self, batch: ObjectBatch, paths: list[str], end: float) -> _Room:
        """Have removed what was not read for longest, if the batch would go over the limit."""
        if self._limit is None:
            return _Room(None)
        needed = 0
        for at, path in enumerate(paths):
            if self._clock() > end:
                break
            needed += 0 if os.path.exists(path) else _bytes_of(batch, at)
        with self._lock:
            ended = self._begin_clean_up(needed) if self._used + needed > self._limit else None
            waits = self._cleaning_since + self._deadline * _CLEANING - self._clock()
        if ended is not None:
            ended.wait(max(0.0, waits))
        with self._lock:
            return _Room(self._limit - self._used)

    def _begin_clean_up(self, needed: int) -> threading.Event:
        # It looks at every file of the folder, so it goes on when nobody has time for it any more.
        if self._cleaning is None:
            if self._cleaner is None:
                self._cleaner = Worker("unified-cache pages clean-up")
            self._cleaning, self._cleaning_since = threading.Event(), self._clock()
            self._cleaner.submit(lambda: self._clean_up(needed))
        return self._cleaning

    def _clean_up(self, needed: int) -> None:
        """Remove files until there is room for so many bytes and a tenth of the limit."""
        assert self._limit is not None
        try:
            with self._lock:
                self._added = 0
            files = []
            for file in self._files():
                if self._closing:
                    return
                files.append(file)
            files.sort()
            goal = max(0, int(self._limit * _KEPT) - needed)
            with self._lock:
                # What was written meanwhile may have been seen as well: then a little more goes than has to.
                self._used = sum(size for _, size, _ in files) + self._added
            for _, size, path in files:
                if self._used <= goal or self._closing:
                    return
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    with self._lock:
                        self._counts["evicted"] += 1
                        self._used -= size
        except OSError:
            self._count("io_errors")
        finally:
            with self._lock:
                ended, self._cleaning = self._cleaning, None
            assert ended is not None
            ended.set()

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Time of the last use, bytes, path, of all objects."""
        for entry in self._objects():
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                yield status.st_mtime, status.st_size, entry.path

    def _objects(self) -> Iterator[os.DirEntry[str]]:
        for first in _entries(self._root, _DIGITS):
            if not first.is_dir():
                continue
            for second in _entries(first.path, _DIGITS):
                if not second.is_dir():
                    continue
                for entry in _entries(second.path, _NAME):
                    place = f"{first.name}/{second.name}/{entry.name}"
                    key = entry.name.removesuffix(_ENDING)
                    if _path_of(key) == place and entry.is_file(follow_symlinks=False):
                        yield entry

    def delete(self, keys: Sequence[str]) -> int:
        """Forget objects; returns how many were there."""
        with self._calls:
            gone = 0
            for key in keys:
                path = self._path(key)
                try:
                    size = os.stat(path).st_size
                    os.unlink(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError as error:
                    raise StorageError(
                        f"storage pages://: {path} can not be removed ({error.strerror}): "
                        "see to its permissions"
                    ) from None
                gone += 1
                self._add(-size)
            return gone

    def keys(self) -> Iterator[str]:
        """The keys of all objects, found as it goes."""
        with self._calls:
            return (entry.name.removesuffix(_ENDING) for entry in self._objects())

    def clear(self) -> None:
        """Forget every object of every model that uses the folder, and what writers that died have left."""
        with self._calls:
            for entry in list(self._objects()):
                with contextlib.suppress(OSError):
                    os.unlink(entry)
            self._sweep(time.time() - _STALE_SECONDS)
            self.prefix_log().clear()
            with self._lock:
                self._used = sum(size for _, size, _ in self._files()) if self._limit is not None else 0

    def stats(self) -> dict[str, int]:
        """Objects and bytes, headers included: looks at every file."""
        with self._calls:
            sizes = [size for _, size, _ in self._files()]
            limit = {} if self._limit is None else {"capacity_bytes": self._limit}
            return {"objects": len(sizes), "bytes": sum(sizes), **limit, **self._counts}

    def close(self) -> None:
        """Ends the threads; waits for calls that run, and not for a clean-up."""
        if self._calls.close():
            self._closing = True
            self._threads.close()
            if self._cleaner is not None:
                self._cleaner.close()


class _Room:
    """Bytes that the objects of one call may still take, on all threads together; None: any."""

    def __init__(self, left: int | None) -> None:
        self._left = left
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """Whether there is room for so many."""
        with self._lock:
            if self._left is None:
                return True
            if count > self._left:
                return False
            self._left -= count
            return True


def _is_there(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _bytes_of(batch: ObjectBatch, at: int) -> int:
    return int(batch.headers.shape[1]) + int(batch.body_sizes[at])


def _rest(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts, without their first bytes."""
    rest = []
    for part in parts:
        if done < part.nbytes:
            rest.append(part[done:])
        done = max(0, done - part.nbytes)
    return rest
