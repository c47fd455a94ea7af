"""
Holds on stores: how an operator takes a store out of use, and has its objects forgotten.

::

    drain    one journal entry, one flip of the store's state: from the reply on nothing names it
      │
    LEASES   readers that were told of it before may go on: none is renewed, the last ends within LEASE_TTL_MS;
      │      puts under way there are revoked
    SWEEP    its objects leave the index in slices, and its node is told to clear their slots
      │
    COUNT    a second walk counts what still lies there; were it not 0, the sweep would begin again
      │
    DONE     safe to power off

``undrain`` may come at any time. What the sweep has not reached yet lies unchanged in the store's memory and is
readable again at once: nothing was written or freed there meanwhile, and a key that was put again elsewhere has
lost its old entry with that put. Puts that were revoked stay so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvops.errors import Refused, UsageError
from kvops.store.horizon import LeaseHorizon
from kvops.store.model import (
    Hold,
    HoldInfo,
    HoldKind,
    HoldReply,
    HoldState,
    StopCheck,
    StoreState,
)
from kvops.store.outbox import Outbox
from kvops.store.store_states import StoreStates
from kvops.store.stores import SERVING, Store, StoreTable
from kvops.store.sweep import Cause, Stage, Sweep, Sweeper

TARGETS_MAX: Final = 4_096  # of one request
TEXT_MAX: Final = 1_024  # of a reason or an owner


@dataclass(slots=True)
class _Progress:
    """What a hold's stores have come to, by name; survives their mounts."""

    sweeps: dict[str, Sweep] = field(default_factory=dict)
    objects_at_call: int = 0
    bytes_at_call: int = 0
    migrated: int = 0
    migrated_bytes: int = 0
    unmoved: int = 0
    finished: set[str] = field(default_factory=set)  # stores that have copied all they could


