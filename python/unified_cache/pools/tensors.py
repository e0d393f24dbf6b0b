"""An engine's own arrays as torch tensors, never as copies of them."""

from __future__ import annotations

from typing import Any

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError

__all__ = ["tensor_of"]


def tensor_of(value: Any, name: str) -> torch.Tensor:
    """The same memory as a tensor.

    Args:
        value: a torch tensor (also one that requires grad: what is returned does not), a CuPy array, or
            anything with DLPack or ``__cuda_array_interface__``.
        name: of the argument, for messages.

    Raises:
        ArgumentError: not one of these, or one that would have to be copied.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    reason = "it offers neither DLPack nor __cuda_array_interface__"
    if getattr(getattr(value, "flags", None), "writeable", True) is False:
        reason = "it is read-only"  # torch would write to it all the same
    elif hasattr(value, "__dlpack__"):
        try:
            return torch.utils.dlpack.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
            reason = str(error)
    if hasattr(value, "__cuda_array_interface__"):
        try:
            return _from_cuda_interface(value)
        except (RuntimeError, TypeError, ValueError, KeyError, AssertionError) as error:
            reason = str(error)
    raise ArgumentError(
        f"{name} must be a torch tensor, a CuPy array, or offer DLPack or __cuda_array_interface__ without a "
        f"copy; {type(value).__name__} can not be used: {reason}"
    )


class _FirstElement:
    """The first element of an array, to learn on which device it lies."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = {**interface, "shape": (1,), "strides": None}


def _from_cuda_interface(value: Any) -> torch.Tensor:
    # torch copies an array to the device that it is asked for, without a word, and the interface does not say
    # where the array lies. So ask with one element first: a copy of that costs nothing.
    interface = value.__cuda_array_interface__
    address, read_only = interface["data"]
    if read_only:
        raise ValueError("it is read-only")
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if torch.as_tensor(_FirstElement(interface), device=device).data_ptr() == address:
            return torch.as_tensor(value, device=device)
    raise ValueError("it lies on no device that torch sees")
