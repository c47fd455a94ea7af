"""How an engine comes by a pool: what it must say, and what is taken for granted when it does not."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvops.errors import UsageError
from kvops.files import default_state_dir, read_secret
from kvops.net.auth import Hello
from kvops.net.etcd_query import parse_masters
from kvops.store.channel import Identity
from kvops.store.client import Pool, bounded_ms
from kvops.store.clock import boot_id
from kvops.store.keys import NAMESPACE_BYTES, NAMESPACE_DEFAULT

DEADLINE_MS_DEFAULT: Final = 200
TRANSPORTS: Final = ("shm", "tcp")
NAME_BYTES_MAX: Final = 255  # of a client and its host


def connect(
    masters: str | Sequence[str],
    *,
    deadline_ms: int = DEADLINE_MS_DEFAULT,
    secret_file: str | Path | None = None,
    group: str = "local",
    namespace: bytes = NAMESPACE_DEFAULT,
    host: str | None = None,
    numa_node: int = 0,
    name: str | None = None,
    transports: Sequence[str] = TRANSPORTS,
    transports_between_hosts: Sequence[str] | None = None,
) -> Pool:
    """
    A pool's client; returns at once, with or without a master.

    Args:
        masters: ``host:port``, the path of a Unix socket, ``etcd://host:port,host:port/group``, or a list of such.
        deadline_ms: Of calls that name none.
        secret_file: The group's secret; by default that of the local group of that name.
        group: Name of the group; a master of another one refuses.
        namespace: From ``kvops.store.keys.namespace_digest``: what must agree before pages may be shared.
        host: Logical host of this engine; placement and failure domains go by it. The machine's by default.
        numa_node: Of this engine's memory.
        name: Of this client, for ``kvops status``.
        transports: Allowed ones of shm and tcp.
        transports_between_hosts: Allowed ones towards stores of another logical host; all of them by default.

    Raises:
        UsageError: An address or a transport is none; ConfigError when there is no secret.
    """
    listed = [masters] if isinstance(masters, str) else list(masters)
    if not listed:
        raise UsageError("no master's address", fix="give host:port")
    for transport in (*transports, *(transports_between_hosts or ())):
        if transport not in TRANSPORTS:
            raise UsageError(f"no transport {transport!r}", fix=f"choose from {', '.join(TRANSPORTS)}")
    if not transports:
        raise UsageError("no transport is allowed", fix=f"choose from {', '.join(TRANSPORTS)}")
    if len(namespace) != NAMESPACE_BYTES:
        raise UsageError(f"a namespace of {len(namespace)} B", fix="pass what namespace_digest() returned")
    if numa_node < 0:
        raise UsageError(f"NUMA node {numa_node}", fix="count from 0")
    addresses = parse_masters(listed)
    secret = read_secret(Path(secret_file) if secret_file is not None else local_secret(group))
    hello = Hello(
        role="client",
        group=group,
        name=_name("name", name) if name else _program(),
        host=_name("host", host or socket.gethostname()),
        numa_node=numa_node,
        pid=os.getpid(),
        boot_id=boot_id(),
        nonce=os.urandom(16),
    )
    return Pool(
        addresses,
        Identity(hello=hello, secret=secret),
        namespace=namespace,
        deadline_ms=bounded_ms(deadline_ms),
        transports=transports,
        transports_between_hosts=transports if transports_between_hosts is None else transports_between_hosts,
    )


def _name(what: str, text: str) -> str:
    """A name that fits the handshake."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError(f"the {what} {text!r} cannot be written as UTF-8", fix="choose another") from None
    if size > NAME_BYTES_MAX:
        raise UsageError(f"a {what} of {size} B", fix=f"at most {NAME_BYTES_MAX}")
    return text


def _program() -> str:
    """What the running program is called, whatever bytes that is made of."""
    name = Path(sys.argv[0] if sys.argv else "").name or "python"
    return name.encode("utf-8", "replace")[:NAME_BYTES_MAX].decode("utf-8", "ignore")


def local_secret(group: str) -> Path:
    """Where ``kvops start`` keeps the secret of a local group."""
    return default_state_dir() / "groups" / group / "secret"
