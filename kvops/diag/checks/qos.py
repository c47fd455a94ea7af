"""Quality of service: in which priority RoCE rides, and whether that priority is what the site wants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.netdev import Netdev
from kvops.diag.facts.rdma import Port
from kvops.diag.model import Evidence, Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import ethtool, qos, rdma, sysfs, tools
from kvops.diag.registry import Per, check
from kvops.host import Sight

LOSSLESS_COUNT_MAX = 2  # one is usual [V]; headroom for more is rarely there
MAIN_SHARE = 0.8  # of the bytes of one direction
SMALL_DIRECTION = 0.05  # a direction with less than this of the other carries acknowledgements only
CNP_DSCP_DEFAULT, CNP_PRIORITY_DEFAULT = 48, 6  # [V]


def _wires(port: Port) -> list[Netdev]:
    """Interfaces whose priorities count; Skip for virtual functions and guests."""
    if port.device.is_virtual or port.host.is_vm:
        raise Skip(f"{port.label}: priorities are set on the physical function")
    if not port.wire_netdevs:
        raise Skip(f"{port.label} has no network interface here")
    return port.wire_netdevs


def _qos(port: Port) -> list[tuple[Netdev, qos.Qos]]:
    """(interface, its settings) of every wire that could be seen. Raises Unseen."""
    found = []
    reason: Unseen | None = None
    for netdev in _wires(port):
        try:
            found.append((netdev, netdev.qos))
        except Unseen as unseen:
            reason = unseen
    if not found:
        raise reason or Unseen(f"mlnx_qos of {port.label}", Sight.NOT_COLLECTED)
    return found


def lossless_priorities(port: Port) -> frozenset[int]:
    """Priorities with PFC on, or that the site wants lossless; empty if nothing says so."""
    found: set[int] = set()
    for netdev in port.wire_netdevs:
        settings = attempt(lambda: netdev.qos)
        if settings is not None:
            found |= settings.lossless
    if port.host.lossless and port.host.roce_priority is not None:
        found.add(port.host.roce_priority)
    return frozenset(found)


@check(
    "qos.trust_mode",
    title="The NIC takes the priority from the DSCP",
    why="With trust pcp every untagged packet rides in priority 0.",
    source="mlnx_qos -i 'Priority trust state', <netdev>/qos/trust, dcb app show",
    fix="mlnx_qos -i <netdev> --trust dscp",
    undo="mlnx_qos -i <netdev> --trust pcp",
    per=Per.ROCE,
    root="p",
)
def trust_mode(port: Port) -> Iterator[Finding]:
    wanted = port.host.expect("trust")
    if wanted is None and port.host.expect_int("roce_dscp") is None:
        raise Skip("no policy says that the DSCP counts")
    wanted = str(wanted or "dscp")
    for netdev, settings in _qos(port):
        if settings.trust is not None and settings.trust != wanted:
            yield fail(
                f"{port.label} {netdev.name}",
                f"trust {settings.trust}",
                f"trust {wanted}",
                fix=f"mlnx_qos -i {netdev.name} --trust {wanted}",
                persists=False,
                evidence=[netdev.qos_evidence()],
            )


@check(
    "qos.pfc_enabled",
    title="PFC is on for the RoCE priority, here and at the switch",
    why="Without it a lossless priority drops: timeouts.",
    source="mlnx_qos PFC table, dcb pfc show, lldptool -t -n -i <netdev> -V PFC",
    fix="mlnx_qos -i <netdev> -f 0,0,0,1,0,0,0,0, and the same priority on the switch port",
    undo="mlnx_qos -i <netdev> -f 0,0,0,0,0,0,0,0",
    per=Per.ROCE,
    root="p",
)
def pfc_enabled(port: Port) -> Iterator[Finding]:
    host = port.host
    priority = host.roce_priority
    for netdev, settings in _qos(port):
        if settings.pfc is None:
            continue
        on = settings.lossless
        table = ",".join("1" if p == priority else "0" for p in range(qos.PRIORITIES))
        evidence = [netdev.qos_evidence()]
        if host.lossless and priority is not None and priority not in on:
            yield fail(
                f"{port.label} {netdev.name}",
                f"PFC on for {', '.join(map(str, sorted(on))) or 'no priority'}",
                f"on for priority {priority}",
                fix=f"mlnx_qos -i {netdev.name} -f {table}",
                persists=False,
                evidence=evidence,
            )
        if len(on) > LOSSLESS_COUNT_MAX:
            yield warn(
                f"{port.label} {netdev.name}",
                f"{len(on)} lossless priorities: {', '.join(map(str, sorted(on)))}",
                f"one, at most {LOSSLESS_COUNT_MAX}: buffers for more are rarely there",
                fix=f"mlnx_qos -i {netdev.name} -f {table if priority is not None else '0,0,0,1,0,0,0,0'}",
                persists=False,
                evidence=evidence,
            )
        yield from _neighbour_pfc(port, netdev, on if priority is None else frozenset({priority}))


def _neighbour_pfc(port: Port, netdev: Netdev, ours: frozenset[int]) -> Iterator[Finding]:
    """What the switch announces about its side, or how it behaves."""
    host = port.host
    argvs = [argv for argv in host.argvs("lldptool", "-n", netdev.name) if "PFC" in argv]
    said = attempt(lambda: host.command(*argvs[0])) if argvs else None
    theirs = qos.parse_lldp_pfc(said) if said else None
    if theirs is not None:
        missing = ours - theirs
        if missing and ours and (host.lossless or attempt(lambda: netdev.qos.lossless)):
            yield fail(
                f"switch port of {netdev.name}",
                f"announces PFC for {', '.join(map(str, sorted(theirs))) or 'no priority'}",
                f"priority {', '.join(map(str, sorted(missing)))}",
                fix="enable PFC for this priority on the switch port",
                persists=True,
                evidence=[host.said(*argvs[0])],
            )
        return
    steps = attempt(lambda: netdev.stats_delta)
    if not steps:
        return
    for priority in ours:
        sent, received = (steps.get(f"{d}_prio{priority}_pause", 0) for d in ("tx", "rx"))
        lost = steps.get(f"rx_prio{priority}_buf_discard", 0) + steps.get(f"rx_prio{priority}_discards", 0)
        if (
            sent > 0
            and received == 0
            and lost > 0
            and priority in (attempt(lambda: netdev.qos.lossless) or ())
        ):
            yield warn(
                f"switch port of {netdev.name}",
                f"{sent} pauses sent, none received, and {lost} packets of priority {priority} dropped",
                "a switch that obeys PFC",
                fix="enable PFC for this priority on the switch port",
                persists=True,
                evidence=port.wire_evidence(f"tx_prio{priority}_pause", f"rx_prio{priority}_buf_discard"),
            )


@check(
    "qos.global_pause",
    title="Pause frames stop a priority, not the port",
    why="Global pause stops the whole port, acknowledgements and management with it.",
    source="ethtool -a: RX, TX",
    fix="ethtool -A <netdev> rx off tx off",
    undo="ethtool -A <netdev> rx on tx on",
    per=Per.ROCE,
)
def global_pause(port: Port) -> Iterator[Finding]:
    host = port.host
    for netdev in _wires(port):
        labels = ethtool.parse_labels(host.command("ethtool", "-a", netdev.name))
        on = [side for side in ("rx", "tx") if ethtool.is_on(labels, side)]
        if not on:
            continue
        settings = attempt(lambda: netdev.qos)
        with_pfc = settings is not None and bool(settings.lossless)
        severity = Outcome.FAIL if with_pfc else Outcome.WARN if host.lossless else Outcome.INFO
        yield finding(
            severity,
            f"{port.label} {netdev.name}",
            f"global pause {' and '.join(on)}" + (" beside PFC" if with_pfc else ""),
            "off",
            fix=f"ethtool -A {netdev.name} rx off tx off",
            persists=False,
            evidence=[host.said("ethtool", "-a", netdev.name), netdev.qos_evidence() if with_pfc else None],
        )


def _traffic_class(port: Port) -> list[tuple[int, str, Evidence]]:
    """
    (traffic class, who says so, where) for each target on this port; what the vendor stack forces counts
    for all.
    """
    host = port.host
    path = f"{port.device.path}/tc/{port.number}/traffic_class"
    text = host.peek(path)
    forced = qos.parse_tclass(text) if text else None
    found: list[tuple[int, str, Evidence]] = []
    for target in host.targets:
        if target.protocol == "tcp" or not any(p.label == port.label for p in target.ports):
            continue
        environ = attempt(lambda: target.environ)
        if environ is None:
            continue
        value = environ.get("MC_IB_TC", environ.get("NCCL_IB_TC", "")).strip()
        if re.fullmatch(r"\d{1,3}", value, re.ASCII) and int(value) < 256:
            found.append(
                (
                    int(value),
                    f"{target.name} MC_IB_TC={value}",
                    target.evidence("environ", f"MC_IB_TC={value}"),
                )
            )
        elif forced is not None:
            found.append((forced, f"global tclass {forced}", host.at(path)))
        else:
            found.append(
                (0, f"{target.name}: MC_IB_TC not set", target.evidence("environ", "MC_IB_TC is not set"))
            )
    if not found and forced is not None:
        found.append((forced, f"global tclass {forced}", host.at(path)))
    return found


@check(
    "qos.tclass_mapping",
    title="RoCE packets land in the RoCE priority",
    why="Loss under load only: the packets ride outside the lossless class.",
    source="MC_IB_TC, <dev>/tc/1/traffic_class, dscp2prio of mlnx_qos, per-priority bytes of ethtool -S",
    fix="MC_IB_TC=106 (DSCP 26 and ECN bits) for every process, on every node",
    undo="unset MC_IB_TC",
    per=Per.ROCE,
    kind="S/Δ",
    root="p",
)
def tclass_mapping(port: Port) -> Iterator[Finding]:
    host = port.host
    priority = host.roce_priority
    wires = _wires(port)
    settings = next((q for q in (attempt(lambda: n.qos) for n in wires) if q is not None), None)
    lossless = settings.lossless if settings is not None else frozenset[int]()
    wanted = frozenset({priority}) if priority is not None else lossless
    judged = False
    if wanted and (settings is None or settings.trust != "pcp"):
        for tclass, who, where in _traffic_class(port):
            if priority is None and not who.endswith(str(tclass)):
                continue  # nothing says that this port should be lossless, and nobody chose a class
            judged = True
            dscp = tclass >> 2
            table = settings.dscp_priority if settings is not None else {}
            lands = table.get(dscp, dscp >> 3)
            if lands not in wanted and (host.lossless or lossless):
                yield fail(
                    port.label,
                    f"{who}: DSCP {dscp} → priority {lands}",
                    f"priority {', '.join(map(str, sorted(wanted)))}",
                    fix=f"export MC_IB_TC={((host.expect_int('roce_dscp') or 26) << 2) | 2} for the "
                    f"process and restart it",
                    persists=True,
                    evidence=[where, wires[0].qos_evidence()],
                )
    steps = attempt(lambda: port.wire_steps)
    if steps is not None and priority is not None:
        sent = {p: steps.get(f"tx_prio{p}_bytes", 0) for p in range(qos.PRIORITIES)}
        if sum(sent.values()) and attempt(lambda: port.busy):
            judged = True
            main = max(sent, key=lambda p: sent[p])
            if main != priority and sent[main] > MAIN_SHARE * sum(sent.values()):
                yield fail(
                    port.label,
                    f"{sent[main] / sum(sent.values()):.0%} of the bytes leave in priority {main}",
                    f"priority {priority}",
                    fix="export MC_IB_TC=106 for every process on this node",
                    persists=True,
                    evidence=port.wire_evidence(f"tx_prio{main}_bytes", f"tx_prio{priority}_bytes"),
                )
    if not judged:
        if not wanted:
            raise Skip("no priority is lossless, by policy or by PFC")
        if settings is None:
            _qos(port)
        raise Skip(f"{port.label}: no traffic class is set by a target")


@check(
    "qos.direction_asymmetry",
    title="Both directions ride in one priority",
    why="One side marks its packets, the other does not: half of the traffic is outside the lossless class.",
    source="ethtool -S tx_prioN_bytes against rx_prioN_bytes over the window",
    fix="the same MC_IB_TC and trust dscp on both sides",
    per=Per.ROCE,
    kind="Δ/X",
)
def direction_asymmetry(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    steps = port.wire_steps
    sides = {d: {p: steps.get(f"{d}_prio{p}_bytes", 0) for p in range(qos.PRIORITIES)} for d in ("tx", "rx")}
    if not any(f"tx_prio{p}_bytes" in steps for p in range(qos.PRIORITIES)):
        raise Skip(f"{port.label}: no counters a priority (virtual functions have none)")
    totals = {d: sum(counts.values()) for d, counts in sides.items()}
    if min(totals.values()) <= SMALL_DIRECTION * max(totals.values()) or not totals["tx"]:
        raise Skip(f"{port.label}: one direction carries next to nothing")
    if attempt(lambda: port.busy) is False:
        raise Skip(f"{port.label} is idle")
    main = {d: max(counts, key=counts.__getitem__) for d, counts in sides.items()}
    clear = all(sides[d][main[d]] > MAIN_SHARE * totals[d] for d in main)
    if clear and main["tx"] != main["rx"]:
        host = port.host
        wanted = host.roce_priority
        wrong = "sends" if main["tx"] != wanted else "receives"
        evidence = port.wire_evidence(f"tx_prio{main['tx']}_bytes", f"rx_prio{main['rx']}_bytes")
        evidence += [seen for n in port.wire_netdevs[:1] if (seen := n.qos_evidence()) is not None]
        evidence += [
            t.evidence("environ") for t in host.targets[:1] if attempt(lambda: t.environ) is not None
        ]
        yield fail(
            port.label,
            f"sends in priority {main['tx']}, receives in priority {main['rx']} ({window_s:g} s)",
            f"priority {wanted} both ways" if wanted is not None else "one priority both ways",
            fix=f"this side {wrong} outside the class: set MC_IB_TC=106 and mlnx_qos --trust dscp on "
            + ("this node" if wrong == "sends" else "its peers"),
            persists=False,
            evidence=evidence,
        )


_OTHER_CONTROL = frozenset(
    {"none", "off", "rtt", "rttcc", "pcc", "receiver", "receiver-driven", "swift", "timely"}
)


def _control(host: HostFacts) -> str | None:
    """The kind of congestion control that the site wants, in lower case."""
    for key in ("congestion_control", "cc"):
        value = host.expect(key)
        if isinstance(value, str):
            return value.lower()
    return None


@check(
    "qos.cc_enabled",
    title="DCQCN is on for the RoCE priority",
    why="With PFC alone congestion spreads back through the fabric.",
    source="<netdev>/ecn/{roce_np,roce_rp}/enable/<priority>, mlxconfig ROCE_CC_PRIO_MASK",
    fix="echo 1 > /sys/class/net/<netdev>/ecn/roce_{np,rp}/enable/<priority>",
    undo="echo 0 > the same files",
    per=Per.ROCE,
    root="y",
)
def cc_enabled(port: Port) -> Iterator[Finding]:
    host = port.host
    control = _control(host)
    if control in _OTHER_CONTROL:
        raise Skip(f"the site uses {control}")
    priority = host.roce_priority
    if priority is None:
        raise Skip("no policy names a RoCE priority")
    seen = False
    for netdev in _wires(port):
        off = []
        for side in ("roce_np", "roce_rp"):
            path = f"{netdev.path}/ecn/{side}/enable/{priority}"
            text = host.peek(path)
            if text is None:
                continue
            seen = True
            if text.strip() == "0":
                off.append(path)
        if off:
            yield warn(
                f"{port.label} {netdev.name}",
                f"congestion control off for priority {priority}",
                "on (notification and reaction)",
                fix="; ".join(f"echo 1 > {path}" for path in off),
                persists=False,
                evidence=[host.at(path) for path in off],
            )
    function = port.device.pci
    if function is not None:
        config = attempt(lambda: rdma.parse_mlxconfig(host.command("mlxconfig", "-d", function.bdf)))
        mask = ((config or {}).get(f"ROCE_CC_PRIO_MASK_P{port.number}") or [""])[-1]
        value = attempt(lambda: sysfs.parse_int(mask))
        if value is not None:
            seen = True
            if not value >> priority & 1:
                yield warn(
                    port.label,
                    f"ROCE_CC_PRIO_MASK_P{port.number} {mask}",
                    "255",
                    fix=f"mlxconfig -d {function.bdf} set ROCE_CC_PRIO_MASK_P{port.number}=255, then reset",
                    persists=True,
                    evidence=[host.said("mlxconfig", "-d", function.bdf)],
                )
    if not seen:
        raise Unseen(f"ecn/roce_np/enable/{priority} of {port.label}", host.why_not("mlxconfig"))


def _programmable_cc(host: HostFacts, bdf: str) -> bool | None:
    """
    Whether the NIC runs programmable (RTT-based) congestion control; None if it has none. Raises Unseen.

    The register says what is in force, the configuration what the next boot brings.
    """
    register = attempt(lambda: tools.parse_mlxreg(host.command("mlxreg", "-d", bdf, "PPCC")))
    if register is not None and register.get("status", 0) == 0 and "value" in register:
        return register["value"] != 0
    config = rdma.parse_mlxconfig(host.command("mlxconfig", "-d", bdf))
    value = (config.get("USER_PROGRAMMABLE_CC") or [""])[-1]
    return value.startswith(("True", "1", "ENABLED")) if value else None


@check(
    "qos.rtt_cc",
    title="RTT-based congestion control is as the site wants it, on all nodes",
    why="Mixed reactions share the fabric unfairly.",
    source="mlxconfig USER_PROGRAMMABLE_CC, mlxreg PPCC",
    fix="mlxconfig -d <bdf> set USER_PROGRAMMABLE_CC=<0 or 1>, then reset",
    undo="set the former value",
    per=Per.FLEET,
    kind="S/X",
    root="y",
    nodes_min=1,
)
def rtt_cc(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    states: dict[bool, list[str]] = {}
    reason: Unseen | None = None
    wanted: object = None
    for host in nodes:
        wanted = host.expect("rtt_cc") if wanted is None else wanted
        for device in attempt(lambda: host.devices_in_scope) or ():
            if device.pci is None or device.kind != "mlx5":
                continue
            try:
                state = _programmable_cc(host, device.pci.bdf)
            except Unseen as unseen:
                reason = unseen
                continue
            if state is not None:
                states.setdefault(state, []).append(f"{host.name} {device.name}")
    if not states:
        if reason is not None:
            raise reason
        raise Skip("no NIC with programmable congestion control")
    if isinstance(wanted, bool):
        for on, who in states.items():
            if on != wanted:
                yield warn(
                    ", ".join(who[:8]),
                    "on" if on else "off",
                    "on" if wanted else "off",
                    fix=f"mlxconfig -d <bdf> set USER_PROGRAMMABLE_CC={int(wanted)}, then reset",
                    persists=True,
                )
    if len(states) > 1:
        few = min(states, key=lambda on: len(states[on]))
        yield fail(
            ", ".join(states[few][:8]),
            "on" if few else "off",
            f"{'off' if few else 'on'}, as {len(states[not few])} others",
            fix="set it alike on all nodes",
            persists=True,
        )


@check(
    "qos.cnp_priority",
    title="CNPs overtake the data they slow",
    why="A CNP queued behind the data comes too late.",
    source="<netdev>/ecn/roce_np/{cnp_dscp,cnp_802p_prio}",
    fix="echo 48 > …/cnp_dscp; echo 6 > …/cnp_802p_prio",
    undo="write the former values",
    per=Per.ROCE,
    root="p",
)
def cnp_priority(port: Port) -> Iterator[Finding]:
    host = port.host
    data = lossless_priorities(port)
    if host.roce_priority is not None:
        data |= {host.roce_priority}
    seen = False
    reason: Unseen | None = None
    for netdev in _wires(port):
        settings = attempt(lambda: netdev.qos)
        for name, default in (("cnp_dscp", CNP_DSCP_DEFAULT), ("cnp_802p_prio", CNP_PRIORITY_DEFAULT)):
            path = f"{netdev.path}/ecn/roce_np/{name}"
            try:
                value = host.number(path)
            except Unseen as unseen:
                reason = reason or unseen
                continue
            seen = True
            table = settings.dscp_priority if settings is not None else {}
            priority = table.get(value, value >> 3) if name == "cnp_dscp" else value
            tagged = settings is not None and settings.trust == "pcp"
            if priority in data and (name == "cnp_dscp") != tagged:
                yield warn(
                    f"{port.label} {netdev.name}",
                    f"{name} {value}: priority {priority}, with the data",
                    f"{default}",
                    fix=f"echo {default} > {path}",
                    persists=False,
                    evidence=[host.at(path)],
                )
    if not data:
        raise Skip("no priority carries RoCE by policy or PFC")
    if not seen and reason is not None:
        raise reason


@check(
    "qos.dcbx_owner",
    title="One owner sets PFC",
    why="Firmware or lldpad overwrite what the operator set.",
    source="mlnx_qos 'DCBX mode', lldptool -t -i <netdev> -V PFC",
    fix="mlnx_qos -i <netdev> -d os; systemctl disable --now lldpad",
    undo="mlnx_qos -i <netdev> -d fw",
    per=Per.ROCE,
    root="p",
)
def dcbx_owner(port: Port) -> Iterator[Finding]:
    host = port.host
    if str(host.expect("dcbx") or "").lower() in ("fw", "firmware", "willing"):
        raise Skip("the site lets the switch decide (DCBX)")
    for netdev, settings in _qos(port):
        if settings.dcbx and settings.dcbx.lower().startswith("firmware"):
            yield warn(
                f"{port.label} {netdev.name}",
                f"DCBX mode: {settings.dcbx}",
                "OS controlled",
                fix=f"mlnx_qos -i {netdev.name} -d os",
                persists=False,
                evidence=[netdev.qos_evidence()],
            )
        argvs = [a for a in host.argvs("lldptool", netdev.name) if "PFC" in a and "-n" not in a]
        said = attempt(lambda: host.command(*argvs[0])) if argvs else None
        if said and re.search(r"enableTx\s*[:=]\s*yes", said):
            held = qos.parse_lldp_pfc(said)
            if held is not None and settings.pfc is not None and held != settings.lossless:
                yield warn(
                    f"{port.label} {netdev.name}",
                    f"lldpad holds PFC for {', '.join(map(str, sorted(held))) or 'none'}, "
                    f"{', '.join(map(str, sorted(settings.lossless))) or 'none'} is in force",
                    "one owner",
                    fix="systemctl disable --now lldpad",
                    persists=True,
                    evidence=[host.said(*argvs[0]), netdev.qos_evidence()],
                )


@check(
    "qos.buffer",
    title="The lossless priority has a buffer",
    why="PFC cannot help a priority that is mapped to a buffer of zero bytes.",
    source="mlnx_qos 'Receive buffer size', row 'buffer'",
    fix="mlnx_qos -i <netdev> --prio2buffer=0,0,0,1,0,0,0,0 --buffer_size=…",
    undo="write the former map",
    per=Per.ROCE,
    root="p",
)
def buffer(port: Port) -> Iterator[Finding]:
    for netdev, settings in _qos(port):
        if settings.priority_buffer is None or not settings.buffer_bytes or not any(settings.buffer_bytes):
            continue
        for priority in sorted(settings.lossless):
            index = settings.priority_buffer[priority]
            if index < len(settings.buffer_bytes) and settings.buffer_bytes[index] == 0:
                big = max(range(len(settings.buffer_bytes)), key=lambda i: settings.buffer_bytes[i])
                table = ",".join(
                    str(big if p == priority else b) for p, b in enumerate(settings.priority_buffer)
                )
                yield fail(
                    f"{port.label} {netdev.name}",
                    f"priority {priority} → buffer {index} of 0 bytes",
                    "a buffer with room",
                    fix=f"mlnx_qos -i {netdev.name} --prio2buffer={table}",
                    persists=False,
                    evidence=[netdev.qos_evidence()],
                )


_SETTERS = re.compile(r"mlnx_qos|dcb (pfc|app)|cma_roce|--trust")


@check(
    "qos.persistence",
    title="The settings survive a reboot",
    why="PFC and trust are set at run time and lost with it.",
    source="policy against /etc/udev/rules.d, /etc/systemd/system, /etc/rc.local",
    fix="put the commands into a udev rule or a unit, or use the NIC configuration operator",
    root="p",
)
def persistence(host: HostFacts) -> Iterator[Finding]:
    if host.roce_priority is None:
        raise Skip("no policy names a RoCE priority")
    seen = False
    for folder in ("/etc/udev/rules.d", "/etc/systemd/system", "/etc/networkd-dispatcher"):
        for name in attempt(lambda: host.ls(folder)) or ():
            seen = True
            if _SETTERS.search(host.peek(f"{folder}/{name}") or ""):
                return
    if _SETTERS.search(host.peek("/etc/rc.local") or ""):
        return
    if not seen:
        host.ls("/etc/udev/rules.d")
        return
    yield info(
        "PFC and trust",
        "set at run time only: nothing found that sets them at boot",
        "a udev rule or unit",
        fix="put the mlnx_qos commands into /etc/udev/rules.d or a unit",
        persists=True,
    )


@check(
    "qos.cross_nic",
    title="All rails and nodes are set alike",
    why="One rail with other settings is the slow one, and hard to find.",
    source="trust, PFC, DSCP map of every judged interface",
    fix="the settings of the others",
    per=Per.FLEET,
    kind="X",
    root="p",
    nodes_min=1,
)
def cross_nic(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    groups: dict[str, list[tuple[Port, Netdev]]] = {}
    reason: Unseen | Skip | None = None
    for host in nodes:
        for port in attempt(lambda: host.ports) or ():
            if not port.is_roce or not port.active:
                continue
            try:
                for netdev, settings in _qos(port):
                    pfc = (
                        "".join("1" if on else "0" for on in settings.pfc)
                        if settings.pfc is not None
                        else "?"
                    )
                    table = sorted(settings.dscp_priority.items()) if settings.trust == "dscp" else []
                    moved = [f"{d}:{p}" for d, p in table if p != d >> 3]
                    key = f"trust {settings.trust or '?'}, PFC {pfc}" + (
                        f", DSCP {' '.join(moved)}" if moved else ""
                    )
                    groups.setdefault(key, []).append((port, netdev))
            except (Unseen, Skip) as missing:
                reason = missing
    if not groups:
        if reason is not None:
            raise reason
        raise Skip("no RoCE port")
    known = {key: who for key, who in groups.items() if "?" not in key} or groups
    if len(known) < 2:
        return
    wanted = nodes[0].expect_int("roce_dscp") is not None
    usual = max(known, key=lambda key: (len(known[key]), "trust dscp" in key if wanted else False))
    for key, who in known.items():
        if key == usual:
            continue
        for port, netdev in who[:16]:
            yield fail(
                f"{port.host.name} {netdev.name}" if len(nodes) > 1 else netdev.name,
                key,
                f"{usual}, as {len(known[usual])} others",
                fix=f"mlnx_qos -i {netdev.name} with the settings of the others",
                persists=False,
                evidence=[netdev.qos_evidence()],
            )


@check(
    "qos.lossless_vlan0",
    title="Packets without a tag do not rely on the tag",
    why="With trust pcp an untagged packet has no priority bits: priority 0.",
    source="mlnx_qos trust state, the interface of the GID in use",
    fix="mlnx_qos -i <netdev> --trust dscp",
    undo="mlnx_qos -i <netdev> --trust pcp",
    per=Per.ROCE,
    root="p",
)
def lossless_vlan0(port: Port) -> Iterator[Finding]:
    host = port.host
    if not lossless_priorities(port):
        _qos(port)
        raise Skip("no priority is lossless, by policy or by PFC")
    best = attempt(lambda: port.best_gid)
    tagged = (
        best is not None
        and best.netdev is not None
        and ("." in best.netdev or host.peek(f"/proc/net/vlan/{best.netdev}") is not None)
    )
    if tagged:
        return
    for netdev, settings in _qos(port):
        if settings.trust == "pcp":
            yield warn(
                f"{port.label} {netdev.name}",
                "trust pcp, and RoCE is untagged",
                "trust dscp",
                fix=f"mlnx_qos -i {netdev.name} --trust dscp",
                persists=False,
                evidence=[netdev.qos_evidence()],
            )
