"""After a restart: what storage holds is known, and what was stored last comes back to host."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.support import (
    PAGE,
    Clock,
    ManualThreads,
    assert_nothing_held,
    make_cache,
    serve,
    toks,
    with_manual_threads,
)
from unified_cache import UnifiedCache
from unified_cache.errors import ArgumentError, StorageError
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.memory import Fault, MemoryBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.contract import Backend

SETTINGS: dict[str, Any] = {"prefetch_threshold": 0, "load_back_threshold": 0}


def cache_on(storage: Any, pages: int = 64, **settings: Any) -> UnifiedCache:
    return make_cache(pages, storage=storage, **(SETTINGS | settings))


def prompt(pages: int, *forks: int) -> np.ndarray:
    """A prompt of whole pages and a token, which parts from others at its forks (page, and which way)."""
    tokens = toks(pages * PAGE + 1)
    for at, way in zip(forks[::2], forks[1::2], strict=True):
        tokens[at * PAGE :] += 1000 * way
    return tokens


@pytest.fixture(params=["file", "mmap", "pages"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    size = "" if request.param == "pages" else "?size=4MB"
    return f"{request.param}://{tmp_path}/store{size}"


def fill(url: Any, **settings: Any) -> None:
    with cache_on(url, **settings) as cache:
        assert cache.warm(10)
        serve(cache, prompt(8))
        serve(cache, prompt(6, 3, 1), extra_key="lora")
        serve(cache, prompt(10, 5, 1))
        assert cache.flush(10)
        assert cache.usage()["stored_pages"] == 8 + 6 + 5


def test_the_tree_is_there_again(url: str) -> None:
    fill(url)
    with cache_on(url) as cache:
        assert cache.match_stored(prompt(8)) == 0  # nothing was read yet
        assert cache.warm(10)
        usage = cache.usage()
        assert (usage["stored_pages"], usage["host_tree_pages"]) == (19, 0)
        assert usage["stored_prefixes"] == 4  # two that part at page 5, and one of another namespace
        assert [cache.match_stored(prompt(*one)) for one in ((8,), (10, 5, 1), (10, 5, 2), (10, 2, 1))] == [
            8 * PAGE,
            10 * PAGE,
            5 * PAGE,
            2 * PAGE,
        ]
        lora = prompt(6, 3, 1)
        assert [cache.match_stored(lora, extra_key=key) for key in ("lora", None, "other")] == [
            6 * PAGE,
            3 * PAGE,
            0,
        ]
        assert cache.match_stored(lora, extra_key="lora", cache_salt="salt") == 0
        request = cache.begin(prompt(10, 5, 2))
        assert (request.stored_length, request.storage_hit_length) == (5 * PAGE, 0)
        request.abort()
        assert serve(cache, prompt(8)) == (0, 0, 8 * PAGE)
        assert_nothing_held(cache)


def test_it_comes_back_to_host_before_somebody_asks(url: str) -> None:
    fill(url)
    with cache_on(url, storage_warm=1.0) as cache:
        assert cache.warm(10)
        assert cache.usage()["host_tree_pages"] == cache.stats()["storage_warmed_pages"] == 19
        assert len(cache.tree) == 4
        assert serve(cache, prompt(8)) == (0, 8 * PAGE, 0)
        assert serve(cache, prompt(6, 3, 1), extra_key="lora") == (0, 6 * PAGE, 0)
        assert serve(cache, prompt(10, 5, 1)) == (5 * PAGE, 5 * PAGE, 0)
        assert cache.stats()["prefetches"] == 0
        assert_nothing_held(cache)


def test_by_default_half_of_the_host_pool_is_filled(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=4MB"
    with cache_on(url) as cache:
        for at in range(6):
            serve(cache, toks(10 * PAGE + 1, 5000 * at))
    with cache_on(url, pages=16, hicache_ratio=2.0, storage_warm=0.5) as cache:
        assert cache.warm(10)
        usage = cache.usage()
        assert (usage["host_pages"], usage["host_tree_pages"]) == (32, 16)
        # What was stored last: the last prompt, and the begin of the one before.
        assert serve(cache, toks(10 * PAGE + 1, 5000 * 5)) == (0, 10 * PAGE, 0)
        assert serve(cache, toks(10 * PAGE + 1, 5000 * 4)) == (0, 6 * PAGE, 4 * PAGE)
        assert cache.stats()["evicted_host_pages"] == 0
        assert_nothing_held(cache)


def test_what_the_store_has_lost_is_left_out(url: str, tmp_path: Path) -> None:
    fill(url)
    store: Backend
    if url.startswith("pages"):
        store = PagesBackend(tmp_path / "store")
        gone = sorted(store.keys())[:6]
        assert store.delete(gone) == 6
        store.close()
    else:
        from unified_cache.storage.urls import open_storage

        store = open_storage(url)
        gone = sorted(store.keys())[:6]
        assert store.delete(gone) == 6
        store.close()
    with cache_on(url, storage_warm=1.0) as cache:
        assert cache.warm(10)
        known = cache.usage()["stored_pages"]
        assert 0 < known <= 13
        assert cache.usage()["host_tree_pages"] == known
        for one, space in ((prompt(8), None), (prompt(10, 5, 1), None), (prompt(6, 3, 1), "lora")):
            length = cache.match_stored(one, extra_key=space)
            assert serve(cache, one, extra_key=space) == (0, length, 0) or length < len(one) - 1
        assert cache.flush(10)
        # What was computed again is stored again, and known again.
        assert cache.usage()["stored_pages"] == 19
    with cache_on(url) as cache:
        assert cache.warm(10)
        assert cache.usage()["stored_pages"] == 19


def test_other_weights_are_other_prefixes(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=4MB"
    fill(url)
    with cache_on(url, weight_version="2", storage_warm=1.0) as cache:
        assert cache.warm(10)
        assert cache.usage()["stored_pages"] == cache.usage()["host_tree_pages"] == 0
        serve(cache, prompt(4))
        assert cache.flush(10)
        cache.update_weights("")
        assert cache.warm(10)
        assert cache.usage()["stored_pages"] == 19
        assert cache.match_stored(prompt(8)) == 8 * PAGE
        cache.update_weights("2")
        assert cache.warm(10)
        assert cache.match_stored(prompt(8)) == 4 * PAGE


def test_attached_later(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=4MB"
    fill(url)
    with make_cache(64, storage_warm=1.0, **SETTINGS) as cache:
        assert cache.match_stored(prompt(8)) == 0
        assert cache.warm(1)
        serve(cache, prompt(5, 2, 7))
        cache.attach_storage(url)
        assert cache.warm(10)
        assert cache.match_stored(prompt(8)) == 8 * PAGE
        assert serve(cache, prompt(10, 5, 1))[1] == 8 * PAGE
        assert cache.flush(10)
        assert cache.match_stored(prompt(5, 2, 7)) == 5 * PAGE
        assert cache.detach_storage()
        assert cache.match_stored(prompt(8)) == 0
        assert_nothing_held(cache)


def test_a_reset_ends_the_warming_and_keeps_what_is_known(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=4MB"
    fill(url)
    for before in range(6):
        with cache_on(url, storage_warm=1.0) as cache:
            _, reads = with_manual_threads(cache)
            for _ in range(before):
                cache.tick()
                reads.run()
            cache.reset()
            for _ in range(20):
                reads.drain()
                cache.tick()
            assert cache.usage()["host_tree_pages"] == 0
            assert cache.match_stored(prompt(8)) == 8 * PAGE
            assert_nothing_held(cache)


def test_requests_come_first(tmp_path: Path) -> None:
    """A batch in the background begins after what a request waits for, and nobody waits for it."""
    url = f"file://{tmp_path}/store?size=4MB"
    with cache_on(url) as cache:
        serve(cache, prompt(8))
        serve(cache, prompt(8, 0, 3))
    with cache_on(url, storage_warm=1.0) as cache:
        _, reads = with_manual_threads(cache)
        cache.tick()
        while cache._storage is not None and not cache._storage._reads.look_ups:
            assert reads.run()
            cache.tick()
        assert reads.run()  # the look-up of what was stored last
        cache.tick()
        assert len(reads.jobs) == 1
        request = cache.begin(prompt(8, 0, 3))  # the very same pages
        cache.tick()
        assert len(reads.jobs) == 2
        assert reads.run()  # its look-up
        cache.tick()
        assert reads.run()  # its pages
        cache.tick()
        assert request.prefetch_done()
        assert request.wait_prefetch() == 8 * PAGE
        assert len(reads.jobs) == 1
        request.abort()
        reads.drain()
        for _ in range(10):
            cache.tick()
            reads.drain()
        assert cache.warm(1)
        assert cache.usage()["host_tree_pages"] == 16
        assert_nothing_held(cache)


def test_nothing_is_evicted_for_it(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=4MB"
    with cache_on(url) as cache:
        for at in range(4):
            serve(cache, toks(8 * PAGE + 1, 5000 * at))
    with cache_on(url, pages=16, hicache_ratio=1.0, storage_warm=1.0) as cache:
        _, reads = with_manual_threads(cache)
        cache.tick()
        # While the log is being read others take the room.
        serve_offline(cache, reads, toks(12 * PAGE + 1, 90_000))
        for _ in range(40):
            reads.drain()
            cache.tick()
        assert not cache._storage.warming  # type: ignore[union-attr]
        assert cache.stats()["evicted_host_pages"] == 0
        assert cache.stats()["storage_warmed_pages"] == 4
        assert cache.match_prefix(toks(12 * PAGE, 90_000)).device_length == 12 * PAGE


def serve_offline(cache: UnifiedCache, reads: ManualThreads, tokens: np.ndarray) -> None:
    """A prompt that nobody has stored, computed and copied to host."""
    pages = cache.alloc(len(tokens) // PAGE)
    cache.insert(tokens[: len(pages) * PAGE], pages)
    assert cache._controller is not None
    while not cache._controller.idle:
        cache._controller.take_done(wait=True, timeout=10)
        cache._controller.tick()


def test_look_ups_teach_what_others_have_stored_and_what_is_gone() -> None:
    store = MemoryBackend()
    with cache_on(store) as cache:
        assert cache.warm(10)
        serve(cache, prompt(8))
        assert cache.flush(10)
        assert cache.match_stored(prompt(8)) == 8 * PAGE
        cache.reset()
        keys = cache._storage._keys.keys  # type: ignore[union-attr]
        from unified_cache import page_hashes

        hashes = page_hashes(prompt(8), PAGE)
        # The store forgets the end: the look-up of a request finds out.
        assert store.delete(keys(hashes[6:])) == 2
        assert serve(cache, prompt(8)) == (0, 0, 6 * PAGE)
        assert cache.flush(10)
        assert cache.match_stored(prompt(8)) == 8 * PAGE  # computed and stored again
        cache.reset()
        # And a page that is lost between look-up and read.
        store.faults.plan("get object", [None, None, Fault.MISS])
        serve(cache, prompt(8))
        assert cache.match_stored(prompt(8)) >= 2 * PAGE
        assert_nothing_held(cache)


def test_stored_by_somebody_who_left_no_log(tmp_path: Path) -> None:
    """A request's look-up finds it, and then the next process knows."""
    url = f"file://{tmp_path}/store?size=4MB"
    fill(url)
    (tmp_path / "store" / "slab.prefixes").unlink()
    with cache_on(url) as cache:
        assert cache.warm(10)
        assert cache.usage()["stored_pages"] == 0
        assert serve(cache, prompt(8)) == (0, 0, 8 * PAGE)
        assert cache.match_stored(prompt(8)) == 8 * PAGE
    with cache_on(url) as cache:
        assert cache.warm(10)
        assert cache.match_stored(prompt(8)) == 8 * PAGE


