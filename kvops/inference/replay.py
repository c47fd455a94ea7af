"""Replays a request trace on prefill nodes that are real processes over a real pool."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Final, Protocol

import numpy as np

from kvops.errors import KvopsError, Unreachable, UsageError
from kvops.inference import channel
from kvops.inference.channel import Done, Failed, Inbox, NodeConfig, Ready, Work
from kvops.inference.engine import RECEIVE_BYTES
from kvops.inference.gpu_model import MODELS
from kvops.inference.pages import PAGE_BYTES_MIN
from kvops.inference.results import DONE, FAILED, RESULT, ReplayEvent, ReplayResult
from kvops.inference.router import Router
from kvops.inference.tier import WAIT_COMPLETE_MS_MAX, PrefetchPolicy
from kvops.inference.trace import BLOCK_TOKENS, REQUESTS_MAX, Request, SeenBlocks
from kvops.limits import OBJECT_BYTES_MAX
from kvops.signals import signals_held
from kvops.timestamps import utc_now

NODES_MAX: Final = 64
WINDOW: Final = 2
"""Requests sent to a node and not yet answered: one being served, one to go on with. It bounds the result
channel too."""
ATTEMPTS_MAX: Final = 2  # of a request whose node died
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 3.0
SILENCE_S_MAX: Final = 30.0
"""A node with a request in hand that says nothing for so long is hung: far above the sum of the deadlines of
its calls."""
TICK_S: Final = 0.05  # how often the loop looks at the clock when nothing arrives
PROGRESS_INTERVAL_S: Final = 0.2
EVENTS_MAX: Final = 10_000

ACTIONS: Final = ("kill", "pause", "resume", "stop", "start")
REPAIRS: Final = ("resume", "start")  # undo a fault: they do not part "before" from "after"


class Launcher(Protocol):
    """Does something to a member of the group in the middle of a replay; handed in by the command line."""

    def __call__(self, action: str, target: str, /) -> str:
        """Carry out one of ``ACTIONS``; returns what was done, for people. Raises ``KvopsError`` when it
        could not.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Something to do to the group once the replay reaches a point of the trace."""

    action: str
    target: str
    at_ms: float | None = None  # on the trace's clock, after its first request
    at_share: float | None = None  # of the requests, 0 to 1

    def due(self, *, at_ms: float, share: float) -> bool:
        """Whether the replay is there."""
        return at_ms >= self.at_ms if self.at_ms is not None else share >= (self.at_share or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How to replay."""

    pool_factory: str  # "module:function" that makes a node's pool client from pool_options
    pool_options: Mapping[str, str | int | list[str] | None] = field(default_factory=dict)
    hosts: tuple[str, ...] = ("host-0",)  # logical host of each node: its length is the number of nodes
    key_prefix: str = "replay/"
    speed: float = 0.0  # trace seconds a second; 0: as fast as it goes
    page_bytes: int = 64 * 1024
    l2_bytes: int = 64 * 1024 * 1024  # of each node
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    deadline_ms: int = 200
    prefetch_ms_max: int = 1_000
    model: str = "llama-70b"
    events: tuple[Planned, ...] = ()

    @property
    def l2_pages(self) -> int:
        """Pages in the L2 of one node."""
        return self.l2_bytes // self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a replay is."""

    requests: int
    hit_ratio: float
    ttft_p99_ms: float


def check(requests: Sequence[Request], config: ReplayConfig) -> None:
    """
    Refuse what cannot be replayed, before anything is started.

    Raises:
        UsageError: A value is out of range, or an event lies behind the trace's end.
    """
    if not 1 <= len(config.hosts) <= NODES_MAX:
        raise UsageError(f"{len(config.hosts)} nodes are not possible", fix=f"choose 1 to {NODES_MAX}")
    if not 1 <= len(requests) <= REQUESTS_MAX:
        raise UsageError(f"{len(requests)} requests are not possible", fix=f"choose 1 to {REQUESTS_MAX}")
    if not 0 <= config.speed < math.inf:
        raise UsageError(
            f"a speed of {config.speed:g} is not possible", fix="0: as fast as it goes; 1: as recorded"
        )
    if not PAGE_BYTES_MIN <= config.page_bytes <= OBJECT_BYTES_MAX or config.page_bytes % 8:
        fix = f"choose {PAGE_BYTES_MIN} to {OBJECT_BYTES_MAX} bytes, a multiple of 8, such as 64KiB"
        raise UsageError(f"pages of {config.page_bytes} bytes are not possible", fix=fix)
    if config.model not in MODELS:
        raise UsageError(f"no GPU model {config.model}", fix=f"choose one of {', '.join(MODELS)}")
    if config.deadline_ms < 1 or config.prefetch_ms_max < config.deadline_ms:
        what = f"a deadline of {config.deadline_ms} ms, a prefetch of at most {config.prefetch_ms_max} ms"
        raise UsageError(
            f"{what}: not possible",
            fix="choose a deadline of at least 1ms, and a prefetch limit not below it",
        )
    span_ms = requests[-1].timestamp_ms - requests[0].timestamp_ms
    for planned in config.events:
        if planned.action not in ACTIONS:
            raise UsageError(f"cannot {planned.action} a member", fix=f"choose one of {', '.join(ACTIONS)}")
        if planned.at_ms is not None and planned.at_ms > span_ms:
            when = f"{planned.at_ms / 1000:g} s, but the trace ends at {span_ms / 1000:g} s"
            what = f"{planned.action} {planned.target} at {when}"
            raise UsageError(what, fix="choose an earlier time, a share such as 50%, or replay more requests")


