"""
Small files we keep: YAML decoded into typed structs, replaced in one step, private to their owner.

Whatever is more than a path is imported by what needs it: every command asks this file where its state
lies, and most never read or write one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvops.errors import ConfigError

if TYPE_CHECKING:
    import msgspec

FILE_BYTES_MAX: Final = 1 << 20  # of one YAML file; a larger one is not a configuration
LOCK_LOOK_S: Final = 0.02  # between two looks whether a lock is free

Struct = TypeVar("Struct", bound="msgspec.Struct")


def default_state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """``$KVOPS_STATE_DIR``, else ``$XDG_STATE_HOME/kvops``, else ``~/.local/state/kvops``."""
    if env.get("KVOPS_STATE_DIR"):
        return Path(env["KVOPS_STATE_DIR"]).expanduser().absolute()
    home = env.get("XDG_STATE_HOME", "")
    # The XDG Base Directory Specification: a relative path is invalid and to be ignored.
    return (Path(home) if home.startswith("/") else Path("~/.local/state").expanduser()) / "kvops"


def read_small(
    path: Path,
    *,
    too_large: str,
    unreadable: str = "check the path and its permissions",
    bytes_max: int = FILE_BYTES_MAX,
) -> bytes:
    """
    Read a file that somebody named.

    Raises:
        ConfigError: It cannot be read, or is larger; ``unreadable`` and ``too_large`` say what to do then.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix=unreadable) from error
    if len(raw) > bytes_max:
        raise ConfigError(f"{path} is larger than {bytes_max} B", fix=too_large)
    return raw


def load_yaml(path: Path, kind: type[Struct]) -> Struct:
    """
    Read a YAML file into ``kind``.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or does not fit; the message names file and place.
    """
    return parse_yaml(read_small(path, too_large="name a configuration file"), kind, source=str(path))


def parse_yaml(raw: bytes, kind: type[Struct], *, source: str) -> Struct:
    """
    Decode YAML text into ``kind``; ``source`` names it in errors.

    Raises:
        ConfigError: The text is not YAML or does not fit.
    """
    import msgspec

    try:
        return msgspec.convert(yaml_data(raw, source=source), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}", fix="correct the file") from error


def yaml_data(raw: bytes | str, *, source: str) -> Any:
    """
    What YAML text says, in dicts, lists and scalars; ``source`` names it in errors.

    Raises:
        ConfigError: The text is not YAML.
    """
    import yaml

    try:
        # The C loader where PyYAML was built with it: four times as fast, same grammar.
        return yaml.load(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (a safe loader)
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{place} is not YAML: {problem}", fix="correct the file") from error


def dump_yaml(value: msgspec.Struct | dict[str, Any]) -> str:
    """The YAML text that ``load_yaml`` reads back to an equal value."""
    import msgspec
    import yaml

    plain = msgspec.to_builtins(value)
    return yaml.dump(
        plain, Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


def write_private(path: Path, data: bytes) -> None:
    """
    Replace a file, readable by its owner alone, in one step: a reader sees the old or the new one, whole.

    Raises:
        ConfigError: It cannot be written.
    """
    import tempfile

    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", dir=path.parent
        )  # mkstemp makes it 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}",
            fix="make its folder writable, or name another with --state-dir",
        ) from error


def write_yaml(path: Path, value: msgspec.Struct | dict[str, Any]) -> None:
    """Write ``value`` as ``load_yaml`` reads it; see ``write_private``."""
    write_private(path, dump_yaml(value).encode())


def read_secret(path: Path) -> bytes:
    """
    The group's secret: 32 bytes, kept as 64 hex digits in a file that only its owner may read.

    Raises:
        ConfigError: The file cannot be read, is open to others, or holds something else.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(1024)
    except OSError as error:
        raise ConfigError(
            f"cannot read the secret {path}: {error.strerror}", fix="run as the group's owner"
        ) from error
    if mode & 0o077:
        raise ConfigError(
            f"others may read the secret {path} (mode {mode & 0o777:04o})", fix=f"chmod 600 {path}"
        )
    try:
        secret = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise ConfigError(
            f"{path} does not hold 64 hex digits", fix="copy the secret from the group's first host again"
        )
    return secret


def take_lock(handle: int, *, timeout_s: float) -> bool:
    """Take the flock(2) of an open file, which has no time-out of its own; whether it was free in time."""
    import fcntl
    import threading
    import time

    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        pause.wait(LOCK_LOOK_S)
