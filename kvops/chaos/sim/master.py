"""
A simulated master: the real ``MasterCore``, ``Election``, ``Replication``, ``Streams`` and ``Standby``.

``Master``, ``Coordinator`` and ``Follower`` are event loops and threads around them. Those are not covered, nor are
sockets, gRPC, metrics; the order in which they call the logic, send what is left to send and write the journal is
repeated here. Their three threads are one here: a master hangs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final, cast

from kvops import __version__
from kvops.chaos.sim.clock import Host
from kvops.chaos.sim.disk import Disk, JournalModel
from kvops.chaos.sim.etcd import EtcdClient
from kvops.chaos.sim.net import End, Payload, unpack
from kvops.chaos.sim.process import Process
from kvops.errors import KvopsError, NotLeader, Refused, WireError
from kvops.limits import BEAT_INTERVAL_MS
from kvops.net import wire
from kvops.net.auth import Hello, Welcome, WireTrouble
from kvops.net.wire import Kind, decode
from kvops.store import messages as m
from kvops.store import term as terms
from kvops.store.awake import TICK_MS
from kvops.store.coord import TIMEOUT_S_MAX
from kvops.store.election import Claim, Election, Op, Revoke, Role, Seen
from kvops.store.follower import RETRY_S, SILENCE_S
from kvops.store.journal import Kind as JournalKind
from kvops.store.journal_writer import JournalWriter
from kvops.store.master_core import MasterCore, MasterSettings
from kvops.store.model import GENERATION_SEQUENCE_BITS, HoldKind, HoldState
from kvops.store.outbox import JournalEntry
from kvops.store.replication import ACK, ENTRY, PROMISES, Replication
from kvops.store.snapshot import Snapshot
from kvops.store.standby import Standby
from kvops.store.streams import Streams

if TYPE_CHECKING:
    from kvops.chaos.sim.world import World

IDLE_US: Final = 50_000  # between looks for work, a little less often than IDLE_INTERVAL_S
BUSY_US: Final = 2_000  # … while there is some
SNAPSHOT_PAUSE_MS: Final = 1_000
ALWAYS: Final = 1 << 63  # a lease that nobody else can have
TAKE_OVER_US: Final = 1_000
COMMIT_US: Final = 2_000  # between looks whether standbys have what an operator did
STOP_US: Final = 2_000_000
MS_PER_MINUTE: Final = 60_000
SILENCE_US: Final = int(SILENCE_S * 1_000_000)
FOLLOW_US: Final = 1_000_000  # until a leader that does not answer is called again

LOOKUP: Final = int(Kind.LOOKUP)
MOUNT: Final = int(Kind.MOUNT)
REMOVE: Final = int(Kind.REMOVE)
JOIN: Final = int(Kind.JOIN)
REPLICATE: Final = int(Kind.REPLICATE)
ACKNOWLEDGE: Final = wire.reply(Kind.REPLICATE)
PUT_START: Final = int(Kind.PUT_START)
PUT_END: Final = int(Kind.PUT_END)


class Outlet:
    """A standby's stream, as ``Streams`` writes to it."""

    def __init__(self, end: End) -> None:
        self._end = end

    def write(self, data: bytes) -> None:
        """Send a packed frame."""
        self._end.send(*unpack(data))

    def get_write_buffer_size(self) -> int:
        """Nothing is kept here: the stream takes everything."""
        return 0

    def abort(self) -> None:
        """Hang up."""
        self._end.close(abrupt=True)


