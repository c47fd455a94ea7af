"""
Who leads a group: one master's half of an election held in etcd, without I/O.

``next`` says which one operation is due, the shell carries it out against etcd, ``done`` takes what became
of it. There is never more than one under way, so an answer can always be told from silence, and silence means
"may have happened".

::

    <prefix>/leader    who leads, under its lease: gone when that ends       Claim
    <prefix>/members   the in-sync set: who may campaign                     Members
    <prefix>/term      the last term that was given out
    <prefix>/view      the serving leader, for clients and stores            Claim

A term is a counter that the campaign's own transaction raises, not etcd's revision: that of an etcd shared with
others would outgrow the 24 bits that a generation has for it.

A leader trusts its lease from the moment it *sent* the renewal that etcd confirmed, less a margin for clocks that
run apart. It renews only while its own loop ticks: a master that hangs loses its lease as one that died.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from kvops.limits import ETCD_TTL_S_MAX

POLL_MS: Final = 100  # how often a standby looks who leads
LEADER_POLL_MS: Final = 5_000  # how often a leader looks whether its keys are as it left them …
LEADER_LOOK_MS: Final = 50  # … just after a renewal: a look without an answer must not delay the next one
RETRY_MS: Final = 50  # after an operation that failed
CLOCK_MARGIN_RATIO: Final = 0.05  # of the TTL: clocks of this host and of etcd's may run apart
CLOCK_MARGIN_MS: Final = 50
RENEWALS_PER_TTL: Final = 4
LOOP_SILENCE_MS_MAX: Final = 500  # a loop that has not ticked for so long does not lead
COLD_DELAY_MS: Final = 500  # whoever has not followed the last leader lets those go first that have
BARRED_DELAY_MS: Final = 2_000
RESIGN_MS: Final = 3_000  # whoever stepped down stands back for so long


class Role(StrEnum):
    """What a master is to its group."""

    STANDBY = "standby"
    LEADER = "leader"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads, and where to find it."""

    name: str
    term: int
    address: str  # of the wire, host:port
    control: str
    host: str = ""


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """Who has every acknowledged operation of this term, the leader among them."""

    term: int
    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The group's keys at one revision; a revision of 0 means that the key is not there."""

    leader: Claim | None = None
    members: Members | None = None
    term: int = 0
    members_revision: int = 0
    term_revision: int = 0
    taken: bool = False
    """The leader's key is there, readable or not: nobody can campaign."""
    trouble: str = ""
    """What cannot be read; somebody else has written there."""


# Operations, each with what ``done`` is given for it.


@dataclass(frozen=True, slots=True)
class Look:
    """Read the keys → Seen."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Take out a lease → its id, above 0."""

    ttl_s: int


@dataclass(frozen=True, slots=True)
class Campaign:
    """If nobody leads and members and term are as ``seen``: lead → whether that was so."""

    lease: int
    claim: Claim
    members: Members
    seen: Seen


@dataclass(frozen=True, slots=True)
class Renew:
    """Keep the lease → whether it still was there."""

    lease: int


@dataclass(frozen=True, slots=True)
class Record:
    """If we lead: replace the in-sync set → whether we do."""

    claim: Claim
    members: Members


@dataclass(frozen=True, slots=True)
class Publish:
    """If we lead: tell everybody where, under our lease → whether we do."""

    claim: Claim
    lease: int


@dataclass(frozen=True, slots=True)
class Raise:
    """If we lead: go on with this higher term → whether we do."""

    claim: Claim
    term: int
    lease: int


@dataclass(frozen=True, slots=True)
class Promote:
    """If nobody leads and members are as ``seen``: be the in-sync set → whether that was so."""

    members: Members
    seen: Seen


@dataclass(frozen=True, slots=True)
class Revoke:
    """Give a lease back → anything."""

    lease: int


Op = Look | Grant | Campaign | Renew | Record | Publish | Raise | Promote | Revoke


class Silence:
    """What became of an operation is not known: it may have happened."""


SILENCE: Final = Silence()


