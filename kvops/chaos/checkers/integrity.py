"""S1: a read that said "ok" returned the bytes of one whole put of that very key."""

from __future__ import annotations

from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, found
from kvops.chaos.history import Content, Kind, Operation, Outcome, RunRecord


def integrity(record: RunRecord) -> Result:
    """Content as the client saw it; then the version against every put of the key, and when it was put."""
    begun: dict[tuple[str, str], int] = {}  # the earliest beginning of its puts
    digests: dict[tuple[str, str], set[str]] = {}
    puts_known = set()
    for op in record.operations:
        if op.kind is Kind.PUT:
            puts_known.add(op.key)
            # One that was refused counts too: that its version must not be there is S8's promise.
            version = (op.key, op.value)
            begun[version] = min(begun.get(version, op.t_invoke_ns), op.t_invoke_ns)
            if op.digest:
                digests.setdefault(version, set()).add(op.digest)
    examples = [
        CounterExample(
            what=f"request {row.request} of {row.client} computed on {row.wrong_bytes:,} wrong bytes",
            rows=(row.request,),
            t_ns=row.t_return_ns,
        )
        for row in record.requests
        if row.wrong_bytes
    ]
    checked = sum(1 for row in record.requests if row.hit_blocks or row.l3_tokens)
    unchecked = 0
    for op in record.operations:
        if op.kind is not Kind.GET or op.outcome is not Outcome.OK or op.reason == "MISS":
            continue
        if op.content is Content.UNCHECKED and not op.value:
            unchecked += 1
            continue
        checked += 1
        why = _wrong(op, begun, digests, puts_known, record)
        if why:
            examples.append(
                CounterExample(
                    what=f"{op.client} read {op.key}: {why}", rows=(op.op_id,), t_ns=op.t_return_ns
                )
            )
    return found(
        examples,
        checked=checked,
        good=f"{checked:,} reads checked, none wrong",
        unknown=f"the content of {unchecked:,} reads was not checked" if unchecked else "",
        nothing="no read's content was checked",
    )


def _wrong(
    op: Operation,
    begun: dict[tuple[str, str], int],
    digests: dict[tuple[str, str], set[str]],
    puts_known: set[str],
    record: RunRecord,
) -> str:
    # A stale value is whole: whether it may be seen is S2's and S10's question.
    if op.content not in (Content.UNCHECKED, Content.WHOLE, Content.STALE):
        return f"{op.content} bytes"
    if not op.value or op.key not in puts_known:
        return ""
    version = (op.key, op.value)
    if version not in begun:
        return f"version {op.value} was never put" if record.complete else ""
    if op.t_return_ns and begun[version] > op.t_return_ns + record.run.clock_error_ns:
        return f"version {op.value} was put after it had been read"
    if op.digest and digests.get(version) and op.digest not in digests[version]:
        return f"version {op.value} with other bytes than were put"
    return ""


CHECKER: Final = Checker(
    id="S1",
    name="integrity",
    title="A read returns the bytes of that key, whole, of one put",
    safety=True,
    run=integrity,
)
