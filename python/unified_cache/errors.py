"""The errors that this package raises on purpose.

Each one derives from `UnifiedCacheError` and from the built-in exception that fits it best, so
``except KeyError`` and ``except UnifiedCacheError`` both work. A call that raises one of them has
changed nothing.
"""

__all__ = [
    "ArgumentError",
    "InvariantError",
    "LockError",
    "PoisonedError",
    "UnifiedCacheError",
    "UnknownNodeError",
]


class UnifiedCacheError(Exception):
    """Base of every error of this package."""


class ArgumentError(UnifiedCacheError, ValueError):
    """An argument that can not be used; the message names it and says what is allowed."""


class UnknownNodeError(UnifiedCacheError, KeyError):
    """A node id that names no node: never given out, evicted since, or from before a reset."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message.
        return str(self.args[0]) if self.args else ""


class LockError(UnifiedCacheError, RuntimeError):
    """A receipt, plan, ack or pin that does not belong: foreign, stale, or given back before."""


class InvariantError(UnifiedCacheError, AssertionError):
    """What must always hold does not; the message names the first violation."""


class PoisonedError(UnifiedCacheError, RuntimeError):
    """A call on this tree failed inside (a bug): it is refused from then on, until its `reset`."""
