"""
The server's side of the control plane: signed services on the caller's event loop, gRPC health, reflection.

Health and reflection answer without a MAC, since probes and grpcurl have none, and they tell only whether we
live and what our public schema is. Everything else is refused before its bytes are parsed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Counter

from kvops.errors import AuthFailed, ConfigError, KvopsError, ParseError
from kvops.net.rpc import ERROR_KEY, code_number, code_of, encode_error, wall_clock_ms
from kvops.net.signing import CALL_KEY, REPLY_KEY, Call, CallVerifier

OPEN_SERVICES: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
REQUEST_BYTES_MAX: Final = 1 << 20
CALLS_MAX: Final = 256  # under way at once, streams included

_REFUSED = Counter(
    "kvops_net_calls_refused_total", "Control calls without a valid proof of the group secret."
)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A running server."""

    address: str
    """``host:port`` as bound: port 0 was replaced by a real one."""
    _server: grpc.aio.Server
    _health: Any
    _services: tuple[str, ...]

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told from now on, for every service and the whole (the empty name)."""
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if serving else kinds.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def close(self, grace_s: float = 0.5) -> None:
        """Refuse new calls at once, and break off those that have not ended after the grace."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def serve_rpc(
    address: str,
    *,
    secrets: Sequence[bytes],
    register: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
) -> RpcServer:
    """
    Serve signed gRPC on the running loop; health says NOT_SERVING until ``set_serving(True)``.

    Args:
        address: ``host:port``; port 0 takes a free one.
        secrets: Group secrets that are valid now.
        register: Adds the servicers to the server. They raise ``KvopsError`` for expected trouble.
        services: Full names, such as ``kvops.v1.Control``, for health and reflection.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    server = grpc.aio.server(
        interceptors=[_Gate(CallVerifier(secrets))],
        maximum_concurrent_rpcs=CALLS_MAX,
        options=[
            # gRPC's default lets a second server share the port; the kernel then deals out the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
            ("grpc.max_metadata_size", 16 << 10),
            # Followers ping every 10 s; by default such a peer is sent away.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    register(server)
    states = health.aio.HealthServicer()  # type: ignore[attr-defined]  # an alias its checker misses
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address} for control calls: {error}",
            fix="choose another port (0 takes a free one), or stop who listens there: ss -ltnp",
        ) from None
    running = RpcServer(_with_port(address, port), server, states, tuple(services))
    await running.set_serving(False)
    await server.start()
    return running


def _with_port(address: str, port: int) -> str:
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Puts the check of the call's MAC and the signing of its answer around every method not open to all."""

    def __init__(self, verifier: CallVerifier) -> None:
        self._verifier = verifier

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(OPEN_SERVICES):
            return handler  # type: ignore[no-any-return]  # None: gRPC answers UNIMPLEMENTED
        assert not handler.request_streaming, "a MAC covers one request"
        # Without (de)serializers gRPC hands the bytes through as they came, which is what a MAC is about.
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, handler))
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler))

    def _unary(self, method: str, handler: Any) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def answer(body: bytes, context: Context) -> bytes:
            call = await self._admit(method, body, context)
            try:
                reply: bytes = handler.response_serializer(
                    await handler.unary_unary(_parse(method, handler, body), context)
                )
            except KvopsError as error:
                await _fail(context, error, call)
            context.set_trailing_metadata(((REPLY_KEY, call.reply_mac(reply)),))
            return reply

        return answer

    def _stream(self, method: str, handler: Any) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
        async def answer(body: bytes, context: Context) -> AsyncIterator[bytes]:
            call = await self._admit(method, body, context)
            index = 0
            try:
                async for message in handler.unary_stream(_parse(method, handler, body), context):
                    yield call.seal(handler.response_serializer(message), index)
                    index += 1
            except KvopsError as error:
                await _fail(context, error, call)
            context.set_trailing_metadata(((REPLY_KEY, call.reply_mac(b"", index=index)),))

        return answer

    async def _admit(self, method: str, body: bytes, context: Context) -> Call:
        tokens = [value for name, value in context.invocation_metadata() or () if name == CALL_KEY]
        token = tokens[0] if len(tokens) == 1 and isinstance(tokens[0], bytes) else None
        try:
            return self._verifier.verify(method, body, token, now_ms=wall_clock_ms())
        except KvopsError as error:
            if isinstance(error, AuthFailed):
                _REFUSED.inc()
            await _fail(context, error, None)


def _parse(method: str, handler: Any, body: bytes) -> Any:
    try:
        return handler.request_deserializer(body)
    except DecodeError as error:
        raise ParseError(
            f"the request of {method} is not the message it should be: {error}", fix="upgrade the caller"
        ) from None


async def _fail(context: Context, error: KvopsError, call: Call | None) -> NoReturn:
    """End the call with an error of ours; without a proven caller there is nothing to sign it with."""
    code, data = code_of(error), encode_error(error)
    trailer: list[tuple[str, bytes]] = [(ERROR_KEY, data)]
    if call is not None:
        trailer.append((REPLY_KEY, call.reply_mac(b"", code=code_number(code), error=data)))
    await context.abort(code, error.what, tuple(trailer))
    raise AssertionError("abort() raises")
