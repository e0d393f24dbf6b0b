"""``shm://name?size=100GB``: objects in slots of shared memory of the machine."""

from __future__ import annotations

import os
import re
from typing import ClassVar, Self

from unified_cache.errors import StorageError
from unified_cache.storage.backends.mediums import MappedMedium
from unified_cache.storage.backends.slot_store import SlotStore
from unified_cache.storage.urls import StorageUrl

__all__ = ["ShmBackend"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ShmBackend(SlotStore):
    """Files in memory, ``/dev/shm/unified-cache-NAME.*``: they outlive the process, and not the machine.

    Args:
        name: 1 to 100 letters, digits, ``.``, ``_`` and ``-``, of which the first is a letter or digit.

    The other arguments, and the errors, are those of `SlotStore`.
    """

    scheme: ClassVar[str] = "shm"

    def __init__(
        self,
        name: str,
        size: int | None = None,
        *,
        slot_bytes: int | None = None,
        evict: bool = True,
        threads: int = 4,
        deadline: float = 5.0,
        root: str = "/dev/shm",
    ) -> None:
        if not _NAME.fullmatch(name):
            raise StorageError(
                f"storage shm://{name}: the name must be 1 to 100 letters, digits, '.', '_' and '-', and "
                "begin with a letter or digit"
            )
        super().__init__(
            os.path.join(root, f"unified-cache-{name}"),
            size,
            slot_bytes,
            evict,
            threads,
            deadline,
            durable=False,
            open_medium=lambda file: MappedMedium(file, durable=False),
        )

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        """``shm://name?size=100GB&slot=1MiB&threads=4&evict=true``."""
        url.only("size", "slot", "threads", "evict")
        name = url.need_host("name")
        if url.path not in ("", "/") or url.port is not None:
            raise StorageError(f"storage {url}: write shm://name, a name alone")
        return cls(
            name,
            url.size("size"),
            slot_bytes=url.size("slot"),
            evict=url.flag("evict", True),
            threads=url.integer("threads", 4, 1, 256),
            deadline=deadline,
        )
