"""``mmap:///path/of/file?size=100GB``: objects in slots of a mapped file."""

from __future__ import annotations

import os
from typing import ClassVar, Self

from unified_cache.storage.backends.mediums import MappedMedium
from unified_cache.storage.backends.slot_store import SlotStore
from unified_cache.storage.urls import StorageUrl

__all__ = ["MmapBackend"]


class MmapBackend(SlotStore):
    """Memory of the page cache that processes of a machine share, and that is on disk when a write has ended.

    Args:
        path: of the store's files, which add ``.data``, ``.table``, ``.index`` and ``.lock``.

    The other arguments, and the errors, are those of `SlotStore`.
    """

    scheme: ClassVar[str] = "mmap"

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int | None = None,
        *,
        slot_bytes: int | None = None,
        evict: bool = True,
        threads: int = 4,
        deadline: float = 5.0,
    ) -> None:
        super().__init__(
            os.path.abspath(path),
            size,
            slot_bytes,
            evict,
            threads,
            deadline,
            durable=True,
            open_medium=lambda file: MappedMedium(file, durable=True),
        )

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        """``mmap:///path/of/file?size=100GB&slot=1MiB&threads=4&evict=true``."""
        url.only("size", "slot", "threads", "evict")
        return cls(
            url.need_path(),
            url.size("size"),
            slot_bytes=url.size("slot"),
            evict=url.flag("evict", True),
            threads=url.integer("threads", 4, 1, 256),
            deadline=deadline,
        )
