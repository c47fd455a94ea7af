"""
How far a fault's harm went, in numbers.

A request of the fault arm is compared with its twins, which had the same seed and no fault. It is degraded when it
failed, was wrong, was later than its declared budget, or recomputed tokens that its twin did not. What two arms
without a fault disagree on is subtracted. While the fault is active::

    excess = P(degraded | fault against A) − P(degraded | A' against A)
    K      = excess ÷ capacity lost                       over requests of the groups whose capacity is hit
    S      = domains outside the scope that are significantly degraded ÷ domains outside the scope

Capacity lost is declared (1 of 12 stores), times the fraction of the time that a slow or paused target was gone.
A host of an affected group that is outside the scope itself may lose hits in proportion (K's bound times the
capacity lost), and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops.chaos.checkers.model import Verdict, worst
from kvops.chaos.history import Arm, EventKind, FaultWindow, RunRecord
from kvops.chaos.pairing import ArmColumns, Mask, Pairs, Phase, block_faults, pair
from kvops.chaos.statistics import (
    P99_SAMPLES_MIN,
    PAIRS_MIN,
    BlockPair,
    Comparison,
    compare,
    decide,
    holm,
    mean_interval,
    rate_bound,
)

Array = NDArray[np.float64]

BUCKET_S: Final = 1.0
SHARE_MARGIN: Final = 0.01  # of requests or tokens: how much more counts as the same
DEGRADED_MARGIN: Final = 0.02  # of a domain's requests: recomputing depends on who came first, too
CONTAINED_REQUESTS_MIN: Final = 100  # in the fault's window; with fewer K means nothing
AFTER_REQUESTS_MIN: Final = 50  # after the undo, for a ratio of their own
NOISE_MAX: Final = (
    0.2  # of requests: where two arms without a fault disagree on more, their difference says nothing
)
K_LOOSE: Final = 1.5  # K's interval may reach this many times its bound, or K is unknown
REWARM_SHARE: Final = 0.95  # of the twins' hits
METRICS: Final = ("degraded", "success", "ttft_p50", "ttft_p99", "hit", "recompute", "rpc")
DETECTED: Final = (EventKind.BREAKER_OPENED, EventKind.DETECTED, EventKind.STORE_LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One entry of the impact matrix: a domain's class in one metric while the fault was active."""

    domain: str
    cls: str
    metric: str
    ratio: float | None  # to the twins; for ``degraded`` and ``success`` the difference
    low: float | None
    high: float | None
    state: str  # ok, degraded-expected, degraded-unexpected, unknown
    p: float | None = None  # corrected for the whole matrix
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One second of the fault arm and of its twins, averaged over blocks; 0 is the injection."""

    t_s: float
    requests: int
    degraded: float
    harmed: float
    hit: float | None
    hit_twin: float | None
    ttft_ms: float | None  # median
    ttft_twin_ms: float | None
    in_band: bool | None  # None: no request then


@dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """The blast radius."""

    requests: int  # of affected groups while the fault was active, with a twin
    excess: float | None
    noise: float | None  # share on which A and A' disagree; None: no second arm
    capacity_lost: float
    k: float | None  # None: no capacity was lost, or nothing to measure it on
    k_low: float | None
    k_high: float | None
    k_verdict: Verdict
    k_why: str
    spread: float | None  # S
    spread_of: int  # domains outside the scope
    spread_domains: tuple[str, ...]  # degraded ones
    spread_verdict: Verdict
    spread_why: str
    excess_p99_ms: float | None  # depth
    excess_recompute: float | None  # share of input tokens
    hit_drop: float | None
    hit_drop_expected: float | None
    amplification: float | None
    amplification_noise: float | None
    area_request_s: float | None  # lost request-seconds
    t_detect_s: float | None
    t_contain_s: float | None
    t_recover_s: float | None
    t_rewarm_s: float | None
    observed_after_s: float  # how long was looked on after the undo
    matrix: tuple[Cell, ...] = ()
    timeline: tuple[Point, ...] = ()
    not_concluded: tuple[str, ...] = ()
    harmed: dict[str, int] = field(default_factory=dict)  # {failed, wrong, late, recomputed: requests}


def capacity_lost(record: RunRecord) -> float:
    """The share of the affected groups' capacity that was gone while the fault was active, averaged over blocks."""
    blocks = block_faults(record)
    if not blocks:
        return 0.0
    scope = record.run.scope.capacity_share
    found = []
    for windows in blocks.values():
        begin = min(one.t_inject_ns for one in windows)
        ends = [one.t_end_ns for one in windows]
        end = max((one for one in ends if one is not None), default=begin)
        shares = [
            (one.capacity_share or scope / len(windows)) * one.lost_share * _fraction(one, begin, end)
            for one in windows
        ]
        found.append(min(1.0, sum(shares)))
    return float(np.mean(found))


