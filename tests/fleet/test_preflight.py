"""What is found before a start, by limits given as values and by real sockets and folders."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ConfigError, Refused
from kvops.fleet import preflight
from kvops.fleet.preflight import CgroupLimit, MemoryFacts, check_addresses, check_folder, check_memory

GIB = 1 << 30
ROOMY = {"available_bytes": 64 * GIB, "shm_used_bytes": 0}


def test_enough() -> None:
    """A machine with room refuses nothing."""
    check_memory(MemoryFacts(**ROOMY), stores=3, segment_size_bytes=GIB, processes=4)


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
    ],
    ids=["memory", "shm", "cgroup", "file size", "address space", "open files"],
)
def test_too_little(change: dict[str, int], words: str) -> None:
    """Each limit that would stop a start is named, with what to do."""
    with pytest.raises(Refused) as caught:
        check_memory(MemoryFacts(**(ROOMY | change)), stores=3, segment_size_bytes=GIB, processes=4)  # type: ignore[arg-type]

    assert words in caught.value.what
    assert caught.value.fix
    assert caught.value.exit_code == 5


@given(st.integers(1, 64), st.integers(1, 1 << 40), st.integers(0, 1 << 42))
def test_suggestion_fits(stores: int, size: int, available: int) -> None:
    """A segment size that a refusal suggests is one that is then accepted."""
    facts = MemoryFacts(available_bytes=available, shm_used_bytes=0)
    try:
        check_memory(facts, stores=stores, segment_size_bytes=size, processes=stores + 1)
    except Refused as refused:
        words = refused.fix.split()
        if "--segment-size" in words:
            smaller = int(words[words.index("--segment-size") + 1].removesuffix("MiB")) << 20
            check_memory(facts, stores=stores, segment_size_bytes=smaller, processes=stores + 1)


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
