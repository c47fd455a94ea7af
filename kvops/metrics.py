"""
Metrics of a process, and the small HTTP server that shows them: ``/metrics``, ``/ready`` and ``/health``.

Names are ``kvops_<package>_<thing>_<unit>``. Rare things are ``prometheus_client`` metrics on the default
registry. What a hot path counts stays a plain attribute there, and ``expose`` reads it when somebody scrapes.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Final, Literal, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvops.addresses import split_address
from kvops.errors import ConfigError, UsageError

CONNECTIONS_MAX: Final = 16  # at once; more are closed unanswered
REQUEST_TIMEOUT_S: Final = 5.0  # for a peer that sends, or reads, nothing

Check = Callable[[], tuple[bool, str]]
"""Whether it is so, and why not; called on the HTTP server's threads, so it must only read."""
Values = float | Mapping[tuple[str, ...], float]
"""One value, or one for each set of label values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One metric whose values are read at each scrape, on the HTTP server's threads."""

    name: str
    help: str
    read: Callable[[], Values]
    kind: Literal["counter", "gauge"] = "gauge"
    labels: Sequence[str] = ()

    def __post_init__(self) -> None:
        assert self.name.endswith("_total") == (self.kind == "counter"), (
            "counters, and they alone, end in _total"
        )


class Exposed(Collector):
    """Readings that are on a registry until closed."""

    def __init__(self, readings: Sequence[Reading], registry: CollectorRegistry) -> None:
        self._readings = readings
        self._registry = registry
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The names, without reading a value: registering must not call into a half-built owner."""
        return [_family(reading) for reading in self._readings]

    def collect(self) -> Iterable[Metric]:
        """The values as they are now."""
        for reading in self._readings:
            family = _family(reading)
            values = reading.read()
            if isinstance(values, Mapping):
                for labels, value in values.items():
                    family.add_metric(labels, value)
            else:
                family.add_metric((), values)
            yield family

    def close(self) -> None:
        """Take the readings off the registry."""
        self._registry.unregister(self)


def _family(reading: Reading) -> Any:
    family = CounterMetricFamily if reading.kind == "counter" else GaugeMetricFamily
    return family(reading.name, reading.help, labels=reading.labels)


def expose(readings: Sequence[Reading], registry: CollectorRegistry = REGISTRY) -> Exposed:
    """Show plain attributes as metrics; ``close`` what is returned when their owner goes."""
    return Exposed(readings, registry)


class HttpServer:
    """A running server, on threads of its own."""

    def __init__(self, server: _Server) -> None:
        host, port = server.server_address[:2]
        self.address = f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"
        """``host:port`` as bound: port 0 was replaced by a real one."""
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; answers under way may still be sent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_http(
    address: str | socket.socket,
    *,
    ready: Check,
    health: Check | None = None,
    registry: CollectorRegistry = REGISTRY,
) -> HttpServer:
    """
    Serve ``/metrics`` (Prometheus text), ``/ready`` and ``/health`` (JSON; 503 for a no).

    These answers come from threads of their own, also when the process's event loop hangs. So ``ready`` and
    ``health`` should look at when that loop last ticked.

    Args:
        address: ``host:port``; port 0 takes a free one. Or a socket that listens already.
        ready: Whether work may be sent here.
        health: Whether the process should be left alive; None: whenever it answers.
        registry: What ``/metrics`` shows.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    try:
        server = _Server(address, _Handler) if isinstance(address, socket.socket) else _bound(address)
    except (OSError, UsageError) as error:
        raise ConfigError(
            f"cannot listen on {address} for /metrics and /ready: {error}",
            fix="choose another http address, such as 127.0.0.1:0, or stop who listens there: ss -ltnp",
        ) from None
    server.set_app(_app(ready, health or (lambda: (True, "")), registry))
    return HttpServer(server)


def _bound(address: str) -> _Server:
    host, port = split_address(address)  # which has a host: "" would mean every interface
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT of the last start
        listening.bind((host, port))
        listening.listen(CONNECTIONS_MAX)
        return _Server(listening, _Handler)
    except BaseException:
        listening.close()
        raise


def _app(ready: Check, health: Check, registry: CollectorRegistry) -> Callable[..., Iterable[bytes]]:
    metrics = make_wsgi_app(registry)
    checks = {"/ready": ("ready", ready), "/health": ("healthy", health)}

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        body: dict[str, Any]
        if path == "/metrics":
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status, body = HTTPStatus.METHOD_NOT_ALLOWED, {"error": "only GET"}
        elif path in checks:
            key, check = checks[path]
            yes, why = check()
            status, body = HTTPStatus.OK if yes else HTTPStatus.SERVICE_UNAVAILABLE, {key: yes, "reason": why}
        else:
            status, body = HTTPStatus.NOT_FOUND, {"error": "there are /metrics, /ready and /health"}
        data = json.dumps({"schema": 1, **body}).encode() + b"\n"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [data]

    return app


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False  # a slow reader must not hold up the end of the process

    def __init__(self, listening: socket.socket, handler: type[WSGIRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(listening.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_address = listening.getsockname()
        # The base class would ask the resolver for this host's name, which may take seconds.
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that hung up or sent nonsense is no news."""


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
