"""
Whether two things moved together over the windows of a watch: rank correlation, in numbers and plain words.

It never says that one caused the other. Marks, CNPs and pauses grow with the load, and so does speed: a
relation between them is what a healthy fabric shows, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOWS_MIN = 20  # below it the sign itself is a matter of luck
LEVEL = 0.05  # of error over all pairs that are looked at together
STRONG, WEAK = 0.6, 0.3  # of the rank correlation, in words

SIGNS = {
    "ecn": "ECN marks",
    "cnp": "CNPs",
    "pfc": "PFC pauses",
    "incast": "signs of incast (discards and pauses at the receiver)",
    "retransmits": "retransmissions",
}
EFFECTS = {"speed": "transfer speed", "ttft": "time to first token"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Of one sign and one effect."""

    sign: str
    effect: str
    n: int  # windows in which both were seen
    rho: float | None  # Spearman's; None where one of the two did not vary
    p: float | None  # that a relation as strong comes by chance
    verdict: str


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for position in order[start:end]:
            found[position] = (start + 1 + end) / 2
        start = end
    return found


def _pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    over = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    under = math.fsum((x - mean_x) ** 2 for x in xs) * math.fsum((y - mean_y) ** 2 for y in ys)
    return max(-1.0, min(1.0, over / math.sqrt(under))) if under > 0 else None


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Rank correlation from -1 to 1; None where one of the two does not vary."""
    assert len(xs) == len(ys), "two series of the same windows"
    return _pearson(ranks(xs), ranks(ys)) if len(xs) > 1 else None


def chance(xs: Sequence[float], ys: Sequence[float], rho: float) -> float:
    """
    How likely a relation as strong is where there is none.

    Windows follow one another: what was high stays high for a while, and then fewer of them count. The number
    is reduced by both series' lag-1 correlation (Bartlett 1946); Fisher's z with the variance for ranks (Fieller
    1957).
    """
    rank_x, rank_y = ranks(xs), ranks(ys)
    memory = (_pearson(rank_x[:-1], rank_x[1:]) or 0.0) * (_pearson(rank_y[:-1], rank_y[1:]) or 0.0)
    memory = max(0.0, min(memory, 0.99))
    count = len(xs) * (1 - memory) / (1 + memory)
    if count <= 4:
        return 1.0
    if abs(rho) >= 1.0:
        return 0.0
    return math.erfc(abs(math.atanh(rho)) * math.sqrt((count - 3) / 1.06) / math.sqrt(2))


def relations(series: Mapping[str, Sequence[float | None]]) -> list[Relation]:
    """
    Every sign against every effect.

    Args:
        series: Name (of SIGNS and EFFECTS) → one value a window, None where it was not seen; all equally long.
    """
    pairs = [(s, e) for e in EFFECTS if e in series for s in SIGNS if s in series]
    found = []
    for sign, effect in pairs:
        both = [
            (x, y)
            for x, y in zip(series[sign], series[effect], strict=True)
            if x is not None and y is not None
        ]
        xs, ys = [x for x, _ in both], [y for _, y in both]
        rho = spearman(xs, ys)
        p = chance(xs, ys, rho) if rho is not None and len(xs) >= WINDOWS_MIN else None
        found.append(
            Relation(
                sign=sign,
                effect=effect,
                n=len(xs),
                rho=None if rho is None else round(rho, 3),
                p=None if p is None else round(p, 5),
                verdict=_words(sign, effect, len(xs), rho, p, LEVEL / len(pairs)),
            )
        )
    return found


def _words(sign: str, effect: str, n: int, rho: float | None, p: float | None, level: float) -> str:
    what, of = SIGNS[sign], EFFECTS[effect]
    if n < WINDOWS_MIN:
        return f"{what} and {of}: {n} windows, {WINDOWS_MIN} are needed to say anything"
    if rho is None or p is None:
        return f"{what} and {of}: one of the two did not change in {n} windows, so nothing can be said"
    figures = f"(rank correlation {rho:+.2f}, {n} windows)"
    if p > level or abs(rho) < WEAK:
        return f"{what} and {of}: no relation seen {figures}"
    strength = "moved together" if abs(rho) >= STRONG else "moved together weakly"
    worse = rho < 0 if effect == "speed" else rho > 0
    if not worse:
        return f"{what} and {of} {strength} {figures}, as load alone makes them: no harm seen"
    slower = "it was slower" if effect == "speed" else "it took longer"
    return (
        f"{what} and {of} {strength} {figures}: {slower} in windows with more of them. "
        f"That is no proof of cause: a third thing may move both"
    )
