"""Faults of a whole group: etcd, the masters' leadership, its stores."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvops
from kvops.chaos.procs import with_word
from kvops.chaos.targets import build, neighbour, of_group, select
from kvops.fleet.local import LocalGroup
from kvops.fleet.start_plan import StartPlan
from kvops.host import LocalHost
from tests.chaos.faults.rounds import noop, there_and_back
from tests.pool import CALL_MS
from tests.waiting import WAIT_S, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs: apt install etcd-server"),
]
MIB = 1 << 20
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("process.kill", "store", {}),
    ("etcd.member", "etcd", {}),
    ("etcd.leader", "etcd", {}),
    ("etcd.quorum", "etcd", {}),
    ("etcd.slow_fsync", "etcd", {"delay_ms": 150}),
    ("master.leader_flap", "master", {}),
    ("rolling.restart", "store", {}),
    ("store.drain_under_load", "store", {}),
    ("store.wrong_bytes", "store", {"objects": 16}),
    ("store.stale_address", "store", {}),
    ("store.stale_address", "store", {"answered_by": "another"}),
    ("config.bad_value", "store", {"key": "segment_size_bytes", "value": 8 * MIB}),
    ("config.bad_value", "store", {"key": "segment_size_bites", "value": 1}),
]
IDS = [name for name, _, _ in CASES]
TOKENS: list[str] = []  # in the names of all that the faults of this file make


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroup]:
    """Two masters over an etcd of three, and two stores."""
    found = LocalGroup(tmp_path_factory.mktemp("chaos"), "chaos")
    plan = StartPlan(masters=2, stores=2, etcd_members=3, segment_size_bytes=16 * MIB)
    found.start(plan, timeout_s=2 * WAIT_S)
    try:
        yield found
    finally:
        found.stop(now=True)


def fill(group: LocalGroup) -> None:
    """Put objects, by a client on each store's host."""
    masters = [one.addresses["listen"] for one in of_group(group) if one.role == "master"]
    for host in ("host-0", "host-1"):
        with kvops.connect(
            masters, group=group.name, secret_file=group.secret_file, deadline_ms=CALL_MS, host=host
        ) as pool:
            until(lambda pool=pool, host=host: pool.put(f"{host}-0", bytes(4096)).ok, "the pool takes puts")
            for index in range(16):
                until(lambda pool=pool, key=f"{host}-{index}": pool.put(key, bytes(4096)).ok, "a put")


def fault_on(group: LocalGroup, name: str, role: str, arguments: dict[str, Any]) -> Any:
    """A fault on the first member of a role; another must stay well."""
    if name == "store.wrong_bytes":
        fill(group)

    def ready() -> Any:
        """Such a fault, once the group has settled after the one before."""
        targets = of_group(group)
        target = select(targets, role=role)[0]
        fault = build(name, arguments, target=target, control=neighbour(targets, target))
        reason = type(fault).here().missing
        if reason is not None:
            pytest.skip(reason)
        return fault if fault.unavailable(LocalHost()) is None else None

    fault = until(ready, f"{name} can be injected")
    TOKENS.append(getattr(fault, "token", ""))
    return fault


@pytest.mark.parametrize(("name", "role", "arguments"), CASES, ids=IDS)
def test_there_and_back(
    group: LocalGroup, tmp_path: Path, name: str, role: str, arguments: dict[str, Any]
) -> None:
    """A fault of a real group is proved, taken back, taken back again, and then its own proof refuses."""
    there_and_back(fault_on(group, name, role, arguments), tmp_path)

    assert all(member.running and not member.stopped for member in group.require().members)


@pytest.mark.parametrize(("name", "role", "arguments"), CASES[1:-1], ids=IDS[1:-1])
def test_noop(group: LocalGroup, tmp_path: Path, name: str, role: str, arguments: dict[str, Any]) -> None:
    """An injector that does nothing is found out, whatever it says."""
    noop(fault_on(group, name, role, arguments), tmp_path)


def test_nothing_is_left(group: LocalGroup) -> None:
    """After all of the above no file of ours lies in shared memory, and no helper runs; others' may."""
    tokens = [token for token in TOKENS if token]

    assert [
        one.name for one in Path("/dev/shm").iterdir() if any(token in one.name for token in tokens)
    ] == []
    assert [one.pid for token in tokens for one in with_word(token)] == []
