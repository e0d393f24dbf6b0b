"""When a client over shared memory is taken for lost: with one that does as it is told, without processes."""

from __future__ import annotations

import ctypes
import mmap
import socket
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.storage.mooncake_objects import HEADER, Memory, content
from tests.storage.mooncake_server import MASTER, environment_kept, wait_until
from unified_cache.errors import StorageError
from unified_cache.storage.backends import mooncake
from unified_cache.storage.backends.mooncake import MooncakeBackend
from unified_cache.storage.backends.mooncake_settings import MooncakeSettings
from unified_cache.storage.contract import PageStatus

DEADLINE = 10.0
SIZE = 4096
HIT = PageStatus.HIT


class Allocator:
    """Ordinary memory, as long as the allocator is there."""

    def alloc(self, count: int) -> int:
        self._memory = np.frombuffer(mmap.mmap(-1, count), np.uint8)
        return int(self._memory.ctypes.data)

    def free(self, address: int) -> None:
        del self._memory


class Package:
    """What the backend uses of the package; each object is there."""

    MooncakeHostMemAllocator = Allocator

    def __init__(self) -> None:
        self.clients = 0
        self.reads: list[str] = []
        self.held: dict[str, threading.Event] = {}  # by its first key: a read waits
        self.reach_nobody = {"a"}  # and these do not get through then
        self.finds_owners = True
        self.MooncakeDistributedStore = self._client

    def _client(self) -> Package:
        self.clients += 1
        return self

    def setup_dummy(self, *arguments: object) -> int:
        return 0

    def register_buffer(self, start: int, count: int) -> int:
        return 0

    def unregister_buffer(self, start: int) -> int:
        return 0 if self.finds_owners else -1

    def close(self) -> None:
        pass

    def is_exist(self, key: str) -> int:
        return 0

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]
    ) -> list[int]:
        if keys == ["unified-cache"]:
            known = -600 if addresses == [[4096]] else -704
            return [known if self.finds_owners else -900]
        self.reads.append(keys[0])
        if keys[0] in self.held:
            assert self.held[keys[0]].wait(60)
            if keys[0] in self.reach_nobody:
                return [-900] * len(keys)
        for key, pieces in zip(keys, addresses, strict=True):
            whole = content(key, SIZE)
            for start, part in zip(pieces, (whole[:HEADER], whole[HEADER:]), strict=True):
                ctypes.memmove(start, part.ctypes.data, part.nbytes)
        return [HEADER + SIZE] * len(keys)


class Owner:
    """What listens on a port."""

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.create_server((MASTER, port))
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """In the place of the installed one; what the backend sets for its client goes again."""
    package = Package()
    monkeypatch.setattr(mooncake, "_client_module", lambda: package)
    with environment_kept(DEADLINE):
        yield package


def opened(owner: Owner) -> MooncakeBackend:
    client = f"{MASTER}:{owner.port}"
    return MooncakeBackend(
        MooncakeSettings(MASTER, owner.port, DEADLINE, client=client, bounce_bytes=2 * SIZE)
    )


def test_an_owner_that_took_another_s_place_is_known_by_its_own_connection(package: Package) -> None:
    owner = Owner()
    backend = opened(owner)
    memory = Memory(1, SIZE)
    assert backend.get(memory.batch(["k0"])) == [HIT]
    assert package.clients == 1
    owner.close()
    owner = Owner(owner.port)
    # The client has found it by itself, and nothing fails. If this one hung now, the connection to the one
    # before would say that it is gone, and that nothing can write to the pages of the call any more.
    memory.bodies[:] = 0
    assert backend.get(memory.batch(["k0"])) == [HIT]
    assert memory.holds(0, "k0", SIZE)
    assert package.clients == 2
    assert backend._line is not None
    assert not backend._line.ended
    assert backend.get(memory.batch(["k0"])) == [HIT]
    assert package.clients == 2
    owner.close()
    backend.close()


