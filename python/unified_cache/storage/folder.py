"""A file for each object. Until `backends.pages` is there."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self

from unified_cache.errors import ClosedError, StorageError
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus
from unified_cache.storage.urls import StorageUrl

__all__ = ["FolderBackend"]


class FolderBackend(Backend):
    scheme: ClassVar[str] = "pages"

    def __init__(self, root: Path) -> None:
        self._root, self._closed = root, False
        self._temporary = root / ".unified-cache-tmp"
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"storage folder {root} can not be used ({error.strerror}): "
                "name one that this process may write to"
            ) from None

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        return cls(Path(url.path))

    def _path(self, key: str) -> Path:
        if self._closed:
            raise ClosedError(f"the storage folder {self._root} was closed")
        return self._root / key[:2] / key[2:4] / key

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        return [
            next((at for at, key in enumerate(run) if not self._path(key).exists()), len(run)) for run in runs
        ]

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        statuses = []
        for at, key in enumerate(batch.keys):
            try:
                whole = self._path(key).read_bytes()
            except FileNotFoundError:
                statuses.append(PageStatus.MISS)
                continue
            header, body = batch.headers.shape[1], batch.bodies[at]
            if not header <= len(whole) <= header + len(body):
                statuses.append(PageStatus.CORRUPT)
                continue
            batch.headers[at] = list(whole[:header])
            body[: len(whole) - header] = whole[header:]
            batch.stored_sizes[at] = len(whole) - header
            statuses.append(PageStatus.HIT)
        return statuses

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        for at, key in enumerate(batch.keys):
            path = self._path(key)
            if not path.exists():
                temporary = self._temporary / uuid.uuid4().hex
                temporary.write_bytes(
                    batch.headers[at].tobytes() + batch.bodies[at][: int(batch.body_sizes[at])]
                )
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(temporary, path)
        return [PageStatus.HIT] * len(batch)

    def delete(self, keys: Sequence[str]) -> int:
        count = 0
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(key))
                count += 1
        return count

    def keys(self) -> Iterator[str]:
        return (path.name for path in self._root.glob("??/??/*"))

    def clear(self) -> None:
        self.delete(list(self.keys()))

    def stats(self) -> dict[str, int]:
        sizes = [self._path(key).stat().st_size for key in self.keys()]
        return {"objects": len(sizes), "bytes": sum(sizes)}

    def close(self) -> None:
        self._closed = True
