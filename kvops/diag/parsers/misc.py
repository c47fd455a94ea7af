"""Parsers of kernel logs, Open vSwitch, clocks, GPUs and Kubernetes objects."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from kvops.diag.parsers.sysfs import bad

LOG_LINES_MAX = 200_000


class LogLine(NamedTuple):
    """One line of the kernel's log. ``seconds`` is since boot, None if the line has another kind of time."""

    seconds: float | None
    text: str


def parse_dmesg(text: str) -> list[LogLine]:
    """Read dmesg, or a journal of the kernel; the last LOG_LINES_MAX lines."""
    lines = []
    for line in text.splitlines()[-LOG_LINES_MAX:]:
        match = re.match(r"(?:<\d+>)?\[\s*(\d{1,12}(?:\.\d{1,9})?)\] ?(.*)", line, re.ASCII)
        if match is not None:
            lines.append(LogLine(float(match[1]), match[2]))
        elif line.strip():
            lines.append(LogLine(None, line))
    return lines


def parse_ovs_map(text: str) -> dict[str, str]:
    """Read ``{hw-offload="true", tc-policy=none}``."""
    if not text.strip().startswith("{"):
        raise bad("Open vSwitch map", text)
    return {key: value.strip('"') for key, value in re.findall(r'([\w-]+)=("[^"]*"|[^,}\s]+)', text)}


class Flow(NamedTuple):
    """One datapath flow."""

    text: str
    packets: int
    offloaded: str  # "yes", "partial", "no" or empty
    datapath: str  # "tc", "ovs" or empty
    actions: str

    @property
    def key(self) -> str:
        """The match, without counters: the same flow in two samples."""
        return re.sub(r"packets:\d+|bytes:\d+|used:\S+", "", self.text)

    @property
    def slow(self) -> bool:
        return "userspace" in self.actions or "slow_path" in self.actions


def parse_flows(text: str) -> list[Flow]:
    """Read ``ovs-appctl dpctl/dump-flows [-m]``."""
    flows = []
    for line in text.splitlines():
        if "actions:" not in line:
            continue
        packets = re.search(r"\bpackets:(\d{1,18})", line, re.ASCII)
        offloaded = re.search(r"\boffloaded:(\w+)", line)
        datapath = re.search(r"\bdp:(\w+)", line)
        flows.append(
            Flow(
                line.strip(),
                int(packets[1]) if packets else 0,
                offloaded[1] if offloaded else "",
                datapath[1] if datapath else "",
                line.rpartition("actions:")[2].strip(),
            )
        )
    return flows


def parse_lost_upcalls(text: str) -> int | None:
    """``lookups: hit:1 missed:2 lost:3`` → 3, summed over datapaths; None without such a line."""
    counts = re.findall(r"\blost:(\d{1,18})", text, re.ASCII)
    return sum(map(int, counts)) if counts else None


def parse_chrony(text: str) -> tuple[float, str]:
    """Read ``chronyc -c tracking``: (offset of the system clock in seconds, leap status)."""
    fields = text.strip().split(",")
    try:
        return float(fields[4]), fields[-1]
    except (IndexError, ValueError) as error:
        raise bad("chronyc -c tracking", text) from error


def parse_properties(text: str) -> dict[str, str]:
    """Read ``KEY=value`` lines (systemctl show, timedatectl show)."""
    return {k.strip(): v.strip() for k, e, v in (line.partition("=") for line in text.splitlines()) if e}


def parse_json(text: str) -> Any:
    """
    Any JSON.

    Raises:
        ParseError: It is not JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad("JSON", text) from error


class GpuMemory(NamedTuple):
    """One GPU of ``nvidia-smi -q -d MEMORY``, in bytes."""

    bdf: str
    bar1_total: int
    bar1_free: int


def parse_gpu_memory(text: str) -> list[GpuMemory]:
    """Read the BAR1 block of every GPU."""
    gpus = []
    for block in re.split(r"^GPU ", text, flags=re.MULTILINE)[1:]:
        bar = re.search(r"BAR1 Memory Usage(.*?)(?:\n    \S|\Z)", block, re.DOTALL)
        body = bar[1] if bar else ""
        total, free = (re.search(rf"{w}\s*:\s*(\d{{1,9}}) MiB", body, re.ASCII) for w in ("Total", "Free"))
        if total and free:
            gpus.append(
                GpuMemory(normal_bdf(block.split("\n", 1)[0]), int(total[1]) << 20, int(free[1]) << 20)
            )
    return gpus


def normal_bdf(text: str) -> str:
    """``00000000:19:00.0`` as ``0000:19:00.0``."""
    word = text.strip().lower()
    return word[-12:] if word.count(":") == 2 else word


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """Read ``nvidia-smi topo -m``: row → column → PIX, PXB, PHB, NODE, SYS, NV<n>."""
    rows: dict[str, dict[str, str]] = {}
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    if not lines:
        raise bad("nvidia-smi topo", text)
    names = re.split(r"\t+| {2,}", lines[0].strip())
    for line in lines[1:]:
        words = re.split(r"\t+| {2,}", line.strip())
        if len(words) > 1 and re.fullmatch(r"GPU\d+|NIC\d+|mlx\S+", words[0]):
            rows[words[0]] = {name: word.strip() for name, word in zip(names, words[1:], strict=False)}
    legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", text, re.MULTILINE))
    return {legend.get(r, r): {legend.get(c, c): v for c, v in row.items()} for r, row in rows.items()}
