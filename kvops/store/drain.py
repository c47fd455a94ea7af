"""
Holds on stores, and the sweeps that follow: how a store is taken out of use and its metadata is forgotten.

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

A store that was lost, or that came back without objects the journal had, is swept by the same walk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvops.errors import Refused, UsageError
from kvops.store.model import (
    Hold,
    HoldInfo,
    HoldKind,
    HoldReply,
    HoldState,
    Slots,
    StopCheck,
    StoreState,
)
from kvops.store.objects import Objects
from kvops.store.puts import Put, PutTable
from kvops.store.stores import SERVING, Store, StoreTable

SWEEP_OBJECTS: Final = 128  # a slice; each is dropped by itself, about 3 µs
SWEEP_SLOTS: Final = 4_096  # … looked at
COUNT_SLOTS: Final = 16_384
REVOKE_PUTS: Final = 64
BUSY_INTERVAL_MS: Final = 15  # between slices while requests come: well under 1 % of them meet one
TARGETS_MAX: Final = 4_096  # of one request
TEXT_MAX: Final = 1_024  # of a reason or an owner


class Stage(Enum):
    """How far a sweep has come."""

    LEASES = "leases"
    SWEEP = "sweep"
    COUNT = "count"
    DONE = "done"


class Cause(Enum):
    """Why a store is swept."""

    LOST = "lost"  # its memory is gone
    UNANNOUNCED = "unannounced"  # the journal knew objects that its node does not hold
    DRAIN = "drain"


@dataclass(slots=True, eq=False)
class Sweep:
    """One walk over the index for one store."""

    store: Store
    cause: Cause
    not_before_ms: int = 0
    stage: Stage = Stage.SWEEP
    at: int = 1  # the next slot
    found: int = 0  # by the count so far
    swept: int = 0
    left: int = -1  # by the last whole count
    objects_at_call: int = 0
    bytes_at_call: int = 0
    puts: list[Put] | None = None  # to look through for those to revoke; None: not listed yet

    @property
    def gives_back(self) -> bool:
        """Whether the memory of what is swept comes back to the store's allocator, which has it as taken."""
        return self.cause is Cause.DRAIN or (self.cause is Cause.UNANNOUNCED and self.store.trusted)


