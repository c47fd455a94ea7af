"""
Deliberately broken variants of the pool's logic, each of which the simulator must catch.

Each is a context manager that patches one rule out of the real code; ``kvops chaos sim --mutate NAME`` uses them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from kvops.chaos.sim.master import MasterProcess
from kvops.errors import ParseError
from kvops.net.wire import Kind
from kvops.store import client_core, term
from kvops.store.announcements import Announcements
from kvops.store.client_core import PutPlan
from kvops.store.election import Campaign, Election, Members
from kvops.store.eviction import Evictor
from kvops.store.horizon import LeaseHorizon
from kvops.store.master_core import MasterCore
from kvops.store.model import StoreState
from kvops.store.mover import MovePlan
from kvops.store.node_core import NodeCore
from kvops.store.outbox import Outbox
from kvops.store.put_protocol import PutProtocol
from kvops.store.removes import Removes
from kvops.store.replication import Replication
from kvops.store.slots import SlotState, SlotTable, _sealed
from kvops.store.store_life import StoreLife
from kvops.store.stores import Store, StoreTable
from kvops.transfer import layout, shm, stream

Mutant = Callable[[], AbstractContextManager[object]]
MUTANTS: dict[str, Mutant] = {}


def mutant(make: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Enter a mutation into the table under its function's name."""
    MUTANTS[make.__name__.replace("_", "-")] = contextmanager(make)
    return make


@mutant
def no_generation_check() -> Iterator[None]:
    """
    Neither node nor reader compare the generation of what they find with the location's.

    Nor does the reader compare the key, which would cover for that but for two puts of one key.
    """
    real = layout.verify_header

    def lax(header: bytes, *, incarnation: int, generation: int, key_digest: bytes, size: int) -> Any:
        try:
            found = layout.ObjectHeader.unpack(header)
        except ParseError:
            return layout.Mismatch.DAMAGED
        return real(
            header,
            incarnation=found.incarnation,
            generation=found.generation,
            key_digest=found.key_digest,
            size=size,
        )

    def find(self: SlotTable, offset: int, generation: int) -> Any:
        row = self._rows[0].get(offset)
        return None if row is None else _sealed(row)

    with ExitStack() as stack:
        for module in (stream, shm):
            stack.enter_context(patch.object(module, "verify_header", lax))
        stack.enter_context(patch.object(SlotTable, "find", find))
        yield


@mutant
def no_chunk_digests() -> Iterator[None]:
    """A reader trusts the header, whatever the payload's digests say."""

    def copy(target: memoryview, source: memoryview, *_: Any, **__: Any) -> int:
        target[:] = source
        return -1

    with patch.object(stream, "verify_chunks", lambda *_, **__: -1), patch.object(shm, "copy_verified", copy):
        yield


@mutant
def slots_not_cleared() -> Iterator[None]:
    """A node frees memory and leaves the old header standing."""

    def clear(self: NodeCore, cleared: Any) -> None:
        for gone in cleared:
            for write in self._writes.get(gone.generation, ()):
                write.target = None

    with patch.object(NodeCore, "_clear", clear):
        yield


@mutant
def memory_reused_early() -> Iterator[None]:
    """Memory is free as soon as its node has cleared it, whoever still holds a lease."""
    real = StoreTable.release

    def release(self: StoreTable, store_id: int, *, not_before_ms: int, **more: Any) -> None:
        real(self, store_id, not_before_ms=0, **more)

    with patch.object(StoreTable, "release", release):
        yield


@mutant
def no_term_fencing() -> Iterator[None]:
    """A node opens slots for puts of earlier masters."""
    with patch.object(SlotTable, "raise_floor", lambda self, generation: ()):
        yield


@mutant
def term_not_raised() -> Iterator[None]:
    """A restarted master goes on with the term that it had."""

    real = term.raise_term

    def raise_term(state_dir: Any, at_least: int = 0, **_: Any) -> int:
        return term.read_term(state_dir) or real(state_dir, at_least)

    with (
        patch.object(term, "raise_term", raise_term),
        patch.object(MasterCore, "raise_term", lambda self, term: None),
    ):
        yield


@mutant
def wrong_incarnation() -> Iterator[None]:
    """A restarted node is taken for the one that was there before, with all its objects."""
    real = StoreLife.mount

    def mount(self: StoreLife, conn: int, mount: Any, *, now_ms: int) -> Any:
        known = self._stores.named(mount.name)
        if known is not None:
            known.mount = mount
        return real(self, conn, mount, now_ms=now_ms)

    with patch.object(StoreLife, "mount", mount):
        yield


