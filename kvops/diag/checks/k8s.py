"""Kubernetes, containers and clouds: what a pod was given of the host's RDMA."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvops.diag.checks.mem import CAP_IPC_LOCK, gib
from kvops.diag.checks.mtu import path_mtu_of
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.target import Target
from kvops.diag.model import Evidence, Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import ip, misc, proc, rdma
from kvops.diag.registry import Per, check
from kvops.host import Sight

HANDSHAKE_PORTS = (12001, 15000)  # [M]
_RDMA_RESOURCE = re.compile(r"rdma|hca|/efa$|mlnx|infiniband", re.IGNORECASE)
_SERVICES = re.compile(
    r"mofed|ofed|rdma|network-operator|nic-config|sriov|peermem|peer-mem|nvidia-driver|whereabouts|multus"
)


def objects(host: HostFacts, kind: str) -> list[dict[str, Any]]:
    """
    Kubernetes objects of a kind (``Node``, ``Pod``, …) from whatever kubectl printed as JSON.

    Raises:
        Unseen: kubectl was not run, or printed none of this kind.
    """
    found: list[dict[str, Any]] = []
    seen = False
    for argv in host.argvs("kubectl", "json"):
        document = attempt(lambda: misc.parse_json(host.command(*argv)))
        if not isinstance(document, dict):
            continue
        items = document.get("items")
        implied = kind if _asks_for(argv, kind) else ""
        found += [
            item
            for item in (items if isinstance(items, list) else [document])
            if isinstance(item, dict) and item.get("kind", implied) == kind
        ]
        seen = seen or _asks_for(argv, kind) or bool(found)
    if not seen:
        raise Unseen(f"kubectl get {kind.lower()} -o json", host.why_not("kubectl"))
    return found


def _asks_for(argv: Sequence[str], kind: str) -> bool:
    name = kind.lower()
    aliases = {"networkattachmentdefinition": "net-attach-def", "daemonset": "ds", "networkpolicy": "netpol"}
    return any(word.lower().startswith((name, aliases.get(name, name))) for word in argv[2:])


def _json_evidence(host: HostFacts, kind: str, text: str = "") -> Evidence | None:
    for argv in host.argvs("kubectl", "json"):
        if _asks_for(argv, kind):
            return host.said(*argv, text=text)
    return None


def at(document: Any, *path: str) -> Any:
    """A value inside nested objects; None where the path ends."""
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _in_pod(target: Target) -> bool:
    environ = attempt(lambda: target.environ) or {}
    groups = attempt(lambda: target.text("cgroup")) or ""
    return (
        "KUBERNETES_SERVICE_HOST" in environ
        or "kubepods" in groups
        or bool(attempt(lambda: objects(target.host, "Pod")))
    )


def _uverbs(host: HostFacts) -> dict[str, str]:
    """UverbsN → device, of devices in scope. Raises Unseen."""
    scope = {device.name for device in host.devices_in_scope}
    nodes: dict[str, str] = {}
    for name in host.ls("/sys/class/infiniband_verbs"):
        device = (host.peek(f"/sys/class/infiniband_verbs/{name}/ibdev") or "").strip()
        if re.fullmatch(r"uverbs\d{1,4}", name, re.ASCII) and (not device or device in scope):
            nodes[name] = device
    return nodes


def _nodes(host: HostFacts) -> list[str]:
    """Names under /dev/infiniband; empty if the folder does not exist. Raises Unseen."""
    try:
        return list(host.ls("/dev/infiniband"))
    except Unseen as unseen:
        if unseen.absent:
            return []
        raise


def _refused(host: HostFacts, node: str) -> bool:
    reading = host.snapshot.read(f"/dev/infiniband/{node}")
    return reading.sight is Sight.UNREADABLE and reading.detail in ("EPERM", "EACCES")


@check(
    "k8s.dev_infiniband",
    title="The container has the device nodes",
    why="sysfs shows the devices, verbs finds none that opens, and the engine silently uses TCP.",
    source="/dev/infiniband against /sys/class/infiniband_verbs",
    fix="request the device plugin's resource, or --device /dev/infiniband",
    undo="take the resource out again",
)
def dev_infiniband(host: HostFacts) -> Iterator[Finding]:
    if not host.is_container:
        raise Skip("no container: see driver.char_devices")
    if host.targets and all(target.protocol == "tcp" for target in host.targets):
        raise Skip("every target uses TCP")
    wanted = _uverbs(host)
    allocated = host.expect_strings("allocated_devices")
    if allocated:
        wanted = {
            n: d
            for n, d in wanted.items()
            if d in allocated or n in allocated or f"/dev/infiniband/{n}" in allocated
        }
    if not wanted:
        raise Skip("no RDMA device is visible")
    nodes = _nodes(host)
    missing = [name for name in wanted if name not in nodes and not _refused(host, name)]
    refused = [name for name in wanted if _refused(host, name)]
    evidence = [
        host.meta_evidence("scope", "/dev/infiniband: " + (" ".join(nodes) or "does not exist")),
        *(host.at(f"/sys/class/infiniband_verbs/{name}/ibdev") for name in list(wanted)[:2]),
        host.said("ibv_devices"),
    ]
    if missing or (refused and len(refused) == len(wanted)):
        bad = missing or refused
        yield fail(
            ", ".join(wanted[name] or name for name in bad[:8]),
            f"/dev/infiniband/{bad[0]} " + ("is missing" if missing else "cannot be opened (EPERM)"),
            "a node that opens, for each device that sysfs shows",
            fix="docker: --device /dev/infiniband; pod: resources.limits of the RDMA device plugin",
            persists=True,
            evidence=evidence,
        )


@check(
    "k8s.dev_infiniband_foreign",
    title="The container sees only devices that it was given",
    why="Some nodes that cannot be opened beside others that can: a provider may abort at the first.",
    source="open of /dev/infiniband/uverbsN gives EPERM while others work",
    fix="drop the hostPath mount of /dev/infiniband; let the device plugin add the nodes",
    undo="mount it again",
)
def dev_infiniband_foreign(host: HostFacts) -> Iterator[Finding]:
    if not host.is_container:
        raise Skip("no container")
    nodes = [
        node
        for node in {*_nodes(host), *(attempt(lambda: host.ls("/sys/class/infiniband_verbs")) or ())}
        if node.startswith("uverbs")
    ]
    refused = sorted(node for node in nodes if _refused(host, node))
    allocated = host.expect_strings("allocated_devices")
    if allocated and not refused:
        given = {word.rpartition("/")[2] for word in allocated}
        owners = {n: (host.peek(f"/sys/class/infiniband_verbs/{n}/ibdev") or "").strip() for n in nodes}
        refused = sorted(n for n in _nodes(host) if n in owners and not {n, owners[n]} & given)
    if refused and len(refused) < len(nodes):
        efa = any(device.kind == "efa" for device in attempt(lambda: host.devices) or ())
        yield finding(
            Outcome.FAIL if efa else Outcome.WARN,
            ", ".join(refused[:8]),
            f"{len(refused)} of {len(nodes)} nodes refuse to open, or were not allocated"
            + (f"; given: {', '.join(allocated)}" if allocated else ""),
            "only nodes that were allocated",
            fix="drop the hostPath mount of /dev/infiniband from the pod",
            persists=True,
            evidence=[host.at(f"/dev/infiniband/{refused[0]}"), host.meta_evidence("errors", "EPERM")],
        )


@check(
    "k8s.pod_rdma_netdev",
    title="The pod has the RDMA device's interface",
    why="With a veth only there is no GID of this namespace.",
    source="interfaces of the pod, ethtool -i (veth), gid_attrs/ndevs",
    fix="a secondary network (macvlan, SR-IOV) on the RDMA interface, or hostNetwork: true",
    undo="remove the network's annotation",
)
def pod_rdma_netdev(host: HostFacts) -> Iterator[Finding]:
    if not host.is_container:
        raise Skip("no container")
    ports = [port for port in host.ports if port.is_roce]
    if not ports:
        raise Skip("no RoCE port")
    if not host.netdev_names:
        host.ls("/sys/class/net")
    with_netdev = [port for port in ports if port.netdev is not None and port.netdev.present]
    if with_netdev:
        return
    own = [name for name in sorted(host.netdev_names) if name != "lo"]
    virtual = [
        n
        for n in own
        if host.netdev(n).driver in ("veth", None)
        and host.snapshot.readlink(f"/sys/class/net/{n}/device") is None
    ]
    if own and len(virtual) == len(own):
        yield fail(
            ", ".join(port.label for port in ports[:8]),
            f"no interface of theirs here, only {', '.join(own[:4])}",
            "the RDMA interface, or a macvlan or virtual function of it",
            fix="annotate the pod with a secondary network on the RDMA interface, or set hostNetwork: true",
            persists=True,
            evidence=[
                host.at("/sys/class/net", " ".join(own)),
                *(seen for n in own[:2] if (seen := host.said("ethtool", "-i", n)) is not None),
                *host.ip_evidence("addr"),
            ],
        )


def _cni_types(host: HostFacts) -> dict[str, set[str]]:
    """NetworkAttachmentDefinition → CNI plugin types in its config. Raises Unseen."""
    found: dict[str, set[str]] = {}
    for definition in objects(host, "NetworkAttachmentDefinition"):
        config = attempt(lambda: misc.parse_json(str(at(definition, "spec", "config") or "")))
        plugins = [config, *_listed(at(config, "plugins"))]
        types = {str(at(p, "type")) for p in plugins if at(p, "type")}
        found[f"{at(definition, 'metadata', 'namespace')}/{at(definition, 'metadata', 'name')}"] = types
    return found


@check(
    "k8s.rdma_netns_mode",
    title="The RDMA subsystem's namespace mode fits the plugin",
    why="The rdma CNI moves devices into pods and needs exclusive mode; the shared plugin needs shared: "
    "ADDR_ERROR -19.",
    source="rdma system show against the CNI plugins and the device plugin in use",
    fix="rdma system set netns exclusive, early at boot (or options ib_core netns_mode=0)",
    undo="rdma system set netns shared",
    root="y",
)
def rdma_netns_mode(host: HostFacts) -> Iterator[Finding]:
    definitions = attempt(lambda: _cni_types(host))
    moving = [name for name, types in (definitions or {}).items() if "rdma" in types]
    shared_plugin = False
    for argv in host.argvs("kubectl"):
        text = attempt(lambda: host.command(*argv)) or ""
        shared_plugin = (
            shared_plugin
            or "rdma-shared" in " ".join(argv)
            or bool(re.search(r"rdma/hca_shared|rdma-shared-d", text))
        )
    if not moving and not shared_plugin:
        raise Skip("no RDMA plugin is known here")
    mode = rdma.parse_system(host.command("rdma", "system", "show"))["netns"]
    evidence = [host.said("rdma", "system", "show"), _json_evidence(host, "NetworkAttachmentDefinition")]
    if moving and mode == "shared":
        yield fail(
            "rdma system",
            "netns shared, with the rdma CNI in " + ", ".join(moving[:4]),
            "netns exclusive",
            fix="echo 'options ib_core netns_mode=0' > /etc/modprobe.d/ib_core.conf; reboot (now: rdma "
            "system set netns exclusive)",
            persists=True,
            evidence=evidence,
        )
    elif shared_plugin and mode == "exclusive" and not moving:
        yield fail(
            "rdma system",
            "netns exclusive, with the shared device plugin",
            "netns shared",
            fix="rdma system set netns shared (before any pod uses it)",
            persists=False,
            evidence=[evidence[0], *(host.said(*argv) for argv in host.argvs("kubectl")[:2])],
        )


@check(
    "k8s.allocatable",
    title="The node offers its NICs",
    why="Pods that ask for the resource stay pending.",
    source="node .status.allocatable, the device plugin's log",
    fix="check the plugin's selectors and its log; driver.char_devices names what it misses",
)
def allocatable(host: HostFacts) -> Iterator[Finding]:
    logs = list(host.argvs("kubectl", "logs"))
    nodes = (attempt(lambda: objects(host, "Node")) or []) if logs else objects(host, "Node")
    own = [n for n in nodes if at(n, "metadata", "name") in (host.name, None)] or (
        nodes if len(nodes) == 1 else []
    )
    judged = 0
    physical = [d for d in attempt(lambda: host.devices_in_scope) or () if not d.is_virtual]
    for node in own:
        capacity = at(node, "status", "capacity")
        offered = at(node, "status", "allocatable")
        for name, value in (offered if isinstance(offered, dict) else {}).items():
            if not _RDMA_RESOURCE.search(name) or not str(value).isdigit():
                continue
            judged += 1
            count = int(str(value))
            full = at(capacity, name)
            if count == 0 or (
                physical and count < len(physical) and "/efa" not in name and len(_rdma_names(offered)) == 1
            ):
                yield fail(
                    f"{at(node, 'metadata', 'name') or host.name} {name}",
                    f"allocatable {count}, capacity {full}",
                    f"at least {max(len(physical), 1)}",
                    fix="kubectl logs of the device plugin; check its selectors",
                    persists=None,
                    evidence=[
                        _json_evidence(host, "Node", f"{name}: {value}"),
                        *(host.said(*a) for a in logs),
                    ],
                )
    for argv in logs:
        text = attempt(lambda: host.command(*argv)) or ""
        line = next((line for line in text.splitlines() if re.search(r'exposing "0" devices', line)), None)
        if line and not judged:
            judged += 1
            yield fail(
                "device plugin",
                line.strip(),
                "its NICs",
                fix="read the lines above it in the plugin's log",
                persists=None,
                evidence=[host.said(*argv, text=line)],
            )
    if not judged:
        raise Skip("the node offers no RDMA resource")


def _rdma_names(offered: Any) -> list[str]:
    return [name for name in offered if _RDMA_RESOURCE.search(name)] if isinstance(offered, dict) else []


@check(
    "k8s.plugin_socket",
    title="The device plugin is registered",
    why="After a restart of kubelet a plugin that did not register again offers nothing.",
    source="/var/lib/kubelet/device-plugins/*.sock",
    fix="restart the device plugin's pod",
    root="y",
)
def plugin_socket(host: HostFacts) -> Iterator[Finding]:
    folder = "/var/lib/kubelet/device-plugins"
    names = host.ls(folder)
    checkpoint = host.peek(f"{folder}/kubelet_internal_checkpoint") or ""
    offered = [
        n
        for node in attempt(lambda: objects(host, "Node")) or ()
        for n in _rdma_names(at(node, "status", "allocatable"))
    ]
    wanted = (
        bool(offered)
        or bool(_RDMA_RESOURCE.search(checkpoint))
        or any(
            "rdma-shared" in " ".join(argv) or "sriov" in " ".join(argv)
            for argv in host.argvs("kubectl", "logs")
        )
    )
    if not wanted:
        raise Skip("no RDMA device plugin is known here")
    plugins = [
        n
        for n in names
        if n.endswith(".sock")
        and n != "kubelet.sock"
        and re.search(r"rdma|sriov|mlnx|hca|efa|example|net", n, re.IGNORECASE)
    ]
    if not plugins:
        yield warn(
            "device plugin",
            f"no socket of it in {folder}: {', '.join(names) or 'empty'}",
            "its .sock beside kubelet.sock",
            fix="kubectl -n kube-system rollout restart ds/<device plugin>",
            persists=True,
            evidence=[host.at(folder, " ".join(names))],
        )


@check(
    "k8s.ipc_lock",
    title="The pod may lock memory",
    why="Without IPC_LOCK and with a limit, registration fails with ENOMEM.",
    source="pod securityContext.capabilities, CapEff bit 14, Max locked memory",
    fix="securityContext: {capabilities: {add: [IPC_LOCK]}}",
    undo="take the capability out again",
    per=Per.TARGET,
)
def ipc_lock(target: Target) -> Iterator[Finding]:
    if not target.host.is_container or not _in_pod(target):
        raise Skip(f"{target.name} runs in no pod")
    if target.protocol == "tcp" or target.has_capability(CAP_IPC_LOCK):
        return
    soft = target.soft_limit("Max locked memory")
    if soft < proc.UNLIMITED and soft < (target.segment_bytes or proc.UNLIMITED):
        yield fail(
            target.label,
            f"no IPC_LOCK, and may lock {gib(soft)}",
            "IPC_LOCK",
            fix="pod: securityContext: {capabilities: {add: [IPC_LOCK]}}",
            persists=True,
            evidence=[
                target.evidence("status", f"CapEff: {target.status.get('CapEff')}"),
                target.evidence("limits", f"Max locked memory {soft}"),
            ],
        )


@check(
    "k8s.hugepages",
    title="The pod asks for the huge pages it uses",
    why="Without the request the pod's huge page limit is 0: bus error.",
    source="pod resources hugepages-2Mi, volume medium HugePages, node allocatable",
    fix="resources.limits: {hugepages-2Mi: …} and a volume of medium HugePages; restart kubelet after "
    "allocation",
)
def hugepages(host: HostFacts) -> Iterator[Finding]:
    users = [target for target in host.targets if target.wants_huge_pages]
    if not users:
        raise Skip("nobody asks for huge pages")
    pods = attempt(lambda: objects(host, "Pod"))
    nodes = attempt(lambda: objects(host, "Node"))
    if pods is None and nodes is None:
        if not host.is_container:
            raise Skip("no Kubernetes here")
        objects(host, "Pod")
    for pod in pods or ():
        containers = _listed(at(pod, "spec", "containers"))
        asked = [
            name
            for c in containers
            for name in (at(c, "resources", "limits") or at(c, "resources", "requests") or {})
            if str(name).startswith("hugepages-")
        ]
        if containers and not asked:
            yield fail(
                f"pod {at(pod, 'metadata', 'name')}",
                f"no hugepages-* in its resources, and {users[0].name} uses them",
                "hugepages-2Mi, at least its segment",
                fix="resources: {limits: {hugepages-2Mi: <segment>, memory: …}}",
                persists=True,
                evidence=[_json_evidence(host, "Pod"), users[0].evidence("environ")],
            )
    total = (attempt(lambda: host.memory) or {}).get("HugePages_Total", 0)
    for node in nodes or ():
        offered = at(node, "status", "allocatable")
        value = offered.get("hugepages-2Mi") if isinstance(offered, dict) else None
        if value is not None and str(value) == "0" and total:
            yield fail(
                f"node {at(node, 'metadata', 'name')}",
                f"allocatable hugepages-2Mi 0, while the kernel has {total}",
                "the kernel's",
                fix="systemctl restart kubelet (it counted before the pages were allocated)",
                persists=True,
                evidence=[
                    _json_evidence(host, "Node", "hugepages-2Mi: 0"),
                    host.at("/proc/meminfo", f"HugePages_Total: {total}"),
                ],
            )


@check(
    "k8s.topology_manager",
    title="GPU and NIC come from one NUMA node",
    why="Without a policy kubelet hands out a GPU of one node and a NIC of the other.",
    source="/var/lib/kubelet/config.yaml topologyManagerPolicy, cpuManagerPolicy",
    fix="topologyManagerPolicy: single-numa-node, cpuManagerPolicy: static; remove cpu_manager_state; "
    "restart kubelet",
    undo="topologyManagerPolicy: none",
    root="y",
)
def topology_manager(host: HostFacts) -> Iterator[Finding]:
    path = "/var/lib/kubelet/config.yaml"
    text = host.peek(path) or host.peek("/etc/kubernetes/kubelet-config.yaml")
    if text is None:
        host.text(path)
        return
    if not host.gpus or not (attempt(lambda: host.devices) or []):
        raise Skip("no GPU beside a NIC")
    if len(attempt(lambda: host.numa_nodes) or [0, 1]) < 2:
        raise Skip("one NUMA node")
    policy = re.search(r"^\s*topologyManagerPolicy:\s*[\"']?([\w-]+)", text, re.MULTILINE)
    if policy is None or policy[1] == "none":
        yield warn(
            "kubelet",
            f"topologyManagerPolicy {policy[1] if policy else 'not set (none)'}",
            "single-numa-node or restricted",
            fix=f"{path}: topologyManagerPolicy: single-numa-node, cpuManagerPolicy: static; systemctl "
            f"restart kubelet",
            persists=True,
            evidence=[host.at(path, policy[0].strip() if policy else "no topologyManagerPolicy")],
        )


def _vf_lines(host: HostFacts) -> list[tuple[str, str]]:
    """(physical function, its ``vf N …`` line). Raises Unseen."""
    found: list[tuple[str, str]] = []
    seen = False
    for result in host._ip_outputs(frozenset({"link", "l", "addr", "address"})):
        seen = True
        for name, link in ip.parse_addr(result.stdout).items():
            found += [(name, line) for line in link.vfs]
    if not seen:
        raise Unseen("ip link show", Sight.NOT_COLLECTED)
    return found


@check(
    "k8s.vf_guid",
    title="InfiniBand virtual functions have GUIDs",
    why="Without one the subnet manager gives no LID.",
    source="<dev>/node_guid of the function; ip link show <pf>",
    fix="ib-sriov-cni with a guid, or: ip link set <pf> vf N node_guid … port_guid …",
)
def vf_guid(host: HostFacts) -> Iterator[Finding]:
    judged = 0
    for device in host.devices_in_scope:
        if not device.is_virtual or not any(port.is_infiniband for port in device.ports):
            continue
        judged += 1
        guid = device.text("node_guid")
        if re.fullmatch(r"[0:]+", guid):
            yield fail(
                device.name,
                f"node_guid {guid}",
                "a GUID",
                fix="set one on the host: ip link set <pf> vf N node_guid <guid>",
                persists=False,
                evidence=[host.at(f"{device.path}/node_guid")],
            )
    for name, line in attempt(lambda: _vf_lines(host)) or ():
        guids = re.findall(r"(?:NODE|PORT)_GUID\s+([0-9a-fA-F:]+)", line)
        if guids:
            judged += 1
            if any(re.fullmatch(r"[0:]+", guid) for guid in guids):
                yield fail(
                    f"{name} {line.split(',')[0][:20]}",
                    "GUID zero",
                    "a GUID",
                    fix=f"ip link set {name} vf N node_guid <guid> port_guid <guid>",
                    persists=False,
                    evidence=host.ip_evidence("link"),
                )
    if not judged:
        raise Skip("no InfiniBand virtual function")


@check(
    "k8s.vf_settings",
    title="Nothing throttles the virtual functions",
    why="A rate cap or a VLAN of the host is invisible inside the guest; without trust there is no "
    "multicast, so no IPv6 neighbour.",
    source="ip link show <pf>: vf lines",
    fix="ip link set <pf> vf N max_tx_rate 0; ip link set <pf> vf N trust on",
    undo="set the former values",
    root="y",
)
def vf_settings(host: HostFacts) -> Iterator[Finding]:
    lines = attempt(lambda: _vf_lines(host))
    if not lines:
        virtual = [d for d in attempt(lambda: host.devices_in_scope) or () if d.is_virtual]
        if virtual:
            raise Unseen(
                f"settings of {virtual[0].name}: look on the host, ip link show <pf>", Sight.NOT_COLLECTED
            )
        if lines is None:
            _vf_lines(host)
        raise Skip("no virtual functions")
    policy = host.expect_int("vlan")
    for name, line in lines:
        number = re.match(r"vf (\d+)", line)
        subject = f"{name} vf {number[1] if number else '?'}"
        rate = re.search(r"max_tx_rate (\d{1,9})|tx rate (\d{1,9})", line, re.ASCII)
        capped = int(rate[1] or rate[2]) if rate else 0
        if capped and capped != host.expect_int("vf_max_tx_rate_mbps"):
            yield warn(
                subject,
                f"capped at {capped} Mbit/s",
                "no cap (0)",
                fix=f"ip link set {name} vf {number[1] if number else 'N'} max_tx_rate 0",
                persists=False,
                evidence=host.ip_evidence("link"),
            )
        vlan = re.search(r"\bvlan (\d{1,4})", line, re.ASCII)
        tag = int(vlan[1]) if vlan else 0
        if policy is not None and tag != policy:
            yield warn(
                subject,
                f"VLAN {tag or 'none'}",
                f"VLAN {policy}",
                fix=f"ip link set {name} vf {number[1] if number else 'N'} vlan {policy}",
                persists=False,
                evidence=host.ip_evidence("link"),
            )
        elif policy is None and tag:
            yield info(subject, f"VLAN {tag}", evidence=host.ip_evidence("link"))
        if "trust off" in line and _v6_dead(host):
            yield warn(
                subject,
                "trust off, and IPv6 neighbours fail while IPv4 ones answer",
                "trust on",
                fix=f"ip link set {name} vf {number[1] if number else 'N'} trust on",
                persists=False,
                evidence=host.ip_evidence("link", "neigh"),
            )


def _v6_dead(host: HostFacts) -> bool:
    neighbours = attempt(lambda: host.neighbours) or []
    six = [n.state in ("FAILED", "INCOMPLETE") for n in neighbours if n.address.version == 6]
    four = [n.state in ("FAILED", "INCOMPLETE") for n in neighbours if n.address.version == 4]
    return bool(six) and all(six) and bool(four) and not all(four)


@check(
    "k8s.sriov_state",
    title="The SR-IOV operator has finished",
    why="A node half configured has functions in the wrong state.",
    source="SriovNetworkNodeState .status.syncStatus",
    fix="read the operator's config daemon log on this node",
)
def sriov_state(host: HostFacts) -> Iterator[Finding]:
    states = objects(host, "SriovNetworkNodeState")
    for state in states:
        status = at(state, "status", "syncStatus")
        if status is not None and status != "Succeeded":
            yield warn(
                str(at(state, "metadata", "name")),
                f"syncStatus {status}",
                "Succeeded",
                fix="kubectl -n sriov-network-operator logs ds/sriov-network-config-daemon",
                persists=None,
                evidence=[_json_evidence(host, "SriovNetworkNodeState", f"syncStatus {status}")],
            )


def _matches(selector: Any, labels: dict[str, Any]) -> bool:
    wanted = at(selector, "matchLabels")
    return not isinstance(wanted, dict) or all(labels.get(key) == value for key, value in wanted.items())


def _allows(rules: Any, port: int) -> bool:
    for rule in _listed(rules):
        ports = _listed(at(rule, "ports"))
        if not ports:
            return True
        for entry in ports:
            first, last = at(entry, "port"), at(entry, "endPort") or at(entry, "port")
            if (
                at(entry, "protocol") in (None, "TCP")
                and isinstance(first, int)
                and isinstance(last, int)
                and first <= port <= last
            ):
                return True
    return False


@check(
    "k8s.network_policy",
    title="Network policies let the handshake through",
    why="The handshake is refused; RDMA data are not concerned.",
    source="NetworkPolicy objects that select the store's pods; TCP probe",
    fix="allow TCP 12001 and 15000-17000 between the store's pods",
    undo="remove the rule",
    kind="S/A",
)
def network_policy(host: HostFacts) -> Iterator[Finding]:
    policies = objects(host, "NetworkPolicy")
    pods = attempt(lambda: objects(host, "Pod")) or []
    if any(at(pod, "spec", "hostNetwork") for pod in pods):
        raise Skip("the pods use the host's network")
    labels: list[dict[str, Any]] = [at(pod, "metadata", "labels") or {} for pod in pods] or [{}]
    for label in labels:
        mine = [
            p
            for p in policies
            if _matches(at(p, "spec", "podSelector"), label)
            and "Ingress" in (_listed(at(p, "spec", "policyTypes")) or ["Ingress"])
        ]
        closed = [
            port
            for port in HANDSHAKE_PORTS
            if mine and not any(_allows(at(p, "spec", "ingress"), port) for p in mine)
        ]
        if closed:
            yield fail(
                ", ".join(str(at(p, "metadata", "name")) for p in mine),
                f"TCP {', '.join(map(str, closed))} is not allowed in",
                "12001 and 15000-17000",
                fix="add an ingress rule for these ports from the store's pods",
                persists=True,
                evidence=[_json_evidence(host, "NetworkPolicy")],
            )
            return


@check(
    "k8s.pod_mtu",
    title="The pod's data interface has the rail's MTU",
    why="Smaller packets than the rail carries, or larger than the peer takes.",
    source="<netdev>/mtu in the pod, mtu of the network attachment against the rail's",
    fix="set mtu in the network attachment definition",
)
def pod_mtu(host: HostFacts) -> Iterator[Finding]:
    judged = 0
    wanted = host.expect_int("mtu")
    if host.is_container and wanted is not None:
        for port in host.ports:
            netdev = port.netdev
            mtu = attempt(lambda: netdev.mtu) if netdev is not None and netdev.present else None
            if mtu is None or netdev is None or not port.is_roce:
                continue
            judged += 1
            if path_mtu_of(mtu) < wanted:
                yield fail(
                    f"{port.label} {netdev.name}",
                    f"MTU {mtu} in the pod",
                    f"room for a path MTU of {wanted}",
                    fix='network attachment: "mtu": 9000',
                    persists=True,
                    evidence=[host.at(f"{netdev.path}/mtu")],
                )
    rails = {attempt(lambda: p.need_netdev().mtu) for p in attempt(lambda: host.ports) or () if p.is_roce} - {
        None
    }
    for definition in attempt(lambda: objects(host, "NetworkAttachmentDefinition")) or ():
        config = attempt(lambda: misc.parse_json(str(at(definition, "spec", "config") or "")))
        for plugin in [config, *_listed(at(config, "plugins"))]:
            mtu = at(plugin, "mtu")
            if isinstance(mtu, int) and not isinstance(mtu, bool) and mtu > 0 and rails:
                judged += 1
                if mtu not in rails:
                    yield fail(
                        f"network {at(definition, 'metadata', 'name')}",
                        f"mtu {mtu}",
                        f"{', '.join(map(str, sorted(r for r in rails if r)))}, the rail's",
                        fix='network attachment: "mtu" as the rail has',
                        persists=True,
                        evidence=[_json_evidence(host, "NetworkAttachmentDefinition")],
                    )
    if not judged:
        raise Skip("no data interface of a pod to compare")


def _ranges(host: HostFacts) -> list[tuple[str, ipaddress.IPv4Network | ipaddress.IPv6Network, list[str]]]:
    """(definition, range, excluded) of every address plan. Raises Unseen."""
    found = []
    for definition in objects(host, "NetworkAttachmentDefinition"):
        config = attempt(lambda: misc.parse_json(str(at(definition, "spec", "config") or "")))
        name = str(at(definition, "metadata", "name"))
        for plugin in [config, *_listed(at(config, "plugins"))]:
            plan = at(plugin, "ipam")
            texts = [at(plan, "range"), at(plan, "subnet")]
            texts += [
                at(entry, "range") or at(entry, "subnet")
                for group in _listed(at(plan, "ipRanges"))
                for entry in [group]
            ]
            texts += [
                at(entry, "subnet") for group in _listed(at(plan, "ranges")) for entry in _listed(group)
            ]
            for text in texts:
                network = ip.parse_network(str(text)) if text else None
                if network is not None:
                    found.append((name, network, [str(x) for x in _listed(at(plan, "exclude"))]))
    return found


@check(
    "k8s.ipam_overlap",
    title="Pods get no address of a node",
    why="A pod with a node's address: two hosts answer.",
    source="ranges of network attachments against addresses of the nodes",
    fix="exclude the nodes' addresses from the range, or choose another",
    per=Per.FLEET,
    kind="X",
    nodes_min=1,
)
def ipam_overlap(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    ranges: dict[tuple[str, str], tuple[str, Any, list[str], HostFacts]] = {}
    reason: Unseen | None = None
    for host in nodes:
        try:
            for name, network, excluded in _ranges(host):
                ranges[name, str(network)] = (name, network, excluded, host)
        except Unseen as unseen:
            reason = unseen
    if not ranges:
        if reason is not None:
            raise reason
        raise Skip("no address plan is known")
    for name, network, excluded, owner in ranges.values():
        for host in nodes:
            if host.is_container:
                continue
            for link in (attempt(lambda: host.addresses) or {}).values():
                for address in link.addresses:
                    inside = address.version == network.version and address.ip in network
                    kept = any(
                        (n := ip.parse_network(text)) is not None
                        and n.version == address.version
                        and address.ip in n
                        for text in excluded
                    )
                    if inside and not kept and not address.is_link_local:
                        yield fail(
                            f"network {name}",
                            f"range {network} holds {address.ip} of {host.name} {link.name}",
                            "a range of its own",
                            fix=f'"exclude": ["{address.ip}/32"], or another range',
                            persists=True,
                            evidence=[
                                _json_evidence(owner, "NetworkAttachmentDefinition"),
                                *host.ip_evidence("addr"),
                            ],
                        )


@check(
    "k8s.cloud_firewall",
    title="The cloud's security group lets EFA through",
    why="EFA needs a rule that allows all traffic to and from the group itself: otherwise every peer "
    "times out.",
    source="aws ec2 describe-security-groups",
    fix="add a self-referencing allow-all rule, inbound and outbound",
    undo="remove the rules",
    kind="A",
)
def cloud_firewall(host: HostFacts) -> Iterator[Finding]:
    if not any(device.kind == "efa" for device in host.devices):
        raise Skip("no EFA device")
    argvs = host.argvs("aws", "describe-security-groups")
    if not argvs:
        raise Unseen("aws ec2 describe-security-groups", host.why_not("aws"))
    document = misc.parse_json(host.command(*argvs[0]))
    for group in _listed(at(document, "SecurityGroups")):
        own = at(group, "GroupId")
        for key, way in (("IpPermissions", "inbound"), ("IpPermissionsEgress", "outbound")):
            whole = any(
                str(at(rule, "IpProtocol")) == "-1"
                and any(at(pair, "GroupId") == own for pair in _listed(at(rule, "UserIdGroupPairs")))
                for rule in _listed(at(group, key))
            )
            if not whole:
                yield fail(
                    str(own),
                    f"no {way} rule that allows all traffic of the group itself",
                    "one",
                    fix=f"aws ec2 authorize-security-group-{'ingress' if way == 'inbound' else 'egress'} "
                    f"--group-id {own} "
                    f"--protocol -1 --source-group {own}",
                    persists=True,
                    evidence=[host.said(*argvs[0])],
                )


@check(
    "k8s.host_services",
    title="The operators' daemons run",
    why="Driver, peermem or NIC settings are missing where their daemon is not ready.",
    source="DaemonSets: network operator, GPU operator, SR-IOV, NIC configuration",
    fix="kubectl describe the DaemonSet's pod on this node",
)
def host_services(host: HostFacts) -> Iterator[Finding]:
    for daemon in objects(host, "DaemonSet"):
        name = str(at(daemon, "metadata", "name"))
        wanted, ready = (
            at(daemon, "status", "desiredNumberScheduled"),
            at(daemon, "status", "numberReady") or 0,
        )
        if _SERVICES.search(name) and isinstance(wanted, int) and isinstance(ready, int) and ready < wanted:
            yield warn(
                name,
                f"{ready} of {wanted} ready",
                f"{wanted}",
                fix=f"kubectl -n {at(daemon, 'metadata', 'namespace')} describe ds/{name}",
                persists=None,
                evidence=[_json_evidence(host, "DaemonSet", f"{name} {ready}/{wanted}")],
            )
