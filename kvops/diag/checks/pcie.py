"""PCIe between NIC, memory and GPU: width, speed, switches, ordering, errors."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvops.diag.checks.iommu import gpu_peer_to_peer
from kvops.diag.checks.numa import home_nodes
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.pci import PciFunction
from kvops.diag.facts.rdma import Port, RdmaDevice
from kvops.diag.facts.target import Target
from kvops.diag.model import Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import misc, rdma, sysfs
from kvops.diag.registry import Per, check
from kvops.host import Sight

CAPACITY_MARGIN = 1.1  # raw link over port rate; packet headers take about 10 % [K]
READ_REQUEST_BYTES_WANTED = 4096  # mlx5 PF [V]
READ_REQUEST_BYTES_MIN = 512
CORRECTABLE_WARN_PER_S = 10 / 60  # [E]
CORRECTABLE_FAIL_PER_S = 1.0  # [E]
INTEGRITY_FAIL_PER_S = 1.0  # [E]
_REDIRECT = ("ReqRedir", "CmpltRedir", "UpstreamFwd")


def _physical(device: RdmaDevice) -> PciFunction:
    """The function, where its link says something. Skip for virtual functions and guests."""
    function = device.pci
    assert function is not None
    if function.is_virtual or device.kind in ("efa", "erdma"):
        raise Skip(f"{function.bdf} is a virtual function: its link is not its own")
    if device.host.is_vm:
        raise Skip("a guest sees virtual link values")
    return function


def _upstream(function: PciFunction) -> PciFunction | None:
    return function.host.pci_function(function.ancestors[0]) if function.ancestors else None


def _port_rate(device: RdmaDevice) -> float | None:
    rates = [attempt(lambda: port.rate) for port in device.ports if port.active]
    return sum(rate.gbps for rate in rates if rate is not None) or None


def _link(device: RdmaDevice) -> tuple[PciFunction, float, int]:
    """(function, GT/s now, lanes now); Skip where the kernel says unknown."""
    function = _physical(device)
    speed, width = function.link("current")
    if not width or speed is None:
        raise Skip(f"{function.bdf}: the kernel does not know the link")
    return function, speed, width


def _link_severity(device: RdmaDevice, speed: float, width: int) -> Outcome:
    rate = _port_rate(device)
    short = rate is not None and sysfs.pcie_gbps(speed, width) < rate
    return Outcome.FAIL if short else Outcome.WARN


@check(
    "pcie.link_width",
    title="The NIC's link has all its lanes",
    why="With lanes missing the NIC is bound by PCIe, and pushes back into the fabric as pause frames.",
    source="/sys/bus/pci/devices/<bdf>/{current,max}_link_width, of the card and of the port above it",
    fix="reseat the card; check slot, bifurcation setting and riser",
    per=Per.FUNCTION,
)
def link_width(device: RdmaDevice) -> Iterator[Finding]:
    function, speed, width = _link(device)
    best = function.link("max")[1]
    parent = _upstream(function)
    above = attempt(lambda: parent.link("max")[1]) if parent is not None else None
    possible = min(best, above) if above else best
    if width >= possible:
        return
    host = device.host
    yield finding(
        _link_severity(device, speed, width),
        f"{device.name} {function.bdf}",
        f"x{width} ({sysfs.pcie_gbps(speed, width):.0f} Gbit/s raw)",
        f"x{possible}, which card and slot both have",
        fix="power off, reseat the card, check bifurcation in the firmware",
        persists=True,
        evidence=[host.at(f"{function.path}/current_link_width"), host.at(f"{function.path}/max_link_width")],
    )


@check(
    "pcie.link_speed",
    title="The NIC's link runs at full speed",
    why="A link trained at a lower generation halves the bandwidth of the NIC.",
    source="/sys/bus/pci/devices/<bdf>/{current,max}_link_speed, of the card and of the port above it",
    fix="look for a speed cap in the firmware, for the riser, and for AER errors",
    per=Per.FUNCTION,
)
def link_speed(device: RdmaDevice) -> Iterator[Finding]:
    function, speed, width = _link(device)
    best = function.link("max")[0]
    parent = _upstream(function)
    above = attempt(lambda: parent.link("max")[0]) if parent is not None else None
    limits = [limit for limit in (best, above) if limit is not None]
    if not limits or speed >= min(limits):
        return
    host = device.host
    yield finding(
        _link_severity(device, speed, width),
        f"{device.name} {function.bdf}",
        f"{speed:g} GT/s ({sysfs.pcie_gbps(speed, width):.0f} Gbit/s raw)",
        f"{min(limits):g} GT/s, which card and slot both have",
        fix="remove the speed cap in the firmware; reseat card and riser",
        persists=True,
        evidence=[host.at(f"{function.path}/current_link_speed"), host.at(f"{function.path}/max_link_speed")],
    )


@check(
    "pcie.capacity",
    title="The slot carries the port's rate",
    why="A 200 or 400 Gbit/s NIC in too small a slot is slow whatever else is right.",
    source="/sys/bus/pci/devices/<bdf>/current_link_{speed,width} against ports/<n>/rate",
    fix="move the card to a wider or faster slot, or use a socket-direct card",
    per=Per.FUNCTION,
)
def capacity(device: RdmaDevice) -> Iterator[Finding]:
    function, speed, width = _link(device)
    rate = _port_rate(device)
    if rate is None:
        raise Skip(f"{device.name} has no active port with a rate")
    raw = sysfs.pcie_gbps(speed, width)
    host = device.host
    slot = function.bdf.rpartition(".")[0]
    shared = sum(
        _port_rate(other) or 0.0
        for other in host.devices_in_scope
        if other.pci is not None and other.pci.bdf.rpartition(".")[0] == slot
    )
    evidence = [
        host.at(f"{function.path}/current_link_speed"),
        host.at(f"{function.path}/current_link_width"),
        *(host.at(f"{port.path}/rate") for port in device.ports),
    ]
    subject = f"{device.name} {function.bdf}"
    link = f"{speed:g} GT/s x{width} = {raw:.0f} Gbit/s raw"
    most_speed, most_width = function.link("max")
    # Several functions of one card share the port (socket-direct, DGX Spark): each has a part of the lanes.
    shares_port = any(
        other is not device
        and other.board_guid
        and other.board_guid == device.board_guid
        and other.pci is not None
        and other.pci.bdf.rpartition(".")[0] != slot
        for other in attempt(lambda: host.devices) or ()
    )
    if shares_port and most_speed is not None and 0 < sysfs.pcie_gbps(most_speed, most_width) < rate:
        yield info(subject, f"{link} for a port of {rate:g} Gbit/s, by the card's design", evidence=evidence)
    elif raw < rate * CAPACITY_MARGIN:
        yield finding(
            Outcome.FAIL if raw < rate else Outcome.WARN,
            subject,
            f"{link} for a port of {rate:g} Gbit/s",
            f"at least {rate * CAPACITY_MARGIN:.0f} Gbit/s",
            fix="move the card to a slot with more lanes or a newer generation",
            persists=True,
            evidence=evidence,
        )
    elif shared > raw:
        yield info(subject, f"{link} shared by ports of {shared:g} Gbit/s together", evidence=evidence)


def _acs_bridges(host: HostFacts) -> dict[str, str]:
    """Bridges between a judged NIC and a GPU under one switch → "NIC and GPU"."""
    bridges: dict[str, str] = {}
    known = False
    for device in host.devices_in_scope:
        if device.pci is None:
            continue
        for gpu in host.gpus:
            known = known or bool(device.pci.ancestors and gpu.ancestors)
            common = [bdf for bdf in device.pci.ancestors if bdf in gpu.ancestors]
            if not common:
                continue
            for path in (device.pci.ancestors, gpu.ancestors):
                for bdf in path[: path.index(common[0])]:
                    bridges.setdefault(bdf, f"{device.name} and GPU {gpu.bdf}")
    if not known:
        table = host.lspci
        bridges = {
            bdf: "any NIC and GPU" for bdf, block in table.items() if block.port_type == "Downstream Port"
        }
    return bridges


@check(
    "pcie.acs_redirect",
    title="Switches let NIC and GPU talk directly",
    why="With ACS redirection peer-to-peer traffic detours through the root complex: half the bandwidth, "
    "hangs, error 4.",
    source="lspci -vvv 'ACSCtl:' of the switch ports between NIC and GPU",
    fix="disable ACS in the firmware, or clear it at every boot with setpci",
    undo="setpci -s <port> ECAP_ACS+6.w=<former value>",
    root="y",
)
def acs_redirect(host: HostFacts) -> Iterator[Finding]:
    if not host.gpus:
        host.pci  # noqa: B018 - raises Unseen where PCI was not collected at all
        raise Skip("no GPU: nothing to talk to directly")
    if host.is_vm:
        raise Skip("a guest needs ACS redirection for isolation")
    bridges = _acs_bridges(host)
    if not bridges:
        raise Skip("no NIC shares a switch with a GPU")
    reason: Unseen | None = None
    for bdf, pair in bridges.items():
        try:
            block = host.lspci_of(bdf)
        except Unseen as unseen:
            reason = unseen
            continue
        on = [name for name in _REDIRECT if block.flag("ACSCtl", name)]
        if not on:
            continue
        line = next((line.strip() for line in block.body.splitlines() if "ACSCtl:" in line), "")
        yield fail(
            f"switch port {bdf}",
            f"{'+ '.join(on)}+ between {pair}",
            "ReqRedir- CmpltRedir- UpstreamFwd-",
            fix=f"setpci -s {bdf} ECAP_ACS+6.w=0",
            persists=False,
            evidence=[host.lspci_evidence(f"{bdf} {line}")],
        )
    if reason is not None:
        raise reason


@check(
    "pcie.ats",
    title="Address translation services fit the machine",
    why="On bare metal ATS adds round trips; in a guest with peer-to-peer its absence gives wrong data.",
    source="lspci -vvv 'ATSCtl:', mlxconfig q ATS_ENABLED",
    fix="bare metal: mlxconfig set ATS_ENABLED=0, then a power cycle",
    undo="mlxconfig set ATS_ENABLED=1, then a power cycle",
    per=Per.FUNCTION,
    root="y",
)
def ats(device: RdmaDevice) -> Iterator[Finding]:
    host, function = device.host, device.pci
    assert function is not None
    config = attempt(lambda: rdma.parse_mlxconfig(host.command("mlxconfig", "-d", function.bdf)))
    configured = (config or {}).get("ATS_ENABLED", [])
    try:
        enabled = host.lspci_of(function.bdf).flag("ATSCtl", "Enable")
    except Unseen:
        if not configured:
            raise
        enabled = None
    if enabled is None and configured:
        enabled = configured[-1].startswith(("True", "1", "ENABLED"))
    subject = f"{device.name} {function.bdf}"
    evidence = [host.lspci_evidence(f"{function.bdf} ATSCtl: Enable{'+' if enabled else '-'}")]
    if host.is_bare_metal and enabled and not function.is_virtual:
        if any("sm_on" in word for word in attempt(lambda: host.kernel_words) or []):
            raise Skip("shared virtual memory is on (sm_on) and needs ATS")
        yield warn(
            subject,
            "ATS is on, on bare metal",
            "off: nothing translates for it",
            fix=f"mlxconfig -d {function.bdf} set ATS_ENABLED=0, then power cycle",
            persists=True,
            evidence=evidence,
        )
    elif host.is_vm and host.gpus and gpu_peer_to_peer(host) and enabled is False:
        yield warn(
            subject,
            "ATS is off in a guest whose NIC and GPU talk directly",
            "ATS on, with ACS DirectTrans on the switch ports",
            fix=f"on the host: mlxconfig -d {function.bdf} set ATS_ENABLED=1; or stage through host memory",
            persists=True,
            evidence=evidence,
        )


@check(
    "pcie.max_read_request",
    title="The NIC reads in large requests",
    why="The source of an RDMA write is read from memory; with small requests the reads starve the line.",
    source="lspci -vvv 'MaxReadReq N bytes'",
    fix="setpci -s <bdf> CAP_EXP+8.w=<value with 5 in bits 12-14> at every boot",
    undo="setpci -s <bdf> CAP_EXP+8.w=<former value>",
    per=Per.FUNCTION,
    root="y",
)
def max_read_request(device: RdmaDevice) -> Iterator[Finding]:
    function = _physical(device)
    if device.kind != "mlx5":
        raise Skip(f"{device.kind}: its vendor gives no value")
    size = device.host.lspci_of(function.bdf).number("MaxReadReq")
    if size is None:
        raise Unseen(f"MaxReadReq of {function.bdf}", Sight.NOT_COLLECTED)
    if size >= READ_REQUEST_BYTES_WANTED:
        return
    yield finding(
        Outcome.FAIL if size < READ_REQUEST_BYTES_MIN else Outcome.WARN,
        f"{device.name} {function.bdf}",
        f"MaxReadReq {size} bytes",
        f"{READ_REQUEST_BYTES_WANTED} bytes",
        fix=f"setpci -s {function.bdf} CAP_EXP+8.w=5000:7000",
        persists=False,
        evidence=[device.host.lspci_evidence(f"{function.bdf} MaxReadReq {size} bytes")],
    )


@check(
    "pcie.max_payload",
    title="One payload size on the whole path",
    why="Unequal payload sizes on one path lose packets; small ones waste the link on headers.",
    source="lspci -vvv 'MaxPayload' of the NIC and of the bridges above it",
    fix="boot with pci=pcie_bus_perf",
    undo="take pci=pcie_bus_perf off the boot command line",
    per=Per.FUNCTION,
    root="y",
)
def max_payload(device: RdmaDevice) -> Iterator[Finding]:
    function = _physical(device)
    host = device.host
    block = host.lspci_of(function.bdf)
    size = block.max_payload
    if size is None:
        raise Unseen(f"MaxPayload of {function.bdf}", Sight.NOT_COLLECTED)
    subject = f"{device.name} {function.bdf}"
    performance = "pci=pcie_bus_perf" in (attempt(lambda: host.kernel_words) or [])
    for bdf in function.ancestors:
        above = attempt(lambda: host.lspci_of(bdf))
        if above is None:
            continue
        if (
            above.max_payload is not None
            and above.max_payload != size
            and not (performance and size < above.max_payload)
        ):
            yield fail(
                subject,
                f"MaxPayload {size} bytes, {above.max_payload} on {bdf} above it",
                "the same on the whole path",
                fix="grubby --update-kernel=ALL --args=pci=pcie_bus_perf && reboot",
                persists=True,
                evidence=[
                    host.lspci_evidence(
                        f"{function.bdf} MaxPayload {size}, {bdf} MaxPayload {above.max_payload}"
                    )
                ],
            )
            return
        if above.max_payload_capability is not None and size < above.max_payload_capability:
            yield info(
                subject,
                f"MaxPayload {size} bytes, the bridge {bdf} could {above.max_payload_capability}",
                evidence=[host.lspci_evidence(f"{bdf} DevCap: MaxPayload {above.max_payload_capability}")],
            )
            return


def _remote(target: Target, function: PciFunction) -> bool:
    """Whether all of a target's memory is far from this function, as far as can be seen."""
    homes = attempt(lambda: home_nodes(target)) or set()
    node = function.numa_node
    return (
        node is not None
        and node >= 0
        and bool(homes)
        and not any(target.host.numa_near(h, node) for h in homes)
    )


