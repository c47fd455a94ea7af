"""Histories made by hand: a small pool on paper, its clients, its noise, and what a fault does to them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvops.chaos.history import (
    Arm,
    Block,
    Bounds,
    Content,
    Domain,
    Event,
    Fault,
    FaultState,
    Finish,
    Kind,
    Operation,
    Outcome,
    Request,
    Row,
    Run,
    RunRecord,
    Sample,
    Scope,
    Step,
    Tier,
    encode,
    read_run,
)

S = 1_000_000_000
MS = 1_000_000


def record(*rows: Row, run: Run | None = None) -> RunRecord:
    """A record of a few rows."""
    return read(b"".join(encode(row) for row in (run or Run(), *rows)))  # type: ignore[arg-type]


def read(data: bytes) -> RunRecord:
    """What a file of these bytes says."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(data)
        file.flush()
        return read_run(Path(file.name))


def get(op_id: str, key: str = "k", *, at: int, took: int = MS, **more: Any) -> Operation:
    """A read that hit."""
    values = {"client": "c", "reason": "HIT", "content": Content.WHOLE, "outcome": Outcome.OK, **more}
    return Operation(
        op_id=op_id, kind=Kind.GET, key=key, t_invoke_ns=at, t_return_ns=at + took if took else 0, **values
    )


def miss(op_id: str, key: str = "k", *, at: int, **more: Any) -> Operation:
    """A read that missed."""
    return get(op_id, key, at=at, reason="MISS", content=Content.UNCHECKED, **more)


def put(op_id: str, key: str = "k", value: str = "w:1", *, at: int, took: int = MS, **more: Any) -> Operation:
    """A put that was stored."""
    values = {"client": "c", "reason": "STORED", "outcome": Outcome.OK, **more}
    return Operation(
        op_id=op_id,
        kind=Kind.PUT,
        key=key,
        value=value,
        t_invoke_ns=at,
        t_return_ns=at + took if took else 0,
        **values,
    )


def other(kind: Kind, op_id: str, key: str = "k", *, at: int, took: int = MS, **more: Any) -> Operation:
    """Any other operation that happened."""
    values = {"client": "c", "outcome": Outcome.OK, **more}
    return Operation(op_id=op_id, kind=kind, key=key, t_invoke_ns=at, t_return_ns=at + took, **values)


@dataclass(frozen=True, kw_only=True)
class World:
    """What a simulated run is like; the defaults are a healthy pool that contains a lost store of three."""

    seed: int = 1
    blocks: int = 5
    rps: float = 60.0
    before_s: float = 6.0
    fault_s: float = 16.0
    after_s: float = 12.0
    window_s: float = 4.0
    arms: tuple[Arm, ...] = (Arm.CACHE_OFF, Arm.BASELINE, Arm.CONTROL, Arm.FAULT)
    groups: tuple[str, ...] = ("g1", "g2")
    capacity_share: float = 1 / 3
    lost_share: float = 1.0
    noise: float = 0.08  # of latency, a request
    drift: float = 0.06  # of latency, a window: what the machine does to all of them
    stall_share: float = 0.002  # of requests, held up by the machine
    flaky_share: float = 0.01  # of requests, that recompute a little in one arm and not in another
    # What the fault does, to requests of g1 while it is active:
    hit_loss: float | None = None  # share of requests that lose their hits; the capacity lost by default
    fail_share: float = 0.0
    late_share: float = 0.0
    slower: float = 1.0  # factor on everybody's time to first token
    spread_to: tuple[str, ...] = ()  # groups that feel it too, though they should not
    rpc_factor: float = 1.0
    stays_s: float = 1.0  # how long its effects outlast it
    wrong_share: float = 0.0
    quick: bool = False


