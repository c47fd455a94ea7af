"""
A simulated store node: the real ``NodeCore`` on a small real memory, with ``Session``'s and ``Node``'s handling.

Their threads and sockets are not covered: session and data loop are one here, and what the session hands to the
loop is done at once.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, Final

import numpy as np

from kvops.chaos.sim.clock import Host
from kvops.chaos.sim.mover import MoverModel
from kvops.chaos.sim.net import PIECE, End, Payload
from kvops.chaos.sim.process import Process
from kvops.errors import KvopsError
from kvops.limits import BEAT_INTERVAL_MS, CONNECT_TIMEOUT_MS, STORE_TTL_MS
from kvops.net import wire
from kvops.net.auth import Welcome
from kvops.net.dial import REDIAL_S
from kvops.net.wire import Kind, decode
from kvops.store import messages as m
from kvops.store.node_core import NodeCore, Write
from kvops.store.session import CALL_TIMEOUT_S, FAILOVER_SILENCE_S, RETRY_S_FIRST, RETRY_S_MAX
from kvops.transfer import messages as tm

if TYPE_CHECKING:
    from kvops.chaos.sim.world import World

BEAT_US: Final = BEAT_INTERVAL_MS * 1_000
CONNECT_US: Final = CONNECT_TIMEOUT_MS * 1_000
REDIAL_US: Final = int(REDIAL_S * 1_000_000)
CALL_US: Final = int(CALL_TIMEOUT_S * 1_000_000)
POPULATE_US: Final = 300_000  # from the first half of the memory to all of it
SLOTS_PER_FRAME: Final = 4  # few, so that an announcement can be interrupted
STOP_US: Final = 3_000_000

WRITE: Final = int(Kind.WRITE)
READ: Final = int(Kind.READ)
MAP: Final = int(Kind.MAP)
FREE: Final = int(Kind.FREE)
BEAT_REPLY: Final = wire.reply(Kind.BEAT)
READ_REPLY: Final = wire.reply(Kind.READ)
WRITE_REPLY: Final = wire.reply(Kind.WRITE)


class StoreProcess(Process):
    """One life of one store node: with it goes its memory."""

    def __init__(
        self,
        world: World,
        name: str,
        host: Host,
        rng: Random,
        *,
        masters: list[str],
        incarnation: int,
        segment_bytes: int,
    ) -> None:
        super().__init__(world, name, host, rng)
        self.memory = memoryview(bytearray(segment_bytes))
        self.core = NodeCore(self.memory, incarnation=incarnation)
        self.session: End | None = None
        self.mounted = False
        self._masters = masters
        self._silence_us = int(FAILOVER_SILENCE_S * 1_000_000) if len(masters) > 1 else STORE_TTL_MS * 1_000
        self._term = 0  # the highest of a master that took us in
        self._calls: list[End] = []  # to masters, until one welcomes us
        self._dials = 0  # rounds of calls
        self._retry_s = RETRY_S_FIRST
        self._populated = segment_bytes // 2
        self._answers: deque[bytes] = deque()  # to FREE: they outlive a session
        self._heard_us = 0
        self._awaited = 0  # kind of the answer that the session waits for
        self._asked = 0  # how many calls it has made: an old one's time-out means nothing
        self._cursor = 0
        self._ended = False
        self._stopping = False
        self._mover: MoverModel | None = None  # once the master wants this store emptied
        self._writes: dict[End, Write] = {}
        self._hello = self.hello_as("store")

    def start(self) -> None:
        """Listen, and look for the master."""
        self.world.net.listen(self.name, self)
        self.world.oracle.store_started(self)
        self.timer(POPULATE_US, self._populate)
        self._open()

    def _populate(self) -> None:
        self._populated = len(self.memory)

    # The session with the master.

    def _open(self) -> None:
        """Call all masters at once, as ``dial`` does; the first that welcomes us has won."""
        if self._stopping:
            return
        self.mounted = self._ended = False
        self._calls = []
        self._dials += 1
        for address in self._masters:
            self._dial(address, self._dials)
        self.timer(CONNECT_US, self._give_up, self._dials)

    def _dial(self, address: str, number: int) -> None:
        if number != self._dials or self.session is not None or self._stopping:
            return
        end = self.world.net.connect(self, address, self._hello, Kind.HELLO)

        def turned_away(end: End) -> None:
            if number == self._dials and end in self._calls:
                self._calls.remove(end)
                if self._calls:  # as long as others may answer
                    self.timer(REDIAL_US, self._dial, address, number)
                else:
                    self._give_up(number)

        end.on_frame, end.on_close = self._welcomed, turned_away
        self._calls.append(end)

    def _welcomed(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        if kind != Kind.WELCOME or end not in self._calls:
            return
        self._hang_up(end)
        end.on_frame, end.on_close = self._master_says, self._lost
        self.session = end
        self._call(Kind.MOUNT, wire.encode(self._mount()))

    def _hang_up(self, but: End | None = None) -> None:
        self._dials += 1
        calls, self._calls = self._calls, []
        for other in calls:
            if other is not but:
                other.close()

    def _give_up(self, number: int) -> None:
        """Nobody leads, or nobody answers: again later."""
        if number == self._dials and self.session is None:
            self._hang_up()
            self._again()

    def _again(self) -> None:
        self.timer(int(self._retry_s * self.rng.uniform(0.5, 1.0) * 1_000_000), self._open)
        self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)

    def _await(self, kind: int) -> None:
        self._awaited = kind
        self._asked += 1
        self.timer(CALL_US, self._unanswered, self._asked)

    def _unanswered(self, asked: int) -> None:
        if asked == self._asked and self._awaited and self.session is not None:
            self.session.close()
            self._lost(self.session)

    def _lost(self, end: End) -> None:
        if end is not self.session:
            return
        self.session, self.mounted, self._awaited = None, False, 0
        if self._stopping:
            self.end()
            return
        self._again()

    def _call(self, kind: int, body: bytes) -> None:
        assert self.session is not None
        self._await(kind + 1)
        self.session.send(kind, 0, body)

    def _master_says(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        self._heard_us = self.world.scheduler.now_us
        if kind == FREE:
            answer = self.free(body)
            if self.mounted:
                end.send(FREE + 1, request, answer)
            else:
                self._answers.append(answer)
            return
        if kind == Kind.ERROR:
            end.close()
            self._lost(end)
            return
        if kind == Kind.MIGRATE:
            if self._mover is None:
                self._mover = MoverModel(self, self._masters)
            self._mover.told(m.MIGRATE.unpack(body)[0])
            return
        if kind == BEAT_REPLY:
            _, unknown, floor = m.BEAT_REPLY.unpack(body)
            if unknown:
                end.close()
                self._lost(end)
            else:
                self.core.raise_floor(floor)
            return
        if kind != self._awaited:
            return
        self._awaited = 0
        if kind == wire.reply(Kind.MOUNT):
            mounted = decode(body, m.Mounted)
            if mounted.term < self._term:
                end.close()
                self._lost(end)
                return
            self._term = mounted.term
            self.core.raise_floor(mounted.floor)
            self._cursor = 0
            if mounted.announce:
                self._announce()
            else:
                self._serve(end)
        elif kind == wire.reply(Kind.SLOTS):
            if body:
                self.free(m.FREE_HEAD.pack(0) + body)
            if self._ended:
                self._serve(end)
            else:
                self._announce()
        elif kind == wire.reply(Kind.LEAVE):
            (lease_ms,) = m.LEAVE_REPLY.unpack(body)
            self.world.oracle.store_left(self)
            self.timer(lease_ms * 1_000, self._unmount)
        elif kind == wire.reply(Kind.UNMOUNT):
            self._exit()

    def _mount(self) -> m.Mount:
        return m.Mount(
            name=self.name,
            host=self.host.name,
            numa_node=0,
            incarnation=self.core.incarnation,
            boot_id=self.host.name,
            pid=1,
            address=self.name,
            unix_path=self.name,
            http_address="",
            capacity_bytes=len(self.memory),
            populated_bytes=self._populated,
            highest_generation=self.core.highest_generation,
            objects=self.core.objects,
            transports=["shm", "tcp"],
        )

    def _announce(self) -> None:
        rows, self._cursor = self.core.announce(self._cursor, SLOTS_PER_FRAME)
        self._ended = not rows
        self._call(Kind.SLOTS, rows)

    def _serve(self, end: End) -> None:
        self.mounted = True
        self._retry_s = RETRY_S_FIRST
        self._heard_us = self.world.scheduler.now_us
        while self._answers:
            end.send(FREE + 1, 0, self._answers.popleft())
        self._beat(end)

    def _beat(self, end: End) -> None:
        if end is not self.session or not self.mounted or self._stopping:
            return
        if self.world.scheduler.now_us - self._heard_us > self._silence_us:
            end.close()
            self._lost(end)
            return
        beat = m.Beat(
            populated_bytes=self._populated,
            objects=self.core.objects,
            used_bytes=self.core.used_bytes,
            loop_lag_ms=0,
        )
        end.send(Kind.BEAT, 0, wire.encode(beat))
        self.timer(BEAT_US, self._beat, end)

    def free(self, body: bytes) -> bytes:
        """Clear slots, seen by who checks that they are cleared."""
        answer = self.core.free(body)
        self.world.oracle.store_cleared(self, np.frombuffer(answer, m.FREE_ROW))
        return answer

    def migrated(self, number: int, unmoved: int) -> None:
        """All that could be copied for a hold has been; without a session the master asks again."""
        if self.session is not None and self.mounted:
            self.session.send(Kind.MIGRATED, 0, m.MIGRATED.pack(number, unmoved))

    def stop(self) -> None:
        """SIGTERM: have nobody sent here any more, let who was sent before read, unmount, and end."""
        if self._stopping:
            return
        self._stopping = True
        self.timer(STOP_US, self._exit)
        if self.session is None or not self.mounted:
            self._exit()
        else:
            self._call(Kind.LEAVE, b"")

    def _unmount(self) -> None:
        """The last lease has ended."""
        self.world.oracle.store_ends(self)
        if self.session is None:
            self._exit()
        else:
            self.mounted = False
            self._call(Kind.UNMOUNT, b"")

    def _exit(self) -> None:
        if self._mover is not None:
            self._mover.kill()
        for end in list(self.ends):
            end.close()
        self.end()

    def kill(self) -> None:
        """SIGKILL, of its mover too: that is a thread of it."""
        if self._mover is not None:
            self._mover.kill()
        super().kill()

    def power_off(self) -> None:
        """Its host is gone."""
        if self._mover is not None:
            self._mover.power_off()
        super().power_off()

    def end(self) -> None:
        """Whatever way it ended."""
        if self._mover is not None:
            self._mover.end()
        super().end()

    def pause(self) -> None:
        """SIGSTOP stops every thread."""
        if self._mover is not None:
            self._mover.pause()
        super().pause()

    def resume(self) -> None:
        """SIGCONT."""
        if self._mover is not None and self._mover.paused:
            self._mover.resume()
        super().resume()

    # Clients.

    def accept(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        """A client says who it is."""
        end.on_frame, end.on_close = self._client_says, self._client_left
        welcome = Welcome(
            role="store",
            name=self.name,
            term=0,
            incarnation=self.core.incarnation,
            boot_id=self.host.name,
            unix_path=self.name,
        )
        end.send(Kind.WELCOME, 0, wire.encode(welcome))

    def _client_left(self, end: End) -> None:
        write = self._writes.pop(end, None)
        if write is not None:
            self.core.write_lost(write)

    def _client_says(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        try:
            if kind == WRITE:
                assert payload is not None
                write = self.core.write_begin(body, len(payload), on_abort=_nothing)
                if write.target is not None:
                    self.world.oracle.store_writes(self, write)
                self._writes[end] = write
                if request:  # the first half of the payload: the rest follows in a PIECE
                    half = len(payload) // 2
                    if write.target is not None:
                        write.target[:half] = payload[:half]
                    return
                self._written(end, payload, 0)
            elif kind == PIECE:
                assert payload is not None
                self._written(end, payload, len(payload) // 2)
            elif kind == READ:
                for head, part in self.core.read(body):
                    end.send(READ_REPLY, request, head, part)
            elif kind == MAP:
                reply = tm.MapReply(incarnation=self.core.incarnation, segment_bytes=len(self.memory))
                end.send(MAP + 1, request, wire.encode(reply), self.memory)
        except KvopsError as error:
            self.world.say(self.name, f"refused a frame of kind {kind}: {error.what}")
            end.close()
            self._client_left(end)

    def _written(self, end: End, payload: bytes | memoryview, start: int) -> None:
        write = self._writes.pop(end)
        if write.target is not None:
            write.target[start:] = payload[start:]
        end.send(WRITE_REPLY, 0, self.core.write_end(write))


def _nothing() -> None:
    pass