class Election:
    """
    One master's part in its group's election. Times are milliseconds on the caller's clock, which never stops.

    Args:
        claim: Who we are; its term is ignored.
        ttl_s: Of the lease, whole seconds: etcd grants no others.
        term_min: The highest term this master has ever seen, so that a new etcd cannot take terms back.
    """

    def __init__(self, claim: Claim, *, ttl_s: int, term_min: int = 0) -> None:
        assert 1 <= ttl_s <= ETCD_TTL_S_MAX
        self.role = Role.STANDBY
        self.term = 0  # of our own leadership
        self.won = 0  # elections so far: another leadership of ours is not the same one
        self.seen = Seen()  # what the last look found
        self.seen_ms = 0
        self.hot = False
        """Whether this master has followed the leader of ``seen.members.term`` up to now; set by its owner."""
        self.lease_until_ms = 0
        """As a leader: nothing is answered from then on."""
        self.members_wanted: frozenset[str] = frozenset()
        """As a leader: whom its owner wants in the in-sync set, itself apart."""
        self.members: frozenset[str] = frozenset()
        """As a leader: who may be in the set as far as anybody can know, itself apart."""
        self.barred = False
        """This master's host is being taken away: it leads only if nobody else will; set by its owner."""
        self.serving = False
        """As a leader: it answers, so the view may be published; set by its owner."""
        self.term_wanted = 0
        """As a leader: a store has seen a term up to this one; generations must go above it."""
        self._claim = claim
        self._ttl_ms = ttl_s * 1_000
        self._ttl_s = ttl_s
        self._term_min = term_min
        self._lease = 0
        self._recorded: frozenset[str] | None = None  # what etcd certainly holds
        self._published = False
        self._looked_ms = -POLL_MS
        self._renewed_ms = 0
        self._free_since_ms: int | None = None  # since when nobody has led
        self._stand_back_until_ms = 0
        self._not_before_ms = 0  # after trouble
        self._resigning = False
        self._promoting = False
        self._stale_leases: list[int] = []

    @property
    def claim(self) -> Claim:
        """What we claim as a leader."""
        return msgspec.structs.replace(self._claim, term=self.term)

    def leads(self, now_ms: int) -> bool:
        """Whether this master may answer now."""
        return self.role is Role.LEADER and now_ms < self.lease_until_ms

    def resign(self) -> None:
        """Step down at the next chance, and stand back for a while."""
        self._resigning = True

    def promote(self) -> None:
        """
        Become the in-sync set, at the next chance and if nobody leads: an operator's way out.

        What only the members of the set before had is lost with that.
        """
        self._promoting = True

    @property
    def members_possible(self) -> frozenset[str]:
        """As a leader: whom etcd may list now or after the next operation; nothing is acknowledged without them."""
        return self.members | self.members_wanted

    @property
    def free(self) -> bool:
        """Whether nobody led at the last look."""
        return self._free_since_ms is not None

    def eligible(self) -> bool:
        """Whether this master may campaign: everybody in a new group, else a member of the in-sync set."""
        members = self.seen.members
        if members is None:
            return self.seen.members_revision == 0  # a set that cannot be read is not one of everybody
        return self._claim.name in members.names

    def next(self, now_ms: int, *, ticked_ms: int) -> Op | int:
        """
        The operation that is due, or the time until which nothing is.

        Args:
            now_ms: The time; also when the operation will be sent.
            ticked_ms: When the master's loop last ticked.
        """
        if self.role is Role.LEADER and (self._resigning or now_ms >= self.lease_until_ms):
            self._step_down(now_ms)
        if now_ms < self._not_before_ms:
            return self._not_before_ms
        if self.role is Role.LEADER:
            return self._next_leader(now_ms, ticked_ms)
        return self._next_standby(now_ms, ticked_ms)

    def _next_leader(self, now_ms: int, ticked_ms: int) -> Op | int:
        due = self._renewed_ms + self._ttl_ms // RENEWALS_PER_TTL
        if now_ms >= due and now_ms - ticked_ms < LOOP_SILENCE_MS_MAX:
            return Renew(self._lease)
        if self.term_wanted >= self.term:
            return Raise(self.claim, self.term_wanted + 1, self._lease)
        if self._recorded != self.members_wanted:
            self.members |= self.members_wanted
            return Record(self.claim, self._set_of(self.members_wanted))
        if self.serving and not self._published:
            return Publish(self.claim, self._lease)
        if now_ms - self._looked_ms >= LEADER_POLL_MS and now_ms - self._renewed_ms <= LEADER_LOOK_MS:
            return Look()
        return max(due, now_ms + 1)

    def _next_standby(self, now_ms: int, ticked_ms: int) -> Op | int:
        if self._stale_leases:
            return Revoke(self._stale_leases[-1])
        if now_ms - self._looked_ms >= POLL_MS:
            return Look()
        if self._promoting and self.seen_ms == self._looked_ms:
            # Unread, a term is outdone all the same: by the highest one that we have seen.
            return Promote(
                Members(term=max(self.seen.term, self._term_min), names=[self._claim.name]), self.seen
            )
        if self._lease:
            term = max(self.seen.term, self._term_min) + 1
            claim = msgspec.structs.replace(self._claim, term=term)
            return Campaign(self._lease, claim, Members(term=term, names=[claim.name]), self.seen)
        if self._may_campaign(now_ms) and now_ms - ticked_ms < LOOP_SILENCE_MS_MAX:
            return Grant(self._ttl_s)
        return self._looked_ms + POLL_MS

    def _may_campaign(self, now_ms: int) -> bool:
        if self._free_since_ms is None or now_ms < self._stand_back_until_ms or not self.eligible():
            return False
        # In a new group anybody may begin; in one whose etcd was lost whoever has followed goes first.
        fresh = self.hot or (self.seen.members is None and self._term_min == 0)
        wait_ms = (0 if fresh else COLD_DELAY_MS) + (BARRED_DELAY_MS if self.barred else 0)
        return now_ms - self._free_since_ms >= wait_ms

    def done(self, op: Op, result: object, *, sent_ms: int, now_ms: int) -> None:
        """
        What became of an operation.

        Args:
            op: As ``next`` gave it.
            result: As the operation's class says, or ``SILENCE``.
            sent_ms: When it was sent.
            now_ms: The time.
        """
        if result is SILENCE:
            self._not_before_ms = now_ms + RETRY_MS
        match op:
            case Look():
                self._looked(result, now_ms)
            case Grant() if isinstance(result, int):
                self._lease = result
                self._renewed_ms = sent_ms
            case Campaign():
                self._campaigned(op, result, now_ms)
            case Renew() if result is True:
                self._renewed_ms = sent_ms
                self.lease_until_ms = max(self.lease_until_ms, self._until(sent_ms))
            case Promote():
                self._promoting = False  # once: whoever asked looks what became of it
                self._looked_ms = now_ms - POLL_MS
            case Revoke():
                # Silence as well: it ends by itself, and nothing of ours hangs on it.
                self._stale_leases.remove(op.lease)
            case Record() if result is True and self.role is Role.LEADER:
                recorded = frozenset(op.members.names) - {self._claim.name}
                self._recorded = self.members = recorded
            case Record() if result is SILENCE:
                self._recorded = None  # the old set or the new one: both count until one is certain
            case Publish() if result is True:
                self._published = True
            case Raise() if result is True:
                self.term = op.term
                self._published = False
                self._recorded = None
            case Renew() | Record() | Publish() | Raise() if result is False:
                self._step_down(now_ms)

    def _looked(self, result: object, now_ms: int) -> None:
        self._looked_ms = now_ms
        if not isinstance(result, Seen):
            return
        self.seen, self.seen_ms = result, now_ms
        self._term_min = max(self._term_min, result.term)
        if self.role is Role.LEADER:
            self._looked_as_leader(result, now_ms)
            return
        if result.leader is not None or result.taken:
            self._free_since_ms = None
        elif self._free_since_ms is None:
            self._free_since_ms = now_ms

    def _looked_as_leader(self, seen: Seen, now_ms: int) -> None:
        """
        Somebody else may have written or deleted our keys, while our lease lives on.

        Without the leader's key others may lead: we must not. One that cannot be read keeps everybody out, so the
        pool may as well be served. The in-sync set is written anew.
        """
        if seen.leader != self.claim and (seen.leader is not None or not seen.taken):
            self._step_down(now_ms)
        elif self._recorded is not None and seen.members != self._set_of(self._recorded):
            self._recorded = None

    def _campaigned(self, op: Campaign, result: object, now_ms: int) -> None:
        until_ms = self._until(self._renewed_ms)
        if result is True and now_ms < until_ms:
            self.role, self.term, self.lease_until_ms = Role.LEADER, op.claim.term, until_ms
            self.won += 1
            self.members = self.members_wanted = self._recorded = frozenset()
            self.serving = self._published = self._resigning = False
            self.term_wanted = 0
            self._term_min = max(self._term_min, self.term)
            self._free_since_ms = None
            return
        # Lost, too late, or unknown: with its lease whatever it may have written goes away.
        self._stale_leases.append(self._lease)
        self._lease = 0

    def _until(self, sent_ms: int) -> int:
        return sent_ms + self._ttl_ms - int(self._ttl_ms * CLOCK_MARGIN_RATIO) - CLOCK_MARGIN_MS

    def _set_of(self, names: frozenset[str]) -> Members:
        return Members(term=self.term, names=[self._claim.name, *sorted(names)])

    def _step_down(self, now_ms: int) -> None:
        self.role = Role.STANDBY
        self.lease_until_ms = 0
        self.hot = self.serving = False
        if self._resigning:
            self._stand_back_until_ms = now_ms + RESIGN_MS
        self._resigning = False
        self._stale_leases.append(self._lease)
        self._lease = 0
        self._looked_ms = now_ms - POLL_MS
        self._free_since_ms = None
