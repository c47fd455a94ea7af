"""``kvops chaos run``: one experiment, from the first look to the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.context import load_configuration
from kvops.cli.hosts import SshSaid, ssh_options
from kvops.cli.options import DURATION_MS, PATH, Settings
from kvops.cli.output import Output, printable
from kvops.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from kvops.chaos.experiment import Experiment
    from kvops.chaos.history import RunRecord
    from kvops.chaos.remote_pool import RemoteGroup, Seen
    from kvops.chaos.runner import Ran
    from kvops.chaos.verdict import Judgement
    from kvops.cli.context import Target

RUNS: Final = "runs"
EXIT_LEFT_BEHIND: Final = 4
EXIT_INTERRUPTED: Final = 130


@options.command("run")
@click.argument("file", type=PATH)
@click.option("--seed", type=int, help="Instead of the file's.")
@click.option("--quick", is_flag=True, help="One pair of arms with short windows; proves little.")
@click.option(
    "--without",
    multiple=True,
    metavar="LIST",
    help="Run again without these safeguards, such as breaker,local-first; both are shown.",
)
@click.option("--max-duration", type=DURATION_MS, metavar="DURATION", help="End the run after this long.")
@click.option("--runs", "runs_dir", type=PATH, default=RUNS, show_default=True, help="Where histories go.")
@click.option("--lab", "in_lab", is_flag=True, help="On this group's lab, which is up (kvops chaos lab up).")
@click.option("--yes", is_flag=True, help="Ask nothing: pools of an experiment's own never ask anyway.")
@ssh_options
@click.pass_obj
def command(
    settings: Settings,
    file: Path,
    seed: int | None,
    quick: bool,
    without: tuple[str, ...],
    max_duration: int | None,
    runs_dir: Path,
    in_lab: bool,
    yes: bool,
    ssh: SshSaid,
) -> int:
    r"""
    Run an experiment on a pool of its own: inject, prove, hold, undo, prove again, judge.

    With --lab it is run on the nodes of this group's lab, each with an address of its own; the lab stays up.

    When the group is a context (-g), it is run on that group, which serves on hosts of the context's inventory: load
    comes from here, faults are injected, guarded and undone on the hosts over SSH, each with kvops on its PATH. The
    file's environment.must_match must be the context's environment; production and protected groups are refused.

    Ctrl-C undoes; a second one has the guardian undo at once. The exit code is the verdict's: 0 PASS, 1 FAIL,
    4 DIRTY, 10 BASELINE_NOT_STEADY, 11 NOT_INJECTED, 12 ABORTED, 13 UNKNOWN, 14 UNSUPPORTED, 130 interrupted.

    \b
    Examples:
      kvops chaos run playbooks/experiments/store-pause.yaml
      kvops chaos run playbooks/experiments/store-kill.yaml --without local-first
      kvops chaos lab up && kvops chaos run playbooks/experiments/store-oneway.yaml --lab
      kvops -g staging-b chaos run store-pause-staging.yaml --quick --inventory fleet.yaml
    """
    from dataclasses import replace

    from kvops.chaos.artefacts import write_comparison
    from kvops.chaos.experiment import load
    from kvops.chaos.report.compare import as_side, render
    from kvops.chaos.report.compare import document as compared
    from kvops.chaos.report.document import document
    from kvops.chaos.runner import Options, duration_s
    from kvops.chaos.safeguards import Safeguards
    from kvops.chaos.suite import run_judged
    from kvops.cli.units import human_age, split_list

    out = Output(settings)
    names = tuple(split_list(without))
    Safeguards(names)  # a misspelt one is refused before anything runs
    experiment = load(file)
    group = "local"
    if in_lab:
        from kvops.chaos.pool import on_lab

        group = str(load_configuration(settings).group.value)
        experiment = on_lab(experiment, state_dir(settings), group)
        Safeguards(names).pool(experiment.ours.pool)  # what a lab cannot do without is refused, too
    there = None if in_lab else _remote(settings, ssh)
    if there is not None:
        experiment, group = _on_group(there, experiment, names, seed=seed, yes=yes), there[0].label
    options_ = Options(
        state_dir=state_dir(settings),
        runs_dir=runs_dir,
        source=str(file),
        seed=seed,
        quick=quick,
        max_duration_s=None if max_duration is None else max_duration / 1000,
        remote=None if there is None else there[1:],
    )
    expected_s = duration_s(experiment, quick=quick) * (2 if names else 1)
    out.header(group, f"{experiment.title}   about {human_age(expected_s)}")
    ran, record, judged = run_judged(experiment, options_, say=teller(settings))
    show(out, ran, record, judged)
    sides = [as_side(record, judged)]
    if names and judged.exit_code not in (EXIT_LEFT_BEHIND, EXIT_INTERRUPTED):
        out.line()
        out.header(group, f"the same without {', '.join(names)}")
        ran, record, bare = run_judged(experiment, replace(options_, without=names), say=teller(settings))
        show(out, ran, record, bare)
        sides.append(as_side(record, bare))
        page = write_comparison(ran.folder, sides)
        if not out.structured:
            out.line()
            for line in render(sides).splitlines():
                out.line(printable(line))
            out.line(str(page))
    if out.structured:
        made = document(sides[0].record, judged)
        if len(sides) > 1:
            made["comparison"] = compared(sides)
        out.raw_json(made)
    last = sides[-1].judgement.exit_code  # what the first one proves stands, unless the second leaves trouble
    return last if last in (EXIT_LEFT_BEHIND, EXIT_INTERRUPTED) else judged.exit_code


def _remote(settings: Settings, ssh: SshSaid) -> tuple[Target, RemoteGroup, Seen] | None:
    """The group on hosts that is meant, and how its masters have it; None when the group is no context."""
    configuration = load_configuration(settings)
    name = str(configuration.group.value)
    if configuration.context(name) is None:
        return None
    from kvops.chaos.remote_pool import RemoteGroup
    from kvops.cli.context import resolve
    from kvops.cli.hosts import find_inventory, find_logins

    target = resolve(settings)
    inventory = find_inventory(settings, ssh)
    if inventory is None:
        raise UsageError(
            f"context {name} has no inventory: its hosts cannot be reached",
            fix="add inventory: FILE to it, or --inventory; or take a pool of its own: kvops -g local chaos run",
        )
    target.secret()
    assert target.secret_file is not None
    group = RemoteGroup(
        name=target.name,
        environment=target.environment,
        protect=target.protect,
        masters=tuple(target.require_masters()),
        control=tuple(target.control),
        secret_file=str(target.secret_file),
        hosts=inventory.hosts,
        logins={login.name: login for login in find_logins(settings, list(inventory.hosts), ssh)},
    )
    group.refuse()
    return target, group, group.look()


def _on_group(
    there: tuple[Target, RemoteGroup, Seen],
    experiment: Experiment,
    without: tuple[str, ...],
    *,
    seed: int | None,
    yes: bool,
) -> Experiment:
    """The experiment on that group, once its cost is agreed to."""
    from kvops.chaos.remote_pool import on_group
    from kvops.chaos.resolve import choose
    from kvops.cli.guard import confirm

    target, group, seen = there
    if "local-first" in without:
        raise UsageError(
            f"the placement of {group.name} is its masters' own: --without cannot change it",
            fix="leave local-first out, or run on a pool of its own: kvops -g local chaos run",
        )
    experiment = on_group(experiment, group, seen)
    chosen = choose(experiment, seen.parts, seed=experiment.ours.workload.seed if seed is None else seed)
    hit = ", ".join(dict.fromkeys(f"{one.part.member} on {one.part.machine}" for one in chosen.hits))
    confirm(
        target,
        f"{experiment.title}: {hit}, {chosen.capacity_share:.0%} of its capacity while it lasts",
        yes=yes,
        share=chosen.capacity_share,
    )
    return experiment


def teller(settings: Settings) -> Any:
    """Prints a run's steps as they happen, on stderr."""

    def say(step: str, text: str) -> None:
        if not settings.quiet:
            click.echo(f"{step:<9} {text}", err=True)

    return say


def show(out: Output, ran: Ran, record: RunRecord, judged: Judgement) -> None:
    """The run, for people."""
    if out.structured:
        return
    from kvops.chaos.artefacts import PAGE
    from kvops.chaos.report import text

    for line in text.render(record, judged, verbose=out.settings.verbose > 0).splitlines():
        out.line(printable(line))
    out.line(f"{ran.folder / PAGE}")


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
