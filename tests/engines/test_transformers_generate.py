"""`PrefixCache` under `generate`: what comes out is what the model gives alone, and what is cached is not
computed."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from tests.engines.stored_bytes import change_stored
from tests.engines.transformers_support import (
    ANSWER,
    FAMILIES,
    PAGE,
    SMALL,
    Computed,
    broken_loads,
    text,
    tiny,
)
from unified_cache.engines import transformers_model
from unified_cache.engines.transformers import PrefixCache, PrefixKV
from unified_cache.engines.transformers_model import fingerprint, kv_shape
from unified_cache.errors import ArgumentError, BusyError, ClosedError, LockError, MissingDependencyError
from unified_cache.storage.backends.memory import Fault, Faults, MemoryBackend

pytestmark = pytest.mark.parallel

GREEDY: dict[str, Any] = {
    "max_new_tokens": ANSWER,
    "do_sample": False,
    "output_scores": True,
    "return_dict_in_generate": True,
}
PROMPT = text(1, 100)
_ARGUMENT = transformers_model.kv_argument(transformers.LlamaForCausalLM)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


@pytest.fixture
def computed(llama: Any) -> Computed:
    return Computed(llama)


def _cached(model: Any, /, storage: Any = None, **settings: Any) -> PrefixCache:
    return PrefixCache(model, storage, **({"num_pages": 64} | SMALL | settings))


def _same(got: Any, expected: Any) -> None:
    """Equal tokens, and log-probabilities that are nearly so."""
    assert got.sequences.tolist() == expected.sequences.tolist()
    for mine, theirs in zip(got.scores, expected.scores, strict=True):
        assert float((mine.log_softmax(-1) - theirs.log_softmax(-1)).abs().max()) < 1e-3


def _idle(cached: PrefixCache) -> None:
    """Nothing is held: every page is free or in the tree, and all of the tree may go."""
    assert cached.flush(60)
    usage = cached.cache.usage()
    assert usage["requests"] == 0
    assert usage["device_free_pages"] + usage["device_tree_pages"] == usage["device_pages"]
    assert usage["host_free_pages"] + usage["host_tree_pages"] == usage["host_pages"]
    assert cached.cache.tree.protected_tokens == 0
    cached.cache.tree.check_invariants()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tier_answers_as_the_model_alone(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    expected = model.generate(PROMPT, **GREEDY)
    with _cached(model, tmp_path) as cached:
        computed = Computed(model)
        for found in ("nothing", "device", "host", "storage"):
            if found == "host":
                assert cached.flush(60)
                cached.cache.evict(64)
                assert cached.cache.usage()["device_tree_pages"] == 0
            elif found == "storage":
                cached.cache.reset()
            _same(cached.generate(PROMPT, **GREEDY), expected)
            first = 100 if found == "nothing" else 100 - 96
            assert computed.take() == [first] + [1] * (ANSWER - 1)
        stats = cached.cache.stats()
        assert [stats[f"hit_tokens_{tier}"] for tier in ("device", "host", "storage")] == [96, 96, 96]
        _idle(cached)
    model.generate(PROMPT, **GREEDY)
    assert computed.take()[0] == 100  # nothing of it is left in the model


@pytest.mark.parametrize("mend_checksum", [True, False])
def test_stored_bytes_are_what_the_model_reads_and_damaged_ones_are_not(
    llama: Any, computed: Computed, tmp_path: Path, mend_checksum: bool
) -> None:
    """If wrong bytes that nobody can tell did not change the answer, no test above would say anything."""
    with _cached(llama, tmp_path) as cached:
        expected = cached.generate(PROMPT, **GREEDY)
    change_stored(tmp_path, mend_checksum=mend_checksum)
    with _cached(llama, tmp_path) as cached:
        computed.take()
        got = cached.generate(PROMPT, **GREEDY)
        if mend_checksum:
            assert computed.take()[0] == 4
            assert got.sequences.tolist() != expected.sequences.tolist()
        else:
            assert computed.take()[0] == 100
            _same(got, expected)
            assert cached.cache.stats()["storage_corrupt_pages"] > 0


def test_loads_that_fail_are_computed(llama: Any, computed: Computed) -> None:
    expected = llama.generate(PROMPT, **GREEDY)
    with _cached(llama) as cached:
        cached.generate(PROMPT, **GREEDY)
        cached.flush()
        cached.cache.evict(64)
        computed.take()
        with broken_loads(cached.cache._copies, list(cached.cache.device_pool.planes.tensors)) as failed:
            _same(cached.generate(PROMPT, **GREEDY), expected)
        assert failed
        assert computed.take()[0] == 100
        # The next request may use again what there is.
        _same(cached.generate(PROMPT, **GREEDY), expected)
        _idle(cached)
        _same(cached.generate(PROMPT, **GREEDY), expected)
        computed.take()
        _same(cached.generate(PROMPT, **GREEDY), expected)
        assert computed.take()[0] == 4
        _idle(cached)


def test_a_storage_that_goes_away_is_one_without_hits(llama: Any) -> None:
    backend = MemoryBackend()
    prompts = [text(20 + number, 60) for number in range(4)]
    expected = [llama.generate(prompt, **GREEDY) for prompt in prompts]
    with _cached(llama, backend, storage_timeout=1.0) as cached:
        for number, (prompt, answer) in enumerate(zip(prompts * 2, expected * 2, strict=True)):
            if number == 2:
                backend.faults = Faults(dict.fromkeys(Fault, 0.0) | {Fault.DOWN: 1.0})
            if number == 4:
                cached.cache.reset()
            _same(cached.generate(prompt, **GREEDY), answer)
        assert sum(backend.calls.values()) > 2
        assert cached.cache.stats()["hit_tokens_storage"] == 0
        _idle(cached)


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends a `generate` with an exception, after some tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt("on purpose")
        return torch.zeros(1, dtype=torch.bool)


def test_several_threads_share_prefixes_on_a_small_device(llama: Any, tmp_path: Path) -> None:
    shared = text(30, 64)
    prompts = [
        text(31 + number, 20 + number, after=shared[:, : 32 + 16 * (number % 3)]) for number in range(6)
    ]
    expected = [llama.generate(prompt, **GREEDY).sequences.tolist() for prompt in prompts]
    wrong: list[Any] = []
    with _cached(llama, tmp_path, num_pages=24, hicache_ratio=1.0) as cached:

        def serve(first: int) -> None:
            try:
                for number in range(first, first + 6):
                    prompt = prompts[number % 6]
                    if number % 3 == 0:
                        criteria = StoppingCriteriaList([_Stop(2)])
                        with pytest.raises(KeyboardInterrupt, match="on purpose"):
                            cached.generate(prompt, **GREEDY, stopping_criteria=criteria)
                    got = cached.generate(prompt, **GREEDY).sequences.tolist()
                    if got != expected[number % 6]:
                        wrong.append((number, got))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=serve, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert wrong == []
        assert cached.cache.stats()["requests_aborted"] == 8
        assert cached.cache.stats()["hit_tokens_device"] > 0
        _idle(cached)


def test_no_hit_across_namespaces(llama: Any, computed: Computed) -> None:
    expected = llama.generate(PROMPT, **GREEDY)
    spaces: list[dict[str, str]] = [{}, {"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "a"}]
    with _cached(llama) as cached:
        for found in (0, 96):
            for space in spaces:
                computed.take()
                _same(cached.generate(PROMPT, **GREEDY, **space), expected)
                assert computed.take()[0] == 100 - found


def test_an_adapter_is_a_namespace(computed: Computed, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = tiny("llama")
    weight = adapted.model.layers[0].self_attn.k_proj.weight
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    bare = adapted.generate(PROMPT, **GREEDY)
    with _cached(adapted) as cached:
        cached.generate(PROMPT, **GREEDY)
        with torch.no_grad():
            weight += change
        other = adapted.generate(PROMPT, **GREEDY)
        assert other.sequences.tolist() != bare.sequences.tolist()
        for _ in range(2):
            _same(cached.generate(PROMPT, **GREEDY, extra_key="adapter"), other)
        # As the library marks a model with adapters.
        monkeypatch.setattr(adapted, "_hf_peft_config_loaded", True, raising=False)
        with pytest.raises(ArgumentError, match="extra_key must name the adapter"):
            cached.generate(PROMPT, **GREEDY)
        _same(cached.generate(PROMPT, **GREEDY, extra_key="adapter"), other)
        _idle(cached)


def test_new_weights_find_nothing_of_the_old_ones() -> None:
    model = tiny("llama")
    computed = Computed(model)
    with _cached(model, weight_version=fingerprint(model), model="m") as cached:
        cached.generate(PROMPT, **GREEDY)
        with pytest.raises(ArgumentError, match="version must be another one"):
            cached.update_weights()
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[3, 5] += 1
        with cached.begin(PROMPT), pytest.raises(BusyError):
            cached.update_weights()
        cached.update_weights()
        computed.take()
        cached.generate(PROMPT, **GREEDY)
        assert computed.take()[0] == 100


# What generate can do


def _next_turns(cached: PrefixCache, model: Any, computed: Computed, answers: torch.Tensor) -> None:
    """Each row of an answer is found again by whoever goes on with it."""
    for number, row in enumerate(answers):
        longer = text(50 + number, 20, after=row[None])
        expected = model.generate(longer, **GREEDY)
        computed.take()
        _same(cached.generate(longer, **GREEDY), expected)
        # The last token of an answer was never computed.
        assert computed.take()[0] == longer.shape[1] - (len(row) - 1) // PAGE * PAGE


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 1.5},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": False, "prompt_lookup_num_tokens": 3},
        {"do_sample": False, "prefill_chunk_size": 40},
        {"do_sample": False, "repetition_penalty": 1.5},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_whatever_generate_does(llama: Any, computed: Computed, settings: dict[str, Any]) -> None:
    prompt = text(40, 90)
    settings = {"max_new_tokens": 12} | settings
    if "prefill_chunk_size" in settings and _ARGUMENT == "past_key_values":
        with _cached(llama) as cached, pytest.raises(ArgumentError, match="prefill_chunk_size must be None"):
            cached.generate(prompt, **settings)
        return
    torch.manual_seed(7)
    expected = llama.generate(prompt, **settings)
    with _cached(llama, num_pages=128) as cached:
        for found in (0, 80):
            torch.manual_seed(7)
            computed.take()
            got = cached.generate(prompt, **settings)
            assert got.tolist() == expected.tolist()
            rows = max(settings.get("num_beams", 1), settings.get("num_return_sequences", 1))
            first = min(90 - found, settings.get("prefill_chunk_size", 90))
            # With looking up, some tokens of the answer may be computed with the prompt.
            assert first * rows <= computed.take()[0] <= first * rows + 3
        if settings.get("num_beams", 1) == 1:
            _next_turns(cached, llama, computed, got)
        _idle(cached)


def test_an_assistant_may_draft(llama: Any, computed: Computed) -> None:
    # generate gives the model the whole prompt here, whatever its cache holds.
    assistant = tiny("llama", seed=6)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "assistant_model": assistant}
    expected = llama.generate(PROMPT, **settings)
    with _cached(llama, num_pages=128) as cached:
        for found in (0, 96):
            computed.take()
            assert cached.generate(PROMPT, **settings).tolist() == expected.tolist()
            assert computed.take()[0] <= 100 - found + 20
        _next_turns(cached, llama, computed, expected)
        _idle(cached)


def test_rows_of_one_length_go_together(llama: Any, computed: Computed) -> None:
    both = torch.cat((PROMPT, text(41, 36, after=PROMPT[:, :64])))
    expected = llama.generate(both, **GREEDY)
    with _cached(llama, num_pages=128) as cached:
        cached.generate(PROMPT, **GREEDY)
        for left in (100 - 64, 4):  # the shorter hit counts for both
            computed.take()
            _same(cached.generate(both, **GREEDY), expected)
            assert computed.take()[0] == 2 * left
        _next_turns(cached, llama, computed, expected.sequences)
        _idle(cached)


def test_a_loop_of_one_s_own(llama: Any, computed: Computed) -> None:
    expected = llama.generate(PROMPT, **GREEDY).sequences[0, 100:].tolist()
    with _cached(llama) as cached:
        for found in (0, 96, 96):
            computed.take()
            answer: list[int] = []
            with torch.inference_mode(found == 96), cached.begin(PROMPT[0]) as kv:
                assert kv.hit_length == found
                ids = PROMPT[:, kv.hit_length :]
                for _ in range(ANSWER):
                    logits = llama(ids, **kv.argument).logits
                    ids = logits[:, -1:].argmax(-1)
                    answer.append(int(ids))
            assert answer == expected
            assert computed.take()[0] == 100 - found
        _next_turns(cached, llama, computed, torch.cat((PROMPT, torch.tensor([expected])), 1))
        _idle(cached)


def test_another_row_order_and_a_crop_are_followed(llama: Any) -> None:
    both = torch.cat((PROMPT, text(41, 36, after=PROMPT[:, :64])))
    with _cached(llama, num_pages=128) as cached:
        with cached.begin(both) as kv, torch.no_grad():
            llama(both, **kv.argument)
            kv.reorder_cache(torch.tensor([1, 0]))
            kv.crop(-20)
            assert kv.tokens().tolist() == both[[1, 0], :80].tolist()
            held = copy.deepcopy(kv)
            assert type(held) is DynamicCache
            assert torch.equal(held.layers[1].keys, kv.layers[1].keys)
        for row in both:
            # What was cropped is not there, and what is there belongs to its tokens.
            longer = text(60, 30, after=row[None, :80])
            expected = llama.generate(longer, **GREEDY)
            with cached.begin(longer) as kv:
                assert kv.hit_length == 80
            _same(cached.generate(longer, **GREEDY), expected)
        _idle(cached)


def test_what_was_added_behind_its_back_is_not_kept(llama: Any) -> None:
    with _cached(llama) as cached:
        with cached.begin(PROMPT) as kv, torch.no_grad():
            llama.model(PROMPT[:, :50], **kv.argument)  # not through the model that was given
            llama(PROMPT[:, 50:], **kv.argument)
        assert cached.cache.match_prefix(PROMPT[0]).device_length == 0
        _idle(cached)
        cached.generate(PROMPT, **GREEDY)
        for call in (llama.model, llama.forward):
            with (
                pytest.raises(ArgumentError, match="must be called as it was given"),
                cached.begin(PROMPT) as kv,
            ):
                call(PROMPT, **kv.argument)
        _idle(cached)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_nothing_behind(llama: Any, error: type[BaseException]) -> None:
    with _cached(llama) as cached:
        for after in (0, 3):  # in the prompt, and in the answer
            calls = iter(range(100))

            def fail(module: Any, args: Any, calls: Iterator[int] = calls, after: int = after) -> None:
                if next(calls) == after:
                    raise error("on purpose")

            handle = llama.model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(error, match="on purpose"):
                cached.generate(PROMPT, **GREEDY)
            handle.remove()
            _idle(cached)
            # The prompt was kept as soon as it was whole.
            assert cached.cache.match_prefix(PROMPT[0]).device_length == (96 if after else 0)
        _same(cached.generate(PROMPT, **GREEDY), llama.generate(PROMPT, **GREEDY))


def test_what_has_no_room_is_computed_and_not_kept(llama: Any) -> None:
    expected = llama.generate(PROMPT, **GREEDY)
    with _cached(llama, num_pages=4) as cached:
        for _ in range(2):
            _same(cached.generate(PROMPT, **GREEDY), expected)
            _idle(cached)
        short = PROMPT[:, :40]
        for _ in range(2):
            _same(cached.generate(short, **GREEDY), llama.generate(short, **GREEDY))
        assert cached.cache.stats()["hit_tokens_device"] == 32


# What is refused


def test_what_goes_with_no_cached_prefix(llama: Any, computed: Computed) -> None:
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    with _cached(llama) as cached:
        computed.take()
        for given, message in (
            ({"attention_mask": mask}, "attention_mask must be all ones"),
            ({"pad_token_id": int(PROMPT[0, 0])}, "attention_mask must be all ones"),
            ({"cache": DynamicCache()}, "cache must not be given"),
            ({"use_cache": False}, "use_cache must not be False"),
        ):
            with pytest.raises(ArgumentError, match=message):
                cached.generate(PROMPT, **GREEDY, **given)
            assert computed.take() == []
        for ids, message in (
            (None, r"inputs must be tokens, integers \(rows, tokens\), not None"),
            (PROMPT[:, :0], r"not of shape \(1, 0\)"),
            (PROMPT[None], "not of shape"),
            (PROMPT.float(), "tokens must be one-dimensional integers"),
            (PROMPT - 600, "allowed is 0"),
        ):
            with pytest.raises(ArgumentError, match=message):
                cached.generate(ids, **GREEDY)
        for model_is_given, message in (
            ({"input_ids": text(99, 100)}, "input_ids must be the prompt"),
            ({"input_ids": PROMPT, "position_ids": torch.arange(1, 101)[None]}, "position_ids must be those"),
            ({"input_ids": PROMPT, "token_type_ids": mask}, "token_type_ids can not be given"),
            ({"inputs_embeds": torch.zeros(1, 100, 64)}, "input_ids must be given"),
        ):
            with pytest.raises(ArgumentError, match=message), cached.begin(PROMPT) as kv:
                llama(**model_is_given, **kv.argument)
        assert computed.take() == []
        _idle(cached)
        with pytest.raises(LockError, match="a PrefixKV is for one generate"):
            llama.generate(PROMPT, **GREEDY, **kv.argument)
        with pytest.raises(LockError, match="has ended before"):
            kv.finish()
        kv.abort()
    with pytest.raises(ClosedError):
        cached.generate(PROMPT, **GREEDY)


def test_a_model_in_training_or_of_another_type(llama: Any) -> None:
    model = copy.deepcopy(llama)
    with _cached(model) as cached:
        model.train()
        with pytest.raises(ArgumentError, match=r"training mode.*eval\(\)"):
            cached.generate(PROMPT, **GREEDY)
        model.eval().bfloat16()
        with pytest.raises(ArgumentError, match=r"keys in torch\.bfloat16, it was tried with torch\.float32"):
            cached.generate(PROMPT, **GREEDY)
        _idle(cached)


def test_settings_that_are_wrong(llama: Any) -> None:
    for settings, message in (
        ({"num_pages": 0}, "num_pages must be"),
        ({"num_pages": 4, "device_size": 1}, "must not be given both"),
        ({"device_size": -1}, "device_size must be a number > 0"),
        ({"device_size": 1e-6}, "device_size must be room for a page"),
        ({"page_sise": 3}, "settings must be those of CacheConfig"),
        ({"page_size": 0}, "page_size must be"),
    ):
        with pytest.raises(ArgumentError, match=message):
            PrefixCache(llama, **settings)
    assert not llama._forward_pre_hooks
    with PrefixCache(llama, device_size=0.01) as cached:
        assert cached.cache.device_pool.num_pages == 10**7 // (2 * 2 * 4 * 64 * 4 * 64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny("mistral"), r"do not keep all keys and values \(DynamicSlidingWindowLayer\)"),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=16)
            ),
            "T5ForConditionalGeneration has an encoder",
        ),
        (
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1)
            ),
            r"\(LinearAttentionLayer\)|keeps no keys and values",  # older versions try it
        ),
        (
            lambda: _with(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "rope_type 'dynamic'",
        ),
        (lambda: _with().to("meta"), "CPU or a CUDA device, not on 'meta'"),
        (lambda: torch.nn.Linear(1, 1), "must be a causal language model of transformers, not Linear"),
        (lambda: _Forward(_with().config), "computes something else of a text in two parts"),
    ],
    ids=["sliding window", "encoder", "recurrent", "rope", "device", "no model", "looks ahead"],
)
def test_models_that_can_not_be_cached_this_way(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        PrefixCache(make())
    assert "\n" not in str(caught.value)


def _with(**settings: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.5,
            **settings,
        )
    )


class _Forward(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Logits of a token that depend on how many are computed together, as where tokens look ahead."""

    def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, **{_ARGUMENT: cache}, **kwargs)
        out.logits = out.logits * torch.linspace(-1, input_ids.shape[1], out.logits.shape[-1])
        return out


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that names the version, and what it lacks."""
    monkeypatch.delattr(transformers.cache_utils, "DynamicLayer")
    assert transformers_model.__file__ is not None
    spec = importlib.util.spec_from_file_location("another", transformers_model.__file__)
    assert spec is not None
    assert spec.loader is not None
    message = f"transformers {re.escape(transformers.__version__)} is not supported.*DynamicLayer"
    with pytest.raises(MissingDependencyError, match=message) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "\n" not in str(caught.value)


class _Older(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """The cache's name as earlier versions of the library have it."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **{_ARGUMENT: past_key_values}, **kwargs)


