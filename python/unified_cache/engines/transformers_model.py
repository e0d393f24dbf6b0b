"""What a model of `transformers` keeps of each token, and which models are refused, each in one line."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError, MissingDependencyError

try:
    import transformers
    from transformers import DynamicCache
except ImportError as error:
    raise MissingDependencyError(
        "this needs transformers, which can not be imported "
        f"({error}): pip install 'unified-cache[transformers]'"
    ) from None
try:
    # Caches are lists of layers since 4.54.
    from transformers.cache_utils import Cache, DynamicLayer
except ImportError as error:
    raise MissingDependencyError(
        f"transformers {transformers.__version__} is not supported, its caches have no layers ({error}): "
        "pip install 'unified-cache[transformers]'"
    ) from None

__all__ = [
    "CACHED_MANAGER",
    "Cache",
    "DynamicCache",
    "DynamicLayer",
    "KvShape",
    "fingerprint",
    "inner_model",
    "kv_argument",
    "kv_shape",
    "needs_adapter_key",
]

# Where a model's `init_continuous_batching` finds a manager in place of making one.
CACHED_MANAGER = "_cached_continuous_batching_manager"

# The rotation of a key then depends on the length of the whole text, which tokens before it do not tell.
_ROPES = ("dynamic", "longrope")

# Of a configuration, what does not change keys and values, or changes from one load to the next.
_VOLATILE = frozenset(
    (
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)


@dataclass(frozen=True, slots=True)
class KvShape:
    """What the model keeps of one token in each layer: keys (heads, key_dim) and values (heads, value_dim).

    Attributes:
        layers: layers of the model.
        heads: heads of keys and values.
        key_dim: elements of a head's key.
        value_dim: elements of a head's value; with latent attention another number.
        dtype: element type.
        device: where the model computes them.
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def inner_model(model: Any) -> Any:
    """The module whose forward `generate` calls: without what `torch.compile` or PEFT put around it."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def kv_argument(model: Any) -> str:
    """How the model's forward calls its cache: `past_key_values` has become `cache` in transformers 5."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def needs_adapter_key(model: Any) -> bool:
    """The model has adapters (LoRA and the like), so its weights alone do not say what it computes."""
    return bool(getattr(model, "_hf_peft_config_loaded", False)) or hasattr(model, "peft_config")


