"""Case 51 with every backend: a reset, also while it is stuck in a call, leaves the threads as they are."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cache.support import PAGE, Clock, assert_nothing_held, make_cache, serve, toks, until
from tests.storage.mooncake_server import Master, Owner, wait_until, why_not_here
from unified_cache.storage.backends.memory import Fault, MemoryBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.backends.shm import ShmBackend
from unified_cache.storage.backends.slot_store import SlotStore
from unified_cache.storage.contract import Backend
from unified_cache.storage.urls import open_storage

LONG = 12 * PAGE + 1


class Gate:
    """What holds a call up, as deep inside the backend as that can be done."""

    def __init__(self) -> None:
        self._shut: tuple[str, ...] = ()
        self._open = threading.Event()
        self.inside = threading.Event()

    def wrap(self, owner: Any, name: str, call: str) -> None:
        real = getattr(owner, name)

        def held(*arguments: Any, **settings: Any) -> Any:
            if call in self._shut:
                self.inside.set()
                assert self._open.wait(60)
            return real(*arguments, **settings)

        setattr(owner, name, held)

    def shut(self, call: str) -> None:
        self._open.clear()
        self.inside.clear()
        self._shut = (call,)

    def open(self) -> None:
        self._shut = ()
        self._open.set()


class MemoryGate(Gate):
    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__()
        self._backend = backend

    def shut(self, call: str) -> None:
        self.inside.clear()
        self._backend._released.clear()
        self._backend.faults.plan(call, [Fault.HANG])
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        if self._backend.wait_until_hanging(60):
            self.inside.set()

    def open(self) -> None:
        self._backend.release()


class OwnerGate(Gate):
    """The process that has the pages is stopped: the client waits in native code."""

    def __init__(self, owner: Owner, backend: Any) -> None:
        super().__init__()
        self._owner, self._backend = owner, backend
        for name in ("batch_get_into_multi_buffers", "batch_put_from_multi_buffers"):
            self._tell(name)

    def _tell(self, name: str) -> None:
        gate, real = self, self._backend._store

        class Told:
            def __getattr__(self, asked: str) -> Any:
                if asked == name:
                    gate.inside.set()
                return getattr(real, asked)

        self._backend._store = Told()

    def shut(self, call: str) -> None:
        self._owner.freeze()
        self.inside.clear()

    def open(self) -> None:
        self._owner.thaw()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(scheme: str, folder: Path, stack: ExitStack) -> tuple[Backend, Callable[[], Gate]]:
    """A backend, and its gate once something is stored."""
    if scheme == "mooncake":
        if missing := why_not_here():
            pytest.skip(missing)
        master = stack.enter_context(Master())
        owner = stack.enter_context(Owner(master))
        backend = open_storage(f"mooncake://{master.address}?metrics={master.metrics_port}&force=1", 5.0)
        wait_until(lambda: backend.stats()["capacity_bytes"] > 0, "the master has a segment")
        return backend, lambda: OwnerGate(owner, backend)
    if scheme == "memory":
        memory = MemoryBackend()
        return memory, lambda: MemoryGate(memory)
    if scheme == "shm":
        backend = ShmBackend(f"test-{secrets.token_hex(8)}", 4 << 20, root=str(folder))
    else:
        backend = open_storage(f"{scheme}://{folder}/store?size=4MiB")

    def gate() -> Gate:
        gate = Gate()
        if isinstance(backend, SlotStore):
            assert backend._open is not None
            gate.wrap(backend._open.medium, "read", "get")
            gate.wrap(backend._open.medium, "write", "set")
        else:
            assert isinstance(backend, PagesBackend)
            gate.wrap(backend, "_get", "get")
            gate.wrap(backend, "_write", "set")
        return gate

    return backend, gate


def threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("unified-cache"))


@pytest.mark.parametrize("call", ["get", "set"])
@pytest.mark.parametrize("scheme", ["file", "mmap", "shm", "pages", "memory", "mooncake"])
def test_case_51_resets_leave_the_threads_as_they_are(
    scheme: str, call: str, tmp_path: Path, stack: ExitStack
) -> None:
    backend, gate_of = opened(scheme, tmp_path, stack)
    clock = Clock()
    cache = make_cache(64, storage=backend, clock=clock, prefetch_threshold=PAGE, storage_timeout=1.0)
    link = cache._storage
    assert link is not None

    def serves() -> None:
        clock.now += 100  # the breaker tries again
        assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
        assert cache.flush(30)

    serve(cache, toks(LONG))
    assert cache.flush(30)
    gate = gate_of()
    stack.callback(gate.open)
    cache.reset()
    serves()  # a backend starts its own threads when they are first needed
    before = threads()
    assert len(before) >= 6
    for _ in range(5):
        cache.reset()
        assert threads() == before
        serves()
        assert threads() == before
    cache.reset()
    gate.shut(call)
    if call == "get":
        cache.begin(toks(LONG))
    else:
        serve(cache, toks(LONG, 5000))
    until(gate.inside.is_set, cache)
    for _ in range(2):
        cache.reset(force=True)
        assert threads() == before
        assert cache.usage()["host_quarantined_pages"] == 12
    clock.now += 2
    cache.tick()
    assert len(link.stuck) == 1
    assert set(link.stuck) < set(before)
    gate.open()
    until(lambda: not link.busy, cache)
    assert threads() == before
    for _ in range(2):
        cache.reset()
        serves()
        assert threads() == before
    assert_nothing_held(cache)
    cache.close()
    assert threads() == []
