"""
Configuration of one master or store process, as ``kvops serve --config F`` reads it.

The files are YAML. Unknown keys are refused, so that a misspelt setting cannot be silently ignored. Paths are
absolute: a daemon's working directory is ``/``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvops.addresses import split_address
from kvops.errors import UsageError
from kvops.files import dump_yaml, load_yaml, parse_yaml, read_secret, write_private, write_yaml
from kvops.limits import ETCD_TTL_S_MAX, MIB
from kvops.net.etcd_query import parse_masters
from kvops.store.model import PlacementPolicy
from kvops.store.topology import HUGE_PAGE_BYTES

__all__ = [
    "MasterConfig",
    "StoreConfig",
    "dump_yaml",
    "load_yaml",
    "parse_yaml",
    "read_secret",
    "write_private",
    "write_yaml",
]

UNIX_PATH_BYTES_MAX: Final = 107  # sun_path of struct sockaddr_un is 108 bytes with its NUL: unix(7)
SEGMENT_SIZE_BYTES_MIN: Final = MIB
SEGMENT_SIZE_BYTES_MAX: Final = 1 << 46  # the allocator's
SEGMENT_ALIGN_BYTES: Final = 4096  # a segment is whole pages
TRANSPORTS: Final = ("shm", "tcp")

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
"""A group, member or host: what may stand in a path, a URL and a metric label without quoting."""


def read_password(path: str) -> str:
    """
    The first line of a password file; "" without one.

    Raises:
        UsageError: It cannot be read.
    """
    if not path:
        return ""
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise UsageError(
            f"the password in {path} cannot be read: {error}", fix="see its mode and content"
        ) from None


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
    # A store that joins empty takes at most twice its share of new objects for this long; 0: all it can.
    ramp_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 60_000
    objects_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 28)] = 16_000_000  # slots are 28-bit in the index
    etcd: list[str] = []  # host:port; with them the master is one of several, and etcd says which one leads
    etcd_ttl_s: Annotated[int, msgspec.Meta(ge=1, le=ETCD_TTL_S_MAX)] = 2  # of the leader's lease
    etcd_ca: str = ""  # "": without TLS
    etcd_cert: str = ""
    etcd_key: str = ""
    etcd_user: str = ""
    etcd_password_file: str = ""

    def _addresses(self) -> dict[str, str]:
        return {"listen": self.listen, "control": self.control, "http": self.http}

    def __post_init__(self) -> None:
        """Check the addresses, then how the watermarks relate."""
        _ProcessConfig.__post_init__(self)
        for endpoint in self.etcd:
            try:
                split_address(endpoint)
            except UsageError as error:
                raise ValueError(f"etcd: {error.what}") from None
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
    masters: list[str]  # wire addresses, host:port; or etcd://host:port,host:port/group
    segment_size_bytes: Annotated[int, msgspec.Meta(ge=SEGMENT_SIZE_BYTES_MIN, le=SEGMENT_SIZE_BYTES_MAX)] = (
        1 << 30
    )
    transports: list[str] = msgspec.field(default_factory=lambda: list(TRANSPORTS))
    # What a stopping store gives its readers and its master.
    stop_grace_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 5_000
    numa_bind: bool = False  # run on numa_node's CPUs, with memory from there alone
    huge_page_bytes: int = 0  # 0: the kernel's usual pages

    def __post_init__(self) -> None:
        """Check the addresses, the segment and the transports."""
        _ProcessConfig.__post_init__(self)
        if not self.masters:
            raise ValueError("masters: name at least one")
        try:
            parse_masters(self.masters)
        except UsageError as error:
            raise ValueError(f"masters: {error.what}") from None
        if self.segment_size_bytes % SEGMENT_ALIGN_BYTES:
            raise ValueError(f"segment_size_bytes: not a multiple of {SEGMENT_ALIGN_BYTES}")
        if self.huge_page_bytes not in (0, *HUGE_PAGE_BYTES):
            raise ValueError(f"huge_page_bytes: not one of 0, {', '.join(map(str, HUGE_PAGE_BYTES))}")
        if self.huge_page_bytes and self.segment_size_bytes % self.huge_page_bytes:
            raise ValueError(f"segment_size_bytes: not a multiple of huge_page_bytes {self.huge_page_bytes}")
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown or not self.transports:
            raise ValueError(
                f"transports: {', '.join(unknown) or 'none'} is not one of {', '.join(TRANSPORTS)}"
            )
