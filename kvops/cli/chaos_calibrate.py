"""``kvops chaos calibrate``: runs without a fault, and how many of them would have been called a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kvops.cli import options
from kvops.cli.chaos_run import RUNS, number, teller
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import PATH, Settings
from kvops.cli.output import Column, Output

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS: Final = (
    Column("seed"),
    Column("verdict"),
    Column("noise"),
    Column("seconds"),
    Column("blamed"),
)
EXIT_FALSE_ALARM: Final = 1
ENDED: Final = ("DIRTY", "INTERRUPTED")  # verdicts after which no further run is begun


@options.command("calibrate")
@click.argument("file", type=PATH)
@click.option("--count", "-n", type=click.IntRange(1, 1_000), default=20, show_default=True)
@click.option("--windows", default="5x4s", show_default=True, help="Blocks and windows of each run.")
@click.option("--warmup", default="1s", show_default=True, help="Before each window, and not judged.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the first run; the next count up.")
@click.option("--runs", "runs_dir", type=PATH, default=RUNS, show_default=True, help="Where histories go.")
@click.pass_obj
def command(
    settings: Settings,
    file: Path,
    count: int,
    windows: str,
    warmup: str,
    seed: int,
    runs_dir: Path,
) -> int:
    r"""
    Run an experiment's load again and again without its fault, and judge each run as if there had been one.

    Whoever is blamed then is blamed for noise: on this machine such a verdict means nothing. The exit code is 1
    when any run would have been a FAIL.

    \b
    Examples:
      kvops chaos calibrate playbooks/experiments/store-kill.yaml
      kvops chaos calibrate playbooks/experiments/store-kill.yaml -n 5 --windows 5x8s
    """
    from kvops.chaos.calibrate import trials, without_fault
    from kvops.chaos.experiment import load
    from kvops.chaos.runner import Options, duration_s
    from kvops.chaos.verdict import EXIT_CODES
    from kvops.cli.units import human_age

    out = Output(settings)
    experiment = without_fault(load(file), windows=windows, warmup=warmup)
    total_s = count * duration_s(experiment, quick=False)
    out.header("local", f"{count} runs without a fault, about {human_age(total_s)}")
    said = Options(state_dir=state_dir(settings), runs_dir=runs_dir, source=str(file))
    rows: list[dict[str, object]] = []
    alarms = ended = 0
    for trial in trials(experiment, said, runs=count, seed=seed, say=teller(settings)):
        alarms += trial.false_alarm
        ended = EXIT_CODES[trial.verdict] if trial.verdict in ENDED else 0
        out.note(f"[{len(rows) + 1}/{count}] seed {trial.seed}: {trial.verdict.value}")
        rows.append(
            {
                "seed": trial.seed,
                "verdict": trial.verdict.value,
                "noise": number(trial.noise, 3),
                "seconds": round(trial.seconds, 1),
                "blamed": "; ".join(trial.blamed) or "-",
            }
        )
    if out.structured:
        out.document({"trials": rows, "runs": len(rows), "false_alarms": alarms})
    else:
        out.table(COLUMNS, rows)
        out.line(f"{alarms} of {len(rows)} runs without a fault would have been a FAIL")
    return ended or (EXIT_FALSE_ALARM if alarms else 0)
