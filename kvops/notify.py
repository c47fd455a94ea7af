"""
Readiness of a daemon, told to whoever started it: the datagrams of ``sd_notify(3)``.

A daemon under systemd and one under ``kvops start`` say the same: ``READY=1``, a ``STATUS=`` line, and where
it listens, as ``X_KVOPS_ADDRESSES=<json>`` (names that begin with ``X_`` are for private use).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvops.errors import ConfigError

ADDRESSES_FIELD: Final = "X_KVOPS_ADDRESSES"
MESSAGE_BYTES_MAX: Final = 4096
_UCRED: Final = struct.Struct("iII")  # pid, uid, gid: unix(7), SCM_CREDENTIALS


def notify(*lines: str) -> bool:
    """
    Send ``NAME=value`` lines to ``$NOTIFY_SOCKET``; False when nobody asked to be told.

    A message that cannot be delivered is lost without an error: a daemon never fails for its supervisor.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or address[0] not in "/@":
        return False
    target = "\0" + address[1:] if address[0] == "@" else address
    message = "\n".join(line.replace("\n", " ") for line in lines).encode()[:MESSAGE_BYTES_MAX]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(1.0)  # the receiver's buffer may be full: it is a supervisor, not our caller
            sock.sendto(message, target)
    except OSError:
        return False
    return True


def notify_ready(addresses: Mapping[str, str], *, status: str) -> bool:
    """
    Say that this daemon serves, and where.

    Args:
        addresses: Of ``listen``, ``unix``, ``control``, ``http`` those it has, with the real ports.
        status: One line for people.
    """
    return notify(
        "READY=1",
        f"STATUS={status}",
        f"MAINPID={os.getpid()}",
        f"{ADDRESSES_FIELD}={json.dumps(dict(addresses), separators=(',', ':'))}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One message of a daemon."""

    pid: int  # of the sender, as the kernel saw it
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """The daemon serves."""
        return self.fields.get("READY") == "1"

    @property
    def status(self) -> str:
        """Its line for people, or ""."""
        return self.fields.get("STATUS", "")

    @property
    def addresses(self) -> dict[str, str]:
        """Where it listens; empty when it did not say, or said nonsense."""
        try:
            value = json.loads(self.fields.get(ADDRESSES_FIELD, "{}"))
        except ValueError:
            return {}
        if not isinstance(value, dict):
            return {}
        return {str(name): text for name, text in value.items() if isinstance(text, str)}


def parse_notice(message: bytes, *, pid: int) -> Notice:
    """The fields of a datagram; lines without ``=`` and bytes that are not UTF-8 are passed over."""
    fields = {}
    for line in message.decode("utf-8", "replace").splitlines():
        name, equals, value = line.partition("=")
        if equals and name:
            fields[name] = value
    return Notice(pid=pid, fields=fields)


class Receiver:
    """The starter's end: a datagram socket whose path goes to the daemons as ``NOTIFY_SOCKET``."""

    def __init__(self, directory: Path) -> None:
        """
        Bind in ``directory``, which must be private to this user.

        Raises:
            ConfigError: The socket cannot be made there.
        """
        self.path = directory / f"notify-{os.getpid()}-{time.monotonic_ns() & 0xFFFFFF:x}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._sock.setblocking(False)
            self._sock.bind(str(self.path))
        except OSError as error:
            self._sock.close()
            raise ConfigError(
                f"cannot make a socket in {directory}: {error.strerror or error}",
                fix="set XDG_RUNTIME_DIR to a short, writable folder of your own",
            ) from error

    def fileno(self) -> int:
        """For ``select`` and ``poll``."""
        return self._sock.fileno()

    def receive(self) -> Notice | None:
        """The next message if one has come; never waits."""
        try:
            message, ancillary, _, _ = self._sock.recvmsg(MESSAGE_BYTES_MAX, socket.CMSG_SPACE(_UCRED.size))
        except (BlockingIOError, InterruptedError):
            return None
        pid = 0
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _UCRED.size:
                pid = _UCRED.unpack(data[: _UCRED.size])[0]
        return parse_notice(message, pid=pid)

    def close(self) -> None:
        """Remove the socket; idempotent."""
        self._sock.close()
        try:
            self.path.unlink()
        except OSError:
            pass  # already gone, or its folder is: nobody can send there any more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
