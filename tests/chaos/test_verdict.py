"""What a run's numbers say, which verdict outweighs which, and that noise alone fails nobody."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest

from kvops.chaos.containment import measure
from kvops.chaos.history import (
    Arm,
    Block,
    End,
    Fault,
    FaultState,
    Finish,
    Gap,
    Outcome,
    Run,
    RunRecord,
    Sample,
    Scope,
    Step,
)
from kvops.chaos.pairing import wanting
from kvops.chaos.verdict import EXIT_CODES, Judgement, RunVerdict, judge
from tests.chaos.histories import World, changed, get, record, simulate

SHORT = World(rps=64, before_s=3, fault_s=14, after_s=8, window_s=3.5)
HARM = dataclasses.replace(SHORT, rps=24)


@cache
def judged(world: World = SHORT) -> Judgement:
    return judge(simulate(world))


def of(**changes: Any) -> Judgement:
    return judged(changed(SHORT, **changes))


def said(judgement: Judgement, checker: str) -> str:
    return next(str(one.result.verdict) for one in judgement.checkers if one.checker.id == checker)


def replaced(record_: RunRecord, **changes: Any) -> RunRecord:
    return dataclasses.replace(record_, **changes)


def test_contained_fault_passes_with_its_numbers() -> None:
    """One store of three lost, each request losing hits with that chance: K is about 1, S is 0, all recovers."""
    judgement = of()
    numbers = judgement.containment

    assert judgement.verdict is RunVerdict.PASS, judgement.reasons
    assert numbers.k is not None
    assert 0.8 < numbers.k < 1.2
    assert numbers.k_low is not None
    assert numbers.k_high is not None
    assert numbers.k_low < numbers.k < numbers.k_high
    assert (numbers.spread, numbers.spread_of) == (0.0, 1)
    assert numbers.capacity_lost == pytest.approx(1 / 3)
    assert numbers.t_detect_s == pytest.approx(0.3)
    assert numbers.amplification == pytest.approx(1.0)
    assert numbers.t_recover_s is not None
    assert numbers.t_recover_s <= 2
    assert {cell.state for cell in numbers.matrix if cell.domain == "g2"} == {"ok"}
    assert "degraded-expected" in {cell.state for cell in numbers.matrix if cell.domain == "g1"}
    assert "degraded-unexpected" not in {cell.state for cell in numbers.matrix}


@pytest.mark.parametrize(
    ("changes", "checker"),
    [
        ({"hit_loss": 0.8}, "C1"),
        ({"spread_to": ("g2",)}, "C1"),
        ({"slower": 1.8, "hit_loss": 0.0, "spread_to": ("g2",)}, "C1"),
        ({"fail_share": 0.02}, "C1"),
        ({"rpc_factor": 3.0}, "C2"),
        ({"slower": 8.0}, "C4"),
        ({"late_share": 0.2, "hit_loss": 0.0}, "C4"),
        ({"slower": 3.0, "stays_s": 60.0, "after_s": 24.0}, "L1"),
        ({"wrong_share": 0.01}, "S1"),
    ],
    ids=[
        "amplified",
        "spread",
        "slow neighbours",
        "failed",
        "retries",
        "worse than none",
        "late",
        "stuck",
        "wrong",
    ],
)
def test_each_harm_is_found(changes: dict[str, Any], checker: str) -> None:
    """Harm of each kind fails the run, by the checker whose promise it breaks."""
    judgement = judge(simulate(changed(HARM, **changes)))

    assert judgement.verdict is RunVerdict.FAIL
    assert said(judgement, checker) == "invalid"
    assert judgement.safety is (checker == "S1")


def test_slow_target_counts_for_the_time_it_was_gone() -> None:
    """A store of three that was paused a fifth of the time has taken a fifteenth away, and K is measured by that."""
    contained, not_contained = of(lost_share=0.2), of(lost_share=0.2, hit_loss=1 / 3)

    assert contained.containment.capacity_lost == pytest.approx(1 / 15)
    assert contained.verdict is RunVerdict.PASS, contained.reasons
    assert not_contained.containment.k == pytest.approx(5, abs=0.8)
    assert not_contained.verdict is RunVerdict.FAIL


def test_disagreement_of_two_quiet_arms_is_subtracted() -> None:
    """Where a tenth of the requests recompute something in one arm and not in the other, K is still about 1."""
    numbers = of(flaky_share=0.1).containment

    assert numbers.noise is not None
    assert numbers.noise > 0.05
    assert numbers.k is not None
    assert 0.75 < numbers.k < 1.2


def test_retries_are_counted_where_clients_record_them() -> None:
    """More than a tenth of the calls being retries breaks the budget, though there are no more calls than before."""
    good = simulate(HARM)
    rows = tuple(
        msgspec.structs.replace(row, retries=1 if row.arm is Arm.FAULT else 0) for row in good.requests
    )
    judgement = judge(replaced(good, requests=rows))

    assert judgement.containment.amplification == pytest.approx(1.0)
    assert said(judgement, "C2") == "invalid"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_noise_alone_fails_nobody() -> None:
    """A hundred runs in which the fault does nothing, on machines of several tempers: at most one FAIL."""
    tempers: list[dict[str, Any]] = [
        {},
        {"drift": 0.2},
        {"noise": 0.4, "flaky_share": 0.05},
        {"stall_share": 0.03, "drift": 0.12},
    ]
    verdicts = Counter(
        judge(
            simulate(
                World(
                    seed=seed,
                    hit_loss=0.0,
                    rps=16,
                    before_s=1,
                    fault_s=8,
                    after_s=4,
                    window_s=2,
                    arms=(Arm.BASELINE, Arm.CONTROL, Arm.FAULT),
                    **tempers[seed % len(tempers)],
                )
            )
        ).verdict
        for seed in range(100)
    )

    assert verdicts.total() == 100
    assert verdicts[RunVerdict.FAIL] <= 1, verdicts
    assert set(verdicts) <= {RunVerdict.PASS, RunVerdict.UNKNOWN, RunVerdict.FAIL}


@pytest.mark.parametrize("drift", [0.06, 0.15])
def test_enough_quiet_data_pass(drift: float) -> None:
    """A fault that does nothing, seen long enough, is a PASS and not an eternal UNKNOWN, on a restless machine too."""
    assert of(hit_loss=0.0, drift=drift).verdict is RunVerdict.PASS


def test_too_little_data_are_unknown_and_quick_says_what_is_missing() -> None:
    """Two blocks prove nothing; a quick run may pass, and names what it could not conclude."""
    few = of(blocks=2)
    quick = of(blocks=1, quick=True, arms=(Arm.BASELINE, Arm.FAULT))

    assert few.verdict is RunVerdict.UNKNOWN
    assert "5 are needed" in few.reasons[0]
    assert quick.verdict is RunVerdict.PASS
    assert any("no second arm" in note for note in quick.not_concluded)
    assert any("clean requests" in note for note in quick.not_concluded)


@pytest.mark.parametrize("share", [0.9, 0.02])
def test_quick_run_still_finds_harm(share: float) -> None:
    """Without a second arm nothing is called significant, and a K far above its bound is never a PASS."""
    quick = of(blocks=1, quick=True, arms=(Arm.BASELINE, Arm.FAULT), hit_loss=share)

    assert (quick.verdict is RunVerdict.PASS) is (share < 0.1)


ACTIVE = Fault(state=FaultState.ACTIVE, t_ns=2, fault="f", target="t", proof=("seen",))
UNDONE = [
    Fault(state=FaultState.UNDOING, t_ns=3, fault="f", target="t"),
    Fault(state=FaultState.CLEAN, t_ns=4, fault="f", target="t"),
]
BEGUN = Fault(state=FaultState.INJECTING, t_ns=1, fault="f", target="t", commands=("kill",))
NOT_ACTIVE = Fault(state=FaultState.NOT_ACTIVE, t_ns=2, fault="f", target="t", why="state S, not T")
DIRTY = Fault(state=FaultState.DIRTY, t_ns=4, fault="f", target="t", commands=("nft delete table x",))
WRONG = get("g", at=1, content="flipped")
UNSTEADY = Step(t_ns=0, name="baseline", ok=False, text="success 91 %")


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([BEGUN, ACTIVE, DIRTY, WRONG, Finish(t_ns=9, end=End.ABORTED)], RunVerdict.DIRTY),
        ([BEGUN, ACTIVE, *UNDONE, Finish(t_ns=9, undone=False, left=("rm x",))], RunVerdict.DIRTY),
        ([BEGUN, ACTIVE, WRONG], RunVerdict.DIRTY),
        ([BEGUN, ACTIVE, *UNDONE, WRONG, Finish(t_ns=9, end=End.INTERRUPTED)], RunVerdict.FAIL),
        ([BEGUN, ACTIVE, *UNDONE, WRONG, Finish(t_ns=9, end=End.ABORTED)], RunVerdict.FAIL),
        ([BEGUN, ACTIVE, *UNDONE, Finish(t_ns=9, end=End.INTERRUPTED)], RunVerdict.INTERRUPTED),
        ([BEGUN, NOT_ACTIVE, *UNDONE, Finish(t_ns=9, end=End.ABORTED)], RunVerdict.ABORTED),
        ([Finish(t_ns=9, end=End.UNSUPPORTED, why="no sch_netem")], RunVerdict.UNSUPPORTED),
        ([UNSTEADY, BEGUN, NOT_ACTIVE, *UNDONE, Finish(t_ns=9)], RunVerdict.NOT_INJECTED),
        (
            [BEGUN, msgspec.structs.replace(ACTIVE, proof=()), *UNDONE, Finish(t_ns=9)],
            RunVerdict.NOT_INJECTED,
        ),
        (
            [Block(arm=Arm.FAULT, block=1, t_start_ns=0), BEGUN, ACTIVE, *UNDONE, Finish(t_ns=9)],
            RunVerdict.NOT_INJECTED,
        ),
        ([Finish(t_ns=9)], RunVerdict.NOT_INJECTED),
        ([UNSTEADY, BEGUN, ACTIVE, *UNDONE, Finish(t_ns=9)], RunVerdict.BASELINE_NOT_STEADY),
        ([Finish(t_ns=9, end=End.NOT_STEADY, why="success 91 %")], RunVerdict.BASELINE_NOT_STEADY),
        ([BEGUN, ACTIVE, *UNDONE, Finish(t_ns=9)], RunVerdict.UNKNOWN),
        ([BEGUN, ACTIVE, *UNDONE], RunVerdict.UNKNOWN),
    ],
)
def test_precedence(rows: list[Any], verdict: RunVerdict) -> None:
    """Of all that applies the loudest is the verdict, and nothing without a proven injection passes."""
    judgement = judge(record(*rows))

    assert judgement.verdict is verdict
    assert judgement.exit_code == EXIT_CODES[verdict]
    assert judgement.reasons[0]


def test_dirty_names_the_commands_for_a_person() -> None:
    """What is left behind comes with the commands that take it away."""
    judgement = judge(record(BEGUN, ACTIVE, DIRTY, Finish(t_ns=9, undone=False, left=("ip netns del x",))))

    assert judgement.left == ("nft delete table x", "ip netns del x")
    assert not judgement.undone


def test_no_op_injector_never_passes() -> None:
    """A run in which the clients were well because nothing was injected is NOT_INJECTED, however good its numbers."""
    good = simulate(SHORT)
    unproven = tuple(
        msgspec.structs.replace(row, state=FaultState.NOT_ACTIVE) if row.state is FaultState.ACTIVE else row
        for row in good.faults
    )
    one = next(row for row in good.faults if row.state is FaultState.ACTIVE)
    all_but_one = tuple(row for row in good.faults if row is not one)

    assert judge(replaced(good, faults=unproven)).verdict is RunVerdict.NOT_INJECTED
    assert judge(replaced(good, faults=())).verdict is RunVerdict.NOT_INJECTED
    assert judge(replaced(good, faults=all_but_one)).verdict is RunVerdict.NOT_INJECTED


def test_missing_rows_and_invalid_blocks_are_told() -> None:
    """Rows that were lost and windows that do not count are named in the notes."""
    good = simulate(SHORT)
    blocks = (msgspec.structs.replace(good.blocks[0], invalid="CPU stalled 40 %"), *good.blocks[1:])
    judgement = judge(
        replaced(good, gaps=(Gap(writer="c", rows=5, why="No space left on device"),), blocks=blocks)
    )

    assert judgement.verdict is RunVerdict.UNKNOWN  # four blocks are left
    assert any("CPU stalled 40 %" in note for note in judgement.notes)
    assert any("5 rows" in note for note in judgement.notes)


def test_rows_that_are_missing_are_no_pass() -> None:
    """Of a run that would pass, but whose history has a gap, nothing is certain: UNKNOWN, and why is said."""
    gap = Gap(writer="c", rows=5, why="No space left on device")
    judgement = judge(replaced(simulate(SHORT), gaps=(gap,)))

    assert judgement.verdict is RunVerdict.UNKNOWN
    assert "5 rows could not be written: No space left on device" in judgement.reasons


def test_stalled_machine_makes_a_block_invalid() -> None:
    """A fault block in which the machine stalled far beyond the quiet arms' worst does not count, and is named."""
    good = simulate(HARM)
    blocks = tuple(
        msgspec.structs.replace(row, cpu_stall_share=0.5 if (row.arm, row.block) == (Arm.FAULT, 2) else 0.05)
        for row in good.blocks
    )
    judgement = judge(replaced(good, blocks=blocks))

    assert any("block 2 fault does not count: CPU stalled 50 %" in note for note in judgement.notes)
    assert judgement.containment.requests < judge(good).containment.requests


