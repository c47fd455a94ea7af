"""What is written to the journal is what a restarted master reads."""

import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.errors import ParseError
from kvops.store.journal import (
    COMPLETE_ROW,
    GONE_ROW,
    Kind,
    Rows,
    encode_header,
    live_rows,
    recover,
    recover_state,
    segments,
    set_aside,
)
from kvops.store.journal_writer import JournalWriter
from kvops.store.model import StoreInfo, StoreState
from kvops.store.outbox import JournalEntry


def complete(*objects: tuple[int, int], store: int = 1) -> Rows:
    """Rows of (key, generation)."""
    rows = np.zeros(len(objects), COMPLETE_ROW)
    for row, (key, generation) in zip(rows, objects, strict=True):
        row["digest"] = (key, ~key & 0xFFFF)
        row["location"] = (generation, 64 * generation, 4096, store, 0)
        row["chunk"] = 1024
    return rows


def gone(*objects: tuple[int, int]) -> Rows:
    rows = np.zeros(len(objects), GONE_ROW)
    for row, (key, generation) in zip(rows, objects, strict=True):
        row["digest"] = (key, ~key & 0xFFFF)
        row["generation"] = generation
    return rows


def store(id: int, state: StoreState = StoreState.READY) -> StoreInfo:
    return StoreInfo(
        id=id,
        name=f"store-{id}",
        host="host-0",
        numa_node=0,
        incarnation=7,
        boot_id="b",
        pid=1,
        address="127.0.0.1:1",
        unix_path="",
        http_address="",
        state=state,
        capacity_bytes=1 << 30,
        populated_bytes=1 << 30,
        used_bytes=0,
        objects=0,
        transports=["tcp"],
    )


def objects_in(directory: Path) -> dict[int, int]:
    """Key → generation, as recovered."""
    rows = recover_state(directory).rows
    return dict(zip(rows["digest"][:, 0].tolist(), rows["location"]["generation"].tolist(), strict=True))


def write(
    directory: Path, *steps: Callable[[JournalWriter], object], segment_bytes_max: int = 1 << 26
) -> None:
    """One life of a master: steps, then a clean end."""
    with JournalWriter(directory, segment_bytes_max=segment_bytes_max) as journal:
        for step in steps:
            step(journal)


def put(*objects: tuple[int, int], store: int = 1) -> Callable[[JournalWriter], object]:
    return lambda journal: journal.append(
        *JournalEntry(Kind.COMPLETE, complete(*objects, store=store)).encode()
    )


def lose(*objects: tuple[int, int]) -> Callable[[JournalWriter], object]:
    return lambda journal: journal.append(*JournalEntry(Kind.GONE, gone(*objects)).encode())


def say(info: StoreInfo) -> Callable[[JournalWriter], object]:
    return lambda journal: journal.append(*JournalEntry(Kind.STORE, store=info).encode())


mount = say(store(1))


def test_a_restarted_master_knows_every_object(tmp_path: Path) -> None:
    """What was put and not lost is there again, over several lives, with stores and sequence."""
    write(tmp_path, mount, put((1, 10), (2, 11)), lose((1, 10)))
    write(tmp_path, put((3, 12)))

    state = recover_state(tmp_path)
    assert objects_in(tmp_path) == {2: 11, 3: 12}
    assert state.stores == {1: store(1)}
    assert (state.next_sequence, state.generation_max, state.whole) == (4, 12, True)
    assert state.rows[0] == complete((2, 11))[0]


def test_an_empty_directory(tmp_path: Path) -> None:
    """A first start finds nothing, and sequences begin at 0."""
    assert (len(recover_state(tmp_path).rows), recover_state(tmp_path).next_sequence) == (0, 0)
    write(tmp_path)
    assert list(recover(tmp_path)) == []


def test_a_gone_store_takes_its_objects_along(tmp_path: Path) -> None:
    """Objects of a store that was unmounted, or that was never said to be mounted, are not there."""
    write(
        tmp_path,
        mount,
        put((1, 10)),
        put((2, 11), store=2),
        say(store(1, StoreState.GONE)),
    )

    state = recover_state(tmp_path)
    assert (len(state.rows), state.stores, state.generation_max) == (0, {}, 11)


