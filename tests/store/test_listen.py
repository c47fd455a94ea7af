"""Sockets that listen, and how many may come."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvops.store.listen import FILES_RESERVED, Room

ROOM = """
import resource, sys
from kvops.store.listen import descriptor_room
soft, hard, *wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(*descriptor_room(*wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "room"),
    [
        (256, 10_000, [4_096], [4_096]),
        (10_000, 10_000, [4_096], [4_096]),
        (256, 1_000, [4_096], [1_000 - FILES_RESERVED]),
        (256, 10_000, [4_096, 1_024], [4_096, 1_024]),
        (256, 1_128, [4_096, 1_024], [800, 200]),
        (64, 64, [4_096, 1_024], [1, 1]),
    ],
    ids=["raised", "enough", "up to the hard limit", "two kinds", "shared out", "hardly any"],
)
def test_room_for_descriptors(soft: int, hard: int, wanted: list[int], room: list[int]) -> None:
    """The limit of open files is raised as far as it may be, and no more is accepted than fits under it."""
    command = [sys.executable, "-c", ROOM, *map(str, [soft, hard, *wanted])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    *found, limit = map(int, done.stdout.split())
    assert found == room
    assert limit >= min(sum(room), hard)


def test_room_is_counted() -> None:
    """No more enter than there is room for; a place that is left is another's."""
    room = Room(2)
    assert [room.enter(), room.enter(), room.enter()] == [True, True, False]
    room.leave()
    assert len(room) == 1
    assert room.enter()
