"""Nodes compared: what differs, how rails are cabled, and where between two nodes a packet is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from kvops.diag.checks.iommu import domain_type
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.model import Evidence, Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import ip
from kvops.diag.registry import Per, check
from kvops.host import Sight

_SYSCTLS = (
    "kernel/numa_balancing",
    "vm/zone_reclaim_mode",
    "vm/max_map_count",
    "vm/nr_hugepages",
    "net/ipv4/conf/all/arp_ignore",
    "net/ipv4/conf/all/arp_announce",
    "net/ipv4/conf/all/rp_filter",
    "net/ipv4/ip_local_port_range",
    "net/ipv4/neigh/default/gc_thresh3",
    "net/core/rmem_max",
    "net/core/wmem_max",
)
_FILES = (
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/module/mlx5_core/version",
    "/sys/module/ib_core/version",
    "/sys/module/nvidia/version",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource",
)
_ENGINE_VARIABLE = re.compile(r"^(MC_|MOONCAKE_|NCCL_|UCX_)")
_OWN_VARIABLE = re.compile(r"HOST|ADDR|_IP$|_ID$|RANK|PORT|LOG|PATH|SOCKET_IFNAME|TOPO_JSON")


def settings(host: HostFacts) -> dict[str, str]:
    """Settings that should be alike on all nodes: name → value. What was not seen is left out."""
    found: dict[str, str] = {}
    for name in _SYSCTLS:
        text = host.peek(f"/proc/sys/{name}")
        if text is not None:
            found[f"sysctl {name.replace('/', '.')}"] = " ".join(text.split())
    for path in _FILES:
        text = host.peek(path)
        if text is not None:
            found[path] = text.strip()
    words = attempt(lambda: host.kernel_words)
    if words is not None:
        kept = [
            w
            for w in words
            if re.match(
                r"(intel_iommu|amd_iommu|iommu|pci|hugepages|hugepagesz|default_hugepagesz|isolcpus|numa_balancing|tsc)=",
                w,
            )
        ]
        found["boot options"] = " ".join(sorted(kept)) or "(none of ours)"
    ports = [port for port in attempt(lambda: host.ports) or () if port.active]
    _join(found, "interface MTU", [attempt(lambda: str(p.need_netdev().mtu)) for p in ports])
    _join(found, "port rate", [attempt(lambda: f"{p.rate.gbps:g}") for p in ports])
    _join(found, "link layer", [attempt(lambda: p.link_layer) for p in ports])
    _join(found, "board", [attempt(lambda: p.device.text("board_id")) for p in ports])
    _join(
        found,
        "IOMMU domain",
        [attempt(lambda: domain_type(p.device.pci)) for p in ports],
    )
    for port in ports:
        for netdev in port.wire_netdevs:
            qos = attempt(lambda: netdev.qos)
            if qos is not None and qos.trust:
                found["trust"] = qos.trust if found.get("trust", qos.trust) == qos.trust else "mixed"
            if qos is not None and qos.pfc is not None:
                text = "".join("1" if on else "0" for on in qos.pfc)
                found["PFC"] = text if found.get("PFC", text) == text else "mixed"
    return found


def _join(found: dict[str, str], name: str, values: list[str | None]) -> None:
    seen = sorted({value for value in values if value is not None})
    if seen:
        found[name] = ", ".join(seen)


def _odd(
    name: str,
    values: dict[str, str],
    make: Callable[..., Finding],
    fix: str,
    evidence: Callable[[str], Evidence | None] | None = None,
) -> Iterator[Finding]:
    """The nodes whose value is not the usual one; the minority is named first."""
    groups: dict[str, list[str]] = {}
    for node, value in values.items():
        groups.setdefault(value, []).append(node)
    if len(groups) < 2:
        return
    usual = max(groups, key=lambda value: (len(groups[value]), value))
    for value, who in sorted(groups.items(), key=lambda item: len(item[1])):
        if value != usual:
            yield make(
                f"{name} on {', '.join(who[:8])}",
                value[:160],
                f"{usual[:160]}, as {len(groups[usual])} other{'s' if len(groups[usual]) > 1 else ''}",
                fix=fix,
                persists=None,
                evidence=[evidence(node) for node in who[:2]] if evidence else [],
            )


@check(
    "xnode.config_drift",
    title="The nodes are configured alike",
    why="'Works on 30 of 32': the other two differ in one setting.",
    source="settings of all nodes against the golden node, or the majority",
    fix="set it as the others have it",
    per=Per.FLEET,
    kind="X",
)
def config_drift(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    every = {host.name: settings(host) for host in nodes}
    names = dict.fromkeys(name for found in every.values() for name in found)
    compared = 0
    by_name = {host.name: host for host in nodes}
    for name in names:
        values = {node: found[name] for node, found in every.items() if name in found}
        if len(values) < 2:
            continue
        compared += 1
        path = (
            name
            if name.startswith("/")
            else f"/proc/sys/{name[7:].replace('.', '/')}"
            if name.startswith("sysctl ")
            else ""
        )
        where = (lambda node, path=path: by_name[node].at(path)) if path else None
        yield from _odd(name, values, warn, "set it as the others have it", where)
    if not compared:
        raise Unseen("a setting of two nodes", Sight.NOT_COLLECTED)


@check(
    "xnode.env_drift",
    title="The engines have the same variables",
    why="One side marks, pads or chooses otherwise than its peers.",
    source="/proc/<pid>/environ: MC_*, MOONCAKE_*, NCCL_*, UCX_*",
    fix="set the same variables on all nodes",
    per=Per.FLEET,
    kind="X",
    root="p",
)
def env_drift(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    environs: dict[str, dict[str, str]] = {}
    where: dict[str, Evidence] = {}
    for host in nodes:
        merged: dict[str, set[str]] = {}
        seen = False
        for target in host.targets:
            environ = attempt(lambda: target.environ)
            if environ is None:
                continue
            seen = True
            where[host.name] = target.evidence("environ")
            for name, value in environ.items():
                if _ENGINE_VARIABLE.match(name) and not _OWN_VARIABLE.search(name):
                    merged.setdefault(name, set()).add(value)
        if seen:
            environs[host.name] = {name: ",".join(sorted(values)) for name, values in merged.items()}
    if len(environs) < 2:
        raise Unseen("environments of two nodes' targets", Sight.NOT_COLLECTED)
    for name in dict.fromkeys(name for environ in environs.values() for name in environ):
        if name == "MC_GID_INDEX" and _gids_alike(nodes):
            continue  # the same kind of slot lies at another index there: that is right
        values = {node: environ.get(name, "(not set)") for node, environ in environs.items()}
        yield from _odd(name, values, warn, f"export {name} with one value on all nodes", where.get)


def _gids_alike(nodes: Sequence[HostFacts]) -> bool:
    kinds = {
        (gid.kind, gid.ipv4 is not None, gid.link_local)
        for host in nodes
        for use in attempt(lambda: host.gid_uses) or ()
        if (gid := attempt(lambda: use.gid)) is not None
    }
    return len(kinds) == 1


def _rail_of(host: HostFacts) -> dict[str, tuple[str, str]]:
    """PCI address → (device, IPv4 prefix) of each rail. Raises Unseen."""
    found = {}
    for port in host.ports:
        netdev = port.netdev
        if netdev is None or port.device.pci is None:
            continue
        networks = [a.network for a in netdev.addresses if a.version == 4 and a.network.prefixlen < 31]
        if networks:
            found[port.device.pci.bdf] = (port.device.name, str(networks[0]))
    return found


@check(
    "xnode.nic_map",
    title="The same slot is the same rail on every node",
    why="Cables swapped between two rails: pairs meet on the wrong switch.",
    source="device name, PCI slot and subnet of every rail",
    fix="swap the cables, or rename and readdress the devices",
    per=Per.FLEET,
    kind="X",
)
def nic_map(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    maps = {host.name: found for host in nodes if (found := attempt(lambda: _rail_of(host)))}
    if len(maps) < 2:
        raise Unseen("rails of two nodes (ip addr)", Sight.NOT_COLLECTED)
    reference = max(
        maps, key=lambda node: sum(maps[node].items() == other.items() for other in maps.values())
    )
    by_name = {host.name: host for host in nodes}
    for node, rails in maps.items():
        usual = maps[reference]
        same_slots = set(rails) == set(usual)
        mine = rails if same_slots else {name: (name, net) for name, net in rails.values()}
        theirs = usual if same_slots else {name: (name, net) for name, net in usual.values()}
        known = {net for _, net in mine.values()} & {net for _, net in theirs.values()}
        for slot, (name, network) in mine.items():
            other = theirs.get(slot)
            if other is not None and other[1] != network and network in known and other[1] in known:
                yield fail(
                    f"{node} {name} ({slot})",
                    f"in {network}",
                    f"{other[1]}, as {other[0]} on {reference}",
                    fix="swap the cables of the two rails, or their addresses",
                    persists=True,
                    evidence=by_name[node].ip_evidence("addr"),
                )


def pings(host: HostFacts) -> dict[tuple[str, str], bool]:
    """(own interface, peer's address) → whether it answered; only pings of the usual size."""
    found: dict[tuple[str, str], bool] = {}
    for argv in host.argvs("ping", "-I"):
        if "-M" in argv or "-s" in argv:
            continue
        answer = ip.parse_ping(host.snapshot.run(*argv).stdout)
        address = ip.parse_address(argv[-1])
        index = argv.index("-I")
        if answer is not None and address is not None and index + 1 < len(argv):
            found[argv[index + 1], str(address)] = answer
    for probe in host.meta.get("probes") or []:
        if (
            isinstance(probe, dict)
            and probe.get("probe") == "icmp"
            and isinstance(probe.get("answered"), bool)
        ):
            found[str(probe.get("netdev")), str(probe.get("address"))] = probe["answered"]
    return found


@check(
    "xnode.rail_connectivity",
    title="Every rail reaches every rail",
    why="On a rail-only fabric half of the pairs retry out, unless the engine keeps to the same rail.",
    source="pings between every own and every peer interface",
    fix="MC_ENABLE_DEST_DEVICE_AFFINITY=1 on all nodes, or routes between the rails",
    undo="unset it",
    per=Per.FLEET,
    kind="A",
    nodes_min=1,
)
def rail_connectivity(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    judged = 0
    for host in nodes:
        matrix = pings(host)
        if not matrix:
            continue
        scope = {p.netdev_name for p in attempt(lambda: host.ports) or ()}
        matrix = {key: ok for key, ok in matrix.items() if key[0] in scope or not scope - {None}}
        own = sorted({netdev for netdev, _ in matrix})
        addresses = sorted({address for _, address in matrix})
        if len(own) < 2 or len(addresses) < 2:
            continue
        judged += 1
        reached = {a: [n for n in own if matrix.get((n, a))] for a in addresses}
        missed = {a: [n for n in own if matrix.get((n, a)) is False] for a in addresses}
        live = [a for a in addresses if reached[a]]
        split = [a for a in live if missed[a]]
        each_reaches = all(any(matrix.get((n, a)) for a in live) for n in own)
        if not split or not each_reaches:
            continue
        affinity = bool(host.targets) and all(attempt(lambda: t.destination_affinity) for t in host.targets)
        first = split[0]
        evidence = [
            seen for n in missed[first][:2] if (seen := host.said("ping", "-I", n, first)) is not None
        ]
        evidence += [
            t.evidence("environ") for t in host.targets[:1] if attempt(lambda: t.environ) is not None
        ]
        yield finding(
            Outcome.INFO if affinity else Outcome.WARN,
            f"{host.name} {', '.join(own)}",
            f"only the same rail answers: {first} by {', '.join(reached[first])}, not by "
            f"{', '.join(missed[first])}",
            "every pair, or MC_ENABLE_DEST_DEVICE_AFFINITY" + (" (it is set)" if affinity else ""),
            fix="export MC_ENABLE_DEST_DEVICE_AFFINITY=1 on all nodes, or route between the rails",
            persists=True,
            evidence=evidence,
        )
    if not judged:
        raise Unseen("pings between rails (--probe icmp)", nodes[0].why_not("ping"))


@check(
    "xnode.switch_ports",
    title="Each rail ends at its own switch, as planned",
    why="Two rails on one switch: one switch takes both away.",
    source="lldpctl -f json, the plan in the profile",
    fix="move the cable to the planned switch port",
    per=Per.FLEET,
    kind="X",
    root="y",
    nodes_min=1,
)
def switch_ports(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    seen = False
    reason: Unseen | None = None
    for host in nodes:
        try:
            table = host.lldp
        except Unseen as unseen:
            reason = unseen
            continue
        names = {p.netdev_name for p in attempt(lambda: host.ports) or ()} | {
            n for p in attempt(lambda: host.ports) or () for n in p.own_netdev_names
        }
        rails = {name: where for name, where in table.items() if name in names}
        if not rails:
            continue
        seen = True
        evidence = [host.said("lldpctl")]
        plan = host.expect("switch_ports")
        for name, where in rails.items():
            planned = plan.get(name) if isinstance(plan, dict) else None
            if isinstance(planned, str) and planned not in (where[0], ":".join(where), " ".join(where)):
                yield warn(
                    f"{host.name} {name}",
                    f"at {where[0]} {where[1]}",
                    planned,
                    fix="move the cable",
                    persists=True,
                    evidence=evidence,
                )
        groups: dict[str, list[str]] = {}
        for name, (switch, _) in rails.items():
            groups.setdefault(switch, []).append(name)
        crowded = {switch: who for switch, who in groups.items() if len(who) > 1}
        if len(groups) > 1 and crowded and len(set(map(len, groups.values()))) > 1:
            for switch, who in crowded.items():
                yield warn(
                    f"{host.name} {', '.join(who)}",
                    f"on one switch: {switch}",
                    f"spread over {len(groups)} switches evenly",
                    fix="move one cable to the switch of its rail",
                    persists=True,
                    evidence=evidence,
                )
        elif len(groups) == 1 and len(rails) > 1:
            many = len(rails) == 2
            yield finding(
                Outcome.WARN if many else Outcome.INFO,
                f"{host.name} {', '.join(rails)}",
                f"all on {next(iter(groups))}",
                "a switch for each rail",
                fix="move a cable to another switch, unless one switch is the design",
                persists=True,
                evidence=evidence,
            )
    if not seen:
        if reason is not None:
            raise reason
        raise Skip("LLDP shows no rail (it may be done in firmware)")


@check(
    "xnode.peer_counters",
    title="Where a packet is lost",
    why="Retransmissions here and drops there name the hop.",
    source="retransmissions of one node against discards of the others over the window",
    fix="look at the port that drops",
    per=Per.FLEET,
    kind="X",
)
def peer_counters(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    losing: list[str] = []
    dropping: list[str] = []
    seen = False
    for host in nodes:
        for port in attempt(lambda: host.ports) or ():
            steps = attempt(lambda: port.steps("packet_seq_err", "local_ack_timeout_err"))
            wire = attempt(lambda: port.wire_steps)
            seen = seen or steps is not None or wire is not None
            if steps and sum(steps.values()) > 0:
                losing.append(f"{host.name} {port.label} +{sum(steps.values())}")
            drops = sum(
                n for name, n in (wire or {}).items() if name in ("rx_discards_phy", "tx_discards_phy")
            )
            if drops > 0:
                dropping.append(f"{host.name} {port.label} +{drops}")
    if not seen:
        raise Unseen("counters of two nodes over a window", Sight.NOT_COLLECTED)
    if losing and dropping:
        yield info(
            "; ".join(losing[:4]),
            f"lost packets; dropped at {'; '.join(dropping[:4])}",
            "",
            fix="look at the port that drops",
        )
