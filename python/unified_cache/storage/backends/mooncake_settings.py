"""How a Mooncake Store is reached: what its URL says, and what its client takes only from the environment."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from unified_cache.errors import StorageError
from unified_cache.storage.urls import StorageUrl

__all__ = [
    "MooncakeSettings",
    "client_environment",
    "number_in",
    "own_address",
    "parse_address",
    "set_environment",
]

_log = logging.getLogger(__name__)

_LANES = 16  # connections to each owner of a segment; the most that the client allows
_MASTER_PORT, _METRICS_PORT = 50051, 9003  # the master's own defaults


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """How to reach a Mooncake Store.

    Attributes:
        host, port: of the master.
        deadline: seconds that a call may take.
        local: name or address under which other machines reach this one; "": the one that reaches the master.
        protocol: "tcp" or "rdma".
        devices: RDMA devices, separated by commas; "": all.
        segment_bytes: memory that this process gives to the store; 0: none, it is only a client.
        metadata: metadata server; P2PHANDSHAKE: none is needed.
        client: host:port of a `mooncake_client` on this machine that does the work (over shared memory); "":
            this process does.
        bounce_bytes: with `client` for memory that is not its own, with RDMA for memory that was never
            registered: memory that bodies are copied through.
        metrics_port: the master's HTTP port; 0: there is none, so no `keys` and no `stats`.
        force: `delete` removes also what somebody has read or asked for within the lease.
    """

    host: str
    port: int
    deadline: float
    local: str = ""
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    metadata: str = "P2PHANDSHAKE"
    client: str = ""
    bounce_bytes: int = 64 << 20
    metrics_port: int = _METRICS_PORT
    force: bool = False

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        """Of ``mooncake://host:port?option=value``."""
        url.only("bounce", "client", "device", "force", "local", "metadata", "metrics", "protocol", "segment")
        if url.path not in ("", "/"):
            raise StorageError(f"storage {url}: a mooncake:// URL has no path, {url.path!r} must go")
        client = url.text("client")
        if client:
            parse_address(client, f"storage {url}: option client")
        segment = url.size("segment") or 0
        if client and segment:
            raise StorageError(
                f"storage {url}: options segment and client exclude each other: start the client {client} "
                f"with --global_segment_size={segment}"
            )
        return cls(
            host=url.need_host("master"),
            port=_MASTER_PORT if url.port is None else url.port,
            deadline=deadline,
            local=url.text("local"),
            protocol=url.choice("protocol", ("tcp", "rdma"), "tcp"),
            devices=url.text("device"),
            segment_bytes=segment,
            metadata=url.text("metadata", "P2PHANDSHAKE"),
            client=client,
            bounce_bytes=url.size("bounce", 64 << 20) or 0,
            metrics_port=url.integer("metrics", _METRICS_PORT, 0, 65535),
            force=url.flag("force"),
        )

    @property
    def master(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"


def client_environment(deadline: float) -> dict[str, str]:
    """The settings of the client that it takes only from the environment, for calls of `deadline` seconds.

    They hold for everything in the process that uses Mooncake, so what is set there already stays as it is.
    """
    # Seconds are integers there. A transfer to an owner that hangs is given up after up to two of these
    # times, and then comes what waited behind it: with 4 lanes and no limit a batch of 32 took 26 s. So only
    # as much may wait in the queue as the deadline has time for; the rest may wait a moment for its place.
    stall = max(1, int(deadline / 8))
    wait = deadline / 8
    rounds = max(1, int((deadline - wait) / (2 * stall)))
    return {
        # A write asks the master twice.
        "MC_RPC_TIMEOUT_MS": str(max(50, int(deadline * 500))),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(max(50, int(deadline * 500))),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(stall),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(stall),
        "MC_TCP_ADMISSION_TIMEOUT_MS": str(max(50, int(wait * 1000))),
        "MC_TCP_LANES_PER_PEER": str(_LANES),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(max(1, _LANES * (rounds - 1))),
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(stall),
        # Each try is a timeout if the master hangs; 20 by default.
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        # Else it writes a line for every object that is not there, and fifteen for each start.
        "GLOG_minloglevel": "3",
    }


def set_environment(deadline: float) -> None:
    for name, value in client_environment(deadline).items():
        found = os.environ.setdefault(name, value)
        if found != value and not name.startswith("GLOG"):
            _log.warning(
                "%s=%s is set in the environment, calls of %g s need %s: they may take longer",
                name,
                found,
                deadline,
                value,
            )


def number_in(environment: Mapping[str, str], name: str) -> int:
    """What a variable of the client's says.

    Raises:
        StorageError: it is no whole number.
    """
    text = environment[name]
    if not text.isdecimal():
        raise StorageError(
            f"{name}={text!r} is set in the environment: it must be a whole number, or not be set"
        )
    return int(text)


def parse_address(text: str, what: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StorageError(f"{what} must be host:port, not {text!r}")
    return host, int(port)


def own_address(host: str, port: int) -> str:
    """The address of the interface that packets to host:port leave by; nothing is sent."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StorageError(
            f"mooncake master {host}:{port} has no address that can be reached ({error}): change the host"
        ) from error