def simulate(world: World) -> RunRecord:
    """The history of one run of this world; the same seed gives the same history."""
    rng = np.random.default_rng(world.seed)
    length_s = world.before_s + world.fault_s + world.after_s
    rows: list[Row] = [
        Run(
            run_id=f"sim-{world.seed}",
            title="a simulated run",
            seed=world.seed,
            group="g1",
            fault="process.kill",
            target="store-1",
            placement="local-first",
            domains=tuple(Domain(name=name, group=name) for name in world.groups),
            scope=Scope(groups=("g1",), domains=("g1",), hosts=("h1",), capacity_share=world.capacity_share),
            bounds=Bounds(),
            window_s=world.window_s,
            quick=world.quick,
            simulated=True,
        )
    ]
    clock_s = 100.0
    for block in range(world.blocks):
        count = int(world.rps * length_s)
        offsets = np.sort(rng.uniform(0, length_s, count))
        work = rng.lognormal(np.log(180.0), 0.5, count)  # ms without a hit
        share = np.clip(rng.beta(4, 2, count), 0, 0.97)  # of tokens that hit
        groups = rng.integers(0, len(world.groups), count)
        for arm in world.arms:
            rows += _arm(world, rng, arm, block, clock_s, offsets, work, share, groups)
            clock_s += length_s + 5
    rows.append(Step(t_ns=int(clock_s * S), name="recover"))
    rows.append(Finish(t_ns=int(clock_s * S)))
    return straight(rows)


def straight(rows: list[Row]) -> RunRecord:
    """The record of many rows, without the way through a file."""

    def only(kind: type[Any]) -> Any:
        return tuple(row for row in rows if isinstance(row, kind))

    return RunRecord(
        run=only(Run)[0],
        blocks=only(Block),
        faults=only(Fault),
        steps=only(Step),
        requests=tuple(sorted(only(Request), key=lambda row: row.t_intended_ns)),
        events=only(Event),
        samples=only(Sample),
        end=only(Finish)[-1],
    )


def _arm(
    world: World,
    rng: np.random.Generator,
    arm: Arm,
    block: int,
    start_s: float,
    offsets: Any,
    work: Any,
    share: Any,
    groups: Any,
) -> list[Row]:
    count, length_s = len(offsets), world.before_s + world.fault_s + world.after_s
    inject_s, undo_s = world.before_s, world.before_s + world.fault_s
    start = int(start_s * S)
    rows: list[Row] = [
        Block(
            arm=arm,
            block=block,
            t_start_ns=start,
            t_end_ns=start + int(length_s * S),
            seed=world.seed + block,
        )
    ]
    if arm is Arm.FAULT:
        rows += _fault(world, block, start + int(inject_s * S), start + int(undo_s * S))
    machine = rng.normal(1.0, world.drift, int(length_s / world.window_s) + 1)
    factor = machine[(offsets / world.window_s).astype(int)] * rng.lognormal(0, world.noise, count)
    stalled = rng.random(count) < world.stall_share
    hit = np.zeros(count) if arm is Arm.CACHE_OFF else share.copy()
    flaky = (rng.random(count) < world.flaky_share) & (hit > 0)
    hit[flaky] *= 0.8
    failed = np.zeros(count, dtype=bool)
    late = np.zeros(count, dtype=bool)
    wrong = np.zeros(count, dtype=bool)
    rpcs = np.full(count, 3.0)
    if arm is Arm.FAULT:
        felt = np.isin(
            groups, [world.groups.index(name) for name in ("g1", *world.spread_to) if name in world.groups]
        )
        felt &= (offsets >= inject_s) & (offsets < undo_s + world.stays_s)
        loss = world.capacity_share * world.lost_share if world.hit_loss is None else world.hit_loss
        hit[felt & (rng.random(count) < loss)] *= 0.1
        failed = felt & (rng.random(count) < world.fail_share)
        late = felt & (rng.random(count) < world.late_share)
        wrong = felt & (rng.random(count) < world.wrong_share)
        factor = np.where(felt, factor * world.slower, factor)
        rpcs = np.where(felt, rpcs * world.rpc_factor, rpcs)
    ttft = work * (1 - hit) * factor + 8 + np.where(stalled, 60, 0) + np.where(late, 5000, 0)
    for index in range(count):
        at = start + int(offsets[index] * S)
        name = world.groups[groups[index]]
        tokens = 4096
        rows.append(
            Request(
                request=f"r{index}",
                client=f"engine-{name}",
                outcome=Outcome.FAIL if failed[index] else Outcome.OK,
                t_intended_ns=at,
                t_start_ns=at,
                t_return_ns=at + int(ttft[index] * MS),
                arm=arm,
                block=block,
                group=name,
                host=f"h{1 + index % 3}",
                ttft_ms=float(ttft[index]),
                budget_ms=4000.0,
                input_tokens=tokens,
                l3_tokens=int(tokens * hit[index]),
                recomputed_tokens=0
                if arm is Arm.CACHE_OFF
                else int(tokens * max(0.0, share[index] - hit[index])),
                hit_blocks=0,
                rpcs=int(rpcs[index]),
                wrong_bytes=512 if wrong[index] else 0,
            )
        )
    return rows


