"""The master process: one event loop around ``MasterCore``, with its sockets, its journal and its metrics."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from kvops import collector
from kvops.errors import NotLeader, Refused
from kvops.files import read_secret
from kvops.limits import CONNECTIONS_MAX
from kvops.log import configure, log
from kvops.metrics import HttpServer, expose, serve_http
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
from kvops.store.awake import TICK_MS
from kvops.store.bookkeeper import Bookkeeper
from kvops.store.clock import boot_id, boot_ms
from kvops.store.config import MasterConfig
from kvops.store.control import SERVICE, ControlServicer
from kvops.store.events import EventFollower, EventLog
from kvops.store.leadership import Leadership, group_keys
from kvops.store.listen import descriptor_room, listen_tcp, listen_unix
from kvops.store.master_core import MasterCore, MasterSettings
from kvops.store.master_metrics import readings
from kvops.store.model import (
    GENERATION_SEQUENCE_BITS,
    Event,
    HoldKind,
    HoldReply,
    MasterStatus,
    Promotion,
    StopCheck,
)
from kvops.store.replication import PROMISES
from kvops.store.term import raise_term

SWITCH_INTERVAL_S: Final = 0.0005  # for other threads (scrapes, the journal) to give the GIL back to the loop
SPIN_S: Final = 500e-6  # a put's bytes take up to 300 µs to its store; then its end is here
PAUSE_S_MAX: Final = (
    2e-3  # such as a batch of puts of 1 MiB needs; callers that pause for longer can wait for us to wake up
)
WORK_INTERVAL_S: Final = 0.002  # between slices, while there is work
IDLE_INTERVAL_S: Final = 0.02
PREPARE_INTERVAL_S: Final = 0.02
PREPARE_SLOTS: Final = 65_536  # ahead of the index; 5 MB
FLUSH_S_MAX: Final = 1.0  # an operator's change waits this long for a slow disk
ALWAYS: Final = 1 << 63  # a lease that nobody else can have
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
        elif frame.kind == Kind.EXISTS:
            answer = self._core.exists(body, now_ms=now)
        elif frame.kind == Kind.MOUNT:
            self._master.mount(self, frame, body)
            return
        elif frame.kind in _STANDBY_KINDS:
            assert self._master.leadership is not None
            self._master.leadership.standby_frame(self.conn, self, frame, body)
            return
        else:
            began = time.thread_time()  # a system call of 0.3 µs: not on the path of a lookup
            answer = self._core.handle(self.conn, frame.kind, frame.request, body, now_ms=now)
            self._master.longest_request_s = max(self._master.longest_request_s, time.thread_time() - began)
        if answer is not None:
            data = wire.pack(frame.kind + 1, answer, frame.request)
            leadership = self._master.leadership
            if leadership is not None and frame.kind in PROMISES and leadership.must_wait(frame.kind, answer):
                leadership.hold(self.conn, data)
            else:
                self.transport.write(data)
        self._master.after_request(now)


_STANDBY_KINDS: Final = frozenset({Kind.JOIN, wire.reply(Kind.REPLICATE)})


class Master:
    """One master, from its sockets to its journal."""

    def __init__(self, config: MasterConfig) -> None:
        self.config = config
        self.secret = read_secret(Path(config.secret_file))
        self.state_dir = Path(config.state_dir)
        self.connections = Peers(*descriptor_room(CONNECTIONS_MAX))
        self._peers: dict[int, _Peer] = {}  # by number, once proved
        self._next_conn = 0
        self._ready = False
        self._ticked = time.monotonic()
        self._longest_slice_s = 0.0
        self.longest_request_s = 0.0
        self._started = time.monotonic()
        self._event_log = EventLog()
        self.core: MasterCore
        self.spinner: _Spinner
        self.books = Bookkeeper(self.state_dir, several=bool(config.etcd))
        self.addresses: dict[str, str] = {}
        self._incarnation = (
            secrets.randbits(63) | 1
        )  # tells clients that ids of stores mean something else now
        self._exit_code = 0
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self.lease_until_ms = ALWAYS
        """Nothing is answered from then on, on the boot clock."""
        self.leadership: Leadership | None = None  # where there are several masters
        self.ticked_ms = boot_ms()

    # Life.

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT."""
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.spinner = _Spinner(loop)
        self.core = self.fresh_core(term=0)
        if self.config.etcd:
            self.lease_until_ms = 0
            keys = await asyncio.to_thread(group_keys, self.config, self.secret)
            self.leadership = Leadership(self, keys, loop)
        else:
            term = raise_term(self.state_dir, at_least=1)
            self.lead_from_journal(term)
        metrics = expose(  # before anybody may ask: a page is whole, or not there
            readings(
                self._directory,
                term=self._term,
                leads=lambda: boot_ms() < self.lease_until_ms,
                standbys=self._standby_count,
                connections=lambda: len(self.connections),
                slice_s=lambda: self._longest_slice_s,
                request_s=lambda: self.longest_request_s,
            )
        )
        servers, rpc, http = await self._listen()
        ticks = loop.create_task(self._tick())
        ticks.add_done_callback(self.task_ended)
        if self.leadership is not None:
            self.leadership.start()
        self._ready = True
        await rpc.set_serving(True)
        log.info("master.started", term=self.core.term, **self.addresses)
        collector.settle()
        ended = threading.Event()
        preparing = threading.Thread(target=self._prepare, args=(ended,), name="prepare", daemon=True)
        preparing.start()
        notify_ready(self.addresses, status=f"serving, term {self.core.term}")
        await self._stop.wait()
        self._ready = False
        notify("STOPPING=1")
        log.info("master.stopping")
        ended.set()
        if self.leadership is not None:
            await self.leadership.stop()
        ticks.cancel()
        for server in servers:
            server.close()
        self.connections.abort()
        await rpc.close()
        metrics.close()
        http.close()
        self.remember()
        await asyncio.to_thread(self.books.close)
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
        self.addresses["listen"] = f"{host}:{port}"
        if self.config.unix_path:
            servers.append(
                await loop.create_unix_server(self._accept, sock=listen_unix(self.config.unix_path))
            )
            self.addresses["unix"] = self.config.unix_path
        rpc = await serve_rpc(
            self.config.control,
            secrets=[self.secret],
            register=ControlServicer(self).add_to,
            services=[SERVICE],
        )
        self.addresses["control"] = rpc.address
        http = serve_http(self.config.http, ready=self._is_ready)
        self.addresses["http"] = http.address
        return servers, rpc, http

    def _accept(self) -> WirePeer:
        return _Peer(self, Listener(self.secret, self.config.group))

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

    def outlet(self, conn: int) -> asyncio.Transport | None:
        """A connection, while it is open."""
        peer = self._peers.get(conn)
        return None if peer is None else peer.transport

    def hang_up(self) -> None:
        """End every connection that was let in."""
        for peer in list(self._peers.values()):
            peer.transport.abort()

    @property
    def stopping(self) -> bool:
        """Whether this process is about to end."""
        return self._stop.is_set()

    def leave(self, peer: _Peer) -> None:
        """A connection ended."""
        if self._peers.pop(peer.conn, None) is not None:
            now = boot_ms()
            if self.leadership is not None:
                self.leadership.left(peer.conn)
            self.core.disconnected(peer.conn, now_ms=now)
            self.after_request(now)

    def mount(self, peer: _Peer, frame: Frame, body: bytes) -> None:
        """A store that has seen a newer term than ours (our state was lost) must be outdone first."""
        mount = decode(body, m.Mount)
        seen = mount.highest_generation >> GENERATION_SEQUENCE_BITS
        # Of our own term a store that mounted here before has only seen what we granted.
        outdone = seen > self.core.term or (seen == self.core.term and not self.core.knows(mount))
        if outdone and peer.hello is not None and peer.hello.role == "store":
            if self.leadership is not None:
                self.leadership.ask_for_term(seen)  # and the store comes again
            else:
                self.core.raise_term(raise_term(self.state_dir, at_least=seen + 1))
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
            self.books.step()
        self.spinner.answered()

    def _send(self) -> None:
        if self.core.outbox.journal:
            self.remember()
        if self.core.has_output:
            for conn, data in self.core.next_frames():
                peer = self._peers.get(conn)
                if peer is None:
                    continue
                if self.leadership is not None and self.leadership.pending:
                    # No memory is reused before its object is gone everywhere.
                    self.leadership.hold(conn, data)
                else:
                    peer.transport.write(data)
        if self.core.outbox.events:
            self._publish()

    def _publish(self) -> None:
        events = self.core.outbox.take_events()
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
            self.ticked_ms = now = boot_ms()
            if self.leadership is not None:
                self.leadership.tend(now)
                if now >= self.lease_until_ms:
                    continue  # whoever does not lead changes nothing
            if now >= due:
                due = now + TICK_MS
                self.core.tick(now_ms=now)
            self._slice(now)
            self.books.step()

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """Without its timer a master would serve on and notice no death: it ends, its journal is in order."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """A bug of ours: one half of a master must not go on without the other, holding a lease or a place."""
        log.error("master.failed", error=repr(error), exc_info=error)
        self._exit_code = INTERNAL_ERROR
        self._stop.set()

    # Leading.

    def fresh_core(self, *, term: int) -> MasterCore:
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

    def lead_from_journal(self, term: int) -> None:
        """Begin with what our own journal says; the stores' slot tables have the last word."""
        self.core = self.fresh_core(term=term)
        self.books.restore(self.core, now_ms=boot_ms())

    def assert_leads(self, now: int) -> None:
        """
        Turn everybody away while we do not lead.

        Raises:
            NotLeader: With the leader's address, where one is known.
        """
        if now < self.lease_until_ms:
            return
        leader = self.leadership.leader_address() if self.leadership is not None else None
        raise NotLeader(
            f"{self.config.name} does not lead",
            fix=f"ask {leader}" if leader else "wait for the election",
            leader=leader,
        )

    def remember(self) -> None:
        """What was done goes to the standbys, and into the journal."""
        entries = self.core.outbox.take_journal()
        if self.leadership is not None:
            self.leadership.replicate(entries)
        self.books.append(entries, self.core)

    # What operators ask.

    def _directory(self) -> MasterCore:
        """What we lead with, or follow."""
        return self.core if self.leadership is None else self.leadership.directory

    def status(self) -> MasterStatus:
        """The master as it is now."""
        core, leadership = self._directory(), self.leadership
        return MasterStatus(
            group=self.config.group,
            name=self.config.name,
            host=self.config.host,
            pid=os.getpid(),
            address=self.addresses.get("listen", ""),
            role="leader" if self.leadership is None or self.leadership.leads else "standby",
            term=self._term(),
            uptime_s=time.monotonic() - self._started,
            placement=self.config.placement,
            objects=len(core.index),
            processing=len(core.puts),
            capacity_bytes=core.stores.capacity_bytes(),
            used_bytes=core.used_bytes(),
            evicted_total=core.outbox.counters.evicted,
            lookups_total=core.index.lookups_total,
            hits_total=core.index.hits_total,
            breaker_open=core.breaker_open,
            stores=[store.info() for store in core.stores],
            clients=core.clients(),
            holds=core.holds.every(now_ms=boot_ms()),
            troubles=[*self.books.troubles(), *(leadership.troubles() if leadership is not None else ())],
            **(leadership.standing() if leadership is not None else {"members": [self.config.name]}),
        )

    def _standby_count(self) -> int:
        leadership = self.leadership
        return len(leadership.members()) - 1 if leadership is not None and leadership.leads else 0

    def _term(self) -> int:
        return self.core.term if self.leadership is None else self.leadership.term

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
        if self.leadership is not None and kind is HoldKind.DRAIN and not request.dry_run:
            self.leadership.leave_drained_host()
        return reply

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
        for name, conn in self.leadership.standbys() if self.leadership is not None else ():
            hello = self._peers[conn].hello
            masters[name] = hello.host if hello is not None else ""
        taken = {name for name, host in masters.items() if name in targets or host in targets}
        hosts = {store.mount.host for store in self.core.stores}
        only_masters = {*masters, *(host for host in masters.values() if host not in hosts)}
        stores = [target for target in targets if target not in only_masters]
        reply = self.core.holds.ok_to_stop(stores, now_ms=boot_ms()) if stores else HoldReply(holds=[])
        able = (self.leadership.members() if self.leadership is not None else {self.config.name}) - taken
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

    def step_down(self, *, owner: str, force: Sequence[str]) -> int:
        """Give the leadership to a standby that has everything; the term that ends."""
        self.assert_leads(boot_ms())
        return self._among_several().step_down(owner=owner, force=force)

    def promote(self, *, owner: str, force: Sequence[str], dry_run: bool) -> Promotion:
        """Lead although not in the in-sync set, whose members are gone for good."""
        return self._among_several().promote(owner=owner, force=force, dry_run=dry_run)

    def _among_several(self) -> Leadership:
        if self.leadership is None:
            raise Refused(
                f"{self.config.name} is this group's only master",
                fix="start several: kvops start --masters 3 --etcd HOST:PORT",
            )
        return self.leadership

    def holds(self) -> HoldReply:
        """Every hold."""
        return HoldReply(holds=self._directory().holds.every(now_ms=boot_ms()))

    async def remembered(self) -> None:
        """
        Wait until what was done outlives this process: standbys have it, the journal is in the kernel's hands.

        Raises:
            Unreachable: Standbys did not confirm, or somebody else leads by now: it may be undone.
        """
        if self.leadership is not None:
            await self.leadership.committed()
        if not await asyncio.to_thread(self.books.flush, FLUSH_S_MAX):
            log.error("journal.behind", waited_s=FLUSH_S_MAX)  # what was asked for is done all the same

    def events(self, since: str | None) -> list[Event]:
        """The events held, oldest first, from a time on."""
        return self._event_log.events(since)

    def subscribe(self) -> EventFollower:
        """Every event from now on."""
        return self._event_log.subscribe()


def serve(config: MasterConfig) -> int:
    """Run one master in the foreground; its exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure(role=config.name, host=config.host, path=Path(config.log_file) if config.log_file else None)
    return uvloop.run(Master(config).run())
