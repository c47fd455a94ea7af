"""What a benchmark gives: figures, each a median over repeats with its spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

DIGITS: Final = 4  # significant ones of a printed figure: the spread is wider than that


Params = dict[str, int | float | str]
"""What a figure was measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure: the median of ``runs``, and how far they lie apart."""

    name: str
    unit: str
    runs: Sequence[float]
    params: Params = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.runs, "a figure without a run is none"

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest run."""
        return min(self.runs), max(self.runs)

    def row(self) -> dict[str, Any]:
        """As ``kvops bench -o json`` prints it."""
        return {
            "name": self.name,
            "params": self.params,
            "value": rounded(self.value),
            "unit": self.unit,
            "spread": [rounded(end) for end in self.spread],
            "runs": [rounded(run) for run in self.runs],
        }


Tell = Callable[[Result], None]
"""Takes each figure as soon as it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much time a benchmark may take."""

    quick: bool = False  # for CI: the same code, figures that only show the order of magnitude
    repeats: int = 5

    @property
    def runs(self) -> int:
        """Repeats of each figure."""
        return min(self.repeats, 2) if self.quick else self.repeats


def rounded(value: float) -> float | int:
    """A figure with as many digits as it deserves."""
    number = float(f"{value:.{DIGITS}g}")
    return int(number) if number.is_integer() else number


def percentile(ordered: Sequence[float], share: float) -> float:
    """
    The smallest of the ascending values that is at least as large as this share of them.

    A share of 0.99 of 100 values is the 99th.
    """
    assert ordered, "no values"
    assert 0 < share <= 1
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)]
