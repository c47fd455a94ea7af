"""
The control service: what operators ask a master through a ``ControlClient``, answered by a ``ControlSource``.

Both sides' translation between messages and ``model`` stands here, so that the two cannot drift apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

import grpc

from kvops.errors import ParseError
from kvops.net.rpc import SignedChannel
from kvops.proto.kvops.v1 import control_pb2 as pb
from kvops.proto.kvops.v1 import control_pb2_grpc
from kvops.store.model import (
    ClientInfo,
    Event,
    HoldInfo,
    HoldKind,
    HoldReply,
    HoldState,
    MasterStatus,
    PlacementPolicy,
    Promotion,
    StopCheck,
    StoreInfo,
    StoreState,
    Trouble,
)

SERVICE: Final[str] = pb.DESCRIPTOR.services_by_name["Control"].full_name

# Rows put into a message between two looks at the loop: a status of a whole fleet must not delay lookups.
_ROWS_PER_SLICE: Final = 32

_STORE_FIELDS: Final = tuple(
    name for name in StoreInfo.__struct_fields__ if name not in ("state", "transports")
)
_CLIENT_FIELDS: Final = ClientInfo.__struct_fields__
_STATUS_FIELDS: Final = tuple(
    name
    for name in MasterStatus.__struct_fields__
    if name not in ("placement", "stores", "clients", "holds", "troubles")
)
_HOLD_FIELDS: Final = tuple(
    name for name in HoldInfo.__struct_fields__ if name not in ("kind", "state", "stores")
)
_REPLY_FIELDS: Final = ("capacity_bytes", "pool_bytes", "pool_used_bytes")

Kind = TypeVar("Kind", bound=StrEnum)


class EventStream(Protocol):
    """New events, one at a time, until closed."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """The stream itself."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class ControlSource(Protocol):
    """What the service asks the master; every method answers at once, on the master's loop."""

    def status(self) -> MasterStatus:
        """The master as it is now."""
        ...

    def events(self, since: str | None) -> Sequence[Event]:
        """The events held, oldest first, from a time on (RFC 3339)."""
        ...

    def subscribe(self) -> EventStream:
        """Every event from now on."""
        ...

    def hold(self, kind: HoldKind, request: pb.DrainRequest) -> HoldReply:
        """Drain or cordon."""
        ...

    def lift(self, request: pb.UndrainRequest) -> HoldReply:
        """Undrain."""
        ...

    def ok_to_stop(self, targets: Sequence[str]) -> HoldReply:
        """What stopping these would do to the pool."""
        ...

    def step_down(self, *, owner: str, force: Sequence[str]) -> int:
        """Let another master lead; the term that ends. ``Refused`` where none could."""
        ...

    def promote(self, *, owner: str, force: Sequence[str], dry_run: bool) -> Promotion:
        """Lead soon although not in the in-sync set. ``Refused`` while others lead or may."""
        ...

    def holds(self) -> HoldReply:
        """Every hold."""
        ...

    async def remembered(self) -> None:
        """Wait until what was changed is as durable as this master makes it."""
        ...


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Answers ``kvops.v1.Control`` on the master's loop."""

    def __init__(self, source: ControlSource) -> None:
        self._source = source

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server; the ``register`` of ``serve_rpc``."""
        control_pb2_grpc.add_ControlServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802  # gRPC's name
        """``ControlSource.status`` as a message, put together in slices."""
        status = self._source.status()
        reply = pb.StatusReply(
            placement=_enum_to_pb(pb.PlacementPolicy, status.placement),
            **{name: getattr(status, name) for name in _STATUS_FIELDS},
        )
        for row, store in enumerate(status.stores, 1):
            reply.stores.append(_store_to_pb(store))
            if row % _ROWS_PER_SLICE == 0:
                await asyncio.sleep(0)
        for row, client in enumerate(status.clients, 1):
            reply.clients.append(pb.ClientInfo(**{name: getattr(client, name) for name in _CLIENT_FIELDS}))
            if row % _ROWS_PER_SLICE == 0:
                await asyncio.sleep(0)
        reply.holds.extend(map(_hold_to_pb, status.holds))
        reply.troubles.extend(
            pb.Trouble(code=one.code, text=one.text, fix=one.fix) for one in status.troubles
        )
        return reply

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.HoldReply:  # noqa: N802
        """``ControlSource.hold``, answered once it is remembered."""
        return await self._remembered(self._source.hold(HoldKind.DRAIN, request))

    async def Cordon(self, request: pb.DrainRequest, context: Any) -> pb.HoldReply:  # noqa: N802
        """``ControlSource.hold``, answered once it is remembered."""
        return await self._remembered(self._source.hold(HoldKind.CORDON, request))

    async def Undrain(self, request: pb.UndrainRequest, context: Any) -> pb.HoldReply:  # noqa: N802
        """``ControlSource.lift``, answered once it is remembered."""
        return await self._remembered(self._source.lift(request))

    async def OkToStop(self, request: pb.OkToStopRequest, context: Any) -> pb.HoldReply:  # noqa: N802
        """``ControlSource.ok_to_stop`` as a message."""
        return _reply_to_pb(self._source.ok_to_stop(request.targets))

    async def StepDown(self, request: pb.StepDownRequest, context: Any) -> pb.StepDownReply:  # noqa: N802
        """``ControlSource.step_down`` as a message."""
        return pb.StepDownReply(term=self._source.step_down(owner=request.owner, force=request.force))

    async def Promote(self, request: pb.PromoteRequest, context: Any) -> pb.PromoteReply:  # noqa: N802
        """``ControlSource.promote`` as a message."""
        made = self._source.promote(owner=request.owner, force=request.force, dry_run=request.dry_run)
        return pb.PromoteReply(term=made.term, members=made.members, objects=made.objects, holds=made.holds)

    async def Holds(self, request: pb.HoldsRequest, context: Any) -> pb.HoldReply:  # noqa: N802
        """``ControlSource.holds`` as a message."""
        return _reply_to_pb(self._source.holds())

    async def _remembered(self, reply: HoldReply) -> pb.HoldReply:
        await self._source.remembered()
        return _reply_to_pb(reply)

    async def Events(self, request: pb.EventsRequest, context: Any) -> AsyncIterator[pb.Event]:  # noqa: N802
        """The events held, then new ones while the caller follows."""
        # Subscribed before the held ones are read, with no await between: none is lost, none comes twice.
        news = self._source.subscribe() if request.follow else None
        try:
            for event in self._source.events(request.since or None):
                yield event_to_pb(event)
            if news is not None:
                async for event in news:
                    yield event_to_pb(event)
        finally:
            if news is not None:
                news.close()


class ControlClient:
    """Asks one master. Blocking; may be used from several threads; connects when first asked."""

    def __init__(self, address: str, secret: bytes, timeout_s: float = 2.0) -> None:
        """
        Args:
            address: ``host:port`` of the master's control service.
            secret: The group secret.
            timeout_s: For one answer, the connecting included.
        """
        self._channel = SignedChannel(address, secret, timeout_s=timeout_s)
        self._stub: Any = control_pb2_grpc.ControlStub(self._channel)  # type: ignore[no-untyped-call]

    def status(self) -> MasterStatus:
        """
        What the master knows of itself, its stores and its clients.

        Raises:
            Unreachable: It did not answer in time; ``AuthFailed`` when one side does not hold the secret.
        """
        return status_from_pb(self._stub.Status(pb.StatusRequest()))

    def events(self, since: str | None = None, *, follow: bool = False) -> Iterator[Event]:
        """
        What changed, oldest first.

        Args:
            since: RFC 3339; only events at or after it.
            follow: Go on with new events until the iterator is closed or the connection breaks.

        Raises:
            ParseError: ``since`` is no time.
            Unreachable: As ``status``, or the connection broke.
        """
        timeout_s = None if follow else self._channel.timeout_s
        for message in self._stub.Events(
            pb.EventsRequest(since=since or "", follow=follow), timeout=timeout_s
        ):
            yield event_from_pb(message)

    def drain(
        self,
        targets: Sequence[str],
        *,
        reason: str = "",
        owner: str = "",
        migrate: bool = False,
        bandwidth_bps: int = 0,
        force: Sequence[str] = (),
        dry_run: bool = False,
    ) -> HoldReply:
        """
        Take stores out of use; from the answer on nothing names them.

        Raises:
            UsageError: A target or a check that nobody knows.
            Refused: A check says no.
            Unreachable: As ``status``.
        """
        return reply_from_pb(
            self._stub.Drain(
                pb.DrainRequest(
                    targets=targets,
                    reason=reason,
                    owner=owner,
                    migrate=migrate,
                    bandwidth_bps=bandwidth_bps,
                    force=force,
                    dry_run=dry_run,
                )
            )
        )

    def cordon(
        self,
        targets: Sequence[str],
        *,
        reason: str = "",
        owner: str = "",
        force: Sequence[str] = (),
        dry_run: bool = False,
    ) -> HoldReply:
        """Put nothing new on stores; raises as ``drain``."""
        request = pb.DrainRequest(targets=targets, reason=reason, owner=owner, force=force, dry_run=dry_run)
        return reply_from_pb(self._stub.Cordon(request))

    def undrain(self, targets: Sequence[str], *, owner: str = "", dry_run: bool = False) -> HoldReply:
        """Let stores take part again; raises as ``drain``."""
        request = pb.UndrainRequest(targets=targets, owner=owner, dry_run=dry_run)
        return reply_from_pb(self._stub.Undrain(request))

    def ok_to_stop(self, targets: Sequence[str]) -> HoldReply:
        """What stopping stores would do to the rest of the pool; raises as ``drain``."""
        return reply_from_pb(self._stub.OkToStop(pb.OkToStopRequest(targets=targets)))

    def holds(self) -> HoldReply:
        """Every hold; raises as ``status``."""
        return reply_from_pb(self._stub.Holds(pb.HoldsRequest()))

    def step_down(self, *, owner: str, force: Sequence[str] = ()) -> int:
        """
        Let another master lead; the term that ends.

        Raises:
            Refused: No other master has everything that was acknowledged; NotLeader when it does not lead.
        """
        return int(self._stub.StepDown(pb.StepDownRequest(owner=owner, force=force)).term)

    def promote(self, *, owner: str, force: Sequence[str] = (), dry_run: bool = False) -> Promotion:
        """
        Let this standby lead although it is not in the in-sync set; it does so within a second or two.

        Raises:
            Refused: Somebody leads, or a member of the set may come back (check "in-sync").
            Unreachable: etcd does not answer it.
        """
        reply = self._stub.Promote(pb.PromoteRequest(owner=owner, force=force, dry_run=dry_run))
        return Promotion(
            term=reply.term, members=list(reply.members), objects=reply.objects, holds=reply.holds
        )

    def close(self) -> None:
        """Drop the connection; a stream that is followed elsewhere ends with ``Unreachable``."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def status_from_pb(message: pb.StatusReply) -> MasterStatus:
    """
    A master's status out of its message.

    Raises:
        ParseError: It uses a word that this version does not know.
    """
    return MasterStatus(
        placement=_enum_from_pb(pb.PlacementPolicy, PlacementPolicy, message.placement),
        stores=[_store_from_pb(store) for store in message.stores],
        clients=[
            ClientInfo(**{name: getattr(client, name) for name in _CLIENT_FIELDS})
            for client in message.clients
        ],
        holds=[_hold_from_pb(hold) for hold in message.holds],
        troubles=[Trouble(code=one.code, text=one.text, fix=one.fix) for one in message.troubles],
        **({name: getattr(message, name) for name in _STATUS_FIELDS} | {"members": list(message.members)}),
    )