def test_a_line_ends_with_the_process_at_its_other_end() -> None:
    here, there = socket.socketpair()
    line = mooncake._Line(here)
    assert not line.ended
    there.send(b"something")
    assert not line.ended
    there.close()
    wait_until(lambda: line.ended, "what was sent is read")
    assert line.ended
    line.close()
    assert line.ended


class Reads:
    """Reads of one object each, on threads of their own."""

    def __init__(self, backend: MooncakeBackend) -> None:
        self._backend = backend
        self._threads: dict[str, threading.Thread] = {}
        self._answers: dict[str, object] = {}

    def begin(self, key: str) -> None:
        self._threads[key] = threading.Thread(target=self._read, args=(key,))
        self._threads[key].start()

    def _read(self, key: str) -> None:
        try:
            self._answers[key] = self._backend.get(Memory(1, SIZE).batch([key]))
        except StorageError as error:
            self._answers[key] = str(error)

    def end(self, key: str) -> object:
        self._threads[key].join(30)
        return self._answers[key]


def test_memory_of_a_call_that_was_lost_is_not_used_by_one_that_waits_for_it(package: Package) -> None:
    owner = Owner()
    backend = opened(owner)
    package.held = {"a": threading.Event(), "b": threading.Event()}
    reads = Reads(backend)
    reads.begin("a")
    reads.begin("b")
    wait_until(lambda: sorted(package.reads) == ["a", "b"], "both are asked for")
    reads.begin("c")
    wait_until(lambda: backend._calls == 3, "the third is waiting, or about to")
    # The owner may still write what it was asked for: a hanging one does when it goes on.
    package.held["a"].set()
    assert "no connection" in str(reads.end("a"))
    assert "was lost and is looked for" in str(reads.end("c"))
    assert sorted(package.reads) == ["a", "b"]
    package.held["b"].set()
    assert reads.end("b") == [HIT]
    owner.close()
    backend.close()


def test_a_call_that_goes_well_does_not_find_what_another_has_lost(package: Package) -> None:
    owner = Owner()
    backend = opened(owner)
    package.held = {"a": threading.Event(), "b": threading.Event()}
    reads = Reads(backend)
    reads.begin("a")
    reads.begin("b")
    wait_until(lambda: sorted(package.reads) == ["a", "b"], "both are asked for")
    package.held["a"].set()
    assert "no connection" in str(reads.end("a"))
    package.held["b"].set()
    assert reads.end("b") == [HIT]
    # With another client, and memory that nothing of the first call comes to.
    assert backend.get(Memory(1, SIZE).batch(["c"])) == [HIT]
    assert package.clients == 2
    owner.close()
    backend.close()


def test_an_owner_that_is_back_twice_gets_its_time_twice(package: Package) -> None:
    owner = Owner()
    backend = opened(owner)
    memory = Memory(1, SIZE)
    lent = backend.host_memory(SIZE)
    assert lent is not None
    memory.bodies = np.frombuffer(lent, np.uint8).reshape(1, SIZE)
    backend.register(lent)
    assert backend.get(memory.batch(["k0"])) == [HIT]
    owner.close()
    package.finds_owners = False
    owner = Owner(owner.port)
    with pytest.raises(StorageError, match="is found again"):
        backend.get(memory.batch(["k0"]))
    backend._found -= 100  # and so much later
    owner.close()
    with pytest.raises(StorageError, match="can not be reached"):
        backend.get(memory.batch(["k0"]))
    owner = Owner(owner.port)
    # A new client now could not have the memory, and bodies would be copied from now on.
    with pytest.raises(StorageError, match="is found again"):
        backend.get(memory.batch(["k0"]))
    package.finds_owners = True
    memory.bodies[:] = 0
    assert backend.get(memory.batch(["k0"])) == [HIT]
    assert memory.holds(0, "k0", SIZE)
    assert (package.clients, backend._moved) == (2, [[2, 0], [0, 0]])
    owner.close()
    backend.close()
