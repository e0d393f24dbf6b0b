"""A folder as storage: a file for each page, ``<root>/<2 digits>/<2 digits>/<key>``.

Several processes may use one folder. A file gets its name only when it is complete and on disk. Files whose
names are not of the kind that is given here are somebody else's: they are neither counted nor removed.
"""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from unified_cache.errors import ClosedError, StorageError
from unified_cache.storage.contract import PageStatus, Store
from unified_cache.storage.page_format import (
    HEADER_BYTES,
    PageDamagedError,
    UnknownVersionError,
    check_page,
    check_version,
    make_header,
)

__all__ = ["FolderStore", "folder_of"]

_TEMPORARY = ".unified-cache-tmp"
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{32}")
_DIGITS = re.compile(r"[0-9a-f]{2}")
_KEY = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}")
# A temporary file that old was left behind by a process that died; a younger one may still be written.
_STALE_SECONDS = 3600.0


def folder_of(storage: str | os.PathLike[str]) -> Path:
    """The folder that the setting `storage` names, a path or ``file:///path``.

    Raises:
        StorageError: a URL of another kind.
    """
    storage = os.fspath(storage)
    if "://" not in storage:
        return Path(storage)
    parts = urlsplit(storage)
    path = unquote(parts.path)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not path or "\0" in path:
        raise StorageError(f"storage must be a folder's path or file:///path, not {storage!r}")
    return Path(path)


def _read_whole(file: int, header: bytearray, view: memoryview) -> None:
    """Fill both from the beginning of a file that has at least as many bytes."""
    done, total = 0, len(header) + view.nbytes
    while done < total:
        if done < len(header):
            buffers = [memoryview(header)[done:], view]
        else:
            buffers = [view[done - len(header) :]]
        got = os.preadv(file, buffers, done)
        if got == 0:
            raise PageDamagedError("the file became shorter")
        done += got


def _entries(folder: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """What is in a folder under such a name; nothing if the folder is gone."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if name.fullmatch(entry.name):
                yield entry


def _write_whole(file: int, header: bytes, view: memoryview) -> None:
    done, total = 0, len(header) + view.nbytes
    while done < total:
        buffers = [memoryview(header)[done:], view] if done < len(header) else [view[done - len(header) :]]
        done += os.pwritev(file, buffers, done)


class FolderStore(Store):
    """Pages as files below `root`, which is made if it is missing.

    Raises:
        StorageError: the folder can not be made or written to.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._temporary = root / _TEMPORARY
        self._closed = False
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
            probe = self._temporary / uuid.uuid4().hex
            probe.write_bytes(b"")
            probe.unlink()
            self._sweep()
        except OSError as error:
            raise StorageError(
                f"storage folder {root} can not be used ({error.strerror}): "
                "name one that this process may write to"
            ) from None

    def _sweep(self) -> None:
        limit = time.time() - _STALE_SECONDS
        for entry in _entries(self._temporary, _TEMPORARY_NAME):
            # Another process may sweep at the same time.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < limit:
                    os.unlink(entry)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the storage folder {self._root} was closed")

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key[:2], key[2:4], key)

    def exists(self, keys: Sequence[str]) -> int:
        """How many of `keys`, from the first on and without a gap, are stored."""
        self._check_open()
        for count, key in enumerate(keys):
            if not os.path.exists(self._path(key)):
                return count
        return len(keys)

    def get(self, keys: Sequence[str], views: Sequence[memoryview]) -> list[PageStatus]:
        """Read each page into its view."""
        self._check_open()
        return [self._get(key, view) for key, view in zip(keys, views, strict=True)]

    def _get(self, key: str, view: memoryview) -> PageStatus:
        path = self._path(key)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return PageStatus.MISS
        except OSError:
            return PageStatus.ERROR
        try:
            if os.fstat(file).st_size != HEADER_BYTES + view.nbytes:
                check_version(os.pread(file, HEADER_BYTES, 0))
                raise PageDamagedError("the file's size")
            header = bytearray(HEADER_BYTES)
            _read_whole(file, header, view)
            check_page(key, bytes(header), view)
        except UnknownVersionError:
            return PageStatus.MISS
        except PageDamagedError:
            # Out of the way, so that the page is written again when it was computed again.
            with contextlib.suppress(OSError):
                os.unlink(path)
            return PageStatus.CORRUPT
        except OSError:
            return PageStatus.ERROR
        finally:
            os.close(file)
        return PageStatus.HIT

    def set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Write pages that are not there yet; returns how many, from the first on, are stored now."""
        self._check_open()
        written: list[tuple[int, str] | None] = []  # file and temporary path; None: was there
        stored = 0
        try:
            # First all writes, then all waits for the disk: it can take them together.
            with contextlib.suppress(OSError):
                for key, view in zip(keys, views, strict=True):
                    written.append(None if os.path.exists(self._path(key)) else self._write(key, view))
            with contextlib.suppress(OSError):
                for key, entry in zip(keys, written, strict=False):
                    if entry is not None:
                        self._publish(key, *entry)
                    stored += 1
        finally:
            for entry in written:
                if entry is not None:
                    os.close(entry[0])
            for entry in written[stored:]:
                if entry is not None:
                    with contextlib.suppress(OSError):
                        os.unlink(entry[1])
        return stored

    def _write(self, key: str, view: memoryview) -> tuple[int, str]:
        path = os.path.join(self._temporary, uuid.uuid4().hex)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o644)
        except FileNotFoundError:  # somebody has removed the folder
            os.makedirs(self._temporary, exist_ok=True)
            file = os.open(path, flags, 0o644)
        try:
            _write_whole(file, make_header(key, view), view)
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return file, path

    def _publish(self, key: str, file: int, temporary: str) -> None:
        os.fsync(file)
        path = self._path(key)
        try:
            os.rename(temporary, path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.rename(temporary, path)

    def _pages(self) -> Iterator[os.DirEntry[str]]:
        for first in _entries(self._root, _DIGITS):
            if not first.is_dir():
                continue
            for second in _entries(first.path, _DIGITS):
                if not second.is_dir():
                    continue
                for entry in _entries(second.path, _KEY):
                    if entry.name.startswith(first.name + second.name) and entry.is_file(
                        follow_symlinks=False
                    ):
                        yield entry

    def clear(self) -> None:
        """Forget every page, of every model that uses the folder."""
        self._check_open()
        for entry in list(self._pages()):
            with contextlib.suppress(OSError):
                os.unlink(entry)

    def stats(self) -> dict[str, int]:
        """Plain numbers: `pages` and `bytes`, headers included. Looks at every file."""
        self._check_open()
        sizes = []
        for entry in self._pages():
            with contextlib.suppress(FileNotFoundError):
                sizes.append(entry.stat().st_size)
        return {"pages": len(sizes), "bytes": sum(sizes)}

    def close(self) -> None:
        """From now on every other call is a `ClosedError`; more than once is fine."""
        self._closed = True
