"""A daemon that only tells when it is ready and ends on SIGTERM: stands in for master and store where only life counts."""

from __future__ import annotations

import sys
from pathlib import Path

STANDIN = """
import json, os, signal, socket, sys, time
import yaml
role, path = sys.argv[1:3]
config = yaml.safe_load(open(path))
mode = os.environ.get("STANDIN_" + config["name"].replace("-", "_"), "")
def ended(signum, frame):
    print("ending", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else ended)
def tell(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])
print("standing in for", config["name"], flush=True)
if mode.startswith("die"):
    print("error: the segment could not be populated", flush=True)
    os._exit(int(mode[3:]))
if mode == "vanish":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "hang":
    tell("STATUS=populated 10 %")
    time.sleep(600)
held = []
def address(field):
    s = socket.socket()
    host, _, port = config[field].rpartition(":")
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((host, int(port)))
    s.listen()
    held.append(s)
    return "%s:%d" % s.getsockname()
addresses = {f: address(f) for f in ("listen", "control", "http") if f in config}
addresses["unix"] = config["unix_path"]
tell("READY=1\\nSTATUS=serving\\nX_KVOPS_ADDRESSES=" + json.dumps(addresses))
while True:
    signal.pause()
"""


def standin_command(role: str, config_file: Path) -> list[str]:
    """The argv that runs the stand-in."""
    return [sys.executable, "-c", STANDIN, role, str(config_file)]
