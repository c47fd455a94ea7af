"""A master's and its stores' cores in one process; a test delivers every message itself, or lets all flow."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvops.errors import KvopsError
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.wire import Kind, decode
from kvops.store import messages as m
from kvops.store.journal import COMPLETE_ROW, GONE_ROW, Recovery, live_rows, without_replicas
from kvops.store.journal import Kind as JournalKind
from kvops.store.keys import NAMESPACE_DEFAULT, index_digests, key_digest
from kvops.store.master_core import MasterCore, MasterSettings
from kvops.store.messages import PutStatus, RemoveStatus
from kvops.store.model import LOCATION, Hold, HoldInfo, HoldKind, HoldReply, StoreInfo, chunk_of
from kvops.store.node_core import NodeCore
from kvops.store.outbox import JournalEntry
from kvops.store.replication import STATE_END
from kvops.store.snapshot import StateWalk
from kvops.store.standby import Standby
from kvops.transfer import messages as tm
from kvops.transfer.layout import chunk_digests
from kvops.transfer.messages import NodeStatus

Location = tuple[int, int, int, int, int]
"""Generation, offset, size, store, flags."""

SLOTS_PER_FRAME = 1  # an announcement has as many places to break at as it has slots


def digests(keys: Iterable[str]) -> bytes:
    """What the wire and the index know keys by."""
    return index_digests(NAMESPACE_DEFAULT, list(keys))


def hello(role: str, name: str, host: str) -> Hello:
    """A peer that proved the secret."""
    return Hello(
        role=role, group="g", name=name, host=host, numa_node=0, pid=1, boot_id="b", nonce=os.urandom(16)
    )


def put_rows(rows: Sequence[tuple[str, int]], *, replicas: int = 1, flags: int = 0, ttl_ms: int = 0) -> bytes:
    """A PUT_START body for keys and sizes."""
    body = np.zeros(len(rows), m.PUT_ROW)
    body["digest"] = np.frombuffer(digests(key for key, _ in rows), np.uint64).reshape(-1, 2)
    body["size"] = [size for _, size in rows]
    return m.PUT_HEAD.pack(replicas, flags, 0, 0, ttl_ms) + body.tobytes()


def end_row(key: str, generation: int, written: int = 1) -> bytes:
    """A PUT_END or PUT_REVOKE body."""
    row = np.zeros(1, m.END_ROW)
    row["digest"] = np.frombuffer(digests([key]), np.uint64)
    row["generation"], row["written"] = generation, written
    return row.tobytes()


def write_body(key: str, place: Location, data: bytes, start: int, length: int) -> bytes:
    """A WRITE body for a part of an object."""
    generation, offset, size, _, flags = place
    chunk = chunk_of(flags)
    text = key.encode()
    head = tm.WRITE_HEAD.pack(
        digests([key]),
        key_digest(NAMESPACE_DEFAULT, key),
        generation,
        offset,
        size,
        start,
        length,
        chunk,
        0,
        0,
        flags,
        len(text),
    )
    return head + text + chunk_digests(memoryview(data)[start : start + length], chunk)


@dataclass(eq=False)
class Node:
    """A store node's process: memory and core, and the session that ties it to the master."""

    name: str
    host: str
    size: int
    incarnation: int
    conn: int = 0
    memory: memoryview = field(init=False)
    core: NodeCore = field(init=False)
    mounted: bool = False
    frozen: bool = False
    to_master: deque[tuple[int, bytes]] = field(default_factory=deque)
    from_master: deque[tuple[int, bytes]] = field(default_factory=deque)
    answers: deque[bytes] = field(default_factory=deque)  # to FREE; they outlive a session
    cursor: int = 0
    ended: bool = False  # the empty SLOTS frame was sent

    def __post_init__(self) -> None:
        self.memory = memoryview(bytearray(self.size))
        self.core = NodeCore(self.memory, incarnation=self.incarnation)

    def mount(self, populated: int | None = None) -> m.Mount:
        """What it offers."""
        return m.Mount(
            name=self.name,
            host=self.host,
            numa_node=0,
            incarnation=self.incarnation,
            boot_id="b",
            pid=1,
            address=f"{self.name}:1",
            unix_path="",
            http_address="",
            capacity_bytes=self.size,
            populated_bytes=self.size if populated is None else populated,
            highest_generation=self.core.highest_generation,
            objects=self.core.objects,
            transports=["tcp"],
        )

    def write(
        self, key: str, place: Location, data: bytes, start: int = 0, length: int = -1
    ) -> tm.NodeStatus:
        """A whole write: begin, payload, end."""
        length = len(data) - start if length < 0 else length
        write = self.core.write_begin(write_body(key, place, data, start, length), length, on_abort=_nothing)
        if write.target is not None:
            write.target[:] = data[start : start + length]
        return NodeStatus(tm.WRITE_REPLY.unpack(self.core.write_end(write))[0])

    def generations(self) -> set[int]:
        """Of the complete objects it holds."""
        found: set[int] = set()
        cursor = 0
        while cursor >= 0:
            rows, cursor = self.core.announce(cursor, 64)
            found.update(np.frombuffer(rows, m.SLOT_ROW)["generation"].tolist())
        return found

    def read(self, place: Location) -> bytes | None:
        """The payload at a location, as the node serves it."""
        generation, offset, size, _, _ = place
        row = np.array([(generation, offset, 0, size)], tm.READ_ROW)
        ((head, payload),) = self.core.read(row.tobytes())
        if payload is None:
            return None
        assert tm.READ_REPLY.unpack_from(head)[0] == NodeStatus.OK
        return bytes(payload)


