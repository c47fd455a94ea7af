"""What tests of several packages share."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
import pytest
import uvloop
from hypothesis import HealthCheck, settings

from kvops.net.rpc_server import RpcServer, serve_rpc
from tests.waiting import WAIT_S

# A shell that runs us in the background lets us ignore Ctrl-C, and every process we start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Whoever ends the run with SIGTERM gets what Ctrl-C gives: fixtures still stop and remove what they made.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("kvops", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvops")

ServeControl = Callable[..., AbstractContextManager[tuple[RpcServer, asyncio.AbstractEventLoop]]]


@contextmanager
def _serve_control(
    register: Callable[[grpc.aio.Server], None],
    *,
    services: Sequence[str] = (),
    secrets: Sequence[bytes],
    address: str = "127.0.0.1:0",
) -> Iterator[tuple[RpcServer, asyncio.AbstractEventLoop]]:
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)

    try:
        server = run(serve_rpc(address, secrets=secrets, register=register, services=services))
        try:
            yield server, loop
        finally:
            run(server.close(0))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def serve_control() -> ServeControl:
    """A control server on a loop of its own; the block gets it and the loop its things must be called on."""
    return _serve_control
