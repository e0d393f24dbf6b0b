"""The errors that this package raises on purpose.

Each one derives from `UnifiedCacheError` and from the built-in exception that fits it best, so
``except KeyError`` and ``except UnifiedCacheError`` both work. A call that raises one of them has
changed nothing.
"""

__all__ = [
    "ArgumentError",
    "BusyError",
    "CapacityError",
    "ClosedError",
    "CopyError",
    "InvariantError",
    "LockError",
    "MissingDependencyError",
    "PoisonedError",
    "RankError",
    "RankLostError",
    "RanksDifferError",
    "StorageError",
    "StorageTimeoutError",
    "TraceError",
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


class TraceError(UnifiedCacheError, ValueError):
    """A trace that can not be read; names the file, and the line if it is one line's fault."""

    def __init__(self, source: str, line: int | None, reason: str) -> None:
        super().__init__(source, line, reason)
        self.source = source
        self.line = line
        self.reason = reason

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}, line {self.line}"
        return f"{place}: {self.reason}"


class LockError(UnifiedCacheError, RuntimeError):
    """A receipt, plan, ack or pin that does not belong: foreign, stale, or given back before."""


class InvariantError(UnifiedCacheError, AssertionError):
    """What must always hold does not; the message names the first violation."""


class PoisonedError(UnifiedCacheError, RuntimeError):
    """A call on this tree failed inside (a bug): it is refused from then on, until its `reset`."""


class CapacityError(UnifiedCacheError, MemoryError):
    """A pool has no room for what was asked, not even after evicting what may go."""


class BusyError(UnifiedCacheError, RuntimeError):
    """Requests are still active, so this can not be done now."""


class ClosedError(UnifiedCacheError, RuntimeError):
    """The cache was closed before this call."""


class CopyError(UnifiedCacheError, RuntimeError):
    """A copy between two tiers failed: the bytes that were waited for are not there."""


class RankError(UnifiedCacheError, RuntimeError):
    """Ranks that serve together can not go on together."""


class RankLostError(RankError):
    """A rank has ended, or did not come within the time limit."""


class RanksDifferError(RankError):
    """Ranks that must hold the same do not; the message has the tick, the rank and what differs first."""


class StorageError(UnifiedCacheError, OSError):
    """A storage that can not be opened or used; the message says what was tried and what to change."""

    def __str__(self) -> str:
        # OSError shows its arguments in its own way once there are two of them.
        return str(self.args[0]) if self.args else ""


class StorageTimeoutError(StorageError, TimeoutError):
    """A storage has not answered within the time limit."""


class MissingDependencyError(UnifiedCacheError, ImportError):
    """An optional package is not installed; the message says what to install."""
