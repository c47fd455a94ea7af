"""
The far end of an injection on another machine: lives as long as the one who orders it is heard.

Spoken to on its standard input, line by line: an :class:`Order` or a list of them in JSON, then words (``check``,
``inject``, ``beat``, ``recheck``, ``undo``). Each is answered by one line on standard output. Ledger and guardian are
here. The agent says nothing of its own and renews no lease unasked, so that a dead connection ends the fault: at its
end the guardian sees the agent end, and without an end the lease run out.

For a whole run there is one more on each host (:func:`reserve`), which keeps other runs away.
"""

from __future__ import annotations

import dataclasses
import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import yaml

from kvops.chaos import nft
from kvops.chaos.guardian import DEADLINE_S_MAX
from kvops.chaos.ledger import Book, one_at_a_time
from kvops.chaos.lifecycle import LEASE_S_DEFAULT, VERIFY_TIMEOUT_S, Injection
from kvops.chaos.model import Fault
from kvops.chaos.procs import Size, argv_of, size_of
from kvops.chaos.targets import Target, build, neighbour, of_group, of_process
from kvops.chaos.targets import select as choose
from kvops.errors import KvopsError, Unreachable, Unsupported, UsageError
from kvops.fleet.local import LocalGroup
from kvops.host import LocalHost

LINE_BYTES_MAX: Final = 1 << 20
WORDS: Final = ("check", "inject", "beat", "recheck", "undo")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One fault on one target of the machine that this is sent to."""

    fault: str
    target: str  # a member of the group
    arguments: dict[str, Any] = {}
    group: str = "local"
    state_dir: str = ""  # of the group there; "": the one that kvops uses there
    control: str = ""  # a member that must stay well; "": a neighbour
    control_http: str = ""  # host:port, instead of a member
    pid: int = 0  # a process that need not be a member of a group that was started there
    http: str = ""  # of that process: host:port
    listen: str = ""  # host:port: by which a process of kvops is known to be the one that is meant
    role: str = "process"
    host: str = ""  # logical
    environment: str = ""  # of its group, besides what is known there
    protect: bool = False
    lease_s: float = LEASE_S_DEFAULT
    deadline_s: float = 60.0
    verify_timeout_s: float = VERIFY_TIMEOUT_S
    compose: bool = False  # several faults that hide one another are meant so
    name: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one word."""

    evidence: list[str] = []
    undone_s: float = 0.0
    by: str = ""  # who undid it
    steps: list[str] = []
    experiment: str = ""  # its id in the ledger there
    plans: list[list[str]] = []  # what would undo each fault: commands
    at_ns: int = 0  # the clock there, since the epoch
    sizes: dict[int, Size] = {}  # by pid
    error: str = ""  # name of the class in kvops.errors; "": well
    what: str = ""
    fix: str = ""
    commands: list[str] = []


def injection_of(orders: Order | Sequence[Order], state_dir: Path) -> Injection:
    """
    What was ordered, planned on this machine; nothing is touched.

    Args:
        orders: Faults that are in force together; times and name are the first one's.
        state_dir: Of the ledgers, and of groups unless an order says otherwise.

    Raises:
        UsageError: No such fault, argument or target.
        Refused: Nothing here could stay well.
        Unreachable: There is no such group or process here, or it does not run.
        Unsupported: Nobody knows how that process is started again.
    """
    orders = [orders] if isinstance(orders, Order) else orders
    if not orders:
        raise UsageError("there is no order", fix="use the same kvops")
    first = orders[0]
    return Injection(
        [_fault(one, state_dir) for one in orders],
        host=LocalHost(),
        state_dir=state_dir,
        lease_s=first.lease_s,
        deadline_s=first.deadline_s,
        verify_timeout_s=first.verify_timeout_s,
        name=first.name,
        compose=first.compose,
    )


def _fault(order: Order, state_dir: Path) -> Fault:
    group = LocalGroup(state_dir, order.group)
    if order.listen:
        members: list[Target] = of_group(group) if group.read() is not None else []
        target = _listening(order, members)
    else:
        members = of_group(group)
        target = choose(members, name=order.target)[0]
    target = dataclasses.replace(
        target,
        environment=order.environment or target.environment,
        protect=order.protect or target.protect,
    )
    if order.control_http:
        control = Target(name=order.control_http, role="", addresses={"http": order.control_http})
    elif order.control:
        control = choose(members, name=order.control)[0]
    else:
        control = neighbour(members, target)
    return build(order.fault, order.arguments, target=target, control=control)


