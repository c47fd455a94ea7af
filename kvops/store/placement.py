"""
In which order the stores of a pool are offered an object, and which of them take it.

*Local-first*: the store on the writer's own NUMA node, then its host's others, then the other hosts, in
an order that is fixed for the writer and different between writers. Full stores are passed over. One
request's pages so stay on one or two hosts, and one dead host costs about its own share of prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from xxhash import xxh3_64_intdigest

from kvops.store.allocator import Allocator
from kvops.store.model import PlacementPolicy, StoreId

WRITERS_CACHED_MAX: Final = 4_096
RAMP_MS: Final = 60_000
RAMP_SHARE_OF_FAIR: Final = 2.0  # a joining store gets at most this much more than its fair share


@dataclass(frozen=True, slots=True)
class Writer:
    """Where an engine runs: all its ranks count as one writer."""

    host: str  # logical; "" when unknown
    numa_node: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A store that may take objects."""

    id: StoreId
    host: str
    numa_node: int
    name: str


class Placement:
    """Orders stores for writers. One policy a master; no clock or I/O."""

    def __init__(self, policy: PlacementPolicy, *, seed: int = 0) -> None:
        self.policy = policy
        self._rng = Random(seed)
        self._epoch = -1
        self._orders: dict[Writer, tuple[Candidate, ...]] = {}

    def order(self, writer: Writer, stores: Sequence[Candidate], *, epoch: int) -> tuple[Candidate, ...]:
        """
        All ``stores``, the one to try first in front.

        Args:
            writer: Who puts.
            stores: Every store that may take objects now.
            epoch: Grows with every change of ``stores``; until then a writer's order is remembered.

        With ``random``, another order at every call: call it for each object.
        """
        if self.policy is PlacementPolicy.RANDOM:
            return tuple(self._rng.sample(stores, len(stores)))
        if epoch != self._epoch or len(self._orders) >= WRITERS_CACHED_MAX:
            self._orders.clear()
            self._epoch = epoch
        found = self._orders.get(writer)
        if found is None:
            found = self._orders[writer] = local_first(writer, stores)
        return found


def local_first(writer: Writer, stores: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Own NUMA node, own host, then host by host as the rendezvous hash of writer and host has it."""

    def rank(store: Candidate) -> tuple[int, int, str, int, str]:
        away = 2 if store.host != writer.host else 1 if store.numa_node != writer.numa_node else 0
        # The hash of a host comes before that of a store: a host's stores stay together.
        host = _weight(writer.host, store.host) if away == 2 else 0
        return away, host, store.host, _weight(writer.host, store.name), store.name

    return tuple(sorted(stores, key=rank))


def _weight(writer_host: str, other: str) -> int:
    # Highest random weight (Thaler and Ravishankar 1998), lowest first: a host that leaves moves only its
    # own share.
    return xxh3_64_intdigest(f"{len(writer_host)}:{writer_host}{other}".encode())


def choose(
    order: Sequence[Candidate],
    allocators: Mapping[StoreId, Allocator],
    *,
    footprint: int,
    replicas: int = 1,
    admits: Callable[[Candidate], bool] | None = None,
) -> list[tuple[StoreId, int]] | None:
    """
    Find memory for every replica, on distinct hosts.

    Args:
        order: Stores as ``Placement.order`` gave them.
        allocators: Of these stores.
        footprint: Bytes that a replica takes.
        replicas: How many are wanted, 1 or more.
        admits: Whether a store may take the object at all; ``Ramp.admits`` while one is active.

    Returns:
        Store and offset of each replica, in order; None, with everything given back, when there are too few.
    """
    assert replicas > 0, "an object has a replica"
    chosen: list[tuple[StoreId, int]] = []
    hosts: set[str] = set()
    for store in order:
        if store.host in hosts or (admits is not None and not admits(store)):
            continue
        offset = allocators[store.id].allocate(footprint)
        if offset is None:
            continue
        chosen.append((store.id, offset))
        if len(chosen) == replicas:
            return chosen
        hosts.add(store.host)
    for store_id, offset in chosen:
        allocators[store_id].free(offset, footprint)
    return None


class Ramp:
    """
    Holds back writes to stores that have just joined empty.

    Once the pool is full, an empty store is the only one with room in every writer's order: it would take all
    new objects, and every writer would depend on one host. While it is held back, eviction makes the room
    instead. In a pool of new stores alone, some store always admits the next object.
    """

    def __init__(self, *, ramp_ms: int = RAMP_MS) -> None:
        self._ramp_ms = ramp_ms
        self._joined: dict[StoreId, _Joining] = {}

    def join(self, store: StoreId, *, now_ms: int) -> None:
        """Begin the ramp of a store, if there are to be any."""
        if self._ramp_ms:
            self._joined[store] = _Joining(until_ms=now_ms + self._ramp_ms)

    def leave(self, store: StoreId) -> None:
        """Forget a store, joining or not."""
        self._joined.pop(store, None)

    @property
    def active(self) -> bool:
        """Whether any store is ramping: while none is, ``choose`` needs no ``admits``."""
        return bool(self._joined)

    def expire(self, *, now_ms: int) -> None:
        """End the ramps whose time is over."""
        self._joined = {store: ramp for store, ramp in self._joined.items() if now_ms < ramp.until_ms}

    def admits(self, store: Candidate, writer: Writer, *, store_count: int) -> bool:
        """Whether the store may take one of the pool's new objects; its own host's writers always may."""
        ramp = self._joined.get(store.id)
        if ramp is None or store.host == writer.host:
            return True
        return ramp.taken * store_count <= RAMP_SHARE_OF_FAIR * (ramp.seen + 1)

    def note(self, chosen: Iterable[StoreId]) -> None:
        """Count one new object and the stores that took it."""
        taken = set(chosen)
        for store, ramp in self._joined.items():
            ramp.seen += 1
            ramp.taken += store in taken


@dataclass(slots=True)
class _Joining:
    until_ms: int
    seen: int = 0
    taken: int = 0
