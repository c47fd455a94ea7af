"""
A model of etcd: one linearizable store of keys with leases, behind three members that die, hang and are cut off.

What raft does inside is not modelled, only what it gives. A request that reaches a living member is carried out if
that member reaches a leader that reaches a majority, both ways. Otherwise it may be carried out later, or never:
who asked hears nothing either way. Without such a leader one is elected after an election time-out. Leases are in
whole seconds on the leader's clock, looked at every half second, and start anew with a new leader. Renewals are
linearizable here, as etcd's are from 3.4.28 and 3.5.10 on: an older leader may renew for a moment after it was deposed.

The operations are ``election``'s, carried out by the same transactions as ``coord.GroupKeys``; its encoding, its
client library and TLS are not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from kvops.chaos.sim.clock import Host
from kvops.chaos.sim.net import HOSTS_MAX, End, Payload
from kvops.chaos.sim.process import Process
from kvops.store.election import (
    SILENCE,
    Campaign,
    Claim,
    Grant,
    Look,
    Members,
    Op,
    Promote,
    Publish,
    Raise,
    Record,
    Renew,
    Revoke,
    Seen,
)

if TYPE_CHECKING:
    from kvops.chaos.sim.world import World

REQUEST: Final = 0xFF00  # kinds that the wire does not have
ANSWER: Final = 0xFF01
HELLO: Final = 0xFF02
COMMIT_US: Final = (300, 1_500)  # from a member's receipt to its answer, when all is well
LOOK_US: Final = 50_000  # how often the cluster looks whether its leader still leads
ELECTION_US: Final = (250_000, 600_000)
EXPIRE_US: Final = 500_000
LATE_RATIO: Final = 0.5  # of requests that find no leader: carried out once there is one


class Keys:
    """Keys, revisions and leases: etcd's state machine."""

    def __init__(self) -> None:
        self.revision = 1
        self._rows: dict[str, tuple[bytes, int, int]] = {}  # value, revision of its last change, lease
        self._leases: dict[int, tuple[int, int]] = {}  # TTL in s, when it ends in ms of the leader's clock
        self._next_lease = 1

    def get(self, key: str) -> tuple[bytes, int]:
        """A key's value and the revision of its last change; b"" and 0 where there is none."""
        row = self._rows.get(key)
        return (row[0], row[1]) if row is not None else (b"", 0)

    def transact(
        self,
        revisions: Sequence[tuple[str, int]],
        values: Sequence[tuple[str, bytes]],
        puts: Sequence[tuple[str, bytes, int]],
    ) -> bool:
        """If each key was last changed at that revision (0: is absent) and holds that value: write all."""
        if any(self.get(key)[1] != revision for key, revision in revisions):
            return False
        if any(self.get(key)[0] != value for key, value in values):
            return False
        if any(lease and lease not in self._leases for _, _, lease in puts):
            return False  # etcd: requested lease not found
        self.revision += 1
        for key, value, lease in puts:
            self._rows[key] = (value, self.revision, lease)
        return True

    def grant(self, ttl_s: int, *, now_ms: int) -> int:
        """A lease."""
        lease = self._next_lease
        self._next_lease += 1
        self._leases[lease] = (ttl_s, now_ms + ttl_s * 1_000)
        return lease

    def renew(self, lease: int, *, now_ms: int) -> bool:
        """Let it last as long again; whether it was there."""
        if lease not in self._leases:
            return False
        ttl_s, _ = self._leases[lease]
        self._leases[lease] = (ttl_s, now_ms + ttl_s * 1_000)
        return True

    def revoke(self, lease: int) -> None:
        """End it, and every key under it."""
        if self._leases.pop(lease, None) is None:
            return
        self.revision += 1
        for key in [key for key, row in self._rows.items() if row[2] == lease]:
            del self._rows[key]

    def extend_all(self, *, now_ms: int) -> None:
        """A new leader gives every lease its whole time again, on its own clock."""
        for lease, (ttl_s, _) in self._leases.items():
            self._leases[lease] = (ttl_s, now_ms + ttl_s * 1_000)

    def expire(self, *, now_ms: int) -> list[int]:
        """End the leases whose time is over."""
        over = [lease for lease, (_, end_ms) in self._leases.items() if end_ms <= now_ms]
        for lease in over:
            self.revoke(lease)
        return over


