"""What an inventory says of hosts, and what it must not say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.errors import ConfigError, KvopsError, UsageError
from kvops.fleet.inventory import Inventory, load_inventory, parse_inventory

GOOD = """
schema: 1
defaults: {user: kvops, identity_file: keys/id, labels: {site: a}}
groups:
  prefill:
    roles: [store, engine]
    labels: {rack: r1}
    hosts:
      gpu-[001-003]: {address: "10.0.1.[1-3]", numa_nodes: [0, 1]}
      gpu-004: {address: "[fd00::4]", port: 2222, user: root, labels: {rack: r2}, logical_host: box-4}
  control:
    roles: master
    hosts: [ctl-1, "gpu-[003]"]
"""


def _parse(text: str) -> Inventory:
    return parse_inventory(text.encode(), source="fleet.yaml", folder=Path("/etc/kvops"))


def test_what_is_said_nearer_goes_first() -> None:
    """A host's own words go before its group's, those before the file's; ranges of names and addresses go in step."""
    hosts = _parse(GOOD.replace('ctl-1, "gpu-[003]"', "ctl-1")).hosts

    assert list(hosts) == ["gpu-001", "gpu-002", "gpu-003", "gpu-004", "ctl-1"]
    second, fourth, control = hosts["gpu-002"], hosts["gpu-004"], hosts["ctl-1"]
    assert (second.address, second.user, second.port) == ("10.0.1.2", "kvops", 22)
    assert second.identity_file == Path("/etc/kvops/keys/id")
    assert second.numa_nodes == (0, 1)
    assert second.labels == {"site": "a", "rack": "r1"}
    assert second.logical_host == "gpu-002"
    assert (fourth.address, fourth.user, fourth.port) == ("fd00::4", "root", 2222)
    assert fourth.labels["rack"] == "r2"
    assert fourth.logical_host == "box-4"
    assert (control.address, control.roles) == ("ctl-1", ("master",))
    assert second.login.key_file == "/etc/kvops/keys/id"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["gpu-001", "gpu-002", "gpu-003", "gpu-004", "ctl-1"]),
        (["gpu-[002-003]", "ctl-1"], ["gpu-002", "gpu-003", "ctl-1"]),
        (["control"], ["ctl-1"]),
        (["role=engine"], ["gpu-001", "gpu-002", "gpu-003", "gpu-004"]),
        (["rack=r2", "gpu-00*"], ["gpu-004", "gpu-001", "gpu-002", "gpu-003"]),
    ],
    ids=["all", "range", "group", "role", "label and glob"],
)
def test_selection(words: list[str], names: list[str]) -> None:
    """Hosts are named one by one, by range, glob, group, role or label; each is meant once."""
    inventory = _parse(GOOD.replace('ctl-1, "gpu-[003]"', "ctl-1"))

    assert [host.name for host in inventory.select(words)] == names


@pytest.mark.parametrize(
    ("word", "hint"), [("gpu-2", "gpu-002"), ("prefil", "prefill"), ("zzz", "groups: prefill")]
)
def test_an_unknown_host_is_not_guessed(word: str, hint: str) -> None:
    """A word that names nothing is refused, with the nearest that does."""
    with pytest.raises(UsageError) as caught:
        _parse(GOOD.replace('ctl-1, "gpu-[003]"', "ctl-1")).select([word])

    assert word in caught.value.what
    assert hint in caught.value.fix


def test_a_host_in_two_groups() -> None:
    """Roles and groups of one host are joined; said differently in the second group it is an error, both named."""
    twice = """
groups:
  a: {roles: [store], hosts: {h1: {address: 10.0.0.1}}}
  b: {roles: [router], hosts: {h1: {address: 10.0.0.%s}}}
"""

    host = _parse(twice % 1).hosts["h1"]
    assert (host.groups, host.roles) == (("a", "b"), ("store", "router"))
    with pytest.raises(ConfigError, match=r"groups\.b\.hosts\.h1: address of h1 is '10\.0\.0\.2' here"):
        _parse(twice % 2)


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("groups: {a: {hosts: {h: {adress: x}}}}", "unknown key 'adress'", "'address'"),
        ("groups: {a: {host: [h]}}", "unknown key 'host'", "'hosts'"),
        ("group: {}", "unknown key 'group'", "'groups'"),
        ("groups: {a: {hosts: [h], roles: [stor]}}", "no role 'stor'", "'store'"),
        ("groups: {a: {hosts: [h], port: 0}}", "port is 0", "65535"),
        ("groups: {a: {hosts: [h], user: 7}}", "user is 7", "text"),
        ("groups: {a: {hosts: [h], numa_nodes: 2}}", "numa_nodes is 2", "[0, 1]"),
        ("groups: {a: {hosts: {'h[1-3]': {address: '10.0.0.[1-2]'}}}}", "3 hosts, and 2 of address", "range"),
        ("groups: {a: {hosts: ['h[3-1]']}}", "runs backwards", ""),
        ("groups: {a: {hosts: [h, h]}}", "twice", ""),
        ("groups: {a: {hosts: {h: {port: 1, port: 2}}}}", "'port' is there twice", "line"),
        ("groups: {a: {hosts: []}}", "hosts is []", ""),
        ("groups: {a: {hosts: [a]}}", "both a group and a host", ""),
        ("schema: 2\ngroups: {a: {hosts: [h]}}", "schema is 2", "schema: 1"),
        ("groups: {a: [", "not YAML", ""),
        ("", "no groups", "hosts"),
    ],
)
def test_mistakes_are_named(text: str, what: str, fix: str) -> None:
    """A mistake names the place and what would be right; nothing is passed over."""
    with pytest.raises(ConfigError) as caught:
        _parse(text)

    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file is an error that names it."""
    with pytest.raises(ConfigError, match="no\\.yaml"):
        load_inventory(tmp_path / "no.yaml")


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(max_size=200), st.text("grouphst: {}[]-1,a\n", max_size=80)))
def test_any_text_is_an_inventory_or_an_error(text: str) -> None:
    """Whatever the file holds, the answer is an inventory or one of our errors."""
    try:
        inventory = _parse(text)
    except KvopsError:
        return
    assert inventory.hosts
