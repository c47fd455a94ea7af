"""The pool under test: started, reached, stopped, and gone afterwards."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import kvops
from kvops.chaos import lab, netns
from kvops.chaos.experiment import PoolSpec
from kvops.chaos.pool import (
    Part,
    PoolUnderTest,
    check_supported,
    engine_names,
    group_names,
    planned_parts,
    started,
)
from kvops.errors import Unsupported, UsageError
from kvops.limits import STORE_SILENT_MS
from kvops.store.model import Reason
from tests.pool import CALL_MS
from tests.waiting import until

PAGE = bytes(range(256)) * 128
BRISK_MS = 400  # twice of it opens a breaker, before the master gives up a silent store by itself
assert 2 * BRISK_MS < STORE_SILENT_MS


def led(pool: PoolUnderTest) -> list[Part]:
    """All parts, once one is seen to lead: on a busy machine a master may not say so at once."""
    parts = pool.parts(roles=True)
    return parts if any(one.leads for one in parts) else []


@pytest.mark.process
def test_a_pool_is_reached_and_leaves_nothing(tmp_path: Path) -> None:
    """What was started serves, is named as planned, and is gone with its files afterwards."""
    spec = PoolSpec(stores=1, segment_size="16MiB")
    with started(spec, state_dir=tmp_path / "state", folder=tmp_path) as pool:
        parts = until(lambda: led(pool), "its master is seen to lead")
        options = pool.client_options("g1")
        with kvops.connect(options.pop("masters"), **options, host="host-0", deadline_ms=CALL_MS) as client:
            until(lambda: client.put("k", PAGE).ok, "the pool takes a put")
            assert client.get("k") == PAGE
        until(lambda: pool.healthy() is None, "it is healthy")
        assert [one.name for one in parts] == [one.name for one in planned_parts(spec)]
        assert [one.member for one in parts if one.leads] == ["master-0"]
        with pytest.raises(UsageError, match="no member"):
            pool.part("g1/store-9")

    assert [path for path in tmp_path.iterdir() if path.name != "state"] == []
    until(lambda: not any(Path(f"/proc/{one.pid}").exists() for one in parts), "its processes are gone")


@pytest.mark.process
@pytest.mark.skipif(lab.missing() is not None, reason=f"needs namespaces: {lab.missing()}")
def test_a_pool_on_nodes_and_a_disk_of_its_own(tmp_path: Path) -> None:
    """Each member has an address of its own, files lie apart, one master is seen to lead, and all of it ends."""
    spec = PoolSpec(stores=1, segment_size="16MiB", network="lab", own_disk="128MiB", transports=["tcp"])
    outside = netns.inode_of()
    with started(spec, state_dir=tmp_path / "state", folder=tmp_path) as pool:
        home = pool.state_dir
        inside = netns.inode_of()
        parts = until(lambda: led(pool), "its master is seen to lead")
        options = pool.client_options("g1")
        with kvops.connect(options.pop("masters"), **options, host="engine-0", deadline_ms=CALL_MS) as client:
            until(lambda: client.put("k", PAGE).ok, "the pool takes a put")
            assert client.get("k") == PAGE
        assert home.is_mount()

    assert inside != outside
    assert netns.inode_of() == outside
    assert [one.member for one in parts if one.leads] == ["master-0"]
    assert len({one.addresses["http"].rpartition(":")[0] for one in parts}) == 2
    assert [path for path in tmp_path.iterdir() if path.name != "state"] == []
    assert str(home) not in Path("/proc/mounts").read_text()


@pytest.mark.process
def test_what_has_ended_is_started_again(tmp_path: Path) -> None:
    """After a fault every member runs, as a supervisor would see to it."""
    with started(
        PoolSpec(stores=1, segment_size="16MiB"), state_dir=tmp_path / "state", folder=tmp_path
    ) as pool:
        pool.groups["g1"].act("kill", "store-0")
        assert pool.healthy() == "g1/store-0 does not run"

        assert pool.ensure_running() == ["g1/store-0"]
        assert pool.ensure_running() == []


@pytest.mark.process
def test_a_store_that_hangs_on_the_writers_own_host_opens_its_breaker(tmp_path: Path) -> None:
    """Two writes that time out are enough to stop asking it, although its memory can still be read."""
    with started(
        PoolSpec(stores=2, segment_size="16MiB"), state_dir=tmp_path / "state", folder=tmp_path
    ) as pool:
        options = pool.client_options("g1")
        with kvops.connect(options.pop("masters"), **options, host="host-1", deadline_ms=BRISK_MS) as client:
            numbers = itertools.count()

            def as_promised() -> bool:
                """Whether it went so before the machine was too busy for a deadline that short."""
                until(
                    lambda: (
                        client.put(f"before{next(numbers)}", PAGE, deadline_ms=CALL_MS).store == "store-1"
                    ),
                    "the writer's own host takes a put",
                )
                client.get("before0", deadline_ms=CALL_MS)
                pool.groups["g1"].act("pause", "store-1")
                try:
                    reasons = [client.put(f"k{next(numbers)}", PAGE).reason for _ in range(3)]
                    breakers = {one["name"]: one["breaker"] for one in client.health()["stores"]}
                finally:
                    pool.groups["g1"].act("resume", "store-1")
                asked_twice = reasons[:2] == [Reason.TIMEOUT] * 2 and reasons[2] is not Reason.TIMEOUT
                return asked_twice and breakers["store-1"] != "closed"

            until(as_promised, "its breaker opens after two writes")


@pytest.mark.parametrize(
    "spec",
    [
        PoolSpec(roles_needed=["ssd"]),
        PoolSpec(transports=["verbs"]),
    ],
    ids=["role", "verbs"],
)
def test_what_cannot_be_started_is_unsupported(spec: PoolSpec) -> None:
    """A pool that this machine or version cannot have is refused with the reason, before anything runs."""
    with pytest.raises(Unsupported) as caught:
        check_supported(spec)

    assert caught.value.fix


def test_names_of_two_groups_never_meet() -> None:
    """Members and engines carry their group's name."""
    spec = PoolSpec(groups=2)

    assert list(group_names(spec)) == ["g1", "g2"]
    assert not set(engine_names(spec, "g1")) & set(engine_names(spec, "g2"))
