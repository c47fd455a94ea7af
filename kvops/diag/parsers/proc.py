"""Parsers of files under /proc."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvops.diag.parsers.sysfs import bad

UNLIMITED = 1 << 63


def parse_limits(text: str) -> dict[str, tuple[int, int]]:
    """
    Read /proc/<pid>/limits as name → (soft, hard); ``unlimited`` is 2**63.

    Raises:
        ParseError: No line is a limit.
    """
    limits: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        match = re.match(r"(Max [a-z ]+?)\s{2,}(unlimited|\d{1,20})\s+(unlimited|\d{1,20})", line, re.ASCII)
        if match is not None:
            soft, hard = (UNLIMITED if word == "unlimited" else int(word) for word in (match[2], match[3]))
            limits[match[1]] = (soft, hard)
    if not limits:
        raise bad("limits", text)
    return limits


def parse_fields(text: str) -> dict[str, str]:
    r"""Read ``key:\\tvalue`` lines (status, meminfo); keys are unique, the last one wins."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key and len(key) < 80:
            fields[key.strip()] = value.strip()
    if not fields:
        raise bad("key: value", text)
    return fields


def parse_kb(text: str) -> int:
    """Read ``"1056710656 kB"`` in bytes; a bare number is returned as it is."""
    match = re.match(r"\s*(\d{1,19})(\s*kB)?", text, re.ASCII)
    if match is None:
        raise bad("amount", text)
    return int(match[1]) * (1024 if match[2] else 1)


def parse_nul_list(text: str) -> list[str]:
    """Read cmdline or environ: NUL-separated words."""
    return [word for word in text.strip("\n").split("\0") if word]


def parse_environ(text: str) -> dict[str, str]:
    """Read /proc/<pid>/environ; words without ``=`` are left out."""
    pairs = (word.partition("=") for word in parse_nul_list(text))
    return {key: value for key, equals, value in pairs if equals}


def parse_modules(text: str) -> dict[str, str]:
    """
    Read /proc/modules (``mlx5_core 2768896 1 mlx5_ib, Live 0x0``) as name → the rest of the line.

    Raises:
        ParseError: There are lines, and none has that form.
    """
    rows = [
        re.match(r"([A-Za-z][\w-]{0,63}) (\d{1,12} \d{1,6} .*)", line, re.ASCII) for line in text.splitlines()
    ]
    modules = {row[1].replace("-", "_"): row[2] for row in rows if row is not None}
    if rows and not modules:
        raise bad("/proc/modules", text)
    return modules


