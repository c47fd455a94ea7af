"""Connections of a client: to the master and to each store, with the breaker that guards each."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvops.errors import Unreachable, WireError
from kvops.limits import CONNECT_TIMEOUT_MS
from kvops.net.auth import Hello
from kvops.net.dial import Target, dial
from kvops.net.etcd_query import EtcdEndpoint
from kvops.net.link import Address, Link, LinkState, call, establish
from kvops.net.spin import Spin
from kvops.net.wire import Kind
from kvops.store.breaker import Breaker
from kvops.store.judgement import unanswered
from kvops.store.model import Reason, StoreInfo
from kvops.store.trail import Trail, boot_ns
from kvops.transfer.shm import Mapping

FAILOVER_OPEN_MS: Final = 50
FAILOVER_OPEN_MS_MAX: Final = 200
PROBE_TIMEOUT_S: Final = CONNECT_TIMEOUT_MS / 1_000
REGIONS_AGAIN_S: Final = 10.0  # a store that did not take registered memory is asked again after this long
IDLE_LINKS_MAX: Final = (
    16  # kept for the next call; more than that many calls at once open and close their own
)


def now_ms() -> int:
    """Milliseconds for breakers and deadlines; a stepped wall clock does not move it."""
    return time.monotonic_ns() // 1_000_000


class Trouble(Exception):
    """A call that did not work out, as the reason its keys get."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who we are to masters and stores."""

    hello: Hello
    secret: bytes


