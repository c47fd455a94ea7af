"""
One inference engine of a chaos run: a process of its own that sends its requests at their intended moments.

It has the real tier, the real pool client and the modelled GPU of a replay, and writes what it saw into a history
file of its own. ``python -m kvops.chaos.client SPEC PARENT_PID``; it says ``ready``, waits for ``go NANOSECONDS``
on standard input (CLOCK_BOOTTIME), works, and ends. The end of its input ends it too.
"""

from __future__ import annotations

import mmap
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
import numpy as np

from kvops.chaos import values
from kvops.chaos.history import (
    Arm,
    Content,
    Event,
    EventKind,
    HistoryWriter,
    Kind,
    Operation,
    Outcome,
    Request,
    Sample,
    Tier,
    outcome_of,
)
from kvops.chaos.profiles import GPU, Planned
from kvops.inference.engine import die_with_parent, load_factory
from kvops.inference.pages import Bytes
from kvops.inference.tier import HostTier, PoolLike, TierConfig
from kvops.inference.trace import BLOCK_TOKENS
from kvops.net.wire import Kind as Kinds
from kvops.store.model import Outcome as PoolOutcome
from kvops.store.model import PutOptions, Reason
from kvops.store.trail import Trail

REGISTER_KEYS: Final = 3  # of each client: few keys, much traffic
REGISTER_BYTES: Final = 4096
REGISTER_SUFFIX: Final = "-register"  # of the name under which a client's second pool client is known
WORKERS: Final = 4  # requests under way in one engine
MEET_MS: Final = 5_000
JOIN_LOOK_S: Final = 0.05
BREAKER_LOOK_S: Final = 0.05
STALL_S_MIN: Final = 0.025  # a thread that comes back so much later than it asked for has been held up
SAMPLE_S: Final = 1.0
FLUSH_S: Final = 0.25  # telemetry is at most this old while all is well
FACTORY: Final = "kvops.inference.engine:connect_pool"
EXIT_NOT_RECORDED: Final = 3


class ClientSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that one client is told, as a JSON file."""

    name: str
    group: str
    host: str  # logical
    arm: Arm
    block: int
    history: str  # path
    plan: list[Planned]
    warmup_s: float  # requests before it only fill the cache, and are of class "warmup"
    duration_s: float
    seed: int
    key_prefix: str
    page_bytes: int
    l2_pages: int
    deadline_ms: int
    budget_ms: float  # of a request, on top of the GPU time of its whole prompt
    register_rps: float
    peers: list[str] = []  # clients whose register keys this one reads
    pool_factory: str = FACTORY
    pool_options: dict[str, Any] = {}
    without_pool: bool = False  # cache off

    @property
    def writer(self) -> str:
        """Who its values say wrote them: unique in the run, and short."""
        return f"{self.name[:10]}{self.arm.value[0]}{self.block}"


class NoPool:
    """A pool that has nothing and takes nothing, at no cost."""

    def allocate(self, size_bytes: int) -> memoryview:
        """Memory of its own."""
        return memoryview(mmap.mmap(-1, size_bytes))

    def prefix_hits(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> int:
        """None."""
        return 0

    def batch_exists(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> list[bool]:
        """None of them."""
        return [False] * len(keys)

    def batch_get_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview], *, deadline_ms: int | None = None
    ) -> list[PoolOutcome]:
        """All missing."""
        return [PoolOutcome(False, Reason.MISS)] * len(keys)

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffers: Sequence[memoryview],
        *,
        deadline_ms: int | None = None,
        options: PutOptions | None = None,
        depths: Sequence[int] | None = None,
    ) -> list[PoolOutcome]:
        """All refused."""
        return [PoolOutcome(False, Reason.REFUSED)] * len(keys)

    def touch(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> None:
        """Nothing."""

    def health(self) -> dict[str, Any]:
        """Nothing is known."""
        return {}

    def follow(self, trail: Trail | None) -> None:
        """Nothing happens that could leave one."""

    def close(self) -> None:
        """Nothing to close."""


class Recorder:
    """Writes rows with a client's name, arm and block on them."""

    def __init__(self, spec: ClientSpec, writer: HistoryWriter, *, suffix: str = "") -> None:
        self.spec = spec
        self.name = f"{spec.name}{suffix}"
        self._writer = writer
        self._lock = threading.Lock()
        self._number = 0
        self._waited = cpu_wait_ns()
        self._sampled_ns = now_ns()

    def op_id(self) -> str:
        """A name for the next operation, unique in the run."""
        with self._lock:
            self._number += 1
            return f"{self.spec.arm.value}/{self.spec.block}/{self.name}/{self._number}"

    def operation(self, **row: Any) -> None:
        """One call's row."""
        spec = self.spec
        self._writer.write(
            Operation(
                client=self.name, arm=spec.arm, block=spec.block, group=spec.group, host=spec.host, **row
            )
        )

    def request(self, **row: Any) -> None:
        """One request's row."""
        spec = self.spec
        self._writer.write(
            Request(client=spec.name, arm=spec.arm, block=spec.block, group=spec.group, host=spec.host, **row)
        )

    def event(self, kind: str, **row: Any) -> None:
        """Something noticed."""
        spec = self.spec
        self._writer.write(
            Event(
                t_ns=now_ns(),
                kind=kind,
                subject=self.name,
                group=spec.group,
                host=spec.host,
                block=spec.block,
                **row,
            )
        )

    def sample(self, *, stalled_s: float = 0.0) -> None:
        """What this process holds now, and how long it waited for a CPU, and stood still, since the last time."""
        waited, now = cpu_wait_ns(), now_ns()
        share = None
        if waited is not None and self._waited is not None:
            share = round(min(1.0, max(0, waited - self._waited) / max(1, now - self._sampled_ns)), 3)
        self._waited, self._sampled_ns = waited, now
        self._writer.write(
            Sample(
                t_ns=now_ns(),
                subject=self.spec.name,
                role="client",
                group=self.spec.group,
                fds=sum(1 for _ in Path("/proc/self/fd").iterdir()),
                threads=threading.active_count(),
                stalled_ms=round(stalled_s * 1000),
                cpu_stall_share=share,
            )
        )

    def flush(self) -> None:
        """Let others see what was written."""
        self._writer.flush()


