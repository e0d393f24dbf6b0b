"""What every backend promises, of the Mooncake backend and both of its clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.storage.mooncake_server import Master, Owner, environment_kept, wait_until, why_not_here
from unified_cache.storage.backends.mooncake import MooncakeBackend
from unified_cache.storage.conformance import BackendConformance
from unified_cache.storage.contract import Backend
from unified_cache.storage.urls import StorageUrl

_MISSING = why_not_here()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

DEADLINE = 5.0


class MooncakeConformance(BackendConformance):
    """With a master and an owner for the class; a store is emptied for each new folder."""

    body_bytes = 64 << 10
    shared_memory: ClassVar[bool] = False
    master: ClassVar[Master]
    owner: ClassVar[Owner]
    force = True

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def servers(cls) -> Iterator[None]:
        """The processes; and the environment as it was."""
        with environment_kept(DEADLINE), Master() as cls.master, Owner(cls.master) as cls.owner:
            yield

    def open(self, folder: Path) -> Backend:
        """A client of the one master."""
        return self._open(folder, self.master, self.owner)

    def _open(self, folder: Path, master: Master, owner: Owner) -> MooncakeBackend:
        url = f"mooncake://{master.address}?metrics={master.metrics_port}&force={int(self.force)}"
        if self.shared_memory:
            url += f"&client={owner.address}"
        backend = MooncakeBackend.from_url(StorageUrl.parse(url), DEADLINE)
        wait_until(lambda: backend.stats()["capacity_bytes"] > 0, "the master has a segment")
        known = folder / "known"
        if not known.exists():
            backend.clear()
            known.touch()
        return backend

    def test_threads(self, tmp_path: Path) -> None:
        """Without force: that takes an object also from under somebody who reads it."""
        self.force = False
        super().test_threads(tmp_path)


class TestRealClient(MooncakeConformance):
    """This process waits on the network."""


class TestSharedMemory(MooncakeConformance):
    """A mooncake_client on this machine does."""

    shared_memory = True
