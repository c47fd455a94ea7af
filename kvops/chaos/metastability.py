"""
The highest load from which the service comes back by itself.

A short trigger (the whole cache gone for some seconds) at constant offered load; then the trigger ends and the load
does not. What keeps a metastable system down is load that the trigger made and that sustains itself: retries, cold
caches, queues of requests that nobody waits for any more (Bronson et al., HotOS 2021). A closed loop hides it,
because its clients slow down with the service: such a run proves nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvops.chaos.checkers.model import Verdict
from kvops.chaos.checkers.recovery import recovery
from kvops.chaos.containment import pairs_of
from kvops.chaos.history import RunRecord
from kvops.chaos.pairing import Phase

OFFERED_SHARE_MIN: Final = (
    0.95  # of the requests per second before the trigger, that must go on being offered after it
)
START_LAG_S_MAX: Final = 1.0  # how much later than intended an open loop may begin requests, at the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One load and whether the service came back from it."""

    load_share: float  # of what the nodes serve without a cache
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """The metastability margin."""

    levels: tuple[Level, ...]  # by load
    margin: (
        float | None
    )  # the highest load with recovery, there and at each lower load; None: not even the lowest
    verdict: Verdict  # valid: all recovered; invalid: one did not; unknown otherwise

    def __str__(self) -> str:
        said = (
            "no load that was tried"
            if self.margin is None
            else f"{100 * self.margin:.0f} % of cache-off capacity"
        )
        return f"metastability margin: {said}"


def margin(records: Sequence[RunRecord]) -> Margin:
    """Judge the same trigger at several loads."""
    levels = sorted((_level(record) for record in records), key=lambda one: one.load_share)
    reached: float | None = None
    for level in levels:
        if level.verdict is not Verdict.VALID:
            break
        reached = level.load_share
    verdicts = {level.verdict for level in levels}
    if Verdict.INVALID in verdicts:
        verdict = Verdict.INVALID
    else:
        verdict = Verdict.VALID if verdicts == {Verdict.VALID} else Verdict.UNKNOWN
    return Margin(levels=tuple(levels), margin=reached, verdict=verdict)


def _level(record: RunRecord) -> Level:
    load = record.run.load_share
    why = (
        _not_open_loop(record)
        if load > 0
        else "the load was not measured against what is served without a cache"
    )
    if why:
        return Level(load_share=load, verdict=Verdict.UNKNOWN, why=why)
    result = recovery(record)
    return Level(load_share=load, verdict=result.verdict, why=result.summary)


def _not_open_loop(record: RunRecord) -> str:
    """Why the run's load was not offered independently of the service; empty when it was."""
    pairs = pairs_of(record)
    after = int((pairs.phase == Phase.AFTER).sum())
    if not after or not pairs.baseline.there.any():
        return "no requests after the trigger, or none without it to compare their number with"
    offered = len(pairs.request) / (len(pairs.request) + pairs.unpaired)
    if offered < OFFERED_SHARE_MIN:
        return f"only {100 * offered:.0f} % of the load without the trigger was offered with it: not an open loop"
    lags = [(row.t_start_ns - row.t_intended_ns) / 1e9 for row in record.requests if row.t_start_ns]
    if lags and float(np.median(lags)) > START_LAG_S_MAX:
        return f"requests began {np.median(lags):.1f} s later than intended: not an open loop"
    return ""
