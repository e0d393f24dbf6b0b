"""Models made on the spot: a Llama of 4 layers with 2 KV heads, adapters of it, a Gemma, one with MLA."""

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
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )


def make_lora(folder: str | Path, seed: int) -> None:
    """An adapter of it that changes its answers."""
    import json

    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, out in (("q_proj", 256), ("v_proj", 128)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.2
            weights[f"{stem}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.2
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(weights, Path(folder) / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "llama",
    }
    (Path(folder) / "adapter_config.json").write_text(json.dumps(config))


def make_gemma(folder: str | Path, tokenizer_of: str | Path) -> None:
    """A model with sliding windows in some layers."""
    import shutil

    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    for file in Path(tokenizer_of).glob("tokenizer*"):
        shutil.copy(file, folder)


def make_mla(folder: str | Path, tokenizer_of: str | Path) -> None:
    """A model with MLA, without experts."""
    import shutil

    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        head_dim=64,
        n_group=1,
        topk_group=1,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    DeepseekV2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    for file in Path(tokenizer_of).glob("tokenizer*"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    to = Path(sys.argv[1])
    make(to / "llama")
    make_lora(to / "one", 1)
    make_lora(to / "two", 2)
    make_gemma(to / "gemma", to / "llama")
    make_mla(to / "mla", to / "llama")
