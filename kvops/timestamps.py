"""Times as everything here writes them: RFC 3339, always UTC with its Z, so that texts sort as times do."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(at: datetime) -> str:
    """A time in UTC, to the millisecond."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc_now() -> str:
    """Now, to the millisecond."""
    return rfc3339(datetime.now(UTC))
