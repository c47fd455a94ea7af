"""
The life of an injection: guarded, proved, held, taken back, proved gone.

::

    with Injection([fault], host=LocalHost(), state_dir=state_dir, deadline_s=30) as injection:
        evidence = injection.inject()
        while holding:
            injection.beat()
            injection.recheck()
        proof = injection.undo()

Whatever happens, everything that was begun is undone: by ``undo``, by leaving the block, by the guardian when this
process dies or hangs, and by ``recover`` when the guardian died with it.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from kvops.chaos import picture
from kvops.chaos.guardian import DEADLINE_S_MAX, Orders, arm, write_lease
from kvops.chaos.injecting import FORBIDDEN_ENVIRONMENTS, InForce, OnState
from kvops.chaos.ledger import Book, Experiment
from kvops.chaos.model import Evidence, Fault, State, in_conflict
from kvops.chaos.own_path import cut_by
from kvops.chaos.steps import UndoStep
from kvops.chaos.undo import UNDO_TIMEOUT_S, StepResult, left, undo
from kvops.errors import (
    Aborted,
    Dirty,
    FaultNotApplied,
    KvopsError,
    NotInjected,
    Refused,
    Unsupported,
    UsageError,
)
from kvops.fleet.process import ProcessIdentity, identify, is_running, wait_ended
from kvops.host import Host
from kvops.signals import signals_held
from kvops.store.clock import boot_ms

LEASE_S_DEFAULT: Final = 3.0
LEASE_S_MIN: Final = 0.5
VERIFY_TIMEOUT_S: Final = 5.0
CLEAN_TIMEOUT_S: Final = 10.0  # for what the kernel takes away a moment later
GUARDIAN_END_S: Final = 2.0
_PAUSE_S: Final = 0.05

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """That nothing is left."""

    steps: list[StepResult]
    undo_s: float
    by: str  # who undid it: runner, guardian
    refused: list[str] = field(default_factory=list)  # per fault: what its proof says now

    @property
    def commands(self) -> list[str]:
        """What was done."""
        return [one.step.command() for one in self.steps]


class Injection:
    """One or more faults, from the first look to the proof that they are gone. Not thread-safe but for ``beat``."""

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        host: Host,
        state_dir: Path,
        lease_s: float = LEASE_S_DEFAULT,
        deadline_s: float = 120.0,
        on_state: OnState = lambda state, detail: None,
        verify_timeout_s: float = VERIFY_TIMEOUT_S,
        name: str = "",
        compose: bool = False,
    ) -> None:
        """
        Plan; nothing is touched.

        Args:
            faults: In the order they are injected.
            host: The machine they act on.
            state_dir: Where the ledger lies.
            lease_s: How long the guardian waits for a runner that says nothing.
            deadline_s: When the guardian undoes whatever happens, from ``inject`` on.
            on_state: Told of every state, after it is on disk.
            verify_timeout_s: How long a fault may take to show.
            name: The experiment's id; made up when not given.
            compose: Faults that hide one another are meant so.

        Raises:
            UsageError: No fault, faults in conflict, or times out of bounds.
        """
        if not faults:
            raise UsageError("there is no fault to inject", fix="name at least one: kvops chaos catalog")
        if not LEASE_S_MIN <= lease_s < deadline_s <= DEADLINE_S_MAX:
            raise UsageError(
                f"a lease of {lease_s:g} s within a deadline of {deadline_s:g} s cannot be",
                fix=f"use a lease from {LEASE_S_MIN:g} s, below a deadline up to {DEADLINE_S_MAX:g} s",
            )
        conflict = None if compose else in_conflict(faults)
        if conflict:
            raise UsageError(conflict, fix="inject them one after the other")
        self.faults = [_with_expiry(fault, deadline_s) for fault in faults]
        self.host = host
        self.book = Book(state_dir)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        self.id = name or f"{stamp}-{secrets.token_hex(3)}"
        self.lease_s = lease_s
        self.deadline_s = deadline_s
        self.verify_timeout_s = verify_timeout_s
        self.state = State.PLANNED
        self.experiment: Experiment | None = None
        self._on_state = on_state
        self._running_fd = -1
        self._guardian: ProcessIdentity | None = None
        self._steps: list[UndoStep] = []
        self._before: dict[str, str] = {}
        self._ledger_bytes = 0  # as we left it: more was written by somebody else
        self._began = False  # something may have been touched

    @property
    def scope(self) -> picture.Scope:
        """Where something may be left."""
        targets = [one.target for one in self.faults]
        processes = {identity for target in targets for identity in target.processes}
        return picture.Scope(
            tokens=[token for one in self.faults if (token := getattr(one, "token", ""))],
            netns=sorted({target.netns for target in targets if target.netns}),
            processes=[
                picture.Process(pid=one.pid, started_ticks=one.started_ticks, boot_id=one.boot_id)
                for one in sorted(processes, key=lambda one: one.pid)
            ],
        )

    def plan(self) -> list[UndoStep]:
        """What would take the faults back: the last one first. Nothing is touched."""
        return [step for fault in reversed(self.faults) for step in fault.undo()]

    @property
    def in_force(self) -> list[InForce]:
        """Every fault, as the history names it."""
        return [
            InForce(
                fault=one.name,
                target=one.target.name,
                group=one.target.group,
                host=one.target.host,
                lost_share=1.0 - float(getattr(one, "cpu_share", 0.0)),
                undo=tuple(step.command() for step in one.undo()),
            )
            for one in self.faults
        ]

    # Its life

    def check(self) -> None:
        """
        Look whether they could be injected; nothing is touched.

        Raises:
            Refused: A guard is in the way.
            Unsupported: This machine cannot do one of them.
        """
        self._refuse()
        self._require_available()

    def _require_available(self) -> None:
        for one in self.faults:
            reason = one.unavailable(self.host)
            if reason is not None:
                raise Unsupported(
                    f"{one.name} cannot be done on {one.target.name}: {reason}", fix="kvops chaos doctor"
                )

    def inject(self) -> list[Evidence]:
        """
        Inject all faults and prove each.

        Raises:
            Refused: A guard is in the way; nothing was touched.
            Unsupported: This machine cannot do one of them; nothing was touched.
            NotInjected: One could not be proved; all were undone.
            Dirty: … and that could not be proved.
        """
        self._refuse()
        self._running_fd = self.book.take(self.id)
        try:
            self.book.refuse_if_not_ready()
            self._require_available()
            self.experiment = self.book.create(self.id)
            self._enter(State.CAPABLE, faults=[f"{one.name} {one.target.name}" for one in self.faults])
            self._before = picture.take(self.scope)
            self._enter(State.PICTURED, picture=self._before)
            self._steps = self.plan()
            self._enter(State.JOURNALLED, undo=self._steps, facts={"scope": msgspec.to_builtins(self.scope)})
            self._arm()
            return self._beating(self._inject)
        except BaseException:
            self._end_unbegun()
            raise

    def _refuse(self) -> None:
        for one in self.faults:
            target = one.target
            if target.protect or target.environment.lower() in FORBIDDEN_ENVIRONMENTS:
                raise Refused(
                    f"{target.name} belongs to {target.group or 'a group'} ({target.environment}): no faults there",
                    fix="use a staging group",
                )
            cut = cut_by(one)
            if cut is not None:
                raise Refused(f"{one.name} would cut kvops off: {cut}", fix="choose another target")
            if not target.processes and not target.netns:
                raise Refused(f"{target.name} has no process: nothing would happen", fix="start it first")

    def _arm(self) -> None:
        assert self.experiment is not None
        me = identify(os.getpid())
        assert me is not None
        write_lease(self.experiment, lease_s=self.lease_s)
        orders = Orders(
            folder=str(self.experiment.folder),
            runner=picture.Process(pid=me.pid, started_ticks=me.started_ticks, boot_id=me.boot_id),
            deadline_boot_ms=boot_ms() + int(self.deadline_s * 1000),
            undo=self._steps,
            scope=self.scope,
            before=self._before,
        )
        # On a busy machine a guardian takes longer to start than a short lease lasts.
        self._guardian = self._beating(lambda: arm(orders))
        write_lease(self.experiment, lease_s=self.lease_s)
        self._enter(
            State.GUARDED,
            detail=f"guardian {self._guardian.pid}",
            facts={"guardian": dataclasses.asdict(self._guardian)},
        )

    def _inject(self) -> list[Evidence]:
        self._began = True
        self._enter(State.INJECTING)
        try:
            for one in self.faults:
                one.inject(self.host)
            self._enter(State.INJECTED)
            evidence = [self._proved(one) for one in self.faults]
            self.beat()
        except (KvopsError, OSError) as error:
            why = self._ended_by_other()
            self.undo()
            if why:  # what was missed had been taken back
                raise Aborted(why, fix="run it again") from error
            if isinstance(error, NotInjected):
                raise
            raise NotInjected(
                f"{', '.join(one.name for one in self.faults)} could not be injected: {error}",
                fix=getattr(error, "fix", "") or "kvops chaos doctor",
            ) from error
        except BaseException:
            self.undo()
            raise
        self._enter(State.ACTIVE, detail="; ".join(map(str, evidence)))
        return evidence

    def _proved(self, one: Fault) -> Evidence:
        deadline = time.monotonic() + self.verify_timeout_s
        pause = threading.Event()
        while True:
            try:
                return one.verify(self.host)
            except FaultNotApplied as error:
                if time.monotonic() >= deadline:
                    raise NotInjected(
                        f"{one.name} on {one.target.name} is not there: {error.what}", fix=error.fix
                    ) from error
            pause.wait(_PAUSE_S)

    def beat(self) -> None:
        """
        Say that the runner is well. Call it at least every third of the lease.

        Raises:
            Aborted: The guardian has undone everything meanwhile, or has ended itself: call ``undo``.
        """
        if self.experiment is None or self._guardian is None:
            return
        if self.experiment.size_bytes() != self._ledger_bytes or not is_running(self._guardian):
            why = [one.detail for one in self.experiment.entries() if one.by != "runner"]
            raise Aborted(
                f"the guardian has ended: {why[0] if why else 'somebody killed it'}", fix="run it again"
            )
        write_lease(self.experiment, lease_s=self.lease_s)

    def ask_abort(self, reason: str) -> None:
        """Have the guardian undo at once."""
        if self.experiment is not None:
            self.experiment.ask_abort(reason)

    def _ended_by_other(self) -> str:
        """Why the experiment is over, when it was not us who ended it; "" while it goes on."""
        if self.experiment is None or self._guardian is None:
            return ""
        if self.experiment.size_bytes() == self._ledger_bytes and is_running(self._guardian):
            return ""
        why = [one.detail for one in self.experiment.entries() if one.by != "runner"]
        return f"the guardian has ended: {why[0] if why else 'somebody killed it'}"

    def recheck(self) -> list[Evidence]:
        """
        Prove again that every lasting fault is there.

        Raises:
            NotInjected: One is not any more. Nothing was undone yet.
            Aborted: See ``beat``.
        """
        self.beat()
        return [
            self._beating(lambda one=one: self._proved(one))  # type: ignore[misc]
            for one in self.faults
            if one.lasting
        ]

    def undo(self) -> Proof:
        """
        Take everything back and prove that nothing is left. Again and again does no harm.

        Raises:
            Dirty: It could not be proved; with the commands to run.
        """
        if self.experiment is None or not self._began:
            self._end_unbegun()
            return Proof(steps=[], undo_s=0.0, by="nobody")
        began = time.monotonic()
        with signals_held():
            if self.state is not State.CLEAN:
                self._enter(State.UNDOING)
            with self.experiment.undoing(timeout_s=UNDO_TIMEOUT_S):
                guardian_was_first = any(entry.by == "guardian" for entry in self.experiment.entries())
                results = self._beating(lambda: undo(self._steps))
                undo_s = time.monotonic() - began
                if self.state is not State.CLEAN:
                    self._enter(State.UNDONE, detail=f"in {undo_s:.2f} s")
                changed, refused = self._beating(self._compare)
                found = left(results)
                if found or changed:
                    commands = found or ["kvops chaos recover"]
                    detail = "; ".join([*(one.text for one in results if not one.done), *changed])
                    self._enter(State.DIRTY, detail=detail, commands=commands)
                    self._release()
                    raise Dirty(
                        f"experiment {self.id} left something behind: {detail}",
                        fix="; ".join(commands),
                        commands=commands,
                    )
                if self.state is not State.CLEAN:
                    self._enter(State.CLEAN)
        self._release()
        by = "guardian" if guardian_was_first and not any(one.acted for one in results) else "runner"
        return Proof(steps=results, undo_s=undo_s, by=by, refused=refused)

    def _compare(self) -> tuple[list[str], list[str]]:
        """What is not as it was, and what each fault's own proof says now."""
        deadline = time.monotonic() + CLEAN_TIMEOUT_S
        pause = threading.Event()
        while True:
            changed = picture.differences(self._before, picture.take(self.scope))
            refused = []
            for one in self.faults:
                if not one.lasting:
                    continue
                try:
                    evidence = one.verify(self.host)
                    changed.append(f"{one.name} on {one.target.name} is still there: {evidence}")
                except KvopsError as error:
                    refused.append(f"{one.name} on {one.target.name}: {error.what}")
            if not changed or time.monotonic() >= deadline:
                return changed, refused
            pause.wait(_PAUSE_S)

    # Pieces

    def _enter(self, state: State, **more: Any) -> None:
        assert self.experiment is not None
        self.experiment.append(state, by="runner", **more)
        self._ledger_bytes = self.experiment.size_bytes()
        self.state = state
        self._on_state(state, str(more.get("detail", "")))

    def _beating(self, work: Callable[[], Result]) -> Result:
        """Do a piece of work of ours that may take longer than the lease; its own deadlines bound it."""
        stop = threading.Event()
        experiment = self.experiment
        assert experiment is not None

        def keep() -> None:
            while not stop.wait(self.lease_s / 4):
                write_lease(experiment, lease_s=self.lease_s)

        thread = threading.Thread(target=keep, name="chaos-lease", daemon=True)
        thread.start()
        try:
            return work()
        finally:
            stop.set()
            thread.join()

    def _release(self) -> None:
        """The guardian ends when the ledger says clean; of a dirty experiment it has nothing more to try."""
        if self._guardian is not None and self.state is State.CLEAN:
            wait_ended([self._guardian], timeout_s=GUARDIAN_END_S)
        if self._running_fd >= 0:
            os.close(self._running_fd)
            self._running_fd = -1

    def _end_unbegun(self) -> None:
        """Close an experiment in which nothing was touched yet."""
        if self.experiment is not None and not self._began and self.state is not State.CLEAN:
            self._enter(State.CLEAN, detail="nothing was injected")
        if not self._began or self.state in (State.CLEAN, State.DIRTY):
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._began and self.state not in (State.CLEAN, State.DIRTY):
            self.undo()


def _with_expiry(one: Fault, deadline_s: float) -> Fault:
    """What the kernel or a helper ends by itself ends with the guardian's deadline."""
    if dataclasses.is_dataclass(one) and any(each.name == "expires_s" for each in dataclasses.fields(one)):
        return dataclasses.replace(one, expires_s=deadline_s)
    return one