def reply_from_pb(message: pb.HoldReply) -> HoldReply:
    """
    An answer about holds out of its message.

    Raises:
        ParseError: It uses a word that this version does not know.
    """
    return HoldReply(
        holds=[_hold_from_pb(hold) for hold in message.holds],
        checks=[
            StopCheck(name=check.name, ok=check.ok, text=check.text, fix=check.fix)
            for check in message.checks
        ],
        unchanged=list(message.unchanged),
        **{name: getattr(message, name) for name in _REPLY_FIELDS},
    )


def _reply_to_pb(reply: HoldReply) -> pb.HoldReply:
    return pb.HoldReply(
        holds=map(_hold_to_pb, reply.holds),
        checks=[
            pb.StopCheck(name=check.name, ok=check.ok, text=check.text, fix=check.fix)
            for check in reply.checks
        ],
        unchanged=reply.unchanged,
        **{name: getattr(reply, name) for name in _REPLY_FIELDS},
    )


def _hold_to_pb(hold: HoldInfo) -> pb.Hold:
    return pb.Hold(
        kind=_enum_to_pb(pb.HoldKind, hold.kind),
        state=_enum_to_pb(pb.HoldState, hold.state),
        stores=hold.stores,
        **{name: getattr(hold, name) for name in _HOLD_FIELDS},
    )


