"""C4: with a broken cache nobody is worse off than without one."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvops.chaos.checkers.model import Checker, CounterExample, Result, Verdict, worst
from kvops.chaos.containment import pairs_of
from kvops.chaos.history import RunRecord
from kvops.chaos.pairing import Array, Mask, Pairs, Phase
from kvops.chaos.statistics import ALPHA, P99_SAMPLES_MIN, ROUNDS

ANSWERS_MIN: Final = 100


def never_worse(record: RunRecord) -> Result:
    """
    Class by class: TTFT p50 and p99 within the cache-off arm's plus what a client may lose on a read; success too.

    Non-inferiority: the interval's upper end must lie within the margin. Harm needs its lower end beyond it.
    """
    pairs = pairs_of(record)
    bounds = record.run.bounds
    during = (pairs.phase == Phase.DURING) & pairs.fault.there & pairs.cache_off.there
    if not during.any():
        return Result(verdict=Verdict.UNKNOWN, summary="no cache-off arm beside a proven fault")
    rng = np.random.default_rng(record.run.seed + 4)
    examples: list[CounterExample] = []
    open_questions: list[str] = []
    verdicts: list[Verdict] = []
    said: list[str] = []
    for index, cls in enumerate(pairs.classes):
        part = during & (pairs.cls == index)
        if not part.any():
            continue
        name = f"class {cls}" if cls else "requests"
        for share, label, needed in ((0.5, "p50", ANSWERS_MIN), (0.99, "p99", P99_SAMPLES_MIN)):
            found = _difference(pairs, part, share, rng)
            if found is None or found[3] < needed:
                open_questions.append(f"TTFT {label} of {name}: fewer than {needed:,} answers")
                verdicts.append(Verdict.UNKNOWN)
                continue
            effect, low, high, _ = found
            if low > bounds.read_timeout_ms:
                verdicts.append(Verdict.INVALID)
                examples.append(
                    CounterExample(
                        what=f"TTFT {label} of {name} {effect:.0f} ms above no cache;"
                        f" {bounds.read_timeout_ms:g} ms are allowed"
                    )
                )
            elif high <= bounds.read_timeout_ms:
                verdicts.append(Verdict.VALID)
                said.append(f"{label} {effect:+.0f} ms")
            else:
                verdicts.append(Verdict.UNKNOWN)
                open_questions.append(
                    f"TTFT {label} of {name}: {effect:+.0f} ms, between {low:.0f} and {high:.0f}"
                )
        failed = float(pairs.fault.failed[part].mean())
        usual = float(pairs.cache_off.failed[part].mean())
        if failed - usual > bounds.success_drop and int(pairs.fault.failed[part].sum()) >= 2:
            verdicts.append(Verdict.INVALID)
            rows = tuple(np.array(pairs.request)[part & pairs.fault.failed][:20].tolist())
            examples.append(
                CounterExample(
                    what=f"{100 * failed:.2f} % of {name} failed, {100 * usual:.2f} % without a cache",
                    rows=rows,
                )
            )
    verdict = worst(verdicts)
    if record.run.quick and verdict is Verdict.UNKNOWN and Verdict.VALID in verdicts:
        verdict = Verdict.VALID
    if examples:
        summary = examples[0].what
    elif verdict is Verdict.VALID:
        summary = f"TTFT {', '.join(said)} against no cache"
    else:
        summary = open_questions[0]
    return Result(
        verdict=verdict,
        summary=summary,
        checked=int(during.sum()),
        examples=tuple(examples),
        example_count=len(examples),
        not_concluded=tuple(open_questions),
    )


def _difference(
    pairs: Pairs, part: Mask, share: float, rng: np.random.Generator
) -> tuple[float, float, float, int] | None:
    """How much later a quantile is than without a cache, in ms, with its interval and the answers it rests on."""
    cells: list[tuple[Array, Array]] = []
    for _, _, index in pairs.cells(part):
        a, b = pairs.cache_off.ttft_ms[index], pairs.fault.ttft_ms[index]
        cells.append((a[~np.isnan(a)], b[~np.isnan(b)]))
    a_all = np.concatenate([a for a, _ in cells])
    b_all = np.concatenate([b for _, b in cells])
    if not len(a_all) or not len(b_all):
        return None
    effect = float(np.quantile(b_all, share) - np.quantile(a_all, share))
    # Whole windows are drawn, so that what one window has in common stays together; a few rounds suffice.
    effects = []
    for _ in range(ROUNDS // 5):
        drawn = rng.integers(0, len(cells), len(cells))
        a = np.concatenate([cells[one][0] for one in drawn])
        b = np.concatenate([cells[one][1] for one in drawn])
        if len(a) and len(b):
            effects.append(float(np.quantile(b, share) - np.quantile(a, share)))
    low, high = np.quantile(effects, (ALPHA / 2, 1 - ALPHA / 2))
    return effect, float(low), float(high), min(len(a_all), len(b_all))


CHECKER: Final = Checker(
    id="C4",
    name="never_worse_than_no_cache",
    title="With a broken cache nobody is worse off than without one",
    safety=False,
    run=never_worse,
)
