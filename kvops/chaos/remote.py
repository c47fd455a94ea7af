"""
A fault on another machine over SSH: injected, guarded and written down there, held from here.

::

    with RemoteInjection(login.connect(5.0), Order(fault="process.pause", target="store-0")) as one:
        evidence = one.inject()
        while holding:
            one.beat()
        undone = one.undo()

The lease is renewed by ``beat``. When this process dies, or the connection does, the guardian on that machine takes
the fault back: at once when the connection ends, within the lease when it merely falls silent. Several faults on
several machines at once are :class:`RemoteFaults`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import msgspec

from kvops import errors
from kvops.chaos.agent import Answer, Order
from kvops.chaos.injecting import InForce, OnState
from kvops.chaos.model import State
from kvops.errors import Aborted, Dirty, KvopsError, Unreachable, Unsupported
from kvops.signals import signals_held

if TYPE_CHECKING:
    import paramiko

    from kvops.host import SshHost

COMMAND: Final = ("kvops", "chaos", "agent")
START_TIMEOUT_S: Final = 20.0
ANSWER_TIMEOUT_S: Final = 120.0  # of inject and undo: what they wait for there has its own deadlines
CONFIRM_S: Final = 30.0  # beyond the lease: for the guardian there to have undone, and for us to hear of it
STATUS_TIMEOUT_S: Final = 10.0
EXIT_TIMEOUT_S: Final = 5.0  # from the end of its output to its exit code
_PAUSE_S: Final = 0.3
NOT_FOUND: Final = 127


class Conversation:
    """
    Lines to a program on another machine, each with an answer.

    Whoever was interrupted before the answer came leaves it to be passed over by the next one.
    """

    def __init__(self, host: SshHost, command: tuple[str, ...], *, when_silent: str) -> None:
        """
        Args:
            host: Whom we are connected to.
            command: The program.
            when_silent: What to do when it does not answer.
        """
        self.host = host
        self._command = command
        self._when_silent = when_silent
        self._channel: paramiko.Channel | None = None
        self._lock = threading.Lock()
        self._rest = b""
        self._torn = False  # a line may have been sent in part
        self._owed = 0  # answers

    @property
    def busy(self) -> bool:
        """Whether an answer is being waited for."""
        return self._lock.locked()

    def __enter__(self) -> Self:
        self._channel = self.host.converse(self._command, timeout_s=START_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        if self._channel is not None:
            self._channel.close()

    def say(self, line: bytes, timeout_s: float) -> Answer:
        """
        Say one line and wait for its answer.

        Raises:
            KvopsError: As was answered.
            Unreachable: The connection is gone, or silent.
        """
        with self._lock:
            channel = self._channel
            assert channel is not None, "enter the block first"
            try:
                if self._torn:
                    raise EOFError("an earlier word was not answered")
                channel.settimeout(timeout_s)
                self._torn = True
                channel.sendall(line + b"\n")
                self._owed += 1
                self._torn = False
                while self._owed:
                    answer = self._next(channel)
                    self._owed -= 1
            except (OSError, EOFError) as error:
                self._torn = True  # a late answer must not be taken for that to the next word
                channel.close()
                raise Unreachable(
                    f"{self.host.name} does not answer: {str(error) or 'no answer in time'}",
                    fix=self._when_silent,
                ) from error
        found = msgspec.json.decode(answer, type=Answer)
        if found.error:
            raise _error(found, self.host.name)
        return found

    def _next(self, channel: paramiko.Channel) -> bytes:
        while b"\n" not in self._rest:
            chunk = channel.recv(1 << 16)
            if not chunk:
                raise self._ended(channel)
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _ended(self, channel: paramiko.Channel) -> KvopsError:
        said = b""
        while channel.recv_stderr_ready() and len(said) < 4096:
            said += channel.recv_stderr(4096)
        words = said.decode("utf-8", "replace").strip().splitlines()
        # The end of its output may come before its exit code.
        if channel.status_event.wait(EXIT_TIMEOUT_S) and channel.recv_exit_status() == NOT_FOUND:
            return Unsupported(
                f"{self.host.name} has no {self._command[0]} on its PATH", fix="install kvops there"
            )
        return Unreachable(
            f"{self.host.name}: its agent has ended: {words[-1] if words else 'it said nothing'}",
            fix=self._when_silent,
        )


class RemoteInjection:
    """The faults on one machine, from the connection to the proof that they are gone."""

    def __init__(
        self, host: SshHost, order: Order | Sequence[Order], *, command: tuple[str, ...] = COMMAND
    ) -> None:
        self.host = host
        self.orders = [order] if isinstance(order, Order) else list(order)
        self.experiment = ""  # its id in the ledger there
        self.plans: list[list[str]] = []  # what would undo each fault
        self.begun = False  # something may have been touched, and was not proved to be undone
        self._lease_s = self.orders[0].lease_s
        self._line = Conversation(
            host,
            command,
            when_silent=f"its guardian undoes within {self._lease_s:g} s; look there: kvops chaos status",
        )

    def __enter__(self) -> Self:
        self._line.__enter__()
        said = self._line.say(msgspec.json.encode(self.orders), START_TIMEOUT_S)
        self.experiment, self.plans = said.experiment, said.plans
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.begun:
                self.undo()
        except Unreachable:
            if error is None:
                raise  # else that is what happened, and the guardian there undoes
        finally:
            self.close()

    def close(self) -> None:
        """End the conversation; what is in force there is taken back there."""
        self._line.close()

    def check(self) -> None:
        """Raise what would refuse it there; nothing is touched."""
        self._line.say(b"check", ANSWER_TIMEOUT_S)

    def inject(self) -> list[str]:
        """
        Inject and prove.

        Returns:
            The evidence, one line a fault.

        Raises:
            Refused, Unsupported, NotInjected, Dirty: As :meth:`kvops.chaos.lifecycle.Injection.inject` there.
            Unreachable: The connection is gone; its guardian undoes.
        """
        self.begun = True
        return self._line.say(b"inject", ANSWER_TIMEOUT_S).evidence

    def beat(self) -> None:
        """
        Renew the lease. Call it at least every third of the lease.

        Raises:
            Aborted: The guardian has undone everything.
            Unreachable: The connection is gone, or did not answer within the lease: the guardian undoes.
        """
        if not self._line.busy:  # else it proves something there, and renews the lease itself meanwhile
            self._line.say(b"beat", self._lease_s)

    def recheck(self) -> list[str]:
        """Prove again that it is there; raises as ``inject`` and ``beat`` do."""
        return self._line.say(b"recheck", ANSWER_TIMEOUT_S).evidence

    def undo(self) -> Answer:
        """
        Take it back and prove that nothing is left.

        Raises:
            Dirty: It could not be proved.
            Unreachable: The connection is gone; its guardian undoes.
        """
        answer = self._line.say(b"undo", ANSWER_TIMEOUT_S)
        self.begun = False
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """That nothing is left on any of the machines."""

    undo_s: float  # the longest of them; with a guardian's, until we heard of it
    by: str
    commands: list[str]


class RemoteFaults:
    """
    The faults of one block on the hosts of a group, in force together and held from here.

    Times are of this machine's clock: a fault counts as injecting from before it was ordered, as clean once the
    last host has proved that nothing is left. When a connection is lost, the ledger there
    is asked anew what became of it.
    """

    def __init__(
        self,
        orders: Mapping[str, Sequence[tuple[Order, InForce]]],
        *,
        connected: Callable[[str], SshHost],
        connect: Callable[[str], SshHost],
        on_state: OnState,
    ) -> None:
        """
        Args:
            orders: By host, in the order in which they are injected, with how the history names each.
            connected: The connection to a host, open already.
            connect: A new one.
            on_state: Told of every state.
        """
        self._there = {
            host: RemoteInjection(connected(host), [order for order, _ in some])
            for host, some in orders.items()
        }
        self._rows = {host: [row for _, row in some] for host, some in orders.items()}
        self._connect = connect
        self._on_state = on_state
        self._began = False
        self._ended = False

    @property
    def in_force(self) -> list[InForce]:
        """Every fault; what undoes it once its host has said so."""
        found: list[InForce] = []
        for host, there in self._there.items():
            rows = self._rows[host]
            plans = there.plans or [list[str]() for _ in rows]
            found += [
                replace(row, undo=tuple(f"on {host}: {text}" for text in plan))
                for row, plan in zip(rows, plans, strict=True)
            ]
        return found

    def __enter__(self) -> Self:
        try:
            for one in self._there.values():
                one.__enter__()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._began and not self._ended:
                self.undo()
        finally:
            self._close()

    def _close(self) -> None:
        for one in self._there.values():
            one.close()

    def check(self) -> None:
        """Raise what would refuse one of them, on its host; nothing is touched."""
        for one in self._there.values():
            one.check()

    def inject(self) -> list[str]:
        """Inject and prove, host by host; when one fails, all are undone. Raises as a host's own injection does."""
        self.check()
        self._began = True
        self._on_state(State.INJECTING, "")
        try:
            evidence = [line for one in self._there.values() for line in one.inject()]
        except BaseException:
            self.undo()
            raise
        self._on_state(State.ACTIVE, "; ".join(evidence))
        return evidence

    def beat(self) -> None:
        """Renew every lease; a host that does not answer ends it for all."""
        for one in self._there.values():
            one.beat()

    def recheck(self) -> list[str]:
        """Prove again on every host."""
        return [line for one in self._there.values() for line in one.recheck()]

    def ask_abort(self, reason: str) -> None:
        """End every conversation, so that the guardians undo at once; by a thread, since a signal may ask for it."""
        threading.Thread(target=self._close, name="chaos-abort", daemon=True).start()

    def undo(self) -> Undone:
        """
        Take everything back, the last one first, and prove that nothing is left.

        Raises:
            Dirty: On some host it could not be proved; with what to run, and where.
        """
        longest_s, by, commands = 0.0, "nobody", list[str]()
        dirty: list[Dirty] = []
        with signals_held():
            self._on_state(State.UNDOING, "")
            for host, one in reversed(self._there.items()):
                if not one.begun:
                    continue
                began = time.monotonic()
                try:
                    answer = one.undo()
                    took_s, who = answer.undone_s, answer.by
                    commands += [f"on {host}: {text}" for text in answer.commands]
                except Dirty as error:
                    dirty.append(error)
                    continue
                except KvopsError as error:
                    one.close()
                    try:
                        self._confirm(host, one, error)
                    except Dirty as worse:
                        dirty.append(worse)
                        continue
                    took_s, who = time.monotonic() - began, "guardian"
                longest_s = max(longest_s, took_s)
                by = who if by in ("nobody", who) else f"{by}, {who}"
            self._ended = True
            if dirty:
                detail = "; ".join(one.what for one in dirty)
                self._on_state(State.DIRTY, detail)
                left = [text for one in dirty for text in one.commands]
                raise Dirty(detail, fix="; ".join(left), commands=left)
            self._on_state(State.CLEAN, "")
        return Undone(undo_s=longest_s, by=by, commands=commands)

    def _confirm(self, host: str, one: RemoteInjection, why: KvopsError) -> None:
        """Wait until the ledger there says that its guardian has undone."""
        deadline, pause = time.monotonic() + one.orders[0].lease_s + CONFIRM_S, threading.Event()
        seen = "it cannot be asked"
        while time.monotonic() < deadline:
            try:
                with closing(self._connect(host)) as there:
                    clean, seen = _state_there(there, one.experiment)
            except KvopsError as error:
                clean, seen = False, error.what
            if clean:
                one.begun = False
                return
            pause.wait(_PAUSE_S)
        raise Dirty(
            f"{host}: it is not known that {one.experiment} was undone ({seen}) since {why.what}",
            fix="look there",
            commands=[f"kvops -g {self._rows[host][0].group} chaos recover --host {host}"],
        )


def _state_there(host: SshHost, experiment: str) -> tuple[bool, str]:
    """Whether nothing of an experiment is left there, or can come any more; and what its ledger says."""
    argv = ("kvops", "chaos", "status", "-o", "json")
    result = host.run_with_input(argv, b"", timeout_s=STATUS_TIMEOUT_S)
    try:
        said = json.loads(result.stdout)
        found = next((one for one in said["experiments"] if one["id"] == experiment), None)
        if found is None:
            return False, "its ledger does not know it"
        ended = said["running"] != experiment and not found["dirty"]  # before anything was touched
        return found["state"] == State.CLEAN or ended, str(found["state"])
    except (ValueError, KeyError, TypeError):
        return False, result.detail or "it says nothing of its experiments"


def _error(answer: Answer, host: str) -> KvopsError:
    kind = getattr(errors, answer.error, None)
    what = f"{host}: {answer.what}"
    if answer.error == "Dirty":
        return Dirty(what, fix=answer.fix, commands=[f"on {host}: {text}" for text in answer.commands])
    if isinstance(kind, type) and issubclass(kind, KvopsError):
        return kind(what, fix=answer.fix)
    return Aborted(what, fix=answer.fix)
