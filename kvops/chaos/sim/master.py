"""
A simulated master: the real ``MasterCore``, its term file and journal, with ``Master``'s handling around them.

The event loop, sockets, gRPC and metrics of ``master.py`` are not covered; the order in which that shell calls the
core, sends what is left to send and writes the journal is repeated here.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final, cast

from kvops.chaos.sim.clock import Host
from kvops.chaos.sim.disk import Disk, JournalModel
from kvops.chaos.sim.net import End, Payload
from kvops.chaos.sim.process import Process
from kvops.errors import KvopsError
from kvops.net import wire
from kvops.net.auth import Hello, Welcome
from kvops.net.wire import Kind, decode
from kvops.store import messages as m
from kvops.store import term as terms
from kvops.store.journal import Kind as JournalKind
from kvops.store.journal_writer import JournalWriter
from kvops.store.master_core import TICK_MS, JournalEntry, MasterCore, MasterSettings
from kvops.store.model import GENERATION_SEQUENCE_BITS
from kvops.store.snapshot import Snapshot

if TYPE_CHECKING:
    from kvops.chaos.sim.world import World

IDLE_US: Final = 50_000  # between looks for work, a little less often than IDLE_INTERVAL_S
BUSY_US: Final = 2_000  # … while there is some
SNAPSHOT_PAUSE_MS: Final = 1_000
LOOKUP: Final = int(Kind.LOOKUP)
MOUNT: Final = int(Kind.MOUNT)
REMOVE: Final = int(Kind.REMOVE)


class MasterProcess(Process):
    """One life of one master."""

    def __init__(
        self, world: World, name: str, host: Host, rng: Random, *, disk: Disk, settings: MasterSettings
    ) -> None:
        super().__init__(world, name, host, rng)
        self.disk = disk
        self.settings = settings
        self.incarnation = rng.getrandbits(62) | 1
        self.core: MasterCore
        self.journal: JournalModel
        self._conns: dict[int, End] = {}
        self._next_conn = 0
        self._snapshot: Snapshot | None = None
        self._snapshot_after_ms = 0
        self._tick_due_ms = 0

    def start(self) -> None:
        """As ``Master.run`` does it, up to listening."""
        term = terms.raise_term(self.disk.directory, at_least=1)
        self.core = MasterCore(self.settings, term=term, now_ms=self.now_ms())
        next_sequence = self._recover()
        self.journal = JournalModel(self.disk, self, next_sequence=next_sequence)
        self.world.oracle.master_started(self)
        self.world.net.listen(self.name, self)
        self._tick()

    def _recover(self) -> int:
        if not self.disk.segments:
            return 0
        try:
            recovery = self.disk.recover()
        except KvopsError as error:
            self.world.say(self.name, f"journal set aside: {error.what}")
            self.disk.put_aside()
            return 0
        seen = recovery.generation_max >> GENERATION_SEQUENCE_BITS
        if seen >= self.core.term:
            self.core.raise_term(terms.raise_term(self.disk.directory, at_least=seen + 1))
        self.core.restore(recovery, now_ms=self.now_ms())
        return recovery.next_sequence

    # Streams.

    def accept(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        """A peer says who it is."""
        self._next_conn += 1
        end.conn = self._next_conn
        end.on_frame = self._frame
        end.on_close = self._closed
        self._conns[end.conn] = end
        self.core.connected(end.conn, decode(body, Hello))
        welcome = Welcome(
            role="master",
            name=self.name,
            term=self.core.term,
            incarnation=self.incarnation,
            boot_id=self.host.name,
            unix_path="",
        )
        end.send(Kind.WELCOME, 0, wire.encode(welcome))

    def _closed(self, end: End) -> None:
        if self._conns.pop(end.conn, None) is not None:
            now = self.now_ms()
            self.core.disconnected(end.conn, now_ms=now)
            self._after_request(now)

    def _frame(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        now = self.now_ms()
        try:
            if kind == LOOKUP:
                answer: bytes | None = self.core.lookup(body, now_ms=now)
            else:
                if kind == MOUNT:
                    self._outdo(body)
                elif kind == REMOVE:
                    self.world.oracle.master_removes(self, body)
                answer = self.core.handle(end.conn, kind, request, body, now_ms=now)
        except KvopsError as error:
            self.world.say(self.name, f"refused a frame of kind {kind}: {error.what}")
            end.close()
            self._closed(end)
            return
        if answer is not None:
            self.world.oracle.master_answers(self, kind, self.core.term)
            end.send(kind + 1, request, answer)
        self._after_request(now)

    def _outdo(self, body: bytes) -> None:
        """A store that has seen a newer term than ours must be outdone first."""
        mount = decode(body, m.Mount)
        seen = mount.highest_generation >> GENERATION_SEQUENCE_BITS
        if seen > self.core.term or (seen == self.core.term and not self.core.knows(mount)):
            self.core.raise_term(terms.raise_term(self.disk.directory, at_least=seen + 1))

    # Time.

    def _tick(self) -> None:
        now = self.now_ms()
        if now >= self._tick_due_ms:
            self._tick_due_ms = now + TICK_MS
            self.core.tick(now_ms=now)
        self._slice(now)
        self.timer(BUSY_US if self.core.has_work else IDLE_US, self._tick)

    def _after_request(self, now: int) -> None:
        self._send()
        if self.core.work_due(now):
            self._slice(now)

    def _slice(self, now: int) -> None:
        core = self.core
        if core.journal:
            self._write_journal()
        evicted, swept = core.counters.evicted, core.counters.swept
        core.work(now_ms=now)
        if core.journal:
            self.world.oracle.master_dropped(
                self, core.journal, core.counters.evicted - evicted, core.counters.swept - swept
            )
        self._send()
        if self._snapshot is not None and self._snapshot.step():
            self._snapshot = None
            self._snapshot_after_ms = now + SNAPSHOT_PAUSE_MS

    def _send(self) -> None:
        core = self.core
        if core.has_output:
            for conn, data in core.next_frames():
                head = wire.unpack_header(data)
                end = self._conns.get(conn)
                if end is not None:
                    end.send(head.kind, head.request, data[wire.HEADER_BYTES :])
        if core.events:
            if self.world.recording:
                for event in core.events:
                    detail = " ".join(f"{name}={value}" for name, value in event.detail.items())
                    self.world.say(self.name, f"{event.event} {event.subject} {detail}".rstrip())
            core.events.clear()
        if core.journal:
            self._write_journal()

    def _write_journal(self) -> None:
        entries: list[JournalEntry] = self.core.journal
        self.core.journal = []
        for entry in entries:
            if entry.rows is not None:
                self.journal.append_rows(entry.kind, entry.rows)
                if entry.kind == JournalKind.COMPLETE:
                    self.world.oracle.master_completed(entry.rows)
                if self.world.recording and entry.kind == JournalKind.GONE:
                    self.world.say(self.name, f"gone {[hex(g) for g in entry.rows['generation'].tolist()]}")
            elif entry.store is not None:
                self.journal.append_store(entry.store)
        now = self.now_ms()
        if self.journal.wants_snapshot and self._snapshot is None and now >= self._snapshot_after_ms:
            self._snapshot = Snapshot(cast(JournalWriter, self.journal), self.core)

    def stop(self) -> None:
        """SIGTERM."""
        self._write_journal()
        self.journal.close()
        for end in list(self.ends):
            end.close()
        self.end()

    def kill(self) -> None:
        """SIGKILL."""
        self.journal.killed()
        super().kill()

    def power_off(self) -> None:
        """Its host is gone, with what was not synced."""
        self.journal.killed()
        self.disk.lose_power()
        super().power_off()
