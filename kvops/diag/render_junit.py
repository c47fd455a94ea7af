"""A verdict for a scheduler or a CI system: JUnit's XML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvops.diag.model import Outcome, Result
from kvops.diag.render import Unreached, safe


def _quoted(text: str) -> str:
    return f'"{escape(safe(text))}"'


def junit(results: Sequence[Result], unreached: Unreached = ()) -> str:
    """
    For a scheduler: fail is a failure, warn passes with a note, unknown is an error, skipped is skipped.

    A host that was not reached is an error of its own.
    """
    failures = sum(r.outcome is Outcome.FAIL for r in results)
    errors = len(unreached) + sum(r.outcome is Outcome.UNKNOWN and r.asked for r in results)
    skipped = sum(
        r.outcome is Outcome.SKIPPED or (r.outcome is Outcome.UNKNOWN and not r.asked) for r in results
    )
    text = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuite name="kvops diagnose" tests="{len(results) + len(unreached)}" failures="{failures}" '
        f'errors="{errors}" skipped="{skipped}">',
    ]
    text += [
        f'  <testcase classname={_quoted(name)} name="reached"><error message={_quoted(reason[:500])}/></testcase>'
        for name, reason in unreached
    ]
    for result in results:
        head = f"  <testcase classname={_quoted(result.node)} name={_quoted(result.check)}"
        body = "; ".join(
            f"{f.subject}: {f.observed}, expected {f.expected}; {f.fix}" for f in result.findings
        )
        message = _quoted((body or result.reason)[:500])
        if result.outcome is Outcome.FAIL:
            text.append(f"{head}><failure message={message}>{escape(safe(body))}</failure></testcase>")
        elif result.outcome is Outcome.UNKNOWN and result.asked:
            text.append(f"{head}><error message={message}/></testcase>")
        elif result.outcome in (Outcome.SKIPPED, Outcome.UNKNOWN):
            text.append(f"{head}><skipped message={message}/></testcase>")
        elif result.findings:
            text.append(
                f"{head}><system-out>{escape(safe(f'{result.outcome}: {body}'))}</system-out></testcase>"
            )
        else:
            text.append(f"{head}/>")
    return "\n".join([*text, "</testsuite>", ""])
