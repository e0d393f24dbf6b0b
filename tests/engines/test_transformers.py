"""A real model through the cache: what comes out is what the model gives without one."""

import inspect
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from unified_cache import CacheConfig, UnifiedCache
from unified_cache.demo.model import HEAD_DIM, KV_HEADS, VOCABULARY, ModelSize, make_model
from unified_cache.demo.workload import NEAR_TIE
from unified_cache.engines.transformers import Generation, PagedRunner, generate_uncached
from unified_cache.errors import ArgumentError, CapacityError
from unified_cache.pools.device import MhaDevicePool

PAGE = 16
ANSWER = 6


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    # One thread: the model is tiny, and the machine may have other work.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_model(ModelSize(layers=2, hidden=64, intermediate=128), seed=5, longest=512, device="cpu")
    torch.set_num_threads(threads)


class Server:
    """A cache, its pool and a runner; counts what the model was asked to compute."""

    def __init__(self, model: Any, pages: int, **settings: Any) -> None:
        self.model = model
        self.pool = MhaDevicePool(pages, PAGE, 2, KV_HEADS, HEAD_DIM)
        defaults: dict[str, Any] = {
            "write_policy": None,
            "prefetch_policy": "wait_complete",
            "model": "test",
        }
        self.cache = UnifiedCache(CacheConfig(page_size=PAGE, **(defaults | settings)), self.pool)
        self.runner = PagedRunner(model, self.cache, self.pool)

    def ask(self, prompt: list[int]) -> Generation:
        """Answer, check against the model alone, and check that nothing is held on to."""
        expected = generate_uncached(self.model, prompt, ANSWER)
        assert min(expected.margins) > NEAR_TIE, "take another seed: rounding could decide this answer"
        got = self.runner.generate(prompt, ANSWER)
        assert got.tokens == expected.tokens
        self.check()
        return got

    def check(self) -> None:
        self.cache.flush()
        usage = self.cache.usage()
        assert usage["requests"] == 0
        assert usage["device_free_pages"] + usage["device_tree_pages"] == usage["device_pages"]
        assert self.cache.tree.protected_tokens == 0
        self.cache.tree.check_invariants()


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def hits(generation: Generation) -> tuple[int, int, int]:
    return generation.device_hit_tokens, generation.host_hit_tokens, generation.storage_hit_tokens


def test_the_reference_is_what_the_library_generates(model: Any) -> None:
    prompt = text(1, 50)
    ids = torch.tensor([prompt])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False)
    ours = generate_uncached(model, prompt, ANSWER)
    assert ours.tokens == theirs[0, len(prompt) :].tolist()
    assert 0 < ours.ttft_seconds <= ours.seconds
    assert hits(ours) == (0, 0, 0)


