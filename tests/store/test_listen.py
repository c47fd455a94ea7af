"""Sockets that listen, and how many may come."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvops.limits import CONNECTIONS_MAX
from kvops.store.listen import FILES_RESERVED

ROOM = """
import resource, sys
from kvops.store.listen import connection_room
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(connection_room(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("soft", "hard", "room"),
    [
        (256, 10_000, CONNECTIONS_MAX),
        (10_000, 10_000, CONNECTIONS_MAX),
        (256, 1_000, 1_000 - FILES_RESERVED),
        (64, 64, 1),
    ],
    ids=["raised", "enough", "up to the hard limit", "hardly any"],
)
def test_room_for_connections(soft: int, hard: int, room: int) -> None:
    """The limit of open files is raised as far as it may be, and no more is accepted than fits under it."""
    command = [sys.executable, "-c", ROOM, str(soft), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    found, limit = map(int, done.stdout.split())
    assert found == room
    assert limit >= min(room, hard)
