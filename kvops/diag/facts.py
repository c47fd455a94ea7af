"""
What a host is, as checks see it: devices, ports, GIDs, addresses, routes, targets.

Every fact is computed from a snapshot on first use and remembered, the reason for its absence too. Nothing
here reads a live machine: a live machine is collected first, so both ways give the same verdict.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar, overload

from kvops.diag.model import EVIDENCE_TEXT_MAX, Evidence, Skip, Unseen
from kvops.diag.parsers import ethtool, ip, misc, pcie, proc, qos, rdma, sysfs, tools
from kvops.errors import ParseError
from kvops.host import CommandResult, Sight, SnapshotHost

T = TypeVar("T")

OUTPUT_CHARS_MAX = 2 << 20  # of one command that a parser gets to see; logs and flow tables may be longer
_LOG_TOOLS = frozenset({"dmesg", "journalctl", "ovs-appctl", "kubectl"})
PORTS_MAX = 512  # of one host; sysfs of a hostile snapshot may claim more
GIDS_MAX = 4096
NETDEVS_MAX = 4096
SAME_SOCKET_DISTANCE = (
    15  # sub-NUMA clusters of one socket are 11-12 apart, sockets 20 and more [ACPI SLIT in practice]
)

VENDOR_MELLANOX = 0x15B3
VENDOR_NVIDIA = 0x10DE
RDMA_VENDORS = {
    0x15B3: "mlx5",
    0x14E4: "bnxt",
    0x1D0F: "efa",
    0x1DED: "erdma",
    0x1DD8: "ionic",
}
_VF_DEVICE_IDS = {(0x15B3, n) for n in (0x1014, 0x1016, 0x1018, 0x101A, 0x101C, 0x101E, 0xA2D3)} | {
    (0x8086, 0x1889),
    (0x14E4, 0x1606),
    (0x14E4, 0x1609),
    (0x14E4, 0x16DC),
    (0x14E4, 0x16E1),
    (0x14E4, 0x1806),
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


class fact(Generic[T]):  # noqa: N801 - used like property
    """A property that is computed once; an Unseen or Skip it raised is remembered and raised again."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = "_fact_" + name

    @overload
    def __get__(self, instance: None, owner: type) -> fact[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        memory = instance.__dict__
        if self._key not in memory:
            try:
                memory[self._key] = (self._function(instance), None)
            except (Unseen, Skip) as missing:
                memory[self._key] = (None, missing)
            except ParseError as error:
                memory[self._key] = (None, Unseen(error.what, Sight.FAILED))
        value, reason = memory[self._key]
        if reason is not None:
            raise reason
        return value


def attempt(function: Callable[[], T]) -> T | None:
    """The value, or None where it could not be seen: for one of several sources of the same fact."""
    try:
        return function()
    except (Unseen, Skip, ParseError):
        return None


def counter_step(before: int, after: int) -> int | None:
    """
    How far a counter moved. A 32-bit one may wrap; any other step back means a reset, and then there is no
    figure.

    The kernel widens most counters to 64 bits in software, the hardware's own are often 32 bits wide.
    """
    if after >= before:
        return after - before
    wrapped = before < 1 << 32 and before > (1 << 32) * 9 // 10 and after < (1 << 32) // 10
    return after + (1 << 32) - before if wrapped else None


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

    @property
    def is_bridge(self) -> bool:
        return (self.pci_class or 0) >> 8 == 0x0604

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


class Netdev:
    """One network interface of this namespace."""

    def __init__(self, host: HostFacts, name: str) -> None:
        self.host = host
        self.name = name
        self.path = f"/sys/class/net/{name}"

    def text(self, name: str) -> str:
        return self.host.text(f"{self.path}/{name}").strip()

    @property
    def present(self) -> bool:
        return self.name in self.host.netdev_names

    @fact
    def mtu(self) -> int:
        try:
            return sysfs.parse_int(self.text("mtu"))
        except Unseen:
            link = attempt(lambda: self.host.addresses)
            if link and self.name in link and link[self.name].mtu:
                return link[self.name].mtu
            raise

    @property
    def addresses(self) -> list[ip.Interface]:
        """Raises Unseen."""
        links = self.host.addresses
        return links[self.name].addresses if self.name in links else []

    @cached_property
    def driver(self) -> str | None:
        labels = attempt(lambda: ethtool.parse_labels(self.host.command("ethtool", "-i", self.name)))
        if labels and labels.get("driver"):
            return labels["driver"]
        link = self.host.snapshot.readlink(f"{self.path}/device/driver")
        return link.rpartition("/")[2] if link else None

    def stats(self, sample: int = 0) -> dict[str, int]:
        """``ethtool -S``; raises Unseen."""
        return self.host.stats(self.name, sample)

    @fact
    def stats_delta(self) -> dict[str, int]:
        """Steps of every counter over the window; a counter that was reset is left out. Raises Unseen."""
        self.host.need_window()
        before, after = self.stats(0), self.stats(1)
        steps = {name: counter_step(before[name], value) for name, value in after.items() if name in before}
        return {name: step for name, step in steps.items() if step is not None}

    @fact
    def qos(self) -> qos.Qos:
        """Priorities of this interface from mlnx_qos, dcb and sysfs, whichever was there. Raises Unseen."""
        result = attempt(lambda: qos.parse_mlnx_qos(self.host.command("mlnx_qos", "-i", self.name)))
        if result is None:
            result = qos.Qos()
        if result.trust is None:
            result.trust = attempt(lambda: qos.parse_trust_file(self.text("qos/trust")))
        if result.pfc is None:
            result.pfc = attempt(
                lambda: qos.parse_dcb_pfc(self.host.command("dcb", "pfc", "show", "dev", self.name))
            )
        if not result.dscp_priority:
            app = attempt(
                lambda: qos.parse_dcb_app(self.host.command("dcb", "app", "show", "dev", self.name))
            )
            if app:
                result.dscp_priority = app
                result.trust = result.trust or "dscp"
        if result.trust is None and result.pfc is None:
            raise Unseen(
                f"quality of service of {self.name} (mlnx_qos, dcb)", self.host.why_not("mlnx_qos", "dcb")
            )
        return result

    def qos_evidence(self) -> Evidence | None:
        for argv in (("mlnx_qos", "-i"), ("dcb", "pfc", "show", "dev"), ("dcb", "app", "show", "dev")):
            if (seen := self.host.said(*argv, self.name)) is not None:
                return seen
        return self.host.at(f"{self.path}/qos/trust")

    @cached_property
    def master(self) -> str | None:
        """The bond or bridge it belongs to."""
        link = self.host.snapshot.readlink(f"{self.path}/master")
        if link:
            return link.rpartition("/")[2]
        table = attempt(lambda: self.host.addresses)
        if table and self.name in table and table[self.name].master:
            return table[self.name].master
        for name, bond in self.host.bonds.items():
            if any(member.name == self.name for member in bond.members):
                return name
        return None


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


class Target:
    """A process to be judged: a store node or an engine."""

    def __init__(self, host: HostFacts, name: str, pid: int) -> None:
        self.host = host
        self.name = name
        self.pid = pid
        self.path = f"/proc/{pid}"
        self.label = f"{name} (pid {pid})"

    def __str__(self) -> str:
        return self.label

    def text(self, name: str, sample: int = 0) -> str:
        return self.host.text(f"{self.path}/{name}", sample)

    def evidence(self, name: str, text: str = "") -> Evidence:
        return self.host.at(f"{self.path}/{name}", text)

    @fact
    def environ(self) -> dict[str, str]:
        return proc.parse_environ(self.text("environ"))

    @fact
    def command_line(self) -> list[str]:
        return proc.parse_nul_list(self.text("cmdline"))

    @fact
    def limits(self) -> dict[str, tuple[int, int]]:
        return proc.parse_limits(self.text("limits"))

    def soft_limit(self, name: str) -> int:
        limit = self.limits.get(name)
        if limit is None:
            raise Unseen(f"{self.path}/limits: {name}", Sight.ABSENT)
        return limit[0]

    @fact
    def status(self) -> dict[str, str]:
        return proc.parse_fields(self.text("status"))

    def has_capability(self, bit: int) -> bool:
        """Whether a capability is effective. Raises Unseen."""
        mask = self.status.get("CapEff", "")
        if not re.fullmatch(r"[0-9a-fA-F]{1,16}", mask):
            raise Unseen(f"{self.path}/status: CapEff", Sight.ABSENT)
        return bool(int(mask, 16) >> bit & 1)

    @fact
    def options(self) -> dict[str, str]:
        """
        ``--name=value`` and ``--name value`` of its command line, joined with its configuration file's
        keys.
        """
        words = self.command_line
        options: dict[str, str] = {}
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                if not equals and not following.startswith("-"):
                    value = following
                options[name.replace("-", "_")] = value
        config = attempt(lambda: self.environ.get("MOONCAKE_CONFIG_PATH")) or options.get("config")
        text = self.host.peek(config) if config and config.startswith("/") else None
        document = attempt(lambda: misc.parse_json(text)) if text else None
        if isinstance(document, dict):
            for key, value in document.items():
                if isinstance(value, str | int | float):
                    options.setdefault(str(key).replace("-", "_"), str(value))
        return options

    def option(self, *names: str) -> str | None:
        """The first of the names that is set; None if none is, or the command line could not be seen."""
        options = attempt(lambda: self.options) or {}
        return next((options[name] for name in names if options.get(name)), None)

    @cached_property
    def protocol(self) -> str | None:
        value = self.option("protocol") or (attempt(lambda: self.environ) or {}).get("MOONCAKE_PROTOCOL")
        return value.lower() if value else None

    @cached_property
    def device_names(self) -> list[str]:
        """RDMA devices it was told to use; empty if it chooses for itself."""
        environ = attempt(lambda: self.environ) or {}
        text = self.option("device_names", "device_name", "devices") or environ.get("MOONCAKE_DEVICE") or ""
        words = [word.strip() for word in text.split(",")]
        return [word for word in words if word and word not in ("auto", "auto-discovery")]

    @cached_property
    def segment_bytes(self) -> int | None:
        expected = self.host.expect_int("segment_bytes")
        text = self.option("global_segment_size", "segment_size", "global_segment_bytes")
        own = attempt(lambda: proc.parse_size(text)) if text else None
        return own if own is not None else expected

    @property
    def wants_huge_pages(self) -> bool:
        environ = attempt(lambda: self.environ) or {}
        return environ.get("MC_STORE_USE_HUGEPAGE", "0").lower() not in ("", "0", "false", "off")

    @cached_property
    def ports(self) -> list[Port]:
        """Ports of the devices it uses."""
        names = self.device_names
        return [port for port in self.host.ports if not names or port.device.name in names]

    @property
    def gid_index(self) -> tuple[int, str] | None:
        """(index, variable) it was told to use; None if it chooses by content. Raises Unseen."""
        for name in ("MC_GID_INDEX", "NCCL_IB_GID_INDEX"):
            value = self.environ.get(name)
            if value is not None and re.fullmatch(r"\d{1,5}", value.strip(), re.ASCII):
                return int(value), name
        return None

    @property
    def destination_affinity(self) -> bool:
        """The variable counts by its presence, whatever its value [M]. Raises Unseen."""
        return "MC_ENABLE_DEST_DEVICE_AFFINITY" in self.environ

    @cached_property
    def log(self) -> tuple[str, str] | None:
        """(path, text) of its log."""
        paths = [f"/var/log/mooncake/{self.name}.log"]
        for number in (2, 1):
            link = self.host.snapshot.readlink(f"{self.path}/fd/{number}")
            if link and link.startswith("/"):
                paths.append(link)
        for path in paths:
            text = self.host.peek(path)
            if text is not None:
                return path, text
        return None


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


class HostFacts:
    """One host. ``peers`` and ``others`` are filled in when several nodes are compared."""

    def __init__(self, snapshot: SnapshotHost, *, name: str = "") -> None:
        self.snapshot = snapshot
        self.meta = snapshot.meta
        self.name = name or snapshot.name or str(self.meta.get("hostname") or "") or "localhost"
        self.profile: dict[str, Any] = {}
        self.others: list[HostFacts] = []
        self.touched: dict[str, Evidence] | None = None

    # Reading

    def text(self, path: str, sample: int = 0) -> str:
        """The content. Raises Unseen with the reason: absent, unreadable, not collected."""
        reading = self.snapshot.read(path, sample=sample)
        if not reading.present:
            raise Unseen(path, reading.sight)
        if self.touched is not None and path not in self.touched and len(self.touched) < 64:
            self.touched[path] = self._file_evidence(path, reading.text)
        return reading.text

    def get(self, path: str, sample: int = 0) -> str | None:
        """The content; None if it is absent. Raises Unseen for any other reason."""
        try:
            return self.text(path, sample)
        except Unseen as unseen:
            if unseen.absent:
                return None
            raise

    def peek(self, path: str, sample: int = 0) -> str | None:
        """The content; None for any reason: for one of several sources of a fact."""
        return attempt(lambda: self.text(path, sample))

    def number(self, path: str, sample: int = 0) -> int:
        return sysfs.parse_int(self.text(path, sample))

    def ls(self, path: str) -> Sequence[str]:
        """Names in a folder. Raises Unseen."""
        listing = self.snapshot.listdir(path)
        if listing.sight is not Sight.PRESENT:
            raise Unseen(path, listing.sight)
        return listing.names

    def need_window(self) -> float:
        """Seconds between the two samples. Raises Unseen if there is only one."""
        window = self.snapshot.window_s
        if window is None:
            raise Unseen("a second sample (rates need --window)", Sight.NOT_COLLECTED)
        return window

    # Commands

    @cached_property
    def _argv_by_tool(self) -> dict[str, list[tuple[str, ...]]]:
        table: dict[str, list[tuple[str, ...]]] = {}
        for argv in self.snapshot.commands():
            table.setdefault(argv[0].rpartition("/")[2], []).append(argv)
        return table

    def argvs(self, tool: str, *words: str) -> list[tuple[str, ...]]:
        """Every collected command of a tool with all these words among its arguments; shortest first."""
        wanted = set(words)
        name = tool.rpartition("/")[2]
        found = [argv for argv in self._argv_by_tool.get(name, ()) if wanted.issubset(argv[1:])]
        return sorted(found, key=len)

    def has_command(self, tool: str, *words: str) -> bool:
        return bool(self.argvs(tool, *words))

    def result(self, tool: str, *words: str, sample: int = 0) -> CommandResult:
        """
        The output of a command, exact arguments preferred.

        Raises:
            Unseen: It was not run, is not installed, was refused or failed without output.
        """
        exact = (tool, *words)
        candidates = self.argvs(tool, *words)
        if exact in candidates:
            candidates = [exact]
        if not candidates:
            missing = self.why_not(tool) is Sight.NO_TOOL
            raise Unseen(" ".join(exact), Sight.NO_TOOL if missing else Sight.NOT_COLLECTED)
        result = self.snapshot.run(*candidates[0], sample=sample)
        if len(result.stdout) > OUTPUT_CHARS_MAX and tool not in _LOG_TOOLS:
            result = replace(result, stdout=result.stdout[:OUTPUT_CHARS_MAX])
        if result.sight is not Sight.PRESENT:
            raise Unseen(" ".join(candidates[0]), result.sight)
        if result.return_code not in (0, None) and not result.stdout.strip():
            denied = re.search(r"not permitted|ermission denied|must be root|EPERM|EACCES", result.stderr)
            raise Unseen(" ".join(candidates[0]), Sight.UNREADABLE if denied else Sight.FAILED)
        if self.touched is not None and len(self.touched) < 64:
            self.touched.setdefault(result.file, self._command_evidence(result))
        return result

    def command(self, tool: str, *words: str, sample: int = 0) -> str:
        """Standard output of a command. Raises Unseen."""
        return self.result(tool, *words, sample=sample).stdout

    def why_not(self, *tools: str) -> Sight:
        """Why there is no usable output of any of these tools."""
        sights = []
        for tool in tools:
            for argv in self._argv_by_tool.get(tool, ()):
                result = self.snapshot.run(*argv)
                if result.sight is not Sight.PRESENT:
                    sights.append(result.sight)
                elif result.return_code not in (0, None):
                    sights.append(Sight.FAILED)
        for sight in (Sight.TIMED_OUT, Sight.UNREADABLE, Sight.FAILED, Sight.NO_TOOL):
            if sight in sights:
                return sight
        return Sight.NOT_COLLECTED

    def _ip_outputs(
        self, words: frozenset[str], *, without: frozenset[str] = frozenset()
    ) -> Iterator[CommandResult]:
        for argv in self._argv_by_tool.get("ip", ()):
            rest = set(argv[1:])
            if rest & words and not rest & without and "netns" not in rest:
                result = attempt(lambda: self.result(*argv))
                if result is not None and result.argv == argv:
                    yield result

    # Evidence

    def _file_evidence(self, path: str, text: str) -> Evidence:
        quoted = text.replace("\0", " ").strip()[:EVIDENCE_TEXT_MAX]
        return Evidence(source=path, file=f"root{self.snapshot.resolve(path)}", text=quoted)

    def _command_evidence(self, result: CommandResult, text: str = "") -> Evidence:
        quoted = (text or result.stdout or result.stderr).strip()[:EVIDENCE_TEXT_MAX]
        name = self.snapshot._argv.get(result.argv)
        return Evidence(
            source=" ".join(result.argv), file=f"cmd/{name}" if name else result.file, text=quoted
        )

    def at(self, path: str, text: str = "") -> Evidence:
        """A path as evidence, with its content (or the reason why it has none)."""
        if not text:
            reading = self.snapshot.read(path)
            text = reading.text if reading.present else f"({reading.detail or reading.sight})"
        return self._file_evidence(path, text)

    def said(self, tool: str, *words: str, text: str = "") -> Evidence | None:
        """A command as evidence; None if it gave nothing."""
        result = attempt(lambda: self.result(tool, *words))
        return None if result is None else self._command_evidence(result, text)

    def meta_evidence(self, key: str, text: str) -> Evidence:
        """An entry of meta.json as evidence."""
        return Evidence(source=f"meta.json#{key}", file="meta.json", text=text[:EVIDENCE_TEXT_MAX])

    # What the operator expects

    def expect(self, key: str) -> Any:
        """The operator's intent: from the profile, else the snapshot's own; None if nothing was said."""
        if key in self.profile:
            return self.profile[key]
        own = self.meta.get("expect")
        return own.get(key) if isinstance(own, dict) else None

    def expect_int(self, key: str) -> int | None:
        value = self.expect(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def expect_strings(self, key: str) -> list[str]:
        value = self.expect(key)
        return [str(item) for item in value] if isinstance(value, list) else []

    @property
    def roce_priority(self) -> int | None:
        priority = self.expect_int("roce_priority")
        return priority if priority is not None and 0 <= priority < qos.PRIORITIES else None

    @property
    def lossless(self) -> bool:
        """
        The site wants a lossless RoCE priority. ``"lossless": false`` says that its fabric is lossy on
        purpose.
        """
        wanted = self.expect("lossless")
        return bool(wanted) if wanted is not None else self.roce_priority is not None

    @cached_property
    def peers(self) -> list[tuple[str, list[ip.Address]]]:
        """Other nodes and their RDMA addresses: as expected, or as seen on the compared nodes."""
        found: list[tuple[str, list[ip.Address]]] = []
        stated = self.expect("peers")
        for peer in stated if isinstance(stated, list) else []:
            if isinstance(peer, dict) and isinstance(peer.get("rdma_ips"), list):
                addresses = [ip.parse_address(str(text)) for text in peer["rdma_ips"]]
                found.append((str(peer.get("node", "peer")), [a for a in addresses if a is not None]))
        if found:
            return found
        return [(other.name, other.rdma_addresses) for other in self.others if other.rdma_addresses]

    @cached_property
    def rdma_addresses(self) -> list[ip.Address]:
        """Routable addresses of this node's ports in scope."""
        addresses: dict[ip.Address, None] = {}
        for port in attempt(lambda: self.ports) or ():
            for gid in attempt(lambda: port.gids) or ():
                if gid.routable:
                    addresses[gid.ip] = None
        return list(addresses)

    # What kind of machine

    @cached_property
    def role(self) -> str:
        return str(self.meta.get("role") or "host")

    @property
    def uid(self) -> int | None:
        uid = self.meta.get("uid")
        return uid if isinstance(uid, int) else None

    @cached_property
    def is_container(self) -> bool:
        return self.role == "container"

    @cached_property
    def is_vm(self) -> bool:
        if self.role == "vm":
            return True
        said = attempt(lambda: self.command("systemd-detect-virt", "--vm")) or attempt(
            lambda: self.command("systemd-detect-virt")
        )
        if said and said.strip() not in (
            "none",
            "docker",
            "podman",
            "lxc",
            "container-other",
            "systemd-nspawn",
            "",
        ):
            return True
        vendor = (self.peek("/sys/class/dmi/id/sys_vendor") or "").strip()
        product = (self.peek("/sys/class/dmi/id/product_name") or "").strip()
        if vendor in (
            "QEMU",
            "Xen",
            "innotek GmbH",
            "VMware, Inc.",
            "Google",
            "Alibaba Cloud",
            "Tencent Cloud",
        ):
            return "bare" not in product.lower()
        if vendor == "Amazon EC2":
            return "metal" not in product
        if (vendor == "Microsoft Corporation" and product == "Virtual Machine") or "KVM" in product:
            return True
        return bool(re.search(r"^flags\s*:.*\bhypervisor\b", self.peek("/proc/cpuinfo") or "", re.MULTILINE))

    @property
    def is_bare_metal(self) -> bool:
        """A host, or a container on one, as far as can be seen."""
        return not self.is_vm

    @cached_property
    def kernel(self) -> str:
        return (self.peek("/proc/sys/kernel/osrelease") or str(self.meta.get("kernel") or "")).strip()

    @property
    def kernel_version(self) -> tuple[int, int] | None:
        match = re.match(r"(\d{1,3})\.(\d{1,4})", self.kernel, re.ASCII)
        return (int(match[1]), int(match[2])) if match else None

    @fact
    def kernel_words(self) -> list[str]:
        """The boot command line, word by word."""
        return self.text("/proc/cmdline").split()

    @fact
    def memory(self) -> dict[str, int]:
        """/proc/meminfo in bytes (page counts as they are)."""
        fields = proc.parse_fields(self.text("/proc/meminfo"))
        parsed = {key: attempt(lambda: proc.parse_kb(value)) for key, value in fields.items()}
        return {key: value for key, value in parsed.items() if value is not None}

    @fact
    def modules(self) -> dict[str, str]:
        return proc.parse_modules(self.text("/proc/modules"))

    def module_present(self, name: str) -> bool:
        """Loaded, or built into the kernel (then only /sys/module has it). Raises Unseen."""
        return name in self.modules or bool(attempt(lambda: self.ls(f"/sys/module/{name}")))

    @fact
    def log(self) -> list[misc.LogLine]:
        """The kernel's log. Raises Unseen."""
        reason: Unseen | None = None
        for argv in [
            *self.argvs("dmesg"),
            *self.argvs("journalctl", "-k"),
            *self.argvs("journalctl", "--dmesg"),
        ]:
            try:
                return misc.parse_dmesg(self.result(*argv).stdout)
            except Unseen as unseen:
                reason = unseen
        for path in ("/var/log/dmesg", "/var/log/kern.log"):
            text = self.peek(path)
            if text is not None:
                return misc.parse_dmesg(text)
        raise reason or Unseen("dmesg", Sight.NOT_COLLECTED)

    def log_lines(self, pattern: str, *, ignore_case: bool = False) -> list[misc.LogLine]:
        """Lines of the kernel's log that match. Raises Unseen."""
        compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
        return [line for line in self.log if compiled.search(line.text)]

    def log_evidence(self, line: misc.LogLine) -> Evidence:
        stamp = f"[{line.seconds:.6f}] " if line.seconds is not None else ""
        for tool in ("dmesg", "journalctl"):
            for argv in self.argvs(tool):
                result = attempt(lambda: self.result(*argv))
                if result is not None:
                    return self._command_evidence(result, stamp + line.text)
        return Evidence(source="/var/log/dmesg", file="root/var/log/dmesg", text=stamp + line.text)

    @property
    def uptime_s(self) -> float | None:
        words = (self.peek("/proc/uptime") or "").split()
        return attempt(lambda: _float(words[0])) if words else None

    # NUMA

    @fact
    def numa_nodes(self) -> list[int]:
        """Nodes online. Raises Unseen."""
        try:
            return sorted(sysfs.parse_cpulist(self.text("/sys/devices/system/node/online")))
        except Unseen:
            names = self.ls("/sys/devices/system/node")
            return sorted(int(n[4:]) for n in names if re.fullmatch(r"node\d{1,4}", n, re.ASCII))

    def numa_near(self, one: int, other: int) -> bool:
        """The same node, or nodes of one socket."""
        if one == other:
            return True
        text = self.peek(f"/sys/devices/system/node/node{one}/distance")
        distances = [
            int(word) for word in (text or "").split() if word.isascii() and word.isdigit() and len(word) < 5
        ]
        nodes = attempt(lambda: self.numa_nodes) or []
        if len(distances) != len(nodes) or other not in nodes:
            return False
        return distances[nodes.index(other)] <= SAME_SOCKET_DISTANCE

    def node_cpus(self, node: int) -> frozenset[int]:
        return sysfs.parse_cpulist(self.text(f"/sys/devices/system/node/node{node}/cpulist"))

    # PCI

    @cached_property
    def _pci_functions(self) -> dict[str, PciFunction]:
        return {}

    def pci_function(self, bdf: str) -> PciFunction:
        return self._pci_functions.setdefault(bdf, PciFunction(self, bdf))

    @fact
    def pci(self) -> list[PciFunction]:
        """Every PCI function. Raises Unseen."""
        names = self.ls("/sys/bus/pci/devices")
        return [
            self.pci_function(n)
            for n in names
            if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", n)
        ]

    @cached_property
    def gpus(self) -> list[PciFunction]:
        return [function for function in attempt(lambda: self.pci) or () if function.is_gpu]

    @fact
    def lspci(self) -> dict[str, pcie.PciText]:
        """``lspci -vvv`` by address. Raises Unseen."""
        reason: Unseen | None = None
        for argv in reversed(self.argvs("lspci")):
            try:
                table = pcie.parse_lspci(self.result(*argv).stdout)
            except Unseen as unseen:
                reason = unseen
                continue
            if table:
                return table
        raise reason or Unseen("lspci -vvv", self.why_not("lspci"))

    def lspci_of(self, bdf: str) -> pcie.PciText:
        """One function's block with its capabilities. Raises Unseen, also where lspci was refused them."""
        block = self.lspci.get(bdf)
        if block is None:
            raise Unseen(f"lspci of {bdf}", Sight.NOT_COLLECTED)
        if block.denied:
            raise Unseen(f"PCI capabilities of {bdf} (lspci needs root)", Sight.UNREADABLE)
        return block

    def lspci_evidence(self, text: str) -> Evidence | None:
        argvs = self.argvs("lspci")
        return self.said(*argvs[-1], text=text) if argvs else None

    # Network

    @cached_property
    def _netdevs(self) -> dict[str, Netdev]:
        return {}

    def netdev(self, name: str) -> Netdev:
        return self._netdevs.setdefault(name, Netdev(self, name))

    @cached_property
    def netdev_names(self) -> frozenset[str]:
        """Interfaces of this namespace, as far as was collected."""
        names = set(attempt(lambda: self.ls("/sys/class/net")) or ())
        names.update(attempt(lambda: self.addresses) or ())
        return frozenset(sorted(names)[:NETDEVS_MAX])

    @fact
    def addresses(self) -> dict[str, ip.LinkAddresses]:
        """``ip addr show`` by interface. Raises Unseen."""
        links: dict[str, ip.LinkAddresses] = {}
        for result in self._ip_outputs(frozenset({"addr", "address", "a"})):
            links.update(ip.parse_addr(result.stdout))
        if not links:
            raise Unseen(
                "ip addr show", self.why_not("ip") if not self.has_command("ip") else Sight.NOT_COLLECTED
            )
        return links

    @fact
    def routes(self) -> list[ip.Route]:
        """Every route of every collected table. Raises Unseen."""
        found: dict[ip.Route, None] = {}
        seen = False
        for result in self._ip_outputs(frozenset({"route", "r", "ro"}), without=frozenset({"get"})):
            table = _after(result.argv, "table") or "main"
            named = "main" if table == "all" else table
            routes = ip.parse_routes(result.stdout, table=named, device=_after(result.argv, "dev"))
            seen = seen or bool(routes) or not result.stdout.strip()
            found.update(dict.fromkeys(routes))
        if not seen:
            raise Unseen("ip route show", Sight.NOT_COLLECTED)
        return list(found)

    @fact
    def rules(self) -> list[ip.Rule]:
        """Policy rules in order. Raises Unseen."""
        found: list[ip.Rule] = []
        seen = False
        for result in self._ip_outputs(frozenset({"rule", "ru"})):
            rules = ip.parse_rules(result.stdout)
            seen = seen or bool(rules) or not result.stdout.strip()
            found.extend(rules)
        if not seen:
            raise Unseen("ip rule show", Sight.NOT_COLLECTED)
        return sorted(found, key=lambda rule: rule.preference)

    @fact
    def neighbours(self) -> list[ip.Neighbour]:
        """The neighbour table. Raises Unseen."""
        found: list[ip.Neighbour] = []
        seen = False
        for result in self._ip_outputs(frozenset({"neigh", "neighbor", "neighbour", "n"})):
            seen = True
            found.extend(ip.parse_neighbours(result.stdout, device=_after(result.argv, "dev")))
        if not seen:
            raise Unseen("ip neigh show", Sight.NOT_COLLECTED)
        return found

    def ip_evidence(self, *kinds: str) -> list[Evidence]:
        """``ip route show`` and the like as evidence, whichever form was collected."""
        return [
            self._command_evidence(result)
            for kind in kinds
            for result in self._ip_outputs(frozenset({kind}), without=frozenset({"get"}))
        ]

    def route_through(
        self, address: ip.Address, device: str | None, source: ip.Address | None
    ) -> ip.Route | None:
        """
        The route that a lookup takes to ``address``; with ``device``, one that is bound to it. Raises Unseen.

        Rules are walked in order: those for another source, mark or incoming interface do not match. Within
        a table the longest prefix wins, then the lowest metric. A table that a matching rule names and
        nobody collected makes the answer unknown.
        """
        routes = self.routes
        try:
            rules = self.rules
        except Unseen:
            # Without the rules nobody knows who uses the other tables; with the main table alone there is no doubt.
            if any(route.table not in ("main", "254", "local", "255") for route in routes):
                raise
            rules = []
        rules = rules or [ip.Rule(32766, "all", "main", "from all lookup main")]
        for rule in rules:
            if rule.table in ("local", "255", "") or any(
                w in rule.text.split() for w in ("iif", "fwmark", "to", "not")
            ):
                continue
            if rule.source != "all" and (source is None or not rule.from_address(source)):
                continue
            bound = re.search(r"\boif (\S+)", rule.text)
            if bound is not None and bound[1] != device:
                continue
            table = [route for route in routes if _same_table(route.table, rule.table)]
            if not table and not _same_table(rule.table, "default") and not self._all_tables_collected:
                raise Unseen(f"ip route show table {rule.table}", Sight.NOT_COLLECTED)
            candidates = [r for r in table if (device is None or r.leaves_by(device)) and r.covers(address)]
            if candidates:
                best = min(candidates, key=lambda route: (-route.prefix_length, route.metric))
                return best if best.kind == "unicast" else None
        return None

    @cached_property
    def _all_tables_collected(self) -> bool:
        return any("table" in argv and "all" in argv for argv in self._argv_by_tool.get("ip", ()))

    @cached_property
    def default_route_devices(self) -> frozenset[str]:
        """Interfaces that carry the default route of the main table."""
        return frozenset(
            device
            for route in attempt(lambda: self.routes) or ()
            if route.prefix_length == 0 and _same_table(route.table, "main")
            for device in (route.device, *route.devices)
            if device
        )

    @cached_property
    def bonds(self) -> dict[str, proc.Bond]:
        names = attempt(lambda: self.ls("/proc/net/bonding")) or ()
        found = {}
        for name in names:
            bond = attempt(lambda: proc.parse_bonding(self.text(f"/proc/net/bonding/{name}")))
            if bond is not None:
                found[name] = bond
        return found

    @fact
    def lldp(self) -> dict[str, tuple[str, str]]:
        """Interface → (switch, its port), where the switch tells. Raises Unseen."""
        argvs = self.argvs("lldpctl", "json") or self.argvs("lldpctl")
        if not argvs:
            raise Unseen("lldpctl -f json", self.why_not("lldpctl"))
        return tools.parse_lldp(self.command(*argvs[0]))

    @cached_property
    def _stats(self) -> dict[tuple[str, int], dict[str, int]]:
        return {}

    def stats(self, netdev: str, sample: int = 0) -> dict[str, int]:
        """``ethtool -S`` of an interface. Raises Unseen."""
        key = (netdev, sample)
        if key not in self._stats:
            try:
                self._stats[key] = ethtool.parse_stats(self.command("ethtool", "-S", netdev, sample=sample))
            except ParseError as error:
                raise Unseen(error.what, Sight.FAILED) from error
        return self._stats[key]

    def sysctl(self, name: str) -> str | None:
        """``net.ipv4.conf.all.rp_filter`` by its path below /proc/sys; None if absent. Raises Unseen."""
        text = self.get(f"/proc/sys/{name}")
        return None if text is None else text.strip()

    def conf_max(self, netdev: str, name: str) -> int:
        """
        An IPv4 setting of an interface as the kernel takes it: the larger of ``all`` and its own. Raises
        Unseen.
        """
        values = []
        reason: Unseen | None = None
        for where in ("all", netdev):
            try:
                values.append(self.number(f"/proc/sys/net/ipv4/conf/{where}/{name}"))
            except Unseen as unseen:
                reason = unseen
        if not values:
            assert reason is not None
            raise reason
        return max(values)

    # RDMA

    @fact
    def devices(self) -> list[RdmaDevice]:
        """Every RDMA device. Raises Unseen."""
        try:
            names = self.ls("/sys/class/infiniband")
        except Unseen as unseen:
            if not unseen.absent:
                raise
            return []  # the class does not exist before the first driver is loaded
        return [RdmaDevice(self, name) for name in names[:PORTS_MAX]]

    @fact
    def devinfo(self) -> dict[str, rdma.DevInfo]:
        """``ibv_devinfo``, all forms joined; the verbose one wins. Raises Unseen."""
        table: dict[str, rdma.DevInfo] = {}
        for argv in self.argvs("ibv_devinfo"):
            result = attempt(lambda: self.result(*argv))
            if result is None:
                continue
            for name, info in rdma.parse_ibv_devinfo(result.stdout).items():
                known = table.setdefault(name, rdma.DevInfo())
                known.labels.update(info.labels)
                for number, labels in info.ports.items():
                    known.ports.setdefault(number, {}).update(labels)
        if not table:
            raise Unseen("ibv_devinfo", self.why_not("ibv_devinfo"))
        return table

    def devinfo_evidence(self, device: str) -> Evidence | None:
        for argv in [*self.argvs("ibv_devinfo", device), *self.argvs("ibv_devinfo")]:
            if (seen := self.said(*argv)) is not None:
                return seen
        return None

    @fact
    def resources(self) -> dict[str, dict[str, int]]:
        """Objects in use a device. Raises Unseen."""
        return rdma.parse_resources(self.command("rdma", "resource", "show"))

    @cached_property
    def targets(self) -> list[Target]:
        entries = self.meta.get("targets")
        return [
            Target(self, str(entry.get("name") or "target"), entry["pid"])
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("pid"), int)
        ]

    @cached_property
    def wanted_names(self) -> list[str] | None:
        """Devices that the operator or every target named; None if the store chooses for itself."""
        stated = self.expect_strings("rdma_devices")
        if stated:
            return stated
        names: dict[str, None] = {}
        for target in self.targets:
            if not target.device_names:
                return None
            names.update(dict.fromkeys(target.device_names))
        return list(names) or None

    @fact
    def devices_in_scope(self) -> list[RdmaDevice]:
        """Devices the store uses: those named, else all but management and spare ones. Raises Unseen."""
        wanted = self.wanted_names
        if wanted is not None:
            named = [device for device in self.devices if device.name in wanted]
            if named or self.expect_strings("rdma_devices"):
                return named
        out = self.out_of_scope
        return [device for device in self.devices if device.name not in out]

    @fact
    def out_of_scope(self) -> dict[str, str]:
        """Devices that are listed, not judged, with the reason. Raises Unseen."""
        reasons: dict[str, str] = {}
        wanted = self.wanted_names
        if wanted is not None and (
            self.expect_strings("rdma_devices") or any(device.name in wanted for device in self.devices)
        ):
            return {
                device.name: "not used by the store" for device in self.devices if device.name not in wanted
            }
        rates = {d.name: max((rate_gbps(p) for p in d.ports), default=0.0) for d in self.devices}
        for device in self.devices:
            names = {
                name for port in device.ports for name in (port.netdev_name, *port.own_netdev_names) if name
            }
            faster = [o for o in self.devices if o is not device and rates[o.name] > rates[device.name]]
            if names & self.default_route_devices and faster:
                reasons[device.name] = "management: carries the default route and is slower than its siblings"
            elif device.ports and all(self._spare(port) for port in device.ports):
                reasons[device.name] = "spare: no cable and no address, while siblings are in use"
        return reasons if len(reasons) < len(self.devices) else {}

    def _spare(self, port: Port) -> bool:
        if port.active or not any(p.active for d in self.devices for p in d.ports):
            return False
        if any(gid.routable for gid in attempt(lambda: port.gids) or ()):
            return False
        netdev = port.netdev
        addresses = (attempt(lambda: netdev.addresses) or []) if netdev is not None else []
        if any(not a.is_link_local for a in addresses):
            return False
        return port.is_ethernet or (attempt(lambda: port.phys_state) or (0, ""))[0] in (2, 3)

    @fact
    def ports(self) -> list[Port]:
        """Ports to be judged. Raises Unseen."""
        return [port for device in self.devices_in_scope for port in device.ports]

    @fact
    def gid_uses(self) -> list[GidUse]:
        """
        Every GID that a target uses on a port with a table; without targets, what a choice by content
        takes.
        """
        uses: list[GidUse] = []
        reason: Unseen | None = None
        for target in self.targets:
            if target.protocol == "tcp":
                continue
            try:
                forced = target.gid_index
            except Unseen as unseen:
                reason = unseen
                continue
            uses.extend(self._uses(target, forced, target.ports))
        if not self.targets:
            uses.extend(self._uses(None, None, self.ports))
        if not uses and reason is not None:
            raise reason
        return uses

    def _uses(
        self, target: Target | None, forced: tuple[int, str] | None, ports: Iterable[Port]
    ) -> Iterator[GidUse]:
        for port in ports:
            if forced is not None:
                yield GidUse(target, port, forced[0], forced[1])
                continue
            best = attempt(lambda: port.best_gid)
            yield GidUse(target, port, best.index if best else None, None)

    def judged(self, subjects: Sequence[T], what: str) -> Sequence[T]:
        """The subjects if there are any; else Skip."""
        if subjects:
            return subjects
        raise Skip(f"no {what} here")


def _after(argv: Sequence[str], word: str) -> str:
    """The argument behind a word; empty if the word is not there."""
    return argv[argv.index(word) + 1] if word in argv[:-1] else ""


def rate_gbps(port: Port) -> float:
    """The port's rate, 0 if it could not be seen."""
    rate = attempt(lambda: port.rate)
    return rate.gbps if rate else 0.0


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise ParseError(f"{word[:20]!r} is no number", fix="see the raw file") from error


_TABLES = {"254": "main", "253": "default", "255": "local"}


def _same_table(one: str, other: str) -> bool:
    return _TABLES.get(one, one) == _TABLES.get(other, other)
