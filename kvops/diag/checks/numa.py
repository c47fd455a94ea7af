"""NUMA: whether a store's memory, CPUs and NICs lie together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.rdma import RdmaDevice
from kvops.diag.facts.target import Target
from kvops.diag.model import Finding, Skip, Unseen, fail, info, warn
from kvops.diag.parsers import proc, sysfs
from kvops.diag.registry import Per, check
from kvops.host import Sight

REMOTE_SHARE = 0.95  # of the memory: "wholly" on another node
SPLIT_TOLERANCE = 0.2  # [E]
MAPPING_BYTES_MIN = 1 << 20  # smaller mappings are libraries and stacks


def _several_nodes(host: HostFacts) -> list[int]:
    nodes = host.numa_nodes
    if len(nodes) < 2:
        raise Skip("one NUMA node")
    return nodes


def nic_nodes(target: Target) -> set[int]:
    """Nodes of the NICs that a target uses; unknown ones (-1) left out."""
    nodes = {port.device.numa_node for port in target.ports}
    return {node for node in nodes if node is not None and node >= 0}


def memory_by_node(target: Target) -> dict[int, int]:
    """Bytes a node of the target's large mappings. Raises Unseen."""
    totals: dict[int, int] = {}
    for mapping in proc.parse_numa_maps(target.text("numa_maps")):
        if mapping.total_bytes >= MAPPING_BYTES_MIN:
            for node, size in mapping.node_bytes.items():
                totals[node] = totals.get(node, 0) + size
    return totals


def _allowed(target: Target, field: str) -> frozenset[int]:
    text = target.status.get(field)
    if text is None:
        raise Unseen(f"{target.path}/status: {field}", Sight.ABSENT)
    return sysfs.parse_cpulist(text)


def home_nodes(target: Target) -> set[int]:
    """Nodes where a target's memory is, else where it may be. Raises Unseen."""
    totals = attempt(lambda: memory_by_node(target))
    if totals:
        whole = sum(totals.values())
        return {node for node, size in totals.items() if size >= (1 - REMOTE_SHARE) * whole}
    return set(_allowed(target, "Mems_allowed_list"))


@check(
    "numa.nic_pinning",
    title="A store lies on the node of its NICs",
    why="Memory or CPUs on the other socket give about 45 to 60 % of the bandwidth, with jitter.",
    source="/proc/<pid>/status Cpus_allowed_list, Mems_allowed_list; /proc/<pid>/numa_maps; NIC numa_node",
    fix="start one store per node: numactl --cpunodebind=N --membind=N, or NUMAPolicy= in its unit",
    undo="start it without numactl",
    per=Per.TARGET,
)
def nic_pinning(target: Target) -> Iterator[Finding]:
    host = target.host
    nodes = _several_nodes(host)
    nics = nic_nodes(target)
    if not nics:
        raise Skip(f"{target.name}: the nodes of its NICs are unknown")

    def near(node: int) -> bool:
        return any(host.numa_near(node, nic) for nic in nics)

    remote: list[str] = []
    evidence = []
    totals = attempt(lambda: memory_by_node(target))
    if totals:
        far = sum(size for node, size in totals.items() if not near(node))
        if far >= REMOTE_SHARE * sum(totals.values()):
            remote.append(f"{far / (1 << 30):.0f} GiB of memory on node {','.join(map(str, sorted(totals)))}")
            evidence.append(target.evidence("numa_maps"))
    else:
        mems = _allowed(target, "Mems_allowed_list")
        if mems and not any(near(node) for node in mems):
            remote.append(f"memory allowed on node {','.join(map(str, sorted(mems)))} only")
            evidence.append(target.evidence("status"))
    cpus = attempt(lambda: _allowed(target, "Cpus_allowed_list"))
    if cpus:
        on = {node for node in nodes if cpus & (attempt(lambda: host.node_cpus(node)) or frozenset())}
        if on and not any(near(node) for node in on):
            remote.append(f"CPUs on node {','.join(map(str, sorted(on)))} only")
            evidence.append(
                target.evidence("status", f"Cpus_allowed_list: {target.status.get('Cpus_allowed_list')}")
            )
    if remote:
        nic = next(iter(sorted(nics)))
        devices = [port.device for port in target.ports if port.device.pci is not None]
        yield warn(
            target.label,
            "; ".join(remote),
            f"on node {nic}, where {', '.join(d.name for d in devices[:4])} is",
            fix=f"restart it with: numactl --cpunodebind={nic} --membind={nic} …",
            persists=False,
            evidence=[
                *evidence,
                *(host.at(f"{d.pci.path}/numa_node") for d in devices[:1] if d.pci is not None),
            ],
        )


