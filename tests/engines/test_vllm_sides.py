"""The two sides of the vLLM connector, without vLLM: `fake_vllm` has its order of calls."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import pytest

from tests.engines.fake_vllm import BLOCK, FakeVllm, LateThreads
from unified_cache.engines.vllm_messages import Report, Reports, WorkerAbout
from unified_cache.engines.vllm_scheduler import Event, Scheduled, SchedulerSide
from unified_cache.engines.vllm_settings import VllmSettings
from unified_cache.errors import ArgumentError, MissingDependencyError, StorageError
from unified_cache.storage.backends.memory import MemoryBackend

SMALL = {
    "hicache_ratio": 1.0,
    "load_back_threshold": 0,
    "prefetch_threshold": 0,
    "prefetch_policy": "wait_complete",
}
PROMPT = list(range(100, 141))


@pytest.mark.parametrize("transfer", ["async", "sync", "layers"])
def test_a_prefix_comes_back_from_host(transfer: str) -> None:
    engine = FakeVllm(SMALL | {"transfer": transfer})
    first = engine.add("a", PROMPT)
    engine.run()
    engine.settle()
    assert (first.loaded, first.computed_itself) == (0, 42)
    again = engine.add("b", PROMPT)
    engine.run()
    engine.settle()
    # 41 tokens: 10 blocks, and one token is left to compute.
    assert (again.loaded, again.computed_itself) == (40, 2)
    other = engine.add("c", PROMPT, space="other")
    engine.run()
    assert other.loaded == 0
    engine.reset()
    after = engine.add("d", PROMPT)
    engine.run()
    assert after.loaded == 0
    engine.close()


@pytest.mark.parametrize("transfer", ["async", "sync", "layers"])
def test_a_load_that_fails_is_computed(transfer: str) -> None:
    engine = FakeVllm(SMALL | {"transfer": transfer})
    engine.add("a", PROMPT)
    engine.run()
    engine.settle()
    for copies in engine.engines[-1:]:
        copies.fail = lambda handle: handle.direction == "load"
    again = engine.add("b", PROMPT)
    engine.run()
    engine.settle()
    assert again.loaded == 40
    assert again.computed_itself == 42
    assert engine.scheduler.take_counts()["failed_copies"] >= 1
    engine.close()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("transfer", ["sync", "layers"])
def test_what_was_computed_from_a_load_that_failed_is_not_kept(transfer: str, workers: int) -> None:
    """The forward of the same step fills new blocks from garbage, also on workers where nothing failed."""
    store = MemoryBackend()
    settings = SMALL | {"transfer": transfer, "storage": "/not/opened"}
    engine = FakeVllm(settings, workers=workers, backends=lambda: _Shared(store))
    engine.add("a", PROMPT[:21])
    engine.run()
    engine.settle()
    engine.engines[0].fail = lambda handle: handle.direction == "load"
    broken = engine.add("b", PROMPT)
    engine.run()
    engine.settle()
    assert (broken.loaded, broken.computed_itself) == (20, 42)
    assert engine.scheduler.take_counts()["saves_dropped"] == 2  # what one step computes
    engine.engines[0].fail = lambda handle: False
    for name in ("from host", "from storage"):
        # The fake looks at every byte that this reads; what was dropped was saved again.
        again = engine.add(name, PROMPT)
        engine.run()
        assert (again.loaded, again.computed_itself) == (40, 2)
        engine.settle()
        engine.reset()
        counts = engine.scheduler.take_counts()
    assert counts["storage_hit_tokens"] == 40
    engine.close()


def test_what_was_computed_beside_a_load_goes_on_to_storage_too() -> None:
    store = MemoryBackend()
    settings = SMALL | {"transfer": "sync", "storage": "/not/opened"}
    engine = FakeVllm(settings, backends=lambda: _Shared(store))
    engine.add("a", PROMPT[:21])
    engine.run()
    engine.settle()
    longer = engine.add("b", [*PROMPT[:21], *range(7)], more=0)
    engine.run()
    engine.settle()
    assert (longer.loaded, longer.computed_itself) == (20, 8)
    engine.reset()
    again = engine.add("c", [*PROMPT[:21], *range(8)])
    engine.run()
    assert again.loaded == 28
    engine.close()


@pytest.mark.parametrize("transfer", ["async", "layers"])
def test_a_step_without_an_end_is_saved_all_the_same(transfer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves it out on all but the last stage of a pipeline if there are drafts."""
    engine = FakeVllm(SMALL | {"transfer": transfer})
    engine.add("a", PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr(engine.workers[0], "start_saves", lambda step: None)
        engine.step()
    engine.run()
    engine.settle()
    again = engine.add("b", PROMPT)
    engine.run()
    assert (again.loaded, again.computed_itself) == (40, 2)
    engine.close()


def test_a_request_that_may_not_be_loaded_asks_no_storage() -> None:
    settings = SMALL | {"storage": "/not/opened"}
    engine = FakeVllm(settings, backends=lambda: _Shared(MemoryBackend()))
    engine.scheduler.begin("a", lambda: PROMPT, reads=False)
    assert "look_ups" not in engine.scheduler.take_counts()
    engine.scheduler.begin("b", lambda: PROMPT)
    assert engine.scheduler.take_counts()["look_ups"] == 1
    engine.close()


def test_a_prefix_comes_back_from_storage_in_another_process(tmp_path) -> None:  # type: ignore[no-untyped-def]
    settings = SMALL | {"storage": str(tmp_path / "store")}
    engine = FakeVllm(settings, late=False)
    engine.add("a", PROMPT)
    engine.run(100_000)
    engine.settle(1_000_000)
    engine.close()
    engine = FakeVllm(settings, late=False)
    again = engine.add("b", PROMPT)
    engine.run(1_000_000)
    assert (again.loaded, again.computed_itself) == (40, 2)
    counts = engine.scheduler.take_counts()
    assert counts["storage_hit_tokens"] == 40
    assert "host_hit_tokens" not in counts
    engine.close()


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed: int) -> None:
    """Whatever happens in whatever order, a forward reads what it should, and nothing is left at the end."""
    chance = random.Random(seed)
    transfer = chance.choice(["async", "sync", "layers"])
    settings = SMALL | {
        "transfer": transfer,
        "hicache_ratio": chance.choice([0.5, 1.0, 3.0]),
        "prefetch_policy": chance.choice(["best_effort", "timeout", "wait_complete"]),
    }
    backends = lambda: None  # noqa: E731
    store = MemoryBackend()
    if chance.random() < 0.6:
        settings["storage"] = "/not/opened"
        backends = lambda: _Shared(store)  # noqa: E731
    engine = FakeVllm(
        settings,
        blocks=chance.choice([16, 30]),
        chunk=chance.choice([5, 7, 8]),
        workers=chance.choice([1, 2]),
        seed=seed,
        backends=backends,
        shares=chance.random() < 0.7,
    )
    faulty = chance.random() < 0.5
    for copies in engine.engines:
        copies.fail = lambda handle: faulty and chance.random() < 0.1
    for number in range(60):
        stem = chance.randrange(3)
        tokens = [stem] * chance.randrange(1, 30) + [
            chance.randrange(5) for _ in range(chance.randrange(1, 8))
        ]
        engine.add(f"r{number}", tokens, more=chance.randrange(6), space=chance.choice(["", "", "x"]))
        for _ in range(chance.randrange(6)):
            engine.step()
        if engine.running and chance.random() < 0.2:
            engine.preempt(chance.choice(engine.running))
        if engine.requests and chance.random() < 0.15:
            victim = chance.choice(list(engine.requests.values()))
            if not victim.aborted:
                engine.abort(victim)
        if chance.random() < 0.05:
            engine.reset()
    engine.run()
    for copies in engine.engines:
        copies.fail = lambda handle: False
    engine.settle()
    usage = engine.scheduler.usage()
    assert usage["requests"] == 0
    assert usage["host_free_pages"] + usage["host_tree_pages"] == usage["host_pages"]
    engine.scheduler._tree.check_invariants()
    engine.scheduler._host.check()
    # Nothing is locked any more: all of it can go.
    pages = usage["host_tree_pages"]
    assert len(engine.scheduler._tree.evict_host(pages).host_pages) == pages
    engine.close()