class Etcd:
    """The cluster: who leads, and what it holds."""

    def __init__(self, world: World, rng: Random) -> None:
        self.keys = Keys()
        self.members: dict[str, EtcdMember] = {}  # the last life of each
        self.leader: str | None = None
        self._world = world
        self._rng = rng
        self._elects_at_us = -1  # a leader is missing: one is elected then
        self._late: list[Callable[[], None]] = []

    def start(self) -> None:
        """Look after the leader, and after leases."""
        self._look()
        self._expire()

    def _reaches(self, a: EtcdMember, b: EtcdMember) -> bool:
        cut = self._world.net.cut
        there, back = a.host.index * HOSTS_MAX + b.host.index, b.host.index * HOSTS_MAX + a.host.index
        return a.serves and b.serves and (a is b or (there not in cut and back not in cut))

    def _could_lead(self, member: EtcdMember) -> bool:
        if self._world.net.cut:
            followers = sum(self._reaches(member, other) for other in self.members.values())
        else:
            followers = sum(other.serves for other in self.members.values()) if member.serves else 0
        return 2 * followers > len(self.members)

    def serving(self) -> EtcdMember | None:
        """The leader, if it leads a majority now."""
        leader = self.members.get(self.leader) if self.leader is not None else None
        return leader if leader is not None and self._could_lead(leader) else None

    def _look(self) -> None:
        scheduler = self._world.scheduler
        now = scheduler.now_us
        if self.serving() is None:
            if self._elects_at_us < 0:
                self._elects_at_us = now + self._rng.randint(*ELECTION_US)
            elif now >= self._elects_at_us:
                self._elect()
        else:
            self._elects_at_us = -1
        scheduler.at(now + LOOK_US, self._look)

    def _elect(self) -> None:
        able = [member for member in self.members.values() if self._could_lead(member)]
        if not able:
            return
        leader = self._rng.choice(able)
        self.leader = leader.name
        self._elects_at_us = -1
        self.keys.extend_all(now_ms=leader.now_ms())
        self._world.say("etcd", f"{leader.name} is elected")
        late, self._late = self._late, []
        for request in late:
            request()

    def _expire(self) -> None:
        leader = self.serving()
        if leader is not None:
            for lease in self.keys.expire(now_ms=leader.now_ms()):
                self._world.say("etcd", f"lease {lease} has expired")
        scheduler = self._world.scheduler
        scheduler.at(scheduler.now_us + EXPIRE_US, self._expire)

    def propose(self, member: EtcdMember, op: Op, done: Callable[[object], None]) -> None:
        """Carry out an operation that reached a member, now, later, or never."""
        leader = self.serving()
        if leader is not None and self._reaches(member, leader):
            scheduler = self._world.scheduler
            scheduler.at(scheduler.now_us + self._rng.randint(*COMMIT_US), self._commit, member, op, done)
        elif self._rng.random() < LATE_RATIO:
            self._late.append(lambda: self._commit(member, op, done))

    def _commit(self, member: EtcdMember, op: Op, done: Callable[[object], None]) -> None:
        leader = self.serving()
        if leader is None:
            self._late.append(lambda: self._commit(member, op, done))
            return
        result = carry_out(op, self.keys, now_ms=leader.now_ms())
        if isinstance(op, Campaign) and result is True:
            # The transaction has compared the revision: what it had seen was so.
            self._world.oracle.elected(op.claim.name, op.seen.members)
        if member.alive and self._reaches(member, leader):
            done(result)


