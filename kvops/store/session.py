"""A store node's connection to the master, on a thread of its own: beats never wait behind payload."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvops.errors import KvopsError, Unreachable, WireError
from kvops.limits import BEAT_INTERVAL_MS, CONNECT_TIMEOUT_MS, STORE_TTL_MS
from kvops.log import log
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.dial import Target, dial
from kvops.net.etcd_query import EtcdEndpoint
from kvops.net.link import Address, Link
from kvops.net.wire import Frame, Kind, decode
from kvops.store import messages as m

CALL_TIMEOUT_S: Final = 2.0
RETRY_S_FIRST: Final = 0.05
RETRY_S_MAX: Final = 0.25
FAILOVER_SILENCE_S: Final = 0.75  # three beats
SLOTS_PER_FRAME: Final = 256  # a slice of either loop: 0.6 ms of the master, at most 2


class SessionOwner(Protocol):
    """The node, as its session sees it; every method may be called from the session's thread."""

    def mount(self) -> m.Mount:
        """What is offered to the master now."""

    def beat(self) -> m.Beat:
        """How it goes."""

    def announce(self, cursor: int) -> tuple[bytes, int]:
        """SLOT_ROW rows from a cursor on, and the next cursor; no rows at the end."""

    def free(self, body: bytes, done: Callable[[bytes], None]) -> None:
        """A FREE body; ``done`` is called with the answer's body, on any thread."""

    def floor(self, generation: int) -> None:
        """No put below this generation is under way."""

    def migrate(self, number: int, bandwidth_bps: int) -> None:
        """Copy what is here to other stores, for a hold; said again with every beat."""

    def mounted(self, store_id: int, term: int) -> None:
        """The master has taken us in."""


