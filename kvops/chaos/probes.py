"""What a hypothesis may ask of a stretch's requests: pure functions of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvops.chaos.history import Outcome, Request


def good(row: Request) -> bool:
    """Answered, in its budget, with the right bytes."""
    late = 0 < row.budget_ms < row.ttft_ms
    return row.outcome is Outcome.OK and not late and not row.wrong_bytes


def success_rate(rows: Sequence[Request]) -> float | None:
    """Share of requests that were good; None without any."""
    return sum(map(good, rows)) / len(rows) if rows else None


def hit_ratio(rows: Sequence[Request]) -> float | None:
    """Share of input tokens that some tier served; None without any."""
    tokens = sum(row.input_tokens for row in rows)
    hits = sum(row.l1_tokens + row.l2_tokens + row.l3_tokens for row in rows)
    return hits / tokens if tokens else None


PROBES: Final = {"success_rate": success_rate, "hit_ratio": hit_ratio}
"""By the name that an experiment's ``func`` has."""
