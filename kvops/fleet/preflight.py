"""
What would stop a group from starting on this machine, found before anything is started.

Facts are read in one place (``read_memory_facts``); judging them is pure. Every refusal names the limit, what
was asked for, and what to change.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from kvops.errors import ConfigError, KvopsError, Refused
from kvops.limits import MIB
from kvops.store.topology import Topology, huge_fix, read_topology

PROCESS_BYTES: Final = 160 * MIB  # resident memory of one small master or store beside its segment, with room
DISK_FREE_BYTES_MIN: Final = 64 * MIB  # one journal segment
OPEN_FILES_MIN: Final = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimit:
    """Memory limit of one control group we are in."""

    path: str
    limit_bytes: int
    used_bytes: int  # without page cache that can be dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What bounds the memory that new processes of this user can have."""

    available_bytes: int  # /proc/meminfo MemAvailable
    shm_used_bytes: int  # files in /dev/shm: memory too, and often forgotten there
    cgroups: tuple[CgroupLimit, ...] = ()
    file_size_limit_bytes: int | None = None  # RLIMIT_FSIZE; it bounds a memfd as well
    address_space_limit_bytes: int | None = None  # RLIMIT_AS
    locked_limit_bytes: int | None = None  # RLIMIT_MEMLOCK
    may_lock: bool = False  # CAP_IPC_LOCK lifts it: mlock(2)
    open_files_limit: int | None = None  # RLIMIT_NOFILE
    committable_bytes: int | None = None  # with vm.overcommit_memory 2: CommitLimit less Committed_AS
    topology: Topology = field(default_factory=Topology)


def human_objects(count: int) -> str:
    """``1 object``, ``1,234 objects``."""
    return f"{count:,} object{'' if count == 1 else 's'}"


