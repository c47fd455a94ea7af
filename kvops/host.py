"""
One machine as kvops sees it: read a file, list a folder, run a program.

Three kinds share the protocol :class:`Host`: this machine, a machine over SSH, and a saved snapshot of
either. None of them raises for what a look at a strange machine may meet (no such file, no permission, no
such program, a program that hangs): the answer carries it as a :class:`Sight`, because "absent",
"unreadable" and "not collected" are three different facts and none of them means zero.

The snapshot format is one folder (or tar) a host::

    meta.json          what was collected, where and by whom
    root/...           files at their absolute path
    root.t1/...        second sample: only files whose content changed
    cmd/<slug>.txt     standard output of one command, cmd/<slug>.err.txt its standard error
    cmd.t1/<slug>.txt  second sample of that command
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import select
import shlex
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvops.errors import AuthFailed, ConfigError, KvopsError, Unreachable

if TYPE_CHECKING:
    import subprocess

    import paramiko

READ_BYTES_MAX = 8 << 20  # one file or one command's output; more is cut, never held
COMMAND_TIMEOUT_S = 5.0
LINK_DEPTH_MAX = 40  # as the kernel's own limit on nested symbolic links (MAXSYMLINKS)
SLUG_LENGTH_MAX = 120


class Sight(StrEnum):
    """Whether something could be seen, and if not, why."""

    PRESENT = "present"
    ABSENT = "absent"  # we looked, and it is not there
    UNREADABLE = "unreadable"  # it is there (or may be), and we were refused
    NOT_COLLECTED = "not collected"  # nobody looked
    NO_TOOL = "program not installed"
    FAILED = "command failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a read gave: the text when PRESENT, otherwise the reason in words."""

    text: str
    sight: Sight = Sight.PRESENT
    detail: str = ""

    @property
    def present(self) -> bool:
        return self.sight is Sight.PRESENT


@dataclass(frozen=True, slots=True)
class Listing:
    """The names in a folder when PRESENT, in sorted order."""

    names: tuple[str, ...]
    sight: Sight = Sight.PRESENT
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """One finished program. ``sight`` is PRESENT whenever it ran to its end, whatever its return code."""

    argv: tuple[str, ...]
    stdout: str = ""
    stderr: str = ""
    return_code: int | None = None
    sight: Sight = Sight.PRESENT
    detail: str = ""

    @property
    def file(self) -> str:
        """Where a snapshot keeps this output, relative to its folder."""
        return f"cmd/{command_slug(self.argv)}.txt"


class Host(Protocol):
    """A machine that can be looked at. ``run`` takes an argument list and never a shell string."""

    @property
    def name(self) -> str: ...

    def read(self, path: str, *, limit: int = READ_BYTES_MAX) -> Reading: ...

    def listdir(self, path: str) -> Listing: ...

    def run(self, *argv: str, timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult: ...


def command_slug(argv: Iterable[str]) -> str:
    """The file name a snapshot gives to a command's output: ``ip_route_show``."""
    return re.sub(r"[^A-Za-z0-9._=-]", "-", "_".join(argv))[:SLUG_LENGTH_MAX]


def _sight_of(error: OSError) -> Sight:
    return Sight.ABSENT if error.errno in (errno.ENOENT, errno.ENOTDIR) else Sight.UNREADABLE


def _errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "EIO")


