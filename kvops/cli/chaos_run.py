"""``kvops chaos run``: one experiment, from the first look to the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import DURATION_MS, PATH, Settings
from kvops.cli.output import Output

if TYPE_CHECKING:
    from pathlib import Path

    from kvops.chaos.runner import Options, Ran
    from kvops.chaos.verdict import Judgement

RUNS = "runs"


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
@click.option("--yes", is_flag=True, help="Ask nothing: pools of an experiment's own never ask anyway.")
@click.pass_obj
def command(
    settings: Settings,
    file: Path,
    seed: int | None,
    quick: bool,
    without: tuple[str, ...],
    max_duration: int | None,
    runs_dir: Path,
    yes: bool,
) -> int:
    r"""
    Run an experiment on a pool of its own: inject, prove, hold, undo, prove again, judge.

    Ctrl-C undoes; a second one has the guardian undo at once. The exit code is the verdict's: 0 PASS, 1 FAIL,
    4 DIRTY, 10 BASELINE_NOT_STEADY, 11 NOT_INJECTED, 12 ABORTED, 13 UNKNOWN, 14 UNSUPPORTED, 130 interrupted.

    \b
    Examples:
      kvops chaos run playbooks/experiments/store-pause.yaml
      kvops chaos run playbooks/experiments/store-kill.yaml --without local-first
    """
    from dataclasses import replace

    from kvops.chaos.experiment import load
    from kvops.chaos.runner import Options, duration_s
    from kvops.chaos.safeguards import Safeguards
    from kvops.chaos.suite import run_judged
    from kvops.cli.units import human_age, split_list

    out = Output(settings)
    names = tuple(split_list(without))
    Safeguards(names)  # a misspelt one is refused before anything runs
    experiment = load(file)
    options_ = Options(
        state_dir=state_dir(settings),
        runs_dir=runs_dir,
        source=str(file),
        seed=seed,
        quick=quick,
        max_duration_s=None if max_duration is None else max_duration / 1000,
    )
    expected_s = duration_s(experiment, quick=quick) * (2 if names else 1)
    out.header("local", f"{experiment.title}   about {human_age(expected_s)}")
    ran, judged = run_judged(experiment, options_, say=teller(settings))
    documents = [document(ran, judged, options_)]
    show(out, ran, judged)
    if names and judged.exit_code not in (130, 4):
        bare = replace(options_, without=names)
        out.line()
        out.header("local", f"the same without {', '.join(names)}")
        ran_bare, judged_bare = run_judged(experiment, bare, say=teller(settings))
        documents.append(document(ran_bare, judged_bare, bare))
        show(out, ran_bare, judged_bare)
        compare(out, judged, judged_bare, names)
    if out.structured:
        out.document({**documents[0], **({"without": documents[1]} if len(documents) > 1 else {})})
    return judged.exit_code


def teller(settings: Settings) -> Any:
    """Prints a run's steps as they happen, on stderr."""

    def say(step: str, text: str) -> None:
        if not settings.quiet:
            click.echo(f"{step:<9} {text}", err=True)

    return say


def document(ran: Ran, judged: Judgement, said: Options) -> dict[str, Any]:
    """A run as JSON: the keys that others rely on."""
    numbers = judged.containment
    return {
        "run": ran.run_id,
        "verdict": judged.verdict.value,
        "reasons": list(judged.reasons),
        "also": [one.value for one in judged.also],
        "seed": said.seed,
        "injected": judged.injected,
        "undone": judged.undone,
        "left": list(judged.left),
        "containment": {
            "K": numbers.k,
            "S": numbers.spread,
            "amplification": numbers.amplification,
            "t_detect_s": numbers.t_detect_s,
            "t_contain_s": numbers.t_contain_s,
            "t_recover_s": numbers.t_recover_s,
            "t_rewarm_s": numbers.t_rewarm_s,
            "requests": numbers.requests,
            "harmed": numbers.harmed,
        },
        "timeline": [
            {"t_s": point.t_s, "degraded": point.degraded, "hit": point.hit, "ttft_ms": point.ttft_ms}
            for point in numbers.timeline
        ],
        "checkers": [
            {
                "id": one.checker.id,
                "name": one.checker.name,
                "verdict": one.result.verdict.value,
                "summary": one.result.summary,
                "counts": one.counts,
            }
            for one in judged.checkers
        ],
        "not_concluded": list(judged.not_concluded),
        "without_safeguards": list(said.without),
        "folder": str(ran.folder),
        "seconds": round(ran.seconds, 1),
    }


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def show(out: Output, ran: Ran, judged: Judgement) -> None:
    """The verdict, for people."""
    if out.structured:
        return
    numbers = judged.containment
    harmed = numbers.harmed
    out.line(
        f"{judged.verdict.value}  K {number(numbers.k)}   S {number(numbers.spread)}   "
        f"amplification {number(numbers.amplification)}   wrong {harmed.get('wrong', 0)}   "
        f"late {harmed.get('late', 0)}   failed {harmed.get('failed', 0)}   of {numbers.requests} requests"
    )
    for reason in judged.reasons:
        out.line(f"  {reason}")
    for one in judged.checkers:
        if one.counts and one.result.verdict.value != "valid":
            out.line(f"  {one.checker.id:<4} {one.result.verdict.value:<8} {one.result.summary}")
    for text in judged.not_concluded:
        out.line(f"  not concluded: {text}")
    for text in judged.left:
        out.line(f"  LEFT BEHIND, run: {text}")
    out.line(f"{ran.folder}    kvops chaos report {ran.folder}")


def compare(out: Output, with_all: Judgement, bare: Judgement, names: tuple[str, ...]) -> None:
    """Both containments side by side: what the safeguards are worth here."""
    if out.structured:
        return
    one, two = with_all.containment, bare.containment
    rows = [
        ("verdict", with_all.verdict.value, bare.verdict.value),
        ("K", number(one.k), number(two.k)),
        ("S", number(one.spread), number(two.spread)),
        ("amplification", number(one.amplification), number(two.amplification)),
        ("detected after s", number(one.t_detect_s, 1), number(two.t_detect_s, 1)),
        ("contained after s", number(one.t_contain_s, 1), number(two.t_contain_s, 1)),
        ("recovered after s", number(one.t_recover_s, 1), number(two.t_recover_s, 1)),
        *(
            (f"requests {name}", str(one.harmed.get(name, 0)), str(two.harmed.get(name, 0)))
            for name in one.harmed
        ),
    ]
    out.line()
    out.line(f"{'':<20}{'with':>14}{'without':>14}   {', '.join(names)}")
    for name, left, right in rows:
        out.line(f"{name:<20}{left:>14}{right:>14}")
