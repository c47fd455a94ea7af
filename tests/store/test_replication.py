"""What may be answered, given what standbys have acknowledged."""

from __future__ import annotations

import numpy as np
import pytest

from kvops.errors import WireError
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.election import Campaign, Claim, Election, Grant, Look, Record, Role, Seen
from kvops.store.model import LOCATION, Generation
from kvops.store.replication import (
    ACK,
    ENTRY,
    LAG_MS_MAX,
    LAST_LAG_MS_MAX,
    LOOK_MS_MAX,
    OUT_MS_FIRST,
    OUT_MS_MAX,
    SILENT_MS_MAX,
    STEADY_MS,
    Replication,
    unpack_ack,
    unpack_entries,
)


def leader() -> Replication:
    """A leader with one standby, ``b``, that has caught up and is in the set."""
    one = Replication()
    one.joined(7, "b", now_ms=0)
    one.acked(7, 0, caught_up=True, now_ms=0)
    one.members(frozenset({"b"}))
    return one


CLAIM = Claim(name="a", term=0, address="127.0.0.1:1", control="127.0.0.1:2")


def lead(one: Election) -> None:
    """It is elected, in a new group."""
    while one.role is not Role.LEADER:
        op = one.next(0, ticked_ms=0)
        assert not isinstance(op, int)
        one.done(op, {Look: Seen(), Grant: 5, Campaign: True}[type(op)], sent_ms=0, now_ms=0)


def test_without_standbys_everything_is_committed_at_once() -> None:
    """A leader alone answers as a single master does."""
    one = Replication()
    one.append(now_ms=0)

    assert not one.pending


def test_an_answer_waits_for_every_member() -> None:
    """What was acknowledged is with all that could lead next."""
    one = leader()
    one.joined(8, "c", now_ms=0)
    one.acked(8, 0, caught_up=True, now_ms=0)
    sequence = one.append(now_ms=0)
    one.hold(1, b"stored")
    one.acked(7, sequence, caught_up=True, now_ms=1)

    assert one.release() == []
    one.acked(8, sequence, caught_up=True, now_ms=1)
    assert one.release() == [(1, b"stored")]


def located(*generations: int) -> bytes:
    """The answer to a lookup that names these; 0: a miss."""
    rows = np.zeros(len(generations), LOCATION)
    rows["generation"] = generations
    return m.LOOKUP_HEAD.pack(1, 1_000, 0, 0) + rows.tobytes()


def test_a_lookup_waits_for_what_standbys_do_not_know_yet() -> None:
    """A lease on an object that the next leader has never heard of would not be honoured; all others need not wait."""
    one = leader()
    first = one.append(now_ms=0, readable_from=Generation(70))
    second = one.append(now_ms=0, readable_from=Generation(50))
    one.append(now_ms=0)

    assert one.must_wait(Kind.LOOKUP, located(0, 9, 71))
    assert one.must_wait(Kind.LOOKUP, located(50))
    assert not one.must_wait(Kind.LOOKUP, located(49, 0))
    one.acked(7, first, caught_up=True, now_ms=1)
    assert one.must_wait(Kind.LOOKUP, located(60))
    one.acked(7, second, caught_up=True, now_ms=1)
    assert one.pending
    assert not one.must_wait(Kind.LOOKUP, located(71))


def test_a_standby_that_catches_up_is_not_waited_for_and_one_that_has_is() -> None:
    """Until it has the whole state nobody could elect it; from then on anybody might."""
    one = Replication()
    one.joined(7, "b", now_ms=0)
    one.append(now_ms=0)
    assert not one.pending
    assert one.wanted == frozenset()

    one.acked(7, 1, caught_up=True, now_ms=1)
    assert one.wanted == {"b"}
    one.append(now_ms=2)
    assert one.pending


def test_a_member_that_is_gone_holds_answers_back_until_etcd_has_it_out() -> None:
    """It may lead next: only when it cannot is something acknowledged without it."""
    one = leader()
    one.left(7)
    one.append(now_ms=0)
    one.hold(1, b"stored")

    assert one.wanted == frozenset()
    assert one.release() == []
    one.members(frozenset())
    assert one.release() == [(1, b"stored")]


def pair() -> Replication:
    """A leader with two standbys, ``b`` and ``c``, that are in the set."""
    one = leader()
    one.joined(8, "c", now_ms=0)
    one.acked(8, 0, caught_up=True, now_ms=0)
    one.members(frozenset({"b", "c"}))
    return one


def look(one: Replication, begin_ms: int, end_ms: int) -> list[int]:
    """Review as a master's loop does, from one time to another; the connections that the last look hangs up."""
    found: list[int] = []
    for now_ms in range(begin_ms, end_ms + 1, 20):
        found = one.review(now_ms=now_ms)
    return found


