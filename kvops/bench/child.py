"""
Entry of a benchmark's processes: ``python -m kvops.bench.child ROLE CONFIG``, the configuration as JSON.

A role answers questions, one JSON object a line, until its standard input ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from importlib import import_module
from typing import Any, Final

import msgspec

ROLES: Final = {
    "master": "kvops.store.master",
    "store": "kvops.store.node",
    "paper": "kvops.bench.paper",
    "lookups": "kvops.bench.lookup",
    "raw": "kvops.bench.raw",
}
PR_SET_PDEATHSIG: Final = 1  # prctl.h


def main(role: str, text: str) -> int:
    """Run one role."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # it ended before we could ask to be ended with it
    if role == "serve":
        return _become(json.loads(text))
    if role in ("master", "store"):
        module: Any = import_module(ROLES[role])
        from kvops.store.config import MasterConfig, StoreConfig

        kind = MasterConfig if role == "master" else StoreConfig
        return int(module.serve(msgspec.convert(json.loads(text), kind)))
    actor = import_module(ROLES[role]).Actor(json.loads(text))
    say(actor.ready())
    for line in sys.stdin:
        say(actor.answer(json.loads(line)))
    return 0


def _become(argv: list[str]) -> int:
    """Be ``kvops`` with these arguments, after having said when: our parent's end still ends us, prctl(2)."""
    say({"exec_s": time.monotonic()})
    os.execv(sys.executable, [sys.executable, "-P", "-m", "kvops", *argv])  # noqa: S606 (there is none to start)


def say(answer: dict[str, Any]) -> None:
    """One answer."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
