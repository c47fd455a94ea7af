"""
Limits on harm, watched from a thread of their own: past one, or blind, the experiment ends and is undone.

A guard is no hypothesis: it does not judge the pool, it keeps the experiment from doing more than was agreed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvops.chaos.experiment import Guard, seconds

TICK_S_MIN: Final = 0.05

BLIND: Final = Guard(probe="telemetry_age", above="5s")
"""Of an experiment that names no guard of its telemetry: who sees nothing must not go on."""

Reader = Callable[[], float | None]
"""The present value of a probe; None when there is nothing to say yet."""


@dataclass(slots=True)
class Watcher:
    """
    Evaluates guards until one trips; pure but for what it is handed.

    Args:
        guards: Limits.
        probes: By name: success_rate (share), telemetry_age (seconds).
        who: By name: whose value that was, in words; asked once a probe has its value.
    """

    guards: Sequence[Guard]
    probes: dict[str, Reader]
    who: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    _bad: list[int] = field(default_factory=list)
    _due_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing was seen yet."""
        self._bad = [0] * len(self.guards)
        self._due_s = [0.0] * len(self.guards)

    def look(self, *, now_s: float) -> str | None:
        """Why to end the experiment; None while nothing is wrong. Guards that are not due are not asked."""
        for index, guard in enumerate(self.guards):
            if now_s < self._due_s[index]:
                continue
            self._due_s[index] = now_s + max(TICK_S_MIN, seconds(guard.every))
            try:
                value = self.probes[guard.probe]()
            except OSError as error:
                return f"{guard.probe} could not be read: {error}"
            why = violated(guard, value)
            self._bad[index] = self._bad[index] + 1 if why else 0
            if why and self._bad[index] >= guard.times:
                who = self.who.get(guard.probe, str)()
                return f"{why}, {guard.times} times in a row" + (f": {who}" if who else "")
        return None


def with_sight(guards: Sequence[Guard]) -> list[Guard]:
    """An experiment's guards, and one for its telemetry if it has none."""
    return [*guards, *([] if any(one.probe == BLIND.probe for one in guards) else [BLIND])]


def violated(guard: Guard, value: float | None) -> str | None:
    """What is wrong with a value; None when it is within the limit, or when there is none yet."""
    if value is None:
        return None
    if guard.below is not None and value < guard.below:
        return f"{guard.probe} {value:.3f} is below {guard.below:g}"
    if guard.above is not None and value > seconds(guard.above):
        return f"{guard.probe} {value:.1f} is above {seconds(guard.above):g}"
    return None


class GuardThread:
    """Runs a watcher beside the experiment; ``tripped`` says why it wants the end."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._stop = threading.Event()
        self.trip = threading.Event()
        self.why = ""
        self._thread = threading.Thread(target=self._run, name="chaos-guards", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; returns when it has."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S_MIN):
            try:
                why = self._watcher.look(now_s=time.monotonic())
            except Exception as error:  # noqa: BLE001 - a guard that cannot see is a reason to stop
                why = f"the guards failed: {type(error).__name__}: {error}"
            if why:
                self.why = why
                self.trip.set()
                return
