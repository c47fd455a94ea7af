"""
The network: ordered streams between processes, on links that delay, stall, cut and reset them.

What TCP gives is modelled, not segments: within one stream frames arrive whole, once and in order, or the
stream ends. A lost segment stalls its stream for a retransmission timeout. A cut link (both ways, or one)
holds back what is sent into it until some time after it heals, as backed-off retransmissions do. So nothing is
duplicated or reordered within a stream; across streams both happen: whoever gives up on a stream and asks again
on another one may be overtaken by what the first still carries, since closing a stream lets most of it arrive.

A killed process closes its streams, which peers learn unless the link is cut; a host that loses power tells
nobody, and a peer hears of it when it sends to the restarted host.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from struct import Struct
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64

from kvops.chaos.sim.clock import Host, Scheduler
from kvops.net.wire import HEADER_BYTES

if TYPE_CHECKING:
    from kvops.chaos.sim.process import Process

Payload = bytes | memoryview | None
Frame = tuple[int, int, bytes, Payload]
"""Kind, request, body, payload; a payload that is a view is read when it arrives, as a zero-copy socket may."""

CLOSE: Final = 0  # kinds that no wire frame has
PIECE: Final = 0xFFFF  # the rest of the payload of the WRITE before it
SAME_HOST_US: Final = 15
ACROSS_US: Final = 60
JITTER_US: Final = 120
RTO_US: Final = 200_000
RTO_DOUBLINGS_MAX: Final = 4
HOSTS_MAX: Final = 1_024

_TRACE: Final = Struct("<QIIHI")
_KIND_AND_REQUEST: Final = Struct("<6xH4xI")


def unpack(data: bytes) -> tuple[int, int, bytes]:
    """Kind, request and body of a packed frame: what ``wire.unpack_header`` would check was packed here."""
    kind, request = _KIND_AND_REQUEST.unpack_from(data)
    return kind, request, data[HEADER_BYTES:]


class Trouble:
    """What is wrong with one direction of a link."""

    __slots__ = ("delay_us", "loss")

    def __init__(self, *, delay_us: int = 0, loss: float = 0.0) -> None:
        self.delay_us = delay_us
        self.loss = loss


class End:
    """One process's end of a stream."""

    __slots__ = (
        "_arrives_us",
        "_dropping",
        "_held",
        "conn",
        "id",
        "net",
        "on_close",
        "on_frame",
        "open",
        "peer",
        "process",
        "route",
    )

    def __init__(self, net: Network, id: int, route: int, process: Process | None) -> None:
        self.net = net
        self.id = id
        self.route = route  # of what this end sends
        self.process = process
        self.peer: End
        self.open = True
        self.conn = 0  # the process's own name for it
        self.on_frame: Callable[[End, int, int, bytes, Payload], None] = _ignore
        self.on_close: Callable[[End], None] = _ignore_close
        self._arrives_us = 0  # the last frame sent
        self._held: list[Frame] = []  # cannot leave: the link is cut
        self._dropping = False  # what is still on its way here was reset

    def send(self, kind: int, request: int = 0, body: bytes = b"", payload: Payload = None) -> None:
        """Send a frame; nothing is said of it if the stream is over."""
        if self.open:
            self._transmit((kind, request, body, payload))

    def _transmit(self, frame: Frame) -> None:
        net, route = self.net, self.route
        if self._held or (net.cut and route in net.cut):
            if not self._held:
                net.stalled.setdefault(route, []).append(self)
            self._held.append(frame)
            return
        scheduler = net.scheduler
        when_us = scheduler.now_us + net.latency_us(route)
        if self.process is not None:
            when_us += self.process.slow_us
        if when_us <= self._arrives_us:
            when_us = self._arrives_us + 1
        self._arrives_us = when_us
        scheduler.at(when_us, net.deliver, self.peer, frame)

    def flush(self) -> None:
        """The link is whole again, and a retransmission has just said so."""
        held, self._held = self._held, []
        for frame in held:
            self._transmit(frame)

    def close(self, *, abrupt: bool = False) -> None:
        """Hang up; ``abrupt`` resets the stream: what is on its way to the peer is lost."""
        if not self.open:
            return
        if abrupt:
            self._held.clear()
            self.peer._dropping = True
        self._transmit((CLOSE, 0, b"", None))
        self.vanish()

    def vanish(self, *, unsent_too: bool = False) -> None:
        """The end is no more, and tells nobody."""
        self.open = False
        if unsent_too:
            self._held.clear()
        if self.process is not None:
            self.process.ends.pop(self, None)


