"""PCI functions of a host, as checks see them."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from kvops.diag.facts.fact import attempt
from kvops.diag.parsers import pcie, sysfs

if TYPE_CHECKING:
    from kvops.diag.facts.host import HostFacts

VENDOR_NVIDIA = 0x10DE

_VF_DEVICE_IDS = {(0x15B3, n) for n in (0x1014, 0x1016, 0x1018, 0x101A, 0x101C, 0x101E, 0xA2D3)} | {
    (0x8086, 0x1889),
    (0x14E4, 0x1606),
    (0x14E4, 0x1609),
    (0x14E4, 0x16DC),
    (0x14E4, 0x16E1),
    (0x14E4, 0x1806),
}


class PciFunction:
    """One PCI function under /sys/bus/pci/devices."""

    def __init__(self, host: HostFacts, bdf: str) -> None:
        self.host = host
        self.bdf = bdf
        self.path = f"/sys/bus/pci/devices/{bdf}"

    def _hex(self, name: str) -> int | None:
        return attempt(lambda: sysfs.parse_int(self.host.text(f"{self.path}/{name}")))

    @cached_property
    def vendor(self) -> int | None:
        return self._hex("vendor")

    @cached_property
    def device(self) -> int | None:
        return self._hex("device")

    @cached_property
    def pci_class(self) -> int | None:
        return self._hex("class")

    @property
    def is_gpu(self) -> bool:
        return (self.pci_class or 0) >> 16 == 0x03 and self.vendor in (VENDOR_NVIDIA, 0x1002)

    @cached_property
    def driver(self) -> str | None:
        """Name of the bound driver, None if none is bound (or nobody looked: see ``driver_seen``)."""
        link = self.host.snapshot.readlink(f"{self.path}/driver")
        return link.rpartition("/")[2] if link else None

    @cached_property
    def text(self) -> pcie.PciText | None:
        table = attempt(lambda: self.host.lspci)
        return table.get(self.bdf) if table else None

    @cached_property
    def is_virtual(self) -> bool:
        """A virtual function: no physical link, no PHY counters of its own."""
        if self.host.snapshot.readlink(f"{self.path}/physfn") or (
            self.text is not None and self.text.virtual
        ):
            return True
        return (self.vendor, self.device) in _VF_DEVICE_IDS

    @cached_property
    def ancestors(self) -> tuple[str, ...]:
        """Addresses of the bridges above, nearest first."""
        real = self.host.snapshot.realpath(self.path)
        parts = [
            part
            for part in real.split("/")
            if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part)
        ]
        return tuple(reversed([part for part in parts if part != self.bdf]))

    @cached_property
    def root(self) -> str:
        """The host bridge, such as ``pci0000:15``; empty if unknown."""
        real = self.host.snapshot.realpath(self.path)
        return next((part for part in real.split("/") if part.startswith("pci")), "")

    @cached_property
    def numa_node(self) -> int | None:
        return self._hex("numa_node")

    def link(self, which: str) -> tuple[float | None, int]:
        """(GT/s, lanes) of ``current`` or ``max``; raises Unseen."""
        speed = sysfs.parse_link_speed(self.host.text(f"{self.path}/{which}_link_speed"))
        return speed, sysfs.parse_int(self.host.text(f"{self.path}/{which}_link_width"))