def _fraction(one: FaultWindow, begin: int, end: int) -> float:
    """Of the block's fault window, how much this injection covers."""
    if one.t_end_ns is None or end <= begin:
        return 1.0
    return min(1.0, (one.t_end_ns - one.t_inject_ns) / (end - begin))


@lru_cache(maxsize=4)
def _measured(key: _ById) -> tuple[Pairs, Containment]:
    pairs = pair(key.record)
    return pairs, _measure(key.record, pairs)


class _ById:
    """A record as a key of the cache: several checkers need the same numbers, and rows are not hashable."""

    __slots__ = ("record",)

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    def __hash__(self) -> int:
        return id(self.record)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.record is self.record


def pairs_of(record: RunRecord) -> Pairs:
    """The record's pairs."""
    return _measured(_ById(record))[0]


def measure(record: RunRecord) -> Containment:
    """The numbers of one run."""
    return _measured(_ById(record))[1]


def _measure(record: RunRecord, pairs: Pairs) -> Containment:
    rng = np.random.default_rng(record.run.seed)
    bounds = record.run.bounds
    lost = capacity_lost(record)
    during = pairs.phase == Phase.DURING
    paired = pairs.fault.there & pairs.baseline.there
    again = pairs.control.there & pairs.baseline.there
    inside = during & paired & pairs.in_scope_group
    notes: list[str] = []

    worse = pairs.fault.degraded(pairs.baseline)
    noise_of = pairs.control.degraded(pairs.baseline) if again.any() else np.zeros(len(worse), dtype=bool)
    has_again = bool((inside & again).any())
    excess = low = high = noise = None
    if inside.any():
        noise = float(noise_of[inside & again].mean()) if has_again else None
        # A pair whose twin has no twin itself counts with the average disagreement.
        gain = worse.astype(np.float64) - np.where(again, noise_of, noise or 0.0)
        excess = float(gain[inside].mean())
        cells = [(gain[index].mean(), len(index)) for _, _, index in pairs.cells(inside)]
        low, high = mean_interval(
            np.array([mean for mean, _ in cells]), np.array([float(count) for _, count in cells]), rng=rng
        )
    k_verdict, k_why = _judge_k(
        excess,
        low,
        high,
        lost,
        int(inside.sum()),
        bounds.containment_ratio,
        noise,
    )
    k, k_low, k_high = (None if value is None or lost == 0 else value / lost for value in (excess, low, high))
    if not has_again and inside.any():
        notes.append(
            "no second arm without a fault: nothing is subtracted, and no harm can be called significant"
        )

    matrix, spread_domains, outside, spread_verdict, spread_why = _matrix(
        record, pairs, lost=lost, has_again=has_again, rng=rng, notes=notes
    )
    timeline, recovered, rewarmed, observed = _timeline(record, pairs)
    amplification, amplification_noise = _amplification(pairs, paired, again)
    fault_ttft, twin_ttft = pairs.fault.ttft_ms[inside], pairs.baseline.ttft_ms[inside]
    enough = min(np.count_nonzero(~np.isnan(fault_ttft)), np.count_nonzero(~np.isnan(twin_ttft)))
    tokens = float(pairs.fault.input[inside].sum())
    hit_twin = float(pairs.baseline.hit[inside].sum())
    return Containment(
        requests=int(inside.sum()),
        excess=excess,
        noise=noise,
        capacity_lost=lost,
        k=k,
        k_low=k_low,
        k_high=k_high,
        k_verdict=k_verdict,
        k_why=k_why,
        spread=len(spread_domains) / outside if outside else (0.0 if inside.any() else None),
        spread_of=outside,
        spread_domains=spread_domains,
        spread_verdict=spread_verdict,
        spread_why=spread_why,
        excess_p99_ms=float(np.nanquantile(fault_ttft, 0.99) - np.nanquantile(twin_ttft, 0.99))
        if enough >= P99_SAMPLES_MIN
        else None,
        excess_recompute=float(
            (pairs.fault.recomputed[inside] - pairs.baseline.recomputed[inside]).sum() / tokens
        )
        if tokens
        else None,
        hit_drop=1 - float(pairs.fault.hit[inside].sum()) / hit_twin if hit_twin else None,
        hit_drop_expected=lost if hit_twin else None,
        amplification=amplification,
        amplification_noise=amplification_noise,
        area_request_s=sum(one.harmed * one.requests for one in timeline) * BUCKET_S if timeline else None,
        t_detect_s=_detected(record),
        t_contain_s=_contained(
            pairs, worse, noise_of, noise, inside, bounds.containment_ratio * lost, record
        ),
        t_recover_s=recovered,
        t_rewarm_s=rewarmed,
        observed_after_s=observed,
        matrix=matrix,
        timeline=timeline,
        not_concluded=tuple(notes),
        harmed={
            "failed": int((pairs.fault.failed & inside).sum()),
            "wrong": int((pairs.fault.wrong & inside).sum()),
            "late": int((pairs.fault.late & inside).sum()),
            "recomputed": int(((pairs.fault.recomputed > pairs.baseline.recomputed) & inside).sum()),
        },
    )


