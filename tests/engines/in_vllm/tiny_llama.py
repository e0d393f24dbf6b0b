"""A Llama made on the spot: 4 layers, 2 KV heads of 64, whose answers depend on the prompt."""

from __future__ import annotations

import sys
from pathlib import Path


def make(folder: str | Path, *, layers: int = 4) -> None:
    """Write it to a folder, with a tokenizer of 512 tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.2,  # large, so that what is read from the cache decides
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["<s>", "</s>", *alphabet]
    vocabulary += [f"<extra {at}>" for at in range(512 - len(vocabulary))]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1])
