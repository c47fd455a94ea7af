"""Signed calls against a real server, with peers that do not hold the secret."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvops.errors import AuthFailed, ConfigError, KvopsError, NoSpace, ParseError, Unreachable
from kvops.net.rpc import SignedChannel, wall_clock_ms
from kvops.net.rpc_server import RpcServer
from kvops.net.signing import CALL_KEY, sign_call
from kvops.proto.kvops.v1 import control_pb2 as pb
from kvops.proto.kvops.v1 import control_pb2_grpc
from tests.waiting import WAIT_S

pytestmark = pytest.mark.process

SECRET = bytes(range(32))
METHOD = "/kvops.v1.Control/Status"
SERVICE = "kvops.v1.Control"


class Servicer(control_pb2_grpc.ControlServicer):
    """Answers with what the test set; counts what got through to it."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: KvopsError | None = None

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        self.calls += 1
        if self.error:
            raise self.error
        return pb.StatusReply(name="master-0")

    async def Events(self, request: pb.EventsRequest, context: Any) -> AsyncIterator[pb.Event]:
        self.calls += 1
        for name in ("first", "second"):
            yield pb.Event(event=name)
        if self.error:
            raise self.error


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def server(servicer: Servicer, serve_control: Any) -> Iterator[RpcServer]:
    def register(server: grpc.aio.Server) -> None:
        control_pb2_grpc.add_ControlServicer_to_server(servicer, server)

    with serve_control(register, services=[SERVICE], secrets=[SECRET]) as (running, _):
        yield running


@pytest.fixture
def stub(server: RpcServer) -> Iterator[Any]:
    with SignedChannel(server.address, SECRET, timeout_s=WAIT_S) as channel:
        yield control_pb2_grpc.ControlStub(channel)


@pytest.fixture
def bare(server: RpcServer) -> Iterator[grpc.Channel]:
    """A channel that signs nothing."""
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def test_signed_calls_are_answered(stub: Any) -> None:
    """A caller with the secret gets single answers and streams, whole and in order."""
    assert stub.Status(pb.StatusRequest()).name == "master-0"
    assert [event.event for event in stub.Events(pb.EventsRequest())] == ["first", "second"]


def test_errors_arrive_as_they_were_raised(stub: Any, servicer: Servicer) -> None:
    """An error reaches the caller as its class with its words, from a stream after its messages."""
    servicer.error = NoSpace("the pool is full", fix="start another store")

    with pytest.raises(NoSpace, match="the pool is full; start another store"):
        stub.Status(pb.StatusRequest())
    stream = stub.Events(pb.EventsRequest())
    assert [next(stream).event, next(stream).event] == ["first", "second"]
    with pytest.raises(NoSpace):
        next(stream)


def test_a_wrong_secret_is_told_and_reaches_nothing(server: RpcServer, servicer: Servicer) -> None:
    """Another group's secret gives one clear error, and the call never reaches the service."""
    with SignedChannel(server.address, bytes(32), timeout_s=WAIT_S) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        with pytest.raises(AuthFailed, match="another secret"):
            stub.Status(pb.StatusRequest())
        with pytest.raises(AuthFailed, match="another secret"):
            next(stub.Events(pb.EventsRequest()))

    assert servicer.calls == 0


