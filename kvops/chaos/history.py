"""
What a chaos run leaves behind: one JSON object a line, appended by everybody who took part.

A run is a folder of ``*.jsonl`` files, or one such file. The runner writes ``run`` first, then ``block``,
``fault``, ``step``, ``event`` and ``sample`` rows as they happen, at the end ``end``. Each client writes ``op``
and ``request`` rows into a file of its own. ``read_run`` gives all of them as one ``RunRecord``; checkers are
pure functions of it.

Times are nanoseconds of CLOCK_BOOTTIME of one machine, or are brought to it by whoever merges histories of
several; ``Run.clock_error_ns`` is how far two of them may be apart. Defaults are not written, unknown fields are
ignored: an older reader understands a newer history.

What an outcome means (Jepsen's rule): ``ok`` happened, ``fail`` certainly did not, ``info`` may have or may
still. An operation that never returned is written with ``t_return_ns`` 0 and ``info`` when its client ends.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

import msgspec

from kvops.errors import ConfigError, ParseError

SCHEMA: Final = 1
LINE_BYTES_MAX: Final = 1 << 20  # a longer line is damage, not a row
BUFFER_BYTES_MAX: Final = 8 << 20  # of a writer whose disk does not take rows; what comes after is counted
FLUSH_BYTES: Final = 64 << 10
_FALLOC_FL_KEEP_SIZE: Final = 1  # fallocate(2)
BAD_LINES_MAX: Final = 100  # named one by one; more are counted


class Arm(StrEnum):
    """Which stretch of load a row belongs to; the same block has the same seed in each arm."""

    CACHE_OFF = "cache-off"  # the same requests without a pool: what "no cache" costs
    BASELINE = "baseline"  # A
    CONTROL = "control"  # A': again without a fault, through the same idle injector
    FAULT = "fault"


class Outcome(StrEnum):
    """What is known of an operation's effect."""

    OK = "ok"
    FAIL = "fail"
    INFO = "info"


class Kind(StrEnum):
    """What an operation asked for."""

    GET = "get"
    PUT = "put"
    EXISTS = "exists"
    REMOVE = "remove"
    DRAIN = "drain"  # ``node`` is the store; ok means: from its return on nothing names it
    UNDRAIN = "undrain"


class Content(StrEnum):
    """What a read's bytes turned out to be; see ``kvops.chaos.values``."""

    UNCHECKED = ""
    WHOLE = "whole"
    STALE = "stale"  # a whole value, of this key, that a newer one had replaced
    TORN = "torn"  # parts of several values, or not all of one
    CROSS_KEY = "cross-key"  # a whole value of another key
    FLIPPED = "flipped"  # this value with bits changed


class Tier(StrEnum):
    """Where a block came from."""

    NONE = ""
    L1 = "l1"
    L2 = "l2"
    L3 = "l3"
    RECOMPUTE = "recompute"


class FaultState(StrEnum):
    """How far one injection has come."""

    INJECTING = "injecting"
    ACTIVE = "active"  # proven from outside the injector; without this row nothing was tested
    NOT_ACTIVE = "not-active"  # the proof failed, or could not tell
    UNDOING = "undoing"
    CLEAN = "clean"  # proven gone
    DIRTY = "dirty"  # undo failed or is unverified: ``commands`` are for a person


class EventKind(StrEnum):
    """Events that checkers look for; others may be written, and are shown in the report's timeline."""

    BREAKER_OPENED = "breaker.opened"  # subject: whose (client, store or group); ``domain``: what it guards
    BREAKER_HALF_OPEN = "breaker.half_open"
    BREAKER_CLOSED = "breaker.closed"
    BREAKER_PROBE = "breaker.probe"  # an attempt through an open breaker
    LEADER = "leader.observed"  # subject: the master; ``term``
    EVICTED = "object.evicted"  # ``key`` (empty: some), ``node``, ``generation``
    EXPIRED = "object.expired"
    REUSED = "slot.reused"  # memory of ``key`` at ``node`` given to another object
    COMMITTED = "put.committed"  # the server's word: ``key``, ``op_id``, ``generation``
    STORE_LOST = "store.lost"  # subject: the store; its objects are gone
    STORE_DRAINED = "store.drained"
    STORE_READY = "store.ready"
    STORE_SUSPECTED = "store.suspected"  # hidden by its master; it may come back with all it held …
    STORE_MOUNTED = "store.mounted"  # … by a new connection,
    STORE_RECOVERED = "store.recovered"  # … or heard of again by the one it has
    OBJECTS_LOST = "objects.lost"  # a failover or restart that forgot some
    DETECTED = (
        "fault.detected"  # the product's own word that something is wrong: a breaker, a report, a reason
    )


