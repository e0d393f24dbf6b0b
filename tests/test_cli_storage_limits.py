"""A storage whose calls never end holds no command up: one line, the status 1, in time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self

import pytest

from tests.storage.support import Pages, keys, make_guard
from unified_cache.cli import main
from unified_cache.cli.limited import LimitedBackend, is_held_up
from unified_cache.errors import StorageError, StorageTimeoutError
from unified_cache.storage.backends.memory import Fault, MemoryBackend
from unified_cache.storage.contract import ObjectBatch, PageStatus
from unified_cache.storage.probe import probe
from unified_cache.storage.urls import StorageUrl

TIMEOUT = 0.1


class Stuck(MemoryBackend):
    """``dynamic://...:Stuck?at=get``: 2 pages, and one call does not end before `go_on`."""

    go_on: ClassVar[threading.Event] = threading.Event()
    closed: ClassVar[threading.Event] = threading.Event()

    def __init__(self, at: str) -> None:
        super().__init__()
        guard, _ = make_guard(self)
        pages = Pages(2)
        assert guard.set(keys(2), pages.views, pages.addresses) == [PageStatus.HIT] * 2
        self.at = at
        self.hang("open")

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        url.only("at")
        return cls(url.text("at"))

    def hang(self, call: str) -> None:
        if call == getattr(self, "at", ""):
            assert self.go_on.wait(60)

    def register(self, memory: memoryview) -> None:
        self.hang("register")

    def expect(self, body_bytes: int) -> None:
        self.hang("expect")

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        self.hang("exists")
        return super().exists(runs)

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        self.hang("get")
        return super().get(batch)

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        self.hang("set")
        return super().set(batch)

    def delete(self, keys: Sequence[str]) -> int:
        self.hang("delete")
        return super().delete(keys)

    def keys(self) -> Iterator[str]:
        self.hang("keys")
        for key in list(super().keys()):
            self.hang("next key")
            yield key

    def clear(self) -> None:
        self.hang("clear")
        super().clear()

    def stats(self) -> dict[str, int]:
        self.hang("stats")
        return super().stats()

    def close(self) -> None:
        self.hang("close")
        super().close()
        self.closed.set()


@pytest.fixture
def url() -> Iterator[str]:
    Stuck.go_on.clear()
    Stuck.closed.clear()
    yield f"dynamic://{__name__}:Stuck?at="
    Stuck.go_on.set()
    # Whatever was held up is closed then, and the threads are gone.
    assert Stuck.closed.wait(30)
    for thread in threading.enumerate():
        if thread.name.startswith("unified-cache storage command"):
            thread.join(30)
            assert not thread.is_alive()


CHECK = ("--pages", "8", "--page-bytes", "512", "--batch", "2", "--threads", "3")


@pytest.mark.parametrize(
    "action, at",
    [
        *(("check", at) for at in ("open", "expect", "register", "set", "exists", "get", "delete", "close")),
        *(("ls", at) for at in ("open", "keys", "next key", "close")),
        *(("stat", at) for at in ("open", "stats", "close")),
        *(("verify", at) for at in ("open", "keys", "next key", "register", "get", "close")),
        *(("gc", at) for at in ("open", "keys", "get", "delete", "close")),
        *(("clear", at) for at in ("open", "clear", "stats", "close")),
    ],
)
def test_a_call_that_hangs_ends_the_command(
    action: str, at: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"check": CHECK, "clear": ("--yes",)}.get(action, ())
    if (action, at) == ("gc", "delete"):
        options = ("--keep", "f" * 16)
    # It is `go_on` that would let it end by itself, and nobody sets that before it has.
    assert main(["storage", action, url + at, "--timeout", str(TIMEOUT), *options]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "--timeout" in said.err
    assert is_held_up()


def test_an_error_is_the_backend_s_own_and_what_comes_next_works() -> None:
    inner = MemoryBackend()
    backend = LimitedBackend(lambda: inner, "here", 30.0)
    calls = threading.active_count()
    for _ in range(3):
        inner.faults.plan("exists", [Fault.DOWN])
        with pytest.raises(StorageError, match="is down"):
            backend.exists([["a"]])
        assert backend.exists([["a"]]) == [0]
    assert threading.active_count() == calls
    backend.close()
    assert not is_held_up()
    with pytest.raises(StorageError, match="nobody there"):
        LimitedBackend(_nobody, "here", 30.0)


def _nobody() -> MemoryBackend:
    raise StorageError("nobody there")


def test_after_a_call_that_hangs_no_other_is_made(url: str) -> None:
    inner = Stuck("get")
    backend = LimitedBackend(lambda: inner, "here", TIMEOUT)
    with pytest.raises(StorageError, match="timeout"):
        probe(backend, page_bytes=512, pages=4, batch=1, threads=2, deadline=TIMEOUT)
    assert inner.calls["delete"] == 0
    for call in (backend.stats, backend.clear, lambda: list(backend.keys())):
        with pytest.raises(StorageTimeoutError, match=r"storage here: 'get' has not ended within 0\.1 s"):
            call()
    backend.close()


def test_the_process_leaves_a_thread_that_hangs_behind(tmp_path: Path) -> None:
    # Opening a pipe that nobody writes to hangs, like a file of a server that is gone.
    key = keys(1)[0]
    (tmp_path / key[:2] / key[2:4]).mkdir(parents=True)
    os.mkfifo(tmp_path / key[:2] / key[2:4] / key)
    code = f"""
import pathlib, sys
from unified_cache.cli import main
from unified_cache.storage.backends import pages
pages.PagesBackend.keys = lambda self: iter([{key!r}])
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "storage", "verify", str(tmp_path), "--timeout", "0.2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"unified-cache: storage {tmp_path}: 'get' has not ended within 0.2 s")
    assert done.stderr.count("\n") == 1