def test_clients_without_a_cpu_make_a_block_invalid_and_another_is_wanted() -> None:
    """Where clients waited for a CPU far longer than in any quiet arm a block does not count; one more is to be run."""
    good = simulate(HARM)
    waits = tuple(
        Sample(
            t_ns=row.t_start_ns + at,
            subject="engine-g1",
            role="client",
            cpu_stall_share=0.6 if (row.arm, row.block) == (Arm.FAULT, 1) else 0.2,
        )
        for row in good.blocks
        for at in range(0, row.t_end_ns - row.t_start_ns, 1_000_000_000)
    )
    stalled = replaced(good, samples=waits)

    assert "block 1 fault does not count: clients waited for a CPU 60 %" in wanting(stalled, 5)
    assert judge(stalled).containment.requests < judge(good).containment.requests
    assert wanting(stalled, 4) == ""
    assert wanting(good, 5) == ""


def test_two_quiet_arms_that_disagree_prove_nothing() -> None:
    """Where half of the requests differ between two arms without a fault, no difference is a measure of a fault's."""
    numbers = of(flaky_share=0.5, hit_loss=0.6).containment

    assert numbers.noise is not None
    assert numbers.noise > 0.2
    assert numbers.k_verdict == "unknown"
    assert "disagree" in numbers.k_why