def test_a_log_that_can_not_be_written_costs_nothing_else(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=4MB"
    with cache_on(url) as cache:
        assert cache.warm(10)
        (tmp_path / "store" / "slab.prefixes").mkdir()
        serve(cache, prompt(8))
        assert cache.flush(10)
        stats = cache.stats()
        assert stats["storage_unlogged_pages"] == stats["storage_written_pages"] == 8
        assert cache._storage is not None
        assert cache._storage.guard.breaker.state == "closed"
        (tmp_path / "store" / "slab.prefixes").rmdir()
        cache.reset()
        assert serve(cache, prompt(8)) == (0, 0, 8 * PAGE)  # seen again, so it is told again
    with cache_on(url) as cache:
        assert cache.warm(10)
        assert cache.match_stored(prompt(8)) == 8 * PAGE


def test_a_storage_that_is_down_while_the_log_is_read() -> None:
    class Broken(MemoryBackend):
        broken = True
        asked = 0

        def holds(self, digests: np.ndarray, ending: str) -> np.ndarray:
            self.asked += 1
            if self.broken:
                raise StorageError("as it was told to")
            return super().holds(digests, ending)

    store, clock = Broken(), Clock()
    with cache_on(MemoryBackend()) as cache:
        serve(cache, prompt(8))
        assert cache.flush(10)
        other = cache._storage
        assert other is not None
        store._objects = dict(other.guard.backend._objects)  # type: ignore[attr-defined]
        store._log.append(b"".join(other.guard.backend.prefix_log().read()))  # type: ignore[union-attr]
    with cache_on(store, clock=clock) as cache:
        cache.tick()
        while store.asked < 2:
            clock.now += 2
            cache.tick()
        store.broken = False
        clock.now += 100
        assert cache.warm(10)
        assert cache.match_stored(prompt(8)) == 8 * PAGE
        assert cache.flush(10)


def test_after_some_attempts_it_is_done_without_the_log(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=4MB"
    with cache_on(url) as cache:
        serve(cache, prompt(4))
    log = tmp_path / "store" / "slab.prefixes"
    log.unlink()
    log.mkdir()
    with cache_on(url) as cache:
        assert cache.warm(10)
        assert cache.usage()["stored_pages"] == 0
        assert cache.stats()["storage_errors"] >= 3
        assert serve(cache, prompt(4)) == (0, 0, 4 * PAGE)


def test_damage_is_counted(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=4MB"
    fill(url)
    path = tmp_path / "store" / "slab.prefixes"
    whole = bytearray(path.read_bytes())
    whole[113] ^= 4  # in the tokens of the first record
    path.write_bytes(bytes(whole) + whole[:50])
    with cache_on(url, storage_warm=1.0) as cache:
        assert cache.warm(10)
        assert cache.stats()["storage_damaged_records"] == 2
        assert 0 < cache.usage()["stored_pages"] < 19
        assert_nothing_held(cache)


def test_a_log_that_grows_is_rewritten(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=60000&slot=4096"
    path = tmp_path / "store" / "slab.prefixes"
    with cache_on(url) as cache:
        assert cache.warm(10)
        assert cache._storage is not None
        cache._storage.stored.slack = 0
        sizes = []
        for at in range(40):
            serve(cache, toks(4 * PAGE + 1, 5000 * at))
            assert cache.flush(10)
            cache.tick()
            cache._storage.wait(0.01)
            sizes.append(path.stat().st_size)
        assert max(sizes) < 20 * sizes[0]  # the store has room for 12 pages, three prompts
    with cache_on(url) as cache:
        assert cache.warm(10)
        assert cache.match_stored(toks(4 * PAGE, 5000 * 39)) == 4 * PAGE


def test_what_is_stored_again_is_told_again(tmp_path: Path) -> None:
    """Its record may be gone: struck out since the page was, or cleared by somebody else."""
    url = f"file://{tmp_path}/store?size=4MB"
    with cache_on(url) as cache:
        assert cache.warm(10)
        serve(cache, prompt(8))
        assert cache.flush(10)
        other = FileBackend(tmp_path / "store")
        other.clear()
        other.close()
        cache.reset()
        pages = cache.alloc(8)
        cache.insert(prompt(8)[:-1], pages)  # nobody looks it up first
        assert cache.flush(10)
    with cache_on(url) as cache:
        assert cache.warm(10)
        assert cache.match_stored(prompt(8)) == 8 * PAGE


def test_two_caches_on_one_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=4MB"
    with cache_on(url) as one, cache_on(url) as two:
        for at in range(10):
            serve((one, two)[at % 2], prompt(6, at % 5, 1 + at))
    with cache_on(url) as cache:
        assert cache.warm(10)
        for at in range(10):
            assert cache.match_stored(prompt(6, at % 5, 1 + at)) == 6 * PAGE


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_threads(seed: int) -> None:
    """Whatever order jobs end in: what is known is what is stored, and the next one knows as much."""
    rng = random.Random(seed)
    store = MemoryBackend(capacity=rng.choice((None, 40_000)))
    log, objects = store._log, store._objects
    for _ in range(3):
        settings = {"storage_warm": rng.choice((0.0, 0.5, 1.0)), "storage_tree_pages": rng.choice((20, 1000))}
        cache = cache_on(store, pages=64, **settings)
        link = cache._storage
        assert link is not None
        writes, reads = with_manual_threads(cache)
        for _ in range(120):
            kind = rng.random()
            if kind < 0.25:
                threads = rng.choice((writes, reads))
                rng.shuffle(threads._queued)
                threads.run()
            elif kind < 0.5:
                cache.tick()
            elif kind < 0.6:
                request = cache.begin(prompt(rng.randrange(2, 9), rng.randrange(5), rng.randrange(3)))
                assert request.stored_length % PAGE == 0
                request.abort()
            elif kind < 0.75:
                tokens = prompt(rng.randrange(2, 9), rng.randrange(5), rng.randrange(3))[:-1]
                pages = cache.alloc(len(tokens) // PAGE)
                cache.insert(tokens, pages)
            elif kind < 0.8:
                cache.reset()
            elif kind < 0.85 and objects:
                store.delete([rng.choice(list(objects))])
        cache.tick()
        while link.busy or link.warming or not (link.idle and cache._controller.idle):
            writes.drain()
            reads.drain()
            cache._controller.take_done(wait=True, timeout=1)
            cache.tick()
        link.stored.tree.check_invariants()
        cache.tree.check_invariants()
        assert_nothing_held(cache)
        if settings["storage_tree_pages"] == 1000:
            # Everything that hangs together in the store, as far as anybody has heard of it, is known.
            for fork in range(5):
                for way in range(3):
                    tokens = prompt(8, fork, way)
                    request = cache.begin(tokens)
                    for _ in range(6):
                        cache.tick()
                        writes.drain()
                        reads.drain()
                    found = request.wait_prefetch()
                    assert cache.match_stored(tokens) >= found
                    request.abort()
        # The store outlives the cache here.
        link.guard.backend = MemoryBackend()
        cache.close()
        assert store._log is log


def test_settings_are_checked() -> None:
    for settings, text in (
        ({"storage_warm": 1.5}, "storage_warm must be a number in 0..1, not 1.5"),
        ({"storage_warm": -1}, "storage_warm must be a number >= 0, not -1"),
        ({"storage_tree_pages": 0}, "storage_tree_pages must be an integer in 1..2147483647, not 0"),
    ):
        with pytest.raises(ArgumentError, match=text):
            make_cache(4, **settings)  # type: ignore[arg-type]


_FIRST = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.cache.support import make_cache, serve, toks
cache = make_cache(64, storage=sys.argv[1], prefetch_threshold=0)
for at in range(1000):
    serve(cache, toks(6 * 4 + 1, 100 * at))
    assert cache.flush(10)
    print(at, flush=True)
"""


def test_a_process_that_was_killed_is_followed_by_another(tmp_path: Path) -> None:
    """What the first one had stored is known, comes back to host, and is bit for bit what was computed."""
    url = f"file://{tmp_path}/store?size=8MB"
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", _FIRST, url, root]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        for _ in range(12):
            first.stdout.readline()
        first.send_signal(signal.SIGKILL)
        count = 12 + first.stdout.read().count("\n")
    with cache_on(url, storage_warm=1.0) as cache:
        assert cache.warm(10)
        for at in range(count):
            assert cache.match_stored(toks(24, 100 * at)) == 24
        last = toks(25, 100 * (count - 1))
        assert serve(cache, last) == (0, 24, 0)  # which compares every byte of it
        assert serve(cache, toks(25))[2] in (0, 24)
        assert_nothing_held(cache)


def test_a_file_backend_says_what_it_seems_to_hold(tmp_path: Path) -> None:
    fill(f"file://{tmp_path}/store?size=4MB")
    store = FileBackend(tmp_path / "store")
    names = list(store.keys())
    digests = np.array([list(bytes.fromhex(name[:64])) for name in names], np.uint8)
    (ending,) = {name[64:] for name in names}
    assert store.holds(digests, ending).all()
    assert not store.holds(digests, ending[:-1] + "1").any()
    assert not store.holds(digests ^ 1, ending).any()
    store.delete(names[::2])
    assert store.holds(digests, ending).tolist() == [at % 2 == 1 for at in range(len(names))]
    assert store.holds(digests[:0], ending).tolist() == []
    store.close()
