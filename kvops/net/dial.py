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
from kvops.net.etcd_query import EtcdEndpoint, EtcdQuery
from kvops.net.link import Address, Link, LinkState, Single

REDIAL_S: Final = 0.05  # an address that refused is called again while others are silent
ADDRESSES_MAX: Final = 16  # with those that masters name


Target = Address | EtcdEndpoint
"""Whom to call: a master, or etcd, which names one."""


def dial(targets: Sequence[Target], open_link: Callable[[Address], Link], *, deadline: float) -> Link:
    """
    A ready link to whichever of these masters leads.

    Args:
        targets: The masters, or members of etcd, at least one.
        open_link: Begins a connection to a master.
        deadline: On ``time.monotonic``.

    Raises:
        Unreachable: None of them leads, or none answered by the deadline. AuthFailed where a master says so.
    """
    calling = _Calling(targets, open_link)
    try:
        return calling.wait(deadline)
    finally:
        calling.hang_up()


class _Calling:
    def __init__(self, targets: Sequence[Target], open_link: Callable[[Address], Link]) -> None:
        self._open_link = open_link
        self._links: dict[int, Link | EtcdQuery] = {}  # by descriptor
        self._due: dict[Target, float] = dict.fromkeys(targets, 0.0)  # to be called, and when
        self._known: set[Target] = set(targets)
        self._trouble: Unreachable | None = None
        self._receiver = Single()

    def wait(self, deadline: float) -> Link:
        while True:
            now = time.monotonic()
            if now >= deadline:
                break
            for target in [target for target, due in self._due.items() if due <= now]:
                del self._due[target]
                self._call(target)
            if not self._links and all(due > 0 for due in self._due.values()):
                break  # everybody has been asked, and nobody is left who might still answer
            found = self._poll(min([deadline, *self._due.values()]) - now)
            if found is not None:
                return found
        names = ", ".join(str(address) for address in sorted(self._known, key=str))
        if self._trouble is not None:
            raise self._trouble
        raise Unreachable(f"no master answered in time ({names})", fix="check that they run: kvops status")

    def _call(self, target: Target) -> None:
        link: Link | EtcdQuery
        try:
            link = EtcdQuery(target) if isinstance(target, EtcdEndpoint) else self._open_link(target)
        except Unreachable as error:
            self._failed(target, error)
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
            if isinstance(link, Link) and link.state is LinkState.READY:
                del self._links[descriptor]
                return link
        return None

    def _failed(self, target: Target, error: Unreachable) -> None:
        # That another one leads says more than that somebody is silent; what etcd names is no trouble at all.
        if not isinstance(self._trouble, NotLeader) and not (
            isinstance(error, NotLeader) and isinstance(target, EtcdEndpoint)
        ):
            self._trouble = error
        self._due[target] = time.monotonic() + REDIAL_S
        leader = error.leader if isinstance(error, NotLeader) else None
        if leader:
            named = Address.parse(leader)
            if named not in self._known and len(self._known) < ADDRESSES_MAX:
                self._known.add(named)
                self._due[named] = 0.0

    def hang_up(self) -> None:
        for link in self._links.values():
            link.close()
