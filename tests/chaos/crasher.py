"""
A runner for tests of crash points: pauses one process's target, and at one state does what it is told.

``python -m tests.chaos.crasher STATE_DIR FAULT TARGET_PORT CONTROL_PORT AT WHOM``: says each state on a line of
standard output; at state AT it kills WHOM (runner, guardian, both, target, nobody) and goes on if it can. With
``wait`` it stays at that state until it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from kvops.chaos.lifecycle import Injection
from kvops.chaos.model import State
from kvops.chaos.targets import Target, build, of_process
from kvops.errors import KvopsError
from kvops.host import LocalHost

LEASE_S = 20.0  # a runner that runs renews it, however busy the machine is
VERIFY_S = 30.0  # likewise
LEASE_S_OF_A_WAITER = 120.0  # longer than any test waits: what is undone earlier was not undone by the lease


def target(name: str, pid: str, port: str) -> Target:
    """A victim, as the test started it."""
    return of_process(int(pid), name=name, role="server", addresses={"http": f"127.0.0.1:{port}"})


def main(argv: list[str]) -> int:
    """Run one experiment to its end, or to ours."""
    state_dir, fault, target_pid, target_port, control_pid, control_port, at, whom = argv
    chosen = build(
        fault,
        {},
        target=target("server-0", target_pid, target_port),
        control=target("server-1", control_pid, control_port),
    )

    def on_state(state: State, detail: str) -> None:
        print(state, flush=True)
        if state != at:
            return
        guardian = injection._guardian
        if whom in ("guardian", "both") and guardian is not None:
            os.kill(guardian.pid, signal.SIGKILL)
        if whom in ("runner", "both"):
            os.kill(os.getpid(), signal.SIGKILL)
        if whom == "target":
            injection.verify_timeout_s = 0.5  # of a target that is dead there is no proof to wait for
            for one in chosen.target.processes:
                try:
                    os.kill(one.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it ended already
        if whom == "wait":
            threading.Event().wait(LEASE_S_OF_A_WAITER)

    injection = Injection(
        [chosen],
        host=LocalHost(),
        state_dir=Path(state_dir),
        lease_s=LEASE_S_OF_A_WAITER if whom == "wait" else LEASE_S,
        deadline_s=2 * LEASE_S_OF_A_WAITER,
        on_state=on_state,
        verify_timeout_s=VERIFY_S,
        name="crash",
    )
    with injection:
        injection.inject()
        injection.beat()
        injection.recheck()
        injection.undo()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KvopsError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(error.exit_code)
