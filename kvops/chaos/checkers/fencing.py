"""S7: one leader a term, and nothing is answered in a term that a later one has replaced."""

from __future__ import annotations

from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, found
from kvops.chaos.history import EventKind, Operation, Outcome, RunRecord


def fencing(record: RunRecord) -> Result:
    """A scan of observations and answers, to readers too, group by group."""
    leaders: dict[tuple[str, int], str] = {}
    examples: list[CounterExample] = []
    checked = 0

    def saw(group: str, term: int, leader: str, t_ns: int, row: str) -> None:
        nonlocal checked
        if not leader or not term:
            return
        checked += 1
        first = leaders.setdefault((group, term), leader)
        if first != leader:
            examples.append(
                CounterExample(
                    what=f"term {term} had two leaders, {first} and {leader}", rows=(row,), t_ns=t_ns
                )
            )

    for event in record.events:
        if event.kind == EventKind.LEADER:
            saw(event.group, event.term, event.subject, event.t_ns, event.detail)
    answers: dict[str, list[Operation]] = {}
    for op in record.operations:
        if op.term and op.outcome is Outcome.OK:
            saw(op.group, op.term, op.leader, op.t_return_ns, op.op_id)
            answers.setdefault(op.group, []).append(op)
    for rows in answers.values():
        examples.extend(_late_answers(rows, record.run.clock_error_ns))
    terms = f"{len(leaders)} term{'s' * (len(leaders) != 1)}, one leader each"
    return found(
        examples,
        checked=checked,
        good=f"{terms}; {sum(map(len, answers.values())):,} answers, none of a term that was over",
        nothing="no operation or event recorded a term",
    )


def _late_answers(rows: list[Operation], error_ns: int) -> list[CounterExample]:
    """Calls begun after a later term had answered one, and answered in an earlier term."""
    by_end = sorted(rows, key=lambda one: one.t_return_ns)
    examples = []
    newest: Operation | None = None
    place = 0
    for op in sorted(rows, key=lambda one: one.t_invoke_ns):
        while place < len(by_end) and by_end[place].t_return_ns + error_ns < op.t_invoke_ns:
            if newest is None or by_end[place].term > newest.term:
                newest = by_end[place]
            place += 1
        if newest is None or op.term >= newest.term:
            continue
        # A leader may raise its own term; older connections still have the one that they were welcomed with.
        if not op.leader_incarnation or op.leader_incarnation != newest.leader_incarnation:
            examples.append(
                CounterExample(
                    what=f"{op.leader or 'a master'} answered {op.kind} {op.key} in term {op.term}, begun"
                    f" {(op.t_invoke_ns - newest.t_return_ns) / 1e6:.1f} ms after term {newest.term} had answered",
                    rows=(newest.op_id, op.op_id),
                    t_ns=op.t_return_ns,
                )
            )
    return examples


CHECKER: Final = Checker(
    id="S7",
    name="fencing",
    title="One leader a term; a replaced leader answers nothing",
    safety=True,
    run=fencing,
)
