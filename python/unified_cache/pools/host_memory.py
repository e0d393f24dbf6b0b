"""The memory of a host pool: mapped once, touched in parallel, registered in pieces, and never moved."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import resource
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from unified_cache._torch import torch
from unified_cache.errors import ArgumentError, CapacityError
from unified_cache.pools import numa
from unified_cache.pools.checks import require_integer
from unified_cache.pools.memory import available_bytes
from unified_cache.pools.pinning import Registrar, Registration, RegistrationError, pieces_of

__all__ = ["PINNED", "HostMemory", "MappedMemory"]

PINNED = ("auto", "require", "off")

_TOUCH_BYTES = 128 << 20  # of one call; a thread does not pay for less
_MOST_TOUCH_THREADS = 16  # the system's own locks allow no more
_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it
_MADV_DONTFORK = 10
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """How the memory of a host pool is made.

    Args:
        pinned: whether it is registered with the GPU, so that copies go at full speed beside the forward.
            "auto": yes, and if that fails, ordinary memory and one RuntimeWarning; "require": yes, or a
            CapacityError; "off": no. Without effect for a device pool in CPU memory.
        host_register_chunk: bytes that one registration covers at most, at least 4,096 (a page of the
            system); some drivers refuse large ones.
        huge_pages: ask the system for huge pages. They are sooner there and sooner registered, and a disk is
            done sooner with requests of fewer pieces. "auto": yes, and if it has none, ordinary ones; True:
            the same, with one RuntimeWarning then; False: no.
        numa_node: the node whose memory is used first; "auto": that of the CUDA device; None: the system
            decides. If it can not be asked for, one RuntimeWarning.
        touch_threads: threads that touch the memory first; None: as many as this process has processors,
            at most 16.

    Raises:
        ArgumentError: a value that is not allowed.
    """

    pinned: Literal["auto", "require", "off"] = "auto"
    host_register_chunk: int = 256 * 10**9
    huge_pages: bool | Literal["auto"] = "auto"
    numa_node: int | Literal["auto"] | None = None
    touch_threads: int | None = None

    def __post_init__(self) -> None:
        if self.pinned not in PINNED:
            listed = ", ".join(map(repr, PINNED))
            raise ArgumentError(f"pinned must be one of {listed}, not {self.pinned!r}")
        require_integer("host_register_chunk", self.host_register_chunk, mmap.PAGESIZE, unit=" (bytes)")
        if not isinstance(self.huge_pages, bool) and self.huge_pages != "auto":
            raise ArgumentError(f"huge_pages must be True, False or 'auto', not {self.huge_pages!r}")
        if self.touch_threads is not None:
            require_integer("touch_threads", self.touch_threads, 1)
        if self.numa_node is not None and self.numa_node != "auto":
            require_integer("numa_node", self.numa_node, 0, unit=", 'auto' or None")
            known = numa.nodes()
            if known and self.numa_node not in known:
                listed = ", ".join(map(str, known))
                raise ArgumentError(
                    f"numa_node must be one of this machine's ({listed}), not {self.numa_node}"
                )


class MappedMemory:
    """Bytes of host memory that never move, all zero at first.

    They stay where they are while anybody holds a tensor or a view of them, also after `close`, and are
    unregistered before they go.

    Args:
        size: bytes.
        options: how they are made.
        unit: bytes that should be in one registration, such as a page of the pool; they are if
            `host_register_chunk` allows.
        registrar: what registers them; None: nothing does.
        device: the device that they are for.
        lend: gives memory of somebody else's for so many bytes, or None: uint8 (size,), writable, zero,
            beginning at a multiple of the system's page size, and there while there is a view of it.
            `huge_pages` has no effect on it.

    Attributes:
        address: where they begin, a multiple of the system's page size.
        size: bytes.
        lent: they are `lend`'s.

    Raises:
        ArgumentError: more than can be mapped, or `lend` gave memory that can not be used.
        CapacityError: the machine has run out of memory, or they can not be registered and must be.
    """

    def __init__(
        self,
        size: int,
        options: HostMemory,
        *,
        unit: int = 1,
        registrar: Registrar | None = None,
        device: torch.device | None = None,
        lend: Callable[[int], memoryview | None] | None = None,
    ) -> None:
        self.size = size
        available = available_bytes()
        if available is not None and size > available:  # touching it would have this process killed
            raise ArgumentError(
                f"{size / 1e9:.3f} GB of host memory asked for, {available / 1e9:.3f} GB are available: "
                "make hicache_ratio or hicache_size smaller"
            )
        node = _node(options, device)
        lent = None if lend is None else _lent(lend, size, node, options)
        self.lent = lent is not None
        self._registration: Registration | None = None
        self._mapping = _whole(_map(size) if lent is None else lent, size)
        self.address = ctypes.addressof(self._mapping)
        if self.lent:
            self._check_lent()
        elif options.huge_pages:
            reason = _ask_for_huge_pages(self.address, self.size)
            if reason is not None and options.huge_pages != "auto":
                _warn(
                    f"huge_pages=True: no huge pages ({reason}, see {_HUGE_PAGES}); "
                    "going on with ordinary ones"
                )
        if node is not None:
            try:
                numa.prefer_node(self.address, size, node)
            except OSError as error:
                _no_node(options, node, error)
        _touch(self.buffer, self.address, size, options.touch_threads)
        if registrar is not None and options.pinned != "off":
            self._register(registrar, options, unit)

    def _check_lent(self) -> None:
        if self.address % mmap.PAGESIZE:
            raise ArgumentError(
                f"memory was lent that begins at {self.address:#x}, it has to begin at a multiple of "
                f"{mmap.PAGESIZE}"
            )
        # Others see what is written there, so a child process must not write to it.
        try:
            _advise(self.address, self.size, _MADV_DONTFORK)
        except OSError as error:
            _warn(
                f"memory that was lent can not be kept from forked processes ({error}): none may write to it"
            )

    @property
    def buffer(self) -> memoryview:
        """The bytes, for views without a copy."""
        return memoryview(self._mapping).cast("B")

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(address, bytes) of each registration, in order; empty if nothing is registered."""
        return [] if self._registration is None else list(self._registration.pieces)

    def close(self) -> None:
        """Unregister. Every piece is tried, and there is one RuntimeWarning if some fail. Twice is fine."""
        if self._registration is not None:
            self._registration.release()

    def _register(self, registrar: Registrar, options: HostMemory, unit: int) -> None:
        most = options.host_register_chunk
        # Two registrations must not share a page of the system.
        together = math.lcm(unit, mmap.PAGESIZE)
        pieces = pieces_of(self.address, self.size, most, together if together <= most else mmap.PAGESIZE)
        try:
            self._registration = Registration(registrar, pieces)
        except RegistrationError as error:
            message = _refused(self.size, most, error)
            if options.pinned == "require" or error.left:
                raise CapacityError(message) from error
            _warn(f"{message}. Going on with ordinary memory: copies are slower")
            return
        # Before the memory goes: its addresses may be something else's after that.
        end = weakref.finalize(self._mapping, self._registration.release)
        end.atexit = False  # the driver takes everything with it
        # A forked child has no use for it, and must not make the system move pages that a GPU reads.
        _advise(self.address, self.size, _MADV_DONTFORK)


