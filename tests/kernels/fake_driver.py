"""A GPU's driver on a CPU: streams run as late as they may, in an order that a seed chooses.

Whatever a stream may do before, after or in the middle of what another one does, it will do under some seed;
only events hold it back. Kernels are the real source, a random slice of threads at a time. So a wait that is
missing, or a buffer that is used again too early, shows up as wrong bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.shim import shim
from unified_cache.copies.cuda_driver import Memory

FORWARD = 7  # the stream of the engine's forward
_STUCK = 20_000


class FakeError(Exception):
    """What the driver raises when a test wants it to fail."""


@dataclass
class _Event:
    timing: bool
    recorded: int = 0  # the youngest record that was queued
    reached: int = 0  # the youngest that its stream has come to
    time: int = 0


@dataclass
class _Op:
    """Runs a piece at a time: `run` says whether that was the last one."""

    run: Callable[[], bool]
    ready: Callable[[], bool] = field(default=lambda: True)


class _Owner:
    """Stands for an allocation; poisons it when nobody holds it any more."""

    def __init__(self, driver: FakeDriver, array: np.ndarray) -> None:
        self.driver = driver
        self.array = array

    def __del__(self) -> None:
        self.array[:] = 0xEE
        self.driver.allocations -= 1


class FakeDriver:
    """`Driver` over plain CPU memory.

    Attributes:
        registered: what `reaches_host` answers.
        batched: see `Driver`.
        ignore_waits: streams do not wait for events, as if the engine had forgotten to ask for it.
        fail_in: calls from now on until one fails; None: none does.
        failing: from then on every call that can fail does.
        frozen: no stream runs.
        calls: how often each call was made.
        allocations, streams, events: what is alive.
    """

    def __init__(self, seed: int = 0, *, batched: bool = True, lazy: float = 0.5, most: int = 4) -> None:
        self.rng = np.random.default_rng(seed)
        self.batched = batched
        self.lazy = lazy  # how often a question finds that nothing has happened
        self.most = most  # pieces of work that happen otherwise
        self.registered = True
        self.ignore_waits = False
        self.fail_in: int | None = None
        self.failing = False
        self.frozen = False
        self.calls: dict[str, int] = {}
        self.allocations = 0
        self.streams: dict[int, deque[_Op]] = {FORWARD: deque()}
        self.events: dict[int, _Event] = {}
        self.time = 0
        self._graveyard: list[np.ndarray] = []
        self._next = 100
        self._idle = 0
        self._lock = threading.RLock()
        self._entered = threading.local()
        shim()

    # What tests do.

    def queue(self, work: Callable[[], None], stream: int = FORWARD) -> None:
        """Let a stream do something when it comes to it."""

        def run() -> bool:
            work()
            return True

        with self._lock:
            self.streams[stream].append(_Op(run))

    def step(self, count: int = 1) -> bool:
        """Run so many pieces of work, of any streams that may go on; False if there were not so many."""
        with self._lock:
            for _ in range(count):
                able = [ops for ops in self.streams.values() if ops and ops[0].ready()]
                if not able or self.frozen:
                    return False
                ops = able[int(self.rng.integers(len(able)))]
                self.time += 1
                op = ops[0]
                if op.run():
                    ops.popleft()
                self._idle = 0
            return True

    def finish(self) -> None:
        """Run everything that is queued."""
        while self.step():
            pass
        assert not any(self.streams.values()), "streams wait for something that never comes"

    # The driver.

    @contextmanager
    def active(self):
        depth = getattr(self._entered, "depth", 0)
        self._entered.depth = depth + 1
        try:
            yield
        finally:
            self._entered.depth = depth

    def _called(self, name: str, *, fails: bool = True) -> None:
        assert getattr(self._entered, "depth", 0) > 0, f"{name} where the device is not active"
        self.calls[name] = self.calls.get(name, 0) + 1
        if not fails:
            return
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                raise FakeError(f"injected into {name}")
        if self.failing:
            raise FakeError(f"the device is gone: {name}")

    def _handle(self) -> int:
        self._next += 1
        return self._next

    def new_stream(self) -> int:
        with self._lock:
            self._called("new_stream")
            stream = self._handle()
            self.streams[stream] = deque()
            return stream

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            self._called("destroy_stream", fails=False)
            assert not self.streams.pop(stream), "a stream is destroyed with work on it"

    def forward_stream(self) -> int:
        self._called("forward_stream", fails=False)
        return FORWARD

    def new_event(self, *, timing: bool = False) -> int:
        with self._lock:
            self._called("new_event")
            event = self._handle()
            self.events[event] = _Event(timing)
            return event

    def destroy_event(self, event: int) -> None:
        with self._lock:
            self._called("destroy_event", fails=False)
            del self.events[event]

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            self._called("record")
            state = self.events[event]
            state.recorded += 1
            number = state.recorded

            def reach() -> None:
                state.reached, state.time = max(state.reached, number), self.time

            self.queue(reach, stream)

    def stream_wait(self, stream: int, event: int) -> None:
        with self._lock:
            self._called("stream_wait")
            state = self.events[event]
            number = 0 if self.ignore_waits else state.recorded
            self.streams[stream].append(_Op(lambda: True, lambda: state.reached >= number))

    def event_done(self, event: int) -> bool:
        with self._lock:
            self._called("event_done")
            state = self.events[event]
            return self._ask(lambda: state.reached >= state.recorded)

    def stream_done(self, stream: int) -> bool:
        with self._lock:
            self._called("stream_done")
            return self._ask(lambda: not self.streams[stream])

    def _ask(self, done: Callable[[], bool]) -> bool:
        if self.rng.random() > self.lazy:
            self.step(int(self.rng.integers(1, self.most + 1)))
        self._idle += 1
        assert self.frozen or self._idle < _STUCK, "somebody waits for what never comes"
        return done()

    def seconds_between(self, start: int, end: int) -> float:
        with self._lock:
            self._called("seconds_between")
            first, last = self.events[start], self.events[end]
            assert first.timing
            assert last.timing
            assert last.reached >= last.recorded > 0
            return (last.time - first.time) * 1e-6

    def _allocate(self, size: int) -> tuple[np.ndarray, _Owner]:
        array = self.rng.integers(0, 256, size, np.uint8)
        self._graveyard.append(array)  # so that use after free is wrong bytes, not a crash
        self.allocations += 1
        return array, _Owner(self, array)

    def device_memory(self, size: int, stream: int) -> Memory:
        with self._lock:
            self._called("device_memory")
            assert stream in self.streams
            array, owner = self._allocate(size)
            return Memory(array.ctypes.data, size, owner)

    def pinned_memory(self, size: int) -> Memory:
        with self._lock:
            self._called("pinned_memory")
            array, owner = self._allocate(size)
            return Memory(array.ctypes.data, size, owner, array)

    def reaches_host(self, address: int) -> bool:
        self._called("reaches_host")
        return self.registered

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.copy_2d(target, size, source, size, size, 1, stream, name="copy")

    def copy_2d(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: int,
        *,
        name: str = "copy_2d",
    ) -> None:
        with self._lock:
            self._called(name)
            assert width > 0
            assert height > 0
            assert width <= min(target_pitch, source_pitch), "a row longer than its pitch"
            rows = deque(range(height))

            def move() -> bool:
                row = rows.popleft()
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
                return not rows

            self.streams[stream].append(_Op(move))

    def copy_batch(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        with self._lock:
            self._called("copy_batch")
            order = self.rng.permutation(len(targets))
            copies = deque((int(targets[i]), int(sources[i]), int(sizes[i])) for i in order)

            def move() -> bool:
                ctypes.memmove(*copies.popleft())
                return not copies

            self.streams[stream].append(_Op(move))

    def prepare(self, kernel: str) -> None:
        self._called("prepare")

    def launch(self, kernel: str, blocks: int, threads: int, argument: np.ndarray, stream: int) -> None:
        with self._lock:
            self._called("launch")
            assert 1 <= threads <= 1024
            kept, total = argument.copy(), blocks * threads
            order, done = int(self.rng.integers(1 << 20)), 0

            def some() -> bool:
                nonlocal done
                until = total if self.rng.random() < 0.5 else int(self.rng.integers(done, total + 1))
                shim().launch(kernel, blocks, threads, kept, order=order, begin=done, end=until)
                done = until
                return done == total

            self.streams[stream].append(_Op(some))
