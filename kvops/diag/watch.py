"""Watches a host, one short window after the other: what each port moved, and what checks say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from kvops.diag.collect import agent
from kvops.diag.facts import HostFacts, attempt
from kvops.diag.model import LOUD
from kvops.diag.registry import Check
from kvops.diag.runner import run, select
from kvops.diag.snapshot import from_files

EVERY_S_MIN = 1.0  # hw_counters are cached for 12 ms and more; a shorter window shows noise
SERIES_MAX = 100_000  # windows kept for the jitter at the end


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def watch(
    *,
    duration_s: float,
    every_s: float,
    selected: Sequence[Check],
    collect: Callable[[float], dict[str, bytes]] | None = None,
) -> Iterator[dict[str, Any]]:
    """
    Rows for as long as asked.

    Args:
        duration_s: How long.
        every_s: Length of one window, at least EVERY_S_MIN.
        selected: Checks to judge each window with.
        collect: Takes the length of a window and gives a snapshot's files; this machine's collector by
            default.

    Yields:
        ``{"time", "event", "subject", "text", ...}``: event ``rate`` for each port and window, ``info``,
        ``warn`` or ``fail`` when a check starts to say so, ``over`` when it stops; the steadiness of each
        port at the end.
    """
    every_s = max(every_s, EVERY_S_MIN)
    take = collect or (lambda window_s: agent.collect(window_s=window_s))
    deadline = time.monotonic() + duration_s
    series: dict[str, list[float]] = {}
    saying: dict[tuple[str, str], str] = {}
    host: HostFacts | None = None
    while time.monotonic() < deadline:
        host = HostFacts(from_files(take(every_s), "this host")[0])
        for port in attempt(lambda: host.ports) or ():
            moved = attempt(lambda: port.traffic_bytes)
            window_s = host.snapshot.window_s
            if moved is None or window_s is None:
                continue
            rates = [size * 8 / window_s / 1e9 for size in moved]
            series.setdefault(port.label, []).append(sum(moved) / window_s)
            del series[port.label][:-SERIES_MAX]
            text = f"tx {rates[0]:.1f} rx {rates[1]:.1f} Gbit/s"
            yield {"time": _now(), "event": "rate", "subject": port.label, "text": text, "gbps": rates}
        now: dict[tuple[str, str], str] = {}
        for result in run([host], selected):
            for finding in result.findings:
                key = (result.check, finding.subject)
                now[key] = str(finding.severity)
                if saying.get(key) != now[key]:
                    text = f"{result.check}: {finding.observed}"
                    yield {"time": _now(), "event": now[key], "subject": finding.subject, "text": text}
        for check, subject in saying.keys() - now.keys():
            yield {"time": _now(), "event": "over", "subject": subject, "text": check}
        saying = now
    if host is not None and series:
        host.meta["series"] = series
        for result in run([host], select(["ctr.jitter"])):
            for finding in result.findings:
                if finding.severity in LOUD:
                    text = f"{result.check}: {finding.observed}"
                    yield {
                        "time": _now(),
                        "event": str(finding.severity),
                        "subject": finding.subject,
                        "text": text,
                    }
