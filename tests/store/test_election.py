"""The election's rules, against a model of etcd in virtual time whose answers come late or never."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from kvops.store.election import (
    COLD_DELAY_MS,
    LEADER_POLL_MS,
    POLL_MS,
    SILENCE,
    Campaign,
    Claim,
    Election,
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
    Role,
    Seen,
)

TTL_S = 2
STEP_MS = 20


@dataclass
class Etcd:
    """The group's keys; a lease is kept for its TTL after the last renewal that arrived."""

    leader: Claim | None = None
    leader_lease: int = 0
    view: Claim | None = None
    members: Members | None = None
    term: int = 0
    revision: int = 1
    members_revision: int = 0
    term_revision: int = 0
    leases: dict[int, int] = field(default_factory=dict)  # when each ends

    def expire(self, now_ms: int) -> None:
        self.leases = {lease: end for lease, end in self.leases.items() if end > now_ms}
        if self.leader is not None and self.leader_lease not in self.leases:
            self.leader = self.view = None

    def run(self, op: Op, now_ms: int) -> object:
        self.expire(now_ms)
        self.revision += 1
        match op:
            case Look():
                return Seen(
                    leader=self.leader,
                    members=self.members,
                    term=self.term,
                    members_revision=self.members_revision,
                    term_revision=self.term_revision,
                )
            case Grant(ttl_s):
                self.leases[self.revision] = now_ms + ttl_s * 1_000
                return self.revision
            case Renew(lease):
                if lease not in self.leases:
                    return False
                self.leases[lease] = now_ms + TTL_S * 1_000
                return True
            case Promote(members, seen):
                if self.leader is not None or seen.members_revision != self.members_revision:
                    return False
                self.members, self.members_revision = members, self.revision
                return True
            case Revoke(lease):
                self.leases.pop(lease, None)
                self.expire(now_ms)
                return True
            case Campaign(lease, claim, members, seen):
                same = (seen.members_revision, seen.term_revision) == (
                    self.members_revision,
                    self.term_revision,
                )
                if self.leader is not None or not same or lease not in self.leases:
                    return False
                self.leader, self.leader_lease, self.members = claim, lease, members
                self.term, self.members_revision, self.term_revision = (
                    claim.term,
                    self.revision,
                    self.revision,
                )
                return True
            case Record(claim, members):
                if self.leader == claim:
                    self.members, self.members_revision = members, self.revision
                return self.leader == claim
            case Publish(claim, _):
                if self.leader == claim:
                    self.view = claim
                return self.leader == claim
            case Raise(claim, term, _):
                if self.leader != claim:
                    return False
                self.leader = Claim(name=claim.name, term=term, address=claim.address, control=claim.control)
                self.term, self.term_revision = term, self.revision
                return True


def election(name: str, **options: int) -> Election:
    return Election(Claim(name=name, term=0, address=f"{name}:1", control=""), ttl_s=TTL_S, **options)


def drive(one: Election, etcd: Etcd, *, start_ms: int, end_ms: int, ticking: bool = True) -> int:
    """Let one master's election run with an etcd that answers at once; when it ended."""
    now = start_ms
    while now < end_ms:
        op = one.next(now, ticked_ms=now if ticking else start_ms)
        if isinstance(op, int):
            now = min(max(op, now + 1), end_ms)
        else:
            one.done(op, etcd.run(op, now), sent_ms=now, now_ms=now)
    return now


def test_the_first_of_a_new_group_leads_and_publishes_only_once_it_serves() -> None:
    """Clients are told of a leader when it answers, not when it was elected."""
    one, etcd = election("a"), Etcd()
    drive(one, etcd, start_ms=0, end_ms=500)

    assert (one.role, one.term, etcd.view) == (Role.LEADER, 1, None)
    one.serving = True
    drive(one, etcd, start_ms=500, end_ms=600)
    assert etcd.view == one.claim


def test_a_leader_that_etcd_does_not_hear_stops_before_its_lease_ends_there() -> None:
    """The lease is counted from when the renewal was sent, so no other can lead while this one still answers."""
    one, etcd = election("a"), Etcd()
    drive(one, etcd, start_ms=0, end_ms=1_000)

    assert one.lease_until_ms < etcd.leases[etcd.leader_lease]
    assert one.leads(one.lease_until_ms - 1)
    assert not one.leads(one.lease_until_ms)
    assert one.next(one.lease_until_ms, ticked_ms=one.lease_until_ms) is not None
    assert one.role is Role.STANDBY


