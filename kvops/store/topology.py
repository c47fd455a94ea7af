"""
Which NUMA nodes this machine has: their CPUs, memory and reserved huge pages.

Source: Documentation/ABI/stable/sysfs-devices-node, cpuset(7) for the list format, proc_pid_status(5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvops.errors import ParseError
from kvops.limits import GIB, MIB

SYSFS: Final = Path("/sys")
PROC: Final = Path("/proc")
NODES_MAX: Final = 1024  # CONFIG_NODES_SHIFT is 10 at most
CPUS_MAX: Final = 8192  # CONFIG_NR_CPUS of the largest kernels
_RANGE_CHARS_MAX: Final = 40
HUGE_PAGE_BYTES: Final = (2 * MIB, GIB)  # of x86-64, and of arm64 with pages of 4 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePool:
    """Huge pages of one size that one node has reserved."""

    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node, as far as this process may use it."""

    index: int
    cpus: frozenset[int]  # those that this process may run on; empty for a node of memory alone
    memory_bytes: int  # 0 for a node of CPUs alone
    available_bytes: int
    huge: Mapping[int, HugePool] = field(default_factory=dict)  # by page size in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A machine's NUMA nodes; one node with every CPU where the kernel knows nothing of NUMA."""

    nodes: tuple[NumaNode, ...] = ()

    @property
    def store_nodes(self) -> tuple[NumaNode, ...]:
        """
        Those that a store can be bound to: CPUs and memory that we may use.

        A GPU's or a CXL device's memory is a node without CPUs; a cpuset may keep us from a node altogether.
        """
        return tuple(node for node in self.nodes if node.cpus and node.memory_bytes)

    def node(self, index: int) -> NumaNode | None:
        """The node of that number."""
        return next((node for node in self.nodes if node.index == index), None)


def parse_list(text: str, *, most: int = CPUS_MAX) -> frozenset[int]:
    """
    Numbers of a kernel's list: ``"0-3,8,10-11"``; an empty text is no number.

    Raises:
        ParseError: It is no such list, or names a number that no kernel has.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        if len(part) > _RANGE_CHARS_MAX:
            raise ParseError(f"{part[:80]!r}… is no range", fix="mount /sys as the kernel gives it")
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise ParseError(f"{text[:80]!r} is no list of numbers", fix="mount /sys as the kernel gives it")
        low, high = int(first), int(last or first)
        if not low <= high < most:
            raise ParseError(f"{part!r} is no range below {most}", fix="mount /sys as the kernel gives it")
        found.update(range(low, high + 1))
    return frozenset(found)


def parse_node_meminfo(text: str) -> tuple[int, int]:
    """
    Total and available bytes of a node's ``meminfo``, whose lines are ``Node 0 MemTotal:  16384 kB``.

    Available is what is free or page cache that can be dropped: the kernel gives MemAvailable for the whole
    machine alone. Unknown lines are passed over; what is missing is 0.
    """
    found = {"MemTotal:": 0, "MemFree:": 0, "Active(file):": 0, "Inactive(file):": 0}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 5 and words[2] in found and words[3].isascii() and words[3].isdigit():
            found[words[2]] = int(words[3]) * 1024
    return found.pop("MemTotal:"), sum(found.values())


def parse_allowed(status: str) -> tuple[frozenset[int] | None, frozenset[int] | None]:
    """
    CPUs and memory nodes that a ``/proc/<pid>/status`` allows; None for one that it does not name.

    Raises:
        ParseError: A list is none.
    """
    cpus = mems = None
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            cpus = parse_list(value)
        elif name == "Mems_allowed_list":
            mems = parse_list(value, most=NODES_MAX)
    return cpus, mems


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _huge_pools(folder: Path) -> dict[int, HugePool]:
    pools = {}
    for one in sorted(folder.glob("hugepages-*kB")):
        size = one.name.removeprefix("hugepages-").removesuffix("kB")
        total, free = _read(one / "nr_hugepages").strip(), _read(one / "free_hugepages").strip()
        if size.isdigit() and total.isdigit() and free.isdigit():
            pools[int(size) * 1024] = HugePool(total=int(total), free=int(free))
    return pools


def read_topology(sysfs: Path = SYSFS, proc: Path = PROC) -> Topology:
    """
    Look at this machine, or at a tree that was copied from one.

    Args:
        sysfs: Where ``devices/system/node`` lies.
        proc: Where ``self/status`` and ``meminfo`` lie: our cpuset is taken into account.

    Raises:
        ParseError: The kernel's files are not as documented.
    """
    cpus_allowed, mems_allowed = parse_allowed(_read(proc / "self/status"))
    nodes = []
    base = sysfs / "devices/system/node"
    for index in sorted(parse_list(_read(base / "online"), most=NODES_MAX)):
        if mems_allowed is not None and index not in mems_allowed:
            continue
        folder = base / f"node{index}"
        cpus = parse_list(_read(folder / "cpulist"))
        memory_bytes, available_bytes = parse_node_meminfo(_read(folder / "meminfo"))
        nodes.append(
            NumaNode(
                index=index,
                cpus=cpus if cpus_allowed is None else cpus & cpus_allowed,
                memory_bytes=memory_bytes,
                available_bytes=available_bytes,
                huge=_huge_pools(folder / "hugepages"),
            )
        )
    if not nodes:  # a kernel without CONFIG_NUMA
        totals = {
            line.split()[0]: line.split()[1] for line in _read(proc / "meminfo").splitlines() if " " in line
        }
        nodes = [
            NumaNode(
                index=0,
                cpus=cpus_allowed or frozenset({0}),
                memory_bytes=int(totals.get("MemTotal:", "1")) * 1024,
                available_bytes=int(totals.get("MemAvailable:", "0")) * 1024,
                huge=_huge_pools(sysfs / "kernel/mm/hugepages"),
            )
        ]
    return Topology(nodes=tuple(nodes))


def huge_fix(page_bytes: int, count: int) -> str:
    """The command that reserves so many more huge pages now, with how they survive a reboot."""
    folder = f"/sys/kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB"
    if page_bytes == 2 * MIB:
        return (
            f"sysctl -w vm.nr_hugepages=$(($(cat {folder}/nr_hugepages) + {count})), "
            "and in /etc/sysctl.d for the next boot; or --hugepages off"
        )
    return (
        f"echo $(($(cat {folder}/nr_hugepages) + {count})) > {folder}/nr_hugepages; memory may be too scattered "
        f"for it: boot with hugepagesz=1G hugepages={count}; or --hugepages 2MiB or off"
    )
