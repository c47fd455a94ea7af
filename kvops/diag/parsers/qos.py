"""Parsers of what sets priorities: mlnx_qos, dcb, lldptool."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvops.diag.parsers.sysfs import bad

PRIORITIES = 8


@dataclass(slots=True)
class Qos:
    """One interface's quality of service. None or empty: the text does not say."""

    trust: str | None = None
    dcbx: str | None = None
    dscp_priority: dict[int, int] = field(default_factory=dict)
    pfc: list[bool] | None = None
    priority_buffer: list[int] | None = None
    buffer_bytes: list[int] = field(default_factory=list)

    @property
    def lossless(self) -> frozenset[int]:
        """Priorities with PFC on."""
        return frozenset(p for p, on in enumerate(self.pfc or []) if on)


def parse_mlnx_qos(text: str) -> Qos:
    """
    Read ``mlnx_qos -i <netdev>``.

    Raises:
        ParseError: It is none of its blocks (a VF prints only that trust is not supported).
    """
    qos = Qos()
    seen = False
    for line in text.splitlines():
        if match := re.match(r"DCBX mode:\s*(.+?)\s*$", line):
            qos.dcbx, seen = match[1], True
        elif match := re.match(r"Priority trust state:\s*(\w+)", line):
            qos.trust, seen = match[1].lower(), True
        elif match := re.match(r"\s*prio:(\d) dscp:([\d,]*)", line, re.ASCII):
            for dscp in filter(None, match[2].split(",")):
                if len(dscp) <= 2:
                    qos.dscp_priority[int(dscp)] = int(match[1])
        elif match := re.match(r"Receive buffer size \(bytes\):\s*([\d,]+)", line, re.ASCII):
            qos.buffer_bytes = [int(n) for n in match[1].split(",") if 0 < len(n) <= 12][:PRIORITIES]
        elif match := re.match(r"\s*enabled\s+((?:[01]\s*){8})$", line, re.ASCII):
            qos.pfc, seen = [word == "1" for word in match[1].split()], True
        elif match := re.match(r"\s*buffer\s+((?:\d\s*){8})$", line, re.ASCII):
            qos.priority_buffer = [int(word) for word in match[1].split()]
    if not seen:
        raise bad("mlnx_qos", text)
    return qos


def parse_dcb_pfc(text: str) -> list[bool]:
    """Read ``dcb pfc show dev X``: ``prio-pfc 0:off 1:off 2:off 3:on …``."""
    match = re.search(r"prio-pfc\s+((?:\d:(?:on|off)\s*)+)", text, re.ASCII)
    if match is None:
        raise bad("dcb pfc", text)
    pairs = dict(item.split(":") for item in match[1].split())
    return [pairs.get(str(priority)) == "on" for priority in range(PRIORITIES)]


def parse_dcb_app(text: str) -> dict[int, int]:
    """
    Read ``dcb app show dev X``: ``dscp-prio 26:3 48:6`` as DSCP → priority; names (``AF31``) are passed
    over.
    """
    table: dict[int, int] = {}
    for match in re.finditer(r"dscp-prio\s+([^\n]*)", text):
        for dscp, priority in re.findall(r"\b(\d{1,2}):([0-7])\b", match[1], re.ASCII):
            table[int(dscp)] = int(priority)
    return table


def parse_lldp_pfc(text: str) -> frozenset[int] | None:
    """
    Priorities named in the ``PFC TLV`` block of lldptool (ours or the neighbour's); None without such a
    block.
    """
    match = re.search(r"PFC[^\n]*TLV(.*?)(?:\n\S|\Z)", text, re.DOTALL)
    if match is None:
        match = re.search(r"((?:Enabled|PFC)[^\n]*)", text)
        if match is None:
            return None
    enabled = re.search(r"enabled(?: on)?:?\s*([0-7, none]*)", match[1], re.IGNORECASE)
    if enabled is None:
        return None
    return frozenset(int(p) for p in re.findall(r"[0-7]", enabled[1]))


def parse_trust_file(text: str) -> str:
    """Read NET/qos/trust: ``dscp`` or ``pcp`` (some versions print ``[dscp] pcp``)."""
    chosen = re.search(r"\[(\w+)\]", text) or re.match(r"\s*(\w+)", text)
    if chosen is None:
        raise bad("trust", text)
    return chosen[1].lower()


def parse_tclass(text: str) -> int | None:
    """Read tc/1/traffic_class of the vendor stack: ``Global tclass=106``; None if none is set."""
    match = re.search(r"tclass\s*=\s*(\d{1,3})", text, re.ASCII)
    return int(match[1]) if match else None
