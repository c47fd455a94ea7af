"""Asking one member of etcd who leads a group: one HTTP exchange that never blocks, in place of a link to a master."""

from __future__ import annotations

import base64
import errno
import os
import select
import socket
import time
from typing import Final

import msgspec

from kvops.addresses import join_address
from kvops.errors import NotLeader, Unreachable, UsageError
from kvops.net.link import Address, LinkState, Receiver, Single
from kvops.net.resolve import resolver

SCHEME: Final = "etcd://"
ANSWER_BYTES_MAX: Final = 64 << 10


class EtcdEndpoint(msgspec.Struct, frozen=True):
    """A member of etcd that knows who leads a group."""

    host: str
    port: int
    group: str

    def __str__(self) -> str:
        return f"{SCHEME}{join_address(self.host, self.port)}/{self.group}"


def parse_masters(texts: list[str]) -> list[Address | EtcdEndpoint]:
    """
    Where to look for a group's leader: masters' addresses, or ``etcd://host:port,host:port/group``.

    Raises:
        UsageError: A text is neither.
    """
    found: list[Address | EtcdEndpoint] = []
    try:
        for text in texts:
            if not text.startswith(SCHEME):
                found.append(Address.parse(text))
                continue
            endpoints, slash, group = text.removeprefix(SCHEME).partition("/")
            if not slash or not group or "/" in group:
                raise Unreachable(f"{text!r} names no group", fix="write etcd://host:port,host:port/group")
            for endpoint in endpoints.split(","):
                address = Address.parse(endpoint)
                found.append(EtcdEndpoint(address.host, address.port, group))
    except Unreachable as error:
        raise UsageError(error.what, fix=error.fix) from None
    return found


class _Pair(msgspec.Struct):
    value: str


class _Range(msgspec.Struct):
    kvs: list[_Pair] = []


class View(msgspec.Struct):
    """Where the leader serves."""

    address: str  # of the wire
    control: str = ""  # of gRPC


class EtcdQuery:
    """
    As a ``Link`` that never becomes ready: it ends by ``NotLeader`` with the leader's address, or ``Unreachable``.

    Speaks to etcd's own JSON gateway (etcd 3.4 and later), without TLS.
    """

    def __init__(self, endpoint: EtcdEndpoint) -> None:
        self.address = endpoint
        self.state = LinkState.CONNECTING
        key = base64.b64encode(f"/kvops/{endpoint.group}/view".encode()).decode()
        body = f'{{"key":"{key}"}}'
        self.view: View | None = None  # once it has been answered
        self._out = (
            f"POST /v3/kv/range HTTP/1.0\r\nHost: {endpoint.host}:{endpoint.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self._in = b""
        try:
            family, host = resolver.address(endpoint.host)
            self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except (OSError, Unreachable) as error:
            raise self._unreachable(str(error)) from error
        code = self.sock.connect_ex((host, endpoint.port))
        if code not in (0, errno.EINPROGRESS):
            self.close()
            raise self._unreachable(os.strerror(code))

    def _unreachable(self, why: str) -> Unreachable:
        return Unreachable(
            f"etcd at {self.address} does not say who leads: {why}", fix="check etcd and the group"
        )

    def fileno(self) -> int:
        """For ``poll``."""
        return self.sock.fileno()

    @property
    def events(self) -> int:
        """What to poll for."""
        return select.POLLOUT if self._out else select.POLLIN

    def close(self) -> None:
        """Hang up."""
        self.state = LinkState.CLOSED
        self.sock.close()

    def advance(self, events: int, receiver: Receiver) -> None:
        """
        Do what ``poll`` says the socket is ready for.

        Raises:
            NotLeader: With the leader's address: the answer.
            Unreachable: There is none.
        """
        try:
            if self._out:
                code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                self._out = self._out[self.sock.send(self._out) :]
                return
            data = self.sock.recv(ANSWER_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError as error:
            self.close()
            raise self._unreachable(error.strerror or str(error)) from error
        self._in += data
        if data and len(self._in) <= ANSWER_BYTES_MAX:
            return
        self.close()
        leader = self._leader()
        raise NotLeader(f"etcd at {self.address} names {leader}", fix="", leader=leader)

    def _leader(self) -> str:
        head, _, body = self._in.partition(b"\r\n\r\n")
        status = head.split(b"\r\n", 1)[0]
        if b" 200 " not in status + b" ":
            raise self._unreachable(status.decode("ascii", "replace")[:100] or "it hung up")
        try:
            pairs = msgspec.json.decode(body, type=_Range).kvs
            if not pairs:
                raise self._unreachable(f"nobody leads group {self.address.group}")
            self.view = msgspec.json.decode(base64.b64decode(pairs[0].value), type=View)
            return self.view.address
        except (msgspec.DecodeError, ValueError) as error:
            raise self._unreachable(f"its answer cannot be read: {error}") from None


def leader_view(endpoints: list[EtcdEndpoint], *, timeout_s: float) -> View:
    """
    Where a group's leader serves, as the first member of etcd that answers has it.

    Raises:
        Unreachable: None says so in time.
    """
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    queries: dict[int, EtcdQuery] = {}
    trouble: Unreachable | None = None
    for endpoint in endpoints:
        try:
            query = EtcdQuery(endpoint)
        except Unreachable as error:
            trouble = error
            continue
        queries[query.fileno()] = query
    try:
        while queries and (left := deadline - time.monotonic()) > 0:
            for descriptor, query in queries.items():
                poll.register(descriptor, query.events)
            for descriptor, events in poll.poll(left * 1_000):
                query = queries[descriptor]
                try:
                    query.advance(events, Single())
                except Unreachable as error:
                    poll.unregister(descriptor)
                    del queries[descriptor]
                    if query.view is not None:
                        return query.view
                    trouble = error
    finally:
        for query in queries.values():
            query.close()
    raise trouble or Unreachable(
        "etcd did not say in time who leads", fix="check etcd: etcdctl endpoint health"
    )
