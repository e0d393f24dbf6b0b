"""Host memory that a mooncake_client reaches by itself: bodies go straight, whatever becomes of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.cache.support import PAGE, assert_nothing_held, make_cache, make_pool, serve, toks
from tests.storage.mooncake_objects import Memory
from tests.storage.mooncake_server import Master, Owner, environment_kept, wait_until, why_not_here
from unified_cache import UnifiedCache
from unified_cache.errors import ClosedError, StorageError
from unified_cache.storage.backends.mooncake import MooncakeBackend
from unified_cache.storage.backends.mooncake_settings import client_environment
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.urls import StorageUrl

_MISSING = why_not_here()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

DEADLINE = 3.0
HIT = PageStatus.HIT
COUNT, SIZE = 8, 64 << 10
KEYS = [f"k{row}" for row in range(COUNT)]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """What the backend sets for its client goes again."""
    with environment_kept(DEADLINE):
        yield


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Master, Owner]]:
    """A master and an owner that no test breaks."""
    with Master() as master, Owner(master) as owner:
        yield master, owner


def opened(master: Master, owner: Owner) -> MooncakeBackend:
    """A backend over shared memory, with an empty store."""
    url = f"mooncake://{master.address}?force=1&metrics={master.metrics_port}&client={owner.address}"
    backend = MooncakeBackend.from_url(StorageUrl.parse(url), DEADLINE)
    wait_until(lambda: backend.stats()["capacity_bytes"] > 0, "the master has a segment")
    backend.clear()
    return backend


class Lent(Memory):
    """Memory for objects whose bodies lie where the client reaches them."""

    def __init__(self, backend: MooncakeBackend, count: int = COUNT, size: int = SIZE) -> None:
        super().__init__(count, size)
        memory = backend.host_memory(count * size)
        assert memory is not None
        self.bodies = np.frombuffer(memory, np.uint8).reshape(count, size)
        backend.register(memory)


def moved(backend: MooncakeBackend) -> tuple[int, int]:
    """How many bodies went straight so far, and how many were copied."""
    stats = backend.stats()
    return stats["direct_transfers"], stats["bounced_transfers"]


def all_hold(memory: Memory, count: int = COUNT) -> bool:
    """The memory has all of the objects."""
    return all(memory.holds(row, f"k{row}", memory.size) for row in range(count))


def mapped() -> int:
    """Bytes of memory of the client's kind in this process."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "mooncake_shm" in line:
            first, _, last = line.split()[0].partition("-")
            found += int(last, 16) - int(first, 16)
    return found


def test_bodies_in_it_go_straight(servers: tuple[Master, Owner]) -> None:
    backend = opened(*servers)
    memory, other = Lent(backend), Memory(COUNT, SIZE)
    assert backend.set(memory.fill(KEYS)) == [HIT] * COUNT
    memory.wipe()
    assert backend.get(memory.batch(KEYS)) == [HIT] * COUNT
    assert all_hold(memory)
    assert moved(backend) == (2 * COUNT, 0)
    backend.register(memoryview(other.bodies).cast("B"))
    assert backend.get(other.batch(KEYS)) == [HIT] * COUNT
    assert all_hold(other)
    assert moved(backend) == (2 * COUNT, COUNT)
    backend.close()


def test_bodies_of_two_pools_in_one_batch(servers: tuple[Master, Owner]) -> None:
    backend = opened(*servers)
    one, two = Lent(backend, 4), Lent(backend, 4)
    batches = [memory.fill(KEYS[at : at + 4]) for at, memory in ((0, one), (4, two))]
    assert [backend.set(batch) for batch in batches] == [[HIT] * 4] * 2
    whole = Memory(COUNT, SIZE)
    batch = whole.batch(KEYS)
    bodies = [memoryview(row) for memory in (one, two) for row in memory.bodies]
    for memory in (one, two):
        memory.wipe()
    batch.bodies[:] = bodies  # type: ignore[index]
    batch.body_addresses[:] = [row.ctypes.data for memory in (one, two) for row in memory.bodies]
    assert backend.get(batch) == [HIT] * COUNT
    assert moved(backend) == (2 * COUNT, 0)
    whole.bodies[:4], whole.bodies[4:] = one.bodies, two.bodies
    assert all_hold(whole)
    backend.close()


