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
from kvops.chaos.statistics import CONFIRMATIONS, confirmed
from kvops.chaos.verdict import EXIT_CODES, Judgement, RunVerdict, judge
from kvops.errors import ConfigError, KvopsError, UsageError

QUICK_TAG: Final = "quick"
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
Attempt = tuple[Ran, RunRecord, Judgement]
"""A run, its history, and what is said of it."""


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
    runs: int = 1  # that the verdict rests on


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


def run_judged(experiment: Experiment, options: Options, *, say: Say) -> Attempt:
    """
    Run one, judge it, and write its reports beside its history.

    Raises:
        UsageError, Refused: Nothing was touched.
    """
    ran = run(experiment, options, say=say)
    record = read_run(ran.folder)
    judgement = judge(record)
    try:
        artefacts.write(ran.folder, record, judgement)
    except ConfigError as error:  # a full disk: the verdict stands all the same
        say("report", f"✗ not written: {error.what}; make it later: kvops chaos report {ran.folder}")
    return ran, record, judgement


def confirm(
    first: Attempt, again: Callable[[], Attempt], *, say: Say, wanted: int = CONFIRMATIONS
) -> tuple[Attempt, RunVerdict, str, int]:
    """
    Whether a failure is one: noise fails a run now and then, and seldom ``wanted`` in a row.

    A broken promise of safety needs no second look: one counter-example decides.

    Args:
        first: A run, judged.
        again: Runs the same once more.
        say: Told of each repetition.
        wanted: So many runs in a row must have failed.

    Returns:
        The last run, the verdict that all of them make, why, and how many there were.
    """
    attempts = [first]
    while (
        attempts[-1][2].verdict is RunVerdict.FAIL
        and not attempts[-1][2].safety
        and not confirmed([one[2].verdict is RunVerdict.FAIL for one in attempts])
        and len(attempts) < wanted
    ):
        say("again", f"✗ {attempts[-1][2].reasons[0]}: run again, since one run may be the machine's noise")
        attempts.append(again())
    last = attempts[-1]
    verdict, why = last[2].verdict, last[2].reasons[0]
    if len(attempts) > 1 and verdict is not RunVerdict.FAIL:
        if verdict is RunVerdict.PASS:
            verdict = RunVerdict.UNKNOWN  # neither a failure that comes again nor a clean record
        why = f"not confirmed by run {len(attempts)} ({last[2].verdict}): {attempts[-2][2].reasons[0]}"
    return last, verdict, why, len(attempts)


def run_suite(
    entries: Sequence[Entry],
    options: Options,
    *,
    say: Say,
    begin: Callable[[Entry], None] = lambda entry: None,
) -> Iterator[Row]:
    """
    Run all, one after another; a row each as it ends. What refuses one does not hold up the others.

    A failure that is not of safety is one only when it comes again: see ``confirm``.
    """
    for entry in entries:
        begin(entry)
        faults = ",".join(dict.fromkeys(call.name for call in entry.experiment.faults))
        said = replace(options, source=str(entry.path))

        def once(experiment: Experiment = entry.experiment, said: Options = said) -> Attempt:
            return run_judged(experiment, said, say=say)

        try:
            (ran, _, judged), verdict, why, runs = confirm(once(), once, say=say)
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
            verdict=verdict.value,
            why=why,
            k=numbers.k,
            spread=numbers.spread,
            amplification=numbers.amplification,
            seconds=ran.seconds,
            folder=ran.folder,
            exit_code=EXIT_CODES[verdict],
            runs=runs,
        )
        if judged.verdict in (RunVerdict.DIRTY, RunVerdict.INTERRUPTED):
            return  # nothing new is begun before that is cleared up


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
