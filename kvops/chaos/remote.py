"""
A fault on another machine over SSH: injected, guarded and written down there, held from here.

::

    with RemoteInjection(login.connect(5.0), Order(fault="process.pause", target="store-0")) as one:
        evidence = one.inject()
        while holding:
            one.beat()
        undone = one.undo()

The lease is renewed by ``beat``. When this process dies, or the connection does, the guardian on that machine takes
the fault back: at once when the connection ends, within the lease when it merely falls silent.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import msgspec

from kvops import errors
from kvops.chaos.agent import Answer, Order
from kvops.errors import Aborted, Dirty, KvopsError, Unreachable, Unsupported

if TYPE_CHECKING:
    import paramiko

    from kvops.host import SshHost

COMMAND: Final = ("kvops", "chaos", "agent")
START_TIMEOUT_S: Final = 20.0
EXIT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 120.0  # of inject and undo: what they wait for there has its own deadlines
NOT_FOUND: Final = 127


class RemoteInjection:
    """One fault on one machine, from the connection to the proof that it is gone."""

    def __init__(self, host: SshHost, order: Order, *, command: tuple[str, ...] = COMMAND) -> None:
        self.host = host
        self.order = order
        self.experiment = ""  # its id in the ledger there
        self._command = command
        self._channel: paramiko.Channel | None = None
        self._lock = threading.Lock()
        self._rest = b""
        self._undone = True  # nothing was begun yet

    def __enter__(self) -> Self:
        self._channel = self.host.converse(self._command, timeout_s=START_TIMEOUT_S)
        self.experiment = self._say(msgspec.json.encode(self.order), START_TIMEOUT_S).experiment
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._undone:
                self.undo()
        except Unreachable:
            if error is None:
                raise  # else that is what happened, and the guardian there undoes
        finally:
            self.close()

    def close(self) -> None:
        """End the conversation; what is in force there is taken back there."""
        if self._channel is not None:
            self._channel.close()

    def inject(self) -> list[str]:
        """
        Inject and prove.

        Returns:
            The evidence, one line a fault.

        Raises:
            Refused, Unsupported, NotInjected, Dirty: As :meth:`kvops.chaos.lifecycle.Injection.inject` there.
            Unreachable: The connection is gone; its guardian undoes.
        """
        self._undone = False
        return self._say(b"inject", ANSWER_TIMEOUT_S).evidence

    def beat(self) -> None:
        """
        Renew the lease. Call it at least every third of the lease.

        Raises:
            Aborted: The guardian has undone everything.
            Unreachable: The connection is gone, or did not answer within the lease: the guardian undoes.
        """
        self._say(b"beat", self.order.lease_s)

    def recheck(self) -> list[str]:
        """Prove again that it is there; raises as ``inject`` and ``beat`` do."""
        return self._say(b"recheck", ANSWER_TIMEOUT_S).evidence

    def undo(self) -> Answer:
        """
        Take it back and prove that nothing is left.

        Raises:
            Dirty: It could not be proved.
            Unreachable: The connection is gone; its guardian undoes.
        """
        answer = self._say(b"undo", ANSWER_TIMEOUT_S)
        self._undone = True
        return answer

    def _say(self, word: bytes, timeout_s: float) -> Answer:
        with self._lock:
            channel = self._channel
            assert channel is not None, "enter the block first"
            try:
                channel.settimeout(timeout_s)
                channel.sendall(word + b"\n")
                while b"\n" not in self._rest:
                    chunk = channel.recv(1 << 16)
                    if not chunk:
                        raise self._ended(channel)
                    self._rest += chunk
            except (OSError, EOFError) as error:
                channel.close()  # a late answer must not be taken for that to the next word
                raise Unreachable(
                    f"{self.host.name} does not answer: {str(error) or 'no answer in time'}",
                    fix=f"its guardian undoes within {self.order.lease_s:g} s; look there: kvops chaos status",
                ) from error
            line, _, self._rest = self._rest.partition(b"\n")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise _error(answer, self.host.name)
        return answer

    def _ended(self, channel: paramiko.Channel) -> KvopsError:
        channel.status_event.wait(EXIT_TIMEOUT_S)  # sshd tells of it after the end of the output
        said = b""
        while channel.recv_stderr_ready() and len(said) < 4096:
            said += channel.recv_stderr(4096)
        words = said.decode("utf-8", "replace").strip().splitlines()
        if channel.exit_status_ready() and channel.recv_exit_status() == NOT_FOUND:
            return Unsupported(
                f"{self.host.name} has no {self._command[0]} on its PATH", fix="install kvops there"
            )
        return Unreachable(
            f"{self.host.name}: its agent has ended: {words[-1] if words else 'it said nothing'}",
            fix="its guardian undoes; look there: kvops chaos status",
        )


def _error(answer: Answer, host: str) -> KvopsError:
    kind = getattr(errors, answer.error, None)
    what = f"{host}: {answer.what}"
    if answer.error == "Dirty":
        return Dirty(what, fix=answer.fix, commands=answer.commands)
    if isinstance(kind, type) and issubclass(kind, KvopsError):
        return kind(what, fix=answer.fix)
    return Aborted(what, fix=answer.fix)
