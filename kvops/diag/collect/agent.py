"""
Collects one host into a snapshot: the only code that reads a live machine, in one file.

It needs Python 3.8 and nothing else, so that it can be sent over SSH to hosts that have no kvops::

    python3 - '{"window_s": 10}' < agent.py

prints a gzipped tar in base64. Everything is bounded: bytes of a file, seconds of a command, number of
entries. It changes nothing, and keeps secrets out: of a process' environment only variables that steer
engines are kept.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import glob
import io
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SCHEMA = 1
FILE_BYTES_MAX = 1 << 20
LOG_BYTES_MAX = 1 << 20
COMMAND_BYTES_MAX = 8 << 20
COMMAND_TIMEOUT_S = 5.0
COMMANDS_AT_ONCE = 8
FILES_MAX = 100_000
NETDEVS_MAX = 512
PCI_MAX = 4096
GIDS_KEPT_EMPTY = 2  # empty slots kept after the last one in use
TARGETS_MAX = 32
NICS_MAX = 64  # functions and interfaces that are asked one by one
FDS_MAX = 4096
CPUS_MAX = 1024

_PPCC_INDEX = "local_port=1,pnat=0,lp_msb=0,algo_slot=0,algo_param_index=0"
_ENGINES = ("mooncake-transfer-engine", "lmcache", "sglang", "vllm")
_TARGET_WORDS = re.compile(
    r"mooncake_(client|master|store)|mooncake\.store|transfer_engine|kvops\S* serve (store|master)|\bsglang\b|\bvllm\b"
)
_KEPT_VARIABLES = re.compile(
    r"^(MC_|MOONCAKE_|NCCL_|UCX_|FI_|RDMAV_|IBV_|MLX5_|PYTORCH_(CUDA_)?ALLOC_CONF|(https?|no|all)_proxy$|"
    r"(HTTPS?|NO|ALL)_PROXY$|KUBERNETES_SERVICE_HOST$|CUDA_VISIBLE_DEVICES$)"
)
_SECRET_WORD = re.compile(r"(token|secret|passw|credential|api.?key|private)", re.IGNORECASE)

_PLAIN_FILES = (
    "/proc/cmdline",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/mounts",
    "/proc/cpuinfo",
    "/proc/stat",
    "/proc/uptime",
    "/proc/interrupts",
    "/proc/net/softnet_stat",
    "/proc/net/udp",
    "/proc/net/udp6",
    "/proc/net/netstat",
    "/proc/driver/nvidia/version",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/numa_balancing",
    "/proc/sys/vm/zone_reclaim_mode",
    "/proc/sys/vm/max_map_count",
    "/proc/sys/vm/nr_hugepages",
    "/proc/sys/net/ipv4/ip_local_port_range",
    "/proc/sys/net/ipv4/ip_local_reserved_ports",
    "/proc/sys/net/core/rmem_max",
    "/proc/sys/net/core/wmem_max",
    "/proc/sys/net/netfilter/nf_conntrack_count",
    "/proc/sys/net/netfilter/nf_conntrack_max",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/defrag",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/class/dmi/id/product_name",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/pids.max",
    "/sys/fs/cgroup/hugetlb.2MB.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/hugetlb/hugetlb.2MB.limit_in_bytes",
    "/etc/hosts",
    "/etc/sysctl.conf",
    "/etc/rc.local",
    "/etc/kubernetes/kubelet-config.yaml",
    "/opt/amazon/efa_installed_packages",
    "/var/lib/kubelet/config.yaml",
    "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
)
# Folders that are walked whole: (path, depth). What is not there afterwards is absent.
_FOLDERS = (
    ("/sys/devices/system/node", 3),
    ("/sys/devices/system/edac/mc", 1),
    ("/sys/devices/system/cpu/cpu0/cpuidle", 1),
    ("/sys/class/infiniband_verbs", 1),
    ("/sys/class/iommu", 0),
    ("/sys/kernel/config/rdma_cm", 3),
    ("/proc/net/bonding", 0),
    ("/proc/net/vlan", 0),
    ("/proc/sys/net/ipv4/neigh/default", 0),
    ("/etc/sysctl.d", 0),
    ("/etc/udev/rules.d", 0),
    ("/etc/systemd/system", 0),
    ("/etc/networkd-dispatcher", 2),
    ("/etc/libibverbs.d", 0),
)
# Folders of which only the names count: provider libraries.
_NAMES_ONLY = (
    "/usr/lib/x86_64-linux-gnu/libibverbs",
    "/usr/lib/aarch64-linux-gnu/libibverbs",
    "/usr/lib64/libibverbs",
)
_CGROUP_FILES = ("memory.max", "memory.events", "pids.max", "hugetlb.2MB.max")
_CGROUP_FILES_V1 = (
    ("memory", "memory.limit_in_bytes"),
    ("hugetlb", "hugetlb.2MB.limit_in_bytes"),
    ("pids", "pids.max"),
)
_MODULES = (
    "efa",
    "ib_core",
    "ib_uverbs",
    "mlx5_core",
    "mlx5_ib",
    "nv_peer_mem",
    "nvidia",
    "nvidia_peermem",
    "rdma_ucm",
    "ib_umad",
    "irdma",
)
_NETDEV_FILES = (
    "address",
    "carrier",
    "carrier_changes",
    "dev_port",
    "flags",
    "ifindex",
    "iflink",
    "mtu",
    "operstate",
    "phys_port_name",
    "speed",
    "type",
    "qos/trust",
    "ecn/roce_np/cnp_dscp",
    "ecn/roce_np/cnp_802p_prio",
)
_PCI = "/sys/bus/pci/devices"
_PCI_FILES = (
    "class",
    "vendor",
    "device",
    "numa_node",
    "local_cpulist",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "sriov_numvfs",
    "sriov_totalvfs",
    "resource",
    "aer_dev_correctable",
    "aer_dev_nonfatal",
    "aer_dev_fatal",
)


class Snapshot:
    """What was collected so far: files by name inside the snapshot, and its meta.json."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.realpath: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.scope: set[str] = set()
        self.left_out: set[str] = set()
        self.truncated: dict[str, int] = {}
        self.gone: list[str] = []
        self.commands: dict[str, dict[str, Any]] = {}
        self.rates: list[str] = []  # files that are read twice
        self.rate_commands: list[tuple[str, ...]] = []

    def read(self, path: str, *, rate: bool = False, limit: int = FILE_BYTES_MAX) -> bytes | None:
        """Read a file into the snapshot; what a read refuses is noted with its errno."""
        if len(self.files) >= FILES_MAX:
            return None
        self.scope.add(path)
        try:
            data = read_bytes(path, limit)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.EISDIR):
                self.errors[path] = errno.errorcode.get(error.errno or 0, "EIO")
            return None
        self.files["root" + path] = data
        if rate:
            self.rates.append(path)
        return data

    def walk(self, path: str, depth: int, *, rate: bool = False) -> None:
        """Read every plain file of a folder, ``depth`` levels down; links become data."""
        self.scope.add(path)
        try:
            names = sorted(os.listdir(path))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.errors[path] = errno.errorcode.get(error.errno or 0, "EIO")
            return
        for name in names:
            full = path + "/" + name
            try:
                mode = os.lstat(full).st_mode
            except OSError:
                continue
            if stat.S_ISLNK(mode):
                self.link(full)
            elif stat.S_ISREG(mode):
                self.read(full, rate=rate)
            elif stat.S_ISDIR(mode) and depth > 0 and name not in ("power", "subsystem"):
                self.walk(full, depth - 1, rate=rate)

    def link(self, path: str) -> str | None:
        """Note where a link points, as an absolute path."""
        try:
            target = os.path.realpath(path) if os.path.islink(path) else None
        except OSError:
            target = None
        if target is not None:
            self.links[path] = target
        return target


