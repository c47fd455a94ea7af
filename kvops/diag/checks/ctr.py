"""Counters: differences over a window, with traffic. A total since boot is history, not a symptom."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from kvops.diag.checks.qos import lossless_priorities
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.rdma import Port, rate_gbps
from kvops.diag.facts.target import Target
from kvops.diag.model import Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import proc, sysfs
from kvops.diag.registry import Per, check
from kvops.host import Sight

RETRANSMIT_SHARE_WARN, RETRANSMIT_SHARE_FAIL = 1e-5, 1e-3  # of packets
SLOW_RESTARTS_PER_S_WARN = 10.0  # [N]
TIMEOUTS_PER_S_WARN, TIMEOUTS_PER_S_FAIL = 1.0, 10.0  # [N]
DISCARDS_PER_S_FAIL = 100.0  # [N]
PAUSE_INFO, PAUSE_WARN, PAUSE_FAIL = 0.01, 0.10, 0.30  # share of the time [E]; 21.7 % seen to hurt [C55]
MARKS_MIN = 100  # packets marked before a missing CNP means anything
JITTER_WINDOWS_MIN = 30
JITTER_VARIATION_MAX = 0.15  # [E]
IMBALANCE_SHARE = 0.5  # [C49, C51]
NOTHING = 0.001  # of the median: as good as nothing
FALLBACK_SHARE = 0.05  # of the line's rate

# Names of one meaning in the drivers' own words (appendix of counters)
_RETRANSMITS = (
    "packet_seq_err",
    "out_of_sequence",
    "implied_nak_seq_err",
    "roce_adp_retrans",
    "roce_slow_restart",
    "to_retransmits",
    "seq_err_naks_rcvd",
    "oos_drop_count",
    "tcpRetransSegs",
    "RetransSegs",
    "retrans_pkts",
)
_TIMEOUTS = ("local_ack_timeout_err", "roce_adp_retrans_to", "retrans_timeout_events", "to_retransmits")
_GIVEN_UP = ("req_transport_retries_exceeded", "max_retry_exceeded", "unresponsive_remote_events")


def _grown(port: Port, *names: str) -> dict[str, int]:
    return {name: step for name, step in port.steps(*names).items() if step > 0}


def _say(steps: dict[str, int], window_s: float) -> str:
    return ", ".join(f"{name} +{step}" for name, step in steps.items()) + f" in {window_s:g} s"


def may_not_grow(
    id: str,
    *,
    title: str,
    why: str,
    source: str,
    fix: str,
    counters: tuple[str, ...],
    severity: Outcome,
    fatal: tuple[str, ...] = (),
    expected: str = "+0",
    advice: str = "",
    persists: bool | None = None,
) -> None:
    """
    Declare a check of counters for which any growth within the window is worth a word.

    ``counters`` are names of which drivers have some; ``severity`` is what growth means, FAIL for those in
    ``fatal``; ``advice`` is what to do about it here, and ``persists`` whether that survives a reboot. The rest
    is as in :func:`kvops.diag.registry.check`.
    """

    @check(id, title=title, why=why, source=source, fix=fix, per=Per.PORT, kind="Δ")
    def grown(port: Port) -> Iterator[Finding]:
        window_s = port.host.need_window()
        steps = _grown(port, *counters)
        if steps:
            yield finding(
                Outcome.FAIL if steps.keys() & set(fatal) else severity,
                port.label,
                _say(steps, window_s),
                expected,
                fix=advice,
                persists=persists,
                evidence=port.counter_evidence(*steps),
            )


@check(
    "ctr.retransmit_rate",
    title="Next to nothing is sent twice",
    why="Throughput collapses and jitters.",
    source="hw_counters packet_seq_err, out_of_sequence, implied_nak_seq_err, roce_adp_retrans, "
    "roce_slow_restart",
    fix="see qos.* for the class, link.* for the line, ctr.discards for where it is lost",
    per=Per.PORT,
    kind="Δ",
)
def retransmit_rate(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    steps = _grown(port, *_RETRANSMITS)
    if port.host.expect("adaptive_routing"):
        steps.pop("out_of_sequence", None)
    given_up = attempt(lambda: _grown(port, "req_transport_retries_exceeded")) or {}
    total = sum(steps.values())
    if not total:
        return
    busy = attempt(lambda: port.busy)
    evidence = port.counter_evidence(*steps)
    packets = attempt(lambda: port.packets)
    share = total / packets if packets else None
    restarts = steps.get("roce_slow_restart", 0) / window_s > SLOW_RESTARTS_PER_S_WARN
    severity = Outcome.INFO
    if given_up or (share is not None and share > RETRANSMIT_SHARE_FAIL and busy is not False):
        severity = Outcome.FAIL
    elif restarts or (share is not None and share > RETRANSMIT_SHARE_WARN and busy is not False):
        severity = Outcome.WARN
    if severity is Outcome.INFO and busy is not False:
        return
    text = _say(steps, window_s) + (f": {share:.1e} of {packets} packets" if share is not None else "")
    yield finding(
        severity,
        port.label,
        text + (" (idle)" if busy is False else ""),
        f"below {RETRANSMIT_SHARE_WARN:g} of the packets",
        fix="find where it is lost: kvops diagnose --only qos,link,ctr.discards,mtu",
        persists=None,
        evidence=evidence,
    )


@check(
    "ctr.timeout_rate",
    title="Acknowledgements come in time",
    why="Each timeout stalls a queue pair for at least 67 ms.",
    source="hw_counters local_ack_timeout_err, roce_adp_retrans_to, req_transport_retries_exceeded",
    fix="see qos.pfc_enabled, qos.tclass_mapping, link.symbol_errors, ip.arp_flux",
    per=Per.PORT,
    kind="Δ",
)
def timeout_rate(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    steps = port.steps(*_TIMEOUTS, *_GIVEN_UP)
    given_up = {name: step for name, step in steps.items() if name in _GIVEN_UP and step > 0}
    timeouts = {name: step for name, step in steps.items() if name in _TIMEOUTS and step > 0}
    rate = max(timeouts.values(), default=0) / window_s
    if not given_up and rate <= TIMEOUTS_PER_S_WARN:
        return
    evidence = port.counter_evidence(*given_up, *timeouts)
    for netdev in port.wire_netdevs[:1]:
        evidence += [seen for seen in (netdev.qos_evidence(),) if seen is not None]
        evidence += port.wire_evidence("rx_discards_phy", "tx_discards_phy")
    yield finding(
        Outcome.FAIL if given_up or rate > TIMEOUTS_PER_S_FAIL else Outcome.WARN,
        port.label,
        _say({**given_up, **timeouts}, window_s) + f" ({rate:.1f}/s)",
        f"at most {TIMEOUTS_PER_S_WARN:g}/s, and no queue pair given up",
        fix="make the class lossless or the loss rarer: kvops diagnose --only qos,link,ip,mtu",
        persists=None,
        evidence=evidence,
    )


may_not_grow(
    "ctr.rnr",
    title="Receivers are ready",
    why="The receiver had no buffer posted, or no CPU to post one.",
    source="hw_counters rnr_nak_retry_err, req_rnr_retries_exceeded",
    fix="look at the receiver: numa.*, cpu.governor, its load; post more receives",
    counters=("rnr_nak_retry_err", "req_rnr_retries_exceeded", "rnr_naks_rcvd"),
    severity=Outcome.WARN,
    fatal=("req_rnr_retries_exceeded",),
    advice="look at the receiver's load and memory node",
)


may_not_grow(
    "ctr.remote_access",
    title="Keys and lengths are right",
    why="A wrong key or length: stale metadata after a restart of the peer.",
    source="hw_counters {resp,req}_remote_access_errors, req_remote_invalid_request",
    fix="restart or refresh the side whose metadata are stale",
    counters=(
        "resp_remote_access_errors",
        "req_remote_access_errors",
        "req_remote_invalid_request",
        "remote_access_err",
        "remote_invalid_req_err",
    ),
    severity=Outcome.FAIL,
    advice="refresh the engine's metadata: restart the process that uses old keys",
)


@check(
    "ctr.local_errors",
    title="Completions have no errors",
    why="The first one matters; those that were flushed after it do not.",
    source="hw_counters resp_local_length_error, resp_cqe_error, req_cqe_error",
    fix="length errors: see mtu.peer_mismatch; else the engine's log at that time",
    per=Per.PORT,
    kind="Δ",
)
def local_errors(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    steps = _grown(
        port,
        "resp_local_length_error",
        "resp_cqe_error",
        "req_cqe_error",
        "local_qp_op_err",
        "local_protection_err",
    )
    flushed = attempt(lambda: _grown(port, "resp_cqe_flush_error", "req_cqe_flush_error")) or {}
    for side in ("resp", "req"):
        name = f"{side}_cqe_error"
        if name in steps and steps[name] <= flushed.get(f"{side}_cqe_flush_error", 0):
            del steps[name]  # the flushed ones are counted in both: queue pairs were torn down
    if steps:
        yield warn(
            port.label,
            _say(steps, window_s),
            "+0",
            fix="see the first non-flush error in the engine's log",
            persists=None,
            evidence=port.counter_evidence(*steps),
        )


@check(
    "ctr.out_of_buffer",
    title="Receive queues do not run dry",
    why="Harmless for IP; with sends and receives it shows as receiver-not-ready.",
    source="hw_counters out_of_buffer, ethtool rx_out_of_buffer",
    fix="ethtool -G <netdev> rx 8192",
    undo="ethtool -G <netdev> rx 1024",
    per=Per.PORT,
    kind="Δ",
)
def out_of_buffer(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    own = attempt(lambda: _grown(port, "out_of_buffer"))
    wire = attempt(lambda: port.wire_steps)
    if own is None and wire is None:
        port.step("out_of_buffer")
    steps = dict(own or {})
    if wire and wire.get("rx_out_of_buffer", 0) > 0:
        steps["rx_out_of_buffer"] = wire["rx_out_of_buffer"]
    if not steps:
        return
    not_ready = attempt(lambda: _grown(port, "rnr_nak_retry_err", "req_rnr_retries_exceeded")) or {}
    yield finding(
        Outcome.WARN if not_ready else Outcome.INFO,
        port.label,
        _say({**steps, **not_ready}, window_s),
        "+0 where sends and receives are used",
        fix=f"ethtool -G {port.netdev_name or '<netdev>'} rx 8192",
        persists=False,
        evidence=[*port.counter_evidence(*(own or {})), *port.wire_evidence("rx_out_of_buffer")],
    )


@check(
    "ctr.discards",
    title="Nothing is dropped at the port",
    why="A drop in the lossless class is a fault; elsewhere it is loss that RoCE has to repair.",
    source="ethtool rx_discards_phy, rx_prioN_{buf_discard,discards}, tx_discards_phy; "
    "counters/port_xmit_discards",
    fix="see pcie.stall (host too slow), qos.buffer (headroom), qos.pfc_enabled",
    per=Per.PORT,
    kind="Δ",
)
def discards(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    wire = attempt(lambda: port.wire_steps)
    own = attempt(lambda: port.steps("port_xmit_discards"))
    if wire is None and own is None:
        port.step("port_xmit_discards")
    wire, own = wire or {}, own or {}
    lossless = lossless_priorities(port)
    protected: dict[str, int] = {}
    best_effort = 0
    for priority in range(8):
        for kind in ("buf_discard", "discards"):
            name = f"rx_prio{priority}_{kind}"
            if wire.get(name, 0) > 0:
                if priority in lossless:
                    protected[name] = wire[name]
                else:
                    best_effort += wire[name]
    if protected:
        yield fail(
            port.label,
            _say(protected, window_s),
            "+0: the priority is lossless",
            fix="see pcie.stall and qos.buffer; check cable length set for the headroom",
            persists=None,
            evidence=port.wire_evidence(*protected),
        )
    rest = {n: wire.get(n, 0) for n in ("rx_discards_phy", "tx_discards_phy")} | {
        "port_xmit_discards": own.get("port_xmit_discards", 0)
    }
    rest["rx_discards_phy"] -= sum(protected.values()) + (best_effort if lossless else 0)
    rest = {name: step for name, step in rest.items() if step > 0}
    if rest:
        rate = sum(rest.values()) / window_s
        yield finding(
            Outcome.FAIL if rate > DISCARDS_PER_S_FAIL else Outcome.WARN,
            port.label,
            _say(rest, window_s) + f" ({rate:.1f}/s)",
            "+0",
            fix="see pcie.stall, qos.pfc_enabled, qos.tclass_mapping",
            persists=None,
            evidence=[
                *port.wire_evidence(*rest),
                *(port.counter_evidence("port_xmit_discards") if "port_xmit_discards" in rest else []),
            ],
        )
    elif best_effort and not protected:
        yield finding(
            Outcome.INFO if lossless else Outcome.WARN,
            port.label,
            f"{best_effort} packets of best-effort priorities dropped",
            "+0",
            fix="none for RDMA, if it rides in the lossless class",
            persists=None,
            evidence=port.wire_evidence(*(f"rx_prio{p}_discards" for p in range(8))),
        )


@check(
    "ctr.pause_share",
    title="The port is not held for long",
    why="rx: peers or the fabric slow us; tx: this host cannot drain. The share of the time counts, not "
    "the frames.",
    source="ethtool {rx,tx}_prioN_pause_duration, {rx,tx}_global_pause_duration (µs) over the window",
    fix="tx: pcie.stall, numa.nic_pinning, pcie.max_read_request; rx: incast, the fabric",
    per=Per.PORT,
    kind="Δ",
)
def pause_share(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    reason: Unseen | None = None
    seen = False
    for netdev in port.wire_netdevs:
        try:
            steps = netdev.stats_delta
        except Unseen as unseen:
            reason = unseen
            continue
        durations = {
            n: s for n, s in steps.items() if n.endswith("_pause_duration") and n[:3] in ("rx_", "tx_")
        }
        seen = seen or bool(durations)
        for direction, meaning in (
            ("tx", "this host cannot drain the port"),
            ("rx", "peers or the fabric slow this port"),
        ):
            name = max(
                (n for n in durations if n.startswith(direction)), key=lambda n: durations[n], default=None
            )
            share = durations[name] / 1e6 / window_s if name else 0.0
            if name is None or share < PAUSE_INFO:
                continue
            severity = (
                Outcome.FAIL if share > PAUSE_FAIL else Outcome.WARN if share >= PAUSE_WARN else Outcome.INFO
            )
            yield finding(
                severity,
                f"{port.label} {netdev.name} {direction}",
                f"paused {share:.1%} of {window_s:g} s: {meaning}",
                f"below {PAUSE_INFO:.0%}; {PAUSE_WARN:.0%} hurts",
                fix="run: kvops diagnose --only pcie,numa,iommu"
                if direction == "tx"
                else "look for incast, and at the switch's counters",
                persists=None,
                evidence=port.wire_evidence(
                    name, name.replace("_duration", ""), "outbound_pci_stalled_wr_events"
                ),
            )
    if not seen:
        if reason is not None:
            raise reason
        raise Skip(f"{port.label}: no pause durations (virtual function, or pause is off)")


@check(
    "ctr.pause_storm",
    title="The NIC has not given up pausing",
    why="A host that hangs pauses the fabric until the NIC's watchdog disables its pause.",
    source="ethtool tx_pause_storm_{warning,error}_events, rx_buffer_passed_thres_phy",
    fix="find why the host hangs: dmesg, driver.health",
    per=Per.PORT,
    kind="Δ",
)
def pause_storm(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    steps = port.wire_steps
    for name, severity in (
        ("tx_pause_storm_error_events", Outcome.FAIL),
        ("tx_pause_storm_warning_events", Outcome.WARN),
        ("rx_buffer_passed_thres_phy", Outcome.INFO),
    ):
        if steps.get(name, 0) > 0:
            yield finding(
                severity,
                port.label,
                f"{name} +{steps[name]} in {window_s:g} s",
                "+0",
                fix="see driver.health and dmesg",
                persists=None,
                evidence=port.wire_evidence(name),
            )


@check(
    "ctr.ecn_cnp",
    title="Congestion notifications are acted on",
    why="Marks and CNPs are congestion control at work, no harm by themselves; ignored or missing CNPs are.",
    source="hw_counters np_ecn_marked_roce_packets, np_cnp_sent, rp_cnp_handled, rp_cnp_ignored",
    fix="switch congestion control on for the RoCE priority, see qos.cc_enabled",
    per=Per.PORT,
    kind="Δ",
)
def ecn_cnp(port: Port) -> Iterator[Finding]:
    window_s = port.host.need_window()
    steps = port.steps(
        "np_ecn_marked_roce_packets",
        "np_cnp_sent",
        "rp_cnp_handled",
        "rp_cnp_ignored",
        "cnpHandled",
        "cnpIgnored",
        "cnpSent",
        "RxECNMrkd",
    )
    marked, sent = steps.get("np_ecn_marked_roce_packets", 0), steps.get("np_cnp_sent")
    ignored = steps.get("rp_cnp_ignored", 0) + steps.get("cnpIgnored", 0)
    evidence = port.counter_evidence(*(name for name, step in steps.items() if step))
    where = port.host.roce_priority if port.host.roce_priority is not None else "<priority>"
    if ignored > 0:
        yield warn(
            port.label,
            f"rp_cnp_ignored +{ignored} in {window_s:g} s",
            "+0: a CNP must slow its sender",
            fix=f"echo 1 > /sys/class/net/{port.netdev_name or '<netdev>'}/ecn/roce_rp/enable/{where}",
            persists=False,
            evidence=evidence,
        )
    elif (
        marked > MARKS_MIN
        and sent == 0
        and str(port.host.expect("congestion_control") or "dcqcn").lower() == "dcqcn"
    ):
        yield warn(
            port.label,
            f"{marked} marked packets, no CNP sent in {window_s:g} s",
            "CNPs back to the sender",
            fix=f"echo 1 > /sys/class/net/{port.netdev_name or '<netdev>'}/ecn/roce_np/enable/{where}",
            persists=False,
            evidence=evidence,
        )
    elif any(steps.values()):
        yield info(
            port.label,
            _say({n: s for n, s in steps.items() if s}, window_s),
            "normal: congestion control at work",
            evidence=evidence,
        )


@check(
    "ctr.jitter",
    title="Throughput is steady",
    why="Tail latency is the harm that users see.",
    source="bytes a second over at least 30 windows (kvops diagnose watch)",
    fix="correlate with ctr.pause_share, ctr.retransmit_rate, cpu.*",
    per=Per.PORT,
    kind="Δ",
)
def jitter(port: Port) -> Iterator[Finding]:
    series = port.host.meta.get("series")
    values = series.get(port.label) if isinstance(series, dict) else None
    if not isinstance(values, list):
        raise Unseen("a series of windows (kvops diagnose watch)", Sight.NOT_COLLECTED)
    moved = [float(v) for v in values if isinstance(v, int | float) and v >= 0]
    if len(moved) < JITTER_WINDOWS_MIN:
        raise Skip(f"{len(moved)} windows, {JITTER_WINDOWS_MIN} are needed")
    mean = statistics.fmean(moved)
    if mean * 8 < 0.01 * port.rate.gbps * 1e9:
        raise Skip(f"{port.label} is idle")
    variation = statistics.pstdev(moved) / mean
    ordered = sorted(moved)
    p1, p50 = ordered[len(ordered) // 100], ordered[len(ordered) // 2]
    stretch = p50 / p1 if p1 else float("inf")  # time for the same bytes, p99 over p50
    if variation > JITTER_VARIATION_MAX or stretch > 3:
        yield warn(
            port.label,
            f"variation {variation:.0%}, slowest window {stretch:.1f} times the median, over {len(moved)} "
            f"windows",
            f"at most {JITTER_VARIATION_MAX:.0%} and 3 times",
            fix="see ctr.pause_share, ctr.retransmit_rate, cpu.*",
            persists=None,
            evidence=[port.host.meta_evidence("series", port.label)],
        )


@check(
    "ctr.nic_imbalance",
    title="Every rail carries its share",
    why="Striping is broken: one rail idles while others are full.",
    source="bytes a NIC over the window, within the NICs of one target",
    fix="check the topology file and --device_names; see link.port_state and gid.* of the idle one",
    kind="Δ",
)
def nic_imbalance(host: HostFacts) -> Iterator[Finding]:
    window_s = host.need_window()
    groups: dict[str, list[Port]] = {}
    if host.targets:
        for target in host.targets:
            groups[target.name] = target.ports
    else:
        for port in host.ports:
            board = attempt(lambda: port.device.text("board_id")) or port.device.kind
            groups.setdefault(f"{board} on node {port.device.numa_node}", []).append(port)
    judged = 0
    reason: Unseen | None = None
    for name, ports in groups.items():
        moved: dict[str, tuple[Port, int]] = {}
        for port in ports:
            try:
                moved[port.label] = (port, sum(port.traffic_bytes))
            except Unseen as unseen:
                reason = unseen
        if len(moved) < 2:
            continue
        median = statistics.median(size for _, size in moved.values())
        most = max(size for _, size in moved.values())
        fastest = max((rate_gbps(port) for port, _ in moved.values()), default=0.0)
        if most * 8 < 0.01 * fastest * 1e9 * window_s:
            continue
        judged += 1
        reference = median if len(moved) > 2 else most
        for label, (port, size) in moved.items():
            if reference and size < IMBALANCE_SHARE * reference:
                nothing = size < NOTHING * reference
                yield finding(
                    Outcome.FAIL if nothing else Outcome.WARN,
                    f"{label} ({name})",
                    f"{size / 1e9:.3g} GB in {window_s:g} s, the others {reference / 1e9:.3g} GB",
                    f"at least {IMBALANCE_SHARE:.0%} of the others",
                    persists=None,
                    fix="see link.port_state, gid.*, --device_names and the topology file",
                    evidence=port.counter_evidence("port_xmit_data", "port_rcv_data"),
                )
    if not judged:
        if reason is not None:
            raise reason
        raise Skip("no group of two NICs with traffic")


may_not_grow(
    "ctr.port_xmit_wait",
    title="Waiting to send is back-pressure, not a fault",
    why="Ticks in which data waited: they grow on every healthy loaded port.",
    source="counters/port_xmit_wait",
    fix="nothing to do",
    counters=("port_xmit_wait",),
    severity=Outcome.INFO,
    expected="normal under load",
)


may_not_grow(
    "ctr.integrity",
    title="Buffers and credits are intact",
    why="An overrun is a credit fault of the link partner.",
    source="counters excessive_buffer_overrun_errors, local_link_integrity_errors",
    fix="replace the cable; ask the vendor about the switch",
    counters=("excessive_buffer_overrun_errors", "local_link_integrity_errors"),
    severity=Outcome.FAIL,
    advice="replace the cable; update switch and NIC firmware",
    persists=True,
)


may_not_grow(
    "ctr.icrc",
    title="RoCE packets arrive whole",
    why="A wrong invariant CRC: corruption on the way, or foreign packets on UDP 4791.",
    source="hw_counters rx_icrc_encapsulated",
    fix="check cables and switches on the path; see ip.port_4791",
    counters=("rx_icrc_encapsulated",),
    severity=Outcome.WARN,
    advice="check the path's cables; see who else sends to UDP 4791",
)


may_not_grow(
    "ctr.dup_requests",
    title="Requests come once",
    why="A request that comes again means that our acknowledgement was lost or late: look at the peer's "
    "timeouts.",
    source="hw_counters duplicate_request",
    fix="see the peer's ctr.timeout_rate",
    counters=("duplicate_request", "dup_req"),
    severity=Outcome.INFO,
    expected="follows the peer's timeouts",
)


@check(
    "ctr.availability",
    title="Which counters there are",
    why="A missing counter is a blind spot, not a zero.",
    source="names in counters/, hw_counters/ and ethtool -S",
    fix="nothing to do; rdma statistic … set … optional-counters for optional ones",
    per=Per.PORT,
)
def availability(port: Port) -> Iterator[Finding]:
    host = port.host
    missing = []
    folders = 0
    for name, wanted in (("counters", "port_xmit_data"), ("hw_counters", "local_ack_timeout_err")):
        try:
            names = host.ls(f"{port.path}/{name}")
        except Unseen as unseen:
            if unseen.absent:
                missing.append(f"{name}/")
                folders += 1
            continue
        folders += 1
        if wanted not in names and port.device.kind == "mlx5":
            missing.append(f"{name}/{wanted}")
        if name == "hw_counters" and "np_cnp_sent" not in names and port.device.kind == "mlx5":
            missing.append("np_*/rp_*")
    for netdev in port.wire_netdevs:
        stats = attempt(lambda: netdev.stats())
        if stats is not None and "rx_discards_phy" not in stats and not any("_prio" in n for n in stats):
            missing.append(f"PHY and priority counters of {netdev.name}")
        folders += stats is not None
    if not folders:
        raise Unseen(f"{port.path}/counters", Sight.NOT_COLLECTED)
    if missing:
        yield info(
            port.label,
            f"missing: {', '.join(missing)}",
            "they count as unseen, not as 0",
            evidence=[host.at(f"{port.path}/hw_counters", "names in the folder")],
        )


@check(
    "ctr.hw_counter_flow",
    title="What the engine moves passes the NIC",
    why="The engine moves data and the NIC's RDMA counters stand still: it fell back to TCP.",
    source="RDMA bytes of the NIC against IP bytes of the interface and /proc/<pid>/io",
    fix="see proc.protocol, k8s.dev_infiniband, driver.userspace_libs",
    per=Per.TARGET,
    kind="Δ",
)
def hw_counter_flow(target: Target) -> Iterator[Finding]:
    host = target.host
    window_s = host.need_window()
    if target.protocol == "tcp":
        raise Skip(f"{target.name} uses TCP")
    rdma_bytes = ip_bytes = 0
    line_bytes = 0.0
    judged = []
    for port in target.ports:
        words = attempt(lambda: port.steps("port_xmit_data", "port_rcv_data", "tx_bytes", "rx_bytes"))
        wire = attempt(lambda: port.wire_steps) or {}
        if words is None:
            continue
        judged.append(port)
        rdma_bytes += (
            4 * (words.get("port_xmit_data", 0) + words.get("port_rcv_data", 0))
            + words.get("tx_bytes", 0)
            + words.get("rx_bytes", 0)
        )
        rdma_bytes += wire.get("tx_vport_rdma_unicast_bytes", 0) + wire.get("rx_vport_rdma_unicast_bytes", 0)
        ip_bytes += wire.get("tx_bytes", 0) + wire.get("rx_bytes", 0)
        line_bytes += port.rate.gbps * 1e9 / 8 * window_s
    if not judged:
        raise Unseen(f"RDMA counters of the NICs of {target.name}", Sight.NOT_COLLECTED)
    texts = [attempt(lambda: target.text("io", s)) for s in (0, 1)]
    if texts[0] and texts[1]:
        fields = [proc.parse_fields(text) for text in texts if text]
        numbers = [
            sum(attempt(lambda: sysfs.parse_int(f[k])) or 0 for k in ("rchar", "wchar") if k in f)
            for f in fields
        ]
        ip_bytes = max(ip_bytes, numbers[1] - numbers[0])
    if ip_bytes > FALLBACK_SHARE * line_bytes and rdma_bytes < NOTHING * ip_bytes:
        yield fail(
            target.label,
            f"{ip_bytes / 1e9:.3g} GB through sockets, {rdma_bytes / 1e9:.3g} GB by RDMA in {window_s:g} s",
            "RDMA: the engine's protocol",
            fix="see k8s.dev_infiniband, driver.userspace_libs, proc.device_names",
            persists=None,
            evidence=[target.evidence("cmdline"), *judged[0].counter_evidence("port_xmit_data")],
        )
