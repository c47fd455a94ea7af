"""Parser of ``lspci -vvv``."""

from __future__ import annotations

import re
from typing import NamedTuple


def full_bdf(text: str) -> str:
    """``18:00.0`` as ``0000:18:00.0``, lower case."""
    word = text.lower()
    return word if word.count(":") == 2 else f"0000:{word}"


class PciText(NamedTuple):
    """One function's block."""

    bdf: str
    title: str
    body: str

    @property
    def denied(self) -> bool:
        """Whether its capabilities were withheld from us (not root)."""
        return "<access denied>" in self.body

    @property
    def lost(self) -> bool:
        """``(rev ff)``: every read gives ones; the function is gone from the bus."""
        return "(rev ff)" in self.title

    @property
    def virtual(self) -> bool:
        return "Virtual Function" in self.title

    def flag(self, block: str, name: str) -> bool | None:
        """``ACSCtl`` ``ReqRedir`` → True for ``ReqRedir+``; None if the block or the flag is not there."""
        line = re.search(rf"\b{re.escape(block)}:([^\n]*(?:\n\t{{3,}}[^\n]*)*)", self.body)
        found = line and re.search(rf"\b{re.escape(name)}([+-])", line[1])
        return found[1] == "+" if found else None

    def number(self, name: str) -> int | None:
        """``MaxReadReq`` → 4096; the first in the block."""
        found = re.search(rf"\b{re.escape(name)} (\d{{1,6}}) bytes", self.body, re.ASCII)
        return int(found[1]) if found else None

    @property
    def port_type(self) -> str:
        """``Root Port``, ``Upstream Port``, ``Downstream Port``, ``Endpoint`` or empty."""
        found = re.search(
            r"Express \(v\d\) ((?:Root|Upstream|Downstream) Port|(?:Legacy )?Endpoint)", self.body
        )
        return found[1] if found else ""

    @property
    def max_payload_capability(self) -> int | None:
        found = re.search(r"DevCap:\s*MaxPayload (\d{1,5}) bytes", self.body, re.ASCII)
        return int(found[1]) if found else None

    @property
    def max_payload(self) -> int | None:
        """MaxPayload in force: the one under DevCtl."""
        found = re.search(r"DevCtl:(?:[^\n]*\n){1,4}?\s*MaxPayload (\d{1,5}) bytes", self.body, re.ASCII)
        return int(found[1]) if found else None


def parse_lspci(text: str) -> dict[str, PciText]:
    """Read ``lspci -vvv`` (with or without ``-D``); a body may be trimmed to any of its lines."""
    devices: dict[str, PciText] = {}
    bdf, title, body = "", "", list[str]()

    def close() -> None:
        if bdf:
            devices[bdf] = PciText(bdf, title, "\n".join(body))

    for line in text.splitlines():
        head = re.match(r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]) (.*)", line)
        if head is not None:
            close()
            bdf, title, body = full_bdf(head[1]), head[2], []
        elif bdf:
            body.append(line)
    close()
    return devices