def read_bytes(path: str, limit: int) -> bytes:
    """At most ``limit`` bytes; a pipe or device never blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EISDIR, "no plain file", path)
        data = bytearray()
        while len(data) < limit:
            chunk = os.read(fd, min(limit - len(data), 1 << 16))
            if not chunk:
                break
            data += chunk
        return bytes(data)
    finally:
        os.close(fd)


def listed(path: str) -> list[str]:
    """Names in a folder, none if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def run(argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, Any]:
    """Run a program in a process group of its own, killed with all its children when the time is over."""
    if shutil.which(argv[0]) is None:
        return {"argv": list(argv), "missing": True}
    environment = dict(os.environ, LC_ALL="C", LANG="C", TERM="dumb")
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        return {"argv": list(argv), "missing": True}
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + timeout_s
    buffers = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    open_fds = list(buffers)
    late = False
    while open_fds:
        left = deadline - time.monotonic()
        ready = select.select(open_fds, [], [], left)[0] if left > 0 else []
        if not ready:
            late = True
            break
        for fd in ready:
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                open_fds.remove(fd)
            elif len(buffers[fd]) < COMMAND_BYTES_MAX:
                buffers[fd] += chunk
    if not late:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            late = True
    if late:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    out, err = bytes(buffers[process.stdout.fileno()]), bytes(buffers[process.stderr.fileno()])
    process.stdout.close()
    process.stderr.close()
    answer: dict[str, Any] = {"argv": list(argv), "rc": process.returncode, "out": out, "err": err}
    if late:
        answer["timed_out"] = True
    return answer


def slug(argv: Sequence[str]) -> str:
    """The file name of a command's output."""
    return re.sub(r"[^A-Za-z0-9._=-]", "-", "_".join(argv))[:120]


