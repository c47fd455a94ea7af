"""
The files of a group on this machine.

::

    <state-dir>/groups/<group>/
        group.yaml      members: who they are, where they listen, which processes they are
        secret          64 hex digits, mode 0600
        lock            flock(2) of whoever changes the group
        configs/*.yaml  what each member was started with
        logs/*.log      what it wrote
        <member>/       its own state
        seen/           empty files: when a process was first seen ended or stopped
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvops.errors import ConfigError, Refused, Unreachable, UsageError
from kvops.files import load_yaml, take_lock, write_private, write_yaml
from kvops.fleet import preflight
from kvops.fleet.group_state import STATE_SCHEMA, GroupState, Member
from kvops.timestamps import rfc3339

DEFAULT_GROUP: Final = "local"
LOCK_TIMEOUT_S: Final = 15.0
RUNTIME_PATH_BYTES_MAX: Final = (
    70  # leaves room for a member's name under the 107 bytes of a Unix socket's path
)


class GroupFolder:
    """What is kept of one group under one state folder. Who changes it holds its lock."""

    def __init__(self, state_dir: Path, name: str) -> None:
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
        self.kvops = "kvops" if name == DEFAULT_GROUP else f"kvops -g {name}"  # how hints begin

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
                fix=f"start it: {self.kvops} start, or name another with -g",
            )
        return state

    def changed(self) -> str | None:
        """When what is written down last changed, as RFC 3339 in UTC."""
        try:
            return rfc3339(datetime.fromtimestamp(self.state_file.stat().st_mtime, UTC))
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
            return rfc3339(datetime.fromtimestamp(mark.stat().st_mtime, UTC))
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
            if not take_lock(handle, timeout_s=timeout_s):
                holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise Refused(
                    f"another command changes group {self.name} (pid {holder})",
                    fix="wait for it to end, then try again",
                )
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(handle)  # releases the lock

    def write(self, state: GroupState) -> None:
        """Replace what is written down."""
        write_yaml(self.state_file, state)

    def forget_seen(self, member: str) -> None:
        """Its next process has not been seen in trouble yet."""
        for mark in self._seen.glob(f"{member}.*"):
            mark.unlink(missing_ok=True)

    def member_folder(self, name: str) -> Path:
        """Where a member keeps its own state; made, mode 0700."""
        folder = (self.folder / name).absolute()
        preflight.check_folder(folder)
        return folder

    def prepare(self) -> None:
        """
        Make what is missing before members can start: folders, mode 0700, and the secret.

        Raises:
            ConfigError: A folder cannot be made, or is not ours alone.
        """
        for folder in (self.folder, self.folder / "configs", self.folder / "logs"):
            preflight.check_folder(folder)
        runtime = self.runtime_dir()
        try:
            _make_private(runtime)
        except FileNotFoundError:
            _make_private(runtime)  # another group's end had just taken the parent away, empty as it was
        if not self.secret_file.exists():
            write_private(self.secret_file, os.urandom(32).hex().encode() + b"\n")

    def remove_sockets(self) -> None:
        """After the last member's end: nobody listens on them any more."""
        runtime = self.runtime_dir()
        if _is_own_folder(runtime):
            shutil.rmtree(runtime, ignore_errors=True)
            with contextlib.suppress(OSError):  # other groups have theirs there
                runtime.parent.rmdir()


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


def _make_private(runtime: Path) -> None:
    """
    Make a folder for sockets and its parent, mode 0700.

    Raises:
        ConfigError: They cannot be made, or are not ours alone.
        FileNotFoundError: The parent was taken away meanwhile.
    """
    for folder in (runtime.parent, runtime):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot make {folder}: {error.strerror}", fix="set XDG_RUNTIME_DIR") from error
        if not _is_own_folder(folder):
            raise ConfigError(
                f"{folder} is not a private folder of yours",
                fix="remove it, or set XDG_RUNTIME_DIR to a folder that only you can enter",
            )
