"""
gRPC as the control plane uses it: the caller's side, and the one table between status codes and our errors.

The server's side is ``rpc_server``, so that a command that only asks imports no more than it needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.protobuf.message import DecodeError, Message

from kvops import errors
from kvops.errors import AuthFailed, KvopsError, NotLeader, Unreachable
from kvops.net.signing import CALL_KEY, REPLY_KEY, Call, sign_call
from kvops.proto.kvops.v1 import error_pb2

ERROR_KEY: Final = "kvops-error-bin"  # trailing metadata of a failed call: kvops.v1.Error
REPLY_BYTES_MAX: Final = 16 << 20  # a status of 10,000 stores has 3 MiB

_CODE = grpc.StatusCode

CODES: Final[dict[type[KvopsError], grpc.StatusCode]] = {
    KvopsError: _CODE.INTERNAL,
    errors.UsageError: _CODE.INVALID_ARGUMENT,
    errors.ConfigError: _CODE.INVALID_ARGUMENT,
    errors.ParseError: _CODE.INVALID_ARGUMENT,
    errors.ClosedPool: _CODE.FAILED_PRECONDITION,
    errors.WrongBuffer: _CODE.INVALID_ARGUMENT,
    errors.Unreachable: _CODE.UNAVAILABLE,
    errors.AuthFailed: _CODE.UNAUTHENTICATED,
    errors.NotLeader: _CODE.UNAVAILABLE,
    errors.Refused: _CODE.FAILED_PRECONDITION,
    errors.NoSpace: _CODE.RESOURCE_EXHAUSTED,
    errors.AlreadyRunning: _CODE.ALREADY_EXISTS,
    errors.StartFailed: _CODE.FAILED_PRECONDITION,
    errors.LeftBehind: _CODE.ABORTED,
    errors.Dirty: _CODE.ABORTED,
    errors.NotInjected: _CODE.FAILED_PRECONDITION,
    errors.FaultNotApplied: _CODE.FAILED_PRECONDITION,
    errors.Aborted: _CODE.ABORTED,
    errors.Unsupported: _CODE.UNIMPLEMENTED,
    errors.WireError: _CODE.DATA_LOSS,
}
"""Every class of ours and the code it travels under; its name goes with it, so the way back is exact."""

_KINDS: Final = {kind.__name__: kind for kind in CODES}


def code_of(error: KvopsError) -> grpc.StatusCode:
    """The status code an error travels under: its own class's, or the nearest base's."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def code_number(code: grpc.StatusCode) -> int:
    """A status code as the number gRPC sends."""
    return int(code.value[0])


def encode_error(error: KvopsError) -> bytes:
    """What goes into ``ERROR_KEY``."""
    kind = next(kind for kind in type(error).__mro__ if kind in CODES)
    leader = (error.leader if isinstance(error, NotLeader) else None) or ""
    message = error_pb2.Error(kind=kind.__name__, what=error.what, fix=error.fix, leader=leader)
    return message.SerializeToString()


def decode_error(data: bytes, code: grpc.StatusCode) -> KvopsError:
    """
    The error a server raised.

    A class that this side does not know, from a newer server, becomes the first class with the same code.
    """
    try:
        message = error_pb2.Error.FromString(data)
    except DecodeError:
        message = error_pb2.Error(what=f"the server failed with {code.name} and an unreadable reason")
    kind = _KINDS.get(message.kind) or next((kind for kind, own in CODES.items() if own is code), KvopsError)
    if kind is NotLeader:
        return NotLeader(message.what, fix=message.fix, leader=message.leader or None)
    return kind(message.what, fix=message.fix)