def run_all(snapshot: Snapshot, commands: Iterable[Sequence[str]], *, sample: int = 0) -> None:
    """Run commands side by side and keep what they print."""
    todo = list(dict.fromkeys(tuple(argv) for argv in commands))
    with ThreadPoolExecutor(COMMANDS_AT_ONCE) as pool:
        for answer in pool.map(run, todo):
            name = slug(answer["argv"]) + ".txt"
            out, err = answer.pop("out", b""), answer.pop("err", b"")
            if answer["argv"][0] == "kubectl" and "json" in answer["argv"]:
                out = without_secrets(out)
            if sample:
                if (
                    not answer.get("missing")
                    and answer.get("rc") == 0
                    and out != snapshot.files.get("cmd/" + name)
                ):
                    snapshot.files["cmd.t1/" + name] = out
                continue
            snapshot.commands[name] = answer
            if not answer.get("missing"):
                snapshot.files["cmd/" + name] = out
                if err:
                    snapshot.files["cmd/" + name[:-4] + ".err.txt"] = err[: 1 << 16]


def collect_pci(snapshot: Snapshot) -> tuple[list[str], list[str]]:
    """PCI functions; gives the addresses of RDMA-capable NICs and of GPUs."""
    base = _PCI
    snapshot.scope.add(base)
    nics: list[str] = []
    gpus: list[str] = []
    bridges: set[str] = set()
    names = listed(base)[:PCI_MAX]
    kinds: dict[str, tuple[str, str]] = {}
    for bdf in names:
        path = base + "/" + bdf
        values = [snapshot.read(path + "/" + name) or b"" for name in ("class", "vendor", "device")]
        kinds[bdf] = (
            values[0].decode("ascii", "replace").strip(),
            values[1].decode("ascii", "replace").strip(),
        )
        snapshot.link(path + "/driver")
        with contextlib.suppress(OSError):
            snapshot.realpath[path] = os.path.realpath(path)
    for bdf, (kind, vendor) in kinds.items():
        path = base + "/" + bdf
        network = kind.startswith(("0x0200", "0x0207"))
        has_rdma = os.path.isdir(path + "/infiniband")
        if not (network or has_rdma or (kind.startswith("0x03") and vendor in ("0x10de", "0x1002"))):
            continue
        (nics if network or has_rdma else gpus).append(bdf)
        for name in ("iommu_group", "physfn"):
            snapshot.link(path + "/" + name)
        group = snapshot.links.get(path + "/iommu_group")
        if group:
            snapshot.read(group + "/type")
        for folder in ("net", "infiniband"):
            for name in listed(path + "/" + folder):
                snapshot.links[path + "/" + folder + "/" + name] = "/sys/class/" + folder + "/" + name
        real = snapshot.realpath.get(path, "")
        bridges.update(part for part in real.split("/") if part in kinds and part != bdf)
    for bdf in [*nics, *gpus, *sorted(bridges)]:
        for name in _PCI_FILES[3:]:
            snapshot.read(base + "/" + bdf + "/" + name, rate=name.startswith("aer_"))
    return nics, gpus


def collect_rdma(snapshot: Snapshot) -> list[str]:
    """Everything under /sys/class/infiniband; gives the device names."""
    base = "/sys/class/infiniband"
    snapshot.scope.add(base)
    devices = listed(base)
    for device in devices:
        path = base + "/" + device
        for name in (
            "node_type",
            "node_guid",
            "node_desc",
            "sys_image_guid",
            "fw_ver",
            "board_id",
            "hca_type",
        ):
            snapshot.read(path + "/" + name)
        real = snapshot.link(path + "/device") or os.path.realpath(path + "/device")
        bdf = os.path.basename(real)
        if re.match(r"[0-9a-f]{4,8}:[0-9a-f]{2}:", bdf):
            snapshot.links[path + "/device"] = "/sys/bus/pci/devices/" + bdf
        elif os.path.isdir(real):
            snapshot.links.pop(path + "/device", None)
        snapshot.walk(path + "/hw_counters", 0, rate=True)
        snapshot.walk(path + "/tc", 1)
        for port in listed(path + "/ports"):
            here = path + "/ports/" + port
            for name in ("state", "phys_state", "rate", "link_layer", "lid", "sm_lid", "sm_sl", "cap_mask"):
                snapshot.read(here + "/" + name, rate=name in ("state", "phys_state"))
            snapshot.walk(here + "/counters", 0, rate=True)
            snapshot.walk(here + "/hw_counters", 0, rate=True)
            _collect_gids(snapshot, here)
            for name in listed(here + "/pkeys")[:128]:
                snapshot.read(here + "/pkeys/" + name)
    return devices


def _collect_gids(snapshot: Snapshot, port: str) -> None:
    indexes = sorted(int(name) for name in listed(port + "/gids") if name.isdigit())
    values: dict[int, bytes] = {}
    for index in indexes[:4096]:
        with contextlib.suppress(OSError):
            values[index] = read_bytes(port + "/gids/%d" % index, 256)
    used = [index for index, value in values.items() if value.strip(b"0:\n ")]
    last = (max(used) if used else -1) + GIDS_KEPT_EMPTY
    kept = [index for index in indexes if index <= last]
    if len(kept) < len(indexes):
        snapshot.truncated[port + "/gids"] = len(kept)
    for index in kept:
        snapshot.read(port + "/gids/%d" % index, rate=True)
        for kind in ("types", "ndevs"):
            snapshot.read(port + "/gid_attrs/%s/%d" % (kind, index), rate=index in used)


def collect_network(snapshot: Snapshot) -> list[str]:
    """Interfaces and their settings; gives their names."""
    base = "/sys/class/net"
    snapshot.scope.add(base)
    names = [name for name in listed(base) if os.path.isdir(base + "/" + name)][:NETDEVS_MAX]
    for name in names:
        path = base + "/" + name
        for file in _NETDEV_FILES:
            snapshot.read(path + "/" + file, rate=file in ("carrier_changes", "operstate"))
        for side in ("roce_np", "roce_rp"):
            snapshot.walk(path + "/ecn/" + side + "/enable", 0)
        target = snapshot.link(path + "/device")
        bdf = os.path.basename(target) if target else ""
        if re.match(r"[0-9a-f]{4,8}:[0-9a-f]{2}:", bdf):
            snapshot.links[path + "/device"] = "/sys/bus/pci/devices/" + bdf
        master = os.path.realpath(path + "/master")
        if os.path.islink(path + "/master"):
            snapshot.links[path + "/master"] = base + "/" + os.path.basename(master)
    for version, files in (
        ("ipv4", ("arp_ignore", "arp_announce", "arp_filter", "rp_filter")),
        ("ipv6", ("disable_ipv6",)),
    ):
        folder = "/proc/sys/net/" + version + "/conf"
        snapshot.scope.add(folder)
        for name in listed(folder)[: NETDEVS_MAX + 2]:
            for file in files:
                snapshot.read(folder + "/" + name + "/" + file)
    return names


def _masked(words: Sequence[str]) -> list[str]:
    """A command line without values that look like secrets."""
    kept: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide:
            kept.append("***")
            hide = False
        elif _SECRET_WORD.search(name) and word.startswith("-"):
            kept.append(name + "=***" if equals else word)
            hide = not equals
        else:
            kept.append(re.sub(r"://[^/@\s]+@", "://***@", word))
    return kept


def find_targets(pids: Sequence[int]) -> list[tuple[str, int]]:
    """Processes to be judged: those given, else stores and engines found by their command lines."""
    found: list[tuple[str, int]] = []
    for pid in pids or sorted(int(name) for name in listed("/proc") if name.isdigit()):
        try:
            words = read_bytes("/proc/%d/cmdline" % pid, 1 << 16).split(b"\0")
            name = read_bytes("/proc/%d/comm" % pid, 64).decode("utf-8", "replace").strip()
        except OSError:
            continue
        text = b" ".join(words).decode("utf-8", "replace")
        if pid != os.getpid() and (pids or (_TARGET_WORDS.search(text) and "diagnose" not in text)):
            found.append((name, pid))
    return found[:TARGETS_MAX]


def _means_rdma(pid: int) -> bool:
    try:
        return b"rdma" in read_bytes("/proc/%d/cmdline" % pid, 1 << 16)
    except OSError:
        return False


def collect_target(snapshot: Snapshot, name: str, pid: int) -> None:
    """One process: limits, memory placement, the variables that steer it, its log."""
    base = "/proc/%d" % pid
    for file in ("limits", "status", "cgroup", "maps", "numa_maps", "stat", "task/%d/children" % pid):
        snapshot.read(base + "/" + file)
    snapshot.read(base + "/io", rate=True)
    _collect_cgroup(snapshot, base)
    try:
        words = [
            w.decode("utf-8", "replace") for w in read_bytes(base + "/cmdline", 1 << 17).split(b"\0") if w
        ]
        snapshot.scope.add(base + "/cmdline")
        snapshot.files["root" + base + "/cmdline"] = "\0".join(_masked(words)).encode() + b"\0"
    except OSError as error:
        snapshot.errors[base + "/cmdline"] = errno.errorcode.get(error.errno or 0, "EIO")
    try:
        pairs = read_bytes(base + "/environ", 1 << 20).split(b"\0")
        kept = [p for p in pairs if _KEPT_VARIABLES.match(p.partition(b"=")[0].decode("utf-8", "replace"))]
        kept = [
            re.sub(rb"://[^/@\s]+@", b"://***@", p)
            for p in kept
            if not _SECRET_WORD.search(p.partition(b"=")[0].decode("ascii", "replace"))
        ]
        snapshot.scope.add(base + "/environ")
        snapshot.files["root" + base + "/environ"] = b"".join(p + b"\0" for p in kept)
    except OSError as error:
        snapshot.errors[base + "/environ"] = errno.errorcode.get(error.errno or 0, "EIO")
    logs = [f"/var/log/mooncake/{name}.log"]
    try:
        fds = os.listdir(base + "/fd")
        snapshot.scope.add(base + "/fd")
    except OSError as error:
        snapshot.errors[base + "/fd"] = errno.errorcode.get(error.errno or 0, "EIO")
        fds = []
    for fd in sorted(fds, key=lambda text: (len(text), text))[:FDS_MAX]:
        with contextlib.suppress(OSError):
            target = os.readlink(base + "/fd/" + fd)
            snapshot.links[base + "/fd/" + fd] = (
                target if target.startswith("/") else "/proc/none/" + target.replace("/", "_")
            )
            if fd in ("1", "2") and target.startswith("/") and os.path.isfile(target):
                logs.append(target)
    for path in dict.fromkeys(logs):
        _collect_log(snapshot, path)