class LocalHost:
    """The machine we run on."""

    def __init__(self, name: str = "") -> None:
        self._name = name or os.uname().nodename

    @property
    def name(self) -> str:
        return self._name

    def read(self, path: str, *, limit: int = READ_BYTES_MAX) -> Reading:
        """Read at most ``limit`` bytes; a pipe without a writer or a device never blocks us."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return Reading("", _sight_of(error), _errno_name(error))
        try:
            chunks: list[bytes] = []
            left = limit
            while left > 0 and (chunk := os.read(fd, min(left, 1 << 20))):
                chunks.append(chunk)
                left -= len(chunk)
        except OSError as error:
            return Reading("", _sight_of(error), _errno_name(error))
        finally:
            os.close(fd)
        return Reading(b"".join(chunks).decode("utf-8", "replace"))

    def listdir(self, path: str) -> Listing:
        try:
            return Listing(tuple(sorted(os.listdir(path))))  # noqa: PTH208 - names only, on hot path of collection
        except OSError as error:
            return Listing((), _sight_of(error), _errno_name(error))

    def run(self, *argv: str, timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
        """Run a program in a process group of its own, so that one that hangs dies with all its children."""
        import shutil
        import subprocess

        if shutil.which(argv[0]) is None:
            return CommandResult(argv=argv, sight=Sight.NO_TOOL, detail=f"{argv[0]} is not installed")
        environment = {**os.environ, "LC_ALL": "C", "LANG": "C", "TERM": "dumb"}
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return CommandResult(argv=argv, sight=Sight.UNREADABLE, detail=_errno_name(error))
        with process:
            stdout, stderr, timed_out = _drain(process, timeout_s)
        if timed_out:
            return CommandResult(
                argv=argv,
                stdout=stdout,
                stderr=stderr,
                sight=Sight.TIMED_OUT,
                detail=f"gave up after {timeout_s:g} s",
            )
        return CommandResult(argv=argv, stdout=stdout, stderr=stderr, return_code=process.returncode)


def _drain(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[str, str, bool]:
    """Read both pipes to their end, at most READ_BYTES_MAX each; kill the group when the time is over."""
    import subprocess

    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + timeout_s
    buffers: dict[int, bytearray] = {
        process.stdout.fileno(): bytearray(),
        process.stderr.fileno(): bytearray(),
    }
    open_fds = list(buffers)
    timed_out = False
    while open_fds:
        left = deadline - time.monotonic()
        ready = select.select(open_fds, [], [], max(left, 0))[0] if left > 0 else []
        if not ready:
            timed_out = True
            break
        for fd in ready:
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                open_fds.remove(fd)
            elif len(buffers[fd]) < READ_BYTES_MAX:
                buffers[fd] += chunk
    if not timed_out:
        try:
            process.wait(max(deadline - time.monotonic(), 0.05))
        except subprocess.TimeoutExpired:
            timed_out = True
    if timed_out:
        with contextlib.suppress(ProcessLookupError):  # it ended between the look and the signal
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    out, err = (
        bytes(buffers[pipe.fileno()]).decode("utf-8", "replace") for pipe in (process.stdout, process.stderr)
    )
    return out, err, timed_out


@dataclass(frozen=True, slots=True, kw_only=True)
class SshLogin:
    """How one host is reached over SSH."""

    name: str
    address: str
    user: str | None = None  # our own by default
    port: int = 22
    key_file: str | None = None  # the only key to offer; agent and default keys otherwise
    known_hosts: str | None = None  # accepted host keys; the user's and the system's by default

    def connect(self, timeout_s: float) -> SshHost:
        """Open it; raises as :class:`SshHost` does."""
        return SshHost(
            self.address,
            name=self.name,
            user=self.user,
            port=self.port,
            key_file=self.key_file,
            known_hosts=self.known_hosts,
            timeout_s=timeout_s,
        )


def _fingerprint(key: paramiko.PKey) -> str:
    """As ``ssh-keygen -l`` prints it."""
    import base64
    import hashlib

    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


class SshHost:
    """
    A machine over SSH. Host keys must be known: an unknown or changed key refuses, as ``ssh`` does in batch
    mode.

    Raises:
        AuthFailed: The key of the host, or ours, is not accepted.
        Unreachable: No connection within ``timeout_s``.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "",
        user: str | None = None,
        port: int = 22,
        key_file: str | None = None,
        known_hosts: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        import paramiko

        self._name = name or address
        self._client = paramiko.SSHClient()
        self._client.set_missing_host_key_policy(paramiko.RejectPolicy())
        try:
            if known_hosts is None:
                self._client.load_system_host_keys()
            else:
                self._client.load_host_keys(known_hosts)
            self._client.connect(
                address,
                port=port,
                username=user,
                key_filename=key_file,
                timeout=timeout_s,
                banner_timeout=timeout_s,
                auth_timeout=timeout_s,
                channel_timeout=timeout_s,
                look_for_keys=key_file is None,
                allow_agent=key_file is None,
            )
        except paramiko.BadHostKeyException as error:
            self._client.close()
            place = address if port == 22 else f"[{address}]:{port}"
            raise AuthFailed(
                f"{self._name}: its host key is {_fingerprint(error.key)}, not "
                f"{_fingerprint(error.expected_key)} as known: a new installation, or not the host it says",
                fix=f"compare the fingerprint on its console, then: ssh-keygen -R '{place}'"
                + (f" -f {known_hosts}" if known_hosts else ""),
            ) from error
        except paramiko.AuthenticationException as error:
            self._client.close()
            raise AuthFailed(
                f"{self._name}: {error}", fix=f"check the keys with: ssh -p {port} {address} true"
            ) from error
        except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
            self._client.close()
            if "not found in known_hosts" in str(error):
                raise AuthFailed(
                    f"{self._name}: its host key is not known",
                    fix=f"compare its fingerprint, then: ssh-keyscan -p {port} {address} >> "
                    + (known_hosts or "~/.ssh/known_hosts"),
                ) from error
            raise Unreachable(
                f"{self._name}: {getattr(error, 'strerror', None) or error or type(error).__name__}",
                fix=f"try: ssh -p {port} {address} true",
            ) from error

    @property
    def name(self) -> str:
        return self._name

    def close(self) -> None:
        self._client.close()

    def read(self, path: str, *, limit: int = READ_BYTES_MAX) -> Reading:
        result = self.run("head", "-c", str(limit), "--", path)
        return _reading_of(result, result.stdout)

    def listdir(self, path: str) -> Listing:
        result = self.run("ls", "-1A", "--", path)
        reading = _reading_of(result, result.stdout)
        return Listing(tuple(sorted(reading.text.splitlines())), reading.sight, reading.detail)

    def run(self, *argv: str, timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
        """Run a program there. SSH carries one string: every argument is quoted, nothing is expanded."""
        return self.run_with_input(argv, b"", timeout_s=timeout_s)

    def converse(self, argv: tuple[str, ...], *, timeout_s: float) -> paramiko.Channel:
        """
        Start a program there and give its streams.

        Raises:
            Unreachable: It cannot be started within ``timeout_s``.
        """
        import paramiko

        transport = self._client.get_transport()
        try:
            if transport is None:
                raise EOFError("the connection is closed")
            channel = transport.open_session(timeout=timeout_s)
            channel.settimeout(timeout_s)
            channel.exec_command("LC_ALL=C " + shlex.join(argv))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise Unreachable(
                f"{self._name}: {error or type(error).__name__}", fix="look at the host's sshd"
            ) from error
        return channel

    def run_with_input(
        self, argv: tuple[str, ...], data: bytes, *, timeout_s: float, limit: int = READ_BYTES_MAX
    ) -> CommandResult:
        """Run a program there with ``data`` on its standard input; output beyond ``limit`` is cut."""
        deadline = time.monotonic() + timeout_s
        transport = self._client.get_transport()
        if transport is None:
            return CommandResult(argv=argv, sight=Sight.FAILED, detail="the connection is closed")
        try:
            channel = transport.open_session(timeout=timeout_s)
            channel.settimeout(timeout_s)
            channel.exec_command("LC_ALL=C " + shlex.join(argv))
            if data:
                channel.sendall(data)
            channel.shutdown_write()
            stdout, stderr, ended = _drain_channel(channel, deadline, limit)
            if not ended:
                channel.close()
                return CommandResult(
                    argv=argv, sight=Sight.TIMED_OUT, detail=f"gave up after {timeout_s:g} s"
                )
            code = channel.recv_exit_status()
        except (OSError, EOFError, KvopsError) as error:
            return CommandResult(argv=argv, sight=Sight.TIMED_OUT, detail=str(error) or type(error).__name__)
        except Exception as error:
            if type(error).__module__.split(".")[0] != "paramiko":
                raise
            return CommandResult(argv=argv, sight=Sight.FAILED, detail=str(error))
        sight = Sight.NO_TOOL if code == 127 else Sight.PRESENT
        return CommandResult(argv=argv, stdout=stdout, stderr=stderr, return_code=code, sight=sight)


def _drain_channel(channel: paramiko.Channel, deadline: float, limit: int) -> tuple[str, str, bool]:
    out, err = bytearray(), bytearray()
    while time.monotonic() < deadline:
        idle = True
        if channel.recv_ready():
            chunk = channel.recv(1 << 16)
            if len(out) < limit:
                out += chunk
            idle = False
        if channel.recv_stderr_ready():
            chunk = channel.recv_stderr(1 << 16)
            if len(err) < READ_BYTES_MAX:
                err += chunk
            idle = False
        if idle:
            if channel.exit_status_ready() and not channel.recv_ready() and not channel.recv_stderr_ready():
                return out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), True
            # A channel has no file descriptor that covers both streams and the exit status.
            select.select([], [], [], 0.01)
    return out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), False