@check(
    "numa.store_per_node",
    title="One store a NUMA node, each with its own NICs",
    why="With one store for two nodes half of the memory is remote to half of the NICs; shared NICs cross "
    "the socket.",
    source="targets, their --device_names and memory nodes, NIC numa_node",
    fix="run one store per node, with --device_names of that node's NICs",
    undo="go back to one store",
)
def store_per_node(host: HostFacts) -> Iterator[Finding]:
    nodes = _several_nodes(host)
    if host.is_vm:
        raise Skip("a guest")
    if not host.targets:
        raise Skip("no target process here")
    wanted = host.expect_int("stores_per_numa_node")
    by_node: dict[int, list[str]] = {}
    for device in host.devices_in_scope:
        if device.numa_node is not None and device.numa_node >= 0:
            by_node.setdefault(device.numa_node, []).append(device.name)
    stores = len(host.targets)
    expected = wanted * len(nodes) if wanted else len(by_node)
    if stores < expected and (wanted or stores == 1):
        where = (
            f"NICs on nodes {', '.join(map(str, sorted(by_node)))}"
            if len(by_node) > 1
            else f"{len(nodes)} nodes"
        )
        yield warn(
            f"{stores} store{'s' if stores > 1 else ''}",
            f"{where}, but only {stores} store{'s' if stores > 1 else ''}",
            f"{expected}: one a node, with the local NICs",
            fix="start one store per node: numactl --cpunodebind=N --membind=N … --device_names=<that node's NICs>",
            persists=True,
            evidence=[
                host.at("/sys/devices/system/node/online"),
                *(t.evidence("cmdline") for t in host.targets[:1]),
            ],
        )
    homes = {target: attempt(lambda: home_nodes(target)) for target in host.targets}
    placed = [(target, home) for target, home in homes.items() if home and len(home) == 1]
    for index, (one, home) in enumerate(placed):
        for other, other_home in placed[index + 1 :]:
            shared = set(one.device_names) & set(other.device_names)
            if home != other_home and shared:
                yield warn(
                    f"{one.name} and {other.name}",
                    f"on different nodes, but both use {', '.join(sorted(shared))}",
                    "each store with the NICs of its own node",
                    fix=f"give {other.name} its own --device_names",
                    persists=True,
                    evidence=[one.evidence("cmdline"), other.evidence("cmdline")],
                )


@check(
    "numa.unknown",
    title="The kernel knows where each NIC is",
    why="Without a node affinity is guesswork.",
    source="/sys/bus/pci/devices/<bdf>/numa_node is -1",
    fix="update the firmware (SLIT, _PXM), or set the node by hand",
    per=Per.FUNCTION,
)
def unknown(device: RdmaDevice) -> Iterator[Finding]:
    host, function = device.host, device.pci
    assert function is not None
    node = host.number(f"{function.path}/numa_node")
    if node >= 0 or host.is_vm:
        return
    _several_nodes(host)
    yield info(
        f"{device.name} {function.bdf}",
        "numa_node -1 on a machine with several nodes",
        "its node",
        evidence=[host.at(f"{function.path}/numa_node")],
    )


@check(
    "numa.balancing",
    title="The kernel does not move pages of RDMA processes",
    why="Automatic NUMA balancing unmaps pages to watch them: stalls of milliseconds in the data path.",
    source="/proc/sys/kernel/numa_balancing",
    fix="sysctl -w kernel.numa_balancing=0, and in /etc/sysctl.d for the next boot",
    undo="sysctl -w kernel.numa_balancing=1",
)
def balancing(host: HostFacts) -> Iterator[Finding]:
    nodes = _several_nodes(host)
    mode = host.number("/proc/sys/kernel/numa_balancing")
    if mode == 0:
        return
    evidence = [host.at("/proc/sys/kernel/numa_balancing")]
    bare_memory = [n for n in nodes if attempt(lambda: host.node_cpus(n)) == frozenset()]
    if mode == 2 and bare_memory:
        yield info("kernel.numa_balancing", "2: memory tiering, with memory-only nodes", evidence=evidence)
        return
    yield warn(
        "kernel.numa_balancing",
        f"{mode} on {len(nodes)} nodes",
        "0",
        fix="sysctl -w kernel.numa_balancing=0",
        persists=False,
        evidence=evidence,
    )


