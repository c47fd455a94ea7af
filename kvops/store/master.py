"""The master process: one event loop around ``MasterCore``, with its sockets, its journal and its metrics."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import uvloop

from kvops import collector
from kvops.errors import KvopsError
from kvops.files import read_secret
from kvops.log import configure, log
from kvops.metrics import HttpServer, Reading, expose, serve_http
from kvops.net import wire
from kvops.net.auth import Hello, Listener, Welcome
from kvops.net.link import Address
from kvops.net.peer import Peers, WirePeer
from kvops.net.rpc_server import RpcServer, serve_rpc
from kvops.net.spin import GAP_S, Spin
from kvops.net.wire import Frame, Kind, decode
from kvops.notify import notify, notify_ready
from kvops.proto.kvops.v1 import control_pb2 as pb
from kvops.store import messages as m
from kvops.store.clock import boot_id, boot_ms
from kvops.store.config import MasterConfig
from kvops.store.control import SERVICE, ControlServicer
from kvops.store.events import EventFollower, EventLog
from kvops.store.journal import recover_state, set_aside
from kvops.store.journal_writer import JournalWriter
from kvops.store.listen import connection_room, listen_tcp, listen_unix
from kvops.store.master_core import TICK_MS, MasterCore, MasterSettings
from kvops.store.model import GENERATION_SEQUENCE_BITS, Event, HoldKind, HoldReply, MasterStatus
from kvops.store.snapshot import Snapshot
from kvops.store.term import raise_term

SWITCH_INTERVAL_S: Final = 0.0005  # for other threads (scrapes, the journal) to give the GIL back to the loop
SPIN_S: Final = 200e-6  # as long as a caller that slept takes to wake up
PAUSE_S_MAX: Final = (
    500e-6  # a batch of 1,000 keys keeps its caller busy for 150, and our own wake-up takes up to 200
)
WORK_INTERVAL_S: Final = 0.002  # between slices, while there is work
IDLE_INTERVAL_S: Final = 0.02
PREPARE_INTERVAL_S: Final = 0.02
PREPARE_SLOTS: Final = 65_536  # ahead of the index; 5 MB
FLUSH_S_MAX: Final = 1.0  # an operator's change waits this long for a slow disk
SNAPSHOT_PAUSE_S: Final = 10.0  # between two attempts
INTERNAL_ERROR: Final = 70  # EX_SOFTWARE of sysexits.h
STALLED_S: Final = 2.0  # a loop that has not ticked for this long is not ready


class _Spinner:
    """
    Looks for the next request for a moment before the loop sleeps.

    It does so while requests come close together and it pays.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._spin = Spin()
        self._until = 0.0
        self._answered = 0.0
        self._looked = 0.0
        self._pause = 0.0
        self._spinning = False
        self._awaited = False  # since the last answer we spin, and no request has come

    def asked(self) -> None:
        """A request has come."""
        self._looked = now = time.perf_counter()
        self._pause = now - self._answered
        if self._awaited:
            self._awaited = False
            self._spin.learn(now < self._until)

    def answered(self) -> None:
        """It was answered just now."""
        self._answered = self._looked = now = time.perf_counter()
        if self._pause < PAUSE_S_MAX and self._spin.pays():
            self._until = now + SPIN_S
            self._awaited = True
            if not self._spinning:
                self._spinning = True
                self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self._awaited:
            now = time.perf_counter()
            gap, self._looked = now - self._looked, now
            if now < self._until and gap < GAP_S:
                self._loop.call_soon(self._look)
                return
            self._awaited = False
            self._spin.learn(False)
        self._spinning = False


