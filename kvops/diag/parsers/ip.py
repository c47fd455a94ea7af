"""Parsers of iproute2's text: addresses, routes, rules, neighbours, virtual functions."""

from __future__ import annotations

import ipaddress
import itertools
import re
from dataclasses import dataclass, field
from typing import NamedTuple

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


def parse_address(text: str) -> Address | None:
    """One address, None if it is none."""
    try:
        return ipaddress.ip_address(text.strip())
    except ValueError:
        return None


def parse_network(text: str) -> Network | None:
    """
    ``default``, ``10.0.0.0/8`` or a bare address; None if it is none. ``default`` needs its family from
    elsewhere.
    """
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        return None


@dataclass(slots=True)
class LinkAddresses:
    """One interface of ``ip addr show`` or ``ip link show``."""

    name: str
    flags: frozenset[str]
    mtu: int
    state: str
    mac: str = ""
    master: str = ""
    addresses: list[Interface] = field(default_factory=list)
    scopes: dict[str, str] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)
    vfs: list[str] = field(default_factory=list)


def parse_addr(text: str) -> dict[str, LinkAddresses]:
    """Read ``ip addr show`` or ``ip link show``; lines it does not need may be missing."""
    links: dict[str, LinkAddresses] = {}
    link: LinkAddresses | None = None
    for line in text.splitlines():
        head = re.match(r"\d+: ([^:@\s]+)(?:@\S+)?: <([^>]*)>(.*)", line, re.ASCII)
        if head is not None:
            mtu = re.search(r"\bmtu (\d{1,7})\b", head[3], re.ASCII)
            state = re.search(r"\bstate (\S+)", head[3])
            master = re.search(r"\bmaster (\S+)", head[3])
            flags = frozenset(head[2].split(","))
            link = LinkAddresses(head[1], flags, int(mtu[1]) if mtu else 0, state[1] if state else "")
            link.master = master[1] if master else ""
            links[head[1]] = link
            continue
        if link is None:
            continue
        words = line.split()
        if len(words) >= 2 and words[0].startswith("link/"):
            link.mac = words[1]
        elif len(words) >= 2 and words[0] in ("inet", "inet6"):
            try:
                interface = ipaddress.ip_interface(words[1])
            except ValueError:
                continue
            link.addresses.append(interface)
            scope = re.search(r"\bscope (\S+)", line)
            link.scopes[str(interface.ip)] = scope[1] if scope else "global"
            if "dadfailed" in words:
                link.duplicates.append(str(interface.ip))
        elif words and words[0] == "vf":
            link.vfs.append(line.strip())
    return links


class Route(NamedTuple):
    """One route. ``network`` None means default of a family that the line does not tell."""

    network: Network | None
    kind: str
    device: str
    gateway: str
    source: str
    table: str
    metric: int
    devices: tuple[str, ...] = ()  # of multipath nexthops

    def covers(self, address: Address) -> bool:
        if self.network is None:
            gateway = parse_address(self.gateway)
            return gateway is None or gateway.version == address.version
        return address.version == self.network.version and address in self.network

    @property
    def prefix_length(self) -> int:
        return 0 if self.network is None else self.network.prefixlen

    def leaves_by(self, device: str) -> bool:
        return device == self.device or device in self.devices


_ROUTE_KINDS = frozenset(
    {"unicast", "local", "broadcast", "multicast", "blackhole", "unreachable", "prohibit", "throw", "anycast"}
)


def parse_routes(text: str, *, table: str = "main", device: str = "") -> list[Route]:
    """
    Read ``ip route show`` (with or without ``table all``); ``nexthop`` lines belong to the route above
    them. Asked for one ``device``, it leaves that out of its lines.
    """
    routes: list[Route] = []
    for line in text.splitlines():
        words = line.split()
        if not words:
            continue
        options = dict(itertools.pairwise(words))
        if words[0] == "nexthop" and routes:
            last = routes[-1]
            routes[-1] = Route(
                last.network,
                last.kind,
                last.device,
                last.gateway or options.get("via", ""),
                last.source,
                last.table,
                last.metric,
                (*last.devices, options.get("dev", "")),
            )
            continue
        kind = "unicast"
        if words[0] in _ROUTE_KINDS and len(words) > 1:
            kind, words = words[0], words[1:]
        network = parse_network(words[0])
        if network is None and words[0] != "default":
            continue
        metric = options.get("metric", "0")
        routes.append(
            Route(
                network,
                kind,
                options.get("dev", device),
                options.get("via", ""),
                options.get("src", ""),
                options.get("table", table),
                int(metric) if re.fullmatch(r"\d{1,10}", metric, re.ASCII) else 0,
            )
        )
    return routes


class Rule(NamedTuple):
    """One policy rule, in the order of preference."""

    preference: int
    source: str  # "all" or an address or prefix
    table: str
    text: str

    def from_address(self, address: Address) -> bool:
        network = parse_network(self.source)
        return network is not None and network.version == address.version and address in network


def parse_rules(text: str) -> list[Rule]:
    """Read ``ip rule show``."""
    rules = []
    for line in text.splitlines():
        match = re.match(r"(\d{1,10}):\s*(.*)", line, re.ASCII)
        if match is None:
            continue
        words = match[2].split()
        options = dict(itertools.pairwise(words))
        rules.append(
            Rule(int(match[1]), options.get("from", "all"), options.get("lookup", ""), match[2].strip())
        )
    return rules


class Neighbour(NamedTuple):
    """One entry of the neighbour table."""

    address: Address
    device: str
    mac: str
    state: str


def parse_neighbours(text: str, *, device: str = "") -> list[Neighbour]:
    """Read ``ip neigh show``; asked for one ``device``, it leaves that out of its lines."""
    neighbours = []
    for line in text.splitlines():
        words = line.split()
        address = parse_address(words[0]) if words else None
        if address is None:
            continue
        options = dict(itertools.pairwise(words))
        neighbours.append(
            Neighbour(address, options.get("dev", device), options.get("lladdr", ""), words[-1].upper())
        )
    return neighbours


def parse_ping(text: str) -> bool | None:
    """Whether any reply came; None if the text is no summary of ping."""
    match = re.search(r"(\d{1,9}) packets transmitted, (\d{1,9}) (?:packets )?received", text, re.ASCII)
    return None if match is None else int(match[2]) > 0


def parse_nstat(text: str) -> dict[str, int]:
    """Read ``nstat -az``: name, value, rate."""
    values = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z0-9]+)\s+(\d{1,20})\b", line, re.ASCII)
        if match is not None:
            values[match[1]] = int(match[2])
    return values


def parse_netstat_ext(text: str) -> dict[str, int]:
    """
    Read /proc/net/netstat: pairs of lines, names above values; keys as nstat has them
    (``TcpExtIPReversePathFilter``).
    """
    values: dict[str, int] = {}
    lines = text.splitlines()
    for names, numbers in itertools.pairwise(lines):
        head, _, rest = names.partition(":")
        head2, _, rest2 = numbers.partition(":")
        if head == head2 and head:
            for name, number in zip(rest.split(), rest2.split(), strict=False):
                if re.fullmatch(r"\d{1,20}", number, re.ASCII):
                    values[head + name] = int(number)
    return values