def _node_hugepages(host: HostFacts, node: int, name: str) -> int:
    return host.number(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/{name}")


@check(
    "numa.hugepage_balance",
    title="Each store's node has its huge pages",
    why="Pages taken from the other node are remote without a word, or the allocation fails with ENOMEM.",
    source="/sys/devices/system/node/node*/hugepages/hugepages-2048kB/{nr,free}_hugepages",
    fix="allocate per node at boot: echo N > "
    "/sys/devices/system/node/nodeX/hugepages/hugepages-2048kB/nr_hugepages",
    undo="write the former number",
)
def hugepage_balance(host: HostFacts) -> Iterator[Finding]:
    nodes = _several_nodes(host)
    users = [target for target in host.targets if target.wants_huge_pages]
    if not users:
        raise Skip("no store asks for huge pages")
    total = {node: _node_hugepages(host, node, "nr_hugepages") for node in nodes}
    free = {node: _node_hugepages(host, node, "free_hugepages") for node in nodes}
    used: set[int] = set()
    for target in users:
        homes = attempt(lambda: home_nodes(target)) or set()
        used |= homes
        if len(homes) != 1 or target.segment_bytes is None:
            continue
        node = next(iter(homes))
        have = attempt(lambda: proc.parse_kb(target.status.get("HugetlbPages", "0 kB"))) or 0
        need = target.segment_bytes - have
        if need > free.get(node, 0) << 21:
            yield fail(
                f"{target.name} on node {node}",
                f"{free.get(node, 0) << 21 >> 30} GiB of huge pages free",
                f"{need >> 30} GiB: its segment",
                fix=f"echo {total.get(node, 0) + (need >> 21) - free.get(node, 0)} > "
                f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages",
                persists=False,
                evidence=[
                    *(
                        host.at(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/{name}")
                        for name in ("free_hugepages", "nr_hugepages")
                    )
                ],
            )
            return
    counts = [total[node] for node in nodes if node in used or not used]
    counts = counts if len(counts) > 1 else list(total.values())
    if max(counts) and (max(counts) - min(counts)) > SPLIT_TOLERANCE * max(counts):
        yield warn(
            "huge pages",
            "; ".join(f"node {node}: {count}" for node, count in total.items()),
            "split evenly, within 20 %",
            fix="write the same number to nr_hugepages of each node, at boot",
            persists=False,
            evidence=[
                host.at(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages")
                for node in nodes[:2]
            ],
        )


@check(
    "numa.irq_affinity",
    title="Completions interrupt CPUs near the NIC",
    why="Interrupts on the other socket add latency to every completion that is waited for.",
    source="/proc/interrupts (mlx5_comp*@pci:<bdf>), /proc/irq/<n>/effective_affinity_list, local_cpulist",
    fix="set_irq_affinity_bynode.sh <node> <netdev>, and tell irqbalance to leave them",
    undo="restart irqbalance",
    per=Per.FUNCTION,
)
def irq_affinity(device: RdmaDevice) -> Iterator[Finding]:
    host, function = device.host, device.pci
    assert function is not None
    _several_nodes(host)
    names = proc.parse_interrupts(host.text("/proc/interrupts"))
    mine = [
        irq
        for irq, name in names.items()
        if function.bdf in name and re.search(r"comp|TxRx|rdma", name, re.IGNORECASE)
    ]
    if not mine:
        raise Skip(f"{device.name} has no completion vectors in /proc/interrupts")
    local = sysfs.parse_cpulist(host.text(f"{function.path}/local_cpulist"))
    seen: dict[str, frozenset[int]] = {}
    for irq in mine:
        for name in ("effective_affinity_list", "smp_affinity_list"):
            text = host.peek(f"/proc/irq/{irq}/{name}")
            if text and text.strip():
                seen[irq] = sysfs.parse_cpulist(text)
                break
    if not seen:
        raise Unseen(f"/proc/irq/{mine[0]}/effective_affinity_list", Sight.NOT_COLLECTED)
    if local and all(not cpus & local for cpus in seen.values()):
        first = next(iter(seen))
        yield warn(
            f"{device.name} {function.bdf}",
            f"all {len(seen)} completion vectors on CPUs of another node",
            f"CPUs {host.text(f'{function.path}/local_cpulist').strip()}",
            fix=f"set_irq_affinity_bynode.sh {function.numa_node} "
            f"{device.ports[0].netdev_name if device.ports else ''}",
            persists=False,
            evidence=[
                host.at(f"/proc/irq/{first}/effective_affinity_list"),
                host.at(f"{function.path}/local_cpulist"),
            ],
        )


@check(
    "numa.zone_reclaim",
    title="No node reclaims while another has memory",
    why="Reclaim on allocation stalls the allocating thread.",
    source="/proc/sys/vm/zone_reclaim_mode",
    fix="sysctl -w vm.zone_reclaim_mode=0",
    undo="write the former value",
)
def zone_reclaim(host: HostFacts) -> Iterator[Finding]:
    mode = host.number("/proc/sys/vm/zone_reclaim_mode")
    if mode:
        yield warn(
            "vm.zone_reclaim_mode",
            str(mode),
            "0",
            fix="sysctl -w vm.zone_reclaim_mode=0",
            persists=False,
            evidence=[host.at("/proc/sys/vm/zone_reclaim_mode")],
        )