@check(
    "pcie.relaxed_ordering",
    title="Writes to GPUs and remote memory may pass each other",
    why="Strict ordering towards a GPU or a remote NUMA node gives 150 of 200 Gbit/s; forced relaxed "
    "ordering corrupts "
    "data of software that does not expect it.",
    source="lspci -vvv 'RlxdOrd', mlxconfig PCI_WR_ORDERING, MC_IB_PCI_RELAXED_ORDERING",
    fix="leave MC_IB_PCI_RELAXED_ORDERING at 1 (automatic, per memory region)",
    undo="set MC_IB_PCI_RELAXED_ORDERING back",
    per=Per.FUNCTION,
    root="p",
)
def relaxed_ordering(device: RdmaDevice) -> Iterator[Finding]:
    function = _physical(device)
    host = device.host
    config = attempt(lambda: rdma.parse_mlxconfig(host.command("mlxconfig", "-d", function.bdf))) or {}
    ordering = (config.get("PCI_WR_ORDERING") or [""])[-1]
    subject = f"{device.name} {function.bdf}"
    if ordering.startswith("force_relax"):
        yield warn(
            subject,
            f"PCI_WR_ORDERING {ordering}: relaxed for everybody",
            "per_mkey(0): each memory region asks for it",
            fix=f"mlxconfig -d {function.bdf} set PCI_WR_ORDERING=0, then power cycle",
            persists=True,
            evidence=[host.said("mlxconfig", "-d", function.bdf, text=f"PCI_WR_ORDERING {ordering}")],
        )
    far = [t for t in host.targets if any(p.device is device for p in t.ports) and _remote(t, function)]
    if not gpu_peer_to_peer(host) and not far:
        raise Skip("no GPU peer, no remote memory: the order of writes to near memory costs nothing")
    peer = "GPUs as peers" if gpu_peer_to_peer(host) else "memory on another node"
    for target in host.targets:
        value = (attempt(lambda: target.environ) or {}).get("MC_IB_PCI_RELAXED_ORDERING")
        if value == "0" and any(port.device is device for port in target.ports):
            yield warn(
                f"{device.name} of {target.name}",
                f"MC_IB_PCI_RELAXED_ORDERING=0 with {peer}",
                "1 (automatic) or 2",
                fix="unset MC_IB_PCI_RELAXED_ORDERING and restart the process",
                persists=True,
                evidence=[target.evidence("environ", "MC_IB_PCI_RELAXED_ORDERING=0")],
            )
    block = host.lspci_of(function.bdf)
    if block.flag("DevCtl", "RlxdOrd") is False:
        yield warn(
            subject,
            f"RlxdOrd- with {peer}",
            "RlxdOrd+: the function may mark its writes as relaxed",
            fix=f"setpci -s {function.bdf} CAP_EXP+8.w=0010:0010",
            persists=False,
            evidence=[host.lspci_evidence(f"{function.bdf} RlxdOrd-")],
        )