def _judge_k(
    excess: float | None,
    low: float | None,
    high: float | None,
    lost: float,
    requests: int,
    bound: float,
    noise: float | None,
) -> tuple[Verdict, str]:
    if excess is None or low is None or high is None:
        return Verdict.UNKNOWN, "no request with a twin while the fault was active"
    if requests < CONTAINED_REQUESTS_MIN:
        return (
            Verdict.UNKNOWN,
            f"{requests} requests while the fault was active; {CONTAINED_REQUESTS_MIN} are needed",
        )
    if noise is not None and noise > NOISE_MAX:
        return Verdict.UNKNOWN, f"two arms without a fault disagree on {100 * noise:.0f} % of the requests"
    # Without lost capacity there is no ratio: then no request at all may be degraded, within the margin.
    limit = bound * lost if lost else SHARE_MARGIN
    what = f"K {excess / lost:.2f}" if lost else f"{100 * excess:.2f} % degraded"
    if excess <= limit:
        if high <= max(K_LOOSE * limit, SHARE_MARGIN):
            return Verdict.VALID, f"{what} within its bound"
        return Verdict.UNKNOWN, f"{what} is within its bound, but its interval is too wide: run longer"
    if low > limit and excess - limit > SHARE_MARGIN and noise is not None:
        return Verdict.INVALID, f"{what} is above its bound"
    return Verdict.UNKNOWN, f"{what} is above its bound, by less than noise can be told from"


def _windows(
    pairs: Pairs, mask: Mask, value: Callable[[ArmColumns, NDArray[np.int64]], float], left: Arm, right: Arm
) -> list[BlockPair]:
    """Window values of two arms, block by block, over requests that both have."""
    a, b = pairs.arm(left), pairs.arm(right)
    blocks: dict[int, tuple[list[float], list[float]]] = {}
    for block, _, index in pairs.cells(mask & a.there & b.there):
        first, second = value(a, index), value(b, index)
        if np.isfinite(first) and np.isfinite(second):
            lists = blocks.setdefault(block, ([], []))
            lists[0].append(first)
            lists[1].append(second)
    return [BlockPair(control=np.array(a), fault=np.array(b)) for a, b in blocks.values()]


