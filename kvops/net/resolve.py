"""
Names of hosts become addresses without holding up whoever asks.

A resolver whose servers do not answer takes half a minute, and nothing can cut it short; so each question is asked by
a thread of its own, and an answer that was right a while ago is used while a newer one is on its way.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvops.errors import Unreachable

WAIT_S: Final = 0.1  # for the first answer: part of some call's deadline
FRESH_S: Final = 30.0
NAMES_MAX: Final = 1_024

Found = tuple[socket.AddressFamily, str]
LookUp = Callable[..., list[Any]]


@dataclass(slots=True, eq=False)
class _Question:
    """One name that somebody is asking the resolver for, or has asked."""

    answered: threading.Event = field(default_factory=threading.Event)
    found: Found | None = None
    why: str = "no answer from the resolver yet"
    at: float = 0.0  # when it was answered


class Resolver:
    """Addresses by name, for one process."""

    def __init__(self, look_up: LookUp = socket.getaddrinfo) -> None:
        self._look_up = look_up
        self.reset()

    def reset(self) -> None:
        """Forget everything: in the child of a fork nobody answers the parent's questions."""
        self._lock = threading.Lock()
        self._known: dict[str, Found] = {}
        self._questions: dict[str, _Question] = {}

    def address(self, host: str) -> Found:
        """
        Family and numeric address of a host, after ``WAIT_S`` at most.

        Raises:
            Unreachable: It has none, or the resolver has not answered yet: ask again.
        """
        literal = numeric(host)
        if literal is not None:
            return literal
        with self._lock:
            question = self._questions.get(host)
            if question is None or (question.answered.is_set() and time.monotonic() - question.at > FRESH_S):
                if len(self._questions) >= NAMES_MAX:
                    self._questions.pop(next(iter(self._questions)))
                question = self._questions[host] = _Question()
                self._start(host, question)
            known = self._known.get(host)
        if known is None:
            question.answered.wait(WAIT_S)
        found = question.found or known
        if found is None:
            raise Unreachable(f"cannot resolve {host}: {question.why}", fix="check the name and the resolver")
        return found

    def _start(self, host: str, question: _Question) -> None:
        thread = threading.Thread(target=self._ask, args=(host, question), name="resolve", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no more
            question.why, question.at = str(error), time.monotonic()
            question.answered.set()

    def _ask(self, host: str, question: _Question) -> None:
        try:
            answers = self._look_up(host, None, type=socket.SOCK_STREAM)
            family, _, _, _, address = answers[0]
            question.found = self._known[host] = (family, str(address[0]))
        except (OSError, UnicodeError, IndexError) as error:
            question.why = str(error)
        finally:
            question.at = time.monotonic()
            question.answered.set()


def numeric(host: str) -> Found | None:
    """What needs no resolver."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return family, host
    return None


resolver: Final = Resolver()
os.register_at_fork(after_in_child=resolver.reset)
