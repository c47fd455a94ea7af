"""Names of hosts, and resolvers that do not answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvops.errors import Unreachable
from kvops.net import link, resolve
from kvops.net.link import Address, establish
from kvops.net.resolve import Resolver
from tests.net.servers import HELLO, SECRET, serve_echo
from tests.waiting import WAIT_S


class Names:
    """A resolver that answers when it is told to."""

    def __init__(self, answer: str | None = "127.0.0.1") -> None:
        self.answer = answer
        self.go_on = threading.Event()
        self.asked = 0

    def __call__(self, host: str, port: None, **options: Any) -> list[Any]:
        self.asked += 1
        assert self.go_on.wait(WAIT_S)
        if self.answer is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.answer, 0))]


@pytest.fixture
def names() -> Iterator[Names]:
    made = Names()
    yield made
    made.go_on.set()


def answered(resolver: Resolver, host: str) -> None:
    """Wait until no thread of this test's asks any more."""
    for thread in threading.enumerate():
        if thread.name == "resolve":
            thread.join(WAIT_S)


def test_addresses_need_no_resolver(names: Names) -> None:
    """What is an address already is not asked for."""
    resolver = Resolver(names)

    assert resolver.address("127.0.0.1") == (socket.AF_INET, "127.0.0.1")
    assert resolver.address("::1") == (socket.AF_INET6, "::1")
    assert names.asked == 0


def test_a_silent_resolver_holds_up_nobody(names: Names) -> None:
    """While it is silent the name is unreachable, and asked for once; when it answers, the answer is used."""
    resolver = Resolver(names)

    for _ in range(3):
        with pytest.raises(Unreachable, match="no answer"):
            resolver.address("pool")
    assert names.asked == 1
    names.go_on.set()
    answered(resolver, "pool")

    assert resolver.address("pool") == (socket.AF_INET, "127.0.0.1")
    assert names.asked == 1


def test_an_old_answer_is_used_until_there_is_a_newer_one(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that was known stays reachable when the resolver falls silent, or forgets it."""
    resolver = Resolver(names)
    names.go_on.set()
    resolver.address("pool")
    answered(resolver, "pool")
    monkeypatch.setattr(resolve, "FRESH_S", -1.0)

    names.answer = None
    for _ in range(2):
        assert resolver.address("pool") == (socket.AF_INET, "127.0.0.1")
        answered(resolver, "pool")
    names.answer = "127.0.0.2"
    resolver.address("pool")
    answered(resolver, "pool")

    assert resolver.address("pool") == (socket.AF_INET, "127.0.0.2")


def test_a_name_that_does_not_exist(names: Names) -> None:
    """What the resolver says is told."""
    names.answer = None
    names.go_on.set()

    with pytest.raises(Unreachable, match="not known"):
        Resolver(names).address("nowhere")


def test_a_forked_child_asks_for_itself(names: Names) -> None:
    """What a parent's thread was asking for is not waited for by a child, which has no such thread."""
    resolver = Resolver(names)
    with pytest.raises(Unreachable):
        resolver.address("pool")
    names.go_on.set()
    answered(resolver, "pool")

    resolver.reset()

    assert resolver.address("pool") == (socket.AF_INET, "127.0.0.1")
    assert names.asked == 2


def test_links_are_made_by_name(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a name fails at once while the resolver is silent, and is made when it has answered."""
    resolver = Resolver(names)
    monkeypatch.setattr(link, "resolver", resolver)
    with serve_echo() as address:
        named = Address("pool.invalid", address.port)
        with pytest.raises(Unreachable, match=r"pool\.invalid"):
            link.Link(named, secret=SECRET, hello=HELLO)
        names.go_on.set()
        answered(resolver, "pool.invalid")

        made = link.Link(named, secret=SECRET, hello=HELLO)
        establish(made, deadline=time.monotonic() + WAIT_S)

        assert made.welcome is not None
        made.close()
