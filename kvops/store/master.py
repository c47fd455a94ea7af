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
from typing import Any, Final

import msgspec
import uvloop

from kvops import __version__, collector
from kvops.errors import KvopsError, NotLeader, Refused, Unreachable, UsageError, WireError
from kvops.files import read_secret
from kvops.limits import BEAT_INTERVAL_MS
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
from kvops.store.config import MasterConfig, read_password
from kvops.store.control import SERVICE, ControlServicer
from kvops.store.coord import TIMEOUT_S_MAX, Coordinator, EtcdAccess, GroupKeys
from kvops.store.election import Claim, Election, Role, Seen
from kvops.store.events import EventFollower, EventLog
from kvops.store.follower import Follower
from kvops.store.journal import recover_state, set_aside
from kvops.store.journal_writer import JournalWriter
from kvops.store.listen import connection_room, listen_tcp, listen_unix
from kvops.store.master_core import TICK_MS, JournalEntry, MasterCore, MasterSettings
from kvops.store.model import (
    GENERATION_SEQUENCE_BITS,
    Event,
    HoldKind,
    HoldReply,
    MasterStatus,
    Promotion,
    StopCheck,
    Trouble,
)
from kvops.store.replication import Replication, unpack_ack
from kvops.store.snapshot import Snapshot
from kvops.store.standby import Standby
from kvops.store.streams import Streams
from kvops.store.term import TERM_MAX, note_term, raise_term, read_term

SWITCH_INTERVAL_S: Final = 0.0005  # for other threads (scrapes, the journal) to give the GIL back to the loop
SPIN_S: Final = 200e-6  # as long as a caller that slept takes to wake up
PAUSE_S_MAX: Final = (
    500e-6  # a batch of 1,000 keys keeps its caller busy for 150, and our own wake-up takes up to 200
)
WORK_INTERVAL_S: Final = 0.002  # between slices, while there is work
IDLE_INTERVAL_S: Final = 0.02
PREPARE_INTERVAL_S: Final = 0.02
PREPARE_SLOTS: Final = 65_536  # ahead of the index; 5 MB
COMMIT_S_MAX: Final = 2.0  # … for standbys
FLUSH_S_MAX: Final = 1.0  # an operator's change waits this long for a slow disk
SNAPSHOT_PAUSE_S: Final = 10.0  # between two attempts
ALWAYS: Final = 1 << 63  # a lease that nobody else can have
HELD_MAX: Final = 100_000  # answers that wait for standbys
JOURNAL_WAIT_S: Final = 1.0  # for a standby's disk to take the state
JOURNAL_STEP_S: Final = 0.1
INTERNAL_ERROR: Final = 70  # EX_SOFTWARE of sysexits.h
STEP_DOWN_DELAY_S: Final = 0.2  # after a drain of its own host: the answer leaves first
TERM_RETRY_S: Final = 10.0  # for a disk that refused it
SWEEP_DELAY_S: Final = 1.0  # connections that were cut hold on to the directory for a moment
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
        self._core: MasterCore
        self.conn = 0

    def admit(self, hello: Hello) -> None:
        """Only the leader has anything to say."""
        self._master.assert_leads(boot_ms())

    def authenticated(self, hello: Hello) -> None:
        """Enter it."""
        self._core = self._master.core
        self.conn = self._master.enter(self)
        self._core.connected(self.conn, hello)

    def lost(self) -> None:
        """Its puts are given up, its store is hidden."""
        self._master.leave(self)

    def frame(self, frame: Frame, body: bytes) -> None:
        """One request."""
        now = boot_ms()
        if now >= self._master.lease_until_ms:
            self._master.assert_leads(now)
        self._master.spinner.asked()
        if frame.kind == Kind.LOOKUP:
            answer: bytes | None = self._core.lookup(body, now_ms=now)
        elif frame.kind == Kind.MOUNT:
            self._master.mount(self, frame, body)
            return
        elif frame.kind in _STANDBY_KINDS:
            self._master.standby_frame(self, frame, body)
            return
        else:
            began = time.thread_time()  # a system call of 0.3 µs: not on the path of a lookup
            answer = self._core.handle(self.conn, frame.kind, frame.request, body, now_ms=now)
            self._master.longest_request_s = max(self._master.longest_request_s, time.thread_time() - began)
        if answer is not None:
            data = wire.pack(frame.kind + 1, answer, frame.request)
            if frame.kind in _PROMISES and self._master.must_wait(frame.kind, answer):
                self._master.answer_later(self, data)
            else:
                self.transport.write(data)
        self._master.after_request(now)


