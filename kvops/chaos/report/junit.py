"""A judged run as JUnit XML: a test case a checker, for the CI systems that draw them."""

from __future__ import annotations

import re
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from kvops.chaos.checkers.model import Verdict
from kvops.chaos.history import RunRecord
from kvops.chaos.report.document import again, start_ns
from kvops.chaos.verdict import Judgement, RunVerdict

# What XML 1.0 (section 2.2) cannot hold, however it is written.
_FORBIDDEN: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(record: RunRecord, judgement: Judgement) -> str:
    """One suite; the verdict itself is its first case, so that a run without proof is never green."""
    name = record.run.title or record.run.experiment or record.run.run_id or "chaos"
    cases = [
        _case(
            "verdict",
            judgement.verdict is RunVerdict.PASS,
            judgement.verdict.value,
            "; ".join(judgement.reasons),
        )
    ]
    failures, errors, skipped = int(judgement.verdict is not RunVerdict.PASS), 0, 0
    for one in judgement.checkers:
        title = f"{one.checker.id} {one.checker.name}"
        text = "\n".join([one.result.summary, *(example.what for example in one.result.examples)])
        if not one.counts:
            skipped += 1
            cases.append(_open(title) + f"<skipped message={_quoted(one.result.summary)}/></testcase>")
        elif one.result.verdict is Verdict.UNKNOWN:
            errors += 1
            cases.append(
                _open(title) + f'<error type="unknown" message={_quoted(one.result.summary)}/></testcase>'
            )
        else:
            failures += one.result.verdict is Verdict.INVALID
            cases.append(_case(title, one.result.verdict is Verdict.VALID, "invalid", text))
    took_s = (record.end.t_ns - start_ns(record)) / 1e9 if record.end else 0.0
    properties = {
        "seed": str(record.run.seed),
        "K": str(judgement.containment.k),
        "S": str(judgement.containment.spread),
        "again": again(record),
    }
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<testsuites><testsuite name={_quoted(name)} tests="{len(cases)}" failures="{failures}" errors="{errors}"'
        f' skipped="{skipped}" time="{max(0.0, took_s):.3f}"><properties>'
        + "".join(
            f"<property name={_quoted(key)} value={_quoted(value)}/>" for key, value in properties.items()
        )
        + "</properties>\n"
        + "\n".join(cases)
        + "\n</testsuite></testsuites>\n"
    )


def _open(name: str) -> str:
    return f'<testcase classname="kvops.chaos" name={_quoted(name)}>'


def _case(name: str, good: bool, kind: str, text: str) -> str:
    if good:
        return f"{_open(name)}</testcase>"
    first = text.splitlines()[0] if text else kind
    return f"{_open(name)}<failure type={_quoted(kind)} message={_quoted(first)}>{_plain(text)}</failure></testcase>"


def _quoted(text: str) -> str:
    return quoteattr(_FORBIDDEN.sub("�", text))


def _plain(text: str) -> str:
    return escape(_FORBIDDEN.sub("�", text))
