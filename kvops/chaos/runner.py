"""
Runs one experiment from the first look to the verdict.

::

    checked → pool started → steady → ┌ cache-off, baseline, control, fault: interleaved, the same requests in each ┐
                                      └ fault: inject → active → hold (recheck, guards) → undo → clean → recover ────┘
    → judged

Whatever happens, what was injected is undone, what was started is stopped, the history has its last row, and the
checkers run. A fault that was not proved is NOT_INJECTED, whatever the clients saw.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvops.chaos import probes, telemetry
from kvops.chaos.client import now_ns
from kvops.chaos.experiment import Activity, Experiment, differences, is_probe, seconds
from kvops.chaos.guards import GuardThread, Watcher, with_sight
from kvops.chaos.history import (
    Arm,
    Block,
    Bounds,
    Domain,
    End,
    Fault,
    FaultState,
    Finish,
    Gap,
    HistoryWriter,
    Request,
    Run,
    Scope,
    Step,
    read_run,
)
from kvops.chaos.injecting import FORBIDDEN_ENVIRONMENTS, InForce, Injecting, Terms
from kvops.chaos.ledger import Book, one_at_a_time
from kvops.chaos.lint import Remark, lint, unsupported
from kvops.chaos.model import State
from kvops.chaos.observe import Sampler, cpu_stall_s, write_group_events
from kvops.chaos.pairing import wanting
from kvops.chaos.pool import (
    Part,
    Pool,
    check_supported,
    group_names,
    logical_hosts,
    planned_parts,
    started,
)
from kvops.chaos.profiles import load_share, schedule
from kvops.chaos.resolve import Chosen, choose
from kvops.chaos.safeguards import Safeguards
from kvops.chaos.workload import Client, Stretch, stretch
from kvops.errors import Aborted, Dirty, KvopsError, NotInjected, Refused, Unsupported, UsageError
from kvops.fleet.local import LocalGroup
from kvops.fleet.programs import Command, serve_command
from kvops.timestamps import utc_now

if TYPE_CHECKING:
    from kvops.chaos.remote_pool import RemoteGroup, Seen

INJECT_AFTER_S: Final = 0.5  # into the window: both arms have begun evenly by then
TICK_S: Final = 0.05
"""A stretch in which some task waited for a CPU for more of the time than this says nothing about latency."""
RECHECK_JOIN_S: Final = 8.0
RERUNS_MAX: Final = 2  # of blocks that do not count
UNDO_SLACK_S: Final = 30.0  # the guardian's own deadline lies so far behind the planned end
QUICK_WINDOW_TAIL_S: Final = 8.0  # for the proof, and to look on after the undo
QUICK_FAULT_S_MAX: Final = 6.0  # at 24 requests a second beyond the 100 that K needs, with room for chance
QUICK_WARMUP_S: Final = 3.0
ARM_ORDERS: Final = (
    (Arm.CACHE_OFF, Arm.BASELINE, Arm.FAULT, Arm.CONTROL),
    (Arm.CONTROL, Arm.FAULT, Arm.BASELINE, Arm.CACHE_OFF),
)
"""Interleaved: a drift of the machine hits every arm alike. The first block has its baseline before its fault."""
RESERVE_BYTES: Final = 256 << 10  # of the runs' disk, for the runner's own rows: the verdict rests on them
LOST: Final = "telemetry lost"
SHAM: Final = "none"  # the fault and the target of a run that injects nothing
_FAULT_STATES: Final = {
    State.INJECTING: FaultState.INJECTING,
    State.ACTIVE: FaultState.ACTIVE,
    State.UNDOING: FaultState.UNDOING,
    State.CLEAN: FaultState.CLEAN,
    State.DIRTY: FaultState.DIRTY,
}

Say = Callable[[str, str], None]
"""Takes a step's name and a line about it, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run."""

    state_dir: Path  # of ledgers and of the lock
    runs_dir: Path
    source: str = ""  # the experiment's file, as it was named
    seed: int | None = None
    quick: bool = False
    without: tuple[str, ...] = ()  # safeguards to switch off
    placement: str = ""  # instead of the file's
    max_duration_s: float | None = None
    command: Command = serve_command
    pool_factory: str = ""  # of the clients
    folder: Path | None = None  # of the pool under test
    remote: tuple[RemoteGroup, Seen] | None = None  # a group that runs on hosts, instead of a pool of its own
    sham: bool = False
    """Do everything but inject: what is then found wrong is noise. Such a run is never a PASS: nothing was proved."""
    round_of: Callable[[int], Experiment] | None = None
    """Of a soak: the experiment whose faults each block has, instead of the one that is run."""