def _degraded_windows(pairs: Pairs, mask: Mask, arm: Arm, *, harmed_only: bool) -> list[BlockPair]:
    """Degraded share of an arm against A, beside the same of A' against A where there is one."""
    one, base, again = pairs.arm(arm), pairs.baseline, pairs.control
    blocks: dict[int, tuple[list[float], list[float]]] = {}
    for block, _, index in pairs.cells(mask & one.there & base.there):
        worse = one.harmed if harmed_only else one.degraded(base)
        usual = (again.harmed if harmed_only else again.degraded(base)) & again.there
        lists = blocks.setdefault(block, ([], []))
        lists[0].append(float(usual[index].mean()))
        lists[1].append(float(worse[index].mean()))
    return [BlockPair(control=np.array(a), fault=np.array(b)) for a, b in blocks.values()]


def _success(one: ArmColumns, index: NDArray[np.int64]) -> float:
    return float(one.failed[index].mean())


def _ttft(share: float) -> Callable[[ArmColumns, NDArray[np.int64]], float]:
    def value(one: ArmColumns, index: NDArray[np.int64]) -> float:
        known = one.ttft_ms[index]
        known = known[~np.isnan(known)]
        return float(np.quantile(known, share)) if len(known) else float("nan")

    return value


def _token_share(name: str) -> Callable[[ArmColumns, NDArray[np.int64]], float]:
    def value(one: ArmColumns, index: NDArray[np.int64]) -> float:
        tokens = one.input[index].sum()
        return float(getattr(one, name)[index].sum() / tokens) if tokens else float("nan")

    return value


def _rpc(one: ArmColumns, index: NDArray[np.int64]) -> float:
    return float(one.rpcs[index].mean())


def _turned(found: list[BlockPair]) -> list[BlockPair]:
    """Windows of a quantity that is good when it is large: what is missing of one."""
    return [BlockPair(control=1 - pair.control, fault=1 - pair.fault) for pair in found]


def _matrix(
    record: RunRecord,
    pairs: Pairs,
    *,
    lost: float,
    has_again: bool,
    rng: np.random.Generator,
    notes: list[str],
) -> tuple[tuple[Cell, ...], tuple[str, ...], int, Verdict, str]:
    """Cells, the degraded domains outside the scope, how many there are, and the verdict on S with its reason."""
    run, bounds = record.run, record.run.bounds
    during = pairs.phase == Phase.DURING
    found: list[tuple[str, str, str, Comparison | None, float, float]] = []
    for domain_index, domain in enumerate(pairs.domains):
        mask = during & (pairs.domain == domain_index)
        # A whole scope group declared: everything in it is in scope.
        in_group = bool(mask.any() and pairs.in_scope_group[mask].all())
        allowed = bounds.containment_ratio * lost if in_group and run.scope.groups else 0.0
        for cls_index, cls in enumerate(pairs.classes):
            part = mask & (pairs.cls == cls_index)
            if not part.any():
                continue
            for metric in METRICS:
                comparison, margin = _compare(pairs, part, metric, bounds.latency_margin, rng=rng)
                found.append((domain, cls, metric, comparison, margin, allowed))
    corrected = holm([1.0 if one is None else one.p for _, _, _, one, _, _ in found])
    cells = []
    states: dict[str, list[Verdict]] = {}
    for (domain, cls, metric, comparison, margin, allowed), p in zip(found, corrected, strict=True):
        verdict = decide(comparison, margin=margin + allowed, p=p, calibrated=has_again)
        plain = decide(comparison, margin=margin, p=p, calibrated=has_again)
        expected = domain in run.scope.domains
        counts = metric not in ("rpc", "recompute", "hit") or not _affected(pairs, domain)
        if metric == "ttft_p99" and comparison is None:
            counts = False
            note = f"TTFT p99: fewer than {P99_SAMPLES_MIN:,} answers in a cell"
            if note not in notes:
                notes.append(note)
        if not expected and counts:
            states.setdefault(domain, []).append(verdict)
        state = {
            Verdict.VALID: "ok",
            Verdict.UNKNOWN: "unknown",
            Verdict.INVALID: "degraded-expected" if expected or not counts else "degraded-unexpected",
        }[verdict]
        if verdict is not Verdict.INVALID and plain is Verdict.INVALID:
            state = "degraded-expected"  # no more than what was taken away accounts for
        cells.append(_cell(domain, cls, metric, comparison, state, p))
    outside = [name for name in pairs.domains if name not in run.scope.domains and name in states]
    degraded = tuple(name for name in outside if worst(states[name]) is Verdict.INVALID)
    verdict = worst(one for name in outside for one in states[name])
    if degraded:
        why = f"{', '.join(degraded)} outside the scope degraded"
    elif not outside:
        why = "no domain outside the scope was watched"
    elif verdict is Verdict.UNKNOWN:
        some = [name for name in outside if worst(states[name]) is Verdict.UNKNOWN]
        why = f"too little to say that {', '.join(some)} did not notice"
        if len(pairs.blocks) < PAIRS_MIN:
            why += f": pairs of blocks: {len(pairs.blocks)}; {PAIRS_MIN} are needed"
    else:
        why = f"none of {len(outside)} domains outside the scope noticed"
    return tuple(cells), degraded, len(outside), verdict, why


