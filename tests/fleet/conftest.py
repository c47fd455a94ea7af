"""A daemon that only tells when it is ready and ends on SIGTERM, for tests of what surrounds real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvops.fleet.local import LocalGroup
from kvops.fleet.start_plan import StartPlan

STANDIN = """
import json, os, signal, socket, sys, time
import yaml

role, path, modes = sys.argv[1:4]
config = yaml.safe_load(open(path))
mode = json.loads(modes).get(config["name"], "")

def ended(signum, frame):
    print("ending", flush=True)
    os._exit(0)

def tell(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])

signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else ended)
print("standing in for", config["name"], flush=True)
if mode == "die":
    print("error: the segment could not be populated", flush=True)
    os._exit(5)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "hang":
    tell("STATUS=populated 10 %")
    time.sleep(600)
held = []

def address(field):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    host, _, port = config[field].rpartition(":")
    sock.bind((host, int(port)))
    sock.listen()
    held.append(sock)
    return "%s:%d" % sock.getsockname()

addresses = {field: address(field) for field in ("listen", "control", "http") if field in config}
tell("READY=1\\nX_KVOPS_ADDRESSES=" + json.dumps(addresses))
while True:
    signal.pause()
"""

SMALL = StartPlan(stores=2, segment_size_bytes=1 << 20)
"""The smallest plan with something to go wrong in the middle."""

MakeGroup = Callable[..., LocalGroup]


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[MakeGroup]:
    """Groups of stand-in daemons under one state folder; whatever still runs at the end is killed."""
    import json

    made: list[LocalGroup] = []

    def make(name: str = "local", *, modes: dict[str, str] | None = None) -> LocalGroup:
        def command(role: str, config_file: Path) -> list[str]:
            return [sys.executable, "-c", STANDIN, role, str(config_file), json.dumps(modes or {})]

        made.append(LocalGroup(tmp_path / "state", name, command=command))
        return made[-1]

    yield make
    for group in made:
        if group.state_file.is_file():
            group.stop(now=True)
