"""
What noisy windows can prove: interleaved blocks, a permutation test, an effect, and "too little to say".

A comparison has two samples of window values per block, one of each arm; arms of one block have the same seed and
lie beside each other in time. Harm is claimed only when it is significant *and* larger than a margin *and* larger
than what two arms without a fault disagree on; harmlessness only when the interval's upper end lies below the
margin. Everything else is unknown. Random choices come from the generator that the caller seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops.chaos.checkers.model import Verdict

Array = NDArray[np.float64]

ALPHA: Final = 0.05
ROUNDS: Final = 1000  # permutations and resamplings; p has a resolution of 0.001
PAIRS_MIN: Final = 5  # blocks with both arms
P99_SAMPLES_MIN: Final = 1000  # in a cell; no verdict rests on p99.9
CONFIRMATIONS: Final = 3  # runs in a row before a latency verdict may fail a pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPair:
    """The window values of one block, ``[windows]`` each; the same place is the same window of the load."""

    control: Array
    fault: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How one quantity differs between two arms."""

    effect: float  # fault − control, or fault ÷ control − 1
    low: float  # of the 95 % interval
    high: float
    p: float  # one-sided: how often chance alone makes as large an effect
    noise: float  # as large an effect was seen between two arms without a fault
    blocks: int
    windows: int  # of the smaller arm


def compare(
    pairs: Sequence[BlockPair],
    again: Sequence[BlockPair],
    *,
    relative: bool,
    rng: np.random.Generator,
    statistic: str = "median",
) -> Comparison | None:
    """
    Compare two arms window by window, block by block.

    Args:
        pairs: Blocks of the arm without and the arm with the fault.
        again: The same of two arms without; empty when there is no second.
        relative: The effect is a ratio minus one instead of a difference.
        rng: Seeded by the run.
        statistic: "median" or "mean" of a block's windows: the mean for shares that are mostly zero.

    Returns:
        None when there is nothing to compare. A larger value is worse: turn round what is not so.
    """
    usable = [change for pair in pairs if len(change := _changes(pair, relative=relative))]
    if not usable:
        return None
    middle = np.median if statistic == "median" else np.mean
    observed = float(np.mean([middle(change) for change in usable]))
    flipped = np.zeros(ROUNDS)
    spread = np.zeros((len(usable), ROUNDS))
    for place, change in enumerate(usable):
        count = len(change)
        # Were the fault nothing, either arm could have been the other, window by window.
        flipped += middle(change * rng.choice((-1.0, 1.0), (ROUNDS, count)), axis=1) / len(usable)
        spread[place] = middle(change[rng.integers(0, count, (ROUNDS, count))], axis=1)
    # Blocks are drawn too: what differs from block to block is not explained by windows.
    chosen = rng.integers(0, len(usable), (len(usable), ROUNDS))
    means = np.take_along_axis(spread, chosen, axis=0).mean(axis=0)
    low, high = (float(value) for value in np.quantile(means, (ALPHA / 2, 1 - ALPHA / 2)))
    noise = [abs(float(middle(change))) for pair in again if len(change := _changes(pair, relative=relative))]

    def plain(value: float) -> float:
        return float(np.expm1(value)) if relative else value

    return Comparison(
        effect=plain(observed),
        low=plain(low),
        high=plain(high),
        p=float((1 + np.count_nonzero(flipped >= observed - 1e-12)) / (1 + ROUNDS)),
        noise=plain(max(noise, default=0.0)),
        blocks=len(usable),
        windows=sum(len(change) for change in usable),
    )


def _changes(pair: BlockPair, *, relative: bool) -> Array:
    """Window by window, how much more the fault's arm has; logarithms of ratios, which are symmetric."""
    assert len(pair.control) == len(pair.fault), "windows come in pairs"
    if not relative:
        return pair.fault - pair.control
    known = (pair.control > 0) & (pair.fault > 0)
    return np.log(pair.fault[known] / pair.control[known])


def decide(
    found: Comparison | None, *, margin: float, p: float | None = None, calibrated: bool = True
) -> Verdict:
    """
    Harm, harmless, or unknown.

    Args:
        found: None is unknown.
        margin: How much larger is still the same.
        p: Corrected for the number of comparisons; the comparison's own by default.
        calibrated: A second arm without a fault was run; without one nothing can be called harm.
    """
    if found is None:
        return Verdict.UNKNOWN
    enough = found.blocks >= PAIRS_MIN
    beyond = found.effect > margin and found.effect > found.noise and found.low > 0
    if enough and calibrated and beyond and (found.p if p is None else p) < ALPHA:
        return Verdict.INVALID
    return Verdict.VALID if enough and found.high < margin else Verdict.UNKNOWN


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for how many there are (Holm 1979), in the given order."""
    count = len(p_values)
    adjusted = [1.0] * count
    running = 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda one: p_values[one])):
        running = max(running, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def rate_bound(*, events: int, trials: int) -> float:
    """
    The share that a rate is below with 95 % certainty; 1 without trials.

    Without events the rule of three, with some the upper end of Wilson's interval.
    """
    if trials <= 0:
        return 1.0
    if events == 0:
        return min(1.0, 3.0 / trials)
    z, share = 1.6449, events / trials
    middle = share + z * z / (2 * trials)
    width = z * float(np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)))
    return float(min(1.0, (middle + width) / (1 + z * z / trials)))


def mean_interval(values: Array, weights: Array, *, rng: np.random.Generator) -> tuple[float, float]:
    """The 95 % interval of a weighted mean over windows, by resampling windows; ``[windows]`` each."""
    if not len(values) or not weights.sum():
        return float("nan"), float("nan")
    drawn = rng.integers(0, len(values), (ROUNDS, len(values)))
    totals = weights[drawn].sum(axis=1)
    means = (values[drawn] * weights[drawn]).sum(axis=1) / np.where(totals > 0, totals, 1)
    low, high = np.quantile(means[totals > 0], (ALPHA / 2, 1 - ALPHA / 2))
    return float(low), float(high)


def confirmed(failures: Sequence[bool]) -> bool:
    """Whether a latency verdict may fail a pipeline: the last ``CONFIRMATIONS`` runs all failed."""
    return len(failures) >= CONFIRMATIONS and all(failures[-CONFIRMATIONS:])
