"""What noisy windows can prove, and what they cannot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.chaos.checkers.model import Verdict, worst
from kvops.chaos.statistics import BlockPair, compare, confirmed, decide, holm, mean_interval, rate_bound


def pairs(
    rng: np.random.Generator, *, effect: float, blocks: int = 5, windows: int = 6, noise: float = 0.07
) -> list[BlockPair]:
    """Windows around 100 with the noise of a small shared machine; the fault's are ``effect`` times as high."""
    found = []
    for _ in range(blocks):
        level = 100 * rng.normal(1, 0.1)
        found.append(
            BlockPair(
                control=level * rng.normal(1, noise, windows),
                fault=effect * level * rng.normal(1, noise, windows),
            )
        )
    return found


@pytest.mark.parametrize(
    ("effect", "blocks", "verdict"),
    [
        (1.0, 5, Verdict.VALID),
        (1.6, 5, Verdict.INVALID),
        (1.6, 4, Verdict.UNKNOWN),
        (1.22, 5, Verdict.UNKNOWN),
    ],
    ids=["same", "slower", "too-few-blocks", "near-the-margin"],
)
def test_effect_and_significance_together(effect: float, blocks: int, verdict: Verdict) -> None:
    """Harm needs enough blocks, significance and an effect beyond the margin; near the margin nothing is known."""
    rng = np.random.default_rng(5)
    found = compare(pairs(rng, effect=effect, blocks=blocks), pairs(rng, effect=1.0), relative=True, rng=rng)

    assert decide(found, margin=0.25) is verdict


def test_noise_between_quiet_arms_raises_the_bar() -> None:
    """An effect no larger than what two quiet arms differ by is no harm, however significant; without them neither."""
    rng = np.random.default_rng(5)
    slower = pairs(rng, effect=1.6)

    as_noisy = compare(slower, pairs(rng, effect=1.9), relative=True, rng=rng)
    alone = compare(slower, (), relative=True, rng=rng)

    assert decide(as_noisy, margin=0.25) is Verdict.UNKNOWN
    assert decide(alone, margin=0.25, calibrated=False) is Verdict.UNKNOWN
    assert decide(None, margin=0.25) is Verdict.UNKNOWN


def test_same_seed_same_answer() -> None:
    """A judgement can be repeated: the same windows and seed give the same numbers."""
    first, second = (
        compare(pairs(np.random.default_rng(1), effect=1.1), (), relative=True, rng=np.random.default_rng(2))
        for _ in range(2)
    )

    assert first == second


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_never_makes_a_p_value_smaller(values: list[float]) -> None:
    """Corrected values are at least the raw ones, at most 1, and keep their order."""
    adjusted = holm(values)

    assert all(raw <= corrected <= 1 for raw, corrected in zip(values, adjusted, strict=True))
    by_raw = [corrected for _, corrected in sorted(zip(values, adjusted, strict=True))]
    assert by_raw == sorted(by_raw)


@pytest.mark.parametrize(
    ("events", "trials", "below"),
    [(0, 3000, 0.00101), (0, 2999, 0.00101), (3, 3000, 0.0031), (0, 0, 1.0), (5, 5, 1.0)],
)
def test_rule_of_three(events: int, trials: int, below: float) -> None:
    """An error rate below 0.1 % needs 3,000 clean requests; nothing at all bounds nothing."""
    assert events / max(1, trials) <= rate_bound(events=events, trials=trials) <= below


def test_interval_of_a_mean_holds_it() -> None:
    """The interval of a weighted mean holds the mean, and is not a number where there is nothing."""
    rng = np.random.default_rng(3)
    values = rng.normal(0.3, 0.05, 40)

    low, high = mean_interval(values, np.ones(40), rng=rng)

    assert low < values.mean() < high
    assert high - low < 0.05
    assert all(np.isnan(mean_interval(np.zeros(0), np.zeros(0), rng=rng)))


def test_a_pipeline_fails_on_the_third_time() -> None:
    """A latency verdict fails a pipeline when three runs in a row failed, not before."""
    assert [confirmed(runs) for runs in ([True, True], [True, True, True], [True, False, True, True])] == [
        False,
        True,
        False,
    ]


def test_invalid_outweighs_unknown_outweighs_valid() -> None:
    """One counter-example is enough; one unknown spoils a pass."""
    assert worst([Verdict.VALID, Verdict.UNKNOWN, Verdict.INVALID]) is Verdict.INVALID
    assert worst([Verdict.VALID, Verdict.UNKNOWN]) is Verdict.UNKNOWN
    assert worst([]) is Verdict.VALID
