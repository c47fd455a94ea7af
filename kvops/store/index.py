"""
Where every readable object lies: digest of its key → slot → location, recency and lease; 70–85 B an object.

An object owns a *slot*, a position in flat arrays that never move. A table of buckets finds the slot:

    digest, 16 B   lo │ tag: high 32 bits │ …… low bits: the bucket │   hi │ the other 64 bits │

    bucket, 64 B   │ 7 tags, u32 │ chained? │ 0 │ 7 slots, u32; 0 is free │      one cache line
                                                    ↓
    record, 32 B   │ hi │ generation │ offset │ size, store, flags │             half a cache line
    beside it      │ touched_ms │    │ lo │    │ depth │    │ tenant │          lookups need the first only

A batch is looked up with a dozen numpy calls, whatever its length (up to four keys, one by one without
numpy, whose fixed cost would be most of theirs): take the buckets, compare seven tags, turn the one
matching byte into its position by a multiplication (none: the 0 before the slots), take the slot, take
its record, compare ``hi``, set ``touched_ms`` (recency and lease at once) and copy the locations out of
the records. So tag, bucket and ``hi`` must agree, at least 106 bits of 128 (74 if the tag is 0). Keys
that somebody made to collide are caught by the reader, who compares a cryptographic digest of the whole
key.

*Chains.* A key whose bucket is full or holds the same tag already, or whose tag is 0 (free entries look
like that), goes to its bucket's chain of slots. Chains are kept in two dicts of ints, which the cyclic
collector never scans. Whenever an entry of a chained bucket falls free, its chain is placed again: it never
holds what the bucket has room for, and nothing needs draining.

*Growth.* Linear hashing, in bursts. Above three objects a bucket, bucket ``i`` of ``low`` is split into
``i`` and ``low + i``, two buckets for every key inserted, until their number has doubled. All memory is
reserved at the start as address space and becomes real page by page where it is first written: nothing is
copied, and no call is long.

One thread only: lookups share scratch memory.
"""

from __future__ import annotations

import mmap
import secrets
import struct
import sys
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kvops.errors import NoSpace, UsageError
from kvops.limits import DIGEST_BYTES, STORE_COUNT_MAX
from kvops.store.model import LOCATION, LOCATION_ROW, Digests, Locations, Slots
from kvops.store.pages import address_of, populate

assert sys.byteorder == "little", "the arrays' bytes go to the wire as they are"

BUCKET_BYTES: Final = 64
_BUCKET_WORDS: Final = BUCKET_BYTES // 4
_ENTRIES: Final = 7  # a bucket
_CHAINED: Final = 7  # word of a bucket: 1 if it has a chain
_NO_SLOT: Final = 8  # … always 0: what a row without a matching tag finds
_SLOTS: Final = 9  # … where its slots begin
BUCKETS_MIN: Final = 1_024
FILL_MAX: Final = 3  # objects a bucket: then a doubling starts
SPLITS_PER_KEY: Final = 2  # so it ends at 3.5 objects a bucket, with 1 % of keys in chains; 0.01 % after it
SPLITS_MIN: Final = 64  # a few cost as much as so many: small debts are saved up
BATCH_MAX: Final = 1_024  # keys a step: scratch memory stays in the cache, and only so many sizes of it exist
SCALAR_MAX: Final = 4  # up to here a loop beats the fixed cost of the numpy calls
OBJECTS_MAX: Final = 1 << 30

LOCATION_BYTES: Final = LOCATION.itemsize
_MISS: Final = bytes(LOCATION_BYTES)
_RECORD: Final = np.dtype([("hi", "<u8"), ("location", LOCATION)])
_RECORD_BYTES: Final = 32
assert _RECORD.itemsize == _RECORD_BYTES
assert LOCATION.fields is not None
_STORE_U16: Final = (8 + LOCATION.fields["store"][1]) // 2  # of a record, as u16
_WORDS: Final = struct.Struct("<QQ")
_BUCKET: Final = struct.Struct("<16I")
_LOCATION_STORE: Final = struct.Struct(f"<{LOCATION.fields['store'][1]}xH2x")
assert _LOCATION_STORE.size == LOCATION_BYTES

# Comparison bytes of which the one at p is set are the u64 1 << 8·p. Multiplying shifts byte 7-p of this
# number to the top; its upper three bits are p + 1, or 0 if no byte is set. Never more than 7 whatever is
# set, so what is found is a slot in use or 0.
_POSITION_MUL: Final = np.array(0x20_40_60_80_A0_C0_E0_00, dtype=np.uint64)
_POSITION_SHIFT: Final = np.array(61, dtype=np.uint64)

PREPARE_BYTES: Final = 1 << 20  # a call of the kernel
_MAP_NORESERVE: Final = 0x4000  # mman.h; the mmap module has no name for it


class _Reserved:
    """Zeroed address space that becomes memory where it is touched."""

    def __init__(self, size_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self.map = mmap.mmap(-1, size_bytes, flags=flags)
        except OSError as error:
            raise UsageError(
                f"cannot reserve {size_bytes} B of address space for the index: {error}",
                fix="lower objects_max or raise the limit on address space (ulimit -v, vm.overcommit_memory)",
            ) from error

        self._size_bytes = size_bytes
        self._address = address_of(self.map)
        self._ready_bytes = 0  # from the front: memory already

    def array(self, dtype: DTypeLike) -> NDArray[Any]:
        return np.frombuffer(self.map, dtype=dtype)

    def prepare(self, upto_bytes: int) -> None:
        """Make the front of it memory. Touches no Python object: any one thread may do it."""
        upto = min(
            -(-upto_bytes // PREPARE_BYTES) * PREPARE_BYTES, self._size_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        )
        if upto > self._ready_bytes:
            populate(self._address + self._ready_bytes, upto - self._ready_bytes)
            self._ready_bytes = upto


class _Scratch:
    """Views of one batch size over memory that all sizes share: making them costs more than using them."""

    def __init__(self, memory: _ScratchMemory, count: int) -> None:
        digests = memory.digests[:count]
        self.digest_bytes = digests.reshape(-1).view(np.uint8).data
        self.lo = digests[:, 0]
        self.hi = digests[:, 1]
        self.tag_column = digests.view(np.uint32).reshape(count, 4)[:, 1, None]
        self.bucket = memory.bucket[:count]
        self.bucket_u64 = self.bucket.view(np.uint64)
        self.unsplit = memory.flag[:count]
        self.rows = memory.rows[:count]
        self.rows_flat = self.rows.reshape(-1)
        self.row_tags = self.rows[:, :_ENTRIES]
        self.row_slots = self.rows[:, _SLOTS:]
        self.row_chained = self.rows[:, _CHAINED]
        self.equal = memory.equal[:count, :_ENTRIES]  # the eighth byte stays 0
        self.equal_u64 = memory.equal[:count].view(np.uint64).reshape(count)
        self.position = memory.position[:count]
        self.position_u64 = self.position.view(np.uint64)
        self.row_start = memory.row_start[:count]
        self.slot_u32 = memory.slot_u32[:count]
        self.slot = memory.slot[:count]
        self.records = memory.records[:count]
        self.record_hi = self.records[:, 0]
        self.record_words = self.records[:, 1:]
        self.record_stores = self.records.view(np.uint16).reshape(count, 16)[:, _STORE_U16]
        self.miss = memory.flag[:count]
        self.miss_count = 0


class _ScratchMemory:
    def __init__(self, count: int) -> None:
        self.digests = np.zeros((count, 2), dtype=np.uint64)
        self.bucket = np.zeros(count, dtype=np.int64)
        self.flag = np.zeros(count, dtype=np.bool_)
        self.rows = np.zeros((count, _BUCKET_WORDS), dtype=np.uint32)
        self.equal = np.zeros((count, 8), dtype=np.bool_)
        self.position = np.zeros(count, dtype=np.int64)
        self.row_start = np.arange(count, dtype=np.int64) * _BUCKET_WORDS + _NO_SLOT
        self.slot_u32 = np.zeros(count, dtype=np.uint32)
        self.slot = np.zeros(count, dtype=np.int64)
        self.records = np.zeros((count, _RECORD_BYTES // 8), dtype=np.uint64)


class ObjectIndex:
    """
    The master's objects by key digest.

    The arrays are indexed by slot, have ``objects_max + 1`` elements (slot 0 is "absent") and never move.
    From ``slots_used`` on nothing was ever written. ``location`` is a column of wider records: index it with
    slots, but do not ``take`` from it, because numpy then copies the whole column first.
    """

    location: Locations
    touched_ms: NDArray[np.uint32]
    depth: NDArray[np.uint16]
    tenant: NDArray[np.uint16]

    def __init__(self, *, objects_max: int) -> None:
        if not 1 <= objects_max <= OBJECTS_MAX:
            raise UsageError(f"objects_max is {objects_max}", fix=f"choose 1 to {OBJECTS_MAX}")
        self.objects_max = objects_max
        self.slots_used = 1  # the highest slot ever given, plus 1: what sweeps walk
        self.lookups_total = 0  # keys asked for by `lookup`
        self.hits_total = 0  # … and found

        slots = objects_max + 1
        self._per_slot: list[tuple[_Reserved, int]] = []  # and the bytes of one element

        def per_slot(item_bytes: int) -> _Reserved:
            reserved = _Reserved(slots * item_bytes)
            self._per_slot.append((reserved, item_bytes))
            return reserved

        record = per_slot(_RECORD_BYTES)
        records = record.array(_RECORD)
        self.location = records["location"]
        self._records = record.array("<u8").reshape(slots, _RECORD_BYTES // 8)
        self._record_words = memoryview(record.map).cast("Q")
        self._record_bytes = record.map
        lo = per_slot(8)
        self._lo: NDArray[np.uint64] = lo.array("<u8")
        self._lo_words = memoryview(lo.map).cast("Q")
        touched = per_slot(4)
        self.touched_ms = touched.array("<u4")
        self._touched_words = memoryview(touched.map).cast("I")
        self.depth = per_slot(2).array("<u2")
        self.tenant = per_slot(2).array("<u2")
        # Slot 0's record answers for whatever has no entry. Its location is all zeros; its `hi` is one that
        # nobody can aim at, so that such a key is never taken for found.
        self._records[0, 0] = secrets.randbits(64)

        self._free: NDArray[np.uint32] = per_slot(4).array("<u4")
        self._free_count = 0  # a stack
        self._free_count_max = 0

        self._low = BUCKETS_MIN  # buckets at the last doubling's end; a power of two
        self._buckets = BUCKETS_MIN  # … and now: those below `buckets - low` are split
        buckets_max = BUCKETS_MIN
        while objects_max > buckets_max * FILL_MAX:
            buckets_max *= 2
        self._split_debt = 0
        table = self._table_reserved = _Reserved(buckets_max * BUCKET_BYTES)
        self._table = table.array("<u4").reshape(buckets_max, _BUCKET_WORDS)
        self._table_flat = self._table.reshape(-1)
        self._table_words = memoryview(table.map).cast("I")
        self._table_bytes = table.map
        self._table_find = table.map.find
        self._set_mask()

        self._chain_first: dict[int, int] = {}  # bucket → first slot of its chain
        self._chain_next: dict[int, int] = {}  # slot → next slot of the same chain

        self.hidden: NDArray[np.bool_] = np.zeros(STORE_COUNT_MAX + 1, dtype=np.bool_)
        self.hidden_count = 0

        self._scratch_memory = _ScratchMemory(BATCH_MAX)
        self._scratch: dict[int, _Scratch] = {}

    def __len__(self) -> int:
        return self.slots_used - 1 - self._free_count

    # Looking up.

    def lookup(self, digests: bytes | memoryview, *, now_ms32: int) -> bytes:
        """
        Locations of the keys, each granted a lease from now; the hot path.

        Args:
            digests: Key digests end to end, 16 B each.
            now_ms32: Milliseconds modulo 2**32.

        Returns:
            One ``LOCATION`` row a key, 24 B each, end to end; all zeros for a miss.
        """
        count = len(digests) // DIGEST_BYTES
        assert count * DIGEST_BYTES == len(digests), "whole digests"
        self.lookups_total += count
        if count <= SCALAR_MAX:
            if count == 1:
                return self._lookup_one(digests, now_ms32)
            ends = range(DIGEST_BYTES, len(digests) + 1, DIGEST_BYTES)
            return b"".join([self._lookup_one(digests[end - DIGEST_BYTES : end], now_ms32) for end in ends])
        if count > BATCH_MAX:
            step = BATCH_MAX * DIGEST_BYTES
            parts = (digests[at : at + step] for at in range(0, len(digests), step))
            return b"".join(self._lookup_batch(part, now_ms32) for part in parts)
        return self._lookup_batch(digests, now_ms32)

    def _lookup_one(self, digest: bytes | memoryview, now_ms32: int) -> bytes:
        slot = self.find_one(digest)
        if not slot:
            return _MISS
        start = slot * _RECORD_BYTES + 8
        row = self._record_bytes[start : start + LOCATION_BYTES]
        if self.hidden_count and self.hidden[_LOCATION_STORE.unpack(row)[0]]:
            return _MISS
        self._touched_words[slot] = now_ms32
        self.hits_total += 1
        return row

    def _lookup_batch(self, digests: bytes | memoryview, now_ms32: int) -> bytes:
        work = self._find_batch(digests)
        if self.hidden_count:
            self._hide(work)
        self.touched_ms[work.slot] = now_ms32  # slot 0's is never read
        self.hits_total += len(work.slot) - work.miss_count
        return work.record_words.tobytes()

    def exists(self, digests: bytes | memoryview) -> bytes:
        """One byte a key, 1 where it could be read; grants nothing and touches nothing."""
        assert len(digests) % DIGEST_BYTES == 0, "whole digests"
        if len(digests) <= SCALAR_MAX * DIGEST_BYTES:
            slots = self.find_list(digests)
            return bytes([slot != 0 and not self.hidden[self.row(slot)[3]] for slot in slots])
        parts = []
        step = BATCH_MAX * DIGEST_BYTES
        for at in range(0, len(digests), step):
            work = self._find_batch(digests[at : at + step])
            if self.hidden_count:
                self._hide(work)
            parts.append((work.slot != 0).tobytes())
        return b"".join(parts)

    def find(self, digests: Digests) -> Slots:
        """Slots of the keys, 0 where absent; no side effect. A key may appear twice."""
        if len(digests) <= SCALAR_MAX:
            return np.array(self.find_list(digests.tobytes()), dtype=np.int64)
        data = np.ascontiguousarray(digests, dtype=np.uint64)
        found: Slots = np.empty(len(data), dtype=np.int64)
        for at in range(0, len(data), BATCH_MAX):
            part = data[at : at + BATCH_MAX]
            work = self._find_batch(part.reshape(-1).view(np.uint8).data)
            found[at : at + BATCH_MAX] = work.slot
        return found

    def find_list(self, digests: bytes | memoryview) -> list[int]:
        """``find`` for keys end to end, 16 B each, as plain numbers."""
        if len(digests) <= SCALAR_MAX * DIGEST_BYTES:
            starts = range(0, len(digests), DIGEST_BYTES)
            return [self.find_one(digests[at : at + DIGEST_BYTES]) for at in starts]
        found: list[int] = self.find(np.frombuffer(digests, np.uint64).reshape(-1, 2)).tolist()
        return found

    def row(self, slot: int) -> tuple[int, int, int, int, int]:
        """Generation, offset, size, store and flags of one slot: its ``LOCATION`` as plain numbers."""
        return LOCATION_ROW.unpack_from(self._record_bytes, slot * _RECORD_BYTES + 8)

    def find_one(self, digest: bytes | memoryview) -> int:
        """One key's slot, 0 where absent, without numpy's fixed cost a call."""
        lo, hi = _WORDS.unpack(digest)
        bucket = lo & self._mask
        if bucket >= self._buckets:
            bucket -= self._low
        start = bucket * BUCKET_BYTES
        tag = digest[4:8]
        at = self._table_find(tag, start, start + 4 * _ENTRIES)
        while at >= 0:
            if at & 3 == 0:
                slot = self._table_words[(at >> 2) + _SLOTS]
                if self._record_words[slot * 4] == hi:
                    return slot
                break  # a bucket holds a tag once
            at = self._table_find(tag, at + 1, start + 4 * _ENTRIES)  # across two tags: not one
        if self._table_words[(start >> 2) + _CHAINED]:
            return self._chain_find(bucket, lo, hi)
        return 0

    def digest(self, slot: int) -> bytes:
        """The digest under which one slot is found."""
        return _WORDS.pack(self._lo_words[slot], self._record_words[slot * (_RECORD_BYTES // 8)])

    def digests(self, slots: Slots) -> Digests:
        """The digests under which these slots are found, shape ``[slots, 2]``."""
        result: Digests = np.empty((len(slots), 2), dtype=np.uint64)
        result[:, 0] = self._lo[slots]
        result[:, 1] = self._records[slots, 0]
        return result

    def set_hidden(self, store: int, hidden: bool) -> None:
        """Let lookups miss (or find again) every object of a store, at once; ``find`` goes on seeing them."""
        assert store, "store 0 is no store"
        self.hidden_count += int(hidden) - int(self.hidden[store])
        self.hidden[store] = hidden

    def _match_batch(self, digests: bytes | memoryview) -> _Scratch:
        """Each key's bucket, and which of its tags are the key's; valid until the next call."""
        count = len(digests) // DIGEST_BYTES
        work = self._scratch.get(count)
        if work is None:
            work = self._scratch[count] = _Scratch(self._scratch_memory, count)
        work.digest_bytes[:] = digests
        np.bitwise_and(work.lo, self._mask_array, work.bucket_u64)
        if self._buckets != self._low:
            np.greater_equal(work.bucket, self._buckets_array, work.unsplit)
            np.bitwise_and(work.lo, self._low_mask_array, work.position_u64)
            np.putmask(work.bucket, work.unsplit, work.position)
        # Every index is in range by construction; "clip" only spares numpy a second buffer.
        self._table.take(work.bucket, 0, work.rows, "clip")
        np.equal(work.row_tags, work.tag_column, work.equal)
        return work

    def _find_batch(self, digests: bytes | memoryview) -> _Scratch:
        """Slot and record a key, zeros for a miss, and the number of misses; valid until the next call."""
        work = self._match_batch(digests)
        np.multiply(work.equal_u64, _POSITION_MUL, work.position_u64)
        np.right_shift(work.position_u64, _POSITION_SHIFT, work.position_u64)
        np.add(work.position, work.row_start, work.position)
        work.rows_flat.take(work.position, 0, work.slot_u32, "clip")
        work.slot[:] = work.slot_u32
        self._records.take(work.slot, 0, work.records, "clip")
        np.not_equal(work.record_hi, work.hi, work.miss)
        work.miss_count = int(np.count_nonzero(work.miss))
        if work.miss_count:
            self._find_in_chains(work)
        return work

    def _find_in_chains(self, work: _Scratch) -> None:
        """Look into the chains for what the buckets do not hold, and clear what is missing."""
        np.putmask(work.slot, work.miss, 0)
        if self._chain_first:
            for index in (work.row_chained * work.miss).nonzero()[0].tolist():
                slot = self._chain_find(int(work.bucket[index]), int(work.lo[index]), int(work.hi[index]))
                if slot:
                    work.slot[index] = slot
                    work.miss_count -= 1
        self._records.take(work.slot, 0, work.records, "clip")

    def _hide(self, work: _Scratch) -> None:
        """Turn what lies on hidden stores into misses."""
        hidden = self.hidden[work.record_stores]
        count = int(np.count_nonzero(hidden))
        if count:
            np.putmask(work.slot, hidden, 0)
            work.records[hidden] = 0
            work.miss_count += count

    # Changing.

    def insert(
        self,
        digests: Digests,
        locations: Locations,
        depth: ArrayLike,
        tenant: ArrayLike,
        *,
        touched_ms: int,
    ) -> Slots:
        """
        Give each key a slot.

        Args:
            digests: Distinct keys that are absent, shape ``[keys, 2]``.
            locations: ``LOCATION`` rows, one a key.
            depth: Positions in their prefix chains, one or one a key.
            tenant: Whose they are, one or one a key.
            touched_ms: Milliseconds modulo 2**32; lease TTL before now for recency without a lease.

        Raises:
            NoSpace: ``objects_max`` would be passed; nothing was inserted.
        """
        count = len(digests)
        assert len(locations) == count
        if len(self) + count > self.objects_max:
            raise NoSpace(
                f"{count} objects more would pass {self.objects_max}; {len(self)} are indexed",
                fix="raise objects_max and restart the master, or lower eviction_high_watermark",
            )
        slots = self._slots_take(count)
        if count <= SCALAR_MAX:
            self._enter_each(slots, digests.tobytes(), locations.tobytes())
        else:
            digests = np.ascontiguousarray(digests, dtype=np.uint64)
            self._lo[slots] = digests[:, 0]
            self._records[slots, 0] = digests[:, 1]
            self.location[slots] = locations
        self.depth[slots] = depth
        self.tenant[slots] = tenant
        self.touched_ms[slots] = touched_ms
        if count <= SCALAR_MAX:
            for slot in slots.tolist():
                self._place(slot)
            self._pay_splits(count)
            return slots
        for at in range(0, count, BATCH_MAX):
            part = slots[at : at + BATCH_MAX]
            self._place_batch(part, digests[at : at + BATCH_MAX])
            self._pay_splits(len(part))
        return slots

    def _enter_each(self, slots: Slots, digests: bytes, locations: bytes) -> None:
        """Write a few records one by one."""
        for number, slot in enumerate(slots.tolist()):
            lo, hi = _WORDS.unpack_from(digests, number * DIGEST_BYTES)
            self._lo_words[slot] = lo
            self._record_words[slot * (_RECORD_BYTES // 8)] = hi
            at, row = slot * _RECORD_BYTES + 8, number * LOCATION_BYTES
            self._record_bytes[at : at + LOCATION_BYTES] = locations[row : row + LOCATION_BYTES]

    def remove(self, slots: Slots) -> None:
        """Forget these objects: distinct slots in use. Their locations become zeros (store 0)."""
        count = len(slots)
        if count <= SCALAR_MAX:
            each = slots.tolist()
            assert len(set(each)) == count, "a slot twice"
            for slot in each:
                self._remove_one(slot)
            return
        assert np.count_nonzero(slots) == count, "slot 0 is nobody's"
        order = np.arange(count, dtype=np.uint32)
        self.touched_ms[slots] = order
        assert (self.touched_ms[slots] == order).all(), "a slot twice"

        lo = self._lo[slots]
        bucket = self._bucket_of(lo)
        entry = self._table[bucket, _SLOTS:] == slots[:, None]
        position = entry.argmax(axis=1)
        in_table = entry[order, position]
        at = (bucket * _BUCKET_WORDS + position)[in_table]
        self._table_flat[at] = 0
        self._table_flat[at + _SLOTS] = 0
        if self._chain_first:
            for index in (~in_table).nonzero()[0].tolist():
                self._chain_remove(int(bucket[index]), int(slots[index]))
            # Only now that every one of them is out of chains and table: what is placed again must stay.
            for chained in set(bucket[self._table[bucket, _CHAINED] != 0].tolist()):
                self._chain_place_again(chained)
        else:
            assert in_table.all(), "a slot in use has an entry"

        self._records[slots] = 0
        self._free[self._free_count : self._free_count + count] = slots
        self._free_count += count
        self._free_count_max = max(self._free_count_max, self._free_count)

    def _remove_one(self, slot: int) -> None:
        """Forget one object."""
        assert slot, "slot 0 is nobody's"
        lo = self._lo_words[slot]
        bucket = lo & self._mask
        if bucket >= self._buckets:
            bucket -= self._low
        row = _BUCKET.unpack_from(self._table_bytes, bucket * BUCKET_BYTES)
        if slot in row[_SLOTS:]:
            at = bucket * _BUCKET_WORDS + row.index(slot, _SLOTS)
            self._table_words[at - _SLOTS] = 0
            self._table_words[at] = 0
        else:
            self._chain_remove(bucket, slot)
        if row[_CHAINED]:
            self._chain_place_again(bucket)
        at = slot * _RECORD_BYTES
        self._record_bytes[at : at + _RECORD_BYTES] = bytes(_RECORD_BYTES)
        self._free[self._free_count] = slot
        self._free_count += 1
        self._free_count_max = max(self._free_count_max, self._free_count)

    def maintain(self, budget: int) -> bool:
        """
        Split at most ``budget`` buckets of a doubling under way; true if more are left.

        Inserts pay for the growth they cause: this only lets idle time finish it earlier.
        """
        if self._buckets != self._low:
            self._split(budget)
        return self._buckets != self._low

    def prepare(self, slots_ahead: int) -> None:
        """
        Make the memory that the next inserts will touch real. For a thread beside the loop.

        A first touch can take milliseconds where a machine's host has no memory at hand, and holds the GIL.

        Raises:
            OSError: The kernel has no more memory.
        """
        slots = self.slots_used + slots_ahead
        for reserved, item_bytes in self._per_slot:
            reserved.prepare(slots * item_bytes)
        self._table_reserved.prepare((self._buckets + slots_ahead // FILL_MAX) * BUCKET_BYTES)

    @property
    def growing(self) -> bool:
        """Whether a doubling is under way."""
        return self._buckets != self._low

    def memory_bytes(self) -> int:
        """Resident memory, estimated from what was ever written."""
        per_slot = _RECORD_BYTES + 8 + 4 + 2 + 2
        chains = sum(sys.getsizeof(d) for d in (self._chain_first, self._chain_next))
        numbers = 2 * 32 * (len(self._chain_first) + len(self._chain_next))
        return (
            self.slots_used * per_slot
            + self._free_count_max * 4
            + self._buckets * BUCKET_BYTES
            + chains
            + numbers
        )

    @property
    def chained_count(self) -> int:
        """Objects that are found through chains."""
        return len(self._chain_first) + len(self._chain_next)

    def check(self) -> None:
        """Assert what must hold between table, chains and arrays; for tests: walks everything."""
        used = np.flatnonzero(self.location["store"][: self.slots_used])
        assert len(used) == len(self)
        assert (self.find(self.digests(used)) == used).all(), "every object is found under its digest"
        live = self._table[: self._buckets]
        entries = live[:, _SLOTS:]
        assert np.count_nonzero(entries) + self.chained_count == len(self)
        assert ((live[:, :_ENTRIES] == 0) == (entries == 0)).all(), "an entry has both tag and slot"
        assert not live[:, _NO_SLOT].any()
        assert not self._table[self._buckets :].any(), "nothing lies beyond the table"
        assert set(live[:, _CHAINED].nonzero()[0].tolist()) == set(self._chain_first)
        for bucket in self._chain_first:
            for slot in self._chain(bucket):
                tag = int(self._lo[slot]) >> 32
                assert tag == 0 or tag in live[bucket, :_ENTRIES] or entries[bucket].all(), "room was left"

    def _slots_take(self, count: int) -> Slots:
        if count == 1:
            if not self._free_count:
                self.slots_used += 1
                return np.array([self.slots_used - 1], dtype=np.int64)
            self._free_count -= 1
            return self._free[self._free_count : self._free_count + 1].astype(np.int64)
        reused = min(count, self._free_count)
        slots: Slots = np.empty(count, dtype=np.int64)
        slots[:reused] = self._free[self._free_count - reused : self._free_count]
        self._free_count -= reused
        fresh = count - reused
        slots[reused:] = np.arange(self.slots_used, self.slots_used + fresh)
        self.slots_used += fresh
        return slots

    def _bucket_of(self, lo: NDArray[np.uint64]) -> NDArray[np.int64]:
        bucket = (lo & self._mask_array).astype(np.int64)
        if self._buckets != self._low:
            bucket[bucket >= self._buckets] -= self._low
        return bucket

    def _place(self, slot: int) -> None:
        """Enter one slot into its bucket, or its bucket's chain."""
        lo = self._lo_words[slot]
        bucket = lo & self._mask
        if bucket >= self._buckets:
            bucket -= self._low
        tag = lo >> 32
        row = _BUCKET.unpack_from(self._table_bytes, bucket * BUCKET_BYTES)
        if tag and tag not in row[:_ENTRIES] and 0 in row[_SLOTS:]:
            at = bucket * _BUCKET_WORDS + row.index(0, _SLOTS)
            self._table_words[at - _SLOTS] = tag
            self._table_words[at] = slot
            return
        self._chain_add(bucket, slot)

    def _place_batch(self, slots: Slots, digests: Digests) -> None:
        """Enter slots into free entries of their buckets, where that is simple; the others one by one."""
        work = self._match_batch(digests.reshape(-1).view(np.uint8).data)
        tags = work.tag_column[:, 0]
        simple = work.equal_u64 == 0
        simple &= tags != 0
        np.equal(work.row_slots, 0, work.equal)
        free = work.equal_u64
        free &= np.negative(free)  # only the first of each row
        np.multiply(free, _POSITION_MUL, work.position_u64)
        np.right_shift(work.position_u64, _POSITION_SHIFT, work.position_u64)
        simple &= work.position != 0
        at = work.bucket * _BUCKET_WORDS + work.position - 1
        entered = slots
        others = []
        if not simple.all():
            at, tags, entered = at[simple], tags[simple], slots[simple]
            others = slots[~simple].tolist()
        self._table_flat[at] = tags
        self._table_flat[at + _SLOTS] = entered
        lost = self._table_flat[at + _SLOTS] != entered  # keys of one bucket chose one entry: the last has it
        for slot in others + entered[lost].tolist():
            self._place(slot)

    # Growing.

    def _set_mask(self) -> None:
        growing = self._buckets != self._low
        self._mask = (2 * self._low if growing else self._low) - 1
        # The same as arrays, which cost a numpy call half a microsecond less than a Python number.
        self._mask_array = np.array(self._mask, dtype=np.uint64)
        self._low_mask_array = np.array(self._low - 1, dtype=np.uint64)
        self._buckets_array = np.array(self._buckets, dtype=np.int64)

    def _pay_splits(self, keys: int) -> None:
        """Split what so many inserted keys owe."""
        full = len(self) > self._low * FILL_MAX and self._low < len(self._table)
        if self._buckets == self._low and not full:
            return
        self._split_debt += keys * SPLITS_PER_KEY
        if self._split_debt >= SPLITS_MIN:
            self._split(self._split_debt)
            self._split_debt = 0

    def _split(self, count: int) -> None:
        """Split the next buckets: entries with the next bit of ``lo`` set move to the new one."""
        low = self._low
        first = self._buckets - low
        last = min(first + count, low)
        old = self._table[first:last]
        new = self._table[low + first : low + last]
        tags, slots = old[:, :_ENTRIES], old[:, _SLOTS:]
        moves = (self._lo[slots] & np.uint64(low)) != 0  # slot 0's `lo` is 0: free entries stay
        np.copyto(new[:, :_ENTRIES], tags, where=moves)
        np.copyto(new[:, _SLOTS:], slots, where=moves)
        np.copyto(tags, 0, where=moves)
        np.copyto(slots, 0, where=moves)
        self._buckets = low + last
        if last == low:
            self._low = self._buckets
        self._set_mask()
        if self._chain_first:
            for bucket in (old[:, _CHAINED].nonzero()[0] + first).tolist():
                self._chain_place_again(bucket)

    # Chains.

    def _chain(self, bucket: int) -> list[int]:
        slots = []
        slot = self._chain_first.get(bucket, 0)
        while slot:
            slots.append(slot)
            slot = self._chain_next.get(slot, 0)
        return slots

    def _chain_find(self, bucket: int, lo: int, hi: int) -> int:
        slot = self._chain_first.get(bucket, 0)
        while slot:
            if self._record_words[slot * 4] == hi and self._lo_words[slot] == lo:
                return slot
            slot = self._chain_next.get(slot, 0)
        return 0

    def _chain_add(self, bucket: int, slot: int) -> None:
        first = self._chain_first.get(bucket)
        if first is not None:
            self._chain_next[slot] = first
        self._chain_first[bucket] = slot
        self._table[bucket, _CHAINED] = 1

    def _chain_clear(self, bucket: int) -> list[int]:
        slots = self._chain(bucket)
        self._chain_first.pop(bucket, None)
        for slot in slots:
            self._chain_next.pop(slot, None)
        self._table[bucket, _CHAINED] = 0
        return slots

    def _chain_remove(self, bucket: int, slot: int) -> None:
        slots = self._chain_clear(bucket)
        assert slot in slots, "a slot in use has an entry or is in its bucket's chain"
        for other in slots:
            if other != slot:
                self._chain_add(bucket, other)

    def _chain_place_again(self, bucket: int) -> None:
        for slot in self._chain_clear(bucket):
            self._place(slot)
