"""S9: when everything has come to rest, nothing is held that nobody owns."""

from __future__ import annotations

from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, found
from kvops.chaos.history import RunRecord, Sample

SLACK: Final = {"fds": 8, "threads": 8, "qps": 0, "mrs": 0}
RSS_SHARE: Final = 0.25  # allocators keep pages; a leak is known by its growth from run to run
RSS_SLACK_BYTES: Final = 64 << 20


def no_leak(record: RunRecord) -> Result:
    """The last quiet sample of each process against its own sums, and against the first before the run."""
    before: dict[str, Sample] = {}
    quiet: dict[str, Sample] = {}
    for sample in record.samples:
        if sample.phase == "before":
            before.setdefault(sample.subject, sample)
        elif sample.phase == "quiet":
            quiet[sample.subject] = sample
    examples: list[CounterExample] = []
    checked = 0
    blind: list[str] = []
    for subject, sample in quiet.items():
        seen = 0
        for name in ("used_bytes", "live_bytes"):
            value = getattr(sample, name)
            if sample.allocated_bytes is not None and value is not None:
                seen += 1
                if value != sample.allocated_bytes:
                    examples.append(
                        _example(sample, f"{sample.allocated_bytes:,} B allocated, {name} says {value:,}")
                    )
        if sample.reservations is not None:
            seen += 1
            if sample.reservations:
                examples.append(_example(sample, f"{sample.reservations:,} puts begun and never ended"))
        first = before.get(subject)
        for name, slack in SLACK.items():
            value, usual = getattr(sample, name), getattr(first, name, None)
            if value is not None and usual is not None:
                seen += 1
                if value > usual + slack:
                    examples.append(_example(sample, f"{name} {usual} before, {value} after"))
        if sample.rss_bytes is not None and first is not None and first.rss_bytes is not None:
            held = (sample.allocated_bytes or 0) - (first.allocated_bytes or 0)
            grown = sample.rss_bytes - first.rss_bytes - max(0, held)
            seen += 1
            if grown > RSS_SLACK_BYTES + RSS_SHARE * first.rss_bytes:
                examples.append(
                    _example(sample, f"resident memory grew by {grown >> 20:,} MiB beyond what objects hold")
                )
        checked += seen
        if not seen:
            blind.append(subject)
    missing = sorted(set(before) - set(quiet))
    unknown = ""
    if blind or missing:
        unknown = f"not seen at rest: {', '.join(sorted({*blind, *missing}))}"
    return found(
        examples,
        checked=checked,
        good=f"{len(quiet)} processes at rest, {checked} sums agree",
        unknown=unknown,
        nothing="no process was sampled at rest",
    )


def _example(sample: Sample, what: str) -> CounterExample:
    return CounterExample(what=f"{sample.subject}: {what}", t_ns=sample.t_ns)


CHECKER: Final = Checker(
    id="S9", name="leak", title="Nothing is held that nobody owns", safety=True, run=no_leak
)