def test_a_leader_whose_loop_hangs_lets_its_lease_end() -> None:
    """A master that is up but does not serve is as good as dead: it must not keep the lease."""
    one, etcd = election("a"), Etcd()
    drive(one, etcd, start_ms=0, end_ms=1_000)
    drive(one, etcd, start_ms=1_000, end_ms=1_000 + 2 * TTL_S * 1_000, ticking=False)

    assert one.role is Role.STANDBY
    assert (etcd.leader, etcd.view) == (None, None)


def test_whoever_is_not_in_the_set_does_not_campaign() -> None:
    """A standby that misses operations never leads, however long nobody does."""
    etcd = Etcd(members=Members(term=3, names=["a"]), members_revision=1, term=3, term_revision=1)
    other = election("b")
    other.hot = True
    drive(other, etcd, start_ms=0, end_ms=20_000)

    assert other.role is Role.STANDBY
    member = election("a")
    drive(member, etcd, start_ms=20_000, end_ms=20_000 + COLD_DELAY_MS + 3 * POLL_MS)
    assert (member.role, member.term) == (Role.LEADER, 4)


def test_a_standby_counts_as_a_member_until_etcd_says_that_it_is_none() -> None:
    """While nobody knows whether a change of the set happened, the old and the new one both have to acknowledge."""
    one, etcd = election("a"), Etcd()
    drive(one, etcd, start_ms=0, end_ms=500)
    one.members_wanted = frozenset({"b"})
    drive(one, etcd, start_ms=500, end_ms=600)
    assert etcd.members == Members(term=1, names=["a", "b"])
    one.members_wanted = frozenset()
    now = 600
    while not isinstance(op := one.next(now, ticked_ms=now), Record):
        now = op if isinstance(op, int) else now
        if not isinstance(op, int):
            one.done(op, etcd.run(op, now), sent_ms=now, now_ms=now)
    one.done(op, SILENCE, sent_ms=now, now_ms=now)

    assert one.members == {"b"}
    drive(one, etcd, start_ms=now, end_ms=now + 500)
    assert one.members == frozenset()
    assert etcd.members == Members(term=1, names=["a"])


def test_a_term_that_a_store_has_seen_is_outdone() -> None:
    """After etcd was made anew, generations still go above every earlier one."""
    one, etcd = election("a", term_min=7), Etcd()
    drive(one, etcd, start_ms=0, end_ms=COLD_DELAY_MS + 500)
    assert one.term == 8
    one.term_wanted = 20
    drive(one, etcd, start_ms=COLD_DELAY_MS + 500, end_ms=COLD_DELAY_MS + 600)

    assert (one.term, etcd.term, etcd.leader) == (21, 21, one.claim)


def test_an_etcd_that_lost_everything_is_given_to_whoever_has_followed() -> None:
    """Nobody is in an in-sync set any more: a master that knows terms but nothing else waits for one that followed."""
    cold, hot, etcd = election("a", term_min=7), election("b", term_min=7), Etcd()
    for now in range(0, 1_000, STEP_MS):
        hot.hot = True
        for one in (cold, hot):
            op = one.next(now, ticked_ms=now)
            if not isinstance(op, int):
                one.done(op, etcd.run(op, now), sent_ms=now, now_ms=now)

    assert (cold.role, hot.role) == (Role.STANDBY, Role.LEADER)


def test_whoever_is_not_in_the_set_leads_only_when_promoted() -> None:
    """The set's only member is gone: an operator's word lets another one be the set, once, and it leads."""
    one, etcd = election("b"), Etcd(members=Members(term=3, names=["a"]), term=3, members_revision=1)
    drive(one, etcd, start_ms=0, end_ms=10_000)
    assert one.role is Role.STANDBY
    one.promote()
    drive(one, etcd, start_ms=10_000, end_ms=10_000 + COLD_DELAY_MS + 500)

    assert (one.role, one.term) == (Role.LEADER, 4)
    assert etcd.members == Members(term=4, names=["b"])


