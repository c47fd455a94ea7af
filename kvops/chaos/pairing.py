"""Requests of a fault arm beside their twins in the other arms, as arrays."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops.chaos.history import Arm, FaultWindow, Outcome, Request, RunRecord

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]

NS: Final = 1e-9
STALL_SLACK: Final = 0.1  # of the time, beyond the most that the arms without a fault were stalled
WAIT_FACTOR: Final = 1.5  # clients recompute what a fault took, so they may well wait longer than without


class Phase(IntEnum):
    """Where in its block a request was to arrive."""

    BEFORE = 0
    DURING = 1  # from injection to the proof that the fault is gone
    AFTER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmColumns:
    """One arm's side of all pairs, ``[requests]`` each; a request without a twin there has ``there`` False."""

    there: Mask
    failed: Mask
    wrong: Mask
    late: Mask
    ttft_ms: Array  # NaN: no answer
    recomputed: Array  # tokens
    hit: Array  # tokens
    input: Array  # tokens
    rpcs: Array
    retries: Array

    @property
    def harmed(self) -> Mask:
        """Failed, wrong or late: what no twin can excuse."""
        return self.failed | self.wrong | self.late

    def degraded(self, twin: ArmColumns) -> Mask:
        """Harmed, or recomputed tokens that its twin did not."""
        return self.harmed | (self.recomputed > twin.recomputed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """
    Every request of the fault arm with its twins.

    Without a fault arm the requests are those of the baseline, all of them ``BEFORE``.
    """

    request: tuple[str, ...]
    block: Ints  # [requests], like all that follow
    window: Ints  # within the block, counted from the injection: no window holds a change of phase
    phase: Ints
    offset_s: Array  # intended arrival after the block's start
    domain: Ints  # index into ``domains``
    cls: Ints  # index into ``classes``
    in_scope_group: Mask  # its group's capacity is what the fault takes
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    fault: ArmColumns
    baseline: ArmColumns
    control: ArmColumns
    cache_off: ArmColumns
    blocks: tuple[int, ...]  # valid ones
    invalid_blocks: tuple[str, ...]  # the others, with why
    unpaired: int  # baseline requests that nobody recorded in the fault arm

    def arm(self, arm: Arm) -> ArmColumns:
        """One arm's columns."""
        return {
            Arm.FAULT: self.fault,
            Arm.BASELINE: self.baseline,
            Arm.CONTROL: self.control,
            Arm.CACHE_OFF: self.cache_off,
        }[arm]

    def cells(self, mask: Mask) -> Iterator[tuple[int, int, Ints]]:
        """Block, window and the indices of the requests in it, for those that ``mask`` chooses."""
        chosen = np.flatnonzero(mask)
        if not len(chosen):
            return
        keys = np.stack([self.block[chosen], self.window[chosen]])
        order = np.lexsort((keys[1], keys[0]))
        keys, chosen = keys[:, order], chosen[order]
        cuts = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
        for part in np.split(np.arange(len(chosen)), cuts):
            yield int(keys[0, part[0]]), int(keys[1, part[0]]), chosen[part]


def block_faults(record: RunRecord) -> dict[int, list[FaultWindow]]:
    """The proven injections of each block."""
    found: dict[int, list[FaultWindow]] = {}
    for window in record.fault_windows():
        if window.t_active_ns is not None:
            found.setdefault(window.block, []).append(window)
    return found


def pair(record: RunRecord) -> Pairs:
    """Put the requests of all arms beside each other by block and request."""
    tables: dict[Arm, dict[tuple[int, str], Request]] = {arm: {} for arm in Arm}
    for row in record.requests:
        if row.cut_short:
            continue
        tables[row.arm][row.block, row.request] = row
    starts = {(one.arm, one.block): one.t_start_ns for one in record.blocks}
    invalid = invalid_blocks(record)
    leading = Arm.FAULT if tables[Arm.FAULT] else Arm.BASELINE
    rows = [row for (block, _), row in tables[leading].items() if block not in invalid]
    faults = block_faults(record)
    first: dict[int, int] = {}
    for row in rows:
        first[row.block] = min(first.get(row.block, row.t_intended_ns), row.t_intended_ns)
    start_ns = {block: starts.get((leading, block), first[block]) for block in first}

    domains: dict[str, int] = {domain.name: index for index, domain in enumerate(record.run.domains)}
    classes: dict[str, int] = {}
    phase, window, domain, cls = [], [], [], []
    width_ns = max(1, int(record.run.window_s * 1e9))
    for row in rows:
        begin, end = _span(faults.get(row.block, []))
        at = row.t_intended_ns
        if begin is None or at < begin:
            phase.append(Phase.BEFORE)
            origin = start_ns[row.block]
        elif end is None or at < end:
            phase.append(Phase.DURING)
            origin = begin
        else:
            phase.append(Phase.AFTER)
            origin = end
        window.append(1000 * phase[-1] + (at - origin) // width_ns)
        name = record.domain_of(row.group, row.host)
        domain.append(domains.setdefault(name, len(domains)))
        cls.append(classes.setdefault(row.cls, len(classes)))
    scope = record.run.scope
    keys = [(row.block, row.request) for row in rows]
    return Pairs(
        request=tuple(row.request for row in rows),
        block=np.array([row.block for row in rows], dtype=np.int64),
        window=np.array(window, dtype=np.int64),
        phase=np.array(phase, dtype=np.int64),
        offset_s=np.array([(row.t_intended_ns - start_ns[row.block]) * NS for row in rows]),
        domain=np.array(domain, dtype=np.int64),
        cls=np.array(cls, dtype=np.int64),
        in_scope_group=np.array([not scope.groups or row.group in scope.groups for row in rows], dtype=bool),
        domains=tuple(domains),
        classes=tuple(classes),
        fault=_columns(tables[Arm.FAULT], keys),
        baseline=_columns(tables[Arm.BASELINE], keys),
        control=_columns(tables[Arm.CONTROL], keys),
        cache_off=_columns(tables[Arm.CACHE_OFF], keys),
        blocks=tuple(sorted(first)),
        invalid_blocks=tuple(invalid.values()),
        unpaired=sum(1 for key in tables[Arm.BASELINE] if key[0] in first and key not in tables[Arm.FAULT])
        if leading is Arm.FAULT
        else 0,
    )


def invalid_blocks(record: RunRecord) -> dict[int, str]:
    """
    Blocks that do not count, with why: by whoever ran them, or because the machine stalled beyond its usual.

    Its usual is the most that an arm without a fault was stalled: the machine as a whole, and the clients themselves.
    """
    waits = _client_waits(record)
    quiet = [one for one in record.blocks if one.arm in (Arm.BASELINE, Arm.CONTROL)]
    most = max((one.cpu_stall_share for one in quiet), default=1.0)
    most_wait = max((waits.get((one.arm, one.block), 0.0) for one in quiet), default=1.0)
    found = {}
    for one in record.blocks:
        why = one.invalid
        if one.arm is Arm.FAULT and not why:
            wait = waits.get((one.arm, one.block), 0.0)
            if one.cpu_stall_share > most + STALL_SLACK:
                why = f"CPU stalled {100 * one.cpu_stall_share:.0f} % of the time, at most {100 * most:.0f} % without"
            elif wait > WAIT_FACTOR * most_wait + STALL_SLACK:
                why = f"clients waited for a CPU {100 * wait:.0f} % of it, at most {100 * most_wait:.0f} % without"
        if why:
            found[one.block] = f"block {one.block} {one.arm} does not count: {why}"
    return found


def wanting(record: RunRecord, blocks: int) -> str:
    """Why a further block is to be run until so many count; empty when they do."""
    have = {one.block for one in record.blocks}
    invalid = invalid_blocks(record)
    return list(invalid.values())[-1] if len(have) - len(invalid) < blocks and invalid else ""


def _client_waits(record: RunRecord) -> dict[tuple[Arm, int], float]:
    """The share of the time in which clients were ready to run and had no CPU, by stretch of load."""
    seen = sorted(
        (one.t_ns, one.cpu_stall_share)
        for one in record.samples
        if one.role == "client" and one.cpu_stall_share is not None
    )
    times = [at for at, _ in seen]
    found = {}
    for block in record.blocks:
        part = seen[bisect_left(times, block.t_start_ns) : bisect_right(times, block.t_end_ns)]
        if part:
            found[block.arm, block.block] = float(np.mean([share for _, share in part]))
    return found


def _span(windows: list[FaultWindow]) -> tuple[int | None, int | None]:
    """From the first injection to the last that is gone; no end while one is not."""
    if not windows:
        return None, None
    ends = [one.t_end_ns for one in windows]
    return min(one.t_inject_ns for one in windows), None if None in ends else max(end for end in ends if end)


def is_late(row: Request) -> bool:
    """Later than its declared budget, or never answered."""
    return row.t_return_ns == 0 or 0 < row.budget_ms < row.ttft_ms


def _columns(table: dict[tuple[int, str], Request], keys: list[tuple[int, str]]) -> ArmColumns:
    rows = [table.get(key) for key in keys]
    count = len(rows)
    there = np.array([row is not None for row in rows], dtype=bool)

    def numbers(name: str) -> Array:
        return np.array([0.0 if row is None else getattr(row, name) for row in rows], dtype=np.float64)

    failed = np.array([row is not None and row.outcome is not Outcome.OK for row in rows], dtype=bool)
    ttft = numbers("ttft_ms") if count else np.zeros(0)
    ttft[failed | ~there] = np.nan
    return ArmColumns(
        there=there,
        failed=failed,
        wrong=numbers("wrong_bytes") > 0,
        late=np.array([row is not None and is_late(row) for row in rows], dtype=bool),
        ttft_ms=ttft,
        recomputed=numbers("recomputed_tokens"),
        hit=numbers("l1_tokens") + numbers("l2_tokens") + numbers("l3_tokens"),
        input=numbers("input_tokens"),
        rpcs=numbers("rpcs"),
        retries=numbers("retries"),
    )
