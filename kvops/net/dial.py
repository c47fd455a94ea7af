"""
Finding the one of several masters that leads: all are called at once, the first that welcomes us has won.

A master that does not lead says so and may name the one that does; a dead address is refused or silent. Neither
keeps a caller from reaching the leader: nobody is waited for while somebody else may answer.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvops.errors import AuthFailed, NotLeader, Unreachable
from kvops.net.link import Address, Link, LinkState, Single

REDIAL_S: Final = 0.05  # an address that refused is called again while others are silent
ADDRESSES_MAX: Final = 16  # with those that masters name


def dial(addresses: Sequence[Address], open_link: Callable[[Address], Link], *, deadline: float) -> Link:
    """
    A ready link to whichever of these masters leads.

    Args:
        addresses: Of the masters, at least one.
        open_link: Begins a connection.
        deadline: On ``time.monotonic``.

    Raises:
        Unreachable: None of them leads, or none answered by the deadline. AuthFailed where a master says so.
    """
    calling = _Calling(addresses, open_link)
    try:
        return calling.wait(deadline)
    finally:
        calling.hang_up()


class _Calling:
    def __init__(self, addresses: Sequence[Address], open_link: Callable[[Address], Link]) -> None:
        self._open_link = open_link
        self._links: dict[int, Link] = {}  # by descriptor
        self._due: dict[Address, float] = dict.fromkeys(addresses, 0.0)  # to be called, and when
        self._known = set(addresses)
        self._trouble: Unreachable | None = None
        self._receiver = Single()

    def wait(self, deadline: float) -> Link:
        while True:
            now = time.monotonic()
            if now >= deadline:
                break
            for address in [address for address, due in self._due.items() if due <= now]:
                del self._due[address]
                self._call(address)
            if not self._links and all(due > 0 for due in self._due.values()):
                break  # everybody has been asked, and nobody is left who might still answer
            found = self._poll(min(deadline, *self._due.values(), deadline) - now)
            if found is not None:
                return found
        names = ", ".join(str(address) for address in sorted(self._known, key=str))
        if self._trouble is not None:
            raise self._trouble
        raise Unreachable(f"no master answered in time ({names})", fix="check that they run: kvops status")

    def _call(self, address: Address) -> None:
        try:
            link = self._open_link(address)
        except Unreachable as error:
            self._failed(address, error)
        else:
            self._links[link.fileno()] = link

    def _poll(self, left_s: float) -> Link | None:
        poll = select.poll()
        for descriptor, link in self._links.items():
            poll.register(descriptor, link.events)
        for descriptor, events in poll.poll(max(0.0, left_s) * 1_000 + 1):
            link = self._links[descriptor]
            try:
                link.advance(events, self._receiver)
            except AuthFailed:
                raise
            except Unreachable as error:
                del self._links[descriptor]
                self._failed(link.address, error)
                continue
            if link.state is LinkState.READY:
                return self._links.pop(descriptor)
        return None

    def _failed(self, address: Address, error: Unreachable) -> None:
        # That another one leads says more than that somebody is silent.
        if self._trouble is None or not isinstance(self._trouble, NotLeader):
            self._trouble = error
        self._due[address] = time.monotonic() + REDIAL_S
        leader = error.leader if isinstance(error, NotLeader) else None
        if leader:
            named = Address.parse(leader)
            if named not in self._known and len(self._known) < ADDRESSES_MAX:
                self._known.add(named)
                self._due[named] = 0.0

    def hang_up(self) -> None:
        for link in self._links.values():
            link.close()
