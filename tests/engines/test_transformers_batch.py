"""`BatchPrefixCache` under `generate_batch`: what comes out is what continuous batching gives alone, and what
is cached is not computed."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("psutil", reason="continuous batching on a CPU asks it how much memory there is")
from unified_cache.engines.transformers_tier import KNOWN

if not transformers.__version__.startswith(KNOWN):
    pytest.skip(f"continuous batching is known as it is in transformers {KNOWN}", allow_module_level=True)

from transformers.generation.continuous_batching import RequestState
from transformers.generation.continuous_batching.scheduler import Scheduler

from tests.engines.stored_bytes import change_stored
from tests.engines.transformers_support import (
    ANSWER,
    PAGE,
    Computed,
    batch_settings,
    broken_loads,
    text,
    tiny,
)
from unified_cache.engines.transformers import BatchPrefixCache, PrefixCache
from unified_cache.errors import ArgumentError, BusyError, ClosedError, StorageError
from unified_cache.storage.backends.memory import Fault, Faults, MemoryBackend

pytestmark = pytest.mark.parallel

SHARED = text(2, 64)
PROMPTS = [tokens[0].tolist() for tokens in (text(1, 100), text(3, 50, after=SHARED), text(4, 30))]
TOKENS = sum(map(len, PROMPTS))
DECODED = len(PROMPTS) * (ANSWER - 1)
# Whole pages of each, with a token left to compute.
WHOLE = sum((len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> Iterator[None]:
    # Each run ends with a collection, which takes a second where all of pytest and transformers is looked at.
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def alone(llama: Any) -> list[Any]:
    """Continuous batching without the cache."""
    settings = batch_settings()
    names = ("generation_config", "continuous_batching_config")
    return list(llama.generate_batch(PROMPTS, **{name: settings[name] for name in names}).values())


@pytest.fixture
def computed(llama: Any) -> Computed:
    return Computed(llama)


def _cached(model: Any, storage: Any = None, *, settings: Any = (), **config: Any) -> BatchPrefixCache:
    return BatchPrefixCache(model, storage, **(batch_settings(**config) | dict(settings)))


def _same(got: dict[str, Any], expected: list[Any]) -> None:
    for mine, theirs in zip(got.values(), expected, strict=True):
        assert mine.error is None
        assert mine.generated_tokens == theirs.generated_tokens
        for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert abs(one - other) < 1e-3


def _idle(cached: BatchPrefixCache) -> None:
    """Nothing is held, neither on host nor of the blocks of `transformers`."""
    assert cached.flush(60)
    usage = cached.usage()
    assert (usage["requests"], usage["operations"]) == (0, 0)
    assert usage["host_free_pages"] + usage["host_tree_pages"] == usage["host_pages"]
    side = cached._tier._side
    side._tree.check_invariants()
    side._host.check()
    paged = cached.manager.batch_processor.cache
    allocator = paged.cache_allocators["full_attention"]
    assert allocator.block_table == {}
    assert allocator.ledger.shared_ref_counts == {}
    free = paged.pool.count_free_blocks(0) + paged.pool.num_free_sectors * allocator.blocks_per_sector
    assert free + len(allocator.ledger.cached_blocks) == allocator.num_blocks
    # Nothing on host is locked: all of it could go.
    assert len(side._tree.evict_host(usage["host_tree_pages"]).host_pages) == usage["host_tree_pages"]
    side.reset()


def test_every_tier_answers_as_continuous_batching_alone(
    llama: Any, alone: list[Any], computed: Computed, tmp_path: Path
) -> None:
    attention = llama.config._attn_implementation
    with _cached(llama, tmp_path) as cached:
        for found in ("nothing", "device", "host", "storage"):
            if found == "host":
                cached.flush(60)
                cached.reset(host=False)
            elif found == "storage":
                cached.reset()
            computed.take()
            _same(cached.generate_batch(PROMPTS), alone)
            left = TOKENS if found == "nothing" else TOKENS - WHOLE
            assert sum(computed.take()) == left + DECODED
        stats = cached.stats()
        assert (stats["host_hit_tokens"], stats["storage_hit_tokens"]) == (WHOLE, WHOLE)
        # The next turn finds prompt and answer; its last token was never computed.
        cached.flush(60)
        cached.reset(host=False)
        longer = PROMPTS[0] + alone[0].generated_tokens + PROMPTS[2]
        computed.take()
        cached.generate_batch([longer], max_new_tokens=1)
        assert sum(computed.take()) == len(longer) - (len(PROMPTS[0]) + ANSWER - 1) // PAGE * PAGE
        _idle(cached)
    with _cached(llama, tmp_path) as cached:
        computed.take()
        _same(cached.generate_batch(PROMPTS), alone)
        assert sum(computed.take()) == TOKENS - WHOLE + DECODED
    assert llama.config._attn_implementation == attention
    assert not hasattr(llama, "_cached_continuous_batching_manager")


@pytest.mark.parametrize("mend_checksum", [True, False])
def test_stored_bytes_are_what_is_read_and_damaged_ones_are_not(
    llama: Any, alone: list[Any], computed: Computed, tmp_path: Path, mend_checksum: bool
) -> None:
    with _cached(llama, tmp_path) as cached:
        _same(cached.generate_batch(PROMPTS), alone)
    change_stored(tmp_path, mend_checksum=mend_checksum)
    with _cached(llama, tmp_path) as cached:
        computed.take()
        got = cached.generate_batch(PROMPTS)
        if mend_checksum:
            assert sum(computed.take()) == TOKENS - WHOLE + DECODED
            for mine, theirs in zip(got.values(), alone, strict=True):
                assert mine.generated_tokens != theirs.generated_tokens
        else:
            assert sum(computed.take()) == TOKENS + DECODED
            _same(got, alone)
            assert cached.stats()["storage_get_corrupt"] > 0
        _idle(cached)


def test_loads_that_fail_are_computed(llama: Any, alone: list[Any], computed: Computed) -> None:
    with _cached(llama) as cached:
        _same(cached.generate_batch(PROMPTS), alone)
        cached.flush(60)
        cached.reset(host=False)
        computed.take()
        tier = cached._tier
        with broken_loads(tier._worker._parts[0].engine, [tier._allocator._copy_view]) as failed:
            _same(cached.generate_batch(PROMPTS), alone)
        assert sum(failed) == WHOLE // PAGE
        assert sum(computed.take()) == TOKENS + DECODED
        cached.reset(host=False)
        _same(cached.generate_batch(PROMPTS), alone)
        assert sum(computed.take()) == TOKENS - WHOLE + DECODED
        _idle(cached)


def test_a_storage_that_goes_away_is_one_without_hits(llama: Any, alone: list[Any]) -> None:
    backend = MemoryBackend()
    with _cached(llama, backend, settings={"storage_timeout": 1.0}) as cached:
        _same(cached.generate_batch(PROMPTS), alone)
        assert cached.flush(60)
        cached.reset()
        running = threading.Event()
        get = backend.get

        def gone(batch: Any) -> Any:
            backend.faults = Faults(dict.fromkeys(Fault, 0.0) | {Fault.DOWN: 1.0})
            running.set()
            return get(batch)

        backend.get = gone  # type: ignore[method-assign]
        _same(cached.generate_batch(PROMPTS), alone)
        assert running.is_set()
        cached.reset()
        _same(cached.generate_batch(PROMPTS), alone)
        assert "storage_hit_tokens" not in cached.stats()
        _idle(cached)


def test_many_requests_on_a_small_device(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there is room for, with prefixes that they share: some are preempted, and come back."""
    stems = [text(10 + number, 48) for number in range(3)]
    prompts = [text(20 + number, 5 + 7 * number, after=stems[number % 3]) for number in range(9)]
    answer = {"max_new_tokens": 40, "do_sample": False}
    expected = [llama.generate(prompt, **answer)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    preempted: list[str] = []
    again = RequestState.create_equivalent_initial_request

    def counted(state: Any) -> Any:
        preempted.append(state.request_id)
        return again(state)

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", counted)
    with _cached(llama, tmp_path, num_blocks=24, settings={"hicache_ratio": 1.0}) as cached:
        for _ in range(2):
            got = cached.generate_batch([prompt[0].tolist() for prompt in prompts], max_new_tokens=40)
            assert [each.generated_tokens for each in got.values()] == expected
        assert preempted
        assert cached.stats()["evicted_pages"] > 0  # the host is too small as well
        assert cached.stats()["storage_hit_tokens"] > 0
        _idle(cached)


def test_requests_that_come_one_by_one_and_are_aborted(llama: Any, alone: list[Any]) -> None:
    with PrefixCache(llama, num_pages=8) as one, _cached(llama) as cached:
        with cached.running() as manager:
            with pytest.raises(BusyError):
                cached.reset()
            with pytest.raises(BusyError, match="the model serves batches"):
                PrefixCache(llama, num_pages=8)
            with pytest.raises(BusyError, match="the model serves batches"):
                one.begin(PROMPTS[0])
            names = [manager.add_request(prompt, max_new_tokens=ANSWER) for prompt in PROMPTS]
            long = manager.add_request(PROMPTS[0][:40], max_new_tokens=400, streaming=True)
            answers: dict[str, Any] = {}
            for result in manager:
                if result.request_id == long:
                    manager.cancel_request(long)
                else:
                    answers[result.request_id] = result
                if len(answers) == len(PROMPTS):
                    break
            _same({name: answers[name] for name in names}, alone)
        _idle(cached)
        # Stopped in the middle of it.
        with cached.running() as manager:
            manager.add_request(PROMPTS[1], max_new_tokens=400, streaming=True)
            next(iter(manager))
            manager.stop(block=True, hard_stop=True, keep_for_next_session=True)
        assert cached.usage()["requests"] == 0
        _same(cached.generate_batch(PROMPTS), alone)
        _idle(cached)


def test_no_hit_across_namespaces(llama: Any, alone: list[Any], computed: Computed) -> None:
    spaces: list[dict[str, str]] = [{}, {"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "a"}]
    with _cached(llama) as cached:
        for found in (0, WHOLE):
            for space in spaces:
                computed.take()
                _same(cached.generate_batch(PROMPTS, **space), alone)
                assert sum(computed.take()) == TOKENS - found + DECODED
                cached.flush(60)


def test_an_adapter_is_a_namespace(alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    weight = model.model.layers[0].self_attn.k_proj.weight
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    with _cached(model) as cached:
        _same(cached.generate_batch(PROMPTS), alone)
        with torch.no_grad():
            weight += change
        monkeypatch.setattr(model, "_hf_peft_config_loaded", True, raising=False)
        with pytest.raises(ArgumentError, match="extra_key must name the adapter"):
            cached.generate_batch(PROMPTS)
        other = [model.generate(torch.tensor([prompt]), max_new_tokens=ANSWER) for prompt in PROMPTS]
        got = cached.generate_batch(PROMPTS, extra_key="adapter")
        for tokens, each, bare in zip(other, got.values(), alone, strict=True):
            assert each.generated_tokens == tokens[0, -ANSWER:].tolist()
            assert each.generated_tokens != bare.generated_tokens


def test_several_answers_of_one_prompt(llama: Any, alone: list[Any]) -> None:
    # Of the one token that is always the likeliest, so that all answers are equal.
    config = transformers.GenerationConfig(
        max_new_tokens=ANSWER, do_sample=True, top_k=1, eos_token_id=-1, num_return_sequences=3
    )
    with _cached(llama, settings={"generation_config": config}) as cached:
        for _ in range(2):
            got = cached.generate_batch(PROMPTS)
            expected = [each.generated_tokens for each in alone for _ in range(3)]
            assert [each.generated_tokens for each in got.values()] == expected
            cached.flush(60)
            cached.reset(host=False)
        assert cached.stats()["host_hit_tokens"] == WHOLE
        _idle(cached)


def test_another_family_and_another_attention() -> None:
    model = tiny("qwen2")
    model.set_attn_implementation("eager")  # which is another one in batches
    with _cached(model) as cached:
        assert model.config._attn_implementation == "eager"
        first = cached.generate_batch(PROMPTS)
        assert model.config._attn_implementation == "eager"
        cached.flush(60)
        cached.reset(host=False)
        _same(cached.generate_batch(PROMPTS), list(first.values()))
        assert cached.stats()["host_hit_tokens"] == WHOLE
    for prompt, each in zip(PROMPTS, first.values(), strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False)
        assert each.generated_tokens == expected[0, -ANSWER:].tolist()


def test_blocks_of_two_versions_of_the_weights_are_apart(
    llama: Any, computed: Computed, tmp_path: Path
) -> None:
    with _cached(llama, tmp_path) as cached:
        cached.generate_batch(PROMPTS)
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    theirs = Computed(other)
    with _cached(other, tmp_path) as cached:
        theirs.take()
        cached.generate_batch(PROMPTS)
        assert sum(theirs.take()) == TOKENS + DECODED


# What is refused


def test_settings_that_are_wrong(llama: Any) -> None:
    for settings, message in (
        ({"hicache_sise": 1}, "settings has no setting 'hicache_sise', allowed are: copy_blocks"),
        ({"prefetch_threshold": "auto"}, "prefetch_threshold must be an integer >= 0, not 'auto'"),
        ({"hicache_size": -1}, "hicache_size must be a number > 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            _cached(llama, settings=settings)
    for config, message in (
        (
            {"page_size": 512},
            r"page_size of continuous_batching_config must be in 1\.\.256 for the cache, not 512",
        ),
        ({"allow_block_sharing": False}, "allow_block_sharing of continuous_batching_config must be True"),
    ):
        with pytest.raises(ArgumentError, match=message):
            _cached(llama, **config)
    with pytest.raises(ArgumentError, match="storage must be a URL, a folder's path or a Backend, not 5"):
        _cached(llama, 5)
    with pytest.raises(StorageError, match="nowhere"):
        _cached(llama, "nowhere://x")
    with _cached(llama) as cached:
        for name in ("generation_config", "continuous_batching_config", "persistent_manager"):
            with pytest.raises(ArgumentError, match=f"{name} can not be given for one call"):
                cached.generate_batch(PROMPTS, **{name: None})
    for call in (cached.flush, cached.reset, lambda: cached.generate_batch(PROMPTS)):
        with pytest.raises(ClosedError):
            call()
    cached.close()


def test_a_model_with_a_sliding_window_is_refused() -> None:
    with pytest.raises(ArgumentError, match="do not keep all keys and values"):
        _cached(tiny("mistral"))


def test_another_version_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "_get_waiting_candidates")
    monkeypatch.setattr(Scheduler, "add_waiting_request", lambda self, request: None)
    with pytest.raises(ArgumentError) as caught:
        _cached(llama)
    who, differences = str(caught.value).split(": ")
    assert who == (
        f"transformers {transformers.__version__} has another continuous batching than the one that "
        "unified-cache knows, that of 5.24"
    )
    assert differences.split("; ") == [
        "scheduler.Scheduler.add_waiting_request takes no state",
        "there is no scheduler.Scheduler._get_waiting_candidates",
    ]


def test_a_manager_of_the_model_s_own_is_left_alone(llama: Any, alone: list[Any]) -> None:
    own = object()
    llama._cached_continuous_batching_manager = own
    try:
        with _cached(llama) as cached:
            _same(cached.generate_batch(PROMPTS), alone)
        assert llama._cached_continuous_batching_manager is own
    finally:
        del llama._cached_continuous_batching_manager


def test_no_advice_for_each_call(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ContinuousBatchingLogger")
    logger.addHandler(caplog.handler)
    try:
        with _cached(llama) as cached:
            cached.generate_batch(PROMPTS)
    finally:
        logger.removeHandler(caplog.handler)
    assert "persistent_manager" not in caplog.text


def test_blocks_are_not_written_anew_while_they_are_saved(llama: Any, computed: Computed) -> None:
    """Saves that take for ever, as long as nobody waits for one."""
    others = [text(70 + number, 100)[0].tolist() for number in range(3)]
    with _cached(llama, num_blocks=16) as cached:
        worker = cached._tier._worker
        engine, before_step, go_on = worker._parts[0].engine, worker.before_step, threading.Event()
        waited: list[int] = []

        def slow(handle: Any, *rest: Any) -> None:
            assert go_on.wait(60)
            type(engine)._copy(engine, handle, *rest)

        def noted(step: Any) -> None:
            if step.wait:
                waited.extend(step.wait)
                go_on.set()
            before_step(step)

        engine._copy, worker.before_step = slow, noted
        expected = cached.generate_batch(PROMPTS[:1])
        assert not waited
        for other in others:  # they need the blocks of the first one
            cached.generate_batch([other])
        assert waited
        go_on.set()
        cached.flush(60)
        cached.reset(host=False)
        computed.take()
        _same(cached.generate_batch(PROMPTS[:1]), list(expected.values()))
        assert computed.take()[0] == 4
        _idle(cached)


@pytest.mark.parametrize("seed", range(2))
def test_random_use(llama: Any, seed: int) -> None:
    """Whatever is asked and cancelled, whatever fails: the answers are those of the model alone."""
    chance = random.Random(seed)
    reference = tiny("llama")  # of its own: a model that serves batches is not to be asked by another thread
    stems = [text(100 + number, chance.choice([20, 48, 64, 90])) for number in range(3)]
    backend = MemoryBackend(faults=Faults({Fault.MISS: 0.05, Fault.ERROR: 0.05, Fault.CORRUPT: 0.05}, seed))
    settings = {
        "hicache_ratio": chance.choice([0.5, 1.0, 2.0]),
        "prefetch_policy": chance.choice(["best_effort", "timeout", "wait_complete"]),
    }
    sizes = {"num_blocks": chance.choice([18, 24]), "max_batch_tokens": chance.choice([32, 64])}

    def prompt() -> list[int]:
        stem = chance.choice(stems)
        front = stem[:, : chance.randrange(1, stem.shape[1] + 1)]
        tokens: list[int] = text(chance.randrange(5), chance.randrange(1, 20), after=front)[0].tolist()
        return tokens

    def answer(tokens: list[int], count: int) -> list[int]:
        got = reference.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
        return [int(token) for token in got[0, len(tokens) :]]

    with _cached(llama, backend, settings=settings, **sizes) as cached:
        engine = cached._tier._worker._parts[0].engine
        for _ in range(6):
            count, prompts = chance.choice([4, 8, 16]), [prompt() for _ in range(chance.randrange(1, 7))]
            with contextlib.ExitStack() as stack:
                if chance.random() < 0.3:
                    stack.enter_context(broken_loads(engine, [cached._tier._allocator._copy_view]))
                if chance.random() < 0.6:
                    got = cached.generate_batch(prompts, max_new_tokens=count).values()
                    answers = [each.generated_tokens for each in got]
                    assert answers == [answer(tokens, count) for tokens in prompts]
                else:
                    manager = stack.enter_context(cached.running())
                    names = {manager.add_request(tokens, max_new_tokens=count): tokens for tokens in prompts}
                    wanted = {name for name in names if chance.random() < 0.6}
                    for name in names:
                        if name not in wanted:
                            manager.cancel_request(name)
                    for result in manager if wanted else ():
                        assert result.generated_tokens == answer(names[result.request_id], count)
                        wanted.discard(result.request_id)
                        if not wanted:
                            break
            if chance.random() < 0.3:
                cached.flush(60)
            if chance.random() < 0.3:
                cached.reset(host=chance.random() < 0.5)
        _idle(cached)