def test_objects_of_other_sizes(servers: tuple[Master, Owner]) -> None:
    backend = opened(*servers)
    memory, long = Lent(backend, 3, 4096), Memory(1, 8192)
    assert backend.set(memory.fill(["short", "empty"], [1000, 0])) == [HIT] * 2
    assert backend.set(long.fill(["long"])) == [HIT]
    memory.wipe()
    batch = memory.batch(["short", "long", "empty"])
    assert backend.get(batch) == [HIT, PageStatus.CORRUPT, HIT]
    assert memory.holds(0, "short", 1000)
    assert batch.stored_sizes.tolist()[::2] == [1000, 0]
    # Alone: all that is asked for is too long, and the client is not to blame.
    assert backend.get(memory.batch(["long"])) == [PageStatus.CORRUPT]
    assert backend.get(memory.batch(["empty"])) == [HIT]
    direct, copied = moved(backend)
    assert direct > 0
    assert copied == 1  # the set of what lies elsewhere
    backend.close()


def test_it_outlives_the_backend_and_serves_the_next_one(servers: tuple[Master, Owner]) -> None:
    before = mapped()
    backend = opened(*servers)
    memory = Lent(backend)
    assert backend.set(memory.fill(KEYS)) == [HIT] * COUNT
    backend.close()
    with pytest.raises(ClosedError):
        backend.host_memory(4096)
    memory.wipe()
    assert (memory.bodies == 0xEE).all()
    again = MooncakeBackend(backend._settings)
    again.register(memoryview(memory.bodies).cast("B"))
    assert again.get(memory.batch(KEYS)) == [HIT] * COUNT
    assert all_hold(memory)
    assert moved(again) == (COUNT, 0)
    # Whichever goes first: with the backend the views that it holds, with the last of all the memory.
    again.close()
    assert mapped() == before + COUNT * SIZE
    del memory
    gc.collect()
    assert mapped() == before


