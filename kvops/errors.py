"""
Every exception kvops raises on purpose.

::

    KvopsError                what happened, to what, and what to do
    ├── UsageError            the caller asked for something that cannot be: bad value, bad file        exit 2
    │   ├── ConfigError       a configuration or state file is unreadable or wrong
    │   ├── ParseError        text or bytes from outside are not in the expected format
    │   ├── ClosedPool        a pool was used after close()
    │   └── WrongBuffer       a caller's buffer does not fit the object
    ├── Unreachable           a peer could not be seen or reached in time                               exit 3
    │   ├── AuthFailed        the peer does not hold the group secret, or we do not
    │   └── NotLeader         another master leads; carries its address
    ├── Refused               a guard, a limit or a state forbids it                                    exit 5
    │   ├── NoSpace           the pool has no room for the object
    │   └── AlreadyRunning    the group runs already
    ├── StartFailed           a process ended while starting; carries its last log lines
    ├── LeftBehind            something is half done and needs a person                                 exit 4
    │   └── Dirty             a fault could not be proved undone; carries the commands to run
    ├── NotInjected           a fault was asked for and is not there: never a pass                       exit 11
    │   └── FaultNotApplied   one fault's own proof, while it is looked for
    ├── Aborted               an experiment was ended before its time, and undone                       exit 12
    ├── Unsupported           this machine cannot do the fault                                          exit 14
    └── WireError             a frame breaks the protocol; the connection is closed
"""

from __future__ import annotations


class KvopsError(Exception):
    """An expected trouble: ``what`` says what happened to what, ``fix`` what to do about it."""

    exit_code = 1

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}" if self.fix else self.what


class UsageError(KvopsError):
    """The caller asked for something that cannot be."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration or state file is unreadable or wrong."""


class ParseError(UsageError):
    """Text or bytes from outside are not in the expected format."""


class ClosedPool(UsageError):
    """A pool was used after ``close()``."""


class WrongBuffer(UsageError):
    """A caller's buffer does not fit the object."""


class Unreachable(KvopsError):
    """A peer could not be seen or reached in time."""

    exit_code = 3


class AuthFailed(Unreachable):
    """One side of a connection does not hold the group secret."""


class NotLeader(Unreachable):
    """Another master leads."""

    def __init__(self, what: str, *, fix: str, leader: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.leader = leader


class Refused(KvopsError):
    """A guard, a limit or a state forbids it."""

    exit_code = 5


class NoSpace(Refused):
    """The pool has no room for the object."""


class AlreadyRunning(Refused):
    """The group runs already."""


class StartFailed(KvopsError):
    """
    A process ended while starting, and whatever was started with it has been stopped again.

    The exit code is the process's own where that says more than "no": bad file 2, port in use 5, bug 70.
    """

    def __init__(
        self, what: str, *, fix: str, log_lines: list[str] | None = None, exit_code: int = 1
    ) -> None:
        super().__init__(what, fix=fix)
        self.log_lines = log_lines or []
        self.exit_code = exit_code


class LeftBehind(KvopsError):
    """Something is half done and needs a person."""

    exit_code = 4


class Dirty(LeftBehind):
    """A fault could not be proved undone; ``commands`` is what a person runs to undo it."""

    def __init__(self, what: str, *, fix: str, commands: list[str] | None = None) -> None:
        super().__init__(what, fix=fix)
        self.commands = commands or []


class NotInjected(KvopsError):
    """A fault was asked for and is not there: what was measured meanwhile proves nothing."""

    exit_code = 11


class FaultNotApplied(NotInjected):
    """What would prove one fault is not to be seen; the lifecycle looks again until its time is over."""


class Aborted(KvopsError):
    """An experiment was ended before its time by its guardian, a guard or a person, and undone."""

    exit_code = 12


class Unsupported(KvopsError):
    """A fault that the machine at hand cannot do."""

    exit_code = 14


class WireError(KvopsError):
    """A frame breaks the protocol; the connection it came on is closed."""
