"""The way of a transfer along each rail, device by device, with the hop marked where it goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.rdma import Port
from kvops.diag.model import LOUD, Finding, Outcome, Result

RAILS_MAX = 64  # of one host
_ORDER = list(Outcome)  # from worst to best

# Hop → the families of checks that judge it, in the order in which a transfer meets them.
STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("store", ("proc", "limits", "mem", "gdr")),
    ("NIC", ("driver", "link")),
    ("PCIe", ("pcie", "iommu")),
    ("NUMA", ("numa", "cpu")),
    ("GID", ("gid",)),
    ("IP", ("ip", "mtu")),
    ("QoS", ("qos",)),
    ("switch", ("ctr", "ovs")),
    ("peer", ("xnode", "probe")),
)
MARKS = {Outcome.FAIL: "✗", Outcome.WARN: "!", Outcome.UNKNOWN: "?", Outcome.OK: "ok", Outcome.INFO: "ok"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One station: what it is on this rail, and the worst that was found there."""

    stage: str
    devices: tuple[str, ...]  # outermost first; empty if nothing is known
    outcome: Outcome
    checks: tuple[str, ...] = ()  # that warn or fail here

    @property
    def text(self) -> str:
        """``PCIe 0000:15:01.0, 0000:18:00.0 ✗``."""
        return " ".join(
            (self.stage, *((", ".join(self.devices),) if self.devices else ()), MARKS[self.outcome])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """One RDMA port with everything between the store's memory on one side and a peer on the other."""

    name: str  # "mlx5_0/1"; empty on a host without RDMA ports
    hops: tuple[Hop, ...]

    @property
    def outcome(self) -> Outcome:
        return min((hop.outcome for hop in self.hops), key=_ORDER.index)

    @property
    def text(self) -> str:
        return " → ".join(hop.text for hop in self.hops)


def rails_of(host: HostFacts, results: Sequence[Result]) -> list[Rail]:
    """Every judged port's way, the worst first; one nameless way where there is no port."""
    mine = [result for result in results if result.node == host.name or _concerns(result, host.name)]
    ports = (attempt(lambda: host.ports) or [])[:RAILS_MAX]
    names = {port: _names(port) for port in ports}
    everyone = frozenset(name for own in names.values() for name in own)
    rails = [
        Rail(
            name=port.label,
            hops=tuple(
                _hop(stage, _devices(stage, host, port), mine, names[port], everyone) for stage in STAGES
            ),
        )
        for port in ports
    ]
    if not rails:
        rails = [Rail(name="", hops=tuple(_hop(s, (), mine, frozenset(), frozenset()) for s in STAGES))]
    return sorted(rails, key=lambda rail: _ORDER.index(rail.outcome))


def _concerns(result: Result, node: str) -> bool:
    return result.node == "fleet" and any(node in _words(finding.subject) for finding in result.findings)


def _words(text: str) -> set[str]:
    return {
        word
        for part in re.split(r"[\s,()]+", text)
        for word in (part, part.partition("/")[0], part.strip(":;"))
    }


def _names(port: Port) -> frozenset[str]:
    """Whatever a finding may call this rail by: device, port, function, bridges, interfaces, addresses."""
    names = {port.label, port.device.name, *port.own_netdev_names}
    names |= {netdev.name for netdev in port.wire_netdevs} | (
        {port.netdev_name} if port.netdev_name else set()
    )
    function = port.device.pci
    if function is not None:
        names |= {function.bdf, *function.ancestors}
    return frozenset(names)


def _hop(
    stage: tuple[str, tuple[str, ...]],
    devices: tuple[str, ...],
    results: Iterable[Result],
    own: frozenset[str],
    everyone: frozenset[str],
) -> Hop:
    """A finding that names a rail counts on that rail alone; one that names none counts on all of them."""
    name, families = stage
    loud: dict[str, Outcome] = {}
    judged = False
    for result in results:
        if result.check.partition(".")[0] not in families:
            continue
        judged = judged or result.outcome in (Outcome.OK, Outcome.INFO, *LOUD)
        for finding in result.findings:
            if finding.severity in LOUD and _is_here(finding, own, everyone):
                known = loud.get(result.check, Outcome.SKIPPED)
                loud[result.check] = min(known, finding.severity, key=_ORDER.index)
    quiet = Outcome.OK if judged else Outcome.UNKNOWN
    worst = min(loud.values(), key=_ORDER.index, default=quiet)
    return Hop(stage=name, devices=devices, outcome=worst, checks=tuple(loud))


def _is_here(finding: Finding, own: frozenset[str], everyone: frozenset[str]) -> bool:
    named = _words(finding.subject) & everyone
    return not named or bool(named & own)


def _devices(stage: tuple[str, tuple[str, ...]], host: HostFacts, port: Port) -> tuple[str, ...]:
    """What a hop is on this rail, as far as it is known."""
    match stage[0]:
        case "store":
            return tuple(target.name for target in host.targets if port in target.ports)[:4]
        case "NIC":
            return (port.label,)
        case "PCIe":
            function = port.device.pci
            return (function.bdf, *function.ancestors) if function is not None else ()
        case "NUMA":
            node = port.device.numa_node
            return (f"node {node}",) if node is not None and node >= 0 else ()
        case "GID":
            uses = [
                use
                for use in attempt(lambda: host.gid_uses) or ()
                if use.port is port and use.gid is not None
            ]
            return tuple(f"{use.index} {use.gid.text}" for use in uses[:1] if use.gid is not None)
        case "IP":
            return tuple(netdev.name for netdev in port.wire_netdevs)[:4]
        case "QoS":
            return (f"priority {host.roce_priority}",) if host.roce_priority is not None else ()
        case "switch":
            table = attempt(lambda: host.lldp) or {}
            found = [table[netdev.name] for netdev in port.wire_netdevs if netdev.name in table]
            return tuple(dict.fromkeys(" ".join(where).strip() for where in found))
        case _:
            return tuple(name for name, _ in host.peers)[:4]
