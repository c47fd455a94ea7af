"""A verdict as one self-contained HTML page, with the path of a transfer drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvops.diag.facts import HostFacts
from kvops.diag.model import LOUD, Outcome, Result
from kvops.diag.rails import MARKS, Rail, rails_of
from kvops.diag.registry import checks
from kvops.diag.render import Unreached, headline, persistence, safe
from kvops.diag.report import by_family, causes, needs_root, playbook, unseen_groups, verdict

RAILS_DRAWN_MAX = 8  # of one host, open on the page; the others are folded

CSS = """
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
        devices = "".join(f"<span>{escape(safe(name))}</span>" for name in hop.devices)
        target = next((sections[check] for check in hop.checks if check in sections), None)
        note = {Outcome.FAIL: "bad", Outcome.WARN: "doubtful", Outcome.UNKNOWN: "not seen"}.get(
            hop.outcome, "ok"
        )
        mark = f"<small>{MARKS[hop.outcome]} {note}</small>" if note != "ok" else "<small>ok</small>"
        name = f"<b>{hop.stage}</b>"
        if target is not None:
            name = f'<a href="#{escape(target)}">{name}</a>'
        items.append(f'<li class="{hop.outcome}">{name}{devices}{mark}</li>')
    label = f"path of a transfer along {escape(safe(rail.name))}" if rail.name else "path of a transfer"
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
        return escape(safe(str(value)))

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
                    note = f' <span class="dim">{persistence(finding)}</span>'
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
    if hidden := needs_root(nodes, results):
        body.append(f"<p>Run as root for {text(by_family(hidden))}.</p>")
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
        f"<title>kvops diagnose: {text(worst.upper())}</title><style>{CSS}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )
