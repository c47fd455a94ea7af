"""``kvops diagnose``: the whole RDMA path, on one host or many, with the cause and the fix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvops.cli import options
from kvops.cli.diagnose_matrix import HOST_TIMEOUT_S_DEFAULT, ProbeSaid, make_plan, probe_options
from kvops.cli.diagnose_matrix import command as matrix_command
from kvops.cli.hosts import SshSaid, find_inventory, find_logins, ssh_options
from kvops.cli.options import DURATION_MS, PATH, Settings
from kvops.cli.output import Column, Output
from kvops.errors import UsageError
from kvops.files import default_state_dir

if TYPE_CHECKING:
    from kvops.diag.facts import HostFacts
    from kvops.diag.matrix import Matrix
    from kvops.diag.model import Result
    from kvops.diag.probes import Plan
    from kvops.diag.registry import Check
    from kvops.diag.watch import Watch
    from kvops.host import SshLogin

FORMATS: Final = (*options.FORMATS, "junit", "md", "html")
WINDOW_MS_DEFAULT: Final = 10_000
EVENTS_BYTES_MAX: Final = 64 << 20


class Diagnose(options.Group):
    """A command with commands below it that does its work when it stands alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        callback = kwargs.get("callback")
        super().__init__(*args, **kwargs)
        self.callback = callback
        shared = {param.name for param in options.common_options()}
        self.params = [param for param in self.params if param.name not in shared]
        self.params.extend(options.common_options(FORMATS))


@click.group("diagnose", cls=Diagnose)
@click.option(
    "--from", "source", type=PATH, metavar="DIR|TAR", help="Judge a saved snapshot, or a folder of them."
)
@click.option(
    "--collect", type=PATH, metavar="DIR|TAR", help="Save what is seen (.tar.zst, .tar.gz or a folder)."
)
@click.option(
    "--host", "hosts", multiple=True, metavar="HOST", help="Look at these hosts over SSH: gpu-[001-040]."
)
@click.option(
    "--like", "likes", multiple=True, metavar="HOST", help="Compare with hosts (or snapshots) that work."
)
@click.option(
    "--window", "window_ms", type=DURATION_MS, default=WINDOW_MS_DEFAULT, help="Time between two samples."
)
@click.option("--only", multiple=True, metavar="ID", help="Only these checks: ids, families, globs.")
@click.option("--skip", multiple=True, metavar="ID", help="Not these checks.")
@click.option(
    "--pid", "pids", multiple=True, type=click.IntRange(min=1), help="A process to judge (found by itself)."
)
@click.option("--profile", "profile_file", type=PATH, metavar="FILE", help="The site's policy (YAML).")
@click.option(
    "--fail-on", type=click.Choice(["fail", "warn", "unknown"]), default="fail", help="What makes exit 1."
)
@click.option(
    "--diff",
    "older",
    type=PATH,
    metavar="JSON|DIR|TAR",
    help="Show what changed since this earlier -o json or snapshot: results and settings.",
)
@click.option(
    "--probe",
    "probes",
    multiple=True,
    metavar="NAME",
    help="Send packets. With --peer: icmp, mtu, tcp; alone: arp, cloud. Between hosts: as diagnose matrix.",
)
@click.option(
    "--peer", "peers", multiple=True, metavar="ADDRESS", help="Whom this host probes (HOST:PORT for tcp)."
)
@click.option(
    "--textfile", type=PATH, metavar="FILE", help="Write outcomes for node-exporter's textfile folder."
)
@ssh_options
@probe_options
@click.pass_context
def command(
    ctx: click.Context,
    source: Path | None,
    collect: Path | None,
    hosts: Sequence[str],
    likes: Sequence[str],
    window_ms: int,
    only: Sequence[str],
    skip: Sequence[str],
    pids: Sequence[int],
    profile_file: Path | None,
    fail_on: str,
    older: Path | None,
    probes: Sequence[str],
    peers: Sequence[str],
    textfile: Path | None,
    ssh: SshSaid,
    how: ProbeSaid,
) -> int:
    r"""
    The whole RDMA path: NIC, PCIe, NUMA, memory, GID, routes, MTU, priorities, counters, containers.

    Looks at this host, at others over SSH, or at a saved snapshot; changes nothing. Exit code 0: nothing is
    wrong. 1: a check fails. 3: something could not be seen.

    \b
    Examples:
      kvops diagnose
      kvops diagnose --collect host.tar.gz && kvops diagnose --from host.tar.gz -o html > host.html
      kvops diagnose --host gpu-[041-048] --like gpu-[001-040]
      kvops diagnose --inventory fleet.yaml --host role=store --probe tcp,udp,mtu,latency
    """
    if ctx.invoked_subcommand is not None:
        return 0
    from kvops.diag.runner import run, select

    settings: Settings = ctx.obj
    out = Output(settings)
    selected = select(_split(only), _split(skip))
    profile = _profile(profile_file)
    fleet = bool(hosts) or ssh.inventory is not None
    if fleet and peers:
        raise UsageError("--peer is for probes of this host alone", fix="leave --peer or --host out")
    wanted = {} if fleet else _probes(_split(probes), _split(peers))
    began = time.monotonic()
    window_s = window_ms / 1000
    unreached: list[tuple[str, str]] = []
    matrix: Matrix | None = None
    if source is not None:
        if fleet or collect is not None:
            raise UsageError("--from cannot be used with --host or --collect", fix="leave one of them out")
        nodes = _load(source)
        waited_s = 0.0
    elif fleet:
        logins = find_logins(settings, hosts, ssh)
        plan = None
        if probes:
            plan = make_plan(probes, hosts=len(logins), how=how)
        nodes, unreached, matrix = _fleet(logins, window_s, settings, collect, plan, out)
        waited_s = window_s
    else:
        nodes = [_local(window_s, pids, collect, wanted)]
        waited_s = window_s
    if likes:
        more, missing, _ = _some(likes, ssh, window_s, settings, out)
        nodes += more
        unreached += missing
    for node in nodes:
        node.profile = profile
    asked = bool(only) and not any("*" in pattern for pattern in _split(only))
    results = run(nodes, selected, asked=asked)
    took_s = max(time.monotonic() - began - waited_s, 0.0)
    results = _muted(settings, results)
    if textfile is not None:
        from kvops.diag import textfile as node_exporter

        node_exporter.write(textfile, results)
    if older is not None:
        return _show_changes(out, nodes, results, older, selected, profile)
    return _show(out, nodes, results, took_s=took_s, fail_on=fail_on, unreached=unreached, matrix=matrix)


def _state_dir(settings: Settings) -> Path:
    return settings.state_dir or default_state_dir()


def _muted(settings: Settings, results: Sequence[Result]) -> list[Result]:
    from datetime import UTC, datetime

    from kvops.diag.mutes import apply_mutes, load_mutes

    mutes = load_mutes(_state_dir(settings))
    return apply_mutes(results, mutes, now=datetime.now(UTC)) if mutes else list(results)


def _probes(names: Sequence[str], peers: Sequence[str]) -> dict[str, list[str]]:
    """What the collector is told to send. Raises UsageError for a probe that there is not."""
    for name in names:
        from kvops.diag.collect.agent import PROBES

        if name not in PROBES:
            raise UsageError(
                f"this host alone has no probe {name!r}",
                fix=f"choose from: {', '.join(PROBES)}; or see kvops diagnose matrix --help",
            )
    if set(names) & {"icmp", "mtu", "tcp"} and not peers:
        raise UsageError("--probe needs somebody to probe", fix="give --peer ADDRESS (HOST:PORT for tcp)")
    tcp = [peer for peer in peers if "tcp" in names and peer.count(":") == 1]
    return {"probes": list(names), "peers": [peer for peer in peers if peer not in tcp], "tcp": tcp}


def _show_changes(
    out: Output,
    nodes: Sequence[HostFacts],
    results: Sequence[Result],
    older: Path,
    selected: Sequence[Check],
    profile: dict[str, Any],
) -> int:
    """What changed since an older document, or since a snapshot that is judged again as it was."""
    from kvops.diag import report

    if older.is_dir() or ".tar" in older.name:
        from kvops.diag.runner import run

        before_nodes = _load(older)
        for node in before_nodes:
            node.profile = profile
        before = _with_settings(report.document(before_nodes, run(before_nodes, selected)), before_nodes)
    else:
        before = _document(older)
    after = _with_settings(report.document(nodes, results), nodes)
    old: Any = before.get("settings")
    if not isinstance(old, dict):
        old = {}
    if len(nodes) == 1 and len(old) == 1:
        # One host then and now: the same, whatever it was called.
        name, (was_name, was) = nodes[0].name, next(iter(old.items()))
        old = {name: was}
        before["results"] = [
            {**row, "node": name} if isinstance(row, dict) and row.get("node") == was_name else row
            for row in before.get("results") or ()
        ]
    rows = report.changes(before, after)
    for node, now in after["settings"].items():
        was = old.get(node)
        rows += [
            {
                "change": "setting",
                "check": key,
                "node": node,
                "was": was[key],
                "now": now[key],
                "observed": "",
            }
            for key in (sorted(now.keys() & was.keys()) if isinstance(was, dict) else ())
            if now[key] != was[key]
        ]
    keys = ("change", "check", "node", "was", "now", "observed")
    out.rows("changes", [Column(key) for key in keys], rows)
    return 1 if any(row["change"] == "worse" for row in rows) else 0