def test_a_leader_whose_key_was_deleted_steps_down() -> None:
    """Its lease lives on, but somebody else can lead from then on: it must not answer for long."""
    one, etcd = election("a"), Etcd()
    drive(one, etcd, start_ms=0, end_ms=500)
    assert one.leads(500)
    etcd.leader, etcd.leader_lease = Claim(name="b", term=2, address="b:1", control=""), 999
    etcd.leases[999] = 1 << 40
    drive(one, etcd, start_ms=500, end_ms=500 + LEADER_POLL_MS + 100)

    assert one.role is Role.STANDBY


@pytest.mark.parametrize("left", [None, Members(term=1, names=["b"])], ids=["deleted", "another"])
def test_a_leader_writes_a_damaged_set_anew(left: Members | None) -> None:
    """Whoever meddled with the in-sync set: the leader knows who is in it."""
    one, etcd = election("a"), Etcd()
    drive(one, etcd, start_ms=0, end_ms=500)
    etcd.members, etcd.members_revision = left, 0 if left is None else 77
    drive(one, etcd, start_ms=500, end_ms=500 + LEADER_POLL_MS + 200)

    assert one.role is Role.LEADER
    assert etcd.members == Members(term=1, names=["a"])


def test_nobody_is_promoted_beside_a_leader() -> None:
    """etcd itself refuses when somebody has begun to lead meanwhile."""
    first, second, etcd = election("a"), election("b"), Etcd()
    drive(first, etcd, start_ms=0, end_ms=500)
    second.promote()
    drive(second, etcd, start_ms=500, end_ms=1_000)

    assert etcd.members == Members(term=1, names=["a"])
    assert second.role is Role.STANDBY


@pytest.mark.parametrize("seed", range(25))
def test_there_is_never_more_than_one_that_may_answer(seed: int) -> None:
    """Whatever etcd's answers do, and whoever hangs: one leader at a time, terms rise, and in the end one leads."""
    rng = Random(seed)
    etcd, names = Etcd(), ("a", "b", "c")
    masters = {name: election(name) for name in names}
    under_way: dict[str, tuple[Op, int, int, object]] = {}
    paused = dict.fromkeys(names, 0)
    terms: dict[int, str] = {}
    now = 0
    troubled_ms = 60_000
    while now < troubled_ms + 15_000:
        now += STEP_MS
        trouble = now < troubled_ms
        etcd.expire(now)
        for name in rng.sample(names, len(names)):
            one = masters[name]
            if trouble and rng.random() < 0.002:
                paused[name] = now + rng.choice((200, 1_500, 6_000))
            if now < paused[name]:
                continue
            if trouble and rng.random() < 0.001:
                one.resign()
            if trouble and rng.random() < 0.0005:  # it dies and starts again, knowing what its disk says
                masters[name] = one = election(name, term_min=one.seen.term)
                under_way.pop(name, None)
            one.hot = etcd.members is not None and name in etcd.members.names
            one.serving = one.role is Role.LEADER
            if one.role is Role.LEADER and rng.random() < 0.05:
                one.members_wanted = frozenset(rng.sample([n for n in names if n != name], rng.randrange(3)))
            if name in under_way:
                op, sent, due, result = under_way[name]
                if now >= due:
                    del under_way[name]
                    one.done(op, result, sent_ms=sent, now_ms=now)
            else:
                op_or_time = one.next(now, ticked_ms=now - (rng.random() < 0.02) * 900)
                if not isinstance(op_or_time, int):
                    lost = trouble and rng.random() < 0.1
                    result = SILENCE if lost and rng.random() < 0.5 else etcd.run(op_or_time, now)
                    late = rng.choice((10, 10, 30, 300)) if trouble else 10
                    under_way[name] = (op_or_time, now, now + late, SILENCE if lost else result)
        leading = [name for name, one in masters.items() if one.leads(now)]
        assert len(leading) <= 1
        for name in leading:
            assert terms.setdefault(masters[name].term, name) == name, "a term belongs to one"
            assert masters[name].term == max(terms), "terms rise"

    assert len([name for name, one in masters.items() if one.leads(now)]) == 1
