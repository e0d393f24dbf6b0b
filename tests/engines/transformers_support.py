"""Small models, and what is asked of them, for the tests inside `transformers`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from unified_cache.copies.engine import CopyHandle
from unified_cache.demo.model import VOCABULARY, ModelSize, make_model

PAGE = 16
ANSWER = 6
# Storage and copies of a few tokens are used too, and a request waits for whatever is stored.
SMALL: dict[str, Any] = {
    "page_size": PAGE,
    "load_back_threshold": 1,
    "prefetch_threshold": 1,
    "prefetch_policy": "wait_complete",
}
_OF_ALL = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Weights as small as usual would give every prompt nearly the same answer.
    "initializer_range": 0.2,
}
FAMILIES = ("llama", "qwen2", "gpt2", "deepseek")


def tiny(family: str, seed: int = 5) -> Any:
    """A causal model with random weights, float32, for texts of 512 tokens."""
    if family == "llama":
        return make_model(ModelSize(layers=2, hidden=64, intermediate=128), seed, longest=512, device="cpu")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    if family == "qwen2":
        config = transformers.Qwen2Config(num_key_value_heads=2, **sizes, **_OF_ALL)
        kind = transformers.Qwen2ForCausalLM
    elif family == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=512, **_OF_ALL)
        kind = transformers.GPT2LMHeadModel
    elif family == "deepseek":
        config = transformers.DeepseekV3Config(
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            **sizes,
            **_OF_ALL,
        )
        kind = transformers.DeepseekV3ForCausalLM
    else:
        assert family == "mistral"
        config = transformers.MistralConfig(num_key_value_heads=2, sliding_window=8, **sizes, **_OF_ALL)
        kind = transformers.MistralForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval()


def text(seed: int, length: int, *, after: torch.Tensor | None = None) -> torch.Tensor:
    """(1, length) random tokens, after others."""
    new = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    return new if after is None else torch.cat((after, new), 1)


class Computed:
    """Counts the tokens that really go through the model, where they are embedded."""

    def __init__(self, model: Any) -> None:
        self.forwards: list[int] = []
        model.get_input_embeddings().register_forward_pre_hook(
            lambda module, args: self.forwards.append(args[0].numel())
        )

    def take(self) -> list[int]:
        """Tokens of each forward since the last call."""
        forwards, self.forwards[:] = list(self.forwards), []
        return forwards


@contextlib.contextmanager
def broken_loads(engine: Any, planes: list[torch.Tensor]) -> Iterator[list[int]]:
    """Copies from host to device leave garbage and end with an error; yields the pages that they had."""
    pages: list[int] = []

    def copy(handle: CopyHandle, *rest: Any) -> None:
        if handle.direction != "load":
            type(engine)._copy(engine, handle, *rest)
            return
        pages.append(len(handle.device_pages))
        for plane in planes:
            plane[handle.device_pages.astype("int64")] = 7
        raise OSError("injected: the copy ends half-way")

    engine._copy = copy
    try:
        yield pages
    finally:
        del engine._copy


def batch_settings(**config: Any) -> dict[str, Any]:
    """Of a `BatchPrefixCache` with blocks of `PAGE` tokens."""
    settings = {name: value for name, value in SMALL.items() if name != "page_size"}
    sizes = {"page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 128, "return_logprobs": True} | config
    return settings | {
        "generation_config": transformers.GenerationConfig(
            max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1
        ),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(**sizes),
    }