@pytest.mark.parametrize("said", [True, False], ids=["said to be gone", "just another"])
def test_a_stores_id_is_given_again(said: bool, tmp_path: Path) -> None:
    """A store that comes under an id of an earlier life holds nothing of what lay under it then."""
    again = msgspec.structs.replace(store(1), incarnation=8)

    reuse = [say(store(1, StoreState.GONE)), say(again)] if said else [say(again)]
    write(tmp_path, mount, put((1, 10), (2, 11)), *reuse, put((3, 12)))
    write(tmp_path, put((4, 13)), say(again))

    assert objects_in(tmp_path) == {3: 12, 4: 13}
    assert recover_state(tmp_path).generation_max == 13


def test_golden_bytes() -> None:
    """A batch's bytes are pinned for ever: a later version must read them."""
    body = gone((1, 2)).tobytes()
    header = encode_header(Kind.GONE, 1, 3, body)

    assert header[:24] == b"KVOJ" + struct.pack("<HHIIQ", 1, 2, 1, 24, 3)
    assert body.hex() == "0100000000000000feff0000000000000200000000000000"
    assert header[24:].hex() == "d75a066d65364ea7"


def one_segment(tmp_path: Path) -> tuple[Path, list[int]]:
    """A journal of one segment of four batches, and where each begins."""
    write(tmp_path, mount, put((1, 10)), put((2, 11)), put((3, 12)))
    [(_, path)] = segments(tmp_path)
    starts = [0]
    for batch in recover(tmp_path):
        starts.append(starts[-1] + 32 + len(batch.body))
    assert path.stat().st_size == starts.pop()
    return path, starts


def test_a_torn_end_is_the_end(tmp_path: Path) -> None:
    """However much of the last batch was written when the process died, all before it is there."""
    path, starts = one_segment(tmp_path)
    data = path.read_bytes()
    for size in range(starts[3], len(data)):
        path.write_bytes(data[:size])
        assert objects_in(tmp_path) == {1: 10, 2: 11}


