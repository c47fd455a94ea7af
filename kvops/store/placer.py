"""Memory for new objects: the stores that take any now, in a writer's order, and what new ones may take."""

from __future__ import annotations

from collections.abc import Sequence

from kvops.store.model import PlacementPolicy, StoreId
from kvops.store.objects import Place
from kvops.store.placement import Candidate, Placement, Ramp, Writer, choose
from kvops.store.stores import Store, StoreTable


class Placer:
    """
    Finds places in the pool.

    Args:
        stores: The store table.
        policy: In which order stores are tried.
        ramp_ms: For how long an empty store that joins a pool in use is held back.
        seed: Of random orders.
    """

    def __init__(self, stores: StoreTable, policy: PlacementPolicy, *, ramp_ms: int, seed: int) -> None:
        self._stores = stores
        self._placement = Placement(policy, seed=seed)
        self._ramp = Ramp(ramp_ms=ramp_ms)
        self._candidates: tuple[int, list[Candidate]] = (0, [])

    @property
    def random(self) -> bool:
        """Whether every object is to have an order of its own."""
        return self._placement.policy is PlacementPolicy.RANDOM

    def order(self, writer: Writer) -> tuple[Candidate, ...]:
        """Every store that takes objects now, the one to try first in front."""
        return self._placement.order(writer, self._ready(), epoch=self._stores.epoch)

    def _ready(self) -> list[Candidate]:
        epoch, candidates = self._candidates
        if epoch != self._stores.epoch:
            candidates = [
                Candidate(store.id, store.mount.host, store.mount.numa_node, store.mount.name)
                for store in self._stores
                if store.takes_objects
            ]
            self._candidates = (self._stores.epoch, candidates)
        return candidates

    def place(
        self, order: Sequence[Candidate], writer: Writer, *, footprint: int, replicas: int
    ) -> list[Place] | None:
        """Memory for every replica, taken from its store; None, with nothing taken, when there is too little."""
        ramp = self._ramp
        if not ramp.active:
            return choose(order, self._stores.allocators, footprint=footprint, replicas=replicas)
        places = choose(
            order,
            self._stores.allocators,
            footprint=footprint,
            replicas=replicas,
            admits=lambda store: ramp.admits(store, writer, store_count=len(order)),
        )
        if places is not None:
            ramp.note(store_id for store_id, _ in places)
        return places

    def ready(self, store: Store, *, now_ms: int) -> None:
        """Hold back an empty store that joins a pool in use; where all is new, there is nothing to protect."""
        others = (other for other in self._stores if other is not store and other.takes_objects)
        if not store.objects and any(other.objects for other in others):
            self._ramp.join(store.id, now_ms=now_ms)

    def lost(self, store_id: StoreId) -> None:
        """A store takes no objects any more."""
        self._ramp.leave(store_id)

    def tick(self, *, now_ms: int) -> None:
        """End the ramps whose time is over."""
        self._ramp.expire(now_ms=now_ms)
