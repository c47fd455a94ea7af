"""RDMA devices of a host, their ports and GIDs, as checks see them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from kvops.diag.facts.fact import PORTS_MAX, attempt, counter_step, fact
from kvops.diag.facts.netdev import Netdev
from kvops.diag.facts.pci import PciFunction
from kvops.diag.model import Evidence, Skip, Unseen
from kvops.diag.parsers import ip, rdma, sysfs
from kvops.errors import ParseError
from kvops.host import Sight

if TYPE_CHECKING:
    from kvops.diag.facts.host import HostFacts
    from kvops.diag.facts.target import Target

GIDS_MAX = 4096

RDMA_VENDORS = {
    0x15B3: "mlx5",
    0x14E4: "bnxt",
    0x1D0F: "efa",
    0x1DED: "erdma",
    0x1DD8: "ionic",
}

_KIND_OF_DRIVER = {
    "mlx5_core": "mlx5",
    "mlx4_core": "mlx4",
    "bnxt_en": "bnxt",
    "ice": "irdma",
    "i40e": "irdma",
    "idpf": "irdma",
    "efa": "efa",
    "erdma": "erdma",
    "hns3": "hns",
    "ionic": "ionic",
    "qede": "qedr",
    "cxgb4": "cxgb4",
}

_KIND_OF_NAME = {
    "mlx5": "mlx5",
    "mlx4": "mlx4",
    "bnxt": "bnxt",
    "efa": "efa",
    "rdmap": "efa",
    "erdma": "erdma",
} | {
    "irdma": "irdma",
    "hns": "hns",
    "rxe": "rxe",
    "siw": "siw",
}


@dataclass(frozen=True, slots=True)
class Gid:
    """One slot of a port's GID table."""

    index: int
    address: ipaddress.IPv6Address
    kind: str | None  # "RoCE v2", "IB/RoCE v1"; None for an empty slot
    netdev: str | None
    path: str

    @property
    def empty(self) -> bool:
        return int(self.address) == 0

    @property
    def link_local(self) -> bool:
        return self.address.is_link_local

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        return self.address.ipv4_mapped

    @property
    def ip(self) -> ip.Address:
        return self.ipv4 or self.address

    @property
    def v2(self) -> bool:
        return self.kind == "RoCE v2"

    @property
    def routable(self) -> bool:
        """RoCE v2 and not link-local: what a transfer across subnets needs."""
        return self.v2 and not self.empty and not self.link_local

    @property
    def text(self) -> str:
        return str(self.ipv4 or self.address)


# Bytes (sent, received) and packets in the words of drivers without counters/ of the InfiniBand kind: bnxt_re and
# efa; irdma, which counts what its engine put on the wire by IP version.
_BYTES_OF_OTHERS = (
    (("tx_bytes",), ("rx_bytes",)),
    (("ip4OutOctets", "ip6OutOctets"), ("ip4InOctets", "ip6InOctets")),
)

_PACKETS = (
    *("port_xmit_packets", "port_rcv_packets", "tx_pkts", "rx_pkts"),
    *("ip4OutPkts", "ip4InPkts", "ip6OutPkts", "ip6InPkts"),
)


