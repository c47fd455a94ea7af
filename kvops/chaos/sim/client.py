"""
A simulated engine: the client's real plans, jobs, breakers and checks, driven by coroutines in virtual time.

Covered as they are: ``Located``, ``ReadPlan``, ``PutPlan``, ``ReadJob``, ``WriteJob``, ``shm.read``, header and chunk
verification, ``Breaker``, ``RetryBudget``, the judgement of peers. What stands in the blocking shells (``client.py``,
``channel.py``, ``engine.drive``, ``caretaker.py``) is repeated here, statement by statement where order matters;
threads, forks, signals, sockets and the segment's mmap are not covered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final, cast

from kvops.chaos.sim.clock import Host
from kvops.chaos.sim.net import PIECE, End, Payload, unpack
from kvops.chaos.sim.plan import Op
from kvops.chaos.sim.process import Process
from kvops.errors import KvopsError
from kvops.limits import DIGEST_BYTES, LEASE_MARGIN_MS
from kvops.net import wire
from kvops.net.auth import Welcome
from kvops.net.dial import REDIAL_S
from kvops.net.link import Link, LinkState
from kvops.net.wire import Frame, Kind, decode
from kvops.store import messages as m
from kvops.store.breaker import Breaker, Failure, RetryBudget
from kvops.store.channel import (
    FAILOVER_OPEN_MS,
    FAILOVER_OPEN_MS_MAX,
    IDLE_LINKS_MAX,
    PROBE_TIMEOUT_S,
    Trouble,
)
from kvops.store.client import END_RESERVE_S
from kvops.store.client_core import Located, PutPlan, ReadPlan
from kvops.store.judgement import carried, unanswered
from kvops.store.keys import NAMESPACE_DEFAULT, index_digests
from kvops.store.messages import RemoveStatus
from kvops.store.model import ObjectFlag, Outcome, PutOptions, Reason, StoreInfo, View
from kvops.transfer import shm
from kvops.transfer.engine import Until
from kvops.transfer.layout import HEADER_BYTES
from kvops.transfer.messages import MapReply
from kvops.transfer.model import ReadSlice, SliceState, WriteSlice
from kvops.transfer.stream import ReadJob, WriteJob

if TYPE_CHECKING:
    from kvops.chaos.sim.world import World

SECOND_US: Final = 1_000_000
MARGIN_US: Final = LEASE_MARGIN_MS * 1_000
PROBE_US: Final = int(PROBE_TIMEOUT_S * 1_000_000)
END_RESERVE_US: Final = int(END_RESERVE_S * 1_000_000)
REDIAL_US: Final = int(REDIAL_S * 1_000_000)
GROUP_POLL_US: Final = 500_000
CARE_QUEUE_MAX: Final = 256
SPLIT_BYTES: Final = 512  # larger payloads arrive in two pieces, with time between

Steps = Generator[None, Any, Any]
"""A coroutine: it stops where it waits, and goes on with what ``Task.go_on`` brings."""


class Task:
    """One thread of an engine: it waits for one thing at a time."""

    __slots__ = ("_steps", "serial")

    def __init__(self, steps: Callable[..., Steps], *args: Any) -> None:
        self.serial = 0  # grows with every step: what was awaited before is of no interest any more
        self._steps = steps(self, *args)

    def go_on(self, value: Any = None) -> None:
        """What it waited for has come; None: the time has."""
        self.serial += 1
        try:
            self._steps.send(value)
        except StopIteration:
            pass

    def wake(self, serial: int, value: Any = None) -> None:
        """The same, unless it waits for something else by now."""
        if serial == self.serial:
            self.go_on(value)


class SimLink:
    """What ``ReadJob`` and ``WriteJob`` need of a link, over a stream that may still be opening."""

    def __init__(self, end: End, *, ready: bool) -> None:
        self.end = end
        self.ready = ready
        self.heard_us = 0  # when the store last said something, on the client's clock
        self._waiting: list[tuple[int, int, bytes, Payload]] = []

    @property
    def state(self) -> LinkState:
        """Whether it can be used again."""
        if not self.end.open:
            return LinkState.CLOSED
        return LinkState.READY if self.ready else LinkState.CONNECTING

    def send(self, data: bytes) -> None:
        """A packed frame."""
        self._leave(*unpack(data), None)

    def feed(self, frames: Iterator[list[bytes | memoryview]]) -> None:
        """Packed frames, each with its payload."""
        for head, payload in frames:
            assert isinstance(head, bytes)
            self._leave(*unpack(head), payload)

    def _leave(self, kind: int, request: int, body: bytes, payload: Payload) -> None:
        if not self.ready:
            self._waiting.append((kind, request, body, payload))
        elif payload is not None and len(payload) >= SPLIT_BYTES:
            self.end.send(kind, 1, body, payload)
            self.end.send(PIECE, 0, b"", payload)
        else:
            self.end.send(kind, request, body, payload)

    def opened(self) -> None:
        """The peer has said welcome."""
        self.ready = True
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._leave(*one)

    def close(self) -> None:
        """Hang up."""
        self.end.close()


class SimMapping:
    """A store's segment as a client of its host has it mapped."""

    def __init__(self, memory: memoryview, incarnation: int, end: End) -> None:
        self.memory = memory
        self.incarnation = incarnation
        self.end = end

    def acquire(self) -> memoryview:
        """The bytes."""
        return self.memory

    def release(self) -> None:
        """Done."""


