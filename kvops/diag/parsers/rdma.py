"""Parsers of rdma, devlink, ibv_devinfo, mlxconfig, perftest."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

from kvops.diag.parsers.sysfs import bad


@dataclass(slots=True)
class DevInfo:
    """One device of ``ibv_devinfo``: labels of the device, and of each port."""

    labels: dict[str, str] = field(default_factory=dict)
    ports: dict[int, dict[str, str]] = field(default_factory=dict)

    def number(self, label: str) -> int | None:
        match = re.match(r"(0x[0-9a-fA-F]{1,16}|\d{1,20})", self.labels.get(label, ""), re.ASCII)
        return int(match[1], 0) if match else None


def parse_ibv_devinfo(text: str) -> dict[str, DevInfo]:
    """Read ``ibv_devinfo [-v]`` by device name."""
    devices: dict[str, DevInfo] = {}
    device: DevInfo | None = None
    labels: dict[str, str] = {}
    for line in text.splitlines():
        label, colon, value = line.strip().partition(":")
        if not colon:
            continue
        value = value.strip()
        if label == "hca_id":
            device = devices.setdefault(value, DevInfo())
            labels = device.labels
        elif (
            label == "port" and value.isascii() and value.isdigit() and len(value) < 4 and device is not None
        ):
            labels = device.ports.setdefault(int(value), {})
        elif device is not None:
            labels[label] = value
    return devices


def parse_mtu(text: str) -> int | None:
    """``"4096 (5)"`` → 4096."""
    match = re.match(r"\s*(256|512|1024|2048|4096)\b", text, re.ASCII)
    return int(match[1]) if match else None


def parse_resources(text: str) -> dict[str, dict[str, int]]:
    """Read ``rdma resource show``: ``0: mlx5_0: pd 12 cq 101 qp 2113 mr 640`` by device."""
    devices: dict[str, dict[str, int]] = {}
    for line in text.splitlines():
        match = re.match(r"\d+: ([^:\s]+): (.*)", line, re.ASCII)
        if match is not None:
            pairs = re.findall(r"([a-z_]+) (\d{1,15})\b", match[2], re.ASCII)
            devices[match[1]] = {name: int(count) for name, count in pairs}
    return devices


def parse_holders(text: str) -> dict[tuple[str, int], dict[str, int]]:
    """
    Read ``rdma resource show qp``: (device, port) → who holds queue pairs there → how many.

    A line is ``link mlx5_0/1 lqpn 512 type RC state RTS … pid 991 comm engine``; the kernel's own have no pid.
    """
    holders: dict[tuple[str, int], dict[str, int]] = {}
    for line in text.splitlines():
        match = re.match(r"(?:link|\d+/\d+:) ?([^/\s]+)/(\d{1,3}) (.*)", line, re.ASCII)
        if match is None:
            continue
        words = match[3].split()
        options = dict(itertools.pairwise(words))
        who = options.get("comm", "kernel") + (f" (pid {options['pid']})" if "pid" in options else "")
        counts = holders.setdefault((match[1], int(match[2])), {})
        counts[who] = counts.get(who, 0) + 1
    return holders


def parse_system(text: str) -> dict[str, str]:
    """Read ``rdma system show``: ``netns shared copy-on-fork on``."""
    words = text.split()
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    if "netns" not in pairs:
        raise bad("rdma system", text)
    return pairs


def parse_links(text: str) -> dict[tuple[str, int], dict[str, str]]:
    """Read ``rdma link show``: ``link mlx5_0/1 state ACTIVE physical_state LINK_UP netdev ens1``."""
    links: dict[tuple[str, int], dict[str, str]] = {}
    for line in text.splitlines():
        match = re.match(
            r"(?:link|\d+/\d+:) ?([^/\s]+)/(\d{1,3})(?: subnet_prefix \S+)?:? (.*)", line, re.ASCII
        )
        if match is not None:
            words = match[3].split()
            links[match[1], int(match[2])] = dict(zip(words[::2], words[1::2], strict=False))
    return links


def parse_devlink_params(text: str) -> dict[str, dict[str, str]]:
    """Read ``devlink dev param show``: name → cmode → value."""
    params: dict[str, dict[str, str]] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"\s*name (\S+)", line):
            name = match[1]
            params.setdefault(name, {})
        for mode, value in re.findall(r"cmode (\S+) value (\S+)", line):
            if name:
                params[name][mode] = value
    return params


def parse_devlink_eswitch(text: str) -> str | None:
    """``pci/0000:3b:00.0: mode switchdev …`` → ``switchdev``."""
    match = re.search(r"\bmode (\w+)", text)
    return match[1] if match else None


def parse_devlink_health(text: str) -> list[tuple[str, str, int]]:
    """Read ``devlink health show``: (reporter, state, errors)."""
    reports = []
    reporter = ""
    for line in text.splitlines():
        if match := re.search(r"reporter (\S+)", line):
            reporter = match[1]
        if match := re.search(r"\bstate (\S+) error (\d{1,12})", line, re.ASCII):
            reports.append((reporter, match[1], int(match[2])))
    return reports


def parse_mlxconfig(text: str) -> dict[str, list[str]]:
    """Read ``mlxconfig q``: name → its columns (default, current, next boot, or one)."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(
            r"([A-Z][A-Z0-9_]+(?:\[[\d.]+\])?)[ \t]{2,}(\S.*)", line.strip().lstrip("* \t"), re.ASCII
        )
        if match is not None:
            values[match[1]] = match[2].split()
    return values


def parse_perftest(text: str) -> tuple[int, float] | None:
    """Read a perftest table: (queue pairs, average Gbit/s); None if it has no row."""
    queues = re.search(r"Number of qps\s*:\s*(\d{1,6})", text, re.ASCII)
    rows = re.findall(
        r"^[ \t]{0,8}\d{1,12}[ \t]{1,20}\d{1,12}[ \t]{1,20}[\d.]{1,12}[ "
        r"\t]{1,20}([\d.]{1,12})\s",
        text,
        re.MULTILINE | re.ASCII,
    )
    if not rows:
        return None
    try:
        return int(queues[1]) if queues else 1, float(rows[-1])
    except ValueError:
        return None