_STANDBY_KINDS: Final = frozenset({Kind.JOIN, wire.reply(Kind.REPLICATE)})
_PROMISES: Final = frozenset({Kind.PUT_START, Kind.PUT_END})
"""Answers that a new leader has to keep; that of a REMOVE comes through ``MasterCore.out``."""


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
        self._journal: JournalWriter | None = None
        self._addresses: dict[str, str] = {}
        self._incarnation = (
            secrets.randbits(63) | 1
        )  # tells clients that ids of stores mean something else now
        self._exit_code = 0
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self.lease_until_ms = ALWAYS
        """Nothing is answered from then on, on the boot clock."""
        self._replication: Replication | None = None  # as a leader among several
        self._streams = Streams()
        self._unconfirmed: list[tuple[int, asyncio.Future[None]]] = []  # operators that wait for a sequence
        self._beat_due_ms = 0
        self._coordinator: Coordinator | None = None  # one of several masters
        self._follower: Follower | None = None  # … that does not lead
        self._starting: asyncio.Task[None] | None = None  # to lead
        self._troubles: dict[str, Trouble] = {}  # by code, for status
        self._followed_snapshot: Snapshot | None = None  # of what we follow; the follower's thread's
        self._ticked_ms = boot_ms()

    # Life.

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT."""
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.spinner = _Spinner(loop)
        self.core = self._fresh_core(term=0)
        if self.config.etcd:
            self.lease_until_ms = 0
            keys = await asyncio.to_thread(self._group_keys)
        else:
            term = raise_term(self._state_dir, at_least=1)
            self._lead_from_journal(term)
        servers, rpc, http = await self._listen()
        metrics = expose(self._readings())
        ticks = loop.create_task(self._tick())
        ticks.add_done_callback(self._ticks_ended)
        if self.config.etcd:
            self._start_election(keys)
        self._ready = True
        await rpc.set_serving(True)
        log.info("master.started", term=self.core.term, **self._addresses)
        collector.settle()
        ended = threading.Event()
        preparing = threading.Thread(target=self._prepare, args=(ended,), name="prepare", daemon=True)
        preparing.start()
        notify_ready(self._addresses, status=f"serving, term {self.core.term}")
        await self._stop.wait()
        self._ready = False
        notify("STOPPING=1")
        log.info("master.stopping")
        ended.set()
        if self._coordinator is not None:
            await asyncio.to_thread(self._coordinator.stop)
        if self._follower is not None:
            await asyncio.to_thread(self._follower.stop)
        ticks.cancel()
        for server in servers:
            server.close()
        self.connections.abort()
        await rpc.close()
        metrics.close()
        http.close()
        if self._journal is not None:
            self._write_journal()
            await asyncio.to_thread(self._journal.close)
        if self.config.unix_path:
            Path(self.config.unix_path).unlink(missing_ok=True)
        return self._exit_code

    def _prepare(self, ended: threading.Event) -> None:
        """Keep a little memory ahead of the index, off the loop."""
        try:
            while not ended.wait(PREPARE_INTERVAL_S):
                self.core.index.prepare(PREPARE_SLOTS)  # of whichever directory leads by then
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
            if self._replication is not None:
                self._replication.left(peer.conn)
                self._streams.drop(peer.conn)
                self._release()
            self.core.disconnected(peer.conn, now_ms=now)
            self.after_request(now)

    def mount(self, peer: _Peer, frame: Frame, body: bytes) -> None:
        """A store that has seen a newer term than ours (our state was lost) must be outdone first."""
        mount = decode(body, m.Mount)
        seen = mount.highest_generation >> GENERATION_SEQUENCE_BITS
        # Of our own term a store that mounted here before has only seen what we granted.
        outdone = seen > self.core.term or (seen == self.core.term and not self.core.knows(mount))
        if outdone and peer.hello is not None and peer.hello.role == "store":
            if self._coordinator is not None:
                self._ask_for_term(seen)  # and the store comes again
            else:
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
        if self.core.journal:
            self._write_journal()
        if self.core.has_output:
            for conn, data in self.core.next_frames():
                peer = self._peers.get(conn)
                if peer is None:
                    continue
                if self._replication is not None and self._replication.pending:
                    self._replication.hold(
                        conn, data
                    )  # no memory is reused before its object is gone everywhere
                else:
                    peer.transport.write(data)
        if self.core.events:
            self._publish()

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
            self._ticked_ms = now = boot_ms()
            if self._coordinator is not None:
                self._tend_standbys(now)
                if now >= self.lease_until_ms:
                    continue  # whoever does not lead changes nothing
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
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A bug of ours: one half of a master must not go on without the other, holding a lease or a place."""
        log.error("master.failed", error=repr(error), exc_info=error)
        self._exit_code = INTERNAL_ERROR
        self._stop.set()

    # Leading.

    def _fresh_core(self, *, term: int) -> MasterCore:
        return MasterCore(
            MasterSettings(
                group=self.config.group,
                placement=self.config.placement,
                eviction_high_watermark=self.config.eviction_high_watermark,
                eviction_low_watermark=self.config.eviction_low_watermark,
                objects_max=self.config.objects_max,
                ramp_ms=self.config.ramp_ms,
                seed=int.from_bytes(os.urandom(4), "little"),
            ),
            term=term,
            now_ms=boot_ms(),
        )

    def _lead_from_journal(self, term: int) -> None:
        """Begin with what our own journal says; the stores' slot tables have the last word."""
        self.core = self._fresh_core(term=term)
        recovered, next_sequence = self._recover()
        self._open_journal(next_sequence)
        log.info("journal.recovered", objects=recovered)

    def assert_leads(self, now: int) -> None:
        """
        Turn everybody away while we do not lead.

        Raises:
            NotLeader: With the leader's address, where one is known.
        """
        if now < self.lease_until_ms:
            return
        leader = self._leader_address()
        raise NotLeader(
            f"{self.config.name} does not lead",
            fix=f"ask {leader}" if leader else "wait for the election",
            leader=leader,
        )

    def _leader_address(self) -> str | None:
        assert self._coordinator is not None
        claim = self._coordinator.election.seen.leader
        return None if claim is None or claim.name == self.config.name else claim.address

    def _group_keys(self) -> GroupKeys:
        config = self.config
        access = EtcdAccess(
            endpoints=config.etcd,
            ca_file=config.etcd_ca,
            cert_file=config.etcd_cert,
            key_file=config.etcd_key,
            user=config.etcd_user,
            password=read_password(config.etcd_password_file),
        )
        keys = GroupKeys(access, group=config.group, timeout_s=min(TIMEOUT_S_MAX, config.etcd_ttl_s / 4))
        keys.check(self._secret)
        return keys

    def _start_election(self, keys: GroupKeys) -> None:
        claim = Claim(
            name=self.config.name,
            term=0,
            address=self._addresses["listen"],
            control=self._addresses["control"],
            host=self.config.host,
        )
        election = Election(claim, ttl_s=self.config.etcd_ttl_s, term_min=read_term(self._state_dir))
        self._coordinator = Coordinator(
            keys,
            election,
            ticked_ms=lambda: self._ticked_ms,
            changed=lambda: self._call_soon(self._election_changed),
            failed=lambda error: self._call_soon(lambda: self._fail(error)),
        )
        self._coordinator.start()

    def _call_soon(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop has ended

    def _election_changed(self) -> None:
        """The election's thread has news: we lead, we lead no more, or somebody else does."""
        assert self._coordinator is not None
        if self._stop.is_set():
            return
        election = self._coordinator.election
        if election.role is Role.LEADER and self._replication is None:
            if self._starting is None:
                self._starting = self._loop.create_task(self._begin_to_lead(election.term))
                self._starting.add_done_callback(self._ticks_ended)
        elif election.role is Role.STANDBY:
            if self._replication is not None:
                self._cease_to_lead()
            self._follow(election.seen)
        if self._replication is not None:
            if election.term > self.core.term:
                self.core.raise_term(election.term)
                self._keep_term(election.term)
            self._replication.members(election.members)
            self._release()
        self.lease_until_ms = election.lease_until_ms if self._replication is not None else 0

    async def _begin_to_lead(self, term: int) -> None:
        began = time.monotonic()
        assert self._coordinator is not None
        follower, self._follower = self._follower, None
        try:
            standby = await asyncio.to_thread(self._take_over, follower, term)
        except KvopsError as error:
            log.error("leadership.refused", term=term, error=error.what, fix=error.fix)
            self._trouble("leadership_refused", error)
            with self._coordinator.lock:
                self._coordinator.election.resign()
            return
        finally:
            self._starting = None
        election = self._coordinator.election
        if election.role is not Role.LEADER or election.term != term:
            self._call_soon(self._election_changed)  # it took so long that somebody else leads
            return
        self._troubles.pop("leadership_refused", None)
        hot = standby is not None
        if standby is not None:
            standby.promote(term=term, now_ms=boot_ms())
            self.core = standby.core
        self._replication = Replication(sequence=0 if standby is None else standby.sequence)
        self._streams = Streams()
        seconds = round(time.monotonic() - began, 3)
        self.core.led(self.config.name, hot=hot, seconds=seconds, now_ms=boot_ms())
        with self._coordinator.lock:
            election.serving = True
        self._coordinator.wake()
        self._election_changed()

    def _take_over(self, follower: Follower | None, term: int) -> Standby | None:
        """Off the loop: what we have followed, where that was everything; else what our journal knows."""
        if term > TERM_MAX:
            raise Refused(
                f"term {term} is beyond {TERM_MAX}", fix="start a new group: its generations are used up"
            )
        self._keep_term(term)
        standby = follower.standby if follower is not None and follower.stop() else None
        if standby is not None and standby.caught_up:
            if self._journal is None:  # its disk refused when we began to follow: try again
                self._begin_followed_journal(standby)
            self._snapshot, self._followed_snapshot = self._followed_snapshot, None
            return standby
        self._close_journal()
        self._lead_from_journal(term)
        return None

    def _keep_term(self, term: int) -> None:
        """Where the disk is full, lead all the same: etcd has the term, and stores refuse a lower one."""
        try:
            note_term(self._state_dir, term)
            self._troubles.pop("term_unkept", None)
        except KvopsError as error:
            if "term_unkept" not in self._troubles:
                log.error("term.unkept", term=term, error=error.what)
            self._trouble("term_unkept", error)
            self._call_soon(lambda: self._keep_term_later(term))

    def _keep_term_later(self, term: int) -> None:
        def retry() -> None:
            if not self._stop.is_set():
                self._loop.run_in_executor(None, self._keep_term, term)

        self._loop.call_later(TERM_RETRY_S, retry)

    def _trouble(self, code: str, error: KvopsError) -> None:
        self._troubles[code] = Trouble(code=code, text=error.what, fix=error.fix)

    def _open_journal(self, next_sequence: int) -> None:
        """One of several masters does without where its disk refuses: the others and the stores know the same."""
        try:
            self._journal = JournalWriter(self._state_dir / "journal", next_sequence=next_sequence)
            self._troubles.pop("journal_unwritable", None)
        except KvopsError as error:
            if not self.config.etcd:
                raise
            log.error("journal.unwritable", error=error.what)
            self._trouble("journal_unwritable", error)

    def _cease_to_lead(self) -> None:
        """Somebody else may lead already: drop everybody, and whatever was not acknowledged."""
        log.warning("leadership.ended", term=self.core.term)
        self._replication = None
        self._streams = Streams()
        self.lease_until_ms = 0
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for _, confirmed in unconfirmed:
            if not confirmed.done():
                confirmed.set_exception(
                    NotLeader(f"{self.config.name} does not lead any more", fix="look with kvops status")
                )
        for peer in list(self._peers.values()):
            peer.transport.abort()
        self._close_journal()
        self.core = self._fresh_core(term=0)
        self._sweep_later()

    def _sweep_later(self) -> None:
        """A directory was let go: free its memory, unless we lead by then; the next one takes it along."""
        self._loop.call_later(
            SWEEP_DELAY_S, lambda: None if self._replication is not None else collector.sweep()
        )

    def _core_to_follow_with(self) -> MasterCore:
        """On the follower's thread."""
        self._call_soon(self._sweep_later)
        return self._fresh_core(term=0)

    def _close_journal(self) -> None:
        self._snapshot = self._followed_snapshot = None
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()

    def _follow(self, seen: Seen) -> None:
        leader = seen.leader
        follower = self._follower
        election = self._coordinator.election if self._coordinator is not None else None
        assert election is not None
        if leader is not None and leader.name != self.config.name:
            address = Address.parse(leader.address)
            if follower is None or follower.leader != address:
                if follower is not None:
                    follower.stop()
                self._follower = follower = Follower(
                    address,
                    secret=self._secret,
                    hello=self._hello,
                    core=self._core_to_follow_with,
                    journal=self._write_followed,
                    changed=lambda: self._call_soon(self._election_changed),
                    failed=lambda error: self._call_soon(lambda: self._fail(error)),
                )
                follower.start()
        standby = follower.standby if follower is not None else None
        election.barred = self._directory().holds.drains_host(self.config.host)
        election.hot = (
            follower is not None
            and standby is not None
            and standby.caught_up
            # Where etcd has lost everything, whoever has followed knows more than whoever has not.
            and (seen.members.term == follower.term if seen.members else not seen.members_revision)
        )

    def _hello(self) -> Hello:
        return Hello(
            role="master",
            group=self.config.group,
            name=self.config.name,
            host=self.config.host,
            numa_node=0,
            pid=os.getpid(),
            boot_id=boot_id(),
            nonce=b"",
        )

    def _write_followed(self, standby: Standby, entry: JournalEntry | None) -> None:
        """On the follower's thread: the journal of a standby holds what it follows, from the state on."""
        if entry is None:
            self._begin_followed_journal(standby)
            return
        journal = self._journal
        if journal is None:
            return
        kind, count, body = entry.encode()
        journal.append(kind, body, count)
        snapshot = self._followed_snapshot
        if snapshot is None and journal.wants_snapshot and time.monotonic() >= self._snapshot_after:
            self._followed_snapshot = snapshot = Snapshot(journal, standby.core)
        if snapshot is not None and snapshot.step():
            self._followed_snapshot = None
            self._snapshot_after = time.monotonic() + SNAPSHOT_PAUSE_S

    def _begin_followed_journal(self, standby: Standby) -> None:
        self._close_journal()
        directory = self._state_dir / "journal"
        try:
            if directory.exists():
                set_aside(directory)
        except KvopsError as error:
            log.error("journal.unwritable", error=error.what)
            self._trouble("journal_unwritable", error)
            return
        self._open_journal(0)
        if self._journal is None:
            return
        snapshot = Snapshot(self._journal, standby.core)
        deadline = time.monotonic() + JOURNAL_WAIT_S
        while not snapshot.step():
            self._journal.flush(JOURNAL_STEP_S)
            if time.monotonic() >= deadline:  # a disk that hangs does not keep us from following
                self._followed_snapshot = snapshot
                return

    def _ask_for_term(self, seen: int) -> None:
        assert self._coordinator is not None
        with self._coordinator.lock:
            election = self._coordinator.election
            election.term_wanted = max(election.term_wanted, seen)
        self._coordinator.wake()

    # Standbys.

    def standby_frame(self, peer: _Peer, frame: Frame, body: bytes) -> None:
        """A standby joins, or acknowledges."""
        replication, now = self._replication, boot_ms()
        if replication is None or peer.hello is None or peer.hello.role != "master":
            raise WireError(f"frame kind {frame.kind} is a standby's to a leader", fix="")
        if frame.kind == Kind.JOIN:
            join = decode(body, m.Join)
            if join.version.split(".")[0] != __version__.split(".")[0]:
                raise Refused(
                    f"standby {join.name} runs kvops {join.version}, the leader {__version__}",
                    fix="upgrade one of them: only versions of one major number replicate",
                )
            before = replication.joined(peer.conn, join.name, now_ms=now)
            if before is not None and before in self._peers:
                self._peers[before].transport.abort()
            peer.reply(frame, wire.encode(m.Joined(term=self.core.term, now_ms=now)))
            self._streams.add(peer.conn, peer.transport, self.core, sequence=replication.sequence)
            log.info("standby.joined", name=join.name)
        else:
            sequence, caught_up = unpack_ack(body)
            replication.acked(peer.conn, sequence, caught_up=caught_up, now_ms=now)
            self._release()
            if caught_up:
                self._tend_standbys(now)

    def _tend_standbys(self, now: int) -> None:
        assert self._coordinator is not None
        replication, election = self._replication, self._coordinator.election
        if replication is None:
            return
        self.lease_until_ms = election.lease_until_ms
        for conn in replication.laggards(now_ms=now):
            peer = self._peers.get(conn)
            if peer is not None:
                peer.transport.abort()
        if replication.wanted != election.members_wanted:
            with self._coordinator.lock:
                election.members_wanted = replication.wanted
            self._coordinator.wake()
        if self._streams.busy:
            self._streams.step(sequence=replication.sequence)
        if now >= self._beat_due_ms:
            self._beat_due_ms = now + BEAT_INTERVAL_MS
            self._streams.beat()

    def must_wait(self, kind: int, answer: bytes) -> bool:
        """Whether an answer promises what not every standby has."""
        if self._replication is None:
            return False
        if self.core.journal:
            self._write_journal()
        if not self._replication.pending:
            return False
        return kind != Kind.PUT_START or m.PutStatus.EXISTS in answer[m.PUT_REPLY_HEAD.size :]

    def answer_later(self, peer: _Peer, data: bytes) -> None:
        """Keep an answer until the standbys have what it promises."""
        assert self._replication is not None
        if self._replication.held >= HELD_MAX:
            peer.transport.abort()
        else:
            self._replication.hold(peer.conn, data)

    def _release(self) -> None:
        assert self._replication is not None
        for sequence, confirmed in self._unconfirmed:
            if sequence <= self._replication.committed and not confirmed.done():
                confirmed.set_result(None)
        self._unconfirmed = [one for one in self._unconfirmed if not one[1].done()]
        for conn, data in self._replication.release():
            peer = self._peers.get(conn)
            if peer is not None:
                peer.transport.write(data)

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
        if seen >= self.core.term and not self.config.etcd:
            self.core.raise_term(raise_term(self._state_dir, at_least=seen + 1))
        self.core.restore(recovery, now_ms=boot_ms())
        return len(recovery.rows), recovery.next_sequence

    def _write_journal(self) -> None:
        entries, self.core.journal = self.core.journal, []
        replication = self._replication
        if replication is not None:
            now = boot_ms()
            self._streams.send([(replication.append(now_ms=now), entry) for entry in entries])
        if self._journal is None:
            return
        for entry in entries:
            kind, count, body = entry.encode()
            self._journal.append(kind, body, count)
        if (
            self._journal.wants_snapshot
            and self._snapshot is None
            and time.monotonic() >= self._snapshot_after
        ):
            self._snapshot = Snapshot(self._journal, self.core)

    # What operators ask.

    def _directory(self) -> MasterCore:
        """What we lead with, or follow."""
        standby = self._follower.standby if self._follower is not None else None
        return self.core if standby is None else standby.core

    def status(self) -> MasterStatus:
        """The master as it is now."""
        core = self._directory()
        return MasterStatus(
            group=self.config.group,
            name=self.config.name,
            host=self.config.host,
            pid=os.getpid(),
            address=self._addresses.get("listen", ""),
            role="leader" if self._coordinator is None or self._replication is not None else "standby",
            term=self._term(),
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
            troubles=self._every_trouble(),
            **self._standing(),
        )

    def _every_trouble(self) -> list[Trouble]:
        troubles = list(self._troubles.values())
        journal, follower = self._journal, self._follower
        if journal is not None and (failure := journal.failure) is not None:
            text = f"its journal in {self._state_dir} is behind: {failure.strerror}"
            fix = (
                "make room there: it is made whole by itself; until then a restart knows what the stores know"
            )
            troubles.append(Trouble(code="journal_failed", text=text, fix=fix))
        if self._coordinator is not None and self._replication is None:
            seen = self._coordinator.election.seen
            if seen.trouble:
                fix = "it is written anew by the next leader"
                if seen.taken and seen.leader is None:
                    fix = f"etcdctl del /kvops/{self.config.group}/leader"
                elif seen.members is None and seen.members_revision:
                    fix = f"kvops master promote {self.config.name} --force in-sync, when nobody leads"
                troubles.append(Trouble(code="etcd_damaged", text=seen.trouble, fix=fix))
            leader_known = seen.leader is not None and not self._coordinator.silent_since_ms
            if follower is not None and (error := follower.trouble) is not None and leader_known:
                troubles.append(Trouble(code="cannot_follow", text=error.what, fix=error.fix))
        return troubles

    def _term(self) -> int:
        return self.core.term if self._follower is None else self._follower.term

    def _standing(self) -> dict[str, Any]:
        """What a master among several says of itself beside that."""
        coordinator = self._coordinator
        if coordinator is None:
            return {"members": [self.config.name]}
        election, standby = (
            coordinator.election,
            self._follower.standby if self._follower is not None else None,
        )
        leads = self._replication is not None
        seen = election.seen.members
        silent_ms = boot_ms() - coordinator.silent_since_ms if coordinator.silent_since_ms else 0
        if self._replication is not None:
            sequence = self._replication.sequence
        else:
            sequence = standby.sequence if standby is not None else 0
        return {
            "sequence": sequence,
            "members": sorted(self._members()) if leads else list(seen.names) if seen is not None else [],
            "promotable": leads or (election.hot and election.eligible()),
            "etcd_silent_ms": silent_ms,
        }

    def hold(self, kind: HoldKind, request: pb.DrainRequest) -> HoldReply:
        """Drain or cordon."""
        now = boot_ms()
        self.assert_leads(now)
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
        if kind is HoldKind.DRAIN and not request.dry_run:
            self._leave_drained_host()
        return reply

    def _leave_drained_host(self) -> None:
        """A leader whose own host is to be powered off lets another one lead, once the drain is everybody's."""
        if self._coordinator is None or not self.core.holds.drains_host(self.config.host):
            return
        self._coordinator.election.barred = True
        if self._members() != {self.config.name}:
            self._loop.call_later(STEP_DOWN_DELAY_S, self._resign)

    def lift(self, request: pb.UndrainRequest) -> HoldReply:
        """Undrain."""
        self.assert_leads(boot_ms())
        reply = self.core.holds.lift(
            request.targets, owner=request.owner, dry_run=request.dry_run, now_ms=boot_ms()
        )
        self._send()
        return reply

    def ok_to_stop(self, targets: Sequence[str]) -> HoldReply:
        """What stopping these would do to the pool."""
        self.assert_leads(boot_ms())
        masters = {self.config.name: self.config.host}
        for standby in self._replication.standbys() if self._replication is not None else ():
            hello = self._peers[standby.conn].hello
            masters[standby.name] = hello.host if hello is not None else ""
        taken = {name for name, host in masters.items() if name in targets or host in targets}
        hosts = {store.mount.host for store in self.core.stores}
        only_masters = {*masters, *(host for host in masters.values() if host not in hosts)}
        stores = [target for target in targets if target not in only_masters]
        reply = self.core.holds.ok_to_stop(stores, now_ms=boot_ms()) if stores else HoldReply(holds=[])
        able = self._members() - taken
        check = StopCheck(
            name="masters",
            ok=bool(able),
            text=f"{len(masters) - len(taken)} of {len(masters)} masters remain"
            if able
            else "no master would be left that has everything",
            fix="" if able else "start another master, or wait until one has caught up",
        )
        bare = [target for target in targets if target not in stores]
        return msgspec.structs.replace(reply, checks=[*reply.checks, check], unchanged=bare)

    def _members(self) -> set[str]:
        """Masters that have everything that was acknowledged."""
        others = self._coordinator.election.members if self._coordinator is not None else frozenset[str]()
        return {self.config.name, *others}

    def step_down(self, *, owner: str, force: Sequence[str]) -> int:
        """Give the leadership to a standby that has everything."""
        self.assert_leads(boot_ms())
        if self._coordinator is None or (self._members() == {self.config.name} and "standby" not in force):
            raise Refused(
                f"no other master could lead in place of {self.config.name}",
                fix="wait until a standby has caught up (kvops status); --force standby leaves the group without",
            )
        term = self.core.term
        log.info("leadership.resigned", term=term, owner=owner)
        self._resign()
        return term

    def promote(self, *, owner: str, force: Sequence[str], dry_run: bool) -> Promotion:
        """
        Lead although not in the in-sync set, whose members are gone for good: an operator's way out.

        Raises:
            UsageError: A check that nobody knows.
            Refused: Somebody leads or can without this, or the set's members may come back.
            Unreachable: etcd does not answer.
        """
        name, coordinator = self.config.name, self._coordinator
        unknown = sorted(set(force) - {"in-sync"})
        if unknown:
            raise UsageError(f"unknown check {', '.join(unknown)}", fix="the only one is in-sync")
        if coordinator is None or self._replication is not None:
            raise Refused(f"{name} leads already", fix="see kvops status")
        if coordinator.silent_since_ms:
            raise Unreachable(
                f"etcd does not answer {name}", fix="bring etcd back first: etcdctl endpoint health"
            )
        seen = coordinator.election.seen
        if not coordinator.election.free:
            leader = seen.leader.name if seen.leader is not None else "somebody"
            raise Refused(
                f"{leader} leads, or did a moment ago", fix="wait some seconds, then see kvops status"
            )
        if coordinator.election.eligible():
            raise Refused(f"{name} needs no promotion: it is in the in-sync set", fix="wait for the election")
        members = list(seen.members.names) if seen.members is not None else []
        who = ", ".join(members) or "the members of a set that cannot be read"
        if "in-sync" not in force and not dry_run:
            raise Refused(
                f"{name} lacks what {who} acknowledged last",
                fix=f"start {who} again; gone for good: --force in-sync. Objects in living stores are kept; drains"
                f" and cordons that {name} did not hear of are lost",
            )
        core = self._directory()
        made = Promotion(
            term=seen.term, members=members, objects=len(core.index), holds=len(core.holds.rows())
        )
        if not dry_run:
            log.warning("master.promoted", owner=owner, replaces=members, objects=made.objects)
            with coordinator.lock:
                coordinator.election.promote()
            coordinator.wake()
        return made

    def _resign(self) -> None:
        assert self._coordinator is not None
        with self._coordinator.lock:
            self._coordinator.election.resign()
        self._coordinator.wake()

    def holds(self) -> HoldReply:
        """Every hold."""
        return HoldReply(holds=self._directory().holds.every(now_ms=boot_ms()))

    async def remembered(self) -> None:
        """
        Wait until what was done outlives this process: standbys have it, the journal is in the kernel's hands.

        Raises:
            Unreachable: Standbys did not confirm, or somebody else leads by now: it may be undone.
        """
        replication = self._replication
        if replication is not None and replication.pending:
            confirmed: asyncio.Future[None] = self._loop.create_future()
            self._unconfirmed.append((replication.sequence, confirmed))
            try:
                await asyncio.wait_for(confirmed, COMMIT_S_MAX)
            except TimeoutError:
                raise Unreachable(
                    f"the standbys of {self.config.name} have not confirmed it within {COMMIT_S_MAX:g} s",
                    fix="look with kvops status, then repeat: it does nothing twice",
                ) from None
        journal = self._journal
        if journal is not None and not await asyncio.to_thread(journal.flush, FLUSH_S_MAX):
            log.error("journal.behind", waited_s=FLUSH_S_MAX)  # what was asked for is done all the same

    def events(self, since: str | None) -> list[Event]:
        """The events held, oldest first, from a time on."""
        return self._event_log.events(since)

    def subscribe(self) -> EventFollower:
        """Every event from now on."""
        return self._event_log.subscribe()

    def _readings(self) -> list[Reading]:
        core = self._directory

        def counter(name: str, text: str, read: Callable[[], float]) -> Reading:
            return Reading(name=name, help=text, read=read, kind="counter")

        return [
            Reading(name="kvops_master_term", help="Term of this master.", read=self._term),
            Reading(
                name="kvops_master_standbys",
                help="In the in-sync set, as far as a leader knows.",
                read=lambda: float(len(self._members()) - 1) if self._replication is not None else 0.0,
            ),
            Reading(
                name="kvops_master_leads",
                help="Whether it leads: 1, or 0 for a standby.",
                read=lambda: float(boot_ms() < self.lease_until_ms),
            ),
            Reading(name="kvops_master_objects", help="Readable objects.", read=lambda: len(core().index)),
            Reading(name="kvops_master_processing", help="Puts under way.", read=lambda: len(core().puts)),
            Reading(
                name="kvops_master_index_bytes",
                help="Memory of the index.",
                read=lambda: core().index.memory_bytes(),
            ),
            Reading(
                name="kvops_master_capacity_bytes",
                help="Mounted memory.",
                read=lambda: core().stores.capacity_bytes(),
            ),
            Reading(name="kvops_master_used_bytes", help="Memory in use.", read=lambda: core().used_bytes()),
            Reading(
                name="kvops_master_connections", help="Open connections.", read=lambda: len(self.connections)
            ),
            Reading(
                name="kvops_master_stores",
                help="Stores by state.",
                read=lambda: _count((store.state.value,) for store in core().stores),
                labels=("state",),
            ),
            Reading(
                name="kvops_master_breaker_open",
                help="Whether the group's is.",
                read=lambda: float(core().breaker_open),
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
            counter("kvops_master_lookups_total", "Keys looked up.", lambda: core().index.lookups_total),
            counter("kvops_master_hits_total", "Keys found.", lambda: core().index.hits_total),
            counter("kvops_master_puts_total", "Objects completed.", lambda: core().counters.puts),
            counter("kvops_master_evicted_total", "Objects evicted.", lambda: core().counters.evicted),
            counter("kvops_master_removed_total", "Objects removed.", lambda: core().counters.removed),
            counter(
                "kvops_master_preempted_total", "Puts of dead writers.", lambda: core().counters.preempted
            ),
            counter("kvops_master_no_space_total", "Puts without room.", lambda: core().counters.no_space),
            counter(
                "kvops_master_swept_total",
                "Objects of lost stores forgotten.",
                lambda: core().sweeper.swept_total,
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
