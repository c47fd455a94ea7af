"""Carries out undo steps: each until it is proved done, all within one deadline, a failing one holding up no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Final

from kvops.chaos.steps import UndoStep
from kvops.errors import KvopsError
from kvops.store.clock import boot_id

UNDO_TIMEOUT_S: Final = 60.0
PAUSE_S_FIRST: Final = 0.01
PAUSE_S_MAX: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What became of one step."""

    step: UndoStep
    done: bool
    acted: bool = False  # False: nothing was left to do
    detail: str = ""  # why it is not done

    @property
    def text(self) -> str:
        """One line for people."""
        how = ("done" if self.acted else "nothing to do") if self.done else f"NOT DONE: {self.detail}"
        return f"{self.step.command()}    {how}"


def undo(
    steps: Sequence[UndoStep],
    *,
    timeout_s: float = UNDO_TIMEOUT_S,
    of_boot: str | None = None,
    tell: Callable[[], None] = lambda: None,
) -> list[StepResult]:
    """
    Carry out all steps, in order; those that fail are tried again, after the others, until the time is over.

    Args:
        steps: The complete list.
        timeout_s: For all of them together.
        of_boot: The boot they were written in; of a former one only what lies on disk is left to do.
        tell: Called between any two steps, so that whoever waits sees that it goes on.
    """
    deadline = time.monotonic() + timeout_s
    pause_s, pause = PAUSE_S_FIRST, threading.Event()
    if of_boot is not None and of_boot != boot_id():
        results = {
            index: StepResult(step=step, done=True) for index, step in enumerate(steps) if not step.persistent
        }
    else:
        results = {}
    acted: set[int] = set()
    while True:
        for index, step in enumerate(steps):
            if index in results and results[index].done:
                continue
            results[index] = _try(step, acted=index in acted)
            if results[index].acted:
                acted.add(index)
            tell()
        if all(result.done for result in results.values()) or time.monotonic() >= deadline:
            # A step may have been undone by a later one's work: what counts is how it stands now.
            return [results[index] for index in range(len(steps))]
        pause.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(pause_s * 2, PAUSE_S_MAX)


def _try(step: UndoStep, *, acted: bool) -> StepResult:
    try:
        if step.done():
            return StepResult(step=step, done=True, acted=acted)
        step.act()
        return StepResult(step=step, done=step.done(), acted=True, detail="it had no effect yet")
    except (OSError, KvopsError, SubprocessError, ValueError) as error:
        return StepResult(step=step, done=False, acted=acted, detail=str(error) or type(error).__name__)


def left(results: Sequence[StepResult]) -> list[str]:
    """The commands of what is not done, for a person."""
    return [result.step.command() for result in results if not result.done]
