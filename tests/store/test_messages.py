"""Bodies of frames: each packed row's bytes are pinned for ever."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from kvops.store import messages as m
from kvops.store.model import LOCATION, LOCATION_ROW
from kvops.transfer import messages as tm

PLACE = (0x0102030405060708, 0x1112131415161718, 0x21222324, 0x3132, 0x4142)
PLACE_HEX = "080706050403020118171615141312112423222132314241"

ROWS: list[tuple[np.dtype[Any], tuple[Any, ...], str]] = [
    (LOCATION, PLACE, PLACE_HEX),
    (m.EXTRA, (1, 0, PLACE), "0100000000000000" + PLACE_HEX),
    (m.PUT_ROW, ((1, 2), 3, 4, 0), "010000000000000002000000000000000300000004000000"),
    (m.END_ROW, ((1, 2), 3, 4), "0100000000000000020000000000000003000000000000000400000000000000"),
    (m.STAT_ROW, (PLACE, 1, 2, 3, 4, 5), PLACE_HEX + "01000000020003000400000005000000"),
    (m.FREE_ROW, (1, 2), "01000000000000000200000000000000"),
    (
        m.SLOT_ROW,
        ((1, 2), 3, 4, 5, 6, 7, 8, 9),
        "010000000000000002000000000000000300000000000000040000000000000005000000060000000700080009000000",
    ),
    (tm.READ_ROW, (1, 2, 3, 4), "010000000000000002000000000000000300000004000000"),
]

HEADS: list[tuple[struct.Struct, tuple[Any, ...], str]] = [
    (m.LOOKUP_HEAD, (1, 2, 3, 4), "01000000020000000300000004000000"),
    (m.PUT_HEAD, (1, 2, 3, 4, 5), "010002000300040005000000"),
    (m.PUT_REPLY_HEAD, (1, 2), "0100000002000000"),
    (m.END, (b"d" * 16, 3, 4), "64" * 16 + "03000000000000000400000000000000"),
    (m.FREE_HEAD, (1,), "0100000000000000"),
    (
        tm.WRITE_HEAD,
        (b"d" * 16, b"k" * 16, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
        "64" * 16 + "6b" * 16 + "0100000000000000020000000000000003000000040000000500000006000000"
        "0700080009000a00",
    ),
    (tm.WRITE_REPLY, (1, 2, 3), "0100020003000000"),
    (tm.READ_REPLY, (1, 2, 3), "0100020003000000"),
    (m.BEAT_REPLY, (1, 2, 3), "01000000020000000300000000000000"),
    (LOCATION_ROW, PLACE, PLACE_HEX),
]


@pytest.mark.parametrize(("dtype", "values", "golden"), ROWS)
def test_golden_rows(dtype: np.dtype[Any], values: tuple[Any, ...], golden: str) -> None:
    """A row's bytes are what they always were."""
    assert np.array([values], dtype).tobytes().hex() == golden


@pytest.mark.parametrize(("layout", "values", "golden"), HEADS)
def test_golden_heads(layout: struct.Struct, values: tuple[Any, ...], golden: str) -> None:
    """A head's bytes are what they always were."""
    assert layout.pack(*values).hex() == golden


def test_statuses_keep_their_numbers() -> None:
    """A status means the same to both sides of an upgrade."""
    assert [status.name for status in m.PutStatus] == [
        "GRANTED",
        "EXISTS",
        "IN_PROGRESS",
        "NO_SPACE",
        "REFUSED",
        "STORED",
        "GONE",
        "REVOKED",
    ]
    assert [status.name for status in m.RemoveStatus] == ["ABSENT", "REMOVED", "HIDDEN"]
    assert [status.name for status in tm.NodeStatus] == ["OK", "STALE", "REFUSED", "GONE"]
    assert [list(kind) for kind in (m.PutStatus, m.RemoveStatus, tm.NodeStatus)] == [
        list(range(8)),
        list(range(3)),
        list(range(4)),
    ]
