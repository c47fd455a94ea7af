"""Binding to a NUMA node, with its proof, from texts of two-node machines and on this one's real memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ParseError, Refused
from kvops.limits import GIB, MIB
from kvops.store.numa import Placement, bind_process, parse_numa_maps, placement_of
from kvops.store.topology import NumaNode, Topology, read_topology

TWO_NODES = """\
55d0c6f45000 default file=/usr/bin/python3.11 mapped=520 N0=3 N1=517 kernelpagesize_kB=4
7f2a00000000 bind:1 file=/memfd:kvops-store-1\\040(deleted) dirty=262144 N1=262144 kernelpagesize_kB=4
7f3000000000 bind:0 file=/memfd:kvops-store-0\\040(deleted) huge dirty=512 N0=500 N1=12 kernelpagesize_kB=2048
7f4000000000 prefer:1 anon=7 dirty=7 active=0 N1=7 kernelpagesize_kB=4
7ffd1b1f0000 bind=static:0-1 stack anon=12 dirty=12 N1=12 kernelpagesize_kB=4
7fffffff0000 default
"""


def test_where_two_nodes_memory_lies() -> None:
    """Small and huge pages are counted in bytes by node; what lies elsewhere is told."""
    bound = placement_of(0x7F2A00000000, TWO_NODES)
    spilt = placement_of(0x7F3000000000, TWO_NODES)

    assert bound == Placement(bytes_by_node={1: GIB}, page_bytes=4096)
    assert bound.elsewhere_bytes(1) == 0
    assert bound.elsewhere_bytes(0) == GIB
    assert spilt is not None
    assert (spilt.page_bytes, spilt.elsewhere_bytes(0)) == (2 * MIB, 12 * 2 * MIB)
    assert placement_of(0x1000, TWO_NODES) is None


def test_every_line_is_read() -> None:
    """A mapping of which no page is there yet lies nowhere; words that we do not know are passed over."""
    found = parse_numa_maps(TWO_NODES)

    assert len(found) == 6
    assert found[-1].bytes_by_node == {}
    assert [one.policy for one in found[1:3]] == ["bind:1", "bind:0"]


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Whatever stands there, mappings or one clear error come out."""
    try:
        found = parse_numa_maps(text)
    except ParseError:
        return
    assert all(count >= 0 for one in found for count in one.pages)


def test_a_node_that_is_not_there() -> None:
    """The machine's usable nodes are named, and what to change."""
    topology = Topology(
        nodes=(
            NumaNode(index=0, cpus=frozenset({0}), memory_bytes=GIB, available_bytes=GIB),
            NumaNode(index=2, cpus=frozenset(), memory_bytes=GIB, available_bytes=GIB),
        )
    )

    with pytest.raises(Refused, match=r"bound to NUMA node 2: .* are 0;") as caught:
        bind_process(topology, 2)
    assert "numa_bind" in caught.value.fix


BIND = """
import os, sys
from kvops.store.numa import bind_process, read_placement
from kvops.store.segment import Segment
from kvops.store.topology import read_topology

node = bind_process(read_topology(), int(sys.argv[1]))
segment = Segment(8 << 20, name="t", numa_node=node.index)
failed = []
for worker in segment.populate(threads=2, on_failure=failed.append):
    worker.join()
assert not failed, failed
placement = read_placement(segment.address)
assert placement is not None
maps = open("/proc/self/numa_maps").read().splitlines()
(policy,) = [line.split()[1] for line in maps if "memfd:kvops-t" in line]
print(placement.bytes_by_node, sorted(os.sched_getaffinity(0)) == sorted(node.cpus), policy)
"""


def test_this_machines_memory_lies_where_it_was_bound_to() -> None:
    """A real segment that was bound to a real node lies there whole, and its process runs there alone."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel has no NUMA: boot one with CONFIG_NUMA")
    node = read_topology().store_nodes[-1].index
    done = subprocess.run(
        [sys.executable, "-c", BIND, str(node)], capture_output=True, text=True, check=False, timeout=60
    )
    if "CAP_SYS_NICE" in done.stderr:
        pytest.skip("this container forbids mbind: run it with --cap-add SYS_NICE")

    assert done.stderr == ""
    assert done.stdout.strip() == f"{{{node}: {8 * MIB}}} True bind:{node}"
