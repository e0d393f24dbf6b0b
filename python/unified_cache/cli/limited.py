"""A storage for commands: every call ends within its limit, whatever the storage's client does.

The cache has threads of its own that a storage may hold up, and sees it from outside. A command has one thing
to do: its calls run on other threads, so that it can go on without one, say so and end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from unified_cache.errors import StorageTimeoutError
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus, PrefixLog
from unified_cache.storage.guard import GRACE

__all__ = ["LimitedBackend", "is_held_up"]

_CALLS = "unified-cache storage command"
_HELD_UP = f"{_CALLS}, held up"
_KEYS = 1024  # that are asked for in one call
_DIGESTS = 2048  # likewise

_T = TypeVar("_T")


def is_held_up() -> bool:
    """Whether a call that nobody waits for any more has not returned: such a process has to leave hard."""
    return any(thread.name == _HELD_UP for thread in threading.enumerate())


class _Calls(threading.Thread):
    """Makes one call after the other, and keeps no process alive."""

    def __init__(self) -> None:
        super().__init__(name=_CALLS, daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()


class LimitedBackend(Backend):
    """Another backend. Once a call was not in time no other is made.

    Args:
        open_backend: opens it; a call like the others.
        what: names it in errors.
        deadline: seconds that a call may take; the next fifth is waited for too, since a backend that gives
            up by itself says better than this what was wrong.

    Raises:
        StorageTimeoutError: it could not be opened in time. So does every call.
        StorageError: what the backend says.
    """

    scheme: ClassVar[str] = ""

    def __init__(self, open_backend: Callable[[], Backend], what: str, deadline: float) -> None:
        self._what = what
        self._deadline = deadline
        self._late: StorageTimeoutError | None = None
        # To start one for each call would cost more than many calls do.
        self._idle: list[_Calls] = []
        try:
            self.backend = self._call("open", open_backend, lambda late: late.close())
        except BaseException:
            self._end_threads()
            raise

    def _call(self, name: str, work: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        """What the work comes to; `undo` gets it if that is too late."""
        if self._late is not None:
            raise self._late
        lock, ended = threading.Lock(), threading.Event()
        answers: list[_T] = []
        errors: list[BaseException] = []
        waited_for = True

        def job() -> None:
            try:
                answer = work()
                with lock:
                    answers.append(answer)
                if not waited_for and undo is not None:
                    undo(answer)
            except BaseException as error:
                errors.append(error)
            ended.set()

        thread = self._thread()
        thread.jobs.put(job)
        try:
            ended.wait(self._deadline * GRACE)
        finally:
            with lock:
                waited_for = bool(answers)
            if waited_for or errors:
                self._idle.append(thread)
            else:
                thread.name = _HELD_UP
                thread.jobs.put(None)
        if errors:
            raise errors[0]
        if not waited_for:
            self._late = late = StorageTimeoutError(
                f"storage {self._what}: {name!r} has not ended within {self._deadline:g} s: see whether it "
                "is stuck, or give it more time with --timeout"
            )
            raise late
        return answers[0]

    def _thread(self) -> _Calls:
        with suppress(IndexError):
            return self._idle.pop()
        return _Calls()

    def _end_threads(self) -> None:
        while self._idle:
            self._idle.pop().jobs.put(None)

    # The contract

    def register(self, memory: memoryview) -> None:
        self._call("register", lambda: self.backend.register(memory))

    def expect(self, body_bytes: int) -> None:
        self._call("expect", lambda: self.backend.expect(body_bytes))

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        return self._call("exists", lambda: self.backend.exists(runs))

    def holds(self, digests: npt.NDArray[np.uint8], ending: str) -> npt.NDArray[np.bool_]:
        there = np.zeros(len(digests), np.bool_)
        for start in range(0, len(digests), _DIGESTS):
            there[start : start + _DIGESTS] = self._holds(digests[start : start + _DIGESTS], ending)
        return there

    def _holds(self, digests: npt.NDArray[np.uint8], ending: str) -> npt.NDArray[np.bool_]:
        return self._call("exists", lambda: self.backend.holds(digests, ending))

    def prefix_log(self) -> PrefixLog | None:
        log = self._call("prefix_log", self.backend.prefix_log)
        return None if log is None else _LimitedLog(log, self._call)

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        return self._call("get", lambda: self.backend.get(batch))

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        return self._call("set", lambda: self.backend.set(batch))

    def delete(self, keys: Sequence[str]) -> int:
        return self._call("delete", lambda: self.backend.delete(keys))

    def discard(self, keys: Sequence[str]) -> int:
        return self._call("delete", lambda: self.backend.discard(keys))

    def keys(self) -> Iterator[str]:
        """The keys of all objects; each time so many of them are one call."""
        every = self._call("keys", self.backend.keys)
        while part := self._call("keys", lambda: list(islice(every, _KEYS))):
            yield from part

    def clear(self) -> None:
        self._call("clear", self.backend.clear)

    def stats(self) -> dict[str, int]:
        return self._call("stats", self.backend.stats)

    def close(self) -> None:
        """Close it; after a call that was not in time it is closed when that has returned, if ever."""
        try:
            if self._late is None:
                self._call("close", self.backend.close)
            else:
                self._idle.append(thread := self._thread())
                thread.jobs.put(self._close_late)
        finally:
            self._end_threads()

    def _close_late(self) -> None:
        with suppress(Exception):
            self.backend.close()


class _LimitedLog(PrefixLog):
    """Its log likewise; but a rewrite takes as long as it takes, within which each question has its limit.

    Args:
        log: the log.
        call: makes a call within its limit: its name, and what it does.
    """

    def __init__(self, log: PrefixLog, call: Callable[..., Any]) -> None:
        self._log = log
        self._call = call

    def append(self, records: bytes) -> int:
        size: int = self._call("prefix_log", lambda: self._log.append(records))
        return size

    def read(self) -> Iterator[bytes]:
        pieces = self._log.read()
        while piece := self._call("prefix_log", lambda: next(pieces, b"")):
            yield piece

    def rewrite(self, keep: Callable[[Iterator[bytes]], Iterable[bytes] | None]) -> int | None:
        return self._log.rewrite(keep)

    def clear(self) -> None:
        self._call("prefix_log", self._log.clear)