class _Shared(MemoryBackend):
    """One store in memory, opened by all sides of a fake vLLM in one process."""

    shared = True

    def __init__(self, store: MemoryBackend) -> None:
        self.__dict__ = store.__dict__

    def close(self) -> None:
        pass


def test_reports_of_workers_are_put_together() -> None:
    reports = Reports([Report(2, "moved", 5), Report(1, "moved", 3)])
    reports.add([Report(1, "moved", 2), Report(1, "stored", 2)])
    assert reports.take(2) == [Report(1, "moved", 2, 2)]
    assert reports.take(2) == []
    reports.add([Report(2, "moved", 9, 1)])
    assert reports.take(2) == [Report(2, "moved", 5, 2)]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hicache_sise": 1}, "no setting 'hicache_sise', allowed are: copy_blocks"),
        ({"transfer": "later"}, "transfer must be one of 'async', 'sync', 'layers', not 'later'"),
        ({"prefetch_threshold": "auto"}, "prefetch_threshold must be an integer >= 0, not 'auto'"),
        ({"hicache_size": -1}, "hicache_size must be a number > 0, not -1"),
        ({"hicache_size": [1]}, "hicache_size must be a number > 0, not [1]"),
        ({"storage": 5}, "storage must be a URL, a folder's path or a Backend, not 5"),
    ],
)
def test_settings_that_are_wrong(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        VllmSettings.parse(extra, block_size=BLOCK, model="m")
    assert message in str(caught.value)


def test_blocks_that_are_no_pages() -> None:
    with pytest.raises(ArgumentError, match=r"block_size must be in 1\.\.256 for the cache, not 512"):
        VllmSettings.parse({}, block_size=512, model="m")


def test_events_say_what_is_on_host() -> None:
    settings = VllmSettings.parse({}, block_size=BLOCK, model="m", events=True)
    side = SchedulerSide(settings)
    side.start([WorkerAbout(3, 64, "0" * 16)])
    tokens = list(range(13))
    side.begin("a", lambda: tokens, names=lambda: ["h0", "h1", "h2"])

    def save(blocks: list[int], anew: bool, computed: int, count: int) -> None:
        step = side.step([Scheduled("a", blocks, anew, computed, count)])
        side.reported(Report(save.op, "moved", len(save.pages)) for save in step.saves)

    save([0, 1, 2, 3], True, 0, 8)
    assert side.take_events() == [Event("stored", ["h0", "h1"], None, tokens[:8])]
    save([], False, 8, 5)
    assert side.take_events() == [Event("stored", ["h2"], "h1", tokens[8:12])]
    side.finished("a")
    other = [7] * 5
    side.begin("b", lambda: other, names=lambda: ["g0"])
    step = side.step([Scheduled("b", [4, 5], True, 0, 5)])
    assert len(step.saves) == 1
    removed = side.take_events()
    assert [event.kind for event in removed] == ["removed"]
    assert "h2" in removed[0].names
    side.reset()
    assert {name for event in side.take_events() for name in event.names} <= {"h0", "h1"}
    side.close()


def test_without_vllm_it_says_what_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "unified_cache.engines.vllm", raising=False)
    with pytest.raises(MissingDependencyError, match=r"this needs vLLM 0\.32"):
        importlib.import_module("unified_cache.engines.vllm")