def _collect_cgroup(snapshot: Snapshot, base: str) -> None:
    """The limits of a process' control group, and of those above it: the smallest one binds."""
    text = (snapshot.files.get("root" + base + "/cgroup") or b"").decode("utf-8", "replace")
    for line in text.splitlines()[:64]:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        parts = [part for part in group.split("/") if part and part != ".."][:16]
        for depth in range(len(parts) + 1):
            below = "".join("/" + part for part in parts[:depth])
            if controllers:
                for controller, name in _CGROUP_FILES_V1:
                    if controller in controllers.split(","):
                        snapshot.read(f"/sys/fs/cgroup/{controllers}{below}/{name}")
            else:
                for name in _CGROUP_FILES:
                    snapshot.read(f"/sys/fs/cgroup{below}/{name}", rate=name == "memory.events")


def _collect_log(snapshot: Snapshot, path: str) -> None:
    """The last part of a log."""
    snapshot.scope.add(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - LOG_BYTES_MAX, 0))
            snapshot.files["root" + path] = file.read(LOG_BYTES_MAX)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            snapshot.errors[path] = errno.errorcode.get(error.errno or 0, "EIO")


def _commands(
    devices: Sequence[str], netdevs: Sequence[str], nics: Sequence[str], gpus: Sequence[str]
) -> list[tuple[str, ...]]:
    """Programs that answer at once."""
    commands: list[tuple[str, ...]] = [
        ("ip", "addr", "show"),
        ("ip", "route", "show", "table", "all"),
        ("ip", "rule", "show"),
        ("ip", "neigh", "show"),
        ("ip", "-d", "link", "show"),
        ("tc", "-s", "qdisc", "show"),
        ("dmesg",),
        ("chronyc", "-c", "tracking"),
        ("timedatectl", "show", "-p", "NTPSynchronized"),
        ("systemd-detect-virt",),
        ("nft", "list", "ruleset"),
        ("iptables", "-S"),
        ("ip6tables", "-S"),
        ("lspci", "-D", "-vvv"),
    ]
    if devices:
        commands += [
            ("rdma", "link", "show"),
            ("rdma", "system", "show"),
            ("rdma", "resource", "show"),
            ("ibv_devices",),
            ("ibv_devinfo", "-v"),
            ("ldconfig", "-p"),
            ("ucx_info", "-d"),
            ("devlink", "health", "show"),
            ("lldpctl", "-f", "json"),
        ]
        commands += [("modinfo", module) for module in ("mlx5_core", "mlx5_ib", "ib_core")]
        for bdf in nics[:NICS_MAX]:
            commands += [("devlink", "dev", what, "show", "pci/" + bdf) for what in ("param", "eswitch")]
            commands.append(("devlink", "dev", "info", "pci/" + bdf))
        for name in netdevs[:NICS_MAX]:
            commands += [("ethtool", flag, name) for flag in ("-i", "-a", "-k", "--show-fec", "--show-eee")]
            commands += [
                ("mlnx_qos", "-i", name),
                ("dcb", "pfc", "show", "dev", name),
                ("dcb", "app", "show", "dev", name),
            ]
            commands += [
                ("lldptool", "-t", "-n", "-i", name, "-V", "PFC"),
                ("lldptool", "-t", "-i", name, "-V", "PFC"),
            ]
    elif netdevs:
        commands += [("ethtool", "-i", name) for name in netdevs[:16]]
    if any(device.startswith(("efa", "rdmap")) for device in devices):
        commands.append(("fi_info", "-p", "efa"))
    if gpus:
        commands += [
            ("nvidia-smi", "-q", "-d", "MEMORY"),
            ("nvidia-smi", "topo", "-m"),
            ("modinfo", "nvidia_peermem"),
        ]
    if shutil.which("ovs-vsctl"):
        commands += [("ovs-vsctl", "get", "Open_vSwitch", ".", "other_config"), ("ovs-vsctl", "show")]
    return commands


def _slow_commands(nics: Sequence[str], mellanox: Sequence[str], engines: bool) -> list[tuple[str, ...]]:
    """
    Programs that take a second or more: those that talk to the firmware of a NIC, to the cluster or read a
    package list. They run while the window passes. All of them only read.
    """
    commands: list[tuple[str, ...]] = []
    for bdf in [bdf for bdf in nics if bdf in mellanox][:NICS_MAX]:
        commands += [
            ("mlxconfig", "-d", bdf, "-e", "q"),
            ("mlxlink", "-d", bdf, "-c"),
            ("mstflint", "-d", bdf, "q"),
            ("mlxreg", "-d", bdf, "--reg_name", "PPCC", "--get", "--indexes", _PPCC_INDEX),
        ]
    if engines:
        commands.append(("pip3", "show", *_ENGINES))
    return commands + _kubectl()


