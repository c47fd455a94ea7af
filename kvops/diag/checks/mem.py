"""Memory: locking, registration, huge pages, limits of containers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.target import Target
from kvops.diag.model import Evidence, Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import misc, proc, rdma, sysfs
from kvops.diag.registry import Per, check
from kvops.host import Sight

CAP_IPC_LOCK = 14  # include/uapi/linux/capability.h [K]
LOCKED_BYTES_HOPELESS = 64 << 20  # even a completion queue does not fit under it beside a small segment [C26]
MR_BYTES_DEFAULT = 1 << 40  # MC_MAX_MR_SIZE [M]
MR_SHARE_WARN = 0.9
TERABYTE = 1 << 40
MAP_COUNT_DEFAULT = 65530  # [K]
MAP_COUNT_WANTED = 16777216  # [M]
MAP_COUNT_POOL_BYTES = 256 << 30  # pools from this size on come near the default [C27]
SHM_CONTAINER_DEFAULT = 64 << 20
SHM = "/dev/shm"  # noqa: S108 - the mount itself is judged, no file is made in it
CGROUP_HEADROOM = 1.1  # [K]
CE_PER_HOUR_MAX = 10  # [E]
CGROUP_V1_UNLIMITED = 1 << 62
PAGE = 4096
OLD_S = 24 * 3600.0  # log lines older than this are history


def gib(size: int) -> str:
    """A size for people."""
    return f"{size / (1 << 30):.4g} GiB" if size >= 1 << 29 else f"{size / (1 << 20):.4g} MiB"


def _needs_rdma(target: Target) -> None:
    if target.protocol == "tcp":
        raise Skip(f"{target.name} uses TCP")


@check(
    "mem.memlock_limit",
    title="The store may lock its segment",
    why="Registration pins memory: above the limit ibv_reg_mr, even ibv_create_cq, fails with ENOMEM.",
    source="/proc/<pid>/limits 'Max locked memory', /proc/<pid>/status CapEff bit 14 (CAP_IPC_LOCK)",
    fix="LimitMEMLOCK=infinity in its unit; in containers --ulimit memlock=-1 or the capability IPC_LOCK",
    undo="take the line out again",
    per=Per.TARGET,
)
def memlock_limit(target: Target) -> Iterator[Finding]:
    _needs_rdma(target)
    soft = target.soft_limit("Max locked memory")
    if soft >= proc.UNLIMITED or target.has_capability(CAP_IPC_LOCK):
        return
    need = target.segment_bytes
    evidence = [
        target.evidence("limits", f"Max locked memory {soft}"),
        target.evidence("status", f"CapEff: {target.status.get('CapEff')} (bit {CAP_IPC_LOCK} clear)"),
    ]
    if soft < (need or 0) or (need is None and soft <= LOCKED_BYTES_HOPELESS):
        yield fail(
            target.label,
            f"may lock {gib(soft)}, without CAP_IPC_LOCK",
            f"{gib(need)}, its segment" if need else "unlimited",
            fix="systemctl edit <unit>: LimitMEMLOCK=infinity; container: --ulimit memlock=-1 --cap-add "
            "IPC_LOCK",
            persists=True,
            evidence=evidence,
        )
    else:
        yield info(
            target.label,
            f"locking is limited to {gib(soft)}: enough for its segment",
            "unlimited",
            evidence=evidence,
        )


@check(
    "mem.pin_budget",
    title="The segment may be pinned once a NIC",
    why="The kernel accounts each registration per device: 80 GiB on eight NICs needs 640 GiB of limit.",
    source="segment × NICs against /proc/<pid>/limits; EFA: max_mr_size × page size ÷ 4 KiB against all "
    "segments",
    fix="LimitMEMLOCK=infinity, or register with the NICs of its own node only; EFA: huge pages",
    undo="take the line out again",
    per=Per.TARGET,
)
def pin_budget(target: Target) -> Iterator[Finding]:
    _needs_rdma(target)
    host = target.host
    need = target.segment_bytes
    if need is None:
        raise Skip(f"{target.name}: the size of its segment is unknown")
    devices = {port.device.name: port.device for port in target.ports}
    soft = target.soft_limit("Max locked memory")
    total = need * max(len(devices), 1)
    if soft < proc.UNLIMITED and need <= soft < total and not target.has_capability(CAP_IPC_LOCK):
        yield fail(
            target.label,
            f"{gib(need)} on {len(devices)} NICs = {gib(total)} to account, limit {gib(soft)}",
            f"at least {gib(total)}",
            fix="systemctl edit <unit>: LimitMEMLOCK=infinity; or --device_names of its own node only",
            persists=True,
            evidence=[target.evidence("limits", f"Max locked memory {soft}"), target.evidence("cmdline")],
        )
    for name, device in devices.items():
        if device.kind != "efa":
            continue
        info_ = (attempt(lambda: host.devinfo) or {}).get(name)
        budget = info_.number("max_mr_size") if info_ is not None else None
        if budget is None:
            continue
        page = (2 << 20) if target.wants_huge_pages else PAGE
        users = [t for t in host.targets if any(port.device.name == name for port in t.ports)]
        pinned = sum(t.segment_bytes or 0 for t in users)
        if pinned > budget * (page // PAGE):
            yield fail(
                f"{name}",
                f"{gib(pinned)} to register by {len(users)} processes",
                f"at most {gib(budget * (page // PAGE))}: a budget of pages for the whole device",
                fix="use 2 MiB pages (MC_STORE_USE_HUGEPAGE=1), or fewer processes a NIC",
                persists=True,
                evidence=[host.devinfo_evidence(name), target.evidence("cmdline")],
            )


@check(
    "mem.max_mr_size",
    title="A registration fits the device",
    why="A region above max_mr_size is refused (EIO, EINVAL) or cut, which the peer meets as a remote "
    "access error.",
    source="ibv_devinfo -v max_mr_size; dmesg 'Out of mr size'",
    fix="set MC_MAX_MR_SIZE to the device's max_mr_size",
    undo="unset MC_MAX_MR_SIZE",
    per=Per.TARGET,
)
def max_mr_size(target: Target) -> Iterator[Finding]:
    _needs_rdma(target)
    host = target.host
    logged = attempt(lambda: host.log_lines(r"[Oo]ut of mr size")) or []
    for line in logged[:1]:
        yield fail(
            target.label,
            line.text,
            "regions that fit the device",
            fix="set MC_MAX_MR_SIZE to max_mr_size",
            persists=True,
            evidence=[host.log_evidence(line)],
        )
    if logged:
        return
    table = host.devinfo
    if target.segment_bytes is None:
        raise Skip(f"{target.name}: the size of its segment is unknown")
    stated = (attempt(lambda: target.environ) or {}).get("MC_MAX_MR_SIZE", "")
    chunk = int(stated) if re.fullmatch(r"[1-9]\d{0,18}", stated, re.ASCII) else MR_BYTES_DEFAULT
    region = min(target.segment_bytes, chunk)
    judged = 0
    for device in {port.device.name: port.device for port in target.ports}.values():
        size = table[device.name].number("max_mr_size") if device.name in table else None
        if size is None or device.kind == "efa":  # EFA's is a budget of pages: mem.pin_budget
            continue
        judged += 1
        if region > size:
            yield fail(
                f"{device.name} of {target.name}",
                f"regions of {gib(region)}, max_mr_size {gib(size)}",
                f"at most {gib(size)}",
                fix=f"export MC_MAX_MR_SIZE={size} for the process and restart it",
                persists=True,
                evidence=[host.devinfo_evidence(device.name), target.evidence("cmdline")],
            )
    if not judged:
        raise Unseen("max_mr_size (ibv_devinfo -v)", Sight.NOT_COLLECTED)


_REGISTER = re.compile(
    r"(?:[Ff]ailed to register memory|ibv_reg_mr|register_?[Mm]emory)[^\n]*?(0x[0-9a-fA-F]{4,16})[^\n]*",
    re.ASCII,
)


@check(
    "mem.readonly_mapping",
    title="What is registered is mapped writable",
    why="Registering a read-only mapping for remote writes fails with EFAULT [14] on host memory.",
    source="/proc/<pid>/maps permissions of the range in the error",
    fix="map it writable, or register with remote-read only where kernel and provider allow it",
    per=Per.TARGET,
    kind="S/L",
)
def readonly_mapping(target: Target) -> Iterator[Finding]:
    log = target.log
    if log is None:
        raise Unseen(f"log of {target.name}", Sight.NOT_COLLECTED)
    path, text = log
    hits = [
        m for m in _REGISTER.finditer(text) if re.search(r"Bad address|EFAULT|\[14\]|errno[ =:]*14", m[0])
    ]
    if not hits:
        return
    regions = proc.parse_maps(target.text("maps"))
    for hit in hits[:4]:
        address = int(hit[1], 16)
        region = next((r for r in regions if r.start <= address < r.end), None)
        if region is not None and "w" not in region.permissions and "nvidia" not in region.name:
            yield fail(
                f"{target.name} {hit[1]}",
                f"mapped {region.permissions} {region.name}".strip(),
                "rw: registration for remote writes needs a writable mapping",
                fix="map the segment writable in the registering process, or copy through a buffer of its "
                "own",
                persists=True,
                evidence=[
                    target.evidence(
                        "maps", f"{region.start:x}-{region.end:x} {region.permissions} {region.name}"
                    ),
                    target.host.at(path, hit[0]),
                ],
            )
            return


@check(
    "mem.mkey_resources",
    title="The NIC has memory keys left",
    why="Keys leaked by killed processes use up the NIC: registration fails with EAGAIN whatever the "
    "limits say.",
    source="dmesg 'CREATE_MKEY … no resources(0xf)'; rdma resource show mr against max_mr",
    fix="stop the processes that hold them, reload the driver or reboot; register with bigger pages",
    kind="S/L",
    root="p",
)
def mkey_resources(host: HostFacts) -> Iterator[Finding]:
    lines = attempt(lambda: host.log_lines(r"CREATE_MKEY\b.*no resources\s*\(0xf\)"))
    for line in (lines or [])[-1:]:
        assert lines is not None
        yield fail(
            _bdf(line.text) or "NIC",
            f"CREATE_MKEY refused {len(lines)} times since boot: no resources",
            "no refusal",
            fix="kill processes that leak registrations, then: modprobe -r mlx5_ib mlx5_core && modprobe "
            "mlx5_ib (or reboot)",
            persists=False,
            evidence=[host.log_evidence(line), host.said("rdma", "resource", "show")],
        )
    resources = attempt(lambda: host.resources)
    if lines is None and resources is None:
        host.log  # noqa: B018 - raises the reason
    if lines:
        return
    infos = attempt(lambda: host.devinfo) or {}
    for device in attempt(lambda: host.devices_in_scope) or ():
        most = infos[device.name].number("max_mr") if device.name in infos else None
        used = (resources or {}).get(device.name, {}).get("mr")
        if most and used is not None and used > MR_SHARE_WARN * most:
            yield warn(
                device.name,
                f"{used} of {most} memory regions in use",
                f"at most {MR_SHARE_WARN:.0%}",
                fix="find the leak: rdma resource show mr",
                persists=True,
                evidence=[host.said("rdma", "resource", "show"), host.devinfo_evidence(device.name)],
            )


def _bdf(text: str) -> str | None:
    match = re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", text)
    return match[0] if match else None


@check(
    "mem.registration_page_size",
    title="A large pool lies on large pages",
    why="A terabyte of 4 KiB pages takes minutes to register and misses the NIC's translation cache.",
    source="/proc/<pid>/smaps KernelPageSize, numa_maps kernelpagesize_kB, status HugetlbPages",
    fix="MC_STORE_USE_HUGEPAGE=1 with 2 MiB or 1 GiB pages reserved",
    undo="unset it",
    per=Per.TARGET,
)
def registration_page_size(target: Target) -> Iterator[Finding]:
    if (target.segment_bytes or 0) < TERABYTE:
        raise Skip(f"{target.name}: its pool is below 1 TiB")
    huge = attempt(lambda: proc.parse_kb(target.status.get("HugetlbPages", "0 kB")))
    maps = attempt(lambda: proc.parse_numa_maps(target.text("numa_maps")))
    if maps:
        small = sum(m.total_bytes for m in maps if m.page_bytes == PAGE)
    elif huge is not None:
        small = 0 if huge or target.wants_huge_pages else target.segment_bytes or 0
    else:
        raise Unseen(f"{target.path}/smaps", Sight.NOT_COLLECTED)
    anon = sum(
        int(n) << 10
        for n in re.findall(r"AnonHugePages:\s+(\d{1,15}) kB", attempt(lambda: target.text("smaps")) or "")
    )
    if small - anon >= TERABYTE:
        yield warn(
            target.label,
            f"{gib(small)} on 4 KiB pages",
            "2 MiB or 1 GiB pages",
            fix="reserve huge pages and start it with MC_STORE_USE_HUGEPAGE=1",
            persists=True,
            evidence=[target.evidence("numa_maps" if maps else "status")],
        )


@check(
    "mem.hugepages",
    title="There are huge pages for those who ask",
    why="mmap fails with ENOMEM, or the engine falls back to small pages.",
    source="/proc/meminfo HugePages_{Total,Free,Rsvd}, Hugepagesize",
    fix="sysctl -w vm.nr_hugepages=N, and hugepages=N on the boot command line",
    undo="sysctl -w vm.nr_hugepages=<former number>",
)
def hugepages(host: HostFacts) -> Iterator[Finding]:
    users = [target for target in host.targets if target.wants_huge_pages]
    if not users:
        raise Skip("nobody asks for huge pages")
    memory = host.memory
    if "HugePages_Free" not in memory:
        raise Unseen("/proc/meminfo: HugePages_Free", Sight.ABSENT)
    size = memory.get("Hugepagesize", 2 << 20)
    free = (memory["HugePages_Free"] - memory.get("HugePages_Rsvd", 0)) * size
    need = 0
    for target in users:
        have = attempt(lambda: proc.parse_kb(target.status.get("HugetlbPages", "0 kB"))) or 0
        need += max((target.segment_bytes or 0) - have, 0)
    if need > free:
        count = memory.get("HugePages_Total", 0) + -(-(need - free) // size)
        yield fail(
            ", ".join(target.name for target in users),
            f"{gib(max(free, 0))} of huge pages free",
            f"{gib(need)} still to be mapped",
            fix=f"sysctl -w vm.nr_hugepages={count}",
            persists=False,
            evidence=[
                host.at("/proc/meminfo", f"HugePages_Free: {memory['HugePages_Free']}"),
                users[0].evidence("environ"),
            ],
        )


@check(
    "mem.hugepage_fragmented",
    title="The kernel found all huge pages it was asked for",
    why="On fragmented memory late allocation gives fewer than asked, without an error.",
    source="vm.nr_hugepages in /etc/sysctl.conf and /etc/sysctl.d, hugepages= in /proc/cmdline, "
    "HugePages_Total",
    fix="reserve them at boot: hugepages=N on the command line",
)
def hugepage_fragmented(host: HostFacts) -> Iterator[Finding]:
    wanted: dict[str, int] = {}
    names = attempt(lambda: host.ls("/etc/sysctl.d")) or ()
    for path in ["/etc/sysctl.conf", *(f"/etc/sysctl.d/{name}" for name in names if name.endswith(".conf"))]:
        for match in re.finditer(
            r"^\s*vm[./]nr_hugepages\s*=\s*(\d{1,12})\s*$", host.peek(path) or "", re.MULTILINE | re.ASCII
        ):
            wanted[path] = int(match[1])
    for word in attempt(lambda: host.kernel_words) or ():
        match_ = re.fullmatch(r"hugepages=(\d{1,12})", word, re.ASCII)
        if match_:
            wanted["/proc/cmdline"] = int(match_[1])
    if not wanted:
        raise Skip("no huge pages were asked for")
    source = "/proc/meminfo"
    total = (attempt(lambda: host.memory) or {}).get("HugePages_Total")
    if total is None:
        source = "/proc/sys/vm/nr_hugepages"
        total = host.number(source)
    path, most = max(wanted.items(), key=lambda item: item[1])
    if total < most:
        yield warn(
            "huge pages",
            f"{total} allocated",
            f"{most}, asked for in {path}",
            fix=f"put hugepages={most} on the boot command line and reboot",
            persists=True,
            evidence=[host.at(path), host.at(source, f"{total} huge pages")],
        )


@check(
    "mem.thp",
    title="Transparent huge pages do not compact on fault",
    why="Direct compaction stalls the thread that touches memory.",
    source="/sys/kernel/mm/transparent_hugepage/{enabled,defrag}",
    fix="echo madvise > /sys/kernel/mm/transparent_hugepage/defrag",
    undo="echo always > /sys/kernel/mm/transparent_hugepage/defrag",
)
def thp(host: HostFacts) -> Iterator[Finding]:
    folder = "/sys/kernel/mm/transparent_hugepage"
    if "[always]" in host.text(f"{folder}/enabled") and "[always]" in (host.peek(f"{folder}/defrag") or ""):
        yield info(
            "transparent huge pages",
            "enabled always, defrag always",
            "madvise",
            fix=f"echo madvise > {folder}/defrag",
            persists=False,
            evidence=[host.at(f"{folder}/defrag")],
        )


@check(
    "mem.max_map_count",
    title="A large pool may have many mappings",
    why="A terabyte pool, or one with many buffers, runs out of mappings: mmap fails with ENOMEM.",
    source="/proc/sys/vm/max_map_count",
    fix="sysctl -w vm.max_map_count=16777216, and in /etc/sysctl.d",
    undo="sysctl -w vm.max_map_count=65530",
)
def max_map_count(host: HostFacts) -> Iterator[Finding]:
    count = host.number("/proc/sys/vm/max_map_count")
    pool = sum(target.segment_bytes or 0 for target in host.targets)
    crowded = [
        target
        for target in host.targets
        if (attempt(lambda: target.text("maps").count("\n")) or 0) > count // 2
    ]
    if count <= MAP_COUNT_DEFAULT and (pool >= MAP_COUNT_POOL_BYTES or crowded):
        yield warn(
            "vm.max_map_count",
            f"{count}, with a pool of {gib(pool)}",
            f"{MAP_COUNT_WANTED}",
            fix=f"sysctl -w vm.max_map_count={MAP_COUNT_WANTED}",
            persists=False,
            evidence=[host.at("/proc/sys/vm/max_map_count")],
        )


@check(
    "mem.shm_size",
    title="Shared memory has room for the shared segment",
    why="Writing beyond a full /dev/shm kills the process with a bus error.",
    source="/proc/mounts: size= of /dev/shm",
    fix="--shm-size for the container, or an emptyDir with medium: Memory",
    undo="start the container with the former size",
)
def shm_size(host: HostFacts) -> Iterator[Finding]:
    mounts = [m for m in proc.parse_mounts(host.text("/proc/mounts")) if m.path == SHM]
    if not mounts:
        raise Skip(f"no {SHM} is mounted")
    memory = (attempt(lambda: host.memory) or {}).get("MemTotal")
    size = proc.parse_mount_size(mounts[-1].options, memory)
    if size is None:
        raise Unseen(f"size of {SHM}", Sight.NOT_COLLECTED)
    evidence = [host.at("/proc/mounts", f"{SHM} size={size}")]
    need = host.expect_int("shm_bytes") or sum(_shared_bytes(target) for target in host.targets)
    if need > size:
        yield fail(
            SHM,
            f"{gib(size)}",
            f"{gib(need)}: the shared segment",
            fix=f"mount -o remount,size={need} /dev/shm; container: --shm-size={need}",
            persists=False,
            evidence=evidence,
        )
    elif size <= SHM_CONTAINER_DEFAULT and host.is_container and host.targets:
        yield warn(
            SHM,
            f"{gib(size)}, the default of containers",
            "room for the shared segment",
            fix="--shm-size=16g, or an emptyDir with medium: Memory",
            persists=True,
            evidence=evidence,
        )


def _shared_bytes(target: Target) -> int:
    environ = attempt(lambda: target.environ) or {}
    asked = target.option("use_shm", "shm", "enable_shm") or environ.get("MC_STORE_USE_SHM") or ""
    shared = target.protocol == "shm" or asked.lower() in ("1", "true", "on", "yes")
    return (target.segment_bytes or 0) if shared else 0


def _cgroup_limit(target: Target, name_v2: str, name_v1: str) -> tuple[int, str] | None:
    """(bytes, path) of the tightest limit above a process; None if there is none. Raises Unseen."""
    host = target.host
    found: list[tuple[int, str]] = []
    folders = {"/sys/fs/cgroup"}
    groups = attempt(lambda: target.text("cgroup")) or ""
    for line in groups.splitlines()[:64]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = "/sys/fs/cgroup" + (f"/{controllers}" if controllers else "")
        while path and path != "/" and len(folders) < 128:
            folders.add(base + path.rstrip("/"))
            path = path.rstrip("/").rpartition("/")[0]
    seen = False
    for folder in sorted(folders):
        for path in (
            f"{folder}/{name_v2}",
            f"{folder}/{name_v1}",
            f"{folder}/{name_v1.partition('.')[0]}/{name_v1}",
        ):
            text = host.peek(path)
            if text is None:
                continue
            seen = True
            word = text.strip()
            if re.fullmatch(r"\d{1,19}", word, re.ASCII) and int(word) < CGROUP_V1_UNLIMITED:
                found.append((int(word), path))
    if not seen:
        raise Unseen(f"/sys/fs/cgroup/{name_v2}", Sight.NOT_COLLECTED)
    return min(found) if found else None


@check(
    "mem.cgroup_limit",
    title="The container's limit holds the segment",
    why="Above the limit the kernel kills the store, or huge pages end in a bus error.",
    source="/sys/fs/cgroup/**/{memory.max,hugetlb.2MB.max}, v1 memory.limit_in_bytes",
    fix="raise the pod's memory limit, and request hugepages-2Mi",
    undo="restore the former limit",
    per=Per.TARGET,
)
def cgroup_limit(target: Target) -> Iterator[Finding]:
    need = target.segment_bytes
    if need is None:
        raise Skip(f"{target.name}: the size of its segment is unknown")
    if target.wants_huge_pages:
        limit, wanted = _cgroup_limit(target, "hugetlb.2MB.max", "hugetlb.2MB.limit_in_bytes"), need
    else:
        limit, wanted = (
            _cgroup_limit(target, "memory.max", "memory.limit_in_bytes"),
            int(need * CGROUP_HEADROOM),
        )
    if limit is not None and limit[0] < wanted:
        yield fail(
            target.label,
            f"limited to {gib(limit[0])}",
            f"{gib(wanted)}: its segment and 10 %",
            fix=f"raise the limit to {wanted} (pod: resources.limits)",
            persists=True,
            evidence=[target.host.at(limit[1]), target.evidence("cmdline")],
        )


_FORKING = re.compile(r"python|vllm|sglang|ray|gunicorn")


@check(
    "mem.fork_safety",
    title="Registered pages survive a fork",
    why="Without copy-on-fork a child takes registered pages away from its parent: the NIC writes where "
    "nobody reads.",
    source="rdma system show copy-on-fork; RDMAV_FORK_SAFE, IBV_FORK_SAFE",
    fix="kernel 5.12 or newer, or RDMAV_FORK_SAFE=1 for the process",
    undo="unset the variable",
)
def fork_safety(host: HostFacts) -> Iterator[Finding]:
    system = rdma.parse_system(host.command("rdma", "system", "show"))
    if system.get("copy-on-fork") != "off":
        return
    if not host.targets:
        raise Skip("no target process here")
    for target in host.targets:
        environ = attempt(lambda: target.environ) or {}
        if environ.get("RDMAV_FORK_SAFE") or environ.get("IBV_FORK_SAFE"):
            continue
        children = attempt(lambda: target.text(f"task/{target.pid}/children")) or ""
        words = attempt(lambda: target.command_line) or []
        forks = bool(children.strip()) or bool(_FORKING.search(" ".join(words[:2])))
        yield finding(
            Outcome.WARN if forks else Outcome.INFO,
            target.label,
            "copy-on-fork off, RDMAV_FORK_SAFE not set" + (", and it forks" if forks else ""),
            "copy-on-fork on, or RDMAV_FORK_SAFE=1",
            fix="export RDMAV_FORK_SAFE=1 for the process and restart it",
            persists=True,
            evidence=[host.said("rdma", "system", "show"), target.evidence("cmdline")],
        )


@check(
    "mem.oom_events",
    title="Nothing was killed for memory",
    why="A store that was killed took its segment with it.",
    source="dmesg 'Out of memory: Killed process', memory.events oom_kill",
    fix="size the segment and the container's limit together",
    kind="L/Δ",
    root="p",
)
def oom_events(host: HostFacts) -> Iterator[Finding]:
    seen = False
    for path in ("/sys/fs/cgroup/memory.events",):
        if host.snapshot.window_s is None or host.peek(path) is None:
            continue
        seen = True
        before, after = (sysfs.parse_named_counts(host.text(path, sample)) for sample in (0, 1))
        step = after.get("oom_kill", 0) - before.get("oom_kill", 0)
        if step > 0:
            yield fail(
                "this container",
                f"oom_kill +{step} in {host.need_window():g} s",
                "+0",
                fix="raise the memory limit or shrink the segment",
                persists=True,
                evidence=[host.at(path)],
            )
    try:
        lines = host.log_lines(r"[Oo]ut of memory: Kill(ed)? process|oom-kill:")
    except Unseen:
        if seen:
            return
        raise
    names = {target.name[:15] for target in host.targets} | {"mooncake_client", "mooncake_master", "kvops"}
    for target in host.targets:
        comm = (attempt(lambda: target.status) or {}).get("Name")
        names |= {comm} if comm else set()
    kills: dict[
        tuple[str, str], misc.LogLine
    ] = {}  # the kernel says each one twice: oom-kill:, then Killed process
    for line in lines:
        killed = re.search(
            r"Kill(?:ed)? process (?P<pid>\d{1,10}) \((?P<name>[^)]*)\)", line.text
        ) or re.search(r"task=(?P<name>[^,]+),pid=(?P<pid>\d{1,10})", line.text)
        if killed is not None:
            kills[killed["name"], killed["pid"]] = line
    for (name, pid), line in list(kills.items())[-4:]:
        ours = name in names
        old = line.seconds is not None and host.uptime_s is not None and host.uptime_s - line.seconds > OLD_S
        what = f"{name} (pid {pid})"
        if ours and not old:
            yield fail(
                what,
                line.text[:160],
                "no store killed",
                fix="raise the memory limit or shrink the segment",
                persists=True,
                evidence=[host.log_evidence(line)],
            )
        else:
            yield info(
                what,
                "killed for memory" + (", more than a day ago" if old else ": not a target"),
                evidence=[host.log_evidence(line)],
            )


@check(
    "mem.ecc",
    title="Memory has no errors",
    why="Uncorrectable errors corrupt or kill; many correctable ones slow memory and announce the other "
    "kind.",
    source="/sys/devices/system/edac/mc/mc*/{ce,ue}_count",
    fix="replace the DIMM that edac-util names",
    kind="Δ",
)
def ecc(host: HostFacts) -> Iterator[Finding]:
    window_s = host.need_window()
    folder = "/sys/devices/system/edac/mc"
    for controller in host.ls(folder):
        if not controller.startswith("mc"):
            continue
        for name in ("ue_count", "ce_count"):
            path = f"{folder}/{controller}/{name}"
            texts = [host.peek(path, sample) for sample in (0, 1)]
            counts = [attempt(lambda: sysfs.parse_int(text or "")) for text in texts]
            if counts[0] is None or counts[1] is None:
                continue
            step = counts[1] - counts[0]
            evidence: list[Evidence] = [host.at(path, f"{counts[0]} → {counts[1]}")]
            if name == "ue_count" and step > 0:
                yield fail(
                    controller,
                    f"uncorrectable errors +{step}",
                    "+0",
                    fix="drain the node and replace the DIMM",
                    persists=True,
                    evidence=evidence,
                )
            elif step >= 2 and step * 3600 / window_s > CE_PER_HOUR_MAX:
                yield warn(
                    controller,
                    f"correctable errors +{step} in {window_s:g} s",
                    f"at most {CE_PER_HOUR_MAX} an hour",
                    fix="plan the replacement of the DIMM",
                    persists=True,
                    evidence=evidence,
                )