def _map(size: int) -> memoryview:
    try:
        # Private: a child process that writes to it must not change ours.
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, OverflowError) as error:
        raise ArgumentError(
            f"{size} bytes of host memory can not be mapped ({error}): "
            "make hicache_ratio or hicache_size smaller"
        ) from None


def _lent(
    lend: Callable[[int], memoryview | None], size: int, node: int | None, options: HostMemory
) -> memoryview | None:
    with ExitStack() as stack:
        if node is not None:
            # Whoever makes it may touch it at once.
            with suppress(OSError):  # said when the pool asks for the node itself
                stack.enter_context(numa.preferring(node))
        lent = lend(size)
    if lent is not None and options.huge_pages is True:
        _warn("huge_pages=True has no effect on memory that a storage lends")
    return lent


def _no_node(options: HostMemory, node: int, error: OSError) -> None:
    _warn(f"numa_node={options.numa_node!r}: memory of node {node} can not be asked for ({error})")


def _whole(memory: memoryview, size: int) -> ctypes.Array[ctypes.c_uint8]:
    """An object of our own that holds this memory: its finalizers run while the memory is there."""
    if memory.nbytes != size or not memory.c_contiguous or memory.readonly:
        raise ArgumentError(
            f"memory was lent with {memory.nbytes} bytes, contiguous={memory.c_contiguous}, "
            f"readonly={memory.readonly}: it must be {size} bytes, contiguous and writable"
        )
    return (ctypes.c_uint8 * size).from_buffer(memory)


def _advise(address: int, size: int, advice: int) -> None:
    """`madvise`, without keeping other threads waiting.

    Raises:
        OSError: the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _ask_for_huge_pages(address: int, size: int) -> str | None:
    """Why there are none; None: there may be some."""
    try:
        if "[never]" in _HUGE_PAGES.read_text():
            return "the system is set to 'never'"
    except OSError:
        pass  # the call itself says whether there are any
    try:
        _advise(address, size, mmap.MADV_HUGEPAGE)
    except OSError as error:
        return str(error)
    return None


def _node(options: HostMemory, device: torch.device | None) -> int | None:
    if options.numa_node != "auto":
        return options.numa_node
    if device is None or device.type != "cuda":
        return None
    try:
        return numa.node_of_device(device)
    except OSError as error:
        _warn(f"numa_node='auto': the node of {device} is not known ({error})")
        return None


def _touch(memory: memoryview, address: int, size: int, threads: int | None) -> None:
    """Give every page of the system its memory now, not in the middle of a copy."""
    starts = range(0, size, _TOUCH_BYTES)
    if threads is None:
        threads = min(len(os.sched_getaffinity(0)), _MOST_TOUCH_THREADS)
    everything = np.frombuffer(memory, np.uint8)

    def touch(start: int) -> None:
        length = min(_TOUCH_BYTES, size - start)
        try:
            _advise(address + start, length, _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            everything[start : start + length : mmap.PAGESIZE] = 0  # an older system

    try:
        if threads == 1 or len(starts) == 1:
            for start in starts:
                touch(start)
        else:
            with ThreadPoolExecutor(min(threads, len(starts)), "unified-cache touch") as workers:
                list(workers.map(touch, starts))
    except OSError as error:
        raise CapacityError(
            f"{size} bytes of host memory can not be had ({error}): "
            "make hicache_ratio or hicache_size smaller"
        ) from None


def _refused(size: int, most: int, error: RegistrationError) -> str:
    free = available_bytes()
    known = "unknown" if free is None else f"{free / 1e9:.3f} GB"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    left = f" Still registered, since undoing it failed: {'; '.join(error.left)}." if error.left else ""
    return (
        f"{size / 1e9:.3f} GB of host memory can not be registered with the GPU: {error}.{left} "
        f"Memory free: {known}; memlock limit (ulimit -l): {memlock}. Make hicache_ratio or hicache_size "
        f"smaller, make host_register_chunk={most} smaller, raise the memlock limit, or set pinned='off'"
    )
