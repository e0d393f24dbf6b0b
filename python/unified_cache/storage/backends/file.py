"""``file:///folder?size=100GB``: objects in slots of one file, read and written past the page cache."""

from __future__ import annotations

import os
from typing import ClassVar, Self

from unified_cache.storage.backends.mediums import FileMedium
from unified_cache.storage.backends.slot_store import SlotStore
from unified_cache.storage.urls import StorageUrl

__all__ = ["FileBackend"]


class FileBackend(SlotStore):
    """A slab in a folder; several processes of one machine may use it.

    Args:
        folder: that the files ``slab.*`` are in; made if it is missing.
        threads: that read and write what can not be queued.
        direct: go past the page cache where the file system can and the memory is aligned to 4096 bytes.
        queued: ask the disk for a whole batch at once where it goes past the page cache.

    The other arguments, and the errors, are those of `SlotStore`.
    """

    scheme: ClassVar[str] = "file"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int | None = None,
        *,
        slot_bytes: int | None = None,
        evict: bool = True,
        threads: int = 4,
        direct: bool = True,
        queued: bool = True,
        deadline: float = 5.0,
    ) -> None:
        super().__init__(
            os.path.join(os.path.abspath(folder), "slab"),
            size,
            slot_bytes,
            evict,
            threads,
            deadline,
            durable=True,
            open_medium=lambda path: FileMedium(path, direct, queued),
        )

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        """``file:///folder?size=100GB&slot=1MiB&threads=4&direct=true&queued=true&evict=true``."""
        url.only("size", "slot", "threads", "direct", "queued", "evict")
        return cls(
            url.need_path(),
            url.size("size"),
            slot_bytes=url.size("slot"),
            evict=url.flag("evict", True),
            threads=url.integer("threads", 4, 1, 256),
            direct=url.flag("direct", True),
            queued=url.flag("queued", True),
            deadline=deadline,
        )