def carry_out(op: Op, keys: Keys, *, now_ms: int) -> object:
    """One operation against the keys, as ``GroupKeys`` does it."""
    match op:
        case Look():
            leader, _ = keys.get("leader")
            members, members_revision = keys.get("members")
            term, term_revision = keys.get("term")
            return Seen(
                leader=msgspec.json.decode(leader, type=Claim) if leader else None,
                members=msgspec.json.decode(members, type=Members) if members else None,
                term=int(term) if term else 0,
                members_revision=members_revision,
                term_revision=term_revision,
            )
        case Grant():
            return keys.grant(op.ttl_s, now_ms=now_ms)
        case Renew():
            return keys.renew(op.lease, now_ms=now_ms)
        case Campaign():
            return keys.transact(
                [
                    ("leader", 0),
                    ("members", op.seen.members_revision),
                    ("term", op.seen.term_revision),
                ],
                [],
                [
                    ("leader", msgspec.json.encode(op.claim), op.lease),
                    ("members", msgspec.json.encode(op.members), 0),
                    ("term", str(op.claim.term).encode(), 0),
                ],
            )
        case Record():
            return _if_leader(keys, op.claim, [("members", msgspec.json.encode(op.members), 0)])
        case Publish():
            return _if_leader(keys, op.claim, [("view", msgspec.json.encode(op.claim), op.lease)])
        case Raise():
            claim = msgspec.structs.replace(op.claim, term=op.term)
            return _if_leader(
                keys,
                op.claim,
                [("leader", msgspec.json.encode(claim), op.lease), ("term", str(op.term).encode(), 0)],
            )
        case Promote():
            return keys.transact(
                [("leader", 0), ("members", op.seen.members_revision)],
                [],
                [("members", msgspec.json.encode(op.members), 0)],
            )
        case Revoke():
            keys.revoke(op.lease)
            return True


def _if_leader(keys: Keys, claim: Claim, puts: list[tuple[str, bytes, int]]) -> bool:
    return keys.transact([], [("leader", msgspec.json.encode(claim))], puts)


class EtcdMember(Process):
    """One member: takes requests and passes them to the cluster."""

    def __init__(self, world: World, name: str, host: Host, rng: Random, *, cluster: Etcd) -> None:
        super().__init__(world, name, host, rng)
        self._cluster = cluster

    @property
    def serves(self) -> bool:
        """Whether it runs."""
        return self.alive and not self.paused

    def start(self) -> None:
        """Join the cluster."""
        self._cluster.members[self.name] = self
        self.world.net.listen(self.name, self)

    def accept(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        """A client connects."""
        end.on_frame = self._request

    def _request(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        ops = self.world.etcd_ops
        op = ops.pop((end.peer.id, request), None)
        if op is None:
            return

        def answer(result: object) -> None:
            ops[end.id, request] = result
            end.send(ANSWER, request, repr(result).encode())

        self._cluster.propose(self, op, answer)  # type: ignore[arg-type]


class EtcdClient:
    """One process's client: a call at a time, at one member after the other, each call bounded."""

    def __init__(self, process: Process, members: Sequence[str], *, timeout_us: int) -> None:
        self._process = process
        self._members = list(members)
        self._timeout_us = timeout_us
        self._at = process.rng.randrange(len(members))
        self._end: End | None = None
        self._request = 0
        self._done: Callable[[object], None] | None = None
        self._op: Op | None = None

    def run(self, op: Op, done: Callable[[object], None]) -> None:
        """Carry out; ``done`` gets its result, or SILENCE."""
        assert self._done is None, "one at a time"
        self._op, self._done = op, done
        self._request += 1
        self._process.timer(self._timeout_us, self._late, self._request)
        self._send()

    def _send(self) -> None:
        process = self._process
        if self._end is None or not self._end.open:
            address = self._members[self._at % len(self._members)]
            self._end = process.world.net.connect(process, address, b"", HELLO)
            self._end.on_frame, self._end.on_close = self._answered, self._closed
        assert self._op is not None
        process.world.etcd_ops[self._end.id, self._request] = self._op
        self._end.send(REQUEST, self._request, repr(self._op).encode())

    def _closed(self, end: End) -> None:
        if end is not self._end:
            return
        self._end = None
        self._at += 1
        if self._done is not None:
            self._finish(SILENCE)  # whether it had been passed on is unknown

    def _answered(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        result = self._process.world.etcd_ops.pop((end.peer.id, request), SILENCE)
        if request == self._request and self._done is not None:
            self._finish(result)

    def _late(self, request: int) -> None:
        if request == self._request and self._done is not None:
            if self._end is not None:
                end, self._end = self._end, None
                end.close()
            self._at += 1
            self._finish(SILENCE)

    def _finish(self, result: object) -> None:
        done, self._done, self._op = self._done, None, None
        assert done is not None
        done(result)
