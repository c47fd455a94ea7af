"""Network devices of a host, as checks see them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from kvops.diag.facts.fact import attempt, counter_step, fact
from kvops.diag.model import Evidence, Unseen
from kvops.diag.parsers import ethtool, ip, qos, sysfs

if TYPE_CHECKING:
    from kvops.diag.facts.host import HostFacts


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
