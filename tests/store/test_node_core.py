"""A store node's logic: what its segment holds, and who may write there."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import WireError
from kvops.limits import CHUNK_BYTES, PART_CHUNK_BYTES
from kvops.store import messages as m
from kvops.store.keys import NAMESPACE_DEFAULT, key_digest
from kvops.store.model import ObjectFlag
from kvops.store.node_core import NodeCore, Write
from kvops.transfer import messages as tm
from kvops.transfer.layout import HEADER_BYTES, ObjectHeader, verify_chunks, verify_header, verify_trailer
from kvops.transfer.messages import NodeStatus
from kvops.transfer.model import READ_SLICES_PER_FRAME_MAX
from tests.store.rig import Location, Node, write_body

SIZE = 1 << 20
DATA = bytes(range(256)) * 40
PARTS = ObjectFlag.PARTS


def node() -> Node:
    return Node("s", "h", SIZE, incarnation=7)


def place(generation: int, *, offset: int = 0, size: int = len(DATA), flags: int = 0) -> Location:
    return generation, offset, size, 1, flags


def begin(of: Node, where: Location, key: str = "a", start: int = 0, length: int = len(DATA)) -> Write:
    return of.core.write_begin(write_body(key, where, DATA, start, length), length, on_abort=lambda: None)


def status(reply: bytes) -> tuple[NodeStatus, bool]:
    code, sealed, _ = tm.WRITE_REPLY.unpack(reply)
    return NodeStatus(code), bool(sealed)


def read_row(generation: int, offset: int, start: int, length: int) -> bytes:
    return np.array([(generation, offset, start, length)], tm.READ_ROW).tobytes()


def free(of: Node, *rows: tuple[int, int], floor: int = 0) -> bytes:
    return of.core.free(m.FREE_HEAD.pack(floor) + np.array(list(rows), m.FREE_ROW).tobytes())


def test_written_object_proves_itself() -> None:
    """What lies in memory after a write is what a reader can verify, against the generation and the key."""
    here, where = node(), place(5, offset=128)
    assert here.write("a", where, DATA) is NodeStatus.OK

    memory = here.memory[128:]
    header = verify_header(
        bytes(memory[:HEADER_BYTES]),
        incarnation=7,
        generation=5,
        key_digest=key_digest(NAMESPACE_DEFAULT, "a"),
        size=len(DATA),
    )
    assert isinstance(header, ObjectHeader)
    payload = memory[HEADER_BYTES : HEADER_BYTES + len(DATA)]
    trailer = memory[HEADER_BYTES + len(DATA) : HEADER_BYTES + len(DATA) + 8]
    assert verify_trailer(header, trailer)
    assert verify_chunks(payload, trailer, chunk=CHUNK_BYTES) == -1
    here.core.check()


def test_header_comes_last() -> None:
    """While payload comes in there is no header that a reader could believe."""
    here = node()
    write = begin(here, place(5))
    assert write.target is not None
    write.target[:] = DATA
    assert bytes(here.memory[:4]) == bytes(4)
    assert here.read(place(5)) is None

    assert status(here.core.write_end(write)) == (NodeStatus.OK, True)
    assert here.read(place(5)) == DATA


def test_parts_in_any_order_and_twice() -> None:
    """Parts that overlap or come twice are welcome; the one that completes the object is told."""
    here, size = node(), 2 * PART_CHUNK_BYTES + 10
    where = place(5, size=size, flags=PARTS)
    chunk = PART_CHUNK_BYTES
    for start, length, sealed in (
        (2 * chunk, 10, False),
        (0, chunk, False),
        (0, chunk, False),
        (chunk, chunk, True),
    ):
        write = begin(here, where, start=start, length=length)
        assert write.target is not None
        write.target[:] = DATA[start : start + length]
        assert status(here.core.write_end(write)) == (NodeStatus.OK, sealed)

    assert here.read(where) == DATA[:size]
    late = begin(here, where, start=0, length=chunk)
    assert late.target is None, "a whole object is not written again"
    assert status(here.core.write_end(late)) == (NodeStatus.OK, True)
    here.core.check()


def test_object_is_whole_when_its_last_writer_is_done() -> None:
    """An object is not sealed while anybody still writes to it, and is when that writer's connection ends."""
    here, where = node(), place(5, size=PART_CHUNK_BYTES, flags=PARTS)
    first = begin(here, where, length=PART_CHUNK_BYTES)
    second = begin(here, where, length=PART_CHUNK_BYTES)
    assert second.target is not None
    second.target[:] = DATA[:PART_CHUNK_BYTES]
    assert status(here.core.write_end(second)) == (NodeStatus.OK, False)

    here.core.write_lost(first)

    assert here.read(where) == DATA[:PART_CHUNK_BYTES]
    here.core.check()