@dataclass(slots=True, kw_only=True)
class Ran:
    """What became of a run, before it is judged."""

    run_id: str
    folder: Path
    end: End
    why: str
    undone: bool = True
    left: tuple[str, ...] = ()
    injected: bool = False
    seconds: float = 0.0


class _Interrupted(BaseException):
    """Ctrl-C or SIGTERM: not an Exception, so that nothing between takes it for its own trouble."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class _Abort(Exception):
    """A guard tripped, or the time is over."""


@dataclass(slots=True)
class _Window:
    """How long things take in one run."""

    blocks: int
    window_s: float
    fault_s: float
    warmup_s: float
    arms: tuple[Arm, ...]


def windows(experiment: Experiment, *, quick: bool) -> _Window:
    """Blocks, windows and arms of a run; ``quick`` is one pair with short windows."""
    workload, limits = experiment.ours.workload, experiment.ours.deadlines
    fault_s, warmup_s = seconds(limits.fault), seconds(workload.warmup)
    if not quick:
        return _Window(workload.blocks, workload.window_s, fault_s, warmup_s, tuple(workload.arms))
    fault_s = min(fault_s, QUICK_FAULT_S_MAX)
    arms = tuple(arm for arm in workload.arms if arm in (Arm.BASELINE, Arm.FAULT))
    window_s = min(workload.window_s, INJECT_AFTER_S + fault_s + QUICK_WINDOW_TAIL_S)
    return _Window(1, window_s, fault_s, min(warmup_s, QUICK_WARMUP_S), arms)


def duration_s(experiment: Experiment, *, quick: bool) -> float:
    """About how long a run takes, in seconds: said before it starts."""
    plan = windows(experiment, quick=quick)
    stretch_s = plan.warmup_s + plan.window_s + 2.0  # clients start and end
    return 5.0 + plan.blocks * len(plan.arms) * stretch_s


def errors(
    experiment: Experiment, *, seed: int | None = None, parts: Sequence[Part] | None = None
) -> list[Remark]:
    """What refuses an experiment, on a pool of its own or on a group with these members."""
    from kvops.chaos.faults import catalogue

    return [one for one in lint(experiment, catalogue(), seed=seed, parts=parts) if one.severity == "error"]


def refuse(remarks: Sequence[Remark], *, source: str) -> None:
    """
    Raise for the first of these; nothing was touched yet.

    Raises:
        UsageError: There is one.
        Refused: It is no mistake, but more than may be.
    """
    if not remarks:
        return
    first = remarks[0]
    more = f" (and {len(remarks) - 1} more: kvops chaos validate)" if len(remarks) > 1 else ""
    kind = Refused if first.guard else UsageError
    raise kind(f"{source}: {first.text}{more}", fix=first.fix or "correct the file")


def run(experiment: Experiment, options: Options, *, say: Say = lambda step, text: None) -> Ran:
    """
    Run an experiment; the history lies in ``Ran.folder`` however it ended.

    Call it from the main thread: it takes Ctrl-C and SIGTERM, and clients die with the thread that started them.

    Raises:
        UsageError: The file is wrong; nothing was touched.
        Refused: A guard is in the way; nothing was touched.
    """
    seed = experiment.ours.workload.seed if options.seed is None else options.seed
    source = options.source or experiment.title
    if not experiment.faults:
        named = "; ".join(differences(experiment))
        raise UsageError(
            f"{source}: its method injects nothing that kvops could prove" + (f" ({named})" if named else ""),
            fix="add an action of kvops.chaos.faults: see kvops chaos catalog, and kvops chaos validate",
        )
    missing = unsupported(experiment)
    parts = options.remote[1].parts if options.remote is not None else None
    wrong = [one for one in errors(experiment, seed=seed, parts=parts) if not _no_baseline(one)]
    refuse(wrong, source=source)
    run_id = f"{datetime.now(UTC).strftime('%m%dT%H%M%S')}-{seed}-{secrets.token_hex(2)}"
    with one_at_a_time(options.state_dir, run_id), ExitStack() as stack:
        _refuse_environment(experiment, options.state_dir, options.remote)
        Book(options.state_dir).refuse_if_not_ready()
        pool: Pool | None = None
        if options.remote is not None:
            from kvops.chaos.remote_pool import RemotePool

            group, seen = options.remote
            kept = stack.enter_context(group.reserved(run_id, seen.parts))
            pool = RemotePool(experiment.ours.pool, group, seen, kept)
        folder = options.runs_dir / run_id
        folder.mkdir(parents=True, mode=0o700)
        with HistoryWriter(
            folder / "runner.jsonl", name="runner", sync=True, reserve_bytes=RESERVE_BYTES
        ) as writer:
            runner = _Runner(experiment, options, run_id, folder, writer, seed=seed, say=say, pool=pool)
            return runner.run(missing)


def _no_baseline(remark: Remark) -> bool:
    return remark.rule == "baseline" and "no baseline" in remark.text


def _refuse_environment(
    experiment: Experiment, state_dir: Path, remote: tuple[RemoteGroup, Seen] | None
) -> None:
    wanted, running = experiment.ours.environment, experiment.ours.pool.running
    if remote is not None:
        group, seen = remote
        group.refuse(seen.parts)
        here, labels = group.environment, group.labels(seen.parts)
    else:
        # A pool of the experiment's own is always local; one of a lab says itself what it is.
        here = LocalGroup(state_dir, running).require().environment if running else "local"
        labels = {here}
        if here.lower() in FORBIDDEN_ENVIRONMENTS:
            raise Refused(f"group {running} is labelled {here}: no faults there", fix="use a staging group")
    if wanted.must_match not in ("", here):
        raise Refused(
            f"the experiment is for {wanted.must_match!r} (environment.must_match), its pool here is {here!r}",
            fix="correct environment.must_match if it may run on this machine"
            if remote is None
            else f"write must_match: {here} if it may run there; kvops -g local chaos run takes a pool of its own",
        )
    forbidden = sorted(labels & set(wanted.forbid_labels))
    if forbidden:
        raise Refused(f"environment.forbid_labels names {forbidden[0]!r}", fix="run it elsewhere")


class _Runner:
    """One run under way."""

    def __init__(
        self,
        experiment: Experiment,
        options: Options,
        run_id: str,
        folder: Path,
        writer: HistoryWriter,
        *,
        seed: int,
        say: Say,
        pool: Pool | None = None,
    ) -> None:
        """
        Args:
            experiment: What to run.
            options: How.
            run_id: Names it.
            folder: Of its history.
            writer: Of the runner's own part of it.
            seed: Of every choice.
            say: Told of each step.
            pool: A group that runs already; one is started, and stopped again, by default.
        """
        self._given = pool
        self._experiment = experiment
        self._options = options
        self._ours = experiment.ours
        self._folder = folder
        self._writer = writer
        self._seed = seed
        self._say = say
        self._plan = windows(experiment, quick=options.quick)
        self._safeguards = Safeguards(options.without)
        self._pool_spec = self._safeguards.pool(
            msgspec.structs.replace(self._ours.pool, placement=options.placement)
            if options.placement
            else self._ours.pool
        )
        self._workload = self._safeguards.workload(
            msgspec.structs.replace(self._ours.workload, seed=seed, warmup=self._plan.warmup_s)
        )
        self._chosen: Chosen | None = None
        self._sampler: Sampler | None = None
        self._injection: Injecting | None = None
        self._block = 0
        self._began_s = time.monotonic()
        self._ran = Ran(run_id=run_id, folder=folder, end=End.COMPLETED, why="")

    # The whole

    def run(self, missing: Sequence[str]) -> Ran:
        ran = self._ran
        with self._signals():
            try:
                self._write_run(missing)
                if missing:
                    raise Unsupported(
                        f"this version has no {', '.join(missing)}", fix="see kvops chaos catalog"
                    )
                if Arm.BASELINE not in self._ours.workload.arms:
                    self._end(End.NOT_STEADY, "the experiment has no baseline arm: nothing to compare with")
                else:
                    if self._given is None:
                        check_supported(self._pool_spec)
                        self._check_machine()
                    self._run()
            except Unsupported as error:
                self._end(End.UNSUPPORTED, str(error))
            except _Abort as error:
                self._end(End.ABORTED, str(error))
            except Dirty as error:
                self._dirty(error)
            except (NotInjected, Aborted) as error:
                self._end(End.ABORTED if isinstance(error, Aborted) else ran.end, str(error))
            except _Interrupted as error:
                self._end(End.INTERRUPTED, f"{signal.Signals(error.signum).name}; everything was undone")
            except KvopsError as error:
                self._end(End.ABORTED, str(error))
            finally:
                ran.seconds = time.monotonic() - self._began_s
                self._writer.write(
                    Finish(t_ns=now_ns(), end=ran.end, why=ran.why, undone=ran.undone, left=ran.left)
                )
        return ran

    def _end(self, end: End, why: str) -> None:
        self._ran.end, self._ran.why = end, why
        self._step(end.value, why, ok=False)

    def _dirty(self, error: Dirty) -> None:
        self._ran.undone, self._ran.left = False, tuple(error.commands)
        self._end(End.ABORTED, str(error))

    def _run(self) -> None:
        with ExitStack() as stack:
            self._step("start", self._pool_text())
            pool: Pool = self._given or stack.enter_context(
                started(
                    self._pool_spec,
                    state_dir=self._options.state_dir,
                    folder=self._options.folder,
                    command=self._options.command,
                )
            )
            self._sampler = sampler = Sampler(pool, self._writer)
            sampler.take("before")
            stack.enter_context(sampler.running())
            for block in range(self._plan.blocks):
                if not self._run_block(pool, block):
                    return
            self._run_again(pool)
            sampler.take("quiet")

    def _run_block(self, pool: Pool, block: int) -> bool:
        """Every arm once; whether to go on."""
        self._block = block
        for arm in ARM_ORDERS[block % 2]:
            if arm not in self._plan.arms:
                continue
            self._check_total()
            if arm is Arm.FAULT:
                if not self._ran.injected and not self._options.sham:
                    # Not earlier: some faults need a pool that holds something.
                    self._check_available(pool)
                self._fault(pool, block)
            else:
                self._quiet(pool, arm, block)
            if not self._ran.injected and arm is Arm.FAULT:
                return False
            if block == 0 and arm is Arm.BASELINE and not self._steady("steady", Arm.BASELINE):
                return False
        return True

    def _run_again(self, pool: Pool) -> None:
        """Further blocks for those in which the machine stalled; a few, and then the data are too few."""
        if self._options.round_of is not None:
            return  # a soak's rounds are all different
        for block in range(self._plan.blocks, self._plan.blocks + RERUNS_MAX):
            self._writer.flush()
            why = wanting(read_run(self._folder), self._plan.blocks)
            if not why:
                return
            self._step("again", f"{why}; block {block} is run instead", ok=False)
            if not self._run_block(pool, block):
                return

    def _pool_text(self) -> str:
        spec = self._pool_spec
        if self._given is not None:
            text = f"{spec.running} on {len(spec.hosts)} logical hosts: {spec.masters} master, {spec.stores} stores"
            return f"{text}, {spec.placement}; {spec.engines} engines here"
        groups = f"{spec.groups} groups of " if spec.groups > 1 else ""
        where = ", each on a node of its own" if spec.network == "lab" else ""
        return f"{groups}{spec.masters} master, {spec.stores} stores, {spec.engines} engines, {spec.placement}{where}"

    def _check_total(self) -> None:
        limit_s = seconds(self._ours.deadlines.total) * max(1, self._plan.blocks * len(self._plan.arms))
        if self._options.max_duration_s is not None:
            limit_s = min(limit_s, self._options.max_duration_s)
        if time.monotonic() - self._began_s > limit_s:
            raise _Abort(f"the run took longer than {limit_s:g} s")

    # The history's frame

    def _write_run(self, missing: Sequence[str]) -> None:
        spec, scope, expect = self._pool_spec, self._ours.scope, self._ours.expect
        chosen = None
        if not self._options.sham:
            remote = self._options.remote
            parts = remote[1].parts if remote is not None else planned_parts(spec)
            chosen = choose(self._experiment, parts, seed=self._seed)
        self._chosen = chosen
        calls = self._experiment.faults
        domains = [
            Domain(name=f"{group}/{host}", group=group, hosts=(host,))
            for group in group_names(spec)
            for host in logical_hosts(spec)
        ]
        self._writer.write(
            Run(
                run_id=self._ran.run_id,
                title=self._experiment.title,
                experiment=self._options.source,
                seed=self._seed,
                started_ns=now_ns(),
                load_share=round(self._load_share(), 3),
                started_at=utc_now(),
                group=",".join(group_names(spec)),
                environment=self._options.remote[0].environment if self._options.remote else "local",
                fault=SHAM if self._options.sham else ",".join(dict.fromkeys(call.name for call in calls)),
                target=",".join(dict.fromkeys(hit.part.name for hit in chosen.hits)) if chosen else "",
                placement=spec.placement,
                without=self._options.without,
                domains=tuple(domains),
                scope=Scope(
                    groups=chosen.groups if chosen else (),
                    domains=chosen.domains if chosen else (),
                    hosts=tuple(one.partition("/")[2] for one in chosen.domains) if chosen else (),
                    capacity_share=chosen.capacity_share if chosen else 0.0,
                ),
                bounds=Bounds(
                    containment_ratio=expect.containment_ratio,
                    spread=expect.spread,
                    amplification=expect.amplification,
                    t_contain_s=seconds(expect.t_contain),
                    t_recover_s=seconds(expect.t_recover),
                    read_timeout_ms=seconds(self._workload.budget) * 1000,
                    breaker_scope=_breaker_scope(self._experiment),
                    t_open_s=seconds(expect.breaker.opens_within if expect.breaker else "2s"),
                ),
                checkers=tuple(self._ours.checkers),
                window_s=max(1.0, self._plan.fault_s / 4),
                quick=self._options.quick,
                command=self._again(),
            )
        )
        for text in differences(self._experiment):
            self._step("differs", text)
        what = ", ".join(f"{call.name}" for call in calls)
        if self._options.sham:
            self._say("plan", f"seed {self._seed}  no fault, {self._plan.blocks} blocks")
            return
        on = ", ".join(hit.part.name for hit in chosen.hits) if chosen else scope.select.role
        share = f" ({chosen.capacity_share:.1%} of its group)" if chosen and chosen.capacity_share else ""
        self._say("plan", f"seed {self._seed}  {what} on {on} for {self._plan.fault_s:g} s{share}")

    def _load_share(self) -> float:
        length_s = self._plan.warmup_s + self._plan.window_s
        planned = schedule(
            self._workload.profile,
            rps=self._workload.rps,
            duration_s=length_s,
            engines=self._pool_spec.engines,
            l2_pages=0,
            seed=self._seed * 1_000,
        )
        return load_share(planned, engines=self._pool_spec.engines, duration_s=length_s)

    def _again(self) -> str:
        running = self._ours.pool.running
        words = [f"kvops -g {running}" if running else "kvops", "chaos run"]
        words += [self._options.source or "EXPERIMENT", f"--seed {self._seed}"]
        words += ["--lab"] * (bool(running) and self._given is None)
        words += ["--quick"] * self._options.quick
        words += [f"--without {','.join(self._options.without)}"] * bool(self._options.without)
        return " ".join(words)

    def _step(self, name: str, text: str, *, ok: bool = True, commands: Sequence[str] = ()) -> None:
        self._writer.write(Step(t_ns=now_ns(), name=name, ok=ok, text=text, commands=tuple(commands)))
        self._say(name, f"{'✓' if ok else '✗'} {text}")

    # Stretches

    @contextmanager
    def _stretch(self, pool: Pool, arm: Arm, block: int) -> Iterator[Stretch]:
        options = {
            group: {**pool.client_options(group), **self._safeguards.client_options()}
            for group in group_names(self._pool_spec)
        }
        with ExitStack() as stack:
            ended: list[Client] = []
            stack.callback(self._write_gaps, ended)
            one = stack.enter_context(
                stretch(
                    self._pool_spec,
                    self._workload,
                    arm=arm,
                    block=block,
                    window_s=self._plan.window_s,
                    folder=self._folder,
                    options=options,
                    pool_factory=self._options.pool_factory or self._safeguards.pool_factory,
                )
            )
            ended += one.clients
            stalled, began = cpu_stall_s(), time.monotonic()
            one.go()
            row = Block(arm=arm, block=block, t_start_ns=one.start_ns, seed=one.seed)
            self._writer.write(row)
            try:
                yield one
            finally:
                share = 0.0
                if stalled is not None:
                    share = min(
                        1.0, ((cpu_stall_s() or stalled) - stalled) / max(0.1, time.monotonic() - began)
                    )
                self._writer.write(
                    msgspec.structs.replace(row, t_end_ns=now_ns(), cpu_stall_share=round(share, 3))
                )
                write_group_events(pool, self._writer, since_ns=one.start_ns, block=block)

    def _write_gaps(self, clients: Sequence[Client]) -> None:
        """What a client did last, it may not have written down: one that had to be killed, or was."""
        for client in clients:
            if client.process.returncode:
                why = f"client {client.spec.name} ended with {client.process.returncode}"
                self._writer.write(Gap(writer=client.spec.name, why=why))

    def _quiet(self, pool: Pool, arm: Arm, block: int) -> None:
        with self._stretch(pool, arm, block) as one:
            self._finish(one)
        rows = self._rows(arm, block)
        rate, hits = probes.success_rate(rows), probes.hit_ratio(rows)
        text = f"{len(rows)} requests, success {_percent(rate)}, hit {_percent(hits)}"
        self._step(arm.value, text)

    def _finish(self, one: Stretch) -> None:
        late = one.finish()
        if late:
            self._step(
                "load", f"{', '.join(late)} still had requests in hand and were told to stop", ok=False
            )
        lost = self._telemetry(one).unrecorded()
        if lost:
            raise _Abort(f"{LOST}: not on record of client {'; '.join(lost)}")

    def _rows(self, arm: Arm, block: int) -> list[Request]:
        """Requests of one stretch's window, from its files."""
        rows: list[Request] = []
        for path in sorted(self._folder.glob(f"{arm.value}-{block}-*.jsonl")):
            for line in path.read_bytes().splitlines():
                if line.startswith(b'{"type":"request"'):
                    try:
                        rows.append(msgspec.json.decode(line, type=Request))
                    except msgspec.DecodeError:
                        continue
        return [row for row in rows if row.cls != "warmup"]

    def _steady(self, name: str, arm: Arm) -> bool:
        """Every probe of the hypothesis is asked, whatever the first one says."""
        rows = self._rows(arm, self._block)
        failed: list[str] = []
        for probe in self._probes():
            function = probes.PROBES[probe.provider.func if probe.provider else ""]
            value = function(rows)
            if value is None or not within(value, probe.tolerance):
                failed.append(f"{probe.name or function.__name__} is {value}, expected {probe.tolerance}")
        if not failed:
            return True
        self._end(End.NOT_STEADY, f"before the fault: {'; '.join(failed)}")
        return False

    def _probes(self) -> list[Activity]:
        hypothesis = self._experiment.steady_state_hypothesis
        return [one for one in hypothesis.probes if is_probe(one)] if hypothesis is not None else []

    # The fault

    def _build(self, pool: Pool, block: int) -> Injecting:
        """The block's faults on the members as they are now; nothing is touched."""
        limits = self._ours.deadlines
        self._chosen = chosen = choose(
            self._of_block(block), pool.parts(roles=True), seed=self._seed + 7_919 * self._rounds()
        )
        return pool.injection(
            chosen.hits,
            Terms(
                name=f"{self._ran.run_id}-b{block}",
                lease_s=seconds(limits.lease),
                deadline_s=self._fault_s(block) + seconds(limits.undo) + UNDO_SLACK_S,
                verify_timeout_s=seconds(self._ours.verify.timeout),
                on_state=lambda state, detail: self._on_state(block, state, detail),
                compose=self._ours.compose,
            ),
        )

    def _of_block(self, block: int) -> Experiment:
        return self._experiment if self._options.round_of is None else self._options.round_of(block)

    def _rounds(self) -> int:
        """Another choice of targets in each round of a soak; the same in each block of an experiment."""
        return 0 if self._options.round_of is None else self._block

    def _fault_s(self, block: int) -> float:
        if self._options.round_of is None:
            return self._plan.fault_s
        return seconds(self._of_block(block).ours.deadlines.fault)

    def _check_machine(self) -> None:
        """What this machine can do with no target at all is known before anything is started."""
        from kvops.chaos.faults import catalogue

        known: dict[str, Any] = catalogue()
        for call in self._experiment.faults:
            missing = known[call.name].here().missing
            if missing is not None:
                raise Unsupported(f"{call.name} cannot be done here: {missing}", fix="kvops chaos doctor")

    def _check_available(self, pool: Pool) -> None:
        with self._build(pool, self._block) as injection:
            injection.check()

    def _fault(self, pool: Pool, block: int) -> None:
        try:
            with self._stretch(pool, Arm.FAULT, block) as one:
                self._wait_until(one.window_start_ns + round(INJECT_AFTER_S * 1e9), one, None)
                if self._options.sham:
                    self._pretend(one, block)
                else:
                    self._inject_and_hold(pool, one, block)
                self._finish(one)
        except BaseException:
            with suppress(KvopsError):  # what happened says more
                pool.ensure_running(wait=False)
            raise
        started_again = pool.ensure_running()
        if started_again:
            self._step("start", f"{', '.join(started_again)} started again")
        rows = self._rows(Arm.FAULT, block)
        text = f"{len(rows)} requests, success {_percent(probes.success_rate(rows))}"
        self._step("recover", f"{text}, hit {_percent(probes.hit_ratio(rows))}")

    def _pretend(self, one: Stretch, block: int) -> None:
        """All rows of a fault, for as long as one, and no proof."""
        row = Fault(state=FaultState.INJECTING, t_ns=now_ns(), fault=SHAM, target=SHAM, block=block)
        self._writer.write(row)
        self._writer.write(msgspec.structs.replace(row, state=FaultState.ACTIVE, t_ns=now_ns()))
        self._ran.injected = True
        self._wait_until(now_ns() + round(self._fault_s(block) * 1e9), one, None)
        for state in (FaultState.UNDOING, FaultState.CLEAN):
            self._writer.write(msgspec.structs.replace(row, state=state, t_ns=now_ns()))

    def _inject_and_hold(self, pool: Pool, one: Stretch, block: int) -> None:
        self._injection = injection = self._build(pool, block)
        guards = GuardThread(self._watcher(one))
        guards.start()
        try:
            with injection:
                try:
                    evidence = injection.inject()
                except (NotInjected, Aborted) as error:
                    if guards.trip.is_set():
                        raise _Abort(guards.why) from error
                    raise
                self._ran.injected = True
                self._step("active", "; ".join(str(each) for each in evidence))
                why = self._hold(injection, guards, one)
                proof = injection.undo()
                self._step(
                    "clean",
                    f"before = after, undone in {proof.undo_s:.2f} s by {proof.by}",
                    commands=proof.commands,
                )
                if why:
                    raise _Abort(why)
        finally:
            guards.stop()
            self._injection = None

    def _hold(self, injection: Injecting, guards: GuardThread, one: Stretch) -> str:
        """Keep the fault until its time is over; returns why it ended early, if it did."""
        end_s = time.monotonic() + self._fault_s(self._block)
        recheck_s = seconds(self._ours.verify.recheck)
        beat_s = seconds(self._ours.deadlines.lease) / 4
        next_beat = time.monotonic() + beat_s
        next_check = time.monotonic() + recheck_s
        checker: _Recheck | None = None
        self._step("hold", f"{self._fault_s(self._block):g} s, rechecked every {recheck_s:g} s")
        while time.monotonic() < end_s:
            if guards.trip.wait(TICK_S):
                self._step("guard", guards.why, ok=False)
                return guards.why
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + beat_s
                injection.beat()
            if checker is not None and checker.done:
                checker.raise_error()
                checker, next_check = None, now + recheck_s
            elif checker is None and now >= next_check and end_s - now > 1.0:
                checker = _Recheck(injection)
            dead = one.dead()
            if dead:
                return f"{LOST}: clients {', '.join(dead)} ended"
            if blind := self._blind():
                return f"{LOST}: {blind}"
        if checker is not None:
            checker.join()
            checker.raise_error()
        injection.beat()  # a guardian that has ended since the last one has ended the fault as well
        return ""

    def _blind(self) -> str:
        """Why the runner itself does not see or write down what happens; empty while it does."""
        if self._sampler is not None and self._sampler.trouble:
            return self._sampler.trouble
        trouble = self._writer.trouble
        return f"the runner's own history cannot be written: {trouble}" if trouble else ""

    @staticmethod
    def _telemetry(one: Stretch) -> telemetry.Telemetry:
        return telemetry.Telemetry([client.spec for client in one.clients], one.start_ns)

    def _watcher(self, one: Stretch) -> Watcher:
        seen = self._telemetry(one)
        return Watcher(
            with_sight(self._ours.guards),
            {"success_rate": seen.success_rate, "telemetry_age": seen.age_s},
            {"telemetry_age": lambda: f"{LOST}, client {seen.silent} is silent"},
        )

    def _wait_until(self, at_ns: int, one: Stretch, guards: GuardThread | None) -> None:
        pause = threading.Event()
        while (left_s := (at_ns - now_ns()) / 1e9) > 0:
            pause.wait(min(left_s, 0.2))
            dead = one.dead()
            if dead:
                raise _Abort(f"{LOST}: clients {', '.join(dead)} ended before the fault")

    def _on_state(self, block: int, state: State, detail: str) -> None:
        kind = _FAULT_STATES.get(state)
        if kind is None or self._injection is None:
            return
        faults: Sequence[InForce] = self._injection.in_force
        share = self._chosen.capacity_share if self._chosen is not None else 0.0
        for one in faults:
            commands: tuple[str, ...] = ()
            if kind in (FaultState.UNDOING, FaultState.DIRTY):
                commands = one.undo
            self._writer.write(
                Fault(
                    state=kind,
                    t_ns=now_ns(),
                    fault=one.fault,
                    target=one.target,
                    group=one.group,
                    host=one.host,
                    block=block,
                    capacity_share=share / len(faults),
                    lost_share=one.lost_share,
                    proof=tuple(part for part in detail.split("; ") if part)
                    if kind is FaultState.ACTIVE
                    else (),
                    commands=commands,
                    why=detail if kind is FaultState.DIRTY else "",
                )
            )
        if kind is FaultState.INJECTING:
            self._say("inject", ", ".join(f"{one.fault} {one.group}/{one.target}" for one in faults))

    # Signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """
        The first Ctrl-C or SIGTERM ends the run in order; the next asks the guardian to undo at once. Neither
        skips the undo.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        seen: list[int] = []

        def end(signum: int, frame: FrameType | None) -> None:
            seen.append(signum)
            if len(seen) == 1:
                raise _Interrupted(signum)
            injection = self._injection
            if injection is not None:
                injection.ask_abort("interrupted twice")

        before = {one: signal.signal(one, end) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class _Recheck:
    """A proof that the fault is still there, on a thread of its own: a guard's trip must not wait for it."""

    def __init__(self, injection: Injecting) -> None:
        self._injection = injection
        self._error: KvopsError | None = None
        self._thread = threading.Thread(target=self._run, name="chaos-recheck", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has its answer."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the answer, but not for ever."""
        self._thread.join(RECHECK_JOIN_S)

    def raise_error(self) -> None:
        """Raise what it found, if it found the fault gone."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._injection.recheck()
        except KvopsError as error:
            self._error = error


def within(value: float, tolerance: Any) -> bool:
    """Whether a probe's value fits a tolerance of the Chaos Toolkit: a number, [low, high], or a range."""
    if isinstance(tolerance, Mapping) and tolerance.get("type") == "range":
        tolerance = tolerance.get("range")
    if isinstance(tolerance, list) and len(tolerance) == 2:
        return bool(tolerance[0] <= value <= tolerance[1])
    return bool(value == tolerance)


def _breaker_scope(experiment: Experiment) -> str:
    """What checkers may expect: a breaker of the whole group must stay closed for a fault of one node."""
    expected = experiment.ours.expect.breaker
    if expected is None:
        return ""
    return {"node": "store", "group": "group", "none": ""}[expected.scope]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def read(ran: Ran) -> Any:
    """The record of a run, for judging."""
    return read_run(ran.folder)