def test_a_child_process_leaves_it_alone(servers: tuple[Master, Owner]) -> None:
    backend = opened(*servers)
    memory = Lent(backend)
    child = os.fork()
    if child == 0:
        del memory
        gc.collect()
        os._exit(0 if mapped() > 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert backend.set(memory.fill(KEYS)) == [HIT] * COUNT
    backend.close()


def test_memory_that_can_not_be_had(servers: tuple[Master, Owner]) -> None:
    backend = opened(*servers)
    with pytest.raises(StorageError, match=f"{1 << 60} bytes of shared memory .*Cannot allocate memory"):
        backend.host_memory(1 << 60)
    backend.close()


def test_the_real_client_reaches_any(servers: tuple[Master, Owner]) -> None:
    master, _ = servers
    url = f"mooncake://{master.address}?metrics={master.metrics_port}"
    backend = MooncakeBackend.from_url(StorageUrl.parse(url), DEADLINE)
    assert backend.host_memory(4096) is None
    backend.close()


@pytest.mark.parametrize("pools", [1, 2])
def test_a_whole_cache(servers: tuple[Master, Owner], pools: int) -> None:
    master, owner = servers
    opened(master, owner).close()  # empties the store
    url = f"mooncake://{master.address}?force=1&metrics={master.metrics_port}&client={owner.address}"
    tokens = toks(12 * PAGE + 1)

    def cache() -> UnifiedCache:
        device = [make_pool(16, layers=2 + at) for at in range(pools)]
        return make_cache(device, storage=url, prefetch_threshold=PAGE)

    with cache() as first:
        assert all(pool.lent for pool in first.host_pools)
        serve(first, tokens)
        assert first.flush(30)
        first.reset()
        assert serve(first, tokens) == (0, 0, 12 * PAGE)  # every page is compared
        assert first._storage is not None
        backend = first._storage.guard.backend
        assert isinstance(backend, MooncakeBackend)
        assert moved(backend) == (2 * pools * 12, 0)
        assert first.detach_storage()
        assert serve(first, tokens) == (12 * PAGE, 0, 0)
        serve(first, toks(12 * PAGE + 1, 500))  # the first goes to host, which is the client's memory still
        assert_nothing_held(first)
        first.attach_storage(url)
        first.reset()
        assert serve(first, tokens) == (0, 0, 12 * PAGE)
        backend = first._storage.guard.backend
        assert isinstance(backend, MooncakeBackend)
        direct, copied = moved(backend)
        assert direct > 0
        assert copied == 0
    with cache() as second:
        assert serve(second, tokens) == (0, 0, 12 * PAGE)
        assert_nothing_held(second)


def test_a_cache_that_it_is_attached_to_later(servers: tuple[Master, Owner]) -> None:
    master, owner = servers
    opened(master, owner).close()
    url = f"mooncake://{master.address}?force=1&metrics={master.metrics_port}&client={owner.address}"
    tokens = toks(12 * PAGE + 1)
    with make_cache(16, prefetch_threshold=PAGE) as cache:
        assert not any(pool.lent for pool in cache.host_pools)
        cache.attach_storage(url)
        serve(cache, tokens)
        assert cache.flush(30)
        cache.reset()
        assert serve(cache, tokens) == (0, 0, 12 * PAGE)
        assert cache._storage is not None
        backend = cache._storage.guard.backend
        assert isinstance(backend, MooncakeBackend)
        assert moved(backend) == (0, 24)


# Faults


class Reader:
    """Reads the objects again and again until it is told to stop; each hit is compared."""

    def __init__(self, backend: MooncakeBackend, memory: Lent) -> None:
        self._backend, self._memory = backend, memory
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.hits = self.failed = self.wrong = 0
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._memory.wipe()
            try:
                statuses = self._backend.get(self._memory.batch(KEYS))
            except StorageError:
                self.failed += 1
                continue
            for row, status in enumerate(statuses):
                if status is HIT:
                    self.hits += 1
                    self.wrong += not self._memory.holds(row, KEYS[row], SIZE)

    def stop(self) -> None:
        """Once its call is over."""
        self._ending.set()
        self._thread.join()


def served(backend: MooncakeBackend, memory: Memory) -> Callable[[], bool]:
    """Objects are stored and read again."""

    def round_trip() -> bool:
        try:
            if backend.set(memory.fill(KEYS)) != [HIT] * COUNT:
                return False
            memory.wipe()
            return backend.get(memory.batch(KEYS)) == [HIT] * COUNT
        except StorageError:
            return False

    return round_trip


@pytest.mark.parametrize("away", ["a moment", "long enough to be missed"])
def test_a_client_that_is_killed_in_a_batch(away: str, caplog: pytest.LogCaptureFixture) -> None:
    environment = client_environment(DEADLINE)
    with Master("--client_ttl=2") as master, Owner(master, environment=environment) as owner:
        backend = opened(master, owner)
        memory, other = Lent(backend), Lent(backend)
        assert served(backend, memory)()
        reader = Reader(backend, other)
        wait_until(lambda: reader.hits > 100, "it reads")
        owner.kill()
        if away != "a moment":
            # Its own client looks for the owner once a second, and needs 4.3 s to know.
            end = time.monotonic() + 6
            wait_until(lambda: time.monotonic() > end, "it is missed")
        owner.start()
        hits = reader.hits
        wait_until(served(backend, memory), "objects are stored and read")
        assert all_hold(memory)
        wait_until(lambda: reader.hits > hits + 100, "the other one reads on")
        reader.stop()
        assert reader.failed > 0
        assert reader.wrong == 0
        before = moved(backend)
        assert served(backend, memory)()
        direct, copied = (now - then for now, then in zip(moved(backend), before, strict=True))
        # That it was away for a moment the package hears only by chance, and else does not tell it again.
        told = (2 * COUNT, 0)
        assert (direct, copied) in ([told, (0, 2 * COUNT)] if away == "a moment" else [told])
        said = caplog.text.count("can not be told of the host pool's memory")
        assert said == (1 if copied else 0)
        backend.close()


def test_a_client_that_hangs_writes_to_no_page_that_was_given_back() -> None:
    # The client waits for 30 seconds, whatever is set, and goes through with the read when it goes on.
    with Master("--client_ttl=300") as master, Owner(master) as owner:
        backend = opened(master, owner)
        memory, other = Lent(backend), Lent(backend)
        assert backend.set(memory.fill(KEYS)) == [HIT] * COUNT
        memory.wipe()
        answer: list[object] = []
        given_back: list[npt.NDArray[np.uint8]] = []

        def read() -> None:
            try:
                answer.append(backend.get(memory.batch(KEYS)))
            except StorageError as error:
                answer.append(error)
            memory.wipe()
            given_back.append(memory.bodies.copy())

        owner.freeze()
        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: backend._suspect, "the client gives up", 40)
        reader.join(0.5)
        assert reader.is_alive(), "it can still write there"
        with pytest.raises(StorageError, match="was lost and is looked for"):
            backend.exists([KEYS])
        owner.thaw()
        reader.join(30)
        assert isinstance(answer[0], StorageError)
        # Whatever it does with what it was sent before: by now it has served what came later.
        wait_until(served(backend, other), "objects are stored and read")
        assert all_hold(other)
        assert (memory.bodies == 0xEE).all()
        assert (given_back[0] == 0xEE).all()
        assert backend.get(memory.batch(KEYS)) == [HIT] * COUNT
        assert all_hold(memory)
        assert moved(backend)[1] == 0, "it was told of the memory again"
        backend.close()


