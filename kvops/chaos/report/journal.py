"""A judged run as a Chaos Toolkit journal, for what already reads those."""

from __future__ import annotations

import platform
from typing import Any, Final

from kvops import __version__
from kvops.chaos.history import End, FaultState, FaultWindow, RunRecord
from kvops.chaos.report.document import arm_figures, containment, start_ns, utc
from kvops.chaos.verdict import Judgement, RunVerdict

_STATUS: Final = {
    RunVerdict.PASS: "completed",
    RunVerdict.FAIL: "completed",
    RunVerdict.UNKNOWN: "completed",
    RunVerdict.ABORTED: "aborted",
    RunVerdict.INTERRUPTED: "interrupted",
    RunVerdict.BASELINE_NOT_STEADY: "failed",
    RunVerdict.NOT_INJECTED: "failed",
    RunVerdict.UNSUPPORTED: "failed",
    RunVerdict.DIRTY: "failed",
}


def journal(record: RunRecord, judgement: Judgement) -> dict[str, Any]:
    """
    The journal's keys as chaostoolkit-lib writes them; what it has no key for is under ``kvops``.

    ``deviated`` is true for a FAIL alone. A reader that looks only at ``status`` is told "failed" wherever nothing was
    proven, although the toolkit itself would say "completed" of an injection that did not take.
    """
    run = record.run
    begin = start_ns(record)
    end_ns = record.end.t_ns if record.end else begin
    figures = arm_figures(record)
    steady = judgement.verdict is not RunVerdict.BASELINE_NOT_STEADY
    passed = judgement.verdict is RunVerdict.PASS
    return {
        "chaoslib-version": f"kvops {__version__}",
        "platform": platform.platform(),
        "node": run.group,
        "experiment": {"title": run.title, "description": run.experiment, "method": [], "rollbacks": []},
        "start": _time(record, begin),
        "end": _time(record, end_ns),
        "duration": (end_ns - begin) / 1e9,
        "status": _STATUS[judgement.verdict],
        "deviated": judgement.verdict is RunVerdict.FAIL,
        "steady_states": {
            "before": _steady(run.title, figures.get("baseline"), steady),
            "during": [_steady(run.title, figures.get("fault"), passed)] if "fault" in figures else [],
            "after": _steady(run.title, None, passed),
        },
        "run": [_activity(record, one) for one in record.fault_windows()],
        "rollbacks": [
            _rollback(record, one) for one in record.fault_windows() if one.t_undo_ns or one.t_clean_ns
        ],
        "kvops": {
            "verdict": judgement.verdict.value,
            "reasons": list(judgement.reasons),
            "seed": run.seed,
            "containment": containment(judgement),
            "checkers": {one.checker.id: one.result.verdict.value for one in judgement.checkers},
            "ended": (record.end.end if record.end else End.ABORTED).value,
        },
    }


def _time(record: RunRecord, t_ns: int) -> str:
    moment = utc(record, t_ns)
    return "" if moment is None else moment.replace(tzinfo=None).isoformat()


def _steady(title: str, figures: dict[str, float | int | None] | None, good: bool) -> dict[str, Any]:
    probe = {
        "activity": {"type": "probe", "name": title or "steady state"},
        "status": "succeeded" if good else "failed",
        "output": figures,
        "tolerance_met": good,
    }
    return {"steady_state_met": good, "probes": [probe]}


def _activity(record: RunRecord, one: FaultWindow) -> dict[str, Any]:
    proven = one.t_active_ns is not None and bool(one.proof)
    until = one.t_active_ns or one.t_inject_ns
    return {
        "activity": {"type": "action", "name": f"{one.fault} {one.target}".strip(), "block": one.block},
        "status": "succeeded" if proven else "failed",
        "start": _time(record, one.t_inject_ns),
        "end": _time(record, until),
        "duration": (until - one.t_inject_ns) / 1e9,
        "output": {
            "proof": list(one.proof),
            "control": one.control,
            "commands": list(one.commands),
            "why": one.why,
        },
    }


def _rollback(record: RunRecord, one: FaultWindow) -> dict[str, Any]:
    begin = one.t_undo_ns or one.t_clean_ns or one.t_inject_ns
    end = one.t_clean_ns or begin
    state = FaultState.CLEAN if one.t_clean_ns is not None and not one.dirty else FaultState.DIRTY
    return {
        "activity": {"type": "action", "name": f"undo {one.fault} {one.target}".strip(), "block": one.block},
        "status": "succeeded" if state is FaultState.CLEAN else "failed",
        "start": _time(record, begin),
        "end": _time(record, end),
        "duration": (end - begin) / 1e9,
        "output": {"state": state.value, "commands": list(one.undo_commands)},
    }
