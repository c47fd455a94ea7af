"""Every check fires on its own defect and on nothing else; healthy nodes are silent."""

from __future__ import annotations

from itertools import pairwise

import pytest
from benign import BENIGN
from defects import DEFECTS, Defect
from healthy import HEALTHY
from world import World, judge, loud, outcomes

from kvops.diag.model import Outcome
from kvops.diag.registry import checks


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d.check}-{d.severity}")
def test_defect(defect: Defect) -> None:
    """
    A defect is named by its own check at its own severity, with what was observed, what was expected, a fix and
    where it was seen; no other check reports but its consequences.
    """
    worlds = [World(), World("node-b", 62)][: defect.nodes]
    defect.edit(*worlds)

    results = judge(*worlds)

    assert outcomes(results)[defect.check] == defect.severity
    assert set(loud(results)) - {defect.check} <= set(defect.also)
    own = [finding for one in results if one.check == defect.check for finding in one.findings]
    for finding in own:
        if finding.severity in ("fail", "warn"):
            assert finding.observed
            assert finding.expected
            assert finding.fix
            assert finding.evidence or defect.nodes == 2 or defect.check.startswith(("probe.", "qos.rtt"))


def test_every_check_has_a_defect() -> None:
    """No check goes untested: each id has a row that makes it report."""
    assert {defect.check for defect in DEFECTS} == set(checks())


@pytest.mark.parametrize("name", BENIGN)
def test_benign(name: str) -> None:
    """What only looks frightening makes nobody warn or fail."""
    world = World()
    BENIGN[name](world)

    assert loud(judge(world)) == {}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(name: str) -> None:
    """Healthy nodes of every kind are silent, and no check crashes on them."""
    results = judge(HEALTHY[name]())

    assert loud(results) == {}
    assert [r.reason for r in results if "crashed" in r.reason] == []


def test_a_kill_for_memory_is_told_once() -> None:
    """The kernel writes two lines for one kill: that is one finding, with the name and the pid."""
    world = World()
    world.log("oom-kill:constraint=CONSTRAINT_NONE,task=python,pid=99,uid=0")
    world.log("Out of memory: Killed process 99 (python) total-vm:1kB")

    found = next(result for result in judge(world) if result.check == "mem.oom_events")

    assert [finding.subject for finding in found.findings] == ["python (pid 99)"]


def test_healthy_pair() -> None:
    """Two healthy nodes that differ in addresses and names alone show no drift."""
    assert loud(judge(World(), World("node-b", 62))) == {}


def test_unknown_is_not_ok() -> None:
    """Where nothing was collected nothing is judged: no check may call that healthy or sick."""
    world = World()
    world.files.clear()
    world.later.clear()
    world.outputs.clear()
    world.meta |= {
        "scope": [],
        "links": {},
        "realpath": {},
        "errors": {},
        "dev": [],
        "targets": [],
        "expect": {},
    }

    results = judge(world)

    assert {r.outcome for r in results} <= {Outcome.UNKNOWN, Outcome.SKIPPED}


def test_hidden_sources_never_warn() -> None:
    """Whatever is taken away from a healthy node (one source after the other), nothing starts to report."""
    commands = list(World().outputs)
    folders = [
        "/proc",
        "/sys/class/net",
        "/sys/class/infiniband_verbs",
        "/sys/bus/pci",
        "/sys/kernel",
        "/sys/devices",
        "/dev",
    ]
    for step, following in pairwise([*commands, None]):
        world = World()
        world.outputs.pop(step)
        if following is not None:
            world.outputs.pop(following, None)
        assert loud(judge(world)) == {}, step
    for folder in folders:
        world = World()
        world.drop(folder)
        world.meta["not_collected"] = [folder]
        assert loud(judge(world)) == {}, folder