@check(
    "pcie.aer_errors",
    title="The link reports no errors",
    why="Replays and retrains come before the loss of the device.",
    source="/sys/bus/pci/devices/<bdf>/aer_dev_{correctable,nonfatal,fatal}, of the card and of the port "
    "above it",
    fix="reseat the card, change the riser, update firmware",
    per=Per.FUNCTION,
    kind="Δ",
)
def aer_errors(device: RdmaDevice) -> Iterator[Finding]:
    host, function = device.host, device.pci
    assert function is not None
    window_s = host.need_window()
    sides = [function, *([parent] if (parent := _upstream(function)) is not None else [])]
    steps: dict[str, tuple[int, str]] = {}
    seen = False
    for kind, total in (
        ("correctable", "TOTAL_ERR_COR"),
        ("nonfatal", "TOTAL_ERR_NONFATAL"),
        ("fatal", "TOTAL_ERR_FATAL"),
    ):
        for side in sides:
            path = f"{side.path}/aer_dev_{kind}"
            texts = [host.peek(path, sample) for sample in (0, 1)]
            if texts[0] is None or texts[1] is None:
                continue
            seen = True
            counts = [attempt(lambda: sysfs.parse_named_counts(text or "")) or {} for text in texts]
            step = counts[1].get(total, 0) - counts[0].get(total, 0)
            if step > steps.get(kind, (0, ""))[0]:  # both ends of one link count the same error: take one
                steps[kind] = (step, path)
    if not seen:
        host.text(f"{function.path}/aer_dev_correctable")
    subject = f"{device.name} {function.bdf}"
    for kind in ("fatal", "nonfatal"):
        if kind in steps:
            yield fail(
                subject,
                f"{kind} PCIe errors +{steps[kind][0]} in {window_s:g} s",
                "+0",
                fix="drain the node, reseat the card, check the riser",
                persists=True,
                evidence=[host.at(steps[kind][1], f"+{steps[kind][0]}")],
            )
    count, path = steps.get("correctable", (0, ""))
    rate = count / window_s
    if rate > CORRECTABLE_WARN_PER_S:
        yield finding(
            Outcome.FAIL if rate > CORRECTABLE_FAIL_PER_S else Outcome.WARN,
            subject,
            f"correctable PCIe errors +{count} in {window_s:g} s ({rate:.2f}/s)",
            "at most 10 a minute",
            fix="reseat the card, check the riser, update firmware",
            persists=True,
            evidence=[host.at(path, f"TOTAL_ERR_COR +{count}")],
        )


