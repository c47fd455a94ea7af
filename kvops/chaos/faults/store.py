"""Faults of what a store holds: bytes that change under its objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from kvops.chaos.faults.common import control_is_well, must, not_here, not_root
from kvops.chaos.model import ALL_TRANSPORTS, Evidence, Here, Layer, Signal, Transport, fault
from kvops.chaos.steps import RestartRole, RestoreMemory, UndoStep
from kvops.chaos.targets import Target, fellows
from kvops.errors import FaultNotApplied, KvopsError
from kvops.host import Host

if TYPE_CHECKING:
    from kvops.store.client import Pool

OBJECTS_MAX: Final = 4096
HEADER_BYTES: Final = 64  # before each object's payload: DESIGN.md §3
READ_BACK_MAX: Final = 8  # objects that the proof reads through a client
CLIENT_DEADLINE_MS: Final = 2_000


@fault("store.wrong_bytes")
@dataclass(frozen=True, slots=True, kw_only=True)
class WrongBytes:
    """Flip one byte in the payload of some of a store's objects, in its memory: what a reader gets fails its digest."""

    target: Target
    control: Target
    objects: int = 256
    namespace: str = ""  # hex digits, of the keys that the proof reads back
    seen: dict[str, list[tuple[str, int, int, int]]] = field(default_factory=dict, compare=False, repr=False)

    name: ClassVar[str]
    layer: ClassVar = Layer.DATA
    transports: ClassVar[frozenset[Transport]] = ALL_TRANSPORTS
    certifies: ClassVar[str] = "a store that answers wrong bytes: never a hit, on any transport"
    does_not_certify: ClassVar[str] = "bytes that change on their way (net.corrupt), headers that lie"
    conflicts: ClassVar[frozenset[str]] = frozenset({"store.", "process.kill", "process.restart", "rolling."})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.objects <= OBJECTS_MAX:
            raise ValueError(f"objects must be 1 to {OBJECTS_MAX}")
        if "spots" not in self.seen:
            self.seen["spots"] = self._choose() if self.target.role == "store" else []

    @classmethod
    def here(cls) -> Here:
        return Here("/proc/<pid>/mem", not_root("writing another process's memory"))

    def unavailable(self, host: Host) -> str | None:
        if self.target.role != "store" or not isinstance(self.target.restart, RestartRole):
            return f"{self.target.name} is no store of a local group"
        trouble = self.here().missing or not_here(host, self.target)
        if trouble is None and not self.seen["spots"]:
            return f"{self.target.name} holds no objects, or they could not be listed"
        return trouble

    @contextmanager
    def _client(self) -> Iterator[Pool]:
        import kvops
        from kvops.fleet.local import LocalGroup
        from kvops.store.keys import NAMESPACE_DEFAULT

        restart = self.target.restart
        assert isinstance(restart, RestartRole)
        group = LocalGroup(Path(restart.state_dir), restart.group)
        masters = [one.addresses["listen"] for one in fellows(self.target, "master")]
        namespace = bytes.fromhex(self.namespace) if self.namespace else NAMESPACE_DEFAULT
        with kvops.connect(
            masters,
            group=restart.group,
            secret_file=group.secret_file,
            deadline_ms=CLIENT_DEADLINE_MS,
            host="kvops-chaos",
            namespace=namespace,
        ) as pool:
            yield pool

    def _choose(self) -> list[tuple[str, int, int, int]]:
        """Key, address, byte before and after, of objects that lie there now."""
        if not isinstance(self.target.restart, RestartRole) or os.geteuid() != 0:
            return []
        spots = []
        try:
            start, end, shift = _segment(self.target.leader.pid)
            with (
                self._client() as pool,
                Path(f"/proc/{self.target.leader.pid}/mem").open("rb", buffering=0) as memory,
            ):
                rows, _ = pool.ls(store=self.target.name, limit=self.objects)
                for row in rows:
                    stat = pool.stat(row["key"])
                    if stat is None or stat["store"] != self.target.name or not stat["size_bytes"]:
                        continue
                    address = start + stat["offset"] - shift + HEADER_BYTES + stat["size_bytes"] // 2
                    if not start <= address < end:
                        continue
                    memory.seek(address)
                    before = memory.read(1)[0]
                    spots.append((row["key"], address, before, before ^ 0x01))
        except (OSError, KvopsError, IndexError):
            return []  # unavailable() says so
        return spots

    def undo(self) -> list[UndoStep]:
        process = self.target.leader
        return [
            RestoreMemory(
                pid=process.pid,
                started_ticks=process.started_ticks,
                boot_id=process.boot_id,
                spots=[(address, before, after) for _, address, before, after in self.seen["spots"]],
            )
        ]

    def inject(self, host: Host) -> None:
        with Path(f"/proc/{self.target.leader.pid}/mem").open("r+b", buffering=0) as memory:
            for _, address, before, after in self.seen["spots"]:
                memory.seek(address)
                if memory.read(1)[0] == before:
                    memory.seek(address)
                    memory.write(bytes([after]))

    def verify(self, host: Host) -> Evidence:
        start, _, shift = _segment(self.target.leader.pid)
        spots = self.seen["spots"]
        changed = 0
        with _segment_file(self.target.leader.pid).open("rb", buffering=0) as file:
            for _, address, _, after in spots:
                file.seek(address - start + shift)
                changed += file.read(1) == bytes([after])
        must(changed, "no byte of its segment is changed")
        wrong: list[str] = []
        with self._client() as pool:
            for key, *_ in spots[:READ_BACK_MAX]:
                buffer = bytearray((pool.stat(key) or {}).get("size_bytes", 0))
                outcome = pool.batch_get_into([key], [memoryview(buffer)])[0]
                wrong.append(str(outcome.reason))
            elsewhere, _ = (
                pool.ls(store=self.control.name, limit=READ_BACK_MAX)
                if self.control.role == "store"
                else ([], None)
            )
            well = [
                str(pool.batch_get_into([row["key"]], [bytearray(row["size_bytes"])])[0].reason)
                for row in elsewhere
            ]
        must("CORRUPT" in wrong, f"a client read {', '.join(wrong)}")
        must("CORRUPT" not in well, f"objects of {self.control.name} are wrong, too")
        control = control_is_well(self.control)
        return Evidence(
            signals=(
                Signal("the segment's file", f"{changed} of {len(spots)} bytes changed"),
                Signal("a client's reads", f"{wrong.count('CORRUPT')} of {len(wrong)} CORRUPT"),
            ),
            control=Signal(f"reads of {self.control.name}", ", ".join(well)) if well else control,
        )


def _segment(pid: int) -> tuple[int, int, int]:
    """
    Where a store's segment is mapped: first address, end, offset in its file.

    Raises:
        FaultNotApplied: The process has none.
    """
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:kvops-" in line:
                words = line.split()
                start, _, end = words[0].partition("-")
                return int(start, 16), int(end, 16), int(words[2], 16)
    except OSError as error:
        raise FaultNotApplied(f"pid {pid} has ended, or is not ours to see", fix="run as root") from error
    raise FaultNotApplied(f"pid {pid} has no segment mapped", fix="is it a store?")


def _segment_file(pid: int) -> Path:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(path.readlink()).startswith("/memfd:kvops-"):
                return path
        except OSError:
            continue  # closed meanwhile
    raise FaultNotApplied(f"pid {pid} has no segment open", fix="is it a store?")