def _affected(pairs: Pairs, domain: str) -> bool:
    mask = pairs.domain == pairs.domains.index(domain)
    return bool(pairs.in_scope_group[mask].all()) if mask.any() else False


def _compare(
    pairs: Pairs, part: Mask, metric: str, latency_margin: float, *, rng: np.random.Generator
) -> tuple[Comparison | None, float]:
    """One metric of one cell, a larger value being worse; with the margin that it is judged by."""
    none = part & False
    if metric == "degraded":
        windows = _degraded_windows(pairs, part, Arm.FAULT, harmed_only=False)
        # The control's disagreement is the reference here, so there is no third arm to compare it with.
        return compare(windows, (), relative=False, rng=rng, statistic="mean"), DEGRADED_MARGIN
    table: dict[str, tuple[Callable[[ArmColumns, NDArray[np.int64]], float], bool, float, str]] = {
        "success": (_success, False, SHARE_MARGIN, "mean"),
        "ttft_p50": (_ttft(0.5), True, latency_margin, "median"),
        "ttft_p99": (_ttft(0.99), True, latency_margin, "median"),
        "hit": (_token_share("hit"), False, SHARE_MARGIN, "mean"),
        "recompute": (_token_share("recomputed"), False, SHARE_MARGIN, "mean"),
        "rpc": (_rpc, True, 0.1, "mean"),
    }
    value, relative, margin, statistic = table[metric]
    if metric == "ttft_p99":
        answers = min(
            np.count_nonzero(~np.isnan(pairs.fault.ttft_ms[part])),
            np.count_nonzero(~np.isnan(pairs.baseline.ttft_ms[part])),
        )
        if answers < P99_SAMPLES_MIN:
            return None, margin
    windows = _windows(pairs, part, value, Arm.BASELINE, Arm.FAULT)
    again = _windows(pairs, part if pairs.control.there.any() else none, value, Arm.BASELINE, Arm.CONTROL)
    if metric == "hit":
        windows, again = _turned(windows), _turned(again)
    return compare(windows, again, relative=relative, rng=rng, statistic=statistic), margin


def _cell(domain: str, cls: str, metric: str, comparison: Comparison | None, state: str, p: float) -> Cell:
    def shown(value: float) -> float | None:
        if not np.isfinite(value):
            return None
        if metric in ("ttft_p50", "ttft_p99", "rpc"):
            return 1 + value
        return -value if metric in ("success", "hit") else value

    if comparison is None:
        return Cell(domain=domain, cls=cls, metric=metric, ratio=None, low=None, high=None, state="unknown")
    ends = [shown(comparison.low), shown(comparison.high)]
    if metric in ("success", "hit"):
        ends.reverse()
    return Cell(
        domain=domain,
        cls=cls,
        metric=metric,
        ratio=shown(comparison.effect),
        low=ends[0],
        high=ends[1],
        state=state,
        p=p,
    )


