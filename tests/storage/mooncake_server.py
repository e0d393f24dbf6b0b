"""Real mooncake processes on free loopback ports: a master, and owners of memory segments."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from unified_cache.storage.backends.mooncake_settings import client_environment

__all__ = [
    "MASTER",
    "Master",
    "Owner",
    "Process",
    "environment_kept",
    "free_port",
    "wait_until",
    "why_not_here",
]

MASTER = "127.0.0.1"
_READY = 20.0  # seconds; the slowest start that was seen took 3


def why_not_here() -> str | None:
    """What is missing on this machine to run these tests; None: nothing."""
    if importlib.util.find_spec("mooncake") is None:
        return "the package mooncake-transfer-engine-non-cuda is not installed"
    # Not imported here: the backend has to set its environment before.
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return f"{error}: apt-get install libibverbs1"
    return None


@contextlib.contextmanager
def environment_kept(deadline: float) -> Iterator[None]:
    """What backends of this deadline set for their client goes again."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in client_environment(deadline):
            if name not in before:
                os.environ.pop(name, None)


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((MASTER, 0))
        return int(probe.getsockname()[1])


def _binary(name: str) -> str:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(next(iter(spec.submodule_search_locations))) / name)


def wait_until(true: Callable[[], bool], what: str, seconds: float = _READY) -> None:
    """Look every few milliseconds until it is so; an AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.01)


class Process:
    """One server process, which can be frozen, killed, and started again with the same arguments."""

    def __init__(
        self, arguments: list[str], port: int, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._arguments = arguments
        self._environment = {**os.environ, **environment}
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        assert self._process is None
        self._process = subprocess.Popen(
            self._arguments,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._listens, f"{self._arguments[0]} listens on port {self.port}")

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self._arguments} ended with {self._process.returncode}"
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex((MASTER, self.port)) == 0

    def freeze(self) -> None:
        """From the return on it neither answers nor goes away."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # its threads stop one after the other

    def thaw(self) -> None:
        """Go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a word; more than once is fine."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Master(Process):
    """A master; `address` and `metrics_port` are where it answers."""

    def __init__(self, *options: str) -> None:
        port, self.metrics_port = free_port(), free_port()
        self.address = f"{MASTER}:{port}"
        super().__init__(
            [
                _binary("mooncake_master"),
                f"--rpc_address={MASTER}",
                f"--rpc_port={port}",
                f"--metrics_host={MASTER}",
                f"--metrics_port={self.metrics_port}",
                "--logtostderr",
                *options,
            ],
            port,
        )


class Owner(Process):
    """A process that gives a segment to the master, and works for clients over shared memory."""

    def __init__(
        self, master: Master, megabytes: int = 256, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        port = free_port()
        self.address = f"{MASTER}:{port}"
        super().__init__(
            [
                _binary("mooncake_client"),
                f"--host={MASTER}",
                f"--port={port}",
                f"--global_segment_size={megabytes} MB",
                f"--master_server_address={master.address}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
                "--threads=2",
                "--logtostderr",
            ],
            port,
            environment,
        )
