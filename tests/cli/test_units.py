"""Values with units: what is read, and that anything else is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.cli.units import (
    human_age,
    parse_duration_ms,
    parse_rate_bps,
    parse_since,
    parse_size_bytes,
    split_list,
)
from kvops.errors import ParseError

NOW = datetime(2031, 5, 4, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("500ms", 500),
        ("10s", 10_000),
        ("2h", 7_200_000),
        ("1h30m", 5_400_000),
        ("0s", 0),
        ("1.5s", 1500),
        ("1d", 86_400_000),
    ],
)
def test_duration(text: str, ms: int) -> None:
    """Durations as people write them."""
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 1 << 29),
        ("1GiB", 1 << 30),
        ("1GB", 10**9),
        ("64 KiB", 65_536),
        ("1.5GiB", 3 << 29),
        ("7B", 7),
    ],
)
def test_size(text: str, size: int) -> None:
    """Binary and decimal sizes are told apart by their unit."""
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "rate"), [("40Gbit/s", 40 * 10**9), ("5GB/s", 40 * 10**9), ("100Mbit/s", 10**8)]
)
def test_rate(text: str, rate: int) -> None:
    """Bits and bytes are told apart by their unit."""
    assert parse_rate_bps(text) == rate


@pytest.mark.parametrize(
    "text", ["", "10", "s", "-1s", "1e3s", "10 s", "10s ", "1s2", "٣s", "99999999d", "0.0001s"]
)
def test_bad_duration(text: str) -> None:
    """A duration without a unit, or with anything else, is refused with an example."""
    with pytest.raises(ParseError) as caught:
        parse_duration_ms(text)

    assert "500ms" in caught.value.fix


@pytest.mark.parametrize("text", ["", "1", "GiB", "-1GiB", "1gib", "1.5B", "1GiB2", "1 000MiB", "9999999PiB"])
def test_bad_size(text: str) -> None:
    """A size without a unit, or that is no whole number of bytes, is refused."""
    with pytest.raises(ParseError):
        parse_size_bytes(text)


@given(st.text(max_size=30))
def test_any_text(text: str) -> None:
    """Whatever is written, it has a value that makes sense or is refused."""
    for parse in (parse_duration_ms, parse_size_bytes, parse_rate_bps):
        try:
            assert parse(text) >= 0
        except ParseError:
            pass
    try:
        assert all(split_list([text]))
    except ParseError:
        pass
    try:
        assert parse_since(text, now=NOW).tzinfo is not None
    except ParseError:
        pass


@given(st.integers(0, 1 << 40))
def test_size_round_trip(size: int) -> None:
    """Every number of bytes can be written."""
    assert parse_size_bytes(f"{size}B") == size


@pytest.mark.parametrize(
    ("texts", "items"),
    [
        (["a,b", "c", "a"], ["a", "b", "c"]),
        (["gpu-[001-003]"], ["gpu-001", "gpu-002", "gpu-003"]),
        (["gpu-[9-11,20]"], ["gpu-9", "gpu-10", "gpu-11", "gpu-20"]),
        (["r[1-2]n[1-2],x"], ["r1n1", "r1n2", "r2n1", "r2n2", "x"]),
        ([""], []),
    ],
)
def test_list(texts: list[str], items: list[str]) -> None:
    """Repeated options, commas and ranges give one list, in order, each item once."""
    assert split_list(texts) == items


@pytest.mark.parametrize("text", ["a[1-2", "a]1[", "a[]", "a[2-1]", "a[x]", "a[1-99999]", "[1-200][1-200]"])
def test_bad_list(text: str) -> None:
    """Brackets that do not match, backward and endless ranges are refused."""
    with pytest.raises(ParseError):
        split_list([text])


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("30m", datetime(2031, 5, 4, 11, 30, tzinfo=UTC)),
        ("03:10", datetime(2031, 5, 4, 3, 10, tzinfo=UTC)),
        ("23:10", datetime(2031, 5, 3, 23, 10, tzinfo=UTC)),
        ("2031-05-04T03:10:00+02:00", datetime(2031, 5, 4, 1, 10, tzinfo=UTC)),
        ("2031-05-04", datetime(2031, 5, 4, tzinfo=UTC)),
    ],
)
def test_since(text: str, at: datetime) -> None:
    """A time ago, the last such time of day, or a full time; all in UTC."""
    assert parse_since(text, now=NOW) == at


@pytest.mark.parametrize(
    ("age", "text"), [(3, "3 s"), (119, "119 s"), (720, "12 min"), (10_800, "3 h"), (864_000, "10 d")]
)
def test_age(age: float, text: str) -> None:
    """An age has one unit."""
    assert human_age(age) == text
