"""The Mooncake backend against real mooncake_master and mooncake_client processes on loopback."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.storage.lateness import Lateness
from tests.storage.mooncake_objects import HEADER, Call, Caller, Memory, content
from tests.storage.mooncake_server import Master, Owner, environment_kept, free_port, wait_until, why_not_here
from tests.storage.support import BYTES, Pages, keys
from unified_cache.errors import ClosedError, StorageError
from unified_cache.storage.backends.mooncake import _DOUBT_SECONDS, MooncakeBackend
from unified_cache.storage.backends.mooncake_settings import client_environment
from unified_cache.storage.breaker import Breaker
from unified_cache.storage.contract import ObjectBatch, PageStatus
from unified_cache.storage.guard import GRACE, StorageCounts, StorageGuard
from unified_cache.storage.page_format import HEADER_BYTES
from unified_cache.storage.urls import StorageUrl

_MISSING = why_not_here()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

DEADLINE = 3.0
LIMIT = DEADLINE * GRACE
HIT, MISS, FULL = PageStatus.HIT, PageStatus.MISS, PageStatus.FULL


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """What the backend sets for its client goes again."""
    with environment_kept(DEADLINE):
        yield


@pytest.fixture(scope="module")
def lateness() -> Iterator[Lateness]:
    """Of this machine, for limits that are exact where it has nothing else to do."""
    with Lateness() as lateness:
        yield lateness


def in_time(started: float, lateness: Lateness, limit: float = LIMIT) -> None:
    """No more than the limit has passed since then."""
    seconds, allowance = time.monotonic() - started, lateness.allowance(started)
    assert seconds <= limit + allowance, (seconds, limit, allowance)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Master, Owner]]:
    """A master and an owner that no test breaks."""
    with Master() as master, Owner(master) as owner:
        yield master, owner


def url(master: Master, **options: object) -> str:
    """Of a master here; `force` and `metrics` unless it is said otherwise."""
    every = {"force": 1, "metrics": master.metrics_port} | options
    return f"mooncake://{master.address}?" + "&".join(f"{name}={value}" for name, value in every.items())


def opened(master: Master, deadline: float = DEADLINE, **options: object) -> MooncakeBackend:
    """A backend of this master, which has a segment by then."""
    backend = MooncakeBackend.from_url(StorageUrl.parse(url(master, **options)), deadline)
    wait_until(lambda: backend.stats()["capacity_bytes"] > 0, "the master has a segment")
    return backend


@pytest.fixture(params=["real", "shared memory"])
def backend(request: pytest.FixtureRequest, servers: tuple[Master, Owner]) -> Iterator[MooncakeBackend]:
    """Both kinds of client, with an empty store."""
    master, owner = servers
    options = {} if request.param == "real" else {"client": owner.address, "bounce": "3MiB"}
    found = opened(master, **options)
    found.clear()
    yield found
    found.close()


def peer(*arguments: object) -> subprocess.Popen[str]:
    """Another process that sets or gets; see `mooncake_objects.main`."""
    script = Path(__file__).with_name("mooncake_objects.py")
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> list[str]:
    """The statuses that it printed."""
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return text.split()


# Objects


def test_what_is_set_is_read_again_byte_for_byte(backend: MooncakeBackend) -> None:
    size = 96 << 10
    memory = Memory(40, size)
    backend.register(memoryview(memory.bodies).cast("B"))
    stored: dict[str, int] = {}
    numbers = random.Random(4)
    for _ in range(25):
        keys = [f"k{number}" for number in numbers.sample(range(200), numbers.randint(1, 40))]
        if numbers.random() < 0.5:
            sizes = [size if numbers.random() < 0.7 else numbers.randrange(size) for _ in keys]
            assert backend.set(memory.fill(keys, sizes)) == [HIT] * len(keys)
            for key, count in zip(keys, sizes, strict=True):
                stored.setdefault(key, count)
        else:
            memory.wipe()
            batch = memory.batch(keys)
            assert backend.get(batch) == [HIT if key in stored else MISS for key in keys]
            for row, key in enumerate(keys):
                if key in stored:
                    assert batch.stored_sizes[row] == stored[key]
                    assert memory.holds(row, key, stored[key])
        expected = next((row for row, key in enumerate(keys) if key not in stored), len(keys))
        assert backend.exists([keys, [], ["never", *keys]]) == [expected, 0, 0]
    assert sorted(backend.keys()) == sorted(stored)
    assert backend.stats()["objects"] == len(stored)
    gone = list(stored)[:5]
    assert backend.delete([*gone, "never"]) == 5
    assert backend.exists([[key] for key in gone]) == [0] * 5
    backend.clear()
    assert backend.stats()["objects"] == 0
    assert list(backend.keys()) == []


def test_an_object_that_is_there_stays_as_it_is(backend: MooncakeBackend) -> None:
    memory = Memory(4, 4096)
    keys = ["a", "b", "c", "d"]
    assert backend.set(memory.fill(keys[:2], writer=1)) == [HIT] * 2
    assert backend.set(memory.fill(keys, writer=2)) == [HIT] * 4
    memory.wipe()
    assert backend.get(memory.batch(keys)) == [HIT] * 4
    assert [memory.holds(row, keys[row], 4096, writer=1 + row // 2) for row in range(4)] == [True] * 4


def test_objects_of_a_wrong_size_are_no_hits(backend: MooncakeBackend) -> None:
    big, small = Memory(3, 4096), Memory(3, 1024)
    assert backend.set(big.fill(["long", "fits"], [4096, 1024])) == [HIT] * 2
    # An object that is shorter than a header, as another program might have left it.
    scrap = np.ones(HEADER // 2, np.uint8)
    assert backend._store.put("scrap", scrap.tobytes()) == 0
    batch = small.batch(["long", "fits", "scrap"])
    assert backend.get(batch) == [PageStatus.CORRUPT, HIT, PageStatus.CORRUPT]
    assert small.holds(1, "fits", 1024)


def test_bodies_that_do_not_fit_into_the_bounce_are_refused(servers: tuple[Master, Owner]) -> None:
    master, owner = servers
    backend = opened(master, client=owner.address, bounce="64KiB")
    memory = Memory(1, 1 << 16)
    with pytest.raises(StorageError, match="bounce=65536"):
        backend.set(memory.fill(["a"]))
    backend.close()


def test_calls_without_objects(backend: MooncakeBackend) -> None:
    memory = Memory(1, 16)
    assert backend.set(memory.fill([])) == []
    assert backend.get(memory.batch([])) == []
    assert backend.exists([]) == []
    assert backend.exists([[], []]) == [0, 0]
    assert backend.delete([]) == 0
    backend.register(memoryview(b""))


def test_bodies_of_no_bytes(backend: MooncakeBackend) -> None:
    memory = Memory(3, 16)
    names = ["a", "b", "c"]
    assert backend.set(memory.fill(names, [0, 0, 0])) == [HIT] * 3
    memory.wipe()
    assert backend.get(memory.batch(names, [0, 0, 0])) == [HIT] * 3
    assert all(memory.holds(row, key, 0) for row, key in enumerate(names))
    assert (memory.bodies == 0xEE).all()


def test_another_process_reads_what_this_one_wrote(servers: tuple[Master, Owner]) -> None:
    master, _ = servers
    backend = opened(master)
    backend.clear()
    memory = Memory(32, 128 << 10)
    mine = [f"mine-{row}" for row in range(32)]
    theirs = [f"theirs-{row}" for row in range(32)]
    assert backend.set(memory.fill(mine, writer=1)) == [HIT] * 32
    reader = peer(url(master), "get", memory.size, 1, *mine, "never")
    writer = peer(url(master), "set", memory.size, 2, *theirs)
    assert said(reader) == ["hit"] * 32 + ["miss"]
    assert said(writer) == ["hit"] * 32
    memory.wipe()
    assert backend.get(memory.batch(theirs)) == [HIT] * 32
    assert all(memory.holds(row, key, memory.size, writer=2) for row, key in enumerate(theirs))
    backend.close()


def test_of_two_writers_of_a_key_the_first_wins_and_nothing_is_mixed(servers: tuple[Master, Owner]) -> None:
    master, _ = servers
    backends = [opened(master), opened(master)]
    backends[0].clear()
    memories = [Memory(16, 256 << 10) for _ in backends]
    for turn in range(6):
        keys = [f"{turn}-{row}" for row in range(16)]
        batches = [memory.fill(keys, writer=number) for number, memory in enumerate(memories)]
        statuses: list[list[PageStatus]] = [[], []]
        start = threading.Barrier(2)

        def write(number: int, *, start=start, statuses=statuses, batches=batches) -> None:
            start.wait()
            statuses[number] = backends[number].set(batches[number])

        threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [[HIT] * 16] * 2
        memories[0].wipe()
        assert backends[1].get(memories[0].batch(keys)) == [HIT] * 16
        for row, key in enumerate(keys):
            assert any(memories[0].holds(row, key, 256 << 10, writer) for writer in range(2))
    for backend in backends:
        backend.close()


def test_without_force_objects_in_use_stay_for_the_lease(servers: tuple[Master, Owner]) -> None:
    master, _ = servers
    backend = opened(master, force=0)
    backend.clear()
    memory = Memory(2, 4096)
    backend.set(memory.fill(["a", "b"]))
    assert backend.exists([["a", "b"]]) == [2]
    assert backend.delete(["a", "b", "never"]) == 0
    assert backend.exists([["a", "b"]]) == [2]
    backend.clear()
    assert backend.exists([["a", "b"]]) == [0]
    backend.close()


def test_a_segment_of_this_process_goes_with_it() -> None:
    with Master() as master:
        owner = opened(master, segment="64MiB")
        other = opened(master)
        memory = Memory(4, 64 << 10)
        keys = ["a", "b", "c", "d"]
        assert other.set(memory.fill(keys)) == [HIT] * 4
        memory.wipe()
        assert owner.get(memory.batch(keys)) == [HIT] * 4
        assert all(memory.holds(row, key, memory.size) for row, key in enumerate(keys))
        owner.close()
        assert other.get(memory.batch(keys)) == [MISS] * 4
        assert other.set(memory.fill(["e"])) == [FULL]
        other.close()


def test_a_full_segment_drops_writes_and_loses_nothing_else(lateness: Lateness) -> None:
    with Master() as master, Owner(master, megabytes=48) as _:
        backend = opened(master)
        memory = Memory(16, 1 << 20)
        kept = []
        seen: set[PageStatus] = set()
        for turn in range(10):
            keys = [f"{turn}-{row}" for row in range(16)]
            started = time.monotonic()
            statuses = backend.set(memory.fill(keys))
            in_time(started, lateness)
            seen |= set(statuses)
            kept += [key for key, status in zip(keys, statuses, strict=True) if status is HIT]
        assert seen == {HIT, FULL}
        hits = 0
        for start in range(0, len(kept), 16):
            keys = kept[start : start + 16]
            memory.wipe()
            for row, status in enumerate(backend.get(memory.batch(keys))):
                assert status in (HIT, MISS)
                if status is HIT:
                    assert memory.holds(row, keys[row], memory.size)
                    hits += 1
        assert hits > 0
        backend.clear()
        wait_until(lambda: backend.set(memory.fill(["again"])) == [HIT], "there is room again")
        backend.close()


# Faults


def check(calls: list[Call], lateness: Lateness, limit: float = LIMIT) -> None:
    """None of the calls took longer than it may."""
    late = [call for call in calls if call.seconds > limit + lateness.allowance(call.started)]
    assert not late, late


def failing(count: int) -> Callable[[list[Call]], bool]:
    """So many calls have failed."""
    return lambda calls: sum(call.failed for call in calls) >= count


@pytest.mark.parametrize("fault", ["master killed", "master frozen", "owner killed", "owner frozen"])
def test_faults_are_misses_within_the_deadline_and_pass_by_themselves(fault: str, lateness: Lateness) -> None:
    who, what = fault.split()
    with ExitStack() as stack:
        master = stack.enter_context(Master("--client_ttl=3"))
        owner = stack.enter_context(Owner(master))
        backend = opened(master)
        callers = [Caller(backend, name) for name in ("one", "two")]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.works()
        victim = master if who == "master" else owner
        if what == "killed":
            victim.kill()
        else:
            victim.freeze()
        for caller in callers:
            caller.wait_for(f"calls fail with the {fault}", failing(1), 30)
        if what == "killed":
            victim.start()
        else:
            victim.thaw()
        for caller in callers:
            caller.works()
        for caller in callers:
            caller.stop()
        # A call that is under way when the master dies takes the client 4.3 s, which nothing shortens.
        for caller in callers:
            check(caller.calls, lateness, 2 * 4.6 if fault == "master killed" else LIMIT)
        backend.close()


def test_a_master_that_comes_back_has_forgotten_everything(lateness: Lateness) -> None:
    with Master() as master, Owner(master) as _:
        backend = opened(master)
        memory = Memory(8, 64 << 10)
        keys = [f"k{row}" for row in range(8)]
        assert backend.set(memory.fill(keys)) == [HIT] * 8
        master.kill()
        with pytest.raises(StorageError, match="answered -900"):
            backend.exists([keys])
        started = time.monotonic()
        for call in (lambda: backend.exists([keys]), lambda: backend.get(memory.batch(keys))):
            with pytest.raises(StorageError, match="can not be reached"):
                call()
        in_time(started, lateness)
        master.start()
        assert backend.get(memory.batch(keys)) == [MISS] * 8
        wait_until(lambda: backend.set(memory.fill(keys)) == [HIT] * 8, "the owner is back")
        memory.wipe()
        assert backend.get(memory.batch(keys)) == [HIT] * 8
        assert all(memory.holds(row, key, memory.size) for row, key in enumerate(keys))
        backend.close()


def test_a_write_whose_answer_was_lost_is_not_believed_later() -> None:
    with Master("--put_start_discard_timeout_sec=2") as master, Owner(master) as _:
        backend = opened(master)
        memory = Memory(2, 64 << 10)
        keys = ["a", "b"]
        master.freeze()
        with pytest.raises(StorageError, match="answered -901"):
            backend.set(memory.fill(keys))
        master.thaw()
        being_written = -703
        wait_until(lambda: backend._store.get_size("a") == being_written, "the master hears of it")
        # It waits for the end of that write; the client's own put answers 0.
        assert backend.set(memory.fill(keys)) == [FULL] * 2
        assert backend.get(memory.batch(keys)) == [MISS] * 2
        wait_until(lambda: backend.set(memory.fill(keys)) == [HIT] * 2, "it can be written again")
        memory.wipe()
        assert backend.get(memory.batch(keys)) == [HIT] * 2
        assert all(memory.holds(row, key, memory.size) for row, key in enumerate(keys))
        backend.close()


class Asked:
    """A client that counts how often it is asked what exists, and answers a write once as it is told."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked = 0
        self.answer: list[int] = []
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Counted."""
        self.asked += 1
        return list(self._store.batch_is_exist(keys))

    def batch_put_from_multi_buffers(self, *arguments: Any) -> list[int]:
        """What it is told to answer, once."""
        if self.fails:
            self.fails = False
            raise RuntimeError("as a client may")
        codes = list(self._store.batch_put_from_multi_buffers(*arguments))
        codes, self.answer = self.answer or codes, []
        return codes


def test_what_was_written_is_asked_for_while_a_write_may_hang(backend: MooncakeBackend) -> None:
    memory = Memory(3, 64 << 10)
    number = 0

    def asked(*answer: int) -> int:
        nonlocal number
        number += 1
        before, store.answer = store.asked, list(answer)
        backend.set(memory.fill([f"k{number}-{row}" for row in range(3)]))
        return store.asked - before

    assert _DOUBT_SECONDS > 30  # so long the master keeps a write that hangs
    backend._store = store = Asked(backend._store)
    try:
        assert asked() == 1  # whoever was here before may have died in a write
        backend._doubted -= 2 * _DOUBT_SECONDS
        assert asked() == 0
        no_room, transfer_failed = -200, -800
        assert asked(0, no_room, 0) == 0
        assert asked(0, transfer_failed, 0) == 1
        assert asked() == 1
        backend._doubted -= 2 * _DOUBT_SECONDS
        assert asked() == 0
        # Fewer answers than objects, or none, say nothing of any.
        with pytest.raises(ValueError, match="shorter"):
            asked(0)
        assert asked() == 0
        store.fails = True
        with pytest.raises(RuntimeError):
            asked()
        assert asked() == 1
        backend._doubted -= 2 * _DOUBT_SECONDS
        if not backend._settings.client:  # it would get a new client
            backend._lose()
            assert asked() == 1
    finally:
        backend._store = store._store


def test_flipped_bits_are_never_data(backend: MooncakeBackend) -> None:
    """As tests/storage/test_bit_flips.py has it for the stores of one machine, of 10,000 pages."""
    count, body, rounds = 250, 2048, 40
    counts = StorageCounts()
    guard = StorageGuard(backend, object_bytes=body, deadline=60, clock=lambda: 0.0, counts=counts)
    rng = np.random.default_rng(7)
    pages, read = rng.integers(0, 256, (2, count, body), np.uint8)
    names = keys(count)

    def objects(
        headers: npt.NDArray[np.uint8], bodies: npt.NDArray[np.uint8], rows: list[int]
    ) -> ObjectBatch:
        own, some = headers[rows], bodies[rows]
        places = (some.ctypes.data + np.arange(len(rows)) * body).astype(np.uint64)
        sizes = np.full(len(rows), body, np.uint64)
        views = [memoryview(row) for row in some]
        return ObjectBatch(
            [names[row] for row in rows], own, views, places, sizes, np.zeros(len(rows), np.uint64)
        )

    def call(what: str, rows: npt.NDArray[np.uint8]) -> list[PageStatus]:
        places = (rows.ctypes.data + np.arange(count) * body).astype(np.uint64)
        return getattr(guard, what)(names, [row.data for row in rows], places)  # type: ignore[no-any-return]

    assert call("set", pages) == [HIT] * count
    stored = objects(np.zeros((count, HEADER_BYTES), np.uint8), pages, list(range(count)))
    assert backend.get(stored) == [HIT] * count
    for _ in range(rounds):
        rows = np.flatnonzero(rng.random(count) < 0.5).tolist()
        headers, bodies = stored.headers.copy(), pages.copy()
        for row, bit in zip(
            rows, rng.integers(0, 8 * (HEADER_BYTES + body), len(rows)).tolist(), strict=True
        ):
            place, mask = bit >> 3, 1 << (bit & 7)
            if place < HEADER_BYTES:
                headers[row, place] ^= mask
            else:
                bodies[row, place - HEADER_BYTES] ^= mask
        assert backend.delete([names[row] for row in rows]) == len(rows)
        assert backend.set(objects(headers, bodies, rows)) == [HIT] * len(rows)
        read[:] = 0xEE
        statuses = call("get", read)
        whole = sorted(set(range(count)) - set(rows))
        assert all(statuses[row] is HIT for row in whole)
        assert np.array_equal(read[whole], pages[whole])
        # Damaged ones are out of the way, and can be written again.
        assert {statuses[row] for row in rows} <= {PageStatus.CORRUPT, MISS}
        gone = [row for row in rows if statuses[row] is PageStatus.CORRUPT]
        assert backend.exists([[names[row]] for row in gone]) == [0] * len(gone)
        backend.delete([names[row] for row in rows if row not in gone])
        assert backend.set(objects(stored.headers, pages, rows)) == [HIT] * len(rows)
    assert counts.as_dict()["storage_get_corrupt"] > 0.45 * 0.9 * rounds * count
    assert call("get", read) == [HIT] * count
    assert np.array_equal(read, pages)


@pytest.mark.parametrize("deadline", [0.5, 1.0, 2.0])
def test_short_deadlines(servers: tuple[Master, Owner], deadline: float) -> None:
    """An owner that hangs takes longer than these: no reason to make no call at all."""
    backend = opened(servers[0], deadline)
    memory = Memory(40, 64 << 10)  # more than one native call
    keys = [f"short-{deadline}-{row}" for row in range(40)]
    assert backend.set(memory.fill(keys)) == [HIT] * 40
    memory.wipe()
    assert backend.get(memory.batch(keys)) == [HIT] * 40
    assert all(memory.holds(row, key, memory.size) for row, key in enumerate(keys))
    backend.close()


def test_whoever_waits_is_told_at_the_deadline_and_a_fifth() -> None:
    # The guard's view, by its own clock: it has no tolerance, however late the calls are.
    with Master() as master, Owner(master) as owner:
        counts = StorageCounts()
        backend = opened(master)
        guard = StorageGuard(
            backend, object_bytes=BYTES, deadline=0.5, clock=time.monotonic, counts=counts, breaker=Patient()
        )
        stored, read = Pages(32), Pages(32, fill=0)
        guard.register(memoryview(stored.data).cast("B"))
        assert guard.set(keys(32), stored.views, stored.addresses) == [HIT] * 32
        owner.freeze()
        answers: dict[int, list[PageStatus]] = {}

        def get(number: int) -> None:
            answers[number] = guard.get(keys(32), read.views, read.addresses, number)

        threads = [threading.Thread(target=get, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        told: list[object] = []
        end = time.monotonic() + 30
        while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
            now = time.monotonic()
            late = {call.owner for call in list(guard._running) if call.started < now - 0.5 * GRACE}
            told += guard.watch()
            assert late & {call.owner for call in list(guard._running)} <= set(told)
            time.sleep(0.002)
        for thread in threads:
            thread.join()
        owner.thaw()
        # With this deadline the client takes longer to give up: nothing of it is a hit for anybody.
        assert set(told) <= {0, 1, 2}
        assert len(told) == len(set(told)) > 0
        assert not any(HIT in statuses for statuses in answers.values())
        assert counts.as_dict()["storage_late_calls"] == 3
        guard.close()


class Patient(Breaker):
    """Never open."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)

    def failed(self, *, timeout: bool = False) -> None:
        pass