def test_storage_that_one_process_sees() -> None:
    with pytest.raises(StorageError, match="seen by one process only"):
        FakeVllm(SMALL | {"storage": "memory://x"})


def _saved(side: SchedulerSide, name: str, blocks: list[int], tokens: int) -> Any:
    """Compute so many tokens of a request in one step; its saves end well."""
    step = side.step([Scheduled(name, blocks, True, 0, tokens)])
    side.reported(Report(save.op, "moved", len(save.pages)) for save in step.saves)
    return step


def _side(**settings: Any) -> SchedulerSide:
    side = SchedulerSide(VllmSettings.parse(SMALL | settings, block_size=BLOCK, model="m"))
    side.start([WorkerAbout(16, 64, "0" * 16)])
    return side


def test_only_what_is_behind_the_device_is_loaded() -> None:
    side, tokens = _side(), list(range(17))
    side.begin("a", lambda: tokens)
    pages = _saved(side, "a", [0, 1, 2, 3, 4], 17).saves[0].pages.tolist()
    side.begin("b", lambda: tokens)
    assert side.match("b", 16) == (0, False)
    assert side.match("b", 4) == (12, True)
    side.allocated("b", [0, 11, 12, 13, 14], 12)
    (load,) = side.step([]).loads
    assert load.pages.tolist() == pages[1:4]
    assert load.blocks.tolist() == [11, 12, 13]
    side.close()


