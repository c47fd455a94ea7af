"""
What the masters of a group say of themselves, and what they noticed.

The masters of a lab are asked by a process of its own, ``python -m kvops.chaos.masters``: gRPC keeps the threads that
it starts, and a thread stays in the network namespace in which it was started.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvops.chaos.lab import LabGroup
from kvops.errors import KvopsError
from kvops.files import read_secret
from kvops.fleet.local import LocalGroup
from kvops.fleet.programs import daemon_environment
from kvops.store.model import Event, MasterStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROL_TIMEOUT_S: Final = 1.0
EVENTS_TIMEOUT_S: Final = 2.0
PROCESS_TIMEOUT_S: Final = 10.0  # its start included


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What one master says."""

    name: str
    status: MasterStatus | None = None
    events: list[Event] = []


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to ask, and what."""

    secret_file: str
    masters: list[tuple[str, str]]  # name, control address
    since: str = ""  # RFC 3339: events from then on; "": the status


def statuses(group: LocalGroup) -> list[tuple[str, MasterStatus]]:
    """What each master says of itself; those that do not answer are left out."""
    return [(one.name, one.status) for one in _said(group) if one.status is not None]


def events(group: LocalGroup, since: str) -> list[Event]:
    """What they noticed since a moment, RFC 3339; who does not answer has nothing to tell."""
    return [event for one in _said(group, since=since) for event in one.events]


def _said(group: LocalGroup, *, since: str = "") -> Sequence[Said]:
    masters = [
        (one.name, one.addresses["control"])
        for one in group.require().members
        if one.role == "master" and one.addresses.get("control")
    ]
    asked = Asked(secret_file=str(group.secret_file), masters=masters, since=since)
    return _in_a_process(asked) if isinstance(group, LabGroup) else ask(asked)


def ask(asked: Asked) -> list[Said]:
    """Ask each of them; those that do not answer are left out."""
    from kvops.store.control import ControlClient

    said: list[Said] = []
    timeout_s = EVENTS_TIMEOUT_S if asked.since else CONTROL_TIMEOUT_S
    for name, address in asked.masters:
        try:
            with closing(ControlClient(address, read_secret(Path(asked.secret_file)), timeout_s)) as client:
                if asked.since:
                    said.append(Said(name=name, events=list(client.events(asked.since))))
                else:
                    said.append(Said(name=name, status=client.status()))
        except KvopsError:
            continue
    return said


def _in_a_process(asked: Asked) -> list[Said]:
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-m", "kvops.chaos.masters"],
            input=msgspec.json.encode(asked),
            capture_output=True,
            timeout=PROCESS_TIMEOUT_S,
            check=False,
            env=daemon_environment(),
            start_new_session=True,
        )
        return msgspec.json.decode(result.stdout, type=list[Said])
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        return []


if __name__ == "__main__":
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    sys.stdout.buffer.write(msgspec.json.encode(ask(orders)))