def test_newer_generation_takes_the_memory() -> None:
    """A later put takes over what it overlaps, stops the payload on its way there, and cannot be overtaken."""
    here, aborted = node(), []
    old = here.core.write_begin(
        write_body("a", place(5), DATA, 0, len(DATA)), len(DATA), on_abort=lambda: aborted.append(5)
    )
    assert here.write("b", place(6, offset=64), DATA) is NodeStatus.OK

    assert aborted == [5]
    assert old.target is None
    assert status(here.core.write_end(old)) == (NodeStatus.GONE, False)
    assert here.write("a", place(5), DATA) is NodeStatus.STALE
    assert here.read(place(6, offset=64)) == DATA
    here.core.check()


def test_taken_memory_is_cleared_before_it_is_written() -> None:
    """The header of the object before is void as soon as the next one's first byte may come."""
    here = node()
    here.write("a", place(5), DATA)

    begin(here, place(6))

    assert bytes(here.memory[:4]) == bytes(4)
    assert here.read(place(5)) is None


def test_free_needs_the_exact_generation() -> None:
    """FREE clears that generation's slot alone; repeated it is answered alike; a late writer is refused."""
    here = node()
    here.write("a", place(6), DATA)

    rows = np.array([(5, 0), (6, 64)], m.FREE_ROW).tobytes()
    assert free(here, (5, 0), (6, 64)) == rows
    assert here.read(place(6)) == DATA
    free(here, (6, 0))
    free(here, (6, 0))

    assert here.read(place(6)) is None
    assert bytes(here.memory[:4]) == bytes(4)
    assert here.write("a", place(5, offset=SIZE // 2), DATA) is NodeStatus.STALE
    assert here.core.used_bytes == 0
    here.core.check()


def test_rank_that_comes_after_the_object_was_freed() -> None:
    """A late or repeated part of an object that was whole, and has been removed since, opens nothing."""
    here = node()
    here.write("a", place(6), DATA)
    free(here, (6, 0))

    assert here.write("a", place(6), DATA) is NodeStatus.STALE
    assert here.core.used_bytes == 0


def test_floor_ends_older_puts() -> None:
    """Below the floor nothing is opened, what is open is given up, what is whole stays."""
    here = node()
    here.write("a", place(3), DATA)
    open_one = begin(here, place(4, offset=SIZE // 2))

    here.core.raise_floor(5)

    assert status(here.core.write_end(open_one)) == (NodeStatus.GONE, False)
    assert here.write("c", place(4, offset=SIZE // 4), DATA) is NodeStatus.STALE
    assert here.read(place(3)) == DATA
    assert here.core.objects == 1


@pytest.mark.parametrize(
    ("generation", "offset", "start", "length", "expected"),
    [
        (6, 0, 0, 10, NodeStatus.STALE),
        (5, 64, 0, 10, NodeStatus.STALE),
        (5, SIZE * 10, 0, 10, NodeStatus.STALE),
        (5, 0, 0, 0, NodeStatus.REFUSED),
        (5, 0, 0, len(DATA) + 1, NodeStatus.REFUSED),
        (5, 0, 1, 10, NodeStatus.REFUSED),
        (5, 0, 0, 10, NodeStatus.REFUSED),
        (5, 0, 0xFFFFFFFF, 0xFFFFFFFF, NodeStatus.REFUSED),
    ],
)
def test_reads_that_are_refused(
    generation: int, offset: int, start: int, length: int, expected: NodeStatus
) -> None:
    """A read names its generation exactly, and whole chunks inside the object."""
    here = node()
    here.write("a", place(5), DATA)

    ((head, payload),) = here.core.read(read_row(generation, offset, start, length))

    assert tm.READ_REPLY.unpack(head)[0] == expected
    assert payload is None


@pytest.mark.parametrize(
    "where",
    [
        place(5, offset=32),
        place(5, offset=SIZE),
        place(5, offset=SIZE - 64),
        place(0),
    ],
    ids=["unaligned", "beyond", "over the end", "generation 0"],
)
def test_writes_that_are_refused(where: Location) -> None:
    """A write outside the segment, off the grid or of nothing is refused and changes nothing."""
    here = node()
    length = where[2]
    write = here.core.write_begin(write_body("a", where, DATA, 0, length), length, on_abort=lambda: None)

    assert write.target is None
    assert status(here.core.write_end(write)) == (NodeStatus.REFUSED, False)
    assert here.core.used_bytes == 0


def test_write_of_nothing() -> None:
    """A write without payload contradicts itself: every object has a byte."""
    with pytest.raises(WireError):
        begin(node(), place(5, size=0), length=0)


def test_other_shape_does_not_join() -> None:
    """A second writer of a generation with another key or size is refused."""
    here = node()
    begin(here, place(5))

    assert status(here.core.write_end(begin(here, place(5), key="b"))) == (NodeStatus.REFUSED, False)
    assert status(here.core.write_end(begin(here, place(5, size=100), length=100))) == (
        NodeStatus.REFUSED,
        False,
    )


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_are_answered_or_refused(body: bytes, payload: int) -> None:
    """No body crashes a node: an answer or a WireError, and the objects stay."""
    here = _shared
    try:
        write = here.core.write_begin(body, payload, on_abort=lambda: None)
        here.core.write_end(write)
    except WireError:
        pass
    for ask in (here.core.read, here.core.list):
        try:
            ask(body)
        except WireError:
            pass

    assert here.read(place(5)) == DATA


_shared = node()
_shared.write("a", place(5), DATA)


def test_too_many_reads_in_one_frame() -> None:
    """A frame with more reads than one slice of the loop can afford is a WireError."""
    with pytest.raises(WireError, match="at most"):
        node().core.read(read_row(1, 0, 0, 1) * (READ_SLICES_PER_FRAME_MAX + 1))


def test_slots_are_announced_page_by_page() -> None:
    """The announcement has every complete object once, however small its pages, and no open one."""
    here = node()
    for i in range(10):
        here.write(f"k{i}", place(10 + i, offset=i * 16_384), DATA)
    begin(here, place(30, offset=20 * 16_384))

    for limit in (1, 3, 100):
        cursor, seen = 0, []
        while cursor >= 0:
            rows, cursor = here.core.announce(cursor, limit)
            seen += np.frombuffer(rows, m.SLOT_ROW)["generation"].tolist()
        assert seen == list(range(10, 20))


def listed(of: NodeCore, prefix: str, limit: int) -> list[str]:
    cursor, keys = 0, []
    while cursor >= 0:
        query = tm.ListQuery(prefix=prefix, limit=limit, cursor=cursor)
        reply = msgspec.msgpack.decode(of.list(msgspec.msgpack.encode(query)), type=tm.ListReply)
        keys += [row.key for row in reply.rows]
        cursor = reply.cursor
    return keys


def test_keys_are_listed_by_prefix() -> None:
    """Keys come in the order in which they lie, page by page, whatever letters they are made of."""
    here = node()
    names = ["a/1", "b/1", "a/ü", "a/2"]
    for i, key in enumerate(names):
        here.write(key, place(10 + i, offset=i * 16_384), DATA)

    assert listed(here.core, "a/", 1) == listed(here.core, "a/", 100) == ["a/1", "a/ü", "a/2"]
    assert listed(here.core, "", 2) == names


def test_key_that_is_no_text() -> None:
    """A key of a foreign client that is no UTF-8 does not keep others from being listed."""
    here = node()
    body = bytearray(write_body("ab", place(5), DATA, 0, len(DATA)))
    body[tm.WRITE_HEAD.size : tm.WRITE_HEAD.size + 2] = b"\xff\xfe"
    write = here.core.write_begin(bytes(body), len(DATA), on_abort=lambda: None)
    here.core.write_end(write)
    here.write("good", place(6, offset=16_384), DATA)

    assert listed(here.core, "", 10) == ["\\xff\\xfe", "good"]