class _Peer(WirePeer):
    """A client's or a store's connection to the master."""

    def __init__(self, master: Master, listener: Listener) -> None:
        super().__init__(listener, master.welcome, master.connections)
        self._master = master
        self._core = master.core
        self.conn = 0

    def authenticated(self, hello: Hello) -> None:
        """Enter it."""
        self.conn = self._master.enter(self)
        self._core.connected(self.conn, hello)

    def lost(self) -> None:
        """Its puts are given up, its store is hidden."""
        self._master.leave(self)

    def frame(self, frame: Frame, body: bytes) -> None:
        """One request."""
        now = boot_ms()
        self._master.spinner.asked()
        if frame.kind == Kind.LOOKUP:
            answer: bytes | None = self._core.lookup(body, now_ms=now)
        elif frame.kind == Kind.MOUNT:
            self._master.mount(self, frame, body)
            return
        else:
            began = time.thread_time()  # a system call of 0.3 µs: not on the path of a lookup
            answer = self._core.handle(self.conn, frame.kind, frame.request, body, now_ms=now)
            self._master.longest_request_s = max(self._master.longest_request_s, time.thread_time() - began)
        if answer is not None:
            self.transport.write(wire.pack(frame.kind + 1, answer, frame.request))
        self._master.after_request(now)