def _amplification(pairs: Pairs, paired: Mask, again: Mask) -> tuple[float | None, float | None]:
    """
    Calls per request, to the twins': the worse of while the fault was active and after it, so that neither a storm of
    retries nor one of reconnects is diluted. Beside it, how far two arms without a fault are apart.
    """
    found: list[tuple[float, float | None]] = []
    for phase in (Phase.DURING, Phase.AFTER):
        mask = (pairs.phase == phase) & paired
        usual = float(pairs.baseline.rpcs[mask].sum())
        if not usual or (phase is Phase.AFTER and int(mask.sum()) < AFTER_REQUESTS_MIN):
            continue
        both = mask & again
        noise = None
        if both.any() and pairs.baseline.rpcs[both].sum():
            noise = abs(float(pairs.control.rpcs[both].sum() / pairs.baseline.rpcs[both].sum()) - 1)
        found.append((float(pairs.fault.rpcs[mask].sum()) / usual, noise))
    return max(found, key=lambda one: one[0], default=(None, None))


def _detected(record: RunRecord) -> float | None:
    """Seconds from injection to the product's own first word, of the slowest block; None where one had none."""
    times = []
    for windows in block_faults(record).values():
        begin = min(one.t_inject_ns for one in windows)
        ends = [one.t_end_ns for one in windows]
        end = max(one or begin for one in ends) if None not in ends else None
        words = [
            event.t_ns
            for event in record.events
            if event.kind in DETECTED and event.t_ns >= begin and (end is None or event.t_ns <= end)
        ]
        if not words:
            return None
        times.append((min(words) - begin) / 1e9)
    return max(times, default=None)


def _contained(
    pairs: Pairs,
    worse: Mask,
    noise_of: Mask,
    noise: float | None,
    inside: Mask,
    limit: float,
    record: RunRecord,
) -> float | None:
    """Seconds after the injection from which on the rest of the fault's window stays within the bound."""
    if not inside.any():
        return None
    begin = _begin_s(record, pairs)
    after = np.floor((pairs.offset_s - begin) / BUCKET_S)[inside]
    gain = (worse.astype(np.float64) - (noise if noise is not None else 0.0))[inside]
    for start in range(int(after.max()) + 1):
        tail = gain[after >= start]
        if len(tail) and tail.mean() <= limit + SHARE_MARGIN:
            return float(start) * BUCKET_S
    return None


def _begin_s(record: RunRecord, pairs: Pairs) -> Array:
    """Of each request's block, when the injection began, in seconds after the block's start; ``[requests]``."""
    starts = {one.block: one.t_start_ns for one in record.blocks if one.arm is Arm.FAULT}
    first: dict[int, int] = {}
    for row in record.requests:
        if row.arm is Arm.FAULT:
            first.setdefault(row.block, row.t_intended_ns)
    begins = {
        block: (min(one.t_inject_ns for one in windows) - starts.get(block, first.get(block, 0))) / 1e9
        for block, windows in block_faults(record).items()
    }
    return np.array([begins.get(int(block), 0.0) for block in pairs.block])