class Session:
    """Mounts, announces and beats until stopped; comes back by itself when the master does."""

    def __init__(
        self, masters: Sequence[Target], *, secret: bytes, hello: Callable[[], Hello], owner: SessionOwner
    ) -> None:
        self._masters = tuple(masters)
        self._secret = secret
        self._hello = hello
        self._owner = owner
        self._answers: deque[bytes] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = False
        self._grace_until = 0.0
        self._term = 0  # the highest of a master that took us in
        # Where another one may lead by now, ask early.
        several = len(self._masters) > 1 or isinstance(self._masters[0], EtcdEndpoint)
        self._silence_s = FAILOVER_SILENCE_S if several else STORE_TTL_MS / 1_000
        self._heard = 0.0
        self._awaited = 0
        self._answer: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """
        Leave the pool, and end within ``grace_s`` whatever the master does.

        From the master's answer on nobody is sent here; who was sent before may read until its lease has ended.
        """
        self._grace_until = time.monotonic() + grace_s
        self._stopping = True
        self._wake()
        self._thread.join(grace_s)

    def hurry(self) -> None:
        """Leave without waiting for readers."""
        self._grace_until = 0.0
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # it will wake anyhow

    def _run(self) -> None:
        retry_s = RETRY_S_FIRST
        told = False
        while not self._stopping:
            try:
                deadline = time.monotonic() + CONNECT_TIMEOUT_MS / 1_000
                link = dial(self._masters, self._open, deadline=deadline)
                try:
                    self._mount(link)
                    retry_s, told = RETRY_S_FIRST, False
                    self._serve(link)
                finally:
                    link.close()
            except KvopsError as error:
                if not (self._stopping or told):
                    log.warning("session.lost", error=error.what)
                    told = True
                self._pause(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, RETRY_S_MAX)

    def _open(self, address: Address) -> Link:
        return Link(address, secret=self._secret, hello=self._hello())

    def _pause(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if not self._stopping:
            poll.poll(seconds * 1_000)

    def _mount(self, link: Link) -> None:
        answer = self._call(link, Kind.MOUNT, wire.encode(self._owner.mount()))
        mounted = decode(answer, m.Mounted)
        if mounted.term < self._term:
            raise Unreachable(
                f"{link.address} leads term {mounted.term}; term {self._term} has begun", fix="kvops status"
            )
        self._term = mounted.term
        self._owner.floor(
            mounted.floor
        )  # no put of an earlier master completes behind the announcement's back
        cursor = 0
        while mounted.announce and not self._stopping:
            rows, cursor = self._owner.announce(cursor)
            forget = self._call(link, Kind.SLOTS, rows)
            if forget:
                self._owner.free(m.FREE_HEAD.pack(0) + forget, lambda _: None)
            if not rows:
                break
        self._owner.mounted(mounted.store_id, mounted.term)

    def _call(self, link: Link, kind: Kind, body: bytes) -> bytes:
        """One request and its answer; frames that the master sends by itself are handled meanwhile."""
        self._awaited, self._answer = wire.reply(kind), None
        link.send(wire.pack(kind, body))
        deadline = time.monotonic() + CALL_TIMEOUT_S
        poll = select.poll()
        while self._answer is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unreachable(f"{link.address} did not answer {kind.name}", fix="kvops status")
            link.flush()
            poll.register(link, link.events)
            for _, events in poll.poll(left * 1_000):
                link.advance(events, self)
        return self._answer

    def _serve(self, link: Link) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        beat_due = 0.0
        self._heard = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if now - self._heard > self._silence_s:
                raise Unreachable("the master stopped answering", fix="kvops status")
            if now >= beat_due:
                beat_due = now + BEAT_INTERVAL_MS / 1_000
                link.send(wire.pack(Kind.BEAT, wire.encode(self._owner.beat())))
            while self._answers:
                link.send(self._answers.popleft())
            link.flush()
            poll.register(link, link.events)
            for fd, events in poll.poll(max(0.0, beat_due - now) * 1_000):
                if fd == self._wake_read:
                    os.read(self._wake_read, 4_096)
                else:
                    link.advance(events, self)
        self._leave(link)
        self._call(link, Kind.UNMOUNT, b"")

    def _leave(self, link: Link) -> None:
        """Have the master send nobody here any more, and wait until the last lease has ended."""
        (lease_ms,) = m.LEAVE_REPLY.unpack(self._call(link, Kind.LEAVE, b""))
        log.info("session.left", lease_ms=lease_ms)
        until = time.monotonic() + lease_ms / 1_000
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while (left := min(until, self._grace_until) - time.monotonic()) > 0:
            while self._answers:
                link.send(self._answers.popleft())
            link.flush()
            poll.register(link, link.events)
            for fd, events in poll.poll(left * 1_000 + 1):
                if fd == self._wake_read:
                    os.read(self._wake_read, 4_096)
                else:
                    link.advance(events, self)

    # Frames of the master.

    def payload(self, frame: Frame, body: bytes) -> memoryview:
        """None is expected."""
        raise WireError(f"frame kind {frame.kind} carries no payload", fix="")

    def frame(self, frame: Frame, body: bytes) -> None:
        """An answer, or a FREE."""
        self._heard = time.monotonic()
        if frame.kind == Kind.FREE:
            request = frame.request
            self._owner.free(body, lambda answer: self._freed(request, answer))
        elif frame.kind == Kind.MIGRATE:
            self._owner.migrate(*m.MIGRATE.unpack(body))
        elif frame.kind == wire.reply(Kind.BEAT):
            _, unknown, floor = m.BEAT_REPLY.unpack(body)
            if unknown:
                raise Unreachable("the master no longer knows this mount", fix="")
            self._owner.floor(floor)
        elif frame.kind == self._awaited:
            self._answer = body

    def migrated(self, number: int, unmoved: int) -> None:
        """Tell the master that all that could be copied has been. On any thread."""
        self._answers.append(wire.pack(Kind.MIGRATED, m.MIGRATED.pack(number, unmoved)))
        self._wake()

    def _freed(self, request: int, answer: bytes) -> None:
        self._answers.append(wire.pack(wire.reply(Kind.FREE), answer, request))
        self._wake()
