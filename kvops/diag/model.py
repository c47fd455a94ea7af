"""Findings, outcomes and the two ways in which a check may not apply: skipped and unseen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from kvops.host import Sight

EVIDENCE_TEXT_MAX = 240  # characters of a value that is quoted; the file itself is named


class Outcome(StrEnum):
    """What a check says about a node. The order of members is from worst to best."""

    FAIL = "fail"  # transfers break, or will
    WARN = "warn"  # slower or fragile
    UNKNOWN = "unknown"  # a fact it needs could not be seen, or the check itself crashed
    INFO = "info"  # worth knowing, harmless
    OK = "ok"  # ran, found nothing
    SKIPPED = "skipped"  # does not apply here


LOUD = frozenset({Outcome.FAIL, Outcome.WARN})


class Skip(Exception):
    """The check does not apply to this subject; the message says why."""


class Unseen(Exception):
    """A needed fact could not be had. ``sight`` tells absent, unreadable and not collected apart."""

    def __init__(self, what: str, sight: Sight) -> None:
        super().__init__(f"{what}: {sight}")
        self.what = what
        self.sight = sight

    @property
    def absent(self) -> bool:
        return self.sight is Sight.ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One thing that was seen, and where anybody can look again."""

    source: str  # path on the host, or the command line
    file: str  # where it lies in a snapshot
    text: str  # what it said

    def as_json(self) -> dict[str, str]:
        return {"source": self.source, "file": self.file, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One subject, what was seen, what should be, and the exact command that mends it."""

    severity: Outcome
    subject: str
    observed: str
    expected: str
    fix: str = ""
    persists: bool | None = None  # whether the fix survives a reboot; None if there is nothing to run
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one check says about one node (or about the fleet)."""

    check: str
    node: str
    outcome: Outcome
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    asked: bool = False  # an unknown that the collection set out to see, or that was asked for by id
    subjects: int = 0  # how many subjects were judged
    unseen: tuple[str, ...] = field(default=())


def finding(
    severity: Outcome,
    subject: str,
    observed: str,
    expected: str = "",
    *,
    fix: str = "",
    persists: bool | None = None,
    evidence: Iterable[Evidence | None] = (),
) -> Finding:
    """A finding whose severity was computed; sources that gave nothing (None) are left out of its evidence."""
    return Finding(
        severity=severity,
        subject=subject,
        observed=observed,
        expected=expected,
        fix=fix,
        persists=persists,
        evidence=tuple(item for item in evidence if item is not None),
    )


fail = partial(finding, Outcome.FAIL)  # breaks transfers, or will
warn = partial(finding, Outcome.WARN)  # makes them slower or fragile
info = partial(finding, Outcome.INFO)  # worth knowing; harmless by itself
