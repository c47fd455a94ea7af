"""A judged run as one JSON document; the other reports are drawn from it and from the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np

from kvops.chaos.containment import pairs_of
from kvops.chaos.history import Arm, RunRecord
from kvops.chaos.pairing import NS, Phase
from kvops.chaos.verdict import Judgement
from kvops.timestamps import rfc3339

TIMELINE_MAX: Final = 500  # entries; what the report leaves out it counts
EVENT_WORDS: Final = ("breaker.", "leader.", "store.", "fault.", "guard.", "objects.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the run's timeline."""

    at_s: float  # after the run's first row
    time: str  # UTC; empty when the run did not record it
    what: str
    ok: bool
    text: str
    commands: tuple[str, ...] = ()


def start_ns(record: RunRecord) -> int:
    """The clock's reading that the run's times are counted from."""
    firsts = [rows[0].t_ns for rows in (record.steps, record.faults) if rows]
    firsts += [record.blocks[0].t_start_ns] if record.blocks else []
    firsts += [record.requests[0].t_intended_ns] if record.requests else []
    firsts += [record.operations[0].t_invoke_ns] if record.operations else []
    return record.run.started_ns or min(firsts, default=0)


def utc(record: RunRecord, t_ns: int) -> datetime | None:
    """A row's time as a date; None when the run did not record when it began."""
    try:
        begun = datetime.fromisoformat(record.run.started_at)
    except ValueError:
        return None
    begun = begun if begun.tzinfo else begun.replace(tzinfo=UTC)
    return begun.astimezone(UTC) + timedelta(microseconds=(t_ns - start_ns(record)) // 1000)


def timeline(record: RunRecord) -> list[Entry]:
    """What the runner did, what became of each fault, and what the product noticed, in order."""
    rows: list[tuple[int, str, bool, str, tuple[str, ...]]] = [
        (one.t_ns, one.name, one.ok, one.text, one.commands)
        for one in record.steps
        if not (one.name == "active" and record.faults)  # the faults' own rows have the proof
    ]
    for fault in record.faults:
        good = fault.state.value not in ("not-active", "dirty")
        words = [f"{fault.fault} {fault.target}".strip(), *fault.proof, fault.why]
        if fault.control:
            words.append(f"control: {fault.control}")
        rows.append(
            (fault.t_ns, fault.state.value, good, "; ".join(word for word in words if word), fault.commands)
        )
    for event in record.events:
        if event.kind.startswith(EVENT_WORDS):
            words = [
                event.subject,
                event.domain,
                event.node,
                event.detail,
                f"term {event.term}" if event.term else "",
            ]
            said = " ".join(dict.fromkeys(word for word in words if word))  # a store's event names it twice
            rows.append((event.t_ns, event.kind, True, said, ()))
    zero = start_ns(record)
    entries = []
    for t_ns, what, ok, text, commands in sorted(rows, key=lambda row: row[0]):
        moment = utc(record, t_ns)
        entries.append(
            Entry(
                at_s=round((t_ns - zero) * NS, 3),
                time="" if moment is None else rfc3339(moment),
                what=what,
                ok=ok,
                text=text,
                commands=commands,
            )
        )
    return entries


def arm_figures(record: RunRecord) -> dict[str, dict[str, float | int | None]]:
    """Of each arm, over the requests that met the fault or whose twin did: what its users saw."""
    pairs = pairs_of(record)
    during = pairs.phase == Phase.DURING
    mask = during if during.any() else np.ones(len(pairs.request), dtype=bool)
    found: dict[str, dict[str, float | int | None]] = {}
    for arm in (Arm.CACHE_OFF, Arm.BASELINE, Arm.CONTROL, Arm.FAULT):
        columns = pairs.arm(arm)
        index = np.flatnonzero(mask & columns.there)
        if not len(index):
            continue
        ttft = columns.ttft_ms[index]
        ttft = ttft[~np.isnan(ttft)]
        tokens = float(columns.input[index].sum())
        found[arm.value] = {
            "requests": len(index),
            "success": _round(1 - float(columns.failed[index].mean())),
            "wrong": int(columns.wrong[index].sum()),
            "late": int(columns.late[index].sum()),
            "ttft_p50_ms": _round(float(np.quantile(ttft, 0.5))) if len(ttft) else None,
            "ttft_p99_ms": _round(float(np.quantile(ttft, 0.99))) if len(ttft) else None,
            "hit_ratio": _round(float(columns.hit[index].sum()) / tokens) if tokens else None,
            "recomputed_tokens": int(columns.recomputed[index].sum()),
            "rpcs_per_request": _round(float(columns.rpcs[index].mean())),
        }
    return found


def containment(judgement: Judgement) -> dict[str, Any]:
    """The numbers of the blast radius; null where they could not be measured."""
    one = judgement.containment
    return {
        "K": _round(one.k),
        "K_interval": [_round(one.k_low), _round(one.k_high)],
        "K_verdict": one.k_verdict.value,
        "S": _round(one.spread),
        "S_verdict": one.spread_verdict.value,
        "S_domains": list(one.spread_domains),
        "domains_outside": one.spread_of,
        "amplification": _round(one.amplification),
        "capacity_lost": _round(one.capacity_lost),
        "requests": one.requests,
        "excess": _round(one.excess),
        "noise": _round(one.noise),
        "degraded": dict(one.harmed),
        "depth": {
            "ttft_p99_ms": _round(one.excess_p99_ms),
            "recompute_share": _round(one.excess_recompute),
            "hit_drop": _round(one.hit_drop),
            "hit_drop_expected": _round(one.hit_drop_expected),
        },
        "area_request_s": _round(one.area_request_s),
        "t_detect_s": _round(one.t_detect_s),
        "t_contain_s": _round(one.t_contain_s),
        "t_recover_s": _round(one.t_recover_s),
        "t_rewarm_s": _round(one.t_rewarm_s),
        "observed_after_s": _round(one.observed_after_s),
    }


def document(record: RunRecord, judgement: Judgement) -> dict[str, Any]:
    """
    Everything, for programs.

    Keys that others rely on: ``verdict``, ``seed``, ``containment`` {``K``, ``S``, ``amplification``},
    ``timeline[]``, ``checkers[]``, ``injected``, ``undone``.
    """
    run = record.run
    entries = timeline(record)
    return {
        "schema": 1,
        "verdict": judgement.verdict.value,
        "exit_code": judgement.exit_code,
        "reasons": list(judgement.reasons),
        "also": [one.value for one in judgement.also],
        "seed": run.seed,
        "run": run.run_id,
        "title": run.title,
        "experiment": run.experiment,
        "started_at": run.started_at,
        "group": run.group,
        "environment": run.environment,
        "fault": run.fault,
        "target": run.target,
        "placement": run.placement,
        "without": list(run.without),
        "quick": run.quick,
        "simulated": run.simulated,
        "injected": judgement.injected,
        "undone": judgement.undone,
        "left": list(judgement.left),
        "containment": containment(judgement),
        "arms": arm_figures(record),
        "matrix": [
            {
                "domain": cell.domain,
                "class": cell.cls,
                "metric": cell.metric,
                "value": _round(cell.ratio),
                "interval": [_round(cell.low), _round(cell.high)],
                "p": _round(cell.p),
                "state": cell.state,
            }
            for cell in judgement.containment.matrix
        ],
        "checkers": [
            {
                "id": one.checker.id,
                "name": one.checker.name,
                "title": one.checker.title,
                "verdict": one.result.verdict.value,
                "counts": one.counts,
                "safety": one.result.safety,
                "summary": one.result.summary,
                "checked": one.result.checked,
                "counter_examples": [
                    {"what": example.what, "rows": list(example.rows), "t_ns": example.t_ns}
                    for example in one.result.examples
                ],
                "counter_example_count": one.result.example_count,
            }
            for one in judgement.checkers
        ],
        "not_concluded": list(judgement.not_concluded),
        "notes": list(judgement.notes),
        "timeline": [
            {
                "at_s": entry.at_s,
                "time": entry.time,
                "what": entry.what,
                "ok": entry.ok,
                "text": entry.text,
                "commands": list(entry.commands),
            }
            for entry in entries[:TIMELINE_MAX]
        ],
        "timeline_left_out": max(0, len(entries) - TIMELINE_MAX),
        "again": again(record),
    }


def again(record: RunRecord) -> str:
    """The line that runs it once more."""
    run = record.run
    if run.command:
        return run.command
    return f"kvops chaos run {run.experiment} --seed {run.seed}" if run.experiment else ""


def over_deadline(record: RunRecord) -> int:
    """Requests of the fault arm with a pool call that came back late, or without an answer."""
    return sum(
        1 for row in record.requests if row.arm is Arm.FAULT and (row.over_deadline or not row.t_return_ns)
    )


def fault_requests(record: RunRecord) -> int:
    """Requests of the fault arm."""
    return sum(row.arm is Arm.FAULT for row in record.requests)


def wrong_bytes(record: RunRecord) -> int:
    """Bytes that requests computed on and should not have."""
    return sum(row.wrong_bytes for row in record.requests)


def shortened(text: str, most: int = 300) -> str:
    """The beginning of a text that tells a whole story; the story itself is in the timeline."""
    return text if len(text) <= most else f"{text[:most].rsplit(' ', 1)[0]} …"


def joined(texts: Sequence[str], most: int = 3) -> str:
    """Some texts in one line, the others counted."""
    more = f" … and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def _round(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), 6)
