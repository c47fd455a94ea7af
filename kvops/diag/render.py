"""A verdict for people: lines for a terminal, Markdown, JUnit, and one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvops.diag.facts import HostFacts
from kvops.diag.model import LOUD, Finding, Outcome, Result
from kvops.diag.rails import MARKS, Rail, rails_of
from kvops.diag.registry import checks
from kvops.diag.report import Cause, causes, path_text, playbook, unseen_groups, verdict

RAILS_DRAWN_MAX = 8  # of one host, open on the page; the others are folded
FINDINGS_SHOWN_MAX = 4  # of one cause, unless asked for more
_COLORS = {Outcome.FAIL: "red", Outcome.WARN: "yellow", Outcome.UNKNOWN: "yellow", Outcome.OK: "green"}

Style = Callable[[str, str], str]  # (text, color) → text
Unreached = Sequence[tuple[str, str]]  # hosts that were not looked at: name, reason


def _plain(text: str, color: str) -> str:
    return text


def safe(text: str) -> str:
    """Text from a strange machine without anything that could steer a terminal."""
    return "".join(
        char if char.isprintable() else " " if char in "\n\t" else repr(char)[1:-1] for char in text
    )


def _persists(finding: Finding) -> str:
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
    style: Style = _plain,
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
            text.append(f"UNSEEN  {_families(names)}: {safe(reason)}{_hint(reason)}")
    quiet = sum(not asked for _, _, asked in unseen_groups(results))
    if quiet and not verbose:
        count = sum(r.outcome is Outcome.UNKNOWN and not r.asked for r in results)
        lack = "1 check lacks" if count == 1 else f"{count} checks lack"
        text.append(f"UNSEEN  {lack} something that was not collected or is not installed (-v)")
    text += [style(f"UNREACHED  {name}: {safe(reason)}", "yellow") for name, reason in unreached]
    if verbose > 1:
        text += [f"{r.outcome:8}{r.node}  {r.check}  {safe(r.reason)}" for r in results]
    return text


def _families(names: Sequence[str]) -> str:
    by_family: dict[str, int] = {}
    for name in names:
        by_family[name.partition(".")[0]] = by_family.get(name.partition(".")[0], 0) + 1
    if len(names) <= 2:
        return ", ".join(names)
    return ", ".join(f"{family}.* ({count})" for family, count in by_family.items())


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
            text.append(f"    fix      {safe(finding.fix)}    {_persists(finding)}".rstrip())
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
                text.append("| " + " | ".join(_cell(c) for c in (*cells, _persists(finding))) + " |")
        evidence = dict.fromkeys(e.source for r in cause.results for f in r.findings for e in f.evidence)
        text += ["", *(f"- evidence: `{_cell(source)}`" for source in list(evidence)[:12])]
        if cause.explained:
            names = dict.fromkeys(r.check for r in cause.explained)
            text += ["", f"Explains: {', '.join(names)}"]
        text += ["", f"Playbook: {playbook(cause.check)}", ""]
    text += [f"- {host.name}: {_cell(path_text(host, results))}" for host in nodes]
    unseen = [f"- unseen: {_families(names)}: {_cell(reason)}" for reason, names, _ in unseen_groups(results)]
    missing = [f"- not reached: {_cell(name)}: {_cell(reason)}" for name, reason in unreached]
    return "\n".join([*text, "", *unseen, *missing, ""])


def _cell(text: str) -> str:
    return safe(text).replace("|", "\\|")


def _quoted(text: str) -> str:
    return f'"{html.escape(safe(text))}"'


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
            text.append(f"{head}><failure message={message}>{html.escape(safe(body))}</failure></testcase>")
        elif result.outcome is Outcome.UNKNOWN and result.asked:
            text.append(f"{head}><error message={message}/></testcase>")
        elif result.outcome in (Outcome.SKIPPED, Outcome.UNKNOWN):
            text.append(f"{head}><skipped message={message}/></testcase>")
        elif result.findings:
            text.append(
                f"{head}><system-out>{html.escape(safe(f'{result.outcome}: {body}'))}</system-out></testcase>"
            )
        else:
            text.append(f"{head}/>")
    return "\n".join([*text, "</testsuite>", ""])


_CSS = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c1e21; --dim: #5c6370; --line: #d8dce2; --card: #f6f7f9;
  --fail: #b3261e; --warn: #8a5a00; --ok: #1a7f37; --unknown: #5c6370; }
@media (prefers-color-scheme: dark) { :root { --bg: #14161a; --fg: #e6e8eb; --dim: #9aa1ac; --line: #333840;
  --card: #1d2025; --fail: #ff8a80; --warn: #f0b849; --ok: #6fd08c; --unknown: #9aa1ac; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 0; }
p { margin: .4rem 0; } .dim { color: var(--dim); }
section { border: 1px solid var(--line); border-left: .35rem solid var(--unknown); border-radius: .4rem;
  background: var(--card); padding: .8rem 1rem; margin: 1rem 0; }
section.fail { border-left-color: var(--fail); } section.warn { border-left-color: var(--warn); }
.fail > .tag, b.fail { color: var(--fail); } .warn > .tag, b.warn { color: var(--warn); } b.ok { color:
var(--ok); } ol.path { list-style: none; display: flex; flex-wrap: wrap; gap: .4rem 1.6rem; padding: 0;
margin: .5rem 0 1rem; } ol.path li { position: relative; border: 1px solid var(--line); border-radius:
.4rem; padding: .2rem .7rem; min-width: 4.6rem;
  text-align: center; background: var(--card); }
ol.path li:not(:last-child)::after { content: "→"; position: absolute; right: -1.3rem; top: 50%;
  transform: translateY(-50%); color: var(--dim); }
ol.path li.fail { border: 2px solid var(--fail); color: var(--fail); font-weight: 600; }
ol.path li.warn { border: 2px solid var(--warn); color: var(--warn); font-weight: 600; }
ol.path li.unknown { border-style: dashed; color: var(--dim); } ol.path small { display: block; }
ol.path span { display: block; font: 12px/1.4 ui-monospace, monospace; } ol.path a { color: inherit; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { margin: .3rem 0; white-space: pre-wrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .5rem 0; }
dt { color: var(--dim); } dd { margin: 0; min-width: 0; }
details { margin: 1rem 0; } summary { cursor: pointer; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); vertical-
align: top; }
"""


