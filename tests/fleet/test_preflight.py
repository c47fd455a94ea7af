"""What is found before a start, by limits given as values and by real sockets and folders."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ConfigError, Refused
from kvops.fleet import preflight
from kvops.fleet.preflight import (
    CgroupLimit,
    MemoryFacts,
    Needs,
    check_addresses,
    check_folder,
    judge_limits,
    refuse,
)
from kvops.store.topology import HugePool, NumaNode, Topology

GIB = 1 << 30
ROOMY: dict[str, int] = {"available_bytes": 64 * GIB, "shm_used_bytes": 0}


def needs(stores: int = 3, size: int = GIB, **more: Any) -> Needs:
    """What a start with so many stores needs."""
    return Needs(stores=stores, segment_size_bytes=size, processes=stores + 1, **more)


def check(facts: MemoryFacts, wanted: Needs) -> None:
    """Refuse as a start does."""
    refuse(judge_limits(facts, wanted))


def test_enough() -> None:
    """A machine with room refuses nothing."""
    check(MemoryFacts(**ROOMY), needs())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"available_bytes": 2 * GIB}, "2.0 GiB are available"),
        ({"available_bytes": 2 * GIB, "shm_used_bytes": 20 * GIB}, "/dev/shm hold 20.0 GiB"),
        (
            {"cgroups": (CgroupLimit(path="/c", limit_bytes=4 * GIB, used_bytes=2 * GIB),)},
            "/c leaves 2.0 GiB",
        ),
        ({"file_size_limit_bytes": GIB // 2}, "ulimit -f"),
        ({"address_space_limit_bytes": GIB}, "ulimit -v"),
        ({"open_files_limit": 256}, "open 256 files"),
        ({"committable_bytes": 2 * GIB}, "vm.overcommit_memory is 2 and leaves 2.0 GiB"),
    ],
    ids=["memory", "shm", "cgroup", "file size", "address space", "open files", "overcommit"],
)
def test_too_little(change: dict[str, int], words: str) -> None:
    """Each limit that would stop a start is named, with what to do."""
    with pytest.raises(Refused) as caught:
        check(MemoryFacts(**(ROOMY | change)), needs())  # type: ignore[arg-type]

    assert words in caught.value.what
    assert caught.value.fix
    assert caught.value.exit_code == 5


def test_everything_at_once() -> None:
    """Two limits that are too low are both told, each with its fix: nobody mends one to meet the next."""
    facts = MemoryFacts(available_bytes=2 * GIB, shm_used_bytes=0, open_files_limit=256)

    with pytest.raises(Refused) as caught:
        check(facts, needs())

    assert "2 things are in the way" in caught.value.what
    assert "2.0 GiB are available" in caught.value.what
    assert "open 256 files" in caught.value.what
    assert "--segment-size" in caught.value.fix
    assert "ulimit -n" in caught.value.fix


def node(index: int, *, available_gib: int = 64, free_huge: int = 0) -> NumaNode:
    """A node with memory and one size of huge pages."""
    return NumaNode(
        index=index,
        cpus=frozenset({index}),
        memory_bytes=64 * GIB,
        available_bytes=available_gib * GIB,
        huge={GIB: HugePool(total=free_huge, free=free_huge)},
    )


def test_bound_stores_need_their_own_nodes_memory() -> None:
    """The machine has enough, but a store that is bound to the fuller node would not get it."""
    facts = MemoryFacts(**ROOMY, topology=Topology(nodes=(node(0), node(1, available_gib=3))))

    check(facts, needs(2, 4 * GIB))
    with pytest.raises(Refused, match=r"bound to NUMA node 1 need 4\.0 GiB; it has 3\.0 GiB"):
        check(facts, needs(2, 4 * GIB, numa_nodes=(0, 1)))


def test_huge_pages_are_counted_where_they_are_needed() -> None:
    """Pages that lie on the other node do not help a bound store; the fix names the node's own file."""
    facts = MemoryFacts(**ROOMY, topology=Topology(nodes=(node(0, free_huge=8), node(1))))
    wanted = {"stores": 2, "size": 4 * GIB, "huge_page_bytes": GIB}

    check(facts, needs(**wanted))
    with pytest.raises(
        Refused, match=r"4 huge pages of 1\.0 GiB are needed on NUMA node 1; 0 are free"
    ) as caught:
        check(facts, needs(**wanted, numa_nodes=(0, 1)))
    assert "node1/hugepages/hugepages-1048576kB/nr_hugepages" in caught.value.fix