class End(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"  # by a guard, or by a person
    INTERRUPTED = "interrupted"
    UNSUPPORTED = "unsupported"  # the fault cannot be made on this host
    NOT_STEADY = "not-steady"  # the hypothesis did not hold before the fault


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """One line."""


class Domain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    A failure domain whose clients are watched: a whole group, or hosts of one.

    Requests belong to the first domain, in ``Run.domains``'s order, whose group and hosts fit them.
    """

    name: str
    group: str = ""  # empty: any
    hosts: tuple[str, ...] = ()  # logical hosts; empty: all of the group


class Scope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where trouble was declared to be: everything else must not notice."""

    groups: tuple[str, ...] = ()  # whose capacity is hit; their requests are what K is measured on
    domains: tuple[str, ...] = ()  # names in ``Run.domains`` that may be degraded without limit
    hosts: tuple[str, ...] = ()
    capacity_share: float = 0.0  # lost by construction while the fault is active, 0 to 1, of ``groups``


class Bounds(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the experiment expects; the defaults are those of one lost store of several."""

    containment_ratio: float = 1.2  # K
    spread: float = 0.0  # S: share of domains outside the scope that are degraded
    amplification: float = 1.1
    success_drop: float = 0.001  # share of requests: 0.1 percentage points
    over_deadline_share: float = 0.05  # how far past a deadline still counts as on time
    t_open_s: float = 2.0  # breaker, after the fault is active
    t_close_s: float = 15.0  # breaker, after the undo
    flaps_per_minute: float = 4.0
    probes_per_s: float = 2.0  # attempts through one open breaker
    half_open_probes: int = 1
    breaker_scope: str = (
        ""  # "store": a breaker of a whole group must not open; "group": it may; empty: either
    )
    t_detect_s: float = 3.0
    t_contain_s: float = 3.0
    t_recover_s: float = 15.0
    stay_s: float = 3.0  # how long a metric must stay in its band to count as recovered
    t_rewarm_s: float = 60.0
    read_timeout_ms: float = 200.0  # what a client may lose on the pool before it goes on without
    latency_margin: float = 0.25  # share by which a latency may grow and count as unchanged
    loop_gap_ms: float = 250.0  # of a serving loop


class Run(Row, frozen=True, kw_only=True, tag="run"):
    """The first row: what is going to be done, and how it will be judged."""

    schema: int = SCHEMA
    run_id: str = ""
    title: str = ""
    experiment: str = ""  # the file
    seed: int = 0
    started_at: str = ""  # UTC, RFC 3339
    started_ns: int = 0  # the same moment as the rows' clock has it; 0: that of the first row
    group: str = ""
    environment: str = ""
    fault: str = ""  # such as process.pause
    target: str = ""
    placement: str = ""  # local-first or random
    without: tuple[str, ...] = ()  # safeguards that were switched off
    domains: tuple[Domain, ...] = ()
    scope: Scope = Scope()
    bounds: Bounds = Bounds()
    checkers: tuple[str, ...] = ()  # ids; empty: all
    window_s: float = 10.0  # statistics count in windows of this length
    clock_error_ns: int = 0
    quick: bool = False  # too short for conclusions about latency, and says so
    simulated: bool = False  # backend: simulated
    load_share: float = 0.0  # offered load ÷ what the nodes serve without a cache; 0: not measured
    command: str = ""  # the line that repeats it


class Block(Row, frozen=True, kw_only=True, tag="block"):
    """One stretch of load: an arm of a block; written when it ends, or begins (``t_end_ns`` 0), or both."""

    arm: Arm
    block: int
    t_start_ns: int
    t_end_ns: int = 0
    seed: int = 0
    invalid: str = ""  # why it does not count, such as "CPU stalled 31 % of the time"
    cpu_stall_share: float = 0.0  # PSI ``some`` of the window, or steal


class Fault(Row, frozen=True, kw_only=True, tag="fault"):
    """A change of state of one injection."""

    state: FaultState
    t_ns: int
    fault: str
    target: str = ""
    group: str = ""
    host: str = ""
    block: int = 0
    capacity_share: float = 0.0  # of the scope's groups, that this target is
    lost_share: float = 1.0  # of the time that it was not there: 1 killed or paused, 0.2 paused 20 ms in 100
    proof: tuple[str, ...] = ()  # signals seen from outside, in words
    control: str = ""  # what was seen to be unaffected
    commands: tuple[str, ...] = ()  # run, or (DIRTY) to be run by a person
    why: str = ""


class Step(Row, frozen=True, kw_only=True, tag="step"):
    """Something the runner did or saw: the report's first column."""

    t_ns: int
    name: str  # baseline, inject, active, hold, undo, clean, recover, guard …
    ok: bool = True
    text: str = ""
    commands: tuple[str, ...] = ()


class Operation(Row, frozen=True, kw_only=True, tag="op", rename={"cls": "class"}):
    """One call of a client, as the client saw it."""

    op_id: str
    client: str
    kind: Kind
    outcome: Outcome
    t_invoke_ns: int
    t_return_ns: int = 0  # 0: never came back
    t_intended_ns: int = 0  # open loop: when it should have begun; 0: when it did
    arm: Arm = Arm.FAULT
    block: int = 0
    group: str = ""
    host: str = ""  # logical
    cls: str = ""  # class of load; "register" marks keys that nothing evicts, for S10
    key: str = ""
    request: str = ""  # the request that it serves
    position: int = -1  # of this block in the request's prefix
    attempt: int = 1
    hedge: bool = False
    node: str = ""  # store that served it, or the drained one
    leader: str = ""  # master that answered it last, as ``group/name``
    leader_incarnation: int = 0  # of its process
    term: int = 0  # that it led when the client's connection was made
    generation: int = 0  # of the object's place, which ``node`` holds
    incarnation: int = 0  # of the node's process; 0: the place is not known
    offset: int = 0  # of the place, in the node's segment
    extent_bytes: int = 0  # of the object that lies there, or is to
    asked_ns: int = 0  # the call that named the place was sent, and
    answered_ns: int = 0  # answered
    reason: str = ""  # of kvops.Reason: HIT, STORED, MISS, TIMEOUT …
    value: str = ""  # version put or read, "writer:seq"
    digest: str = ""  # of the value's bytes
    content: Content = Content.UNCHECKED  # of a read
    size_bytes: int = 0
    tier: Tier = Tier.NONE
    moved_bytes: int = 0
    tokens: int = 0
    recomputed_tokens: int = 0
    deadline_ms: float = 0.0  # declared budget; 0: none
    lease_from_ns: int = 0
    lease_until_ns: int = 0  # as the master keeps it; 0: no lease
    ended_ns: int = 0  # of a read: its last byte was there; 0: when it returned
    revalidated: bool = False  # the location was asked for again after the read
    rpcs: int = 1  # calls that it made
    error: str = ""


class Request(Row, frozen=True, kw_only=True, tag="request", rename={"cls": "class"}):
    """One inference request, as its user saw it; twins in other arms have the same ``block`` and ``request``."""

    request: str
    client: str
    outcome: Outcome
    t_intended_ns: int
    t_return_ns: int = 0  # 0: never came back
    t_start_ns: int = 0
    t_given_up_ns: int = 0  # never came back: how long its client looked on
    arm: Arm = Arm.FAULT
    block: int = 0
    group: str = ""
    host: str = ""
    cls: str = ""
    ttft_ms: float = 0.0  # from the intended arrival
    budget_ms: float = 0.0  # declared for ``ttft_ms``; 0: none
    input_tokens: int = 0
    l1_tokens: int = 0
    l2_tokens: int = 0
    l3_tokens: int = 0
    recomputed_tokens: int = 0
    losses: dict[str, int] = {}  # {reason: tokens}: why they were computed again
    blocks: int = 0  # of its prefix
    hit_blocks: int = 0  # reported as served, from the first on
    local_blocks: int = 0  # the first of those, that came from L1 or L2 and have no operation
    rpcs: int = 0
    retries: int = 0
    puts: int = 0
    wrong_bytes: int = 0
    over_deadline: int = 0  # pool calls that came back late
    degraded: tuple[str, ...] = ()  # the client's own word: BREAKER_OPEN, TIMEOUT …
    error: str = ""

    @property
    def cut_short(self) -> bool:
        """Its client was told to stop while it might still have been answered in its budget: nothing is known of it."""
        given_ns = self.t_given_up_ns - self.t_intended_ns
        return not self.t_return_ns and self.t_given_up_ns > 0 and given_ns <= self.budget_ms * 1e6


class Event(Row, frozen=True, kw_only=True, tag="event"):
    """Something that somebody noticed; ``kind`` is one of ``EventKind`` or any ``noun.past_verb``."""

    t_ns: int
    kind: str
    subject: str = ""
    group: str = ""
    host: str = ""
    domain: str = ""  # what it concerns: "store", "master" or "group" of a breaker
    block: int = 0
    term: int = 0
    key: str = ""
    node: str = ""
    generation: int = 0
    op_id: str = ""
    detail: str = ""


class Sample(Row, frozen=True, kw_only=True, tag="sample"):
    """State of one process, once a second; None where it could not be seen."""

    t_ns: int
    subject: str
    role: str = ""  # master, store, client …
    group: str = ""
    phase: str = "run"  # "before" the first block, "run", "quiet" after everything has settled
    allocated_bytes: int | None = None  # given to objects
    used_bytes: int | None = None  # as status reports it
    live_bytes: int | None = None  # the sum over live objects
    objects: int | None = None
    reservations: int | None = None  # puts begun and not ended
    evicted_total: int | None = None
    rss_bytes: int | None = None
    fds: int | None = None
    threads: int | None = None
    qps: int | None = None
    mrs: int | None = None
    loop_gap_ms: float | None = None  # longest since the last sample
    stalled_ms: float = (
        0.0  # since the last sample: how long all of the process stood still, against its will
    )
    cpu_stall_share: float | None = None


class Gap(Row, frozen=True, kw_only=True, tag="gap"):
    """Rows that a writer could not write: nobody may conclude anything from their absence."""

    writer: str
    rows: int = 0  # 0: nobody knows how many
    why: str = ""


class Finish(Row, frozen=True, kw_only=True, tag="end"):
    """The last row of the runner."""

    t_ns: int
    end: End = End.COMPLETED
    why: str = ""
    undone: bool = True  # every undo verified
    left: tuple[str, ...] = ()  # commands for a person, when not undone


AnyRow: TypeAlias = Run | Block | Fault | Step | Operation | Request | Event | Sample | Gap | Finish
_R = TypeVar("_R", bound=Row)
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(AnyRow)

_READS: Final = (Kind.GET, Kind.EXISTS)
_HAPPENED: Final = ("HIT", "STORED", "EXISTS", "MISS")
_REFUSED: Final = ("NO_SPACE", "REFUSED", "BREAKER_OPEN")


def outcome_of(kind: Kind, reason: str) -> Outcome:
    """
    What a ``kvops.Reason`` says of an operation's effect.

    A read that got no answer certainly returned nothing; a write that got none may still take effect.
    """
    if reason in _HAPPENED:
        return Outcome.OK
    return Outcome.FAIL if kind in _READS or reason in _REFUSED else Outcome.INFO


def encode(row: AnyRow) -> bytes:
    """The row as a line, newline included."""
    return _ENCODER.encode(row) + b"\n"


class HistoryWriter:
    """
    Appends rows to a file, from any thread of one process; other processes write files of their own.

    Rows go to the file in whole lines whenever ``FLUSH_BYTES`` are together, at ``flush`` and at ``close``, so a
    killed writer loses its last rows at most and tears one line at most. A disk that takes none never stops the
    caller: up to ``BUFFER_BYTES_MAX`` wait in memory, what comes after is dropped, counted, and written as a
    ``gap`` row once there is room.

    Args:
        path: Appended to; made when it is not there, readable by its owner alone.
        name: Of the writer in ``gap`` rows.
        sync: Also sync each flush to the disk: for the runner's own few rows.
        reserve_bytes: Of the disk, kept for this file until it is closed: so much can be written when others have
            filled it. Without effect where the file system cannot.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, name: str = "", sync: bool = False, reserve_bytes: int = 0) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot write the history {path}: {error.strerror}", fix="name a writable folder"
            ) from error
        self._name = name or path.stem
        self._sync = sync
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._dropped = 0
        self._why = ""
        self._reserved = reserve_bytes > 0 and _reserve(self._fd, reserve_bytes)
        # A torn line of a writer before us must not swallow our first one.
        if os.fstat(self._fd).st_size:
            self._buffer += b"\n"

    def write(self, row: AnyRow) -> None:
        """Take one row; never waits longer than one write to the disk, never raises for the disk's sake."""
        line = encode(row)
        with self._lock:
            assert self._fd >= 0, "the history is closed"
            if len(self._buffer) + len(line) > BUFFER_BYTES_MAX:
                self._dropped += 1
                return
            self._buffer += line
            if self._sync or len(self._buffer) >= FLUSH_BYTES:
                self._flush()

    def flush(self) -> bool:
        """Hand everything to the kernel; False when the disk does not take it."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        try:
            while self._buffer:
                done = os.write(self._fd, self._buffer)
                del self._buffer[:done]
                if not self._buffer and self._dropped:
                    self._buffer += encode(Gap(writer=self._name, rows=self._dropped, why=self._why))
                    self._dropped = 0
            if self._sync:
                os.fsync(self._fd)
        except OSError as error:
            self._why = error.strerror or str(error)
            return False
        return True

    @property
    def trouble(self) -> str:
        """Why rows are not in the file that should be: the disk takes none; empty while all is well."""
        with self._lock:
            return self._why if self._buffer or self._dropped else ""

    def close(self) -> None:
        """Flush, then let go of the file; again is harmless."""
        with self._lock:
            if self._fd >= 0:
                self._flush()
                if self._reserved:  # what lies behind the end is given back
                    os.ftruncate(self._fd, os.fstat(self._fd).st_size)
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reserve(fd: int, size: int) -> bool:
    """Have room behind the end of a file, which stays as long as it is; False where that cannot be."""
    end = os.fstat(fd).st_size
    libc = ctypes.CDLL(None)
    return bool(libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(end), ctypes.c_int64(size)) == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that is no row."""

    path: str
    line: int  # from 1
    why: str
    torn: bool  # the last line of its file, without a newline: its writer was killed

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {'torn: ' if self.torn else ''}{self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultWindow:
    """One injection from beginning to end, put together from its ``fault`` rows."""

    fault: str
    target: str
    group: str
    host: str
    block: int
    capacity_share: float
    lost_share: float
    t_inject_ns: int
    t_active_ns: int | None  # None: never proven
    t_undo_ns: int | None
    t_clean_ns: int | None  # None: not proven clean
    dirty: bool
    proof: tuple[str, ...]
    control: str
    commands: tuple[str, ...]
    undo_commands: tuple[str, ...]
    why: str

    @property
    def t_end_ns(self) -> int | None:
        """When the fault was gone, as far as is known."""
        return self.t_clean_ns or self.t_undo_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything that a run left behind; rows of one type in the order of their time."""

    run: Run
    blocks: tuple[Block, ...] = ()
    faults: tuple[Fault, ...] = ()
    steps: tuple[Step, ...] = ()
    operations: tuple[Operation, ...] = ()
    requests: tuple[Request, ...] = ()
    events: tuple[Event, ...] = ()
    samples: tuple[Sample, ...] = ()
    gaps: tuple[Gap, ...] = ()
    end: Finish | None = None  # None: the runner died
    bad_lines: tuple[BadLine, ...] = ()
    bad_line_count: int = 0

    @property
    def complete(self) -> bool:
        """Nothing is known to be missing: absence of a row means that the thing did not happen."""
        return not self.gaps and not self.bad_line_count

    def fault_windows(self) -> list[FaultWindow]:
        """The injections, in order; several on one target in one block are told apart by ``injecting``."""
        found: list[list[Fault]] = []
        last: dict[tuple[str, str, int], list[Fault]] = {}
        for row in self.faults:
            key = (row.fault, row.target, row.block)
            if key not in last or row.state is FaultState.INJECTING:
                last[key] = []
                found.append(last[key])
            last[key].append(row)
        return [_window(rows) for rows in found]

    def domain_of(self, group: str, host: str) -> str:
        """The failure domain of a client; its group, where none is declared that fits."""
        for domain in self.run.domains:
            if domain.group in ("", group) and (not domain.hosts or host in domain.hosts):
                return domain.name
        return group or "all"


def _window(rows: Sequence[Fault]) -> FaultWindow:
    by_state = {row.state: row for row in rows}
    active = by_state.get(FaultState.ACTIVE)
    undo, clean = by_state.get(FaultState.UNDOING), by_state.get(FaultState.CLEAN)
    said = active or rows[0]
    return FaultWindow(
        fault=said.fault,
        target=said.target,
        group=said.group,
        host=said.host,
        block=said.block,
        capacity_share=max(row.capacity_share for row in rows),
        lost_share=said.lost_share,
        t_inject_ns=rows[0].t_ns,
        t_active_ns=None if active is None else active.t_ns,
        t_undo_ns=None if undo is None else undo.t_ns,
        t_clean_ns=None if clean is None else clean.t_ns,
        dirty=rows[-1].state is FaultState.DIRTY,
        proof=said.proof,
        control=said.control,
        commands=rows[0].commands,
        undo_commands=tuple(
            line for row in (undo, clean, by_state.get(FaultState.DIRTY)) if row for line in row.commands
        ),
        why="; ".join(row.why for row in rows if row.why),
    )


@dataclass(slots=True)
class _Gathered:
    rows: dict[type[Row], list[AnyRow]] = field(default_factory=dict)
    bad: list[BadLine] = field(default_factory=list)
    bad_count: int = 0

    def take(self, path: str, lines: Iterable[bytes]) -> None:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = _DECODER.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.bad_count += 1
                if len(self.bad) < BAD_LINES_MAX:
                    torn = not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX
                    self.bad.append(BadLine(path=path, line=number, why=str(error), torn=torn))
            else:
                self.rows.setdefault(type(row), []).append(row)


def _only(gathered: _Gathered, kind: type[_R]) -> list[_R]:
    return [row for row in gathered.rows.get(kind, []) if isinstance(row, kind)]


def history_files(path: Path) -> list[Path]:
    """
    The files of a run's folder, or the one file.

    Raises:
        ConfigError: There is none.
    """
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if files:
            return files
        raise ConfigError(f"{path} holds no history (*.jsonl)", fix="name the folder of a chaos run")
    if path.is_file():
        return [path]
    raise ConfigError(f"there is no history {path}", fix="name a file, or the folder of a chaos run")


def read_run(path: Path) -> RunRecord:
    """
    Read a run's folder, or one history file; a damaged line is named and skipped.

    Raises:
        ConfigError: There is no history, or it cannot be read.
        ParseError: It has no ``run`` row, or one of a schema that we do not know.
    """
    gathered = _Gathered()
    for file in history_files(path):
        try:
            with file.open("rb") as stream:
                gathered.take(file.name, _lines(stream.fileno()))
        except OSError as error:
            raise ConfigError(
                f"cannot read {file}: {error.strerror}", fix="check the path and its permissions"
            ) from error
    return _record(gathered, source=str(path))


def _lines(fd: int) -> Iterator[bytes]:
    """Lines of a file, longer ones cut at ``LINE_BYTES_MAX``: no memory for a file without newlines."""
    with os.fdopen(os.dup(fd), "rb") as stream:
        while line := stream.readline(LINE_BYTES_MAX):
            yield line


def _record(gathered: _Gathered, *, source: str) -> RunRecord:
    runs = _only(gathered, Run)
    if not runs:
        detail = f" ({gathered.bad[0]})" if gathered.bad else ""
        raise ParseError(
            f"{source} has no run row: it is not the history of a chaos run{detail}",
            fix="name the folder or file that kvops chaos run made",
        )
    if runs[0].schema > SCHEMA:
        raise ParseError(
            f"{source} is of schema {runs[0].schema}, this kvops reads up to {SCHEMA}", fix="update kvops"
        )
    ends = _only(gathered, Finish)
    blocks: dict[tuple[Arm, int], Block] = {}
    for row in _only(gathered, Block):
        before = blocks.get((row.arm, row.block))
        if before is None or row.t_end_ns >= before.t_end_ns:
            blocks[row.arm, row.block] = row
    return RunRecord(
        run=runs[0],
        blocks=tuple(sorted(blocks.values(), key=lambda one: one.t_start_ns)),
        faults=tuple(sorted(_only(gathered, Fault), key=lambda one: one.t_ns)),
        steps=tuple(sorted(_only(gathered, Step), key=lambda one: one.t_ns)),
        operations=tuple(sorted(_only(gathered, Operation), key=lambda one: one.t_invoke_ns)),
        requests=tuple(sorted(_only(gathered, Request), key=lambda one: one.t_intended_ns)),
        events=tuple(sorted(_only(gathered, Event), key=lambda one: one.t_ns)),
        samples=tuple(sorted(_only(gathered, Sample), key=lambda one: one.t_ns)),
        gaps=tuple(_only(gathered, Gap)),
        end=ends[-1] if ends else None,
        bad_lines=tuple(gathered.bad),
        bad_line_count=gathered.bad_count,
    )