def _ignore(end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
    pass


def _ignore_close(end: End) -> None:
    pass


class Network:
    """All hosts, links and streams."""

    def __init__(self, scheduler: Scheduler, rng: Random) -> None:
        self.scheduler = scheduler
        self.hosts: list[Host] = []
        self.listeners: dict[str, Process] = {}  # by address: the process that listens there now
        self.cut: dict[int, int] = {}  # route → when it was cut first, for those that are cut
        self.trouble: dict[int, list[Trouble]] = {}  # by route
        self.stalled: dict[int, list[End]] = {}  # by route: ends that hold frames back
        self.messages = 0  # frames that a process was given: what another one had sent, or itself to itself
        self.trace = xxh3_64()
        self._places: dict[str, Host] = {}  # where an address is, whoever listens
        self._cuts: dict[int, int] = {}  # how many faults cut a route
        self._seed = rng.getrandbits(64)
        # By route: its luck, which does not depend on another's, the least that a frame takes, and what varies.
        self._links: dict[int, tuple[Callable[[], float], int, int]] = {}
        self._streams = 0

    def add_host(self, host: Host) -> None:
        """Enter a machine."""
        assert host.index == len(self.hosts) < HOSTS_MAX
        self.hosts.append(host)

    def listen(self, address: str, process: Process) -> None:
        """From now on this process answers there."""
        self.listeners[address] = process
        self._places[address] = process.host

    def latency_us(self, route: int) -> int:
        """How long a frame takes, with all that is wrong."""
        link = self._links.get(route)
        if link is None:
            same = route // HOSTS_MAX == route % HOSTS_MAX
            least, jitter = (SAME_HOST_US, SAME_HOST_US) if same else (ACROSS_US, JITTER_US)
            link = self._links[route] = (Random(self._seed ^ route).random, least, jitter)
        random, least, jitter = link
        latency = least + int(random() * jitter)
        if self.trouble:
            for trouble in self.trouble.get(route, ()):
                if trouble.delay_us:
                    latency += int((0.5 + random()) * trouble.delay_us)
                lost = 0
                while lost < RTO_DOUBLINGS_MAX and random() < trouble.loss:
                    latency += RTO_US << lost
                    lost += 1
        return latency

    # Streams.

    def connect(self, process: Process, address: str, hello: bytes, kind: int) -> End:
        """A new stream to whoever listens at an address; its first frame says who calls."""
        there = self._places[address]
        here = process.host
        self._streams += 1
        mine = End(self, 2 * self._streams, here.index * HOSTS_MAX + there.index, process)
        theirs = End(self, 2 * self._streams + 1, there.index * HOSTS_MAX + here.index, None)
        mine.peer, theirs.peer = theirs, mine
        process.ends[mine] = None
        mine._transmit((kind, 0, hello, address.encode()))
        return mine

    def deliver(self, end: End, frame: Frame) -> None:
        """A frame has reached its host."""
        kind, request, body, payload = frame
        process = end.process
        if process is None:
            if not end.open:
                return
            if kind == CLOSE:  # given up before it was known here
                end.open = False
                return
            assert isinstance(payload, bytes)
            process = self._accept(end, payload.decode())
            if process is None:
                return
        if not end.open:
            if kind != CLOSE and self.hosts[end.route // HOSTS_MAX].up:
                self._reset(end)
            return
        if process.paused:
            process.deferred.append((self.deliver, (end, frame)))
            return
        if kind == CLOSE:
            end.vanish()
            end.on_close(end)
            return
        if end._dropping:
            return
        self.messages += 1
        self.trace.update(_TRACE.pack(self.scheduler.now_us, end.id, request, kind, len(body)) + body)
        end.on_frame(end, kind, request, body, payload)

    def _accept(self, end: End, address: str) -> Process | None:
        """Give a new stream to who listens; None: refused, or nobody is there to refuse."""
        process = self.listeners.get(address)
        if process is None or not process.alive:
            if self.hosts[end.route // HOSTS_MAX].up:
                self._reset(end)
            end.open = False
            return None
        end.process = process
        process.ends[end] = None
        end.on_frame = process.accept
        return process

    def _reset(self, end: End) -> None:
        """Tell a peer that there is no such stream here."""
        if end.peer.open:
            end._transmit((CLOSE, 0, b"", None))

    # Faults.

    def cut_route(self, route: int) -> None:
        """Nothing gets through any more, in this direction."""
        self._cuts[route] = self._cuts.get(route, 0) + 1
        self.cut.setdefault(route, self.scheduler.now_us)

    def heal_route(self, route: int) -> None:
        """One cut less; what was held back follows when its sender next tries."""
        left = self._cuts[route] - 1
        self._cuts[route] = left
        if left:
            return
        outage_us = self.scheduler.now_us - self.cut.pop(route)
        for end in self.stalled.pop(route, ()):
            wait_us = int(self._links[route][0]() * min(outage_us, 5_000_000)) if route in self._links else 0
            self.scheduler.at(self.scheduler.now_us + wait_us, self._retransmit, end)

    def _retransmit(self, end: End) -> None:
        if end.route in self.cut:
            self.stalled.setdefault(end.route, []).append(end)
        else:
            end.flush()

    def add_trouble(self, route: int, trouble: Trouble) -> None:
        """From now on."""
        self.trouble.setdefault(route, []).append(trouble)

    def remove_trouble(self, route: int, trouble: Trouble) -> None:
        """No longer."""
        left = self.trouble[route]
        left.remove(trouble)
        if not left:
            del self.trouble[route]
