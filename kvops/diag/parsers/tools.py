"""Parsers of what firmware tools, libfabric, UCX or arping print."""

from __future__ import annotations

import math
import re
from typing import Any

from kvops.diag.parsers.misc import parse_json
from kvops.diag.parsers.sysfs import bad

_ESCAPES = re.compile(r"\x1b\[[0-9;]{0,16}m")
ROWS_MAX = 10_000


def parse_mlxlink(text: str) -> dict[str, str]:
    """
    Read ``mlxlink -d <dev> [-c]``: ``Label : value`` lines, labels in lower case, colours removed.

    Raises:
        ParseError: There is no such line (the tool prints ``-E- …`` when it cannot open the device).
    """
    labels: dict[str, str] = {}
    for line in _ESCAPES.sub("", text).splitlines()[:ROWS_MAX]:
        match = re.match(r"([A-Za-z][^:]{0,80}?)\s*: ?(.*)", line)
        if match is not None:
            labels.setdefault(match[1].lower(), match[2].strip())
    if not labels:
        raise bad("mlxlink", text)
    return labels


def parse_ber(text: str) -> float:
    """
    Read a bit error rate of mlxlink: ``15E-255`` (the tool's zero), ``3E-9``, ``1.2e-08``.

    Raises:
        ParseError: It is no such number (``N/A`` while a counter has no data yet).
    """
    match = re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?(?:[eE][-+]?\d{1,3})?", text.strip(), re.ASCII)
    value = float(match[0]) if match else math.inf
    if not math.isfinite(value):
        raise bad("bit error rate", text)
    return value


def parse_mstflint(text: str) -> dict[str, str]:
    """
    Read ``mstflint -d <bdf> q``: ``Label:   value`` lines, labels as printed, ``FW Version(Running)`` too.

    Raises:
        ParseError: There is no such line.
    """
    labels: dict[str, str] = {}
    for line in text.splitlines()[:ROWS_MAX]:
        match = re.match(r"([A-Z][A-Za-z ()]{1,40}):\s+(\S.*)", line)
        if match is not None:
            labels.setdefault(match[1], match[2].strip())
    if not labels:
        raise bad("mstflint q", text)
    return labels


def parse_mlxreg(text: str) -> dict[str, int]:
    """
    Read ``mlxreg --get``: ``field | 0x00000001`` rows.

    Raises:
        ParseError: There is no row (the register is unknown to this firmware, or reading it was refused).
    """
    pattern = r"(\w{1,64})(?:\[\d{1,4}\])?\s*\|\s*(0x[0-9a-fA-F]{1,16})"
    rows = (re.match(pattern, line.strip(), re.ASCII) for line in text.splitlines()[:ROWS_MAX])
    fields = {row[1]: int(row[2], 16) for row in rows if row is not None}
    if not fields:
        raise bad("mlxreg", text)
    return fields


def parse_fi_info(text: str) -> list[dict[str, str]]:
    """
    Read ``fi_info``: one dictionary an endpoint, from ``provider: efa`` to the next provider.

    An empty list means that libfabric answered and offers nothing (``fi_getinfo: -61``).
    """
    endpoints: list[dict[str, str]] = []
    for line in text.splitlines():
        label, colon, value = line.strip().partition(":")
        if label == "provider" and colon and len(endpoints) < ROWS_MAX:
            endpoints.append({})
        if colon and endpoints:
            endpoints[-1].setdefault(label.strip(), value.strip())
    return endpoints


def parse_ucx_devices(text: str) -> dict[str, set[str]]:
    """
    Read ``ucx_info -d``: transport → devices it can use, such as ``{"rc_mlx5": {"mlx5_0:1"}}``.

    Raises:
        ParseError: No transport is named at all.
    """
    transports: dict[str, set[str]] = {}
    current = ""
    for line in text.splitlines():
        match = re.match(r"#\s*(Transport|Device):\s*(\S{1,64})", line)
        if match is None:
            continue
        if match[1] == "Transport":
            current = match[2]
            transports.setdefault(current, set())
        elif current and len(transports[current]) < ROWS_MAX:
            transports[current].add(match[2])
    if not transports:
        raise bad("ucx_info -d", text)
    return transports


def parse_arping(text: str) -> tuple[int, set[str]]:
    """
    Read ``arping``: (answers, hardware addresses that answered).

    Both arping programs are read: iputils prints ``Received 1 response(s)``, Habets' prints
    ``1 packets received``.

    Raises:
        ParseError: The summary line is missing.
    """
    match = re.search(r"Received (\d{1,9}) response|(\d{1,9}) packets received", text, re.ASCII)
    if match is None:
        raise bad("arping", text)
    return int(match[1] or match[2]), {
        m.lower() for m in re.findall(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b", text, re.ASCII)
    }


def parse_lldp(text: str) -> dict[str, tuple[str, str]]:
    """
    Read ``lldpctl -f json``: interface → (switch, its port).

    One neighbour is an object, several are a list, and a switch without a name stands under its identifier.

    Raises:
        ParseError: It is no JSON.
    """

    def part(value: Any, *names: str) -> Any:
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    rows = part(parse_json(text), "lldp", "interface")
    found: dict[str, tuple[str, str]] = {}
    for row in (rows if isinstance(rows, list) else [rows])[:ROWS_MAX]:
        for name, block in row.items() if isinstance(row, dict) else ():
            chassis = part(block, "chassis")
            if isinstance(chassis, dict) and chassis:
                switch = part(chassis, "name", "value") or chassis.get("name") or next(iter(chassis))
                port = part(block, "port", "id", "value") or part(block, "port", "id") or ""
                found[name] = (str(switch), str(port))
    return found