def _listening(order: Order, members: Sequence[Target]) -> Target:
    """
    The process that is meant, known by the port that it listens on: a pid said by others may be anybody's here.

    A member of a group that was started here is started again as such, another one with the words of ``kvops serve``.
    """
    found = next(
        (one for one in members if one.name == order.target and one.leader.pid == order.pid), None
    ) or _served(order)
    port = int(order.listen.rpartition(":")[2])
    if port not in nft.ports_of(found.processes)[0]:
        raise Unreachable(
            f"pid {order.pid} is not {order.target}: it does not listen on {order.listen}",
            fix="look there; is its pid another one outside of its container?",
        )
    return found


def _served(order: Order) -> Target:
    words = argv_of(order.pid)
    try:
        place = words.index("serve")
        file = Path(words[words.index("--config", place) + 1])
        said = yaml.safe_load(file.read_text())
        state_dir = str(said["state_dir"])
    except (ValueError, IndexError, OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise Unsupported(
            f"pid {order.pid} ({order.target}) was started neither by kvops start nor by kvops serve: nobody knows how"
            " it is started again",
            fix="run it by one of them",
        ) from error
    http = order.http or str(said.get("http", ""))
    addresses = {"listen": order.listen} | ({} if http.endswith(":0") or not http else {"http": http})
    return of_process(
        order.pid,
        name=order.target,
        role=order.role,
        addresses=addresses,
        log_file=str(said.get("log_file", "")),
        host=order.host,
        group=order.group,
        config_file=str(file),
        state_dir=state_dir,
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
                said = msgspec.json.decode(line, type=Order | list[Order])
                orders = [said] if isinstance(said, Order) else said
                there = orders[0].state_dir if orders else ""
                injection = injection_of(orders, Path(there) if there else state_dir)
                answer = Answer(experiment=injection.id, plans=[list(one.undo) for one in injection.in_force])
            else:
                answer = _do(injection, line.decode("ascii", "replace").strip())
        except msgspec.DecodeError as error:
            answer = _unread(error)
        except KvopsError as error:
            answer = _refused(error)
        if not _answered(stdout, answer):
            return 3  # nobody listens any more: the guardian knows what to do
    return 0


def reserve(stdin: IO[bytes], stdout: IO[bytes], *, state_dir: Path, run_id: str) -> int:
    """
    Keep other runs away from this machine until the input ends, and say how large processes are.

    Args:
        stdin: Lists of pids in JSON, one a line.
        stdout: Answers; the first one says whether this machine may be used at all.
        state_dir: Of the ledgers and of the lock.
        run_id: Of the run that this is for.
    """
    with ExitStack() as stack:
        kept = False
        for line in _lines(stdin):
            try:
                pids = msgspec.json.decode(line, type=list[int])
                if not kept:
                    stack.enter_context(one_at_a_time(state_dir, run_id))
                    Book(state_dir).refuse_if_not_ready()
                    kept = True
                sizes = {pid: size for pid in pids if (size := size_of(pid)) is not None}
                answer = Answer(at_ns=time.time_ns(), sizes=sizes)
            except msgspec.DecodeError as error:
                answer = _unread(error)
            except KvopsError as error:
                answer = _refused(error)
            if not _answered(stdout, answer) or not kept:
                return 3
    return 0


def _answered(stdout: IO[bytes], answer: Answer) -> bool:
    try:
        stdout.write(msgspec.json.encode(answer) + b"\n")
        stdout.flush()
    except OSError:
        return False
    return True


def _unread(error: Exception) -> Answer:
    return Answer(error="UsageError", what=f"the order cannot be read: {error}", fix="use the same kvops")


def _refused(error: KvopsError) -> Answer:
    return Answer(
        error=type(error).__name__,
        what=error.what,
        fix=error.fix,
        commands=list(getattr(error, "commands", ())),
    )


def _do(injection: Injection, word: str) -> Answer:
    match word:
        case "check":
            injection.check()
            return Answer()
        case "inject":
            return Answer(evidence=[str(one) for one in injection.inject()])
        case "beat":
            injection.beat()
            return Answer()
        case "recheck":
            return Answer(evidence=[str(one) for one in injection.recheck()])
        case "undo":
            proof = injection.undo()
            return Answer(
                undone_s=proof.undo_s,
                by=proof.by,
                steps=[one.text for one in proof.steps],
                commands=proof.commands,
            )
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
