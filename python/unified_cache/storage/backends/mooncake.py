"""Mooncake Store: objects in the memory of many machines, through the client of the installed package.

docs/mooncake.md says how its processes are started and what happens when one of them fails. What the client
does when something is wrong was measured with mooncake-transfer-engine 0.3.13; where that decides how
something is done here, the comment says so.
"""

from __future__ import annotations

import atexit
import ctypes
import http.client
import importlib
import logging
import os
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from unified_cache.errors import ClosedError, StorageError
from unified_cache.storage.backends.mooncake_settings import (
    MooncakeSettings,
    client_environment,
    number_in,
    own_address,
    parse_address,
    set_environment,
)
from unified_cache.storage.checksums import copy_bodies
from unified_cache.storage.contract import Backend, ObjectBatch, PageStatus
from unified_cache.storage.urls import StorageUrl
from unified_cache.worker import Worker

__all__ = ["MooncakeBackend"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# What the client answers for an object.
_NO_ROOM = -200  # no segment has room (or there is none): at once, it does not wait for evictions
_WRONG_SIZE = -600  # the object is longer than its destination
_BEING_WRITTEN = -703
_NOT_FOUND = -704
_TRANSFER_FAILED = -800  # also: the object is shorter than its destination
_NO_CONNECTION = -900
_NO_REPLY = -901

_NO_ANSWER = -1  # over shared memory, to whether objects exist, for either of the two
_UNREACHED = (_NO_CONNECTION, _NO_REPLY, _NO_ANSWER)

_READ_STATUS = {
    _NOT_FOUND: PageStatus.MISS,
    _BEING_WRITTEN: PageStatus.MISS,
    _WRONG_SIZE: PageStatus.CORRUPT,
    _NO_REPLY: PageStatus.TIMEOUT,
}
_WRITE_STATUS = {0: PageStatus.HIT, _NO_ROOM: PageStatus.FULL, _NO_REPLY: PageStatus.TIMEOUT}

_TURN = 1.1  # of the deadline: when the last native call of a call has to end
_HEADER_BYTES = 1 << 20  # registered memory for the headers of one native call
_LOCAL_BUFFER = 16 << 20  # the client's own scratch memory; batches do not go through it
_MOST_PAGES = 128  # in one native call
_MOST_PACED_PAGES = 32  # in one that waits on TCP connections
# A write that returned 0 may have met another one of the same key: so long that one may take to end.
_OTHER_WRITER_SECONDS = 0.25
# So long after something has failed, or after a process has begun, a write may hang: 30 s, by the master's
# default (--put_start_discard_timeout_sec), and some more.
_DOUBT_SECONDS = 40.0
# So long a close waits for a sign that the client can go; then, for its going, which takes one second, or two
# with a segment. And so often it is asked whether it can.
_CLOSE_SECONDS = 1.5
_GONE_SECONDS = 3.0
_ASK_SECONDS = 1.0
# Over shared memory. So long a client gets to find an owner that is back by itself: it asks once a second,
# needs 4.3 to learn that nobody is there, and tries again after two. And so long after an owner has gone on
# nothing of what it was asked before can be left.
_FIND_SECONDS = 8.0
_DRAIN_SECONDS = 10.0
_LOOK_SECONDS = 0.05
_NOWHERE = 4096  # an address that no memory has
_NO_KEY = "unified-cache"


def _client_module() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StorageError(
            f"mooncake:// can not be used, import mooncake.store failed ({error}): pip install "
            "mooncake-transfer-engine-non-cuda (or another build) and, on Debian, apt-get install libibverbs1"
        ) from error


def _address_of(memory: npt.NDArray[np.uint8]) -> int:
    return int(memory.ctypes.data)


def _shared_memory(module: Any, count: int, fix: str) -> memoryview:
    """Memory of a kind that a client over shared memory takes; it goes with the last view.

    Raises:
        StorageError: it can not be had.
    """
    allocator, said = module.MooncakeHostMemAllocator(), "it gave none"
    address = 0
    try:
        address = allocator.alloc(count)
    except RuntimeError as error:
        said = str(error)
    if not address:
        raise StorageError(
            f"{count} bytes of shared memory for mooncake_client can not be had ({said}): {fix}"
        )
    whole = (ctypes.c_uint8 * count).from_address(address)
    # Not at exit: daemon threads may still use it then.
    weakref.finalize(whole, _free, allocator, address, os.getpid()).atexit = False
    return memoryview(whole).cast("B")


def _free(allocator: Any, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child may have something else there
        allocator.free(address)


class _Line:
    """A connection to a process of this machine that nothing is sent over: it ends when the process does."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)

    @property
    def ended(self) -> bool:
        """The process is gone, with all that it was about to write."""
        try:
            # Every call asks, and to read what is not there yet would cost an exception each time.
            look = select.poll()  # one of its own: two threads may not use one
            look.register(self._socket, select.POLLIN)
            return bool(look.poll(0)) and not self._socket.recv(1)
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # or it was closed here
            return True

    def close(self) -> None:
        """Give it back."""
        self._socket.close()


class _Block:
    """Memory that the client knows, for one native call: headers, and bodies that must go through it."""

    def __init__(
        self, headers: npt.NDArray[np.uint8], bodies: npt.NDArray[np.uint8], moved: list[int]
    ) -> None:
        self.moved = moved  # so far: bodies that went straight, and that went through it
        self.headers, self.header_address = headers, _address_of(headers)
        self.bodies, self.body_address = bodies, _address_of(bodies)

    def body(self, place: int, batch: ObjectBatch, size: int) -> memoryview:
        """Bytes of the body in this place."""
        start = place * _step(batch)
        return self.bodies[start : start + size].data


@dataclass(slots=True)
class _Moving:
    """A get or a set.

    Attributes:
        batch: its objects.
        header: bytes of each header.
        bodies: addresses of the bodies.
        sizes: bytes of each that are moved.
        started: when it began.
        bounced: bodies have to be copied through memory that the client knows.
        statuses: what has become of each object so far.
        heard: what the client has answered so far.
    """

    batch: ObjectBatch
    header: int
    bodies: list[int]
    sizes: list[int]
    started: float
    bounced: bool
    statuses: list[PageStatus]
    heard: list[int]


class MooncakeBackend(Backend):
    """Objects in a Mooncake Store. The first writer of a key wins, as the store has it.

    Headers and bodies are read and written where they are (headers through a little memory of its own that is
    registered). A `client` reaches only shared memory that was allocated by its package: `host_memory` gives
    some, and bodies elsewhere are copied once more.

    An owner over shared memory that hangs reads and writes when it goes on, whatever has become of the call.
    So a call whose bodies it can reach does not return before it is certain that it will not: see `_hold`.

    Over TCP one native call runs at a time: connections to an owner are shared, so a second one would only
    wait for the first, and no longer end within the deadline if the owner hangs. What can still take longer:
    docs/mooncake.md.
    """

    scheme: ClassVar[str] = "mooncake"
    makes_checksums: ClassVar[bool] = True

    def __init__(self, settings: MooncakeSettings) -> None:
        set_environment(settings.deadline)
        self._settings = settings
        self._deadline = settings.deadline
        self._target = (
            parse_address(settings.client, "client") if settings.client else (settings.host, settings.port)
        )
        self._module = _client_module()
        self._state = threading.Condition()
        self._calls = 0
        self._closing = threading.Event()
        self._closed = False
        self._suspect = True  # the last call did not reach the store: ask first whether anybody listens
        self._doubted = time.monotonic()  # when something last failed that may have left a write behind
        self._reopening = False  # one call is replacing a client over shared memory that has lost its owner
        self._sizes_vary = False  # objects shorter than their memory were met
        self._ranges: list[tuple[int, int]] = []
        self._pools: list[memoryview] = []  # that bodies lie in
        self._direct: list[tuple[int, int]] = []  # of these, what the client reaches
        self._bounce_all = False  # it turned out that it does not reach them
        self._warned = False  # of that
        self._line: _Line | None = None
        self._fence = threading.Lock()
        self._fenced = False  # the owner can not reach bodies any more, not by what it was asked so far
        self._found = 0.0  # when the owner was first there again
        # Of each block: whoever has it counts, so nobody has to wait for that.
        self._moved = [[0, 0] for _ in range(1 if self._paced else 2)]
        self._kept: list[npt.NDArray[np.uint8]] = []
        environment = client_environment(self._deadline) | os.environ
        self._answer_seconds = number_in(environment, "MC_RPC_TIMEOUT_MS") / 1000  # that the master may take
        self._pages, self._call_seconds = self._call_limits(environment)
        # A transfer that failed after fewer seconds was not given up for want of progress.
        self._stall = 0.9 * number_in(environment, "MC_TCP_PROGRESS_TIMEOUT_SEC")
        self._reach().close()
        self._store = self._connect()
        self._blocks: queue.SimpleQueue[_Block] = queue.SimpleQueue()
        # Started now, since a process that ends starts no thread any more.
        self._end = Worker("unified-cache mooncake end", awaited=False)
        self._phase: Literal["open", "asking", "going", "gone", "left"] = "open"
        self._leaving = False  # the process ends
        _open.add(self)
        try:
            self._make_blocks()
        except BaseException:
            self.close()
            raise
        self._suspect = False

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        """Open it.

        Raises:
            StorageError: wrong options, the package is missing, or nobody answers.
        """
        return cls(MooncakeSettings.from_url(url, deadline))

    # Opening

    @property
    def _paced(self) -> bool:
        """Native calls are kept short because this process itself waits on TCP connections."""
        return self._settings.protocol == "tcp" and not self._settings.client

    def _call_limits(self, environment: Mapping[str, str]) -> tuple[int, float]:
        """Objects in one native call, and the seconds that it takes if an owner hangs."""
        if not self._paced:
            return _MOST_PAGES, 0.0
        wait = number_in(environment, "MC_TCP_ADMISSION_TIMEOUT_MS") / 1000
        lanes = max(1, number_in(environment, "MC_TCP_LANES_PER_PEER"))
        queued = number_in(environment, "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER")
        stall = 2 * number_in(environment, "MC_TCP_PROGRESS_TIMEOUT_SEC")
        return _MOST_PACED_PAGES, wait + stall * ((lanes + queued) // lanes)

    def _reach(self) -> socket.socket:
        """A connection to where the first hop goes, if somebody listens there.

        The client itself takes 4.3 s for each call to a master that is gone, and 8 s to find out at setup.
        """
        host, port = self._target
        try:
            return socket.create_connection((host, port), timeout=min(1.0, self._deadline / 4))
        except OSError as error:
            what, fix = ("client", "client=") if self._settings.client else ("master", "the URL")
            raise StorageError(
                f"mooncake {what} {host}:{port} can not be reached ({error}): start mooncake_{what} "
                f"there, or change {fix}"
            ) from error

    def _connect(self) -> Any:
        settings = self._settings
        store = self._module.MooncakeDistributedStore()
        if settings.client:
            what = f"mooncake_client {settings.client}"
            # Before the client, so that it is not of a later process than the client's.
            self._line = _Line(self._reach())
            code = store.setup_dummy(_LOCAL_BUFFER, _LOCAL_BUFFER, settings.client)
        else:
            what = f"mooncake master {settings.master}"
            code = store.setup(
                settings.local or own_address(settings.host, settings.port),
                settings.metadata,
                settings.segment_bytes,
                _LOCAL_BUFFER,
                settings.protocol,
                settings.devices,
                settings.master,
            )
        if code != 0:
            raise StorageError(
                f"{what} was set up with protocol {settings.protocol}, metadata {settings.metadata}, segment "
                f"{settings.segment_bytes} and answered {code}: see that it runs, that it can be reached in "
                f"{self._deadline:g} s, and that this memory can be had"
            )
        return store

    def _reopen(self) -> None:
        """Take a new client: one over shared memory does not always find its owner again, nor does a new
        owner know its memory. Nobody else is in a call."""
        self._let_go()
        self._drop()
        self._store = self._connect()
        self._fenced = self._bounce_all = False
        self._found = 0.0
        self._make_blocks()
        for memory in self._pools:
            self._adopt(memory)
        self._suspect = False

    def _let_go(self) -> None:
        """Have the package know that bodies' memory is registered no more: else no client registers it again.

        It takes the owner's word alone. If the owner is another process by now, the client tells it of this
        memory as soon as it has noticed, so it gets the time for that.
        """
        if not self._direct:
            return
        now = time.monotonic()
        self._found = self._found or now
        if not (self._answers() and self._unregister_pools()) and now < self._found + _FIND_SECONDS:
            raise StorageError(f"mooncake client {self._settings.client} is found again: try again later")

    def _unregister_pools(self) -> bool:
        """Whether the owner has taken back all memory of bodies, by its word."""
        self._direct = [
            (start, end) for start, end in self._direct if self._store.unregister_buffer(start) != 0
        ]
        return not self._direct

    def _drop(self) -> None:
        """Give back the client and everything that it knew."""
        while not self._blocks.empty():
            self._blocks.get()
        # One that is gone would be waited for, 4.3 s for each.
        if self._line is None or not self._line.ended:
            for start, _ in self._ranges + self._direct:
                self._store.unregister_buffer(start)
        self._store.close()
        if self._line is not None:
            self._line.close()
        self._ranges.clear()
        self._direct.clear()
        self._kept.clear()

    def _make_blocks(self) -> None:
        settings = self._settings
        bodies = 0
        if settings.client or settings.protocol != "tcp":
            bodies = settings.bounce_bytes // 2
        for moved in self._moved:
            memory = self._own_memory(_HEADER_BYTES + bodies)
            self._blocks.put(_Block(memory[:_HEADER_BYTES], memory[_HEADER_BYTES:], moved))

    def _own_memory(self, count: int) -> npt.NDArray[np.uint8]:
        """Registered memory."""
        if self._settings.client:
            memory = np.frombuffer(_shared_memory(self._module, count, "choose a smaller bounce="), np.uint8)
        else:
            memory = np.zeros(count, np.uint8)
        self._kept.append(memory)
        self._register(_address_of(memory), count)
        self._ranges.append((_address_of(memory), _address_of(memory) + count))
        return memory

    def _register(self, address: int, count: int) -> None:
        code = self._store.register_buffer(address, count)
        if code != 0:
            raise StorageError(
                f"mooncake refused to register {count} bytes of memory ({code}): memory can not be "
                "registered twice or overlap, and RDMA needs room under ulimit -l"
            )

    def host_memory(self, size: int) -> memoryview | None:
        """With `client`, memory that it reaches; it is touched by one thread, about 1 GB a second."""
        self._require_open()
        if not self._settings.client:
            return None
        return _shared_memory(self._module, size, "make hicache_ratio or hicache_size smaller")

    def register(self, memory: memoryview) -> None:
        """Bodies will lie in this memory; what `client` does not reach they are copied from and to."""
        with self._calling():
            if memory.nbytes:
                self._adopt(memory)
                self._pools.append(memory)  # it may have to outlive `close`

    def _adopt(self, memory: memoryview) -> None:
        start = _address_of(np.frombuffer(memory, np.uint8))
        if not self._settings.client:
            self._register(start, memory.nbytes)
        elif self._store.register_buffer(start, memory.nbytes) != 0:
            return  # it is not of its package
        self._direct.append((start, start + memory.nbytes))

    # Calls

    @contextmanager
    def _calling(self) -> Iterator[float]:
        """Around everything that touches the client, which dies (SIGSEGV) if it is used after its close.

        Gives the time when the call began.
        """
        with self._state:
            if self._closed:
                raise ClosedError("the mooncake backend was closed before this call")
            if self._reopening:
                raise self._lost()
            # A later process in the owner's place is found by the client itself, and calls go on well. But
            # the end of that one, which `_hold` looks for, is not told by this connection.
            if self._fenced or (self._line is not None and self._line.ended):
                self._lose()
            suspect = self._suspect
            lost = suspect and bool(self._settings.client)
            if lost and self._calls:
                raise self._lost()
            self._calls += 1
            self._reopening = lost
        try:
            started = time.monotonic()
            if suspect:
                try:
                    self._reach().close()
                except StorageError:
                    self._found = 0.0  # whoever is there next gets the whole time to be found
                    raise
            if lost:
                self._reopen()
            yield started
        finally:
            with self._state:
                self._calls -= 1
                if lost:
                    self._reopening = False
                self._state.notify_all()

    def _lost(self) -> StorageError:
        return StorageError(
            f"mooncake client {self._settings.client} was lost and is looked for: try again later"
        )

    def _hear(self, codes: Sequence[int]) -> None:
        """Take note of whether the store was reached; raises if for none of the objects it was."""
        if not codes:
            return
        # As a rule there is no code < 0.
        unreached = [code for code in codes if code in _UNREACHED] if min(codes) < 0 else []
        if unreached:
            self._lose()
        elif not self._settings.client:
            # One over shared memory that another call has lost stays so until it is replaced: what it was
            # asked by that call is still about.
            self._suspect = False
        if len(unreached) == len(codes):
            said = "no reply in time" if unreached[0] == _NO_REPLY else "no connection"
            host, port = self._target
            raise StorageError(
                f"mooncake at {host}:{port} was asked for {len(codes)} objects and answered {unreached[0]} "
                f"({said}): see that it runs; it is used again as soon as it answers"
            )

    def _lose(self) -> None:
        """The store was not reached: the next call asks whether anybody listens, and writes are looked at."""
        self._suspect = True
        self._doubted = time.monotonic()

    def _answers(self) -> bool:
        """The owner over shared memory says something; it need not ask its master for that."""
        return bool(self._ask(_NOWHERE) == _WRONG_SIZE)

    def _knows(self, address: int) -> bool:
        """The owner reaches this memory; also if it does not say."""
        return bool(self._ask(address) != _WRONG_SIZE)

    def _ask(self, address: int) -> int:
        (code,) = self._store.batch_get_into_multi_buffers([_NO_KEY], [[address]], [[1]])
        return int(code)

    def _hold(self) -> None:
        """The owner has not answered: return when it can do nothing more of what it was asked.

        One that hangs works off what it was sent when it goes on, also if nobody waits for that any more.
        Memory that it has unregistered it does not touch: it waits for what is under way then, and refuses
        what comes later (both was seen). So this may take as long as it hangs.
        """
        assert self._line is not None
        answered = 0.0
        with self._fence:
            while not self._fenced:
                if self._line.ended:
                    self._fenced = True
                elif self._answers():
                    answered = answered or time.monotonic()
                    # It may have forgotten the memory in the meantime, until the client tells it again.
                    drained = time.monotonic() > answered + _DRAIN_SECONDS
                    self._fenced = self._unregister_pools() or drained
                if not self._fenced:
                    time.sleep(_LOOK_SECONDS)

    def _check_known(self, codes: Sequence[int], block: _Block, pieces: Sequence[Sequence[int]]) -> None:
        """Raise if the owner answered so because it does not know the memory: nothing is wrong with objects.

        It may be another process than before, or have taken this one for dead.
        """
        if not all(code == _WRONG_SIZE for code in codes):
            return
        name = f"mooncake client {self._settings.client}"
        if not self._knows(block.header_address):
            self._lose()
            raise StorageError(f"{name} has forgotten the memory of this process: try again")
        if all(self._knows(piece) for piece in {pieces[0][-1], pieces[-1][-1]}):
            return
        self._bounce_all = True
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s was restarted, and can not be told of the host pool's memory: from now on pages are "
                "copied once more on their way",
                name,
            )
        raise StorageError(f"{name} does not know the host pool's memory any more: try again")

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """How many of each run are stored; what is being written right now is not."""
        keys = [key for run in runs for key in run]
        if not keys:
            self._require_open()
            return [0] * len(runs)
        with self._calling():
            codes = self._store.batch_is_exist(keys)
            self._hear(codes)
        found = iter(codes)
        return [sum(1 for _ in takewhile(lambda code: code == 1, [next(found) for _ in run])) for run in runs]

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        """Read objects. One whose lease ended while it was read is an ERROR: its bytes may be another's."""
        with self._calling() as started:
            moving = self._moving(batch, started)
            statuses, heard = moving.statuses, moving.heard
            rows = list(range(len(batch)))
            if self._sizes_vary and rows:
                rows = self._fit(moving, rows)
            for part in self._parts(moving, rows):
                again = self._get_part(moving, part)
                # Shorter than its memory, which the client takes for a failed transfer: asked once more.
                if again:
                    fitting = self._fit(moving, again)
                    if fitting:
                        self._sizes_vary = True
                        self._get_part(moving, fitting)
                well = heard and min(heard) >= 0  # as a rule
                if not well and (_NO_CONNECTION in heard or PageStatus.TIMEOUT in _picked(statuses, part)):
                    break  # the next native call would take its time only to say the same
            self._hear(heard)
        return statuses

    def _moving(self, batch: ObjectBatch, started: float) -> _Moving:
        bodies, sizes = batch.body_addresses.tolist(), batch.body_sizes.tolist()
        return _Moving(
            batch,
            batch.headers.shape[1] if sizes else 0,
            bodies,
            sizes,
            started,
            self._bounced(bodies, sizes),
            [PageStatus.TIMEOUT] * len(sizes),
            [],
        )

    def _get_part(self, moving: _Moving, rows: list[int]) -> list[int]:
        """Read some objects of `sizes` exactly; the rows back whose transfer failed, and not by time."""
        batch, header, sizes, statuses = moving.batch, moving.header, moving.sizes, moving.statuses
        with self._block(moving) as block:
            if block is None:
                return []
            addresses, lengths = self._pieces(moving, rows, block)
            wholes = [header + size for size in _picked(sizes, rows)]
            begun = time.monotonic()
            keys = _picked(batch.keys, rows)
            codes = self._store.batch_get_into_multi_buffers(keys, addresses, lengths)
            stalled = self._paced and time.monotonic() - begun > self._stall
            self._look_at(moving, codes, block, addresses)
            failed: list[int] = []
            places = list(range(len(rows)))
            if codes != wholes:
                for row, code in zip(rows, codes, strict=True):
                    if code >= 0:
                        statuses[row] = PageStatus.CORRUPT
                    elif code == _TRANSFER_FAILED and stalled:
                        statuses[row] = PageStatus.TIMEOUT
                    else:
                        statuses[row] = _READ_STATUS.get(code, PageStatus.ERROR)
                        if code == _TRANSFER_FAILED:
                            failed.append(row)
                places = [
                    at for at, (code, whole) in enumerate(zip(codes, wholes, strict=True)) if code == whole
                ]
            if places:
                hits = _picked(rows, places)
                headers = block.headers[: len(rows) * header].reshape(len(rows), header)
                batch.headers[_run(hits)] = headers[_run(places)]
                batch.stored_sizes[_run(hits)] = _picked(sizes, hits)
                for row in hits:
                    statuses[row] = PageStatus.HIT
                if moving.bounced:
                    targets = [batch.bodies[row][: sizes[row]] for row in hits]
                    sources = [block.body(place, batch, sizes[rows[place]]) for place in places]
                    copy_bodies(batch.checksums, hits, targets, sources)
        return failed

    def _fit(self, moving: _Moving, rows: list[int]) -> list[int]:
        """Set `sizes` of bodies to those of the objects; the rows that are there and fit."""
        batch, header, sizes, statuses = moving.batch, moving.header, moving.sizes, moving.statuses
        lengths = self._lengths([batch.keys[row] for row in rows])
        moving.heard += lengths
        fitting = []
        for row, length in zip(rows, lengths, strict=True):
            if length < 0:
                statuses[row] = _READ_STATUS.get(length, PageStatus.ERROR)
            elif not header <= length <= header + int(batch.body_sizes[row]):
                statuses[row] = PageStatus.CORRUPT
            elif statuses[row] is not PageStatus.ERROR or length != header + sizes[row]:
                sizes[row] = length - header
                fitting.append(row)
        return fitting

    def _lengths(self, keys: list[str]) -> list[int]:
        """Bytes of objects, or what the client answers instead."""
        if self._settings.client:  # which does not have the other call
            lengths = []
            for key in keys:
                lengths.append(self._store.get_size(key))
                if lengths[-1] in _UNREACHED:
                    return lengths + [lengths[-1]] * (len(keys) - len(lengths))
            return lengths
        found = self._store.batch_get_replica_desc(keys)
        if not found:  # none of them is there, or the master: the call does not say
            code = self._store.get_size(keys[0])
            return [code if code < 0 else _NOT_FOUND] * len(keys)
        return [_length(found.get(key, ())) for key in keys]

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        """Store objects. FULL: no segment has room at this moment; or somebody's write of this key hangs.

        HIT may also be one that another process is still writing: see `_confirm`.
        """
        with self._calling() as started:
            moving = self._moving(batch, started)
            for part in self._parts(moving, list(range(len(batch)))):
                if not self._set_part(moving, part):
                    break
            self._hear(moving.heard)
            if time.monotonic() < self._doubted + _DOUBT_SECONDS:
                self._confirm(batch.keys, moving.statuses)
        return moving.statuses

    def _set_part(self, moving: _Moving, rows: list[int]) -> bool:
        """Store some objects that follow each other; False: out of time."""
        batch, header, sizes, statuses = moving.batch, moving.header, moving.sizes, moving.statuses
        if moving.bounced or batch.checksums is not None:
            sources = [batch.bodies[row][: sizes[row]] for row in rows]
        if batch.checksums is not None and not moving.bounced:
            batch.checksums.make(rows, sources)  # while another call may be under way
        with self._block(moving) as block:
            if block is None:
                return False
            addresses, lengths = self._pieces(moving, rows, block)
            if moving.bounced:
                targets = [block.body(place, batch, size) for place, size in enumerate(map(len, sources))]
                copy_bodies(batch.checksums, rows, targets, sources)
            block.headers[: len(rows) * header].reshape(len(rows), header)[:] = batch.headers[_run(rows)]
            begun = time.monotonic()
            keys = _picked(batch.keys, rows)
            codes: list[int] = []
            try:
                codes = self._store.batch_put_from_multi_buffers(keys, addresses, lengths)
            finally:
                if not codes or not {0, _NO_ROOM}.issuperset(codes):
                    self._doubted = time.monotonic()  # before another call writes
            stalled = self._paced and time.monotonic() - begun > self._stall
            self._look_at(moving, codes, block, addresses)
        late = False
        if codes.count(0) == len(rows):  # as a rule
            statuses[rows[0] : rows[-1] + 1] = [PageStatus.HIT] * len(rows)
            return True
        for row, code in zip(rows, codes, strict=True):
            statuses[row] = _WRITE_STATUS.get(code, PageStatus.ERROR)
            if code == _TRANSFER_FAILED and stalled:
                statuses[row] = PageStatus.TIMEOUT
            late = late or statuses[row] is PageStatus.TIMEOUT or code == _NO_CONNECTION
        return not late

    def _confirm(self, keys: Sequence[str], statuses: list[PageStatus]) -> None:
        """Take back those of what was stored whose write hangs.

        A put answers 0 also if the key is only being written: by another process, or by a put whose answer
        was lost, which the master keeps for 30 s before anybody can write the key again. What is not there
        at all was stored, and removed since.

        This is a round trip, a fifth of what 8 MiB take over shared memory. So it is made while there may be
        such writes of our own: a while after anything has failed, and after the start, since the process
        before this one may have died in one. What else is under way counts as stored: another process's
        write, also if it hangs and nothing of that was noticed here, and that of a call on another thread. If
        nothing comes of it, a later get is a miss.
        """
        rows = [row for row, status in enumerate(statuses) if status is PageStatus.HIT]
        end = time.monotonic() + _OTHER_WRITER_SECONDS
        while rows and not self._suspect:
            codes = self._store.batch_is_exist(_picked(keys, rows))
            if codes.count(1) == len(codes):
                return
            rows = [row for row, code in zip(rows, codes, strict=True) if code != 1]
            if any(code in _UNREACHED for code in codes):
                self._lose()
                break
            rows = [row for row in rows if self._store.get_size(keys[row]) == _BEING_WRITTEN]
            if rows:
                self._doubted = time.monotonic()
            if time.monotonic() > end:
                break
            if rows:
                self._closing.wait(0.005)
        for row in rows:
            statuses[row] = PageStatus.TIMEOUT if self._suspect else PageStatus.FULL

    # Native calls

    def _parts(self, moving: _Moving, rows: list[int]) -> list[list[int]]:
        """Rows of one native call each."""
        if not rows:
            return []
        most = min(self._pages, _HEADER_BYTES // max(1, moving.header))
        if moving.bounced:
            room = self._settings.bounce_bytes // 2
            most = min(most, room // max(1, _step(moving.batch)))
        if most == 0:
            raise StorageError(
                f"objects of {moving.header} + {_step(moving.batch)} bytes do not fit into bounce="
                f"{self._settings.bounce_bytes}, which is two halves: make it larger"
            )
        return [rows[start : start + most] for start in range(0, len(rows), most)]

    @contextmanager
    def _block(self, moving: _Moving) -> Iterator[_Block | None]:
        """Memory for a native call, once it is free; None if there is no time for the call any more."""
        # The client's limits add up to less than the deadline. Beyond it a call is given up at 15 %, by the
        # guard: two thirds of that are for its turn, the rest for a machine that wakes it late.
        patience = _TURN * self._deadline - self._call_seconds
        if self._call_seconds >= self._deadline:
            # A short one: these limits, in whole seconds, are longer. In its first half calls are made.
            patience = self._deadline / 2
        latest = moving.started + patience
        block = None
        try:
            wait = latest - time.monotonic()
            if wait > 0:
                block = self._blocks.get(timeout=wait)
        except queue.Empty:
            pass
        try:
            if block is not None and self._settings.client and (self._suspect or self._fenced):
                # Lost since this call has begun: what the owner was asked before may still come here.
                raise self._lost()
            yield block
        finally:
            if block is not None:
                self._blocks.put(block)

    def _bounced(self, bodies: list[int], sizes: list[int]) -> bool:
        """Bodies have to be copied through memory that the client knows."""
        if self._settings.protocol == "tcp" and not self._settings.client:
            return False  # reads and writes any memory
        if self._bounce_all or not sizes:
            return True
        first, last = min(bodies), max(bodies) + max(sizes)
        if any(start <= first and last <= end for start, end in self._direct):
            return False
        # Of several pools, or not at all.
        return not all(
            any(start <= at and at + size <= end for start, end in self._direct)
            for at, size in zip(bodies, sizes, strict=True)
        )

    def _look_at(
        self, moving: _Moving, codes: list[int], block: _Block, pieces: Sequence[Sequence[int]]
    ) -> None:
        """What answers to a native call say of the client, before its memory is given back."""
        if self._settings.client and min(codes) < 0:
            if any(code in _UNREACHED for code in codes):
                self._lose()  # before somebody else is given this memory
                if not moving.bounced:
                    self._hold()
            self._check_known(codes, block, pieces)
        block.moved[moving.bounced] += len(codes)
        moving.heard += codes

    def _pieces(
        self, moving: _Moving, rows: list[int], block: _Block
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """Addresses and lengths of header and body of each object."""
        header, sizes, start = moving.header, moving.sizes, block.header_address
        heads = range(start, start + len(rows) * header, header) if header else [start] * len(rows)
        bodies = _picked(moving.bodies, rows)
        if moving.bounced:
            base, step = block.body_address, _step(moving.batch)
            bodies = [base + place * step for place in range(len(rows))]
        if (size := sizes[rows[0]]) and sizes.count(size) == len(sizes):  # as a rule, and half of the time
            return list(zip(heads, bodies, strict=True)), [(header, size)] * len(rows)
        # A piece of no bytes is refused.
        addresses = [
            (at, body) if sizes[row] else (at,) for at, row, body in zip(heads, rows, bodies, strict=True)
        ]
        return addresses, [(header, sizes[row]) if sizes[row] else (header,) for row in rows]

    # The rest

    def _require_open(self) -> None:
        with self._state:
            if self._closed:
                raise ClosedError("the mooncake backend was closed before this call")

    def delete(self, keys: Sequence[str]) -> int:
        """Forget objects; without `force` those stay that were read or asked for within the lease (-706)."""
        return self._remove(keys, self._settings.force)

    def discard(self, keys: Sequence[str]) -> int:
        """Forget damaged objects: having read one was a lease too, and nobody can write what stays."""
        return self._remove(keys, True)

    def _remove(self, keys: Sequence[str], force: bool) -> int:
        if not keys:
            self._require_open()
            return 0
        with self._calling():
            codes = self._store.batch_remove(list(keys), force)
            self._hear(codes)
        return sum(code == 0 for code in codes)

    def keys(self) -> Iterator[str]:
        """All keys of the master, over its HTTP port.

        Raises:
            StorageError: it does not answer there.
        """
        with self._calling():
            text = self._http("/get_all_keys")
        return iter(text.splitlines())

    def clear(self) -> None:
        """Forget every object of the store, whoever wrote it."""
        with self._calling():
            code = self._store.remove_all(True)
            self._hear([code])
            if code < 0:
                raise StorageError(
                    f"mooncake master {self._settings.master} was asked to forget all and answered {code}"
                )

    def stats(self) -> dict[str, int]:
        """`objects`, `bytes` and `capacity_bytes` of the whole store, over the master's HTTP port.

        And of this backend how many bodies went straight between their memory and the client
        (`direct_transfers`), and how many were copied once more (`bounced_transfers`).

        Raises:
            StorageError: it does not answer there.
        """
        with self._calling():
            text = self._http("/metrics")
        values = {}
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if not name.startswith("#"):
                values[name] = value
        names = {
            "objects": "master_key_count",
            "bytes": "master_allocated_bytes",
            "capacity_bytes": "master_total_capacity_bytes",
        }
        try:
            found = {name: int(float(values[metric])) for name, metric in names.items()}
        except (KeyError, ValueError) as error:
            raise StorageError(
                f"http://{self._settings.host}:{self._settings.metrics_port}/metrics is not that of a "
                f"mooncake master ({error}): set metrics= to its --metrics_port"
            ) from error
        direct, bounced = map(sum, zip(*self._moved, strict=True))
        return found | {"direct_transfers": direct, "bounced_transfers": bounced}

    def _http(self, path: str) -> str:
        host, port = self._settings.host, self._settings.metrics_port
        where = f"http://{host}:{port}{path}"
        if port == 0:
            raise StorageError(
                f"mooncake tells {path[1:]} only over its HTTP port: add metrics=, the --metrics_port"
            )
        connection = http.client.HTTPConnection(host, port, timeout=self._deadline)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode("ascii", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(
                f"{where} of the mooncake master does not answer ({error!r}): set metrics= to its "
                "--metrics_port"
            ) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise StorageError(
                f"{where} answered {answer.status} {answer.reason}: set metrics= to the master's "
                "--metrics_port"
            )
        return text

    def close(self) -> None:
        """Wait for calls that run, and leave the store; what is in a segment of this process goes with it.

        If the store does not answer, the client stays until it does, and the memory that it knows too.
        """
        self._begin_close()
        with self._state:
            self._state.wait_for(lambda: self._calls == 0)
            gone = self._wait_until_gone(_CLOSE_SECONDS)
        if gone:
            self._end.close()

    def _begin_close(self) -> None:
        self._closing.set()
        with self._state:
            first = not self._closed
            self._closed = True
        if first:
            self._end.submit(self._finish)

    def _wait_until_gone(self, seconds: float) -> bool:
        # Somebody who is on his way out is not left alone.
        self._state.wait_for(lambda: self._phase in ("going", "gone", "left"), max(0.0, seconds))
        if self._phase == "going":
            self._state.wait_for(lambda: self._phase == "gone", _GONE_SECONDS)
        return self._phase == "gone"

    def _enter(self, phase: Literal["asking", "going", "gone", "left"]) -> None:
        with self._state:
            self._phase = phase
            self._state.notify_all()

    def _finish(self) -> None:
        """Close the client, on a thread of its own."""
        with self._state:
            self._state.wait_for(lambda: self._calls == 0)
        self._enter("asking")
        # What a call has just found out need not be asked while somebody waits for the end of the process.
        while (self._leaving and self._suspect) or not self._can_go():
            with self._state:
                left = self._state.wait_for(lambda: self._leaving, _ASK_SECONDS)
            if left:
                self._enter("left")
                return
        self._enter("going")
        try:
            self._drop()
        except Exception:  # it is as gone as it can be
            _log.exception("the mooncake client of %s could not be closed", self._settings.master)
        self._pools.clear()
        _open.discard(self)
        self._enter("gone")

    def _can_go(self) -> bool:
        """Whether the client would be closed in a moment.

        No other thread of Python runs meanwhile: for 5 to 11 seconds with a segment whose master hangs or is
        gone, and for 30 and more with a `client` that hangs.
        """
        if not (self._settings.client or self._settings.segment_bytes):
            return True
        try:
            self._reach().close()
        except StorageError:
            return bool(self._settings.client)  # it is not there, and nobody waits for it then
        return self._store.is_exist("unified-cache") not in _UNREACHED

    def _leave(self, begun: float) -> bool:
        """Close it; False if the client is still there after a while.

        A thread that comes back from the client while Python ends is an abort. So it is not asked any more,
        and what was asked is waited for, unless that takes so long that the process is gone by then.
        """
        asked = self._answer_seconds + 0.5
        end = begun + (asked if asked < 4.5 else _CLOSE_SECONDS)
        self._begin_close()
        with self._state:
            self._leaving = True
            self._state.notify_all()
            if self._wait_until_gone(end - time.monotonic()):
                return True
        # Never deallocated: that would be the same wait again.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))
        return False


# Those whose client is there.
_open: weakref.WeakSet[MooncakeBackend] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Close what nobody has closed, as far as there is time for it.

    A client that is left over is torn down when the process exits, however long that takes, and aborts it
    if a call runs. So that exit is cut short.
    """
    begun = time.monotonic()
    left = [backend for backend in list(_open) if not backend._leave(begun)]
    if not left:
        return
    libc = ctypes.CDLL(None)
    # Handlers run in reverse order, so none of the client's does; the status is the one that the process has.
    libc.on_exit(libc._exit, None)


def _picked(all_of: Sequence[_T], places: Sequence[int]) -> Sequence[_T]:
    """The elements in these places, which are in order."""
    if len(places) == len(all_of):  # as a rule
        return all_of
    return [all_of[place] for place in places]


def _run(rows: Sequence[int]) -> slice | Sequence[int]:
    """The same rows of an array, cheaper if none is left out between them."""
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows


def _step(batch: ObjectBatch) -> int:
    """Bytes from one body to the next where they go through memory of the client."""
    return int(batch.body_sizes.max())


def _length(replicas: Sequence[Any]) -> int:
    """Bytes of an object with these replicas; _NOT_FOUND: it has none that can be read."""
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
        if replica.is_disk_replica():
            return int(replica.get_disk_descriptor().object_size)
    return _NOT_FOUND