def _document(path: Path) -> dict[str, Any]:
    """An earlier ``-o json``. Raises ConfigError."""
    import json

    from kvops.errors import ConfigError

    fix = "save the older one with: kvops diagnose -o json, or name a snapshot"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", fix=fix) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no document", fix=fix)
    return found


def _with_settings(document: dict[str, Any], nodes: Sequence[HostFacts]) -> dict[str, Any]:
    """The document, with the settings that should stay as they are: what --diff compares tomorrow."""
    from kvops.diag.checks.xnode import settings

    return {**document, "settings": {node.name: settings(node) for node in nodes}}


def _split(patterns: Sequence[str]) -> list[str]:
    return [word for pattern in patterns for word in pattern.split(",") if word]


def _profile(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    from kvops.diag.profile import load_profile

    return load_profile(path)


def _load(path: Path) -> list[HostFacts]:
    from kvops.diag.facts import HostFacts
    from kvops.diag.snapshot import load

    snapshots = load(path)
    fallback = path.name.partition(".tar")[0] or "snapshot"
    return [HostFacts(snapshot, name=snapshot.name or fallback) for snapshot in snapshots]


def _local(
    window_s: float, pids: Sequence[int], collect: Path | None, probes: dict[str, list[str]] | None = None
) -> HostFacts:
    from kvops.diag.collect import agent
    from kvops.diag.facts import HostFacts
    from kvops.diag.snapshot import from_files, save

    files = agent.collect(window_s=window_s, pids=list(pids), **(probes or {}))
    if collect is not None:
        save(files, collect)
    return HostFacts(from_files(files, "this host")[0])


def _fleet(
    logins: Sequence[SshLogin],
    window_s: float,
    settings: Settings,
    collect: Path | None,
    plan: Plan | None,
    out: Output,
) -> tuple[list[HostFacts], list[tuple[str, str]], Matrix | None]:
    """Collect hosts, and probe between them if there is a plan; what probes found is part of what is seen."""
    from kvops.diag.facts import HostFacts
    from kvops.diag.fleet import gather
    from kvops.diag.snapshot import from_files, save

    timeout_s = settings.timeout_s(HOST_TIMEOUT_S_DEFAULT)
    answers = gather(logins, window_s=window_s, timeout_s=timeout_s)
    matrix: Matrix | None = None
    found: dict[str, list[dict[str, Any]]] = {}
    if plan is not None:
        from kvops.diag.matrix import records
        from kvops.diag.probes import run_matrix

        alive = {answer.name for answer in answers if answer.files is not None}
        reached = [login for login in logins if login.name in alive]
        if reached:
            matrix = run_matrix(reached, plan, timeout_s=timeout_s, note=out.note)
            found = records(matrix)
    nodes, unreached = [], []
    for answer in answers:
        if answer.files is None:
            unreached.append((answer.name, answer.error))
            continue
        if found.get(answer.name):
            _add_records(answer.files, found[answer.name])
        nodes.append(HostFacts(from_files(answer.files, answer.name)[0], name=answer.name))
        if collect is not None:
            save(answer.files, collect / answer.name)
    return nodes, unreached + (matrix.unreached if matrix is not None else []), matrix


def _add_records(files: dict[str, bytes], records: Sequence[dict[str, Any]]) -> None:
    """Into a snapshot's meta.json: a month later ``--from`` judges the same."""
    import json

    meta = json.loads(files["meta.json"])
    meta["probes"] = [*(meta.get("probes") or []), *records]
    files["meta.json"] = json.dumps(meta, indent=1, sort_keys=True).encode()


def _some(
    words: Sequence[str],
    ssh: SshSaid,
    window_s: float,
    settings: Settings,
    out: Output,
    plan: Plan | None = None,
) -> tuple[list[HostFacts], list[tuple[str, str]], Matrix | None]:
    """Hosts as they were saved where such a path exists, else over SSH."""
    from kvops.ranges import split_list

    nodes: list[HostFacts] = []
    remote = []
    for word in split_list(words):
        # A path is meant where one is written; a folder that happens to be called like a host is not.
        if Path(word).exists() and ("/" in word or not _known(settings, ssh, word)):
            nodes += _load(Path(word))
        else:
            remote.append(word)
    if not remote:
        if plan is not None:
            raise UsageError("saved snapshots cannot be probed", fix="name hosts, or leave --probe out")
        return nodes, [], None
    more, unreached, matrix = _fleet(find_logins(settings, remote, ssh), window_s, settings, None, plan, out)
    return nodes + more, unreached, matrix


def _known(settings: Settings, ssh: SshSaid, word: str) -> bool:
    """Whether the inventory, if there is one, has it."""
    inventory = find_inventory(settings, ssh)
    return inventory is not None and (word in inventory.hosts or word in inventory.groups)


def _show(
    out: Output,
    nodes: Sequence[HostFacts],
    results: Sequence[Result],
    *,
    took_s: float,
    fail_on: str,
    unreached: Sequence[tuple[str, str]],
    matrix: Matrix | None = None,
) -> int:
    from kvops.diag import render, report

    code = report.exit_code(results, fail_on=fail_on)
    if matrix is not None and code == 0:
        from kvops.cli.diagnose_matrix import exit_code

        code = exit_code(matrix)
    if unreached and code == 0:
        code = 3
    kind = out.format  # a table that goes into a pipe is TSV
    if kind in ("json", "jsonl"):
        document = _with_settings(
            report.document(nodes, results, fail_on=fail_on, unreached=bool(unreached)), nodes
        )
        document["exit_code"] = code
        document["took_s"] = round(took_s, 3)
        document["unreached"] = [{"host": name, "reason": reason} for name, reason in unreached]
        if matrix is not None:
            from kvops.diag.matrix import document as matrix_document

            document["matrix"] = matrix_document(matrix)
        if kind == "json":
            out.document(document)
        else:
            for row in document["results"]:
                out.raw_json({"schema": 1, **row})
    elif kind == "junit":
        from kvops.diag.render_junit import junit

        click.echo(junit(results, unreached), nl=False)
    elif kind == "md":
        click.echo(render.markdown(nodes, results, took_s=took_s, unreached=unreached), nl=False)
    elif kind == "html":
        from kvops.diag.render_html import page as page_of

        page = page_of(nodes, results, took_s=took_s, unreached=unreached)
        if matrix is not None:
            from kvops.diag.render_matrix import section

            page = page.replace("</body>", f"{section(matrix)}</body>")
        click.echo(page, nl=False)
    elif kind == "name":
        for name in dict.fromkeys(r.check for r in results if r.outcome in ("fail", "warn")):
            click.echo(name)
    else:
        verbose = out.settings.verbose
        for line in render.lines(
            nodes,
            results,
            took_s=took_s,
            verbose=verbose,
            style=lambda text, color: out.style(text, fg=color, bold=True),
            unreached=unreached,
        ):
            out.line(line)
        if matrix is not None:
            from kvops.diag.render_matrix import lines

            for line in lines(
                matrix,
                wide=out.format == "wide",
                style=lambda text, color: out.style(text, fg=color, bold=True),
            ):
                out.line(line)
        if kind == "tsv":
            rows = [
                {"outcome": str(r.outcome), "node": r.node, "check": r.check, "subject": f.subject}
                | {"observed": f.observed, "expected": f.expected, "fix": f.fix}
                for r in results
                for f in r.findings
            ]
            out.table(
                [
                    Column(key)
                    for key in ("outcome", "node", "check", "subject", "observed", "expected", "fix")
                ],
                rows,
            )
    return code


@command.command("list")
@click.option("--family", metavar="NAME", help="Only this family.")
@click.pass_obj
def list_command(settings: Settings, family: str | None) -> int:
    r"""
    List every check.

    \b
    Example:
      kvops diagnose list --family gid
    """
    from kvops.diag.registry import checks

    out = Output(settings)
    rows = [
        {"check": c.id, "kind": c.kind, "root": c.root, "title": c.title, "source": c.source}
        for c in checks().values()
        if family in (None, c.family)
    ]
    if not rows:
        raise UsageError(f"there is no family {family!r}", fix="see: kvops diagnose list")
    columns = [Column("check"), Column("kind"), Column("root"), Column("title"), Column("source", wide=True)]
    out.rows("checks", columns, rows)
    return 0


@command.group("profile", cls=options.Group)
def profile_group() -> None:
    r"""
    Derive a site's policy from a healthy node, or compare with it.

    \b
    Example:
      kvops diagnose profile init > site.yaml
    """


def _profiled(
    settings: Settings, source: Path | None, hosts: Sequence[str], ssh: SshSaid, out: Output
) -> tuple[list[HostFacts], list[tuple[str, str]]]:
    """The nodes that a profile is made from or compared with."""
    if source is not None and hosts:
        raise UsageError("--from cannot be used with --host", fix="leave one of them out")
    if source is not None:
        return _load(source), []
    if hosts:
        nodes, unreached, _ = _some(hosts, ssh, 0.0, settings, out)
        return nodes, unreached
    return [_local(0.0, (), None)], []


@profile_group.command("init")
@click.option(
    "--from",
    "source",
    type=PATH,
    metavar="DIR|TAR",
    help="A snapshot of a healthy node (this host by default).",
)
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="A healthy node, over SSH.")
@ssh_options
@click.pass_obj
def profile_init(settings: Settings, source: Path | None, hosts: Sequence[str], ssh: SshSaid) -> int:
    r"""
    Print a profile of a healthy node as YAML.

    \b
    Examples:
      kvops diagnose profile init --from healthy/ > site.yaml
      kvops diagnose profile init --host gpu-001 > site.yaml
    """
    from kvops.diag.profile import derive, dump
    from kvops.errors import Unreachable

    nodes, unreached = _profiled(settings, source, hosts, ssh, Output(settings))
    if not nodes:
        raise Unreachable(f"{unreached[0][0]}: {unreached[0][1]}", fix="name a host that answers")
    if len(nodes) != 1:
        raise UsageError(f"{len(nodes)} nodes", fix="a profile is made from one healthy node")
    click.echo(dump(derive(nodes[0])), nl=False)
    return 0


