"""A standby's connection to its leader, on a thread of its own: takes over the state, then follows it."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Callable
from typing import Final

from kvops import __version__
from kvops.errors import KvopsError, Unreachable, WireError
from kvops.limits import BEAT_INTERVAL_MS, CONNECT_TIMEOUT_MS
from kvops.log import log
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.link import Address, Link, establish
from kvops.net.wire import Frame, Kind, decode
from kvops.store import messages as m
from kvops.store.clock import boot_ms
from kvops.store.master_core import MasterCore
from kvops.store.outbox import JournalEntry
from kvops.store.replication import ACK, unpack_entries
from kvops.store.standby import Standby

RETRY_S: Final = (0.05, 0.2)
CALL_TIMEOUT_S: Final = 2.0
SILENCE_S: Final = 3.0  # a leader sends its beat several times in this time
STOP_TIMEOUT_S: Final = 2.0


class Follower:
    """
    Follows one leader until stopped. What it has learned stays in ``standby`` when the leader falls silent.

    Args:
        leader: Its wire address.
        secret: The group's.
        hello: Who we are.
        core: Makes a fresh directory for every time the state is taken over.
        journal: Takes what is to be written into our own journal: None first, for "begin anew".
        changed: Called when ``standby`` has caught up, or is another.
        failed: Called when the thread ends by what is a bug: nobody is followed from then on.
    """

    def __init__(
        self,
        leader: Address,
        *,
        secret: bytes,
        hello: Callable[[], Hello],
        core: Callable[[], MasterCore],
        journal: Callable[[Standby, JournalEntry | None], None],
        changed: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.leader = leader
        self.standby: Standby | None = None
        self.term = 0  # of the leader that ``standby`` follows
        self.heard_ms = 0
        self.trouble: KvopsError | None = None  # why the leader is not followed now
        self._secret = secret
        self._hello = hello
        self._core = core
        self._journal = journal
        self._changed = changed
        self._failed = failed
        self._joined: m.Joined | None = None
        self._acked = (-1, False)
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> bool:
        """End; whether the thread has let go of ``standby``."""
        self._stopping = True
        os.write(self._wake_write, b"x")
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            return False
        os.close(self._wake_read)
        os.close(self._wake_write)
        return True

    def _run(self) -> None:
        try:
            self._follow_until_stopped()
        except Exception as error:  # noqa: BLE001 (a thread's end would be noticed by nobody)
            self._failed(error)

    def _follow_until_stopped(self) -> None:
        told = False
        while not self._stopping:
            try:
                link = Link(self.leader, secret=self._secret, hello=self._hello())
                try:
                    establish(link, deadline=time.monotonic() + CONNECT_TIMEOUT_MS / 1_000)
                    self._follow(link)
                finally:
                    link.close()
            except KvopsError as error:
                self.trouble = error
                if not (self._stopping or told):
                    log.warning("leader.lost", leader=str(self.leader), error=error.what)
                    told = True
            poll = select.poll()
            poll.register(self._wake_read, select.POLLIN)
            if not self._stopping:
                poll.poll(random.uniform(*RETRY_S) * 1_000)

    def _follow(self, link: Link) -> None:
        self._joined = None
        link.send(wire.pack(Kind.JOIN, wire.encode(m.Join(name=self._hello().name, version=__version__))))
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        heard = time.monotonic()
        while not self._stopping:
            link.flush()
            poll.register(link, link.events)
            ready = poll.poll(BEAT_INTERVAL_MS)
            for descriptor, events in ready:
                if descriptor == link.fileno():
                    link.advance(events, self)
                    heard = time.monotonic()
            self._acknowledge(link)
            if time.monotonic() - heard > SILENCE_S:
                raise Unreachable("the leader stopped talking", fix="kvops status")

    def _acknowledge(self, link: Link) -> None:
        standby = self.standby
        if standby is None or self._joined is None:
            return
        state = (standby.sequence, standby.caught_up)
        if state != self._acked:
            self._acked = state
            link.send(wire.pack(wire.reply(Kind.REPLICATE), ACK.pack(*state)))

    # Frames of the leader.

    def payload(self, frame: Frame, body: bytes) -> memoryview:
        """None is expected."""
        raise WireError(f"frame kind {frame.kind} carries no payload", fix="")

    def frame(self, frame: Frame, body: bytes) -> None:
        """The answer to our JOIN, or operations."""
        self.heard_ms = boot_ms()
        if frame.kind == wire.reply(Kind.JOIN):
            self._joined = decode(body, m.Joined)
            self._acked = (-1, False)
            offset = self.heard_ms - self._joined.now_ms
            self.standby = Standby(self._core(), clock_offset_ms=offset)
            self.term = self._joined.term
            self.trouble = None
            self._changed()
        elif frame.kind == Kind.REPLICATE and self._joined is not None:
            self._apply(body)

    def _apply(self, body: bytes) -> None:
        standby = self.standby
        assert standby is not None
        now = boot_ms()
        for sequence, kind, part in unpack_entries(body):
            if self._stopping:
                return  # whoever stopped us may lead with what we have
            before = standby.caught_up
            entry = standby.apply(sequence, kind, part, now_ms=now)
            if standby.caught_up and not before:
                self._journal(standby, None)
                self._changed()
            elif entry is not None and standby.caught_up:
                self._journal(standby, entry)
