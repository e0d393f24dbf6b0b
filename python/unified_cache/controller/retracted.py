"""Pages of one request that leave the device by themselves, outside the tree, and come back."""

from __future__ import annotations

from typing import Literal

import numpy as np

from unified_cache.controller.cache_controller import CacheController
from unified_cache.controller.operations import CacheOperation
from unified_cache.pools.allocator import Pages

__all__ = ["RetractedPages"]


class RetractedPages:
    """A private copy on host. Whatever happens, each page is given back once, when no copy touches it any
    more.

    Args:
        controller: copies and frees.
        device_pages: the request's own pages; given up once the copy is complete.

    Attributes:
        state: "leaving" while the copy to host is under way, "away" after it, "returning" while the copy
            back is, "back" once nothing is held here any more.

    Raises:
        ArgumentError: there is no host tier.
        CapacityError: no room on host, even after evicting what may go; nothing has changed.
    """

    def __init__(self, controller: CacheController, device_pages: Pages) -> None:
        self.state: Literal["leaving", "away", "returning", "back"] = "leaving"
        self._controller = controller
        self._host_pages = controller.alloc_host(len(device_pages))
        self._device_pages = device_pages
        self._operation = CacheOperation("backup", device_pages, self._host_pages, self._left, self._again)
        if len(device_pages) == 0:
            self.state = "away"
            return
        controller.start(self._operation, coming=len(device_pages))

    @property
    def held(self) -> bool:
        """Something is held here: the pages have not (yet) come back."""
        return self.state != "back"

    @property
    def device_pages(self) -> int:
        """Device pages that are held here: the request's own until they have left, and while they return."""
        return len(self._device_pages)

    @property
    def host_pages(self) -> int:
        """Host pages that are held here."""
        return len(self._host_pages)

    def come_back(self, *, priority: int = 0) -> tuple[Pages, CacheOperation | None]:
        """Bring the pages to device; returns where they are, and the load that fills them, if one is needed.

        Args:
            priority: of that load; the higher is copied first.

        Raises:
            CapacityError: no room on device; nothing has changed.
        """
        if self.state == "leaving":
            # They never went: the copy is of no use any more.
            self._controller.abandon(self._operation, host_pages=self._host_pages)
            return self._hand_over(), None
        self._device_pages = self._controller.alloc(len(self._host_pages))
        if len(self._host_pages) == 0:
            return self._hand_over(), None
        self._operation = CacheOperation(
            "load", self._device_pages, self._host_pages, self._came, self._again, priority=priority
        )
        self._controller.start(self._operation)
        self.state = "returning"
        return self._device_pages, self._operation

    def settle(self) -> None:
        """The bytes have come back: nothing is held here after that."""
        self._controller.await_end(self._operation)

    def give_up(self) -> None:
        """Nobody needs what is held here any more, on either tier."""
        if self.state == "away":
            self._controller.free_host(self._host_pages)
        elif self.state != "back":
            self._controller.abandon(
                self._operation, device_pages=self._device_pages, host_pages=self._host_pages
            )
        self._hand_over()

    def _hand_over(self) -> Pages:
        """Nothing is held here any more; returns the device pages that were."""
        self.state = "back"
        device_pages = self._device_pages
        self._device_pages = self._host_pages = np.empty(0, np.uint32)
        return device_pages

    def _left(self) -> None:
        self._controller.free_device(self._device_pages)
        self._device_pages = np.empty(0, np.uint32)
        self.state = "away"

    def _came(self) -> None:
        self._controller.free_host(self._host_pages)
        self._hand_over()

    def _again(self) -> bool:
        """The pages at the other end are good: a copy that fails is made again."""
        return False
