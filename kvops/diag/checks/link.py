"""Links: state, rate, errors, bonds, and what InfiniBand needs of its subnet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvops.diag.compare import Groups
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.rdma import Port
from kvops.diag.facts.target import Target
from kvops.diag.model import Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import ethtool, rdma, sysfs, tools
from kvops.diag.registry import Per, check

ACTIVE, LINK_UP = 4, 5
CARRIER_CHANGES_MAX = 2  # over the window [N]
FLAPS_PER_DAY_MAX = 5  # [A]
BOOT_GRACE_S = 1800.0  # [O]
DAY_S = 86400.0
SYMBOLS_PER_S_WARN = 10.0  # [N]
SYMBOLS_PER_HOUR_FAIL = 120  # [N]
RECOVERIES_PER_MINUTE_WARN = 5.0  # [N]
RECEIVE_ERRORS_PER_S_WARN = 10.0  # [N]
EFFECTIVE_BER_WARN = 1e-15  # [O]
RAW_BER_FAIL = 1e-7  # [O]
_SYMBOLS = re.compile(r"rx_(pcs_symbol_err|crc_errors|symbol_err|err_lane_\d)_phy", re.ASCII)
PAM4_LANE_GBPS = 50.0  # lanes from this rate on are PAM4 and need FEC [K]


def siblings(port: Port) -> list[Port]:
    """Active ports in scope on boards of the same kind, itself left out."""
    board = attempt(lambda: port.device.text("board_id"))
    if not board:
        return []
    others = [p for p in port.host.ports if p is not port and p.active and not p.device.is_bond]
    return [p for p in others if attempt(lambda: p.device.text("board_id")) == board]


def _mlxlink_argvs(port: Port) -> list[tuple[str, ...]]:
    names = {port.device.name, port.netdev_name or "", port.device.pci.bdf if port.device.pci else ""}
    return [argv for argv in port.host.argvs("mlxlink") if names & set(argv[1:])]


def _mlxlink(port: Port) -> dict[str, str]:
    """What mlxlink says of the port; nothing if it was not asked or refused."""
    for argv in _mlxlink_argvs(port):
        labels = attempt(lambda: tools.parse_mlxlink(port.host.command(*argv)))
        if labels:
            return labels
    return {}


@check(
    "link.port_state",
    title="The port is up",
    why="A port that is not active moves nothing: 'port not active', retry exceeded.",
    source="/sys/class/infiniband/<dev>/ports/<n>/{state,phys_state}",
    fix="Disabled: ibportstate … enable, or ip link set <netdev> up; else cable, optic, switch port, "
    "subnet manager",
    undo="ip link set <netdev> down",
    per=Per.PORT,
)
def port_state(port: Port) -> Iterator[Finding]:
    host = port.host
    if port.device.kind == "efa":
        netdev = port.need_netdev()
        if netdev.text("carrier") != "1":
            yield fail(
                port.label,
                f"{netdev.name} has no carrier",
                "carrier 1 (an EFA port always says ACTIVE)",
                fix=f"ip link set {netdev.name} up",
                persists=False,
                evidence=[host.at(f"{netdev.path}/carrier")],
            )
        return
    state = port.state
    phys = attempt(lambda: port.phys_state)
    if state[0] == ACTIVE and (phys is None or phys[0] == LINK_UP):
        return
    name = port.netdev_name
    if phys is not None and phys[1].lower() == "disabled":
        hint = f"ip link set {name} up" if name else f"ibportstate … {port.number} enable"
        cause = ": switched off by somebody"
    elif port.is_infiniband and state[0] == 2:
        hint, cause = "start the subnet manager (opensm, or on the switch)", ": no subnet manager has seen it"
    else:
        hint = (
            f"check cable, optic and switch port; ip link set {name} up"
            if name
            else "check cable, optic, switch port"
        )
        cause = ""
    advice = _mlxlink(port).get("recommendation", "")
    if advice and advice != "No issue was observed":
        cause += f"; the firmware says: {advice}"
    yield fail(
        port.label,
        f"{state[0]}: {state[1]}" + (f", {phys[0]}: {phys[1]}" if phys else "") + cause,
        "4: ACTIVE and 5: LinkUp",
        fix=hint,
        persists=False,
        evidence=[host.at(f"{port.path}/state"), host.at(f"{port.path}/phys_state")],
    )


def _judged_rate(port: Port) -> sysfs.Rate:
    if not port.active:
        raise Skip(f"{port.label} is not active: its rate says nothing")
    if port.device.is_bond:
        raise Skip(f"{port.label} is a bond: it shows the rate of one member")
    return port.rate


@check(
    "link.rate",
    title="Each port runs at its full rate",
    why="One slow rail slows every transfer that is striped over it.",
    source="/sys/class/infiniband/<dev>/ports/<n>/rate against the profile and its siblings",
    fix="check cable, FEC and the speed set on NIC and switch",
    per=Per.PORT,
)
def rate(port: Port) -> Iterator[Finding]:
    own = _judged_rate(port)
    wanted = port.host.expect_int("rate_gbps")
    others = [r for r in (attempt(lambda: p.rate) for p in siblings(port)) if r is not None]
    best = max((r.gbps for r in others), default=own.gbps)
    expected = float(wanted) if wanted else best
    if own.gbps < expected:
        yield fail(
            port.label,
            port.text("rate"),
            f"{expected:g} Gb/sec"
            + ("" if wanted else f", as {sum(r.gbps == best for r in others)} siblings"),
            fix=f"ethtool -s {port.netdev_name or '<netdev>'} autoneg on; replace the cable or optic",
            persists=True,
            evidence=[port.host.at(f"{port.path}/rate")],
        )


@check(
    "link.width",
    title="No lane is lost",
    why="A port that lost lanes runs on with a half or a quarter of its rate.",
    source="/sys/class/infiniband/<dev>/ports/<n>/rate '(2X NDR)' against siblings of the same board",
    fix="clean or replace the cable",
    per=Per.PORT,
)
def width(port: Port) -> Iterator[Finding]:
    own = _judged_rate(port)
    if not own.lanes:
        raise Skip(f"{port.label}: the rate does not say how many lanes")
    lanes = [r.lanes for r in (attempt(lambda: p.rate) for p in siblings(port)) if r is not None and r.lanes]
    if lanes and own.lanes < max(lanes):
        yield fail(
            port.label,
            port.text("rate"),
            f"{max(lanes)}X, as its siblings",
            fix="clean or replace cable and optic",
            persists=True,
            evidence=[port.host.at(f"{port.path}/rate")],
        )


@check(
    "link.flap",
    title="The link stays up",
    why="Queue pairs die after about half a second of silence (timeout 14, 7 retries).",
    source="counters/link_downed, <netdev>/carrier_changes, ethtool link_down_events_phy, dmesg 'Link down'",
    fix="replace cable or optic, look at the switch port's log",
    per=Per.PORT,
    kind="Δ/L",
    root="p",
)
def flap(port: Port) -> Iterator[Finding]:
    host = port.host
    window_s = host.snapshot.window_s
    seen = False
    if window_s is not None:
        states = [attempt(lambda: sysfs.parse_enum(port.text("state", s))) for s in (0, 1)]
        if None not in states:
            seen = True
            if states[0] != states[1]:
                yield fail(
                    port.label,
                    f"state {states[0]} → {states[1]} within {window_s:g} s",
                    "no change",
                    fix="check cable and optic",
                    persists=True,
                    evidence=[host.at(f"{port.path}/state")],
                )
        downed = attempt(lambda: port.steps("link_downed"))
        wire = attempt(lambda: port.wire_steps)
        seen = seen or downed is not None or wire is not None
        if downed and downed.get("link_downed", 0) > 0:
            yield fail(
                port.label,
                f"link_downed +{downed['link_downed']} in {window_s:g} s",
                "+0",
                fix="replace cable or optic",
                persists=True,
                evidence=port.counter_evidence("link_downed"),
            )
        elif wire and wire.get("link_down_events_phy", 0) > 0:
            yield fail(
                port.label,
                f"link_down_events_phy +{wire['link_down_events_phy']} in {window_s:g} s",
                "+0",
                fix="replace cable or optic",
                persists=True,
                evidence=port.wire_evidence("link_down_events_phy"),
            )
        for netdev in port.wire_netdevs:
            path = f"{netdev.path}/carrier_changes"
            counts = [attempt(lambda: host.number(path, s)) for s in (0, 1)]
            if counts[0] is None or counts[1] is None:
                continue
            seen = True
            if counts[1] - counts[0] > CARRIER_CHANGES_MAX:
                yield warn(
                    netdev.name,
                    f"carrier_changes +{counts[1] - counts[0]} in {window_s:g} s",
                    f"at most +{CARRIER_CHANGES_MAX}",
                    fix="replace cable or optic",
                    persists=True,
                    evidence=[host.at(path, f"{counts[0]} → {counts[1]}")],
                )
    names = {netdev.name for netdev in port.wire_netdevs} | (
        {port.netdev_name} if port.netdev_name else set()
    )
    lines = attempt(lambda: host.log_lines(r"[Ll]ink (is )?[Dd]own"))
    if lines is not None:
        stamps = [line.seconds for line in host.log if line.seconds is not None]
        now = host.uptime_s or max(stamps, default=0.0)
        words = [line for line in lines if names & set(re.split(r"[\s:]+", line.text))]
        recent = [
            x for x in words if x.seconds is None or (x.seconds > BOOT_GRACE_S and now - x.seconds <= DAY_S)
        ]
        if len(recent) >= FLAPS_PER_DAY_MAX:
            yield fail(
                port.label,
                f"{len(recent)} times down in the last day, says the log",
                f"fewer than {FLAPS_PER_DAY_MAX}",
                fix="replace cable or optic; look at the switch port",
                persists=True,
                evidence=[host.log_evidence(line) for line in recent[-2:]],
            )
    elif not seen:
        host.need_window()
        port.step("link_downed")


@check(
    "link.symbol_errors",
    title="The line has no errors",
    why="Damaged packets are sent again.",
    source="counters/{symbol_error,link_error_recovery,port_rcv_errors,local_link_integrity_errors}; "
    "ethtool *_phy",
    fix="clean or replace cable and optic",
    per=Per.PORT,
    kind="Δ",
)
def symbol_errors(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    counters = attempt(
        lambda: port.steps(
            "symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors"
        )
    )
    wire = attempt(lambda: port.wire_steps)
    if counters is None and wire is None:
        port.step("symbol_error")
    counters, wire = counters or {}, wire or {}
    symbols = {"symbol_error": counters.get("symbol_error", 0)}
    symbols |= {name: step for name, step in wire.items() if _SYMBOLS.fullmatch(name)}
    # The hourly figure is what one hour may hold at most: reached within a shorter window it is reached.
    hourly = SYMBOLS_PER_HOUR_FAIL * max(1.0, window_s / 3600)
    for name, step in symbols.items():
        if step > hourly or step / window_s > SYMBOLS_PER_S_WARN:
            yield finding(
                Outcome.FAIL if step > hourly else Outcome.WARN,
                port.label,
                f"{name} +{step} in {window_s:g} s",
                f"at most {SYMBOLS_PER_HOUR_FAIL} an hour",
                fix="clean or replace cable and optic",
                persists=True,
                evidence=port.counter_evidence(name) if name in counters else port.wire_evidence(name),
            )
    recovery = counters.get("link_error_recovery", 0)
    if recovery * 60 / window_s > RECOVERIES_PER_MINUTE_WARN:
        yield warn(
            port.label,
            f"link_error_recovery +{recovery} in {window_s:g} s",
            "at most 5 a minute",
            fix="clean or replace cable and optic",
            persists=True,
            evidence=port.counter_evidence("link_error_recovery"),
        )
    received = counters.get("port_rcv_errors", 0)
    if received / window_s > RECEIVE_ERRORS_PER_S_WARN:
        yield warn(
            port.label,
            f"port_rcv_errors +{received} in {window_s:g} s",
            "at most 10 a second",
            fix="clean or replace cable and optic",
            persists=True,
            evidence=port.counter_evidence("port_rcv_errors"),
        )
    integrity = counters.get("local_link_integrity_errors", 0)
    if integrity > 0:
        yield fail(
            port.label,
            f"local_link_integrity_errors +{integrity} in {window_s:g} s",
            "+0",
            fix="replace cable and optic",
            persists=True,
            evidence=port.counter_evidence("local_link_integrity_errors"),
        )


@check(
    "link.ber",
    title="The line's bit error rate is low",
    why="Above it forward error correction no longer hides errors.",
    source="mlxlink -d <dev> -c: Effective and Raw Physical BER",
    fix="clean or replace cable and optic",
    per=Per.PORT,
    root="y",
)
def ber(port: Port) -> Iterator[Finding]:
    host = port.host
    argvs = _mlxlink_argvs(port)
    if not argvs:
        raise Unseen(f"mlxlink of {port.label}", host.why_not("mlxlink"))
    labels = tools.parse_mlxlink(host.command(*argvs[0]))
    for name, limit, severity in (
        ("Effective Physical BER", EFFECTIVE_BER_WARN, Outcome.WARN),
        ("Raw Physical BER", RAW_BER_FAIL, Outcome.FAIL),
    ):
        value = labels.get(name.lower(), "")
        rate = attempt(lambda: tools.parse_ber(value))  # "N/A" for minutes after a link came up
        if rate is not None and rate > limit:
            yield finding(
                severity,
                port.label,
                f"{name} {value}",
                f"at most {limit:g}",
                fix="clean or replace cable and optic",
                persists=True,
                evidence=[host.said(*argvs[0], text=f"{name}: {value}")],
            )


@check(
    "link.fec",
    title="Fast lanes have error correction",
    why="PAM4 lanes without FEC do not link, or lose packets.",
    source="ethtool --show-fec, 'Active FEC encoding'",
    fix="ethtool --set-fec <netdev> encoding rs, the same on the switch",
    undo="ethtool --set-fec <netdev> encoding auto",
    per=Per.ROCE,
)
def fec(port: Port) -> Iterator[Finding]:
    host = port.host
    own = _judged_rate(port)
    if port.device.is_virtual:
        raise Skip(f"{port.label} is a virtual function")
    for netdev in port.wire_netdevs:
        labels = ethtool.parse_labels(host.command("ethtool", "--show-fec", netdev.name))
        active = labels.get("active fec encoding") or labels.get("active fec encodings") or ""
        pam4 = own.gbps >= 100 and own.lanes and own.gbps / own.lanes >= PAM4_LANE_GBPS
        if pam4 and active.strip().lower() in ("off", "none"):
            yield fail(
                port.label,
                f"{netdev.name}: FEC {active} at {own.gbps:g} Gb/sec on {own.lanes} lanes",
                "RS",
                fix=f"ethtool --set-fec {netdev.name} encoding rs",
                persists=False,
                evidence=[host.said("ethtool", "--show-fec", netdev.name)],
            )


@check(
    "link.layer",
    title="The port is of the intended kind",
    why="A port in the other mode takes GIDs and LIDs for what they are not.",
    source="/sys/class/infiniband/<dev>/ports/<n>/link_layer against the profile and its siblings",
    fix="mlxconfig -d <bdf> set LINK_TYPE_P1=2 (Ethernet) or 1 (InfiniBand), then a reset",
    undo="set the former LINK_TYPE_P1",
    per=Per.PORT,
)
def layer(port: Port) -> Iterator[Finding]:
    if port.device.kind == "efa":
        raise Skip("EFA reports Unknown")
    own = port.link_layer
    wanted = port.host.expect("link_layer")
    others = [attempt(lambda: p.link_layer) for p in siblings(port)]
    usual = max(set(others), key=others.count) if len(others) >= 2 else None
    expected = wanted if isinstance(wanted, str) else usual if others.count(usual) >= 2 else None
    if expected and own.lower() != expected.lower():
        bdf = port.device.pci.bdf if port.device.pci else "<bdf>"
        yield fail(
            port.label,
            own,
            expected + ("" if wanted else ", as its siblings"),
            fix=f"mlxconfig -d {bdf} set LINK_TYPE_P{port.number}={2 if expected == 'Ethernet' else 1}, "
            f"then reset",
            persists=True,
            evidence=[port.host.at(f"{port.path}/link_layer")],
        )


@check(
    "link.ib_sm",
    title="A subnet manager has configured the port",
    why="Without LIDs there are no path records, and no connection.",
    source="/sys/class/infiniband/<dev>/ports/<n>/{lid,sm_lid}",
    fix="start a subnet manager on the fabric (opensm, UFM or the switch)",
    per=Per.IB,
)
def ib_sm(port: Port) -> Iterator[Finding]:
    if port.state[0] not in (2, 3, ACTIVE):
        raise Skip(f"{port.label} is down: see link.port_state")
    lid, sm_lid = sysfs.parse_int(port.text("lid")), sysfs.parse_int(port.text("sm_lid"))
    if lid in (0, 0xFFFF) or sm_lid == 0:
        yield fail(
            port.label,
            f"lid {lid:#x}, sm_lid {sm_lid:#x}",
            "both set by a subnet manager",
            fix="start a subnet manager (opensm, UFM or the switch's own)",
            persists=True,
            evidence=[port.host.at(f"{port.path}/lid"), port.host.at(f"{port.path}/sm_lid")],
        )


@check(
    "link.pkey_membership",
    title="The port is a full member of its partition",
    why="Limited members cannot talk to each other: retry exceeded.",
    source="/sys/class/infiniband/<dev>/ports/<n>/pkeys/<index>, bit 15",
    fix="make the port a full member in the subnet manager's partitions, or choose the index with "
    "MC_PKEY_INDEX",
    per=Per.IB,
)
def pkey_membership(port: Port) -> Iterator[Finding]:
    host = port.host
    indexes: dict[int, str] = {}
    for target in host.targets:
        value = (attempt(lambda: target.environ) or {}).get("MC_PKEY_INDEX", "")
        indexes[int(value) if re.fullmatch(r"\d{1,5}", value, re.ASCII) else 0] = target.name
    for index, user in (indexes or {0: "default"}).items():
        path = f"{port.path}/pkeys/{index}"
        text = host.get(path)
        if text is None:
            yield fail(
                f"{port.label} P_Key {index}",
                "no such entry",
                "a full member",
                fix="unset MC_PKEY_INDEX",
                persists=True,
                evidence=[host.at(path)],
            )
            continue
        key = sysfs.parse_int(text)
        if not key & 0x8000:
            what = "not joined" if key in (0, 0x7FFF) else "limited member"
            yield fail(
                f"{port.label} P_Key {index} ({user})",
                f"{key:#06x}: {what}",
                "bit 15 set: full member",
                fix="partitions.conf of the subnet manager: this port=full; or MC_PKEY_INDEX of a full entry",
                persists=True,
                evidence=[host.at(path)],
            )


@check(
    "link.ib_sl",
    title="All nodes use one service level",
    why="Different service levels are different virtual lanes: one of them is starved.",
    source="MC_IB_SL of the targets, ports/<n>/sm_sl",
    fix="set the same MC_IB_SL on all nodes",
    per=Per.FLEET,
    kind="X",
)
def ib_sl(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    levels = Groups()
    for host in nodes:
        if not any(port.is_infiniband for port in attempt(lambda: host.ports) or ()):
            continue
        for target in host.targets:
            environ = attempt(lambda: target.environ)
            if environ is not None:
                level = environ.get("MC_IB_SL", "0 (default)")
                levels.add(
                    level, f"{host.name} {target.name}", target.evidence("environ", f"MC_IB_SL={level}")
                )
    if not levels:
        raise Skip("no InfiniBand target")
    yield from levels.odd_ones(
        Outcome.WARN,
        says=lambda level: f"MC_IB_SL {level}",
        fix=lambda usual: "export the same MC_IB_SL everywhere",
        persists=True,
    )


def _bond_names(host: HostFacts) -> list[str]:
    """Bonds that RDMA ports in scope belong to."""
    names: dict[str, None] = {}
    for port in host.ports:
        for netdev in (port.netdev_name, *port.own_netdev_names):
            for name, bond in host.bonds.items():
                if netdev and (netdev == name or any(member.name == netdev for member in bond.members)):
                    names[name] = None
    return list(names)


@check(
    "link.bond_mode",
    title="The bond's members are up and aggregate",
    why="A member outside the aggregate halves the bandwidth, and flaps.",
    source="/proc/net/bonding/<bond>: mode, hash policy, MII Status, Aggregator ID, churn states",
    fix="repair the switch's LACP group; ip link set <bond> type bond xmit_hash_policy layer3+4",
    undo="set the former policy",
)
def bond_mode(host: HostFacts) -> Iterator[Finding]:
    names = _bond_names(host)
    if not names:
        if not host.bonds:
            host.ls("/sys/class/infiniband")
        raise Skip("no bond under an RDMA port")
    for name in names:
        bond = host.bonds[name]
        evidence = [host.at(f"/proc/net/bonding/{name}")]
        mode = bond.fields["Bonding Mode"]
        aggregates = {m.fields.get("Aggregator ID") for m in bond.members if m.fields.get("Aggregator ID")}
        down = [m.name for m in bond.members if m.fields.get("MII Status", "up") != "up"]
        churned = [
            m.name
            for m in bond.members
            if "churned" in (m.fields.get("Actor Churn State", ""), m.fields.get("Partner Churn State", ""))
        ]
        if down:
            yield fail(
                name,
                f"{', '.join(down)} down",
                "every member up",
                fix=f"check cable and switch port of {down[0]}",
                persists=True,
                evidence=evidence,
            )
        elif "802.3ad" in mode and len(aggregates) > 1:
            yield fail(
                name,
                f"members in {len(aggregates)} aggregates",
                "one Aggregator ID",
                fix="put both switch ports into one LACP group (MLAG over two switches)",
                persists=True,
                evidence=evidence,
            )
        elif churned:
            yield fail(
                name,
                f"LACP does not settle on {', '.join(churned)}",
                "churn state none",
                fix="configure LACP on the switch ports",
                persists=True,
                evidence=evidence,
            )
        policy = bond.fields.get("Transmit Hash Policy", "")
        if ("802.3ad" in mode or "xor" in mode) and policy and not policy.startswith("layer3+4"):
            yield warn(
                name,
                f"hash policy {policy}",
                "layer3+4: spreads the queue pairs' ports",
                fix=f"ip link set {name} type bond xmit_hash_policy layer3+4",
                persists=False,
                evidence=evidence,
            )
        slots: dict[str, str] = {}
        for member in bond.members:
            bdf = host.snapshot.resolve(f"/sys/class/net/{member.name}/device").rpartition("/")[2]
            if ":" in bdf:
                slots.setdefault(bdf.rpartition(".")[0], member.name)
        if len(slots) > 1:
            carriers = [
                port.label
                for port in host.ports
                if any(gid.netdev == name for gid in attempt(lambda: port.gids) or ())
            ]
            logs = "\n".join(target.log[1] for target in host.targets if target.log is not None)
            failing = bool(attempt(lambda: host.log_lines(r"unable to add gid|QP .*error")))
            failing = (
                failing or re.search(r"[Ff]ailed to (create|modify) QP|rdma_create_qp", logs) is not None
            )
            yield finding(
                Outcome.FAIL if len(carriers) > 1 and failing else Outcome.WARN,
                name,
                f"members on {len(slots)} adapters: {', '.join(slots.values())}",
                "ports of one adapter: only they form a RoCE LAG",
                fix="bond ports of one adapter, or give each adapter its own address",
                persists=True,
                evidence=evidence,
            )


@check(
    "link.bond_qp_spread",
    title="Each endpoint has queue pairs for both members",
    why="A queue pair stays on one member: with one per endpoint half of the bond is idle (183 against "
    "372 Gbit/s).",
    source="/proc/net/bonding/<bond>, MC_NUM_QP_PER_EP; perftest with 1 and with 8 queue pairs",
    fix="MC_NUM_QP_PER_EP=2 or more, or the NIC's own port balancing",
    undo="unset MC_NUM_QP_PER_EP",
    per=Per.TARGET,
    kind="S/A",
)
def bond_qp_spread(target: Target) -> Iterator[Finding]:
    host = target.host
    bonded = [
        (p, host.bonds[p.netdev_name]) for p in target.ports if p.netdev_name and p.netdev_name in host.bonds
    ]
    spreading = [
        (p, b) for p, b in bonded if len(b.members) > 1 and "active-backup" not in b.fields["Bonding Mode"]
    ]
    if not spreading:
        raise Skip(f"{target.name} uses no bond of several members")
    value = target.environ.get("MC_NUM_QP_PER_EP", "").strip()
    if value != "1":
        return
    port, bond = spreading[0]
    runs: dict[int, float] = {}
    items = []
    for argv in [*host.argvs("ib_write_bw"), *host.argvs("ib_read_bw")]:
        result = attempt(lambda: rdma.parse_perftest(host.command(*argv)))
        if result is not None and (port.device.name in argv or "-d" not in argv):
            runs[result[0]] = result[1]
            items.append(host.said(*argv, text=f"{result[0]} queue pairs: {result[1]:g} Gbit/s"))
    measured = (
        f"; measured {runs[1]:g} Gbit/s with 1, {runs[max(runs)]:g} with {max(runs)}"
        if 1 in runs and len(runs) > 1
        else ""
    )
    yield warn(
        f"{port.device.name} of {target.name}",
        f"1 queue pair an endpoint on a bond of {len(bond.members)}{measured}",
        f"at least {len(bond.members)}",
        fix=f"export MC_NUM_QP_PER_EP={max(len(bond.members), 2)} for {target.name} and restart it",
        persists=True,
        evidence=[
            host.at(f"/proc/net/bonding/{port.netdev_name}"),
            target.evidence("environ", "MC_NUM_QP_PER_EP=1"),
            *items,
        ],
    )


@check(
    "link.netdev_down",
    title="Port and interface agree",
    why="With the interface down there is no GID and no ARP, whatever the port says.",
    source="<netdev>/operstate, <netdev>/flags against ports/<n>/state",
    fix="ip link set <netdev> up",
    undo="ip link set <netdev> down",
    per=Per.PORT,
)
def netdev_down(port: Port) -> Iterator[Finding]:
    host = port.host
    netdev = port.need_netdev()
    state = netdev.text("operstate")
    flags = attempt(lambda: host.number(f"{netdev.path}/flags"))
    if flags is None:
        link = (attempt(lambda: host.addresses) or {}).get(netdev.name)
        flags = int("UP" in link.flags) if link is not None else None
    down = state in ("down", "lowerlayerdown", "notpresent") or (flags is not None and not flags & 1)
    active = port.state[0] == ACTIVE
    evidence = [host.at(f"{netdev.path}/operstate"), host.at(f"{port.path}/state")]
    if active and down:
        yield fail(
            port.label,
            f"ACTIVE, but {netdev.name} is {state}",
            f"{netdev.name} up",
            fix=f"ip link set {netdev.name} up",
            persists=False,
            evidence=evidence,
        )
    elif not active and state == "up" and port.state[0] == 1 and not port.is_infiniband:
        yield fail(
            port.label,
            f"{port.state[1]}, but {netdev.name} is up",
            "both up",
            fix=f"ip link set {netdev.name} down && ip link set {netdev.name} up",
            persists=False,
            evidence=evidence,
        )


@check(
    "link.autosuspend_eee",
    title="The line does not sleep",
    why="Energy-efficient Ethernet takes time to wake.",
    source="ethtool --show-eee",
    fix="ethtool --set-eee <netdev> eee off",
    undo="ethtool --set-eee <netdev> eee on",
    per=Per.ROCE,
)
def eee(port: Port) -> Iterator[Finding]:
    host = port.host
    for netdev in port.wire_netdevs:
        labels = ethtool.parse_labels(host.command("ethtool", "--show-eee", netdev.name))
        status = labels.get("eee status", "")
        if "active" in status and "inactive" not in status:
            yield info(
                port.label,
                f"{netdev.name}: EEE {status}",
                "off",
                fix=f"ethtool --set-eee {netdev.name} eee off",
                persists=False,
                evidence=[host.said("ethtool", "--show-eee", netdev.name)],
            )
