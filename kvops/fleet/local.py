"""
A group on this machine: its files, and the life of its processes.

::

    <state-dir>/groups/<group>/
        group.yaml      members: who they are, where they listen, which processes they are
        secret          64 hex digits, mode 0600
        lock            flock(2) of whoever changes the group
        configs/*.yaml  what each member was started with
        logs/*.log      what it wrote
        <member>/       its own state
        seen/           empty files: when a process was first seen ended or stopped

A member's process is named by pid, start time and boot id. What is written down of a former boot, or of a pid
that somebody else has by now, counts as ended and is never signalled.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shlex
import shutil
import signal
import site
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from kvops.errors import (
    AlreadyRunning,
    ConfigError,
    LeftBehind,
    Refused,
    StartFailed,
    Unreachable,
    UsageError,
)
from kvops.files import default_state_dir, load_yaml, write_private, write_yaml
from kvops.fleet import etcd, preflight
from kvops.fleet.process import (
    ProcessIdentity,
    Spawned,
    collect,
    is_exiting,
    is_running,
    is_stopped,
    send_signal,
    spawn_detached,
    wait_ended,
)
from kvops.limits import GIB, MIB
from kvops.notify import Notice, Receiver
from kvops.signals import signals_held

if TYPE_CHECKING:
    from kvops.store.config import MasterConfig, StoreConfig

STATE_SCHEMA: Final = 1
DEFAULT_GROUP: Final = "local"
STORES_MAX: Final = 64  # on one machine
MASTERS_MAX: Final = 7
ETCD_TTL_S: Final = 2  # of a leader's lease in an etcd that is not ours: its election takes a second
LOG_BYTES_MAX: Final = 64 * MIB  # a longer log is set aside at the next start
LOG_TAIL_LINES: Final = 12  # shown when a member ends while starting
LOG_TAIL_BYTES: Final = 8192
LOCK_TIMEOUT_S: Final = 15.0
TERM_GRACE_S: Final = 10.0  # from SIGTERM to SIGKILL
RELEASE_S_PER_GIB: Final = 1.0  # the kernel takes 0.3 s of an ending process to free a GiB of 4 KiB pages
KILL_GRACE_S: Final = 5.0  # from SIGKILL to giving up: only the kernel can hold a process longer
UNDO_GRACE_S: Final = 3.0  # … of a start that failed: nobody uses these processes yet
RUNTIME_PATH_BYTES_MAX: Final = (
    70  # leaves room for a member's name under the 107 bytes of a Unix socket's path
)

Role = Literal["etcd", "master", "store"]
Tell = Callable[[str, str], None]
"""Takes a member's name and what just happened to it, for people to read."""
Command = Callable[[str, Path], Sequence[str]]
"""The argv that runs a role with a configuration file: the seam between a group and its programs."""


def serve_command(role: str, config_file: Path) -> list[str]:
    """Run the role by this interpreter; ``-P`` keeps the working directory out of the import path."""
    if role == "etcd":
        return [etcd.program(), "--config-file", str(config_file)]
    return [sys.executable, "-P", "-m", "kvops", "serve", role, "--config", str(config_file)]


def daemon_environment() -> dict[str, str]:
    """Our environment, without what belongs to our own supervisor, and with this very kvops importable."""
    env = {
        name: value for name, value in os.environ.items() if name not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")
    }
    package_root = str(Path(__file__).resolve().parents[2])
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if package_root not in installed:  # a source tree
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, env.get("PYTHONPATH", ""))))
    return env


def utc_now() -> str:
    """Now, as RFC 3339 in UTC, to the millisecond."""
    return _rfc3339(datetime.now(UTC))


