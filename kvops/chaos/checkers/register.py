"""S10: operations on one key are linearizable as a register that is set once and removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvops.chaos.checkers.hidden import Hidden
from kvops.chaos.checkers.model import Checker, CounterExample, Result
from kvops.chaos.checkers.model import found as result_of
from kvops.chaos.history import EventKind, Kind, Operation, Outcome, RunRecord

CLASS: Final = "register"
OPERATIONS_MAX: Final = (
    120  # of one key; a longer history is unknown: the search is exponential in the worst case
)
STEPS_MAX: Final = 200_000  # of the search, a key
_FOREVER: Final = 1 << 62
_LOSSES: Final = (
    EventKind.EVICTED,
    EventKind.EXPIRED,
    EventKind.STORE_LOST,
    EventKind.STORE_DRAINED,
    EventKind.OBJECTS_LOST,
)
State = str | None  # the version that is there


def linearizable(record: RunRecord) -> Result:
    """Wing, Gong and Lowe's search, key by key, over the operations of class ``register``."""
    keys: dict[str, list[Operation]] = {}
    for op in record.operations:
        if op.cls == CLASS and op.key and op.kind in (Kind.GET, Kind.EXISTS, Kind.PUT, Kind.REMOVE):
            keys.setdefault(op.key, []).append(op)
    examples: list[CounterExample] = []
    unknown: list[str] = []
    hidden = Hidden(record)
    for key, ops in keys.items():
        lossy = _may_lose(record, key, ops, hidden)
        answer = search(ops, lossy=lossy)
        if answer is None:
            unknown.append(key)
        elif not answer:
            last = max(ops, key=lambda one: one.t_invoke_ns)
            examples.append(
                CounterExample(
                    what=f"no order of the {len(ops)} operations on {key} explains their answers",
                    rows=tuple(op.op_id for op in ops),
                    t_ns=last.t_invoke_ns,
                )
            )
    return result_of(
        examples,
        checked=len(keys),
        good=f"{len(keys):,} keys, {sum(map(len, keys.values())):,} operations, each key has an order",
        unknown=f"the search over {', '.join(sorted(unknown)[:5])} was given up" if unknown else "",
        nothing=f"no operation of class {CLASS!r} was recorded",
    )


def _may_lose(record: RunRecord, key: str, ops: Sequence[Operation], hidden: Hidden) -> bool:
    """Whether something is known that may have taken the value away: then a miss may be true at any time."""
    if record.faults or not record.complete:
        return True
    first = min(op.t_invoke_ns for op in ops)
    last = max(op.t_return_ns or op.t_invoke_ns for op in ops)
    places = {(op.group, op.node) for op in ops if op.kind is Kind.PUT and op.outcome is not Outcome.FAIL}
    if any(hidden.any(group, node, first, last) for group, node in places):
        return True
    return any(
        event.kind in _LOSSES and first <= event.t_ns <= last and event.key in ("", key)
        for event in record.events
    )


def step(op: Operation, state: State, *, lossy: bool) -> list[State]:
    """
    The states after the operation took effect in ``state``; none when its answer contradicts it.

    With ``lossy``, a value may be lost, and may be out of sight for a while: a store that does not answer comes
    back with what it had. What was removed, or replaced meanwhile, must not.
    """
    if op.kind is Kind.PUT:
        if op.outcome is Outcome.INFO:
            return [op.value if state is None else state]
        if op.reason == "EXISTS":
            # It may have been lost before and be there again by another's put; that put is an operation itself.
            return [state] if state is not None else []
        return [op.value] if state is None or lossy else []
    if op.kind is Kind.REMOVE:
        if op.outcome is Outcome.OK and op.reason == "MISS":
            return [None] if state is None or lossy else []
        return [None]
    if op.reason == "MISS":
        if lossy and state is not None:
            return [state, None]
        return [None] if state is None else []
    if op.kind is Kind.EXISTS:
        return [state] if state is not None else []
    return [state] if state is not None and (not op.value or op.value == state) else []


def search(ops: Sequence[Operation], *, lossy: bool) -> bool | None:
    """
    Whether some order of the operations explains every answer; None when the search was given up.

    Operations that certainly did not happen, and reads without an answer, say nothing. A write without an answer
    may take effect at any time after it began, or never.
    """
    kept = [op for op in ops if op.outcome is not Outcome.FAIL]
    kept = [op for op in kept if op.outcome is Outcome.OK or op.kind in (Kind.PUT, Kind.REMOVE)]
    if len(kept) > OPERATIONS_MAX:
        return None
    kept.sort(key=lambda op: op.t_invoke_ns)
    begins = [op.t_invoke_ns for op in kept]
    ends = [op.t_return_ns if op.outcome is Outcome.OK and op.t_return_ns else _FOREVER for op in kept]
    must = sum(1 << index for index, op in enumerate(kept) if op.outcome is Outcome.OK)
    seen: set[tuple[int, State]] = set()
    stack: list[tuple[int, State]] = [(0, None)]
    steps = 0
    while stack:
        done, state = stack.pop()
        if done & must == must:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        steps += 1
        if steps > STEPS_MAX:
            return None
        # Only what began before the first unfinished operation ended can come next.
        horizon = min(ends[index] for index in range(len(kept)) if not done >> index & 1)
        for index in range(len(kept)):
            if begins[index] > horizon:
                break
            if not done >> index & 1:
                stack.extend((done | 1 << index, after) for after in step(kept[index], state, lossy=lossy))
    return False


CHECKER: Final = Checker(
    id="S10",
    name="register",
    title="Operations on one key have an order that explains them",
    safety=True,
    run=linearizable,
)
