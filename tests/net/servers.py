"""Both ends of the wire for tests: a real ``WirePeer`` on a loop of its own, and a server that says anything."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from kvops.net import wire
from kvops.net.auth import Caller, Hello, Listener, Welcome
from kvops.net.link import Address
from kvops.net.peer import Peers, WirePeer
from kvops.net.wire import Frame, Kind
from tests.waiting import WAIT_S

SECRET = b"s" * 32
HELLO = Hello(role="client", group="g", name="n", host="h", numa_node=0, pid=1, boot_id="b", nonce=b"n" * 16)
WELCOME = Welcome(role="store", name="s", term=0, incarnation=1, boot_id="b", unix_path="")
ANSWER_BYTES = 1 << 20


class Echo(WirePeer):
    """LOOKUP is answered with its body, WRITE with its payload as body, READ with a payload of ``ANSWER_BYTES``."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(Listener(SECRET, "g"), lambda: WELCOME, peers)
        self.sink = bytearray()
        self.discarded = False

    def payload(self, frame: Frame, body: bytes) -> memoryview | None:
        if frame.kind != Kind.WRITE:
            return super().payload(frame, body)
        self.sink = bytearray(frame.payload_bytes)
        return None if body == b"nowhere" else memoryview(self.sink)

    def frame(self, frame: Frame, body: bytes) -> None:
        if frame.kind == Kind.LOOKUP:
            self.reply(frame, body)
        elif frame.kind == Kind.WRITE:
            self.reply(frame, bytes(self.sink))
        elif frame.kind == Kind.READ:
            self.transport.write(wire.pack(wire.reply(Kind.READ), b"", frame.request, ANSWER_BYTES))
            self.transport.write(bytes(ANSWER_BYTES))
        else:
            raise wire.WireError(f"an echo got frame kind {frame.kind}", fix="")


@contextmanager
def serve_echo(
    path: Path | None = None, *, count_max: int = 64, peer: Callable[[Peers], WirePeer] = Echo
) -> Iterator[Address]:
    """A server of ``Echo`` peers, or of others, by tcp or at a Unix socket."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    peers = Peers(count_max)

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)

    async def stop(server: asyncio.Server) -> None:
        server.close()
        peers.abort()
        await asyncio.sleep(0)

    def make() -> WirePeer:
        return peer(peers)

    try:
        if path is not None:
            server = run(loop.create_unix_server(make, str(path)))
            address = Address(str(path), 0)
        else:
            server = run(loop.create_server(make, "127.0.0.1", 0))
            address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            yield address
        finally:
            run(stop(server))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def serve_script(
    script: Callable[[socket.socket], None], *, family: int = socket.AF_INET, path: str = ""
) -> Iterator[Address]:
    """One connection is accepted and handed to ``script``, in a thread; then it is closed."""
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind(path if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listening.listen()

        def run() -> None:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            with sock:
                try:
                    script(sock)
                except OSError:
                    pass  # the caller hung up first, which is its right

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Address(path, 0) if path else Address("127.0.0.1", listening.getsockname()[1])
        finally:
            try:
                listening.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            thread.join(WAIT_S)


def receive_frame(sock: socket.socket) -> tuple[Frame, bytes]:
    """The next frame of a blocking socket; EOFError at its end."""
    head = wire.unpack_header(receive_exactly(sock, wire.HEADER_BYTES))
    return head, receive_exactly(sock, head.body_bytes)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes of a blocking socket; EOFError at its end."""
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def accept_handshake(sock: socket.socket, secret: bytes = SECRET) -> None:
    """The listener's half of a handshake."""
    listener = Listener(secret, "g")
    sock.sendall(wire.pack(Kind.CHALLENGE, listener.challenge(receive_frame(sock)[1])))
    listener.accept(receive_frame(sock)[1])
    sock.sendall(wire.pack(Kind.WELCOME, msgspec.msgpack.encode(WELCOME)))


def connect_raw(address: Address) -> socket.socket:
    """A blocking socket to an address, nothing said yet."""
    if address.is_unix:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(WAIT_S)
        sock.connect(address.host)
        return sock
    return socket.create_connection((address.host, address.port), WAIT_S)


def connect_proved(address: Address, secret: bytes = SECRET) -> socket.socket:
    """A blocking socket whose handshake is over."""
    sock = connect_raw(address)
    caller = Caller(secret, HELLO)
    sock.sendall(wire.pack(Kind.HELLO, caller.hello()))
    sock.sendall(wire.pack(Kind.PROOF, caller.proof(receive_frame(sock)[1])))
    assert receive_frame(sock)[0].kind == Kind.WELCOME
    return sock


def random_bytes(size: int) -> bytes:
    """Bytes that show it when they are shifted."""
    return os.urandom(size)
