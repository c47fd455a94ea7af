"""Reading NUMA nodes, from trees as two-node machines, odd machines and this one have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ParseError
from kvops.limits import GIB, MIB
from kvops.store.topology import (
    CPUS_MAX,
    HugePool,
    huge_fix,
    parse_allowed,
    parse_list,
    parse_node_meminfo,
    read_topology,
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("0\n", {0}),
        ("\n", set()),
        ("0-1,64-65", {0, 1, 64, 65}),
    ],
    ids=["ranges", "one", "none: a node of memory alone", "two threads a core"],
)
def test_a_kernels_list(text: str, numbers: set[int]) -> None:
    """Ranges include both ends; an empty file is no number."""
    assert parse_list(text) == numbers


@given(st.one_of(st.text(max_size=40), st.text(alphabet="0123456789,-\n", max_size=30)))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    """Whatever stands there, numbers in bounds or one clear error come out, and never much memory is taken."""
    try:
        found = parse_list(text)
    except ParseError:
        return
    assert all(0 <= number < CPUS_MAX for number in found)


def test_no_number_is_too_long_to_refuse() -> None:
    """Even what Python itself would not convert is one clear error."""
    with pytest.raises(ParseError, match="no range"):
        parse_list("9" * 5_000)


def test_what_a_node_has() -> None:
    """Available is free memory and what the page cache can give back; shared memory is not."""
    text = (
        "\nNode 1 MemTotal:       1024 kB\nNode 1 MemFree:         100 kB\nNode 1 Active(file):    20 kB\n"
        "Node 1 Inactive(file):   3 kB\nNode 1 Shmem:  500 kB\nNode 1 HugePages_Total:     0\n"
    )

    assert parse_node_meminfo(text) == (1024 * 1024, 123 * 1024)


def test_what_a_cpuset_allows() -> None:
    """Both lists of a status; one that is not named is no restriction."""
    assert parse_allowed("Cpus_allowed:\t3\nCpus_allowed_list:\t0-1\nMems_allowed_list:\t1\n") == (
        {0, 1},
        {1},
    )
    assert parse_allowed("Name:\tx\n") == (None, None)


def write(root: Path, files: dict[str, str]) -> None:
    """Files below a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def two_nodes(root: Path, *, status: str = "") -> None:
    """A two-socket machine with a GPU's memory as a third node, and 16 huge pages on the second socket."""
    base = "sys/devices/system/node"
    write(
        root,
        {
            f"{base}/online": "0-2\n",
            f"{base}/node0/cpulist": "0-1,4-5\n",
            f"{base}/node0/meminfo": "Node 0 MemTotal: 4194304 kB\nNode 0 MemFree: 1048576 kB\n",
            f"{base}/node1/cpulist": "2-3,6-7\n",
            f"{base}/node1/meminfo": "Node 1 MemTotal: 4194304 kB\nNode 1 MemFree: 2097152 kB\n",
            f"{base}/node1/hugepages/hugepages-2048kB/nr_hugepages": "16\n",
            f"{base}/node1/hugepages/hugepages-2048kB/free_hugepages": "12\n",
            f"{base}/node2/cpulist": "\n",
            f"{base}/node2/meminfo": "Node 2 MemTotal: 8388608 kB\nNode 2 MemFree: 8388608 kB\n",
            "proc/self/status": status,
        },
    )


def test_two_nodes(tmp_path: Path) -> None:
    """Each node with its CPUs, memory and huge pages; memory without CPUs is no place for a store."""
    two_nodes(tmp_path)

    found = read_topology(tmp_path / "sys", tmp_path / "proc")

    assert [node.index for node in found.nodes] == [0, 1, 2]
    assert [node.index for node in found.store_nodes] == [0, 1]
    assert found.nodes[1].cpus == {2, 3, 6, 7}
    assert (found.nodes[1].memory_bytes, found.nodes[1].available_bytes) == (4 * GIB, 2 * GIB)
    assert found.nodes[1].huge == {2 * MIB: HugePool(total=16, free=12)}


def test_a_container_that_may_use_one_node(tmp_path: Path) -> None:
    """Nodes that the cpuset keeps us from are not there; of the others only CPUs that we may use."""
    two_nodes(tmp_path, status="Cpus_allowed_list:\t2,6\nMems_allowed_list:\t1-2\n")

    found = read_topology(tmp_path / "sys", tmp_path / "proc")

    assert [(node.index, node.cpus) for node in found.store_nodes] == [(1, {2, 6})]


def test_a_kernel_without_numa(tmp_path: Path) -> None:
    """One node with every CPU, its memory that of the machine."""
    write(
        tmp_path,
        {
            "proc/self/status": "Cpus_allowed_list:\t0-1\n",
            "proc/meminfo": "MemTotal:       2048 kB\nMemAvailable:   1024 kB\n\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "1\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "1\n",
        },
    )

    (node,) = read_topology(tmp_path / "sys", tmp_path / "proc").store_nodes

    assert (node.cpus, node.memory_bytes, node.available_bytes) == ({0, 1}, 2 * MIB, MIB)
    assert node.huge == {2 * MIB: HugePool(total=1, free=1)}


def test_this_machine() -> None:
    """At least one node can be bound to, and its CPUs are ones that we may run on."""
    nodes = read_topology().store_nodes

    assert nodes
    assert all(node.cpus <= os.sched_getaffinity(0) for node in nodes)


def test_each_size_has_its_own_fix() -> None:
    """2 MiB pages are reserved by sysctl; those of 1 GiB by sysfs, or at boot where memory is too scattered."""
    assert "sysctl -w vm.nr_hugepages=" in huge_fix(2 * MIB, 5)
    assert "+ 5))" in huge_fix(2 * MIB, 5)
    assert "hugepagesz=1G hugepages=3" in huge_fix(GIB, 3)
