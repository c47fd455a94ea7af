"""The master's mounted stores: who they are, what memory they have free, and what waits to be freed there."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops.errors import Refused
from kvops.limits import STORE_COUNT_MAX
from kvops.store.allocator import Allocator
from kvops.store.messages import Mount
from kvops.store.model import Generation, HoldKind, StoreId, StoreInfo, StoreState

SERVING: Final = frozenset({StoreState.ANNOUNCING, StoreState.READY})
"""States in which lookups may name a store."""


@dataclass(slots=True)
class Release:
    """Memory on its way back: free once its node has cleared the slot and its last lease has ended."""

    offset: int
    footprint: int
    not_before_ms: int


@dataclass(slots=True, eq=False)
class Store:
    """One mount of a store node."""

    id: StoreId
    mount: Mount
    conn: int  # its session's connection; 0 while it is away
    state: StoreState
    seen_ms: int  # last beat, or when it went away
    allocator: Allocator = field(default_factory=Allocator)
    populated_bytes: int = 0
    releasing: dict[Generation, Release] = field(default_factory=dict)
    releasing_bytes: int = 0  # of them, and of cleared memory that is still leased
    unsent: list[tuple[Generation, int]] = field(default_factory=list)  # rows of the next FREE frame
    announcing: bool = False  # its slot table has not been read to the end
    announced: NDArray[np.bool_] | None = None  # by index slot, until what it does not hold has been swept
    trusted: bool = False  # announcing, but we followed the leader that it was mounted at
    doomed: dict[Generation, int] = field(default_factory=dict)  # dropped before it was announced → lease end
    closed_until_ms: int = 0  # nothing is allocated there before
    objects: int = 0
    reports: dict[str, int] = field(
        default_factory=dict
    )  # host → when its clients last could not read from it
    suspect_until_ms: int = 0  # on their evidence; beats do not clear it earlier
    held: HoldKind | None = None  # by an operator
    misplaced_bytes: int = 0  # on other NUMA nodes than its own, as it says
    leaving: bool = False  # its process is about to end, and has said so

    @property
    def hidden_on_purpose(self) -> bool:
        """Whether nothing may be read or written there, although it lives."""
        return self.leaving or self.held is HoldKind.DRAIN

    @property
    def takes_objects(self) -> bool:
        """Whether new objects may be placed there."""
        return self.state is StoreState.READY and self.held is None

    def info(self) -> StoreInfo:
        """What clients and operators see."""
        mount = self.mount
        return StoreInfo(
            id=self.id,
            name=mount.name,
            host=mount.host,
            numa_node=mount.numa_node,
            incarnation=mount.incarnation,
            boot_id=mount.boot_id,
            pid=mount.pid,
            address=mount.address,
            unix_path=mount.unix_path,
            http_address=mount.http_address,
            state=self.state,
            capacity_bytes=mount.capacity_bytes,
            populated_bytes=self.populated_bytes,
            used_bytes=self.populated_bytes - self.allocator.free_bytes,
            objects=self.objects,
            transports=mount.transports,
            misplaced_bytes=self.misplaced_bytes,
        )

    def populate(self, populated_bytes: int) -> None:
        """Give newly prepared memory to the allocator."""
        grown = min(populated_bytes, self.mount.capacity_bytes) - self.populated_bytes
        if grown > 0:
            self.allocator.add_range(self.populated_bytes, grown)
            self.populated_bytes += grown


class StoreTable:
    """
    Every store the master knows, by id; ``epoch`` grows whenever clients must look again.

    ``hide`` is told when lookups must not name a store, or may again.
    """

    def __init__(self, hide: Callable[[int, bool], None]) -> None:
        self.epoch = 1
        self._hide = hide
        self.allocators: dict[StoreId, Allocator] = {}
        self._by_id: dict[StoreId, Store] = {}
        self._last_id = 0
        self._matured: list[tuple[int, StoreId, int, int]] = []  # heap: when, store, offset, footprint
        self._patient: list[tuple[int, StoreId, Generation, int]] = []  # heap: when to clear, …, offset
        self.unsent = False  # whether a store has rows for a FREE frame

    def __iter__(self) -> Iterator[Store]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, store_id: int) -> Store | None:
        """The store with that id."""
        return self._by_id.get(StoreId(store_id))

    def named(self, name: str) -> Store | None:
        """The newest mount of the node with that name."""
        return next((store for store in reversed(self._by_id.values()) if store.mount.name == name), None)

    def add(self, mount: Mount, *, conn: int, state: StoreState, now_ms: int, store_id: int = 0) -> Store:
        """
        Enter a mount; ``store_id`` restores a known one from the journal.

        Raises:
            Refused: Every id is taken.
        """
        if not store_id:
            store_id = self._free_id()
        store = Store(StoreId(store_id), mount, conn, state, now_ms)
        self._last_id = max(self._last_id, store_id)
        self._by_id[store.id] = store
        self.allocators[store.id] = store.allocator
        self._show(store)
        return store

    def _show(self, store: Store) -> None:
        self._hide(store.id, store.state not in SERVING)
        self.epoch += 1

    def _free_id(self) -> int:
        for offset in range(1, STORE_COUNT_MAX + 1):
            store_id = (self._last_id + offset - 1) % STORE_COUNT_MAX + 1
            if StoreId(store_id) not in self._by_id:
                return store_id
        raise Refused("all store ids are taken", fix="stop stores that are no longer needed")

    def set_state(self, store: Store, state: StoreState) -> None:
        """Change a store's state; lookups follow at once."""
        if state == store.state:
            return
        store.state = state
        self._show(store)

    def forget(self, store: Store) -> None:
        """Drop a store of which nothing is left in the index."""
        self.set_state(store, StoreState.GONE)
        self._hide(store.id, False)  # nothing in the index names it any more: lookups need not look
        del self._by_id[store.id], self.allocators[store.id]

    # Memory on its way back.

    def release(
        self,
        store_id: int,
        *,
        generation: Generation,
        offset: int,
        footprint: int,
        not_before_ms: int,
        patient: bool = False,
    ) -> None:
        """
        Ask a node to clear a slot; its memory is free after the answer and ``not_before_ms``.

        ``patient`` asks only then, so that readers with a lease finish: where nothing forbids what they read.
        """
        store = self._by_id.get(StoreId(store_id))
        if store is None or store.state is StoreState.GONE:
            return
        store.releasing[generation] = Release(offset, footprint, not_before_ms)
        store.releasing_bytes += footprint
        if patient:
            heapq.heappush(self._patient, (not_before_ms, store.id, generation, offset))
            return
        store.unsent.append((generation, offset))
        self.unsent = True

    def release_many(
        self,
        store: Store,
        generations: list[Generation],
        *,
        offsets: list[int],
        footprints: list[int],
        not_before_ms: int,
    ) -> None:
        """``release``, for many slots of one store."""
        releasing = store.releasing
        for generation, offset, footprint in zip(generations, offsets, footprints, strict=True):
            releasing[generation] = Release(offset, footprint, not_before_ms)
        store.releasing_bytes += sum(footprints)
        store.unsent += zip(generations, offsets, strict=True)
        self.unsent = True

    def cleared(self, store: Store, generation: Generation, *, now_ms: int) -> bool:
        """A node has cleared a slot; whether that was awaited."""
        release = store.releasing.pop(generation, None)
        if release is None:
            return False
        if release.not_before_ms <= now_ms:
            self._free(store, release.offset, release.footprint)
        else:
            heapq.heappush(
                self._matured, (release.not_before_ms, store.id, release.offset, release.footprint)
            )
        return True

    def mature_at(self, when_ms: int, store: Store, offset: int, footprint: int) -> None:
        """Memory that is taken and cleared, and free from then on."""
        store.releasing_bytes += footprint
        heapq.heappush(self._matured, (when_ms, store.id, offset, footprint))

    def mature(self, *, now_ms: int, count_max: int) -> None:
        """Free cleared memory whose leases have ended, or have it cleared now; ``count_max`` slots at most."""
        while count_max > 0 and self._patient and self._patient[0][0] <= now_ms:
            count_max -= 1
            _, store_id, generation, offset = heapq.heappop(self._patient)
            store = self._by_id.get(store_id)
            if store is not None and generation in store.releasing:
                store.unsent.append((generation, offset))
                self.unsent = True
        while count_max > 0 and self._matured and self._matured[0][0] <= now_ms:
            count_max -= 1
            _, store_id, offset, footprint = heapq.heappop(self._matured)
            store = self._by_id.get(store_id)
            if store is not None and store.state is not StoreState.GONE:
                self._free(store, offset, footprint)

    @staticmethod
    def _free(store: Store, offset: int, footprint: int) -> None:
        store.releasing_bytes -= footprint
        store.allocator.free(offset, footprint)

    # Totals, over stores that can hold readable objects.

    def capacity_bytes(self) -> int:
        """Memory that is mounted and populated."""
        return sum(store.populated_bytes for store in self._by_id.values() if store.state in SERVING)

    def used_bytes(self) -> int:
        """What of it is neither free nor on its way back."""
        return sum(
            store.populated_bytes - store.allocator.free_bytes - store.releasing_bytes
            for store in self._by_id.values()
            if store.state in SERVING
        )

    def free_bytes(self) -> int:
        """Memory that can be allocated, now or when its store is READY."""
        return sum(s.allocator.free_bytes for s in self._by_id.values() if s.state in SERVING)

    def releasing_bytes(self) -> int:
        """Memory on its way back."""
        return sum(s.releasing_bytes for s in self._by_id.values() if s.state in SERVING)

    def check(self, held: dict[int, list[tuple[int, int]]], objects: dict[int, int]) -> None:
        """
        Assert that every byte of every store is free, held or on its way back, and nothing twice; for tests.

        Args:
            held: Offset and footprint of whatever is readable or being written, by store id.
            objects: How many of those are readable.
        """
        for store in self._by_id.values():
            if store.state is StoreState.GONE:
                continue
            leased = [(at, size) for _, store_id, at, size in self._matured if store_id == store.id]
            back = leased + [(release.offset, release.footprint) for release in store.releasing.values()]
            assert sum(size for _, size in back) == store.releasing_bytes
            assert store.objects == objects[store.id]
            at = 0
            for offset, size in sorted([*store.allocator.blocks(), *held[store.id], *back]):
                assert offset == at, "no byte has two owners, none has no owner"
                at += size
            assert at == store.populated_bytes
