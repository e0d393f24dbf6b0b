"""Checks of sizes, with one form of message."""

from typing import Any

from unified_cache.errors import ArgumentError

__all__ = ["MOST_PAGES", "MOST_TOKENS", "require_integer"]

MOST_PAGES = 2**32 - 1  # a page id is a uint32
MOST_TOKENS = 256  # a page


def require_integer(name: str, value: Any, low: int, high: int | None = None, unit: str = "") -> None:
    """Refuse what is not an integer in this range; True and numpy's integers are none.

    Raises:
        ArgumentError: names the argument, what is allowed and what was given.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and value >= low and (high is None or value <= high):
        return
    allowed = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    raise ArgumentError(f"{name} must be {allowed}{unit}, not {value!r}")
