"""A real transformer with random weights, made on the spot."""

from dataclasses import dataclass
from typing import Any

from unified_cache._torch import torch

__all__ = ["HEADS", "HEAD_DIM", "KV_HEADS", "VOCABULARY", "ModelSize", "make_model"]

VOCABULARY = 512
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a Llama that differ between scales."""

    layers: int
    hidden: int
    intermediate: int

    @property
    def name(self) -> str:
        return f"Llama, {self.layers} layers of {self.hidden}"

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token, in float32."""
        return 2 * self.layers * KV_HEADS * HEAD_DIM * 4

    @property
    def bytes(self) -> int:
        """Weights, in float32."""
        attention = 2 * self.hidden * (HEADS + KV_HEADS) * HEAD_DIM
        layer = attention + 3 * self.hidden * self.intermediate
        return 4 * (self.layers * layer + 2 * VOCABULARY * self.hidden)


def make_model(size: ModelSize, seed: int, longest: int, device: str) -> Any:
    """A `LlamaForCausalLM` in float32 that takes prompts and answers of `longest` tokens together."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=longest,
        # Ten times the usual: weights that small would give every prompt nearly the same answer. With these,
        # one token changed at the front of a prompt changes the whole answer.
        initializer_range=0.2,
        # Weights are random, so no token means that an answer ends.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    # Seeded on the CPU, so that every device gets the same weights; the caller's random state is left alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval().to(device=device, dtype=torch.float32)
