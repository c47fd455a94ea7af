"""
Configuration of one master or store process, as ``kvops serve --config F`` reads it.

The files are YAML. Unknown keys are refused, so that a misspelt setting cannot be silently ignored. Paths are
absolute: a daemon's working directory is ``/``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import yaml

from kvops.errors import ConfigError, UsageError
from kvops.store.limits import MIB
from kvops.store.model import PlacementPolicy

CONFIG_BYTES_MAX: Final = MIB  # of one file; a larger one is not a configuration
UNIX_PATH_BYTES_MAX: Final = 107  # sun_path of struct sockaddr_un is 108 bytes with its NUL: unix(7)
SEGMENT_SIZE_BYTES_MIN: Final = MIB
SEGMENT_ALIGN_BYTES: Final = 4096  # a segment is whole pages
TRANSPORTS: Final = ("shm", "tcp")

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
"""A group, member or host: what may stand in a path, a URL and a metric label without quoting."""


def split_address(text: str) -> tuple[str, int]:
    """
    Host and port of ``host:port``, ``[v6]:port``; port 0 asks the kernel for a free one.

    Raises:
        UsageError: The text is not an address.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # a bare IPv6 address: where its port begins cannot be told
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise UsageError(
            f"{text!r} is not an address", fix="write host:port, such as 127.0.0.1:7800 or [::1]:7800"
        )
    return host, int(port)


class _ProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every process of a group needs to know."""

    group: Name
    secret_file: str
    state_dir: str  # this process's own: journal and term of a master, crash notes of a store
    listen: str = "127.0.0.1:0"  # the wire, by tcp
    unix_path: str = ""  # the wire, by Unix socket; "" for none
    http: str = "127.0.0.1:0"  # /metrics, /ready, /health
    log_file: str = ""  # "" for stderr

    def _addresses(self) -> dict[str, str]:
        return {"listen": self.listen, "http": self.http}

    def __post_init__(self) -> None:
        """Refuse what the field types cannot express; msgspec reports a ValueError as its own error."""
        for field, address in self._addresses().items():
            try:
                split_address(address)
            except UsageError as error:
                raise ValueError(f"{field}: {error.what}") from None
        for field in ("secret_file", "state_dir", "unix_path", "log_file"):
            path: str = getattr(self, field)
            if path and not path.startswith("/"):
                raise ValueError(f"{field}: {path!r} is not an absolute path")
        if len(os.fsencode(self.unix_path)) > UNIX_PATH_BYTES_MAX:
            raise ValueError(
                f"unix_path: longer than {UNIX_PATH_BYTES_MAX} bytes, which no Unix socket can be"
            )


class MasterConfig(_ProcessConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One master."""

    name: Name = "master-0"
    host: Name = "host-0"  # logical: placement and failure domains go by it
    control: str = "127.0.0.1:0"  # gRPC
    placement: PlacementPolicy = PlacementPolicy.LOCAL_FIRST
    eviction_high_watermark: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.95  # share of the pool
    eviction_low_watermark: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.93
    objects_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 28)] = 16_000_000  # slots are 28-bit in the index

    def _addresses(self) -> dict[str, str]:
        return {"listen": self.listen, "control": self.control, "http": self.http}

    def __post_init__(self) -> None:
        """Check the addresses, then how the watermarks relate."""
        _ProcessConfig.__post_init__(self)
        if self.eviction_low_watermark >= self.eviction_high_watermark:
            raise ValueError(
                f"eviction_low_watermark {self.eviction_low_watermark} is not below "
                f"eviction_high_watermark {self.eviction_high_watermark}"
            )


class StoreConfig(_ProcessConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One store node: one memory segment on one NUMA node."""

    name: Name = "store-0"
    host: Name = "host-0"  # logical: placement and failure domains go by it
    numa_node: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    masters: list[str]  # wire addresses, host:port
    segment_size_bytes: Annotated[int, msgspec.Meta(ge=SEGMENT_SIZE_BYTES_MIN)] = 1 << 30
    transports: list[str] = msgspec.field(default_factory=lambda: list(TRANSPORTS))

    def __post_init__(self) -> None:
        """Check the addresses, the segment and the transports."""
        _ProcessConfig.__post_init__(self)
        if not self.masters:
            raise ValueError("masters: name at least one")
        for address in self.masters:
            try:
                split_address(address)
            except UsageError as error:
                raise ValueError(f"masters: {error.what}") from None
        if self.segment_size_bytes % SEGMENT_ALIGN_BYTES:
            raise ValueError(f"segment_size_bytes: not a multiple of {SEGMENT_ALIGN_BYTES}")
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown or not self.transports:
            raise ValueError(
                f"transports: {', '.join(unknown) or 'none'} is not one of {', '.join(TRANSPORTS)}"
            )


Struct = TypeVar("Struct", bound=msgspec.Struct)


def load_yaml(path: Path, kind: type[Struct]) -> Struct:
    """
    Read a YAML file into ``kind``.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or does not fit; the message names file and place.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", fix="check the path and its permissions"
        ) from error
    if len(raw) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {CONFIG_BYTES_MAX} B", fix="name a configuration file")
    return parse_yaml(raw, kind, source=str(path))


def parse_yaml(raw: bytes, kind: type[Struct], *, source: str) -> Struct:
    """
    Decode YAML text into ``kind``; ``source`` names it in errors.

    Raises:
        ConfigError: The text is not YAML or does not fit.
    """
    try:
        # The C loader where PyYAML was built with it: four times as fast, same grammar.
        data = yaml.load(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (a safe loader)
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{place} is not YAML: {problem}", fix="correct the file") from error
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}", fix="correct the file") from error


def dump_yaml(value: msgspec.Struct) -> str:
    """The YAML text that ``load_yaml`` reads back to an equal value."""
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


def write_yaml(path: Path, value: msgspec.Struct) -> None:
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
