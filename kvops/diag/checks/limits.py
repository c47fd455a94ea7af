"""Limits: of the NIC's objects, of the process, of the host's ports."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvops.diag.checks.ip import HANDSHAKE_PORT, RPC_PORTS
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.rdma import RdmaDevice
from kvops.diag.facts.target import Target
from kvops.diag.model import Finding, Outcome, Unseen, fail, finding, warn
from kvops.diag.registry import Per, check
from kvops.host import Sight

SHARE_WARN, SHARE_FAIL = 0.80, 0.95
QP_COUNT_WARN = 20_000  # on an mlx5 device [M, C29]
RD_ATOMIC_WANTED = 16  # the engine's max_rd_atomic [M]
OPEN_FILES_MIN = 65_536  # [E]
OPEN_FILES_SHARE = 0.8
PROCESSES_MIN = 4096  # [E]


def _share(device: RdmaDevice, kind: str, most_label: str) -> tuple[int, int | None]:
    """(in use, maximum). Raises Unseen."""
    used = device.host.resources.get(device.name, {}).get(kind)
    if used is None:
        raise Unseen(f"rdma resource show: {kind} of {device.name}", Sight.NOT_COLLECTED)
    info = (attempt(lambda: device.host.devinfo) or {}).get(device.name)
    return used, info.number(most_label) if info is not None else None


@check(
    "limits.qp_capacity",
    title="The NIC has queue pairs left",
    why="Connecting fails with ENOMEM: queue pairs grow with peers × NICs² × queue pairs an endpoint.",
    source="rdma resource show qp against ibv_devinfo -v max_qp; dmesg 'CREATE_QP … limits exceeded(0x8)'",
    fix="destination-device affinity, fewer queue pairs an endpoint, or find the leak",
    per=Per.DEVICE,
    kind="S/L",
)
def qp_capacity(device: RdmaDevice) -> Iterator[Finding]:
    host = device.host
    bdf = device.pci.bdf if device.pci is not None else ""
    lines = attempt(lambda: host.log_lines(r"CREATE_QP\b.*limits exceeded\s*\(0x8\)"))
    mine = [
        line
        for line in lines or ()
        if not bdf or bdf in line.text or not re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:", line.text)
    ]
    fix = "set MC_ENABLE_DEST_DEVICE_AFFINITY=1, lower MC_NUM_QP_PER_EP; holders: rdma resource show qp"
    if mine:
        yield fail(
            device.name,
            f"CREATE_QP refused {len(mine)} times since boot: limits exceeded",
            "no refusal",
            fix=fix,
            persists=True,
            evidence=[host.log_evidence(mine[-1]), host.said("rdma", "resource", "show")],
        )
        return
    used, most = _share(device, "qp", "max_qp")
    evidence = [
        host.said("rdma", "resource", "show", text=f"{device.name} qp {used}"),
        host.devinfo_evidence(device.name),
    ]
    if most and used > SHARE_WARN * most:
        yield finding(
            Outcome.FAIL if used > SHARE_FAIL * most else Outcome.WARN,
            device.name,
            f"{used} of {most} queue pairs in use",
            f"at most {SHARE_WARN:.0%}",
            fix=fix,
            persists=True,
            evidence=evidence,
        )
    elif device.kind == "mlx5" and used > QP_COUNT_WARN:
        yield warn(
            device.name,
            f"{used} queue pairs in use",
            f"at most {QP_COUNT_WARN}: beyond it the NIC's caches miss",
            fix=fix,
            persists=True,
            evidence=evidence,
        )


@check(
    "limits.cq_mr_capacity",
    title="The NIC has completion queues and memory regions left",
    why="Creating them fails with ENOMEM.",
    source="rdma resource show cq, mr against ibv_devinfo -v max_cq, max_mr",
    fix="find the process that leaks them: rdma resource show cq, rdma resource show mr",
    per=Per.DEVICE,
)
def cq_mr_capacity(device: RdmaDevice) -> Iterator[Finding]:
    host = device.host
    for kind in ("cq", "mr"):
        used, most = _share(device, kind, f"max_{kind}")
        if most and used > SHARE_WARN * most:
            yield finding(
                Outcome.FAIL if used > SHARE_FAIL * most else Outcome.WARN,
                f"{device.name} {kind}",
                f"{used} of {most} in use",
                f"at most {SHARE_WARN:.0%}",
                fix=f"rdma resource show {kind}: find the process that leaks them",
                persists=True,
                evidence=[host.said("rdma", "resource", "show"), host.devinfo_evidence(device.name)],
            )


@check(
    "limits.rd_atomic",
    title="The NIC allows the engine's outstanding reads",
    why="RTR or RTS fails with EINVAL.",
    source="ibv_devinfo -v max_qp_rd_atom, max_res_rd_atom",
    fix="lower the engine's max_rd_atomic",
    per=Per.DEVICE,
)
def rd_atomic(device: RdmaDevice) -> Iterator[Finding]:
    host = device.host
    info = host.devinfo.get(device.name)
    each = info.number("max_qp_rd_atom") if info is not None else None
    total = info.number("max_res_rd_atom") if info is not None else None
    if each is None:
        raise Unseen(f"max_qp_rd_atom of {device.name} (ibv_devinfo -v)", Sight.NOT_COLLECTED)
    evidence = [host.devinfo_evidence(device.name)]
    if each < RD_ATOMIC_WANTED:
        yield fail(
            device.name,
            f"max_qp_rd_atom {each}",
            f"at least {RD_ATOMIC_WANTED}",
            fix=f"set the engine's max_rd_atomic to {each}",
            persists=True,
            evidence=evidence,
        )
    used = (attempt(lambda: host.resources) or {}).get(device.name, {}).get("qp", 0)
    if total and total < used * RD_ATOMIC_WANTED:
        yield fail(
            device.name,
            f"max_res_rd_atom {total} for {used} queue pairs",
            f"{used * RD_ATOMIC_WANTED}",
            fix="fewer queue pairs, or a lower max_rd_atomic",
            persists=True,
            evidence=[*evidence, host.said("rdma", "resource", "show")],
        )


@check(
    "limits.nofile",
    title="The process may open enough files",
    why="Accepting a handshake fails when descriptors run out.",
    source="/proc/<pid>/limits Max open files, /proc/<pid>/fd",
    fix="LimitNOFILE=1048576 in its unit; --ulimit nofile=1048576",
    undo="take the line out again",
    per=Per.TARGET,
)
def nofile(target: Target) -> Iterator[Finding]:
    soft = target.soft_limit("Max open files")
    count = len(attempt(lambda: target.host.ls(f"{target.path}/fd")) or ())
    evidence = [target.evidence("limits", f"Max open files {soft}")]
    if soft < OPEN_FILES_MIN:
        yield warn(
            target.label,
            f"Max open files {soft}",
            f"at least {OPEN_FILES_MIN}",
            fix="systemctl edit <unit>: LimitNOFILE=1048576",
            persists=True,
            evidence=evidence,
        )
    elif count > OPEN_FILES_SHARE * soft:
        yield warn(
            target.label,
            f"{count} of {soft} files open",
            f"at most {OPEN_FILES_SHARE:.0%}",
            fix="find the leak: ls -l /proc/<pid>/fd",
            persists=True,
            evidence=evidence,
        )


@check(
    "limits.nproc",
    title="The process may start enough threads",
    why="Creating a thread fails.",
    source="/proc/<pid>/limits Max processes, cgroup pids.max",
    fix="LimitNPROC=infinity, TasksMax=infinity; --pids-limit -1",
    undo="take the line out again",
    per=Per.TARGET,
)
def nproc(target: Target) -> Iterator[Finding]:
    host = target.host
    soft = target.soft_limit("Max processes")
    if soft < PROCESSES_MIN:
        yield warn(
            target.label,
            f"Max processes {soft}",
            f"at least {PROCESSES_MIN}",
            fix="systemctl edit <unit>: LimitNPROC=infinity",
            persists=True,
            evidence=[target.evidence("limits", f"Max processes {soft}")],
        )
    group = re.search(r"^0::(/\S*)$", attempt(lambda: target.text("cgroup")) or "", re.MULTILINE)
    for path in {
        f"/sys/fs/cgroup{group[1].rstrip('/') if group else ''}/pids.max",
        "/sys/fs/cgroup/pids.max",
    }:
        text = (host.peek(path) or "").strip()
        if text.isascii() and text.isdigit() and len(text) < 12 and int(text) < PROCESSES_MIN:
            yield warn(
                target.label,
                f"pids.max {text}",
                f"at least {PROCESSES_MIN}",
                fix="systemctl edit <unit>: TasksMax=infinity; --pids-limit -1",
                persists=True,
                evidence=[host.at(path)],
            )
            return


@check(
    "limits.port_range",
    title="The kernel gives nobody the engine's ports",
    why="Bind fails: a client happened to get the port.",
    source="/proc/sys/net/ipv4/ip_local_port_range, ip_local_reserved_ports",
    fix="sysctl -w net.ipv4.ip_local_reserved_ports=12001,15000-17000",
    undo="sysctl -w net.ipv4.ip_local_reserved_ports=",
)
def port_range(host: HostFacts) -> Iterator[Finding]:
    path = "/proc/sys/net/ipv4/ip_local_port_range"
    words = host.text(path).split()
    if len(words) != 2 or not all(word.isdigit() and len(word) < 6 for word in words):
        raise Unseen(path, Sight.FAILED)
    low, high = map(int, words)
    if high < RPC_PORTS[0] or low > RPC_PORTS[-1]:
        return
    reserved: set[int] = set()
    for part in (host.peek("/proc/sys/net/ipv4/ip_local_reserved_ports") or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit() and len(first) < 6 and len(last) < 6:
            reserved.update(range(int(first), int(last or first) + 1))
    if all(port in reserved for port in RPC_PORTS if low <= port <= high):
        return
    yield warn(
        "local port range",
        f"{low}-{high}",
        f"apart from {RPC_PORTS[0]}-{RPC_PORTS[-1]}, the engine's",
        fix=f"sysctl -w net.ipv4.ip_local_reserved_ports={HANDSHAKE_PORT},{RPC_PORTS[0]}-{RPC_PORTS[-1]}",
        persists=False,
        evidence=[host.at(path)],
    )