def parse_size(text: str) -> int:
    """
    Read a size as an engine's command line has it: ``"256 GB"``, ``"64GiB"``, ``"17179869184"``.

    Engines mean powers of 1024 by both spellings.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,6})?)\s*([kKmMgGtT]?)(?:i?[bB])?\s*", text, re.ASCII)
    if match is None:
        raise bad("size", text)
    scale = 1 << 10 * " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * scale) if "." in match[1] else int(match[1]) * scale


class Mapping(NamedTuple):
    """One line of /proc/<pid>/numa_maps, in bytes a node."""

    policy: str
    file: str
    huge: bool
    page_bytes: int
    node_bytes: dict[int, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.node_bytes.values())


def parse_numa_maps(text: str) -> list[Mapping]:
    """Read /proc/<pid>/numa_maps; lines that are no mapping are passed over."""
    mappings = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or not re.fullmatch(r"[0-9a-f]{1,16}", words[0], re.ASCII):
            continue
        page = re.search(r"kernelpagesize_kB=(\d{1,9})", line, re.ASCII)
        page_bytes = int(page[1]) * 1024 if page else 4096
        nodes = {
            int(n): int(c) * page_bytes for n, c in re.findall(r"\bN(\d{1,4})=(\d{1,15})\b", line, re.ASCII)
        }
        name = next((word.removeprefix("file=") for word in words if word.startswith("file=")), "")
        mappings.append(Mapping(words[1], name, "huge" in words[2:], page_bytes, nodes))
    return mappings


class Region(NamedTuple):
    """One line of /proc/<pid>/maps."""

    start: int
    end: int
    permissions: str
    name: str


def parse_maps(text: str) -> list[Region]:
    """Read /proc/<pid>/maps (or the heads of smaps); other lines are passed over."""
    pattern = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) ([r-][w-][x-][ps]) \S+ \S+ \S+ *(.*)", re.ASCII)
    matches = (pattern.match(line) for line in text.splitlines())
    return [Region(int(m[1], 16), int(m[2], 16), m[3], m[4]) for m in matches if m is not None]


class Mount(NamedTuple):
    """One line of /proc/mounts."""

    device: str
    path: str
    kind: str
    options: dict[str, str]


def parse_mounts(text: str) -> list[Mount]:
    """Read /proc/mounts."""
    mounts = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4:
            options = dict(option.partition("=")[::2] for option in words[3].split(","))
            mounts.append(Mount(words[0], words[1], words[2], options))
    return mounts


def parse_mount_size(options: dict[str, str], memory_bytes: int | None) -> int | None:
    """The size of a tmpfs mount in bytes; None if it says nothing (half of memory) and memory is unknown."""
    match = re.fullmatch(r"(\d{1,15})([kmgKMG%]?)", options.get("size", ""), re.ASCII)
    if match is None:
        return memory_bytes // 2 if memory_bytes is not None else None
    if match[2] == "%":
        return memory_bytes * int(match[1]) // 100 if memory_bytes is not None else None
    return int(match[1]) << 10 * " kmg".index(match[2].lower() or " ")


def parse_udp_ports(text: str) -> list[tuple[int, int]]:
    """Read /proc/net/udp (or tcp) as (local port, inode)."""
    ports = []
    for line in text.splitlines():
        match = re.match(
            r"\s*\d+:\s+[0-9A-Fa-f]+:([0-9A-Fa-f]{4})\s+\S+\s+\S+\s+\S+\s+\S+\s+\S+\s+\d+\s+\d+\s+(\d{1,12})",
            line,
        )
        if match is not None:
            ports.append((int(match[1], 16), int(match[2])))
    return ports


def parse_softnet_drops(text: str) -> int:
    """The sum of column 2 (dropped) of /proc/net/softnet_stat, over CPUs."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows or not all(len(r) > 2 and re.fullmatch(r"[0-9a-fA-F]{1,8}", r[1], re.ASCII) for r in rows):
        raise bad("softnet_stat", text)
    return sum(int(row[1], 16) for row in rows)


def parse_cpu_ticks(text: str) -> list[int]:
    """The first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, …"""
    words = text.split("\n", 1)[0].split()
    if not words or words[0] != "cpu" or not all(re.fullmatch(r"\d{1,20}", w, re.ASCII) for w in words[1:]):
        raise bad("/proc/stat", text)
    return [int(word) for word in words[1:]]


def parse_interrupts(text: str) -> dict[str, str]:
    """Read /proc/interrupts as IRQ number → the name at the end of its line."""
    names = {}
    for line in text.splitlines():
        match = re.match(r"\s*(\d{1,6}):\s.*?\s(\S+)\s*$", line, re.ASCII)
        if match is not None:
            names[match[1]] = match[2]
    return names


class BondMember(NamedTuple):
    """One ``Slave Interface`` block."""

    name: str
    fields: dict[str, str]


class Bond(NamedTuple):
    """/proc/net/bonding/<bond>."""

    fields: dict[str, str]
    members: tuple[BondMember, ...]


def parse_bonding(text: str) -> Bond:
    """
    Read /proc/net/bonding/<bond>.

    Raises:
        ParseError: There is no ``Bonding Mode`` line.
    """
    head, *blocks = re.split(r"^Slave Interface:", text, flags=re.MULTILINE)
    fields = _loose_fields(head)
    if "Bonding Mode" not in fields:
        raise bad("bond", text)
    members = tuple(BondMember(block.split("\n", 1)[0].strip(), _loose_fields(block)) for block in blocks)
    return Bond(fields, members)


def _loose_fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip():
            fields.setdefault(key.strip(), value.strip())
    return fields
