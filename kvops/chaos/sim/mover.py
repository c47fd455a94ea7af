"""
A store's mover under virtual time: the real ``MovePlan`` and ``NodeCore.sources``, driven as ``Mover`` drives them.

It is a client of its own beside the store's session, and lives and dies with its store. The limit on bandwidth is
not covered, nor is the order of the copies: a pool this small has no hottest objects.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvops.chaos.sim.client import END_RESERVE_US, ClientProcess, Steps, Task
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.channel import Trouble
from kvops.store.model import Outcome, Reason
from kvops.store.mover import DEADLINE_MS, PASSES_MAX, TOLD_S, MovePlan
from kvops.store.node_core import Source
from kvops.transfer.layout import verify_chunks
from kvops.transfer.model import SliceState

if TYPE_CHECKING:
    from kvops.chaos.sim.store import StoreProcess

BATCH: Final = 3  # objects between two words with the master; few, so that a move can be interrupted
ROWS: Final = 64
DEADLINE_US: Final = DEADLINE_MS * 1_000
TOLD_US: Final = int(TOLD_S * 1_000_000)


class MoverModel(ClientProcess):
    """Moves one store's objects while the master says so."""

    def __init__(self, store: StoreProcess, masters: list[str]) -> None:
        rng = Random(store.rng.getrandbits(64))
        super().__init__(store.world, store.name, store.host, rng, masters=masters, maps=False, workers=())
        self._store = store
        self._number = 0
        self._told_us = 0
        self._running = False
        self._finished: tuple[int, int] | None = None  # hold and unmoved objects

    def told(self, number: int) -> None:
        """The master wants this store emptied for a hold; said again with every beat."""
        self._number, self._told_us = number, self.us()
        if self._finished is not None and self._finished[0] == number:
            self._store.migrated(*self._finished)  # it has not heard that
        elif not self._running:
            self._running = True
            self.spawn(self._run, number)

    def _run(self, task: Task, number: int) -> Steps:
        unmoved = yield from self._move_all(task)
        self._running = False
        if unmoved is not None and number == self._number:
            self._finished = (number, unmoved)
            self._store.migrated(number, unmoved)

    def _move_all(self, task: Task) -> Generator[None, Any, int | None]:
        """Copy all that is there; how many objects were not, or None when the next order begins anew."""
        unmoved = 0
        for _ in range(PASSES_MAX):
            try:
                rows = yield from self._readable(task)
            except Trouble:
                return None
            unmoved = 0
            for at in range(0, len(rows), BATCH):
                if self.us() - self._told_us > TOLD_US:
                    return None
                outcomes = yield from self._move(task, rows[at : at + BATCH])
                unmoved += sum(not one.ok and one.reason is not Reason.REFUSED for one in outcomes)
            if not unmoved:
                break
        return unmoved

    def _readable(self, task: Task) -> Generator[None, Any, NDArray[np.void]]:
        """SLOT_ROW rows of what the master names here; raises Trouble."""
        parts, cursor = [], 0
        while cursor >= 0:
            part, cursor = self._store.core.announce(cursor, ROWS)
            parts.append(part)
        slots = np.frombuffer(b"".join(parts), m.SLOT_ROW)
        body = np.ascontiguousarray(slots["digest"]).tobytes()
        answer = yield from self.ask(task, Kind.STAT, body, self.us() + DEADLINE_US)
        known = np.frombuffer(answer, m.STAT_ROW)
        here: NDArray[np.void] = slots[known["location"]["generation"] == slots["generation"]]
        return here

    def _move(self, task: Task, rows: NDArray[np.void]) -> Generator[None, Any, list[Outcome]]:
        """``Mover._move`` with ``Pool.carry_out``."""
        oracle = self.world.oracle
        sources = [
            source
            for source in self._store.core.sources(rows)
            if source is not None and verify_chunks(source.payload, source.trailer, chunk=source.chunk) < 0
        ]
        if not sources:
            return []
        deadline = self.us() + DEADLINE_US
        plan = MovePlan(sources, self._still_held)
        since = self.world.scheduler.now_us
        try:
            answer = yield from self.ask(task, plan.start_kind, plan.start_body(), deadline)
            epoch, store_ids = plan.started(answer)
            yield from self._know_stores(task, epoch, store_ids, deadline)
        except Trouble as trouble:
            return [Outcome(False, trouble.reason)] * len(sources)
        groups = plan.groups(self._route)
        written = [piece for slices in groups.values() for piece in slices]
        by_digest = {source.digest: source for source in sources}
        oracle.move_granted(self, by_digest, written, since)
        yield from self._write_groups(task, groups, deadline - END_RESERVE_US)
        where = {store_id: self.stores[store_id].info for store_id in groups if store_id in self.stores}
        body = plan.end_body()
        if body:
            try:
                plan.ended((yield from self.ask(task, Kind.PUT_END, body, deadline)))
            except Trouble as trouble:
                plan.lost(trouble.reason)
                self._to_master.append((Kind.PUT_REVOKE, body))
                self.care()
            else:
                for piece in written:
                    stored = plan.outcomes[sources.index(by_digest[piece.digest])].reason is Reason.STORED
                    if stored and piece.state is SliceState.DONE and piece.store in where:
                        oracle.moved(by_digest[piece.digest], piece, where[piece.store])
        return plan.outcomes

    def _still_held(self, sources: Sequence[Source]) -> list[bool]:
        rows = np.zeros(len(sources), m.SLOT_ROW)
        rows["generation"] = [source.generation for source in sources]
        rows["offset"] = [source.offset for source in sources]
        return [source is not None for source in self._store.core.sources(rows)]