@mutant
def whole_without_all_parts() -> Iterator[None]:
    """A node calls an object whole as soon as nobody writes to it, whatever is missing."""
    real = SlotTable.seal

    def failed(self: SlotTable, slot: Any) -> bool:
        slot.writes -= 1
        return slot.state is SlotState.OPEN and not slot.writes

    def seal(self: SlotTable, slot: Any) -> Any:
        slot.missing = 0
        return real(self, slot)

    with patch.object(SlotTable, "write_failed", failed), patch.object(SlotTable, "seal", seal):
        yield


@mutant
def evicts_leased() -> Iterator[None]:
    """Eviction does not look at leases."""
    real = Evictor.__init__

    def init(self: Evictor, index: Any, **more: Any) -> None:
        real(self, index, lease_ttl_ms=0, **more)

    with patch.object(Evictor, "__init__", init):
        yield


@mutant
def adopts_removed() -> Iterator[None]:
    """What a store announces is taken in, although it was removed while that store was away."""
    with (
        patch.object(Removes, "_remember", lambda self, digest: None),
        patch.object(Announcements, "_unwanted", lambda self, store, rows: np.zeros(len(rows), np.bool_)),
    ):
        yield


@mutant
def acknowledged_before_written() -> Iterator[None]:
    """A writer tells the master that every replica is whole, whatever became of its writes."""

    def settle(self: client_core._Grant) -> None:
        self.written = (1 << len(self.slices)) - 1

    with patch.object(client_core._Grant, "settle", settle):
        yield


@mutant
def wall_clock() -> Iterator[None]:
    """Leases and deadlines go by the clock that administrators set."""

    def now_ms(self: MasterProcess) -> int:
        return self.host.wall_ms(self.world.scheduler.now_us) + (1 << 40)

    with patch.object(MasterProcess, "now_ms", now_ms):
        yield


@mutant
def acknowledged_before_replicated() -> Iterator[None]:
    """A leader's answers do not wait for its standbys."""
    with patch.object(Replication, "pending", property(lambda self: False)):
        yield


@mutant
def leased_before_replicated() -> Iterator[None]:
    """A lookup is answered with an object that no standby knows yet."""
    real = Replication.must_wait

    def must_wait(self: Replication, kind: int, answer: bytes) -> bool:
        return kind != Kind.LOOKUP and real(self, kind, answer)

    with patch.object(Replication, "must_wait", must_wait):
        yield


@mutant
def leads_past_its_lease() -> Iterator[None]:
    """A leader goes on for some time after its lease in etcd may have ended."""
    real = Election._until

    with patch.object(Election, "_until", lambda self, sent_ms: real(self, sent_ms) + 5_000):
        yield


@mutant
def laggards_campaign() -> Iterator[None]:
    """A master that does not have everything that was acknowledged may lead all the same."""
    with patch.object(Election, "eligible", lambda self: True):
        yield


@mutant
def term_not_raised_in_etcd() -> Iterator[None]:
    """A campaign claims the term that was given out last."""
    real = Election.next

    def next_op(self: Election, now_ms: int, *, ticked_ms: int) -> Any:
        op = real(self, now_ms, ticked_ms=ticked_ms)
        if isinstance(op, Campaign):
            term = max(1, op.seen.term)
            claim = msgspec.structs.replace(op.claim, term=term)
            return Campaign(op.lease, claim, Members(term=term, names=[claim.name]), op.seen)
        return op

    with patch.object(Election, "next", next_op):
        yield


@mutant
def drain_forgets_hold() -> Iterator[None]:
    """A drain is told neither to the journal nor to standbys."""
    with patch.object(Outbox, "remember_holds", lambda self, holds: None):
        yield


@mutant
def leaves_before_readers_end() -> Iterator[None]:
    """A store that leaves is told that nobody reads there any more."""
    with patch.object(LeaseHorizon, "end_ms", lambda self, now_ms: now_ms):
        yield


@mutant
def cordon_ignored() -> Iterator[None]:
    """New objects are placed on stores that are cordoned, or about to be drained."""
    with patch.object(Store, "takes_objects", property(lambda self: self.state is StoreState.READY)):
        yield


@mutant
def copies_whatever_became_of_it() -> Iterator[None]:
    """A copy becomes readable although its object was removed meanwhile: neither its store nor the master look."""
    real = PutProtocol.move

    def move(self: PutProtocol, *args: Any, **more: Any) -> bytes:
        answer = real(self, *args, **more)
        for put in self._puts:
            put.moved_from = 0
        return answer

    with (
        patch.object(PutProtocol, "move", move),
        patch.object(MovePlan, "end_body", PutPlan.end_body),
    ):
        yield