def test_an_owner_behind_the_client_that_hangs_writes_to_no_page_afterwards() -> None:
    environment = client_environment(DEADLINE)
    with Master("--client_ttl=300") as master, Owner(master) as far:
        url = f"mooncake://{master.address}?force=1&metrics={master.metrics_port}"
        real = MooncakeBackend.from_url(StorageUrl.parse(url), DEADLINE)
        wait_until(lambda: real.stats()["capacity_bytes"] > 0, "the master has a segment")
        memory, other = Memory(COUNT, SIZE), Memory(COUNT, SIZE)
        assert real.set(memory.fill(KEYS)) == [HIT] * COUNT  # they lie with the only owner that there is
        real.close()
        with Owner(master, environment=environment) as near:
            url = f"{url}&client={near.address}"
            backend = MooncakeBackend.from_url(StorageUrl.parse(url), DEADLINE)
            lent = Lent(backend)
            assert backend.get(lent.batch(KEYS)) == [HIT] * COUNT
            lent.wipe()
            far.freeze()
            statuses = backend.get(lent.batch(KEYS))
            assert set(statuses) <= {PageStatus.TIMEOUT, PageStatus.ERROR}
            lent.wipe()
            far.thaw()
            wait_until(lambda: backend.get(other.batch(KEYS)) == [HIT] * COUNT, "the owner answers")
            assert all_hold(other)
            assert (lent.bodies == 0xEE).all()
            direct, copied = moved(backend)
            assert backend.get(lent.batch(KEYS)) == [HIT] * COUNT
            assert all_hold(lent)
            assert moved(backend) == (direct + COUNT, copied)
            backend.close()


def test_a_client_that_hangs_and_is_killed() -> None:
    with Master("--client_ttl=2") as master, Owner(master) as owner:
        backend = opened(master, owner)
        memory = Lent(backend)
        assert backend.set(memory.fill(KEYS)) == [HIT] * COUNT
        owner.freeze()
        answer: list[object] = []

        def read() -> None:
            try:
                answer.append(backend.get(memory.batch(KEYS)))
            except StorageError as error:
                answer.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: backend._calls == 1, "it is in the call")
        owner.kill()
        reader.join(10)
        assert isinstance(answer[0], StorageError)
        owner.start()  # the client takes long to close without
        wait_until(served(backend, memory), "objects are stored and read")
        backend.close()


def test_a_client_that_hangs_holds_no_process_up() -> None:
    script = """
        import sys, threading
        from tests.storage.test_mooncake_lent import DEADLINE, KEYS, Lent, MooncakeBackend, StorageUrl

        backend = MooncakeBackend.from_url(StorageUrl.parse(sys.argv[1]), DEADLINE)
        memory = Lent(backend)
        print("open", flush=True)
        sys.stdin.readline()
        threading.Thread(target=backend.get, args=(memory.batch(KEYS),), daemon=True).start()
        while not backend._calls:
            pass
        sys.exit(3)
        """
    with Master() as master, Owner(master) as owner:
        url = f"mooncake://{master.address}?client={owner.address}"
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), url],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"
            owner.freeze()
            started = time.monotonic()
            process.stdin.close()
            # Left to the client it is 30 seconds, or an abort.
            assert process.wait(60) == 3
            assert time.monotonic() - started < 15
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
