"""Listening sockets of master and store, with errors an operator can act on."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from pathlib import Path
from typing import Final

from kvops.errors import ConfigError
from kvops.net.link import Address

BACKLOG: Final = 1_024
FILES_RESERVED: Final = 128  # for the journal, logs, scrapes, control calls and sockets that listen


def descriptor_room(*wanted: int) -> tuple[int, ...]:
    """
    How many descriptors of each kind this process may hold, after it has taken as many files as it is allowed.

    What it can neither accept nor refuse for want of descriptors would be hung up on without a word.

    Args:
        wanted: For connections, and for what else it takes from its peers.

    Returns:
        As many as wanted, or in proportion what there is; one at least.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = sum(wanted) + FILES_RESERVED
    if hard != resource.RLIM_INFINITY:
        need = min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
        soft = need
    if soft == resource.RLIM_INFINITY or soft >= sum(wanted) + FILES_RESERVED:
        return wanted
    room = soft - FILES_RESERVED
    return tuple(max(1, room * count // sum(wanted)) for count in wanted)


class Room:
    """A bounded number of places, counted."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self) -> bool:
        """Take a place, if there is one."""
        if self._count >= self._count_max:
            return False
        self._count += 1
        return True

    def leave(self) -> None:
        """Give a place back."""
        assert self._count > 0, "left once"
        self._count -= 1


def listen_tcp(address: Address) -> socket.socket:
    """
    A listening socket; port 0 takes a free one.

    Raises:
        ConfigError: The address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        fix = (
            "choose another port, or find who has it: ss -ltnp"
            if error.errno == errno.EADDRINUSE
            else "choose an address of this machine: ip -brief address"
        )
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}", fix=fix) from error
    return sock


def listen_unix(path: str) -> socket.socket:
    """
    A listening Unix socket that its owner alone can reach; a dead one's leftover is replaced.

    Raises:
        ConfigError: Somebody listens there, or it cannot be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if _is_socket(path):
            if _answers(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            Path(path).unlink()
        umask = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(umask)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror or error}", fix="stop who listens there: ss -lxp"
        ) from error
    return sock


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True