class Sweeper:
    """
    Sweeps under way, a slice at a time.

    Args:
        objects: The index and what stands beside it.
        stores: The store table.
        puts: Puts under way.
        drop: Takes objects that lie on one store alone out of the index, and has their memory cleared: store,
            slots, now_ms.
        unindex: Takes objects out of the index whose memory is gone.
        unplace: Forgets one of an object's replicas: store, slot.
        release: Has one replica's memory cleared: store, slot, now_ms.
        revoke: Takes one store's replica from a put: put, store, now_ms.
        done: Told when a sweep has ended.
        requests: How many clients' requests there have been: sweeps go slowly while there are more.
    """

    def __init__(
        self,
        objects: Objects,
        stores: StoreTable,
        puts: PutTable,
        *,
        drop: Callable[[Store, Slots, int], None],
        unindex: Callable[[Slots], object],
        unplace: Callable[[Store, int], None],
        release: Callable[[Store, int, int], None],
        revoke: Callable[[Put, Store, int], None],
        done: Callable[[Sweep, int], None],
        requests: Callable[[], int],
    ) -> None:
        self.swept_total = 0
        self._objects, self._stores, self._puts = objects, stores, puts
        self._drop, self._unindex, self._release = drop, unindex, release
        self._unplace = unplace
        self._revoke, self._done, self._requests = revoke, done, requests
        self._active: deque[Sweep] = deque()
        self._waiting: list[Sweep] = []  # for leases, or for an announcement
        self._last_ms = -BUSY_INTERVAL_MS
        self._asked = -1

    def begin(self, sweep: Sweep) -> None:
        """Enter a sweep; one that the same store had for another cause ends, unless it is an announcement's."""
        if sweep.cause is not Cause.UNANNOUNCED:
            self.cancel(sweep.store, keep_announcement=sweep.cause is Cause.DRAIN)
        if sweep.cause is Cause.DRAIN:
            sweep.stage = Stage.LEASES
            self._waiting.append(sweep)
        else:
            self._active.append(sweep)

    def cancel(self, store: Store, *, keep_announcement: bool = True) -> None:
        """End a store's sweeps where they are."""

        def kept(sweep: Sweep) -> bool:
            announcement = keep_announcement and sweep.cause is Cause.UNANNOUNCED
            return sweep.store is not store or announcement

        self._active = deque(filter(kept, self._active))
        self._waiting = list(filter(kept, self._waiting))

    @property
    def busy(self) -> bool:
        """Whether any sweep has slices to do now."""
        return bool(self._active) or any(sweep.puts != [] for sweep in self._waiting)

    def due(self, now_ms: int) -> bool:
        """Whether a slice should be done now."""
        if not (self._active or self._waiting):
            return False
        if not (self.busy or any(self._may_sweep(sweep, now_ms) for sweep in self._waiting)):
            return False
        return self._requests() == self._asked or now_ms - self._last_ms >= BUSY_INTERVAL_MS

    @staticmethod
    def _may_sweep(sweep: Sweep, now_ms: int) -> bool:
        store = sweep.store
        return now_ms >= sweep.not_before_ms and not store.announcing and store.announced is None

    def step(self, *, now_ms: int) -> None:
        """One slice, if it is time for one."""
        if not self.due(now_ms):
            return
        self._last_ms, self._asked = now_ms, self._requests()
        for sweep in [one for one in self._waiting if one.puts != []]:
            self._revoke_some(sweep, now_ms)
            return
        ripe = [one for one in self._waiting if self._may_sweep(one, now_ms)]
        for sweep in ripe:
            sweep.stage = Stage.SWEEP
            sweep.objects_at_call = sweep.objects_at_call or sweep.store.objects  # after a master's restart
            self._waiting.remove(sweep)
            self._active.append(sweep)
        if not self._active:
            return
        sweep = self._active.popleft()
        over = self._sweep_some(sweep, now_ms) if sweep.stage is Stage.SWEEP else self._count_some(sweep)
        if not over:
            self._active.append(sweep)
            return
        sweep.stage = Stage.DONE
        self._done(sweep, now_ms)

    def _revoke_some(self, sweep: Sweep, now_ms: int) -> None:
        if sweep.puts is None:
            sweep.puts = list(self._puts)
        for put in sweep.puts[-REVOKE_PUTS:]:
            if self._puts.get(put.digest) is put:
                self._revoke(put, sweep.store, now_ms)
        del sweep.puts[-REVOKE_PUTS:]

    def _sweep_some(self, sweep: Sweep, now_ms: int) -> bool:
        """Forget some of a store's objects; whether the whole sweep is over."""
        store = sweep.store
        slots, stop = self._objects.on_store(store.id, sweep.at, SWEEP_SLOTS)
        if sweep.cause is Cause.UNANNOUNCED and store.announced is not None:
            slots = slots[~store.announced[slots]]
        if len(slots) > SWEEP_OBJECTS:
            slots = slots[:SWEEP_OBJECTS]
            stop = int(slots[-1]) + 1
        last: NDArray[np.bool_] = ~self._objects.replicated(slots)  # of each, nothing lies elsewhere
        for at in np.flatnonzero(~last).tolist():
            slot = int(slots[at])
            places = self._objects.places(slot)
            if not any(place[0] == store.id for place in places):
                slots[at] = 0
            elif all(place[0] == store.id for place in places):
                last[at] = True
            else:
                if sweep.gives_back:
                    self._release(store, slot, now_ms)
                self._unplace(store, slot)
        dead = slots[last & (slots != 0)]
        if len(dead):
            if sweep.gives_back:
                self._drop(store, dead, now_ms)
            else:
                self._unindex(dead)  # no memory comes back: it is lost, or given anew
            self.swept_total += len(dead)
        sweep.swept += int(np.count_nonzero(slots))
        sweep.at = stop
        if stop < self._objects.index.slots_used:
            return False
        if sweep.cause is Cause.UNANNOUNCED:
            return True
        sweep.stage, sweep.at, sweep.found = Stage.COUNT, 1, 0
        return False

    def _count_some(self, sweep: Sweep) -> bool:
        """Count what still lies on the store; whether it was counted to the end and nothing does."""
        slots, stop = self._objects.on_store(sweep.store.id, sweep.at, COUNT_SLOTS)
        replicated = self._objects.replicated(slots)
        sweep.found += len(slots) - int(np.count_nonzero(replicated))
        for slot in slots[replicated].tolist():
            sweep.found += any(place[0] == sweep.store.id for place in self._objects.places(slot))
        sweep.at = stop
        if stop < self._objects.index.slots_used:
            return False
        sweep.left = sweep.found
        if sweep.left:
            sweep.stage, sweep.at = Stage.SWEEP, 1
            return False
        return True


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
        remember: Puts holds into the journal, as one entry.
        settle: Gives a store the state that follows from its hold and its life: store, now_ms.
        leases_end_ms: When the last lease that may have been granted until now ends: now_ms.
        event: Notes a change: now_ms, event, subject, detail.
    """

    def __init__(
        self,
        stores: StoreTable,
        sweeper: Sweeper,
        *,
        remember: Callable[[list[Hold]], None],
        settle: Callable[[Store, int], None],
        leases_end_ms: Callable[[int], int],
        event: Callable[..., None],
    ) -> None:
        self._stores, self._sweeper = stores, sweeper
        self._remember, self._settle = remember, settle
        self._leases_end_ms, self._event = leases_end_ms, event
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
            self._remember(changed)
            for hold in changed:
                progress = self._progress[hold.target]
                stores = targets[hold.target][1]
                progress.objects_at_call = sum(store.objects for store in stores)
                progress.bytes_at_call = sum(map(_used_bytes, stores))
                verb = "cordoned" if hold.kind is HoldKind.CORDON else "drained"
                self._event(
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
            self._remember(ended)
            for hold in ended:
                self._event(now_ms, "hold.lifted", hold.target, number=hold.number, owner=owner)
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
        return msgspec.structs.replace(info, leases_left_ms=max(0, self._leases_end_ms(now_ms) - now_ms))

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
            self._event(now_ms, "store.drained", sweep.store.mount.name, swept=sweep.swept, left=sweep.left)
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
        self._settle(store, now_ms)
        if held is HoldKind.DRAIN:
            sweep = Sweep(
                store,
                Cause.DRAIN,
                not_before_ms=self._leases_end_ms(now_ms),
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
        self._remember([moved])
        self._event(now_ms, f"hold.{state}", hold.target, number=hold.number, reason=hold.reason)


def _used_bytes(store: Store) -> int:
    return store.populated_bytes - store.allocator.free_bytes - store.releasing_bytes