def test_after_a_torn_end_the_next_life_goes_on(tmp_path: Path) -> None:
    """A later start writes on in a new segment, and both are read."""
    path, _ = one_segment(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    write(tmp_path, put((4, 13)))

    assert objects_in(tmp_path) == {1: 10, 2: 11, 4: 13}


def test_any_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    """A flipped bit before the last batch is an error that names file and place, never other objects."""
    path, starts = one_segment(tmp_path)
    data = bytearray(path.read_bytes())
    for at in range(starts[3]):
        data[at] ^= 0x10
        path.write_bytes(data)
        data[at] ^= 0x10
        begin = max(start for start in starts if start <= at)
        with pytest.raises(ParseError, match=rf"{path}, byte {begin}:"):
            recover_state(tmp_path)


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    """A segment that somebody deleted is noticed by the batches that are missing."""
    write(tmp_path, mount, put((1, 10)))
    write(tmp_path, put((2, 11)))
    write(tmp_path, put((3, 12)))
    segments(tmp_path)[1][1].unlink()

    with pytest.raises(ParseError, match="batch 3 stands where 2 should be"):
        recover_state(tmp_path)


def test_a_cut_segment_in_the_middle_is_named(tmp_path: Path) -> None:
    """Batches cut off the end of an earlier segment are damage, unlike those of the last."""
    write(tmp_path, mount, put((1, 10)))
    write(tmp_path, put((2, 11)))
    first = segments(tmp_path)[0][1]
    first.write_bytes(first.read_bytes()[:-1])

    with pytest.raises(ParseError, match=f"{first}, byte"):
        recover_state(tmp_path)


def test_another_version_is_not_half_read(tmp_path: Path) -> None:
    """A segment of a newer version is refused whole, not taken for a torn one."""
    from xxhash import xxh3_64_intdigest

    head = b"KVOJ" + struct.pack("<HHIIQ", 2, 1, 0, 0, 0)
    digest = xxh3_64_intdigest(b"", xxh3_64_intdigest(head))
    (tmp_path / f"segment-{1:016d}.log").write_bytes(head + struct.pack("<Q", digest))

    with pytest.raises(ParseError, match="another version"):
        recover_state(tmp_path)


def test_bodies_that_are_not_what_they_say(tmp_path: Path) -> None:
    """A whole batch with a body that makes no sense is an error, as is an unknown kind."""
    for index, (kind, body) in enumerate([(Kind.COMPLETE, b"x"), (Kind.STORE, b"\x90"), (99, b"")]):
        directory = tmp_path / str(index)
        write(directory, lambda journal, kind=kind, body=body: journal.append(kind, 1, body))  # type: ignore[misc]
        with pytest.raises(ParseError, match="cannot be read"):
            recover_state(directory)


def test_a_damaged_journal_can_be_set_aside(tmp_path: Path) -> None:
    """After a damaged journal was moved away a master starts afresh; the next one moved replaces it."""
    for round in range(2):
        path, _ = one_segment(tmp_path)
        path.write_bytes(path.read_bytes().replace(b"KVOJ", b"JOVK", 1))
        with pytest.raises(ParseError):
            recover_state(tmp_path)

        aside = set_aside(tmp_path)
        assert len(list(aside.iterdir())) == 1
        assert objects_in(tmp_path) == {}, round


# Which objects are live: the vectorised answer against a plain one.

KEYS = st.integers(0, 5)
GENERATIONS = st.integers(1, 12)
STORES = st.integers(1, 2)


@settings(max_examples=300)
@given(
    put_rows=st.lists(st.tuples(KEYS, GENERATIONS, STORES), max_size=30),
    gone_rows=st.lists(st.tuples(KEYS, GENERATIONS), max_size=10),
    shared=st.booleans(),
)
def test_live_rows(
    put_rows: list[tuple[int, int, int]], gone_rows: list[tuple[int, int]], shared: bool
) -> None:
    """Of each key the highest generation is live, once a store, unless gone; even if digests half agree."""
    if not put_rows:
        rows = complete()
    else:
        rows = np.concatenate(
            [complete((key, generation), store=store) for key, generation, store in put_rows]
        )
    if shared:
        rows["digest"][:, 1] = rows["digest"][:, 0]
        rows["digest"][:, 0] = 1
    dead = gone(*gone_rows)

    highest: dict[int, int] = {}
    for key, generation, _ in put_rows:
        highest[key] = max(generation, highest.get(key, 0))
    gone_generations = {generation for _, generation in gone_rows}
    expected = {row for row in put_rows if row[1] == highest[row[0]] and row[1] not in gone_generations}

    left = live_rows(rows, dead)
    word = 1 if shared else 0
    found = list(
        zip(
            left["digest"][:, word].tolist(),
            left["location"]["generation"].tolist(),
            left["location"]["store"].tolist(),
            strict=True,
        )
    )
    assert sorted(found) == sorted(expected)


def test_a_row_said_again_counts_as_said_last(tmp_path: Path) -> None:
    """A row of the same object that was written again, with another depth, is the one that is kept."""
    older, newer = complete((1, 10)), complete((1, 10))
    newer["depth"] = 9

    assert live_rows(np.concatenate([older, newer]), gone())["depth"].tolist() == [9]


@given(data=st.binary(max_size=300), cut=st.integers(0, 100))
def test_any_bytes_are_a_journal_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int
) -> None:
    """Whatever lies in a segment is read, or refused as ParseError; nothing else."""
    directory = tmp_path_factory.getbasetemp() / "fuzz"
    directory.mkdir(exist_ok=True)
    whole = encode_header(Kind.HOLDS, 1, 0, b"\x90") + b"\x90"
    (directory / "segment-1.log").write_bytes(whole[cut:] + data)
    try:
        recover_state(directory)
    except ParseError:
        pass


def test_stores_of_an_older_version_are_read(tmp_path: Path) -> None:
    """A field that a newer version added to a store's record does not stop this one from reading it."""
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(store(1)))
    record["colour"] = "blue"
    write(tmp_path, lambda journal: journal.append(Kind.STORE, 1, msgspec.msgpack.encode(record)))

    assert recover_state(tmp_path).stores == {1: store(1)}