def test_the_argument_s_older_name(llama: Any) -> None:
    model = _Older(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    with _cached(model) as cached, torch.no_grad():
        for found in (0, 96):
            with cached.begin(PROMPT) as kv:
                assert (list(kv.argument), kv.hit_length) == (["past_key_values"], found)
                got = model(PROMPT[:, found:], **kv.argument).logits[0, -1]
            assert float((got - llama(PROMPT).logits[0, -1]).abs().max()) < 1e-3


def test_what_was_computed_comes_back_bit_by_bit(llama: Any) -> None:
    model = copy.deepcopy(llama).bfloat16()
    assert kv_shape(model).dtype == torch.bfloat16
    with _cached(model) as cached, torch.no_grad():
        with cached.begin(PROMPT) as kv:
            model(PROMPT, **kv.argument)
            before = [(layer.keys.clone(), layer.values.clone()) for layer in kv.layers]
        with cached.begin(PROMPT) as again:
            assert isinstance(again, PrefixKV)
            for layer, (keys, values) in zip(again.layers, before, strict=True):
                assert torch.equal(layer.keys, keys[..., :96, :])
                assert torch.equal(layer.values, values[..., :96, :])


@pytest.mark.parametrize("seed", range(2))
def test_random_use(llama: Any, seed: int) -> None:
    """Whatever is asked in whatever order, whatever fails: the answers are those of the model alone."""
    chance = random.Random(seed)
    stems = [text(100 + number, chance.choice([20, 48, 64, 90])) for number in range(4)]
    faults = {Fault.MISS: 0.05, Fault.ERROR: 0.05, Fault.CORRUPT: 0.05}
    backend = MemoryBackend(faults=Faults(faults, seed))
    settings = {
        "num_pages": chance.choice([12, 24, 48]),
        "hicache_ratio": chance.choice([0.5, 1.0, 3.0]),
        "write_policy": chance.choice(["write_through", "write_through_selective", "write_back"]),
        "prefetch_policy": chance.choice(["best_effort", "timeout", "wait_complete"]),
    }
    with _cached(llama, backend, **settings) as cached:
        planes = list(cached.cache.device_pool.planes.tensors)
        held: list[PrefixKV] = []  # begun, and not ended

        def prompt() -> torch.Tensor:
            stem = chance.choice(stems)
            front = stem[:, : chance.randrange(1, stem.shape[1] + 1)]
            return text(chance.randrange(5), chance.randrange(1, 20), after=front)

        for number in range(30):
            ids, salt = prompt(), chance.choice([None, None, "x"])
            kind = chance.randrange(8)
            with contextlib.ExitStack() as stack:
                if chance.random() < 0.2:
                    stack.enter_context(broken_loads(cached.cache._copies, planes))
                if kind == 0:
                    held.append(cached.begin(ids, cache_salt=salt))
                elif kind == 1 and held:
                    chance.choice([PrefixKV.finish, PrefixKV.abort])(held.pop())
                elif kind == 2:
                    criteria = StoppingCriteriaList([_Stop(chance.randrange(4))])
                    with pytest.raises(KeyboardInterrupt):
                        cached.generate(ids, **GREEDY, stopping_criteria=criteria, cache_salt=salt)
                else:
                    more: dict[str, Any] = {"max_new_tokens": chance.choice([1, 4, 20]), "do_sample": False}
                    if kind == 3:
                        more["num_beams"] = 2
                    elif kind == 4:
                        ids = torch.cat((ids, torch.flip(ids, (1,)) if number % 2 else ids))
                    elif kind == 5:
                        more["prompt_lookup_num_tokens"] = 2
                    expected = llama.generate(ids, **more)
                    assert cached.generate(ids, **more, cache_salt=salt).tolist() == expected.tolist()
            if not held and chance.random() < 0.1:
                cached.cache.reset()
            if chance.random() < 0.3:
                cached.cache.evict(chance.randrange(12))
        for kv in held:
            kv.abort()
        _idle(cached)
