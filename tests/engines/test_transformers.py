"""Models of transformers on the pages of a pool: what comes out is what they give without."""

import inspect
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from unified_cache.demo.model import HEAD_DIM, KV_HEADS, VOCABULARY, ModelSize, make_model
from unified_cache.engines.transformers import PagedModel, generate_uncached
from unified_cache.errors import ArgumentError
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


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def test_the_reference_is_what_the_library_generates(model: Any) -> None:
    prompt = text(1, 50)
    ids = torch.tensor([prompt])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False)
    ours = generate_uncached(model, prompt, ANSWER)
    assert ours.tokens == theirs[0, len(prompt) :].tolist()
    assert 0 < ours.ttft_seconds <= ours.seconds
    assert len(ours.logprobs) == len(ours.margins) == ANSWER
    assert max(ours.logprobs) <= 0 <= min(ours.margins)


def greedily(model: Any, pool: MhaDevicePool, pages: np.ndarray, prompt: list[int], parts: int) -> list[int]:
    """An answer of a `PagedModel` that computes the prompt in so many parts."""
    paged = PagedModel(model, pool)
    for part in np.array_split(np.arange(len(prompt)), parts):
        answer = [paged.compute([prompt[at] for at in part], pages, int(part[0]))]
    while len(answer) < ANSWER:
        answer.append(paged.compute(answer[-1:], pages, len(prompt) + len(answer) - 1))
    return answer


def make_pool(pages: int) -> MhaDevicePool:
    return MhaDevicePool(pages, PAGE, 2, KV_HEADS, HEAD_DIM)


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_what_was_computed_before_comes_from_pages(model: Any, parts: int) -> None:
    prompt, pool = text(2, 60), make_pool(8)
    pages = np.array([7, 0, 5, 2, 6], np.uint32)
    assert greedily(model, pool, pages, prompt, parts) == generate_uncached(model, prompt, ANSWER).tokens
    written = pool.k(1)[pages.astype(np.int64)].flatten(0, 1).any(dim=(1, 2))
    assert written.tolist() == [True] * (60 + ANSWER - 1) + [False] * (20 - ANSWER + 1)
    assert not pool.k(1)[[1, 3, 4]].any()


def test_what_is_read_is_what_the_model_computes_with(model: Any) -> None:
    """Wrong bytes must change the answer, or the test above would prove nothing."""
    prompt, pool, pages = text(2, 60), make_pool(5), np.arange(5, dtype=np.uint32)
    paged = PagedModel(model, pool)
    right = paged.compute(prompt, pages, 0)
    pool.data.neg_()
    assert paged.compute(prompt[-1:], pages, len(prompt) - 1) != right


def test_arguments_that_can_not_be_used(model: Any) -> None:
    for prompt, count in (([], 1), ([1], 0), ([1], -1)):
        with pytest.raises(ArgumentError):
            generate_uncached(model, prompt, count)


def test_a_pool_that_does_not_fit_the_model_is_refused(model: Any) -> None:
    fitting = {"layers": 2, "heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": torch.float32}
    for change in ({"layers": 3}, {"heads": 8}, {"head_dim": 32}, {"dtype": torch.bfloat16}):
        pool = MhaDevicePool(4, PAGE, **(fitting | change))
        with pytest.raises(ArgumentError, match="pool"):
            PagedModel(model, pool)


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
    with pytest.raises(ArgumentError, match="keep all"):
        PagedModel(model, MhaDevicePool(4, PAGE, 1, 2, 16))


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
    prompt, pages = text(27, 60), np.arange(5, dtype=np.uint32)
    expected = generate_uncached(model, prompt, ANSWER).tokens
    assert generate_uncached(Older(model), prompt, ANSWER).tokens == expected
    assert greedily(Older(model), make_pool(5), pages, prompt, 2) == expected