def test_prompts_that_share_a_prefix(model: Any) -> None:
    server = Server(model, 64)
    shared = text(2, 70)
    assert hits(server.ask(shared + text(3, 30))) == (0, 0, 0)
    assert hits(server.ask(shared + text(4, 45))) == (64, 0, 0)
    assert hits(server.ask(shared[:40] + text(5, 45))) == (32, 0, 0)
    assert hits(server.ask(text(6, 45))) == (0, 0, 0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_the_same_prompt_again_leaves_a_token_to_compute(model: Any, length: int) -> None:
    server = Server(model, 16)
    prompt = text(40 + length, length)
    first, second = server.ask(prompt), server.ask(prompt)
    assert hits(first) == (0, 0, 0)
    assert hits(second) == ((length - 1) // PAGE * PAGE, 0, 0)
    assert first.tokens == second.tokens


def test_the_next_turn_hits_the_answer_before(model: Any) -> None:
    server = Server(model, 32)
    prompt = text(8, 28)
    answer = server.ask(prompt).tokens
    assert len(prompt + answer) == 34
    # Two whole pages: the second ends within the answer.
    assert hits(server.ask(prompt + answer + text(9, 20))) == (32, 0, 0)


def test_what_the_device_had_no_room_for_comes_from_host(model: Any) -> None:
    server = Server(model, 12, write_policy="write_through", hicache_ratio=4.0)
    prompts = [text(10 + i, 100) for i in range(3)]
    for prompt in prompts:
        assert hits(server.ask(prompt)) == (0, 0, 0)
    device, host, storage = hits(server.ask(prompts[0]))
    assert host > 0
    assert (device + host, storage) == (96, 0)


def test_what_was_stored_answers_after_a_restart(model: Any, tmp_path: Path) -> None:
    settings = {"write_policy": "write_through", "storage": str(tmp_path), "prefetch_threshold": PAGE}
    prompt = text(28, 100)
    before = Server(model, 16, **settings)
    before.ask(prompt)
    before.cache.close()
    after = Server(model, 16, **settings)
    assert hits(after.ask(prompt)) == (0, 0, 96)
    assert hits(after.ask(prompt)) == (96, 0, 0)
    after.cache.close()


def test_what_is_hit_is_what_the_model_reads(model: Any) -> None:
    """A hit of wrong bytes must change the answer, or the tests above would prove nothing."""
    server = Server(model, 16)
    prompt = text(21, 100)
    right = server.ask(prompt)
    server.pool.data.neg_()
    wrong = server.runner.generate(prompt, ANSWER)
    assert wrong.device_hit_tokens == 96
    assert wrong.tokens != right.tokens


def test_only_the_rest_is_computed(model: Any) -> None:
    server = Server(model, 16)
    prompt = text(22, 100)
    server.ask(prompt)
    computed: list[int] = []
    inner = model.model.embed_tokens
    handle = inner.register_forward_pre_hook(lambda module, ids: computed.append(ids[0].shape[1]))
    try:
        server.runner.generate(prompt, ANSWER)
    finally:
        handle.remove()
    assert computed == [4] + [1] * (ANSWER - 1)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [0, 1, ANSWER - 1])
def test_a_forward_that_fails_leaves_nothing_behind(
    model: Any, error: type[BaseException], call: int
) -> None:
    server = Server(model, 16, write_policy="write_through")
    prompt = text(23, 60)
    calls = 0

    def fail(module: Any, ids: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > call:
            raise error("on purpose")

    handle = model.model.embed_tokens.register_forward_pre_hook(fail)
    try:
        with pytest.raises(error, match="on purpose"):
            server.runner.generate(prompt, ANSWER)
    finally:
        handle.remove()
    server.check()
    assert server.cache.stats()["requests_aborted"] == 1
    # What the prefill gave to the tree before the failure is good.
    assert hits(server.ask(prompt)) == (48 if call else 0, 0, 0)


def test_a_prompt_that_does_not_fit_is_refused_and_the_next_is_served(model: Any) -> None:
    server = Server(model, 4)
    with pytest.raises(CapacityError):
        server.runner.generate(text(24, 100), ANSWER)
    server.check()
    # This one fits, but its answer does not.
    with pytest.raises(CapacityError):
        server.runner.generate(text(25, 62), ANSWER)
    server.check()
    server.ask(text(26, 40))


def test_arguments_that_can_not_be_used(model: Any) -> None:
    server = Server(model, 16)
    for prompt, count in (([], 1), ([1], 0), ([1], -1)):
        with pytest.raises(ArgumentError):
            server.runner.generate(prompt, count)
        with pytest.raises(ArgumentError):
            generate_uncached(model, prompt, count)
    with pytest.raises(ArgumentError):
        server.runner.generate([-1, 2, 3], 1)
    server.check()


def test_a_pool_that_does_not_fit_the_model_is_refused(model: Any) -> None:
    fitting = {"layers": 2, "heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": torch.float32}
    for change in ({"layers": 3}, {"heads": 8}, {"head_dim": 32}, {"dtype": torch.bfloat16}):
        pool = MhaDevicePool(4, PAGE, **(fitting | change))
        cache = UnifiedCache(CacheConfig(page_size=PAGE, write_policy=None), pool)
        with pytest.raises(ArgumentError, match="pool"):
            PagedRunner(model, cache, pool)


def test_a_model_with_a_sliding_window_is_refused() -> None:
    config = MistralConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=8,
    )
    model = MistralForCausalLM(config)
    pool = MhaDevicePool(4, PAGE, 1, 2, 16)
    cache = UnifiedCache(CacheConfig(page_size=PAGE, write_policy=None), pool)
    with pytest.raises(ArgumentError, match="keep all"):
        PagedRunner(model, cache, pool)


class Older:
    """The model as earlier versions of the library call it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.config, self.device, self.dtype = model.config, model.device, model.dtype

    def forward(self, input_ids: Any, past_key_values: Any = None, **rest: Any) -> Any:
        return self._model(input_ids, **{self._name: past_key_values}, **rest)

    __call__ = forward


def test_the_argument_s_older_name(model: Any) -> None:
    server = Server(model, 16)
    runner = PagedRunner(Older(model), server.cache, server.pool)
    prompt = text(27, 60)
    expected = generate_uncached(model, prompt, ANSWER).tokens
    assert runner.generate(prompt, ANSWER).tokens == expected
    again = runner.generate(prompt, ANSWER)
    assert (again.tokens, again.device_hit_tokens) == (expected, 48)
