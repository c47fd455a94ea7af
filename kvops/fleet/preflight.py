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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from kvops.errors import ConfigError, Refused
from kvops.limits import MIB

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
    open_files_limit: int | None = None  # RLIMIT_NOFILE


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
        limit_name, used_name, cache_name = (
            ("memory.max", "memory.current", "inactive_file")
            if second
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        for part in (below, *below.parents):
            folder = root / mount_point.relative_to("/") / part
            limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
            # Version 2 says "max", version 1 a number near 2**63, where there is no limit.
            if not limit.isdigit() or int(limit) >= 1 << 60:
                continue
            cache = 0
            for line in _read(folder / "memory.stat").splitlines():
                name, _, value = line.partition(" ")
                if name == cache_name and value.isdigit():
                    cache = int(value)
            usage = int(used) if used.isdigit() else 0
            limits.append(
                CgroupLimit(path=str(folder), limit_bytes=int(limit), used_bytes=max(0, usage - cache))
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
        open_files_limit=_rlimit(resource.RLIMIT_NOFILE),
    )


def check_memory(facts: MemoryFacts, *, stores: int, segment_size_bytes: int, processes: int) -> None:
    """
    Refuse segments that this machine cannot hold.

    Segments are anonymous memory files (memfd): the size of the /dev/shm mount does not bound them, the
    machine's memory and the control group's limit do. They are populated at start, so a lack shows now or
    never.

    Raises:
        Refused: A limit is too low; the largest segment that fits is named.
    """
    need = stores * segment_size_bytes + processes * PROCESS_BYTES

    def fix(free_bytes: int) -> str:
        fits = (free_bytes - processes * PROCESS_BYTES) // max(1, stores) // MIB
        smaller = f"use --segment-size {fits}MiB or less" if fits >= 1 else "free some memory"
        return f"{smaller}, or fewer --stores"

    asked = (
        f"{stores} × {human_bytes(segment_size_bytes)} of segments and {processes} processes "
        f"need {human_bytes(need)}"
    )
    for group in facts.cgroups:
        free = group.limit_bytes - group.used_bytes
        if need > free:
            raise Refused(
                f"{asked}; the memory limit of {group.path} leaves {human_bytes(max(0, free))} "
                f"of {human_bytes(group.limit_bytes)}",
                fix=f"{fix(free)}, or raise the limit",
            )
    if need > facts.available_bytes:
        held = ""
        if facts.shm_used_bytes >= 64 * MIB:
            held = f" (files in /dev/shm hold {human_bytes(facts.shm_used_bytes)}: remove what nobody needs)"
        raise Refused(
            f"{asked}; {human_bytes(facts.available_bytes)} are available{held}",
            fix=fix(facts.available_bytes),
        )
    if facts.file_size_limit_bytes is not None and segment_size_bytes > facts.file_size_limit_bytes:
        raise Refused(
            f"a segment of {human_bytes(segment_size_bytes)} is larger than files may be "
            f"({human_bytes(facts.file_size_limit_bytes)}, ulimit -f)",
            fix="ulimit -f unlimited",
        )
    address_space = facts.address_space_limit_bytes
    if address_space is not None and segment_size_bytes + PROCESS_BYTES > address_space:
        raise Refused(
            f"a store of {human_bytes(segment_size_bytes)} does not fit its address space "
            f"({human_bytes(address_space)}, ulimit -v)",
            fix="ulimit -v unlimited",
        )
    if facts.open_files_limit is not None and facts.open_files_limit < OPEN_FILES_MIN:
        raise Refused(
            f"processes may open {facts.open_files_limit} files; a master wants {OPEN_FILES_MIN} or more",
            fix=f"ulimit -n {OPEN_FILES_MIN * 4}",
        )


def memory_notes(facts: MemoryFacts, *, segment_size_bytes: int) -> list[str]:
    """What does not stop a start but is worth knowing."""
    notes = []
    locked = facts.locked_limit_bytes
    # CAP_IPC_LOCK lifts the limit: mlock(2). Effective capabilities as in capabilities(7), bit 14.
    if locked is not None and locked < segment_size_bytes and not _has_capability(14):
        notes.append(
            f"segments are not locked in memory: ulimit -l is {human_bytes(locked)}; "
            "verbs would refuse to register them"
        )
    return notes


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
