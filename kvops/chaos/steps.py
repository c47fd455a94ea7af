"""
Undo as plain data: what takes a fault back, carried out without the fault's code.

Each step says whether it still has anything to do (``done``), does it (``act``), and names the command a person
would type (``command``). All are idempotent, and check for themselves whom they would touch: a pid counts
only with its start time and boot, a network namespace with its inode, a helper process with its token. After
a reboot most have nothing left to do; those that have are ``persistent``.
"""

from __future__ import annotations

import base64
import hashlib
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from kvops.chaos import netns, outside, procs
from kvops.chaos.procs import with_word
from kvops.errors import LeftBehind
from kvops.fleet.process import ProcessIdentity, identify, is_running, is_stopped, send_signal, wait_ended

KILL_GRACE_S: Final = 2.0
RESTART_TIMEOUT_S: Final = 30.0
MARK: Final = "KVOPS_CHAOS_MARK"  # in the environment of what is started wrong on purpose
_MIDDLEMAN: Final = (
    "import subprocess, sys;subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)"
)
PROCESSES_MAX: Final = 4096  # of one cgroup: more is nobody's role


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What all steps share."""

    persistent: ClassVar[bool] = False  # a reboot does not do it

    def done(self) -> bool:
        """Whether nothing is left to do."""
        raise NotImplementedError

    def act(self) -> None:
        """
        Do it.

        Raises:
            OSError, KvopsError: It could not be done now.
        """
        raise NotImplementedError

    def command(self) -> str:
        """What a person would type."""
        raise NotImplementedError


class SignalProcess(Step, frozen=True, kw_only=True, tag="signal_process"):
    """Send a process a signal: CONT to one that was stopped."""

    pid: int
    started_ticks: int  # /proc/<pid>/stat field 22
    boot_id: str
    signal: str = "CONT"

    @property
    def identity(self) -> ProcessIdentity:
        """Whom it is for."""
        return ProcessIdentity(pid=self.pid, started_ticks=self.started_ticks, boot_id=self.boot_id)

    def done(self) -> bool:
        return not is_stopped(self.identity) if self.signal == "CONT" else not is_running(self.identity)

    def act(self) -> None:
        send_signal(self.identity, signal.Signals[f"SIG{self.signal}"])

    def command(self) -> str:
        return f"kill -{self.signal} {self.pid}"


class KillHolder(Step, frozen=True, kw_only=True, tag="kill_holder"):
    """End the helper processes that carry a token on their command line."""

    token: str

    def done(self) -> bool:
        return not list(with_word(self.token))

    def act(self) -> None:
        found = list(with_word(self.token))
        for identity in found:
            send_signal(identity, signal.SIGKILL)
            send_signal(identity, signal.SIGCONT)
        wait_ended(found, timeout_s=KILL_GRACE_S)

    def command(self) -> str:
        return f"pkill -KILL -f {self.token}"


class DeleteNftTable(Step, frozen=True, kw_only=True, tag="delete_nft_table"):
    """Remove a table of ours; nobody else's rules are touched."""

    netns: int  # inode
    table: str
    family: str = "inet"

    def done(self) -> bool:
        result = netns.run_in(self.netns, ["nft", "list", "table", self.family, self.table])
        if result is None:
            return True
        return result.returncode != 0 and "No such file" in result.stderr

    def act(self) -> None:
        netns.run_in(self.netns, ["nft", "delete", "table", self.family, self.table])

    def command(self) -> str:
        return f"{_enter(self.netns)}nft delete table {self.family} {self.table}"


class DeleteQdisc(Step, frozen=True, kw_only=True, tag="delete_qdisc"):
    """Remove a root queueing discipline of ours, known by its handle; any other is left alone."""

    netns: int
    device: str
    handle: str  # "7f01:"

    def done(self) -> bool:
        result = netns.run_in(self.netns, ["tc", "qdisc", "show", "dev", self.device])
        return result is None or f" {self.handle} " not in result.stdout

    def act(self) -> None:
        netns.run_in(self.netns, ["tc", "qdisc", "del", "dev", self.device, "root", "handle", self.handle])

    def command(self) -> str:
        return f"{_enter(self.netns)}tc qdisc del dev {self.device} root handle {self.handle}"


