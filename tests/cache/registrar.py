"""Stands in for a GPU's driver: keeps account of what is registered, and fails when told to."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

MIB = 1 << 20


class FakeRegistrar:
    """Refuses what a driver refuses: ranges that overlap, and addresses that were not registered.

    Args:
        most: bytes of one registration that it allows.
        refuse: told the number of the register call, from 1; whether it fails.
        stuck: told the number of the unregister call, from 1; whether it fails.
    """

    def __init__(
        self,
        most: int | None = None,
        refuse: Callable[[int], bool] = lambda call: False,
        stuck: Callable[[int], bool] = lambda call: False,
    ) -> None:
        self.most = most
        self.refuse = refuse
        self.stuck = stuck
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int, int]] = []  # name, address, bytes

    def _count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)

    def register(self, address: int, size: int) -> None:
        self.calls.append(("register", address, size))
        page = 4096
        for other, length in self.registered.items():
            if (
                address // page <= (other + length - 1) // page
                and other // page <= (address + size - 1) // page
            ):
                raise OSError("part or all of this memory range is already registered")
        if (self.most is not None and size > self.most) or self.refuse(self._count("register")):
            raise OSError("invalid argument")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        if address not in self.registered:
            raise AssertionError(f"{address:#x} is not registered")
        self.calls.append(("unregister", address, self.registered[address]))
        ctypes.string_at(address, 1)  # it is still mapped
        if self.stuck(self._count("unregister")):
            raise OSError("the driver is gone")
        del self.registered[address]
