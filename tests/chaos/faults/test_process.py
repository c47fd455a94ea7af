"""Faults of whole processes, on real ones."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvops.chaos.faults import common, store
from kvops.chaos.lifecycle import Injection
from kvops.chaos.model import State
from kvops.chaos.targets import build
from kvops.errors import FaultNotApplied, NotInjected, UsageError
from kvops.fleet.process import identify, is_running, is_stopped
from kvops.host import LocalHost
from tests.chaos.faults.rounds import LEASE_S, VERIFY_S
from tests.chaos.victims import Victim, victims

pytestmark = pytest.mark.process
HOST = LocalHost()

CASES = [
    ("process.kill", {}),
    ("process.pause", {}),
    ("process.restart", {}),
    ("process.slow", {"how": "auto"}),
    ("process.slow", {"how": "duty"}),
]


@pytest.fixture
def servers() -> Iterator[list[Victim]]:
    """A target with a child process of its own, and a neighbour."""
    with victims(2, child=True) as found:
        yield found


def fault_on(servers: list[Victim], name: str, arguments: dict[str, Any]) -> Any:
    """A fault on the first server; the second must stay well."""
    return build(name, arguments, target=servers[0].target, control=servers[1].target)


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_inject_verify_undo_undo(
    servers: list[Victim], tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    """A fault is proved, taken back, taken back again without harm, and then its own proof refuses."""
    fault = fault_on(servers, name, arguments)
    states: list[State] = []

    with Injection(
        [fault],
        host=HOST,
        state_dir=tmp_path,
        on_state=lambda state, detail: states.append(state),
        lease_s=LEASE_S,
        verify_timeout_s=VERIFY_S,
    ) as one:
        evidence = one.inject()
        again = one.recheck()
        proof = one.undo()
        repeated = one.undo()

    assert len(evidence[0].signals) >= 2
    assert len(again) == (1 if fault.lasting else 0)
    assert all(step.done for step in proof.steps)
    assert not any(step.acted for step in repeated.steps)
    assert states[-1] is State.CLEAN
    assert not one.book.dirty()
    if fault.lasting:
        assert len(proof.refused) == 1
        with pytest.raises(FaultNotApplied):
            one.faults[0].verify(HOST)


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_noop_is_not_injected(
    servers: list[Victim], tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    """An injector that does nothing is found out, whatever it says."""
    fault = fault_on(servers, name, arguments)
    noop = type("Noop", (type(fault),), {"inject": lambda self, host: None, "__slots__": ()})
    sham = noop(**{one.name: getattr(fault, one.name) for one in dataclasses.fields(fault)})

    with (
        pytest.raises(NotInjected),
        Injection([sham], host=HOST, state_dir=tmp_path, verify_timeout_s=0.3, lease_s=LEASE_S) as one,
    ):
        one.inject()

    assert one.state is State.CLEAN


def test_a_process_that_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks a process may go: then it has no threads and no segment, and nothing breaks."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        identity = identify(process.pid)
        assert identity is not None
        process.kill()
    monkeypatch.setattr(common, "is_running", lambda identity: True)

    assert common.thread_states(identity) == ""
    with pytest.raises(FaultNotApplied, match="has ended"):
        store._segment_file(identity.pid)


def test_pause_stops_the_whole_role(servers: list[Victim], tmp_path: Path) -> None:
    """The child of a role is stopped with it, and both go on afterwards as the processes they were."""
    fault = fault_on(servers, "process.pause", {})
    assert len(fault.target.processes) == 2

    with Injection([fault], host=HOST, state_dir=tmp_path, lease_s=LEASE_S) as one:
        one.inject()
        stopped = [is_stopped(each) for each in fault.target.processes]
        one.undo()

    assert stopped == [True, True]
    assert all(is_running(each) and not is_stopped(each) for each in fault.target.processes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"cpu_shar": 0.1}, "cpu_share"), ({"cpu_share": 7}, "0.9"), ({"how": "magic"}, "how")],
)
def test_wrong_arguments(servers: list[Victim], arguments: dict[str, Any], words: str) -> None:
    """A misspelt argument and a value out of bounds are refused with what would be right."""
    with pytest.raises(UsageError) as caught:
        fault_on(servers, "process.slow", arguments)

    assert words in str(caught.value)
