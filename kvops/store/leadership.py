"""
One of several masters: leads while its lease lasts, follows whoever leads otherwise, and changes between the two.

Everything here runs on the master's loop, but for what says otherwise: the election and the follower have threads of
their own and only ask the loop to look.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from kvops import __version__, collector
from kvops.errors import KvopsError, NotLeader, Refused, Unreachable, UsageError, WireError
from kvops.limits import BEAT_INTERVAL_MS
from kvops.log import log
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.link import Address
from kvops.net.peer import WirePeer
from kvops.net.wire import Frame, Kind, decode
from kvops.store import messages as m
from kvops.store.bookkeeper import Bookkeeper
from kvops.store.clock import boot_id, boot_ms
from kvops.store.config import MasterConfig, read_password
from kvops.store.coord import TIMEOUT_S_MAX, Coordinator, EtcdAccess, GroupKeys
from kvops.store.election import Claim, Election, Role, Seen
from kvops.store.follower import Follower
from kvops.store.master_core import MasterCore
from kvops.store.model import Promotion, Trouble
from kvops.store.outbox import JournalEntry
from kvops.store.replication import Replication, unpack_ack
from kvops.store.standby import Standby
from kvops.store.streams import Outlet, Streams
from kvops.store.term import TERM_MAX, first_term, note_term, read_term

TERM_RETRY_S: Final = 10.0  # for a disk that refused it
COMMIT_S_MAX: Final = 2.0  # an operator's change waits this long for standbys
HELD_MAX: Final = 100_000  # answers that wait for standbys
STEP_DOWN_DELAY_S: Final = 0.2  # after a drain of its own host: the answer leaves first
SWEEP_DELAY_S: Final = 1.0  # connections that were cut hold on to the directory for a moment


class Led(Protocol):
    """The master, as its leadership sees it."""

    config: MasterConfig
    secret: bytes
    state_dir: Path
    books: Bookkeeper
    core: MasterCore
    lease_until_ms: int
    addresses: dict[str, str]
    ticked_ms: int

    @property
    def stopping(self) -> bool:
        """Whether it is about to end."""

    def fresh_core(self, *, term: int) -> MasterCore:
        """An empty directory."""

    def lead_from_journal(self, term: int) -> None:
        """Begin with what the journal says."""

    def remember(self) -> None:
        """Hand on what the directory has done."""

    def outlet(self, conn: int) -> Outlet | None:
        """A connection, while it is open."""

    def hang_up(self) -> None:
        """End every connection."""

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """A task of ours ended; if by an error, so does the master."""

    def fail(self, error: BaseException) -> None:
        """A thread of ours has failed."""


class Leadership:
    """
    A master's part in its group.

    Args:
        master: Whose.
        keys: Its group's in etcd.
        loop: Its loop.
    """

    def __init__(self, master: Led, keys: GroupKeys, loop: asyncio.AbstractEventLoop) -> None:
        self._master = master
        self._keys = keys
        self._loop = loop
        self._coordinator: Coordinator
        self._replication: Replication | None = None  # while it leads
        self._streams = Streams()
        self._unconfirmed: list[tuple[int, asyncio.Future[None]]] = []  # operators that wait for a sequence
        self._beat_due_ms = 0
        self._follower: Follower | None = None  # while it does not
        self._starting: asyncio.Task[None] | None = None  # to lead
        self._resigning = False
        self._won = 0  # the election that it leads by
        self._troubles: dict[str, Trouble] = {}  # by code

    # Life.

    def start(self) -> None:
        """Begin, once it is known where the master listens."""
        claim = Claim(
            name=self._master.config.name,
            term=0,
            address=self._master.addresses["listen"],
            control=self._master.addresses["control"],
            host=self._master.config.host,
        )
        election = Election(
            claim,
            ttl_s=self._master.config.etcd_ttl_s,
            term_min=read_term(self._master.state_dir) or first_term(),
        )
        self._coordinator = Coordinator(
            self._keys,
            election,
            ticked_ms=lambda: self._master.ticked_ms,
            changed=lambda: self._call_soon(self._election_changed),
            failed=lambda error: self._call_soon(lambda: self._master.fail(error)),
        )
        self._coordinator.start()

    async def stop(self) -> None:
        """Give the lease back, so that another may lead at once; bounded."""
        self._resigning, self._master.lease_until_ms = True, 0
        await asyncio.to_thread(self._coordinator.stop)
        if self._follower is not None:
            await asyncio.to_thread(self._follower.stop)

    @property
    def leads(self) -> bool:
        """Whether it leads, its lease included: whoever was stopped for longer does not, whatever it thought before."""
        return self._replication is not None and boot_ms() < self._master.lease_until_ms

    @property
    def directory(self) -> MasterCore:
        """What it leads with, or follows."""
        standby = self._follower.standby if self._follower is not None else None
        return self._master.core if standby is None else standby.core

    @property
    def term(self) -> int:
        """Its own, or that of the leader it follows."""
        return self._master.core.term if self._follower is None else self._follower.term

    def standbys(self) -> list[tuple[str, int]]:
        """Name and connection of those that follow."""
        return [(one.name, one.conn) for one in self._replication.standbys()] if self._replication else []

    # Leading and following.

    def _call_soon(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop has ended

    def _election_changed(self) -> None:
        """The election's thread has news: we lead, we lead no more, or somebody else does."""
        if self._master.stopping:
            return
        election = self._coordinator.election
        if self._replication is not None and election.won != self._won:
            self._cease_to_lead()  # that leadership is over, although we have been elected again
        if election.role is Role.LEADER and self._replication is None:
            self._resigning = False
            if self._starting is None:
                self._starting = self._loop.create_task(self._begin_to_lead(election.term))
                self._starting.add_done_callback(self._master.task_ended)
        elif election.role is Role.STANDBY:
            self._resigning = False
            if self._replication is not None:
                self._cease_to_lead()
            self._follow(election.seen)
        if self._replication is not None:
            if election.term > self._master.core.term:
                self._master.core.raise_term(election.term)
                self._keep_term(election.term)
            self._replication.members(election.members_possible)
            self.release()
        self._renewed(election)

    def _renewed(self, election: Election) -> None:
        leads = self._replication is not None and not self._resigning
        self._master.lease_until_ms = election.lease_until_ms if leads else 0

    async def _begin_to_lead(self, term: int) -> None:
        began = time.monotonic()
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
        self._won = election.won
        self._troubles.pop("leadership_refused", None)
        hot = standby is not None
        if standby is not None:
            standby.promote(term=term, now_ms=boot_ms())
            self._master.core = standby.core
        self._replication = Replication(sequence=0 if standby is None else standby.sequence)
        self._streams = Streams()
        seconds = round(time.monotonic() - began, 3)
        self._master.core.led(self._master.config.name, hot=hot, seconds=seconds, now_ms=boot_ms())
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
            if not self._master.books.writing:  # its disk refused when we began to follow: try again
                self._master.books.begin(standby.core)
            return standby
        self._master.lead_from_journal(term)
        return None

    def _keep_term(self, term: int) -> None:
        """Where the disk is full, lead all the same: etcd has the term, and stores refuse a lower one."""
        try:
            note_term(self._master.state_dir, term)
            self._troubles.pop("term_unkept", None)
        except KvopsError as error:
            if "term_unkept" not in self._troubles:
                log.error("term.unkept", term=term, error=error.what)
            self._trouble("term_unkept", error)
            self._call_soon(lambda: self._keep_term_later(term))

    def _keep_term_later(self, term: int) -> None:
        def retry() -> None:
            if not self._master.stopping:
                self._loop.run_in_executor(None, self._keep_term, term)

        self._loop.call_later(TERM_RETRY_S, retry)

    def _trouble(self, code: str, error: KvopsError) -> None:
        self._troubles[code] = Trouble(code=code, text=error.what, fix=error.fix)

    def _cease_to_lead(self) -> None:
        """Somebody else may lead already: drop everybody, and whatever was not acknowledged."""
        log.warning("leadership.ended", term=self._master.core.term)
        self._replication = None
        self._streams = Streams()
        self._master.lease_until_ms = 0
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for _, confirmed in unconfirmed:
            if not confirmed.done():
                confirmed.set_exception(
                    NotLeader(
                        f"{self._master.config.name} does not lead any more", fix="look with kvops status"
                    )
                )
        self._master.hang_up()
        self._master.books.close()
        self._master.core = self._master.fresh_core(term=0)
        self._sweep_later()

    def _sweep_later(self) -> None:
        """A directory was let go: free its memory, unless we lead by then; the next one takes it along."""
        self._loop.call_later(
            SWEEP_DELAY_S, lambda: None if self._replication is not None else collector.sweep()
        )

    def _core_to_follow_with(self) -> MasterCore:
        """On the follower's thread."""
        self._call_soon(self._sweep_later)
        return self._master.fresh_core(term=0)

    def _follow(self, seen: Seen) -> None:
        leader = seen.leader
        follower = self._follower
        election = self._coordinator.election
        if leader is not None and leader.name != self._master.config.name:
            address = Address.parse(leader.address)
            if follower is None or follower.leader != address:
                if follower is not None:
                    follower.stop()
                self._follower = follower = Follower(
                    address,
                    secret=self._master.secret,
                    hello=self._hello,
                    core=self._core_to_follow_with,
                    journal=self._write_followed,
                    changed=lambda: self._call_soon(self._election_changed),
                    failed=lambda error: self._call_soon(lambda: self._master.fail(error)),
                )
                follower.start()
        standby = follower.standby if follower is not None else None
        election.barred = self.directory.holds.drains_host(self._master.config.host)
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
            group=self._master.config.group,
            name=self._master.config.name,
            host=self._master.config.host,
            numa_node=0,
            pid=os.getpid(),
            boot_id=boot_id(),
            nonce=b"",
        )

    def _write_followed(self, standby: Standby, entry: JournalEntry | None) -> None:
        """On the follower's thread: the journal of a standby holds what it follows, from the state on."""
        if entry is None:
            self._master.books.begin(standby.core)
        else:
            self._master.books.append([entry], standby.core)
            self._master.books.step()

    def ask_for_term(self, seen: int) -> None:
        """A store has seen that term: lead one above it as soon as etcd says so."""
        with self._coordinator.lock:
            election = self._coordinator.election
            election.term_wanted = max(election.term_wanted, seen)
        self._coordinator.wake()

    def leader_address(self) -> str | None:
        """Where whoever leads speaks the wire, if anybody else does."""
        claim = self._coordinator.election.seen.leader
        return None if claim is None or claim.name == self._master.config.name else claim.address

    # Replication.

    def replicate(self, entries: Sequence[JournalEntry]) -> None:
        """What was done goes to the standbys."""
        if self._replication is not None:
            now = boot_ms()
            self._streams.send(
                [
                    (self._replication.append(now_ms=now, readable_from=entry.readable_from), entry)
                    for entry in entries
                ]
            )

    @property
    def pending(self) -> bool:
        """Whether a standby lacks something that was done."""
        return self._replication is not None and self._replication.pending

    def left(self, conn: int) -> None:
        """A connection ended."""
        if self._replication is not None:
            self._replication.left(conn)
            self._streams.drop(conn)
            self.release()

    def _hang_up(self, conn: int) -> None:
        outlet = self._master.outlet(conn)
        if outlet is not None:
            outlet.abort()

    async def committed(self) -> None:
        """
        Wait until the standbys have all that was done.

        Raises:
            Unreachable: They did not confirm, or somebody else leads by now: it may be undone.
        """
        if self._replication is None or not self._replication.pending:
            return
        confirmed: asyncio.Future[None] = self._loop.create_future()
        self._unconfirmed.append((self._replication.sequence, confirmed))
        try:
            await asyncio.wait_for(confirmed, COMMIT_S_MAX)
        except TimeoutError:
            raise Unreachable(
                f"the standbys of {self._master.config.name} have not confirmed it within {COMMIT_S_MAX:g} s",
                fix="look with kvops status, then repeat: it does nothing twice",
            ) from None

    def standby_frame(self, conn: int, peer: WirePeer, frame: Frame, body: bytes) -> None:
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
            before = replication.joined(conn, join.name, now_ms=now)
            if before is not None:
                self._hang_up(before)
            peer.reply(frame, wire.encode(m.Joined(term=self._master.core.term, now_ms=now)))
            self._streams.add(conn, peer.transport, self._master.core, sequence=replication.sequence)
            log.info("standby.joined", name=join.name)
        else:
            sequence, caught_up = unpack_ack(body)
            replication.acked(conn, sequence, caught_up=caught_up, now_ms=now)
            self.release()
            if caught_up:
                self.tend(now)

    def tend(self, now: int) -> None:
        """Now and then: how standbys keep up, and what they are told next."""
        replication, election = self._replication, self._coordinator.election
        if replication is None:
            return
        self._renewed(election)
        for conn in replication.review(now_ms=now):
            self._hang_up(conn)
        wanted = replication.wanted
        if wanted != election.members_wanted:
            log.info("members.changed", standbys=sorted(wanted))
            with self._coordinator.lock:
                election.members_wanted = wanted
                possible = election.members_possible
            replication.members(possible)
            self._coordinator.wake()
        self.release()
        if self._streams.busy:
            self._streams.step(sequence=replication.sequence)
        if now >= self._beat_due_ms:
            self._beat_due_ms = now + BEAT_INTERVAL_MS
            self._streams.beat()

    def must_wait(self, kind: int, answer: bytes) -> bool:
        """Whether an answer promises what not every standby has."""
        if self._replication is None:
            return False
        if self._master.core.outbox.journal:
            self._master.remember()
        return self._replication.must_wait(kind, answer)

    def hold(self, conn: int, data: bytes) -> None:
        """Keep a frame until the standbys have what it promises."""
        assert self._replication is not None
        if self._replication.held >= HELD_MAX:
            self._hang_up(conn)
        else:
            self._replication.hold(conn, data)

    def release(self) -> None:
        """Send what the standbys have by now."""
        if self._replication is None:
            return
        for sequence, confirmed in self._unconfirmed:
            if sequence <= self._replication.committed and not confirmed.done():
                confirmed.set_result(None)
        self._unconfirmed = [one for one in self._unconfirmed if not one[1].done()]
        for conn, data in self._replication.release():
            outlet = self._master.outlet(conn)
            if outlet is not None:
                outlet.write(data)

    # What operators ask.

    def members(self) -> set[str]:
        """Masters that have everything that was acknowledged, as far as a leader knows."""
        return {self._master.config.name, *self._coordinator.election.members}

    def step_down(self, *, owner: str, force: Sequence[str]) -> int:
        """Give the leadership to a standby that has everything."""
        if self.members() == {self._master.config.name} and "standby" not in force:
            raise Refused(
                f"no other master could lead in place of {self._master.config.name}",
                fix="wait until a standby has caught up (kvops status); --force standby leaves the group without",
            )
        term = self._master.core.term
        log.info("leadership.resigned", term=term, owner=owner)
        self.resign()
        return term

    def promote(self, *, owner: str, force: Sequence[str], dry_run: bool) -> Promotion:
        """
        Lead although not in the in-sync set, whose members are gone for good: an operator's way out.

        Raises:
            UsageError: A check that nobody knows.
            Refused: Somebody leads or can without this, or the set's members may come back.
            Unreachable: etcd does not answer.
        """
        name, coordinator = self._master.config.name, self._coordinator
        unknown = sorted(set(force) - {"in-sync"})
        if unknown:
            raise UsageError(f"unknown check {', '.join(unknown)}", fix="the only one is in-sync")
        if self._replication is not None:
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
        core = self.directory
        made = Promotion(
            term=seen.term, members=members, objects=len(core.index), holds=len(core.holds.rows())
        )
        if not dry_run:
            log.warning("master.promoted", owner=owner, replaces=members, objects=made.objects)
            with coordinator.lock:
                coordinator.election.promote()
            coordinator.wake()
        return made

    def resign(self) -> None:
        """Answer nobody from now on: the lease is given back, so another may lead in a moment."""
        self._resigning, self._master.lease_until_ms = True, 0
        with self._coordinator.lock:
            self._coordinator.election.resign()
        self._coordinator.wake()

    def leave_drained_host(self) -> None:
        """A leader whose own host is to be powered off lets another one lead, once the drain is everybody's."""
        if not self._master.core.holds.drains_host(self._master.config.host):
            return
        self._coordinator.election.barred = True
        if self.members() != {self._master.config.name}:
            self._loop.call_later(STEP_DOWN_DELAY_S, self.resign)

    def standing(self) -> dict[str, Any]:
        """What a master among several says of itself beside that."""
        coordinator = self._coordinator
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
            "members": sorted(self.members()) if leads else list(seen.names) if seen is not None else [],
            "promotable": leads or (election.hot and election.eligible()),
            "etcd_silent_ms": silent_ms,
        }

    def troubles(self) -> list[Trouble]:
        """What an operator has to know."""
        troubles = [*self._troubles.values()]
        follower = self._follower
        if self._replication is None:
            seen = self._coordinator.election.seen
            if seen.trouble:
                fix = "it is written anew by the next leader"
                if seen.taken and seen.leader is None:
                    fix = f"etcdctl del /kvops/{self._master.config.group}/leader"
                elif seen.members is None and seen.members_revision:
                    fix = (
                        f"kvops master promote {self._master.config.name} --force in-sync, when nobody leads"
                    )
                troubles.append(Trouble(code="etcd_damaged", text=seen.trouble, fix=fix))
            leader_known = seen.leader is not None and not self._coordinator.silent_since_ms
            if follower is not None and (error := follower.trouble) is not None and leader_known:
                troubles.append(Trouble(code="cannot_follow", text=error.what, fix=error.fix))
        return troubles


def group_keys(config: MasterConfig, secret: bytes) -> GroupKeys:
    """
    The group's keys in etcd, made sure of.

    Raises:
        KvopsError: etcd does not answer or turns us away, or another group has them.
    """
    access = EtcdAccess(
        endpoints=config.etcd,
        ca_file=config.etcd_ca,
        cert_file=config.etcd_cert,
        key_file=config.etcd_key,
        user=config.etcd_user,
        password=read_password(config.etcd_password_file),
    )
    keys = GroupKeys(access, group=config.group, timeout_s=min(TIMEOUT_S_MAX, config.etcd_ttl_s / 4))
    keys.check(secret)
    return keys
