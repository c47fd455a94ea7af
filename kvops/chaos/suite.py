"""Runs experiment after experiment, and puts their verdicts beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from kvops.chaos import artefacts, picture
from kvops.chaos.experiment import Experiment, load
from kvops.chaos.history import RunRecord, read_run
from kvops.chaos.ledger import Book
from kvops.chaos.runner import Options, Ran, Say, duration_s, run
from kvops.chaos.verdict import EXIT_CODES, Judgement, RunVerdict, judge
from kvops.errors import KvopsError, UsageError

QUICK_TAG: Final = "quick"
CONFIRMATIONS_MAX: Final = 2
"""How often a quick run that failed by its numbers is repeated: one of them proves nothing, three agree."""
_GRAVITY: Final = (
    RunVerdict.DIRTY,
    RunVerdict.INTERRUPTED,
    RunVerdict.FAIL,
    RunVerdict.ABORTED,
    RunVerdict.NOT_INJECTED,
    RunVerdict.BASELINE_NOT_STEADY,
    RunVerdict.UNKNOWN,
    RunVerdict.UNSUPPORTED,
    RunVerdict.PASS,
)
REFUSED: Final = "REFUSED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One experiment of a suite."""

    path: Path
    experiment: Experiment
    seconds: float  # about


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one."""

    path: Path
    title: str
    fault: str
    verdict: str
    why: str
    k: float | None = None
    spread: float | None = None
    amplification: float | None = None
    seconds: float = 0.0
    folder: Path | None = None
    exit_code: int = 0


def select(folder: Path, *, quick: bool, tags: Sequence[str] = ()) -> list[Entry]:
    """
    The experiments of a folder, by name: those with one of ``tags``, if any are named; else, with ``quick``, those
    that are tagged for it.

    Raises:
        ConfigError: One cannot be read.
        UsageError: There is none.
    """
    paths = sorted(folder.glob("*.yaml")) if folder.is_dir() else [folder]
    entries = []
    wanted = set(tags) or ({QUICK_TAG} if quick else set())
    for path in paths:
        experiment = load(path)
        if not wanted or wanted & set(experiment.tags):
            entries.append(
                Entry(path=path, experiment=experiment, seconds=duration_s(experiment, quick=quick))
            )
    if not entries:
        raise UsageError(
            f"{folder} holds no experiment" + (f" tagged {' or '.join(sorted(wanted))}" if wanted else ""),
            fix="name a folder of *.yaml experiments, such as playbooks/experiments",
        )
    return entries


def run_judged(experiment: Experiment, options: Options, *, say: Say) -> tuple[Ran, RunRecord, Judgement]:
    """
    Run one, judge it, and write its reports beside its history.

    Raises:
        UsageError, Refused: Nothing was touched.
    """
    ran = run(experiment, options, say=say)
    record = read_run(ran.folder)
    judgement = judge(record)
    artefacts.write(ran.folder, record, judgement)
    return ran, record, judgement


def run_suite(
    entries: Sequence[Entry],
    options: Options,
    *,
    say: Say,
    begin: Callable[[Entry], None] = lambda entry: None,
) -> Iterator[Row]:
    """Run all, one after another; a row each as it ends. What refuses one does not hold up the others."""
    for entry in entries:
        begin(entry)
        faults = ",".join(dict.fromkeys(call.name for call in entry.experiment.faults))
        try:
            said = replace(options, source=str(entry.path))

            def attempt(
                experiment: Experiment = entry.experiment, said: Options = said
            ) -> tuple[Ran, Judgement]:
                ran, _, judged = run_judged(experiment, said, say=say)
                return ran, judged

            ran, judged, note = confirmed(attempt, quick=options.quick, say=say)
        except KvopsError as error:
            yield Row(
                path=entry.path,
                title=entry.experiment.title,
                fault=faults,
                verdict=REFUSED,
                why=error.what,
                exit_code=error.exit_code,
            )
            continue
        numbers = judged.containment
        yield Row(
            path=entry.path,
            title=entry.experiment.title,
            fault=faults,
            verdict=judged.verdict.value,
            why=f"{note}{judged.reasons[0]}",
            k=numbers.k,
            spread=numbers.spread,
            amplification=numbers.amplification,
            seconds=ran.seconds,
            folder=ran.folder,
            exit_code=judged.exit_code,
        )
        if judged.verdict in (RunVerdict.DIRTY, RunVerdict.INTERRUPTED):
            return  # nothing new is begun before that is cleared up


def confirmed(
    attempt: Callable[[], tuple[Ran, Judgement]], *, quick: bool, say: Say
) -> tuple[Ran, Judgement, str]:
    """
    Run and judge; a quick run that failed, with no promise of safety broken, is repeated, and fails when every
    repetition does: noise is not blamed on the product. What the last one says counts.

    Args:
        attempt: Runs and judges once.
        quick: Whether one run proves little.
        say: Told of each repetition.

    Returns:
        The last run, its judgement, and what to put before its reason.
    """
    note = ""
    for again in range(CONFIRMATIONS_MAX + 1):
        ran, judged = attempt()
        doubtful = quick and judged.verdict is RunVerdict.FAIL and not judged.safety
        if not doubtful or again == CONFIRMATIONS_MAX:
            break
        note = f"after {again + 1} × FAIL ({judged.reasons[0]}): "
        say("again", f"✗ {judged.reasons[0]}: run again, since one short run may be the machine's noise")
    return ran, judged, note


def leftovers(state_dir: Path, since: set[str]) -> list[str]:
    """
    What experiments left on this machine although they ended: rules, groups, files, helpers with a token of theirs.

    Args:
        state_dir: Of their ledgers.
        since: Names of experiments that were there before, and do not count.
    """
    found = []
    for experiment in Book(state_dir).experiments():
        if experiment.id in since:
            continue
        scope = next((one.facts["scope"] for one in experiment.entries() if "scope" in one.facts), None)
        if scope is None:
            continue
        where = msgspec.convert(scope, picture.Scope)
        seen = picture.take(msgspec.structs.replace(where, processes=[]))
        for place, what in seen.items():
            ours = [token for token in where.tokens if token in what or (what and token in place)]
            if ours:
                found.append(f"{experiment.id}: {place}: {what}")
    return found


def exit_code(rows: Iterable[Row], *, allow_unsupported: bool, quick: bool) -> int:
    """
    Of a whole suite: the gravest of its rows'.

    ``quick`` runs prove little by design: what they could not conclude is no failure of theirs, but is printed;
    nor is it theirs when the machine was too busy for a steady baseline.
    """
    forgiven = {RunVerdict.PASS.value}
    if allow_unsupported:
        forgiven.add(RunVerdict.UNSUPPORTED.value)
    if quick:
        forgiven |= {RunVerdict.UNKNOWN.value, RunVerdict.BASELINE_NOT_STEADY.value}
    grave = [row for row in rows if row.verdict not in forgiven]
    for verdict in _GRAVITY:
        if any(row.verdict == verdict.value for row in grave):
            return EXIT_CODES[verdict]
    return max((row.exit_code for row in grave), default=0)
