"""Durations, sizes, rates, lists and times as people write them, the unit always said."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

from kvops.errors import ParseError
from kvops.ranges import split_list

__all__ = [
    "human_age",
    "parse_duration_ms",
    "parse_rate_bps",
    "parse_since",
    "parse_size_bytes",
    "split_list",
]

DURATION_MS_MAX: Final = 10 * 365 * 86_400_000  # ten years: longer is a slip of the keyboard
SIZE_BYTES_MAX: Final = 1 << 60
RATE_BPS_MAX: Final = 10**15

_DURATION_UNITS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE_UNITS: Final = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, letter in enumerate("KMGTP", start=1)
}
_SIZE_UNITS["kB"] = 1000
_RATE_UNITS: Final = {
    f"{letter}bit/s": 1000**power for power, letter in enumerate(["", "k", "M", "G", "T"])
} | {f"{letter}B/s": 8 * 1000**power for power, letter in enumerate(["", "k", "M", "G", "T"])}
# ASCII digits only, and few enough that Decimal stays exact and quick.
_NUMBER: Final = r"[0-9]{1,18}(?:\.[0-9]{1,9})?"
_DURATION: Final = re.compile(rf"({_NUMBER})(ms|[smhd])")
_QUANTITY: Final = re.compile(rf"({_NUMBER}) ?([A-Za-z/]+)")


def parse_duration_ms(text: str) -> int:
    """
    Read ``500ms``, ``10s``, ``1h30m``; units ms, s, m, h, d.

    Raises:
        ParseError: It is not a duration, or is no whole number of milliseconds.
    """
    fix = "write a number and a unit: 500ms, 10s, 5m, 2h, 1d"
    total, end = Decimal(0), 0
    for part in _DURATION.finditer(text):
        if part.start() != end:
            break
        total += Decimal(part[1]) * _DURATION_UNITS[part[2]]
        end = part.end()
    if end == 0 or end != len(text):
        raise ParseError(f"{text!r} is not a duration", fix=fix)
    if total != int(total):
        raise ParseError(f"{text!r} is finer than a millisecond", fix=fix)
    if total > DURATION_MS_MAX:
        raise ParseError(f"{text!r} is longer than ten years", fix=fix)
    return int(total)


def _quantity(text: str, units: dict[str, int], *, what: str, limit: int, fix: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        missing = " (its unit is missing)" if re.fullmatch(_NUMBER, text) else ""
        raise ParseError(f"{text!r} is not a {what}{missing}", fix=fix)
    value = Decimal(match[1]) * units[match[2]]
    if value != int(value) or value > limit:
        raise ParseError(f"{text!r} is not a whole {what}, or too large", fix=fix)
    return int(value)


def parse_size_bytes(text: str) -> int:
    """
    Read ``512MiB``, ``1.5GiB`` (powers of 1024), ``1GB`` (powers of 1000), ``4096B``.

    Raises:
        ParseError: It is not a size, or no whole number of bytes.
    """
    fix = "write a number and a unit: 64KiB, 512MiB, 1GiB"
    return _quantity(text, _SIZE_UNITS, what="size", limit=SIZE_BYTES_MAX, fix=fix)


def parse_rate_bps(text: str) -> int:
    """
    Read ``40Gbit/s`` or ``5GB/s`` (both powers of 1000).

    Returns:
        Bits per second.

    Raises:
        ParseError: It is not a rate.
    """
    fix = "write a number and a unit: 40Gbit/s, or 5GB/s for bytes"
    return _quantity(text, _RATE_UNITS, what="rate", limit=RATE_BPS_MAX, fix=fix)


def parse_since(text: str, *, now: datetime) -> datetime:
    """
    When ``30m`` ago was, the last ``03:10`` (UTC), or an RFC 3339 time (UTC when it names no zone).

    Raises:
        ParseError: It is none of these.
    """
    if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?", text):
        try:
            hour, minute, second, *_ = [*map(int, text.split(":")), 0]
            at = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
        except ValueError:
            raise ParseError(f"{text!r} is not a time of day", fix="write 03:10, in UTC") from None
        return at if at <= now else at - timedelta(days=1)
    if _DURATION.match(text):
        return now - timedelta(milliseconds=parse_duration_ms(text))
    try:
        at = datetime.fromisoformat(text)
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ParseError(
            f"{text!r} is not a time", fix="write 30m (ago), 03:10 (UTC), or 2031-05-04T03:10:00Z"
        ) from None


def human_age(age_s: float) -> str:
    """An age for people: ``4 s``, ``12 min``, ``3 h``, ``9 d``."""
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"