def wall_clock_ms() -> int:
    """UTC in ms since 1970: what the expiry of calls goes by, and nothing else may."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class _Method:
    """One method of a generated stub, signed and checked."""

    channel: SignedChannel
    name: str
    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]


class _UnaryMethod(_Method):
    def __call__(self, request: Message, timeout: float | None = None) -> Any:
        channel = self.channel
        body = self.serialize(request)
        call, token = sign_call(channel.secret, self.name, body, now_ms=wall_clock_ms())
        raw = channel.raw.unary_unary(self.name, _as_is, _as_is)
        try:
            reply, done = raw.with_call(
                body, timeout=timeout or channel.timeout_s, metadata=((CALL_KEY, token),)
            )
        except grpc.RpcError as error:
            raise channel.explain(error, call) from None
        if not call.proves(_metadata(done, REPLY_KEY), reply):
            raise channel.unproven(self.name)
        return _parse(self.deserialize, reply, channel.address)


class _StreamMethod(_Method):
    def __call__(self, request: Message, timeout: float | None = None) -> Iterator[Any]:
        channel = self.channel
        body = self.serialize(request)
        call, token = sign_call(channel.secret, self.name, body, now_ms=wall_clock_ms())
        stream: Any = channel.raw.unary_stream(self.name, _as_is, _as_is)(
            body, timeout=timeout, metadata=((CALL_KEY, token),)
        )
        index = 0
        try:
            for data in stream:
                message = call.unseal(data, index)
                if message is None:
                    raise channel.unproven(self.name)
                index += 1
                yield _parse(self.deserialize, message, channel.address)
            if not call.proves(_metadata(stream, REPLY_KEY), b"", index=index):
                raise channel.unproven(self.name)
        except grpc.RpcError as error:
            raise channel.explain(error, call) from None
        finally:
            stream.cancel()  # the reader may have stopped in the middle


class SignedChannel:
    """
    A connection for a generated stub: signs what it calls and believes no answer without its proof.

    It connects on the first call, and again after every loss. Calls may come from several threads. Errors
    of the server come back as the class it raised.
    """

    def __init__(self, address: str, secret: bytes, *, timeout_s: float) -> None:
        """
        Args:
            address: ``host:port``, or ``unix:/path``.
            secret: The group secret.
            timeout_s: For each call that has one answer, connecting included. Streams need not end.
        """
        self.address = address
        self.secret = secret
        self.timeout_s = timeout_s
        self.raw = grpc.insecure_channel(
            address,
            options=[
                ("grpc.enable_http_proxy", 0),  # $http_proxy is for other people's servers
                ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
                # A stream that is followed must notice that the other host lost power.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                (
                    "grpc.use_local_subchannel_pool",
                    1,
                ),  # no back-off inherited from an earlier, failed channel
            ],
        )

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., Any]:
        """As of ``grpc.Channel``, for generated stubs."""
        return _UnaryMethod(self, method, request_serializer, response_deserializer)

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., Iterator[Any]]:
        """As of ``grpc.Channel``, for generated stubs."""
        return _StreamMethod(self, method, request_serializer, response_deserializer)

    def explain(self, error: grpc.RpcError, call: Call) -> KvopsError:
        """What a failed call means: the server's own error when it is proven, else what the network did."""
        code, details = error.code(), error.details() or ""
        data, mac = _metadata(error, ERROR_KEY), _metadata(error, REPLY_KEY)
        if data and call.proves(mac, b"", code=code_number(code), error=data):
            return decode_error(data, code)
        if code is _CODE.UNAUTHENTICATED:
            # It shares no key with us to prove this by; its words are still the best hint there is.
            hint = decode_error(data, code)
            return AuthFailed(
                f"the master at {self.address} refused us: {hint.what or details}",
                fix=hint.fix or "use the secret file of the group that runs at this address",
            )
        if code is _CODE.DEADLINE_EXCEEDED:
            return Unreachable(
                f"the master at {self.address} did not answer within {self.timeout_s:g} s",
                fix="see whether its process runs and is not stopped; --timeout waits longer",
            )
        if code is _CODE.UNAVAILABLE:
            return Unreachable(
                f"nothing answers at {self.address}: {details}",
                fix="check the address, and that the master runs there",
            )
        return Unreachable(
            f"the server at {self.address} failed with {code.name}: {details}",
            fix="see the master's log; an older master may not know this call",
        )

    def unproven(self, method: str) -> AuthFailed:
        """The error for an answer whose MAC is missing or wrong."""
        return AuthFailed(
            f"the answer of {self.address} to {method} does not prove the group secret",
            fix="something else answers at this address, or changes answers on their way: find out what",
        )

    def close(self) -> None:
        """Drop the connection; calls under way fail."""
        self.raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_is(data: bytes) -> bytes:
    return data


def _metadata(call: Any, key: str) -> bytes:
    """One binary value of a finished call's trailing metadata; empty when it is missing."""
    for name, value in call.trailing_metadata() or ():
        if name == key and isinstance(value, bytes):
            return value
    return b""


def _parse(deserialize: Callable[[bytes], Any], data: bytes, address: str) -> Any:
    try:
        return deserialize(data)
    except DecodeError as error:
        raise errors.ParseError(
            f"the answer of {address} is not the message it should be: {error}", fix="upgrade the older side"
        ) from None
