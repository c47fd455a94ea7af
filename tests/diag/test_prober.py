"""The prober by itself: this machine's memory, sockets on loopback, and verbs on a stand-in for pyverbs."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvops.diag import probes
from kvops.diag.collect import prober
from kvops.diag.collect.prober import Prober, ping_udp, reach_tcp
from kvops.diag.matrix import odd_ones, records
from kvops.diag.probes import LocalTalk, Plan, Session
from kvops.errors import KvopsError
from tests.waiting import WAIT_S

TOKEN = bytes(range(16))


@pytest.fixture
def listener() -> Iterator[prober.Listener]:
    """A listener on loopback."""
    made = prober.Listener("127.0.0.1", "", TOKEN)
    yield made
    made.close()


def test_only_who_knows_the_token_is_answered(listener: prober.Listener) -> None:
    """A datagram and a connection without the token are not answered, so that nobody can be flooded by way of us."""
    ports = [("127.0.0.1", listener.ports["tcp"])]
    udp = [("127.0.0.1", listener.ports["udp"])]
    other = bytes(16)

    assert reach_tcp("127.0.0.1", "", ports, TOKEN, WAIT_S)[0]["ok"]
    assert not reach_tcp("127.0.0.1", "", ports, other, WAIT_S)[0]["ok"]
    assert (
        ping_udp("127.0.0.1", "", udp, TOKEN, count=5, interval_s=0.001, timeout_s=WAIT_S)[0]["received"] == 5
    )
    assert ping_udp("127.0.0.1", "", udp, other, count=5, interval_s=0.001, timeout_s=0.2)[0]["received"] == 0


def test_a_closed_port_is_refused_and_a_stranger_is_told_apart(listener: prober.Listener) -> None:
    """A port where nobody listens, and one where somebody else does, are two different answers; neither is ok."""
    with socket.create_server(("127.0.0.1", 0)) as stranger, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        targets = [stranger.getsockname(), closed.getsockname()]

        rows = reach_tcp("127.0.0.1", "", targets, TOKEN, 2.0)

    assert [row["ok"] for row in rows] == [False, False]
    assert rows[0]["error"] == "no answer"
    assert "refused" in rows[1]["error"]


def test_loss_and_jitter() -> None:
    """Round trips by number give percentiles, loss over all and by window, and jitter of neighbours only."""
    trips = {n: 100.0 + n % 2 for n in range(200) if not 20 <= n < 40}

    row = prober.summary(trips, 200, None)

    assert row["loss_percent"] == 10.0
    assert row["loss_windows_percent"] == {"p50": 0.0, "p99": 100.0, "max": 100.0}
    assert row["jitter_us"] == 1.0
    assert row["rtt_us"] == {"p50": 100.0, "p99": 101.0, "p999": None, "max": 101.0}


def test_memory_and_registration_of_this_machine() -> None:
    """Self-tests give a speed for each NUMA node, and the reason and what locking costs where nothing can be registered."""
    talk = LocalTalk("here")
    try:
        memory = talk.ask("memory", bytes=4 << 20, seconds=0.05)
        register = talk.ask("register", sizes=[1 << 20])
        nonsense = talk.ask("dance")
    finally:
        talk.close()

    assert memory["rows"]
    assert all(row["gib_s"] > 0 for row in memory["rows"])
    assert register["rows"] or (register["unseen"] and register["lock"][0]["gib"] == 1 / 1024)
    assert "dance" in nonsense["error"]


def test_a_prober_that_ends_is_said_so() -> None:
    """When the program at the other end dies, the question ends with an error at once, and so does each later one."""
    talk = LocalTalk("here")
    try:
        talk.ask("hello")
        talk._process.kill()
        for _ in range(2):
            with pytest.raises(KvopsError, match="here"):
                talk.ask("hello", timeout_s=WAIT_S)
    finally:
        talk.close()


def test_it_ends_with_its_input() -> None:
    """A prober whose other side goes away ends by itself: nothing is left on a host."""
    done = subprocess.run(
        [sys.executable, str(Path(prober.__file__))],
        input=b'{"id": 7, "do": "load", "netdevs": [], "window_s": 0}\n',
        capture_output=True,
        check=True,
        timeout=WAIT_S,
    )

    assert json.loads(done.stdout.removeprefix(b"KVOPS "))["id"] == 7


class Wire:
    """Where stand-in queue pairs find one another; ``spoil`` is what goes wrong."""

    def __init__(self, spoil: str = "") -> None:
        self.spoil = spoil
        self.ends: dict[int, Endpoint] = {}

    def open(self, device: str, port: int, gid_index: int, size: int) -> Endpoint:
        assert (port, gid_index) in ((1, 0), (1, 1), (1, 3))
        end = Endpoint(self, device, size, gid_index)
        self.ends[end.number] = end
        return end


class Endpoint:
    """Looks like prober.Endpoint, moves bytes in memory."""

    def __init__(self, wire: Wire, device: str, size: int, gid_index: int) -> None:
        self.wire, self.device, self.number = wire, device, len(wire.ends) + 1
        self.gid_index = gid_index
        self.buffer = bytearray(size)
        self.remote: dict[str, Any] = {}

    def local(self) -> dict[str, Any]:
        return {"qpn": self.number}

    def connect(self, remote: dict[str, Any]) -> None:
        if self.wire.spoil in ("rtr", f"gid {self.gid_index}"):
            raise OSError(110, "Connection timed out")
        self.remote = remote

    def fill(self, data: bytes) -> None:
        self.buffer[: len(data)] = data

    def bytes(self, size: int) -> bytes:
        return bytes(self.buffer[:size])

    def reads(self, size: int, count: int, timeout_s: float) -> None:
        self.buffer[:size] = self.wire.ends[self.remote["qpn"]].buffer[:size]
        if self.wire.spoil == "bytes":
            self.buffer[5] ^= 1

    def close(self) -> None:
        del self.wire.ends[self.number]


class DirectTalk:
    """A prober in this process that says it has an RDMA port; requests still pass as JSON."""

    def __init__(self, name: str, wire: Wire, *, verbs: str | None = None) -> None:
        self.name, self.verbs = name, verbs
        self.prober = Prober(endpoint=wire.open)

    def ask(self, do: str, *, timeout_s: float = 15.0, **arguments: Any) -> dict[str, Any]:
        request = json.loads(json.dumps({"do": do, **arguments}))
        if do == "hello":
            gids = [
                {"index": 0, "gid": "fe80::1", "type": "IB/RoCE v1"},
                {"index": 1, "gid": "fe80::1", "type": "RoCE v2"},
                {"index": 3, "gid": "::ffff:10.0.0.1", "type": "RoCE v2"},
            ]
            port = {"device": "mlx5_0", "port": 1, "netdev": "lo", "active": True, "gids": gids}
            nic = {"netdev": "lo", "addresses": ["127.0.0.1"], "mtu": 1500, "rate_gbps": 100.0}
            return {"nics": [nic], "rdma": [port], "verbs": self.verbs}
        answer: dict[str, Any] = json.loads(json.dumps(self.prober.handle(request)))
        return answer

    def close(self) -> None:
        self.prober.close()


def _verbs(
    spoil: str = "", verbs: str | None = None, probes: tuple[str, ...] = ("verbs", "bandwidth")
) -> tuple[Session, Wire]:
    wire = Wire(spoil)
    talks = [DirectTalk(name, wire, verbs=verbs) for name in ("a", "b", "c")]
    session = Session(talks, Plan(probes=probes, seconds=0.02, count=10))
    try:
        session.run()
    finally:
        for talk in talks:
            talk.close()
    return session, wire


def test_verbs_between_all_pairs() -> None:
    """Each pair reads the other's memory by the routable RoCE v2 GID: times, speed and every byte; no queue pair is left."""
    session, wire = _verbs()

    assert len(session.matrix.cells) == 6
    for cell in session.matrix.cells:
        assert cell.verbs is True
        assert cell.verbs_mismatches == 0
        assert cell.verbs_gbps is not None
        assert cell.verbs_rtt_us is not None
    assert wire.ends == {}