@profile_group.command("diff")
@click.argument("profile_file", type=PATH, metavar="PROFILE")
@click.option("--from", "source", type=PATH, metavar="DIR|TAR", help="Snapshots (this host by default).")
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="Hosts over SSH.")
@ssh_options
@click.pass_obj
def profile_diff(
    settings: Settings, profile_file: Path, source: Path | None, hosts: Sequence[str], ssh: SshSaid
) -> int:
    r"""
    What differs between a profile and nodes. Exit code 1 if anything does, 3 if a host did not answer.

    \b
    Examples:
      kvops diagnose profile diff site.yaml --from today.tar.gz
      kvops diagnose profile diff site.yaml --host gpu-[001-040]
    """
    from kvops.diag.profile import derive, differences, load_profile

    out = Output(settings)
    profile = load_profile(profile_file)
    nodes, unreached = _profiled(settings, source, hosts, ssh, out)
    rows = [{"host": node.name, **row} for node in nodes for row in differences(profile, derive(node))]
    missing = [{"host": name, "reason": reason} for name, reason in unreached]
    out.rows(
        "differences",
        [Column("host"), Column("key"), Column("profile"), Column("node")],
        rows,
        unreached=missing,
    )
    for name, reason in unreached:
        out.note(f"UNREACHED  {name}: {reason}")
    return 1 if rows else 3 if unreached else 0