class Port:
    """One port of one RDMA device."""

    def __init__(self, device: RdmaDevice, number: int) -> None:
        self.device = device
        self.host = device.host
        self.number = number
        self.path = f"{device.path}/ports/{number}"
        self.label = f"{device.name}/{number}"

    def __str__(self) -> str:
        return self.label

    def text(self, name: str, sample: int = 0) -> str:
        return self.host.text(f"{self.path}/{name}", sample).strip()

    @fact
    def link_layer(self) -> str:
        return self.text("link_layer")

    @property
    def is_infiniband(self) -> bool:
        return attempt(lambda: self.link_layer) == "InfiniBand"

    @property
    def is_ethernet(self) -> bool:
        return attempt(lambda: self.link_layer) == "Ethernet"

    @property
    def is_roce(self) -> bool:
        """Ethernet, and neither iWARP nor a provider's own protocol: those have rules of their own."""
        return (
            self.is_ethernet and not self.device.is_rnic and self.device.kind not in ("efa", "erdma", "siw")
        )

    @fact
    def state(self) -> tuple[int, str]:
        return sysfs.parse_enum(self.text("state"))

    @fact
    def phys_state(self) -> tuple[int, str]:
        return sysfs.parse_enum(self.text("phys_state"))

    @property
    def active(self) -> bool:
        return (attempt(lambda: self.state) or (4, ""))[0] == 4

    @fact
    def rate(self) -> sysfs.Rate:
        return sysfs.parse_rate(self.text("rate"))

    @fact
    def gids(self) -> list[Gid]:
        """Every slot of the table that was collected. Raises Unseen."""
        return self._gid_table(0)

    def gids_at(self, sample: int) -> list[Gid]:
        return self.gids if sample == 0 else self._gid_table(sample)

    def _gid_table(self, sample: int) -> list[Gid]:
        folder = f"{self.path}/gids"
        names = [name for name in self.host.ls(folder) if name.isascii() and name.isdigit() and len(name) < 6]
        table = []
        for index in sorted(map(int, names))[:GIDS_MAX]:
            path = f"{folder}/{index}"
            address = attempt(lambda: sysfs.parse_gid(self.host.text(path, sample)))
            if address is None:
                continue
            kind = netdev = None
            if int(address):
                kind = self.host.peek(f"{self.path}/gid_attrs/types/{index}", sample)
                netdev = self.host.peek(f"{self.path}/gid_attrs/ndevs/{index}", sample)
            table.append(Gid(index, address, kind and kind.strip(), netdev and netdev.strip(), path))
        return table

    @property
    def gid_table_length(self) -> int:
        """
        How many slots the table has. Tables are cut when collected: then the true length is not known, but
        larger.
        """
        names = self.host.ls(f"{self.path}/gids")
        truncated = self.host.meta.get("truncated") or {}
        if isinstance(truncated, dict) and f"{self.path}/gids" in truncated:
            return max(len(names), 128)
        return len(names)

    def gid(self, index: int) -> Gid | None:
        return next((gid for gid in self.gids if gid.index == index), None)

    @fact
    def best_gid(self) -> Gid | None:
        """What a choice by content takes: RoCE v2, routable, IPv4 first; None if every slot is empty."""
        used = [gid for gid in self.gids if not gid.empty]
        if not used:
            return None
        return max(used, key=lambda g: (g.routable, g.v2, g.ipv4 is not None, not g.link_local, -g.index))

    @cached_property
    def netdev_name(self) -> str | None:
        """The interface whose addresses the GIDs are: a bond for a LAG device, else the function's own."""
        gids = attempt(lambda: self.gids) or []
        for gid in sorted(gids, key=lambda g: not g.routable):
            if gid.netdev and gid.netdev.split(".")[0]:
                return gid.netdev
        own = self.own_netdev_names
        if own:
            return own[0]
        links = attempt(lambda: rdma.parse_links(self.host.command("rdma", "link", "show")))
        return (links or {}).get((self.device.name, self.number), {}).get("netdev")

    @cached_property
    def own_netdev_names(self) -> list[str]:
        """Interfaces of the PCI function itself."""
        names = list(attempt(lambda: self.host.ls(f"{self.device.path}/device/net")) or ())
        if not names and self.device.pci is not None:
            function = self.device.pci
            names = list(attempt(lambda: self.host.ls(f"{function.path}/net")) or ())
        if len(names) > 1:
            wanted = str(self.number - 1)
            for attribute in ("dev_port", "phys_port_name"):
                mine = [
                    n
                    for n in names
                    if (self.host.peek(f"/sys/class/net/{n}/{attribute}") or "").strip() == wanted
                ]
                if mine:
                    return mine
        return names

    @property
    def netdev(self) -> Netdev | None:
        name = self.netdev_name
        return self.host.netdev(name) if name else None

    def need_netdev(self) -> Netdev:
        """The interface; Skip if the port has none in this namespace."""
        netdev = self.netdev
        if netdev is None or not netdev.present:
            raise Skip(f"{self.label} has no network interface here")
        return netdev

    @cached_property
    def wire_netdevs(self) -> list[Netdev]:
        """Interfaces with a wire of their own: members of a bond, else the interface itself."""
        name = self.netdev_name
        bond = self.host.bonds.get(name or "")
        if bond is not None:
            return [self.host.netdev(member.name) for member in bond.members]
        names = dict.fromkeys([*self.own_netdev_names, *([name] if name else [])])
        return [
            self.host.netdev(n)
            for n in names
            if n in self.host.netdev_names or self.host.has_command("ethtool", n)
        ]

    def counter_path(self, name: str) -> str:
        """Where a counter lies: counters/, hw_counters/ of the port, or hw_counters/ of the device."""
        for folder in (
            f"{self.path}/hw_counters",
            f"{self.path}/counters",
            f"{self.device.path}/hw_counters",
        ):
            if self.host.peek(f"{folder}/{name}") is not None:
                return f"{folder}/{name}"
        return f"{self.path}/hw_counters/{name}"

    def step(self, name: str) -> int | None:
        """How far a counter moved over the window; None if it was reset. Raises Unseen."""
        self.host.need_window()
        path = self.counter_path(name)
        before, after = (sysfs.parse_int(self.host.text(path, sample)) for sample in (0, 1))
        return counter_step(before, after)

    def steps(self, *names: str) -> dict[str, int]:
        """Steps of those counters that are there. Raises Unseen if none is."""
        self.host.need_window()
        found: dict[str, int] = {}
        reason: Unseen | None = None
        seen = False
        for name in names:
            try:
                step = self.step(name)
                seen = True
            except Unseen as unseen:
                reason = reason or unseen
                continue
            except ParseError:
                continue
            if step is not None:
                found[name] = step
        if not seen and reason is not None:
            raise reason
        return found

    def counter_evidence(self, *names: str) -> list[Evidence]:
        items = []
        for name in names:
            path = self.counter_path(name)
            values = [(self.host.peek(path, sample) or "?").strip() for sample in (0, 1)]
            items.append(
                Evidence(source=path, file=f"root{self.host.snapshot.resolve(path)}", text=" → ".join(values))
            )
        return items

    @fact
    def wire_steps(self) -> dict[str, int]:
        """Ethtool counters' steps, summed over the port's wires. Raises Unseen."""
        self.host.need_window()
        total: dict[str, int] = {}
        reason: Unseen | None = None
        for netdev in self.wire_netdevs:
            try:
                for name, step in netdev.stats_delta.items():
                    total[name] = total.get(name, 0) + step
            except Unseen as unseen:
                reason = unseen
        if not total:
            raise reason or Unseen(f"ethtool -S of {self.label}", Sight.NOT_COLLECTED)
        return total

    def wire_evidence(self, *names: str) -> list[Evidence]:
        items = []
        for netdev in self.wire_netdevs:
            seen = self.host.said("ethtool", "-S", netdev.name)
            steps = attempt(lambda: netdev.stats_delta) or {}
            text = ", ".join(f"{name} +{steps[name]}" for name in names if name in steps)
            if seen is not None and text:
                items.append(Evidence(source=seen.source, file=seen.file, text=text))
        return items

    @fact
    def traffic_bytes(self) -> tuple[int, int]:
        """(sent, received) over the window, from the counter of RDMA bytes that moved most. Raises Unseen."""
        self.host.need_window()
        pairs: list[tuple[int, int]] = []
        words = attempt(lambda: self.steps("port_xmit_data", "port_rcv_data"))
        if words:
            pairs.append((4 * words.get("port_xmit_data", 0), 4 * words.get("port_rcv_data", 0)))
        wire = attempt(lambda: self.wire_steps) or {}
        for sent, received in (
            ("tx_vport_rdma_unicast_bytes", "rx_vport_rdma_unicast_bytes"),
            ("tx_bytes_phy", "rx_bytes_phy"),
        ):
            if sent in wire or received in wire:
                pairs.append((wire.get(sent, 0), wire.get(received, 0)))
        if any(re.fullmatch(r"tx_prio\d_bytes", name) for name in wire):
            tx, rx = (sum(wire.get(f"{d}_prio{p}_bytes", 0) for p in range(8)) for d in ("tx", "rx"))
            pairs.append((tx, rx))
        for names in _BYTES_OF_OTHERS:
            other = attempt(partial(self.steps, *names[0], *names[1]))
            if other:
                pairs.append((sum(other.get(n, 0) for n in names[0]), sum(other.get(n, 0) for n in names[1])))
        if not pairs:
            raise Unseen(f"bytes moved by {self.label}", Sight.NOT_COLLECTED)
        return max(pairs, key=sum)

    @property
    def packets(self) -> int:
        """Packets over the window, at least 1: counted, or from bytes at 4 KiB a packet. Raises Unseen."""
        counted = attempt(lambda: self.steps(*_PACKETS)) or {}
        wire = attempt(lambda: self.wire_steps) or {}
        by_priority = sum(n for name, n in wire.items() if re.fullmatch(r"[tr]x_prio\d_packets", name))
        return max(sum(counted.values()), by_priority, sum(self.traffic_bytes) // 4096, 1)

    @property
    def busy(self) -> bool:
        """At least 1 % of the line was used over the window. Raises Unseen."""
        window_s = self.host.need_window()
        return max(self.traffic_bytes) * 8 >= 0.01 * self.rate.gbps * 1e9 * window_s

    @fact
    def mtus(self) -> tuple[int | None, int | None]:
        """(active, max) path MTU from ibv_devinfo. Raises Unseen."""
        info = self.host.devinfo.get(self.device.name)
        labels = info.ports.get(self.number) if info else None
        if labels is None:
            raise Unseen(f"ibv_devinfo of {self.label}", self.host.why_not("ibv_devinfo"))
        return rdma.parse_mtu(labels.get("active_mtu", "")), rdma.parse_mtu(labels.get("max_mtu", ""))


def rate_gbps(port: Port) -> float:
    """The port's rate, 0 if it could not be seen."""
    rate = attempt(lambda: port.rate)
    return rate.gbps if rate else 0.0


class RdmaDevice:
    """One device under /sys/class/infiniband."""

    def __init__(self, host: HostFacts, name: str) -> None:
        self.host = host
        self.name = name
        self.path = f"/sys/class/infiniband/{name}"

    def __str__(self) -> str:
        return self.name

    def text(self, name: str) -> str:
        return self.host.text(f"{self.path}/{name}").strip()

    @cached_property
    def pci(self) -> PciFunction | None:
        resolved = self.host.snapshot.resolve(f"{self.path}/device")
        bdf = resolved.rpartition("/")[2]
        return (
            self.host.pci_function(bdf)
            if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", bdf)
            else None
        )

    @cached_property
    def kind(self) -> str:
        """The driver's family: mlx5, bnxt, irdma, efa, erdma, rxe, …"""
        driver = self.pci.driver if self.pci is not None else None
        if driver in _KIND_OF_DRIVER:
            return _KIND_OF_DRIVER[driver]
        for prefix, kind in _KIND_OF_NAME.items():
            if self.name.startswith(prefix):
                return kind
        if self.pci is not None and self.pci.vendor in RDMA_VENDORS:
            return RDMA_VENDORS[self.pci.vendor]
        return driver or "unknown"

    @cached_property
    def is_rnic(self) -> bool:
        """The kernel calls it an RNIC (iWARP and its like). Unseen counts as no."""
        node_type = attempt(lambda: sysfs.parse_enum(self.text("node_type")))
        return node_type is not None and node_type[0] == 4

    @cached_property
    def board_guid(self) -> str | None:
        """What all functions of one card have in common; None if it was not seen."""
        guid = (self.host.peek(f"{self.path}/sys_image_guid") or "").strip()
        return guid if guid.strip("0:") else None

    @property
    def is_virtual(self) -> bool:
        return self.pci is not None and self.pci.is_virtual

    @cached_property
    def is_bond(self) -> bool:
        return "bond" in self.name or any(p.netdev_name in self.host.bonds for p in self.ports)

    @cached_property
    def ports(self) -> list[Port]:
        names = attempt(lambda: self.host.ls(f"{self.path}/ports")) or ()
        numbers = [int(name) for name in names if name.isascii() and name.isdigit() and len(name) < 4]
        return [Port(self, number) for number in sorted(numbers)[:PORTS_MAX]]

    @property
    def numa_node(self) -> int | None:
        return self.pci.numa_node if self.pci is not None else None


@dataclass(frozen=True, slots=True)
class GidUse:
    """One GID in use: by which process, on which port, chosen how."""

    target: Target | None
    port: Port
    index: int | None  # None: no slot can be chosen, the table is empty
    variable: str | None  # the environment variable that forces it

    @property
    def label(self) -> str:
        where = f"{self.port.label} GID {self.index}" if self.index is not None else self.port.label
        return f"{where} of {self.target.name}" if self.target is not None else where

    def __str__(self) -> str:
        return self.label

    @property
    def gid(self) -> Gid | None:
        return None if self.index is None else self.port.gid(self.index)

    def evidence(self, *, attributes: bool = False) -> list[Evidence]:
        host = self.port.host
        items = []
        if self.index is not None:
            items.append(host.at(f"{self.port.path}/gids/{self.index}"))
            if attributes:
                items.append(host.at(f"{self.port.path}/gid_attrs/types/{self.index}"))
        if self.target is not None and self.variable:
            items.append(self.target.evidence("environ", f"{self.variable}={self.index}"))
        return items