def _kubectl() -> list[tuple[str, ...]]:
    """What the cluster says of this node, if this user may ask it; one entry that says so if kubectl is missing."""
    node = ("kubectl", "get", "node", platform.node(), "-o", "json", "--request-timeout=3s")
    if shutil.which("kubectl") is None:
        return [node]
    config = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    if not os.path.exists(config.split(":")[0]) and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return []  # without a cluster to ask kubectl tries localhost:8080: nothing that would be evidence
    mine = "--field-selector=spec.nodeName=" + platform.node()
    asked: list[tuple[str, ...]] = [("pods", "-A", mine)]
    asked += [(kind, "-A") for kind in ("net-attach-def", "sriovnetworknodestates", "networkpolicy", "ds")]
    return [node, *(("kubectl", "get", *words, "-o", "json", "--request-timeout=3s") for words in asked)]


def _follow_ups(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """Programs that are worth running because of what others said."""
    commands: list[tuple[str, ...]] = []
    said = snapshot.commands.get("dmesg.txt", {})
    if said.get("missing") or said.get("rc") != 0:
        commands.append(("journalctl", "-k", "-b", "--no-pager", "-o", "short-monotonic", "-n", "20000"))
    log = snapshot.files.get("cmd/dmesg.txt") or b""
    if b"unable to add gid" in log[-LOG_BYTES_MAX:]:
        commands.append(("rdma", "resource", "show", "qp"))  # names who holds the old entry
    for name, entry in snapshot.commands.items():
        if entry["argv"][:3] == ["kubectl", "get", "ds"]:
            for space, daemon in _device_plugins(snapshot.files.get("cmd/" + name) or b""):
                commands.append(("kubectl", "logs", "-n", space, "ds/" + daemon, "--tail=100"))
    return commands


def _device_plugins(data: bytes) -> list[tuple[str, str]]:
    """(namespace, name) of the DaemonSets that hand out RDMA devices."""
    try:
        items = json.loads(data).get("items", [])
        names = [(str(i["metadata"]["namespace"]), str(i["metadata"]["name"])) for i in items]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return []
    return [pair for pair in names if re.search(r"rdma-shared|sriov.*device-plugin|efa.*plugin", pair[1])][:4]


def without_secrets(data: bytes) -> bytes:
    """
    Kubernetes objects without what may be secret: values of variables (but those that steer engines), words of
    command lines that look it, and the copies that kubectl keeps in annotations. What is no JSON becomes empty.
    """

    def cleaned(value: Any, depth: int) -> Any:
        if depth > 64:
            return None
        if isinstance(value, list):
            return [cleaned(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        kept: dict[str, Any] = {}
        for key, item in value.items():
            if key == "env" and isinstance(item, list):
                kept[key] = [e for e in item if isinstance(e, dict) and _steers(str(e.get("name")))]
            elif key in ("args", "command") and isinstance(item, list):
                kept[key] = _masked([str(word) for word in item])
            elif key not in ("managedFields", "kubectl.kubernetes.io/last-applied-configuration"):
                kept[key] = cleaned(item, depth + 1)
        return kept

    try:
        return json.dumps(cleaned(json.loads(data), 0)).encode()
    except (ValueError, RecursionError):
        return b""


def _steers(name: str) -> bool:
    return bool(_KEPT_VARIABLES.match(name)) and not _SECRET_WORD.search(name)


def _role() -> str:
    """host, container or vm, as far as a process can tell."""
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return "container"
    with contextlib.suppress(OSError):
        if b"container=" in read_bytes("/proc/1/environ", 1 << 16):
            return "container"
        if re.search(rb"kubepods|docker|containerd|libpod", read_bytes("/proc/1/cgroup", 1 << 16)):
            return "container"
    with contextlib.suppress(OSError):
        if re.search(rb"^flags\s*:.*\bhypervisor\b", read_bytes("/proc/cpuinfo", 1 << 16), re.MULTILINE):
            return "vm"
    return "host"


def _system() -> str:
    with contextlib.suppress(OSError):
        match = re.search(rb'^PRETTY_NAME="?([^"\n]*)', read_bytes("/etc/os-release", 1 << 14), re.MULTILINE)
        if match:
            return match.group(1).decode("utf-8", "replace")
    return platform.system()


PROBES = ("icmp", "mtu", "tcp", "arp", "cloud")
PROBE_PAIRS_MAX = 256
MTU_LADDER = (512, 1024, 2048, 4096)  # path MTUs; 104 bytes of headers make 4200 of the last
LADDER_HEADERS = 104


def probe_commands(
    probes: Sequence[str], wires: Sequence[str], peers: Sequence[str]
) -> list[tuple[str, ...]]:
    """Pings between own interfaces and peers' addresses: one packet each, of the usual size or a ladder of sizes."""
    commands: list[tuple[str, ...]] = []
    for netdev in wires:
        for peer in peers:
            if "icmp" in probes or "mtu" in probes:
                commands.append(("ping", "-c", "1", "-W", "1", "-I", netdev, peer))
            if "mtu" in probes:
                sizes = [str(mtu + LADDER_HEADERS - 28) for mtu in MTU_LADDER]
                commands += [
                    ("ping", "-M", "do", "-c", "1", "-W", "1", "-s", s, "-I", netdev, peer) for s in sizes
                ]
    return commands[:PROBE_PAIRS_MAX]


def arp_commands(addresses: bytes, wires: Sequence[str]) -> list[tuple[str, ...]]:
    """A duplicate address check of each own IPv4 address: two broadcasts an address, nobody's table changes."""
    commands: list[tuple[str, ...]] = []
    pattern = rb"^ +inet (\d+\.\d+\.\d+\.\d+)/\d+ .*?(\S+)$"
    for address, netdev in re.findall(pattern, addresses, re.MULTILINE):
        name = netdev.decode("utf-8", "replace")
        if name in wires:
            commands.append(("arping", "-D", "-c", "2", "-w", "3", "-I", name, address.decode("ascii")))
    return commands[:NICS_MAX]


def probe_tcp(addresses: Sequence[str], timeout_s: float = 2.0) -> list[dict[str, Any]]:
    """Connect to each host:port once, and close."""
    records = []
    for address in addresses[:64]:
        host, _, port = address.rpartition(":")
        record: dict[str, Any] = {"probe": "tcp_control", "address": address, "ok": False}
        began = time.monotonic()
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
                record["ok"] = True
        except (OSError, ValueError) as error:
            record["error"] = str(error)
        record["seconds"] = round(time.monotonic() - began, 4)
        records.append(record)
    return records


def collect(
    window_s: float = 10.0,
    pids: Sequence[int] = (),
    probes: Sequence[str] = (),
    peers: Sequence[str] = (),
    tcp: Sequence[str] = (),
) -> dict[str, bytes]:
    """
    Collect this host.

    Args:
        window_s: Seconds between the two samples of counters; 0 takes one sample.
        pids: Processes to judge; found by their command lines if none are given.
        probes: Of PROBES; they send a few packets, and run only when asked for.
        peers: Addresses to ping from each interface with a wire.
        tcp: ``host:port`` to connect to.

    Returns:
        File name inside the snapshot → content, ``meta.json`` among them.
    """
    snapshot = Snapshot()
    for path in _PLAIN_FILES:
        snapshot.read(
            path,
            rate=path
            in ("/proc/stat", "/proc/net/softnet_stat", "/proc/net/netstat", "/sys/fs/cgroup/memory.events"),
        )
    for path, depth in _FOLDERS:
        snapshot.walk(path, depth, rate="edac" in path)
    nics, gpus = collect_pci(snapshot)
    devices = collect_rdma(snapshot)
    netdevs = collect_network(snapshot)
    for module in _MODULES:
        if os.path.isdir("/sys/module/" + module):
            for name in ("version", "srcversion", "initstate"):
                snapshot.read(f"/sys/module/{module}/{name}")
    snapshot.scope.add("/sys/module")
    for cpu in sorted(glob.glob("/sys/devices/system/cpu/cpu[0-9]*/cpufreq"))[:CPUS_MAX]:
        snapshot.read(cpu + "/scaling_governor")
        snapshot.read(cpu + "/scaling_driver")
    snapshot.scope.add("/sys/devices/system/cpu")
    for line in (snapshot.files.get("root/proc/interrupts") or b"").decode("utf-8", "replace").splitlines():
        if "mlx5_comp" in line or "bnxt" in line:
            number = line.split(":")[0].strip()
            snapshot.read(f"/proc/irq/{number}/effective_affinity_list")
    _collect_log(snapshot, "/var/log/openvswitch/ovs-vswitchd.log")
    kubelet = "/var/lib/kubelet/device-plugins"
    if os.path.isdir(kubelet):
        snapshot.scope.add(kubelet)
        for name in listed(kubelet):
            if name.endswith(".sock"):
                snapshot.files[f"root{kubelet}/{name}"] = b""
    elif "/var/lib/kubelet/device-plugins" not in snapshot.errors:
        snapshot.scope.add(kubelet)
    targets = find_targets(pids)
    if not devices and not pids:
        # Without RDMA here, only a process that means to use it is worth judging.
        targets = [target for target in targets if _means_rdma(target[1])]
    for name, pid in targets:
        collect_target(snapshot, name, pid)
    snapshot.scope.add("/dev/infiniband")
    nodes = _device_nodes(snapshot)
    wires = [name for name in netdevs if (f"/sys/class/net/{name}/device") in snapshot.links]
    for folder in _NAMES_ONLY:
        snapshot.scope.add(folder)
        snapshot.files.update({f"root{folder}/{name}": b"" for name in listed(folder)[:64]})
    run_all(snapshot, _commands(devices, wires if devices else netdevs, nics, gpus))
    run_all(snapshot, _follow_ups(snapshot))
    snapshot.rate_commands = [("ethtool", "-S", name) for name in wires[:64]] if devices else []
    snapshot.rate_commands.append(("nstat", "-az", "TcpExtIPReversePathFilter"))
    if shutil.which("ovs-appctl"):
        snapshot.rate_commands += [("ovs-appctl", "dpctl/dump-flows", "-m"), ("ovs-appctl", "dpctl/show")]
    run_all(snapshot, snapshot.rate_commands)
    if probes and peers:
        run_all(snapshot, probe_commands(probes, wires or netdevs, peers))
    if "arp" in probes:
        run_all(snapshot, arp_commands(snapshot.files.get("cmd/ip_addr_show.txt") or b"", wires or netdevs))
    if "cloud" in probes:
        run_all(snapshot, [("aws", "ec2", "describe-security-groups", "--output", "json")])
    records = probe_tcp(tcp) if "tcp" in probes else []
    samples: list[dict[str, Any]] = [{"id": "t0", "t": time.monotonic()}]
    for path in snapshot.rates:  # read again, close together: the first reading may be seconds old by now
        with contextlib.suppress(OSError):
            snapshot.files["root" + path] = read_bytes(path, FILE_BYTES_MAX)
    mellanox = [
        bdf for bdf in nics if snapshot.files.get(f"root{_PCI}/{bdf}/vendor", b"").strip() == b"0x15b3"
    ]
    begun = time.monotonic()
    run_all(snapshot, _slow_commands(nics if devices else (), mellanox, bool(targets)))
    run_all(snapshot, [argv for argv in _follow_ups(snapshot) if argv[0] == "kubectl"])
    if window_s > 0:
        time.sleep(max(window_s - (time.monotonic() - begun), 0.0))
        samples.append({"id": "t1", "t": time.monotonic()})
        _second_sample(snapshot, devices)
    samples = [{"id": s["id"], "t": round(float(s["t"]) - float(samples[0]["t"]), 3)} for s in samples]
    meta = {
        "schema": SCHEMA,
        "kind": "node",
        "node": platform.node(),
        "role": _role(),
        "os": _system(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "uid": os.geteuid(),
        "collected_unix_s": round(time.time(), 3),
        "samples": samples,
        "scope": sorted(snapshot.scope),
        "not_collected": sorted(snapshot.left_out),
        "truncated": snapshot.truncated,
        "links": snapshot.links,
        "realpath": snapshot.realpath,
        "errors": snapshot.errors,
        "dev": nodes,
        "cmd": snapshot.commands,
        "targets": [{"name": name, "pid": pid} for name, pid in targets],
        "gone": snapshot.gone,
        "probes": records,
    }
    snapshot.files["meta.json"] = json.dumps(meta, indent=1, sort_keys=True).encode()
    return snapshot.files


def _device_nodes(snapshot: Snapshot) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    for name in listed("/dev/infiniband"):
        path = "/dev/infiniband/" + name
        try:
            info = os.stat(path)
        except OSError:
            continue
        if not stat.S_ISCHR(info.st_mode):
            continue
        nodes.append(
            {
                "path": path,
                "type": "c",
                "major": os.major(info.st_rdev),
                "minor": os.minor(info.st_rdev),
                "mode": stat.filemode(info.st_mode),
            }
        )
        if name.startswith("uverbs") and not os.access(path, os.R_OK | os.W_OK):
            snapshot.errors[path] = "EACCES"
    return nodes


def _second_sample(snapshot: Snapshot, devices: Sequence[str]) -> None:
    for path in snapshot.rates:
        try:
            data = read_bytes(path, FILE_BYTES_MAX)
        except OSError:
            if not os.path.exists(path):
                snapshot.gone.append(path)
            continue
        if data != snapshot.files.get("root" + path):
            snapshot.files["root.t1" + path] = data
    for device in devices:
        if not os.path.exists("/sys/class/infiniband/" + device):
            snapshot.gone.append("/sys/class/infiniband/" + device)
    run_all(snapshot, snapshot.rate_commands, sample=1)


def pack(files: dict[str, bytes]) -> str:
    """A snapshot as text: gzipped tar in base64."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def main() -> None:
    """Collect as asked for by the first argument (JSON), and print the snapshot."""
    wanted = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    files = collect(
        window_s=float(wanted.get("window_s", 10.0)),
        pids=[int(pid) for pid in wanted.get("pids", [])],
        **{name: [str(item) for item in wanted.get(name, [])] for name in ("probes", "peers", "tcp")},
    )
    sys.stdout.write("KVOPS-SNAPSHOT " + pack(files) + "\n")


if __name__ == "__main__":
    main()