@command.command("path")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--window", "window_ms", type=DURATION_MS, default=WINDOW_MS_DEFAULT, help="Time between two samples."
)
@click.option(
    "--probe",
    "probes",
    multiple=True,
    metavar="NAME",
    help="Probe both ways, too: tcp, udp, icmp, mtu, latency, bandwidth, verbs …",
)
@ssh_options
@probe_options
@click.pass_obj
def path_command(
    settings: Settings,
    first: str,
    second: str,
    window_ms: int,
    probes: Sequence[str],
    ssh: SshSaid,
    how: ProbeSaid,
) -> int:
    r"""
    The way between two hosts, hop by hop: hosts over SSH, or saved snapshots; probed both ways with --probe.

    \b
    Example:
      kvops diagnose path gpu-041 gpu-003
      kvops diagnose path gpu-041 gpu-003 --probe tcp,icmp,mtu,latency
    """
    from kvops.diag.report import path_text
    from kvops.diag.runner import run, select

    out = Output(settings)
    began = time.monotonic()
    plan = None
    if probes:
        plan = make_plan(probes, hosts=2, how=how)
    nodes, unreached, matrix = _some([first, second], ssh, window_ms / 1000, settings, out, plan)
    results = run(nodes, select(skip=() if probes else ("probe",)))
    if out.human:
        for node in nodes:
            out.line(f"{node.name}  {path_text(node, results)}")
    took_s = max(time.monotonic() - began - window_ms / 1000 * bool(unreached or not nodes), 0.0)
    return _show(out, nodes, results, took_s=took_s, fail_on="fail", unreached=unreached, matrix=matrix)


