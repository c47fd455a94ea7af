"""IP under RoCE: addresses, routes, ARP and filters of hosts with several NICs."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from kvops.diag.checks.gid import fabric_routed
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.netdev import Netdev
from kvops.diag.facts.rdma import Port
from kvops.diag.facts.target import Target
from kvops.diag.model import Evidence, Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import ip, proc, sysfs, tools
from kvops.diag.registry import Per, check
from kvops.host import Sight

ROCE_UDP_PORT = 4791
HANDSHAKE_PORT = 12001  # [M]
RPC_PORTS = range(15000, 17001)  # [M]
ARP_IGNORE_WANTED, ARP_ANNOUNCE_WANTED = 1, 2
HOST_PREFIX = 31  # /31 and /32 are point-to-point designs of clouds


def rails(host: HostFacts) -> dict[str, Port]:
    """Interfaces of judged RoCE ports in this namespace, each once."""
    found: dict[str, Port] = {}
    for port in host.ports:
        netdev = port.netdev
        if port.is_roce and netdev is not None and netdev.present:
            found.setdefault(netdev.name, port)
    return found


def _networks(netdev: Netdev, version: int = 4) -> list[ip.Interface]:
    return [a for a in netdev.addresses if a.version == version and not a.is_link_local]


def shared_subnets(host: HostFacts) -> dict[str, list[str]]:
    """IPv4 prefixes that two or more rails have. Raises Unseen."""
    owners: dict[str, list[str]] = {}
    for name in rails(host):
        for interface in _networks(host.netdev(name)):
            if interface.network.prefixlen < HOST_PREFIX:
                owners.setdefault(str(interface.network), []).append(name)
    return {network: names for network, names in owners.items() if len(set(names)) > 1}


def _has_source_rule(host: HostFacts, name: str) -> bool:
    """Whether every IPv4 address of a rail has a rule of its own."""
    rules = attempt(lambda: host.rules) or []
    addresses = _networks(host.netdev(name))
    return bool(addresses) and all(
        any(rule.source != "all" and rule.from_address(a.ip) for rule in rules) for a in addresses
    )


def flux(host: HostFacts) -> list[tuple[str, list[str]]]:
    """Subnets on which the wrong rail answers ARP: (prefix, rails). Raises Unseen."""
    found = []
    for network, names in shared_subnets(host).items():
        loose = [
            name
            for name in names
            if host.conf_max(name, "arp_ignore") == 0
            and not (attempt(lambda: host.conf_max(name, "arp_filter")) or 0)
        ]
        if loose and not all(_has_source_rule(host, name) for name in names):
            found.append((network, names))
    return found


@check(
    "ip.address_missing",
    title="Each rail has an address",
    why="Without one there is no routable GID.",
    source="ip addr of each RDMA interface",
    fix="ip addr add <address>/<prefix> dev <netdev>, and in the network configuration",
    undo="ip addr del <address>/<prefix> dev <netdev>",
    per=Per.ROCE,
)
def address_missing(port: Port) -> Iterator[Finding]:
    host = port.host
    netdev = port.need_netdev()
    addresses = netdev.addresses
    if any(not a.is_link_local for a in addresses):
        return
    if any(gid.routable and not gid.empty for gid in attempt(lambda: port.gids) or ()) and host.is_container:
        raise Skip(f"{port.label}: its address may lie in another namespace")
    yield fail(
        f"{port.label} {netdev.name}",
        "no IPv4 and no global IPv6 address",
        "one: the GID comes from it",
        fix=f"ip addr add <address>/<prefix> dev {netdev.name}",
        persists=False,
        evidence=host.ip_evidence("addr", "address"),
    )


@check(
    "ip.mac_multicast",
    title="The interface has a unicast MAC",
    why="Firmware refuses a RoCE address on a multicast MAC: no GID at all.",
    source="<netdev>/address, lowest bit of the first octet",
    fix="ip link set <netdev> address <unicast MAC>, where the wrong one was set",
    per=Per.ROCE,
)
def mac_multicast(port: Port) -> Iterator[Finding]:
    netdev = port.need_netdev()
    mac = netdev.text("address")
    match = re.match(r"([0-9a-fA-F]{2}):", mac)
    if match is None:
        raise Unseen(f"{netdev.path}/address", Sight.FAILED)
    if int(match[1], 16) & 1:
        good = f"{int(match[1], 16) & 0xFE:02x}{mac[2:]}"
        yield fail(
            f"{port.label} {netdev.name}",
            mac,
            "an even first octet (locally administered ones are fine)",
            fix=f"ip link set {netdev.name} down; ip link set {netdev.name} address {good}; ip link set "
            f"{netdev.name} up",
            persists=False,
            evidence=[port.host.at(f"{netdev.path}/address")],
        )


@check(
    "ip.subnet_overlap",
    title="Each rail has a subnet of its own",
    why="With one subnet on two interfaces the kernel chooses which one sends.",
    source="prefixes of the RDMA interfaces, ip addr",
    fix="one subnet per rail, or source rules with arp_ignore 1 and arp_announce 2",
)
def subnet_overlap(host: HostFacts) -> Iterator[Finding]:
    if not rails(host):
        raise Skip("no RoCE rail here")
    fluxing = {network for network, _ in attempt(lambda: flux(host)) or ()}
    evidence = host.ip_evidence("addr", "address")
    for network, names in shared_subnets(host).items():
        yield finding(
            Outcome.FAIL if network in fluxing else Outcome.INFO,
            network,
            f"on {', '.join(names)}" + (", and either answers ARP for both" if network in fluxing else ""),
            "one subnet per rail",
            fix="give each rail its own subnet; until then see ip.arp_flux",
            persists=True,
            evidence=evidence,
        )
    if not host.is_container:
        return
    own = set(rails(host))
    for name in own:
        for interface in _networks(host.netdev(name)):
            for other, link in host.addresses.items():
                if other in own or other == "lo":
                    continue
                clash = [
                    a for a in link.addresses if a.version == 4 and a.network.overlaps(interface.network)
                ]
                if clash and interface.network.prefixlen < HOST_PREFIX:
                    yield fail(
                        f"{name} and {other}",
                        f"{interface.network} overlaps {clash[0].network}",
                        "the pod's network and the rail's apart",
                        fix="change the range of the secondary network",
                        persists=True,
                        evidence=evidence,
                    )


@check(
    "ip.arp_flux",
    title="Only the right rail answers ARP",
    why="Peers learn the MAC of the wrong NIC: packets reach a NIC without the queue pair, retry exceeded.",
    source="/proc/sys/net/ipv4/conf/{all,<if>}/{arp_ignore,arp_announce,arp_filter}, shared subnets, ip rule",
    fix="sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2, and per-source tables",
    undo="sysctl -w net.ipv4.conf.all.arp_ignore=0 net.ipv4.conf.all.arp_announce=0",
)
def arp_flux(host: HostFacts) -> Iterator[Finding]:
    if len(rails(host)) < 2:
        raise Skip("fewer than two rails here")
    for network, names in flux(host):
        yield fail(
            f"{', '.join(names)} in {network}",
            "one subnet, arp_ignore 0, no source rules",
            f"arp_ignore {ARP_IGNORE_WANTED}, arp_announce {ARP_ANNOUNCE_WANTED}, or a subnet per rail",
            fix="sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 && ip neigh "
            "flush all (on peers)",
            persists=False,
            evidence=[
                host.at("/proc/sys/net/ipv4/conf/all/arp_ignore"),
                host.at(f"/proc/sys/net/ipv4/conf/{names[0]}/arp_ignore"),
                *host.ip_evidence("route", "rule", "neigh"),
            ],
        )


def _reverse_path_step(host: HostFacts) -> tuple[int | None, Evidence | None]:
    """(packets dropped by reverse-path filtering over the window, where it says so)."""
    for argv in host.argvs("nstat"):
        texts = [attempt(lambda: host.command(*argv, sample=s)) for s in (0, 1)]
        values = [ip.parse_nstat(text or "").get("TcpExtIPReversePathFilter") for text in texts]
        if values[0] is not None and values[1] is not None:
            step = values[1] - values[0] if host.snapshot.has_window else None
            return step, host.said(*argv)
    texts = [host.peek("/proc/net/netstat", s) for s in (0, 1)]
    values = [ip.parse_netstat_ext(text or "").get("TcpExtIPReversePathFilter") for text in texts]
    if values[0] is not None and values[1] is not None:
        step = values[1] - values[0] if host.snapshot.has_window else None
        return step, host.at("/proc/net/netstat", f"IPReversePathFilter {values[0]} → {values[1]}")
    return None, None


def _asymmetric(host: HostFacts, name: str) -> str | None:
    """Whom this rail hears from while the way back leaves by another; None if nobody. Raises Unseen."""
    own = _networks(host.netdev(name)) if attempt(lambda: host.addresses) else []
    source = own[0].ip if own else None
    if source is None:
        link = next((r for r in host.routes if r.device == name and r.source), None)
        source = ip.parse_address(link.source) if link is not None else None
    peers = [address for _, addresses in host.peers for address in addresses if address.version == 4]
    if peers:
        ways = {address: host.route_through(address, None, source) for address in peers}
        leaving = [address for address, way in ways.items() if way is not None and way.leaves_by(name)]
        if not leaving and any(way is not None for way in ways.values()):
            address, way = next((a, w) for a, w in ways.items() if w is not None)
            return f"{address} goes back by {way.device}"
        return None
    others = set(rails(host)) - {name}
    for route in host.routes:
        if (
            route.device in others
            and isinstance(route.network, ipaddress.IPv4Network)
            and route.prefix_length
        ):
            shared = any(i.network.overlaps(route.network) for i in own)
            if not (route.gateway or shared):
                continue
            probe = route.network.network_address + 1
            back = host.route_through(probe, None, source)
            if back is not None and not back.leaves_by(name) and (shared or back.gateway):
                return f"{route.network} goes back by {back.device}"
    return None


@check(
    "ip.rp_filter",
    title="Reverse-path filtering fits the routes",
    why="Strict filtering drops ARP, connection and handshake packets that arrive where the way back does "
    "not lead. "
    "RoCE data in hardware are not filtered.",
    source="/proc/sys/net/ipv4/conf/{all,<if>}/rp_filter (larger of both), ip route, "
    "TcpExtIPReversePathFilter",
    fix="sysctl -w net.ipv4.conf.<if>.rp_filter=2, or per-source tables",
    undo="sysctl -w net.ipv4.conf.<if>.rp_filter=1",
    kind="S/Δ",
)
def rp_filter(host: HostFacts) -> Iterator[Finding]:
    names = list(rails(host))
    if not names:
        raise Skip("no RoCE rail here")
    step, where = _reverse_path_step(host)
    strict = [name for name in names if host.conf_max(name, "rp_filter") == 1]
    if step and strict:
        yield fail(
            ", ".join(strict),
            f"{step} packets dropped by the reverse-path test in {host.need_window():g} s",
            "+0",
            fix="; ".join(f"sysctl -w net.ipv4.conf.{name}.rp_filter=2" for name in ["all", *strict][:4]),
            persists=False,
            evidence=[host.at("/proc/sys/net/ipv4/conf/all/rp_filter"), where, *host.ip_evidence("route")],
        )
        return
    for name in strict:
        reason = _asymmetric(host, name)
        if reason is not None:
            yield warn(
                name,
                f"rp_filter 1 (strict), but {reason}",
                "2 (loose), or a route back through it",
                fix=f"sysctl -w net.ipv4.conf.all.rp_filter=2 net.ipv4.conf.{name}.rp_filter=2",
                persists=False,
                evidence=[
                    host.at("/proc/sys/net/ipv4/conf/all/rp_filter"),
                    host.at(f"/proc/sys/net/ipv4/conf/{name}/rp_filter"),
                    *host.ip_evidence("route"),
                    where,
                ],
            )


@check(
    "ip.peer_route",
    title="Each rail has a route to its peers",
    why="The lookup of a queue pair is bound to its NIC: without a route through it the kernel takes the "
    "peer for "
    "on-link, ARP gets no answer, RTR times out [110]; lookups that are not bound leave by the management "
    "port.",
    source="ip route show table all, ip rule, ip route get <peer> from <own> oif <netdev>",
    fix="ip route add <peer net> via <gateway> dev <netdev> table N; ip rule add from <own> lookup N",
    undo="ip rule del from <own> lookup N; ip route flush table N",
    per=Per.ROCE,
)
def peer_route(port: Port) -> Iterator[Finding]:
    host = port.host
    netdev = port.need_netdev()
    if not host.peers:
        raise Skip("no peers are known")
    own = [a for a in attempt(lambda: netdev.addresses) or [] if not a.is_link_local]
    if not own:
        own = [
            ipaddress.ip_interface(str(gid.ip)) for gid in attempt(lambda: port.gids) or () if gid.routable
        ]
    families = {a.version for a in own} or {4}
    cut: list[str] = []
    partial: list[str] = []
    for node, addresses in host.peers:
        usable = [a for a in addresses if a.version in families]
        if not usable:
            continue
        reached = []
        for address in usable:
            source = next((a.ip for a in own if a.version == address.version), None)
            if host.route_through(address, netdev.name, source) is not None:
                reached.append(address)
        if not reached:
            cut.append(f"{node} ({', '.join(map(str, usable[:3]))})")
        elif len(reached) < len(usable):
            partial.append(f"{node}: {', '.join(str(a) for a in usable if a not in reached)}")
    evidence = host.ip_evidence("route", "rule")
    evidence += [seen for argv in host.argvs("ip", "get") if (seen := host.said(*argv)) is not None]
    address_text = str(own[0].ip) if own else "<own>"
    if cut:
        yield fail(
            f"{port.label} {netdev.name}",
            f"no route through it to {'; '.join(cut[:4])}",
            "a connected or gateway route through this NIC",
            fix=f"ip route add <peer net> via <gateway of the rail> dev {netdev.name} table 100; ip rule "
            f"add from {address_text} lookup 100",
            persists=False,
            evidence=evidence,
        )
    elif partial:
        affinity = bool(host.targets) and all(attempt(lambda: t.destination_affinity) for t in host.targets)
        yield finding(
            Outcome.INFO if affinity else Outcome.WARN,
            f"{port.label} {netdev.name}",
            f"only the same rail of a peer is reached; not {'; '.join(partial[:3])}",
            "every rail of a peer, or MC_ENABLE_DEST_DEVICE_AFFINITY",
            fix="route between the rails, or set MC_ENABLE_DEST_DEVICE_AFFINITY=1",
            persists=True,
            evidence=evidence,
        )


@check(
    "ip.neigh_failed",
    title="Peers in use answer ARP",
    why="RTR times out [110] when the neighbour cannot be resolved.",
    source="ip neigh for peers and gateways, of the family of the GID in use",
    fix="check VLAN, cable and gateway of the rail",
)
def neigh_failed(host: HostFacts) -> Iterator[Finding]:
    found = rails(host)
    if not found:
        raise Skip("no RoCE rail here")
    used = {address for _, addresses in host.peers for address in addresses}
    used |= {
        gateway
        for route in attempt(lambda: host.routes) or ()
        if route.device in found and (gateway := ip.parse_address(route.gateway)) is not None
    }
    logs = " ".join(target.log[1] for target in host.targets if target.log is not None)
    for neighbour in host.neighbours:
        port = found.get(neighbour.device)
        if port is None or neighbour.state not in ("FAILED", "INCOMPLETE"):
            continue
        mentioned = (
            bool(logs)
            and re.search(rf"(?<![\d.]){re.escape(str(neighbour.address))}(?![\d.])", logs) is not None
        )
        if neighbour.address not in used and not mentioned:
            continue
        gid = attempt(lambda: port.best_gid)
        if gid is not None and gid.routable and (gid.ipv4 is not None) != (neighbour.address.version == 4):
            continue
        yield fail(
            f"{port.label} {neighbour.device}",
            f"{neighbour.address} {neighbour.state}",
            "REACHABLE or STALE",
            fix=f"arping -I {neighbour.device} {neighbour.address}; check VLAN, cable, gateway",
            persists=None,
            evidence=host.ip_evidence("neigh"),
        )


@check(
    "ip.neigh_overflow",
    title="The neighbour table has room",
    why="In a big flat network entries are dropped, and connections time out at random.",
    source="/proc/sys/net/ipv4/neigh/default/gc_thresh{2,3}; dmesg 'neighbor table overflow'",
    fix="sysctl -w net.ipv4.neigh.default.gc_thresh3=16384 net.ipv4.neigh.default.gc_thresh2=8192",
    undo="write the former values",
    kind="S/L",
    root="p",
)
def neigh_overflow(host: HostFacts) -> Iterator[Finding]:
    folder = "/proc/sys/net/ipv4/neigh/default"
    lines = attempt(
        lambda: host.log_lines(r"neighbou?r table overflow|table overflow!.*neigh", ignore_case=True)
    )
    fix = "sysctl -w net.ipv4.neigh.default.gc_thresh3=16384 net.ipv4.neigh.default.gc_thresh2=8192"
    if lines:
        yield fail(
            "neighbour table",
            f"overflowed {len(lines)} times since boot",
            "never",
            fix=fix,
            persists=False,
            evidence=[host.log_evidence(lines[-1]), host.at(f"{folder}/gc_thresh3")],
        )
        return
    limit = attempt(lambda: host.number(f"{folder}/gc_thresh2")) or attempt(
        lambda: host.number(f"{folder}/gc_thresh3")
    )
    if limit is None:
        if lines is None:
            host.text(f"{folder}/gc_thresh2")
        return
    peers = host.expect_int("peer_count") or sum(len(addresses) for _, addresses in host.peers)
    needed = peers * max(len(attempt(lambda: rails(host)) or {}), 1)
    if needed > limit:
        yield warn(
            "neighbour table",
            f"gc_thresh {limit}",
            f"{needed}: peers × rails",
            fix=fix,
            persists=False,
            evidence=[host.at(f"{folder}/gc_thresh2")],
        )


@check(
    "ip.duplicate",
    title="No other host has our address",
    why="Two hosts answer, and queue pairs reach the wrong one.",
    source="arping -D, IPv6 duplicate address detection, dmesg",
    fix="change one of the two",
    kind="A",
    root="y",
)
def duplicate(host: HostFacts) -> Iterator[Finding]:
    seen = False
    for argv in host.argvs("arping", "-D"):
        result = attempt(lambda: host.result(*argv))
        if result is None:
            continue
        answer = attempt(lambda: tools.parse_arping(result.stdout))
        if answer is None:
            continue
        seen = True
        replies, owners = answer
        if replies:
            yield fail(
                argv[-1],
                f"{replies} answers to a duplicate check, from {', '.join(sorted(owners)[:4]) or 'somebody'}",
                "none",
                fix="change one of the two addresses",
                persists=True,
                evidence=[host.said(*argv)],
            )
    for name, link in (attempt(lambda: host.addresses) or {}).items():
        for address in link.duplicates:
            yield fail(
                f"{name} {address}",
                "duplicate address detection failed",
                "a free address",
                fix=f"ip addr del {address} dev {name}; choose another",
                persists=False,
                evidence=host.ip_evidence("addr", "address"),
            )
    lines = attempt(lambda: host.log_lines(r"duplicate address|IPv6 duplicate address .* detected"))
    for line in (lines or [])[-1:]:
        yield fail(
            "an interface",
            line.text[:160],
            "a free address",
            fix="change one of the two addresses",
            persists=True,
            evidence=[host.log_evidence(line)],
        )
    if not seen and lines is None:
        raise Unseen("arping -D", host.why_not("arping"))


def _ports_in(text: str) -> set[int] | None:
    """Ports that a rule names, as far as they concern us; None if it names none."""
    found: set[int] = set()
    named = False
    pattern = r"(?:--dports?|dport)\s+(?:\{([^}]*)\}|(\S+))"
    for match in re.finditer(pattern, text):
        named = True
        for word in re.split(r"[,\s]+", match[1] or match[2]):
            limits = re.fullmatch(r"(\d{1,5})(?:[-:](\d{1,5}))?", word, re.ASCII)
            if limits:
                low, high = int(limits[1]), int(limits[2] or limits[1])
                found |= {
                    p
                    for p in (HANDSHAKE_PORT, RPC_PORTS[0], RPC_PORTS[-1], ROCE_UDP_PORT)
                    if low <= p <= high
                }
    return found if named else None


def _blocked(text: str) -> tuple[str, set[int]] | None:
    """The first rule (or policy) that drops a port of ours, and which; None if none does."""
    decided: set[int] = set()
    ours = {HANDSHAKE_PORT, RPC_PORTS[0], RPC_PORTS[-1]}
    policy = ""
    open_to_peers = False
    for raw in text.splitlines():
        line = raw.strip()
        if re.match(r"-P INPUT (DROP|REJECT)", line) or re.search(r"hook input .*policy drop", line):
            policy = line
            continue
        if re.search(r"-A (OUTPUT|FORWARD)", line):
            continue
        ports = _ports_in(line)
        accept = re.search(r"-j ACCEPT|\baccept\b", line)
        refuse = re.search(r"-j (DROP|REJECT)|\b(drop|reject)\b", line)
        udp_only = re.search(r"-p udp|\budp dport\b", line)
        if ports is None:
            if accept and not re.search(r"lo\b|ESTABLISHED|established|icmp", line):
                open_to_peers = True
            continue
        mine = (ports & ours) - decided
        if refuse and mine and not udp_only:
            return line, mine
        if accept:
            decided |= mine
    if policy and not open_to_peers and ours - decided:
        return policy, ours - decided
    return None


@check(
    "ip.firewall",
    title="The engine's ports are open",
    why="The handshake is refused. RoCE data never reach the filter, except soft-RoCE and software "
    "switching.",
    source="nft list ruleset, iptables -S",
    fix="open TCP 12001 and 15000-17000 between the nodes",
    undo="remove the rule again",
    root="y",
)
def firewall(host: HostFacts) -> Iterator[Finding]:
    seen = False
    for argv in [
        *host.argvs("nft"),
        *host.argvs("iptables"),
        *host.argvs("ip6tables"),
        *host.argvs("iptables-save"),
    ]:
        text = attempt(lambda: host.command(*argv))
        if text is None:
            continue
        seen = True
        blocked = _blocked(text)
        if blocked is not None:
            line, ports = blocked
            yield fail(
                "firewall",
                line,
                f"TCP {', '.join(map(str, sorted(ports)))} open between the nodes",
                fix="iptables -I INPUT -p tcp -m multiport --dports 12001,15000:17000 -s <peers> -j ACCEPT",
                persists=False,
                evidence=[host.said(*argv, text=line)],
            )
        rule = next(
            (
                x.strip()
                for x in text.splitlines()
                if ROCE_UDP_PORT in (_ports_in(x) or ()) and re.search(r"DROP|REJECT|drop|reject", x)
            ),
            None,
        )
        if rule:
            yield info(
                "firewall",
                f"{rule}: RoCE in hardware does not pass through it",
                evidence=[host.said(*argv, text=rule)],
            )
    if not seen:
        raise Unseen("nft list ruleset, iptables -S", host.why_not("nft", "iptables"))


@check(
    "ip.port_4791",
    title="No local socket sits on the RoCE port",
    why="The NIC takes every packet to UDP 4791: the socket's owner gets none.",
    source="/proc/net/udp ':12B7', /proc/sys/net/ipv4/ip_local_port_range",
    fix="sysctl -w net.ipv4.ip_local_reserved_ports=4791, and restart the socket's owner",
    undo="sysctl -w net.ipv4.ip_local_reserved_ports=",
)
def port_4791(host: HostFacts) -> Iterator[Finding]:
    soft = any(device.kind == "rxe" for device in attempt(lambda: host.devices) or ())
    reason: Unseen | None = None
    seen = False
    for path in ("/proc/net/udp", "/proc/net/udp6"):
        try:
            sockets = proc.parse_udp_ports(host.text(path))
        except Unseen as unseen:
            reason = reason or unseen
            continue
        seen = True
        held = [inode for number, inode in sockets if number == ROCE_UDP_PORT]
        if held and not soft and any(held):  # the tunnel socket of soft RoCE belongs to the kernel: inode 0
            yield warn(
                "UDP 4791",
                f"a local socket (inode {held[0]}) in {path}",
                "nobody: the NIC takes these packets",
                fix="sysctl -w net.ipv4.ip_local_reserved_ports=4791; restart its owner (ss -ulpn 'sport "
                "= 4791')",
                persists=False,
                evidence=[host.at(path, ":12B7")],
            )
    words = (host.peek("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if (
        len(words) == 2
        and all(w.isdigit() and len(w) < 6 for w in words)
        and int(words[0]) <= ROCE_UDP_PORT <= int(words[1])
    ):
        reserved = host.peek("/proc/sys/net/ipv4/ip_local_reserved_ports") or ""
        if str(ROCE_UDP_PORT) not in reserved:
            yield info(
                "local port range",
                f"{words[0]}-{words[1]} holds {ROCE_UDP_PORT}",
                "reserved",
                fix="sysctl -w net.ipv4.ip_local_reserved_ports=4791",
                persists=False,
                evidence=[host.at("/proc/sys/net/ipv4/ip_local_port_range")],
            )
    elif not seen and reason is not None and not words:
        raise reason


@check(
    "ip.source_rules",
    title="Rails with gateways have tables of their own",
    why="Without source rules the answer leaves by another rail than the question came in.",
    source="ip rule, ip route show table all",
    fix="ip rule add from <address> lookup <table of the rail>",
    undo="ip rule del from <address>",
)
def source_rules(host: HostFacts) -> Iterator[Finding]:
    found = rails(host)
    if len(found) < 2:
        raise Skip("fewer than two rails here")
    gateways = {route.device for route in host.routes if route.gateway and route.device in found}
    if len(gateways) < 2:
        raise Skip("fewer than two rails have a gateway")
    rules = host.rules
    addressed = [name for name in sorted(gateways) if _networks(host.netdev(name))]
    bare = [name for name in addressed if not _has_source_rule(host, name)]
    bound = {word for rule in rules for word in re.findall(r"oif (\S+)", rule.text)}
    bare = [
        name for name in bare if name not in bound and not (host.netdev(name).master or "").startswith("vrf")
    ]
    if bare:
        yield warn(
            ", ".join(bare[:8]),
            "a gateway each, and no rule for their addresses",
            "from <address> lookup <table>",
            fix=f"ip rule add from <address of {bare[0]}> lookup 100; ip route add default via <gateway> "
            f"dev {bare[0]} table 100",
            persists=False,
            evidence=host.ip_evidence("rule", "route"),
        )


@check(
    "ip.ipv6_disabled",
    title="IPv6 is on where the fabric uses it",
    why="The GID vanishes with the address.",
    source="/proc/sys/net/ipv6/conf/{all,<if>}/disable_ipv6",
    fix="sysctl -w net.ipv6.conf.<if>.disable_ipv6=0",
    undo="sysctl -w net.ipv6.conf.<if>.disable_ipv6=1",
    per=Per.ROCE,
)
def ipv6_disabled(port: Port) -> Iterator[Finding]:
    host = port.host
    netdev = port.need_netdev()
    path = f"/proc/sys/net/ipv6/conf/{netdev.name}/disable_ipv6"
    if host.peek(path) is None and host.peek("/proc/sys/net/ipv6/conf/all/disable_ipv6") is not None:
        path = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
    off = sysfs.parse_int(host.text(path)) == 1
    if not off:
        return
    peers = [address for _, addresses in host.peers for address in addresses]
    gids = [gid for other in host.ports for gid in attempt(lambda: other.gids) or () if gid.routable]
    stated = host.expect("ip_family")
    six = stated in (6, "6", "ipv6") or (peers and all(a.version == 6 for a in peers))
    six = bool(six) or bool(not peers and stated is None and gids and all(gid.ipv4 is None for gid in gids))
    if not six and not peers and stated is None:
        # No IPv4 address and no GID of one: then IPv6 is what this rail was meant to have.
        own = attempt(lambda: netdev.addresses)
        filled = [gid for gid in attempt(lambda: port.gids) or () if not gid.empty]
        six = own is not None and not any(a.version == 4 for a in own) and not any(g.ipv4 for g in filled)
    if six:
        yield fail(
            f"{port.label} {netdev.name}",
            "disable_ipv6 1, on an IPv6 fabric",
            "0",
            fix=f"sysctl -w net.ipv6.conf.{netdev.name}.disable_ipv6=0",
            persists=False,
            evidence=[host.at(path)],
        )


@check(
    "ip.ecmp_ports",
    title="A pair of nodes uses more than one path",
    why="One queue pair is one UDP source port, and so one of the equal-cost paths: hashes collide.",
    source="MC_MLX5_QP_UDP_SPORTS, MC_NUM_QP_PER_EP",
    fix="MC_NUM_QP_PER_EP=4, or MC_MLX5_QP_UDP_SPORTS with several ports",
    undo="unset it",
    per=Per.TARGET,
)
def ecmp_ports(target: Target) -> Iterator[Finding]:
    environ = target.environ
    if not any(port.is_roce and fabric_routed(port) for port in target.ports):
        raise Skip("the fabric is not routed, as far as can be seen")
    if environ.get("MC_NUM_QP_PER_EP", "2").strip() == "1" and not environ.get("MC_MLX5_QP_UDP_SPORTS"):
        yield info(
            target.label,
            "1 queue pair an endpoint on a routed fabric",
            "several: more source ports, more paths",
            fix="export MC_NUM_QP_PER_EP=4 and restart it",
            persists=True,
            evidence=[target.evidence("environ", "MC_NUM_QP_PER_EP=1")],
        )
