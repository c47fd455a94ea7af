"""Frames: their bytes are pinned for ever, and whatever is not one of ours is refused."""

from __future__ import annotations

import struct
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import WireError
from kvops.net import wire
from kvops.net.wire import Frame, Kind

GOLDEN = bytes.fromhex("4b564f5001001200040000000700000009000000000000000000000094c0c520")


def header(**changed: int | bytes) -> bytes:
    """A header whose checksum fits, whatever it says."""
    fields = {"magic": b"KVOP", "version": 1, "kind": 18, "body": 4, "request": 7, "payload": 9, "flags": 0}
    head = struct.pack("<4sHHIIQI", *(fields | changed).values())
    return head + struct.pack("<I", crc32(head))


def test_golden_header() -> None:
    """A header's 32 bytes are what they always were."""
    assert wire.pack_header(Kind.LOOKUP, 4, 7, 9) == GOLDEN == header()
    assert wire.pack(Kind.LOOKUP, b"body", 7, 9) == GOLDEN + b"body"
    assert wire.unpack_header(GOLDEN) == Frame(18, 4, 7, 9, 0)


@given(
    st.integers(0, 0xFFFF),
    st.integers(0, wire.BODY_BYTES_MAX),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, wire.PAYLOAD_BYTES_MAX),
)
def test_headers_round_trip(kind: int, body: int, request: int, payload: int) -> None:
    """What is packed is unpacked."""
    packed = wire.pack_header(kind, body, request, payload)

    assert wire.unpack_header(packed) == Frame(kind, body, request, payload, 0)


@pytest.mark.parametrize("bit", range(8 * wire.HEADER_BYTES))
def test_flipped_bit_is_refused(bit: int) -> None:
    """One flipped bit anywhere in a header is found."""
    data = bytearray(GOLDEN)
    data[bit // 8] ^= 1 << bit % 8

    with pytest.raises(WireError):
        wire.unpack_header(data)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"magic": b"HTTP"}, "not a kvops frame"),
        ({"version": 0}, "version 0"),
        ({"version": 2}, "version 2"),
        ({"flags": 0x8000}, "must-understand"),
        ({"body": wire.BODY_BYTES_MAX + 1}, "at most"),
        ({"payload": wire.PAYLOAD_BYTES_MAX + 1}, "at most"),
    ],
)
def test_refused_headers(changed: dict[str, int | bytes], says: str) -> None:
    """A header that is whole, but not for us, is refused and says why."""
    with pytest.raises(WireError, match=says):
        wire.unpack_header(header(**changed))


def test_unknown_flags_that_may_be_ignored() -> None:
    """Flags in the upper half are for those who know them."""
    assert wire.unpack_header(header(flags=0x8000_0000)).flags == 0x8000_0000


def test_replies_have_no_request_of_their_own() -> None:
    """A request's kind is even and its answer's, one more, is nobody's request."""
    requests = [kind for kind in Kind if kind > Kind.ERROR]

    assert all(kind % 2 == 0 for kind in requests)
    assert not {wire.reply(kind) for kind in requests} & set(Kind)
