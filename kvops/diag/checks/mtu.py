"""MTU: of the interface, of the port, of the peer, and of what lies between."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvops.diag.checks.driver import MELLANOX
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.rdma import Port
from kvops.diag.facts.target import Target
from kvops.diag.model import Finding, Skip, Unseen, fail, warn
from kvops.diag.parsers import ip
from kvops.diag.registry import Per, check

PATH_MTUS = (256, 512, 1024, 2048, 4096)
HEADERS_BYTES = (
    96  # GRH 40, BTH 12, RETH 16, AETH 4, atomic 28, ICRC 4: iboe_get_mtu in include/rdma/ib_addr.h [K]
)
NETDEV_MTU_FULL = 4200  # the round figure above 4096 + headers
ICMP_HEADERS_BYTES = 28
ENGINE_MTUS = frozenset({"512", "1024", "2048", "4096"})  # MC_MTU [M]


def path_mtu_of(netdev_mtu: int) -> int:
    """The path MTU that the kernel derives from an interface's MTU: 1500 → 1024, 4200 and more → 4096."""
    return max((mtu for mtu in PATH_MTUS if mtu + HEADERS_BYTES <= netdev_mtu), default=PATH_MTUS[0])


def active_mtu(port: Port) -> int:
    """The active path MTU: as ibv_devinfo says, else as the interface's MTU gives. Raises Unseen."""
    mtus = attempt(lambda: port.mtus)
    if mtus is not None and mtus[0] is not None:
        return mtus[0]
    if port.is_infiniband:
        port.mtus  # noqa: B018 - raises Unseen
    return path_mtu_of(port.need_netdev().mtu)


@check(
    "mtu.below_max",
    title="The port uses its largest path MTU",
    why="Four times the packets, and some 5 % less bandwidth.",
    source="<netdev>/mtu, ibv_devinfo active_mtu and max_mtu",
    fix="ip link set <netdev> mtu 9000 on both ends, after the switch ports",
    undo="ip link set <netdev> mtu 1500",
    per=Per.ROCE,
)
def below_max(port: Port) -> Iterator[Finding]:
    host = port.host
    if port.device.kind not in ("mlx5", "mlx4", "bnxt", "hns", "ionic", "unknown"):
        raise Skip(f"{port.device.kind}: its path MTU is limited by design")
    if host.expect("provider"):
        raise Skip("a provider's network: its path MTU is what it is")
    netdev = port.need_netdev()
    netdev_mtu = netdev.mtu
    mtus = attempt(lambda: port.mtus)
    active = (mtus[0] if mtus else None) or path_mtu_of(netdev_mtu)
    most = (mtus[1] if mtus else None) or PATH_MTUS[-1]
    wanted = host.expect_int("mtu") or most
    if active >= min(wanted, most) or netdev_mtu >= NETDEV_MTU_FULL:
        return
    yield warn(
        f"{port.label} {netdev.name}",
        f"interface MTU {netdev_mtu}, path MTU {active}",
        f"{most}: an interface MTU of {NETDEV_MTU_FULL} or more (commonly 9000)",
        fix=f"ip link set {netdev.name} mtu 9000 (switch ports first, then both ends)",
        persists=False,
        evidence=[host.at(f"{netdev.path}/mtu"), host.devinfo_evidence(port.device.name)],
    )


@check(
    "mtu.active_vs_netdev",
    title="Port and interface agree on the MTU",
    why="A stale value after a change (often with bonds): packets larger than the interface takes, or "
    "needlessly small.",
    source="ibv_devinfo active_mtu against <netdev>/mtu",
    fix="ip link set <netdev> down && ip link set <netdev> up; for bonds set every member",
    per=Per.ROCE,
)
def active_vs_netdev(port: Port) -> Iterator[Finding]:
    host = port.host
    active, most = port.mtus
    if active is None:
        raise Skip(f"{port.label}: ibv_devinfo gives no active_mtu")
    if port.device.kind == "xsc":
        raise Skip("its driver knows only 1024 and 4096")
    netdev = port.need_netdev()
    derived = min(path_mtu_of(netdev.mtu), most or PATH_MTUS[-1])
    allowed = {derived}
    if port.device.kind not in ("mlx5", "mlx4", "bnxt", "hns", "rxe"):
        allowed.add(max((m for m in PATH_MTUS if m <= netdev.mtu), default=PATH_MTUS[0]))
    if active not in allowed:
        yield fail(
            f"{port.label} {netdev.name}",
            f"active_mtu {active} on an interface MTU of {netdev.mtu}",
            f"{derived}",
            fix=f"ip link set {netdev.name} down && ip link set {netdev.name} up (bond: set the MTU of "
            f"every member)",
            persists=False,
            evidence=[host.at(f"{netdev.path}/mtu"), host.devinfo_evidence(port.device.name)],
        )


