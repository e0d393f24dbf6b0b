"""A process whose children write to a store and are killed: ``python writers.py SCHEME PLACE``.

It reads lines ``SEED LINES SECONDS`` and forks a child for each, which stores, reads and deletes objects
until it has run so many lines of the backends' code, or, where that is 0, until so many seconds are over;
then it is killed, and a line says so. Forking is cheap, and this process has no threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from types import FrameType
from typing import Any

import numpy as np

from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.mmap import MmapBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.backends.shm import ShmBackend
from unified_cache.storage.conformance import HEADER_BYTES, Memory, content, key
from unified_cache.storage.contract import Backend

BODY_BYTES = 32_768
SLOTS = 24
OBJECTS = 60
SIZE = SLOTS * (BODY_BYTES + 569) + 16_384
KEYS = [key(number) for number in range(OBJECTS)]


def open_store(scheme: str, place: str, threads: int) -> Backend:
    """The store that everybody uses."""
    if scheme == "pages":
        return PagesBackend(place, SIZE, threads=threads)
    if scheme == "shm":
        return ShmBackend(place, SIZE, slot_bytes=BODY_BYTES, threads=threads)
    kind = FileBackend if scheme == "file" else MmapBackend
    return kind(place, SIZE, slot_bytes=BODY_BYTES, threads=threads)


def contents() -> dict[str, Any]:
    """Headers and bodies of all objects."""
    return {name: content(name, HEADER_BYTES + BODY_BYTES) for name in KEYS}


def batch_of(names: list[str], data: dict[str, Any], memory: Memory) -> Any:
    """The objects, in this memory."""
    for at, name in enumerate(names):
        memory.headers[at] = data[name][:HEADER_BYTES]
        memory.bodies[at][:] = data[name][HEADER_BYTES:]
    return memory.batch(names)


def write(scheme: str, place: str, seed: int, lines: int, data: dict[str, Any]) -> None:
    """Use the store until the end."""
    rng = random.Random(seed)
    left = lines

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if "backends" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    if lines:
        sys.settrace(trace)
    store = open_store(scheme, place, threads=1 if lines else 3)
    memory = Memory(8, BODY_BYTES)
    while True:
        names = rng.sample(KEYS, 8)
        store.set(batch_of(names, data, memory))
        store.get(memory.batch(rng.sample(KEYS, 8)))
        if rng.random() < 0.3:
            store.delete(rng.sample(KEYS, 3))
        if rng.random() < 0.02:
            store.clear()


def main() -> None:
    """One child a line."""
    scheme, place = sys.argv[1:]
    data = contents()
    np.random.default_rng()  # loads what it needs before there are children
    for line in sys.stdin:
        seed, lines, seconds = line.split()
        child = os.fork()
        if not child:
            try:
                write(scheme, place, int(seed), int(lines), data)
            finally:
                os._exit(1)
        if not int(lines):
            time.sleep(float(seconds))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else f"ended with {status}", flush=True)


if __name__ == "__main__":
    main()
