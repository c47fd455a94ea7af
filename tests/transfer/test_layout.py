"""An object's header, trailer and verification."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvops.errors import ParseError
from kvops.limits import CHUNK_BYTES, OBJECT_BYTES_MAX
from kvops.transfer import layout
from kvops.transfer.layout import Mismatch, ObjectHeader

KEY = bytes(range(16))
CHUNK = 64
u64 = st.integers(0, 2**64 - 1)


def sealed(payload: bytes, *, generation: int = 7, chunk: int = CHUNK) -> tuple[ObjectHeader, bytes]:
    trailer = layout.chunk_digests(memoryview(payload), chunk)
    digest = layout.trailer_digest(trailer, generation)
    return ObjectHeader(3, generation, KEY, len(payload), chunk, digest), trailer


def verify(data: bytes, header: ObjectHeader, **change: int | bytes) -> ObjectHeader | Mismatch:
    told = {
        "incarnation": header.incarnation,
        "generation": header.generation,
        "key_digest": header.key_digest,
        "size": header.size,
    }
    return layout.verify_header(data, **(told | change))  # type: ignore[arg-type]


def test_golden_header() -> None:
    """The 64 bytes of a header are pinned: a segment outlives the version that wrote it."""
    header = ObjectHeader(0x1122334455667788, 0x0000010000000002, KEY, 1 << 20, 131072, 0xA1A2A3A4A5A6A7A8)

    data = header.pack()

    assert data.hex() == (
        "4b564f42" "0100" "0000" "8877665544332211" "0200000000010000" "000102030405060708090a0b0c0d0e0f"
        "0000100000000000" "00000200" "00000000" "a8a7a6a5a4a3a2a1"
    )  # fmt: skip
    assert ObjectHeader.unpack(data) == header


def test_golden_trailer() -> None:
    """The digests of known chunks, and what the header says of them, are pinned."""
    trailer = layout.chunk_digests(memoryview(bytes(range(100))), 64)

    assert trailer.hex() == "6187eb9089b0ed5513c7909b5af18164"
    assert layout.trailer_digest(trailer, (1 << 40) + 2) == 0x9673FCEAA50673D


@given(
    u64, u64, st.binary(min_size=16, max_size=16), st.integers(0, OBJECT_BYTES_MAX), st.integers(6, 20), u64
)
def test_header_round_trip(
    incarnation: int, generation: int, key: bytes, size: int, bits: int, digest: int
) -> None:
    """What was packed is what is read, and what a reader that was told the truth accepts."""
    header = ObjectHeader(incarnation, generation, key, size, 1 << bits, digest)

    assert ObjectHeader.unpack(header.pack()) == header
    assert verify(header.pack(), header) == header
    assert verify(memoryview(header.pack()), header) == header  # type: ignore[arg-type]


@given(st.integers(0, 64 * 8 - 1), st.binary(min_size=1, max_size=300))
def test_any_flipped_bit_of_a_header_is_found(bit: int, payload: bytes) -> None:
    """No single flipped bit of a header survives the reader's steps: header, trailer, chunks."""
    header, trailer = sealed(payload)
    data = bytearray(header.pack())
    data[bit // 8] ^= 1 << bit % 8

    found = verify(bytes(data), header)

    assert (
        isinstance(found, Mismatch)
        or not layout.verify_trailer(found, trailer)
        or (
            # A chunk size with one bit flipped that still gives as many digests fails at the chunks.
            layout.verify_chunks(memoryview(payload), trailer, chunk=found.chunk) >= 0
        )
    )


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"incarnation": 4}, Mismatch.FOREIGN),
        ({"generation": 8}, Mismatch.STALE),
        ({"generation": 6}, Mismatch.STALE),
        ({"key_digest": bytes(16)}, Mismatch.OTHER_KEY),
        ({"size": 99}, Mismatch.OTHER_SIZE),
        ({"incarnation": 4, "generation": 8, "size": 99}, Mismatch.FOREIGN),
    ],
)
def test_mismatch_says_what_differs(told: dict[str, int | bytes], expected: Mismatch) -> None:
    """A reader learns whether the store restarted, the memory was reused, or two keys collide."""
    header, _ = sealed(bytes(100))

    assert verify(header.pack(), header, **told) is expected


@pytest.mark.parametrize(
    ("at", "data", "expected"),
    [
        (0, layout.MAGIC_CLEARED, Mismatch.CLEARED),
        (0, b"junk", Mismatch.DAMAGED),
        (4, b"\x02\x00", Mismatch.LAYOUT_UNKNOWN),
        (6, b"\x01\x00", Mismatch.LAYOUT_UNKNOWN),
        (48, b"\x00\x00\x00\x00", Mismatch.DAMAGED),
        (48, b"\x41\x00\x00\x00", Mismatch.DAMAGED),
        (52, b"\x01\x00\x00\x00", Mismatch.DAMAGED),
    ],
    ids=["cleared", "junk", "newer", "flags", "chunk-0", "chunk-65", "reserved"],
)
def test_foreign_bytes_are_no_header(at: int, data: bytes, expected: Mismatch) -> None:
    """A freed slot, junk and a newer layout are told apart, and none of them is read as an object."""
    header, _ = sealed(bytes(100))
    raw = bytearray(header.pack())
    raw[at : at + len(data)] = data

    assert verify(bytes(raw), header) is expected
    with pytest.raises(ParseError):
        ObjectHeader.unpack(raw)