class MapJob:
    """Ask a node on this host for its segment, as ``shm.MapJob`` does."""

    def __init__(self, link: SimLink) -> None:
        self.link = link
        self.mapping: SimMapping | None = None
        self.done = False
        link.send(wire.pack(Kind.MAP, b""))

    def answered(self, body: bytes, payload: Payload) -> None:
        """The answer, and the memory."""
        assert isinstance(payload, memoryview)
        self.mapping = SimMapping(payload, decode(body, MapReply).incarnation, self.link.end)
        self.done = True

    def abandon(self, state: SliceState) -> None:
        """Give up."""
        self.link.close()
        self.done = True


Job = ReadJob | WriteJob | MapJob


class StoreChannel:
    """One mount of a store, as ``channel.StoreChannel``."""

    def __init__(self, client: ClientProcess, info: StoreInfo) -> None:
        self.info = info
        self.same_memory = info.boot_id == client.host.name and client.maps
        self.breaker = Breaker(rng=client.rng)
        self.mapping: SimMapping | None = None
        self.idle: list[SimLink] = []
        self.closed = False

    def close(self) -> None:
        """Hang up and unmap."""
        self.closed = True
        for link in self.idle:
            link.close()
        self.idle.clear()
        if self.mapping is not None:
            self.mapping.end.close()
            self.mapping = None


class _Use:
    """What an end is used for right now."""

    __slots__ = ("job", "request", "serial", "task")

    def __init__(self, task: Task, *, request: int = 0, job: Job | None = None) -> None:
        self.task = task
        self.serial = task.serial
        self.request = request
        self.job = job


class VirtualUntil(Until):
    """A deadline that a lease cuts short, for code that asks with the machine's clock."""

    def __init__(self, client: ClientProcess, end_us: int) -> None:
        super().__init__(0.0)
        self._client = client
        self._end_us = end_us

    def left(self, now: float) -> float:
        """Seconds of virtual time."""
        return (self._end_us - self._client.us()) / SECOND_US


class Window:
    """``engine.Leased`` in virtual time: until when a transfer may go on, renewing its lease at half time."""

    def __init__(
        self, client: ClientProcess, deadline_us: int, lease_end_us: int, digests: bytes, located: Located
    ) -> None:
        self.client = client
        self.deadline_us = deadline_us
        self.lease_end_us = lease_end_us
        self._digests = digests
        self._located = located
        self._renew_at = self._half()

    def _half(self) -> int:
        now = self.client.us()
        return now + (self.lease_end_us - now) // 2

    def look(self, task: Task) -> Generator[None, Any, int]:
        """Microseconds that are left; renews when it is time for that."""
        now = self.client.us()
        if now >= self._renew_at and self.lease_end_us < self.deadline_us:
            by = min(self._half(), self.deadline_us)
            sent = self.client.us()
            try:
                answer = yield from self.client.ask(task, Kind.TOUCH, self._digests, by)
            except Trouble:
                pass
            else:
                if self._located.renewed(0, answer):
                    self.lease_end_us = sent + self._located.lease_ms * 1_000 - MARGIN_US
            self._renew_at = self._half()
        return self.end_us - self.client.us()

    @property
    def end_us(self) -> int:
        """When it has to end, as things are."""
        return min(self.deadline_us, self.lease_end_us)

    @property
    def next_look_us(self) -> int:
        """When to look again at the latest."""
        end = self.end_us
        return (
            min(end, max(self._renew_at, self.client.us() + 1))
            if self.lease_end_us < self.deadline_us
            else end
        )