def _reading_of(result: CommandResult, text: str) -> Reading:
    if result.sight is not Sight.PRESENT:
        return Reading("", result.sight, result.detail)
    if result.return_code == 0:
        return Reading(text)
    absent = "No such file" in result.stderr or "Not a directory" in result.stderr
    return Reading("", Sight.ABSENT if absent else Sight.UNREADABLE, result.stderr.strip()[-200:])


class SnapshotFiles(Protocol):
    """Where a snapshot's bytes lie: a folder, or memory."""

    def get(self, name: str) -> bytes | None:
        """Content of ``root/proc/cmdline``, at most READ_BYTES_MAX; None if there is no such file."""

    def children(self, name: str) -> tuple[str, ...] | None:
        """Names inside a folder; None if there is no such folder."""


class FolderFiles:
    """A snapshot's files in a folder on disk, read when asked for. Symbolic links are not followed."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)
        self._names: dict[str, frozenset[str] | None] = {}

    def _list(self, name: str) -> frozenset[str] | None:
        """
        Names inside a folder, remembered: most questions are about files that are not there.

        Symbolic links are left out, and so is whatever lies behind one: in a snapshot links are data of
        meta.json.
        """
        if name not in self._names:
            parent, _, last = name.rpartition("/")
            above = self._list(parent) if name else frozenset({last})
            self._names[name] = None
            if above is not None and last in above:
                try:
                    with os.scandir(f"{self._folder}/{name}") as entries:
                        self._names[name] = frozenset(e.name for e in entries if not e.is_symlink())
                except (OSError, ValueError):
                    pass  # no folder: the same as not there
        return self._names[name]

    def get(self, name: str) -> bytes | None:
        parent, _, last = name.rpartition("/")
        names = self._list(parent)
        if names is None or last not in names:
            return None
        path = f"{self._folder}/{name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError):
            return None
        try:
            chunk = os.read(fd, 1 << 16)
            if len(chunk) < 1 << 16:
                return chunk
            data = bytearray(chunk)
            while len(data) < READ_BYTES_MAX and (chunk := os.read(fd, 1 << 20)):
                data += chunk
            return bytes(data[:READ_BYTES_MAX])
        except OSError:
            return None
        finally:
            os.close(fd)

    def children(self, name: str) -> tuple[str, ...] | None:
        names = self._list(name)
        return None if names is None else tuple(names)


class MemoryFiles:
    """A snapshot's files in memory: from a tar, from the other end of SSH, or made by a test."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._children: dict[str, dict[str, None]] = {}
        for name in files:
            child = name
            while "/" in child:
                parent, _, last = child.rpartition("/")
                known = self._children.setdefault(parent, {})
                if last in known:
                    break
                known[last] = None
                child = parent

    def get(self, name: str) -> bytes | None:
        return self._files.get(name)

    def children(self, name: str) -> tuple[str, ...] | None:
        names = self._children.get(name)
        return None if names is None else tuple(names)