def human_bytes(count: int) -> str:
    """A size for people: ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` as bytes by name; lines that are not ``Name: N kB`` are passed over."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _memory_cgroups(proc: Path) -> Iterator[tuple[Path, PurePosixPath, bool]]:
    """
    Mount point, our path below it, and whether it is version 2, of each hierarchy that limits memory.

    Source: cgroups(7), /proc/self/cgroup (``id:controllers:path``) and /proc/self/mountinfo.
    """
    paths: dict[str, str] = {}
    for line in _read(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in _read(proc / "self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        mounted_root, mount_point = PurePosixPath(fields[3]), Path(fields[4])
        second = kinds[0] == "cgroup2"
        if not second and not (kinds[0] == "cgroup" and "memory" in kinds[2].split(",")):
            continue
        controller = "" if second else "memory"
        if controller not in paths:
            continue
        # In a container the mount may show only a part of the tree, whose root is our own group or above it.
        own = PurePosixPath(paths[controller])
        below = own.relative_to(mounted_root) if own.is_relative_to(mounted_root) else PurePosixPath(".")
        yield mount_point, below, second


def read_cgroup_limits(proc: Path = Path("/proc"), root: Path = Path("/")) -> tuple[CgroupLimit, ...]:
    """Every memory limit above us, nearest first; ``root`` is where mount points are looked up."""
    limits = []
    for mount_point, below, second in _memory_cgroups(proc):
        # Above memory.high nothing is refused, but whoever asks is slowed down until it stands still.
        limit_names, used_name, cache_name = (
            (("memory.max", "memory.high"), "memory.current", "inactive_file")
            if second
            else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
        )
        for part in (below, *below.parents):
            folder = root / mount_point.relative_to("/") / part
            texts = [_read(folder / name).strip() for name in limit_names]
            used = _read(folder / used_name).strip()
            # Version 2 says "max", version 1 a number near 2**63, where there is no limit.
            found = [int(text) for text in texts if text.isdigit() and int(text) < 1 << 60]
            if not found:
                continue
            cache = 0
            for line in _read(folder / "memory.stat").splitlines():
                name, _, value = line.partition(" ")
                if name == cache_name and value.isdigit():
                    cache = int(value)
            usage = int(used) if used.isdigit() else 0
            limits.append(
                CgroupLimit(path=str(folder), limit_bytes=min(found), used_bytes=max(0, usage - cache))
            )
    return tuple(limits)


def _rlimit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def read_memory_facts() -> MemoryFacts:
    """Look at this machine and this user's limits."""
    meminfo = parse_meminfo(_read(Path("/proc/meminfo")))
    try:
        shm = os.statvfs("/dev/shm")  # noqa: S108 (looked at, never written)
        shm_used = (shm.f_blocks - shm.f_bfree) * shm.f_frsize
    except OSError:
        shm_used = 0
    return MemoryFacts(
        available_bytes=meminfo.get("MemAvailable", 0),
        shm_used_bytes=shm_used,
        cgroups=read_cgroup_limits(),
        file_size_limit_bytes=_rlimit(resource.RLIMIT_FSIZE),
        address_space_limit_bytes=_rlimit(resource.RLIMIT_AS),
        locked_limit_bytes=_rlimit(resource.RLIMIT_MEMLOCK),
        may_lock=_has_capability(14),  # capabilities(7): CAP_IPC_LOCK
        open_files_limit=_rlimit(resource.RLIMIT_NOFILE),
        committable_bytes=meminfo.get("CommitLimit", 0) - meminfo.get("Committed_AS", 0)
        if _read(Path("/proc/sys/vm/overcommit_memory")).strip() == "2"
        else None,
        topology=read_topology(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a start will ask of this machine."""

    stores: int
    segment_size_bytes: int
    processes: int
    huge_page_bytes: int = 0
    numa_nodes: tuple[int, ...] = ()  # store i is bound to the i-th, over and over; none: unbound


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at before a start."""

    check: str
    observed: str
    needed: str
    error: KvopsError | None = None  # why a start is refused
    note: str = ""  # what does not stop a start but is worth knowing

    def row(self) -> dict[str, str]:
        """As ``kvops start --dry-run`` shows it."""
        return {
            "check": self.check,
            "outcome": "fail" if self.error else "note" if self.note else "ok",
            "observed": self.observed,
            "needed": self.needed,
            "fix": self.error.fix if self.error else self.note,
        }


def refuse(findings: Iterable[Finding]) -> None:
    """
    Refuse a start by all that is in its way, at once.

    Raises:
        KvopsError: The one trouble there is, or a Refused that numbers them.
    """
    errors = [one.error for one in findings if one.error is not None]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise Refused(
            f"{len(errors)} things are in the way:\n"
            + "\n".join(f"{number}. {error.what}" for number, error in enumerate(errors, 1)),
            fix="\n".join(f"{number}. {error.fix}" for number, error in enumerate(errors, 1)),
        )


def judge_limits(facts: MemoryFacts, needs: Needs) -> list[Finding]:
    """
    Hold what a start needs against what this machine gives; every finding, good ones too.

    Segments are anonymous memory files (memfd): the size of the /dev/shm mount does not bound them, the
    machine's memory and the control group's limit do. They are populated at start, so a lack shows now or
    never. Huge pages were taken from the machine's memory when they were reserved, and are not charged to a
    memory control group.
    """
    findings = [*_memory(facts, needs), *_numa_memory(facts, needs), *_huge_pages(facts, needs)]
    segment = needs.segment_size_bytes
    findings.append(
        _limit(
            "file size (ulimit -f)",
            facts.file_size_limit_bytes,
            segment,
            what=f"a segment of {human_bytes(segment)} is larger than files may be",
            fix="ulimit -f unlimited",
        )
    )
    findings.append(
        _limit(
            "address space (ulimit -v)",
            facts.address_space_limit_bytes,
            segment + PROCESS_BYTES,
            what=f"a store of {human_bytes(segment)} does not fit its address space",
            fix="ulimit -v unlimited",
        )
    )
    files = facts.open_files_limit
    findings.append(
        Finding(
            check="open files (ulimit -n)",
            observed="no limit" if files is None else str(files),
            needed=str(OPEN_FILES_MIN),
            error=Refused(
                f"processes may open {files} files; a master wants {OPEN_FILES_MIN} or more",
                fix=f"ulimit -n {OPEN_FILES_MIN * 4}",
            )
            if files is not None and files < OPEN_FILES_MIN
            else None,
        )
    )
    locked = facts.locked_limit_bytes
    free_to_lock = locked is None or facts.may_lock
    findings.append(
        Finding(
            check="locked memory (ulimit -l)",
            observed="no limit" if free_to_lock else human_bytes(locked or 0),
            needed="nothing: shm and tcp lock none",
            note=f"segments are not locked in memory: ulimit -l is {human_bytes(locked or 0)}; verbs would refuse "
            "to register them; ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit"
            if not free_to_lock and (locked or 0) < segment
            else "",
        )
    )
    findings.append(
        Finding(
            check="/dev/shm",  # noqa: S108 (a name, not a path)
            observed=f"{human_bytes(facts.shm_used_bytes)} used",
            needed="nothing: segments are memfd",
        )
    )
    return findings


def _limit(check: str, limit_bytes: int | None, need_bytes: int, *, what: str, fix: str) -> Finding:
    """A limit of this process that its children inherit."""
    observed = "no limit" if limit_bytes is None else human_bytes(limit_bytes)
    which = check.partition("(")[2].rstrip(")")
    return Finding(
        check=check,
        observed=observed,
        needed=human_bytes(need_bytes),
        error=Refused(f"{what} ({observed}, {which})", fix=fix)
        if limit_bytes is not None and need_bytes > limit_bytes
        else None,
    )


def _memory(facts: MemoryFacts, needs: Needs) -> Iterator[Finding]:
    """The machine's memory, every control group's, and what strict overcommit leaves."""
    stores, segment, processes = needs.stores, needs.segment_size_bytes, needs.processes
    if needs.huge_page_bytes:
        segment = 0
    need = stores * segment + processes * PROCESS_BYTES
    asked = (
        f"{stores} × {human_bytes(segment)} of segments and {processes} processes need {human_bytes(need)}"
    )

    def fix(free_bytes: int) -> str:
        fits = (free_bytes - processes * PROCESS_BYTES) // max(1, stores) // MIB
        smaller = f"use --segment-size {fits}MiB or less" if fits >= 1 and segment else "free some memory"
        return f"{smaller}, or fewer --stores"

    for group in facts.cgroups:
        free = max(0, group.limit_bytes - group.used_bytes)
        yield Finding(
            check="cgroup memory",
            observed=f"{human_bytes(free)} of {human_bytes(group.limit_bytes)} left in {group.path}",
            needed=human_bytes(need),
            error=Refused(
                f"{asked}; the memory limit of {group.path} leaves {human_bytes(free)} "
                f"of {human_bytes(group.limit_bytes)}",
                fix=f"{fix(free)}, or raise the limit",
            )
            if need > free
            else None,
        )
    held = ""
    if facts.shm_used_bytes >= 64 * MIB:
        held = f" (files in /dev/shm hold {human_bytes(facts.shm_used_bytes)}: remove what nobody needs)"
    yield Finding(
        check="memory",
        observed=f"{human_bytes(facts.available_bytes)} available",
        needed=human_bytes(need),
        error=Refused(
            f"{asked}; {human_bytes(facts.available_bytes)} are available{held}",
            fix=fix(facts.available_bytes),
        )
        if need > facts.available_bytes
        else None,
    )
    if facts.committable_bytes is not None:
        left = facts.committable_bytes
        yield Finding(
            check="overcommit",
            observed=f"{human_bytes(left)} may be promised (vm.overcommit_memory is 2)",
            needed=human_bytes(need),
            error=Refused(
                f"{asked}; vm.overcommit_memory is 2 and leaves {human_bytes(left)} to promise",
                fix="sysctl -w vm.overcommit_memory=0, or raise vm.overcommit_ratio",
            )
            if need > left
            else None,
        )


def _by_node(needs: Needs) -> dict[int, int]:
    """How many stores each node gets."""
    counts: dict[int, int] = {}
    for number in range(needs.stores if needs.numa_nodes else 0):
        node = needs.numa_nodes[number % len(needs.numa_nodes)]
        counts[node] = counts.get(node, 0) + 1
    return counts


def _numa_memory(facts: MemoryFacts, needs: Needs) -> Iterator[Finding]:
    """A store that is bound to a node gets no memory from another."""
    if needs.huge_page_bytes:
        return
    for index, stores in _by_node(needs).items():
        node = facts.topology.node(index)
        available = node.available_bytes if node is not None else 0
        need = stores * needs.segment_size_bytes
        yield Finding(
            check=f"memory of NUMA node {index}",
            observed=f"{human_bytes(available)} available",
            needed=human_bytes(need),
            error=Refused(
                f"{stores} × {human_bytes(needs.segment_size_bytes)} bound to NUMA node {index} need "
                f"{human_bytes(need)}; it has {human_bytes(available)}",
                fix=f"use --segment-size {available // stores // MIB}MiB or less, or --numa off",
            )
            if need > available
            else None,
        )


def _huge_pages(facts: MemoryFacts, needs: Needs) -> Iterator[Finding]:
    """Reserved pages of the size that was asked for, on every node a store is bound to."""
    size = needs.huge_page_bytes
    if not size:
        return
    each = needs.segment_size_bytes // size
    counts = _by_node(needs)
    nodes: list[tuple[str, int, int]] = []  # where, how many are free, how many are needed
    for index, stores in counts.items():
        node = facts.topology.node(index)
        pool = node.huge.get(size) if node is not None else None
        nodes.append((f" on NUMA node {index}", pool.free if pool else 0, each * stores))
    if not counts:
        pools = [node.huge[size] for node in facts.topology.nodes if size in node.huge]
        nodes = [("", sum(pool.free for pool in pools), each * needs.stores)]
    for where, free, need in nodes:
        index_text = where.rpartition(" ")[2]
        fix = huge_fix(size, need - free)
        if len(facts.topology.nodes) > 1 and index_text:
            folder = f"/sys/devices/system/node/node{index_text}/hugepages/hugepages-{size // 1024}kB"
            fix = (
                f"echo $(($(cat {folder}/nr_hugepages) + {need - free})) > {folder}/nr_hugepages; "
                "or --hugepages off"
            )
        yield Finding(
            check=f"huge pages of {human_bytes(size)}{where}",
            observed=f"{free} free",
            needed=f"{need} of them",
            error=Refused(
                f"{need} huge pages of {human_bytes(size)} are needed{where}; {free} are free", fix=fix
            )
            if need > free
            else None,
        )


def judge_addresses(addresses: Sequence[tuple[str, str, int]]) -> Finding:
    """As ``check_addresses``, as a finding."""
    error: KvopsError | None = None
    try:
        check_addresses(addresses)
    except (Refused, ConfigError) as found:
        error = found
    return Finding(
        check="addresses",
        observed="free" if error is None else "not free",
        needed=", ".join(f"{host}:{port or 'any'}" for _, host, port in addresses),
        error=error,
    )


def _has_capability(bit: int) -> bool:
    for line in _read(Path("/proc/self/status")).splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value.strip(), 16) >> bit & 1)
    return False