def test_huge_pages_are_not_taken_from_the_rest() -> None:
    """Reserved pages are gone from the available memory and not charged to the group: only the processes count."""
    facts = MemoryFacts(
        available_bytes=GIB,
        shm_used_bytes=0,
        cgroups=(CgroupLimit(path="/c", limit_bytes=GIB, used_bytes=0),),
        topology=Topology(nodes=(node(0, free_huge=12),)),
    )

    check(facts, needs(3, 4 * GIB, huge_page_bytes=GIB))


def test_what_is_worth_knowing_does_not_refuse() -> None:
    """A low limit on locked memory is told beside what is well."""
    found = judge_limits(MemoryFacts(**ROOMY, locked_limit_bytes=8 << 20), needs())
    rows = {row["check"]: row for row in (one.row() for one in found)}

    refuse(found)
    assert rows["locked memory (ulimit -l)"]["outcome"] == "note"
    assert "ulimit -l unlimited" in rows["locked memory (ulimit -l)"]["fix"]
    assert rows["memory"]["outcome"] == "ok"


@given(st.integers(1, 64), st.integers(1, 1 << 40), st.integers(0, 1 << 42))
def test_suggestion_fits(stores: int, size: int, available: int) -> None:
    """A segment size that a refusal suggests is one that is then accepted."""
    facts = MemoryFacts(available_bytes=available, shm_used_bytes=0)
    try:
        check(facts, needs(stores, size))
    except Refused as refused:
        words = refused.fix.split()
        if "--segment-size" in words:
            smaller = int(words[words.index("--segment-size") + 1].removesuffix("MiB")) << 20
            check(facts, needs(stores, smaller))


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_cgroup_v2(tmp_path: Path) -> None:
    """Limits of every group above ours count, and page cache that can be dropped is not use."""
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": "1000\n",
            "sys/fs/cgroup/pod/memory.current": "700\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 100\ninactive_file 300\n",
        },
    )

    (limit,) = preflight.read_cgroup_limits(tmp_path / "proc", tmp_path)

    assert (limit.limit_bytes, limit.used_bytes) == (1000, 400)

    _write(tmp_path, {"sys/fs/cgroup/pod/memory.high": "800\n"})
    (limit,) = preflight.read_cgroup_limits(tmp_path / "proc", tmp_path)
    assert limit.limit_bytes == 800


def test_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    """Version 1 inside a container: the mount has our own group as its root; a huge number is no limit."""
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "8:pids:/docker/ab\n4:memory:/docker/ab\n0::/\n",
            "proc/self/mountinfo": "31 24 0:27 /docker/ab /sys/fs/cgroup/memory ro - cgroup c rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "500\n",
        },
    )

    (limit,) = preflight.read_cgroup_limits(tmp_path / "proc", tmp_path)

    assert (limit.limit_bytes, limit.used_bytes) == (2000, 500)

    _write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert preflight.read_cgroup_limits(tmp_path / "proc", tmp_path) == ()


def test_no_cgroups(tmp_path: Path) -> None:
    """A machine without control groups has no such limit."""
    assert preflight.read_cgroup_limits(tmp_path, tmp_path) == ()


def test_port_in_use() -> None:
    """A port that somebody listens on is refused by name, before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        with pytest.raises(Refused, match=f"127.0.0.1:{port}: the port is in use"):
            check_addresses([("master-0", "127.0.0.1", port)])


def test_any_port_is_free() -> None:
    """Port 0 is never in use, however many want it."""
    check_addresses([("a", "127.0.0.1", 0), ("b", "127.0.0.1", 0)])


def test_foreign_address() -> None:
    """An address that this machine does not have (TEST-NET-1, RFC 5737) cannot be listened on."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        check_addresses([("master-0", "192.0.2.1", 7800)])


def test_same_port_twice() -> None:
    """Two services cannot have one port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

    with pytest.raises(ConfigError, match="both want"):
        check_addresses([("wire", "127.0.0.1", port), ("http", "127.0.0.1", port)])


def test_folder(tmp_path: Path) -> None:
    """A state folder is made with its parents, for its owner alone."""
    check_folder(tmp_path / "a" / "b")

    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_no_folder(tmp_path: Path) -> None:
    """A file in the way of the state folder is one clear error."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="cannot use the state folder"):
        check_folder(tmp_path / "file" / "below")


def test_facts_of_this_machine() -> None:
    """Reading this machine's limits works without any privilege, and finds some memory."""
    assert preflight.read_memory_facts().available_bytes > 0
