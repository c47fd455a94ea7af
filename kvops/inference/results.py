"""What a replay measured: a row a request, and the figures drawn from the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

RESULT: Final = np.dtype(
    [
        ("state", "u1"),  # PENDING, DONE or FAILED
        ("node", "i2"),  # index of the node that served it
        ("sent_s", "f8"),  # to the node; seconds after the replay began
        ("done_s", "f8"),  # answered, or given up
        ("input_tokens", "i8"),
        ("l2_tokens", "i8"),  # served by the node's own host memory
        ("l3_tokens", "i8"),  # served by the pool
        ("lost_tokens", "i8"),  # some node had computed them before in this replay, and this one had to again
        ("lost_reason", "u1"),  # index into ReplayResult.reasons
        ("lookup_ms", "f4"),  # measured: the pool's look-up
        ("read_ms", "f4"),  # measured: reads from the pool, without our own checking of the bytes
        ("queue_ms", "f4"),  # virtual: pages are there, the GPU is busy
        ("gpu_ms", "f4"),  # virtual: gpu_model
        ("ttft_ms", "f8"),  # their sum
        ("write_ms", "f4"),  # measured: write-back, after the first token
        ("pages_checked", "i4"),  # compared byte by byte with what their keys demand, L2 and L3
        ("pages_read", "i4"),
        ("pages_stored", "i4"),
        ("wrong_bytes", "i8"),
        ("over_deadline", "i4"),
    ]
)
PENDING: Final = 0
DONE: Final = 1
FAILED: Final = 2  # its nodes died, ATTEMPTS_MAX times


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEvent:
    """Something that happened during a replay."""

    at_s: float  # after the replay began
    trace_s: float  # of the request that was being sent
    event: str  # noun.past_verb
    subject: str
    detail: str = ""
    fault: bool = False  # done on purpose by this replay: parts "before" from "after"


@dataclass(slots=True, kw_only=True)
class ReplayResult:
    """Every request's figures, in trace order, and what happened meanwhile."""

    rows: NDArray[np.void]  # RESULT
    arrival_ms: NDArray[np.float64]  # of each request, after the first, on the trace's clock
    seen_tokens: NDArray[np.int64]  # of each request: what a cache that forgets nothing would have served
    reasons: list[str]  # names of lost_reason
    events: list[ReplayEvent]
    write_failures: dict[str, int]  # pages, by reason
    wall_s: float
    lag_s: float  # how far behind the pace the replay was at worst; 0 without a pace
    started_at: str  # RFC 3339, UTC
    hosts: tuple[str, ...]  # logical host of each node
    page_bytes: int
    deadline_ms: int
    parameters: dict[str, str]  # what was replayed and how, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Figures of a stretch of a replay, for the table before and after a fault."""

    requests: int  # answered
    blocked: int  # requests with a pool call over its deadline, or never answered
    wrong_bytes: int
    bytes_checked: int
    hit_ratio: float  # of all input tokens
    possible_ratio: float  # … that an unlimited cache which forgets nothing would have had (``possible``)
    served_share: float  # the one divided by the other: 1 is perfect, whatever the trace
    slow: int  # requests whose look-up and reads took more than half the deadline
    read_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float


def possible_tokens(result: ReplayResult) -> NDArray[np.int64]:
    """
    Of each request: the tokens that could have been served.

    What a cache that forgets nothing would have had of this replay alone; more where more was served, as a pool
    that was warm before, or a request that was overtaken, shows that it could be.
    """
    served: NDArray[np.int64] = result.rows["l2_tokens"] + result.rows["l3_tokens"]
    return np.maximum(result.seen_tokens, served)