def test_wrong_bytes_are_found() -> None:
    """One wrong byte with a good completion is the finding: named in the matrix, and a record that the check reads."""
    session, _ = _verbs("bytes", probes=("verbs",))

    # How long memory takes is this machine's business: a busy one may make a pair look slow beside the others.
    assert {odd.metric for odd in odd_ones(session.matrix)} - {"verbs round trip"} == {"integrity"}
    assert {r["mismatches"] for rows in records(session.matrix).values() for r in rows} == {1}


def test_a_queue_pair_that_cannot_connect() -> None:
    """A queue pair that stays short of RTR is no answer, with the kernel's words; missing pyverbs is unseen, not a failure."""
    broken, wire = _verbs("rtr", probes=("verbs",))
    missing, _ = _verbs(verbs="pyverbs is not installed", probes=("verbs",))

    assert all(cell.verbs is False and "timed out" in cell.error for cell in broken.matrix.cells)
    assert wire.ends == {}
    assert all(cell.verbs is None and "not installed" in cell.unseen for cell in missing.matrix.cells)
    assert odd_ones(missing.matrix) == []


def test_every_pair_of_gids_is_tried() -> None:
    """GIDs of one type and family are tried in pairs, the routable one first; both ends are told, and nothing is left open."""
    session, wire = _verbs(probes=("verbs",))

    for cell in session.matrix.cells:
        assert [pair.indices for pair in cell.gids] == ["3 → 3", "1 → 1", "0 → 0"]
        assert all(pair.answered and pair.rtt_us is not None for pair in cell.gids)
    assert odd_ones(session.matrix) == []
    assert wire.ends == {}


