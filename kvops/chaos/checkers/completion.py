"""S8: a put takes effect once at most, and one that was refused takes none."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, found
from kvops.chaos.history import EventKind, Kind, Outcome, RunRecord


def at_most_once(record: RunRecord) -> Result:
    """Acknowledged stores of one operation, the servers' own commits, and versions that nobody managed to put."""
    stored: Counter[tuple[str, str]] = Counter()
    removed_between = {op.key for op in record.operations if op.kind is Kind.REMOVE}
    fate: dict[tuple[str, str], set[Outcome]] = {}
    puts = 0
    for op in record.operations:
        if op.kind is Kind.PUT:
            puts += 1
            if op.value:
                fate.setdefault((op.key, op.value), set()).add(op.outcome)
            if op.outcome is Outcome.OK and op.reason == "STORED":
                stored[op.key, op.op_id] += 1
    examples = [
        CounterExample(what=f"put {op_id} of {key} was stored {count} times", rows=(op_id,))
        for (key, op_id), count in stored.items()
        if count > 1 and key not in removed_between
    ]
    commits = Counter(
        (event.key, event.op_id, event.generation)
        for event in record.events
        if event.kind == EventKind.COMMITTED and event.op_id
    )
    examples += [
        CounterExample(what=f"put {op_id} of {key} was committed {count} times", rows=(op_id,))
        for (key, op_id, _), count in commits.items()
        if count > 1
    ]
    for op in record.operations:
        if (
            op.kind is Kind.GET
            and op.outcome is Outcome.OK
            and op.value
            and fate.get((op.key, op.value)) == {Outcome.FAIL}
        ):
            examples.append(
                CounterExample(
                    what=f"{op.client} read version {op.value} of {op.key}, whose put was refused",
                    rows=(op.op_id,),
                    t_ns=op.t_return_ns,
                )
            )
    return found(
        examples,
        checked=puts + len(commits),
        good=f"{puts:,} puts, none with a second effect",
        nothing="no put was recorded",
    )


CHECKER: Final = Checker(
    id="S8",
    name="at_most_once",
    title="A put takes effect once at most; a refused one never",
    safety=True,
    run=at_most_once,
)
