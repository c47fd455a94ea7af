"""The group's memory of events."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ParseError
from kvops.store.events import EVENTS_UNREAD_MAX, EventLog, canonical_time, utc_text

MS_2100 = 4_102_444_800_000


def record(log: EventLog, event: str, time_ms: int = 0) -> None:
    log.record(event, subject="store-0", actor="master", time_ms=time_ms)


@given(st.lists(st.integers(0, MS_2100), min_size=2, max_size=2))
def test_times_sort_as_texts(times: list[int]) -> None:
    """Comparing two times as texts gives what comparing the times gives."""
    first, second = times

    assert (utc_text(first) < utc_text(second)) == (first < second)


@given(st.integers(0, MS_2100))
def test_a_written_time_is_read_back(time_ms: int) -> None:
    """What we print can be given to ``--since``."""
    assert canonical_time(utc_text(time_ms)) == utc_text(time_ms)


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2031-05-04T03:10:00Z", "2031-05-04T03:10:00.000Z"),
        ("2031-05-04T05:10:00.5+02:00", "2031-05-04T03:10:00.500Z"),
        ("2031-05-04T03:10", "2031-05-04T03:10:00.000Z"),
        ("2031-05-04", "2031-05-04T00:00:00.000Z"),
    ],
)
def test_times_of_other_zones(text: str, utc: str) -> None:
    """A time of any zone is understood; one without a zone is UTC."""
    assert canonical_time(text) == utc


@given(st.text())
def test_what_is_no_time_is_refused(text: str) -> None:
    """Any text is a time or one clear error."""
    try:
        canonical_time(text)
    except ParseError:
        pass


def test_only_the_last_are_held() -> None:
    """Memory is bounded: old events go first."""
    log = EventLog(held_max=2)
    for name in ("a.came", "b.came", "c.came"):
        record(log, name)

    assert [event.event for event in log.events()] == ["b.came", "c.came"]


def test_since_includes_its_own_moment() -> None:
    """``since`` gives events at or after it."""
    log = EventLog()
    for time_ms in (999, 1000, 1001):
        record(log, f"at.{time_ms}", time_ms)

    assert [event.event for event in log.events("1970-01-01T00:00:01Z")] == ["at.1000", "at.1001"]


def test_a_slow_follower_is_told_what_it_missed() -> None:
    """A follower gets what fits, in order, then how many it missed, then what comes after."""

    async def follow() -> list[str]:
        log = EventLog()
        follower = log.subscribe()
        for index in range(EVENTS_UNREAD_MAX + 3):
            record(log, f"event.{index}")
        names = []
        async for event in follower:
            names.append(event.event)
            if event.event == "events.missed":
                assert event.detail == {"count": 3}
                record(log, "event.after")
            if event.event == "event.after":
                follower.close()
                record(log, "event.unseen")
                return names
        raise AssertionError("a follower never ends by itself")

    names = asyncio.run(follow())

    assert names == [f"event.{index}" for index in range(EVENTS_UNREAD_MAX)] + [
        "events.missed",
        "event.after",
    ]
