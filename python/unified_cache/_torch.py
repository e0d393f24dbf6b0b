"""torch, or one line that says how to get it: every module that needs torch takes it from here."""

from unified_cache.errors import MissingDependencyError

try:
    import torch
except ImportError as error:
    raise MissingDependencyError(
        f"this needs PyTorch, which can not be imported ({error}): pip install unified-cache[torch]"
    ) from None

__all__ = ["torch"]
