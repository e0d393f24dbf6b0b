"""The cache that a model of `transformers` computes with: it begins with a prefix that was computed before,
and knows which tokens it holds.

`transformers` needs the keys of a layer in one piece, so what is hit is copied out of the pool's pages once,
into room that grows in place: a token more costs the copy of one token, where `DynamicCache` copies them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.engines.transformers_model import Cache, DynamicCache, DynamicLayer, KvShape
from unified_cache.errors import ArgumentError, LockError

__all__ = ["PrefixKV", "note_forward"]

# What a forward may be given besides tokens: nothing that changes what is kept of them.
_PLAIN = frozenset(
    (
        "attention_mask",
        "cache",
        "cache_position",
        "input_ids",
        "labels",
        "logits_to_keep",
        "num_logits_to_keep",
        "past_key_values",
        "position_ids",
    )
)


class _Owner(Protocol):
    """What keeps what a `PrefixKV` holds."""

    def _advance(self, kv: PrefixKV) -> None: ...
    def _finish(self, kv: PrefixKV) -> None: ...
    def _abort(self, kv: PrefixKV) -> None: ...


class _Layer(DynamicLayer):  # type: ignore[misc]
    """A layer whose keys and values are the front of a larger tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._kept = dtype
        # (rows, heads, tokens that fit, size) of keys and of values.
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, *values: torch.Tensor) -> None:
        """Begin with no tokens, of this type and on this device."""
        self._begin(key_states, values[0] if values else key_states)

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys[..., :0, :], values[..., :0, :]
        self.is_initialized = True

    def fill(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Begin with the first tokens of a room; both are (rows, heads, tokens that fit, size)."""
        self._begin(keys, values)
        self._room = (keys, values)
        self.keys, self.values = keys[..., :length, :], values[..., :length, :]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; returns the keys and values of all."""
        if key_states.dtype != self._kept:
            raise ArgumentError(
                f"the model computes keys in {key_states.dtype}, it was tried with {self._kept}: make the "
                "cache under the same autocast, and after the model has its type"
            )
        if not self.is_initialized:
            self._begin(key_states, value_states)
        rows, more = key_states.shape[0], key_states.shape[-2]
        if self.keys.shape[0] != rows:
            # `generate` makes several rows of each prompt after it was looked up: for samples, or for beams.
            self.batch_repeat_interleave(rows // self.keys.shape[0])
        length = self.keys.shape[-2]
        room = self._room_for(length, more, key_states, value_states)
        for half, new in zip(room, (key_states, value_states), strict=True):
            half[..., length : length + more, :] = new.detach()
        self.keys, self.values = (half[..., : length + more, :] for half in room)
        return self.keys, self.values

    def _room_for(
        self, length: int, more: int, *states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | Sequence[torch.Tensor]:
        room = self._room
        if (
            room is not None
            and room[0].shape[-2] >= length + more
            # Rows may have been chosen or repeated since, which leaves the room behind.
            and room[0].data_ptr() == self.keys.data_ptr()
            and room[0].shape[0] == states[0].shape[0]
            and (torch.is_inference_mode_enabled() or not room[0].is_inference())
        ):
            return room
        fitting = length + more + max((length + more) // 4, 64)
        grown = []
        for held, new in zip((self.keys, self.values), states, strict=True):
            larger = new.new_empty((*new.shape[:2], fitting, new.shape[-1]), requires_grad=False)
            larger[..., :length, :] = held
            grown.append(larger)
        self._room = (grown[0], grown[1])
        return self._room

    def get_seq_length(self, *args: Any) -> int:
        """Tokens that it holds."""
        return int(self.keys.shape[-2]) if self.is_initialized else 0


class PrefixKV(DynamicCache):  # type: ignore[misc]
    """A `Cache` of `transformers` with the keys and values of a prefix in it; made by `PrefixCache.begin`.

    Pass it to `generate`, or to the model, together with the **whole** prompt for `generate` and with the
    tokens from `hit_length` on for the model::

        with cached.begin(ids) as kv:
            out = model.generate(ids, **kv.argument, max_new_tokens=100)

    At the end of the block whatever was computed, prompt and answer, is kept for others; if it is left by
    an exception, no more than what was kept at the end of the prompt.

    Cropping, selecting, repeating and reordering rows are followed, so `generate` may do what it likes with
    it: sample, search with beams, decode with an assistant. It is for inference: no gradient goes through it.

    Attributes:
        hit_length: tokens at the front of every row that were not computed again.
        argument: {"cache": self}, or under the older name: keyword arguments for `generate` and the model.
    """

    def __init__(
        self,
        owner: _Owner,
        shape: KvShape,
        prompts: npt.NDArray[np.uint32],
        argument: str,
        fill: Callable[[Sequence[_Layer]], int],
    ) -> None:
        Cache.__init__(self, layers=[_Layer(shape.dtype) for _ in range(shape.layers)])
        self.hit_length = fill(self.layers)
        self.argument: dict[str, Any] = {argument: self}
        self._owner = owner
        self._ended = False
        self._prompts = prompts
        # (rows, tokens) each: the tokens whose keys and values are held, in order, wherever they were made.
        front = torch.from_numpy(prompts[:, : self.hit_length].astype(np.int64)).to(shape.device)
        self._parts: list[torch.Tensor] = [front]
        self._length = self.hit_length
        # False as soon as something was added that is not known to be the tokens that we think.
        self._known = True
        self._forwards = 0
        self._began = 0.0
        self.held: Any = None  # the owner's business
        self.prompt_kept = False
        self.prefill_seconds: float | None = None
        self.prefill_tokens = 0

    # A request

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.abort()

    def finish(self) -> None:
        """Keep whole pages of everything that was computed, and give back what was held for it.

        Raises:
            LockError: it has ended before.
        """
        if self._ended:
            raise LockError("the request has ended before: it was finished or aborted")
        self._ended = True
        self._owner._finish(self)

    def abort(self) -> None:
        """Give back what was held; nothing to do once it has ended."""
        if not self._ended:
            self._ended = True
            self._owner._abort(self)

    def tokens(self) -> npt.NDArray[np.uint32] | None:
        """(rows, tokens): those whose keys and values it holds; None: that is not known."""
        lengths = {layer.get_seq_length() for layer in self.layers}
        if not self._known or lengths != {self._length}:
            return None
        return torch.cat(self._parts, 1).cpu().numpy().astype(np.uint32)

    # What happens to it

    def note(self, ids: torch.Tensor | None, forward: dict[str, Any]) -> torch.Tensor | None:
        """The model computes these tokens next, which come after those that are held.

        Args:
            ids: (rows, tokens); all of the prompt is taken as what is left of it.
            forward: what else the model was given; its positions are cut with the tokens.

        Returns:
            The tokens that are left to compute.

        Raises:
            ArgumentError: they are not those of the prompt, or what is computed of them depends on more.
            LockError: the request has ended.
        """
        if self._ended:
            raise LockError("the request has ended: a PrefixKV is for one generate")
        if forward.get("use_cache") is False:
            raise ArgumentError("use_cache must not be False where a prefix is taken from a cache")
        if ids is None or ids.dim() != 2:
            raise ArgumentError("input_ids must be given, as (rows, tokens): a prefix is found by its tokens")
        if self.get_seq_length() != self._length or ids.shape[0] % self._parts[0].shape[0]:
            # Somebody has added to it without us, or has left out rows.
            self._known = False
        if not self._known:
            return ids
        if self._forwards == 0:
            ids = self._left(ids, forward)
        more = ids.shape[1]
        if more > 1 or self._forwards == 0:
            self._check(ids, forward)
        self._time()
        if self._length >= self._prompts.shape[1]:
            self._owner._advance(self)
        if ids.shape[0] != self._parts[0].shape[0]:
            self._repeat(ids.shape[0] // self._parts[0].shape[0])
        self._parts.append(ids.detach().clone())
        self._length += more
        self._forwards += 1
        return ids

    def _left(self, ids: torch.Tensor, forward: dict[str, Any]) -> torch.Tensor:
        """Without what is held already: assisted decoding gives the model all of the prompt."""
        prompts, positions = self._prompts, forward.get("position_ids")
        rows, rest = divmod(ids.shape[0], len(prompts))
        given = ids[:, : prompts.shape[1]].cpu().numpy()
        if self.hit_length == 0 or rest or not np.array_equal(given, prompts.repeat(rows, 0)):
            return ids
        if positions is not None:
            if int(positions.reshape(-1)[0]) != 0:
                return ids
            forward["position_ids"] = positions[..., self.hit_length :]
        return ids[:, self.hit_length :]

    def _check(self, ids: torch.Tensor, forward: dict[str, Any]) -> None:
        """This costs a wait for the device, so it is done for prompts and not for each token."""
        for name, value in forward.items():
            if name not in _PLAIN and isinstance(value, torch.Tensor):
                raise ArgumentError(
                    f"{name} can not be given with a cached prefix: what is computed then depends on more "
                    "than tokens"
                )
        mask, positions = forward.get("attention_mask"), forward.get("position_ids")
        if mask is not None and (
            not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not bool(mask.all())
        ):
            raise ArgumentError(
                "attention_mask must be all ones, so that no token is padding: ask prompts of unequal length "
                "one by one, or with generate_batch"
            )
        start, more = self._length, ids.shape[1]
        wanted = torch.arange(start, start + more)
        if positions is not None and not (
            positions.shape[-1] == more and bool((positions.cpu() == wanted).all())
        ):
            raise ArgumentError("position_ids must be those of a text without gaps, beginning with 0")
        prompt = self._prompts[:, start : start + more]
        rows, rest = divmod(ids.shape[0], len(prompt))
        given = ids[:, : prompt.shape[1]].cpu().numpy()
        if prompt.size and (rest or not np.array_equal(given, prompt.repeat(rows, 0))):
            raise ArgumentError(
                f"input_ids must be the prompt that this was begun with, from token {start} on "
                f"({len(prompt)} rows of {self._prompts.shape[1]} tokens): generate takes it whole"
            )

    def _time(self) -> None:
        """From the prompt's forward to the next one: `generate` has seen the first token by then."""
        if self._forwards == 0:
            self._began = time.perf_counter()
        elif self.prefill_seconds is None and self._length >= self._prompts.shape[1]:
            self.prefill_seconds = time.perf_counter() - self._began
            self.prefill_tokens = self._length - self.hit_length

    def _repeat(self, repeats: int) -> None:
        self._parts = [part.repeat_interleave(repeats, 0) for part in self._parts]

    def _follow(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._parts = [change(torch.cat(self._parts, 1))]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Cache.update`."""
        if self.hit_length and self._forwards == 0:
            # Nobody has seen whether these tokens come after the prefix, or are all of the prompt.
            raise ArgumentError(
                "the model must be called as it was given to the cache: something inside it, or its forward "
                "alone, does not tell which tokens come after the cached prefix"
            )
        states: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return states

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """`Cache.crop`."""
        super().crop(*args, **kwargs)
        length = self.get_seq_length()
        self._follow(lambda tokens: tokens[:, :length])
        self._length = min(self._length, length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """`Cache.reorder_cache`."""
        super().reorder_cache(beam_idx)
        self._follow(lambda tokens: tokens.index_select(0, beam_idx.to(tokens.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """`Cache.batch_repeat_interleave`."""
        super().batch_repeat_interleave(repeats)
        self._repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """`Cache.batch_select_indices`."""
        super().batch_select_indices(indices)
        self._follow(lambda tokens: tokens[indices.to(tokens.device)])

    def reset(self) -> None:
        """`Cache.reset`: it holds nothing then."""
        super().reset()
        self._known = False

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicCache:
        """A plain cache with copies of what it holds: nothing of that is kept for others."""
        copied = DynamicCache()
        for number, layer in enumerate(self.layers):
            if layer.is_initialized:
                copied.update(layer.keys.clone(), layer.values.clone(), number)
        return copied


def note_forward(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook before the forward of a model, that tells a `PrefixKV` what is computed into it."""
    kv = kwargs.get("cache")
    if kv is None:
        kv = kwargs.get("past_key_values")
    if not isinstance(kv, PrefixKV):
        return None
    kwargs = dict(kwargs)
    if args:
        return (kv.note(args[0], kwargs), *args[1:]), kwargs
    kwargs["input_ids"] = kv.note(kwargs.get("input_ids"), kwargs)
    return args, kwargs
