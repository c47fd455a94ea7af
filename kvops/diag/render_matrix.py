"""A matrix of probes for people: a grid of hosts for a terminal, a section of a page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from kvops.diag.matrix import Cell, Matrix, odd_ones, spread
from kvops.diag.render import Style, plain, safe
from kvops.diag.render_html import CSS

GRID_HOSTS_MAX = 16  # of a terminal's grid; beyond it only who stands out
CELL_WIDTH = 13
LINES_MAX = 64  # of one kind
_UNITS = {
    "rtt_us": "round trip µs",
    "rtt_p99_us": "round trip p99 µs",
    "jitter_us": "jitter µs",
    "loss_percent": "loss %",
    "gbps": "TCP Gbit/s alone",
    "gbps_together": "TCP Gbit/s all at once",
    "verbs_gbps": "verbs Gbit/s",
    "path_mtu": "path MTU B",
}


def cells_of(matrix: Matrix, source: str, target: str) -> list[Cell]:
    """Of one pair of hosts: same rails if there are any."""
    cells = [c for c in matrix.cells if (c.source, c.target) == (source, target)]
    return [c for c in cells if c.same_rail] or cells


def mark(cells: Sequence[Cell]) -> tuple[str, str]:
    """(state, words) of a pair of hosts: its worst interfaces speak."""
    if not cells:
        return "unknown", "?"
    reached = [c.reached for c in cells]
    if any(r is False for r in reached):
        count = sum(r is False for r in reached)
        return "fail", f"✗ {count}/{len(cells)}"
    words = []
    trips = [c.rtt_us["p50"] for c in cells if c.rtt_us and c.rtt_us.get("p50") is not None]
    if trips:
        words.append(f"{max(t for t in trips if t is not None):.0f} µs")
    speeds = [v for c in cells if (v := c.verbs_gbps if c.verbs_gbps is not None else c.gbps) is not None]
    if speeds:
        words.append(f"{min(speeds):.3g}G")
    partly = any(getattr(c, way) is False for c in cells for way in ("tcp", "udp", "icmp", "verbs"))
    lossy = any((c.loss_percent or 0) > 0 for c in cells)
    if partly or lossy:
        words.append("!" if partly else "loss")
        return "warn", " ".join(words)
    if all(r is None for r in reached) and not words:
        return "unknown", "?"
    return "ok", " ".join(words) or "ok"


def lines(matrix: Matrix, *, wide: bool = False, style: Style = plain) -> list[str]:
    """What a terminal shows."""
    text = []
    hosts = matrix.hosts
    colors = {"fail": "red", "warn": "yellow", "unknown": "yellow", "ok": "green"}
    if matrix.cells and (len(hosts) <= GRID_HOSTS_MAX or wide):
        width = max(len(name) for name in hosts)
        text.append(
            f"{'from ↓ to →':{width}}  " + " ".join(f"{name[-CELL_WIDTH:]:{CELL_WIDTH}}" for name in hosts)
        )
        for source in hosts:
            row = []
            for target in hosts:
                state, words = ("ok", "·") if source == target else mark(cells_of(matrix, source, target))
                row.append(style(f"{words[:CELL_WIDTH]:{CELL_WIDTH}}", colors[state]))
            text.append(f"{source:{width}}  " + " ".join(row).rstrip())
    text += [
        f"{style('ODD', 'red')}     {odd.kind} {safe(odd.name)}: {odd.metric} {safe(odd.observed)}    "
        f"expected {safe(odd.expected)}"
        for odd in odd_ones(matrix)
    ]
    for name, values in spread(matrix).items():
        figures = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
        text.append(f"ALL     {_UNITS[name]}: {figures}")
    text += [
        f"INCAST  {run['senders']} senders to {run['receiver']}: {run['total_gbps']:.3g} Gbit/s, "
        f"{run['retries']} retransmissions"
        for run in matrix.incast
    ]
    for host, tests in matrix.self_tests.items():
        text += _self_lines(host, tests)
    text += [f"GID     {line}" for line in gid_lines(matrix, every=wide)[:LINES_MAX]]
    for reason in dict.fromkeys(c.unseen for c in matrix.cells if c.unseen):
        count = sum(c.unseen == reason for c in matrix.cells)
        text.append(style("UNSEEN", "yellow") + f"  {count} pairs: {safe(reason)}")
    if matrix.left_out:
        text.append(f"UNSEEN  {matrix.left_out} pairs of different rails: too many, left out")
    return text


def gid_lines(matrix: Matrix, *, every: bool = False) -> list[str]:
    """What each pair of GIDs said: of pairs of interfaces where one did not answer, or of every one."""
    text = []
    for cell in matrix.cells:
        if len(cell.gids) < 2 or not (every or not all(pair.answered for pair in cell.gids)):
            continue
        said = ", ".join(
            f"{pair.indices} ({pair.kind}) "
            + (
                f"{pair.rtt_us:.3g} µs"
                if pair.rtt_us is not None
                else "ok"
                if pair.answered
                else safe(pair.error) or "no answer"
            )
            for pair in cell.gids
        )
        more = f", {cell.gids_left_out} more not tried" if cell.gids_left_out else ""
        text.append(f"{safe(cell.name)}: {said}{more}")
    return text


def _self_lines(host: str, tests: dict[str, Any]) -> list[str]:
    text = [
        f"MEMORY  {host} node {row['node']}: copies {row['gib_s']:g} GiB/s with one thread"
        for row in tests.get("memory", {}).get("rows", [])
    ]
    register = tests.get("register", {})
    for row in register.get("rows", []):
        what = row.get("error") or f"{row['seconds']:g} s"
        text.append(f"MR      {host} {row['device']}: {row['gib']:g} GiB: {safe(str(what))}")
    for row in register.get("lock", []):
        what = row.get("error") or f"{row['seconds']:g} s"
        text.append(
            f"MR      {host}: not registered ({safe(str(register.get('unseen')))}); locking {row['gib']:g} GiB: "
            f"{safe(str(what))}"
        )
    return text


_MATRIX_CSS = """
table.matrix td { text-align: center; padding: .25rem .5rem; border: 1px solid var(--line); white-space: nowrap; }
table.matrix th { text-align: left; padding: .25rem .5rem; white-space: nowrap; border: 1px solid var(--line); }
table.matrix td.fail { color: var(--fail); font-weight: 600; } table.matrix td.warn { color: var(--warn); }
table.matrix td.ok { color: var(--ok); } table.matrix { width: auto; }
table.matrix th { max-width: 9rem; overflow: hidden; text-overflow: ellipsis; background: var(--bg); }
table.matrix th:first-child { position: sticky; left: 0; max-width: min(14rem, 30vw); }
"""


def section(matrix: Matrix) -> str:
    """The matrix as part of a page."""

    def text(value: Any) -> str:
        return html.escape(safe(str(value)))

    def heading(name: str) -> str:
        return f'<th title="{text(name)}">{text(name)}</th>'

    head = "".join(heading(name) for name in matrix.hosts)
    rows = []
    for source in matrix.hosts:
        row = [heading(source)]
        for target in matrix.hosts:
            if source == target:
                row.append("<td>·</td>")
                continue
            cells = cells_of(matrix, source, target)
            state, words = mark(cells)
            title = "; ".join(
                f"{c.source_netdev} to {c.target_netdev}: "
                + ", ".join(
                    f"{way} {'ok' if getattr(c, way) else 'no answer'}"
                    for way in ("tcp", "udp", "icmp", "verbs")
                    if getattr(c, way) is not None
                )
                + (f", path MTU {c.path_mtu}" if c.path_mtu else "")
                + (f", {c.unseen}" if c.unseen else "")
                for c in cells[:16]
            )
            row.append(f'<td class="{state}" title="{text(title)}">{text(words)}</td>')
        rows.append(f"<tr>{''.join(row)}</tr>")
    odd = odd_ones(matrix)
    body = [f"<style>{_MATRIX_CSS}</style>", "<h2>Probes between hosts</h2>"]
    if odd:
        some = f"{len(odd)} stand{'s' if len(odd) == 1 else ''} out"
        body.append(
            f'<p><a href="#odd"><b class="warn">{some}</b></a> of {len(matrix.hosts)} hosts and their pairs.</p>'
        )
    elif matrix.cells:
        body.append(f'<p><b class="ok">None stands out</b> of {len(matrix.hosts)} hosts.</p>')
    if matrix.cells:
        body.append(
            '<p class="dim">Rows send, columns receive; the worst interface of a pair is shown, all of them on '
            f'hover.</p><div class="scroll"><table class="matrix"><tr><th></th>{head}</tr>{"".join(rows)}'
            "</table></div>"
        )
    body.append('<div id="odd">')
    body += [
        f'<section class="warn"><h2><span class="tag">{text(one.kind)}</span> {text(one.name)}</h2>'
        f"<p>{text(one.metric)}: {text(one.observed)}; expected {text(one.expected)}</p></section>"
        for one in odd
    ]
    body.append("</div>")
    figures = "".join(
        f"<tr><td>{text(_UNITS[name])}</td>"
        + "".join(f"<td>{value:.4g}</td>" for value in values.values())
        + "</tr>"
        for name, values in spread(matrix).items()
    )
    if figures:
        body.append(
            '<div class="scroll"><table><tr><th>over all pairs</th><th>p50</th><th>p90</th><th>p99</th>'
            f"<th>max</th></tr>{figures}</table></div>"
        )
    plain = [line for host, tests in matrix.self_tests.items() for line in _self_lines(host, tests)]
    plain += [f"GID {line}" for line in gid_lines(matrix)[:LINES_MAX]]
    plain += [f"UNREACHED {name}: {reason}" for name, reason in matrix.unreached]
    plain += list(dict.fromkeys(f"UNSEEN {c.unseen}" for c in matrix.cells if c.unseen))
    if plain:
        body.append("<pre>" + "\n".join(text(line) for line in plain) + "</pre>")
    return "".join(body)


def page(matrix: Matrix) -> str:
    """One HTML file that needs nothing else."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvops diagnose matrix</title><style>{CSS}</style></head>"
        f"<body><h1>kvops diagnose matrix</h1>{section(matrix)}</body></html>\n"
    )
