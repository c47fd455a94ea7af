"""Bounds of the pool, each with its unit in its name, and how they relate."""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# Time, in milliseconds.
LEASE_TTL_MS: Final = 1_000  # a reader may hold memory this long after its lookup
LEASE_MARGIN_MS: Final = 50  # clocks of client and master may run apart by this much in one lease
PUT_TTL_MS: Final = 30_000  # a put without put_end for this long is a dead writer's
TTL_MS_MAX: Final = 0xFFFFFFFF  # 49 days; a u32 on the wire
DEADLINE_MS_MAX: Final = 86_400_000  # of one call of a client; poll(2) takes no more than 24 days
BEAT_INTERVAL_MS: Final = 250  # store → master
STORE_TTL_MS: Final = 2_000  # a store that was silent this long is named by no lookup any more
STORE_SILENT_MS: Final = 1_750  # … and is given up now: its last beat came before it died, and timers tick
CONNECT_TIMEOUT_MS: Final = 1_000
ETCD_TTL_S_MAX: Final = 60  # of a leader's lease

# Counts.
KEYS_PER_BATCH_MAX: Final = 65_536  # of one call of a client, which cuts it into frames
KEYS_PER_FRAME_MAX: Final = 4_096  # about 0.4 ms of the master's loop
PUTS_PER_FRAME_MAX: Final = 128  # likewise
STORE_COUNT_MAX: Final = 65_535  # a store id is a u16, 0 is never given
REPLICAS_MAX: Final = 8
DEPTH_MAX: Final = 65_535
PROCESSING_MAX: Final = 1_000_000  # puts under way at one master
CONNECTIONS_MAX: Final = 4_096  # at one master or store
KEY_BYTES_MAX: Final = 1_024  # UTF-8 of one key
TENANT_MAX: Final = 65_535
REGIONS_MAX: Final = 16  # that a store holds for one connection
REGIONS_OF_ALL_MAX: Final = 1_024  # … and for all of them, a descriptor each

# Sizes, in bytes.
DIGEST_BYTES: Final = 16  # of a key
OBJECT_BYTES_MAX: Final = GIB
# One digest of the trailer covers this much payload. xxhash drops the GIL above 64 KiB, then waits for it behind
# other threads: beside one busy thread 128 KiB chunks are hashed at 0.09 GB/s, 64 KiB at 9.4, alone both at 9–13.
CHUNK_BYTES: Final = 64 * KIB
PART_CHUNK_BYTES: Final = 4 * KIB  # … of an object that several ranks write; parts are aligned to it
ALIGN_BYTES: Final = 64  # every object starts on a cache line
REGION_BYTES_MAX: Final = 1 << 40  # of a writer's registered memory
BODY_BYTES_MAX: Final = 8 * MIB  # of one frame
COPY_BYTES_MAX: Final = MIB  # one memcpy holds the GIL: look at the deadline after this much

assert LEASE_MARGIN_MS < LEASE_TTL_MS < STORE_SILENT_MS < PUT_TTL_MS, (
    "a reader's lease ends before its store is given up"
)
assert BEAT_INTERVAL_MS * 4 <= STORE_SILENT_MS <= STORE_TTL_MS - BEAT_INTERVAL_MS, "one lost beat is no death"
assert KEYS_PER_FRAME_MAX * 72 <= BODY_BYTES_MAX, "the largest batch fits a frame"
assert CHUNK_BYTES % PART_CHUNK_BYTES == 0
assert REGIONS_MAX <= REGIONS_OF_ALL_MAX
