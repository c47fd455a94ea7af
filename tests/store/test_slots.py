"""A node's slot table: one owner for every byte, and the later generation wins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvops.store import slots
from kvops.store.slots import REGION_BITS, SLOT_ROW, Cleared, OpenStatus, Seal, Slot, SlotState, SlotTable
from kvops.transfer.layout import ObjectHeader, chunk_digests, footprint_bytes, verify_trailer

CHUNK = 64
GENERATIONS = range(1, 9)  # few: they must meet
SEGMENT = 2 << REGION_BITS
KEY_DIGEST = b"\x07" * 16


def table() -> SlotTable:
    return SlotTable(SEGMENT, incarnation=5, chunk_bytes_min=CHUNK)


def open_slot(
    of: SlotTable, generation: int, *, offset: int = 0, size: int = 100, **more: Any
) -> slots.Opened:
    args: dict[str, Any] = {
        "chunk": CHUNK,
        "digest": generation.to_bytes(16, "little"),
        "key_digest": KEY_DIGEST,
        "key": b"key-%d" % generation,
    }
    return of.open(offset=offset, size=size, generation=generation, **(args | more))


def opened(of: SlotTable, generation: int, **more: Any) -> Slot:
    answer = open_slot(of, generation, **more)
    assert answer.status is OpenStatus.OPENED
    assert answer.slot is not None
    return answer.slot


def write(of: SlotTable, slot: Slot, offset: int, length: int, fill: bytes = b"a") -> bool:
    assert of.write_begin(slot.generation, offset, length) is slot
    return of.write_done(slot, offset, length, chunk_digests(memoryview(fill * length), CHUNK))


def completed(of: SlotTable, generation: int, **more: Any) -> Seal:
    slot = opened(of, generation, **more)
    assert write(of, slot, 0, slot.size)
    return of.seal(slot)


@dataclass
class ModelSlot:
    """One live slot of the model."""

    offset: int
    size: int
    missing: set[int]
    complete: bool = False
    writes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def granules(self) -> set[int]:
        return set(range(self.offset // 64, (self.offset + footprint_bytes(self.size, CHUNK)) // 64))


class SlotMachine(RuleBasedStateMachine):
    """The table beside a plain map from generation to the granules it holds."""

    @initialize(base=st.sampled_from([0, (1 << REGION_BITS) - 12 * 64]))
    def start(self, base: int) -> None:
        self.table = table()
        self.base = base
        self.floor = 0
        self.newest = max(GENERATIONS)
        self.model: dict[int, ModelSlot] = {}
        self.revoked: set[int] = set()
        self.slots: dict[int, Slot] = {}

    def drop(self, cleared: tuple[Cleared, ...] | list[Cleared]) -> None:
        for one in cleared:
            gone = self.model.pop(one.generation)
            assert (one.offset, one.footprint) == (gone.offset, footprint_bytes(gone.size, CHUNK))
            assert (one.slot is not None) == (not gone.complete)
            if one.slot is not None:
                assert one.slot.state is SlotState.GONE

    @rule(generation=st.sampled_from(GENERATIONS), at=st.integers(0, 24), size=st.integers(0, 400))
    def open(self, generation: int, at: int, size: int) -> None:
        offset = self.base + at * 64
        wanted = ModelSlot(offset, size, set(range(-(-size // CHUNK))))
        overlapped = {g: s for g, s in self.model.items() if s.granules & wanted.granules}
        ours = self.model.get(generation)
        if ours is not None and ours.complete and generation not in overlapped:
            return  # a master gives a generation once; the table keeps no index to catch it

        answer = open_slot(self.table, generation, offset=offset, size=size)

        if generation < self.floor:
            assert answer.status is OpenStatus.FENCED
        elif generation in self.revoked:
            assert answer.status is OpenStatus.REVOKED
        elif ours is not None and not ours.complete:
            same = (ours.offset, ours.size) == (offset, size)
            assert answer.status is (OpenStatus.JOINED if same else OpenStatus.MISMATCH)
        elif overlapped and max(overlapped) > generation:
            # An older generation never wins; which of two refusals it gets may depend on the order.
            assert answer.status in {OpenStatus.STALE, OpenStatus.MISMATCH}
        elif generation in overlapped:
            assert ours is not None
            same = (ours.offset, ours.size) == (offset, size)
            assert answer.status is (OpenStatus.SEALED if same else OpenStatus.MISMATCH)
        else:
            assert answer.status is OpenStatus.OPENED
            assert {one.generation for one in answer.cleared} == set(overlapped)
            self.drop(answer.cleared)
            self.model[generation] = wanted
            assert answer.slot is not None
            self.slots[generation] = answer.slot
        if answer.status is not OpenStatus.OPENED:
            assert not answer.cleared

    @rule(at=st.integers(0, 24), size=st.integers(0, 400))
    def open_next(self, at: int, size: int) -> None:
        """As a correct master does: a generation never seen before, later than all."""
        self.newest += 1
        self.open(generation=self.newest, at=at, size=size)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def open_again(self, data: st.DataObject) -> None:
        """Another rank of a put, or a retry."""
        generation = data.draw(st.sampled_from(sorted(self.model)))
        ours = self.model[generation]
        self.open(generation=generation, at=(ours.offset - self.base) // 64, size=ours.size)

    @precondition(lambda self: any(not slot.complete for slot in self.model.values()))
    @rule(data=st.data())
    def write_all(self, data: st.DataObject) -> None:
        """One writer's whole object; sealed unless others still write to it."""
        generation = data.draw(st.sampled_from([g for g, slot in self.model.items() if not slot.complete]))
        ours = self.model[generation]
        assert self.table.write_begin(generation, 0, ours.size) is self.slots[generation]
        ours.writes.append((0, ours.size))
        self.write_end(generation=generation, fails=False)

    @rule(generation=st.sampled_from(GENERATIONS), data=st.data())
    def write_begin(self, generation: int, data: st.DataObject) -> None:
        ours = self.model.get(generation)
        if ours is None or ours.complete:
            assert self.table.write_begin(generation, 0, CHUNK) is None
            return
        chunks = -(-ours.size // CHUNK)
        first = data.draw(st.integers(0, max(0, chunks - 1)))
        last = data.draw(st.integers(min(first + 1, chunks), chunks))
        offset, length = first * CHUNK, min(last * CHUNK, ours.size) - first * CHUNK
        assert self.table.write_begin(generation, offset, length) is self.slots[generation]
        ours.writes.append((offset, length))

    @rule(generation=st.sampled_from(GENERATIONS), fails=st.booleans())
    def write_end(self, generation: int, fails: bool) -> None:
        """Also of slots that were lost meanwhile: their writers learn it here at the latest."""
        slot = self.slots.get(generation)
        if slot is None or not slot.writes:
            return
        ours = self.model.get(generation)
        offset, length = (
            ours.writes.pop() if ours is not None and not ours.complete else (0, min(CHUNK, slot.size))
        )
        if fails:
            whole = self.table.write_failed(slot)
        else:
            whole = self.table.write_done(slot, offset, length, bytes(8 * -(-length // CHUNK)))
        if ours is None or ours.complete:
            assert not whole, "what was lost is never sealed"
            return
        if not fails:
            ours.missing -= set(range(offset // CHUNK, -(-(offset + length) // CHUNK)))
        assert whole == (not ours.missing and not ours.writes)
        if whole:
            seal = self.table.seal(slot)
            assert (seal.offset, seal.trailer_at) == (ours.offset, ours.offset + 64 + ours.size)
            ours.complete = True

    @rule(generation=st.integers(1, 20), at=st.one_of(st.none(), st.none(), st.integers(0, 24)))
    def free(self, generation: int, at: int | None) -> None:
        ours = self.model.get(generation)
        offset = self.base + at * 64 if at is not None else ours.offset if ours is not None else self.base
        cleared = self.table.free(offset, generation)
        if ours is not None and ours.offset == offset:
            assert cleared is not None
            if not ours.complete:
                self.revoked.add(generation)
            self.drop([cleared])
        else:
            assert cleared is None
            if (ours is None or ours.complete) and generation >= self.floor:
                self.revoked.add(generation)

    @rule(generation=st.sampled_from(GENERATIONS))
    def abort(self, generation: int) -> None:
        ours = self.model.get(generation)
        cleared = self.table.abort_writer(generation)
        assert (cleared is not None) == (ours is not None and not ours.complete)
        if cleared is not None:
            self.revoked.add(generation)
            self.drop([cleared])

    @rule(generation=st.sampled_from([1, 2, 3, 4, 9, 12]))
    def raise_floor(self, generation: int) -> None:
        self.floor = max(self.floor, generation)
        below = {g for g, s in self.model.items() if g < self.floor and not s.complete}
        cleared = self.table.raise_floor(generation)
        assert {one.generation for one in cleared} == below
        self.drop(cleared)

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        whole = {g: s for g, s in self.model.items() if s.complete}
        assert self.table.complete_count == len(whole)
        assert self.table.used_bytes == sum(footprint_bytes(s.size, CHUNK) for s in self.model.values())
        for generation in range(1, self.newest + 1):
            ours = self.model.get(generation)
            at = ours.offset if ours is not None else self.base
            found = self.table.find(at, generation)
            assert (found is not None) == (ours is not None and ours.complete)
            assert self.table.find(at, generation + 100) is None

    @invariant()
    def announces_all_that_is_complete(self) -> None:
        rows, cursor = b"", 0
        while cursor >= 0:
            page, cursor = self.table.announce(cursor, 3)
            rows += page
        announced = np.frombuffer(rows, SLOT_ROW)
        whole = sorted((s.offset, g, s.size) for g, s in self.model.items() if s.complete)
        assert [(int(r["offset"]), int(r["generation"]), int(r["size"])) for r in announced] == whole


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_golden_row() -> None:
    """The 48 bytes a complete slot is announced with are pinned: master and node may differ in version."""
    of = table()
    completed(of, 0x0000010000000002, offset=128, size=70, depth=3, tenant=4, flags=5)

    rows, cursor = of.announce(0, 10)

    assert cursor == -1
    assert rows.hex() == (
        "0200000000010000" "0000000000000000" "0200000000010000" "8000000000000000" "46000000" "40000000"
        "0300" "0400" "05000000"
    )  # fmt: skip
    assert np.frombuffer(rows, SLOT_ROW)["offset"][0] == 128


def test_ranks_write_one_object() -> None:
    """Two ranks' parts make one object, whole with its last byte, and with the trailer of a single writer."""
    of = table()
    payload = memoryview(bytes(range(200)))
    first = opened(of, 9, size=200)
    joined = open_slot(of, 9, size=200)
    assert joined.status is OpenStatus.JOINED
    assert joined.slot is first

    assert of.write_begin(9, 128, 72) is first
    assert not of.write_done(first, 128, 72, chunk_digests(payload[128:], CHUNK))
    assert of.find(0, 9) is None
    assert of.write_begin(9, 0, 128) is first
    assert of.write_done(first, 0, 128, chunk_digests(payload[:128], CHUNK))
    seal = of.seal(first)

    header = ObjectHeader.unpack(seal.header)
    assert (header.incarnation, header.generation, header.key_digest, header.size) == (5, 9, KEY_DIGEST, 200)
    assert seal.trailer == chunk_digests(payload, CHUNK)
    assert seal.trailer_at == 64 + 200
    assert verify_trailer(header, seal.trailer)


def test_a_part_written_twice_counts_once() -> None:
    """A retried part completes nothing that another part still lacks."""
    of = table()
    slot = opened(of, 1, size=128)

    assert not write(of, slot, 0, 64)
    assert not write(of, slot, 0, 64)
    assert write(of, slot, 64, 64)


def test_no_seal_while_somebody_writes() -> None:
    """An object that is covered waits for a second writer of the same range: sealed memory never changes."""
    of = table()
    slot = opened(of, 1, size=64)
    assert of.write_begin(1, 0, 64) is slot
    assert of.write_begin(1, 0, 64) is slot

    assert not of.write_done(slot, 0, 64, bytes(8))
    assert of.write_failed(slot)

    of.seal(slot)
    assert of.write_begin(1, 0, 64) is None
    assert open_slot(of, 1, size=64).status is OpenStatus.SEALED


def test_a_sleeper_finds_its_memory_gone() -> None:
    """A writer that slept while its memory was given away can neither go on, nor come back, nor seal."""
    of = table()
    old = opened(of, 1, offset=0)
    assert of.write_begin(1, 0, 100) is old

    answer = open_slot(of, 2, offset=128)

    assert [(one.offset, one.generation, one.slot) for one in answer.cleared] == [(0, 1, old)]
    assert old.state is SlotState.GONE
    assert not of.write_done(old, 0, 100, bytes(16))
    assert of.write_begin(1, 0, 100) is None
    assert open_slot(of, 1, offset=128).status is OpenStatus.STALE


def test_a_put_revoked_before_it_began_is_refused() -> None:
    """The master's FREE may overtake the writer's first message; the writer is then refused."""
    of = table()

    assert of.free(0, 3) is None

    assert open_slot(of, 3).status is OpenStatus.REVOKED


def test_a_new_master_shuts_older_puts_out() -> None:
    """Below the floor nothing opens and nothing that was open completes; what was complete stays."""
    of = table()
    completed(of, 1, offset=0)
    slot = opened(of, 2, offset=1024)
    assert of.write_begin(2, 0, 100) is slot

    cleared = of.raise_floor(10)

    assert [one.generation for one in cleared] == [2]
    assert not of.write_done(slot, 0, 100, bytes(16))
    assert open_slot(of, 9, offset=2048).status is OpenStatus.FENCED
    assert open_slot(of, 10, offset=2048).status is OpenStatus.OPENED
    assert of.find(0, 1) is not None
    assert of.highest_generation == 10
    assert of.raise_floor(3) == ()
    assert of.floor == 10


def test_a_large_object_covers_many_regions() -> None:
    """An object over several regions takes over small ones in each, and is found from its middle."""
    of = table()
    size = SEGMENT // 2
    chunk = 1 << 20
    completed(of, 1, offset=1 << 20)
    completed(of, 2, offset=(1 << REGION_BITS) + 4096)
    big = open_slot(of, 3, offset=4096, size=size, chunk=chunk)
    assert sorted(one.generation for one in big.cleared) == [1, 2]

    assert open_slot(of, 2, offset=(1 << REGION_BITS) + 64).status is OpenStatus.STALE
    after = open_slot(of, 4, offset=(1 << REGION_BITS) + 64)

    assert [one.generation for one in after.cleared] == [3]
    of.check()


@pytest.mark.parametrize(
    "bad",
    [
        {"offset": 32},
        {"offset": -64},
        {"offset": SEGMENT - 64},
        {"offset": 1 << 63},
        {"size": -1},
        {"size": (1 << 30) + 1},
        {"chunk": 0},
        {"chunk": 32},
        {"chunk": 96},
        {"chunk": 1 << 21},
        {"chunk": -64},
        {"digest": b""},
        {"key_digest": bytes(15)},
        {"key": b""},
        {"key": b"k" * 1025},
        {"depth": 65_536},
        {"tenant": -1},
        {"flags": 1 << 32},
        {"generation": 0},
        {"generation": 1 << 64},
    ],
    ids=str,
)
def test_nonsense_from_the_network_opens_nothing(bad: dict[str, Any]) -> None:
    """A first message with any field out of bounds is refused and changes nothing."""
    of = table()
    args: dict[str, Any] = {
        "offset": 0,
        "size": 100,
        "chunk": CHUNK,
        "generation": 1,
        "digest": bytes(16),
        "key_digest": bytes(16),
        "key": b"k",
    }

    assert of.open(**(args | bad)).status is OpenStatus.INVALID
    assert of.complete_count == of.used_bytes == of.highest_generation == 0


@pytest.mark.parametrize(
    ("offset", "length"), [(1, 64), (0, 65), (64, 37), (-64, 64), (0, 0), (128, 0), (0, 164)]
)
def test_a_part_is_made_of_whole_chunks(offset: int, length: int) -> None:
    """A part that cuts a chunk, leaves the object or is empty is not received."""
    of = table()
    opened(of, 1, size=100)

    assert of.write_begin(1, offset, length) is None


def test_an_empty_object_needs_one_empty_write() -> None:
    """An object of no bytes is sealed by a write of no bytes."""
    of = table()
    slot = opened(of, 1, size=0)

    assert write(of, slot, 0, 0)
    assert of.seal(slot).trailer == b""


def test_the_same_generation_with_another_key_is_refused() -> None:
    """Two ranks that disagree about the object write nothing into each other's."""
    of = table()
    opened(of, 1)

    assert open_slot(of, 1, key=b"other").status is OpenStatus.MISMATCH
    assert open_slot(of, 1, size=99).status is OpenStatus.MISMATCH


def test_open_slots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of first messages ends in BUSY, not in memory."""
    monkeypatch.setattr(slots, "SLOTS_OPEN_MAX", 3)
    of = table()
    for generation in range(1, 4):
        opened(of, generation, offset=generation * 1024)

    assert open_slot(of, 4, offset=0).status is OpenStatus.BUSY
    of.abort_writer(2)
    assert open_slot(of, 4, offset=0).status is OpenStatus.OPENED


def test_keys_are_listed_by_prefix_in_pages() -> None:
    """Every complete object whose key begins so is listed once, whatever the page; open ones are not."""
    of = table()
    for generation in range(1, 21):
        completed(
            of, generation, offset=generation * 1024, key=b"%s-%d" % (b"ab"[generation % 2 :][:1], generation)
        )
    opened(of, 50, offset=0, key=b"a-open")

    keys: list[bytes] = []
    cursor = 0
    while cursor >= 0:
        page, cursor = of.list_keys(b"a-", 3, cursor)
        assert len(page) <= 3
        keys += [one.key for one in page]

    assert keys == [b"a-%d" % generation for generation in range(2, 21, 2)]