def test_a_member_that_is_silent_costs_one_short_wait() -> None:
    """A standby that hangs is out of the set well before two calls of a client can have timed out, and stays out."""
    one = pair()
    one.append(now_ms=1_000)
    one.acked(8, 1, caught_up=True, now_ms=1_000)
    one.hold(1, b"stored")

    look(one, 1_000, 1_000 + LAG_MS_MAX - 20)
    assert one.wanted == {"b", "c"}
    look(one, 1_000 + LAG_MS_MAX, 1_000 + LAG_MS_MAX)
    assert one.wanted == {"c"}
    assert one.release() == [], "etcd still lists it"
    one.members(frozenset({"c"}))
    assert one.release() == [(1, b"stored")]
    for now_ms in range(1_200, 10_000, 100):
        sequence = one.append(now_ms=now_ms)
        one.acked(8, sequence, caught_up=True, now_ms=now_ms)
        one.review(now_ms=now_ms)
        assert not one.pending
    assert one.wanted == {"c"}


def test_nothing_is_owed_by_whoever_has_everything() -> None:
    """A quiet group stays whole, however long nothing happens; then only what is new counts."""
    one = leader()
    look(one, 0, 100 * LAST_LAG_MS_MAX)
    one.append(now_ms=100 * LAST_LAG_MS_MAX)

    look(one, 100 * LAST_LAG_MS_MAX, 101 * LAST_LAG_MS_MAX - 20)
    assert one.wanted == {"b"}


def test_the_last_standby_is_given_more_time() -> None:
    """Without it nobody could lead next; but it, too, is out before a client has waited twice."""
    one = pair()
    one.append(now_ms=0)

    look(one, 0, LAST_LAG_MS_MAX - 20)
    assert len(one.wanted) == 1, "both hang: one is out already"
    look(one, LAST_LAG_MS_MAX, LAST_LAG_MS_MAX)
    assert one.wanted == frozenset()
    assert LAST_LAG_MS_MAX < 2 * 200, "two calls with a client's usual deadline open its breaker"


