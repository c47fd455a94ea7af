"""What a checker says: a verdict, what it rests on, the counter-examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvops.chaos.history import RunRecord

EXAMPLES_MAX: Final = 20  # kept of each checker; more are counted


class Verdict(StrEnum):
    """Of one promise; invalid outweighs unknown, unknown outweighs valid."""

    INVALID = "invalid"
    UNKNOWN = "unknown"
    VALID = "valid"


_ORDER: Final = (Verdict.INVALID, Verdict.UNKNOWN, Verdict.VALID)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that outweighs the others; valid when there are none."""
    return min(verdicts, key=_ORDER.index, default=Verdict.VALID)


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterExample:
    """One thing that must not be in a history."""

    what: str
    rows: tuple[str, ...] = ()  # op ids or request ids, to look up
    t_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one checker found in one history."""

    verdict: Verdict
    summary: str
    checked: int = 0  # how many things it looked at; 0: it says nothing about this run
    examples: tuple[CounterExample, ...] = ()
    example_count: int = 0
    safety: bool = False  # a single counter-example decides, whatever the noise
    not_concluded: tuple[str, ...] = ()  # what would need more data


@dataclass(frozen=True, slots=True, kw_only=True)
class Checker:
    """A promise that can be checked, declared like data."""

    id: str
    name: str  # as experiments name it
    title: str  # the promise
    safety: bool
    run: Callable[[RunRecord], Result]


def found(
    examples: list[CounterExample],
    *,
    checked: int,
    good: str,
    unknown: str = "",
    nothing: str = "nothing of the kind was recorded",
    safety: bool = True,
) -> Result:
    """
    The result of a scan for counter-examples.

    Args:
        examples: All that were found; one is enough.
        checked: How many things were looked at; none is unknown.
        good: The summary when all is well.
        unknown: Why nothing may be concluded although no counter-example was found; empty: it may.
        nothing: The summary when there was nothing to look at.
        safety: A single counter-example decides.
    """
    if examples:
        return Result(
            verdict=Verdict.INVALID,
            summary=f"{len(examples):,} of {checked:,}: {examples[0].what}",
            checked=max(checked, len(examples)),
            examples=tuple(examples[:EXAMPLES_MAX]),
            example_count=len(examples),
            safety=safety,
        )
    if not checked:
        return Result(verdict=Verdict.UNKNOWN, summary=nothing, safety=safety)
    if unknown:
        return Result(verdict=Verdict.UNKNOWN, summary=unknown, checked=checked, safety=safety)
    return Result(verdict=Verdict.VALID, summary=good, checked=checked, safety=safety)