class FollowerModel:
    """``Follower``: takes over a leader's state, then follows it, until stopped."""

    def __init__(self, master: MasterProcess, leader: str) -> None:
        self.leader = leader
        self.standby: Standby | None = None
        self.term = 0  # of the leader that ``standby`` follows
        self._master = master
        self._end: End | None = None
        self._joined: m.Joined | None = None
        self._acked = (-1, False)
        self._stopped = False
        self._heard_us = 0

    def start(self) -> None:
        """Call the leader."""
        master = self._master
        if self._stopped:
            return
        self._joined = None
        self._end = end = master.world.net.connect(master, self.leader, master.hello, Kind.HELLO)
        end.on_frame, end.on_close = self._frame, self._lost
        self._heard_us = master.world.scheduler.now_us
        master.timer(FOLLOW_US, self._watch, end)

    def stop(self) -> None:
        """End; what was learnt stays in ``standby``."""
        self._stopped = True
        if self._end is not None:
            self._end.close()

    def _watch(self, end: End) -> None:
        """A leader that says nothing for too long is called again."""
        if self._stopped or end is not self._end or not end.open:
            return
        limit = SILENCE_US if self._joined is not None else FOLLOW_US
        if self._master.world.scheduler.now_us - self._heard_us > limit:
            end.close()
            self._lost(end)
        else:
            self._master.timer(FOLLOW_US, self._watch, end)

    def _lost(self, end: End) -> None:
        if end is self._end and not self._stopped:
            self._end = None
            self._master.timer(int(self._master.rng.uniform(*RETRY_S) * 1_000_000), self.start)

    def _frame(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        master = self._master
        if self._stopped or end is not self._end:
            return
        self._heard_us = master.world.scheduler.now_us
        if kind == Kind.WELCOME:
            end.send(JOIN, 0, wire.encode(m.Join(name=master.name, version=__version__)))
        elif kind == wire.reply(Kind.JOIN):
            self._joined = decode(body, m.Joined)
            self._acked = (-1, False)
            offset = master.now_ms() - self._joined.now_ms
            self.standby = Standby(master.fresh_core(term=0), clock_offset_ms=offset)
            self.term = self._joined.term
            master.election_changed()
        elif kind == REPLICATE and self._joined is not None:
            self._apply(body)
        elif kind == Kind.ERROR:
            end.close()
            self._lost(end)
            return
        self._acknowledge(end)

    def _apply(self, body: bytes) -> None:
        standby = self.standby
        assert standby is not None
        at, now = 0, self._master.now_ms()
        while at < len(body):
            sequence, kind, _, _, size = ENTRY.unpack_from(body, at)
            at += ENTRY.size
            before = standby.caught_up
            entry = standby.apply(sequence, kind, body[at : at + size], now_ms=now)
            at += size
            if standby.caught_up and not before:
                self._master.write_followed(standby, None)
                self._master.election_changed()
            elif entry is not None and standby.caught_up:
                self._master.write_followed(standby, entry)

    def _acknowledge(self, end: End) -> None:
        standby = self.standby
        if standby is None or self._joined is None or self._stopped:
            return
        state = (standby.sequence, standby.caught_up)
        if state != self._acked:
            self._acked = state
            end.send(ACKNOWLEDGE, 0, ACK.pack(*state))


class MasterProcess(Process):
    """One life of one master, alone or among several."""

    def __init__(
        self,
        world: World,
        name: str,
        host: Host,
        rng: Random,
        *,
        disk: Disk,
        settings: MasterSettings,
        etcd: list[str],
        ttl_s: int,
    ) -> None:
        super().__init__(world, name, host, rng)
        self.disk = disk
        self.settings = settings
        self.incarnation = rng.getrandbits(62) | 1
        self.core: MasterCore
        self.election: Election | None = None  # one of several masters
        self.replication: Replication | None = None  # … that leads
        self.follower: FollowerModel | None = None  # … that does not
        self.lease_until_ms = ALWAYS
        self._journal: JournalModel | None = None
        self._conns: dict[int, End] = {}
        self._roles: dict[int, str] = {}
        self._next_conn = 0
        self._snapshot: Snapshot | None = None
        self._snapshot_after_ms = 0
        self._tick_due_ms = 0
        self._ticked_ms = 0
        self._streams = Streams()
        self._handling = 0  # the kind of the frame under way
        self._beat_due_ms = 0
        self._starting = False
        self._stopping = False
        self._resigning = False
        self._won = 0  # the election that we lead by
        self._etcd = etcd
        self._ttl_s = ttl_s
        self._keys: EtcdClient
        self._asking = False  # an operation of the election is under way
        self._asks_at_ms = -1  # … or is looked for then
        self._shown: object = None
        self.hello = self.hello_as("master")

    @property
    def leads(self) -> bool:
        """Whether it answers now."""
        alone = self.election is None
        return self.alive and (alone or self.replication is not None) and self.now_ms() < self.lease_until_ms

    def start(self) -> None:
        """As ``Master.run`` does it, up to listening."""
        self.world.net.listen(self.name, self)
        if self._etcd:
            self.core = self.fresh_core(term=0)
            self.lease_until_ms = 0
            timeout_s = min(TIMEOUT_S_MAX, self._ttl_s / 4)
            self._keys = EtcdClient(self, self._etcd, timeout_us=int(timeout_s * 1_000_000))
            claim = Claim(name=self.name, term=0, address=self.name, control="", host=self.host.name)
            self.election = Election(claim, ttl_s=self._ttl_s, term_min=self._last_term())
            self.world.say(self.name, "started")
        else:
            self._lead_from_journal(self._raise_term(at_least=1))
            self.world.oracle.master_leads(self)
        self._tick()
        if self.election is not None:
            self._coordinate()

    def _last_term(self) -> int:
        """As ``first_term`` has it: minutes of the wall clock where no term is kept."""
        minutes = self.host.wall_ms(self.world.scheduler.now_us) // MS_PER_MINUTE
        return terms.read_term(self.disk.directory) or max(0, minutes)

    def _raise_term(self, *, at_least: int) -> int:
        return terms.raise_term(self.disk.directory, at_least=at_least, first=self._last_term())

    def fresh_core(self, *, term: int) -> MasterCore:
        """An empty directory."""
        return MasterCore(self.settings, term=term, now_ms=self.now_ms())

    def _lead_from_journal(self, term: int) -> None:
        self.core = self.fresh_core(term=term)
        next_sequence = self._recover()
        self._journal = JournalModel(self.disk, self, next_sequence=next_sequence)

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
        if seen >= self.core.term and not self._etcd:
            self.core.raise_term(self._raise_term(at_least=seen + 1))
        self.core.restore(recovery, now_ms=self.now_ms())
        return recovery.next_sequence

    # Streams.

    def accept(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        """A peer says who it is."""
        try:
            self._assert_leads(self.now_ms())
        except NotLeader as error:
            _turn_away(end, error)
            return
        hello = decode(body, Hello)
        self._next_conn += 1
        end.conn = self._next_conn
        end.on_frame = self._frame
        end.on_close = self._closed
        self._conns[end.conn] = end
        self._roles[end.conn] = hello.role
        self.core.connected(end.conn, hello)
        welcome = Welcome(
            role="master",
            name=self.name,
            term=self.core.term,
            incarnation=self.incarnation,
            boot_id=self.host.name,
            unix_path="",
        )
        end.send(Kind.WELCOME, 0, wire.encode(welcome))

    def _assert_leads(self, now: int) -> None:
        if now >= self.lease_until_ms:
            raise NotLeader(f"{self.name} does not lead", fix="wait for the election")

    def _closed(self, end: End) -> None:
        if self._conns.pop(end.conn, None) is None:
            return
        self._roles.pop(end.conn)
        now = self.now_ms()
        if self.replication is not None:
            self.replication.left(end.conn)
            self._streams.drop(end.conn)
            self._release()
        self.core.disconnected(end.conn, now_ms=now)
        self._after_request(now)

    def _abort(self, conn: int) -> None:
        """Hang up on a peer; that it is gone is seen as when it hangs up itself."""
        end = self._conns.get(conn)
        if end is not None:
            end.close(abrupt=True)
            self._closed(end)

    def _frame(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        now = self.now_ms()
        self._handling = kind
        try:
            if now >= self.lease_until_ms:
                self._assert_leads(now)
            if kind == LOOKUP:
                answer: bytes | None = self.core.lookup(body, now_ms=now)
            elif kind in (JOIN, ACKNOWLEDGE):
                self._standby_frame(end, kind, body, now)
                answer = None
            else:
                if kind == MOUNT:
                    self._outdo(body)
                elif kind == REMOVE:
                    self.world.oracle.master_removes(self, body)
                answer = self.core.handle(end.conn, kind, request, body, now_ms=now)
        except KvopsError as error:
            self.world.say(self.name, f"refused a frame of kind {kind}: {error.what}")
            _turn_away(end, error)
            self._closed(end)
            return
        if answer is not None:
            if kind in PROMISES and self.replication is not None and self._must_wait(kind, answer):
                self.replication.hold(end.conn, wire.pack(kind + 1, answer, request))
            else:
                self.world.oracle.master_answers(self, kind, self.core.term)
                end.send(kind + 1, request, answer)
        self._after_request(now)
        self._handling = 0

    def _outdo(self, body: bytes) -> None:
        """A store that has seen a newer term than ours must be outdone first."""
        mount = decode(body, m.Mount)
        seen = mount.highest_generation >> GENERATION_SEQUENCE_BITS
        if seen > self.core.term or (seen == self.core.term and not self.core.knows(mount)):
            if self.election is not None:
                self.election.term_wanted = max(self.election.term_wanted, seen)
                self._wake()
            else:
                self.core.raise_term(self._raise_term(at_least=seen + 1))

    # Time.

    def _tick(self) -> None:
        now = self.now_ms()
        self._ticked_ms = now
        self.timer(BUSY_US if self.core.has_work or self._streams.busy else IDLE_US, self._tick)
        if self.election is not None:
            self._tend_standbys(now)
            if now >= self.lease_until_ms:
                return
        if now >= self._tick_due_ms:
            self._tick_due_ms = now + TICK_MS
            self.core.tick(now_ms=now)
        self._slice(now)

    def _after_request(self, now: int) -> None:
        self._send()
        if self.core.work_due(now):
            self._slice(now)

    def _slice(self, now: int) -> None:
        core = self.core
        if core.outbox.journal:
            self._write_journal()
        evicted, swept = core.outbox.counters.evicted, core.sweeper.swept_total
        core.work(now_ms=now)
        if core.outbox.journal:
            self.world.oracle.master_dropped(
                self,
                core.outbox.journal,
                core.outbox.counters.evicted - evicted,
                core.sweeper.swept_total - swept,
            )
        self._send()
        if self._snapshot is not None and self._snapshot.step():
            self._snapshot = None
            self._snapshot_after_ms = now + SNAPSHOT_PAUSE_MS

    def _send(self) -> None:
        core = self.core
        if core.outbox.journal:
            self._write_journal()
        if core.has_output:
            pending = self.replication is not None and self.replication.pending
            for conn, data in core.next_frames():
                if conn not in self._conns:
                    continue
                if pending:
                    assert self.replication is not None
                    self.replication.hold(conn, data)
                else:
                    self._write(conn, data)
        if core.outbox.events:
            if self.world.recording:
                for event in core.outbox.events:
                    detail = " ".join(f"{name}={value}" for name, value in event.detail.items())
                    self.world.say(self.name, f"{event.event} {event.subject} {detail}".rstrip())
            core.outbox.events.clear()

    def _write(self, conn: int, data: bytes) -> None:
        end = self._conns.get(conn)
        if end is not None:
            kind, request, body = unpack(data)
            self.world.oracle.master_answers(self, kind - 1, self.core.term)
            end.send(kind, request, body)

    def _write_journal(self) -> None:
        entries = self.core.outbox.take_journal()
        now = self.now_ms()
        if self._handling == PUT_END:
            self.world.oracle.puts_ended(entries)
        for entry in entries:
            if entry.kind == JournalKind.COMPLETE and entry.rows is not None:
                self.world.oracle.master_completed(entry.rows)
            elif self.world.recording and entry.kind == JournalKind.GONE and entry.rows is not None:
                self.world.say(self.name, f"gone {[hex(g) for g in entry.rows['generation'].tolist()]}")
        replication = self.replication
        if replication is not None:
            self._streams.send(
                [
                    (replication.append(now_ms=now, readable_from=entry.readable_from), entry)
                    for entry in entries
                ]
            )
        self._note_drains(entries)
        if self._journal is None:
            return
        for entry in entries:
            self._journal.append(*entry.encode())
        if self._journal.wants_snapshot and self._snapshot is None and now >= self._snapshot_after_ms:
            self._snapshot = Snapshot(cast(JournalWriter, self._journal), self.core)

    def _note_drains(self, entries: list[JournalEntry]) -> None:
        """A drain that has migrated what it could begins in earnest, of which nobody asked hears."""
        for entry in entries:
            for hold in entry.holds:
                if hold.migrate and hold.state is HoldState.DRAINING:
                    done = self.world.drain_begins(hold.target)
                    if done is not None:
                        self.remembered(done)

    # Leading: what ``Coordinator`` and ``Master`` do.

    def _coordinate(self) -> None:
        """What the election wants now: an operation, or to be asked again later."""
        election = self.election
        if election is None or self._asking:
            return
        now = self.now_ms()
        op = election.next(now, ticked_ms=self._ticked_ms)
        if isinstance(op, int):
            if self._stopping:
                self._exit()
                return
            wait_ms = max(op - now, 1)
            self._asks_at_ms = now + wait_ms
            self.timer(wait_ms * 1_000, self._look_again, self._asks_at_ms)
        elif self._stopping and not isinstance(op, Revoke):
            self._exit()
            return
        else:
            self._asking = True
            self._keys.run(op, lambda result: self._asked(op, result, now))
        self._show()

    def _look_again(self, asked_ms: int) -> None:
        if asked_ms == self._asks_at_ms:
            self._coordinate()

    def _asked(self, op: Op, result: object, sent_ms: int) -> None:
        assert self.election is not None
        self._asking = False
        self.election.done(op, result, sent_ms=sent_ms, now_ms=self.now_ms())
        self._show()
        self._coordinate()

    def _wake(self) -> None:
        if not self._asking:
            self._asks_at_ms = -1
            self.timer(1, self._coordinate)

    def _show(self) -> None:
        election = self.election
        assert election is not None
        shown = (election.role, election.term, election.seen, election.members)
        if shown != self._shown:
            self._shown = shown
            self.timer(1, self.election_changed)

    def election_changed(self) -> None:
        """We lead, we lead no more, or somebody else does."""
        election = self.election
        if election is None or self._stopping:
            return
        if self.replication is not None and election.won != self._won:
            self._cease_to_lead()  # that leadership is over, although we have been elected again
            self._resigning = False
        if election.role is Role.LEADER and self.replication is None:
            if not self._starting:
                self._starting = True
                follower, self.follower = self.follower, None
                if follower is not None:
                    follower.stop()
                self.timer(TAKE_OVER_US + self.disk.slow_us, self._take_over, follower, election.term)
        elif election.role is Role.STANDBY:
            if self.replication is not None:
                self._cease_to_lead()
            self._resigning = False
            self._follow(election.seen)
        if self.replication is not None:
            if election.term > self.core.term:
                self.core.raise_term(election.term)
                terms.note_term(self.disk.directory, election.term)
            self.replication.members(election.members_possible)
            self._release()
        self._renewed(election)

    def _renewed(self, election: Election) -> None:
        leads = self.replication is not None and not self._resigning
        self.lease_until_ms = election.lease_until_ms if leads else 0

    def _take_over(self, follower: FollowerModel | None, term: int) -> None:
        election = self.election
        assert election is not None
        self._starting = False
        terms.note_term(self.disk.directory, term)
        standby = follower.standby if follower is not None else None
        if standby is not None and not standby.caught_up:
            standby = None
        if standby is None:
            self._close_journal()
            self._lead_from_journal(term)
        if election.role is not Role.LEADER or election.term != term:
            self.election_changed()
            return
        now = self.now_ms()
        if standby is not None:
            standby.promote(term=term, now_ms=now)
            self.core = standby.core
        self.replication = Replication(sequence=0 if standby is None else standby.sequence)
        self._won = election.won
        self._streams = Streams()
        self.core.led(self.name, hot=standby is not None, seconds=0.0, now_ms=now)
        election.serving = True
        self.world.oracle.master_leads(self)
        self._wake()
        self.election_changed()

    def _cease_to_lead(self) -> None:
        self.world.say(self.name, f"leads no more, term {self.core.term}")
        self.replication = None
        self._streams = Streams()
        self.lease_until_ms = 0
        for end in list(self._conns.values()):
            end.close(abrupt=True)
        self._conns.clear()
        self._roles.clear()
        self._close_journal()
        self.core = self.fresh_core(term=0)

    def _close_journal(self) -> None:
        self._snapshot = None
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()

    def _follow(self, seen: Seen) -> None:
        election, leader = self.election, seen.leader
        assert election is not None
        follower = self.follower
        if (
            leader is not None
            and leader.name != self.name
            and (follower is None or follower.leader != leader.address)
        ):
            if follower is not None:
                follower.stop()
            self.follower = follower = FollowerModel(self, leader.address)
            follower.start()
        standby = follower.standby if follower is not None else None
        election.hot = (
            follower is not None
            and standby is not None
            and standby.caught_up
            and seen.members is not None
            and follower.term == seen.members.term
        )

    def write_followed(self, standby: Standby, entry: JournalEntry | None) -> None:
        """A standby's own journal holds what it follows, from the state on."""
        if entry is None:
            self._close_journal()
            self.disk.put_aside()
            self._journal = JournalModel(self.disk, self, next_sequence=0)
            snapshot = Snapshot(cast(JournalWriter, self._journal), standby.core)
            while not snapshot.step():
                self._journal.flush()
        elif self._journal is not None:
            self._journal.append(*entry.encode())

    # Standbys.

    def _standby_frame(self, end: End, kind: int, body: bytes, now: int) -> None:
        replication = self.replication
        if replication is None or self._roles.get(end.conn) != "master":
            raise WireError(f"frame kind {kind} is a standby's to a leader", fix="")
        if kind == JOIN:
            join = decode(body, m.Join)
            if join.version.split(".")[0] != __version__.split(".")[0]:
                raise Refused(f"standby {join.name} runs kvops {join.version}", fix="")
            before = replication.joined(end.conn, join.name, now_ms=now)
            if before is not None:
                self._abort(before)
            end.send(JOIN + 1, 0, wire.encode(m.Joined(term=self.core.term, now_ms=now)))
            self._streams.add(end.conn, Outlet(end), self.core, sequence=replication.sequence)
            self.world.say(self.name, f"{join.name} joins")
        else:
            sequence, caught_up = ACK.unpack(body)
            replication.acked(end.conn, sequence, caught_up=bool(caught_up), now_ms=now)
            self._release()
            if caught_up:
                self._tend_standbys(now)

    def _tend_standbys(self, now: int) -> None:
        replication, election = self.replication, self.election
        if replication is None:
            return
        assert election is not None
        self._renewed(election)
        for conn in replication.review(now_ms=now):
            self._abort(conn)
        if replication.wanted != election.members_wanted:
            election.members_wanted = replication.wanted
            replication.members(election.members_possible)
            self._wake()
        self._release()
        if self._streams.busy:
            self._streams.step(sequence=replication.sequence)
        if now >= self._beat_due_ms:
            self._beat_due_ms = now + BEAT_INTERVAL_MS
            self._streams.beat()

    def _must_wait(self, kind: int, answer: bytes) -> bool:
        assert self.replication is not None
        if self.core.outbox.journal:
            self._write_journal()
        return self.replication.must_wait(kind, answer)

    def _release(self) -> None:
        assert self.replication is not None
        for conn, data in self.replication.release():
            self._write(conn, data)

    # Operators.

    def hold(self, store: str, kind: HoldKind, done: Callable[[], None], *, migrate: bool) -> None:
        """
        As ``kvops drain`` or ``cordon``; ``done`` once it outlives this process: standbys have it, or the journal.

        Raises:
            KvopsError: It is refused.
        """
        self.core.holds.hold(
            [store],
            kind,
            migrate=migrate,
            reason="simulated",
            owner="simulator",
            since="",
            force=("last-store",) if kind is HoldKind.DRAIN else (),
            now_ms=self.now_ms(),
        )
        self._send()
        self.remembered(done)

    def remembered(self, done: Callable[[], None]) -> None:
        """Call once everything up to now outlives this process, if it lives that long."""
        if self._journal is not None:
            self._journal.flush()
        sequence = self.replication.sequence if self.replication is not None else 0
        self._remembered(self.replication, sequence, done)

    def _remembered(self, replication: Replication | None, sequence: int, done: Callable[[], None]) -> None:
        if replication is not self.replication:
            return  # whether it will be remembered is unknown
        if replication is None or replication.committed >= sequence:
            done()
        else:
            self.timer(COMMIT_US, self._remembered, replication, sequence, done)

    def undrain(self, store: str) -> None:
        """As ``kvops undrain``; raises KvopsError when it is refused."""
        self.core.holds.lift([store], owner="simulator", now_ms=self.now_ms())
        self._send()

    # The end.

    def stop(self) -> None:
        """SIGTERM: give the lease back if there is one."""
        self._stopping = True
        if self.election is None:
            self._write_journal()
            self._exit()
            return
        self.election.resign()
        self._resigning, self.lease_until_ms = (
            True,
            0,
        )  # the lease is given back: another may lead in a moment
        self.timer(STOP_US, self._exit)
        self._coordinate()

    def _exit(self) -> None:
        self._close_journal()
        for end in list(self.ends):
            end.close()
        self.end()

    def kill(self) -> None:
        """SIGKILL."""
        if self._journal is not None:
            self._journal.killed()
        super().kill()

    def power_off(self) -> None:
        """Its host is gone, with what was not synced."""
        if self._journal is not None:
            self._journal.killed()
        self.disk.lose_power()
        super().power_off()


def _turn_away(end: End, error: KvopsError) -> None:
    trouble = WireTrouble(code=type(error).__name__, what=error.what, fix=error.fix)
    end.send(Kind.ERROR, 0, wire.encode(trouble))
    end.close()