@check(
    "pcie.device_lost",
    title="Every device answers",
    why="A function that answers ones to every read is gone from the bus, with all its paths.",
    source="lspci '(rev ff)', /sys/bus/pci/devices/<bdf>/vendor 0xffff",
    fix="drain the node and power cycle it",
)
def device_lost(host: HostFacts) -> Iterator[Finding]:
    table = attempt(lambda: host.lspci) or {}
    lost = {bdf for bdf, block in table.items() if block.lost}
    lost |= {function.bdf for function in (attempt(lambda: host.pci) or []) if function.vendor == 0xFFFF}
    for bdf in sorted(lost):
        text = table[bdf].title if bdf in table else "vendor 0xffff"
        yield fail(
            bdf,
            f"reads give all ones: {text}",
            "the device's own vendor and revision",
            fix="drain the node, then power cycle it (a warm reboot may not bring it back)",
            persists=True,
            evidence=[
                host.lspci_evidence(f"{bdf} {text}")
                if bdf in table
                else host.at(f"/sys/bus/pci/devices/{bdf}/vendor")
            ],
        )
    expected = host.expect_strings("pci_devices")
    functions = {function.bdf for function in (host.pci if expected else [])}
    for bdf in expected:
        if bdf not in functions:
            yield fail(
                bdf, "not on the bus", "present, says the profile", fix="power cycle the node", persists=True
            )
    if not lost and not table:
        host.pci  # noqa: B018 - raises Unseen where nothing was collected


