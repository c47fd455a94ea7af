"""Open vSwitch: whether RoCE through virtual functions is switched by the NIC or by the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvops.diag.checks.ip import ROCE_UDP_PORT
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.model import Evidence, Finding, Skip, Unseen, fail, info, warn
from kvops.diag.parsers import ethtool, misc, rdma
from kvops.diag.registry import check
from kvops.host import Sight

MAX_IDLE_MS_WANTED = 10_000  # Open vSwitch's default [K]
CONNTRACK_SHARE_WARN = 0.9
LOG = "/var/log/openvswitch/ovs-vswitchd.log"


def _config(host: HostFacts) -> dict[str, str]:
    """``other_config``; Skip where there is no Open vSwitch. Raises Unseen."""
    if not host.argvs("ovs-vsctl") and not host.argvs("ovs-appctl") and host.peek(LOG) is None:
        modules = attempt(lambda: host.modules)
        if host.expect("ovs_offload") or (modules is not None and "openvswitch" in modules):
            raise Unseen("ovs-vsctl get Open_vSwitch . other_config", Sight.NOT_COLLECTED)
        raise Skip("no Open vSwitch here")
    for argv in host.argvs("ovs-vsctl"):
        if "other_config" in argv or "other-config" in argv:
            return misc.parse_ovs_map(host.command(*argv))
    raise Unseen("ovs-vsctl get Open_vSwitch . other_config", host.why_not("ovs-vsctl"))


def _config_evidence(host: HostFacts) -> Evidence | None:
    return next(
        (seen for argv in host.argvs("ovs-vsctl") if "other_config" in argv and (seen := host.said(*argv))),
        None,
    )


def _flows(host: HostFacts, sample: int = 0) -> tuple[list[misc.Flow], tuple[str, ...]]:
    """(datapath flows, the command). Raises Unseen."""
    for argv in host.argvs("ovs-appctl"):
        if any("dump-flows" in word for word in argv):
            return misc.parse_flows(host.command(*argv, sample=sample)), argv
    raise Unseen("ovs-appctl dpctl/dump-flows -m", host.why_not("ovs-appctl"))


def _is_roce(flow: misc.Flow) -> bool:
    return re.search(rf"udp\([^)]*dst={ROCE_UDP_PORT}\b", flow.text) is not None


def _representors(host: HostFacts) -> list[str]:
    found = []
    for name in sorted(host.netdev_names):
        tag = (host.peek(f"/sys/class/net/{name}/phys_port_name") or "").strip()
        if re.fullmatch(r"(c\d+)?pf\d+vf\d+", tag, re.ASCII) or host.netdev(name).driver == "mlx5e_rep":
            found.append(name)
    return found


def _switched_by_nic(host: HostFacts) -> bool:
    """Whether RDMA functions hang on Open vSwitch, as far as anything says so."""
    if host.expect("ovs_offload"):
        return True
    modes = [
        rdma.parse_devlink_eswitch(attempt(lambda: host.command(*a)) or "")
        for a in host.argvs("devlink", "eswitch")
    ]
    flows = attempt(lambda: _flows(host)[0]) or []
    return "switchdev" in modes or bool(_representors(host)) or any(_is_roce(flow) for flow in flows)


@check(
    "ovs.hw_offload",
    title="Open vSwitch offloads to the NIC",
    why="Without it every packet to UDP 4791 is switched by the CPU.",
    source="ovs-vsctl get Open_vSwitch . other_config (hw-offload), ethtool -k hw-tc-offload",
    fix="ovs-vsctl set Open_vSwitch . other_config:hw-offload=true; systemctl restart openvswitch",
    undo="ovs-vsctl remove Open_vSwitch . other_config hw-offload",
    root="y",
)
def hw_offload(host: HostFacts) -> Iterator[Finding]:
    config = _config(host)
    if not _switched_by_nic(host):
        raise Skip("no RDMA function is attached to Open vSwitch")
    if config.get("hw-offload") != "true":
        yield fail(
            "Open vSwitch",
            f"hw-offload={config.get('hw-offload', 'not set')}",
            "true",
            fix="ovs-vsctl set Open_vSwitch . other_config:hw-offload=true && systemctl restart "
            "openvswitch-switch",
            persists=True,
            evidence=[_config_evidence(host)],
        )
    for argv in host.argvs("ethtool", "-k"):
        labels = attempt(lambda: ethtool.parse_labels(host.command(*argv)))
        if labels and ethtool.is_on(labels, "hw-tc-offload") is False:
            yield fail(
                argv[-1],
                "hw-tc-offload off",
                "on",
                fix=f"ethtool -K {argv[-1]} hw-tc-offload on",
                persists=False,
                evidence=[host.said(*argv, text="hw-tc-offload: off")],
            )


@check(
    "ovs.flow_not_offloaded",
    title="RoCE flows are in the NIC",
    why="A flow that stays in software binds the transfer to a CPU, and loses packets.",
    source="ovs-appctl dpctl/dump-flows -m (dp:tc, dp:ovs, actions:userspace), vswitchd's log",
    fix="find the match or action that the driver cannot offload (connection tracking, tunnels); update "
    "driver and switch",
    root="y",
    kind="S/L/Δ",
)
def flow_not_offloaded(host: HostFacts) -> Iterator[Finding]:
    config = _config(host)
    if config.get("hw-offload") != "true":
        raise Skip("offload is off altogether: see ovs.hw_offload")
    log = host.peek(LOG) or ""
    refused = [line for line in log.splitlines() if "failed to offload flow" in line]
    try:
        flows, argv = _flows(host)
    except Unseen:
        if not refused:
            raise
        flows, argv = [], ()
    log_items = [host.at(LOG, refused[-1])] if refused else []
    software = [
        flow
        for flow in flows
        if _is_roce(flow) and (flow.slow or flow.datapath == "ovs" or flow.offloaded == "no")
    ]
    for flow in software[:4]:
        where = "the slow path (userspace)" if flow.slow else "the kernel (dp:ovs)"
        yield fail(
            "flow to UDP 4791",
            f"in {where}, {flow.packets} packets",
            "offloaded:yes, dp:tc",
            fix="ovs-appctl dpctl/dump-flows -m type=ovs; drop the action the NIC cannot do, or update "
            "its driver",
            persists=None,
            evidence=[host.said(*argv, text=flow.text), *log_items],
        )
    if refused and not software:
        yield fail(
            "Open vSwitch",
            f"{len(refused)} flows refused by the driver: {refused[-1].rpartition('|')[2]}",
            "no refusal",
            fix="find the match or action that cannot be offloaded; update driver and kernel",
            persists=None,
            evidence=[*log_items, host.said(*argv) if argv else None],
        )
    if not host.snapshot.has_window or not flows:
        return
    after = {flow.key: flow for flow in attempt(lambda: _flows(host, 1)[0]) or ()}
    for flow in flows:
        now = after.get(flow.key)
        if (
            _is_roce(flow)
            and flow.offloaded == "yes"
            and now is not None
            and now.packets == flow.packets
            and now.packets == 0
        ):
            yield warn(
                "flow to UDP 4791",
                "offloaded:yes, and not one packet in the window",
                "packets that grow under load",
                fix="check that the traffic takes this flow: tc -s filter show dev <representor> ingress",
                persists=None,
                evidence=[host.said(*argv, text=flow.text)],
            )


@check(
    "ovs.eswitch_mode",
    title="The NIC's switch is in switchdev mode",
    why="In legacy mode there are no representors and nothing is offloaded.",
    source="devlink dev eswitch show",
    fix="devlink dev eswitch set pci/<bdf> mode switchdev, before virtual functions and bonds are made",
    undo="devlink dev eswitch set pci/<bdf> mode legacy",
    root="y",
)
def eswitch_mode(host: HostFacts) -> Iterator[Finding]:
    config = attempt(lambda: _config(host)) or {}
    if not host.expect("ovs_offload") and config.get("hw-offload") != "true":
        raise Skip("nobody expects representors")
    argvs = host.argvs("devlink", "eswitch")
    if not argvs:
        raise Unseen("devlink dev eswitch show", host.why_not("devlink"))
    for argv in argvs:
        if rdma.parse_devlink_eswitch(host.command(*argv)) == "legacy":
            yield fail(
                argv[-1],
                "mode legacy",
                "mode switchdev",
                fix=f"devlink dev eswitch set {argv[-1]} mode switchdev",
                persists=False,
                evidence=[host.said(*argv)],
            )


@check(
    "ovs.tc_policy",
    title="The offload policy lets tracked flows through",
    why="skip_sw refuses every flow that the NIC cannot do alone, connection tracking first of all.",
    source="other_config:tc-policy",
    fix="ovs-vsctl set Open_vSwitch . other_config:tc-policy=none",
    undo="ovs-vsctl set Open_vSwitch . other_config:tc-policy=skip_sw",
    root="y",
)
def tc_policy(host: HostFacts) -> Iterator[Finding]:
    config = _config(host)
    if config.get("tc-policy") != "skip_sw":
        return
    flows = attempt(lambda: _flows(host)[0])
    tracked = any(re.search(r"ct_state\([^)]*\+trk|\bct\(", flow.text) for flow in flows or ())
    if tracked:
        yield warn(
            "Open vSwitch",
            "tc-policy=skip_sw, with connection tracking",
            "none",
            fix="ovs-vsctl set Open_vSwitch . other_config:tc-policy=none",
            persists=True,
            evidence=[_config_evidence(host)],
        )
    elif flows is None:
        raise Unseen("ovs-appctl dpctl/dump-flows", Sight.NOT_COLLECTED)


@check(
    "ovs.lost_upcalls",
    title="No upcall is lost",
    why="First packets of a flow, handshakes among them, are dropped.",
    source="ovs-appctl dpctl/show 'lookups: … lost:N'",
    fix="ovs-vsctl set Open_vSwitch . other_config:n-handler-threads=8",
    undo="ovs-vsctl remove Open_vSwitch . other_config n-handler-threads",
    root="y",
    kind="Δ",
)
def lost_upcalls(host: HostFacts) -> Iterator[Finding]:
    argvs = [
        argv
        for argv in host.argvs("ovs-appctl")
        if any(word.endswith(("dpctl/show", "dpif/show")) for word in argv)
    ]
    argvs += host.argvs("ovs-dpctl", "show")
    if not argvs:
        if not host.argvs("ovs-vsctl") and not host.argvs("ovs-appctl"):
            raise Skip("no Open vSwitch here")
        raise Unseen("ovs-appctl dpctl/show", host.why_not("ovs-appctl"))
    window_s = host.need_window()
    before, after = (misc.parse_lost_upcalls(host.command(*argvs[0], sample=s)) for s in (0, 1))
    if before is not None and after is not None and after > before:
        yield warn(
            "Open vSwitch",
            f"{after - before} upcalls lost in {window_s:g} s",
            "+0",
            fix="ovs-vsctl set Open_vSwitch . other_config:n-handler-threads=8",
            persists=True,
            evidence=[host.said(*argvs[0], text=f"lost {before} → {after}")],
        )


@check(
    "ovs.conntrack_full",
    title="Connection tracking has room",
    why="New connections are dropped when the table is full.",
    source="/proc/sys/net/netfilter/nf_conntrack_{count,max}; dmesg 'table full'",
    fix="sysctl -w net.netfilter.nf_conntrack_max=2097152",
    undo="write the former value",
    kind="S/L",
    root="p",
)
def conntrack_full(host: HostFacts) -> Iterator[Finding]:
    lines = attempt(lambda: host.log_lines(r"nf_conntrack: .*table full"))
    fix = "sysctl -w net.netfilter.nf_conntrack_max=2097152"
    if lines:
        yield fail(
            "connection tracking",
            f"table full, {len(lines)} messages since boot",
            "room",
            fix=fix,
            persists=False,
            evidence=[host.log_evidence(lines[-1])],
        )
        return
    folder = "/proc/sys/net/netfilter"
    count, most = host.number(f"{folder}/nf_conntrack_count"), host.number(f"{folder}/nf_conntrack_max")
    if most > 0 and count > CONNTRACK_SHARE_WARN * most:
        yield warn(
            "connection tracking",
            f"{count} of {most} entries",
            f"at most {CONNTRACK_SHARE_WARN:.0%}",
            fix=fix,
            persists=False,
            evidence=[host.at(f"{folder}/nf_conntrack_count"), host.at(f"{folder}/nf_conntrack_max")],
        )


@check(
    "ovs.max_idle",
    title="Flows live through pauses of the traffic",
    why="A flow that idles out costs an upcall at the start of each burst.",
    source="other_config:max-idle (ms)",
    fix="ovs-vsctl set Open_vSwitch . other_config:max-idle=60000",
    undo="ovs-vsctl remove Open_vSwitch . other_config max-idle",
    root="y",
)
def max_idle(host: HostFacts) -> Iterator[Finding]:
    text = _config(host).get("max-idle", "")
    if text.isascii() and text.isdigit() and int(text) < MAX_IDLE_MS_WANTED:
        yield info(
            "Open vSwitch",
            f"max-idle {text} ms",
            f"{MAX_IDLE_MS_WANTED} ms or more",
            fix="ovs-vsctl set Open_vSwitch . other_config:max-idle=60000",
            persists=True,
            evidence=[_config_evidence(host)],
        )


@check(
    "ovs.vf_lag",
    title="The bond was made after switchdev",
    why="In the other order only one port offloads.",
    source="dmesg order of bond and E-Switch messages, /proc/net/bonding, devlink dev eswitch show",
    fix="remove the bond, set switchdev on both functions, make the bond again",
    root="y",
)
def vf_lag(host: HostFacts) -> Iterator[Finding]:
    modes = [
        rdma.parse_devlink_eswitch(attempt(lambda: host.command(*a)) or "")
        for a in host.argvs("devlink", "eswitch")
    ]
    if not host.bonds or "switchdev" not in modes:
        raise Skip("no bond of functions in switchdev mode")
    for name, bond in host.bonds.items():
        members = {member.name for member in bond.members}
        enslaved = [
            x
            for x in host.log_lines(r"[Ee]nslaving|[Aa]dding slave")
            if members & set(re.split(r"[\s():,]+", x.text))
        ]
        offloads = host.log_lines(r"E-Switch: Enable: mode\(OFFLOADS\)")
        stamps = [x.seconds for x in enslaved if x.seconds is not None]
        later = [x for x in offloads if x.seconds is not None and stamps and x.seconds > min(stamps)]
        if later:
            yield warn(
                name,
                "bonded before its members were in switchdev mode",
                "switchdev first",
                fix=f"ip link del {name}; devlink dev eswitch set … mode switchdev; make the bond again",
                persists=False,
                evidence=[host.log_evidence(enslaved[0]), host.log_evidence(later[0])],
            )
