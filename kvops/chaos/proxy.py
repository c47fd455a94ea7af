"""
A TCP proxy that troubles what passes: delays it, narrows it, flips bits of it, resets it, swallows it.

What it does lies in a control file with an expiry on the boot clock: ``{"until_boot_ms": T, "delay_ms": 50, …}``.
Past it, without the file, and while the file cannot be read, everything passes untouched: a sham control.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvops.store.clock import boot_ms

MARK: Final = 0x6B76  # of the proxy's own connections: the rule that redirects passes them over
_SO_ORIGINAL_DST: Final = 80  # linux/netfilter_ipv4.h
CHUNK_BYTES: Final = 1 << 16
CONNECT_TIMEOUT_S: Final = 5.0
LOOK_S: Final = 0.05  # between looks at the control file


@dataclass(slots=True)
class Toxic:
    """What is done to each direction."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    bytes_per_s: float = 0.0  # 0: as fast as it goes
    flip_per_chunk: float = 0.0  # how likely one bit of a chunk is flipped
    swallow: bool = False
    reset: bool = False


class Control:
    """The control file, looked at again when it may have changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_ms = 0
        self._until = 0
        self._toxic = Toxic()

    def now(self) -> Toxic:
        """What is to be done now."""
        now = boot_ms()
        if now - self._looked_ms >= LOOK_S * 1000:
            self._looked_ms = now
            try:
                said = json.loads(self._path.read_text())
                self._until = int(said.pop("until_boot_ms"))
                self._toxic = Toxic(**said)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                self._until = 0
        return self._toxic if now < self._until else Toxic()


class Proxy:
    """Listens on one address for another."""

    def __init__(self, control: Control, target: tuple[str, int] | None, *, seed: int) -> None:
        self._control = control
        self._target = target
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection's bytes both ways."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far_reader, far_writer = await self._dial(writer)
        except (OSError, TimeoutError):
            _reset(writer)
            return
        self._writers |= {writer, far_writer}
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, far_writer))
                both.create_task(self._carry(far_reader, writer))
        except* (OSError, ConnectionError):
            pass  # one side went away: so does the other
        finally:
            self._writers -= {writer, far_writer}
            for one in (writer, far_writer):
                one.close()

    async def _dial(self, writer: asyncio.StreamWriter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to where the connection was meant to go, past the rule that brought it here."""
        address = self._target or _original(writer.get_extra_info("socket"))
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if self._target is None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
            await loop.sock_connect(sock, address)
            return await asyncio.open_connection(sock=sock)
        except BaseException:
            sock.close()
            raise

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        while chunk := await reader.read(CHUNK_BYTES):
            toxic = self._control.now()
            if toxic.reset:
                for one in list(self._writers):
                    _reset(one)
                return
            if toxic.swallow:
                continue
            wait_s = (toxic.delay_ms + self._random.uniform(-1, 1) * toxic.jitter_ms) / 1000
            if toxic.bytes_per_s > 0:
                # A pipe of that width: a chunk leaves when the ones before it have.
                due = max(due, loop.time()) + len(chunk) / toxic.bytes_per_s
                wait_s += due - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if toxic.flip_per_chunk and self._random.random() < toxic.flip_per_chunk:
                chunk = flip(chunk, self._random)
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def flip(chunk: bytes, rng: random.Random) -> bytes:
    """The chunk with one bit the other way."""
    changed = bytearray(chunk)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _original(sock: Any) -> tuple[str, int]:
    """Where a redirected connection was going: netfilter's SO_ORIGINAL_DST, a sockaddr_in."""
    port, raw = struct.unpack("!2xH4s8x", sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16))
    return socket.inet_ntoa(raw), port


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the peer gets RST: SO_LINGER with no time (socket(7))."""
    sock: Any = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def serve(settings: dict[str, Any], until_boot_ms: int, ready: Callable[[], None]) -> None:
    """
    Run a proxy until its time is over.

    Args:
        settings: ``listen`` as [host, port]; ``target`` likewise, or null for wherever a redirected connection
            was going; ``control`` is the file; ``seed``.
        until_boot_ms: When it ends.
        ready: Called once it listens.
    """

    async def run() -> None:
        control = Control(Path(settings["control"]))
        proxy = Proxy(
            control,
            tuple(settings["target"]) if settings["target"] else None,
            seed=int(settings.get("seed", 0)),
        )
        server = await asyncio.start_server(proxy.connection, *settings["listen"], reuse_address=True)
        async with server:
            ready()
            while boot_ms() < until_boot_ms:
                await asyncio.sleep(min(1.0, max(0.01, (until_boot_ms - boot_ms()) / 1000)))

    asyncio.run(run())