class RestoreValue(Step, frozen=True, kw_only=True, tag="restore_value"):
    """Write a kernel file (sysctl, cgroup) back to what it said; a file that is gone needs nothing."""

    path: str
    value: str

    def done(self) -> bool:
        try:
            return Path(self.path).read_text().strip() == self.value.strip()
        except FileNotFoundError:
            return True

    def act(self) -> None:
        Path(self.path).write_text(self.value)

    def command(self) -> str:
        return f"echo {shlex.quote(self.value.strip())} > {shlex.quote(self.path)}"


class RemoveCgroup(Step, frozen=True, kw_only=True, tag="remove_cgroup"):
    """Move what is in a cgroup of ours back to where it was, and remove the cgroup."""

    path: str
    back: str  # the cgroup whose processes these were

    def done(self) -> bool:
        return not Path(self.path).exists()

    def act(self) -> None:
        limit = Path(self.path) / "memory.limit_in_bytes"
        if limit.exists():
            limit.write_text("-1")  # wakes whoever waits for memory in it
        for pid in (Path(self.path) / "cgroup.procs").read_text().split()[:PROCESSES_MAX]:
            try:
                (Path(self.back) / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue  # it ended
        Path(self.path).rmdir()

    def command(self) -> str:
        here, back = shlex.quote(self.path), shlex.quote(self.back)
        return f"for p in $(cat {here}/cgroup.procs); do echo $p > {back}/cgroup.procs; done; rmdir {here}"


class RestoreRlimit(Step, frozen=True, kw_only=True, tag="restore_rlimit"):
    """Give a process its limit back."""

    pid: int
    started_ticks: int
    boot_id: str
    limit: str  # "NOFILE"
    soft: int
    hard: int

    @property
    def identity(self) -> ProcessIdentity:
        """Whose limit."""
        return ProcessIdentity(pid=self.pid, started_ticks=self.started_ticks, boot_id=self.boot_id)

    def done(self) -> bool:
        if not is_running(self.identity):
            return True
        try:
            return resource.prlimit(self.pid, self._number) == (self.soft, self.hard)
        except ProcessLookupError:
            return True

    def act(self) -> None:
        if is_running(self.identity):
            resource.prlimit(self.pid, self._number, (self.soft, self.hard))

    @property
    def _number(self) -> int:
        return int(getattr(resource, f"RLIMIT_{self.limit}"))

    def command(self) -> str:
        soft, hard = (("unlimited" if one < 0 else str(one)) for one in (self.soft, self.hard))
        return f"prlimit --pid {self.pid} --{self.limit.lower()}={soft}:{hard}"


class RestoreFile(Step, frozen=True, kw_only=True, tag="restore_file"):
    """Give a file its former content, in one step; without content it was not there before."""

    persistent: ClassVar[bool] = True
    path: str
    content: str | None = None  # base64
    mode: int = 0o600

    @staticmethod
    def of(path: Path) -> RestoreFile:
        """What puts this file back as it is now."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return RestoreFile(path=str(path))
        return RestoreFile(
            path=str(path), content=base64.b64encode(data).decode(), mode=path.stat().st_mode & 0o7777
        )

    def done(self) -> bool:
        try:
            data = Path(self.path).read_bytes()
        except FileNotFoundError:
            return self.content is None
        return self.content is not None and data == base64.b64decode(self.content)

    def act(self) -> None:
        path = Path(self.path)
        if self.content is None:
            path.unlink(missing_ok=True)
            return
        beside = path.with_name(f".{path.name}.kvops-undo")
        beside.unlink(missing_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.mode)
        try:
            os.write(handle, base64.b64decode(self.content))
            os.fsync(handle)
        finally:
            os.close(handle)
        beside.replace(path)

    def command(self) -> str:
        if self.content is None:
            return f"rm -f {shlex.quote(self.path)}"
        digest = hashlib.sha256(base64.b64decode(self.content)).hexdigest()[:16]
        return f"kvops chaos recover    # puts {self.path} back (sha256 {digest}…)"


class RemovePath(Step, frozen=True, kw_only=True, tag="remove_path"):
    """Remove a file or an empty folder that we made."""

    persistent: ClassVar[bool] = True
    path: str

    def done(self) -> bool:
        return not os.path.lexists(self.path)

    def act(self) -> None:
        path = Path(self.path)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)

    def command(self) -> str:
        return f"rm -d {shlex.quote(self.path)}"


class RestartRole(Step, frozen=True, kw_only=True, tag="restart_role"):
    """Start a member of a local group again, if it does not run."""

    persistent: ClassVar[bool] = True
    state_dir: str
    group: str
    member: str
    argv: list[str] = []  # what it was run as; empty: as kvops start does
    in_lab: bool = False  # on a node of its own

    def done(self) -> bool:
        # Imported here: only this step needs to read a group's state.
        from kvops.fleet.local import LocalGroup

        state = LocalGroup(Path(self.state_dir), self.group).read()
        if state is None or all(one.name != self.member for one in state.members):
            return True  # the group was removed meanwhile
        found = state.member(self.member)
        if found.pid == 0:
            return all(one.pid == 0 for one in state.members)  # the whole group was stopped on purpose
        return found.running and found.ready

    def act(self, *, more_env: Mapping[str, str] | None = None) -> None:
        """As any step; with ``more_env`` in the environment of the member."""
        env = {**os.environ, "PYTHONPATH": package_root(), **(more_env or {})}
        result = subprocess.run(
            self._argv(),
            capture_output=True,
            text=True,
            timeout=RESTART_TIMEOUT_S + 5,
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=env,
        )
        if result.returncode != 0:
            said = (result.stderr or result.stdout).strip().splitlines()
            raise LeftBehind(
                f"{self.member} did not start: {said[-1] if said else 'no message'}", fix=self.command()
            )

    def _argv(self) -> list[str]:
        words = [self.state_dir, self.group, self.member, *self.argv]
        return [sys.executable, "-P", "-m", "kvops.chaos.lab", "restart", *words]

    def command(self) -> str:
        if self.in_lab:
            return (
                f"python -m kvops.chaos.lab restart {shlex.quote(self.state_dir)} {self.group} {self.member}"
            )
        return f"kvops restart -g {self.group} --state-dir {shlex.quote(self.state_dir)} {self.member}"


class StartProcess(Step, frozen=True, kw_only=True, tag="start_process"):
    """Run a program again, as it was run, unless one with the same command line runs in the same namespace."""

    persistent: ClassVar[bool] = True
    argv: list[str]
    env: dict[str, str]
    cwd: str
    log_file: str
    netns: int = 0  # inode; 0: whichever we are in

    def _running(self) -> bool:
        for identity in procs.running(self.argv):
            try:
                if not self.netns or netns.inode_of(identity.pid) == self.netns:
                    return True
            except OSError:
                continue  # it ended
        return False

    def done(self) -> bool:
        if self.netns and self.netns != netns.inode_of():
            handle = netns.open_netns(self.netns)
            if handle is None:
                return True  # its node is gone with all that was on it
            os.close(handle)
        return self._running()

    def act(self) -> None:
        prefix: list[str] = []
        handle = None
        if self.netns and self.netns != netns.inode_of():
            handle = netns.open_netns(self.netns)
            prefix = ["nsenter", f"--net=/proc/self/fd/{handle}"]
        log = os.open(
            self.log_file or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        try:
            # Through a shell-less middleman that exits, so that the program becomes nobody's child.
            subprocess.run(
                [*prefix, sys.executable, "-I", "-W", "ignore", "-c", _MIDDLEMAN, *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                cwd=self.cwd or "/",
                close_fds=True,
                pass_fds=() if handle is None else (handle,),
                check=True,
                timeout=10,
            )
        finally:
            os.close(log)
            if handle is not None:
                os.close(handle)

    def command(self) -> str:
        return f"{_enter(self.netns) if self.netns else ''}{shlex.join(self.argv)}"


class RestoreMemory(Step, frozen=True, kw_only=True, tag="restore_memory"):
    """Write bytes of a process's memory back, where they are still what we made them: used anew, they are not ours."""

    pid: int
    started_ticks: int
    boot_id: str
    spots: list[tuple[int, int, int]]  # address, byte before, byte after

    @property
    def identity(self) -> ProcessIdentity:
        """Whose memory."""
        return ProcessIdentity(pid=self.pid, started_ticks=self.started_ticks, boot_id=self.boot_id)

    def _ours(self) -> list[tuple[int, int]]:
        if not is_running(self.identity):
            return []
        found = []
        with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
            for address, before, after in self.spots:
                memory.seek(address)
                if memory.read(1) == bytes([after]):
                    found.append((address, before))
        return found

    def done(self) -> bool:
        return not self._ours()

    def act(self) -> None:
        found = self._ours()
        with Path(f"/proc/{self.pid}/mem").open("r+b", buffering=0) as memory:
            for address, before in found:
                memory.seek(address)
                memory.write(bytes([before]))

    def command(self) -> str:
        return f"kvops chaos recover    # puts {len(self.spots)} bytes of pid {self.pid} back"


class EndMarked(Step, frozen=True, kw_only=True, tag="end_marked"):
    """End the processes that were started with a mark of ours: a shared object, or a word of their environment."""

    token: str

    def _found(self) -> list[ProcessIdentity]:
        found = []
        mark = f"{MARK}={self.token}".encode()
        for pid in procs.pids():
            try:
                folder = Path(f"/proc/{pid}")
                words = (folder / "environ").read_bytes().split(b"\0")
                loaded = mark in words or self.token in (folder / "maps").read_text()
            except OSError:
                continue  # it ended, or is not ours
            identity = identify(pid) if loaded else None
            if identity is not None:
                found.append(identity)
        return found

    def done(self) -> bool:
        return not self._found()

    def act(self) -> None:
        found = self._found()
        for identity in found:
            send_signal(identity, signal.SIGTERM)
        for identity in wait_ended(found, timeout_s=KILL_GRACE_S):
            send_signal(identity, signal.SIGKILL)
        wait_ended(found, timeout_s=KILL_GRACE_S)

    def command(self) -> str:
        return f"kill $(grep -l {self.token} /proc/[0-9]*/maps | cut -d/ -f3)"


class Undrain(Step, frozen=True, kw_only=True, tag="undrain"):
    """Lift the drain of a store."""

    persistent: ClassVar[bool] = True
    state_dir: str
    group: str
    store: str

    def done(self) -> bool:
        said = outside.kvops_json(self.state_dir, self.group, "status")
        if said is None or "holds" not in said:
            return False
        return all(self.store not in hold.get("stores", []) for hold in said["holds"])

    def act(self) -> None:
        outside.kvops_json(self.state_dir, self.group, "undrain", self.store)

    def command(self) -> str:
        return f"kvops undrain -g {self.group} --state-dir {shlex.quote(self.state_dir)} {self.store}"


class RemoveNetns(Step, frozen=True, kw_only=True, tag="remove_netns"):
    """Remove a named network namespace of ours, with its links."""

    ns_name: str

    def done(self) -> bool:
        return not os.path.lexists(netns.NAMED / self.ns_name)

    def act(self) -> None:
        subprocess.run(["ip", "netns", "del", self.ns_name], capture_output=True, timeout=5, check=False)

    def command(self) -> str:
        return f"ip netns del {self.ns_name}"


UndoStep = (
    SignalProcess
    | KillHolder
    | DeleteNftTable
    | DeleteQdisc
    | RestoreValue
    | RemoveCgroup
    | RestoreRlimit
    | RestoreFile
    | RemovePath
    | RestartRole
    | StartProcess
    | EndMarked
    | RestoreMemory
    | Undrain
    | RemoveNetns
)


def encode(steps: list[UndoStep]) -> bytes:
    """As ledger and guardian keep them."""
    return msgspec.json.encode(steps)


def decode(raw: bytes | msgspec.Raw) -> list[UndoStep]:
    """
    Read them back.

    Raises:
        LeftBehind: They are of a kvops that this one does not understand.
    """
    try:
        return msgspec.json.decode(raw, type=list[UndoStep])
    except msgspec.DecodeError as error:
        raise LeftBehind(
            f"an undo list cannot be read: {error}", fix="use the kvops that wrote it"
        ) from error


def _enter(inode: int) -> str:
    """How a command begins that runs in a namespace, for a person: through a process that is in it."""
    if inode == netns.inode_of():
        return ""
    for pid in procs.pids():
        try:
            if netns.inode_of(pid) == inode:
                return f"nsenter -t {pid} -n "
        except OSError:
            continue
    for path in netns.NAMED.iterdir() if netns.NAMED.is_dir() else ():
        try:
            if path.stat().st_ino == inode:
                return f"ip netns exec {path.name} "
        except OSError:
            continue  # somebody removed that one while we looked
    return "# namespace has ended: "


def package_root() -> str:
    """Where this very kvops is imported from, for the processes that we start."""
    return str(Path(__file__).resolve().parents[2])
