"""The state that follows from a store's hold, its connection and what its readers say of it."""

from __future__ import annotations

from kvops.limits import STORE_SILENT_MS
from kvops.store.model import StoreState
from kvops.store.outbox import Outbox
from kvops.store.placer import Placer
from kvops.store.stores import Store, StoreTable


def state_when_heard(store: Store, now_ms: int) -> StoreState:
    """The state of a store that has just spoken to us."""
    if store.hidden_on_purpose:
        return StoreState.DRAINING
    closed = (store.announcing and not store.trusted) or now_ms < store.closed_until_ms
    return StoreState.ANNOUNCING if closed else StoreState.READY


class StoreStates:
    """Changes stores' states; lookups and placement follow at once."""

    def __init__(self, stores: StoreTable, placer: Placer, outbox: Outbox) -> None:
        self._stores, self._placer, self._outbox = stores, placer, outbox

    def settle(self, store: Store, *, now_ms: int) -> None:
        """Give a store the state that its hold and its life now ask for."""
        if store.state is StoreState.GONE:
            return
        state = state_when_heard(store, now_ms)
        away = store.conn == 0 or now_ms - store.seen_ms >= STORE_SILENT_MS or now_ms < store.suspect_until_ms
        if away and state is not StoreState.DRAINING:
            state = StoreState.SUSPECTED
        was = store.state
        self._stores.set_state(store, state)
        if was is StoreState.DRAINING and state is StoreState.READY:
            self._placer.ready(store, now_ms=now_ms)

    def open(self, store: Store, *, now_ms: int) -> None:
        """Allocate on a store as soon as nobody can hold its free memory by a lease of an earlier master."""
        if state_when_heard(store, now_ms) is StoreState.READY:
            self._stores.set_state(store, StoreState.READY)
            self._placer.ready(store, now_ms=now_ms)
            self._outbox.event(now_ms, "store.ready", store.mount.name, id=store.id, objects=store.objects)

    def suspect(self, store: Store, *, reason: str, now_ms: int) -> None:
        """Hide a store that may come back with all it holds."""
        self._stores.set_state(store, StoreState.SUSPECTED)
        self._outbox.event(now_ms, "store.suspected", store.mount.name, reason=reason)
