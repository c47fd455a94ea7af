"""The search for memory that was given away inside a lease finds exactly what comparing all pairs finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvops.chaos.checkers.lease_safety import lease_safety
from kvops.chaos.history import Operation
from tests.chaos.histories import get, put, record

PLACES = st.tuples(
    st.integers(0, 12),  # offset
    st.integers(1, 6),  # length
    st.integers(1, 30),  # from
    st.integers(0, 12),  # for so long
    st.integers(1, 2),  # incarnation of the store
)


def reader(number: int, place: tuple[int, ...]) -> Operation:
    offset, length, begin, lasts, incarnation = place
    return get(
        f"g{number}",
        f"read{number}",
        at=begin,
        took=1,
        node="n",
        incarnation=incarnation,
        offset=offset,
        extent_bytes=length,
        generation=number + 1,
        asked_ns=begin,
        answered_ns=begin,
        lease_from_ns=begin,
        lease_until_ns=begin + lasts + 1,
    )


def writer(number: int, place: tuple[int, ...]) -> Operation:
    offset, length, asked, took, incarnation = place
    return put(
        f"p{number}",
        f"written{number}",
        f"w:{number}",
        at=asked,
        took=took + 1,
        node="n",
        incarnation=incarnation,
        offset=offset,
        extent_bytes=length,
        generation=1_000 + number,
        asked_ns=asked,
        answered_ns=asked + took,
    )


@given(st.lists(PLACES, max_size=8), st.lists(PLACES, max_size=8))
def test_every_place_given_away_inside_a_lease_is_found(
    read: list[tuple[int, ...]], written: list[tuple[int, ...]]
) -> None:
    """Overlapping places, leases of several lengths, other incarnations: one counter-example for each put at fault."""
    readers = [reader(number, place) for number, place in enumerate(read)]
    writers = [writer(number, place) for number, place in enumerate(written)]
    at_fault = {
        new.op_id
        for new in writers
        for old in readers
        if new.incarnation == old.incarnation
        and old.offset < new.offset + new.extent_bytes
        and new.offset < old.offset + old.extent_bytes
        and old.lease_from_ns <= new.asked_ns
        and old.lease_until_ns > new.answered_ns
    }

    result = lease_safety(record(*readers, *writers))

    assert {example.rows[1] for example in result.examples} == at_fault
