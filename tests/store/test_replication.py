"""What may be answered, given what standbys have acknowledged."""

from __future__ import annotations

import numpy as np
import pytest

from kvops.errors import WireError
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.awake import TICK_MS, AwakeClock
from kvops.store.model import LOCATION, Generation
from kvops.store.replication import ACK, ENTRY, LAG_MS_MAX, Replication, unpack_ack, unpack_entries


def leader() -> Replication:
    """A leader with one standby, ``b``, that has caught up and is in the set."""
    one = Replication()
    one.joined(7, "b", now_ms=0)
    one.acked(7, 0, caught_up=True, now_ms=0)
    one.members(frozenset({"b"}))
    return one


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


def test_a_member_that_is_silent_is_named_and_one_that_has_nothing_to_say_is_not() -> None:
    """Only an acknowledgement that is owed counts, and only from when it was."""
    one = leader()
    assert one.laggards(now_ms=100 * LAG_MS_MAX) == []
    one.append(now_ms=100 * LAG_MS_MAX)

    assert one.laggards(now_ms=101 * LAG_MS_MAX - 1) == []
    assert one.laggards(now_ms=101 * LAG_MS_MAX) == [7]


def test_a_standby_does_not_lag_while_its_leader_stood_still() -> None:
    """A machine that stalls stops both: to drop the standbys then would leave nobody to lead next."""
    clock = AwakeClock(now_ms=0)
    one = Replication(awake=clock.read)
    one.joined(7, "b", now_ms=0)
    one.acked(7, 0, caught_up=True, now_ms=0)
    one.append(now_ms=0)

    stalled = 10 * LAG_MS_MAX
    assert one.laggards(now_ms=stalled) == []
    clock.tick(stalled)
    assert one.laggards(now_ms=stalled) == []
    for now in range(stalled, stalled + 2 * LAG_MS_MAX, TICK_MS):
        clock.tick(now)
    assert one.laggards(now_ms=stalled + 2 * LAG_MS_MAX) == [7]


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
