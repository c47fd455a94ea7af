"""What the machine itself can do: a bare copy, and a bare socket between two processes."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from kvops.bench.pool import BenchPool
from kvops.limits import MIB
from kvops.net.link import SOCKET_BUFFER_BYTES

COMMAND: Final = struct.Struct("<cxxxxxxxQ")  # b"S" or b"R" from the peer's side, and how many bytes
START_TIMEOUT_S: Final = 30.0
CALL_TIMEOUT_S: Final = 30.0
IO_BYTES_MAX: Final = MIB


class ColdMemory:
    """Shared memory of 4 KiB pages, as a segment is, walked from end to end so that no cache holds what comes next."""

    def __init__(self, size_bytes: int) -> None:
        descriptor = os.memfd_create("kvops-bench", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_bytes)
            self._view = memoryview(mmap.mmap(descriptor, size_bytes))
        finally:
            os.close(descriptor)
        tile = os.urandom(MIB)
        for at in range(0, size_bytes, MIB):
            self._view[at : at + MIB] = tile[: min(MIB, size_bytes - at)]
        self._at = 0

    def next(self, size: int) -> memoryview:
        """The next so many bytes."""
        if self._at + size > len(self._view):
            self._at = 0
        self._at += size
        return self._view[self._at - size : self._at]


def copy(source: ColdMemory, targets: Sequence[memoryview]) -> None:
    """One thread, pieces of 1 MiB, from cold memory into buffers that were used before."""
    for target in targets:
        for at in range(0, len(target), MIB):
            piece = target[at : at + MIB]
            piece[:] = source.next(len(piece))


class Actor:
    """The far end of the bare sockets: sends from, or receives into, cold memory."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._memory_bytes: int = config["memory_bytes"]
        tcp = socket.create_server(("127.0.0.1", 0))
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(config["unix_path"])
        unix.listen()
        self._port = tcp.getsockname()[1]
        for listener in (tcp, unix):
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def ready(self) -> dict[str, Any]:
        """The tcp port."""
        return {"port": self._port}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Nothing is asked."""
        return {}

    def _accept(self, listener: socket.socket) -> None:
        memory = ColdMemory(self._memory_bytes)
        while True:
            sock, _ = listener.accept()
            with sock:
                _tune(sock)
                while command := sock.recv(COMMAND.size, socket.MSG_WAITALL):
                    direction, size = COMMAND.unpack(command)
                    while size:
                        piece = memory.next(min(size, IO_BYTES_MAX))
                        size -= len(piece)
                        if direction == b"S":
                            sock.sendall(piece)
                        else:
                            receive(sock, piece)
                    if direction == b"R":
                        sock.sendall(b"\0")


class RawPeer:
    """Our end: moves whole batches over one connection."""

    def __init__(self, pool: BenchPool, *, memory_bytes: int) -> None:
        unix_path = str(pool.directory / "raw.sock")
        child = pool.child("raw", "raw", {"memory_bytes": memory_bytes, "unix_path": unix_path})
        port = child.hear(START_TIMEOUT_S)["port"]
        self._sockets = {"tcp": socket.create_connection(("127.0.0.1", port))}
        self._sockets["unix"] = unix = socket.socket(socket.AF_UNIX)
        unix.connect(unix_path)
        for sock in self._sockets.values():
            _tune(sock)

    def read(self, kind: str, targets: Sequence[memoryview]) -> None:
        """Fill the buffers from the far end."""
        sock = self._sockets[kind]
        sock.sendall(COMMAND.pack(b"S", sum(map(len, targets))))
        for target in targets:
            receive(sock, target)

    def write(self, kind: str, sources: Sequence[memoryview]) -> None:
        """Send the buffers, and wait until the far end has them."""
        sock = self._sockets[kind]
        sock.sendall(COMMAND.pack(b"R", sum(map(len, sources))))
        for source in sources:
            for at in range(0, len(source), IO_BYTES_MAX):
                sock.sendall(source[at : at + IO_BYTES_MAX])
        assert sock.recv(1) == b"\0"

    def close(self) -> None:
        """Hang up."""
        for sock in self._sockets.values():
            sock.close()


def receive(sock: socket.socket, target: memoryview) -> None:
    """Fill a buffer."""
    at = 0
    while at < len(target):
        got = sock.recv_into(target[at : at + IO_BYTES_MAX])
        if not got:
            raise ConnectionError("the far end hung up")
        at += got


def _tune(sock: socket.socket) -> None:
    """As a link of the pool is."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def buffers(count: int, size: int) -> list[memoryview]:
    """Page-aligned memory that was touched, one buffer a key, as an engine's pinned pages are."""
    return cut(memoryview(mmap.mmap(-1, count * size)), size)


def cut(memory: memoryview, size: int) -> list[memoryview]:
    """Memory touched and cut into buffers."""
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    return [memory[at : at + size] for at in range(0, len(memory), size)]


def rate_gb_per_s(size_bytes: int, began: float) -> float:
    """1e9 bytes per second since ``began``."""
    return size_bytes / (time.perf_counter() - began) / 1e9