def phase(result: ReplayResult, chosen: NDArray[np.bool_]) -> Phase:
    """Figures of the chosen requests."""
    finished = chosen & (result.rows["state"] != PENDING)
    rows = result.rows[finished & (result.rows["state"] == DONE)]
    possible = int(possible_tokens(result)[finished & (result.rows["state"] == DONE)].sum())
    tokens = int(rows["input_tokens"].sum())
    hits = int(rows["l2_tokens"].sum() + rows["l3_tokens"].sum())
    pool_ms = rows["lookup_ms"] + rows["read_ms"]
    failed = int(np.count_nonzero(result.rows["state"][finished] == FAILED))
    return Phase(
        requests=len(rows),
        blocked=failed + int(np.count_nonzero(rows["over_deadline"])),
        wrong_bytes=int(rows["wrong_bytes"].sum()),
        bytes_checked=int(rows["pages_checked"].sum()) * result.page_bytes,
        hit_ratio=hits / tokens if tokens else 0.0,
        possible_ratio=possible / tokens if tokens else 0.0,
        served_share=hits / possible if possible else 1.0,
        slow=int(np.count_nonzero(pool_ms > result.deadline_ms / 2)),
        read_p99_ms=_percentile(rows["read_ms"][rows["read_ms"] > 0], 99),
        ttft_p50_ms=_percentile(rows["ttft_ms"], 50),
        ttft_p99_ms=_percentile(rows["ttft_ms"], 99),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Impact:
    """What the first fault of a replay did."""

    event: ReplayEvent
    before: Phase
    after: Phase
    lowest_share: float | None  # worst stretch of requests after the fault; None: too few came to tell
    recovered_after_s: (
        float | None
    )  # until a stretch was as good as RECOVERED_SHARE of before; None: not within the replay


RECOVERY_REQUESTS_MIN: Final = 20
RECOVERED_SHARE: Final = 0.95


def impact(result: ReplayResult) -> Impact | None:
    """Compare before and after the first fault; None when there was none."""
    fault = next((event for event in result.events if event.fault), None)
    if fault is None:
        return None
    later = (
        result.rows["done_s"] >= fault.at_s
    )  # what was under way belongs to "after": the fault could hit it
    before, after = phase(result, ~later), phase(result, later)
    index = np.flatnonzero(later & (result.rows["state"] == DONE))
    possible = possible_tokens(result)
    stretch = max(RECOVERY_REQUESTS_MIN, len(result.rows) // 50)
    shares: list[float] = []
    recovered = None
    for first in range(0, len(index) - stretch + 1, max(1, stretch // 4)):
        some = index[first : first + stretch]
        most = int(possible[some].sum())
        rows = result.rows[some]
        share = int(rows["l2_tokens"].sum() + rows["l3_tokens"].sum()) / most if most else 1.0
        shares.append(share)
        if share < RECOVERED_SHARE * before.served_share:
            recovered = None
        elif recovered is None:
            recovered = max(0.0, float(rows["done_s"][-1]) - fault.at_s) if first else 0.0
    lowest = min(shares, default=None)
    return Impact(event=fault, before=before, after=after, lowest_share=lowest, recovered_after_s=recovered)


def _percentile(values: NDArray[Any], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


def _spread(values: NDArray[Any]) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"), 0.0)
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    figures = {"mean": values.mean(), "p50": p50, "p95": p95, "p99": p99, "max": values.max()}
    return {name: round(float(value), 3) for name, value in figures.items()}


def losses(result: ReplayResult) -> dict[str, int]:
    """Tokens that had been computed before and were lost, by reason, most first."""
    rows = result.rows[(result.rows["state"] == DONE) & (result.rows["lost_tokens"] > 0)]
    totals = np.bincount(rows["lost_reason"], weights=rows["lost_tokens"], minlength=len(result.reasons))
    found = {result.reasons[code]: int(tokens) for code, tokens in enumerate(totals) if tokens}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def summary(result: ReplayResult) -> dict[str, Any]:
    """
    The figures of a replay, as ``kvops replay -o json`` prints them.

    Of every request's input tokens some are *hits* (L2 or L3), some are *computed for the first time*, and
    some are *recomputed*: a request of this replay had computed them before, so a cache that forgets nothing
    would have had them. For every request, and so for the sums, without a pool that was warm before::

        input_tokens = hit_tokens + new_tokens + recomputed_tokens        recomputed_tokens = sum(losses)

    * ``hit_ratio.tokens``: hits ÷ input tokens; ``by_tier`` its parts; ``possible`` what a cache that forgets
      nothing would have reached on these requests (one request at a time: the trace's own limit), or what was
      reached, where a pool that was warm before gave more.
    * ``losses``: {reason: tokens}. A reason is that of the first page of a request that did not come, as only
      a contiguous prefix counts: the pool's own (``MISS`` evicted or forgotten with its store, ``TIMEOUT``,
      ``STORE_DOWN``, …), or ``IN_FLIGHT``: another request was computing it at that very time.
    * ``read_ms``: per request that read from the pool, measured. ``ttft_ms``: look-up and read as measured,
      plus queue and GPU time of the model, on the trace's clock.
    * ``wrong_bytes``: bytes that a page reported as read, or held in L2, had other than its key demands.
      Anything but 0 is a broken promise.
    * ``over_deadline``: pool calls that came back more than 25 ms after the deadline they were given.
    * ``failed``: requests that were never answered because their nodes died.
    """
    rows = result.rows[result.rows["state"] == DONE]
    tokens = int(rows["input_tokens"].sum())
    l2, l3 = int(rows["l2_tokens"].sum()), int(rows["l3_tokens"].sum())
    possible = int(possible_tokens(result)[result.rows["state"] == DONE].sum())
    share = 1 / tokens if tokens else 0.0
    span_s = float(result.arrival_ms[-1]) / 1000
    nodes = range(len(result.hosts))
    busy_s = [float(rows["gpu_ms"][rows["node"] == node].sum()) / 1000 for node in nodes]
    hit = impact(result)
    return {
        "schema": 1,
        "requests": len(result.rows),
        "failed": int(np.count_nonzero(result.rows["state"] == FAILED)),
        "input_tokens": tokens,
        "hit_tokens": l2 + l3,
        "recomputed_tokens": int(rows["lost_tokens"].sum()),
        "hit_ratio": {
            "tokens": round((l2 + l3) * share, 6),
            "by_tier": {"L2": round(l2 * share, 6), "L3": round(l3 * share, 6)},
            "possible": round(possible * share, 6),
        },
        "losses": losses(result),
        "lookup_ms": _spread(rows["lookup_ms"][rows["lookup_ms"] > 0]),
        "read_ms": _spread(rows["read_ms"][rows["read_ms"] > 0]),
        "write_ms": _spread(rows["write_ms"][rows["write_ms"] > 0]),
        "queue_ms": _spread(rows["queue_ms"]),
        "gpu_ms": _spread(rows["gpu_ms"]),
        "ttft_ms": _spread(rows["ttft_ms"]),
        "wrong_bytes": int(rows["wrong_bytes"].sum()),
        "bytes_checked": int(rows["pages_checked"].sum()) * result.page_bytes,
        "bytes_read": int(rows["pages_read"].sum()) * result.page_bytes,
        "bytes_written": int(rows["pages_stored"].sum()) * result.page_bytes,
        "write_failures": dict(result.write_failures),
        "over_deadline": int(rows["over_deadline"].sum()),
        "wall_s": round(result.wall_s, 3),
        "lag_s": round(result.lag_s, 3),
        "nodes": [
            {
                "node": f"node-{node}",
                "host": result.hosts[node],
                "requests": int(np.count_nonzero(rows["node"] == node)),
                "gpu_busy_share": round(busy_s[node] / span_s, 4) if span_s else 0.0,
            }
            for node in nodes
        ],
        "impact": None
        if hit is None
        else {
            "fault": f"{hit.event.event} {hit.event.subject}",
            "at_s": round(hit.event.at_s, 3),
            "before": _phase_json(hit.before),
            "after": _phase_json(hit.after),
            "lowest_share": None if hit.lowest_share is None else round(hit.lowest_share, 4),
            "recovered_after_s": None if hit.recovered_after_s is None else round(hit.recovered_after_s, 3),
        },
        "events": [
            {
                "at_s": round(event.at_s, 3),
                "trace_s": round(event.trace_s, 3),
                "event": event.event,
                "subject": event.subject,
                "detail": event.detail,
            }
            for event in result.events
        ],
    }


def _phase_json(phase: Phase) -> dict[str, float]:
    return {name: round(getattr(phase, name), 6) for name in Phase.__slots__}