def _timeline(record: RunRecord, pairs: Pairs) -> tuple[tuple[Point, ...], float | None, float | None, float]:
    """Second by second; with the time to recover, the time to rewarm, and how long was looked on, after the undo."""
    faults = block_faults(record)
    paired = pairs.fault.there & pairs.baseline.there & pairs.in_scope_group
    if not faults or not paired.any():
        return (), None, None, 0.0
    relative = pairs.offset_s - _begin_s(record, pairs)
    second = np.floor(relative / BUCKET_S).astype(np.int64)
    again = pairs.control.there & paired
    worse, harmed = pairs.fault.degraded(pairs.baseline), pairs.fault.harmed
    usual = pairs.control.harmed & again
    buckets = [
        (at, np.flatnonzero(paired & (second == at)))
        for at in range(int(second[paired].min()), int(second[paired].max()) + 1)
    ]
    # Latency is compared where as much was hit as by the twin: what is slower because it is cold is not warm again,
    # which has a time of its own.
    warm_hits = pairs.fault.recomputed <= pairs.baseline.recomputed
    noise = [
        _log_ratio(pairs.control.ttft_ms[index], pairs.baseline.ttft_ms[index])
        for _, whole in buckets
        if len(index := whole[again[whole]])
    ]
    known = [abs(one) for one in noise if np.isfinite(one)]
    # The band: what two arms without a fault do to each other in a second, and the margin.
    band = max(
        float(np.quantile(known, 0.99)) if known else 0.0, float(np.log1p(record.run.bounds.latency_margin))
    )
    usual_share = [float(usual[index].mean()) for _, index in buckets if len(index)]
    share_band = max([SHARE_MARGIN, *usual_share])
    points = []
    for at, index in buckets:
        if not len(index):
            points.append(_empty(at))
            continue
        alike = index[warm_hits[index]]
        ratio = _log_ratio(pairs.fault.ttft_ms[alike], pairs.baseline.ttft_ms[alike])
        in_band = float(harmed[index].mean()) <= share_band and (not np.isfinite(ratio) or ratio <= band)
        tokens = float(pairs.fault.input[index].sum())
        points.append(
            Point(
                t_s=at * BUCKET_S,
                requests=len(index),
                degraded=float(worse[index].mean()),
                harmed=float(harmed[index].mean()),
                hit=float(pairs.fault.hit[index].sum()) / tokens if tokens else None,
                hit_twin=float(pairs.baseline.hit[index].sum()) / tokens if tokens else None,
                ttft_ms=_median(pairs.fault.ttft_ms[index]),
                ttft_twin_ms=_median(pairs.baseline.ttft_ms[index]),
                in_band=in_band,
            )
        )
    end_s = (
        max(
            (one.t_end_ns - min(each.t_inject_ns for each in windows)) / 1e9
            for windows in faults.values()
            for one in windows
            if one.t_end_ns is not None
        )
        if any(one.t_end_ns for windows in faults.values() for one in windows)
        else None
    )
    if end_s is None:
        return tuple(points), None, None, 0.0
    after = [one for one in points if one.t_s >= np.ceil(end_s)]
    stay = max(1, round(record.run.bounds.stay_s / BUCKET_S))
    observed = (after[-1].t_s + BUCKET_S - end_s) if after else 0.0
    recovered = _first_stay([one.in_band for one in after], stay)
    warm = [
        None
        if one.hit is None or one.hit_twin is None
        else one.hit >= REWARM_SHARE * one.hit_twin - SHARE_MARGIN
        for one in after
    ]
    rewarmed = _first_stay(warm, stay)
    return tuple(points), recovered, rewarmed, observed


def _first_stay(good: list[bool | None], stay: int) -> float | None:
    """The first place from which ``stay`` in a row are good; None is neither good nor bad."""
    run = 0
    for place, one in enumerate(good):
        run = 0 if one is False else run + 1
        if run >= stay and any(good[place - run + 1 : place + 1]):
            return float(place - run + 1) * BUCKET_S
    return None


def _median(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _log_ratio(values: Array, twins: Array) -> float:
    """How much slower, as a logarithm: symmetric, so that bands are too; NaN where one side has no answer."""
    both = ~np.isnan(values) & ~np.isnan(twins) & (values > 0) & (twins > 0)
    return float(np.median(np.log(values[both] / twins[both]))) if both.any() else float("nan")


def _empty(at: int) -> Point:
    return Point(
        t_s=at * BUCKET_S,
        requests=0,
        degraded=0.0,
        harmed=0.0,
        hit=None,
        hit_twin=None,
        ttft_ms=None,
        ttft_twin_ms=None,
        in_band=None,
    )


def success_bound(pairs: Pairs, mask: Mask) -> tuple[int, int, float]:
    """Failed requests beyond those whose twin failed too, of how many, and the share that is certain."""
    both = mask & pairs.fault.there
    excused = pairs.baseline.failed & pairs.control.failed
    events = int((pairs.fault.failed & both & ~excused).sum())
    trials = int(both.sum())
    return events, trials, rate_bound(events=events, trials=trials)
