"""New weights: what was computed with the old ones is no hit any more, on any tier, whatever is under way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.late import make_cache
from tests.cache.support import (
    PAGE,
    LateCopies,
    ManualThreads,
    MemoryStore,
    _digests,
    assert_nothing_held,
    page_content,
    read_page,
    toks,
    with_manual_storage,
    write_page,
)
from unified_cache import ArgumentError, BusyError, ClosedError, LockError, Request, UnifiedCache
from unified_cache.events import Cleared, Mirror

POLICY = pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])


class Model:
    """A model whose weights change what it computes, and a cache whose storage and copies the test drives."""

    def __init__(self, folder: Path, version: str = "1", **settings: Any) -> None:
        # So that each policy copies what is served once.
        given = {"storage": str(folder / "folder"), "prefetch_threshold": PAGE, "write_through_threshold": 1}
        self.cache: UnifiedCache = make_cache(32, weight_version=version, **(given | settings))
        self.store = MemoryStore()
        self.writes, self.reads = with_manual_storage(self.cache, self.store)
        assert isinstance(self.cache._copies, LateCopies)
        self.copies = self.cache._copies
        self.version = version

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.settle()
            assert_nothing_held(self.cache)
        self.cache.close(timeout=0.01)

    def settle(self) -> None:
        for _ in range(5):
            self.cache.tick()
            self.copies.run_all()
            self.writes.drain()
            self.reads.drain()
        self.cache.tick()

    def update(self, version: str, *, force: bool = False) -> None:
        self.cache.update_weights(version, force=force)
        self.version = version

    def content(self, digest: bytes) -> torch.Tensor:
        return page_content(self.cache.device_pool.planes, digest) + int(self.version)

    def fill(self, request: Request) -> None:
        pages, first = request.pages.tolist(), request.device_length // PAGE
        for at, digest in enumerate(_digests(request)[first:], first):
            write_page(self.cache.device_pool.planes, pages[at], self.content(digest))

    def check(self, request: Request) -> None:
        """What it is served was computed with the weights of now."""
        pages = request.pages.tolist()
        for at, digest in enumerate(_digests(request)[: request.device_length // PAGE]):
            assert torch.equal(read_page(self.cache.device_pool.planes, pages[at]), self.content(digest)), at

    def serve(self, tokens: np.ndarray, **names: str) -> tuple[int, int, int]:
        """One request, checked; returns its hits by tier (device, host, storage)."""
        request = self.cache.begin(tokens, **names)
        on_device = request.device_length
        for _ in range(2):
            self.reads.drain()
            self.cache.tick()
        loaded = request.load_back()
        from_storage = min(request.storage_hit_length, loaded)
        request.extend()
        request.wait()
        self.check(request)
        self.fill(request)
        request.finish()
        return on_device, loaded - from_storage, from_storage

    def put_on(self, tier: str, start: int = 0) -> None:
        """16 tokens that are on this tier only."""
        tokens = toks(16, start)
        self.serve(tokens)
        if tier == "device":
            return
        self.settle()
        self.cache.evict(32)
        self.settle()
        if tier == "storage":
            self.cache.reset()
        found = self.cache.tree.peek_prefix(tokens)
        assert (found.device_length, found.host_hit_length) == (0, 16 if tier == "host" else 0)


# Each tier


@POLICY
@pytest.mark.parametrize("tier", ["device", "host", "storage"])
def test_old_pages_are_no_hits(tmp_path: Path, policy: str, tier: str) -> None:
    with Model(tmp_path, write_policy=policy) as model:
        model.put_on(tier)
        hits = {"device": (16, 0, 0), "host": (0, 16, 0), "storage": (0, 0, 16)}[tier]
        assert model.serve(toks(17)) == hits  # else the test would show nothing
        model.settle()
        model.cache.evict(32)
        model.settle()
        assert len(model.store.pages) == 4
        before = model.cache.stats()

        model.update("2")
        assert model.cache.config.weight_version == "2"
        usage = model.cache.usage()
        assert (usage["device_free_pages"], usage["host_free_pages"]) == (32, 64)
        assert model.serve(toks(17)) == (0, 0, 0)
        assert model.serve(toks(17)) == (16, 0, 0)
        model.settle()
        model.cache.evict(32)
        model.settle()
        assert model.serve(toks(17)) == (0, 16, 0)
        assert len(model.store.pages) == 8
        model.cache.reset()
        assert model.serve(toks(17)) == (0, 0, 16)
        now = model.cache.stats()
        assert all(now[name] >= count for name, count in before.items())


def test_back_to_the_old_version(tmp_path: Path) -> None:
    """Its pages in storage are found again, with their bytes; those on device and host are gone."""
    with Model(tmp_path) as model:
        model.put_on("host")
        for version, hits in (("2", 0), ("3", 0), ("1", 16), ("3", 16), ("2", 16), ("1", 16)):
            model.update(version)
            assert model.serve(toks(17)) == (0, 0, hits)
            model.settle()
            model.cache.evict(32)
            model.settle()
        assert len(model.store.pages) == 3 * 4


def test_namespaces_too(tmp_path: Path) -> None:
    with Model(tmp_path) as model:
        names: list[dict[str, str]] = [{}, {"extra_key": "a"}, {"cache_salt": "b"}]
        for name in names:
            model.serve(toks(17), **name)
        model.settle()
        model.update("2")
        assert [model.serve(toks(17), **name) for name in names] == [(0, 0, 0)] * 3
        model.settle()
        model.update("1")
        assert [model.serve(toks(17), **name) for name in names] == [(0, 0, 16)] * 3


def test_a_longer_prefix_does_not_join_old_and_new(tmp_path: Path) -> None:
    with Model(tmp_path) as model:
        model.serve(toks(33))
        model.settle()
        model.update("2")
        model.serve(toks(17))
        model.settle()
        # 16 tokens of the new weights are there; the 16 behind them are of the old ones.
        assert model.serve(toks(33)) == (16, 0, 0)
        model.settle()
        model.cache.reset()
        assert model.serve(toks(33)) == (0, 0, 32)


@pytest.mark.parametrize("policy", ["write_through", "write_back", None])
def test_without_storage(policy: str | None) -> None:
    with make_cache(16, write_policy=policy) as cache:
        pages = cache.alloc(4)
        cache.insert(toks(16), pages)
        cache.update_weights("2")
        assert cache.match_prefix(toks(17)).device_length == 0
        assert cache.usage()["device_free_pages"] == 16
        assert cache.config.weight_version == "2"
        cache.insert(toks(16), cache.alloc(4))
        assert cache.match_prefix(toks(17)).device_length == 16
        assert_nothing_held(cache)


def test_a_restart_with_the_new_version(tmp_path: Path) -> None:
    with Model(tmp_path) as model:
        model.put_on("host")
        model.update("2")
        model.serve(toks(17))
        model.settle()
        store = model.store
    for version, hits in (("1", 16), ("2", 16), ("3", 0)):
        with Model(tmp_path, version) as model:
            model.store.pages = store.pages
            assert model.serve(toks(17)) == (0, 0, hits)


def test_a_folder(tmp_path: Path) -> None:
    """With the real store and its threads."""
    settings: dict[str, Any] = {
        "storage": str(tmp_path),
        "prefetch_threshold": PAGE,
        "prefetch_policy": "wait_complete",
    }

    def computed(cache: UnifiedCache, weights: int) -> int:
        request = cache.begin(toks(17))
        request.wait_prefetch()
        loaded = request.load_back()
        request.extend()
        request.wait()
        planes, digests = cache.device_pool.planes, _digests(request)
        pages = request.pages.tolist()
        for at, digest in enumerate(digests):
            if at < request.device_length // PAGE:
                assert torch.equal(read_page(planes, pages[at]), page_content(planes, digest) + weights)
            else:
                write_page(planes, pages[at], page_content(planes, digest) + weights)
        request.finish()
        return loaded

    with make_cache(16, weight_version="1", **settings) as cache:
        assert computed(cache, 1) == 0
        # Not flushed: some of it may be on its way.
        cache.update_weights("2")
        assert computed(cache, 2) == 0
        assert cache.flush(30)
    with make_cache(16, weight_version="1", **settings) as cache:
        cache.update_weights("2")
        assert computed(cache, 2) == 16


def test_events(tmp_path: Path) -> None:
    mirror = Mirror()
    with Model(tmp_path, events=True) as model:
        model.serve(toks(17))
        model.settle()
        mirror.apply(model.cache.take_events())
        assert len(mirror) == 8
        model.update("2")
        events = model.cache.take_events()
        assert events == [Cleared()]
        mirror.apply(events)
        model.serve(toks(17))
        mirror.apply(model.cache.take_events())
        assert len(mirror.hashes("device")) == 4


# What is under way


def copy_wanted(model: Model) -> None:
    """The copy to host was not submitted yet."""
    model.serve(toks(16))


def copy_running(model: Model) -> None:
    model.serve(toks(16))
    model.cache.tick()
    assert model.copies.running == 1


def copy_ended(model: Model) -> None:
    """It has ended, and nobody has looked."""
    copy_running(model)
    model.copies.run_all()


def write_queued(model: Model) -> None:
    copy_ended(model)
    model.cache.tick()
    assert len(model.writes.jobs) == 1


def write_waiting(model: Model) -> None:
    """Behind another write, which takes half of the host pool."""
    model.serve(toks(30 * PAGE, 500))
    model.cache.tick()
    model.copies.run_all()
    model.cache.tick()
    model.cache.evict(32)
    for start in (0, 4000):
        model.serve(toks(16, start))
        model.cache.tick()
        model.copies.run_all()
        model.cache.tick()
    assert len(model.writes.jobs) == 1
    assert model.cache._storage._writes.waiting  # type: ignore[union-attr]


def write_ended(model: Model) -> None:
    write_queued(model)
    assert model.writes.run()


def write_failed(model: Model) -> None:
    """It is to be tried again when somebody comes by."""
    write_queued(model)
    model.store.fault = lambda: "full"
    model.writes.run()
    model.cache.tick()
    model.store.fault = lambda: None
    assert model.cache._storage._writes._unstored  # type: ignore[union-attr]


def load_running(model: Model) -> None:
    model.put_on("host")
    request = model.cache.begin(toks(17))
    assert request.load_back() == 16
    model.cache.tick()
    request.abort()
    assert model.copies.running == 1


UNDER_WAY = [
    copy_wanted,
    copy_running,
    copy_ended,
    write_queued,
    write_waiting,
    write_ended,
    write_failed,
    load_running,
]


@pytest.mark.parametrize("prepare", UNDER_WAY)
@pytest.mark.parametrize("late", [False, True])
def test_what_is_under_way_is_no_hit_later(
    tmp_path: Path, prepare: Callable[[Model], None], late: bool
) -> None:
    with Model(tmp_path) as model:
        prepare(model)
        model.update("2")
        if not late:
            model.settle()
        assert model.serve(toks(17)) == (0, 0, 0)
        model.settle()
        assert model.serve(toks(17)) == (16, 0, 0)
        model.cache.evict(32)
        model.settle()
        assert model.serve(toks(17)) == (0, 16, 0)
        model.cache.reset()
        assert model.serve(toks(17)) == (0, 0, 16)
        model.settle()
        # Nor does an old page lie under a new key, or a new one under an old key.
        model.update("1")
        hits = model.serve(toks(17))
        assert hits[:2] == (0, 0)
        assert hits[2] in (0, 16)


def test_a_write_that_runs_while_the_weights_change(tmp_path: Path) -> None:
    """The update does not wait for it: it writes old bytes under old keys, and nobody overwrites them."""
    with Model(tmp_path) as model:

        def update(call: str) -> None:
            if call == "set":
                model.store.before = lambda call: None
                model.update("2")
                assert model.cache.usage()["host_quarantined_pages"] == 4
                assert model.serve(toks(17)) == (0, 0, 0)

        model.store.before = update
        model.serve(toks(16))
        model.cache.tick()
        model.copies.run_all()
        model.cache.tick()
        assert model.writes.run()
        assert len(model.store.pages) == 4
        model.settle()
        model.cache.reset()
        assert model.serve(toks(17)) == (0, 0, 16)
        model.update("1")
        assert model.serve(toks(17)) == (0, 0, 16)


@pytest.mark.parametrize("phase", ["look up", "read", "read ended", "ended"])
def test_a_prefetch_that_is_under_way(tmp_path: Path, phase: str) -> None:
    with Model(tmp_path) as model:
        model.put_on("storage")
        request = model.cache.begin(toks(17))
        if phase != "look up":
            assert model.reads.run()
            model.cache.tick()
        if phase in ("read ended", "ended"):
            assert model.reads.run()
        if phase == "ended":
            model.cache.tick()
        with pytest.raises(BusyError):
            model.update("2")
        assert model.cache.config.weight_version == "1"
        model.update("2", force=True)
        with pytest.raises(LockError, match="before a reset"):
            request.load_back()
        request.abort()
        assert model.cache.usage()["host_free_pages"] == 64
        assert model.serve(toks(17)) == (0, 0, 0)


@pytest.mark.parametrize("state", ["begun", "computing", "retracted", "away"])
def test_requests_of_before_can_not_go_on(tmp_path: Path, state: str) -> None:
    """What they have computed was computed with the old weights: it must not be inserted."""
    with Model(tmp_path) as model:
        model.serve(toks(17))
        model.settle()
        request = model.cache.begin(toks(22))
        if state != "begun":
            request.extend()
            model.fill(request)
        if state in ("retracted", "away"):
            request.retract()
            model.cache.tick()
        if state == "away":
            model.settle()
        model.update("2", force=True)
        for step in (request.insert, request.finish, request.extend, request.resume, request.retract):
            with pytest.raises(LockError):
                step()
        request.abort()
        assert model.serve(toks(22)) == (0, 0, 0)
        model.settle()
        usage = model.cache.usage()
        assert usage["device_free_pages"] + usage["device_tree_pages"] == 32


# Refused


def hits_of(model: Model) -> tuple[int, int, int]:
    found = model.cache.tree.peek_prefix(toks(17))
    return found.device_length, found.host_hit_length, len(model.store.pages)


@pytest.mark.parametrize("version", ["1", 2, None, b"2"])
def test_versions_that_are_refused(tmp_path: Path, version: Any) -> None:
    with Model(tmp_path) as model:
        model.serve(toks(17))
        model.settle()
        before, key = hits_of(model), model.cache._storage._keys.fingerprint  # type: ignore[union-attr]
        for force in (False, True):
            with pytest.raises(ArgumentError, match="version"):
                model.cache.update_weights(version, force=force)
        assert hits_of(model) == before == (16, 0, 4)
        assert model.cache._storage._keys.fingerprint == key  # type: ignore[union-attr]
        assert model.cache.config.weight_version == "1"
        assert model.serve(toks(17)) == (16, 0, 0)


@pytest.mark.parametrize("why", ["request", "retracted", "pages"])
def test_busy_changes_nothing(tmp_path: Path, why: str) -> None:
    with Model(tmp_path) as model:
        model.serve(toks(17))
        model.settle()
        let_go: Callable[[], object]
        if why == "pages":
            let_go = partial(model.cache.free, model.cache.alloc(2))
        else:
            request = model.cache.begin(toks(22))
            request.extend()
            if why == "retracted":
                request.retract()
                model.settle()
            let_go = request.abort
        # A write that is under way goes on, too.
        model.serve(toks(16, 700))
        model.cache.tick()
        model.copies.run_all()
        model.cache.tick()
        assert len(model.writes.jobs) == 1
        usage, stats, digest = model.cache.usage(), model.cache.stats(), model.cache.tree.digest()
        with pytest.raises(BusyError):
            model.update("2")
        assert model.cache.config.weight_version == "1"
        assert (model.cache.usage(), model.cache.stats(), model.cache.tree.digest()) == (usage, stats, digest)
        let_go()
        model.settle()
        assert len(model.store.pages) == 8
        assert model.serve(toks(17)) == (16, 0, 0)
        model.cache.reset()
        assert model.serve(toks(17)) == (0, 0, 16)
        model.update("2")
        assert model.serve(toks(17)) == (0, 0, 0)


def test_closed() -> None:
    with make_cache() as cache:
        pass
    with pytest.raises(ClosedError):
        cache.update_weights("2")
    assert cache.config.weight_version == ""


def test_threads_stay_the_same(tmp_path: Path) -> None:
    """An update starts no second set of threads."""
    with Model(tmp_path) as model:
        workers = (model.writes, model.reads)
        for version in range(2, 7):
            model.serve(toks(17))
            model.update(str(version))
        assert isinstance(model.writes, ManualThreads)
        link = model.cache._storage
        assert link is not None
        assert (link._backup.threads, link._reader.threads) == workers
        assert model.cache._copies is model.copies