def replay(
    requests: Sequence[Request],
    config: ReplayConfig,
    *,
    launcher: Launcher | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_event: Callable[[ReplayEvent], None] | None = None,
    on_answer: Callable[[Done], None] | None = None,
) -> ReplayResult:
    """
    Replay a trace.

    Requests go out in trace order. Each node serves one at a time, so with one node this is "one request at a
    time". Whatever ends it, an exception or Ctrl-C included, no engine process is left. Call it from a main
    thread: engines die with the thread that started them.

    Args:
        requests: In order of their timestamps.
        config: How.
        launcher: Carries out ``config.events``, in a thread of its own, while requests go on.
        on_progress: Called now and then.
        on_event: Called for each event as it happens; for a planned one as it begins, and again if it fails.
        on_answer: Called for each request that was answered.

    Raises:
        UsageError: ``check`` refuses it.
        KvopsError: An engine could not start, or all of them died.
    """
    check(requests, config)
    assert launcher is not None or not config.events, "events need a launcher"
    with _engines(config) as engines:
        run = _Run(requests, config, engines, launcher, on_progress, on_event, on_answer)
        return run.run()


def _parameters(requests: Sequence[Request], config: ReplayConfig) -> dict[str, str]:
    span_s = (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000
    pace = f"{config.speed:g} × as recorded" if config.speed else "as fast as it goes, GPU time virtual"
    return {
        "requests": f"{len(requests):,} in {span_s:,.0f} s of trace",
        "pace": pace,
        "nodes": f"{len(config.hosts)} on {', '.join(config.hosts)}",
        "page": f"{config.page_bytes:,} B for {BLOCK_TOKENS} tokens",
        "L2": f"{config.l2_pages:,} pages a node",
        "prefetch": f"{config.prefetch}, at most {config.prefetch_ms_max} ms",
        "deadline": f"{config.deadline_ms} ms a call",
        "GPU": MODELS[config.model].name,
    }


class _Engine:
    """The replay's end of one engine process."""

    def __init__(self, number: int, config: ReplayConfig) -> None:
        self.number = number
        self.name = f"node-{number}"
        self.ready = False
        self.lost = False
        self.in_hand: deque[int] = deque()  # indices of requests, oldest first
        self.heard_s = 0.0
        self.inbox = Inbox()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the engine
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
        # One engine is one thread of computing; a maths library's own threads would only take cores from the
        # stores.
        env["OPENBLAS_NUM_THREADS"] = env["OMP_NUM_THREADS"] = "1"
        with theirs:
            # A fresh interpreter, not a fork: whatever threads and locks we hold stay here. A session of its
            # own, so that Ctrl-C reaches only us; "-P" keeps the current folder from shadowing modules.
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kvops.inference.engine",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.sock = ours
        self.sock.settimeout(SILENCE_S_MAX)
        node = NodeConfig(
            node=self.name,
            host=config.hosts[number],
            key_prefix=config.key_prefix,
            page_bytes=config.page_bytes,
            page_tokens=BLOCK_TOKENS,
            l2_pages=config.l2_pages,
            prefetch=config.prefetch,
            deadline_ms=config.deadline_ms,
            prefetch_ms_max=config.prefetch_ms_max,
            model=config.model,
            pool_factory=config.pool_factory,
            pool_options={**config.pool_options, "host": config.hosts[number], "name": f"replay {self.name}"},
        )
        with contextlib.suppress(OSError):  # dead on arrival: the closed socket tells, with its last words
            channel.send(self.sock, node)

    def last_words(self) -> str:
        """The end of what the process wrote to standard error."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.settimeout(0.2)
            channel.send(self.sock, channel.Stop())
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def reap(self, *, until: float) -> None:
        """Wait for the process to end until then (``time.monotonic``), kill it if it has not, and collect
        it.
        """
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.sock.close()
        self._log.close()


@contextlib.contextmanager
def _engines(config: ReplayConfig) -> Iterator[list[_Engine]]:
    """Start every engine; none is left afterwards, whatever happened."""
    engines: list[_Engine] = []
    try:
        for number in range(len(config.hosts)):
            with signals_held():  # a process that runs and is not in the list would be left behind
                engines.append(_Engine(number, config))
        yield engines
    finally:
        for engine in engines:
            engine.ask_to_stop()
        until = time.monotonic() + STOP_TIMEOUT_S
        for engine in engines:
            engine.reap(until=until)


class _LauncherThread:
    """Carries out planned events one after another, so that a slow one holds up no request."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._todo: queue.SimpleQueue[tuple[Planned, ReplayEvent] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[ReplayEvent] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="replay-launcher", daemon=True)
        self._thread.start()

    def begin(self, planned: Planned, event: ReplayEvent) -> None:
        self._todo.put((planned, event))

    def finished(self) -> list[ReplayEvent]:
        events = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._done.get_nowait())
        return events

    def join(self, timeout_s: float) -> None:
        self._todo.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            planned, event = item
            try:
                detail = self._launcher(planned.action, planned.target)
            except KvopsError as error:
                self._done.put(replace(event, event="fault.failed", detail=str(error), fault=False))
            else:
                self._done.put(replace(event, detail=detail))