def _rfc3339(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One master or store of a local group, as group.yaml keeps it."""

    name: str
    role: Role
    host: str  # logical
    numa_node: int = 0
    pid: int = 0  # 0: not started, or stopped on purpose
    started_ticks: int = 0
    boot_id: str = ""
    started: str = ""  # RFC 3339, UTC
    ready: bool = False
    addresses: dict[str, str] = {}  # listen, unix, control, http: as it said when it was ready

    @property
    def identity(self) -> ProcessIdentity | None:
        """Its process; None when it has none."""
        if self.pid <= 0:
            return None
        return ProcessIdentity(pid=self.pid, started_ticks=self.started_ticks, boot_id=self.boot_id)

    @property
    def running(self) -> bool:
        """Whether its process runs now."""
        identity = self.identity
        return identity is not None and is_running(identity)

    @property
    def stopped(self) -> bool:
        """Whether its process is held by SIGSTOP or a debugger."""
        identity = self.identity
        return identity is not None and is_stopped(identity)


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """group.yaml. Unknown keys are passed over: an older kvops can still stop what a newer one started."""

    schema: int = STATE_SCHEMA
    group: str
    environment: str = "local"
    placement: str = "local-first"
    transports: list[str] = []
    segment_size_bytes: int = 0
    huge_page_bytes: int = 0
    started: str = ""
    members: list[Member] = []

    def member(self, name: str) -> Member:
        """
        The member of that name.

        Raises:
            UsageError: There is none.
        """
        for member in self.members:
            if member.name == name:
                return member
        names = ", ".join(member.name for member in self.members) or "none"
        raise UsageError(f"group {self.group} has no member {name}", fix=f"its members: {names}")

    @property
    def release_s(self) -> float:
        """How long the kernel may take to free one store's segment; all stores' are freed at once."""
        return 0.0 if self.huge_page_bytes else RELEASE_S_PER_GIB * self.segment_size_bytes / GIB

    def with_member(self, changed: Member) -> GroupState:
        """The same group with one member replaced."""
        members = [changed if member.name == changed.name else member for member in self.members]
        return msgspec.structs.replace(self, members=members)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """What ``kvops start`` is asked for."""

    stores: int = 1
    segment_size_bytes: int = GIB
    placement: str = "local-first"
    transports: tuple[str, ...] = ("shm", "tcp")
    listen: str = "127.0.0.1:0"  # the master's wire
    control: str = "127.0.0.1:0"  # the master's gRPC
    http: str = "127.0.0.1:0"  # the master's metrics
    huge_page_bytes: int = 0  # 0: the kernel's usual pages
    numa_nodes: tuple[int, ...] = ()  # store i is bound to the i-th, over and over; none: unbound
    one_host: bool = False  # the stores share a failure domain; else each is a logical host of its own
    masters: int = 1  # several need etcd
    etcd: tuple[str, ...] = ()  # host:port of one that runs
    etcd_members: int = 0  # … or how many members of one of our own
    etcd_ttl_s: int = 0  # of the leader's lease; 0: what suits that etcd
    etcd_ca: str = ""  # absolute paths, as a master is given them; "" for none
    etcd_cert: str = ""
    etcd_key: str = ""
    etcd_user: str = ""
    etcd_password_file: str = ""

    def members(self) -> list[Member]:
        """Who will be in the group."""
        nodes = self.numa_nodes or (0,)
        return [
            *(Member(name=f"etcd-{i}", role="etcd", host=f"host-{i}") for i in range(self.etcd_members)),
            *(Member(name=f"master-{i}", role="master", host=f"host-{i}") for i in range(self.masters)),
            *(
                Member(
                    name=f"store-{i}",
                    role="store",
                    host="host-0" if self.one_host else f"host-{i}",
                    numa_node=nodes[i % len(nodes)],
                )
                for i in range(self.stores)
            ),
        ]

    def master_address(self, what: Literal["listen", "control", "http"], number: int) -> str:
        """Where one of several masters listens: the next port for each, or any."""
        host, _, port = {"listen": self.listen, "control": self.control, "http": self.http}[what].rpartition(
            ":"
        )
        return f"{host}:{int(port) + number if int(port) else 0}"

    @property
    def store_host(self) -> str:
        """Where stores bind: beside the master, any free port."""
        return self.listen.rpartition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What ``kvops stop`` did to one member."""

    name: str
    role: Role
    pid: int
    how: Literal["terminated", "killed", "had ended"]


@dataclass(slots=True)
class _Starting:
    """A process on its way to ready."""

    member: Member
    spawned: Spawned
    log_offset: int
    began_s: float = field(default_factory=time.monotonic)


class LocalGroup:
    """One group under one state folder. Methods that change it take the group's lock."""

    def __init__(self, state_dir: Path, name: str, *, command: Command = serve_command) -> None:
        """
        Name a group; nothing is read or made yet.

        Raises:
            UsageError: No group can have this name.
        """
        if not (name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()) or (
            not name[0].isalnum() or not name[-1].isalnum() or len(name) > 63
        ):
            raise UsageError(
                f"{name!r} cannot be a group's name",
                fix="use letters, digits, '-', '_' and '.', at most 63, a letter or digit first and last",
            )
        self.name = name
        self.state_dir = state_dir
        self.folder = state_dir / "groups" / name
        self.state_file = self.folder / "group.yaml"
        self.secret_file = self.folder / "secret"
        self._seen = self.folder / "seen"
        self._command = command
        self._kvops = "kvops" if name == DEFAULT_GROUP else f"kvops -g {name}"  # how hints begin

    # Looking

    def read(self) -> GroupState | None:
        """
        What is written down; None when this group was never started.

        Raises:
            ConfigError: It is unreadable, or written by a newer kvops that this one does not understand.
        """
        try:
            exists = self.state_file.is_file()
        except OSError as error:
            raise self._unusable(error) from error
        if not exists:
            # is_file() answers no for a folder we may not enter, too.
            self._check_readable()
            return None
        state = load_yaml(self.state_file, GroupState)
        if state.schema > STATE_SCHEMA:
            raise ConfigError(
                f"{self.state_file} was written by a newer kvops (schema {state.schema})",
                fix="use that version",
            )
        return state

    def _check_readable(self) -> None:
        for folder in (self.state_dir, self.state_dir / "groups", self.folder):
            try:
                mode = folder.stat().st_mode
            except FileNotFoundError:
                return
            except OSError as error:
                raise self._unusable(error) from error
            if not stat.S_ISDIR(mode):
                raise ConfigError(
                    f"{folder} is not a folder", fix="remove it, or name another with --state-dir"
                )
            if not os.access(folder, os.R_OK | os.X_OK):
                raise ConfigError(
                    f"cannot read {folder}: Permission denied",
                    fix="run as its owner, or name another with --state-dir",
                )

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot read the state folder {self.state_dir}: {error.strerror}",
            fix="make it a folder of your own, or name another with --state-dir",
        )

    def require(self) -> GroupState:
        """
        As ``read``.

        Raises:
            Unreachable: This group was never started here.
        """
        state = self.read()
        if state is None:
            raise Unreachable(
                f"there is no group {self.name} in {self.state_dir}",
                fix=f"start it: {self._kvops} start, or name another with -g",
            )
        return state

    def changed(self) -> str | None:
        """When what is written down last changed, as RFC 3339 in UTC."""
        try:
            return _rfc3339(datetime.fromtimestamp(self.state_file.stat().st_mtime, UTC))
        except OSError:
            return None

    def first_seen(self, member: Member, life: str) -> str | None:
        """
        When this member's process was first seen in its present trouble, as RFC 3339 in UTC; None while it runs.

        An empty file keeps the time, so that it does not move from look to look: of a process that has ended
        the kernel says nothing any more, of a stopped one not since when.

        Args:
            member: The member.
            life: ``ended``, ``stopped``, or anything else for a process that runs.
        """
        prefix = f"{member.name}.{member.pid}.{member.started_ticks}"
        mark = self._seen / f"{prefix}.{life}"
        try:
            if life not in ("ended", "stopped"):
                (self._seen / f"{prefix}.stopped").unlink(missing_ok=True)
                return None
            self._seen.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            pass
        except OSError:
            pass  # another user's group: what was seen before is still there
        try:
            return _rfc3339(datetime.fromtimestamp(mark.stat().st_mtime, UTC))
        except OSError:
            return None

    def config_file(self, member: str) -> Path:
        """What ``member`` was started with."""
        return self.folder / "configs" / f"{member}.yaml"

    def log_file(self, member: str) -> Path:
        """What ``member`` wrote."""
        return self.folder / "logs" / f"{member}.log"

    def runtime_dir(self) -> Path:
        """Where this group's Unix sockets lie: short, private, the same for all commands of this user."""
        short = hashlib.blake2b(os.fsencode(self.folder.absolute()), digest_size=6).hexdigest()
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        if (
            base.startswith("/")
            and len(os.fsencode(base)) + 20 < RUNTIME_PATH_BYTES_MAX
            and _is_own_folder(Path(base))
        ):
            return Path(base) / "kvops" / short
        return Path(f"/tmp/kvops-{os.getuid()}") / short  # noqa: S108 (made 0700, its owner is checked)

    # Changing

    @contextmanager
    def lock(self, *, timeout_s: float = LOCK_TIMEOUT_S, name: str = "lock") -> Iterator[None]:
        """
        Be the only one who changes this group, or, by another ``name``, who does something longer to it.

        Raises:
            Refused: Somebody else was for too long.
        """
        preflight.check_folder(self.folder)
        path = self.folder / name
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + timeout_s
            pause = threading.Event()
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
                        raise Refused(
                            f"another command changes group {self.name} (pid {holder})",
                            fix="wait for it to end, then try again",
                        ) from None
                    pause.wait(0.05)  # flock has no time-out of its own
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(handle)  # releases the lock

    def start(self, plan: StartPlan, *, timeout_s: float, tell: Tell = lambda name, text: None) -> GroupState:
        """
        Start every member and return when all are ready. On any trouble, Ctrl-C included, all are stopped
        again.

        Raises:
            AlreadyRunning: Members of this group run.
            Refused: A limit, or an address in use, is in the way.
            StartFailed: A member ended.
            Unreachable: A member was not ready in time.
        """
        with self.lock():
            former = self.read()
            running = [member.name for member in former.members if member.running] if former else []
            if running:
                missing = [member.name for member in former.members if not member.running] if former else []
                stop = f"stop it first: {self._kvops} stop"
                raise AlreadyRunning(
                    f"group {self.name} runs already: {', '.join(running)}",
                    fix=f"start what is missing: {self._kvops} restart {' '.join(missing)}; or {stop}"
                    if missing
                    else stop,
                )
            self._preflight(plan)
            self._prepare_folders()
            state = GroupState(
                group=self.name,
                placement=plan.placement,
                transports=list(plan.transports),
                segment_size_bytes=plan.segment_size_bytes,
                started=utc_now(),
                huge_page_bytes=plan.huge_page_bytes,
                members=plan.members(),
            )
            self._write(state)
            deadline = time.monotonic() + timeout_s
            with self._undone_on_trouble():
                endpoints = list(plan.etcd) or self._write_etcd_configs(state)
                state = self._bring_up(state, _named(state, "etcd"), deadline=deadline, tell=tell)
                for number, name in enumerate(_named(state, "master")):
                    write_yaml(self.config_file(name), self._master_config(plan, name, number, endpoints))
                state = self._bring_up(state, _named(state, "master"), deadline=deadline, tell=tell)
                for member in state.members:
                    if member.role == "store":
                        write_yaml(self.config_file(member.name), self._store_config(plan, state, member))
                return self._bring_up(state, _named(state, "store"), deadline=deadline, tell=tell)

    def restart(
        self,
        names: Sequence[str],
        *,
        timeout_s: float,
        now: bool = False,
        tell: Tell = lambda name, text: None,
    ) -> GroupState:
        """
        Stop members (all when none is named) and start them again as they were; ended ones are just started.

        The master keeps its addresses, so that clients find it again. Members that were not named keep
        running, whatever happens.

        Raises:
            UsageError: No such member.
            StartFailed: One ended while starting; those named are stopped then.
        """
        with self.lock():
            state = self.require()
            chosen = [state.member(name) for name in names] or state.members
            self._stop(state, chosen, now=now, tell=tell)
            state = self.require()
            deadline = time.monotonic() + timeout_s
            self._prepare_folders()
            with self._undone_on_trouble(only=[member.name for member in chosen]):
                for role in ("etcd", "master", "store"):
                    some = [member.name for member in chosen if member.role == role]
                    if some:
                        state = self._bring_up(state, some, deadline=deadline, tell=tell)
            return state

    def restart_steps(self, members: Sequence[Member], *, now: bool = False) -> list[str]:
        """Exactly what ``restart`` would do to these members, one line a step."""
        verb = "SIGKILL" if now else "SIGTERM"
        return [
            f"send {verb} to {one.name} (pid {one.pid}) and wait for its end"
            for one in members
            if one.running
        ] + [
            f"run {one.role} with {self.config_file(one.name)} and wait until it is ready" for one in members
        ]

    def stop(
        self, *, now: bool = False, grace_s: float = TERM_GRACE_S, tell: Tell = lambda name, text: None
    ) -> list[Stopped]:
        """
        End every member: stores first, then masters, each asked (SIGTERM) and after ``grace_s`` made to
        (SIGKILL).

        ``now`` kills them at once. Stopping what does not run is a success that does nothing.

        Raises:
            LeftBehind: A process did not end even when killed.
        """
        if self.read() is None:
            return []
        with self.lock():
            state = self.read()
            if state is None:
                return []
            stopped = self._stop(state, state.members, now=now, grace_s=grace_s, tell=tell)
            runtime = self.runtime_dir()
            if _is_own_folder(runtime):
                shutil.rmtree(runtime, ignore_errors=True)  # sockets that nobody listens on any more
            return stopped

    def forget(self) -> None:
        """
        Remove what is known of a group that does not run: state, logs, secret.

        Raises:
            Refused: A member runs.
        """
        if not self.folder.exists():
            return
        with self.lock():
            state = self.read()
            running = [member.name for member in state.members if member.running] if state else []
            if running:
                raise Refused(f"{', '.join(running)} of group {self.name} runs", fix=f"{self._kvops} stop")
            shutil.rmtree(self.folder, ignore_errors=True)

    def act(self, action: str, name: str, *, timeout_s: float = 60.0) -> str:
        """
        Do something to one member, as events of a replay do; returns what was done.

        Args:
            action: ``kill`` (SIGKILL), ``stop`` (SIGTERM), ``pause``, ``resume``, ``start``.
            name: The member.
            timeout_s: How long a start may take.

        Raises:
            UsageError: No such action or member.
            Unreachable: It does not run.
        """
        signals = {
            "kill": signal.SIGKILL,
            "stop": signal.SIGTERM,
            "pause": signal.SIGSTOP,
            "resume": signal.SIGCONT,
        }
        member = self.require().member(name)
        if action == "start":
            if member.running:
                return f"{name} runs already (pid {member.pid})"
            started = self.restart([name], timeout_s=timeout_s).member(name)
            return f"{name} started (pid {started.pid})"
        if action not in signals:
            raise UsageError(f"{action!r} is not an action", fix=f"use {', '.join([*signals, 'start'])}")
        identity = member.identity
        if identity is None or not send_signal(identity, signals[action]):
            raise Unreachable(f"{name} does not run", fix=f"start it: {self._kvops} restart {name}")
        if action in ("kill", "stop"):
            wait_ended([identity], timeout_s=TERM_GRACE_S)  # collects it, when it is a child of ours
        return f"{name} got {signals[action].name} (pid {member.pid})"

    def findings(self, plan: StartPlan) -> list[preflight.Finding]:
        """What a start would be refused for, and what was found in order; nothing is changed."""
        from kvops.addresses import split_address

        kinds: tuple[Literal["listen", "control", "http"], ...] = ("listen", "control", "http")
        addresses = [
            (f"master-{number} ({what})", *split_address(plan.master_address(what, number)))
            for number in range(plan.masters)
            for what in kinds
        ]
        needs = preflight.Needs(
            stores=plan.stores,
            segment_size_bytes=plan.segment_size_bytes,
            processes=plan.stores + plan.masters + plan.etcd_members,
            huge_page_bytes=plan.huge_page_bytes,
            numa_nodes=plan.numa_nodes,
        )
        facts = preflight.read_memory_facts()
        return [preflight.judge_addresses(addresses), *preflight.judge_limits(facts, needs)]

    def steps(self, plan: StartPlan) -> list[str]:
        """Exactly what ``start`` would do, one line a step."""
        steps = [f"make {self.folder} (mode 0700)", f"make {self.runtime_dir()} (mode 0700) for sockets"]
        if not self.secret_file.exists():
            steps.append(f"write {self.secret_file} (mode 0600): 32 random bytes")
        for member in plan.members():
            config_file = self.config_file(member.name)
            steps.append(f"write {config_file}")
            steps.append(f"run   {shlex.join(self._command(member.role, config_file))}")
            steps.append(f"wait  until {member.name} is ready; log in {self.log_file(member.name)}")
        return steps

    # Pieces of the above; the lock is held

    def _write(self, state: GroupState) -> None:
        write_yaml(self.state_file, state)

    def _preflight(self, plan: StartPlan) -> None:
        if not 0 <= plan.stores <= STORES_MAX:
            raise UsageError(f"{plan.stores} stores on one machine", fix=f"use 0 to {STORES_MAX}")
        if not 1 <= plan.masters <= MASTERS_MAX:
            raise UsageError(f"{plan.masters} masters on one machine", fix=f"use 1 to {MASTERS_MAX}")
        if plan.masters > 1 and not (plan.etcd or plan.etcd_members):
            raise UsageError(
                f"{plan.masters} masters need etcd to elect a leader",
                fix="add --etcd HOST:PORT, or --etcd auto",
            )
        if plan.etcd_members:
            etcd.program()
        preflight.refuse(self.findings(plan))

    def _prepare_folders(self) -> None:
        for folder in (self.folder, self.folder / "configs", self.folder / "logs"):
            preflight.check_folder(folder)
        runtime = self.runtime_dir()
        for folder in (runtime.parent, runtime):
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"cannot make {folder}: {error.strerror}", fix="set XDG_RUNTIME_DIR"
                ) from error
            if not _is_own_folder(folder):
                raise ConfigError(
                    f"{folder} is not a private folder of yours",
                    fix="remove it, or set XDG_RUNTIME_DIR to a folder that only you can enter",
                )
        if not self.secret_file.exists():
            write_private(self.secret_file, os.urandom(32).hex().encode() + b"\n")

    def _write_etcd_configs(self, state: GroupState) -> list[str]:
        """Configure an etcd of our own, empty at every start; its endpoints."""
        names = _named(state, "etcd")
        folders = [self._member_folder(name) for name in names]
        for folder in folders:
            shutil.rmtree(folder / "data", ignore_errors=True)
        token = f"{self.name}-{os.urandom(6).hex()}"
        configurations = etcd.configurations(
            names,
            [folder / "data" for folder in folders],
            token=token,
            addresses=[self._etcd_address(name) for name in names],
        )
        for name, configuration in zip(names, configurations, strict=True):
            write_yaml(self.config_file(name), configuration)
        return [etcd.endpoint(configuration) for configuration in configurations]

    def _etcd_address(self, name: str) -> str:
        """Where a member of an etcd of ours listens."""
        return "127.0.0.1"

    def _master_config(
        self, plan: StartPlan, name: str, number: int, endpoints: Sequence[str]
    ) -> MasterConfig:
        from kvops.store.config import MasterConfig
        from kvops.store.model import PlacementPolicy

        return MasterConfig(
            group=self.name,
            name=name,
            host=f"host-{number}",
            secret_file=str(self.secret_file.absolute()),
            state_dir=str(self._member_folder(name)),
            listen=plan.master_address("listen", number),
            control=plan.master_address("control", number),
            http=plan.master_address("http", number),
            unix_path=str(self.runtime_dir() / f"{name}.sock"),
            placement=PlacementPolicy(plan.placement),
            etcd=list(endpoints),
            etcd_ttl_s=plan.etcd_ttl_s or (etcd.LEASE_TTL_S if plan.etcd_members else ETCD_TTL_S),
            etcd_ca=plan.etcd_ca,
            etcd_cert=plan.etcd_cert,
            etcd_key=plan.etcd_key,
            etcd_user=plan.etcd_user,
            etcd_password_file=plan.etcd_password_file,
        )

    def _store_config(self, plan: StartPlan, state: GroupState, member: Member) -> StoreConfig:
        from kvops.store.config import StoreConfig

        masters = [other.addresses["listen"] for other in state.members if other.role == "master"]
        return StoreConfig(
            group=self.name,
            name=member.name,
            host=member.host,
            numa_node=member.numa_node,
            numa_bind=bool(plan.numa_nodes),
            huge_page_bytes=plan.huge_page_bytes,
            masters=masters,
            secret_file=str(self.secret_file.absolute()),
            state_dir=str(self._member_folder(member.name)),
            listen=f"{plan.store_host}:0",
            http=f"{plan.http.rpartition(':')[0]}:0",
            unix_path=str(self.runtime_dir() / f"{member.name}.sock"),
            segment_size_bytes=plan.segment_size_bytes,
            transports=list(plan.transports),
        )

    def _member_folder(self, name: str) -> Path:
        folder = (self.folder / name).absolute()
        preflight.check_folder(folder)
        return folder

    def _bring_up(
        self, state: GroupState, names: Sequence[str], *, deadline: float, tell: Tell
    ) -> GroupState:
        """Start members at once and wait until all are ready; writes down each step."""
        with ExitStack() as cleanup:
            receiver = cleanup.enter_context(Receiver(self.runtime_dir()))
            env = daemon_environment() | {"NOTIFY_SOCKET": str(receiver.path)}
            starting: dict[int, _Starting] = {}  # by pidfd
            for name in names:
                member = state.member(name)
                for mark in self._seen.glob(f"{name}.*"):
                    mark.unlink(missing_ok=True)
                log_file = self.log_file(name)
                offset = _set_aside(log_file)
                # A process that runs but is not written down would be lost: the two are one step.
                with signals_held():
                    spawned = spawn_detached(
                        self._command(member.role, self.config_file(name)), log_file=log_file, env=env
                    )
                    cleanup.callback(os.close, spawned.pidfd)
                    member = msgspec.structs.replace(
                        member,
                        pid=spawned.identity.pid,
                        started_ticks=spawned.identity.started_ticks,
                        boot_id=spawned.identity.boot_id,
                        started=utc_now(),
                        ready=False,
                        addresses={},
                    )
                    state = state.with_member(member)
                    self._write(state)
                starting[spawned.pidfd] = _Starting(member=member, spawned=spawned, log_offset=offset)
                tell(name, f"starting (pid {spawned.identity.pid})")
            return self._wait_ready(state, starting, receiver, deadline=deadline, tell=tell)

    def _wait_ready(
        self,
        state: GroupState,
        starting: dict[int, _Starting],
        receiver: Receiver,
        *,
        deadline: float,
        tell: Tell,
    ) -> GroupState:
        by_pid = {one.spawned.identity.pid: one for one in starting.values()}
        waiting = set(by_pid)
        poll = select.poll()
        poll.register(receiver.fileno(), select.POLLIN)
        for pidfd in starting:
            poll.register(pidfd, select.POLLIN)
        while waiting:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            ready = [handle for handle, _ in poll.poll(left_ms)]
            # What a process said before it ended counts first: read all messages before looking at ends.
            while (notice := receiver.receive()) is not None:
                one = by_pid.get(notice.pid)
                if one is None or notice.pid not in waiting:
                    continue  # a former start's straggler
                if notice.ready:
                    waiting.discard(notice.pid)
                    state = self._note_ready(state, one, notice)
                    tell(one.member.name, f"ready in {time.monotonic() - one.began_s:.1f} s")
                elif notice.status:
                    tell(one.member.name, notice.status)
            for handle in ready:
                if handle in starting:
                    raise self._ended_while_starting(starting[handle], collect(handle))
            if not ready and left_ms == 0:
                late = [one for pid, one in by_pid.items() if pid in waiting]
                names = ", ".join(one.member.name for one in late)
                raise Unreachable(
                    f"{names} {'was' if len(late) == 1 else 'were'} not ready in time",
                    fix=f"see {self._kvops} logs {late[0].member.name}, or allow more with --timeout",
                )
        return state

    def _note_ready(self, state: GroupState, one: _Starting, notice: Notice) -> GroupState:
        member = msgspec.structs.replace(
            state.member(one.member.name), ready=True, addresses=notice.addresses
        )
        if member.role == "master" and not member.addresses.get("listen"):
            raise StartFailed(
                f"{member.name} did not say where it listens",
                fix=f"see {self._kvops} logs {member.name}",
                log_lines=_tail(self.log_file(member.name), one.log_offset),
            )
        state = state.with_member(member)
        self._write(state)
        if member.role == "master":
            self._pin_addresses(member)
        return state

    def _pin_addresses(self, member: Member) -> None:
        """A restarted master comes back where its stores and clients look for it."""
        from kvops.store.config import MasterConfig

        path = self.config_file(member.name)
        config = load_yaml(path, MasterConfig)
        given = {
            name: member.addresses[name] for name in ("listen", "control", "http") if name in member.addresses
        }
        write_yaml(path, msgspec.structs.replace(config, **given))

    def _ended_while_starting(self, one: _Starting, code: int | None) -> StartFailed:
        name = one.member.name
        if code is not None and code < 0:
            how = f"by {signal.Signals(-code).name}"
        else:
            how = f"with exit code {code}" if code is not None else "at once"
        fix = f"its last log lines say why; all of it: {self._kvops} logs {name}"
        if code == -signal.SIGKILL:
            fix = (
                "if nobody killed it, the kernel did for want of memory (dmesg): use a smaller --segment-size"
            )
        return StartFailed(
            f"{name} ended {how} while starting",
            fix=fix,
            log_lines=_tail(self.log_file(name), one.log_offset),
            # Its own code tells more than "no", unless it makes no sense for a start that failed.
            exit_code=code if code in (2, 3, 5, 70) else 1,
        )

    @contextmanager
    def _undone_on_trouble(self, *, only: Sequence[str] | None = None) -> Iterator[None]:
        """Stop what was started (``only`` these members) when the block does not end well."""
        try:
            yield
        except BaseException:
            with signals_held():  # a second Ctrl-C must not leave processes behind
                state = self.read()
                if state is not None:
                    some = [member for member in state.members if only is None or member.name in only]
                    self._stop(state, some, grace_s=UNDO_GRACE_S, tell=lambda name, text: None)
            raise

    def _stop(
        self,
        state: GroupState,
        members: Sequence[Member],
        *,
        tell: Tell,
        now: bool = False,
        grace_s: float = TERM_GRACE_S,
    ) -> list[Stopped]:
        stopped: list[Stopped] = []
        left: list[Member] = []
        # Stores first: a master that is still there can tell their clients.
        waves = (
            [members]
            if now
            else [[m for m in members if m.role == role] for role in ("store", "master", "etcd")]
        )
        for wave in waves:
            asked: dict[ProcessIdentity, Member] = {}
            for member in wave:
                identity = member.identity
                if identity is None:
                    continue
                # Our own etcd is made anew at every start, and takes seconds to hand over its leadership.
                at_once = now or member.role == "etcd"
                if send_signal(identity, signal.SIGKILL if at_once else signal.SIGTERM):
                    send_signal(identity, signal.SIGCONT)  # a stopped process would not see SIGTERM
                    asked[identity] = member
                else:
                    wait_ended([identity], timeout_s=0)  # collects it, when it was a child of ours
                    stopped.append(
                        Stopped(name=member.name, role=member.role, pid=member.pid, how="had ended")
                    )
            killed = set(asked) if now else set()
            remaining = wait_ended(asked, timeout_s=KILL_GRACE_S if now else grace_s)
            for identity in remaining if not now else ():
                if is_exiting(identity):
                    tell(asked[identity].name, "has ended; the kernel frees its memory")
                else:
                    tell(asked[identity].name, f"did not end within {grace_s:g} s: killed")
                    send_signal(identity, signal.SIGKILL)
                    killed.add(identity)
            if remaining:
                remaining = wait_ended(remaining, timeout_s=(0 if now else KILL_GRACE_S) + state.release_s)
            for identity, member in asked.items():
                if identity in remaining:
                    left.append(member)
                    continue
                how: Literal["terminated", "killed"] = "killed" if identity in killed else "terminated"
                stopped.append(Stopped(name=member.name, role=member.role, pid=member.pid, how=how))
                tell(member.name, how)
        gone = {one.name for one in stopped}
        for member in members:
            if member.name in gone:
                state = state.with_member(
                    msgspec.structs.replace(member, pid=0, started_ticks=0, ready=False, addresses={})
                )
        self._write(state)
        if left:
            names = ", ".join(f"{member.name} (pid {member.pid})" for member in left)
            raise LeftBehind(
                f"{names} did not end, even when killed",
                fix="the kernel holds it: see cat /proc/PID/stack and dmesg",
            )
        return stopped


def _named(state: GroupState, role: Role) -> list[str]:
    return [member.name for member in state.members if member.role == role]


def local_groups(state_dir: Path) -> list[str]:
    """Names of the groups that were started under this folder."""
    try:
        return sorted(path.parent.name for path in (state_dir / "groups").glob("*/group.yaml"))
    except OSError:
        return []


def _is_own_folder(path: Path) -> bool:
    """A real folder (no link) of this user that nobody else can enter."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _set_aside(log_file: Path) -> int:
    """Keep a long log as ``.1``; returns where the next run's lines begin."""
    try:
        size = log_file.stat().st_size
        if size > LOG_BYTES_MAX:
            log_file.replace(log_file.with_suffix(".log.1"))
            return 0
    except OSError:
        return 0
    return size


def _tail(log_file: Path, offset: int) -> list[str]:
    """The last lines written since ``offset``."""
    try:
        with log_file.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - LOG_TAIL_BYTES))
            text = file.read(LOG_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-LOG_TAIL_LINES:]


__all__ = [
    "GroupState",
    "LocalGroup",
    "Member",
    "StartPlan",
    "Stopped",
    "daemon_environment",
    "default_state_dir",
    "local_groups",
    "serve_command",
]