def test_nothing_is_written_to_memory_after_a_read_has_timed_out(lateness: Lateness) -> None:
    with Master() as master, Owner(master) as owner:
        backend = opened(master)
        memory, other = Memory(32, 64 << 10), Memory(8, 64 << 10)
        keys = [f"k{row}" for row in range(32)]
        assert backend.set(memory.fill(keys)) == [HIT] * 32
        owner.freeze()
        started = time.monotonic()
        statuses = backend.get(memory.batch(keys))
        in_time(started, lateness)
        assert set(statuses) == {PageStatus.TIMEOUT}
        memory.wipe()
        owner.thaw()
        wait_until(lambda: backend.get(other.batch(keys[:8])) == [HIT] * 8, "the owner answers")
        assert all(other.holds(row, key, other.size) for row, key in enumerate(keys[:8]))
        assert (memory.bodies == 0xEE).all()
        assert (memory.headers == 0xEE).all()
        backend.close()


def test_a_client_over_shared_memory_is_found_again(lateness: Lateness) -> None:
    environment = client_environment(DEADLINE)
    with Master("--client_ttl=2") as master, Owner(master, environment=environment) as owner:
        backend = opened(master, client=owner.address)
        memory = Memory(8, 64 << 10)
        keys = [f"k{row}" for row in range(8)]

        def round_trip() -> bool:
            # What the owner had before it died can neither be read nor written until the master drops it.
            try:
                if backend.set(memory.fill(keys)) != [HIT] * 8:
                    return False
                memory.wipe()
                return backend.get(memory.batch(keys)) == [HIT] * 8
            except StorageError:
                return False

        def works() -> None:
            wait_until(round_trip, "objects are stored and read")
            assert all(memory.holds(row, key, memory.size) for row, key in enumerate(keys))

        works()
        calls: list[Callable[[], object]] = [
            lambda: backend.exists([keys]),
            lambda: backend.get(memory.batch(keys)),
            lambda: backend.set(memory.fill(keys)),
            lambda: backend.delete(keys),
        ]

        def refused(message: str) -> None:
            for call in calls:
                started = time.monotonic()
                with pytest.raises(StorageError, match=message):
                    call()
                in_time(started, lateness)

        owner.kill()
        refused("no connection|can not be reached")
        owner.start()
        works()
        master.freeze()
        refused("no connection")
        master.thaw()
        works()
        backend.close()


