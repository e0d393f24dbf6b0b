"""Arrays of other libraries as torch tensors over the same memory."""

from __future__ import annotations

from typing import Any

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError

__all__ = ["as_tensor"]


def as_tensor(array: Any) -> torch.Tensor:
    """`array` as a tensor, without a copy.

    Args:
        array: a torch tensor, a CuPy array, or anything with ``__dlpack__`` or ``__cuda_array_interface__``.

    Raises:
        ArgumentError: none of these, or it can not be shared (another kind of device, read-only, a type that
            torch does not have).
    """
    if isinstance(array, torch.Tensor):
        return array
    # DLPack first: it knows types that the other interface does not, such as bfloat16.
    failed: Exception | None = None
    if hasattr(array, "__dlpack__"):
        try:
            shared: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
            return shared
        except Exception as error:  # what a library raises here is its own
            failed = error
    if hasattr(array, "__cuda_array_interface__"):
        try:
            return torch.as_tensor(array, device="cuda")
        except Exception as error:
            failed = error
    raise ArgumentError(
        f"{type(array).__name__} is not an array that can be shared"
        + (
            f": {failed}"
            if failed is not None
            else ": it has neither __dlpack__ nor __cuda_array_interface__"
        )
    )
