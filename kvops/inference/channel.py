"""Messages between a replay and its engines: length and msgpack over a socket pair, bounded."""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

from kvops.errors import WireError

MESSAGE_BYTES_MAX: Final = 4 << 20
_LENGTH: Final = struct.Struct("<I")


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, tag="config"):
    """What one prefill node is; the first message an engine gets."""

    node: str
    host: str  # logical: placement goes by it
    key_prefix: str
    page_bytes: int
    page_tokens: int
    l2_pages: int
    prefetch: str
    deadline_ms: int
    prefetch_ms_max: int
    model: str
    pool_factory: str  # "module:function", called with pool_options
    pool_options: dict[str, str | int | list[str] | None]


class Work(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """One request for a node."""

    index: int
    arrival_ms: float  # on the trace's clock
    input_tokens: int
    hash_ids: list[int]
    seen_pages: int  # of the prefix: computed by some earlier request of the replay, perhaps still under way
    settled_pages: int  # of the prefix: computed by requests that had finished when this one was sent


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """What became of a request. ``replay.RESULT`` says what each field means."""

    index: int
    l2_tokens: int
    l3_tokens: int
    lost_tokens: int
    lost_reason: str
    lookup_ms: float
    read_ms: float
    queue_ms: float
    gpu_ms: float
    ttft_ms: float
    write_ms: float
    pages_checked: int
    pages_read: int
    pages_stored: int
    wrong_bytes: int
    over_deadline: int
    write_failures: dict[str, int]
    breakers: dict[str, str]  # those whose state has changed since the last request: name → state


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """An engine has its pool client and its memory."""

    pid: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """An engine gives up: a wrong configuration, or a bug of ours."""

    what: str
    fix: str
    exit_code: int
    trace: str  # of a bug; empty for an expected trouble


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """No more requests: close the pool and exit."""


Message = NodeConfig | Work | Done | Ready | Failed | Stop

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One message as it goes over the socket."""
    body = _ENCODER.encode(message)
    assert len(body) <= MESSAGE_BYTES_MAX
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Cuts the bytes of a stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add what was received; returns the messages that are complete by now."""
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MESSAGE_BYTES_MAX:
                raise WireError(
                    f"a message of {size} bytes between replay and engine", fix="report it: this is a bug"
                )
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            try:
                messages.append(_DECODER.decode(memoryview(self._buffer)[_LENGTH.size : end]))
            except msgspec.DecodeError as error:
                what = f"an unreadable message between replay and engine: {error}"
                raise WireError(what, fix="use one version of kvops for both") from None
            del self._buffer[:end]
        return messages


def send(sock: socket.socket, message: Message) -> None:
    """Send one message; blocks while the other side does not read, which is what bounds the channel."""
    sock.sendall(encode(message))
