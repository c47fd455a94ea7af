"""A value tells what was done to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.chaos.history import Content
from kvops.chaos.values import HEADER_BYTES, VALUE_BYTES_MIN, Version, digest, judge, make

SIZE = 4096
V1, V2 = (make("k", writer="w0", seq=seq, size_bytes=SIZE) for seq in (1, 2))
NEWEST = Version(writer="w0", seq=2)


def flip(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


@pytest.mark.parametrize(
    ("read", "content", "version"),
    [
        (V2, Content.WHOLE, "w0:2"),
        (V1, Content.STALE, "w0:1"),
        (V2[:2048] + V1[2048:], Content.TORN, "w0:2"),
        (V2[:2048] + bytes(2048), Content.TORN, "w0:2"),
        (V2[:1000], Content.TORN, "w0:2"),
        (V2[:10], Content.TORN, "None"),
        (bytes(SIZE), Content.TORN, "None"),
        (make("other", writer="w1", seq=9, size_bytes=SIZE), Content.CROSS_KEY, "w1:9"),
        (flip(V2, 3000), Content.FLIPPED, "w0:2"),
        (flip(V2, 20), Content.FLIPPED, "None"),
    ],
    ids=["whole", "stale", "two-puts", "half", "short", "stub", "zeros", "other-key", "bit", "bit-in-header"],
)
def test_each_damage_has_its_name(read: bytes, content: Content, version: str) -> None:
    """Stale, torn, foreign and flipped bytes are told apart, and the version is what the header says."""
    judged = judge("k", read, newest=lambda key: NEWEST, known=[Version(writer="w0", seq=1)])

    assert (judged.content, str(judged.version)) == (content, version)


@given(
    key=st.text(max_size=20),
    writer=st.text(alphabet="abc019-", min_size=1, max_size=16),
    seq=st.integers(0, 2**64 - 1),
    size=st.integers(VALUE_BYTES_MIN, 500),
    bit=st.integers(0, 2**20),
)
def test_no_flipped_bit_passes(key: str, writer: str, seq: int, size: int, bit: int) -> None:
    """The bytes that were put are whole; with any one bit changed they never are, wherever it lies."""
    value = make(key, writer=writer, seq=seq, size_bytes=size)
    at = bit % (8 * size)
    damaged = bytearray(value)
    damaged[at // 8] ^= 1 << at % 8

    assert judge(key, value).content is Content.WHOLE
    assert judge(key, bytes(damaged)).content in (Content.FLIPPED, Content.TORN)
    assert digest(value) != digest(bytes(damaged))


def test_bodies_of_two_puts_differ_everywhere() -> None:
    """Two puts of one key share no 8 bytes in a row: any mixture of the two is seen."""
    words = zip(*(memoryview(value)[HEADER_BYTES:].cast("Q") for value in (V1, V2)), strict=True)

    assert not any(a == b for a, b in words)