def follow(pool: Any, trail: Trail) -> None:
    """Have a pool leave a trail, if it can."""
    if (leave := getattr(pool, "follow", None)) is not None:
        leave(trail)


def answered(trail: Trail, group: str) -> dict[str, Any]:
    """Of the call that just ended: which master answered it last, in which term."""
    last = trail.last
    if last is None or not last.term:
        return {}
    return {"leader": f"{group}/{last.master}", "leader_incarnation": last.incarnation, "term": last.term}


def seen(trail: Trail, index: int, group: str) -> dict[str, Any]:
    """Of the call that just ended: who answered, where one of its keys lies, and until when it may be read."""
    row = answered(trail, group)
    place = trail.places.get(index)
    named = trail.first(Kinds.LOOKUP) or trail.first(Kinds.PUT_START)
    if place is None or named is None:
        return row
    row |= {
        "generation": place.generation,
        "incarnation": place.incarnation,
        "offset": place.offset,
        "extent_bytes": place.size_bytes,
        "node": place.store,
        "asked_ns": named.asked_ns,
        "answered_ns": named.answered_ns,
    }
    if trail.lease_until_ns:
        row |= {
            "lease_from_ns": named.answered_ns,
            "lease_until_ns": trail.lease_until_ns,
            "ended_ns": trail.ended_ns,
        }
    return row


