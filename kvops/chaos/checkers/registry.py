"""All checkers, by id and by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from kvops.chaos.checkers import (
    amplification,
    breaker,
    completion,
    fencing,
    integrity,
    leak,
    lease_safety,
    never_worse,
    no_hang,
    prefix,
    recovery,
    register,
    resurrection,
    spread,
    visibility,
)
from kvops.chaos.checkers.model import Checker, Result, Verdict
from kvops.chaos.history import RunRecord
from kvops.errors import UsageError

CHECKERS: Final = MappingProxyType(
    {
        module.CHECKER.id: module.CHECKER
        for module in (
            integrity,
            resurrection,
            visibility,
            lease_safety,
            prefix,
            fencing,
            completion,
            leak,
            register,
            recovery,
            no_hang,
            spread,
            amplification,
            breaker,
            never_worse,
        )
    }
)
CORE: Final = ("S1", "L2", "C1")
"""What every run must be able to say something about; the others say nothing where nothing was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A checker with its result."""

    checker: Checker
    result: Result
    counts: bool  # towards the verdict: it was asked for, or had something to look at


def find(names: Iterable[str]) -> list[Checker]:
    """
    The checkers with these ids or names; all for none.

    Raises:
        UsageError: There is no such checker.
    """
    by_name = {name: checker for checker in CHECKERS.values() for name in (checker.id, checker.name)}
    chosen = []
    for name in names:
        if name not in by_name:
            near = get_close_matches(name, by_name, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(by_name)}"
            raise UsageError(f"there is no checker {name!r}", fix=hint)
        if by_name[name] not in chosen:
            chosen.append(by_name[name])
    return chosen or list(CHECKERS.values())


def run_all(record: RunRecord, names: Iterable[str] = ()) -> list[Judged]:
    """Every checker that the experiment, or the caller, asked for; one that breaks down is unknown."""
    asked = tuple(names) or record.run.checkers
    judged = []
    for checker in find(asked):
        try:
            result = checker.run(record)
        except Exception as error:  # noqa: BLE001 (a broken checker must not hide what the others found)
            result = Result(
                verdict=Verdict.UNKNOWN,
                summary=f"the checker broke down: {type(error).__name__}: {error}",
                checked=1,
            )
        if checker.safety and not result.safety:
            result = replace(result, safety=True)
        counts = bool(asked) or checker.id in CORE or result.checked > 0
        judged.append(Judged(checker=checker, result=result, counts=counts))
    return judged