def test_a_standby_that_moves_and_falls_behind_lags() -> None:
    """Acknowledgements that come, but ever later, make callers wait as silence does."""
    one = pair()
    for now_ms in range(0, 4 * LAG_MS_MAX, 10):
        one.append(now_ms=now_ms)
        one.acked(7, now_ms // 40, caught_up=True, now_ms=now_ms)
        one.acked(8, one.sequence, caught_up=True, now_ms=now_ms)
        one.review(now_ms=now_ms)

    assert one.wanted == {"c"}


def test_a_standby_that_lagged_comes_back_without_a_new_connection() -> None:
    """It was late once: as soon as it has everything it is waited for again, after a pause."""
    one = pair()
    sequence = one.append(now_ms=0)
    one.acked(8, sequence, caught_up=True, now_ms=0)
    assert look(one, 0, LAG_MS_MAX) == []
    one.members(frozenset({"c"}))
    one.acked(7, sequence, caught_up=True, now_ms=LAG_MS_MAX + 20)

    look(one, LAG_MS_MAX + 20, LAG_MS_MAX + OUT_MS_FIRST - 20)
    assert one.wanted == {"c"}
    look(one, LAG_MS_MAX + OUT_MS_FIRST, LAG_MS_MAX + OUT_MS_FIRST)
    assert one.wanted == {"b", "c"}
    one.append(now_ms=LAG_MS_MAX + OUT_MS_FIRST)
    one.acked(8, one.sequence, caught_up=True, now_ms=LAG_MS_MAX + OUT_MS_FIRST)
    assert one.pending, "it is waited for before etcd has it"


def test_a_standby_that_lags_again_and_again_is_left_out_for_longer() -> None:
    """One that stops and goes costs a wait each time: there are fewer of them, until it has been steady."""
    one = pair()
    now_ms = 0

    def out_for_ms() -> int:
        """It hangs, answers, and is back; how long it was out."""
        nonlocal now_ms
        sequence = one.append(now_ms=now_ms)
        one.acked(8, sequence, caught_up=True, now_ms=now_ms)
        while "b" in one.wanted:
            one.review(now_ms=(now_ms := now_ms + 20))
        left_ms = now_ms
        one.acked(7, sequence, caught_up=True, now_ms=now_ms)
        while "b" not in one.wanted:
            one.review(now_ms=(now_ms := now_ms + 20))
        return now_ms - left_ms

    times = [out_for_ms() for _ in range(6)]
    assert times == sorted(times)
    assert times[0] < 2 * OUT_MS_FIRST
    assert OUT_MS_MAX <= times[-1] < 2 * OUT_MS_MAX
    steady_ms = now_ms + STEADY_MS
    while now_ms <= steady_ms:
        one.review(now_ms=(now_ms := now_ms + 20))
    assert out_for_ms() < 2 * OUT_MS_FIRST


def test_whoever_lacks_what_is_acknowledged_is_no_member_yet() -> None:
    """What was committed while a standby took over the state is lost with the leader if it may already be elected."""
    one = Replication()
    one.joined(7, "b", now_ms=0)
    sequence = one.append(now_ms=0)
    assert not one.pending
    one.acked(7, sequence - 1, caught_up=True, now_ms=1)

    assert one.wanted == frozenset()
    one.append(now_ms=1)
    assert one.pending, "it is waited for all the same: it will soon be one"
    one.acked(7, sequence, caught_up=True, now_ms=2)
    assert one.wanted == {"b"}


def test_a_standby_that_is_taken_out_while_etcd_hears_of_it_is_waited_for() -> None:
    """The operation that lists it may happen after all: until the next one is certain it could be elected."""
    one, election = Replication(), Election(CLAIM, ttl_s=2)
    lead(election)

    def tell() -> None:
        """As a leader does whenever the set that it wants has changed."""
        election.members_wanted = one.wanted
        one.members(election.members_possible)

    one.joined(7, "b", now_ms=0)
    one.acked(7, 0, caught_up=True, now_ms=0)
    tell()
    listing = election.next(10, ticked_ms=10)
    assert isinstance(listing, Record)
    one.append(now_ms=10)
    one.hold(1, b"stored")
    look(one, 10, 10 + LAST_LAG_MS_MAX)
    assert one.wanted == frozenset()
    tell()

    assert one.release() == []
    election.done(listing, True, sent_ms=10, now_ms=400)
    one.members(election.members_possible)
    assert one.release() == []
    again = election.next(400, ticked_ms=400)
    assert isinstance(again, Record)
    election.done(again, True, sent_ms=400, now_ms=410)
    one.members(election.members_possible)
    assert one.release() == [(1, b"stored")]


def test_a_standby_does_not_lag_while_its_leader_stood_still() -> None:
    """A machine that stalls stops both: to drop the standbys then would leave nobody to lead next."""
    one = leader()
    one.append(now_ms=0)

    one.review(now_ms=10 * LAST_LAG_MS_MAX)
    assert one.wanted == {"b"}
    assert LOOK_MS_MAX < LAG_MS_MAX
    look(one, 10 * LAST_LAG_MS_MAX, 12 * LAST_LAG_MS_MAX)
    assert one.wanted == frozenset()


def test_a_connection_that_stays_silent_is_hung_up() -> None:
    """Its machine may be gone without a word; whoever only follows slowly keeps its connection."""
    one = pair()
    for now_ms in range(0, SILENT_MS_MAX, 20):
        one.append(now_ms=now_ms)
        one.acked(8, now_ms // 40, caught_up=True, now_ms=now_ms)
        assert one.review(now_ms=now_ms) == []

    assert one.review(now_ms=SILENT_MS_MAX) == [7]


def test_a_standby_that_comes_again_replaces_its_former_connection() -> None:
    """What the former one acknowledged says nothing about a state that is taken over anew."""
    one = leader()
    one.append(now_ms=0)
    assert one.joined(9, "b", now_ms=1) == 7
    one.left(7)

    assert one.pending
    one.acked(9, 1, caught_up=True, now_ms=2)
    assert not one.pending


@pytest.mark.parametrize("cut", range(1, 2 * (ENTRY.size + 5)))
def test_operations_that_are_cut_short_are_refused(cut: int) -> None:
    """At whatever byte a frame ends, what is whole is given; the rest is an error that a peer can be told."""
    whole = b"".join(ENTRY.pack(number, 1, 0, 1, 5) + b"abcde" for number in (1, 2))
    count, rest = divmod(cut, ENTRY.size + 5)
    entries = unpack_entries(whole[:cut])

    assert [next(entries) for _ in range(count)] == [(number + 1, 1, b"abcde") for number in range(count)]
    with pytest.raises(WireError, match="cut short") if rest else pytest.raises(StopIteration):
        next(entries)


@pytest.mark.parametrize("size", [0, ACK.size - 1, ACK.size + 1])
def test_an_acknowledgement_of_another_size_is_refused(size: int) -> None:
    """It is a version or a bug of somebody else's, not ours."""
    with pytest.raises(WireError, match="acknowledgement"):
        unpack_ack(bytes(size))