def _drawn(rail: Rail, sections: Mapping[str, str]) -> str:
    """One rail as a row of stations, each with its devices; a bad one links to the cause below."""
    items = []
    for hop in rail.hops:
        devices = "".join(f"<span>{html.escape(safe(name))}</span>" for name in hop.devices)
        target = next((sections[check] for check in hop.checks if check in sections), None)
        note = {Outcome.FAIL: "bad", Outcome.WARN: "doubtful", Outcome.UNKNOWN: "not seen"}.get(
            hop.outcome, "ok"
        )
        mark = f"<small>{MARKS[hop.outcome]} {note}</small>" if note != "ok" else "<small>ok</small>"
        name = f"<b>{hop.stage}</b>"
        if target is not None:
            name = f'<a href="#{html.escape(target)}">{name}</a>'
        items.append(f'<li class="{hop.outcome}">{name}{devices}{mark}</li>')
    label = f"path of a transfer along {html.escape(safe(rail.name))}" if rail.name else "path of a transfer"
    return f'<ol class="path" aria-label="{label}">{"".join(items)}</ol>'


def page(
    nodes: Sequence[HostFacts],
    results: Sequence[Result],
    *,
    took_s: float = 0.0,
    unreached: Unreached = (),
) -> str:
    """One HTML file that needs nothing else: no script, no font, no image from elsewhere."""

    def text(value: Any) -> str:
        return html.escape(safe(str(value)))

    def quoted(value: str) -> str:
        return "\n".join(text(line) for line in value.splitlines())

    worst = verdict(results, unreached=bool(unreached))
    # A consequence is told in the section of its cause.
    sections = {
        r.check: cause.check.id for cause in causes(results) for r in (*cause.explained, *cause.results)
    }
    body = [
        f'<h1><b class="{worst}">{text(worst.upper())}</b> kvops diagnose</h1>',
        f'<p class="dim">{text(headline(nodes, results, took_s, unreached).partition("  ")[2])}</p>',
    ]
    body += [f"<p><b>{text(name)}</b> was not reached: {text(reason)}</p>" for name, reason in unreached]
    for host in nodes:
        body.append(
            f'<p><b>{text(host.name)}</b> <span class="dim">{text(host.role)}, {text(host.kernel)}</span></p>'
        )
        rails = rails_of(host, results)
        loud = [rail for rail in rails if rail.outcome in LOUD] or rails[:1]
        body += [_drawn(rail, sections) for rail in loud[:RAILS_DRAWN_MAX]]
        rest = rails[len(loud[:RAILS_DRAWN_MAX]) :]
        if rest:
            drawn = "".join(_drawn(rail, sections) for rail in rest)
            body.append(f"<details><summary>{len(rest)} more rails</summary>{drawn}</details>")
    for cause in causes(results):
        body.append(f'<section class="{cause.severity}" id="{text(cause.check.id)}">')
        body.append(
            f'<h2 class="{cause.severity}"><span class="tag">{text(cause.check.id)}</span> '
            f"{text(cause.check.title)}</h2>"
        )
        body.append(f"<p>{text(cause.check.why)}</p>")
        for result in cause.results:
            for finding in result.findings:
                rows = [("where", f"{result.node} {finding.subject}"), ("observed", finding.observed)]
                rows += [("expected", finding.expected)] if finding.expected else []
                fields = "".join(f"<dt>{k}</dt><dd>{text(v)}</dd>" for k, v in rows)
                if finding.fix:
                    note = f' <span class="dim">{_persists(finding)}</span>'
                    fields += f"<dt>fix</dt><dd><code>{text(finding.fix)}</code>{note}</dd>"
                for item in finding.evidence[:8]:
                    fields += f"<dt>evidence</dt><dd><code>{text(item.source)}</code>"
                    fields += f"<pre>{quoted(item.text)}</pre></dd>"
                body.append(f"<dl>{fields}</dl>")
        if cause.explained:
            names = ", ".join(text(name) for name in dict.fromkeys(r.check for r in cause.explained))
            body.append(f"<p>Explains {names}.</p>")
        steps = f"Fix: {cause.check.fix}." + (f" Undo: {cause.check.undo}." if cause.check.undo else "")
        body.append(
            f'<p class="dim">{text(steps)} More in <code>{text(playbook(cause.check))}</code>.</p></section>'
        )
    groups = unseen_groups(results)
    if groups:
        rows_ = "".join(f"<tr><td>{text(r)}</td><td>{text(', '.join(n))}</td></tr>" for r, n, _ in groups)
        body.append(
            "<details><summary>Not seen</summary>"
            f'<div class="scroll"><table><tr><th>reason</th><th>checks</th></tr>{rows_}</table></div>'
            "</details>"
        )
    table = checks()
    rows_ = "".join(
        f'<tr><td><b class="{r.outcome}">{r.outcome}</b></td><td>{text(r.node)}</td><td>{text(r.check)}</td>'
        f"<td>{text(r.reason or table[r.check].title)}</td></tr>"
        for r in results
    )
    body.append(
        f"<details><summary>All {len(results)} results</summary>"
        f"<div "
        f'class="scroll"><table><tr><th>outcome</th><th>node</th><th>check</th><th></th></tr>{rows_}</table></div></details>'
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvops diagnose: {text(worst.upper())}</title><style>{_CSS}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )
