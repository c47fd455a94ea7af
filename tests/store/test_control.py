"""The control service, asked over a real connection."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvops.errors import ParseError, Refused, Unreachable
from kvops.proto.kvops.v1 import control_pb2 as pb
from kvops.store import control
from kvops.store.control import SERVICE, ControlClient, ControlServicer
from kvops.store.events import EventLog
from kvops.store.model import (
    ClientInfo,
    HoldInfo,
    HoldKind,
    HoldReply,
    HoldState,
    MasterStatus,
    PlacementPolicy,
    StopCheck,
    StoreInfo,
    StoreState,
)
from tests.waiting import WAIT_S

SECRET = bytes(range(32))
U64_MAX = (1 << 64) - 1


def make_store(id: int, state: StoreState) -> StoreInfo:
    return StoreInfo(
        id=id,
        name=f"store-{id}",
        host=f"host-{id}",
        numa_node=1,
        incarnation=U64_MAX - id,
        boot_id="5f0c",
        pid=4242,
        address="127.0.0.1:7900",
        unix_path="/run/kvops/s.sock",
        http_address="127.0.0.1:7902",
        state=state,
        capacity_bytes=1 << 40,
        populated_bytes=1 << 39,
        used_bytes=1 << 38,
        objects=5_000_000,
        transports=["shm", "tcp"],
    )


def make_hold(number: int, state: HoldState) -> HoldInfo:
    return HoldInfo(
        number=number,
        target=f"gpu-{number:03}",
        host=True,
        kind=HoldKind.DRAIN,
        state=state,
        reason="INC-4412",
        owner="alice@ops-1",
        since="2031-05-04T03:10:00+00:00",
        migrate=True,
        bandwidth_bps=40 * 10**9,
        stores=["store-1", "store-2"],
        objects_at_call=1_812_345,
        bytes_at_call=1 << 40,
        leases_left_ms=600,
        swept=17,
        left=-1,
        objects=1_812_328,
        migrated=5,
        migrated_bytes=5 << 20,
        unmoved=2,
    )


def make_status(stores: int, clients: int) -> MasterStatus:
    states = list(StoreState)
    return MasterStatus(
        group="local",
        name="master-0",
        host="host-0",
        pid=4241,
        address="127.0.0.1:7800",
        role="leader",
        term=7,
        uptime_s=12.5,
        placement=PlacementPolicy.RANDOM,
        objects=16_000_000,
        processing=3,
        capacity_bytes=3 << 40,
        used_bytes=2 << 40,
        evicted_total=U64_MAX,
        lookups_total=10**12,
        hits_total=10**11,
        breaker_open=True,
        stores=[make_store(id, states[id % len(states)]) for id in range(1, stores + 1)],
        clients=[ClientInfo(name=f"engine-{i}", host="host-1", pid=i, connections=2) for i in range(clients)],
        holds=[make_hold(number, state) for number, state in enumerate(HoldState, 1)],
    )


class Source:
    """A master with nothing behind it."""

    def __init__(self, status: MasterStatus) -> None:
        self._status = status
        self.log = EventLog()
        self.events = self.log.events
        self.subscribe = self.log.subscribe

        self.asked: list[Any] = []
        self.safe = False

    def status(self) -> MasterStatus:
        return self._status

    def hold(self, kind: HoldKind, request: pb.DrainRequest) -> HoldReply:
        if "everything" in request.targets:
            raise Refused("no store would be left that serves", fix="bring in another store first")
        self.asked.append((kind, request))
        return self.reply()

    def lift(self, request: pb.UndrainRequest) -> HoldReply:
        self.asked.append(request)
        return self.reply()

    def ok_to_stop(self, targets: Any) -> HoldReply:
        self.asked.append(list(targets))
        return self.reply()

    def holds(self) -> HoldReply:
        return self.reply()

    async def remembered(self) -> None:
        self.safe = True

    def reply(self) -> HoldReply:
        return HoldReply(
            holds=self._status.holds,
            checks=[StopCheck(name="last-store", ok=False, text="none is left", fix="start one")],
            unchanged=["gpu-009"],
            capacity_bytes=1,
            pool_bytes=2,
            pool_used_bytes=3,
        )


@pytest.fixture
def source() -> Source:
    return Source(make_status(stores=100, clients=70))


@pytest.fixture
def loop_and_client(source: Source, serve_control: Any) -> Iterator[tuple[Any, ControlClient]]:
    register = ControlServicer(source).add_to
    with (
        serve_control(register, services=[SERVICE], secrets=[SECRET]) as (server, loop),
        ControlClient(server.address, SECRET, timeout_s=WAIT_S) as client,
    ):
        yield loop, client


@pytest.mark.process
def test_status_arrives_whole(loop_and_client: tuple[Any, ControlClient], source: Source) -> None:
    """Every field of the master, its stores in every state and its clients arrives as it was."""
    _, client = loop_and_client

    assert client.status() == source.status()


@pytest.mark.process
def test_events_arrive_as_they_were(loop_and_client: tuple[Any, ControlClient], source: Source) -> None:
    """Events arrive in order with every kind of detail, from the moment asked for."""
    _, client = loop_and_client
    detail = {"text": "a", "number": -5, "real": 0.5, "yes": True, "no": False, "empty": "", "zero": 0}
    source.log.record("store.joined", subject="store-1", actor="master", time_ms=1_000, detail=detail)
    source.log.record("store.left", subject="store-1", actor="alice", time_ms=2_000)

    assert list(client.events()) == source.log.events()
    assert [event.event for event in client.events("1970-01-01T00:00:02Z")] == ["store.left"]
    with pytest.raises(ParseError, match="not a time"):
        list(client.events("yesterday"))


@pytest.mark.process
def test_following_gives_old_and_new_once(loop_and_client: tuple[Any, ControlClient], source: Source) -> None:
    """A follower gets the events held, then each new one; the master forgets it when it hangs up."""
    loop, client = loop_and_client
    hung_up = threading.Event()
    drop = source.log.drop
    source.log.drop = lambda follower: (drop(follower), hung_up.set())  # type: ignore[assignment,method-assign]

    def record(name: str) -> None:
        source.log.record(name, subject="s", actor="a", time_ms=0)

    record("event.old")
    stream = client.events(follow=True)
    names = [next(stream).event]
    for name in ("event.new", "event.newer"):
        loop.call_soon_threadsafe(record, name)
        names.append(next(stream).event)
    stream.close()

    assert names == ["event.old", "event.new", "event.newer"]
    assert hung_up.wait(WAIT_S)


@pytest.mark.process
def test_requests_about_holds_arrive_whole(
    loop_and_client: tuple[Any, ControlClient], source: Source
) -> None:
    """What is asked about holds reaches the master as it was said, and its answer comes back as it was."""
    _, client = loop_and_client

    answers = [
        client.drain(
            ["gpu-001", "store-2"],
            reason="INC-4412",
            owner="alice@ops-1",
            migrate=True,
            bandwidth_bps=5,
            force=["last-store"],
            dry_run=True,
        ),
        client.cordon(["gpu-001"], reason="r", owner="o", force=["f"]),
        client.undrain(["gpu-001"], owner="bob@ops-2", dry_run=True),
        client.ok_to_stop(["gpu-001", "gpu-002"]),
        client.holds(),
    ]

    assert answers == [source.reply()] * 5
    (drain, drained), (cordon, cordoned), lifted, asked = source.asked
    assert (drain, cordon) == (HoldKind.DRAIN, HoldKind.CORDON)
    assert drained == pb.DrainRequest(
        targets=["gpu-001", "store-2"],
        reason="INC-4412",
        owner="alice@ops-1",
        migrate=True,
        bandwidth_bps=5,
        force=["last-store"],
        dry_run=True,
    )
    assert cordoned == pb.DrainRequest(targets=["gpu-001"], reason="r", owner="o", force=["f"])
    assert lifted == pb.UndrainRequest(targets=["gpu-001"], owner="bob@ops-2", dry_run=True)
    assert asked == ["gpu-001", "gpu-002"]


@pytest.mark.process
def test_a_refused_drain_says_why_and_a_granted_one_is_safe(
    loop_and_client: tuple[Any, ControlClient], source: Source
) -> None:
    """A refusal comes back as the error that the master raised; an answer only once the change is remembered."""
    _, client = loop_and_client

    with pytest.raises(Refused, match="no store would be left") as caught:
        client.drain(["everything"])
    assert caught.value.fix == "bring in another store first"
    assert not source.safe
    client.drain(["gpu-001"])
    assert source.safe


def test_a_master_that_is_gone() -> None:
    """Asking a closed port is Unreachable, for status and for events."""
    with ControlClient("127.0.0.1:1", SECRET, timeout_s=WAIT_S) as client:
        with pytest.raises(Unreachable):
            client.status()
        with pytest.raises(Unreachable):
            next(client.events(follow=True))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (pb.StatusReply, MasterStatus),
        (pb.StoreInfo, StoreInfo),
        (pb.ClientInfo, ClientInfo),
        (pb.Hold, HoldInfo),
        (pb.HoldReply, HoldReply),
        (pb.StopCheck, StopCheck),
    ],
)
def test_messages_and_model_have_the_same_fields(message: Any, kind: Any) -> None:
    """A field added to the model but not to the message, or the other way, is noticed here."""
    assert set(message.DESCRIPTOR.fields_by_name) == {field.name for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize(
    ("enum", "kind", "prefix"),
    [
        (pb.StoreState, StoreState, "STORE_STATE_"),
        (pb.PlacementPolicy, PlacementPolicy, "PLACEMENT_POLICY_"),
        (pb.HoldKind, HoldKind, "HOLD_KIND_"),
        (pb.HoldState, HoldState, "HOLD_STATE_"),
    ],
)
def test_enums_and_model_have_the_same_words(enum: Any, kind: Any, prefix: str) -> None:
    """Every word of the model has a number, and zero means that none was said."""
    assert enum.keys() == [f"{prefix}UNSPECIFIED", *(prefix + word.name for word in kind)]


def test_an_unknown_word_is_refused() -> None:
    """A state that only a newer master knows is an error that says so, not another state."""
    message = pb.StatusReply(placement=pb.PLACEMENT_POLICY_RANDOM, stores=[pb.StoreInfo(state=99)])

    with pytest.raises(ParseError, match="StoreState 99"):
        control.status_from_pb(message)