# Opening and closing


@pytest.mark.parametrize(
    "given, message",
    [
        ("mooncake://", "write mooncake://master"),
        ("mooncake://127.0.0.1/x", "no path"),
        ("mooncake://127.0.0.1?colour=red", "no option 'colour'"),
        ("mooncake://127.0.0.1?protocol=udp", "one of tcp, rdma, not 'udp'"),
        ("mooncake://127.0.0.1?client=here", "option client must be host:port, not 'here'"),
        ("mooncake://127.0.0.1?client=a:1&segment=1GB", "exclude each other"),
        ("mooncake://127.0.0.1?metrics=70000", "0..65535, not '70000'"),
    ],
)
def test_wrong_urls_are_refused(given: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        MooncakeBackend.from_url(StorageUrl.parse(given), DEADLINE)


def test_nobody_there(lateness: Lateness) -> None:
    port = free_port()
    started = time.monotonic()
    with pytest.raises(StorageError, match=f"master 127.0.0.1:{port} can not be reached"):
        MooncakeBackend.from_url(StorageUrl.parse(f"mooncake://127.0.0.1:{port}"), DEADLINE)
    with pytest.raises(StorageError, match=f"client 127.0.0.1:{port} can not be reached"):
        MooncakeBackend.from_url(
            StorageUrl.parse(f"mooncake://127.0.0.1:1?client=127.0.0.1:{port}"), DEADLINE
        )
    in_time(started, lateness)


def test_a_master_that_hangs_while_it_is_attached() -> None:
    with Master() as master:
        master.freeze()
        started = time.monotonic()
        with pytest.raises(StorageError, match="answered -"):
            MooncakeBackend.from_url(StorageUrl.parse(url(master)), DEADLINE)
        assert time.monotonic() - started < 2 * DEADLINE
        master.thaw()
        MooncakeBackend.from_url(StorageUrl.parse(url(master)), DEADLINE).close()


def test_without_the_http_port_there_are_no_keys_and_no_numbers(servers: tuple[Master, Owner]) -> None:
    master, owner = servers
    for port, message in ((0, "add metrics="), (owner.port, "set metrics="), (free_port(), "set metrics=")):
        backend = MooncakeBackend.from_url(StorageUrl.parse(url(master, metrics=port)), DEADLINE)
        with pytest.raises(StorageError, match=message):
            backend.keys()
        with pytest.raises(StorageError, match=message):
            backend.stats()
        backend.close()


def test_a_setting_of_the_environment_that_is_no_number(
    servers: tuple[Master, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "soon")
    with pytest.raises(
        StorageError, match="MC_RPC_TIMEOUT_MS='soon' is set in the environment: it must be a"
    ):
        opened(servers[0])


def test_what_the_environment_says_stays(
    servers: tuple[Master, Owner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "700")
    MooncakeBackend.from_url(StorageUrl.parse(url(servers[0])), DEADLINE).close()
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "700"
    assert "MC_RPC_TIMEOUT_MS=700 is set in the environment" in caplog.text


def test_after_its_end_every_call_is_refused(backend: MooncakeBackend) -> None:
    memory = Memory(1, 16)
    batch = memory.fill(["a"])
    backend.close()
    backend.close()
    calls: list[Callable[[], object]] = [
        lambda: backend.set(batch),
        lambda: backend.get(batch),
        lambda: backend.exists([["a"]]),
        lambda: backend.exists([]),
        lambda: backend.delete(["a"]),
        lambda: backend.delete([]),
        lambda: backend.keys(),
        lambda: backend.stats(),
        lambda: backend.clear(),
        lambda: backend.register(memoryview(bytearray(16))),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_close_waits_for_calls_that_run() -> None:
    with Master() as master, Owner(master) as _:
        backend = opened(master)
        caller = Caller(backend, "caller")
        caller.start()
        caller.works()
        master.freeze()
        caller.wait_for("calls fail", failing(1), 30)
        backend.close()
        # The caller meets the end in the middle of its work; a client used after its close would kill us all.
        with pytest.raises(ClosedError):
            caller.stop()
        assert caller.wrong == 0


def test_a_master_that_hangs_holds_no_close_up() -> None:
    # Closed by the client itself, with a segment, that would be 5 seconds or more in which no thread runs.
    with Master("--client_ttl=60") as master, Owner(master) as _:
        backend = opened(master, segment="64MiB")
        memory = np.zeros(4096, np.uint8)
        backend.register(memoryview(memory))
        other = opened(master, force=1)
        capacity = other.stats()["capacity_bytes"]
        master.freeze()
        started = time.monotonic()
        backend.close()
        backend.close()
        assert time.monotonic() - started < 5
        for call in (backend.stats, lambda: backend.exists([["a"]])):
            with pytest.raises(ClosedError):
                call()
        assert backend._phase == "asking"
        master.thaw()
        wait_until(lambda: backend._phase == "gone", "the rest is done when it answers")
        assert other.stats()["capacity_bytes"] == capacity - (64 << 20)
        other.close()


@pytest.mark.parametrize("how", ["closed", "left open", "in a call"])
def test_a_master_that_hangs_holds_no_process_up(how: str) -> None:
    script = """
        import sys, threading
        from unified_cache.storage.backends.mooncake import MooncakeBackend
        from unified_cache.storage.urls import StorageUrl

        backend = MooncakeBackend.from_url(StorageUrl.parse(sys.argv[1]), 5.0)
        print("open", flush=True)
        sys.stdin.readline()
        if sys.argv[2] == "closed":
            backend.close()
        if sys.argv[2] == "in a call":
            thread = threading.Thread(target=backend.exists, args=([["a"]],), daemon=True)
            thread.start()
            while not backend._calls:
                pass
        sys.exit(3)
        """
    with Master() as master:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), url(master, segment="64MiB"), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"
            master.freeze()
            started = time.monotonic()
            process.stdin.close()
            # Left to the client it is 7 seconds, or an abort.
            assert process.wait(30) == 3
            assert time.monotonic() - started < 5
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def test_threads_and_descriptors_go_with_the_backend(servers: tuple[Master, Owner]) -> None:
    master, owner = servers

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def use(**options: object) -> tuple[int, int]:
        backend = opened(master, **options)
        memory = Memory(4, 64 << 10)
        backend.set(memory.fill(["a", "b", "c", "d"]))
        backend.get(memory.batch(["a", "b", "c", "d"]))
        backend.close()
        return held()

    # The client has threads and descriptors of the process, which it makes at its first use.
    for options in ({}, {"client": owner.address}):
        before = [use(**options) for _ in range(2)][-1]
        for _ in range(3):
            use(**options)
        # A thread that was joined is gone from the system a moment later.
        wait_until(lambda: held() <= before, f"{before} descriptors and threads")  # noqa: B023


def test_the_content_of_the_tests_tells_objects_apart() -> None:
    whole = content("a", 100)
    assert len(whole) == HEADER + 100
    assert not (whole == content("b", 100)).all()
    assert not (whole == content("a", 100, writer=1)).all()