@command.command("watch")
@click.option("--for", "duration_ms", type=DURATION_MS, default=60_000, help="How long to watch.")
@click.option("--every", "every_ms", type=DURATION_MS, default=1_000, help="Length of a window.")
@click.option("--only", multiple=True, metavar="ID", help="Only these checks.")
@click.option(
    "--metrics",
    "metrics",
    multiple=True,
    metavar="URL",
    help="/metrics of stores and engines (the local group's by default).",
)
@click.option(
    "--events", "events_file", type=PATH, metavar="FILE", help="Append events (jsonl), without rates."
)
@click.option(
    "--textfile", type=PATH, metavar="FILE", help="Keep rates and outcomes there for node-exporter."
)
@click.option(
    "--host", "hosts", multiple=True, metavar="HOST", help="Watch these hosts over SSH: gpu-[001-016]."
)
@ssh_options
@click.pass_obj
def watch_command(
    settings: Settings,
    hosts: Sequence[str],
    ssh: SshSaid,
    duration_ms: int,
    every_ms: int,
    only: Sequence[str],
    metrics: Sequence[str],
    events_file: Path | None,
    textfile: Path | None,
) -> int:
    r"""
    Watch ports of this host, or of others: rates, flaps, retransmissions, pauses; one line a window, one an event.

    At the end says whether ECN marks, CNPs, PFC pauses, signs of incast and retransmissions moved together with
    transfer speed and the time to the first token: by rank, over at least 20 windows, and never as a cause.

    \b
    Examples:
      kvops diagnose watch --for 1h --every 10s -o jsonl
      kvops diagnose watch --for 1h --metrics http://gpu-017:9100/metrics --events today.jsonl
      kvops diagnose watch --host gpu-[017-024] --for 10m --every 10s
    """
    from functools import partial

    from kvops.diag import textfile as node_exporter
    from kvops.diag.runner import select
    from kvops.diag.scrape import checked_urls, scrape
    from kvops.diag.watch import Watch

    out = Output(settings)
    chosen = select(
        _split(only) or ("ctr", "link.flap", "link.symbol_errors", "pcie.stall", "driver.vf_revoked")
    )
    urls = checked_urls(_split(metrics) or _local_metrics(settings))
    new_watch = partial(
        Watch,
        duration_s=duration_ms / 1000,
        every_s=every_ms / 1000,
        selected=chosen,
        scrape=partial(scrape, urls) if urls else None,
    )
    watch = new_watch()
    rows = watch.rows()
    if hosts or ssh.inventory is not None:
        if textfile is not None:
            raise UsageError(
                "--textfile is for this host alone", fix="run the watch on each host, or leave --textfile out"
            )
        rows = _watch_hosts(find_logins(settings, hosts, ssh), settings, new_watch)
    loud = 0
    for row in rows:
        loud += row["event"] in ("fail", "warn")
        if out.structured:
            out.raw_json({"schema": 1, **row})
        else:
            out.line(
                "  ".join(
                    str(row[key]) for key in ("time", "host", "event", "subject", "text") if row.get(key)
                )
            )
        if events_file is not None and row["event"] not in ("rate", "pool"):
            _append(events_file, row)
        if textfile is not None and row["event"] != "correlation":
            node_exporter.write(textfile, watch.results, watch.rates)
    return 1 if loud else 0


