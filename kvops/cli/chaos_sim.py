"""``kvops chaos sim``: breaks a simulated pool, seed by seed, and explains what breaks a rule."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import click

from kvops.cli import options
from kvops.cli.options import DURATION_MS, Settings
from kvops.cli.output import Column, Output, Progress

if TYPE_CHECKING:
    from kvops.chaos.sim.campaign import Failure
    from kvops.chaos.sim.plan import Config

SEEDS_MAX: Final = 10_000_000
EXPLAINED_MAX: Final = 3  # failing seeds that are made smaller; the others are named
TIMELINE_LINES: Final = 60
DURATION_MS_DEFAULT: Final = 60_000
FAULT_COLUMNS: Final = (Column("fault"), Column("what"))


@options.command("sim")
@click.option(
    "--seeds", type=click.IntRange(1, SEEDS_MAX), default=10, show_default=True, help="How many seeds to run."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The first seed.")
@click.option(
    "--duration",
    "duration_ms",
    type=DURATION_MS,
    default=DURATION_MS_DEFAULT,
    show_default="60s",
    help="Simulated time with faults, in each seed.",
)
@click.option(
    "--masters",
    type=click.IntRange(1, 7),
    default=3,
    show_default=True,
    help="From two on, elected in a modelled etcd of three members.",
)
@click.option("--stores", type=click.IntRange(1, 64), default=8, show_default=True, help="Store nodes.")
@click.option("--clients", type=click.IntRange(1, 256), default=16, show_default=True, help="Engines.")
@click.option(
    "--calls-per-second",
    type=click.FloatRange(0.01, 1_000),
    default=3.0,
    show_default=True,
    help="Of each engine.",
)
@click.option(
    "--faults-per-second",
    type=click.FloatRange(0, 100),
    default=1.0,
    show_default=True,
    help="Of all together, on average.",
)
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="Only these faults; may be repeated.")
@click.option("--list-faults", is_flag=True, help="Name the faults, and end.")
@click.option(
    "--jobs", type=click.IntRange(1, 64), show_default="one a processor", help="Seeds that run side by side."
)
@click.option("--no-shrink", is_flag=True, help="Do not look for a smaller failing run.")
@click.option("--mutate", metavar="NAME", help="Break the code on purpose first; only in a source checkout.")
@click.pass_obj
def command(
    settings: Settings,
    seeds: int,
    seed: int,
    duration_ms: int,
    masters: int,
    stores: int,
    clients: int,
    calls_per_second: float,
    faults_per_second: float,
    faults: tuple[str, ...],
    list_faults: bool,
    jobs: int | None,
    no_shrink: bool,
    mutate: str | None,
) -> int:
    r"""
    Break a simulated pool, and check after each step what must always hold.

    The real logic of masters, stores and clients runs under virtual time, on a modelled network, disk and etcd,
    with faults drawn from the seed. Then the faults stop, and everything must come to rest and serve. A seed that
    breaks a rule is run again, made smaller, and explained; the same options and seed replay it exactly.
    Exit code 1 when a rule was broken.

    \b
    Examples:
      kvops chaos sim --seeds 100 --duration 10s
      kvops chaos sim --seed 4711 --seeds 1 --fault process.kill --fault net.partition
    """
    from kvops.chaos.sim.campaign import Tally, explain, run_seeds
    from kvops.chaos.sim.mutate import mutation
    from kvops.chaos.sim.plan import FAULTS, FAULTS_DEFAULT, Config

    out = Output(settings)
    if list_faults:
        out.rows("faults", FAULT_COLUMNS, [{"fault": name, "what": what} for name, what in FAULTS.items()])
        return 0
    if mutate is not None:
        mutation(mutate)
    config = Config(
        masters=masters,
        stores=stores,
        clients=clients,
        duration_ms=duration_ms,
        ops_per_s=calls_per_second,
        faults_per_s=faults_per_second,
        faults=_chosen(faults, FAULTS) or FAULTS_DEFAULT,
    )
    tally = Tally()
    failures: list[Failure] = []
    began = time.monotonic()
    with Progress(settings, "sim", total=seeds) as progress:
        for number, result in run_seeds(
            range(seed, seed + seeds), config, mutate=mutate, jobs=jobs or _cpus()
        ):
            tally.add(number, result)
            progress.advance(1, f"{len(tally.failed)} failed")
            if result.violation is not None:
                progress.say(f"seed {number}: {result.invariant}: {result.violation}")
                if len(failures) < EXPLAINED_MAX:
                    failures.append(explain(number, result, config, mutate=mutate, shrinks=not no_shrink))
    took_s = time.monotonic() - began
    verdict = "FAIL" if tally.failed else "PASS"
    summary = {
        "verdict": verdict,
        "seed": seed,
        "seeds": tally.seeds,
        "failed": sorted(tally.failed),
        "messages": tally.messages,
        "messages_per_cpu_s": tally.messages_per_s,
        "simulated_s": round(tally.simulated_us / 1_000_000, 3),
        "took_s": round(took_s, 3),
        "cpu_s": round(tally.cpu_s, 3),
        "calls": tally.calls,
        "evicted": tally.evicted,
        "outcomes": dict(tally.outcomes.most_common()),
        "faults": dict(tally.faults.most_common()),
    }
    if out.structured:
        out.document({**summary, "failures": [_failure(failure, config) for failure in failures]})
    else:
        for failure in failures:
            _print(out, failure, config, mutate)
        out.table(
            (Column("figure"), Column("value")),
            [{"figure": name, "value": _text(value)} for name, value in summary.items()],
        )
        out.line(out.style(verdict, fg="red" if tally.failed else "green", bold=True))
    return 1 if tally.failed else 0


def _cpus() -> int:
    return min(len(os.sched_getaffinity(0)), 64)


def _chosen(names: tuple[str, ...], known: dict[str, str]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            from difflib import get_close_matches

            from kvops.errors import UsageError

            near = get_close_matches(name, known, n=1)
            raise UsageError(
                f"no fault {name!r}{f'; did you mean {near[0]}?' if near else ''}",
                fix="kvops chaos sim --list-faults names them",
            )
    return names


def _failure(failure: Failure, config: Config) -> dict[str, Any]:
    smallest = failure.smallest
    return {
        "seed": failure.seed,
        "invariant": failure.first.invariant,
        "violation": failure.first.violation,
        "at_s": round(failure.first.at_us / 1_000_000, 6),
        "trace": failure.first.trace,
        "shrink_runs": failure.shrink_runs,
        "smallest": {
            "violation": smallest.violation,
            "at_s": round(smallest.at_us / 1_000_000, 6),
            "faults": [str(fault) for fault in failure.plan.faults],
            "calls": [str(op) for op in failure.plan.ops],
            "timeline": smallest.timeline[-TIMELINE_LINES:],
        },
    }


def _print(out: Output, failure: Failure, config: Config, mutate: str | None) -> None:
    first, smallest = failure.first, failure.smallest
    out.line(out.style(f"seed {failure.seed}  {first.invariant}", fg="red", bold=True))
    out.line(f"  {first.violation}")
    plan = failure.plan
    out.line(
        f"  {failure.shrink_runs} smaller runs tried: {len(plan.faults)} faults and {len(plan.ops)} calls left"
    )
    if len(smallest.timeline) > TIMELINE_LINES:
        out.line(f"  … {len(smallest.timeline) - TIMELINE_LINES} earlier lines")
    for line in smallest.timeline[-TIMELINE_LINES:]:
        out.line(f"  {line}")
    out.line(f"  again: {_again(failure.seed, config, mutate)}")
    out.line()


def _again(seed: int, config: Config, mutate: str | None) -> str:
    """The command that replays a seed."""
    from kvops.chaos.sim.plan import FAULTS_DEFAULT

    words = [
        f"kvops chaos sim --seeds 1 --seed {seed} --duration {config.duration_ms}ms",
        f"--masters {config.masters} --stores {config.stores} --clients {config.clients}",
        f"--calls-per-second {config.ops_per_s:g} --faults-per-second {config.faults_per_s:g}",
    ]
    if config.faults != FAULTS_DEFAULT:
        words += [f"--fault {name}" for name in config.faults]
    if mutate is not None:
        words.append(f"--mutate {mutate}")
    return " ".join(words)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={count}" for name, count in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
