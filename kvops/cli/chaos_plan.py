"""``kvops chaos plan``: exactly what a run would do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from kvops.cli import options
from kvops.cli.options import PATH, Settings
from kvops.cli.output import Output

if TYPE_CHECKING:
    from pathlib import Path


@options.command("plan")
@click.argument("file", type=PATH)
@click.option("--seed", type=int, help="Instead of the file's.")
@click.option("--quick", is_flag=True, help="As for run --quick.")
@click.pass_obj
def command(settings: Settings, file: Path, seed: int | None, quick: bool) -> int:
    r"""
    Show what a run would do: targets, what undoes them, what it costs, how long. Nothing is touched.

    Exit code 2 or 5: a run would be refused. 14: this version or machine cannot do it.

    \b
    Example:
      kvops chaos plan playbooks/experiments/store-pause.yaml
    """
    from kvops.chaos.experiment import load
    from kvops.chaos.plan import make
    from kvops.cli.units import human_age

    out = Output(settings)
    plan = make(load(file), seed=seed, quick=quick)
    code = 0 if not plan.unsupported else 14
    first = next((one for one in plan.remarks if one.severity == "error"), None)
    if first is not None:
        code = 5 if first.guard else 2
    if out.structured:
        out.document(dataclasses.asdict(plan))
        return code
    share = f"{plan.capacity_share:.1%} of {', '.join(plan.groups)}" if plan.groups else "no target"
    out.header("plan", f"{plan.title}   seed {plan.seed}   {share}   about {human_age(plan.duration_s)}")
    for one in plan.faults:
        arguments = "  ".join(f"{key}={value}" for key, value in one.arguments.items())
        click.echo(f"{one.fault} on {one.target}  {arguments}".rstrip())
        if one.what:
            click.echo(f"  does       {one.what}")
            click.echo(f"  certifies  {one.certifies}")
            click.echo(f"  not        {one.does_not_certify}")
        click.echo(f"  control    {one.control or 'none'}")
        for text in one.undo:
            click.echo(f"  undo       {text}")
        if one.why_not:
            click.echo(f"  UNSUPPORTED  {one.why_not}")
    if plan.domains:
        click.echo(f"may suffer   {', '.join(plan.domains)}")
    if plan.quorum_lost:
        click.echo(f"quorum lost  {', '.join(plan.quorum_lost)}: meant, says the file")
    for text in plan.timeline:
        click.echo(text)
    if plan.unsupported:
        click.echo(f"UNSUPPORTED  {plan.unsupported}")
    for remark in plan.remarks:
        click.echo(f"{remark.severity:<8} {remark.text}" + (f"; {remark.fix}" if remark.fix else ""))
    return code