class _Above(NamedTuple):
    """What a snapshot's meta.json says about a path or any folder above it."""

    covered: bool = False  # it was to be collected completely
    left_out: bool = False
    refused: str = ""  # the errno's name of the nearest folder that could not be read


_NOTHING_ABOVE = _Above()


@dataclass(slots=True)
class SnapshotHost:
    """
    A host as it was when it was collected. The same questions, the same answers, a month later.

    Args:
        meta: The decoded ``meta.json`` (already checked to be an object).
        files: Where the rest lies.

    Source: the rules of the format. A path is resolved through ``links`` component by component; then
    ``errors``, then the file, then "inside scope means absent", then "not collected".
    """

    meta: dict[str, Any]
    files: SnapshotFiles
    _resolved: dict[str, str] = field(default_factory=dict)
    _children: dict[str, set[str]] = field(default_factory=dict)
    _links: dict[str, str] = field(default_factory=dict)
    _errors: dict[str, str] = field(default_factory=dict)
    _covered: dict[str, bool] = field(default_factory=dict)
    _known_above: dict[str, _Above] = field(default_factory=dict)
    _readings: dict[tuple[str, int], Reading] = field(default_factory=dict)
    _gone: frozenset[str] = frozenset()
    _argv: dict[tuple[str, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._links = _string_map(self.meta, "links")
        self._errors = _string_map(self.meta, "errors")
        # Below a path of the scope everything was collected, below one that was left out nothing was.
        self._covered = {path.rstrip("/"): True for path in _strings(self.meta, "scope")}
        self._covered |= {path.rstrip("/"): False for path in _strings(self.meta, "not_collected")}
        self._gone = frozenset(_strings(self.meta, "gone"))
        for path in (*self._links, *self._errors, *(path for path, _ in self.devices())):
            child = path
            while (parent := child.rpartition("/")[0]) and child not in self._children.get(parent, ()):
                self._children.setdefault(parent, set()).add(child)
                child = parent
        commands = self.meta.get("cmd", {})
        if not isinstance(commands, dict):
            raise ConfigError('meta.json: "cmd" is not an object', fix="collect the snapshot again")
        for name, entry in commands.items():
            argv = entry.get("argv") if isinstance(entry, dict) else None
            if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
                raise ConfigError(
                    f'meta.json: "cmd" entry {name!r} has no list "argv"', fix="collect the snapshot again"
                )
            self._argv[tuple(argv)] = name

    @property
    def name(self) -> str:
        return str(self.meta.get("node") or "")

    @property
    def has_window(self) -> bool:
        """Whether a second sample was taken."""
        return self.window_s is not None

    @property
    def window_s(self) -> float | None:
        """Seconds between the two samples; None if there is only one."""
        samples = self.meta.get("samples")
        if not isinstance(samples, list) or len(samples) < 2:
            return None
        try:
            window = float(samples[1]["t"]) - float(samples[0]["t"])
        except (KeyError, TypeError, ValueError):
            return None
        return window if window > 0 else None

    def devices(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Character devices under /dev/infiniband with type, major, minor, mode."""
        entries = self.meta.get("dev") or []
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("path"), str):
                yield entry["path"], entry

    def resolve(self, path: str, _depth: int = 0) -> str:
        """The path with every link on the way followed; the last component too."""
        known = self._resolved.get(path)
        if known is not None:
            return known
        parent, _, last = path.rpartition("/")
        full = f"{self.resolve(parent, _depth) if parent else ''}/{last}"
        target = self._links.get(full)
        if target is not None and _depth < LINK_DEPTH_MAX:
            full = self.resolve(
                posixpath.normpath(posixpath.join(posixpath.dirname(full), target)), _depth + 1
            )
        self._resolved[path] = full
        return full

    def readlink(self, path: str) -> str | None:
        """Where a link points, None if the path is no link that was collected."""
        parent, _, last = path.rpartition("/")
        return self._links.get(f"{self.resolve(parent) if parent else ''}/{last}")

    def realpath(self, path: str) -> str:
        """Where the kernel keeps a PCI function: its ancestors are the bridges above it."""
        resolved = self.resolve(path)
        table = self.meta.get("realpath")
        real = table.get(resolved) if isinstance(table, dict) else None
        return real if isinstance(real, str) else resolved

    def sight_of(self, path: str) -> tuple[Sight, str]:
        """Why a path that has no content has none."""
        resolved = self.resolve(path)
        above, along = self._above(resolved), self._above(path)
        if (above.covered or along.covered) and not above.left_out and not along.left_out:
            return Sight.ABSENT, "ENOENT"
        return Sight.NOT_COLLECTED, "not in the snapshot"

    def _above(self, path: str) -> _Above:
        """What the snapshot says about a path and the folders above it, remembered folder by folder."""
        known = self._known_above.get(path)
        if known is None:
            here = self._covered.get(path)
            error = self._errors.get(path, "")
            above = self._above(path.rpartition("/")[0]) if path else _NOTHING_ABOVE
            known = self._known_above[path] = _Above(
                covered=above.covered or here is True,
                left_out=above.left_out or here is False,
                refused=above.refused if error in ("", "ENOENT") else error,
            )
        return known

    def read(self, path: str, *, limit: int = READ_BYTES_MAX, sample: int = 0) -> Reading:
        key = (path, sample)
        reading = self._readings.get(key)
        if reading is None:
            reading = self._readings[key] = self._read(path, sample)
        return reading if len(reading.text) <= limit else Reading(reading.text[:limit])

    def _read(self, path: str, sample: int) -> Reading:
        resolved = self.resolve(path)
        error = self._errors.get(resolved) or self._errors.get(path)
        if error is not None:
            return Reading("", Sight.ABSENT if error == "ENOENT" else Sight.UNREADABLE, error)
        if sample and (path in self._gone or resolved in self._gone):
            return Reading("", Sight.ABSENT, "gone in the second sample")
        data = self.files.get("root.t1" + resolved) if sample else None
        if data is None:
            data = self.files.get("root" + resolved)
        if data is not None:
            return Reading(data.decode("utf-8", "replace"))
        if refused := self._above(resolved).refused:
            return Reading("", Sight.UNREADABLE, refused)
        return Reading("", *self.sight_of(path))

    def listdir(self, path: str) -> Listing:
        resolved = self.resolve(path)
        error = self._errors.get(resolved) or self._errors.get(path)
        if error is not None:
            return Listing((), Sight.ABSENT if error == "ENOENT" else Sight.UNREADABLE, error)
        names = {child.rpartition("/")[2] for child in self._children.get(resolved, ())}
        found = self.files.children("root" + resolved)
        names.update(found or ())
        if found is not None or names:
            return Listing(tuple(sorted(names)))
        return Listing((), *self.sight_of(path))

    def commands(self) -> Iterable[tuple[str, ...]]:
        """The argument lists of every command that was tried."""
        return self._argv.keys()

    def run(self, *argv: str, timeout_s: float = COMMAND_TIMEOUT_S, sample: int = 0) -> CommandResult:
        """The saved output of a command; ``timeout_s`` is for hosts that really run it."""
        name = self._argv.get(argv)
        if name is None:
            return CommandResult(argv=argv, sight=Sight.NOT_COLLECTED, detail="not in the snapshot")
        entry = self.meta["cmd"][name]
        if entry.get("missing"):
            return CommandResult(argv=argv, sight=Sight.NO_TOOL, detail=f"{argv[0]} is not installed")
        if entry.get("timed_out"):
            return CommandResult(argv=argv, sight=Sight.TIMED_OUT, detail="timed out when collected")
        data = self.files.get(f"cmd.t1/{name}") if sample else None
        if data is None:
            data = self.files.get(f"cmd/{name}")
        stderr = self.files.get(f"cmd/{name.removesuffix('.txt')}.err.txt") or b""
        code = entry.get("rc")
        if data is None and not stderr and code in (None, 0):
            return CommandResult(
                argv=argv, sight=Sight.NOT_COLLECTED, detail=f"cmd/{name} is not in the snapshot"
            )
        return CommandResult(
            argv=argv,
            stdout=(data or b"").decode("utf-8", "replace"),
            stderr=stderr.decode("utf-8", "replace"),
            return_code=code if isinstance(code, int) else None,
        )


def _string_map(meta: dict[str, Any], key: str) -> dict[str, str]:
    value = meta.get(key, {})
    if not isinstance(value, dict) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in value.items()
    ):
        raise ConfigError(f'meta.json: "{key}" is not an object of strings', fix="collect the snapshot again")
    return value


def _strings(meta: dict[str, Any], key: str) -> tuple[str, ...]:
    value = meta.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f'meta.json: "{key}" is not a list of strings', fix="collect the snapshot again")
    return tuple(value)
