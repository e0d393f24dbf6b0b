"""Pages that outlive the process: written after the host ack, found and read again, never wrong."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    Clock,
    LateCopies,
    MemoryStore,
    assert_nothing_held,
    assert_served,
    compute,
    make_cache,
    serve,
    toks,
    with_manual_threads,
)
from unified_cache import Request, UnifiedCache

LONG = 12 * PAGE + 1


def stored(storage: Any, pages: int = 32, **settings: Any) -> UnifiedCache:
    if isinstance(storage, Path):
        storage = str(storage)
    return make_cache(pages, storage=storage, **({"prefetch_threshold": PAGE} | settings))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??/??/*"))


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_restart(tmp_path: Path, policy: str) -> None:
    with stored(tmp_path, 16, write_policy=policy) as cache:
        serve(cache, toks(LONG))
        serve(cache, toks(LONG, 500), extra_key="lora")  # under write_back this is what copies the first
    with stored(tmp_path, 16, write_policy=policy) as cache:
        assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
        assert serve(cache, toks(LONG)) == (12 * PAGE, 0, 0)
        assert serve(cache, toks(LONG, 500)) == (0, 0, 0)
        stats = cache.stats()
        assert stats["storage_read_pages"] == stats["storage_found_pages"] == 12
        assert stats["hit_tokens_storage"] == 12 * PAGE
        assert_nothing_held(cache)


def test_a_reset_leaves_storage(tmp_path: Path) -> None:
    with stored(tmp_path) as cache:
        serve(cache, toks(LONG))
        assert cache.flush(30)
        cache.reset()
        assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
        assert_nothing_held(cache)


def test_storage_continues_what_is_on_device_and_host(tmp_path: Path) -> None:
    with stored(tmp_path, 16) as cache:
        serve(cache, toks(LONG))
    with stored(tmp_path, 16) as cache:
        serve(cache, toks(4 * PAGE + 1))  # itself from storage
        assert cache.flush(30)
        assert serve(cache, toks(LONG)) == (4 * PAGE, 0, 8 * PAGE)
        assert_nothing_held(cache)


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    for _ in range(2):
        with stored(tmp_path, prefetch_threshold=10**6) as cache:
            serve(cache, toks(LONG))
            assert cache.flush(30)
            written = cache.stats()["storage_written_pages"]
    assert written == 0
    assert len(files(tmp_path)) == 12


@pytest.mark.parametrize("changed", [{"model": "other"}, {"weight_version": "2"}])
def test_another_model_s_pages_are_no_hits(tmp_path: Path, changed: dict[str, str]) -> None:
    with stored(tmp_path, model="this", weight_version="1") as cache:
        serve(cache, toks(LONG))
    with stored(tmp_path, **({"model": "this", "weight_version": "1"} | changed)) as cache:
        assert serve(cache, toks(LONG)) == (0, 0, 0)


def test_damaged_pages_end_the_hit_and_are_mended(tmp_path: Path) -> None:
    with stored(tmp_path) as cache:
        keys = serve(cache, toks(LONG)) and cache.flush(30)
        assert keys
        cache.reset()
        request = cache.begin(toks(LONG))
        hit = request._prefetch
        assert hit is not None
        damaged = next(path for path in files(tmp_path) if path.name == hit.keys[5])
        whole = bytearray(damaged.read_bytes())
        whole[-1] ^= 1
        damaged.write_bytes(whole)
        assert request.wait_prefetch() == 5 * PAGE
        request.abort()
        assert cache.stats()["storage_corrupt_pages"] == 1
        assert serve(cache, toks(LONG)) == (0, 5 * PAGE, 0)
        assert cache.flush(30)
        cache.reset()
        assert serve(cache, toks(LONG)) == (0, 0, 12 * PAGE)
        assert_nothing_held(cache)


def test_shorter_than_the_threshold(tmp_path: Path) -> None:
    with stored(tmp_path) as cache:
        serve(cache, toks(LONG))
    with stored(tmp_path, prefetch_threshold=12 * PAGE + 1) as cache:
        request = cache.begin(toks(LONG))
        assert request.prefetch_done()
        assert cache.stats()["prefetches"] == 0
        request.abort()
        # Long enough to ask, but what is found is not.
        request = cache.begin(np.concatenate((toks(LONG), toks(50, 900))))
        assert request.wait_prefetch() == 0
        request.abort()
        assert cache.stats()["storage_found_pages"] == 12
        assert_nothing_held(cache)


# With storage that comes when the test says so


class Scene:
    """A cache whose storage holds one long prefix, and is otherwise in the hands of the test."""

    def __init__(self, pages: int = 32, **settings: Any) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        with stored(self.store, pages, prefetch_threshold=10**6) as cache:
            writes, _ = with_manual_threads(cache)
            serve(cache, toks(LONG))
            while not cache.flush(0.01):
                writes.drain()
        assert len(self.store.pages) == 12
        self.cache = stored(self.store, pages, clock=self.clock, **settings)
        self.writes, self.reads = with_manual_threads(self.cache)
        self.store.calls.clear()

    def begin(self) -> Request:
        return self.cache.begin(toks(LONG))

    def look_up(self) -> None:
        self.cache.tick()  # the question goes out
        assert self.reads.run()
        self.cache.tick()

    def end(self) -> None:
        for _ in range(4):
            self.writes.drain()
            self.reads.drain()
            self.cache.flush(0.01)
        assert_nothing_held(self.cache)
        self.cache.close()


def test_best_effort_waits_for_nothing() -> None:
    scene = Scene(prefetch_policy="best_effort")
    request = scene.begin()
    assert request.prefetch_done()
    assert request.wait_prefetch() == 0
    assert request.load_back() == 0
    request.abort()
    scene.end()


def test_wait_complete_waits() -> None:
    scene = Scene(prefetch_policy="wait_complete")
    request = scene.begin()
    scene.clock.now = 1e6
    assert not request.prefetch_done()
    scene.look_up()
    assert not request.prefetch_done()
    assert scene.reads.run()
    scene.cache.tick()
    assert request.prefetch_done()
    assert request.storage_hit_length == 12 * PAGE
    assert request.load_back() == 12 * PAGE
    request.abort()
    scene.end()


def test_the_time_limit() -> None:
    scene = Scene(prefetch_timeout=2.0, prefetch_timeout_per_1024=1024 / (12 * PAGE))
    request = scene.begin()
    scene.look_up()
    scene.clock.now = 2.99
    assert not request.prefetch_done()
    scene.clock.now = 3.0
    assert request.prefetch_done()
    # No thread has begun to read: nothing is there, and nothing will be read.
    assert request.wait_prefetch() == 0
    assert scene.cache.usage()["host_free_pages"] == 64
    request.extend()
    compute(request)
    request.finish()
    scene.reads.drain()
    scene.cache.tick()
    assert ("get", 12) not in scene.store.calls
    scene.end()


def test_what_was_read_so_far_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage.backup.BATCH_PAGES", 5)
    scene = Scene(prefetch_policy="best_effort")
    request = scene.begin()
    scene.look_up()
    prefetch = request._prefetch
    assert prefetch is not None
    loaded = []

    def before(call: str) -> None:
        if ("get", 5) in scene.store.calls[:-1]:
            # The request goes on while the second batch is being read.
            loaded.append(request.load_back())

    scene.store.before = before
    scene.reads.drain()
    assert loaded == [5 * PAGE]
    assert [call for call in scene.store.calls if call[0] == "get"] == [("get", 5), ("get", 5)]
    assert scene.cache.usage()["host_free_pages"] == 64 - 12
    request.extend()
    request.wait()
    assert_served(request)
    assert request.device_length == request.storage_hit_length == 5 * PAGE
    scene.cache.tick()
    assert scene.cache.usage()["host_free_pages"] == 64 - 5
    compute(request)
    request.finish()
    scene.end()


@pytest.mark.parametrize("stage", ["wait", "look up", "queued", "ended"])
def test_abort_gives_the_pages_back(stage: str) -> None:
    scene = Scene()
    request = scene.begin()
    if stage != "wait":
        scene.cache.tick()
    if stage not in ("wait", "look up"):
        assert scene.reads.run()
        scene.cache.tick()
    if stage == "ended":
        assert scene.reads.run()
        scene.cache.tick()
    request.abort()
    left = 64 - 12 if stage == "ended" else 64
    assert scene.cache.usage()["host_free_pages"] == left
    scene.reads.drain()
    scene.cache.tick()
    assert scene.cache.usage()["host_free_pages"] == left
    scene.end()


@pytest.mark.parametrize("how", ["abort", "reset"])
def test_pages_are_out_of_use_until_the_thread_is_off_them(how: str) -> None:
    scene = Scene()
    request = scene.begin()
    scene.look_up()
    cache, seen = scene.cache, []

    def before(call: str) -> None:
        if how == "abort":
            request.abort()
        else:
            cache.reset(force=True)
        cache.tick()
        usage = cache.usage()
        seen.append((usage["host_free_pages"], usage["host_reading_pages"] + usage["host_quarantined_pages"]))

    scene.store.before = before
    assert scene.reads.run()
    assert seen == [(64 - 12, 12)]
    scene.store.before = lambda call: None
    cache.tick()
    assert cache.usage()["host_free_pages"] == 64
    scene.end()


def test_computing_meanwhile_makes_what_was_read_duplicates() -> None:
    scene = Scene(prefetch_policy="wait_complete")
    slow = scene.begin()
    scene.look_up()
    other = scene.cache.begin(toks(LONG))
    other.extend()
    compute(other)
    other.finish()
    assert not scene.cache._controller.idle
    scene.cache.tick()
    scene.reads.drain()
    scene.cache.tick()
    slow.load_back()
    assert slow.device_length == 12 * PAGE
    assert_served(slow)
    slow.abort()
    scene.end()


def test_no_room_on_host_reads_what_fits() -> None:
    # 16 host pages, half of them for reading.
    scene = Scene(pages=16, hicache_ratio=1.0, prefetch_policy="wait_complete")
    first, second = scene.begin(), scene.cache.begin(toks(LONG))
    for request in (first, second):
        while not request.prefetch_done():
            scene.reads.run()
            scene.cache.tick()
    assert first.storage_hit_length == 8 * PAGE
    first.abort()
    second.abort()
    scene.end()


def test_the_anchor_of_a_prefetch_is_backed_up_first() -> None:
    scene = Scene(write_policy="write_through_selective", prefetch_policy="wait_complete")
    head = scene.cache.begin(toks(4 * PAGE + 1))
    head.extend()
    compute(head)
    head.finish()
    scene.reads.drain()
    scene.cache.tick()
    assert scene.cache.stats()["backup_pages"] == 0
    request = scene.begin()
    assert request.device_length == 4 * PAGE
    scene.look_up()
    assert scene.cache.stats()["backup_pages"] == 4
    scene.reads.drain()
    scene.cache.tick()
    assert request.load_back() == 8 * PAGE
    request.extend()
    request.wait()
    assert_served(request)
    request.finish()
    scene.end()


@pytest.mark.parametrize("fault", ["down", "gone", "corrupt", "flip", "error", "timeout"])
def test_faults_are_misses(fault: str) -> None:
    scene = Scene(prefetch_policy="wait_complete")
    scene.store.fault = lambda: fault
    request = scene.begin()
    while not request.prefetch_done():
        scene.reads.run()
        scene.cache.tick()
    assert request.load_back() == 0
    request.abort()
    stats = scene.cache.stats()
    assert stats["storage_errors"] == (1 if fault in ("down", "error", "timeout") else 0)
    damaged = fault in ("corrupt", "flip")
    assert stats["storage_corrupt_pages"] == (12 if damaged else 0)
    scene.store.fault = lambda: None
    scene.clock.now += 100  # the pause of the breaker is over
    request = scene.begin()
    while not request.prefetch_done():
        scene.reads.run()
        scene.cache.tick()
    # What was damaged is out of the way, so that it can be written again.
    assert request.load_back() == (0 if damaged else 12 * PAGE)
    request.abort()
    scene.end()


def test_what_could_not_be_written_is_tried_at_the_next_access() -> None:
    scene = Scene()
    scene.store.clear()
    scene.store.fault = lambda: "full"
    other = toks(LONG, 300)
    serve_late(scene, other)
    assert scene.cache.stats()["storage_errors"] == 1
    assert scene.cache.stats()["storage_written_pages"] == 0
    scene.store.fault = lambda: None
    # The node is cut in between: both parts are written.
    scene.cache.match_prefix(other[: 5 * PAGE])
    serve_late(scene, other)
    assert scene.cache.stats()["storage_written_pages"] == 12
    assert len(scene.store.pages) == 12
    scene.end()


def serve_late(scene: Scene, prompt: Any) -> None:
    request = scene.cache.begin(prompt)
    scene.clock.now += 100
    request.wait_prefetch()
    request.load_back()
    request.extend()
    request.wait()
    assert_served(request)
    compute(request)
    request.finish()
    scene.cache.tick()
    while not scene.cache.flush(0.01):
        scene.writes.drain()
        scene.reads.drain()


def test_pages_being_written_stay_and_leave_room_for_others() -> None:
    scene = Scene(pages=32, hicache_ratio=0.5)
    cache = scene.cache
    scene.store.clear()
    copies = LateCopies.into(cache)
    for start in (1000, 2000, 3000):
        request = cache.begin(toks(5 * PAGE + 1, start))
        request.extend()
        compute(request)
        request.finish()
        cache.tick()
        copies.run_all()
        cache.tick()
    # 16 host pages, at most 8 under way: the other writes wait, and their pages may be evicted meanwhile.
    assert len(scene.writes.jobs) == 1
    assert cache._storage is not None
    assert cache._storage._writes._writing_pages == 5
    scene.end()
    assert len(scene.store.pages) == 15


def test_batches_stop_at_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage.backup.BATCH_PAGES", 4)
    scene = Scene()
    scene.store.clear()
    scene.store.calls.clear()
    scene.store.fault = lambda: "full" if len(scene.store.pages) == 6 else None
    serve_late(scene, toks(LONG, 300))
    sets = [call for call in scene.store.calls if call[0] == "set"]
    assert sets == [("set", 4), ("set", 4)]
    assert len(scene.store.pages) == scene.cache.stats()["storage_written_pages"] == 6
    scene.store.fault = lambda: None
    scene.end()


def test_reset_drops_what_has_not_begun() -> None:
    scene = Scene()
    scene.begin()
    scene.look_up()
    request = scene.cache.begin(toks(LONG, 700))
    request.extend()
    compute(request)
    request.finish()
    scene.cache.tick()
    scene.cache.reset(force=True)
    assert not scene.reads.jobs
    assert not scene.writes.jobs
    assert scene.cache.flush(0.01)
    assert scene.cache.usage()["host_free_pages"] == 64
    scene.cache.tick()
    scene.end()


def test_close_writes_what_is_on_its_way(tmp_path: Path) -> None:
    cache = stored(tmp_path)
    serve(cache, toks(LONG))
    threads = {thread.name for thread in threading.enumerate()}
    assert any("storage writes" in name for name in threads)
    cache.close()
    cache.close()
    assert len(files(tmp_path)) == 12
    assert not any(thread.name.startswith("unified-cache") for thread in threading.enumerate())
    assert os.listdir(tmp_path / ".unified-cache-tmp") == []


def test_prefetches_do_not_pile_up() -> None:
    scene = Scene()
    for _ in range(300):
        scene.begin().abort()
    stats = scene.cache.stats()
    assert (stats["prefetches"], stats["prefetches_refused"]) == (256, 44)
    request = scene.begin()
    assert request.prefetch_done()
    request.abort()
    scene.reads.drain()
    scene.cache.tick()
    request = scene.begin()
    assert not request.prefetch_done()
    request.abort()
    scene.end()


def test_a_prefetch_under_write_back_backs_nothing_up() -> None:
    scene = Scene(write_policy="write_back", prefetch_policy="wait_complete")
    cache = scene.cache
    first = cache.begin(toks(4 * PAGE + 1))
    first.extend()
    compute(first)
    first.finish()
    request = scene.begin()
    assert request.device_length == 4 * PAGE
    while not request.prefetch_done():
        scene.reads.drain()
        cache.tick()
    assert request.wait_prefetch() == 8 * PAGE
    assert request.load_back() == 8 * PAGE
    request.extend()
    request.wait()
    assert_served(request)
    request.abort()
    assert cache.stats()["backup_pages"] == 0
    scene.end()
