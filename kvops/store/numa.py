"""
Binds a store node to its NUMA node, by system calls alone, with the proof that its memory lies there.

Source: set_mempolicy(2), mbind(2), numa(7) for ``/proc/<pid>/numa_maps``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvops.errors import ParseError, Refused
from kvops.store.topology import NODES_MAX, NumaNode, Topology

MPOL_PREFERRED: Final = 1  # mempolicy.h
MPOL_BIND: Final = 2
_WORD_BITS: Final = 64
_MASK_WORDS: Final = NODES_MAX // _WORD_BITS
# syscall_64.tbl and asm-generic/unistd.h: libnuma, which has wrappers, is not installed everywhere.
_SYSCALLS: Final[Mapping[str, tuple[int, int]]] = {
    "x86_64": (237, 238),
    "aarch64": (235, 237),
}  # mbind, set_mempolicy

_libc: Final = ctypes.CDLL(None, use_errno=True)


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    words = (ctypes.c_ulong * _MASK_WORDS)()
    words[node // _WORD_BITS] = 1 << node % _WORD_BITS
    return words


def _number(which: int) -> int:
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return numbers[which]


def _call(*args: object) -> None:
    if _libc.syscall(*args):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def bind_process(topology: Topology, index: int) -> NumaNode:
    """
    Run on a node's CPUs only, and take memory there while it has some; threads made later inherit both.

    Raises:
        Refused: There is no such node, or we may not use it.
    """
    node = next((one for one in topology.store_nodes if one.index == index), None)
    if node is None:
        usable = ", ".join(str(one.index) for one in topology.store_nodes) or "none"
        raise Refused(
            f"a store cannot be bound to NUMA node {index}: the machine's nodes with CPUs and memory "
            f"that this process may use are {usable}",
            fix="set numa_node to one of them, widen the cpuset, or set numa_bind: false (kvops start --numa off)",
        )
    try:
        os.sched_setaffinity(0, node.cpus)
        _call(
            ctypes.c_long(_number(1)),
            ctypes.c_int(MPOL_PREFERRED),
            _mask(index),
            ctypes.c_ulong(NODES_MAX),
        )
    except OSError as error:
        if error.errno != errno.ENOSYS:  # a kernel without NUMA has one node: nothing to bind
            raise _refused(index, error) from error
    return node


def bind_memory(address: int, size_bytes: int, index: int) -> None:
    """
    Let a mapping's pages come from one node and from no other; for a memory file, everybody's mappings of it.

    Raises:
        Refused: The kernel does not allow it.
    """
    try:
        _call(
            ctypes.c_long(_number(0)),
            ctypes.c_void_p(address),
            ctypes.c_ulong(size_bytes),
            ctypes.c_int(MPOL_BIND),
            _mask(index),
            ctypes.c_ulong(NODES_MAX),
            ctypes.c_uint(0),
        )
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise _refused(index, error) from error


def _refused(index: int, error: OSError) -> Refused:
    return Refused(
        f"the kernel does not bind this process to NUMA node {index}: {error.strerror}",
        fix="allow set_mempolicy and mbind (containers: a seccomp profile with them, or CAP_SYS_NICE), "
        "or set numa_bind: false (kvops start --numa off)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaMapping:
    """One line of ``numa_maps``."""

    address: int
    policy: str  # "bind:1", "default", …
    page_bytes: int
    pages: Mapping[int, int]  # by node

    @property
    def bytes_by_node(self) -> dict[int, int]:
        """Where its memory lies."""
        return {node: count * self.page_bytes for node, count in sorted(self.pages.items())}


def parse_numa_maps(text: str) -> list[NumaMapping]:
    """
    Read ``/proc/<pid>/numa_maps``.

    Lines are ``address policy [file=… huge dirty=… N0=… N1=… kernelpagesize_kB=…]``; a policy may hold blanks
    neither in its name nor its nodes, words that we do not know are passed over.

    Raises:
        ParseError: A line does not begin with an address and a policy, or a count is none.
    """
    found = []
    for line in text.splitlines():
        words = line.split()
        try:
            address, policy = int(words[0], 16), words[1]
            pages: dict[int, int] = {}
            page_bytes = 4096
            for word in words[2:]:
                name, _, value = word.partition("=")
                if name == "kernelpagesize_kB":
                    page_bytes = int(value) * 1024
                elif name[:1] == "N" and name[1:].isdigit():
                    pages[int(name[1:])] = int(value)
        except (ValueError, IndexError) as error:
            raise ParseError(
                f"{line[:80]!r} is no line of numa_maps", fix="mount /proc as the kernel gives it"
            ) from error
        found.append(NumaMapping(address=address, policy=policy, page_bytes=page_bytes, pages=pages))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a mapping's memory was found."""

    bytes_by_node: Mapping[int, int]
    page_bytes: int

    def elsewhere_bytes(self, node: int) -> int:
        """What does not lie on this node."""
        return sum(size for other, size in self.bytes_by_node.items() if other != node)


def placement_of(address: int, text: str) -> Placement | None:
    """
    Where the mapping that begins at ``address`` lies, from ``numa_maps``; None when it is not listed.

    Raises:
        ParseError: The text is not numa_maps.
    """
    for one in parse_numa_maps(text):
        if one.address == address:
            return Placement(bytes_by_node=one.bytes_by_node, page_bytes=one.page_bytes)
    return None


def read_placement(address: int, proc: Path = Path("/proc")) -> Placement | None:
    """
    As ``placement_of``, of this process. It walks the page tables: seconds for a TiB of small pages.

    Returns:
        None where the kernel does not say.
    """
    try:
        text = (proc / "self/numa_maps").read_text(errors="replace")
    except OSError:
        return None
    return placement_of(address, text)
