"""
What must hold, whatever goes wrong: told of all that clients hear and of all that masters and stores do.

The cheap rules are checked as things happen, those that walk everything now and then and when all is quiet:

====================  ==========================================================================================
``one leader``        no two masters answer a mutation in one term, and none after a later term's has
``generations``       no generation is granted twice
``no other bytes``    a hit holds exactly the bytes that the put of that generation wrote
``no resurrection``   once a remove has returned, no later lookup names what it removed
``leases``            until a reader's lease ends its memory is given to nobody else, and its object not evicted
``drained``           once a drain has returned nothing is read from that store or placed there, until it is undone
``cleared``           a node that confirms a FREE has cleared the header
``accounts``          every byte of every store is free, held or on its way back, and nothing twice
``nothing lost``      an object that was acknowledged is readable while its memory lives, unless it was evicted,
                      removed, replaced or has expired
``no leak``           when all is quiet nodes hold what the master names, and nothing else
``replication``       when all is quiet every standby knows what the leader knows
``liveness``          when the faults have stopped, all of the core serves and is served
====================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvops.chaos.sim.clock import Violation
from kvops.limits import DIGEST_BYTES, LEASE_MARGIN_MS
from kvops.net.wire import Kind
from kvops.store.client_core import Located
from kvops.store.journal import Kind as JournalKind
from kvops.store.keys import NAMESPACE_DEFAULT, index_digests
from kvops.store.master_core import MasterCore
from kvops.store.model import Outcome, Reason, StoreInfo, StoreState, chunk_of
from kvops.store.node_core import Write
from kvops.store.objects import Place
from kvops.store.outbox import JournalEntry
from kvops.transfer import messages as tm
from kvops.transfer.layout import MAGIC, ObjectHeader, footprint_bytes
from kvops.transfer.messages import NodeStatus
from kvops.transfer.model import WriteSlice

if TYPE_CHECKING:
    from kvops.chaos.sim.client import ClientProcess
    from kvops.chaos.sim.master import MasterProcess
    from kvops.chaos.sim.plan import Op
    from kvops.chaos.sim.store import StoreProcess
    from kvops.chaos.sim.world import World

MUTATIONS: Final = frozenset({Kind.PUT_START, Kind.PUT_END, Kind.PUT_REVOKE, Kind.REMOVE})
TOKEN_BYTES: Final = 16


@dataclass(slots=True)
class Lease:
    """What a reader may rely on."""

    generation: int
    start: int
    end: int  # of the memory
    until_us: int  # true time at which the reader has certainly given up
    master: int  # incarnation of who granted it


@dataclass(slots=True)
class Grant:
    """One generation: what it is to hold, and where."""

    key: str
    token: bytes
    size: int
    ttl_ms: int
    homes: dict[int, tuple[int, int]] = field(default_factory=dict)  # incarnation → offset, footprint


@dataclass(slots=True)
class Acknowledged:
    """A put whose caller was told that it is readable."""

    generation: int
    homes: tuple[int, ...]  # incarnations of the nodes that wrote it


class Oracle:
    """Remembers what was promised."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.outcomes: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.calls = 0
        self.late = 0
        self.evicted = 0
        self._terms: dict[int, MasterProcess] = {}  # who answered in it
        self._term_max = 0
        self._grants: dict[tuple[int, str], Grant] = {}  # by generation and key
        self._owners: dict[int, Grant] = {}  # by generation
        self._acknowledged: dict[str, Acknowledged] = {}
        self._completed: dict[str, list[int]] = {}  # by key: generations that were readable at some time
        self._gone: set[tuple[int, str]] = set()  # evicted, expired
        self._removed: dict[str, int] = {}  # by key: the newest generation that a remove has met
        self._removals: dict[
            str, list[tuple[int, int]]
        ] = {}  # by key: when one was carried out, and the same
        self._dead: dict[str, tuple[int, int]] = {}  # … of one that has returned, and when
        self._survivors: dict[tuple[int, str], int] = {}  # removed, but held by a node that was away → life
        self._lives = 0  # of masters
        self._drained: dict[str, int] = {}  # by store: since when nothing may name it
        self._emptied: set[int] = set()  # incarnations of stores that a drain has swept, or will
        self._leases: dict[int, list[Lease]] = {}  # by incarnation
        self._keys: dict[bytes, str] = {}

    def know(self, keys: Sequence[str]) -> None:
        """The keys of the workload."""
        digests = index_digests(NAMESPACE_DEFAULT, keys)
        for at, key in enumerate(keys):
            self._keys[digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]] = key

    # Masters.

    def master_leads(self, master: MasterProcess) -> None:
        """A master begins to serve."""
        self._lives += 1
        self.world.say(master.name, f"leads, term {master.core.term}")

    def master_answers(self, master: MasterProcess, kind: int, term: int) -> None:
        """It answers a request."""
        if kind not in MUTATIONS:
            return
        owner = self._terms.setdefault(term, master)
        if owner is not master:
            raise Violation("one leader", f"{owner.name} and {master.name} both answered in term {term}")
        if term < self._term_max:
            raise Violation(
                "one leader",
                f"{master.name} answered in term {term} after an answer of term {self._term_max}",
            )
        self._term_max = term

    def state_lost(self) -> None:
        """A master's state directory is gone: its next life begins with the first term, until a store outdoes it."""
        self._terms.clear()
        self._term_max = 0
        # Until a store that has seen them mounts, generations are given again: other keys, on other stores.
        self._owners.clear()

    def master_removes(self, master: MasterProcess, digests: bytes) -> None:
        """It is about to carry out a remove."""
        core = master.core
        for at in range(0, len(digests), DIGEST_BYTES):
            digest = digests[at : at + DIGEST_BYTES]
            put = core.puts.get(digest)
            newest = (core.generations.ceiling() if put is None else put.generation) - 1
            key = self._keys[digest]
            self._removed[key] = max(self._removed.get(key, 0), newest)
            self._removals.setdefault(key, []).append((self.world.scheduler.now_us, newest))

    def master_completed(self, rows: NDArray[np.void]) -> None:
        """Objects are readable from now on."""
        for digest, generation in zip(
            np.ascontiguousarray(rows["digest"]), rows["location"]["generation"].tolist(), strict=True
        ):
            completed = self._completed.setdefault(self._keys[digest.tobytes()], [])
            if generation not in completed:
                completed.append(generation)

    def master_dropped(
        self, master: MasterProcess, entries: list[JournalEntry], evicted: int, swept: int
    ) -> None:
        """What a slice of background work took out of the index: expired, then evicted, then swept objects."""
        gone = [entry.rows for entry in entries if entry.kind == JournalKind.GONE and entry.rows is not None]
        if swept:
            assert len(gone.pop()) == swept
        if evicted:
            rows = gone.pop()
            assert len(rows) == evicted
            self.evicted += evicted
            for key, generation in self._named(rows):
                self._gone.add((generation, key))
                self._check_evicted(master, key, generation)
        for rows in gone:
            for key, generation in self._named(rows):
                grant = self._grants.get((generation, key))
                if grant is not None and not grant.ttl_ms:
                    raise Violation("nothing lost", f"{key} ({generation:#x}) expired without a TTL")
                self._gone.add((generation, key))

    def _named(self, rows: NDArray[np.void]) -> list[tuple[str, int]]:
        """Key and generation of GONE rows."""
        digests = np.ascontiguousarray(rows["digest"])
        return [
            (self._keys[digest.tobytes()], generation)
            for digest, generation in zip(digests, rows["generation"].tolist(), strict=True)
        ]

    def _check_evicted(self, master: MasterProcess, key: str, generation: int) -> None:
        grant = self._grants.get((generation, key))
        for incarnation, home in grant.homes.items() if grant is not None else ():
            for lease in self._leases.get(incarnation, ()):
                if (
                    lease.generation == generation
                    and (lease.start, lease.end) == (home[0], home[0] + home[1])
                    and lease.master == master.incarnation
                    and lease.until_us > self.world.scheduler.now_us
                ):
                    raise Violation("leases", f"{key} ({generation:#x}) was evicted while a reader held it")

    # Stores.

    def store_started(self, store: StoreProcess) -> None:
        """A node begins, with empty memory."""
        self.world.say(store.name, f"started, incarnation {store.core.incarnation}")

    def store_writes(self, store: StoreProcess, write: Write) -> None:
        """A put's first bytes are about to land."""
        leases = self._leases.get(store.core.incarnation)
        slot = write.slot
        if not leases or slot is None:
            return
        now = self.world.scheduler.now_us
        first, last = slot.offset, slot.offset + slot.footprint
        kept = [lease for lease in leases if lease.until_us > now]
        self._leases[store.core.incarnation] = kept
        for lease in kept:
            if lease.start < last and first < lease.end and lease.generation != slot.generation:
                raise Violation(
                    "leases",
                    f"{store.name} gives memory of {lease.generation:#x} to {slot.generation:#x},"
                    f" {(lease.until_us - now) // 1_000} ms before a reader's lease ends",
                )

    def store_cleared(self, store: StoreProcess, rows: NDArray[np.void]) -> None:
        """A node has confirmed that these slots are cleared."""
        for generation, offset in rows.tolist():
            if bytes(store.memory[offset : offset + 4]) != MAGIC:
                continue
            header = ObjectHeader.unpack(store.memory[offset : offset + 64])
            if header.generation == generation:
                raise Violation("cleared", f"{store.name} confirmed {generation:#x}, its header still stands")

    # Clients.

    def content(self, op: Op, key: str) -> memoryview:
        """What a put writes: no two puts of a key the same, but for ranks of one object."""
        if op.part is not None:
            start, _ = op.part
            whole = _fill(_token(key, 0), op.sizes[0])
            return memoryview(whole)[start : start + op.length]
        return memoryview(_fill(_token(key, op.id + 1), op.sizes[op.keys.index(key)]))

    def granted(self, client: ClientProcess, op: Op, pieces: Sequence[WriteSlice], since_us: int) -> None:
        """A client that asked then may write."""
        for piece in pieces:
            key = piece.key.decode()
            token = _token(key, 0 if op.part else op.id + 1)
            grant = self._owners.get(piece.generation)
            if grant is None:
                grant = Grant(key, token, piece.size, op.ttl_ms)
                self._owners[piece.generation] = self._grants[piece.generation, key] = grant
            elif grant.key != key or grant.token != token:
                raise Violation(
                    "generations", f"{piece.generation:#x} was granted for {grant.key} and for {key}, {op}"
                )
            info = client.stores[piece.store].info
            self._check_not_drained(info.name, since_us, f"{client.name} is to put {key} there")
            grant.homes[info.incarnation] = (piece.offset, footprint_bytes(piece.size, piece.chunk))

    def stored(
        self, client: ClientProcess, key: str, pieces: Sequence[WriteSlice], where: dict[int, StoreInfo]
    ) -> None:
        """A client was told that an object is readable."""
        generation = pieces[0].generation
        grant = self._grants[generation, key]
        before = self._acknowledged.get(key)
        if grant.ttl_ms or (before is not None and before.generation > generation):
            return
        homes = tuple(where[piece.store].incarnation for piece in pieces if piece.store in where)
        self._acknowledged[key] = Acknowledged(generation, homes)

    def located(
        self, client: ClientProcess, keys: Sequence[str], found: Located, sent_us: int, since_us: int
    ) -> None:
        """A client was told where its keys lie, and may hold their memory."""
        until_us = int((sent_us + (found.lease_ms - LEASE_MARGIN_MS) * 1_000) / client.host.rate)
        for index, (key, row) in enumerate(zip(keys, found.rows, strict=True)):
            generation, first, size, store, flags = row
            if not store:
                continue
            if (generation, key) not in self._grants:
                raise Violation("generations", f"{client.name} finds {key} ({generation:#x}), never granted")
            footprint = footprint_bytes(size, chunk_of(flags))
            for store_id, offset in ((store, first), *found.further.get(index, ())):
                channel = client.stores.get(store_id)
                if channel is not None:
                    self._check_not_drained(channel.info.name, since_us, f"{client.name} finds {key} there")
                    self._leases.setdefault(channel.info.incarnation, []).append(
                        Lease(generation, offset, offset + footprint, until_us, client.master_incarnation)
                    )

    def hit(
        self,
        client: ClientProcess,
        key: str,
        location: tuple[int, int, int, int, int],
        buffer: memoryview,
        since_us: int,
    ) -> None:
        """A client believes that it has read an object; ``since_us`` is when it asked where it is."""
        generation = location[0]
        dead, when_us = self._dead.get(key, (0, 0))
        forgotten = self._survivors.get((generation, key), self._lives) < self._lives
        if generation <= dead and since_us > when_us and not forgotten:
            raise Violation(
                "no resurrection", f"{client.name} reads {key} ({generation:#x}), which was removed"
            )
        grant = self._grants[generation, key]
        if grant.key != key or buffer != _fill(grant.token, grant.size):
            number, writer = bytes(buffer[:8]), int.from_bytes(buffer[8:16], "little")
            raise Violation(
                "no other bytes",
                f"{client.name} read {key} ({generation:#x}) and got bytes of"
                f" {number.rstrip(bytes(1)).decode(errors='replace')} written by op {writer - 1}",
            )

    def removed(self, key: str, since_us: int) -> None:
        """A remove that began then has returned, and the key is gone."""
        # If it was carried out twice, only one of the two need have lasted.
        newest = min((one for at, one in self._removals.get(key, ()) if at >= since_us), default=0)
        if newest < self._dead.get(key, (0, 0))[0]:
            return
        self._dead[key] = (newest, self.world.scheduler.now_us)
        for generation in self._completed.get(key, ()):
            if generation <= newest and self.holders(generation, key):
                self._survivors[generation, key] = self._lives  # a master that starts anew does not know

    def call_ended(self, client: ClientProcess, op: Op, outcomes: Sequence[Outcome], began_us: int) -> None:
        """A call has returned."""
        self.calls += 1
        for outcome in outcomes:
            self.outcomes[outcome.reason] += 1
        if self.world.recording:
            took = (self.world.scheduler.now_us - began_us) // 1_000
            self.world.say(client.name, f"{op}: {' '.join(one.reason for one in outcomes)} after {took} ms")

    def draining(self, name: str) -> None:
        """A drain was asked for: what lies there may go."""
        self._emptied |= {store.core.incarnation for store in self.world.stores() if store.name == name}

    def drained(self, name: str) -> None:
        """It has returned."""
        self.world.say("operator", f"{name} is drained")
        self._drained[name] = self.world.scheduler.now_us

    def undrained(self, name: str) -> None:
        """It is about to be undone."""
        self._drained.pop(name, None)

    def _check_not_drained(self, name: str, since_us: int, what: str) -> None:
        if since_us > self._drained.get(name, since_us):
            raise Violation("drained", f"{name} is drained, and {what}")

    def holders(self, generation: int, key: str) -> list[StoreProcess]:
        """The living nodes that hold an object of that generation, reachable or not."""
        grant = self._grants.get((generation, key))
        if grant is None:
            return []
        found = []
        for store in self.world.stores():
            home = grant.homes.get(store.core.incarnation)
            if home is None or not store.alive:
                continue
            row = np.array([(generation, home[0], 0, grant.size)], tm.READ_ROW)
            ((head, _),) = store.core.read(row.tobytes())
            if tm.READ_REPLY.unpack_from(head)[0] == NodeStatus.OK:
                found.append(store)
        return found

    # Looking at everything.

    def check(self) -> None:
        """The accounts of whoever runs."""
        for master in self.world.masters():
            if master.leads:
                master.core.check()
        for store in self.world.stores():
            if store.alive:
                store.core.check()

    def unsettled(self, master: MasterProcess, core: set[str]) -> str:
        """What has not yet come to rest; "" when all has."""
        if len(master.core.puts):
            return f"{len(master.core.puts)} puts under way"
        if master.core.stores.releasing_bytes():
            return f"{master.core.stores.releasing_bytes()} B on their way back"
        if missing := self._unfollowed(master):
            return missing
        names = {store.mount.name for store in master.core.stores}
        for name in sorted(names | core):
            store = master.core.stores.named(name)
            if name not in core:
                return f"{name} is not forgotten"
            if store is None or store.state is not StoreState.READY:
                return f"{name} is {store.state if store is not None else 'not mounted'}"
            if store.announced is not None:
                return f"{name} is still being swept"
        return ""

    def _unfollowed(self, leader: MasterProcess) -> str:
        """Which of the other masters that live could not lead now."""
        if leader.election is None:
            return ""
        if leader.replication is not None and leader.replication.pending:
            return "operations wait for standbys"
        for master in self.world.masters():
            if master is leader or not master.alive or not self.world.in_core(master):
                continue
            standby = master.follower.standby if master.follower is not None else None
            if standby is None or not standby.caught_up or master.name not in leader.election.members:
                return f"{master.name} could not lead"
        return ""

    def _check_standbys(self, leader: MasterProcess) -> None:
        """Every standby has the very objects that the leader has, in the same places."""
        ours = _directory(leader.core)
        for master in self.world.masters():
            if master is leader or not master.alive or not self.world.in_core(master):
                continue
            if master.follower is None or master.follower.standby is None:
                continue
            theirs = _directory(master.follower.standby.core)
            for digest in ours.keys() ^ theirs.keys():
                who = leader.name if digest in ours else master.name
                raise Violation("replication", f"only {who} knows {self._keys[digest]}")
            for digest, found in ours.items():
                # Nobody tells a standby that a replica is gone while others are left; a sweep finds that out.
                if theirs[digest][0] != found[0] or not set(found[1]) <= set(theirs[digest][1]):
                    raise Violation(
                        "replication",
                        f"{self._keys[digest]} is {found} at {leader.name}, {theirs[digest]} at {master.name}",
                    )

    def check_quiet(self, master: MasterProcess, core: set[str]) -> None:
        """All is quiet: nothing is lost, nothing is left."""
        self.check()
        self._check_standbys(master)
        stores = {store.core.incarnation: store for store in self.world.stores() if store.alive}
        for entry in master.core.stores:
            store = stores.get(entry.mount.incarnation)
            if store is None:
                raise Violation("no leak", f"{entry.mount.name} is mounted, its process is no more")
            if entry.objects != store.core.objects:
                raise Violation(
                    "no leak",
                    f"{store.name} holds {store.core.objects} objects, the master names {entry.objects}",
                )
            held = entry.populated_bytes - entry.allocator.free_bytes
            if store.core.used_bytes != held:
                raise Violation(
                    "no leak", f"{store.name} uses {store.core.used_bytes} B, the master counts {held}"
                )
        for key, stored in self._acknowledged.items():
            self._check_kept(master, key, stored, {i: s for i, s in stores.items() if s.name in core})
        for key in self._keys.values():
            self._check_readable(master, key, stores)

    def _check_kept(
        self, master: MasterProcess, key: str, stored: Acknowledged, alive: dict[int, StoreProcess]
    ) -> None:
        found = self._lookup(master, key)
        generation = found[0] if found is not None else 0
        if generation >= stored.generation or self._removed.get(key, 0) >= stored.generation:
            return
        newer = [one for one in self._completed.get(key, ()) if one >= stored.generation]
        if any((one, key) in self._gone or self._grants[one, key].ttl_ms for one in newer):
            return
        newest = max(newer, default=stored.generation)
        if newest > stored.generation and len(self.world.masters()) > 1:
            return  # replaced by what nobody was told of, and what the next leader need not know
        homes = stored.homes if newest == stored.generation else tuple(self._grants[newest, key].homes)
        homes = tuple(home for home in homes if home not in self._emptied)
        if not any(home in alive for home in homes):
            return  # its memory is lost, or was drained
        found_text = f"the master names {generation:#x}" if generation else "the master does not know it"
        names = ", ".join(alive[home].name for home in homes if home in alive)
        raise Violation(
            "nothing lost",
            f"{key} ({stored.generation:#x}) was acknowledged, {found_text}; {names} never lost its memory",
        )

    def _lookup(self, master: MasterProcess, key: str) -> tuple[int, int, int, int, int] | None:
        answer = master.core.lookup(index_digests(NAMESPACE_DEFAULT, [key]), now_ms=master.now_ms())
        found = Located()
        found.add(answer, 1)
        return found.rows[0] if found.rows[0][3] else None

    def _check_readable(self, master: MasterProcess, key: str, stores: dict[int, StoreProcess]) -> None:
        found = self._lookup(master, key)
        if found is None:
            return
        generation, offset, size, store_id, _ = found
        entry = master.core.stores.get(store_id)
        assert entry is not None
        store = stores[entry.mount.incarnation]
        grant = self._grants[generation, key]
        ((head, payload),) = store.core.read(np.array([(generation, offset, 0, size)], tm.READ_ROW).tobytes())
        if payload is None:
            status = NodeStatus(tm.READ_REPLY.unpack_from(head)[0])
            raise Violation(
                "no leak", f"the master names {key} ({generation:#x}), {store.name} says {status.name}"
            )
        if payload != _fill(grant.token, size):
            raise Violation("no other bytes", f"{store.name} holds other bytes under {key} ({generation:#x})")


def _directory(core: MasterCore) -> dict[bytes, tuple[int, tuple[Place, ...]]]:
    """By digest: generation and places of each object."""
    index = core.index
    slots = np.flatnonzero(index.location["store"][: index.slots_used])
    return {
        digest.tobytes(): (
            int(index.location["generation"][slot]),
            tuple(sorted(core.objects.places(int(slot)))),
        )
        for digest, slot in zip(index.digests(slots), slots.tolist(), strict=True)
    }


def _token(key: str, writer: int) -> bytes:
    return key.encode().ljust(8, b"\0") + writer.to_bytes(8, "little")


def _fill(token: bytes, size: int) -> bytes:
    return (token * (size // TOKEN_BYTES + 1))[:size]