def test_tokens_that_may_be_taken_back_are_not_saved() -> None:
    """A step computes drafts too: 6 tokens are known, and blocks are of 4."""
    side, tokens = _side(), list(range(6))
    side.begin("a", lambda: tokens)
    (save,) = _saved(side, "a", [0, 1, 2], 12).saves
    assert save.blocks.tolist() == [0]
    tokens += [6, 7, 8]
    (save,) = side.step([Scheduled("a", [], False, 6, 5)]).saves
    assert save.blocks.tolist() == [1]
    side.close()


def test_namespaces_share_nothing() -> None:
    tokens = list(range(9))
    spaces: list[dict[str, str]] = [{}, {"extra_key": "x"}, {"cache_salt": "x"}, {"cache_salt": "y"}]
    parsed = VllmSettings.parse(SMALL | {"storage": "/not/opened"}, block_size=BLOCK, model="m")
    side = SchedulerSide(parsed, backend=_Shared(MemoryBackend()), threads=LateThreads)
    side.start([WorkerAbout(16, 64, "0" * 16)])
    seen = set()
    for at, space in enumerate(spaces):
        side.begin(f"{at}", lambda: tokens, **space)
        step = _saved(side, f"{at}", [3 * at, 3 * at + 1, 3 * at + 2], 9)
        # Under the names of another one it would be found by that one, in storage.
        seen |= {digest.tobytes() for digest in step.saves[0].digests}
    assert len(seen) == 2 * len(spaces)
    assert side.usage()["host_tree_pages"] == 2 * len(spaces)
    side.close()


def test_what_only_saves_and_what_only_loads() -> None:
    tokens = list(range(9))
    for role, saves, loads in (("kv_producer", 1, 0), ("kv_consumer", 0, 0), ("kv_both", 1, 8)):
        side = SchedulerSide(VllmSettings.parse(SMALL, block_size=BLOCK, model="m", role=role))
        side.start([WorkerAbout(16, 64, "0" * 16)])
        side.begin("a", lambda: tokens)
        assert len(_saved(side, "a", [0, 1, 2], 9).saves) == saves
        side.begin("b", lambda: tokens)
        assert side.match("b", 0)[0] == loads
        side.close()


def test_an_idle_engine_goes_on_until_what_was_saved_is_known() -> None:
    side, tokens = _side(), list(range(9))
    side.begin("a", lambda: tokens)
    (save,) = side.step([Scheduled("a", [0, 1, 2], True, 0, 9)]).saves
    side.finished("a")
    assert side.copying
    side.reported([Report(save.op, "moved", 2)])
    assert not side.copying
    side.close()


def test_an_idle_engine_goes_on_until_held_saves_are_let_go() -> None:
    store = MemoryBackend()
    settings = SMALL | {"transfer": "sync", "storage": "/not/opened"}
    engine = FakeVllm(settings, workers=1, backends=lambda: _Shared(store))
    engine.add("a", PROMPT[:21])
    engine.run()
    engine.settle()
    engine.add("b", [*PROMPT[:21], *range(7)], more=0)
    engine.run()
    for _ in range(1000):
        if not engine.scheduler.copying:
            break
        engine.step()
    else:
        raise AssertionError("a save does not end")
    # Only threads of the storage have something left to do: no step is needed for that.
    while any(threads.jobs for threads in engine.threads):
        for threads in engine.threads:
            threads.run(engine.random)
    again = FakeVllm(settings, workers=1, backends=lambda: _Shared(store))
    found = again.add("c", [*PROMPT[:21], *range(8)])
    again.run()
    assert found.loaded == 28
    engine.close()
    again.close()


def test_a_preempted_request_waits_for_what_it_has_computed() -> None:
    side, tokens = _side(), list(range(9))
    side.begin("a", lambda: tokens)
    (save,) = side.step([Scheduled("a", [0, 1, 2], True, 0, 9)]).saves
    assert side.match("a", 0) == (None, False)
    side.reported([Report(save.op, "moved", 2)])
    assert side.match("a", 0) == (8, True)
    side.close()


def test_an_abort_gives_back_what_was_offered() -> None:
    side, tokens = _side(), list(range(9))
    side.begin("a", lambda: tokens)
    _saved(side, "a", [0, 1, 2], 9)
    side.finished("a")
    side.begin("b", lambda: tokens)
    assert side.match("b", 0) == (8, True)
    side.finished("b")
    assert len(side._tree.evict_host(2).host_pages) == 2
    side.close()