def _hold_from_pb(message: pb.Hold) -> HoldInfo:
    return HoldInfo(
        kind=_enum_from_pb(pb.HoldKind, HoldKind, message.kind),
        state=_enum_from_pb(pb.HoldState, HoldState, message.state),
        stores=list(message.stores),
        **{name: getattr(message, name) for name in _HOLD_FIELDS},
    )


def event_to_pb(event: Event) -> pb.Event:
    """An event as a message."""
    message = pb.Event(time=event.time, event=event.event, subject=event.subject, actor=event.actor)
    for key, value in event.detail.items():
        detail = message.detail.add(key=key)
        if isinstance(value, bool):  # before int: True is one
            detail.flag = value
        elif isinstance(value, int):
            detail.number = value
        elif isinstance(value, float):
            detail.real = value
        else:
            detail.text = value
    return message


def event_from_pb(message: pb.Event) -> Event:
    """An event out of its message; a value of a kind that this version does not know is left out."""
    detail = {}
    for entry in message.detail:
        kind = entry.WhichOneof("value")
        if kind is not None:
            detail[entry.key] = getattr(entry, kind)
    return Event(
        time=message.time, event=message.event, subject=message.subject, actor=message.actor, detail=detail
    )


def _store_to_pb(store: StoreInfo) -> pb.StoreInfo:
    return pb.StoreInfo(
        state=_enum_to_pb(pb.StoreState, store.state),
        transports=store.transports,
        **{name: getattr(store, name) for name in _STORE_FIELDS},
    )


def _store_from_pb(message: pb.StoreInfo) -> StoreInfo:
    return StoreInfo(
        state=_enum_from_pb(pb.StoreState, StoreState, message.state),
        transports=list(message.transports),
        **{name: getattr(message, name) for name in _STORE_FIELDS},
    )


# Protobuf wants an enum's values to start with its name: READY of StoreState is STORE_STATE_READY there.
_PREFIXES: Final = {
    pb.PlacementPolicy: "PLACEMENT_POLICY_",
    pb.StoreState: "STORE_STATE_",
    pb.HoldKind: "HOLD_KIND_",
    pb.HoldState: "HOLD_STATE_",
}


def _enum_to_pb(enum: Any, value: StrEnum) -> Any:
    return enum.Value(_PREFIXES[enum] + value.name)


def _enum_from_pb(enum: Any, kind: type[Kind], number: int) -> Kind:
    try:
        return kind[enum.Name(number).removeprefix(_PREFIXES[enum])]
    except (KeyError, ValueError):
        raise ParseError(
            f"the master says {kind.__name__} {number}, which this version of kvops does not know",
            fix="upgrade kvops on this side",
        ) from None
