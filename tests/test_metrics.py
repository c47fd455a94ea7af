"""Metrics, and the HTTP server that shows them."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from kvops import metrics
from kvops.errors import ConfigError
from kvops.metrics import HttpServer, Reading, expose, serve_http
from tests.waiting import WAIT_S

pytestmark = pytest.mark.process


class Process:
    """What a served process says of itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ready = (False, "no store is mounted")
        self.lookups = 0


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def server(process: Process) -> Iterator[HttpServer]:
    with serve_http("127.0.0.1:0", ready=lambda: process.ready, registry=process.registry) as running:
        yield running


def get(server: HttpServer, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.address, timeout=WAIT_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def scrape(server: HttpServer) -> dict[str, float]:
    status, text = get(server, "/metrics")
    assert status == 200
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_ready_follows_the_process(server: HttpServer, process: Process) -> None:
    """``/ready`` is 503 with the reason until the process is ready; ``/health`` is 200 all along."""
    status, body = get(server, "/ready")
    assert (status, json.loads(body)) == (503, {"schema": 1, "ready": False, "reason": "no store is mounted"})
    assert get(server, "/health")[0] == 200

    process.ready = (True, "")
    assert get(server, "/ready")[0] == 200
    assert get(server, "/ready", "HEAD") == (200, "")


def test_health_may_say_no() -> None:
    """A process whose loop hangs can tell so, though its HTTP threads run."""
    hung = (False, "the loop has not ticked for 12 s")
    with serve_http("127.0.0.1:0", ready=lambda: hung, health=lambda: hung) as server:
        assert get(server, "/health")[0] == 503


def test_plain_attributes_are_metrics(server: HttpServer, process: Process) -> None:
    """What a hot path counts in an attribute is scraped as it is then, with labels where it has them."""
    exposed = expose(
        [
            Reading(
                name="kvops_store_lookups_total",
                help="Keys looked up.",
                kind="counter",
                read=lambda: process.lookups,
            ),
            Reading(
                name="kvops_store_used_bytes",
                help="Memory in use.",
                labels=["store"],
                read=lambda: {("store-0",): 5.0, ("store-1",): 7.0},
            ),
        ],
        process.registry,
    )
    Counter("kvops_net_drops_total", "Dropped.", registry=process.registry).inc(3)

    process.lookups = 41
    found = scrape(server)
    assert found["kvops_store_lookups_total"] == 41
    assert (found["kvops_store_used_bytesstore-0"], found["kvops_store_used_bytesstore-1"]) == (5, 7)
    assert found["kvops_net_drops_total"] == 3

    process.lookups = 42
    assert scrape(server)["kvops_store_lookups_total"] == 42
    exposed.close()
    assert "kvops_store_lookups_total" not in scrape(server)


def test_the_same_metric_twice_is_noticed(process: Process) -> None:
    """Two owners of one name are an error when the second registers, not two values in a scrape."""
    reading = Reading(name="kvops_store_used_bytes", help="Memory in use.", read=lambda: 1)
    expose([reading], process.registry)

    with pytest.raises(ValueError, match="Duplicated"):
        expose([reading], process.registry)


@pytest.mark.parametrize(("path", "method", "status"), [("/", "GET", 404), ("/ready", "POST", 405)])
def test_other_requests(server: HttpServer, path: str, method: str, status: int) -> None:
    """Whatever else is asked gets an answer that says what there is."""
    assert get(server, path, method)[0] == status


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"nonsense\r\n\r\n", b"GET /" + b"x" * 70_000, b"\xff" * 100])
def test_nonsense_does_no_harm(server: HttpServer, sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """A peer that speaks no HTTP, or hangs up, neither stops the server nor fills the log."""
    with (
        contextlib.suppress(ConnectionError),  # the server may hang up on the first of it
        socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as peer,
    ):
        peer.sendall(sent)

    assert get(server, "/health")[0] == 200
    assert capfd.readouterr().err == ""


def test_silent_peers_do_not_pile_up(server: HttpServer) -> None:
    """Connections beyond the bound are closed, so that silent peers cost a bounded number of threads."""
    port = int(server.address.rpartition(":")[2])
    peers = [
        socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(metrics.CONNECTIONS_MAX + 1)
    ]
    try:
        assert peers[-1].recv(1) == b""
    finally:
        for peer in peers:
            peer.close()


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000", "192.0.2.1:0", ":0", ""]
)
def test_addresses_that_cannot_be(address: str) -> None:
    """An address that cannot be listened on is one error that names it."""
    with pytest.raises(ConfigError, match="cannot listen"):
        serve_http(address, ready=lambda: (True, ""))


def test_a_port_in_use(server: HttpServer) -> None:
    """A port that somebody has is refused, not shared."""
    with pytest.raises(ConfigError, match="in use"):
        serve_http(server.address, ready=lambda: (True, ""))


def test_ipv6(process: Process) -> None:
    """An IPv6 address in brackets works and is shown in brackets."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    with serve_http("[::1]:0", ready=lambda: (True, ""), registry=process.registry) as server:
        assert server.address.startswith("[::1]:")
        assert get(server, "/ready")[0] == 200