def test_unsigned_calls_are_refused(bare: grpc.Channel, servicer: Servicer) -> None:
    """A plain gRPC client is refused before its request is parsed."""
    for body in (b"", b"\xff\xff"):
        with pytest.raises(grpc.RpcError) as caught:
            bare.unary_unary(METHOD)(body, timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    assert servicer.calls == 0


def test_a_recorded_call_cannot_be_repeated(bare: grpc.Channel, servicer: Servicer) -> None:
    """Bytes taken from the wire work once, even with everything right."""
    _, token = sign_call(SECRET, METHOD, b"", now_ms=wall_clock_ms())
    bare.unary_unary(METHOD)(b"", timeout=WAIT_S, metadata=[(CALL_KEY, token)])

    with pytest.raises(grpc.RpcError) as caught:
        bare.unary_unary(METHOD)(b"", timeout=WAIT_S, metadata=[(CALL_KEY, token)])
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert servicer.calls == 1


def test_a_signed_body_that_is_no_message(server: RpcServer) -> None:
    """A caller of another version that sends something else is told what is wrong, not cut off."""
    with SignedChannel(server.address, SECRET, timeout_s=WAIT_S) as channel:
        call = channel.unary_unary(METHOD, lambda body: body, lambda body: body)
        with pytest.raises(ParseError, match="not the message"):
            call(b"\xff\xff")


def test_an_impostor_is_not_believed() -> None:
    """A server without the secret can neither answer a call, nor a stream, nor make up an error."""

    class Impostor(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            def answer(body: bytes, context: grpc.ServicerContext) -> bytes:
                if failing:
                    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                return b""

            def stream(body: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
                yield b"\n" * 35

            if details.method == METHOD:
                return grpc.unary_unary_rpc_method_handler(answer)
            return grpc.unary_stream_rpc_method_handler(stream)

    failing = False
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[Impostor()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with SignedChannel(f"127.0.0.1:{port}", SECRET, timeout_s=WAIT_S) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                with pytest.raises(AuthFailed, match="does not prove"):
                    stub.Status(pb.StatusRequest())
                with pytest.raises(AuthFailed, match="does not prove"):
                    next(stub.Events(pb.EventsRequest()))
                failing = True
                with pytest.raises(Unreachable, match="RESOURCE_EXHAUSTED"):
                    stub.Status(pb.StatusRequest())
        finally:
            server.stop(0).wait()


def test_nobody_there() -> None:
    """A closed port is one error that names the address, well before the deadline."""
    with SignedChannel("127.0.0.1:1", SECRET, timeout_s=30) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        with pytest.raises(Unreachable, match=r"nothing answers at 127\.0\.0\.1:1"):
            stub.Status(pb.StatusRequest())


def test_a_hung_server_costs_the_deadline() -> None:
    """A server that accepts and says nothing ends the call at its deadline."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with SignedChannel(address, SECRET, timeout_s=0.2) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            with pytest.raises(Unreachable, match=r"within 0\.2 s"):
                stub.Status(pb.StatusRequest())


def test_health_and_reflection_need_no_secret(server: RpcServer, bare: grpc.Channel) -> None:
    """Probes and grpcurl work as they are: not serving until told so, and our services are listed."""
    health = health_pb2_grpc.HealthStub(bare)
    states = health_pb2.HealthCheckResponse
    for service in ("", SERVICE):
        assert (
            health.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S).status
            == states.NOT_SERVING
        )

    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    reply = next(
        reflection_pb2_grpc.ServerReflectionStub(bare).ServerReflectionInfo(iter([ask]), timeout=WAIT_S)
    )
    assert SERVICE in {service.name for service in reply.list_services_response.service}


def test_health_follows_the_server(serve_control: Any) -> None:
    """Once told that it serves, the server tells so to probes."""
    with serve_control(lambda server: None, services=[SERVICE], secrets=[SECRET]) as (running, loop):
        asyncio.run_coroutine_threadsafe(running.set_serving(True), loop).result(WAIT_S)
        with grpc.insecure_channel(running.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=SERVICE)

            assert health.Check(request, timeout=WAIT_S).status == health_pb2.HealthCheckResponse.SERVING


def test_a_port_is_never_shared(server: RpcServer, serve_control: Any) -> None:
    """A second master on the same port is refused, instead of taking every other call."""
    with (
        pytest.raises(ConfigError, match=f"cannot listen on {server.address}"),
        serve_control(lambda server: None, secrets=[SECRET], address=server.address),
    ):
        pass


def test_many_callers_at_once(server: RpcServer) -> None:
    """One channel may be used from several threads, each getting the answers of its own calls."""
    with SignedChannel(server.address, SECRET, timeout_s=WAIT_S) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        names: list[str] = []

        def ask() -> None:
            names.extend(stub.Status(pb.StatusRequest()).name for _ in range(20))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert names == ["master-0"] * 80