class Holds:
    """
    Every hold by target, and what operators may ask about them.

    Args:
        stores: The store table.
        sweeper: Empties what is drained.
        states: Let stores follow their holds.
        horizon: When the last lease ends that may have been granted until now.
        outbox: Where the journal's entries and events go.
    """

    def __init__(
        self,
        stores: StoreTable,
        sweeper: Sweeper,
        states: StoreStates,
        horizon: LeaseHorizon,
        outbox: Outbox,
    ) -> None:
        self._stores, self._sweeper, self._states = stores, sweeper, states
        self._horizon, self._outbox = horizon, outbox
        self._by_target: dict[str, Hold] = {}
        self._progress: dict[str, _Progress] = {}
        self._last: Hold | None = None  # with the highest number, even if it was lifted

    def rows(self) -> list[Hold]:
        """All that must be remembered: the holds, and the highest number ever given."""
        rows = list(self._by_target.values())
        if self._last is not None and self._last.state is HoldState.LIFTED:
            rows.insert(0, self._last)
        return rows

    def restore(self, holds: Iterable[Hold]) -> None:
        """Take over what a journal says, before any store is entered."""
        for hold in holds:
            self._enter(hold)

    def _enter(self, hold: Hold) -> None:
        if self._last is None or hold.number >= self._last.number:
            self._last = hold
        if hold.state is HoldState.LIFTED:
            if self._by_target.get(hold.target, hold).number <= hold.number:
                self._by_target.pop(hold.target, None)
                self._progress.pop(hold.target, None)
        else:
            self._by_target[hold.target] = hold
            self._progress.setdefault(hold.target, _Progress())

    def __len__(self) -> int:
        return len(self._by_target)

    # Which stores they mean.

    def _covers(self, hold: Hold, store: Store) -> bool:
        return hold.target == (store.mount.host if hold.host else store.mount.name)

    def _of(self, store: Store) -> list[Hold]:
        if not self._by_target:
            return []
        found = (self._by_target.get(store.mount.name), self._by_target.get(store.mount.host))
        return [hold for hold in found if hold is not None and self._covers(hold, store)]

    def _mounted(self, hold: Hold) -> list[Store]:
        alive = (store for store in self._stores if store.state is not StoreState.GONE)
        return [store for store in alive if self._covers(hold, store)]

    def _held(self, store: Store) -> HoldKind | None:
        """What the strictest hold on a store says now."""
        kinds = {
            HoldKind.CORDON if hold.state is HoldState.MIGRATING else hold.kind for hold in self._of(store)
        }
        return HoldKind.DRAIN if HoldKind.DRAIN in kinds else HoldKind.CORDON if kinds else None

    def _resolve_all(self, names: Sequence[str]) -> dict[str, tuple[bool, list[Store]]]:
        """
        The targets that names mean: by their own name, whether it is a host, and its mounted stores.

        Raises:
            UsageError: Nothing has that name.
        """
        if not 0 < len(names) <= TARGETS_MAX:
            raise UsageError(f"{len(names)} targets", fix=f"name 1 to {TARGETS_MAX}")
        by_name: dict[str, list[Store]] = {}
        by_host: dict[str, list[Store]] = {}
        for store in self._stores:
            if store.state is not StoreState.GONE:
                by_name.setdefault(store.mount.name, []).append(store)
                by_host.setdefault(store.mount.host, []).append(store)
        found: dict[str, tuple[bool, list[Store]]] = {}
        for name in names:
            held = self._by_target.get(name)
            if name in by_name or (held is not None and not held.host):
                found[name] = (False, by_name.get(name, []))
                continue
            if name in by_host or held is not None:
                found[name] = (True, by_host.get(name, []))
                continue
            host, _, number = name.rpartition("/")
            stores = [one for one in by_host.get(host, []) if str(one.mount.numa_node) == number]
            if len(stores) != 1:
                more = f", and {host} has {len(stores)} stores on NUMA node {number}" if stores else ""
                raise UsageError(f"no store or host is called {name}{more}", fix="kvops status names them")
            found[stores[0].mount.name] = (False, stores)
        return found

    # What operators ask.

    def hold(
        self,
        names: Sequence[str],
        kind: HoldKind,
        *,
        reason: str,
        owner: str,
        since: str,
        migrate: bool = False,
        bandwidth_bps: int = 0,
        force: Collection[str] = (),
        dry_run: bool = False,
        now_ms: int,
    ) -> HoldReply:
        """
        Drain or cordon; costs the same whatever the stores hold. Repeating it changes nothing.

        Args:
            names: Stores, hosts, or ``HOST/NUMA``.
            kind: What to keep them from.
            reason: For whoever finds the hold; of one that is there already it stays.
            owner: Who asks.
            since: Now, RFC 3339.
            migrate: Copy the objects elsewhere before the drain; until then the stores are only cordoned.
            bandwidth_bps: Of the migration; 0: no limit.
            force: Names of checks that do not refuse.
            dry_run: Say what it would do.
            now_ms: On the master's clock.

        Raises:
            UsageError: An unknown name or check.
            Refused: A check says no, or a cordon is asked for what is drained already.
        """
        if len(reason) > TEXT_MAX or len(owner) > TEXT_MAX:
            raise UsageError(f"a reason or owner of more than {TEXT_MAX} characters", fix="shorten it")
        targets = self._resolve_all(names)
        checks = self._checks(targets, kind)
        unknown = set(force) - {check.name for check in checks}
        if unknown:
            known = ", ".join(check.name for check in checks)
            raise UsageError(f"no check is called {', '.join(sorted(unknown))}", fix=f"checks are: {known}")
        number = 1 + (self._last.number if self._last is not None else 0)
        state = HoldState.DRAINING if kind is HoldKind.DRAIN else HoldState.CORDONED
        changed, unchanged = [], []
        for target, (host, _) in targets.items():
            old = self._by_target.get(target)
            if old is not None and old.kind is HoldKind.DRAIN and kind is HoldKind.CORDON:
                raise Refused(
                    f"{target} is held by drain #{old.number} ({old.reason or 'no reason given'})",
                    fix=f"kvops undrain {target}, then cordon it",
                )
            if (
                old is not None
                and old.kind is kind
                and not (
                    old.state is HoldState.MIGRATING and not migrate  # no longer worth waiting for
                )
            ):
                unchanged.append(target)
                continue
            changed.append(
                Hold(
                    number=number if old is None else old.number,
                    target=target,
                    host=host,
                    kind=kind,
                    state=HoldState.MIGRATING if migrate and targets[target][1] else state,
                    reason=reason or (old.reason if old is not None else ""),
                    owner=owner,
                    since=since,
                    migrate=migrate,
                    bandwidth_bps=bandwidth_bps,
                )
            )
        failed = [check for check in checks if not check.ok and check.name not in force]
        if changed and failed and not dry_run:
            raise Refused(
                "; ".join(check.text for check in failed),
                fix=f"{failed[0].fix}, or add --force {' --force '.join(check.name for check in failed)}",
            )
        if changed and not dry_run:
            for hold in changed:
                self._enter(hold)
            self._outbox.remember_holds(changed)
            for hold in changed:
                progress = self._progress[hold.target]
                stores = targets[hold.target][1]
                progress.objects_at_call = sum(store.objects for store in stores)
                progress.bytes_at_call = sum(map(_used_bytes, stores))
                verb = "cordoned" if hold.kind is HoldKind.CORDON else "drained"
                self._outbox.event(
                    now_ms, f"hold.{verb}", hold.target, number=hold.number, reason=reason, owner=owner
                )
                for store in stores:
                    self._apply(store, now_ms)
            self._advance(now_ms)
        rows = [
            self.info(self._by_target[target], now_ms=now_ms)
            for target in targets
            if target in self._by_target
        ]
        if dry_run:
            rows = [self._would(hold, now_ms) for hold in changed] + [
                row for row in rows if row.target in unchanged
            ]
        return self._reply(rows, checks, unchanged, targets)

    def lift(self, names: Sequence[str], *, owner: str, dry_run: bool = False, now_ms: int) -> HoldReply:
        """
        Undrain, or uncordon: the stores take part again, with all that was not swept yet.

        Raises:
            UsageError: An unknown name.
            Refused: A store is held by a hold on its host, which was not named.
        """
        targets = self._resolve_all(names)
        lifted: dict[str, Hold] = {}
        for target, (host, stores) in targets.items():
            if target in self._by_target:
                lifted[target] = self._by_target[target]
            if host:  # and what was held store by store
                more = (self._by_target.get(store.mount.name) for store in stores)
                lifted |= {hold.target: hold for hold in more if hold is not None and not hold.host}
        unchanged = [
            target
            for target, (_, stores) in targets.items()
            if target not in lifted and not any(one.mount.name in lifted for one in stores)
        ]
        for target, (_, stores) in targets.items():
            for store in stores:
                for hold in self._of(store):
                    if hold.target not in lifted:
                        raise Refused(
                            f"{target} is held by #{hold.number} on the whole host {hold.target}",
                            fix=f"kvops undrain {hold.target}",
                        )
        rows = [self.info(hold, now_ms=now_ms) for hold in lifted.values()]
        if lifted and not dry_run:
            ended = [msgspec.structs.replace(hold, state=HoldState.LIFTED) for hold in lifted.values()]
            stores = [store for hold in lifted.values() for store in self._mounted(hold)]
            for hold in ended:
                self._enter(hold)
            self._outbox.remember_holds(ended)
            for hold in ended:
                self._outbox.event(now_ms, "hold.lifted", hold.target, number=hold.number, owner=owner)
            for store in stores:
                self._apply(store, now_ms)
            rows = [msgspec.structs.replace(row, state=HoldState.LIFTED) for row in rows]
        return self._reply(rows, [], unchanged, targets)

    def drains_host(self, host: str) -> bool:
        """Whether a host as a whole is being taken away."""
        hold = self._by_target.get(host)
        return hold is not None and hold.host and hold.kind is HoldKind.DRAIN

    def ok_to_stop(self, names: Sequence[str], *, now_ms: int) -> HoldReply:
        """
        What stopping these would do to the rest of the pool.

        Raises:
            UsageError: An unknown name.
        """
        targets = self._resolve_all(names)
        checks = self._checks(targets, HoldKind.DRAIN)
        taken = {store.mount.name for _, stores in targets.values() for store in stores}
        away = [
            store.mount.name
            for store in self._stores
            if store.state is StoreState.SUSPECTED and store.mount.name not in taken
        ]
        checks.append(
            StopCheck(
                name="others-ready",
                ok=not away,
                text=f"away already: {', '.join(away)}" if away else "no other store is away",
                fix="wait until they are back" if away else "",
            )
        )
        rows = [self.info(hold, now_ms=now_ms) for target in targets if (hold := self._by_target.get(target))]
        return self._reply(rows, checks, [], targets)

    def every(self, *, now_ms: int) -> list[HoldInfo]:
        """All holds, by number."""
        holds = sorted(self._by_target.values(), key=lambda hold: (hold.number, hold.target))
        return [self.info(hold, now_ms=now_ms) for hold in holds]

    def _checks(self, targets: dict[str, tuple[bool, list[Store]]], kind: HoldKind) -> list[StopCheck]:
        taken = {store.id for _, stores in targets.values() for store in stores}
        serving = any(store.state in SERVING for store in self._stores)
        if kind is HoldKind.DRAIN:
            left = [store for store in self._stores if store.id not in taken and store.state in SERVING]
        else:
            left = [store for store in self._stores if store.id not in taken and store.takes_objects]
        does = "serves" if kind is HoldKind.DRAIN else "takes objects"
        ok = bool(left) or not serving
        return [
            StopCheck(
                name="last-store",
                ok=ok,
                text=f"{len(left)} store{'' if len(left) == 1 else 's'} remain"
                if ok
                else f"no store would be left that {does}",
                fix="" if ok else "bring in another store first",
            )
        ]

    def _reply(
        self,
        rows: list[HoldInfo],
        checks: list[StopCheck],
        unchanged: list[str],
        targets: dict[str, tuple[bool, list[Store]]],
    ) -> HoldReply:
        stores = {store.id: store for _, some in targets.values() for store in some}
        alive = [store for store in self._stores if store.state in SERVING or store.id in stores]
        return HoldReply(
            holds=rows,
            checks=checks,
            unchanged=unchanged,
            capacity_bytes=sum(store.populated_bytes for store in stores.values()),
            pool_bytes=sum(store.populated_bytes for store in alive),
            pool_used_bytes=sum(_used_bytes(store) for store in alive),
        )

    def info(self, hold: Hold, *, now_ms: int) -> HoldInfo:
        """A hold with its progress."""
        stores = self._mounted(hold)
        progress = self._progress.get(hold.target) or _Progress()
        sweeps = list(progress.sweeps.values())
        counted = bool(sweeps) and all(sweep.left >= 0 for sweep in sweeps)
        waiting = [sweep.not_before_ms - now_ms for sweep in sweeps if sweep.stage is Stage.LEASES]
        fields: dict[str, Any] = msgspec.structs.asdict(hold)
        objects = sum(store.objects for store in stores)
        return HoldInfo(
            **fields,
            stores=[store.mount.name for store in stores],
            objects_at_call=(
                progress.objects_at_call or sum(sweep.objects_at_call for sweep in sweeps) or objects
            ),
            bytes_at_call=(
                progress.bytes_at_call
                or sum(sweep.bytes_at_call for sweep in sweeps)
                or sum(map(_used_bytes, stores))
            ),
            leases_left_ms=max(0, *waiting, 0),
            swept=sum(sweep.swept for sweep in sweeps),
            left=sum(sweep.left for sweep in sweeps) if counted else -1,
            objects=objects,
            migrated=progress.migrated,
            migrated_bytes=progress.migrated_bytes,
            unmoved=progress.unmoved,
        )

    def _would(self, hold: Hold, now_ms: int) -> HoldInfo:
        info = self.info(hold, now_ms=now_ms)
        return msgspec.structs.replace(info, leases_left_ms=max(0, self._horizon.end_ms(now_ms) - now_ms))

    # Migration: done by the stores themselves, which ask for a new place object by object.

    def migrating(self, store: Store) -> Hold | None:
        """The hold for which a store is to copy its objects elsewhere."""
        if not self._by_target:
            return None
        return next((hold for hold in self._of(store) if hold.state is HoldState.MIGRATING), None)

    def moved(self, store: Store, size_bytes: int) -> None:
        """An object of a store has become readable elsewhere in its place."""
        for hold in self._of(store):
            if hold.migrate:
                self._progress[hold.target].migrated += 1
                self._progress[hold.target].migrated_bytes += size_bytes

    def migrated(self, store: Store, *, number: int, unmoved: int, now_ms: int) -> None:
        """A store has copied what it could; once all stores of a hold have, the drain proper begins."""
        for hold in self._of(store):
            progress = self._progress[hold.target]
            name = store.mount.name
            if hold.state is not HoldState.MIGRATING or hold.number != number or name in progress.finished:
                continue
            progress.finished.add(name)
            progress.unmoved += unmoved
            if all(one.mount.name in progress.finished for one in self._mounted(hold)):
                self._move(hold, HoldState.DRAINING, now_ms)
                for one in self._mounted(hold):
                    self._apply(one, now_ms)
                self._advance(now_ms)

    # What happens to stores.

    def entered(self, store: Store, *, now_ms: int) -> None:
        """A store was entered, by a journal or by its mount: it is held as its name or host is."""
        if self._by_target:
            self._apply(store, now_ms)

    def lost(self, store: Store, *, now_ms: int) -> None:
        """A store's memory is gone; its holds stay."""
        sweep = Sweep(store, Cause.LOST)
        before: Sweep | None = None
        for hold in self._of(store):
            sweeps = self._progress[hold.target].sweeps
            before = sweeps.get(store.mount.name) or before
            if before is not None and before.store is store:
                sweep.swept, sweep.objects_at_call = before.swept, before.objects_at_call
                sweep.bytes_at_call = before.bytes_at_call
                if before.stage is Stage.DONE:
                    sweep.left = 0
                sweeps[store.mount.name] = sweep
            if hold.kind is HoldKind.DRAIN and hold.state in (HoldState.DRAINING, HoldState.MIGRATING):
                self._move(hold, HoldState.LOST, now_ms)
        self._sweeper.begin(sweep)

    def swept(self, sweep: Sweep, *, now_ms: int) -> None:
        """A sweep has ended."""
        if sweep.cause is Cause.DRAIN:
            self._outbox.event(
                now_ms, "store.drained", sweep.store.mount.name, swept=sweep.swept, left=sweep.left
            )
            self._advance(now_ms)

    def _apply(self, store: Store, now_ms: int) -> None:
        """Let a store be as its holds say."""
        held = self._held(store)
        if store.held is held:
            if held is HoldKind.DRAIN:  # one more hold, or one less, on a store that is drained already
                self._share(store)
            return
        was, store.held = store.held, held
        self._stores.epoch += 1  # orders of placement follow it
        self._states.settle(store, now_ms=now_ms)
        if held is HoldKind.DRAIN:
            sweep = Sweep(
                store,
                Cause.DRAIN,
                not_before_ms=self._horizon.end_ms(now_ms),
                objects_at_call=store.objects,
                bytes_at_call=_used_bytes(store),
            )
            for hold in self._of(store):
                if hold.kind is HoldKind.DRAIN:
                    self._progress[hold.target].sweeps[store.mount.name] = sweep
                    if hold.state in (HoldState.DRAINED, HoldState.LOST):  # it came back
                        self._move(hold, HoldState.DRAINING, now_ms)
            self._sweeper.begin(sweep)
        elif was is HoldKind.DRAIN:
            self._sweeper.cancel(store)
            for progress in self._progress.values():
                progress.sweeps.pop(store.mount.name, None)

    def _share(self, store: Store) -> None:
        """Another hold on a store that is being drained sees the same sweep."""
        sweeps = [
            sweep
            for hold in self._of(store)
            if (sweep := self._progress[hold.target].sweeps.get(store.mount.name)) is not None
        ]
        for hold in self._of(store):
            if sweeps and hold.kind is HoldKind.DRAIN:
                self._progress[hold.target].sweeps.setdefault(store.mount.name, sweeps[0])

    def _advance(self, now_ms: int) -> None:
        """Holds of which every store is empty are drained."""
        for hold in list(self._by_target.values()):
            if hold.state is not HoldState.DRAINING:
                continue
            names = {store.mount.name for store in self._mounted(hold)}
            sweeps = self._progress[hold.target].sweeps
            if all(name in sweeps and sweeps[name].stage is Stage.DONE for name in names):
                self._move(hold, HoldState.DRAINED, now_ms)

    def _move(self, hold: Hold, state: HoldState, now_ms: int) -> None:
        moved = msgspec.structs.replace(hold, state=state)
        self._enter(moved)
        self._outbox.remember_holds([moved])
        self._outbox.event(now_ms, f"hold.{state}", hold.target, number=hold.number, reason=hold.reason)


def _used_bytes(store: Store) -> int:
    return store.populated_bytes - store.allocator.free_bytes - store.releasing_bytes