class ClientProcess(Process):
    """One engine: a pool, its workers and its caretaker."""

    def __init__(
        self,
        world: World,
        name: str,
        host: Host,
        rng: Random,
        *,
        masters: list[str],
        maps: bool,
        workers: Sequence[Sequence[Op]],
    ) -> None:
        super().__init__(world, name, host, rng)
        self.maps = maps
        self.stores: dict[int, StoreChannel] = {}
        # Where another master may take over, look for it often.
        self.breaker = (
            Breaker(rng=rng, open_ms_first=FAILOVER_OPEN_MS, open_ms_max=FAILOVER_OPEN_MS_MAX)
            if len(masters) > 1
            else Breaker(rng=rng)
        )
        self.group_open = False
        self._masters = masters
        self._workers = workers
        self._request = 0
        self._term = 0  # the highest of a master that welcomed us
        self._heard = 0  # µs: when a leader last welcomed or answered us
        self._timed_out = 0
        self._idle: list[End] = []  # to the master
        self._uses: dict[End, _Use] = {}
        self._links: dict[End, SimLink] = {}  # to stores
        self.master_incarnation = 0  # of the master that we last connected to
        self._viewed = 0
        self._epoch = 0
        self._retries = RetryBudget()
        self._to_master: deque[tuple[Kind, bytes]] = deque(maxlen=CARE_QUEUE_MAX)
        self._caring = False
        self._hello = self.hello_as("client")

    def start(self) -> None:
        """Let every worker work."""
        for ops in self._workers:
            self.spawn(self._work, ops)

    def spawn(self, steps: Callable[..., Steps], *args: Any) -> None:
        """A new thread."""
        Task(steps, *args).go_on()

    def us(self) -> int:
        """CLOCK_MONOTONIC of its host, in microseconds."""
        return int(self._scheduler.now_us * self.host.rate)

    def _wait(self, task: Task, until_us: int) -> Steps:
        """Until woken, or until then on our clock; gives what woke us, None for the time."""
        after_us = until_us - self.us()
        self.timer(max(after_us, 0) + 1, task.wake, task.serial)
        return (yield)

    # The workload.

    def _work(self, task: Task, ops: Sequence[Op]) -> Steps:
        for op in ops:
            begin_us = int(op.at_us * self.host.rate)
            if begin_us > self.us():
                yield from self._wait(task, begin_us)
            if self.world.closing:
                return
            yield from self.perform(task, op)

    def perform(self, task: Task, op: Op) -> Steps:
        """One call of an engine; gives its outcomes."""
        deadline = self.us() + op.deadline_ms * 1_000
        world = self.world
        began = world.scheduler.now_us
        outcomes: list[Outcome] = []
        match op.kind:
            case "get":
                outcomes = yield from self._get(task, op, deadline)
            case "put" | "part":
                outcomes = yield from self._put(task, op, deadline)
            case "fetch":
                outcomes = yield from self._get(task, op, deadline)
                missing = [key for key, one in zip(op.keys, outcomes, strict=True) if not one.ok]
                if missing and self.us() < deadline:
                    yield from self._put(task, op.of(missing), deadline)
            case "remove":
                outcomes = yield from self._remove(task, op, deadline)
            case "exists":
                outcomes = yield from self._exists(task, op, deadline)
        world.oracle.call_ended(self, op, outcomes, began)
        return outcomes

    def probe(self, task: Task, key: str, waiting: set[str]) -> Steps:
        """Put and get something new; takes our name out of ``waiting`` when both work."""
        op = Op(id=0, client=0, worker=0, at_us=0, kind="put", keys=(key,), sizes=(100,), deadline_ms=1_000)
        deadline = self.us() + op.deadline_ms * 1_000
        put = yield from self._put(task, op, deadline)
        got = yield from self._get(task, op, deadline)
        if self.world.recording:
            self.world.say(self.name, f"probe: put {put[0].reason}, get {got[0].reason}")
        if put[0].ok and got[0].ok:
            waiting.discard(self.name)

    # Reading.

    def _get(self, task: Task, op: Op, deadline: int) -> Generator[None, Any, list[Outcome]]:
        keys = op.keys
        if self.group_open:
            return _all(keys, Reason.BREAKER_OPEN)
        digests = index_digests(NAMESPACE_DEFAULT, keys)
        sent = self.us()
        oracle = self.world.oracle
        since = self.world.scheduler.now_us
        try:
            answer = yield from self.ask(task, Kind.LOOKUP, digests, deadline)
            located = Located()
            located.add(answer, len(keys))
            if located.lease_ms == 0:
                self.group_open = True
                self.care()
                return _all(keys, Reason.BREAKER_OPEN)
            yield from self._know_stores(task, located.epoch, {row[3] for row in located.rows}, deadline)
            oracle.located(self, keys, located, sent, since)
        except Trouble as trouble:
            return _all(keys, trouble.reason)
        lease_end = sent + located.lease_ms * 1_000 - MARGIN_US
        window = Window(self, deadline, lease_end, digests, located)
        plan = ReadPlan(located, NAMESPACE_DEFAULT, keys)
        buffers = [memoryview(bytearray(row[2])) for row in located.rows]
        for index, buffer in enumerate(buffers):
            plan.want_whole(index, buffer)
        if op.stall_ms and not op.stall_inside:
            yield from self._wait(task, self.us() + op.stall_ms * 1_000)
        self._retries.note_request(plan.pending)
        while plan.pending:
            if plan.retrying:
                left = yield from window.look(task)
                if left <= 0 or not all(self._retries.take() for _ in range(plan.pending)):
                    break
            yield from self._read_groups(task, plan.next_round(self._route), window, op)
            plan.settle()
        for index, outcome in enumerate(plan.outcomes):
            if outcome.reason is Reason.HIT:
                oracle.hit(self, keys[index], located.rows[index], buffers[index], since)
        return plan.outcomes

    def _route(self, store_id: int) -> StoreInfo | Reason:
        channel = self.stores.get(store_id)
        if channel is None:
            return Reason.STORE_DOWN
        return channel.info if channel.breaker.allow() else Reason.BREAKER_OPEN

    def _read_groups(self, task: Task, groups: dict[int, list[ReadSlice]], window: Window, op: Op) -> Steps:
        jobs: list[tuple[StoreChannel, ReadJob | MapJob, list[ReadSlice]]] = []
        mapped: list[tuple[SimMapping, list[ReadSlice]]] = []
        for store_id, slices in groups.items():
            channel = self.stores.get(store_id)
            if channel is None:
                _fail(slices)
            elif channel.mapping is not None:
                mapped.append((channel.mapping, slices))
            else:
                link = self._link(channel)
                same = channel.same_memory
                job: ReadJob | MapJob = MapJob(link) if same else ReadJob(cast(Link, link), slices)
                self._uses[link.end] = _Use(task, job=job)
                jobs.append((channel, job, slices))
        for mapping, slices in mapped:
            yield from self._copy(task, mapping, slices, window, op)
        began = self.us()
        yield from self._drive(task, [job for _, job, _ in jobs], window)
        for channel, job, reads in jobs:
            if not isinstance(job, MapJob):
                self._judge(channel, reads, job, began, window.deadline_us)
            elif job.mapping is None:
                late = window.end_us <= self.us()
                _fail(reads, SliceState.LATE if late else SliceState.FAILED)
                failure = unanswered(late=late, given_s=(window.deadline_us - began) / SECOND_US)
                if failure is not None:
                    self._failed(channel, failure)
            else:
                yield from self._copy(task, job.mapping, reads, window, op)
                self._adopt(channel, job.mapping)

    def _adopt(self, channel: StoreChannel, mapping: SimMapping) -> None:
        wanted = channel.mapping is None and mapping.incarnation == channel.info.incarnation
        if wanted and not channel.closed and mapping.end.open:
            channel.mapping = mapping

            def unmap(end: End) -> None:
                if channel.mapping is mapping:
                    channel.mapping = None

            mapping.end.on_close = unmap
        else:
            mapping.end.close()

    def _copy(
        self, task: Task, mapping: SimMapping, slices: list[ReadSlice], window: Window, op: Op
    ) -> Steps:
        """
        ``shm.read``; a stall comes after its look at the time.

        Either at once, so that all is read late, or between header and payload.
        """
        left = yield from window.look(task)
        until = VirtualUntil(self, window.end_us)
        if not (op.stall_ms and op.stall_inside) or left <= 0:
            shm.read(cast(shm.Mapping, mapping), slices, until)
            return
        before = bytearray(mapping.memory)
        yield from self._wait(task, self.us() + op.stall_ms * 1_000)
        for piece in slices:
            start = piece.offset + HEADER_BYTES + piece.start
            before[start : start + len(piece.buffer)] = mapping.memory[start : start + len(piece.buffer)]
        torn = SimMapping(memoryview(before), mapping.incarnation, mapping.end) if op.id % 2 else mapping
        shm.read(cast(shm.Mapping, torn), slices, VirtualUntil(self, self.us() + 1))

    def _know_stores(self, task: Task, epoch: int, store_ids: set[int], deadline: int) -> Steps:
        if self.master_incarnation != self._viewed:
            if not (yield from self._refresh(task, deadline)):
                raise Trouble(Reason.TIMEOUT)
        elif epoch != self._epoch and not store_ids <= {0, *self.stores}:
            yield from self._refresh(task, deadline)

    def _refresh(self, task: Task, deadline: int) -> Generator[None, Any, bool]:
        incarnation = self.master_incarnation
        try:
            view = decode((yield from self.ask(task, Kind.VIEW, b"", deadline)), View)
        except Trouble:
            return False
        self._viewed = incarnation
        known = {info.id for info in view.stores}
        for store_id in [one for one in self.stores if one not in known]:
            self.stores.pop(store_id).close()
        for info in view.stores:
            channel = self.stores.get(info.id)
            if channel is None or channel.info.incarnation != info.incarnation:
                if channel is not None:
                    channel.close()
                self.stores[info.id] = StoreChannel(self, info)
            else:
                channel.info = info
        self._epoch = view.epoch
        return True

    def _exists(self, task: Task, op: Op, deadline: int) -> Generator[None, Any, list[Outcome]]:
        try:
            answer = yield from self.ask(
                task, Kind.EXISTS, index_digests(NAMESPACE_DEFAULT, op.keys), deadline
            )
        except Trouble as trouble:
            return _all(op.keys, trouble.reason)
        return [Outcome(bool(byte), Reason.HIT if byte else Reason.MISS) for byte in answer]

    # Writing.

    def _put(self, task: Task, op: Op, deadline: int) -> Generator[None, Any, list[Outcome]]:
        keys = op.keys
        if self.group_open:
            return _all(keys, Reason.BREAKER_OPEN)
        oracle = self.world.oracle
        digests = index_digests(NAMESPACE_DEFAULT, keys)
        views = [oracle.content(op, key) for key in keys]
        options = PutOptions(
            replicas=op.replicas, soft_pin=op.soft_pin, hard_pin=op.hard_pin, ttl_ms=op.ttl_ms
        )
        texts = [key.encode() for key in keys]
        depths = [op.depth] * len(keys)
        plan = PutPlan(NAMESPACE_DEFAULT, keys, texts, views, digests, options, depths, part=op.part)
        since = self.world.scheduler.now_us
        try:
            answer = yield from self.ask(task, Kind.PUT_START, plan.start_body(), deadline)
            epoch, store_ids = plan.started(answer)
            yield from self._know_stores(task, epoch, store_ids, deadline)
        except Trouble as trouble:
            return _all(keys, trouble.reason)
        groups = plan.groups(self._route)
        written = [piece for slices in groups.values() for piece in slices]
        oracle.granted(self, op, written, since)
        if op.stall_ms:
            yield from self._wait(task, self.us() + op.stall_ms * 1_000)
        yield from self._write_groups(task, groups, deadline - END_RESERVE_US)
        where = {store_id: self.stores[store_id].info for store_id in groups if store_id in self.stores}
        rows = plan.end_body()
        if rows:
            try:
                plan.ended((yield from self.ask(task, Kind.PUT_END, rows, deadline)))
            except Trouble as trouble:
                plan.lost(trouble.reason)
                self._to_master.append((Kind.PUT_REVOKE, rows))
                self.care()
            else:
                for index, key in enumerate(keys):
                    if plan.outcomes[index].reason is Reason.STORED:
                        digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
                        pieces = [s for s in written if s.digest == digest and s.state is SliceState.DONE]
                        if pieces and (pieces[0].sealed or not pieces[0].flags & ObjectFlag.PARTS):
                            oracle.stored(self, key, pieces, where)
        return plan.outcomes

    def _write_groups(self, task: Task, groups: dict[int, list[WriteSlice]], deadline: int) -> Steps:
        jobs: list[tuple[StoreChannel, WriteJob, list[WriteSlice]]] = []
        for store_id, slices in groups.items():
            channel = self.stores.get(store_id)
            if channel is None:
                _fail(slices)
                continue
            link = self._link(channel)
            job = WriteJob(cast(Link, link), slices)
            self._uses[link.end] = _Use(task, job=job)
            jobs.append((channel, job, slices))
        began = self.us()
        yield from self._drive(
            task, [job for _, job, _ in jobs], Window(self, deadline, deadline, b"", Located())
        )
        for channel, job, slices in jobs:
            self._judge(channel, slices, job, began, deadline)

    def _remove(self, task: Task, op: Op, deadline: int) -> Generator[None, Any, list[Outcome]]:
        key = op.keys[0]
        since = self.world.scheduler.now_us
        try:
            answer = yield from self.ask(task, Kind.REMOVE, index_digests(NAMESPACE_DEFAULT, [key]), deadline)
        except Trouble as trouble:
            return _all([key], trouble.reason)
        status = RemoveStatus(answer[0])
        if status is RemoveStatus.HIDDEN:
            return _all([key], Reason.TIMEOUT)
        self.world.oracle.removed(key, since)
        removed = status is RemoveStatus.REMOVED
        return [Outcome(removed, Reason.HIT if removed else Reason.MISS)]

    # Stores: links, jobs, breakers.

    def _link(self, channel: StoreChannel) -> SimLink:
        while channel.idle:
            link = channel.idle.pop()
            if link.end.open:
                return link
        end = self.world.net.connect(self, channel.info.address, self._hello, Kind.HELLO)
        end.on_frame, end.on_close = self._store_says, self._store_left
        link = SimLink(end, ready=False)
        self._links[end] = link
        return link

    def _store_says(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        link = self._links[end]
        link.heard_us = self.us()
        if kind == Kind.WELCOME:
            link.opened()
            return
        use = self._uses.get(end)
        if use is None:
            return
        job = use.job
        assert job is not None
        if isinstance(job, MapJob):
            job.answered(body, payload)
        else:
            size = 0 if payload is None else len(payload)
            frame = Frame(kind, len(body), request, size, 0)
            try:
                if payload is not None:
                    job.payload(frame, body)[:] = payload
                job.frame(frame, body)
            except KvopsError:
                job.abandon(SliceState.FAILED)
        if job.done:
            del self._uses[end]
            use.task.wake(use.serial, job)

    def _store_left(self, end: End) -> None:
        self._links.pop(end, None)
        use = self._uses.pop(end, None)
        if use is not None and use.job is not None:
            use.job.abandon(SliceState.FAILED)
            use.task.wake(use.serial, use.job)

    def _drive(self, task: Task, jobs: Sequence[Job], window: Window) -> Steps:
        """``engine.drive``: all side by side until all are done or the time has come."""
        while True:
            active = [job for job in jobs if not job.done]
            for job in active:
                if not job.link.end.open:  # type: ignore[union-attr]
                    job.abandon(SliceState.FAILED)
            active = [job for job in active if not job.done]
            if not active:
                return
            left = yield from window.look(task)
            if left <= 0:
                for job in active:
                    if not job.done:
                        self._uses.pop(job.link.end, None)  # type: ignore[union-attr]
                        job.abandon(SliceState.LATE)
                return
            if any(job.done for job in active):
                continue  # while the lease was renewed
            for job in active:
                self._uses[job.link.end].serial = task.serial  # type: ignore[union-attr]
            yield from self._wait(task, window.next_look_us)

    def _judge(
        self,
        channel: StoreChannel,
        slices: Sequence[ReadSlice | WriteSlice],
        job: ReadJob | WriteJob,
        began: int,
        deadline: int,
    ) -> None:
        link = cast(SimLink, job.link)
        now = self.us()
        match carried(
            slices,
            given_s=(deadline - began) / SECOND_US,
            took_s=(now - began) / SECOND_US,
            silent_s=(now - max(link.heard_us, began)) / SECOND_US,
        ):
            case Failure() as failure:
                self._failed(channel, failure)
            case "well":
                channel.breaker.record(None, now_ms=self.now_ms())
        if link.state is LinkState.READY and len(channel.idle) < IDLE_LINKS_MAX and not channel.closed:
            channel.idle.append(link)
        else:
            link.close()
            self._links.pop(link.end, None)

    def _failed(self, channel: StoreChannel, failure: Failure) -> None:
        channel.breaker.record(failure, now_ms=self.now_ms())
        if not channel.breaker.allow():
            down = sum(not one.breaker.allow() for one in self.stores.values())
            reason = Reason.TIMEOUT if failure is Failure.TIMEOUT else Reason.STORE_DOWN
            report = m.Report(
                store_id=channel.info.id, reason=reason.value, stores=len(self.stores), stores_down=down
            )
            self._to_master.append((Kind.REPORT, wire.encode(report)))
            self.care()

    # The master.

    def ask(self, task: Task, kind: Kind, body: bytes, deadline: int) -> Generator[None, Any, bytes]:
        """``MasterChannel.call``: raises Trouble."""
        if not self.breaker.allow():
            self.care()
            raise Trouble(Reason.BREAKER_OPEN)
        began = self.us()
        if began >= deadline:
            raise Trouble(Reason.TIMEOUT)
        answer = yield from self._attempt(task, kind, body, deadline)
        if answer is None:
            late = self.us() >= deadline
            known = max(self._heard, self._timed_out) > began
            failure = unanswered(late=late, given_s=(deadline - began) / SECOND_US, known=known)
            if failure is not None:
                if late:
                    self._timed_out = self.us()
                self.breaker.record(failure, now_ms=self.now_ms())
                if not self.breaker.allow():
                    self.care()
            raise Trouble(Reason.TIMEOUT if late else Reason.MASTER_DOWN)
        self.breaker.record(None, now_ms=self.now_ms())
        return answer

    def _attempt(
        self, task: Task, kind: Kind, body: bytes, deadline: int
    ) -> Generator[None, Any, bytes | None]:
        answer: bytes | None
        while self._idle:
            end = self._idle.pop()
            if not end.open:
                continue
            answer = yield from self._exchange(task, end, kind, body, deadline)
            if answer is not None or self.us() >= deadline:
                return answer
            idle, self._idle = self._idle, []
            for other in idle:
                other.close()
        fresh = yield from self._connect(task, deadline)
        if fresh is None:
            return None
        return (yield from self._exchange(task, fresh, kind, body, deadline))

    def _connect(self, task: Task, deadline: int) -> Generator[None, Any, End | None]:
        """``dial``: all masters at once; the first that welcomes us has won."""
        calls: dict[End, str] = {}
        due = dict.fromkeys(self._masters, 0)
        won: End | None = None
        while won is None:
            now = self.us()
            if now >= deadline:
                break
            for address in [address for address, at in due.items() if at <= now]:
                del due[address]
                end = self.world.net.connect(self, address, self._hello, Kind.HELLO)
                end.on_frame, end.on_close = self._master_says, self._master_left
                self._uses[end] = _Use(task)
                calls[end] = address
            if not calls and all(at > 0 for at in due.values()):
                break
            for end in calls:
                self._uses[end].serial = task.serial
            found = yield from self._wait(task, min([deadline, *due.values()]))
            for end in [end for end in calls if not end.open]:
                due[calls.pop(end)] = self.us() + REDIAL_US
                self._uses.pop(end, None)
            if isinstance(found, tuple):
                won, welcome = found
                calls.pop(won, None)
        for end in calls:
            self._uses.pop(end, None)
            end.close()
        if won is None:
            return None
        if welcome.term < self._term:
            won.close()
            return None
        if welcome.incarnation != self.master_incarnation:
            idle, self._idle = self._idle, []
            for other in idle:
                other.close()
        self._term, self.master_incarnation = welcome.term, welcome.incarnation
        self._heard = self.us()
        return won

    def _exchange(
        self, task: Task, end: End, kind: Kind, body: bytes, deadline: int
    ) -> Generator[None, Any, bytes | None]:
        self._request = request = self._request + 1 & 0xFFFFFFFF
        self._uses[end] = _Use(task, request=request)
        end.send(kind, request, body)
        answer: bytes | None = yield from self._wait(task, deadline)
        if answer is None:
            self._uses.pop(end, None)
            end.close()
            return None
        self._heard = self.us()
        if len(self._idle) < IDLE_LINKS_MAX:
            self._idle.append(end)
        else:
            end.close()
        return answer

    def _master_says(self, end: End, kind: int, request: int, body: bytes, payload: Payload) -> None:
        if kind == Kind.ERROR:
            end.close()
            self._master_left(end)
            return
        use = self._uses.get(end)
        if use is None:
            return
        if kind == Kind.WELCOME:
            del self._uses[end]
            use.task.wake(use.serial, (end, decode(body, Welcome)))
        elif request == use.request:
            del self._uses[end]
            use.task.wake(use.serial, body)

    def _master_left(self, end: End) -> None:
        use = self._uses.pop(end, None)
        if use is not None:
            use.task.wake(use.serial)

    # The caretaker.

    def care(self) -> None:
        """There may be something to do off the callers' path."""
        if self._caring:
            return
        self._caring = True
        self.timer(1, self._care)

    def _care(self) -> None:
        self.spawn(self._caretaker)

    def _caretaker(self, task: Task) -> Steps:
        while self.alive:
            yield from self._probe_master(task)
            while self._to_master and self.breaker.allow():
                kind, body = self._to_master[0]
                try:
                    yield from self.ask(task, kind, body, self.us() + PROBE_US)
                except Trouble:
                    break
                if self._to_master and self._to_master[0] == (kind, body):
                    self._to_master.popleft()
            for channel in list(self.stores.values()):
                yield from self._probe_store(task, channel)
            if self.group_open:
                try:
                    answer = yield from self.ask(task, Kind.LOOKUP, b"", self.us() + PROBE_US)
                    self.group_open = m.LOOKUP_HEAD.unpack_from(answer)[1] == 0
                except Trouble:
                    pass
            breakers = (self.breaker, *(channel.breaker for channel in self.stores.values()))
            due = [at for one in breakers if (at := one.probe_due_ms()) is not None]
            if self.group_open:
                due.append(self.now_ms() + GROUP_POLL_US // 1_000)
            if not due and not self._to_master:
                self._caring = False
                return
            wait_ms = max(1, min(due) - self.now_ms()) if due else 1
            yield from self._wait(task, self.us() + wait_ms * 1_000)

    def _probe_master(self, task: Task) -> Steps:
        if not self.breaker.try_probe(now_ms=self.now_ms()):
            return
        deadline = self.us() + PROBE_US
        answer = yield from self._attempt(task, Kind.EXISTS, b"", deadline)
        self.breaker.record_probe(answer is not None, now_ms=self.now_ms())
        if answer is not None:
            yield from self._refresh(task, self.us() + PROBE_US)

    def _probe_store(self, task: Task, channel: StoreChannel) -> Steps:
        if channel.closed or not channel.breaker.try_probe(now_ms=self.now_ms()):
            return
        end = self.world.net.connect(self, channel.info.address, self._hello, Kind.HELLO)
        end.on_frame, end.on_close = self._master_says, self._master_left
        self._uses[end] = _Use(task)
        welcome = yield from self._wait(task, self.us() + PROBE_US)
        self._uses.pop(end, None)
        channel.breaker.record_probe(welcome is not None, now_ms=self.now_ms())
        if welcome is not None and end.open and not channel.closed:
            link = SimLink(end, ready=True)
            end.on_frame, end.on_close = self._store_says, self._store_left
            self._links[end] = link
            channel.idle.append(link)
        else:
            end.close()


def _all(keys: Sequence[str], reason: Reason) -> list[Outcome]:
    return [Outcome(False, reason)] * len(keys)


def _fail(slices: Sequence[ReadSlice | WriteSlice], state: SliceState = SliceState.FAILED) -> None:
    for piece in slices:
        piece.state = state