@given(st.binary(max_size=80))
@example(b"")
@example(layout.MAGIC + bytes(60))
def test_unpack_returns_or_raises_parse_error(data: bytes) -> None:
    """Whatever the bytes, reading a header ends in a value or a ParseError."""
    try:
        header = ObjectHeader.unpack(data)
    except ParseError:
        return
    assert header.pack() == data[:64]


@given(st.integers(0, OBJECT_BYTES_MAX), st.sampled_from([64, 4096, CHUNK_BYTES]))
@example(0, 64)
@example(1, 64)
@example(64, 64)
@example(OBJECT_BYTES_MAX, CHUNK_BYTES)
def test_footprint(size: int, chunk: int) -> None:
    """An allocation holds header, payload and trailer, is a multiple of 64 and wastes less than 64 bytes."""
    need = layout.HEADER_BYTES + size + layout.trailer_bytes(size, chunk)

    footprint = layout.footprint_bytes(size, chunk)

    assert footprint % 64 == 0
    assert need <= footprint < need + 64
    assert (
        (layout.chunk_count(size, chunk) - 1) * chunk
        < max(size, 1)
        <= max(layout.chunk_count(size, chunk), 1) * chunk
    )


payloads = st.binary(min_size=1, max_size=400)


@given(payloads, st.data())
def test_a_changed_byte_is_found_in_its_chunk(payload: bytes, data: st.DataObject) -> None:
    """One changed byte names the chunk it lies in; an unchanged payload verifies."""
    header, trailer = sealed(payload)
    at = data.draw(st.integers(0, len(payload) - 1))
    bad = bytearray(payload)
    bad[at] ^= data.draw(st.integers(1, 255))

    assert layout.verify_trailer(header, trailer)
    assert layout.verify_chunks(memoryview(payload), trailer, chunk=CHUNK) == -1
    assert layout.verify_chunks(memoryview(bad), trailer, chunk=CHUNK) == at // CHUNK


@given(payloads, st.data())
def test_any_range_can_be_verified(payload: bytes, data: st.DataObject) -> None:
    """A range is read as whole chunks; a changed byte is found in its chunk of the object."""
    _, trailer = sealed(payload)
    offset = data.draw(st.integers(0, len(payload)))
    length = data.draw(st.integers(0, len(payload) - offset))

    start, end = layout.chunk_span(offset, length, size=len(payload), chunk=CHUNK)
    span = memoryview(payload)[start:end]

    assert start <= offset <= offset + length <= end
    assert start % CHUNK == 0
    assert end - start < length + 2 * CHUNK
    assert layout.verify_chunks(span, trailer, chunk=CHUNK, first_chunk=start // CHUNK) == -1
    if span:
        bad = bytearray(span)
        bad[-1] ^= 1
        found = layout.verify_chunks(memoryview(bad), trailer, chunk=CHUNK, first_chunk=start // CHUNK)
        assert found == (end - 1) // CHUNK


@given(payloads, st.data())
def test_a_verified_copy_is_the_copy(payload: bytes, data: st.DataObject) -> None:
    """A copy out of shared memory equals its source and is judged as the source would be."""
    _, trailer = sealed(payload)
    source = bytearray(payload)
    at = data.draw(st.integers(-1, len(payload) - 1))
    if at >= 0:
        source[at] ^= 0x55
    target = bytearray(len(payload))

    found = layout.copy_verified(memoryview(target), memoryview(source), trailer, chunk=CHUNK)

    assert target == source
    assert found == (at // CHUNK if at >= 0 else -1)


def test_parts_join_to_the_whole_trailer() -> None:
    """Ranks that write chunk-aligned parts produce the trailer one writer would have produced."""
    payload = memoryview(bytes(range(250)))

    parts = [layout.chunk_digests(payload[at : at + 128], CHUNK) for at in (0, 128)]

    assert b"".join(parts) == layout.chunk_digests(payload, CHUNK)


def test_a_trailer_is_bound_to_its_allocation_and_order() -> None:
    """A trailer does not verify for another generation, with two digests exchanged, or cut short."""
    header, trailer = sealed(bytes(range(128)))
    other = dataclasses.replace(header, generation=header.generation + 1)

    assert not layout.verify_trailer(other, trailer)
    assert not layout.verify_trailer(header, trailer[8:] + trailer[:8])
    assert not layout.verify_trailer(header, trailer[:8])
    assert not layout.verify_trailer(dataclasses.replace(header, size=64), trailer)


def test_an_empty_object_verifies() -> None:
    """An object of no bytes has a header and no trailer, and reads as a hit."""
    header, trailer = sealed(b"")

    assert trailer == b""
    assert layout.verify_trailer(header, trailer)
    assert layout.verify_chunks(memoryview(b""), trailer, chunk=CHUNK) == -1
    assert layout.footprint_bytes(0, CHUNK) == 64
