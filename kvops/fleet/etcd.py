"""A small etcd on this machine, for a group that wants several masters and has none."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvops.errors import Refused

MEMBERS: Final = 3
HEARTBEAT_MS: Final = 50
ELECTION_MS: Final = 250  # its defaults, 100 and 1,000, are for networks; this one never leaves the machine
LEASE_TTL_S: Final = 1  # of a leading master, with these
GET_IT: Final = "apt-get install etcd-server, or name a running one: --etcd HOST:PORT"


def program() -> str:
    """
    The etcd on PATH.

    Raises:
        Refused: There is none.
    """
    path = shutil.which("etcd")
    if path is None:
        raise Refused("--etcd auto needs the program etcd, which is not on PATH", fix=GET_IT)
    return path


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def configurations(
    names: Sequence[str], folders: Sequence[Path], *, token: str, addresses: Sequence[str]
) -> list[dict[str, Any]]:
    """
    What each member is started with, as ``etcd --config-file`` reads it; ports are chosen here.

    Args:
        names: Of the members.
        folders: Where each keeps its data.
        token: Tells this etcd from every other one that had these ports before.
        addresses: Where each listens, without a port.
    """
    ports = free_ports(2 * len(names))
    clients = [f"http://{host}:{port}" for host, port in zip(addresses, ports, strict=False)]
    peers = [f"http://{host}:{port}" for host, port in zip(addresses, ports[len(names) :], strict=True)]
    return [
        {
            "name": name,
            "data-dir": str(folder),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"{one}={url}" for one, url in zip(names, peers, strict=True)),
            "initial-cluster-token": token,
            "heartbeat-interval": HEARTBEAT_MS,
            "election-timeout": ELECTION_MS,
            "enable-grpc-gateway": True,  # off with a configuration file: chaos asks by HTTP how etcd is
            "logger": "zap",
            "log-outputs": ["stderr"],
        }
        for name, folder, client, peer in zip(names, folders, clients, peers, strict=True)
    ]


def endpoint(configuration: dict[str, Any]) -> str:
    """``host:port`` that clients of this member use."""
    return str(configuration["listen-client-urls"]).removeprefix("http://")
