"""
The far end of an injection on another machine: lives as long as the one who orders it is heard.

Spoken to on its standard input, one JSON object a line: an :class:`Order`, then words (``inject``, ``beat``,
``recheck``, ``undo``). Each is answered by one line on standard output. Ledger and guardian are here. The agent says
nothing of its own and renews no lease unasked, so that a dead connection ends the fault: at its end the
guardian sees the agent end, and without an end the lease run out.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from kvops.chaos.guardian import DEADLINE_S_MAX
from kvops.chaos.lifecycle import LEASE_S_DEFAULT, Injection
from kvops.chaos.targets import Target, build, neighbour, of_group
from kvops.chaos.targets import select as choose
from kvops.errors import KvopsError, UsageError
from kvops.fleet.local import LocalGroup
from kvops.host import LocalHost

LINE_BYTES_MAX: Final = 1 << 20
WORDS: Final = ("inject", "beat", "recheck", "undo")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One fault on one target of the machine that this is sent to."""

    fault: str
    target: str  # a member of the group
    arguments: dict[str, Any] = {}
    group: str = "local"
    state_dir: str = ""  # of the group there; "": the one that kvops uses there
    control: str = ""  # a member that must stay well; "": a neighbour
    control_http: str = ""  # host:port, instead of a member
    lease_s: float = LEASE_S_DEFAULT
    deadline_s: float = 60.0
    name: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one word."""

    evidence: list[str] = []
    undone_s: float = 0.0
    by: str = ""  # who undid it
    steps: list[str] = []
    experiment: str = ""  # its id in the ledger there
    error: str = ""  # name of the class in kvops.errors; "": well
    what: str = ""
    fix: str = ""
    commands: list[str] = []


def injection_of(order: Order, state_dir: Path) -> Injection:
    """
    What was ordered, planned on this machine; nothing is touched.

    Raises:
        UsageError: No such fault, argument or target.
        Refused: Nothing here could stay well.
        Unreachable: There is no such group here, or it does not run.
    """
    members = of_group(LocalGroup(state_dir, order.group))
    target = choose(members, name=order.target)[0]
    if order.control_http:
        control = Target(name=order.control_http, role="", addresses={"http": order.control_http})
    elif order.control:
        control = choose(members, name=order.control)[0]
    else:
        control = neighbour(members, target)
    return Injection(
        [build(order.fault, order.arguments, target=target, control=control)],
        host=LocalHost(),
        state_dir=state_dir,
        lease_s=order.lease_s,
        deadline_s=order.deadline_s,
        name=order.name,
    )


def serve(stdin: IO[bytes], stdout: IO[bytes], *, state_dir: Path) -> int:
    """
    Do as told until the input ends.

    Args:
        stdin: Orders; its end leaves everything to the guardian.
        stdout: Answers.
        state_dir: Of ledgers, and of the group unless the order says otherwise.
    """
    injection: Injection | None = None
    for line in _lines(stdin):
        try:
            if injection is None:
                order = msgspec.json.decode(line, type=Order)
                injection = injection_of(order, Path(order.state_dir) if order.state_dir else state_dir)
                answer = Answer(experiment=injection.id)
            else:
                answer = _do(injection, line.decode("ascii", "replace").strip())
        except msgspec.DecodeError as error:
            answer = Answer(
                error="UsageError", what=f"the order cannot be read: {error}", fix="use the same kvops"
            )
        except KvopsError as error:
            answer = Answer(
                error=type(error).__name__,
                what=error.what,
                fix=error.fix,
                commands=list(getattr(error, "commands", ())),
            )
        try:
            stdout.write(msgspec.json.encode(answer) + b"\n")
            stdout.flush()
        except OSError:
            return 3  # nobody listens any more: the guardian knows what to do
    return 0


def _do(injection: Injection, word: str) -> Answer:
    match word:
        case "inject":
            return Answer(evidence=[str(one) for one in injection.inject()])
        case "beat":
            injection.beat()
            return Answer()
        case "recheck":
            return Answer(evidence=[str(one) for one in injection.recheck()])
        case "undo":
            proof = injection.undo()
            return Answer(undone_s=proof.undo_s, by=proof.by, steps=[one.text for one in proof.steps])
        case _:
            raise UsageError(f"{word!r} is not a word", fix=f"say {', '.join(WORDS)}")


def _lines(stdin: IO[bytes]) -> Iterator[bytes]:
    """Line by line, to the end of the input or to silence for longer than any fault may last."""
    handle = stdin.fileno()
    said = b""
    while select.select([handle], [], [], DEADLINE_S_MAX)[0]:
        chunk = os.read(handle, 1 << 16)
        *lines, said = (said + chunk).split(b"\n")
        yield from lines
        if not chunk or len(said) > LINE_BYTES_MAX:
            return
