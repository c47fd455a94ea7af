"""A verdict as plain text: lines for a terminal, or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvops.diag.facts import HostFacts
from kvops.diag.model import LOUD, Finding, Outcome, Result
from kvops.diag.report import (
    Cause,
    by_family,
    causes,
    needs_root,
    path_text,
    playbook,
    unseen_groups,
    verdict,
)

FINDINGS_SHOWN_MAX = 4  # of one cause, unless asked for more
_COLORS = {Outcome.FAIL: "red", Outcome.WARN: "yellow", Outcome.UNKNOWN: "yellow", Outcome.OK: "green"}

Style = Callable[[str, str], str]  # (text, color) → text
Unreached = Sequence[tuple[str, str]]  # hosts that were not looked at: name, reason


def plain(text: str, color: str) -> str:
    return text


def safe(text: str) -> str:
    """Text from a strange machine without anything that could steer a terminal."""
    return "".join(
        char if char.isprintable() else " " if char in "\n\t" else repr(char)[1:-1] for char in text
    )


def persistence(finding: Finding) -> str:
    return {True: "persists", False: "does not persist → playbook", None: ""}[finding.persists]


def headline(
    nodes: Sequence[HostFacts], results: Sequence[Result], took_s: float, unreached: Unreached = ()
) -> str:
    """The first line: the verdict and what it rests on."""
    found = causes(results)
    worst = verdict(results, unreached=bool(unreached))
    hit = {node for cause in found for node in cause.nodes}
    counts = {outcome: sum(r.outcome is outcome for r in results) for outcome in Outcome}
    where = f" on {min(len(hit), len(nodes))} of {len(nodes)} hosts" if len(nodes) > 1 else ""
    what = f"{len(found)} cause{'s' if len(found) != 1 else ''}{where}; " if found else ""
    figures = ", ".join(f"{counts[o]} {o}" for o in Outcome if counts[o])
    if unreached:
        figures = f"{len(unreached)} host{'' if len(unreached) == 1 else 's'} not reached; {figures}"
    return f"{worst.upper()}  {what}{figures}  ({took_s:.1f} s)"


def lines(
    nodes: Sequence[HostFacts],
    results: Sequence[Result],
    *,
    took_s: float = 0.0,
    verbose: int = 0,
    style: Style = plain,
    unreached: Unreached = (),
) -> list[str]:
    """What a terminal shows."""
    worst = verdict(results, unreached=bool(unreached))
    first, _, rest = headline(nodes, results, took_s, unreached).partition("  ")
    text = [f"{style(first, _COLORS.get(worst, 'green'))}  {rest}"]
    for cause in causes(results):
        text += _cause_lines(cause, verbose, style)
    for host in nodes:
        if any(r.outcome in LOUD and r.node in (host.name, "fleet") for r in results):
            label = f"PATH    {host.name}: " if len(nodes) > 1 else "PATH    "
            text.append(label + safe(path_text(host, results)))
    normal = [
        f"{finding.subject} {finding.observed}"
        for result in results
        if result.outcome is Outcome.INFO
        for finding in result.findings
    ]
    shown = normal if verbose else normal[:2]
    if shown:
        more = f"; and {len(normal) - len(shown)} more (-v)" if len(normal) > len(shown) else ""
        text.append(f"NORMAL  {safe('; '.join(shown))}{more}: no cause by themselves")
    for reason, names, asked in unseen_groups(results):
        if asked or verbose:
            text.append(f"UNSEEN  {by_family(names)}: {safe(reason)}{_hint(reason)}")
    quiet = sum(not asked for _, _, asked in unseen_groups(results))
    if quiet and not verbose:
        count = sum(r.outcome is Outcome.UNKNOWN and not r.asked for r in results)
        lack = "1 check lacks" if count == 1 else f"{count} checks lack"
        text.append(f"UNSEEN  {lack} something that was not collected or is not installed (-v)")
    hidden = needs_root(nodes, results)
    if hidden:
        text.append(f"ROOT    run as root for {by_family(hidden)}")
    text += [style(f"UNREACHED  {name}: {safe(reason)}", "yellow") for name, reason in unreached]
    if verbose > 1:
        text += [f"{r.outcome:8}{r.node}  {r.check}  {safe(r.reason)}" for r in results]
    return text


def _hint(reason: str) -> str:
    return "; run as root" if reason == "unreadable" else ""


def _cause_lines(cause: Cause, verbose: int, style: Style) -> list[str]:
    effects = len(cause.explained)
    explains = f"   explains {effects} more" if effects else ""
    color = _COLORS[cause.severity]
    text = [f"{style('CAUSE', color)} {style(cause.check.id, color)}   {cause.check.title}{explains}"]
    shown = [(result.node, f) for result in cause.results for f in result.findings if f.severity in LOUD]
    for node, finding in shown if verbose else shown[:FINDINGS_SHOWN_MAX]:
        place = safe(
            finding.subject
            if finding.subject.startswith(node) or node == "fleet"
            else f"{node} {finding.subject}"
        )
        text.append(f"  {place}  observed {safe(finding.observed)}    expected {safe(finding.expected)}")
        text += [
            f"    evidence {safe(item.source)}" + (f": {safe(item.text)[:100]}" if verbose else "")
            for item in finding.evidence[: 8 if verbose else 2]
        ]
        if finding.fix:
            text.append(f"    fix      {safe(finding.fix)}    {persistence(finding)}".rstrip())
    if len(shown) > FINDINGS_SHOWN_MAX and not verbose:
        text.append(f"  {len(shown) - FINDINGS_SHOWN_MAX} more of the same (-v)")
    if cause.explained:
        names = dict.fromkeys(result.check for result in cause.explained)
        text.append(f"  explains {', '.join(names)}")
    text.append(f"  {playbook(cause.check)}")
    return text


def markdown(
    nodes: Sequence[HostFacts],
    results: Sequence[Result],
    *,
    took_s: float = 0.0,
    unreached: Unreached = (),
) -> str:
    """For a ticket."""
    worst = verdict(results, unreached=bool(unreached))
    text = [f"# kvops diagnose: {worst.upper()}", "", headline(nodes, results, took_s, unreached), ""]
    for cause in causes(results):
        text += [f"## {cause.check.id} ({cause.severity})", "", f"{cause.check.title}. {cause.check.why}", ""]
        text += ["| where | observed | expected | fix | persists |", "| --- | --- | --- | --- | --- |"]
        for result in cause.results:
            for finding in result.findings:
                cells = (
                    f"{result.node} {finding.subject}",
                    finding.observed,
                    finding.expected,
                    f"`{finding.fix}`",
                )
                text.append("| " + " | ".join(_cell(c) for c in (*cells, persistence(finding))) + " |")
        evidence = dict.fromkeys(e.source for r in cause.results for f in r.findings for e in f.evidence)
        text += ["", *(f"- evidence: `{_cell(source)}`" for source in list(evidence)[:12])]
        if cause.explained:
            names = dict.fromkeys(r.check for r in cause.explained)
            text += ["", f"Explains: {', '.join(names)}"]
        text += ["", f"Playbook: {playbook(cause.check)}", ""]
    text += [f"- {host.name}: {_cell(path_text(host, results))}" for host in nodes]
    unseen = [f"- unseen: {by_family(names)}: {_cell(reason)}" for reason, names, _ in unseen_groups(results)]
    if hidden := needs_root(nodes, results):
        unseen.append(f"- run as root for: {by_family(hidden)}")
    missing = [f"- not reached: {_cell(name)}: {_cell(reason)}" for name, reason in unreached]
    return "\n".join([*text, "", *unseen, *missing, ""])


def _cell(text: str) -> str:
    return safe(text).replace("|", "\\|")