class _Run:
    """One replay under way; one loop over the engines' sockets, in the caller's thread."""

    def __init__(
        self,
        requests: Sequence[Request],
        config: ReplayConfig,
        engines: list[_Engine],
        launcher: Launcher | None,
        on_progress: Callable[[Progress], None] | None,
        on_event: Callable[[ReplayEvent], None] | None,
        on_answer: Callable[[Done], None] | None,
    ) -> None:
        self._on_answer = on_answer
        self._requests = requests
        self._config = config
        self._engines = engines
        self._launcher = _LauncherThread(launcher) if launcher is not None and config.events else None
        self._on_progress = on_progress
        self._on_event = on_event
        self._planned = sorted(config.events, key=self._order)
        self._selector = selectors.DefaultSelector()
        self._router = Router(nodes=len(engines), l2_pages=config.l2_pages, gpu=MODELS[config.model])
        self._seen = SeenBlocks()
        self._settled = SeenBlocks()
        self._next = 0
        self._chosen: _Engine | None = None  # of the next request, while it waits for a place there
        self._again: deque[int] = deque()  # their node died
        self._attempts: dict[int, int] = {}
        self._finished = 0
        self._progress_s = 0.0
        self._silence_s = SILENCE_S_MAX
        if config.prefetch is PrefetchPolicy.WAIT_COMPLETE:
            self._silence_s += WAIT_COMPLETE_MS_MAX / 1000
        count = len(requests)
        first_ms = requests[0].timestamp_ms
        arrival_ms = np.array([request.timestamp_ms - first_ms for request in requests], dtype=np.float64)
        self._seen_pages = np.zeros(count, dtype=np.int64)
        self._result = ReplayResult(
            rows=np.zeros(count, dtype=RESULT),
            arrival_ms=arrival_ms,
            seen_tokens=np.zeros(count, dtype=np.int64),
            reasons=[""],
            events=[],
            write_failures={},
            wall_s=0.0,
            lag_s=0.0,
            started_at="",
            hosts=config.hosts,
            page_bytes=config.page_bytes,
            deadline_ms=config.deadline_ms,
            parameters=_parameters(requests, config),
        )
        self._started = time.monotonic()

    def _order(self, planned: Planned) -> float:
        span_ms = self._requests[-1].timestamp_ms - self._requests[0].timestamp_ms
        return planned.at_ms if planned.at_ms is not None else (planned.at_share or 0.0) * span_ms

    def run(self) -> ReplayResult:
        for engine in self._engines:
            self._selector.register(engine.sock, selectors.EVENT_READ, engine)
        try:
            self._wait_until_ready()
            self._started = time.monotonic()
            self._result.started_at = utc_now()
            while self._finished < len(self._requests):
                self._carry_out()
                wait_s = self._send()
                self._receive(wait_s)
                self._give_up_hung()
                self._report()
            self._result.wall_s = self._now()
            self._last_events()
            self._result.events.sort(key=lambda event: event.at_s)  # a slow one is reported when it is done
        finally:
            self._selector.close()
        self._report(last=True)
        return self._result

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _wait_until_ready(self) -> None:
        while not all(engine.ready for engine in self._engines):
            self._receive(TICK_S)
            for engine in self._engines:
                if engine.lost:
                    what = f"{engine.name} ended before it was ready: {engine.last_words()}"
                    raise Unreachable(what, fix="check the pool's address and this machine's free memory")
            if self._now() > START_TIMEOUT_S:
                late = ", ".join(engine.name for engine in self._engines if not engine.ready)
                raise Unreachable(f"not ready after {START_TIMEOUT_S:g} s: {late}", fix="use fewer --nodes")

    def _send(self) -> float:
        """Send what may be sent; returns for how long there is nothing more to send."""
        while self._again:
            engine = min(self._alive(), key=lambda one: len(one.in_hand))
            if len(engine.in_hand) >= WINDOW:
                return TICK_S
            self._send_to(engine, self._again.popleft())
        while self._next < len(self._requests):
            early_s = self._early_s()
            if early_s > 0:
                return min(early_s, TICK_S)
            if self._chosen is None or self._chosen.lost:
                self._chosen = self._choose(self._next)
            if len(self._chosen.in_hand) >= WINDOW:
                return TICK_S
            self._send_to(self._chosen, self._next)
            self._chosen = None
            self._next += 1
            self._carry_out()
        return TICK_S

    def _early_s(self) -> float:
        if not self._config.speed:
            return 0.0
        early_s = float(self._result.arrival_ms[self._next]) / 1000 / self._config.speed - self._now()
        self._result.lag_s = max(self._result.lag_s, -early_s)
        return early_s

    def _alive(self) -> list[_Engine]:
        alive = [engine for engine in self._engines if not engine.lost]
        if not alive:
            what = f"every node died, the last one after {self._finished} of {len(self._requests)} requests: "
            fix = "look for what killed them (kernel log: out of memory), then replay again"
            raise Unreachable(what + self._engines[-1].last_words(), fix=fix)
        return alive

    def _choose(self, index: int) -> _Engine:
        request = self._requests[index]
        seen = self._seen.prefix(request.hash_ids)
        alive = [engine.number for engine in self._alive()]
        number = self._router.choose(request, seen_pages=seen, alive=alive)
        self._seen_pages[index] = seen
        self._result.seen_tokens[index] = request.tokens_of_prefix(seen)
        self._seen.add(request.hash_ids)
        return self._engines[number]

    def _send_to(self, engine: _Engine, index: int) -> None:
        request = self._requests[index]
        row = self._result.rows[index]
        row["sent_s"] = self._now()
        row["node"] = engine.number
        row["input_tokens"] = request.input_tokens
        self._attempts[index] = self._attempts.get(index, 0) + 1
        if not engine.in_hand:
            engine.heard_s = self._now()
        engine.in_hand.append(index)
        work = Work(
            index=index,
            arrival_ms=float(self._result.arrival_ms[index]),
            input_tokens=request.input_tokens,
            hash_ids=list(request.hash_ids),
            seen_pages=int(self._seen_pages[index]),
            settled_pages=self._settled.prefix(request.hash_ids[: int(self._seen_pages[index])]),
        )
        try:
            channel.send(engine.sock, work)
        except TimeoutError:
            self._lose(engine, "it took no request any more")
        except OSError:
            self._lose(engine, engine.last_words())

    def _receive(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            engine: _Engine = key.data
            if engine.lost:
                continue
            try:
                data = engine.sock.recv(RECEIVE_BYTES)
            except OSError:
                data = b""
            if not data:
                self._lose(engine, engine.last_words())
                continue
            engine.heard_s = self._now()
            for message in engine.inbox.feed(data):
                match message:
                    case Ready():
                        engine.ready = True
                    case Done():
                        self._take(engine, message)
                    case Failed():
                        self._raise_for(engine, message)
                    case _:
                        raise AssertionError(f"an engine never sends {message}")

    @staticmethod
    def _raise_for(engine: _Engine, failed: Failed) -> None:
        if failed.trace:
            raise RuntimeError(f"{engine.name}: {failed.what}\n{failed.trace}")
        error = KvopsError(f"{engine.name}: {failed.what}", fix=failed.fix)
        error.exit_code = failed.exit_code
        raise error

    def _take(self, engine: _Engine, done: Done) -> None:
        engine.in_hand.remove(done.index)
        row = self._result.rows[done.index]
        row["state"] = DONE
        row["done_s"] = self._now()
        for name in _COPIED:
            row[name] = getattr(done, name)
        if done.lost_reason:
            if done.lost_reason not in self._result.reasons:
                self._result.reasons.append(done.lost_reason)
                self._note("loss.first_seen", engine.name, done.lost_reason)
            row["lost_reason"] = self._result.reasons.index(done.lost_reason)
        for reason, pages in done.write_failures.items():
            self._result.write_failures[reason] = self._result.write_failures.get(reason, 0) + pages
        for name, state in done.breakers.items():
            if state in _BREAKER_EVENTS:
                self._note(_BREAKER_EVENTS[state], name, f"at {engine.name}")
        if done.wrong_bytes:
            self._note("page.corrupted", engine.name, f"request {done.index}: {done.wrong_bytes} wrong bytes")
        self._settled.add(self._requests[done.index].hash_ids)
        self._finished += 1
        if self._on_answer is not None:
            self._on_answer(done)

    def _lose(self, engine: _Engine, why: str) -> None:
        """A node is gone: its requests go to the others, as a gateway would send them."""
        engine.lost = True
        self._selector.unregister(engine.sock)
        engine.process.kill()
        self._note("node.lost", engine.name, why)
        for index in engine.in_hand:
            if self._attempts[index] < ATTEMPTS_MAX:
                self._again.append(index)
            else:
                self._result.rows[index]["state"] = FAILED
                self._result.rows[index]["done_s"] = self._now()
                self._finished += 1
        engine.in_hand.clear()

    def _give_up_hung(self) -> None:
        for engine in self._engines:
            if engine.in_hand and self._now() - engine.heard_s > self._silence_s:
                self._lose(engine, f"silent for {self._silence_s:g} s with a request in hand")

    def _carry_out(self) -> None:
        """Begin the events that are due, and report those that are done."""
        if self._launcher is None:
            return
        index = min(self._next, len(self._requests) - 1)
        at_ms = float(self._result.arrival_ms[index])
        share = self._next / len(self._requests)
        while self._planned and self._planned[0].due(at_ms=at_ms, share=share):
            planned = self._planned.pop(0)
            event = ReplayEvent(
                at_s=self._now(),
                trace_s=at_ms / 1000,
                event=f"fault.{_PAST[planned.action]}",
                subject=planned.target,
                fault=planned.action not in REPAIRS,
            )
            self._launcher.begin(planned, event)
            self._tell(event)
        self._take_finished()

    def _take_finished(self) -> None:
        """Events that were told when they began enter the result when done, or say that they failed."""
        assert self._launcher is not None
        for event in self._launcher.finished():
            self._record(event, tell=event.event == "fault.failed")

    def _last_events(self) -> None:
        """Events that end with the trace still count: wait for them, but not for ever."""
        if self._launcher is None:
            return
        self._carry_out()
        self._launcher.join(START_TIMEOUT_S)
        self._take_finished()

    def _note(self, event: str, subject: str, detail: str) -> None:
        trace_s = float(self._result.arrival_ms[min(self._next, len(self._requests) - 1)]) / 1000
        self._record(
            ReplayEvent(at_s=self._now(), trace_s=trace_s, event=event, subject=subject, detail=detail)
        )

    def _record(self, event: ReplayEvent, *, tell: bool = True) -> None:
        if len(self._result.events) < EVENTS_MAX:
            self._result.events.append(event)
        if tell:
            self._tell(event)

    def _tell(self, event: ReplayEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def _report(self, *, last: bool = False) -> None:
        now_s = self._now()
        if self._on_progress is None or (not last and now_s - self._progress_s < PROGRESS_INTERVAL_S):
            return
        self._progress_s = now_s
        rows = self._result.rows[self._result.rows["state"] == DONE]
        tokens = int(rows["input_tokens"].sum())
        hits = int(rows["l2_tokens"].sum() + rows["l3_tokens"].sum())
        self._on_progress(
            Progress(
                requests=self._finished,
                hit_ratio=hits / tokens if tokens else 0.0,
                ttft_p99_ms=float(np.percentile(rows["ttft_ms"], 99)) if len(rows) else 0.0,
            )
        )


_PAST: Final = {
    "kill": "killed",
    "pause": "paused",
    "resume": "resumed",
    "stop": "stopped",
    "start": "started",
}
_BREAKER_EVENTS: Final = {"open": "breaker.opened", "closed": "breaker.closed"}
_COPIED: Final = [
    name for name in Done.__struct_fields__ if name in (RESULT.names or ()) and name != "lost_reason"
]
