"""How a command is ended from outside: the exception that SIGTERM becomes, and commands that are meant to be."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised where we are so that what was begun is undone; never caught for good."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def ends_quietly() -> Iterator[None]:
    """Ctrl-C and SIGTERM are how this block is meant to end: the exit code says which it was, and no error does."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.exceptions.Exit(128 + signal.SIGINT) from None
    except Terminated as end:
        raise click.exceptions.Exit(128 + end.signum) from None