@check(
    "pcie.slot_power",
    title="The slot offers enough power",
    why="By itself it hurts nothing: healthy machines log it while booting.",
    source="dmesg 'insufficient power on the PCIe slot'",
    fix="nothing to do",
    kind="L",
    root="p",
)
def slot_power(host: HostFacts) -> Iterator[Finding]:
    for line in host.log_lines(r"insufficient power on the PCIe slot")[:8]:
        bdf = re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", line.text)
        yield info(
            bdf[0] if bdf else "a slot",
            "insufficient power announced at boot: harmless by itself",
            evidence=[host.log_evidence(line)],
        )


@check(
    "pcie.stall",
    title="The host drains the NIC",
    why="Memory or PCIe cannot take what arrives: the NIC pauses the fabric.",
    source="ethtool -S outbound_pci_stalled_{rd,wr}_events, outbound_pci_buffer_overflow, "
    "{rx,tx}_pci_signal_integrity",
    fix="look at numa.nic_pinning, pcie.max_read_request, iommu.domain_type and the slot",
    per=Per.PORT,
    kind="Δ",
)
def stall(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    steps = port.wire_steps
    names = [n for n in steps if n.startswith("outbound_pci_") or n.endswith("_pci_signal_integrity")]
    if not names:
        raise Skip(f"{port.label}: its driver has no PCIe counters")
    events = {n: steps[n] for n in names if n.endswith("_events") and steps[n] > 0}
    if events and attempt(lambda: port.busy) is not False:
        yield warn(
            port.label,
            ", ".join(f"{n} +{c}" for n, c in events.items()) + f" in {window_s:g} s",
            "+0: seconds in which more than 30 % of the time was stalled",
            fix="run the store on the NIC's NUMA node; raise MaxReadReq; boot with iommu=pt",
            persists=True,
            evidence=port.wire_evidence(*events),
        )
    overflow = steps.get("outbound_pci_buffer_overflow", 0)
    if overflow > 0:
        yield warn(
            port.label,
            f"outbound_pci_buffer_overflow +{overflow} in {window_s:g} s",
            "+0: packets were dropped before the host took them",
            fix="as for stalled events; check the slot's width",
            persists=True,
            evidence=port.wire_evidence("outbound_pci_buffer_overflow"),
        )
    for name in ("rx_pci_signal_integrity", "tx_pci_signal_integrity"):
        if steps.get(name, 0) > 0:
            rate = steps[name] / window_s
            yield finding(
                Outcome.FAIL if rate > INTEGRITY_FAIL_PER_S else Outcome.WARN,
                port.label,
                f"{name} +{steps[name]} in {window_s:g} s",
                "+0: the PCIe link has bit errors",
                fix="reseat the card, change the riser",
                persists=True,
                evidence=port.wire_evidence(name),
            )


_DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


def distance(nic: PciFunction, gpu: PciFunction) -> str | None:
    """How far NIC and GPU are apart, in nvidia-smi's words; None if the tree is not known."""
    if not nic.root or not gpu.root:
        return None
    common = [bdf for bdf in nic.ancestors if bdf in gpu.ancestors]
    if common:
        hops = nic.ancestors.index(common[0]) + gpu.ancestors.index(common[0])
        return "PIX" if hops <= 2 else "PXB"
    if nic.root == gpu.root:
        return "PHB"
    if nic.numa_node is not None and nic.numa_node == gpu.numa_node and nic.numa_node >= 0:
        return "NODE"
    return "SYS"


@check(
    "pcie.nic_gpu_distance",
    title="Each GPU uses a near NIC",
    why="Crossing the root complex or the socket link halves GPUDirect bandwidth.",
    source="real paths of the PCI functions, nvidia-smi topo -m, the engine's topology file",
    fix="give the engine a topology file, or list the near NICs in --device_names",
    undo="remove the topology file",
)
def nic_gpu_distance(host: HostFacts) -> Iterator[Finding]:
    if not host.gpus:
        host.pci  # noqa: B018 - raises Unseen where PCI was not collected
        raise Skip("no GPU")
    if host.is_vm:
        raise Skip("a guest's PCI tree is not the machine's")
    devices = {device.name: device.pci for device in host.devices_in_scope if device.pci is not None}
    if not devices:
        raise Skip("no RDMA device on PCI")
    printed = attempt(lambda: misc.parse_topology(host.command("nvidia-smi", "topo", "-m"))) or {}
    direct = (gpu_peer_to_peer(host) and attempt(lambda: host.modules) is not None) or bool(
        host.expect_int("gpu_buffer_bytes")
    )
    chosen = _topology_file(host)
    for number, gpu in enumerate(host.gpus):
        row = printed.get(f"GPU{number}", {})
        apart = {n: row.get(n) or distance(f, gpu) for n, f in devices.items()}
        known = {n: d for n, d in apart.items() if d in _DISTANCES}
        if not known:
            continue
        best_name = min(known, key=lambda n: _DISTANCES.index(str(known[n])))
        best = str(known[best_name])
        evidence = [
            host.said("nvidia-smi", "topo", "-m")
            if row
            else host.at(f"{gpu.path}/numa_node", host.snapshot.realpath(gpu.path))
        ]
        wanted = [n for n in chosen.get(number, []) if n in known]
        worse = [n for n in wanted if _DISTANCES.index(str(known[n])) > _DISTANCES.index(best)]
        if wanted and len(worse) == len(wanted):
            yield warn(
                f"GPU {gpu.bdf}",
                f"uses {worse[0]} at distance {known[worse[0]]}",
                f"{best_name} at distance {best}",
                fix="put the near NIC first for this GPU in the topology file",
                persists=True,
                evidence=evidence,
            )
        elif best == "SYS" and direct:
            yield warn(
                f"GPU {gpu.bdf}",
                f"its nearest NIC {best_name} is behind the socket link (SYS)",
                "a NIC on its own node",
                fix="use a NIC on the GPU's node, or keep this GPU's data in host memory",
                persists=True,
                evidence=evidence,
            )


def _topology_file(host: HostFacts) -> dict[int, list[str]]:
    """GPU number → NICs that the engine's topology file prefers for it."""
    chosen: dict[int, list[str]] = {}
    for target in host.targets:
        environ = attempt(lambda: target.environ) or {}
        path = environ.get("MC_CUSTOM_TOPO_JSON") or target.option("nic_priority_matrix") or ""
        text = host.peek(path) if path.startswith("/") else path if path.startswith("{") else None
        document = attempt(lambda: misc.parse_json(text)) if text else None
        for key, value in document.items() if isinstance(document, dict) else ():
            match = re.fullmatch(r"(?:cuda|gpu):(\d{1,3})", str(key), re.ASCII)
            if match and isinstance(value, list) and value and isinstance(value[0], list):
                chosen[int(match[1])] = [str(name) for name in value[0]]
    return chosen
