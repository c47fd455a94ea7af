"""``kvops chaos suite``: a folder of experiments, and their verdicts beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from kvops.cli import options
from kvops.cli.chaos_run import EXIT_LEFT_BEHIND, RUNS, number, teller
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import PATH, Settings
from kvops.cli.output import Column, Output

if TYPE_CHECKING:
    from pathlib import Path

    from kvops.chaos.suite import Entry, Row

COLUMNS: Final = (
    Column("experiment"),
    Column("fault"),
    Column("verdict"),
    Column("K"),
    Column("S"),
    Column("amplification"),
    Column("seconds"),
    Column("why"),
)


@options.command("suite")
@click.argument("folder", type=PATH)
@click.option("--quick", is_flag=True, help="Those tagged quick, one pair of arms each: minutes.")
@click.option("--tag", "tags", multiple=True, metavar="LIST", help="Only those with one of these tags.")
@click.option("--allow-unsupported", is_flag=True, help="What cannot be done here fails nothing.")
@click.option("--list", "only_list", is_flag=True, help="Show what would run, and for how long.")
@click.option("--runs", "runs_dir", type=PATH, default=RUNS, show_default=True, help="Where histories go.")
@click.option("--seed", type=int, help="Instead of the files'.")
@click.pass_obj
def command(
    settings: Settings,
    folder: Path,
    quick: bool,
    tags: tuple[str, ...],
    allow_unsupported: bool,
    only_list: bool,
    runs_dir: Path,
    seed: int | None,
) -> int:
    r"""
    Run every experiment of a folder, one after another, and print the matrix of their verdicts.

    It says how long it takes before it starts. The exit code is that of the gravest verdict; 4 when anything of
    an experiment is left on this machine. A FAIL that breaks no promise of safety counts when three runs agree;
    what does not come again is UNKNOWN. With --quick, UNKNOWN and BASELINE_NOT_STEADY fail nothing: short runs look
    for harm and prove little, and each row says what it left open.

    \b
    Examples:
      kvops chaos suite playbooks/experiments --quick --allow-unsupported
      kvops chaos suite playbooks/experiments --list
    """
    from kvops.chaos.ledger import Book
    from kvops.chaos.runner import Options
    from kvops.chaos.suite import exit_code, leftovers, run_suite, select
    from kvops.cli.units import human_age, split_list

    out = Output(settings)
    entries = select(folder, quick=quick, tags=split_list(tags))
    total_s = sum(entry.seconds for entry in entries)
    out.header("local", f"{len(entries)} experiments, about {human_age(total_s)}")
    if only_list:
        rows = [
            {
                "experiment": entry.path.stem,
                "fault": ",".join(call.name for call in entry.experiment.faults),
                "seconds": round(entry.seconds),
                "title": entry.experiment.title,
            }
            for entry in entries
        ]
        out.rows(
            "experiments", [Column("experiment"), Column("fault"), Column("seconds"), Column("title")], rows
        )
        return 0
    if quick:
        out.note(
            "quick: one block of a baseline and a fault arm. Not concluded: latency, spread, cache-off, "
            "what two equal runs disagree on"
        )
    said = Options(state_dir=state_dir(settings), runs_dir=runs_dir, seed=seed, quick=quick)
    done: list[Row] = []
    before = {one.id for one in Book(said.state_dir).experiments()}

    def begin(entry: Entry) -> None:
        out.note(f"[{len(done) + 1}/{len(entries)}] {entry.path.stem}: {entry.experiment.title}")

    for row in run_suite(entries, said, say=teller(settings), begin=begin):
        done.append(row)
        out.note(f"    {row.verdict}  {row.why}")
    rows_ = [as_row(row) for row in done]
    code = exit_code(done, allow_unsupported=allow_unsupported, quick=quick)
    found = leftovers(said.state_dir, before)
    if found:
        code = EXIT_LEFT_BEHIND
    if out.structured:
        out.document({"experiments": rows_, "exit_code": code, "quick": quick, "left": found})
        return code
    out.table(COLUMNS, rows_)
    left = len(entries) - len(done)
    if left:
        out.line(f"{left} experiments were not begun: something is left behind, see kvops chaos status")
    counts: dict[str, int] = {}
    for row in done:
        counts[row.verdict] = counts.get(row.verdict, 0) + 1
    out.line(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    for text in found:
        out.line(f"left behind: {text}")
    return code


def as_row(row: Row) -> dict[str, Any]:
    """One line of the matrix."""
    return {
        "experiment": row.path.stem,
        "fault": row.fault,
        "verdict": row.verdict,
        "K": number(row.k),
        "S": number(row.spread),
        "amplification": number(row.amplification),
        "seconds": round(row.seconds),
        "runs": row.runs,
        "why": row.why,
        "folder": str(row.folder or ""),
    }