def kv_shape(model: Any) -> KvShape:
    """What the model keeps of a token, from two small forwards.

    Args:
        model: a causal language model of `transformers`.

    Raises:
        ArgumentError: its keys and values can not be cached by tokens alone; the message says why.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise ArgumentError(f"model must be a causal language model of transformers, not {name}")
    if getattr(config, "is_encoder_decoder", False):
        raise ArgumentError(
            f"model {name} has an encoder: what its decoder keeps depends on more than its tokens"
        )
    _check_layers(name, config)
    _check_ropes(name, config)
    device = _one_device(name, model)
    return _tried(name, model, device)


def _check_layers(name: str, config: Any) -> None:
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:
        raise ArgumentError(f"model {name} has no cache of layers: {error}") from None
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if others:
        raise ArgumentError(
            f"model {name} has layers that do not keep all keys and values ({', '.join(others)}): "
            "a prefix can not be taken up again at any page, so it can not be cached this way"
        )


def _check_ropes(name: str, config: Any) -> None:
    for rope in _ropes(config):
        if rope in _ROPES:
            raise ArgumentError(
                f"model {name} has rope_type {rope!r}: its keys depend on how long the whole text is, "
                "so a prefix of another text can not be used"
            )


def _ropes(config: Any) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(text, name, None)
        if isinstance(parameters, dict):
            # One for all layers, or one for each type of layer.
            for each in (parameters, *parameters.values()):
                if isinstance(each, dict):
                    yield str(each.get("rope_type", each.get("type", "default")))


def _one_device(name: str, model: Any) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or getattr(model, "_device_mesh", None) is not None:
        listed = ", ".join(sorted(str(device) for device in devices)) or "none"
        raise ArgumentError(
            f"model {name} must be on one device, not spread over several ({listed}) or over ranks"
        )
    device: torch.device = next(iter(devices))
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"model {name} must be on a CPU or a CUDA device, not on {str(device)!r}")
    return device


def _tried(name: str, model: Any, device: torch.device) -> KvShape:
    """Compute a few tokens at once and in two parts: both must come to the same, or no prefix is one."""
    vocabulary = int(getattr(model.config.get_text_config(decoder=True), "vocab_size", 2))
    ids = torch.arange(1, 9, device=device)[None] % max(vocabulary, 1)
    argument = kv_argument(model)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            kv = DynamicCache(config=model.config)
            whole = model(ids, use_cache=True, **{argument: DynamicCache(config=model.config)}).logits[0, -1]
            model(ids[:, :5], use_cache=True, **{argument: kv})
            parts = model(ids[:, 5:], use_cache=True, **{argument: kv}).logits[0, -1]
    except Exception as error:
        raise ArgumentError(f"model {name} can not be tried with tokens alone: {error!r}") from None
    finally:
        model.train(training)
    if any(layer.keys is None for layer in kv.layers) or len(kv.layers) == 0:
        raise ArgumentError(
            f"model {name} keeps no keys and values in its cache, so there is nothing to keep"
        )
    shapes = {
        (keys.dtype, keys.device, values.dtype, values.device, tuple(keys.shape), tuple(values.shape))
        for keys, values in ((layer.keys, layer.values) for layer in kv.layers)
    }
    if len(shapes) != 1:
        raise ArgumentError(f"model {name} keeps something else in some layers than in others: {shapes}")
    ((dtype, at, *also, keys, values),) = shapes
    if also != [dtype, at] or len(keys) != 4 or keys[:3] != values[:3] or (keys[0], keys[2]) != (1, 8):
        raise ArgumentError(f"model {name} keeps {keys} and {values} of 8 tokens, not (1, heads, 8, size)")
    apart = float((whole.float() - parts.float()).abs().max() / whole.float().std())
    # Rounding: bfloat16 is apart by some hundredths, float32 with the matrix units of a GPU by thousandths.
    if not apart < max(3 * torch.finfo(whole.dtype).eps ** 0.5, 0.02):  # not a number is apart too
        raise ArgumentError(
            f"model {name} computes something else of a text in two parts than of the whole, "
            f"by {apart:.2g} standard deviations of its logits: its tokens look at those after them, or it "
            "keeps something besides its cache"
        )
    return KvShape(len(kv.layers), keys[1], keys[3], values[3], dtype, at)


def fingerprint(model: Any) -> str:
    """32 hex digits that name the model's configuration and every bit of its weights, on any device.

    Reads all weights once: about 4 GB/s on a CPU.

    Raises:
        ArgumentError: weights that are not there to read.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    digest = hashlib.sha256(type(model).__name__.encode())
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    sums = []
    for name, weight in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        try:
            sums.append(_sum(weight.detach()))
        except (RuntimeError, NotImplementedError) as error:
            raise ArgumentError(
                f"the weights can not be read ({name}: {error}): give weight_version=... to name them"
            ) from None
    for total in sums:
        digest.update(int(total).to_bytes(8, "little", signed=True))
    return digest.hexdigest()[:32]


def _sum(weight: torch.Tensor) -> torch.Tensor:
    """A sum of a tensor's bytes as integers, so that every bit counts and every device gets the same."""
    data = weight.contiguous().reshape(-1).view(torch.uint8)
    words = data.numel() // 8 * 8
    places = data[:words].view(torch.int64)
    total = places.sum() + data[words:].sum(dtype=torch.int64)
    # That does not see elements that have changed places; some of them count once more, by their place.
    some = places[:: max(places.numel() // 64, 1)]
    return total + (some * torch.arange(1, some.numel() + 1, device=some.device)).sum()