class Idle:
    """Links between calls, newest first."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> Link | None:
        """A link that was alive when it was put back."""
        with self._lock:
            return self._links.pop() if self._links else None

    def put(self, link: Link) -> None:
        """Keep a link for the next call, if it is in order."""
        if link.state is LinkState.READY:
            with self._lock:
                if len(self._links) < IDLE_LINKS_MAX and not self._closed:
                    self._links.append(link)
                    return
        link.close()

    def clear(self) -> None:
        """Hang up all."""
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.close()

    def close(self) -> None:
        """Hang up all, and whatever calls under way still bring back."""
        self._closed = True
        self.clear()


class MasterChannel:
    """Requests to the master, bounded by their deadline and by a breaker."""

    def __init__(self, addresses: Sequence[Target], identity: Identity) -> None:
        self.addresses = tuple(addresses)
        several = len(self.addresses) > 1 or isinstance(self.addresses[0], EtcdEndpoint)
        # Where another master may take over, look for it often.
        self.breaker = (
            Breaker(rng=random.Random(), open_ms_first=FAILOVER_OPEN_MS, open_ms_max=FAILOVER_OPEN_MS_MAX)
            if several
            else Breaker(rng=random.Random())
        )
        self.last_error: str = ""
        self.term = 0  # the highest of a master that welcomed us
        self.incarnation = 0  # of the master's process that we last connected to
        self.trail: Trail | None = None  # where answers are noted
        self._identity = identity
        self._idle = Idle()
        self._spin = Spin()
        self._request = 0
        self._heard = 0.0  # when a leader last welcomed or answered us, whichever call it was
        self._timed_out = 0.0  # when a time-out last counted

    @property
    def open(self) -> bool:
        """Whether calls are refused at once."""
        return not self.breaker.allow()

    def call(self, kind: Kind, body: bytes, *, deadline: float) -> bytes:
        """
        One request; the answer's body.

        Raises:
            Trouble: BREAKER_OPEN at once, TIMEOUT at the deadline, MASTER_DOWN when it cannot be reached.
        """
        if not self.breaker.allow():
            raise Trouble(Reason.BREAKER_OPEN)
        began = time.monotonic()
        if began >= deadline:
            raise Trouble(Reason.TIMEOUT)
        try:
            answer = self.attempt(kind, body, deadline=deadline)
        except Unreachable as error:
            self.last_error = str(error)
            late = time.monotonic() >= deadline
            known = max(self._heard, self._timed_out) > began
            failure = unanswered(late=late, given_s=deadline - began, known=known)
            if failure is not None:
                if late:
                    self._timed_out = time.monotonic()
                self.breaker.record(failure, now_ms=now_ms())
            raise Trouble(Reason.TIMEOUT if late else Reason.MASTER_DOWN) from error
        self.breaker.record(None, now_ms=now_ms())
        return answer

    def attempt(self, kind: Kind, body: bytes, *, deadline: float) -> bytes:
        """
        As ``call``, whatever the breaker says; the probe's way.

        Raises:
            Unreachable: No master answered.
        """
        link = self._idle.take()
        if link is not None:
            try:
                return self._exchange(link, kind, body, deadline)
            except Unreachable:
                if time.monotonic() >= deadline:
                    raise
                self._idle.clear()  # the master hung up since: ask again on a new connection
        return self._exchange(self._connect(deadline), kind, body, deadline)

    def _connect(self, deadline: float) -> Link:
        """
        A link to the master that leads: by its Unix socket where it tells us of one on this machine.

        The choice is made before the first request: a link that is given up takes its puts with it.
        """
        link = dial(self.addresses, self._open, deadline=deadline)
        welcome = link.welcome
        assert welcome is not None
        if welcome.term < self.term:
            link.close()
            raise Unreachable(
                f"{link.address} leads term {welcome.term}; term {self.term} has begun", fix="kvops status"
            )
        if welcome.incarnation != self.incarnation:
            self._idle.clear()  # of a master that leads no more
        self.term, self.incarnation = welcome.term, welcome.incarnation
        self._heard = time.monotonic()
        if not welcome.unix_path or welcome.boot_id != self._identity.hello.boot_id or link.address.is_unix:
            return link
        try:
            nearer = self._open(Address(welcome.unix_path, 0))
            establish(nearer, deadline=deadline)
        except Unreachable:
            return link  # another mount namespace
        link.close()
        return nearer

    def _open(self, address: Address) -> Link:
        return Link(address, secret=self._identity.secret, hello=self._identity.hello)

    def _exchange(self, link: Link, kind: Kind, body: bytes, deadline: float) -> bytes:
        self._request = request = (self._request + 1) & 0xFFFFFFFF
        asked_ns = 0
        if self.trail is not None:
            asked_ns = boot_ns()
            self.trail.requests += 1
        try:
            answer = call(link, kind, body, request=request, deadline=deadline, spin=self._spin)
        except WireError as error:
            link.close()
            raise Unreachable(error.what, fix=error.fix) from error
        except BaseException:
            link.close()  # interrupted between request and answer: the next call must not read that answer
            raise
        self._heard = time.monotonic()
        if self.trail is not None and link.welcome is not None:
            self.trail.answered(kind, by=link.welcome, asked_ns=asked_ns)
        self._idle.put(link)
        return answer

    def close(self) -> None:
        """Hang up."""
        self._idle.close()


class StoreChannel:
    """One mount of a store: its connections, its mapped memory, its breaker."""

    def __init__(self, info: StoreInfo, identity: Identity, *, same_memory: bool) -> None:
        self.info = info
        self.same_memory = same_memory  # its segment can be mapped, and its Unix socket reached
        self._regions_from_s = 0.0 if same_memory else math.inf
        self.breaker = Breaker(rng=random.Random())
        self.mapping: Mapping | None = None
        self.mapping_link: Link | None = None  # closes when the store's process ends
        self._identity = identity
        self._idle = Idle()
        self._lock = threading.Lock()  # of the mapping and its link
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether the breaker lets calls through."""
        return self.breaker.allow()

    def takes_regions(self, *, now_s: float) -> bool:
        """Whether it may be asked to copy from our memory by itself."""
        return now_s >= self._regions_from_s

    def refused_regions(self, *, now_s: float) -> None:
        """It hung up on being asked, as an older version does, or was too slow: not again for a while."""
        self._regions_from_s = max(self._regions_from_s, now_s + REGIONS_AGAIN_S)

    def link(self) -> Link:
        """
        A connection to the store, possibly still being made.

        Raises:
            Unreachable: It refused at once.
        """
        return self._idle.take() or self.open_link()

    def open_link(self) -> Link:
        """A new connection."""
        address = self.info.unix_path if self.same_memory else self.info.address
        return Link(Address.parse(address), secret=self._identity.secret, hello=self._identity.hello)

    def put_back(self, link: Link) -> None:
        """Keep a connection for the next call."""
        self._idle.put(link)

    def adopt(self, mapping: Mapping, link: Link) -> None:
        """Keep a mapping, and the connection whose end says that it is of no more use."""
        with self._lock:
            wanted = self.mapping is None and mapping.incarnation == self.info.incarnation
            if wanted and not self._closed:
                self.mapping, self.mapping_link = mapping, link
                return
        mapping.drop()
        self.put_back(link)

    def unmap(self) -> None:
        """The store's process ended."""
        with self._lock:
            mapping, self.mapping = self.mapping, None
            link, self.mapping_link = self.mapping_link, None
        if mapping is not None:
            mapping.drop()
        if link is not None:
            link.close()

    def close(self) -> None:
        """Hang up and unmap, now and when calls under way come back."""
        with self._lock:
            self._closed = True
        self._idle.close()
        self.unmap()