def _fault(world: World, block: int, inject: int, undo: int) -> list[Row]:
    common: dict[str, Any] = {
        "fault": "process.kill",
        "target": "store-1",
        "group": "g1",
        "host": "h1",
        "block": block,
    }
    return [
        Fault(state=FaultState.INJECTING, t_ns=inject, commands=("kill -KILL 4711",), **common),
        Fault(
            state=FaultState.ACTIVE,
            t_ns=inject + 20 * MS,
            capacity_share=world.capacity_share,
            lost_share=world.lost_share,
            proof=("pidfd readable", "its port refuses"),
            control="store-2 answers",
            **common,
        ),
        Event(
            t_ns=inject + 300 * MS,
            kind="breaker.opened",
            subject="engine-g1",
            domain="store",
            node="store-1",
            group="g1",
        ),
        Fault(
            state=FaultState.UNDOING,
            t_ns=undo,
            commands=("kvops serve store --config store-1.yaml",),
            **common,
        ),
        Fault(state=FaultState.CLEAN, t_ns=undo + 50 * MS, **common),
        Event(
            t_ns=undo + 900 * MS,
            kind="breaker.half_open",
            subject="engine-g1",
            domain="store",
            node="store-1",
            group="g1",
        ),
        Event(
            t_ns=undo + 1000 * MS,
            kind="breaker.closed",
            subject="engine-g1",
            domain="store",
            node="store-1",
            group="g1",
        ),
    ]


def clean_operations() -> list[Row]:
    """Operations that keep every promise, and give every checker something to look at."""
    return [
        Block(arm=Arm.BASELINE, block=0, t_start_ns=0, t_end_ns=10 * S),
        Sample(
            t_ns=0,
            subject="store-1",
            phase="before",
            allocated_bytes=0,
            used_bytes=0,
            live_bytes=0,
            fds=20,
            reservations=0,
        ),
        Event(t_ns=1, kind="leader.observed", subject="m1", term=1, group="g1"),
        put(
            "p1",
            "a",
            "w:1",
            at=S,
            term=1,
            leader="m1",
            group="g1",
            digest="d1",
            node="store-1",
            deadline_ms=200,
        ),
        Event(t_ns=S + MS, kind="put.committed", key="a", op_id="p1", generation=5, node="store-1"),
        get(
            "g1",
            "a",
            at=2 * S,
            value="w:1",
            digest="d1",
            node="store-1",
            tier=Tier.L3,
            generation=5,
            lease_from_ns=2 * S,
            lease_until_ns=3 * S,
            request="r0",
            position=0,
            arm=Arm.BASELINE,
            deadline_ms=200,
        ),
        Request(
            request="r0",
            client="c",
            outcome=Outcome.OK,
            t_intended_ns=2 * S,
            t_return_ns=2 * S + 9 * MS,
            arm=Arm.BASELINE,
            blocks=2,
            hit_blocks=1,
            ttft_ms=9,
            budget_ms=1000,
        ),
        other(Kind.REMOVE, "rm1", "a", at=4 * S, term=1, leader="m1", group="g1"),
        miss("g2", "a", at=5 * S),
        put("p2", "a", "w:2", at=5 * S + 10 * MS, term=1, leader="m1", group="g1", digest="d2"),
        get("g3", "a", at=6 * S, value="w:2", digest="d2"),
        Event(t_ns=7 * S, kind="leader.observed", subject="m2", term=2, group="g1"),
        put("p3", "b", "w:3", at=7 * S + 10 * MS, term=2, leader="m2", group="g1"),
        put("q1", "reg", "w:4", at=S, cls="register"),
        get("q2", "reg", at=2 * S, value="w:4", cls="register"),
        Sample(
            t_ns=9 * S,
            subject="store-1",
            phase="quiet",
            allocated_bytes=64,
            used_bytes=64,
            live_bytes=64,
            fds=21,
            reservations=0,
        ),
        Finish(t_ns=10 * S),
    ]


def swap(rows: list[Row], op_id: str, **changes: Any) -> list[Row]:
    """The rows with one operation changed."""
    import msgspec

    return [
        msgspec.structs.replace(row, **changes) if isinstance(row, Operation) and row.op_id == op_id else row
        for row in rows
    ]


def changed(world: World, **changes: Any) -> World:
    """The world with some things otherwise."""
    return replace(world, **changes)
