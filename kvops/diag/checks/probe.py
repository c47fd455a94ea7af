"""
Active probes: judged here, run only when asked for (``--probe``).

A probe leaves a record ``{"probe": NAME, ...}`` in ``meta.json`` under ``probes``, or the output of the
tool it ran. A passing perftest or nccl-tests run clears neither path MTU, traffic class, GID index nor
locked memory: those tools negotiate or choose otherwise than the engine.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.rdma import RdmaDevice
from kvops.diag.model import Finding, Outcome, Skip, fail, finding, info, warn
from kvops.diag.parsers import ip, rdma, sysfs
from kvops.diag.registry import Per, check

CONNECT_S_MAX = 1.0
LATENCY_RATIO_MAX = 2.0  # against the matrix' median [E]
TAIL_RATIO_MAX = 10.0  # p99.9 against typical [E]
BANDWIDTH_WARN, BANDWIDTH_FAIL = 0.90, 0.75  # of the smaller of port and PCIe [A 360/400]
BIDIRECTIONAL_MIN = 1.6  # times one way [E]
GPU_SHARE_MIN = 0.8  # of host memory [C38]
OUTLIER_SHARE = 0.7  # of the median of its row or column
REGISTER_S_PER_GIB_MAX = 1.0  # [E]
INCAST_VARIATION_MAX = 0.2
END_TO_END_SHARE_MIN = 0.6


def records(host: HostFacts, name: str) -> list[dict[str, Any]]:
    """What a probe left behind; Skip if it was not run."""
    found = [p for p in host.meta.get("probes") or [] if isinstance(p, dict) and p.get("probe") == name]
    if not found:
        raise Skip("no such probe was run (--probe)")
    return found


def number(record: dict[str, Any], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _runs(host: HostFacts, *tools: str) -> list[tuple[tuple[str, ...], str]]:
    """(command, output) of perftest runs; Skip if there are none."""
    found = [
        (argv, text)
        for tool in tools
        for argv in host.argvs(tool)
        if (text := attempt(lambda: host.command(*argv)))
    ]
    if not found:
        raise Skip("no such probe was run (--probe)")
    return found


def _device(host: HostFacts, argv: Sequence[str], text: str) -> RdmaDevice | None:
    name = argv[argv.index("-d") + 1] if "-d" in argv[:-1] else None
    printed = re.search(r"Device\s*:\s*(\S+)", text)
    wanted = name or (printed[1] if printed else None)
    return next((d for d in attempt(lambda: host.devices) or () if d.name == wanted), None)


@check(
    "probe.tcp_control",
    title="The control ports answer",
    why="Before any RDMA: metadata, master and handshake are TCP.",
    source="TCP connect to metadata, master, handshake port",
    fix="start the service, open its port (ip.firewall, k8s.network_policy)",
    kind="A",
)
def tcp_control(host: HostFacts) -> Iterator[Finding]:
    for record in records(host, "tcp_control"):
        seconds = number(record, "seconds")
        if record.get("ok") is not True or (seconds is not None and seconds > CONNECT_S_MAX):
            text = (
                f"{record.get('error') or 'refused'}" if record.get("ok") is not True else f"{seconds:.2f} s"
            )
            yield fail(
                str(record.get("address")),
                text,
                f"a connection within {CONNECT_S_MAX:g} s",
                fix="see ip.firewall, k8s.network_policy",
                evidence=[host.meta_evidence("probes", str(record))],
            )


@check(
    "probe.udp_4791",
    title="RoCE packets reach the peer",
    why="ICMP passes and RoCE does not: an access list, a priority or a GID.",
    source="UD ping through verbs, or rping; plain UDP to 4791 proves nothing, the NIC eats it",
    fix="look for access lists on UDP 4791, and at gid.*, qos.*",
    kind="A",
)
def udp_4791(host: HostFacts) -> Iterator[Finding]:
    for record in records(host, "udp_4791"):
        if record.get("answered") is False and record.get("icmp") is True:
            yield fail(
                f"{record.get('device')} → {record.get('peer')}",
                "no answer, while ICMP works",
                "an answer",
                fix="look for access lists on UDP 4791; see gid.*, qos.*",
                evidence=[host.meta_evidence("probes", str(record))],
            )


@check(
    "probe.rping",
    title="The connection manager reaches the peer",
    why="Failing: address, ARP or route. Passing while the engine fails: GID index, MTU or traffic class.",
    source="rping -c -a <peer> -C 10 -v",
    fix="see ip.peer_route, ip.arp_flux, ip.neigh_failed",
    kind="A",
)
def rping(host: HostFacts) -> Iterator[Finding]:
    argvs = host.argvs("rping")
    if not argvs:
        raise Skip("no such probe was run (--probe)")
    for argv in argvs:
        result = host.snapshot.run(*argv)
        if result.return_code not in (0, None):
            yield fail(
                " ".join(argv),
                (result.stderr or result.stdout).strip()[-120:] or f"exit {result.return_code}",
                "10 pings",
                fix="see ip.peer_route, ip.arp_flux, ip.neigh_failed",
                evidence=[host._command_evidence(result)],
            )


_LATENCY = re.compile(
    r"^[ \t]{0,8}\d{1,12}[ \t]{1,20}\d{1,12}" + r"[ \t]{1,24}(\d{1,9}(?:\.\d{1,9})?)" * 7,
    re.MULTILINE | re.ASCII,
)


@check(
    "probe.pair_latency",
    title="Latency is even and short-tailed",
    why="An outlier in the matrix, or a long tail, is a host or a hop to look at.",
    source="ib_write_lat -x <index>, 2 bytes: typical, p99, p99.9",
    fix="pin to the NIC's node; see cpu.governor, cpu.cstates, numa.*",
    per=Per.FLEET,
    kind="A",
    nodes_min=1,
)
def pair_latency(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    typical: dict[str, tuple[HostFacts, tuple[str, ...], float]] = {}
    for host in nodes:
        for argv, text in attempt(lambda: _runs(host, "ib_write_lat", "ib_read_lat", "ib_send_lat")) or ():
            row = _LATENCY.search(text)
            if row is None:
                continue
            middle, tail = float(row[3]), float(row[7])
            typical[f"{host.name} {' '.join(argv)}"] = (host, argv, middle)
            if middle > 0 and tail / middle > TAIL_RATIO_MAX:
                yield warn(
                    f"{host.name} → {argv[-1]}",
                    f"p99.9 {tail:g} µs, typical {middle:g} µs",
                    f"at most {TAIL_RATIO_MAX:g} times",
                    fix="pin to the NIC's node; see cpu.governor, cpu.cstates",
                    evidence=[host.said(*argv)],
                )
    if not typical:
        raise Skip("no such probe was run (--probe)")
    median = statistics.median(value for _, _, value in typical.values())
    for host, argv, value in typical.values():
        if len(typical) > 2 and value > LATENCY_RATIO_MAX * median:
            yield warn(
                f"{host.name} → {argv[-1]}",
                f"typical {value:g} µs",
                f"median of the matrix {median:g} µs",
                fix="look at this pair's hosts and hops",
                evidence=[host.said(*argv)],
            )


@check(
    "probe.pair_bandwidth",
    title="A pair moves what port and slot allow",
    why="Below it something on the way is narrow.",
    source="ib_write_bw -x <index> -q 4 -s 1M --report_gbits",
    fix="see pcie.*, numa.*, link.*, qos.*; run pairs one by one first",
    kind="A",
)
def pair_bandwidth(host: HostFacts) -> Iterator[Finding]:
    judged = 0
    for argv, text in _runs(host, "ib_write_bw", "ib_read_bw", "ib_send_bw"):
        result = rdma.parse_perftest(text)
        device = _device(host, argv, text)
        if (
            result is None
            or device is None
            or "Gb/sec" not in text
            or device.is_bond
            or "-b" in argv
            or "--use_cuda" in " ".join(argv)
        ):
            continue
        rates = [r.gbps for p in device.ports if p.active and (r := attempt(lambda: p.rate)) is not None]
        if not rates:
            continue
        limit = max(rates)
        function = device.pci
        if function is not None:
            link = attempt(lambda: function.link("current"))
            if link is not None and link[0] and link[1]:
                limit = min(limit, sysfs.pcie_gbps(link[0], link[1]))
        judged += 1
        share = result[1] / limit
        if share < BANDWIDTH_WARN:
            yield finding(
                Outcome.FAIL if share < BANDWIDTH_FAIL else Outcome.WARN,
                f"{device.name} → {argv[-1]}",
                f"{result[1]:g} Gbit/s with {result[0]} queue pairs ({share:.0%})",
                f"{limit * BANDWIDTH_WARN:.0f} Gbit/s: 90 % of port and PCIe",
                fix="see pcie.*, numa.*, link.*, qos.*",
                evidence=[host.said(*argv)],
            )
    if not judged:
        raise Skip("no run on a single port")


@check(
    "probe.bidirectional",
    title="Both directions at once",
    why="PCIe or memory cannot carry both.",
    source="ib_write_bw -b against one way",
    fix="see pcie.*, numa.*, iommu.*",
    kind="A",
)
def bidirectional(host: HostFacts) -> Iterator[Finding]:
    one: dict[str, float] = {}
    both: dict[str, tuple[float, tuple[str, ...]]] = {}
    for argv, text in _runs(host, "ib_write_bw"):
        result, device = rdma.parse_perftest(text), _device(host, argv, text)
        if result is None or device is None:
            continue
        if "-b" in argv or "--bidirectional" in argv:
            both[device.name] = (result[1], argv)
        else:
            one[device.name] = max(one.get(device.name, 0.0), result[1])
    pairs = {name: (value, argv, one[name]) for name, (value, argv) in both.items() if one.get(name)}
    if not pairs:
        raise Skip("no run both ways")
    for name, (value, argv, single) in pairs.items():
        if value < BIDIRECTIONAL_MIN * single:
            yield warn(
                name,
                f"{value:g} Gbit/s both ways, {single:g} one way",
                f"at least {BIDIRECTIONAL_MIN:g} times",
                fix="see pcie.*, numa.*, iommu.*",
                evidence=[host.said(*argv)],
            )


def _outliers(cells: list[tuple[str, str, float]]) -> Iterator[tuple[str, str, float, float]]:
    """(kind, name, its median, the others' median) of rows and columns that are slow throughout."""
    for kind, index in (("sender", 0), ("receiver", 1)):
        groups: dict[str, list[float]] = {}
        for cell in cells:
            groups.setdefault(cell[0] if index == 0 else cell[1], []).append(cell[2])
        for name, values in groups.items():
            others = [v for other, vs in groups.items() if other != name for v in vs]
            if len(others) > 1 and statistics.median(values) < OUTLIER_SHARE * statistics.median(others):
                yield kind, name, statistics.median(values), statistics.median(others)


@check(
    "probe.loopback_host",
    title="Each NIC reaches each memory at one speed",
    why="An outlier cell is a bottleneck inside the host; no fabric is needed to see it.",
    source="local NIC to local memory of each NUMA node and GPU",
    fix="see pcie.*, numa.*, iommu.*",
    kind="A",
)
def loopback_host(host: HostFacts) -> Iterator[Finding]:
    cells = [
        (str(r.get("device")), str(r.get("memory")), v)
        for r in records(host, "loopback_host")
        if (v := number(r, "gbps")) is not None
    ]
    for kind, name, value, others in _outliers(cells):
        yield warn(
            name,
            f"{value:.0f} Gbit/s as {'NIC' if kind == 'sender' else 'memory'}",
            f"{others:.0f} Gbit/s, as the others",
            fix="see pcie.*, numa.*, iommu.*",
            evidence=[host.meta_evidence("probes", "loopback_host")],
        )


@check(
    "probe.gpu_vs_host",
    title="GPU memory is as fast as host memory",
    why="63 against 196 Gbit/s was seen: ACS, distance or ordering.",
    source="the same pair, host memory against GPU memory",
    fix="see pcie.acs_redirect, pcie.nic_gpu_distance, pcie.relaxed_ordering",
    kind="A",
)
def gpu_vs_host(host: HostFacts) -> Iterator[Finding]:
    plain: dict[str, float] = {}
    gpu: dict[str, float] = {}
    for argv, text in attempt(lambda: _runs(host, "ib_write_bw", "ib_read_bw")) or ():
        result, device = rdma.parse_perftest(text), _device(host, argv, text)
        if result is not None and device is not None and "-b" not in argv:
            table = gpu if any("cuda" in word for word in argv) else plain
            table[device.name] = max(table.get(device.name, 0.0), result[1])
    for record in attempt(lambda: records(host, "gpu_vs_host")) or ():
        base, direct = number(record, "host_gbps"), number(record, "gpu_gbps")
        if base is not None and direct is not None:
            plain[str(record.get("device"))], gpu[str(record.get("device"))] = base, direct
    pairs = {name: (value, plain[name]) for name, value in gpu.items() if plain.get(name)}
    if not pairs:
        raise Skip("no such probe was run (--probe)")
    for name, (value, base) in pairs.items():
        if value < GPU_SHARE_MIN * base:
            yield fail(
                name,
                f"{value:g} Gbit/s from GPU memory, {base:g} from host memory",
                f"at least {GPU_SHARE_MIN:.0%}",
                fix="see pcie.acs_redirect, pcie.nic_gpu_distance, pcie.relaxed_ordering",
                evidence=[host.meta_evidence("probes", name)],
            )


@check(
    "probe.mtu_ladder",
    title="Every size passes",
    why="Where the ladder breaks is the MTU of the path.",
    source="ping -M do with sizes for path MTU 512 to 4096; verbs with path MTU 512 to 4096",
    fix="see mtu.path_mtu",
    kind="A",
)
def mtu_ladder(host: HostFacts) -> Iterator[Finding]:
    steps: dict[tuple[str, str], dict[int, bool]] = {}
    for argv in host.argvs("ping", "-M", "-s"):
        size = argv[argv.index("-s") + 1] if "-s" in argv[:-1] else ""
        answer = ip.parse_ping(host.snapshot.run(*argv).stdout)
        if size.isdigit() and len(size) < 6 and answer is not None:
            netdev = argv[argv.index("-I") + 1] if "-I" in argv[:-1] else "any"
            steps.setdefault((netdev, argv[-1]), {})[int(size) + 28] = answer
    for record in attempt(lambda: records(host, "mtu_ladder")) or ():
        tried, answered = number(record, "bytes"), record.get("answered")
        if tried is not None and isinstance(answered, bool):
            steps.setdefault((str(record.get("netdev")), str(record.get("peer"))), {})[int(tried)] = answered
    if not steps:
        raise Skip("no such probe was run (--probe)")
    for (netdev, peer), ladder in steps.items():
        passed = [size for size, ok in ladder.items() if ok]
        failed = [size for size, ok in ladder.items() if not ok]
        if passed and failed and min(failed) > max(passed):
            yield fail(
                f"{netdev} → {peer}",
                f"breaks between {max(passed)} and {min(failed)} bytes",
                "every size",
                fix="raise the MTU of the switch ports on the path",
                evidence=[host.said("ping", "-I", netdev, peer)],
            )


@check(
    "probe.tclass",
    title="The mark survives the way",
    why="Packets sent with a class arrive in another priority: a router rewrites the DSCP.",
    source="send with a traffic class, read both sides' priority counters",
    fix="trust the DSCP on every switch port of the path",
    kind="A",
)
def tclass(host: HostFacts) -> Iterator[Finding]:
    for record in records(host, "tclass"):
        sent, arrived = record.get("sent_priority"), record.get("arrived_priority")
        if sent is not None and arrived is not None and sent != arrived:
            yield fail(
                f"{record.get('device')} → {record.get('peer')}",
                f"sent in priority {sent}, arrives in {arrived}",
                f"priority {sent}",
                fix="trust the DSCP on every switch port of the path",
                evidence=[host.meta_evidence("probes", str(record))],
            )


@check(
    "probe.all_to_all",
    title="No sender, receiver or block stands out",
    why="A slow row is a sender, a slow column a receiver, a slow block a switch.",
    source="the matrix of all pairs, one by one, then at once",
    fix="look at the host or switch that stands out",
    per=Per.FLEET,
    kind="A",
    nodes_min=1,
)
def all_to_all(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    cells = []
    solo: list[float] = []
    together: list[float] = []
    for host in nodes:
        for record in attempt(lambda: records(host, "all_to_all")) or ():
            value = number(record, "gbps")
            if value is None:
                continue
            (together if record.get("simultaneous") else solo).append(value)
            if not record.get("simultaneous"):
                cells.append((str(record.get("from", host.name)), str(record.get("to")), value))
    if not cells:
        raise Skip("no such probe was run (--probe)")
    for kind, name, value, others in _outliers(cells):
        yield warn(
            name,
            f"{value:.0f} Gbit/s as {kind}",
            f"{others:.0f} Gbit/s, as the others",
            fix=f"run kvops diagnose on {name}",
        )
    if together and solo:
        yield info(
            "all at once",
            f"{statistics.median(together):.0f} Gbit/s against {statistics.median(solo):.0f} one by one: "
            f"sensitivity to incast",
        )


@check(
    "probe.incast_jitter",
    title="Several senders share one receiver steadily",
    why="Variation or retries under incast is what users feel.",
    source="k senders to one receiver, windows of 1 s",
    fix="see qos.cc_enabled, ctr.pause_share, ctr.retransmit_rate",
    kind="A",
)
def incast_jitter(host: HostFacts) -> Iterator[Finding]:
    for record in records(host, "incast_jitter"):
        values = [float(v) for v in record.get("gbps") or [] if isinstance(v, int | float)]
        retries = number(record, "retries") or 0
        variation = (
            statistics.pstdev(values) / statistics.fmean(values) if len(values) > 1 and any(values) else 0.0
        )
        if variation > INCAST_VARIATION_MAX or retries:
            yield warn(
                str(record.get("receiver", host.name)),
                f"variation {variation:.0%}, {retries:g} retries",
                f"at most {INCAST_VARIATION_MAX:.0%}, none",
                fix="see qos.cc_enabled, ctr.pause_share",
                evidence=[host.meta_evidence("probes", "incast_jitter")],
            )


@check(
    "probe.reg_mr",
    title="Registration works and is quick",
    why="An error names the limit; slow registration is small pages.",
    source="register 1, 8, 64 GiB; seconds a GiB",
    fix="see mem.*",
    kind="A",
)
def reg_mr(host: HostFacts) -> Iterator[Finding]:
    for record in records(host, "reg_mr"):
        size, seconds = number(record, "gib"), number(record, "seconds")
        if record.get("error"):
            yield fail(
                str(record.get("device")),
                f"{size:g} GiB: {record['error']}" if size else str(record["error"]),
                "no error",
                fix="see mem.memlock_limit, mem.mkey_resources",
                evidence=[host.meta_evidence("probes", str(record))],
            )
        elif size and seconds is not None and seconds / size > REGISTER_S_PER_GIB_MAX:
            yield warn(
                str(record.get("device")),
                f"{seconds / size:.2f} s a GiB",
                f"at most {REGISTER_S_PER_GIB_MAX:g} s",
                fix="use 2 MiB pages: see mem.registration_page_size",
                evidence=[host.meta_evidence("probes", str(record))],
            )


@check(
    "probe.integrity",
    title="What is read is what was written",
    why="Success with wrong bytes is the worst outcome there is.",
    source="write a pattern, read it back, compare, host and GPU memory",
    fix="stop using this path; see gdr.p2p_in_vm, pcie.relaxed_ordering",
    kind="A",
)
def integrity(host: HostFacts) -> Iterator[Finding]:
    for record in records(host, "integrity"):
        wrong = number(record, "mismatches") or 0
        if wrong:
            yield fail(
                f"{record.get('device')} {record.get('memory', 'host')} memory",
                f"{wrong:g} mismatches",
                "none",
                fix="stop using this path; see gdr.p2p_in_vm, pcie.relaxed_ordering",
                evidence=[host.meta_evidence("probes", str(record))],
            )


@check(
    "probe.kv_end_to_end",
    title="The store moves what the fabric can",
    why="Far below raw RDMA the software is the limit, not the fabric.",
    source="put and get of real object sizes against raw RDMA",
    fix="look at the store: threads, object sizes, placement",
    kind="A",
)
def kv_end_to_end(host: HostFacts) -> Iterator[Finding]:
    for record in records(host, "kv_end_to_end"):
        store, raw = number(record, "store_gbps"), number(record, "raw_gbps")
        if store is not None and raw and store < END_TO_END_SHARE_MIN * raw:
            yield warn(
                str(record.get("device", host.name)),
                f"{store:g} Gbit/s through the store, {raw:g} raw",
                f"at least {END_TO_END_SHARE_MIN:.0%}",
                fix="look at the store: threads, object sizes, placement",
                evidence=[host.meta_evidence("probes", str(record))],
            )
