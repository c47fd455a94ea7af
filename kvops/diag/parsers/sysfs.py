"""Parsers of one-value files under /sys."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from kvops.errors import ParseError

CPU_MAX = 1 << 16  # far above any machine; keeps "0-99999999999" from filling memory


def bad(what: str, text: str) -> ParseError:
    """The error for text that is not in the expected form; quotes the start of it."""
    return ParseError(f"{what}: {text.strip()[:60]!r} is not in the expected form", fix="see the raw file")


def parse_int(text: str) -> int:
    """
    Read a number in decimal or hexadecimal, such as ``"16"``, ``"-1"`` or ``"0xffff"``.

    Raises:
        ParseError: It is not one number.
    """
    word = text.strip()
    if not re.fullmatch(r"-?(0[xX][0-9a-fA-F]{1,32}|[0-9]{1,40})", word, re.ASCII):
        raise bad("number", text)
    return int(word, 16 if "x" in word.lower() else 10)


def parse_word(text: str) -> str:
    """
    Read a file that holds one name, such as ``performance`` or ``tsc``.

    Raises:
        ParseError: It is no single word of letters, digits, ``-``, ``_`` and ``.`` that starts with a letter.
    """
    word = text.strip()
    if not re.fullmatch(r"[A-Za-z][\w.-]{0,63}", word, re.ASCII):
        raise bad("name", text)
    return word


def parse_enum(text: str) -> tuple[int, str]:
    """Read ``"4: ACTIVE"`` as ``(4, "ACTIVE")``."""
    match = re.fullmatch(r"\s*(\d{1,3}):\s*([^\n]{1,40}?)\s*", text, re.ASCII)
    if match is None:
        raise bad("state", text)
    return int(match[1]), match[2]


class Rate(NamedTuple):
    """A port's line rate. ``lanes`` is 0 if the text does not say."""

    gbps: float
    lanes: int
    speed: str


def parse_rate(text: str) -> Rate:
    """
    Read a port's ``rate`` file.

    Args:
        text: The whole file, such as ``"400 Gb/sec (4X NDR)"``.

    Raises:
        ParseError: The text does not start with ``<number> Gb/sec``.

    Source: /sys/class/infiniband/<device>/ports/<port>/rate
    """
    match = re.match(
        r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*Gb/sec(?:\s*\((\d{1,2})X\s*([A-Z0-9]*)\))?", text, re.ASCII
    )
    if match is None:
        raise bad("rate", text)
    return Rate(float(match[1]), int(match[2] or 0), match[3] or "")


def parse_gid(text: str) -> ipaddress.IPv6Address:
    """Read a GID: eight groups of hex digits, never shortened."""
    word = text.strip()
    if not re.fullmatch(r"(?:[0-9a-fA-F]{4}:){7}[0-9a-fA-F]{4}", word, re.ASCII):
        raise bad("GID", text)
    return ipaddress.IPv6Address(word)


def parse_link_speed(text: str) -> float | None:
    """
    Read a PCIe speed in GT/s: ``"32.0 GT/s PCIe"``, older kernels ``"8 GT/s"``; None for ``"Unknown"``.

    Source: /sys/bus/pci/devices/<bdf>/current_link_speed
    """
    word = text.strip()
    if word.lower().startswith("unknown"):
        return None
    match = re.match(r"(\d{1,3}(?:\.\d)?)\s*GT/s", word, re.ASCII)
    if match is None:
        raise bad("PCIe speed", text)
    return float(match[1]) or None


def pcie_gbps(speed_gts: float, width: int) -> float:
    """Raw Gbit/s of a PCIe link after line coding: 8b/10b up to 5 GT/s, 128b/130b from 8 GT/s."""
    return speed_gts * width * (0.8 if speed_gts < 8 else 128 / 130)


def parse_cpulist(text: str) -> frozenset[int]:
    """Read ``"0-47,96-143"``; an empty file is the empty set."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part.strip():
            continue
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part, re.ASCII)
        if match is None:
            raise bad("CPU list", text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < CPU_MAX:
            raise bad("CPU list", text)
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def parse_named_counts(text: str) -> dict[str, int]:
    r"""Read ``"RxErr 0\\nTOTAL_ERR_COR 0"`` (AER) or ``"oom_kill 3"`` (cgroup events)."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and re.fullmatch(r"\d{1,20}", words[1], re.ASCII):
            counts[words[0]] = int(words[1])
    if not counts:
        raise bad("counters", text)
    return counts
