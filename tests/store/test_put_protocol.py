"""
The put protocol, driven through the real cores of one master and its stores by messages that come late or never.

Every operation of a client is a generator that stops wherever a message is under way, so that anything may happen
in between: other operations, time, broken connections, a store's death or return, a master's restart, a drain of a
store and its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvops.limits import LEASE_MARGIN_MS, LEASE_TTL_MS, PART_CHUNK_BYTES, STORE_TTL_MS
from kvops.net.wire import Kind
from kvops.store.keys import NAMESPACE_DEFAULT, key_digest
from kvops.store.messages import PutStatus
from kvops.store.model import HoldKind, HoldState, ObjectFlag, StoreState, chunk_of
from kvops.store.put_watch import ORPHAN_MS
from kvops.transfer import messages as tm
from kvops.transfer.layout import (
    HEADER_BYTES,
    ObjectHeader,
    footprint_bytes,
    trailer_bytes,
    verify_chunks,
    verify_header,
    verify_trailer,
)
from kvops.transfer.messages import NodeStatus
from tests.store.rig import Location, Node, Rig, digests, write_body

KEYS = tuple("abcdefghij")
SIZES = (100, 100, 1_000, 3_000, PART_CHUNK_BYTES, 2 * PART_CHUNK_BYTES + 77)
SEGMENT = 10 << 10  # a few objects: memory is reused all the time
HOSTS = ("host-a", "host-b", "host-c")
CLIENTS = (0, 1, 2)
TROUBLES = (
    "client hangs up",
    "client dies",
    "session breaks",
    "session breaks and opens",
    "session opens",
    "mount is interrupted",
    "store restarts",
    "master restarts",
    "master forgets",
    "standby leads",
)
DEEDS = ("drain", "drain", "undrain", "undrain", "cordon", "drain host", "migrate", "migrate", "migrated")
"""What an operator does, or a store that was told to migrate."""
MEANWHILE = ("nothing", "all come back", "a mount is interrupted", "keys are removed", "keys are put")
"""What happens between a master's restart and its stores' return."""
PIECE = 2_500  # payload between two chances for something to happen


def content(generation: int, size: int) -> bytes:
    """What every writer of a generation writes: no two puts write the same."""
    return (generation.to_bytes(8, "big") * (size // 8 + 1))[:size]


@dataclass(eq=False)
class Operation:
    """What a client is doing."""

    client: int
    steps: Iterator[None]


@dataclass(eq=False)
class Lease:
    """What a reader may rely on."""

    node: Node
    place: Location
    end_ms: int


@dataclass(eq=False)
class Stored:
    """A put that the master has called STORED."""

    generation: int
    size: int
    nodes: list[Node]


@dataclass(eq=False)
class Model:
    """What clients were told."""

    stored: dict[str, Stored] = field(default_factory=dict)  # and neither removed nor evicted since
    every: dict[str, set[int]] = field(default_factory=dict)  # generations ever stored under a key
    dead: dict[str, set[int]] = field(default_factory=dict)  # … and removed
    leases: list[Lease] = field(default_factory=list)
    copied: dict[int, int] = field(default_factory=dict)  # generation of a moved object → of what was put


class PutProtocol(RuleBasedStateMachine):
    """Clients, stores and a master in any order of events."""

    @initialize()
    def start(self) -> None:
        self.rig = Rig(objects_max=256)
        self.model = Model()
        self.conns: dict[int, int] = {}
        self.operations: list[Operation] = []
        self.evicted = 0
        self.drained: set[str] = set()
        self.cordoned: set[str] = set()
        for host in HOSTS:
            self.rig.node(f"store-{host}", host=host, size=SEGMENT)

    # What clients do.

    def conn(self, client: int) -> int:
        """A client's connection, made when it is needed."""
        if client not in self.conns:
            self.conns[client] = self.rig.client(HOSTS[client])
        return self.conns[client]

    def hang_up(self, client: int) -> None:
        conn = self.conns.pop(client, None)
        if conn is not None:
            self.rig.leave(conn)

    def node_of(self, place: Location) -> Node | None:
        """The store a client finds behind a location."""
        store = self.rig.core.stores.get(place[3])
        incarnation = store.mount.incarnation if store is not None else 0
        return next((node for node in self.rig.nodes if node.incarnation == incarnation), None)

    def put(
        self, client: int, key: str, size: int, replicas: int, ranges: list[tuple[int, int]], again: int
    ) -> Iterator[None]:
        """One put, or one rank's part of it; ``again`` says which of its requests is sent twice."""
        flags = ObjectFlag.PARTS if ranges else 0
        yield
        answer = self.rig.put_start(self.conn(client), [(key, size)], replicas=replicas, flags=flags)
        if again == 1:  # the answer was lost with its connection
            self.hang_up(client)
            yield
            answer = self.rig.put_start(self.conn(client), [(key, size)], replicas=replicas, flags=flags)
        ((status, places),) = answer
        nodes = [self.node_of(place) for place in places]
        held = self.drained if ranges else self.drained | self.cordoned  # a rank joins what was begun before
        if status is PutStatus.GRANTED:
            assert not any(node is not None and node.name in held for node in nodes), (
                "nothing is placed there"
            )
        yield
        if status is PutStatus.NO_SPACE and again > 3:
            yield from self.put(client, key, size, replicas, ranges, again - 1)
        if status is not PutStatus.GRANTED:
            return
        written, whole = 0, False
        for replica, (place, node) in enumerate(zip(places, nodes, strict=True)):
            good = node is not None
            for start, length in ranges or [(0, size)]:
                for _ in range(2 if again == 2 else 1):
                    reply = yield from self.write(key, place, node, start, length)
                    good = good and reply[0] == NodeStatus.OK
                    whole |= bool(reply[1])
            written |= good << replica
        if ranges and written and not whole:
            return  # another rank ends it
        for _ in range(2 if again == 3 else 1):
            yield
            generation = places[0][0]
            if self.rig.put_end(self.conn(client), key, generation, written) is PutStatus.STORED:
                kept = [node for i, node in enumerate(nodes) if node is not None and written >> i & 1]
                kept = [node for node in kept if node.name not in self.drained]
                assert kept or self.was_stored(key, generation), (
                    "a put that lies on drained stores alone is GONE"
                )
                before = self.model.stored.get(key)
                newest = before is None or before.generation < generation
                if newest and generation not in self.model.dead.get(key, ()):
                    self.model.stored[key] = Stored(generation, size, kept)
                self.model.every.setdefault(key, set()).add(generation)

    def written(self, generation: int, size: int) -> bytes:
        """What an object holds, moved or not."""
        return content(self.model.copied.get(generation, generation), size)

    def move(self, which: int, key: str) -> Iterator[None]:
        """A store that is to be drained copies one of its objects elsewhere."""
        yield
        source = self.some_node(which)
        places = [place for place in self.rig.lookup(key) if self.node_of(place) is source]
        if not places:
            return
        core, conn = self.rig.core, self.rig.client(source.host, source.name)
        try:
            yield from self.copy(source, places[0], conn, key)
        finally:
            if self.rig.core is core:
                self.rig.leave(conn)

    def copy(self, source: Node, place: Location, conn: int, key: str) -> Iterator[None]:
        """The same, while its connection lasts."""
        core = self.rig.core
        generation, offset, size, _, flags = place
        status, targets = self.rig.move_start(conn, key, size)
        yield
        if status is not PutStatus.GRANTED:
            return
        (target,) = targets
        node = self.node_of(target)
        if node is None:
            return
        self.model.copied[target[0]] = self.model.copied.get(generation, generation)
        data = bytes(source.memory[offset + HEADER_BYTES : offset + HEADER_BYTES + size])
        yield
        written = source in self.rig.nodes and source.read((generation, offset, size, 0, flags)) is not None
        if written:
            assert data == self.written(target[0], size), "what still lies there was read whole"
            written = node in self.rig.nodes and node.write(key, target, data) is NodeStatus.OK
        yield
        if self.rig.core is not core:
            conn = self.rig.client(source.host, source.name)
        if self.rig.put_end(conn, key, target[0], int(written)) is PutStatus.STORED:
            before = self.model.stored.get(key)
            if target[0] not in self.model.dead.get(key, ()) and (
                before is None or before.generation < target[0]
            ):
                self.model.stored[key] = Stored(target[0], size, [node])
            self.model.every.setdefault(key, set()).add(target[0])

    def was_stored(self, key: str, generation: int) -> bool:
        """Another rank, or the same request before, has ended this put already."""
        return generation in self.model.every.get(key, ())

    def write(self, key: str, place: Location, node: Node | None, start: int, length: int) -> Iterator[None]:
        """One range to one store, piece by piece; returns NodeStatus and whether the object is sealed."""
        yield
        if node not in self.rig.nodes or node is None:
            return NodeStatus.GONE, False
        data = content(place[0], place[2])
        write = node.core.write_begin(
            write_body(key, place, data, start, length), length, on_abort=lambda: None
        )
        ended = False
        try:
            for at in range(0, length, PIECE):
                yield
                if write.target is not None:
                    stop = min(at + PIECE, length)
                    write.target[at:stop] = data[start + at : start + stop]
            ended = True
            reply = node.core.write_end(write)
        finally:
            if not ended:
                node.core.write_lost(write)
        yield
        status, sealed, _ = tm.WRITE_REPLY.unpack(reply)
        return status, sealed

    def read(self, key: str, replica: int) -> Iterator[None]:
        """One read from mapped memory, as a client does it."""
        yield
        sent = self.rig.now_ms
        places = self.rig.lookup(key)
        if not places:
            return
        place = places[replica % len(places)]
        generation, offset, size, _, flags = place
        assert generation not in self.model.dead.get(key, ()), "removed keys stay removed"
        node = self.node_of(place)
        assert node is None or node.name not in self.drained, "no lookup names a drained store"
        yield
        if node is None:
            return
        self.model.leases.append(Lease(node, place, sent + LEASE_TTL_MS))
        expected = {
            "incarnation": node.incarnation,
            "generation": generation,
            "key_digest": key_digest(NAMESPACE_DEFAULT, key),
            "size": size,
        }
        memory = node.memory
        found = verify_header(bytes(memory[offset : offset + HEADER_BYTES]), **expected)
        if not isinstance(found, ObjectHeader):
            return
        payload = offset + HEADER_BYTES
        trailer = bytes(memory[payload + size : payload + size + trailer_bytes(size, found.chunk)])
        copy = bytearray(size)
        for at in range(0, size, PIECE):
            yield
            if self.rig.now_ms >= sent + LEASE_TTL_MS - LEASE_MARGIN_MS:
                return
            copy[at : at + PIECE] = memory[payload + at : payload + min(at + PIECE, size)]
        good = (
            verify_trailer(found, trailer) and verify_chunks(memoryview(copy), trailer, chunk=found.chunk) < 0
        )
        assert good, "what was read within its lease is whole"
        assert bytes(copy) == self.written(generation, size)
        assert found.chunk == chunk_of(flags)

    def remove(self, key: str) -> Iterator[None]:
        """One remove, on a connection of its own."""
        yield
        core, conn = self.rig.core, self.rig.client()
        told = set(self.model.every.get(key, ()))
        answer = self.rig.ask(conn, Kind.REMOVE, digests([key]))
        self.model.stored.pop(key, None)
        self.model.dead.setdefault(key, set()).update(told)
        while answer is None and self.rig.core is core and not self.rig.replies[conn]:
            yield
        if self.rig.core is core:
            self.rig.leave(conn)

    @rule(
        client=st.sampled_from(CLIENTS),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True),
        size=st.sampled_from(SIZES),
        replicas=st.sampled_from((1, 1, 1, 2)),
        again=st.integers(0, 5),
        steps=st.sampled_from((0, 3, 5, 100, 100, 100)),
    )
    def start_puts(
        self, client: int, keys: list[str], size: int, replicas: int, again: int, steps: int
    ) -> None:
        for key in keys:
            self.begin(client, self.put(client, key, size, replicas, [], again), steps)

    @rule(
        key=st.sampled_from(KEYS),
        ranks=st.permutations((0, 1, 2)),
        again=st.integers(0, 5),
        steps=st.sampled_from((0, 5, 100)),
    )
    def start_parts(self, key: str, ranks: list[int], again: int, steps: int) -> None:
        """Three ranks write two chunks and a rest, the last one everything once more."""
        size, chunk = SIZES[-1], PART_CHUNK_BYTES
        parts = [[(0, chunk)], [(chunk, chunk)], [(2 * chunk, size - 2 * chunk), (0, size)]]
        for rank in ranks:
            self.begin(rank, self.put(rank, key, size, 1, parts[rank], again), steps)

    @rule(replica=st.integers(0, 1), steps=st.sampled_from((2, 3, 100)))
    def start_reads(self, replica: int, steps: int) -> None:
        """One of every key."""
        for key in KEYS:
            self.begin(0, self.read(key, replica), steps)

    @rule(
        client=st.sampled_from(CLIENTS),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=10, unique=True),
        steps=st.sampled_from((0, 2, 2)),
    )
    def start_removes(self, client: int, keys: list[str], steps: int) -> None:
        self.start_removes_of(client, keys, steps)

    def start_removes_of(self, client: int, keys: list[str], steps: int) -> None:
        for key in keys:
            self.begin(client, self.remove(key), steps)

    def begin(self, client: int, steps: Iterator[None], count: int) -> None:
        """An operation begins, and some of its messages arrive before anything else happens."""
        operation = Operation(client, steps)
        self.operations.append(operation)
        while count and self.step(operation):
            count -= 1

    @precondition(lambda self: self.operations)
    @rule(which=st.integers(0, 99), steps=st.integers(1, 12))
    def proceed(self, which: int, steps: int) -> None:
        """The next messages of one operation arrive."""
        operation = self.operations[which % len(self.operations)]
        for _ in range(steps):
            if not self.step(operation):
                return

    @precondition(lambda self: self.operations)
    @rule(steps=st.integers(5, 40), well=st.booleans())
    def all_proceed(self, steps: int, well: bool) -> None:
        """Messages of every operation arrive, in turn; while the stores' sessions work, or nothing else does."""
        for _ in range(steps):
            if well:
                self.rig.live(20)
            for operation in list(self.operations):
                self.step(operation)

    def step(self, operation: Operation) -> bool:
        """One message of an operation; false when that was its last."""
        try:
            next(operation.steps)
        except StopIteration:
            self.operations.remove(operation)
            return False
        return True

    def client_dies(self, client: int) -> None:
        """In the middle of whatever it did."""
        for operation in [one for one in self.operations if one.client == client]:
            operation.steps.close()  # type: ignore[attr-defined]
            self.operations.remove(operation)
        self.hang_up(client)

    # What happens to the stores.

    def some_node(self, which: int) -> Node:
        return self.rig.nodes[which % len(self.rig.nodes)]

    @rule(which=st.integers(0, 2), steps=st.integers(1, 4))
    def frames_reach_the_master(self, which: int, steps: int) -> None:
        node = self.some_node(which)
        for _ in range(steps):
            if node.conn and node.to_master:
                self.rig.step_to_master(node)

    @rule(which=st.integers(0, 2), steps=st.integers(1, 4))
    def frames_reach_a_store(self, which: int, steps: int) -> None:
        node = self.some_node(which)
        for _ in range(steps):
            if node.conn and node.from_master:
                self.rig.step_to_node(node)

    @rule(which=st.integers(0, 2), lag_ms=st.sampled_from((0, 0, STORE_TTL_MS)))
    def store_beats(self, which: int, lag_ms: int) -> None:
        node = self.some_node(which)
        if node.mounted:
            self.rig.beat(node, lag_ms=lag_ms)

    def interrupt_mount(self, node: Node, steps: int) -> None:
        """The session breaks in the middle of its beginning."""
        self.rig.close_session(node)
        self.rig.open_session(node)
        for _ in range(steps):
            self.frames_reach(node)
        self.rig.close_session(node)

    def frames_reach(self, node: Node) -> None:
        """A frame each way between one store and the master, if any is under way."""
        if node.conn and node.to_master:
            self.rig.step_to_master(node)
        if node.conn and node.from_master:
            self.rig.step_to_node(node)

    def store_restarts(self, node: Node) -> None:
        """Its memory is lost; a new process with the same name comes."""
        self.rig.kill(node)
        new = self.rig.node(node.name, host=node.host, size=SEGMENT, mounted=False)
        self.rig.open_session(new)

    # What operators do.

    @rule(
        which=st.integers(0, 2),
        deed=st.sampled_from(DEEDS),
    )
    def operator_acts(self, which: int, deed: str) -> None:
        node = self.some_node(which)
        target = node.host if deed == "drain host" else node.name
        if self.rig.core.stores.named(node.name) is None and target not in self.rig.holds_now():
            return
        match deed:
            case "drain" | "drain host":
                self.drain(node, target)
            case "migrate":
                self.rig.drain(target, migrate=True)
                for key in KEYS:
                    self.begin(which, self.move(which, key), 2)
            case "migrated" if node.mounted:
                self.rig.migrated(node)
            case "cordon" if not {node.name, node.host} & set(self.rig.holds_now()):
                self.rig.hold(HoldKind.CORDON, target)
            case "undrain":
                self.undrain(node)
        self.note_holds()

    def drain(self, node: Node, target: str) -> None:
        self.rig.drain(target)
        for stored in self.model.stored.values():
            if len(stored.nodes) > 1 and node in stored.nodes:
                stored.nodes.remove(node)  # the other replica is the only one

    def undrain(self, node: Node) -> None:
        for target in {node.name, node.host} & set(self.rig.holds_now()):
            if target == node.host or node.host not in self.rig.holds_now():
                self.rig.undrain(target)

    def note_holds(self) -> None:
        """What operators were told last."""
        self.drained.clear()
        self.cordoned.clear()
        for hold in self.rig.holds_now().values():
            for name in hold.stores:
                drains = hold.kind is HoldKind.DRAIN and hold.state is not HoldState.MIGRATING
                (self.drained if drains else self.cordoned).add(name)

    # Time, and what the master does.

    @rule(ms=st.sampled_from((10, 10, 150, 150, 700, 1_100, 2_500)))
    def time_passes(self, ms: int) -> None:
        """… while nothing arrives."""
        self.rig.tick(ms)

    @rule(ms=st.sampled_from((100, 300, 1_200, 1_200)))
    def all_is_well(self, ms: int) -> None:
        """… while the stores' sessions work."""
        self.rig.live(ms)

    @rule(slices=st.integers(1, 3))
    def master_works(self, slices: int) -> None:
        self.rig.work(slices)

    @rule(
        kind=st.sampled_from(TROUBLES),
        which=st.integers(0, 2),
        down_ms=st.sampled_from((50, 400, 3_000)),
        steps=st.integers(1, 6),
        meanwhile=st.sampled_from(MEANWHILE),
    )
    def trouble(self, kind: str, which: int, down_ms: int, steps: int, meanwhile: str) -> None:
        """What goes wrong, drawn as one rule so that most of the time nothing does."""
        node = self.some_node(which)
        match kind:
            case "client hangs up":  # its operations go on by another connection
                self.hang_up(which)
            case "client dies":
                self.client_dies(which)
            case "session breaks":
                self.rig.close_session(node)
            case "session breaks and opens":
                self.rig.close_session(node)
                self.rig.open_session(node)
            case "session opens" if not node.conn:
                self.rig.open_session(node)
            case "mount is interrupted":
                self.interrupt_mount(node, steps)
            case "store restarts":
                self.store_restarts(node)
            case "master restarts" | "master forgets" | "standby leads":
                self.master_changes(kind, down_ms)
                match meanwhile:
                    case "all come back":
                        for one in self.rig.nodes:
                            self.rig.open_session(one)
                        self.rig.flow()
                    case "a mount is interrupted":
                        self.interrupt_mount(node, steps)
                    case "keys are removed":
                        self.start_removes_of(0, list(KEYS[: 2 * steps]), 2)
                    case "keys are put":
                        others = [one for one in self.rig.nodes if one is not node]
                        for one in others:
                            self.rig.open_session(one)
                        self.rig.flow()
                        self.rig.tick(LEASE_TTL_MS)
                        for key in KEYS:
                            self.begin(1, self.put(1, key, 1_000, 1, [], 0), 100)

    def master_changes(self, kind: str, down_ms: int) -> None:
        """It is killed; another leads with what it replicated, its journal, or the stores' slot tables only."""
        if kind == "standby leads":
            self.rig.fail_over(down_ms=down_ms)
        else:
            self.rig.restart(journal=kind == "master restarts", down_ms=down_ms)
        self.conns.clear()
        self.evicted = 0
        if kind == "master forgets":
            self.drained.clear()  # it has forgotten those as well
            self.cordoned.clear()
        for generations in self.model.dead.values():
            # A copy that no master reached has outlived the memory of its removal.
            generations -= {generation for generation in generations if self.copies(generation)}

    def copies(self, generation: int) -> list[Node]:
        """The nodes that hold an object of that generation."""
        return [node for node in self.rig.nodes if generation in node.generations()]

    # What must hold.

    @invariant()
    def accounts_are_exact(self) -> None:
        """No byte has two owners at the master, no two slots share one at a node."""
        if not hasattr(self, "rig"):
            return
        self.rig.core.check()
        for node in self.rig.nodes:
            node.core.check()

    @invariant()
    def leased_memory_is_not_reused(self) -> None:
        """Until a reader's lease ends, what it looked up lies there unchanged."""
        if not hasattr(self, "rig"):
            return
        now, alive = self.rig.now_ms, self.rig.nodes
        self.model.leases = [
            lease for lease in self.model.leases if lease.end_ms > now and lease.node in alive
        ]
        for lease in self.model.leases:
            generation, offset, size, _, _ = lease.place
            payload = lease.node.memory[offset + HEADER_BYTES : offset + HEADER_BYTES + size]
            assert bytes(payload) == self.written(generation, size)

    @invariant()
    def note_evictions(self) -> None:
        """An object that was evicted, or swept from a drained store, may be gone."""
        if not hasattr(self, "rig"):
            return
        self.note_holds()
        evicted = self.rig.core.outbox.counters.evicted + self.rig.core.sweeper.swept_total
        if evicted == self.evicted:
            return
        self.evicted = evicted
        gone = {int(row) for rows in self.rig.gone for row in rows["generation"]}
        for key, stored in list(self.model.stored.items()):
            if stored.generation in gone:
                del self.model.stored[key]

    def teardown(self) -> None:
        """Once all is quiet, every stored object is there, and every other byte is free."""
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        for client in CLIENTS:
            self.client_dies(client)
        rig.live(1_000)
        for node in rig.nodes:
            rig.migrated(node)
        for _ in range(6):
            rig.live(1_000)
            self.note_evictions()
        for hold in rig.holds_now().values():
            for name in hold.stores if hold.kind is HoldKind.DRAIN else ():
                store = rig.core.stores.named(name)
                assert store is not None
                assert (hold.state, hold.left, store.objects) == (HoldState.DRAINED, 0, 0)
        for hold in sorted(rig.holds_now().values(), key=lambda hold: not hold.host):
            rig.undrain(hold.target)
        for _ in range(ORPHAN_MS // 1_000 + 6):
            rig.live(1_000)
            self.note_evictions()
        self.accounts_are_exact()
        assert len(rig.core.puts) == 0
        assert rig.core.stores.releasing_bytes() == 0
        for node in rig.nodes:
            store = rig.core.stores.named(node.name)
            assert store is not None
            assert store.state is StoreState.READY
            assert store.objects == node.core.objects, (
                "the node holds what the master names, and nothing else"
            )
            assert node.core.used_bytes == store.populated_bytes - store.allocator.free_bytes
        for key, stored in self.model.stored.items():
            if not any(node in rig.nodes for node in stored.nodes):
                continue
            places = rig.lookup(key)
            assert places, f"{key} was stored"
            assert places[0][0] >= stored.generation
        for key in KEYS:
            for place in rig.lookup(key):
                assert rig.node_of(place[3]).read(place) == self.written(place[0], place[2])


PutProtocol.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_put_protocol = PutProtocol.TestCase
assert footprint_bytes(SIZES[-1], PART_CHUNK_BYTES) < SEGMENT


def act(world: PutProtocol, rng: Random) -> None:
    """One rule, drawn by other weights than hypothesis's: most of the time things work and get far."""
    which, steps = rng.randrange(3), rng.randint(1, 6)
    keys = rng.sample(KEYS, rng.randint(1, 6))
    match rng.randrange(16):
        case 0 | 1 | 2:
            size, replicas = rng.choice(SIZES), rng.choice((1, 1, 1, 2))
            world.start_puts(which, keys, size, replicas, rng.randrange(6), rng.choice((0, 3, 5, 100, 100)))
        case 3:
            world.start_parts(keys[0], rng.sample((0, 1, 2), 3), rng.randrange(6), rng.choice((0, 5, 100)))
        case 4:
            world.start_reads(rng.randrange(2), rng.choice((2, 3, 100)))
        case 5:
            world.start_removes(which, keys, rng.choice((0, 2, 2)))
        case 6 | 7 if world.operations:
            world.proceed(rng.randrange(100), 2 * steps)
        case 8 if world.operations:
            world.all_proceed(4 * steps, rng.random() < 0.5)
        case 9:
            world.frames_reach_the_master(which, steps)
            world.frames_reach_a_store(rng.randrange(3), steps)
        case 10:
            world.store_beats(which, rng.choice((0, 0, 0, STORE_TTL_MS)))
        case 11:
            world.time_passes(rng.choice((10, 10, 150, 700, 1_100, 2_500)))
        case 12 | 13:
            world.all_is_well(rng.choice((100, 300, 1_200)))
        case 15:
            world.operator_acts(which, rng.choice(DEEDS))
        case 14:
            down_ms, meanwhile = rng.choice((50, 400, 3_000)), rng.choice(MEANWHILE)
            world.trouble(rng.choice(TROUBLES), which, down_ms, steps, meanwhile)


@pytest.mark.parametrize("seed", range(20))
def test_long_histories(seed: int) -> None:
    """The same machine over far longer histories than can be shrunk; a seed that fails is worth a test of its own."""
    world, rng = PutProtocol(), Random(seed)
    world.start()
    for _ in range(400):
        act(world, rng)
        world.accounts_are_exact()
        world.leased_memory_is_not_reused()
        world.note_evictions()
    world.teardown()