def _nothing() -> None:
    pass


class Rig:
    """One master that can crash, its journal, and nodes."""

    def __init__(self, **settings: Any) -> None:
        self.settings = MasterSettings(group="g", **({"objects_max": 4_096, "seed": 1} | settings))
        self.now_ms = 1_000_000
        self.term = 1
        self.core = MasterCore(self.settings, term=self.term, now_ms=self.now_ms)
        self.nodes: list[Node] = []
        self.complete: list[np.ndarray[Any, Any]] = []  # the journal
        self.gone: list[np.ndarray[Any, Any]] = []
        self.less: set[tuple[int, int]] = set()
        self.expires: dict[int, int] = {}
        self.stores: dict[int, StoreInfo] = {}
        self.holds: dict[str, Hold] = {}
        self.replies: dict[int, deque[bytes]] = {}  # to clients, that came later than their requests
        self._conns = 0
        self._incarnations = 0
        self.stream: deque[JournalEntry] = deque()  # operations on their way to the standby
        self.standby = Standby(MasterCore(self.settings, term=0, now_ms=self.now_ms))
        self._join()

    # Time and background work.

    def tick(self, ms: int = 100) -> None:
        """Let time pass, with the master's timer and some of its slices."""
        while ms > 0:
            step = min(ms, 100)
            ms -= step
            self.now_ms += step
            self.core.tick(now_ms=self.now_ms)
            self.work()

    def work(self, slices: int = 50) -> None:
        """Slices of background work until nothing is due."""
        for _ in range(slices):
            self.core.work(now_ms=self.now_ms)
            self.route()
            if not self.core.has_work:
                return

    def route(self) -> None:
        """Carry what the master left for others; keep its journal."""
        self.stream += self.core.outbox.journal
        for entry in self.core.outbox.journal:
            if entry.kind == JournalKind.COMPLETE:
                self.complete.append(entry.rows)  # type: ignore[arg-type]
            elif entry.kind == JournalKind.LESS:
                self.less.update((row[1], row[2]) for row in entry.rows.tolist())  # type: ignore[union-attr]
            elif entry.kind == JournalKind.GONE:
                self.gone.append(entry.rows)  # type: ignore[arg-type]
            elif entry.kind == JournalKind.EXPIRES:
                self.expires.update(entry.rows.tolist())  # type: ignore[union-attr]
            elif entry.holds:
                self.holds.update({hold.target: hold for hold in entry.holds})
            elif entry.store is not None:
                self.stores[entry.store.id] = entry.store
        self.core.outbox.journal.clear()
        self.core.outbox.events.clear()
        by_conn = {node.conn: node for node in self.nodes if node.conn}
        frames = self.core.next_frames()
        if frames:
            self.replicate()  # no answer and no FREE leaves before
        for conn, data in frames:
            head = wire.unpack_header(data[: wire.HEADER_BYTES])
            body = data[wire.HEADER_BYTES :]
            if conn in by_conn:
                by_conn[conn].from_master.append((head.kind, body))
            elif conn in self.replies:
                self.replies[conn].append(body)

    # Clients.

    def client(self, host: str = "client", name: str = "c") -> int:
        """A client's connection."""
        self._conns += 1
        self.core.connected(self._conns, hello("client", name, host))
        self.replies[self._conns] = deque()
        return self._conns

    def leave(self, conn: int) -> None:
        """A client's connection ends."""
        self.replies.pop(conn, None)
        self.core.disconnected(conn, now_ms=self.now_ms)
        self.route()

    def ask(self, conn: int, kind: int, body: bytes) -> bytes | None:
        """One request, delivered and answered; what an answer promises the standby has."""
        try:
            return self.core.handle(conn, kind, 1, body, now_ms=self.now_ms)
        finally:
            self.route()
            if kind in (Kind.PUT_START, Kind.PUT_END):
                self.replicate()

    def put_start(
        self, conn: int, rows: Sequence[tuple[str, int]], **options: Any
    ) -> list[tuple[PutStatus, list[Location]]]:
        """Status and places of each key."""
        answer = self.ask(conn, Kind.PUT_START, put_rows(rows, **options))
        assert answer is not None
        return parse_put(answer, len(rows))

    def move_start(self, conn: int, key: str, size: int) -> tuple[PutStatus, list[Location]]:
        """What the master says to a store that wants to copy a key elsewhere."""
        answer = self.ask(conn, Kind.MOVE_START, put_rows([(key, size)]))
        assert answer is not None
        return parse_put(answer, 1)[0]

    def migrated(self, node: Node) -> None:
        """A node tells the master that it has copied all it could."""
        for hold in self.core.holds.every(now_ms=self.now_ms):
            node.to_master.append((Kind.MIGRATED, m.MIGRATED.pack(hold.number, 0)))

    def put_end(self, conn: int, key: str, generation: int, written: int = 1) -> PutStatus:
        """What the master says to a put's end."""
        answer = self.ask(conn, Kind.PUT_END, end_row(key, generation, written))
        assert answer is not None
        return PutStatus(answer[0])

    def put(self, conn: int, key: str, data: bytes, **options: Any) -> list[Location]:
        """A whole put that works."""
        ((status, places),) = self.put_start(conn, [(key, len(data))], **options)
        assert status is PutStatus.GRANTED
        for place in places:
            assert self.node_of(place[3]).write(key, place, data) is NodeStatus.OK
        assert self.put_end(conn, key, places[0][0], (1 << len(places)) - 1) is PutStatus.STORED
        return places

    def lookup(self, key: str) -> list[Location]:
        """Where a key lies, each replica; nothing for a miss."""
        answer = self.core.lookup(digests([key]), now_ms=self.now_ms)
        _, _, extras, _ = m.LOOKUP_HEAD.unpack_from(answer)
        first: Location = np.frombuffer(answer, LOCATION, 1, m.LOOKUP_HEAD.size)[0].tolist()
        rest = np.frombuffer(answer, m.EXTRA, extras, m.LOOKUP_HEAD.size + LOCATION.itemsize)
        return [place for place in (first, *(row["location"].tolist() for row in rest)) if place[3]]

    def read(self, key: str) -> bytes | None:
        """A key's bytes, from its first replica."""
        places = self.lookup(key)
        return self.node_of(places[0][3]).read(places[0]) if places else None

    def remove(self, conn: int, key: str) -> RemoveStatus | None:
        """What the master says to a remove; None when it waits for a node."""
        answer = self.ask(conn, Kind.REMOVE, digests([key]))
        return None if answer is None else RemoveStatus(answer[0])

    # The standby.

    def _join(self) -> None:
        """A standby takes the whole state over."""
        self.standby = Standby(MasterCore(self.settings, term=0, now_ms=self.now_ms))
        self.stream.clear()
        walk = StateWalk(self.core)
        self.stream += walk.stores()
        while (entries := walk.step()) is not None:
            self.stream += entries
        self.replicate()
        self.standby.apply(0, STATE_END, b"", now_ms=self.now_ms)

    def replicate(self, count: int = -1) -> None:
        """Operations reach the standby, all of them or some."""
        while self.stream and count:
            kind, _, body = self.stream.popleft().encode()
            self.standby.apply(self.standby.sequence + 1, kind, body, now_ms=self.now_ms)
            count -= 1

    def fail_over(self, *, down_ms: int = 0) -> None:
        """The master is killed and its standby leads; what was still on its way there is lost."""
        self.route()
        for node in self.nodes:
            node.conn, node.mounted = 0, False
            node.to_master.clear()
            node.from_master.clear()
        self.replies.clear()
        self.now_ms += down_ms
        self.term += 1
        self.standby.promote(term=self.term, now_ms=self.now_ms)
        self.core = self.standby.core
        self._join()

    # Operators.

    def hold(self, kind: HoldKind, *targets: str, **options: Any) -> HoldReply:
        """Drain or cordon, however little it leaves."""
        try:
            return self.core.holds.hold(
                targets,
                kind,
                **({"reason": "", "owner": "o", "since": "", "force": ["last-store"]} | options),
                now_ms=self.now_ms,
            )
        finally:
            self.route()
            self.replicate()

    def drain(self, *targets: str, **options: Any) -> HoldReply:
        """A drain."""
        return self.hold(HoldKind.DRAIN, *targets, **options)

    def undrain(self, *targets: str) -> HoldReply:
        """The end of a hold."""
        try:
            return self.core.holds.lift(targets, owner="o", now_ms=self.now_ms)
        finally:
            self.route()
            self.replicate()

    def holds_now(self) -> dict[str, HoldInfo]:
        """Every hold by its target."""
        return {hold.target: hold for hold in self.core.holds.every(now_ms=self.now_ms)}

    # Nodes.

    def node(self, name: str = "", *, host: str = "", size: int = 1 << 20, **flow: Any) -> Node:
        """A new node, mounted unless told otherwise."""
        self._incarnations += 1
        name = name or f"store-{len(self.nodes)}"
        node = Node(name, host or f"host-{name}", size, self._incarnations)
        self.nodes.append(node)
        if flow.get("mounted", True):
            self.open_session(node)
            self.flow()
        return node

    def node_of(self, store_id: int) -> Node:
        """The node behind a store id."""
        store = self.core.stores.get(store_id)
        assert store is not None
        return next(node for node in self.nodes if node.incarnation == store.mount.incarnation)

    def kill(self, node: Node) -> None:
        """The node's process ends, and its memory with it."""
        self.close_session(node)
        self.nodes.remove(node)

    def open_session(self, node: Node) -> None:
        """A new connection to the master, with a MOUNT on its way."""
        self._conns += 1
        node.conn = self._conns
        node.mounted, node.ended = False, False
        self.core.connected(node.conn, hello("store", node.name, node.host))
        node.to_master.append((Kind.MOUNT, wire.encode(node.mount())))

    def close_session(self, node: Node) -> None:
        """The connection breaks: what is on its way is lost."""
        conn, node.conn, node.mounted = node.conn, 0, False
        node.to_master.clear()
        node.from_master.clear()
        if conn:
            self.core.disconnected(conn, now_ms=self.now_ms)
            self.route()

    def beat(self, node: Node, *, lag_ms: int = 0) -> None:
        """A beat sets out."""
        beat = m.Beat(
            populated_bytes=node.size,
            objects=node.core.objects,
            used_bytes=node.core.used_bytes,
            loop_lag_ms=lag_ms,
        )
        node.to_master.append((Kind.BEAT, wire.encode(beat)))

    def step_to_master(self, node: Node) -> None:
        """One frame of a node arrives at the master."""
        kind, body = node.to_master.popleft()
        try:
            answer = self.ask(node.conn, kind, body)
        except KvopsError:
            self.close_session(node)
            return
        if answer is not None:
            node.from_master.append((kind + 1, answer))

    def step_to_node(self, node: Node) -> None:
        """One frame of the master arrives at a node: what ``Session`` does with it."""
        kind, body = node.from_master.popleft()
        if kind == wire.reply(Kind.MOUNT):
            mounted = decode(body, m.Mounted)
            node.core.raise_floor(mounted.floor)
            if mounted.announce:
                node.cursor = 0
                self._announce(node)
            else:
                self._serve(node)
        elif kind == wire.reply(Kind.SLOTS):
            if body:
                node.core.free(m.FREE_HEAD.pack(0) + body)
            if node.ended:
                self._serve(node)
            else:
                self._announce(node)
        elif kind == Kind.FREE:
            answer = node.core.free(body)
            if node.mounted:
                node.to_master.append((wire.reply(Kind.FREE), answer))
            else:
                node.answers.append(answer)
        elif kind == wire.reply(Kind.BEAT):
            _, unknown, floor = m.BEAT_REPLY.unpack(body)
            if unknown:
                self.close_session(node)
            else:
                node.core.raise_floor(floor)

    def _announce(self, node: Node) -> None:
        rows, node.cursor = node.core.announce(node.cursor, SLOTS_PER_FRAME)
        node.ended = not rows
        node.to_master.append((Kind.SLOTS, rows))

    def _serve(self, node: Node) -> None:
        node.mounted = True
        while node.answers:
            node.to_master.append((wire.reply(Kind.FREE), node.answers.popleft()))

    def flow(self) -> None:
        """Deliver everything that is on its way, until nothing is."""
        self.route()
        while True:
            busy = [node for node in self.nodes if node.conn and not node.frozen]
            before = [node for node in busy if node.to_master or node.from_master]
            if not before:
                return
            for node in before:
                while node.to_master:
                    self.step_to_master(node)
                while node.from_master:
                    self.step_to_node(node)

    def live(self, ms: int) -> None:
        """Time passes and everything flows, beats included."""
        while ms > 0:
            step = min(ms, 100)
            ms -= step
            for node in self.nodes:
                if node.frozen:
                    continue
                if not node.conn:
                    self.open_session(node)
                elif node.mounted:
                    self.beat(node)
            self.flow()
            self.tick(step)
            self.flow()

    # The master's life.

    def recovery(self) -> Recovery:
        """What the journal says."""
        complete = np.concatenate([np.empty(0, COMPLETE_ROW), *self.complete])
        gone = np.concatenate([np.empty(0, GONE_ROW), *self.gone])
        mounted = {id: store for id, store in self.stores.items() if store.state != "gone"}
        rows = without_replicas(live_rows(complete, gone), self.less)
        rows = rows[np.isin(rows["location"]["store"], list(mounted))]
        return Recovery(rows, mounted, holds=dict(self.holds), expires=dict(self.expires))

    def restart(self, *, journal: bool = True, down_ms: int = 0) -> None:
        """The master is killed and starts again; every connection breaks."""
        self.route()
        for node in self.nodes:
            node.conn, node.mounted = 0, False
            node.to_master.clear()
            node.from_master.clear()
        self.replies.clear()
        self.now_ms += down_ms
        self.term += 1
        recovery = self.recovery() if journal else None
        if not journal:
            self.complete.clear()
            self.gone.clear()
            self.less.clear()
            self.expires.clear()
            self.stores.clear()
            self.holds.clear()
        self.core = MasterCore(self.settings, term=self.term, now_ms=self.now_ms)
        if recovery is not None:
            self.core.restore(recovery, now_ms=self.now_ms)
        self._join()


def parse_put(answer: bytes, count: int) -> list[tuple[PutStatus, list[Location]]]:
    """Status and places of each row of a PUT_START answer."""
    _, replicas = m.PUT_REPLY_HEAD.unpack_from(answer)
    at = m.PUT_REPLY_HEAD.size
    statuses = [PutStatus(status) for status in answer[at : at + count]]
    rows = np.frombuffer(answer, LOCATION, count * replicas, at + count + -count % 8).tolist()
    return [
        (status, [place for place in rows[row * replicas : (row + 1) * replicas] if place[3]])
        for row, status in enumerate(statuses)
    ]
