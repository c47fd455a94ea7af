"""``kvops chaos soak``: faults drawn at random, round after round, on one pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvops.cli import options
from kvops.cli.chaos_run import RUNS, show, teller
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import DURATION_MS, PATH, Settings
from kvops.cli.output import Output

if TYPE_CHECKING:
    from pathlib import Path


@options.command("soak")
@click.option(
    "--faults", multiple=True, metavar="LIST", help="What to draw from  [default: pause, kill, slow]."
)
@click.option("--stores", type=click.IntRange(2, 16), default=4, show_default=True, help="Of the pool.")
@click.option("--min-up", type=click.IntRange(1), default=3, show_default=True, help="Stores no fault is on.")
@click.option(
    "--for", "duration", type=DURATION_MS, default="10m", show_default=True, help="About how long in all."
)
@click.option("--masters", is_flag=True, help="A master may be hit too.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed draws the same rounds.")
@click.option("--dry-run", is_flag=True, help="Show the rounds and do nothing.")
@click.option(
    "--runs", "runs_dir", type=PATH, default=RUNS, show_default=True, help="Where the history goes."
)
@click.pass_obj
def command(
    settings: Settings,
    faults: tuple[str, ...],
    stores: int,
    min_up: int,
    duration: int,
    masters: bool,
    seed: int,
    dry_run: bool,
    runs_dir: Path,
) -> int:
    r"""
    Draw faults at random within bounds, round after round, while clients go on; judge all of it at the end.

    One pool lives through all rounds. At any moment at least --min-up stores have no fault on them.

    \b
    Examples:
      kvops chaos soak --for 1h --min-up 2 --seed 42
      kvops chaos soak --faults process.pause,process.kill --dry-run
    """
    from kvops.chaos.report.document import document
    from kvops.chaos.runner import Options, duration_s
    from kvops.chaos.soak import FAULTS_DEFAULT, Soak, describe, rounds_for
    from kvops.chaos.suite import run_judged
    from kvops.cli.units import human_age, split_list

    out = Output(settings)
    chosen = tuple(split_list(faults)) or FAULTS_DEFAULT
    one = Soak(rounds=1, seed=seed, faults=chosen, stores=stores, min_up=min_up, masters=masters)
    rounds = rounds_for(duration / 1000, duration_s(one.whole(), quick=False))
    soak = Soak(rounds=rounds, seed=seed, faults=chosen, stores=stores, min_up=min_up, masters=masters)
    experiment = soak.whole()
    out.header(
        "local", f"seed {seed}   {rounds} rounds, about {human_age(duration_s(experiment, quick=False))}"
    )
    if dry_run:
        if out.structured:
            out.document({"dry_run": True, "seed": seed, "rounds": list(describe(soak))})
        else:
            for text in describe(soak):
                click.echo(text)
        return 0
    said = Options(
        state_dir=state_dir(settings), runs_dir=runs_dir, source="soak", seed=seed, round_of=soak.draw
    )
    ran, record, judged = run_judged(experiment, said, say=teller(settings))
    if out.structured:
        out.raw_json(document(record, judged))
    show(out, ran, record, judged)
    return judged.exit_code
