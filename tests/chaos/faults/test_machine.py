"""Faults of disks, limits, clocks and load, on real processes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvops.chaos.faults import catalogue
from kvops.chaos.targets import build
from kvops.fleet.process import is_running
from kvops.host import LocalHost
from tests import huge
from tests.chaos.faults.rounds import noop, there_and_back
from tests.chaos.victims import Victim, victims
from tests.pool import ROOT
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: limits, tracing and mounts"),
]
HOST = LocalHost()
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("disk.full", {}, ""),
    ("disk.slow", {"delay_ms": 120}, "strace"),
    ("disk.eio", {}, "strace"),
    ("fd.exhaust", {}, ""),
    ("memory.pressure", {}, ""),
    ("clock.skew", {"skew_s": 3600}, "cc"),
    ("clock.skew", {"skew_s": -600}, "cc"),
    ("load.incast", {"connections": 32, "rate": 200}, ""),
]
PACKAGES = {"strace": "strace", "cc": "gcc libc6-dev"}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False, timeout=WAIT_S
    )
    if mounted.returncode != 0:
        pytest.skip("needs to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True, timeout=WAIT_S)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Victim]]:
    """A target and its neighbour."""
    with victims(2) as found:
        yield found


def fault_on(servers: list[Victim], disk: Path, name: str, arguments: dict[str, Any]) -> Any:
    """A fault on the first server, skipped with what to install where the machine cannot do it."""
    for server in servers:
        if not server.alive:
            server.start()
    target = dataclasses.replace(servers[0].target, state_dir=str(disk))
    fault = build(name, arguments, target=target, control=servers[1].target)
    reason = type(fault).here().missing
    if reason is not None:
        pytest.skip(reason)
    assert fault.unavailable(HOST) is None
    return fault


@pytest.mark.parametrize(("name", "arguments", "program"), CASES)
def test_there_and_back(
    servers: list[Victim], disk: Path, tmp_path: Path, name: str, arguments: dict[str, Any], program: str
) -> None:
    """A fault is proved, taken back, taken back again without harm, and then its own proof refuses."""
    if program and shutil.which(program) is None:
        pytest.skip(f"needs: apt install {PACKAGES[program]}")

    one = there_and_back(fault_on(servers, disk, name, arguments), tmp_path)

    assert servers[0].alive, "the target answers again"
    assert is_running(one.faults[0].target.now.leader)


@pytest.mark.parametrize(("name", "arguments", "program"), CASES)
def test_noop(
    servers: list[Victim], disk: Path, tmp_path: Path, name: str, arguments: dict[str, Any], program: str
) -> None:
    """An injector that does nothing is found out, whatever it says."""
    if program and shutil.which(program) is None:
        pytest.skip(f"needs: apt install {PACKAGES[program]}")

    noop(fault_on(servers, disk, name, arguments), tmp_path)


def test_disk_full_spares_what_is_shared(servers: list[Victim], tmp_path: Path) -> None:
    """A file system that others use is never filled."""
    target = dataclasses.replace(servers[0].target, state_dir=str(tmp_path))
    fault = build("disk.full", {"folder": "/"}, target=target, control=servers[1].target)

    assert "everybody" in (fault.unavailable(HOST) or "")


def test_memlock_does_not_hold_root(servers: list[Victim]) -> None:
    """A limit that the kernel does not apply to the target is unsupported, not injected in vain."""
    fault = build("memory.memlock", {}, target=servers[0].target, control=servers[1].target)

    assert "CAP_IPC_LOCK" in (fault.unavailable(HOST) or "")


@pytest.fixture(scope="module")
def unprivileged() -> Iterator[list[Victim]]:
    """Two servers of a user without privileges."""
    with victims(2, user=65534) as found:
        yield found


def test_memlock(unprivileged: list[Victim], tmp_path: Path) -> None:
    """A role without privileges can lock no more memory while the limit is there."""
    targets = [one.target for one in unprivileged]
    fault = build("memory.memlock", {}, target=targets[0], control=targets[1])
    if fault.unavailable(HOST) is not None:
        pytest.skip(f"needs CAP_SYS_RESOURCE: {fault.unavailable(HOST)}")

    noop(fault, tmp_path)
    there_and_back(build("memory.memlock", {}, target=targets[0], control=targets[1]), tmp_path)


def test_hugepages(servers: list[Victim], tmp_path: Path) -> None:
    """All free huge pages are taken and given back, and nobody else's test is in need of them meanwhile."""
    with huge.reserved(8):
        fault = build("memory.hugepages", {}, target=servers[0].target, control=servers[1].target)
        reason = type(fault).here().missing
        if reason is not None:
            pytest.skip(reason)

        noop(fault, tmp_path)
        there_and_back(
            build("memory.hugepages", {}, target=servers[0].target, control=servers[1].target), tmp_path
        )


def test_every_fault_is_tried() -> None:
    """Each fault of the catalogue has a row in some test of inject, verify, undo, verify refuses."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))

    assert [name for name in catalogue() if f'"{name}"' not in text] == []


def test_every_fault_has_a_page() -> None:
    """Each fault of the catalogue has a heading in the playbook."""
    headings = {
        line[3:] for line in (ROOT / "playbooks/faults.md").read_text().splitlines() if line.startswith("## ")
    }

    assert headings == set(catalogue())
