"""The changes of a group worth a line in ``kvops events``: the last ones, and whoever follows new ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Self

from kvops.errors import ParseError
from kvops.store.model import Event
from kvops.timestamps import rfc3339

EVENTS_HELD_MAX: Final = 4_096
EVENTS_UNREAD_MAX: Final = 1_024  # of one follower; beyond, it is told how many it missed


def utc_text(time_ms: int) -> str:
    """Wall-clock ms since 1970 as RFC 3339."""
    return rfc3339(datetime.fromtimestamp(time_ms / 1000, UTC))


def canonical_time(text: str) -> str:
    """
    Any RFC 3339 time, of any zone (UTC when it names none), in the form that ``utc_text`` gives.

    Raises:
        ParseError: The text is no such time.
    """
    try:
        at = datetime.fromisoformat(text)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ParseError(f"not a time: {text!r}", fix="write it like 2031-05-04T03:10:00Z") from None
    return rfc3339(at)


class EventFollower:
    """New events, once each and in order. A reader that is too slow misses the newest, and is told so."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._unread: deque[Event] = deque()
        self._missed = 0
        self._arrived = asyncio.Event()

    def offer(self, event: Event) -> None:
        """Hand over an event; never waits. For the log alone."""
        if len(self._unread) < EVENTS_UNREAD_MAX:
            self._unread.append(event)
        else:
            self._missed += 1
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._unread:
            if self._missed:
                missed, self._missed = self._missed, 0
                now_ms = int(datetime.now(UTC).timestamp() * 1000)
                return Event(
                    time=utc_text(now_ms),
                    event="events.missed",
                    subject="events",
                    actor="master",
                    detail={"count": missed},
                )
            self._arrived.clear()
            await self._arrived.wait()
        return self._unread.popleft()

    def close(self) -> None:
        """Follow no longer."""
        self._log.drop(self)


class EventLog:
    """A bounded memory of events. For one event loop; it never waits."""

    def __init__(self, held_max: int = EVENTS_HELD_MAX) -> None:
        self._held: deque[Event] = deque(maxlen=held_max)
        self._followers: list[EventFollower] = []

    def record(
        self,
        event: str,
        *,
        subject: str,
        actor: str,
        time_ms: int,
        detail: Mapping[str, str | int | float | bool] = {},
    ) -> Event:
        """
        Remember a change and tell every follower.

        Args:
            event: Constant ``noun.past_verb``.
            subject: What changed, such as ``store-2``.
            actor: Who changed it: ``master``, or who gave the command.
            time_ms: Wall clock, in ms since 1970.
            detail: What varies.
        """
        entry = Event(time=utc_text(time_ms), event=event, subject=subject, actor=actor, detail=dict(detail))
        self._held.append(entry)
        for follower in self._followers:
            follower.offer(entry)
        return entry

    def events(self, since: str | None = None) -> list[Event]:
        """
        The events held, oldest first, from a time on (RFC 3339; None: all).

        Raises:
            ParseError: ``since`` is no time.
        """
        if since is None:
            return list(self._held)
        start = canonical_time(since)
        return [event for event in self._held if event.time >= start]

    def subscribe(self) -> EventFollower:
        """Every event from now on; ``events()`` in the same step of the loop has all those before."""
        follower = EventFollower(self)
        self._followers.append(follower)
        return follower

    def drop(self, follower: EventFollower) -> None:
        """Tell this follower nothing more."""
        if follower in self._followers:
            self._followers.remove(follower)