def test_a_load_that_ends_before_the_undo_says_nothing_of_recovery() -> None:
    """A quick run names it; a whole one has not passed."""
    world = dataclasses.replace(HARM, after_s=0.0)
    whole, quick = judged(world), judged(dataclasses.replace(world, quick=True, blocks=1))

    assert whole.verdict is RunVerdict.UNKNOWN
    assert any("the load ended before the undo" in why for why in whole.reasons)
    assert any("the load ended before the undo" in why for why in quick.not_concluded)
    assert not any("the load ended before the undo" in why for why in quick.reasons)


def test_a_request_that_fails_after_the_undo_has_failed() -> None:
    """The fault is gone, its harm is not: what fails until the load ends counts."""
    late = judged(dataclasses.replace(HARM, fail_share=0.0, stays_s=1.0))
    good = simulate(HARM)
    end_ns = max(row.t_ns for row in good.faults if row.block == 0)
    rows = tuple(
        msgspec.structs.replace(row, outcome=Outcome.FAIL)
        if row.arm is Arm.FAULT and row.block == 0 and row.t_intended_ns > end_ns
        else row
        for row in good.requests
    )

    assert said(late, "C1") != "invalid"
    assert said(judge(replaced(good, requests=rows)), "C1") == "invalid"


def test_cold_is_not_broken() -> None:
    """What is slower only because its hits are gone has recovered; until the hits are back it is not warm."""
    slow_to_warm = judge(simulate(changed(HARM, hit_loss=0.9, capacity_share=0.9, stays_s=6, after_s=16)))

    assert slow_to_warm.containment.t_recover_s is not None
    assert slow_to_warm.containment.t_recover_s <= 2
    assert slow_to_warm.containment.t_rewarm_s == pytest.approx(6, abs=1)


def test_whole_group_lost_leaves_the_other_alone() -> None:
    """With a group's whole capacity gone each of its requests may recompute; the other group must not notice."""
    good = simulate(changed(SHORT, capacity_share=1.0, hit_loss=1.0))
    run = msgspec.structs.replace(good.run, scope=Scope(groups=("g1",), domains=("g1",), capacity_share=1.0))
    numbers = measure(replaced(good, run=run))

    assert numbers.k == pytest.approx(1.0, abs=0.05)
    assert numbers.spread == 0
    assert judge(replaced(good, run=run)).verdict is RunVerdict.PASS


def test_history_without_requests_is_judged() -> None:
    """Safety needs no load: a history of operations alone has a verdict for each checker and no numbers."""
    judgement = judge(record(WRONG, run=Run()))

    assert judgement.verdict is RunVerdict.FAIL
    assert judgement.containment.k is None