class RecordedPool:
    """
    A pool whose calls are written down, a row a key, with what the bytes of each read turned out to be.

    Values are checked here, so outside of what the tier measures. One thread only.
    """

    def __init__(
        self, pool: PoolLike, recorder: Recorder, *, writer: str, trail: Trail | None = None
    ) -> None:
        self.pool = pool
        self.writer = writer  # unique in the run
        self.trail = Trail() if trail is None else trail  # that the pool leaves
        self.request = ""
        self.cls = ""
        self.puts = 0
        self.wrong: dict[str, int] = {}  # of the request under way: key → wrong bytes
        self._recorder = recorder
        self._position: dict[str, int] = {}
        self._sequence = 0
        self._api_calls = self._sent_before = self._retried_before = 0

    def begin(self, request: str, cls: str, keys: Sequence[str]) -> None:
        """What follows serves this request, whose prefix is these keys."""
        self.request, self.cls = request, cls
        self._position = {key: place for place, key in enumerate(keys)}
        self.puts = self._api_calls = 0
        self._sent_before, self._retried_before = self.trail.requests, self.trail.retries
        self.wrong.clear()

    def allocate(self, size_bytes: int) -> memoryview:
        """As the pool's; no row of it."""
        return self.pool.allocate(size_bytes)

    @property
    def calls(self) -> int:
        """What went over the wire for this request; calls of the pool's own where it leaves no trail."""
        return (self.trail.requests - self._sent_before) or self._api_calls

    @property
    def retries(self) -> int:
        """Reads of this request that were asked for again."""
        return self.trail.retries - self._retried_before

    def prefix_hits(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> int:
        """As the pool's; the row of the look-up has the first key."""
        began = now_ns()
        hits = self.pool.prefix_hits(keys, deadline_ms=deadline_ms)
        self._api_calls += 1
        self._recorder.operation(
            op_id=self._recorder.op_id(),
            kind=Kind.EXISTS,
            outcome=Outcome.OK,
            t_invoke_ns=began,
            t_return_ns=now_ns(),
            cls="lookup",
            key=keys[0] if keys else "",
            request=self.request,
            deadline_ms=float(deadline_ms or 0),
            **answered(self.trail, self._recorder.spec.group),
        )
        return hits

    def batch_exists(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> list[bool]:
        """As the pool's."""
        self._api_calls += 1
        return self.pool.batch_exists(keys, deadline_ms=deadline_ms)

    def batch_get_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview], *, deadline_ms: int | None = None
    ) -> list[PoolOutcome]:
        """As the pool's."""
        began = now_ns()
        outcomes = self.pool.batch_get_into(keys, buffers, deadline_ms=deadline_ms)
        ended = now_ns()
        self._api_calls += 1
        for index, (key, buffer, outcome) in enumerate(zip(keys, buffers, outcomes, strict=True)):
            content, version, digest = Content.UNCHECKED, "", ""
            if outcome.ok:
                content, version, digest = look(buffer[: outcome.size_bytes or len(buffer)], key)
                self.wrong[key] = 0 if content is Content.WHOLE else outcome.size_bytes or 1
            self._row(
                Kind.GET,
                index,
                key,
                outcome,
                began,
                ended,
                deadline_ms,
                content=content,
                value=version,
                digest=digest,
                tier=Tier.L3 if outcome.ok else Tier.NONE,
            )
        return outcomes

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffers: Sequence[memoryview],
        *,
        deadline_ms: int | None = None,
        options: PutOptions | None = None,
        depths: Sequence[int] | None = None,
    ) -> list[PoolOutcome]:
        """As the pool's."""
        began = now_ns()
        outcomes = self.pool.batch_put_from(
            keys, buffers, deadline_ms=deadline_ms, options=options, depths=depths
        )
        ended = now_ns()
        self._api_calls += 1
        self.puts += len(keys)
        for index, (key, buffer, outcome) in enumerate(zip(keys, buffers, outcomes, strict=True)):
            _, version, digest = look(buffer, key)
            self._row(Kind.PUT, index, key, outcome, began, ended, deadline_ms, value=version, digest=digest)
        return outcomes

    def touch(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> None:
        """As the pool's."""
        self._api_calls += 1
        self.pool.touch(keys, deadline_ms=deadline_ms)

    def health(self) -> dict[str, Any]:
        """As the pool's."""
        return self.pool.health()

    def close(self) -> None:
        """As the pool's."""
        self.pool.close()

    def _row(
        self,
        kind: Kind,
        index: int,
        key: str,
        outcome: PoolOutcome,
        began: int,
        ended: int,
        deadline_ms: int | None,
        **more: Any,
    ) -> None:
        where = seen(self.trail, index, self._recorder.spec.group)
        if outcome.store:
            where["node"] = outcome.store
        self._recorder.operation(
            op_id=self._recorder.op_id(),
            kind=kind,
            outcome=effect(kind, outcome),
            t_invoke_ns=began,
            t_return_ns=ended,
            cls=self.cls,
            key=key,
            request=self.request,
            position=self._position.get(key, -1),
            reason=outcome.reason.value,
            size_bytes=outcome.size_bytes,
            deadline_ms=float(deadline_ms or 0),
            **where,
            **more,
        )

    # What the tier asks for.

    def wrong_bytes(self, page: Bytes, key: str) -> int:
        """How many bytes of a page are not its key's; of a read that was just checked, without a second look."""
        if key in self.wrong:
            return self.wrong[key]
        return 0 if look(page.data, key)[0] is Content.WHOLE else len(page)

    def fill(self, page: Bytes, key: str) -> None:
        """Compute a page: a value that says whose it is."""
        self._sequence += 1
        make(page.data, key, writer=self.writer, sequence=self._sequence)


def make(buffer: memoryview, key: str, *, writer: str, sequence: int) -> None:
    """Write a self-describing value into all of a buffer."""
    buffer[:] = values.make(key, writer=writer, seq=sequence, size_bytes=len(buffer))


def look(buffer: memoryview, key: str) -> tuple[Content, str, str]:
    """What a buffer's bytes are: their kind, their version, their digest."""
    found = values.judge(key, buffer)
    return found.content, str(found.version or ""), values.digest(buffer)


def effect(kind: Kind, outcome: PoolOutcome) -> Outcome:
    """What is known of an operation's effect: EXISTS without ``ok`` is somebody else's put under way, and no own."""
    if outcome.reason is Reason.EXISTS and not outcome.ok:
        return Outcome.FAIL
    return outcome_of(kind, outcome.reason.value)


def now_ns() -> int:
    """CLOCK_BOOTTIME: the history's clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def cpu_wait_ns() -> int | None:
    """
    How long the threads of this process that live now were ready to run and had no CPU; None where the kernel does
    not count it.

    Source: /proc/<pid>/task/<tid>/schedstat, second field
    """
    try:
        return sum(
            int((task / "schedstat").read_text().split()[1]) for task in Path("/proc/self/task").iterdir()
        )
    except (OSError, IndexError, ValueError):
        return None


class Gpu:
    """The modelled GPU of one engine: serves one prefill at a time, on the history's clock."""

    def __init__(self) -> None:
        self._free_ns = 0
        self._lock = threading.Lock()

    def free_in_ms(self) -> float:
        """When it could start."""
        return (self._free_ns - now_ns()) / 1e6

    def run(self, *, ready_ns: int, gpu_ms: float) -> int:
        """Compute for so long as soon as it can; returns when it is done."""
        with self._lock:
            self._free_ns = max(ready_ns, self._free_ns) + round(gpu_ms * 1e6)
            return self._free_ns


class Engine:
    """
    The request loop: open, so that a late answer makes the next request late and nothing hides it.

    Several requests are under way at once, as in a real engine: one that waits for its deadline, or writes back,
    holds up no other. With an L2, which one thread owns, it is one at a time.
    """

    def __init__(self, spec: ClientSpec, pool: PoolLike, recorder: Recorder, stop: threading.Event) -> None:
        self._spec = spec
        self._stop = stop
        gpu, trail = Gpu(), Trail()
        follow(pool, trail)
        count = WORKERS if spec.l2_pages == 0 else 1
        self._workers = [_Worker(spec, pool, recorder, gpu, number, trail) for number in range(count)]
        self._todo: queue.SimpleQueue[tuple[Planned, int] | None] = queue.SimpleQueue()
        self._recorder = recorder
        self._unanswered: dict[str, tuple[Planned, int]] = {}

    def run(self, start_ns: int) -> None:
        """Send everything that is planned, or until told to stop; returns when all is answered."""
        threads = [threading.Thread(target=self._work, args=(one,), daemon=True) for one in self._workers]
        for thread in threads:
            thread.start()
        for planned in self._spec.plan:
            intended_ns = start_ns + round(planned.at_s * 1e9)
            if self._stop.wait(max(0.0, (intended_ns - now_ns()) / 1e9)):
                break
            self._unanswered[planned.request] = (planned, intended_ns)
            self._todo.put((planned, intended_ns))
        for _ in threads:
            self._todo.put(None)
        while any(thread.is_alive() for thread in threads) and not self._stop.wait(JOIN_LOOK_S):
            pass
        for name in list(self._unanswered):
            if (item := self._unanswered.pop(name, None)) is None:
                continue  # answered just now
            planned, intended_ns = item
            # Told to stop with requests in hand: they are on record as never answered, until now.
            self._recorder.request(
                request=planned.request,
                outcome=Outcome.INFO,
                t_intended_ns=intended_ns,
                t_given_up_ns=now_ns(),
                cls=class_of(planned, self._spec),
                budget_ms=budget_ms(planned, self._spec),
                input_tokens=planned.input_tokens,
                blocks=len(planned.hash_ids),
            )

    def _work(self, worker: _Worker) -> None:
        while (item := self._todo.get()) is not None and not self._stop.is_set():
            row = worker.serve(*item)
            if self._unanswered.pop(item[0].request, None) is not None:
                self._recorder.request(**row)  # else it was given up meanwhile: one row a request


def class_of(planned: Planned, spec: ClientSpec) -> str:
    """Requests of the warm-up are of a class of their own: they are not judged with the others."""
    return "warmup" if planned.at_s < spec.warmup_s else "prefix"


def budget_ms(planned: Planned, spec: ClientSpec) -> float:
    """How long its first token may take: the GPU time of its whole prompt, and what the pool may take."""
    return GPU.prefill_ms(input_tokens=planned.input_tokens, cached_tokens=0) + spec.budget_ms


class _Worker:
    """Serves one request at a time, with a tier of its own over the engine's pool client."""

    def __init__(
        self, spec: ClientSpec, pool: PoolLike, recorder: Recorder, gpu: Gpu, number: int, trail: Trail
    ) -> None:
        self._spec = spec
        self._gpu = gpu
        writer = f"{spec.writer}{'abcdefgh'[number]}"
        self._pool = RecordedPool(pool, recorder, writer=writer, trail=trail)
        config = TierConfig(
            page_bytes=spec.page_bytes,
            page_tokens=BLOCK_TOKENS,
            l2_pages=spec.l2_pages,
            deadline_ms=spec.deadline_ms,
            prefetch_ms_max=max(1_000, spec.deadline_ms),
        )
        self._tier = HostTier(self._pool, config, wrong_bytes=self._pool.wrong_bytes)

    def serve(self, planned: Planned, intended_ns: int) -> dict[str, Any]:
        """One request, from its look-up to its write-back; its row."""
        spec = self._spec
        cls = class_of(planned, spec)
        keys = [f"{spec.key_prefix}{block:x}" for block in planned.hash_ids]
        self._pool.begin(planned.request, cls, keys)
        began_ns = now_ns()
        fetched = self._tier.prefetch(keys, gpu_free_in_ms=self._gpu.free_in_ms())
        hit_tokens = self._tokens(planned, fetched.pages)
        gpu_ms = GPU.prefill_ms(input_tokens=planned.input_tokens, cached_tokens=hit_tokens)
        ready_ns = began_ns + round((fetched.lookup_ms + fetched.read_ms) * 1e6)
        first_ns = self._gpu.run(ready_ns=ready_ns, gpu_ms=gpu_ms)
        lost = max(0, self._tokens(planned, planned.seen_blocks) - hit_tokens)
        reason = fetched.stopped_by.value if fetched.stopped_by is not None else "MISS"
        written = self._tier.write_back(keys, fetched, compute=self._pool.fill)
        l2_tokens = self._tokens(planned, fetched.l2_pages)
        return {
            "request": planned.request,
            "outcome": Outcome.OK,
            "t_intended_ns": intended_ns,
            "t_start_ns": began_ns,
            "t_return_ns": first_ns,
            "cls": cls,
            "ttft_ms": (first_ns - intended_ns) / 1e6,
            "budget_ms": budget_ms(planned, spec),
            "input_tokens": planned.input_tokens,
            "l2_tokens": l2_tokens,
            "l3_tokens": hit_tokens - l2_tokens,
            "recomputed_tokens": lost,
            "losses": {reason: lost} if lost else {},
            "blocks": len(keys),
            "hit_blocks": fetched.pages,
            "local_blocks": fetched.l2_pages,
            "rpcs": self._pool.calls,
            "retries": self._pool.retries,
            "puts": self._pool.puts,
            "wrong_bytes": fetched.wrong_bytes,
            "over_deadline": fetched.over_deadline + written.over_deadline,
            "degraded": (reason,) if fetched.stopped_by is not None else (),
        }

    @staticmethod
    def _tokens(planned: Planned, blocks: int) -> int:
        return min(blocks * BLOCK_TOKENS, planned.input_tokens)


class Register:
    """Puts, gets and removes of a few keys, in a thread and over a pool client of its own."""

    def __init__(self, spec: ClientSpec, pool: Any, recorder: Recorder, stop: threading.Event) -> None:
        self._spec = spec
        self._pool = pool
        self._recorder = recorder
        self._stop = stop
        self._trail = Trail()
        follow(pool, self._trail)
        self._rng = random.Random(f"{spec.seed}/{spec.name}/register")
        self._sequence = 0

    def run(self, start_ns: int) -> None:
        """Until the stretch is over."""
        at_s = 0.0
        while at_s < self._spec.duration_s:
            at_s += self._rng.expovariate(self._spec.register_rps)
            if self._stop.wait(max(0.0, (start_ns + round(at_s * 1e9) - now_ns()) / 1e9)):
                return
            self._step()

    def _step(self) -> None:
        spec, rng = self._spec, self._rng
        dice = rng.random()
        number = rng.randrange(REGISTER_KEYS)
        if dice < 0.5:  # reads of its own keys and of others'
            owner = rng.choice([spec.name, *spec.peers])
            self._get(f"{spec.key_prefix}reg/{owner}/{number}")
        elif dice < 0.75:
            self._put(f"{spec.key_prefix}reg/{spec.name}/{number}")
        else:
            key = f"{spec.key_prefix}reg/{spec.name}/{number}"
            began = now_ns()
            self._row(Kind.REMOVE, key, self._pool.remove(key, deadline_ms=spec.deadline_ms), began)

    def _get(self, key: str) -> None:
        buffer = memoryview(bytearray(REGISTER_BYTES))
        began = now_ns()
        outcome = self._pool.batch_get_into([key], [buffer], deadline_ms=self._spec.deadline_ms)[0]
        ended = now_ns()
        content, version, digest = Content.UNCHECKED, "", ""
        if outcome.ok:
            content, version, digest = look(buffer[: outcome.size_bytes], key)
        self._row(Kind.GET, key, outcome, began, ended, content=content, value=version, digest=digest)

    def _put(self, key: str) -> None:
        self._sequence += 1
        page = np.zeros(REGISTER_BYTES, dtype=np.uint8)
        make(page.data, key, writer=f"{self._spec.writer}r", sequence=self._sequence)
        _, version, digest = look(page.data, key)
        began = now_ns()
        outcome = self._pool.batch_put_from([key], [page.data], deadline_ms=self._spec.deadline_ms)[0]
        self._row(Kind.PUT, key, outcome, began, value=version, digest=digest)

    def _row(
        self, kind: Kind, key: str, outcome: PoolOutcome, began: int, ended: int | None = None, **more: Any
    ) -> None:
        where = seen(self._trail, 0, self._spec.group)
        if outcome.store:
            where["node"] = outcome.store
        self._recorder.operation(
            op_id=self._recorder.op_id(),
            kind=kind,
            outcome=effect(kind, outcome),
            t_invoke_ns=began,
            t_return_ns=now_ns() if ended is None else ended,
            cls="register",
            key=key,
            reason=outcome.reason.value,
            size_bytes=outcome.size_bytes,
            deadline_ms=float(self._spec.deadline_ms),
            **where,
            **more,
        )


class Watch:
    """Looks at the breakers of pool clients twenty times a second, and at the process once."""

    def __init__(self, pools: Sequence[tuple[PoolLike, Recorder]], stop: threading.Event) -> None:
        self._pools = pools
        self._stop = stop
        self._known: dict[tuple[str, str, str], str] = {}

    def run(self) -> None:
        """Until told to stop."""
        sampled = flushed = stalled_s = 0.0
        before = time.monotonic()
        while not self._stop.wait(BREAKER_LOOK_S):
            now = time.monotonic()
            if (gap_s := now - before - BREAKER_LOOK_S) > STALL_S_MIN:
                stalled_s += gap_s
            before = now
            for pool, recorder in self._pools:
                self._breakers(pool, recorder)
            if now - sampled >= SAMPLE_S:
                sampled = now
                self._pools[0][1].sample(stalled_s=stalled_s)
                stalled_s = 0.0
            if now - flushed >= FLUSH_S:
                flushed = now
                self._pools[0][1].flush()
        self._pools[0][1].sample(stalled_s=stalled_s)
        for _, recorder in self._pools:
            for (name, domain, node), state in self._known.items():
                if name == recorder.name and state != "closed":
                    # The next arm's client has the same name, and breakers of its own.
                    recorder.event(
                        EventKind.BREAKER_CLOSED, domain=domain, node=node, detail="the client ended"
                    )

    def _breakers(self, pool: PoolLike, recorder: Recorder) -> None:
        health = pool.health()
        now: dict[tuple[str, str], str] = {
            (name, ""): str(health[name]["breaker"]) for name in ("master", "group") if name in health
        }
        now |= {("store", str(one["name"])): str(one["breaker"]) for one in health.get("stores", ())}
        for (domain, node), state in now.items():
            before = self._known.get((recorder.name, domain, node), "closed")
            if state != before:
                kind = {
                    "open": EventKind.BREAKER_OPENED,
                    "half_open": EventKind.BREAKER_HALF_OPEN,
                    "closed": EventKind.BREAKER_CLOSED,
                }[state]
                recorder.event(kind, domain=domain, node=node)
            self._known[recorder.name, domain, node] = state


def connect(spec: ClientSpec, *, suffix: str = "") -> Any:
    """A pool client as the specification has it."""
    if spec.without_pool:
        return NoPool()
    options = dict(spec.pool_options)
    return load_factory(spec.pool_factory)(**options, host=spec.host, name=f"chaos {spec.name}{suffix}")


def meet(pool: Any, spec: ClientSpec) -> None:
    """Connect to the master and to the store nearest by, patiently: the first request shall not pay for it."""
    key = f"{spec.key_prefix}meet/{spec.name}"
    page = memoryview(bytearray(values.VALUE_BYTES_MIN))
    pool.prefix_hits([key], deadline_ms=MEET_MS)
    pool.batch_put_from([key], [page], deadline_ms=MEET_MS)
    pool.batch_get_into([key], [page], deadline_ms=MEET_MS)


def serve(spec: ClientSpec) -> int:
    """Be the client until its work is done; returns the exit code."""
    stop, quiet = threading.Event(), threading.Event()
    go: list[int] = []
    said = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "go":
                go.append(int(rest))
                said.set()
        stop.set()  # the runner is gone, or wants us to end
        said.set()

    def end(signum: int, frame: FrameType | None) -> None:
        stop.set()
        said.set()

    signal.signal(signal.SIGTERM, end)
    with HistoryWriter(Path(spec.history), name=spec.name) as writer:
        recorder = Recorder(spec, writer)
        pool = connect(spec)
        register_pool = (
            None if spec.without_pool or not spec.register_rps else connect(spec, suffix=" register")
        )
        try:
            threading.Thread(target=listen, daemon=True).start()
            for one in filter(None, (pool, register_pool)):
                meet(one, spec)
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            said.wait()
            if not go:
                return 0
            watched: list[tuple[PoolLike, Recorder]] = [(pool, recorder)]
            if register_pool is not None:
                own = Recorder(spec, writer, suffix=REGISTER_SUFFIX)
                watched.append((register_pool, own))
            threads = [threading.Thread(target=Watch(watched, quiet).run, daemon=True)]
            if register_pool is not None:
                register = Register(spec, register_pool, watched[1][1], stop)
                threads.append(threading.Thread(target=register.run, args=(go[0],), daemon=True))
            for thread in threads:
                thread.start()
            Engine(spec, pool, recorder, stop).run(go[0])
            for thread in threads[1:]:
                thread.join(spec.deadline_ms / 1000 + spec.duration_s)
            quiet.set()
            threads[0].join(1.0)
        finally:
            pool.close()
            if register_pool is not None:
                register_pool.close()
    if writer.trouble:
        sys.stderr.write(f"{spec.history} does not hold all that was seen: {writer.trouble}\n")
        return EXIT_NOT_RECORDED
    return 0


def main() -> int:
    """Entry of the process."""
    path, parent_pid = Path(sys.argv[1]), int(sys.argv[2])
    if not die_with_parent(parent_pid):
        return 0
    return serve(msgspec.json.decode(path.read_bytes(), type=ClientSpec))


if __name__ == "__main__":
    sys.exit(main())
