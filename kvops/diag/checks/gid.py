"""GIDs: which address a queue pair is made with, and whether the peer can answer it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvops.diag.checks.driver import _uses_cm
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.rdma import Gid, GidUse, Port
from kvops.diag.model import Evidence, Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import rdma
from kvops.diag.registry import Per, check
from kvops.host import Sight

V1 = "IB/RoCE v1"


def fabric_routed(port: Port) -> bool:
    """Whether peers lie beyond a router: by their addresses, else by a gateway route through the port."""
    host = port.host
    netdev = port.netdev
    local = (attempt(lambda: netdev.addresses) or []) if netdev is not None else []
    reachable = [a for a in local if not a.is_link_local]
    if host.peers and not reachable and not any(gid.routable for gid in attempt(lambda: port.gids) or ()):
        return True  # no subnet of our own here: every peer with a global address lies beyond one
    if host.peers and local:
        # A node is near if one of its rails is in our subnet: its other rails belong to our other ports.
        return not all(any(p in a.network for p in addresses for a in local) for _, addresses in host.peers)
    if netdev is None:
        return False
    return any(
        route.gateway and route.leaves_by(netdev.name) and route.prefix_length > 0
        for route in attempt(lambda: host.routes) or ()
    )


def _roce(use: GidUse) -> Port:
    if not use.port.is_roce:
        raise Skip(f"{use.port.label} is no RoCE port")
    return use.port


def _chosen(use: GidUse) -> Gid:
    """The slot in use, which must hold something; other cases have checks of their own."""
    port = _roce(use)
    if use.index is None:
        raise Skip(f"{port.label}: no GID to choose")
    port.gids  # noqa: B018 - raises Unseen
    gid = use.gid
    if gid is None or gid.empty:
        raise Skip(f"{use.label} is empty: see gid.index_empty")
    return gid


def _better(port: Port) -> str:
    best = attempt(lambda: port.best_gid)
    return (
        f"index {best.index} ({best.kind}, {best.text})"
        if best is not None and best.routable
        else "a routable RoCE v2 GID"
    )


@check(
    "gid.index_out_of_range",
    title="The GID index exists on the device",
    why="Opening the device fails: 'GID N not available'.",
    source="ports/<n>/gids/*, MC_GID_INDEX or NCCL_IB_GID_INDEX",
    fix="unset MC_GID_INDEX: the engine then chooses by content",
    undo="set it again",
    per=Per.USE,
)
def index_out_of_range(use: GidUse) -> Iterator[Finding]:
    if use.variable is None or use.index is None:
        raise Skip(f"{use.port.label}: the index is chosen by content")
    length = use.port.gid_table_length
    if use.index >= length:
        host = use.port.host
        yield fail(
            use.label,
            f"{use.variable}={use.index}",
            f"below {length}: the table has {length} entr{'y' if length == 1 else 'ies'}",
            fix=f"unset {use.variable} and restart the process",
            persists=True,
            evidence=[
                host.at(f"{use.port.path}/gids/{length - 1}"),
                *([use.target.evidence("environ", f"{use.variable}={use.index}")] if use.target else []),
            ],
        )


@check(
    "gid.index_empty",
    title="The GID in use holds an address",
    why="RTR fails with EINVAL.",
    source="ports/<n>/gids/<index>; dmesg 'unable to add gid … error=-28'",
    fix="unset MC_GID_INDEX: the engine then chooses by content",
    undo="set it again",
    per=Per.USE,
    kind="S/L",
)
def index_empty(use: GidUse) -> Iterator[Finding]:
    port = _roce(use)
    host = port.host
    gids = port.gids
    filled = [gid for gid in gids if not gid.empty]
    if not filled:
        raise Skip(f"{port.label}: the whole table is empty, see gid.table_empty")
    refused = (
        attempt(lambda: host.log_lines(r"unable to add gid .*error=-28|failed to add (gid|GID).*-28")) or []
    )
    if use.index is None or use.variable is None or use.index >= port.gid_table_length:
        raise Skip(f"{port.label}: no index is forced")
    gid = use.gid
    if gid is not None and not gid.empty:
        return
    if gid is None and len(gids) >= port.gid_table_length:
        raise Unseen(f"{port.path}/gids/{use.index}", Sight.NOT_COLLECTED)
    why = ""
    if refused:
        free = any(slot.empty for slot in gids)
        why = "; an old entry is still held by queue pairs" if free else "; the table is full"
        said = attempt(lambda: rdma.parse_holders(host.command("rdma", "resource", "show", "qp"))) or {}
        who = sorted(said.get((port.device.name, port.number), {}))
        why += f" of {', '.join(who[:4])}" if free and who else ""
    yield fail(
        use.label,
        f"{use.variable}={use.index}, an empty slot{why}",
        _better(port),
        fix=f"unset {use.variable} and restart the process"
        + ("; rdma resource show qp names the holders" if refused else ""),
        persists=True,
        evidence=[
            *use.evidence(),
            *(host.log_evidence(line) for line in refused[:1]),
            host.said("rdma", "resource", "show", "qp") if refused else None,
        ],
    )


@check(
    "gid.type_v1_selected",
    title="The GID in use is RoCE v2",
    why="RoCE v1 is not routed and cannot be marked by ECN.",
    source="ports/<n>/gid_attrs/types/<index>",
    fix="use the RoCE v2 slot of the same address, or unset MC_GID_INDEX",
    undo="set the former index",
    per=Per.USE,
)
def type_v1_selected(use: GidUse) -> Iterator[Finding]:
    gid = _chosen(use)
    if gid.kind is None:
        raise Unseen(f"{use.port.path}/gid_attrs/types/{use.index}", Sight.NOT_COLLECTED)
    if gid.kind != V1:
        return
    routed = fabric_routed(use.port)
    yield finding(
        Outcome.FAIL if routed else Outcome.WARN,
        use.label,
        f"{gid.kind}, {gid.text}" + (", while peers are routed" if routed else ""),
        _better(use.port),
        fix=f"unset {use.variable} and restart the process"
        if use.variable
        else "set MC_GID_INDEX to a RoCE v2 slot",
        persists=True,
        evidence=use.evidence(attributes=True),
    )


@check(
    "gid.link_local_selected",
    title="The GID in use is routable",
    why="A link-local GID reaches no other subnet: RTR times out.",
    source="ports/<n>/gids/<index> starts with fe80",
    fix="use the slot of the IPv4, ULA or global address, or unset MC_GID_INDEX",
    undo="set the former index",
    per=Per.USE,
)
def link_local_selected(use: GidUse) -> Iterator[Finding]:
    gid = _chosen(use)
    if not gid.link_local:
        return
    best = use.port.best_gid
    better = best is not None and best.routable
    if not better and use.variable is None:
        raise Skip(f"{use.port.label} has no routable GID: see gid.no_routable")
    yield finding(
        Outcome.FAIL if better or fabric_routed(use.port) else Outcome.WARN,
        use.label,
        gid.text,
        _better(use.port),
        fix=f"unset {use.variable}, or set it to {best.index}"
        if better and best and use.variable
        else "give the interface an address",
        persists=True,
        evidence=use.evidence(attributes=True),
    )


@check(
    "gid.no_routable",
    title="The port has a routable RoCE v2 GID",
    why="Only a peer in the same subnet can be reached, if any.",
    source="ports/<n>/gids, gid_attrs/types",
    fix="ip addr add <address>/<prefix> dev <netdev>",
    undo="ip addr del <address>/<prefix> dev <netdev>",
    per=Per.ROCE,
)
def no_routable(port: Port) -> Iterator[Finding]:
    filled = [gid for gid in port.gids if not gid.empty]
    if not filled:
        raise Skip(f"{port.label}: the table is empty, see gid.table_empty")
    if any(gid.routable for gid in filled):
        return
    if all(gid.kind is None for gid in filled):
        raise Unseen(f"{port.path}/gid_attrs/types", Sight.NOT_COLLECTED)
    kinds = sorted({f"{gid.kind}{' link-local' if gid.link_local else ''}" for gid in filled})
    yield finding(
        Outcome.FAIL if fabric_routed(port) else Outcome.WARN,
        port.label,
        f"only {', '.join(kinds)}",
        "RoCE v2 with an IPv4, ULA or global address",
        fix=f"ip addr add <address>/<prefix> dev {port.netdev_name or '<netdev>'}",
        persists=False,
        evidence=[port.host.at(gid.path) for gid in filled[:2]],
    )


@check(
    "gid.table_empty",
    title="The port has GIDs in this namespace",
    why="The device is visible and useless: RTR fails.",
    source="ports/<n>/gids are all zero",
    fix="give the pod a secondary network (macvlan, SR-IOV) on the RDMA interface, or hostNetwork",
    undo="remove the secondary network",
    per=Per.ROCE,
)
def table_empty(port: Port) -> Iterator[Finding]:
    gids = port.gids
    if not gids or any(not gid.empty for gid in gids):
        return
    if not port.active:
        raise Skip(f"{port.label} is down: see link.port_state")
    host = port.host
    where = "this container" if host.is_container else "this host"
    yield fail(
        port.label,
        f"all {len(gids)} GIDs are zero in {where}",
        "a RoCE v2 GID with the address of an interface here",
        fix="pod: a secondary network on the RDMA interface, or hostNetwork: true"
        if host.is_container
        else f"ip link set {port.netdev_name or '<netdev>'} up; ip addr add <address>/<prefix> dev "
        f"{port.netdev_name or '<netdev>'}",
        persists=host.is_container,
        evidence=[*(host.at(gid.path) for gid in gids[-2:]), host.said("show_gids"), *_drivers_here(host)],
    )


def _drivers_here(host: HostFacts) -> list[Evidence]:
    return [seen for argv in host.argvs("ethtool", "-i")[:2] if (seen := host.said(*argv)) is not None]


def _addresses_here(host: HostFacts) -> set[str]:
    return {str(interface.ip) for link in host.addresses.values() for interface in link.addresses}


@check(
    "gid.netns_mismatch",
    title="The GID's address lives in this namespace",
    why="The handshake works and not one byte of data arrives.",
    source="the GID's address against ip addr, gid_attrs/ndevs/<index> against /sys/class/net",
    fix="host networking, or a secondary network with its own RDMA interface",
    undo="remove it",
    per=Per.USE,
)
def netns_mismatch(use: GidUse) -> Iterator[Finding]:
    gid = _chosen(use)
    host = use.port.host
    try:
        here: set[str] | None = _addresses_here(host)
    except Unseen:
        here = None
    names = attempt(lambda: set(host.ls("/sys/class/net")))
    if here is None and names is None:
        host.ls("/sys/class/net")
    if here is not None and gid.text in here:
        return
    foreign = gid.netdev is not None and gid.netdev not in host.netdev_names
    lost = host.is_container and here is not None and not gid.link_local
    if not foreign and not lost:
        return
    probes = [
        argv
        for argv in host.argvs("ib_write_bw") + host.argvs("rping")
        if (host.snapshot.run(*argv).return_code or 0) != 0
    ]
    yield finding(
        Outcome.FAIL if probes else Outcome.WARN,
        use.label,
        f"{gid.text} on {gid.netdev or 'an interface'}, not in this namespace",
        "an address of an interface that is here"
        + (f" ({', '.join(sorted(host.netdev_names))})" if host.netdev_names else ""),
        fix="run with host networking, or attach a secondary RDMA network to the pod",
        persists=True,
        evidence=[
            *use.evidence(),
            host.at(f"{use.port.path}/gid_attrs/ndevs/{use.index}"),
            *host.ip_evidence("addr"),
        ],
    )


def _nature(gid: Gid | None) -> str:
    if gid is None or gid.empty:
        return "empty"
    scope = "link-local" if gid.link_local else "IPv4" if gid.ipv4 else "IPv6"
    return f"{gid.kind or 'unknown type'} {scope}"


@check(
    "gid.index_consistency",
    title="One GID index means the same everywhere",
    why="The order of GIDs differs between devices and kernels: a fixed index works on half of the pairs.",
    source="the index in use a device and node: type and scope of its slot",
    fix="unset MC_GID_INDEX everywhere: the engine then chooses by content",
    undo="set it again",
    per=Per.FLEET,
    kind="X",
    nodes_min=1,
)
def index_consistency(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    groups: dict[str, list[GidUse]] = {}
    for host in nodes:
        for use in attempt(lambda: host.gid_uses) or ():
            if use.variable is None or use.index is None or not use.port.is_roce or not use.port.active:
                continue
            if attempt(lambda: use.port.gids) is None:
                continue
            groups.setdefault(_nature(use.gid), []).append(use)
    if not groups:
        raise Skip("no index is forced")
    if len(groups) < 2:
        return
    good = [nature for nature in groups if nature.startswith("RoCE v2") and "link-local" not in nature]
    usual = max(good or groups, key=lambda nature: len(groups[nature]))
    for nature, uses in groups.items():
        if nature == usual:
            continue
        for use in uses[:16]:
            sample = groups[usual][0]
            yield fail(
                f"{use.port.host.name} {use.port.label}" if len(nodes) > 1 else use.port.label,
                f"{use.variable}={use.index} is {nature}",
                f"{usual}, as on {sample.port.host.name} {sample.port.label}",
                fix=f"unset {use.variable} on all nodes; the right slot here is {_better(use.port)}",
                persists=True,
                evidence=[*use.evidence(attributes=True), *sample.evidence(attributes=True)],
            )


@check(
    "gid.family_mismatch",
    title="Peers use addresses of one family",
    why="An IPv4 and an IPv6 GID have no route to each other: RTR fails with EINVAL.",
    source="the chosen GIDs of two nodes",
    fix="give every rail an address of the same family",
    per=Per.FLEET,
    kind="X",
)
def family_mismatch(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    families: dict[str, list[GidUse]] = {}
    for host in nodes:
        for use in attempt(lambda: host.gid_uses) or ():
            gid = attempt(lambda: use.gid)
            if gid is not None and gid.routable and use.port.is_roce:
                families.setdefault("IPv4" if gid.ipv4 else "IPv6", []).append(use)
    if not families:
        raise Skip("no routable GID in use")
    if len(families) < 2:
        return
    few = min(families, key=lambda family: len(families[family]))
    other = "IPv6" if few == "IPv4" else "IPv4"
    for use in families[few][:16]:
        gid = use.gid
        assert gid is not None
        yield fail(
            f"{use.port.host.name} {use.port.label}",
            f"{few}: {gid.text}",
            f"{other}, as {len(families[other])} other ports",
            fix="choose GIDs of one family: MC_GID_INDEX, or addresses",
            persists=True,
            evidence=use.evidence(),
        )


@check(
    "gid.changed",
    title="GIDs keep their slots",
    why="Running queue pairs keep the old address; the next connect fails.",
    source="ports/<n>/gids at both samples",
    fix="stop whatever removes and adds the address (DHCP, network agents), then restart the processes",
    per=Per.ROCE,
    kind="Δ",
)
def changed(port: Port) -> Iterator[Finding]:
    host = port.host
    host.need_window()
    after = {gid.index: gid for gid in port.gids_at(1)}
    for gid in port.gids:
        if gid.empty:
            continue
        now = after.get(gid.index)
        if now is None or now.address != gid.address or (now.kind and gid.kind and now.kind != gid.kind):
            yield fail(
                f"{port.label} GID {gid.index}",
                f"{gid.text} ({gid.kind}) → "
                f"{'empty' if now is None or now.empty else f'{now.text} ({now.kind})'}",
                "the same in both samples",
                fix="find who changes the address (networkctl, nmcli, a CNI); restart the processes that "
                "use the port",
                persists=None,
                evidence=[host.at(gid.path)],
            )


@check(
    "gid.stale",
    title="Each GID has its address",
    why="An entry that stayed after its address left gives a wrong source.",
    source="ports/<n>/gids against ip addr",
    fix="reload the driver, or take the interface down and up",
    per=Per.ROCE,
)
def stale(port: Port) -> Iterator[Finding]:
    host = port.host
    if host.is_container:
        raise Skip("a container may see GIDs of other namespaces")
    here = _addresses_here(host)
    told: set[str] = set()
    for gid in port.gids:
        if gid.empty or gid.link_local or gid.text in here or gid.text in told:
            continue
        if gid.netdev is None or gid.netdev not in host.addresses:
            continue
        told.add(gid.text)
        yield warn(
            f"{port.label} GID {gid.index}",
            f"{gid.text}, on no interface",
            f"an address of {gid.netdev}",
            fix=f"ip link set {gid.netdev} down && ip link set {gid.netdev} up",
            persists=False,
            evidence=[host.at(gid.path), *host.ip_evidence("addr")],
        )


@check(
    "gid.duplicate",
    title="No two ports have one GID",
    why="Two hosts answer for one address.",
    source="ports/<n>/gids of all nodes",
    fix="give each interface its own address",
    per=Per.FLEET,
    kind="X",
    nodes_min=1,
)
def duplicate(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    owners: dict[str, dict[str, Port]] = {}
    seen = False
    for host in nodes:
        for port in attempt(lambda: host.ports) or ():
            for gid in attempt(lambda: port.gids) or ():
                seen = True
                if not gid.empty and not gid.link_local and port.is_roce:
                    owners.setdefault(gid.text, {}).setdefault(f"{host.name} {port.label}", port)
    if not seen:
        raise Skip("no GID table was collected")
    for text, ports in owners.items():
        if len(ports) < 2:
            continue
        across = len({port.host.name for port in ports.values()}) > 1
        yield finding(
            Outcome.FAIL if across else Outcome.WARN,
            text,
            "on " + ", ".join(list(ports)[:6]),
            "on one port",
            fix="ip addr del the wrong one and give it its own address",
            persists=False,
            evidence=[
                port.host.at(gid.path)
                for port in list(ports.values())[:2]
                for gid in port.gids
                if gid.text == text
            ][:4],
        )


@check(
    "gid.default_roce_mode",
    title="The connection manager uses RoCE v2",
    why="Connections made by rdma_cm take RoCE v1, which is not routed.",
    source="/sys/kernel/config/rdma_cm/<dev>/ports/<n>/default_roce_mode, cma_roce_mode",
    fix="cma_roce_mode -d <dev> -p <n> -m 2",
    undo="cma_roce_mode -d <dev> -p <n> -m 1",
    per=Per.ROCE,
    root="y",
)
def default_roce_mode(port: Port) -> Iterator[Finding]:
    host = port.host
    path = f"/sys/kernel/config/rdma_cm/{port.device.name}/ports/{port.number}/default_roce_mode"
    text = host.peek(path) or attempt(lambda: host.command("cma_roce_mode", "-d", port.device.name))
    if text is None:
        host.text(path)
        return
    if V1 not in text and "RoCE v1" not in text:
        return
    by_hand = bool(host.targets) and not _uses_cm(host)
    evidence = [host.at(path)]
    if by_hand:
        yield info(
            port.label,
            f"{text.strip()}; the targets do not use rdma_cm",
            "RoCE v2",
            fix=f"cma_roce_mode -d {port.device.name} -p {port.number} -m 2",
            persists=False,
            evidence=evidence,
        )
    else:
        yield warn(
            port.label,
            text.strip(),
            "RoCE v2",
            fix=f"cma_roce_mode -d {port.device.name} -p {port.number} -m 2",
            persists=False,
            evidence=evidence,
        )


def _vlan(host: HostFacts, netdev: str) -> tuple[int, dict[str, str]] | None:
    """(VLAN id, egress priority map) of an interface; None if it is none."""
    text = host.peek(f"/proc/net/vlan/{netdev}") or ""
    match = re.search(r"VID:\s*(\d{1,4})", text, re.ASCII)
    if match is not None:
        egress = re.search(r"EGRESS priority mappings:([^\n]*)", text)
        return int(match[1]), dict(re.findall(r"(\d):(\d)", egress[1] if egress else "", re.ASCII))
    for argv in host.argvs("ip", "-d"):
        said = attempt(lambda: host.command(*argv)) or ""
        block = re.search(rf"^\d+: {re.escape(netdev)}[@:].*?(?=^\d+: |\Z)", said, re.MULTILINE | re.DOTALL)
        match = re.search(r"vlan protocol \S+ id (\d{1,4})", block[0], re.ASCII) if block else None
        if match is not None and block is not None:
            egress = re.search(r"egress-qos-map \{([^}]*)\}", block[0])
            return int(match[1]), dict(re.findall(r"(\d):(\d)", egress[1] if egress else "", re.ASCII))
    return None


@check(
    "gid.vlan",
    title="Peers share the VLAN, and tagged packets carry a priority",
    why="In another VLAN nobody answers; without a priority map tagged RoCE rides in priority 0.",
    source="/proc/net/vlan/<netdev>, ip -d link",
    fix="ip link set <vlan> type vlan egress-qos-map 0:3 (and the same VLAN id on all peers)",
    undo="ip link set <vlan> type vlan egress-qos-map 0:0",
    per=Per.FLEET,
    kind="S/X",
    nodes_min=1,
)
def vlan(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    found: dict[int | None, list[str]] = {}
    seen: dict[int | None, list[Evidence]] = {}
    for host in nodes:
        for use in attempt(lambda: host.gid_uses) or ():
            gid = attempt(lambda: use.gid)
            if gid is None or gid.netdev is None or not use.port.is_roce:
                continue
            tag = _vlan(host, gid.netdev)
            found.setdefault(tag[0] if tag else None, []).append(f"{host.name} {use.port.label}")
            source = host.at(f"/proc/net/vlan/{gid.netdev}") if tag else host.at(gid.path)
            seen.setdefault(tag[0] if tag else None, []).append(source)
            if tag is None:
                continue
            trust = None
            for netdev in use.port.wire_netdevs:
                qos = attempt(lambda: netdev.qos)
                trust = trust or (qos.trust if qos is not None else None)
            if trust == "pcp" and not any(value != "0" for value in tag[1].values()):
                yield warn(
                    f"{host.name} {gid.netdev}",
                    f"VLAN {tag[0]} without an egress priority map, trust pcp",
                    f"0:{host.roce_priority if host.roce_priority is not None else 3}",
                    fix=f"ip link set {gid.netdev} type vlan egress-qos-map 0:{host.roce_priority or 3}",
                    persists=False,
                    evidence=[host.at(f"/proc/net/vlan/{gid.netdev}")],
                )
    if not found or set(found) == {None}:
        raise Skip("no VLAN under a GID in use")
    if len(found) > 1:
        few = min(found, key=lambda tag: len(found[tag]))
        usual = max(found, key=lambda tag: len(found[tag]))
        if few == usual:
            usual = next(tag for tag in found if tag != few)
        yield fail(
            ", ".join(found[few][:8]),
            f"VLAN {few if few is not None else 'none'}",
            f"VLAN {usual if usual is not None else 'none'}, as {len(found[usual])} others",
            fix="put the interface into the same VLAN as its peers",
            persists=True,
            evidence=[*seen[few][:4], *seen[usual][:1]],
        )
