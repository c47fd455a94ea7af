"""The process: what it was told, what it ignored, and the first thing that went wrong in its log."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from kvops.diag.compare import Groups
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.target import Target
from kvops.diag.model import Finding, Outcome, Skip, Unseen, fail, info, warn
from kvops.diag.parsers.ip import parse_address
from kvops.diag.registry import Per, check
from kvops.host import Sight

# Documented ranges; a value outside is ignored with a line in the log that nobody reads [M]
ENV_RANGES: dict[str, tuple[int, int]] = {
    "MC_GID_INDEX": (0, 255),
    "MC_IB_TC": (0, 255),
    "MC_IB_SL": (0, 15),
    "MC_IB_PORT": (1, 255),
    "MC_PKEY_INDEX": (0, 65535),
    "MC_NUM_QP_PER_EP": (1, 256),
    "MC_NUM_CQ_PER_CTX": (1, 256),
    "MC_NUM_COMP_CHANNELS_PER_CTX": (1, 256),
    "MC_MAX_EP_PER_CTX": (1, 65536),
    "MC_MAX_CQE_PER_CTX": (1, 65536),
    "MC_MAX_WR": (1, 65536),
    "MC_MAX_SGE": (1, 65536),
    "MC_MAX_INLINE": (0, 65536),
    "MC_RETRY_CNT": (1, 127),
    "MC_IB_PCI_RELAXED_ORDERING": (0, 2),
    "MC_HANDSHAKE_PORT": (1, 65535),
    "MC_WORKERS_PER_CTX": (1, 8),
}
CONCENTRATION = 0.9  # "nearly all" pairs with errors


@check(
    "proc.protocol",
    title="The engine uses RDMA where there is RDMA",
    why="TCP is slow beside it, and nobody says so.",
    source="--protocol, configuration, MC_FORCE_TCP",
    fix="--protocol=rdma; unset MC_FORCE_TCP",
    undo="--protocol=tcp",
    per=Per.TARGET,
)
def protocol(target: Target) -> Iterator[Finding]:
    host = target.host
    environ = attempt(lambda: target.environ)
    if (
        environ is not None
        and "MC_FORCE_TCP" in environ
        and environ["MC_FORCE_TCP"].lower() not in ("0", "false", "off")
    ):
        yield warn(
            target.label,
            f"MC_FORCE_TCP={environ['MC_FORCE_TCP']}",
            "not set",
            fix="unset MC_FORCE_TCP and restart it",
            persists=True,
            evidence=[target.evidence("environ", f"MC_FORCE_TCP={environ['MC_FORCE_TCP']}")],
        )
        return
    if target.protocol is None:
        target.command_line  # noqa: B018 - raises Unseen
        raise Skip(f"{target.name} does not say which protocol")
    if target.protocol == "tcp" and len(attempt(lambda: host.devices) or ()):
        yield info(
            target.label,
            "protocol tcp on a host with RDMA",
            "rdma, unless it is wanted",
            fix="--protocol=rdma",
            persists=True,
            evidence=[target.evidence("cmdline")],
        )


@check(
    "proc.device_names",
    title="The named devices exist",
    why="'No matched device found'; without names a management NIC may be taken.",
    source="--device_names against /sys/class/infiniband",
    fix="correct --device_names",
    per=Per.TARGET,
)
def device_names(target: Target) -> Iterator[Finding]:
    host = target.host
    if target.protocol == "tcp":
        raise Skip(f"{target.name} uses TCP")
    names = [device.name for device in host.devices]
    target.command_line  # noqa: B018 - raises Unseen
    wrong = [name for name in target.device_names if name not in names]
    evidence = [target.evidence("cmdline"), host.at("/sys/class/infiniband", " ".join(names) or "empty")]
    if wrong:
        yield fail(
            target.label,
            f"--device_names has {', '.join(wrong)}",
            f"one of {', '.join(names[:12]) or 'none: there is no device'}",
            fix=f"--device_names={','.join(n for n in target.device_names if n in names) or ','.join(names)}",
            persists=True,
            evidence=evidence,
        )
    elif not target.device_names:
        management = [name for name, why in host.out_of_scope.items() if why.startswith("management")]
        if management:
            yield warn(
                target.label,
                f"no --device_names, and {', '.join(management)} is a management NIC",
                "the store's own NICs",
                fix=f"--device_names={','.join(n for n in names if n not in management)}",
                persists=True,
                evidence=evidence,
            )


@check(
    "proc.ib_port",
    title="The port number exists",
    why="The device has no such port.",
    source="MC_IB_PORT against <dev>/ports/",
    fix="unset MC_IB_PORT (1)",
    per=Per.TARGET,
)
def ib_port(target: Target) -> Iterator[Finding]:
    value = target.environ.get("MC_IB_PORT")
    if value is None:
        return
    for device in {port.device.name: port.device for port in target.ports}.values():
        numbers = [str(port.number) for port in device.ports]
        if numbers and value.strip() not in numbers:
            yield fail(
                f"{device.name} of {target.name}",
                f"MC_IB_PORT={value}",
                f"one of {', '.join(numbers)}",
                fix="unset MC_IB_PORT and restart it",
                persists=True,
                evidence=[
                    target.evidence("environ", f"MC_IB_PORT={value}"),
                    target.host.at(f"{device.path}/ports", " ".join(numbers)),
                ],
            )


@check(
    "proc.env_values",
    title="The engine heeds its variables",
    why="Values out of range are ignored; MC_ENABLE_DEST_DEVICE_AFFINITY counts by its presence, also "
    "with 0.",
    source="/proc/<pid>/environ, MC_*",
    fix="set a value within the range, or unset the variable",
    per=Per.TARGET,
    root="p",
)
def env_values(target: Target) -> Iterator[Finding]:
    environ = target.environ
    for name, (low, high) in ENV_RANGES.items():
        value = environ.get(name)
        if value is None:
            continue
        valid = re.fullmatch(r"-?\d{1,10}", value.strip(), re.ASCII) is not None and low <= int(value) <= high
        if not valid:
            yield warn(
                target.label,
                f"{name}={value}: ignored",
                f"{low} to {high}",
                fix=f"unset {name}, or set it within {low}-{high}; restart it",
                persists=True,
                evidence=[target.evidence("environ", f"{name}={value}")],
            )
    affinity = environ.get("MC_ENABLE_DEST_DEVICE_AFFINITY")
    if affinity is not None and affinity.strip().lower() in ("0", "false", "off", "no", ""):
        yield warn(
            target.label,
            f"MC_ENABLE_DEST_DEVICE_AFFINITY={affinity}: it is on",
            "unset, to switch it off",
            fix="unset MC_ENABLE_DEST_DEVICE_AFFINITY and restart it",
            persists=True,
            evidence=[target.evidence("environ", f"MC_ENABLE_DEST_DEVICE_AFFINITY={affinity}")],
        )


@check(
    "proc.advertised_host",
    title="Peers can reach the advertised address",
    why="The handshake goes to the peer's own loopback, or to nowhere.",
    source="--host, local_hostname; /etc/hosts",
    fix="--host=<address that peers reach>",
    per=Per.TARGET,
    kind="S/X",
)
def advertised_host(target: Target) -> Iterator[Finding]:
    host = target.host
    environ = attempt(lambda: target.environ) or {}
    name = target.option("host", "local_hostname", "local_server_name") or environ.get(
        "MOONCAKE_LOCAL_HOSTNAME"
    )
    if name is None:
        target.command_line  # noqa: B018 - raises Unseen
        raise Skip(f"{target.name} advertises the host's own name")
    bare = name.rpartition(":")[0] if name.count(":") == 1 else name
    address = parse_address(bare.strip("[]"))
    hosts: list[str] = []
    if address is None:
        for line in (host.peek("/etc/hosts") or "").splitlines():
            words = line.partition("#")[0].split()
            if bare in words[1:]:
                hosts.append(words[0])
        address = parse_address(hosts[0]) if hosts else None
    wrong = bare == "localhost" or (address is not None and (address.is_loopback or address.is_unspecified))
    if wrong:
        yield fail(
            target.label,
            f"advertises {name}" + (f", which is {hosts[0]} here" if hosts else ""),
            "an address that peers reach",
            fix="--host=<address of this node>" + (", or correct /etc/hosts" if hosts else ""),
            persists=True,
            evidence=[target.evidence("cmdline"), host.at("/etc/hosts") if hosts else None],
        )


@check(
    "proc.proxy_env",
    title="Metadata requests do not go to a proxy",
    why="HTTP metadata fail, or come from somewhere else.",
    source="http_proxy, no_proxy with HTTP metadata",
    fix="no_proxy=<metadata host>",
    undo="unset no_proxy",
    per=Per.TARGET,
    root="p",
)
def proxy_env(target: Target) -> Iterator[Finding]:
    environ = target.environ
    proxy = environ.get("http_proxy") or environ.get("HTTP_PROXY") or environ.get("all_proxy")
    url = (
        target.option("metadata_server", "metadata_server_address")
        or environ.get("MOONCAKE_TE_META_DATA_SERVER")
        or ""
    )
    match = re.match(r"http://([^/:]+|\[[^\]]+\])", url)
    if not proxy or match is None:
        raise Skip(f"{target.name}: no proxy, or no HTTP metadata")
    server = match[1].strip("[]")
    excluded = [
        w.strip() for w in (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",") if w.strip()
    ]

    def covers(word: str) -> bool:
        if word == "*" or word == server or server.endswith("." + word.lstrip(".")):
            return True
        address = parse_address(server)
        try:
            return address is not None and "/" in word and address in ipaddress.ip_network(word, strict=False)
        except (ValueError, TypeError):
            return False

    if not any(covers(word) for word in excluded):
        yield warn(
            target.label,
            f"http_proxy={proxy}, and {server} is not in no_proxy",
            f"no_proxy with {server}",
            fix=f"export no_proxy={','.join([*excluded, server])} and restart it",
            persists=True,
            evidence=[target.evidence("environ", f"http_proxy={proxy}"), target.evidence("cmdline")],
        )


def _engine_versions(host: HostFacts) -> dict[str, str]:
    """Package → version of engines, from pip."""
    found: dict[str, str] = {}
    for tool in ("pip", "pip3", "uv"):
        for argv in host.argvs(tool):
            text = attempt(lambda: host.command(*argv)) or ""
            for package, number in re.findall(r"^Name:\s*(\S+)\nVersion:\s*(\S+)", text, re.MULTILINE):
                found[package.lower()] = number
            for package, number in re.findall(
                r"^(mooncake[\w-]*|sglang|vllm|kvops)(?:\s+|==)(\d\S*)", text, re.MULTILINE
            ):
                found[package.lower()] = number
    return found


@check(
    "proc.versions",
    title="All nodes run one engine version",
    why="Protocols between versions differ in silence.",
    source="pip show, pip list across nodes",
    fix="install one version everywhere",
    per=Per.FLEET,
    kind="X",
)
def versions(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    packages: dict[str, Groups] = {}
    for host in nodes:
        for name, version in _engine_versions(host).items():
            seen = host.said("pip3", "show") or host.said("pip")
            packages.setdefault(name, Groups()).add(version, host.name, seen)
    if not packages:
        raise Unseen("pip show of the engines", nodes[0].why_not("pip", "pip3"))
    for name, found in packages.items():
        yield from found.odd_ones(
            Outcome.WARN,
            says=lambda version: f"{name} {version}",
            fix=lambda usual: f"pip install {name}=={usual}",
            persists=True,
        )


_SLICE_ERROR = re.compile(
    r"local_nic: ([^,\s)]+), peer_nic: ([^,\s)]+)[^\n]*?\)?: ([a-zA-Z][^\n]*)$", re.MULTILINE
)
_ANY_ERROR = re.compile(r"^[EF]\d{4,8}[^\n]*\] ([^\n]*)|^.*\b(?:ERROR|error)\b[^\n]*$", re.MULTILINE)


@check(
    "proc.first_error",
    title="The log's first error points to nobody",
    why="Later completions are flushed; the first ones tell which NIC, here or there, they have in common.",
    source="the target's log: local_nic, peer_nic and the first error that is no flush",
    fix="look at the NIC that the pairs have in common, not at every peer that the log names",
    per=Per.TARGET,
    kind="L",
)
def first_error(target: Target) -> Iterator[Finding]:
    log = target.log
    if log is None:
        raise Unseen(f"log of {target.name}", Sight.NOT_COLLECTED)
    path, text = log
    first: dict[tuple[str, str], str] = {}
    for match in _SLICE_ERROR.finditer(text):
        if "flush" not in match[3].lower():
            first.setdefault((match[1], match[2]), match[3].strip())
    if not first:
        return
    locals_ = Counter(local for local, _ in first)
    peers = Counter(re.sub(r":\d+@", "@", peer) for _, peer in first)
    pairs = len(first)
    local, local_count = locals_.most_common(1)[0]
    peer, peer_count = peers.most_common(1)[0]
    what = Counter(first.values()).most_common(1)[0][0]
    evidence = [target.host.at(path, f"{what}: " + "; ".join(f"{a} → {b}" for a, b in list(first)[:3]))]
    spread_peers = len({b for a, b in first if a == local})
    spread_locals = len({a for a, b in first if re.sub(r":\d+@", "@", b) == peer})
    if pairs > 1 and local_count >= CONCENTRATION * pairs and spread_peers > 1 and len(peers) > 1:
        yield warn(
            f"{local} of {target.name}",
            f"{local_count} of {pairs} failing pairs start at it: {what}",
            "no NIC in common",
            fix=f"kvops diagnose --only link,gid,ip,ctr: look at {local}",
            persists=None,
            evidence=evidence,
        )
    elif pairs > 1 and peer_count >= CONCENTRATION * pairs and spread_locals > 1:
        yield warn(
            f"{peer}",
            f"{peer_count} of {pairs} failing pairs of {target.name} end at it: {what}",
            "no NIC in common",
            fix=f"run kvops diagnose on that node: look at {peer.rpartition('@')[2]}",
            persists=None,
            evidence=evidence,
        )
    else:
        yield info(
            target.label,
            f"{pairs} failing pairs, first error: {what}",
            "no error",
            fix=f'kvops explain error "{what[:60]}"',
            evidence=evidence,
        )


def _started_s(target: Target) -> float | None:
    """When a process started, in seconds since the epoch; None if it cannot be told."""
    words = (attempt(lambda: target.text("stat")) or "").rpartition(")")[2].split()
    boot = re.search(r"^btime (\d{1,12})", target.host.peek("/proc/stat") or "", re.MULTILINE)
    if len(words) > 19 and words[19].isdigit() and boot:
        return int(boot[1]) + int(words[19]) / 100
    return None


@check(
    "proc.restart_stale",
    title="No peer uses keys from before a restart",
    why="Remote access errors: the peer's metadata name memory that is gone.",
    source="start of the process against the peers' logs",
    fix="restart or refresh the peers whose metadata are stale",
    per=Per.FLEET,
    kind="X",
)
def restart_stale(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    starts: dict[str, tuple[float, str]] = {}
    for host in nodes:
        for target in host.targets:
            started = _started_s(target)
            advertised = target.option("host", "local_hostname")
            if started is not None:
                for name in filter(
                    None, (advertised and advertised.partition(":")[0], *map(str, host.rdma_addresses))
                ):
                    starts[name] = max(starts.get(name, (0.0, "")), (started, f"{host.name} {target.name}"))
    if not starts:
        raise Unseen("start times of the targets (/proc/<pid>/stat)", Sight.NOT_COLLECTED)
    for host in nodes:
        for target in host.targets:
            own = _started_s(target)
            if own is None or target.log is None:
                continue
            blamed = {
                m[2].partition(":")[0]
                for m in _SLICE_ERROR.finditer(target.log[1])
                if "remote access" in m[3]
            }
            for name in blamed:
                later = starts.get(name)
                if later is not None and later[0] > own:
                    yield fail(
                        f"{host.name} {target.name}",
                        f"remote access errors at {later[1]}, which started {later[0] - own:.0f} s later",
                        "metadata of the running process",
                        fix=f"restart {target.name} on {host.name}, or let it refresh its metadata",
                        persists=None,
                        evidence=[host.at(target.log[0], "remote access error"), target.evidence("stat")],
                    )