def _engine_mtu(port: Port) -> int:
    """What the engine makes its queue pairs with: the active MTU, clipped by MC_MTU. Raises Unseen."""
    mtu = active_mtu(port)
    for target in port.host.targets:
        value = (attempt(lambda: target.environ) or {}).get("MC_MTU", "").strip()
        if value in ENGINE_MTUS and any(p.label == port.label for p in target.ports):
            mtu = min(mtu, int(value))
    return mtu


@check(
    "mtu.peer_mismatch",
    title="All nodes make queue pairs with one path MTU",
    why="The engine does not negotiate it: the side with the larger one sends what the other refuses "
    "(length errors).",
    source="active_mtu and MC_MTU of all nodes",
    fix="one MTU on all interfaces, or MC_MTU=<the smallest> everywhere",
    undo="unset MC_MTU",
    per=Per.FLEET,
    kind="X",
)
def peer_mismatch(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    groups: dict[int, list[Port]] = {}
    for host in nodes:
        for port in attempt(lambda: host.ports) or ():
            if not port.active:
                continue
            mtu = attempt(lambda: _engine_mtu(port))
            if mtu is not None and (port.is_roce or port.is_infiniband):
                groups.setdefault(mtu, []).append(port)
    if not groups:
        raise Unseen("active_mtu of all nodes", nodes[0].why_not("ibv_devinfo"))
    if len(groups) < 2:
        return
    usual = max(groups, key=lambda mtu: (len(groups[mtu]), mtu))
    for mtu, ports in groups.items():
        if mtu == usual:
            continue
        for port in ports[:16]:
            name = port.netdev_name or "<netdev>"
            yield fail(
                f"{port.host.name} {port.label}",
                f"path MTU {mtu}",
                f"{usual}, as {len(groups[usual])} other ports",
                fix=f"ip link set {name} mtu 9000, or MC_MTU={min(groups)} on all nodes",
                persists=False,
                evidence=[
                    port.host.devinfo_evidence(port.device.name),
                    port.host.at(f"/sys/class/net/{name}/mtu"),
                ],
            )


@check(
    "mtu.app_vs_active",
    title="MC_MTU means something",
    why="A value above the port's is clipped, an invalid one ignored: not what the operator believes.",
    source="MC_MTU of the targets against active_mtu",
    fix="unset MC_MTU, or set it to 512, 1024, 2048 or 4096",
    per=Per.TARGET,
)
def app_vs_active(target: Target) -> Iterator[Finding]:
    value = target.environ.get("MC_MTU")
    if value is None:
        return
    evidence = [target.evidence("environ", f"MC_MTU={value}")]
    if value.strip() not in ENGINE_MTUS:
        yield warn(
            target.label,
            f"MC_MTU={value}: ignored",
            "512, 1024, 2048 or 4096",
            fix="unset MC_MTU and restart it",
            persists=True,
            evidence=evidence,
        )
        return
    for port in target.ports:
        active = attempt(lambda: active_mtu(port))
        if active is not None and int(value) > active:
            yield warn(
                f"{port.label} of {target.name}",
                f"MC_MTU={value}, clipped to {active}",
                f"at most {active}",
                fix=f"MC_MTU={active}, or raise the interface's MTU",
                persists=True,
                evidence=[*evidence, target.host.devinfo_evidence(port.device.name)],
            )


@check(
    "mtu.path_mtu",
    title="Full-size packets reach the peer",
    why="A switch port with a smaller MTU is a black hole for large messages only: retry exceeded.",
    source="ping -M do -s 4172 -I <netdev> <peer>; ethtool rx_oversize_pkts_phy, rx_out_of_range_len_phy",
    fix="raise the MTU of every switch port on the path",
    kind="A/Δ",
)
def path_mtu(host: HostFacts) -> Iterator[Finding]:
    seen = False
    answered: dict[tuple[str, str], int] = {}
    silent: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {}
    for argv in host.argvs("ping"):
        result = host.snapshot.run(*argv)
        size = (
            int(argv[argv.index("-s") + 1])
            if "-s" in argv[:-1] and argv[argv.index("-s") + 1].isdigit()
            else 56
        )
        netdev = argv[argv.index("-I") + 1] if "-I" in argv[:-1] else ""
        answer = ip.parse_ping(result.stdout)
        key = (netdev, argv[-1])
        said = result.stdout + result.stderr
        if answer:
            answered[key] = max(answered.get(key, 0), size)
        elif ("-M" in argv and answer is False) or "Frag needed" in said or "essage too long" in said:
            silent[key] = (size, argv)
            if re.search(r"[Ff]rag(mentation)? needed", said):
                answered.setdefault(key, 0)
    for (netdev, peer), (size, argv) in silent.items():
        mtu = attempt(lambda: host.netdev(netdev).mtu) if netdev else None
        if (netdev, peer) not in answered:
            continue  # nothing comes back at any size: the peer, or filtered ICMP, not the MTU
        seen = True
        if mtu is None or mtu >= size + ICMP_HEADERS_BYTES:
            yield fail(
                f"{netdev or 'this host'} → {peer}",
                f"no answer at {size + ICMP_HEADERS_BYTES} bytes, answers to small ones",
                f"an answer: the interface's MTU is {mtu or 'large enough'}",
                fix="raise the MTU of the switch ports on the path to 9216",
                persists=True,
                evidence=[host.said(*argv)],
            )
    seen = seen or bool(answered)
    for port in attempt(lambda: host.ports) or ():
        steps = attempt(lambda: port.wire_steps)
        if steps is None:
            continue
        seen = True
        grown = {
            n: steps[n] for n in ("rx_oversize_pkts_phy", "rx_out_of_range_len_phy") if steps.get(n, 0) > 0
        }
        if grown:
            yield fail(
                port.label,
                ", ".join(f"{n} +{c}" for n, c in grown.items()) + f" in {host.need_window():g} s",
                "+0: the peer sends larger packets than this port takes",
                fix=f"ip link set {port.netdev_name or '<netdev>'} mtu 9000, as the peer has",
                persists=False,
                evidence=port.wire_evidence(*grown),
            )
    if not seen:
        raise Unseen("ping -M do -s 4172", host.why_not("ping"))


@check(
    "mtu.bond_members",
    title="A bond, its members and its VLANs have one MTU",
    why="The port takes the smallest, or a stale one.",
    source="<netdev>/mtu of bond, members, VLAN",
    fix="ip link set <bond> mtu 9000: members follow; set VLANs too",
)
def bond_members(host: HostFacts) -> Iterator[Finding]:
    judged = 0
    names = {port.netdev_name for port in host.ports} | {
        n for port in host.ports for n in port.own_netdev_names
    }
    for name, bond in host.bonds.items():
        if name not in names and not any(member.name in names for member in bond.members):
            continue
        judged += 1
        mtu = host.netdev(name).mtu
        for member in bond.members:
            own = attempt(lambda: host.netdev(member.name).mtu)
            if own is not None and own != mtu:
                yield fail(
                    f"{name} and {member.name}",
                    f"{mtu} and {own}",
                    "the same",
                    fix=f"ip link set {name} mtu {max(mtu, own)}",
                    persists=False,
                    evidence=[
                        host.at(f"/sys/class/net/{name}/mtu"),
                        host.at(f"/sys/class/net/{member.name}/mtu"),
                    ],
                )
    for name in sorted(n for n in names if n):
        parent = name.rpartition(".")[0]
        if parent and parent in host.netdev_names:
            judged += 1
            own, above = (attempt(lambda: host.netdev(n).mtu) for n in (name, parent))
            if own is not None and above is not None and own != above:
                yield fail(
                    f"{name} and {parent}",
                    f"{own} and {above}",
                    "the same",
                    fix=f"ip link set {name} mtu {above}",
                    persists=False,
                    evidence=[host.at(f"/sys/class/net/{name}/mtu"), host.at(f"/sys/class/net/{parent}/mtu")],
                )
    if not judged:
        raise Skip("no bond or VLAN under an RDMA port")


@check(
    "mtu.ovs_bridge",
    title="The virtual switch takes the VF's packets",
    why="A bridge or representor with a smaller MTU fragments or drops what falls to the slow path.",
    source="<netdev>/mtu of bridge and representors against the VF's",
    fix="ip link set <representor> mtu 9000; ovs-vsctl set interface <bridge> mtu_request=9000",
    undo="ovs-vsctl remove interface <bridge> mtu_request 9000",
)
def ovs_bridge(host: HostFacts) -> Iterator[Finding]:
    if not host.argvs("ovs-vsctl") and not host.argvs("ovs-appctl"):
        raise Skip("no Open vSwitch here")
    switched: list[str] = []
    wanted = 0
    for name in sorted(host.netdev_names):
        netdev = host.netdev(name)
        tag = (host.peek(f"{netdev.path}/phys_port_name") or "").strip()
        bdf = host.snapshot.resolve(f"{netdev.path}/device").rpartition("/")[2]
        if netdev.driver in ("openvswitch", "mlx5e_rep") or re.fullmatch(r"(c\d+)?pf\d+vf\d+", tag):
            switched.append(name)
        elif ":" in bdf and host.pci_function(bdf).is_virtual and host.pci_function(bdf).vendor == MELLANOX:
            wanted = max(wanted, attempt(lambda: netdev.mtu) or 0)
    if not wanted:
        wanted = max((attempt(lambda: p.need_netdev().mtu) or 0 for p in host.ports), default=0)
    if not switched or not wanted:
        raise Skip("no representor or bridge next to a virtual function")
    for name in switched:
        mtu = attempt(lambda: host.netdev(name).mtu)
        if mtu is not None and mtu < wanted:
            yield fail(
                name,
                f"MTU {mtu}",
                f"at least {wanted}, the VF's",
                fix=f"ip link set {name} mtu {wanted}",
                persists=False,
                evidence=[host.at(f"/sys/class/net/{name}/mtu")],
            )