class Master:
    """One master, from its sockets to its journal."""

    def __init__(self, config: MasterConfig) -> None:
        self.config = config
        self._secret = read_secret(Path(config.secret_file))
        self._state_dir = Path(config.state_dir)
        self.connections = Peers(connection_room())
        self._peers: dict[int, _Peer] = {}  # by number, once proved
        self._next_conn = 0
        self._ready = False
        self._ticked = time.monotonic()
        self._longest_slice_s = 0.0
        self.longest_request_s = 0.0
        self._started = time.monotonic()
        self._event_log = EventLog()
        self._snapshot: Snapshot | None = None
        self._snapshot_after = 0.0
        self.core: MasterCore
        self.spinner: _Spinner
        self._journal: JournalWriter
        self._addresses: dict[str, str] = {}
        self._incarnation = (
            secrets.randbits(63) | 1
        )  # tells clients that ids of stores mean something else now
        self._exit_code = 0
        self._stop = asyncio.Event()

    # Life.

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        term = raise_term(self._state_dir, at_least=1)
        self.core = MasterCore(
            MasterSettings(
                group=self.config.group,
                placement=self.config.placement,
                eviction_high_watermark=self.config.eviction_high_watermark,
                eviction_low_watermark=self.config.eviction_low_watermark,
                objects_max=self.config.objects_max,
                seed=int.from_bytes(os.urandom(4), "little"),
            ),
            term=term,
            now_ms=boot_ms(),
        )
        self.spinner = _Spinner(loop)
        recovered, next_sequence = self._recover()
        self._journal = JournalWriter(self._state_dir / "journal", next_sequence=next_sequence)
        servers, rpc, http = await self._listen()
        metrics = expose(self._readings())
        ticks = loop.create_task(self._tick())
        ticks.add_done_callback(self._ticks_ended)
        self._ready = True
        await rpc.set_serving(True)
        log.info("master.started", term=term, recovered=recovered, **self._addresses)
        collector.settle()
        ended = threading.Event()
        preparing = threading.Thread(target=self._prepare, args=(ended,), name="prepare", daemon=True)
        preparing.start()
        notify_ready(self._addresses, status=f"serving, term {term}")
        await self._stop.wait()
        self._ready = False
        notify("STOPPING=1")
        log.info("master.stopping")
        ended.set()
        ticks.cancel()
        for server in servers:
            server.close()
        self.connections.abort()
        await rpc.close()
        metrics.close()
        http.close()
        self._write_journal()
        await asyncio.to_thread(self._journal.close)
        if self.config.unix_path:
            Path(self.config.unix_path).unlink(missing_ok=True)
        return self._exit_code

    def _prepare(self, ended: threading.Event) -> None:
        """Keep a little memory ahead of the index, off the loop."""
        try:
            while not ended.wait(PREPARE_INTERVAL_S):
                self.core.index.prepare(PREPARE_SLOTS)
        except OSError as error:
            log.warning("index.unprepared", error=error.strerror)  # it grows all the same, with longer pauses

    async def _listen(self) -> tuple[list[asyncio.Server], RpcServer, HttpServer]:
        loop = asyncio.get_running_loop()
        listening = listen_tcp(Address.parse(self.config.listen))
        servers = [await loop.create_server(self._accept, sock=listening)]
        host, port = listening.getsockname()[:2]
        self._addresses["listen"] = f"{host}:{port}"
        if self.config.unix_path:
            servers.append(
                await loop.create_unix_server(self._accept, sock=listen_unix(self.config.unix_path))
            )
            self._addresses["unix"] = self.config.unix_path
        rpc = await serve_rpc(
            self.config.control,
            secrets=[self._secret],
            register=ControlServicer(self).add_to,
            services=[SERVICE],
        )
        self._addresses["control"] = rpc.address
        http = serve_http(self.config.http, ready=self._is_ready)
        self._addresses["http"] = http.address
        return servers, rpc, http

    def _accept(self) -> WirePeer:
        return _Peer(self, Listener(self._secret, self.config.group))

    def welcome(self) -> Welcome:
        """What a peer learns of us."""
        return Welcome(
            role="master",
            name=self.config.name,
            term=self.core.term,
            incarnation=self._incarnation,
            boot_id=boot_id(),
            unix_path=self.config.unix_path,
        )

    def _is_ready(self) -> tuple[bool, str]:
        if not self._ready:
            return False, "starting or stopping"
        silent = time.monotonic() - self._ticked
        return (True, "") if silent < STALLED_S else (False, f"the loop has not ticked for {silent:.1f} s")

    # Peers.

    def enter(self, peer: _Peer) -> int:
        """A number for a new connection."""
        self._next_conn += 1
        self._peers[self._next_conn] = peer
        return self._next_conn

    def leave(self, peer: _Peer) -> None:
        """A connection ended."""
        if self._peers.pop(peer.conn, None) is not None:
            now = boot_ms()
            self.core.disconnected(peer.conn, now_ms=now)
            self.after_request(now)

    def mount(self, peer: _Peer, frame: Frame, body: bytes) -> None:
        """A store that has seen a newer term than ours (our state was lost) must be outdone first."""
        mount = decode(body, m.Mount)
        seen = mount.highest_generation >> GENERATION_SEQUENCE_BITS
        # Of our own term a store that mounted here before has only seen what we granted.
        outdone = seen > self.core.term or (seen == self.core.term and not self.core.knows(mount))
        if outdone and peer.hello is not None and peer.hello.role == "store":
            self.core.raise_term(raise_term(self._state_dir, at_least=seen + 1))
        now = boot_ms()
        answer = self.core.handle(peer.conn, frame.kind, frame.request, body, now_ms=now)
        assert answer is not None
        peer.reply(frame, answer)
        self.after_request(now)

    def after_request(self, now: int) -> None:
        """What a request left to do: frames to others, events, a slice of work."""
        self._send()
        if self.core.work_due(now):
            self._slice(now)
            if self._snapshot is not None and self._snapshot.step():
                self._snapshot = None
                self._snapshot_after = time.monotonic() + SNAPSHOT_PAUSE_S
        self.spinner.answered()

    def _send(self) -> None:
        if self.core.has_output:
            for conn, data in self.core.next_frames():
                peer = self._peers.get(conn)
                if peer is not None:
                    peer.transport.write(data)
        if self.core.events:
            self._publish()
        if self.core.journal:
            self._write_journal()

    def _publish(self) -> None:
        events, self.core.events = self.core.events, []
        offset = int(time.time() * 1_000) - boot_ms()
        for event in events:
            self._event_log.record(
                event.event,
                subject=event.subject,
                actor=self.config.name,
                time_ms=event.time_ms + offset,
                detail=event.detail,
            )
            log.info(event.event, subject=event.subject, **event.detail)

    def _slice(self, now: int) -> None:
        began = time.thread_time()
        self.core.work(now_ms=now)
        self._longest_slice_s = max(self._longest_slice_s, time.thread_time() - began)
        self._send()

    async def _tick(self) -> None:
        """Deadlines every ``TICK_MS``, and work that no request brought along."""
        due = 0
        while True:
            await asyncio.sleep(WORK_INTERVAL_S if self.core.has_work else IDLE_INTERVAL_S)
            self._ticked = time.monotonic()
            now = boot_ms()
            if now >= due:
                due = now + TICK_MS
                self.core.tick(now_ms=now)
            self._slice(now)
            if self._snapshot is not None and self._snapshot.step():
                self._snapshot = None
                self._snapshot_after = time.monotonic() + SNAPSHOT_PAUSE_S

    def _ticks_ended(self, task: asyncio.Task[None]) -> None:
        """Without its timer a master would serve on and notice no death: it ends, its journal is in order."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("master.failed", error=repr(error), exc_info=error)
            self._exit_code = INTERNAL_ERROR
            self._stop.set()

    # Journal.

    def _recover(self) -> tuple[int, int]:
        """
        Read the journal; a damaged one is set aside, since the stores' slot tables say the same.

        Returns:
            Count of objects, and the next batch's sequence.
        """
        directory = self._state_dir / "journal"
        if not directory.exists():
            return 0, 0
        try:
            recovery = recover_state(directory)
        except KvopsError as error:
            aside = set_aside(directory)
            log.error("journal.set_aside", error=error.what, kept_as=str(aside))
            return 0, 0
        seen = recovery.generation_max >> GENERATION_SEQUENCE_BITS
        if seen >= self.core.term:
            self.core.raise_term(raise_term(self._state_dir, at_least=seen + 1))
        self.core.restore(recovery, now_ms=boot_ms())
        return len(recovery.rows), recovery.next_sequence

    def _write_journal(self) -> None:
        entries, self.core.journal = self.core.journal, []
        for entry in entries:
            if entry.rows is not None:
                self._journal.append_rows(entry.kind, entry.rows)
            elif entry.store is not None:
                self._journal.append_store(entry.store)
            elif entry.holds:
                self._journal.append_holds(entry.holds)
        if (
            self._journal.wants_snapshot
            and self._snapshot is None
            and time.monotonic() >= self._snapshot_after
        ):
            self._snapshot = Snapshot(self._journal, self.core)

    # What operators ask.

    def status(self) -> MasterStatus:
        """The master as it is now."""
        core = self.core
        return MasterStatus(
            group=self.config.group,
            name=self.config.name,
            host=self.config.host,
            pid=os.getpid(),
            address=self._addresses.get("listen", ""),
            role="leader",
            term=core.term,
            uptime_s=time.monotonic() - self._started,
            placement=self.config.placement,
            objects=len(core.index),
            processing=len(core.puts),
            capacity_bytes=core.stores.capacity_bytes(),
            used_bytes=core.used_bytes(),
            evicted_total=core.counters.evicted,
            lookups_total=core.index.lookups_total,
            hits_total=core.index.hits_total,
            breaker_open=core.breaker_open,
            stores=[store.info() for store in core.stores],
            clients=core.clients(),
            holds=core.holds.every(now_ms=boot_ms()),
        )

    def hold(self, kind: HoldKind, request: pb.DrainRequest) -> HoldReply:
        """Drain or cordon."""
        now = boot_ms()
        reply = self.core.holds.hold(
            request.targets,
            kind,
            reason=request.reason,
            owner=request.owner,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            migrate=request.migrate,
            bandwidth_bps=request.bandwidth_bps,
            force=request.force,
            dry_run=request.dry_run,
            now_ms=now,
        )
        self._send()
        return reply

    def lift(self, request: pb.UndrainRequest) -> HoldReply:
        """Undrain."""
        reply = self.core.holds.lift(
            request.targets, owner=request.owner, dry_run=request.dry_run, now_ms=boot_ms()
        )
        self._send()
        return reply

    def ok_to_stop(self, targets: Sequence[str]) -> HoldReply:
        """What stopping these would do to the pool."""
        return self.core.holds.ok_to_stop(targets, now_ms=boot_ms())

    def holds(self) -> HoldReply:
        """Every hold."""
        return HoldReply(holds=self.core.holds.every(now_ms=boot_ms()))

    async def remembered(self) -> None:
        """Wait until the journal is in the kernel's hands, so that it outlives this process."""
        if not await asyncio.to_thread(self._journal.flush, FLUSH_S_MAX):
            log.error("journal.behind", waited_s=FLUSH_S_MAX)  # what was asked for is done all the same

    def events(self, since: str | None) -> list[Event]:
        """The events held, oldest first, from a time on."""
        return self._event_log.events(since)

    def subscribe(self) -> EventFollower:
        """Every event from now on."""
        return self._event_log.subscribe()

    def _readings(self) -> list[Reading]:
        core = self.core

        def counter(name: str, text: str, read: Callable[[], float]) -> Reading:
            return Reading(name=name, help=text, read=read, kind="counter")

        return [
            Reading(name="kvops_master_term", help="Term of this master.", read=lambda: core.term),
            Reading(name="kvops_master_objects", help="Readable objects.", read=lambda: len(core.index)),
            Reading(name="kvops_master_processing", help="Puts under way.", read=lambda: len(core.puts)),
            Reading(
                name="kvops_master_index_bytes", help="Memory of the index.", read=core.index.memory_bytes
            ),
            Reading(
                name="kvops_master_capacity_bytes", help="Mounted memory.", read=core.stores.capacity_bytes
            ),
            Reading(name="kvops_master_used_bytes", help="Memory in use.", read=core.used_bytes),
            Reading(
                name="kvops_master_connections", help="Open connections.", read=lambda: len(self.connections)
            ),
            Reading(
                name="kvops_master_stores",
                help="Stores by state.",
                read=lambda: _count((store.state.value,) for store in core.stores),
                labels=("state",),
            ),
            Reading(
                name="kvops_master_breaker_open",
                help="Whether the group's is.",
                read=lambda: float(core.breaker_open),
            ),
            Reading(
                name="kvops_master_slice_seconds_max",
                help="CPU time of the longest slice of background work.",
                read=lambda: self._longest_slice_s,
            ),
            Reading(
                name="kvops_master_request_seconds_max",
                help="CPU time of the longest request that was no lookup.",
                read=lambda: self.longest_request_s,
            ),
            counter("kvops_master_lookups_total", "Keys looked up.", lambda: core.index.lookups_total),
            counter("kvops_master_hits_total", "Keys found.", lambda: core.index.hits_total),
            counter("kvops_master_puts_total", "Objects completed.", lambda: core.counters.puts),
            counter("kvops_master_evicted_total", "Objects evicted.", lambda: core.counters.evicted),
            counter("kvops_master_removed_total", "Objects removed.", lambda: core.counters.removed),
            counter("kvops_master_preempted_total", "Puts of dead writers.", lambda: core.counters.preempted),
            counter("kvops_master_no_space_total", "Puts without room.", lambda: core.counters.no_space),
            counter(
                "kvops_master_swept_total",
                "Objects of lost stores forgotten.",
                lambda: core.sweeper.swept_total,
            ),
        ]


def _count(labels: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], float]:
    counts: dict[tuple[str, ...], float] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    return counts


def serve(config: MasterConfig) -> int:
    """Run one master in the foreground; its exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure(role=config.name, host=config.host, path=Path(config.log_file) if config.log_file else None)
    return uvloop.run(Master(config).run())
