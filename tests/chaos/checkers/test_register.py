"""The search for an order of operations agrees with trying every order."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.chaos.checkers.register import search, step
from kvops.chaos.history import Kind, Operation, Outcome


def any_order_explains(ops: list[Operation]) -> bool:
    """By trying them all: each operation that answered takes effect between its invocation and its return."""
    surely = [op for op in ops if op.outcome is Outcome.OK]
    perhaps = [op for op in ops if op.outcome is Outcome.INFO and op.kind in (Kind.PUT, Kind.REMOVE)]
    for chosen in range(2 ** len(perhaps)):
        some = surely + [op for index, op in enumerate(perhaps) if chosen >> index & 1]
        for order in permutations(some):
            in_time = all(
                not (later.outcome is Outcome.OK and later.t_return_ns < earlier.t_invoke_ns)
                for place, earlier in enumerate(order)
                for later in order[place + 1 :]
            )
            state: Any = None
            for op in order if in_time else ():
                after = step(op, state, lossy=False)
                if not after:
                    break
                state = after[0]
            else:
                if in_time:
                    return True
    return False


@st.composite
def operations(draw: st.DrawFn) -> list[Operation]:
    """A few overlapping operations of several clients on one key, with answers that may be impossible."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from([Kind.PUT, Kind.GET, Kind.REMOVE, Kind.EXISTS]))
        outcome = draw(st.sampled_from([Outcome.OK, Outcome.OK, Outcome.OK, Outcome.INFO, Outcome.FAIL]))
        reasons = {Kind.PUT: ["STORED", "EXISTS"], Kind.REMOVE: ["", "MISS"]}.get(kind, ["HIT", "MISS"])
        reason = draw(st.sampled_from(reasons))
        value = (
            f"w:{number}" if kind is Kind.PUT else f"w:{draw(st.integers(0, 4))}" if reason == "HIT" else ""
        )
        begin = draw(st.integers(0, 8))
        found.append(
            Operation(
                op_id=f"o{number}",
                client="c",
                kind=kind,
                outcome=outcome,
                reason=reason,
                value=value,
                key="k",
                t_invoke_ns=begin,
                t_return_ns=begin + draw(st.integers(1, 4)),
            )
        )
    return found


@settings(max_examples=300, deadline=None)
@given(operations())
def test_search_agrees_with_trying_every_order(ops: list[Operation]) -> None:
    """Whatever overlaps and whatever was answered, the search finds an order exactly when there is one."""
    assert search(ops, lossy=False) is any_order_explains(ops)


def test_out_of_sight_is_not_removed() -> None:
    """A value may be missed while its store is away and be read again later; not so once a removal was answered."""

    def at(number: int, kind: Kind, reason: str, value: str = "") -> Operation:
        return Operation(
            op_id=f"o{number}",
            client="c",
            kind=kind,
            outcome=Outcome.OK,
            reason=reason,
            value=value,
            t_invoke_ns=10 * number,
            t_return_ns=10 * number + 5,
        )

    put, missed, removed, back = (
        at(1, Kind.PUT, "STORED", "w:1"),
        at(2, Kind.GET, "MISS"),
        at(3, Kind.REMOVE, "MISS"),
        at(4, Kind.GET, "HIT", "w:1"),
    )

    assert search([put, missed, back], lossy=True) is True
    assert search([put, missed, back], lossy=False) is False
    assert search([put, missed, removed, back], lossy=True) is False