def check_addresses(addresses: Sequence[tuple[str, str, int]]) -> None:
    """
    Refuse addresses that cannot be bound now.

    Args:
        addresses: Who wants it, host, port; port 0 is never in use.

    Raises:
        Refused: Somebody else listens there.
        ConfigError: The host is not an address of this machine, or binding there is not allowed.
    """
    wanted: dict[tuple[str, int], str] = {}
    for who, host, port in addresses:
        if port and (other := wanted.setdefault((host, port), who)) != who:
            raise ConfigError(
                f"{who} and {other} both want {host}:{port}", fix="give one of them another port"
            )
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError(
                f"{who} cannot listen on {host}: {error.strerror}", fix="use an address of this machine"
            ) from error
        family, kind, protocol, _, target = infos[0]
        with socket.socket(family, kind, protocol) as sock:
            # As servers do: a port whose last connections are still in TIME_WAIT is free.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(target)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise Refused(
                        f"{who} cannot listen on {host}:{port}: the port is in use",
                        fix=f"see who has it (ss -ltnp sport = :{port}), or choose another port",
                    ) from error
                raise ConfigError(
                    f"{who} cannot listen on {host}:{port}: {error.strerror}",
                    fix="use an address of this machine and a port above 1023",
                ) from error


def check_folder(path: Path) -> None:
    """
    Make a private folder and refuse one that cannot hold our files.

    Raises:
        ConfigError: It is not ours, not a folder, or not writable.
        Refused: Its disk is full.
    """
    fix = "make it a writable folder of your own, or name another with --state-dir"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(path, os.R_OK | os.W_OK | os.X_OK)
        disk = os.statvfs(path)
    except OSError as error:
        raise ConfigError(f"cannot use the state folder {path}: {error.strerror}", fix=fix) from error
    if not usable:
        raise ConfigError(f"cannot use the state folder {path}: Permission denied", fix=fix)
    free = disk.f_bavail * disk.f_frsize
    if free < DISK_FREE_BYTES_MIN:
        raise Refused(
            f"the disk of {path} has {human_bytes(free)} free; {human_bytes(DISK_FREE_BYTES_MIN)} are needed",
            fix="free some space, or name a folder on another disk with --state-dir",
        )