@pytest.mark.parametrize(
    ("silent", "odd"), [(3, {"3 (RoCE v2, IPv4)"}), (1, set())], ids=["engine's", "link-local"]
)
def test_one_gid_does_not_answer(silent: int, odd: set[str]) -> None:
    """The engine's GID that does not answer where another does is named with that one; link-local ones may be silent."""
    session, wire = _verbs(f"gid {silent}", probes=("verbs",))

    told = {one.observed.partition(":")[0] for one in odd_ones(session.matrix) if one.metric == "GID"}
    assert told == odd
    assert all(
        pair.answered != (pair.source_index == silent) for c in session.matrix.cells for pair in c.gids
    )
    assert wire.ends == {}


def test_only_the_named_index_is_tried() -> None:
    """With an index given, no other GID is touched."""
    wire = Wire("")
    talks = [DirectTalk(name, wire) for name in ("a", "b")]
    session = Session(talks, Plan(probes=("verbs",), count=3, gid_index=1))
    session.run()

    assert {pair.indices for cell in session.matrix.cells for pair in cell.gids} == {"1 → 1"}


def test_pairs_of_gids_are_bounded() -> None:
    """A port with many GIDs costs no more than the bound; what was left out is said."""
    gids = [{"index": n, "gid": f"::ffff:10.0.0.{n}", "type": "RoCE v2"} for n in range(12)]
    v6 = {"index": 40, "gid": "fd00::1", "type": "RoCE v2"}

    pairs = probes.gid_pairs([*gids, v6], gids)

    assert len(pairs) == 144  # none with IPv6 on one side alone
    assert (pairs[0][0]["index"], pairs[0][1]["index"]) == (0, 0)
    assert len(pairs) > probes.GID_PAIRS_MAX


class OddTalk(DirectTalk):
    """A host whose answers are not what they should be."""

    def __init__(self, name: str, wire: Wire, odd: dict[str, Any]) -> None:
        super().__init__(name, wire)
        self.odd = odd

    def ask(self, do: str, *, timeout_s: float = 15.0, **arguments: Any) -> dict[str, Any]:
        answer = super().ask(do, timeout_s=timeout_s, **arguments)
        return {**answer, **self.odd.get(do, {})}


@pytest.mark.parametrize(
    "odd",
    [
        {"hello": {"nics": 7}},
        {"hello": {"nics": [{"netdev": "-f", "addresses": ["; rm", "10.0.0.1"], "mtu": 1}]}},
        {"listen": {"listeners": ["x"]}},
        {"tcp": {"rows": None}},
        {"udp": {"rows": [{}]}},
        {"mtu": {"rows": [{"steps": {"many": True}, "path_mtu": "x"}]}},
    ],
    ids=["hello", "names", "listen", "tcp", "udp", "mtu"],
)
def test_a_damaged_answer_costs_one_host(odd: dict[str, Any]) -> None:
    """A host that answers nonsense is left out with the reason; the other two are probed as if it were not there."""
    wire = Wire()
    talks = [DirectTalk("a", wire), DirectTalk("b", wire), OddTalk("c", wire, odd)]
    session = Session(talks, Plan(probes=("tcp", "udp", "mtu")))
    try:
        session.run()
    finally:
        for talk in talks:
            talk.close()

    assert {name for name, _ in session.matrix.unreached} == {"c"}
    well = [cell for cell in session.matrix.cells if "c" not in (cell.source, cell.target)]
    assert len(well) == 2
    assert all(cell.tcp and cell.udp and (cell.path_mtu or 0) >= 1500 for cell in well)


def test_real_verbs() -> None:
    """On a machine with an RDMA device, the real queue pair reads its own memory back."""
    if importlib.util.find_spec("pyverbs") is None:
        pytest.skip("needs pyverbs: apt-get install python3-pyverbs, and a venv that sees it")
    trouble = prober.verbs_trouble()
    ports = [port for port in prober.rdma_ports() if port["active"] and port["gids"]]
    if trouble or not ports:
        pytest.skip(f"needs an active RDMA port, such as Soft-RoCE's: {trouble}")
    place = (ports[0]["device"], ports[0]["port"], ports[0]["gids"][-1]["index"], 1 << 16)
    first, second = prober.Endpoint(*place), prober.Endpoint(*place)
    try:
        first.connect(second.local())
        second.connect(first.local())
        second.fill(b"kvops" * 1000)
        first.reads(5000, 3, 10.0)

        assert first.bytes(5000) == b"kvops" * 1000
    finally:
        first.close()
        second.close()
