"""What masters and an inventory say together of where the members of a group are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvops.chaos.remote_pool import RemoteGroup
from kvops.errors import Refused, UsageError
from kvops.fleet.inventory import parse_inventory
from kvops.store.model import MasterStatus, PlacementPolicy, StoreInfo, StoreState

INVENTORY = b"""
schema: 1
groups:
  all:
    hosts:
      gpu-1: {address: 10.0.0.1, labels: {use: trial}}
      gpu-2: {address: 10.0.0.2}
      twin-a: {address: 127.0.0.1, port: 2201, logical_host: rack-a, labels: {use: elsewhere}}
      twin-b: {address: 127.0.0.1, port: 2202}
"""


def group_of(
    inventory: bytes = INVENTORY, *, environment: str = "staging", protect: bool = False
) -> RemoteGroup:
    """A group on these hosts."""
    hosts = parse_inventory(inventory, source="fleet", folder=Path()).hosts
    return RemoteGroup(
        name="b",
        environment=environment,
        protect=protect,
        masters=("10.0.0.1:1",),
        control=("10.0.0.1:2",),
        secret_file="/secret",
        hosts=hosts,
        logins={name: host.login for name, host in hosts.items()},
    )


def store(name: str, address: str, host: str) -> StoreInfo:
    """One that serves."""
    return StoreInfo(
        id=1,
        name=name,
        host=host,
        numa_node=0,
        incarnation=1,
        boot_id="",
        pid=7,
        address=address,
        unix_path="",
        http_address=address,
        state=StoreState.READY,
        capacity_bytes=1,
        populated_bytes=1,
        used_bytes=0,
        objects=0,
        transports=["tcp"],
    )


def status(*stores: StoreInfo, role: str = "leader", name: str = "master-0", term: int = 3) -> MasterStatus:
    """What a master says that knows these stores."""
    return MasterStatus(
        group="b",
        name=name,
        host="host-0",
        pid=5,
        address="10.0.0.1:1",
        role=role,
        term=term,
        uptime_s=1.0,
        placement=PlacementPolicy.LOCAL_FIRST,
        objects=0,
        processing=0,
        capacity_bytes=1,
        used_bytes=0,
        evicted_total=0,
        lookups_total=0,
        hits_total=0,
        breaker_open=False,
        stores=list(stores),
        clients=[],
    )


def test_where_members_are() -> None:
    """By the address that they listen on; by their logical host where several hosts share one."""
    said = status(
        store("s1", "10.0.0.2:9", "anything"),
        store("s2", "127.0.0.1:9", "rack-a"),
        store("s3", "127.0.0.1:9", "twin-b"),
        store("s4", "10.9.9.9:9", "gpu-1"),
    )

    parts = group_of().parts_of({"10.0.0.1:2": said})

    assert {part.name: part.machine for part in parts} == {
        "b/master-0": "gpu-1",
        "b/s1": "gpu-2",
        "b/s2": "twin-a",
        "b/s3": "twin-b",
        "b/s4": "gpu-1",
    }
    assert [part.member for part in parts if part.leads] == ["master-0"]


@pytest.mark.parametrize(
    ("address", "host", "match"),
    [("10.9.9.9:9", "nowhere", "on no host"), ("127.0.0.1:9", "nowhere", "twin-a, twin-b at once")],
)
def test_a_member_that_is_nowhere_or_anywhere(address: str, host: str, match: str) -> None:
    """Where a member is must be known beyond doubt before anything is done to it."""
    with pytest.raises(UsageError, match=match):
        group_of().parts_of({"10.0.0.1:2": status(store("s", address, host))})


def test_the_stores_are_those_of_the_newest_leader() -> None:
    """A master that led before, and does not know yet that it does not, is not believed."""
    old = status(store("gone", "10.0.0.2:9", "h"), name="master-1", term=2)
    new = status(store("there", "10.0.0.2:9", "h"))

    parts = group_of().parts_of({"10.0.0.1:3": old, "10.0.0.1:2": new})

    assert [part.member for part in parts if part.role == "store"] == ["there"]
    assert [part.member for part in parts if part.leads] == ["master-0"]


@pytest.mark.parametrize(
    ("group", "match"),
    [
        (group_of(environment="Production"), "labelled Production"),
        (group_of(INVENTORY.replace(b"trial", b"prod")), "labelled prod"),
        (group_of(protect=True), "protected"),
        (group_of(environment=""), "nobody says"),
    ],
    ids=["context", "host", "protected", "unlabelled"],
)
def test_groups_that_serve_somebody(group: RemoteGroup, match: str) -> None:
    """What is labelled production anywhere, is protected, or is not labelled at all is left alone."""
    parts = group_of().parts_of({"10.0.0.1:2": status(store("s", "10.0.0.2:9", "h"))})

    with pytest.raises(Refused, match=match):
        group.refuse(parts)
    group_of(INVENTORY.replace(b"elsewhere", b"prod")).refuse(parts)  # a host of others


def test_a_member_that_has_gone_is_none() -> None:
    """A store that its master has given up is no target any more."""
    gone = msgspec.structs.replace(store("s", "10.0.0.2:9", "h"), state=StoreState.GONE)

    assert [part.role for part in group_of().parts_of({"10.0.0.1:2": status(gone)})] == ["master"]