def _watch_hosts(
    logins: Sequence[SshLogin], settings: Settings, new_watch: Callable[..., Watch]
) -> Iterator[dict[str, Any]]:
    """One watch a host. Raises UsageError if there are too many."""
    from functools import partial

    from kvops.diag.fleet import collect_one
    from kvops.diag.watch import HOSTS_MAX, together

    if len(logins) > HOSTS_MAX:
        raise UsageError(f"{len(logins)} hosts to watch", fix=f"name {HOSTS_MAX} at most, or watch in parts")
    timeout_s = settings.timeout_s(HOST_TIMEOUT_S_DEFAULT)
    return together(
        {
            login.name: new_watch(name=login.name, collect=partial(collect_one, login, timeout_s=timeout_s))
            for login in logins
        }
    )


def _local_metrics(settings: Settings) -> list[str]:
    """Where the running members of the local group in use show their metrics."""
    from kvops.cli.context import resolve
    from kvops.errors import KvopsError

    try:
        state = resolve(settings).state
    except KvopsError:
        return []  # a host is watched with or without a group
    members = state.members if state is not None else []
    return [m.addresses["http"] for m in members if m.running and "http" in m.addresses]


def _append(path: Path, row: dict[str, Any]) -> None:
    """One line of jsonl, whole or not at all; a file that has grown large is left as it is."""
    import json

    from kvops.errors import ConfigError

    try:
        with path.open("a", encoding="utf-8") as file:
            if file.tell() < EVENTS_BYTES_MAX:
                file.write(json.dumps({"schema": 1, **row}, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", fix="name a file in a folder that is writable"
        ) from error


@command.command("mute")
@click.argument("patterns", nargs=-1, required=True, metavar="ID...")
@click.option("--for", "duration_ms", type=DURATION_MS, required=True, help="How long, such as 4h.")
@click.option("--reason", required=True, help="Why, for whoever reads the next report.")
@click.pass_obj
def mute_command(settings: Settings, patterns: Sequence[str], duration_ms: int, reason: str) -> int:
    r"""
    Let checks report as information only, for a while. --for 0s ends a mute.

    \b
    Example:
      kvops diagnose mute numa.balancing --for 4h --reason "reboot tonight, INC-4412"
    """
    from datetime import UTC, datetime, timedelta

    from kvops.diag.mutes import add_mute
    from kvops.diag.runner import select

    now = datetime.now(UTC)
    until = now + timedelta(milliseconds=duration_ms)
    names = [check.id for check in select(_split(patterns))]
    add_mute(_state_dir(settings), names, until=until, reason=reason, now=now)
    rows = [{"check": name, "until": until.isoformat(timespec="seconds"), "reason": reason} for name in names]
    Output(settings).rows("mutes", [Column("check"), Column("until"), Column("reason")], rows)
    return 0


command.add_command(matrix_command)
